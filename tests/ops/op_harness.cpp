#include "op_harness.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <map>
#include <tuple>

#include "base/math.h"
#include "cpu/kernels/kernels.h"
#include "cpu/memory/workspace.h"
#include "nvfp4/number.h"
#include "nvfp4/quantize.h"

namespace fourfold::test {

cpu::CpuBackend& backend_of(cpu::Isa isa, bool nvfp4_activations, int threads) {
  static std::map<std::tuple<cpu::Isa, bool, int>, std::shared_ptr<ops::Backend>> backends;
  auto& backend = backends[{isa, nvfp4_activations, threads}];
  if (!backend) {
    cpu::Workspace::poison();
    cpu::CpuOptions options;
    options.isa = isa;
    options.threads = threads;
    options.nvfp4_activations = nvfp4_activations;
    backend = cpu::make_backend(options);
  }
  return dynamic_cast<cpu::CpuBackend&>(*backend);
}

std::vector<cpu::Isa> fast_isas() {
  std::vector<cpu::Isa> isas = cpu::supported_isas();
  isas.erase(isas.begin());  // the reference
  return isas;
}

std::vector<cpu::Isa> isas_with_own_loops() {
  std::vector<cpu::Isa> isas;
  for (const cpu::Isa isa : fast_isas()) {
    if (isas.empty() || &cpu::kernels_of(isa) != &cpu::kernels_of(isas.back())) isas.push_back(isa);
  }
  return isas;
}

double product_tolerance(cpu::Isa isa, bool nvfp4, int64_t depth) {
  double tolerance = 0x1p-24 * (4.0 + 4.0 * std::sqrt(static_cast<double>(depth)));
  if (isa != cpu::Isa::kReference && nvfp4) tolerance += 0x1p-14;
  if (isa == cpu::Isa::kAmx || isa == cpu::Isa::kMmla) tolerance += 0x1p-15;  // two bf16 parts
  return tolerance;
}

std::vector<float> random_values(Random& random, int64_t count, double scale) {
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = static_cast<float>(scale * random.normal());
  return values;
}

namespace {

template <typename T>
void store(OwnedMatrix& matrix, const std::vector<T>& elements) {
  matrix.bytes.resize(elements.size() * sizeof(T));
  std::memcpy(matrix.bytes.data(), elements.data(), matrix.bytes.size());
  matrix.source.data = matrix.bytes.data();
}

std::vector<uint8_t> fp8_elements(OwnedMatrix& matrix, const std::vector<float>& values) {
  const ops::MatrixSource& source = matrix.source;
  const int64_t across = ceil_div(source.columns, source.scale_columns);
  std::vector<uint8_t> codes;
  for (int64_t r = 0; r < source.rows; ++r) {
    for (int64_t c = 0; c < source.columns; ++c) {
      const float scale = matrix.grid[static_cast<size_t>(r / source.scale_rows * across + c / source.scale_columns)];
      codes.push_back(nvfp4::float_to_e4m3(values[static_cast<size_t>(r * source.columns + c)] / scale));
    }
  }
  return codes;
}

}  // namespace

std::shared_ptr<OwnedMatrix> random_fp8(Random& random, int64_t rows, int64_t columns, Grid grid) {
  auto matrix = std::make_shared<OwnedMatrix>();
  ops::MatrixSource& source = matrix->source;
  source.name = "random fp8";
  source.format = ops::Format::kFp8;
  source.rows = rows;
  source.columns = columns;
  source.scale_rows = grid == Grid::kTensor ? rows : grid == Grid::kRows ? 1 : grid == Grid::kCells ? 32 : 24;
  source.scale_columns = grid == Grid::kBlocks ? 32 : grid == Grid::kCells ? 128 : columns;
  const int64_t count = ceil_div(rows, source.scale_rows) * ceil_div(columns, source.scale_columns);
  for (int64_t i = 0; i < count; ++i) matrix->grid.push_back(static_cast<float>(random.uniform(2e-4, 9e-4)));
  source.grid_scales = matrix->grid.data();
  store(*matrix, fp8_elements(*matrix, random_values(random, rows * columns, 0.05)));
  return matrix;
}

std::shared_ptr<OwnedMatrix> random_matrix(Random& random, ops::Format format, int64_t rows, int64_t columns,
                                           double scale) {
  if (format == ops::Format::kFp8) return random_fp8(random, rows, columns, Grid::kBlocks);
  auto matrix = std::make_shared<OwnedMatrix>();
  ops::MatrixSource& source = matrix->source;
  source.name = std::string("random ") + ops::format_name(format);
  source.format = format;
  source.rows = rows;
  source.columns = columns;
  const std::vector<float> values = random_values(random, rows * columns, scale);
  if (format == ops::Format::kF32) {
    store(*matrix, values);
  } else if (format == ops::Format::kNvfp4) {
    source.tensor_scale = nvfp4::tensor_scale_for(nvfp4::largest_magnitude(values));
    source.input_scale = static_cast<float>(random.uniform(4.0, 6.0) / (6.0 * 448.0));
    std::vector<uint8_t> codes(values.size() / 2);
    matrix->block_scales.resize(values.size() / nvfp4::kBlock);
    for (int64_t r = 0; r < rows; ++r) {
      const auto n = static_cast<size_t>(columns);
      const auto row = static_cast<size_t>(r);
      nvfp4::quantize_row({values.data() + row * n, n}, source.tensor_scale, nvfp4::ScaleSearch::kMax,
                          {codes.data() + row * n / 2, n / 2}, {matrix->block_scales.data() + row * n / 16, n / 16});
    }
    store(*matrix, codes);
    source.block_scales = matrix->block_scales.data();
  } else {
    std::vector<uint16_t> halves;
    for (const float value : values) {
      halves.push_back(format == ops::Format::kBf16 ? nvfp4::float_to_bf16(value) : nvfp4::float_to_f16(value));
    }
    store(*matrix, halves);
  }
  return matrix;
}

Activations::Activations(cpu::CpuBackend& backend, int64_t rows, int64_t cols, int64_t gap)
    : buffer_(backend.allocate((rows * (cols + gap) + gap) * 4)), backend_(backend) {
  auto* data = static_cast<float*>(buffer_->data());
  for (int64_t i = 0; i < rows * (cols + gap) + gap; ++i) data[i] = std::numeric_limits<float>::quiet_NaN();
  tensor_ = {data, ops::DType::kF32, rows, cols, cols + gap};
}

Activations::Activations(cpu::CpuBackend& backend, const std::vector<float>& values, int64_t rows, int64_t cols)
    : Activations(backend, rows, cols) {
  for (int64_t r = 0; r < rows; ++r)
    std::memcpy(tensor_.f32(r), values.data() + r * cols, static_cast<size_t>(cols) * 4);
}

std::vector<float> Activations::values() const {
  std::vector<float> out(static_cast<size_t>(tensor_.rows * tensor_.cols));
  backend_.read(tensor_, out);
  return out;
}

void expect_close(const Result& expected, const Result& found, double* worst) {
  ASSERT_EQ(expected.name, found.name);
  ASSERT_EQ(expected.rows, found.rows);
  ASSERT_EQ(expected.cols, found.cols);
  const int64_t cols = expected.cols;
  double worst_row_error = -1;
  int64_t worst_row = 0;
  double worst_element = -1;
  int64_t worst_at = 0;
  for (int64_t r = 0; r < expected.rows; ++r) {
    double difference = 0;
    double norm = 0;
    for (int64_t c = 0; c < cols; ++c) {
      const auto e = static_cast<double>(expected.values[static_cast<size_t>(r * cols + c)]);
      const auto f = static_cast<double>(found.values[static_cast<size_t>(r * cols + c)]);
      ASSERT_TRUE(std::isfinite(e)) << expected.name << ": reference is " << e << " at row " << r << " column " << c;
      ASSERT_TRUE(std::isfinite(f)) << expected.name << ": " << f << " at row " << r << " column " << c;
      difference += (e - f) * (e - f);
      norm += e * e;
    }
    norm = std::max(norm, expected.magnitude * expected.magnitude * static_cast<double>(cols));
    const double error = norm > 0 ? std::sqrt(difference / norm) : std::sqrt(difference);
    if (error > worst_row_error) {
      worst_row_error = error;
      worst_row = r;
    }
    const double rms = norm > 0 ? std::sqrt(norm / static_cast<double>(cols)) : 1.0;
    for (int64_t c = 0; c < cols; ++c) {
      const auto at = static_cast<size_t>(r * cols + c);
      // One that is larger than 8 of them itself is rounded as a value of its size.
      const double scale = std::max(rms, std::fabs(static_cast<double>(expected.values[at])) / 8.0);
      const double element = std::fabs(static_cast<double>(expected.values[at] - found.values[at])) / scale;
      if (element > worst_element) {
        worst_element = element;
        worst_at = r * cols + c;
      }
    }
  }
  if (worst != nullptr && worst_row_error > *worst) *worst = worst_row_error;
  EXPECT_LE(worst_row_error, found.tolerance) << found.name << ": worst row " << worst_row << " of " << expected.rows;
  EXPECT_LE(worst_element, 8.0 * found.tolerance)
      << found.name << ": worst element, row " << worst_at / cols << " column " << worst_at % cols << ": wanted "
      << expected.values[static_cast<size_t>(worst_at)] << ", found " << found.values[static_cast<size_t>(worst_at)];
}

}  // namespace fourfold::test
