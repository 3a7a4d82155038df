#include "cpu/backend.h"

#include <optional>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/console.h"
#include "base/env.h"
#include "cpu/fast_backend.h"
#include "cpu/reference.h"
#include "cpu/self_test.h"

namespace fourfold::cpu {

std::shared_ptr<ops::Backend> make_backend(const CpuOptions& options) {
  std::optional<Isa> forced = options.isa;
  if (!forced) {
    if (const auto name = env("FOURFOLD_ISA")) forced = parse_isa(*name);
  }
  // Ascending, so the best comes last; one that fails its self-test is passed over, aloud, unless it was asked for.
  std::vector<Isa> isas = forced ? std::vector<Isa>{*forced} : supported_isas();
  for (; !isas.empty() && isas.back() != Isa::kReference; isas.pop_back()) {
    const Isa isa = isas.back();
    auto backend = std::make_shared<FastBackend>(options, isa);
    const double error = self_test_error(*backend);
    if (error < kSelfTestLimit) return backend;
    const std::string found = fmt::format(
        "the {} kernels fail their self-test on this processor (relative error {:.1e}, at most {:.0e} is accepted)",
        isa_name(isa), error, kSelfTestLimit);
    if (forced) fail("{}", found);
    warn(found + "; they are not used");
  }
  return std::make_shared<ReferenceBackend>(options);
}

}  // namespace fourfold::cpu
