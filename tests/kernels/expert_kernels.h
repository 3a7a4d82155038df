// The device kernels of the expert layer as the host executor runs them: what stream_kernels() and the like list is
// instantiated.
#pragma once

#include <string>
#include <vector>

#include "kernels/moe/tables.h"
#include "kernels/ptx/tensor_map.h"
#include "plan/moe/plan.h"

namespace fourfold::moe {

// ---- tiles; `rows` are weight rows of all operands together ---------------------------------------------------------

namespace tiles {

using plan::moe::Family;
using plan::moe::Pass;
using plan::moe::TileConfig;
inline constexpr Pass kUp = Pass::kGateUp, kDown = Pass::kDown;

constexpr TileConfig sized(Family family, Pass pass, bool gated, int tokens, int rows, int k, int stages, int warps) {
  TileConfig t = {};
  t.family = family;
  t.pass = pass;
  t.operands = pass == Pass::kGateUp && gated ? 2 : 1;
  t.tokens = t.token_rows = tokens;
  t.n = rows / t.operands;
  t.k = k;
  t.stages = stages;
  t.warps = warps;
  t.scale_vector = 16;
  t.activation_bits = family == Family::kFp4 ? 4 : 16;
  t.swap_ab = t.k_warps = t.stage_warps = 1;
  return t;
}

constexpr TileConfig one_token(Pass pass, int rows, int k, int stages, int warps, int stage_warps, bool gated = true) {
  TileConfig t = sized(Family::kOneToken, pass, gated, 8, rows, k, stages, warps);
  t.token_rows = 1;
  t.producer_warps = pass == Pass::kGateUp ? 2 : 1;
  t.k_warps = warps;
  t.stage_warps = stage_warps;
  return t;
}

// `room`: gate-up: columns that stay; down: rows of a stage.
constexpr TileConfig few_tokens(Pass pass, int rows, int k, int stages, int stage_warps, int room, bool gated = true) {
  TileConfig t = sized(Family::kFewTokens, pass, gated, 8, rows, k, stages, 8);
  t.k_warps = 8;
  t.stage_warps = stage_warps;
  t.producer_warps = pass == Pass::kGateUp ? 3 : stages % 4 == 0 ? 5 : 4;
  (pass == Pass::kGateUp ? t.resident_k : t.token_rows) = room;
  return t;
}

constexpr TileConfig streaming(Pass pass, int tokens, int rows, int k, int stages, int warps, int k_warps,
                               int stage_warps, bool gated = true) {
  TileConfig t = sized(Family::kStreaming, pass, gated, tokens, rows, k, stages, warps);
  t.k_warps = k_warps;
  t.stage_warps = stage_warps;
  t.producer_warps = tokens > 8 ? 4 : 2;
  return t;
}

constexpr TileConfig wgmma(Pass pass, int tokens, int stages, bool gated = true) {
  TileConfig t = sized(Family::kWgmma, pass, gated, tokens, 256, 64, stages, 8);
  t.producer_warps = 4;
  if (pass == Pass::kGateUp) t.epilogue = plan::moe::Epilogue::kDedicated;
  return t;
}

constexpr TileConfig mma_sync(Pass pass, int tokens, int rows, int k, int stages, int warps, bool gated = true) {
  return sized(Family::kMmaSync, pass, gated, tokens, rows, k, stages, warps);
}

constexpr TileConfig fp4(Pass pass, int tokens, int rows, int k, int stages, int warps, bool gated = true) {
  return sized(Family::kFp4, pass, gated, tokens, rows, k, stages, warps);
}

// A tile as the kernels take it.
template <TileConfig T, int Ctas>
struct Of {
  static constexpr TileConfig value = T;
  static constexpr int ctas = Ctas;
};

}  // namespace tiles

// ---- kernels --------------------------------------------------------------------------------------------------------

struct ExpertKernel {
  std::string name;  // "gate-up streaming 8x32x256 s3 w4+2 kw1x2 x2 swap": pass and candidate
  plan::moe::Candidate candidate;
  unsigned shared_bytes;
  void (*run)(const GemmArgs&) = nullptr;
  void (*run_gather)(const ptx::TensorMap& rows, const GemmArgs&) = nullptr;  // swizzled gate-up, instead
  void (*run_fp4)(const Fp4Args&) = nullptr;

