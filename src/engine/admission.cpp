// How waiting requests begin: in order, as far as rows, lanes, slots and pages allow, with what is cached of their
// prompts. A request whose prompt begins like one that is being computed waits for that and takes it from the cache.
#include <algorithm>

#include "base/check.h"
#include "engine/scheduler.h"

namespace fourfold::engine {
namespace {

// Waiting requests whose prompts are compared with one that begins.
constexpr size_t kLookAhead = 64;
// Shorter prompts of several answers are computed for each.
constexpr int64_t kLeastShared = 8;

int64_t common_prefix(std::span<const int32_t> a, std::span<const int32_t> b) {
  const size_t n = std::min(a.size(), b.size());
  return std::mismatch(a.begin(), a.begin() + static_cast<std::ptrdiff_t>(n), b.begin()).first - a.begin();
}

}  // namespace

void Scheduler::admit() {
  // Lanes of requests that are preempted on the way have work in this step: they cannot be given away in it.
  const int64_t preempted_before = preemptions_;
  for (size_t i = 0; i < waiting_.size() && rows_left_ > 0 && preemptions_ == preempted_before;) {
    Active* request = waiting_[i];
    if (awaits_another(request)) {
      ++i;
      continue;
    }
    if (free_lanes_.empty() || logits_left_ <= 0 || !begin(request)) {
      displace(*request);
      return;
    }
    waiting_.erase(waiting_.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

// A waiting request takes the place of one that yields to it, when that has left: one at a time.
bool Scheduler::displace(const Active& request) {
  if (running_.empty() || running_.back()->request.priority <= request.request.priority) return false;
  const bool under_way =
      std::any_of(leaving_.begin(), leaving_.end(), [](const Active* r) { return r->preempted && !r->over; });
  if (under_way) return false;
  preempt(running_.back());
  return true;
}

// `fresh` pages for a request, beside those that running requests will take for their prompts and one page for each of
// them to grow into, so that it does not lead straight to preemption. When nothing else runs, the whole pool is there.
bool Scheduler::enough_pages(int64_t fresh) const {
  if (running_.empty() && leaving_.empty()) return true;
  int64_t promised = static_cast<int64_t>(running_.size());
  for (const Active* request : running_) {
    const auto held = static_cast<int64_t>(request->lane.pages.size());
    promised += std::max<int64_t>(pages_.pages_for(request->length()) - held, 0);
  }
  return available() >= promised + fresh;
}

bool Scheduler::begin(Active* request) {
  const bool hits = prefixes_ != nullptr && request->may_hit();
  if (begin(request, hits)) return true;
  // A hit may need a page more than the request alone: the one that is copied.
  return hits && running_.empty() && leaving_.empty() && begin(request, false);
}

bool Scheduler::begin(Active* request, bool hits) {
  Lane& lane = request->lane;
  const std::string& salt = request->request.cache.salt;
  PrefixHit hit;
  if (hits) hit = prefixes_->match(salt, request->tokens);
  const int64_t all = pages_.pages_for(request->length());
  if (!enough_pages(all - hit.tokens / pages_.page_size())) return false;
  const int32_t slot = take_slot();  // perhaps the hit's
  if (slot < 0) return false;
  lane.slots.push_back(slot);
  if (hits) {
    hit = prefixes_->acquire(salt, request->tokens, lane.pages, !request->counted);
    request->counted = true;
    lane.fed = lane.position = hit.tokens;
    lane.hit_state = hit.state;
    lane.hit_page = hit.copy_from;
    // Its pages are not available any more.
    if (!enough_pages(all - static_cast<int64_t>(lane.pages.size()))) {
      give_back(request);
      return false;
    }
  }
  lane.target = request->length();
  const auto fed = [&](int32_t page) { return fed_pages_[static_cast<size_t>(page)]; };
  lane.feeds = request->request.drafts != 0 && request->max_output > 1 &&
               std::all_of(lane.pages.begin(), lane.pages.end(), fed) && (lane.hit_page < 0 || fed(lane.hit_page)) &&
               draft_policy_.feeds(static_cast<int64_t>(running_.size()) + 1);
  if (prefixes_ != nullptr && limits_.recurrent) choose_boundaries(request, hit);

  lane.index = free_lanes_.back();
  free_lanes_.pop_back();
  const auto place = std::upper_bound(running_.begin(), running_.end(), request,
                                      [](const Active* a, const Active* b) { return a->before(*b); });
  running_.insert(place, request);
  --logits_left_;
  if (plan_chunk(request)) {
    if (!request->started) request->cached_tokens = std::min(hit.tokens, request->prompt_tokens);
    return true;
  }
  ++logits_left_;
  running_.erase(std::find(running_.begin(), running_.end(), request));
  free_lanes_.push_back(lane.index);
  lane.index = -1;
  give_back(request);
  return false;
}

// Where the state of the prompt is kept: where it pays by itself, and where prompts that wait part from this one.
void Scheduler::choose_boundaries(Active* request, const PrefixHit& hit) {
  Lane& lane = request->lane;
  BoundaryInputs inputs;
  inputs.prompt = request->prompt_tokens;
  inputs.hints = request->request.cache.boundaries;
  inputs.hit = hit.tokens;
  inputs.parting = hit.parting;
  const std::span<Active* const> others = std::span(waiting_).first(std::min(waiting_.size(), kLookAhead));
  const auto shares = [&](const Active* other) {
    return other != request && other->may_hit() && other->request.cache.salt == request->request.cache.salt;
  };
  for (const Active* other : others) {
    if (shares(other) && request->length() >= kLeastShared && other->tokens == request->tokens) ++inputs.answers;
  }
  boundaries_for(inputs, lane.boundaries);
  for (const Active* other : others) {
    if (!shares(other)) continue;
    add_parting(request, std::min(common_prefix(request->tokens, other->tokens), other->length() - 1));
  }
}

// A new request: where it parts from prompts that are being computed, their state is kept for it, while there is time.
void Scheduler::part_from_running(const Active& request) {
  if (prefixes_ == nullptr || !limits_.recurrent || !request.may_hit()) return;
  for (Active* other : running_) {
    if (other->lane.fed >= other->lane.target || other->request.cache.salt != request.request.cache.salt) continue;
    add_parting(other, std::min(common_prefix(other->tokens, request.tokens), request.length() - 1));
  }
}

// The state after `position` tokens is kept too, if that is still to come and pays.
void Scheduler::add_parting(Active* request, int64_t position) {
  Lane& lane = request->lane;
  position = std::min(position, lane.target - 1);
  if (position < lane.fed + kLeastGain) return;
  const auto near = [&](const Boundary& b) { return b.position <= position && b.position > position - kLeastGain; };
  if (std::any_of(lane.boundaries.begin(), lane.boundaries.end(), near)) return;
  const auto place = std::find_if(lane.boundaries.begin(), lane.boundaries.end(),
                                  [&](const Boundary& b) { return b.position > position; });
  lane.boundaries.insert(place, {position, BoundaryKind::kParting});
}

// Whether another request is about to compute so much of this one's prompt that it pays to wait for it.
bool Scheduler::awaits_another(Active* request) {
  if (prefixes_ == nullptr || !request->may_hit()) return false;
  int64_t hit = -1;
  for (Active* other : running_) {
    const Lane& lane = other->lane;
    if (request->awaits != 0) {
      if (other->id != request->awaits) continue;
      if (lane.position < request->awaited_position) return true;
      break;
    }
    if (lane.position >= lane.target || other->request.cache.salt != request->request.cache.salt) continue;
    const int64_t common = std::min(common_prefix(other->tokens, request->tokens), request->length() - 1);
    int64_t kept = 0, ready = 0;  // so much is cached when `other` is so far
    if (limits_.recurrent) {
      for (const Boundary& b : lane.boundaries) {
        if (b.position <= common && b.position > lane.position && b.position != lane.dropped_boundary)
          kept = b.position;
      }
      ready = kept;
    } else {
      kept = common;
      ready = lane.target;
    }
    if (hit < 0) hit = prefixes_->match(request->request.cache.salt, request->tokens).tokens;
    const bool equal = common + 1 == request->length() && common + 1 == other->prompt_tokens;
    if (kept - hit < (equal ? 1 : kLeastGain)) continue;
    request->awaits = other->id;
    request->awaited_position = ready;
    return true;
  }
  request->awaits = 0;
  return false;
}

}  // namespace fourfold::engine
