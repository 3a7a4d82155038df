// Expert GEMMs for many tokens per expert: dequantised weights are the register operand of wgmma (64 rows), the tokens
// lie in swizzled shared memory (up to 176; above that two accumulators no longer fit the registers).
//
// A CTA covers 256 weight rows: two consumer warpgroups of 128 rows (two m64 accumulators each) and four producer warps
// that bring packed weights by bulk copies. Gate-up's token rows come one by one, in pieces of 64 columns, by tensor
// copies that put them into shared memory's form; gate-up's epilogue leaves h in that form (tables.h), so that down's
// come in one bulk copy for a block.
// Two fragment buffers: while one K block of 16 is multiplied the next is dequantised.
#pragma once

#include "kernels/moe/dequant.cuh"
#include "kernels/moe/pack_group.cuh"
#include "kernels/moe/prefill_shape.h"
#include "kernels/moe/tables.h"
#include "kernels/ptx/sm90.cuh"
#include "kernels/ptx/wgmma_sm90.cuh"

namespace fourfold::moe {

namespace prefill_detail {

using namespace ptx;

struct Ring {
  int stage;
  u32 phase;
};

// h of a block from one consumer warpgroup's accumulators: through shared memory in the form of tables.h, then
// one bulk copy for each 64 columns.
template <typename Tile>
__device__ __forceinline__ void store_activation(const GemmArgs& args, u32 base, int row_tile, const Block& block,
                                                 const float (&acc)[2][Tile::value.tokens / 2]) {
  using T = PrefillShape<Tile>;
  constexpr int kUnits = T::columns / 128;  // of 64 columns, of this warpgroup
  constexpr int kTilesPerUnit = T::relu2 ? 4 : 8;
  constexpr u32 kUnitStride = static_cast<u32>(T::tokens) * 128u;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32 % 4;
  const int consumer = static_cast<int>(threadIdx.x) / 128 - 1;
  const bool leader = threadIdx.x % 128 == 0;
  const u32 staging = base + T::kOutput + static_cast<u32>(consumer * kUnits) * kUnitStride;
  const int first_tile = row_tile + consumer * 8;
  float scale[2];
  if (T::relu2) {
    scale[0] = scale[1] = args.scales[block.expert] * kEpilogueScale;
  } else {
    scale[0] = args.scales[block.expert * 2] * kEpilogueScale;
    scale[1] = args.scales[block.expert * 2 + 1] * kEpilogueScale;
  }
  const auto swiglu = [&](float low, float high) {
    float gate = low * scale[0];
    float up = high * scale[1];
    if (args.limit > 0.0f) {
      gate = gate > args.limit ? args.limit : gate;
      up = up > args.limit ? args.limit : up < -args.limit ? -args.limit : up;
    }
    return gate * reciprocal_approx(1.0f + exp2_approx(gate * -1.4426950408889634f)) * up;
  };
  const auto relu2 = [&](float x) {
    const float y = x * scale[0];
    return y < 0.0f ? 0.0f : y * y;  // keeps NaN
  };
  if (leader) bulk_store_wait_read();  // the last item's copies may still be reading
  barrier_sync(1 + consumer, 128);
  // What the lane addresses: matrix lane / 8 of four, its row (token) lane % 8. The tiles of a warp, m = 0 and 1, are
  // adjacent; with a gate each gives one piece of 8 columns, without two.
  const u32 matrix = static_cast<u32>(lane / 8);
  const u32 r = static_cast<u32>(lane % 8);
#pragma unroll
  for (int n = 0; n < T::tokens / 8; n += 2) {
    if (n * 8 >= block.count) break;
    const u32 at = staging + static_cast<u32>(n) * 1024u + matrix / 2 * 1024u + r * 128u;
    if constexpr (T::relu2) {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        u32 words[4];  // piece 0, 1 of 8 tokens, then of the next 8
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          const int i = (n + q / 2) * 4 + q % 2 * 2;
          words[q] = to_bf16x2(relu2(acc[m][i]), relu2(acc[m][i + 1]));
          if (first_tile + warp * 2 + m >= args.row_tiles) words[q] = 0;
        }
        const u32 piece = static_cast<u32>(warp % 2 * 4 + m * 2) + matrix % 2;
        store_matrix4_transposed(at + static_cast<u32>(warp / 2) * kUnitStride + ((piece ^ r) << 4), words);
      }
    } else {
      u32 words[4];  // tile 0, 1 of 8 tokens, then of the next 8
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const int i = (n + q / 2) * 4;
        const int m = q % 2;
        words[q] = to_bf16x2(swiglu(acc[m][i], acc[m][i + 2]), swiglu(acc[m][i + 1], acc[m][i + 3]));
        if (first_tile + warp * 2 + m >= args.row_tiles) words[q] = 0;
      }
      const u32 piece = static_cast<u32>(warp * 2) + matrix % 2;
      store_matrix4_transposed(at + ((piece ^ r) << 4), words);
    }
  }
  fence_async_shared();
  barrier_sync(1 + consumer, 128);
  if (leader) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      if (first_tile + u * kTilesPerUnit >= args.row_tiles) break;
      bulk_store(static_cast<u16*>(args.out) + (first_tile / kTilesPerUnit + u) * args.out_stride +
                     static_cast<long long>(block.first) * 64,
                 staging + static_cast<u32>(u) * kUnitStride, static_cast<u32>(block.count) * 128u);
    }
    bulk_store_commit();
  }
}

