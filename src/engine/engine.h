// The engine: the narrow waist between everything that asks for tokens (terminal, evaluation, server) and the model.
//
// submit() queues a request and returns a stream of events; one engine thread owns the model and all its state, runs
// several requests at once (continuous batching), decides what runs in a step, and launches the next step while one
// runs. Requests and events speak token ids; text, templates and parsers live above.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/check.h"
#include "ops/step.h"

namespace fourfold::model {
class Model;
}

namespace fourfold::engine {

using ops::SamplingParams;
using ops::TokenLogprob;

// Restricts what a request may say next: a grammar, a choice, a forced call. Called on the engine thread, for one
// request only; whatever it throws ends that request with its message, and no other.
class Constraint {
 public:
  virtual ~Constraint() = default;
  // Which tokens may come next: bit t % 32 of bits[t / 32], ceil(vocabulary / 32) words that are all zero before.
  // False: any token may (the bits are not looked at). A request none of whose tokens may come next ends with kError.
  virtual bool mask(std::span<uint32_t> bits) = 0;
  // The next token was chosen, or is tried (a draft). False: it does not fit, and nothing has changed. Not called for
  // the token that ends the answer.
  virtual bool accept(int32_t token) = 0;
  // Takes the last `count` accepted tokens back.
  virtual void roll_back(int64_t count) = 0;
};

// Where a prompt's caches are worth keeping, beyond what the engine finds by itself (docs/engine.md). Text is above
// this waist, so who renders the prompt says where its turns begin.
struct CacheHints {
  // Numbers of prompt tokens, ascending: a state is kept after that many. The end of system prompt and tools; before
  // the last turn's opening.
  std::vector<int64_t> boundaries;
  // Requests share what is cached only with requests of the same salt (tenants that must not learn of each other).
  std::string salt;
};

struct Request {
  std::vector<int32_t> prompt;  // at least one token, each in [0, vocabulary)
  SamplingParams sampling;
  int64_t max_tokens = 256;          // of output, at least 1; cut to what max_context leaves (ends with kLength)
  int64_t min_tokens = 0;            // stop tokens are masked before that many; at most max_tokens
  std::vector<int32_t> stop_tokens;  // the one that is hit ends the answer and is delivered last
  bool ignore_eos = false;           // stop_tokens do not end the answer
  std::vector<int32_t> banned_tokens;
  int32_t defined_tokens = 0;  // > 0: ids from here on are vocabulary padding and never sampled
  // >= 0: Event::prompt_logprobs of the first event has, for each token of the prompt but the first, its
  // log-probability and this many of the most probable tokens (at most 20). Nothing is taken from the prefix cache.
  int32_t prompt_logprobs = -1;
  int32_t priority = 0;  // lower values first; equal ones in the order of submission
  // Ends with kDeadline when it passes, wherever the request is.
  std::optional<std::chrono::steady_clock::time_point> deadline;
  std::shared_ptr<Constraint> constraint;
  CacheHints cache;
  int32_t drafts = -1;  // -1: as EngineOptions::drafts; 0 .. 5: at most as many as the engine was made for
  // Called on the engine thread after events were added to the stream; must be quick. For callers that wait for many
  // streams at once (see EngineOptions::notified); a caller of EventStream::next() needs none. If it throws, its
  // request ends with kError.
  std::function<void()> notify;
};

enum class FinishReason : uint8_t { kStop, kLength, kCancelled, kDeadline, kError };

struct Event {
  enum class Kind : uint8_t { kToken, kFinished };
  Kind kind = Kind::kToken;
  int32_t token = -1;                  // kToken
  std::vector<TokenLogprob> logprobs;  // kToken, when asked for: the chosen one first, then the alternatives
  // The first event, when asked for: one entry for each token of the prompt but the first.
  std::vector<std::vector<TokenLogprob>> prompt_logprobs;
  FinishReason reason = FinishReason::kStop;     // kFinished
  std::string error;                             // kFinished with kError
  int64_t prompt_tokens = 0, output_tokens = 0;  // kFinished
  int64_t cached_tokens = 0;                     // kFinished: of the prompt, taken from the prefix cache
  int64_t drafted = 0, accepted = 0;             // kFinished: drafts that were verified, and of them accepted
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

// Why a request was not taken.
enum class Refusal : uint8_t {
  kInvalid,   // a field is outside its limits
  kTooLong,   // the prompt leaves no room for a token in the context
  kFull,      // max_queued requests or max_queued_tokens are waiting: try again later
  kDraining,  // the engine takes no more requests
  kFailed,    // an earlier step failed, and the engine with it
};

class Refused : public Error {
 public:
  Refused(Refusal reason, const std::string& message) : Error(message), reason_(reason) {}
  Refusal reason() const { return reason_; }

