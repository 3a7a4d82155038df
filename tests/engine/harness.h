// What the engine's tests share: engines on the fake model, requests, and what a request comes to without an engine.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/sample/sampler.h"
#include "engine/engine.h"
#include "fake_model.h"

namespace fourfold::engine {

using namespace std::chrono_literals;

struct Outcome {
  std::vector<int32_t> tokens;
  std::vector<std::vector<TokenLogprob>> logprobs, prompt_logprobs;
  Event end;
  bool operator==(const Outcome& other) const { return tokens == other.tokens && end.reason == other.end.reason; }
};

inline void PrintTo(const Outcome& outcome, std::ostream* out) {
  *out << outcome.tokens.size() << " tokens:";
  for (const int32_t token : outcome.tokens) *out << ' ' << token;
  *out << ", reason " << static_cast<int>(outcome.end.reason) << ' ' << outcome.end.error;
}

// Reads a stream to its end; a stream that stays silent for 20 s is a failure.
inline Outcome collect(EventStream& stream, int64_t cancel_after = -1) {
  Outcome outcome;
  if (cancel_after == 0) stream.cancel();
  for (;;) {
    std::optional<Event> event = stream.next(20s);
    if (!event) throw std::runtime_error("no event within 20 s");
    if (event->kind == Event::Kind::kFinished) {
      outcome.end = *event;
      if (stream.next(0ms)) throw std::runtime_error("an event after the last");
      return outcome;
    }
    if (outcome.tokens.empty()) outcome.prompt_logprobs = event->prompt_logprobs;
    outcome.tokens.push_back(event->token);
    outcome.logprobs.push_back(event->logprobs);
    if (static_cast<int64_t>(outcome.tokens.size()) == cancel_after) stream.cancel();
  }
}

// The tokens of a request, computed without engine, steps and caches. `constraint` is a copy of the request's own.
inline Outcome alone(const Request& request, int64_t vocabulary, int64_t max_context,
                     Constraint* constraint = nullptr) {
  Outcome outcome;
  cpu::Sampler sampler(vocabulary);
  cpu::TokenCounts counts;
  const bool penalized = request.sampling.penalized();
  if (penalized) {
    counts.start(vocabulary);
    for (const int32_t token : request.prompt) counts.add_prompt(token);
  }
  std::vector<int32_t> tokens = request.prompt;
  std::vector<float> logits(static_cast<size_t>(vocabulary));
  std::vector<uint32_t> mask;
  const std::vector<int32_t> stops = request.ignore_eos ? std::vector<int32_t>{} : request.stop_tokens;
  const int64_t limit = std::min(request.max_tokens, max_context - static_cast<int64_t>(request.prompt.size()));
  outcome.end.reason = FinishReason::kError;
  for (int64_t i = 0; i < limit; ++i) {
    fake_logits(FakeModel::expected_hash(tokens), logits);
    try {
      if (constraint != nullptr) {
        mask.assign(static_cast<size_t>((vocabulary + 31) / 32), 0);
        if (!constraint->mask(mask)) std::fill(mask.begin(), mask.end(), ~uint32_t{0});
        if (std::all_of(mask.begin(), mask.end(), [](uint32_t word) { return word == 0; })) return outcome;
      }
      const cpu::Chosen chosen = sampler.choose(
          logits, {.params = request.sampling,
                   .seed = *request.sampling.seed,
                   .index = i,
                   .defined_tokens = request.defined_tokens,
                   .banned = request.banned_tokens,
                   .too_early = i < request.min_tokens ? std::span<const int32_t>(stops) : std::span<const int32_t>{},
                   .mask = mask,
                   .counts = counts.counts()});
      const bool stopped = std::find(stops.begin(), stops.end(), chosen.token) != stops.end();
      if (constraint != nullptr && !stopped && i + 1 < limit && !constraint->accept(chosen.token)) return outcome;
      if (penalized) counts.add_output(chosen.token);
      tokens.push_back(chosen.token);
      outcome.tokens.push_back(chosen.token);
      if (stopped) {
        outcome.end.reason = FinishReason::kStop;
        return outcome;
      }
    } catch (const std::exception&) {
      return outcome;
    }
  }
  outcome.end.reason = FinishReason::kLength;
  return outcome;
}

inline std::unique_ptr<Engine> fake_engine(const EngineOptions& options, FakeOptions fake = {}) {
  return make_engine(std::make_unique<FakeModel>(std::move(fake)), options);
}

inline EngineOptions small_options() {
  EngineOptions options;
  options.max_context = 64;
  options.max_sequences = 4;
  options.max_step_tokens = 16;
  options.page_size = 4;
  return options;
}

inline Request simple_request(std::vector<int32_t> prompt, int64_t max_tokens, uint64_t seed = 1) {
  Request request;
  request.prompt = std::move(prompt);
  request.max_tokens = max_tokens;
  request.sampling.seed = seed;
  return request;
}

// When all requests are over: nothing is held but by the prefix cache.
inline void expect_idle(Engine& engine) {
  engine.drain();
  const EngineStats stats = engine.stats();
  EXPECT_EQ(stats.pages_free, stats.pages_total);
  EXPECT_EQ(stats.slots_free + stats.prefix.states, stats.slots_total);
  EXPECT_EQ(stats.running, 0);
  EXPECT_EQ(stats.waiting, 0);
  EXPECT_EQ(stats.waiting_tokens, 0);
}

}  // namespace fourfold::engine
