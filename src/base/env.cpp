#include "base/env.h"

#include <cstdlib>
#include <cstring>

#include "base/check.h"

namespace fourfold {
namespace {
constexpr EnvVariable kVariables[] = {
    {"FOURFOLD_MODEL", "directory of the default model (default: the demo model)"},
    {"FOURFOLD_DEVICE", "where models run: auto, cpu, cuda, cuda:N (default: auto)"},
    {"FOURFOLD_DRAFT_HEAD", "what drafts are chosen with: nvfp4 (default, a copy of a wider head) or stored"},
    {"FOURFOLD_THREADS", "number of compute threads (default: the processors this process may use)"},
    {"FOURFOLD_API_KEY", "a key that clients of `serve` must send"},
    {"FOURFOLD_ISA", "instruction set of the CPU backend, a name that --isa takes"},
    {"FOURFOLD_ALLOW_REFERENCE",
     "when set, a slower CPU backend may replace one that fails its self-test or is missing"},
    {"FOURFOLD_NVRTC", "file of NVRTC, CUDA's run-time compiler (default: searched for)"},
    {"FOURFOLD_KERNELS", "directory of compiled kernels (default: fourfold/kernels in the user's cache)"},
    {"FOURFOLD_SUMS",
     "how ranks on GPUs add up: words, flags, two-shot, nccl or host, or several with the bytes from which on, "
     "words,two-shot:4M (default: as measured)"},
    {"FOURFOLD_CHOICE",
     "how ranks on GPUs choose tokens: parts, from what each finds in its own columns (default), or gathered, from all "
     "logits"},
    {"FOURFOLD_PRODUCTS",
     "products of many rows on GPUs: own (default), library, by cuBLASLt from 4,096 rows on, or library:N, from N on"},
    {"FOURFOLD_CUBLASLT", "file of cuBLASLt (default: searched for)"},
    {"FOURFOLD_ROUNDS",
     "steps with drafts on a GPU: ahead (default), the card goes on by itself, or waiting, for the tokens before them"},
    {"FOURFOLD_NCCL", "file of NCCL (default: searched for)"},
    {"CUDA_HOME", "a CUDA toolkit, searched for NVRTC and cuBLASLt"},
    {"VIRTUAL_ENV", "a Python environment, searched for the PyPI packages of NVRTC, NCCL and cuBLASLt"},
    {"XDG_CACHE_HOME", "the user's cache (default: .cache in HOME)"},
    {"HOME", "the user's directory"},
    {"FOURFOLD_HISTORY",
     "file of the lines typed in a chat (default: fourfold/history in the user's cache; /dev/null: none)"},
    {"NO_COLOR", "when set, terminal output has no colour"},
};
}  // namespace

std::span<const EnvVariable> env_variables() { return kVariables; }

std::optional<std::string> env(const char* name) {
  bool known = false;
  for (const EnvVariable& variable : kVariables) known = known || std::strcmp(variable.name, name) == 0;
  FF_ASSERT(known);
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return std::string(value);
}

}  // namespace fourfold
