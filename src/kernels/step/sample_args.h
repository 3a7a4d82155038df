// Choosing tokens from logits, as ops/sampling.h defines it: arguments and launch shapes. Host and device,
// freestanding.
//
// Kernels of a step: sample_count counts the tokens of rows with penalties, where there are any; sample_tokens does
// everything else. Weights are summed in fixed point, so that no sum depends on its order: a row's token is a function
// of its logits and parameters alone.
#pragma once

#include "nvfp4/number.h"

namespace fourfold::step {

inline constexpr int kSampleThreads = 512;
inline constexpr int kSampleWarps = kSampleThreads / 32;
inline constexpr int kMostLogprobs = 20;  // beside the chosen token's
inline constexpr int kNotFinite = -1;     // instead of a token: a logit is NaN or infinite,
inline constexpr int kAllMasked = -2;     // or none may be chosen
inline constexpr int kNotTold = -3;       // what the host puts where it looks for a token
// SampleRow::given: its token is chosen; or was, by the launch before.
inline constexpr int kToBeChosen = -1, kChosenBefore = -2;

struct Bias {
  int token;
  float value;
};

// How a row's token is chosen. Ranges are of the tables in SampleArgs; -1 for a row of a table: none.
struct SampleRow {
  int row;       // of the logits
  int adjusted;  // likewise: where they are put as bias, masks and penalties leave them, if the row is drawn
  int place;     // in tokens, told and log-probabilities
  int given;     // 0 and more: its token, of which log-probabilities are wanted
  float temperature;
  float top_p;
  float min_p;
  int top_k;  // 0: off
  float repetition_penalty;
  float presence_penalty;
  float frequency_penalty;
  int defined;  // tokens [0, defined) exist, 1 .. vocabulary
  unsigned long long seed;
  long long index;  // output tokens before this one
  int bias_first, bias_count;
  int banned_first, banned_count;
  int mask;                      // row of `masks`
  int counts;                    // row of `counts`: the lane
  int draft_first, draft_count;  // output tokens since `counts`: the drafts on the rows before this one, in `drafts`
  int logprobs;                  // -1: not asked for; otherwise so many of the most probable tokens, too
};

// Tokens that have come to a row of counts: `count` of CountArgs::tokens from `first` on, and, if `choice` is not -1,
// the one that was chosen last with that number, if there was one.
struct CountedLane {
  int lane;
  int first, count;
  int choice;
};
struct CountArgs {
  int* counts;  // as SampleArgs has them
  long long counts_stride;
  const CountedLane* lanes;  // each once
  int count;
  const int* tokens;
  const int* chosen;  // SampleArgs::tokens of the choice before
};
inline constexpr int kCountThreads = 64;

// A token of the output is counted.
FOURFOLD_HD constexpr int counted_once_more(int count) { return count == 0 ? 2 : count + 1; }

// How tokens lie that a limit is looked for among: by the distance of a logit's key (moe::order_key) from the largest
// one's. Their number and, where a mass is looked for, their mass.
inline constexpr int kSampleBins = 1024;
struct SampleBins {
  unsigned long long mass[kSampleBins];
  unsigned count[kSampleBins];
};

struct SampleCandidate {
  unsigned key;
  int token;
};
// As many tokens are sorted, where a limit leaves no more than that.
inline constexpr int kSampleCandidates = 1024;

// Of one CTA's columns: what a draw can take.
struct SampleShare {
  unsigned long long mass;  // of tokens above the last key
  unsigned ties;            // tokens that have it
  unsigned unused;
};

// What the CTAs of a row tell each other. Zero when a launch begins and when it has ended, but for bins, shares and the
// list, which may hold anything.
struct SampleState {
  unsigned long long best;  // the key of what may be chosen first, and its token: key << 32 | ~token
  unsigned long long mass;  // of the model's own distribution, of its largest logit
  unsigned bad;             // a logit is not finite
  int arrived;              // CTAs, once for each time that they meet
  unsigned listed;
  unsigned unused;
  SampleShare shares[kSampleThreads];
  SampleCandidate list[kSampleCandidates];
  SampleBins bins[3];  // in turns
};

inline constexpr int kSampleSmem = 38 * 1024;  // of sample_tokens

struct SampleArgs {
  // [..][stride]. Rows with bias, masks or penalties have no log-probabilities: a second launch makes them, from what
  // was not adjusted (kChosenBefore).
  float* logits;
  long long stride;
  int rows;    // that are chosen from
  int splits;  // CTAs of a row, sample_splits(): all of them run at the same time
  const SampleRow* samples;
  const Bias* biases;
  const int* banned;
  const unsigned* masks;  // [..][mask_words]: bit t % 32 of word t / 32 allows token t
  long long mask_words;
  const int* counts;  // [..][counts_stride]: 0 not seen, or 1 + occurrences in the output
  long long counts_stride;
  const int* drafts;
  SampleState* states;  // [rows] where there are several splits
  int* tokens;          // [places], for the device
  int* told;            // likewise, for the host, which may see it when the launch has ended
  int* logprob_tokens;  // [places][1 + kMostLogprobs]: the row's own, then the most probable ones; null: nobody asks
  float* logprobs;      // likewise
};

// Whether the row's logits are adjusted.
FOURFOLD_HD constexpr bool adjusts(const SampleRow& s) {
  return s.bias_count > 0 || s.banned_count > 0 || s.mask >= 0 || s.counts >= 0;
}

// Grid of sample_tokens: splits x rows. Each CTA has an SM, since those of a row wait for each other; where there are
// more rows than SMs a row has one, which waits for nobody.
FOURFOLD_HD constexpr int sample_splits(int vocabulary, int rows, int sms) {
  const int room = sms / rows;
  const int most = (vocabulary + 4 * kSampleThreads - 1) / (4 * kSampleThreads);
  const int splits = room < most ? room : most;
  return splits < 1 ? 1 : splits > kSampleThreads ? kSampleThreads : splits;
}

}  // namespace fourfold::step
