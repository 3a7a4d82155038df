// Expert GEMMs for one token, as two kernels that are a whole layer and overlap:
//   gate-up  writes h x router weight x down's tensor scale x 2^80 of every choice, bf16
//   down     adds up all choices in its accumulators and writes the final bf16 row
//
// Nothing is sorted: every valid choice is an expert of its own, in the order of the choices, and a duplicate is
// computed twice. Both kernels are launched programmatically. Down starts while gate-up runs, fills its ring with
// weights, and polls the words of h themselves, which are all ones until they are written (tables.h): no fence, no
// flag, and it never waits for gate-up's end but to end itself. That cannot deadlock: down's CTAs are only scheduled
// when every CTA of gate-up has begun (that is what launch_dependents means) or ended, and gate-up waits for nobody.
//
// A CTA is MT row tiles (of 16 weight rows) wide and persistent over items. One producer warp brings weights by bulk
// copies into a ring of stages; the ring runs on across items. The token's row goes from L2 to the registers of the
// warps that multiply with it, one stage ahead. Consumer warps are WS (every WS-th stage of an item) x WU (units of a
// stage). Partial sums of the WS x WU warps meet in shared memory and are added in a fixed order; in gate-up another
// warp does that and stores h, while these go on with the next item.
#pragma once

#include "kernels/moe/stream_math.cuh"
#include "kernels/moe/tables.h"
#include "kernels/moe/unsorted.cuh"
#include "kernels/ptx/sm90.cuh"

namespace fourfold::moe {

namespace stream_detail {

struct OneTables {
  int half;                     // gate-up: OneTurn::half
  int expert[kOnePicks];        // of the valid choices, for the producer
  float factors[3][kOnePicks];  // gate-up: what gate's, up's and the activation's sums are multiplied with
};
static_assert(plan::align_up(sizeof(OneTables), plan::kVectorAlign) == plan::moe::kOneTableBytes);

// Items, of which a CTA has every so-manieth: whole ones are RowTiles row tiles of an expert. Where the last round has
// few, these are dealt out tile by tile, so that no CTA has a whole one when most have none.
template <int RowTiles>
struct OneItems {
  int whole;  // items before them are whole
  int count;

