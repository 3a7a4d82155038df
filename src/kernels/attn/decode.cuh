// Attention for 1 to 16 rows of each sequence over contexts of any length, as two nodes: attention_decode has q/k norm,
// rotation, append to the cache, scores and weighted values of splits of the context; combine.cuh adds them up.
//
// A CTA has one split of one sequence for one kv head, or, where there are many sequences, several one after the other
// without a pause between them. Its rows are (row of the sequence, query head): with few rows the keys are read once
// for all heads of the group. Warps beside each other have keys of their own and meet at the end of a split; two that
// share keys both compute the scores, and have half of the values' dimensions each: one warp in each quarter of an SM
// waits for its own results most of the time. A split's positions follow from the sequence's own length (split_length),
// so a result does not depend on the batch, nor on how many splits a CTA has.
//
// What the cache holds already is asked for before the wait for the projection. New keys are normalised and rotated by
// the CTA that has their split: it writes them to the cache, and to its own stage.
//
// e4m3 keys and values become fp16 in registers, 2^-8 of their value, which is exact; queries are fp16 then, and their
// dimensions are taken in an order that lets a lane load 16 codes at once.
#pragma once

#include "kernels/attn/decode_tile.h"
#include "kernels/attn/rows.cuh"

namespace fourfold::attn {

namespace decode_detail {

// Bytes from a stage's first key, or value, to a chunk of one of them.
template <typename Tile>
__device__ __forceinline__ u32 place_of(int row, int chunk) {
  return static_cast<u32>(cache_place(Tile::value.row_bytes(), Tile::value.keys(), row, chunk));
}

// What the columns of a row of outputs are exchanged by, in shared memory: four rows of 32 bytes, or two of 64, that
// are stored at once then have all banks.
__device__ __forceinline__ int turn_of(int row) { return row % 2 * 16 + row / 2 % 2 * 8; }

template <typename Tile>
struct Warp {
  static constexpr DecodeTile T = Tile::value;
  static constexpr int kPairs = T.head_dim / 16 / T.parts;  // of n-tiles of the output
  static constexpr int kSteps = T.head_dim / 16;
  static constexpr int kTiles = 2 * T.blocks;  // of 8 keys
  // The queries' fragments stay in registers where the outputs leave room for them.
  static constexpr bool kKeep = T.head_dim / T.parts <= 128;
  u32 query[kKeep ? kSteps : 2][4];
  u32 queries_at;
  float out[kPairs][2][4];
  float largest[2];  // of rows g and g + 8, times log2 e
  float sum[2];      // of this lane's keys

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kPairs; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int k = 0; k < 4; ++k) out[i][j][k] = 0.0f;
    largest[0] = largest[1] = kNobody;
    sum[0] = sum[1] = 0.0f;
  }

  // Fragments of two steps of this warp's 16 rows.
  __device__ __forceinline__ void load_queries(u32 (&to)[2][4], int k, int lane) const {
    if constexpr (!T.fp8) {
      ptx::load_matrix4(to[0], queries_at + query_place<T.head_dim / 8>(lane % 16, 2 * k + lane / 16));
      ptx::load_matrix4(to[1], queries_at + query_place<T.head_dim / 8>(lane % 16, 2 * k + 2 + lane / 16));
    } else {
      // A lane loads 16 codes of a key at once: dimensions 64 j + 16 l .., of four steps four each.
      const int g = lane / 4;
      const int chunk = k / 4 * 8 + lane % 4 * 2 + k / 2 % 2;
      const Vec4 low = ptx::load_shared4(queries_at + query_place<T.head_dim / 8>(g, chunk));
      const Vec4 high = ptx::load_shared4(queries_at + query_place<T.head_dim / 8>(g + 8, chunk));
      to[0][0] = low.x;
      to[0][1] = high.x;
      to[0][2] = low.y;
      to[0][3] = high.y;
      to[1][0] = low.z;
      to[1][1] = high.z;
      to[1][2] = low.w;
      to[1][3] = high.w;
    }
  }
  // `queries`: of this warp's 16 rows, in shared memory.
  __device__ __forceinline__ void take_queries(u32 queries, int lane) {
    queries_at = queries;
    if constexpr (kKeep) {
#pragma unroll
      for (int k = 0; k < kSteps; k += 2) {
        u32 both[2][4];
        load_queries(both, k, lane);
#pragma unroll
        for (int i = 0; i < 8; ++i) query[k + i / 4][i % 4] = both[i / 4][i % 4];
      }
    }
  }
  // The fragment of step k; of every second one both are loaded where they are not kept.
  __device__ __forceinline__ const u32 (&query_of(u32 (&pair)[2][4], int k, int lane) const)[4] {
    if constexpr (kKeep) return query[k];
    if (k % 2 == 0) load_queries(pair, k, lane);
    return pair[k % 2];
  }

