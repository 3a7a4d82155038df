#include "cuda/moe/sources.h"

#include <algorithm>

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

std::vector<plan::KernelSource> layer_sources(const plan::moe::Problem& problem, const plan::Gpu& gpu,
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

}  // namespace fourfold::cuda