// Down's rows of one consumer warpgroup.
template <typename Tile>
__device__ __forceinline__ void store_groups(const GemmArgs& args, int row_tile, const Block& block,
                                             float (&acc)[2][Tile::value.tokens / 2]) {
  constexpr int N = Tile::value.tokens;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32 % 4;
  const int tile = row_tile + (static_cast<int>(threadIdx.x) / 128 - 1) * 8 + warp * 2;
  if (tile >= args.row_tiles) return;
  if (tile + 1 >= args.row_tiles) {  // nothing came for these rows: they may not decide the exponent
#pragma unroll
    for (int i = 0; i < N / 2; ++i) acc[1][i] = 0.0f;
  }
  const u32 low28 = static_cast<u32>(args.zero - 1) >> 4;
  const int column = lane % 4 * 2;
  u8* out = reinterpret_cast<u8*>(static_cast<PackedGroup*>(args.out) + (block.first + column) * args.out_stride +
                                  tile * 4 + lane / 4);
  const long long row = args.out_stride * static_cast<long long>(sizeof(PackedGroup));
  const long long rest = row * 7;
#pragma unroll
  for (int n = 0; n < N / 8; ++n) {
    if (n * 8 >= block.count) break;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int i = n * 4 + e;
      const Vec2 v = pack_group(acc[0][i], acc[0][i + 2], acc[1][i], acc[1][i + 2], low28);
      if (n * 8 + column + e < block.count) __stcg(reinterpret_cast<uint2*>(out), make_uint2(v.x, v.y));
      out += e == 0 ? row : rest;
    }
  }
}

