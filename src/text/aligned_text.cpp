#include "text/aligned_text.h"

#include "base/check.h"

namespace fourfold::text {

AlignedText::Range32 AlignedText::at(size_t byte) const {
  if (rewritten_) return align_[byte];
  size_t begin = byte;
  while (begin > 0 && is_continuation(original_[begin])) --begin;
  const size_t end = begin + utf8_length(static_cast<unsigned char>(original_[begin]));
  return {static_cast<uint32_t>(base_ + begin), static_cast<uint32_t>(base_ + end)};
}

Span AlignedText::source(size_t begin, size_t end) const {
  FF_ASSERT(begin < end && end <= text().size());
  return {at(begin).begin, at(end - 1).end};
}

void AlignedText::materialize() {
  if (rewritten_) return;
  std::vector<Range32> align;
  align.reserve(original_.size());
  for (size_t i = 0; i < original_.size(); ++i) align.push_back(at(i));
  storage_ = original_;
  align_ = std::move(align);
  rewritten_ = true;
}

AlignedText AlignedText::slice(size_t begin, size_t end) const {
  if (!rewritten_) return AlignedText(original_.substr(begin, end - begin), base_ + begin);
  AlignedText out({}, base_);
  out.rewritten_ = true;
  out.storage_ = storage_.substr(begin, end - begin);
  out.align_.assign(align_.begin() + static_cast<ptrdiff_t>(begin), align_.begin() + static_cast<ptrdiff_t>(end));
  return out;
}

void AlignedText::rewrite(const std::vector<CharChange>& changes) {
  const std::string_view old = text();
  std::string storage;
  std::vector<Range32> align;
  storage.reserve(old.size());
  align.reserve(old.size());
  size_t offset = 0;  // in old
  for (const CharChange& change : changes) {
    const size_t before = storage.size();
    append_utf8(storage, change.code_point);
    Range32 range{static_cast<uint32_t>(base_), static_cast<uint32_t>(base_)};
    if (change.change > 0) {
      if (offset > 0) range = at(offset - 1);
    } else {
      if (offset < old.size()) range = at(offset);
      for (int32_t k = 0; k <= -change.change && offset < old.size(); ++k) {
        offset += utf8_length(static_cast<unsigned char>(old[offset]));
      }
    }
    align.insert(align.end(), storage.size() - before, range);
  }
  storage_ = std::move(storage);
  align_ = std::move(align);
  rewritten_ = true;
}

void AlignedText::prepend(std::string_view prefix) {
  if (text().empty() || prefix.empty()) return;
  materialize();
  const Range32 first = align_[0];
  storage_.insert(0, prefix);
  align_.insert(align_.begin(), prefix.size(), first);
}

void AlignedText::replace(const std::vector<Span>& ranges, std::string_view content) {
  if (ranges.empty()) return;
  materialize();
  std::string storage;
  std::vector<Range32> align;
  size_t done = 0;
  for (const Span& range : ranges) {
    storage.append(storage_, done, range.begin - done);
    align.insert(align.end(), align_.begin() + static_cast<ptrdiff_t>(done),
                 align_.begin() + static_cast<ptrdiff_t>(range.begin));
    storage += content;
    const Range32 source = range.end == 0 ? Range32{0, 0} : align_[range.end - 1];
    align.insert(align.end(), content.size(), source);
    done = range.end;
  }
  storage.append(storage_, done);
  align.insert(align.end(), align_.begin() + static_cast<ptrdiff_t>(done), align_.end());
  storage_ = std::move(storage);
  align_ = std::move(align);
}

}  // namespace fourfold::text
