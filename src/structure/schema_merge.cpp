// Schemas taken apart: references, combinations, what stands beside them; and which keywords there are.
#include <algorithm>
#include <array>
#include <set>

#include "structure/json_schema.h"

namespace fourfold::structure {
namespace {

constexpr size_t kMaxAlternatives = 512;

// Say nothing about what is valid.
constexpr std::array kAnnotations = {
    "title",       "description",   "default",         "example",         "examples",  "$schema",
    "$id",         "$comment",      "deprecated",      "readOnly",        "writeOnly", "$defs",
    "definitions", "discriminator", "contentEncoding", "contentMediaType"};
constexpr std::array kCombinations = {"$ref", "allOf", "anyOf", "oneOf"};
constexpr std::array kObject = {"properties",    "required",          "additionalProperties", "minProperties",
                                "maxProperties", "patternProperties", "propertyNames",        "unevaluatedProperties"};
constexpr std::array kArray = {"items", "prefixItems", "minItems", "maxItems", "uniqueItems"};
constexpr std::array kString = {"minLength", "maxLength", "pattern", "format"};
constexpr std::array kNumber = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"};
constexpr std::array kAnyKind = {"type", "enum", "const"};

template <size_t N>
bool is_in(const std::array<const char*, N>& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

bool is_annotation(std::string_view name) { return is_in(kAnnotations, name) || name.starts_with("x-"); }

const char* const kTypes[] = {"null", "boolean", "integer", "number", "string", "array", "object"};

std::set<std::string> types_of(const Json& type, const std::string& place) {
  std::set<std::string> out;
  const auto add = [&](const Json& one) {
    const auto known = [&](const char* name) { return one == name; };
    if (std::none_of(std::begin(kTypes), std::end(kTypes), known)) {
      throw Rejected(place + ".type", fmt::format("is {}, which is no type", printable(one.dump(), 40)));
    }
    out.insert(one.get<std::string>());
  };
  if (type.is_array()) {
    for (const Json& one : type) add(one);
  } else {
    add(type);
  }
  return out;
}

Json without(const Json& schema, const char* name) {
  Json out = schema;
  out.erase(name);
  return out;
}

const Json* member(const Json& schema, const char* name) {
  const auto found = schema.find(name);
  return found == schema.end() ? nullptr : &*found;
}

}  // namespace

bool SchemaWriter::only_refers(const Json& schema) {
  return schema.is_object() && schema.contains("$ref") &&
         std::all_of(schema.items().begin(), schema.items().end(),
                     [](const auto& item) { return item.key() == "$ref" || is_annotation(item.key()); });
}

const Json* SchemaWriter::only_combines(const Json& schema) {
  if (!schema.is_object()) return nullptr;
  const Json* out = nullptr;
  for (const auto& [name, value] : schema.items()) {
    if (is_annotation(name)) continue;
    const bool one = name == "anyOf" || name == "oneOf" || (name == "allOf" && value.size() == 1);
    if (!one || out != nullptr || !value.is_array() || value.empty()) return nullptr;
    out = &value;
  }
  return out;
}

void SchemaWriter::check_keywords(const Json& schema, const std::string& place) const {
  for (const auto& [name, value] : schema.items()) {
    if (is_annotation(name) || is_in(kCombinations, name) || is_in(kObject, name) || is_in(kArray, name) ||
        is_in(kString, name) || is_in(kNumber, name) || is_in(kAnyKind, name)) {
      continue;
    }
    throw Rejected(place + "." + printable(name, 40), "is a keyword that is not supported");
  }
}

const Json& SchemaWriter::target(const Json& reference, const std::string& place) const {
  const std::string where = place + ".$ref";
  if (!reference.is_string()) throw Rejected(where, "is no string");
  const auto& text = reference.get_ref<const std::string&>();
  if (text != "#" && !text.starts_with("#/")) {
    throw Rejected(
        where, fmt::format("is {}: only places in this schema can be referred to, as #/$defs/NAME", printable(text)));
  }
  const Json* at = &root_;
  for (size_t begin = 2; begin <= text.size();) {
    const size_t end = std::min(text.find('/', begin), text.size());
    std::string name;
    for (size_t i = begin; i < end; ++i) {
      if (text[i] == '~' && i + 1 < end) {
        name += text[++i] == '1' ? '/' : '~';
      } else {
        name += text[i];
      }
    }
    const Json* next = nullptr;
    if (at->is_object()) {
      next = member(*at, name.c_str());
    } else if (at->is_array() && !name.empty() && name.size() < 8 &&
               name.find_first_not_of("0123456789") == std::string::npos) {
      const auto index = static_cast<size_t>(std::stoul(name));
      if (index < at->size()) next = &(*at)[index];
    }
    if (next == nullptr) throw Rejected(where, fmt::format("is {}, which is not there", printable(text)));
    at = next;
    begin = end + 1;
  }
  return *at;
}

// What both schemas let through, as one schema.
Json SchemaWriter::merged(const Json& a, const Json& b, const std::string& place) const {
  if (a.is_boolean()) return a.get<bool>() ? b : a;
  if (b.is_boolean()) return b.get<bool>() ? a : b;
  if (!a.is_object() || !b.is_object()) throw Rejected(place, "is no schema");
  // additionalProperties speaks of what its own properties are not.
  for (const auto& [one, other] : {std::pair(&a, &b), std::pair(&b, &a)}) {
    const Json* additional = member(*one, "additionalProperties");
    const Json* properties = member(*other, "properties");
    if (additional == nullptr || *additional == true || properties == nullptr || !properties->is_object()) continue;
    const Json* own = member(*one, "properties");
    for (const auto& [name, value] : properties->items()) {
      if (own != nullptr && own->is_object() && own->contains(name)) continue;
      throw Rejected(place, fmt::format("combines additionalProperties with the property {} of another schema",
                                        printable(name, 40)));
    }
  }
  Json out = a;
  for (const auto& [name, value] : b.items()) {
    Json* own = out.contains(name) ? &out[name] : nullptr;
    if (own == nullptr) {
      out[name] = value;
    } else if (*own == value || is_annotation(name)) {
      continue;
    } else if (name == "properties" && own->is_object() && value.is_object()) {
      for (const auto& [key, property] : value.items()) {
        (*own)[key] = own->contains(key) ? Json{{"allOf", {(*own)[key], property}}} : property;
      }
    } else if (name == "required" && own->is_array() && value.is_array()) {
      for (const Json& key : value) {
        if (std::find(own->begin(), own->end(), key) == own->end()) own->push_back(key);
      }
    } else if (name == "items") {
      *own = {{"allOf", {*own, value}}};
    } else if (name == "type") {
      const std::set<std::string> mine = types_of(*own, place), theirs = types_of(value, place);
      Json both = Json::array();
      for (const char* type : kTypes) {
        const bool numeric = std::string_view(type) == "integer";
        const auto has = [&](const std::set<std::string>& types) {
          return types.count(type) > 0 || (numeric && types.count("number") > 0);
        };
        if (has(mine) && has(theirs)) both.push_back(type);
      }
      if (both.empty()) return false;
      *own = both;
    } else if (name == "enum" && own->is_array() && value.is_array()) {
      Json both = Json::array();
      for (const Json& one : *own) {
        if (std::find(value.begin(), value.end(), one) != value.end()) both.push_back(one);
      }
      if (both.empty()) return false;
      *own = both;
    } else if (own->is_number() && value.is_number() &&
               (name.starts_with("min") || name.starts_with("max") || name.starts_with("exclusive"))) {
      const bool least = name.starts_with("min") || name == "exclusiveMinimum";
      if (least ? *own < value : value < *own) *own = value;
    } else if (name == "const") {
      return false;
    } else {
      throw Rejected(place, fmt::format("has two different {}, which are not combined", printable(name, 40)));
    }
  }
  return out;
}

std::vector<Json> SchemaWriter::alternatives(const Json& schema, const std::string& place) {
  if (schema.is_boolean()) return schema.get<bool>() ? std::vector<Json>{Json::object()} : std::vector<Json>{};
  if (!schema.is_object()) throw Rejected(place, fmt::format("is {}, a schema is wanted", json_kind(schema)));
  check_keywords(schema, place);
  if (++depth_ > limits_.max_depth) {
    throw Rejected(place, fmt::format("is nested deeper than {} schemas, or refers to itself", limits_.max_depth));
  }
  std::vector<Json> out;
  if (const Json* reference = member(schema, "$ref")) {
    out = alternatives(merged(without(schema, "$ref"), target(*reference, place), place), place);
  } else if (const Json* all = member(schema, "allOf")) {
    if (!all->is_array() || all->empty()) throw Rejected(place + ".allOf", "is no array of schemas");
    Json sum = without(schema, "allOf");
    for (size_t i = 0; i < all->size(); ++i) {
      const std::string where = fmt::format("{}.allOf[{}]", place, i);
      Json one = (*all)[i];
      for (int hops = 0; one.is_object() && one.contains("$ref"); ++hops) {
        if (hops > limits_.max_depth) throw Rejected(where, "refers to itself");
        one = merged(without(one, "$ref"), target(one["$ref"], where), where);
      }
      sum = merged(sum, one, where);
    }
    out = alternatives(sum, place);
  } else {
    const char* const name = schema.contains("anyOf") ? "anyOf" : "oneOf";
    if (const Json* options = member(schema, name)) {
      const std::string where = place + "." + name;
      if (!options->is_array() || options->empty()) throw Rejected(where, "is no array of schemas");
      if (std::string_view(name) == "oneOf") check_apart(*options, where);
      const Json rest = without(schema, name);
      for (size_t i = 0; i < options->size(); ++i) {
        const std::string here = fmt::format("{}[{}]", where, i);
        for (Json& one : alternatives(merged(rest, (*options)[i], here), here)) {
          out.push_back(std::move(one));
          if (out.size() > kMaxAlternatives) throw Rejected(place, "has too many alternatives");
        }
      }
    } else {
      out.push_back(schema);
    }
  }
  --depth_;
  return out;
}

// oneOf is anyOf where no value fits two of them: they have no type in common, or one property tells them apart.
void SchemaWriter::check_apart(const Json& options, const std::string& place) {
  std::vector<std::vector<Json>> flat;
  for (size_t i = 0; i < options.size(); ++i) {
    flat.push_back(alternatives(options[i], fmt::format("{}[{}]", place, i)));
  }
  const auto values_of = [&](const Json& schema, const std::string& where) -> std::vector<Json> {
    std::vector<Json> out;
    for (const Json& one : alternatives(schema, where)) {
      const std::vector<Json> values = listed(one, where);
      if (values.empty()) return {};
      out.insert(out.end(), values.begin(), values.end());
    }
    return out;
  };
  const auto no_common = [](const std::vector<Json>& a, const std::vector<Json>& b) {
    return !a.empty() && !b.empty() && std::none_of(a.begin(), a.end(), [&](const Json& value) {
      return std::find(b.begin(), b.end(), value) != b.end();
    });
  };
  const auto apart = [&](const Json& a, const Json& b) {
    if (no_common(listed(a, place), listed(b, place))) return true;
    const Kinds x = kinds(a, place), y = kinds(b, place);
    const bool both_say = a.contains("type") && b.contains("type");
    const bool numbers = (x.integer || x.number) && (y.integer || y.number);
    if (both_say && !numbers && !(x.null && y.null) && !(x.boolean && y.boolean) && !(x.string && y.string) &&
        !(x.array && y.array) && !(x.object && y.object)) {
      return true;
    }
    const Json *p = member(a, "properties"), *q = member(b, "properties");
    const Json *r = member(a, "required"), *s = member(b, "required");
    if (!both_say || p == nullptr || q == nullptr || r == nullptr || s == nullptr || !p->is_object() ||
        !q->is_object()) {
      return false;
    }
    for (const auto& [name, property] : p->items()) {
      if (!q->contains(name) || std::find(r->begin(), r->end(), name) == r->end() ||
          std::find(s->begin(), s->end(), name) == s->end()) {
        continue;
      }
      if (no_common(values_of(property, place), values_of((*q)[name], place))) return true;
    }
    return false;
  };
  for (size_t i = 0; i < flat.size(); ++i) {
    for (size_t j = i + 1; j < flat.size(); ++j) {
      for (const Json& a : flat[i]) {
        for (const Json& b : flat[j]) {
          if (!apart(a, b)) {
            throw Rejected(place, fmt::format("has alternatives {} and {} that may both fit; use anyOf, or tell them "
                                              "apart by type or by a required property with const or enum",
                                              i, j));
          }
        }
      }
    }
  }
}

Kinds SchemaWriter::kinds(const Json& flat, const std::string& place) {
  Kinds out;
  if (const Json* type = member(flat, "type")) {
    const std::set<std::string> types = types_of(*type, place);
    if (types.empty()) throw Rejected(place + ".type", "is empty");
    const auto has = [&](const char* name) { return types.count(name) > 0; };
    return {has("null"), has("boolean"), has("integer"), has("number"), has("string"), has("array"), has("object")};
  }
  for (const auto& [name, value] : flat.items()) {
    out.object |= is_in(kObject, name);
    out.array |= is_in(kArray, name);
    out.string |= is_in(kString, name);
    out.number |= is_in(kNumber, name);
  }
  return out;
}

std::vector<Json> SchemaWriter::listed(const Json& flat, const std::string& place) const {
  const Json *list = member(flat, "enum"), *single = member(flat, "const");
  if (list == nullptr && single == nullptr) return {};
  for (const auto& [name, value] : flat.items()) {
    if (!is_annotation(name) && !is_in(kAnyKind, name)) {
      throw Rejected(place + "." + printable(name, 40), "stands beside enum or const, which is not supported");
    }
  }
  if (list != nullptr && (!list->is_array() || list->empty())) throw Rejected(place + ".enum", "is no array of values");
  const Kinds wanted = kinds(flat, place);
  const auto fits = [&](const Json& value) {
    if (!flat.contains("type")) return true;
    return (wanted.null && value.is_null()) || (wanted.boolean && value.is_boolean()) ||
           (wanted.string && value.is_string()) || (wanted.array && value.is_array()) ||
           (wanted.object && value.is_object()) || (wanted.integer && value.is_number_integer()) ||
           (wanted.number && value.is_number());
  };
  std::vector<Json> out;
  for (const Json& value : list != nullptr ? *list : Json::array({*single})) {
    if (single != nullptr && value != *single) continue;
    if (fits(value)) out.push_back(value);
  }
  if (out.empty()) throw Rejected(place, "lists no value of its type");
  return out;
}

}  // namespace fourfold::structure
