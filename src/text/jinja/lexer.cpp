#include "text/jinja/lexer.h"

#include <algorithm>
#include <charconv>

#include "base/check.h"
#include "text/jinja/python_text.h"
#include "text/unicode.h"

namespace fourfold::text::jinja {
namespace {

constexpr size_t kMaxBrackets = 1000;

class Lexer {
 public:
  Lexer(std::string_view source, std::string_view name) : name_(name) {
    // Line ends become \n, and one at the very end goes.
    for (size_t i = 0; i < source.size(); ++i) {
      if (source[i] == '\r') {
        if (i + 1 < source.size() && source[i + 1] == '\n') continue;
        source_ += '\n';
      } else {
        source_ += source[i];
      }
    }
    if (source_.ends_with('\n')) source_.pop_back();
  }

  std::vector<Token> run() {
    while (at_ < source_.size()) data();
    tokens_.push_back({TokenKind::kEnd, line_, "", {}});
    return std::move(tokens_);
  }

 private:
  [[noreturn]] void error(std::string_view what) const { fail("{}: line {}: {}", name_, line_, what); }

  bool looking_at(std::string_view text) const { return source_.compare(at_, text.size(), text) == 0; }

  void advance(size_t n) {
    line_ += static_cast<int>(std::count(source_.begin() + static_cast<ptrdiff_t>(at_),
                                         source_.begin() + static_cast<ptrdiff_t>(at_ + n), '\n'));
    if (n > 0) line_starting_ = source_[at_ + n - 1] == '\n';
    at_ += n;
  }

  size_t space_after(size_t position) const {
    const std::string_view rest = std::string_view(source_).substr(position);
    return rest.size() - strip(rest, true, false).size();
  }

  // Text up to the next tag; `sign` is what stands behind the tag's opening, `strips`: whether lstrip_blocks applies.
  void push_text(std::string_view text, int line, char sign, bool strips) {
    if (sign == '-') {
      text = strip(text, false, true);
    } else if (sign != '+' && strips) {
      const size_t newline = text.rfind('\n');
      const size_t begin = newline == std::string_view::npos ? 0 : newline + 1;
      if ((begin > 0 || line_starting_) && strip(text.substr(begin), true, false).empty()) text = text.substr(0, begin);
    }
    if (!text.empty()) tokens_.push_back({TokenKind::kData, line, std::string(text), {}});
  }

  // After a closing tag: "-" took all whitespace, "+" nothing, otherwise one newline where blocks are trimmed.
  void after_tag(char sign, bool trims) {
    if (sign == '-') {
      advance(space_after(at_));
    } else if (sign != '+' && trims && at_ < source_.size() && source_[at_] == '\n') {
      advance(1);
    }
  }

  void data() {
    size_t tag = at_;
    while (true) {
      tag = source_.find('{', tag);
      if (tag == std::string::npos || tag + 1 >= source_.size()) {
        tag = source_.size();
        break;
      }
      const char next = source_[tag + 1];
      if (next == '%' || next == '#' || next == '{') break;
      ++tag;
    }
    const std::string_view text = std::string_view(source_).substr(at_, tag - at_);
    const int line = line_;
    if (tag == source_.size()) {
      if (!text.empty()) tokens_.push_back({TokenKind::kData, line, std::string(text), {}});
      advance(source_.size() - at_);
      return;
    }
    const char kind = source_[tag + 1];
    char sign = tag + 2 < source_.size() ? source_[tag + 2] : ' ';
    if (sign != '-' && sign != '+') sign = ' ';
    push_text(text, line, sign, kind != '{');
    advance(tag - at_);
    const size_t open = sign == ' ' ? 2 : 3;
    if (kind == '#') {
      const size_t end = source_.find("#}", at_ + open > source_.size() ? source_.size() : at_ + 2);
      if (end == std::string::npos) error("a comment '{#' without '#}'");
      char last = end > at_ + 2 ? source_[end - 1] : ' ';
      // "{#-#}": the one sign belongs to the opening.
      if (end - 1 == at_ + 2 && sign != ' ') last = sign;
      advance(end + 2 - at_);
      after_tag(last, true);
      return;
    }
    if (kind == '%' && raw_block(open)) return;
    tokens_.push_back({kind == '%' ? TokenKind::kBlockBegin : TokenKind::kVariableBegin, line_, "", {}});
    advance(open);
    inside(kind == '%' ? "%}" : "}}", kind == '%' ? TokenKind::kBlockEnd : TokenKind::kVariableEnd);
  }

