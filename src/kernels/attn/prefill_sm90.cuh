// Attention over many rows on Hopper: causal, paged, bf16 cache, wgmma. Second node, after prefill_prepare.cuh.
//
// A block is 128 query rows (token, head of the group) of one kv head: two warpgroups of 64 rows, and a warp that
// brings queries, keys and values, 64 positions a stage. What the cache's pages hold is the swizzled operand already:
// pieces of 64 dimensions, so that a stage is a copy for each piece of each page. Scores: queries and keys from shared
// memory; values: weights from registers, where the scores' accumulators are their fragments, and rows of values along
// K.
//
// While the values of a stage are multiplied, the softmax of the next one runs: its scores are multiplied first. A CTA
// has several blocks one after the other: the copies of the next one run while the one before ends, and its first
// scores are multiplied while that one's outputs are written.
#pragma once

#include "kernels/attn/prefill_mma.cuh"
#include "kernels/ptx/wgmma_sm90.cuh"

namespace fourfold::attn {

inline constexpr int kPrefillProducerRegisters = 56;
inline constexpr int kPrefillConsumerRegisters = 224;

namespace prefill_detail {

// A block as the warp that copies queries tells the others, in shared memory.
struct alignas(16) Work {
  u32 row;       // of the step: the sequence's first
  u32 position;  // of that row
  u32 first;     // row of the block among the sequence's
  u32 rows;      // 0: that was all
  u32 kv_head;
  u32 stages;
  u32 group;
  u32 unused;
};

// Four lanes have four words each: word i of lane j becomes word j of lane i.
__device__ __forceinline__ void exchange_words(u32 (&w)[4], int lane) {
  constexpr u32 kAll = 0xffffffffu;
#pragma unroll
  for (int d = 1; d <= 2; d *= 2) {
    const bool high = (lane & d) != 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int low = d == 1 ? 2 * i : i;
      const u32 other = __shfl_xor_sync(kAll, high ? w[low] : w[low + d], d);
      w[low] = high ? other : w[low];
      w[low + d] = high ? w[low + d] : other;
    }
  }
}

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

// What a CTA has in a round: in turns from the longest and from the shortest of as many blocks as there are CTAs.
__device__ __forceinline__ int item_of(int round) {
  const auto ctas = static_cast<int>(gridDim.x);
  const auto own = static_cast<int>(blockIdx.x);
  return round * ctas + (round % 2 == 0 ? own : ctas - 1 - own);
}

constexpr int kKeysThere = 0, kValuesThere = 1, kKeysFree = 2, kValuesFree = 3;
template <typename Tile>
__device__ __forceinline__ u32 stage_barrier(u32 base, int kind, int slot) {
  return base + prefill_map(Tile::value).barriers + 8u * static_cast<u32>(kind * Tile::value.stages + slot);
}
template <typename Tile>
__device__ __forceinline__ u32 queries_there(u32 base, int half) {
  return base + prefill_map(Tile::value).barriers + 8u * static_cast<u32>(4 * Tile::value.stages + half);
}
template <typename Tile>
__device__ __forceinline__ u32 queries_free(u32 base, int half) {
  return queries_there<Tile>(base, 2 + half);
}

// One warp.
template <typename Tile>
__device__ __forceinline__ void copy_keys_and_values(const PrefillArgs& args, unsigned char* smem, u32 base, int lane) {
  static constexpr PrefillTile T = Tile::value;
  static constexpr PrefillMap kMap = prefill_map(T);
  constexpr int kPieces = T.head_dim / 64;
  constexpr u32 kPieceStride = T.keys * 128;
  const AttentionArgs& a = args.attention;
  const int piece = lane % kPieces;
  const int page_mask = (1 << a.page_shift) - 1;
  int slot = 0;
  u32 phase = 1;
  const int heads = a.shape.kv_heads;
#pragma unroll 1
  for (int round = 0, item = item_of(0); item < args.block_count * heads; item = item_of(++round)) {
    const BlockRows block = block_rows(args, item / heads, T.rows());
    if (block.rows <= 0) continue;
    const int kv_head = item % heads;
    const int* pages = a.pages + static_cast<long long>(block.place) * a.page_table_stride;
#pragma unroll 1
    for (int first = 0; first < block.keys; first += T.keys) {
      const int there = first + T.keys < block.keys ? T.keys : block.keys - first;
#pragma unroll 1
      for (int kind = 0; kind < 2; ++kind) {
        const u32 full = stage_barrier<Tile>(base, kind == 0 ? kKeysThere : kValuesThere, slot);
        const u32 to = (kind == 0 ? kMap.keys : kMap.values) + static_cast<u32>(slot * T.half_bytes());
        ptx::mbarrier_wait(stage_barrier<Tile>(base, kind == 0 ? kKeysFree : kValuesFree, slot), phase);
        __syncwarp();  // every lane has seen the stage free before it can be filled and given back again
        if (kind == 1 && there < T.keys) {
          // Zeros for values that are not there: they are multiplied with zeros.
#pragma unroll 1
          for (int row = there + lane / 8; row < T.keys; row += 4) {
#pragma unroll
            for (int i = 0; i < kPieces; ++i) {
              *reinterpret_cast<uint4*>(smem + to + i * kPieceStride + row * 128 + lane % 8 * 16) =
                  make_uint4(0, 0, 0, 0);
            }
          }
          ptx::fence_async_shared();
          __syncwarp();
        }
        if (lane == 0) ptx::mbarrier_arrive_expect(full, static_cast<u32>(there * T.row_bytes()));
        __syncwarp();  // announced before anything lands
#pragma unroll 1
        for (int page = lane / kPieces; page << a.page_shift < there; page += 32 / kPieces) {
          const int start = first + (page << a.page_shift);
          const int from = page == 0 ? first : start & ~page_mask;
          const int upto = (start | page_mask) + 1;
          const int count = (upto < first + there ? upto : first + there) - from;
          if (count <= 0) continue;
          ptx::bulk_copy(
              base + to + static_cast<u32>(piece) * kPieceStride + static_cast<u32>(from - first) * 128u,
              a.cache + pages[from >> a.page_shift] * a.page_bytes +
                  (kind == 0 ? a.key_offset(kv_head, T.row_bytes()) : a.value_offset(kv_head, T.row_bytes())) +
                  ((static_cast<long long>(piece) << a.page_shift) + (from & page_mask)) * 128,
              static_cast<u32>(count) * 128u, full, ptx::policy_evict_last());
        }
      }
      if (++slot == T.stages) {
        slot = 0;
        phase ^= 1u;
      }
    }
  }
}

// One warp: a block, and its queries, for each warpgroup that has no use for those before.
template <typename Tile>
__device__ __forceinline__ void copy_queries(const PrefillArgs& args, unsigned char* smem, u32 base, int lane) {
  static constexpr PrefillTile T = Tile::value;
  static constexpr PrefillMap kMap = prefill_map(T);
  constexpr int kPieces = T.head_dim / 64;
  const AttentionArgs& a = args.attention;
  const AttentionShape& shape = a.shape;
  const int items = args.block_count * shape.kv_heads;
  int number = 0;  // of the block, of those that this CTA has
  bool more = true;
#pragma unroll 1
  for (int round = 0; more; ++round) {
    const int item = item_of(round);
    more = item < items;
    BlockRows block{};
    if (more) {
      block = block_rows(args, item / shape.kv_heads, T.rows());
      if (block.rows <= 0) continue;
    }
    const int kv_head = item % shape.kv_heads;
    if (lane == 0) {
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        const u32 full = queries_there<Tile>(base, half);
        const int left = block.rows - 64 * half;
        const int there = left < 0 ? 0 : left < 64 ? left : 64;
        ptx::mbarrier_wait(queries_free<Tile>(base, half), (static_cast<u32>(number) & 1u) ^ 1u);
        if (half == 0) {
          const u32 at = kMap.works + static_cast<u32>(number % kPrefillWorks) * 32u;
          *reinterpret_cast<Work*>(smem + at) = {static_cast<u32>(block.sequence.first),
                                                 static_cast<u32>(block.sequence.position),
                                                 static_cast<u32>(block.first),
                                                 static_cast<u32>(block.rows),
                                                 static_cast<u32>(kv_head),
                                                 static_cast<u32>((block.keys + T.keys - 1) / T.keys),
                                                 static_cast<u32>(shape.group()),
                                                 0u};
        }
        if (there == 0) {
          ptx::mbarrier_arrive(full);
          continue;
        }
        ptx::mbarrier_arrive_expect(full, static_cast<u32>(there * T.head_dim * 2));
        const long long row =
            first_query_row(block.sequence.first, block.place, shape.group()) + block.first + 64 * half;
#pragma unroll 1
        for (int piece = 0; piece < kPieces; ++piece) {
          ptx::bulk_copy(base + kMap.queries + static_cast<u32>((half * kPieces + piece) * 64 * 128),
                         args.queries + query_place(args, kv_head, row, piece * 8), static_cast<u32>(there * 128), full,
                         ptx::policy_evict_first());
        }
      }
    }
    ++number;
    if (!shape.gated) continue;
      // Wanted at the block's end.
#pragma unroll 1
    for (int i = lane; i < block.rows * kPieces; i += 32) {
      const int m = block.first + i / kPieces;
      ptx::prefetch_l2(a.rows + (block.sequence.first + m / shape.group()) * a.row_stride +
                       shape.gate_column(kv_head * shape.group() + m % shape.group()) + i % kPieces * 64);
    }
  }
}

}  // namespace prefill_detail

