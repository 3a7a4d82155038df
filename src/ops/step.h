// The step: the narrow waist between the engine, which decides what runs, and a backend, which runs it.
//
// A sequence is a *lane*. Its last token, position, drafts, pages, state slot, sampling state and counts live with the
// backend, so that the next step can be launched before the tokens of this one are known to the host:
//
//   launch(plan) -> ticket      queues a step behind those launched before; returns at once
//   wait(ticket) -> outcome     tokens, accepted drafts, asked-for log-probabilities, errors by lane
//
// At most kInFlight steps are under way. A plan says where tokens come from (the host: prompts; or the lane: the token
// it chose last, and its drafts), how many rows each lane gets, and where pages and state slots are. What a lane makes
// of it is the backend's own knowledge: a lane that chose a stop token, or reached its limit, has ended, and its rows
// in steps launched before the host knew are computed for nobody and change nothing (no token, no state, no count).
//
// What happens within a step is the *body*: the model's forward pass and what surrounds it, written once against
// StepScope and Backend. It is recorded once for each shape and replayed with the plan's values (a graph on a GPU), or
// called (CPU). So nothing in a body may depend on a value that changes from step to step.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ops/sampling.h"
#include "ops/tensor.h"

namespace fourfold::ops {

// Steps launched and not yet waited for.
inline constexpr int64_t kInFlight = 2;
// Drafts of a lane in one step.
inline constexpr int64_t kMaxDrafts = 5;
// Lists of tokens, beside all of them, that a stepper can draft from.
inline constexpr size_t kDraftLists = 2;

// What a stepper is built for; everything is sized from it, and nothing grows afterwards.
struct StepLimits {
  int64_t lanes = 0;       // lanes [0, lanes)
  int64_t rows = 0;        // of one step
  int64_t logit_rows = 0;  // rows whose logits are computed at a time; of one step, those that tokens are chosen from
  int64_t drafts = 0;      // of a lane in one step, 0 .. kMaxDrafts; more than 0 needs a model with an MTP head
  int64_t context = 0;     // positions of one lane
  int64_t page_size = 0;
  int64_t vocabulary = 0;
  // The first so many tokens of the vocabulary, multiples of kFirstRows, that drafts may be chosen from alone; 0: there
  // is no such list.
  std::array<int64_t, kDraftLists> draft_lists = {};
};

// What a lane needs to know of its request. Spans are read by launch() only.
struct LaneStart {
  SamplingParams sampling;
  uint64_t seed = 0;
  std::span<const int32_t> prompt;  // what the repetition penalty looks at
  std::span<const int32_t> output;  // tokens chosen before (a sequence that is computed again); draws go on behind them
  int64_t max_output = 0;           // the lane ends with its max_output-th token, those of `output` counted
  int64_t min_output = 0;           // stop tokens are masked before that many
  std::span<const int32_t> stop_tokens;    // the one that is chosen ends the lane
  std::span<const int32_t> banned_tokens;  // never chosen
  int32_t defined_tokens = 0;              // > 0: ids from here on are vocabulary padding and never chosen
  bool constrained = false;                // every step that chooses its tokens gets masks: supply_masks()
};

// One lane's part of a step.
struct LaneWork {
  int32_t lane = -1;
  const LaneStart* start = nullptr;  // not null: the lane begins anew, whatever it was before

  // Tokens of the host, at positions `position` and up: a prompt or a piece of it. Empty: the lane goes on from where
  // it is, with the token it chose last and the first `drafts` of the drafts it made.
  std::span<const int32_t> tokens;
  int32_t position = 0;
  int32_t next = -1;   // the token that follows `tokens`, where the host knows it; -1: the step chooses it
  int32_t drafts = 0;  // without tokens: drafts to verify, at most as many as the lane was asked for the step before
  int32_t new_drafts = 0;  // drafts to make for the lane's next step; only where this step chooses a token
  // Keep what drafting reads (the MTP head's keys and values) up to date for this lane. Must have been so from the
  // lane's first token on where new_drafts > 0.
  bool feed_drafter = false;
  int32_t prompt_logprobs = -1;  // >= 0, with tokens: log-probabilities of tokens[1 ..] and `next`, and so many others

