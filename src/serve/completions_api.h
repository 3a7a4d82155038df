// The fields of completions.
#pragma once

#include <span>

#include "serve/fields.h"

namespace fourfold::serve {

std::span<const FieldRule> completion_fields();

}  // namespace fourfold::serve
