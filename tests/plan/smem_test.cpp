// The shared-memory ledger: known maps to the byte, and what must hold for every map.
#include "plan/smem.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "plan/arch.h"
#include "plan/plan.h"

namespace fourfold::plan {
namespace {

// ---- known maps, at compile time
// ----------------------------------------------------------------------------------------

// One token: 2 row tiles x 4 units of 576 B in 4 stages; 2 buffers x 2 x 2 x 256 B of partial sums; the choices; 16 B
// of mbarriers per stage, and for two more.
constexpr TileConfig kOne = {.family = Family::kStreaming,
                             .pass = Pass::kGateUp,
                             .tokens = 8,
                             .token_rows = 1,
                             .n = 16,
                             .k = 256,
                             .stages = 4,
                             .warps = 4,
                             .producer_warps = 1,
                             .operands = 2,
                             .scale_vector = 16,
                             .activation_bits = 16,
                             .swap_ab = 1,
                             .k_warps = 2,
                             .stage_warps = 1,
                             .inline_routes = 1,
                             .resident_k = 0,
                             .epilogue = Epilogue::kDirect};
static_assert(unit_bytes(kOne) == 576);
static_assert(smem_stride<kOne, RegionId::kWeights> == 2 * 4 * 576);
static_assert(smem_size<kOne, RegionId::kActivations> == 0);
static_assert(smem_offset<kOne, RegionId::kPartials> == 4 * 4608);
static_assert(smem_size<kOne, RegionId::kPartials> == 2 * 2 * 2 * 256);
static_assert(smem_offset<kOne, RegionId::kRoutes> == 18432 + 2048);
static_assert(smem_offset<kOne, RegionId::kBarriers> == 20480 + 384);  // 272 rounded up to 128
static_assert(smem_total<kOne> == 20864 + 6 * 16);
static_assert(stage_bytes(kOne) == 2 * 4 * 576);

// wgmma: swizzled activations come first, each stage on a multiple of 1024.
constexpr TileConfig kPrefill = {.family = Family::kWgmma,
                                 .pass = Pass::kGateUp,
                                 .tokens = 88,
                                 .token_rows = 88,
                                 .n = 128,
                                 .k = 64,
                                 .stages = 4,
                                 .warps = 8,
                                 .producer_warps = 4,
                                 .operands = 2,
                                 .scale_vector = 16,
                                 .activation_bits = 16,
                                 .swap_ab = 1,
                                 .k_warps = 1,
                                 .stage_warps = 1,
                                 .inline_routes = 0,
                                 .resident_k = 0,
                                 .epilogue = Epilogue::kDirect};
static_assert(smem_offset<kPrefill, RegionId::kActivations> == 0);
static_assert(smem_stride<kPrefill, RegionId::kActivations> == 88 * 128);
static_assert(smem_stride<kPrefill, RegionId::kActivations> % 1024 == 0);
static_assert(smem_offset<kPrefill, RegionId::kWeights> == 4 * 88 * 128);
static_assert(smem_stride<kPrefill, RegionId::kWeights> == 16 * 576);

// FP4: the same units; activations are codes and, apart from them, scales.
constexpr TileConfig kFp4Tile = {.family = Family::kFp4,
                                 .pass = Pass::kDown,
                                 .tokens = 64,
                                 .token_rows = 64,
                                 .n = 128,
                                 .k = 64,
                                 .stages = 3,
                                 .warps = 4,
                                 .producer_warps = 0,
                                 .operands = 1,
                                 .scale_vector = 16,
                                 .activation_bits = 4,
                                 .swap_ab = 1,
                                 .k_warps = 1,
                                 .stage_warps = 1,
                                 .inline_routes = 0,
                                 .resident_k = 0,
                                 .epilogue = Epilogue::kDirect};
static_assert(smem_stride<kFp4Tile, RegionId::kWeights> == 8 * 576);
static_assert(smem_stride<kFp4Tile, RegionId::kActivations> == 64 * (32 + 16));
static_assert(smem_stride<kFp4Tile, RegionId::kActivationScales> == 64 * 4);
static_assert(smem_offset<kFp4Tile, RegionId::kRows> == 3 * (8 * 576 + 64 * 48 + 64 * 4));
static_assert(smem_total<kFp4Tile> == 3 * (8 * 576 + 64 * 48 + 64 * 4) + 2 * 64 * 4);
static_assert(row_warps(kFp4Tile) == 4 && row_warps(kPrefill) == 8);

// ---- scale-factor blocks
// --------------------------------------------------------------------------------------------------

struct ScaleCase {
  int k, vector;
  Family family;
  ScaleBlocks wanted;  // per_row, block, blocks, per_mma, fold
};
constexpr ScaleCase kScaleCases[] = {
    {64, 16, Family::kFp4, {4, 4, 1, 4, 1}},     {128, 16, Family::kFp4, {8, 4, 2, 4, 1}},
    {256, 16, Family::kFp4, {16, 4, 4, 4, 1}},   {64, 32, Family::kFp4, {2, 2, 1, 2, 1}},
    {128, 32, Family::kFp4, {4, 4, 1, 2, 2}},    {256, 32, Family::kFp4, {8, 4, 2, 2, 2}},
    {64, 16, Family::kMmaSync, {4, 4, 1, 1, 4}}, {64, 32, Family::kMmaSync, {2, 2, 1, 1, 2}},
    {128, 16, Family::kWgmma, {8, 4, 2, 1, 4}},  {256, 32, Family::kStreaming, {8, 4, 2, 1, 4}},
};

TEST(ScaleBlocks, FollowTheRuleForBothVectors) {
  for (const ScaleCase& c : kScaleCases) {
    const ScaleBlocks s = scale_blocks(c.k, c.vector, c.family);
    SCOPED_TRACE(testing::Message() << "K " << c.k << " vector " << c.vector << " " << to_string(c.family));
    EXPECT_EQ(s.per_row, c.wanted.per_row);
    EXPECT_EQ(s.block, std::min(c.k / c.vector, 4));
    EXPECT_EQ(s.block, c.wanted.block);
    EXPECT_EQ(s.blocks, c.wanted.blocks);
    EXPECT_EQ(s.per_mma, c.wanted.per_mma);
    EXPECT_EQ(s.fold, c.wanted.fold);
    EXPECT_EQ(s.block * s.blocks, s.per_row) << "blocks hold every scale once";
  }
}

// ---- every map
// ------------------------------------------------------------------------------------------------------------

struct Interval {
  unsigned begin, end;
  RegionId id;
};

void check_map(const TileConfig& t) {
  const SmemMap map = make_smem_map(t);
  std::vector<Interval> taken;
  unsigned payload = 0, padding = 0;
  for (int i = 0; i < kRegionCount; ++i) {
    const Region& r = map.regions[i];
    if (r.size == 0) continue;
    const RegionId id = static_cast<RegionId>(i);
    ASSERT_EQ(r.offset % r.align, 0u) << region_name(id, t);
    ASSERT_EQ(r.size, r.stride * r.copies) << region_name(id, t);
    ASSERT_GE(r.stride, detail::region_bytes(t, id)) << region_name(id, t);
    ASSERT_EQ(r.stride % detail::stride_align(t, id), 0u) << region_name(id, t);
    ASSERT_LE(r.offset + r.size, map.total) << region_name(id, t);
    if (r.overlay) {
      // An overlay may share bytes with the stages only: everything else is in use during the epilogue.
      for (int j = 0; j < kRegionCount; ++j) {
        const Region& other = map.regions[j];
        if (other.size == 0 || j == i || detail::staged(static_cast<RegionId>(j))) continue;
        if (static_cast<RegionId>(j) == RegionId::kPartials) continue;  // added up before the output is staged
        ASSERT_GE(other.offset, r.offset + r.size) << region_name(static_cast<RegionId>(j), t);
      }
      continue;
    }
    taken.push_back({r.offset, r.offset + r.size, id});
    payload += r.size;
    padding += r.padding;
  }
  std::sort(taken.begin(), taken.end(), [](const Interval& a, const Interval& b) { return a.begin < b.begin; });
  for (size_t i = 1; i < taken.size(); ++i) {
    ASSERT_GE(taken[i].begin, taken[i - 1].end)
        << region_name(taken[i - 1].id, t) << " overlaps " << region_name(taken[i].id, t);
  }
  ASSERT_EQ(map.payload, payload);
  ASSERT_EQ(map.total, map.payload + map.padding);
  ASSERT_GE(map.padding, padding);
  ASSERT_LT(map.total - taken.back().end, 16u) << "nothing after the last region but the rounding of the total";
  ASSERT_EQ(map.total % 16, 0u);
}

TEST(SmemMap, RegionsAreAlignedDisjointAndSumUpForEveryCandidate) {
  int checked = 0;
  for (const Arch& arch : kArchs) {
    for (const char* name : {"35B-A3B", "nemotron-30B"}) {
      for (const auto format : {ActivationFormat::kBf16, ActivationFormat::kNvfp4}) {
        for (const int64_t tokens : {1, 64}) {
          MoeProblem p = find_shape(name);
          p.tokens = tokens;
          p.activations = format;
          for (const Pass pass : {Pass::kGateUp, Pass::kDown}) {
            for (const Candidate& c : candidates(p, pass, arch)) {
              check_map(c.tile);
              if (HasFatalFailure()) FAIL() << to_string(c) << " on " << arch.name;
              ++checked;
            }
          }
        }
      }
    }
  }
  EXPECT_GT(checked, 100000);
}

TEST(SmemMap, MxFp4UnitsAreSmallerByHalfTheirScales) {
  TileConfig t = kOne;
  t.scale_vector = 32;
  EXPECT_EQ(unit_bytes(t), 544u);
  EXPECT_EQ(region(make_smem_map(t), RegionId::kWeights).stride, 2u * 4 * 544);
}

TEST(SmemMap, OverlayCostsOnlyWhatTheStagesDoNotHold) {
  TileConfig t = kOne;
  t.family = Family::kMmaSync;
  t.producer_warps = 0;
  t.inline_routes = 0;
  t.k_warps = 1;
  t.tokens = t.token_rows = 64;
  t.n = 64;
  t.operands = 1;
  t.stages = 2;
  t.k = 64;
  const SmemMap direct = make_smem_map(t);
  t.epilogue = Epilogue::kOverlay;
  const SmemMap overlay = make_smem_map(t);
  t.epilogue = Epilogue::kDedicated;
  const SmemMap dedicated = make_smem_map(t);
  EXPECT_EQ(overlay.total, direct.total);  // 8 KiB of output over 22.5 KiB of stages
  EXPECT_EQ(dedicated.total, direct.total + 64 * 64 * 2);
  t.epilogue = Epilogue::kOverlay;
  t.tokens = 192;
  t.token_rows = 8;  // tiny stages, large output: the overlay must push the row table back
  EXPECT_GE(region(make_smem_map(t), RegionId::kRows).offset, 192u * 64 * 2);
}

TEST(SmemMap, SourceTextNamesTheSameTile) {
  // What device code is given is an aggregate initialiser in the order of the fields.
  EXPECT_EQ(to_source(kPrefill),
            "{fourfold::plan::Family(2), fourfold::plan::Pass(0), 88, 88, 128, 64, 4, 8, 4, 2, 16, 16, 1, 1, 1, 0, 0, "
            "fourfold::plan::Epilogue(0)}");
}

}  // namespace
}  // namespace fourfold::plan
