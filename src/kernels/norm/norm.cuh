// What stands between products: RMS norm with the sum before it, embeddings, rows picked out.
#pragma once

#include "kernels/norm/norm_row.cuh"

namespace fourfold::norm {

template <int Pieces>
__global__ void __launch_bounds__(kRowThreads) norm_rows(const __grid_constant__ NormArgs args) {
  __shared__ float sums[kRowThreads / 32];
  grid_launch_dependents();
  const int thread = static_cast<int>(threadIdx.x);
  const long long t = blockIdx.x;
  Piece weights[Pieces];
  const auto each = [&](const auto& body) { each_piece<Pieces>(thread, args.columns, body); };
  each([&](int i, int column) { weights[i] = load_floats(args.weight + column); });
  grid_dependency_wait();
  Piece x[Pieces];
  Addends<Pieces> more;
  more.load_logit(args.share, t);
  each([&](int i, int column) {
    x[i] = load_floats(args.residual + t * args.residual_stride + column);
    more.load(args.share, args.delta, args.delta_stride, t, i, column);
  });
  const float weight = more.weight(args.share);
  float squares = 0.0f;
  each([&](int i, int column) {
    more.add(args.share, args.delta, x[i], i, weight);
    squares = keep_piece(args, t, column, x[i], squares);
  });
  share_squares(squares, sums, thread);
  const float inverse = inverse_rms(sums, args.columns, args.eps);
  each([&](int i, int column) { store_normed(args, t, column, x[i], inverse, weights[i]); });
}

__global__ void __launch_bounds__(kEmbedThreads) embed_rows(const __grid_constant__ EmbedArgs args) {
  using gemm::Stored;
  grid_launch_dependents();
  grid_dependency_wait();
  const gemm::Source& table = args.table;
  const long long token = __ldcg(args.tokens + blockIdx.x);
  float* out = args.out + blockIdx.x * args.out_stride;
  const bool there = token >= 0 && token < table.rows;
  const int columns = table.columns;
  const int cells = table.stored == Stored::kFp8 ? (columns + args.scale_columns - 1) / args.scale_columns : 0;
  for (int i = static_cast<int>(threadIdx.x); i < columns; i += kEmbedThreads) {
    const long long at = token * columns + i;
    float value = __uint_as_float(0x7fffffffu);
    if (there) {
      switch (table.stored) {
        case Stored::kF32:
          value = static_cast<const float*>(table.data)[at];
          break;
        case Stored::kBf16:
          value = nvfp4::bf16_to_float(static_cast<const u16*>(table.data)[at]);
          break;
        case Stored::kF16:
          value = nvfp4::f16_to_float(static_cast<const u16*>(table.data)[at]);
          break;
        case Stored::kFp8:
          value = nvfp4::e4m3_to_float(static_cast<const u8*>(table.data)[at]) *
                  args.grid_scales[token / args.scale_rows * cells + i / args.scale_columns];
          break;
        case Stored::kNvfp4: {
          const u8 pair = static_cast<const u8*>(table.data)[at / 2];
          const u8 code = static_cast<u8>(at % 2 != 0 ? pair >> 4 : pair & 15);
          value = nvfp4::nvfp4_product(code, table.block_scales[at / 16]) * args.tensor_scale;
          break;
        }
      }
    }
    out[i] = value;
  }
}

__global__ void __launch_bounds__(kEmbedThreads) gather_rows(const __grid_constant__ GatherArgs args) {
  grid_launch_dependents();
  grid_dependency_wait();
  const long long from = __ldcg(args.rows + blockIdx.x);
  const uint4* x = reinterpret_cast<const uint4*>(static_cast<const u8*>(args.x) + from * args.x_stride);
  uint4* out = reinterpret_cast<uint4*>(static_cast<u8*>(args.out) + blockIdx.x * args.out_stride);
  for (int i = static_cast<int>(threadIdx.x); i < args.pieces; i += kEmbedThreads) out[i] = __ldcg(x + i);
}

}  // namespace fourfold::norm
