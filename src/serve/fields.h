// The fields of a request: each is honoured, ignored or refused, by one table for each API.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "serve/api_error.h"

namespace fourfold::serve {

enum class Treatment { kHonoured, kIgnored, kRefused };

struct FieldRule {
  const char* name;
  Treatment treatment;
  const char* note = "";  // kRefused: what to do instead. Otherwise for people.
};

// Tables one behind the other.
template <size_t... N>
constexpr auto join_rules(const FieldRule (&... tables)[N]) {
  std::array<FieldRule, (N + ...)> out{};
  size_t at = 0;
  const auto append = [&](const auto& table) {
    for (const FieldRule& rule : table) out[at++] = rule;
  };
  (append(tables), ...);
  return out;
}

// An ApiError that says of a place in the request what is wrong with it.
[[noreturn]] void refuse(const std::string& place, const std::string& what);
// A text that the object at `place` must have.
const std::string& string_of(const Json& object, const char* name, const std::string& place);

// A JSON object of a request, read field by field. A value null counts as none. Refusals name the field, what was found
// and what was wanted.
class Fields {
 public:
  // An ApiError when a refused field is there. `place` is what the names of its fields begin with, such as
  // "stream_options."
  Fields(const Json& object, std::span<const FieldRule> rules, std::string place = "");

  const Json* find(std::string_view name) const;
  std::optional<bool> boolean(std::string_view name) const;
  std::optional<int64_t> integer(std::string_view name, int64_t low, int64_t high) const;
  std::optional<double> number(std::string_view name, double low, double high) const;
  std::optional<std::string> string(std::string_view name, size_t max_bytes = 4096) const;
  const Json* array(std::string_view name, size_t max_items) const;
  const Json* object(std::string_view name) const;
  // A string, or an array of strings.
  std::vector<std::string> strings(std::string_view name, size_t max_items) const;

  // Fields that were given and change nothing: those of the table, and those that no table knows.
  std::vector<std::string> ignored() const;

  [[noreturn]] void refuse(std::string_view name, const std::string& message) const;
  std::string full_name(std::string_view name) const { return place_ + std::string(name); }

 private:
  const Json& object_;
  std::span<const FieldRule> rules_;
  std::string place_;
};

}  // namespace fourfold::serve
