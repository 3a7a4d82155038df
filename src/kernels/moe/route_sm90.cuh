// Sorts (token, choice) pairs by expert and cuts each expert's list into blocks of `tile` tokens. Nothing
// waits on the host, so that the launches can be captured. The order of the slots inside one expert
// depends on atomics, the results do not: every slot is its own column of the multiplications.
#pragma once

#include "kernels/moe/discard.cuh"
#include "kernels/moe/packed_sum.cuh"
#include "kernels/moe/tables.h"
#include "kernels/ptx/sm90.cuh"

namespace fourfold::moe {

namespace route_detail {

// One CTA of 1024 threads, thread t holding expert t's number of slots, 0 from `experts` on: writes the blocks and
// their number, returns the expert's first slot.
//
// A GEMM's CTAs take blocks in turn, so that every round should hold blocks that cost the same: the experts whose
// blocks have the most columns come first. (An expert's blocks stay together: the later ones find its weights in L2.)
__device__ __forceinline__ int cut_blocks(int n, int experts, int tile, const RouteTable& table, int* all_slots) {
  constexpr int kBits = 21;  // of a count of blocks; three of them in a word
  __shared__ int slot_sums[32];
  __shared__ ptx::u64 block_sums[32];
  const int t = static_cast<int>(threadIdx.x);
  const int lane = t % 32;
  const int warp = t / 32;
  // Blocks of one expert are as equal as multiples of 8 tokens allow.
  int b = n > 0 ? 1 : 0;
  int size = (n + 7) / 8 * 8;
  const int own = size;
  if (n > tile) {
    b = static_cast<int>(static_cast<ptx::u32>(n + tile - 1) / static_cast<ptx::u32>(tile));
    size = static_cast<int>((static_cast<ptx::u32>(n + b - 1) / static_cast<ptx::u32>(b) + 7) / 8 * 8);
    if (size > tile) size = tile;
  }
  if (t < kMostSums) table.finished[t] = 0;
  const int narrower = (tile - size) / 8;
  const int shift = (narrower < 2 ? narrower : 2) * kBits;
  // Sums over the experts before this one and itself.
  const auto scan = [&](int& slots, ptx::u64& blocks) {
    for (int d = 1; d < 32; d *= 2) {
      const int s = __shfl_up_sync(0xffffffffu, slots, d);
      const ptx::u64 k = __shfl_up_sync(0xffffffffu, blocks, d);
      if (lane >= d) {
        slots += s;
        blocks += k;
      }
    }
  };
  int slots = own;
  ptx::u64 blocks = static_cast<ptx::u64>(b) << shift;
  const bool used = warp * 32 < experts;
  if (used) scan(slots, blocks);
  if (lane == 31) {
    slot_sums[warp] = slots;
    block_sums[warp] = blocks;
  }
  __syncthreads();
  if (!used) return 0;
  int warp_slots = slot_sums[lane];
  ptx::u64 warp_blocks = block_sums[lane];
  scan(warp_slots, warp_blocks);
  const ptx::u64 all_blocks = __shfl_sync(0xffffffffu, warp_blocks, 31);
  const int last_slots = __shfl_sync(0xffffffffu, warp_slots, 31);
  const int before_slots = __shfl_sync(0xffffffffu, warp_slots, (warp + 31) % 32);
  const ptx::u64 before_blocks = __shfl_sync(0xffffffffu, warp_blocks, (warp + 31) % 32);
  if (warp > 0) {
    slots += before_slots;
    blocks += before_blocks;
  }
  const auto field = [&](ptx::u64 v, int at) { return static_cast<int>(v >> at) & ((1 << kBits) - 1); };
  int first_block = field(blocks, shift) - b;
  if (shift > 0) first_block += field(all_blocks, 0);
  if (shift > kBits) first_block += field(all_blocks, kBits);
  const int first_slot = slots - own;
#pragma unroll 1
  for (int i = 0, rest = n; i < b; ++i, rest -= size) {
    table.stored[first_block + i] = 0;
    table.blocks[first_block + i] = Block{t, first_slot + n - rest, rest < size ? (rest > 0 ? rest : 0) : size, 0};
  }
  if (t == 0) {
    table.counts[0] = field(all_blocks, 0) + field(all_blocks, kBits) + field(all_blocks, 2 * kBits);
    *all_slots = last_slots;
  }
  return first_slot;
}

}  // namespace route_detail

// At most kRouteOnePass picks: one CTA does it all. The tokens of many slots go out through shared memory, because
// scattered to memory they take one SM a nanosecond each.
__global__ void __launch_bounds__(kRouteThreads, 1) moe_route(Routing routing, RouteTable table, int tile) {
  constexpr int kMostSlots = static_cast<int>(max_slots(kRouteOnePass, kMaxExperts));
  __shared__ int count[kMaxExperts];
  __shared__ ptx::u16 tokens[kMostSlots];
  __shared__ int slots;
  static_assert(kRouteOnePass <= 65536);
  const int t = static_cast<int>(threadIdx.x);
  const int picks = routing.tokens * routing.top_k;
  const bool staged = picks > kRouteThreads;
  count[t] = 0;
  if (t * 32 < picks) ptx::prefetch_l2(routing.ids + t * 32);
  __syncthreads();
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  int id[kRouteOwn];
  int rank[kRouteOwn];
#pragma unroll
  for (int i = 0; i < kRouteOwn; ++i) {
    const int p = t + i * kRouteThreads;
    id[i] = p < picks ? routing.ids[p] : -1;
    if (id[i] >= routing.experts) id[i] = -1;
  }
#pragma unroll
  for (int i = 0; i < kRouteOwn; ++i) {
    rank[i] = i * kRouteThreads < picks && id[i] >= 0 ? atomicAdd(&count[id[i]], 1) : 0;
  }
  __syncthreads();
  const int n = count[t];
  const int first = route_detail::cut_blocks(n, routing.experts, tile, table, &slots);
  count[t] = first;
  __syncthreads();
  // Exact: the quotient is at least half a choice away from a whole number, and off by less than 2^-9 of a choice.
  const float per_choice = ptx::reciprocal_approx(static_cast<float>(routing.top_k));
#pragma unroll
  for (int i = 0; i < kRouteOwn; ++i) {
    const int p = t + i * kRouteThreads;
    if (p >= picks) break;
    int slot = -1;
    if (id[i] >= 0) {
      slot = count[id[i]] + rank[i];
      const int token = static_cast<int>((static_cast<float>(p) + 0.5f) * per_choice);
      if (staged) {
        tokens[slot] = static_cast<ptx::u16>(token);
      } else {
        table.slot_token[slot] = token;
      }
    }
    table.pick_slot[p] = slot;
  }
  if (t == 0) table.counts[1] = slots;
  if (!staged) return;
  __syncthreads();
  for (int s = t; s < slots; s += kRouteThreads) table.slot_token[s] = tokens[s];
}

// More picks: moe_route_count (grid: ceil(picks / kRouteManyPicks)) adds each CTA's histogram to `table.totals`; the
// CTA that comes last cuts the blocks, turns the totals into first slots and leaves the arrival counter at zero.
// moe_route_scatter (same grid) places the picks and needs the totals cleared again by its last CTA.
__global__ void __launch_bounds__(kRouteThreads, 1) moe_route_count(Routing routing, RouteTable table, int tile) {
  __shared__ int count[kMaxExperts];
  __shared__ int last;
  const int t = static_cast<int>(threadIdx.x);
  const int picks = routing.tokens * routing.top_k;
  count[t] = 0;
  __syncthreads();
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
#pragma unroll
  for (int i = 0; i < kRouteManyPicks / kRouteThreads; ++i) {
    const int p = static_cast<int>(blockIdx.x) * kRouteManyPicks + i * kRouteThreads + t;
    const int id = p < picks ? routing.ids[p] : -1;
    if (id >= 0 && id < routing.experts) atomicAdd(&count[id], 1);
  }
  __syncthreads();
  if (count[t] != 0) atomicAdd(&table.totals[t], count[t]);
  __threadfence();
  __syncthreads();
  if (t == 0) last = atomicAdd(&table.totals[kMaxExperts], 1) == static_cast<int>(gridDim.x) - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  const int n = __ldcg(&table.totals[t]);
  table.totals[t] = route_detail::cut_blocks(n, routing.experts, tile, table, table.counts + 1);
  if (t == 0) table.totals[kMaxExperts] = 0;
}

__global__ void __launch_bounds__(kRouteManyThreads) moe_route_scatter(Routing routing, RouteTable table) {
  __shared__ int count[kMaxExperts];
  __shared__ int last;
  const int t = static_cast<int>(threadIdx.x);
  const int picks = routing.tokens * routing.top_k;
  for (int e = t; e < kMaxExperts; e += kRouteManyThreads) count[e] = 0;
  __syncthreads();
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  int id[kRouteOwn];
  int rank[kRouteOwn];
#pragma unroll
  for (int i = 0; i < kRouteOwn; ++i) {
    const int p = static_cast<int>(blockIdx.x) * kRouteManyPicks + i * kRouteManyThreads + t;
    id[i] = p < picks ? routing.ids[p] : -1;
    if (id[i] >= routing.experts) id[i] = -1;
  }
#pragma unroll
  for (int i = 0; i < kRouteOwn; ++i) rank[i] = id[i] >= 0 ? atomicAdd(&count[id[i]], 1) : 0;
  __syncthreads();
  for (int e = t; e < kMaxExperts; e += kRouteManyThreads) {
    if (count[e] != 0) count[e] = atomicAdd(&table.totals[e], count[e]);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kRouteOwn; ++i) {
    const int p = static_cast<int>(blockIdx.x) * kRouteManyPicks + i * kRouteManyThreads + t;
    if (p >= picks) break;
    int slot = -1;
    if (id[i] >= 0) {
      slot = count[id[i]] + rank[i];
      table.slot_token[slot] = p / routing.top_k;
    }
    table.pick_slot[p] = slot;
  }
  if (t == 0) last = atomicAdd(&table.totals[kMaxExperts], 1) == static_cast<int>(gridDim.x) - 1;
  __syncthreads();
  if (!last) return;
  for (int e = t; e <= kMaxExperts; e += kRouteManyThreads) table.totals[e] = 0;
}

// out[token] = sum over its choices, in order, of router weight times tensor scale times down's row of groups
// (PackedGroup); bf16. Without `scales` the rows have their scale already. One thread owns two groups. Grid:
// (ceil(columns / 1024), tokens), 128 threads. `stride` in groups.
__global__ void __launch_bounds__(128)
    moe_combine_packed(const PackedGroup* __restrict__ partial, long long stride, const int* __restrict__ pick_slot,
                       Routing routing, const float* __restrict__ scales, int columns, ptx::u16* __restrict__ out,
                       long long out_stride) {
  const int piece = static_cast<int>(blockIdx.x) * 128 + static_cast<int>(threadIdx.x);  // of 16 bytes
  const int column = piece / 4 * 32 + piece % 4 * 2;
  const long long token = blockIdx.y;
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  if (column >= columns) return;
  float sum[2][4] = {};
  for (int base = 0; base < routing.top_k; base += 8) {  // eight rows in flight
    uint4 v[8];
    float f[8];
    int slot[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const long long p = token * routing.top_k + base + i;
      slot[i] = base + i < routing.top_k ? pick_slot[p] : -1;
      f[i] = route_detail::group_factor(routing.ids, routing.weights, scales, p, slot[i]);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      v[i] = make_uint4(0, 0, 0, 0);
      if (slot[i] >= 0) v[i] = __ldcs(reinterpret_cast<const uint4*>(partial + slot[i] * stride) + piece);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (slot[i] < 0) continue;
      route_detail::add_group(v[i].x, v[i].y, f[i], sum[0]);
      route_detail::add_group(v[i].z, v[i].w, f[i], sum[1]);
    }
  }
  ptx::u16* row = out + token * out_stride + column;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (column + 8 * i < columns) *reinterpret_cast<ptx::u32*>(row + 8 * i) = ptx::to_bf16x2(sum[0][i], sum[1][i]);
  }
}

