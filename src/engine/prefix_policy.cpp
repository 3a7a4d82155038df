#include "engine/prefix_policy.h"

#include <algorithm>

#include "base/check.h"

namespace fourfold::engine {
namespace {

bool is_near(std::span<const Boundary> boundaries, int64_t position, int64_t below, int64_t above) {
  return std::any_of(boundaries.begin(), boundaries.end(),
                     [&](const Boundary& b) { return b.position > position - below && b.position < position + above; });
}

bool is_past(const StateRecord& state) {
  const int64_t branches = (state.kind == BoundaryKind::kParting ? 1 : 0) + std::max<int64_t>(state.hits - 1, 0);
  return state.passes > std::min<int64_t>(branches, 2);
}

}  // namespace

void boundaries_for(const BoundaryInputs& inputs, std::vector<Boundary>& out) {
  FF_ASSERT(inputs.stride > 0 && inputs.hit >= 0);
  out.clear();
  const int64_t last = inputs.prompt - 1;
  const int64_t hints = static_cast<int64_t>(inputs.hints.size());
  for (int64_t i = 0; i < hints; ++i) {
    if (i > 0 && i + 1 < hints) continue;
    const int64_t position = inputs.hints[static_cast<size_t>(i)];
    if (position <= inputs.hit || position > last) continue;
    if (!out.empty() && position <= out.back().position) continue;
    out.push_back({position, i == 0 && hints > 1 ? BoundaryKind::kSystem : BoundaryKind::kTurn});
  }
  const int64_t parting = std::min(inputs.parting, last);
  if (parting - inputs.hit >= kLeastGain && !is_near(out, parting, kLeastGain, 1)) {
    out.push_back({parting, BoundaryKind::kParting});
  }
  if (inputs.answers > 1 && last > inputs.hit && !is_near(out, last, 1, 1)) {
    out.push_back({last, BoundaryKind::kParting});
  }
  // Far from all others, those of the stride included (they are a stride apart).
  const int64_t far = std::max<int64_t>(inputs.stride / 4, 1);
  const size_t others = out.size();
  for (int64_t at = (inputs.hit / inputs.stride + 1) * inputs.stride; at <= last - far; at += inputs.stride) {
    if (at - inputs.hit < far || is_near(std::span(out).first(others), at, far, far)) continue;
    out.push_back({at, BoundaryKind::kStride});
  }
  std::sort(out.begin(), out.end(), [](const Boundary& a, const Boundary& b) { return a.position < b.position; });
}

StateClass classify(const StateRecord& state, const StatePlace& place) {
  if (state.kind == BoundaryKind::kSystem) return StateClass::kLive;
  if (state.kind == BoundaryKind::kEnd && state.hits == 0) {
    if (state.habit == Habit::kPastEnds) return StateClass::kDead;
    if (place.before != nullptr && place.before->hits > 0 && place.before->used > state.made) return StateClass::kDead;
    if (state.habit == Habit::kUnknown && place.before != nullptr) return StateClass::kSpare;
  }
  if (state.kind == BoundaryKind::kStride && state.hits == 0) return StateClass::kPast;
  if (state.kind == BoundaryKind::kTurn && state.hits == 0 && state.habit == Habit::kFromEnds && place.has_below) {
    return StateClass::kPast;
  }
  return is_past(state) ? StateClass::kPast : StateClass::kLive;
}

StateRank rank(const StateRecord& state, const StatePlace& place) {
  const StateClass state_class = classify(state, place);
  const int64_t time = state.kind == BoundaryKind::kSystem ? state.touched : state.used;
  return {state_class, state_class == StateClass::kPast ? place.distance : 0, time, place.position};
}

StateRecord make_record(BoundaryKind kind, int64_t now, StateRecord* before) {
  StateRecord state;
  state.kind = kind;
  state.made = state.used = state.touched = now;
  if (before == nullptr) return state;
  state.habit = before->habit;
  // An answer's end does not leave the state before the answer behind: which of the two the next
  // request needs is open.
  if (kind != BoundaryKind::kTurn && kind != BoundaryKind::kParting) return state;
  ++before->passes;
  return state;
}

Habit habit_shown(const StateRecord& state, int64_t length, int64_t matched, bool goes_on, bool through_end) {
  if (state.kind == BoundaryKind::kEnd || through_end) return Habit::kFromEnds;
  if (state.kind == BoundaryKind::kTurn && goes_on && matched < length) return Habit::kPastEnds;
  return Habit::kUnknown;
}

void record_hit(StateRecord& state, int64_t now, Habit shown) {
  if (shown != Habit::kUnknown) state.habit = shown;
  state.used = state.touched = now;
  ++state.hits;
  state.passes = 0;
}

void record_pass(StateRecord& state, int64_t now) {
  state.touched = now;
  ++state.passes;
}

}  // namespace fourfold::engine
