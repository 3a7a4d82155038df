#include "text/jinja/value.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "base/check.h"
#include "text/jinja/python_text.h"
#include "text/unicode.h"

namespace fourfold::text::jinja {

namespace {
thread_local Fuel* current_fuel = nullptr;
}

Fuel::Fuel(uint64_t steps) : left_(steps), total_(steps), outer_(current_fuel) { current_fuel = this; }
Fuel::~Fuel() { current_fuel = outer_; }

void Fuel::spend(uint64_t steps) {
  if (current_fuel == nullptr) return;
  if (steps > current_fuel->left_) {
    current_fuel->left_ = 0;
    fail("the template takes more than {} steps", current_fuel->total_);
  }
  current_fuel->left_ -= steps;
}

Value Value::undefined(std::string message) {
  Value out;
  auto object = std::make_shared<StringObject>();
  object->text = std::move(message);
  out.object_ = std::move(object);
  return out;
}

Value Value::none() {
  Value out;
  out.kind_ = Kind::kNone;
  return out;
}

Value Value::boolean(bool value) {
  Value out;
  out.kind_ = Kind::kBool;
  out.integer_ = value;
  return out;
}

Value Value::integer(int64_t value) {
  Value out;
  out.kind_ = Kind::kInt;
  out.integer_ = value;
  return out;
}

Value Value::real(double value) {
  Value out;
  out.kind_ = Kind::kFloat;
  out.real_ = value;
  return out;
}

Value Value::string(std::string value, bool markup) {
  Value out;
  out.kind_ = Kind::kString;
  out.markup_ = markup;
  auto object = std::make_shared<StringObject>();
  object->text = std::move(value);
  out.object_ = std::move(object);
  return out;
}

Value Value::list(std::vector<Value> items, Kind kind, const char* name) {
  auto object = std::make_shared<ListObject>();
  for (const Value& item : items) object->depth = std::max(object->depth, item.depth());
  if (++object->depth > kMaxValueDepth) fail("a value nested deeper than {} levels", kMaxValueDepth);
  object->items = std::move(items);
  object->name = name;
  return Value::object(kind, std::move(object));
}

Value Value::dict(std::shared_ptr<DictObject> dict) {
  dict->depth = 0;
  for (const auto& [key, value] : dict->members) dict->depth = std::max({dict->depth, key.depth(), value.depth()});
  if (++dict->depth > kMaxValueDepth) fail("a value nested deeper than {} levels", kMaxValueDepth);
  return Value::object(Kind::kDict, std::move(dict));
}

Value Value::object(Kind kind, std::shared_ptr<Object> object) {
  Value out;
  out.kind_ = kind;
  out.object_ = std::move(object);
  return out;
}

const DictObject& Value::dict_object() const { return static_cast<const DictObject&>(*object_); }

std::string Value::undefined_message() const { return object_ ? text() : "an undefined value"; }

bool Value::same_object(const Value& other) const {
  if (kind_ != other.kind_) return false;
  if (object_ || other.object_) {
    // Short strings are usually one object in Python; equality is the closest that means anything.
    return object_ == other.object_ || (kind_ == Kind::kString && text() == other.text());
  }
  return kind_ == Kind::kFloat ? real_ == other.real_ : integer_ == other.integer_;
}

namespace {
constexpr size_t kSmallDict = 8;
}

void DictObject::index(size_t place) { places_.emplace(hash_of(members[place].first), place); }

size_t DictObject::find(const Value& key) const {
  const size_t hash = hash_of(key);  // also refuses unhashable keys
  if (members.size() <= kSmallDict) {
    for (size_t i = 0; i < members.size(); ++i) {
      if (equal(members[i].first, key)) return i;
    }
    return std::string::npos;
  }
  const auto [begin, end] = places_.equal_range(hash);
  for (auto it = begin; it != end; ++it) {
    if (equal(members[it->second].first, key)) return it->second;
  }
  return std::string::npos;
}

const Value* DictObject::get(std::string_view key) const {
  if (members.size() <= kSmallDict) {
    for (const auto& [name, value] : members) {
      if (name.is_string() && name.text() == key) return &value;
    }
    return nullptr;
  }
  const size_t place = find(Value::string(std::string(key)));
  return place == std::string::npos ? nullptr : &members[place].second;
}

void DictObject::set(const Value& key, Value value) {
  const size_t place = find(key);
  if (place != std::string::npos) {
    members[place].second = std::move(value);
    return;
  }
  members.emplace_back(key, std::move(value));
  if (members.size() == kSmallDict + 1) {
    for (size_t i = 0; i < members.size(); ++i) index(i);
  } else if (members.size() > kSmallDict + 1) {
    index(members.size() - 1);
  }
}

Value from_json(const Json& json) {
  switch (json.type()) {
    case Json::value_t::null:
      return Value::none();
    case Json::value_t::boolean:
      return Value::boolean(json.get<bool>());
    case Json::value_t::number_integer:
      return Value::integer(json.get<int64_t>());
    case Json::value_t::number_unsigned:
      if (json.get<uint64_t>() > INT64_MAX) fail("the integer {} does not fit in 64 signed bits", json.get<uint64_t>());
      return Value::integer(json.get<int64_t>());
    case Json::value_t::number_float:
      return Value::real(json.get<double>());
    case Json::value_t::string:
      return Value::string(json.get<std::string>());
    case Json::value_t::array: {
      std::vector<Value> items;
      items.reserve(json.size());
      for (const Json& item : json) items.push_back(from_json(item));
      return Value::list(std::move(items));
    }
    case Json::value_t::object: {
      auto dict = std::make_shared<DictObject>();
      for (const auto& [key, value] : json.items()) dict->set(Value::string(key), from_json(value));
      return Value::dict(std::move(dict));
    }
    default:
      fail("a JSON value of an unknown kind");
  }
}

bool truthy(const Value& value) {
  switch (value.kind()) {
    case Kind::kUndefined:
    case Kind::kNone:
      return false;
    case Kind::kBool:
    case Kind::kInt:
      return value.as_integer() != 0;
    case Kind::kFloat:
      return value.as_real() != 0;
    case Kind::kString:
      return !value.text().empty();
    case Kind::kList:
    case Kind::kTuple:
    case Kind::kView:
    case Kind::kRange:
      return !value.items().empty();
    case Kind::kDict:
      return !value.dict_object().members.empty();
    default:
      return true;
  }
}

namespace {

bool equal_items(const std::vector<Value>& a, const std::vector<Value>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (!equal(a[i], b[i])) return false;
  }
  return true;
}

// Exact comparison of a 64-bit integer with a double; 2 when the double is NaN.
int compare_mixed(int64_t a, double b) {
  if (std::isnan(b)) return 2;
  if (b >= 9223372036854775808.0) return -1;
  if (b < -9223372036854775808.0) return 1;
  const double whole = std::floor(b);
  const auto integer = static_cast<int64_t>(whole);
  if (a != integer) return a < integer ? -1 : 1;
  return b > whole ? -1 : 0;
}

int compare_numbers(const Value& a, const Value& b) {
  if (a.is_integer() && b.is_integer()) {
    return a.as_integer() < b.as_integer() ? -1 : a.as_integer() > b.as_integer() ? 1 : 0;
  }
  if (a.is_integer()) return compare_mixed(a.as_integer(), b.as_real());
  if (b.is_integer()) {
    const int result = compare_mixed(b.as_integer(), a.as_real());
    return result == 2 ? 2 : -result;
  }
  const double x = a.as_real(), y = b.as_real();
  return x < y ? -1 : x > y ? 1 : x == y ? 0 : 2;
}

}  // namespace

