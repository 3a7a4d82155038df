#include "column.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "nvfp4/number.h"

namespace fourfold::test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr int64_t kGap = 16;  // columns from the end of a row to the next
constexpr int64_t kTokenCounts[] = {1, 2, 3, 7, 8, 15, 16, 17, 63, 64, 65, 200};

// An image of rows `stride` elements apart, NaN but for these.
class Image {
 public:
  Image(int64_t elements, ops::DType type) : type_(type), bytes_(static_cast<size_t>(elements * size())) {
    for (int64_t i = 0; i < elements; ++i) put(i, kNan);
  }
  void put(int64_t at, float value) {
    uint8_t* to = bytes_.data() + at * size();
    if (type_ == ops::DType::kF32) {
      std::memcpy(to, &value, 4);
    } else {
      const uint16_t half = nvfp4::float_to_bf16(value);
      std::memcpy(to, &half, 2);
    }
  }
  void put_rows(const std::vector<float>& values, int64_t rows, int64_t cols, int64_t first_column, int64_t stride) {
    for (int64_t i = 0; i < rows * cols; ++i) {
      put(i / cols * stride + first_column + i % cols, values[static_cast<size_t>(i)]);
    }
  }
  const std::vector<uint8_t>& bytes() const { return bytes_; }

 private:
  int64_t size() const { return type_ == ops::DType::kF32 ? 4 : 2; }

  ops::DType type_;
  std::vector<uint8_t> bytes_;
};

}  // namespace

std::vector<float> Column::inputs(Random& random, int64_t count, double scale, Type type) const {
  std::vector<float> values = random_values(random, count, scale);
  if (type == Type::kFloat) return values;
  for (float& value : values) value = stored(value);
  return values;
}

Placed Column::place_rows(const std::vector<float>* values, int64_t rows, int64_t cols, Type type, Rows kind) {
  const ops::DType dtype = type == Type::kFloat ? ops::DType::kF32 : backend().activation_type();
  const int64_t gap = kind == Rows::kDense && wants_dense() ? 0 : kGap;
  Image image(rows * (cols + gap) + kGap, dtype);
  if (values != nullptr) image.put_rows(*values, rows, cols, 0, cols + gap);
  Placed placed;
  placed.buffer = backend().allocate(static_cast<int64_t>(image.bytes().size()));
  write(*placed.buffer, image.bytes());
  placed.tensor = {placed.buffer->data(), dtype, rows, cols, cols + gap};
  return placed;
}

Placed Column::place(const std::vector<float>& values, int64_t rows, int64_t cols, Type type, Rows kind) {
  return place_rows(&values, rows, cols, type, kind);
}

Placed Column::empty(int64_t rows, int64_t cols, Type type, Rows kind) {
  return place_rows(nullptr, rows, cols, type, kind);
}

std::vector<Placed> Column::beside(int64_t rows, const std::vector<std::vector<float>>& values) {
  std::vector<Placed> placed;
  if (!wants_beside()) {
    for (const auto& each : values) placed.push_back(place(each, rows, static_cast<int64_t>(each.size()) / rows));
    return placed;
  }
  int64_t all = 0;
  for (const auto& each : values) all += static_cast<int64_t>(each.size()) / rows;
  const int64_t stride = (all + kGap + 7) / 8 * 8;
  Image image(rows * stride, backend().activation_type());
  int64_t column = 0;
  for (const auto& each : values) {
    const int64_t cols = static_cast<int64_t>(each.size()) / rows;
    image.put_rows(each, rows, cols, column, stride);
    column += cols;
  }
  const std::shared_ptr<ops::Buffer> buffer = backend().allocate(static_cast<int64_t>(image.bytes().size()));
  write(*buffer, image.bytes());
  const ops::Tensor whole = {buffer->data(), backend().activation_type(), rows, stride, stride};
  column = 0;
  for (const auto& each : values) {
    const int64_t cols = static_cast<int64_t>(each.size()) / rows;
    placed.push_back({buffer, whole.slice_cols(column, column + cols)});
    column += cols;
  }
  return placed;
}

std::vector<float> Column::values(const Placed& placed) {
  const ops::Tensor& x = placed.tensor;
  ops::Tensor whole = x;
  whole.cols = x.stride;
  std::vector<float> all(static_cast<size_t>(whole.rows * whole.cols)), out;
  backend().read(whole, all);
  for (int64_t i = 0; i < whole.rows * whole.cols; ++i) {
    const float value = all[static_cast<size_t>(i)];
    if (i % x.stride < x.cols) {
      out.push_back(value);
    } else if (!std::isnan(value)) {
      ADD_FAILURE() << "row " << i / x.stride << " has " << value << " behind its " << x.cols << " columns";
      break;
    }
  }
  return out;
}

// ---- the processor

std::span<const int64_t> CpuColumn::token_counts() const { return counts_.empty() ? kTokenCounts : counts_; }

void CpuColumn::write(ops::Buffer& buffer, const std::vector<uint8_t>& bytes) {
  std::memcpy(buffer.data(), bytes.data(), bytes.size());
}

// All but the padding.
void CpuColumn::poison(ops::KvCache& cache) {
  auto& host = dynamic_cast<cpu::HostKvCache&>(cache);
  const ops::KvCacheShape& shape = host.shape();
  for (int64_t page = 0; page < shape.pages; ++page) {
    for (int64_t head = 0; head < shape.kv_heads; ++head) {
      for (int64_t row = 0; row < 2 * shape.page_size; ++row) {
        for (int64_t i = 0; i < shape.head_dim; ++i) {
          const int64_t at = row * host.padded_dim() + i;
          if (host.type() == ops::DType::kF32) {
            host.keys<float>(1, page, head)[at] = kNan;
          } else {
            host.keys<uint16_t>(1, page, head)[at] = 0x7fc0;
          }
        }
      }
    }
  }
}

void CpuColumn::poison(ops::StateCache& cache) {
  auto& states = dynamic_cast<cpu::HostStateCache&>(cache);
  const ops::StateCacheShape& shape = states.shape();
  const std::vector<float> none(static_cast<size_t>(shape.key_dim * shape.value_dim), kNan);
  for (int64_t slot = 0; slot < shape.slots; ++slot) {
    for (int64_t h = 0; h < shape.value_heads; ++h) states.write_state(1, slot, h, none);
    std::fill_n(states.convolution(1, slot), (shape.conv_taps - 1) * shape.conv_channels(), kNan);
  }
}

std::vector<float> CpuColumn::state(ops::StateCache& cache, int64_t layer, int64_t slot) {
  auto& states = dynamic_cast<cpu::HostStateCache&>(cache);
  const ops::StateCacheShape& shape = states.shape();
  std::vector<float> all;
  std::vector<float> one(static_cast<size_t>(shape.key_dim * shape.value_dim));
  for (int64_t h = 0; h < shape.value_heads; ++h) {
    states.read_state(layer, slot, h, one);
    all.insert(all.end(), one.begin(), one.end());
  }
  return all;
}

std::vector<float> CpuColumn::history(ops::StateCache& cache, int64_t layer, int64_t slot) {
  auto& states = dynamic_cast<cpu::HostStateCache&>(cache);
  const ops::StateCacheShape& shape = states.shape();
  const float* from = states.convolution(layer, slot);
  return {from, from + (shape.conv_taps - 1) * shape.conv_channels()};
}

}  // namespace fourfold::test
