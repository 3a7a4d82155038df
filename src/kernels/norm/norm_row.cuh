// RMS norm of rows by 256 threads of a CTA: alone (norm.cuh) or in front of a product (gemm/rows.cuh), with the same
// bits. Thread v has pieces v, v + 256, ... of 8 columns; a warp's sums of squares meet by shuffles, the eight warps'
// are added in order.
#pragma once

#include "kernels/norm/norm_args.h"
#include "kernels/ptx/sm90.cuh"

namespace fourfold::norm {

using namespace ptx;

struct Piece {
  float v[kPieceColumns];
};

__device__ __forceinline__ Piece load_floats(const float* p) {
  const float4 low = __ldcg(reinterpret_cast<const float4*>(p));
  const float4 high = __ldcg(reinterpret_cast<const float4*>(p) + 1);
  return {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
}
__device__ __forceinline__ Piece bf16_piece(const uint4& w) {
  const u32 words[4] = {w.x, w.y, w.z, w.w};
  Piece piece;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    piece.v[2 * i] = __uint_as_float(words[i] << 16);
    piece.v[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
  return piece;
}
__device__ __forceinline__ uint4 load_words(const u16* p) { return __ldcg(reinterpret_cast<const uint4*>(p)); }
__device__ __forceinline__ Piece load_bf16(const u16* p) { return bf16_piece(load_words(p)); }
__device__ __forceinline__ void store_floats(float* p, const Piece& piece) {
  reinterpret_cast<float4*>(p)[0] = make_float4(piece.v[0], piece.v[1], piece.v[2], piece.v[3]);
  reinterpret_cast<float4*>(p)[1] = make_float4(piece.v[4], piece.v[5], piece.v[6], piece.v[7]);
}
__device__ __forceinline__ uint4 to_bf16_piece(const Piece& p) {
  return make_uint4(to_bf16x2(p.v[0], p.v[1]), to_bf16x2(p.v[2], p.v[3]), to_bf16x2(p.v[4], p.v[5]),
                    to_bf16x2(p.v[6], p.v[7]));
}

// The sum of squares goes on over a thread's pieces in order.
__device__ __forceinline__ float add_squares(float sum, const Piece& p) {
#pragma unroll
  for (int i = 0; i < kPieceColumns; ++i) sum = fmaf(p.v[i], p.v[i], sum);
  return sum;
}
__device__ __forceinline__ float warp_sum(float sum) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
  return sum;
}
// From the eight warps' sums.
__device__ __forceinline__ float inverse_rms(const float* sums, int columns, float eps) {
  float sum = sums[0];
#pragma unroll
  for (int w = 1; w < kRowThreads / 32; ++w) sum += sums[w];
  return 1.0f / sqrtf(sum / static_cast<float>(columns) + eps);
}
__device__ __forceinline__ Piece scaled(const Piece& p, float inverse, const Piece& weight) {
  Piece out;
#pragma unroll
  for (int i = 0; i < kPieceColumns; ++i) out.v[i] = p.v[i] * inverse * weight.v[i];
  return out;
}

// Of a row: body(i, column) for each piece of this thread.
template <int Pieces, typename Body>
__device__ __forceinline__ void each_piece(int thread, int columns, const Body& body) {
#pragma unroll
  for (int i = 0; i < Pieces; ++i) {
    const int column = (thread + i * kRowThreads) * kPieceColumns;
    if (column < columns) body(i, column);
  }
}
__device__ __forceinline__ void add_piece(Piece& x, const Piece& delta) {
#pragma unroll
  for (int e = 0; e < kPieceColumns; ++e) x.v[e] += delta.v[e];
}
// The shared expert's share of a row.
__device__ __forceinline__ float share_weight(float logit) { return 1.0f / (1.0f + expf(-logit)); }
__device__ __forceinline__ float share_weight(const Share& from, long long t) {
  return from.logits != nullptr ? share_weight(__ldcg(from.logits + t * from.logits_stride)) : 1.0f;
}
__device__ __forceinline__ void add_share(Piece& x, const Piece& share, float weight) {
#pragma unroll
  for (int e = 0; e < kPieceColumns; ++e) x.v[e] = fmaf(weight, share.v[e], x.v[e]);
}

// What goes to a row of the residual, asked for before any of it is added.
template <int Pieces>
struct Addends {
  float logit;
  uint4 share[Pieces], delta[Pieces];

  __device__ __forceinline__ void load_logit(const Share& from, long long t) {
    logit = from.logits != nullptr ? __ldcg(from.logits + t * from.logits_stride) : 0.0f;
  }
  __device__ __forceinline__ void load(const Share& from, const u16* delta_rows, long long stride, long long t, int i,
                                       int column) {
    if (from.x != nullptr) share[i] = load_words(from.x + t * from.stride + column);
    if (delta_rows != nullptr) delta[i] = load_words(delta_rows + t * stride + column);
  }
  __device__ __forceinline__ float weight(const Share& from) const {
    return from.logits != nullptr ? share_weight(logit) : 1.0f;
  }
  __device__ __forceinline__ void add(const Share& from, const u16* delta_rows, Piece& x, int i, float weight) const {
    if (from.x != nullptr) add_share(x, bf16_piece(share[i]), weight);
    if (delta_rows != nullptr) add_piece(x, bf16_piece(delta[i]));
  }
};
// A piece of the residual with what was added: its squares, and where it stays.
template <typename Row>
__device__ __forceinline__ float keep_piece(const NormArgs& args, Row row, int column, const Piece& x, float squares) {
  squares = add_squares(squares, x);
  if (args.residual_out != nullptr) store_floats(args.residual_out + row * args.residual_stride + column, x);
  return squares;
}
// The sums of squares of a row's threads to `sums` [8], for inverse_rms().
__device__ __forceinline__ void share_squares(float squares, float* sums, int thread) {
  squares = warp_sum(squares);
  if (thread % 32 == 0) sums[thread / 32] = squares;
  __syncthreads();
}
template <typename Row>
__device__ __forceinline__ void store_normed(const NormArgs& args, Row row, int column, const Piece& x, float inverse,
                                             const Piece& weight) {
  *reinterpret_cast<uint4*>(args.out + row * args.out_stride + column) = to_bf16_piece(scaled(x, inverse, weight));
}

}  // namespace fourfold::norm
