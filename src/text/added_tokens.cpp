#include "text/added_tokens.h"

#include <algorithm>

namespace fourfold::text {

void AddedTokenMatcher::add(std::string_view content, int32_t index) {
  if (content.empty()) return;
  first_[static_cast<unsigned char>(content[0])] = true;
  uint32_t node = 0;
  for (char c : content) {
    const uint64_t edge = (static_cast<uint64_t>(node) << 8) | static_cast<unsigned char>(c);
    const auto [found, added] = edges_.try_emplace(edge, static_cast<uint32_t>(nodes_.size()));
    if (added) nodes_.emplace_back();
    node = found->second;
  }
  // Of two tokens with the same text (after normalization) the first counts.
  if (nodes_[node].index < 0) nodes_[node].index = index;
}

AddedTokenMatcher::Match AddedTokenMatcher::next(std::string_view text, size_t from) const {
  for (size_t begin = from; begin < text.size(); ++begin) {
    if (!first_[static_cast<unsigned char>(text[begin])]) continue;
    Match best{begin, begin, -1};
    uint32_t node = 0;
    for (size_t i = begin; i < text.size(); ++i) {
      const auto edge = edges_.find((static_cast<uint64_t>(node) << 8) | static_cast<unsigned char>(text[i]));
      if (edge == edges_.end()) break;
      node = edge->second;
      if (nodes_[node].index >= 0) best = {begin, i + 1, nodes_[node].index};
    }
    if (best.index >= 0) return best;
  }
  return {text.size(), text.size(), -1};
}

namespace {

char32_t code_point_before(std::string_view text, size_t position) {
  size_t begin = position - 1;
  while (begin > 0 && is_continuation(text[begin])) --begin;
  return next_code_point(text, begin);
}

// Where the whitespace that ends at `position` begins.
size_t skip_whitespace_left(std::string_view text, size_t position) {
  while (position > 0 && is_whitespace(code_point_before(text, position))) {
    --position;
    while (position > 0 && is_continuation(text[position])) --position;
  }
  return position;
}

size_t skip_whitespace_right(std::string_view text, size_t position) {
  while (position < text.size()) {
    size_t next = position;
    if (!is_whitespace(next_code_point(text, next))) break;
    position = next;
  }
  return position;
}

}  // namespace

std::vector<AddedPart> split_added(std::string_view text, const AddedTokenMatcher& matcher,
                                   std::span<const AddedToken> tokens, AddedTokens which) {
  std::vector<AddedPart> parts;
  size_t done = 0;
  if (which != AddedTokens::kNone && !matcher.empty()) {
    for (auto match = matcher.next(text, 0); match.index >= 0; match = matcher.next(text, match.end)) {
      const AddedToken& token = tokens[static_cast<size_t>(match.index)];
      if (which == AddedTokens::kNotSpecial && token.special) continue;
      size_t begin = match.begin, end = match.end;
      if (token.single_word) {
        size_t after = end;
        if (begin > 0 && is_word(code_point_before(text, begin))) continue;
        if (end < text.size() && is_word(next_code_point(text, after))) continue;
      }
      // Whitespace that an earlier token has taken stays with it.
      if (token.lstrip) begin = std::max(skip_whitespace_left(text, begin), done);
      if (token.rstrip) end = skip_whitespace_right(text, end);
      if (done < begin) parts.push_back({-1, done, begin});
      parts.push_back({match.index, begin, end});
      done = end;
    }
  }
  if (done < text.size()) parts.push_back({-1, done, text.size()});
  return parts;
}

}  // namespace fourfold::text
