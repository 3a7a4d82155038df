// An end to reasoning that has none: after so many tokens of it, the model is made to close it.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/engine.h"

namespace fourfold::serve {

struct ThinkingTokens {
  int32_t open = -1, close = -1;  // <think>, </think>
  std::vector<int32_t> end;       // what is written to close it: holds `close`
};

class ThinkingBudget final : public engine::Constraint {
 public:
  // `begun`: the prompt has opened the reasoning. Otherwise the model may, with its first token.
  ThinkingBudget(ThinkingTokens tokens, int64_t budget, bool begun);

  bool mask(std::span<uint32_t> bits) override;
  bool accept(int32_t token) override;
  void roll_back(int64_t count) override;

 private:
  enum class Phase : uint8_t { kStart, kThinking, kClosing, kDone };
  struct State {
    Phase phase;
    int64_t count;  // kThinking: tokens so far; kClosing: of the end
  };

  const ThinkingTokens tokens_;
  const int64_t budget_;
  std::vector<State> states_;  // after each token; the last is the present
};

}  // namespace fourfold::serve
