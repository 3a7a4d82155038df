// A model whose logits are a pure function of the whole sequence of tokens, and which computes them from what it finds
// in the caches: token by token in the pages of the sequence, and as a running hash in its state slot. A page, slot or
// position that is mixed up, shared, lost or stale changes the output.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <set>
#include <stdexcept>
#include <vector>

#include "base/random.h"
#include "model/model.h"

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
  explicit FakeKv(const ops::KvCacheShape& shape)
      : shape_(shape), tokens(static_cast<size_t>(shape.pages * shape.page_size), -1) {}
  const ops::KvCacheShape& shape() const override { return shape_; }
  int64_t bytes() const override { return 0; }
  int32_t& at(const ops::Sequence& sequence, int64_t position) {
    const int64_t page = sequence.pages[static_cast<size_t>(position / shape_.page_size)];
    return tokens.at(static_cast<size_t>(page * shape_.page_size + position % shape_.page_size));
  }

 private:
  ops::KvCacheShape shape_;
  std::vector<int32_t> tokens;
};

class FakeStates final : public ops::StateCache {
 public:
  explicit FakeStates(int64_t slots) : hashes(static_cast<size_t>(slots), 0xdead) { shape_.slots = slots; }
  const ops::StateCacheShape& shape() const override { return shape_; }
  int64_t bytes() const override { return 0; }
  void copy(int64_t from, int64_t to) override { hashes.at(to) = hashes.at(from); }
  std::vector<uint64_t> hashes;

 private:
  ops::StateCacheShape shape_;
};

// Only read() is ever called: the fake model computes by itself.
class FakeBackend final : public ops::Backend {
 public:
  std::string description() const override { return "fake"; }
  ops::DType activation_type() const override { return ops::DType::kF32; }
  std::unique_ptr<ops::Buffer> allocate(int64_t) override { no(); }
  ops::Vector load_vector(std::span<const float>) override { no(); }
  std::unique_ptr<ops::Matrix> load_matrix(std::span<const ops::MatrixSource>) override { no(); }
  std::unique_ptr<ops::Matrix> load_table(const ops::MatrixSource&) override { no(); }
  std::unique_ptr<ops::Experts> load_experts(int64_t, const std::function<ops::ExpertSource(int64_t)>&,
                                             const std::function<void(int64_t)>&) override {
    no();
  }
  std::unique_ptr<ops::KvCache> make_kv_cache(const ops::KvCacheShape&) override { no(); }
  std::unique_ptr<ops::StateCache> make_state_cache(const ops::StateCacheShape&) override { no(); }
  void begin_step(const ops::Batch&) override { no(); }
  void embed(const ops::Matrix&, const ops::Tensor&) override { no(); }
  void rms_norm(const ops::Tensor&, const ops::Vector&, float, const ops::Tensor&) override { no(); }
  void add_rms_norm(const ops::Tensor&, const ops::Tensor&, const ops::Vector&, float, const ops::Tensor&) override {
    no();
  }
  void add(const ops::Tensor&, const ops::Tensor&) override { no(); }
  void linear(const ops::Tensor&, const ops::Matrix&, const ops::Tensor&) override { no(); }
  void attention(const ops::AttentionParams&, const ops::Tensor&, const ops::Tensor&, const ops::Tensor&, ops::KvCache&,
                 int64_t, const ops::Tensor&) override {
    no();
  }
  void delta_net(const ops::DeltaNetParams&, const ops::Tensor&, const ops::Tensor&, const ops::Tensor&,
                 const ops::Tensor&, ops::StateCache&, int64_t, const ops::Tensor&) override {
    no();
  }
  void moe(const ops::MoeParams&, const ops::Tensor&, const ops::Tensor&) override { no(); }
  void mlp(const ops::MlpParams&, const ops::Tensor&, const ops::Tensor&) override { no(); }
  void gather_rows(const ops::Tensor&, std::span<const int32_t>, const ops::Tensor&) override { no(); }
  void read(const ops::Tensor& x, std::span<float> out) override {
    for (int64_t row = 0; row < x.rows; ++row) {
      std::copy_n(x.f32(row), x.cols, out.data() + row * x.cols);
    }
  }

 private:
  [[noreturn]] static void no() { throw std::logic_error("the fake backend computes nothing"); }
};

struct FakeOptions {
  int64_t vocabulary = 40;
  int64_t max_positions = 4096;
  int64_t max_step_tokens = 4096;
  // Called before each step, on the engine thread; may throw or wait.
  std::function<void(const ops::Batch&)> before_step;
  // Tokens after which the logits are not finite.
  std::set<int32_t> poison;
};

class FakeModel final : public model::Model {
 public:
  explicit FakeModel(FakeOptions options) : options_(std::move(options)) {
    config_.vocabulary = options_.vocabulary;
    config_.max_positions = options_.max_positions;
    model_options_.max_step_tokens = options_.max_step_tokens;
    model_options_.max_logit_rows = options_.max_step_tokens;
  }

