// Writes the kernels that tests of the GPU's host side run without a card, as files for the host's compiler:
//   generate DIRECTORY COUNT    kernels_0.cpp ... of so many files, each with its share of the sources
// What is listed here is what tests can run: the sources that launchers, planner and backend would give to NVRTC.
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

#include "base/check.h"
#include "cuda/backend/plain_experts.h"
#include "cuda/backend/sources.h"
#include "cuda/device/device.h"
#include "cuda/moe/sources.h"
#include "hostcuda/broken.h"
#include "hostcuda/problems.h"
#include "jit/sources.h"
#include "plan/buckets.h"

namespace fourfold::hostcuda {
namespace {

std::vector<plan::KernelSource> all_sources() {
  std::vector<plan::KernelSource> all = {
      cuda::norm_source(),     cuda::step_source(),     cuda::sample_source(),   cuda::stamp_source(),
      cuda::route_source(),    cuda::reduce_source(),   cuda::prepare_source(),  cuda::quantise_source(),
      cuda::two_shot_source(), cuda::checksum_source(), cuda::gathered_source(), cuda::rank_sample_source(),
      cuda::unpack_source(),   cuda::routed_source(),
  };
  for (const ModelArch& model : kModelArchs) {
    const plan::Arch& arch = plan::find_arch(model.name);
    all.push_back(cuda::delta_source(arch, 128, 128));
    all.push_back(cuda::updates_source(arch, 128, 128).value());
    all.push_back(cuda::attention_source(arch, 256, 64, model.fp8_cache));
    all.push_back(cuda::prefill_source(arch, 256, 64, model.fp8_cache));
    for (const int formats : kStackFormats) {
      for (const int rows : {256, 4096}) {  // sizes of the demo model and below, and of its head
        all.push_back(cuda::rows_source(arch, cuda::rows_way(arch, formats, rows, 256)));
      }
      all.push_back(cuda::wide_source(arch, formats));
    }
    // Outputs of mixers, in front of routers.
    for (const int formats : {1, 2, 4}) {
      all.push_back(cuda::routing_source(arch, cuda::choosing_way(arch, formats, 256, 256), 1));
    }
  }
  for (const int formats : {1, 2}) all.push_back(cuda::plain_source(plan::find_arch("sm_90a"), formats, formats));
  // Formats and heads of the table of operations.
  const plan::Arch& hopper = plan::find_arch("sm_90a");
  for (const int formats : kTableFormats) {
    all.push_back(cuda::rows_source(hopper, cuda::rows_way(hopper, formats, 256, 256)));
    all.push_back(cuda::wide_source(hopper, formats));
  }
  // Of layers with a shared expert of these.
  for (const int formats : {1, 2, 4}) {
    all.push_back(cuda::choosing_source(hopper, cuda::choosing_way(hopper, formats, 256, 256)));
  }
  all.push_back(cuda::delta_source(hopper, 64, 48));
  all.push_back(cuda::updates_source(hopper, 64, 48).value());
  all.push_back(cuda::attention_source(hopper, 128, 32, false));
  all.push_back(cuda::prefill_source(hopper, 128, 32, false));
  // In self-tests rounding shows most in small heads.
  all.push_back(cuda::attention_source(hopper, 64, 48, true));
  all.push_back(cuda::prefill_source(hopper, 64, 48, true));
  for (plan::KernelSource& source : replacements()) all.push_back(std::move(source));
  for (const ExpertCase& c : expert_cases()) {
    // As the planner will see the card.
    const plan::Gpu gpu = c.emulate.empty() ? cuda::gpu_row_of(device_info(c.card)) : plan::find_gpu(c.emulate);
    for (const int64_t tokens : plan::token_buckets()) {
      if (tokens > plan::bucket_of(c.most_tokens)) break;
      plan::moe::Problem p = c.problem;
      p.tokens = tokens;
      std::vector<plan::moe::LayerPlan> plans = {plan::moe::plan_layer(p, gpu, {.only_implemented = true})};
      if (plan::moe::needs_input_scales(plans[0])) {
        plans.push_back(plan::moe::plan_without_input_scales(plans[0], {.only_implemented = true}));
      }
      for (const plan::moe::LayerPlan& plan : plans) {
        for (const plan::moe::GemmPlan* gemm : {&plan.gate_up, &plan.down}) {
          all.push_back(plan::moe::kernel_of(p, gemm->pass, gemm->chosen.candidate));
        }
      }
    }
  }
  all.push_back(cuda::lanes_source());
  return all;
}

std::string file_of(const plan::KernelSource& source, size_t number) {
  std::string text = fmt::format("#define PlannedTile PlannedTile_{}\n{}", number, source.text);
  text += fmt::format("static const fourfold::hostcuda::HostModule module_{}(R\"source({})source\", {{\n", number,
                      source.text);
  for (const plan::KernelEntry& entry : source.entries) {
    text += fmt::format("    fourfold::hostcuda::host_kernel<&{}>(\"{}\"),\n", entry.expression, entry.expression);
  }
  return text + "});\n#undef PlannedTile\n";
}

void write_if_changed(const std::filesystem::path& path, const std::string& text) {
  std::ifstream before(path);
  std::stringstream content;
  content << before.rdbuf();
  if (before && content.str() == text) return;
  std::ofstream(path) << text;
}

// A header with its text changed beside the file that includes it.
std::string broken_file(const std::filesystem::path& directory, const BrokenKernel& broken, size_t number) {
  std::string header;
  for (const jit::EmbeddedSource& source : jit::embedded_sources()) {
    if (source.name == broken.header) header = source.text;
  }
  const size_t at = header.find(broken.from);
  if (at == std::string::npos || header.find(broken.from, at + 1) != std::string::npos) {
    fail("{} does not have once: {}", broken.header, broken.from);
  }
  header.replace(at, std::string(broken.from).size(), broken.to);
  const std::filesystem::path path = std::filesystem::absolute(directory / fmt::format("broken_{}.cuh", number));
  write_if_changed(path, header);
  std::string text;
  for (const char* name : broken.renamed) text += fmt::format("#define {0} {0}_broken_{1}\n", name, number);
  text += fmt::format("#include \"{}\"\n", path.string());
  text += fmt::format("static const fourfold::hostcuda::HostModule module_{}(R\"source({})source\", {{\n", number,
                      broken.marked(broken.source.text));
  text += fmt::format("    fourfold::hostcuda::host_kernel<&{}>(\"{}\"),\n}});\n", broken.expression(),
                      broken.expression());
  return text;
}

}  // namespace
}  // namespace fourfold::hostcuda

