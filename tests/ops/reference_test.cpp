// The reference itself, against independent and even plainer computations in double.
#include "cpu/reference/reference.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

#include "base/check.h"
#include "cpu/host/routing.h"
#include "nvfp4/number.h"
#include "nvfp4/quantize.h"
#include "op_harness.h"
#include "ops/cost.h"

namespace fourfold::test {
namespace {

using ops::Format;

cpu::CpuBackend& reference() { return backend_of(cpu::Isa::kReference); }

StepBatch one_sequence(int64_t tokens, int64_t position = 0) {
  StepBatch step;
  step.tokens.assign(static_cast<size_t>(tokens), 0);
  ops::Sequence sequence;
  sequence.count = static_cast<int32_t>(tokens);
  sequence.position = static_cast<int32_t>(position);
  step.sequences.push_back(sequence);
  return step;
}

// ---- products

double element(const ops::MatrixSource& m, int64_t row, int64_t column) {
  const int64_t at = row * m.columns + column;
  switch (m.format) {
    case Format::kF32:
      return static_cast<double>(static_cast<const float*>(m.data)[at]);
    case Format::kBf16:
      return static_cast<double>(nvfp4::bf16_to_float(static_cast<const uint16_t*>(m.data)[at]));
    case Format::kF16:
      return static_cast<double>(nvfp4::f16_to_float(static_cast<const uint16_t*>(m.data)[at]));
    case Format::kFp8: {
      const int64_t across = (m.columns + m.scale_columns - 1) / m.scale_columns;
      return static_cast<double>(nvfp4::e4m3_to_float(static_cast<const uint8_t*>(m.data)[at])) *
             static_cast<double>(m.grid_scales[row / m.scale_rows * across + column / m.scale_columns]);
    }
    case Format::kNvfp4: {
      const uint8_t byte = static_cast<const uint8_t*>(m.data)[at / 2];
      const auto code = static_cast<uint8_t>(column % 2 == 0 ? byte & 15 : byte >> 4);
      return static_cast<double>(nvfp4::e2m1_to_float(code)) *
             static_cast<double>(nvfp4::e4m3_to_float(m.block_scales[at / 16])) * static_cast<double>(m.tensor_scale);
    }
  }
  return 0;
}

TEST(Reference, LinearIsTheDotProduct) {
  Random random(1);
  for (const Format format : {Format::kF32, Format::kBf16, Format::kF16, Format::kFp8, Format::kNvfp4}) {
    const auto first = random_matrix(random, format, 13, 320);
    const auto second = random_matrix(random, Format::kBf16, 4, 320);
    const auto matrix = reference().load_matrix(std::vector{first->source, second->source});
    EXPECT_EQ(matrix->bytes(), first->source.bytes() + second->source.bytes());
    const int64_t tokens = 3;
    const std::vector<float> x = random_values(random, tokens * 320);
    const Activations in(reference(), x, tokens, 320);
    const Activations out(reference(), tokens, 17);
    const StepBatch step = one_sequence(tokens);
    reference().begin_step(step.batch());
    reference().linear(in.tensor(), *matrix, out.tensor());
    const std::vector<float> y = out.values();
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t r = 0; r < 17; ++r) {
        double sum = 0;
        double size = 0;
        for (int64_t c = 0; c < 320; ++c) {
          const double term = static_cast<double>(x[static_cast<size_t>(t * 320 + c)]) *
                              (r < 13 ? element(first->source, r, c) : element(second->source, r - 13, c));
          sum += term;
          size += std::fabs(term);
        }
        EXPECT_NEAR(y[static_cast<size_t>(t * 17 + r)], sum, 4e-7 * size) << ops::format_name(format) << " row " << r;
      }
    }
  }
}

