// The filters of jinja2 that chat templates use, and transformers' tojson.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <unordered_map>

#include "base/check.h"
#include "text/jinja/interpreter.h"
#include "text/jinja/python_text.h"
#include "text/unicode.h"

namespace fourfold::text::jinja {
namespace {

using I = Interpreter;
using V = const Value;
using A = const Arguments;
using Filter = Value (*)(I&, V&, A&);

void no_arguments(A& a, const char* name) { const Bound b(a, name, {}); }

Value length(I& in, V& v) {
  switch (v.kind()) {
    case Kind::kUndefined:
      return Value::integer(0);
    case Kind::kString:
      in.step(v.text().size() / 16);
      return Value::integer(static_cast<int64_t>(count_code_points(v.text())));
    case Kind::kList:
    case Kind::kTuple:
    case Kind::kView:
    case Kind::kRange:
      return Value::integer(static_cast<int64_t>(v.items().size()));
    case Kind::kDict:
      return Value::integer(static_cast<int64_t>(v.dict_object().members.size()));
    case Kind::kLoop:
      return in.attribute(v, "length");
    default:
      fail("object of type '{}' has no len()", type_name(v));
  }
}

std::string escape_html(const std::string& text) {
  std::string out;
  for (char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&#34;";
        break;
      case '\'':
        out += "&#39;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

// "a.b.0": attributes of attributes, numbers as indices.
Value path(I& in, const Value& object, const Value& attribute) {
  if (attribute.is_integer()) return in.item(object, attribute);
  const std::string& name = attribute.text();
  Value value = object;
  const std::string dot = ".";
  for (const std::string& part : split(name, &dot, -1)) {
    const bool index = !part.empty() && part.size() < 10 &&
                       std::all_of(part.begin(), part.end(), [](char c) { return c >= '0' && c <= '9'; });
    value = in.item(value, index ? Value::integer(std::stoll(part)) : Value::string(part));
  }
  return value;
}

Value fold_case(const Value& value) { return value.is_string() ? Value::string(lower(value.text())) : value; }

// What sort, unique, min, max and groupby order by.
Value key_of(I& in, const Value& value, const std::optional<Value>& attribute, bool case_sensitive) {
  Value key = attribute ? path(in, value, *attribute) : value;
  return case_sensitive ? key : fold_case(key);
}

std::optional<Value> attribute_argument(const Bound& b, size_t i) {
  if (!b.has(i) || b[i].is_none()) return std::nullopt;
  if (!b[i].is_string() && !b[i].is_integer()) fail("an attribute is named by a string or an integer");
  return b[i];
}

Value sort_filter(I& in, V& v, A& a) {
  const Bound b(a, "sort", {"|", "reverse", "case_sensitive", "attribute"});
  const auto attribute = attribute_argument(b, 2);
  const bool reverse = b.flag(0, false), sensitive = b.flag(1, false);
  std::vector<std::pair<std::vector<Value>, Value>> keyed;
  const std::string comma = ",";
  for (Value& value : in.iterate(v)) {
    std::vector<Value> keys;
    if (attribute && attribute->is_string()) {
      for (const std::string& part : split(attribute->text(), &comma, -1)) {
        keys.push_back(key_of(in, value, Value::string(part), sensitive));
      }
    } else {
      keys.push_back(key_of(in, value, attribute, sensitive));
    }
    keyed.emplace_back(std::move(keys), std::move(value));
  }
  const auto less = [&](const auto& x, const auto& y) {
    in.step();
    for (size_t i = 0; i < x.first.size(); ++i) {
      const int order = compare(x.first[i], y.first[i], "<");
      if (order == -1 || order == 1) return reverse ? order == 1 : order == -1;
    }
    return false;
  };
  // A merge sort asks each pair at most a few times and keeps equal elements in place, whatever the order says.
  std::stable_sort(keyed.begin(), keyed.end(), less);
  std::vector<Value> out;
  for (auto& [key, value] : keyed) out.push_back(std::move(value));
  return in.list(std::move(out));
}

Value dictsort_filter(I& in, V& v, A& a) {
  const Bound b(a, "dictsort", {"|", "case_sensitive", "by", "reverse"});
  if (v.is_undefined()) fail("{}", v.undefined_message());
  if (!v.is(Kind::kDict)) fail("dictsort wants a dict, not {}", type_name(v));
  const std::string by = b.string(1, "key");
  if (by != "key" && by != "value") fail("you can only sort by either \"key\" or \"value\"");
  const bool sensitive = b.flag(0, false), reverse = b.flag(2, false);
  std::vector<std::pair<Value, Value>> keyed;
  for (const auto& [key, value] : v.dict_object().members) {
    const Value& order = by == "key" ? key : value;
    keyed.emplace_back(sensitive ? order : fold_case(order), in.list({key, value}, Kind::kTuple));
  }
  std::stable_sort(keyed.begin(), keyed.end(), [&](const auto& x, const auto& y) {
    in.step();
    return compare(x.first, y.first, "<") == (reverse ? 1 : -1);
  });
  std::vector<Value> out;
  for (auto& [key, pair] : keyed) out.push_back(std::move(pair));
  return in.list(std::move(out));
}

Value extreme(I& in, V& v, A& a, const char* name, int wanted) {
  const Bound b(a, name, {"|", "case_sensitive", "attribute"});
  const auto attribute = attribute_argument(b, 1);
  std::optional<Value> best, best_key;
  for (Value& value : in.iterate(v)) {
    Value key = key_of(in, value, attribute, b.flag(0, false));
    if (best && compare(key, *best_key, wanted < 0 ? "<" : ">") != wanted) continue;
    best = std::move(value);
    best_key = std::move(key);
  }
  return best ? *best : Value::undefined("No aggregated item, sequence was empty.");
}

Value unique_filter(I& in, V& v, A& a) {
  const Bound b(a, "unique", {"|", "case_sensitive", "attribute"});
  const auto attribute = attribute_argument(b, 1);
  DictObject seen;
  std::vector<Value> out;
  for (Value& value : in.iterate(v)) {
    const Value key = key_of(in, value, attribute, b.flag(0, false));
    if (seen.find(key) != std::string::npos) continue;
    seen.set(key, Value::none());
    out.push_back(std::move(value));
  }
  return in.list(std::move(out), Kind::kGenerator, "generator");
}

Value groupby_filter(I& in, V& v, A& a) {
  const Bound b(a, "groupby", {"attribute", "|", "default", "case_sensitive"});
  Arguments sorting;
  sorting.named.emplace_back("attribute", b[0]);
  std::vector<Value> out;
  std::vector<Value> group;
  Value group_key, shown_key;
  const auto finish = [&] {
    if (!group.empty()) out.push_back(in.list({shown_key, in.list(std::move(group))}, Kind::kTuple, kGroupTuple));
    group.clear();
  };
  for (Value& value : in.iterate(sort_filter(in, v, sorting))) {
    Value raw = path(in, value, b[0]);
    if (raw.is_undefined() && b.has(1)) raw = b[1];
    const Value key = b.flag(2, false) ? raw : fold_case(raw);
    if (group.empty() || !equal(key, group_key)) {
      finish();
      group_key = key;
      shown_key = raw;
    }
    group.push_back(std::move(value));
  }
  finish();
  return in.list(std::move(out));
}

// map('filter', ...), map(attribute='a', default=...)
Value map_filter(I& in, V& v, A& a) {
  std::vector<Value> out;
  if (!truthy(v)) return in.list({}, Kind::kGenerator, "generator");  // also of none
  if (a.positional.empty()) {
    const Bound b(a, "map", {"|", "attribute", "default"});
    const auto attribute = attribute_argument(b, 0);
    if (!attribute) fail("map wants a filter or an attribute");
    for (const Value& value : in.iterate(v)) {
      Value part = path(in, value, *attribute);
      out.push_back(part.is_undefined() && b.has(1) ? b[1] : std::move(part));
    }
  } else {
    if (!a.positional[0].is_string()) fail("map wants the name of a filter");
    const std::string name = a.positional[0].text();
    Arguments rest;
    rest.positional.assign(a.positional.begin() + 1, a.positional.end());
    rest.named = a.named;
    for (const Value& value : in.iterate(v)) out.push_back(in.filter(name, value, rest));
  }
  return in.list(std::move(out), Kind::kGenerator, "generator");
}

Value select_filter(I& in, V& v, A& a, const char* filter, bool by_attribute, bool keep) {
  if (!truthy(v)) return in.list({}, Kind::kGenerator, "generator");  // also of none
  if (!a.named.empty()) fail("{} takes no keyword arguments", filter);
  size_t used = 0;
  std::optional<Value> attribute;
  if (by_attribute) {
    if (a.positional.empty() || (!a.positional[0].is_string() && !a.positional[0].is_integer())) {
      fail("{} wants the name of an attribute", filter);
    }
    attribute = a.positional[used++];
  }
  std::string test;
  if (used < a.positional.size()) {
    if (!a.positional[used].is_string()) fail("{} wants the name of a test", filter);
    test = a.positional[used++].text();
  }
  Arguments rest;
  rest.positional.assign(a.positional.begin() + static_cast<ptrdiff_t>(used), a.positional.end());
  std::vector<Value> out;
  for (Value& value : in.iterate(v)) {
    const Value tested = attribute ? path(in, value, *attribute) : value;
    const bool holds = test.empty() ? truthy(tested) : in.test(test, tested, rest);
    if (holds == keep) out.push_back(std::move(value));
  }
  return in.list(std::move(out), Kind::kGenerator, "generator");
}

Value join_filter(I& in, V& v, A& a) {
  const Bound b(a, "join", {"|", "d", "attribute"});
  const std::string separator = b.has(0) ? str(b[0]) : "";
  const auto attribute = attribute_argument(b, 1);
  std::string out;
  bool first = true;
  for (const Value& value : in.iterate(v)) {
    const std::string part = str(attribute ? path(in, value, *attribute) : value);
    in.charge(part.size() + separator.size());
    if (!first) out += separator;
    first = false;
    out += part;
  }
  return in.text(std::move(out));
}

Value int_filter(I&, V& v, A& a) {
  const Bound b(a, "int", {"|", "default", "base"});
  const int64_t base = b.integer(1, 10);
  if (v.is_integer()) return Value::integer(v.as_integer());
  const auto from_double = [&](double x) {
    if (!std::isfinite(x)) return b.get(0, Value::integer(0));
    if (std::abs(x) >= 9.2e18) fail("an integer beyond 64 bits");
    return Value::integer(static_cast<int64_t>(x));
  };
  if (v.is(Kind::kFloat)) return from_double(v.as_real());
  if (v.is_string()) {
    std::string text(strip(v.text(), true, true));
    const bool negative = text.starts_with('-');
    size_t at = negative || text.starts_with('+') ? 1 : 0;
    if (base != 10 && at + 1 < text.size() && text[at] == '0') {
      const char mark = static_cast<char>(text[at + 1] | 0x20);
      if ((base == 16 && mark == 'x') || (base == 8 && mark == 'o') || (base == 2 && mark == 'b')) at += 2;
    }
    std::string digits = text.substr(at);
    for (size_t i = 1; i + 1 < digits.size(); ++i) {
      if (digits[i] == '_' && digits[i - 1] != '_') digits.erase(i, 1);
    }
    uint64_t magnitude = 0;
    if (base >= 2 && base <= 36 && !digits.empty()) {
      const auto result =
          std::from_chars(digits.data(), digits.data() + digits.size(), magnitude, static_cast<int>(base));
      if (result.ptr == digits.data() + digits.size()) {
        if (result.ec != std::errc() || magnitude > static_cast<uint64_t>(INT64_MAX)) fail("an integer beyond 64 bits");
        return Value::integer(negative ? -static_cast<int64_t>(magnitude) : static_cast<int64_t>(magnitude));
      }
    }
    double real = 0;
    text = text.substr(text.starts_with('+') ? 1 : 0);
    const auto result = std::from_chars(text.data(), text.data() + text.size(), real);
    if (!text.empty() && result.ec == std::errc() && result.ptr == text.data() + text.size()) return from_double(real);
  }
  return b.get(0, Value::integer(0));
}

Value float_filter(I&, V& v, A& a) {
  const Bound b(a, "float", {"|", "default"});
  if (v.is_number()) return Value::real(v.as_real());
  if (v.is_string()) {
    std::string text(strip(v.text(), true, true));
    if (text.starts_with('+')) text.erase(0, 1);
    double real = 0;
    const auto result = std::from_chars(text.data(), text.data() + text.size(), real);
    if (!text.empty() && result.ptr == text.data() + text.size()) {
      if (result.ec == std::errc()) return Value::real(real);
    }
  }
  return b.get(0, Value::real(0.0));
}

// Python's round(): half to even, on the decimal digits of the exact value.
double round_digits(double x, int64_t digits) {
  if (!std::isfinite(x) || digits > 300) return x;
  if (digits < -300) return 0.0;
  if (digits >= 0) {
    const std::string text = fmt::format("{:.{}f}", x, static_cast<int>(digits));
    double out = x;
    std::from_chars(text.data(), text.data() + text.size(), out);
    return out;
  }
  const double scale = std::pow(10.0, static_cast<double>(-digits));
  return std::nearbyint(x / scale) * scale;
}

Value round_filter(I&, V& v, A& a) {
  const Bound b(a, "round", {"|", "precision", "method"});
  const int64_t precision = b.integer(0, 0);
  const std::string method = b.string(1, "common");
  if (!v.is_number()) fail("type {} doesn't define __round__ method", type_name(v));
  if (method == "common") {
    if (!v.is_integer()) return Value::real(round_digits(v.as_real(), precision));
    if (precision >= 0) return Value::integer(v.as_integer());
    return Value::integer(static_cast<int64_t>(round_digits(v.as_real(), precision)));
  }
  if (method != "ceil" && method != "floor") fail("method must be common, ceil or floor");
  const double scale = std::pow(10.0, static_cast<double>(precision));
  const double x = v.as_real() * scale;
  return Value::real((method == "ceil" ? std::ceil(x) : std::floor(x)) / scale);
}

Value indent_filter(I& in, V& v, A& a) {
  const Bound b(a, "indent", {"|", "width", "first", "blank"});
  std::string indention = "    ";
  if (b.has(0) && b[0].is_string()) {
    indention = b[0].text();
  } else if (b.has(0)) {
    const int64_t width = std::max<int64_t>(0, b.integer(0, 4));
    in.charge(static_cast<uint64_t>(width));
    indention = std::string(static_cast<size_t>(width), ' ');
  }
  if (!v.is_string()) {
    if (v.is_undefined()) fail("{}", v.undefined_message());
    fail("indent wants a string, not {}", type_name(v));
  }
  const std::vector<std::string> lines = split_lines(v.text() + "\n", false);
  in.charge((indention.size() + 1) * lines.size() + v.text().size());
  std::string out;
  for (size_t i = 0; i < lines.size(); ++i) {
    if (i > 0) {
      out += '\n';
      if (!lines[i].empty() || b.flag(2, false)) out += indention;
    }
    out += lines[i];
  }
  return in.text(b.flag(1, false) ? indention + out : out);
}

Value title_filter(I& in, V& v, A& a) {
  no_arguments(a, "title");
  // Words begin behind "-", white space, and opening brackets; the rest of a word is lower case.
  const std::string text = str(v);
  std::string out, word;
  const auto flush = [&] {
    if (word.empty()) return;
    const size_t first = utf8_length(static_cast<unsigned char>(word[0]));
    out += upper(word.substr(0, first)) + lower(word.substr(first));
    word.clear();
  };
  for (size_t i = 0; i < text.size();) {
    const size_t at = i;
    const char32_t c = next_code_point(text, i);
    if (c == '-' || c == '(' || c == '{' || c == '[' || c == '<' || is_space(c)) {
      flush();
      out += text.substr(at, i - at);
    } else {
      word += text.substr(at, i - at);
    }
  }
  flush();
  return in.text(std::move(out));
}

Value tojson_filter(I& in, V& v, A& a) {
  const Bound b(a, "tojson", {"|", "ensure_ascii", "indent", "separators", "sort_keys"});
  JsonStyle style;
  style.ensure_ascii = b.flag(0, false);
  style.sort_keys = b.flag(3, false);
  if (b.has(1) && !b[1].is_none()) {
    style.pretty = true;
    style.item_separator = ",";
    if (b[1].is_string()) {
      style.indent = b[1].text();
    } else {
      const int64_t width = std::clamp<int64_t>(b.integer(1, 0), 0, 1000);
      style.indent = std::string(static_cast<size_t>(width), ' ');
    }
  }
  if (b.has(2) && !b[2].is_none()) {
    const std::vector<Value> both = in.iterate(b[2]);
    if (both.size() != 2 || !both[0].is_string() || !both[1].is_string()) fail("tojson: separators are two strings");
    style.item_separator = both[0].text();
    style.key_separator = both[1].text();
  }
  return in.text(to_json(v, style, 64u << 20));
}

Value first_filter(I& in, V& v, A& a) {
  no_arguments(a, "first");
  if (v.is(Kind::kGenerator)) {
    ListObject& object = v.list_object();
    if (object.consumed < object.items.size()) return object.items[object.consumed++];
    return Value::undefined("No first item, sequence was empty.");
  }
  const std::vector<Value> items = in.iterate(v);
  return items.empty() ? Value::undefined("No first item, sequence was empty.") : items.front();
}

Value last_filter(I& in, V& v, A& a) {
  no_arguments(a, "last");
  if (v.is(Kind::kGenerator)) fail("'generator' object is not reversible");
  const std::vector<Value> items = in.iterate(v);
  return items.empty() ? Value::undefined("No last item, sequence was empty.") : items.back();
}

Value reverse_filter(I& in, V& v, A& a) {
  no_arguments(a, "reverse");
  std::vector<Value> items = in.iterate(v);
  std::reverse(items.begin(), items.end());
  if (!v.is_string()) return in.list(std::move(items), Kind::kGenerator, "list_reverseiterator");
  std::string out;
  for (const Value& c : items) out += c.text();
  return in.text(std::move(out));
}

Value sum_filter(I& in, V& v, A& a) {
  const Bound b(a, "sum", {"|", "attribute", "start"});
  const auto attribute = attribute_argument(b, 0);
  Value total = b.get(1, Value::integer(0));
  for (const Value& value : in.iterate(v))
    total = in.binary("+", total, attribute ? path(in, value, *attribute) : value);
  return total;
}

Value batch_filter(I& in, V& v, A& a) {
  const Bound b(a, "batch", {"linecount", "|", "fill_with"});
  const int64_t count = b.integer(0, 1);
  if (count < 1 || count > 1000000) fail("batch wants a count from 1 to 1000000");
  std::vector<Value> out, row;
  for (Value& value : in.iterate(v)) {
    if (static_cast<int64_t>(row.size()) == count) out.push_back(in.list(std::exchange(row, {})));
    row.push_back(std::move(value));
  }
  if (!row.empty()) {
    if (b.has(1) && !b[1].is_none()) {
      while (static_cast<int64_t>(row.size()) < count) row.push_back(b[1]);
    }
    out.push_back(in.list(std::move(row)));
  }
  return in.list(std::move(out), Kind::kGenerator, "generator");
}

Value truncate_filter(I& in, V& v, A& a) {
  const Bound b(a, "truncate", {"|", "length", "killwords", "end", "leeway"});
  const std::string text = str(v), end = b.string(2, "...");
  const int64_t length = b.integer(0, 255), leeway = b.integer(3, 5);
  const auto end_size = static_cast<int64_t>(count_code_points(end));
  if (length < end_size || leeway < 0) fail("truncate: a length of {} is too short", length);
  if (static_cast<int64_t>(count_code_points(text)) <= length + leeway) return in.text(text);
  std::string cut = text.substr(0, byte_of_char(text, static_cast<size_t>(length - end_size)));
  if (!b.flag(1, false)) {
    const size_t space = cut.rfind(' ');
    if (space != std::string::npos) cut.resize(space);
  }
  return in.text(cut + end);
}

Value default_filter(I&, V& v, A& a) {
  const Bound b(a, "default", {"|", "default_value", "boolean"});
  if (v.is_undefined() || (b.flag(1, false) && !truthy(v))) return b.get(0, Value::string(""));
  return v;
}

const std::unordered_map<std::string, Filter>& filters() {
  static const std::unordered_map<std::string, Filter> kFilters = [] {
    std::unordered_map<std::string, Filter> f;
    f["abs"] = [](I& in, V& v, A& a) {
      no_arguments(a, "abs");
      if (!v.is_number()) fail("bad operand type for abs(): '{}'", type_name(v));
      if (v.is(Kind::kFloat)) return Value::real(std::abs(v.as_real()));
      return v.as_integer() < 0 ? in.binary("-", Value::integer(0), v) : Value::integer(v.as_integer());
    };
    f["attr"] = [](I& in, V& v, A& a) {
      const Bound b(a, "attr", {"name"});
      // Attributes only: a dict's keys are none.
      if (v.is(Kind::kDict) && v.dict_object().get(b.string(0, "")) != nullptr) {
        const Value found = in.attribute(v, b.string(0, ""));
        if (!found.is(Kind::kMethod))
          return Value::undefined(fmt::format("'dict object' has no attribute '{}'", printable(b.string(0, ""))));
        return found;
      }
      return in.attribute(v, b.string(0, ""));
    };
    f["batch"] = batch_filter;
    f["capitalize"] = [](I& in, V& v, A& a) {
      no_arguments(a, "capitalize");
      return in.text(capitalize(str(v)));
    };
    f["center"] = [](I& in, V& v, A& a) {
      const Bound b(a, "center", {"|", "width"});
      Arguments width;
      width.positional.push_back(Value::integer(b.integer(0, 80)));
      return in.method(Value::string(str(v)), "center", width);
    };
    f["count"] = f["length"] = [](I& in, V& v, A& a) {
      no_arguments(a, "length");
      return length(in, v);
    };
    f["d"] = f["default"] = default_filter;
    f["dictsort"] = dictsort_filter;
    f["e"] = f["escape"] = [](I& in, V& v, A& a) {
      no_arguments(a, "escape");
      return v.is_markup() ? v : in.text(escape_html(str(v)), true);
    };
    f["forceescape"] = [](I& in, V& v, A& a) {
      no_arguments(a, "forceescape");
      return in.text(escape_html(str(v)), true);
    };
    f["first"] = first_filter;
    f["float"] = float_filter;
    f["format"] = [](I& in, V& v, A& a) {
      if (!a.named.empty() && !a.positional.empty()) fail("format takes positional or named arguments, not both");
      if (a.named.empty()) {
        std::vector<Value> items = a.positional;
        return in.text(format_percent(in, str(v), Value::tuple(std::move(items))));
      }
      auto dict = std::make_shared<DictObject>();
      for (const auto& [name, value] : a.named) dict->set(Value::string(name), value);
      return in.text(format_percent(in, str(v), Value::dict(std::move(dict))));
    };
    f["groupby"] = groupby_filter;
    f["indent"] = indent_filter;
    f["int"] = int_filter;
    f["items"] = [](I& in, V& v, A& a) {
      no_arguments(a, "items");
      if (v.is_undefined()) return in.list({}, Kind::kGenerator, "generator");
      if (!v.is(Kind::kDict)) fail("Can only get item pairs from a mapping.");
      return in.list(in.iterate(in.method(v, "items", {})), Kind::kGenerator, "generator");
    };
    f["join"] = join_filter;
    f["last"] = last_filter;
    f["list"] = [](I& in, V& v, A& a) {
      no_arguments(a, "list");
      return in.list(in.iterate(v));
    };
    f["lower"] = [](I& in, V& v, A& a) {
      no_arguments(a, "lower");
      return in.text(lower(str(v)));
    };
    f["map"] = map_filter;
    f["max"] = [](I& in, V& v, A& a) { return extreme(in, v, a, "max", 1); };
    f["min"] = [](I& in, V& v, A& a) { return extreme(in, v, a, "min", -1); };
    f["reject"] = [](I& in, V& v, A& a) { return select_filter(in, v, a, "reject", false, false); };
    f["rejectattr"] = [](I& in, V& v, A& a) { return select_filter(in, v, a, "rejectattr", true, false); };
    f["replace"] = [](I& in, V& v, A& a) {
      const Bound b(a, "replace", {"old", "new", "|", "count"});
      const int64_t count = b.has(2) && !b[2].is_none() ? b.integer(2, -1) : -1;
      return in.text(replace(str(v), str(b[0]), str(b[1]), count, 256u << 20));
    };
    f["reverse"] = reverse_filter;
    f["round"] = round_filter;
    f["safe"] = [](I& in, V& v, A& a) {
      no_arguments(a, "safe");
      return in.text(str(v), true);
    };
    f["select"] = [](I& in, V& v, A& a) { return select_filter(in, v, a, "select", false, true); };
    f["selectattr"] = [](I& in, V& v, A& a) { return select_filter(in, v, a, "selectattr", true, true); };
    f["sort"] = sort_filter;
    f["string"] = [](I& in, V& v, A& a) {
      no_arguments(a, "string");
      return v.is_string() ? v : in.text(str(v));
    };
    f["sum"] = sum_filter;
    f["title"] = title_filter;
    f["tojson"] = tojson_filter;
    f["trim"] = [](I& in, V& v, A& a) {
      const Bound b(a, "trim", {"|", "chars"});
      const std::string text = str(v);
      if (!b.has(0) || b[0].is_none()) return in.text(std::string(strip(text, true, true)));
      const std::string chars = b.string(0, "");
      in.step(text.size() * chars.size() / 16);
      return in.text(std::string(strip(text, true, true, &chars)));
    };
    f["truncate"] = truncate_filter;
    f["unique"] = unique_filter;
    f["upper"] = [](I& in, V& v, A& a) {
      no_arguments(a, "upper");
      return in.text(upper(str(v)));
    };
    f["wordcount"] = [](I&, V& v, A& a) {
      no_arguments(a, "wordcount");
      const std::string text = str(v);
      int64_t words = 0;
      bool inside = false;
      for (size_t i = 0; i < text.size();) {
        const bool word = is_word(next_code_point(text, i));
        words += word && !inside;
        inside = word;
      }
      return Value::integer(words);
    };
    return f;
  }();
  return kFilters;
}

}  // namespace

Value Interpreter::filter(const std::string& name, const Value& value, const Arguments& arguments) {
  const auto found = filters().find(name);
  if (found == filters().end()) fail("there is no filter '{}', or none that is supported here", printable(name));
  step(value.is_string() ? 1 + value.text().size() / 16 : 1);
  return found->second(*this, value, arguments);
}

}  // namespace fourfold::text::jinja
