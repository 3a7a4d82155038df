// Methods of strings, lists and dicts, and Python's two ways of formatting.
#include <algorithm>
#include <cmath>
#include <unordered_map>

#include "base/check.h"
#include "text/jinja/interpreter.h"
#include "text/jinja/python_text.h"
#include "text/unicode.h"

namespace fourfold::text::jinja {
namespace {

using A = const Arguments;
using TextMethod = Value (*)(Interpreter&, const std::string&, A&);

bool is_alphanumeric(char32_t c) { return is_alpha(c) || is_numeric(c); }

template <bool (*Test)(char32_t)>
Value all_characters(Interpreter&, const std::string& s, A&) {
  for (size_t i = 0; i < s.size();) {
    if (!Test(next_code_point(s, i))) return Value::boolean(false);
  }
  return Value::boolean(!s.empty());
}

// A part of a text given by character positions, as in find(sub, start, end).
struct Window {
  size_t begin, end;  // bytes
  int64_t begin_char;
  bool empty_beyond = false;  // start lies behind the end
};

Window window(const std::string& s, const Bound& b, size_t i) {
  const auto size = static_cast<int64_t>(count_code_points(s));
  const auto place = [&](size_t k, int64_t fallback) {
    if (!b.has(k) || b[k].is_none()) return fallback;
    int64_t at = b.integer(k, 0);
    if (at < 0) at = at < -size ? 0 : at + size;
    return at;
  };
  const int64_t begin = place(i, 0), end = std::min(place(i + 1, size), size);
  Window w{};
  w.begin_char = begin;
  if (begin > end) {
    w.empty_beyond = true;
    return w;
  }
  w.begin = byte_of_char(s, static_cast<size_t>(begin));
  w.end = byte_of_char(s, static_cast<size_t>(end));
  return w;
}

Value find_in(const std::string& s, A& a, const char* name, bool last, bool must) {
  const Bound b(a, name, {"sub", "|", "start", "end"});
  const std::string sub = b.string(0, "");
  const Window w = window(s, b, 1);
  if (!w.empty_beyond) {
    const std::string_view part = std::string_view(s).substr(w.begin, w.end - w.begin);
    const size_t at = last ? part.rfind(sub) : part.find(sub);
    if (at != std::string_view::npos) {
      return Value::integer(w.begin_char + static_cast<int64_t>(count_code_points(part.substr(0, at))));
    }
  }
  if (must) fail("substring not found");
  return Value::integer(-1);
}

Value starts_or_ends(const std::string& s, A& a, const char* name, bool end) {
  const Bound b(a, name, {"fix", "|", "start", "end"});
  const Window w = window(s, b, 1);
  std::vector<Value> wanted{b[0]};
  if (b[0].is(Kind::kTuple)) wanted = b[0].items();
  for (const Value& value : wanted) {
    if (!value.is_string()) {
      if (value.is_undefined()) fail("{}", value.undefined_message());
      fail("{} first arg must be str or a tuple of str, not {}", name, type_name(value));
    }
    if (w.empty_beyond) continue;
    const std::string_view part = std::string_view(s).substr(w.begin, w.end - w.begin);
    if (end ? part.ends_with(value.text()) : part.starts_with(value.text())) return Value::boolean(true);
  }
  return Value::boolean(false);
}

Value strip_with(Interpreter& in, const std::string& s, A& a, const char* name, bool left, bool right) {
  const Bound b(a, name, {"|", "chars"});
  if (!b.has(0) || b[0].is_none()) return in.text(std::string(strip(s, left, right)));
  const std::string chars = b.string(0, "");
  in.step(s.size() * chars.size() / 16);
  return in.text(std::string(strip(s, left, right, &chars)));
}

Value split_with(Interpreter& in, const std::string& s, A& a, const char* name, bool right) {
  const Bound b(a, name, {"|", "sep", "maxsplit"});
  const int64_t limit = b.integer(1, -1);
  in.charge(s.size() * 2);
  if (!b.has(0) || b[0].is_none()) {
    return in.strings(right ? rsplit(s, nullptr, limit) : split(s, nullptr, limit));
  }
  const std::string separator = b.string(0, "");
  return in.strings(right ? rsplit(s, &separator, limit) : split(s, &separator, limit));
}

Value partition_with(Interpreter& in, const std::string& s, A& a, const char* name, bool last) {
  const Bound b(a, name, {"sep"});
  const std::string separator = b.string(0, "");
  if (separator.empty()) fail("empty separator");
  const size_t at = last ? s.rfind(separator) : s.find(separator);
  std::vector<Value> out;
  if (at == std::string::npos) {
    out = {in.text(last ? "" : s), in.text(""), in.text(last ? s : "")};
  } else {
    out = {in.text(s.substr(0, at)), in.text(separator), in.text(s.substr(at + separator.size()))};
  }
  return in.list(std::move(out), Kind::kTuple);
}

Value pad(Interpreter& in, const std::string& s, A& a, const char* name, char side) {
  const Bound b(a, name, {"width", "|", "fillchar"});
  const std::string fill = b.string(1, " ");
  if (count_code_points(fill) != 1) fail("{}(): the fill character must be exactly one character", name);
  const auto size = static_cast<int64_t>(count_code_points(s));
  const int64_t missing = std::max<int64_t>(0, b.integer(0, 0) - size);
  in.charge(static_cast<uint64_t>(missing) * fill.size());
  int64_t left = side == 'r' ? missing : 0;
  // CPython puts the odd space of center() on the left when the width is odd.
  if (side == 'c') left = missing / 2 + (missing & b.integer(0, 0) & 1);
  std::string out;
  for (int64_t i = 0; i < left; ++i) out += fill;
  out += s;
  for (int64_t i = left; i < missing; ++i) out += fill;
  return in.text(std::move(out));
}

const std::unordered_map<std::string, TextMethod>& text_methods() {
  static const std::unordered_map<std::string, TextMethod> kMethods = [] {
    std::unordered_map<std::string, TextMethod> m;
    using I = Interpreter;
    using S = const std::string;
    m["upper"] = [](I& i, S& s, A&) { return i.text(upper(s)); };
    m["lower"] = m["casefold"] = [](I& i, S& s, A&) { return i.text(lower(s)); };
    m["capitalize"] = [](I& i, S& s, A&) { return i.text(capitalize(s)); };
    m["title"] = [](I& i, S& s, A&) { return i.text(title(s)); };
    m["swapcase"] = [](I& i, S& s, A&) {
      std::string out;
      for (size_t at = 0; at < s.size();) {
        const char32_t c = next_code_point(s, at);
        append_utf8(out, is_upper(c) ? to_lower(c) : is_lower(c) ? to_upper(c) : c);
      }
      return i.text(std::move(out));
    };
    m["strip"] = [](I& i, S& s, A& a) { return strip_with(i, s, a, "strip", true, true); };
    m["lstrip"] = [](I& i, S& s, A& a) { return strip_with(i, s, a, "lstrip", true, false); };
    m["rstrip"] = [](I& i, S& s, A& a) { return strip_with(i, s, a, "rstrip", false, true); };
    m["split"] = [](I& i, S& s, A& a) { return split_with(i, s, a, "split", false); };
    m["rsplit"] = [](I& i, S& s, A& a) { return split_with(i, s, a, "rsplit", true); };
    m["splitlines"] = [](I& i, S& s, A& a) {
      const Bound b(a, "splitlines", {"|", "keepends"});
      return i.strings(split_lines(s, b.flag(0, false)));
    };
    m["partition"] = [](I& i, S& s, A& a) { return partition_with(i, s, a, "partition", false); };
    m["rpartition"] = [](I& i, S& s, A& a) { return partition_with(i, s, a, "rpartition", true); };
    m["startswith"] = [](I&, S& s, A& a) { return starts_or_ends(s, a, "startswith", false); };
    m["endswith"] = [](I&, S& s, A& a) { return starts_or_ends(s, a, "endswith", true); };
    m["find"] = [](I&, S& s, A& a) { return find_in(s, a, "find", false, false); };
    m["rfind"] = [](I&, S& s, A& a) { return find_in(s, a, "rfind", true, false); };
    m["index"] = [](I&, S& s, A& a) { return find_in(s, a, "index", false, true); };
    m["rindex"] = [](I&, S& s, A& a) { return find_in(s, a, "rindex", true, true); };
    m["count"] = [](I&, S& s, A& a) {
      const Bound b(a, "count", {"sub", "|", "start", "end"});
      const std::string sub = b.string(0, "");
      const Window w = window(s, b, 1);
      if (w.empty_beyond) return Value::integer(0);
      const std::string_view part = std::string_view(s).substr(w.begin, w.end - w.begin);
      if (sub.empty()) return Value::integer(static_cast<int64_t>(count_code_points(part)) + 1);
      int64_t n = 0;
      for (size_t at = part.find(sub); at != std::string_view::npos; at = part.find(sub, at + sub.size())) ++n;
      return Value::integer(n);
    };
    m["replace"] = [](I& i, S& s, A& a) {
      const Bound b(a, "replace", {"old", "new", "|", "count"});
      std::string out = replace(s, b.string(0, ""), b.string(1, ""), b.integer(2, -1), 256u << 20);
      return i.text(std::move(out));
    };
    m["removeprefix"] = [](I& i, S& s, A& a) {
      const Bound b(a, "removeprefix", {"prefix"});
      const std::string fix = b.string(0, "");
      return i.text(s.starts_with(fix) ? s.substr(fix.size()) : s);
    };
    m["removesuffix"] = [](I& i, S& s, A& a) {
      const Bound b(a, "removesuffix", {"suffix"});
      const std::string fix = b.string(0, "");
      return i.text(s.ends_with(fix) ? s.substr(0, s.size() - fix.size()) : s);
    };
    m["join"] = [](I& i, S& s, A& a) {
      const Bound b(a, "join", {"iterable"});
      std::string out;
      bool first = true;
      for (const Value& value : i.iterate(b[0])) {
        if (!value.is_string()) fail("join(): expected str instance, {} found", type_name(value));
        i.charge(value.text().size() + s.size());
        if (!first) out += s;
        first = false;
        out += value.text();
      }
      return i.text(std::move(out));
    };
    m["ljust"] = [](I& i, S& s, A& a) { return pad(i, s, a, "ljust", 'l'); };
    m["rjust"] = [](I& i, S& s, A& a) { return pad(i, s, a, "rjust", 'r'); };
    m["center"] = [](I& i, S& s, A& a) { return pad(i, s, a, "center", 'c'); };
    m["zfill"] = [](I& i, S& s, A& a) {
      const Bound b(a, "zfill", {"width"});
      const int64_t missing = std::max<int64_t>(0, b.integer(0, 0) - static_cast<int64_t>(count_code_points(s)));
      i.charge(static_cast<uint64_t>(missing));
      const size_t sign = s.starts_with('-') || s.starts_with('+') ? 1 : 0;
      return i.text(s.substr(0, sign) + std::string(static_cast<size_t>(missing), '0') + s.substr(sign));
    };
    m["isspace"] = all_characters<is_space>;
    m["isalpha"] = all_characters<is_alpha>;
    m["isdecimal"] = m["isdigit"] = all_characters<is_decimal>;
    m["isnumeric"] = all_characters<is_numeric>;
    m["isalnum"] = all_characters<is_alphanumeric>;
    m["isascii"] = [](I&, S& s, A&) {
      return Value::boolean(
          std::all_of(s.begin(), s.end(), [](char c) { return static_cast<unsigned char>(c) < 0x80; }));
    };
    m["isprintable"] = [](I&, S& s, A&) {
      for (size_t i = 0; i < s.size();) {
        if (!is_printable(next_code_point(s, i))) return Value::boolean(false);
      }
      return Value::boolean(true);
    };
    m["isupper"] = [](I& i, S& s, A&) { return Value::boolean(i.test("upper", Value::string(s), {})); };
    m["islower"] = [](I& i, S& s, A&) { return Value::boolean(i.test("lower", Value::string(s), {})); };
    m["format"] = [](I& i, S& s, A& a) { return i.text(format_braces(i, s, a)); };
    return m;
  }();
  return kMethods;
}

Value dict_method(Interpreter& in, const Value& self, const std::string& name, A& a) {
  const DictObject& dict = self.dict_object();
  if (name == "get") {
    const Bound b(a, "get", {"key", "|", "default"});
    const size_t place = dict.find(b[0]);
    return place == std::string::npos ? b.get(1, Value::none()) : dict.members[place].second;
  }
  if (name == "fromkeys") {
    const Bound b(a, "fromkeys", {"iterable", "|", "value"});
    auto out = std::make_shared<DictObject>();
    for (const Value& key : in.iterate(b[0])) out->set(key, b.get(1, Value::none()));
    return Value::dict(std::move(out));
  }
  const Bound b(a, name, {});
  if (name == "copy") return self;
  std::vector<Value> out;
  out.reserve(dict.members.size());
  for (const auto& [key, value] : dict.members) {
    out.push_back(name == "keys" ? key : name == "values" ? value : in.list({key, value}, Kind::kTuple));
  }
  return in.list(std::move(out), Kind::kView,
                 name == "keys"     ? "dict_keys"
                 : name == "values" ? "dict_values"
                                    : "dict_items");
}

Value list_method(const Value& self, const std::string& name, A& a) {
  if (name == "copy") {
    const Bound b(a, "copy", {});
    return self;
  }
  const Bound b(a, name, {"value"});
  int64_t count = 0;
  for (size_t i = 0; i < self.items().size(); ++i) {
    if (!equal(self.items()[i], b[0])) continue;
    if (name == "index") return Value::integer(static_cast<int64_t>(i));
    ++count;
  }
  if (name == "index") fail("{} is not in the {}", printable(repr(b[0])), type_name(self));
  return Value::integer(count);
}

}  // namespace

Value Interpreter::method(const Value& self, const std::string& name, const Arguments& arguments) {
  switch (self.kind()) {
    case Kind::kString: {
      const auto found = text_methods().find(name);
      if (found == text_methods().end()) fail("the string method '{}' is not supported", name);
      step(1 + self.text().size() / 16);
      const Value out = found->second(*this, self.text(), arguments);
      return out;
    }
    case Kind::kDict:
      return dict_method(*this, self, name, arguments);
    case Kind::kList:
    case Kind::kTuple:
    case Kind::kRange:
      return list_method(self, name, arguments);
    case Kind::kLoop: {
      auto& loop = static_cast<LoopObject&>(*self.pointer());
      if (name == "cycle") {
        if (arguments.positional.empty()) fail("loop.cycle() wants at least one item");
        return arguments.positional[loop.index0 % arguments.positional.size()];
      }
      const bool same = loop.has_last_changed && loop.last_changed.size() == arguments.positional.size() &&
                        std::equal(loop.last_changed.begin(), loop.last_changed.end(), arguments.positional.begin(),
                                   [](const Value& a, const Value& b) { return equal(a, b); });
      loop.has_last_changed = true;
      // A loop that remembers itself would never be freed.
      for (const Value& value : arguments.positional) {
        if (value.is(Kind::kLoop) || value.is(Kind::kMethod)) fail("loop.changed() does not take this value");
      }
      loop.last_changed = arguments.positional;
      return Value::boolean(!same);
    }
    case Kind::kCycler: {
      auto& cycler = static_cast<CyclerObject&>(*self.pointer());
      if (name == "reset") {
        cycler.position = 0;
        return Value::none();
      }
      Value out = cycler.items[cycler.position];
      cycler.position = (cycler.position + 1) % cycler.items.size();
      return out;
    }
    default:
      fail("'{}' has no method '{}'", type_name(self), name);
  }
}

namespace {

// [[fill]align][sign][#][0][width][,][.precision][type]
struct FormatSpec {
  std::string fill = " ";
  char align = 0;
  char sign = '-';
  bool alternate = false;
  bool comma = false;
  int64_t width = 0;
  int64_t precision = -1;
  char type = 0;
};

constexpr int64_t kMaxWidth = 100000;

FormatSpec parse_spec(const std::string& text) {
  FormatSpec spec;
  size_t i = 0;
  const auto is_align = [&](size_t at) {
    return at < text.size() && std::string_view("<>^=").find(text[at]) != std::string_view::npos;
  };
  if (!text.empty()) {
    const size_t first = utf8_length(static_cast<unsigned char>(text[0]));
    if (is_align(first)) {
      spec.fill = text.substr(0, first);
      spec.align = text[first];
      i = first + 1;
    } else if (is_align(0)) {
      spec.align = text[0];
      i = 1;
    }
  }
  if (i < text.size() && (text[i] == '+' || text[i] == '-' || text[i] == ' ')) spec.sign = text[i++];
  if (i < text.size() && text[i] == '#') {
    spec.alternate = true;
    ++i;
  }
  if (i < text.size() && text[i] == '0') {
    if (spec.align == 0) {
      spec.fill = "0";
      spec.align = '=';
    }
    ++i;
  }
  const auto number = [&] {
    int64_t value = 0;
    while (i < text.size() && std::isdigit(static_cast<unsigned char>(text[i]))) {
      value = value * 10 + (text[i++] - '0');
      if (value > kMaxWidth) fail("a format width beyond {}", kMaxWidth);
    }
    return value;
  };
  spec.width = number();
  if (i < text.size() && text[i] == ',') {
    spec.comma = true;
    ++i;
  }
  if (i < text.size() && text[i] == '.') {
    ++i;
    spec.precision = number();
  }
  if (i < text.size()) spec.type = text[i++];
  if (i != text.size()) fail("the format '{}' is not supported", printable(text));
  return spec;
}

std::string apply_spec(const Value& value, const FormatSpec& spec) {
  std::string sign, body;
  bool numeric = false;
  const auto number_sign = [&](bool negative) {
    return negative ? "-" : spec.sign == '-' ? "" : std::string(1, spec.sign);
  };
  const char type = spec.type;
  if (value.is_integer() && !(value.is(Kind::kBool) && type == 0) &&
      (type == 0 || type == 'd' || type == 'x' || type == 'X' || type == 'o' || type == 'b')) {
    numeric = true;
    const int64_t n = value.as_integer();
    uint64_t magnitude = n < 0 ? ~static_cast<uint64_t>(n) + 1 : static_cast<uint64_t>(n);
    sign = number_sign(n < 0);
    body = type == 'x'   ? fmt::format("{:x}", magnitude)
           : type == 'X' ? fmt::format("{:X}", magnitude)
           : type == 'o' ? fmt::format("{:o}", magnitude)
           : type == 'b' ? fmt::format("{:b}", magnitude)
                         : std::to_string(magnitude);
    if (spec.alternate && type != 0 && type != 'd') body = fmt::format("0{}{}", type, body);
  } else if (value.is_number() && !(value.is(Kind::kBool) && type == 0) &&
             (type == 0 || std::string_view("eEfFgG%").find(type) != std::string_view::npos)) {
    numeric = true;
    double x = value.as_real();
    sign = number_sign(std::signbit(x));
    x = std::abs(x);
    const int precision = static_cast<int>(spec.precision < 0 ? 6 : std::min<int64_t>(spec.precision, 1000));
    if (type == 0) {
      body = spec.precision < 0 ? float_repr(x) : fmt::format("{:.{}g}", x, std::max(1, precision));
    } else if (type == '%') {
      body = fmt::format("{:.{}f}%", x * 100, precision);
    } else if (type == 'e' || type == 'E') {
      body = fmt::format("{:.{}e}", x, precision);
    } else if (type == 'g' || type == 'G') {
      body = fmt::format("{:.{}g}", x, std::max(1, precision));
    } else {
      body = fmt::format("{:.{}f}", x, precision);
    }
    if (type == 'E' || type == 'G' || type == 'F') body = upper(body);
  } else if (type == 0 || type == 's') {
    body = str(value);
    if (spec.precision >= 0) body = body.substr(0, byte_of_char(body, static_cast<size_t>(spec.precision)));
  } else {
    fail("unknown format code '{}' for a value of type '{}'", type, type_name(value));
  }
  if (spec.comma && numeric) {
    size_t end = body.find_first_not_of("0123456789");
    if (end == std::string::npos) end = body.size();
    for (size_t at = end; at > 3; at -= 3) body.insert(at - 3, ",");
  }
  const auto size = static_cast<int64_t>(count_code_points(sign) + count_code_points(body));
  const int64_t missing = std::max<int64_t>(0, spec.width - size);
  const char align = spec.align != 0 ? spec.align : numeric ? '>' : '<';
  const int64_t left = align == '>' || align == '=' ? missing : align == '^' ? missing / 2 : 0;
  std::string before, after;
  for (int64_t i = 0; i < left; ++i) before += spec.fill;
  for (int64_t i = left; i < missing; ++i) after += spec.fill;
  return align == '=' ? fmt::format("{}{}{}{}", sign, before, body, after)
                      : fmt::format("{}{}{}{}", before, sign, body, after);
}

}  // namespace

std::string format_percent(Interpreter& interpreter, const std::string& format, const Value& values) {
  std::string out;
  std::vector<Value> items{values};
  if (values.is(Kind::kTuple)) items = values.items();
  size_t used = 0;
  bool mapping = false;
  for (size_t i = 0; i < format.size();) {
    if (format[i] != '%') {
      out += format[i++];
      continue;
    }
    ++i;
    Value value;
    bool have = false;
    if (i < format.size() && format[i] == '(') {
      const size_t end = format.find(')', i);
      if (end == std::string::npos) fail("incomplete format key");
      if (!values.is(Kind::kDict)) fail("format requires a mapping");
      value = interpreter.item(values, Value::string(format.substr(i + 1, end - i - 1)));
      have = mapping = true;
      i = end + 1;
    }
    FormatSpec spec;
    spec.align = '>';
    for (; i < format.size(); ++i) {
      if (format[i] == '-') {
        spec.align = '<';
      } else if (format[i] == '0') {
        if (spec.align != '<') {
          spec.fill = "0";
          spec.align = '=';
        }
      } else if (format[i] == '+' || format[i] == ' ') {
        spec.sign = format[i];
      } else if (format[i] == '#') {
        spec.alternate = true;
      } else {
        break;
      }
    }
    const auto number = [&] {
      int64_t n = 0;
      while (i < format.size() && std::isdigit(static_cast<unsigned char>(format[i]))) {
        n = n * 10 + (format[i++] - '0');
        if (n > kMaxWidth) fail("a format width beyond {}", kMaxWidth);
      }
      return n;
    };
    spec.width = number();
    if (i < format.size() && format[i] == '.') {
      ++i;
      spec.precision = number();
    }
    if (i >= format.size()) fail("incomplete format");
    const char type = format[i++];
    if (type == '%') {
      out += '%';
      continue;
    }
    if (!have) {
      if (used >= items.size()) fail("not enough arguments for format string");
      value = items[used++];
    }
    interpreter.charge(static_cast<uint64_t>(spec.width) + 64);
    switch (type) {
      case 's':
      case 'r': {
        if (spec.align == '=') spec.align = '>', spec.fill = " ";
        const Value shown = Value::string(type == 's' ? str(value) : repr(value));
        out += apply_spec(shown, spec);
        break;
      }
      case 'd':
      case 'i':
      case 'u':
        if (!value.is_number()) fail("%{} format: a number is required, not {}", type, type_name(value));
        spec.type = 'd';
        if (value.is(Kind::kFloat)) {
          if (!(std::abs(value.as_real()) < 9e18)) fail("an integer beyond 64 bits");
          value = Value::integer(static_cast<int64_t>(value.as_real()));
        }
        spec.precision = -1;
        out += apply_spec(value, spec);
        break;
      case 'x':
      case 'X':
      case 'o':
        if (!value.is_integer()) fail("%{} format: an integer is required, not {}", type, type_name(value));
        spec.type = type;
        out += apply_spec(value, spec);
        break;
      case 'e':
      case 'E':
      case 'f':
      case 'F':
      case 'g':
      case 'G':
        if (!value.is_number()) fail("must be real number, not {}", type_name(value));
        spec.type = type;
        out += apply_spec(value, spec);
        break;
      default:
        fail("unsupported format character '{}'", printable(std::string_view(&type, 1)));
    }
  }
  if (!mapping && used < items.size() && !(values.is(Kind::kDict))) {
    fail("not all arguments converted during string formatting");
  }
  return out;
}

std::string format_braces(Interpreter& interpreter, const std::string& format, const Arguments& arguments) {
  std::string out;
  size_t next = 0;
  for (size_t i = 0; i < format.size();) {
    const char c = format[i];
    if (c == '}' || c == '{') {
      if (i + 1 < format.size() && format[i + 1] == c) {
        out += c;
        i += 2;
        continue;
      }
      if (c == '}') fail("single '}}' encountered in format string");
      const size_t end = format.find('}', i);
      if (end == std::string::npos) fail("expected '}}' before end of string");
      std::string field = format.substr(i + 1, end - i - 1);
      i = end + 1;
      if (field.find('{') != std::string::npos) fail("nested replacement fields are not supported");
      std::string spec;
      if (const size_t colon = field.find(':'); colon != std::string::npos) {
        spec = field.substr(colon + 1);
        field.resize(colon);
      }
      char conversion = 0;
      if (const size_t mark = field.find('!'); mark != std::string::npos) {
        if (mark + 2 != field.size()) fail("a format conversion of one letter is wanted");
        conversion = field[mark + 1];
        field.resize(mark);
      }
      size_t end_of_name = field.find_first_of(".[");
      if (end_of_name == std::string::npos) end_of_name = field.size();
      const std::string name = field.substr(0, end_of_name);
      Value value;
      if (name.empty() || std::all_of(name.begin(), name.end(), [](char d) { return d >= '0' && d <= '9'; })) {
        if (name.size() > 6) fail("replacement index is out of range");
        const size_t index = name.empty() ? next++ : static_cast<size_t>(std::stoul(name));
        if (index >= arguments.positional.size()) fail("replacement index {} is out of range", index);
        value = arguments.positional[index];
      } else {
        bool found = false;
        for (const auto& [key, named] : arguments.named) {
          if (key != name) continue;
          value = named;
          found = true;
        }
        if (!found) fail("format(): there is no argument '{}'", printable(name));
      }
      for (size_t at = end_of_name; at < field.size();) {
        if (field[at] == '.') {
          const size_t stop = std::min(field.find_first_of(".[", at + 1), field.size());
          value = interpreter.attribute(value, field.substr(at + 1, stop - at - 1));
          at = stop;
        } else {
          const size_t stop = field.find(']', at);
          if (field[at] != '[' || stop == std::string::npos) fail("a format field that cannot be read");
          const std::string key = field.substr(at + 1, stop - at - 1);
          const bool index = !key.empty() && key.size() < 10 &&
                             std::all_of(key.begin(), key.end(), [](char d) { return d >= '0' && d <= '9'; });
          value = interpreter.item(value, index ? Value::integer(std::stoll(key)) : Value::string(key));
          at = stop + 1;
        }
      }
      if (conversion == 'r') {
        value = Value::string(repr(value));
      } else if (conversion == 's') {
        value = Value::string(str(value));
      } else if (conversion != 0) {
        fail("the format conversion '!{}' is not supported", printable(std::string_view(&conversion, 1)));
      }
      const FormatSpec parsed = parse_spec(spec);
      interpreter.charge(static_cast<uint64_t>(parsed.width) * parsed.fill.size() + 64);
      out += apply_spec(value, parsed);
      interpreter.charge(64);
      continue;
    }
    out += c;
    ++i;
  }
  return out;
}

}  // namespace fourfold::text::jinja