TEST(Reference, QuantisedActivationsFollowTheInputScale) {
  Random random(2);
  cpu::CpuBackend& backend = backend_of(cpu::Isa::kReference, true);
  auto first = random_matrix(random, Format::kNvfp4, 6, 64);
  auto second = random_matrix(random, Format::kNvfp4, 5, 64);
  auto third = random_matrix(random, Format::kNvfp4, 2, 64);
  first->source.input_scale = 0.002f;
  second->source.input_scale = 0.005f;
  third->source.input_scale = 0.0f;  // unusable: stays as it is
  const auto matrix = backend.load_matrix(std::vector{first->source, second->source, third->source});
  const std::vector<float> x = random_values(random, 64);
  const Activations in(backend, x, 1, 64);
  const Activations out(backend, 1, 13);
  const StepBatch step = one_sequence(1);
  backend.begin_step(step.batch());
  backend.linear(in.tensor(), *matrix, out.tensor());
  const std::vector<float> y = out.values();
  for (int64_t r = 0; r < 13; ++r) {
    const OwnedMatrix& part = r < 6 ? *first : r < 11 ? *second : *third;
    const int64_t row = r < 6 ? r : r < 11 ? r - 6 : r - 11;
    double sum = 0;
    for (int64_t block = 0; block < 4; ++block) {
      double largest = 0;
      for (int64_t i = 0; i < 16; ++i)
        largest = std::max(largest, std::fabs(static_cast<double>(x[static_cast<size_t>(16 * block + i)])));
      const float global = part.source.input_scale > 0 ? 1.0f / part.source.input_scale : 0.0f;
      const float scale =
          nvfp4::e4m3_to_float(nvfp4::float_to_e4m3(std::min(global * static_cast<float>(largest) / 6.0f, 448.0f)));
      for (int64_t i = 0; i < 16; ++i) {
        const float value = x[static_cast<size_t>(16 * block + i)];
        double used = static_cast<double>(value);
        if (global > 0) {
          used = static_cast<double>(nvfp4::e2m1_to_float(nvfp4::float_to_e2m1(value * global / scale))) *
                 static_cast<double>(scale) * static_cast<double>(part.source.input_scale);
        }
        sum += used * element(part.source, row, 16 * block + i);
      }
    }
    EXPECT_NEAR(y[static_cast<size_t>(r)], sum, 1e-5) << "row " << r;
  }
}

TEST(Reference, BadWeightsAreNamed) {
  Random random(3);
  const auto expect_error = [&](const ops::MatrixSource& source, const char* words) {
    try {
      reference().load_matrix(std::vector{source});
      FAIL() << "accepted, wanted an error with '" << words << "'";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find("layer.weight"), std::string::npos) << error.what();
    }
  };
  const auto good = random_matrix(random, Format::kNvfp4, 2, 32);
  ops::MatrixSource bad = good->source;
  bad.name = "layer.weight";
  bad.columns = 24;
  expect_error(bad, "multiple of 16");
  bad = good->source;
  bad.name = "layer.weight";
  bad.block_scales = nullptr;
  expect_error(bad, "without block scales");
  bad.data = nullptr;
  expect_error(bad, "no elements");
  bad.rows = 0;
  expect_error(bad, "0 x 32");
  const auto other = random_matrix(random, Format::kBf16, 2, 48);
  bad = other->source;
  bad.name = "layer.weight";
  EXPECT_THROW(reference().load_matrix(std::vector{good->source, bad}), Error);
}

// ---- experts

TEST(Sizes, StoredBytesAreThoseOfTheFormat) {
  ops::MatrixSource m;
  m.rows = 48;
  m.columns = 80;
  const auto bytes = [&](Format format) {
    m.format = format;
    return m.bytes();
  };
  EXPECT_EQ(bytes(Format::kF32), 48 * 80 * 4);
  EXPECT_EQ(bytes(Format::kBf16), 48 * 80 * 2);
  EXPECT_EQ(bytes(Format::kF16), 48 * 80 * 2);
  EXPECT_EQ(bytes(Format::kNvfp4), 48 * (40 + 5) + 4);  // codes, a scale for 16, one for all
  m.scale_rows = 32;
  m.scale_columns = 64;
  EXPECT_EQ(bytes(Format::kFp8), 48 * 80 + 2 * 2 * 4);
}

