// A model whose logits are a pure function of the whole sequence of tokens, and which computes them from what it finds
// in the caches: token by token in the pages of the sequence, and as a running hash in its state slot. A page, slot or
// position that is mixed up, overwritten, lost or stale changes the output. Steps, lanes and sampling are the host
// stepper's; the model is a body behind it.
//
// Its drafter finds in the caches what it was fed: the hash of each prefix, and the token behind it. It drafts the
// token that is the most probable one with a given probability (a hash decides), otherwise another. When what it was
// fed is not there, the step fails.
//
// Where it puts states off, slots hold a hash or tokens to be added to another slot's, and the one is no good as the
// other.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <stdexcept>
#include <vector>

#include "base/random.h"
#include "base/threads.h"
#include "cpu/step/host_stepper.h"
#include "deferred_choices.h"
#include "model/model.h"
#include "ops/step.h"

namespace fourfold::engine {

inline uint64_t mix(uint64_t hash, int32_t token) {
  return Random(hash ^ (static_cast<uint64_t>(token) + 0x1234567)).next();
}

inline void fake_logits(uint64_t hash, std::span<float> out) {
  Random random(hash);
  for (float& x : out) x = static_cast<float>(2.0 * random.normal());
}

inline uint64_t hash_of(std::span<const int32_t> tokens) {
  uint64_t hash = 0;
  for (const int32_t token : tokens) hash = mix(hash, token);
  return hash;
}

class FakeKv final : public ops::KvCache {
 public:
  // What a position holds: of the trunk its token, of the drafter the hash of all tokens up to it and the one behind.
  struct Entry {
    int32_t token = -1;
    uint64_t fed_hash = 0;
    int32_t fed_next = -1;
  };

  explicit FakeKv(const ops::KvCacheShape& shape)
      : shape_(shape), entries_(static_cast<size_t>(shape.pages * shape.page_size)) {}
  const ops::KvCacheShape& shape() const override { return shape_; }
  int64_t bytes() const override { return 0; }
  void copy_page(int64_t from, int64_t to) override {
    std::copy_n(&entries_.at(static_cast<size_t>(from * shape_.page_size)), shape_.page_size,
                &entries_.at(static_cast<size_t>(to * shape_.page_size)));
  }
  Entry& at(const ops::Sequence& sequence, int64_t position) {
    const int64_t page = sequence.pages[static_cast<size_t>(position / shape_.page_size)];
    return entries_.at(static_cast<size_t>(page * shape_.page_size + position % shape_.page_size));
  }

 private:
  ops::KvCacheShape shape_;
  std::vector<Entry> entries_;
};

class FakeStates final : public ops::StateCache {
 public:
  explicit FakeStates(int64_t slots) : hashes(static_cast<size_t>(slots), 0xdead) { shape_.slots = slots; }
  const ops::StateCacheShape& shape() const override { return shape_; }
  int64_t bytes() const override { return 0; }
  void copy(int64_t from, int64_t to) override {
    hashes.at(to) = hashes.at(from);
    updates[to] = updates[from];
  }

  uint64_t read(int32_t slot, const ops::StateUpdates& put_off) const {
    if (put_off.count == 0) return hashes.at(static_cast<size_t>(slot));
    uint64_t hash = hashes.at(static_cast<size_t>(put_off.base));
    const std::vector<int32_t>& added = updates.at(put_off.from);
    for (int32_t i = 0; i < put_off.count; ++i) hash = mix(hash, added.at(static_cast<size_t>(i)));
    return hash;
  }
  void write(int32_t slot, uint64_t hash) {
    hashes.at(static_cast<size_t>(slot)) = hash;
    updates[slot].clear();
  }
  void write_updates(int32_t slot, std::span<const int32_t> tokens) {
    hashes.at(static_cast<size_t>(slot)) = 0xdead;
    updates[slot].assign(tokens.begin(), tokens.end());
  }

  std::vector<uint64_t> hashes;
  std::map<int64_t, std::vector<int32_t>> updates;  // tokens

