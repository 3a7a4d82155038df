#include "structure/constraint.h"

#include <algorithm>
#include <chrono>
#include <string_view>
#include <utility>

#include "base/check.h"

namespace fourfold::structure {
namespace {

constexpr std::string_view kEnd = "</think>", kCall = "<tool_call>";
constexpr double kMaxSeconds = 2.0, kMaxSecondsOfToken = 0.005;

void set(std::span<uint32_t> bits, int32_t token, bool value) {
  const uint32_t bit = uint32_t{1} << (token % 32);
  uint32_t& word = bits[static_cast<size_t>(token) / 32];
  word = value ? word | bit : word & ~bit;
}

// The longest end of `text` that one of the tags begins with, but is not all of.
std::string tail_of(std::string_view text) {
  for (size_t length = std::min(text.size(), kCall.size() - 1); length > 0; --length) {
    const std::string_view end = text.substr(text.size() - length);
    if (kEnd.starts_with(end) || kCall.starts_with(end)) return std::string(end);
  }
  return "";
}

class GrammarConstraint final : public engine::Constraint {
 public:
  GrammarConstraint(std::shared_ptr<const Grammar> grammar, std::shared_ptr<const ReasoningEnd> end,
                    ConstraintOptions options)
      : grammar_(std::move(grammar)),
        end_(std::move(end)),
        options_(std::move(options)),
        matcher_(grammar_->matcher(options_.stop_tokens)) {
    FF_ASSERT(!options_.stop_tokens.empty());
    using Reasoning = ConstraintOptions::Reasoning;
    Place first;
    first.phase = options_.reasoning == Reasoning::kInside                              ? Phase::kReasoning
                  : options_.reasoning == Reasoning::kMaybe && options_.think_open >= 0 ? Phase::kStart
                                                                                        : Phase::kAnswer;
    places_.push_back(std::move(first));
  }

  bool mask(std::span<uint32_t> bits) override {
    const Stopwatch watch(*this);
    const Place& place = places_.back();
    if (place.phase == Phase::kReasoning) {
      if (options_.in_reasoning && options_.in_reasoning->mask(bits)) return true;
      end_->mask(place.tail, options_.no_calls, bits);
      return true;
    }
    if (options_.in_reasoning && place.phase == Phase::kAnswer && options_.in_reasoning->mask(bits)) return true;
    const bool binds = matcher_->mask(bits);
    if (binds && place.phase == Phase::kStart) set(bits, options_.think_open, true);
    return binds;
  }

  bool accept(int32_t token) override {
    const Stopwatch watch(*this);
    const auto& stops = options_.stop_tokens;
    if (std::find(stops.begin(), stops.end(), token) != stops.end() || !end_->known(token)) return false;
    Place next = places_.back();
    next.steps = 0;
    bool fits = true;
    if (next.phase == Phase::kReasoning) {
      if (!end_->allows(next.tail, end_->bytes(token), options_.no_calls)) return false;
      const ReasoningEnd::Place read = end_->after(next.tail, end_->bytes(token));
      next.tail = read.tail;
      if (read.ended) {
        next.phase = Phase::kAnswer;
        next.tail.clear();
        if (!read.rest.empty()) {
          fits = matcher_->accept_text(read.rest);
          next.steps = 1;
        }
      }
    } else if (next.phase == Phase::kStart && token == options_.think_open) {
      next.phase = Phase::kReasoning;
    } else {
      next.phase = Phase::kAnswer;
      fits = matcher_->accept(token);
      next.steps = 1;
    }
    if (!fits) return false;
    if (options_.in_reasoning && !options_.in_reasoning->accept(token)) {
      if (next.steps > 0) matcher_->roll_back(next.steps);
      return false;
    }
    places_.push_back(std::move(next));
    return true;
  }

