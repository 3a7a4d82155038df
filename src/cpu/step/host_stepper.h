// Steps driven by the host: lanes in plain memory, a thread that runs one step after the other. What computes is behind
// callbacks: a CPU backend, a GPU, a test's own model.
//
// Where the backend chooses tokens itself, a step may begin before the host knows those of the one before it: the host
// knows that a lane without drafts moves on by one row, and the backend takes that row's token from its own choice.
// Whoever ended with that token is found out when the host gets to know it; until then the backend sees to it that the
// row changes nothing.
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

// What is chosen from a row of logits, before it is known what was chosen from the rows before it: as if these had
// chosen what was drafted.
struct RowChoice {
  int64_t row = 0;  // of the logits
  Choice choice;    // its counts are those before the step, without the drafts on the rows before
};

// A row whose token was chosen by the last choose_later(), of whose choices it is number `choice`, and which the host
// does not know. Where that is one of `stop_tokens`, or no token could be chosen, the row's sequence must leave no
// trace in the caches, whatever is computed for it.
struct CarriedRow {
  int32_t row = 0;  // the only one of its sequence
  int32_t choice = 0;
  std::span<const int32_t> stop_tokens;
};

// Parts of a body: one ends where the next begins, or where the host has to know tokens. Within a part the operations
// depend on the part, on the numbers of rows and logit rows, and on nothing else that the host has.
enum class StepPart { kTrunk, kFeed, kFirstDraft, kDraft };

// Of two steps, or of one and its drafts.
inline constexpr int64_t kChoicesUnderWay = 2 + ops::kMaxDrafts;

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
  // The body has returned, or was left by an error. Null: nothing to do.
  std::function<void(bool failed)> end;
  // After end(): whether the body's operations were prepared on the way (recorded), which takes time once. Null: no.
  std::function<bool()> prepared;
  // Copies a page of keys and values, all layers.
  std::function<void(int32_t from, int32_t to)> copy_page;
  // out[i] = x[rows[i]], tensors of the backend. The rows stay valid until the next call. Null: they are in host
  // memory.
  std::function<void(const ops::Tensor& x, std::span<const int32_t> rows, const ops::Tensor& out)> gather;
  // Logits, once they are computed, in host memory where they may be overwritten. Null: they are there.
  std::function<ops::Tensor(const ops::Tensor& logits)> fetch;
  // Chooses for rows where the logits are, as Sampler would, without waiting for it. False: it cannot, and has done
  // nothing; the host then chooses from what fetch() gives, as where it is null. Logits of rows may be overwritten. At
  // most kChoicesUnderWay are not collected.
  std::function<bool(const ops::Tensor& logits, std::span<const RowChoice> rows)> choose_later;
  // Waits for the first choose_later() that was not collected; for a row that has no answer, `errors` says why.
  std::function<void(std::span<Chosen> chosen, std::span<std::string> errors)> collect;
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
