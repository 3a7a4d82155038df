// The host driver itself: memory, order on streams, graphs, faults.
#include <gtest/gtest.h>

#include <numeric>

#include "base/check.h"
#include "cuda/backend/memory.h"
#include "cuda/backend/sources.h"
#include "cuda/device/device.h"
#include "cuda/device/loader.h"
#include "hostcuda/testing.h"
#include "kernels/norm/norm_args.h"
#include "kernels/step/rows_args.h"

namespace fourfold::hostcuda {
namespace {

using cuda::Buffer;
using cuda::Device;
using cuda::Overlap;
using cuda::Stream;

template <typename F>
std::string error_of(F&& f) {
  try {
    f();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

class HostDriver : public testing::Test {
 protected:
  HostDriver() { install({}); }
};

TEST_F(HostDriver, IsACardToThePlanner) {
  const Device device;
  EXPECT_EQ(device.info().arch(), "sm_90a");
  EXPECT_EQ(device.gpu().title, "NVIDIA H200");
  EXPECT_EQ(device.gpu().sms, HostCard{}.sms);
  EXPECT_EQ(device.memory().total, uint64_t{4} << 30);
  install(blackwell_card());
  const Device other;
  EXPECT_EQ(other.info().arch(), "sm_120a");
  EXPECT_EQ(other.info().smem_per_block, 101376);
}

TEST_F(HostDriver, ResultsAreThereWhenTheStreamWasWaitedFor) {
  const Device device;
  const Stream stream(device);
  cuda::PinnedBuffer from(device, 64, "from"), to(device, 64, "to");
  Buffer buffer(device, 64, "buffer");
  std::fill_n(from.data(), 64, uint8_t{7});
  device.check(device.driver().call().copy_to_device(buffer.address(), from.data(), 64, stream.handle()), "copy");
  device.check(device.driver().call().copy_to_host(to.data(), buffer.address(), 64, stream.handle()), "copy");
  std::fill_n(from.data(), 64, uint8_t{9});  // too early: the copy has not taken place
  EXPECT_EQ(to.data()[0], 0xff);
  stream.synchronize();
  EXPECT_EQ(to.data()[0], 9);
  EXPECT_EQ(to.data()[63], 9);
}

TEST_F(HostDriver, OrdinaryMemoryHasLeftWhenTheCallReturns) {
  const Device device;
  const Stream stream(device);
  std::vector<uint8_t> bytes(32, 3);
  Buffer buffer(device, 32, "buffer");
  buffer.upload(stream, bytes);
  bytes.assign(32, 4);
  EXPECT_EQ(buffer.download<uint8_t>(stream, 32), std::vector<uint8_t>(32, 3));
}

TEST_F(HostDriver, NewMemoryIsPoisonAndMemoryEnds) {
  HostCard small;
  small.memory = 4096;
  install(small);
  const Device device;
  const Stream stream(device);
  Buffer first(device, 4000, "first");
  EXPECT_EQ(first.download<uint8_t>(stream, 1)[0], 0xff);
  EXPECT_NE(error_of([&] { Buffer(device, 100, "second"); }).find("second: 0.000 GB asked for"), std::string::npos);
  first = {};
  EXPECT_NO_THROW(Buffer(device, 4096, "all"));
  EXPECT_EQ(peak_bytes(), 4096u);
}

TEST_F(HostDriver, CopiesStayInsideTheirBuffers) {
  const Device device;
  const Stream stream(device);
  Buffer buffer(device, 32, "buffer");
  std::vector<uint8_t> bytes(33);
  const auto& call = device.driver().call();
  EXPECT_NE(call.copy_to_device(buffer.address(), bytes.data(), 33, stream.handle()), 0);
  EXPECT_NE(call.fill_bytes(buffer.address() + 1, 0, 32, stream.handle()), 0);
  EXPECT_NE(call.copy_to_host(bytes.data(), buffer.address() + 33, 1, stream.handle()), 0);
  EXPECT_EQ(call.fill_bytes(buffer.address() + 1, 0, 31, stream.handle()), 0);
}

struct Rounding : HostDriver {
  Device device;
  Stream stream{device};
  jit::KernelStore store{kernel_store()};
  cuda::KernelLoader loader{device, store, {}};
  std::vector<cuda::Kernel> kernels = loader.load(cuda::step_source());
  Buffer x{device, 64 * 4, "x"}, y{device, 64 * 2, "y"};

  void launch(int columns, Buffer& out, unsigned rows = 1) {
    const step::RoundArgs args = {x.as<float>(), 64, out.as<uint16_t>(), 64, columns};
    cuda::launch(stream, kernels[cuda::kRound], {rows}, Overlap::kProgrammatic, args);
  }
  void fill(float value) { x.upload(stream, std::vector<float>(64, value)); }
};

TEST_F(Rounding, KernelsRunWithTheirArguments) {
  fill(1.0f);
  launch(64, y);
  EXPECT_EQ(y.download<uint16_t>(stream, 64), std::vector<uint16_t>(64, 0x3f80));
}

TEST_F(Rounding, GraphsReplayOnWhatMemoryHoldsThen) {
  const cuda::Graph graph(stream, [&] {
    launch(64, y);
    device.check(device.driver().call().copy_on_device(y.address() + 64, y.address(), 64, stream.handle()), "copy");
  });
  EXPECT_EQ(calls(Call::kLaunch), 1);
  for (const float value : {1.0f, 2.0f}) {
    fill(value);
    graph.launch(stream);
    EXPECT_EQ(y.download<uint16_t>(stream, 64), std::vector<uint16_t>(64, value == 1.0f ? 0x3f80 : 0x4000));
  }
  EXPECT_NE(error_of([&] { cuda::Graph(stream, [&] { stream.synchronize(); }); }), "");
  EXPECT_NE(error_of([&] { cuda::Graph(stream, [&] { Buffer(device, 16, "in a graph"); }); }), "");
}

TEST_F(Rounding, AWriteBeyondABufferIsNamedAndNothingWorksAfterIt) {
  if (!executor::Device::checks_plain_accesses()) GTEST_SKIP() << "sanitizers see the kernels' accesses here";
  Buffer small(device, 32, "small");
  fill(1.0f);
  launch(17, small);
  const std::string error = error_of([&] { stream.synchronize(); });
  EXPECT_NE(error.find("round_rows"), std::string::npos) << error;
  EXPECT_NE(error.find("of 32 bytes`, which has 32"), std::string::npos) << error;
  EXPECT_NE(error_of([&] { launch(1, y); }), "");
  EXPECT_NE(error_of([&] { Buffer(device, 16, "after it"); }), "");
}

TEST_F(Rounding, MemoryThatWasFreedIsNotTouched) {
  const uint64_t address = Buffer(device, 256, "gone").address();
  const step::RoundArgs args = {cuda::device_pointer<float>(address), 64, y.as<uint16_t>(), 64, 4};
  cuda::launch(stream, kernels[cuda::kRound], {1}, Overlap::kNone, args);
  EXPECT_NE(error_of([&] { stream.synchronize(); }).find("which was freed"), std::string::npos);
}

TEST_F(Rounding, LaunchesThatNoCardTakesAreRefused) {
  EXPECT_NE(error_of([&] { launch(1, y, 0); }), "");
  cuda::Kernel greedy = kernels[cuda::kRound];
  greedy.smem_bytes = 48 * 1024 + 1;  // was not asked for when it was loaded
  const step::RoundArgs args = {x.as<float>(), 64, y.as<uint16_t>(), 64, 1};
  EXPECT_NE(error_of([&] { cuda::launch(stream, greedy, {1}, Overlap::kNone, args); }), "");
  greedy.smem_bytes = 0;
  greedy.threads = 1056;
  EXPECT_NE(error_of([&] { cuda::launch(stream, greedy, {1}, Overlap::kNone, args); }), "");
}

// The norm reads its input behind grid_dependency_wait() only; a copy that overlapped would be reported.
TEST_F(Rounding, AKernelThatStartsEarlyMayNotReadWhatTheOneBeforeWrites) {
  if (!executor::Device::checks_plain_accesses()) GTEST_SKIP() << "sanitizers see the kernels' accesses here";
  const std::vector<cuda::Kernel> norms = loader.load(cuda::norm_source());
  Buffer weight(device, 64 * 4, "weight"), out(device, 64 * 2, "out");
  fill(1.0f);
  weight.upload(stream, std::vector<float>(64, 1.0f));
  norm::NormArgs args = {};
  args.residual = x.as<float>();
  args.residual_stride = args.out_stride = args.columns = 64;
  args.weight = weight.as<float>();
  args.out = out.as<uint16_t>();
  const step::AddArgs add = {weight.as<float>(), 64, y.as<uint16_t>(), 64, 64, 1};
  y.fill(stream, 0);
  cuda::launch(stream, kernels[cuda::kAdd], {1}, Overlap::kProgrammatic, add);
  cuda::launch(stream, norms[cuda::kNorm1], {1}, Overlap::kProgrammatic, args);  // reads its weights before it waits
  EXPECT_NE(error_of([&] { stream.synchronize(); }).find("grid_dependency_wait is missing"), std::string::npos);
}

TEST_F(HostDriver, FaultsComeWhenTheyAreAskedFor) {
  const Device device;
  const Stream stream(device);
  fail_call(Call::kAllocate, 2, kOutOfMemory);
  EXPECT_NO_THROW(Buffer(device, 16, "first"));
  EXPECT_NE(error_of([&] { Buffer(device, 16, "second"); }), "");
  EXPECT_NO_THROW(Buffer(device, 16, "third"));
  fail_call(Call::kSynchronize, 1, kLaunchFailed);
  EXPECT_NE(error_of([&] { stream.synchronize(); }), "");
  EXPECT_NE(error_of([&] { stream.synchronize(); }), "") << "an error stays";
}

TEST_F(HostDriver, KernelsThatNobodyCompiledAreNamed) {
  const Device device;
  jit::KernelStore store(kernel_store());
  cuda::KernelLoader loader(device, store, {});
  const std::string error = error_of([&] { loader.load({"unknown", "#include \"nothing.cuh\"\n", {{"f", 32}}}); });
  EXPECT_NE(error.find("generate.cpp does not list f of this source"), std::string::npos) << error;
}

}  // namespace
}  // namespace fourfold::hostcuda