bool equal(const Value& a, const Value& b) {
  Fuel::spend(1);
  if (a.is_number() && b.is_number()) return compare_numbers(a, b) == 0;
  if (a.kind() != b.kind()) return false;
  switch (a.kind()) {
    case Kind::kUndefined:
    case Kind::kNone:
      return true;
    case Kind::kString:
      return a.text() == b.text();
    case Kind::kList:
    case Kind::kTuple:
    case Kind::kRange:
      return a.pointer() == b.pointer() || equal_items(a.items(), b.items());
    case Kind::kDict: {
      if (a.pointer() == b.pointer()) return true;
      const DictObject& x = a.dict_object();
      const DictObject& y = b.dict_object();
      if (x.members.size() != y.members.size()) return false;
      for (const auto& [key, value] : x.members) {
        const size_t place = y.find(key);
        if (place == std::string::npos || !equal(value, y.members[place].second)) return false;
      }
      return true;
    }
    default:
      return a.pointer() == b.pointer();
  }
}

int compare(const Value& a, const Value& b, const char* op) {
  if (a.is_number() && b.is_number()) return compare_numbers(a, b);
  if (a.is_string() && b.is_string()) return a.text() < b.text() ? -1 : a.text() > b.text() ? 1 : 0;
  if (a.kind() == b.kind() && a.is_sequence()) {
    for (size_t i = 0; i < a.items().size() && i < b.items().size(); ++i) {
      if (!equal(a.items()[i], b.items()[i])) return compare(a.items()[i], b.items()[i], op);
    }
    return a.items().size() < b.items().size() ? -1 : a.items().size() > b.items().size() ? 1 : 0;
  }
  if (a.is_undefined()) fail("{}", a.undefined_message());
  if (b.is_undefined()) fail("{}", b.undefined_message());
  fail("'{}' not supported between instances of '{}' and '{}'", op, type_name(a), type_name(b));
}

