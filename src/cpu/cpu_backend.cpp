#include "cpu/cpu_backend.h"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "base/math.h"
#include "cpu/kernels.h"
#include "cpu/stored_matrix.h"

namespace fourfold::cpu {

// ---- memory

namespace {
constexpr int64_t kLarge = int64_t{1} << 20;
constexpr size_t kHugePage = size_t{2} << 20;
}  // namespace

HostBuffer::HostBuffer(int64_t bytes) : bytes_(bytes) {
  FF_ASSERT(bytes >= 0);
  if (bytes == 0) return;
  if (bytes < kLarge) {
    const auto size = static_cast<size_t>(round_up(bytes, 64));
    data_ = std::aligned_alloc(64, size);
    if (data_ == nullptr) fail("out of memory: {} bytes", bytes);
    std::memset(data_, 0, size);
    return;
  }
  mapped_bytes_ = static_cast<size_t>(checked_add(static_cast<uint64_t>(bytes), 2 * kHugePage, "buffer"));
  mapped_bytes_ = mapped_bytes_ / 4096 * 4096;
  mapping_ = ::mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping_ == MAP_FAILED) {
    mapping_ = nullptr;
    fail("out of memory: {:.1f} MiB", static_cast<double>(bytes) / 1048576.0);
  }
  const auto address = (reinterpret_cast<uintptr_t>(mapping_) + kHugePage - 1) / kHugePage * kHugePage;
  data_ = reinterpret_cast<void*>(address);
  // Only a wish: the system may have huge pages switched off. A large buffer may waste the rest of its last one.
  const auto wanted = static_cast<size_t>(
      bytes < 16 * static_cast<int64_t>(kHugePage) ? bytes : round_up(bytes, static_cast<int64_t>(kHugePage)));
  ::madvise(data_, wanted, MADV_HUGEPAGE);
}

HostBuffer::HostBuffer(HostBuffer&& other) noexcept { *this = std::move(other); }

