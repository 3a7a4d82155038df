// The reference: plain C++ on fp32 weights dequantised row by row, written to be read and to be right. Sums that could
// lose accuracy run in double. Every fast path is tested against it.
#pragma once

#include <memory>

#include "cpu/cpu_backend.h"

namespace fourfold::cpu {

class ReferenceBackend : public CpuBackend {
 public:
  explicit ReferenceBackend(const CpuOptions& options);

  std::unique_ptr<ops::Matrix> load_matrix(std::span<const ops::MatrixSource> parts) override;
  std::unique_ptr<ops::Experts> load_experts(int64_t count, const std::function<ops::ExpertSource(int64_t)>& source,
                                             const std::function<void(int64_t)>& done) override;
  void linear(const ops::Tensor& x, const ops::Matrix& weight, const ops::Tensor& out) override;
  void attention(const ops::AttentionParams& params, const ops::Tensor& q, const ops::Tensor& k, const ops::Tensor& v,
                 ops::KvCache& cache, int64_t layer, const ops::Tensor& out) override;
  void delta_net(const ops::DeltaNetParams& params, const ops::Tensor& qkv, const ops::Tensor& z, const ops::Tensor& b,
                 const ops::Tensor& a, ops::StateCache& states, int64_t layer, const ops::Tensor& out) override;
  void moe(const ops::MoeParams& params, const ops::Tensor& x, const ops::Tensor& out) override;
  void mlp(const ops::MlpParams& params, const ops::Tensor& x, const ops::Tensor& out) override;

 protected:
  ReferenceBackend(Isa isa, const CpuOptions& options, ops::DType kv_type) : CpuBackend(isa, options, kv_type) {}

 private:
  // The input of a product with `weight`: `x` itself, or with nvfp4_activations a quantised copy in `storage`.
  const float* input_of(const ops::MatrixSource& weight, const float* x, float* storage) const;
  void gated_mlp(const ops::Matrix& gate_up, const ops::Matrix& down, const ops::Tensor& x, const ops::Tensor& out);
};

// ---- the delta rule on plain arrays, one value head
//
// q, k: [tokens, key_dim], already normalised (and q scaled); v, out: [tokens, value_dim]; log_decay = g <= 0 and beta:
// [tokens]; state: [key_dim, value_dim], updated. All contiguous.
struct DeltaRule {
  int64_t tokens = 0;
  int64_t key_dim = 0;
  int64_t value_dim = 0;
  const float* q = nullptr;
  const float* k = nullptr;
  const float* v = nullptr;
  const float* log_decay = nullptr;
  const float* beta = nullptr;
  float* state = nullptr;
  float* out = nullptr;
};

// Token by token: S <- exp(g) S; S <- S + k (beta (v - S^T k))^T; o = S^T q.
void delta_rule_recurrent(const DeltaRule& rule);

// The same in chunks. With c_i the sum of g up to token i of the chunk and S0 the state before it:
//   A_ij = beta_i (k_i . k_j) exp(c_i - c_j) for j < i
//   (I + A) D = diag(beta) (V - diag(exp(c)) K S0)          (forward substitution)
//   o_i = exp(c_i) S0^T q_i + sum_{j <= i} (q_i . k_j) exp(c_i - c_j) D_j
//   S = exp(c_last) S0 + sum_j exp(c_last - c_j) k_j D_j^T
// Source: Yang et al. 2024, arXiv 2412.06464, section 3.3, with the two triangular systems joined into one.
void delta_rule_chunked(const DeltaRule& rule, int64_t chunk);

}  // namespace fourfold::cpu
