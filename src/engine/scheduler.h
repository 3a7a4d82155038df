// What runs in the next step. The scheduler holds the waiting and the running requests, and gives them pages and slots
// and takes them back; it knows nothing of the model, of threads and of streams.
//
// Policy: first come, first served. Every running request that is decoding gets its token in every step; what is left
// of the step's tokens goes to prompts, oldest first, in chunks. When pages run out, the newest running request is
// preempted: it gives back pages and slot, waits at its place in the queue, and later all its tokens (prompt and
// output) are computed again. The oldest request can preempt all others and the pool holds at least one full context,
// so it always makes progress, and so does every request in the end.
//
// Invariants: a waiting request has no pages and no slot; a running one has a slot and pages for its cached positions;
// both lists are in the order of submission.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "engine/pages.h"
#include "engine/request.h"
#include "engine/states.h"

namespace fourfold::engine {

struct SchedulerLimits {
  int64_t max_sequences = 0;
  int64_t max_step_tokens = 0;  // at least max_sequences
};

class Scheduler {
 public:
  // `pages` must hold one request of the largest context.
  Scheduler(const SchedulerLimits& limits, PageAllocator& pages, SlotAllocator& slots);

  // A request and the number of its pending tokens that run in this step, at least 1. Its pages hold them all.
  struct Work {
    Active* request = nullptr;
    int64_t count = 0;
    bool samples() const { return count == request->pending(); }  // the step computes the logits of its last token
  };
  // Empty only when nothing waits or runs. The caller runs it, advances `cached` of each, appends sampled tokens, and
  // removes requests that are done, before the next plan().
  const std::vector<Work>& plan();

  void add(std::unique_ptr<Active> request);
  // Gives back what the request holds, and the request itself.
  std::unique_ptr<Active> remove(Active* request);

  const std::deque<std::unique_ptr<Active>>& waiting() const { return waiting_; }
  const std::deque<std::unique_ptr<Active>>& running() const { return running_; }
  bool idle() const { return waiting_.empty() && running_.empty(); }
  int64_t preemptions() const { return preemptions_; }

  void check() const;  // asserts the invariants

 private:
  bool make_room(Active* request, int64_t positions);
  void preempt_newest();
  void admit(int64_t budget);

  SchedulerLimits limits_;
  PageAllocator& pages_;
  SlotAllocator& slots_;
  std::deque<std::unique_ptr<Active>> waiting_, running_;
  std::vector<Work> work_;
  int64_t preemptions_ = 0;
};

}  // namespace fourfold::engine
