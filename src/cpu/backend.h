// The CPU backends: one plain reference in fp32, and fast ones chosen by what the processor has.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ops/ops.h"

namespace fourfold::cpu {

// In ascending order of speed. kReference is plain C++ on fp32 and is the truth for all others.
enum class Isa : uint8_t { kReference, kAvx2, kAvx512, kAvx512Bf16, kAmx };

const char* isa_name(Isa isa);         // "reference", "avx2", "avx512", "avx512bf16", "amx"
Isa parse_isa(std::string_view name);  // an Error lists the names
std::vector<Isa> supported_isas();     // on this processor, ascending; always has kReference
Isa best_isa();

struct CpuOptions {
  std::optional<Isa> isa;          // unset: FOURFOLD_ISA, or the best one; an Error when the processor lacks it
  int threads = 0;                 // 0: ThreadPool::default_threads()
  bool nvfp4_activations = false;  // W4A4 numerics: inputs of matrices with an input scale are quantised to NVFP4
};

std::shared_ptr<ops::Backend> make_backend(const CpuOptions& options);

}  // namespace fourfold::cpu
