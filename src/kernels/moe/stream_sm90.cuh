// Expert GEMMs for few tokens per expert, shaped for memory bandwidth: blocks of up to 32 tokens from moe_route; down
// writes fp32 rows per slot, which moe_combine adds up. (One token: one_sm90.cuh.)
//
// A CTA is MT*WM row tiles (of 16 weight rows) wide and persistent over items. Producer warps keep a ring of stages
// full with bulk copies: per row tile one contiguous strip of KU units, per token one row piece. Consumer warps are WM
// (rows) x WS (every WS-th stage of an item) x WU
// (units of a stage); a warp holds MT x NT fp32 accumulators of m16n8k16 with the weights as A operand.
// Partial sums of the WS x WU warps meet in shared memory and are added in a fixed order. No atomics.
//
// Columns of a tile never mix, so token rows that are not loaded may hold anything: their columns are never stored.
#pragma once

#include "kernels/moe/stream_math.cuh"
#include "kernels/moe/tables.h"
#include "kernels/ptx/sm90.cuh"

namespace fourfold::moe {

namespace stream_detail {

using namespace ptx;

// Wide tiles: registers that a thread has.
inline constexpr int kStreamProducerRegisters = 32;
inline constexpr int kStreamConsumerRegisters = 112;

// Where an item is: block of tokens and group of weight rows, or the other way round.
struct Place {
  int outer;
  int inner;
};

// Position of a stage in a CTA's list of work: item, chunk of K.
struct Cursor {
  int item;
  int chunk;
};

}  // namespace stream_detail

// `Tile`: see stream_shape.h.
template <typename Tile>
__global__ void __launch_bounds__(StreamShape<Tile>::threads, StreamShape<Tile>::resident)
    moe_stream(const __grid_constant__ GemmArgs args) {
  using namespace stream_detail;
  using T = StreamShape<Tile>;
  constexpr int kRowTiles = T::mt * T::wm;
  constexpr int kWarpsK = T::wk;
  constexpr int kConsumers = T::wm * kWarpsK;
  constexpr u32 kRowStride = T::kRowStride;
  static_assert(T::tile.family == plan::moe::Family::kStreaming);
  constexpr int kSets = T::mt * T::nt == 1 ? 2 : 1;  // two accumulators where one would chain the multiplications

  FOURFOLD_DYNAMIC_SHARED(smem);
  const u32 base = shared_address(smem);
  // By shuffle, so that the compiler knows it is the same in all lanes: roles then need fewer registers.
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto full = [&](u32 s) { return base + T::kBarriers + 8u * s; };
  const auto empty = [&](u32 s) { return base + T::kBarriers + 8u * (static_cast<u32>(T::stages) + s); };
  constexpr bool kRaises = T::wide;
  const u32 stored = base + T::kBarriers + 16u * static_cast<u32>(T::stages);  // for that: an item's rows are,
  const u32 noticed = stored + 8u;                                             // and the warp that raises knows
  // Down takes all blocks for one group of weight rows, then for the next: what the sum beside it waits for.
  constexpr bool kByGroup = !T::gate_up && T::wide;
  static_assert(!kByGroup || kRowTiles * 16 == kSumColumns);

  if (threadIdx.x == 0) {
    for (u32 s = 0; s < static_cast<u32>(T::stages); ++s) {
      mbarrier_init(full(s), T::copiers);
      mbarrier_init(empty(s), T::wm * T::wu);
    }
    if (kRaises) {
      mbarrier_init(stored, kConsumers);
      mbarrier_init(noticed, 1);
    }
    fence_barrier_init();
  }
  // Gate-up waits for its inputs here. Down is launched once gate-up's inputs exist, so route tables may be read
  // at once; only the activation rows are waited for, after the first weights have been requested.
  if (T::gate_up) {
    grid_dependency_wait();
    grid_launch_dependents();
  }
  __syncthreads();

  const int row_groups = (args.row_tiles + kRowTiles - 1) / kRowTiles;
  const int chunks = (args.units + T::ku - 1) / T::ku;
  const int first_item = static_cast<int>(blockIdx.x);
  const int step = static_cast<int>(gridDim.x);
  // The first block is asked for together with the number of blocks, not after it: it may be one of an earlier layer.
  const int most_blocks =
      max_blocks(static_cast<long long>(args.routing.tokens) * args.routing.top_k, args.routing.experts, T::nt * 8);
  const int guess = kByGroup ? first_item : first_item / row_groups;
  const int blocks = args.route.counts[0];
  Block first_block{-1, 0, 0, 0};
  if (warp >= kConsumers && guess < most_blocks) first_block = args.route.blocks[guess];
  const int items = row_groups * blocks;
  // Items are places in a table, counted along its rows: blocks of row_groups places or, by group, groups of `blocks`.
  const int inner = kByGroup ? (blocks > 0 ? blocks : 1) : row_groups;
  const int outer = blocks > 0 ? (kByGroup ? row_groups : blocks) : 0;
  const int step_outer = step / inner;
  const int step_inner = step % inner;
  const Place first{first_item / inner, first_item % inner};
  const auto after = [&](Place p) {
    p.outer += step_outer;
    p.inner += step_inner;
    if (p.inner >= inner) {
      p.inner -= inner;
      ++p.outer;
    }
    return p;
  };
  const auto block_of = [&](const Place& p) { return kByGroup ? p.inner : p.outer; };
  const auto group_of = [&](const Place& p) { return kByGroup ? p.outer : p.inner; };
  const int surplus = (T::ws - chunks % T::ws) % T::ws;  // stages at the end of an item that carry nothing
  const int length = chunks + surplus;
  const auto next = [&](Cursor& c) {
    if (++c.chunk >= length) {
      c.chunk = 0;
      c.item += step;
    }
  };
  // The block that an item belongs to. Past the end: no expert.
  const auto block_at = [&](const Place& p) -> Block {
    if (p.outer >= outer) return Block{-1, 0, 0, 0};
    return args.route.blocks[block_of(p)];
  };

  if (warp >= kConsumers) {
    if constexpr (T::wide) registers_decrease<kStreamProducerRegisters>();
    // ---- producers: the lanes of a warp issue bulk copies one after the other, so several warps share them
    const int producer = warp - kConsumers;
    if (kRaises && producer == T::copiers) {
      // Raising takes half a microsecond, so nobody else does it.
      u32 phase = 0;
      for (Place p = first; p.outer < outer; p = after(p), phase ^= 1u) {
        mbarrier_wait(stored, phase);
        if (lane == 0) mbarrier_arrive(noticed);
        raise_flag(kByGroup ? &args.route.finished[p.outer] : &args.route.stored[p.outer], 1, lane);
      }
    } else {
      const bool mine = lane % T::copiers == producer;
      const u64 weight_policy = policy_evict_first();
      const u64 row_policy = policy_evict_last();
      const auto units_of = [&](const Cursor& c) {
        const int left = args.units - c.chunk * T::ku;
        return static_cast<u32>(left < T::ku ? left : T::ku);
      };
      // The present item's group of rows, its block and this lane's token row. The latter two are fetched one and two
      // items ahead (down knows the row from the block), so that no stage waits for a chain of loads.
      int group = 0;
      Block block{-1, 0, 0, 0};
      Block ahead{-1, 0, 0, 0};
      Block further{-1, 0, 0, 0};
      int row = 0;
      int row_ahead = 0;
      int ready_item = -1;
      bool looked_ahead = true;
      const auto row_of = [&](const Block& b) -> int {
        if (b.expert < 0 || lane >= b.count) return 0;
        return T::gate_up ? args.route.slot_token[b.first + lane] : b.first + lane;
      };
      const auto enter = [&](const Cursor& c) -> Block {
        if (c.item != ready_item) {
          if (ready_item >= 0 && c.item == ready_item + step) {
            group = kByGroup ? c.item / inner : c.item % inner;
            block = ahead;
            row = T::gate_up ? row_ahead : row_of(block);
            if (T::gate_up) ahead = further;
          } else {  // the first item
            group = group_of(first);
            block = guess < blocks ? first_block : block_at(first);
            row = row_of(block);
            if (T::gate_up) ahead = block_at(after(first));
          }
          ready_item = c.item;
          looked_ahead = false;
        }
        return c.chunk >= chunks ? Block{-1, 0, 0, 0} : block;
      };
      // After the first copies of an item, which need not wait for these loads.
      const auto look_ahead = [&]() {
        if (looked_ahead) return;
        looked_ahead = true;
        const auto block_of_item = [&](int item) { return block_at({item / inner, item % inner}); };
        if (T::gate_up) {
          row_ahead = row_of(ahead);
          further = block_of_item(ready_item + 2 * step);
        } else {
          ahead = block_of_item(ready_item + step);
        }
      };
      const auto issue_weights = [&](const Cursor& c, const Block& b, int stage) {
        __syncwarp();  // every lane has seen the stage free before this warp's arrival lets the ring turn
        if (b.expert < 0) {
          if (lane == 0) mbarrier_arrive(full(stage));
          return;
        }
        const u32 units = units_of(c);
        const int left = args.row_tiles - group * kRowTiles;
        const int tiles = left < kRowTiles ? left : kRowTiles;
        const u32 rows = static_cast<u32>(b.count);
        // Every producer arrives, also one that has nothing to bring: the ring may never lap a producer by two turns,
        // or it could not tell the phases apart. The bytes are announced by the first.
        if (lane == 0) {
          if (producer == 0) {
            mbarrier_arrive_expect(full(stage), units * (static_cast<u32>(tiles) * kUnitBytes + rows * (kUnitK * 2)));
          } else {
            mbarrier_arrive(full(stage));
          }
        }
        if (mine && lane < tiles) {
          const u8* source = args.weights + static_cast<u64>(b.expert) * args.expert_bytes +
                             (static_cast<u64>(group * kRowTiles + lane) * args.units + c.chunk * T::ku) * kUnitBytes;
          bulk_copy(base + T::kWeights + static_cast<u32>(stage) * T::kWeightStride +
                        static_cast<u32>(lane) * (T::ku * kUnitBytes),
                    source, units * kUnitBytes, full(stage), weight_policy);
        }
      };
      int rows_until = 0;  // down: rows of this CTA's items before this one are known to be there
      const auto issue_rows = [&](const Cursor& c, const Block& b, int stage) {
        if (b.expert < 0) return;
        if (!T::gate_up && args.ready != 0 && c.item >= rows_until) {
          const int later = c.item + lane * step;
          const int item = later < items ? later : items - 1;
          const int* flag = args.route.stored + (kByGroup ? item % inner : item / inner);
          rows_until = c.item + step * wait_flags(flag, 32, args.ready, lane);
        }
        if (mine && lane < b.count) {
          bulk_copy(
              base + T::kRows + static_cast<u32>(stage) * T::kRowStageStride + static_cast<u32>(lane) * kRowStride,
              args.source + row * args.source_stride + c.chunk * (T::ku * kUnitK), units_of(c) * (kUnitK * 2),
              full(stage), row_policy);
        }
      };
      Cursor c{first_item, 0};
      int stage = 0;
      u32 phase = 0;
      if (!T::gate_up) {
        Cursor w = c;
        for (int s = 0; s < T::stages && w.item < items; ++s, next(w)) {
          issue_weights(w, enter(w), s);
          look_ahead();
        }
        if (args.ready == 0) grid_dependency_wait();
        grid_launch_dependents();
        w = c;
        for (int s = 0; s < T::stages && w.item < items; ++s, next(w)) {
          issue_rows(w, enter(w), s);
          look_ahead();
        }
        c = w;
        phase = 1;
      }
      for (; c.item < items; next(c)) {
        mbarrier_wait(empty(stage), (phase & 1u) ^ 1u);
        const Block b = enter(c);
        issue_weights(c, b, stage);
        issue_rows(c, b, stage);
        look_ahead();
        if (++stage == T::stages) {
          stage = 0;
          ++phase;
        }
      }
      // Kernels further on rely on gate-up's end, too.
      if (!T::gate_up && args.ready != 0) grid_dependency_wait();
    }
  } else {
    if constexpr (T::wide) registers_increase<kStreamConsumerRegisters>();
    // ---- consumers
    if (!T::gate_up && args.ready == 0) grid_dependency_wait();
    const int wm = warp % T::wm;
    const int wk = warp / T::wm;
    const int ws = wk / T::wu;
    const int first_unit = wk % T::wu * (T::ku / T::wu);
    const int g = lane / 4;
    const int l = lane % 4;
    const u32 scale_base = opaque_scale_base(args.zero);
    // ldmatrix: lanes 0-7 address the rows at K 0..7 of a block, 8-15 at 8..15, 16-31 the same of the next block
    const u32 matrix_row = static_cast<u32>(lane % 8);
    const u32 matrix_k = static_cast<u32>(lane / 8) * 16u;
    u32 position = 0;  // of the item's first stage in this CTA's sequence
    int parity = 0;    // of the reduction buffer
    u32 noticed_phase = 1;

    // What the epilogue multiplies with, fetched at the beginning of its item.
    struct Factors {
      float first, second;
    };
    const auto factors_of = [&](const Block& b) {
      Factors f = {};
      if (b.expert < 0) return f;
      if (T::gate_up) {
        f.first = args.scales[T::relu2 ? b.expert : b.expert * 2];
        if (!T::relu2) f.second = args.scales[b.expert * 2 + 1];
      } else {
        f.first = args.scales[b.expert];
      }
      return f;
    };

    const auto run_item = [&]<int NT>(int group, const Block& block, const Factors& factors) {
      float acc[kSets][T::mt][NT][4];
#pragma unroll
      for (int s = 0; s < kSets; ++s)
#pragma unroll
        for (int m = 0; m < T::mt; ++m)
#pragma unroll
          for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[s][m][n][i] = 0.0f;

      // Warp group ws takes every WS-th stage of the item: it waits once per stage and then has KU / WU units of
      // independent work, while the other groups are at other stages.
      for (int chunk = ws; chunk < length; chunk += T::ws) {
        const u32 q = position + static_cast<u32>(chunk);
        const u32 stage = q % static_cast<u32>(T::stages);
        mbarrier_wait(full(stage), (q / static_cast<u32>(T::stages)) & 1u);
        if (chunk >= chunks) {
          __syncwarp();
          if (lane == 0) mbarrier_arrive(empty(stage));
          break;
        }
        const u32 weights =
            base + T::kWeights + stage * T::kWeightStride + static_cast<u32>(wm * T::mt) * (T::ku * kUnitBytes);
        const u32 row = base + T::kRows + stage * T::kRowStageStride + matrix_row * kRowStride + matrix_k;
        const int left = args.units - chunk * T::ku;
        const auto release = [&]() {
          __syncwarp();
          if (lane == 0) mbarrier_arrive(empty(stage));
        };
        if (left >= T::ku) {  // no branches: the compiler may load ahead of the multiplications
          multiply_units<Tile, NT, kSets, true>(acc, weights, row, first_unit, left, lane, scale_base, release);
        } else {
          multiply_units<Tile, NT, kSets, false>(acc, weights, row, first_unit, left, lane, scale_base, release);
        }
      }
      position += static_cast<u32>(length);
      if (kSets == 2) {
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[0][0][0][i] += acc[kSets - 1][0][0][i];
      }

      // ---- epilogue: lane holds rows g and g + 8, columns 2l and 2l + 1 of each fragment
      // Addresses are computed here, not kept in registers over the multiplications.
      const int first_slot = keep_register(block.first);
      const auto finish = [&](int m, int n, const float(&v)[4]) {
        const int tile = group * kRowTiles + wm * T::mt + m;
        const int column = n * 8 + 2 * l;
        const long long out_row = (first_slot + column) * args.out_stride;
        const bool here[2] = {tile < args.row_tiles && column < block.count,
                              tile < args.row_tiles && column + 1 < block.count};
        // Values of columns that are not there are computed, too: without branches the compiler can overlap them all.
        if constexpr (T::gate_up && T::relu2) {
          const float s = factors.first * kEpilogueScale;
          const u32 low = keep_register(to_bf16x2(relu2(v[0] * s), relu2(v[1] * s)));
          const u32 high = keep_register(to_bf16x2(relu2(v[2] * s), relu2(v[3] * s)));
          u16* out = static_cast<u16*>(args.out) + out_row + tile * 16 + g;
#pragma unroll
          for (int e = 0; e < 2; ++e, out += args.out_stride) {
            if (!here[e]) continue;
            out[0] = static_cast<u16>(low >> (16 * e));
            out[8] = static_cast<u16>(high >> (16 * e));
          }
        } else if constexpr (T::gate_up) {
          const float gate = factors.first * kEpilogueScale;
          const float up = factors.second * kEpilogueScale;
          const u32 h = keep_register(
              to_bf16x2(swiglu(v[0] * gate, v[2] * up, args.limit), swiglu(v[1] * gate, v[3] * up, args.limit)));
          u16* out = static_cast<u16*>(args.out) + out_row + tile * 8 + g;
          if (here[0]) out[0] = static_cast<u16>(h);
          if (here[1]) out[args.out_stride] = static_cast<u16>(h >> 16);
        } else {
          const float s = factors.first * kEpilogueScale;
          float* out = static_cast<float*>(args.out) + out_row + partial_place(tile, g);
          if (here[0]) *reinterpret_cast<float2*>(out) = make_float2(v[0] * s, v[2] * s);
          if (here[1]) *reinterpret_cast<float2*>(out + args.out_stride) = make_float2(v[1] * s, v[3] * s);
        }
      };

      if constexpr (kWarpsK == 1) {
#pragma unroll
        for (int m = 0; m < T::mt; ++m)
#pragma unroll
          for (int n = 0; n < NT; ++n) finish(m, n, acc[0][m][n]);
      } else {
        // [parity][wk][wm][fragment][lane] float4. Fragment f is added up, w = 0 first, and finished by warp
        // f mod WK.
        constexpr int kFragments = T::mt * T::nt;
        float4* partial = reinterpret_cast<float4*>(smem + T::kPartials) +
                          parity * (kWarpsK * T::wm * kFragments * 32) + wm * (kFragments * 32) + lane;
#pragma unroll
        for (int m = 0; m < T::mt; ++m)
#pragma unroll
          for (int n = 0; n < NT; ++n) {
            const float(&v)[4] = acc[0][m][n];
            partial[(wk * T::wm * kFragments + m * T::nt + n) * 32] = make_float4(v[0], v[1], v[2], v[3]);
          }
        barrier_sync(1, kConsumers * 32);
        parity ^= 1;
#pragma unroll
        for (int m = 0; m < T::mt; ++m)
#pragma unroll
          for (int n = 0; n < NT; ++n) {
            if ((m * NT + n) % kWarpsK != wk) continue;
            float v[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int w = 0; w < kWarpsK; ++w) {
              const float4 p = partial[(w * T::wm * kFragments + m * T::nt + n) * 32];
              v[0] += p.x;
              v[1] += p.y;
              v[2] += p.z;
              v[3] += p.w;
            }
            finish(m, n, v);
          }
      }
    };

    Place place = first;
    Block block = block_at(first);
    for (; place.outer < outer; place = after(place)) {
      const Factors factors = factors_of(block);
      const Block ahead = block_at(after(place));
      const int columns = block.count;
      if constexpr (T::nt == 1) {
        run_item.template operator()<1>(group_of(place), block, factors);
      } else {
        if (columns <= 8) {
          run_item.template operator()<1>(group_of(place), block, factors);
        } else if (T::nt == 2 || columns <= 16) {
          run_item.template operator()<2>(group_of(place), block, factors);
        } else {
          run_item.template operator()<T::nt>(group_of(place), block, factors);
        }
      }
      if constexpr (kRaises) {
        __syncwarp();
        if (lane == 0) {
          mbarrier_wait(noticed, noticed_phase);  // of the item before: phases could not be told apart otherwise
          mbarrier_arrive(stored);
        }
        noticed_phase ^= 1u;
      }
      block = ahead;
    }
  }
}

}  // namespace fourfold::moe
