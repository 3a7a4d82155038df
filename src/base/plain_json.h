// JSON as programs write it, read where it lies: strings of printable ASCII without escapes, whole numbers from 0. The
// headers and the index of a checkpoint are tens of megabytes of it, which parse_json() (base/json.h) reads at some 20
// MB/s and this at several hundred.
//
// Whoever meets something else (each function then says false) leaves the whole text to parse_json(), which knows all
// of JSON and says what is wrong. So this has to be right only where it says yes: what it accepts must be valid JSON
// and mean what parse_json() would make of it.
#pragma once

#include <cstdint>
#include <string_view>

namespace fourfold {

class PlainJson {
 public:
  explicit PlainJson(std::string_view text, size_t at = 0) : text_(text), at_(at) {}

  // Behind what was read last.
  size_t at() const { return at_; }

  // That character, behind white space.
  bool next(char c) {
    skip();
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }

  // The value is a view of the text.
  bool string(std::string_view* value) {
    if (!next('"')) return false;
    const size_t end = text_.find('"', at_);
    if (end == std::string_view::npos) return false;
    *value = text_.substr(at_, end - at_);
    unsigned odd = 0;  // without a branch, so that it is done for many characters at once
    for (const char c : *value) {
      const auto code = static_cast<unsigned char>(c);
      odd |=
          static_cast<unsigned>(code < 0x20) | static_cast<unsigned>(code > 0x7e) | static_cast<unsigned>(code == '\\');
    }
    if (odd != 0) return false;
    at_ = end + 1;
    return true;
  }

  // Below 10^18.
  bool number(uint64_t* value) {
    skip();
    const size_t begin = at_;
    uint64_t sum = 0;
    for (; at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9' && at_ - begin <= 18; ++at_) {
      sum = sum * 10 + static_cast<uint64_t>(text_[at_] - '0');
    }
    const size_t digits = at_ - begin;
    if (digits == 0 || digits > 18 || (digits > 1 && text_[begin] == '0')) return false;
    // A fraction or an exponent would go on here.
    if (at_ < text_.size() && (text_[at_] == '.' || text_[at_] == 'e' || text_[at_] == 'E')) return false;
    *value = sum;
    return true;
  }

  // Nothing but white space is left.
  bool end() {
    skip();
    return at_ == text_.size();
  }

 private:
  void skip() {
    while (at_ < text_.size() &&
           (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\r' || text_[at_] == '\t')) {
      ++at_;
    }
  }

  std::string_view text_;
  size_t at_;
};

}  // namespace fourfold
