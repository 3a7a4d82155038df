// Qwen3.5 / Qwen3.6: gated attention every few layers, Gated DeltaNet between, mixture of experts or a dense MLP, and
// the MTP head. Reference: Hugging Face transformers, models/qwen3_5 and models/qwen3_5_moe.
#include <fmt/format.h>

#include <cmath>
#include <map>
#include <utility>
#include <vector>

#include "base/check.h"
#include "model/layer.h"

namespace fourfold::model {
namespace {

using ops::MatrixSource;
using ops::Tensor;

class GatedAttention : public TokenMixer {
 public:
  // q (per head: query, then gate), k, v stacked by rows, in one matrix; or in two, q and the rest, where keys and
  // values are often wanted alone: of an MTP head.
  std::vector<std::unique_ptr<ops::Matrix>> qkv;
  std::unique_ptr<ops::Matrix> output;  // [hidden, heads x head_dim]
  ops::Vector q_norm, k_norm;
  ops::AttentionParams params;
  int64_t cache_layer = 0;

  void forward(StepContext& context, const Tensor& x, const Tensor& out) override {
    const Tensor projected = context.scratch.take(x.rows, projected_columns());
    const Tensor mixed = context.scratch.take(x.rows, output->columns());
    int64_t first = 0;
    for (const auto& matrix : qkv) {
      context.backend.linear(x, *matrix, projected.slice_cols(first, first + matrix->rows()));
      first += matrix->rows();
    }
    const int64_t q = q_columns(), kv = params.kv_heads * params.head_dim;
    context.backend.attention(params, projected.slice_cols(0, q), projected.slice_cols(q, q + kv),
                              projected.slice_cols(q + kv, q + 2 * kv), *context.caches.kv, cache_layer, mixed);
    context.backend.linear(mixed, *output, out);
  }

  void append(StepContext& context, const Tensor& x) override {
    const int64_t kv = params.kv_heads * params.head_dim;
    const Tensor projected = context.scratch.take(x.rows, qkv.back()->rows());
    context.backend.linear(x, *qkv.back(), projected);
    const Tensor keys = projected.slice_cols(projected.cols - 2 * kv, projected.cols);
    context.backend.append_keys(params, keys.slice_cols(0, kv), keys.slice_cols(kv, 2 * kv), *context.caches.kv,
                                cache_layer);
  }

  int64_t scratch_elements(int64_t tokens) const override {
    return Scratch::padded(tokens * projected_columns()) + Scratch::padded(tokens * output->columns());
  }

  ops::Cost cost(int64_t tokens, int64_t context) const override {
    ops::Cost cost;
    for (const auto& matrix : qkv) {
      cost += ops::linear_cost(tokens, matrix->rows(), matrix->columns(), matrix->bytes());
    }
    cost += ops::linear_cost(tokens, output->rows(), output->columns(), output->bytes());
    cost += ops::attention_cost(tokens, context, params.heads, params.kv_heads, params.head_dim, 2);
    return cost;
  }

 private:
  int64_t q_columns() const { return params.heads * params.head_dim * (params.gated ? 2 : 1); }
  int64_t projected_columns() const { return q_columns() + 2 * params.kv_heads * params.head_dim; }
};

class GatedDeltaNet : public TokenMixer {
 public:
  std::unique_ptr<ops::Matrix> input;   // qkv, z, b, a stacked by rows
  std::unique_ptr<ops::Matrix> output;  // [hidden, value_heads x value_dim]
  ops::Vector conv, a_log, dt_bias, norm;
  ops::DeltaNetParams params;
  int64_t cache_layer = 0;

  void forward(StepContext& context, const Tensor& x, const Tensor& out) override {
    const Tensor projected = context.scratch.take(x.rows, input->rows());
    const Tensor mixed = context.scratch.take(x.rows, output->columns());
    context.backend.linear(x, *input, projected);
    const int64_t values = params.value_heads * params.value_dim;
    const int64_t z = 2 * params.key_heads * params.key_dim + values;
    const int64_t b = z + values;
    const int64_t a = b + params.value_heads;
    context.backend.delta_net(params, projected.slice_cols(0, z), projected.slice_cols(z, b),
                              projected.slice_cols(b, a), projected.slice_cols(a, a + params.value_heads),
                              *context.caches.states, cache_layer, mixed);
    context.backend.linear(mixed, *output, out);
  }

