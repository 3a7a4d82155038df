// A router's logits that come with the product in front of it. A layer's mixer ends in a product y = W x, y goes to the
// residual h, and the router multiplies norm(h) with its rows r:
//
//   logit = inverse_rms(h) x sum over columns of r x weight x h
//
// Of that sum each CTA of the product has its own columns of h as soon as it has its rows of y, and adds what they make
// of it to the logits of all experts, as integers, so that the order does not matter. What is left for the kernel that
// chooses is the norm, which the experts want anyway: a node less a layer. Host and device, freestanding.
#pragma once

#include "kernels/moe/tables.h"
#include "kernels/norm/norm_args.h"

namespace fourfold::gemm {

inline constexpr int kRoutingCopies = 4;      // of the sums, so that CTAs seldom wait for each other
inline constexpr int kRoutingBits = 30;       // of a sum behind the point: it is below 2^33
inline constexpr int kMostRoutedRows = 8;     // of x
inline constexpr int kMostRoutedColumns = 3;  // of a thread
inline constexpr int kRoutingPackThreads = 128;

// Columns are a router's rows (experts, then the shared expert's gate); sums a row of x has.
FOURFOLD_HD constexpr int routing_stride(int columns) { return (columns + 15) / 16 * 16; }
FOURFOLD_HD constexpr int routing_sums(int columns) { return kRoutingCopies * routing_stride(columns); }

// Of the product.
struct Routing {
  const unsigned short* weights;  // the router's, bf16 [row tile][columns][16 columns of h]
  const float* norm_weight;       // [hidden]
  const float* residual;          // h before y
  long long residual_stride;
  unsigned long long* sums;  // [rows of x][kRoutingCopies][routing_stride], 0 before
  int columns;
};

// Of the kernel that norms and chooses, one CTA of norm::kRowThreads a row. It makes the sums 0 again.
struct RoutedArgs {
  moe::ChoiceArgs choice;  // its logits are not read
  norm::NormArgs norm;
  unsigned long long* sums;
  int columns;
  int keep;  // 1: the sums stay, for timing
};

// Of the kernel that makes `weights`: a warp has a row tile of columns of h, a lane every 32nd of the router's rows.
struct RoutingPackArgs {
  const unsigned char* router;  // packed (layout.h), bf16
  int rows;
  int units;
  int first;    // column of its first row
  int columns;  // of all
  int tiles;    // of the product
  unsigned short* out;
};

}  // namespace fourfold::gemm
