// Expert GEMMs for many tokens per expert: dequantised weights are the register operand of wgmma (64 rows), the tokens
// lie in swizzled shared memory (N of 16 .. 160, chosen per block; above 160 two
// accumulators no longer fit the registers).
//
// A CTA covers 256 weight rows: two consumer warpgroups of 128 rows (two m64 accumulators each) and one producer
// warpgroup, which brings the packed weights by bulk copies and gathers the token rows with cp.async, 16 bytes a
// thread, straight into the swizzled places. Two fragment buffers: while one K block of 16 is multiplied the next is
// dequantised.
#pragma once

#include "kernels/moe/dequant.cuh"
#include "kernels/moe/prefill_tile.h"
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

// One item of a consumer warpgroup: 128 rows x up to N tokens.
template <typename Tile, int N>
__device__ __forceinline__ void consume(const GemmArgs& args, u32 base, Ring& ring, int row_tile, const Block& block,
                                        u32 scale_base) {
  static constexpr PrefillTile T = Tile::value;
  constexpr PrefillMap kMap = prefill_map(T);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32 % 4;
  const int consumer = static_cast<int>(threadIdx.x) / 128 - 1;
  const int g = lane / 4;
  const int l = lane % 4;
  const auto full = [&](int s) { return base + kMap.barriers + 8u * static_cast<u32>(s); };
  const auto empty = [&](int s) { return base + kMap.barriers + 8u * static_cast<u32>(T.stages + s); };

  float acc[2][N / 2];
  Vec4 codes[2];
  Vec2 scale[2];
  u32 a[2][2][4];
  u64 rows = 0;
  int stage = 0;
  int previous = -1;
  // Waits for the next unit and takes its words.
  const auto take = [&]() {
    stage = ring.stage;
    mbarrier_wait(full(stage), ring.phase);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const u32 at = base + kMap.weights + static_cast<u32>(stage) * kMap.weight_stride +
                     static_cast<u32>(consumer * 8 + m * 4 + warp) * kUnitBytes;
      codes[m] = load_shared4(at + static_cast<u32>(lane) * 16u);
      scale[m] = load_shared2(at + kUnitCodeBytes + static_cast<u32>(g) * 8u);
    }
    rows = swizzled_descriptor(base + kMap.rows + static_cast<u32>(stage) * kMap.row_stride);
    if (++ring.stage == T.stages) {
      ring.stage = 0;
      ring.phase ^= 1u;
    }
  };
  const auto fragments = [&]<int J>() {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const u32 word = J == 0 ? codes[m].x : J == 1 ? codes[m].y : J == 2 ? codes[m].z : codes[m].w;
      dequantise<true>(word, scale_pair(J < 2 ? scale[m].x : scale[m].y, J % 2 != 0, scale_base), a[J % 2][m]);
    }
  };
  const auto multiply = [&]<int J, bool First>() {
    wgmma_fence();
    if constexpr (First) {
      Wgmma<N>::set(acc[0], a[J % 2][0], rows + static_cast<u64>(2 * J));
      Wgmma<N>::set(acc[1], a[J % 2][1], rows + static_cast<u64>(2 * J));
    } else {
      Wgmma<N>::add(acc[0], a[J % 2][0], rows + static_cast<u64>(2 * J));
      Wgmma<N>::add(acc[1], a[J % 2][1], rows + static_cast<u64>(2 * J));
    }
    wgmma_commit();
    wgmma_wait<1>();  // the multiplication before this one is done: its fragments may be overwritten
  };
  // While K block j is multiplied, block j + 1 is dequantised, across units.
  const auto unit_step = [&]<bool First>(bool more) {
    multiply.template operator()<0, First>();
    if (!First) {
      __syncwarp();
      if (lane == 0) mbarrier_arrive(empty(previous));
    }
    fragments.template operator()<1>();
    multiply.template operator()<1, false>();
    fragments.template operator()<2>();
    multiply.template operator()<2, false>();
    fragments.template operator()<3>();
    multiply.template operator()<3, false>();
    previous = stage;
    if (more) {
      take();
      fragments.template operator()<0>();
    }
  };
  take();
  fragments.template operator()<0>();
  unit_step.template operator()<true>(args.units > 1);
  for (int unit = 1; unit < args.units; ++unit) unit_step.template operator()<false>(unit + 1 < args.units);
  wgmma_wait<0>();
  keep_registers(acc[0]);
  keep_registers(acc[1]);
  __syncwarp();
  if (lane == 0) mbarrier_arrive(empty(previous));