  // {% raw %} ... {% endraw %}
  bool raw_block(size_t open) {
    const auto word_at = [&](size_t position, std::string_view word) {
      position += space_after(position);
      return source_.compare(position, word.size(), word) == 0 ? position + word.size() : std::string::npos;
    };
    size_t begin = word_at(at_ + open, "raw");
    if (begin == std::string::npos) return false;
    begin += space_after(begin);
    if (source_.compare(begin, 2, "%}") == 0) {
      begin += 2;
    } else if (source_.compare(begin, 3, "-%}") == 0) {
      begin += 3;
      begin += space_after(begin);
    } else {
      return false;
    }
    advance(begin - at_);
    for (size_t end = source_.find("{%", begin); end != std::string::npos; end = source_.find("{%", end + 2)) {
      char sign = end + 2 < source_.size() ? source_[end + 2] : ' ';
      if (sign != '-' && sign != '+') sign = ' ';
      size_t after = word_at(end + (sign == ' ' ? 2 : 3), "endraw");
      if (after == std::string::npos) continue;
      after += space_after(after);
      char last = ' ';
      if (after < source_.size() && (source_[after] == '-' || source_[after] == '+')) last = source_[after++];
      if (source_.compare(after, 2, "%}") != 0) continue;
      push_text(std::string_view(source_).substr(begin, end - begin), line_, sign, true);
      advance(after + 2 - at_);
      after_tag(last, true);
      return true;
    }
    error("'{% raw %}' without '{% endraw %}'");
  }

  void push(TokenKind kind, size_t size, std::string text, Value value = {}) {
    tokens_.push_back({kind, line_, std::move(text), std::move(value)});
    advance(size);
  }

  void inside(std::string_view close, TokenKind close_kind) {
    std::string brackets;
    while (true) {
      advance(space_after(at_));
      if (at_ >= source_.size()) error(fmt::format("a tag without '{}'", close));
      if (brackets.empty()) {
        const char sign = source_[at_];
        const bool signed_close =
            (sign == '-' || (sign == '+' && close == "%}")) && source_.compare(at_ + 1, close.size(), close) == 0;
        if (signed_close || looking_at(close)) {
          tokens_.push_back({close_kind, line_, "", {}});
          advance(close.size() + (signed_close ? 1 : 0));
          after_tag(signed_close ? sign : ' ', close == "%}");
          return;
        }
      }
      const char c = source_[at_];
      if (c == '"' || c == '\'') {
        string(c);
        continue;
      }
      if (c >= '0' && c <= '9') {
        number();
        continue;
      }
      if (static_cast<unsigned char>(c) >= 0x80 || c == '_' || std::isalpha(static_cast<unsigned char>(c))) {
        size_t end = at_;
        while (end < source_.size()) {
          size_t next = end;
          if (!is_word(next_code_point(source_, next))) break;
          end = next;
        }
        if (end == at_)
          error(fmt::format("unexpected character '{}'",
                            printable(source_.substr(at_, utf8_length(static_cast<unsigned char>(c))))));
        push(TokenKind::kName, end - at_, source_.substr(at_, end - at_));
        continue;
      }
      std::string op;
      for (std::string_view two : {"//", "**", "==", "!=", ">=", "<="}) {
        if (looking_at(two)) op = two;
      }
      if (op.empty()) {
        if (std::string_view("+-/*%~[](){}><=.:|,;").find(c) == std::string_view::npos) {
          error(fmt::format("unexpected character '{}'", printable(source_.substr(at_, 1))));
        }
        op = c;
      }
      if (op == "(" || op == "[" || op == "{") {
        if (brackets.size() >= kMaxBrackets) error("too many open brackets");
        brackets += op == "(" ? ')' : op == "[" ? ']' : '}';
      } else if (op == ")" || op == "]" || op == "}") {
        if (brackets.empty()) error(fmt::format("unexpected '{}'", op));
        if (brackets.back() != op[0]) error(fmt::format("unexpected '{}', '{}' is wanted", op, brackets.back()));
        brackets.pop_back();
      }
      push(TokenKind::kOperator, op.size(), op);
    }
  }

