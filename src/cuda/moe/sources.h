// Everything that an expert layer launches, as sources to compile: the planned kernels and those beside them.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "plan/moe/plan.h"

namespace fourfold::cuda {

// Routing and the weighted sums; what happens to weights and rows before the GEMMs; quantisation of a W4A4 layer's
// input. Entries in the order of FixedKernels (cuda/moe/context.h).
plan::KernelSource route_source();
plan::KernelSource prepare_source();
plan::KernelSource quantise_source();
// Whether a layer of this problem quantises its input on such a card.
bool quantises(const plan::moe::Problem& problem, const plan::Gpu& gpu);

// Over all token buckets up to that of `most_tokens`, doing without the planned kernels whose names are `refused`.
std::vector<plan::KernelSource> layer_sources(const plan::moe::Problem& problem, const plan::Gpu& gpu,
                                              const std::set<std::string>& refused = {},
                                              int64_t most_tokens = int64_t{1} << 20);

}  // namespace fourfold::cuda
