// One tile of one GEMM, as the bench launches it.
#pragma once

#include <vector>

#include "kernels/moe/stream_tile.h"
#include "kernels/moe/tables.h"

struct Candidate {
  const char* name;
  bool few;
  bool many;       // suited to more than 512 tokens
  bool relu2;      // gate-up: without a gate
  int tokens;      // tokens per block
  int max_tokens;  // few: room for this many
  int row_tiles;
  int ctas;
  int threads;
  unsigned smem;
  void (*kernel)(const fourfold::moe::GemmArgs);

  bool fits(int k, int m, int top_k) const {
    if (k % 64 != 0) return false;
    if (few) return m <= max_tokens && m * top_k <= fourfold::moe::kFewPicks;
    return true;
  }
};

// moe_prefill.cu: {gate-up, down}.
std::vector<Candidate> prefill_candidates(bool gate_up);
