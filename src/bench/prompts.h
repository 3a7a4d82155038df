// Sets of prompts, by name: what was asked stands beside every figure, because it changes them.
//
// `trivial` (sums) and `real` (work as people ask for it, with names, figures and texts that differ in each) are
// generated and have no end; anything else is a file of conversations as `fourfold eval` reads it, or a directory of
// such files. Two requests of one run never have the same prompt.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/json.h"

namespace fourfold::bench {

class PromptSet {
 public:
  // "trivial", "real" or a path: an Error where it is none, or has no conversation in it.
  static PromptSet open(const std::string& name);

  const std::string& name() const { return name_; }
  // Prompts in it; 0: as many as are wanted.
  int64_t size() const { return static_cast<int64_t>(items_.size()); }
  // The prompt of that number, in an order that `seed` decides: {"messages": [...], "tools"?: [...]}. With `context`,
  // notes of about so many tokens that nobody asked for stand in front of the last message. The same arguments give
  // the same prompt, other numbers another one; of a file, numbers below size().
  Json prompt(uint64_t seed, int64_t number, int64_t context) const;

 private:
  enum class Kind { kTrivial, kReal, kFile };
  Kind kind_ = Kind::kFile;
  std::string name_;
  std::vector<Json> items_;
};

}  // namespace fourfold::bench
