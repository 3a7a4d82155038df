// What all CPU backends share: memory, tables, caches, norms and row copies. The reference and the fast backends add
// their form of the weight matrices, the operations that multiply with them, attention and Gated DeltaNet.
//
// Activations are fp32 on every CPU backend. Operations run on one thread pool; work too small to be worth a parallel
// region runs on the calling thread. Results do not depend on the number of threads.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/threads.h"
#include "cpu/host/attention_input.h"
#include "cpu/host/options.h"
#include "cpu/host/row_kernels.h"
#include "cpu/memory/host_buffer.h"
#include "cpu/memory/kv_cache.h"
#include "cpu/memory/state_cache.h"
#include "ops/ops.h"

namespace fourfold::cpu {

class CpuBackend : public ops::Backend {
 public:
  ~CpuBackend() override;

  std::string description() const override;
  ops::DType activation_type() const override { return ops::DType::kF32; }

  std::unique_ptr<ops::Buffer> allocate(int64_t bytes) override;
  ops::Vector load_vector(std::span<const float> values) override;
  // Kept in the form it has in the checkpoint (memory = checkpoint bytes).
  std::unique_ptr<ops::Matrix> load_table(const ops::MatrixSource& source) override;
  std::unique_ptr<ops::KvCache> make_kv_cache(const ops::KvCacheShape& shape) override;
  std::unique_ptr<ops::StateCache> make_state_cache(const ops::StateCacheShape& shape) override;

  int64_t kv_element_bytes() const override { return kv_type_ == ops::DType::kF32 ? 4 : 2; }
  void reserve(const ops::ReserveLimits& limits) override;

  void begin_step(const ops::Batch& batch) override;
  void embed(const ops::Matrix& table, const ops::Tensor& out) override;
  void rms_norm(const ops::Tensor& x, const ops::Vector& weight, float eps, const ops::Tensor& out) override;
  void add_rms_norm(const ops::Tensor& residual, const ops::Tensor& delta, const ops::Vector& weight, float eps,
                    const ops::Tensor& out) override;
  void add(const ops::Tensor& residual, const ops::Tensor& delta) override;
  void append_keys(const ops::AttentionParams& params, const ops::Tensor& k, const ops::Tensor& v, ops::KvCache& cache,
                   int64_t layer) override;
  void gather_rows(const ops::Tensor& x, std::span<const int32_t> rows, const ops::Tensor& out) override;
  void reduce_add_rms_norm(const ops::Tensor& residual, const ops::Tensor& delta, const ops::Vector& weight, float eps,
                           const ops::Tensor& out, ops::Residual left) override;
  void gather_columns(const ops::Tensor& part, const ops::Tensor& out) override;
  void read(const ops::Tensor& x, std::span<float> out) override;
  std::unique_ptr<ops::Stepper> make_stepper(const ops::StepLimits& limits, ops::KvCache* kv, ops::StateCache* states,
                                             ops::StepBody body) override;

  Isa isa() const { return isa_; }
  const CpuOptions& options() const { return options_; }

 protected:
  // An Error when the processor lacks `isa`. `kv_type` is the element type of the key/value cache, what rows.keep
  // writes.
  CpuBackend(Isa isa, const CpuOptions& options, const RowKernels& rows, ops::DType kv_type);

  // Slots without updates.
  virtual std::unique_ptr<HostStateCache> make_states(const ops::StateCacheShape& shape);

  ThreadPool& pool() { return pool_; }
  const ops::Batch& batch() const { return batch_; }
  AttentionInput& attention_input() { return attention_input_; }
  // Of the caches that were made; 0: none yet.
  const ops::KvCacheShape& kv_shape() const { return kv_shape_; }
  const ops::StateCacheShape& state_shape() const { return state_shape_; }
  // Logits that are computed next are of these rows, not of those that the batch says.
  virtual void begin_logits(std::span<const ops::LogitRows>) {}
  // HostStateCache::begin_step, once a step.
  void begin_states(HostStateCache& states, int64_t put_off_rows);
  // The rows behind those of sequences.
  void clear_padding(const ops::Tensor& out) const;

 private:
  Isa isa_;
  CpuOptions options_;
  const RowKernels& rows_;
  ops::DType kv_type_;
  ThreadPool pool_;
  AttentionInput attention_input_;
  ops::KvCacheShape kv_shape_;
  ops::StateCacheShape state_shape_;
  ops::Batch batch_;
  ops::Tensor last_sum_;  // over ranks, the residual
  bool states_begun_ = false;
};

}  // namespace fourfold::cpu
