// Softmax attention of the fast instruction sets, over keys and values that are in the cache.
#pragma once

#include <cstdint>
#include <vector>

#include "base/threads.h"
#include "cpu/attention/kernels.h"
#include "cpu/memory/kv_cache.h"
#include "cpu/memory/workspace.h"
#include "ops/batch.h"
#include "ops/ops.h"

namespace fourfold::cpu {

class Attention {
 public:
  // `partial_floats`: of splits that are computed in parallel.
  Attention(const AttentionKernels& kernels, ThreadPool& pool, int64_t partial_floats)
      : kernels_(kernels), pool_(pool), partial_floats_(partial_floats) {}

  void reserve(const ops::ReserveLimits& limits, const ops::KvCacheShape& shape);

  // q: normalised and rotated, with the gates (AttentionInput). Rows of padding are left alone.
  void run(const ops::Batch& batch, const ops::AttentionParams& params, const ops::Tensor& q, HostKvCache& cache,
           int64_t layer, const ops::Tensor& out);

 private:
  // Query rows of one kv head, and how far they see.
  struct Tile {
    const ops::Sequence* sequence;
    int64_t kv_head;
    int64_t first_token;  // of the sequence's tokens in this step
    int64_t tokens;
    int64_t keys() const { return sequence->position + first_token + tokens; }  // that its last token sees
  };

  const AttentionKernels& kernels_;
  ThreadPool& pool_;
  int64_t partial_floats_;
  std::vector<Tile> tiles_;
  Workspace work_;
  std::vector<std::vector<int64_t>> last_keys_;  // per thread, of the query rows
};

}  // namespace fourfold::cpu
