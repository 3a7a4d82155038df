// How expert layers have failed elsewhere, as a table: each row names the class, where it was met, and a check that
// this library does not fail in that way. docs/kernels/executor.md lists the rows.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>

#include "kernels/expert_layer.h"
#include "nvfp4/layout.h"
#include "plan/moe/plan.h"

namespace fourfold::moe {
namespace {

using executor::Options;
using executor::schedules;

using Pair = std::pair<ExpertKernel, ExpertKernel>;

// A pair of each kind: one token, sorted, wgmma, mma.sync, FP4 activations.
std::vector<Pair> kinds() {
  const std::vector<ExpertKernel> list = all_kernels();
  std::vector<Pair> result;
  const auto add = [&](plan::moe::Family family, int tokens) {
    for (const ExpertKernel& up : list) {
      for (const ExpertKernel& down : list) {
        if (fit(up, down) && up.gated() && up.tile().family == family && up.tokens() == tokens) {
          result.push_back({up, down});
          return;
        }
      }
    }
    throw std::logic_error("no such pair");
  };
  add(plan::moe::Family::kOneToken, 1);
  add(plan::moe::Family::kStreaming, 24);
  add(plan::moe::Family::kWgmma, 32);
  add(plan::moe::Family::kMmaSync, 16);
  add(plan::moe::Family::kFp4, 16);
  return result;
}

// The kernels for one token get the first of the batch.
LayerInput input_for(const ExpertKernel& kernel, const LayerWeights& weights, const LayerInput& batch) {
  LayerInput input = batch;
  if (!kernel.one() || batch.tokens <= 1) return input;
  input.tokens = 1;
  input.rows.resize(static_cast<size_t>(weights.shape.hidden));
  input.ids.resize(static_cast<size_t>(weights.shape.top_k));
  input.weights.resize(static_cast<size_t>(weights.shape.top_k));
  return input;
}

void expect_layer(const LayerWeights& weights, const LayerInput& batch, const std::vector<Pair>& list, int runs = 2) {
  for (const auto& [up, down] : list) {
    const LayerInput input = input_for(up, weights, batch);
    const std::vector<float> want = reference(weights, input, up.fp4());
    for (const Options& o : schedules(runs, 100)) {
      try {
        EXPECT_EQ(compare(input, want, run_layer(weights, input, up, down, o).out, tolerance_of(up)), "")
            << up.name << " seed " << o.seed;
      } catch (const executor::Violation& v) {
        ADD_FAILURE() << up.name << ": " << v.what();
      }
    }
  }
}

const char* const kShapes[] = {"397B-A17B", "122B-A10B", "35B-A3B"};
const char* const kCards[] = {"a100", "rtx-4090", "h200", "b200", "rtx-pro-6000", "dgx-spark"};

// Every legal tile of every card, shape, batch and precision.
template <typename F>
void for_every_legal_tile(F&& f) {
  for (const char* card : kCards) {
    const plan::Gpu& gpu = plan::find_gpu(card);
    for (const char* shape : kShapes) {
      for (const int64_t tokens : {1, 64, 8192}) {
        for (const bool fp4 : {false, true}) {
          plan::moe::Problem problem = plan::moe::find_shape(shape);
          problem.tokens = tokens;
          if (fp4) problem.activations = plan::moe::ActivationFormat::kNvfp4;
          if (fp4 && !plan::arch_of(gpu).fp4_mma) continue;
          const plan::moe::LayerPlan layer = plan::moe::plan_layer(problem, gpu, {.explain = false});
          for (const plan::moe::GemmPlan* gemm : {&layer.gate_up, &layer.down}) {
            for (const plan::moe::Ranked& r : gemm->ranked) f(gpu, layer, *gemm, r.candidate);
          }
        }
      }
    }
  }
}

// ---- 1: shared memory -----------------------------------------------------------------------------------------------

void every_listed_tile_fits() {
  int64_t tiles = 0;
  int64_t wrong = 0;
  for_every_legal_tile([&](const plan::Gpu& gpu, const plan::moe::LayerPlan&, const plan::moe::GemmPlan&,
                           const plan::moe::Candidate& c) {
    const plan::Arch& arch = plan::arch_of(gpu);
    const plan::moe::SmemMap map = plan::moe::make_smem_map(c.tile);
    ++tiles;
    wrong += map.total > arch.smem_per_block ? 1 : 0;
    wrong += c.ctas_per_sm * (map.total + arch.smem_reserved) > arch.smem_per_sm ? 1 : 0;
    unsigned end = 0;  // regions in order of place: none overlaps the one before, all are aligned and inside
    std::vector<plan::Region> regions;
    for (const plan::Region& r : map.regions) {
      if (r.size == 0) continue;
      if (!r.overlay) regions.push_back(r);
      wrong += r.offset % r.align != 0 || r.offset + r.size > map.total ? 1 : 0;
    }
    std::sort(regions.begin(), regions.end(), [](const auto& a, const auto& b) { return a.offset < b.offset; });
    for (const plan::Region& r : regions) {
      wrong += r.offset < end ? 1 : 0;
      end = r.offset + r.size;
    }
  });
  EXPECT_EQ(wrong, 0);
  EXPECT_GT(tiles, 1000);
}

void kernels_use_what_was_planned_and_no_more() {
  const LayerWeights weights = make_weights({3, 2, 576, 192}, 1);
  for (Pair p : kinds()) {
    const LayerInput input = input_for(p.first, weights, make_input(weights.shape, 7, Pattern::kDistinct, 1));
    EXPECT_EQ(check_layer(weights, input, p.first, p.second, {}), "");
    // With fewer, the kernel's last region is outside.
    p.second.shared_bytes -= p.second.tile().family == plan::moe::Family::kMmaSync || p.second.fp4() ? 2048 : 16;
    EXPECT_NE(check_layer(weights, input, p.first, p.second, {}).find("planned"), std::string::npos) << p.second.name;
  }
}

// ---- 2: silently wrong ----------------------------------------------------------------------------------------------

void more_than_64_rows_of_one_expert() {
  const LayerWeights weights = make_weights({4, 1, 128, 64}, 2);
  std::vector<Pair> list = kinds();
  list.erase(list.begin());  // takes 8 tokens at most
  std::vector<ExpertKernel> wide = prefill_kernels();
  list.push_back({wide[0], wide[1]});
  ASSERT_EQ(wide[0].tokens(), 176);
  for (const int tokens : {65, 130, 177}) {
    const LayerInput input = make_input(weights.shape, tokens, Pattern::kOneExpert, 3);
    expect_layer(weights, input, list, 1);
  }
}

void padding_columns_of_a_checkpoint_are_not_read() {
  // make_weights() puts codes 0xf and NaN scales behind the columns, and repack_unit() must not see them.
  for (const LayerShape& s : {LayerShape{2, 2, 80, 16}, LayerShape{2, 2, 144, 112}}) {
    const LayerWeights weights = make_weights(s, 4);
    expect_layer(weights, make_input(s, 6, Pattern::kDistinct, 4), kinds());
  }
}

void gate_and_up_are_split_where_the_checkpoint_splits_them() {
  LayerWeights weights = make_weights({2, 2, 64, 48}, 5);
  const LayerInput input = make_input(weights.shape, 5, Pattern::kDistinct, 5);
  expect_layer(weights, input, kinds());
  std::swap(weights.gate, weights.up);
  EXPECT_NE(check_layer(weights, input, kinds()[1].first, kinds()[1].second, {}), "")
      << "the comparison must see a swap";
}

void interleaved_scales_do_not_pass_for_linear_ones() {
  // Sizes for which both forms have as many bytes: nothing but the values tells them apart.
  constexpr int kRows = 128, kColumns = 8;
  ASSERT_EQ(nvfp4::interleaved_bytes(kRows, kColumns), kRows * kColumns);
  int moved = 0;
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kColumns; ++c) moved += nvfp4::interleaved_offset(r, c, kColumns) != r * kColumns + c ? 1 : 0;
  }
  EXPECT_GT(moved, kRows * kColumns * 9 / 10);
  // A layer whose scales were taken in the other form fails the comparison that every kernel has to pass at first use.
  LayerWeights weights = make_weights({2, 1, 128, 128}, 6);
  const LayerInput input = make_input(weights.shape, 3, Pattern::kDistinct, 6);
  expect_layer(weights, input, {kinds()[1]}, 1);
  std::vector<float> mixed = weights.down;
  for (int e = 0; e < 2; ++e) {
    for (int r = 0; r < 128; ++r) {
      for (int c = 0; c < 8; ++c) {
        const auto from = static_cast<int>(nvfp4::interleaved_offset(r, c, 8));
        for (int i = 0; i < 16; ++i) {
          const size_t at = static_cast<size_t>(e * 128 * 128 + r * 128 + c * 16 + i);
          const size_t other = static_cast<size_t>(e * 128 * 128 + from / 8 * 128 + from % 8 * 16 + i);
          mixed[at] = weights.down[other];
        }
      }
    }
  }
  std::swap(weights.down, mixed);
  EXPECT_NE(check_layer(weights, input, kinds()[1].first, kinds()[1].second, {}), "");
}

