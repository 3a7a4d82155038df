// Loops that bound memory by going round several times: with bounds so small that they do, results are the same bits.
#include <gtest/gtest.h>

#include <cstring>

#include "op_harness.h"

namespace fourfold::test {
namespace {

using ops::Format;

std::shared_ptr<ops::Backend> backend_with(cpu::Isa isa, int64_t pass_entries, int64_t partial_floats) {
  cpu::CpuOptions options;
  options.isa = isa;
  options.threads = 3;
  if (pass_entries > 0) options.moe_pass_entries = pass_entries;
  if (partial_floats > 0) options.attention_partial_floats = partial_floats;
  return cpu::make_backend(options);
}

std::vector<float> run_moe(ops::Backend& on, int64_t rows, int64_t each) {
  auto& backend = dynamic_cast<cpu::CpuBackend&>(on);
  constexpr int64_t kExperts = 10, kHidden = 96, kWidth = 48;
  Random random(5);
  std::vector<std::shared_ptr<OwnedMatrix>> weights;
  for (int64_t e = 0; e < kExperts; ++e) {
    weights.push_back(random_matrix(random, Format::kNvfp4, kWidth, kHidden));
    weights.push_back(random_matrix(random, Format::kNvfp4, kWidth, kHidden));
    weights.push_back(random_matrix(random, Format::kNvfp4, kHidden, kWidth));
  }
  const auto at = [&](int64_t i) { return weights[static_cast<size_t>(i)]->source; };
  const auto experts = backend.load_experts(kExperts,
                                            [&](int64_t e) {
                                              return ops::ExpertSource{at(3 * e), at(3 * e + 1), at(3 * e + 2)};
                                            },
                                            {});
  const auto router = backend.load_matrix(std::vector{random_matrix(random, Format::kBf16, kExperts, kHidden)->source});
  ops::MoeParams params;
  params.router = router.get();
  params.experts = experts.get();
  params.top_k = 4;
  StepBatch step;
  step.tokens.assign(static_cast<size_t>(rows), 0);
  for (int64_t first = 0; first < rows; first += each) {
    ops::Sequence sequence;
    sequence.first = static_cast<int32_t>(first);
    sequence.count = static_cast<int32_t>(std::min(each, rows - first));
    step.sequences.push_back(sequence);
  }
  const Activations x(backend, random_values(random, rows * kHidden), rows, kHidden);
  const Activations out(backend, rows, kHidden);
  backend.begin_step(step.batch());
  backend.moe(params, x.tensor(), out.tensor());
  return out.values();
}

TEST(SecondRound, PassesOfTheExperts) {
  for (const cpu::Isa isa : fast_isas()) {
    for (const int64_t each : {4, 1000}) {  // rows of short sequences, and of one long one
      const std::vector<float> one = run_moe(*backend_with(isa, 0, 0), 61, each);
      for (const float value : one) ASSERT_TRUE(std::isfinite(value));
      // Several tokens a pass with a last one that is not full; one token a pass; less than one token.
      for (const int64_t entries : {4 * 7 + 3, 4, 1}) {
        EXPECT_EQ(one, run_moe(*backend_with(isa, entries, 0), 61, each)) << cpu::isa_name(isa) << ", " << entries;
      }
    }
  }
}

std::vector<float> run_attention(ops::Backend& on) {
  auto& backend = dynamic_cast<cpu::CpuBackend&>(on);
  constexpr int64_t kTokens = 1700, kPage = 16;
  ops::AttentionParams params;
  params.heads = 4;
  params.kv_heads = 1;
  params.head_dim = 40;
  params.rotary_dim = 8;
  params.rope_theta = 1e6f;
  params.scale = 0.16f;
  ops::KvCacheShape shape{1, 1, 40, (kTokens + kPage) / kPage, kPage};
  const auto cache = backend.make_kv_cache(shape);
  std::vector<int32_t> pages;
  for (int32_t page = 0; page < shape.pages; ++page) pages.push_back(page);
  Random random(6);
  std::vector<float> last;
  // A prompt, then one token and four more: few tiles, many splits.
  int64_t position = 0;
  for (const int64_t count : {kTokens - 5, int64_t{1}, int64_t{4}}) {
    StepBatch step;
    ops::Sequence sequence;
    sequence.count = static_cast<int32_t>(count);
    sequence.position = static_cast<int32_t>(position);
    sequence.pages = pages;
    step.sequences.push_back(sequence);
    step.tokens.assign(static_cast<size_t>(count), 0);
    const Activations q(backend, random_values(random, count * 160), count, 160);
    const Activations k(backend, random_values(random, count * 40), count, 40);
    const Activations v(backend, random_values(random, count * 40), count, 40);
    const Activations out(backend, count, 160);
    backend.begin_step(step.batch());
    backend.attention(params, q.tensor(), k.tensor(), v.tensor(), *cache, 0, out.tensor());
    const std::vector<float> y = out.values();
    if (position > 0) last.insert(last.end(), y.begin(), y.end());
    position += count;
  }
  return last;
}

TEST(SecondRound, WavesOfSplits) {
  for (const cpu::Isa isa : fast_isas()) {
    const std::vector<float> one = run_attention(*backend_with(isa, 0, 0));
    for (const float value : one) ASSERT_TRUE(std::isfinite(value));
    // One split a wave, and three of seven.
    const int64_t row_floats = 64 * (64 + 2);
    for (const int64_t floats : {int64_t{1}, 3 * row_floats}) {
      EXPECT_EQ(one, run_attention(*backend_with(isa, 0, floats))) << cpu::isa_name(isa) << ", " << floats;
    }
  }
}

}  // namespace
}  // namespace fourfold::test