  __device__ __forceinline__ OneItems(int items, int ctas) : whole(items), count(items) {
    if constexpr (RowTiles > 1) {
      const int last = items % ctas;
      if (last * RowTiles > ctas) return;
      whole = items - last;
      count = whole + last * RowTiles;
    }
  }
  __device__ __forceinline__ bool single(int item) const { return RowTiles > 1 && item >= whole; }
  // The whole item that it is, or is of, and its first tile there.
  __device__ __forceinline__ int of(int item) const { return single(item) ? whole + (item - whole) / RowTiles : item; }
  __device__ __forceinline__ int tile(int item) const { return single(item) ? (item - whole) % RowTiles : 0; }
};

}  // namespace stream_detail

// `Tile`: see stream_shape.h.
template <typename Tile>
__global__ void __launch_bounds__(StreamShape<Tile>::threads, StreamShape<Tile>::resident)
    moe_one(const __grid_constant__ GemmArgs args) {
  using namespace stream_detail;
  using T = StreamShape<Tile>;
  static_assert(T::one && T::nt == 1 && T::rows == 1 && T::wm == 1 && T::wk > 1);
  constexpr int kRowTiles = T::mt;
  constexpr int kConsumers = T::wk;
  constexpr int kUnits = T::ku / T::wu;  // of a stage that one warp multiplies
  constexpr int kPairs = T::pairs;

  FOURFOLD_DYNAMIC_SHARED(smem);
  const u32 base = shared_address(smem);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  OneTables& tables = *reinterpret_cast<OneTables*>(smem + T::kChoices);
  const UnsortedBarriers<Tile> bars{base + T::kBarriers};
  if (threadIdx.x == 0) bars.init(1, 0);
  // Gate-up waits for its inputs here. Down is launched once gate-up's inputs exist, so that choices may be read at
  // once, and by all of the CTA before the barrier: behind it, the CTA may say that it knows whose turn it is.
  if (T::gate_up) {
    __syncthreads();
    grid_dependency_wait();
  }
  const int id = lane < args.routing.top_k ? args.routing.ids[lane] : -1;
  const int present_half = !T::gate_up || warp == kConsumers ? args.turn->half : 0;
  const int written_rows = T::gate_up ? 0 : args.turn->rows;
  if (!T::gate_up) {
    __syncthreads();
    grid_launch_dependents();
  }
  const bool valid = id >= 0 && id < args.routing.experts;
  const u32 votes = __ballot_sync(0xffffffffu, valid);
  const int count = __popc(votes);
  const int rank = __popc(votes & ((1u << lane) - 1u));  // of this lane's choice among the valid ones

  const int row_groups = (args.row_tiles + kRowTiles - 1) / kRowTiles;
  const int chunks = (args.units + T::ku - 1) / T::ku;
  const OneItems<T::gate_up ? kRowTiles : 1> items(T::gate_up ? row_groups * count : row_groups,
                                                   static_cast<int>(gridDim.x));
  const int first_item = static_cast<int>(blockIdx.x);
  const int step = static_cast<int>(gridDim.x);
  const int length = T::gate_up ? chunks : count * chunks;  // stages of an item
  const int rounds = (length + T::ws - 1) / T::ws;

  // Row g of row tile `tile` and row g + 8: `low` and `high` are what this lane has of them.
  const auto finish = [&](int block, int tile, float low, float high) {
    const int g = lane / 4;
    if (tile >= args.row_tiles) return;
#pragma unroll
    for (int d = 1; d < 4; d *= 2) {
      low += __shfl_xor_sync(0xffffffffu, low, d);
      high += __shfl_xor_sync(0xffffffffu, high, d);
    }
    if constexpr (T::gate_up) {
      // Rows g and g + 1 share a word.
      u32* out =
          static_cast<u32*>(args.out) + (tables.half * kExchangeRows + block) * (args.out_stride / 2) + g / 2 * 2;
      const float factor = tables.factors[2][block];
      low *= tables.factors[0][block];
      if constexpr (T::relu2) {
        low = relu2(low) * factor;
        high = relu2(high * tables.factors[0][block]) * factor;
        const float low_next = __shfl_xor_sync(0xffffffffu, low, 4);
        const float high_next = __shfl_xor_sync(0xffffffffu, high, 4);
        if (lane % 8 == 0) {
          store_exchanged(out + tile * 8, to_bf16x2(low, low_next));
          store_exchanged(out + tile * 8 + 1, to_bf16x2(high, high_next));
        }
      } else {
        const float h = swiglu(low, high * tables.factors[1][block], args.limit) * factor;
        const float next = __shfl_xor_sync(0xffffffffu, h, 4);
        if (lane % 8 == 0) store_exchanged(out + tile / 2 * 8 + tile % 2, to_bf16x2(h, next));
      }
    } else if (lane % 4 == 0) {
      u16* out = static_cast<u16*>(args.out) + tile * 16 + g;
      out[0] = to_bf16(low * kOneEpilogueScale);
      out[8] = to_bf16(high * kOneEpilogueScale);
    }
  };
  // [half][warp][row tile][lane]: partial sums of a CTA's item.
  const auto partials = [&](int half, int w, int m) -> float2& {
    return reinterpret_cast<float2*>(smem + T::kPartials)[((half * kConsumers + w) * kRowTiles + m) * 32 + lane];
  };
  // The sums of row tile m, w = 0 first.
  const auto total = [&](int half, int m) {
    float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int w = 0; w < kConsumers; ++w) {
      const float2 p = partials(half, w, m);
      sum.x += p.x;
      sum.y += p.y;
    }
    return sum;
  };

