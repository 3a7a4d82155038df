// A sequence with a state slot for each of its rows, and rows of padding: what drafts and recorded steps need.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <map>
#include <numeric>

#include "op_harness.h"

namespace fourfold::test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// A recurrent layer with random weights and a cache whose slots hold NaN until they are written.
class Recurrent {
 public:
  Recurrent(cpu::CpuBackend& backend, int64_t value_dim, int64_t taps, int64_t slots) : backend_(backend) {
    Random random(3);
    shape_.layers = 2;
    shape_.slots = slots;
    shape_.key_heads = 2;
    shape_.value_heads = 4;
    shape_.key_dim = 24;
    shape_.value_dim = value_dim;
    shape_.conv_taps = taps;
    conv_ = backend.load_vector(random_values(random, shape_.conv_channels() * taps, 0.5));
    a_log_ = backend.load_vector(random_values(random, 4));
    dt_bias_ = backend.load_vector(random_values(random, 4));
    norm_ = backend.load_vector(random_values(random, value_dim));
    params_.key_heads = shape_.key_heads;
    params_.value_heads = shape_.value_heads;
    params_.key_dim = shape_.key_dim;
    params_.value_dim = value_dim;
    params_.conv_taps = taps;
    params_.norm_eps = 1e-6f;
    params_.conv = &conv_;
    params_.a_log = &a_log_;
    params_.dt_bias = &dt_bias_;
    params_.norm = &norm_;
    cache_ = backend.make_state_cache(shape_);
    for (int64_t slot = 0; slot < slots; ++slot) poison(slot);
  }

  int64_t width() const { return shape_.value_heads * shape_.value_dim; }
  cpu::HostStateCache& states() { return dynamic_cast<cpu::HostStateCache&>(*cache_); }

  // Row r of the inputs has the values of `tokens[r]`. The outputs.
  std::vector<float> run(const StepBatch& step) {
    const auto rows = static_cast<int64_t>(step.tokens.size());
    const auto filled = [&](int64_t cols, uint64_t salt) {
      std::vector<float> values;
      for (const int32_t token : step.tokens) {
        Random random(static_cast<uint64_t>(token) * 8 + salt);
        const std::vector<float> row = random_values(random, cols);
        values.insert(values.end(), row.begin(), row.end());
      }
      return Activations(backend_, values, rows, cols);
    };
    const Activations qkv = filled(shape_.conv_channels(), 1);
    const Activations z = filled(width(), 2);
    const Activations b = filled(4, 3);
    const Activations a = filled(4, 4);
    const Activations out(backend_, rows, width());
    backend_.begin_step(step.batch());
    backend_.delta_net(params_, qkv.tensor(), z.tensor(), b.tensor(), a.tensor(), *cache_, 1, out.tensor());
    return out.values();
  }

  // Everything that layer 1 keeps in a slot.
  std::vector<float> slot(int64_t slot) {
    std::vector<float> all, one(static_cast<size_t>(shape_.key_dim * shape_.value_dim));
    for (int64_t h = 0; h < shape_.value_heads; ++h) {
      states().read_state(1, slot, h, one);
      all.insert(all.end(), one.begin(), one.end());
    }
    const float* history = states().convolution(1, slot);
    all.insert(all.end(), history, history + (shape_.conv_taps - 1) * shape_.conv_channels());
    return all;
  }

 private:
  void poison(int64_t slot) {
    const std::vector<float> nans(static_cast<size_t>(shape_.key_dim * shape_.value_dim), kNan);
    for (int64_t h = 0; h < shape_.value_heads; ++h) states().write_state(1, slot, h, nans);
    std::fill_n(states().convolution(1, slot), (shape_.conv_taps - 1) * shape_.conv_channels(), kNan);
  }

  cpu::CpuBackend& backend_;
  ops::StateCacheShape shape_;
  ops::Vector conv_, a_log_, dt_bias_, norm_;
  ops::DeltaNetParams params_;
  std::unique_ptr<ops::StateCache> cache_;
};

ops::Sequence sequence_of(StepBatch& step, int64_t count, int64_t position, int32_t state_in,
                          std::span<const int32_t> state_out, int32_t first_token) {
  ops::Sequence sequence;
  sequence.first = static_cast<int32_t>(step.tokens.size());
  sequence.count = static_cast<int32_t>(count);
  sequence.position = static_cast<int32_t>(position);
  sequence.state_in = state_in;
  sequence.state_out = state_out;
  for (int64_t i = 0; i < count; ++i) step.tokens.push_back(static_cast<int32_t>(first_token + i));
  step.sequences.push_back(sequence);
  return sequence;
}