#pragma unroll
  for (int m = 0; m < 2; ++m) {
    const int tile = row_tile + consumer * 8 + m * 4 + warp;
    if (tile >= args.row_tiles) continue;
    float first = kEpilogueScale;
    float second = kEpilogueScale;
    if constexpr (T.gate_up) {
      first *= args.scales[block.expert * 2];
      second *= args.scales[block.expert * 2 + 1];
    } else {
      first *= args.scales[block.expert];
    }
#pragma unroll
    for (int n = 0; n < N / 8; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int column = n * 8 + 2 * l + e;
        if (column >= block.count) continue;
        const float low = acc[m][n * 4 + e];
        const float high = acc[m][n * 4 + 2 + e];
        if constexpr (T.gate_up) {
          float gate = low * first;
          float up = high * second;
          if (args.limit > 0.0f) {
            gate = gate > args.limit ? args.limit : gate;
            up = up > args.limit ? args.limit : up < -args.limit ? -args.limit : up;
          }
          const float h = gate * reciprocal_approx(1.0f + exp2_approx(gate * -1.4426950408889634f)) * up;
          static_cast<u16*>(args.out)[(block.first + column) * args.out_stride + tile * 8 + g] = to_bf16(h);
        } else {
          float* out =
              static_cast<float*>(args.out) + (block.first + column) * args.out_stride + partial_place(tile, g);
          *reinterpret_cast<float2*>(out) = make_float2(low * first, high * first);
        }
      }
  }
}

}  // namespace prefill_detail

