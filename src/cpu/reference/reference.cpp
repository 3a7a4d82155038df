#include "cpu/reference/reference.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "base/check.h"
#include "base/math.h"
#include "cpu/host/parallel.h"
#include "cpu/host/routing.h"
#include "cpu/memory/stored_matrix.h"
#include "nvfp4/number.h"
#include "nvfp4/quantize.h"

namespace fourfold::cpu {
namespace {

// ---- dot products: sixteen fp32 lanes, emptied into double every 256 elements

inline __attribute__((always_inline)) double dot_body(const float* a, const float* b, int64_t n) {
  constexpr int64_t kLanes = 16;
  constexpr int64_t kBlock = 256;
  double total = 0;
  int64_t i = 0;
  while (n - i >= kLanes) {
    float lanes[kLanes] = {};
    const int64_t end = std::min(n - (n - i) % kLanes, i + kBlock);
    for (; i < end; i += kLanes) {
      for (int64_t j = 0; j < kLanes; ++j) lanes[j] += a[i + j] * b[i + j];
    }
    for (const float lane : lanes) total += static_cast<double>(lane);
  }
  for (; i < n; ++i) total += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  return total;
}

double dot_baseline(const float* a, const float* b, int64_t n) { return dot_body(a, b, n); }

#if defined(__x86_64__)
// Wider registers, the same operations in the same order: the result is the same to the last bit.
__attribute__((target("avx2"))) double dot_wide(const float* a, const float* b, int64_t n) { return dot_body(a, b, n); }
double dot(const float* a, const float* b, int64_t n) {
  static const bool has_avx2 = best_isa() >= Isa::kAvx2;
  return has_avx2 ? dot_wide(a, b, n) : dot_baseline(a, b, n);
}
#else
double dot(const float* a, const float* b, int64_t n) { return dot_baseline(a, b, n); }
#endif

void rms_norm(const float* x, const float* weight, float eps, int64_t n, float* out) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  const auto factor = static_cast<float>(1.0 / std::sqrt(sum / static_cast<double>(n) + static_cast<double>(eps)));
  for (int64_t i = 0; i < n; ++i) out[i] = x[i] * factor * weight[i];
}

void add(float* x, const float* delta, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] += delta[i];
}

void keep(const float* x, int64_t n, void* out) { std::memcpy(out, x, static_cast<size_t>(n) * sizeof(float)); }

constexpr RowKernels kRows = {.rms_norm = rms_norm, .add = add, .keep = keep};

float sigmoid(float x) { return static_cast<float>(1.0 / (1.0 + std::exp(-static_cast<double>(x)))); }
float silu(float x) { return static_cast<float>(static_cast<double>(x) / (1.0 + std::exp(-static_cast<double>(x)))); }

// Stored matrices, or views of some that another one holds.
class StackedMatrix : public ops::Matrix {
 public:
  explicit StackedMatrix(std::span<const ops::MatrixSource> sources) {
    FF_ASSERT(!sources.empty());
    for (const ops::MatrixSource& source : sources) {
      if (source.columns != sources[0].columns) {
        fail("{}: {} columns, wanted {} like {}", source.name, source.columns, sources[0].columns, sources[0].name);
      }
      stored_.emplace_back(source);
      add(stored_.back().view());
    }
  }
  StackedMatrix(const StackedMatrix& of, int64_t rows) {
    FF_ASSERT(of.parts_.size() == 1 && rows > 0 && rows <= of.rows_);
    ops::MatrixSource first = of.parts_[0];
    first.rows = rows;
    add(first);
  }
  int64_t rows() const override { return rows_; }
  int64_t columns() const override { return parts_[0].columns; }
  int64_t bytes() const override { return bytes_; }
  const std::vector<ops::MatrixSource>& parts() const { return parts_; }

 private:
  void add(const ops::MatrixSource& part) {
    parts_.push_back(part);
    rows_ += part.rows;
    bytes_ += part.bytes();
  }

  std::vector<StoredMatrix> stored_;
  std::vector<ops::MatrixSource> parts_;
  int64_t rows_ = 0;
  int64_t bytes_ = 0;
};

struct Expert {
  StoredMatrix gate, up, down;
};

