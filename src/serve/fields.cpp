#include "serve/fields.h"

#include <algorithm>
#include <cmath>

namespace fourfold::serve {
namespace {

// A value as it may stand in a message.
std::string shown(const Json& value) {
  if (value.is_structured()) return json_kind(value);
  return printable(dump(value), 60);
}

}  // namespace

Fields::Fields(const Json& object, std::span<const FieldRule> rules, std::string place)
    : object_(object), rules_(rules), place_(std::move(place)) {
  if (!object.is_object()) {
    const std::string name = place_.empty() ? "the request" : place_.substr(0, place_.size() - 1);
    throw ApiError::field(place_.empty() ? "" : name,
                          fmt::format("{} is {}, an object is wanted", name, json_kind(object)));
  }
  for (const FieldRule& rule : rules) {
    if (rule.treatment == Treatment::kRefused && find(rule.name) != nullptr) {
      refuse(rule.name, fmt::format("is not supported: {}", rule.note));
    }
  }
}

const Json* Fields::find(std::string_view name) const {
  const auto found = object_.find(std::string(name));
  return found == object_.end() || found->is_null() ? nullptr : &*found;
}

void Fields::refuse(std::string_view name, const std::string& message) const {
  const std::string full = full_name(name);
  throw ApiError::field(full, fmt::format("{} {}", full, message));
}

std::optional<bool> Fields::boolean(std::string_view name) const {
  const Json* value = find(name);
  if (value == nullptr) return std::nullopt;
  if (!value->is_boolean()) refuse(name, fmt::format("is {}, true or false is wanted", shown(*value)));
  return value->get<bool>();
}

std::optional<int64_t> Fields::integer(std::string_view name, int64_t low, int64_t high) const {
  const Json* value = find(name);
  if (value == nullptr) return std::nullopt;
  bool fits = value->is_number_integer() && !(value->is_number_unsigned() && value->get<uint64_t>() > INT64_MAX);
  // 16.0 is an integer, for clients that know one kind of number.
  std::optional<int64_t> whole;
  if (value->is_number_float()) {
    const auto real = value->get<double>();
    if (std::nearbyint(real) == real && std::abs(real) < 9e15) whole = static_cast<int64_t>(real);
    fits = whole.has_value();
  }
  const int64_t found = whole ? *whole : fits ? value->get<int64_t>() : 0;
  if (!fits || found < low || found > high) {
    refuse(name, fmt::format("is {}, an integer from {} to {} is wanted", shown(*value), low, high));
  }
  return found;
}

std::optional<double> Fields::number(std::string_view name, double low, double high) const {
  const Json* value = find(name);
  if (value == nullptr) return std::nullopt;
  if (!value->is_number() || !(value->get<double>() >= low && value->get<double>() <= high)) {
    refuse(name, fmt::format("is {}, a number from {} to {} is wanted", shown(*value), low, high));
  }
  return value->get<double>();
}

std::optional<std::string> Fields::string(std::string_view name, size_t max_bytes) const {
  const Json* value = find(name);
  if (value == nullptr) return std::nullopt;
  if (!value->is_string()) refuse(name, fmt::format("is {}, a string is wanted", shown(*value)));
  auto text = value->get<std::string>();
  if (text.size() > max_bytes) refuse(name, fmt::format("has {} bytes, at most {} are taken", text.size(), max_bytes));
  return text;
}

const Json* Fields::array(std::string_view name, size_t max_items) const {
  const Json* value = find(name);
  if (value == nullptr) return nullptr;
  if (!value->is_array()) refuse(name, fmt::format("is {}, an array is wanted", shown(*value)));
  if (value->size() > max_items)
    refuse(name, fmt::format("has {} items, at most {} are taken", value->size(), max_items));
  return value;
}

const Json* Fields::object(std::string_view name) const {
  const Json* value = find(name);
  if (value != nullptr && !value->is_object()) refuse(name, fmt::format("is {}, an object is wanted", shown(*value)));
  return value;
}

std::vector<std::string> Fields::strings(std::string_view name, size_t max_items) const {
  const Json* value = find(name);
  if (value == nullptr) return {};
  if (value->is_string()) return {value->get<std::string>()};
  if (!value->is_array()) refuse(name, fmt::format("is {}, a string or an array of strings is wanted", shown(*value)));
  if (value->size() > max_items)
    refuse(name, fmt::format("has {} items, at most {} are taken", value->size(), max_items));
  std::vector<std::string> out;
  for (size_t i = 0; i < value->size(); ++i) {
    const Json& item = (*value)[i];
    if (!item.is_string()) {
      refuse(fmt::format("{}[{}]", name, i), fmt::format("is {}, a string is wanted", shown(item)));
    }
    out.push_back(item.get<std::string>());
  }
  return out;
}

std::vector<std::string> Fields::ignored() const {
  std::vector<std::string> out;
  for (const auto& [name, value] : object_.items()) {
    if (value.is_null()) continue;
    const auto rule =
        std::find_if(rules_.begin(), rules_.end(), [&n = name](const FieldRule& one) { return n == one.name; });
    if (rule == rules_.end() || rule->treatment == Treatment::kIgnored) out.push_back(full_name(name));
  }
  return out;
}

void refuse(const std::string& place, const std::string& what) {
  throw ApiError::field(place, fmt::format("{} {}", place, what));
}

const std::string& string_of(const Json& object, const char* name, const std::string& place) {
  const auto found = object.find(name);
  if (found == object.end() || !found->is_string()) refuse(place, fmt::format("has no text named {}", name));
  return found->get_ref<const std::string&>();
}

}  // namespace fourfold::serve
