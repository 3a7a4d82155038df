// The shared-memory ledger: known maps to the byte, and what must hold for every map.
#include "plan/moe/tile.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "plan/arch.h"
#include "plan/moe/plan.h"

namespace fourfold::plan::moe {
namespace {

// ---- known maps, at compile time
// ----------------------------------------------------------------------------------------

// One token: 2 row tiles x 4 units of 576 B in 4 stages; 2 buffers x 2 x 2 x 256 B of partial sums; the choices; 16 B
// of mbarriers per stage, and for two more.
constexpr TileConfig kOne = {.family = Family::kOneToken,
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

                             .resident_k = 0,
                             .epilogue = Epilogue::kDirect};
constexpr Region of(const TileConfig& t, RegionId id) { return make_smem_map(t)[id]; }
constexpr unsigned total(const TileConfig& t) { return make_smem_map(t).total; }

static_assert(unit_bytes(kOne) == 576);
static_assert(of(kOne, RegionId::kWeights).stride == 2 * 4 * 576);
static_assert(of(kOne, RegionId::kActivations).size == 0);
static_assert(of(kOne, RegionId::kPartials).offset == 4 * 4608);
static_assert(of(kOne, RegionId::kPartials).size == 2 * 2 * 2 * 256);
static_assert(of(kOne, RegionId::kRoutes).offset == 18432 + 2048);
static_assert(of(kOne, RegionId::kBarriers).offset == 20480 + 384);  // 272 rounded up to 128
static_assert(total(kOne) == 20864 + 6 * 16);

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

                                 .resident_k = 0,
                                 .epilogue = Epilogue::kDirect};
static_assert(of(kPrefill, RegionId::kActivations).offset == 0);
static_assert(of(kPrefill, RegionId::kActivations).stride == 88 * 128);
static_assert(of(kPrefill, RegionId::kActivations).stride % 1024 == 0);
static_assert(of(kPrefill, RegionId::kWeights).offset == 4 * 88 * 128);
static_assert(of(kPrefill, RegionId::kWeights).stride == 16 * 576);

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

                                 .resident_k = 0,
                                 .epilogue = Epilogue::kDirect};
static_assert(of(kFp4Tile, RegionId::kWeights).stride == 8 * 576);
static_assert(of(kFp4Tile, RegionId::kActivations).stride == 64 * (32 + 16));
static_assert(of(kFp4Tile, RegionId::kActivationScales).stride == 64 * 4);
static_assert(of(kFp4Tile, RegionId::kRows).offset == 3 * (8 * 576 + 64 * 48 + 64 * 4));
static_assert(total(kFp4Tile) == 3 * (8 * 576 + 64 * 48 + 64 * 4) + 2 * 64 * 4);

// Few tokens: gate-up's rows lie once, down's in every stage; tables, and in down a row of zeros.
constexpr TileConfig few(Pass pass) {
  TileConfig t = kOne;
  t.family = Family::kFewTokens;
  t.pass = pass;
  t.operands = pass == Pass::kGateUp ? 2 : 1;
  t.token_rows = pass == Pass::kGateUp ? 8 : 4;
  t.producer_warps = pass == Pass::kGateUp ? 3 : 5;
  t.resident_k = pass == Pass::kGateUp ? 2048 : 0;
  return t;
}
static_assert(of(few(Pass::kGateUp), RegionId::kActivations).size == 8 * (2048 * 2 + 16));
static_assert(of(few(Pass::kGateUp), RegionId::kPartials).size == 2 * 2 * 2 * 512);
static_assert(of(few(Pass::kGateUp), RegionId::kRoutes).size == 7824);
static_assert(of(few(Pass::kGateUp), RegionId::kBarriers).size == 4 * 16 + 48);
static_assert(of(few(Pass::kDown), RegionId::kActivations).size == 4 * 4 * (256 * 2 + 16));
static_assert(of(few(Pass::kDown), RegionId::kPartials).size == 2 * 512);
static_assert(of(few(Pass::kDown), RegionId::kRoutes).size == 7824 + 2 * 256);
static_assert(of(few(Pass::kDown), RegionId::kBarriers).size == 4 * 16);

// Sorted: a ring of weights and rows, and where 16 warps compute two barriers more, for flags.
constexpr TileConfig sorted(int warps) {
  TileConfig t = kOne;
  t.family = Family::kStreaming;
  t.tokens = t.token_rows = 24;
  t.warps = warps;
  t.k_warps = 1;
  return t;
}
static_assert(of(sorted(8), RegionId::kActivations).size == 4 * 24 * (256 * 2 + 16));
static_assert(of(sorted(8), RegionId::kBarriers).size == 4 * 16);
static_assert(of(sorted(16), RegionId::kBarriers).size == 4 * 16 + 16);
static_assert(raises_flags(sorted(16)) && !raises_flags(sorted(8)));

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
    const RegionId id = static_cast<RegionId>(i);
    const Region& r = map[id];
    if (r.size == 0) continue;
    ASSERT_EQ(r.offset % r.align, 0u) << region_name(id, t);
    ASSERT_EQ(r.size, r.stride * r.copies) << region_name(id, t);
    ASSERT_EQ(r.stride % (r.align == kSwizzleAlign ? kSwizzleAlign : kVectorAlign), 0u) << region_name(id, t);
    ASSERT_TRUE(r.copies == 1 || r.copies == static_cast<unsigned>(t.stages)) << region_name(id, t);
    ASSERT_LE(r.offset + r.size, map.total) << region_name(id, t);
    if (r.overlay) {
      // An overlay may share bytes with the stages only: everything else is in use during the epilogue.
      for (int j = 0; j < kRegionCount; ++j) {
        const Region& other = map[static_cast<RegionId>(j)];
        if (other.size == 0 || j == i || other.copies > 1) continue;    // stages are idle
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
          Problem p = find_shape(name);
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
  EXPECT_EQ(of(t, RegionId::kWeights).stride, 2u * 4 * 544);
}

TEST(SmemMap, OverlayCostsOnlyWhatTheStagesDoNotHold) {
  TileConfig t = kOne;
  t.family = Family::kMmaSync;
  t.producer_warps = 0;
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
  EXPECT_GE(of(t, RegionId::kRows).offset, 192u * 64 * 2);
}

TEST(SmemMap, SourceTextNamesTheSameTile) {
  // What device code is given is an aggregate initialiser.
  EXPECT_EQ(to_source(kPrefill),
            "{.family = fourfold::plan::moe::Family(4), .pass = fourfold::plan::moe::Pass(0), .tokens = 88, "
            ".token_rows = 88, .n = 128, .k = 64, .stages = 4, .warps = 8, .producer_warps = 4, .operands = 2, "
            ".scale_vector = 16, .activation_bits = 16, .swap_ab = 1, .k_warps = 1, .stage_warps = 1, .resident_k = 0, "
            ".epilogue = fourfold::plan::moe::Epilogue(0)}");
}

}  // namespace
}  // namespace fourfold::plan::moe
