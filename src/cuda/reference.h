// The expert layer in plain fp32 on the host: what the self-test and the tests compare kernels with. Sums are fp32 in
// an order of their own; beside each value stands the sum of the magnitudes of its terms, from which a bound on the
// rounding of any other order follows.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda/expert_weights.h"

namespace fourfold::cuda {

// A matrix of a checkpoint in host memory, as fp32 [rows, k] without its tensor scale.
std::vector<float> dequantised(const Nvfp4Matrix& matrix, int64_t rows, int64_t k);

struct Dot {
  float value = 0;
  float magnitude = 0;  // sum of |term|
};
Dot dot(const float* a, const float* b, int64_t count);

// The activation between the two GEMMs; `error` is how far off it may be when gate and up are off by theirs.
struct Activated {
  float value = 0;
  float error = 0;
};
Activated activate(plan::Activation activation, float limit, float gate, float gate_error, float up, float up_error);

// How far a kernel's dot product may be off: fp32 accumulation in any order, with the truncation of tensor cores.
inline constexpr float kDotError = 1e-4f;
// And a value that was rounded to bf16, or went through approximate exponentials.
inline constexpr float kRoundError = 1.0f / 128;

// The whole layer for some tokens: [samples.size(), hidden] fp32. x: bf16 [tokens, hidden]; ids, weights: [tokens,
// picks]. h is rounded to bf16 between the GEMMs, as kernels do.
std::vector<float> reference_layer(const plan::MoeProblem& problem, const std::vector<ExpertMatrices>& experts,
                                   const std::vector<uint16_t>& x, const std::vector<int>& ids,
                                   const std::vector<float>& weights, const std::vector<int64_t>& samples,
                                   float limit = 0);

}  // namespace fourfold::cuda