namespace route_detail {

// Places 4q .. 4q + 3 (partial_place) of a row tile are its rows 2q, 2q + 8, 2q + 1, 2q + 9.
__device__ __forceinline__ void store_sums(const float (&sum)[4], int place, ptx::u16* row) {
  row += place / 16 * 16 + place % 16 / 2;
  *reinterpret_cast<ptx::u32*>(row) = ptx::to_bf16x2(sum[0], sum[2]);
  *reinterpret_cast<ptx::u32*>(row + 8) = ptx::to_bf16x2(sum[1], sum[3]);
}

}  // namespace route_detail

// out[token] = sum over its choices, in order, of router weight times down's fp32 row (places as in partial_place);
// bf16. One thread owns four columns. Grid: (ceil(columns / 1024), tokens), 256 threads.
__global__ void __launch_bounds__(256)
    moe_combine(const float* partial, long long partial_stride, const int* __restrict__ pick_slot,
                const float* __restrict__ weights, int top_k, int columns, ptx::u16* __restrict__ out,
                long long out_stride, int keep) {
  const int place = (static_cast<int>(blockIdx.x) * 256 + static_cast<int>(threadIdx.x)) * 4;
  const long long token = blockIdx.y;
  constexpr int kRows = 8;  // in flight; a missing choice loads nothing and adds nothing
  float w[kRows];
  int slot[kRows];
  const auto look_up = [&](int base) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const bool there = base + i < top_k;
      slot[i] = there ? pick_slot[token * top_k + base + i] : -1;
      w[i] = there ? weights[token * top_k + base + i] : 0.0f;
    }
  };
  look_up(0);  // routing was over when down began
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  for (int base = 0; base < (place < columns ? top_k : 0); base += kRows) {
    if (base > 0) look_up(base);
    float4 v[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      v[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (slot[i] >= 0) v[i] = __ldcs(reinterpret_cast<const float4*>(partial + slot[i] * partial_stride + place));
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (slot[i] < 0) continue;
      sum[0] += w[i] * v[i].x;
      sum[1] += w[i] * v[i].y;
      sum[2] += w[i] * v[i].z;
      sum[3] += w[i] * v[i].w;
    }
  }
  if (place < columns) route_detail::store_sums(sum, place, out + token * out_stride);
  __syncwarp();
  if (keep == 0) {
    route_detail::discard_rows(partial, partial_stride * 4, pick_slot + token * top_k, top_k, place / 128 * 512);
  }
}

