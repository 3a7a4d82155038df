// Expert GEMMs for one token, as two kernels that are a whole layer and overlap:
//   gate-up  writes h x router weight x down's tensor scale x 2^80 of every choice, bf16
//   down     adds up all choices in its accumulators and writes the final bf16 row
//
// Nothing is sorted: every valid choice is an expert of its own, in the order of the choices, and a duplicate is
// computed twice. Both kernels are launched programmatically. Down starts while gate-up runs, fills its ring with
// weights, and takes the row of a choice as soon as its flag says that all of it is written: it never waits for
// gate-up's end but to end itself. The flags cannot deadlock: down's CTAs are only scheduled when every CTA of gate-up
// has begun (that is what launch_dependents means) or ended, and gate-up waits for nobody.
//
// A CTA is MT*WM row tiles (of 16 weight rows) wide and persistent over items. One producer warp brings weights, one
// the token's row, both by bulk copies into a ring of stages; the ring runs on across items. Consumer warps are WM
// (rows) x WS (every WS-th stage of an item) x WU (units of a stage). Partial sums of the WS x WU warps meet in shared
// memory and are added in a fixed order.
#pragma once

#include "kernels/moe/stream_math.cuh"
#include "kernels/moe/tables.h"
#include "kernels/ptx/sm90.cuh"

