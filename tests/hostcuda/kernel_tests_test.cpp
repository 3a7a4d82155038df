// Self-tests of the backend's kernels on the host driver: sound kernels pass, those that are broken on purpose are
// found, blamed by name and replaced.
#include <gtest/gtest.h>

#include <numeric>

#include "base/check.h"
#include "base/random.h"
#include "cuda/backend/kernel_tests.h"
#include "hostcuda/broken.h"
#include "hostcuda/problems.h"
#include "hostcuda/testing.h"

namespace fourfold::hostcuda {
namespace {

// What a model of such parts asks for when its stepper is made.
struct Parts {
  bool products = false, attention = false, delta = false;
  bool fp8_cache = false;
  bool experts = false;  // fp8
  bool shared = false;   // beside them, one in bf16
  int64_t head_dim = 256, rotary_dim = 64;
};

void make_stepper(const Parts& parts, ops::Backend& backend) {
  constexpr int64_t kRows = 32, kColumns = 256, kWidth = 2 * 512 + 2 * 256;
  std::vector<uint8_t> codes(kColumns * kColumns / 2, 0x21), scales(kColumns * kColumns / 16, 0x38);
  ops::MatrixSource source;
  source.name = "weights";
  source.format = ops::Format::kNvfp4;
  source.rows = source.columns = kColumns;
  source.data = codes.data();
  source.block_scales = scales.data();
  std::unique_ptr<ops::Matrix> matrix;
  // A router behind the product.
  std::unique_ptr<ops::Matrix> behind;
  ops::Vector norm;
  if (parts.products) {
    matrix = backend.load_matrix(std::span(&source, 1));
    const std::vector<uint8_t> values(24 * kColumns * 2, 0x3c);
    ops::MatrixSource rows = source;
    rows.format = ops::Format::kBf16;
    rows.rows = 24;
    rows.data = values.data();
    behind = backend.load_matrix(std::span(&rows, 1));
    norm = backend.load_vector(std::vector<float>(kColumns, 1.0f));
    ops::MoeParams p;
    p.router = behind.get();
    p.top_k = 1;
    backend.expect_routing(*matrix, norm, p);
  }
  std::unique_ptr<ops::Matrix> router, shared_gate_up, shared_down, shared_gate;
  std::unique_ptr<ops::Experts> experts;
  const std::vector<uint8_t> weights(kColumns * 64, 0x38), factors(kColumns * 2), halves(kColumns * 64 * 2, 0x3c);
  const float scale = 1;
  if (parts.experts) {
    ops::MatrixSource wide = source;
    wide.format = ops::Format::kFp8;
    wide.data = weights.data();
    wide.grid_scales = &scale;
    wide.rows = wide.scale_rows = 64;
    wide.scale_columns = kColumns;
    ops::MatrixSource narrow = wide;
    narrow.rows = narrow.scale_rows = kColumns;
    narrow.columns = narrow.scale_columns = 64;
    experts = backend.load_experts(
        2,
        [&](int64_t) {
          return ops::ExpertSource{wide, wide, narrow};
        },
        [](int64_t) {});
    ops::MatrixSource rows = source;
    rows.format = ops::Format::kBf16;
    rows.rows = 1;
    rows.data = factors.data();
    router = backend.load_matrix(std::vector{rows, rows});
    if (parts.shared) {
      for (ops::MatrixSource* m : {&wide, &narrow}) m->format = ops::Format::kBf16, m->data = halves.data();
      shared_gate_up = backend.load_gate_up(wide, wide);
      shared_down = backend.load_matrix(std::span(&narrow, 1));
      shared_gate = backend.load_matrix(std::span(&rows, 1));
    }
  }
  const auto x = backend.allocate(kRows * 4096), y = backend.allocate(kRows * 4096);
  std::unique_ptr<ops::KvCache> kv;
  if (parts.attention) kv = backend.make_kv_cache({1, 1, parts.head_dim, 8, 16});
  std::unique_ptr<ops::StateCache> states;
  ops::StateCacheShape shape;
  shape.layers = 1;
  shape.slots = 2;
  shape.key_heads = shape.value_heads = 1;
  shape.key_dim = shape.value_dim = 128;
  shape.conv_taps = 4;
  if (parts.delta) states = backend.make_state_cache(shape);
  const auto body = [&](const ops::StepShape& step, ops::StepScope&) {
    const ops::Tensor in = backend.tensor(*x, step.rows, kWidth).slice_cols(0, kColumns);
    if (parts.products) backend.linear(in, *matrix, backend.tensor(*y, step.rows, kColumns));
    if (parts.experts) {
      ops::MoeParams p;
      p.router = router.get();
      p.experts = experts.get();
      p.top_k = 1;
      p.shared_gate_up = shared_gate_up.get();
      p.shared_down = shared_down.get();
      p.shared_gate = shared_gate.get();
      backend.moe(p, backend.tensor(*x, step.rows, kColumns), backend.tensor(*y, step.rows, kColumns));
    }
    const ops::Tensor all = backend.tensor(*x, step.rows, kWidth);
    if (parts.attention) {
      ops::AttentionParams p;
      p.heads = 2;
      p.kv_heads = 1;
      p.head_dim = parts.head_dim;
      p.rotary_dim = parts.rotary_dim;
      p.rope_theta = 1e7f;
      p.gated = true;
      const int64_t d = p.head_dim;
      backend.attention(p, all.slice_cols(0, 4 * d), all.slice_cols(4 * d, 5 * d), all.slice_cols(5 * d, 6 * d), *kv, 0,
                        backend.tensor(*y, step.rows, 2 * d));
    }
    if (parts.delta) {
      ops::DeltaNetParams p;
      p.key_heads = p.value_heads = 1;
      p.key_dim = p.value_dim = 128;
      p.conv_taps = 4;
      backend.delta_net(p, all.slice_cols(0, 384), all.slice_cols(384, 512), all.slice_cols(512, 513),
                        all.slice_cols(513, 514), *states, 0, backend.tensor(*y, step.rows, 128));
    }
  };
  ops::StepLimits limits;
  limits.lanes = 2;
  limits.rows = limits.logit_rows = kRows;
  limits.drafts = parts.delta ? 1 : 0;
  limits.context = 64;
  limits.page_size = 16;
  limits.vocabulary = 256;
  backend.make_stepper(limits, kv.get(), states.get(), body);
}

void make_stepper(const Parts& parts, const cuda::LoadOptions& load, bool tests = true) {
  cuda::CudaOptions options = cuda_options(true, parts.fp8_cache);
  options.test_kernels = tests;
  cuda::CudaBackend backend(options, std::make_shared<cuda::Card>(0, kernel_store(), load));
  make_stepper(parts, backend);
}

struct SoundCase {
  const char* name;
  Parts parts;
  HostCard card = {};
  const char* emulate = "";
};
void PrintTo(const SoundCase& c, std::ostream* out) { *out << c.name; }
class HostKernelTests : public testing::TestWithParam<SoundCase> {};

TEST_P(HostKernelTests, SoundKernelsPass) {
  if (!executor::Device::checks_plain_accesses()) GTEST_SKIP() << "sanitizers see the kernels' accesses here";
  const SoundCase& c = GetParam();
  install(c.card);
  const size_t before = cuda::fallbacks().size();
  cuda::LoadOptions load;
  if (*c.emulate != 0) load.emulate = &plan::find_gpu(c.emulate);
  make_stepper(c.parts, load, false);
  const size_t kernels = jit::KernelStore(kernel_store()).keys().size();
  make_stepper(c.parts, load);
  EXPECT_EQ(cuda::fallbacks().size(), before);
  EXPECT_EQ(jit::KernelStore(kernel_store()).keys().size(), kernels) << "a test runs what the model does not";
  std::printf("%ld launches, at most %.1f MB\n", static_cast<long>(calls(Call::kLaunch)),
              static_cast<double>(peak_bytes()) / 1e6);
  EXPECT_EQ(live(), Live{});
}

INSTANTIATE_TEST_SUITE_P(
    Parts, HostKernelTests,
    testing::Values(SoundCase{"Hopper", {true, true, true}}, SoundCase{"HopperFp8Cache", {false, true, false, true}},
                    SoundCase{"HopperFp8CacheHeadsOf64",
                              {.attention = true, .fp8_cache = true, .head_dim = 64, .rotary_dim = 48}},
                    SoundCase{"HopperPlainExperts", {.experts = true, .shared = true}},
                    SoundCase{"Ampere", {true, true, true}, ampere_card()},
                    SoundCase{"Blackwell", {true, true, true}, {}, "rtx-pro-6000"}),
    [](const auto& parameter) { return parameter.param.name; });

std::function<void(jit::KernelRequest&)> rewriting(const BrokenKernel& broken) {
  return [broken](jit::KernelRequest& request) {
    const std::vector<std::string>& all = request.compile.expressions;
    if (std::find(all.begin(), all.end(), broken.expression()) == all.end()) return;
    request.compile.sources.text = broken.marked(request.compile.sources.text);
  };
}

class HostKernelFaults : public testing::TestWithParam<size_t> {};

TEST_P(HostKernelFaults, AreBlamedByNameAndReplaced) {
  if (!executor::Device::checks_plain_accesses()) GTEST_SKIP() << "sanitizers see the kernels' accesses here";
  const BrokenKernel broken = broken_kernels()[GetParam()];
  install({});
  const size_t before = cuda::fallbacks().size();
  cuda::LoadOptions load;
  load.rewrite = rewriting(broken);
  const std::string name = broken.name;
  if (name == "repack_experts") {  // of the expert layers' own self-test
    const cuda::Device device;
    jit::KernelStore store(kernel_store());
    cuda::KernelOptions options;
    options.max_tokens = 1;
    options.load = load;
    try {
      const cuda::ExpertKernels kernels(device, store, expert_cases()[0].problem, options);
      FAIL() << "nobody noticed";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("repacks experts' weights"), std::string::npos) << error.what();
    }
    return;
  }
  const Parts parts = {.products = name == "rows" || name == "middle" || name == "routing" || name == "routed",
                       .attention = name == "decode",
                       .delta = name == "recurrent" || name == "updates" || name == "make_states",
                       .experts = name == "experts" || name == "choosing",
                       .shared = name == "choosing"};
  if (!parts.products && !parts.attention && !parts.delta && !parts.shared) {  // nothing takes its place
    try {
      make_stepper(parts, load);
      FAIL() << "nobody noticed";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(broken.expression() + " failed its self-test"), std::string::npos)
          << error.what();
    }
    EXPECT_EQ(live(), Live{});
    return;
  }
  testing::internal::CaptureStderr();
  make_stepper(parts, load);
  const std::string text = testing::internal::GetCapturedStderr();
  EXPECT_NE(text.find("kernel " + broken.expression() + " failed its self-test"), std::string::npos) << text;
  ASSERT_EQ(cuda::fallbacks().size(), before + 1) << text;
  EXPECT_EQ(cuda::fallbacks().back().kernel, broken.expression());
  EXPECT_EQ(live(), Live{});
}

