// The fields of Anthropic's messages, and their conversations in the form of the chat API.
#pragma once

#include <span>

#include "chat/conversation.h"
#include "serve/fields.h"

namespace fourfold::serve {

std::span<const FieldRule> messages_fields();

// System text, messages, tools as far as they may be called, thinking. What the form cannot say is an ApiError.
chat::Conversation read_messages(const Fields& fields);

}  // namespace fourfold::serve
