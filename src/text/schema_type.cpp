#include "text/schema_type.h"

#include <charconv>
#include <functional>
#include <optional>
#include <string_view>

#include "text/jinja/python_text.h"

namespace fourfold::text {
namespace {

// Of schemas on the way from one: references may go round in circles.
constexpr int kMaxSchemas = 256, kMaxDepth = 32;

const Json* member(const Json& object, const char* name) {
  if (!object.is_object()) return nullptr;
  const auto found = object.find(name);
  return found == object.end() ? nullptr : &*found;
}

// A part of a reference between its slashes: %XX of a URI, then ~0 and ~1 of a JSON pointer.
std::optional<std::string> pointer_part(std::string_view part) {
  std::string bytes;
  for (size_t i = 0; i < part.size(); ++i) {
    if (part[i] != '%') {
      bytes += part[i];
      continue;
    }
    const std::string_view hex = part.substr(i + 1, 2);
    int byte = 0;
    if (hex.size() != 2) return std::nullopt;
    const auto [end, error] = std::from_chars(hex.data(), hex.data() + 2, byte, 16);
    if (error != std::errc() || end != hex.data() + 2) return std::nullopt;
    bytes += static_cast<char>(byte);
    i += 2;
  }
  std::string out;
  for (size_t i = 0; i < bytes.size(); ++i) {
    const bool escape = bytes[i] == '~' && i + 1 < bytes.size() && (bytes[i + 1] == '0' || bytes[i + 1] == '1');
    out += !escape ? bytes[i] : bytes[++i] == '0' ? '~' : '/';
  }
  return out;
}

const Json* target(const Json& document, const Json& reference) {
  if (!reference.is_string()) return nullptr;
  std::string_view rest = reference.get_ref<const std::string&>();
  if (!rest.starts_with('#')) return nullptr;
  rest.remove_prefix(1);
  const Json* at = &document;
  while (!rest.empty()) {
    if (rest.front() != '/') return nullptr;
    const size_t end = std::min(rest.find('/', 1), rest.size());
    const auto part = pointer_part(rest.substr(1, end - 1));
    rest.remove_prefix(end);
    if (!part) return nullptr;
    if (at->is_array()) {
      size_t index = 0;
      const auto [stop, error] = std::from_chars(part->data(), part->data() + part->size(), index);
      if (part->empty() || error != std::errc() || stop != part->data() + part->size() || index >= at->size()) {
        return nullptr;
      }
      at = &(*at)[index];
    } else if ((at = member(*at, part->c_str())) == nullptr) {
      return nullptr;
    }
  }
  return at;
}

// Shows `look` the schema and those that it refers to or is put together from, until it says true.
class Walk {
 public:
  Walk(const Json& document, std::function<bool(const Json&)> look) : document_(document), look_(std::move(look)) {}

  bool run(const Json& schema, int depth = 0) {
    if (!schema.is_object() || depth > kMaxDepth || ++seen_ > kMaxSchemas) return false;
    if (look_(schema)) return true;
    if (const Json* reference = member(schema, "$ref")) {
      const Json* const found = target(document_, *reference);
      if (found != nullptr && run(*found, depth + 1)) return true;
    }
    for (const char* name : {"allOf", "anyOf", "oneOf"}) {
      const Json* const options = member(schema, name);
      if (options == nullptr || !options->is_array()) continue;
      for (const Json& option : *options) {
        if (run(option, depth + 1)) return true;
      }
    }
    return false;
  }

 private:
  const Json& document_;
  const std::function<bool(const Json&)> look_;
  int seen_ = 0;
};

}  // namespace

SchemaType schema_type(const Json& schema, const Json& document) {
  SchemaType out;
  bool chosen = false;
  const auto consider = [&](const Json& type) {
    if (!type.is_string()) return;
    const std::string name = jinja::lower(type.get<std::string>());
    if (name == "null") {
      out.nullable = true;
    } else if (!chosen && !name.empty()) {
      out.type = name;
      chosen = true;
    }
  };
  Walk(document, [&](const Json& one) {
    if (const Json* type = member(one, "type")) {
      if (type->is_array()) {
        for (const Json& name : *type) consider(name);
      } else {
        consider(*type);
      }
    }
    if (const Json* nullable = member(one, "nullable"); nullable != nullptr && *nullable == true) out.nullable = true;
    return false;
  }).run(schema);
  return out;
}

const Json* property_schema(const Json& parameters, const std::string& key) {
  const Json* out = nullptr;
  Walk(parameters, [&](const Json& one) {
    if (const Json* properties = member(one, "properties")) out = member(*properties, key.c_str());
    return out != nullptr;
  }).run(parameters);
  return out;
}

}  // namespace fourfold::text
