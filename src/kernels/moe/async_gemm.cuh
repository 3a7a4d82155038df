// What the expert GEMMs without a producer warp share: tiles, work items, and a pipeline of stages that every warp
// fills with cp.async. mma_sync.cuh (bf16 activations) and fp4_sm120.cuh (NVFP4 activations) supply the arithmetic.
//
// A CTA is persistent over items: one block of tokens (tables.h) x `operands * n` weight rows. Its warps are WM (weight
// rows) x WN (token tiles of 8, dealt round robin); a warp holds MT x NT fp32 fragments of 16 x 8. The pipeline runs on
// across items: at every stage the loader is `stages - 1` ahead, be it in the same item or in a later one.
//
// One __syncthreads per stage. Behind it, what was copied before is visible to all, and the slot that was multiplied
// one stage earlier is free: the loader refills exactly that one. With `stages` = 2 the copy of a stage overlaps the
// multiplication of the one before. Nothing here depends on how many stages an item has: one is enough.
//
// Columns of a tile never mix, so token rows that are not loaded may hold anything: their columns are never stored. The
// same holds for weight rows beyond the matrix. Along K nothing is loaded or multiplied beyond the last unit.
#pragma once

#include "kernels/moe/tables.h"
#include "kernels/ptx/sm90.cuh"
#include "plan/moe/tile.h"

namespace fourfold::moe {

namespace async_detail {

using namespace ptx;
using plan::moe::RegionId;

template <typename Tile>
struct Shape {
  static constexpr plan::moe::TileConfig T = Tile::value;
  static constexpr bool kGateUp = T.pass == plan::moe::Pass::kGateUp;
  static constexpr bool kGated = T.operands == 2;
  static constexpr bool kFp4 = T.family == plan::moe::Family::kFp4;
  static constexpr int kThreads = T.warps * 32;
  static constexpr int kRowTiles = T.operands * T.n / kTileRows;
  static constexpr int kWm = plan::moe::row_warps(T);
  static constexpr int kWn = T.warps / kWm;
  static constexpr int kMt = kRowTiles / kWm;
  static constexpr int kNt = T.tokens / 8 / kWn;
  static constexpr int kUnits = T.k / kUnitK;                           // of a stage
  static constexpr int kUnitRowBytes = kUnitK * T.activation_bits / 8;  // of an activation row
  static constexpr int kPieces = kUnits * kUnitRowBytes / 16;           // 16-byte pieces of a stage's row
  static constexpr int kRowsPerPass = kThreads / kPieces;
  static constexpr int kRowRegisters = (T.tokens + kThreads - 1) / kThreads;
  static constexpr u32 kStrip = kUnits * kUnitBytes;  // of a row tile in a stage
  static constexpr u32 kWeights = plan::moe::smem_offset<Tile, RegionId::kWeights>;
  static constexpr u32 kWeightStride = plan::moe::smem_stride<Tile, RegionId::kWeights>;
  static constexpr u32 kRows = plan::moe::smem_offset<Tile, RegionId::kActivations>;
  static constexpr u32 kRowsStride = plan::moe::smem_stride<Tile, RegionId::kActivations>;
  static constexpr u32 kRowStride = plan::moe::activation_stride(T);
  static constexpr u32 kScales = plan::moe::smem_offset<Tile, RegionId::kActivationScales>;
  static constexpr u32 kScalesStride = plan::moe::smem_stride<Tile, RegionId::kActivationScales>;
  static constexpr u32 kTable = plan::moe::smem_offset<Tile, RegionId::kRows>;
  static_assert(kRowTiles == kWm * kMt && T.tokens == kWn * kNt * 8 && T.warps == kWm * kWn);
  static_assert(T.k_warps == 1 && T.producer_warps == 0 && T.stages >= 2);
  static_assert(kWeightStride == kRowTiles * kStrip && kThreads % kPieces == 0);
};

// Items of a CTA: first, first + step, ...; the row groups of one block follow each other, so that its weights' rows
// and its tokens are wanted at about the same time everywhere.
struct Work {
  int row_groups;
  int items;
  int chunks;  // stages of an item
  int step;
  const Block* blocks;