  void append(StepContext&, const Tensor&) override {
    fail("an MTP head of Gated DeltaNet layers is not supported, wanted attention");
  }

  int64_t scratch_elements(int64_t tokens) const override {
    return Scratch::padded(tokens * input->rows()) + Scratch::padded(tokens * output->columns());
  }

  ops::Cost cost(int64_t tokens, int64_t) const override {
    ops::Cost cost = ops::linear_cost(tokens, input->rows(), input->columns(), input->bytes());
    cost += ops::linear_cost(tokens, output->rows(), output->columns(), output->bytes());
    cost += ops::delta_net_cost(tokens, params.value_heads, params.key_dim, params.value_dim);
    cost.bytes += 4.0 * static_cast<double>(conv.count + a_log.count + dt_bias.count + norm.count);
    return cost;
  }
};

class MixtureOfExperts : public ChannelMixer {
 public:
  std::unique_ptr<ops::Matrix> router, shared_gate_up, shared_down, shared_gate;
  std::unique_ptr<ops::Experts> experts;
  ops::MoeParams params;

  void forward(StepContext& context, const Tensor& x, const Tensor& out) override {
    context.backend.moe(params, x, out);
  }

  ops::Cost cost(int64_t tokens) const override {
    ops::Cost cost = ops::linear_cost(tokens, router->rows(), router->columns(), router->bytes());
    cost +=
        ops::experts_cost(tokens, params.top_k, ops::expected_touched_experts(tokens, params.top_k, experts->count()),
                          experts->hidden(), experts->intermediate(), experts->bytes_per_expert());
    if (const int64_t slices = experts->shared_slices(); slices > 0) {
      cost += ops::experts_cost(tokens, slices, static_cast<double>(slices), experts->hidden(), experts->intermediate(),
                                experts->bytes_per_expert());
    }
    for (const ops::Matrix* matrix : {shared_gate_up.get(), shared_down.get(), shared_gate.get()}) {
      if (matrix != nullptr) cost += ops::linear_cost(tokens, matrix->rows(), matrix->columns(), matrix->bytes());
    }
    return cost;
  }
};

class DenseMlp : public ChannelMixer {
 public:
  std::unique_ptr<ops::Matrix> gate_up, down;
  ops::MlpParams params;

  void forward(StepContext& context, const Tensor& x, const Tensor& out) override {
    context.backend.mlp(params, x, out);
  }

  ops::Cost cost(int64_t tokens) const override {
    ops::Cost cost = ops::linear_cost(tokens, gate_up->rows(), gate_up->columns(), gate_up->bytes());
    cost += ops::linear_cost(tokens, down->rows(), down->columns(), down->bytes());
    return cost;
  }
};

class Builder {
 public:
  Builder(WeightSource& source, ops::Backend& backend) : source_(source), backend_(backend), config_(source.config()) {}

  Decoder build(const ModelOptions& options) {
    Decoder decoder;
    decoder.config = config_;
    decoder.kv = {config_.attention_layers(), config_.kv_heads, config_.head_dim, 0, 0};
    decoder.states = {config_.delta_net_layers(), 0,
                      config_.linear_key_heads,   config_.linear_value_heads,
                      config_.linear_key_dim,     config_.linear_value_dim,
                      config_.conv_taps};
    {
      const MatrixSource table = source_.matrix("embed_tokens", config_.vocabulary, config_.hidden);
      decoder.embedding = backend_.load_table(table);
      if (config_.tied_head) decoder.head = backend_.load_matrix(std::span(&table, 1));
      source_.release(table);
    }
    const int64_t total = config_.layers + (options.mtp && config_.mtp_layers > 0 ? 1 : 0);
    int64_t attention_layer = 0, delta_net_layer = 0;
    for (int64_t i = 0; i < config_.layers; ++i) {
      const bool attention = config_.layer_kinds[static_cast<size_t>(i)] == LayerKind::kAttention;
      decoder.layers.push_back(
          layer(fmt::format("layers.{}", i), attention, attention ? attention_layer++ : delta_net_layer++, false));
      if (options.progress) options.progress(i + 1, total);
    }
    decoder.final_norm = norm("norm", config_.hidden);
    if (!config_.tied_head) decoder.head = matrix({{"lm_head", config_.vocabulary}}, config_.hidden);
    if (options.mtp && config_.mtp_layers > 0) {
      auto mtp = std::make_unique<MtpHead>();
      mtp->embedding_norm = norm("mtp.pre_fc_norm_embedding", config_.hidden);
      mtp->hidden_norm = norm("mtp.pre_fc_norm_hidden", config_.hidden);
      mtp->final_norm = norm("mtp.norm", config_.hidden);
      mtp->fc = matrix({{"mtp.fc", config_.hidden}}, 2 * config_.hidden);
      mtp->layer = layer("mtp.layers.0", true, decoder.kv.layers++, true);
      decoder.mtp = std::move(mtp);
      if (options.progress) options.progress(total, total);
    }
    return decoder;
  }