 private:
  ops::StateCacheShape shape_;
};

struct FakeOptions {
  int64_t vocabulary = 40;
  int64_t max_positions = 4096;
  int64_t max_step_tokens = 4096;
  int64_t max_logit_rows = 4096;
  bool mtp = false;
  bool recurrent = true;
  double draft_accuracy = 0.7;  // how often a draft is the most probable token
  int64_t row_bucket = 1;       // rows are padded to a multiple
  bool tokens_later = false;    // chosen by the model, as on a GPU: the next step may begin before the host knows them
  bool rounds_ahead = false;    // with tokens_later: it moves lanes on itself, so that steps with drafts may, too
  int64_t put_off_rows = 0;     // of HostStepParts
  std::atomic<int64_t>* made_states = nullptr;  // counts those that were put off and had to be made
  // Called before each step, on the stepper's thread; may throw or wait.
  std::function<void(const ops::Batch&)> before_step;
  // Tokens after which the logits are not finite.
  std::set<int32_t> poison;
  // May change what a step came to, or take its place.
  std::function<std::unique_ptr<ops::Stepper>(std::unique_ptr<ops::Stepper>)> wrap_stepper;
};

class FakeModel final : public model::Model {
 public:
  explicit FakeModel(FakeOptions options) : options_(std::move(options)) {
    config_.vocabulary = options_.vocabulary;
    config_.max_positions = options_.max_positions;
    model_options_.max_step_tokens = options_.max_step_tokens;
    model_options_.max_logit_rows = std::min(options_.max_logit_rows, options_.max_step_tokens);
  }

  const model::ModelConfig& config() const override { return config_; }
  ops::Backend& backend() override { no(); }
  const model::ModelOptions& options() const override { return model_options_; }
  model::Caches make_caches(int64_t pages, int64_t page_size, int64_t slots) override {
    model::Caches caches;
    ops::KvCacheShape shape;
    shape.pages = pages;
    shape.page_size = page_size;
    caches.kv = std::make_unique<FakeKv>(shape);
    caches.states = std::make_unique<FakeStates>(slots);
    return caches;
  }
  int64_t cache_bytes_per_token() const override { return 4; }
  int64_t state_bytes_per_slot() const override { return options_.recurrent ? 8 : 0; }

  void forward(const ops::Batch&, model::Caches&, const model::LayerObserver&) override { no(); }
  ops::Tensor logits() const override { no(); }
  ops::Tensor hidden() const override { no(); }
  bool has_mtp() const override { return options_.mtp; }
  void forward_mtp(const ops::Batch&, const ops::Tensor&, model::Caches&) override { no(); }
  ops::Tensor mtp_logits() const override { no(); }
  ops::Tensor mtp_hidden() const override { no(); }
  ops::Cost cost(int64_t, int64_t, int64_t) const override { return {}; }

  std::unique_ptr<ops::Stepper> make_stepper(const ops::StepLimits& limits, model::Caches& caches) override {
    kv_ = dynamic_cast<FakeKv*>(caches.kv.get());
    states_ = dynamic_cast<FakeStates*>(caches.states.get());
    const int64_t rows = (limits.rows / options_.row_bucket + 2) * options_.row_bucket;
    hidden_.resize(static_cast<size_t>(rows) * kHidden);
    gathered_.resize(static_cast<size_t>(rows) * kHidden);
    logits_.resize(static_cast<size_t>((limits.logit_rows + limits.lanes + options_.row_bucket) * limits.vocabulary));
    cpu::HostStepParts parts;
    parts.bind = [this](const ops::Batch& batch, cpu::StepPart, std::span<const cpu::CarriedRow>) { batch_ = batch; };
    parts.copy_page = [this](int32_t from, int32_t to) { kv_->copy_page(from, to); };
    parts.put_off_rows = options_.put_off_rows;
    parts.make_states = [this](std::span<const cpu::PutOffState> states) {
      for (const cpu::PutOffState& s : states) states_->write(s.slot, states_->read(s.slot, s.updates));
      if (options_.made_states != nullptr) *options_.made_states += static_cast<int64_t>(states.size());
    };
    draft_lists_ = limits.draft_lists;
    parts.body = [this](const ops::StepShape& shape, ops::StepScope& scope) { step(shape, scope); };
    parts.pool = &pool_;
    parts.row_bucket = options_.row_bucket;
    if (options_.tokens_later) {
      later_.emplace(limits.vocabulary, 1);
      later_->serve(
          parts, [this](const ops::Batch& batch) { batch_ = batch; }, options_.rounds_ahead);
    }
    auto stepper = cpu::make_host_stepper(limits, std::move(parts));
    return options_.wrap_stepper ? options_.wrap_stepper(std::move(stepper)) : std::move(stepper);
  }

  // What the logits after `tokens` are a function of when nothing is mixed up.
  static uint64_t expected_hash(std::span<const int32_t> tokens) { return hash_shift(hash_of(tokens)); }

 private:
  static constexpr int64_t kHidden = 4;  // a hash, 16 bits in each
  static uint64_t hash_shift(uint64_t hash) { return Random(hash).next(); }
  [[noreturn]] static void no() { throw std::logic_error("the fake model runs in steps"); }
  static void require(bool condition, const char* what) {
    if (!condition) throw std::logic_error(std::string("bad step: ") + what);
  }

