// Compiling what an expert layer launches, where NVRTC is installed; no GPU is needed.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <set>

#include "base/check.h"
#include "cuda/backend/plain_experts.h"
#include "cuda/backend/sources.h"
#include "cuda/device/build.h"
#include "cuda/moe/sources.h"
#include "jit/build.h"
#include "jit/sources.h"
#include "testing.h"

namespace fourfold::cuda {
namespace {

#define FOURFOLD_NEEDS_NVRTC()                                                                              \
  do {                                                                                                      \
    std::string why;                                                                                        \
    if (jit::Nvrtc::find(&why) == nullptr) GTEST_SKIP() << "NVRTC is not installed on this machine" << why; \
  } while (false)

// The header compiles alone under NVRTC and gives the host's total and offsets, for tiles of every family.
TEST(Compile, TheLedgerIsTheSameOnTheDevice) {
  FOURFOLD_NEEDS_NVRTC();
  for (const char* arch : {"sm_90a", "sm_120a", "sm_80"}) {
    std::string text = "#include \"plan/moe/tile.h\"\nusing namespace fourfold::plan::moe;\n";
    int kernels = 0;
    for (const int64_t tokens : {1, 4, 64}) {
      for (const plan::moe::FamilyRow& row : plan::moe::families()) {
        plan::moe::Problem p = plan::moe::find_shape("35B-A3B");
        p.tokens = tokens;
        for (const plan::moe::Pass pass : {plan::moe::Pass::kGateUp, plan::moe::Pass::kDown}) {
          std::vector<plan::moe::Candidate> tiles;
          row.tiles(p, pass, &tiles);
          for (size_t i = 0; i < tiles.size(); i += tiles.size() / 3 + 1) {
            const plan::moe::TileConfig& tile = tiles[i].tile;
            const plan::moe::SmemMap map = plan::moe::make_smem_map(tile);
            const std::string name = fmt::format("Tile{}", kernels);
            text += fmt::format("struct {} {{ static constexpr TileConfig value = {}; }};\n", name, to_source(tile));
            text += fmt::format("static_assert(make_smem_map({}::value).total == {});\n", name, map.total);
            for (int r = 0; r < plan::moe::kRegionCount; ++r) {
              text += fmt::format("static_assert(smem_offset<{}, RegionId({})> == {});\n", name, r,
                                  map[static_cast<plan::moe::RegionId>(r)].offset);
            }
            text += fmt::format(
                "extern \"C\" __global__ void k{}(unsigned* x) {{ x[0] = smem_stride<{}, RegionId::kWeights>; }}\n",
                kernels++, name);
          }
        }
      }
    }
    const auto result = jit::Nvrtc::get().compile({jit::with_embedded("ledger.cu", text), arch, {}, {}});
    EXPECT_EQ(jit::read_cubin(result.cubin, "ledger").size(), static_cast<size_t>(kernels));
    EXPECT_GT(kernels, 40);
  }
}

// Without sources that say what another one says. Of wide tiles, more than 32 tokens, a pass and family has many that
// differ in how much of the same they hold: the widest is the one that spills first. sm_89 and sm_121a have, but for
// sizes of tiles, what sm_80 and sm_120a have: there one tile of each pass and family is compiled.
std::vector<plan::KernelSource> telling(const std::vector<plan::KernelSource>& sources, const plan::Arch& arch) {
  const bool has_neighbour = arch.name == "sm_89" || arch.name == "sm_121a";
  std::map<std::string, int> widest;  // by pass and family: "gate-up_wgmma", before the tile's tokens
  const auto family_of = [](const plan::KernelSource& s) {
    return s.name.substr(0, s.name.find('_', s.name.find('_') + 1));
  };
  const auto tokens_of = [&](const plan::KernelSource& s) {
    const size_t at = family_of(s).size();
    return at < s.name.size() ? std::atoi(s.name.c_str() + at + 1) : 0;
  };
  for (const plan::KernelSource& s : sources) widest[family_of(s)] = std::max(widest[family_of(s)], tokens_of(s));
  std::vector<plan::KernelSource> some;
  std::set<std::string> taken;
  for (const plan::KernelSource& s : sources) {
    const bool wide = has_neighbour || tokens_of(s) > 32;
    if (wide && (tokens_of(s) < widest[family_of(s)] || !taken.insert(family_of(s)).second)) continue;
    some.push_back(s);
  }
  return some;
}

class BuiltKernels : public testing::TestWithParam<plan::Arch> {};

TEST_P(BuiltKernels, CompileWithTheirPlannedMapsAndWithoutSpills) {
  FOURFOLD_NEEDS_NVRTC();
  const plan::Arch& arch = GetParam();
  plan::moe::Problem problem = plan::moe::find_shape("35B-A3B");
  if (arch.fp4_mma) problem.activations = plan::moe::ActivationFormat::kAuto;
  const auto sources = layer_sources(problem, plan::representative_gpu(arch));
  const auto has = [&](std::string_view part) {
    return std::any_of(sources.begin(), sources.end(),
                       [&](const plan::KernelSource& s) { return s.name.find(part) != std::string::npos; });
  };
  EXPECT_EQ(has("quantize"), arch.fp4_mma);
  EXPECT_EQ(has("gate-up_fp4"), arch.fp4_mma);
  EXPECT_TRUE(has("gate-up_mma-sync") || has("gate-up_streaming"));
  std::vector<jit::KernelRequest> requests;
  for (const plan::KernelSource& source : telling(sources, arch)) {
    requests.push_back(request_of(source, {std::string(arch.name), {}}));
  }
  EXPECT_GE(requests.size(), 4u);
  for (const jit::BuiltKernel& kernel : jit::build(test_store(), requests, {.progress = false})) {
    EXPECT_EQ(kernel.entry.spill_bytes, 0) << kernel.name;
    for (const jit::KernelUse& use : kernel.entry.kernels) EXPECT_EQ(use.stack_bytes, 0) << kernel.name;
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, BuiltKernels, testing::ValuesIn(plan::kArchs),
                         [](const auto& parameter) { return std::string(parameter.param.name); });

// What the workstation card's plans become on another card: the FP4 multiplication emulated.
TEST(Kernels, Fp4KernelsCompileEmulated) {
  FOURFOLD_NEEDS_NVRTC();
  plan::moe::Problem p = plan::moe::find_shape("35B-A3B");
  p.activations = plan::moe::ActivationFormat::kNvfp4;
  p.tokens = 8;
  const auto layer = plan::moe::plan_layer(p, plan::find_gpu("rtx-pro-6000"), {.explain = false});
  for (const char* arch : {"sm_90a", "sm_80"}) {
    std::vector<plan::KernelSource> sources = {quantise_source()};
    for (const plan::moe::GemmPlan* gemm : {&layer.gate_up, &layer.down}) {
      sources.push_back(plan::moe::kernel_of(p, gemm->pass, gemm->chosen.candidate));
    }
    for (const plan::KernelSource& source : sources) {
      const jit::KernelRequest request = request_of(source, {arch, {"FOURFOLD_EMULATE_FP4_MMA"}});
      EXPECT_EQ(jit::Nvrtc::get().compile(request.compile).lowered.size(), 1u) << arch << " " << request.name;
    }
  }
}

// A kernel that the compiler spoils is replaced, and what was compiled on the way stays counted.
TEST(BuildAll, DoesWithoutRefusedKernels) {
  FOURFOLD_NEEDS_NVRTC();
  const plan::KernelSource good = {"good", "extern \"C\" __global__ void k(int* x) { x[0] = 1; }", {}};
  const plan::KernelSource spoilt = {"spoilt",
                                     "#include \"kernels/ptx/wgmma_sm90.cuh\"\n"
                                     "extern \"C\" __global__ void k(float* x, unsigned long long rows) {\n"
                                     "  using namespace fourfold::ptx;\n"
                                     "  float d[8]; unsigned a[4] = {1, 2, 3, 4};\n"
                                     "  wgmma_fence(); Wgmma<16>::set(d, a, rows); wgmma_commit();\n"
                                     "  d[0] = x[8];\n"
                                     "  Wgmma<16>::add(d, a, rows); wgmma_commit(); wgmma_wait<0>();\n"
                                     "  for (int i = 0; i < 8; ++i) x[threadIdx.x * 8 + i] = d[i]; }\n",
                                     {}};
  const plan::KernelSource next = {"next", "extern \"C\" __global__ void k(int* x) { x[0] = 2; }", {}};
  const auto sources = [&](const std::set<std::string>& refused) {
    return refused.contains("spoilt") ? std::vector{good, next} : std::vector{good, spoilt};
  };
  testing::internal::CaptureStderr();
  const auto built = build_all(test_store(), "sm_90a", sources, {.progress = false});
  EXPECT_NE(testing::internal::GetCapturedStderr().find("kernel spoilt is refused"), std::string::npos);
  ASSERT_EQ(built.size(), 2u);
  EXPECT_EQ(built[0].name, "good");
  EXPECT_TRUE(built[0].compiled) << "it was in the store in the second round only because the first one compiled it";
  EXPECT_GT(built[0].seconds, 0);
  EXPECT_EQ(built[1].name, "next");
  EXPECT_TRUE(built[1].compiled);
  const auto again = build_all(test_store(), "sm_90a", sources, {.progress = false});
  for (const jit::BuiltKernel& kernel : again) EXPECT_FALSE(kernel.compiled) << kernel.name;
}

// What a model needs beside its experts, as the backend chooses it for each architecture.
class BackendKernels : public testing::TestWithParam<plan::Arch> {};

TEST_P(BackendKernels, CompileWithoutSpillsAndFit) {
  FOURFOLD_NEEDS_NVRTC();
  const plan::Arch& arch = GetParam();
  std::vector<plan::KernelSource> sources = {attention_source(arch, 256, 64, true), wide_source(arch, 10)};
  // sm_89 and sm_121a have the tiles of sm_120a, and its neighbours compile the rest.
  if (arch.name != "sm_89" && arch.name != "sm_121a") {
    // What has one format of a mix alone is part of what has the mix.
    for (const int formats : {1, 4, 5}) {
      if (formats == 5 || arch.name == "sm_120a") sources.push_back(wide_source(arch, formats));
    }
    for (const bool fp8 : {false, true}) sources.push_back(prefill_source(arch, 256, 64, fp8));
    sources.push_back(plain_source(arch, 1, 10));
    sources.push_back(choosing_source(arch, choosing_way(arch, 1, 3072, 1024)));
    for (const auto& source :
         {sample_source(), lanes_source(), step_source(), stamp_source(), norm_source(), reduce_source(),
          two_shot_source(), gathered_source(), checksum_source(), rank_sample_source()})
      sources.push_back(source);
  }
  if (!arch.wgmma) {  // where it is there these spill up to 36 registers (docs/cuda.md)
    for (const int formats : {5, 10}) sources.push_back(rows_source(arch, rows_way(arch, formats, 12352, 2048)));
    sources.push_back(attention_source(arch, 256, 64, false));
    sources.push_back(delta_source(arch, 128, 128));
    sources.push_back(updates_source(arch, 128, 128).value());
  }
  std::vector<jit::KernelRequest> requests;
  for (const plan::KernelSource& source : sources) {
    for (const plan::KernelEntry& entry : source.entries) {
      EXPECT_LE(entry.smem_bytes, arch.smem_per_block) << source.name;
    }
    requests.push_back(request_of(source, {std::string(arch.name), {}}));
  }
  for (const jit::BuiltKernel& kernel : jit::build(test_store(), requests, {.progress = false})) {
    // NVRTC 13.0 spills a few registers once for sm_80 (products of 16 rows) and for sm_100a (a norm).
    const int64_t few = arch.name == "sm_80" && kernel.name.starts_with("rows") ? 24
                        : arch.name == "sm_100a" && kernel.name == "norm"       ? 8
                                                                                : 0;
    EXPECT_LE(kernel.entry.spill_bytes, few) << kernel.name << " " << kernel.entry.arch;
    EXPECT_EQ(jit::refusal_of(kernel.entry), "") << kernel.name;
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, BackendKernels, testing::ValuesIn(plan::kArchs),
                         [](const auto& parameter) { return std::string(parameter.param.name); });

}  // namespace
}  // namespace fourfold::cuda
