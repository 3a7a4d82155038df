// Which tokens drafts are chosen from: all of the vocabulary, or a list of its first ones.
//
// A drafting pass reads the whole head for one row of a sequence; of the first half of it, half. Tokens behind a list
// are never drafted from it, and a draft that misses loses those behind it as well; answers stay what they are, as
// every draft is verified. A tokenizer of merges has numbered its tokens by about how often they came in what it
// learnt from, so that the languages that were most of that hardly use the last ones, and others do all the time.
// So each sequence's own text decides: how many of its latest tokens are behind a list.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "ops/step.h"

namespace fourfold::engine {

// A sequence's tokens, as far as they were counted: the share of them that is behind each list, later ones counting
// more. A sequence begins as if some were, of the shorter list more.
struct ListedText {
  int64_t counted = 0;
  std::array<double, ops::kDraftLists> behind = {0.02, 0.035};
};

class DraftLists {
 public:
  // The lists of a vocabulary for EngineOptions::draft_tokens: of kAutoDraftTokens none where it is small.
  static std::array<int64_t, ops::kDraftLists> of(int64_t setting, int64_t vocabulary);

  // `always`: the first list, whatever the text is.
  DraftLists(const std::array<int64_t, ops::kDraftLists>& lists, int64_t vocabulary, bool always);

  // Adds those of a sequence's tokens that are not counted yet.
  void count(ListedText& text, std::span<const int32_t> tokens) const;
  // What a step drafts from for these sequences: StepPlan::draft_list.
  int32_t choose(std::span<const ListedText* const> texts) const;

 private:
  std::array<int64_t, ops::kDraftLists> lists_;
  int64_t vocabulary_;
  bool always_;
};

}  // namespace fourfold::engine