// One item of a consumer warpgroup: 128 rows x up to N tokens, into the first N / 2 registers of each accumulator.
template <typename Tile, int N>
__device__ __forceinline__ void multiply_item(const GemmArgs& args, u32 base, Ring& ring, u32 scale_base,
                                              float (&acc)[2][Tile::value.tokens / 2]) {
  using T = PrefillShape<Tile>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32 % 4;
  const int consumer = static_cast<int>(threadIdx.x) / 128 - 1;
  const int g = lane / 4;
  const auto full = [&](int s) { return base + T::kBarriers + 8u * static_cast<u32>(s); };
  const auto empty = [&](int s) { return base + T::kBarriers + 8u * static_cast<u32>(T::stages + s); };

  float(&acc0)[N / 2] = reinterpret_cast<float(&)[N / 2]>(acc[0]);
  float(&acc1)[N / 2] = reinterpret_cast<float(&)[N / 2]>(acc[1]);
  Vec4 codes[2];
  Vec2 scale[2];
  // Two pairs of fragments; wide tiles have registers for one pair only, whose halves then alternate (2 % slower).
  constexpr bool kPairs = T::tokens <= 160;
  u32 a[kPairs ? 2 : 1][2][4];
  u64 rows = 0;
  int stage = 0;
  int previous = -1;
  // Waits for the next unit and takes its words.
  const auto take = [&]() {
    stage = ring.stage;
    mbarrier_wait(full(stage), ring.phase);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const u32 at = base + T::kWeights + static_cast<u32>(stage) * T::kWeightStride +
                     static_cast<u32>(consumer * 8 + warp * 2 + m) * kUnitBytes;
      codes[m] = load_shared4(at + static_cast<u32>(lane) * 16u);
      scale[m] = load_shared2(at + kUnitCodeBytes + static_cast<u32>(g) * 8u);
    }
    rows = swizzled_descriptor(base + T::kRows + static_cast<u32>(stage) * T::kRowStride);
    if (++ring.stage == T::stages) {
      ring.stage = 0;
      ring.phase ^= 1u;
    }
  };
  const auto fragment = [&]<int J, int M>() {
    const u32 word = J == 0 ? codes[M].x : J == 1 ? codes[M].y : J == 2 ? codes[M].z : codes[M].w;
    dequantise<true>(word, scale_pair(J < 2 ? scale[M].x : scale[M].y, J % 2 != 0, scale_base),
                     a[kPairs ? J % 2 : 0][M]);
  };
  // What is dequantised before block J is multiplied, while the block before it is.
  const auto prepare = [&]<int J>() {
    fragment.template operator()<J, 0>();
    if constexpr (kPairs) fragment.template operator()<J, 1>();
  };
  const auto issue = [&]<int J, int M, bool First>() {
    float(&d)[N / 2] = M == 0 ? acc0 : acc1;
    if constexpr (First) {
      Wgmma<N>::set(d, a[kPairs ? J % 2 : 0][M], rows + static_cast<u64>(2 * J));
    } else {
      Wgmma<N>::add(d, a[kPairs ? J % 2 : 0][M], rows + static_cast<u64>(2 * J));
    }
  };
  const auto multiply = [&]<int J, bool First>() {
    wgmma_fence();
    issue.template operator()<J, 0, First>();
    if constexpr (!kPairs) {
      wgmma_commit();
      wgmma_wait<1>();
      fragment.template operator()<J, 1>();
      wgmma_fence();
    }
    issue.template operator()<J, 1, First>();
    wgmma_commit();
    wgmma_wait<1>();  // the multiplication before this one is done: its fragments may be overwritten
  };
  // While K block j is multiplied, block j + 1 is dequantised, across units.
  const auto unit_step = [&]<bool First>(bool more) {
    multiply.template operator()<0, First>();
    if (!First) mbarrier_arrive(empty(previous));
    prepare.template operator()<1>();
    multiply.template operator()<1, false>();
    prepare.template operator()<2>();
    multiply.template operator()<2, false>();
    prepare.template operator()<3>();
    multiply.template operator()<3, false>();
    previous = stage;
    if (more) {
      take();
      prepare.template operator()<0>();
    }
  };
  take();
  prepare.template operator()<0>();
  unit_step.template operator()<true>(args.units > 1);
  for (int unit = 1; unit < args.units; ++unit) unit_step.template operator()<false>(unit + 1 < args.units);
  wgmma_wait<0>();
  keep_registers(acc0);
  keep_registers(acc1);
  mbarrier_arrive(empty(previous));
}

// Runs an item in the narrowest of the widths that holds it (wgmma_width).
template <typename Tile, int I>
__device__ __forceinline__ void multiply_narrowest(const GemmArgs& args, u32 base, Ring& ring, int tokens,
                                                   u32 scale_base, float (&acc)[2][Tile::value.tokens / 2]) {
  constexpr int kWidth = plan::moe::wgmma_width(Tile::value.tokens, I);
  if constexpr (kWidth >= Tile::value.tokens) {
    multiply_item<Tile, Tile::value.tokens>(args, base, ring, scale_base, acc);
  } else {
    if (tokens <= kWidth) {
      multiply_item<Tile, kWidth>(args, base, ring, scale_base, acc);
    } else {
      multiply_narrowest<Tile, I + 1>(args, base, ring, tokens, scale_base, acc);
    }
  }
}

