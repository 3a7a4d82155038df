// The architecture of a model, as config.json describes it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

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

}  // namespace fourfold::model
