// UTF-8, the few character classes tokenizers ask for, and the Unicode normalisation forms (tables from utf8proc).
//
// Text inside the text folder is valid UTF-8: what comes from outside goes through to_valid_utf8() first.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace fourfold::text {

constexpr char32_t kReplacement = 0xFFFD;
constexpr size_t kReplacementBytes = 3;

// The number of bytes of the sequence that a lead byte of valid UTF-8 starts.
constexpr size_t utf8_length(unsigned char lead) { return lead < 0x80 ? 1 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4; }

constexpr bool is_continuation(char byte) { return (static_cast<unsigned char>(byte) & 0xC0) == 0x80; }

// What stands at `position`: a whole character, a sequence that no further byte can make valid, or the beginning of one
// that the text cuts off. `size` is its length in bytes (for an invalid one: the maximal subpart of the Unicode
// standard, the piece that one U+FFFD stands for).
struct Utf8Step {
  enum class Kind { kValid, kInvalid, kTruncated } kind;
  char32_t code_point;
  size_t size;
};
Utf8Step utf8_step(std::string_view text, size_t position);

// Decodes the character of valid UTF-8 at `position` and moves past it.
char32_t next_code_point(std::string_view valid, size_t& position);

void append_utf8(std::string& out, char32_t code_point);
std::u32string to_utf32(std::string_view valid);
size_t count_code_points(std::string_view valid);

bool is_valid_utf8(std::string_view text);
// Each invalid sequence becomes U+FFFD, as Python's errors="replace" does.
std::string to_valid_utf8(std::string_view text);
// Each invalid sequence of `text`: where its U+FFFD stands in to_valid_utf8(text), and how long it was. In order.
struct Replaced {
  size_t position, size;
};
std::vector<Replaced> replaced_utf8(std::string_view text);

bool is_whitespace(char32_t c);  // White_Space
bool is_numeric(char32_t c);     // general categories Nd, Nl, No
bool is_word(char32_t c);        // \w of regular expressions: Alphabetic, M, Nd, Pc, Join_Control
char32_t to_lower(char32_t c);   // simple mapping
char32_t to_upper(char32_t c);

// The cut of a byte stream into characters: append() returns the longest part that is certain, invalid bytes replaced
// with U+FFFD, and keeps an incomplete last character for the next call. The pieces and flush() together equal
// to_valid_utf8() of everything.
class Utf8Stream {
 public:
  std::string append(std::string_view bytes);
  std::string flush();
  bool pending() const { return !tail_.empty(); }

 private:
  std::string tail_;
};

enum class NormalForm { kNfc, kNfd, kNfkc, kNfkd };

// One character of a rewritten text. `change` says how it came about, in the convention of Hugging Face's
// `tokenizers`: 0 replaces one character, a positive value is inserted after it, -n replaces 1 + n characters.
struct CharChange {
  char32_t code_point;
  int32_t change;
};

// False, and nothing appended, when the text is already in the form.
bool normalize(std::string_view valid, NormalForm form, std::vector<CharChange>& out);

}  // namespace fourfold::text
