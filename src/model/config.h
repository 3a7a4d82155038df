// The architecture of a model, as config.json describes it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/json_forward.h"

namespace fourfold::model {

enum class LayerKind : uint8_t { kAttention, kDeltaNet };

// Qwen3.5 / Qwen3.6 text model (MoE or dense). All sizes are in elements and validated: positive, consistent with each
// other, and small enough that no product of two or three of them overflows 64 bits.
struct ModelConfig {
  std::string model_type;  // as found, e.g. "qwen3_5_moe_text"
  int64_t hidden = 0;
  int64_t layers = 0;
  int64_t vocabulary = 0;  // rows of the embedding and of the head (padding rows included)
  int64_t max_positions = 0;
  float norm_eps = 1e-6f;
  bool tied_head = false;
  std::vector<LayerKind> layer_kinds;  // [layers]

  // gated attention
  int64_t heads = 0, kv_heads = 0, head_dim = 0;
  int64_t rotary_dim = 0;
  double rope_theta = 0;
  bool attention_gate = true;

  // Gated DeltaNet
  int64_t linear_key_heads = 0, linear_value_heads = 0, linear_key_dim = 0, linear_value_dim = 0, conv_taps = 0;

  // channel mixer: MoE when experts > 0, otherwise a dense MLP of width `intermediate`
  int64_t experts = 0, top_k = 0, moe_intermediate = 0, shared_intermediate = 0;
  int64_t intermediate = 0;
  bool renormalize = true;

  int64_t mtp_layers = 0;           // 0 when the checkpoint has no MTP head
  std::vector<int32_t> eos_tokens;  // from config.json; generation_config.json has the ones for chat

  int64_t conv_channels() const {
    return 2 * linear_key_heads * linear_key_dim + linear_value_heads * linear_value_dim;
  }
  int64_t attention_layers() const;  // of the trunk
  int64_t delta_net_layers() const;
};

// What config.json and hf_quant_config.json say about quantisation. For people only: the loader decides each tensor's
// format from the tensors that exist, since the lists in real files are incomplete.
struct QuantizationInfo {
  std::string method;                // "modelopt", "compressed-tensors", "fp8"; empty: not quantised
  std::string algorithm;             // "NVFP4", "MIXED_PRECISION", "nvfp4-pack-quantized", ...
  std::string kv_cache;              // "FP8" when the file declares a quantised KV cache
  std::vector<std::string> ignored;  // module patterns that the file calls not quantised
};

// generation_config.json: what the publisher recommends for sampling. Absent fields are unset.
struct GenerationConfig {
  std::vector<int32_t> eos_tokens;
  std::optional<int32_t> bos_token, pad_token;
  std::optional<bool> do_sample;
  std::optional<double> temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty;
  std::optional<int64_t> top_k;
};

// The limits of a configuration: generous for any real model, and small enough that products of three sizes fit.
inline constexpr int64_t kMaxDimension = 1 << 20;  // hidden sizes, head counts times head sizes, expert widths
inline constexpr int64_t kMaxLayers = 1024;
inline constexpr int64_t kMaxExperts = 8192;
inline constexpr int64_t kMaxLayerExperts = 1 << 18;
inline constexpr int64_t kMaxVocabulary = 1 << 24;
inline constexpr int64_t kMaxPositions = 1 << 28;

// Parses config.json: the text fields at the top level or inside "text_config". Errors name the file, the field, what
// was found and what was wanted. mtp_layers is what the file says; whether the tensors exist is the checkpoint's
// business.
ModelConfig parse_config(const Json& root, std::string_view file);

// The consistency rules on their own, for configurations that do not come from a file.
void validate_config(const ModelConfig& config, std::string_view file);

// `config` is config.json, `quant` hf_quant_config.json or null; both are optional sources of the same facts.
QuantizationInfo parse_quantization(const Json& config, const Json* quant, std::string_view file);

GenerationConfig parse_generation_config(const Json& root, std::string_view file);

// Reads DIR/config.json; DIR/generation_config.json when it exists.
ModelConfig read_config(const std::filesystem::path& directory);
QuantizationInfo read_quantization(const std::filesystem::path& directory);
GenerationConfig read_generation_config(const std::filesystem::path& directory);

// config.json and generation_config.json for a configuration, as the reader accepts them (text_config nesting).
// `quantization` becomes quantization_config when it is not null.
Json write_config(const ModelConfig& config, const Json& quantization);

}  // namespace fourfold::model