  __device__ __forceinline__ Block block_at(int item) const {
    return item < items ? blocks[item / row_groups] : Block{-1, 0, 0, 0};
  }
};

template <typename Tile>
__device__ __forceinline__ Work work_of(const GemmArgs& args) {
  using S = Shape<Tile>;
  Work w;
  w.row_groups = (args.row_tiles + S::kRowTiles - 1) / S::kRowTiles;
  w.items = w.row_groups * args.route.counts[0];
  w.chunks = (args.units + S::kUnits - 1) / S::kUnits;
  w.step = static_cast<int>(gridDim.x);
  w.blocks = args.route.blocks;
  return w;
}

// A lane's columns of NT fragments: two neighbouring ones of each, of which `left` columns on from the first are there.
// store(n, e, its part of `out`) for these. The pointer steps from column to column: multiples of the stride would be
// computed once and kept for all items.
template <typename S, int NT, typename Out, typename Store>
__device__ __forceinline__ void for_columns(Out* out, long long stride, int left, const Store& store) {
#pragma unroll
  for (int n = 0; n < NT; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (n * S::kWn * 8 + e < left) store(n, e, out);
      out += (e == 0 ? 1 : S::kWn * 8 - 1) * stride;
    }
}

// Where the activations come from.
struct RowSource {
  const u8* rows;
  u64 stride;        // bytes
  const u8* scales;  // NVFP4: 4 bytes per unit of a row
  u64 scale_stride;  // bytes
};

// Fills stages in the order in which they are multiplied, one call per stage.
template <typename Tile>
struct Loader {
  using S = Shape<Tile>;
  static constexpr plan::moe::TileConfig T = Tile::value;

  const GemmArgs& args;
  const RowSource& source;
  const Work& work;
  u32 base;
  int* table;  // [2][tokens]: rows of the activations, for the present item and the next
  int item, chunk, group, stage, parity;
  // Blocks of the present item and the next two; rows of the next one on their way to the table.
  Block block, ahead, further;
  int rows[S::kRowRegisters];

  __device__ __forceinline__ Loader(const GemmArgs& a, const RowSource& s, const Work& w, u32 shared, u8* smem)
      : args(a), source(s), work(w), base(shared), table(reinterpret_cast<int*>(smem + S::kTable)) {
    item = static_cast<int>(blockIdx.x);
    chunk = stage = parity = 0;
    group = item % work.row_groups;
    block = work.block_at(item);
    ahead = work.block_at(item + work.step);
    further = work.block_at(item + 2 * work.step);
    if constexpr (S::kGateUp) {
      fetch_rows(block);
      store_rows(0);
      fetch_rows(ahead);
    }
  }

  __device__ __forceinline__ void fetch_rows(const Block& b) {
#pragma unroll
    for (int i = 0; i < S::kRowRegisters; ++i) {
      const int column = static_cast<int>(threadIdx.x) + i * S::kThreads;
      rows[i] = column < b.count ? args.route.slot_token[b.first + column] : 0;
    }
  }
  __device__ __forceinline__ void store_rows(int half) {
#pragma unroll
    for (int i = 0; i < S::kRowRegisters; ++i) {
      const int column = static_cast<int>(threadIdx.x) + i * S::kThreads;
      if (column < T.tokens) table[half * T.tokens + column] = rows[i];
    }
  }

