// Attention for up to 8 rows of scores (rows of a sequence x heads of a kv head's group) of each sequence over contexts
// of any length, as one node: one decoded token of a model with up to 8 query heads for a kv head, or more in equal
// parts. For few sequences: all CTAs must have room at the same time, since they wait for each other.
//
// Keys and values are the left operands of the multiplications and the rows are their 8 columns, so that nothing is
// multiplied with rows that are not there. A CTA has one split of one sequence for one part of a kv head's group. Its
// warps do not meet before the split's end: each has keys of its own, every so many blocks, and a ring that the copy
// engine fills for it alone, keys and values of a block in turns. Then the splits become one: each warp of all of them
// adds up its share.
//
// What stands behind the wait for the projection is short, and there once: most of it runs once, from a cold cache.
#pragma once

#include "kernels/attn/narrow_rows.cuh"
#include "kernels/attn/narrow_tile.h"
#include "kernels/attn/rows.cuh"

namespace fourfold::attn {

namespace narrow_detail {

constexpr int kLeftEarly = 2;   // so many units before the last one is asked for the next kernel begins, bf16
constexpr float kAhead = 8.0f;  // so far above the one that weights count from, a score (times log2 e) replaces it

// Bytes from a unit's first key, or value, to a chunk of one of them.
template <typename Tile>
__device__ __forceinline__ u32 place_of(int row, int chunk) {
  return static_cast<u32>(cache_place(Tile::value.row_bytes(), Tile::value.keys(), row, chunk));
}
// From the place of a chunk to that of the same key `chunks` further on: bits that its number does not have.
template <typename Tile>
__device__ __forceinline__ u32 further(u32 place, int chunks) {
  constexpr int kBytes = piece_bytes(Tile::value.row_bytes());
  constexpr int kChunks = kBytes / 16;
  return (place ^ static_cast<u32>(chunks % kChunks * 16)) +
         static_cast<u32>(chunks / kChunks * Tile::value.keys() * kBytes);
}

template <typename Tile>
struct Columns {
  static constexpr NarrowTile T = Tile::value;
  static constexpr int kSteps = T.head_dim / 16;
  static constexpr int kBlocks = T.blocks;  // of 16 keys
  static constexpr u32 kPieceBytes = piece_bytes(T.row_bytes());
  u32 query[kSteps][2];
  float out[kSteps][4];  // 16 dimensions x 8 rows each
  float largest[2];      // of rows 2 l and 2 l + 1, times log2 e: what weights count from, at most kAhead below a score
  float sum[2];          // of this lane's keys

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kSteps; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) out[i][j] = 0.0f;
    largest[0] = largest[1] = kNobody;
    sum[0] = sum[1] = 0.0f;
  }

  // e4m3: the chunk of a key that lane l of four loads as the j-th, of four steps; no two lanes of eight meet in a
  // bank.
  __device__ __forceinline__ static int key_chunk(int j, int l) {
    return T.head_dim == 64 ? l : j / 2 * 8 + 2 * l + j % 2;
  }

  __device__ __forceinline__ void take_queries(u32 queries, int lane) {
#pragma unroll
    for (int k = 0; k < kSteps; k += 2) {
      if constexpr (!T.fp8) {
        u32 b[4];
        ptx::load_matrix4(b, queries + query_place<T.head_dim / 8>(lane % 8, 2 * k + lane / 8));
#pragma unroll
        for (int i = 0; i < 4; ++i) query[k + i / 2][i % 2] = b[i];
      } else {
        const int chunk = 2 * key_chunk(k / 4, lane % 4) + k / 2 % 2;
        const Vec4 b = ptx::load_shared4(queries + query_place<T.head_dim / 8>(lane / 4, chunk));
        query[k][0] = b.x;
        query[k][1] = b.y;
        query[k + 1][0] = b.z;
        query[k + 1][1] = b.w;
      }
    }
  }