  // The lane's pages from index first_page on; earlier ones stay as they are. Together they must hold every position
  // that the step may write.
  int32_t first_page = 0;
  std::span<const int32_t> pages;
  // The slot that holds the state before the first row; -1: where the lane's last step left it. Ignored at position 0.
  int32_t state_in = -1;
  // One slot: the state after the last row goes there. Without tokens and with drafts one for each row (1 + drafts):
  // the lane's state is then the slot of the last accepted row. state_in may be among them.
  std::span<const int32_t> state_out;
};

// Before the rows of a step run: whole pages are copied (a page shared up to its middle).
struct PageCopy {
  int32_t from = 0, to = 0;
};

struct StepPlan {
  std::span<const PageCopy> page_copies;
  std::span<const LaneWork> work;  // lanes that go on first, then those with tokens; a lane at most once
  int32_t draft_list = 0;          // what this step drafts from: all tokens, or StepLimits::draft_lists[draft_list - 1]
};

struct LaneOutcome {
  int32_t lane = -1;
  // Chosen in this step, in order: accepted drafts, then one more. Empty: the lane's tokens went on beyond the step, or
  // the lane had ended, or it failed.
  std::vector<int32_t> tokens;
  std::vector<std::vector<TokenLogprob>> logprobs;         // for each of `tokens`, when asked for: the chosen one first
  std::vector<std::vector<TokenLogprob>> prompt_logprobs;  // for each of work.tokens: of the token after it
  std::vector<int32_t> drafts;                             // made for the next step
  int32_t verified = 0;                                    // drafts that were on rows of this step
  int32_t accepted = 0;                                    // of them
  int32_t passes = 0;    // drafting passes that had a row for it; may be more than `drafts`, which end with the answer
  bool ended = false;    // chose a stop token or reached its limit, in this step or before
  int32_t position = 0;  // tokens whose keys, values and state are in the caches
  int32_t state = -1;    // the slot that holds the state at `position`
  std::string error;     // not empty: no token could be chosen, and the lane has ended
};

struct StepOutcome {
  std::span<const LaneOutcome> lanes;  // in the order of the plan's work
  std::string error;                   // not empty: the step failed, and what the caches hold is unknown
  double seconds = 0;                  // from its start on the backend to its end
  // The backend prepared something in that time (it recorded launches), which later steps of the kind find there.
  bool prepared = false;
};

using Ticket = uint64_t;

class Stepper {
 public:
  virtual ~Stepper() = default;
  virtual const StepLimits& limits() const = 0;

  // Queues a step; fewer than kInFlight may be under way. What the plan points to is copied.
  virtual Ticket launch(const StepPlan& plan) = 0;
  // For each constrained lane of a step that chooses tokens for it, once, before or while the step runs: a row of
  // ceil(vocabulary / 32) words for each row of the lane (bit t % 32 of word t / 32: token t is allowed), in order;
  // rows beyond those given may not accept (the lane stops at the row before). No rows at all: the lane chooses
  // nothing and ends.
  virtual void supply_masks(Ticket ticket, int32_t lane, std::span<const uint32_t> rows) = 0;
  // Waits for a step; in the order of launching, each ticket once. The outcome stays valid until the next call.
  virtual const StepOutcome& wait(Ticket ticket) = 0;
  // Whether the step that wait() is to be called for next has ended, after at most so long: wait() would return at
  // once. For who waits for several steppers.
  virtual bool ended(Ticket ticket, std::chrono::milliseconds patience) = 0;
};

// ---- what a body is written in

// The shape that a body is recorded for. Rows and lanes may be more than a step uses: the others are padding.
struct StepShape {
  int64_t rows = 0;
  int64_t logit_rows = 0;
  int64_t lanes = 0;          // rows of a drafting pass
  int64_t drafts = 0;         // drafting passes
  bool feed_drafter = false;  // keep the drafter's caches up to date
  int32_t draft_list = 0;     // StepPlan::draft_list

  bool operator==(const StepShape&) const = default;
};

// The operations of a step around the model's own. Each begin_… says which rows the operations of Backend work on from
// there on.
class StepScope {
 public:
  virtual ~StepScope() = default;
  // The rows of the plan.
  virtual void begin_trunk() = 0;
  // Rows of prompts whose log-probabilities are asked for, as many as may have logits at a time; 0: there are no more.
  virtual int64_t begin_report() = 0;
  // After begin_report(): out[i] = x[the i-th of them]
  virtual void gather_reported(const Tensor& x, const Tensor& out) = 0;
  // Their log-probabilities, from logits [these rows, vocabulary] (fp32; overwritten).
  virtual void report(const Tensor& logits) = 0;
  // out[i] = x[row i of those that tokens are chosen from]
  virtual void gather_logit_rows(const Tensor& x, const Tensor& out) = 0;
  // Chooses tokens from logits [logit rows, vocabulary] (fp32; overwritten), verifies drafts, moves the lanes on.
  virtual void choose(const Tensor& logits) = 0;

  // The same rows again, each with the token after it: what the MTP head pairs with the trunk's output.
  virtual void begin_feed() = 0;
  // One row for each lane that drafts: at pass 0 its last accepted row, at pass i > 0 the draft of pass i - 1. Rows
  // keep their places from pass to pass. Returns how many there are to compute, at most as many as in the pass before;
  // at 0 there is nothing to draft, and the rest of the body is over.
  virtual int64_t begin_draft(int64_t pass) = 0;
  // After begin_draft(0): out[i] = x[last accepted row of drafting lane i].
  virtual void gather_ends(const Tensor& x, const Tensor& out) = 0;
  // The most probable token of each row becomes the lane's draft number `pass`.
  virtual void draft(int64_t pass, const Tensor& logits) = 0;
};

using StepBody = std::function<void(const StepShape&, StepScope&)>;

}  // namespace fourfold::ops
