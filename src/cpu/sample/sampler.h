// Choosing a token from a row of logits, in the order that ops/sampling.h documents. One Sampler serves all lanes that
// a thread works for; it only holds scratch memory, all of it made by the constructor.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "ops/sampling.h"

namespace fourfold::cpu {

// What the penalties need to know of prompt and output: for each token of the vocabulary 0 (not seen), or 1 + its
// occurrences in the output. Empty when no penalty asks for it.
class TokenCounts {
 public:
  void clear() { counts_.clear(); }
  void start(int64_t vocabulary) { counts_.assign(static_cast<size_t>(vocabulary), 0); }
  bool active() const { return !counts_.empty(); }
  void add_prompt(int32_t token) {
    int32_t& count = counts_[static_cast<size_t>(token)];
    if (count == 0) count = 1;
  }
  void add_output(int32_t token) {
    int32_t& count = counts_[static_cast<size_t>(token)];
    count = count == 0 ? 2 : count + 1;
  }
  std::span<const int32_t> counts() const { return counts_; }

 private:
  std::vector<int32_t> counts_;
};

// What a choice depends on beside the logits.
struct Choice {
  const ops::SamplingParams& params;
  uint64_t seed = 0;
  int64_t index = 0;                        // output tokens before this one
  int32_t defined_tokens = 0;               // > 0: ids from here on are never chosen
  std::span<const int32_t> banned = {};     // never chosen
  std::span<const int32_t> too_early = {};  // likewise: end tokens before min_output
  std::span<const uint32_t> mask = {};      // empty: any; otherwise bit t % 32 of word t / 32 allows token t
  std::span<const int32_t> counts = {};     // TokenCounts::counts()
  int32_t given = -1;                       // not -1: this token stands there, and only log-probabilities are wanted
};

struct Chosen {
  int32_t token = -1;
  std::vector<ops::TokenLogprob> logprobs;  // params.logprobs >= 0: the chosen one first, then the most probable ones
};

class Sampler {
 public:
  explicit Sampler(int64_t vocabulary);

  // `logits`: [vocabulary], overwritten. An Error when a logit of a defined token is not finite, or when no token may
  // be chosen.
  Chosen choose(std::span<float> logits, const Choice& choice);

  // Log-probabilities of `token` and of the `count` most probable ones, in that order; logits stay as they are. Of the
  // defined tokens only (0: all). An Error when a logit is not finite.
  std::vector<ops::TokenLogprob> logprobs(std::span<const float> logits, int32_t defined_tokens, int32_t token,
                                          int32_t count);

  // The largest logit's token, ties to the lower id; NaN loses against anything.
  static int32_t most_probable(std::span<const float> logits, int32_t defined_tokens);

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
  void add_most_probable(std::span<const float> logits, float largest, double log_total, int32_t count,
                         std::vector<ops::TokenLogprob>& out);
  double exponentiate(std::span<const float> logits, float largest, float inverse_temperature);
  void mask_outside_nucleus(int64_t n, double top_p, double total);
  static void keep_nucleus(std::vector<Candidate>& candidates, double target);
  size_t draw(size_t count, double uniform);

  int64_t vocabulary_;
  std::vector<float> weights_;  // relative to the most probable token's, which is 1
  std::vector<float> raw_;      // the model's logits, when log-probabilities are asked for
  std::vector<Candidate> candidates_;
  std::vector<double> histogram_, block_sums_;
};

}  // namespace fourfold::cpu
