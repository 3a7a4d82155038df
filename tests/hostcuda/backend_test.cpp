// The CUDA backend without a card, on the host driver: whole models against the CPU reference, in pieces of every kind.
// Bounds as in tests/cuda/backend_test.cpp, which runs the same on a card.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "base/math.h"
#include "base/random.h"
#include "cpu/backend.h"
#include "hostcuda/testing.h"
#include "model/checkpoint.h"
#include "model/model.h"

namespace fourfold::hostcuda {
namespace {

constexpr int64_t kPage = 16;

std::shared_ptr<model::Model> load(std::shared_ptr<ops::Backend> backend) {
  model::Checkpoint checkpoint(std::filesystem::path(FOURFOLD_SOURCE_DIR) / "models" / "demo");
  model::ModelOptions options;
  options.max_step_tokens = 128;
  options.max_logit_rows = 128;
  return model::load_model(checkpoint, std::move(backend), options);
}

std::shared_ptr<model::Model> reference() {
  cpu::CpuOptions options;
  options.isa = cpu::Isa::kReference;
  return load(cpu::make_backend(options));
}

// A step: rows of each sequence.
using Step = std::vector<int>;

// Logits of every row of some sequences, computed in these steps; a sequence's tokens are random. The first step has at
// least as many sequences as any other one.
std::vector<float> logits_of(model::Model& model, const std::vector<Step>& steps) {
  const size_t count = steps.front().size();
  Random random(5);
  std::vector<std::vector<int32_t>> pages(count);
  std::vector<int32_t> positions(count, 0);
  int32_t next_page = 0;
  for (size_t i = 0; i < count; ++i) {
    int64_t length = 0;
    for (const Step& step : steps) length += step[i];
    for (int64_t p = 0; p < ceil_div(length, kPage); ++p) pages[i].push_back(next_page++);
    std::reverse(pages[i].begin(), pages[i].end());
  }
  model::Caches caches = model.make_caches(next_page, kPage, static_cast<int64_t>(count));
  std::vector<float> all;
  for (const Step& step : steps) {
    std::vector<int32_t> tokens, rows;
    std::vector<ops::Sequence> sequences;
    for (size_t i = 0; i < count; ++i) {
      if (step[i] == 0) continue;
      ops::Sequence s;
      s.first = static_cast<int32_t>(tokens.size());
      s.count = step[i];
      s.position = positions[i];
      s.state_in = static_cast<int32_t>(i);
      s.pages = pages[i];
      sequences.push_back(s);
      for (int t = 0; t < step[i]; ++t) tokens.push_back(static_cast<int32_t>(random.below(2000)));
      positions[i] += step[i];
    }
    rows.resize(tokens.size());
    std::iota(rows.begin(), rows.end(), 0);
    model.forward({tokens, sequences, rows}, caches);
    const size_t at = all.size();
    all.resize(at + tokens.size() * static_cast<size_t>(model.config().vocabulary));
    model.backend().read(model.logits(), std::span(all).subspan(at));
  }
  return all;
}

struct Difference {
  double mean_kl = 0;
  int64_t other_choices = 0;  // though the gap was over 0.05
};

Difference compare(const std::vector<float>& got, const std::vector<float>& want, size_t vocabulary) {
  Difference d;
  const size_t rows = want.size() / vocabulary;
  for (size_t t = 0; t < rows; ++t) {
    const float *p = &want[t * vocabulary], *q = &got[t * vocabulary];
    const auto log_sum = [&](const float* x) {
      const double most = *std::max_element(x, x + vocabulary);
      double sum = 0;
      for (size_t i = 0; i < vocabulary; ++i) sum += std::exp(x[i] - most);
      return most + std::log(sum);
    };
    const double zp = log_sum(p), zq = log_sum(q);
    double kl = 0;
    for (size_t i = 0; i < vocabulary; ++i) kl += std::exp(p[i] - zp) * ((p[i] - zp) - (q[i] - zq));
    d.mean_kl += (std::isfinite(kl) ? kl : 1e9) / static_cast<double>(rows);
    std::vector<float> sorted(p, p + vocabulary);
    std::nth_element(sorted.begin(), sorted.begin() + 1, sorted.end(), std::greater<>());
    const auto first = std::max_element(p, p + vocabulary);
    if (*first - sorted[1] > 0.05f && first - p != std::max_element(q, q + vocabulary) - q) ++d.other_choices;
  }
  return d;
}

struct Case {
  const char* name;
  std::vector<Step> steps;
  bool overlap = true;
};

class HostModel : public testing::TestWithParam<Case> {};

TEST_P(HostModel, HasTheReferencesLogits) {
  if (!executor::Device::checks_plain_accesses()) GTEST_SKIP() << "sanitizers see the kernels' accesses here";
  const Case& c = GetParam();
  const std::vector<float> want = logits_of(*reference(), c.steps);
  HostCard card;
  card.executor.seed = 3;
  card.executor.delivery = c.overlap ? executor::Delivery::kLate : executor::Delivery::kAtOnce;
  install(card);
  {
    const auto model = load(cuda_backend(c.overlap));
    const std::vector<float> got = logits_of(*model, c.steps);
    const Difference d = compare(got, want, static_cast<size_t>(model->config().vocabulary));
    RecordProperty("mean_kl", fmt::format("{:.2e}", d.mean_kl));
    std::printf("mean KL %.2e, %ld launches\n", d.mean_kl, static_cast<long>(calls(Call::kLaunch)));
    EXPECT_LT(d.mean_kl, 1e-3);
    EXPECT_EQ(d.other_choices, 0);
    EXPECT_EQ(got, logits_of(*model, c.steps)) << "two runs have other bits";
  }
  EXPECT_EQ(live(), Live{});
}

INSTANTIATE_TEST_SUITE_P(Pieces, HostModel,
                         testing::Values(Case{"Tokens", {{3}, {1}, {1}}}, Case{"Piece", {{20}, {1}}}),
                         [](const auto& parameter) { return parameter.param.name; });

}  // namespace
}  // namespace fourfold::hostcuda
