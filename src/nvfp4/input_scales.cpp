#include "nvfp4/input_scales.h"

#include <algorithm>
#include <limits>

#include "nvfp4/number.h"

namespace fourfold::nvfp4 {
namespace {

float largest_usable(std::span<const float> scales) {
  float largest = 0.0f;
  for (const float scale : scales) {
    if (usable_input_scale(scale)) largest = std::max(largest, scale);
  }
  return largest;
}

}  // namespace

bool usable_input_scale(float scale) {
  // 2^126 and more have denormal inverses.
  return is_finite(scale) && scale >= std::numeric_limits<float>::min() && scale < 8.5e37f;
}

std::optional<LayerInputScales> layer_input_scales(std::span<const float> gate_up, std::span<const float> down) {
  LayerInputScales result;
  result.gate_up = largest_usable(gate_up);
  const float other = largest_usable(down);
  if (result.gate_up == 0.0f || other == 0.0f) return std::nullopt;
  for (const float scale : down) {
    const bool usable = usable_input_scale(scale);
    result.down.push_back(usable ? scale : other);
    result.replaced += usable ? 0 : 1;
  }
  return result;
}

}  // namespace fourfold::nvfp4