  // Scores of a warp's keys of a stage. `keys`: of the stage, `first` is the first one's row.
  __device__ __forceinline__ void scores(float (&s)[kTiles][4], u32 keys, int first, int lane) const {
    // Two chains of multiplications for each tile, where there are few tiles and registers for it.
    constexpr int kChains = kTiles == 2 || T.parts == 2 ? 2 : 1;
    float part[kChains][kTiles][4];
#pragma unroll
    for (int i = 0; i < kChains; ++i)
#pragma unroll
      for (int j = 0; j < kTiles; ++j)
#pragma unroll
        for (int k = 0; k < 4; ++k) part[i][j][k] = 0.0f;
    u32 pair[2][4];
    if constexpr (!T.fp8) {
      const int k_row = lane % 8 + lane / 16 * 8;
      const int k_chunk = lane / 8 % 2;
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        const u32(&q)[4] = query_of(pair, k, lane);
#pragma unroll
        for (int i = 0; i < kTiles / 2; ++i) {
          u32 b[4];
          ptx::load_matrix4(b, keys + place_of<Tile>(first + 16 * i + k_row, 2 * k + k_chunk));
          ptx::mma_m16n8k16(part[k % kChains][2 * i], q, b[0], b[1]);
          ptx::mma_m16n8k16(part[k % kChains][2 * i + 1], q, b[2], b[3]);
        }
      }
    } else {
      const int g = lane / 4;
      const int l = lane % 4;
#pragma unroll
      for (int j = 0; j < T.head_dim / 64; ++j) {
        Vec4 key[kTiles];
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
          key[n] = ptx::load_shared4(keys + place_of<Tile>(first + 8 * n + g, 4 * j + l));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const u32(&q)[4] = query_of(pair, 4 * j + i, lane);
#pragma unroll
          for (int n = 0; n < kTiles; ++n) {
            const u32 codes = i == 0 ? key[n].x : i == 1 ? key[n].y : i == 2 ? key[n].z : key[n].w;
            ptx::mma_m16n8k16_f16(part[i % kChains][n], q, e4m3_pair(codes, kPair01), e4m3_pair(codes, kPair23));
          }
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int k = 0; k < 4; ++k) s[j][k] = kChains == 2 ? part[0][j][k] + part[kChains - 1][j][k] : part[0][j][k];
  }

  // Adds these keys' values, weighted. s: scores times log2 e, kNobody where there is no key; overwritten.
  __device__ __forceinline__ void add(float (&s)[kTiles][4], u32 values, int first, int part, int lane) {
    constexpr u32 kAll = 0xffffffffu;
    float shrink[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float most = largest[h];
#pragma unroll
      for (int n = 0; n < kTiles; ++n) most = fmaxf(most, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
      most = fmaxf(most, __shfl_xor_sync(kAll, most, 1));
      most = fmaxf(most, __shfl_xor_sync(kAll, most, 2));
      shrink[h] = ptx::exp2_approx(largest[h] - most);
      largest[h] = most;
      sum[h] *= shrink[h];
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int e = 2 * h; e < 2 * h + 2; ++e) {
          s[n][e] = s[n][e] <= kNobody ? 0.0f : ptx::exp2_approx(s[n][e] - most);
          sum[h] += s[n][e];
        }
    }
    if (__any_sync(kAll, shrink[0] < 1.0f || shrink[1] < 1.0f)) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i)
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
          for (int k = 0; k < 4; ++k) out[i][j][k] *= shrink[k / 2];
    }
    const int row = lane % 16;
