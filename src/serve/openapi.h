// The description of the API in OpenAPI's form, made from the tables by which requests are handled: routes and fields.
#pragma once

#include <string>
#include <vector>

#include "base/json.h"
#include "serve/fields.h"

namespace fourfold::serve {

// What the value of a field may be, null included, as a JSON schema. `path` is that of the route.
Json field_schema(const char* path, const FieldRule& rule);

// `keys`: requests need one. `names`: those of the model; none while it loads.
Json openapi_description(bool keys, const std::vector<std::string>& names);

}  // namespace fourfold::serve
