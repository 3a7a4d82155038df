#include "cpu/fast_backend.h"

#include <new>

#include "base/check.h"
#include "cpu/gemm/dispatch.h"

namespace fourfold::cpu {

FastBackend::FastBackend(const CpuOptions& options, Isa isa) : FastBackend(options, isa, kernels_of(isa)) {}

FastBackend::FastBackend(const CpuOptions& options, Isa isa, const Kernels& kernels)
    : CpuBackend(isa, options, kernels.rows, ops::DType::kF16),
      products_({&gemm::kernels_for(isa), gemm::beside_kernels_for(isa), &gemm::wide_kernels_for(isa),
                 gemm::twin_kernels_for(isa)},
                pool(), options),
      attention_(kernels.attention, pool(), options.attention_partial_floats),
      delta_net_(kernels.delta, pool()) {}

std::unique_ptr<ops::Matrix> FastBackend::load_matrix(std::span<const ops::MatrixSource> parts) {
  auto matrix = std::make_unique<gemm::PackedMatrix>(parts, weights_, pool());
  products_.add(*matrix);
  return matrix;
}

std::unique_ptr<ops::Matrix> FastBackend::first_rows(const ops::Matrix& matrix, int64_t rows) {
  return std::make_unique<gemm::PackedMatrix>(static_cast<const gemm::PackedMatrix&>(matrix), rows);
}

std::unique_ptr<ops::Experts> FastBackend::load_experts(int64_t count,
                                                        const std::function<ops::ExpertSource(int64_t)>& source,
                                                        const std::function<void(int64_t)>& done) {
  auto experts = std::make_unique<gemm::PackedExperts>(count, source, done, weights_, pool());
  products_.add(*experts);
  return experts;
}

void FastBackend::reserve(const ops::ReserveLimits& limits) {
  try {
    CpuBackend::reserve(limits);
    products_.reserve(limits.rows);
    attention_.reserve(limits, kv_shape());
    delta_net_.reserve(limits.rows, state_shape());
  } catch (const std::bad_alloc&) {
    fail("out of memory: what a step of {} rows needs", limits.rows);
  }
}

void FastBackend::begin_step(const ops::Batch& batch) {
  CpuBackend::begin_step(batch);
  products_.begin_step(batch);
}

void FastBackend::begin_logits(std::span<const ops::LogitRows> sequences) { products_.begin_logits(sequences); }

std::unique_ptr<HostStateCache> FastBackend::make_states(const ops::StateCacheShape& shape) {
  return delta_net_.make_states(shape);
}

void FastBackend::linear(const ops::Tensor& x, const ops::Matrix& weight, const ops::Tensor& out) {
  const Occupancy::Guard guard(work_);
  products_.linear(x, static_cast<const gemm::PackedMatrix&>(weight), out);
}

void FastBackend::attention(const ops::AttentionParams& params, const ops::Tensor& q, const ops::Tensor& k,
                            const ops::Tensor& v, ops::KvCache& cache, int64_t layer, const ops::Tensor& out) {
  const Occupancy::Guard guard(work_);
  auto& host = static_cast<HostKvCache&>(cache);
  attention_input().prepare(batch(), params, q, k, v, host, layer);
  attention_.run(batch(), params, q, host, layer, out);
  clear_padding(out);
}

void FastBackend::delta_net(const ops::DeltaNetParams& params, const ops::Tensor& qkv, const ops::Tensor& z,
                            const ops::Tensor& b, const ops::Tensor& a, ops::StateCache& states, int64_t layer,
                            const ops::Tensor& out) {
  const Occupancy::Guard guard(work_);
  auto& host = static_cast<HostStateCache&>(states);
  begin_states(host, kFewRows);
  delta_net_.run(batch(), params, qkv, z, b, a, host, layer, out);
  clear_padding(out);
}

void FastBackend::moe(const ops::MoeParams& params, const ops::Tensor& x, const ops::Tensor& out) {
  const Occupancy::Guard guard(work_);
  products_.moe(params, x, out);
}

void FastBackend::mlp(const ops::MlpParams& params, const ops::Tensor& x, const ops::Tensor& out) {
  const Occupancy::Guard guard(work_);
  products_.mlp(params, x, out);
}

}  // namespace fourfold::cpu