  // Lanes take 16 bytes each; a row tile's strip belongs to one warp, or to several where there are more warps.
  __device__ __forceinline__ void issue_weights(int expert, int row_group, int k_chunk, int to) const {
    constexpr int kShare = T.warps > S::kRowTiles ? T.warps / S::kRowTiles : 1;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const u32 lane = threadIdx.x % 32;
    const int left = args.units - k_chunk * S::kUnits;
    const u32 bytes = static_cast<u32>(left < S::kUnits ? left : S::kUnits) * kUnitBytes;
    const int tiles = args.row_tiles - row_group * S::kRowTiles;
    const u64 strip = static_cast<u64>(args.units) * kUnitBytes;
    const u8* from = args.weights + static_cast<u64>(expert) * args.expert_bytes +
                     static_cast<u64>(row_group) * S::kRowTiles * strip + static_cast<u64>(k_chunk) * S::kStrip;
    const u32 destination = base + S::kWeights + static_cast<u32>(to) * S::kWeightStride;
#pragma unroll
    for (int i = 0; i < (S::kRowTiles * kShare + T.warps - 1) / T.warps; ++i) {
      const int tile = warp / kShare + i * (T.warps / kShare);
      if (tile >= tiles) break;
      constexpr u32 kStep = kShare * 512;
#pragma unroll
      for (u32 j = 0; j < (S::kStrip + kStep - 1) / kStep; ++j) {
        const u32 at = j * kStep + static_cast<u32>(warp % kShare) * 512u + lane * 16u;
        if (at < bytes) {
          async_copy16(destination + static_cast<u32>(tile) * S::kStrip + at,
                       from + static_cast<u64>(tile) * strip + at);
        }
      }
    }
  }

  __device__ __forceinline__ int row_of(int column) const {
    return S::kGateUp ? table[parity * T.tokens + column] : block.first + column;
  }

  __device__ __forceinline__ void issue_rows() const {
    const int left = args.units - chunk * S::kUnits;
    const int piece = static_cast<int>(threadIdx.x) % S::kPieces;
    if (piece * 16 < left * S::kUnitRowBytes) {
      const u32 destination =
          base + S::kRows + static_cast<u32>(stage) * S::kRowsStride + static_cast<u32>(piece) * 16u;
      const u8* from =
          source.rows + static_cast<u64>(chunk) * (S::kUnits * S::kUnitRowBytes) + static_cast<u64>(piece) * 16u;
#pragma unroll 4
      for (int column = static_cast<int>(threadIdx.x) / S::kPieces; column < block.count; column += S::kRowsPerPass) {
        async_copy16(destination + static_cast<u32>(column) * S::kRowStride,
                     from + static_cast<u64>(static_cast<u32>(row_of(column))) * source.stride);
      }
    }
    if constexpr (S::kFp4) {
      const u32 destination = base + S::kScales + static_cast<u32>(stage) * S::kScalesStride;
      for (int i = static_cast<int>(threadIdx.x); i < block.count * S::kUnits; i += S::kThreads) {
        const int column = i / S::kUnits;
        const int unit = i % S::kUnits;
        if (unit < left) {
          async_copy4(destination + static_cast<u32>(i) * 4u,
                      source.scales + static_cast<u64>(static_cast<u32>(row_of(column))) * source.scale_stride +
                          static_cast<u64>(chunk * S::kUnits + unit) * 4u);
        }
      }
    }
  }

  // The weights of the first stages, before the activations exist.
  __device__ __forceinline__ void early_weights() const {
    int i = item;
    int c = 0;
    for (int s = 0; s < T.stages - 1 && i < work.items; ++s) {
      issue_weights(work.block_at(i).expert, i % work.row_groups, c, s);
      if (++c == work.chunks) {
        c = 0;
        i += work.step;
      }
    }
  }

