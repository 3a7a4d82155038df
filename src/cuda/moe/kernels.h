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

#include "cuda/device/loader.h"
#include "cuda/moe/layer.h"
#include "plan/moe/plan.h"

namespace fourfold::cuda {

// How many token buckets of how many ExpertKernels run something else than the planner's or the tuner's first choice,
// because kernels were disabled (fallbacks() of cuda/device/loader.h).
int64_t fallback_buckets();

struct KernelOptions {
  int64_t max_tokens = 16384;
  bool self_test = true;
  bool tuned = true;  // use the winners that `fourfold tune` stored
  LoadOptions load = {};
};

struct PlannedBucket {
  int64_t tokens = 0;  // the most it is for
  plan::moe::LayerPlan plan;
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
  ExpertKernels(const Device& device, jit::KernelStore& store, const plan::moe::Problem& problem,
                const KernelOptions& options = {});

  const LayerContext& context() const { return context_; }
  const plan::moe::Problem& problem() const { return context_.problem; }
  int64_t max_tokens() const { return max_tokens_; }
  const std::vector<PlannedBucket>& buckets() const { return buckets_; }
  // The smallest bucket that holds that many tokens (1 to max_tokens).
  const PlannedBucket& bucket(int64_t tokens) const;

  // On a card that only counts, where nothing is planned ahead: there is a bucket for that many tokens, the planner's.
  void plan_for(int64_t tokens);

  // A layer of any two compatible candidates, for the tuner: loads, and tests if so wanted. Nothing, with the reason on
  // stderr, when a kernel fails its test.
  std::optional<PlannedPair> pair(const plan::moe::Candidate& gate_up, const plan::moe::Candidate& down,
                                  int64_t tokens);
  // Loads these candidates' kernels in parallel, ahead of pair().
  void load_all(const std::vector<std::pair<plan::moe::Pass, plan::moe::Candidate>>& candidates);
  KernelLoader& loader() { return loader_; }

 private:
  void plan_buckets(jit::KernelStore& store);
  PlannedPair load_pair(const plan::moe::Candidate& gate_up, const plan::moe::Candidate& down, int64_t tokens);
  // Whether both kernels of the pair are right; disables those that are not.
  bool test(const PlannedPair& pair);
  // Whether the compiler made all of these as they were planned; disables those that it did not.
  bool compiled_as_planned(const std::vector<plan::KernelSource>& kernels);
  // Says so once, and counts it.
  void disable(const std::string& name, const std::string& what, const std::string& reason);
  bool disabled(plan::moe::Pass pass, const plan::moe::Candidate& candidate) const;

  KernelLoader loader_;
  KernelOptions options_;
  LayerContext context_;
  int64_t max_tokens_;
  FixedKernels fixed_;
  std::set<std::string> disabled_;  // names of kernels
  std::vector<PlannedBucket> buckets_;
};

}  // namespace fourfold::cuda
