#include "cpu/fast_backend.h"

#include "cpu/gemm/dispatch.h"
#include "cpu/gemm/packed.h"

namespace fourfold::cpu {

FastBackend::FastBackend(const CpuOptions& options, Isa isa)
    : CpuBackend(isa, options, ops::DType::kF16),
      products_(gemm::kernels_for(isa), gemm::wide_kernels_for(isa), pool(), options.nvfp4_activations) {}

std::unique_ptr<ops::Matrix> FastBackend::load_matrix(std::span<const ops::MatrixSource> parts) {
  return std::make_unique<gemm::PackedMatrix>(parts, weights_, pool());
}

std::unique_ptr<ops::Experts> FastBackend::load_experts(int64_t count,
                                                        const std::function<ops::ExpertSource(int64_t)>& source,
                                                        const std::function<void(int64_t)>& done) {
  return std::make_unique<gemm::PackedExperts>(count, source, done, weights_, pool());
}

void FastBackend::linear(const ops::Tensor& x, const ops::Matrix& weight, const ops::Tensor& out) {
  products_.linear(x, static_cast<const gemm::PackedMatrix&>(weight), out);
}

void FastBackend::moe(const ops::MoeParams& params, const ops::Tensor& x, const ops::Tensor& out) {
  products_.moe(params, x, out);
}

void FastBackend::mlp(const ops::MlpParams& params, const ops::Tensor& x, const ops::Tensor& out) {
  products_.mlp(params, x, out);
}

}  // namespace fourfold::cpu