// One lane of each of gate-up's producer warps. Every warp brings its share of every stage: the units of a quarter of
// the row tiles, and of every fourth four token rows, one copy for each from where the token is. At 24 clocks a copy
// that is 900 clocks for 144 rows, of the 1300 that a stage's multiplications take, so nothing else may cost time: the
// tokens of an item stay in (uniform) registers, two in one. Looking them up in L1 makes the producers the limit.
template <typename Tile>
__device__ __forceinline__ void produce_gathered(const TensorMap& rows, const GemmArgs& args, u32 base) {
  using T = PrefillShape<Tile>;
  constexpr int kTiles = kPrefillRowTiles / kPrefillProducers;  // of a warp
  constexpr int kQuads = (T::tokens / 4 + kPrefillProducers - 1) / kPrefillProducers;
  const auto full = [&](int s) { return base + T::kBarriers + 8u * static_cast<u32>(s); };
  const auto empty = [&](int s) { return base + T::kBarriers + 8u * static_cast<u32>(T::stages + s); };
  const u64 policy = policy_evict_first();
  int stage = 0;
  u32 phase = 1;
  for (u32 item = blockIdx.x;; item += keep_register(gridDim.x)) {
    // What follows from what is kept in a register here and below is computed anew: ptxas would spill it.
    const u32 warp = keep_register(threadIdx.x) / 32;
    const u32 row_groups = keep_register(static_cast<u32>(args.row_tiles) + (kPrefillRowTiles - 1)) / kPrefillRowTiles;
    const u32 index = item / row_groups;
    if (index >= static_cast<u32>(args.route.counts[0])) break;
    const Block block = args.route.blocks[index];
    const u32 first_tile = item % row_groups * kPrefillRowTiles + warp * kTiles;
    const int left = args.row_tiles - static_cast<int>(first_tile);
    const int tiles = left < 0 ? 0 : left < kTiles ? left : kTiles;
    // Rows up to a multiple of four: an expert's slots end at a multiple of 8. What stands for a token there may be
    // anything, and the copy engine makes zeros of what is none.
    const int quads = static_cast<int>(static_cast<u32>(block.count + 3) / 4);
    const int mine = (quads + kPrefillProducers - 1 - static_cast<int>(warp)) / kPrefillProducers;
    const u32 bytes = static_cast<u32>(tiles) * kUnitBytes + static_cast<u32>(mine) * (4 * kUnitK * 2);
    const u8* weights = args.weights + static_cast<u64>(block.expert) * args.expert_bytes +
                        static_cast<u64>(first_tile * (static_cast<u32>(args.units) * kUnitBytes));
    const int4* list = reinterpret_cast<const int4*>(args.route.slot_token + block.first) + warp;
    u32 tokens[2 * kQuads];  // fewer than 65536 in a layer: two in a register
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      __threadfence_block();                       // one after the other: ptxas would ask for all at once, and spill
      const int4 t = list[i * kPrefillProducers];  // all of a tile's (kSlotsBeyond), so that nothing depends on `mine`
      tokens[2 * i] = keep_register((static_cast<u32>(t.x) & 0xffffu) | static_cast<u32>(t.y) << 16);
      tokens[2 * i + 1] = keep_register((static_cast<u32>(t.z) & 0xffffu) | static_cast<u32>(t.w) << 16);
    }
    for (int unit = 0; unit < args.units; ++unit) {
      mbarrier_wait(empty(stage), phase);
      mbarrier_arrive_expect(full(stage), bytes);
      const u32 bar = full(stage);
      const u32 units = base + T::kWeights + static_cast<u32>(stage) * T::kWeightStride + warp * kTiles * kUnitBytes;
      const u32 tile_bytes = keep_register(static_cast<u32>(args.units)) * kUnitBytes;
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        if (i < tiles) {
          bulk_copy(units + static_cast<u32>(i) * kUnitBytes, weights + i * tile_bytes, kUnitBytes, bar, policy);
        }
      }
      weights += kUnitBytes;
      const u32 to = base + T::kRows + static_cast<u32>(stage) * T::kRowStride + warp * (4 * kUnitK * 2);
      const int column = unit * kUnitK;
#pragma unroll
      for (int i = 0; i < kQuads; ++i) {
        if (i >= mine) break;
        const u32 at = to + static_cast<u32>(i * kPrefillProducers) * (4 * kUnitK * 2);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const u32 pair = keep_register(tokens[2 * i + j]);  // or the compiler would unpack them all ahead
          tensor_copy_row(at + 2 * j * kUnitK * 2, rows, column, static_cast<int>(pair & 0xffffu), bar);
          tensor_copy_row(at + (2 * j + 1) * kUnitK * 2, rows, column, static_cast<int>(pair >> 16), bar);
        }
      }
      if (++stage == T::stages) {
        stage = 0;
        phase ^= 1u;
      }
    }
  }
}

