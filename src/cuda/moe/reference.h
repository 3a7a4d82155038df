// The expert layer in plain fp32 on the host: what the self-test and the tests compare kernels with. Sums are fp32 in
// an order of their own; beside each value stands the sum of the magnitudes of its terms, from which a bound on the
// rounding of any other order follows.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "cuda/moe/weights.h"

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
Activated activate(plan::moe::Activation activation, float limit, float gate, float gate_error, float up,
                   float up_error);

// How far a kernel's dot product may be off: fp32 accumulation in any order, with the truncation of tensor cores.
inline constexpr float kDotError = 1e-4f;
// And a value that was rounded to bf16, or went through approximate exponentials.
inline constexpr float kRoundError = 1.0f / 128;

// A row of NVFP4 activations: e2m1 codes, one in each byte, and e4m3 scales of 16.
struct Nvfp4Row {
  std::vector<uint8_t> codes, scales;
  // code x scale, without the input scale.
  std::vector<float> values() const;
  bool operator==(const Nvfp4Row&) const = default;
};
// Rounded as kernels round (nvfp4::quantize_activations); NaN counts as 0. Columns: a multiple of 16.
Nvfp4Row quantised(std::vector<float> row, float input_scale);
// From the order in which kernels keep it (kernels/moe/fp4_layout.h).
Nvfp4Row read_nvfp4_row(const uint8_t* codes, const uint8_t* scales, int64_t columns);

// What is wrong with a row that a kernel quantised from values that it knows to within `errors`: each block's scale
// and, under that scale, each code must be what some value of these intervals rounds to. Empty: nothing.
std::string check_quantised(const Nvfp4Row& row, const std::vector<float>& values, const std::vector<float>& errors,
                            float input_scale);

// An expert in fp32, without its tensor scales: gate, up [intermediate, hidden], down [hidden, intermediate]; no gate
// where the activation has none.
struct PlainExpert {
  std::vector<float> gate, up, down;
  float gate_scale = 1, up_scale = 1, down_scale = 1;
};

// The whole layer for some tokens, of experts that `expert` makes when they are wanted (at the same time, in several
// threads), or of those of a checkpoint: [samples.size(), hidden] fp32. x: bf16 [tokens, hidden]; ids, weights:
// [tokens, picks]. h is rounded between the GEMMs as kernels do: to bf16; with input scales (W4A4) x and h are NVFP4.
std::vector<float> reference_layer(const plan::moe::Problem& problem, const std::function<PlainExpert(int)>& expert,
                                   const std::vector<uint16_t>& x, const std::vector<int>& ids,
                                   const std::vector<float>& weights, const std::vector<int64_t>& samples,
                                   float limit = 0,
                                   const std::optional<nvfp4::LayerInputScales>& input_scales = std::nullopt);
std::vector<float> reference_layer(const plan::moe::Problem& problem, const std::vector<ExpertMatrices>& experts,
                                   const std::vector<uint16_t>& x, const std::vector<int>& ids,
                                   const std::vector<float>& weights, const std::vector<int64_t>& samples,
                                   float limit = 0,
                                   const std::optional<nvfp4::LayerInputScales>& input_scales = std::nullopt);

}  // namespace fourfold::cuda