size_t hash_of(const Value& value) {
  Fuel::spend(1);
  switch (value.kind()) {
    case Kind::kBool:
    case Kind::kInt:
      return std::hash<double>()(static_cast<double>(value.as_integer()));
    case Kind::kFloat:
      return std::hash<double>()(value.as_real());
    case Kind::kString:
      return std::hash<std::string>()(value.text());
    case Kind::kTuple: {
      size_t hash = 7;
      for (const Value& item : value.items()) hash = hash * 1000003 + hash_of(item);
      return hash;
    }
    case Kind::kList:
    case Kind::kDict:
    case Kind::kView:
      fail("unhashable type: '{}'", type_name(value));
    default:
      return std::hash<const void*>()(value.pointer().get());
  }
}

std::string type_name(const Value& value) {
  switch (value.kind()) {
    case Kind::kUndefined:
      return "Undefined";
    case Kind::kNone:
      return "NoneType";
    case Kind::kBool:
      return "bool";
    case Kind::kInt:
      return "int";
    case Kind::kFloat:
      return "float";
    case Kind::kString:
      return value.is_markup() ? "Markup" : "str";
    case Kind::kList:
      return "list";
    case Kind::kTuple:
      return "tuple";
    case Kind::kDict:
      return "dict";
    case Kind::kView:
    case Kind::kGenerator:
      return value.list_object().name;
    case Kind::kRange:
      return "range";
    case Kind::kNamespace:
      return "Namespace";
    case Kind::kLoop:
      return "LoopContext";
    case Kind::kCycler:
      return "Cycler";
    case Kind::kJoiner:
      return "Joiner";
    case Kind::kFunction:
      return "function";
    case Kind::kMethod:
      return "method";
  }
  return "object";
}

