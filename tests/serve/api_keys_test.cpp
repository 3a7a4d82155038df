// Keys, their limits and their priorities.
#include "serve/api_keys.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "base/temporary_directory.h"
#include "serve/api_error.h"

namespace fourfold::serve {
namespace {

using std::chrono::milliseconds;
using Time = ApiKey::Time;

const Time kBegin = Time() + std::chrono::hours(1);

std::shared_ptr<ApiKey> key(const KeyLimits& limits) { return std::make_shared<ApiKey>("secret", "name", limits); }

// The seconds of Retry-After; 0 when the request is taken, and then kept in `held`.
int ask(const std::shared_ptr<ApiKey>& who, Time now, std::vector<std::shared_ptr<void>>& held) {
  try {
    held.push_back(ApiKey::admit(who, now));
    return 0;
  } catch (const ApiError& error) {
    EXPECT_EQ(error.status, 429);
    EXPECT_EQ(std::string(error.what()).find("secret"), std::string::npos);
    const HttpResponse response = error.response(ErrorForm::kOpenAi);
    EXPECT_EQ(response.headers.back().first, "retry-after");
    return error.retry_after.value_or(0);
  }
}

TEST(ApiKeys, BoundsWhatRunsAtOnce) {
  KeyLimits limits;
  limits.running = 2;
  const auto one = key(limits), other = key(limits);
  std::vector<std::shared_ptr<void>> held;
  EXPECT_EQ(ask(one, kBegin, held), 0);
  EXPECT_EQ(ask(one, kBegin, held), 0);
  EXPECT_EQ(ask(one, kBegin, held), 1);
  EXPECT_EQ(ask(other, kBegin, held), 0) << "each key has limits of its own";
  held.erase(held.begin());
  EXPECT_EQ(ask(one, kBegin, held), 0);
  EXPECT_EQ(ask(one, kBegin, held), 1);
}

TEST(ApiKeys, BoundsWhatComesInAMinute) {
  KeyLimits limits;
  limits.per_minute = 6;
  const auto one = key(limits);
  std::vector<std::shared_ptr<void>> held;
  for (int i = 0; i < 6; ++i) EXPECT_EQ(ask(one, kBegin, held), 0);
  EXPECT_EQ(ask(one, kBegin, held), 10);
  EXPECT_EQ(ask(one, kBegin + milliseconds(9'000), held), 1);
  EXPECT_EQ(ask(one, kBegin + milliseconds(10'001), held), 0);
  EXPECT_EQ(ask(one, kBegin + milliseconds(10'001), held), 10);
  // What was not asked for in an hour does not add up.
  const Time later = kBegin + std::chrono::hours(1);
  for (int i = 0; i < 6; ++i) EXPECT_EQ(ask(one, later, held), 0);
  EXPECT_NE(ask(one, later, held), 0);
}

TEST(ApiKeys, AKeysPriorityComesBeforeThatOfRequests) {
  EXPECT_LT(engine_priority(-1, 1'000'000), engine_priority(0, -1'000'000));
  EXPECT_LT(engine_priority(0, -1), engine_priority(0, 0));
  EXPECT_LT(engine_priority(kMaxKeyPriority, kMaxRequestPriority - 1), engine_priority(kMaxKeyPriority, 1 << 30));
  EXPECT_GT(engine_priority(-kMaxKeyPriority, -kMaxRequestPriority), INT32_MIN);
}

class ApiKeyFile : public testing::Test {
 protected:
  ApiKeys read(const std::string& text) const {
    std::ofstream(path_) << text;
    ApiKeys keys;
    keys.read(path_);
    return keys;
  }
  std::string refusal(const std::string& text) const {
    try {
      read(text);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  }

 private:
  const TemporaryDirectory directory_;
  const std::filesystem::path path_ = directory_ / "keys";
};

TEST_F(ApiKeyFile, HasAKeyInEachLine) {
  const ApiKeys keys = read(
      "# keys\n\nfirst-key\nsecond-key name=second max-requests=3 requests-per-minute=90 priority=-5 # a comment\r\n"
      "  third-key\tpriority=7");
  ASSERT_NE(keys.find("first-key"), nullptr);
  EXPECT_EQ(keys.find("first-key")->limits().running, 0);
  const auto second = keys.find("second-key");
  ASSERT_NE(second, nullptr);
  EXPECT_EQ(second->name(), "second");
  EXPECT_EQ(second->limits().running, 3);
  EXPECT_EQ(second->limits().per_minute, 90);
  EXPECT_EQ(second->limits().priority, -5);
  EXPECT_EQ(keys.find("third-key")->limits().priority, 7);
  for (const char* other : {"", "first", "first-keyy", "# keys", "first-kez"}) {
    EXPECT_EQ(keys.find(other), nullptr) << other;
  }
}

TEST_F(ApiKeyFile, SaysWhichLineIsWrong) {
  EXPECT_NE(refusal("first-key\nabc\n").find("line 2"), std::string::npos);
  EXPECT_NE(refusal("first-key\n\nfirst-key\n").find("line 3"), std::string::npos);
  EXPECT_NE(refusal("first-key max-requests=0").find("max-requests is '0'"), std::string::npos);
  EXPECT_NE(refusal("first-key priority=9999").find("priority is '9999'"), std::string::npos);
  EXPECT_NE(refusal("first-key limit=3").find("limit is not known"), std::string::npos);
  EXPECT_NE(refusal("first-key name=").find("name"), std::string::npos);
}

}  // namespace
}  // namespace fourfold::serve