HostBuffer& HostBuffer::operator=(HostBuffer&& other) noexcept {
  if (this != &other) {
    release();
    data_ = std::exchange(other.data_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
    mapping_ = std::exchange(other.mapping_, nullptr);
    mapped_bytes_ = std::exchange(other.mapped_bytes_, 0);
  }
  return *this;
}

HostBuffer::~HostBuffer() { release(); }

void HostBuffer::release() {
  if (mapping_ != nullptr) {
    ::munmap(mapping_, mapped_bytes_);
  } else {
    std::free(data_);
  }
  data_ = nullptr;
  mapping_ = nullptr;
  bytes_ = 0;
}

// ---- caches

namespace {

int64_t checked_product(const char* what, std::initializer_list<int64_t> factors) {
  uint64_t product = 1;
  for (const int64_t factor : factors) {
    if (factor < 0) fail("{}: a size of {}, wanted 0 or more", what, factor);
    product = checked_mul(product, static_cast<uint64_t>(factor), what);
  }
  if (product > uint64_t{1} << 60) fail("{}: {} bytes are more than any machine has", what, product);
  return static_cast<int64_t>(product);
}

}  // namespace

HostKvCache::HostKvCache(const ops::KvCacheShape& shape, ops::DType type)
    : shape_(shape), type_(type), padded_dim_(round_up(shape.head_dim, 32)) {
  if (shape.page_size < 1) fail("key/value cache: pages of {} positions, wanted at least 1", shape.page_size);
  buffer_ =
      HostBuffer(checked_product("key/value cache", {shape.layers, shape.pages, shape.kv_heads, 2, shape.page_size,
                                                     padded_dim_, type == ops::DType::kF32 ? 4 : 2}));
}

HostStateCache::HostStateCache(const ops::StateCacheShape& shape, ThreadPool& pool) : shape_(shape), pool_(pool) {
  head_floats_ = checked_product("state cache", {round_up(shape.value_dim, kPanel), shape.key_dim});
  const int64_t convolution = checked_product("state cache", {shape.conv_taps - 1, shape.conv_channels()});
  // Whole cache lines, so that slots and layers stay aligned.
  layer_floats_ = round_up(checked_product("state cache", {shape.value_heads, head_floats_}) + convolution, 16);
  buffer_ = HostBuffer(checked_product("state cache", {shape.slots, shape.layers, layer_floats_, 4}));
}

void HostStateCache::copy(int64_t from, int64_t to) {
  FF_ASSERT(from >= 0 && from < shape_.slots && to >= 0 && to < shape_.slots);
  if (from == to || shape_.layers == 0) return;
  const int64_t bytes = shape_.layers * layer_floats_ * 4;
  char* base = static_cast<char*>(buffer_.data());
  pool_.parallel_for(bytes, int64_t{1} << 20, [&](int64_t begin, int64_t end) {
    std::memcpy(base + to * bytes + begin, base + from * bytes + begin, static_cast<size_t>(end - begin));
  });
}

void HostStateCache::read_state(int64_t layer, int64_t slot, int64_t value_head, std::span<float> out) {
  FF_ASSERT(static_cast<int64_t>(out.size()) == shape_.key_dim * shape_.value_dim);
  const float* head = state(layer, slot, value_head);
  for (int64_t i = 0; i < shape_.key_dim; ++i) {
    for (int64_t j = 0; j < shape_.value_dim; ++j) {
      out[static_cast<size_t>(i * shape_.value_dim + j)] =
          head[(j / kPanel * shape_.key_dim + i) * kPanel + j % kPanel];
    }
  }
}

void HostStateCache::write_state(int64_t layer, int64_t slot, int64_t value_head, std::span<const float> values) {
  FF_ASSERT(static_cast<int64_t>(values.size()) == shape_.key_dim * shape_.value_dim);
  float* head = state(layer, slot, value_head);
  for (int64_t i = 0; i < shape_.key_dim; ++i) {
    for (int64_t j = 0; j < shape_.value_dim; ++j) {
      head[(j / kPanel * shape_.key_dim + i) * kPanel + j % kPanel] =
          values[static_cast<size_t>(i * shape_.value_dim + j)];
    }
  }
}

// ---- the backend

namespace {

const Kernels* kernels_of(Isa isa) {
#if defined(__x86_64__)
  switch (isa) {
    case Isa::kReference:
      return nullptr;
    case Isa::kAvx2:
      return &kernels_avx2();
    case Isa::kAvx512:
    case Isa::kAvx512Bf16:
    case Isa::kAmx:
      return &kernels_avx512();
  }
#endif
  (void)isa;
  return nullptr;
}

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

void plain_rms_norm(const float* x, const float* weight, float eps, int64_t n, float* out) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  const auto factor = static_cast<float>(1.0 / std::sqrt(sum / static_cast<double>(n) + static_cast<double>(eps)));
  for (int64_t i = 0; i < n; ++i) out[i] = x[i] * factor * weight[i];
}

void plain_add(float* x, const float* delta, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] += delta[i];
}

}  // namespace

CpuBackend::CpuBackend(Isa isa, const CpuOptions& options, ops::DType kv_type)
    : isa_(isa), options_(options), kv_type_(kv_type), pool_(options.threads), kernels_(kernels_of(isa)) {
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
  return fmt::format("cpu {}, {} thread{}", isa_name(isa_), pool_.size(), pool_.size() == 1 ? "" : "s");
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
  return std::make_unique<HostKvCache>(shape, kv_type_);
}

std::unique_ptr<ops::StateCache> CpuBackend::make_state_cache(const ops::StateCacheShape& shape) {
  return std::make_unique<HostStateCache>(shape, pool_);
}

void CpuBackend::begin_step(const ops::Batch& batch) {
  int64_t row = 0;
  for (const ops::Sequence& sequence : batch.sequences) {
    FF_ASSERT(sequence.first == row && sequence.count >= 1 && sequence.position >= 0);
    row += sequence.count;
  }
  FF_ASSERT(row == batch.size());
  batch_ = batch;
  rope_valid_ = false;
  slots_checked_ = false;
}

void CpuBackend::embed(const ops::Matrix& table, const ops::Tensor& out) {
  const ops::MatrixSource& source = static_cast<const Table&>(table).view();
  FF_ASSERT(out.rows == batch_.size() && out.cols == source.columns);
  for_each(out.rows, 0.3 * static_cast<double>(out.cols), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t token = batch_.tokens[static_cast<size_t>(t)];
      FF_ASSERT(token >= 0 && token < source.rows);
      ops::dequantize(source, token, out.f32(t));
    }
  });
}

