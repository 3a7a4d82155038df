// Gated DeltaNet of the fast instruction sets.
#pragma once

#include <cstdint>
#include <memory>

#include "base/threads.h"
#include "cpu/delta/kernels.h"
#include "cpu/memory/state_cache.h"
#include "cpu/memory/workspace.h"
#include "ops/batch.h"
#include "ops/ops.h"

namespace fourfold::cpu {

class DeltaNet {
 public:
  DeltaNet(const DeltaKernels& kernels, ThreadPool& pool) : kernels_(kernels), pool_(pool) {}

  // Slots that may hold updates.
  std::unique_ptr<HostStateCache> make_states(const ops::StateCacheShape& shape);
  void reserve(int64_t rows, const ops::StateCacheShape& shape);
  // As ops::Backend::delta_net(). Rows of padding are left alone.
  void run(const ops::Batch& batch, const ops::DeltaNetParams& params, const ops::Tensor& qkv, const ops::Tensor& z,
           const ops::Tensor& b, const ops::Tensor& a, HostStateCache& states, int64_t layer, const ops::Tensor& out);

 private:
  const DeltaKernels& kernels_;
  ThreadPool& pool_;
  Workspace work_;
};

}  // namespace fourfold::cpu
