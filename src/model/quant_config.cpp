#include "model/quant_config.h"

#include <algorithm>

namespace fourfold::model {
namespace {

Json producer() { return {{"name", "fourfold"}, {"version", "0.1"}}; }

Json modelopt_group(const std::string& algorithm, bool activations) {
  Json group;
  if (algorithm == "FP8") {
    group["input_activations"] = {{"dynamic", false}, {"num_bits", 8}, {"type", "float"}};
    group["weights"] = {{"dynamic", false}, {"num_bits", 8}, {"type", "float"}};
  } else {
    if (activations) {
      group["input_activations"] = {{"dynamic", false}, {"num_bits", 4}, {"type", "float"}, {"group_size", 16}};
    }
    group["weights"] = {{"dynamic", false}, {"num_bits", 4}, {"type", "float"}, {"group_size", 16}};
  }
  return group;
}

}  // namespace

Json modelopt_quantization_config(const QuantDescription& description) {
  Json config;
  if (description.layers.empty()) {
    Json group = modelopt_group(description.algorithm, description.quantized_activations);
    group["targets"] = {"Linear"};
    config["config_groups"]["group_0"] = group;
  } else {
    std::vector<std::string> algorithms;
    for (const auto& [module, algorithm] : description.layers) {
      if (std::find(algorithms.begin(), algorithms.end(), algorithm) == algorithms.end())
        algorithms.push_back(algorithm);
    }
    for (size_t i = 0; i < algorithms.size(); ++i) {
      Json group = modelopt_group(algorithms[i], description.quantized_activations);
      Json targets = Json::array();
      for (const auto& [module, algorithm] : description.layers) {
        if (algorithm == algorithms[i]) targets.push_back(module);
      }
      group["targets"] = targets;
      config["config_groups"]["group_" + std::to_string(i)] = group;
    }
  }
  config["ignore"] = description.ignored;
  config["quant_algo"] = description.algorithm;
  if (description.fp8_kv_cache) {
    config["kv_cache_scheme"] = {{"dynamic", false}, {"num_bits", 8}, {"type", "float"}};
  }
  config["producer"] = producer();
  config["quant_method"] = "modelopt";
  return config;
}

Json modelopt_hf_quant_config(const QuantDescription& description) {
  Json quantization;
  quantization["quant_algo"] = description.algorithm;
  quantization["kv_cache_quant_algo"] = description.fp8_kv_cache ? Json("FP8") : Json(nullptr);
  if (description.layers.empty()) {
    if (description.algorithm != "FP8") quantization["group_size"] = 16;
  } else {
    Json layers = Json::object();
    for (const auto& [module, algorithm] : description.layers) {
      Json entry = {{"quant_algo", algorithm}};
      if (algorithm != "FP8") entry["group_size"] = 16;
      layers[module] = entry;
    }
    quantization["quantized_layers"] = layers;
  }
  quantization["exclude_modules"] = description.ignored;
  return {{"producer", producer()}, {"quantization", quantization}};
}

Json compressed_tensors_config(const QuantDescription& description, const std::vector<std::string>& nvfp4_targets,
                               const std::vector<std::string>& fp8_targets) {
  Json groups = Json::object();
  if (!nvfp4_targets.empty()) {
    Json group;
    group["format"] = "nvfp4-pack-quantized";
    group["targets"] = nvfp4_targets;
    group["weights"] = {{"num_bits", 4},    {"type", "float"},   {"strategy", "tensor_group"},
                        {"group_size", 16}, {"symmetric", true}, {"dynamic", false}};
    group["input_activations"] = nullptr;
    if (description.quantized_activations) {
      group["input_activations"] = {{"num_bits", 4},    {"type", "float"},   {"strategy", "tensor_group"},
                                    {"group_size", 16}, {"symmetric", true}, {"dynamic", "local"}};
    }
    groups["group_" + std::to_string(groups.size())] = group;
  }
  if (!fp8_targets.empty()) {
    Json group;
    group["format"] = "float-quantized";
    group["targets"] = fp8_targets;
    group["weights"] = {
        {"num_bits", 8}, {"type", "float"}, {"strategy", "channel"}, {"symmetric", true}, {"dynamic", false}};
    group["input_activations"] = {
        {"num_bits", 8}, {"type", "float"}, {"strategy", "token"}, {"symmetric", true}, {"dynamic", true}};
    groups["group_" + std::to_string(groups.size())] = group;
  }
  Json config;
  config["config_groups"] = groups;
  config["format"] = fp8_targets.empty()     ? "nvfp4-pack-quantized"
                     : nvfp4_targets.empty() ? "float-quantized"
                                             : "mixed-precision";
  config["ignore"] = description.ignored;
  config["kv_cache_scheme"] = nullptr;
  config["quant_method"] = "compressed-tensors";
  config["quantization_status"] = "compressed";
  return config;
}

Json fp8_block_config(const QuantDescription& description) {
  return {{"quant_method", "fp8"},
          {"activation_scheme", "dynamic"},
          {"fmt", "e4m3"},
          {"weight_block_size", {128, 128}},
          {"modules_to_not_convert", description.ignored}};
}

}  // namespace fourfold::model
