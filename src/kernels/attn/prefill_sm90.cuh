// Attention over many rows on Hopper: causal, paged, bf16 cache, wgmma. Second node, after prefill_prepare.cuh.
//
// A CTA has 128 query rows (token, head of the group) of one kv head: two warpgroups of 64 rows, and a warp that brings
// keys and values, 64 positions a stage. What the cache's pages hold is the swizzled operand already: pieces of 64
// dimensions, so that a stage is a copy for each piece of each page. Scores: queries and keys from shared memory;
// values: weights from registers, where the scores' accumulators are their fragments, and rows of values along K.
//
// While the values of a stage are multiplied, the softmax of the next one runs: its scores are multiplied first.
#pragma once

#include "kernels/attn/prefill_mma.cuh"
#include "kernels/ptx/wgmma_sm90.cuh"

namespace fourfold::attn {

inline constexpr int kPrefillProducerRegisters = 24;
inline constexpr int kPrefillConsumerRegisters = 240;

namespace prefill_detail {

// What ends with the weights' fragments of one stage.
struct Softmax {
  float largest[2];
  float sum[2];

  // s: scores of 64 keys, then weights. Returns by what the rows' sums so far are to be multiplied.
  __device__ __forceinline__ float2 operator()(float (&s)[32], float scale) {
    constexpr u32 kAll = 0xffffffffu;
    float shrink[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float most = s[2 * h];
#pragma unroll
      for (int i = 0; i < 16; ++i) most = fmaxf(most, s[4 * (i / 2) + 2 * h + i % 2]);
      most = fmaxf(most, __shfl_xor_sync(kAll, most, 1));
      most = fmaxf(most, __shfl_xor_sync(kAll, most, 2));
      most = fmaxf(most * scale, largest[h]);
      shrink[h] = ptx::exp2_approx(largest[h] - most);
      largest[h] = most;
      sum[h] *= shrink[h];
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        float& x = s[4 * (i / 2) + 2 * h + i % 2];
        x = ptx::exp2_approx(x * scale - most);
        sum[h] += x;
      }
    }
    return make_float2(shrink[0], shrink[1]);
  }
};

}  // namespace prefill_detail

