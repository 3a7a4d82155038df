// Steps driven by the host: lanes in plain memory, a thread that runs one step after the other. What computes is behind
// callbacks: a CPU backend, a GPU, a test's own model.
//
// Where the backend chooses tokens itself, a step may begin before the host knows those of the one before it: the host
// knows that a lane without drafts moves on by one row, and the backend takes that row's token from its own choice.
// Whoever ended with that token is found out when the host gets to know it; until then the backend sees to it that the
// row changes nothing.
//
// Where the backend also keeps lanes of its own (HostStepParts::move_lanes), so may steps of lanes with drafts: it
// verifies them itself, feeds the drafter, drafts, and begins the next step from what became of the lane. The host lays
// out rows, pages and slots for the most that may be accepted, and learns all of it later.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>

#include "base/threads.h"
#include "cpu/sample/sampler.h"
#include "ops/batch.h"
#include "ops/step.h"

namespace fourfold::cpu {

// How the tokens of a lane with penalties are counted where tokens are chosen: what has come to them in front of a
// choice, told with its first row, and what else each row has seen.
struct CountedTokens {
  int32_t lane = -1;    // -1: no penalties
  bool begins = false;  // nothing of it is counted: what Choice::counts says is to be
  // Otherwise these tokens were chosen since, and, if `choice` is not -1, the one of the last choose_later() with that
  // number, which the host does not know; beside those by which the backend moved the lane on itself.
  std::span<const int32_t> more = {};
  int32_t choice = -1;
  // Of the batch that was bound last: `drafts` rows from `draft_row` on hold tokens of which this row is to be chosen
  // as if they were in the output.
  int32_t draft_row = 0, drafts = 0;
};

// What is chosen from a row of logits, before it is known what was chosen from the rows before it: as if these had
// chosen what was drafted.
struct RowChoice {
  int64_t row = 0;  // of the logits
  Choice choice;    // its counts are those before the step, without the drafts on the rows before
  // Not -1: the choice's index is short of the drafts that the backend's last move of this lane accepted.
  int32_t lane = -1;
  CountedTokens counted = {};
};

// A row whose token was chosen by the last choose_later(), of whose choices it is number `choice`, and which the host
// does not know. Where that is one of `stop_tokens`, or no token could be chosen, the row's sequence must leave no
// trace in the caches, whatever is computed for it.
struct CarriedRow {
  int32_t row = 0;  // the only one of its sequence
  int32_t choice = 0;
  std::span<const int32_t> stop_tokens;
};

// ---- lanes that the backend moves on itself

// A lane whose tokens the last choose_later() chose: once they are there it has accepted the first, and each that
// follows one which stood on the next row. The token accepted last is the lane's; a stop token among them, or none,
// ends it. A sequence that has no rows any more (CarriedLane) ends its lane as well.
struct MovedLane {
  int32_t lane = 0;
  int32_t sequence = 0;  // of the trunk's batch
  int32_t first = 0;     // its first row there
  int32_t count = 0;     // rows, each with its token; of a prompt 1
  int32_t choice = 0;    // of the first of them
  bool prompt = false;   // it stands at `position` then, with its state in `state`; otherwise where its rows lead
  int32_t position = 0, state = 0;
  bool puts_off = false;  // ops::Sequence::puts_off of its rows
  bool counted = false;   // its tokens are counted (CountedTokens): with these from here on
  std::span<const int32_t> stop_tokens;
};

// What a sequence of the batch that was bound last takes from a lane that the host does not know: instead of what the
// batch says, or beside it. Where the lane has ended the sequence has no rows, and leaves no trace.
struct CarriedLane {
  enum class As {
    kGoesOn,  // trunk: token, position and state of the lane, then the drafts of `drafter`, `count` rows from `row` on;
              // and the state's updates, where the batch says that there may be some (ops::StateUpdates::count not 0)
    kFed,     // feeding the drafter: `count` chosen tokens from `choice` on, for its rows from `row` on; position and
              // whether it has rows at all as in the trunk
    kDrafts,  // drafting pass number `pass`: position, and token of the lane (0), or `drafter`'s last draft
  };
  As as = As::kGoesOn;
  int32_t lane = 0;
  int32_t sequence = 0;  // of the batch; -1: only tokens are taken
  int32_t row = 0, count = 1;
  int32_t choice = 0;
  int32_t drafter = 0;  // its row in the drafting passes since the last move
  int32_t pass = 0;
};

// A slot whose state was put off.
struct PutOffState {
  int32_t slot = -1;
  ops::StateUpdates updates;
};

// Parts of a body: one ends where the next begins, or where the host has to know tokens. Within a part the operations
// depend on the part, on the numbers of rows and logit rows, and on nothing else that the host has.
enum class StepPart { kTrunk, kFeed, kFirstDraft, kDraft };

// Of two steps and their drafts.
inline constexpr int64_t kChoicesUnderWay = 2 * (1 + ops::kMaxDrafts);

// Which rows a step has may depend on whether it began before the tokens of the one before were known. The ranks of one
// model, each with a stepper, compute the same rows: the first says how it was, the others do as it did.
class StepOrder {
 public:
  // Of a step whose tokens are not known when its body has ended: the next one followed it at once, or not. The first
  // thing said about it counts.
  void say(ops::Ticket open, bool followed) {
    std::atomic<uint64_t>& said = of(open);
    if (said.load(std::memory_order_relaxed) / 2 != open) said.store(open * 2 + (followed ? 1 : 0));
  }
  std::optional<bool> said(ops::Ticket open) const {
    const uint64_t said = said_[open % said_.size()].load();
    if (said / 2 != open) return std::nullopt;
    return said % 2 != 0;
  }

