#include "cuda/expert_kernels.h"

#include <algorithm>
#include <mutex>

#include "base/check.h"
#include "base/console.h"
#include "cuda/self_test.h"
#include "cuda/tuned.h"
#include "kernels/moe/tables.h"

namespace fourfold::cuda {
namespace {

// What is known of kernels in this process: {key, device} -> empty, or why it failed.
struct Record {
  std::mutex mutex;
  std::map<std::pair<jit::Key, std::string>, std::string> tested;
  std::vector<Fallback> fallbacks;
  int64_t buckets = 0;
};
Record& record() {
  static Record instance;
  return instance;
}

// If this many plans in a row have a wrong kernel, something else is wrong.
constexpr int kMostRounds = 6;
// The same for kernels that the compiler spoils: neighbouring tiles often share that fate.
constexpr int kMostRefusals = 24;

}  // namespace

std::vector<Fallback> fallbacks() {
  const std::lock_guard lock(record().mutex);
  return record().fallbacks;
}

int64_t fallback_buckets() {
  const std::lock_guard lock(record().mutex);
  return record().buckets;
}

// ---- loading --------------------------------------------------------------------------------------------------------

KernelLoader::KernelLoader(const Device& device, jit::KernelStore& store, const KernelOptions& options)
    : device_(device), store_(store), options_(options), card_(options.emulate ? *options.emulate : device.gpu()) {
  const std::string arch = device.info().arch();
  const auto fixed =
      load(jit::route_request(arch), {{"fourfold::moe::moe_route", moe::kRouteThreads},
                                      {"fourfold::moe::moe_route_count", moe::kRouteThreads},
                                      {"fourfold::moe::moe_route_scatter", moe::kRouteManyThreads},
                                      {"fourfold::moe::moe_combine", moe::kCombineThreads},
                                      {"fourfold::moe::moe_combine_beside", moe::kCombineBesideThreads},
                                      {"fourfold::moe::moe_combine_packed", moe::kCombinePackedThreads}});
  const auto prepare = load(jit::prepare_request(arch), {{"fourfold::moe::moe_repack", 128},
                                                         {"fourfold::moe::moe_pad_rows", 128},
                                                         {"fourfold::moe::moe_append_shared", 128}});
  fixed_ = {fixed[0], fixed[1], fixed[2], fixed[3], fixed[4], fixed[5], prepare[0], prepare[1], prepare[2], {}};
}

jit::CompileOptions KernelLoader::compile_options() const {
  if (options_.emulate == nullptr) return {};
  return {device_.info().arch(), {"FOURFOLD_EMULATE_FP4_MMA"}};
}

void KernelLoader::load_quantise() {
  fixed_.quantise =
      load(jit::quantize_request(card_.arch, compile_options()), {{"fourfold::moe::moe_quantize", 128}}).front();
}

std::vector<Kernel> KernelLoader::load(const jit::KernelRequest& request, const std::vector<Wanted>& wanted) {
  jit::KernelRequest changed = request;
  if (options_.rewrite) options_.rewrite(changed);
  const jit::BuiltKernel built =
      jit::build(store_, {changed}, {.threads = options_.threads, .progress = options_.progress}).front();
  auto& module = modules_[built.key];
  if (module == nullptr) {
    module = std::make_unique<jit::Module>(device_.driver(), built.entry.cubin, built.name);
  }
  std::vector<Kernel> kernels;
  for (const Wanted& w : wanted) {
    kernels.push_back(
        {w.expression, module->function(built.entry.lowered.at(w.expression), w.smem_bytes), w.threads, w.smem_bytes});
  }
  return kernels;
}

std::vector<Kernel> KernelLoader::load(const std::vector<plan::KernelSpec>& specs) {
  const jit::CompileOptions options = compile_options();
  std::vector<const plan::KernelSpec*> missing;
  std::vector<jit::KernelRequest> requests;
  std::set<std::string> seen;
  for (const plan::KernelSpec& spec : specs) {
    if (kernels_.contains(spec.name) || refused_.contains(spec.name) || !seen.insert(spec.name).second) continue;
    auto request = jit::request_of(spec, card_.arch, options);
    if (!request) fail("{}: no kernel of this family is built for {}", spec.name, card_.arch);
    if (options_.rewrite) options_.rewrite(*request);
    requests.push_back(std::move(*request));
    missing.push_back(&spec);
  }
  if (!requests.empty()) {
    const auto built = jit::build(store_, requests, {.threads = options_.threads, .progress = options_.progress});
    for (size_t i = 0; i < built.size(); ++i) {
      const plan::KernelSpec& spec = *missing[i];
      const plan::TileConfig& tile = spec.candidate.tile;
      if (std::string why = jit::refusal_of(built[i].entry); !why.empty()) {
        refused_[spec.name] = std::move(why);
        continue;
      }
      const int64_t smem = plan::make_smem_map(tile).total;
      const int64_t limit = std::min(plan::find_arch(card_.arch).smem_per_block, device_.info().smem_per_block);
      if (smem > limit) fail("{}: {} bytes of shared memory, wanted at most {}", spec.name, smem, limit);
      auto& module = modules_[built[i].key];
      if (module == nullptr) {
        module = std::make_unique<jit::Module>(device_.driver(), built[i].entry.cubin, spec.name);
      }
      const std::string& mangled = built[i].entry.lowered.at(jit::kernel_expression(spec));
      // Without sorting, how much is asked for depends on the kernel beside it (plan::launch_smem).
      const bool one = tile.inline_routes != 0;
      kernels_[spec.name] = {spec.name, module->function(mangled, one ? limit : smem, one),
                             static_cast<unsigned>(tile.warps + tile.producer_warps) * 32, static_cast<unsigned>(smem)};
      keys_[spec.name] = built[i].key;
    }
  }
  std::vector<Kernel> kernels;
  for (const plan::KernelSpec& spec : specs) {
    kernels.push_back(refused_.contains(spec.name) ? Kernel{} : kernels_.at(spec.name));
  }
  return kernels;
}

std::string KernelLoader::refusal(const std::string& spec_name) const {
  const auto it = refused_.find(spec_name);
  return it == refused_.end() ? "" : it->second;
}

// ---- plans ----------------------------------------------------------------------------------------------------------

ExpertKernels::ExpertKernels(const Device& device, jit::KernelStore& store, const plan::MoeProblem& problem,
                             const KernelOptions& options)
    : loader_(device, store, options), options_(options), max_tokens_(options.max_tokens) {
  if (max_tokens_ < 1 || max_tokens_ > plan::token_buckets().back()) {
    fail("expert layer for {} tokens: wanted 1 to {}", max_tokens_, plan::token_buckets().back());
  }
  context_ = {&device, problem, &loader_.fixed()};
  if (problem.allows(plan::ActivationFormat::kNvfp4) &&
      plan::find_family(plan::Family::kFp4, loader_.card().arch) != nullptr) {
    loader_.load_quantise();
  }
  plan_buckets(store);
}

bool ExpertKernels::disabled(plan::Pass pass, const plan::Candidate& candidate) const {
  return !disabled_.empty() && disabled_.contains(plan::spec_of(context_.problem, pass, candidate).name);
}

void ExpertKernels::plan_buckets(jit::KernelStore& store) {
  const std::optional<TunedTable> tuned =
      options_.tuned && options_.emulate == nullptr
          ? TunedTable::load(store.directory(), tuned_identity(*context_.device, context_.problem))
          : std::nullopt;
  for (int round = 0, refusals = 0;;) {
    if (round == kMostRounds || refusals == kMostRefusals) {
      fail("{} kernels failed their self-test on {} or were spoilt by the compiler; nothing is run", disabled_.size(),
           context_.device->info().name);
    }
    std::vector<PlannedBucket> buckets;
    std::vector<plan::KernelSpec> specs;
    for (const int64_t tokens : plan::token_buckets()) {
      if (tokens > plan::bucket_of(max_tokens_)) break;
      PlannedBucket bucket;
      bucket.tokens = tokens;
      plan::MoeProblem p = context_.problem;
      p.tokens = tokens;
      const plan::PlanOptions plan_options = {
          .only_implemented = true,
          .usable = [&](plan::Pass pass, const plan::Candidate& c) { return !disabled(pass, c); },
          .explain = false};
      bucket.plan = plan::plan_layer(p, loader_.card(), plan_options);
      if (tuned) {
        const TunedChoice* choice = tuned->find(tokens);
        bucket.tuned = choice != nullptr && plan::choose_by_name(&bucket.plan, choice->gate_up, choice->down);
        if (choice != nullptr && !bucket.tuned && disabled_.empty()) {
          warn(
              fmt::format("{}: the tuned kernels for {} tokens ({} and {}) are not candidates any more; the plan is "
                          "used instead",
                          tuned->path().string(), tokens, choice->gate_up, choice->down));
        }
      }
      std::vector<const plan::LayerPlan*> plans = {&bucket.plan};
      std::optional<plan::LayerPlan> bf16;
      if (plan::needs_input_scales(bucket.plan)) {
        bf16 = plan::plan_without_input_scales(bucket.plan, plan_options);
        bucket.without_input_scales.emplace();
        bucket.without_input_scales->gate_up = bf16->gate_up.chosen.candidate;
        bucket.without_input_scales->down = bf16->down.chosen.candidate;
        plans.push_back(&*bf16);
      }
      for (const plan::LayerPlan* plan : plans) {
        for (const plan::GemmPlan* gemm : {&plan->gate_up, &plan->down}) {
          specs.push_back(plan::spec_of(p, gemm->pass, gemm->chosen.candidate));
        }
      }
      bucket.plan.gate_up.rejected.clear();
      bucket.plan.down.rejected.clear();
      buckets.push_back(std::move(bucket));
    }
    loader_.load(specs);
    if (!compiled_as_planned(specs)) {
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
        const plan::LayerPlan &first = buckets_[i].plan, &last = buckets[i].plan;
        changed += to_string(first.gate_up.chosen.candidate) != to_string(last.gate_up.chosen.candidate) ||
                   to_string(first.down.chosen.candidate) != to_string(last.down.chosen.candidate);
      }
      buckets_ = std::move(buckets);
      const std::lock_guard lock(record().mutex);
      record().buckets += changed;
      return;
    }
    ++round;
    if (buckets_.empty()) buckets_ = std::move(buckets);
  }
}

