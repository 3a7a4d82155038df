// The fields of chat completions.
#pragma once

#include <span>

#include "chat/conversation.h"
#include "serve/fields.h"

namespace fourfold::serve {

std::span<const FieldRule> chat_fields();

// The conversation of a request: messages, tools as far as they may be called, documents, variables of the template.
chat::Conversation read_conversation(const Fields& fields);

}  // namespace fourfold::serve
