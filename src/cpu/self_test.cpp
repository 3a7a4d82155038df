#include "cpu/self_test.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "base/random.h"

namespace fourfold::cpu {

double self_test_error(ops::Backend& backend) {
  // Neither a whole pair of panels nor a whole piece of columns, so that the tails run too.
  constexpr int64_t kRows = 48, kColumns = 624, kTokens = 23;
  Random random(4);
  std::vector<uint8_t> codes(kRows * kColumns / 2), scales(kRows * kColumns / 16);
  for (uint8_t& code : codes) code = static_cast<uint8_t>(random.below(256));
  for (uint8_t& scale : scales) scale = static_cast<uint8_t>(1 + random.below(0x7e));
  ops::MatrixSource source;
  source.name = "self test";
  source.format = ops::Format::kNvfp4;
  source.rows = kRows;
  source.columns = kColumns;
  source.data = codes.data();
  source.block_scales = scales.data();
  source.tensor_scale = 0.01f;

  const std::unique_ptr<ops::Buffer> in = backend.allocate(kTokens * kColumns * 4);
  const std::unique_ptr<ops::Buffer> out = backend.allocate(kTokens * kRows * 4);
  const ops::Tensor x = backend.tensor(*in, kTokens, kColumns);
  for (int64_t i = 0; i < kTokens * kColumns; ++i) x.f32()[i] = static_cast<float>(random.normal());
  std::vector<float> wanted(kTokens * kRows), row(kColumns);
  for (int64_t r = 0; r < kRows; ++r) {
    ops::dequantize(source, r, row.data());
    for (int64_t t = 0; t < kTokens; ++t) {
      double sum = 0;
      for (int64_t k = 0; k < kColumns; ++k) sum += static_cast<double>(row[static_cast<size_t>(k)]) * x.f32(t)[k];
      wanted[static_cast<size_t>(t * kRows + r)] = static_cast<float>(sum);
    }
  }

  const std::unique_ptr<ops::Matrix> matrix = backend.load_matrix(std::span(&source, 1));
  double worst = 0;
  for (const int64_t tokens : {int64_t{1}, kTokens}) {
    const ops::Tensor y = backend.tensor(*out, tokens, kRows);
    std::fill_n(y.f32(), tokens * kRows, std::numeric_limits<float>::quiet_NaN());
    backend.linear(x.slice_rows(0, tokens), *matrix, y);
    double error = 0, energy = 0;
    for (int64_t i = 0; i < tokens * kRows; ++i) {
      const double expected = wanted[static_cast<size_t>(i)];
      error += std::pow(y.f32()[i] - expected, 2);
      energy += expected * expected;
    }
    const double relative = std::sqrt(error / energy);
    worst = std::isfinite(relative) ? std::max(worst, relative) : std::numeric_limits<double>::infinity();
  }
  return worst;
}

}  // namespace fourfold::cpu
