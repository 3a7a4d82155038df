// What runs in the next step. The scheduler holds the requests, waiting, running and leaving, gives them lanes, pages
// and slots, and takes them back; it knows nothing of the model, of threads and of streams.
//
// A step is planned while the one before runs, from what is known: a lane's position is a range then, its pages cover
// the upper end of it, and it is left out when it is certain to have ended. What a step under way names is given back
// when that step was settled.
//
// Policy: by priority, then first come, first served. Every running request that goes on has its row in every step, and
// rows for its drafts; what is left of the step's rows goes to prompts, first ones first, in chunks that end where a
// state is to be kept. Then waiting requests are admitted (admission.h). When pages run out, the last of the running
// requests is preempted: it gives everything back, what it computed goes to the prefix cache, and later it begins with
// what is left of that. The first one can preempt all others and the pool holds at least one full context, so it always
// makes progress, and so does every request in the end.
//
// Invariants: a waiting request holds nothing; a running one has a lane, a slot and pages for every position that a
// step may write; both lists are in order; a page that somebody else reads is not written where he reads.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engine/draft_lists.h"
#include "engine/draft_policy.h"
#include "engine/pages.h"
#include "engine/prefix_cache.h"
#include "engine/request.h"
#include "engine/states.h"
#include "ops/step.h"

namespace fourfold::engine {

struct SchedulerLimits {
  int64_t lanes = 0;
  int64_t rows = 0;        // of a step, at least `lanes`
  int64_t logit_rows = 0;  // likewise
  bool recurrent = true;   // a cached prefix needs a state
};

// A request's part of a step. Its spans are ranges of the lane's own vectors: they hold until the next plan().
struct Work {
  Active* request = nullptr;
  int32_t lane = -1;  // the request's when the step was planned
  int64_t first = 0;  // the host's tokens [first, first + tokens); none: the lane goes on
  int64_t tokens = 0;
  bool starts = false;   // the step starts the lane
  bool chooses = false;  // the next token
  bool masked = false;   // supply_masks() was called
  int32_t drafts = 0, new_drafts = 0;
  bool feeds = false;      // the drafter
  int64_t first_page = 0;  // the lane's pages from here on are new to the stepper
  int32_t state_in = -1;
  int64_t states = 1;  // the lane's first so many slots are written to
  Boundary boundary;   // position > 0: the state after so many tokens is kept; it will be in `boundary_slot`
  int32_t boundary_slot = -1;

  int64_t rows() const { return tokens > 0 ? tokens : 1 + drafts; }
};

// A step, planned and then under way.
struct Flight {
  ops::Ticket ticket = 0;
  std::vector<Work> work;  // those that go on first
  std::vector<ops::PageCopy> copies;
  int32_t draft_list = 0;             // StepPlan::draft_list
  std::vector<int32_t> pages, slots;  // given back when it is settled

  void clear();
};

class Scheduler {
 public:
  // `pages` must hold one request of the largest context; `prefixes` may be null.
  Scheduler(const SchedulerLimits& limits, PageAllocator& pages, SlotAllocator& slots, PrefixCache* prefixes,
            DraftPolicy& drafts, const DraftLists& lists);

  // ---- requests; they are the scheduler's until they have left
  void add(std::unique_ptr<Active> request);
  // The request is over (waiting or running): its lane is free at once, and what it holds as soon as no step names it.
  void end(Active* request);
  // Everything that is not over, and what is over but has not left.
  const std::vector<std::unique_ptr<Active>>& all() const { return all_; }
  std::span<Active* const> waiting() const { return waiting_; }
  std::span<Active* const> running() const { return running_; }
  bool idle() const { return all_.empty(); }

  // ---- steps
  // Fills in `flight`, whose work the caller launches. False, and no work: nothing can run before a step is settled, or
  // nothing is there at all.
  bool plan(Flight& flight);
  // What became of the request's part of the oldest step; its new tokens are in its list already. Caches what is to be
  // kept of it.
  void record(const Work& work, const ops::LaneOutcome& outcome);
  // The step is settled: gives back what only it named. Then sweep().
  void land(Flight& flight);
  // Gives back what requests that leave have, where no step names it any more. Those that are over are gone then;
  // returns how many they were.
  int64_t sweep();

  int64_t preemptions() const { return preemptions_; }
  void check() const;  // asserts the invariants; linear in everything

 private:
  // scheduler.cpp
  bool goes_on(const Active& request) const;
  void plan_token(Active* request, Flight& flight);
  bool plan_chunk(Active* request);
  void plan_drafts(Flight& flight);
  void add_work(Work& work, std::vector<Work>& to);
  void preempt(Active* request);
  void leave(Active* request);
  bool return_to_queue(Active* request);

  // holdings.cpp: what lanes hold
  int64_t available() const;  // pages that are free or only cached
  int64_t returning() const;  // pages of those that leave
  bool grow(Lane& lane, int64_t positions);
  bool make_room(Active* request, int64_t positions);
  int32_t take_slot();
  bool choose_slots(Work& work);
  void keep(Active* request, const Boundary& boundary, int32_t slot);
  void give_back(Active* request);
  void stop_feeding();

  // admission.cpp: how waiting requests begin
  void admit();
  bool begin(Active* request);
  bool begin(Active* request, bool hits);
  void choose_boundaries(Active* request, const PrefixHit& hit);
  void part_from_running(const Active& request);
  void add_parting(Active* request, int64_t position);
  bool awaits_another(Active* request);
  bool enough_pages(int64_t fresh) const;
  bool displace(const Active& request);

  const SchedulerLimits limits_;
  PageAllocator& pages_;
  SlotAllocator& slots_;
  PrefixCache* const prefixes_;
  DraftPolicy& draft_policy_;
  const DraftLists draft_lists_;

  std::vector<std::unique_ptr<Active>> all_;  // in the order of submission
  std::vector<Active*> waiting_, running_;    // by priority, then age
  std::vector<Active*> leaving_;
  std::vector<int32_t> free_lanes_;
  std::vector<bool> fed_pages_;  // by page: the drafter's keys and values in it are up to date
  int64_t preemptions_ = 0;

  // Of the step that is being planned.
  std::vector<Work> chunks_;
  std::vector<DraftPolicy::Choice> choices_;
  std::vector<const ListedText*> listed_;         // of those that draft
  std::vector<int32_t> read_pages_, read_slots_;  // that it names, and the lanes no longer hold
  std::vector<ops::PageCopy> copies_;
  int64_t rows_left_ = 0, draft_rows_left_ = 0, logits_left_ = 0;
};

}  // namespace fourfold::engine
