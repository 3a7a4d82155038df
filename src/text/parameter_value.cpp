// The conversion of a tool call's parameter from text by its JSON schema.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <optional>

#include "base/check.h"
#include "text/jinja/python_text.h"
#include "text/jinja/value.h"
#include "text/output_parser.h"
#include "text/schema_type.h"

namespace fourfold::text {

using jinja::Value;

namespace {

constexpr size_t kMaxJson = 256u << 20;

std::string json_string(const std::string& text) {
  std::string out;
  jinja::append_json_string(out, text, false);
  return out;
}

// Python's literals: numbers, strings, True, False, None, and lists, tuples and dicts of them.
class LiteralParser {
 public:
  explicit LiteralParser(std::string_view text) : text_(text) {}

  std::optional<Value> run() {
    const auto value = parse(0);
    skip();
    return value && at_ == text_.size() ? value : std::nullopt;
  }

 private:
  void skip() {
    while (at_ < text_.size() && std::string_view(" \t\n\r").find(text_[at_]) != std::string_view::npos) ++at_;
  }
  bool take(char c) {
    skip();
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  bool word(std::string_view w) {
    if (!text_.substr(at_).starts_with(w)) return false;
    const size_t end = at_ + w.size();
    if (end < text_.size() && (std::isalnum(static_cast<unsigned char>(text_[end])) || text_[end] == '_')) return false;
    at_ = end;
    return true;
  }

  std::optional<Value> parse(int depth) {
    if (depth > 100) return std::nullopt;
    skip();
    if (at_ >= text_.size()) return std::nullopt;
    if (word("True")) return Value::boolean(true);
    if (word("False")) return Value::boolean(false);
    if (word("None")) return Value::none();
    const char c = text_[at_];
    if (c == '\'' || c == '"') return string(c);
    if (c == '[' || c == '(') return sequence(depth);
    if (c == '{') return dict(depth);
    return number();
  }

  std::optional<Value> sequence(int depth) {
    const char close = text_[at_++] == '[' ? ']' : ')';
    std::vector<Value> items;
    bool comma = false;
    while (!take(close)) {
      if (!items.empty() && !comma) return std::nullopt;
      auto item = parse(depth + 1);
      if (!item) return std::nullopt;
      items.push_back(std::move(*item));
      comma = take(',');
    }
    if (close == ')' && items.size() == 1 && !comma) return items[0];
    return Value::list(std::move(items));
  }

  std::optional<Value> dict(int depth) {
    ++at_;
    auto out = std::make_shared<jinja::DictObject>();
    bool comma = true;
    while (!take('}')) {
      if (!comma) return std::nullopt;
      const auto key = parse(depth + 1);
      if (!key || key->is(jinja::Kind::kList) || key->is(jinja::Kind::kDict) || !take(':')) return std::nullopt;
      auto value = parse(depth + 1);
      if (!value) return std::nullopt;
      out->set(*key, std::move(*value));
      comma = take(',');
    }
    return Value::dict(std::move(out));
  }

  std::optional<Value> string(char quote) {
    std::string out;
    for (++at_; at_ < text_.size(); ++at_) {
      const char c = text_[at_];
      if (c == quote) {
        ++at_;
        return Value::string(std::move(out));
      }
      if (c == '\n') return std::nullopt;
      if (c != '\\') {
        out += c;
        continue;
      }
      if (++at_ >= text_.size()) return std::nullopt;
      const char escape = text_[at_];
      static constexpr std::string_view kFrom = "ntrabfv\\'\"", kTo = "\n\t\r\a\b\f\v\\'\"";
      if (const size_t place = kFrom.find(escape); place != std::string_view::npos) {
        out += kTo[place];
      } else if (escape == 'x' || escape == 'u' || escape == 'U') {
        const size_t digits = escape == 'x' ? 2 : escape == 'u' ? 4 : 8;
        const std::string_view hex = text_.substr(at_ + 1, digits);
        uint32_t code = 0;
        const auto result = std::from_chars(hex.data(), hex.data() + hex.size(), code, 16);
        if (hex.size() != digits || result.ptr != hex.data() + digits) return std::nullopt;
        if (code > 0x10FFFF || (code >= 0xD800 && code < 0xE000)) return std::nullopt;
        append_utf8(out, code);
        at_ += digits;
      } else if (escape != '\n') {
        out += '\\';
        out += escape;
      }
    }
    return std::nullopt;
  }

  std::optional<Value> number() {
    size_t end = at_;
    while (end < text_.size() && (std::isalnum(static_cast<unsigned char>(text_[end])) ||
                                  std::string_view("+-._").find(text_[end]) != std::string_view::npos)) {
      ++end;
    }
    std::string digits(text_.substr(at_, end - at_));
    std::erase(digits, '_');
    if (digits.starts_with('+')) digits.erase(0, 1);
    const char* const stop = digits.data() + digits.size();
    if (digits.empty() || !std::isdigit(static_cast<unsigned char>(digits.back())) ||
        !(std::isdigit(static_cast<unsigned char>(digits[0])) || digits[0] == '-' || digits[0] == '.')) {
      if (!digits.ends_with('.') || digits.size() < 2) return std::nullopt;
    }
    int64_t integer = 0;
    if (auto r = std::from_chars(digits.data(), stop, integer); r.ec == std::errc() && r.ptr == stop) {
      at_ = end;
      return Value::integer(integer);
    }
    double real = 0;
    if (auto r = std::from_chars(digits.data(), stop, real);
        r.ec == std::errc() && r.ptr == stop && std::isfinite(real)) {
      at_ = end;
      return Value::real(real);
    }
    return std::nullopt;
  }

  std::string_view text_;
  size_t at_ = 0;
};

// Python's int(): digits in any number.
std::optional<std::string> as_integer(const std::string& text) {
  std::string digits(jinja::strip(text, true, true));
  const bool negative = digits.starts_with('-');
  if (negative || digits.starts_with('+')) digits.erase(0, 1);
  std::string out;
  for (size_t i = 0; i < digits.size(); ++i) {
    const char c = digits[i];
    if (c == '_' && i > 0 && i + 1 < digits.size() && digits[i - 1] != '_') continue;
    if (c < '0' || c > '9') return std::nullopt;
    out += c;
  }
  if (out.empty()) return std::nullopt;
  out.erase(0, std::min(out.find_first_not_of('0'), out.size() - 1));
  return negative && out != "0" ? "-" + out : out;
}

std::optional<std::string> as_number(const std::string& text) {
  std::string digits(jinja::strip(text, true, true));
  if (digits.starts_with('+')) digits.erase(0, 1);
  double value = 0;
  const auto result = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  if (digits.empty() || result.ec != std::errc() || result.ptr != digits.data() + digits.size()) return std::nullopt;
  if (!std::isfinite(value)) return std::nullopt;
  if (value == std::floor(value)) return value == 0 ? "0" : fmt::format("{:.0f}", value);
  return jinja::float_repr(value);
}

}  // namespace

std::string convert_parameter(const std::string& text, const Json* schema, const Json* document) {
  if (schema == nullptr) return json_string(text);
  const SchemaType wanted = schema_type(*schema, document != nullptr ? *document : *schema);
  const std::string& type = wanted.type;
  const std::string folded = jinja::lower(text);
  const bool says_null = folded == "null" || folded == "none";
  const auto begins = [&](std::initializer_list<const char*> prefixes) {
    return std::any_of(prefixes.begin(), prefixes.end(), [&](const char* prefix) { return type.starts_with(prefix); });
  };
  if (wanted.nullable && says_null) return "null";
  for (const char* name : {"string", "str", "text", "varchar", "char", "enum"}) {
    if (type == name) return json_string(text);
  }
  if (says_null) return "null";
  if (begins({"int", "uint", "long", "short", "unsigned"})) return as_integer(text).value_or(json_string(text));
  if (begins({"num", "float"})) return as_number(text).value_or(json_string(text));
  if (begins({"bool"})) return jinja::strip(folded, true, true) == "true" ? "true" : "false";
  try {
    std::optional<Value> value;
    try {
      JsonLimits limits;
      limits.reject_duplicate_keys = false;
      const Json parsed = parse_json(text, "value", limits);
      if (!parsed.is_string()) value = jinja::from_json(parsed);
    } catch (const Error&) {
    }
    if (!value) value = LiteralParser(text).run();
    if (value) return jinja::to_json(*value, {}, kMaxJson);
  } catch (const Error&) {
    // Beyond what can be represented: the text itself.
  }
  return json_string(text);
}

}  // namespace fourfold::text