// Down's producers take turns at the stages: one lane for each row tile, one for the token rows.
template <typename Tile>
__device__ __forceinline__ void produce_flat(const GemmArgs& args, u32 base) {
  using T = PrefillShape<Tile>;
  const auto full = [&](int s) { return base + T::kBarriers + 8u * static_cast<u32>(s); };
  const auto empty = [&](int s) { return base + T::kBarriers + 8u * static_cast<u32>(T::stages + s); };
  // Fewer producers than stages: one that is two rounds ahead of a barrier could not tell its phases apart. (With as
  // many as stages, ptxas runs out of registers in the consumers of wide tiles and serialises their multiplications.)
  constexpr int kProducers = T::stages <= kPrefillProducers ? T::stages - 1 : kPrefillProducers;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const u64 policy = policy_evict_first();
  const int row_groups = (args.row_tiles + kPrefillRowTiles - 1) / kPrefillRowTiles;
  // Items count row groups first; the division is done once.
  const int step_blocks = static_cast<int>(gridDim.x) / row_groups;
  const int step_groups = static_cast<int>(gridDim.x) % row_groups;
  int index = static_cast<int>(blockIdx.x) / row_groups;  // of the block
  int row_group = static_cast<int>(blockIdx.x) % row_groups;
  const int blocks = args.route.counts[0];
  int unit = warp;  // the stages of all items, one after the other, are dealt out to the producers
  int stage = warp % T::stages;
  u32 phase = static_cast<u32>(warp / T::stages);
  while (warp < kProducers && index < blocks) {
    const Block block = args.route.blocks[index];
    // Lane i brings the unit of row tile i, lane 16 the token rows.
    const int tile = row_group * kPrefillRowTiles + lane;
    const int left = args.row_tiles - row_group * kPrefillRowTiles;
    const u32 tiles = static_cast<u32>(left < kPrefillRowTiles ? left : kPrefillRowTiles);
    const u32 row_bytes = static_cast<u32>(block.count) * (kUnitK * 2);
    const bool rows = lane == kPrefillRowTiles;
    const bool mine = rows || lane < static_cast<int>(tiles);
    const u32 bytes = rows ? row_bytes : kUnitBytes;
    const u32 place = rows ? T::kRows : T::kWeights + static_cast<u32>(lane) * kUnitBytes;
    const u32 stride = rows ? T::kRowStride : T::kWeightStride;
    const u8* source = rows ? reinterpret_cast<const u8*>(args.source + static_cast<long long>(block.first) * kUnitK)
                            : args.weights + static_cast<u64>(block.expert) * args.expert_bytes +
                                  static_cast<u64>(tile) * args.units * kUnitBytes;
    const u64 step = rows ? static_cast<u64>(args.source_stride) * 2 : kUnitBytes;
    for (; unit < args.units; unit += kProducers) {
      mbarrier_wait(empty(stage), (phase & 1u) ^ 1u);
      __syncwarp();  // every lane has seen the stage free before it can be filled and given back again
      if (lane == 0) mbarrier_arrive_expect(full(stage), tiles * kUnitBytes + row_bytes);
      if (mine) {
        bulk_copy(base + place + static_cast<u32>(stage) * stride, source + static_cast<u64>(unit) * step, bytes,
                  full(stage), policy);
      }
      for (stage += kProducers; stage >= T::stages; stage -= T::stages) ++phase;
    }
    unit -= args.units;
    index += step_blocks;
    row_group += step_groups;
    if (row_group >= row_groups) {
      row_group -= row_groups;
      ++index;
    }
  }
}

