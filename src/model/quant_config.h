// The quantisation sections that quantised checkpoints carry in config.json and hf_quant_config.json, as the exporters
// of the two formats write them. Other engines choose their kernels by them; our loader does not need them.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "base/json_forward.h"

namespace fourfold::model {

struct QuantDescription {
  std::string algorithm;               // modelopt: NVFP4, W4A16_NVFP4, FP8, MIXED_PRECISION
  bool quantized_activations = false;  // an activation scale is stored (W4A4)
  bool fp8_kv_cache = false;
  std::vector<std::string> ignored;  // stored names of the modules that stay as they are; may hold patterns
  std::vector<std::pair<std::string, std::string>> layers;  // MIXED_PRECISION: module, algorithm
};

// config.json's quantization_config, and the whole of hf_quant_config.json.
Json modelopt_quantization_config(const QuantDescription& description);
Json modelopt_hf_quant_config(const QuantDescription& description);

// config.json's quantization_config. `fp8_targets`: patterns of the modules that are FP8 per channel; with any, the
// format is "mixed-precision".
Json compressed_tensors_config(const QuantDescription& description, const std::vector<std::string>& nvfp4_targets,
                               const std::vector<std::string>& fp8_targets);

// quant_method "fp8" with blocks of 128 x 128.
Json fp8_block_config(const QuantDescription& description);

}  // namespace fourfold::model