namespace fourfold::moe {

namespace stream_detail {

// The valid choices, in shared memory.
struct OneTables {
  int count;
  int expert[kOnePicks];
  float weight[kOnePicks];
  float scales[3][kOnePicks];  // gate-up: of gate, of up, of down
};
static_assert(sizeof(OneTables) <= kOneTableBytes);

// One warp fills the tables but for the scales; they are complete after the CTA's next barrier.
__device__ __forceinline__ void list_choices(const Routing& r, OneTables& t, int lane) {
  const int id = lane < r.top_k ? r.ids[lane] : -1;
  const float weight = lane < r.top_k ? r.weights[lane] : 0.0f;
  const bool valid = id >= 0 && id < r.experts;
  const u32 votes = __ballot_sync(0xffffffffu, valid);
  const int a = __popc(votes & ((1u << lane) - 1u));
  if (valid) {
    t.expert[a] = id;
    t.weight[a] = weight;
  }
  if (lane == 0) t.count = __popc(votes);
}

}  // namespace stream_detail

// `Tile` is a StreamTileOf<...>: a type, because nvcc's host stubs do not take structures as template arguments.
template <typename Tile>
__global__ void __launch_bounds__(Tile::value.threads(), Tile::value.resident())
    moe_one(const __grid_constant__ GemmArgs args) {
  using namespace stream_detail;
  static constexpr StreamTile T = Tile::value;
  static_assert(T.one && T.nt == 1 && T.rows == 1);
  constexpr int kRowTiles = T.mt * T.wm;
  constexpr int kWarpsK = T.wk();
  constexpr int kConsumers = T.wm * kWarpsK;
  static constexpr StreamMap kMap = stream_map(T);
  // A ring slot always belongs to the same warp group: a group that skipped one of a slot's turns could not tell the
  // phases of its barrier apart. Hence whole rounds of WS stages per item; the surplus ones carry nothing.
  static_assert(T.stages % T.ws == 0 && T.ku % T.wu == 0);

  FOURFOLD_DYNAMIC_SHARED(smem);
  const u32 base = shared_address(smem);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  OneTables& choices = *reinterpret_cast<OneTables*>(smem + kMap.choices);
  const auto full = [&](u32 s) { return base + kMap.barriers + 8u * s; };
  const auto empty = [&](u32 s) { return base + kMap.barriers + 8u * (static_cast<u32>(T.stages) + s); };
  const u32 done = base + kMap.barriers + 16u * static_cast<u32>(T.stages);  // gate-up: an item's h is stored

  if (threadIdx.x == 0) {
    for (u32 s = 0; s < static_cast<u32>(T.stages); ++s) {
      mbarrier_init(full(s), 2);  // the two producers
      mbarrier_init(empty(s), T.wm * T.wu);
    }
    if (T.gate_up) mbarrier_init(done, kRowTiles * 32);
    fence_barrier_init();
  }
  for (u32 i = threadIdx.x * 4u; i < kMap.zero_bytes; i += blockDim.x * 4u) {
    *reinterpret_cast<u32*>(smem + kMap.zero + i) = 0;
  }
  // Gate-up waits for its inputs here. Down is launched once gate-up's inputs exist, so that choices may be read at
  // once; what gate-up writes is waited for by flags.
  if (T.gate_up) grid_dependency_wait();
  if (!T.gate_up) grid_launch_dependents();
  if (warp == kConsumers) list_choices(args.routing, choices, lane);
  __syncthreads();

  const int row_groups = (args.row_tiles + kRowTiles - 1) / kRowTiles;
  const int chunks = (args.units + T.ku - 1) / T.ku;
  const int count = choices.count;
  const int items = T.gate_up ? row_groups * count : row_groups;
  const int first_item = static_cast<int>(blockIdx.x);
  const int step = static_cast<int>(gridDim.x);
  const int length = T.gate_up ? chunks : count * chunks;  // stages of an item
  const int rounds = (length + T.ws - 1) / T.ws;

  if (warp >= kConsumers) {
    // Calls bring(group of rows, choice or -1, chunk, stage, whether it is the item's first, last) for every stage, in
    // order, once it is free.
    const auto walk = [&](const auto& bring) {
      int stage = 0;
      u32 parity = 1;
      for (int item = first_item; item < items; item += step) {
        int b = T.gate_up ? item / row_groups : 0;
        const int group = item - b * row_groups;
        int chunk = 0;
        for (int j = 0; j < rounds * T.ws; ++j) {
          mbarrier_wait(empty(stage), parity);
          __syncwarp();  // every lane has seen the stage free before this warp's arrival lets the ring turn
          bring(group, j < length ? b : -1, chunk, stage, j == 0, j == rounds * T.ws - 1);
          if (++stage == T.stages) {
            stage = 0;
            parity ^= 1u;
          }
          if (++chunk == chunks) {
            chunk = 0;
            ++b;
          }
        }
      }
    };
    const auto units_of = [&](int chunk) {
      const int left = args.units - chunk * T.ku;
      return static_cast<u32>(left < T.ku ? left : T.ku);
    };
    if (warp == kConsumers) {
      // ---- weights
      const u64 policy = policy_evict_first();
      int brought = 0;
      walk([&](int group, int b, int chunk, int stage, bool, bool) {
        if (b < 0) {
          if (lane == 0) mbarrier_arrive(full(stage));
          return;
        }
        const int left = args.row_tiles - group * kRowTiles;
        const int tiles = left < kRowTiles ? left : kRowTiles;
        const u32 bytes = units_of(chunk) * kUnitBytes;
        if (lane == 0) mbarrier_arrive_expect(full(stage), bytes * static_cast<u32>(tiles));
        if (lane < tiles) {
          const u8* source = args.weights + static_cast<u64>(choices.expert[b]) * args.expert_bytes +
                             (static_cast<u64>(group * kRowTiles + lane) * args.units + chunk * T.ku) * kUnitBytes;
          bulk_copy(base + kMap.weights + static_cast<u32>(stage) * kMap.weight_stride +
                        static_cast<u32>(lane) * (T.ku * kUnitBytes),
                    source, bytes, full(stage), policy);
        }
        // Down's weights are asked for when this CTA's first ones are under way.
        if (T.gate_up && ++brought == T.stages) grid_launch_dependents();
      });
      if (T.gate_up) grid_launch_dependents();
      // Whoever waits for down's end may rely on gate-up's.
      if (!T.gate_up) grid_dependency_wait();
    } else {
      // ---- rows and, in gate-up, flags and scales
      const u64 policy = policy_evict_last();
      int ready = 0;  // down: choices whose rows are known to be there
      // Gate-up raises the flags here, since the fence would hold up the consumers. An item's h is stored when `done`
      // has turned; that is looked at with every stage, and waited for before the last stage of the next item.
      int owed = -1;  // choice whose flag the item before adds to
      int owed_group = 0;
      int present = -1;
      int present_group = 0;
      u32 turn = 0;
      const auto raise = [&] {
        const int left = args.row_tiles - owed_group * kRowTiles;
        raise_flag(&args.route.totals[owed], left < kRowTiles ? left : kRowTiles, lane);
        owed = -1;
        turn ^= 1u;
      };
      // The tensor scales are on their way to the tables, where the epilogues find them; they are stored before the
      // last stage of the first item is handed over.
      float scales[3] = {};
      bool stored = !T.gate_up;
      if (T.gate_up && lane < count) {
        const int expert = choices.expert[lane];
        scales[0] = args.scales[T.relu2 ? expert : expert * 2];
        if (!T.relu2) scales[1] = args.scales[expert * 2 + 1];
        scales[2] = args.down_scales[expert];
      }
      walk([&](int group, int b, int chunk, int stage, bool first, bool last) {
        if constexpr (T.gate_up) {
          if (first) {
            owed = present;
            owed_group = present_group;
            present = b;
            present_group = group;
          }
          if (owed >= 0) {
            if (last) {
              mbarrier_wait(done, turn);
              raise();
            } else if (__all_sync(0xffffffffu, mbarrier_test_wait(done, turn))) {
              raise();
            }
          }
          if (!stored && last) {
            if (lane < count) {
#pragma unroll
              for (int i = 0; i < 3; ++i) choices.scales[i][lane] = scales[i];
            }
            stored = true;
            __syncwarp();
          }
        }
        if (b < 0) {
          if (lane == 0) mbarrier_arrive(full(stage));
          return;
        }
        if (!T.gate_up && b >= ready) {
          ready += wait_flags(args.route.totals + ready + lane, count - ready, args.ready, lane);
        }
        if (lane == 0) {
          const u32 bytes = units_of(chunk) * (kUnitK * 2);
          mbarrier_arrive_expect(full(stage), bytes);
          bulk_copy(base + kMap.rows + static_cast<u32>(stage) * kMap.row_stage_stride,
                    args.source + (T.gate_up ? 0 : b * args.source_stride) + chunk * (T.ku * kUnitK), bytes,
                    full(stage), policy);
        }
      });
      if constexpr (T.gate_up) {
        if (present >= 0) {
          owed = present;
          owed_group = present_group;
          mbarrier_wait(done, turn);
          raise();
        }
      } else {
        // The last CTA that has looked at the flags leaves them zero.
        if (ready == 0) grid_dependency_wait();
        if (lane == 0 && atomicAdd(&args.route.totals[kMaxExperts], 1) == step - 1) {
          for (int b = 0; b < count; ++b) args.route.totals[b] = 0;
          args.route.totals[kMaxExperts] = 0;
        }
      }
    }
  } else {
    // ---- consumers
    const int wm = warp % T.wm;
    const int wk = warp / T.wm;
    const int ws = wk / T.wu;
    const int first_unit = wk % T.wu * (T.ku / T.wu);
    const int g = lane / 4;
    const u32 scale_base = opaque_scale_base(args.zero);
    const u32 matrix_k = static_cast<u32>(lane / 8) * 16u;
    const int column = lane % 8 - lane / 16;  // K blocks 2q and 2q + 1 are this lane's where column is 2q
    u32 stage = static_cast<u32>(ws);
    u32 parity = 0;
    int half = 0;  // of the reduction buffer

    for (int item = first_item; item < items; item += step) {
      const int block = T.gate_up ? item / row_groups : 0;
      const int group = item - block * row_groups;
      float sums[T.mt][2] = {};
      int b = 0;
      int chunk = ws;
      for (int r = 0; r < rounds; ++r) {
        mbarrier_wait(full(stage), parity);
        if constexpr (!T.gate_up) {
          while (chunk >= chunks) {
            chunk -= chunks;
            ++b;
          }
        }
        if (T.gate_up ? chunk < chunks : b < count) {
          const u32 rows = base + kMap.rows + stage * kMap.row_stage_stride;
          u32 row[4];
#pragma unroll
          for (int q = 0; q < 4; ++q) row[q] = (column == 2 * q ? rows : base + kMap.zero) + matrix_k;
          multiply_one<Tile, !T.gate_up>(
              sums,
              base + kMap.weights + stage * kMap.weight_stride + static_cast<u32>(wm * T.mt) * (T.ku * kUnitBytes), row,
              first_unit, args.units - chunk * T.ku, lane, scale_base);
        }
        __syncwarp();
        if (lane == 0) mbarrier_arrive(empty(stage));
        chunk += T.ws;
        stage += T.ws;
        if (stage >= static_cast<u32>(T.stages)) {
          stage -= static_cast<u32>(T.stages);
          parity ^= 1u;
        }
      }

      // ---- epilogue: sums[m][i] is what this lane has of row g + 8 i of row tile m
      const auto finish = [&](int m, float low, float high) {
        const int tile = group * kRowTiles + wm * T.mt + m;
        if (tile < args.row_tiles) {
#pragma unroll
          for (int d = 1; d < 4; d *= 2) {
            low += __shfl_xor_sync(0xffffffffu, low, d);
            high += __shfl_xor_sync(0xffffffffu, high, d);
          }
          if (lane % 4 == 0) {
            u16* out = static_cast<u16*>(args.out);
            if constexpr (T.gate_up) {
              out += block * args.out_stride;
              const float first = choices.scales[0][block] * kOneEpilogueScale;
              const float factor = choices.weight[block] * choices.scales[2][block] * kOneTokenScale;
              if constexpr (T.relu2) {
                out[tile * 16 + g] = to_bf16(relu2(low * first) * factor);
                out[tile * 16 + 8 + g] = to_bf16(relu2(high * first) * factor);
              } else {
                const float second = choices.scales[1][block] * kOneEpilogueScale;
                out[tile * 8 + g] = to_bf16(swiglu(low * first, high * second, args.limit) * factor);
              }
            } else {
              out += tile * 16 + g;
              out[0] = to_bf16(low * kOneEpilogueScale);
              out[8] = to_bf16(high * kOneEpilogueScale);
            }
          }
        }
        if constexpr (T.gate_up) mbarrier_arrive(done);  // every lane: no barrier of the warp is needed
      };

      if constexpr (kWarpsK == 1) {
#pragma unroll
        for (int m = 0; m < T.mt; ++m) finish(m, sums[m][0], sums[m][1]);
      } else {
        // [half][wk][wm][row tile][lane]. Row tile m is added up, w = 0 first, and finished by warp m mod WK.
        float2* partial = reinterpret_cast<float2*>(smem + kMap.partials) + half * (kWarpsK * T.wm * T.mt * 32) +
                          wm * (T.mt * 32) + lane;
#pragma unroll
        for (int m = 0; m < T.mt; ++m) partial[(wk * T.wm * T.mt + m) * 32] = make_float2(sums[m][0], sums[m][1]);
        barrier_sync(1, kConsumers * 32);
        half ^= 1;
#pragma unroll
        for (int m = 0; m < T.mt; ++m) {
          if (m % kWarpsK != wk) continue;
          float low = 0.0f;
          float high = 0.0f;
#pragma unroll
          for (int w = 0; w < kWarpsK; ++w) {
            const float2 p = partial[(w * T.wm * T.mt + m) * 32];
            low += p.x;
            high += p.y;
          }
          finish(m, low, high);
        }
      }
    }
  }
}

}  // namespace fourfold::moe