 private:
  Refusal reason_;
};

inline constexpr int32_t kAutoDrafts = -1;
inline constexpr int64_t kAutoDraftTokens = -1;

// Told of what the prefix cache holds, for whoever sends requests to where their prompts are cached. A block is a full
// page of tokens, named by a hash of all tokens up to its end; what has a salt (CacheHints) is not told. Called on the
// engine thread; must be quick, and not throw.
class CacheObserver {
 public:
  virtual ~CacheObserver() = default;
  // The blocks of `tokens`, which follow each other. `parent`: the block before the first one, if there is one.
  virtual void stored(std::optional<uint64_t> parent, std::span<const uint64_t> blocks,
                      std::span<const int32_t> tokens) = 0;
  virtual void removed(uint64_t block) = 0;
  virtual void cleared() = 0;
};

struct EngineOptions {
  int64_t max_context = 8192;     // positions a single request may use (prompt and output)
  int64_t max_sequences = 8;      // running at once
  int64_t max_step_tokens = 512;  // tokens of one model step; longer prompts are prefilled in chunks
  // Positions of the key/value cache in all, at least one full context; 0: enough for max_sequences of 1/2 max_context.
  // When it is used up the newest request gives its pages back and is computed again later, from its tokens.
  int64_t cache_tokens = 0;
  // Rows of logits beside those of each sequence's last token and drafts: log-probabilities of prompts are computed for
  // so many rows at a time, and those of drawn tokens beside penalties take a second row.
  int64_t spare_logit_rows = 128;
  int64_t page_size = 64;    // positions in a page of the cache
  int64_t max_queued = 256;  // waiting requests; more are refused
  // Of the prompts of waiting requests; more are refused, except that one longer prompt may wait alone.
  int64_t max_queued_tokens = int64_t{1} << 40;
  // Drafts of the MTP head that a step verifies: 0 .. 5, or kAutoDrafts: for each sequence what pays, by measurement.
  // Models without an MTP head: 0 or kAutoDrafts.
  int32_t drafts = 0;
  // What drafts are chosen from: the first so many tokens of the vocabulary, 0: all, or kAutoDraftTokens: all, the
  // first half or the first quarter, by what the sequences' own texts are made of (draft_lists.h). Of several ranks
  // all.
  int64_t draft_tokens = kAutoDraftTokens;
  bool prefix_cache = true;
  // Recurrent states kept for the prefix cache; 0: what an eighth of a full set of running sequences' caches would
  // take, at least 16. Pages of keys and values are kept as long as nobody else needs them.
  int64_t cached_states = 0;
  std::shared_ptr<CacheObserver> cache_observer = nullptr;  // null: nobody is told
  // Called on the engine thread behind the calls of Request::notify that belong together, those of one step: who
  // gathers what they tell can pass it on at once. Must be quick, and not throw.
  std::function<void()> notified = nullptr;
};

// Rows of logits that a model should be built for (ModelOptions::max_logit_rows). With fewer, log-probabilities
// take longer; one for each sequence and each of its drafts is the least.
int64_t logit_rows(const EngineOptions& options);
// Tokens of a step: EngineOptions::max_step_tokens, but no more than there are positions of all sequences.
int64_t step_tokens(const EngineOptions& options);

// Where prompts were not taken from the prefix cache, in tokens of prompts.
struct PrefixStats {
  int64_t prompt_tokens = 0;  // of requests that looked
  int64_t hit_tokens = 0;     // taken from the cache
  // Tokens that had been computed before, by a request of the same salt, and were computed again because…
  int64_t missed_no_state = 0;               // … pages were there, but no state at the boundary
  int64_t missed_evicted = 0;                // … pages had been given away
  int64_t pages = 0, states = 0, bytes = 0;  // held now (pages that running requests share are counted once)
};

struct DraftStats {
  int64_t rounds = 0;                      // steps of sequences that verified at least one draft
  int64_t drafted[ops::kMaxDrafts] = {};   // drafts verified at position 1, 2, …
  int64_t accepted[ops::kMaxDrafts] = {};  // and of them accepted
};

struct EngineStats {
  int64_t waiting = 0, running = 0, waiting_tokens = 0;
  int64_t pages_total = 0, pages_free = 0;  // free: nobody's, or only the prefix cache's
  int64_t slots_total = 0, slots_free = 0;  // free: nobody's; prefix.states of the others may be given up
  int64_t steps = 0, prefill_tokens = 0, decode_tokens = 0;
  int64_t prepared_steps = 0;  // of `steps`: ops::StepOutcome::prepared
  double step_seconds = 0;     // spent in steps, by the backend's clock
  int64_t preemptions = 0;
  int64_t finished[5] = {};  // by FinishReason
  PrefixStats prefix;
  DraftStats drafts;
  // Since the engine thread last came round; grows without bound only when a step never ends. Meaningless when idle.
  double heartbeat_seconds = 0;
  bool idle = true;
  std::string failure;  // not empty: the engine has failed, every request ended with this and new ones are refused
};

class Engine {
 public:
  virtual ~Engine() = default;
  // Checks every field against its limits and queues the request. Throws Refused, whose message names the field, the
  // value and the limits.
  virtual std::unique_ptr<EventStream> submit(Request request) = 0;
  // `count` answers to one prompt, which is computed once: answer i has the seed of the request plus i (a fresh one
  // each where it is unset). All or nothing. The request has no constraint: they are not shared.
  virtual std::vector<std::unique_ptr<EventStream>> submit(Request request, int64_t count) = 0;
  virtual EngineStats stats() const = 0;
  // Refuses new requests, and returns when the queued and running ones are done.
  virtual void drain() = 0;
};

// The engine takes the model over. An Error when the options contradict the model or each other: the model must have
// been built for max_step_tokens tokens a step and max_sequences x (1 + drafts) rows of logits.
std::unique_ptr<Engine> make_engine(std::unique_ptr<model::Model> model, const EngineOptions& options);

}  // namespace fourfold::engine