INSTANTIATE_TEST_SUITE_P(All, HostKernelFaults, testing::Range<size_t>(0, broken_kernels().size()),
                         [](const auto& parameter) { return std::string(broken_kernels()[parameter.param].name); });

// Models and ranks of one process.
TEST(HostKernelTestsAgain, AreNotRunForWhatWasRight) {
  if (!executor::Device::checks_plain_accesses()) GTEST_SKIP() << "sanitizers see the kernels' accesses here";
  install({.devices = 2});
  const int64_t before = calls(Call::kLaunch);
  make_stepper({}, {});
  const int64_t first = calls(Call::kLaunch) - before;
  make_stepper({}, {});
  EXPECT_GT(first, 20);
  EXPECT_EQ(calls(Call::kLaunch) - before, first);
}

// What `bench kernels --check` and `doctor --kernels` ask for: the kernels of a model that is only counted.
TEST(HostKernelReport, NamesWhatIsWrongOfAModelThatIsNotLoaded) {
  if (!executor::Device::checks_plain_accesses()) GTEST_SKIP() << "sanitizers see the kernels' accesses here";
  const HostCard card;
  install(card);
  cuda::CudaOptions options = cuda_options();
  const auto counting = cuda::make_counting_backend(options, device_info(card), uint64_t{1} << 40);
  make_stepper({.products = true}, *counting);
  const cuda::KernelReport sound = cuda::test_kernels_of(*counting, options);
  EXPECT_EQ(sound.device, card.name);
  EXPECT_GE(sound.kernels, 20);
  EXPECT_TRUE(sound.wrong.empty());
  cuda::LoadOptions load;
  const BrokenKernel broken = broken_kernels()[0];
  load.rewrite = rewriting(broken);
  cuda::CudaBackend backend(options, std::make_shared<cuda::Card>(0, kernel_store(), load));
  const cuda::KernelReport report =
      backend.test_kernels_of(dynamic_cast<const cuda::CudaBackend&>(*counting), cuda::kMostLayerRows);
  ASSERT_EQ(report.wrong.size(), 1u);
  EXPECT_EQ(report.wrong.begin()->first, broken.expression());
}

// Who is blamed: not what a right case has, then what most wrong cases have.
TEST(KernelBlame, IsOnWhatTheWrongCasesHaveAndTheRightOnesHaveNot) {
  using cuda::blamed;
  using Names = std::map<std::string, std::string>;
  EXPECT_EQ(blamed({{{"tables", "few", "sum"}, ""}, {{"tables", "many", "sum"}, "x"}}), (Names{{"many", "x"}}));
  EXPECT_EQ(blamed({{{"few", "sum"}, "x"}, {{"many", "sum"}, "y"}}), (Names{{"sum", "x"}}));
  EXPECT_EQ(blamed({{{"few"}, "x"}, {{"many"}, "y"}}), (Names{{"few", "x"}, {"many", "y"}}));
  EXPECT_EQ(blamed({{{"few", "sum"}, ""}, {{"many", "sum"}, ""}, {{"few", "sum"}, "z"}}), (Names{{"few", "z"}}));
  EXPECT_EQ(blamed({{{"few"}, ""}}), Names{});
}

}  // namespace
}  // namespace fourfold::hostcuda
