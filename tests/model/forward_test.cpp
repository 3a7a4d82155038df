// Properties of the forward pass that need no reference output: however a sequence is cut into steps, and whatever
// shares its batch, it computes the same thing.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <vector>

#include "base/math.h"
#include "base/random.h"
#include "cpu/backend.h"
#include "model/model.h"
#include "model/random_weights.h"
#include "model/ranked.h"
#include "small_config.h"

namespace fourfold::model {
namespace {

constexpr int64_t kPageSize = 8;
constexpr int64_t kPages = 64;
constexpr int64_t kSlots = 8;

struct Case {
  cpu::Isa isa;
  bool dense;
  int64_t ranks = 1;
};

class Forward : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    config_ = small_config(GetParam().dense);
    const auto backend = [](const std::shared_ptr<ranks::Member>& member) {
      cpu::CpuOptions options;
      options.isa = GetParam().isa;
      options.threads = GetParam().ranks == 1 ? 2 : 1;
      options.member = member;
      return cpu::make_backend(options);
    };
    const auto source = make_random_weights(config_, 5);
    ModelOptions model_options;
    model_options.max_step_tokens = 200;
    model_options.max_logit_rows = 200;
    model_options.mtp = true;
    model_ = load_model(*source, backend, {.ranks = GetParam().ranks}, model_options);
    caches_ = model_->make_caches(kPages, kPageSize, kSlots);
    Random random(9);
    for (int i = 0; i < 150; ++i) tokens_.push_back(static_cast<int32_t>(random.below(97)));
  }

  struct Piece {
    int sequence;  // which of several sequences; each has its own pages and slots
    int64_t begin, count;
  };

  // Runs one step with these pieces; appends each piece's logits and MTP logits to its sequence's.
  void step(const std::vector<Piece>& pieces) {
    std::vector<int32_t> tokens, rows, next;
    std::vector<ops::Sequence> sequences;
    for (const Piece& piece : pieces) {
      State& state = states_[static_cast<size_t>(piece.sequence)];
      if (state.pages.empty()) {
        // Pages scattered over the pool, and two slots between which the state moves.
        for (int64_t i = 0; i < 19; ++i) state.pages.push_back(static_cast<int32_t>((i * 3 + piece.sequence) % kPages));
        state.slot = 2 * piece.sequence;
      }
      ops::Sequence sequence;
      sequence.first = static_cast<int32_t>(tokens.size());
      sequence.count = static_cast<int32_t>(piece.count);
      sequence.position = static_cast<int32_t>(piece.begin);
      sequence.pages = state.pages;
      sequence.state_in = state.slot;
      state.slot ^= 1;
      sequence.state_out = std::span(&state.slot, 1);
      sequences.push_back(sequence);
      for (int64_t i = 0; i < piece.count; ++i) {
        rows.push_back(static_cast<int32_t>(tokens.size()));
        tokens.push_back(token(piece.sequence, piece.begin + i));
        next.push_back(token(piece.sequence, piece.begin + i + 1));
      }
    }
    ops::Batch batch{tokens, sequences, rows};
    model_->forward(batch, caches_);
    collect(pieces, model_->logits(), &State::logits);
    batch.tokens = next;
    model_->forward_mtp(batch, model_->hidden(), caches_);
    collect(pieces, model_->mtp_logits(), &State::mtp_logits);
  }

  struct State {
    std::vector<int32_t> pages;
    int32_t slot = 0;
    std::vector<float> logits, mtp_logits;
  };

  void collect(const std::vector<Piece>& pieces, const ops::Tensor& logits, std::vector<float> State::*target) {
    std::vector<float> all(static_cast<size_t>(logits.rows * logits.cols));
    model_->backend().read(logits, all);
    size_t at = 0;
    for (const Piece& piece : pieces) {
      auto& out = states_[static_cast<size_t>(piece.sequence)].*target;
      const size_t size = static_cast<size_t>(piece.count * config_.vocabulary);
      out.insert(out.end(), all.begin() + static_cast<ptrdiff_t>(at), all.begin() + static_cast<ptrdiff_t>(at + size));
      at += size;
    }
  }

  int32_t token(int sequence, int64_t position) const {
    return tokens_[static_cast<size_t>(position + 7 * sequence) % tokens_.size()];
  }

  void restart() { states_.assign(3, {}); }

  static double worst_difference(const std::vector<float>& a, const std::vector<float>& b) {
    EXPECT_EQ(a.size(), b.size());
    double worst = 0;
    for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
      if (!std::isfinite(a[i]) || !std::isfinite(b[i])) return std::numeric_limits<double>::infinity();
      worst = std::max(worst, std::fabs(static_cast<double>(a[i]) - b[i]));
    }
    return worst;
  }

  // The reference computes row by row in fp32; fast backends may round activations to bf16, differently for a single
  // row and for a block of rows. Logits here have an rms of about 1.
  double tolerance() const { return GetParam().isa == cpu::Isa::kReference ? 2e-4 : 6e-2; }

  ModelConfig config_;
  std::unique_ptr<Model> model_;
  Caches caches_;
  std::vector<int32_t> tokens_;
  std::vector<State> states_ = std::vector<State>(3);
};