std::string float_repr(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
  char buffer[40];
  // The shortest digits that give the value back, as d.ddde+XX; Python lays them out by the exponent.
  const auto result = std::to_chars(buffer, buffer + sizeof buffer, value, std::chars_format::scientific);
  std::string_view text(buffer, static_cast<size_t>(result.ptr - buffer));
  std::string out;
  if (text[0] == '-') {
    out = "-";
    text.remove_prefix(1);
  }
  const size_t e = text.find('e');
  std::string digits;
  for (char c : text.substr(0, e)) {
    if (c != '.') digits += c;
  }
  const int exponent = std::stoi(std::string(text.substr(e + 1)));
  const auto count = static_cast<int>(digits.size());
  if (exponent < -4 || exponent >= 16) {
    out += digits[0];
    if (count > 1) out += "." + digits.substr(1);
    out += fmt::format("e{}{:02}", exponent < 0 ? '-' : '+', std::abs(exponent));
  } else if (exponent < 0) {
    out += "0." + std::string(static_cast<size_t>(-exponent - 1), '0') + digits;
  } else if (count <= exponent + 1) {
    out += digits + std::string(static_cast<size_t>(exponent + 1 - count), '0') + ".0";
  } else {
    out += digits.substr(0, static_cast<size_t>(exponent) + 1) + "." + digits.substr(static_cast<size_t>(exponent) + 1);
  }
  return out;
}

std::string string_repr(std::string_view text) {
  const bool has_single = text.find('\'') != std::string_view::npos;
  const char quote = has_single && text.find('"') == std::string_view::npos ? '"' : '\'';
  std::string out(1, quote);
  for (size_t i = 0; i < text.size();) {
    const size_t at = i;
    const char32_t c = next_code_point(text, i);
    if (c == static_cast<unsigned char>(quote) || c == '\\') {
      out += '\\';
      out += static_cast<char>(c);
    } else if (c == '\n') {
      out += "\\n";
    } else if (c == '\r') {
      out += "\\r";
    } else if (c == '\t') {
      out += "\\t";
    } else if (is_printable(c)) {
      out += text.substr(at, i - at);
    } else if (c < 0x100) {
      out += fmt::format("\\x{:02x}", static_cast<unsigned>(c));
    } else if (c < 0x10000) {
      out += fmt::format("\\u{:04x}", static_cast<unsigned>(c));
    } else {
      out += fmt::format("\\U{:08x}", static_cast<unsigned>(c));
    }
  }
  return out + quote;
}

namespace {

void append_repr(std::string& out, const Value& value);

void append_items(std::string& out, const std::vector<Value>& items) {
  for (size_t i = 0; i < items.size(); ++i) {
    if (i > 0) out += ", ";
    append_repr(out, items[i]);
  }
}

// A shared list can be inside a value many times over; what is printed is bounded, not what is stored.
constexpr size_t kMaxPrinted = 256u << 20;

void append_repr(std::string& out, const Value& value) {
  Fuel::spend(1);
  if (out.size() > kMaxPrinted) fail("a value prints to more than {} bytes", kMaxPrinted);
  switch (value.kind()) {
    case Kind::kUndefined:
      out += "Undefined";
      return;
    case Kind::kNone:
      out += "None";
      return;
    case Kind::kBool:
      out += value.as_bool() ? "True" : "False";
      return;
    case Kind::kInt:
      out += std::to_string(value.as_integer());
      return;
    case Kind::kFloat:
      out += float_repr(value.as_real());
      return;
    case Kind::kString:
      if (value.is_markup()) out += "Markup(";
      out += string_repr(value.text());
      if (value.is_markup()) out += ')';
      return;
    case Kind::kList:
      out += '[';
      append_items(out, value.items());
      out += ']';
      return;
    case Kind::kTuple:
      out += '(';
      append_items(out, value.items());
      if (value.items().size() == 1) out += ',';
      out += ')';
      return;
    case Kind::kView:
      out += value.list_object().name;
      out += "([";
      append_items(out, value.items());
      out += "])";
      return;
    case Kind::kRange: {
      const auto& items = value.items();
      const int64_t step = items.size() > 1 ? items[1].as_integer() - items[0].as_integer() : 1;
      const int64_t start = items.empty() ? 0 : items[0].as_integer();
      const int64_t stop = items.empty() ? 0 : items.back().as_integer() + (step > 0 ? 1 : -1);
      out += fmt::format("range({}, {}", start, stop);
      out += step == 1 ? ")" : fmt::format(", {})", step);
      return;
    }
    case Kind::kDict: {
      out += '{';
      bool first = true;
      for (const auto& [key, member] : value.dict_object().members) {
        if (!first) out += ", ";
        first = false;
        append_repr(out, key);
        out += ": ";
        append_repr(out, member);
      }
      out += '}';
      return;
    }
    default:
      fail("a template prints a {}, which has no text of its own", type_name(value));
  }
}

}  // namespace

