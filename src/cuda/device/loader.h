// Compiled kernels of one device, loaded: each once, from the store or the compiler. Knows no operation.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cuda/device/build.h"
#include "cuda/device/device.h"
#include "jit/store.h"

namespace fourfold::cuda {

struct LoadOptions {
  // Plan for this card instead of the present one, within its limits of shared memory, and compile for the present
  // one: FP4 multiplications are then emulated (kernels/ptx, FOURFOLD_EMULATE_FP4_MMA). For tests of kernels of cards
  // that are not at hand; slow.
  const plan::Gpu* emulate = nullptr;
  int threads = 0;  // compilations at a time; 0: the processors
  bool progress = true;
  // Changes a request before it is compiled: tests break kernels with it.
  std::function<void(jit::KernelRequest&)> rewrite = nullptr;
};

class KernelLoader {
 public:
  KernelLoader(const Device& device, jit::KernelStore& store, const LoadOptions& options);
  ~KernelLoader();
  KernelLoader(const KernelLoader&) = delete;
  KernelLoader& operator=(const KernelLoader&) = delete;

  // The entries of each source, in order; compiled in parallel where the store lacks them. One that refusal() names is
  // not loaded: it has none.
  std::vector<std::vector<Kernel>> load(const std::vector<plan::KernelSource>& sources);
  // Of one source that nothing may refuse: an Error then.
  std::vector<Kernel> load(const plan::KernelSource& source);
  // Why a kernel that was asked for must not run (jit::refusal_of), or empty.
  std::string refusal(const std::string& source_name) const;
  // On a device that only counts: each source once, in the order in which they were asked for.
  const std::vector<plan::KernelSource>& counted() const { return counted_; }
  // The store's key of a loaded source.
  const jit::Key& key_of(const std::string& source_name) const { return keys_.at(source_name); }

  // Of the card that is planned for: the present one, or the one that is emulated.
  const plan::Gpu& card() const { return card_; }
  const Device& device() const { return device_; }

 private:
  const Device& device_;
  jit::KernelStore& store_;
  LoadOptions options_;
  plan::Gpu card_;
  std::map<jit::Key, std::unique_ptr<jit::Module>> modules_;
  std::map<std::string, std::vector<Kernel>> kernels_;  // by name of the source
  std::vector<plan::KernelSource> counted_;
  std::map<std::string, jit::Key> keys_;
  std::map<std::string, std::string> refused_;  // name of the source -> why
};

// ---- kernels that are known to be right or wrong, over the whole process --------------------------------------------

// Something that did not go as planned.
struct Fallback {
  std::string kernel;  // name of its source
  std::string device;
  std::string reason;
};
// Kernels that were disabled, in order.
std::vector<Fallback> fallbacks();
// Says on stderr that a kernel is disabled, and counts it.
void report_fallback(const std::string& kernel, const std::string& what, const std::string& device,
                     const std::string& reason);
// What a kernel's self-test on that device found: nothing yet; empty: it is right; otherwise what was wrong.
std::optional<std::string> tested(const jit::Key& key, const std::string& device);
void remember_test(const jit::Key& key, const std::string& device, const std::string& result);

}  // namespace fourfold::cuda
