// A grammar as the engine's constraint: on the whole answer, or on what comes behind the reasoning.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "structure/compiler.h"

namespace fourfold::structure {

// The text that reasoning ends with, spelled by whatever tokens, and which tokens may come while it goes on: any with
// bytes, but for one that goes on behind that end with more than line ends. So no answer ends inside of its reasoning.
// May be used from many threads.
class ReasoningEnd {
 public:
  explicit ReasoningEnd(const Vocabulary& vocabulary);

  // What has been read of the ends, after more of the text; `rest` is what comes behind </think> once it is complete.
  struct Place {
    std::string tail;  // the longest end of the text that a tag begins with
    bool ended = false;
    std::string rest;
  };
  Place after(const std::string& tail, const std::string& text) const;
  // Whether this may come next. `no_calls`: <tool_call> ends reasoning for who reads calls, so it may not be written
  // there.
  bool allows(const std::string& tail, const std::string& text, bool no_calls) const;
  const std::string& bytes(int32_t token) const { return tokens_[static_cast<size_t>(token)]; }
  bool known(int32_t token) const { return token >= 0 && static_cast<size_t>(token) < tokens_.size(); }
  void mask(const std::string& tail, bool no_calls, std::span<uint32_t> bits) const;

 private:
  const std::vector<std::string> tokens_;
  std::vector<uint32_t> all_;        // tokens with bytes
  std::vector<int32_t> with_angle_;  // those that may end a tag
  mutable std::mutex mutex_;
  mutable std::map<std::pair<std::string, bool>, std::vector<uint32_t>> masks_;  // by what was read
};

struct ConstraintOptions {
  enum class Reasoning { kNone, kInside, kMaybe } reasoning = Reasoning::kNone;
  int32_t think_open = -1;  // kMaybe: the token that may begin the answer, and reasoning with it
  bool no_calls = false;    // as for ReasoningEnd::allows()
  // Asked as well while the reasoning goes on, and until it lets everything through.
  std::shared_ptr<engine::Constraint> in_reasoning;
  std::vector<int32_t> stop_tokens;  // at least one: a grammar that is complete must have a way to end
};

// A constraint whose calls take more than 2 s in all, and 5 ms a token beyond, ends its request: a grammar of many
// meanings costs the request that brought it, and not the others.
std::shared_ptr<engine::Constraint> make_constraint(std::shared_ptr<const Grammar> grammar,
                                                    std::shared_ptr<const ReasoningEnd> end, ConstraintOptions options);

}  // namespace fourfold::structure
