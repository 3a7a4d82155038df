#include "structure/json_schema.h"

#include <algorithm>
#include <optional>

#include "structure/formats.h"
#include "structure/number_range.h"
#include "text/unicode.h"

namespace fourfold::structure {
namespace {

// Lengths up to the first are rules, one for each character; longer ones are counted. Each rule costs a walk through
// the vocabulary.
constexpr int64_t kMaxChain = 8, kMaxShortest = 64;

const Json* member(const Json& schema, const char* name) {
  const auto found = schema.find(name);
  return found == schema.end() ? nullptr : &*found;
}

size_t count_values(const Json& json) {
  size_t out = 1;
  if (json.is_structured()) {
    for (const Json& value : json) out += count_values(value);
  }
  return out;
}

std::optional<Limit> stricter(const Json& schema, const char* closed, const char* open, bool low,
                              const std::string& place) {
  std::optional<Limit> out;
  for (const char* name : {closed, open}) {
    const Json* value = member(schema, name);
    if (value == nullptr) continue;
    if (!value->is_number()) throw Rejected(fmt::format("{}.{}", place, name), "is no number");
    const bool wins = !out || (low ? !(*value < out->number) : !(out->number < *value));
    if (wins) out = Limit{*value, name == open};
  }
  return out;
}

// What stands behind a backslash; surrogates come in pairs only.
Part code_escape() {
  const Part hex = one_of({{'0', '9'}, {'A', 'F'}, {'a', 'f'}}), d = one_of({{'D', 'D'}, {'d', 'd'}});
  const Part high = one_of({{'8', '9'}, {'A', 'B'}, {'a', 'b'}}), low = one_of({{'C', 'F'}, {'c', 'f'}});
  const Part u = literal("u"), two = repeated(hex, 2, 2);
  const Part first = one_of({{'0', '9'}, {'A', 'C'}, {'E', 'F'}, {'a', 'c'}, {'e', 'f'}});
  const Part plain = choice({sequence({first, hex}), sequence({d, one_of({{'0', '7'}})})});
  const CharSet letters{{'"', '"'}, {'/', '/'}, {'\\', '\\'}, {'b', 'b'},
                        {'f', 'f'}, {'n', 'n'}, {'r', 'r'},   {'t', 't'}};
  return choice({one_of(letters), sequence({u, plain, two}), sequence({u, d, high, two, literal("\\u"), d, low, two})});
}

}  // namespace

SchemaWriter::SchemaWriter(const Json& root, GrammarText& grammar, const Writing& writing, const SchemaLimits& limits)
    : root_(root), grammar_(grammar), writing_{true, writing.escape_angle}, limits_(limits) {
  const size_t values = count_values(root);
  if (values > limits.max_values) {
    throw Rejected("", fmt::format("has {} values, at most {} are taken", values, limits.max_values));
  }
  const size_t bytes = root.dump(-1, ' ', false, Json::error_handler_t::replace).size();
  if (bytes > limits.max_bytes)
    throw Rejected("", fmt::format("has {} bytes, at most {} are taken", bytes, limits.max_bytes));
}

Part SchemaWriter::space() {
  const Part blanks = repeated(one_of({{' ', ' '}, {'\t', '\t'}}), 0, 16);
  return optional(choice({literal(" "), sequence({literal("\n"), blanks})}));
}

Part SchemaWriter::string_literal(std::string_view text) {
  const Part quote = literal("\"");
  return sequence({quote, written(text, writing_), quote});
}

Part SchemaWriter::json_literal(const Json& value) {
  if (value.is_string()) return string_literal(value.get_ref<const std::string&>());
  if (value.is_structured() && !value.empty()) {
    std::vector<Part> parts;
    parts.push_back(literal(value.is_array() ? "[" : "{"));
    for (const auto& [name, one] : value.items()) {
      if (parts.size() > 1) parts.push_back(literal(", "));
      if (value.is_object()) {
        parts.push_back(string_literal(name));
        parts.push_back(literal(": "));
      }
      parts.push_back(json_literal(one));
    }
    parts.push_back(literal(value.is_array() ? "]" : "}"));
    return sequence(parts);
  }
  return literal(value.dump());
}

int64_t SchemaWriter::count(const Json& schema, const char* name, const std::string& place, int64_t otherwise) const {
  const Json* value = member(schema, name);
  if (value == nullptr) return otherwise;
  const std::string where = fmt::format("{}.{}", place, name);
  const bool whole = value->is_number() && value->get<double>() == static_cast<double>(value->get<int64_t>());
  if (!whole || value->get<int64_t>() < 0 || value->get<int64_t>() > limits_.max_count) {
    throw Rejected(where, fmt::format("is {}, an integer from 0 to {} is wanted", printable(value->dump(), 40),
                                      limits_.max_count));
  }
  return value->get<int64_t>();
}

Part SchemaWriter::value(const Json& schema, const std::string& place) {
  if (++depth_ > limits_.max_depth)
    throw Rejected(place, fmt::format("is nested deeper than {} schemas", limits_.max_depth));
  Part out;
  if (only_refers(schema)) {
    check_keywords(schema, place);
    const Json& meant = target(schema["$ref"], place);
    const auto& name = schema["$ref"].get_ref<const std::string&>();
    auto known = rules_.find(name);
    if (known == rules_.end()) {
      known = rules_.emplace(name, grammar_.declare()).first;
      const std::string rule = known->second;
      // What only refers back to itself would be a rule that is itself.
      if (only_refers(meant)) {
        grammar_.define(rule, value(alternatives(meant, place).empty() ? Json(false) : meant, name));
      } else {
        grammar_.define(rule, value(meant, name));
      }
    }
    out = grammar_.reference(known->second);
  } else if (const Json* options = only_combines(schema)) {
    // Each by itself, so that what it refers to stays a rule and may refer back.
    check_keywords(schema, place);
    if (schema.contains("oneOf")) check_apart(*options, place + ".oneOf");
    std::vector<Part> ways;
    for (size_t i = 0; i < options->size(); ++i) {
      if ((*options)[i] != false) ways.push_back(value((*options)[i], fmt::format("{}[{}]", place, i)));
    }
    if (ways.empty()) throw Rejected(place, "lets no value through");
    out = choice(ways);
  } else {
    std::vector<Part> ways;
    for (const Json& flat : alternatives(schema, place)) {
      const std::vector<Json> values = listed(flat, place);
      for (const Json& one : values) ways.push_back(json_literal(one));
      if (!values.empty()) continue;
      const Kinds which = kinds(flat, place);
      ways.push_back(which.any() ? one_kind(flat, which, place) : any());
    }
    if (ways.empty()) throw Rejected(place, "lets no value through");
    out = choice(ways);
  }
  --depth_;
  return out;
}

Part SchemaWriter::one_kind(const Json& flat, const Kinds& which, const std::string& place) {
  std::vector<Part> ways;
  if (which.object) ways.push_back(object(flat, place));
  if (which.array) ways.push_back(array(flat, place));
  if (which.string) ways.push_back(string_text(flat, place, writing_));
  if (which.number || which.integer) ways.push_back(number(flat, place, !which.number));
  if (which.boolean) ways.push_back(choice({literal("true"), literal("false")}));
  if (which.null) ways.push_back(literal("null"));
  return choice(ways);
}

Part SchemaWriter::any() {
  if (any_.empty()) {
    any_ = grammar_.declare();
    any_array_ = grammar_.declare();
    const Part item = grammar_.reference(any_);
    grammar_.define(any_array_, list_of(item, 0, -1));
    const Json nothing = Json::object();
    grammar_.define(any_, choice({any_object(), grammar_.reference(any_array_), string_text(nothing, "", writing_),
                                  number(nothing, "", false), literal("true"), literal("false"), literal("null")}));
  }
  return grammar_.reference(any_);
}

Part SchemaWriter::any_object() {
  if (any_object_.empty()) {
    any_object_ = grammar_.declare();
    grammar_.define(any_object_, map(Json::object(), ""));
  }
  return grammar_.reference(any_object_);
}

Part SchemaWriter::list_of(const Part& item, int64_t least, int64_t most) {
  if (most == 0) return sequence({literal("["), space(), literal("]")});
  const Part next = grammar_.rule(sequence({literal(","), space(), item}));
  const Part more = repeated(next, std::max<int64_t>(least - 1, 0), most < 0 ? -1 : most - 1);
  const Part items = sequence({item, more, space()});
  return sequence({literal("["), space(), least == 0 ? optional(items) : items, literal("]")});
}

Part SchemaWriter::array(const Json& schema, const std::string& place) {
  const int64_t least = count(schema, "minItems", place, 0), most = count(schema, "maxItems", place, -1);
  if (most >= 0 && most < least)
    throw Rejected(place + ".maxItems", fmt::format("is {}, below minItems {}", most, least));
  const Json* unique = member(schema, "uniqueItems");
  if (unique != nullptr && *unique != false && (most < 0 || most > 1)) {
    throw Rejected(place + ".uniqueItems", "is not supported: no grammar remembers what was there");
  }
  const Json* items = member(schema, "items");
  const Json* first = member(schema, "prefixItems");
  if (items != nullptr && items->is_array()) throw Rejected(place + ".items", "is an array: use prefixItems");
  const bool closed = items != nullptr && *items == false;
  const auto item = [&] {
    return items == nullptr || *items == true ? any() : grammar_.rule(value(*items, place + ".items"));
  };
  if (first == nullptr || (first->is_array() && first->empty())) {
    if (closed && least > 0) throw Rejected(place + ".items", fmt::format("is false, but minItems is {}", least));
    if (closed || most == 0) return list_of(literal(""), 0, 0);
    return grammar_.rule(list_of(item(), least, most));
  }
  if (!first->is_array()) throw Rejected(place + ".prefixItems", "is no array of schemas");
  const auto size = static_cast<int64_t>(first->size());
  if (closed && least > size) throw Rejected(place + ".items", fmt::format("is false, but minItems is {}", least));
  // From the back: what may follow the first i items.
  Part rest = literal("");
  const int64_t last = most < 0 ? size : std::min(size, most);
  const bool open = items != nullptr || least > size;  // beyond its prefix only where the schema speaks of it
  if (!closed && open && (most < 0 || most > size)) {
    rest = repeated(sequence({literal(","), space(), item()}), std::max<int64_t>(least - size, 0),
                    most < 0 ? -1 : most - size);
  }
  for (int64_t i = last - 1; i >= 0; --i) {
    const std::string where = fmt::format("{}.prefixItems[{}]", place, i);
    std::vector<Part> parts;
    if (i > 0) parts.insert(parts.end(), {literal(","), space()});
    parts.push_back(value((*first)[static_cast<size_t>(i)], where));
    parts.push_back(rest);
    rest = grammar_.rule(i < least ? sequence(parts) : optional(sequence(parts)));
  }
  return grammar_.rule(sequence({literal("["), space(), rest, space(), literal("]")}));
}

Part SchemaWriter::number(const Json& schema, const std::string& place, bool integer) {
  const auto low = stricter(schema, "minimum", "exclusiveMinimum", true, place);
  const auto high = stricter(schema, "maximum", "exclusiveMaximum", false, place);
  if (const Json* step = member(schema, "multipleOf"); step != nullptr && (!integer || *step != 1)) {
    throw Rejected(place + ".multipleOf", "is not supported, but for 1 of an integer");
  }
  if (!low && !high) {
    const Part digit = one_of({{'0', '9'}}), minus = optional(literal("-"));
    const Part leading = one_of({{'1', '9'}});
    if (integer) return choice({literal("0"), sequence({minus, leading, repeated(digit, 0, 17)})});
    const Part whole = choice({literal("0"), sequence({leading, repeated(digit, 0, 14)})});
    const Part fraction = optional(sequence({literal("."), repeated(digit, 1, 15)}));
    const Part sign = optional(one_of({{'+', '+'}, {'-', '-'}}));
    const Part exponent = optional(sequence({one_of({{'E', 'E'}, {'e', 'e'}}), sign, repeated(digit, 1, 2)}));
    return sequence({minus, whole, fraction, exponent});
  }
  const auto out = integer ? integers(low, high) : decimals(low, high);
  if (!out) throw Rejected(place, "lets no number through");
  return grammar_.rule(*out);
}

Part SchemaWriter::string_text(const Json& schema, const std::string& place, const Writing& writing) {
  const int64_t least = count(schema, "minLength", place, 0), most = count(schema, "maxLength", place, -1);
  if (most >= 0 && most < least)
    throw Rejected(place + ".maxLength", fmt::format("is {}, below minLength {}", most, least));
  const auto text_of = [&](const char* name) -> std::optional<std::string> {
    const Json* given = member(schema, name);
    if (given == nullptr) return std::nullopt;
    if (!given->is_string()) throw Rejected(fmt::format("{}.{}", place, name), "is no string");
    return given->get<std::string>();
  };
  const auto regular = text_of("pattern"), format = text_of("format");
  const Part quote = literal("\"");
  const auto whole = [&](const Part& body) { return writing.json ? sequence({quote, body, quote}) : body; };
  if (!regular && !format) {
    if (!writing.json) return repeated(one_of(CharSet::all()), least, most);
    if (least == 0 && most < 0) {
      if (any_string_.empty()) {
        any_string_ = grammar_.rule(sequence({quote, string_end(0, 0)})).text;
      }
      return grammar_.reference(any_string_);
    }
    if (std::max(least, most) <= kMaxChain) return grammar_.rule(sequence({quote, string_end(least, most)}));
    if (least > kMaxShortest) {
      throw Rejected(place + ".minLength", fmt::format("is {}, at most {} are taken", least, kMaxShortest));
    }
    std::string& known = counted_strings_[{least, most, writing.escape_angle}];
    if (known.empty()) {
      const Part plain = one_of(plain_characters());
      // No rule but this one: what a token may be that goes on behind the end of a rule is open until it is asked for.
      std::vector<Part> parts(static_cast<size_t>(least), plain);
      parts.push_back({plain.text + "*", 1, 0, -1});
      const Part body = sequence(parts);
      // A count holds for a text that may end anywhere.
      known = grammar_.rule(whole(most < 0 ? body : grammar_.cut(body, most))).text;
    }
    return grammar_.reference(known);
  }
  if (regular && format) throw Rejected(place + ".format", "stands beside a pattern, which is not supported");
  const std::string where = place + (regular ? ".pattern" : ".format");
  Part body;
  if (regular) {
    try {
      body = pattern(*regular, writing, Anchoring::kSearch);
    } catch (const Rejected& rejected) {
      throw Rejected(where, rejected.what());
    }
  } else {
    const auto known = format_pattern(*format);
    if (!known)
      throw Rejected(where,
                     fmt::format("is {}, which is not known; known are {}", printable(*format, 40), known_formats()));
    body = pattern(*known, writing, Anchoring::kWhole);
  }
  if (body.shortest < least || (most >= 0 && (body.longest < 0 || body.longest > most))) {
    throw Rejected(where,
                   fmt::format("has texts of {} to {} characters, which minLength and maxLength would have to cut: say "
                               "the length in the pattern",
                               body.shortest, body.longest < 0 ? "any number of" : fmt::format("{}", body.longest)));
  }
  return grammar_.rule(whole(body));
}

CharSet SchemaWriter::plain_characters() const {
  CharSet special{{0, 0x1F}, {'"', '"'}, {'\\', '\\'}};
  if (writing_.escape_angle) special.add('<', '<');
  return special.complement();
}

// The rest of a string with its closing quote: one rule for each character that is counted, the last for itself again
// where there is no end. A rule that went on behind each character would leave open what a token of several means.
Part SchemaWriter::string_end(int64_t least, int64_t most) {
  const Part quote = literal("\""), plain = one_of(plain_characters());
  if (escape_.empty()) escape_ = grammar_.rule(sequence({literal("\\"), code_escape()})).text;
  const Part escape = grammar_.reference(escape_);
  const auto more = [&](const Part& next) {
    return std::vector<Part>{sequence({plain, next}), sequence({escape, next})};
  };
  const bool open = most <= 0;  // least and most may be 0 for any length
  Part next = quote;
  if (open) {
    const std::string name = grammar_.declare();
    std::vector<Part> ways = more(grammar_.reference(name));
    ways.push_back(quote);
    grammar_.define(name, choice(ways));
    next = grammar_.reference(name);
  }
  for (int64_t i = (open ? least : most) - 1; i >= 0; --i) {
    std::vector<Part> ways = more(next);
    if (i >= least) ways.push_back(quote);
    next = grammar_.rule(choice(ways));
  }
  return next;
}

// A key that is none of these names. It has no escapes, so it is no name in disguise either.
Part SchemaWriter::key_except(const std::vector<std::string>& names) {
  const CharSet plain = plain_characters();
  const Part rest = grammar_.rule(sequence({repeated(one_of(plain), 0, -1), literal("\"")}));
  struct Node {
    std::map<char32_t, size_t> next;
    bool name = false;
  };
  std::vector<Node> nodes(1);
  for (const std::string& name : names) {
    size_t at = 0;
    for (size_t byte = 0; byte < name.size();) {
      const char32_t c = text::next_code_point(name, byte);
      const auto [found, added] = nodes[at].next.emplace(c, nodes.size());
      const size_t next = found->second;
      if (added) nodes.emplace_back();
      at = next;
    }
    nodes[at].name = true;
  }
  // Children come after their parents.
  std::vector<Part> parts(nodes.size());
  for (size_t i = nodes.size(); i-- > 0;) {
    CharSet others = plain;
    std::vector<Part> ways;
    for (const auto& [c, next] : nodes[i].next) {
      others = others.minus({{c, c}});
      if (plain.contains(c)) ways.push_back(sequence({one_of({{c, c}}), parts[next]}));
    }
    if (!nodes[i].name) ways.push_back(literal("\""));
    ways.push_back(sequence({one_of(others), rest}));
    parts[i] = grammar_.rule(choice(ways));
  }
  return sequence({literal("\""), parts[0]});
}

Part SchemaWriter::map(const Json& schema, const std::string& place) {
  const int64_t least = count(schema, "minProperties", place, 0), most = count(schema, "maxProperties", place, -1);
  if (least > 1)
    throw Rejected(place + ".minProperties", "is above 1 for properties without names, which is not supported");
  if (most >= 0 && most < least) throw Rejected(place + ".maxProperties", "is below minProperties");
  const Json* additional = member(schema, "additionalProperties");
  const Json* patterns = member(schema, "patternProperties");
  const Json* names = member(schema, "propertyNames");
  Part key;
  const Json* schema_of_values = additional;
  std::string where = place + ".additionalProperties";
  if (patterns != nullptr && patterns->is_object() && !patterns->empty()) {
    where = place + ".patternProperties";
    if (patterns->size() > 1) throw Rejected(where, "has several patterns, which is not supported");
    if (names != nullptr)
      throw Rejected(place + ".propertyNames", "stands beside patternProperties, which is not supported");
    schema_of_values = &patterns->begin().value();
    where += "." + printable(patterns->begin().key(), 40);
    key = string_text({{"pattern", patterns->begin().key()}}, where, writing_);
  } else {
    const bool closed = additional != nullptr && *additional == false;
    if (closed && least > 0) throw Rejected(place + ".minProperties", "wants properties where there can be none");
    if (closed || most == 0) return sequence({literal("{"), space(), literal("}")});
    if (names != nullptr) {
      std::vector<Part> ways;
      for (const Json& flat : alternatives(*names, place + ".propertyNames")) {
        const std::vector<Json> values = listed(flat, place + ".propertyNames");
        for (const Json& one : values) {
          if (one.is_string()) ways.push_back(json_literal(one));
        }
        if (values.empty()) ways.push_back(string_text(flat, place + ".propertyNames", writing_));
      }
      if (ways.empty()) throw Rejected(place + ".propertyNames", "lets no name through");
      key = grammar_.rule(choice(ways));
    } else {
      key = string_text(Json::object(), place, writing_);
    }
  }
  const bool free = schema_of_values == nullptr || *schema_of_values == true;
  const Part property = grammar_.rule(
      sequence({key, literal(":"), optional(literal(" ")), free ? any() : value(*schema_of_values, where)}));
  const Part more = repeated(sequence({literal(","), space(), property}), 0, most < 0 ? -1 : most - 1);
  const Part all = sequence({property, more, space()});
  return grammar_.rule(sequence({literal("{"), space(), least == 0 ? optional(all) : all, literal("}")}));
}

Part SchemaWriter::object(const Json& schema, const std::string& place) {
  if (const Json* open = member(schema, "unevaluatedProperties"); open != nullptr && *open != false) {
    throw Rejected(place + ".unevaluatedProperties", "is not supported, but for false");
  }
  Json properties = Json::object();
  if (const Json* given = member(schema, "properties")) {
    if (!given->is_object()) throw Rejected(place + ".properties", "is no object");
    properties = *given;
  }
  std::vector<std::string> required;
  if (const Json* given = member(schema, "required")) {
    if (!given->is_array()) throw Rejected(place + ".required", "is no array of names");
    for (const Json& name : *given) {
      if (!name.is_string()) throw Rejected(place + ".required", "is no array of names");
      if (std::find(required.begin(), required.end(), name) == required.end())
        required.push_back(name.get<std::string>());
    }
  }
  const Json* additional = member(schema, "additionalProperties");
  const bool closed = additional != nullptr && *additional == false;
  for (const std::string& name : required) {
    if (properties.contains(name)) continue;
    if (closed) throw Rejected(place + ".required", fmt::format("names {}, which is no property", printable(name, 40)));
    properties[name] = additional == nullptr ? Json(true) : *additional;
  }
  if (properties.empty()) {
    const bool says = closed || schema.contains("patternProperties") || schema.contains("propertyNames") ||
                      schema.contains("maxProperties") || schema.contains("minProperties") ||
                      (additional != nullptr && *additional != true) || schema.contains("unevaluatedProperties");
    if (!says && !schema.contains("properties")) return any_object();
    Json closing = schema;
    // With properties: {} or unevaluatedProperties: false others are wanted only where the schema says so.
    if (additional == nullptr && (schema.contains("properties") || schema.contains("unevaluatedProperties"))) {
      closing["additionalProperties"] = false;
    }
    return map(closing, place);
  }
  for (const char* name : {"patternProperties", "propertyNames"}) {
    if (schema.contains(name))
      throw Rejected(fmt::format("{}.{}", place, name), "stands beside properties, which is not supported");
  }

  struct Property {
    Part part;
    bool required;
  };
  std::vector<Property> list;
  std::vector<std::string> names;
  for (const auto& [name, one] : properties.items()) {
    const bool needed = std::find(required.begin(), required.end(), name) != required.end();
    names.push_back(name);
    if (one == false) {
      if (needed) throw Rejected(place + ".required", fmt::format("names {}, which may not be", printable(name, 40)));
      continue;
    }
    const std::string where = fmt::format("{}.properties.{}", place, printable(name, 40));
    list.push_back(
        {grammar_.rule(sequence({string_literal(name), literal(":"), optional(literal(" ")), value(one, where)})),
         needed});
  }
  const auto needed =
      static_cast<int64_t>(std::count_if(list.begin(), list.end(), [](const Property& p) { return p.required; }));
  const auto size = static_cast<int64_t>(list.size());
  int64_t least = count(schema, "minProperties", place, 0);
  const int64_t most = count(schema, "maxProperties", place, -1);
  if (least == size && needed < size) {
    for (Property& property : list) property.required = true;
    least = 0;
  }
  if (least > std::max<int64_t>(1, needed)) {
    throw Rejected(place + ".minProperties",
                   fmt::format("is {}: more than one, the required ones or all properties is not supported", least));
  }
  if (most >= 0 && most < size) {
    throw Rejected(place + ".maxProperties",
                   fmt::format("is {}, fewer than there are properties, which is not supported", most));
  }
  const Part comma = sequence({literal(","), space()});
  Part extra = literal("");
  if (additional != nullptr && !closed && most != size) {
    const Part any_value =
        *additional == true ? any() : grammar_.rule(value(*additional, place + ".additionalProperties"));
    const Part property = grammar_.rule(sequence({key_except(names), literal(":"), optional(literal(" ")), any_value}));
    extra = grammar_.rule(repeated(sequence({comma, property}), 0, most < 0 ? -1 : most - size));
  }
  // Up to the first required property there may have been none yet, so that no comma stands in front.
  const auto first = static_cast<size_t>(
      std::find_if(list.begin(), list.end(), [](const Property& p) { return p.required; }) - list.begin());
  std::vector<Part> tail;
  for (size_t i = first + 1; i < list.size(); ++i) {
    const Part one = sequence({comma, list[i].part});
    tail.push_back(list[i].required ? one : optional(one));
  }
  tail.push_back(extra);
  Part behind = grammar_.rule(sequence(tail));  // what follows property `first`
  std::optional<Part> fresh;                    // from here on, with nothing in front
  size_t i = first;
  if (first < list.size()) {
    fresh = sequence({list[first].part, behind});
    behind = grammar_.rule(sequence({comma, list[first].part, behind}));
  }
  while (i-- > 0) {
    const Part here = sequence({list[i].part, behind});
    fresh = grammar_.rule(fresh ? choice({here, *fresh}) : here);
    behind = grammar_.rule(sequence({optional(sequence({comma, list[i].part})), behind}));
  }
  const bool may_be_empty = first == list.size() && least == 0;
  if (!fresh) return sequence({literal("{"), space(), literal("}")});
  const Part all = sequence({*fresh, space()});
  return grammar_.rule(sequence({literal("{"), space(), may_be_empty ? optional(all) : all, literal("}")}));
}

namespace {

// Behind its reasoning a model begins with line ends; they are no part of the answer.
Part answer(const Part& body, bool after_reasoning) {
  return after_reasoning ? sequence({repeated(literal("\n"), 0, 2), body}) : body;
}

}  // namespace

std::string json_schema_grammar(const Json& schema, bool after_reasoning) {
  GrammarText grammar;
  SchemaWriter writer(schema, grammar, {true, false});
  return grammar.finish(answer(writer.value(schema, ""), after_reasoning));
}

std::string json_object_grammar(bool after_reasoning) {
  GrammarText grammar;
  const Json any = Json::object();
  SchemaWriter writer(any, grammar, {true, false});
  return grammar.finish(answer(writer.any_object(), after_reasoning));
}

}  // namespace fourfold::structure
