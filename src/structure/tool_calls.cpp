#include "structure/tool_calls.h"

#include <algorithm>
#include <vector>

#include "structure/json_schema.h"

namespace fourfold::structure {
namespace {

constexpr Writing kJson{true, true}, kRaw{false, false};
constexpr size_t kMaxKey = 256;
constexpr int64_t kMaxCalls = 64;

const Json& function_of(const Json& tool) {
  const auto found = tool.find("function");
  return found == tool.end() ? tool : *found;
}

std::string name_of(const Json& tool) { return function_of(tool).value("name", ""); }

// What stands between < and > in the form.
void check_name(const std::string& name, const std::string& place) {
  if (name.empty() || name.size() > kMaxKey || name.find_first_of(" \t\n\r\f\v{}<>\"'=") != std::string::npos) {
    throw Rejected(place, fmt::format("is {}: a name of 1 to {} bytes without blanks, brackets and quotes is wanted",
                                      printable(name, 60), kMaxKey));
  }
}

// How a parameter's value is read: as one type, or null.
struct ReadAs {
  std::string type = "string";
  bool null = false;
};

const char* type_of(const Kinds& kinds) {
  return kinds.string    ? "string"
         : kinds.object  ? "object"
         : kinds.array   ? "array"
         : kinds.number  ? "number"
         : kinds.integer ? "integer"
         : kinds.boolean ? "boolean"
                         : "null";
}

Kinds kinds_of(const std::vector<Json>& values) {
  Kinds out;
  for (const Json& value : values) {
    out.null |= value.is_null();
    out.boolean |= value.is_boolean();
    out.integer |= value.is_number_integer();
    out.number |= value.is_number_float();
    out.string |= value.is_string();
    out.array |= value.is_array();
    out.object |= value.is_object();
  }
  return out;
}

// A text would be read as another type where one stands beside it, so the first type there is decides.
ReadAs read_as(SchemaWriter& writer, const std::vector<Json>& flats, const std::string& place) {
  ReadAs out;
  bool decided = false;
  for (const Json& flat : flats) {
    const std::vector<Json> values = writer.listed(flat, place);
    Kinds kinds = values.empty() ? SchemaWriter::kinds(flat, place) : kinds_of(values);
    out.null |= kinds.null;
    kinds.null = false;
    if (decided || (!kinds.any() && flat.contains("type"))) continue;
    if (kinds.any() || values.empty()) {
      out.type = kinds.any() ? type_of(kinds) : "string";
      decided = true;
    }
  }
  if (!decided && out.null) out.type = "null";
  return out;
}

bool is_of(const Kinds& kinds, const std::string& type) {
  return type == "string"    ? kinds.string
         : type == "object"  ? kinds.object
         : type == "array"   ? kinds.array
         : type == "number"  ? kinds.number || kinds.integer
         : type == "integer" ? kinds.integer
         : type == "boolean" ? kinds.boolean
                             : kinds.null;
}

Kinds only(const std::string& type, const Kinds& of) {
  Kinds out;
  out.null = type == "null";
  out.boolean = type == "boolean";
  out.integer = type == "integer" || (type == "number" && of.integer);
  out.number = type == "number" && of.number;
  out.array = type == "array";
  out.object = type == "object";
  return out;
}

class CallWriter {
 public:
  CallWriter(const Json& tools, GrammarText& grammar) : tools_(tools), grammar_(grammar) {}

  // From behind <tool_call> to the end of </tool_call>.
  Part rest_of_call(const std::string& only_name) {
    std::vector<Part> functions;
    for (size_t i = 0; i < tools_.size(); ++i) {
      const std::string name = name_of(tools_[i]), place = fmt::format("[{}].function", i);
      if (!only_name.empty() && name != only_name) continue;
      check_name(name, place + ".name");
      functions.push_back(sequence({literal(name + ">\n"), parameters(tools_[i], place + ".parameters")}));
    }
    FF_ASSERT(!functions.empty());
    return grammar_.rule(
        sequence({literal("\n<function="), grammar_.rule(choice(functions)), literal("</function>\n</tool_call>")}));
  }