bool same(std::span<const float> a, std::span<const float> b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size_bytes()) == 0;
}

TEST(StateSlots, RowsOfOneStepAreThoseOfManySteps) {
  for (const cpu::Isa isa : cpu::supported_isas()) {
    for (const auto& [value_dim, taps] : {std::pair<int64_t, int64_t>{32, 4}, {19, 3}, {16, 1}}) {
      for (const int64_t count : {1, 2, 6, 20}) {
        SCOPED_TRACE(std::string(cpu::isa_name(isa)) + ", " + std::to_string(count) + " rows");
        Recurrent one(backend_of(isa), value_dim, taps, count + 1);
        std::vector<int32_t> slots(static_cast<size_t>(count));
        for (int32_t i = 0; i < count; ++i) slots[static_cast<size_t>(i)] = i + 1;
        const int32_t start = 0;
        std::vector<std::vector<float>> outputs;
        StepBatch prompt;
        sequence_of(prompt, 5, 0, 0, std::span(&start, 1), 100);
        one.run(prompt);
        for (int32_t i = 0; i < count; ++i) {
          StepBatch step;
          sequence_of(step, 1, 5 + i, i, std::span(&slots[static_cast<size_t>(i)], 1), 200 + i);
          outputs.push_back(one.run(step));
        }
        // state_in apart from all slots, then as each of them.
        for (int64_t place = -1; place < count; ++place) {
          if (place > 1 && place + 1 < count) continue;
          SCOPED_TRACE("state_in is slot " + std::to_string(place));
          Recurrent all(backend_of(isa), value_dim, taps, count + 3);
          const int32_t from = place < 0 ? 0 : slots[static_cast<size_t>(place)];
          StepBatch first;
          sequence_of(first, 5, 0, 0, std::span(&from, 1), 100);
          all.run(first);
          StepBatch step;
          sequence_of(step, count, 5, from, slots, 200);
          // Beside it one with a single slot.
          const auto other = static_cast<int32_t>(count + 1);
          sequence_of(step, 3, 0, 0, std::span(&other, 1), 300);
          const std::vector<float> found = all.run(step);
          for (int64_t i = 0; i < count; ++i) {
            EXPECT_TRUE(
                same(outputs[static_cast<size_t>(i)],
                     std::span(found).subspan(static_cast<size_t>(i * all.width()), static_cast<size_t>(all.width()))))
                << "output of row " << i;
            EXPECT_TRUE(same(one.slot(i + 1), all.slot(i + 1))) << "state after row " << i;
          }
          EXPECT_TRUE(std::isnan(all.slot(count + 2)[0]));
        }
      }
    }
  }
}

// Random steps over slots that are read again, rolled back, shared, overwritten and copied: each row and each slot has
// what its tokens give one by one. Backends put off writing states; nobody may notice.
class SlotScripts {
 public:
  SlotScripts(cpu::CpuBackend& backend, int64_t value_dim, uint64_t seed)
      : backend_(backend), value_dim_(value_dim), random_(seed), layer_(backend, value_dim, 4, kSlots) {}

  void run() {
    for (int i = 0; i < 12; ++i) {
      step();
      if (random_.below(4) == 0) check(static_cast<int64_t>(random_.below(kSlots)));
      if (random_.below(6) == 0) copy();
    }
    for (int64_t slot = 0; slot < kSlots; ++slot) check(slot);
  }

 private:
  static constexpr int64_t kSlots = 7;
  using Tokens = std::vector<int32_t>;

  // What a layer of its own makes of the tokens one by one: the last one's output, then the slot.
  const std::vector<float>& alone(const Tokens& tokens) {
    std::vector<float>& found = known_[tokens];
    if (!found.empty()) return found;
    Recurrent layer(backend_, value_dim_, 4, 1);
    const int32_t slot = 0;
    for (size_t i = 0; i < tokens.size(); ++i) {
      StepBatch one;
      sequence_of(one, 1, static_cast<int64_t>(i), 0, std::span(&slot, 1), tokens[i]);
      found = layer.run(one);
    }
    const std::vector<float> state = layer.slot(0);
    found.insert(found.end(), state.begin(), state.end());
    return found;
  }

