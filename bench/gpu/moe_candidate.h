// One tile of one GEMM, as the bench launches it.
#pragma once

#include <vector>

#include "kernels/moe/stream_tile.h"
#include "kernels/moe/tables.h"
#include "kernels/ptx/tensor_map.h"

struct Candidate {
  const char* name;
  bool one;       // one token, or few: nothing is sorted
  bool many;      // suited to more than 512 tokens
  bool wide;      // raises flags for the next kernel
  bool relu2;     // gate-up: without a gate
  int tokens;     // tokens per block; unsorted: at most
  int row_units;  // few tokens, gate-up: K at most
  int row_tiles;
  int ctas;
  int threads;
  unsigned smem;
  void (*kernel)(const fourfold::moe::GemmArgs);
  void (*gathers)(const fourfold::ptx::TensorMap, const fourfold::moe::GemmArgs) = nullptr;  // wgmma gate-up, instead

  const void* entry() const {
    return kernel != nullptr ? reinterpret_cast<const void*>(kernel) : reinterpret_cast<const void*>(gathers);
  }
  bool fits(int k, int m, int top_k) const {
    if (k % 64 != 0) return false;
    if (row_units != 0 && k > row_units * 64) return false;
    if (one) return (tokens == 1 ? m == 1 : m > 1 && m <= tokens) && top_k <= fourfold::moe::kOnePicks;
    return true;
  }
};

// moe_prefill.cu: {gate-up, down}.
std::vector<Candidate> prefill_candidates(bool gate_up);
