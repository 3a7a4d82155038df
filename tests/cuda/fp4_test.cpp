// NVFP4 activations (W4A4): the layer on a GPU with emulated multiplications, and what the reference says of them.
#include <limits>

#include "base/check.h"
#include "kernels/moe/fp4_layout.h"
#include "nvfp4/quantize.h"
#include "testing.h"

namespace fourfold::cuda {
namespace {

using plan::moe::ActivationFormat;

plan::moe::Problem w4a4(int64_t experts, int64_t top_k, int64_t hidden, int64_t intermediate) {
  return with_activations(problem_of(experts, top_k, hidden, intermediate), ActivationFormat::kNvfp4);
}

// ---- without a GPU --------------------------------------------------------------------------------------------------

// A kernel's row: units of 32 bytes of codes and 4 of scales.
struct DeviceRow {
  std::vector<uint8_t> codes, scales;
};
DeviceRow device_row(const Nvfp4Row& row) {
  const size_t units = (row.codes.size() + 63) / 64;
  DeviceRow out{std::vector<uint8_t>(units * 32), std::vector<uint8_t>(units * 4)};
  for (size_t b = 0; b < row.scales.size(); ++b) {
    const size_t place = b / 4 * 4 + static_cast<size_t>(moe::group_place(static_cast<int>(b % 4)));
    out.scales[place] = row.scales[b];
    // As the header has it: nibble n of word h holds k = nibble_k(h, n).
    for (int h = 0; h < 2; ++h) {
      for (int n = 0; n < 8; ++n) {
        const uint8_t code = row.codes[b * 16 + static_cast<size_t>(moe::nibble_k(h, n))];
        out.codes[place * 8 + static_cast<size_t>(h * 4 + n / 2)] |= static_cast<uint8_t>(code << (4 * (n % 2)));
      }
    }
  }
  return out;
}

std::vector<float> normals(size_t count, uint64_t seed, float magnitude = 1) {
  Random random(seed);
  std::vector<float> row;
  for (size_t i = 0; i < count; ++i) row.push_back(magnitude * static_cast<float>(random.normal()));
  return row;
}

TEST(Fp4Reference, RowsComeBackFromTheKernelsOrder) {
  for (const size_t columns : {16u, 64u, 272u}) {
    const Nvfp4Row row = quantised(normals(columns, columns), 3.0f / 2688);
    const DeviceRow there = device_row(row);
    EXPECT_EQ(read_nvfp4_row(there.codes.data(), there.scales.data(), static_cast<int64_t>(columns)), row);
  }
}

TEST(Fp4Reference, QuantisedRowsPassAndOthersDoNot) {
  const std::vector<float> none(64, 0.0f);
  for (const float scale : {4.0f / 2688, 0.1f / 2688, 30.0f}) {
    const std::vector<float> values = normals(64, 7);
    const Nvfp4Row right = quantised(values, scale);
    EXPECT_EQ(check_quantised(right, values, none, scale), "");
    int found = 0, changes = 0;
    for (size_t i = 0; i < 64; ++i) {
      Nvfp4Row wrong = right;
      wrong.codes[i] ^= 2;
      ++changes;
      found += !check_quantised(wrong, values, none, scale).empty();
    }
    for (size_t b = 0; b < 4; ++b) {
      for (const int step : {-1, 1}) {
        Nvfp4Row wrong = right;
        if (wrong.scales[b] == 0 && step < 0) continue;
        wrong.scales[b] = static_cast<uint8_t>(wrong.scales[b] + step);
        ++changes;
        found += !check_quantised(wrong, values, none, scale).empty();
      }
    }
    EXPECT_EQ(found, changes) << scale;
    // What lies at a border may fall to either side, and no further.
    std::vector<float> errors = none;
    Nvfp4Row other = right;
    const float unit = nvfp4::e4m3_to_float(right.scales[0]) * scale;
    std::vector<float> near = values;
    near[3] = 2.5f * unit;
    near[4] = 6.0f * unit;  // keeps the block's scale
    Nvfp4Row rounded = quantised(near, scale);
    if (rounded.scales[0] != right.scales[0]) continue;
    errors[3] = 0.01f * unit;
    rounded.codes[3] = nvfp4::float_to_e2m1(3.0f);
    EXPECT_EQ(check_quantised(rounded, near, errors, scale), "");
    rounded.codes[3] = nvfp4::float_to_e2m1(4.0f);
    EXPECT_NE(check_quantised(rounded, near, errors, scale), "");
  }
}

TEST(Fp4Reference, NanCountsAsZero) {
  std::vector<float> row = normals(32, 8);
  row[5] = std::numeric_limits<float>::quiet_NaN();
  const Nvfp4Row got = quantised(row, 4.0f / 2688);
  EXPECT_EQ(got.codes[5] & 7, 0);
  row[5] = 0;
  EXPECT_EQ(got, quantised(row, 4.0f / 2688));
}

// A second implementation in double precision, from the definition: block scale to the nearest e4m3, values to the
// nearest e2m1, ties to even, by search over all codes.
double nearest(double value, const std::vector<double>& grid) {
  size_t best = 0;
  for (size_t i = 1; i < grid.size(); ++i) {
    const double d = std::fabs(grid[i] - value), before = std::fabs(grid[best] - value);
    if (d < before || (d == before && i % 2 == 0)) best = i;
  }
  return grid[best];
}
void quantise_by_search(std::vector<double>* row, float input_scale) {
  const double global = 1.0f / input_scale;  // fp32 by definition
  std::vector<double> scales, codes;
  for (int c = 0; c < 127; ++c) scales.push_back(nvfp4::e4m3_to_float(static_cast<uint8_t>(c)));
  for (int c = 0; c < 8; ++c) codes.push_back(nvfp4::e2m1_to_float(static_cast<uint8_t>(c)));
  for (size_t b = 0; b < row->size(); b += 16) {
    double largest = 0;
    for (size_t i = b; i < b + 16; ++i) largest = std::max(largest, std::fabs((*row)[i]));
    const double scale = nearest(std::min(largest * global / 6, 448.0), scales);
    for (size_t i = b; i < b + 16; ++i) {
      const double v = (*row)[i];
      (*row)[i] =
          scale == 0 ? 0 : std::copysign(nearest(std::fabs(v) * global / scale, codes), v) * scale * input_scale;
    }
  }
}

TEST(Fp4Reference, AgreesWithDoublePrecisionOnASmallLayer) {
  const plan::moe::Problem p = w4a4(5, 2, 64, 48);
  const RandomExperts host(p, 5, 3);
  const Batch batch(p, 12, Pattern::kDuplicates, 8);
  nvfp4::LayerInputScales scales{4.37f / 2688, {10.3f / 2688, 1.13f / 2688, 203.0f, 6.1f / 2688, 3.7f / 2688}, 0};
  std::vector<int64_t> all;
  for (int64_t t = 0; t < batch.tokens; ++t) all.push_back(t);
  const auto got = reference_layer(p, host.experts, batch.x, batch.ids, batch.weights, all, 0, scales);
  const auto plain = reference_layer(p, host.experts, batch.x, batch.ids, batch.weights, all);
  const auto weight = [](const Nvfp4Matrix& m, int64_t row, int64_t i) {
    const uint8_t pair = m.codes[row * m.code_stride + i / 2];
    return static_cast<double>(nvfp4::e2m1_to_float(i % 2 != 0 ? pair >> 4 : pair & 15)) *
           nvfp4::e4m3_to_float(m.scales[row * m.scale_stride + i / 16]) * m.tensor_scale;
  };
  int different = 0;
  for (int64_t t = 0; t < batch.tokens; ++t) {
    std::vector<double> x(64), want(64);
    for (int64_t i = 0; i < 64; ++i)
      x[static_cast<size_t>(i)] = nvfp4::bf16_to_float(batch.x[static_cast<size_t>(t * 64 + i)]);
    quantise_by_search(&x, scales.gate_up);
    for (int64_t k = 0; k < 2; ++k) {
      const auto at = static_cast<size_t>(t * 2 + k);
      const auto id = static_cast<size_t>(batch.ids[at]);
      std::vector<double> h(48);
      for (int64_t j = 0; j < 48; ++j) {
        double g = 0, u = 0;
        for (int64_t i = 0; i < 64; ++i) {
          g += weight(host.experts[id].gate, j, i) * x[static_cast<size_t>(i)];
          u += weight(host.experts[id].up, j, i) * x[static_cast<size_t>(i)];
        }
        h[static_cast<size_t>(j)] = g / (1 + std::exp(-g)) * u;
      }
      quantise_by_search(&h, scales.down[id]);
      for (int64_t r = 0; r < 64; ++r) {
        for (int64_t j = 0; j < 48; ++j) {
          want[static_cast<size_t>(r)] +=
              weight(host.experts[id].down, r, j) * h[static_cast<size_t>(j)] * batch.weights[at];
        }
      }
    }
    double error = 0, norm = 0;
    for (int64_t r = 0; r < 64; ++r) {
      const double g = got[static_cast<size_t>(t * 64 + r)], w = want[static_cast<size_t>(r)];
      error += (g - w) * (g - w);
      norm += w * w;
      different += std::fabs(w - plain[static_cast<size_t>(t * 64 + r)]) > 1e-3 * std::fabs(w);
    }
    // fp32 sums against double: values at a border would show as 1e-2; these seeds have none.
    EXPECT_LE(std::sqrt(error), 1e-5 * std::sqrt(norm)) << t;
  }
  EXPECT_GT(different, 12 * 64 / 2) << "quantisation must matter in this comparison";
}

// ---- on a GPU -------------------------------------------------------------------------------------------------------

struct Shape {
  const char* name;
  int64_t experts, top_k, hidden, intermediate;
  plan::moe::Activation activation = plan::moe::Activation::kSwiGlu;
};
class Fp4Shapes : public testing::TestWithParam<Shape> {};
void PrintTo(const Shape& s, std::ostream* out) { *out << s.name; }

TEST_P(Fp4Shapes, EveryTokenCountAndRouting) {
  FOURFOLD_NEEDS_GPU();
  const Shape& s = GetParam();
  plan::moe::Problem p = w4a4(s.experts, s.top_k, s.hidden, s.intermediate);
  p.activation = s.activation;
  TestLayer layer(p, 300, emulated());
  uint64_t seed = 1;
  for (const int64_t tokens : {1, 2, 8, 9, 63, 300}) {
    ASSERT_TRUE(layer.runs_fp4(tokens));
    for (const Pattern pattern : {Pattern::kUniform, Pattern::kHoles, Pattern::kDuplicates, Pattern::kPowerLaw}) {
      if (tokens == 300 && pattern != Pattern::kHoles) continue;
      SCOPED_TRACE(testing::Message() << tokens << " tokens, pattern " << static_cast<int>(pattern));
      layer.expect_right(Batch(p, tokens, pattern, ++seed), 8);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Expert, Fp4Shapes,
                         testing::Values(Shape{"e397", 16, 10, 4096, 1024}, Shape{"e35", 24, 8, 2048, 512},
                                         Shape{"i320", 16, 10, 2560, 320},
                                         Shape{"i1856", 8, 6, 2688, 1856, plan::moe::Activation::kRelu2},
                                         Shape{"i704", 12, 8, 2816, 704}, Shape{"padded", 9, 3, 336, 112},
                                         Shape{"top16", 20, 16, 512, 128}, Shape{"one", 1, 1, 512, 256}),
                         [](const auto& parameter) { return std::string(parameter.param.name); });

TEST(Fp4Layer, ManyTokensOneExpertAndNone) {
  FOURFOLD_NEEDS_GPU();
  TestLayer layer(w4a4(16, 8, 1024, 256), 16384, emulated());
  const plan::moe::Problem& p = layer.kernels.problem();
  for (const int64_t tokens : {300, 16384}) {
    SCOPED_TRACE(testing::Message() << tokens << " tokens");
    layer.expect_right(Batch(p, tokens, Pattern::kHoles, 4));
    layer.expect_right(Batch(p, tokens, Pattern::kOneExpert, 5));
    for (const uint16_t v : layer.run(Batch(p, tokens, Pattern::kNone, 6))) ASSERT_EQ(v & 0x7fff, 0);
  }
}

TEST(Fp4Layer, RunsAreBitwiseEqualAlsoInAGraph) {
  FOURFOLD_NEEDS_GPU();
  TestLayer layer(w4a4(24, 8, 1024, 256), 128, emulated());
  for (const int64_t tokens : {1, 100}) {
    const Batch batch(layer.kernels.problem(), tokens, Pattern::kPowerLaw, 77);
    const auto first = layer.run(batch);
    for (int i = 0; i < 3; ++i) EXPECT_EQ(layer.run(batch), first) << tokens;
    const auto n = static_cast<uint64_t>(tokens * 1024) * 2;
    Buffer x(test_device(), n, "x"), ids(test_device(), batch.ids.size() * 4, "ids"),
        router(test_device(), batch.ids.size() * 4, "weights"), out(test_device(), n, "out");
    x.upload(layer.stream, batch.x);
    ids.upload(layer.stream, batch.ids);
    router.upload(layer.stream, batch.weights);
    const ExpertLayer run(layer.kernels, layer.workspace, layer.weights);
    const Graph graph(layer.stream, [&] {
      for (int i = 0; i < 3; ++i) {
        run.run(layer.stream, {x.address(), ids.address(), router.address(), out.address(), tokens});
      }
    });
    for (int i = 0; i < 3; ++i) {
      out.fill(layer.stream, 0xff);
      graph.launch(layer.stream);
      EXPECT_EQ(out.download<uint16_t>(layer.stream, first.size()), first) << tokens;
    }
  }
}

TEST(Fp4Layer, UnusableInputScalesAreReplaced) {
  FOURFOLD_NEEDS_GPU();
  TestLayer layer(w4a4(8, 3, 512, 128), 16, emulated());
  const float kBad[] = {0.0f, std::numeric_limits<float>::quiet_NaN(), 1e-42f, -1.0f,
                        std::numeric_limits<float>::infinity()};
  auto experts = layer.host.experts;
  for (size_t e = 0; e < 5; ++e) {
    experts[e].gate.input_scale = experts[e].up.input_scale = kBad[e];
    experts[e].down.input_scale = kBad[e];
  }
  experts[5].down.input_scale = 20.0f / 2688;
  layer.weights.upload(layer.stream, 0, experts);
  ASSERT_TRUE(layer.weights.input_scales().has_value());
  EXPECT_GE(layer.weights.input_scales()->replaced, 5);
  EXPECT_EQ(layer.weights.input_scales()->down[2], layer.weights.input_scales()->down[6] > 20.0f / 2688
                                                       ? layer.weights.input_scales()->down[6]
                                                       : 20.0f / 2688);
  for (const int64_t tokens : {3, 16}) {
    layer.expect_right(Batch(layer.kernels.problem(), tokens, Pattern::kUniform, 3));
  }
}

// One stored copy of the weights, both precisions, as the plan of the bucket says; and layers that no calibration saw.
TEST(Fp4Layer, EachBucketRunsWhatIsFaster) {
  FOURFOLD_NEEDS_GPU();
  const plan::moe::Problem p = with_activations(problem_of(16, 8, 1024, 256), ActivationFormat::kAuto);
  TestLayer layer(p, 4096, emulated());
  int64_t fp4 = 0, bf16 = 0;
  for (const PlannedBucket& bucket : layer.kernels.buckets()) {
    EXPECT_EQ(bucket.pair.fp4(), bucket.plan.activations() == ActivationFormat::kNvfp4) << bucket.tokens;
    EXPECT_EQ(bucket.without_input_scales.has_value(), bucket.pair.fp4()) << bucket.tokens;
    (bucket.pair.fp4() ? fp4 : bf16) = bucket.tokens;
  }
  ASSERT_GT(fp4, 0);
  ASSERT_GT(bf16, 0);
  // In turn: what one leaves in the workspace must not matter to the other.
  for (const int64_t tokens : {fp4, bf16, int64_t{1}, fp4}) {
    SCOPED_TRACE(testing::Message() << tokens << " tokens");
    layer.expect_right(Batch(p, tokens, Pattern::kHoles, 11), 8);
  }
  const std::vector<float> none(32, 0.0f), no_down(16, 0.0f);
  layer.weights.set_input_scales(layer.stream, none, no_down);
  EXPECT_FALSE(layer.weights.input_scales().has_value());
  EXPECT_FALSE(layer.runs_fp4(fp4));
  layer.expect_right(Batch(p, fp4, Pattern::kHoles, 12), 8);  // within the tolerance of W4A16
}

TEST(Fp4Layer, WithoutInputScalesItIsAnErrorThatSaysSo) {
  FOURFOLD_NEEDS_GPU();
  TestLayer layer(w4a4(4, 2, 256, 64), 4, emulated());
  layer.weights.set_input_scales(layer.stream, std::vector<float>(8, 0.0f), std::vector<float>(4, 0.5f));
  try {
    layer.run(Batch(layer.kernels.problem(), 2, Pattern::kUniform, 1));
    FAIL() << "ran without input scales";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("no input scale of the layer can be used"), std::string::npos)
        << error.what();
  }
}

// No W4A4 tile is as narrow as 48 rows of gate and up; whichever is faster is then W4A16.
TEST(Fp4Layer, ShapesWithoutATileSaySo) {
  FOURFOLD_NEEDS_GPU();
  KernelOptions options = emulated();
  options.max_tokens = 2;
  EXPECT_THROW(ExpertKernels(test_device(), test_store(), w4a4(9, 3, 272, 48), options), Error);
  const plan::moe::Problem p = with_activations(problem_of(9, 3, 272, 48), ActivationFormat::kAuto);
  TestLayer layer(p, 2, options);
  EXPECT_FALSE(layer.runs_fp4(2));
  layer.expect_right(Batch(p, 2, Pattern::kUniform, 1));
}

TEST(Fp4Layer, CardsWithoutTheMultiplicationSaySo) {
  FOURFOLD_NEEDS_GPU();
  if (plan::arch_of(test_device().gpu()).fp4_mma) GTEST_SKIP() << "this card has it";
  EXPECT_THROW(ExpertKernels(test_device(), test_store(), w4a4(4, 2, 256, 64), {.max_tokens = 1}), Error);
  // Asked for whichever is faster, there is no choice.
  const plan::moe::Problem p = with_activations(problem_of(4, 2, 256, 64), ActivationFormat::kAuto);
  TestLayer layer(p, 8);
  EXPECT_FALSE(layer.runs_fp4(8));
  layer.expect_right(Batch(p, 8, Pattern::kUniform, 1));
}

}  // namespace
}  // namespace fourfold::cuda
