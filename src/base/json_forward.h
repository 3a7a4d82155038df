// The name alone, for headers that hand a value over: those who look into one include base/json.h. What includes the
// library takes a second longer to compile.
#pragma once

#include <nlohmann/json_fwd.hpp>

namespace fourfold {

using Json = nlohmann::ordered_json;  // objects keep the order of the text

}  // namespace fourfold
