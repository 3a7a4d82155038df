// Choosing the next token from a row of logits, in the order that SamplingParams documents:
//
//   1. logit bias, then masks (vocabulary padding, banned tokens)
//   2. repetition, presence and frequency penalties
//   3. temperature (0: the largest logit, ties to the lower id, and done)
//   4. top_k: the k largest, ties to the lower id
//   5. top_p: of what is left, the shortest prefix in descending order with at least top_p of the probability
//   6. min_p: of what is left, tokens with at least min_p x the largest probability
//   7. a draw proportional to the probabilities
//
// A draw uses one number, a function of the request's seed and the index of the output token alone, so that a request
// gives the same tokens alone, in a batch and after it was preempted. One Sampler serves all requests of a thread; it
// only holds scratch memory.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "engine/engine.h"

namespace fourfold::engine {

// What the penalties need to know of prompt and output.
class TokenHistory {
 public:
  // `needed` false: the request has no penalties, and nothing is recorded.
  TokenHistory(std::span<const int32_t> prompt, bool needed);
  static bool needed_by(const SamplingParams& params);

  void add_output(int32_t token);
  // Token -> occurrences in the output (0: only in the prompt).
  const std::unordered_map<int32_t, int32_t>& seen() const { return seen_; }

 private:
  bool needed_;
  std::unordered_map<int32_t, int32_t> seen_;
};

struct Sampled {
  int32_t token = -1;
  // As Event::logprobs: of the model's own distribution over the defined tokens, before every step above.
  std::vector<TokenLogprob> logprobs;
};

class Sampler {
 public:
  explicit Sampler(int64_t vocabulary);

  // `logits`: [vocabulary], overwritten. `index`: how many output tokens came before. An Error when a logit of a
  // defined token is not finite, or when no token may be sampled.
  Sampled sample(std::span<float> logits, const Request& request, const TokenHistory& history, uint64_t seed,
                 int64_t index);

 private:
  struct Candidate {
    float value;  // a logit or a weight
    int32_t token;
  };
  // Descending by value, ties by ascending id: a strict total order.
  static bool better(const Candidate& a, const Candidate& b) {
    return a.value > b.value || (a.value == b.value && a.token < b.token);
  }
  void select_largest(std::span<const float> logits, int64_t count, std::vector<Candidate>& out) const;
  double exponentiate(std::span<const float> logits, float largest, float inverse_temperature);
  void mask_outside_nucleus(int64_t n, double top_p, double total);
  static void keep_nucleus(std::vector<Candidate>& candidates, double target);
  size_t draw(size_t count, double uniform);

  int64_t vocabulary_;
  std::vector<float> weights_;  // relative to the most probable token's, which is 1
  std::vector<float> raw_;
  std::vector<Candidate> candidates_;
  std::vector<double> histogram_, block_sums_;
};

}  // namespace fourfold::engine
