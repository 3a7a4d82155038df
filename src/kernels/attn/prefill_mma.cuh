// Attention over many rows with mma.sync and cp.async, for every architecture: causal, paged, bf16 and e4m3 caches. A
// CTA has a block of query rows (token, head of the group) of one kv head and goes through the keys up to its last
// token; each warp has 16 rows, in registers as in the kernel for few rows (decode.cuh).
//
// Second node; prefill_prepare.cuh has normalised and rotated the queries and appended keys and values.
#pragma once

#include "kernels/attn/decode.cuh"
#include "kernels/attn/prefill_tile.h"

namespace fourfold::attn {

// What a block of rows is, for both kernels.
struct BlockRows {
  SequenceRows sequence;
  int place;
  int first;  // row of the block among the sequence's
  int rows;   // of the block; none: nothing to do
  int keys;   // that its last row sees
};
__device__ __forceinline__ BlockRows block_rows(const PrefillArgs& args, int index, int most) {
  const RowBlock block = args.blocks[index];
  BlockRows b{{-1, 0, 0, 0}, block.sequence, block.first, 0, 0};
  if (block.sequence < 0 || block.sequence >= *args.attention.live) return b;
  b.sequence = args.attention.sequences[block.sequence];
  const int group = args.attention.shape.group();
  if (b.sequence.first < 0 || block.first >= b.sequence.count * group) return b;
  const int left = b.sequence.count * group - block.first;
  b.rows = left < most ? left : most;
  b.keys = b.sequence.position + (block.first + b.rows - 1) / group + 1;
  return b;
}

// `Tile` is a PrefillTileOf<...>. Grid: kv heads x blocks.
template <typename Tile>
__global__ void __launch_bounds__(Tile::value.threads(), 1)
    attention_prefill_mma(const __grid_constant__ PrefillArgs args) {
  using namespace decode_detail;
  static constexpr PrefillTile T = Tile::value;
  static constexpr PrefillMap kMap = prefill_map(T);
  // A warp's part: one tile of 16 rows, all keys of a stage.
  using Inner = DecodeTileOf<T.head_dim, T.rotary_dim, T.warps, 1, 1, T.keys / 16, T.stages, T.fp8, false, 1>;
  constexpr int kChunks = T.chunks();
  constexpr int kPieceBytes = piece_bytes(T.row_bytes());
  constexpr int kPieceChunks = kPieceBytes / 16;
  constexpr u32 kAll = 0xffffffffu;
  static_assert(!T.wgmma);
  FOURFOLD_DYNAMIC_SHARED(smem);
  const u32 base = ptx::keep_register(ptx::shared_address(smem));
  const int tid = static_cast<int>(threadIdx.x);
  const int warp = tid / 32;
  const int lane = tid % 32;
  const AttentionArgs& a = args.attention;
  const AttentionShape& shape = a.shape;
  const int group = shape.group();
  const int kv_head = static_cast<int>(blockIdx.x);
  if (a.settled == 0) ptx::grid_dependency_wait();
  const BlockRows block = block_rows(args, static_cast<int>(blockIdx.y), T.rows());
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  if (block.rows <= 0) return;

  const int* pages = a.pages + static_cast<long long>(block.place) * a.page_table_stride;
  const int page_mask = (1 << a.page_shift) - 1;
  const long long key_offset = a.key_offset(kv_head, T.row_bytes());
  const long long value_offset = a.value_offset(kv_head, T.row_bytes());
  const auto load = [&](int stage) {
    const u32 at = static_cast<u32>(stage % T.stages * T.half_bytes());
    for (int i = tid; i < T.keys * kChunks; i += T.threads()) {
      const int position = stage * T.keys + i / kPieceChunks % T.keys;
      const int piece = i / (kPieceChunks * T.keys);
      if (position < block.keys) {
        const u8* from = a.cache + pages[position >> a.page_shift] * a.page_bytes + i % kPieceChunks * 16 +
                         ((static_cast<long long>(piece) << a.page_shift) + (position & page_mask)) * kPieceBytes;
        ptx::async_copy16(base + kMap.keys + at + static_cast<u32>(i) * 16u, from + key_offset);
        ptx::async_copy16(base + kMap.values + at + static_cast<u32>(i) * 16u, from + value_offset);
      } else {  // multiplied with zeros
        *reinterpret_cast<uint4*>(smem + kMap.values + at + i * 16) = make_uint4(0, 0, 0, 0);
      }
    }
  };
  const int stages = (block.keys + T.keys - 1) / T.keys;
  for (int i = 0; i < T.stages - 1; ++i) {
    if (i < stages) load(i);
    ptx::async_copy_commit();
  }
  const auto row_of = [&](int m) { return block.sequence.first + (block.first + m) / group; };
  const auto head_of = [&](int m) { return kv_head * group + (block.first + m) % group; };
  for (int i = tid; i < T.rows() * (T.head_dim / 8); i += T.threads()) {
    const int m = i / (T.head_dim / 8);
    const int chunk = i % (T.head_dim / 8);
    uint4 words = make_uint4(0, 0, 0, 0);
    if (m < block.rows) {
      const long long row = first_query_row(block.sequence.first, block.place, group) + block.first + m;
      words = *reinterpret_cast<const uint4*>(args.queries + query_place(args, kv_head, row, chunk));
    }
    if constexpr (T.fp8) {
      const auto convert = [](u32 pair) {
        return ptx::to_f16x2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
      };
      words = make_uint4(convert(words.x), convert(words.y), convert(words.z), convert(words.w));
    }
    *reinterpret_cast<uint4*>(smem + kMap.queries + query_place<T.head_dim / 8>(m, chunk)) = words;
  }
  __syncthreads();
  float scale = a.scale * kLog2E;
  float value_scale = 1.0f;
  if constexpr (T.fp8) {
    scale *= 256.0f * a.cache_scales[0];
    value_scale = 256.0f * a.cache_scales[1];
  }
  int last[2];  // key that the rows g and g + 8 of this warp see
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int m = warp * 16 + lane / 4 + 8 * h;
    last[h] = m < block.rows ? block.sequence.position + (block.first + m) / group : -1;
  }
  // The keys that all, and that some of this warp's rows see.
  const int all_see = block.sequence.position + (block.first + warp * 16) / group;
  const int upto = warp * 16 < block.rows
                       ? block.sequence.position +
                             (block.first + (warp * 16 + 15 < block.rows ? warp * 16 + 15 : block.rows - 1)) / group
                       : -1;
  Warp<Inner> w;
  w.clear();
  w.take_queries(base + kMap.queries + static_cast<u32>(warp * 16 * T.head_dim * 2), lane);
  for (int stage = 0; stage < stages; ++stage) {
    ptx::async_copy_wait<T.stages - 2>();
    __syncthreads();  // the stage is there for all, and the one before it is free
    if (stage + T.stages - 1 < stages) load(stage + T.stages - 1);
    ptx::async_copy_commit();
    const u32 at = base + static_cast<u32>(stage % T.stages * T.half_bytes());
    const int position = stage * T.keys;
    if (position <= upto) {
      float s[T.keys / 8][4];
      w.scores(s, at + kMap.keys, 0, lane);
      const bool all = position + T.keys - 1 <= all_see && warp * 16 + 15 < block.rows;
#pragma unroll
      for (int n = 0; n < T.keys / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int key = position + 8 * n + lane % 4 * 2 + e % 2;
          s[n][e] = all || key <= last[e / 2] ? s[n][e] * scale : kNobody;
        }
      w.add(s, at + kMap.values, 0, 0, lane);
    }
  }
  ptx::async_copy_wait<0>();
  float factor[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float sum = w.sum[h];
    sum += __shfl_xor_sync(kAll, sum, 1);
    sum += __shfl_xor_sync(kAll, sum, 2);
    factor[h] = value_scale / sum;
  }
  const int l = lane % 4;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int m = warp * 16 + lane / 4 + 8 * h;
    if (m >= block.rows) continue;
    const u16* gates = a.rows + static_cast<long long>(row_of(m)) * a.row_stride + shape.gate_column(head_of(m));
    u16* out = a.out + static_cast<long long>(row_of(m)) * a.out_stride + head_of(m) * T.head_dim;
    const auto put = [&](int d, float x, float y) {
      x *= factor[h];
      y *= factor[h];
      if (shape.gated) {
        const u32 gate = *reinterpret_cast<const u32*>(gates + d);
        x /= 1.0f + expf(-__uint_as_float(gate << 16));
        y /= 1.0f + expf(-__uint_as_float(gate & 0xffff0000u));
      }
      *reinterpret_cast<u32*>(out + d) = ptx::to_bf16x2(x, y);
    };
#pragma unroll
    for (int i = 0; i < T.head_dim / 16; ++i) {
      if constexpr (!T.fp8) {
        put(16 * i + 2 * l, w.out[i][0][2 * h], w.out[i][0][2 * h + 1]);
        put(16 * i + 8 + 2 * l, w.out[i][1][2 * h], w.out[i][1][2 * h + 1]);
      } else {
        put(16 * i + 4 * l, w.out[i][0][2 * h], w.out[i][1][2 * h]);
        put(16 * i + 4 * l + 2, w.out[i][0][2 * h + 1], w.out[i][1][2 * h + 1]);
      }
    }
  }
}

}  // namespace fourfold::attn
