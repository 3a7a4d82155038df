#include "cpu/backend.h"

#include <optional>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/console.h"
#include "base/env.h"
#include "cpu/fast_backend.h"
#include "cpu/reference/reference.h"
#include "cpu/self_test.h"

namespace fourfold::cpu {

std::shared_ptr<ops::Backend> make_backend(const CpuOptions& options) { return make_backend(options, self_test_error); }

std::shared_ptr<ops::Backend> make_backend(const CpuOptions& options, double (*self_test)(ops::Backend&)) {
  std::optional<Isa> forced = options.isa;
  if (!forced) {
    if (const auto name = env("FOURFOLD_ISA")) forced = parse_isa(*name);
  }
  const bool allow_reference = options.allow_reference || env("FOURFOLD_ALLOW_REFERENCE").has_value();
  // Ascending, so the best comes last.
  std::vector<Isa> isas = forced ? std::vector<Isa>{*forced} : supported_isas();
  for (; isas.back() != Isa::kReference; isas.pop_back()) {
    const Isa isa = isas.back();
    auto backend = std::make_shared<FastBackend>(options, isa);
    const double error = self_test(*backend);
    if (error < kSelfTestLimit) return backend;
    const std::string found = fmt::format(
        "the {} kernels fail their self-test on this processor (relative error {:.1e}, at most {:.0e} is accepted)",
        isa_name(isa), error, kSelfTestLimit);
    if (forced) fail("{}", found);
    if (!allow_reference) fail("{}; FOURFOLD_ALLOW_REFERENCE=1 allows a slower backend", found);
    warn(found + "; they are not used");
  }
  if (!forced && !allow_reference && supported_isas().size() == 1) {
    fail(
        "this processor has no instruction set that fourfold has kernels for (wanted one of {}); --isa reference or "
        "FOURFOLD_ALLOW_REFERENCE=1 allows the slow reference",
        family_isa_names());
  }
  return std::make_shared<ReferenceBackend>(options);
}

}  // namespace fourfold::cpu
