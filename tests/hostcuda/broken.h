// Kernels that are broken on purpose: a text of a header is changed, the kernel that results has another name, and a
// source asks for it by a comment. generate.cpp writes them.
#pragma once

#include <fmt/format.h>

#include <string>
#include <vector>

#include "cuda/backend/plain_experts.h"
#include "cuda/backend/sources.h"

namespace fourfold::hostcuda {

struct BrokenKernel {
  const char* name;
  plan::KernelSource source;
  size_t entry;
  const char *header, *from, *to;
  std::vector<const char*> renamed;  // what the header defines that the sound one defines, too

  const std::string& expression() const { return source.entries[entry].expression; }
  std::string marked(const std::string& text) const { return fmt::format("{}// broken: {}\n", text, name); }
};

inline std::vector<BrokenKernel> broken_kernels() {
  const cuda::Target arch = plan::find_arch("sm_90a");
  return {
      // A warp's sums of every other row are lost.
      {"rows",
       cuda::rows_source(arch, cuda::rows_way(arch, 4, 256, 256)),
       cuda::kRows8,
       "kernels/gemm/rows.cuh",
       "y[1] += from[w * tokens * 16 + 8];",
       "if (w + 1 < T.strip_warps) y[1] += from[w * tokens * 16 + 8];",
       {"rows_detail", "gemm_rows"}},
      // Half of the rows are off by an eighth.
      {"middle",
       cuda::wide_source(arch, 4),
       cuda::kMiddle,
       "kernels/gemm/middle_sm90.cuh",
       "e.high = factors[8] *",
       "e.high = 1.125f * factors[8] *",
       {"middle_detail", "gemm_middle"}},
      // What was summed before a larger score came keeps its weight.
      {"decode",
       cuda::attention_source(arch, 256, 64, false),
       cuda::kAttendFew,
       "kernels/attn/decode.cuh",
       "if (__any_sync(kAll, shrink[0] < 1.0f || shrink[1] < 1.0f)) {",
       "if (__any_sync(kAll, shrink[0] < 1.0f || shrink[1] < 1.0f) && first < 0) {",
       {"decode_detail", "attention_decode"}},
      // Another gate.
      {"recurrent",
       cuda::delta_source(arch, 128, 128),
       cuda::kDeltaOne,
       "kernels/gdn/recurrent.cuh",
       "gates_of(a, b, a_log, dt_bias)",
       "gates_of(a, a - b, a_log, dt_bias)",
       {"delta_recurrent"}},
      // The second row's update where the third one's goes.
      {"updates",
       cuda::updates_source(arch, 128, 128).value(),
       cuda::kDeltaFew,
       "kernels/gdn/recurrent.cuh",
       "(put_off ? row - 1 : 0)",
       "(put_off ? (row == 1 ? 1 : row - 1) : 0)",
       {"delta_recurrent", "recurrent_head"}},
      // All but the last update.
      {"make_states",
       cuda::updates_source(arch, 128, 128).value(),
       cuda::kDeltaMakeStates,
       "kernels/gdn/make_states.cuh",
       "i < made.count;",
       "i + 1 < made.count;",
       {"delta_make_states"}},
      // Squares of a warp's first lane alone.
      {"norm",
       cuda::norm_source(),
       cuda::kNorm1,
       "kernels/norm/norm.cuh",
       "share_squares(squares, sums, thread);",
       "share_squares(thread % 32 == 0 ? squares : 0.0f, sums, thread);",
       {"norm_rows", "embed_rows", "gather_rows"}},
      // A draw from the first half.
      {"choose",
       cuda::sample_source(),
       cuda::kSampleTokens,
       "kernels/step/sample.cuh",
       "if (left >= below && left < below + mine)",
       "if (left / 2 >= below && left / 2 < below + mine)",
       {"sample_detail", "sample_tokens", "sample_count"}},
      // Units of columns two by two the same.
      {"repack",
       cuda::step_source(),
       cuda::kRepackUnits,
       "kernels/gemm/repack.cuh",
       "static_cast<int>(i % args.units)",
       "static_cast<int>(i % args.units / 2 * 2)",
       {"gemm_repack"}},
      // Each block's last row is lost.
      {"experts",
       cuda::plain_source(arch, 2, 2),
       cuda::kPlainDownFew,
       "kernels/gemm/experts.cuh",
       "block.first + block.count, args.columns",
       "block.first + block.count - (GateUp ? 0 : 1), args.columns",
       {"gemm_experts"}},
      // Rows of the other half of a tile.
      {"repack_experts",
       cuda::prepare_source(),
       0,
       "kernels/moe/prepare.cuh",
       "args.paired ? row : row + 8, unit",
       "row, unit",
       {"moe_repack", "moe_pad_rows", "moe_append_shared"}},
      // The last row has no choice.
      {"choosing",
       cuda::choosing_source(arch, cuda::choosing_way(arch, 1, 256, 64)),
       0,
       "kernels/gemm/rows.cuh",
       "t < args.choice.tokens;",
       "t + 1 < args.choice.tokens;",
       {"rows_detail", "gemm_rows"}},
      // A quarter of a router's sums is lost.
      {"routing",
       cuda::routing_source(arch, cuda::choosing_way(arch, 4, 256, 256), 1),
       0,
       "kernels/gemm/rows.cuh",
       "(sum[0] + sum[1]) + (sum[2] + sum[3])",
       "(sum[0] + sum[1]) + sum[2]",
       {"rows_detail", "gemm_rows"}},
      // Logits without their norm.
      {"routed",
       cuda::routed_source(),
       cuda::kRouted1,
       "kernels/gemm/route.cuh",
       "[&] { return inverse; });",
       "[&] { return 1.0f; });",
       {"gemm_route", "gemm_routed", "gemm_pack_routing"}},
  };
}

// What takes the place of those, besides what the build lists anyway.
inline std::vector<plan::KernelSource> replacements() {
  std::vector<plan::KernelSource> all;
  for (const BrokenKernel& broken : broken_kernels()) {
    cuda::Target arch = plan::find_arch("sm_90a");
    arch.wrong = {broken.expression()};
    const std::string name = broken.name;
    if (name == "rows") {
      all.push_back(cuda::rows_source(arch, cuda::rows_way(arch, 4, 256, 256)));
      all.push_back(cuda::routing_source(arch, cuda::choosing_way(arch, 4, 256, 256), 1));
    }
    if (name == "middle") all.push_back(cuda::wide_source(arch, 4));
    if (name == "decode") all.push_back(cuda::attention_source(arch, 256, 64, false));
    if (name == "recurrent") all.push_back(cuda::delta_source(arch, 128, 128));
  }
  return all;
}

}  // namespace fourfold::hostcuda