  void step() {
    Tokens free(kSlots);
    std::iota(free.begin(), free.end(), 0);
    for (size_t i = free.size(); i > 1; --i) std::swap(free[i - 1], free[random_.below(i)]);
    std::vector<bool> read(kSlots);
    StepBatch step;
    std::vector<Tokens> slots(1 + random_.below(3)), before;
    for (Tokens& out : slots) {
      const auto from = static_cast<int32_t>(random_.below(kSlots));
      // Not one that a sequence before it writes, and none that one before it reads is written.
      const bool reads = std::find(free.begin(), free.end(), from) != free.end() && random_.below(8) > 0 &&
                         !contents_[static_cast<size_t>(from)].empty();
      const bool each = random_.below(4) > 0;
      const auto count = static_cast<int64_t>(1 + random_.below(each ? 4 : 20));
      for (size_t i = 0; i < free.size() && out.size() < static_cast<size_t>(each ? count : 1);) {
        const int32_t slot = free[i];
        if (read[static_cast<size_t>(slot)]) {
          ++i;
          continue;
        }
        out.push_back(slot);
        free.erase(free.begin() + static_cast<std::ptrdiff_t>(i));
      }
      if (out.empty()) break;
      if (reads) read[static_cast<size_t>(from)] = true;
      before.push_back(reads ? contents_[static_cast<size_t>(from)] : Tokens{});
      const int64_t rows = each ? static_cast<int64_t>(out.size()) : count;
      sequence_of(step, rows, static_cast<int64_t>(before.back().size()), from, out, next_token_);
      next_token_ += static_cast<int32_t>(rows);
    }
    const std::vector<float> outputs = layer_.run(step);
    for (size_t s = 0; s < step.sequences.size(); ++s) {
      const ops::Sequence& sequence = step.sequences[s];
      Tokens tokens = before[s];
      for (int32_t i = 0; i < sequence.count; ++i) {
        tokens.push_back(step.tokens[static_cast<size_t>(sequence.first + i)]);
        const bool each = sequence.state_out.size() > 1;
        if (each || i + 1 == sequence.count) {
          contents_[static_cast<size_t>(sequence.state_out[each ? static_cast<size_t>(i) : 0])] = tokens;
        }
        const auto width = static_cast<size_t>(layer_.width());
        const auto row = static_cast<size_t>(sequence.first + i);
        // Longer pieces of a prompt take another form, which rounds differently.
        if (sequence.count > 16) continue;
        EXPECT_TRUE(same(std::span(outputs).subspan(row * width, width), std::span(alone(tokens)).first(width)));
      }
      if (sequence.count > 16) contents_[static_cast<size_t>(sequence.state_out[0])].clear();
    }
  }

  void check(int64_t slot) {
    const Tokens& tokens = contents_[static_cast<size_t>(slot)];
    if (tokens.empty()) return;
    const auto width = static_cast<size_t>(layer_.width());
    EXPECT_TRUE(same(layer_.slot(slot), std::span(alone(tokens)).subspan(width))) << "slot " << slot;
  }

  void copy() {
    const auto from = static_cast<int64_t>(random_.below(kSlots)), to = static_cast<int64_t>(random_.below(kSlots));
    layer_.states().copy(from, to);
    contents_[static_cast<size_t>(to)] = contents_[static_cast<size_t>(from)];
  }

  cpu::CpuBackend& backend_;
  int64_t value_dim_;
  Random random_;
  Recurrent layer_;
  std::vector<Tokens> contents_ = std::vector<Tokens>(kSlots);  // of each slot; empty: nothing that is known
  std::map<Tokens, std::vector<float>> known_;
  int32_t next_token_ = 1;
};

TEST(StateSlots, HoldWhatTheirTokensGive) {
  for (const cpu::Isa isa : cpu::supported_isas()) {
    for (uint64_t seed = 1; seed <= 20; ++seed) {
      SCOPED_TRACE(std::string(cpu::isa_name(isa)) + ", seed " + std::to_string(seed));
      SlotScripts(backend_of(isa), seed % 2 == 0 ? 32 : 19, seed).run();
    }
  }
}