PlannedPair ExpertKernels::load_pair(const plan::Candidate& gate_up, const plan::Candidate& down, int64_t tokens) {
  plan::MoeProblem p = context_.problem;
  p.tokens = tokens;
  const auto kernels =
      loader_.load({plan::spec_of(p, plan::Pass::kGateUp, gate_up), plan::spec_of(p, plan::Pass::kDown, down)});
  const auto grid = [&](plan::Pass pass, const plan::Candidate& c) {
    return static_cast<unsigned>(plan::launch_grid(p, pass, context_.device->gpu(), c));
  };
  PlannedPair pair = {
      gate_up, down, kernels[0], kernels[1], grid(plan::Pass::kGateUp, gate_up), grid(plan::Pass::kDown, down)};
  const plan::LaunchSmem smem = plan::launch_smem(gate_up, down, plan::find_arch(loader_.card().arch));
  pair.gate_up_kernel.smem_bytes = static_cast<unsigned>(smem.gate_up);
  pair.down_kernel.smem_bytes = static_cast<unsigned>(smem.down);
  return pair;
}

void ExpertKernels::load_all(const std::vector<std::pair<plan::Pass, plan::Candidate>>& candidates) {
  std::vector<plan::KernelSpec> specs;
  for (const auto& [pass, candidate] : candidates) specs.push_back(plan::spec_of(context_.problem, pass, candidate));
  loader_.load(specs);
}

