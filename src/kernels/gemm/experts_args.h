// Experts whose weights are stored as dense products have them (FP8, bf16; layout.h): arguments and launch of
// experts.cuh. Host and device, freestanding.
#pragma once

#include "kernels/gemm/dense_tile.h"
#include "kernels/moe/tables.h"

namespace fourfold::gemm {

// One of the two products of a layer's experts. The matrices of all experts are alike, one format each, and lie
// `expert_bytes` apart. Blocks of tokens come from the expert layers' routing (kernels/moe/route_sm90.cuh).
struct ExpertsArgs {
  Part part;  // of expert 0
  unsigned long long expert_bytes;
  int tiles;                // row tiles
  int units;                // of 64 columns
  int columns;              // a multiple of 16
  const unsigned short* x;  // bf16; gate-up: rows of tokens, down: of slots
  long long x_stride;       // elements, a multiple of 8
  void* out;                // rows of slots; gate-up: bf16, silu(gate) x up; down: fp32, places as moe::partial_place
  long long out_stride;     // elements
  moe::RouteTable route;
  int zero;  // 0
};

// Grid: groups of row tiles x CTAs that share the blocks.
FOURFOLD_HD constexpr int experts_groups(int tiles) { return (tiles + kDenseTiles - 1) / kDenseTiles; }

}  // namespace fourfold::gemm
