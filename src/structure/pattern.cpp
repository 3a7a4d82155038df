#include "structure/pattern.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "text/unicode.h"

namespace fourfold::structure {
namespace {

constexpr size_t kMaxBytes = 8192;
constexpr int kMaxDepth = 64;
constexpr int64_t kMaxRepeat = 10'000, kMaxWeight = 16'000;

const CharSet kDigits{{'0', '9'}};
const CharSet kWord{{'0', '9'}, {'A', 'Z'}, {'_', '_'}, {'a', 'z'}};
const CharSet kSpace{{'\t', '\r'}, {' ', ' '}};
const CharSet kLineEnds{{'\n', '\n'}, {'\r', '\r'}, {0x2028, 0x2029}};

class PatternReader {
 public:
  PatternReader(std::string_view text, const Writing& writing) : text_(text), writing_(writing) {
    if (text.size() > kMaxBytes) reject("has {} bytes, at most {} are taken", text.size(), kMaxBytes);
    if (!text::is_valid_utf8(text)) reject("is not UTF-8");
  }

  Part read(Anchoring anchoring) {
    const Part any = repeated(character(CharSet::all(), writing_), 0, -1);
    std::vector<Part> branches;
    do {
      const bool begins = take("^");
      Part body = branch();
      const bool ends = take("$");
      if (anchoring == Anchoring::kSearch && begins != ends) {
        body = begins ? sequence({body, any}) : sequence({any, body});
      }
      branches.push_back(std::move(body));
    } while (take("|"));
    if (at_ < text_.size()) reject("has an unopened ) or an anchor inside, at byte {}", at_);
    Part out = choice(branches);
    if (out.weight > kMaxWeight)
      reject("repeats too much: about {} states, at most {} are taken", out.weight, kMaxWeight);
    return out;
  }

 private:
  template <typename... Args>
  [[noreturn]] void reject(fmt::format_string<Args...> format, Args&&... args) const {
    throw Rejected("", fmt::format("{} {}", printable(text_, 60), fmt::format(format, std::forward<Args>(args)...)));
  }

  bool take(std::string_view token) {
    if (!text_.substr(at_).starts_with(token)) return false;
    at_ += token.size();
    return true;
  }
  char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }
  uint32_t next() {
    if (at_ >= text_.size()) reject("ends too soon");
    return text::next_code_point(text_, at_);
  }

  Part branches() {
    if (++depth_ > kMaxDepth) reject("is nested deeper than {} groups", kMaxDepth);
    std::vector<Part> out;
    do {
      out.push_back(branch());
    } while (take("|"));
    --depth_;
    return choice(out);
  }

  Part branch() {
    std::vector<Part> parts;
    while (at_ < text_.size() && std::string_view("|)$").find(peek()) == std::string_view::npos) {
      parts.push_back(quantified(atom()));
    }
    return parts.empty() ? literal("") : sequence(parts);
  }

  Part atom() {
    const size_t begin = at_;
    const uint32_t c = next();
    switch (c) {
      case '(':
        return group();
      case '[':
        return character(char_class(), writing_);
      case '.':
        return character(kLineEnds.complement(), writing_);
      case '\\':
        if (peek() == 'b' || peek() == 'B') reject("has a word boundary at byte {}, which no grammar knows", begin);
        if (peek() >= '1' && peek() <= '9') reject("refers back at byte {}, which no grammar can", begin);
        return character(escape(false), writing_);
      case '^':
        reject("has an anchor inside, at byte {}", begin);
      case '*':
      case '+':
      case '?':
        reject("repeats nothing at byte {}", begin);
      default:
        return character({{c, c}}, writing_);
    }
  }

  Part group() {
    const size_t begin = at_ - 1;
    if (take("?:")) {
    } else if (take("?=") || take("?!") || take("?<=") || take("?<!")) {
      reject("looks around at byte {}, which no grammar can", begin);
    } else if (take("?<") || take("?P<")) {
      const size_t end = text_.find('>', at_);
      if (end == std::string_view::npos) reject("has an unfinished name at byte {}", begin);
      at_ = end + 1;
    } else if (peek() == '?') {
      reject("has an unknown group at byte {}", begin);
    }
    Part out = branches();
    if (!take(")")) reject("has an unclosed ( at byte {}, or an anchor inside", begin);
    return out;
  }

  std::optional<int64_t> number() {
    int64_t out = 0;
    const size_t begin = at_;
    while (peek() >= '0' && peek() <= '9') {
      out = std::min<int64_t>(out * 10 + (text_[at_++] - '0'), kMaxRepeat + 1);
    }
    return at_ == begin ? std::nullopt : std::optional(out);
  }

  Part quantified(Part part) {
    const size_t begin = at_;
    int64_t least = 0, most = -1;
    if (take("*")) {
    } else if (take("+")) {
      least = 1;
    } else if (take("?")) {
      most = 1;
    } else if (peek() == '{') {
      ++at_;
      const auto low = number();
      std::optional<int64_t> high = low;
      if (take(",")) high = number();
      const bool open = at_ > begin + 1 && text_[at_ - 1] == ',';
      if (!low || !take("}")) {  // a brace and no repetition
        at_ = begin;
        if (low) reject("has an unfinished repetition at byte {}", begin);
        return part;
      }
      least = *low;
      most = open ? -1 : high.value_or(-1);
      if (most >= 0 && most < least) reject("repeats {} to {} times at byte {}", least, most, begin);
      if (std::max(least, most) > kMaxRepeat) reject("repeats more than {} times at byte {}", kMaxRepeat, begin);
    } else {
      return part;
    }
    take("?");  // lazy or not, the texts are the same
    if (peek() == '*' || peek() == '+') reject("repeats a repetition at byte {}", at_);
    Part out = repeated(part, least, most);
    if (out.weight > kMaxWeight)
      reject("repeats too much: about {} states, at most {} are taken", out.weight, kMaxWeight);
    return out;
  }

