#include "cuda/moe/sources.h"

#include <algorithm>
#include <deque>
#include <mutex>

#include "kernels/moe/tables.h"

namespace fourfold::cuda {

plan::KernelSource route_source() {
  return {"route",
          "#include \"kernels/moe/route_sm90.cuh\"\n",
          {{"fourfold::moe::moe_route", moe::kRouteThreads},
           {"fourfold::moe::moe_route_count", moe::kRouteThreads},
           {"fourfold::moe::moe_route_scatter", moe::kRouteManyThreads},
           {"fourfold::moe::moe_combine", moe::kCombineThreads},
           {"fourfold::moe::moe_combine_beside", moe::kCombineBesideThreads},
           {"fourfold::moe::moe_combine_packed", moe::kCombinePackedThreads}}};
}

plan::KernelSource prepare_source() {
  return {"prepare",
          "#include \"kernels/moe/prepare.cuh\"\n",
          {{"fourfold::moe::moe_repack", moe::kPrepareThreads},
           {"fourfold::moe::moe_pad_rows", moe::kPrepareThreads},
           {"fourfold::moe::moe_append_shared", moe::kPrepareThreads}}};
}

plan::KernelSource quantise_source() {
  return {
      "quantize", "#include \"kernels/moe/fp4_sm120.cuh\"\n", {{"fourfold::moe::moe_quantize", moe::kQuantizeThreads}}};
}

bool quantises(const plan::moe::Problem& problem, const plan::Gpu& gpu) {
  const auto rows = plan::moe::families();
  return std::any_of(rows.begin(), rows.end(), [&](const plan::moe::FamilyRow& row) {
    return row.rows == plan::moe::RowForm::kFp4 && row.runs_on(plan::arch_of(gpu)) && problem.allows(row.activations());
  });
}

namespace {

std::vector<plan::KernelSource> planned_sources(const plan::moe::Problem& problem, const plan::Gpu& gpu,
                                                const std::set<std::string>& refused, int64_t most_tokens) {
  const auto usable = [&](plan::moe::Pass pass, const plan::moe::Candidate& c) {
    return refused.empty() || !refused.contains(plan::moe::kernel_of(problem, pass, c).name);
  };
  std::vector<plan::KernelSource> sources =
      plan::moe::kernels_of(problem, gpu, {.only_implemented = true, .usable = usable}, most_tokens);
  if (quantises(problem, gpu)) sources.push_back(quantise_source());
  sources.push_back(route_source());
  sources.push_back(prepare_source());
  return sources;
}

}  // namespace

// Planning all buckets of a shape takes the better part of a second, and ranks of a model, or the same model with
// another cache, ask for the same: the last answers are kept.
std::vector<plan::KernelSource> layer_sources(const plan::moe::Problem& problem, const plan::Gpu& gpu,
                                              const std::set<std::string>& refused, int64_t most_tokens) {
  struct Answer {
    plan::moe::Problem problem;
    plan::Gpu gpu;  // whole: cards that nobody has listed have one name
    std::set<std::string> refused;
    int64_t most_tokens;
    std::vector<plan::KernelSource> sources;
  };
  constexpr size_t kAnswers = 16;
  static std::mutex mutex;
  static std::deque<Answer> answers;
  const std::scoped_lock lock(mutex);  // whoever asks for the same at the same time waits for the answer
  for (const Answer& each : answers) {
    if (each.problem == problem && each.gpu == gpu && each.refused == refused && each.most_tokens == most_tokens) {
      return each.sources;
    }
  }
  answers.push_back({problem, gpu, refused, most_tokens, planned_sources(problem, gpu, refused, most_tokens)});
  if (answers.size() > kAnswers) answers.pop_front();
  return answers.back().sources;
}

}  // namespace fourfold::cuda
