// Whole expert layers as the launcher launches them, without a card: plans, self-test, routing, both products, sums.
#include <gtest/gtest.h>

#include "cuda/moe/layer.h"
#include "cuda/testing.h"
#include "hostcuda/problems.h"
#include "hostcuda/testing.h"

namespace fourfold::hostcuda {
namespace {

using cuda::Buffer;

struct LayerCase {
  const char* name;
  size_t index;  // of expert_cases()
};
void PrintTo(const LayerCase& c, std::ostream* out) { *out << c.name; }

// Every token chooses the slices of the shared expert.
void add_slices(cuda::Batch& batch, const plan::moe::Problem& p) {
  std::vector<int> ids;
  std::vector<float> weights;
  for (size_t i = 0; i < batch.ids.size(); ++i) {
    ids.push_back(batch.ids[i]);
    weights.push_back(batch.weights[i]);
    if ((i + 1) % static_cast<size_t>(p.top_k) != 0) continue;
    for (int64_t slice = 0; slice < p.shared_slices(); ++slice) {
      ids.push_back(static_cast<int>(p.experts + slice));
      weights.push_back(0.5f);
    }
  }
  batch.ids = std::move(ids);
  batch.weights = std::move(weights);
}

class HostLayer : public testing::TestWithParam<LayerCase> {};

TEST_P(HostLayer, PassesItsSelfTestAndIsRightForEveryBatch) {
  if (!executor::Device::checks_plain_accesses()) GTEST_SKIP() << "sanitizers see the kernels' accesses here";
  const ExpertCase c = expert_cases()[GetParam().index];
  install(c.card);
  {
    const plan::moe::Problem& p = c.problem;
    const cuda::Device device;
    const cuda::Stream stream(device);
    jit::KernelStore store(kernel_store());
    cuda::KernelOptions options;
    options.max_tokens = c.most_tokens;
    if (!c.emulate.empty()) options.load.emulate = &plan::find_gpu(c.emulate);
    const cuda::ExpertKernels kernels(device, store, p, options);
    EXPECT_EQ(cuda::fallback_buckets(), 0);
    const cuda::ExpertWorkspace workspace(kernels.context(), c.most_tokens);
    cuda::ExpertWeights weights(kernels.context());
    const cuda::RandomExperts host(p, p.all_experts(), 5);
    weights.upload(stream, 0, host.experts);
    for (int64_t tokens = 1; tokens <= c.most_tokens; tokens = tokens < 8 ? tokens * 2 : tokens * 2 + 1) {
      cuda::Batch batch(p, tokens, tokens % 2 == 0 ? cuda::Pattern::kDuplicates : cuda::Pattern::kUniform, 7);
      add_slices(batch, p);
      const auto n = static_cast<size_t>(tokens * p.hidden);
      Buffer x(device, n * 2, "x"), ids(device, batch.ids.size() * 4, "ids"),
          router(device, batch.weights.size() * 4, "weights"), out(device, n * 2, "out");
      x.upload(stream, batch.x);
      ids.upload(stream, batch.ids);
      router.upload(stream, batch.weights);
      cuda::ExpertLayer(kernels, workspace, weights)
          .run(stream, {x.address(), ids.address(), router.address(), out.address(), tokens});
      const std::vector<uint16_t> got = out.download<uint16_t>(stream, n);
      std::vector<int64_t> all(static_cast<size_t>(tokens));
      for (int64_t t = 0; t < tokens; ++t) all[static_cast<size_t>(t)] = t;
      const bool fp4 = kernels.bucket(tokens).pair_for(weights).fp4();
      EXPECT_EQ(fp4, p.activations == plan::moe::ActivationFormat::kNvfp4);
      const std::vector<float> want = cuda::reference_layer(p, host.experts, batch.x, batch.ids, batch.weights, all, 0,
                                                            fp4 ? weights.input_scales() : std::nullopt);
      double error = 0, norm = 0;
      for (size_t i = 0; i < n; ++i) {
        const double difference = nvfp4::bf16_to_float(got[i]) - want[i];
        error += difference * difference;
        norm += static_cast<double>(want[i]) * want[i];
      }
      // A value of h at the border between two codes may fall to either side.
      EXPECT_LE(std::sqrt(error), (fp4 ? 2e-2 : 5e-3) * std::sqrt(norm)) << tokens << " tokens";
    }
  }
  EXPECT_EQ(live(), Live{});
}

INSTANTIATE_TEST_SUITE_P(Cards, HostLayer,
                         testing::Values(LayerCase{"Hopper", 0}, LayerCase{"Blackwell", 3}, LayerCase{"Ampere", 4},
                                         LayerCase{"EmulatedBlackwell", 5}),
                         [](const auto& parameter) { return parameter.param.name; });

}  // namespace
}  // namespace fourfold::hostcuda
