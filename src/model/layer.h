// What a decoder layer is made of: a token mixer (attention, Gated DeltaNet) and a channel mixer (mixture of experts,
// dense MLP) around a residual stream. A new model family adds mixers and a builder; nothing else changes.
#pragma once

#include <array>
#include <cstdint>
#include <memory>

#include "model/model.h"
#include "ops/cost.h"
#include "ops/ops.h"
#include "ops/step.h"

namespace fourfold::model {

// Activation memory that lives for one mixer call: tensors are taken from one buffer in order and given back all at
// once.
class Scratch {
 public:
  Scratch(ops::Backend& backend, int64_t elements);
  ops::Tensor take(int64_t rows, int64_t cols);
  void reset() { used_ = 0; }

  // What take(rows, cols) uses up, in elements.
  static int64_t padded(int64_t elements) { return (elements + 63) / 64 * 64; }

 private:
  std::unique_ptr<ops::Buffer> buffer_;
  ops::DType type_;
  int64_t elements_;
  int64_t used_ = 0;
};

struct StepContext {
  ops::Backend& backend;
  Caches& caches;
  Scratch& scratch;
};

// x: [T, hidden], normalised; out: [T, hidden], added to the residual by the caller.
class TokenMixer {
 public:
  virtual ~TokenMixer() = default;
  virtual void forward(StepContext& context, const ops::Tensor& x, const ops::Tensor& out) = 0;
  // Only what forward() does to the caches. The mixer of an MTP head must have it.
  virtual void append(StepContext& context, const ops::Tensor& x) = 0;
  virtual int64_t scratch_elements(int64_t tokens) const = 0;
  // What forward() ends with.
  virtual const ops::Matrix& last_product() const = 0;
  // For one sequence of `tokens` new tokens after `context` cached ones.
  virtual ops::Cost cost(int64_t tokens, int64_t context) const = 0;
};

class ChannelMixer {
 public:
  virtual ~ChannelMixer() = default;
  virtual void forward(StepContext& context, const ops::Tensor& x, const ops::Tensor& out) = 0;
  // Of a mixture of experts, otherwise null.
  virtual const ops::MoeParams* routed() const { return nullptr; }
  virtual ops::Cost cost(int64_t tokens) const = 0;
};

struct Layer {
  ops::Vector input_norm;  // before the token mixer
  ops::Vector post_norm;   // before the channel mixer
  std::unique_ptr<TokenMixer> token_mixer;
  std::unique_ptr<ChannelMixer> channel_mixer;
};

struct MtpHead {
  ops::Vector embedding_norm, hidden_norm, final_norm;
  std::unique_ptr<ops::Matrix> fc;  // [hidden, 2 x hidden]: embedding half first
  // What drafts are chosen with, the rank's rows; null: the decoder's head (draft_head.h).
  std::unique_ptr<ops::Matrix> head;
  // Its first rows, or the decoder's head's: the stepper's lists of tokens (StepLimits::draft_lists).
  std::array<std::unique_ptr<ops::Matrix>, ops::kDraftLists> lists;
  Layer layer;
};

// Everything a decoder-only model holds.
struct Decoder {
  ModelConfig config;
  std::unique_ptr<ops::Matrix> embedding;
  std::vector<Layer> layers;
  ops::Vector final_norm;
  std::unique_ptr<ops::Matrix> head;  // the rank's rows of it, from first_token on
  int64_t first_token = 0;
  std::unique_ptr<MtpHead> mtp;  // null when absent or not loaded
  ops::KvCacheShape kv;          // pages and page_size are left to make_caches()
  ops::StateCacheShape states;   // slots likewise
};

std::unique_ptr<Model> make_decoder_model(Decoder decoder, std::shared_ptr<ops::Backend> backend, ModelOptions options);

// Qwen3.5 / Qwen3.6, mixture of experts and dense. Spec: docs/model.md.
Decoder build_qwen3_5(WeightSource& source, ops::Backend& backend, const ModelOptions& options);

}  // namespace fourfold::model
