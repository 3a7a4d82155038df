// Shared by the tests of the GPU's expert layer: a visible skip where there is no GPU, random layers, and the
// comparison with the reference.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "base/random.h"
#include "base/temporary_directory.h"
#include "cuda/moe/kernels.h"
#include "cuda/moe/reference.h"
#include "nvfp4/number.h"

namespace fourfold::cuda {

// Skips, and says why, where no GPU can be used.
#define FOURFOLD_NEEDS_GPU()                                                                         \
  do {                                                                                               \
    std::string why;                                                                                 \
    if (jit::Driver::find(&why) == nullptr) GTEST_SKIP() << "no CUDA device on this machine" << why; \
    if (jit::Nvrtc::find(&why) == nullptr) GTEST_SKIP() << "no NVRTC on this machine" << why;        \
  } while (false)

// One device and one store of kernels for the whole test program.
inline const Device& test_device() {
  static const Device device;
  return device;
}
inline jit::KernelStore& test_store() {
  static const TemporaryDirectory directory;
  static jit::KernelStore store(directory.path());
  return store;
}

inline plan::moe::Problem problem_of(int64_t experts, int64_t top_k, int64_t hidden, int64_t intermediate) {
  plan::moe::Problem p;
  p.experts = experts;
  p.top_k = top_k;
  p.hidden = hidden;
  p.intermediate = intermediate;
  return p;
}

// NVFP4 activations on any card: the workstation card's plans within its shared memory, its multiplication emulated.
inline plan::moe::Problem with_activations(plan::moe::Problem p, plan::moe::ActivationFormat format) {
  p.activations = format;
  return p;
}
inline KernelOptions emulated() {
  KernelOptions options;
  options.load.emulate = &plan::find_gpu("rtx-pro-6000");
  return options;
}

// Random weights on the host. Only `distinct` experts are different: the others share their bytes.
struct RandomExperts {
  std::vector<std::vector<uint8_t>> bytes;
  std::vector<ExpertMatrices> experts;

  RandomExperts(const plan::moe::Problem& p, int64_t count, uint64_t seed, int64_t distinct = 16) {
    Random random(seed);
    const auto matrix = [&](int64_t rows, int64_t k) {
      std::vector<uint8_t> codes(static_cast<size_t>(rows * k / 2)), scales(static_cast<size_t>(rows * k / 16));
      for (uint8_t& c : codes) c = static_cast<uint8_t>(random.next());
      for (uint8_t& s : scales) s = static_cast<uint8_t>(random.below(127) | (random.below(64) == 0 ? 0x80 : 0));
      bytes.push_back(std::move(codes));
      bytes.push_back(std::move(scales));
      const float tensor = static_cast<float>(random.uniform(0.8, 1.2)) / (400.0f * std::sqrt(static_cast<float>(k)));
      return contiguous(bytes[bytes.size() - 2].data(), bytes.back().data(), tensor, k);
    };
    bytes.reserve(static_cast<size_t>(6 * distinct));
    for (int64_t e = 0; e < count; ++e) {
      if (e >= distinct) {
        experts.push_back(experts[static_cast<size_t>(e % distinct)]);
        continue;
      }
      ExpertMatrices m;
      if (p.gated()) m.gate = matrix(p.intermediate, p.hidden);
      m.up = matrix(p.intermediate, p.hidden);
      m.up.tensor_scale *= 2;
      m.down = matrix(p.hidden, p.intermediate);
      // x is quantised with the largest. h is about 1 to 10: one expert's is clipped, one's block scales are small, and
      // one has never been calibrated.
      constexpr float kInner[] = {12.0f / 2688, 2.0f / 2688, 100.0f / 2688, 0.0f};
      m.gate.input_scale = m.up.input_scale = e % 5 == 3 ? 0.0f : 4.5f / 2688 / static_cast<float>(e % 5 + 1);
      m.down.input_scale = kInner[e % 4];
      experts.push_back(m);
    }
  }
};

enum class Pattern { kUniform, kOneExpert, kHoles, kDuplicates, kPowerLaw, kNone };

struct Batch {
  int64_t tokens = 0;
  std::vector<uint16_t> x;
  std::vector<int> ids;
  std::vector<float> weights;

