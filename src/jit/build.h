// Fills a store: what is missing is compiled, in parallel; what is there is verified and reused.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "jit/nvrtc.h"
#include "jit/store.h"

namespace fourfold::jit {

struct KernelRequest {
  std::string name;  // for people: plan and shape
  CompileRequest compile;
};

// A request over the embedded sources; `definitions` are macros: "NAME" or "NAME=VALUE".
KernelRequest make_request(std::string name, std::string text, std::string_view arch,
                           std::vector<std::string> expressions, const std::vector<std::string>& definitions = {});

struct BuiltKernel {
  std::string name;
  Key key;
  bool compiled = false;  // false: it was in the store
  double seconds = 0;     // of the compiler
  Entry entry;
};

struct BuildOptions {
  int threads = 0;       // 0: FOURFOLD_THREADS, or the processors this process may use
  bool progress = true;  // a bar on stderr, when that is a terminal
};

// In the order of the requests; requests with equal keys are compiled once. Without NVRTC everything must be in the
// store, made by one version of the compiler (an imported pack); otherwise an Error says where NVRTC was looked for.
// The first compile error is rethrown after the running compilations have ended.
std::vector<BuiltKernel> build(KernelStore& store, const std::vector<KernelRequest>& requests,
                               const BuildOptions& options = {});

// Spill stores plus loads in a compiler log (ptxas -v), in bytes per thread, summed over its kernels.
int64_t spill_bytes_in(std::string_view log);
// Whether ptxas warned that it serialises the wgmma instructions of a kernel (C7510 and those after it): right, but far
// slower. For want of registers (C7511) it depends on the tile in ways that no estimate foresees.
bool serialized_in(std::string_view log);

// Why a planned kernel must not run although it compiled: empty, or that its multiplications are serialised. Its time
// has nothing to do with what was predicted. (A few spilled bytes cost little; the planner's estimates avoid them.)
std::string refusal_of(const Entry& entry);

}  // namespace fourfold::jit
