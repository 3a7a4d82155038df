// The fast CPU backends: the common base with packed weights and the matrix kernels of one instruction set.
#pragma once

#include "cpu/cpu_backend.h"
#include "cpu/gemm/packed.h"
#include "cpu/gemm/products.h"

namespace fourfold::cpu {

class FastBackend : public CpuBackend {
 public:
  // An Error when the processor lacks `isa`; kReference is not one of these backends.
  FastBackend(const CpuOptions& options, Isa isa);

  std::unique_ptr<ops::Matrix> load_matrix(std::span<const ops::MatrixSource> parts) override;
  std::unique_ptr<ops::Experts> load_experts(int64_t count, const std::function<ops::ExpertSource(int64_t)>& source,
                                             const std::function<void(int64_t)>& done) override;
  void linear(const ops::Tensor& x, const ops::Matrix& weight, const ops::Tensor& out) override;
  void moe(const ops::MoeParams& params, const ops::Tensor& x, const ops::Tensor& out) override;
  void mlp(const ops::MlpParams& params, const ops::Tensor& x, const ops::Tensor& out) override;

 private:
  gemm::WeightMemory weights_;
  gemm::Products products_;
};

}  // namespace fourfold::cpu
