// What the kernels with producer warps and mma.sync (stream_sm90.cuh, one_sm90.cuh, few_sm90.cuh) derive from a tile.
#pragma once

#include "kernels/moe/layout.h"
#include "plan/moe/tile.h"

namespace fourfold::moe {

// `Tile`: a type with a constexpr plan::moe::TileConfig `value` and a number of CTAs per SM, `ctas`. (A type, because a
// structure as template argument would stand in the kernel's name with all its fields.)
template <typename Tile>
struct StreamShape {
  using RegionId = plan::moe::RegionId;
  static constexpr plan::moe::TileConfig tile = Tile::value;

  static constexpr bool gate_up = tile.pass == plan::moe::Pass::kGateUp;
  static constexpr bool one = tile.family == plan::moe::Family::kOneToken;
  static constexpr bool few = tile.family == plan::moe::Family::kFewTokens;
  static constexpr bool wide = plan::moe::raises_flags(tile);   // registers are moved from the producers, too
  static constexpr bool relu2 = gate_up && tile.operands == 1;  // gate-up without a gate: h = max(x, 0)^2

  static constexpr int wk = tile.k_warps;      // warps along K
  static constexpr int ws = tile.stage_warps;  // of them by stage: each group takes every ws-th of an item
  static constexpr int wu = wk / ws;           // and inside a stage: each takes ku / wu units
  static constexpr int wm = tile.warps / wk;   // warps along rows
  static constexpr int mt = tile.operands * tile.n / kTileRows / wm;  // row tiles (16 weight rows) per warp
  static constexpr int nt = tile.tokens / 8;                          // token tiles
  static constexpr int rows = tile.token_rows;                        // token rows a stage has room for
  static constexpr int ku = tile.k / kUnitK;                          // units per stage
  static constexpr int row_units = tile.resident_k / kUnitK;  // few tokens, gate-up: of the rows that stay, at least K
  static constexpr int stages = tile.stages;
  static constexpr int pairs = (ku / wu + 1) / 2;  // one token: pairs of units of a stage that one warp multiplies

  static constexpr int producers = tile.producer_warps;
  static constexpr int copiers = producers - (wide ? 1 : 0);  // where flags are raised, one does nothing else
  static constexpr int threads = (tile.warps + producers) * 32;
  // Unsorted: room for the next kernel's CTAs beside this one's, or its early launch buys nothing.
  static constexpr int resident = one || few ? Tile::ctas + 1 : Tile::ctas;

  // The map of shared memory (plan/moe/tile.h).
  static constexpr unsigned kWeights = plan::moe::smem_offset<Tile, RegionId::kWeights>;
  static constexpr unsigned kWeightStride = plan::moe::smem_stride<Tile, RegionId::kWeights>;
  static constexpr unsigned kRows = plan::moe::smem_offset<Tile, RegionId::kActivations>;
  static constexpr unsigned kRowStageStride = plan::moe::smem_stride<Tile, RegionId::kActivations>;
  static constexpr unsigned kRowStride = plan::moe::activation_stride(tile);
  static constexpr unsigned kPartials = plan::moe::smem_offset<Tile, RegionId::kPartials>;
  static constexpr unsigned kChoices = plan::moe::smem_offset<Tile, RegionId::kRoutes>;
  static constexpr unsigned kBarriers = plan::moe::smem_offset<Tile, RegionId::kBarriers>;
  static_assert(mt * wm * kTileRows == tile.operands * tile.n && wu * ws == wk);
  static_assert(kWeightStride == static_cast<unsigned>(mt * wm * ku) * kUnitBytes);
  // A ring slot always belongs to the same warp group: a group that skipped one of a slot's turns could not tell the
  // phases of its barrier apart. Hence whole rounds of WS stages per item; the surplus ones carry nothing.
  static_assert(stages % ws == 0 && ku % wu == 0);
};

}  // namespace fourfold::moe
