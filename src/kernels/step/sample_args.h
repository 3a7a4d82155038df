// Choosing tokens from logits, as ops/sampling.h defines it: arguments and launch shapes. Host and device,
// freestanding.
//
// Kernels of a step: sample_count counts the tokens of rows with penalties, where there are any; sample_prepare makes
// of each row's logits what may be chosen from, and finds the largest; sample_choose draws. Weights are summed in fixed
// point, so that no sum depends on its order: a row's token is a function of its logits and parameters alone.
#pragma once

#include "nvfp4/number.h"

namespace fourfold::step {

inline constexpr int kSampleThreads = 512;
inline constexpr int kSampleWarps = kSampleThreads / 32;
inline constexpr int kMostLogprobs = 20;  // beside the chosen token's
inline constexpr int kNotFinite = -1;     // instead of a token: a logit is NaN or infinite,
inline constexpr int kAllMasked = -2;     // or none may be chosen

struct Bias {
  int token;
  float value;
};

// How a row's token is chosen. Ranges are of the tables in SampleArgs; -1 for a row of a table: none.
struct SampleRow {
  int row;  // of the logits
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

// What one CTA of sample_prepare found in its part of a row.
struct SamplePart {
  float largest;  // of what may be chosen
  int token;      // its first one
  float raw;      // the largest logit as the model gave it
  int bad;        // 1: a logit is not finite
};

struct SampleArgs {
  const float* logits;  // [rows][stride], as the model gave them
  // Likewise; of rows with bias, masks or penalties. May be `logits` where none of these asks for log-probabilities.
  float* adjusted;
  long long stride;
  int rows;    // that are chosen from
  int splits;  // CTAs of sample_prepare for a row
  const SampleRow* samples;
  const Bias* biases;
  const int* banned;
  const unsigned* masks;  // [..][mask_words]: bit t % 32 of word t / 32 allows token t
  long long mask_words;
  const int* counts;  // [..][counts_stride]: 0 not seen, or 1 + occurrences in the output
  long long counts_stride;
  const int* drafts;
  SamplePart* parts;    // [rows][splits]
  int* tokens;          // [rows]
  int* logprob_tokens;  // [rows][1 + kMostLogprobs]: the chosen one, then the most probable ones; null: nobody asks
  float* logprobs;      // likewise
};

// Whether the row's logits are adjusted.
FOURFOLD_HD constexpr bool adjusts(const SampleRow& s) {
  return s.bias_count > 0 || s.banned_count > 0 || s.mask >= 0 || s.counts >= 0;
}

// Grid of sample_prepare: splits x rows; of sample_choose: rows.
FOURFOLD_HD constexpr int sample_splits(int vocabulary, int rows, int sms) {
  const int wanted = (sms + rows - 1) / rows;
  const int most = (vocabulary + 4 * kSampleThreads - 1) / (4 * kSampleThreads);
  return wanted < most ? wanted : most;
}

}  // namespace fourfold::step
