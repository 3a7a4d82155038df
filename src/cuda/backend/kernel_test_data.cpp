#include "cuda/backend/kernel_test_data.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "nvfp4/number.h"

namespace fourfold::cuda {

using ops::Format;

std::vector<float> bf16_normals(Random& random, int64_t count, double scale) {
  std::vector<float> values(static_cast<size_t>(count));
  for (float& v : values) v = nvfp4::bf16_to_float(nvfp4::float_to_bf16(static_cast<float>(scale * random.normal())));
  return values;
}

TestRows empty_rows(CudaBackend& backend, const Stream& stream, int64_t rows, int64_t cols, bool floats) {
  TestRows r;
  r.buffer = backend.allocate(rows * cols * (floats ? 4 : 2));
  static_cast<DeviceBuffer&>(*r.buffer).buffer().fill(stream, 0xff);
  r.tensor = floats ? ops::Backend::floats(*r.buffer, rows, cols) : backend.tensor(*r.buffer, rows, cols);
  return r;
}
TestRows rows_of(CudaBackend& backend, const Stream& stream, const std::vector<float>& values, int64_t cols,
                 bool floats) {
  TestRows r = empty_rows(backend, stream, static_cast<int64_t>(values.size()) / cols, cols, floats);
  cuda::Buffer& buffer = static_cast<DeviceBuffer&>(*r.buffer).buffer();
  if (floats) {
    buffer.upload(stream, values);
  } else {
    std::vector<uint16_t> halves;
    for (const float v : values) halves.push_back(nvfp4::float_to_bf16(v));
    buffer.upload(stream, halves);
  }
  return r;
}
TestRows host_rows(ops::Backend& reference, const std::vector<float>& values, int64_t cols) {
  TestRows r;
  r.buffer = reference.allocate(static_cast<int64_t>(values.size()) * 4);
  std::memcpy(r.buffer->data(), values.data(), values.size() * 4);
  r.tensor = ops::Backend::floats(*r.buffer, static_cast<int64_t>(values.size()) / cols, cols);
  return r;
}
std::vector<float> read(ops::Backend& backend, const ops::Tensor& x) {
  std::vector<float> values(static_cast<size_t>(x.rows * x.cols));
  backend.read(x, values);
  return values;
}

std::string compare_pieces(const std::vector<float>& got, const std::vector<float>& want, int64_t cols, int64_t width,
                           double allowed) {
  for (size_t at = 0; at < want.size(); at += static_cast<size_t>(width)) {
    double difference = 0, norm = 0;
    for (size_t i = at; i < at + static_cast<size_t>(width); ++i) {
      const double d = static_cast<double>(got[i]) - static_cast<double>(want[i]);
      difference += d * d;
      norm += static_cast<double>(want[i]) * static_cast<double>(want[i]);
    }
    if (std::sqrt(difference) <= allowed * std::sqrt(norm) + 1e-30) continue;
    return fmt::format("row {}, columns from {} on are off by {:.3g} of their norm, {:.3g} allowed",
                       at / static_cast<size_t>(cols), at % static_cast<size_t>(cols), std::sqrt(difference / norm),
                       allowed);
  }
  return "";
}

std::string compare_each(const std::vector<float>& got, const std::vector<float>& want, const std::vector<float>& bound,
                         int64_t cols) {
  for (size_t at = 0; at < want.size(); ++at) {
    if (std::fabs(got[at] - want[at]) <= bound[at]) continue;
    return fmt::format("row {}, column {} is {}, wanted {} within {}", at / static_cast<size_t>(cols),
                       at % static_cast<size_t>(cols), got[at], want[at], bound[at]);
  }
  return "";
}

std::unique_ptr<TestWeight> test_weight(Random& random, gemm::Weights format, bool cells, int64_t rows,
                                        int64_t columns) {
  auto w = std::make_unique<TestWeight>();
  ops::MatrixSource& m = w->source;
  m.name = "self-test";
  m.rows = rows;
  m.columns = columns;
  const auto bytes = [&](int64_t count, auto&& each) {
    std::vector<uint8_t> all(static_cast<size_t>(count));
    for (uint8_t& b : all) b = each();
    return all;
  };
  // No NaN.
  const auto e4m3 = [&] { return static_cast<uint8_t>(random.below(127) | random.below(2) << 7); };
  if (format == gemm::Weights::kNvfp4) {
    m.format = Format::kNvfp4;
    w->bytes = bytes(rows * columns / 2, [&] { return static_cast<uint8_t>(random.below(256)); });
    // Zero, the ends of subnormals and normals, and all between them.
    constexpr uint8_t kEnds[] = {0x00, 0x01, 0x07, 0x08, 0x7e};
    w->block_scales = bytes(rows * columns / 16, [&] {
      return random.below(4) == 0 ? kEnds[random.below(std::size(kEnds))] : static_cast<uint8_t>(random.below(127));
    });
    m.block_scales = w->block_scales.data();
    m.tensor_scale = 0.0037f;
  } else if (format == gemm::Weights::kFp8) {
    m.format = Format::kFp8;
    w->bytes = bytes(rows * columns, e4m3);
    m.scale_rows = cells ? 32 : 1;
    m.scale_columns = cells ? 128 : columns;
    const int64_t count =
        (rows + m.scale_rows - 1) / m.scale_rows * ((columns + m.scale_columns - 1) / m.scale_columns);
    for (int64_t i = 0; i < count; ++i) {
      w->grid.push_back(static_cast<float>(std::exp2(random.uniform(-12.0, 0.0))));
    }
    m.grid_scales = w->grid.data();
  } else {
    m.format = Format::kBf16;
    for (int64_t i = 0; i < rows * columns; ++i) {
      const uint16_t v = nvfp4::float_to_bf16(static_cast<float>(random.normal()));
      w->bytes.push_back(static_cast<uint8_t>(v & 255));
      w->bytes.push_back(static_cast<uint8_t>(v >> 8));
    }
  }
  m.data = w->bytes.data();
  return w;
}

std::vector<float> dequantised(const ops::MatrixSource& source) {
  std::vector<float> values(static_cast<size_t>(source.rows * source.columns));
  for (int64_t r = 0; r < source.rows; ++r)
    ops::dequantize(source, r, &values[static_cast<size_t>(r * source.columns)]);
  return values;
}

}  // namespace fourfold::cuda
