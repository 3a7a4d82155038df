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
  const plan::moe::Problem p = problem_of(16, 4, 1024, 256);
  const ExpertKernels sound(test_device(), test_store(), p, {.max_tokens = 64});
  const std::string first = sound.bucket(64).pair.gate_up_kernel.name;
  const size_t before = fallbacks().size();
  const int64_t buckets = fallback_buckets();
  KernelOptions options;
  options.max_tokens = 64;
  // Scales of odd K blocks are read where the even ones are.
  options.load.rewrite = [&](jit::KernelRequest& request) {
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

TEST(SelfTest, AKernelThatTheCompilerSerialisesIsRefused) {
  FOURFOLD_NEEDS_GPU();
  if (!plan::find_arch(test_device().info().arch()).wgmma) GTEST_SKIP() << "this card has no wgmma";
  const plan::moe::Problem p = problem_of(16, 4, 1024, 256);
  const ExpertKernels sound(test_device(), test_store(), p, {.max_tokens = 64});
  const std::string first = sound.bucket(64).pair.gate_up_kernel.name;
  const int64_t buckets = fallback_buckets();
  KernelOptions options;
  options.max_tokens = 64;
  // The warning is about the source as a whole: a kernel beside the planned one that writes an accumulator in between.
  options.load.rewrite = [&](jit::KernelRequest& request) {
    if (request.name != first) return;
    request.compile.sources.text +=
        "\n#include \"kernels/ptx/wgmma_sm90.cuh\"\n"
        "extern \"C\" __global__ void spoilt(float* x, unsigned long long rows) {\n"
        "  using namespace fourfold::ptx;\n"
        "  float d[8]; unsigned a[4] = {1, 2, 3, 4};\n"
        "  wgmma_fence(); Wgmma<16>::set(d, a, rows); wgmma_commit();\n"
        "  d[0] = x[8];\n"
        "  Wgmma<16>::add(d, a, rows); wgmma_commit(); wgmma_wait<0>();\n"
        "  for (int i = 0; i < 8; ++i) x[threadIdx.x * 8 + i] = d[i]; }\n";
  };
  testing::internal::CaptureStderr();
  TestLayer layer(p, 64, options);
  const std::string text = testing::internal::GetCapturedStderr();
  EXPECT_NE(text.find("kernel " + first + " is refused on"), std::string::npos) << text;
  EXPECT_NE(layer.kernels.bucket(64).pair.gate_up_kernel.name, first);
  EXPECT_EQ(fallbacks().back().kernel, first);
  EXPECT_GT(fallback_buckets(), buckets);
  layer.expect_right(Batch(p, 64, Pattern::kUniform, 1));
}

// One token's down polls for the words of gate-up, without bound. A gate-up that leaves some out is found before.
TEST(SelfTest, WordsThatAreNeverStoredAreNotWaitedFor) {
  FOURFOLD_NEEDS_GPU();
  const plan::moe::Problem p = problem_of(16, 4, 1024, 256);
  const ExpertKernels sound(test_device(), test_store(), p, {.max_tokens = 1});
  const std::string first = sound.bucket(1).pair.gate_up_kernel.name;
  if (!sound.bucket(1).pair.unsorted()) GTEST_SKIP() << "this card has no kernels for one token";
  KernelOptions options;
  options.max_tokens = 1;
  options.load.rewrite = [&](jit::KernelRequest& request) {
    if (request.name == first) {
      mutate(request, "kernels/moe/one_sm90.cuh", "if (lane % 8 == 0) store_exchanged(out + tile / 2 * 8 + tile % 2",
             "if (lane % 8 == 0 && tile != 1) store_exchanged(out + tile / 2 * 8 + tile % 2");
    }
  };
  testing::internal::CaptureStderr();
  const ExpertKernels kernels(test_device(), test_store(), p, options);
  const std::string text = testing::internal::GetCapturedStderr();
  EXPECT_NE(text.find("kernel " + first + " failed its self-test"), std::string::npos) << text;
  EXPECT_NE(kernels.bucket(1).pair.gate_up_kernel.name, first);
}

TEST(SelfTest, DownIsBlamedForDownsMistakes) {
  FOURFOLD_NEEDS_GPU();
  const plan::moe::Problem p = problem_of(16, 4, 1024, 256);
  const ExpertKernels sound(test_device(), test_store(), p, {.max_tokens = 64});
  const std::string down = sound.bucket(64).pair.down_kernel.name;
  KernelOptions options;
  options.max_tokens = 64;
  options.load.rewrite = [&](jit::KernelRequest& request) {
    // One row's scale is off by one eighth.
    if (request.name == down) {
      mutate(request, "kernels/moe/dequant.cuh", "a[3] = multiply(a[3], high);",
             "a[3] = multiply(a[3], high ^ 0x00200020u);");
    }
  };
  testing::internal::CaptureStderr();
  const ExpertKernels kernels(test_device(), test_store(), p, options);
  const std::string text = testing::internal::GetCapturedStderr();
  EXPECT_NE(text.find("kernel " + down + " failed its self-test"), std::string::npos) << text;
  EXPECT_EQ(text.find("kernel gate-up"), std::string::npos) << text;
}

// NVFP4 activations. `what`: the pass that is blamed; `from` in fp4_sm120.cuh becomes `to`.
void expect_fp4_blamed(const std::string& what, const std::string& from, const std::string& to) {
  const plan::moe::Problem p = with_activations(problem_of(16, 4, 1024, 256), plan::moe::ActivationFormat::kNvfp4);
  KernelOptions options = emulated();
  options.max_tokens = 1;
  const ExpertKernels sound(test_device(), test_store(), p, options);
  const PlannedPair& pair = sound.bucket(1).pair;
  const std::string broken = what == "gate-up" ? pair.gate_up_kernel.name : pair.down_kernel.name;
  options.load.rewrite = [&](jit::KernelRequest& request) {
    if (request.name == broken) mutate(request, "kernels/moe/fp4_sm120.cuh", from, to);
  };
  testing::internal::CaptureStderr();
  const ExpertKernels kernels(test_device(), test_store(), p, options);
  const std::string text = testing::internal::GetCapturedStderr();
  EXPECT_NE(text.find("kernel " + broken + " failed its self-test"), std::string::npos) << from << "\n" << text;
  EXPECT_EQ(text.find(what == "gate-up" ? "kernel down" : "kernel gate-up"), std::string::npos) << text;
  EXPECT_NE((what == "gate-up" ? kernels.bucket(1).pair.gate_up_kernel : kernels.bucket(1).pair.down_kernel).name,
            broken);
}

TEST(SelfTest, Fp4KernelsAreBlamedForTheirMistakes) {
  FOURFOLD_NEEDS_GPU();
  // Scales of row g + 8 in the wrong order; x's scale used for h; a block's maximum over half of its rows; another
  // rounding of the block scale.
  expect_fp4_blamed("gate-up", "0x5162u", "0x6251u");
  expect_fp4_blamed("gate-up", "quantise = 1.0f / args.output_scales[block.expert]",
                    "quantise = 1.0f / args.output_scales[0]");
  expect_fp4_blamed("gate-up", "for (int d = 4; d < 32; d *= 2)", "for (int d = 4; d < 16; d *= 2)");
  expect_fp4_blamed("gate-up", "quantise * largest * (1.0f / 6.0f)", "quantise * largest * 0.163f");
  // Down: another expert's input scale; subnormal weight scales taken for normal ones.
  expect_fp4_blamed("down", "gemm.scales[block.expert] * args.input_scales[block.expert]",
                    "gemm.scales[block.expert] * args.input_scales[0]");
  expect_fp4_blamed("down", "scale[m] = fp4_scales(scale[m]);", "scale[m] = scale[m] - 0x10101010u;");
}

TEST(SelfTest, AWrongQuantisingKernelIsAnError) {
  FOURFOLD_NEEDS_GPU();
  KernelOptions options = emulated();
  options.max_tokens = 1;
  options.load.rewrite = [&](jit::KernelRequest& request) {
    // A NaN no longer counts as 0 and becomes 6.
    if (request.name == "quantize")
      mutate(request, "kernels/moe/fp4_sm120.cuh", "x[i] = x[i] == x[i] ? x[i] : 0.0f;", "");
  };
  try {
    ExpertKernels(test_device(), test_store(),
                  with_activations(problem_of(4, 2, 128, 64), plan::moe::ActivationFormat::kNvfp4), options);
    FAIL() << "the quantising kernel passed";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("the quantising kernel failed its self-test"), std::string::npos)
        << error.what();
  }
}

TEST(SelfTest, NothingLeftIsAnError) {
  FOURFOLD_NEEDS_GPU();
  KernelOptions options;
  options.max_tokens = 1;
  options.load.rewrite = [&](jit::KernelRequest& request) {
    if (request.name == "route") {
      mutate(request, "kernels/moe/route_sm90.cuh", "return first_slot;", "return first_slot + 1;");
    }
    if (request.name.starts_with("gate-up")) {
      mutate(request, "kernels/moe/dequant.cuh", "a[0] = w & kCodeMask;", "a[0] = w & 0x81808180u;");
    }
  };
  testing::internal::CaptureStderr();
  EXPECT_THROW(ExpertKernels(test_device(), test_store(), problem_of(4, 2, 128, 64), options), Error);
  testing::internal::GetCapturedStderr();
}

}  // namespace
}  // namespace fourfold::cuda
