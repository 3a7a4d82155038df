#include "cpu/host/cpu_backend.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/math.h"
#include "cpu/host/parallel.h"
#include "cpu/memory/stored_matrix.h"
#include "cpu/step/host_stepper.h"
#include "ranks/checks.h"

namespace fourfold::cpu {
namespace {

class Table : public ops::Matrix {
 public:
  explicit Table(const ops::MatrixSource& source) : stored_(source) {}
  int64_t rows() const override { return stored_.view().rows; }
  int64_t columns() const override { return stored_.view().columns; }
  int64_t bytes() const override { return stored_.bytes(); }
  const ops::MatrixSource& view() const { return stored_.view(); }

 private:
  StoredMatrix stored_;
};

}  // namespace

CpuBackend::CpuBackend(Isa isa, const CpuOptions& options, const RowKernels& rows, ops::DType kv_type)
    : isa_(isa),
      options_(options),
      rows_(rows),
      kv_type_(kv_type),
      pool_(options.threads),
      attention_input_(rows_, pool_) {
  const std::vector<Isa> supported = supported_isas();
  if (std::find(supported.begin(), supported.end(), isa) == supported.end()) {
    std::string names;
    for (const Isa known : supported) {
      if (!names.empty()) names += ", ";
      names += isa_name(known);
    }
    fail("this processor has no {}, it supports {}", isa_name(isa), names);
  }
}

CpuBackend::~CpuBackend() = default;

std::string CpuBackend::description() const {
  const std::string one =
      fmt::format("cpu {}, {} thread{}", isa_name(isa_), pool_.size(), pool_.size() == 1 ? "" : "s");
  return options_.member == nullptr ? one : fmt::format("{} x {} ranks", one, options_.member->ranks());
}

std::unique_ptr<ops::Buffer> CpuBackend::allocate(int64_t bytes) { return std::make_unique<HostBuffer>(bytes); }

ops::Vector CpuBackend::load_vector(std::span<const float> values) {
  ops::Vector vector;
  vector.count = static_cast<int64_t>(values.size());
  vector.buffer = allocate(static_cast<int64_t>(values.size_bytes()));
  if (!values.empty()) std::memcpy(vector.buffer->data(), values.data(), values.size_bytes());
  return vector;
}

std::unique_ptr<ops::Matrix> CpuBackend::load_table(const ops::MatrixSource& source) {
  return std::make_unique<Table>(source);
}

std::unique_ptr<ops::KvCache> CpuBackend::make_kv_cache(const ops::KvCacheShape& shape) {
  kv_shape_ = shape;
  return std::make_unique<HostKvCache>(shape, kv_type_);
}

std::unique_ptr<ops::StateCache> CpuBackend::make_state_cache(const ops::StateCacheShape& shape) {
  state_shape_ = shape;
  return make_states(shape);
}

std::unique_ptr<HostStateCache> CpuBackend::make_states(const ops::StateCacheShape& shape) {
  return std::make_unique<HostStateCache>(shape, pool_);
}

void CpuBackend::reserve(const ops::ReserveLimits& limits) {
  FF_ASSERT(limits.rows > 0);
  attention_input_.reserve(limits.rows, kv_shape_.head_dim);
}

void CpuBackend::begin_step(const ops::Batch& batch) {
  int64_t row = 0;
  for (const ops::Sequence& sequence : batch.sequences) {
    FF_ASSERT(sequence.first == row && sequence.count >= 1 && sequence.position >= 0);
    row += sequence.count;
  }
  FF_ASSERT(row <= batch.size());
  batch_ = batch;
  attention_input_.begin_step();
  states_begun_ = false;
}

void CpuBackend::embed(const ops::Matrix& table, const ops::Tensor& out) {
  const ops::MatrixSource& source = static_cast<const Table&>(table).view();
  FF_ASSERT(out.rows == batch_.size() && out.cols == source.columns);
  for_each(pool_, out.rows, 0.3 * static_cast<double>(out.cols), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t token = t < batch_.rows() ? batch_.tokens[static_cast<size_t>(t)] : 0;
      FF_ASSERT(token >= 0 && token < source.rows);
      ops::dequantize(source, token, out.f32(t));
    }
  });
}

void CpuBackend::rms_norm(const ops::Tensor& x, const ops::Vector& weight, float eps, const ops::Tensor& out) {
  FF_ASSERT(x.rows == out.rows && x.cols == out.cols && weight.count == x.cols);
  for_each(pool_, x.rows, 0.3 * static_cast<double>(x.cols), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) rows_.rms_norm(x.f32(t), weight.data(), eps, x.cols, out.f32(t));
  });
}

void CpuBackend::add_rms_norm(const ops::Tensor& residual, const ops::Tensor& delta, const ops::Vector& weight,
                              float eps, const ops::Tensor& out) {
  FF_ASSERT(residual.rows == out.rows && residual.cols == out.cols && weight.count == residual.cols);
  FF_ASSERT(residual.rows == delta.rows && residual.cols == delta.cols);
  for_each(pool_, residual.rows, 0.5 * static_cast<double>(residual.cols), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      rows_.add(residual.f32(t), delta.f32(t), residual.cols);
      rows_.rms_norm(residual.f32(t), weight.data(), eps, residual.cols, out.f32(t));
    }
  });
}