std::optional<PlannedPair> ExpertKernels::pair(const plan::Candidate& gate_up, const plan::Candidate& down,
                                               int64_t tokens) {
  FF_ASSERT(plan::compatible(gate_up.tile, down.tile));
  if (disabled(plan::Pass::kGateUp, gate_up) || disabled(plan::Pass::kDown, down)) return std::nullopt;
  const std::vector<plan::KernelSpec> specs = {plan::spec_of(context_.problem, plan::Pass::kGateUp, gate_up),
                                               plan::spec_of(context_.problem, plan::Pass::kDown, down)};
  loader_.load(specs);
  if (!compiled_as_planned(specs)) return std::nullopt;
  PlannedPair pair = load_pair(gate_up, down, tokens);
  if (options_.self_test && !test(pair)) return std::nullopt;
  return pair;
}

void ExpertKernels::disable(const std::string& name, const std::string& what, const std::string& reason) {
  if (!disabled_.insert(name).second) return;
  const std::string& device = context_.device->info().name;
  warn(fmt::format("kernel {} {} {}: {}; it is disabled, the next one is used", name, what, device, reason));
  const std::lock_guard lock(record().mutex);
  record().fallbacks.push_back({name, device, reason});
}

bool ExpertKernels::compiled_as_planned(const std::vector<plan::KernelSpec>& specs) {
  bool all = true;
  for (const plan::KernelSpec& spec : specs) {
    const std::string why = loader_.refusal(spec.name);
    if (why.empty()) continue;
    all = false;
    disable(spec.name, "is refused on", why);
  }
  return all;
}

bool ExpertKernels::test(const PlannedPair& pair) {
  const std::string& device = context_.device->info().name;
  const std::string* names[2] = {&pair.gate_up_kernel.name, &pair.down_kernel.name};
  const auto known = [&](int i) -> std::optional<std::string> {
    const std::lock_guard lock(record().mutex);
    const auto it = record().tested.find({loader_.key_of(*names[i]), device});
    return it == record().tested.end() ? std::nullopt : std::optional(it->second);
  };
  std::optional<std::string> result[2] = {known(0), known(1)};
  if (!result[0] || !result[1]) {
    const SelfTestResult measured = self_test(loader_, context_.problem, pair);
    result[0] = measured.gate_up;
    // What down does with wrong inputs says nothing about it.
    if (measured.gate_up.empty()) result[1] = measured.down;
    const std::lock_guard lock(record().mutex);
    for (int i = 0; i < 2; ++i) {
      if (result[i]) record().tested[{loader_.key_of(*names[i]), device}] = *result[i];
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
