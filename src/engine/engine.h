// The engine: the narrow waist between everything that asks for tokens (terminal, evaluation, server) and the model.
//
// submit() queues a request and returns a stream of events; one engine thread owns the model and all its state, runs
// several requests at once (continuous batching) and decides what runs in a step. Requests and events speak token ids;
// text, templates and parsers live above.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
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
  float temperature = 1.0f;         // 0 .. 10
  int32_t top_k = 0;                // 0: off
  float top_p = 1.0f;               // (0, 1]
  float min_p = 0.0f;               // [0, 1): drop tokens below min_p x the largest probability
  float repetition_penalty = 1.0f;  // (0, 10]: logits of tokens of prompt or output divided (positive) or multiplied
  float presence_penalty = 0.0f;    // [-10, 10]: subtracted once from tokens seen in the output
  float frequency_penalty = 0.0f;   // [-10, 10]: subtracted once per occurrence in the output
  std::vector<std::pair<int32_t, float>> logit_bias;  // added; each in [-100, 100]
  std::optional<uint64_t> seed;  // unset: a fresh one; the request's tokens depend on its seed alone, not on the batch
  // >= 0: report the chosen token's log-probability and this many of the most probable tokens (at most 20), of the
  // model's own distribution: before bias, penalties and temperature.
  int32_t logprobs = -1;
};

struct Request {
  std::vector<int32_t> prompt;  // at least one token, each in [0, vocabulary)
  SamplingParams sampling;
  int64_t max_tokens = 256;          // of output, at least 1; cut to what max_context leaves (ends with kLength)
  std::vector<int32_t> stop_tokens;  // the one that is hit ends the answer and is delivered last
  std::vector<int32_t> banned_tokens;
  int32_t defined_tokens = 0;  // > 0: ids from here on are vocabulary padding and never sampled
  // Called on the engine thread after events were added to the stream; must be quick. For callers that wait for many
  // streams at once; a caller of EventStream::next() needs none.
  std::function<void()> notify;
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
  // kFinished: waiting until its first step; from there to the first token; from the first token to the last.
  double queue_seconds = 0, prefill_seconds = 0, decode_seconds = 0;
};

// The events of one request: tokens, then exactly one kFinished, whatever happens. Dropping a stream cancels its
// request. A stream may outlive its engine (which ends it with kCancelled).
class EventStream {
 public:
  virtual ~EventStream() = default;
  // The next event, or nothing when the timeout passes (0 or less: at once). After kFinished there are no more.
  virtual std::optional<Event> next(std::chrono::milliseconds timeout) = 0;
  virtual uint64_t id() const = 0;
  virtual void cancel() = 0;
};

struct EngineOptions {
  int64_t max_context = 8192;     // positions a single request may use (prompt and output)
  int64_t max_sequences = 8;      // running at once
  int64_t max_step_tokens = 512;  // tokens of one model step; longer prompts are prefilled in chunks
  // Positions of the key/value cache in all, at least one full context; 0: enough for max_sequences of 1/2 max_context.
  // When it is used up the newest request gives its pages back and is computed again later, from its tokens.
  int64_t cache_tokens = 0;
  int64_t page_size = 64;    // positions in a page of the cache
  int64_t max_queued = 256;  // waiting requests; more are refused
};

struct EngineStats {
  int64_t waiting = 0, running = 0;
  int64_t pages_total = 0, pages_free = 0;
  int64_t slots_total = 0, slots_free = 0;
  int64_t steps = 0, prefill_tokens = 0, decode_tokens = 0;
  double step_seconds = 0;    // spent in model steps, until their logits were read
  double sample_seconds = 0;  // spent choosing tokens
  int64_t preemptions = 0;
};

class Engine {
 public:
  virtual ~Engine() = default;
  // Checks every field against its limits and queues the request; an Error names the field, the value and the limits.
  // Also an Error: the queue is full, the engine drains, or a model step failed (which ends every request with kError).
  virtual std::unique_ptr<EventStream> submit(Request request) = 0;
  virtual EngineStats stats() const = 0;
  // Refuses new requests, and returns when the queued and running ones are done.
  virtual void drain() = 0;
};

// The engine takes the model over. An Error when the options contradict the model or each other: the model must have
// been built for max_step_tokens tokens a step and max_sequences rows of logits.
std::unique_ptr<Engine> make_engine(std::unique_ptr<model::Model> model, const EngineOptions& options);

}  // namespace fourfold::engine
