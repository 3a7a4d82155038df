// Qwen3.5 / Qwen3.6: gated attention every few layers, Gated DeltaNet between, mixture of experts or a dense MLP, and
// the MTP head. Reference: Hugging Face transformers, models/qwen3_5 and models/qwen3_5_moe.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <future>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/file.h"
#include "base/math.h"
#include "base/threads.h"
#include "model/draft_head.h"
#include "model/layer.h"
#include "model/shard.h"

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
  const ops::Matrix& last_product() const override { return *output; }

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
    const Tensor projected = context.scratch.take(x.rows, projected_columns()).slice_cols(0, input->rows());
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
    return Scratch::padded(tokens * projected_columns()) + Scratch::padded(tokens * output->columns());
  }
  const ops::Matrix& last_product() const override { return *output; }

  ops::Cost cost(int64_t tokens, int64_t) const override {
    ops::Cost cost = ops::linear_cost(tokens, input->rows(), input->columns(), input->bytes());
    cost += ops::linear_cost(tokens, output->rows(), output->columns(), output->bytes());
    cost += ops::delta_net_cost(tokens, params.value_heads, params.key_dim, params.value_dim);
    cost.bytes += 4.0 * static_cast<double>(conv.count + a_log.count + dt_bias.count + norm.count);
    return cost;
  }

 private:
  // GPUs copy rows in pieces of 16 bytes; a rank's two numbers a head are not always a multiple of that.
  int64_t projected_columns() const { return round_up(input->rows(), 8); }
};

class MixtureOfExperts : public ChannelMixer {
 public:
  std::unique_ptr<ops::Matrix> router, shared_gate_up, shared_down, shared_gate;
  std::unique_ptr<ops::Experts> experts;
  ops::MoeParams params;

  void forward(StepContext& context, const Tensor& x, const Tensor& out) override {
    context.backend.moe(params, x, out);
  }
  const ops::MoeParams* routed() const override { return &params; }

