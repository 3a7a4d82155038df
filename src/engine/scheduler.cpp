#include "engine/scheduler.h"

#include <algorithm>

#include "base/check.h"

namespace fourfold::engine {
namespace {

using Queue = std::deque<std::unique_ptr<Active>>;

void insert_by_age(Queue& queue, std::unique_ptr<Active> request) {
  const auto place =
      std::upper_bound(queue.begin(), queue.end(), request, [](const auto& a, const auto& b) { return a->id < b->id; });
  queue.insert(place, std::move(request));
}

}  // namespace

Scheduler::Scheduler(const SchedulerLimits& limits, PageAllocator& pages, SlotAllocator& slots)
    : limits_(limits), pages_(pages), slots_(slots) {
  FF_ASSERT(limits.max_sequences > 0 && limits.max_step_tokens >= limits.max_sequences);
  FF_ASSERT(slots.total() >= limits.max_sequences);
}

void Scheduler::add(std::unique_ptr<Active> request) { insert_by_age(waiting_, std::move(request)); }

std::unique_ptr<Active> Scheduler::remove(Active* request) {
  for (Queue* queue : {&running_, &waiting_}) {
    const auto place = std::find_if(queue->begin(), queue->end(), [&](const auto& r) { return r.get() == request; });
    if (place == queue->end()) continue;
    std::unique_ptr<Active> owned = std::move(*place);
    queue->erase(place);
    pages_.release(owned->pages);
    if (owned->slot >= 0) slots_.release(owned->slot);
    owned->slot = -1;
    return owned;
  }
  FF_ASSERT(false);
  return nullptr;
}

void Scheduler::preempt_newest() {
  std::unique_ptr<Active> victim = std::move(running_.back());
  running_.pop_back();
  pages_.release(victim->pages);
  slots_.release(victim->slot);
  victim->slot = -1;
  victim->cached = 0;
  insert_by_age(waiting_, std::move(victim));
  ++preemptions_;
}

// Pages for `positions`, if need be at the cost of newer requests. False when only older ones are left to take from.
bool Scheduler::make_room(Active* request, int64_t positions) {
  while (!pages_.grow(request->pages, positions)) {
    if (running_.back().get() == request) return false;
    preempt_newest();
  }
  return true;
}

const std::vector<Scheduler::Work>& Scheduler::plan() {
  work_.clear();
  int64_t decoding = 0;
  for (const auto& request : running_) decoding += request->pending() == 1 ? 1 : 0;
  int64_t prefill_budget = limits_.max_step_tokens - decoding;
  const int64_t preempted_before = preemptions_;

  // Oldest first: those that make_room() preempts are newer and have no work in this step yet. The list may shrink from
  // its end on the way.
  for (size_t i = 0; i < running_.size(); ++i) {
    Active* request = running_[i].get();
    int64_t count = 1;
    if (request->pending() > 1) {
      count = std::min(request->pending(), prefill_budget);
      if (count == 0) continue;
    }
    if (!make_room(request, request->cached + count)) {
      // The newest of all, and older ones hold the rest: a prompt goes as far as it can, otherwise the request sits out
      // this step. Never the oldest, for which the pool is always large enough.
      FF_ASSERT(i > 0);
      const int64_t room = (static_cast<int64_t>(request->pages.size()) + pages_.free()) * pages_.page_size();
      count = std::min(count, room - request->cached);
      if (count <= 0) continue;
      FF_ASSERT(pages_.grow(request->pages, request->cached + count));
    }
    if (request->pending() > 1) prefill_budget -= count;
    work_.push_back({request, count});
  }

  if (preemptions_ == preempted_before) admit(prefill_budget);
  FF_ASSERT(!work_.empty() || idle());
  return work_;
}

// Starts waiting requests, oldest first, while tokens, slots and pages allow.
void Scheduler::admit(int64_t budget) {
  int64_t promised = 0;  // pages that running requests will take for tokens they already have
  for (const auto& request : running_) {
    promised += std::max<int64_t>(pages_.pages_for(request->length()) - static_cast<int64_t>(request->pages.size()), 0);
  }
  while (budget > 0 && !waiting_.empty() && static_cast<int64_t>(running_.size()) < limits_.max_sequences) {
    Active* next = waiting_.front().get();
    // All it has now, and one page for each running request to grow into, so that admission does not lead straight to
    // preemption. When nothing runs, the whole pool is free, which is enough for any request.
    const int64_t headroom = static_cast<int64_t>(running_.size());
    const int64_t needed = pages_.pages_for(next->length());
    if (pages_.free() < promised + needed + headroom) break;
    next->slot = slots_.take();
    FF_ASSERT(next->slot >= 0);
    insert_by_age(running_, std::move(waiting_.front()));
    waiting_.pop_front();
    const int64_t count = std::min(next->pending(), budget);
    FF_ASSERT(pages_.grow(next->pages, count));
    promised += needed - static_cast<int64_t>(next->pages.size());
    budget -= count;
    work_.push_back({next, count});
  }
}

void Scheduler::check() const {
  pages_.check();
  slots_.check();
  int64_t pages = 0;
  for (const auto& request : waiting_) FF_ASSERT(request->pages.empty() && request->slot < 0 && request->cached == 0);
  for (const auto& request : running_) {
    FF_ASSERT(request->slot >= 0);
    FF_ASSERT(request->pending() >= 1);
    FF_ASSERT(static_cast<int64_t>(request->pages.size()) >= pages_.pages_for(request->cached));
    pages += static_cast<int64_t>(request->pages.size());
  }
  FF_ASSERT(pages == pages_.used());
  FF_ASSERT(static_cast<int64_t>(running_.size()) == slots_.used());
  const auto younger = [](const auto& a, const auto& b) { return a->id < b->id; };
  FF_ASSERT(std::is_sorted(waiting_.begin(), waiting_.end(), younger));
  FF_ASSERT(std::is_sorted(running_.begin(), running_.end(), younger));
}

}  // namespace fourfold::engine
