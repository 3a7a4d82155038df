// The delta rule on plain arrays, one value head: token by token and in chunks.
#pragma once

#include <cstdint>

namespace fourfold::cpu {

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
