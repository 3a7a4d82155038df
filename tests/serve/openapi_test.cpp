// The description of the API beside the tables that it is made from.
#include "serve/openapi.h"

#include <gtest/gtest.h>

#include <string>

#include "serve/chat_api.h"
#include "serve/completions_api.h"
#include "serve/messages_api.h"
#include "serve/responses_api.h"
#include "serve/routes.h"

namespace fourfold::serve {
namespace {

TEST(OpenApi, DescribesEveryRoute) {
  const Json description = openapi_description(false, {"a"});
  size_t operations = 0;
  for (const Route& route : routes()) {
    std::string path = route.path, method = route.method;
    if (path.ends_with('*')) path.replace(path.size() - 1, 1, "{id}");
    for (char& c : method) c = static_cast<char>(c + 32);
    ASSERT_TRUE(description["paths"].contains(path)) << path;
    ASSERT_TRUE(description["paths"][path].contains(method)) << path;
    const Json& operation = description["paths"][path][method];
    EXPECT_EQ(operation.contains("requestBody"), method == "post") << path;
    EXPECT_TRUE(operation["responses"].contains("200")) << path;
    ++operations;
  }
  size_t described = 0;
  for (const auto& [path, methods] : description["paths"].items()) described += methods.size();
  EXPECT_EQ(described, operations);
}

TEST(OpenApi, HasASchemaForEveryField) {
  const struct {
    const char* path;
    std::span<const FieldRule> rules;
  } tables[] = {{"/v1/chat/completions", chat_fields()},
                {"/v1/completions", completion_fields()},
                {"/v1/responses", responses_fields()},
                {"/v1/messages", messages_fields()},
                {"/v1/messages/count_tokens", messages_fields()},
                {"/tokenize", tokenize_fields()},
                {"/detokenize", detokenize_fields()}};
  const Json description = openapi_description(false, {"a"});
  for (const auto& table : tables) {
    const Json& properties =
        description["paths"][table.path]["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"];
    EXPECT_EQ(properties.size(), table.rules.size());
    for (const FieldRule& rule : table.rules) {
      ASSERT_TRUE(properties.contains(rule.name)) << rule.name;
      const bool refused = rule.treatment == Treatment::kRefused;
      EXPECT_EQ(properties[rule.name].contains("type") && properties[rule.name]["type"] == "null", refused)
          << rule.name;
    }
  }
}

// References lead somewhere.
void check_references(const Json& node, const Json& root) {
  if (node.is_object() && node.contains("$ref")) {
    const std::string reference = node["$ref"];
    ASSERT_TRUE(reference.starts_with("#/"));
    EXPECT_TRUE(root.contains(Json::json_pointer(reference.substr(1)))) << reference;
  }
  if (!node.is_structured()) return;
  for (const Json& inner : node) check_references(inner, root);
}

TEST(OpenApi, IsWhole) {
  for (const bool keys : {false, true}) {
    const Json description = openapi_description(keys, {});
    check_references(description, description);
    EXPECT_EQ(description.contains("security"), keys);
    EXPECT_EQ(description["paths"]["/v1/models"]["get"]["responses"].contains("401"), keys);
    EXPECT_FALSE(description["paths"]["/health"]["get"]["responses"].contains("401"));
  }
}

}  // namespace
}  // namespace fourfold::serve