class StoredExperts : public ops::Experts {
 public:
  int64_t count() const override { return static_cast<int64_t>(experts.size()); }
  int64_t hidden() const override { return experts[0].gate.view().columns; }
  int64_t intermediate() const override { return experts[0].gate.view().rows; }
  int64_t bytes_per_expert() const override {
    return experts[0].gate.bytes() + experts[0].up.bytes() + experts[0].down.bytes();
  }
  std::vector<Expert> experts;
};

// One token of one expert's work.
struct Pair {
  int64_t expert;
  int64_t token;
  int64_t slot;  // token * top_k + rank
};

// A run of rows of one matrix times the inputs of one expert's pairs.
struct Piece {
  int64_t expert;
  int64_t row_begin, row_end;
  size_t pair_begin, pair_end;
};

constexpr int64_t kRowsPerPiece = 64;

std::vector<Piece> split_rows(const std::vector<Pair>& pairs, int64_t rows) {
  std::vector<Piece> pieces;
  for (size_t begin = 0; begin < pairs.size();) {
    size_t end = begin;
    while (end < pairs.size() && pairs[end].expert == pairs[begin].expert) ++end;
    for (int64_t row = 0; row < rows; row += kRowsPerPiece) {
      pieces.push_back({pairs[begin].expert, row, std::min(rows, row + kRowsPerPiece), begin, end});
    }
    begin = end;
  }
  return pieces;
}

}  // namespace

ReferenceBackend::ReferenceBackend(const CpuOptions& options)
    : CpuBackend(Isa::kReference, options, kRows, ops::DType::kF32) {}

std::unique_ptr<ops::Matrix> ReferenceBackend::load_matrix(std::span<const ops::MatrixSource> parts) {
  return std::make_unique<StackedMatrix>(parts);
}

std::unique_ptr<ops::Matrix> ReferenceBackend::first_rows(const ops::Matrix& matrix, int64_t rows) {
  return std::make_unique<StackedMatrix>(static_cast<const StackedMatrix&>(matrix), rows);
}

std::unique_ptr<ops::Experts> ReferenceBackend::load_experts(int64_t count,
                                                             const std::function<ops::ExpertSource(int64_t)>& source,
                                                             const std::function<void(int64_t)>& done) {
  FF_ASSERT(count > 0);
  auto result = std::make_unique<StoredExperts>();
  for (int64_t e = 0; e < count; ++e) {
    const ops::ExpertSource from = source(e);
    const auto expect = [](const ops::MatrixSource& matrix, int64_t rows, int64_t columns) {
      if (matrix.rows == rows && matrix.columns == columns) return;
      fail("{}: {} x {}, wanted {} x {}", matrix.name, matrix.rows, matrix.columns, rows, columns);
    };
    const int64_t hidden = e == 0 ? from.gate.columns : result->hidden();
    const int64_t intermediate = e == 0 ? from.gate.rows : result->intermediate();
    expect(from.gate, intermediate, hidden);
    expect(from.up, intermediate, hidden);
    expect(from.down, hidden, intermediate);
    result->experts.push_back({StoredMatrix(from.gate), StoredMatrix(from.up), StoredMatrix(from.down)});
    if (done) done(e);
  }
  return result;
}

const float* ReferenceBackend::input_of(const ops::MatrixSource& weight, const float* x, float* storage) const {
  if (!options().nvfp4_activations || weight.format != ops::Format::kNvfp4 || !(weight.input_scale > 0)) return x;
  const auto n = static_cast<size_t>(weight.columns);
  std::vector<uint8_t> codes(n / 2);
  std::vector<uint8_t> scales(n / nvfp4::kBlock);
  nvfp4::quantize_activations({x, n}, 1.0f / weight.input_scale, codes, scales);
  nvfp4::dequantize_row(codes, scales, weight.input_scale, {storage, n});
  return storage;
}

