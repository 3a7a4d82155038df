// Masks from a request's constraint. A constraint is the caller's code: what it throws is an Error of its request.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "engine/engine.h"

namespace fourfold::engine {

// Tells the constraint that the token was chosen. An Error when it refuses a token that it allowed before.
void accept_token(Constraint& constraint, int32_t token);

// Appends a row of ceil(vocabulary / 32) words for the next token, and one for the token after each of `drafts`, as far
// as the constraint goes along. The constraint is then where it was. An Error when no token may come next.
void append_masks(Constraint& constraint, std::span<const int32_t> drafts, int64_t vocabulary,
                  std::vector<uint32_t>& rows);

}  // namespace fourfold::engine