template <typename Tile>
__global__ void __launch_bounds__(kPrefillThreads, 1) moe_prefill(const __grid_constant__ GemmArgs args) {
  using namespace prefill_detail;
  static constexpr PrefillTile T = Tile::value;
  static_assert(T.tokens % kPrefillTokenStep == 0 && T.tokens <= 160);
  constexpr PrefillMap kMap = prefill_map(T);
  FOURFOLD_DYNAMIC_SHARED(smem);
  const u32 base = shared_address(smem);
  const int group = static_cast<int>(threadIdx.x) / 128;
  const auto full = [&](int s) { return base + kMap.barriers + 8u * static_cast<u32>(s); };
  const auto empty = [&](int s) { return base + kMap.barriers + 8u * static_cast<u32>(T.stages + s); };
  if (threadIdx.x == 0) {
    for (int s = 0; s < T.stages; ++s) {
      mbarrier_init(full(s), 128 + 1);
      mbarrier_init(empty(s), 8);  // every consumer warp: each reads its own words of the stage
    }
    fence_barrier_init();
  }
  grid_dependency_wait();
  grid_launch_dependents();
  __syncthreads();
  const int row_groups = (args.row_tiles + kPrefillRowTiles - 1) / kPrefillRowTiles;
  const int items = row_groups * args.route.counts[0];

  if (group == 0) {
    registers_decrease<40>();
    const int t = static_cast<int>(threadIdx.x);
    const u64 policy = policy_evict_first();
    // Lanes 0..3 of each warp bring one row tile each: the lanes of a warp issue bulk copies one after the other.
    const int tile = t % 32 < 4 ? t / 32 * 4 + t % 32 : kPrefillRowTiles;
    const u32 chunk = static_cast<u32>(t % 8);
    const u32 place = static_cast<u32>(t / 8) * 128u + ((chunk ^ (static_cast<u32>(t / 8) & 7u)) * 16u);
    int stage = 0;
    u32 phase = 0;
    // Rows are announced kLag stages late, when they have landed and this thread has fenced them for the asynchronous
    // proxy that wgmma reads through. (The same fence in the consumers costs a memory barrier per stage on their
    // critical path.)
    // At most stages - 2: a consumer gives a stage back when it has taken the next one.
    constexpr int kLag = T.stages > 4 ? 3 : T.stages - 2;
    int pending = 0;
    int late = 0;
    const auto announce = [&]() {
      fence_async_shared();
      mbarrier_arrive(full(late));
      if (++late == T.stages) late = 0;
    };
    for (int item = static_cast<int>(blockIdx.x); item < items; item += static_cast<int>(gridDim.x)) {
      const Block block = args.route.blocks[item / row_groups];
      const int row_tile = item % row_groups * kPrefillRowTiles;
      const int left = args.row_tiles - row_tile;
      const int tiles = left < kPrefillRowTiles ? left : kPrefillRowTiles;
      const u8* weights = args.weights + static_cast<u64>(block.expert) * args.expert_bytes +
                          static_cast<u64>(row_tile + tile) * args.units * kUnitBytes;
      u32 offset[T.tokens / 16];  // in 16-byte pieces
#pragma unroll
      for (int i = 0; i < T.tokens / 16; ++i) {
        const int column = t / 8 + 16 * i;
        long long row = 0;
        if (column < block.count) row = T.gate_up ? args.route.slot_token[block.first + column] : block.first + column;
        offset[i] = static_cast<u32>(row * (args.source_stride / 8)) + chunk;
      }
      for (int unit = 0; unit < args.units; ++unit) {
        mbarrier_wait(empty(stage), (phase & 1u) ^ 1u);
        if (t == 0) mbarrier_arrive_expect(full(stage), static_cast<u32>(tiles) * kUnitBytes);
        if (tile < tiles) {
          bulk_copy(
              base + kMap.weights + static_cast<u32>(stage) * kMap.weight_stride + static_cast<u32>(tile) * kUnitBytes,
              weights + static_cast<u64>(unit) * kUnitBytes, kUnitBytes, full(stage), policy);
        }
        const u32 destination = base + kMap.rows + static_cast<u32>(stage) * kMap.row_stride + place;
        const u8* source = reinterpret_cast<const u8*>(args.source) + static_cast<u64>(unit) * (kUnitK * 2);
#pragma unroll
        for (int i = 0; i < T.tokens / 16; ++i) {
          if (t / 8 + 16 * i < block.count) {
            async_copy16(destination + static_cast<u32>(i) * 2048u, source + static_cast<u64>(offset[i]) * 16u);
          }
        }
        async_copy_commit();
        if (pending == kLag) {
          async_copy_wait<kLag>();
          announce();
        } else {
          ++pending;
        }
        if (++stage == T.stages) {
          stage = 0;
          ++phase;
        }
      }
    }
    async_copy_wait<0>();
    for (; pending > 0; --pending) announce();
  } else {
    registers_increase<232>();
    const u32 scale_base = opaque_scale_base(args.zero);
    Ring ring{0, 0};
    for (int item = static_cast<int>(blockIdx.x); item < items; item += static_cast<int>(gridDim.x)) {
      const Block block = args.route.blocks[item / row_groups];
      const int row_tile = item % row_groups * kPrefillRowTiles;
      // Few widths are compiled (prefill_width): every further one of nearly 160 tokens costs seconds of compile time.
      constexpr int kQuarter = prefill_width(T.tokens, 0), kHalf = prefill_width(T.tokens, 1);
      constexpr int kLess = prefill_width(T.tokens, 2);
      if (kQuarter < kHalf && block.count <= kQuarter) {
        consume<Tile, kQuarter>(args, base, ring, row_tile, block, scale_base);
      } else if (kHalf < kLess && block.count <= kHalf) {
        consume<Tile, kHalf>(args, base, ring, row_tile, block, scale_base);
      } else if (kLess < T.tokens && block.count <= kLess) {
        consume<Tile, kLess>(args, base, ring, row_tile, block, scale_base);
      } else {
        consume<Tile, T.tokens>(args, base, ring, row_tile, block, scale_base);
      }
    }
  }
}

}  // namespace fourfold::moe
