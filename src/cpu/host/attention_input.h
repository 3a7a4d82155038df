// What comes before the scores of attention, the same for every CPU backend.
#pragma once

#include <cstdint>
#include <vector>

#include "base/threads.h"
#include "cpu/host/row_kernels.h"
#include "cpu/memory/kv_cache.h"
#include "cpu/memory/workspace.h"
#include "ops/batch.h"
#include "ops/ops.h"

namespace fourfold::cpu {

class AttentionInput {
 public:
  AttentionInput(const RowKernels& rows, ThreadPool& pool) : rows_(rows), pool_(pool) {}

  // For heads of up to so many dimensions.
  void reserve(int64_t rows, int64_t head_dim);
  void begin_step() { rope_valid_ = false; }
  // Norm (optional), RoPE and append of the step's queries and keys. Queries and keys change in place; keys and values
  // go to the cache. Rows of padding are left alone. q may have no data: only keys and values are kept then.
  void prepare(const ops::Batch& batch, const ops::AttentionParams& params, const ops::Tensor& q, const ops::Tensor& k,
               const ops::Tensor& v, HostKvCache& cache, int64_t layer);

 private:
  void compute_rope(const ops::Batch& batch, const ops::AttentionParams& params);

  const RowKernels& rows_;
  ThreadPool& pool_;
  // RoPE factors of the current step: [rows][rotary_dim / 2] cosines, then sines of each row.
  Workspace rope_memory_;
  const float* rope_ = nullptr;
  bool rope_valid_ = false;
  float rope_theta_ = 0.0f;
  int64_t rope_dim_ = 0;
  std::vector<float> rope_frequencies_;  // of theta and dim
  // Rows of small steps, by position: what verifies drafts, feeds the drafter and drafts has positions in common.
  static constexpr int64_t kRopeRows = 32;
  std::vector<float> rope_rows_;
  int64_t rope_positions_[kRopeRows];  // whose row it is; as soon as theta and dim are known
};

}  // namespace fourfold::cpu