void CpuBackend::add(const ops::Tensor& residual, const ops::Tensor& delta) {
  FF_ASSERT(residual.rows == delta.rows && residual.cols == delta.cols);
  for_each(pool_, residual.rows, 0.2 * static_cast<double>(residual.cols), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) rows_.add(residual.f32(t), delta.f32(t), residual.cols);
  });
}

void CpuBackend::gather_rows(const ops::Tensor& x, std::span<const int32_t> rows, const ops::Tensor& out) {
  FF_ASSERT(out.rows == static_cast<int64_t>(rows.size()) && out.cols == x.cols);
  for_each(pool_, out.rows, 0.1 * static_cast<double>(x.cols), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = rows[static_cast<size_t>(i)];
      FF_ASSERT(row >= 0 && row < x.rows);
      std::memcpy(out.f32(i), x.f32(row), static_cast<size_t>(x.cols) * sizeof(float));
    }
  });
}

void CpuBackend::append_keys(const ops::AttentionParams& params, const ops::Tensor& k, const ops::Tensor& v,
                             ops::KvCache& cache, int64_t layer) {
  attention_input_.prepare(batch_, params, {}, k, v, static_cast<HostKvCache&>(cache), layer);
}

void CpuBackend::reduce_add_rms_norm(const ops::Tensor& residual, const ops::Tensor& delta, const ops::Vector& weight,
                                     float eps, const ops::Tensor& out, ops::Residual left) {
  if (options_.member == nullptr) return Backend::reduce_add_rms_norm(residual, delta, weight, eps, out, left);
  FF_ASSERT(residual.rows == out.rows && residual.cols == out.cols && weight.count == residual.cols);
  last_sum_ = residual;
  const std::span<const ops::Tensor> deltas = options_.member->meet(delta);
  for (const ops::Tensor& each : deltas) FF_ASSERT(residual.rows == each.rows && residual.cols == each.cols);
  const double cost = (0.3 + 0.2 * static_cast<double>(deltas.size())) * static_cast<double>(residual.cols);
  for_each(pool_, residual.rows, cost, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (const ops::Tensor& each : deltas) rows_.add(residual.f32(t), each.f32(t), residual.cols);
      rows_.rms_norm(residual.f32(t), weight.data(), eps, residual.cols, out.f32(t));
    }
  });
  options_.member->part();
}

void CpuBackend::gather_columns(const ops::Tensor& part, const ops::Tensor& out) {
  if (options_.member == nullptr) return Backend::gather_columns(part, out);
  const std::span<const ops::Tensor> parts = options_.member->meet(part);
  int64_t columns = 0;
  for (const ops::Tensor& each : parts) {
    FF_ASSERT(each.rows == out.rows);
    columns += each.cols;
  }
  FF_ASSERT(columns == out.cols);
  for_each(pool_, out.rows, 0.1 * static_cast<double>(columns), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      float* to = out.f32(t);
      for (const ops::Tensor& each : parts) {
        if (each.f32(t) != to) std::memcpy(to, each.f32(t), static_cast<size_t>(each.cols) * sizeof(float));
        to += each.cols;
      }
    }
  });
  options_.member->part();
}

std::unique_ptr<ops::Stepper> CpuBackend::make_stepper(const ops::StepLimits& limits, ops::KvCache* kv,
                                                       ops::StateCache*, ops::StepBody body) {
  reserve({round_up(limits.rows, options_.row_bucket), limits.lanes, limits.context, limits.page_size});
  HostStepParts parts;
  parts.bind = [this](const ops::Batch& batch, StepPart, std::span<const CarriedRow>) { begin_step(batch); };
  parts.bind_logits = [this](std::span<const ops::LogitRows> sequences) { begin_logits(sequences); };
  parts.copy_page = [kv](int32_t from, int32_t to) {
    if (kv != nullptr) kv->copy_page(from, to);
  };
  parts.gather = [this](const ops::Tensor& x, std::span<const int32_t> rows, const ops::Tensor& out) {
    gather_rows(x, rows, out);
  };
  if (options_.member != nullptr && options_.check_sums > 0) {
    const auto checks = std::make_shared<ranks::SumChecks>(options_.member, options_.check_sums);
    parts.end = [this, checks](bool failed) {
      if (!failed && checks->due() && last_sum_.data != nullptr) checks->compare(ranks::checksum_of(last_sum_));
    };
  }
  parts.body = std::move(body);
  parts.pool = &pool_;
  parts.row_bucket = options_.row_bucket;
  return make_host_stepper(limits, std::move(parts));
}

void CpuBackend::read(const ops::Tensor& x, std::span<float> out) {
  FF_ASSERT(x.dtype == ops::DType::kF32 && static_cast<int64_t>(out.size()) == x.rows * x.cols);
  for (int64_t t = 0; t < x.rows; ++t) {
    std::memcpy(out.data() + t * x.cols, x.f32(t), static_cast<size_t>(x.cols) * sizeof(float));
  }
}

void CpuBackend::begin_states(HostStateCache& states, int64_t put_off_rows) {
  if (states_begun_) return;
  states.begin_step(batch_, put_off_rows);
  states_begun_ = true;
}

void CpuBackend::clear_padding(const ops::Tensor& out) const {
  for (int64_t t = batch_.rows(); t < batch_.size(); ++t) std::fill_n(out.f32(t), out.cols, 0.0f);
}

}  // namespace fourfold::cpu