 private:
  std::atomic<uint64_t>& of(ops::Ticket ticket) { return said_[ticket % said_.size()]; }
  std::array<std::atomic<uint64_t>, ops::kInFlight + 1> said_ = {};
};

struct HostStepParts {
  // The rows that the operations of the body work on from here on. What the batch points to stays valid until the next
  // call; sequences have their pages, positions and slots. Tokens of carried rows are to be put in their places.
  std::function<void(const ops::Batch&, StepPart, std::span<const CarriedRow> carried)> bind;
  // Of a step with rows of prompts that report: whose logits are computed next, in turns, instead of those that the
  // batch says. Null: nothing to do.
  std::function<void(std::span<const ops::LogitRows>)> bind_logits;
  // The body has returned, or was left by an error. Null: nothing to do.
  std::function<void(bool failed)> end;
  // After end(): whether the body's operations were prepared on the way (recorded), which takes time once. Null: no.
  std::function<bool()> prepared;
  // Copies a page of keys and values, all layers.
  std::function<void(int32_t from, int32_t to)> copy_page;
  // Where not 0, verification of up to so many rows, the token's included, puts states off: its sequences have
  // ops::Sequence::puts_off. What reads or overwrites slots otherwise finds states there, which the stepper sees to:
  // make_states() writes them for slots whose states were put off, ahead of what is bound next.
  int64_t put_off_rows = 0;
  std::function<void(std::span<const PutOffState>)> make_states;
  // out[i] = x[rows[i]], tensors of the backend. The rows stay valid until the next call. Null: they are in host
  // memory.
  std::function<void(const ops::Tensor& x, std::span<const int32_t> rows, const ops::Tensor& out)> gather;
  // Logits, once they are computed, in host memory where they may be overwritten. Null: they are there.
  std::function<ops::Tensor(const ops::Tensor& logits)> fetch;
  // Chooses for rows where the logits are, as Sampler would, without waiting for it. False: it cannot, and has done
  // nothing; the host then chooses from what fetch() gives, as where it is null. Logits may be overwritten, and what
  // lies behind them, up to StepLimits::logit_rows rows. At most kChoicesUnderWay are not collected.
  std::function<bool(const ops::Tensor& logits, std::span<const RowChoice> rows)> choose_later;
  // Waits for the first choose_later() that was not collected; for a row that has no answer, `errors` says why.
  std::function<void(std::span<Chosen> chosen, std::span<std::string> errors)> collect;
  // The backend moves lanes on by itself; null: it does not, and the host waits for tokens that a step needs. Called
  // behind choose_later(); what is chosen from there on, until the next move, are the drafts of passes 0, 1 and so on.
  std::function<void(std::span<const MovedLane>)> move_lanes;
  // With move_lanes; called behind bind().
  std::function<void(std::span<const CarriedLane>)> carry_lanes;
  // With move_lanes: gather() of each lane's last accepted row. Rows of `out` beyond take the first lane's.
  std::function<void(const ops::Tensor& x, std::span<const int32_t> lanes, const ops::Tensor& out)> gather_ends;
  // Whether collect() would return at once.
  std::function<bool()> collectable;
  // Of several ranks, the same of all; null: there are no others. `first`: this one says, the others ask.
  std::shared_ptr<StepOrder> order;
  bool first = true;
  ops::StepBody body;
  // Called once on the stepper's thread before its first step, where not null.
  std::function<void()> begin_thread;
  ThreadPool* pool = nullptr;  // for sampling; used between the body's own operations only
  // Steps run with their rows padded to a multiple of this. 1 in service; more in tests, which prove that padding does
  // no harm.
  int64_t row_bucket = 1;
};

std::unique_ptr<ops::Stepper> make_host_stepper(const ops::StepLimits& limits, HostStepParts parts);

}  // namespace fourfold::cpu
