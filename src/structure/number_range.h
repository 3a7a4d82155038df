// Decimal numbers between two limits, as parts of a grammar.
#pragma once

#include <cstdint>
#include <optional>

#include "base/json.h"
#include "structure/grammar_text.h"

namespace fourfold::structure {

// A limit of a schema; `open`: the limit itself does not belong to the range.
struct Limit {
  Json number;
  bool open = false;
};

// Integers of up to 18 digits from `low` to `high`. An empty optional: there is none.
std::optional<Part> integers(const std::optional<Limit>& low, const std::optional<Limit>& high);
// Numbers from `low` to `high` with up to 15 digits before and 6 after the point. As above.
std::optional<Part> decimals(const std::optional<Limit>& low, const std::optional<Limit>& high);

}  // namespace fourfold::structure
