// What happens to an expert layer's data before its GEMMs: weights from the checkpoint's form to the stored form, once
// at load; hidden states whose width is no multiple of 64 to padded rows; the shared expert's choices beside the routed
// ones.
#pragma once

#include "kernels/moe/tables.h"

namespace fourfold::moe {

// Any grid of 128 threads; one thread repacks one unit at a time.
__global__ void __launch_bounds__(128) moe_repack(const __grid_constant__ RepackArgs args) {
  const unsigned long long all = static_cast<unsigned long long>(args.experts) * args.row_tiles * args.units;
  const unsigned long long step = static_cast<unsigned long long>(gridDim.x) * 128u;
  for (unsigned long long i = blockIdx.x * 128ull + threadIdx.x; i < all; i += step) {
    const int unit = static_cast<int>(i % args.units);
    const int tile = static_cast<int>(i / args.units % args.row_tiles);
    const int expert = static_cast<int>(i / args.units / args.row_tiles);
    SourceMatrix first = args.first, second = args.second;
    first.codes += expert * args.code_expert_stride;
    first.scales += expert * args.scale_expert_stride;
    second.codes += expert * args.code_expert_stride;
    second.scales += expert * args.scale_expert_stride;
    const int row = tile * (args.paired ? 8 : 16);
    const int blocks = (args.k - unit * kUnitK) / kBlockK;
    if (!repack_unit(first, row, second, args.paired ? row : row + 8, unit, args.out + i * kUnitBytes, blocks)) {
      atomicMax(args.bad, args.first_expert + expert);
    }
  }
}

// bf16 rows of `columns` elements to rows of `padded` elements, filled up with zeros. Both in 16-byte pieces (8
// elements). Grid: (any, rows), 128 threads.
__global__ void __launch_bounds__(128)
    moe_pad_rows(const uint4* __restrict__ from, uint4* __restrict__ to, int columns, int padded) {
  const long long row = blockIdx.y;
  for (int i = static_cast<int>(blockIdx.x * 128u + threadIdx.x); i < padded / 8;
       i += static_cast<int>(gridDim.x) * 128) {
    to[row * (padded / 8) + i] = i < columns / 8 ? from[row * (columns / 8) + i] : make_uint4(0u, 0u, 0u, 0u);
  }
}

// Appends `slices` choices to every token's: experts first_slice .. first_slice + slices - 1, each with the token's
// gate as weight. One thread per token and choice; 128 threads.
__global__ void __launch_bounds__(128)
    moe_append_shared(const int* __restrict__ ids, const float* __restrict__ weights, const float* __restrict__ gates,
                      int tokens, int top_k, int first_slice, int slices, int* __restrict__ all_ids,
                      float* __restrict__ all_weights) {
  const int width = top_k + slices;
  const long long i = blockIdx.x * 128ll + threadIdx.x;
  if (i >= static_cast<long long>(tokens) * width) return;
  const long long token = i / width;
  const int choice = static_cast<int>(i % width);
  all_ids[i] = choice < top_k ? ids[token * top_k + choice] : first_slice + choice - top_k;
  all_weights[i] = choice < top_k ? weights[token * top_k + choice] : gates[token];
}

}  // namespace fourfold::moe