#pragma unroll
    for (int block = 0; block < kTiles / 2; ++block) {
      u32 p[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float low = s[2 * block + i / 2][i % 2 * 2];
        const float high = s[2 * block + i / 2][i % 2 * 2 + 1];
        p[i] = T.fp8 ? ptx::to_f16x2(low, high) : ptx::to_bf16x2(low, high);
      }
      if constexpr (!T.fp8) {
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
          u32 b[4];
          ptx::load_matrix4_transposed(
              b, values + place_of<Tile>(first + 16 * block + row, 2 * (part * kPairs + i) + lane / 16));
          ptx::mma_m16n8k16(out[i][0], p, b[0], b[1]);
          ptx::mma_m16n8k16(out[i][1], p, b[2], b[3]);
        }
      } else {
#pragma unroll
        for (int i = 0; i < kPairs / 2; ++i) {
          u32 b[4];
          ptx::load_matrix4_transposed(
              b, values + place_of<Tile>(first + 16 * block + row, part * kPairs + 2 * i + lane / 16));
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            ptx::mma_m16n8k16_f16(out[2 * i + j][0], p, e4m3_pair(b[2 * j], kPair02), e4m3_pair(b[2 * j + 1], kPair02));
            ptx::mma_m16n8k16_f16(out[2 * i + j][1], p, e4m3_pair(b[2 * j], kPair13), e4m3_pair(b[2 * j + 1], kPair13));
          }
        }
      }
    }
  }

  // Outputs of rows g and g + 8 of the tile's 16, as far as they are in [from, upto), each times its factor, to
  // [row - from][head_dim] fp32 from the part's first column on.
  __device__ __forceinline__ void store(float* to, const float (&factor)[2], int from, int upto, int lane) const {
    const int g = lane / 4;
    const int l = lane % 4;
    const int turned = ptx::keep_register(turn_of(g));
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (g + 8 * h < from || g + 8 * h >= upto) continue;
      float* row = to + (g + 8 * h - from) * T.head_dim;
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const float f = factor[h];
        if constexpr (!T.fp8) {
          *reinterpret_cast<float2*>(row + ((16 * i + 2 * l) ^ turned)) =
              make_float2(out[i][0][2 * h] * f, out[i][0][2 * h + 1] * f);
          *reinterpret_cast<float2*>(row + ((16 * i + 8 + 2 * l) ^ turned)) =
              make_float2(out[i][1][2 * h] * f, out[i][1][2 * h + 1] * f);
        } else {  // even columns in one tile, odd ones in the other
          *reinterpret_cast<float4*>(row + ((16 * i + 4 * l) ^ turned)) = make_float4(
              out[i][0][2 * h] * f, out[i][1][2 * h] * f, out[i][0][2 * h + 1] * f, out[i][1][2 * h + 1] * f);
        }
      }
    }
  }
};

}  // namespace decode_detail