  static void put(std::vector<float>& rows, int64_t row, uint64_t hash) {
    for (int64_t i = 0; i < kHidden; ++i)
      rows[static_cast<size_t>(row * kHidden + i)] = static_cast<float>(hash >> (16 * i) & 0xffff);
  }
  static uint64_t get(const std::vector<float>& rows, int64_t row) {
    uint64_t hash = 0;
    for (int64_t i = 0; i < kHidden; ++i)
      hash |= static_cast<uint64_t>(rows[static_cast<size_t>(row * kHidden + i)]) << (16 * i);
    return hash;
  }
  static ops::Tensor tensor(std::vector<float>& memory, int64_t rows, int64_t cols) {
    return {memory.data(), ops::DType::kF32, rows, cols, cols};
  }
  std::span<float> logit_row(int64_t row) {
    const auto vocabulary = static_cast<size_t>(options_.vocabulary);
    return std::span(logits_).subspan(static_cast<size_t>(row) * vocabulary, vocabulary);
  }

  void step(const ops::StepShape& shape, ops::StepScope& scope) {
    scope.begin_trunk();
    if (options_.before_step) options_.before_step(batch_);
    check();
    for (const ops::Sequence& sequence : batch_.sequences) {
      if (!gone(sequence)) run_trunk(sequence);
    }
    std::set<uint64_t> poisoned;
    for (int64_t row = 0; row < batch_.rows(); ++row) {
      if (options_.poison.contains(batch_.tokens[static_cast<size_t>(row)])) poisoned.insert(get(hidden_, row));
    }
    const auto score = [&](int64_t rows) {
      for (int64_t i = 0; i < rows; ++i) {
        const uint64_t hash = get(gathered_, i);
        fake_logits(hash_shift(hash), logit_row(i));
        if (poisoned.contains(hash)) {
          logit_row(i)[static_cast<size_t>(options_.vocabulary / 2)] = std::numeric_limits<float>::quiet_NaN();
        }
      }
      return tensor(logits_, rows, options_.vocabulary);
    };
    const ops::Tensor hidden = tensor(hidden_, shape.rows, kHidden);
    while (const int64_t reported = scope.begin_report()) {
      scope.gather_reported(hidden, tensor(gathered_, reported, kHidden));
      scope.report(score(reported));
    }
    scope.gather_logit_rows(hidden, tensor(gathered_, shape.logit_rows, kHidden));
    for (size_t i = 0; i < batch_.logit_rows.size(); ++i) {
      require(get(gathered_, static_cast<int64_t>(i)) == get(hidden_, batch_.logit_rows[i]), "rows gathered");
    }
    scope.choose(score(shape.logit_rows));
    if (!shape.feed_drafter) return;
    scope.begin_feed();
    for (const ops::Sequence& sequence : batch_.sequences) {
      for (int32_t i = 0; i < sequence.count && !gone(sequence); ++i) {
        FakeKv::Entry& entry = kv_->at(sequence, sequence.position + i);
        entry.fed_hash = get(hidden_, sequence.first + i);
        entry.fed_next = batch_.tokens[static_cast<size_t>(sequence.first + i)];
      }
    }
    for (int64_t pass = 0; pass < shape.drafts; ++pass) {
      const int64_t rows = scope.begin_draft(pass);
      if (rows == 0) return;
      if (pass == 0) scope.gather_ends(tensor(hidden_, shape.rows, kHidden), tensor(gathered_, rows, kHidden));
      for (const ops::Sequence& sequence : batch_.sequences) {
        if (!gone(sequence)) draft(sequence, pass);
      }
      ops::Tensor logits = tensor(logits_, rows, options_.vocabulary);
      if (shape.draft_list > 0) logits.cols = draft_lists_.at(static_cast<size_t>(shape.draft_list) - 1);
      scope.draft(pass, logits);
    }
  }

  // It must leave no trace.
  bool gone(const ops::Sequence& sequence) const { return later_ && later_->gone(sequence.first); }

