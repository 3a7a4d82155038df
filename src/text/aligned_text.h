// A text under rewriting that still knows where in the original each of its bytes comes from.
//
// Alignments follow Hugging Face's `tokenizers`: every byte of a character carries the byte range of the original
// character it stands for; an inserted character shares the range of the character before it; a composed character
// keeps the range of its first part.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "text/unicode.h"

namespace fourfold::text {

// A range of bytes or of characters.
struct Span {
  size_t begin = 0;
  size_t end = 0;
  friend bool operator==(const Span&, const Span&) = default;
};

class AlignedText {
 public:
  // Valid UTF-8 that outlives this object and stands at byte `base` of the original.
  AlignedText(std::string_view original, size_t base) : original_(original), base_(base) {}

  std::string_view text() const { return rewritten_ ? std::string_view(storage_) : original_; }

  // The range of the original that the non-empty range [begin, end) of text() stands for.
  Span source(size_t begin, size_t end) const;

  // A copy of a part, with its alignments.
  AlignedText slice(size_t begin, size_t end) const;

  // Rewrites the whole text: one entry for each character of the result, in order.
  void rewrite(const std::vector<CharChange>& changes);

  // Puts `prefix` in front; nothing happens to an empty text.
  void prepend(std::string_view prefix);

  // Replaces the given sorted ranges, each by `content`, which is aligned to the last character of its range.
  void replace(const std::vector<Span>& ranges, std::string_view content);

  // Where in the original the text begins.
  size_t source_begin() const { return text().empty() ? base_ : source(0, 1).begin; }

 private:
  struct Range32 {
    uint32_t begin, end;
  };
  Range32 at(size_t byte) const;
  void materialize();

  std::string_view original_;
  size_t base_;
  bool rewritten_ = false;
  std::string storage_;
  std::vector<Range32> align_;  // one for each byte of storage_
};

}  // namespace fourfold::text
