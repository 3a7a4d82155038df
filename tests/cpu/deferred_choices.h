// A chooser of tokens as a GPU is one: HostStepParts::choose_later() returns at once, the tokens are to be had later,
// and rows of the next step may begin with them before the host knows. The choice itself is the sampler's.
#pragma once

#include <deque>
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
  DeferredChoices(int64_t vocabulary, uint64_t seed) : sampler_(vocabulary), random_(seed) {}

  // Takes the place of the chooser in `parts`; `bind` is called with the tokens in their places.
  void serve(HostStepParts& parts, std::function<void(const ops::Batch&)> bind) {
    parts.bind = [this, bind = std::move(bind)](const ops::Batch& batch, StepPart,
                                                std::span<const CarriedRow> carried) {
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
      bind({tokens_, batch.sequences, batch.logit_rows});
    };
    parts.choose_later = [this](const ops::Tensor& logits, std::span<const RowChoice> rows) {
      // Like a GPU that has no kernel for these.
      for (const RowChoice& row : rows) {
        if (!row.choice.counts.empty()) return false;
      }
      Batch batch;
      last_.clear();
      for (const RowChoice& row : rows) {
        batch.chosen.emplace_back();
        batch.errors.emplace_back();
        std::vector<float> values(logits.f32(row.row), logits.f32(row.row) + logits.cols);
        try {
          batch.chosen.back() = sampler_.choose(values, row.choice);
        } catch (const Error& error) {
          batch.errors.back() = error.what();
        }
        last_.push_back(batch.chosen.back().token);
      }
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
  // Rows that began with a token that the host did not know.
  int64_t carried() const { return carried_; }

 private:
  struct Batch {
    std::vector<Chosen> chosen;
    std::vector<std::string> errors;
    int looks = 0;
  };
  Sampler sampler_;
  Random random_;
  std::deque<Batch> batches_;
  std::vector<int32_t> last_, tokens_;
  std::set<int32_t> gone_;
  int64_t carried_ = 0;
};

}  // namespace fourfold::cpu