  // Scores of a unit of keys, and what a unit of values adds with the weights of its own keys: either, or both, whose
  // instructions then hide each other's latencies. Scores are of keys g and g + 8 of each block, for rows 2 l and 2 l
  // + 1.
  template <bool Scores, bool Adds>
  __device__ __forceinline__ void step(float (&s)[kBlocks][4], u32 keys, const u32 (&p)[kBlocks][2], u32 values,
                                       int lane) {
    constexpr int kChains = kBlocks == 1 ? 4 : 2;
    float part[kChains][kBlocks][4];
    if constexpr (Scores) {
#pragma unroll
      for (int i = 0; i < kChains; ++i)
#pragma unroll
        for (int j = 0; j < kBlocks; ++j)
#pragma unroll
          for (int k = 0; k < 4; ++k) part[i][j][k] = 0.0f;
    }
    const u32 own_key =
        keys + (T.fp8 ? place_of<Tile>(lane / 4, key_chunk(0, lane % 4)) : place_of<Tile>(lane % 16, lane / 16));
    const u32 own_value = values + place_of<Tile>(lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
    for (int j = 0; j < kSteps / 4; ++j) {
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
        const u32 block = 16 * n * kPieceBytes;
        if constexpr (Scores && !T.fp8) {
#pragma unroll
          for (int k = 4 * j; k < 4 * j + 4; ++k) {
            u32 a[4];
            ptx::load_matrix4(a, further<Tile>(own_key, 2 * k) + block);
            ptx::mma_m16n8k16(part[k % kChains][n], a, query[k][0], query[k][1]);
          }
        }
        if constexpr (Scores && T.fp8) {
          const u32 at = further<Tile>(own_key, key_chunk(j, 0)) + block;
          const Vec4 low = ptx::load_shared4(at);
          const Vec4 high = ptx::load_shared4(at + 8 * kPieceBytes);
          const u32 lows[4] = {low.x, low.y, low.z, low.w};
          const u32 highs[4] = {high.x, high.y, high.z, high.w};
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            u32 a[4];
            ptx::codes_to_f16(lows[i], a[0], a[2]);
            ptx::codes_to_f16(highs[i], a[1], a[3]);
            ptx::mma_m16n8k16_f16(part[i % kChains][n], a, query[4 * j + i][0], query[4 * j + i][1]);
          }
        }
        if constexpr (Adds && !T.fp8) {
#pragma unroll
          for (int i = 4 * j; i < 4 * j + 4; ++i) {
            u32 a[4];
            ptx::load_matrix4_transposed(a, further<Tile>(own_value, 2 * i) + block);
            ptx::mma_m16n8k16(out[i], a, p[n][0], p[n][1]);
          }
        }
        if constexpr (Adds && T.fp8) {
#pragma unroll
          for (int i = 4 * j; i < 4 * j + 4; i += 2) {
            u32 codes[4];
            ptx::load_matrix4_transposed(codes, further<Tile>(own_value, i) + block);
#pragma unroll
            for (int e = 0; e < 2; ++e) {  // even dimensions in the upper rows, odd ones in the lower
              u32 a[4];
              ptx::codes_to_f16_crossed(codes[e], a[0], a[1]);
              ptx::codes_to_f16_crossed(codes[e + 2], a[2], a[3]);
              ptx::mma_m16n8k16_f16(out[i + e], a, p[n][0], p[n][1]);
            }
          }
        }
      }
    }
    if constexpr (Scores) {
#pragma unroll
      for (int n = 0; n < kBlocks; ++n)
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          s[n][k] = part[0][n][k] + part[1][n][k];
          if constexpr (kChains == 4) s[n][k] += part[2][n][k] + part[3][n][k];
        }
    }
  }

  // Weights of these keys, as operands. s: scores times log2 e, kNobody where there is no key.
  __device__ __forceinline__ void weigh(u32 (&p)[kBlocks][2], const float (&s)[kBlocks][4]) {
    constexpr u32 kAll = 0xffffffffu;
    float weight[kBlocks][4];
    const auto largest_of = [&](int h) {
      float most = largest[h];
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) most = fmaxf(most, fmaxf(s[n][h], s[n][h + 2]));
#pragma unroll
      for (int d = 4; d < 32; d *= 2) most = fmaxf(most, __shfl_xor_sync(kAll, most, d));
      return most;
    };
    const auto scale_outputs = [&](const float(&shrink)[2]) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) out[i][j] *= shrink[j % 2];
    };
    if constexpr (T.together()) {
      bool ahead = false;
#pragma unroll
      for (int n = 0; n < kBlocks; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) ahead = ahead || s[n][e] > largest[e % 2] + kAhead;
      if (__any_sync(kAll, ahead)) {
        float shrink[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float most = largest_of(h);
          shrink[h] = ptx::exp2_approx(largest[h] - most);
          largest[h] = most;
          sum[h] *= shrink[h];
        }
        scale_outputs(shrink);
      }
#pragma unroll
      for (int n = 0; n < kBlocks; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          weight[n][e] = s[n][e] <= kNobody ? 0.0f : ptx::exp2_approx(s[n][e] - largest[e % 2]);
          sum[e % 2] += weight[n][e];
        }
    } else {
      float shrink[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float most = largest_of(h);
        shrink[h] = ptx::exp2_approx(largest[h] - most);
        largest[h] = most;
        sum[h] *= shrink[h];
#pragma unroll
        for (int n = 0; n < kBlocks; ++n)
#pragma unroll
          for (int e = h; e < 4; e += 2) {
            weight[n][e] = s[n][e] <= kNobody ? 0.0f : ptx::exp2_approx(s[n][e] - most);
            sum[h] += weight[n][e];
          }
      }
      if (__any_sync(kAll, shrink[0] < 1.0f || shrink[1] < 1.0f)) scale_outputs(shrink);
    }
