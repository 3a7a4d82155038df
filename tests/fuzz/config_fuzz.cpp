// config.json, hf_quant_config.json and generation_config.json: any text is a configuration within its limits or one
// Error, and an accepted configuration is read back as it was after it is written.
#include <cstdlib>

#include "base/check.h"
#include "base/json.h"
#include "model/config.h"
#include "model/inventory.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace fourfold;
  Json json;
  try {
    JsonLimits limits;
    limits.max_bytes = 1 << 20;
    json = parse_json({reinterpret_cast<const char*>(data), size}, "fuzz", limits);
  } catch (const Error&) {
    return 0;
  }
  try {
    const model::ModelConfig config = model::parse_config(json, "fuzz");
    if (config.hidden > model::kMaxDimension || config.layers * config.experts > model::kMaxLayerExperts ||
        config.conv_channels() <= 0 || config.rotary_dim > config.head_dim ||
        static_cast<int64_t>(config.layer_kinds.size()) != config.layers) {
      std::abort();
    }
    const model::ModelConfig again = model::parse_config(model::write_config(config, nullptr), "again");
    if (again.hidden != config.hidden || again.layer_kinds != config.layer_kinds || again.experts != config.experts ||
        again.rotary_dim != config.rotary_dim || again.eos_tokens != config.eos_tokens) {
      std::abort();
    }
    if (config.layers * (config.experts + 1) < 4096) {
      for (const model::WeightSpec& spec : model::weight_specs(config)) {
        if (spec.elements() <= 0) std::abort();
      }
    }
  } catch (const Error&) {
  }
  try {
    model::parse_quantization(json, &json, "fuzz");
  } catch (const Error&) {
  }
  try {
    model::parse_generation_config(json, "fuzz");
  } catch (const Error&) {
  }
  return 0;
}
