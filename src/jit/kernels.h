// From a plan's kernel to what the compiler is asked for: the source that instantiates it and its name.
#pragma once

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "jit/build.h"
#include "plan/plan.h"

namespace fourfold::jit {

// A request over the embedded sources; `definitions` are macros: "NAME" or "NAME=VALUE".
KernelRequest make_request(std::string name, std::string text, std::string_view arch,
                           std::vector<std::string> expressions, const std::vector<std::string>& definitions = {});

struct CompileOptions {
  std::string arch;                      // compile for this one instead (an emulated run); empty: the plan's own
  std::vector<std::string> definitions;  // macros
};

// Nothing when the family has no kernel on that architecture. `arch` is the one that was planned for.
std::optional<KernelRequest> request_of(const plan::KernelSpec& spec, std::string_view arch,
                                        const CompileOptions& options = {});
// The C++ name of the kernel in that request.
std::string kernel_expression(const plan::KernelSpec& spec);

// The kernels beside them: routing and the weighted sum; repacking of weights and padding of rows at load.
KernelRequest route_request(std::string_view arch);
KernelRequest prepare_request(std::string_view arch);
// Quantises the input of a W4A4 layer.
KernelRequest quantize_request(std::string_view arch, const CompileOptions& options = {});

// Everything that an expert layer of this shape launches on the card, over all token buckets: the planned kernels and
// those beside them. Error when no kernel of the card's architecture is built.
// `refused`: names of planned kernels (plan::spec_of) to do without.
std::vector<KernelRequest> requests_of(const plan::MoeProblem& problem, const plan::Gpu& gpu,
                                       const std::set<std::string>& refused = {});
// Builds them; where the compiler spoils a planned kernel (refusal_of) it is named on stderr, and what is planned
// without it is built as well, so that the store holds what will run.
std::vector<BuiltKernel> build_all(KernelStore& store, const plan::MoeProblem& problem, const plan::Gpu& gpu,
                                   const BuildOptions& options = {});

}  // namespace fourfold::jit