void ReferenceBackend::linear(const ops::Tensor& x, const ops::Matrix& weight, const ops::Tensor& out) {
  const auto& matrix = static_cast<const StackedMatrix&>(weight);
  const int64_t columns = matrix.columns();
  FF_ASSERT(x.rows == out.rows && x.cols == columns && out.cols == matrix.rows());
  int64_t first_row = 0;
  std::vector<float> storage(options().nvfp4_activations ? static_cast<size_t>(x.rows * columns) : 0);
  for (const ops::MatrixSource& source : matrix.parts()) {
    std::vector<const float*> inputs(static_cast<size_t>(x.rows));
    for (int64_t t = 0; t < x.rows; ++t) {
      inputs[static_cast<size_t>(t)] =
          input_of(source, x.f32(t), storage.empty() ? nullptr : storage.data() + t * columns);
    }
    const double cost = static_cast<double>(columns) * (2.0 + 0.2 * static_cast<double>(x.rows));
    for_each(pool(), source.rows, cost, [&](int64_t begin, int64_t end) {
      std::vector<float> row(static_cast<size_t>(columns));
      for (int64_t r = begin; r < end; ++r) {
        ops::dequantize(source, r, row.data());
        for (int64_t t = 0; t < x.rows; ++t) {
          out.f32(t)[first_row + r] = static_cast<float>(dot(inputs[static_cast<size_t>(t)], row.data(), columns));
        }
      }
    });
    first_row += source.rows;
  }
}

void ReferenceBackend::gated_mlp(const ops::Matrix& gate_up, const ops::Matrix& down, const ops::Tensor& x,
                                 const ops::Tensor& out) {
  const int64_t width = down.columns();
  FF_ASSERT(gate_up.rows() == 2 * width);
  HostBuffer both(x.rows * 2 * width * 4);
  const ops::Tensor hidden{both.data(), ops::DType::kF32, x.rows, 2 * width, 2 * width};
  linear(x, gate_up, hidden);
  for (int64_t t = 0; t < x.rows; ++t) {
    float* row = hidden.f32(t);
    for (int64_t i = 0; i < width; ++i) row[i] = silu(row[i]) * row[width + i];
  }
  linear(hidden.slice_cols(0, width), down, out);
}

void ReferenceBackend::mlp(const ops::MlpParams& params, const ops::Tensor& x, const ops::Tensor& out) {
  gated_mlp(*params.gate_up, *params.down, x, out);
}

