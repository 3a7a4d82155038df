// Attention over many rows, first node: norm and rotation of queries and keys, append to the cache. A CTA has a few
// tokens, whose rotation it works out once; a warp has one vector after the other, and asks for several at once.
#pragma once

#include "kernels/attn/prefill_tile.h"
#include "kernels/attn/rows.cuh"

namespace fourfold::attn {

// Grid: as prefill_prepare_launch says.
template <int HeadDim, int RotaryDim, bool Fp8>
__global__ void __launch_bounds__(kPrepareThreads) attention_prepare(const __grid_constant__ PrefillArgs args) {
  constexpr int kHalf = RotaryDim / 2;
  constexpr int kRowBytes = HeadDim * (Fp8 ? 1 : 2);
  constexpr int kWarps = kPrepareThreads / 32;
  constexpr int kAtOnce = 5;  // vectors
  __shared__ float2 turns[kPrepareTokens][kHalf > 0 ? kHalf : 1];
  const AttentionArgs& a = args.attention;
  const AttentionShape& shape = a.shape;
  const int tid = static_cast<int>(threadIdx.x);
  const int lane = tid % 32;
  const int place = static_cast<int>(blockIdx.y);
  const int first = static_cast<int>(blockIdx.x) * kPrepareTokens;
  if (a.settled == 0) ptx::grid_dependency_wait();
  SequenceRows sequence = a.sequences[place];
  if (place >= *a.live) sequence.count = 0;
  const int left = sequence.first < 0 ? 0 : sequence.count - first;
  const int tokens = left < kPrepareTokens ? left : kPrepareTokens;
  for (int i = tid; i < tokens * kHalf; i += kPrepareThreads)
    turns[i / kHalf][i % kHalf] = rotation(a.frequencies[i % kHalf], sequence.position + first + i / kHalf);
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  if (tokens <= 0) return;
  __syncthreads();
  const int group = shape.kv_heads > 0 ? shape.group() : 1;
  const int vectors = shape.heads + 2 * shape.kv_heads;
  const auto load = [&](int item) {
    const int vector = item % vectors;
    const int column = vector < shape.heads                    ? shape.q_column(vector)
                       : vector < shape.heads + shape.kv_heads ? shape.k_column(vector - shape.heads)
                                                               : shape.v_column(vector - shape.heads - shape.kv_heads);
    const long long row = sequence.first + first + item / vectors;
    return lane * 8 < HeadDim ? *reinterpret_cast<const uint4*>(a.rows + row * a.row_stride + column + lane * 8)
                              : make_uint4(0, 0, 0, 0);
  };
  const auto finish = [&](int item, const uint4& words) {
    const int vector = item % vectors;
    const int token = item / vectors;
    const bool is_query = vector < shape.heads;
    const bool is_key = !is_query && vector < shape.heads + shape.kv_heads;
    const int head = is_query ? vector : is_key ? vector - shape.heads : vector - shape.heads - shape.kv_heads;
    HeadVector v = unpack(words);
    if (is_query || is_key) {
      norm_and_rotate<HeadDim, RotaryDim>(v, is_query ? a.q_norm : a.k_norm, a.norm_eps, turns[token], lane);
    }
    if (lane * 8 >= HeadDim) return;
    if (is_query) {
      const long long row =
          first_query_row(sequence.first, place, group) + static_cast<long long>(first + token) * group + head % group;
      *reinterpret_cast<uint4*>(args.queries + query_place(args, head / group, row, lane)) = to_bf16x8(v);
      return;
    }
    const int position = sequence.position + first + token;
    const int page_size = 1 << a.page_shift;
    const int page = a.pages[static_cast<long long>(place) * a.page_table_stride + (position >> a.page_shift)];
    u8* out =
        a.cache + page * a.page_bytes + (is_key ? a.key_offset(head, kRowBytes) : a.value_offset(head, kRowBytes));
    const int in_page = position & (page_size - 1);
    if constexpr (Fp8) {
      const Vec2 codes = to_e4m3x8(v, 1.0f / a.cache_scales[is_key ? 0 : 1]);
      *reinterpret_cast<uint2*>(out + cache_place(kRowBytes, page_size, in_page, lane / 2) + lane % 2 * 8) =
          make_uint2(codes.x, codes.y);
    } else {
      *reinterpret_cast<uint4*>(out + cache_place(kRowBytes, page_size, in_page, lane)) = to_bf16x8(v);
    }
  };
  const int items = tokens * vectors;
  for (int i = tid / 32; i < items; i += kAtOnce * kWarps) {
    uint4 words[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
      if (i + j * kWarps < items) words[j] = load(i + j * kWarps);
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
      if (i + j * kWarps < items) finish(i + j * kWarps, words[j]);
  }
}

}  // namespace fourfold::attn