// `Tile` is a PrefillTileOf<...>. Grid: kv heads x blocks.
template <typename Tile>
__global__ void __launch_bounds__(Tile::value.threads(), 1)
    attention_prefill_wgmma(const __grid_constant__ PrefillArgs args) {
  using namespace prefill_detail;
  static constexpr PrefillTile T = Tile::value;
  static constexpr PrefillMap kMap = prefill_map(T);
  constexpr int kPieces = T.head_dim / 64;
  constexpr u32 kPieceStride = T.keys * 128;  // bytes from a piece of a stage to the next
  constexpr int kSteps = T.head_dim / 16;
  constexpr float kNobody = decode_detail::kNobody;
  static_assert(T.wgmma && T.keys == 64);
  FOURFOLD_DYNAMIC_SHARED(smem);
  const u32 base = ptx::keep_register(ptx::shared_address(smem));
  const int tid = static_cast<int>(threadIdx.x);
  const int warp = tid / 32;
  const int lane = tid % 32;
  const AttentionArgs& a = args.attention;
  const AttentionShape& shape = a.shape;
  const int group = shape.group();
  const int kv_head = static_cast<int>(blockIdx.x);
  const auto barrier = [&](int kind, int stage) {
    return base + kMap.barriers + 8u * static_cast<u32>(kind * T.stages + stage);
  };
  constexpr int kKeysThere = 0, kValuesThere = 1, kKeysFree = 2, kValuesFree = 3;
  if (tid == 0) {
    for (int i = 0; i < T.stages; ++i) {
      ptx::mbarrier_init(barrier(kKeysThere, i), 1);
      ptx::mbarrier_init(barrier(kValuesThere, i), 1);
      ptx::mbarrier_init(barrier(kKeysFree, i), 8);  // consumer warps
      ptx::mbarrier_init(barrier(kValuesFree, i), 8);
    }
    ptx::fence_barrier_init();
  }
  if (a.settled == 0) ptx::grid_dependency_wait();
  const BlockRows block = block_rows(args, static_cast<int>(blockIdx.y), T.rows());
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  if (block.rows <= 0) return;
  const int stages = (block.keys + T.keys - 1) / T.keys;
  // Queries, as two swizzled operands: [warpgroup][piece][64 rows][128 bytes]. And zeros for values that are not there,
  // where no earlier stage leaves any: they are multiplied with zeros.
  for (int i = tid; i < T.rows() * (T.head_dim / 8); i += T.threads()) {
    const int m = i / (T.head_dim / 8);
    const int chunk = i % (T.head_dim / 8);
    uint4 words = make_uint4(0, 0, 0, 0);
    if (m < block.rows) {
      const long long row = block.sequence.first + (block.first + m) / group;
      const int head = kv_head * group + (block.first + m) % group;
      words = *reinterpret_cast<const uint4*>(args.queries + (row * shape.heads + head) * T.head_dim + chunk * 8);
    }
    const int at = ((m / 64 * kPieces + chunk / 8) * 64 + m % 64) * 8 + (chunk % 8 ^ (m & 7));
    reinterpret_cast<uint4*>(smem + kMap.queries)[at] = words;
  }
  if (stages <= T.stages && block.keys % T.keys != 0) {
    uint4* values = reinterpret_cast<uint4*>(smem + kMap.values + (stages - 1) * T.half_bytes());
    for (int i = tid; i < T.half_bytes() / 16; i += T.threads()) values[i] = make_uint4(0, 0, 0, 0);
  }
  ptx::fence_async_shared();
  __syncthreads();

  if (warp >= 8) {
    ptx::registers_decrease<kPrefillProducerRegisters>();
    if (warp != 8) return;
    const int* pages = a.pages + static_cast<long long>(block.place) * a.page_table_stride;
    const int page_mask = (1 << a.page_shift) - 1;
    const u64 policy = ptx::policy_evict_last();
    int slot = 0;
    u32 phase = 1;
    for (int stage = 0; stage < stages; ++stage) {
      const int first = stage * T.keys;
      const int there = first + T.keys < block.keys ? T.keys : block.keys - first;
#pragma unroll
      for (int kind = 0; kind < 2; ++kind) {
        const u32 full = barrier(kind == 0 ? kKeysThere : kValuesThere, slot);
        ptx::mbarrier_wait(barrier(kind == 0 ? kKeysFree : kValuesFree, slot), phase);
        __syncwarp();  // every lane has seen the stage free before it can be filled and given back again
        if (lane == 0) ptx::mbarrier_arrive_expect(full, static_cast<u32>(there * T.row_bytes()));
        __syncwarp();  // announced before anything lands
        const int piece = lane % kPieces;
        for (int page = lane / kPieces; page << a.page_shift < there; page += 32 / kPieces) {
          const int start = first + (page << a.page_shift);
          const int from = page == 0 ? first : start & ~page_mask;
          const int to = (start | page_mask) + 1;
          const int count = (to < first + there ? to : first + there) - from;
          if (count <= 0) continue;
          ptx::bulk_copy(
              base + (kind == 0 ? kMap.keys : kMap.values) + static_cast<u32>(slot * T.half_bytes()) +
                  static_cast<u32>(piece) * kPieceStride + static_cast<u32>(from - first) * 128u,
              a.cache + pages[from >> a.page_shift] * a.page_bytes +
                  (kind == 0 ? a.key_offset(kv_head, T.row_bytes()) : a.value_offset(kv_head, T.row_bytes())) +
                  ((static_cast<long long>(piece) << a.page_shift) + (from & page_mask)) * 128,
              static_cast<u32>(count) * 128u, full, policy);
        }
      }
      if (++slot == T.stages) {
        slot = 0;
        phase ^= 1u;
      }
    }
    return;
  }

  ptx::registers_increase<kPrefillConsumerRegisters>();
  const int own_row = warp * 16 + lane / 4;  // and eight more
  int last[2];                               // key that these rows see
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int m = own_row + 8 * h;
    last[h] = m < block.rows ? block.sequence.position + (block.first + m) / group : -1;
  }
  // Up to here every row of this warp sees every key, if the block has all of its rows.
  const int all_see = warp * 16 + 15 < block.rows ? block.sequence.position + (block.first + warp * 16) / group : -1;
  const float scale = a.scale * kLog2E;
  const u64 queries = ptx::swizzled_descriptor(base + kMap.queries + static_cast<u32>(warp / 4 * 64 * T.head_dim * 2));
  const u64 keys = ptx::swizzled_descriptor(base + kMap.keys);
  const u64 values = ptx::transposed_descriptor(base + kMap.values, kPieceStride);
  constexpr u64 kStageStep = static_cast<u64>(T.half_bytes() / 16);

  float out[T.head_dim / 2];
