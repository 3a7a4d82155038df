// From kernels that a plan names (plan/kernel.h) to compiled ones (src/jit), for a card that need not be there.
#pragma once

#include <functional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "jit/build.h"
#include "plan/kernel.h"

namespace fourfold::cuda {

struct CompileOptions {
  std::string arch;                      // what to compile for
  std::vector<std::string> definitions;  // macros: "NAME" or "NAME=VALUE"
};

jit::KernelRequest request_of(const plan::KernelSource& source, const CompileOptions& options);

// Builds what an operation needs. `sources` names it, doing without kernels whose names it is given: where the compiler
// spoils a kernel (jit::refusal_of) it is named on stderr, and what is planned without it is built as well, so that the
// store holds what will run. The result is everything that was built, in the order of the last round; what was compiled
// in an earlier one counts as compiled.
std::vector<jit::BuiltKernel> build_all(
    jit::KernelStore& store, std::string_view arch,
    const std::function<std::vector<plan::KernelSource>(const std::set<std::string>& refused)>& sources,
    const jit::BuildOptions& options = {});

}  // namespace fourfold::cuda
