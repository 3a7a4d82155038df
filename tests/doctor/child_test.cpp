// A probe that hangs, crashes or fails is a fact and not the doctor's end.
#include "doctor/child.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include "base/check.h"

namespace fourfold::doctor {
namespace {

using std::chrono::milliseconds;
constexpr milliseconds kLong{60'000};

TEST(Child, GivesWhatItFound) {
  const std::string text(200'000, 'x');
  const ChildResult result = run_child([&] { return text; }, kLong);
  EXPECT_TRUE(result.ok) << result.failure;
  EXPECT_EQ(result.output, text);
  EXPECT_EQ(child_facts([] { return Json({{"a", 1}}); }, kLong)["a"], 1);
}

TEST(Child, EndsWhenItsTimeIsOver) {
  const auto begin = std::chrono::steady_clock::now();
  const ChildResult result = run_child(
      [] {
        ::signal(SIGTERM, SIG_IGN);
        for (;;) ::pause();
        return std::string();
      },
      milliseconds(100));
  EXPECT_FALSE(result.ok);
  EXPECT_NE(result.failure.find("longer than 100 ms"), std::string::npos) << result.failure;
  EXPECT_LT(std::chrono::steady_clock::now() - begin, kLong);
  EXPECT_NE(run_program({"sleep", "100"}, milliseconds(50)).failure.find("longer"), std::string::npos);
}

TEST(Child, MayCrashAndFail) {
  EXPECT_EQ(run_child([] { return ::raise(SIGKILL), std::string(); }, kLong).failure, "ended by signal 9");
  EXPECT_EQ(child_facts([]() -> Json { fail("no luck"); }, kLong)["failure"], "no luck");
  EXPECT_EQ(run_program({"a-program-that-is-not-there"}, kLong).failure, "there is no such program");
  EXPECT_EQ(run_program({"false"}, kLong).failure, "status 1");
  EXPECT_EQ(run_program({"echo", "a b"}, kLong).output, "a b\n");
}

}  // namespace
}  // namespace fourfold::doctor