 private:
  Part parameters(const Json& tool, const std::string& place) {
    const Json& function = function_of(tool);
    const auto given = function.find("parameters");
    if (given == function.end() || given->is_null()) return literal("");
    try {
      SchemaWriter writer(*given, grammar_, kJson);
      const std::vector<Json> ways = writer.alternatives(*given, "");
      if (ways.size() != 1) throw Rejected("", "are no schema of one object: combinations are not supported here");
      return grammar_.rule(parameters_of(writer, ways.front()));
    } catch (const Rejected& rejected) {
      throw Rejected(place + rejected.place, rejected.what());
    }
  }

  Part parameters_of(SchemaWriter& writer, const Json& schema) {
    const Kinds kinds = SchemaWriter::kinds(schema, "");
    if (kinds.any() && !kinds.object) throw Rejected(".type", "is not object");
    for (const char* name : {"patternProperties", "propertyNames", "minProperties", "maxProperties", "enum", "const"}) {
      if (schema.contains(name))
        throw Rejected(fmt::format(".{}", name), "is not supported for the parameters of a tool");
    }
    const Json properties = schema.value("properties", Json::object()),
               required = schema.value("required", Json::array());
    if (!properties.is_object()) throw Rejected(".properties", "is no object");
    if (!required.is_array()) throw Rejected(".required", "is no array of names");
    for (const Json& name : required) {
      if (!name.is_string() || !properties.contains(name.get_ref<const std::string&>())) {
        throw Rejected(".required", fmt::format("names {}, which is no property", printable(name.dump(), 40)));
      }
    }
    std::vector<Part> parts = {literal("")};
    for (const auto& [name, one] : properties.items()) {
      const std::string place = ".properties." + printable(name, 40);
      const bool needed = std::find(required.begin(), required.end(), name) != required.end();
      if (one == false && !needed) continue;
      check_name(name, place);
      const Part part =
          sequence({literal("<parameter=" + name + ">\n"), value(writer, one, place), literal("\n</parameter>\n")});
      parts.push_back(needed ? part : optional(part));
    }
    return sequence(parts);
  }

  Part value(SchemaWriter& writer, const Json& schema, const std::string& place) {
    const std::vector<Json> flats = writer.alternatives(schema, place);
    if (flats.empty()) throw Rejected(place, "lets no value through");
    const ReadAs as = read_as(writer, flats, place);
    std::vector<Part> ways;
    if (as.null && as.type != "null") ways.push_back(literal("null"));
    for (const Json& flat : flats) {
      const std::vector<Json> values = writer.listed(flat, place);
      for (const Json& one : values) {
        if (!is_of(kinds_of({one}), as.type)) continue;
        ways.push_back(one.is_string() ? raw_literal(one.get<std::string>(), place)
                                       : writer.value({{"const", one}}, place));
      }
      if (!values.empty()) continue;
      const Kinds kinds = SchemaWriter::kinds(flat, place);
      if (as.type == "string" && (kinds.string || !kinds.any())) {
        ways.push_back(text(writer, flat, place));
      } else if (is_of(kinds, as.type)) {
        ways.push_back(writer.one_kind(flat, only(as.type, kinds), place));
      }
    }
    return grammar_.rule(choice(ways));
  }

  static Part raw_literal(const std::string& text, const std::string& place) {
    if (text.find("<") != std::string::npos || text.starts_with("\n") || text.ends_with("\n")) {
      throw Rejected(place,
                     "lists a text with < in it, or with a line end around it, which the form of calls cannot carry");
    }
    return literal(text);
  }