TEST(Sizes, TouchedExpertsAreThoseOfASimulation) {
  Random random(4);
  for (const int64_t tokens : {0, 1, 5, 40}) {
    constexpr int64_t kExperts = 24, kTopK = 3, kTrials = 4000;
    double touched = 0;
    for (int64_t trial = 0; trial < kTrials; ++trial) {
      std::set<uint64_t> all;
      for (int64_t t = 0; t < tokens; ++t) {
        std::set<uint64_t> own;
        while (static_cast<int64_t>(own.size()) < kTopK) own.insert(random.below(kExperts));
        all.merge(own);
      }
      touched += static_cast<double>(all.size());
    }
    EXPECT_NEAR(touched / kTrials, ops::expected_touched_experts(tokens, kTopK, kExperts), 0.15) << tokens;
  }
}

TEST(Routing, LargestFirstTiesByIndex) {
  const float logits[] = {1.0f, 3.0f, 2.0f, 3.0f, -1.0f, 2.0f};
  int32_t chosen[4];
  float weights[4];
  cpu::select_experts(logits, 6, 4, true, chosen, weights);
  EXPECT_EQ(chosen[0], 1);
  EXPECT_EQ(chosen[1], 3);
  EXPECT_EQ(chosen[2], 2);
  EXPECT_EQ(chosen[3], 5);
  const double e = std::exp(-1.0);
  EXPECT_NEAR(weights[0], 0.5 / (1.0 + e), 1e-7);
  EXPECT_NEAR(weights[3], 0.5 * e / (1.0 + e), 1e-7);
  double all = 0;
  for (const float logit : logits) all += std::exp(static_cast<double>(logit));
  cpu::select_experts(logits, 6, 4, false, chosen, weights);
  EXPECT_NEAR(weights[2], std::exp(2.0) / all, 1e-7);
}

TEST(Routing, AnyBitPatternGivesDistinctIndicesInRange) {
  Random random(4);
  const float special[] = {std::numeric_limits<float>::quiet_NaN(),
                           std::numeric_limits<float>::infinity(),
                           -std::numeric_limits<float>::infinity(),
                           0.0f,
                           -0.0f,
                           1e38f};
  for (int round = 0; round < 2000; ++round) {
    const auto experts = static_cast<int64_t>(1 + random.below(20));
    const auto top_k = static_cast<int64_t>(1 + random.below(static_cast<uint64_t>(experts)));
    std::vector<float> logits;
    bool nan = false;
    for (int64_t e = 0; e < experts; ++e) {
      logits.push_back(random.below(3) == 0 ? special[random.below(6)] : static_cast<float>(random.normal()));
      nan = nan || std::isnan(logits.back());
    }
    std::vector<int32_t> chosen(static_cast<size_t>(top_k), -1);
    std::vector<float> weights(static_cast<size_t>(top_k), -1.0f);
    cpu::select_experts(logits.data(), experts, top_k, round % 2 == 0, chosen.data(), weights.data());
    if (nan) {
      EXPECT_TRUE(std::isnan(weights[0]));
    }
    std::sort(chosen.begin(), chosen.end());
    EXPECT_GE(chosen.front(), 0);
    EXPECT_LT(chosen.back(), experts);
    EXPECT_EQ(std::adjacent_find(chosen.begin(), chosen.end()), chosen.end());
  }
}

