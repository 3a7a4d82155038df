#include "cpu/backend.h"

#include "base/check.h"
#include "base/env.h"
#include "cpu/reference.h"

namespace fourfold::cpu {

namespace {

// Products of the reference with the fast token mixers.
class MixedBackend : public ReferenceBackend {
 public:
  MixedBackend(Isa isa, const CpuOptions& options) : ReferenceBackend(isa, options, ops::DType::kBf16) {}
  void attention(const ops::AttentionParams& params, const ops::Tensor& q, const ops::Tensor& k, const ops::Tensor& v,
                 ops::KvCache& cache, int64_t layer, const ops::Tensor& out) override {
    CpuBackend::attention(params, q, k, v, cache, layer, out);
  }
  void delta_net(const ops::DeltaNetParams& params, const ops::Tensor& qkv, const ops::Tensor& z, const ops::Tensor& b,
                 const ops::Tensor& a, ops::StateCache& states, int64_t layer, const ops::Tensor& out) override {
    CpuBackend::delta_net(params, qkv, z, b, a, states, layer, out);
  }
};

}  // namespace

std::shared_ptr<ops::Backend> make_backend(const CpuOptions& options) {
  Isa isa = best_isa();
  if (options.isa) {
    isa = *options.isa;
  } else if (const auto name = env("FOURFOLD_ISA")) {
    isa = parse_isa(*name);
  }
  if (isa == Isa::kReference) return std::make_shared<ReferenceBackend>(options);
  return std::make_shared<MixedBackend>(isa, options);
}

}  // namespace fourfold::cpu
