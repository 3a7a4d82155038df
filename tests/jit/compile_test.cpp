// Real compilations, where NVRTC is installed; no GPU is needed. Without NVRTC each test is skipped by name.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <set>

#include "base/check.h"
#include "base/file.h"
#include "jit/build.h"
#include "jit/sources.h"
#include "testing.h"

namespace fourfold::jit {
namespace {

CompileRequest simple(std::string text, std::string arch = "sm_90a") {
  CompileRequest r;
  r.sources = {"test.cu", std::move(text), {}};
  r.arch = std::move(arch);
  return r;
}

TEST(Compile, MakesACubinForEveryArchitecture) {
  FOURFOLD_NEEDS_NVRTC();
  const Nvrtc& nvrtc = Nvrtc::get();
  EXPECT_GE(nvrtc.major(), 12);
  for (const char* arch : {"sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a", "sm_121a"}) {
    const auto result = nvrtc.compile(
        simple("extern \"C\" __global__ void add(float* x) { __shared__ float s[100]; s[threadIdx.x] = x[threadIdx.x];"
               " __syncthreads(); x[threadIdx.x] += s[99 - threadIdx.x]; }",
               arch));
    const auto kernels = read_cubin(result.cubin, "test");
    ASSERT_EQ(kernels.size(), 1u) << arch;
    EXPECT_EQ(kernels[0].name, "add");
    EXPECT_EQ(kernels[0].shared_bytes, 400) << arch;
    EXPECT_EQ(kernels[0].stack_bytes, 0);
    // The compiler's own report, as a second opinion.
    EXPECT_NE(result.log.find(fmt::format("Used {} registers", kernels[0].registers)), std::string::npos) << result.log;
  }
}

TEST(Compile, SeesLocalMemoryAndSpills) {
  FOURFOLD_NEEDS_NVRTC();
  // An array that is indexed at run time must live in local memory: a frame, but no spill.
  auto result = Nvrtc::get().compile(
      simple("extern \"C\" __global__ void k(float* x, int n) { float a[64]; for (int i = 0; i < 64; ++i) a[i] = x[i];"
             " for (int i = 0; i < n; ++i) a[(i * 7) % 64] += a[i % 64]; x[n] = a[n % 64]; }"));
  EXPECT_EQ(read_cubin(result.cubin, "local")[0].stack_bytes, 256);
  EXPECT_EQ(spill_bytes_in(result.log), 0);
  // 100 live values in 32 registers: spills.
  // Strides that are known only at run time: any store might hit any later load, so all loads come first.
  CompileRequest tight = simple(
      "extern \"C\" __global__ void k(float* x, int n, int m) { float a[100];\n"
      "#pragma unroll\nfor (int i = 0; i < 100; ++i) a[i] = x[i * n];\n"
      "#pragma unroll\nfor (int i = 0; i < 100; ++i) x[i * m + 7] = a[99 - i]; }");
  tight.flags = {"--maxrregcount=32"};
  result = Nvrtc::get().compile(tight);
  EXPECT_GT(spill_bytes_in(result.log), 0) << result.log;
  EXPECT_GT(read_cubin(result.cubin, "spill")[0].stack_bytes, 0);
}

TEST(Compile, SpillsAreReadFromTheLog) {
  EXPECT_EQ(spill_bytes_in(""), 0);
  EXPECT_EQ(spill_bytes_in("    8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads\n"
                           "    0 bytes stack frame, 4 bytes spill stores, 0 bytes spill loads\n"),
            32);
}

TEST(Compile, SeesSerializedMultiplications) {
  EXPECT_FALSE(serialized_in("ptxas info    : Used 168 registers, used 16 barriers"));
  EXPECT_TRUE(
      serialized_in("ptxas info    : (C7511) Potential Performance Loss: wgmma.mma_async instructions are serialized "
                    "due to insufficient register resources for the wgmma pipeline in the function 'k'"));
  EXPECT_EQ(refusal_of({}), "");
  Entry entry;
  entry.spill_bytes = 8;
  EXPECT_EQ(refusal_of(entry), "");
  entry.serialized = true;
  EXPECT_EQ(refusal_of(entry), "the compiler serialises its multiplications");
  FOURFOLD_NEEDS_NVRTC();
  // Accumulators that something else writes between two multiplications under way.
  const auto log = [](bool between) {
    CompileRequest r = simple(
        "#include \"kernels/ptx/wgmma_sm90.cuh\"\nusing namespace fourfold::ptx;\n"
        "extern \"C\" __global__ void k(float* x, unsigned long long rows) {\n"
        "  float d[8]; unsigned a[4] = {1, 2, 3, 4};\n"
        "  wgmma_fence(); Wgmma<16>::set(d, a, rows); wgmma_commit();\n" +
        std::string(between ? "  d[0] = x[8];\n" : "") +
        "  Wgmma<16>::add(d, a, rows); wgmma_commit(); wgmma_wait<0>();\n"
        "  for (int i = 0; i < 8; ++i) x[threadIdx.x * 8 + i] = d[i]; }\n");
    r.sources = with_embedded("test.cu", r.sources.text);
    r.flags = {"--device-as-default-execution-space"};
    return Nvrtc::get().compile(r).log;
  };
  EXPECT_FALSE(serialized_in(log(false)));
  const std::string warned = log(true);
  EXPECT_TRUE(serialized_in(warned)) << warned;
}

TEST(Compile, TemplatesAreFoundByTheirCxxName) {
  FOURFOLD_NEEDS_NVRTC();
  CompileRequest r = simple("namespace ns { template <int N> __global__ void k(int* x) { x[0] = N; } }");
  r.expressions = {"ns::k<3>", "ns::k<4>"};
  const auto result = Nvrtc::get().compile(r);
  std::set<std::string> names;
  for (const KernelUse& use : read_cubin(result.cubin, "test")) names.insert(use.name);
  EXPECT_EQ(names.size(), 2u);
  for (const auto& [expression, lowered] : result.lowered) EXPECT_TRUE(names.contains(lowered)) << expression;
}

TEST(Compile, ErrorsCarryTheCompilersWords) {
  FOURFOLD_NEEDS_NVRTC();
  try {
    Nvrtc::get().compile(simple("__global__ void k() { undeclared = 1; }"));
    FAIL() << "compiled";
  } catch (const Error& error) {
    const std::string what = error.what();
    EXPECT_NE(what.find("test.cu does not compile for sm_90a"), std::string::npos) << what;
    EXPECT_NE(what.find("\"undeclared\" is undefined"), std::string::npos) << what;
  }
  try {
    Nvrtc::get().compile(simple("", "sm_33"));
    FAIL() << "compiled";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("cannot compile for sm_33"), std::string::npos) << error.what();
  }
}

TEST(Build, CompilesOnceAndReuses) {
  FOURFOLD_NEEDS_NVRTC();
  const TemporaryDirectory dir;
  std::vector<KernelRequest> requests;
  for (int i = 0; i < 4; ++i) {
    requests.push_back(
        {fmt::format("k{}", i), simple(fmt::format("extern \"C\" __global__ void k(int* x) {{ x[0] = {}; }}", i % 3))});
  }
  KernelStore store(dir.path());
  const auto first = build(store, requests, {.threads = 2, .progress = false});
  ASSERT_EQ(first.size(), 4u);
  EXPECT_EQ(store.keys().size(), 3u) << "equal requests are one kernel";
  EXPECT_EQ(first[0].key, first[3].key);
  EXPECT_EQ(first[0].entry.cubin, first[3].entry.cubin);
  int compiled = 0;
  for (const BuiltKernel& k : first) compiled += k.compiled;
  EXPECT_EQ(compiled, 3);
  const auto second = build(store, requests, {.threads = 2, .progress = false});
  for (const BuiltKernel& k : second) EXPECT_FALSE(k.compiled);
  for (size_t i = 0; i < 4; ++i) EXPECT_EQ(first[i].entry.cubin, second[i].entry.cubin);

  // A damaged entry is compiled again, with a warning, and the store is whole afterwards.
  std::fstream file(dir.path() / (first[1].key + ".kernel"), std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(200);
  file.put('!');
  file.close();
  testing::internal::CaptureStderr();
  const auto third = build(store, requests, {.threads = 1, .progress = false});
  EXPECT_NE(testing::internal::GetCapturedStderr().find("it is compiled again"), std::string::npos);
  EXPECT_TRUE(third[1].compiled);
  EXPECT_EQ(third[1].entry.cubin, first[1].entry.cubin);
  EXPECT_EQ(store.counters().damaged, 1);
  EXPECT_TRUE(store.load(first[1].key).has_value());
}

TEST(Build, AnErrorOfOneKernelEndsTheBuildByName) {
  FOURFOLD_NEEDS_NVRTC();
  const TemporaryDirectory dir;
  KernelStore store(dir.path());
  CompileRequest bad = simple("this is no C++");
  bad.sources.name = "broken.cu";
  try {
    build(store, {{"good", simple("extern \"C\" __global__ void k() {}")}, {"bad", bad}},
          {.threads = 2, .progress = false});
    FAIL() << "built";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("broken.cu does not compile"), std::string::npos);
  }
}

TEST(Sources, HoldTheLedgerAndTheNumberFormats) {
  std::set<std::string_view> names;
  for (const EmbeddedSource& source : embedded_sources()) {
    EXPECT_TRUE(names.insert(source.name).second) << source.name;
    EXPECT_EQ(source.text, read_file(std::filesystem::path(FOURFOLD_SOURCE_DIR) / "src" / std::string(source.name)))
        << source.name;
  }
  EXPECT_TRUE(names.contains("plan/moe/tile.h"));
  EXPECT_TRUE(names.contains("nvfp4/number.h"));
}

}  // namespace
}  // namespace fourfold::jit