  if (warp == kConsumers) {
    // ---- weights
    if (valid) tables.expert[rank] = id;
    if (T::gate_up && lane == 0) tables.half = present_half;
    __syncwarp();
    const int expert = lane < count ? tables.expert[lane] : 0;
    const u64 policy = policy_evict_first();
    int brought = 0;
    int stage = 0;
    u32 parity = 1;
    for (int item = first_item; item < items.count; item += step) {
      int b = T::gate_up ? items.of(item) / row_groups : 0;
      const int first_tile = (items.of(item) - b * row_groups) * kRowTiles + items.tile(item);
      const int most = items.single(item) ? 1 : kRowTiles;
      const int left = args.row_tiles - first_tile;
      const int tiles = left < 0 ? 0 : left < most ? left : most;
      int chunk = 0;
      for (int j = 0; j < rounds * T::ws; ++j) {
        mbarrier_wait(bars.empty(stage), parity);
        // Also: every lane has seen the stage free before this warp's arrival lets the ring turn.
        const int present = __shfl_sync(0xffffffffu, expert, b);
        if (j >= length) {
          if (lane == 0) mbarrier_arrive(bars.full(stage));
        } else {
          const int units = args.units - chunk * T::ku;
          const u32 bytes = static_cast<u32>(units < T::ku ? units : T::ku) * kUnitBytes;
          const u8* source = args.weights + static_cast<u64>(present) * args.expert_bytes +
                             (static_cast<u64>(first_tile + lane) * args.units + chunk * T::ku) * kUnitBytes;
          if (lane == 0) mbarrier_arrive_expect(bars.full(stage), bytes * static_cast<u32>(tiles));
          if (lane < tiles) {
            bulk_copy(base + T::kWeights + static_cast<u32>(stage) * T::kWeightStride +
                          static_cast<u32>(lane) * (T::ku * kUnitBytes),
                      source, bytes, bars.full(stage), policy);
          }
        }
        // Down's weights are asked for when this CTA's first ones are under way.
        if (T::gate_up && ++brought == T::stages) grid_launch_dependents();
        if (++stage == T::stages) {
          stage = 0;
          parity ^= 1u;
        }
        if (++chunk == chunks) {
          chunk = 0;
          ++b;
        }
      }
    }
    if (T::gate_up) grid_launch_dependents();
    if constexpr (!T::gate_up) end_turn(args.turn, present_half, args.routing.top_k, lane);
  } else if (warp > kConsumers) {
    // ---- gate-up: h
    if (valid) {
      tables.factors[0][rank] = args.scales[T::relu2 ? id : id * 2] * kOneEpilogueScale;
      if (!T::relu2) tables.factors[1][rank] = args.scales[id * 2 + 1] * kOneEpilogueScale;
      tables.factors[2][rank] = args.routing.weights[lane] * (args.down_scales[id] * kOneTokenScale);
    }
    __syncwarp();  // the factors are there
    int half = 0;
    u32 parity = 0;
    for (int item = first_item; item < items.count; item += step) {
      mbarrier_wait(bars.summed(half), parity);
      const int block = items.of(item) / row_groups;
      const int first_tile = (items.of(item) - block * row_groups) * kRowTiles + items.tile(item);
      float2 sums[kRowTiles];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) sums[m] = total(half, m);
      __syncwarp();
      if (lane == 0) mbarrier_arrive(bars.taken(half));
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        if (m == 0 || !items.single(item)) finish(block, first_tile + m, sums[m].x, sums[m].y);
      }
      half ^= 1;
      if (half == 0) parity ^= 1u;
    }
  } else {
    // ---- consumers
    const int ws = warp / T::wu;
    const int first_unit = warp % T::wu * kUnits;
    const int g = lane / 4;
    const u32 scale_base = opaque_scale_base(args.zero);
    u32 masks[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) masks[q] = keep_register(g / 2 == q ? 0xffffffffu : 0u);

    // This lane's words of the row for a stage: x as it is, or h where it is there.
    const u32* source = reinterpret_cast<const u32*>(args.source);
    if (!T::gate_up) source += present_half * (kExchangeRows * args.source_stride / 2);
    const auto fetch = [&](int b, int chunk, u32(&x)[kPairs][2]) {
#pragma unroll
      for (int p = 0; p < kPairs; ++p) {
        x[p][0] = x[p][1] = 0;
        const int unit = chunk * T::ku + first_unit + 2 * p + g / 4;
        if (kUnits == 1 && g >= 4) continue;
        if constexpr (T::gate_up) {
          if (unit >= args.units) continue;
          const u32* at = source + unit * 32 + g % 4 * 8 + lane % 4;
          x[p][0] = at[0];
          x[p][1] = at[4];
        } else {
          if (b >= count || unit >= args.units || unit * 4 + g % 4 >= args.inner_blocks) continue;
          const Vec2 words =
              load_exchanged2(source + b * (args.source_stride / 2) + unit * 32 + g % 4 * 8 + lane % 4 * 2);
          x[p][0] = words.x;
          x[p][1] = words.y;
        }
      }
    };
    const int first_b = T::gate_up ? 0 : ws / chunks;
    const int first_chunk = T::gate_up ? ws : ws % chunks;
    int b = first_b;
    int chunk = first_chunk;
    u32 x[kPairs][2];
    fetch(b, chunk, x);

    if constexpr (!T::gate_up) {
      // The other half becomes unwritten again; what read it has ended.
      u32* other = reinterpret_cast<u32*>(const_cast<u16*>(args.source)) +
                   (present_half ^ 1) * (kExchangeRows * args.source_stride / 2);
      const int words = written_rows * static_cast<int>(args.source_stride) / 2;
      for (int i = (first_item * (kConsumers * 32) + static_cast<int>(threadIdx.x)) * 4; i < words;
           i += step * (kConsumers * 32) * 4) {
        clear_exchanged4(other + i);
      }
    }

    u32 stage = static_cast<u32>(ws);
    u32 parity = 0;
    int half = 0;  // of the partial sums
    u32 taken_parity = 1;

    for (int item = first_item; item < items.count; item += step) {
      float sums[T::mt][2] = {};
      for (int r = 0; r < rounds; ++r) {
        // One stage ahead; after an item's last stage comes the first of the next, of the same row.
        int next_b = b;
        int next_chunk = chunk + T::ws;
        if constexpr (!T::gate_up) {
          while (next_chunk >= chunks) {
            next_chunk -= chunks;
            ++next_b;
          }
        }
        if (r + 1 == rounds) {
          next_b = first_b;
          next_chunk = first_chunk;
        }
        u32 ahead[kPairs][2];
        fetch(next_b, next_chunk, ahead);
        mbarrier_wait(bars.full(stage), parity);
        if (T::gate_up ? chunk < chunks : b < count) {
          if constexpr (T::gate_up) {
#pragma unroll
            for (int p = 0; p < kPairs; ++p) {
#pragma unroll
              for (int i = 0; i < 2; ++i) x[p][i] = mul_bf16x2(x[p][i], kOneTokenPair);
            }
          } else {
            for (;;) {
              bool missing = false;
#pragma unroll
              for (int p = 0; p < kPairs; ++p) missing |= x[p][0] == kUnwritten || x[p][1] == kUnwritten;
              if (!__any_sync(0xffffffffu, missing)) break;
              fetch(b, chunk, x);
            }
          }
          const u32 weights = base + T::kWeights + stage * T::kWeightStride;
          const int left = args.units - chunk * T::ku;
          const auto multiply = [&]<int Tiles>() {
            if (left >= T::ku) {
              multiply_one<Tile, true, Tiles>(sums, weights, x, masks, first_unit, left, lane, scale_base);
            } else {
              multiply_one<Tile, false, Tiles>(sums, weights, x, masks, first_unit, left, lane, scale_base);
            }
          };
          if (T::gate_up && items.single(item)) {
            multiply.template operator()<1>();
          } else {
            multiply.template operator()<T::mt>();
          }
        }
        __syncwarp();
        if (lane == 0) mbarrier_arrive(bars.empty(stage));
        b = next_b;
        chunk = next_chunk;
#pragma unroll
        for (int p = 0; p < kPairs; ++p) {
#pragma unroll
          for (int i = 0; i < 2; ++i) x[p][i] = ahead[p][i];
        }
        stage += T::ws;
        if (stage >= static_cast<u32>(T::stages)) {
          stage -= static_cast<u32>(T::stages);
          parity ^= 1u;
        }
      }

      if (T::gate_up) mbarrier_wait(bars.taken(half), taken_parity);
#pragma unroll
      for (int m = 0; m < T::mt; ++m) partials(half, warp, m) = make_float2(sums[m][0], sums[m][1]);
      if constexpr (T::gate_up) {
        __syncwarp();
        if (lane == 0) mbarrier_arrive(bars.summed(half));
      } else {
        // Row tile m is added up and finished by warp m.
        barrier_sync(1, kConsumers * 32);
        if (warp < T::mt) {
          const float2 sum = total(half, warp);
          finish(0, item * kRowTiles + warp, sum.x, sum.y);
        }
      }
      half ^= 1;
      if (half == 0) taken_parity ^= 1u;
    }
  }
}

}  // namespace fourfold::moe