  ExpertKernel(const plan::moe::TileConfig& tile, int ctas_per_sm)
      : candidate{tile, ctas_per_sm, 1}, shared_bytes(plan::moe::make_smem_map(tile).total) {
    name = std::string(to_string(tile.pass)) + " " + to_string(candidate) + (gated() ? "" : " relu2");
    if (tile.resident_k > 0) name += " of " + std::to_string(tile.resident_k);
  }

  const plan::moe::TileConfig& tile() const { return candidate.tile; }
  const plan::moe::FamilyRow& row() const { return plan::moe::row_of(tile()); }
  bool gate_up() const { return tile().pass == plan::moe::Pass::kGateUp; }
  bool one() const { return !row().sorted(); }  // one token, or few: choices are not sorted
  bool slots() const { return row().rows == plan::moe::RowForm::kSwizzled; }  // h in the form of tables.h
  bool fp4() const { return row().rows == plan::moe::RowForm::kFp4; }
  bool wide() const { return plan::moe::raises_flags(tile()); }      // raises flags for the next kernel
  bool gated() const { return !gate_up() || tile().operands == 2; }  // gate-up: SwiGLU, otherwise squared ReLU
  // Of a block; unsorted: at most.
  int tokens() const { return row().rows == plan::moe::RowForm::kOneToken ? 1 : tile().tokens; }
  int row_tiles() const { return tile().operands * tile().n / kTileRows; }  // of a CTA
  int ctas() const { return candidate.ctas_per_sm; }
  int threads() const { return (tile().warps + tile().producer_warps) * 32; }
};

std::vector<ExpertKernel> stream_kernels();
std::vector<ExpertKernel> prefill_kernels();
std::vector<ExpertKernel> async_kernels();  // mma.sync and FP4
std::vector<ExpertKernel> all_kernels();
// Whether the two run in one layer.
bool fit(const ExpertKernel& up, const ExpertKernel& down);

// Threads and grid as the launcher chooses them.
struct RouteKernels {
  int one_pass_picks;  // more picks take two kernels
  int one_pass_threads;
  int many_picks;  // of one CTA
  int count_threads;
  int scatter_threads;
  int max_experts;
  void (*one_pass)(const Routing&, const RouteTable&, int tile);
  void (*count)(const Routing&, const RouteTable&, int tile);
  void (*scatter)(const Routing&, const RouteTable&);
  void (*combine)(const float* partial, long long partial_stride, const int* pick_slot, const float* weights, int top_k,
                  int columns, unsigned short* out, long long out_stride);
  int beside_threads;
  int beside_columns;  // of one CTA
  void (*combine_beside)(const float* partial, long long partial_stride, const RouteTable&, const float* weights,
                         int top_k, int columns, unsigned short* out, long long out_stride);
  void (*combine_packed)(const PackedGroup* partial, long long stride, const int* pick_slot, const Routing&,
                         const float* scales, int columns, unsigned short* out, long long out_stride);
};
RouteKernels route_kernels();
// What runs at load, and before a layer whose width no kernel takes; 128 threads.
void repack_kernel(const RepackArgs& args);
void pad_rows_kernel(const unsigned short* from, unsigned short* to, int columns, int padded);
void append_shared_kernel(const int* ids, const float* weights, const float* gates, int tokens, int top_k,
                          int first_slice, int slices, int* all_ids, float* all_weights);
void quantize_kernel(const unsigned short* rows, long long stride, int columns, int units, const float* input_scale,
                     unsigned char* codes, long long code_stride, unsigned char* scales, long long scale_stride);

}  // namespace fourfold::moe