 private:
  struct Part {
    std::string module;
    int64_t rows;
  };

  // Modules stacked by rows into one matrix, so that one pass over x computes them all.
  std::unique_ptr<ops::Matrix> matrix(const std::vector<Part>& parts, int64_t columns) {
    std::vector<MatrixSource> sources;
    sources.reserve(parts.size());
    for (const Part& part : parts) sources.push_back(source_.matrix(part.module, part.rows, columns));
    std::unique_ptr<ops::Matrix> loaded = backend_.load_matrix(sources);
    for (const MatrixSource& source : sources) source_.release(source);
    return loaded;
  }

  void release(const ops::ExpertSource& expert) {
    source_.release(expert.gate);
    source_.release(expert.up);
    source_.release(expert.down);
  }

  // A zero-centred norm: the checkpoint stores w, the factor is 1 + w, added in fp32.
  ops::Vector norm(const std::string& name, int64_t count) {
    std::vector<float> weight = source_.vector(name, count);
    for (float& value : weight) value += 1.0f;
    return backend_.load_vector(weight);
  }

  ops::Vector vector(const std::string& name, int64_t count) {
    return backend_.load_vector(source_.vector(name, count));
  }

  Layer layer(const std::string& prefix, bool attention, int64_t cache_layer, bool separate_keys) {
    Layer layer;
    layer.input_norm = norm(prefix + ".input_layernorm", config_.hidden);
    layer.post_norm = norm(prefix + ".post_attention_layernorm", config_.hidden);
    layer.token_mixer = attention ? gated_attention(prefix + ".self_attn.", cache_layer, separate_keys)
                                  : gated_delta_net(prefix + ".linear_attn.", cache_layer);
    layer.channel_mixer = config_.experts > 0 ? mixture(prefix + ".mlp.") : dense(prefix + ".mlp.");
    return layer;
  }

  std::unique_ptr<TokenMixer> gated_attention(const std::string& prefix, int64_t cache_layer, bool separate_keys) {
    auto mixer = std::make_unique<GatedAttention>();
    const int64_t q = config_.heads * config_.head_dim, kv = config_.kv_heads * config_.head_dim;
    std::vector<Part> parts = {{prefix + "q_proj", config_.attention_gate ? 2 * q : q}};
    if (separate_keys) {
      mixer->qkv.push_back(matrix(parts, config_.hidden));
      parts.clear();
    }
    parts.push_back({prefix + "k_proj", kv});
    parts.push_back({prefix + "v_proj", kv});
    mixer->qkv.push_back(matrix(parts, config_.hidden));
    mixer->output = matrix({{prefix + "o_proj", config_.hidden}}, q);
    mixer->q_norm = norm(prefix + "q_norm", config_.head_dim);
    mixer->k_norm = norm(prefix + "k_norm", config_.head_dim);
    ops::AttentionParams& params = mixer->params;
    params.heads = config_.heads;
    params.kv_heads = config_.kv_heads;
    params.head_dim = config_.head_dim;
    params.rotary_dim = config_.rotary_dim;
    params.rope_theta = static_cast<float>(config_.rope_theta);
    params.scale = 1.0f / std::sqrt(static_cast<float>(config_.head_dim));
    params.norm_eps = config_.norm_eps;
    params.gated = config_.attention_gate;
    params.q_norm = &mixer->q_norm;
    params.k_norm = &mixer->k_norm;
    mixer->cache_layer = cache_layer;
    return mixer;
  }

