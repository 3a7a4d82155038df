// The expert layer on a GPU against the reference.
#include "testing.h"

namespace fourfold::cuda {
namespace {

// The shapes that models have, with fewer experts.
struct Shape {
  const char* name;
  int64_t experts, top_k, hidden, intermediate;
};
class Shapes : public testing::TestWithParam<Shape> {};
void PrintTo(const Shape& s, std::ostream* out) { *out << s.name; }

TEST_P(Shapes, EveryTokenCountAndRouting) {
  FOURFOLD_NEEDS_GPU();
  const Shape& s = GetParam();
  TestLayer layer(problem_of(s.experts, s.top_k, s.hidden, s.intermediate), 2048);
  uint64_t seed = 1;
  for (const int64_t tokens : {1, 2, 7, 8, 9, 63, 300, 2000}) {
    for (const Pattern pattern : {Pattern::kUniform, Pattern::kHoles, Pattern::kDuplicates, Pattern::kPowerLaw}) {
      if (tokens == 2000 && pattern != Pattern::kHoles) continue;
      SCOPED_TRACE(testing::Message() << tokens << " tokens, pattern " << static_cast<int>(pattern));
      layer.expect_right(Batch(layer.kernels.problem(), tokens, pattern, ++seed), 8);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Expert, Shapes,
                         testing::Values(Shape{"e397", 24, 10, 4096, 1024}, Shape{"e122", 16, 8, 3072, 1024},
                                         Shape{"e35", 32, 8, 2048, 512}, Shape{"i640", 24, 10, 2560, 640},
                                         Shape{"i320", 24, 10, 2560, 320}, Shape{"i2048", 12, 8, 4096, 2048},
                                         Shape{"i1856", 12, 6, 2688, 1856}, Shape{"i704", 16, 8, 2816, 704},
                                         Shape{"padded", 9, 3, 272, 48}, Shape{"one", 1, 1, 512, 256}),
                         [](const auto& parameter) { return std::string(parameter.param.name); });

TEST(Layer, SquaredReluWithoutAGate) {
  FOURFOLD_NEEDS_GPU();
  plan::moe::Problem p = problem_of(12, 6, 2688, 1856);
  p.activation = plan::moe::Activation::kRelu2;
  TestLayer layer(p, 2048, {}, 6);
  for (const int64_t tokens : {1, 8, 63, 300, 2000}) {
    SCOPED_TRACE(testing::Message() << tokens << " tokens");
    layer.expect_right(Batch(p, tokens, Pattern::kHoles, static_cast<uint64_t>(tokens)), 8);
  }
}

TEST(Layer, EveryTopKUpTo16) {
  FOURFOLD_NEEDS_GPU();
  for (int64_t top_k = 1; top_k <= 16; ++top_k) {
    TestLayer layer(problem_of(20, top_k, 512, 128), 64);
    for (const int64_t tokens : {1, 3, 8, 40}) {
      SCOPED_TRACE(testing::Message() << "top " << top_k << ", " << tokens << " tokens");
      layer.expect_right(Batch(layer.kernels.problem(), tokens, Pattern::kHoles, static_cast<uint64_t>(top_k)));
    }
  }
}

TEST(Layer, NoTokensNoExpertsAndAllTokensToOneExpert) {
  FOURFOLD_NEEDS_GPU();
  TestLayer layer(problem_of(16, 4, 1024, 256), 16384);
  const Batch empty(layer.kernels.problem(), 0, Pattern::kUniform, 1);
  ExpertLayer(layer.kernels, layer.workspace, layer.weights).run(layer.stream, {});
  for (const int64_t tokens : {1, 8, 300, 16384}) {
    SCOPED_TRACE(testing::Message() << tokens << " tokens");
    layer.expect_right(Batch(layer.kernels.problem(), tokens, Pattern::kOneExpert, 5));
    // No token has an expert: zeros everywhere, also where the hidden state is NaN.
    for (const uint16_t v : layer.run(Batch(layer.kernels.problem(), tokens, Pattern::kNone, 6))) {
      ASSERT_EQ(v & 0x7fff, 0);
    }
  }
}

TEST(Layer, SixteenThousandTokens) {
  FOURFOLD_NEEDS_GPU();
  TestLayer layer(problem_of(32, 8, 2048, 512), 16384);
  layer.expect_right(Batch(layer.kernels.problem(), 16384, Pattern::kHoles, 4));
  layer.expect_right(Batch(layer.kernels.problem(), 16383, Pattern::kPowerLaw, 5));
}

TEST(Layer, TwoRunsAreBitwiseEqual) {
  FOURFOLD_NEEDS_GPU();
  TestLayer layer(problem_of(32, 8, 2048, 512), 1024);
  for (const int64_t tokens : {1, 5, 8, 64, 1000}) {
    const Batch batch(layer.kernels.problem(), tokens, Pattern::kPowerLaw, 77);
    const auto first = layer.run(batch);
    for (int i = 0; i < 5; ++i) EXPECT_EQ(layer.run(batch), first) << tokens;
  }
}

TEST(Layer, RunsInAGraph) {
  FOURFOLD_NEEDS_GPU();
  TestLayer layer(problem_of(32, 8, 2048, 512), 1024);
  const int64_t hidden = 2048;
  for (const int64_t tokens : {1, 64, 1000}) {
    // Captured once; other data of the same size later, as a server does.
    const auto n = static_cast<uint64_t>(tokens * hidden) * 2;
    Buffer x(test_device(), n, "x"), ids(test_device(), static_cast<uint64_t>(tokens) * 8 * 4, "ids"),
        router(test_device(), static_cast<uint64_t>(tokens) * 8 * 4, "weights"), out(test_device(), n, "out");
    const ExpertLayer run(layer.kernels, layer.workspace, layer.weights);
    const Graph graph(layer.stream, [&] {
      for (int i = 0; i < 3; ++i) {
        run.run(layer.stream, {x.address(), ids.address(), router.address(), out.address(), tokens});
      }
    });
    for (uint64_t seed = 1; seed < 4; ++seed) {
      const Batch batch(layer.kernels.problem(), tokens, Pattern::kUniform, seed);
      x.upload(layer.stream, batch.x);
      ids.upload(layer.stream, batch.ids);
      router.upload(layer.stream, batch.weights);
      out.fill(layer.stream, 0xff);
      graph.launch(layer.stream);
      EXPECT_EQ(out.download<uint16_t>(layer.stream, static_cast<size_t>(tokens * hidden)), layer.run(batch)) << tokens;
    }
  }
}

TEST(Layer, MoreThanTwoToThe31Elements) {
  FOURFOLD_NEEDS_GPU();
  {
    // Weights: 1024 x 2048 x 1088 = 2.28e9 elements in each matrix.
    TestLayer layer(problem_of(1024, 8, 2048, 1088), 300, {}, 5);
    Batch batch(layer.kernels.problem(), 300, Pattern::kUniform, 9);
    for (size_t i = 0; i < batch.ids.size(); i += 2) batch.ids[i] = 1023 - static_cast<int>(i / 2 % 8);
    layer.expect_right(batch);
    batch = Batch(layer.kernels.problem(), 2, Pattern::kUniform, 9);
    for (size_t i = 0; i < batch.ids.size(); ++i) batch.ids[i] = 1023 - static_cast<int>(i);
    layer.expect_right(batch);
  }
  // Rows to be summed: 16384 x 16 x 8448 = 2.2e9.
  TestLayer layer(problem_of(16, 16, 8448, 64), 16384);
  layer.expect_right(Batch(layer.kernels.problem(), 16384, Pattern::kUniform, 10));
}

void expect_a_shared_expert_right(plan::moe::ActivationFormat activations, const KernelOptions& options) {
  plan::moe::Problem p = with_activations(problem_of(12, 3, 512, 128), activations);
  p.shared = plan::moe::SharedExpert::kNvfp4;
  p.shared_intermediate = 256;
  TestLayer layer(p, 64, options);
  // Another 2 x 128 wide expert, cut in two.
  plan::moe::Problem wide = p;
  wide.intermediate = 256;
  const RandomExperts shared(wide, 1, 5);
  const auto slices = shared_slices(shared.experts[0], 2, p);
  layer.weights.upload(layer.stream, 12, slices);
  // NVFP4: the uncut expert's blocks of 16 are those of its slices, and so is its input scale.
  const bool fp4 = activations == plan::moe::ActivationFormat::kNvfp4;
  const auto& input_scales = layer.weights.input_scales();
  std::optional<nvfp4::LayerInputScales> dense_scales = input_scales;
  if (fp4) dense_scales->down = {input_scales->down[12]};
  const double tolerance = fp4 ? 2e-2 : 5e-3;
  for (const int64_t tokens : {1, 8, 50}) {
    Batch routed(problem_of(12, 3, 512, 128), tokens, Pattern::kUniform, 2);
    std::vector<float> gates;
    Random random(4);
    for (int64_t t = 0; t < tokens; ++t) gates.push_back(static_cast<float>(random.uniform(0.1, 0.9)));
    const auto upload = [&](const auto& values) {
      Buffer b(test_device(), values.size() * 4, "test");
      b.upload(layer.stream, values);
      return b;
    };
    const Buffer ids = upload(routed.ids), weights = upload(routed.weights), gate = upload(gates);
    const auto picks = static_cast<size_t>(tokens * 5);
    const Buffer all_ids(test_device(), picks * 4, "test"), all_weights(test_device(), picks * 4, "test");
    append_shared(layer.stream, layer.kernels.context(), ids.address(), weights.address(), gate.address(), tokens,
                  all_ids.address(), all_weights.address());
    Batch all = routed;
    all.ids = all_ids.download<int>(layer.stream, picks);
    all.weights = all_weights.download<float>(layer.stream, picks);
    for (int64_t t = 0; t < tokens; ++t) {
      EXPECT_EQ(all.ids[static_cast<size_t>(t * 5 + 3)], 12);
      EXPECT_EQ(all.ids[static_cast<size_t>(t * 5 + 4)], 13);
      EXPECT_EQ(all.weights[static_cast<size_t>(t * 5 + 4)], gates[static_cast<size_t>(t)]);
    }
    const auto got = layer.run(all);
    // The reference: the routed layer, and the uncut shared expert times its gate.
    std::vector<int64_t> samples;
    for (int64_t t = 0; t < tokens; ++t) samples.push_back(t);
    plan::moe::Problem plain = problem_of(12, 3, 512, 128), dense = problem_of(1, 1, 512, 256);
    auto want =
        reference_layer(plain, layer.host.experts, routed.x, routed.ids, routed.weights, samples, 0, input_scales);
    const auto beside =
        reference_layer(dense, shared.experts, routed.x, std::vector<int>(static_cast<size_t>(tokens), 0), gates,
                        samples, 0, dense_scales);
    double error = 0, norm = 0;
    for (size_t i = 0; i < want.size(); ++i) {
      const double w = want[i] + beside[i], g = nvfp4::bf16_to_float(got[i]);
      error += (g - w) * (g - w);
      norm += w * w;
    }
    EXPECT_LE(std::sqrt(error), tolerance * std::sqrt(norm)) << tokens;
  }
}

TEST(Layer, ASharedExpertRunsAsMoreExperts) {
  FOURFOLD_NEEDS_GPU();
  expect_a_shared_expert_right(plan::moe::ActivationFormat::kBf16, {});
}

TEST(Fp4Layer, ASharedExpertRunsAsMoreExperts) {
  FOURFOLD_NEEDS_GPU();
  expect_a_shared_expert_right(plan::moe::ActivationFormat::kNvfp4, emulated());
}

TEST(Layer, BadArgumentsAreErrors) {
  FOURFOLD_NEEDS_GPU();
  TestLayer layer(problem_of(4, 2, 256, 64), 16);
  const ExpertLayer run(layer.kernels, layer.workspace, layer.weights);
  Buffer some(test_device(), 1 << 20, "test");
  const DeviceAddress a = some.address();
  EXPECT_THROW(run.run(layer.stream, {a, a, a, a, 17}), Error);
  EXPECT_THROW(run.run(layer.stream, {a, a, a, a, -1}), Error);
  EXPECT_THROW(run.run(layer.stream, {a + 2, a, a, a, 1}), Error);
  EXPECT_THROW(run.run(layer.stream, {a, 0, a, a, 1}), Error);
  EXPECT_THROW(layer.weights.upload(layer.stream, 3, std::span(layer.host.experts).subspan(0, 2)), Error);
  // A NaN scale and a tensor scale that is not finite are found, and the expert is named.
  auto bad = layer.host.experts;
  std::vector<uint8_t> scales(64 * 256 / 16, 0x38);
  scales[77] = 0x7f;
  bad[2].up.scales = scales.data();
  try {
    layer.weights.upload(layer.stream, 0, bad);
    FAIL() << "a NaN scale was taken";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("expert 2"), std::string::npos) << error.what();
  }
  bad = layer.host.experts;
  bad[1].down.tensor_scale = NAN;
  EXPECT_THROW(layer.weights.upload(layer.stream, 0, bad), Error);
}

TEST(Memory, AskingForTooMuchSaysHowMuchIsFree) {
  FOURFOLD_NEEDS_GPU();
  try {
    const Buffer buffer(test_device(), uint64_t{1} << 45, "everything");
    FAIL() << "32 TB were given";
  } catch (const Error& error) {
    const std::string what = error.what();
    EXPECT_NE(what.find("everything: 35184.372 GB asked for"), std::string::npos) << what;
    EXPECT_NE(what.find("GB free on"), std::string::npos) << what;
  }
}

}  // namespace
}  // namespace fourfold::cuda