void CpuBackend::rms_norm(const ops::Tensor& x, const ops::Vector& weight, float eps, const ops::Tensor& out) {
  FF_ASSERT(x.rows == out.rows && x.cols == out.cols && weight.count == x.cols);
  const auto norm = kernels_ != nullptr ? kernels_->rms_norm : plain_rms_norm;
  for_each(x.rows, 0.3 * static_cast<double>(x.cols), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) norm(x.f32(t), weight.data(), eps, x.cols, out.f32(t));
  });
}

void CpuBackend::add_rms_norm(const ops::Tensor& residual, const ops::Tensor& delta, const ops::Vector& weight,
                              float eps, const ops::Tensor& out) {
  FF_ASSERT(residual.rows == out.rows && residual.cols == out.cols && weight.count == residual.cols);
  FF_ASSERT(residual.rows == delta.rows && residual.cols == delta.cols);
  const auto norm = kernels_ != nullptr ? kernels_->rms_norm : plain_rms_norm;
  const auto plus = kernels_ != nullptr ? kernels_->add : plain_add;
  for_each(residual.rows, 0.5 * static_cast<double>(residual.cols), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      plus(residual.f32(t), delta.f32(t), residual.cols);
      norm(residual.f32(t), weight.data(), eps, residual.cols, out.f32(t));
    }
  });
}

void CpuBackend::add(const ops::Tensor& residual, const ops::Tensor& delta) {
  FF_ASSERT(residual.rows == delta.rows && residual.cols == delta.cols);
  const auto plus = kernels_ != nullptr ? kernels_->add : plain_add;
  for_each(residual.rows, 0.2 * static_cast<double>(residual.cols), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) plus(residual.f32(t), delta.f32(t), residual.cols);
  });
}

void CpuBackend::gather_rows(const ops::Tensor& x, std::span<const int32_t> rows, const ops::Tensor& out) {
  FF_ASSERT(out.rows == static_cast<int64_t>(rows.size()) && out.cols == x.cols);
  for_each(out.rows, 0.1 * static_cast<double>(x.cols), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = rows[static_cast<size_t>(i)];
      FF_ASSERT(row >= 0 && row < x.rows);
      std::memcpy(out.f32(i), x.f32(row), static_cast<size_t>(x.cols) * sizeof(float));
    }
  });
}

void CpuBackend::read(const ops::Tensor& x, std::span<float> out) {
  FF_ASSERT(x.dtype == ops::DType::kF32 && static_cast<int64_t>(out.size()) == x.rows * x.cols);
  for (int64_t t = 0; t < x.rows; ++t) {
    std::memcpy(out.data() + t * x.cols, x.f32(t), static_cast<size_t>(x.cols) * sizeof(float));
  }
}

// ---- attention: what comes before the scores

void CpuBackend::compute_rope(const ops::AttentionParams& params) {
  const bool same = rope_theta_ == params.rope_theta && rope_dim_ == params.rotary_dim;
  if (rope_valid_ && same) return;
  const int64_t half = params.rotary_dim / 2;
  float* table = rope_.get<float>(std::max<int64_t>(1, batch_.size() * 2 * half));
  // The frequencies and the angle are rounded to fp32, as where the model was trained; cosine and sine of that angle
  // are then exact.
  if (!same) rope_frequencies_.clear();
  for (auto i = static_cast<int64_t>(rope_frequencies_.size()); i < half; ++i) {
    const float exponent = static_cast<float>(2 * i) / static_cast<float>(params.rotary_dim);
    rope_frequencies_.push_back(
        1.0f / static_cast<float>(std::pow(static_cast<double>(params.rope_theta), static_cast<double>(exponent))));
  }
  const auto sequences = static_cast<int64_t>(batch_.sequences.size());
  for (int64_t s = 0; s < sequences; ++s) {
    const ops::Sequence& sequence = batch_.sequences[static_cast<size_t>(s)];
    for_each(sequence.count, 40.0 * static_cast<double>(half), [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        float* row = table + (sequence.first + t) * 2 * half;
        const auto position = static_cast<float>(sequence.position + t);
        for (int64_t i = 0; i < half; ++i) {
          const auto angle = static_cast<double>(position * rope_frequencies_[static_cast<size_t>(i)]);
          row[i] = static_cast<float>(std::cos(angle));
          row[half + i] = static_cast<float>(std::sin(angle));
        }
      }
    });
  }
  rope_valid_ = true;
  rope_theta_ = params.rope_theta;
  rope_dim_ = params.rotary_dim;
}

