// What lanes hold: pages, slots, and what of it goes to the prefix cache.
#include <algorithm>

#include "base/check.h"
#include "engine/scheduler.h"

namespace fourfold::engine {

int64_t Scheduler::available() const { return pages_.free() + pages_.only_cached(); }

// At most so many pages come back without anybody being preempted.
int64_t Scheduler::returning() const {
  int64_t pages = 0;
  for (const Active* request : leaving_) pages += static_cast<int64_t>(request->lane.pages.size());
  return pages;
}

// Pages for `positions`, if need be from the prefix cache. All or nothing.
bool Scheduler::grow(Lane& lane, int64_t positions) {
  const auto held = static_cast<int64_t>(lane.pages.size());
  const int64_t more = pages_.pages_for(positions) - held;
  if (more <= 0) return true;
  if (more > available()) return false;
  if (more > pages_.free()) FF_ASSERT(prefixes_ != nullptr && prefixes_->reclaim(more));
  FF_ASSERT(pages_.grow(lane.pages, positions));
  for (size_t i = static_cast<size_t>(held); i < lane.pages.size(); ++i) {
    fed_pages_[static_cast<size_t>(lane.pages[i])] = lane.feeds;
  }
  return true;
}

// The same, if need be at the cost of requests behind. False when only those before it are left to take from, or when
// those that leave bring enough, later.
bool Scheduler::make_room(Active* request, int64_t positions) {
  while (!grow(request->lane, positions)) {
    const int64_t more = pages_.pages_for(positions) - static_cast<int64_t>(request->lane.pages.size());
    if (running_.back() == request || available() + returning() >= more) return false;
    preempt(running_.back());
  }
  return true;
}

// A free slot, if need be from the prefix cache; -1 when there is none.
int32_t Scheduler::take_slot() {
  int32_t slot = slots_.take();
  while (slot < 0 && prefixes_ != nullptr && prefixes_->reclaim_state()) slot = slots_.take();
  return slot;
}

// Where a chunk's state comes from and goes to: in place, but for a state that is the prefix cache's, or is to be.
bool Scheduler::choose_slots(Work& work) {
  Lane& lane = work.request->lane;
  if (lane.hit_state >= 0) {
    work.state_in = lane.hit_state;
    read_slots_.push_back(lane.hit_state);
    lane.hit_state = -1;
    return true;
  }
  int32_t& slot = lane.slots.front();
  work.state_in = slot;
  const bool kept = lane.next_boundary > 0 && lane.boundaries[lane.next_boundary - 1].position == lane.fed;
  if (!kept) return true;
  const bool settled = lane.position == lane.fed;
  if (settled && slots_.writable(slot)) return true;  // the cache did not want it, or gave it up
  const int32_t other = take_slot();
  if (other < 0) {
    if (!slots_.writable(slot)) return false;  // until a step that reads one is settled
    lane.dropped_boundary = lane.fed;
    return true;
  }
  read_slots_.push_back(slot);
  slot = other;
  return true;
}

// What the request computed up to a boundary goes to the prefix cache, with the state in `slot` (-1: without).
void Scheduler::keep(Active* request, const Boundary& boundary, int32_t slot) {
  if (prefixes_ == nullptr || !request->cacheable) return;
  const BoundaryState state{boundary.position, slot, boundary.kind};
  const bool with_state = limits_.recurrent && slot >= 0;
  prefixes_->insert(request->request.cache.salt,
                    std::span(request->tokens).first(static_cast<size_t>(boundary.position)), request->lane.pages,
                    std::span(&state, with_state ? 1 : 0));
}

// No step names what the request holds.
void Scheduler::give_back(Active* request) {
  Lane& lane = request->lane;
  FF_ASSERT(lane.flights == 0 && lane.index < 0);
  if (lane.begun && !lane.ended && lane.position > 0) {
    FF_ASSERT(std::find(lane.slots.begin(), lane.slots.end(), lane.state) != lane.slots.end());
    keep(request, {lane.position, BoundaryKind::kPaused}, lane.state);
  }
  pages_.release(lane.pages);
  for (const int32_t slot : lane.slots) slots_.release(slot);
  if (lane.hit_state >= 0) slots_.release(lane.hit_state);
  if (lane.hit_page >= 0) pages_.release(lane.hit_page);
  lane = Lane{};
}

// Drafting does not pay: the drafter's caches are left behind. Lanes that begin later may draft again.
void Scheduler::stop_feeding() {
  for (Active* request : running_) {
    Lane& lane = request->lane;
    if (!lane.feeds) continue;
    lane.feeds = false;
    const auto first = static_cast<size_t>(lane.position / pages_.page_size());
    for (size_t i = first; i < lane.pages.size(); ++i) fed_pages_[static_cast<size_t>(lane.pages[i])] = false;
  }
}

}  // namespace fourfold::engine