#pragma unroll
    for (int n = 0; n < kBlocks; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float low = weight[n][2 * i];
        const float high = weight[n][2 * i + 1];
        p[n][i] = ptx::transpose_matrix(T.fp8 ? ptx::to_f16x2(low, high) : ptx::to_bf16x2(low, high));
      }
  }

  // Outputs, each times the factor of its row, to [8 rows][output_stride] fp32.
  __device__ __forceinline__ void store(float* to, const float (&factor)[2], int lane) const {
    const int g = lane / 4;
    const int l = lane % 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float* row = to + (2 * l + h) * T.output_stride();
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        if constexpr (!T.fp8) {
          row[16 * i + g] = out[i][h] * factor[h];
          row[16 * i + g + 8] = out[i][h + 2] * factor[h];
        } else {
          *reinterpret_cast<float2*>(row + 16 * i + 2 * g) =
              make_float2(out[i][h] * factor[h], out[i][h + 2] * factor[h]);
        }
      }
    }
  }
};

// Of the 8 rows or less that a sequence has here: m / group is row_of(m).
__device__ __forceinline__ int row_factor_of(int group) { return (256 + group - 1) / group; }
__device__ __forceinline__ int row_of(int m, int factor) { return m * factor >> 8; }

__device__ __forceinline__ void add_lanes(float4& y, int d) {
  constexpr u32 kAll = 0xffffffffu;
  y.x += __shfl_xor_sync(kAll, y.x, d);
  y.y += __shfl_xor_sync(kAll, y.y, d);
  y.z += __shfl_xor_sync(kAll, y.z, d);
  y.w += __shfl_xor_sync(kAll, y.w, d);
}

