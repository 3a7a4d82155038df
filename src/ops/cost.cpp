#include "ops/cost.h"

#include <cmath>

namespace fourfold::ops {

Cost linear_cost(int64_t tokens, int64_t rows, int64_t columns, int64_t weight_bytes) {
  return {static_cast<double>(weight_bytes),
          2.0 * static_cast<double>(tokens) * static_cast<double>(rows) * static_cast<double>(columns)};
}

Cost experts_cost(int64_t tokens, int64_t top_k, double touched, int64_t hidden, int64_t intermediate,
                  int64_t bytes_per_expert) {
  return {touched * static_cast<double>(bytes_per_expert),
          6.0 * static_cast<double>(tokens * top_k) * static_cast<double>(hidden) * static_cast<double>(intermediate)};
}

double expected_touched_experts(int64_t tokens, int64_t top_k, int64_t experts) {
  const auto e = static_cast<double>(experts);
  return e * (1.0 - std::pow(1.0 - static_cast<double>(top_k) / e, static_cast<double>(tokens)));
}

Cost attention_cost(int64_t tokens, int64_t cached, int64_t heads, int64_t kv_heads, int64_t head_dim,
                    int64_t element_bytes) {
  const double pairs = static_cast<double>(tokens) * static_cast<double>(cached) +
                       0.5 * static_cast<double>(tokens) * static_cast<double>(tokens + 1);
  const double positions = static_cast<double>(cached + 2 * tokens);  // old ones read, new ones written and read
  return {2.0 * positions * static_cast<double>(kv_heads * head_dim * element_bytes),
          4.0 * pairs * static_cast<double>(heads * head_dim)};
}

Cost delta_net_cost(int64_t tokens, int64_t value_heads, int64_t key_dim, int64_t value_dim) {
  const auto state = static_cast<double>(value_heads * key_dim * value_dim);
  // Per token: decay (1), S^T k (2), rank-one update (2), S^T q (2).
  return {2.0 * 4.0 * state, 7.0 * static_cast<double>(tokens) * state};
}

}  // namespace fourfold::ops
