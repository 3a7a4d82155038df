// What the JSON schema of a tool's parameters says of a value's type, as far as a text that comes in its place is to be
// read by it. Nothing here refuses a schema: what is not understood says nothing.
#pragma once

#include <string>

#include "base/json_forward.h"

namespace fourfold::text {

// The type that decides how a text is read: the first one that is not null.
struct SchemaType {
  std::string type = "string";  // in small letters
  bool nullable = false;        // null is one of the types
};

// `document` is what references of the schema ("#", "#/$defs/NAME") lead into. The schema's own type comes first, then
// those of $ref, allOf, anyOf and oneOf.
SchemaType schema_type(const Json& schema, const Json& document);

// The schema of a property of `parameters`, which is its own document; also where its properties stand behind $ref,
// allOf, anyOf or oneOf. Null when there is none.
const Json* property_schema(const Json& parameters, const std::string& key);

}  // namespace fourfold::text
