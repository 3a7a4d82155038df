// The forward pass of a decoder-only model, whatever its mixers are.
#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/math.h"
#include "model/layer.h"

namespace fourfold::model {

int64_t ModelConfig::attention_layers() const {
  return std::count(layer_kinds.begin(), layer_kinds.end(), LayerKind::kAttention);
}

int64_t ModelConfig::delta_net_layers() const {
  return std::count(layer_kinds.begin(), layer_kinds.end(), LayerKind::kDeltaNet);
}

Scratch::Scratch(ops::Backend& backend, int64_t elements) : type_(backend.activation_type()), elements_(elements) {
  const ops::Tensor probe{nullptr, type_, 0, 0, 0};
  buffer_ = backend.allocate(std::max<int64_t>(elements, 1) * probe.element_bytes());
}

ops::Tensor Scratch::take(int64_t rows, int64_t cols) {
  ops::Tensor tensor{nullptr, type_, rows, cols, cols};
  tensor.data = static_cast<char*>(buffer_->data()) + used_ * tensor.element_bytes();
  used_ += padded(rows * cols);
  FF_ASSERT(used_ <= elements_);
  return tensor;
}

namespace {

class DecoderModel : public Model {
 public:
  DecoderModel(Decoder decoder, std::shared_ptr<ops::Backend> backend, ModelOptions options);

  const ModelConfig& config() const override { return decoder_.config; }
  ops::Backend& backend() override { return *backend_; }
  const ModelOptions& options() const override { return options_; }
  Caches make_caches(int64_t pages, int64_t page_size, int64_t slots) override;
  int64_t cache_bytes_per_token() const override;
  int64_t state_bytes_per_slot() const override;

  void forward(const ops::Batch& batch, Caches& caches, const LayerObserver& observer) override;
  ops::Tensor logits() const override { return logits_.slice_rows(0, logit_count_); }
  ops::Tensor hidden() const override { return hidden_.slice_rows(0, token_count_); }
  bool has_mtp() const override { return decoder_.mtp != nullptr; }
  void forward_mtp(const ops::Batch& batch, const ops::Tensor& hidden, Caches& caches) override;
  ops::Tensor mtp_logits() const override { return mtp_logits_.slice_rows(0, mtp_logit_count_); }
  ops::Tensor mtp_hidden() const override { return mtp_hidden_.slice_rows(0, mtp_token_count_); }
  std::unique_ptr<ops::Stepper> make_stepper(const ops::StepLimits& limits, Caches& caches) override;
  ops::Cost cost(int64_t tokens, int64_t context, int64_t logit_rows) const override;

 private:
  ops::Tensor allocate(int64_t rows, int64_t cols);  // of the activation type
  ops::Tensor allocate_floats(int64_t rows, int64_t cols);
  void check(const ops::Batch& batch) const;
  // residual and x hold the layer's input before and after its norm; afterwards the residual after the layer, which
  // `left` uses, and next that residual under next_norm.
  void run_layer(StepContext& context, const Layer& layer, const ops::Tensor& residual, const ops::Tensor& x,
                 const ops::Tensor& delta, const ops::Vector& next_norm, const ops::Tensor& next,
                 ops::Residual left = ops::Residual::kForSums);
  // residual += delta, which each rank has a part of; next = the residual under `norm`.
  void add_norm(const ops::Tensor& residual, const ops::Tensor& delta, const ops::Vector& norm, const ops::Tensor& next,
                ops::Residual left);
  // The head; every rank gets all logits.
  void score(const ops::Tensor& hidden, const ops::Tensor& logits) { score(*decoder_.head, hidden, logits); }
  void score(const ops::Matrix& head, const ops::Tensor& hidden, const ops::Tensor& logits);
  const ops::Matrix& draft_head() const { return decoder_.mtp->head ? *decoder_.mtp->head : *decoder_.head; }
  void project(const ops::Batch& batch, const ops::Tensor& hidden, const ops::Tensor& logits);
  // The layers on `tokens` rows; their output under the final norm goes to hidden_.
  void run_trunk(int64_t tokens, Caches& caches, const LayerObserver& observer);
  // residual = what the MTP head makes of the tokens that follow the rows and of `hidden`; before its layer.
  void pair(const ops::Tensor& hidden, const ops::Tensor& residual);
  void step(const ops::StepShape& shape, ops::StepScope& scope, Caches& caches);
  void draft(const ops::StepShape& shape, ops::StepScope& scope, Caches& caches);

