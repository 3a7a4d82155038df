// What a model computes for one whole text: `fourfold logits`, and the comparison with other implementations.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "model/model.h"

namespace fourfold::model {

struct TextLogitsOptions {
  int64_t chunk = 256;  // tokens computed at once; at most the model's max_step_tokens and max_logit_rows
  bool hidden = false;  // the residual stream after each layer, too
  bool mtp = false;     // the MTP head's logits, too; the model must have been loaded with it
  std::function<void(int64_t tokens)> progress;  // after each chunk: tokens computed
};

struct TextLogits {
  std::vector<float> logits;               // [tokens, vocabulary]
  std::vector<std::vector<float>> hidden;  // for each layer [tokens, hidden]; empty unless asked for
  std::vector<float> mtp_logits;           // [tokens - 1, vocabulary]: row t from hidden state t and token t + 1
};

// The tokens are one sequence from position 0, in caches made for it.
TextLogits compute_text_logits(Model& model, std::span<const int32_t> tokens, const TextLogitsOptions& options);

}  // namespace fourfold::model
