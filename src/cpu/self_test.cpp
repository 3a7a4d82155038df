#include "cpu/self_test.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "base/random.h"

namespace fourfold::cpu {

namespace {

// A random NVFP4 matrix and its weights in fp32.
struct Weights {
  Weights(Random& random, int64_t rows, int64_t columns)
      : codes(static_cast<size_t>(rows * columns / 2)), scales(static_cast<size_t>(rows * columns / 16)) {
    for (uint8_t& code : codes) code = static_cast<uint8_t>(random.below(256));
    for (uint8_t& scale : scales) scale = static_cast<uint8_t>(1 + random.below(0x7e));
    source.name = "self test";
    source.format = ops::Format::kNvfp4;
    source.rows = rows;
    source.columns = columns;
    source.data = codes.data();
    source.block_scales = scales.data();
    source.tensor_scale = 0.01f;
    values.resize(static_cast<size_t>(rows * columns));
    for (int64_t r = 0; r < rows; ++r) ops::dequantize(source, r, values.data() + r * columns);
  }
  Weights(Weights&&) = default;

  template <typename T>
  std::vector<double> times(const T* x) const {
    std::vector<double> y(static_cast<size_t>(source.rows));
    for (int64_t r = 0; r < source.rows; ++r) {
      const float* row = values.data() + r * source.columns;
      for (int64_t k = 0; k < source.columns; ++k) y[static_cast<size_t>(r)] += static_cast<double>(row[k]) * x[k];
    }
    return y;
  }

  std::vector<uint8_t> codes, scales;
  ops::MatrixSource source;
  std::vector<float> values;
};

ops::Tensor random_tensor(ops::Backend& backend, Random& random, ops::Buffer& buffer, int64_t rows, int64_t columns) {
  const ops::Tensor x = backend.tensor(buffer, rows, columns);
  for (int64_t i = 0; i < rows * columns; ++i) x.f32()[i] = static_cast<float>(random.normal());
  return x;
}

// Runs fn(tokens, out) for one token and for all; the larger relative error against `wanted`, [tokens, columns].
template <typename F>
double worst_error(ops::Backend& backend, const std::vector<double>& wanted, int64_t columns, F&& fn) {
  const std::unique_ptr<ops::Buffer> out = backend.allocate(static_cast<int64_t>(wanted.size()) * 4);
  const int64_t all = static_cast<int64_t>(wanted.size()) / columns;
  double worst = 0;
  for (const int64_t tokens : {int64_t{1}, all}) {
    const ops::Tensor y = backend.tensor(*out, tokens, columns);
    std::fill_n(y.f32(), tokens * columns, std::numeric_limits<float>::quiet_NaN());
    fn(tokens, y);
    double error = 0, energy = 0;
    for (int64_t i = 0; i < tokens * columns; ++i) {
      const double expected = wanted[static_cast<size_t>(i)];
      error += std::pow(y.f32()[i] - expected, 2);
      energy += expected * expected;
    }
    const double relative = std::sqrt(error / energy);
    worst = std::isfinite(relative) ? std::max(worst, relative) : std::numeric_limits<double>::infinity();
  }
  return worst;
}

double linear_error(ops::Backend& backend, Random& random) {
  // Neither a whole pair of panels nor a whole piece of columns, so that the tails run too.
  constexpr int64_t kRows = 48, kColumns = 624, kTokens = 23;
  const Weights weights(random, kRows, kColumns);
  const std::unique_ptr<ops::Buffer> in = backend.allocate(kTokens * kColumns * 4);
  const ops::Tensor x = random_tensor(backend, random, *in, kTokens, kColumns);
  std::vector<double> wanted;
  for (int64_t t = 0; t < kTokens; ++t) {
    const std::vector<double> row = weights.times(x.f32(t));
    wanted.insert(wanted.end(), row.begin(), row.end());
  }
  const std::unique_ptr<ops::Matrix> matrix = backend.load_matrix(std::span(&weights.source, 1));
  return worst_error(backend, wanted, kRows, [&](int64_t tokens, const ops::Tensor& y) {
    backend.linear(x.slice_rows(0, tokens), *matrix, y);
  });
}

// Every token goes to two of three experts, which the router's rows choose without a near tie.
double experts_error(ops::Backend& backend, Random& random) {
  constexpr int64_t kHidden = 80, kWidth = 48, kExperts = 3, kTokens = 23;
  std::vector<Weights> gate, up, down;
  for (int64_t e = 0; e < kExperts; ++e) {
    gate.emplace_back(random, kWidth, kHidden);
    up.emplace_back(random, kWidth, kHidden);
    down.emplace_back(random, kHidden, kWidth);
  }
  const std::unique_ptr<ops::Buffer> in = backend.allocate(kTokens * kHidden * 4);
  const ops::Tensor x = random_tensor(backend, random, *in, kTokens, kHidden);
  // Logits are the first three inputs: token t prefers expert t mod 3, then the next.
  std::vector<float> routes(kExperts * kHidden, 0.0f);
  for (int64_t e = 0; e < kExperts; ++e) routes[static_cast<size_t>(e * kHidden + e)] = 1.0f;
  for (int64_t t = 0; t < kTokens; ++t) {
    for (int64_t i = 0; i < kExperts; ++i) x.f32(t)[(t + i) % kExperts] = 1.0f - static_cast<float>(i);
  }
  ops::MatrixSource router;
  router.name = "self test";
  router.format = ops::Format::kF32;
  router.rows = kExperts;
  router.columns = kHidden;
  router.data = routes.data();

  const double first = 1 / (1 + std::exp(-1.0));  // softmax of 1 and 0
  std::vector<double> wanted(kTokens * kHidden);
  for (int64_t t = 0; t < kTokens; ++t) {
    for (int64_t i = 0; i < 2; ++i) {
      const auto e = static_cast<size_t>((t + i) % kExperts);
      std::vector<double> middle = gate[e].times(x.f32(t));
      const std::vector<double> factor = up[e].times(x.f32(t));
      for (size_t k = 0; k < middle.size(); ++k) middle[k] *= factor[k] / (1 + std::exp(-middle[k]));
      const std::vector<double> row = down[e].times(middle.data());
      for (size_t k = 0; k < row.size(); ++k) {
        wanted[static_cast<size_t>(t) * row.size() + k] += (i == 0 ? first : 1 - first) * row[k];
      }
    }
  }

  const std::unique_ptr<ops::Matrix> routes_loaded = backend.load_matrix(std::span(&router, 1));
  const std::unique_ptr<ops::Experts> experts =
      backend.load_experts(kExperts,
                           [&](int64_t e) {
                             const auto i = static_cast<size_t>(e);
                             return ops::ExpertSource{gate[i].source, up[i].source, down[i].source};
                           },
                           {});
  ops::MoeParams params;
  params.router = routes_loaded.get();
  params.experts = experts.get();
  params.top_k = 2;
  return worst_error(backend, wanted, kHidden,
                     [&](int64_t tokens, const ops::Tensor& y) { backend.moe(params, x.slice_rows(0, tokens), y); });
}

}  // namespace

double self_test_error(ops::Backend& backend) {
  Random random(4);
  return std::max(linear_error(backend, random), experts_error(backend, random));
}

}  // namespace fourfold::cpu