  const model::ModelConfig& config() const override { return config_; }
  ops::Backend& backend() override { return backend_; }
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
  int64_t state_bytes_per_slot() const override { return 8; }

  void forward(const ops::Batch& batch, model::Caches& caches, const model::LayerObserver&) override {
    if (options_.before_step) options_.before_step(batch);
    auto& kv = dynamic_cast<FakeKv&>(*caches.kv);
    auto& states = dynamic_cast<FakeStates&>(*caches.states);
    check(batch, kv, states);
    std::vector<uint64_t> row_hash(batch.tokens.size());
    std::vector<int32_t> row_token(batch.tokens.size());
    for (const ops::Sequence& sequence : batch.sequences) {
      uint64_t state = sequence.position == 0 ? 0 : states.hashes.at(sequence.state_in);
      for (int32_t i = 0; i < sequence.count; ++i) {
        const size_t row = static_cast<size_t>(sequence.first + i);
        kv.at(sequence, sequence.position + i) = batch.tokens[row];
        state = mix(state, batch.tokens[row]);
        uint64_t attended = 0;
        for (int32_t p = 0; p <= sequence.position + i; ++p) attended = mix(attended, kv.at(sequence, p));
        row_hash[row] = state ^ attended ^ hash_shift(attended);  // equals hash_shift(h) when both caches agree on h
        row_token[row] = batch.tokens[row];
      }
      states.hashes.at(sequence.state_out) = state;
    }
    const size_t vocabulary = static_cast<size_t>(options_.vocabulary);
    logits_.resize(batch.logit_rows.size() * vocabulary);
    for (size_t i = 0; i < batch.logit_rows.size(); ++i) {
      const size_t row = static_cast<size_t>(batch.logit_rows[i]);
      const std::span out = std::span(logits_).subspan(i * vocabulary, vocabulary);
      fake_logits(row_hash[row], out);
      if (options_.poison.contains(row_token[row])) out[vocabulary / 2] = std::numeric_limits<float>::quiet_NaN();
    }
    rows_ = static_cast<int64_t>(batch.logit_rows.size());
  }
  // What forward() computes for the token after `tokens` when nothing is mixed up.
  static uint64_t expected_hash(std::span<const int32_t> tokens) { return hash_shift(hash_of(tokens)); }

  ops::Tensor logits() const override {
    return {const_cast<float*>(logits_.data()), ops::DType::kF32, rows_, options_.vocabulary, options_.vocabulary};
  }
  ops::Tensor hidden() const override { return {}; }
  bool has_mtp() const override { return false; }
  void forward_mtp(const ops::Batch&, const ops::Tensor&, model::Caches&) override {}
  ops::Tensor mtp_logits() const override { return {}; }
  ops::Tensor mtp_hidden() const override { return {}; }
  ops::Cost cost(int64_t, int64_t, int64_t) const override { return {}; }

 private:
  static uint64_t hash_shift(uint64_t hash) { return Random(hash).next(); }
  static void require(bool condition, const char* what) {
    if (!condition) throw std::logic_error(std::string("bad batch: ") + what);
  }

  void check(const ops::Batch& batch, const FakeKv& kv, const FakeStates& states) const {
    require(batch.size() > 0, "empty");
    require(batch.size() <= options_.max_step_tokens, "too many tokens");
    std::set<int32_t> pages, slots;
    int32_t next = 0;
    for (const ops::Sequence& sequence : batch.sequences) {
      require(sequence.first == next, "rows not covered in order");
      require(sequence.count >= 1, "empty sequence");
      next += sequence.count;
      const int64_t end = sequence.position + sequence.count;
      require(end <= static_cast<int64_t>(sequence.pages.size()) * kv.shape().page_size, "position without a page");
      for (const int32_t page : sequence.pages) {
        require(page >= 0 && page < kv.shape().pages, "page out of range");
        require(pages.insert(page).second, "page shared by two sequences");
      }
      require(sequence.state_in == sequence.state_out, "state moved");
      require(sequence.state_in >= 0 && sequence.state_in < states.shape().slots, "slot out of range");
      require(slots.insert(sequence.state_in).second, "slot shared by two sequences");
    }
    require(next == batch.size(), "rows not covered");
    for (size_t i = 0; i < batch.logit_rows.size(); ++i) {
      require(batch.logit_rows[i] >= 0 && batch.logit_rows[i] < batch.size(), "logit row out of range");
      require(i == 0 || batch.logit_rows[i - 1] < batch.logit_rows[i], "logit rows not ascending");
    }
  }

  FakeOptions options_;
  model::ModelConfig config_;
  model::ModelOptions model_options_;
  FakeBackend backend_;
  std::vector<float> logits_;
  int64_t rows_ = 0;
};

}  // namespace fourfold::engine
