// Writes checkpoints of any size with random weights, in every format that the loader reads: for tests and for speed
// runs. Streaming, and the same bytes on every machine for the same options.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

#include "model/config.h"

namespace fourfold::model {

enum class GeneratedFormat : uint8_t {
  kBf16,
  kF16,
  kF32,
  kModeloptNvfp4,
  kModeloptW4A16,
  kModeloptMixed,  // NVFP4 experts and head, FP8 per tensor attention and delta net
  kModeloptFp8,    // per tensor
  kFp8Block,       // 128 x 128 blocks, the MTP head too
  kFp8Channel,
  kCtNvfp4,
  kCtNvfp4A16,
  kCtMixed,  // NVFP4 experts, FP8 per channel attention, delta net and head
};

struct FormatName {
  GeneratedFormat format;
  const char* name;  // of --format
  const char* meaning;
};
std::span<const FormatName> generated_formats();

enum class PrefixStyle : uint8_t { kModelLanguageModel, kLanguageModelModel, kModel, kNone };

struct GeneratorOptions {
  ModelConfig config;
  GeneratedFormat format = GeneratedFormat::kBf16;
  PrefixStyle prefix = PrefixStyle::kModelLanguageModel;
  bool fused_experts = true;  // one tensor for all experts of a layer
  bool only_experts = false;  // quantise the routed experts (dense: the MLPs) alone
  bool kv_scales = false;     // modelopt: k_scale and v_scale
  bool visual = false;        // a few tensors of a vision tower, to be skipped
  int64_t dead_experts = 0;   // the last N experts of each layer are zero or about 1e-23
  int64_t shards = 1;
  uint64_t seed = 0;
  int threads = 0;
};

struct GeneratedFiles {
  uint64_t bytes = 0;
  int64_t tensors = 0, shards = 0;
};

// Writes config.json, generation_config.json, hf_quant_config.json (modelopt) and the shards into `directory`, which
// must be new or empty. There is no tokenizer. Stops with an Error when Ctrl-C was pressed.
GeneratedFiles generate_checkpoint(const std::filesystem::path& directory, const GeneratorOptions& options);

}  // namespace fourfold::model