// This CTA's share of the sum over splits, in a fixed order, and the gate. What is added up at a time is a block of
// quads of a row's columns: by a warp, or where there are many splits by a team of warps with up to kTeamSplits each.
// `words`: of the first split's first row; `sums`: of the first row's first block; `merged`: shared memory.
template <typename Tile>
__device__ __forceinline__ void add_splits(const AttentionArgs& args, const SequenceRows& sequence, int share,
                                           int group, int row_factor, u32* words, u32* sums, int rows, int splits,
                                           int split, int warp, int lane, float4* merged) {
  constexpr NarrowTile T = Tile::value;
  constexpr u32 kAll = 0xffffffffu;
  constexpr int kQuads = T.head_dim / 4;  // of a row
  const int split_words = args.most_rows * group * T.head_dim;
  const int bits = narrow_block_bits(T.head_dim, splits);
  const int quads = 1 << bits;
  const int team_warps = splits <= kTeamSplits ? 1 : splits <= 2 * kTeamSplits ? 2 : 4;
  const int teams = T.warps / team_warps;
  const int team = warp / team_warps;
  const int first = warp % team_warps * kTeamSplits;
  const int here = splits - first < kTeamSplits ? splits - first : kTeamSplits;  // splits of this warp
#pragma unroll 1
  for (int block = split * teams + team; block << bits < rows * kQuads; block += splits * teams) {
    const int m = (block << bits) / kQuads;
    const int quad = (block << bits) % kQuads + (lane & (quads - 1));
    const int row = row_of(m, row_factor);
    const int head = share * group + m - row * group;
    uint2 gates = make_uint2(0, 0);
    if (args.shape.gated) {
      gates = *reinterpret_cast<const uint2*>(args.rows + (sequence.first + row) * args.row_stride +
                                              args.shape.gate_column(head) + 4 * quad);
    }
    float4 y = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float most = kNobody;
    float total = 0.0f;
    if (here > 0) {
      // Everything is asked for at once, until it is there. A lane without a split looks at what another one takes, and
      // nothing is made all ones again before all lanes have what they want.
      u32* from[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int of = (lane + 32 * i) >> bits;
        from[i] = words + (first + (of < here ? of : 0)) * split_words + m * T.head_dim + 4 * quad;
      }
      u32* const own_sums = sums + (block * args.splits + first + (lane < here ? lane : 0)) * 2;
      ptx::Vec4 v[4];
      ptx::Vec2 s;
      u32 largest;
      do {
        s = ptx::load_exchanged2(own_sums);
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = ptx::load_exchanged4(from[i]);
        largest = s.x > s.y ? s.x : s.y;
        const auto look = [&](u32 word) { largest = word > largest ? word : largest; };
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          look(v[i].x);
          look(v[i].y);
          look(v[i].z);
          look(v[i].w);
        }
      } while (__any_sync(kAll, largest == kAll));
      float own_sum = 0.0f;
      float own_most = kNobody;
      if (lane < here) {
        ptx::clear_exchanged2(own_sums);
        own_most = __uint_as_float(s.x);
        own_sum = __uint_as_float(s.y);
      }
      most = own_most;
#pragma unroll
      for (int d = 16; d > 0; d /= 2) most = fmaxf(most, __shfl_xor_sync(kAll, most, d));
      const float weight = ptx::exp2_approx(own_most - most);
      total = weight * own_sum;
#pragma unroll
      for (int d = 16; d > 0; d /= 2) total += __shfl_xor_sync(kAll, total, d);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int of = (lane + 32 * i) >> bits;
        const float w = __shfl_sync(kAll, weight, of);
        if (of >= here) continue;
        ptx::clear_exchanged4(from[i]);
        y.x += w * __uint_as_float(v[i].x);
        y.y += w * __uint_as_float(v[i].y);
        y.z += w * __uint_as_float(v[i].z);
        y.w += w * __uint_as_float(v[i].w);
      }
#pragma unroll 1
      for (int d = quads; d < 32; d *= 2) add_lanes(y, d);
    }
    if (team_warps > 1) {  // blocks of 8 quads: lane 8 w + q gets quad q of the team's warp w
      float2* const merged_sums = reinterpret_cast<float2*>(merged + T.warps * 8);
      if (lane < 8) merged[warp * 8 + lane] = y;
      if (lane == 0) merged_sums[warp] = make_float2(most, total);
      ptx::barrier_sync(1 + team, team_warps * 32);
      if (warp % team_warps == 0) {
        const int of = warp + lane / 8;
        y = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        float2 s = make_float2(kNobody, 0.0f);
        if (lane / 8 < team_warps) {
          y = merged[of * 8 + lane % 8];
          s = merged_sums[of];
        }
        most = fmaxf(s.x, __shfl_xor_sync(kAll, s.x, 8));
        most = fmaxf(most, __shfl_xor_sync(kAll, most, 16));
        const float weight = ptx::exp2_approx(s.x - most);
        total = s.y * weight;
        y = make_float4(y.x * weight, y.y * weight, y.z * weight, y.w * weight);
#pragma unroll
        for (int d = 8; d < 32; d *= 2) {
          total += __shfl_xor_sync(kAll, total, d);
          add_lanes(y, d);
        }
      }
      if ((block + splits * teams) << bits < rows * kQuads) ptx::barrier_sync(1 + team, team_warps * 32);
      if (warp % team_warps != 0) continue;
    }
    const float sum[4] = {y.x, y.y, y.z, y.w};
    const u32 gate_words[2] = {gates.x, gates.y};
    float out[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float below = total;
      if (args.shape.gated) {
        const u32 gate = i % 2 == 0 ? gate_words[i / 2] << 16 : gate_words[i / 2] & 0xffff0000u;
        below *= 1.0f + ptx::exp2_approx(-kLog2E * __uint_as_float(gate));
      }
      out[i] = sum[i] * ptx::reciprocal_approx(below);
    }
    if (lane < quads) {
      reinterpret_cast<uint2*>(args.out + (sequence.first + row) * args.out_stride + head * T.head_dim)[quad] =
          make_uint2(ptx::to_bf16x2(out[0], out[1]), ptx::to_bf16x2(out[2], out[3]));
    }
  }
}

}  // namespace narrow_detail

