// The sum over each token's experts and the norm behind it as one kernel, with the bits of the sum's own kernel and
// norm_rows: a row of the layer's result is complete in one CTA.
#pragma once

#include "kernels/moe/discard.cuh"
#include "kernels/moe/packed_sum.cuh"

namespace fourfold::moe {

// Of fp32 rows: sum.out = the sum; args.residual_out = residual + sum; args.out = that under the norm. `args.delta` is
// sum.out, and the strides and columns of both are the same. One CTA of norm::kRowThreads a token. Thread v has places
// 8v .. 8v + 7 of rows (partial_place()), and 256 threads further on; half of them are its neighbour's columns.
template <int Pieces>
__global__ void __launch_bounds__(norm::kRowThreads, 1)
    moe_sum_norm(const __grid_constant__ RowSum sum, const __grid_constant__ norm::NormArgs args) {
  using namespace norm;
  constexpr int kRows = 9;  // in flight; a missing choice loads nothing and adds nothing
  __shared__ float sums[kRowThreads / 32];
  grid_launch_dependents();
  const int thread = static_cast<int>(threadIdx.x);
  const long long t = blockIdx.x;
  const int* pick_slot = sum.pick_slot + t * sum.top_k;
  const float* router = sum.weights + t * sum.top_k;
  float w[kRows];
  int slot[kRows];
  const auto look_up = [&](int base) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const bool there = base + i < sum.top_k;
      slot[i] = there ? pick_slot[base + i] : -1;
      w[i] = there ? router[base + i] : 0.0f;
    }
  };
  // Routing was over when down began, and so was what wrote the residual and the shared expert's share.
  look_up(0);
  Piece x[Pieces], weights[Pieces];
  const auto each = [&](const auto& body) { each_piece<Pieces>(thread, args.columns, body); };
  each([&](int i, int column) {
    weights[i] = load_floats(args.weight + column);
    x[i] = load_floats(args.residual + t * args.residual_stride + column);
  });
  if (args.share.x != nullptr) {
    const float weight = share_weight(args.share, t);
    each([&](int i, int column) { add_share(x[i], load_bf16(args.share.x + t * args.share.stride + column), weight); });
  }
  grid_dependency_wait();
  float squares = 0.0f;
#pragma unroll
  for (int p = 0; p < Pieces; ++p) {
    const int column = (thread + p * kRowThreads) * kPieceColumns;
    const bool there = column < args.columns;
    float4 low = make_float4(0.0f, 0.0f, 0.0f, 0.0f), high = low;
    for (int base = 0; base < sum.top_k; base += kRows) {
      if (base > 0 || p > 0) look_up(base);
      float4 v[kRows][2];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        v[i][0] = v[i][1] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (slot[i] < 0 || !there) continue;
        const auto* row = reinterpret_cast<const float4*>(sum.partial + slot[i] * sum.stride + column);
        v[i][0] = __ldcs(row);
        v[i][1] = __ldcs(row + 1);
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (slot[i] < 0) continue;
        low.x += w[i] * v[i][0].x;
        low.y += w[i] * v[i][0].y;
        low.z += w[i] * v[i][0].z;
        low.w += w[i] * v[i][0].w;
        high.x += w[i] * v[i][1].x;
        high.y += w[i] * v[i][1].y;
        high.z += w[i] * v[i][1].z;
        high.w += w[i] * v[i][1].w;
      }
    }
    // Places 4q .. 4q + 3 of a row tile are its rows 2q, 2q + 8, 2q + 1, 2q + 9: rows 0 to 7 are for the even thread.
    const u32 first[2] = {to_bf16x2(low.x, low.z), to_bf16x2(high.x, high.z)};
    const u32 second[2] = {to_bf16x2(low.y, low.w), to_bf16x2(high.y, high.w)};
    const bool odd = thread % 2 != 0;
    const u32 other[2] = {__shfl_xor_sync(0xffffffffu, odd ? first[0] : second[0], 1),
                          __shfl_xor_sync(0xffffffffu, odd ? first[1] : second[1], 1)};
    if (!there) continue;
    const uint4 words =
        odd ? make_uint4(other[0], other[1], second[0], second[1]) : make_uint4(first[0], first[1], other[0], other[1]);
    *reinterpret_cast<uint4*>(sum.out + t * sum.out_stride + column) = words;
    add_piece(x[p], bf16_piece(words));
    squares = keep_piece(args, t, column, x[p], squares);
  }
  share_squares(squares, sums, thread);
  const float inverse = inverse_rms(sums, args.columns, args.eps);
  each([&](int i, int column) { store_normed(args, t, column, x[i], inverse, weights[i]); });
  if (sum.keep != 0) return;
#pragma unroll
  for (int p = 0; p < Pieces; ++p) {
    const int bytes = (thread / 32 * 32 + p * kRowThreads) * kPieceColumns * 4;  // of this warp's first place
    for (int half = 0; half < 2; ++half) {
      route_detail::discard_rows(sum.partial, sum.stride * 4, pick_slot, sum.top_k, bytes + half * 512);
    }
  }
}

// The same of rows of groups. There are many tokens: sum.out is not written, since nobody reads it behind a norm.
template <int Pieces>
__global__ void __launch_bounds__(norm::kRowThreads, Pieces > 2 ? 2 : 4)
    moe_sum_norm_packed(const __grid_constant__ RowSum sum, const __grid_constant__ norm::NormArgs args) {
  using namespace norm;
  __shared__ float sums[kRowThreads / 32];
  grid_dependency_wait();
  grid_launch_dependents();
  const int thread = static_cast<int>(threadIdx.x);
  const long long t = blockIdx.x;
  PackedPick pick;
  pick.look_up(sum, t);
  uint4 words[Pieces];
  packed_sum<Pieces == 1 ? 8 : 5>(sum, pick, thread, words);
  // Not before: more CTAs are worth more than what this would hide.
  Piece x[Pieces];
  const auto each = [&](const auto& body) { each_piece<Pieces>(thread, args.columns, body); };
  each([&](int i, int column) { x[i] = load_floats(args.residual + t * args.residual_stride + column); });
  if (args.share.x != nullptr) {
    const float weight = share_weight(args.share, t);
    each([&](int i, int column) { add_share(x[i], load_bf16(args.share.x + t * args.share.stride + column), weight); });
  }
  float squares = 0.0f;
  each([&](int i, int column) {
    add_piece(x[i], bf16_piece(words[i]));
    squares = keep_piece(args, t, column, x[i], squares);
  });
  share_squares(squares, sums, thread);
  const float inverse = inverse_rms(sums, args.columns, args.eps);
  each([&](int i, int column) { store_normed(args, t, column, x[i], inverse, load_floats(args.weight + column)); });
}

}  // namespace fourfold::moe
