// Tuning of products on the host driver, where times say nothing: that what wins is stored, read by the next backend on
// that card and right, and that what fails its self-test does not win.
#include "measure/way_tuner.h"

#include "base/check.h"
#include "base/file.h"
#include "cuda/backend/cuda_backend.h"
#include "cuda/backend/measured_ways.h"
#include "hostcuda/broken.h"
#include "hostcuda/testing.h"
#include "nvfp4/number.h"

namespace fourfold::hostcuda {
namespace {

constexpr int64_t kSize = 256;
constexpr cuda::MatrixShape kShape = {4, kSize, kSize};
// What is built for the host besides the list's own way.
constexpr cuda::RowsWay kOther = {4, 8, 1, 2, 1, 0, 1};

// A matrix of 0.5 in the diagonal's blocks of 16, and rows that are multiplied with it.
struct Products {
  cuda::CudaBackend backend;
  std::vector<uint8_t> codes = std::vector<uint8_t>(kSize * kSize / 2),
                       scales = std::vector<uint8_t>(kSize * kSize / 16);
  std::unique_ptr<ops::Matrix> matrix;
  std::unique_ptr<ops::Buffer> x, y;

  Products(const std::filesystem::path& store, const cuda::LoadOptions& load = {})
      : backend(
            [&] {
              cuda::CudaOptions options = cuda_options();
              options.store = store;
              return options;
            }(),
            std::make_shared<cuda::Card>(0, store, load)) {
    for (int64_t row = 0; row < kSize; ++row) {
      for (int64_t i = 0; i < 8; ++i) codes[static_cast<size_t>(row * kSize / 2 + row / 16 * 8 + i)] = 0x11;
    }
    std::fill(scales.begin(), scales.end(), uint8_t{0x38});
    ops::MatrixSource source;
    source.name = "weights";
    source.format = ops::Format::kNvfp4;
    source.rows = source.columns = kSize;
    source.data = codes.data();
    source.block_scales = scales.data();
    matrix = backend.load_matrix(std::span(&source, 1));
    x = backend.allocate(8 * kSize * 2);
    y = backend.allocate(8 * kSize * 4);
    backend.reserve({8, 1, 16, 0});
  }
  void multiply(int64_t rows) {
    const std::vector<int32_t> tokens(static_cast<size_t>(rows));
    ops::Sequence sequence;
    sequence.count = static_cast<int32_t>(rows);
    backend.begin_step({tokens, std::span(&sequence, 1), {}});
    backend.linear(backend.tensor(*x, rows, kSize), *matrix, ops::Backend::floats(*y, rows, kSize));
  }
  // Of rows of ones: 16 times a half.
  void expect_right() {
    const std::vector<uint16_t> ones(5 * kSize, nvfp4::float_to_bf16(1));
    const cuda::Stream stream(backend.device());
    static_cast<cuda::DeviceBuffer&>(*x).buffer().upload(stream, ones);
    stream.synchronize();
    std::vector<float> got(5 * kSize);
    multiply(5);
    backend.read(ops::Backend::floats(*y, 5, kSize), got);
    for (const float value : got) ASSERT_EQ(value, 8);
  }
  std::vector<measure::TunedMatrix> tune(std::vector<cuda::RowsWay> candidates) {
    measure::WayTunerOptions options;
    options.rounds = options.replays = 1;
    options.least_gain = -100;  // the second one wins
    options.candidates = [&](const cuda::MatrixShape&) { return candidates; };
    return measure::tune_products(backend, {[&] { multiply(1); }, [&] { multiply(8); }}, options);
  }
};

TEST(HostWayTuner, WinnersAreStoredAndTakenByTheNextBackend) {
  if (!executor::Device::checks_plain_accesses()) GTEST_SKIP() << "sanitizers see the kernels' accesses here";
  const HostCard card;
  install(card);
  const TemporaryDirectory store;
  const std::string identity = cuda::ways_identity(card.name, jit::Driver::get().version());
  cuda::RowsWay planned;
  {
    Products products(store.path());
    planned = rows_way(products.backend.target(), 4, kSize, kSize);
    const auto tuned = products.tune({planned, kOther});
    ASSERT_EQ(tuned.size(), 1u);
    EXPECT_EQ(tuned[0].shape, kShape);
    ASSERT_EQ(tuned[0].measured.size(), 2u);
    EXPECT_EQ(tuned[0].measured[0].share, 1);
    for (const double us : tuned[0].measured[1].us) EXPECT_GT(us, 0);
    EXPECT_EQ(tuned[0].best, 1u);
    EXPECT_EQ(rows_way(products.backend.target(), 4, kSize, kSize), kOther);
    cuda::save_ways(store.path(), identity, *products.backend.target().measured);
  }
  {
    Products next(store.path());
    EXPECT_EQ(rows_way(next.backend.target(), 4, kSize, kSize), kOther);
    next.expect_right();
    EXPECT_EQ(rows_way(next.backend.target(), 4, kSize, kSize / 2).slots, planned.slots) << "of another matrix";
  }
  // Of another driver; with a tile that has no room; damaged.
  const plan::Arch& arch = plan::find_arch("sm_90a");
  EXPECT_TRUE(cuda::load_ways(store.path(), cuda::ways_identity(card.name, 1), arch).empty());
  EXPECT_EQ(cuda::load_ways(store.path(), identity, arch), (cuda::MeasuredWays{{kShape, kOther}}));
  testing::internal::CaptureStderr();
  cuda::RowsWay large = kOther;
  large.slots = 40;
  const std::filesystem::path path = cuda::save_ways(store.path(), identity, {{kShape, large}});
  EXPECT_TRUE(cuda::load_ways(store.path(), identity, arch).empty());
  write_file_atomically(path, "{}");
  EXPECT_TRUE(cuda::load_ways(store.path(), identity, arch).empty());
  const std::string text = testing::internal::GetCapturedStderr();
  EXPECT_NE(text.find("the way of 256 x 256 does not fit sm_90a"), std::string::npos) << text;
  EXPECT_NE(text.find("bytes are too few"), std::string::npos) << text;
  EXPECT_EQ(live(), Live{});
}

TEST(HostWayTuner, WhatFailsItsSelfTestDoesNotWin) {
  if (!executor::Device::checks_plain_accesses()) GTEST_SKIP() << "sanitizers see the kernels' accesses here";
  install({});
  const TemporaryDirectory store;
  const BrokenKernel broken = broken_kernels()[0];  // of the list's own way
  cuda::LoadOptions load;
  load.rewrite = [&](jit::KernelRequest& request) {
    const std::vector<std::string>& all = request.compile.expressions;
    if (std::find(all.begin(), all.end(), broken.expression()) == all.end()) return;
    request.compile.sources.text = broken.marked(request.compile.sources.text);
  };
  Products products(store.path(), load);
  const auto tuned = products.tune({kOther, rows_way(products.backend.target(), 4, kSize, kSize)});
  EXPECT_EQ(tuned.at(0).best, 0u);
}

}  // namespace
}  // namespace fourfold::hostcuda
