// The CUDA backend: the demo model on a GPU against the CPU reference, in pieces of every kind, and twice the same
// bits.
#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <numeric>
#include <optional>
#include <vector>

#include "base/check.h"
#include "base/env.h"
#include "base/math.h"
#include "base/random.h"
#include "cpu/backend.h"
#include "cuda/backend/backend.h"
#include "jit/driver.h"
#include "jit/nvrtc.h"
#include "model/checkpoint.h"
#include "model/model.h"

namespace fourfold::cuda {
namespace {

constexpr int64_t kTokens = 200;
constexpr int64_t kPage = 64;

std::filesystem::path demo_directory() {
  const char* other = ::getenv("FOURFOLD_MODEL");
  return other != nullptr ? std::filesystem::path(other)
                          : std::filesystem::path(FOURFOLD_SOURCE_DIR) / "models" / "demo";
}

std::shared_ptr<model::Model> load(std::shared_ptr<ops::Backend> backend) {
  model::Checkpoint checkpoint(demo_directory());
  model::ModelOptions options;
  options.max_step_tokens = kTokens;
  options.max_logit_rows = kTokens;
  return model::load_model(checkpoint, std::move(backend), options);
}

std::shared_ptr<model::Model> reference() {
  static const std::shared_ptr<model::Model> model = [] {
    cpu::CpuOptions options;
    options.isa = cpu::Isa::kReference;
    return load(cpu::make_backend(options));
  }();
  return model;
}

// How the model runs: launches that overlap, keys and values as e4m3, a card whose kernels run instead of this one's.
struct Way {
  const char* name;
  bool overlap = true;
  bool fp8_cache = false;
  const char* emulate = "";
};
void PrintTo(const Way& way, std::ostream* out) { *out << way.name; }

std::shared_ptr<model::Model> on_gpu(const Way& way) {
  static std::map<std::string, std::shared_ptr<model::Model>> models;
  std::shared_ptr<model::Model>& model = models[way.name];
  if (model == nullptr) {
    CudaOptions options;
    options.overlap = way.overlap;
    options.fp8_cache = way.fp8_cache;
    options.emulate = way.emulate;
    model = load(make_backend(options));
  }
  return model;
}

// Logits of every token, computed in pieces of those sizes, taken in turns. `beside`: as many other sequences of one
// token each are in every step.
std::vector<float> logits_of(model::Model& model, const std::vector<int32_t>& tokens, std::vector<int64_t> pieces,
                             int beside = 0) {
  const auto vocabulary = static_cast<size_t>(model.config().vocabulary);
  const int64_t pages = ceil_div(static_cast<int64_t>(tokens.size()), kPage);
  model::Caches caches = model.make_caches(pages + beside, kPage, 1 + beside);
  std::vector<int32_t> table(static_cast<size_t>(pages));
  std::iota(table.rbegin(), table.rend(), 0);
  std::vector<std::vector<int32_t>> other_tables;
  for (int i = 0; i < beside; ++i) other_tables.push_back({static_cast<int32_t>(pages) + i});
  std::vector<float> all(tokens.size() * vocabulary);
  size_t turn = 0;
  for (size_t begin = 0; begin < tokens.size(); ++turn) {
    const size_t count = std::min(static_cast<size_t>(pieces[turn % pieces.size()]), tokens.size() - begin);
    std::vector<ops::Sequence> sequences;
    std::vector<int32_t> ids;
    for (int i = 0; i < beside; ++i) {
      ops::Sequence s;
      s.first = i;
      s.count = 1;
      s.position = static_cast<int32_t>(turn % kPage);
      s.state_in = 1 + i;
      s.pages = other_tables[static_cast<size_t>(i)];
      sequences.push_back(s);
      ids.push_back(static_cast<int32_t>(5 + i));
    }
    ops::Sequence s;
    s.first = beside;
    s.count = static_cast<int32_t>(count);
    s.position = static_cast<int32_t>(begin);
    s.pages = table;
    sequences.push_back(s);
    ids.insert(ids.end(), tokens.begin() + static_cast<long>(begin), tokens.begin() + static_cast<long>(begin + count));
    std::vector<int32_t> rows(count);
    std::iota(rows.begin(), rows.end(), beside);
    model.forward({ids, sequences, rows}, caches);
    model.backend().read(model.logits(), std::span(all).subspan(begin * vocabulary, count * vocabulary));
    begin += count;
  }
  return all;
}

// Some random tokens, and what the model makes of them: text that it knows.
const std::vector<int32_t>& text() {
  static const std::vector<int32_t> tokens = [] {
    Random random(3);
    std::vector<int32_t> ids;
    for (int i = 0; i < 24; ++i) ids.push_back(static_cast<int32_t>(random.below(2000)));
    model::Model& model = *reference();
    model::Caches caches = model.make_caches(ceil_div(kTokens, kPage), kPage, 1);
    std::vector<int32_t> table(static_cast<size_t>(ceil_div(kTokens, kPage)));
    std::iota(table.begin(), table.end(), 0);
    std::vector<float> row(static_cast<size_t>(model.config().vocabulary));
    int32_t done = 0;
    while (static_cast<int64_t>(ids.size()) < kTokens) {
      ops::Sequence s;
      s.count = static_cast<int32_t>(ids.size()) - done;
      s.position = done;
      s.pages = table;
      const std::vector<int32_t> last = {s.count - 1};
      const auto from = std::span(std::as_const(ids)).subspan(static_cast<size_t>(done));
      model.forward({from, std::span(&s, 1), last}, caches);
      model.backend().read(model.logits(), row);
      done = static_cast<int32_t>(ids.size());
      ids.push_back(static_cast<int32_t>(std::max_element(row.begin(), row.end()) - row.begin()));
    }
    return ids;
  }();
  return tokens;
}

struct Difference {
  double mean_kl = 0, worst_kl = 0;
  int64_t other_choices = 0;  // though the gap was larger than what may be lost
};

// `may_change`: logits so close to each other may change places.
Difference compare(const std::vector<float>& got, const std::vector<float>& want, size_t vocabulary, float may_change) {
  Difference d;
  const size_t rows = want.size() / vocabulary;
  for (size_t t = 0; t < rows; ++t) {
    const float *p = &want[t * vocabulary], *q = &got[t * vocabulary];
    const auto log_sum = [&](const float* x) {
      const double most = *std::max_element(x, x + vocabulary);
      double sum = 0;
      for (size_t i = 0; i < vocabulary; ++i) sum += std::exp(static_cast<double>(x[i]) - most);
      return most + std::log(sum);
    };
    const double zp = log_sum(p), zq = log_sum(q);
    double kl = 0;
    for (size_t i = 0; i < vocabulary; ++i) {
      const double lp = p[i] - zp;
      kl += std::exp(lp) * (lp - (q[i] - zq));
    }
    if (!std::isfinite(kl)) kl = 1e9;
    d.mean_kl += kl / static_cast<double>(rows);
    d.worst_kl = std::max(d.worst_kl, kl);
    std::vector<float> sorted(p, p + vocabulary);
    std::nth_element(sorted.begin(), sorted.begin() + 1, sorted.end(), std::greater<>());
    const float gap = *std::max_element(p, p + vocabulary) - sorted[1];
    if (gap > may_change && std::max_element(p, p + vocabulary) - p != std::max_element(q, q + vocabulary) - q) {
      ++d.other_choices;
    }
  }
  return d;
}

class DemoModel : public testing::TestWithParam<Way> {
 protected:
  void SetUp() override {
    std::string why;
    if (jit::Driver::find(&why) == nullptr) GTEST_SKIP() << "no CUDA device on this machine" << why;
    if (jit::Nvrtc::find(&why) == nullptr) GTEST_SKIP() << "no NVRTC on this machine" << why;
    const int major = jit::Driver::get().device(0).major;
    if (*GetParam().emulate != 0 && major != 9) GTEST_SKIP() << "no Hopper card, which has all that others have";
  }
};

TEST_P(DemoModel, HasTheReferencesLogitsInEveryKindOfPiece) {
  const auto vocabulary = static_cast<size_t>(reference()->config().vocabulary);
  static const std::vector<float> want = logits_of(*reference(), text(), {kTokens});
  // The reference keeps keys and values as they are; e4m3 has three bits behind the first one, and logits of the demo
  // model's least certain tokens move by up to 0.3.
  const float may_change = GetParam().fp8_cache ? 0.5f : 0.05f;
  struct Case {
    const char* name;
    std::vector<int64_t> pieces;
    int beside;
  };
  for (const Case& c : {Case{"token by token", {1}, 0}, Case{"up to 16", {16, 5, 2, 9}, 0}, Case{"all", {kTokens}, 0},
                        Case{"chunks", {70, 1, 33}, 0}, Case{"beside others", {1, 40, 6}, 3}}) {
    const Difference d =
        compare(logits_of(*on_gpu(GetParam()), text(), c.pieces, c.beside), want, vocabulary, may_change);
    std::printf("%s: mean KL %.2e, worst %.2e, %ld other choices\n", c.name, d.mean_kl, d.worst_kl,
                static_cast<long>(d.other_choices));
    EXPECT_LT(d.mean_kl, 1e-3) << c.name;
    EXPECT_EQ(d.other_choices, 0) << c.name;
  }
}

TEST_P(DemoModel, TwoRunsHaveTheSameBits) {
  for (const std::vector<int64_t>& pieces : {std::vector<int64_t>{1}, {50, 7, 1}}) {
    EXPECT_EQ(logits_of(*on_gpu(GetParam()), text(), pieces, 2), logits_of(*on_gpu(GetParam()), text(), pieces, 2));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Launches, DemoModel,
    testing::Values(Way{.name = "Overlapped"}, Way{.name = "OneByOne", .overlap = false},
                    Way{.name = "AsRtxPro6000", .emulate = "rtx-pro-6000"},
                    Way{.name = "AsRtxPro6000Fp8Cache", .fp8_cache = true, .emulate = "rtx-pro-6000"},
                    Way{.name = "AsA100", .overlap = false, .emulate = "a100"}),
    [](const auto& parameter) { return parameter.param.name; });

}  // namespace
}  // namespace fourfold::cuda