// `Tile` is a NarrowTileOf<...>. Grid: narrow_launch, splits x parts of kv heads' groups x sequences of the bucket.
template <typename Tile>
__global__ void __launch_bounds__(Tile::value.threads(), 1)
    attention_narrow(const __grid_constant__ AttentionArgs args) {
  using namespace narrow_detail;
  static constexpr NarrowTile T = Tile::value;
  static constexpr NarrowMap kMap = narrow_map(T);
  constexpr int kHalf = T.rotary_dim / 2;
  constexpr int kKeys = T.keys();
  constexpr int kBytes = T.unit_bytes();
  constexpr u32 kAll = 0xffffffffu;
  FOURFOLD_DYNAMIC_SHARED(smem);
  const u32 base = ptx::keep_register(ptx::shared_address(smem));
  const int tid = static_cast<int>(threadIdx.x);
  const int warp = __shfl_sync(kAll, tid / 32, 0);  // the same for all lanes, and the compiler knows
  const int lane = tid % 32;
  const AttentionShape& shape = args.shape;
  const int share = static_cast<int>(blockIdx.y);  // which part, of all kv heads' groups
  const int kv_head = share / args.parts;
  const int place = static_cast<int>(blockIdx.z);
  const int split = static_cast<int>(blockIdx.x);

  // What depends on nothing is asked for first.
  const float frequency = tid < kHalf ? args.frequencies[tid] : 0.0f;
  const float key_scale = T.fp8 ? args.cache_scales[0] : 1.0f;
  const float value_scale = T.fp8 ? args.cache_scales[1] : 1.0f;
  Vectors<Tile> vectors;
  vectors.take_norm(args.q_norm, lane);
  const u32 barriers = base + kMap.barriers + static_cast<u32>(warp * T.units) * 8u;
  if (lane == 0) {
    for (int i = 0; i < T.units; ++i) ptx::mbarrier_init(barriers + 8u * static_cast<u32>(i), 1);
    ptx::fence_barrier_init();
  }
  __syncwarp();  // barriers are there for all lanes
  // From here on the part is what has heads.
  const int group = shape.group() / args.parts;
  const int row_factor = row_factor_of(group);
  if (args.settled == 0) ptx::grid_dependency_wait();
  SequenceRows sequence = args.sequences[place];  // of the bucket, live or not: both are asked for at once
  if (place >= *args.live) sequence.count = 0;
  const int count = sequence.count < args.most_rows ? sequence.count : args.most_rows;
  const int context = sequence.position + count;
  const int length = narrow_split_length(context);
  const int begin = split * length;
  const int rows = count * group;
  if (sequence.first < 0 || count <= 0 || begin >= context) {
    ptx::grid_dependency_wait();  // who waits for this kernel's end relies on the one before it
    return;
  }
  const int end = begin + length < context ? begin + length : context;

  // This warp's blocks of keys: `warp`, `warp` + T.warps, and so on. A lane knows the page of 16 of their keys.
  const int* table = args.pages + static_cast<long long>(place) * args.page_table_stride;
  const int blocks = (end - begin + kKeys - 1) / kKeys;
  const int units = blocks > warp ? (blocks - warp + T.warps - 1) / T.warps * 2 : 0;
  const auto start_of = [&](int block) { return begin + (block * T.warps + warp) * kKeys; };
  constexpr int kKnown = 32 / T.blocks;  // blocks that the lanes know pages of
  int known = 0;
  int page = 0;
  const auto know = [&](int from) {
    known = from;
    const int position = start_of(from + lane / T.blocks) + lane % T.blocks * 16;
    page = position < end ? table[position >> args.page_shift] : 0;
  };
  know(0);
  const long long key_offset = args.key_offset(kv_head, T.row_bytes());
  const long long value_offset = args.value_offset(kv_head, T.row_bytes());
  const int page_mask = (1 << args.page_shift) - 1;
  const u32 ring = kMap.ring + static_cast<u32>(warp * T.units * kBytes);
  constexpr int kPieceBytes = piece_bytes(T.row_bytes());
  constexpr int kPieces = T.row_bytes() / kPieceBytes;
  const u64 policy = ptx::policy_evict_first();
  // Positions of a unit from `first` on that the cache holds; that they come is announced; a lane's share of the copy:
  // one piece of 16 positions, or none.
  const auto held = [&](int first) {
    const int old = sequence.position - first;
    return old < 0 ? 0 : old < kKeys ? old : kKeys;
  };
  const auto announce = [&](u32 there, int old) {
    if (old > 0) {
      ptx::mbarrier_arrive_expect(there, static_cast<u32>(old * T.row_bytes()));
    } else {
      ptx::mbarrier_arrive(there);
    }
  };
  const auto copy = [&](int unit, int slot, int first, int part, int here, int own_page, u32 there) {
    const int piece = lane % kPieces;
    ptx::bulk_copy(base + ring + static_cast<u32>(slot * kBytes + (piece * kKeys + part * 16) * kPieceBytes),
                   args.cache + own_page * args.page_bytes + (unit % 2 == 0 ? key_offset : value_offset) +
                       ((piece << args.page_shift) + ((first + part * 16) & page_mask)) * kPieceBytes,
                   static_cast<u32>(here * kPieceBytes), there, policy);
  };
  // What the cache holds of a unit, keys of block unit / 2 or its values. A whole warp.
  const auto load_one = [&](int unit, int slot) {
    const int block = unit / 2;
    const int first = start_of(block);
    const u32 there = barriers + 8u * static_cast<u32>(slot);
    const int old = held(first);
    if (block >= known + kKnown) know(block);
    if (lane == 0) announce(there, old);
    __syncwarp();  // announced before anything lands
    const int part = lane / kPieces;
    const int own_page = __shfl_sync(kAll, page, (block - known) * T.blocks + part);
    const int here = old - part * 16 < 16 ? old - part * 16 : 16;
    if (part < T.blocks && here > 0) copy(unit, slot, first, part, here, own_page, there);
  };
  // The same of a unit and, if there are two, of the next one: to the ring's place `slot` and to the one behind it.
  // Each half of the warp has a unit.
  const auto load_two = [&](int unit, int many, int slot) {
    if ((unit + many - 1) / 2 >= known + kKnown) know(unit / 2);
    const int half = lane / 16;
    const bool wanted = half < many && unit + half < units;
    const int block = (unit + half) / 2;
    const int first = start_of(block);
    const int own = slot + half < T.units ? slot + half : 0;
    const u32 there = barriers + 8u * static_cast<u32>(own);
    const int old = held(first);
    if (lane % 16 == 0 && wanted) announce(there, old);
    __syncwarp();  // announced before anything lands
    const int part = lane % 16 / kPieces;
    const int own_page = __shfl_sync(kAll, page, ((block - known) * T.blocks + part) % 32);
    const int here = old - part * 16 < 16 ? old - part * 16 : 16;
    if (wanted && part < T.blocks && here > 0) copy(unit + half, own, first, part, here, own_page, there);
  };
  if constexpr (T.together()) {
#pragma unroll 1
    for (int i = 0; i < T.units && i < units; i += 2) load_two(i, T.units - i < 2 ? 1 : 2, i);
  } else {
#pragma unroll 1
    for (int i = 0; i < T.units && i < units; ++i) load_one(i, i);
  }

  // Eight lanes have a query, or a new key or value of this split: which one, and where it comes from and goes to.
  const int first_new = begin > sequence.position ? begin : sequence.position;
  const int items = rows + (end > first_new ? 2 * (end - first_new) : 0);
  int item = warp * 4 + lane / 8;
  int row = 0;  // of the sequence
  const u16* from = nullptr;
  u8* out = nullptr;
  const auto prepare = [&] {
    int column = 0;
    if (item < rows) {
      row = row_of(item, row_factor);
      column = shape.q_column(share * group + item - row * group);
    } else if (item < items) {
      const bool key = (item - rows) % 2 == 0;
      const int position = first_new + (item - rows) / 2;
      row = position - sequence.position;
      column = key ? shape.k_column(kv_head) : shape.v_column(kv_head);
      if (share == kv_head * args.parts) {
        out = args.cache + table[position >> args.page_shift] * args.page_bytes + (key ? key_offset : value_offset);
      }
      vectors.take_norm(key ? args.k_norm : nullptr, lane);
    }
    from = args.rows + (sequence.first + row) * args.row_stride + column;
  };
  prepare();

  float2* turns = reinterpret_cast<float2*>(smem + kMap.rotation);
  if (tid < kHalf) {
    for (int i = 0; i < count; ++i) turns[i * kHalf + tid] = rotation(frequency, sequence.position + i);
  }
  for (int i = rows * (T.head_dim / 8) + tid; i < kNarrowRows * (T.head_dim / 8); i += T.threads()) {
    *reinterpret_cast<uint4*>(smem + kMap.queries +
                              query_place<T.head_dim / 8>(i / (T.head_dim / 8), i % (T.head_dim / 8))) =
        make_uint4(0, 0, 0, 0);
  }
  __syncthreads();

  ptx::grid_dependency_wait();
  // The next kernel begins when this one has asked for nearly everything: what it asks for early comes while nothing is
  // read here.
  if (units <= T.units) ptx::grid_launch_dependents();

#pragma unroll 1
  for (;;) {
    const bool query = item < rows;
    const bool key = (item - rows) % 2 == 0;
    vectors.load(from, item < items, lane);
    vectors.norm(args.norm_eps);
    vectors.rotate(turns + row * kHalf, query || key, lane);
    if (query) {
      vectors.store_query(smem + kMap.queries, item, lane);
    } else if (item < items) {
      vectors.store_new(smem + kMap.news + (2 * row + (key ? 0 : 1)) * T.row_bytes(), out, page_mask + 1,
                        (sequence.position + row) & page_mask, 1.0f / (key ? key_scale : value_scale), lane);
    }
    item += 4 * T.warps;
    if (!__any_sync(kAll, item < items)) break;
    prepare();
  }
  __syncthreads();

  const float scale = args.scale * kLog2E * key_scale;
  int last[2];  // key that rows 2 l and 2 l + 1 see
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int m = lane % 4 * 2 + h;
    last[h] = m < rows ? sequence.position + row_of(m, row_factor) : -1;
  }
  Columns<Tile> c;
  c.clear();
  c.take_queries(base + kMap.queries, lane);
  u32 p[T.blocks][2];
  int slot = 0;
  u32 phase = 0;
  const auto next_slot = [&] {
    if (++slot == T.units) {
      slot = 0;
      phase ^= 1u;
    }
  };
  // Waits for keys or values from position `first` on at `at`, and adds the new ones; and zeros for values that are not
  // there: they are multiplied with zeros.
  const auto wait_for = [&](u32 at, int first, bool keys) {
    ptx::mbarrier_wait(barriers + 8u * static_cast<u32>(slot), phase);
    if (first + kKeys > sequence.position) {
      const int upto = keys && end - first < kKeys ? end - first : kKeys;
      const int from = first_new - first;
#pragma unroll 4
      for (int r = from > 0 ? from : 0; r < upto; ++r) {
        if (lane >= T.chunks()) continue;
        const int own = first + r - sequence.position;
        *reinterpret_cast<uint4*>(smem + at + place_of<Tile>(r, lane)) =
            first + r < end
                ? reinterpret_cast<const uint4*>(smem + kMap.news + (2 * own + (keys ? 0 : 1)) * T.row_bytes())[lane]
                : make_uint4(0, 0, 0, 0);
      }
      __syncwarp();
    }
  };
  const auto weigh = [&](float(&s)[T.blocks][4], int first) {
    const bool all = first + kKeys - 1 <= sequence.position;  // every row sees every key
#pragma unroll
    for (int n = 0; n < T.blocks; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int position = first + 16 * n + lane / 4 + e / 2 * 8;
        s[n][e] = all || position <= last[e % 2] ? s[n][e] * scale : kNobody;
      }
    c.weigh(p, s);
  };
  if constexpr (T.together()) {
    // The first keys; then values with the keys of the next block; the last values.
    int many = 1;
#pragma unroll 1
    for (int unit = 0; unit < units; unit += many, many = 2) {
      if (unit + many > units) many = 1;
      const int begun = slot;
      const u32 at = ring + static_cast<u32>(slot * kBytes);
#pragma unroll 1
      for (int i = unit; i < unit + many; ++i) {
        wait_for(ring + static_cast<u32>(slot * kBytes), start_of(i / 2), i % 2 == 0);
        next_slot();
      }
      const u32 behind = begun + 1 < T.units ? at + kBytes : ring;
      float s[T.blocks][4];
      if (unit == 0) {
        c.template step<true, false>(s, base + at, p, 0, lane);
      } else if (many == 2) {
        c.template step<true, true>(s, base + behind, p, base + at, lane);
      } else {
        c.template step<false, true>(s, 0, p, base + at, lane);
      }
      __syncwarp();  // what was read is free
      if (unit + T.units < units) load_two(unit + T.units, many, begun);
      if (unit + T.units < units && unit + T.units + many >= units) ptx::grid_launch_dependents();
      if (unit + many == units) break;
      weigh(s, start_of((unit + 1) / 2));
    }
  } else {
#pragma unroll 1
    for (int unit = 0; unit < units; ++unit) {
      const u32 at = ring + static_cast<u32>(slot * kBytes);
      const int first = start_of(unit / 2);
      const bool keys = unit % 2 == 0;
      wait_for(at, first, keys);
      float s[T.blocks][4];
      if (keys) {
        c.template step<true, false>(s, base + at, p, 0, lane);
        weigh(s, first);
      } else {
        c.template step<false, true>(s, 0, p, base + at, lane);
      }
      __syncwarp();  // what was read is free
      if (unit + T.units < units) load_one(unit + T.units, slot);
      const int left = units - (unit + T.units + 1);  // not asked for yet
      if (left == kLeftEarly || (unit == 0 && left >= 0 && left < kLeftEarly)) ptx::grid_launch_dependents();
      next_slot();
    }
  }

  // The warps' parts become one.
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int d = 4; d < 32; d *= 2) c.sum[h] += __shfl_xor_sync(kAll, c.sum[h], d);
  float2* sums = reinterpret_cast<float2*>(smem + kMap.sums);
  if (lane < 4) {
#pragma unroll
    for (int h = 0; h < 2; ++h) sums[warp * kNarrowRows + 2 * lane + h] = make_float2(c.largest[h], c.sum[h]);
  }
  __syncthreads();
  const int splits = narrow_split_count(context);
  // Of all splits first their outputs, then what the blocks that are added up need of each row: a copy for each, as who
  // takes words makes them all ones again.
  const int split_rows = args.most_rows * group;
  u32* const words = args.words + (static_cast<long long>(place) * shape.kv_heads * args.parts + share) * args.splits *
                                      split_rows * narrow_row_words(T.head_dim);
  u32* const own_words = words + split * split_rows * T.head_dim;
  u32* const all_sums = words + args.splits * split_rows * T.head_dim;
  const int row_blocks = (T.head_dim / 4) >> narrow_block_bits(T.head_dim, splits);
  float factor[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int m = lane % 4 * 2 + h;
    float most = kNobody;
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < T.warps; ++k) most = fmaxf(most, sums[k * kNarrowRows + m].x);
#pragma unroll
    for (int k = 0; k < T.warps; ++k) {
      const float2 part = sums[k * kNarrowRows + m];
      sum += part.y * ptx::exp2_approx(part.x - most);
    }
    if (warp == 0 && lane / 4 < row_blocks && m < rows) {
      ptx::store_exchanged2(all_sums + ((m * row_blocks + lane / 4) * args.splits + split) * 2, __float_as_uint(most),
                            __float_as_uint(sum));
    }
    factor[h] = ptx::exp2_approx(c.largest[h] - most) * value_scale;
  }
  float* outputs = reinterpret_cast<float*>(smem + kMap.ring);
  c.store(outputs + warp * kNarrowRows * T.output_stride(), factor, lane);
  __syncthreads();
#pragma unroll 2
  for (int i = tid; i < rows * (T.head_dim / 4); i += T.threads()) {
    const int m = i / (T.head_dim / 4);
    const int quad = i % (T.head_dim / 4);
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int k = 0; k < T.warps; ++k) {
      const float4 x = reinterpret_cast<const float4*>(outputs + (k * kNarrowRows + m) * T.output_stride())[quad];
      sum.x += x.x;
      sum.y += x.y;
      sum.z += x.z;
      sum.w += x.w;
    }
    ptx::store_exchanged4(own_words + m * T.head_dim + 4 * quad, {__float_as_uint(sum.x), __float_as_uint(sum.y),
                                                                  __float_as_uint(sum.z), __float_as_uint(sum.w)});
  }

  // The splits become one, as soon as all are there.
  add_splits<Tile>(args, sequence, share, group, row_factor, words, all_sums, rows, splits, split, warp, lane,
                   reinterpret_cast<float4*>(smem + kMap.queries));
}

}  // namespace fourfold::attn