  std::unique_ptr<TokenMixer> gated_delta_net(const std::string& prefix, int64_t cache_layer) {
    auto mixer = std::make_unique<GatedDeltaNet>();
    const int64_t heads = config_.linear_value_heads, values = heads * config_.linear_value_dim;
    mixer->input = matrix({{prefix + "in_proj_qkv", config_.conv_channels()},
                           {prefix + "in_proj_z", values},
                           {prefix + "in_proj_b", heads},
                           {prefix + "in_proj_a", heads}},
                          config_.hidden);
    mixer->output = matrix({{prefix + "out_proj", config_.hidden}}, values);
    mixer->conv = vector(prefix + "conv1d", config_.conv_channels() * config_.conv_taps);
    mixer->a_log = vector(prefix + "A_log", heads);
    mixer->dt_bias = vector(prefix + "dt_bias", heads);
    mixer->norm = vector(prefix + "norm", config_.linear_value_dim);  // not zero-centred
    ops::DeltaNetParams& params = mixer->params;
    params.key_heads = config_.linear_key_heads;
    params.value_heads = heads;
    params.key_dim = config_.linear_key_dim;
    params.value_dim = config_.linear_value_dim;
    params.conv_taps = config_.conv_taps;
    params.norm_eps = config_.norm_eps;
    params.conv = &mixer->conv;
    params.a_log = &mixer->a_log;
    params.dt_bias = &mixer->dt_bias;
    params.norm = &mixer->norm;
    mixer->cache_layer = cache_layer;
    return mixer;
  }

  std::unique_ptr<ChannelMixer> mixture(const std::string& prefix) {
    auto mixer = std::make_unique<MixtureOfExperts>();
    const int64_t hidden = config_.hidden, width = config_.moe_intermediate, shared = config_.shared_intermediate;
    mixer->router = matrix({{prefix + "gate", config_.experts}}, hidden);
    std::map<int64_t, ops::ExpertSource> pending;  // handed out, not yet copied
    const auto expert = [&](int64_t i) {
      const std::string name = fmt::format("{}experts.{}.", prefix, i);
      return pending[i] = {source_.matrix(name + "gate_proj", width, hidden),
                           source_.matrix(name + "up_proj", width, hidden),
                           source_.matrix(name + "down_proj", hidden, width)};
    };
    const auto done = [&](int64_t i) {
      const auto found = pending.find(i);
      FF_ASSERT(found != pending.end());
      release(found->second);
      pending.erase(found);
    };
    if (shared > 0) {
      const ops::ExpertSource source = {source_.matrix(prefix + "shared_expert.gate_proj", shared, hidden),
                                        source_.matrix(prefix + "shared_expert.up_proj", shared, hidden),
                                        source_.matrix(prefix + "shared_expert.down_proj", hidden, shared)};
      mixer->experts = backend_.load_experts_with_shared(config_.experts, expert, done, source);
      if (mixer->experts == nullptr) {
        const MatrixSource gate_up[] = {source.gate, source.up};
        mixer->shared_gate_up = backend_.load_matrix(gate_up);
        mixer->shared_down = backend_.load_matrix(std::span(&source.down, 1));
      }
      release(source);
      mixer->shared_gate = matrix({{prefix + "shared_expert_gate", 1}}, hidden);
    }
    if (mixer->experts == nullptr) mixer->experts = backend_.load_experts(config_.experts, expert, done);
    ops::MoeParams& params = mixer->params;
    params.router = mixer->router.get();
    params.experts = mixer->experts.get();
    params.top_k = config_.top_k;
    params.renormalize = config_.renormalize;
    params.shared_gate_up = mixer->shared_gate_up.get();
    params.shared_down = mixer->shared_down.get();
    params.shared_gate = mixer->shared_gate.get();
    return mixer;
  }

  std::unique_ptr<ChannelMixer> dense(const std::string& prefix) {
    auto mixer = std::make_unique<DenseMlp>();
    mixer->gate_up = matrix({{prefix + "gate_proj", config_.intermediate}, {prefix + "up_proj", config_.intermediate}},
                            config_.hidden);
    mixer->down = matrix({{prefix + "down_proj", config_.hidden}}, config_.intermediate);
    mixer->params.gate_up = mixer->gate_up.get();
    mixer->params.down = mixer->down.get();
    return mixer;
  }

  WeightSource& source_;
  ops::Backend& backend_;
  const ModelConfig config_;
};

}  // namespace

Decoder build_qwen3_5(WeightSource& source, ops::Backend& backend, const ModelOptions& options) {
  return Builder(source, backend).build(options);
}

}  // namespace fourfold::model