  // Behind a __syncthreads. One group of copies, which may be empty: groups are stages.
  template <bool Weights = true>
  __device__ __forceinline__ void step() {
    if (item < work.items) {
      if (S::kGateUp && chunk == 0) {
        // The other half held the item before this one, whose last copies were issued before the barrier.
        store_rows(parity ^ 1);
        fetch_rows(further);
      }
      if (Weights) issue_weights(block.expert, group, chunk, stage);
      issue_rows();
      if (++chunk == work.chunks) {
        chunk = 0;
        parity ^= 1;
        item += work.step;
        group = item % work.row_groups;
        block = ahead;
        ahead = further;
        further = work.block_at(item + 2 * work.step);
      }
    }
    async_copy_commit();
    if (++stage == T.stages) stage = 0;
  }
};

// The whole kernel. `Math` multiplies one unit of K and finishes an item:
//   template <int NT> using Sum                                 accumulators of a warp
//   begin(block)                                                an item's factors
//   unit<NT>(sum, weights, rows, scales, unit)                  addresses of the warp's parts of a stage
//   finish<NT>(sum, block, first row tile of the warp)
template <typename Tile, typename Math>
__device__ __forceinline__ void run(const GemmArgs& args, const RowSource& source, Math& math, u32 base, u8* smem) {
  using S = Shape<Tile>;
  static constexpr plan::moe::TileConfig T = Tile::value;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int wm = warp % S::kWm;
  const int wn = warp / S::kWm;
  // The route's tables are complete when gate-up runs, and gate-up lets down start only then: down may read them and
  // ask for weights before it waits for its activations.
  if (S::kGateUp) {
    grid_dependency_wait();
    grid_launch_dependents();
  }
  const Work work = work_of<Tile>(args);
  Loader<Tile> loader(args, source, work, base, smem);
  if (!S::kGateUp) {
    loader.early_weights();
    grid_dependency_wait();
    grid_launch_dependents();
  }
#pragma unroll 1
  for (int s = 0; s < T.stages - 1; ++s) {
    __syncthreads();
    loader.template step<S::kGateUp>();
  }

  int stage = 0;
  const auto run_item = [&]<int NT>(int item, const Block& block) {
    typename Math::template Sum<NT> sum;
    sum.clear();
    for (int chunk = 0; chunk < work.chunks; ++chunk) {
      async_copy_wait<T.stages - 2>();
      __syncthreads();
      loader.step();
      const u32 weights =
          base + S::kWeights + static_cast<u32>(stage) * S::kWeightStride + static_cast<u32>(wm * S::kMt) * S::kStrip;
      const u32 rows =
          base + S::kRows + static_cast<u32>(stage) * S::kRowsStride + static_cast<u32>(wn * 8) * S::kRowStride;
      const u32 scales =
          base + S::kScales + static_cast<u32>(stage) * S::kScalesStride + static_cast<u32>(wn * 8 * S::kUnits) * 4u;
      const int left = args.units - chunk * S::kUnits;
      // Unrolled, a wide tile's fragments of two units are more than the registers hold.
#pragma unroll(S::kMt* NT >= 8 ? 1 : S::kUnits)
      for (int unit = 0; unit < S::kUnits; ++unit) {
        if (unit >= left) break;
        math.template unit<NT>(sum, weights, rows, scales, unit);
      }
      if (++stage == T.stages) stage = 0;
    }
    math.template finish<NT>(sum, block, item % work.row_groups * S::kRowTiles + wm * S::kMt, wn);
  };

  Block block = work.block_at(static_cast<int>(blockIdx.x));
  for (int item = static_cast<int>(blockIdx.x); item < work.items; item += work.step) {
    const Block ahead = work.block_at(item + work.step);
    math.begin(block);
    // Narrow blocks skip half of a wide tile's multiplications.
    constexpr int kHalf = (S::kNt + 1) / 2;
    if (S::kNt > 1 && block.count <= kHalf * S::kWn * 8) {
      run_item.template operator()<kHalf>(item, block);
    } else {
      run_item.template operator()<S::kNt>(item, block);
    }
    block = ahead;
  }
  async_copy_wait<0>();
}

// Gate-up's output type, or down's fp32.
template <bool GateUp, typename T>
struct OutputType {
  using Type = T;
};
template <typename T>
struct OutputType<false, T> {
  using Type = float;
};
template <bool GateUp, typename T>
using OutputOf = typename OutputType<GateUp, T>::Type;

__device__ __forceinline__ float squared_relu(float x) { return x > 0.0f ? x * x : 0.0f; }

// silu(gate) * up, both clamped first where `limit` is positive.
__device__ __forceinline__ float swiglu(float gate, float up, float limit) {
  if (limit > 0.0f) {
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up < -limit ? -limit : up;
  }
  return gate * reciprocal_approx(1.0f + exp2_approx(gate * -1.4426950408889634f)) * up;
}

}  // namespace async_detail

}  // namespace fourfold::moe