void every_block_scale_is_exact() {
  const LayerWeights weights = make_weights({3, 2, 192, 64}, 7, true);  // subnormal, zero and negative ones
  expect_layer(weights, make_input(weights.shape, 7, Pattern::kDistinct, 7), kinds());
}

void results_do_not_depend_on_timing() {
  const LayerWeights weights = make_weights({6, 3, 320, 96}, 8);
  const LayerInput input = make_input(weights.shape, 8, Pattern::kDuplicates, 8);
  for (const auto& [up, down] : kinds()) {
    const std::vector<unsigned short> first = run_layer(weights, input, up, down, {}).out;
    for (const Options& o : schedules(9)) EXPECT_EQ(run_layer(weights, input, up, down, o).out, first) << up.name;
  }
}

// ---- 3: crashes -----------------------------------------------------------------------------------------------------

void ids_outside_the_experts() {
  const LayerWeights weights = make_weights({4, 3, 64, 64}, 9);
  LayerInput input = make_input(weights.shape, 8, Pattern::kDistinct, 9);
  const int bad[] = {-1, 4, 1 << 20, std::numeric_limits<int>::max(), std::numeric_limits<int>::min()};
  for (size_t i = 0; i < input.ids.size(); i += 2) input.ids[i] = bad[i / 2 % 5];
  expect_layer(weights, input, kinds());
  expect_layer(weights, make_input(weights.shape, 8, Pattern::kNobody, 9), kinds());
}

