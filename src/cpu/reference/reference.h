// The reference: plain C++ on fp32 weights dequantised row by row, written to be read and to be right. Sums that could
// lose accuracy run in double. Every fast path is tested against it.
#pragma once

#include <memory>

#include "cpu/host/cpu_backend.h"

namespace fourfold::cpu {

class ReferenceBackend : public CpuBackend {
 public:
  explicit ReferenceBackend(const CpuOptions& options);

  std::unique_ptr<ops::Matrix> load_matrix(std::span<const ops::MatrixSource> parts) override;
  std::unique_ptr<ops::Matrix> first_rows(const ops::Matrix& matrix, int64_t rows) override;
  std::unique_ptr<ops::Experts> load_experts(int64_t count, const std::function<ops::ExpertSource(int64_t)>& source,
                                             const std::function<void(int64_t)>& done) override;
  void linear(const ops::Tensor& x, const ops::Matrix& weight, const ops::Tensor& out) override;
  void attention(const ops::AttentionParams& params, const ops::Tensor& q, const ops::Tensor& k, const ops::Tensor& v,
                 ops::KvCache& cache, int64_t layer, const ops::Tensor& out) override;
  void delta_net(const ops::DeltaNetParams& params, const ops::Tensor& qkv, const ops::Tensor& z, const ops::Tensor& b,
                 const ops::Tensor& a, ops::StateCache& states, int64_t layer, const ops::Tensor& out) override;
  void moe(const ops::MoeParams& params, const ops::Tensor& x, const ops::Tensor& out) override;
  void mlp(const ops::MlpParams& params, const ops::Tensor& x, const ops::Tensor& out) override;

 private:
  // The input of a product with `weight`: `x` itself, or with nvfp4_activations a quantised copy in `storage`.
  const float* input_of(const ops::MatrixSource& weight, const float* x, float* storage) const;
  void gated_mlp(const ops::Matrix& gate_up, const ops::Matrix& down, const ops::Tensor& x, const ops::Tensor& out);
};

}  // namespace fourfold::cpu
