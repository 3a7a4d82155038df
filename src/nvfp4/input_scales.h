// The static input scales of an expert layer with NVFP4 activations (W4A4), made usable.
//
// A checkpoint has one input scale for each expert's gate, up and down projection: what calibration saw as the largest
// magnitude, divided by 6 x 448. Experts that calibration never reached have none, or zero. The layer's input is
// quantised once for all experts that a token chose, so gate and up share one scale.
#pragma once

#include <optional>
#include <span>
#include <vector>

namespace fourfold::nvfp4 {

struct LayerInputScales {
  float gate_up = 0;        // the largest usable one of all gates and ups: no expert's calibrated range is clipped
  std::vector<float> down;  // one per expert
  int replaced = 0;         // down scales that were not usable: they take the largest usable one
};

// Finite, positive, and normal: its inverse must be finite too.
bool usable_input_scale(float scale);

// 0 or NaN stands for a missing scale. Nothing when there is no usable scale among `gate_up`, or none among `down`:
// such a layer has no W4A4 plan, its activations stay bf16.
std::optional<LayerInputScales> layer_input_scales(std::span<const float> gate_up, std::span<const float> down);

}  // namespace fourfold::nvfp4