// `Tile` is a DecodeTileOf<...>. Grid: decode_launch, CTAs of a sequence x (kv heads x blocks of rows) x sequences of
// the bucket.
template <typename Tile>
__global__ void __launch_bounds__(Tile::value.threads(), Tile::value.ctas)
    attention_decode(const __grid_constant__ AttentionArgs args) {
  using namespace decode_detail;
  static constexpr DecodeTile T = Tile::value;
  static constexpr DecodeMap kMap = decode_map(T);
  constexpr int kChunks = T.chunks();
  constexpr int kHalf = T.rotary_dim / 2;
  constexpr u32 kAll = 0xffffffffu;
  FOURFOLD_DYNAMIC_SHARED(smem);
  const u32 base = ptx::keep_register(ptx::shared_address(smem));
  const int tid = static_cast<int>(threadIdx.x);
  const int warp = tid / 32;
  const int lane = tid % 32;
  const AttentionShape& shape = args.shape;
  const bool shares = T.spans() && args.span > 1;
  const int kv_head = static_cast<int>(blockIdx.y) % shape.kv_heads;
  const int first_row = static_cast<int>(blockIdx.y) / shape.kv_heads * T.rows();
  const int place = static_cast<int>(blockIdx.z);
  const int group = shape.group();

  if (args.settled == 0) ptx::grid_dependency_wait();
  SequenceRows sequence = args.sequences[place];  // of the bucket, live or not: both are asked for at once
  if (place >= *args.live) sequence.count = 0;
  const int count = sequence.count < args.most_rows ? sequence.count : args.most_rows;
  const int context = sequence.position + count;
  const int length = split_length(context);
  // With fewer CTAs than splits they have equal shares of what this sequence has.
  const int all = shares ? split_count(context) : 0, ctas = static_cast<int>(gridDim.x),
            cta = static_cast<int>(blockIdx.x);
  const int first_split = shares ? cta * all / ctas : cta;
  const int end_split = shares ? (cta + 1) * all / ctas : cta + 1;
  const int begin = first_split * length;
  const int rows = count * group - first_row < T.rows() ? count * group - first_row : T.rows();
  if (sequence.first < 0 || count <= 0 || begin >= context || first_split == end_split || rows <= 0) {
    ptx::grid_dependency_wait();  // who waits for this kernel's end relies on the one before it
    return;
  }
  const int end = end_split * length < context ? end_split * length : context;
  // Only the first block of rows appends; with several, the others wait for nobody and make the new keys themselves.
  const bool appends = first_row == 0;

  int* pages = reinterpret_cast<int*>(smem + kMap.pages);
  const int* table = args.pages + static_cast<long long>(place) * args.page_table_stride;
  const int first_page = begin >> args.page_shift;
  for (int i = tid; i <= ((end - 1) >> args.page_shift) - first_page; i += T.threads())
    pages[i] = table[first_page + i];
  float2* turns = reinterpret_cast<float2*>(smem + kMap.rotation);
  for (int i = tid; i < count * kHalf; i += T.threads()) {
    turns[i] = rotation(args.frequencies[i % kHalf], sequence.position + i / kHalf);
  }
  if (T.bulk && tid == 0) {
    for (int i = 0; i < T.stages; ++i) ptx::mbarrier_init(base + kMap.barriers + 8u * static_cast<u32>(i), 1);
    ptx::fence_barrier_init();
  }
  __syncthreads();

  const long long key_offset = args.key_offset(kv_head, T.row_bytes());
  const long long value_offset = args.value_offset(kv_head, T.row_bytes());
  const auto page_of = [&](int position) {
    return args.cache + pages[(position >> args.page_shift) - first_page] * args.page_bytes;
  };
  const int page_mask = (1 << args.page_shift) - 1;
  const int stages = (end - begin + T.keys() - 1) / T.keys();
  const auto stage_at = [&](int stage) {
    return kMap.stages + static_cast<u32>(stage % T.stages) * static_cast<u32>(T.stage_bytes());
  };
  const auto there = [&](int stage) { return base + kMap.barriers + 8u * static_cast<u32>(stage % T.stages); };
  constexpr u32 kValues = static_cast<u32>(T.keys() * T.row_bytes());
  constexpr int kPieceBytes = piece_bytes(T.row_bytes());
  // What the cache holds of a stage. Zeros for values of a warp's last keys that are not there: they are multiplied
  // with zeros.
  const auto load_old = [&](int stage) {
    const u32 at = stage_at(stage);
    const int first = begin + stage * T.keys();
    int upto = first + T.keys() < end ? first + T.keys() : end;
    upto = upto < sequence.position ? upto : sequence.position;
    const int old = upto > first ? upto - first : 0;
    if constexpr (T.bulk) {
      if (warp == 0) {
        if (lane == 0) {
          if (old > 0) {
            ptx::mbarrier_arrive_expect(there(stage), static_cast<u32>(2 * old * T.row_bytes()));
          } else {
            ptx::mbarrier_arrive(there(stage));
          }
        }
        __syncwarp();  // announced before anything lands
        // A lane has one piece of the keys, or of the values, of one page.
        constexpr int kPieces = T.row_bytes() / kPieceBytes;
        const int kind = lane / kPieces % 2;
        const int piece = lane % kPieces;
        const u64 policy = ptx::policy_evict_first();
        for (int page = lane / (2 * kPieces); page << args.page_shift < T.keys(); page += 32 / (2 * kPieces)) {
          const int start = first + (page << args.page_shift);  // stages begin with pages, or inside one
          const int from = page == 0 ? first : start & ~page_mask;
          const int to = (start | page_mask) + 1;
          const int count_here = (to < upto ? to : upto) - from;
          if (count_here <= 0) continue;
          ptx::bulk_copy(base + at + static_cast<u32>((piece * T.keys() + from - first) * kPieceBytes) +
                             (kind == 0 ? 0u : kValues),
                         page_of(from) + (kind == 0 ? key_offset : value_offset) +
                             ((static_cast<long long>(piece) << args.page_shift) + (from & page_mask)) * kPieceBytes,
                         static_cast<u32>(count_here * kPieceBytes), there(stage), policy);
        }
      }
    } else {
      // Chunks as they lie there: positions count first.
      constexpr int kPieceChunks = kPieceBytes / 16;
      for (int i = tid; i < T.keys() * kChunks; i += T.threads()) {
        const int key = i / kPieceChunks % T.keys();
        const int piece = i / (kPieceChunks * T.keys());
        if (key >= old) continue;
        const int position = first + key;
        const u8* from = page_of(position) + i % kPieceChunks * 16 +
                         ((static_cast<long long>(piece) << args.page_shift) + (position & page_mask)) * kPieceBytes;
        ptx::async_copy16(base + at + static_cast<u32>(i) * 16u, from + key_offset);
        ptx::async_copy16(base + at + static_cast<u32>(i) * 16u + kValues, from + value_offset);
      }
    }
    if (first + T.keys() > end) {
      constexpr int kOwn = 16 * T.blocks;
      const int rest = (end - first + kOwn - 1) / kOwn * kOwn - (end - first);
      for (int i = tid; i < rest * kChunks; i += T.threads()) {
        *reinterpret_cast<uint4*>(smem + at + kValues + place_of<Tile>(end - first + i / kChunks, i % kChunks)) =
            make_uint4(0, 0, 0, 0);
      }
    }
  };
  float key_scale = 1.0f;
  float value_scale = 1.0f;
  if constexpr (T.fp8) {
    key_scale = args.cache_scales[0];
    value_scale = args.cache_scales[1];
  }
  // The rows of this step that belong to a stage: to the stage, and to the cache. A warp has a key or a value.
  const auto load_new = [&](int stage) {
    const int first = begin + stage * T.keys();
    const int from = first > sequence.position ? first : sequence.position;
    const int upto = first + T.keys() < end ? first + T.keys() : end;
    for (int i = warp; i < 2 * (upto - from); i += T.warps()) {
      const int position = from + i / 2;
      const bool is_key = i % 2 == 0;
      const int row = position - sequence.position;
      HeadVector v = load_vector<T.head_dim>(args.rows + (sequence.first + row) * args.row_stride +
                                                 (is_key ? shape.k_column(kv_head) : shape.v_column(kv_head)),
                                             lane);
      if (is_key) norm_and_rotate<T.head_dim, T.rotary_dim>(v, args.k_norm, args.norm_eps, turns + row * kHalf, lane);
      if (lane * 8 >= T.head_dim) continue;
      u8* out = page_of(position) + (is_key ? key_offset : value_offset);
      const int in_page = position & page_mask;
      const u32 at = stage_at(stage) + (is_key ? 0u : kValues);
      if constexpr (T.fp8) {
        const Vec2 codes = to_e4m3x8(v, 1.0f / (is_key ? key_scale : value_scale));
        const uint2 words = make_uint2(codes.x, codes.y);
        *reinterpret_cast<uint2*>(smem + at + place_of<Tile>(position - first, lane / 2) +
                                  static_cast<u32>(lane % 2) * 8u) = words;
        if (appends) {
          *reinterpret_cast<uint2*>(out + cache_place(T.row_bytes(), page_mask + 1, in_page, lane / 2) + lane % 2 * 8) =
              words;
        }
      } else {
        const uint4 words = to_bf16x8(v);
        *reinterpret_cast<uint4*>(smem + at + place_of<Tile>(position - first, lane)) = words;
        if (appends) *reinterpret_cast<uint4*>(out + cache_place(T.row_bytes(), page_mask + 1, in_page, lane)) = words;
      }
    }
  };
  const int ahead = stages < T.stages - 1 ? stages : T.stages - 1;
  for (int i = 0; i < T.stages - 1; ++i) {
    if (i < ahead) load_old(i);
    if constexpr (!T.bulk) ptx::async_copy_commit();
  }

  const HeadVector weights = norm_weights<T.head_dim>(args.q_norm, lane);

  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();

  // A warp's queries, several asked for at once.
  constexpr int kEach = (T.rows() + T.warps() - 1) / T.warps();
  constexpr int kMost = T.row_tiles == 1 ? 4 : 2;
  constexpr int kAtOnce = kEach < kMost ? kEach : kMost;
#pragma unroll 1
  for (int first = warp; first < T.rows(); first += kAtOnce * T.warps()) {
    uint4 values[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int m = first + i * T.warps();
      const int row = (first_row + m) / group;
      const int head = kv_head * group + (first_row + m) % group;
      values[i] = make_uint4(0, 0, 0, 0);
      if (m < rows && lane * 8 < T.head_dim) {
        values[i] = *reinterpret_cast<const uint4*>(args.rows + (sequence.first + row) * args.row_stride +
                                                    shape.q_column(head) + lane * 8);
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int m = first + i * T.warps();
      if (m >= T.rows()) break;
      HeadVector v = unpack(values[i]);
      if (m < rows) {
        norm_and_rotate<T.head_dim, T.rotary_dim>(v, args.q_norm != nullptr, weights, args.norm_eps,
                                                  turns + (first_row + m) / group * kHalf, lane);
      }
      if (lane * 8 >= T.head_dim) continue;
      uint4 words;
      if constexpr (T.fp8) {
        words = make_uint4(ptx::to_f16x2(v.x[0], v.x[1]), ptx::to_f16x2(v.x[2], v.x[3]), ptx::to_f16x2(v.x[4], v.x[5]),
                           ptx::to_f16x2(v.x[6], v.x[7]));
      } else {
        words = to_bf16x8(v);
      }
      *reinterpret_cast<uint4*>(smem + kMap.queries + query_place<T.head_dim / 8>(m, lane)) = words;
    }
  }
  for (int i = 0; i < ahead; ++i) load_new(i);

  const int part = warp % T.parts;
  const int row_tile = warp / T.parts % T.row_tiles;
  const int key_group = warp / (T.parts * T.row_tiles);
  const u32 queries = base + kMap.queries + static_cast<u32>(row_tile * 16 * T.head_dim * 2);
  const float scale = args.scale * kLog2E * (T.fp8 ? 256.0f * key_scale : 1.0f);
  // The last key that the rows g and g + 8 of this warp see.
  int last[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int m = first_row + row_tile * 16 + lane / 4 + 8 * h;
    last[h] = m / group < count ? sequence.position + m / group : -1;
  }
  Warp<Tile> w;
  w.clear();
  // The warps' parts of a split become one. `space`: where nobody reads a stage any more. What it works out is not kept
  // in registers across the loop over stages (keep_register), for which there are not enough.
  float2* sums = reinterpret_cast<float2*>(smem + kMap.sums);
  const auto store_split = [&](int split, u32 space) {
    if constexpr (!T.bulk) ptx::async_copy_wait<0>();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      w.sum[h] += __shfl_xor_sync(kAll, w.sum[h], 1);
      w.sum[h] += __shfl_xor_sync(kAll, w.sum[h], 2);
    }

    if (lane % 4 == 0 && part == 0) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        sums[key_group * T.rows() + row_tile * 16 + lane / 4 + 8 * h] = make_float2(w.largest[h], w.sum[h]);
      }
    }
    __syncthreads();
    const auto total_of = [&](int m) {
      float most = kNobody;
#pragma unroll
      for (int k = 0; k < T.key_groups; ++k) most = fmaxf(most, sums[k * T.rows() + m].x);
      float sum = 0.0f;
#pragma unroll
      for (int k = 0; k < T.key_groups; ++k) {
        const float2 part = sums[k * T.rows() + m];
        sum += part.y * ptx::exp2_approx(part.x - most);
      }
      return make_float2(most, sum);
    };
    float factor[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float2 total = total_of(row_tile * 16 + lane / 4 + 8 * h);
      factor[h] = ptx::exp2_approx(w.largest[h] - total.x) * (T.fp8 ? 256.0f * value_scale : 1.0f);
    }
    float* outputs = reinterpret_cast<float*>(smem + space);
    const long long partial =
        ((static_cast<long long>(place) * shape.kv_heads + kv_head) * args.splits + split) * (args.most_rows * group) +
        first_row;
    constexpr int kAtOnce = T.rows_at_once();
    constexpr bool kRounds = kAtOnce < T.rows();
