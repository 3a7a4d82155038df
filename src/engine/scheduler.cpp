#include "engine/scheduler.h"

#include <algorithm>

#include "base/check.h"

namespace fourfold::engine {
namespace {

void insert_in_order(std::vector<Active*>& list, Active* request) {
  list.insert(std::upper_bound(list.begin(), list.end(), request,
                               [](const Active* a, const Active* b) { return a->before(*b); }),
              request);
}

bool erase_from(std::vector<Active*>& list, const Active* request) {
  const auto place = std::find(list.begin(), list.end(), request);
  if (place == list.end()) return false;
  list.erase(place);
  return true;
}

}  // namespace

void Flight::clear() {
  work.clear();
  copies.clear();
  draft_list = 0;
  pages.clear();
  slots.clear();
}

Scheduler::Scheduler(const SchedulerLimits& limits, PageAllocator& pages, SlotAllocator& slots, PrefixCache* prefixes,
                     DraftPolicy& drafts, const DraftLists& lists)
    : limits_(limits),
      pages_(pages),
      slots_(slots),
      prefixes_(prefixes),
      draft_policy_(drafts),
      draft_lists_(lists),
      fed_pages_(static_cast<size_t>(pages.total())) {
  FF_ASSERT(limits.lanes > 0 && limits.rows >= limits.lanes && limits.logit_rows >= limits.lanes);
  FF_ASSERT(slots.total() >= limits.lanes);
  for (int64_t lane = limits.lanes - 1; lane >= 0; --lane) free_lanes_.push_back(static_cast<int32_t>(lane));
  const auto lanes = static_cast<size_t>(limits.lanes);
  running_.reserve(lanes);
  chunks_.reserve(lanes);
  choices_.reserve(lanes);
  copies_.reserve(lanes);
}

// ---- requests

void Scheduler::add(std::unique_ptr<Active> request) {
  part_from_running(*request);
  insert_in_order(waiting_, request.get());
  all_.push_back(std::move(request));
}

void Scheduler::end(Active* request) {
  request->over = true;
  if (request->lane.index >= 0) {
    leave(request);
  } else if (erase_from(waiting_, request)) {
    leaving_.push_back(request);
  } else {
    FF_ASSERT(request->preempted);  // it leaves already
  }
}

// Its lane is free, and may be started anew by the next step: what the steps under way make of it is still reported to
// this request.
void Scheduler::leave(Active* request) {
  FF_ASSERT(erase_from(running_, request));
  free_lanes_.push_back(request->lane.index);
  request->lane.index = -1;
  leaving_.push_back(request);
}

void Scheduler::preempt(Active* request) {
  ++preemptions_;
  request->preempted = true;
  leave(request);
  if (return_to_queue(request)) erase_from(leaving_, request);
}

// A preempted request whose steps are settled waits again. False: it still has some.
bool Scheduler::return_to_queue(Active* request) {
  if (request->lane.flights > 0 || request->over) return false;
  give_back(request);
  request->preempted = false;
  if (request->output_tokens() == 0) request->prompt_logprobs.clear();
  insert_in_order(waiting_, request);
  return true;
}

int64_t Scheduler::sweep() {
  int64_t gone = 0;
  for (size_t i = 0; i < leaving_.size();) {
    Active* request = leaving_[i];
    if (request->lane.flights > 0) {
      ++i;
      continue;
    }
    // Without what it holds being lost, should giving it back assert: it is in a list until then.
    if (request->preempted && !request->over) {
      FF_ASSERT(return_to_queue(request));
    } else {
      give_back(request);
      const auto place = std::find_if(all_.begin(), all_.end(), [&](const auto& r) { return r.get() == request; });
      FF_ASSERT(place != all_.end());
      all_.erase(place);
      ++gone;
    }
    leaving_.erase(leaving_.begin() + static_cast<std::ptrdiff_t>(i));
  }
  return gone;
}

// ---- planning

bool Scheduler::goes_on(const Active& request) const {
  return request.lane.going && !request.lane.ended && request.least_output() < request.max_output;
}

bool Scheduler::plan(Flight& flight) {
  flight.clear();
  chunks_.clear();
  copies_.clear();
  read_pages_.clear();
  read_slots_.clear();
  // Each that goes on has a row, whoever is before it; and each has a row of logits.
  const auto going = std::count_if(running_.begin(), running_.end(), [&](const Active* r) { return goes_on(*r); });
  rows_left_ = limits_.rows - going;
  logits_left_ = limits_.logit_rows - static_cast<int64_t>(running_.size());
  // Where prompts wait for rows, drafts leave them half.
  const bool prompts = !waiting_.empty() || going < static_cast<int64_t>(running_.size());
  draft_rows_left_ = prompts ? rows_left_ / 2 : rows_left_;

  // In order: those that make_room() preempts are behind and have no work in this step yet. The list may shrink from
  // its end on the way.
  const int64_t preempted_before = preemptions_;
  for (size_t i = 0; i < running_.size(); ++i) {
    if (goes_on(*running_[i])) {
      plan_token(running_[i], flight);
    } else if (!running_[i]->lane.going) {
      plan_chunk(running_[i]);
    }
  }
  if (preemptions_ == preempted_before) admit();

  flight.work.insert(flight.work.end(), chunks_.begin(), chunks_.end());
  flight.copies = copies_;
  flight.pages = read_pages_;
  flight.slots = read_slots_;
  plan_drafts(flight);
  for (Work& work : flight.work) {
    Lane& lane = work.request->lane;
    work.feeds = lane.feeds;
    work.first_page = lane.sent_pages;
    lane.sent_pages = static_cast<int64_t>(lane.pages.size());
  }
  return !flight.work.empty();
}

// One more row for a request that goes on, and rows for its drafts.
void Scheduler::plan_token(Active* request, Flight& flight) {
  Lane& lane = request->lane;
  Work work;
  work.request = request;
  work.chooses = true;
  const int64_t most = std::min({int64_t{lane.asked_drafts}, request->max_output - request->least_output() - 1,
                                 draft_rows_left_, rows_left_, logits_left_});
  work.drafts = static_cast<int32_t>(std::max<int64_t>(most, 0));
  while (static_cast<int64_t>(lane.slots.size()) < 1 + work.drafts) {
    const int32_t slot = take_slot();
    if (slot < 0) break;
    lane.slots.push_back(slot);
  }
  work.drafts = std::min(work.drafts, static_cast<int32_t>(lane.slots.size()) - 1);
  // Nobody is preempted for drafts.
  const int64_t bound = request->position_bound();
  if (!grow(lane, std::min(bound + 1 + work.drafts, request->positions()))) {
    work.drafts = 0;
    if (!make_room(request, std::min(bound + 1, request->positions()))) return;
  }
  work.states = 1 + work.drafts;
  draft_rows_left_ -= work.drafts;
  rows_left_ -= work.drafts;
  logits_left_ -= work.drafts;
  add_work(work, flight.work);
}

// The next piece of a prompt.
bool Scheduler::plan_chunk(Active* request) {
  Lane& lane = request->lane;
  int64_t count = std::min(request->length() - lane.fed, rows_left_);
  if (lane.next_boundary < lane.boundaries.size()) {
    count = std::min(count, lane.boundaries[lane.next_boundary].position - lane.fed);
  }
  if (count <= 0) return false;
  if (!make_room(request, lane.fed + count)) {
    // Those before it hold the rest: it goes as far as the pages reach.
    const int64_t room = (static_cast<int64_t>(lane.pages.size()) + available()) * pages_.page_size();
    count = std::min(count, room - lane.fed);
    if (count <= 0) return false;
    FF_ASSERT(grow(lane, lane.fed + count));
  }
  Work work;
  work.request = request;
  work.first = lane.fed;
  work.tokens = count;
  work.starts = !lane.begun;
  work.chooses = lane.fed + count == request->length();
  if (!choose_slots(work)) return false;
  if (lane.next_boundary < lane.boundaries.size() && lane.boundaries[lane.next_boundary].position == lane.fed + count) {
    work.boundary = lane.boundaries[lane.next_boundary++];
    work.boundary_slot = lane.slots.front();
  }
  if (lane.hit_page >= 0) {
    copies_.push_back({lane.hit_page, lane.pages[static_cast<size_t>(lane.fed / pages_.page_size())]});
    read_pages_.push_back(lane.hit_page);
    lane.hit_page = -1;
  }
  rows_left_ -= count;
  lane.fed += count;
  add_work(work, chunks_);
  return true;
}

void Scheduler::add_work(Work& work, std::vector<Work>& to) {
  Lane& lane = work.request->lane;
  FF_ASSERT(lane.index >= 0);
  work.lane = lane.index;
  lane.begun = true;
  lane.rows += work.rows();
  ++lane.flights;
  if (work.chooses) {
    lane.going = true;
    ++lane.choices;
    lane.asked_drafts = 0;
  }
  to.push_back(work);
}

// How many drafts each lane makes for its next step.
void Scheduler::plan_drafts(Flight& flight) {
  if (draft_policy_.most() == 0) return;
  choices_.clear();
  int64_t others = 0;
  for (const Work& work : flight.work) {
    if (!work.chooses) continue;
    Active& request = *work.request;
    int64_t most = std::min<int64_t>(draft_policy_.most(), request.max_output - request.least_output() - 1);
    if (request.request.drafts >= 0) most = std::min<int64_t>(most, request.request.drafts);
    if (!request.lane.feeds || most <= 0) {
      ++others;
    } else {
      choices_.push_back({&request, &request.acceptance, static_cast<int32_t>(most), 0});
    }
  }
  draft_policy_.choose(choices_, others);
  if (draft_policy_.gives_up()) {
    stop_feeding();
    return;
  }
  size_t next = 0;
  listed_.clear();
  for (Work& work : flight.work) {
    if (next == choices_.size() || !work.chooses || work.request != choices_[next].request) continue;
    Active& request = *work.request;
    const int32_t drafts = choices_[next++].drafts;
    work.new_drafts = request.lane.asked_drafts = drafts;
    if (drafts > 0) {
      draft_lists_.count(request.listed, request.tokens);
      listed_.push_back(&request.listed);
    }
    // The drafter writes behind the last token. Where no page is left it makes fewer drafts.
    if (drafts > 1) grow(request.lane, std::min(request.position_bound() + drafts - 1, request.positions()));
  }
  flight.draft_list = draft_lists_.choose(listed_);
}

// ---- settling

void Scheduler::record(const Work& work, const ops::LaneOutcome& outcome) {
  Active& request = *work.request;
  Lane& lane = request.lane;
  --lane.flights;
  lane.rows -= work.rows();
  lane.choices -= work.chooses ? 1 : 0;
  FF_ASSERT(lane.flights >= 0 && lane.rows >= 0 && lane.choices >= 0);
  FF_ASSERT(outcome.position >= lane.position && outcome.position <= lane.position + work.rows() &&
            outcome.position <= request.length());
  lane.position = outcome.position;
  lane.state = outcome.state;
  if (!outcome.error.empty()) request.cacheable = false;
  if (work.boundary.position > 0 && work.boundary.position != lane.dropped_boundary && !request.over) {
    keep(&request, work.boundary, work.boundary_slot);
  } else if (work.tokens > 0 && work.chooses && !request.over) {
    keep(&request, {lane.position}, -1);  // the pages of the prompt: where others part from it, a state will pay
  }
  if (outcome.ended && !lane.ended) {
    lane.ended = true;
    keep(&request, {lane.position, BoundaryKind::kEnd}, lane.state);
  }
}

void Scheduler::land(Flight& flight) {
  for (const int32_t page : flight.pages) pages_.release(page);
  for (const int32_t slot : flight.slots) slots_.release(slot);
  flight.clear();
}

void Scheduler::check() const {
  pages_.check();
  slots_.check();
  const auto in_order = [](const Active* a, const Active* b) { return a->before(*b); };
  FF_ASSERT(std::is_sorted(waiting_.begin(), waiting_.end(), in_order));
  FF_ASSERT(std::is_sorted(running_.begin(), running_.end(), in_order));
  FF_ASSERT(all_.size() == waiting_.size() + running_.size() + leaving_.size());
  FF_ASSERT(free_lanes_.size() + running_.size() == static_cast<size_t>(limits_.lanes));
  for (const Active* request : waiting_) {
    const Lane& lane = request->lane;
    FF_ASSERT(lane.pages.empty() && lane.slots.empty() && lane.index < 0 && lane.hit_state < 0 && lane.hit_page < 0);
  }
  std::vector<bool> lanes(static_cast<size_t>(limits_.lanes));
  for (const Active* request : running_) {
    const Lane& lane = request->lane;
    FF_ASSERT(lane.index >= 0 && !lanes[static_cast<size_t>(lane.index)]);
    lanes[static_cast<size_t>(lane.index)] = true;
    FF_ASSERT(!lane.slots.empty());
    FF_ASSERT(static_cast<int64_t>(lane.pages.size()) >= pages_.pages_for(request->position_bound()));
    for (int64_t page = lane.position / pages_.page_size(); page < static_cast<int64_t>(lane.pages.size()); ++page) {
      const int64_t offset = std::max<int64_t>(lane.position - page * pages_.page_size(), 0);
      FF_ASSERT(pages_.writable(lane.pages[static_cast<size_t>(page)], offset));
    }
  }
  for (const Active* request : leaving_) FF_ASSERT(request->lane.flights > 0 && request->lane.index < 0);
}

}  // namespace fourfold::engine
