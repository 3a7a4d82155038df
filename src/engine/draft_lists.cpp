#include "engine/draft_lists.h"

#include <algorithm>

#include "base/math.h"
#include "engine/engine.h"
#include "ops/ops.h"

namespace fourfold::engine {
namespace {

// Of a smaller vocabulary the head is little of a pass.
constexpr int64_t kLeastVocabulary = 32768;

// A token is forgotten over so many later ones, and of a prompt no more than the last are looked at.
constexpr double kWindow = 256;
constexpr int64_t kMostCounted = 2048;

// Of a round's time, reading the head in its drafting passes: 35B in mix A on an H200 with 3 drafts 9.5 % for one
// sequence, 4.3 for 16, 4 for 64; 122B about 4.5 for one, 27B 11 (docs/engine.md). Of a round's tokens, what is lost
// when a token is behind the list: with 3 drafts that would all be accepted 1.6 times its share, with 5 2.5.
constexpr double kHeadShare = 0.045;
constexpr double kLost = 2;

}  // namespace

std::array<int64_t, ops::kDraftLists> DraftLists::of(int64_t setting, int64_t vocabulary) {
  std::array<int64_t, ops::kDraftLists> lists = {};
  if (setting > 0) {
    lists[0] = round_up(setting, ops::kFirstRows);
  } else if (setting == kAutoDraftTokens && vocabulary >= kLeastVocabulary) {
    int64_t part = 2;
    for (int64_t& list : lists) {
      list = round_up(vocabulary / part, ops::kFirstRows);
      part *= 2;
    }
  }
  for (int64_t& list : lists) {
    if (list >= vocabulary) list = 0;
  }
  return lists;
}

DraftLists::DraftLists(const std::array<int64_t, ops::kDraftLists>& lists, int64_t vocabulary, bool always)
    : lists_(lists), vocabulary_(vocabulary), always_(always) {}

void DraftLists::count(ListedText& text, std::span<const int32_t> tokens) const {
  if (always_ || lists_[0] == 0) return;  // nobody asks
  const auto size = static_cast<int64_t>(tokens.size());
  for (int64_t i = std::max(text.counted, size - kMostCounted); i < size; ++i) {
    for (size_t list = 0; list < lists_.size(); ++list) {
      const double missed = tokens[static_cast<size_t>(i)] >= lists_[list] ? 1 : 0;
      text.behind[list] += (missed - text.behind[list]) / kWindow;
    }
  }
  text.counted = size;
}

int32_t DraftLists::choose(std::span<const ListedText* const> texts) const {
  if (always_) return lists_[0] > 0 ? 1 : 0;
  if (texts.empty()) return 0;
  int32_t best = 0;
  double most = 0;  // that is won, beside all tokens
  for (size_t list = 0; list < lists_.size(); ++list) {
    if (lists_[list] == 0) continue;
    double behind = 0;
    for (const ListedText* text : texts) behind += text->behind[list] / static_cast<double>(texts.size());
    const double read = static_cast<double>(lists_[list]) / static_cast<double>(vocabulary_);
    const double won = kHeadShare * (1 - read) - kLost * behind;
    if (won <= most) continue;
    most = won;
    best = static_cast<int32_t>(list) + 1;
  }
  return best;
}

}  // namespace fourfold::engine
