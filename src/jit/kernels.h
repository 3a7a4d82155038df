// From a plan's kernel to what the compiler is asked for: the source that instantiates it and its name.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "jit/build.h"
#include "plan/plan.h"

namespace fourfold::jit {

// Nothing when the family has no kernel on that architecture.
std::optional<KernelRequest> request_of(const plan::KernelSpec& spec, std::string_view arch);

// Everything that an expert layer of this shape launches on the card, over all token buckets: the planned kernels and
// the routing and combining kernels beside them. Error when no kernel of the card's architecture is built.
std::vector<KernelRequest> requests_of(const plan::MoeProblem& problem, const plan::Gpu& gpu);

}  // namespace fourfold::jit