TEST(Reference, NaNInTheRouterStaysVisibleAndLocal) {
  for (const cpu::Isa isa : cpu::supported_isas()) {
    cpu::CpuBackend& backend = backend_of(isa);
    Random random(5);
    std::vector<std::shared_ptr<OwnedMatrix>> weights;
    for (int i = 0; i < 12; ++i) weights.push_back(random_matrix(random, Format::kNvfp4, 32, 32));
    const auto experts = backend.load_experts(
        4,
        [&](int64_t e) {
          const auto at = static_cast<size_t>(3 * e);
          return ops::ExpertSource{weights[at]->source, weights[at + 1]->source, weights[at + 2]->source};
        },
        {});
    const auto router = random_matrix(random, Format::kBf16, 4, 32);
    const auto router_matrix = backend.load_matrix(std::vector{router->source});
    ops::MoeParams params;
    params.router = router_matrix.get();
    params.experts = experts.get();
    params.top_k = 2;
    std::vector<float> x = random_values(random, 3 * 32);
    x[32 + 5] = std::numeric_limits<float>::quiet_NaN();
    const Activations in(backend, x, 3, 32);
    const Activations out(backend, 3, 32);
    const StepBatch step = one_sequence(3);
    backend.begin_step(step.batch());
    backend.moe(params, in.tensor(), out.tensor());
    const std::vector<float> y = out.values();
    for (size_t i = 0; i < 32; ++i) {
      EXPECT_TRUE(std::isfinite(y[i])) << cpu::isa_name(isa);
      EXPECT_TRUE(std::isnan(y[32 + i])) << cpu::isa_name(isa);
      EXPECT_TRUE(std::isfinite(y[64 + i])) << cpu::isa_name(isa);
    }
  }
}

