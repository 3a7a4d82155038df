// What the wgmma kernels (prefill_sm90.cuh) derive from a tile.
#pragma once

#include "kernels/moe/layout.h"
#include "plan/moe/tile.h"

namespace fourfold::moe {

inline constexpr int kPrefillRowTiles = 16;     // 256 weight rows: 2 consumer warpgroups x 2 x 64
inline constexpr int kPrefillThreads = 384;     // one producer warpgroup and two consumers
inline constexpr int kPrefillProducers = 4;     // warps
inline constexpr int kPrefillTokenStep = 16;    // tiles come in steps of this
inline constexpr int kPrefillMostTokens = 176;  // above that two accumulators do not fit the registers

// `Tile`: see stream_shape.h.
template <typename Tile>
struct PrefillShape {
  using RegionId = plan::moe::RegionId;
  static constexpr plan::moe::TileConfig tile = Tile::value;

  static constexpr bool gate_up = tile.pass == plan::moe::Pass::kGateUp;
  static constexpr bool relu2 = gate_up && tile.operands == 1;  // gate-up without a gate: h = max(x, 0)^2
  static constexpr int tokens = tile.tokens;                    // most tokens of a block
  static constexpr int stages = tile.stages;                    // of 64 K
  // h columns of a CTA: a row of the staging
  static constexpr int columns = kPrefillRowTiles * (relu2 ? 16 : 8);

  // The map of shared memory (plan/moe/tile.h).
  static constexpr unsigned kRows = plan::moe::smem_offset<Tile, RegionId::kActivations>;
  static constexpr unsigned kRowStride = plan::moe::smem_stride<Tile, RegionId::kActivations>;
  static constexpr unsigned kWeights = plan::moe::smem_offset<Tile, RegionId::kWeights>;
  static constexpr unsigned kWeightStride = plan::moe::smem_stride<Tile, RegionId::kWeights>;
  static constexpr unsigned kOutput = plan::moe::smem_offset<Tile, RegionId::kOutput>;
  static constexpr unsigned kBarriers = plan::moe::smem_offset<Tile, RegionId::kBarriers>;
  static_assert(tile.family == plan::moe::Family::kWgmma && tile.k == kUnitK);
  static_assert(tile.operands * tile.n == kPrefillRowTiles * kTileRows);
  static_assert((tile.warps + tile.producer_warps) * 32 == kPrefillThreads);
  static_assert(tokens % kPrefillTokenStep == 0 && tokens <= kPrefillMostTokens);
  static_assert(kWeightStride == kPrefillRowTiles * kUnitBytes && kRowStride == static_cast<unsigned>(tokens) * 128u);
  static_assert(!gate_up || tile.epilogue == plan::moe::Epilogue::kDedicated);
};

}  // namespace fourfold::moe
