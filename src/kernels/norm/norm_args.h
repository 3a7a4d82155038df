// Arguments of the kernels between products: norms, embeddings, rows picked out. Host and device, freestanding.
#pragma once

#include "kernels/gemm/layout.h"

namespace fourfold::norm {

inline constexpr int kRowThreads = 256;
inline constexpr int kPieceColumns = 8;
inline constexpr int kMostPieces = 4;  // of a thread
inline constexpr int kMostColumns = kRowThreads * kPieceColumns * kMostPieces;

// Template argument of norm_rows for rows of `columns`; 0: too many.
FOURFOLD_HD constexpr int norm_pieces(int columns) {
  const int pieces = (columns + kRowThreads * kPieceColumns - 1) / (kRowThreads * kPieceColumns);
  return pieces <= 2 ? pieces : pieces <= kMostPieces ? kMostPieces : 0;
}

// The shared expert's output, which goes to the residual with the gate's sigmoid as weight. Stride as of a delta.
struct Share {
  const unsigned short* x;  // bf16; null: there is none
  long long stride;
  const float* logits;  // of the gate, one a row; null: the weight is 1
  long long logits_stride;
};

// residual += share; residual += delta; out = bf16(residual / rms(residual) x weight). One CTA of kRowThreads a row.
// Columns: a multiple of 8; strides in elements, of whole 16-byte pieces.
struct NormArgs {
  const float* residual;
  long long residual_stride;
  const unsigned short* delta;  // bf16; null: none
  long long delta_stride;
  const float* weight;
  float eps;
  int columns;
  float* residual_out;  // may be `residual`; null: nobody wants it. Its stride is the same
  unsigned short* out;
  long long out_stride;
  Share share;
};

// Rows of a table in checkpoint form, by token: out = fp32 rows. One CTA of kEmbedThreads a row. An id outside the
// table gives NaN.
inline constexpr int kEmbedThreads = 128;
struct EmbedArgs {
  gemm::Source table;        // on the device
  float tensor_scale;        // nvfp4
  const float* grid_scales;  // fp8: [ceil(rows / scale_rows)][ceil(columns / scale_columns)]
  int scale_rows;
  int scale_columns;
  const int* tokens;
  float* out;
  long long out_stride;
};

// out[i] = x[rows[i]], rows of whole 16-byte pieces. Grid: one CTA of kEmbedThreads a row.
struct GatherArgs {
  const void* x;
  long long x_stride;  // bytes
  const int* rows;
  void* out;
  long long out_stride;  // bytes
  int pieces;            // of 16 bytes
};

}  // namespace fourfold::norm
