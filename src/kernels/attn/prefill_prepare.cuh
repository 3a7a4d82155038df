// Attention over many rows, first node: norm and rotation of queries and keys, append to the cache. A warp a vector.
#pragma once

#include "kernels/attn/prefill_tile.h"
#include "kernels/attn/rows.cuh"

namespace fourfold::attn {

// Grid: as prefill_prepare_launch says, `rows` being those of the longest sequence.
template <int HeadDim, int RotaryDim, bool Fp8>
__global__ void __launch_bounds__(kPrepareThreads) attention_prepare(const __grid_constant__ PrefillArgs args) {
  constexpr int kHalf = RotaryDim / 2;
  constexpr int kRowBytes = HeadDim * (Fp8 ? 1 : 2);
  constexpr int kWarps = kPrepareThreads / 32;
  __shared__ float2 turns[kWarps][kHalf > 0 ? kHalf : 1];
  const AttentionArgs& a = args.attention;
  const AttentionShape& shape = a.shape;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int vectors = shape.heads + 2 * shape.kv_heads;
  const int item = static_cast<int>(blockIdx.x) * kWarps + warp;
  const int token = item / vectors;
  const int vector = item % vectors;
  const int place = static_cast<int>(blockIdx.y);
  if (a.settled == 0) ptx::grid_dependency_wait();
  SequenceRows sequence = a.sequences[place];
  if (place >= *a.live) sequence.count = 0;
  const bool idle = sequence.first < 0 || token >= sequence.count;
  if (!idle && vector < shape.heads + shape.kv_heads) {
    for (int i = lane; i < kHalf; i += 32) turns[warp][i] = rotation(a.frequencies[i], sequence.position + token);
  }
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  if (idle) return;
  __syncwarp();
  const bool is_query = vector < shape.heads;
  const bool is_key = !is_query && vector < shape.heads + shape.kv_heads;
  const int head = is_query ? vector : is_key ? vector - shape.heads : vector - shape.heads - shape.kv_heads;
  const long long row = sequence.first + token;
  const int column = is_query ? shape.q_column(head) : is_key ? shape.k_column(head) : shape.v_column(head);
  HeadVector v = load_vector<HeadDim>(a.rows + row * a.row_stride + column, lane);
  if (is_query || is_key) {
    norm_and_rotate<HeadDim, RotaryDim>(v, is_query ? a.q_norm : a.k_norm, a.norm_eps, turns[warp], lane);
  }
  if (lane * 8 >= HeadDim) return;
  if (is_query) {
    *reinterpret_cast<uint4*>(args.queries + (row * shape.heads + head) * HeadDim + lane * 8) = to_bf16x8(v);
    return;
  }
  const int position = sequence.position + token;
  const int page_size = 1 << a.page_shift;
  const int page = a.pages[static_cast<long long>(place) * a.page_table_stride + (position >> a.page_shift)];
  u8* out = a.cache + page * a.page_bytes + (is_key ? a.key_offset(head, kRowBytes) : a.value_offset(head, kRowBytes));
  const int in_page = position & (page_size - 1);
  if constexpr (Fp8) {
    const Vec2 codes = to_e4m3x8(v, 1.0f / a.cache_scales[is_key ? 0 : 1]);
    *reinterpret_cast<uint2*>(out + cache_place(kRowBytes, page_size, in_page, lane / 2) + lane % 2 * 8) =
        make_uint2(codes.x, codes.y);
  } else {
    *reinterpret_cast<uint4*>(out + cache_place(kRowBytes, page_size, in_page, lane)) = to_bf16x8(v);
  }
}

}  // namespace fourfold::attn
