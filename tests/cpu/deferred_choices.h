// A chooser of tokens as a GPU is one: HostStepParts::choose_later() returns at once, the tokens are to be had later,
// and rows of the next step may begin with them before the host knows. The choice itself is the sampler's.
#pragma once

#include <algorithm>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/random.h"
#include "cpu/sample/sampler.h"
#include "cpu/step/host_stepper.h"

namespace fourfold::cpu {

class DeferredChoices {
 public:
  DeferredChoices(int64_t vocabulary, uint64_t seed) : vocabulary_(vocabulary), sampler_(vocabulary), random_(seed) {}

  // Takes the place of the chooser in `parts`; `bind` is called with the tokens in their places.
  // `lanes`: it moves them on itself.
  void serve(HostStepParts& parts, std::function<void(const ops::Batch&)> bind, bool lanes = false) {
    if (lanes) keep_lanes(parts, bind);
    parts.bind = [this, bind = std::move(bind)](const ops::Batch& batch, StepPart part,
                                                std::span<const CarriedRow> carried) {
      drafting_ = part == StepPart::kFirstDraft || part == StepPart::kDraft;
      if (part == StepPart::kFirstDraft) passes_.clear();
      sequences_.assign(batch.sequences.begin(), batch.sequences.end());
      logit_rows_ = batch.logit_rows;
      tokens_.assign(batch.tokens.begin(), batch.tokens.end());
      gone_.clear();
      for (const CarriedRow& c : carried) {
        const int32_t token = last_.at(static_cast<size_t>(c.choice));
        tokens_.at(static_cast<size_t>(c.row)) = std::max(token, 0);
        ++carried_;
        if (token < 0 || std::find(c.stop_tokens.begin(), c.stop_tokens.end(), token) != c.stop_tokens.end()) {
          gone_.insert(c.row);
        }
      }
      bind({tokens_, sequences_, logit_rows_});
    };
    parts.choose_later = [this](const ops::Tensor& logits, std::span<const RowChoice> rows) {
      // Now and then, at the same time on all ranks, like a GPU that has no kernel for these.
      const bool refuses = ++asked_ % 8 == 3;
      for (const RowChoice& row : rows) {
        FF_ASSERT(row.choice.counts.empty() == (row.counted.lane < 0));
        if (refuses && row.counted.lane >= 0) return false;
      }
      count(rows);
      Batch batch;
      last_.clear();
      for (const RowChoice& row : rows) {
        batch.chosen.emplace_back();
        batch.errors.emplace_back();
        std::vector<float> values(logits.f32(row.row), logits.f32(row.row) + logits.cols);
        try {
          Choice choice = row.choice;
          if (row.lane >= 0) choice.index += states_.at(row.lane).kept - 1;
          TokenCounts counts;
          if (row.counted.lane >= 0) {
            counts = counts_.at(row.counted.lane);
            for (int32_t i = 0; i < row.counted.drafts; ++i) {
              counts.add_output(tokens_.at(static_cast<size_t>(row.counted.draft_row + i)));
            }
            choice.counts = counts.counts();
          }
          // Drafts may be chosen from the first tokens alone.
          std::optional<Sampler> narrow;
          if (logits.cols != vocabulary_) narrow.emplace(logits.cols);
          batch.chosen.back() = (narrow ? *narrow : sampler_).choose(values, choice);
        } catch (const Error& error) {
          batch.errors.back() = error.what();
        }
        last_.push_back(batch.chosen.back().token);
      }
      if (drafting_) passes_.push_back(last_);
      batch.looks = static_cast<int>(random_.next() % 4);
      batches_.push_back(std::move(batch));
      FF_ASSERT(static_cast<int64_t>(batches_.size()) <= kChoicesUnderWay);
      return true;
    };
    parts.collectable = [this] { return batches_.front().looks-- <= 0; };
    parts.collect = [this](std::span<Chosen> chosen, std::span<std::string> errors) {
      Batch& batch = batches_.front();
      FF_ASSERT(chosen.size() == batch.chosen.size());
      std::move(batch.chosen.begin(), batch.chosen.end(), chosen.begin());
      std::move(batch.errors.begin(), batch.errors.end(), errors.begin());
      batches_.pop_front();
    };
  }

  // Of the batch bound last: the sequence that begins with this row must leave no trace.
  bool gone(int32_t row) const { return gone_.contains(row); }
  // Rows, or lanes, that began with a token that the host did not know.
  int64_t carried() const { return carried_; }
  // Tokens of lanes with penalties that were counted before the host knew them.
  int64_t counted_unknown() const { return counted_unknown_; }
  // Lanes that had rows behind their end, although there was time to see it: drafts were made in the meantime.
  int64_t in_vain() const { return in_vain_; }

 private:
  // Of a lane, since it was last moved.
  struct State {
    int32_t position = 0, state = 0, token = 0, row = 0, start = 0, kept = 0;
    ops::StateUpdates updates;
    bool ended = false, gone = false;
  };

