// The engine: the narrow waist between everything that asks for tokens (terminal, evaluation, server) and the model.
//
// submit() queues a request and returns a stream of events; one engine thread owns the model and all its state, runs
// several requests at once (continuous batching) and decides what runs in a step. Requests and events speak token ids;
// text, templates and parsers live above.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace fourfold::model {
class Model;
}

namespace fourfold::engine {

// How the next token is chosen. Steps in this order: logit bias and masks, penalties, temperature, top_k, top_p, min_p,
// then a draw from what is left. temperature 0 is greedy (ties: the lower id).
struct SamplingParams {
  float temperature = 1.0f;  // 0 .. 10
  int32_t top_k = 0;         // 0: off
  float top_p = 1.0f;        // (0, 1]
  float min_p = 0.0f;        // [0, 1): drop tokens below min_p x the largest probability
  float repetition_penalty =
      1.0f;  // (0, 10]: logits of tokens seen in prompt or output divided (if positive) or multiplied
  float presence_penalty = 0.0f;   // [-10, 10]: subtracted once from tokens seen in the output
  float frequency_penalty = 0.0f;  // [-10, 10]: subtracted once per occurrence in the output
  std::vector<std::pair<int32_t, float>> logit_bias;
  std::optional<uint64_t> seed;  // unset: a fresh one; the request's tokens depend on its seed alone, not on the batch
  int32_t logprobs = -1;  // >= 0: report the chosen token's log-probability and this many alternatives (at most 20)
};

struct Request {
  std::vector<int32_t> prompt;  // at least one token, each in [0, vocabulary)
  SamplingParams sampling;
  int64_t max_tokens = 256;          // of output
  std::vector<int32_t> stop_tokens;  // the one that is hit ends the answer and is delivered last
  std::vector<int32_t> banned_tokens;
  int32_t defined_tokens = 0;  // > 0: ids from here on are vocabulary padding and never sampled
};

enum class FinishReason : uint8_t { kStop, kLength, kCancelled, kError };

struct TokenLogprob {
  int32_t token = 0;
  float logprob = 0;
};

struct Event {
  enum class Kind : uint8_t { kToken, kFinished };
  Kind kind = Kind::kToken;
  int32_t token = -1;                            // kToken
  std::vector<TokenLogprob> logprobs;            // kToken, when asked for: the chosen one first, then the alternatives
  FinishReason reason = FinishReason::kStop;     // kFinished
  std::string error;                             // kFinished with kError
  int64_t prompt_tokens = 0, output_tokens = 0;  // kFinished
  double prefill_seconds = 0, decode_seconds = 0;  // kFinished: until the first token; from the first to the last
};

// The events of one request. Dropping a stream cancels its request.
class EventStream {
 public:
  virtual ~EventStream() = default;
  // The next event, or nothing when the timeout passes. After kFinished there are no more.
  virtual std::optional<Event> next(std::chrono::milliseconds timeout) = 0;
  virtual uint64_t id() const = 0;
  virtual void cancel() = 0;
};

struct EngineOptions {
  int64_t max_context = 8192;     // positions a single request may use (prompt and output)
  int64_t max_sequences = 8;      // running at once
  int64_t max_step_tokens = 512;  // tokens of one model step; longer prompts are prefilled in chunks
  int64_t cache_tokens = 0;  // positions of the key/value cache in all; 0: enough for max_sequences of 1/2 max_context,
                             // at least one full context
  int64_t max_queued = 256;  // waiting requests; more are refused
};

struct EngineStats {
  int64_t waiting = 0, running = 0;
  int64_t pages_total = 0, pages_free = 0;
  int64_t slots_total = 0, slots_free = 0;
  int64_t steps = 0, prefill_tokens = 0, decode_tokens = 0;
  double step_seconds = 0;  // spent in model steps
  int64_t preemptions = 0;
};

class Engine {
 public:
  virtual ~Engine() = default;
  // Checks every field against its limits and queues the request; an Error names the field, the value and the limits.
  virtual std::unique_ptr<EventStream> submit(Request request) = 0;
  virtual EngineStats stats() const = 0;
  // Refuses new requests, and returns when the running ones are done.
  virtual void drain() = 0;
};

// The engine takes the model over. `model` must have been built for at least max_step_tokens tokens a step.
std::unique_ptr<Engine> make_engine(std::unique_ptr<model::Model> model, const EngineOptions& options);

}  // namespace fourfold::engine
