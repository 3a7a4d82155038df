// The model that tests of the forward pass and of steps compute with: both kinds of layers, an MTP head, experts or
// none.
#pragma once

#include "model/config.h"

namespace fourfold::model {

inline ModelConfig small_config(bool dense) {
  ModelConfig config;
  config.model_type = dense ? "qwen3_5_text" : "qwen3_5_moe_text";
  config.hidden = 64;
  config.layers = 4;
  config.vocabulary = 97;
  config.max_positions = 4096;
  config.layer_kinds = {LayerKind::kDeltaNet, LayerKind::kAttention, LayerKind::kDeltaNet, LayerKind::kDeltaNet};
  config.heads = 4;
  config.kv_heads = 2;
  config.head_dim = 64;
  config.rotary_dim = 16;
  config.rope_theta = 1e7;
  config.linear_key_heads = 2;
  config.linear_value_heads = 6;
  config.linear_key_dim = 32;
  config.linear_value_dim = 32;
  config.conv_taps = 4;
  if (dense) {
    config.intermediate = 96;
  } else {
    config.experts = 7;
    config.top_k = 3;
    config.moe_intermediate = 48;
    config.shared_intermediate = 80;
  }
  config.mtp_layers = 1;
  return config;
}

}  // namespace fourfold::model