#pragma unroll 1
    for (int from = 0; from < (kRounds ? ptx::keep_register(rows) : 1); from += kAtOnce) {
      if (from > 0) __syncthreads();  // the rows before are read
      const int upto = kRounds && from + kAtOnce < rows ? from + kAtOnce : rows;
      const int kept = upto - from;
      // This warp's own are rows 16 row_tile .. + 15, and with several row tiles all rows meet at once.
      w.store(outputs + (key_group * kept + row_tile * 16) * T.head_dim + part * (T.head_dim / T.parts), factor, from,
              upto - row_tile * 16, lane);
      __syncthreads();
      for (int i = ptx::keep_register(tid); i < kept * (T.head_dim / 4); i += T.threads()) {
        const int m = i / (T.head_dim / 4);
        const int quad = i % (T.head_dim / 4);
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int k = 0; k < T.key_groups; ++k) {
          const float4 x =
              reinterpret_cast<const float4*>(outputs + (k * kept + m) * T.head_dim)[quad ^ turn_of(m) / 4];
          sum.x += x.x;
          sum.y += x.y;
          sum.z += x.z;
          sum.w += x.w;
        }
        reinterpret_cast<float4*>(args.partial + (partial + from + m) * T.head_dim)[quad] = sum;
      }
    }
    for (int m = tid; m < rows; m += T.threads())
      reinterpret_cast<float2*>(args.partial_sums)[partial + m] = total_of(m);
  };
  __syncthreads();
  w.take_queries(queries, lane);
  int split = first_split;
  int split_end = length / T.keys();  // stages up to its end
  for (int stage = 0; stage < stages; ++stage) {
    if constexpr (T.bulk) {
      ptx::mbarrier_wait(there(stage), static_cast<u32>(stage / T.stages) & 1u);
    } else {
      ptx::async_copy_wait<T.stages - 2>();
    }
    __syncthreads();  // the stage is there for all, and the one before it is free
    if (stage + T.stages - 1 < stages) {
      load_old(stage + T.stages - 1);
      load_new(stage + T.stages - 1);
    }
    if constexpr (!T.bulk) ptx::async_copy_commit();
    const u32 keys = base + stage_at(stage);
    const int first = key_group * T.blocks * 16;
    const int position = begin + stage * T.keys() + first;
    if (position < end) {
      float s[2 * T.blocks][4];
      w.scores(s, keys, first, lane);
      const bool all = position + 16 * T.blocks - 1 <= sequence.position;  // every row sees every key
#pragma unroll
      for (int n = 0; n < 2 * T.blocks; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int key = position + 8 * n + lane % 4 * 2 + e % 2;
          s[n][e] = all || key <= last[e / 2] ? s[n][e] * scale : kNobody;
        }
      w.add(s, keys + kValues, first, part, lane);
    }
    if constexpr (!T.spans()) continue;
    const bool last_one = stage + 1 == stages;
    if (last_one || stage + 1 == split_end) {
      store_split(split, shares ? stage_at(stage) : kMap.stages);
      if (!last_one) {
        ++split;
        split_end += length / T.keys();
        w.clear();
        ptx::fence_async_shared();  // the copy engine writes there next
      }
    }
  }
  if constexpr (!T.spans()) store_split(first_split, kMap.stages);
}

}  // namespace fourfold::attn
