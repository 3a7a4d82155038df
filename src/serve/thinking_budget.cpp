#include "serve/thinking_budget.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace fourfold::serve {

ThinkingBudget::ThinkingBudget(ThinkingTokens tokens, int64_t budget, bool begun)
    : tokens_(std::move(tokens)), budget_(budget) {
  FF_ASSERT(!tokens_.end.empty());
  states_.push_back({!begun ? Phase::kStart : budget == 0 ? Phase::kClosing : Phase::kThinking, 0});
}

bool ThinkingBudget::mask(std::span<uint32_t> bits) {
  const State& state = states_.back();
  if (state.phase != Phase::kClosing) return false;
  const auto token = static_cast<uint32_t>(tokens_.end[static_cast<size_t>(state.count)]);
  bits[token / 32] |= uint32_t{1} << (token % 32);
  return true;
}

bool ThinkingBudget::accept(int32_t token) {
  State next = states_.back();
  switch (next.phase) {
    case Phase::kStart:
      next.phase = token != tokens_.open ? Phase::kDone : budget_ == 0 ? Phase::kClosing : Phase::kThinking;
      break;
    case Phase::kThinking:
      if (token == tokens_.close) {
        next.phase = Phase::kDone;
      } else if (++next.count >= budget_) {
        next = {Phase::kClosing, 0};
      }
      break;
    case Phase::kClosing:
      if (token != tokens_.end[static_cast<size_t>(next.count)]) return false;
      if (++next.count == static_cast<int64_t>(tokens_.end.size())) next.phase = Phase::kDone;
      break;
    case Phase::kDone:
      break;
  }
  states_.push_back(next);
  return true;
}

void ThinkingBudget::roll_back(int64_t count) {
  FF_ASSERT(count >= 0 && count < static_cast<int64_t>(states_.size()));
  states_.resize(states_.size() - static_cast<size_t>(count), states_.front());
}

}  // namespace fourfold::serve