TEST_P(Forward, AnyChunkingEqualsTokenByToken) {
  for (int64_t i = 0; i < 140; ++i) step({{0, i, 1}});
  const State single = states_[0];
  double energy = 0;
  for (float x : single.logits) energy += static_cast<double>(x) * x;
  const double rms = std::sqrt(energy / static_cast<double>(single.logits.size()));
  ASSERT_GT(rms, 0.05) << "logits too small to compare";
  for (const std::vector<int64_t>& cuts : std::vector<std::vector<int64_t>>{
           {140}, {1, 139}, {139, 1}, {64, 64, 12}, {3, 70, 2, 65}, {17, 1, 1, 100, 21}}) {
    restart();
    int64_t begin = 0;
    for (int64_t count : cuts) {
      step({{0, begin, count}});
      begin += count;
    }
    ASSERT_EQ(begin, 140);
    EXPECT_LT(worst_difference(single.logits, states_[0].logits), tolerance() * rms);
    EXPECT_LT(worst_difference(single.mtp_logits, states_[0].mtp_logits), tolerance() * rms);
  }
}

TEST_P(Forward, SequencesOfABatchDoNotTouchEachOther) {
  // Alone …
  std::vector<State> alone(3);
  for (int sequence = 0; sequence < 3; ++sequence) {
    restart();
    step({{sequence, 0, 20}});
    step({{sequence, 20, 1}});
    step({{sequence, 21, 9}});
    alone[static_cast<size_t>(sequence)] = states_[static_cast<size_t>(sequence)];
  }
  // … and together, with prefill chunks and single tokens in one step, in changing order.
  restart();
  step({{0, 0, 20}, {1, 0, 5}});
  step({{2, 0, 20}, {1, 5, 15}, {0, 20, 1}});
  step({{0, 21, 9}, {2, 20, 1}, {1, 20, 1}});
  step({{1, 21, 9}, {2, 21, 9}});
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_LT(worst_difference(alone[i].logits, states_[i].logits), tolerance()) << i;
    EXPECT_LT(worst_difference(alone[i].mtp_logits, states_[i].mtp_logits), tolerance()) << i;
  }
}

// Decode, drafts and short prompts: the same bits alone, beside others and beside chunks of a prompt.
TEST_P(Forward, RowsOfShortSequencesDoNotDependOnTheirCompany) {
  const int64_t counts[] = {12, 1, 4, 1, 16, 1};
  const auto run = [&](bool company) {
    restart();
    int64_t at = 0;
    int64_t other = 0;
    for (const int64_t count : counts) {
      if (company) {
        step({{1, other, other == 0 ? 60 : 1}, {0, at, count}, {2, 0, 20}});
        other += other == 0 ? 60 : 1;
        states_[2] = {};  // begins anew
      } else {
        step({{0, at, count}});
      }
      at += count;
    }
    return states_[0];
  };
  const State alone = run(false);
  const State among_others = run(true);
  EXPECT_EQ(alone.logits, among_others.logits);
  EXPECT_EQ(alone.mtp_logits, among_others.mtp_logits);
}

TEST_P(Forward, LogitRowsPickRows) {
  step({{0, 0, 30}});
  const std::vector<float> all = states_[0].logits;
  std::vector<int32_t> tokens, rows{0, 7, 29};
  for (int64_t i = 0; i < 30; ++i) tokens.push_back(token(0, i));
  ops::Sequence sequence;
  sequence.count = 30;
  sequence.pages = states_[0].pages;
  const ops::Batch batch{tokens, std::span(&sequence, 1), rows};
  model_->forward(batch, caches_);
  std::vector<float> picked(3 * 97);
  model_->backend().read(model_->logits(), picked);
  for (size_t i = 0; i < 3; ++i) {
    for (size_t j = 0; j < 97; ++j) {
      EXPECT_NEAR(picked[i * 97 + j], all[static_cast<size_t>(rows[i]) * 97 + j], tolerance());
    }
  }
}

TEST_P(Forward, CostCountsEveryWeightOnce) {
  const ops::Cost one = model_->cost(1, 0, 1);
  const ops::Cost many = model_->cost(100, 0, 1);
  EXPECT_GT(one.bytes, 0);
  EXPECT_GT(many.flops, 50 * one.flops);
  EXPECT_LT(many.bytes, 20 * one.bytes);
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (cpu::Isa isa : cpu::supported_isas()) {
    all.push_back({isa, false});
    all.push_back({isa, true});
  }
  for (const bool dense : {false, true}) all.push_back({cpu::best_isa(), dense, 2});
  return all;
}

INSTANTIATE_TEST_SUITE_P(Isas, Forward, testing::ValuesIn(cases()), [](const testing::TestParamInfo<Case>& c) {
  return fmt::format("{}{}{}", cpu::isa_name(c.param.isa), c.param.dense ? "_dense" : "_moe",
                     c.param.ranks > 1 ? fmt::format("_{}_ranks", c.param.ranks) : "");
});

}  // namespace
}  // namespace fourfold::model
