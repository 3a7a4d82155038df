// Helpers of the checkpoint tests: temporary directories, and checkpoints that can be taken apart, changed and written
// again.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/file.h"
#include "base/temporary_directory.h"
#include "model/checkpoint.h"
#include "model/generator.h"
#include "model/random_weights.h"
#include "model/safetensors.h"

namespace fourfold::model {

inline ModelConfig small_checkpoint_config(bool dense = false) {
  ModelConfig config;
  config.model_type = dense ? "qwen3_5_text" : "qwen3_5_moe_text";
  config.hidden = 160;  // ragged 128 x 128 blocks
  config.vocabulary = 64;
  config.max_positions = 128;
  config.heads = 4;
  config.kv_heads = 2;
  config.head_dim = 32;
  config.rotary_dim = 8;
  config.rope_theta = 1e7;
  config.linear_key_heads = 2;
  config.linear_value_heads = 4;
  config.linear_key_dim = config.linear_value_dim = 32;
  config.conv_taps = 4;
  config.mtp_layers = 1;
  if (dense) {
    config.intermediate = 144;
  } else {
    config.experts = 5;
    config.top_k = 2;
    config.moe_intermediate = 128;
    config.shared_intermediate = 48;
  }
  config.eos_tokens = {3};
  set_layers(config, 4);
  return config;
}

// All tensors of a single-file checkpoint, to be changed and written back.
struct LooseTensor {
  StoredType type = StoredType::kBf16;
  std::vector<int64_t> shape;
  std::vector<uint8_t> bytes;
};

class LooseCheckpoint {
 public:
  explicit LooseCheckpoint(const std::filesystem::path& directory) : path_(directory / "model.safetensors") {
    const SafetensorsFile file(path_);
    for (const StoredTensor& tensor : file.tensors()) {
      const auto data = file.data(tensor);
      LooseTensor loose{tensor.type, tensor.shape.list(), std::vector<uint8_t>(data.size())};
      if (!data.empty()) std::memcpy(loose.bytes.data(), data.data(), data.size());
      tensors[std::string(tensor.name)] = std::move(loose);
    }
  }

  LooseTensor& at(const std::string& name) {
    if (tensors.count(name) == 0) fail("test: no tensor {}", name);
    return tensors[name];
  }
  void set_float(const std::string& name, float value) { std::memcpy(at(name).bytes.data(), &value, 4); }
  void add_floats(const std::string& name, std::vector<int64_t> shape, const std::vector<float>& values) {
    LooseTensor tensor{StoredType::kF32, std::move(shape), std::vector<uint8_t>(values.size() * 4)};
    if (!values.empty()) std::memcpy(tensor.bytes.data(), values.data(), tensor.bytes.size());
    tensors[name] = std::move(tensor);
  }

  void write() const {
    std::vector<TensorPlan> plans;
    for (const auto& [name, tensor] : tensors) plans.push_back({name, tensor.type, tensor.shape});
    SafetensorsWriter writer(path_, plans, {});
    size_t index = 0;
    for (const auto& [name, tensor] : tensors) writer.write(index++, std::as_bytes(std::span(tensor.bytes)));
    writer.finish();
  }

  std::map<std::string, LooseTensor> tensors;

 private:
  std::filesystem::path path_;
};

inline GeneratorOptions small_options(GeneratedFormat format) {
  GeneratorOptions options;
  options.config = small_checkpoint_config();
  options.format = format;
  options.fused_experts = format <= GeneratedFormat::kF32;
  options.seed = 3;
  options.threads = 1;
  return options;
}

// The text of the Error that `action` throws; fails the test when it throws none.
inline std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  ADD_FAILURE() << "no error";
  return "";
}

inline void expect_error(const std::function<void()>& action, const std::vector<std::string>& parts) {
  const std::string text = error_of(action);
  for (const std::string& part : parts) {
    EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' is not in: " << text;
  }
}

}  // namespace fourfold::model
