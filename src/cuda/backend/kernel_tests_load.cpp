// Self-tests of what brings weights into their form, of experts that are not NVFP4, and of the choice of tokens.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/check.h"
#include "cpu/sample/sampler.h"
#include "cuda/backend/kernel_test_data.h"
#include "cuda/backend/kernel_tests.h"
#include "cuda/backend/plain_experts.h"
#include "cuda/backend/tensors.h"
#include "cuda/gemm/packed_matrix.h"
#include "cuda/moe/reference.h"
#include "nvfp4/number.h"

namespace fourfold::cuda {
namespace {

template <typename T>
std::vector<T> fetch(const Card& card, const T* from, size_t count) {
  std::vector<T> values(count);
  card.device.check(card.device.driver().call().copy_to_host(values.data(), address_of(from), count * sizeof(T),
                                                             card.stream.handle()),
                    "copy from the device");
  card.stream.synchronize();
  return values;
}

// Finite numbers in a format that is not kept as it is.
std::unique_ptr<TestWeight> wide_weight(Random& random, ops::Format format, int64_t rows, int64_t columns) {
  auto w = std::make_unique<TestWeight>();
  w->source.name = "self-test";
  w->source.format = format;
  w->source.rows = rows;
  w->source.columns = columns;
  for (int64_t i = 0; i < rows * columns; ++i) {
    const auto value = static_cast<float>(random.normal());
    uint8_t bytes[4];
    const size_t size = format == ops::Format::kF32 ? 4 : 2;
    const uint16_t half = nvfp4::float_to_f16(value);
    std::memcpy(bytes, size == 4 ? static_cast<const void*>(&value) : &half, size);
    w->bytes.insert(w->bytes.end(), bytes, bytes + size);
  }
  w->source.data = w->bytes.data();
  return w;
}

}  // namespace

// ---- repacking

// Each format that a checkpoint may have, against the host's own repacking, byte by byte.
void KernelTests::repacking() {
  constexpr int64_t kRows = 37, kColumns = 272;
  Random random(20268);
  Card& card = *of_.card_;
  const SmallBlocks small(card);
  on();
  std::vector<std::unique_ptr<TestWeight>> weights;
  for (const ops::Format format : {ops::Format::kF32, ops::Format::kF16}) {
    weights.push_back(wide_weight(random, format, kRows, kColumns));
  }
  for (const gemm::Weights format : {gemm::Weights::kNvfp4, gemm::Weights::kFp8, gemm::Weights::kBf16}) {
    weights.push_back(test_weight(random, format, true, kRows, kColumns));
  }
  for (const auto& weight : weights) {
    const std::span<const ops::MatrixSource> source(&weight->source, 1);
    launched_.clear();
    const Stack stack(of_.card_, source);
    card.settle_weights();
    const PackedMatrix want = pack_stack(source);
    const std::vector<uint8_t> got =
        fetch(card, stack.matrix().parts[0].weights, gemm::packed_bytes(want.parts[0].format, want.tiles, kColumns));
    const auto unequal =
        std::mismatch(got.begin(), got.end(), want.bytes.begin() + static_cast<std::ptrdiff_t>(want.parts[0].weights));
    note(unequal.first == got.end()
             ? ""
             : fmt::format("{} weights: byte {} is {}, wanted {}", ops::format_name(weight->source.format),
                           unequal.first - got.begin(), *unequal.first, *unequal.second));
  }
  // A weight that is no number is found.
  const std::unique_ptr<TestWeight> bad = test_weight(random, gemm::Weights::kFp8, false, kRows, kColumns);
  bad->bytes[20 * kColumns + 71] = 0x7f;
  launched_.clear();
  std::string said;
  try {
    const Stack stack(of_.card_, std::span(&bad->source, 1));
    card.settle_weights();
  } catch (const Error& error) {
    said = error.what();
  }
  note(said.find("row 16 to 31") != std::string::npos ? "" : "a weight that is NaN was not found");
}

// ---- experts that are not NVFP4

void KernelTests::plain_experts(int gate_up_formats, int down_formats) {
  constexpr int64_t kExperts = 5, kTopK = 3, kHidden = 144, kWidth = 208, kMost = 50;
  Random random(20269);
  const Stream& stream = of_.card_->stream;
  const SmallBlocks small(*of_.card_);
  CudaBackend& backend = on();
  const auto make = [&](int formats, int64_t rows, int64_t columns) {
    for (const gemm::Weights format : {gemm::Weights::kNvfp4, gemm::Weights::kFp8}) {
      if ((formats >> static_cast<int>(format) & 1) != 0) {
        return test_weight(random, format, (formats & gemm::kCells) != 0, rows, columns);
      }
    }
    return test_weight(random, gemm::Weights::kBf16, false, rows, columns);
  };
  struct Expert {
    std::unique_ptr<TestWeight> gate, up, down;
    std::vector<float> gates, ups, downs;  // as fp32
  };
  std::vector<Expert> experts(kExperts);
  for (Expert& e : experts) {
    e.gate = make(gate_up_formats, kWidth, kHidden);
    e.up = make(gate_up_formats, kWidth, kHidden);
    e.down = make(down_formats, kHidden, kWidth);
    // About 1, so that the activation is neither 0 nor its argument.
    e.gates = dequantised(e.gate->source);
    double squares = 0;
    for (const float g : e.gates) squares += static_cast<double>(g) * static_cast<double>(g);
    const auto scale = static_cast<float>(std::sqrt(static_cast<double>(kWidth) / (squares + 1e-30)));
    e.gate->source.tensor_scale *= scale;
    for (float& g : e.gate->grid) g *= scale;
    e.gates = dequantised(e.gate->source);
    e.ups = dequantised(e.up->source);
    e.downs = dequantised(e.down->source);
  }
  const auto loaded = backend.load_experts(
      kExperts,
      [&](int64_t i) {
        const Expert& e = experts[static_cast<size_t>(i)];
        return ops::ExpertSource{e.gate->source, e.up->source, e.down->source};
      },
      [](int64_t) {});
  of_.card_->settle_weights();
  const auto& plain = dynamic_cast<const PlainExperts&>(*loaded);
  // Blocks of 16 tokens, and of many; one expert with more rows than a block, one with none, a choice that is none.
  for (const int64_t tokens : {int64_t{9}, kMost}) {
    const std::vector<float> x = bf16_normals(random, tokens * kHidden);
    std::vector<int> ids;
    std::vector<float> factors;
    for (int64_t t = 0; t < tokens; ++t) {
      for (const int id : {0, t % 5 == 4 ? -1 : 1, 2 + static_cast<int>(t % 2)}) {
        ids.push_back(id);
        factors.push_back(static_cast<float>(random.uniform(0.1, 0.6)));
      }
    }
    cuda::Buffer card_ids(of_.card_->device, ids.size() * sizeof(int), "self-test"),
        card_factors(of_.card_->device, factors.size() * sizeof(float), "self-test");
    card_ids.upload(stream, ids);
    card_factors.upload(stream, factors);
    const TestRows in = rows_of(backend, stream, x, kHidden), out = empty_rows(backend, stream, tokens, kHidden);
    backend.begin_step({});
    launched_.clear();
    backend.plain_experts(plain, in.tensor, card_ids.as<int>(), card_factors.as<float>(), kTopK, out.tensor, {});
    const std::vector<float> got = read(backend, out.tensor);
    const PlainTables at = plain_tables(tokens, kTopK, kExperts);
    const std::vector<int> slots =
        fetch(*of_.card_, device_pointer<const int>(backend.plain_tables_.address() + at.pick_slot), ids.size());
    const std::vector<uint16_t> inner =
        fetch(*of_.card_, backend.plain_hidden_.as<const uint16_t>(), static_cast<size_t>(at.slots * kWidth));
    std::string wrong_inner, wrong;
    std::vector<float> want(got.size()), bound(got.size());
    for (size_t i = 0; i < ids.size() && wrong_inner.empty(); ++i) {
      if (ids[i] < 0) continue;
      if (slots[i] < 0 || slots[i] >= at.slots) {
        wrong_inner = fmt::format("choice {} is in row {} of {}", i, slots[i], at.slots);
        break;
      }
      const Expert& e = experts[static_cast<size_t>(ids[i])];
      const size_t token = i / kTopK;
      std::vector<float> h(kWidth);
      for (size_t j = 0; j < kWidth; ++j) {
        h[j] = nvfp4::bf16_to_float(inner[static_cast<size_t>(slots[i]) * kWidth + j]);
        const Dot gate = dot(&e.gates[j * kHidden], &x[token * kHidden], kHidden),
                  up = dot(&e.ups[j * kHidden], &x[token * kHidden], kHidden);
        const Activated a = activate(plan::moe::Activation::kSwiGlu, 0, gate.value, 2 * kDotError * gate.magnitude,
                                     up.value, 2 * kDotError * up.magnitude);
        if (std::fabs(h[j] - a.value) <= a.error + kRoundError * std::fabs(a.value) + 1e-30f) continue;
        wrong_inner =
            fmt::format("h of expert {}, token {}, column {} is {}, wanted {}", ids[i], token, j, h[j], a.value);
        break;
      }
      for (size_t c = 0; c < kHidden && wrong_inner.empty(); ++c) {
        const Dot d = dot(&e.downs[c * kWidth], h.data(), kWidth);
        want[token * kHidden + c] += factors[i] * d.value;
        bound[token * kHidden + c] += factors[i] * 2 * kDotError * d.magnitude;
      }
    }
    for (size_t i = 0; i < want.size(); ++i) bound[i] += kRoundError * std::fabs(want[i]) + 1e-30f;
    if (wrong_inner.empty()) wrong = compare_each(got, want, bound, kHidden);
    // Routing and gate-up are judged by h, what is behind them by what it made of that.
    const auto behind = std::find_if(launched_.begin(), launched_.end(), [&](const std::string& kernel) {
      const auto& entries = backend.loaded(plain_source(of_.arch_, gate_up_formats, down_formats));
      return kernel == entries[kPlainDownFew].name || kernel == entries[kPlainDownMany].name;
    });
    std::vector<std::string> last(behind, launched_.end());
    launched_.erase(behind, launched_.end());
    note(wrong_inner);
    if (!wrong_inner.empty()) continue;
    launched_ = std::move(last);
    note(wrong);
  }
}

// ---- choosing tokens

namespace {

struct ChoiceCase {
  ops::SamplingParams params;
  int32_t defined = 0;
  std::vector<int32_t> banned, too_early;
  std::vector<uint32_t> mask;
  std::vector<int32_t> counts;
  int32_t given = -1;
  bool ties = false, bad = false;  // among its logits; a logit is NaN
};

// Every limit by itself, together, and what may not be chosen.
std::vector<ChoiceCase> choice_cases(Random& random, int vocabulary) {
  std::vector<ChoiceCase> cases;
  const auto add = [&](float temperature) -> ChoiceCase& {
    cases.emplace_back();
    cases.back().params.temperature = temperature;
    return cases.back();
  };
  const auto mask = [&](bool any) {
    std::vector<uint32_t> words(static_cast<size_t>((vocabulary + 31) / 32));
    for (uint32_t& word : words) word = any ? static_cast<uint32_t>(random.next()) : 0;
    return words;
  };
  add(0.8f).params.logprobs = 5;
  cases.back().mask = mask(true);  // two launches
  add(0.8f).params.logprobs = 5;
  add(0).params.logprobs = 3;
  cases.back().given = 17;
  add(0).ties = true;
  add(0).mask = mask(true);
  add(1.3f);
  add(1).params.top_k = 7;
  cases.back().ties = true;
  for (int i = 0; i < 4; ++i) add(4).params.top_k = 90;  // a wrong draw hits the right token once in a while
  add(0.7f).params.top_p = 0.6f;
  add(1).params.min_p = 0.2f;
  ChoiceCase& all = add(1.1f);
  all.params.top_k = 40;
  all.params.top_p = 0.9f;
  all.params.min_p = 0.02f;
  all.params.logit_bias = {{3, 8.0f}, {vocabulary - 1, 7.5f}};
  all.mask = mask(true);
  all.mask[0] |= 8;
  ChoiceCase& early = add(0.5f);
  for (int32_t t = 0; t < vocabulary; t += 3) early.banned.push_back(t);
  early.too_early = {1, 4};
  add(1.5f).defined = vocabulary / 3;
  ChoiceCase& seen = add(0.6f);
  seen.params.repetition_penalty = 1.3f;
  seen.params.presence_penalty = 0.7f;
  seen.params.frequency_penalty = -0.25f;
  for (int32_t t = 0; t < vocabulary; ++t) seen.counts.push_back(std::max(0, t % 7 - 3));
  add(1).bad = true;
  add(1).mask = mask(false);
  return cases;
}

}  // namespace

void KernelTests::choices() {
  Random random(20270);
  const Stream& stream = of_.card_->stream;
  struct Shape {
    int vocabulary;
    size_t rows;  // the first ones; few are chosen by several CTAs a row
  };
  for (const Shape& shape : {Shape{5003, 1}, Shape{1501, 19}}) {
    std::vector<ChoiceCase> cases = choice_cases(random, shape.vocabulary);
    cases.resize(shape.rows);
    const auto vocabulary = static_cast<size_t>(shape.vocabulary);
    std::vector<float> logits;
    for (const ChoiceCase& c : cases) {
      for (size_t i = 0; i < vocabulary; ++i) {
        const double x = 3 * random.normal();
        logits.push_back(static_cast<float>(c.ties ? std::round(x) : x));
      }
      if (c.bad) logits[logits.size() - 900] = std::nanf("");
    }
    std::vector<cpu::RowChoice> rows;
    for (size_t i = 0; i < cases.size(); ++i) {
      const ChoiceCase& c = cases[i];
      rows.push_back({static_cast<int64_t>(i),
                      {c.params, random.next(), static_cast<int64_t>(i), c.defined, c.banned, c.too_early, c.mask,
                       c.counts, c.given}});
      if (!c.counts.empty()) rows.back().counted = {.lane = static_cast<int32_t>(i), .begins = true};
    }
    CudaBackend& backend = on();
    ops::StepLimits limits;
    limits.lanes = limits.rows = static_cast<int64_t>(shape.rows);
    limits.logit_rows = limits.rows + 1;
    limits.vocabulary = shape.vocabulary;
    backend.reserve_choices(limits);
    std::vector<float> room = logits;  // and a row more
    room.insert(room.end(), vocabulary, 0.0f);
    const TestRows in = rows_of(backend, stream, room, shape.vocabulary, true);
    launched_.clear();
    if (!backend.choose_later(in.tensor.slice_rows(0, limits.rows), rows))
      fail("the choice of tokens has no room for its self-test");
    std::vector<cpu::Chosen> got(rows.size());
    std::vector<std::string> errors(rows.size());
    backend.collect(got, errors);
    cpu::Sampler sampler(shape.vocabulary);
    std::string wrong;
    for (size_t i = 0; i < rows.size(); ++i) {
      const std::span<const float> row = std::span(logits).subspan(i * vocabulary, vocabulary);
      const cpu::Choice& choice = rows[i].choice;
      std::vector<float> scratch(row.begin(), row.end());
      cpu::Chosen want;
      std::string error;
      try {
        want = sampler.choose(scratch, choice);
      } catch (const Error& e) {
        error = e.what();
      }
      if (!wrong.empty()) continue;
      if (error.empty() != errors[i].empty()) {
        wrong = fmt::format("row {}: '{}', wanted '{}'", i, errors[i], error);
      } else if (error.empty() && got[i].token != want.token) {
        wrong = fmt::format("row {}: token {}, wanted {}", i, got[i].token, want.token);
      } else if (error.empty() && got[i].logprobs.size() != want.logprobs.size()) {
        wrong = fmt::format("row {}: {} log-probabilities, wanted {}", i, got[i].logprobs.size(), want.logprobs.size());
      }
      for (size_t k = 0; wrong.empty() && k < want.logprobs.size(); ++k) {
        const ops::TokenLogprob &a = got[i].logprobs[k], &b = want.logprobs[k];
        if (a.token == b.token && std::fabs(a.logprob - b.logprob) < 1e-3f) continue;
        wrong = fmt::format("row {}: log-probability {} of token {}, wanted {} of {}", i, a.logprob, a.token, b.logprob,
                            b.token);
      }
    }
    note(wrong);
  }
}

}  // namespace fourfold::cuda