TEST(Reference, MoeIsTheWeightedSumOfExperts) {
  Random random(6);
  const int64_t hidden = 48;
  const int64_t width = 16;
  std::vector<std::shared_ptr<OwnedMatrix>> weights;
  for (int e = 0; e < 5; ++e) {
    weights.push_back(random_matrix(random, Format::kNvfp4, width, hidden, 0.3));
    weights.push_back(random_matrix(random, Format::kFp8, width, hidden));
    weights.push_back(random_matrix(random, Format::kBf16, hidden, width, 0.3));
  }
  const auto experts = reference().load_experts(
      5,
      [&](int64_t e) {
        const auto at = static_cast<size_t>(3 * e);
        return ops::ExpertSource{weights[at]->source, weights[at + 1]->source, weights[at + 2]->source};
      },
      {});
  const auto router = random_matrix(random, Format::kBf16, 5, hidden, 0.3);
  const auto shared_gate = random_matrix(random, Format::kBf16, 1, hidden, 0.3);
  const auto load = [&](const OwnedMatrix& m) { return reference().load_matrix(std::vector{m.source}); };
  const auto router_matrix = load(*router);
  const auto gate_matrix = load(*shared_gate);
  const auto shared_up = reference().load_matrix(std::vector{weights[0]->source, weights[1]->source});
  const auto shared_down = load(*weights[2]);
  ops::MoeParams params;
  params.router = router_matrix.get();
  params.experts = experts.get();
  params.top_k = 2;
  params.shared_gate_up = shared_up.get();
  params.shared_down = shared_down.get();
  params.shared_gate = gate_matrix.get();
  const std::vector<float> x = random_values(random, hidden);
  const Activations in(reference(), x, 1, hidden);
  const Activations out(reference(), 1, hidden);
  const StepBatch step = one_sequence(1);
  reference().begin_step(step.batch());
  reference().moe(params, in.tensor(), out.tensor());

  const auto times = [](const ops::MatrixSource& m, const std::vector<double>& v) {
    std::vector<double> y(static_cast<size_t>(m.rows));
    for (int64_t r = 0; r < m.rows; ++r) {
      for (int64_t c = 0; c < m.columns; ++c) y[static_cast<size_t>(r)] += element(m, r, c) * v[static_cast<size_t>(c)];
    }
    return y;
  };
  const std::vector<double> input(x.begin(), x.end());
  const auto expert = [&](size_t e) {
    std::vector<double> gate = times(weights[3 * e]->source, input);
    const std::vector<double> up = times(weights[3 * e + 1]->source, input);
    for (size_t i = 0; i < gate.size(); ++i) gate[i] = gate[i] / (1.0 + std::exp(-gate[i])) * up[i];
    return times(weights[3 * e + 2]->source, gate);
  };
  const std::vector<double> logits = times(router->source, input);
  size_t best = 0;
  size_t second = 0;
  for (size_t e = 1; e < 5; ++e) best = logits[e] > logits[best] ? e : best;
  second = best == 0 ? 1 : 0;
  for (size_t e = 0; e < 5; ++e) second = e != best && logits[e] > logits[second] ? e : second;
  const double w = 1.0 / (1.0 + std::exp(logits[second] - logits[best]));
  const double shared = 1.0 / (1.0 + std::exp(-times(shared_gate->source, input)[0]));
  const std::vector<double> a = expert(best);
  const std::vector<double> b = expert(second);
  const std::vector<double> c = expert(0);
  const std::vector<float> y = out.values();
  for (size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(y[i], w * a[i] + (1 - w) * b[i] + shared * c[i], 1e-5);
}

// ---- attention, without pages, chunks or cache

TEST(Reference, AttentionIsSoftmaxOfAllPairs) {
  Random random(7);
  const int64_t heads = 6;
  const int64_t kv_heads = 2;
  const int64_t dim = 24;
  const int64_t rotary = 12;
  const int64_t tokens = 29;
  ops::AttentionParams params;
  params.heads = heads;
  params.kv_heads = kv_heads;
  params.head_dim = dim;
  params.rotary_dim = rotary;
  params.rope_theta = 1e4f;
  params.scale = 0.2f;
  params.norm_eps = 1e-6f;
  params.gated = true;
  const std::vector<float> q_weight = random_values(random, dim);
  const std::vector<float> k_weight = random_values(random, dim);
  const ops::Vector q_norm = reference().load_vector(q_weight);
  const ops::Vector k_norm = reference().load_vector(k_weight);
  params.q_norm = &q_norm;
  params.k_norm = &k_norm;
  const std::vector<float> q = random_values(random, tokens * heads * 2 * dim);
  const std::vector<float> k = random_values(random, tokens * kv_heads * dim);
  const std::vector<float> v = random_values(random, tokens * kv_heads * dim);

  ops::KvCacheShape shape;
  shape.layers = 1;
  shape.kv_heads = kv_heads;
  shape.head_dim = dim;
  shape.pages = 12;
  shape.page_size = 5;
  const auto cache = reference().make_kv_cache(shape);
  const std::vector<int32_t> pages = {7, 0, 11, 3, 5, 4};
  std::vector<float> found;
  int64_t position = 0;
  for (const int64_t count : {10, 1, 18}) {
    const auto rows = [&](const std::vector<float>& all, int64_t cols) {
      return std::vector<float>(all.begin() + position * cols, all.begin() + (position + count) * cols);
    };
    StepBatch step = one_sequence(count, position);
    step.sequences[0].pages = pages;
    const Activations qt(reference(), rows(q, heads * 2 * dim), count, heads * 2 * dim);
    const Activations kt(reference(), rows(k, kv_heads * dim), count, kv_heads * dim);
    const Activations vt(reference(), rows(v, kv_heads * dim), count, kv_heads * dim);
    const Activations out(reference(), count, heads * dim);
    reference().begin_step(step.batch());
    reference().attention(params, qt.tensor(), kt.tensor(), vt.tensor(), *cache, 0, out.tensor());
    const std::vector<float> y = out.values();
    found.insert(found.end(), y.begin(), y.end());
    position += count;
  }

  const auto prepared = [&](const float* x, const std::vector<float>& weight, int64_t at) {
    double square = 0;
    for (int64_t i = 0; i < dim; ++i) square += static_cast<double>(x[i]) * static_cast<double>(x[i]);
    std::vector<double> y;
    for (int64_t i = 0; i < dim; ++i) {
      y.push_back(static_cast<double>(x[i]) / std::sqrt(square / dim + 1e-6) *
                  static_cast<double>(weight[static_cast<size_t>(i)]));
    }
    std::vector<double> z = y;
    for (size_t i = 0; i < rotary / 2; ++i) {
      const double angle = static_cast<double>(at) * std::pow(1e4, -2.0 * static_cast<double>(i) / rotary);
      z[i] = y[i] * std::cos(angle) - y[i + rotary / 2] * std::sin(angle);
      z[i + rotary / 2] = y[i + rotary / 2] * std::cos(angle) + y[i] * std::sin(angle);
    }
    return z;
  };
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t kv = h / 3;
      const float* head = q.data() + (t * heads + h) * 2 * dim;
      const std::vector<double> query = prepared(head, q_weight, t);
      std::vector<double> weights;
      double total = 0;
      for (int64_t j = 0; j <= t; ++j) {
        const std::vector<double> key = prepared(k.data() + (j * kv_heads + kv) * dim, k_weight, j);
        double score = 0;
        for (size_t i = 0; i < key.size(); ++i) score += query[i] * key[i];
        weights.push_back(std::exp(0.2 * score));
        total += weights.back();
      }
      for (int64_t i = 0; i < dim; ++i) {
        double y = 0;
        for (int64_t j = 0; j <= t; ++j) {
          y += weights[static_cast<size_t>(j)] / total *
               static_cast<double>(v[static_cast<size_t>((j * kv_heads + kv) * dim + i)]);
        }
        y /= 1.0 + std::exp(-static_cast<double>(head[dim + i]));
        EXPECT_NEAR(found[static_cast<size_t>((t * heads + h) * dim + i)], y, 3e-6) << "token " << t << " head " << h;
      }
    }
  }
}