#pragma unroll
  for (int i = 0; i < T.head_dim / 2; ++i) out[i] = 0.0f;
  float s[32];
  u32 weights[4][4];
  Softmax softmax{{kNobody, kNobody}, {0.0f, 0.0f}};

  const auto scores = [&](int slot) {
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const u64 q = queries + static_cast<u64>(k / 4 * (64 * 128 / 16) + k % 4 * 2);
      const u64 b =
          keys + static_cast<u64>(slot) * kStageStep + static_cast<u64>(k / 4 * (kPieceStride / 16) + k % 4 * 2);
      if (k == 0) {
        ptx::WgmmaShared<64>::set(s, q, b);
      } else {
        ptx::WgmmaShared<64>::add(s, q, b);
      }
    }
    ptx::wgmma_commit();
  };
  const auto add_values = [&](int slot) {
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      ptx::WgmmaTransposed<T.head_dim>::add(
          out, weights[k], values + static_cast<u64>(slot) * kStageStep + static_cast<u64>(k * 16 * 128 / 16));
    }
    ptx::wgmma_commit();
  };
  const auto mask = [&](int stage) {
    if (stage * T.keys + T.keys - 1 <= all_see) return;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int key = stage * T.keys + 8 * (i / 4) + lane % 4 * 2 + i % 2;
      if (key > last[i / 2 % 2]) s[i] = kNobody;
    }
  };
  const auto pack = [&] {
#pragma unroll
    for (int k = 0; k < 4; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) weights[k][i] = ptx::to_bf16x2(s[8 * k + 2 * i], s[8 * k + 2 * i + 1]);
  };
  const auto give_back = [&](int kind, int slot) {
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(barrier(kind, slot));
  };

  ptx::mbarrier_wait(barrier(kKeysThere, 0), 0);
  scores(0);
  ptx::wgmma_wait<0>();
  ptx::keep_registers(s);
  give_back(kKeysFree, 0);
  mask(0);
  softmax(s, scale);
  pack();
  int slot = 0;
  u32 phase = 0;
  for (int stage = 1; stage < stages; ++stage) {
    const int before = slot;
    const u32 before_phase = phase;
    if (++slot == T.stages) {
      slot = 0;
      phase ^= 1u;
    }
    ptx::mbarrier_wait(barrier(kKeysThere, slot), phase);
    scores(slot);
    ptx::mbarrier_wait(barrier(kValuesThere, before), before_phase);
    add_values(before);
    ptx::wgmma_wait<1>();
    ptx::keep_registers(s);
    give_back(kKeysFree, slot);
    mask(stage);
    const float2 shrink = softmax(s, scale);
    ptx::wgmma_wait<0>();
    ptx::keep_registers(out);
    give_back(kValuesFree, before);
    pack();
#pragma unroll
    for (int i = 0; i < T.head_dim / 2; ++i) out[i] *= i / 2 % 2 == 0 ? shrink.x : shrink.y;
  }
  ptx::mbarrier_wait(barrier(kValuesThere, slot), phase);
  add_values(slot);
  ptx::wgmma_wait<0>();
  ptx::keep_registers(out);

  constexpr u32 kAll = 0xffffffffu;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float sum = softmax.sum[h];
    sum += __shfl_xor_sync(kAll, sum, 1);
    sum += __shfl_xor_sync(kAll, sum, 2);
    const int m = own_row + 8 * h;
    if (m >= block.rows) continue;
    const float factor = 1.0f / sum;
    const long long row = block.sequence.first + (block.first + m) / group;
    const int head = kv_head * group + (block.first + m) % group;
    const u16* gates = a.rows + row * a.row_stride + shape.gate_column(head) + lane % 4 * 2;
    u16* to = a.out + row * a.out_stride + head * T.head_dim + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < T.head_dim / 8; ++i) {
      float x = out[4 * i + 2 * h] * factor;
      float y = out[4 * i + 2 * h + 1] * factor;
      if (shape.gated) {
        const u32 gate = *reinterpret_cast<const u32*>(gates + 8 * i);
        x *= ptx::reciprocal_approx(1.0f + ptx::exp2_approx(-kLog2E * __uint_as_float(gate << 16)));
        y *= ptx::reciprocal_approx(1.0f + ptx::exp2_approx(-kLog2E * __uint_as_float(gate & 0xffff0000u)));
      }
      *reinterpret_cast<u32*>(to + 8 * i) = ptx::to_bf16x2(x, y);
    }
  }
}

}  // namespace fourfold::attn