int main(int count, char** arguments) try {
  using namespace fourfold;
  if (count != 3) fail("usage: generate DIRECTORY COUNT");
  const auto files = static_cast<size_t>(std::atoi(arguments[2]));
  const std::string beginning =
      "#include \"executor/cuda.h\"\n#include \"hostcuda/registry.h\"\n"
      "// The kernels' headers want the wrappers first.\n#include \"kernels/ptx/sm90.cuh\"\n";
  std::vector<std::string> texts(files, beginning);
  // Each kernel once, whatever else its source has.
  std::set<std::string> seen;
  size_t number = 0;
  for (plan::KernelSource& source : hostcuda::all_sources()) {
    std::erase_if(source.entries,
                  [&](const plan::KernelEntry& entry) { return !seen.insert(source.text + entry.expression).second; });
    if (source.entries.empty()) continue;
    ++number;
    texts[number % files] += hostcuda::file_of(source, number);
  }
  for (const hostcuda::BrokenKernel& broken : hostcuda::broken_kernels()) {
    texts.push_back(beginning + hostcuda::broken_file(arguments[1], broken, ++number));
  }
  for (size_t i = 0; i < texts.size(); ++i) {
    hostcuda::write_if_changed(std::filesystem::path(arguments[1]) / fmt::format("kernels_{}.cpp", i), texts[i]);
  }
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "generate: %s\n", error.what());
  return 1;
}
