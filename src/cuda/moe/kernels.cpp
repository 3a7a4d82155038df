#include "cuda/moe/kernels.h"

#include <algorithm>
#include <atomic>

#include "base/check.h"
#include "base/console.h"
#include "cuda/moe/self_test.h"
#include "cuda/moe/sources.h"
#include "cuda/moe/tuned.h"

namespace fourfold::cuda {
namespace {

using plan::moe::kernel_of;

std::atomic<int64_t>& changed_buckets() {
  static std::atomic<int64_t> count{0};
  return count;
}

// If this many plans in a row have a wrong kernel, something else is wrong.
constexpr int kMostRounds = 6;
// The same for kernels that the compiler spoils: neighbouring tiles often share that fate.
constexpr int kMostRefusals = 24;

}  // namespace

int64_t fallback_buckets() { return changed_buckets(); }

ExpertKernels::ExpertKernels(const Device& device, jit::KernelStore& store, const plan::moe::Problem& problem,
                             const KernelOptions& options)
    : loader_(device, store, options.load), options_(options), max_tokens_(options.max_tokens) {
  if (max_tokens_ < 1 || max_tokens_ > plan::token_buckets().back()) {
    fail("expert layer for {} tokens: wanted 1 to {}", max_tokens_, plan::token_buckets().back());
  }
  const auto route = loader_.load(route_source()), prepare = loader_.load(prepare_source());
  fixed_ = {route[0], route[1], route[2], route[3], route[4], route[5], prepare[0], prepare[1], prepare[2], {}};
  if (quantises(problem, loader_.card())) fixed_.quantise = loader_.load(quantise_source()).front();
  context_ = {&device, problem, &fixed_};
  if (!device.only_counts()) plan_buckets(store);
}

bool ExpertKernels::disabled(plan::moe::Pass pass, const plan::moe::Candidate& candidate) const {
  return !disabled_.empty() && disabled_.contains(kernel_of(context_.problem, pass, candidate).name);
}

void ExpertKernels::plan_buckets(jit::KernelStore& store) {
  const std::optional<TunedTable> tuned =
      options_.tuned && options_.load.emulate == nullptr
          ? TunedTable::load(store.directory(), tuned_identity(*context_.device, context_.problem))
          : std::nullopt;
  for (int round = 0, refusals = 0;;) {
    if (round == kMostRounds || refusals == kMostRefusals) {
      fail("{} kernels failed their self-test on {} or were spoilt by the compiler; nothing is run", disabled_.size(),
           context_.device->info().name);
    }
    std::vector<PlannedBucket> buckets;
    std::vector<plan::KernelSource> wanted;
    for (const int64_t tokens : plan::token_buckets()) {
      if (tokens > plan::bucket_of(max_tokens_)) break;
      PlannedBucket bucket;
      bucket.tokens = tokens;
      plan::moe::Problem p = context_.problem;
      p.tokens = tokens;
      const plan::moe::PlanOptions plan_options = {
          .only_implemented = true,
          .usable = [&](plan::moe::Pass pass, const plan::moe::Candidate& c) { return !disabled(pass, c); },
          .explain = false};
      bucket.plan = plan::moe::plan_layer(p, loader_.card(), plan_options);
      if (tuned) {
        const TunedChoice* choice = tuned->find(tokens);
        bucket.tuned = choice != nullptr && plan::moe::choose_by_name(&bucket.plan, choice->gate_up, choice->down);
        if (choice != nullptr && !bucket.tuned && disabled_.empty()) {
          warn(
              fmt::format("{}: the tuned kernels for {} tokens ({} and {}) are not candidates any more; the plan is "
                          "used instead",
                          tuned->path().string(), tokens, choice->gate_up, choice->down));
        }
      }
      std::vector<const plan::moe::LayerPlan*> plans = {&bucket.plan};
      std::optional<plan::moe::LayerPlan> bf16;
      if (plan::moe::needs_input_scales(bucket.plan)) {
        bf16 = plan::moe::plan_without_input_scales(bucket.plan, plan_options);
        bucket.without_input_scales.emplace();
        bucket.without_input_scales->gate_up = bf16->gate_up.chosen.candidate;
        bucket.without_input_scales->down = bf16->down.chosen.candidate;
        plans.push_back(&*bf16);
      }
      for (const plan::moe::LayerPlan* plan : plans) {
        for (const plan::moe::GemmPlan* gemm : {&plan->gate_up, &plan->down}) {
          wanted.push_back(kernel_of(p, gemm->pass, gemm->chosen.candidate));
        }
      }
      bucket.plan.gate_up.rejected.clear();
      bucket.plan.down.rejected.clear();
      buckets.push_back(std::move(bucket));
    }
    loader_.load(wanted);
    if (!compiled_as_planned(wanted)) {
      ++refusals;
      if (buckets_.empty()) buckets_ = std::move(buckets);
      continue;
    }
    bool right = true;
    for (PlannedBucket& bucket : buckets) {
      bucket.pair = load_pair(bucket.plan.gate_up.chosen.candidate, bucket.plan.down.chosen.candidate, bucket.tokens);
      if (options_.self_test && !test(bucket.pair)) right = false;
      if (auto& other = bucket.without_input_scales) {
        other = load_pair(other->gate_up, other->down, bucket.tokens);
        if (options_.self_test && !test(*other)) right = false;
      }
    }
    if (right) {
      int64_t changed = 0;
      for (size_t i = 0; i < buckets_.size(); ++i) {  // those of the first round
        const plan::moe::LayerPlan &first = buckets_[i].plan, &last = buckets[i].plan;
        changed += to_string(first.gate_up.chosen.candidate) != to_string(last.gate_up.chosen.candidate) ||
                   to_string(first.down.chosen.candidate) != to_string(last.down.chosen.candidate);
      }
      buckets_ = std::move(buckets);
      changed_buckets() += changed;
      return;
    }
    ++round;
    if (buckets_.empty()) buckets_ = std::move(buckets);
  }
}

void ExpertKernels::plan_for(int64_t tokens) {
  FF_ASSERT(context_.device->only_counts());
  PlannedBucket bucket;
  bucket.tokens = plan::bucket_of(tokens);
  const auto at = std::find_if(buckets_.begin(), buckets_.end(),
                               [&](const PlannedBucket& other) { return other.tokens >= bucket.tokens; });
  if (at != buckets_.end() && at->tokens == bucket.tokens) return;
  plan::moe::Problem p = context_.problem;
  p.tokens = bucket.tokens;
  bucket.plan = plan::moe::plan_layer(p, loader_.card(), {.only_implemented = true, .explain = false});
  bucket.pair = load_pair(bucket.plan.gate_up.chosen.candidate, bucket.plan.down.chosen.candidate, bucket.tokens);
  buckets_.insert(at, std::move(bucket));
}

PlannedPair ExpertKernels::load_pair(const plan::moe::Candidate& gate_up, const plan::moe::Candidate& down,
                                     int64_t tokens) {
  plan::moe::Problem p = context_.problem;
  p.tokens = tokens;
  const auto kernels = loader_.load(
      std::vector{kernel_of(p, plan::moe::Pass::kGateUp, gate_up), kernel_of(p, plan::moe::Pass::kDown, down)});
  const auto grid = [&](plan::moe::Pass pass, const plan::moe::Candidate& c) {
    return static_cast<unsigned>(plan::moe::launch_grid(p, pass, context_.device->gpu(), c));
  };
  PlannedPair pair = {gate_up,
                      down,
                      kernels[0].front(),
                      kernels[1].front(),
                      grid(plan::moe::Pass::kGateUp, gate_up),
                      grid(plan::moe::Pass::kDown, down)};
  const plan::moe::LaunchSmem smem = plan::moe::launch_smem(gate_up, down, plan::find_arch(loader_.card().arch));
  pair.gate_up_kernel.smem_bytes = static_cast<unsigned>(smem.gate_up);
  pair.down_kernel.smem_bytes = static_cast<unsigned>(smem.down);
  return pair;
}

void ExpertKernels::load_all(const std::vector<std::pair<plan::moe::Pass, plan::moe::Candidate>>& candidates) {
  std::vector<plan::KernelSource> wanted;
  for (const auto& [pass, candidate] : candidates) wanted.push_back(kernel_of(context_.problem, pass, candidate));
  loader_.load(wanted);
}

std::optional<PlannedPair> ExpertKernels::pair(const plan::moe::Candidate& gate_up, const plan::moe::Candidate& down,
                                               int64_t tokens) {
  FF_ASSERT(plan::moe::compatible(gate_up.tile, down.tile));
  if (disabled(plan::moe::Pass::kGateUp, gate_up) || disabled(plan::moe::Pass::kDown, down)) return std::nullopt;
  const std::vector<plan::KernelSource> wanted = {kernel_of(context_.problem, plan::moe::Pass::kGateUp, gate_up),
                                                  kernel_of(context_.problem, plan::moe::Pass::kDown, down)};
  loader_.load(wanted);
  if (!compiled_as_planned(wanted)) return std::nullopt;
  PlannedPair pair = load_pair(gate_up, down, tokens);
  if (options_.self_test && !test(pair)) return std::nullopt;
  return pair;
}

void ExpertKernels::disable(const std::string& name, const std::string& what, const std::string& reason) {
  if (!disabled_.insert(name).second) return;
  report_fallback(name, what, context_.device->info().name, reason);
}

bool ExpertKernels::compiled_as_planned(const std::vector<plan::KernelSource>& kernels) {
  bool all = true;
  for (const plan::KernelSource& kernel : kernels) {
    const std::string why = loader_.refusal(kernel.name);
    if (why.empty()) continue;
    all = false;
    disable(kernel.name, "is refused on", why);
  }
  return all;
}

bool ExpertKernels::test(const PlannedPair& pair) {
  const std::string& device = context_.device->info().name;
  const std::string* names[2] = {&pair.gate_up_kernel.name, &pair.down_kernel.name};
  std::optional<std::string> result[2];
  for (int i = 0; i < 2; ++i) result[i] = tested(loader_.key_of(*names[i]), device);
  if (!result[0] || !result[1]) {
    const SelfTestResult measured = self_test(context_, pair);
    result[0] = measured.gate_up;
    // What down does with wrong inputs says nothing about it.
    if (measured.gate_up.empty()) result[1] = measured.down;
    for (int i = 0; i < 2; ++i) {
      if (result[i]) remember_test(loader_.key_of(*names[i]), device, *result[i]);
    }
  }
  bool right = true;
  for (int i = 0; i < 2; ++i) {
    if (!result[i] || result[i]->empty()) continue;
    right = false;
    disable(*names[i], "failed its self-test on", *result[i]);
  }
  return right;
}

const PlannedPair& PlannedBucket::pair_for(const ExpertWeights& weights) const {
  if (!pair.fp4() || weights.input_scales()) return pair;
  if (without_input_scales) return *without_input_scales;
  fail(
      "expert layer: planned with NVFP4 activations only, but no input scale of the layer can be used; wanted "
      "activations bf16 or auto");
}

const PlannedBucket& ExpertKernels::bucket(int64_t tokens) const {
  for (const PlannedBucket& bucket : buckets_) {
    if (tokens <= bucket.tokens) return bucket;
  }
  fail("expert layer: {} tokens, wanted at most {}", tokens, max_tokens_);
}

}  // namespace fourfold::cuda
