// Conversations: what is asked of a model, in the form of OpenAI's chat API, whoever asks.
//
// Clients disagree about that form, and templates accept less than clients send. normalise() makes of every form the
// one that templates take; it stands before the template, once, for terminal, evaluation and server alike.
#pragma once

#include <string>
#include <string_view>
#include <utility>

#include "base/check.h"
#include "base/json.h"
#include "text/chat_template.h"

namespace fourfold::chat {

// A field of a conversation that is not what it must be. The message begins with the field.
class FieldError : public Error {
 public:
  FieldError(std::string field, const std::string& found) : Error(field + " " + found), field_(std::move(field)) {}
  const std::string& field() const { return field_; }  // "messages[2].content[0]"

 private:
  std::string field_;
};

struct Conversation {
  Json messages = Json::array();
  Json tools;                         // array or null
  Json documents;                     // array or null
  Json variables = Json::object();    // of the template: enable_thinking, preserve_thinking, reasoning_effort, ...
  bool add_generation_prompt = true;  // the model's turn begins

  // {"messages": [...], "tools": [...], "documents": [...], any variable of the template}, or the messages alone. The
  // model's turn begins, whatever is said of that. `name` is what an Error calls it.
  static Conversation from_json(const Json& json, std::string_view name);
};

// The text of one part of a content: a string, or an object of type text (or one of its other names, or refusal). A
// FieldError, which calls the part `field`, where it is anything else: an image, by its name.
std::string part_text(const Json& part, const std::string& field);

// The messages as templates take them:
//   - system and developer messages, wherever they stand, become one system message at the front, their texts joined by
//     an empty line; Claude Code's line x-anthropic-billing-header, which is another in each request, is left out of
//     it;
//   - content is a string: null, or no content at all, is an empty one; parts of text are joined, any other part (an
//     image) is refused by its name;
//   - reasoning is called reasoning_content, and is a string;
//   - arguments of tool calls are objects, also where they came as strings of JSON. What is no object is kept, as the
//     one argument `arguments`: a model that has written a broken call must not end the conversation.
// Other fields stay. A FieldError names the field, what was found and what was wanted. Normalised messages stay as they
// are.
Json normalise(const Json& messages);

// What the template is given: the conversation with its messages normalised.
text::ChatRequest template_request(const Conversation& conversation);

}  // namespace fourfold::chat
