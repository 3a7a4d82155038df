// Stored responses: bounded in number and in bytes, the oldest go first.
#include "serve/response_store.h"

#include <gtest/gtest.h>

#include <string>

namespace fourfold::serve {
namespace {

StoredResponse response(const std::string& text) {
  return {Json::array({{{"role", "user"}, {"content", text}}}), {{"id", text}}};
}

TEST(ResponseStore, KeepsTheLatest) {
  ResponseStore store(3, 1 << 20);
  for (const char* id : {"a", "b", "c", "d"}) store.put(id, response(id));
  EXPECT_EQ(store.find("a"), nullptr);
  ASSERT_NE(store.find("d"), nullptr);
  EXPECT_EQ(store.find("d")->response["id"], "d");
  EXPECT_TRUE(store.remove("c"));
  EXPECT_FALSE(store.remove("c"));
  EXPECT_EQ(store.find("c"), nullptr);
  store.put("e", response("e"));
  EXPECT_NE(store.find("b"), nullptr);
}

TEST(ResponseStore, IsBoundedInBytes) {
  ResponseStore store(100, 10'000);
  for (int i = 0; i < 20; ++i) store.put(std::to_string(i), response(std::string(500, 'x')));
  EXPECT_EQ(store.find("0"), nullptr);
  EXPECT_NE(store.find("19"), nullptr);
  store.put("large", response(std::string(20'000, 'x')));
  EXPECT_EQ(store.find("large"), nullptr);
  EXPECT_NE(store.find("19"), nullptr);
  // One that is put again takes the place of the other.
  for (int i = 0; i < 20; ++i) store.put("same", response("y"));
  EXPECT_NE(store.find("19"), nullptr);
}

}  // namespace
}  // namespace fourfold::serve
