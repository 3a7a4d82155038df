#include "cpu/backend.h"

#include "base/check.h"
#include "base/env.h"
#include "cpu/fast_backend.h"
#include "cpu/reference.h"

namespace fourfold::cpu {

std::shared_ptr<ops::Backend> make_backend(const CpuOptions& options) {
  Isa isa = best_isa();
  if (options.isa) {
    isa = *options.isa;
  } else if (const auto name = env("FOURFOLD_ISA")) {
    isa = parse_isa(*name);
  }
  if (isa == Isa::kReference) return std::make_shared<ReferenceBackend>(options);
  return std::make_shared<FastBackend>(options, isa);
}

}  // namespace fourfold::cpu
