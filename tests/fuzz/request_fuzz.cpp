// The body of a request to one of the APIs (which one, the first byte says), read as far as its prompt: fields,
// messages, template, tokens. Nothing but Error may be thrown, and what is refused is refused with a message.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "base/check.h"
#include "serve/chat_api.h"
#include "serve/completions_api.h"
#include "serve/generation_fields.h"
#include "serve/messages_api.h"
#include "serve/responses_api.h"

namespace {

using namespace fourfold;
using namespace fourfold::serve;

constexpr size_t kMaxBytes = 16 << 10;  // longer ones say nothing new, slowly

const ServedModel& demo() {
  static const ServedModel* const kModel = [] {
    auto* model = new ServedModel;
    model->config = model::read_config(FOURFOLD_SOURCE_DIR "/models/demo");
    model->text = std::make_unique<chat::ChatText>(FOURFOLD_SOURCE_DIR "/models/demo", model->config);
    model->names = {"demo"};
    model->context = 4096;
    return model;
  }();
  return *kModel;
}

void finish(const Fields& fields, const chat::Conversation& conversation, const char* path,
            ErrorForm form = ErrorForm::kOpenAi) {
  const ServedModel& model = demo();
  const GenerationFields given = GenerationFields::read(fields, model);
  ApiCall call(nullptr, "fuzz");
  call.path = path;
  call.form = form;
  const engine::Request request = given.request(render(conversation, model, call), model, call);
  if (request.prompt.empty() || static_cast<int64_t>(request.prompt.size()) >= model.context) __builtin_trap();
}

void read(unsigned which, const Json& body) {
  switch (which % 4) {
    case 0: {
      const Fields fields(body, chat_fields());
      static_cast<void>(fields.ignored());
      return finish(fields, read_conversation(fields), "/v1/chat/completions");
    }
    case 1: {
      const Fields fields(body, messages_fields());
      return finish(fields, read_messages(fields), "/v1/messages", ErrorForm::kAnthropic);
    }
    case 2: {
      const Fields fields(body, responses_fields());
      chat::Conversation conversation;
      if (const Json* input = fields.find("input")) conversation.messages = messages_of_items(*input);
      return finish(fields, conversation, "/v1/responses");
    }
    default: {
      const Fields fields(body, completion_fields());
      static_cast<void>(GenerationFields::read(fields, demo()));
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0 || size > kMaxBytes) return 0;
  try {
    JsonLimits limits;
    limits.max_depth = 100;
    limits.reject_duplicate_keys = false;
    const Json body = parse_json({reinterpret_cast<const char*>(data) + 1, size - 1}, "the request's body", limits);
    read(data[0], body);
  } catch (const Error& error) {
    if (std::string_view(error.what()).empty()) __builtin_trap();
  }
  return 0;
}
