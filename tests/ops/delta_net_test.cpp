// The delta rule: a worked example, and the chunked forms against the recurrent one.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "cpu/kernels/kernels.h"
#include "cpu/memory/state_cache.h"
#include "cpu/reference/delta_rule.h"
#include "op_harness.h"

namespace fourfold::test {
namespace {

constexpr int64_t kPanel = cpu::HostStateCache::kPanel;

// One value head with everything that enters the rule.
struct Problem {
  int64_t tokens, key_dim, value_dim;
  std::vector<float> q, k, v, log_decay, beta, state;
  bool fresh = false;

  cpu::DeltaRule rule(std::vector<float>& s, std::vector<float>& out) const {
    s = state;
    out.assign(v.size(), 0.0f);
    return {tokens,   key_dim,          value_dim,   q.data(), k.data(),
            v.data(), log_decay.data(), beta.data(), s.data(), out.data()};
  }
};

void normalize(std::vector<float>& x, int64_t dim, double scale) {
  for (size_t row = 0; row < x.size(); row += static_cast<size_t>(dim)) {
    double square = 1e-6;
    for (int64_t i = 0; i < dim; ++i)
      square +=
          static_cast<double>(x[row + static_cast<size_t>(i)]) * static_cast<double>(x[row + static_cast<size_t>(i)]);
    for (int64_t i = 0; i < dim; ++i) {
      float& value = x[row + static_cast<size_t>(i)];
      value = static_cast<float>(static_cast<double>(value) * scale / std::sqrt(square));
    }
  }
}

Problem random_problem(uint64_t seed, int64_t tokens, int64_t key_dim, int64_t value_dim, double decay, bool fresh) {
  Random random(seed);
  Problem p{tokens, key_dim, value_dim, {}, {}, {}, {}, {}, {}, fresh};
  p.q = random_values(random, tokens * key_dim);
  p.k = random_values(random, tokens * key_dim);
  // Neighbouring keys alike, so that the triangular system matters.
  for (size_t i = static_cast<size_t>(key_dim); i < p.k.size(); ++i) p.k[i] += p.k[i - static_cast<size_t>(key_dim)];
  normalize(p.q, key_dim, 1.0 / std::sqrt(static_cast<double>(key_dim)));
  normalize(p.k, key_dim, 1.0);
  p.v = random_values(random, tokens * value_dim);
  for (int64_t t = 0; t < tokens; ++t) {
    p.log_decay.push_back(static_cast<float>(-decay * random.uniform()));
    p.beta.push_back(static_cast<float>(random.uniform()));
  }
  p.state = random_values(random, key_dim * value_dim);
  if (fresh) std::fill(p.state.begin(), p.state.end(), 0.0f);
  return p;
}

std::vector<float> to_panels(const std::vector<float>& state, int64_t key_dim, int64_t value_dim) {
  const int64_t panels = (value_dim + kPanel - 1) / kPanel;
  std::vector<float> out(static_cast<size_t>(panels * key_dim * kPanel), 0.0f);
  for (int64_t i = 0; i < key_dim; ++i) {
    for (int64_t j = 0; j < value_dim; ++j) {
      out[static_cast<size_t>((j / kPanel * key_dim + i) * kPanel + j % kPanel)] =
          state[static_cast<size_t>(i * value_dim + j)];
    }
  }
  return out;
}

std::vector<float> from_panels(const std::vector<float>& panels, int64_t key_dim, int64_t value_dim) {
  std::vector<float> out;
  for (int64_t i = 0; i < key_dim; ++i) {
    for (int64_t j = 0; j < value_dim; ++j) {
      out.push_back(panels[static_cast<size_t>((j / kPanel * key_dim + i) * kPanel + j % kPanel)]);
    }
  }
  return out;
}

enum class Form { kReferenceRecurrent, kReferenceChunked, kRecurrent, kChunked };

struct Answer {
  std::vector<float> out, state;
};

Answer solve(const Problem& p, Form form, cpu::Isa isa, int64_t chunk) {
  Answer answer;
  if (form == Form::kReferenceRecurrent || form == Form::kReferenceChunked) {
    const cpu::DeltaRule rule = p.rule(answer.state, answer.out);
    if (form == Form::kReferenceRecurrent) {
      cpu::delta_rule_recurrent(rule);
    } else {
      cpu::delta_rule_chunked(rule, chunk);
    }
    return answer;
  }
  const cpu::DeltaKernels& kernels = cpu::kernels_of(isa).delta;
  std::vector<float> state = to_panels(p.state, p.key_dim, p.value_dim);
  answer.out.assign(p.v.size(), NAN);
  // The kernels take rows of one tensor [q | k | v] and gates side by side.
  const int64_t stride = 2 * p.key_dim + p.value_dim;
  std::vector<float> rows;
  std::vector<float> gates;  // log decay, decay, beta
  for (int64_t t = 0; t < p.tokens; ++t) {
    rows.insert(rows.end(), p.q.begin() + t * p.key_dim, p.q.begin() + (t + 1) * p.key_dim);
    rows.insert(rows.end(), p.k.begin() + t * p.key_dim, p.k.begin() + (t + 1) * p.key_dim);
    rows.insert(rows.end(), p.v.begin() + t * p.value_dim, p.v.begin() + (t + 1) * p.value_dim);
    gates.push_back(p.log_decay[static_cast<size_t>(t)]);
    gates.push_back(std::exp(p.log_decay[static_cast<size_t>(t)]));
    gates.push_back(p.beta[static_cast<size_t>(t)]);
  }
  std::vector<float> scratch(static_cast<size_t>(cpu::chunk_scratch_floats(p.key_dim, p.value_dim)), NAN);
  const float* from = p.fresh ? nullptr : state.data();
  if (p.fresh) std::fill(state.begin(), state.end(), NAN);
  for (int64_t t = 0; t < p.tokens; t += chunk) {
    const int64_t n = std::min(chunk, p.tokens - t);
    const float* q = rows.data() + t * stride;
    const float* g = gates.data() + 3 * t;
    float* out = answer.out.data() + t * p.value_dim;
    if (form == Form::kRecurrent) {
      kernels.recur({.tokens = n,
                     .key_dim = p.key_dim,
                     .value_dim = p.value_dim,
                     .q = q,
                     .k = q + p.key_dim,
                     .v = q + 2 * p.key_dim,
                     .stride = stride,
                     .decay = g + 1,
                     .beta = g + 2,
                     .gate_stride = 3,
                     .state_in = from,
                     .updates_in = nullptr,
                     .updates = 0,
                     .state_out = state.data(),
                     .updates_out = nullptr,
                     .out = out,
                     .out_stride = p.value_dim,
                     .scratch = scratch.data()});
    } else {
      kernels.chunk(n, p.key_dim, p.value_dim, q, q + p.key_dim, q + 2 * p.key_dim, stride, g, g + 2, 3, from,
                    state.data(), out, p.value_dim, scratch.data());
    }
    from = state.data();
  }
  answer.state = from_panels(state, p.key_dim, p.value_dim);
  return answer;
}

std::vector<std::pair<Form, cpu::Isa>> all_forms() {
  std::vector<std::pair<Form, cpu::Isa>> forms = {{Form::kReferenceRecurrent, cpu::Isa::kReference},
                                                  {Form::kReferenceChunked, cpu::Isa::kReference}};
  for (const cpu::Isa isa : isas_with_own_loops()) {
    forms.push_back({Form::kRecurrent, isa});
    forms.push_back({Form::kChunked, isa});
  }
  return forms;
}

// Two tokens with key and value dimension 2, worked by hand from the equations of docs/cpu.md.
TEST(DeltaRule, WorkedExample) {
  Problem p{2,   2, 2, {1, 0, 0, 1}, {0.6f, 0.8f, 1, 0}, {1, 2, 3, -1}, {-0.5f, -0.25f}, {0.5f, 0.75f}, {0, 0, 0, 0},
            true};
  normalize(p.q, 2, std::sqrt(0.5));
  normalize(p.k, 2, 1.0);
  const float out[] = {0.2121318f, 0.4242636f, 0.2202779f, 0.4405558f};
  const float state[] = {2.3084091f, -0.6331792f, 0.3115202f, 0.6230403f};
  for (const auto& [form, isa] : all_forms()) {
    for (const int64_t chunk : {1, 2}) {
      const Answer answer = solve(p, form, isa, chunk);
      for (size_t i = 0; i < 4; ++i) {
        EXPECT_NEAR(answer.out[i], out[i], 2e-6) << "form " << static_cast<int>(form);
        EXPECT_NEAR(answer.state[i], state[i], 4e-6) << "form " << static_cast<int>(form);
      }
    }
  }
}

TEST(DeltaRule, AnyChunkingIsTheSame) {
  struct Shape {
    int64_t tokens, key_dim, value_dim;
    double decay;
    bool fresh;
  };
  const Shape shapes[] = {{130, 128, 128, 0.1, false}, {64, 128, 128, 2.0, true}, {65, 16, 16, 0.5, false},
                          {63, 17, 33, 0.5, true},     {100, 40, 5, 30.0, false}, {1, 128, 128, 1.0, false},
                          {192, 64, 48, 0.0, false},   {17, 3, 100, 1.0, true}};
  for (const Shape& shape : shapes) {
    const Problem p = random_problem(11, shape.tokens, shape.key_dim, shape.value_dim, shape.decay, shape.fresh);
    const Answer expected = solve(p, Form::kReferenceRecurrent, cpu::Isa::kReference, 1);
    for (const auto& [form, isa] : all_forms()) {
      for (const int64_t chunk : {1, 5, 16, 31, 64}) {
        SCOPED_TRACE("form " + std::to_string(static_cast<int>(form)) + " on " + cpu::isa_name(isa) + ", chunks of " +
                     std::to_string(chunk) + ", " + std::to_string(shape.tokens) + " tokens");
        const Answer answer = solve(p, form, isa, chunk);
        expect_close({"output", 1, shape.tokens * shape.value_dim, expected.out, 0},
                     {"output", 1, shape.tokens * shape.value_dim, answer.out, 1e-5});
        expect_close({"state", 1, shape.key_dim * shape.value_dim, expected.state, 0},
                     {"state", 1, shape.key_dim * shape.value_dim, answer.state, 1e-5});
      }
    }
  }
}

}  // namespace
}  // namespace fourfold::test