  void number() {
    const auto digits = [&](size_t from, auto test) {
      size_t end = from;
      while (end < source_.size()) {
        if (test(source_[end])) {
          ++end;
        } else if (source_[end] == '_' && end > from && end + 1 < source_.size() && test(source_[end + 1])) {
          end += 2;
        } else {
          break;
        }
      }
      return end;
    };
    const auto decimal = [](char c) { return c >= '0' && c <= '9'; };
    const auto clean = [&](size_t from, size_t to) {
      std::string out = source_.substr(from, to - from);
      std::erase(out, '_');
      return out;
    };
    int base = 10;
    size_t begin = at_;
    if (source_[at_] == '0' && at_ + 2 < source_.size()) {
      const char c = static_cast<char>(source_[at_ + 1] | 0x20);
      base = c == 'x' ? 16 : c == 'o' ? 8 : c == 'b' ? 2 : 10;
      if (base != 10) begin += source_[begin + 2] == '_' ? 3 : 2;
    }
    size_t end = digits(begin, [&](char c) {
      const int digit = decimal(c) ? c - '0' : std::isalpha(static_cast<unsigned char>(c)) ? (c | 0x20) - 'a' + 10 : 99;
      return digit < base;
    });
    if (base == 10) {
      const bool after_dot = at_ > 0 && source_[at_ - 1] == '.';
      size_t real_end = end;
      if (!after_dot && real_end + 1 < source_.size() && source_[real_end] == '.' && decimal(source_[real_end + 1])) {
        real_end = digits(real_end + 1, decimal);
      }
      if (!after_dot && real_end < source_.size() && (source_[real_end] | 0x20) == 'e') {
        size_t exponent = real_end + 1;
        if (exponent < source_.size() && (source_[exponent] == '+' || source_[exponent] == '-')) ++exponent;
        if (exponent < source_.size() && decimal(source_[exponent])) real_end = digits(exponent, decimal);
      }
      if (real_end != end) {
        const std::string text = clean(at_, real_end);
        double value = 0;
        const auto result = std::from_chars(text.data(), text.data() + text.size(), value);
        if (result.ec != std::errc()) error(fmt::format("the number {} is out of range", printable(text)));
        return push(TokenKind::kFloat, real_end - at_, text, Value::real(value));
      }
    }
    const std::string text = clean(begin, end);
    int64_t value = 0;
    const auto result = std::from_chars(text.data(), text.data() + text.size(), value, base);
    if (result.ec != std::errc()) error(fmt::format("the integer {} does not fit in 64 bits", printable(text)));
    push(TokenKind::kInteger, end - at_, text, Value::integer(value));
  }

  // Escapes are Python's; an unknown one keeps its backslash.
  void string(char quote) {
    std::string out;
    size_t i = at_ + 1;
    const auto hexadecimal = [&](size_t digits) {
      uint32_t value = 0;
      for (size_t k = 0; k < digits; ++k, ++i) {
        const char c = i < source_.size() ? source_[i] : ' ';
        if (!std::isxdigit(static_cast<unsigned char>(c))) error("a string escape with too few hexadecimal digits");
        value = value * 16 + static_cast<uint32_t>(c <= '9' ? c - '0' : (c | 0x20) - 'a' + 10);
      }
      if (value > 0x10FFFF || (value >= 0xD800 && value < 0xE000)) error("a string escape that is no character");
      append_utf8(out, value);
    };
    while (true) {
      if (i >= source_.size()) error("a string without its closing quote");
      const char c = source_[i++];
      if (c == quote) break;
      if (c != '\\') {
        out += c;
        continue;
      }
      if (i >= source_.size()) error("a string without its closing quote");
      const char escape = source_[i++];
      switch (escape) {
        case '\n':
          break;
        case '\\':
          out += '\\';
          break;
        case '\'':
          out += '\'';
          break;
        case '"':
          out += '"';
          break;
        case 'a':
          out += '\a';
          break;
        case 'b':
          out += '\b';
          break;
        case 'f':
          out += '\f';
          break;
        case 'n':
          out += '\n';
          break;
        case 'r':
          out += '\r';
          break;
        case 't':
          out += '\t';
          break;
        case 'v':
          out += '\v';
          break;
        case 'x':
          hexadecimal(2);
          break;
        case 'u':
          hexadecimal(4);
          break;
        case 'U':
          hexadecimal(8);
          break;
        case 'N':
          error("the string escape \\N is not supported");
        default:
          if (escape >= '0' && escape <= '7') {
            uint32_t value = static_cast<uint32_t>(escape - '0');
            for (int k = 0; k < 2 && i < source_.size() && source_[i] >= '0' && source_[i] <= '7'; ++k) {
              value = value * 8 + static_cast<uint32_t>(source_[i++] - '0');
            }
            append_utf8(out, value);
          } else {
            out += '\\';
            out += escape;
          }
      }
    }
    push(TokenKind::kString, i - at_, std::move(out));
  }

  std::string name_;
  std::string source_;
  std::vector<Token> tokens_;
  size_t at_ = 0;
  int line_ = 1;
  bool line_starting_ = true;
};

}  // namespace

std::vector<Token> tokenize(std::string_view source, std::string_view name) { return Lexer(source, name).run(); }

}  // namespace fourfold::text::jinja