  ops::Cost cost(int64_t tokens) const override {
    ops::Cost cost = ops::linear_cost(tokens, router->rows(), router->columns(), router->bytes());
    const int64_t all = router->rows();
    ops::Cost routed = ops::experts_cost(tokens, params.top_k, ops::expected_touched_experts(tokens, params.top_k, all),
                                         experts->hidden(), experts->intermediate(), experts->bytes_per_expert());
    const double here = static_cast<double>(experts->count()) / static_cast<double>(all);
    routed.bytes *= here;
    routed.flops *= here;
    cost += routed;
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
  Builder(WeightSource& source, ops::Backend& backend, const Shard& shard)
      : source_(source), backend_(backend), config_(source.config()), shard_(shard) {
    check_shard(config_, shard.ranks(), shard.by_expert);
    const int64_t rank = shard.rank(), ranks = shard.ranks();
    heads_ = heads_of(config_.heads, rank, ranks);
    kv_heads_ = heads_of(config_.kv_heads, rank, ranks);
    key_heads_ = heads_of(config_.linear_key_heads, rank, ranks);
    value_heads_ = heads_of(config_.linear_value_heads, rank, ranks);
    vocabulary_ = share_of(config_.vocabulary, kVocabularyUnit, rank, ranks);
  }

  Decoder build(const ModelOptions& options) {
    Decoder decoder;
    decoder.config = config_;
    const bool drafts = options.mtp && config_.mtp_layers > 0;
    decoder.first_token = vocabulary_.begin;
    decoder.kv = {config_.attention_layers(), kv_heads_.size, config_.head_dim, 0, 0};
    decoder.states = {config_.delta_net_layers(),
                      0,
                      key_heads_.size,
                      value_heads_.size,
                      config_.linear_key_dim,
                      config_.linear_value_dim,
                      config_.conv_taps};
    std::optional<MatrixSource> head;
    if (drafts && !config_.tied_head && backend_.gpu()) {
      // While a card's weights are on their way the processors have time for the drafts' copy of the head: half of
      // them, for about as long as the others read the files. It is wanted last.
      head = source_.matrix("lm_head", config_.vocabulary, config_.hidden);
      const int threads = std::max(1, ThreadPool::default_threads() / 2 / static_cast<int>(shard_.ranks()));
      draft_copy_ = std::async(
          std::launch::async, [rows = take_rows(*head, vocabulary_), threads] { return draft_head_of(rows, threads); });
    }
    {
      const MatrixSource table = source_.matrix("embed_tokens", config_.vocabulary, config_.hidden);
      decoder.embedding = backend_.load_table(table);
      if (config_.tied_head) {
        load_head(take_rows(table, vocabulary_), drafts, decoder);
      }
      source_.release(table);
    }
    const int64_t total = config_.layers + (drafts ? 1 : 0);
    int64_t attention_layer = 0, delta_net_layer = 0;
    for (int64_t i = 0; i < config_.layers; ++i) {
      const bool attention = config_.layer_kinds[static_cast<size_t>(i)] == LayerKind::kAttention;
      decoder.layers.push_back(
          layer(fmt::format("layers.{}", i), attention, attention ? attention_layer++ : delta_net_layer++, false));
      if (options.progress) options.progress(i + 1, total);
    }
    decoder.final_norm = norm("norm", config_.hidden);
    if (!config_.tied_head) {
      if (!head) head = source_.matrix("lm_head", config_.vocabulary, config_.hidden);
      load_head(take_rows(*head, vocabulary_), drafts, decoder);
      source_.release(*head);
    }
    if (drafts) {
      auto mtp = std::make_unique<MtpHead>();
      mtp->embedding_norm = norm("mtp.pre_fc_norm_embedding", config_.hidden);
      mtp->hidden_norm = norm("mtp.pre_fc_norm_hidden", config_.hidden);
      mtp->final_norm = norm("mtp.norm", config_.hidden);
      mtp->fc = matrix({{"mtp.fc", config_.hidden}}, 2 * config_.hidden);
      mtp->layer = layer("mtp.layers.0", true, decoder.kv.layers++, true);
      if (draft_copy_.valid()) load_draft_head(draft_copy_.get());
      mtp->head = std::move(draft_head_);
      decoder.mtp = std::move(mtp);
      if (options.progress) options.progress(total, total);
    }
    return decoder;
  }

 private:
  void load_head(const MatrixSource& head, bool drafts, Decoder& decoder) {
    decoder.head = backend_.load_matrix(std::span(&head, 1));
    if (drafts && !draft_copy_.valid()) load_draft_head(draft_head_of(head));
  }
  void load_draft_head(const std::optional<MatrixSource>& copy) {
    if (!copy) return;
    draft_head_ = backend_.load_matrix(std::span(&*copy, 1));
  }

  // Rows of the head are shared out in whole panels of the CPU's and whole fragments of a GPU's kernels.
  static constexpr int64_t kVocabularyUnit = 16;

  struct Module {
    std::string name;
    int64_t rows;                  // as stored
    std::vector<Part> parts = {};  // of the rows, the rank's, one below the other; none: all
  };

  // Modules stacked by rows into one matrix, so that one pass over x computes them all.
  std::unique_ptr<ops::Matrix> matrix(const std::vector<Module>& modules, int64_t columns) {
    std::vector<MatrixSource> stored, parts;
    for (const Module& module : modules) {
      stored.push_back(source_.matrix(module.name, module.rows, columns));
      if (module.parts.empty()) parts.push_back(stored.back());
      for (const Part& part : module.parts) parts.push_back(take_rows(stored.back(), part));
    }
    std::unique_ptr<ops::Matrix> loaded = backend_.load_matrix(parts);
    for (const MatrixSource& source : stored) source_.release(source);
    return loaded;
  }

  // A projection back to the hidden size, from the rank's part of `columns`: its products are parts of a sum.
  std::unique_ptr<ops::Matrix> projection_back(const std::string& module, int64_t columns, const Part& part) {
    return projection_back(source_.matrix(module, config_.hidden, columns), part);
  }
  std::unique_ptr<ops::Matrix> projection_back(const MatrixSource& stored, const Part& part) {
    const MatrixSource taken = columns_of(stored, part);
    std::unique_ptr<ops::Matrix> loaded = backend_.load_matrix(std::span(&taken, 1));
    source_.release(stored);
    return loaded;
  }

  // A card's weights are copied out of their files in any case: columns need no copy of their own before that.
  MatrixSource columns_of(const MatrixSource& stored, const Part& part) const {
    return take_columns(stored, part, backend_.gpu() && file_place(stored.data).file != nullptr);
  }

  // Parts of heads of so many rows each, behind `first` rows of something else.
  static Part rows_of(const Part& heads, int64_t dimension, int64_t first = 0) {
    return {first + heads.begin * dimension, first + heads.end * dimension, heads.size * dimension};
  }
  // The delta net's q, k and v, of the rank's heads, among the rows that have those of all.
  std::vector<Part> conv_parts() const {
    const int64_t keys = config_.linear_key_heads * config_.linear_key_dim;
    if (shard_.ranks() == 1) return {{0, config_.conv_channels(), config_.conv_channels()}};
    return {rows_of(key_heads_, config_.linear_key_dim), rows_of(key_heads_, config_.linear_key_dim, keys),
            rows_of(value_heads_, config_.linear_value_dim, 2 * keys)};
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
  // The rank's parts of `rows` rows of `width` numbers.
  ops::Vector vector(const std::string& name, int64_t rows, int64_t width, const std::vector<Part>& parts) {
    const std::vector<float> all = source_.vector(name, rows * width);
    std::vector<float> taken;
    for (const Part& part : parts) {
      taken.insert(taken.end(), all.begin() + part.begin * width, all.begin() + part.end * width);
    }
    return backend_.load_vector(taken);
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
    const int64_t q_dim = config_.attention_gate ? 2 * config_.head_dim : config_.head_dim;
    const int64_t kv = config_.kv_heads * config_.head_dim;
    std::vector<Module> modules = {{prefix + "q_proj", config_.heads * q_dim, {rows_of(heads_, q_dim)}}};
    if (separate_keys) {
      mixer->qkv.push_back(matrix(modules, config_.hidden));
      modules.clear();
    }
    modules.push_back({prefix + "k_proj", kv, {rows_of(kv_heads_, config_.head_dim)}});
    modules.push_back({prefix + "v_proj", kv, {rows_of(kv_heads_, config_.head_dim)}});
    mixer->qkv.push_back(matrix(modules, config_.hidden));
    mixer->output =
        projection_back(prefix + "o_proj", config_.heads * config_.head_dim, rows_of(heads_, config_.head_dim));
    mixer->q_norm = norm(prefix + "q_norm", config_.head_dim);
    mixer->k_norm = norm(prefix + "k_norm", config_.head_dim);
    ops::AttentionParams& params = mixer->params;
    params.heads = heads_.size;
    params.kv_heads = kv_heads_.size;
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
    const Part rank_values = rows_of(value_heads_, config_.linear_value_dim);
    mixer->input = matrix({{prefix + "in_proj_qkv", config_.conv_channels(), conv_parts()},
                           {prefix + "in_proj_z", values, {rank_values}},
                           {prefix + "in_proj_b", heads, {value_heads_}},
                           {prefix + "in_proj_a", heads, {value_heads_}}},
                          config_.hidden);
    mixer->output = projection_back(prefix + "out_proj", values, rank_values);
    mixer->conv = vector(prefix + "conv1d", config_.conv_channels(), config_.conv_taps, conv_parts());
    mixer->a_log = vector(prefix + "A_log", heads, 1, {value_heads_});
    mixer->dt_bias = vector(prefix + "dt_bias", heads, 1, {value_heads_});
    mixer->norm = vector(prefix + "norm", config_.linear_value_dim);  // not zero-centred
    ops::DeltaNetParams& params = mixer->params;
    params.key_heads = key_heads_.size;
    params.value_heads = value_heads_.size;
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

  // The matrices of an expert, and the rank's part of their width.
  ops::ExpertSource stored_expert(const std::string& prefix, int64_t i) {
    const std::string name = fmt::format("{}experts.{}.", prefix, i);
    const int64_t hidden = config_.hidden, width = config_.moe_intermediate;
    return {source_.matrix(name + "gate_proj", width, hidden), source_.matrix(name + "up_proj", width, hidden),
            source_.matrix(name + "down_proj", hidden, width)};
  }
  void release(const ops::ExpertSource& expert) {
    source_.release(expert.gate);
    source_.release(expert.up);
    source_.release(expert.down);
  }
  // With the shared expert, the rank's part of it, where that is given and the backend takes it along.
  std::unique_ptr<ops::Experts> experts(const std::string& prefix, const Part& mine, const ops::ExpertSource* shared) {
    std::map<int64_t, ops::ExpertSource> pending;  // handed out, not yet copied
    int64_t next = 0;
    // All ranks take all experts from the source, in the same order, so that it reads them once.
    const auto pass_over = [&](int64_t end) {
      for (; next < end; ++next) release(stored_expert(prefix, next));
    };
    const auto source = [&](int64_t i) -> ops::ExpertSource {
      auto found = pending.find(i);
      if (found == pending.end()) {
        pass_over(mine.begin + i);
        found = pending.emplace(i, stored_expert(prefix, next++)).first;
      }
      const ops::ExpertSource& stored = found->second;
      const int64_t all = config_.moe_intermediate;
      // Whole experts are padded by the backend where its kernels need that.
      const bool whole = shard_.by_expert || shard_.ranks() == 1;
      const Part width = whole ? Part{0, all, all} : width_part(all, stored.down);
      return {take_rows(stored.gate, width), take_rows(stored.up, width), columns_of(stored.down, width)};
    };
    const auto done = [&](int64_t i) {
      const auto found = pending.find(i);
      FF_ASSERT(found != pending.end());
      release(found->second);
      pending.erase(found);
    };
    std::unique_ptr<ops::Experts> loaded;
    if (shared != nullptr) loaded = backend_.load_experts_with_shared(mine.count(), source, done, *shared);
    if (loaded == nullptr) loaded = backend_.load_experts(mine.count(), source, done);
    pass_over(config_.experts);
    return loaded;
  }

  std::unique_ptr<ChannelMixer> mixture(const std::string& prefix) {
    auto mixer = std::make_unique<MixtureOfExperts>();
    const int64_t hidden = config_.hidden, shared = config_.shared_intermediate;
    mixer->router = matrix({{prefix + "gate", config_.experts}}, hidden);
    const Part all{0, config_.experts, config_.experts};
    const Part mine = shard_.by_expert ? share_of(config_.experts, 1, shard_.rank(), shard_.ranks()) : all;
    if (shared > 0) {
      const std::string name = prefix + "shared_expert.";
      const ops::ExpertSource stored = {source_.matrix(name + "gate_proj", shared, hidden),
                                        source_.matrix(name + "up_proj", shared, hidden),
                                        source_.matrix(name + "down_proj", hidden, shared)};
      const Part part = width_part(shared, stored.down);
      const ops::ExpertSource taken = {take_rows(stored.gate, part), take_rows(stored.up, part),
                                       columns_of(stored.down, part)};
      mixer->experts = experts(prefix, mine, &taken);
      if (mixer->experts->shared_slices() == 0) {
        mixer->shared_gate_up = backend_.load_gate_up(taken.gate, taken.up);
        mixer->shared_down = backend_.load_matrix(std::span(&taken.down, 1));
      }
      release(stored);
      mixer->shared_gate = matrix({{prefix + "shared_expert_gate", 1}}, hidden);
    } else {
      mixer->experts = experts(prefix, mine, nullptr);
    }
    ops::MoeParams& params = mixer->params;
    params.router = mixer->router.get();
    params.experts = mixer->experts.get();
    params.first_expert = mine.begin;
    params.top_k = config_.top_k;
    params.renormalize = config_.renormalize;
    params.shared_gate_up = mixer->shared_gate_up.get();
    params.shared_down = mixer->shared_down.get();
    params.shared_gate = mixer->shared_gate.get();
    return mixer;
  }

  std::unique_ptr<ChannelMixer> dense(const std::string& prefix) {
    auto mixer = std::make_unique<DenseMlp>();
    const MatrixSource down = source_.matrix(prefix + "down_proj", config_.hidden, config_.intermediate);
    const Part part = width_part(config_.intermediate, down);
    mixer->gate_up = matrix(
        {{prefix + "gate_proj", config_.intermediate, {part}}, {prefix + "up_proj", config_.intermediate, {part}}},
        config_.hidden);
    mixer->down = projection_back(down, part);
    mixer->params.gate_up = mixer->gate_up.get();
    mixer->params.down = mixer->down.get();
    return mixer;
  }

  Part width_part(int64_t width, const MatrixSource& down) const {
    return width_of(width, shard_.rank(), shard_.ranks(), down);
  }

  WeightSource& source_;
  ops::Backend& backend_;
  const ModelConfig config_;
  const Shard shard_;
  Part heads_, kv_heads_, key_heads_, value_heads_;      // the rank's
  Part vocabulary_;                                      // of the head
  std::future<std::optional<MatrixSource>> draft_copy_;  // under way; not valid where it is made when it is needed
  std::unique_ptr<ops::Matrix> draft_head_;              // until there is an MTP head
};

}  // namespace

Decoder build_qwen3_5(WeightSource& source, ops::Backend& backend, const ModelOptions& options) {
  return Builder(source, backend, options.shard).build(options);
}

}  // namespace fourfold::model
