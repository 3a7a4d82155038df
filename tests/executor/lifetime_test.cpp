// Devices that live as long as the program. Not compiled as a kernel's file is: GoogleTest's processes want atomics.
#include <gtest/gtest.h>

#include "executor/executor.h"

namespace fourfold::executor {
namespace {

// A sanitizer reports what comes too late.
void end_with_a_device() {
  static Device device(Options{});  // older than the stacks that fibers leave behind for others
  const LaunchConfig config{"many", {}, 1024, 0};
  Device(Options{}).launch(config, [] {});
  device.launch(config, [] {});
  std::exit(0);
}

TEST(Executor, ADeviceMayEndWithTheProgram) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(end_with_a_device(), testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace fourfold::executor
