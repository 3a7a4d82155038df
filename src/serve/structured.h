// Structured output and forced calls: what the APIs' fields ask for, and the way of such a request by the compiler.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "chat/answer.h"
#include "serve/fields.h"
#include "serve/generation_fields.h"
#include "serve/generation_job.h"
#include "serve/service.h"

namespace fourfold::serve {

// Which tools may be called, and whether one must be.
struct ToolChoice {
  enum class Kind { kAuto, kRequired, kNamed } kind = Kind::kAuto;
  std::string name;  // kNamed: one of the tools
  bool parallel = true;
  bool strict = false;                              // kAuto: calls follow the schemas of their parameters
  std::string parameters = ".function.parameters";  // where an API has them in a tool, for errors
};

// The form that an answer must have; none where nothing asks for one.
class Structure {
 public:
  // From response_format, structured_outputs and guided_*: an ApiError where they ask for more than one, or for what
  // there is not.
  static Structure of_fields(const Fields& fields);
  // From a format as `text` of responses and `output_config` of messages have it; `place` is its full name.
  static Structure of_format(const Json& format, const std::string& place);

  // Adds what is to be said of calls. `tools` are those of the prompt; null: there are none.
  void add_calls(const Json& tools, const ToolChoice& choice);

  bool asked() const { return grammar_ != nullptr; }
  // How the answer is read: a format without calls has no calls in it, whatever it says.
  void read_by(chat::AnswerOptions& answer) const;
  // An ApiError where other fields contradict a form.
  void require_end(const Fields& fields, const GenerationFields& generation) const;

 private:
  friend void start_generation(Service&, const std::shared_ptr<ApiCall>&, const Structure&, chat::Reasoning,
                               std::vector<GenerationJob::Part>, std::unique_ptr<AnswerForm>, bool);
  void set(const std::string& field, std::function<std::string(bool)> grammar);

  std::string field_;                         // what asked for it
  std::function<std::string(bool)> grammar_;  // after reasoning, or not
  std::optional<Json> schema_;                // of a format in JSON; {} is any object
  Json tools_;                                // calls are, or may be, written by the grammar
  std::string parameters_;                    // where their schemas are
};

// Whether all of the tools say that calls must follow their schemas. take_strict() takes it out of them, where an API
// has it and the prompt should not.
bool all_strict(const Json& tools);
bool take_strict(Json& tools);
// The name of a tool that must be called, from an object that has it.
std::string named_tool(const Json& holder, const Json& tools, const std::string& place);

// Starts the job of a request. One with a structure waits for its grammar, which is compiled on a thread for that; 400
// when it is not taken, or takes longer than 2 s.
void start_generation(Service& service, const std::shared_ptr<ApiCall>& call, const Structure& structure,
                      chat::Reasoning reasoning, std::vector<GenerationJob::Part> parts,
                      std::unique_ptr<AnswerForm> form, bool stream);

// "response_format" and the fields of vLLM, for the tables of fields.
inline constexpr FieldRule kStructureRules[] = {
    {"response_format", Treatment::kHonoured, "text, json_object, json_schema"},
    {"structured_outputs", Treatment::kHonoured, "one of json, regex, choice, grammar, json_object"},
    {"guided_json", Treatment::kHonoured, "a schema, or its text"},
    {"guided_regex", Treatment::kHonoured, "the answer as a whole"},
    {"guided_choice", Treatment::kHonoured, "1 to 1,000 texts"},
    {"guided_grammar", Treatment::kHonoured,
     "EBNF as xgrammar and llama.cpp have it, up to 64 KiB; the first rule is root"},
};

}  // namespace fourfold::serve
