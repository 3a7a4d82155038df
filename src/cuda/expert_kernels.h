// The kernels of an expert layer's shape on a device: planned for every token bucket, compiled or taken from the store,
// loaded, and checked against the reference before they are used. Layers of equal shape share one ExpertKernels.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "cuda/expert_layer.h"
#include "jit/build.h"
#include "jit/kernels.h"
#include "jit/store.h"
#include "plan/plan.h"

namespace fourfold::cuda {

// What did not go as planned, over the whole process.
struct Fallback {
  std::string kernel;  // the candidate's name
  std::string device;
  std::string reason;
};
// Kernels that were disabled, in order; and how many token buckets of how many ExpertKernels run something else than
// the planner's or the tuner's first choice because of it.
std::vector<Fallback> fallbacks();
int64_t fallback_buckets();

struct KernelOptions {
  int64_t max_tokens = 16384;
  bool self_test = true;
  bool tuned = true;  // use the winners that `fourfold tune` stored
  // Plan for this card instead of the present one, within its limits of shared memory, and compile for the present
  // one: FP4 multiplications are then emulated (kernels/ptx, FOURFOLD_EMULATE_FP4_MMA). For tests of kernels of cards
  // that are not at hand; slow.
  const plan::Gpu* emulate = nullptr;
  int threads = 0;  // compilations at a time; 0: the processors
  bool progress = true;
  // Changes a request before it is compiled: tests break kernels with it.
  std::function<void(jit::KernelRequest&)> rewrite = nullptr;
};

// Compiled kernels of one device, loaded: each once.
class KernelLoader {
 public:
  KernelLoader(const Device& device, jit::KernelStore& store, const KernelOptions& options);

  // The kernels of these candidates, in order; compiled in parallel where the store lacks them. One that refusal()
  // names is not loaded.
  std::vector<Kernel> load(const std::vector<plan::KernelSpec>& specs);
  // The kernel that quantises a layer's input to NVFP4.
  void load_quantise();
  // Why a kernel that was asked for must not run (jit::refusal_of), or empty.
  std::string refusal(const std::string& spec_name) const;
  const FixedKernels& fixed() const { return fixed_; }
  // Of the card that is planned for: the present one, or the one that is emulated.
  const plan::Gpu& card() const { return card_; }
  const Device& device() const { return device_; }
  // The store's key of a loaded kernel.
  const jit::Key& key_of(const std::string& spec_name) const { return keys_.at(spec_name); }

  // Any kernels of a source of ours: {expression, threads, dynamic shared memory}.
  struct Wanted {
    const char* expression;
    unsigned threads;
    unsigned smem_bytes = 0;
  };
  std::vector<Kernel> load(const jit::KernelRequest& request, const std::vector<Wanted>& wanted);

 private:
  const Device& device_;
  jit::KernelStore& store_;
  KernelOptions options_;
  plan::Gpu card_;
  std::map<jit::Key, std::unique_ptr<jit::Module>> modules_;
  std::map<std::string, Kernel> kernels_;  // by name of the spec
  std::map<std::string, jit::Key> keys_;
  std::map<std::string, std::string> refused_;  // name of the spec -> why
  FixedKernels fixed_;
  // How kernels of the planned card are compiled for the present one.
  jit::CompileOptions compile_options() const;
};

struct PlannedBucket {
  int64_t tokens = 0;  // the most it is for
  plan::LayerPlan plan;
  PlannedPair pair;
  bool tuned = false;  // measured to be the fastest, rather than predicted
  // With activations kAuto and a plan that multiplies NVFP4: what layers run that have no usable input scales.
  std::optional<PlannedPair> without_input_scales;

  // Error when the kernels want input scales, the weights have none, and bf16 is not allowed.
  const PlannedPair& pair_for(const ExpertWeights& weights) const;
};

class ExpertKernels {
 public:
  // Plans problem.tokens = every bucket up to that of max_tokens. Kernels that fail their self-test, or that the
  // compiler spoils (jit::refusal_of), are disabled with a message on stderr and the next ranked one is taken; Error
  // when nothing is left.
  ExpertKernels(const Device& device, jit::KernelStore& store, const plan::MoeProblem& problem,
                const KernelOptions& options = {});

  const LayerContext& context() const { return context_; }
  const plan::MoeProblem& problem() const { return context_.problem; }
  int64_t max_tokens() const { return max_tokens_; }
  const std::vector<PlannedBucket>& buckets() const { return buckets_; }
  // The smallest bucket that holds that many tokens (1 to max_tokens).
  const PlannedBucket& bucket(int64_t tokens) const;

  // A layer of any two compatible candidates, for the tuner: loads, and tests if so wanted. Nothing, with the reason on
  // stderr, when a kernel fails its test.
  std::optional<PlannedPair> pair(const plan::Candidate& gate_up, const plan::Candidate& down, int64_t tokens);
  // Loads these candidates' kernels in parallel, ahead of pair().
  void load_all(const std::vector<std::pair<plan::Pass, plan::Candidate>>& candidates);
  KernelLoader& loader() { return loader_; }

 private:
  void plan_buckets(jit::KernelStore& store);
  PlannedPair load_pair(const plan::Candidate& gate_up, const plan::Candidate& down, int64_t tokens);
  // Whether both kernels of the pair are right; disables those that are not.
  bool test(const PlannedPair& pair);
  // Whether the compiler made all of these as they were planned; disables those that it did not.
  bool compiled_as_planned(const std::vector<plan::KernelSpec>& specs);
  // Says so once, and counts it.
  void disable(const std::string& name, const std::string& what, const std::string& reason);
  bool disabled(plan::Pass pass, const plan::Candidate& candidate) const;

  KernelLoader loader_;
  KernelOptions options_;
  LayerContext context_;
  int64_t max_tokens_;
  std::set<std::string> disabled_;  // names of specs
  std::vector<PlannedBucket> buckets_;
};

}  // namespace fourfold::cuda
