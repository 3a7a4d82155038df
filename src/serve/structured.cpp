#include "serve/structured.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <string_view>
#include <utility>

#include "structure/constraint.h"
#include "structure/json_schema.h"
#include "structure/pattern.h"
#include "structure/tool_calls.h"

namespace fourfold::serve {
namespace {

using enum Treatment;

constexpr auto kMaxCompile = std::chrono::seconds(2);
constexpr size_t kMaxChoices = 1000, kMaxText = 64 << 10;

std::string whole_text_grammar(const structure::Part& body, bool after_reasoning) {
  structure::GrammarText grammar;
  return grammar.finish(
      after_reasoning ? structure::sequence({structure::repeated(structure::literal("\n"), 0, 2), body}) : body);
}

// A schema, or the text of one.
Json schema_of(const Json& given, const std::string& place) {
  if (given.is_object() || given.is_boolean()) return given;
  if (!given.is_string()) refuse(place, fmt::format("is {}, a schema is wanted", json_kind(given)));
  JsonLimits limits;
  limits.max_bytes = size_t{1} << 20;
  limits.max_depth = 100;
  try {
    return parse_json(given.get_ref<const std::string&>(), place, limits);
  } catch (const Error& error) {
    throw ApiError::field(place, error.what());
  }
}

std::string choice_grammar(const std::vector<std::string>& texts, bool after_reasoning) {
  std::vector<structure::Part> parts;
  for (const std::string& text : texts) parts.push_back(structure::literal(text));
  return whole_text_grammar(structure::choice(parts), after_reasoning);
}

structure::ConstraintOptions::Reasoning begin_of(chat::Reasoning reasoning) {
  using Reasoning = structure::ConstraintOptions::Reasoning;
  switch (reasoning) {
    case chat::Reasoning::kInside:
      return Reasoning::kInside;
    case chat::Reasoning::kMaybe:
      return Reasoning::kMaybe;
    case chat::Reasoning::kNone:
      break;
  }
  return Reasoning::kNone;
}

}  // namespace

void Structure::set(const std::string& field, std::function<std::string(bool)> grammar) {
  if (asked()) refuse(field, fmt::format("stands beside {}: an answer has one form", field_));
  field_ = field;
  grammar_ = std::move(grammar);
}

Structure Structure::of_format(const Json& format, const std::string& place) {
  Structure out;
  if (!format.is_object()) refuse(place, fmt::format("is {}, an object is wanted", json_kind(format)));
  const std::string type =
      format.contains("type") && format["type"].is_string() ? format["type"].get<std::string>() : "";
  if (type == "json_object") {
    out.schema_ = Json::object();
    out.set(place, structure::json_object_grammar);
  } else if (type == "json_schema") {
    // OpenAI's chat has an object around it.
    const bool nested = format.contains("json_schema");
    const Json& holder = nested ? format["json_schema"] : format;
    const std::string where = nested ? place + ".json_schema" : place;
    if (!holder.is_object()) refuse(where, fmt::format("is {}, an object is wanted", json_kind(holder)));
    if (!holder.contains("schema")) refuse(where + ".schema", "is missing");
    const Json schema = schema_of(holder["schema"], where + ".schema");
    out.schema_ = schema;
    out.set(where + ".schema", [schema](bool after) { return structure::json_schema_grammar(schema, after); });
  } else if (type != "text") {
    refuse(place + ".type", fmt::format("is '{}', wanted text, json_object or json_schema", printable(type, 60)));
  }
  return out;
}

Structure Structure::of_fields(const Fields& fields) {
  Structure out;
  if (const Json* format = fields.find("response_format"))
    out = of_format(*format, fields.full_name("response_format"));
  const auto json = [&](const Json* given, const std::string& place) {
    if (given == nullptr) return;
    const Json schema = schema_of(*given, place);
    out.set(place, [schema](bool after) { return structure::json_schema_grammar(schema, after); });
    out.schema_ = schema;
  };
  const auto regex = [&](const std::optional<std::string>& given, const std::string& place) {
    if (!given) return;
    out.set(place, [text = *given](bool after) {
      return whole_text_grammar(structure::pattern(text, {}, structure::Anchoring::kWhole), after);
    });
  };
  const auto choice = [&](const Json* given, const std::string& place) {
    if (given == nullptr) return;
    std::vector<std::string> texts;
    for (const Json& one : *given) {
      if (!one.is_string() || one.get_ref<const std::string&>().empty()) refuse(place, "has an entry that is no text");
      texts.push_back(one.get<std::string>());
    }
    if (texts.empty()) refuse(place, "is empty");
    out.set(place, [texts](bool after) { return choice_grammar(texts, after); });
  };
  const auto grammar = [&](const std::optional<std::string>& given, const std::string& place) {
    if (!given) return;
    out.set(place, [text = *given](bool) {
      structure::check_grammar(text);
      return text;
    });
  };
  json(fields.find("guided_json"), "guided_json");
  regex(fields.string("guided_regex", kMaxText), "guided_regex");
  choice(fields.array("guided_choice", kMaxChoices), "guided_choice");
  grammar(fields.string("guided_grammar", kMaxText), "guided_grammar");
  if (const Json* given = fields.object("structured_outputs")) {
    static constexpr FieldRule kRules[] = {{"json", kHonoured},
                                           {"regex", kHonoured},
                                           {"choice", kHonoured},
                                           {"grammar", kHonoured},
                                           {"json_object", kHonoured},
                                           {"structural_tag", kRefused, "use json, regex, choice or grammar"},
                                           {"whitespace_pattern", kRefused, "white space is bounded as it is"},
                                           {"disable_any_whitespace", kIgnored},
                                           {"disable_additional_properties", kIgnored},
                                           {"disable_fallback", kIgnored},
                                           {"_backend", kIgnored}};
    const Fields inner(*given, kRules, "structured_outputs.");
    json(inner.find("json"), "structured_outputs.json");
    regex(inner.string("regex", kMaxText), "structured_outputs.regex");
    choice(inner.array("choice", kMaxChoices), "structured_outputs.choice");
    grammar(inner.string("grammar", kMaxText), "structured_outputs.grammar");
    if (inner.boolean("json_object").value_or(false)) {
      out.set("structured_outputs.json_object", structure::json_object_grammar);
      out.schema_ = Json::object();
    }
    if (!out.asked()) refuse("structured_outputs", "has none of json, regex, choice, grammar and json_object");
  }
  return out;
}

void Structure::add_calls(const Json& tools, const ToolChoice& choice) {
  if (!tools.is_array() || tools.empty()) return;
  structure::ToolCallOptions options;
  parameters_ = choice.parameters;
  options.name = choice.name;
  options.parallel = choice.parallel;
  if (choice.kind != ToolChoice::Kind::kAuto) {
    // Who must call has no other answer that a format could be about.
    tools_ = tools;
    field_ = "tools";
    schema_.reset();
    grammar_ = [tools, options](bool after) mutable {
      options.after_reasoning = after;
      return structure::call_grammar(tools, options);
    };
  } else if (schema_) {
    tools_ = tools;
    grammar_ = [tools, options, schema = *schema_](bool after) mutable {
      options.after_reasoning = after;
      return structure::json_or_call_grammar(schema, tools, options);
    };
  } else if (!asked() && choice.strict) {
    tools_ = tools;
    field_ = "tools";
    grammar_ = [tools, options](bool after) mutable {
      options.after_reasoning = after;
      return structure::text_with_calls_grammar(tools, options);
    };
  }
}

void Structure::read_by(chat::AnswerOptions& answer) const {
  if (!asked()) return;
  answer.tools = tools_.is_array() ? structure::readable_tools(tools_) : Json();
}

void Structure::require_end(const Fields& fields, const GenerationFields& generation) const {
  if (!asked()) return;
  if (!structure::has_compiler()) {
    refuse(field_, "cannot be kept: this server was built without grammars (FOURFOLD_XGRAMMAR=OFF)");
  }
  if (generation.ignore_eos)
    fields.refuse("ignore_eos", fmt::format("is true, but {} says where the answer ends", field_));
  if (generation.min_tokens > 0)
    fields.refuse("min_tokens", fmt::format("is given, but {} says where the answer ends", field_));
}

bool all_strict(const Json& tools) {
  return tools.is_array() && !tools.empty() && std::all_of(tools.begin(), tools.end(), [](const Json& tool) {
           return tool["function"].value("strict", Json()) == true;
         });
}

bool take_strict(Json& tools) {
  const bool out = all_strict(tools);
  if (tools.is_array()) {
    for (Json& tool : tools) tool["function"].erase("strict");
  }
  return out;
}

std::string named_tool(const Json& holder, const Json& tools, const std::string& place) {
  const auto name = holder.find("name");
  if (name == holder.end() || !name->is_string()) refuse(place, "is no name of a tool");
  if (tools.is_array()) {
    for (const Json& tool : tools) {
      if (tool["function"]["name"] == *name) return name->get<std::string>();
    }
  }
  refuse(place, fmt::format("is {}, which is none of the tools", printable(dump(*name), 60)));
}

void start_generation(Service& service, const std::shared_ptr<ApiCall>& call, const Structure& structure,
                      chat::Reasoning reasoning, std::vector<GenerationJob::Part> parts,
                      std::unique_ptr<AnswerForm> form, bool stream) {
  if (!structure.asked()) {
    GenerationJob::start(std::make_shared<GenerationJob>(service, call, std::move(parts), std::move(form), stream));
    return;
  }
  // What waits for the grammar. Everything but the compiling is done on the exchange's own line of work.
  struct Waiting {
    std::vector<GenerationJob::Part> parts;
    std::unique_ptr<AnswerForm> form;
    bool over = false;
  };
  const auto waiting = std::make_shared<Waiting>();
  waiting->parts = std::move(parts);
  waiting->form = std::move(form);
  const bool after_reasoning = reasoning != chat::Reasoning::kNone;

  const auto go_on = [&service, call, waiting, stream, reasoning,
                      calls = structure.tools_.is_array()](const std::shared_ptr<const structure::Grammar>& grammar) {
    const ServedModel* model = service.model();
    if (model == nullptr) return service.fail(call, ApiError::busy("the server is shutting down", 5));
    structure::ConstraintOptions options;
    options.reasoning = begin_of(reasoning);
    options.think_open = model->text->tokenizer().find("<think>").value_or(-1);
    options.no_calls = calls;
    std::vector<GenerationJob::Part> single;
    for (const GenerationJob::Part& part : waiting->parts) {
      for (int64_t i = 0; i < part.answers; ++i) {
        GenerationJob::Part one;
        one.request = part.request;
        if (one.request.sampling.seed) *one.request.sampling.seed += static_cast<uint64_t>(i);
        options.stop_tokens = one.request.stop_tokens;
        options.in_reasoning = one.request.constraint;
        one.request.constraint = structure::make_constraint(grammar, model->reasoning_end, options);
        single.push_back(std::move(one));
      }
    }
    GenerationJob::start(
        std::make_shared<GenerationJob>(service, call, std::move(single), std::move(waiting->form), stream));
  };

  for (const GenerationJob::Part& part : waiting->parts) {
    if (part.request.stop_tokens.empty())
      refuse(structure.field_, "cannot be kept: the model has no token that ends an answer");
  }
  const bool taken = service.compile([&service, call, waiting, go_on, after_reasoning, field = structure.field_,
                                      parameters = structure.parameters_, text = structure.grammar_] {
    call->exchange->post([&service, call, waiting, field] {
      if (waiting->over) return;
      call->exchange->after(kMaxCompile, [&service, call, waiting, field] {
        if (std::exchange(waiting->over, true)) return;
        service.fail(call, ApiError::field(field, fmt::format("{} takes longer than {} s to make ready", field,
                                                              kMaxCompile.count())));
      });
    });
    std::shared_ptr<const structure::Grammar> grammar;
    std::optional<ApiError> error;
    try {
      grammar = service.require_model().compiler->compile(text(after_reasoning));
    } catch (const structure::Rejected& rejected) {
      // A place behind a space is one in the schema of a format, beside tools that others are in.
      const bool apart = rejected.place.starts_with(' '), in_tools = rejected.place.starts_with('[');
      std::string place =
          in_tools ? "tools" + rejected.place : field + (apart ? rejected.place.substr(1) : rejected.place);
      static constexpr std::string_view kWritten = ".function.parameters";
      if (const size_t at = place.find(kWritten); in_tools && at != std::string::npos) {
        place.replace(at, kWritten.size(), parameters);
      }
      error = ApiError::field(place, fmt::format("{} {}", place, rejected.what()));
    } catch (const ApiError& failed) {
      error = failed;
    } catch (const std::exception& failed) {
      error = ApiError::field(field, fmt::format("{} cannot be made ready: {}", field, failed.what()));
    }
    call->exchange->post([&service, call, waiting, go_on, grammar, error] {
      if (std::exchange(waiting->over, true)) return;
      if (error) return service.fail(call, *error);
      try {
        go_on(grammar);
      } catch (const std::exception& failed) {
        service.fail(call, ApiError(500, failed.what()));
      }
    });
  });
  if (!taken) throw ApiError::busy("too many requests are waiting");
}

}  // namespace fourfold::serve
