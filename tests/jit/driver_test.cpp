// The driver: where there is a card, a compiled kernel is loaded and run; elsewhere its absence is an error with words.
#include "jit/driver.h"

#include <gtest/gtest.h>

#include "base/check.h"
#include "testing.h"

namespace fourfold::jit {
namespace {

TEST(Driver, AbsenceIsAnErrorThatSaysWhatWasTried) {
  std::string why;
  if (Driver::find(&why) != nullptr) GTEST_SKIP() << "there is a driver here";
  EXPECT_FALSE(why.empty());
  try {
    Driver::get();
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("no CUDA device can be used"), std::string::npos);
    EXPECT_NE(std::string(error.what()).find(why), std::string::npos);
  }
}

TEST(Driver, LoadsACompiledKernel) {
  FOURFOLD_NEEDS_NVRTC();
  std::string why;
  if (Driver::find(&why) == nullptr) GTEST_SKIP() << "no card on this machine:" << why;
  const Driver& driver = Driver::get();
  driver.use(0);
  const DeviceInfo device = driver.device(0);
  CompileRequest request;
  request.sources = {"probe.cu",
                     "extern \"C\" __global__ void probe(int n) { extern __shared__ int s[]; s[n] = n; "
                     "if (s[n] != n) __trap(); }",
                     {}};
  request.arch = device.arch();
  const CompileResult result = Nvrtc::get().compile(request);
  const Module module(driver, result.cubin, "probe");
  void* function = module.function("probe", device.smem_per_block);
  int n = static_cast<int>(device.smem_per_block / 4) - 1;
  void* arguments[] = {&n};
  driver.check(driver.call().launch(function, 1, 1, 1, 1, 1, 1, static_cast<unsigned>(device.smem_per_block), nullptr,
                                    arguments, nullptr),
               "launch with all of the block's shared memory");
  EXPECT_THROW(module.function("nothing", 0), Error);
  EXPECT_THROW(driver.device(driver.device_count()), Error);
  EXPECT_THROW(Module(driver, std::string(64, 'x') + '\0', "garbage"), Error);
}

TEST(Driver, MemorySharedWithTheProcessorIsRecognised) {
  EXPECT_EQ(host_memory(true, true), HostMemory::kOnePool);    // DGX Spark
  EXPECT_EQ(host_memory(true, false), HostMemory::kOnePool);   // Jetson
  EXPECT_EQ(host_memory(false, true), HostMemory::kCoherent);  // GH200, GB200
  EXPECT_EQ(host_memory(false, false), HostMemory::kApart);    // cards behind a bus
}

TEST(Driver, NamesTheArchitectureThatKernelsAreCompiledFor) {
  DeviceInfo device;
  device.major = 9;
  EXPECT_EQ(device.arch(), "sm_90a");
  device = {.name = "", .major = 12, .minor = 1};
  EXPECT_EQ(device.arch(), "sm_121a");
  device = {.name = "", .major = 8, .minor = 9};
  EXPECT_EQ(device.arch(), "sm_89");
  device = {.name = "", .major = 7, .minor = 5};
  EXPECT_EQ(device.arch(), "sm_75");
}

}  // namespace
}  // namespace fourfold::jit