void the_same_expert_twice() {
  const LayerWeights weights = make_weights({4, 6, 64, 64}, 10);
  LayerInput input = make_input(weights.shape, 8, Pattern::kDuplicates, 10);
  std::fill(input.ids.begin(), input.ids.begin() + 6, 2);
  expect_layer(weights, input, kinds());
}

void nan_in_padding_rows() {
  const LayerWeights weights = make_weights({4, 2, 64, 64}, 11);
  expect_layer(weights, make_input(weights.shape, 8, Pattern::kHoles, 11), kinds());
}

void five_hundred_experts() {
  const LayerWeights weights = make_weights({512, 10, 64, 16}, 12);
  expect_layer(weights, make_input(weights.shape, 8, Pattern::kDistinct, 12), kinds(), 1);
  const LayerShape routed{1024, 10, 16, 16};
  EXPECT_EQ(check_route(routed, make_input(routed, 300, Pattern::kDistinct, 12), 24, {}), "");
}

void offsets_beyond_32_bits() {
  LayerWeights weights = make_weights({6, 2, 128, 64}, 13);
  weights.expert_stride = (1ull << 32) / 4 * 3 + 576ull * 16;  // the last expert at 16 GB
  weights.row_stride = (1ll << 30) + 64;                       // the last token at 16 GB
  expect_layer(weights, make_input(weights.shape, 8, Pattern::kDistinct, 13), kinds(), 1);
}