  Decoder decoder_;
  std::shared_ptr<ops::Backend> backend_;
  ModelOptions options_;
  std::vector<std::unique_ptr<ops::Buffer>> buffers_;
  std::unique_ptr<Scratch> scratch_;
  ops::Tensor residual_, x_, delta_, hidden_, gathered_, logits_;
  ops::Tensor mtp_pair_, mtp_hidden_, mtp_logits_, draft_residual_;
  int64_t token_count_ = 0, logit_count_ = 0, mtp_token_count_ = 0, mtp_logit_count_ = 0;
};

DecoderModel::DecoderModel(Decoder decoder, std::shared_ptr<ops::Backend> backend, ModelOptions options)
    : decoder_(std::move(decoder)), backend_(std::move(backend)), options_(std::move(options)) {
  const int64_t tokens = options_.max_step_tokens;
  const int64_t hidden = decoder_.config.hidden;
  residual_ = allocate_floats(tokens, hidden);
  x_ = allocate(tokens, hidden);
  delta_ = allocate(tokens, hidden);
  hidden_ = allocate(tokens, hidden);
  gathered_ = allocate(options_.max_logit_rows, hidden);
  logits_ = allocate_floats(options_.max_logit_rows, decoder_.config.vocabulary);
  int64_t elements = 0;
  for (const Layer& layer : decoder_.layers) elements = std::max(elements, layer.token_mixer->scratch_elements(tokens));
  if (decoder_.mtp) {
    elements = std::max(elements, decoder_.mtp->layer.token_mixer->scratch_elements(tokens));
    mtp_pair_ = allocate(tokens, 2 * hidden);
    mtp_hidden_ = allocate(tokens, hidden);
    mtp_logits_ = allocate_floats(options_.max_logit_rows, decoder_.config.vocabulary);
    draft_residual_ = allocate_floats(std::min(tokens, options_.max_logit_rows), hidden);
  }
  scratch_ = std::make_unique<Scratch>(*backend_, elements);
  const auto expect_routing = [&](const Layer& layer) {
    const ops::MoeParams* params = layer.channel_mixer->routed();
    if (params != nullptr) backend_->expect_routing(layer.token_mixer->last_product(), layer.post_norm, *params);
  };
  for (const Layer& layer : decoder_.layers) expect_routing(layer);
  if (decoder_.mtp) expect_routing(decoder_.mtp->layer);
}

ops::Tensor DecoderModel::allocate(int64_t rows, int64_t cols) {
  const ops::Tensor probe{nullptr, backend_->activation_type(), 0, 0, 0};
  buffers_.push_back(backend_->allocate(rows * cols * probe.element_bytes()));
  return backend_->tensor(*buffers_.back(), rows, cols);
}

ops::Tensor DecoderModel::allocate_floats(int64_t rows, int64_t cols) {
  buffers_.push_back(backend_->allocate(rows * cols * 4));
  return ops::Backend::floats(*buffers_.back(), rows, cols);
}

Caches DecoderModel::make_caches(int64_t pages, int64_t page_size, int64_t slots) {
  Caches caches;
  if (decoder_.kv.layers > 0) {
    ops::KvCacheShape shape = decoder_.kv;
    shape.pages = pages;
    shape.page_size = page_size;
    caches.kv = backend_->make_kv_cache(shape);
  }
  if (decoder_.states.layers > 0) {
    ops::StateCacheShape shape = decoder_.states;
    shape.slots = slots;
    caches.states = backend_->make_state_cache(shape);
  }
  return caches;
}

int64_t DecoderModel::cache_bytes_per_token() const {
  return 2 * decoder_.kv.layers * decoder_.kv.kv_heads * decoder_.kv.head_dim * backend_->kv_element_bytes();
}

int64_t DecoderModel::state_bytes_per_slot() const {
  const ops::StateCacheShape& shape = decoder_.states;
  const int64_t state = shape.value_heads * shape.key_dim * shape.value_dim;
  return shape.layers == 0 ? 0 : 4 * shape.layers * (state + (shape.conv_taps - 1) * shape.conv_channels());
}

void DecoderModel::check(const ops::Batch& batch) const {
  FF_ASSERT(batch.size() > 0 && batch.size() <= options_.max_step_tokens);
  FF_ASSERT(static_cast<int64_t>(batch.logit_rows.size()) <= options_.max_logit_rows);
  int64_t row = 0;
  for (const ops::Sequence& sequence : batch.sequences) {
    FF_ASSERT(sequence.first == row && sequence.count > 0);
    row += sequence.count;
  }
  FF_ASSERT(row <= batch.size());  // the rest is padding
  for (const int32_t token : batch.tokens.first(static_cast<size_t>(row))) {
    FF_ASSERT(token >= 0 && token < decoder_.config.vocabulary);
  }
}

void DecoderModel::run_layer(StepContext& context, const Layer& layer, const ops::Tensor& residual,
                             const ops::Tensor& x, const ops::Tensor& delta, const ops::Vector& next_norm,
                             const ops::Tensor& next, ops::Residual left) {
  scratch_->reset();
  layer.token_mixer->forward(context, x, delta);
  add_norm(residual, delta, layer.post_norm, x, left);
  scratch_->reset();
  layer.channel_mixer->forward(context, x, delta);
  add_norm(residual, delta, next_norm, next, left);
}

void DecoderModel::add_norm(const ops::Tensor& residual, const ops::Tensor& delta, const ops::Vector& norm,
                            const ops::Tensor& next, ops::Residual left) {
  const float eps = decoder_.config.norm_eps;
  if (options_.shard.ranks() == 1) return backend_->add_rms_norm(residual, delta, norm, eps, next);
  backend_->reduce_add_rms_norm(residual, delta, norm, eps, next, left);
}

void DecoderModel::score(const ops::Matrix& head, const ops::Tensor& hidden, const ops::Tensor& logits) {
  const int64_t first = decoder_.first_token;
  const ops::Tensor mine = logits.slice_cols(first, first + head.rows());
  backend_->linear(hidden, head, mine);
  if (options_.shard.ranks() > 1) backend_->gather_columns(mine, logits);
}

void DecoderModel::project(const ops::Batch& batch, const ops::Tensor& hidden, const ops::Tensor& logits) {
  const auto rows = static_cast<int64_t>(batch.logit_rows.size());
  if (rows == 0) return;
  const ops::Tensor gathered = gathered_.slice_rows(0, rows);
  backend_->gather_rows(hidden, batch.logit_rows, gathered);
  score(gathered, logits.slice_rows(0, rows));
}

void DecoderModel::run_trunk(int64_t tokens, Caches& caches, const LayerObserver& observer) {
  const ops::Tensor residual = residual_.slice_rows(0, tokens);
  const ops::Tensor x = x_.slice_rows(0, tokens);
  const ops::Tensor delta = delta_.slice_rows(0, tokens);
  // The last norm's output is all that goes on from here.
  const ops::Residual left = observer ? ops::Residual::kWhole : ops::Residual::kForSums;
  token_count_ = tokens;
  StepContext context{*backend_, caches, *scratch_};
  backend_->embed(*decoder_.embedding, residual);
  backend_->rms_norm(residual, decoder_.layers.front().input_norm, decoder_.config.norm_eps, x);
  for (size_t i = 0; i < decoder_.layers.size(); ++i) {
    const bool last = i + 1 == decoder_.layers.size();
    run_layer(context, decoder_.layers[i], residual, x, delta,
              last ? decoder_.final_norm : decoder_.layers[i + 1].input_norm, last ? hidden() : x, left);
    if (observer) observer(static_cast<int64_t>(i), residual);
  }
}

void DecoderModel::forward(const ops::Batch& batch, Caches& caches, const LayerObserver& observer) {
  check(batch);
  logit_count_ = static_cast<int64_t>(batch.logit_rows.size());
  backend_->begin_step(batch);
  run_trunk(batch.size(), caches, observer);
  project(batch, hidden(), logits_);
}

void DecoderModel::pair(const ops::Tensor& hidden, const ops::Tensor& residual) {
  const MtpHead& mtp = *decoder_.mtp;
  const float eps = decoder_.config.norm_eps;
  const ops::Tensor embedded = delta_.slice_rows(0, residual.rows);
  const ops::Tensor both = mtp_pair_.slice_rows(0, residual.rows);
  backend_->embed(*decoder_.embedding, embedded);
  backend_->rms_norm(embedded, mtp.embedding_norm, eps, both.slice_cols(0, hidden.cols));
  backend_->rms_norm(hidden, mtp.hidden_norm, eps, both.slice_cols(hidden.cols, 2 * hidden.cols));
  backend_->linear(both, *mtp.fc, residual);
}

void DecoderModel::forward_mtp(const ops::Batch& batch, const ops::Tensor& hidden, Caches& caches) {
  FF_ASSERT(has_mtp());
  check(batch);
  FF_ASSERT(hidden.rows == batch.size() && hidden.cols == decoder_.config.hidden);
  const MtpHead& mtp = *decoder_.mtp;
  const int64_t tokens = batch.size();
  const ops::Tensor residual = residual_.slice_rows(0, tokens);
  const ops::Tensor x = x_.slice_rows(0, tokens);
  mtp_token_count_ = tokens;
  mtp_logit_count_ = static_cast<int64_t>(batch.logit_rows.size());

  StepContext context{*backend_, caches, *scratch_};
  backend_->begin_step(batch);
  pair(hidden, residual);
  backend_->rms_norm(residual, mtp.layer.input_norm, decoder_.config.norm_eps, x);
  run_layer(context, mtp.layer, residual, x, delta_.slice_rows(0, tokens), mtp.final_norm, mtp_hidden());
  project(batch, mtp_hidden(), mtp_logits_);
}

std::unique_ptr<ops::Stepper> DecoderModel::make_stepper(const ops::StepLimits& limits, Caches& caches) {
  FF_ASSERT(limits.rows <= options_.max_step_tokens && limits.logit_rows <= options_.max_logit_rows);
  FF_ASSERT(limits.vocabulary == decoder_.config.vocabulary);
  if (limits.drafts > 0 && !has_mtp()) fail("drafts: the model was loaded without an MTP head");
  if (limits.drafts > 0) FF_ASSERT(limits.lanes <= draft_residual_.rows);
  for (size_t i = 0; i < limits.draft_lists.size() && limits.drafts > 0; ++i) {
    const int64_t tokens = limits.draft_lists[i];
    FF_ASSERT(tokens == 0 || options_.shard.ranks() == 1);
    decoder_.mtp->lists[i] = tokens == 0 ? nullptr : backend_->first_rows(draft_head(), tokens);
  }
  backend_->reserve({limits.rows, limits.lanes, limits.context, limits.page_size});
  return backend_->make_stepper(limits, caches.kv.get(), caches.states.get(),
                                [this, &caches](const ops::StepShape& shape, ops::StepScope& scope) {
                                  const std::shared_ptr<ranks::Member>& member = options_.shard.member;
                                  try {
                                    step(shape, scope, caches);
                                  } catch (const std::exception& error) {  // nobody waits for this rank any more
                                    if (member != nullptr) member->group().fail(member->rank(), error.what());
                                    throw;
                                  }
                                });
}

void DecoderModel::step(const ops::StepShape& shape, ops::StepScope& scope, Caches& caches) {
  scope.begin_trunk();
  run_trunk(shape.rows, caches, {});
  while (const int64_t reported = scope.begin_report()) {
    const ops::Tensor rows = gathered_.slice_rows(0, reported), of_rows = logits_.slice_rows(0, reported);
    scope.gather_reported(hidden(), rows);
    score(rows, of_rows);
    scope.report(of_rows);
  }
  const ops::Tensor logits = logits_.slice_rows(0, shape.logit_rows);
  if (shape.logit_rows > 0) {
    const ops::Tensor rows = gathered_.slice_rows(0, shape.logit_rows);
    scope.gather_logit_rows(hidden(), rows);
    score(rows, logits);
  }
  scope.choose(logits);
  if (shape.feed_drafter) draft(shape, scope, caches);
}

// The MTP head has one layer, so its keys and values depend on its inputs alone: they are computed for every row, and
// the rest of the layer for the rows that something is drafted from.
void DecoderModel::draft(const ops::StepShape& shape, ops::StepScope& scope, Caches& caches) {
  const MtpHead& mtp = *decoder_.mtp;
  const float eps = decoder_.config.norm_eps;
  StepContext context{*backend_, caches, *scratch_};
  scope.begin_feed();
  const ops::Tensor fed = residual_.slice_rows(0, shape.rows);
  pair(hidden(), fed);
  backend_->rms_norm(fed, mtp.layer.input_norm, eps, x_.slice_rows(0, shape.rows));
  scratch_->reset();
  mtp.layer.token_mixer->append(context, x_.slice_rows(0, shape.rows));
  for (int64_t pass = 0; pass < shape.drafts; ++pass) {
    const int64_t rows = scope.begin_draft(pass);
    if (rows == 0) return;
    const ops::Tensor residual = draft_residual_.slice_rows(0, rows);
    const ops::Tensor hidden = mtp_hidden_.slice_rows(0, rows);
    if (pass == 0) {
      scope.gather_ends(fed, residual);
    } else {
      pair(hidden, residual);
    }
    const ops::Tensor x = x_.slice_rows(0, rows);
    backend_->rms_norm(residual, mtp.layer.input_norm, eps, x);
    run_layer(context, mtp.layer, residual, x, delta_.slice_rows(0, rows), mtp.final_norm, hidden);
    ops::Tensor logits = mtp_logits_.slice_rows(0, rows);
    if (shape.draft_list == 0) {
      score(draft_head(), hidden, logits);
    } else {
      const ops::Matrix& list = *mtp.lists[static_cast<size_t>(shape.draft_list) - 1];
      logits.cols = logits.stride = list.rows();
      backend_->linear(hidden, list, logits);
    }
    scope.draft(pass, logits);
  }
}

ops::Cost DecoderModel::cost(int64_t tokens, int64_t context, int64_t logit_rows) const {
  const ModelConfig& config = decoder_.config;
  ops::Cost total;
  for (const Layer& layer : decoder_.layers) {
    total += layer.token_mixer->cost(tokens, context);
    total += layer.channel_mixer->cost(tokens);
    total.bytes += 4.0 * static_cast<double>(2 * config.hidden);  // the two norms
  }
  total.bytes += 4.0 * static_cast<double>(config.hidden);
  // one embedding row per token
  total.bytes += static_cast<double>(tokens) * static_cast<double>(decoder_.embedding->bytes()) /
                 static_cast<double>(config.vocabulary);
  const ops::Matrix& head = *decoder_.head;
  if (logit_rows > 0) total += ops::linear_cost(logit_rows, head.rows(), head.columns(), head.bytes());
  return total;
}

}  // namespace

std::unique_ptr<Model> make_decoder_model(Decoder decoder, std::shared_ptr<ops::Backend> backend,
                                          ModelOptions options) {
  return std::make_unique<DecoderModel>(std::move(decoder), std::move(backend), std::move(options));
}

std::unique_ptr<Model> load_model(WeightSource& source, std::shared_ptr<ops::Backend> backend, ModelOptions options) {
  // One family so far; a second one adds a row here, keyed by config().model_type.
  source.read_in_place(!backend->gpu());
  Decoder decoder = build_qwen3_5(source, *backend, options);
  source.finish();
  return make_decoder_model(std::move(decoder), std::move(backend), std::move(options));
}

}  // namespace fourfold::model