// `Tile` is a PrefillTileOf<...>. Grid: CTAs that share the blocks.
template <typename Tile>
__global__ void __launch_bounds__(Tile::value.threads(), 1)
    attention_prefill_wgmma(const __grid_constant__ PrefillArgs args) {
  using namespace prefill_detail;
  static constexpr PrefillTile T = Tile::value;
  static constexpr PrefillMap kMap = prefill_map(T);
  constexpr u32 kPieceStride = T.keys * 128;  // bytes from a piece of a stage to the next
  constexpr int kSteps = T.head_dim / 16;
  constexpr u32 kAll = 0xffffffffu;
  static_assert(T.wgmma && T.keys == 64 && sizeof(Work) == 32);
  FOURFOLD_DYNAMIC_SHARED(smem);
  const u32 base = ptx::keep_register(ptx::shared_address(smem));
  const int tid = static_cast<int>(threadIdx.x);
  const int warp = tid / 32;
  const int lane = tid % 32;
  const AttentionArgs& a = args.attention;
  const AttentionShape& shape = a.shape;
  const auto barrier = [&](int kind, int slot) { return stage_barrier<Tile>(base, kind, slot); };
  if (tid == 0) {
    for (int i = 0; i < T.stages; ++i) {
      ptx::mbarrier_init(barrier(kKeysThere, i), 1);
      ptx::mbarrier_init(barrier(kValuesThere, i), 1);
      ptx::mbarrier_init(barrier(kKeysFree, i), 8);  // consumer warps
      ptx::mbarrier_init(barrier(kValuesFree, i), 8);
    }
    for (int i = 0; i < 2; ++i) {
      ptx::mbarrier_init(queries_there<Tile>(base, i), 1);
      ptx::mbarrier_init(queries_free<Tile>(base, i), 4);  // warps of the warpgroup
    }
    ptx::fence_barrier_init();
  }
  __syncthreads();
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();

  if (warp >= 8) {
    ptx::registers_decrease<kPrefillProducerRegisters>();
    if (warp == 8) {
      copy_keys_and_values<Tile>(args, smem, base, lane);
    } else if (warp == 9) {
      copy_queries<Tile>(args, smem, base, lane);
    }
    return;
  }

  ptx::registers_increase<kPrefillConsumerRegisters>();
  const int half = warp / 4;
  const u32 own_row = static_cast<u32>(warp * 16 + lane / 4);  // and eight more
  const float scale = a.scale * kLog2E;
  const u64 queries = ptx::swizzled_descriptor(base + kMap.queries + static_cast<u32>(half * 64 * T.head_dim * 2));
  const u64 keys = ptx::swizzled_descriptor(base + kMap.keys);
  const u64 values = ptx::transposed_descriptor(base + kMap.values, kPieceStride);
  constexpr u64 kStageStep = static_cast<u64>(T.half_bytes() / 16);

  float out[T.head_dim / 2];
  float s[32];
  u32 weights[4][4];
  Softmax softmax;
  int clear = 0;   // stages whose keys every row of this warp sees
  int stages = 0;  // of the block
  int number = 0;  // of blocks so far
  int at = 0;      // stage, of all blocks

  const auto current = [&](int block) {
    const u32 place = base + kMap.works + static_cast<u32>(block % kPrefillWorks) * 32u;
    const Vec4 x = ptx::load_shared4(place);
    const Vec4 y = ptx::load_shared4(place + 16u);
    return Work{x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w};
  };
  // The next block: whether there is one.
  const auto take = [&] {
    ptx::mbarrier_wait(queries_there<Tile>(base, half), static_cast<u32>(number) & 1u);
    const Work work = current(number++);
    stages = static_cast<int>(work.stages);
    const u32 row = static_cast<u32>(warp) * 16u;
    clear = row + 15 < work.rows ? static_cast<int>(work.position + (work.first + row) / work.group + 1) / T.keys : 0;
    return work.rows > 0;
  };
  const auto slot_of = [&](int stage) { return stage % T.stages; };
  const auto phase_of = [&](int stage) { return static_cast<u32>(stage / T.stages) & 1u; };
  const auto scores = [&] {
    const int slot = slot_of(at);
    ptx::mbarrier_wait(barrier(kKeysThere, slot), phase_of(at));
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
  const auto add_values = [&](int stage) {
    const int from = slot_of(stage);
    ptx::mbarrier_wait(barrier(kValuesThere, from), phase_of(stage));
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      ptx::WgmmaTransposed<T.head_dim>::add(
          out, weights[k], values + static_cast<u64>(from) * kStageStep + static_cast<u64>(k * 16 * 128 / 16));
    }
    ptx::wgmma_commit();
  };
  const auto mask = [&](int stage) {
    if (stage < clear) return;
    const Work work = current(number - 1);
    int last[2];  // key that these rows see
#pragma unroll
    for (u32 h = 0; h < 2; ++h) {
      const u32 m = own_row + 8 * h;
      last[h] = m < work.rows ? static_cast<int>(work.position + (work.first + m) / work.group) : -1;
    }
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
  const auto give_back = [&](u32 bar) {
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(bar);
  };
  // The first stage's weights, once its scores are there.
  const auto first_weights = [&] {
    ptx::wgmma_wait<0>();
    ptx::keep_registers(s);
    give_back(barrier(kKeysFree, slot_of(at)));
    if (stages == 1) give_back(queries_free<Tile>(base, half));
    mask(0);
    softmax = {{kNobody, kNobody}, {0.0f, 0.0f}};
    softmax(s, scale);
    pack();
#pragma unroll
    for (int i = 0; i < T.head_dim / 2; ++i) out[i] = 0.0f;
  };
  // A lane reads and writes 16 bytes: eight columns of one of four tiles, which its neighbours exchange.
  const auto write = [&] {
    const Work work = current(number - 1);
#pragma unroll
    for (u32 h = 0; h < 2; ++h) {
      float sum = softmax.sum[h];
      sum += __shfl_xor_sync(kAll, sum, 1);
      sum += __shfl_xor_sync(kAll, sum, 2);
      const bool there = own_row + 8 * h < work.rows;
      const u32 place = work.first + own_row + 8 * h;
      const float factor = 1.0f / sum;
      const auto row = static_cast<long long>(work.row + place / work.group);
      const auto head = static_cast<int>(work.kv_head * work.group + place % work.group);
      const u16* gates = a.rows + row * a.row_stride + shape.gate_column(head) + lane % 4 * 8;
      u16* to = a.out + row * a.out_stride + head * T.head_dim + lane % 4 * 8;
      uint4 raw[T.head_dim / 32];
#pragma unroll
      for (int j = 0; j < T.head_dim / 32; ++j) {
        raw[j] = there && shape.gated ? *reinterpret_cast<const uint4*>(gates + 32 * j) : make_uint4(0, 0, 0, 0);
      }
#pragma unroll
      for (int j = 0; j < T.head_dim / 32; ++j) {
        u32 gate[4] = {raw[j].x, raw[j].y, raw[j].z, raw[j].w};
        exchange_words(gate, lane);
        u32 result[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float x = out[4 * (4 * j + i) + 2 * h] * factor;
          float y = out[4 * (4 * j + i) + 2 * h + 1] * factor;
          const float open_x =
              ptx::reciprocal_approx(1.0f + ptx::exp2_approx(-kLog2E * __uint_as_float(gate[i] << 16)));
          const float open_y =
              ptx::reciprocal_approx(1.0f + ptx::exp2_approx(-kLog2E * __uint_as_float(gate[i] & 0xffff0000u)));
          x *= shape.gated ? open_x : 1.0f;
          y *= shape.gated ? open_y : 1.0f;
          result[i] = ptx::to_bf16x2(x, y);
        }
        exchange_words(result, lane);
        if (there) *reinterpret_cast<uint4*>(to + 32 * j) = make_uint4(result[0], result[1], result[2], result[3]);
      }
    }
  };

  if (!take()) return;
  while (true) {
    scores();
    first_weights();
    for (int stage = 1; stage < stages; ++stage) {
      ++at;
      scores();
      add_values(at - 1);
      ptx::wgmma_wait<1>();
      ptx::keep_registers(s);
      give_back(barrier(kKeysFree, slot_of(at)));
      if (stage + 1 == stages) give_back(queries_free<Tile>(base, half));
      mask(stage);
      const float2 shrink = softmax(s, scale);
      ptx::finish_before(softmax.sum[0] + softmax.sum[1]);
      ptx::wgmma_wait<0>();
      ptx::keep_registers(out);
      give_back(barrier(kValuesFree, slot_of(at - 1)));
      pack();
      // Later stages have a larger score seldom.
      if (__any_sync(kAll, shrink.x < 1.0f || shrink.y < 1.0f)) {
#pragma unroll
        for (int i = 0; i < T.head_dim / 2; ++i) out[i] *= i / 2 % 2 == 0 ? shrink.x : shrink.y;
      }
    }
    add_values(at);
    ptx::wgmma_wait<0>();
    ptx::keep_registers(out);
    give_back(barrier(kValuesFree, slot_of(at)));
    write();
    ++at;
    if (!take()) return;
  }
}

}  // namespace fourfold::attn