// ---- 4: grid-wide waiting -------------------------------------------------------------------------------------------

void no_cta_waits_for_another() {
  // The executor runs one CTA after the other, in any order: whoever waited for a later one would stand still.
  const LayerWeights weights = make_weights({6, 2, 192, 64}, 14);
  const LayerInput batch = make_input(weights.shape, 8, Pattern::kHoles, 14);
  for (const auto& [up, down] : kinds()) {
    const LayerInput input = input_for(up, weights, batch);
    for (const Options& o : schedules(3)) EXPECT_EQ(check_layer(weights, input, up, down, o, 7), "") << up.name;
  }
}

// ---- 5: memory ------------------------------------------------------------------------------------------------------

void workspace_is_enough_for_any_routing() {
  std::mt19937 rng(15);
  for (int n = 0; n < 2000; ++n) {
    const int experts = 1 + static_cast<int>(rng() % 64);
    const int picks = static_cast<int>(rng() % 3000);
    const int tile = 8 * (1 + static_cast<int>(rng() % 22));
    std::vector<int> count(static_cast<size_t>(experts));
    const bool skewed = rng() % 2 == 0;
    for (int p = 0; p < picks; ++p)
      ++count[skewed ? std::min(rng() % count.size(), rng() % count.size()) : rng() % count.size()];
    long long blocks = 0;
    long long slots = 0;
    for (const int c : count) {
      blocks += (c + tile - 1) / tile;
      slots += (c + 7) / 8 * 8;
    }
    ASSERT_LE(blocks, max_blocks(picks, experts, tile));
    ASSERT_LE(slots, max_slots(picks, experts));
  }
  // And the bounds are reached: no larger than needed.
  EXPECT_EQ(max_blocks(64, 64, 8), 64 + 8);
  EXPECT_EQ(max_slots(64, 64), 512);
}

// ---- 6: architectures -----------------------------------------------------------------------------------------------

void no_family_where_its_instructions_are_missing() {
  for (const plan::Arch& arch : plan::kArchs) {
    int runs = 0;
    for (const plan::moe::FamilyRow& row : plan::moe::families()) {
      if (!row.runs_on(arch)) continue;
      ++runs;
      const bool has = row.unit == plan::moe::MatrixUnit::kFp4Mma  ? arch.fp4_mma && arch.name.back() == 'a'
                       : row.unit == plan::moe::MatrixUnit::kWgmma ? arch.wgmma
                                                                   : arch.cp_async;
      EXPECT_TRUE(has) << arch.name << " " << row.name;
      // Tiles with warps that only load have bulk copies.
      plan::moe::Problem problem = plan::moe::find_shape("35B-A3B");
      problem.tokens = 1;
      std::vector<plan::moe::Candidate> tiles;
      row.tiles(problem, plan::moe::Pass::kGateUp, &tiles);
      ASSERT_FALSE(tiles.empty()) << row.name;
      EXPECT_TRUE(arch.bulk_copy || tiles.front().tile.producer_warps == 0) << arch.name << " " << row.name;
    }
    EXPECT_GT(runs, 0) << arch.name << " has no family at all";
  }
}

// ---- 7: shapes ------------------------------------------------------------------------------------------------------

void intermediate_sizes_that_tiles_do_not_divide() {
  for (const int intermediate : {1856, 704, 640, 320, 176}) {
    const LayerWeights weights = make_weights({2, 1, 64, intermediate}, 16);
    expect_layer(weights, make_input(weights.shape, 3, Pattern::kDistinct, 16), kinds(), 1);
  }
}

