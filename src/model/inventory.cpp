#include "model/inventory.h"

#include <fmt/format.h>

namespace fourfold::model {
namespace {

class Lister {
 public:
  explicit Lister(const ModelConfig& config) : config_(config) {}

  std::vector<WeightSpec> list() {
    matrix("embed_tokens", WeightKind::kEmbedding, config_.vocabulary, config_.hidden);
    for (int64_t i = 0; i < config_.layers; ++i) {
      layer_ = i;
      layer(fmt::format("layers.{}.", i), config_.layer_kinds[static_cast<size_t>(i)]);
    }
    layer_ = -1;
    vector("norm", WeightKind::kNorm, config_.hidden);
    if (!config_.tied_head) matrix("lm_head", WeightKind::kHead, config_.vocabulary, config_.hidden);
    if (config_.mtp_layers > 0) {
      mtp_ = true;
      matrix("mtp.fc", WeightKind::kMtpInput, config_.hidden, 2 * config_.hidden);
      vector("mtp.pre_fc_norm_embedding", WeightKind::kNorm, config_.hidden);
      vector("mtp.pre_fc_norm_hidden", WeightKind::kNorm, config_.hidden);
      layer("mtp.layers.0.", LayerKind::kAttention);
      vector("mtp.norm", WeightKind::kNorm, config_.hidden);
    }
    return std::move(specs_);
  }

 private:
  void add(std::string name, WeightKind kind, bool is_vector, int64_t rows, int64_t columns) {
    specs_.push_back({std::move(name), kind, is_vector, rows, columns, layer_, expert_, mtp_});
  }
  void matrix(std::string name, WeightKind kind, int64_t rows, int64_t columns) {
    add(std::move(name), kind, false, rows, columns);
  }
  void vector(std::string name, WeightKind kind, int64_t count) { add(std::move(name), kind, true, count, 1); }

  void layer(const std::string& prefix, LayerKind kind) {
    vector(prefix + "input_layernorm", WeightKind::kNorm, config_.hidden);
    if (kind == LayerKind::kAttention) {
      attention(prefix + "self_attn.");
    } else {
      delta_net(prefix + "linear_attn.");
    }
    vector(prefix + "post_attention_layernorm", WeightKind::kNorm, config_.hidden);
    mlp(prefix + "mlp.");
  }

  void attention(const std::string& prefix) {
    const int64_t width = config_.heads * config_.head_dim, kv = config_.kv_heads * config_.head_dim;
    matrix(prefix + "q_proj", WeightKind::kAttention, config_.attention_gate ? 2 * width : width, config_.hidden);
    matrix(prefix + "k_proj", WeightKind::kAttention, kv, config_.hidden);
    matrix(prefix + "v_proj", WeightKind::kAttention, kv, config_.hidden);
    matrix(prefix + "o_proj", WeightKind::kAttention, config_.hidden, width);
    vector(prefix + "q_norm", WeightKind::kNorm, config_.head_dim);
    vector(prefix + "k_norm", WeightKind::kNorm, config_.head_dim);
  }

  void delta_net(const std::string& prefix) {
    const int64_t heads = config_.linear_value_heads, values = heads * config_.linear_value_dim;
    matrix(prefix + "in_proj_qkv", WeightKind::kDeltaNet, config_.conv_channels(), config_.hidden);
    matrix(prefix + "in_proj_z", WeightKind::kDeltaNet, values, config_.hidden);
    matrix(prefix + "in_proj_b", WeightKind::kDeltaNetGate, heads, config_.hidden);
    matrix(prefix + "in_proj_a", WeightKind::kDeltaNetGate, heads, config_.hidden);
    vector(prefix + "conv1d", WeightKind::kDeltaNetSmall, config_.conv_channels() * config_.conv_taps);
    vector(prefix + "A_log", WeightKind::kDeltaNetSmall, heads);
    vector(prefix + "dt_bias", WeightKind::kDeltaNetSmall, heads);
    vector(prefix + "norm", WeightKind::kDeltaNetSmall, config_.linear_value_dim);
    matrix(prefix + "out_proj", WeightKind::kDeltaNet, config_.hidden, values);
  }

  void gated(const std::string& prefix, WeightKind kind, int64_t width) {
    matrix(prefix + "gate_proj", kind, width, config_.hidden);
    matrix(prefix + "up_proj", kind, width, config_.hidden);
    matrix(prefix + "down_proj", kind, config_.hidden, width);
  }

  void mlp(const std::string& prefix) {
    if (config_.experts == 0) {
      gated(prefix, WeightKind::kMlp, config_.intermediate);
      return;
    }
    matrix(prefix + "gate", WeightKind::kRouter, config_.experts, config_.hidden);
    for (int64_t expert = 0; expert < config_.experts; ++expert) {
      expert_ = expert;
      gated(fmt::format("{}experts.{}.", prefix, expert), WeightKind::kRoutedExpert, config_.moe_intermediate);
    }
    expert_ = -1;
    if (config_.shared_intermediate > 0) {
      gated(prefix + "shared_expert.", WeightKind::kSharedExpert, config_.shared_intermediate);
      matrix(prefix + "shared_expert_gate", WeightKind::kSharedGate, 1, config_.hidden);
    }
  }

  const ModelConfig& config_;
  std::vector<WeightSpec> specs_;
  int64_t layer_ = -1, expert_ = -1;
  bool mtp_ = false;
};

}  // namespace

const char* weight_kind_name(WeightKind kind) {
  switch (kind) {
    case WeightKind::kEmbedding:
      return "embedding";
    case WeightKind::kHead:
      return "head";
    case WeightKind::kNorm:
      return "norms";
    case WeightKind::kAttention:
      return "attention";
    case WeightKind::kDeltaNet:
      return "delta net";
    case WeightKind::kDeltaNetGate:
      return "delta net gates";
    case WeightKind::kDeltaNetSmall:
      return "delta net conv, decay, norm";
    case WeightKind::kRouter:
      return "router";
    case WeightKind::kRoutedExpert:
      return "routed experts";
    case WeightKind::kSharedExpert:
      return "shared expert";
    case WeightKind::kSharedGate:
      return "shared expert gate";
    case WeightKind::kMlp:
      return "mlp";
    case WeightKind::kMtpInput:
      return "mtp input";
  }
  return "unknown";
}

std::vector<WeightSpec> weight_specs(const ModelConfig& config) { return Lister(config).list(); }

}  // namespace fourfold::model
