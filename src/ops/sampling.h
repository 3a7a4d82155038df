// How the next token of a sequence is chosen, whichever backend does it.
//
// In this order, each step on what the one before left:
//   1. logit bias, then masks (vocabulary padding, banned tokens, a constraint's bits, end tokens before min_tokens)
//   2. repetition, presence and frequency penalties
//   3. temperature (0: the largest logit, ties to the lower id, and done)
//   4. top_k: the k largest, ties to the lower id
//   5. top_p: of what is left, the shortest prefix in descending order with at least top_p of the probability
//   6. min_p: of what is left, tokens with at least min_p x the largest probability
//   7. a draw proportional to the probabilities
//
// A draw uses one number, a function of the seed and the index of the output token alone (draw_at()), so that a request
// gives the same tokens alone, in a batch, after a preemption and with drafts. A draft is accepted exactly when it is
// the token that this procedure chooses on its row: drafted output is the undrafted output, token by token, and since a
// draft is one token and no distribution, it is accepted with the probability that the model gives it, which no other
// lossless rule can better.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "base/random.h"

namespace fourfold::ops {

inline constexpr int32_t kMaxLogprobs = 20;

struct SamplingParams {
  float temperature = 1.0f;         // 0 .. 10
  int32_t top_k = 0;                // 0: off
  float top_p = 1.0f;               // (0, 1]
  float min_p = 0.0f;               // [0, 1): drop tokens below min_p x the largest probability
  float repetition_penalty = 1.0f;  // (0, 10]: logits of tokens of prompt or output divided (positive) or multiplied
  float presence_penalty = 0.0f;    // [-10, 10]: subtracted once from tokens seen in the output
  float frequency_penalty = 0.0f;   // [-10, 10]: subtracted once per occurrence in the output
  std::vector<std::pair<int32_t, float>> logit_bias;  // added; each in [-100, 100]
  std::optional<uint64_t> seed;  // unset: a fresh one; the request's tokens depend on its seed alone, not on the batch
  // >= 0: report the chosen token's log-probability and this many of the most probable tokens (at most
  // kMaxLogprobs), of the model's own distribution: before bias, penalties and temperature.
  int32_t logprobs = -1;

  bool penalized() const { return repetition_penalty != 1.0f || presence_penalty != 0.0f || frequency_penalty != 0.0f; }
};

struct TokenLogprob {
  int32_t token = 0;
  float logprob = 0;
};

// The number in [0, 1) that draws output token `index`. The seed is mixed first: streams that start at neighbouring
// seeds must not be shifted copies of each other.
inline double draw_at(uint64_t seed, int64_t index) {
  const uint64_t start = Random(seed ^ 0x6a09e667f3bcc909ull).next();
  return Random(start ^ Random(static_cast<uint64_t>(index)).next()).uniform();
}

}  // namespace fourfold::ops