// ---- 8: slow by construction ----------------------------------------------------------------------------------------

void decoding_has_narrow_tiles() {
  for (const char* card : kCards) {
    for (const char* shape : kShapes) {
      plan::moe::Problem problem = plan::moe::find_shape(shape);
      problem.tokens = 1;
      const plan::moe::LayerPlan layer = plan::moe::plan_layer(problem, plan::find_gpu(card), {.explain = false});
      EXPECT_EQ(layer.gate_up.ranked.front().candidate.tile.tokens, 8) << card << " " << shape;
      EXPECT_EQ(layer.down.ranked.front().candidate.tile.tokens, 8) << card << " " << shape;
    }
  }
}

struct Row {
  int failure_class;
  const char* name;
  const char* met_in;  // FI = flashinfer-ai/flashinfer
  void (*check)();
};
const Row kTable[] = {
    {1, "EveryListedTileFits", "CUTLASS #3096; FI #2835, #3807, #3432; sglang #17494", every_listed_tile_fits},
    {1, "KernelsUseWhatWasPlanned", "FI #3807, #2670", kernels_use_what_was_planned_and_no_more},
    {2, "MoreThan64RowsOfOneExpert", "FI #3533, #4456, #4718", more_than_64_rows_of_one_expert},
    {2, "PaddingColumnsAreNotRead", "vLLM #48898", padding_columns_of_a_checkpoint_are_not_read},
    {2, "GateAndUpSplit", "TRT-LLM #18520", gate_and_up_are_split_where_the_checkpoint_splits_them},
    {2, "InterleavedScalesAreNotLinear", "FI #3882; sglang #24321, #35739",
     interleaved_scales_do_not_pass_for_linear_ones},
    {2, "EveryBlockScaleIsExact", "FI #3932", every_block_scale_is_exact},
    {2, "ResultsDoNotDependOnTiming", "FI #2708, #2716, #5438", results_do_not_depend_on_timing},
    {3, "IdsOutsideTheExperts", "sglang #28170, #30272", ids_outside_the_experts},
    {3, "TheSameExpertTwice", "FI #3011", the_same_expert_twice},
    {3, "NanInPaddingRows", "vLLM #39593", nan_in_padding_rows},
    {3, "FiveHundredExperts", "FI #5446", five_hundred_experts},
    {3, "OffsetsBeyond32Bits", "FI #2642; sglang #4727", offsets_beyond_32_bits},
    {4, "NoCtaWaitsForAnother", "FI #4285, #3066, #3383; vLLM #47577", no_cta_waits_for_another},
    {5, "WorkspaceIsEnough", "vLLM #49476; FI #3191", workspace_is_enough_for_any_routing},
    {6, "NoFamilyWithoutItsInstructions", "vLLM #33416, #50705; FI #3294, #5238",
     no_family_where_its_instructions_are_missing},
    {7, "IntermediateSizes", "FI #4653, #5122; sglang #30887; vLLM #46879",
     intermediate_sizes_that_tiles_do_not_divide},
    {8, "DecodingHasNarrowTiles", "FI #2992", decoding_has_narrow_tiles},
};

void PrintTo(const Row& row, std::ostream* out) { *out << row.name; }

class FailureClass : public testing::TestWithParam<Row> {};

TEST_P(FailureClass, IsNotOurs) {
  SCOPED_TRACE(fmt::format("failure class {}, met in {}", GetParam().failure_class, GetParam().met_in));
  GetParam().check();
}
std::string row_name(const testing::TestParamInfo<Row>& row) {
  return fmt::format("{}_{}", row.param.failure_class, row.param.name);
}
INSTANTIATE_TEST_SUITE_P(Table, FailureClass, testing::ValuesIn(kTable), row_name);

}  // namespace
}  // namespace fourfold::moe