template <typename Tile>
__device__ __forceinline__ void run_items(const TensorMap* rows, const GemmArgs& args) {
  using T = PrefillShape<Tile>;
  // Gate-up's producers have tokens to keep.
  constexpr int kProducerRegisters = T::tokens > 160 && !T::gate_up ? 24 : 40;
  constexpr int kConsumerRegisters = T::tokens > 160 && !T::gate_up ? 240 : 232;
  FOURFOLD_DYNAMIC_SHARED(smem);
  // NVRTC would compute the address anew, in 64 bits, wherever it is used, and ptxas then finds too few registers for
  // the multiplications of many tiles.
  const u32 base = keep_register(shared_address(smem));
  const int group = static_cast<int>(threadIdx.x) / 128;
  const auto full = [&](int s) { return base + T::kBarriers + 8u * static_cast<u32>(s); };
  const auto empty = [&](int s) { return base + T::kBarriers + 8u * static_cast<u32>(T::stages + s); };
  if (threadIdx.x == 0) {
    for (int s = 0; s < T::stages; ++s) {
      mbarrier_init(full(s), T::gate_up ? kPrefillProducers : 1);
      mbarrier_init(empty(s), 256);  // every consumer thread: each reads its own words of the stage
    }
    fence_barrier_init();
    if constexpr (T::gate_up) prefetch_tensor_map(*rows);
  }
  grid_dependency_wait();
  grid_launch_dependents();
  __syncthreads();
  const int row_groups = (args.row_tiles + kPrefillRowTiles - 1) / kPrefillRowTiles;
  const int items = row_groups * args.route.counts[0];

  if (group == 0) {
    registers_decrease<kProducerRegisters>();
    if constexpr (T::gate_up) {
      if (one_lane()) produce_gathered<Tile>(*rows, args, base);
    } else {
      produce_flat<Tile>(args, base);
    }
  } else {
    registers_increase<kConsumerRegisters>();
    const u32 scale_base = opaque_scale_base(args.zero);
    Ring ring{0, 0};
    for (int item = static_cast<int>(blockIdx.x); item < items; item += static_cast<int>(gridDim.x)) {
      const Block block = args.route.blocks[item / row_groups];
      const int row_tile = item % row_groups * kPrefillRowTiles;
      float acc[2][T::tokens / 2];
      multiply_narrowest<Tile, 0>(args, base, ring, block.count, scale_base, acc);
      if constexpr (T::gate_up) {
        store_activation<Tile>(args, base, row_tile, block, acc);
      } else {
        store_groups<Tile>(args, row_tile, block, acc);
      }
    }
    if (T::gate_up && threadIdx.x % 128 == 0) bulk_store_wait();
  }
}

}  // namespace prefill_detail

// Down.
template <typename Tile>
__global__ void __launch_bounds__(kPrefillThreads, 1) moe_prefill(const __grid_constant__ GemmArgs args) {
  static_assert(!PrefillShape<Tile>::gate_up);
  prefill_detail::run_items<Tile>(nullptr, args);
}

// Gate-up. `rows`: the hidden states, [tokens][columns]. (Apart from the arguments: what has an address is not kept in
// registers over the copies, and ptxas then finds too few for the multiplications.)
template <typename Tile>
__global__ void __launch_bounds__(kPrefillThreads, 1)
    moe_prefill_gather(const __grid_constant__ ptx::TensorMap rows, const __grid_constant__ GemmArgs args) {
  static_assert(PrefillShape<Tile>::gate_up);
  prefill_detail::run_items<Tile>(&rows, args);
}

}  // namespace fourfold::moe