TEST(StateSlots, MistakesAreNoticed) {
  Recurrent layer(backend_of(cpu::Isa::kReference), 16, 2, 4);
  const int32_t slots[] = {1, 2, 1, 9};
  const auto run = [&](int64_t count, std::span<const int32_t> state_out) {
    StepBatch step;
    sequence_of(step, count, 0, 0, state_out, 1);
    layer.run(step);
  };
  EXPECT_NO_THROW(run(2, std::span(slots).first(2)));
  EXPECT_ANY_THROW(run(3, std::span(slots).first(2)));       // neither one nor three
  EXPECT_ANY_THROW(run(3, std::span(slots).first(3)));       // one slot twice
  EXPECT_ANY_THROW(run(1, std::span(slots).subspan(3, 1)));  // no such slot
  EXPECT_NO_THROW(run(1, {}));                               // in place
  StepBatch shared;                                          // the second reads what the first writes
  sequence_of(shared, 1, 0, 0, std::span(slots).first(1), 1);
  sequence_of(shared, 1, 4, 1, std::span(slots).subspan(1, 1), 2);
  EXPECT_ANY_THROW(layer.run(shared));
}

TEST(Padding, LeavesNoTraceAndIsFinite) {
  for (const cpu::Isa isa : cpu::supported_isas()) {
    SCOPED_TRACE(cpu::isa_name(isa));
    cpu::CpuBackend& backend = backend_of(isa);
    const int32_t slot = 0;
    Recurrent padded(backend, 32, 4, 2);
    Recurrent plain(backend, 32, 4, 2);
    StepBatch step;
    sequence_of(step, 3, 0, 0, std::span(&slot, 1), 10);
    const std::vector<float> wanted = plain.run(step);
    step.tokens.insert(step.tokens.end(), 4, 7);
    const std::vector<float> found = padded.run(step);
    EXPECT_TRUE(same(wanted, std::span(found).first(wanted.size())));
    for (size_t i = wanted.size(); i < found.size(); ++i) ASSERT_TRUE(std::isfinite(found[i]));
    EXPECT_TRUE(same(plain.slot(0), padded.slot(0)));
    EXPECT_TRUE(std::isnan(padded.slot(1)[0]));

    Random random(5);
    const auto table = random_matrix(random, ops::Format::kBf16, 20, 8);
    const auto loaded = backend.load_table(table->source);
    for (int32_t& token : step.tokens) token = 9;
    for (size_t i = 3; i < step.tokens.size(); ++i) step.tokens[i] = -1;
    backend.begin_step(step.batch());
    const Activations embedded(backend, 7, 8);
    backend.embed(*loaded, embedded.tensor());
    float row[8];
    for (int64_t t = 0; t < 7; ++t) {
      ops::dequantize(table->source, t < 3 ? 9 : 0, row);
      EXPECT_TRUE(same(row, std::span(embedded.tensor().f32(t), 8))) << t;
    }

    ops::AttentionParams params;
    params.heads = 4;
    params.kv_heads = 2;
    params.head_dim = 32;
    params.rotary_dim = 16;
    params.rope_theta = 1e4f;
    params.scale = 0.2f;
    ops::KvCacheShape shape;
    shape.layers = 1;
    shape.kv_heads = 2;
    shape.head_dim = 32;
    shape.pages = 2;
    shape.page_size = 4;
    const auto cache = backend.make_kv_cache(shape);
    const int32_t pages[] = {1};
    step.sequences[0].pages = pages;
    const Activations q(backend, random_values(random, 7 * 128), 7, 128);
    const Activations k(backend, random_values(random, 7 * 64), 7, 64);
    const Activations v(backend, random_values(random, 7 * 64), 7, 64);
    const Activations out(backend, 7, 128);
    backend.begin_step(step.batch());
    backend.attention(params, q.tensor(), k.tensor(), v.tensor(), *cache, 0, out.tensor());
    for (const float value : out.values()) ASSERT_TRUE(std::isfinite(value));
    // Page 0 and the fourth position of page 1 hold nothing.
    auto& host = dynamic_cast<cpu::HostKvCache&>(*cache);
    const int64_t bytes = host.padded_dim() * (host.type() == ops::DType::kF32 ? 4 : 2);
    for (int64_t head = 0; head < 2; ++head) {
      for (int64_t part = 0; part < 2; ++part) {
        for (int64_t at = 0; at < 8; ++at) {
          const auto* data = static_cast<const uint8_t*>(host.at(0, at / 4, head, part, at % 4));
          const bool empty = std::all_of(data, data + bytes, [](uint8_t byte) { return byte == 0; });
          EXPECT_EQ(empty, at < 4 || at == 7) << at;
        }
      }
    }
  }
}

}  // namespace
}  // namespace fourfold::test