  void roll_back(int64_t count) override {
    FF_ASSERT(count >= 0 && count < static_cast<int64_t>(places_.size()));
    if (count == 0) return;
    if (options_.in_reasoning) options_.in_reasoning->roll_back(count);
    int64_t steps = 0;
    for (; count > 0; --count) {
      steps += places_.back().steps;
      places_.pop_back();
    }
    if (steps > 0) matcher_->roll_back(steps);
  }

 private:
  enum class Phase : uint8_t { kStart, kReasoning, kAnswer };
  struct Place {
    Phase phase = Phase::kAnswer;
    int64_t steps = 0;  // of the matcher, by the token that led here
    std::string tail;   // kReasoning: what may become its end
  };

  // Adds up the time of a call, and ends a request that has had too much of it.
  class Stopwatch {
   public:
    explicit Stopwatch(GrammarConstraint& owner) : owner_(owner) {
      const double allowed = kMaxSeconds + kMaxSecondsOfToken * static_cast<double>(owner.places_.size());
      if (owner.seconds_ > allowed)
        fail("the grammar takes too long: {:.1f} s for {} tokens", owner.seconds_, owner.places_.size());
    }
    ~Stopwatch() { owner_.seconds_ += std::chrono::duration<double>(Clock::now() - begin_).count(); }
    Stopwatch(const Stopwatch&) = delete;
    Stopwatch& operator=(const Stopwatch&) = delete;

   private:
    using Clock = std::chrono::steady_clock;
    GrammarConstraint& owner_;
    const Clock::time_point begin_ = Clock::now();
  };

  const std::shared_ptr<const Grammar> grammar_;
  const std::shared_ptr<const ReasoningEnd> end_;
  const ConstraintOptions options_;
  std::unique_ptr<Matcher> matcher_;
  std::vector<Place> places_;  // after each token; the last is the present
  double seconds_ = 0;
};

}  // namespace

ReasoningEnd::ReasoningEnd(const Vocabulary& vocabulary) : tokens_(vocabulary.tokens) {
  all_.resize(static_cast<size_t>((vocabulary.size + 31) / 32), 0);
  for (size_t i = 0; i < tokens_.size(); ++i) {
    if (tokens_[i].empty()) continue;
    set(all_, static_cast<int32_t>(i), true);
    if (tokens_[i].find('>') != std::string::npos) with_angle_.push_back(static_cast<int32_t>(i));
  }
}

ReasoningEnd::Place ReasoningEnd::after(const std::string& tail, const std::string& text) const {
  Place out;
  const std::string all = tail + text;
  if (const size_t found = all.find(kEnd); found != std::string::npos) {
    out.ended = true;
    out.rest = all.substr(found + kEnd.size());
  } else {
    out.tail = tail_of(all);
  }
  return out;
}

bool ReasoningEnd::allows(const std::string& tail, const std::string& text, bool no_calls) const {
  const Place place = after(tail, text);
  if (place.ended) return place.rest.size() <= 2 && place.rest.find_first_not_of('\n') == std::string::npos;
  return !text.empty() && (!no_calls || (tail + text).find(kCall) == std::string::npos);
}

void ReasoningEnd::mask(const std::string& tail, bool no_calls, std::span<uint32_t> bits) const {
  const std::lock_guard lock(mutex_);
  auto known = masks_.find({tail, no_calls});
  if (known == masks_.end()) {  // as many as the tags have beginnings
    std::vector<uint32_t> made = all_;
    for (const int32_t token : with_angle_) {
      if (!allows(tail, bytes(token), no_calls)) set(made, token, false);
    }
    known = masks_.emplace(std::pair(tail, no_calls), std::move(made)).first;
  }
  std::copy(known->second.begin(), known->second.end(), bits.begin());
}

std::shared_ptr<engine::Constraint> make_constraint(std::shared_ptr<const Grammar> grammar,
                                                    std::shared_ptr<const ReasoningEnd> end,
                                                    ConstraintOptions options) {
  return std::make_shared<GrammarConstraint>(std::move(grammar), std::move(end), std::move(options));
}

}  // namespace fourfold::structure