  uint32_t hex(size_t digits) {
    uint32_t out = 0;
    for (size_t i = 0; i < digits; ++i) {
      const uint32_t c = next();
      const uint32_t digit = c >= '0' && c <= '9'   ? c - '0'
                             : c >= 'a' && c <= 'f' ? c - 'a' + 10
                             : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                                    : 16;
      if (digit == 16) reject("has a wrong digit before byte {}", at_);
      out = out * 16 + digit;
    }
    return out;
  }

  // What stands behind a backslash.
  CharSet escape(bool in_class) {
    const size_t begin = at_;
    const uint32_t c = next();
    switch (c) {
      case 'd':
        return kDigits;
      case 'D':
        return kDigits.complement();
      case 'w':
        return kWord;
      case 'W':
        return kWord.complement();
      case 's':
        return kSpace;
      case 'S':
        return kSpace.complement();
      case 'n':
        return {{'\n', '\n'}};
      case 'r':
        return {{'\r', '\r'}};
      case 't':
        return {{'\t', '\t'}};
      case 'f':
        return {{'\f', '\f'}};
      case 'v':
        return {{'\v', '\v'}};
      case '0':
        return {{0, 0}};
      case 'b':
        if (in_class) return {{'\b', '\b'}};
        break;
      case 'x':
        return single(hex(2), begin);
      case 'u':
        if (take("{")) {
          uint32_t code = 0;
          while (peek() != '}') code = std::min<uint32_t>(code * 16 + hex(1), 0x110000);
          ++at_;
          return single(code, begin);
        }
        return single(hex(4), begin);
      default:
        break;
    }
    const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
    if (letter) reject("has an unknown escape at byte {}", begin - 1);
    return {{c, c}};
  }

  CharSet single(uint32_t code, size_t place) const {
    CharSet out{{code, code}};
    if (code > 0x10FFFF || out.empty()) reject("names no character at byte {}", place);
    return out;
  }

  CharSet char_class() {
    const size_t begin = at_ - 1;
    const bool negated = take("^");
    CharSet out;
    while (!take("]")) {
      if (at_ >= text_.size()) reject("has an unclosed [ at byte {}", begin);
      uint32_t first = 0;
      if (!class_character(first, out)) continue;
      if (peek() == '-' && at_ + 1 < text_.size() && text_[at_ + 1] != ']') {
        ++at_;
        uint32_t last = 0;
        CharSet unused;
        if (!class_character(last, unused)) reject("has a range that ends in a class, before byte {}", at_);
        if (last < first) reject("has a range in the wrong order, before byte {}", at_);
        out.add(first, last);
      } else {
        out.add(first, first);
      }
    }
    out = negated ? out.complement() : out;
    if (out.empty()) reject("has an empty class at byte {}", begin);
    return out;
  }

  // One character of a class, or a set that is added to `set`: false.
  bool class_character(uint32_t& c, CharSet& set) {
    c = next();
    if (c != '\\') return true;
    const char kind = peek();
    const CharSet out = escape(true);
    if (std::string_view("dDwWsS").find(kind) != std::string_view::npos) {
      set.add(out);
      return false;
    }
    c = out.first();
    return true;
  }

  const std::string_view text_;
  const Writing writing_;
  size_t at_ = 0;
  int depth_ = 0;
};

// The short escape of JSON for a character, or none.
std::optional<char> short_escape(uint32_t c) {
  static constexpr std::string_view kCodes = "\"\\\b\f\n\r\t", kLetters = "\"\\bfnrt";
  const size_t place = c < 0x80 ? kCodes.find(static_cast<char>(c)) : std::string_view::npos;
  return place == std::string_view::npos ? std::nullopt : std::optional(kLetters[place]);
}

}  // namespace

Part character(const CharSet& set, const Writing& writing) {
  if (!writing.json) return one_of(set);
  CharSet special{{0, 0x1F}, {'"', '"'}, {'\\', '\\'}};
  if (writing.escape_angle) special.add('<', '<');
  if (const CharSet raw = set.minus(special); !raw.empty()) return one_of(raw);
  std::vector<Part> parts;
  for (uint32_t c = 0; c < 0x80; ++c) {
    if (!set.contains(c)) continue;
    const auto letter = short_escape(c);
    parts.push_back(literal(letter ? fmt::format("\\{}", *letter) : fmt::format("\\u{:04x}", c)));
  }
  Part out = choice(parts);
  out.shortest = out.longest = 1;
  return out;
}

Part written(std::string_view text, const Writing& writing) {
  if (!writing.json) return literal(text);
  std::string out;
  for (const char byte : text) {
    const auto c = static_cast<unsigned char>(byte);
    if (const auto letter = short_escape(c)) {
      out += '\\';
      out += *letter;
    } else if (c < 0x20 || (c == '<' && writing.escape_angle)) {
      out += fmt::format("\\u{:04x}", c);
    } else {
      out += byte;
    }
  }
  return literal(out);
}

Part pattern(std::string_view text, const Writing& writing, Anchoring anchoring) {
  return PatternReader(text, writing).read(anchoring);
}

}  // namespace fourfold::structure