std::string repr(const Value& value) {
  std::string out;
  append_repr(out, value);
  return out;
}

std::string str(const Value& value) {
  if (value.is_string()) return value.text();
  if (value.is_undefined()) return "";
  return repr(value);
}

namespace {

class JsonWriter {
 public:
  JsonWriter(const JsonStyle& style, size_t limit) : style_(style), limit_(limit) {}

  void write(const Value& value, size_t level) {
    Fuel::spend(1 + level / 8);
    if (out_.size() > limit_) fail("tojson writes more than {} bytes", limit_);
    switch (value.kind()) {
      case Kind::kNone:
        out_ += "null";
        return;
      case Kind::kBool:
        out_ += value.as_bool() ? "true" : "false";
        return;
      case Kind::kInt:
        out_ += std::to_string(value.as_integer());
        return;
      case Kind::kFloat:
        out_ += number(value.as_real());
        return;
      case Kind::kString:
        append_json_string(out_, value.text(), style_.ensure_ascii);
        return;
      case Kind::kList:
      case Kind::kTuple: {
        out_ += '[';
        for (size_t i = 0; i < value.items().size(); ++i) {
          separate(i > 0, level + 1);
          write(value.items()[i], level + 1);
        }
        close(!value.items().empty(), level, ']');
        return;
      }
      case Kind::kDict: {
        out_ += '{';
        std::vector<std::pair<Value, Value>> members = value.dict_object().members;
        if (style_.sort_keys) {
          std::stable_sort(members.begin(), members.end(),
                           [](const auto& a, const auto& b) { return compare(a.first, b.first, "<") < 0; });
        }
        bool first = true;
        for (const auto& [key, member] : members) {
          separate(!first, level + 1);
          first = false;
          append_json_string(out_, key_text(key), style_.ensure_ascii);
          out_ += style_.key_separator;
          write(member, level + 1);
        }
        close(!members.empty(), level, '}');
        return;
      }
      default:
        fail("Object of type {} is not JSON serializable", type_name(value));
    }
  }

  std::string take() { return std::move(out_); }

 private:
  static std::string number(double value) {
    if (std::isnan(value)) return "NaN";
    if (std::isinf(value)) return value < 0 ? "-Infinity" : "Infinity";
    return float_repr(value);
  }

  static std::string key_text(const Value& key) {
    switch (key.kind()) {
      case Kind::kString:
        return key.text();
      case Kind::kNone:
        return "null";
      case Kind::kBool:
        return key.as_bool() ? "true" : "false";
      case Kind::kInt:
        return std::to_string(key.as_integer());
      case Kind::kFloat:
        return number(key.as_real());
      default:
        fail("keys must be str, int, float, bool or None, not {}", type_name(key));
    }
  }

  void separate(bool again, size_t level) {
    if (again) out_ += style_.item_separator;
    newline(level);
  }

  void newline(size_t level) {
    if (!style_.pretty) return;
    out_ += '\n';
    for (size_t i = 0; i < level; ++i) out_ += style_.indent;
  }

  void close(bool filled, size_t level, char bracket) {
    if (filled) newline(level);
    out_ += bracket;
  }

  const JsonStyle& style_;
  size_t limit_;
  std::string out_;
};

}  // namespace

std::string to_json(const Value& value, const JsonStyle& style, size_t limit) {
  JsonWriter writer(style, limit);
  writer.write(value, 0);
  return writer.take();
}

}  // namespace fourfold::text::jinja
