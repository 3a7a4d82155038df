// Choosing tokens where ranks have columns of their own of the logits (sample_ranks.cuh): arguments and launch shapes.
// Host and device, freestanding.
#pragma once

#include "kernels/step/sample_args.h"

namespace fourfold::step {

// CTAs of a row's columns of a rank: the same on every rank, whatever its card and its share of the vocabulary.
FOURFOLD_HD constexpr int rank_splits(int vocabulary, int ranks) {
  constexpr int kMost = 32;
  const int wanted = (vocabulary / ranks + 4 * kSampleThreads - 1) / (4 * kSampleThreads);
  return wanted < 1 ? 1 : wanted < kMost ? wanted : kMost;
}

// What one CTA of sample_own_columns found in its part of a row.
struct SamplePart {
  float largest;  // of what may be chosen
  int token;      // its first one
  int bad;        // 1: a logit is not finite
  int unused;
};

// What ranks tell each other comes in words of 4 bytes, from each rank as many.
inline constexpr int kWordsOfPart = sizeof(SamplePart) / 4;

// A search goes down the bits of keys, eight at a time from above. Of a rank's columns that have what the search has
// found so far in front, by the next eight bits: how many they are, and of the search for top_p their masses.
inline constexpr int kRankBins = 256;
struct RankBins {
  unsigned long long mass[kRankBins];
  unsigned count[kRankBins];
};
inline constexpr int kWordsOfBins = sizeof(RankBins) / 4;

static_assert(sizeof(SampleShare) == sizeof(SamplePart));  // exchanged alike

// The token that was drawn, on its own rank; -1 on others. Four words, so that rows stay aligned.
struct RankTaken {
  int token;
  int unused[3];
};
inline constexpr int kWordsOfTaken = sizeof(RankTaken) / 4;

// Of one CTA's columns, of a row that asks for log-probabilities. A multiple of four words.
struct RankReport {
  unsigned long long mass;  // of the model's own distribution, of its largest logit
  float chosen;             // the chosen token's logit; on CTAs that do not have it minus infinity
  int count;
  float values[kMostLogprobs];  // the largest logits, `count` of them, in any order
  int tokens[kMostLogprobs];
};
inline constexpr int kWordsOfReport = sizeof(RankReport) / 4;
static_assert(kWordsOfReport % 4 == 0);

// What ranks know of a row, the same on all.
struct RankDraw {
  unsigned long long above;   // of the search under way: tokens above the prefix, in number or in mass
  unsigned long long target;  // of that search
  float largest;
  int drawn;      // 0: its token is known, or that it has none
  unsigned key;   // of the tokens that are left, as sample_detail::Cut
  unsigned ties;  // likewise; all ones: all tokens
  unsigned prefix;
};

// Of a rank that has columns [first, last) of the logits. Rows that ask for log-probabilities have nothing that adjusts
// their logits.
struct RankSampleArgs {
  float* logits;  // [rows][stride]; columns of drawn rows are adjusted in place
  long long stride;
  int first, last;
  const SampleRow* samples;
  const Bias* biases;
  const int* banned;
  const unsigned* masks;
  long long mask_words;
  const int* counts;  // of all tokens
  long long counts_stride;
  const int* drafts;
  int rank, ranks;
  int splits;         // CTAs of a row on each rank: rank_splits()
  SamplePart* parts;  // [rows][ranks][splits]
  int* tokens;        // [rows], as SampleArgs has them
  int* told;
  // Of rows that are drawn: `drawn` has `rows` of them.
  RankDraw* draws;      // [rows of `samples`]
  const int* drawn;     // [CTAs of the grid] rows of `samples`
  RankBins* bins;       // [drawn][ranks]; this rank's are zero in front of each sample_bins
  SampleShare* shares;  // [drawn][ranks][splits]
  RankTaken* taken;     // [drawn][ranks]
  int by_mass;          // the search: 0 for top_k, 1 for top_p
  int shift;            // of the bits that it looks at: 24, 16, 8, 0
  // Of rows that ask for log-probabilities: `reported` has `rows` of them.
  const int* reported;  // [CTAs of the grid] rows of `samples`
  RankReport* reports;  // [reported][ranks][splits]
  int* logprob_tokens;  // as SampleArgs has them
  float* logprobs;
};
inline constexpr int kReportSmem = 13 * 1024;  // of sample_report
inline constexpr int kRankJoinThreads = 32;

}  // namespace fourfold::step