  Batch(const plan::moe::Problem& p, int64_t count, Pattern pattern, uint64_t seed) : tokens(count) {
    Random random(seed);
    const auto experts = static_cast<uint64_t>(p.experts);
    x.resize(static_cast<size_t>(count * p.hidden));
    // Normals from a table: sixteen thousand rows are many.
    std::vector<uint16_t> normals(4099);
    for (uint16_t& n : normals) n = nvfp4::float_to_bf16(static_cast<float>(random.normal()));
    for (uint16_t& v : x) v = normals[random.below(normals.size())];
    std::vector<int> all(static_cast<size_t>(p.experts));
    for (size_t e = 0; e < all.size(); ++e) all[e] = static_cast<int>(e);
    for (int64_t t = 0; t < count; ++t) {
      const bool padding = pattern == Pattern::kNone || (pattern == Pattern::kHoles && t % 7 == 3);
      if (padding) std::fill_n(x.begin() + t * p.hidden, p.hidden, uint16_t{0x7fc0});
      for (int64_t k = 0; k < p.top_k; ++k) {
        std::swap(all[static_cast<size_t>(k)],
                  all[static_cast<size_t>(k) + random.below(experts - static_cast<uint64_t>(k))]);
        int id = all[static_cast<size_t>(k)];
        switch (pattern) {
          case Pattern::kOneExpert:
            id = k == 0 ? static_cast<int>(3 % experts) : -1;
            break;
          case Pattern::kHoles:
            if (random.below(3) == 0)
              id = random.below(2) != 0 ? -1 : static_cast<int>(experts + random.below(1u << 30));
            if (padding) id = random.below(2) != 0 ? -1 : -2147483647 - 1;
            break;
          case Pattern::kDuplicates:
            if (random.below(2) != 0) id = all[0];
            break;
          case Pattern::kPowerLaw:
            id = static_cast<int>(std::pow(static_cast<double>(experts), random.uniform())) - 1;
            break;
          case Pattern::kNone:
            id = -1;
            break;
          case Pattern::kUniform:
            break;
        }
        ids.push_back(id);
        weights.push_back(static_cast<float>(random.uniform(0.02, 1.0)) / static_cast<float>(p.top_k));
      }
    }
  }
};

// A layer with its weights on the device.
struct TestLayer {
  RandomExperts host;
  ExpertKernels kernels;
  ExpertWorkspace workspace;
  ExpertWeights weights;
  Stream stream;

  TestLayer(const plan::moe::Problem& p, int64_t max_tokens, KernelOptions options = {}, int64_t distinct = 16)
      : host(p, p.all_experts(), 99, distinct),
        kernels(test_device(), test_store(), p,
                [&] {
                  options.max_tokens = max_tokens;
                  return options;
                }()),
        workspace(kernels.context(), max_tokens),
        weights(kernels.context()),
        stream(test_device()) {
    weights.upload(stream, 0, host.experts);
  }

  // Whether a batch of that size multiplies NVFP4 activations.
  bool runs_fp4(int64_t tokens) const { return kernels.bucket(tokens).pair_for(weights).fp4(); }

  // The output, poisoned before.
  std::vector<uint16_t> run(const Batch& batch) {
    const auto n = static_cast<size_t>(batch.tokens * kernels.problem().hidden);
    Buffer x(test_device(), n * 2, "x"), ids(test_device(), batch.ids.size() * 4, "ids"),
        router(test_device(), batch.weights.size() * 4, "weights"), out(test_device(), n * 2, "out");
    x.upload(stream, batch.x);
    ids.upload(stream, batch.ids);
    router.upload(stream, batch.weights);
    out.fill(stream, 0xff);
    ExpertLayer(kernels, workspace, weights)
        .run(stream, {x.address(), ids.address(), router.address(), out.address(), batch.tokens});
    return out.download<uint16_t>(stream, n);
  }

  // Relative error of some tokens' rows against the reference; checks that every element of all rows is finite.
  void expect_right(const Batch& batch, int64_t samples = 24) {
    const plan::moe::Problem& p = kernels.problem();
    const auto got = run(batch);
    int64_t not_finite = 0;
    for (const uint16_t v : got) not_finite += (v & 0x7f80) == 0x7f80;
    EXPECT_EQ(not_finite, 0);
    std::vector<int64_t> chosen;
    for (int64_t i = 0; i < std::min(samples, batch.tokens); ++i) {
      chosen.push_back(i * (batch.tokens - 1) / std::max<int64_t>(1, std::min(samples, batch.tokens) - 1));
    }
    const bool fp4 = runs_fp4(batch.tokens);
    const auto want = reference_layer(p, host.experts, batch.x, batch.ids, batch.weights, chosen, 0,
                                      fp4 ? weights.input_scales() : std::nullopt);
    // A value of h at the border between two codes may fall to either side.
    const double tolerance = fp4 ? 2e-2 : 5e-3;
    for (size_t s = 0; s < chosen.size(); ++s) {
      double error = 0, norm = 0;
      for (int64_t i = 0; i < p.hidden; ++i) {
        const double w = want[s * static_cast<size_t>(p.hidden) + static_cast<size_t>(i)];
        const double g = nvfp4::bf16_to_float(got[static_cast<size_t>(chosen[s] * p.hidden + i)]);
        error += (g - w) * (g - w);
        norm += w * w;
      }
      EXPECT_LE(std::sqrt(error), tolerance * std::sqrt(norm)) << "token " << chosen[s] << " of " << batch.tokens;
    }
  }
};

}  // namespace fourfold::cuda
