// What an operation must move and compute at least: the floors that benchmarks compare with. Bytes count weights and
// caches once and leave out activations, which stay in cache; flops count a multiply-add as two.
#pragma once

#include <cstdint>

namespace fourfold::ops {

struct Cost {
  double bytes = 0;  // read and written in memory
  double flops = 0;

  Cost& operator+=(const Cost& other) {
    bytes += other.bytes;
    flops += other.flops;
    return *this;
  }
};

// A matrix product of `tokens` rows with a weight of `weight_bytes` and rows x columns elements.
Cost linear_cost(int64_t tokens, int64_t rows, int64_t columns, int64_t weight_bytes);

// Routed experts: `touched` experts are read, each token multiplies with top_k of them.
Cost experts_cost(int64_t tokens, int64_t top_k, double touched, int64_t hidden, int64_t intermediate,
                  int64_t bytes_per_expert);

// The expected number of distinct experts when `tokens` tokens pick top_k of `experts` uniformly and independently:
// E (1 - (1 - k / E)^T).
double expected_touched_experts(int64_t tokens, int64_t top_k, int64_t experts);

// Attention of one sequence: `tokens` new positions after `cached` ones; scores and weighted values; the cache is read
// once.
Cost attention_cost(int64_t tokens, int64_t cached, int64_t heads, int64_t kv_heads, int64_t head_dim,
                    int64_t element_bytes);

// Gated DeltaNet, recurrent form: the state is read and written once per sequence.
Cost delta_net_cost(int64_t tokens, int64_t value_heads, int64_t key_dim, int64_t value_dim);

}  // namespace fourfold::ops
