// A constraint that allows three of four tokens, as a function of all it accepted; its faults too, so that it does the
// same in an engine and alone.
#pragma once

#include <memory>
#include <stdexcept>
#include <vector>

#include "engine/engine.h"
#include "fake_model.h"

namespace fourfold::engine {

class TestConstraint final : public Constraint {
 public:
  enum class Fault { kNone, kThrows, kRefuses, kDeadEnd };
  TestConstraint(uint64_t seed, Fault fault, uint64_t rarity) : seed_(seed), fault_(fault), rarity_(rarity) {}

  bool mask(std::span<uint32_t> bits) override {
    const uint64_t hash = current();
    if (faulty(hash) && fault_ == Fault::kThrows) throw std::runtime_error("no idea");
    if (faulty(hash) && fault_ == Fault::kDeadEnd) return true;
    if (hash % 7 == 0) return false;
    for (size_t token = 0; token < 32 * bits.size(); ++token) {
      if (allows(hash, static_cast<int32_t>(token))) bits[token / 32] |= uint32_t{1} << (token % 32);
    }
    return true;
  }
  bool accept(int32_t token) override {
    const uint64_t hash = current();
    if (hash % 7 != 0 && !allows(hash, token)) return false;
    if (faulty(hash) && fault_ == Fault::kRefuses) return false;
    accepted_.push_back(token);
    return true;
  }
  void roll_back(int64_t count) override {
    if (count < 1 || count > static_cast<int64_t>(accepted_.size())) throw std::logic_error("rolled back too far");
    accepted_.resize(accepted_.size() - static_cast<size_t>(count));
  }

 private:
  uint64_t current() const { return hash_of(accepted_) ^ seed_; }
  static bool allows(uint64_t hash, int32_t token) { return Random(hash + static_cast<uint64_t>(token)).below(4) != 0; }
  bool faulty(uint64_t hash) const { return fault_ != Fault::kNone && Random(hash).below(rarity_) == 0; }

  uint64_t seed_;
  Fault fault_;
  uint64_t rarity_;
  std::vector<int32_t> accepted_;
};

}  // namespace fourfold::engine