// The same sum beside a down that raises flags (RouteTable::finished): columns of a flag are added up as soon as all of
// the blocks' rows are there. Grid: (tokens, ceil(columns / kSumColumns)), 128 threads, and so few registers that one
// CTA has room on an SM beside down's.
__global__ void __launch_bounds__(128, 16)
    moe_combine_beside(const float* partial, long long partial_stride, RouteTable table,
                       const float* __restrict__ weights, int top_k, int columns, ptx::u16* __restrict__ out,
                       long long out_stride, int keep) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int place = static_cast<int>(blockIdx.y) * kSumColumns + static_cast<int>(threadIdx.x) * 4;
  const long long first = static_cast<long long>(blockIdx.x) * top_k;
  const bool last = blockIdx.y + 1 == gridDim.y;
  const int* pick_slot = table.pick_slot + first;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900  // on others no kernel raises these flags
  ptx::grid_launch_dependents();
  if (threadIdx.x < 32) ptx::wait_flags(table.finished + blockIdx.y, 1, table.counts[0], lane);
  __syncthreads();
  if (place < columns) {
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int base = 0; base < top_k; base += 4) {  // four rows in flight
      float4 v[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int slot = base + i < top_k ? pick_slot[base + i] : -1;
        v[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (slot >= 0) v[i] = __ldcs(reinterpret_cast<const float4*>(partial + slot * partial_stride + place));
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (base + i >= top_k || pick_slot[base + i] < 0) continue;
        const float w = weights[first + base + i];
        sum[0] += w * v[i].x;
        sum[1] += w * v[i].y;
        sum[2] += w * v[i].z;
        sum[3] += w * v[i].w;
      }
    }
    route_detail::store_sums(sum, place, out + blockIdx.x * out_stride);
  }
  __syncwarp();
  if (keep == 0) route_detail::discard_rows(partial, partial_stride * 4, pick_slot, top_k, place / 128 * 512);
  if (last) ptx::grid_dependency_wait();  // for kernels further on
#endif
}

}  // namespace fourfold::moe
