#include "cuda/device/loader.h"

#include <algorithm>
#include <mutex>
#include <set>

#include "base/check.h"
#include "base/console.h"

namespace fourfold::cuda {
namespace {

struct Record {
  std::mutex mutex;
  std::map<std::pair<jit::Key, std::string>, std::string> tested;
  std::vector<Fallback> fallbacks;
};
Record& record() {
  static Record instance;
  return instance;
}

}  // namespace

KernelLoader::KernelLoader(const Device& device, jit::KernelStore& store, const LoadOptions& options)
    : device_(device), store_(store), options_(options), card_(options.emulate ? *options.emulate : device.gpu()) {}

KernelLoader::~KernelLoader() {
  if (!device_.lost()) return;
  for (auto& entry : modules_) static_cast<void>(entry.second.release());  // unloading waits
}

std::vector<std::vector<Kernel>> KernelLoader::load(const std::vector<plan::KernelSource>& sources) {
  CompileOptions compile = {device_.info().arch(), {}};
  if (options_.emulate != nullptr) compile.definitions.emplace_back("FOURFOLD_EMULATE_FP4_MMA");
  std::vector<const plan::KernelSource*> missing;
  std::vector<jit::KernelRequest> requests;
  std::set<std::string> seen;
  for (const plan::KernelSource& source : sources) {
    if (kernels_.contains(source.name) || refused_.contains(source.name) || !seen.insert(source.name).second) continue;
    missing.push_back(&source);
    if (device_.only_counts()) continue;
    requests.push_back(request_of(source, compile));
    if (options_.rewrite) options_.rewrite(requests.back());
  }
  if (device_.only_counts()) {
    for (const plan::KernelSource* source : missing) {
      counted_.push_back(*source);
      for (const plan::KernelEntry& entry : source->entries) {
        kernels_[source->name].push_back(
            {entry.expression, nullptr, entry.threads, static_cast<unsigned>(entry.smem_bytes)});
      }
    }
  } else if (!requests.empty()) {
    const auto built = jit::build(store_, requests, {.threads = options_.threads, .progress = options_.progress});
    const int64_t limit = std::min(plan::arch_of(card_).smem_per_block, device_.info().smem_per_block);
    for (size_t i = 0; i < built.size(); ++i) {
      const plan::KernelSource& source = *missing[i];
      if (std::string why = jit::refusal_of(built[i].entry); !why.empty()) {
        refused_[source.name] = std::move(why);
        continue;
      }
      auto& module = modules_[built[i].key];
      if (module == nullptr) {
        module = std::make_unique<jit::Module>(device_.driver(), built[i].entry.cubin, source.name);
      }
      std::vector<Kernel>& kernels = kernels_[source.name];
      for (const plan::KernelEntry& entry : source.entries) {
        if (entry.smem_bytes > limit) {
          fail("{}: {} bytes of shared memory, wanted at most {}", source.name, entry.smem_bytes, limit);
        }
        const std::string& mangled = built[i].entry.lowered.at(entry.expression);
        kernels.push_back({source.entries.size() == 1 ? source.name : entry.expression,
                           module->function(mangled, entry.shares_sm ? limit : entry.smem_bytes, entry.shares_sm),
                           entry.threads, static_cast<unsigned>(entry.smem_bytes)});
      }
      keys_[source.name] = built[i].key;
    }
  }
  std::vector<std::vector<Kernel>> loaded;
  for (const plan::KernelSource& source : sources) {
    const auto it = kernels_.find(source.name);
    loaded.push_back(it == kernels_.end() ? std::vector<Kernel>() : it->second);
  }
  return loaded;
}

std::vector<Kernel> KernelLoader::load(const plan::KernelSource& source) {
  std::vector<Kernel> kernels = load(std::vector{source}).front();
  if (kernels.empty()) fail("kernel {} is refused on {}: {}", source.name, device_.info().name, refusal(source.name));
  return kernels;
}

std::string KernelLoader::refusal(const std::string& source_name) const {
  const auto it = refused_.find(source_name);
  return it == refused_.end() ? "" : it->second;
}

std::vector<Fallback> fallbacks() {
  const std::lock_guard lock(record().mutex);
  return record().fallbacks;
}

void report_fallback(const std::string& kernel, const std::string& what, const std::string& device,
                     const std::string& reason) {
  warn(fmt::format("kernel {} {} {}: {}; it is disabled, the next one is used", kernel, what, device, reason));
  const std::lock_guard lock(record().mutex);
  record().fallbacks.push_back({kernel, device, reason});
}

std::optional<std::string> tested(const jit::Key& key, const std::string& device) {
  const std::lock_guard lock(record().mutex);
  const auto it = record().tested.find({key, device});
  return it == record().tested.end() ? std::nullopt : std::optional(it->second);
}

void remember_test(const jit::Key& key, const std::string& device, const std::string& result) {
  const std::lock_guard lock(record().mutex);
  record().tested[{key, device}] = result;
}

}  // namespace fourfold::cuda