// ---- Gated DeltaNet, from the equations of one token, without caches

TEST(Reference, DeltaNetFollowsTheEquations) {
  Random random(8);
  const int64_t key_heads = 2;
  const int64_t heads = 6;
  const int64_t dk = 10;
  const int64_t dv = 7;
  const int64_t taps = 4;
  const int64_t tokens = 23;
  const int64_t channels = 2 * key_heads * dk + heads * dv;
  const std::vector<float> conv = random_values(random, channels * taps, 0.6);
  const std::vector<float> a_log = random_values(random, heads);
  const std::vector<float> dt_bias = random_values(random, heads);
  const std::vector<float> norm = random_values(random, dv);
  const std::vector<float> u = random_values(random, tokens * channels);
  const std::vector<float> z = random_values(random, tokens * heads * dv);
  const std::vector<float> b = random_values(random, tokens * heads);
  std::vector<float> a = random_values(random, tokens * heads);
  a[3] = 40.0f;  // where softplus is linear
  ops::DeltaNetParams params;
  params.key_heads = key_heads;
  params.value_heads = heads;
  params.key_dim = dk;
  params.value_dim = dv;
  params.conv_taps = taps;
  params.norm_eps = 1e-6f;
  const ops::Vector conv_vector = reference().load_vector(conv);
  const ops::Vector a_vector = reference().load_vector(a_log);
  const ops::Vector dt_vector = reference().load_vector(dt_bias);
  const ops::Vector norm_vector = reference().load_vector(norm);
  params.conv = &conv_vector;
  params.a_log = &a_vector;
  params.dt_bias = &dt_vector;
  params.norm = &norm_vector;
  ops::StateCacheShape shape;
  shape.layers = 1;
  shape.slots = 3;
  shape.key_heads = key_heads;
  shape.value_heads = heads;
  shape.key_dim = dk;
  shape.value_dim = dv;
  shape.conv_taps = taps;
  const auto cache = reference().make_state_cache(shape);

  std::vector<float> found;
  int64_t position = 0;
  for (const int64_t count : {2, 1, 13, 7}) {
    const auto rows = [&](const std::vector<float>& all, int64_t cols) {
      const Activations x(reference(),
                          std::vector<float>(all.begin() + position * cols, all.begin() + (position + count) * cols),
                          count, cols);
      return x.values();
    };
    StepBatch step = one_sequence(count, position);
    step.sequences[0].state_in = 1;
    const int32_t slot = 1;
    step.sequences[0].state_out = std::span(&slot, 1);
    const Activations ut(reference(), rows(u, channels), count, channels);
    const Activations zt(reference(), rows(z, heads * dv), count, heads * dv);
    const Activations bt(reference(), rows(b, heads), count, heads);
    const Activations at(reference(), rows(a, heads), count, heads);
    const Activations out(reference(), count, heads * dv);
    reference().begin_step(step.batch());
    reference().delta_net(params, ut.tensor(), zt.tensor(), bt.tensor(), at.tensor(), *cache, 0, out.tensor());
    const std::vector<float> y = out.values();
    found.insert(found.end(), y.begin(), y.end());
    position += count;
  }

  // c[t][channel] after convolution and SiLU
  std::vector<double> c(static_cast<size_t>(tokens * channels));
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t ch = 0; ch < channels; ++ch) {
      double sum = 0;
      for (int64_t j = 0; j < taps; ++j) {
        const int64_t from = t - (taps - 1) + j;
        if (from >= 0)
          sum += static_cast<double>(conv[static_cast<size_t>(ch * taps + j)]) *
                 static_cast<double>(u[static_cast<size_t>(from * channels + ch)]);
      }
      c[static_cast<size_t>(t * channels + ch)] = sum / (1.0 + std::exp(-sum));
    }
  }
  for (int64_t h = 0; h < heads; ++h) {
    std::vector<std::vector<double>> state(static_cast<size_t>(dk), std::vector<double>(static_cast<size_t>(dv)));
    for (int64_t t = 0; t < tokens; ++t) {
      const double* row = c.data() + t * channels;
      std::vector<double> q(row + h / 3 * dk, row + (h / 3 + 1) * dk);
      std::vector<double> k(row + (key_heads + h / 3) * dk, row + (key_heads + h / 3 + 1) * dk);
      const std::vector<double> v(row + 2 * key_heads * dk + h * dv, row + 2 * key_heads * dk + (h + 1) * dv);
      const auto normalize = [](std::vector<double>& x, double scale) {
        double square = 1e-6;
        for (const double value : x) square += value * value;
        for (double& value : x) value *= scale / std::sqrt(square);
      };
      normalize(q, 1.0 / std::sqrt(10.0));
      normalize(k, 1.0);
      const auto at = static_cast<size_t>(t * heads + h);
      const double x = static_cast<double>(a[at]) + static_cast<double>(dt_bias[static_cast<size_t>(h)]);
      const double decay =
          std::exp(-std::exp(static_cast<double>(a_log[static_cast<size_t>(h)])) * std::log1p(std::exp(x)));
      const double beta = 1.0 / (1.0 + std::exp(-static_cast<double>(b[at])));
      std::vector<double> o(static_cast<size_t>(dv));
      for (size_t j = 0; j < o.size(); ++j) {
        double seen = 0;
        for (size_t i = 0; i < k.size(); ++i) seen += decay * state[i][j] * k[i];
        for (size_t i = 0; i < k.size(); ++i) {
          state[i][j] = decay * state[i][j] + k[i] * beta * (v[j] - seen);
          o[j] += q[i] * state[i][j];
        }
      }
      double square = 0;
      for (const double value : o) square += value * value;
      for (size_t j = 0; j < o.size(); ++j) {
        const double gate = static_cast<double>(z[at * static_cast<size_t>(dv) + j]);
        const double y =
            o[j] / std::sqrt(square / dv + 1e-6) * static_cast<double>(norm[j]) * gate / (1.0 + std::exp(-gate));
        EXPECT_NEAR(found[at * static_cast<size_t>(dv) + j], y, 2e-5) << "token " << t << " head " << h;
      }
    }
  }
}

}  // namespace
}  // namespace fourfold::test
