// A loaded model and its forward pass.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "model/config.h"
#include "model/shard.h"
#include "model/weight_source.h"
#include "ops/cost.h"
#include "ops/ops.h"
#include "ops/step.h"

namespace fourfold::model {

struct ModelOptions {
  int64_t max_step_tokens = 512;                                // rows of the activation buffers
  int64_t max_logit_rows = 512;                                 // rows whose logits one step can return
  bool mtp = false;                                             // load the MTP head when the checkpoint has one
  std::function<void(int64_t loaded, int64_t total)> progress;  // layers, while loading
  Shard shard;                                                  // which part of the model; docs/ranks.md
};

// The caches of all sequences: pages of keys and values, slots of recurrent state. Null when the model has no such
// layer.
struct Caches {
  std::unique_ptr<ops::KvCache> kv;
  std::unique_ptr<ops::StateCache> states;
};

// Called with the residual stream after each layer, for tests and `fourfold logits --hidden`.
using LayerObserver = std::function<void(int64_t layer, const ops::Tensor& residual)>;

class Model {
 public:
  virtual ~Model() = default;

  virtual const ModelConfig& config() const = 0;
  virtual ops::Backend& backend() = 0;
  virtual const ModelOptions& options() const = 0;

  virtual Caches make_caches(int64_t pages, int64_t page_size, int64_t slots) = 0;
  virtual int64_t cache_bytes_per_token() const = 0;  // keys and values, all attention layers
  virtual int64_t state_bytes_per_slot() const = 0;

  // Runs the trunk on the batch. Afterwards logits() has a row for each of batch.logit_rows, and hidden() the output of
  // the final norm for every token (what the head and the MTP head read).
  virtual void forward(const ops::Batch& batch, Caches& caches, const LayerObserver& observer = {}) = 0;
  virtual ops::Tensor logits() const = 0;  // [logit rows, vocabulary]
  virtual ops::Tensor hidden() const = 0;  // [tokens, hidden]

  // Runs the MTP head: row t pairs the embedding of batch.tokens[t] (the token after position t) with `hidden` row t of
  // the trunk, at the batch's positions. Afterwards mtp_logits() has a row for each of batch.logit_rows (predicting the
  // token after batch.tokens[t]) and mtp_hidden() what recursive drafting feeds back as `hidden`.
  virtual bool has_mtp() const = 0;
  virtual void forward_mtp(const ops::Batch& batch, const ops::Tensor& hidden, Caches& caches) = 0;
  virtual ops::Tensor mtp_logits() const = 0;
  virtual ops::Tensor mtp_hidden() const = 0;

  // Steps whose body is this model: trunk, sampling, and with limits.drafts the MTP head. The caches must have been
  // made by this model, and outlive the stepper with it; the model must not be used otherwise while a step is under
  // way.
  virtual std::unique_ptr<ops::Stepper> make_stepper(const ops::StepLimits& limits, Caches& caches) = 0;

  // What the operations of forward() on this batch take (ops::Backend::time_operations); of several ranks the first's.
  virtual std::optional<ops::OperationTimes> time_forward(const ops::Batch& batch, Caches& caches) {
    return backend().time_operations([&] { forward(batch, caches); });
  }

  // Floors of one step: bytes read from memory and flops, with `tokens` new tokens after `context` cached ones in one
  // sequence, logits for `logit_rows`. For MoE layers the expected number of distinct experts under uniform routing.
  virtual ops::Cost cost(int64_t tokens, int64_t context, int64_t logit_rows) const = 0;
};

// Takes all weights from the source (and calls its finish()).
std::unique_ptr<Model> load_model(WeightSource& source, std::shared_ptr<ops::Backend> backend, ModelOptions options);

}  // namespace fourfold::model