  void run_trunk(const ops::Sequence& sequence) {
    uint64_t state = sequence.position == 0 ? 0 : states_->read(sequence.state_in, sequence.updates);
    uint64_t attended = 0;
    for (int32_t p = 0; p < sequence.position; ++p) attended = mix(attended, kv_->at(sequence, p).token);
    const std::span<const int32_t> slots = sequence.written_slots();
    for (int32_t i = 0; i < sequence.count; ++i) {
      const int32_t token = batch_.tokens[static_cast<size_t>(sequence.first + i)];
      kv_->at(sequence, sequence.position + i) = {.token = token};
      attended = mix(attended, token);
      state = options_.recurrent ? mix(state, token) : attended;
      put(hidden_, sequence.first + i, state == attended ? state : hash_shift(state ^ attended));
      if (slots.size() > 1 && (i == 0 || !sequence.puts_off)) states_->write(slots[static_cast<size_t>(i)], state);
    }
    require(!sequence.puts_off || (slots.size() == static_cast<size_t>(sequence.count) && sequence.count > 1 &&
                                   sequence.count <= options_.put_off_rows),
            "states of these rows are not put off");
    if (!sequence.puts_off) return states_->write(slots.back(), state);
    for (size_t i = 1; i < slots.size(); ++i) states_->write_updates(slots[i], {});
    states_->write_updates(slots[1], batch_.tokens.subspan(static_cast<size_t>(sequence.first) + 1, slots.size() - 1));
  }

  void draft(const ops::Sequence& sequence, int64_t pass) {
    // All it was fed is there, and belongs to this sequence.
    uint64_t hash = 0;
    for (int32_t p = 0; p + pass < sequence.position; ++p) {
      const FakeKv::Entry& entry = kv_->at(sequence, p);
      hash = mix(hash, entry.token);
      require(entry.fed_hash == hash, "the drafter's keys and values are stale");
    }
    const int32_t next = batch_.tokens[static_cast<size_t>(sequence.first)];
    FakeKv::Entry& entry = kv_->at(sequence, sequence.position);
    const uint64_t before = get(gathered_, sequence.first);
    if (pass == 0) require(before == mix(hash, entry.token), "the drafter's hidden row is another's");
    entry.fed_hash = before;
    entry.fed_next = next;
    const uint64_t after = mix(before, next);
    const std::span<float> row = logit_row(sequence.first);
    fake_logits(hash_shift(after), row);
    if (Random(after + 99).uniform() >= options_.draft_accuracy) std::reverse(row.begin(), row.end());
    put(gathered_, sequence.first, after);
  }

  void check() const {
    require(batch_.size() > 0, "empty");
    require(batch_.rows() <= options_.max_step_tokens, "too many tokens");
    const int64_t page_size = kv_->shape().page_size;
    std::set<int32_t> written, named, slots, read;
    int32_t next = 0;
    for (const ops::Sequence& sequence : batch_.sequences) {
      require(sequence.first == next, "rows not covered in order");
      require(sequence.count >= 1, "empty sequence");
      next += sequence.count;
      const int64_t end = sequence.position + sequence.count;
      require(end <= static_cast<int64_t>(sequence.pages.size()) * page_size, "position without a page");
      std::set<int32_t> own;
      for (size_t i = 0; i < sequence.pages.size(); ++i) {
        const int32_t page = sequence.pages[i];
        require(page >= 0 && page < kv_->shape().pages, "page out of range");
        require(own.insert(page).second, "page twice in a sequence");
        if (static_cast<int64_t>(i + 1) * page_size > sequence.position && static_cast<int64_t>(i) * page_size < end) {
          require(!named.contains(page) && written.insert(page).second, "shared page written");
        }
        require(!written.contains(page) || own.contains(page), "shared page written");
      }
      for (const int32_t page : own) named.insert(page);
      require(sequence.position == 0 || (sequence.state_in >= 0 && sequence.state_in < states_->shape().slots),
              "slot out of range");
      for (const int32_t slot : sequence.written_slots()) {
        require(slot >= 0 && slot < states_->shape().slots, "slot out of range");
        require(slots.insert(slot).second, "slot written by two sequences");
      }
      const std::span<const int32_t> out = sequence.written_slots();
      if (sequence.position > 0 && std::find(out.begin(), out.end(), sequence.state_in) == out.end()) {
        read.insert(sequence.state_in);
      }
    }
    for (const int32_t slot : read) require(!slots.contains(slot), "slot read by one sequence, written by another");
    require(next == batch_.rows(), "rows not covered");
  }

  FakeOptions options_;
  model::ModelConfig config_;
  model::ModelOptions model_options_;
  ThreadPool pool_{1};
  std::array<int64_t, ops::kDraftLists> draft_lists_ = {};
  FakeKv* kv_ = nullptr;
  FakeStates* states_ = nullptr;
  ops::Batch batch_;
  std::optional<cpu::DeferredChoices> later_;
  std::vector<float> hidden_, gathered_, logits_;
};

}  // namespace fourfold::engine
