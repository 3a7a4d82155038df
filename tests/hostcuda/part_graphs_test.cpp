// Graphs of a step's parts (cuda/backend/part_graphs.h), by the host driver: what is recorded when, which are kept, and
// when dropping one waits for the device.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cuda/backend/memory.h"
#include "cuda/backend/part_graphs.h"
#include "cuda/backend/sources.h"
#include "hostcuda/testing.h"
#include "kernels/step/rows_args.h"

namespace fourfold::hostcuda {
namespace {

TEST(HostPartGraphs, KeepsThoseUsedLastAndWaitsForNoneThatHasEnded) {
  install({});
  const cuda::Device device;
  const cuda::Stream stream(device);
  jit::KernelStore store(kernel_store());
  cuda::KernelLoader loader(device, store, {});
  const std::vector<cuda::Kernel> kernels = loader.load(cuda::step_source());
  const cuda::Buffer x(device, 64 * 4, "x"), y(device, 64 * 2, "y");
  cuda::PartGraphs graphs(stream, 2);
  // What a part did: launched one by one, recorded, or replayed.
  const auto part = [&](int64_t key) {
    graphs.begin({key});
    const char* what = graphs.replaying() ? "replayed" : graphs.recording() ? "recorded" : "launched";
    if (!graphs.replaying()) {
      const step::RoundArgs args = {x.as<float>(), 64, y.as<uint16_t>(), 64, 64};
      cuda::launch(stream, kernels[cuda::kRound], {1}, cuda::Overlap::kProgrammatic, args);
    }
    int tables = 0;
    graphs.end([&] { ++tables; });
    EXPECT_EQ(tables, std::string(what) == "launched" ? 0 : 1);
    return std::string(what);
  };
  const auto of = [&](const std::vector<int64_t>& keys) {
    std::vector<std::string> all;
    for (const int64_t key : keys) all.push_back(part(key));
    return all;
  };
  using Parts = std::vector<std::string>;
  EXPECT_EQ(of({1, 1, 1, 2, 2}), (Parts{"launched", "recorded", "replayed", "launched", "recorded"}));
  EXPECT_TRUE(graphs.take_fresh());
  EXPECT_EQ(of({2, 1}), (Parts{"replayed", "replayed"}));
  EXPECT_FALSE(graphs.take_fresh());
  int64_t waits = calls(Call::kSynchronize);
  EXPECT_EQ(part(3), "launched");  // 2 goes, which may be running
  EXPECT_EQ(calls(Call::kSynchronize), ++waits);
  graphs.ended(graphs.begun());
  EXPECT_EQ(part(2), "launched");  // 1 goes, which has ended
  EXPECT_EQ(part(4), "launched");  // 3 goes, which was never recorded
  EXPECT_EQ(calls(Call::kSynchronize), waits);
  EXPECT_EQ(of({2, 2, 1}), (Parts{"recorded", "replayed", "launched"}));
}

}  // namespace
}  // namespace fourfold::hostcuda
