// The fast CPU backends: packed weights and the kernels of one instruction set.
#pragma once

#include "cpu/attention/attention.h"
#include "cpu/delta/delta_net.h"
#include "cpu/gemm/packed.h"
#include "cpu/gemm/products.h"
#include "cpu/host/cpu_backend.h"
#include "cpu/kernels/kernels.h"

namespace fourfold::cpu {

class FastBackend : public CpuBackend {
 public:
  // An Error when the processor lacks `isa`; kReference is not one of these backends.
  FastBackend(const CpuOptions& options, Isa isa);

  std::unique_ptr<ops::Matrix> load_matrix(std::span<const ops::MatrixSource> parts) override;
  std::unique_ptr<ops::Matrix> first_rows(const ops::Matrix& matrix, int64_t rows) override;
  std::unique_ptr<ops::Experts> load_experts(int64_t count, const std::function<ops::ExpertSource(int64_t)>& source,
                                             const std::function<void(int64_t)>& done) override;
  void reserve(const ops::ReserveLimits& limits) override;
  void begin_step(const ops::Batch& batch) override;
  void begin_logits(std::span<const ops::LogitRows> sequences) override;
  void linear(const ops::Tensor& x, const ops::Matrix& weight, const ops::Tensor& out) override;
  void attention(const ops::AttentionParams& params, const ops::Tensor& q, const ops::Tensor& k, const ops::Tensor& v,
                 ops::KvCache& cache, int64_t layer, const ops::Tensor& out) override;
  void delta_net(const ops::DeltaNetParams& params, const ops::Tensor& qkv, const ops::Tensor& z, const ops::Tensor& b,
                 const ops::Tensor& a, ops::StateCache& states, int64_t layer, const ops::Tensor& out) override;
  void moe(const ops::MoeParams& params, const ops::Tensor& x, const ops::Tensor& out) override;
  void mlp(const ops::MlpParams& params, const ops::Tensor& x, const ops::Tensor& out) override;

 private:
  FastBackend(const CpuOptions& options, Isa isa, const Kernels& kernels);
  std::unique_ptr<HostStateCache> make_states(const ops::StateCacheShape& shape) override;

  Occupancy work_;  // of what the operations share: one at a time
  gemm::WeightMemory weights_;
  gemm::Products products_;
  Attention attention_;
  DeltaNet delta_net_;
};

}  // namespace fourfold::cpu
