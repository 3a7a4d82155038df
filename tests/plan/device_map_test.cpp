// The maps of the device headers and the ledger, byte for byte, for every candidate that the kernels take.
#include <gtest/gtest.h>

#include "kernels/moe/prefill_tile.h"
#include "kernels/moe/stream_tile.h"
#include "plan/plan.h"

namespace fourfold::plan {
namespace {

unsigned offset(const SmemMap& map, RegionId id) { return region(map, id).offset; }

TEST(DeviceMap, StreamingTilesAgreeWithTheLedger) {
  static_assert(moe::kOneTableBytes == kInlineRouteBytes && moe::kFewTableBytes == kFewRouteBytes);
  int checked = 0;
  for (const int64_t tokens : {1, 4, 64}) {
    MoeProblem p = find_shape("122B-A10B");
    p.tokens = tokens;
    for (const Pass pass : {Pass::kGateUp, Pass::kDown}) {
      for (const Candidate& c : candidates(p, pass, find_arch("sm_90a"))) {
        const TileConfig& t = c.tile;
        const int row_tiles = t.operands * t.n / 16, row_warps = t.warps / t.k_warps;
        if (t.family != Family::kStreaming || row_tiles % row_warps != 0) continue;
        const moe::StreamTile tile{pass == Pass::kGateUp,
                                   t.inline_routes == 1,
                                   row_tiles / row_warps,
                                   row_warps,
                                   t.stage_warps,
                                   t.k_warps / t.stage_warps,
                                   t.tokens / 8,
                                   t.token_rows,
                                   t.k / 64,
                                   t.stages,
                                   c.ctas_per_sm,
                                   false,
                                   t.resident_k / 64};
        const moe::StreamMap device = moe::stream_map(tile);
        const SmemMap map = make_smem_map(t);
        ASSERT_EQ(device.total, map.total) << to_string(c);
        ASSERT_EQ(device.weights, offset(map, RegionId::kWeights)) << to_string(c);
        ASSERT_EQ(device.weight_stride, region(map, RegionId::kWeights).stride) << to_string(c);
        ASSERT_EQ(device.rows, offset(map, RegionId::kActivations)) << to_string(c);
        ASSERT_EQ(device.row_stage_stride, region(map, RegionId::kActivations).stride) << to_string(c);
        ASSERT_EQ(device.barriers, offset(map, RegionId::kBarriers)) << to_string(c);
        if (t.k_warps > 1) {
          ASSERT_EQ(device.partials, offset(map, RegionId::kPartials)) << to_string(c);
        }
        if (t.inline_routes) {
          ASSERT_EQ(device.choices, offset(map, RegionId::kRoutes)) << to_string(c);
        }
        ASSERT_EQ(tile.threads(), (t.warps + t.producer_warps) * 32) << to_string(c);
        ++checked;
      }
    }
  }
  EXPECT_GT(checked, 10000);
}

TEST(DeviceMap, PrefillTilesAgreeWithTheLedger) {
  int checked = 0;
  for (const char* shape : {"122B-A10B", "nemotron-30B"}) {
    MoeProblem p = find_shape(shape);
    p.tokens = 8192;
    for (const Pass pass : {Pass::kGateUp, Pass::kDown}) {
      for (const Candidate& c : candidates(p, pass, find_arch("sm_90a"))) {
        const TileConfig& t = c.tile;
        if (t.family != Family::kWgmma || t.operands * t.n != moe::kPrefillRowTiles * 16 || t.warps != 8 || t.k != 64) {
          continue;
        }
        const moe::PrefillMap device =
            moe::prefill_map({pass == Pass::kGateUp, t.tokens, t.stages, t.operands == 1 && pass == Pass::kGateUp});
        const SmemMap map = make_smem_map(t);
        ASSERT_EQ(device.total, map.total) << to_string(c);
        ASSERT_EQ(device.rows, offset(map, RegionId::kActivations)) << to_string(c);
        ASSERT_EQ(device.row_stride, region(map, RegionId::kActivations).stride) << to_string(c);
        ASSERT_EQ(device.weights, offset(map, RegionId::kWeights)) << to_string(c);
        ASSERT_EQ(device.weight_stride, region(map, RegionId::kWeights).stride) << to_string(c);
        if (pass == Pass::kGateUp) {
          ASSERT_EQ(device.output, offset(map, RegionId::kOutput)) << to_string(c);
        }
        ASSERT_EQ(device.barriers, offset(map, RegionId::kBarriers)) << to_string(c);
        ASSERT_EQ(moe::kPrefillThreads, (t.warps + t.producer_warps) * 32) << to_string(c);
        ++checked;
      }
    }
  }
  EXPECT_GT(checked, 100);
}

}  // namespace
}  // namespace fourfold::plan