  void keep_lanes(HostStepParts& parts, std::function<void(const ops::Batch&)> bind) {
    parts.move_lanes = [this](std::span<const MovedLane> lanes) {
      chosen_ = last_;
      passes_.clear();
      for (const MovedLane& m : lanes) move(m);
    };
    parts.carry_lanes = [this, bind = std::move(bind)](std::span<const CarriedLane> lanes) {
      for (const CarriedLane& c : lanes) carry(c);
      bind({tokens_, sequences_, logit_rows_});
    };
    parts.gather_ends = [this](const ops::Tensor& x, std::span<const int32_t> lanes, const ops::Tensor& out) {
      for (int64_t i = 0; i < out.rows; ++i) {
        const auto from = static_cast<size_t>(i) < lanes.size() ? static_cast<size_t>(i) : size_t{0};
        std::copy_n(x.f32(states_.at(lanes[from]).row), x.cols, out.f32(i));
      }
    };
  }

  void count(std::span<const RowChoice> rows) {
    for (const RowChoice& row : rows) {
      const CountedTokens& c = row.counted;
      if (c.lane < 0) continue;
      TokenCounts& counts = counts_[c.lane];
      if (c.begins) {
        counts.start(static_cast<int64_t>(row.choice.counts.size()));
        for (size_t token = 0; token < row.choice.counts.size(); ++token) {
          const int32_t count = row.choice.counts[token];
          if (count > 0) counts.add_prompt(static_cast<int32_t>(token));
          for (int32_t i = 1; i < count; ++i) counts.add_output(static_cast<int32_t>(token));
        }
      }
      for (const int32_t token : c.more) counts.add_output(token);
      if (c.choice < 0) continue;
      const int32_t token = last_.at(static_cast<size_t>(c.choice));
      if (token >= 0) counts.add_output(token);
      ++counted_unknown_;
    }
  }

  void move(const MovedLane& m) {
    State& s = states_[m.lane];
    s.gone = !m.prompt && gone_.contains(m.first);
    s.kept = 0;
    s.row = m.first;
    if (s.gone) {
      s.ended = true;
      return;
    }
    const ops::Sequence& sequence = sequences_.at(static_cast<size_t>(m.sequence));
    s.start = sequence.position;
    s.ended = false;
    for (bool more = true; more;) {
      const int32_t token = chosen_.at(static_cast<size_t>(m.choice + s.kept));
      s.ended = token < 0;
      if (s.ended) break;
      s.token = token;
      ++s.kept;
      if (m.counted) {
        counts_.at(m.lane).add_output(token);
        ++counted_unknown_;
      }
      s.ended = std::find(m.stop_tokens.begin(), m.stop_tokens.end(), token) != m.stop_tokens.end();
      more = !s.ended && s.kept < m.count && tokens_.at(static_cast<size_t>(m.first + s.kept)) == token;
    }
    s.row = m.first + std::max(s.kept, 1) - 1;
    s.position = m.prompt ? m.position : s.start + s.kept;
    const int32_t last = std::max(s.kept, 1) - 1;
    s.state = m.prompt ? m.state : sequence.state_out[static_cast<size_t>(last)];
    s.updates = {};
    if (m.puts_off && last > 0) s.updates = {sequence.state_out[0], sequence.state_out[1], last};
  }

  void carry(const CarriedLane& c) {
    const State& s = states_.at(c.lane);
    const auto token = [&](int32_t row) -> int32_t& { return tokens_.at(static_cast<size_t>(row)); };
    const auto drafted = [&](int32_t pass) {
      return std::max(passes_.at(static_cast<size_t>(pass)).at(static_cast<size_t>(c.drafter)), 0);
    };
    ops::Sequence* sequence = c.sequence < 0 ? nullptr : &sequences_.at(static_cast<size_t>(c.sequence));
    switch (c.as) {
      case CarriedLane::As::kGoesOn:
        ++carried_;
        if (s.ended) {
          if (!passes_.empty()) ++in_vain_;
          gone_.insert(c.row);
          return;
        }
        sequence->position = s.position;
        sequence->state_in = s.state;
        FF_ASSERT(s.updates.count == 0 || sequence->updates.count > 0);
        sequence->updates = s.updates;
        token(c.row) = s.token;
        for (int32_t i = 1; i < c.count; ++i) token(c.row + i) = drafted(i - 1);
        return;
      case CarriedLane::As::kFed:
        for (int32_t i = 0; i < c.count; ++i) {
          token(c.row + i) = std::max(chosen_.at(static_cast<size_t>(c.choice + i)), 0);
        }
        if (sequence == nullptr) return;
        if (s.gone) gone_.insert(c.row);
        if (!s.gone) sequence->position = s.start;
        return;
      case CarriedLane::As::kDrafts:
        if (s.ended) {
          gone_.insert(c.row);
          return;
        }
        sequence->position = s.position - 1 + c.pass;
        token(c.row) = c.pass == 0 ? s.token : drafted(c.pass - 1);
        return;
    }
  }

  struct Batch {
    std::vector<Chosen> chosen;
    std::vector<std::string> errors;
    int looks = 0;
  };
  const int64_t vocabulary_;
  Sampler sampler_;
  Random random_;
  std::deque<Batch> batches_;
  std::vector<int32_t> last_, tokens_;
  std::vector<int32_t> chosen_;               // behind the last move
  std::vector<std::vector<int32_t>> passes_;  // of drafting, what each chose
  std::vector<ops::Sequence> sequences_;
  std::span<const int32_t> logit_rows_;
  std::map<int32_t, State> states_;
  std::map<int32_t, TokenCounts> counts_;  // of lanes with penalties
  int64_t counted_unknown_ = 0, asked_ = 0;
  bool drafting_ = false;
  std::set<int32_t> gone_;
  int64_t carried_ = 0, in_vain_ = 0;
};

}  // namespace fourfold::cpu
