// The self-test bites: broken kernels are found, named and replaced.
#include "base/check.h"
#include "testing.h"

namespace fourfold::cuda {
namespace {

// Replaces `from` by `to` in a device header of the request; our own mistake when it is not there.
void mutate(jit::KernelRequest& request, const std::string& header, const std::string& from, const std::string& to) {
  for (auto& [name, text] : request.compile.sources.headers) {
    if (name != header) continue;
    const size_t at = text.find(from);
    ASSERT_NE(at, std::string::npos) << from;
    text.replace(at, from.size(), to);
  }
}

TEST(SelfTest, ABrokenKernelIsDisabledAndTheNextOneIsUsed) {
  FOURFOLD_NEEDS_GPU();
  const plan::MoeProblem p = problem_of(16, 4, 1024, 256);
  const ExpertKernels sound(test_device(), test_store(), p, {.max_tokens = 64});
  const std::string first = sound.bucket(64).pair.gate_up_kernel.name;
  const size_t before = fallbacks().size();
  const int64_t buckets = fallback_buckets();
  KernelOptions options;
  options.max_tokens = 64;
  // Scales of odd K blocks are read where the even ones are.
  options.rewrite = [&](jit::KernelRequest& request) {
    if (request.name == first) mutate(request, "kernels/moe/dequant.cuh", "__funnelshift_l(word, word, 8)", "word");
  };
  testing::internal::CaptureStderr();
  TestLayer layer(p, 64, options);
  const std::string text = testing::internal::GetCapturedStderr();
  EXPECT_NE(text.find("kernel " + first + " failed its self-test on"), std::string::npos) << text;
  EXPECT_NE(layer.kernels.bucket(64).pair.gate_up_kernel.name, first);
  ASSERT_EQ(fallbacks().size(), before + 1);
  EXPECT_EQ(fallbacks().back().kernel, first);
  EXPECT_GT(fallback_buckets(), buckets);
  layer.expect_right(Batch(p, 64, Pattern::kUniform, 1));
}

TEST(SelfTest, DownIsBlamedForDownsMistakes) {
  FOURFOLD_NEEDS_GPU();
  const plan::MoeProblem p = problem_of(16, 4, 1024, 256);
  const ExpertKernels sound(test_device(), test_store(), p, {.max_tokens = 64});
  const std::string down = sound.bucket(64).pair.down_kernel.name;
  KernelOptions options;
  options.max_tokens = 64;
  options.rewrite = [&](jit::KernelRequest& request) {
    // One row's scale is off by one eighth.
    if (request.name == down) {
      mutate(request, "kernels/moe/dequant.cuh", "a[3] = multiply(((w << 2) ^ (w >> 6)) & kCodeMask, high);",
             "a[3] = multiply(((w << 2) ^ (w >> 6)) & kCodeMask, high ^ 0x00200020u);");
    }
  };
  testing::internal::CaptureStderr();
  const ExpertKernels kernels(test_device(), test_store(), p, options);
  const std::string text = testing::internal::GetCapturedStderr();
  EXPECT_NE(text.find("kernel " + down + " failed its self-test"), std::string::npos) << text;
  EXPECT_EQ(text.find("kernel gate-up"), std::string::npos) << text;
}

TEST(SelfTest, NothingLeftIsAnError) {
  FOURFOLD_NEEDS_GPU();
  KernelOptions options;
  options.max_tokens = 1;
  options.rewrite = [&](jit::KernelRequest& request) {
    if (request.name == "route") {
      mutate(request, "kernels/moe/route_sm90.cuh", "return first_slot;", "return first_slot + 1;");
    }
    if (request.name.starts_with("gate-up")) {
      mutate(request, "kernels/moe/dequant.cuh", "& kCodeMask, low)", "& 0x81808180u, low)");
    }
  };
  testing::internal::CaptureStderr();
  EXPECT_THROW(ExpertKernels(test_device(), test_store(), problem_of(4, 2, 128, 64), options), Error);
  testing::internal::GetCapturedStderr();
}

}  // namespace
}  // namespace fourfold::cuda
