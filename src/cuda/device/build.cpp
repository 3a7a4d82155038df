#include "cuda/device/build.h"

#include <map>

#include "base/console.h"

namespace fourfold::cuda {

jit::KernelRequest request_of(const plan::KernelSource& source, const CompileOptions& options) {
  std::vector<std::string> expressions;
  for (const plan::KernelEntry& entry : source.entries) expressions.push_back(entry.expression);
  return jit::make_request(source.name, source.text, options.arch, std::move(expressions), options.definitions);
}

std::vector<jit::BuiltKernel> build_all(
    jit::KernelStore& store, std::string_view arch,
    const std::function<std::vector<plan::KernelSource>(const std::set<std::string>& refused)>& sources,
    const jit::BuildOptions& options) {
  std::set<std::string> refused;
  std::map<jit::Key, double> compiled;  // seconds
  for (;;) {
    std::vector<jit::KernelRequest> requests;
    for (const plan::KernelSource& source : sources(refused)) {
      requests.push_back(request_of(source, {std::string(arch), {}}));
    }
    std::vector<jit::BuiltKernel> built = jit::build(store, requests, options);
    bool all = true;
    for (jit::BuiltKernel& kernel : built) {
      if (kernel.compiled) compiled[kernel.key] = kernel.seconds;
      const std::string why = jit::refusal_of(kernel.entry);
      if (why.empty() || !refused.insert(kernel.name).second) continue;
      warn(fmt::format("kernel {} is refused: {}; the next one is used", kernel.name, why));
      all = false;
    }
    if (!all) continue;
    for (jit::BuiltKernel& kernel : built) {
      const auto earlier = compiled.find(kernel.key);
      if (earlier == compiled.end()) continue;
      kernel.compiled = true;
      kernel.seconds = earlier->second;
    }
    return built;
  }
}

}  // namespace fourfold::cuda
