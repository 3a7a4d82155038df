// An operation of a step as a backend launches it: what a price is made of. The CUDA backend notes these where there is
// no card (cuda/backend/backend.h, works_of()), so no list of a step's operations is written twice.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "plan/moe/problem.h"

namespace fourfold::plan::step {

enum class Kind {
  kOther,      // tables, rows picked out, gates, sums of two tensors: a node and its bytes
  kProduct,    // y = x W^T
  kNorm,       // RMS norm, with the sum before it
  kChoice,     // the router's
  kExperts,    // an expert layer by its planner
  kAttention,  // with what brings keys and values to their cache
  kDelta,      // delta rule
  kSample,     // tokens from logits
  kReduce,     // sum over ranks, with residual and norm
  kGather      // columns of ranks side by side
};

// The sizes that prices depend on; 0 where the kind has none.
struct Extent {
  Kind kind = Kind::kOther;
  int64_t rows = 0;       // of the step
  int64_t outputs = 0;    // columns of the result
  int64_t inputs = 0;     // columns of x
  int64_t sequences = 0;  // of attention and delta rule
  int64_t context = 0;    // positions of the longest, with these rows
  int64_t heads = 0;      // query heads; value heads of the delta rule
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  bool whole = false;                     // pieces of more than 16 rows by the kernels for many rows
  bool put_off = false;                   // states of the delta rule, of all rows of a sequence but the first
  bool fp8_cache = false;                 // keys and values
  bool norm_in_front = false;             // of a product, or of the router's choice
  int64_t routed = 0;                     // of a product: columns of a router that it takes along
  bool choice_beside = false;             // of a product: the router's choice, by a CTA of its own
  int64_t sum_of = 0;                     // of a norm, a sum over ranks: rows of experts of each that it adds up first
  int64_t all_experts = 0;                // of all ranks
  const moe::Problem* experts = nullptr;  // of this rank, not null for kExperts; Work has a copy
};

// Programmatic: it may start while the launch before it runs.
struct Launch {
  std::string kernel;
  int64_t ctas = 0, threads = 0;  // threads of a CTA
  int64_t smem_bytes = 0;         // of a CTA
  bool programmatic = false;
};

struct Work {
  std::string name;
  double bytes = 0, flops = 0;  // that it must move and compute (ops/cost.h)
  Extent extent = {};
  std::optional<moe::Problem> experts;  // with the step's tokens
  std::vector<Launch> launches;
};

}  // namespace fourfold::plan::step
