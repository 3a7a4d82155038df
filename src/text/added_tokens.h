// The added tokens of a tokenizer: found in a text, leftmost first and the longest of those that begin at one place.
#pragma once

#include <cstdint>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "text/tokenizer.h"

namespace fourfold::text {

class AddedTokenMatcher {
 public:
  // `index` is what a match reports.
  void add(std::string_view content, int32_t index);
  bool empty() const { return nodes_.size() == 1; }

  struct Match {
    size_t begin;
    size_t end;
    int32_t index;
  };
  // The next match at or after `from`; index -1 when there is none.
  Match next(std::string_view text, size_t from) const;

 private:
  struct Node {
    int32_t index = -1;
  };
  std::vector<Node> nodes_{1};
  std::unordered_map<uint64_t, uint32_t> edges_;  // node << 8 | byte
  bool first_[256] = {};
};

// A part of a text: an added token (index into the table) or, with index -1, text between.
struct AddedPart {
  int32_t index;
  size_t begin;
  size_t end;
};

// Cuts a text at the added tokens, with the rules for single_word, lstrip and rstrip.
std::vector<AddedPart> split_added(std::string_view text, const AddedTokenMatcher& matcher,
                                   std::span<const AddedToken> tokens, AddedTokens which);

}  // namespace fourfold::text
