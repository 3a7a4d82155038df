// One tile of one GEMM, as the bench launches it.
#pragma once

#include <vector>

#include "kernels/moe/stream_tile.h"
#include "kernels/moe/tables.h"
#include "kernels/ptx/tensor_map.h"

struct Candidate {
  const char* name;
  bool one;    // one token
  bool many;   // suited to more than 512 tokens
  bool wide;   // gate-up raises flags for down
  bool relu2;  // gate-up: without a gate
  int tokens;  // tokens per block
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
    if (one) return m == 1 && top_k <= fourfold::moe::kOnePicks;
    return true;
  }
};

// moe_prefill.cu: {gate-up, down}.
std::vector<Candidate> prefill_candidates(bool gate_up);