void ReferenceBackend::moe(const ops::MoeParams& params, const ops::Tensor& x, const ops::Tensor& out) {
  const auto& experts = static_cast<const StoredExperts&>(*params.experts).experts;
  const int64_t tokens = x.rows;
  const auto count = static_cast<int64_t>(experts.size());
  const int64_t top_k = params.top_k;
  const int64_t hidden = params.experts->hidden();
  const int64_t width = params.experts->intermediate();
  FF_ASSERT(x.cols == hidden && out.cols == hidden && out.rows == tokens);
  const int64_t all = params.router->rows(), first_expert = params.first_expert;
  FF_ASSERT(first_expert >= 0 && first_expert + count <= all && top_k >= 1 && top_k <= all);

  std::vector<float> logits(static_cast<size_t>(tokens * all));
  linear(x, *params.router, {logits.data(), ops::DType::kF32, tokens, all, all});
  std::vector<int32_t> chosen(static_cast<size_t>(tokens * top_k));
  std::vector<float> weights(chosen.size());
  std::vector<Pair> pairs;
  for (int64_t t = 0; t < tokens; ++t) {
    select_experts(logits.data() + t * all, all, top_k, params.renormalize, chosen.data() + t * top_k,
                   weights.data() + t * top_k);
    for (int64_t j = 0; j < top_k; ++j) {
      const int64_t expert = chosen[static_cast<size_t>(t * top_k + j)] - first_expert;
      if (expert >= 0 && expert < count) pairs.push_back({expert, t, t * top_k + j});
    }
  }
  std::stable_sort(pairs.begin(), pairs.end(), [](const Pair& a, const Pair& b) { return a.expert < b.expert; });

  // gate and up of every pair, then down; rows of the weights are shared out among the threads.
  std::vector<float> inner(chosen.size() * static_cast<size_t>(width));
  std::vector<float> outer(chosen.size() * static_cast<size_t>(hidden));  // zero for experts that are not here
  const std::vector<Piece> first = split_rows(pairs, width);
  pool().parallel_for(static_cast<int64_t>(first.size()), 1, [&](int64_t begin, int64_t end) {
    std::vector<float> gate_row(static_cast<size_t>(hidden));
    std::vector<float> up_row(static_cast<size_t>(hidden));
    std::vector<float> storage;
    for (int64_t p = begin; p < end; ++p) {
      const Piece& piece = first[static_cast<size_t>(p)];
      const Expert& expert = experts[static_cast<size_t>(piece.expert)];
      const size_t n = piece.pair_end - piece.pair_begin;
      if (options().nvfp4_activations) storage.resize(2 * n * static_cast<size_t>(hidden));
      std::vector<const float*> gate_inputs;
      std::vector<const float*> up_inputs;
      for (size_t i = 0; i < n; ++i) {
        const float* in = x.f32(pairs[piece.pair_begin + i].token);
        float* quantized = storage.empty() ? nullptr : storage.data() + 2 * i * static_cast<size_t>(hidden);
        gate_inputs.push_back(input_of(expert.gate.view(), in, quantized));
        up_inputs.push_back(input_of(expert.up.view(), in, storage.empty() ? nullptr : quantized + hidden));
      }
      for (int64_t r = piece.row_begin; r < piece.row_end; ++r) {
        ops::dequantize(expert.gate.view(), r, gate_row.data());
        ops::dequantize(expert.up.view(), r, up_row.data());
        for (size_t i = 0; i < n; ++i) {
          const auto gate = static_cast<float>(dot(gate_inputs[i], gate_row.data(), hidden));
          const auto up = static_cast<float>(dot(up_inputs[i], up_row.data(), hidden));
          inner[static_cast<size_t>(pairs[piece.pair_begin + i].slot * width + r)] = silu(gate) * up;
        }
      }
    }
  });
  const std::vector<Piece> second = split_rows(pairs, hidden);
  pool().parallel_for(static_cast<int64_t>(second.size()), 1, [&](int64_t begin, int64_t end) {
    std::vector<float> row(static_cast<size_t>(width));
    std::vector<float> storage;
    for (int64_t p = begin; p < end; ++p) {
      const Piece& piece = second[static_cast<size_t>(p)];
      const ops::MatrixSource& down = experts[static_cast<size_t>(piece.expert)].down.view();
      const size_t n = piece.pair_end - piece.pair_begin;
      if (options().nvfp4_activations) storage.resize(n * static_cast<size_t>(width));
      std::vector<const float*> inputs;
      for (size_t i = 0; i < n; ++i) {
        float* quantized = storage.empty() ? nullptr : storage.data() + i * static_cast<size_t>(width);
        inputs.push_back(input_of(down, inner.data() + pairs[piece.pair_begin + i].slot * width, quantized));
      }
      for (int64_t r = piece.row_begin; r < piece.row_end; ++r) {
        ops::dequantize(down, r, row.data());
        for (size_t i = 0; i < n; ++i) {
          outer[static_cast<size_t>(pairs[piece.pair_begin + i].slot * hidden + r)] =
              static_cast<float>(dot(inputs[i], row.data(), width));
        }
      }
    }
  });

  std::vector<float> shared(params.shared_gate_up != nullptr ? static_cast<size_t>(tokens * hidden) : 0);
  std::vector<float> shared_weight(static_cast<size_t>(tokens), 1.0f);
  if (params.shared_gate_up != nullptr) {
    gated_mlp(*params.shared_gate_up, *params.shared_down, x,
              {shared.data(), ops::DType::kF32, tokens, hidden, hidden});
    if (params.shared_gate != nullptr) {
      linear(x, *params.shared_gate, {shared_weight.data(), ops::DType::kF32, tokens, 1, 1});
      for (float& weight : shared_weight) weight = sigmoid(weight);
    }
  }
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t i = 0; i < hidden; ++i) {
      double sum = 0;
      for (int64_t slot = t * top_k; slot < (t + 1) * top_k; ++slot) {
        sum += static_cast<double>(weights[static_cast<size_t>(slot)]) *
               static_cast<double>(outer[static_cast<size_t>(slot * hidden + i)]);
      }
      if (!shared.empty()) {
        sum += static_cast<double>(shared_weight[static_cast<size_t>(t)]) *
               static_cast<double>(shared[static_cast<size_t>(t * hidden + i)]);
      }
      out.f32(t)[i] = static_cast<float>(sum);
    }
  }
}

}  // namespace fourfold::cpu