void CpuBackend::prepare_attention(const ops::AttentionParams& params, const ops::Tensor& q, const ops::Tensor& k,
                                   const ops::Tensor& v, HostKvCache& cache, int64_t layer) {
  const ops::KvCacheShape& shape = cache.shape();
  const int64_t dim = params.head_dim;
  const int64_t q_stride = params.gated ? 2 * dim : dim;
  FF_ASSERT(q.rows == batch_.size() && k.rows == q.rows && v.rows == q.rows);
  FF_ASSERT(q.cols == params.heads * q_stride && k.cols == params.kv_heads * dim && v.cols == k.cols);
  FF_ASSERT(shape.kv_heads == params.kv_heads && shape.head_dim == dim && layer >= 0 && layer < shape.layers);
  FF_ASSERT(params.kv_heads > 0 && params.heads % params.kv_heads == 0);
  FF_ASSERT(params.rotary_dim % 2 == 0 && params.rotary_dim <= dim);
  FF_ASSERT(params.q_norm == nullptr || params.q_norm->count == dim);
  FF_ASSERT(params.k_norm == nullptr || params.k_norm->count == dim);
  compute_rope(params);
  const int64_t half = params.rotary_dim / 2;
  const float* rope = rope_.get<float>(1);
  const auto norm = kernels_ != nullptr ? kernels_->rms_norm : plain_rms_norm;
  const auto prepare_head = [&](float* x, const ops::Vector* weight, const float* factors) {
    if (weight != nullptr) norm(x, weight->data(), params.norm_eps, dim, x);
    for (int64_t i = 0; i < half; ++i) {
      const float low = x[i];
      const float high = x[i + half];
      x[i] = low * factors[i] - high * factors[half + i];
      x[i + half] = high * factors[i] + low * factors[half + i];
    }
  };
  const auto store = [&](const float* x, int64_t page, int64_t head, int64_t offset, int64_t part) {
    const int64_t at = part * cache.values_offset() + offset * cache.padded_dim();
    if (cache.type() == ops::DType::kF32) {
      std::memcpy(cache.keys<float>(layer, page, head) + at, x, static_cast<size_t>(dim) * sizeof(float));
      return;
    }
    kernels_->to_f16(x, dim, cache.keys<uint16_t>(layer, page, head) + at);
  };
  for (const ops::Sequence& sequence : batch_.sequences) {
    const int64_t last_page = (sequence.position + sequence.count - 1) / shape.page_size;
    FF_ASSERT(last_page < static_cast<int64_t>(sequence.pages.size()));
    // Heads on their own, so that one token occupies all threads, too.
    const int64_t heads = params.heads + params.kv_heads;
    for_each(sequence.count * heads, static_cast<double>(dim), [&](int64_t from, int64_t to) {
      for (int64_t item = from; item < to; ++item) {
        const int64_t t = item / heads;
        const int64_t row = sequence.first + t;
        const float* factors = rope + row * 2 * half;
        if (item % heads < params.heads) {
          prepare_head(q.f32(row) + item % heads * q_stride, params.q_norm, factors);
          continue;
        }
        const int64_t h = item % heads - params.heads;
        const int64_t position = sequence.position + t;
        const int64_t page = sequence.pages[static_cast<size_t>(position / shape.page_size)];
        FF_ASSERT(page >= 0 && page < shape.pages);
        float* key = k.f32(row) + h * dim;
        prepare_head(key, params.k_norm, factors);
        store(key, page, h, position % shape.page_size, 0);
        store(v.f32(row) + h * dim, page, h, position % shape.page_size, 1);
      }
    });
  }
}

void CpuBackend::check_state_slots(const HostStateCache& states) {
  if (slots_checked_) return;
  const int64_t slots = states.shape().slots;
  for (const ops::Sequence& a : batch_.sequences) {
    FF_ASSERT(a.state_in >= 0 && a.state_in < slots && a.state_out >= 0 && a.state_out < slots);
    for (const ops::Sequence& b : batch_.sequences) {
      if (&a == &b) continue;
      FF_ASSERT(a.state_out != b.state_out);
      FF_ASSERT(b.position == 0 || a.state_out != b.state_in);
    }
  }
  slots_checked_ = true;
}

}  // namespace fourfold::cpu
