// What the kernels of products of 17 rows and more have in common: the work of a CTA, and what becomes of its sums.
#pragma once

#include "kernels/gemm/dense_tile.h"
#include "kernels/gemm/fragments.cuh"

namespace fourfold::gemm::dense_detail {

using namespace ptx;

// What a CTA multiplies: row tiles [first, first + tiles) of a matrix of the stack.
struct Group {
  int part;
  int first;
  int tiles;
};
__device__ __forceinline__ Group group_of(const Matrix& m, int index, int group_tiles) {
  for (int p = 0;; ++p) {
    const int tiles = part_tiles(m, p);
    const int groups = (tiles + group_tiles - 1) / group_tiles;
    if (index < groups || p + 1 == m.count) {
      const int first = index * group_tiles;
      return {p, first, tiles - first < group_tiles ? tiles - first : group_tiles};
    }
    index -= groups;
  }
}

// The same for row tiles of the stack [first, first + tiles), all of matrices that are stored as `part` is.
__device__ __forceinline__ Group run_group_of(const Matrix& m, int index, int group_tiles) {
  for (int p = 0;;) {
    const int end = run_end(m, p);
    const int tiles = run_tiles(m, p, end);
    const int groups = (tiles + group_tiles - 1) / group_tiles;
    if (index < groups || end >= m.count) {
      const int first = index * group_tiles;
      return {p, m.parts[p].first_tile + first, tiles - first < group_tiles ? tiles - first : group_tiles};
    }
    index -= groups;
    p = end;
  }
}

FOURFOLD_HD constexpr float dense_scale(Weights format) {
  return format == Weights::kNvfp4 ? fragment_scale(format) : 1.0f;
}

// Calls `body` with what becomes of sums, a constant: asked once, and not for every sum.
template <typename Body>
__device__ __forceinline__ void with_end(DenseEnd end, const Body& body) {
  switch (end) {
    case DenseEnd::kBf16:
      return body.template operator()<DenseEnd::kBf16>();
    case DenseEnd::kFloat:
      return body.template operator()<DenseEnd::kFloat>();
    case DenseEnd::kAdd:
      return body.template operator()<DenseEnd::kAdd>();
    case DenseEnd::kSwiGlu:
      return body.template operator()<DenseEnd::kSwiGlu>();
  }
}

// Rows g and g + 8 (low, high) of row tile `index` of a part, token t; where they are there.
template <DenseEnd End>
__device__ __forceinline__ void finish(const DenseArgs& args, const Part& part, int index, int g, int t, float low,
                                       float high) {
  if (t >= args.tokens) return;
  const int in_part = index * (End == DenseEnd::kSwiGlu ? 8 : 16) + g;
  const bool low_there = in_part < part.rows;
  const bool high_there = in_part + 8 < part.rows;
  const long long at = t * args.out_stride + part.first_row + in_part;
  if constexpr (End == DenseEnd::kSwiGlu) {
    if (low_there) static_cast<u16*>(args.out)[at] = to_bf16(silu(low) * high);
  } else if constexpr (End == DenseEnd::kBf16) {
    if (low_there) static_cast<u16*>(args.out)[at] = to_bf16(low);
    if (high_there) static_cast<u16*>(args.out)[at + 8] = to_bf16(high);
  } else if constexpr (End == DenseEnd::kFloat) {
    if (low_there) static_cast<float*>(args.out)[at] = low;
    if (high_there) static_cast<float*>(args.out)[at + 8] = high;
  } else {
    const float scale = args.row_scales != nullptr ? __ldcg(args.row_scales + t) : 1.0f;
    float* out = static_cast<float*>(args.out) + at;
    if (low_there) out[0] = fmaf(low, scale, __ldcg(out));
    if (high_there) out[8] = fmaf(high, scale, __ldcg(out + 8));
  }
}

}  // namespace fourfold::gemm::dense_detail
