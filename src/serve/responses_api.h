// The fields of OpenAI's responses, and their items in the form of the chat API.
#pragma once

#include <span>

#include "serve/fields.h"

namespace fourfold::serve {

std::span<const FieldRule> responses_fields();

// The messages that input items are. What the form cannot say is an ApiError.
Json messages_of_items(const Json& input);

}  // namespace fourfold::serve