  Part text(SchemaWriter& writer, const Json& flat, const std::string& place) {
    const bool bounded = flat.contains("minLength") || flat.contains("maxLength");
    if (flat.contains("pattern") || flat.contains("format")) return writer.string_text(flat, place, kRaw);
    if (bounded) {
      // Without the brackets and line ends that the form is made of, what ends it is clear.
      const CharSet plain = CharSet::all().minus({{'<', '<'}, {'\n', '\n'}});
      const int64_t least = writer.count(flat, "minLength", place, 0),
                    most = writer.count(flat, "maxLength", place, -1);
      if (most >= 0 && most < least) throw Rejected(place + ".maxLength", "is below minLength");
      return repeated(one_of(plain), least, most);
    }
    if (text_.empty()) {
      text_ = grammar_.declare();
      grammar_.define(text_, {"TagDispatch(excludes=(\"</function>\", \"</tool_call>\", \"<parameter=\"))", 64, 0, -1});
    }
    return grammar_.reference(text_);
  }

  const Json& tools_;
  GrammarText& grammar_;
  std::string text_;
};

}  // namespace

namespace {

Part calls(CallWriter& writer, const ToolCallOptions& options) {
  const Part call = sequence({literal("<tool_call>"), writer.rest_of_call(options.name)});
  if (!options.parallel) return call;
  // The reader of calls knows an end to them, too.
  return sequence({call, repeated(sequence({literal("\n"), call}), 0, kMaxCalls - 1)});
}

Part answer(const Part& body, const ToolCallOptions& options) {
  return options.after_reasoning ? sequence({repeated(literal("\n"), 0, 2), body}) : body;
}

}  // namespace

std::string call_grammar(const Json& tools, const ToolCallOptions& options) {
  GrammarText grammar;
  CallWriter writer(tools, grammar);
  return grammar.finish(answer(calls(writer, options), options));
}

std::string text_with_calls_grammar(const Json& tools, const ToolCallOptions& options) {
  GrammarText grammar;
  CallWriter writer(tools, grammar);
  const Part rest = writer.rest_of_call(options.name);
  const std::string text = grammar.declare();
  grammar.define(text,
                 {fmt::format("TagDispatch((\"<tool_call>\", {}), loop_after_dispatch={}, excludes=(\"<function=\",))",
                              rest.text, options.parallel),
                  64, 0, -1});
  return grammar.finish(grammar.reference(text));
}

std::string json_or_call_grammar(const Json& schema, const Json& tools, const ToolCallOptions& options) {
  GrammarText grammar;
  CallWriter writer(tools, grammar);
  const Part call = calls(writer, options);
  SchemaWriter json(schema, grammar, kJson);
  try {
    const Part whole = schema == Json::object() ? json.any_object() : json.value(schema, "");
    return grammar.finish(answer(choice({whole, call}), options));
  } catch (const Rejected& rejected) {
    throw Rejected(" " + rejected.place, rejected.what());
  }
}

Json readable_tools(const Json& tools) {
  Json out = Json::array();
  for (const Json& tool : tools) {
    Json function = {{"name", name_of(tool)}};
    const auto given = function_of(tool).find("parameters");
    if (given != function_of(tool).end() && given->is_object()) {
      Json& properties = function["parameters"]["properties"] = Json::object();
      try {
        GrammarText grammar;
        SchemaWriter writer(*given, grammar, kJson);
        for (const Json& way : writer.alternatives(*given, "")) {
          const Json named = way.value("properties", Json::object());
          for (const auto& [name, schema] : named.items()) {
            const ReadAs as = read_as(writer, writer.alternatives(schema, ""), "");
            properties[name] = {{"type", as.null ? Json{as.type, "null"} : Json(as.type)}};
          }
        }
      } catch (const Error&) {
        function["parameters"] = *given;  // a schema that nothing was forced by: read as it always was
      }
    }
    out.push_back({{"type", "function"}, {"function", std::move(function)}});
  }
  return out;
}

}  // namespace fourfold::structure
