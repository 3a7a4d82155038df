#include "engine/draft_policy.h"

#include <algorithm>
#include <bit>

#include "base/check.h"

namespace fourfold::engine {
namespace {

constexpr double kLaneDecay = 0.97;
constexpr double kAllDecay = 0.998;
constexpr double kPriorAcceptance = 0.6;  // before anything was measured
constexpr double kNextPosition = 0.85;    // times that of the position before, likewise
constexpr double kPriorWeight = 3;        // of all sequences, in observations of a sequence's own
constexpr double kLearning = 0.1;         // of a measured knot, from steps that took longer
constexpr double kCorrection = 0.2;       // from steps that took less: no disturbance makes a step faster
constexpr double kUnknownSlope = 0.3;     // of seconds over rows beyond what was measured, of proportional growth
constexpr double kUnknownDoubt = 8;       // of a knot's seconds, where nothing was measured
constexpr int64_t kTrusted = 3;           // measurements from which on a knot's seconds are believed
constexpr int64_t kRemembered = 16;       // measurements; a quarter of them is forgotten with every kPlainInterval,
constexpr int64_t kForgets = 8;           // of up to so many rows or lanes
constexpr double kSurprise = 1.5;         // times what is known: the most that one measurement can say
constexpr double kUnknownPass = 0.15;     // of a plain step
constexpr double kFeedOfPass = 0.3;  // of a drafting pass, which has the head beside: what feeding takes, if unknown
constexpr double kLeastPlain = 0.9;  // of a step that feeds, if unknown
constexpr double kAllowance = 0.02;  // of the time that passes, for trials
constexpr double kOpening = 6, kCeiling = 16;   // of the account, in plain steps
constexpr double kLeastGain = 1.02;             // times the plain rate
constexpr double kCertainGain = 1.25;           // whatever feeding costs
constexpr int64_t kPlainInterval = 128;         // choices between measurements of plain steps
constexpr int64_t kStage = 4;                   // choices at a depth before a deeper one is allowed
constexpr int64_t kFirstTrial = 6, kTrial = 3;  // choices of a trial
constexpr int64_t kPatience = 48;               // choices without drafts until the drafter's caches are given up
constexpr double kRetry = 4;                    // plain steps that the account must hold to begin with them again
constexpr int64_t kShortestInterval = 32, kLongestInterval = 1024;  // choices between trials

constexpr int64_t kKnots[] = {1,  2,  3,  4,  5,  6,   7,   8,   10,  12,  14,  16,  20,  24,   28,   32,  40,
                              48, 56, 64, 80, 96, 128, 160, 192, 256, 320, 384, 512, 768, 1024, 1536, 2048};

}  // namespace

void Acceptance::add(int64_t verified, int64_t accepted_drafts, double decay) {
  FF_ASSERT(verified <= ops::kMaxDrafts && accepted_drafts <= verified);
  for (int64_t i = 0; i < verified && i <= accepted_drafts; ++i) {
    const auto at = static_cast<size_t>(i);
    tried[at] = tried[at] * decay + 1;
    accepted[at] = accepted[at] * decay + (i < accepted_drafts ? 1 : 0);
  }
}

// ---- seconds

CostCurve::CostCurve() : knots_(std::size(kKnots)) {}

size_t CostCurve::knot(int64_t count) {
  const auto* place = std::lower_bound(std::begin(kKnots), std::end(kKnots) - 1, count);
  return static_cast<size_t>(place - std::begin(kKnots));
}

bool CostCurve::knows(int64_t count) const { return knots_[knot(count)].measured >= 2; }
bool CostCurve::trusts(int64_t count) const { return knots_[knot(count)].measured >= kTrusted; }

double CostCurve::doubt(int64_t count) const {
  const int64_t measured = knots_[knot(count)].measured;
  return measured < kTrusted ? std::ldexp(kUnknownDoubt, static_cast<int>(-measured))
                             : 1 / (1 + static_cast<double>(measured));
}

// The first steps of a kind find cold code and caches, and some are disturbed by other work on the machine: at first
// the least of what was measured counts, later no measurement for much more than is known.
void CostCurve::learn(int64_t count, double seconds) {
  Knot& k = knots_[knot(count)];
  if (++k.measured <= kTrusted) {
    k.seconds = k.measured == 1 ? seconds : std::min(k.seconds, seconds);
    return;
  }
  seconds = std::min(seconds, k.seconds * kSurprise + 1e-9);
  k.seconds += (seconds < k.seconds ? kCorrection : kLearning) * (seconds - k.seconds);
}

// Of many rows there are neighbours that were measured since.
void CostCurve::forget() {
  for (size_t i = 0; kKnots[i] <= kForgets; ++i) {
    knots_[i].measured = std::min(knots_[i].measured, kRemembered) * 3 / 4;
  }
}

double CostCurve::at(int64_t count) const {
  const size_t here = knot(count);
  if (knots_[here].measured > 0) return knots_[here].seconds;
  size_t below = here, above = here;
  while (below > 0 && knots_[below].measured == 0) --below;
  while (above + 1 < knots_.size() && knots_[above].measured == 0) ++above;
  const Knot &low = knots_[below], &high = knots_[above];
  if (low.measured == 0 && high.measured == 0) return 0;
  if (low.measured == 0) return high.seconds;
  const auto from = static_cast<double>(kKnots[below]), x = static_cast<double>(count);
  if (high.measured == 0) return low.seconds * (1 + kUnknownSlope * (x - from) / from);
  const auto to = static_cast<double>(kKnots[above]);
  return low.seconds + (high.seconds - low.seconds) * (x - from) / (to - from);
}

// ---- the policy

DraftPolicy::DraftPolicy(int32_t setting, int32_t most) : setting_(setting), most_(most) {
  FF_ASSERT(most >= 0 && most <= ops::kMaxDrafts && setting >= -1 && setting <= most);
}

DraftPolicy::Load& DraftPolicy::load_of(int64_t lanes) {
  const auto size = static_cast<size_t>(std::bit_width(static_cast<uint64_t>(std::max<int64_t>(lanes, 1))));
  return loads_[std::min(size, loads_.size()) - 1];
}

double DraftPolicy::probability(const Acceptance& lane, size_t position) const {
  // A position that was never tried is a little less likely than the one before it, where that is likely.
  double prior = kPriorAcceptance;
  for (size_t p = 0; p <= position; ++p) {
    if (p > 0) prior = std::max(kPriorAcceptance, kNextPosition * prior);
    prior = (all_.accepted[p] + 2 * prior) / (all_.tried[p] + 2);
  }
  return (lane.accepted[position] + kPriorWeight * prior) / (lane.tried[position] + kPriorWeight);
}

bool DraftPolicy::feeds(int64_t lanes) {
  if (most_ == 0) return false;
  if (setting_ >= 0) return setting_ > 0;
  if (!opened_) return true;
  const Load& load = load_of(lanes);
  const bool promising = load.potential >= kLeastGain;
  // Drafts pay so little that it matters what feeding costs: find out.
  if (promising && load.potential < kCertainGain && feeding_.at(lanes) == 0) return false;
  if (promising || load.failures == 0) return account_ >= 0;
  return load.since_trial >= load.interval && account_ > kRetry * plain_seconds(lanes);
}

void DraftPolicy::choose(std::span<Choice> lanes, int64_t others) {
  gives_up_ = false;
  if (setting_ >= 0) {
    for (Choice& lane : lanes) lane.drafts = std::min(lane.most, setting_);
    return;
  }
  const auto count = static_cast<int64_t>(lanes.size()) + others;
  if (count == 0) return;
  Load& load = load_of(count);
  ++load.since_plain;
  ++load.since_trial;
  load.potential = potential(count);
  for (Choice& lane : lanes) lane.drafts = 0;
  if (lanes.empty()) return;
  // What a plain step takes must be known, and not from long ago.
  if (plain_left_ == 0 && trial_left_ == 0 && (!fed_rows_.knows(count) || load.since_plain >= kPlainInterval)) {
    plain_left_ = 2;
    load.since_plain = 0;
    if (fed_rows_.knows(count)) {
      for (CostCurve* curve : {&rows_, &fed_rows_, &pass_}) curve->forget();
    }
  }
  if (plain_left_ > 0) {
    --plain_left_;
    return;
  }
  if (trial_left_ > 0) {
    --trial_left_;
    for (Choice& lane : lanes) lane.drafts = std::min(lane.most, 1);
    return;
  }
  if (account_ > 0) {
    // Deeper by one when a depth was used for a while: the times of a depth tell of the next.
    if (++load.at_depth > kStage) {
      load.at_depth = 0;
      load.depth = std::min(load.depth + 1, most_);
    }
    // Where drafting costs something of its own only several drafts may pay for it.
    double gain = best(lanes, others, load.depth);
    for (int32_t depth = load.depth + 1; gain < kLeastGain && depth <= most_; ++depth) {
      for (Choice& lane : lanes) lane.drafts = 0;
      gain = best(lanes, others, depth);
    }
    if (gain >= kLeastGain) {
      // The first steps of a kind are slow.
      if (!pass_.trusts(1) && !pass_.trusts(static_cast<int64_t>(lanes.size()))) trial_left_ = kFirstTrial - 1;
      load.idle = load.failures = load.since_trial = 0;
      load.interval = kShortestInterval;
      return;
    }
    load.at_depth = 0;
    for (Choice& lane : lanes) lane.drafts = 0;
    // It would, if all sequences could draft: those that begin will.
    if (load.potential >= kLeastGain) return;
  }
  ++load.idle;
  const double plain = plain_seconds(count);
  const auto drafting = static_cast<int64_t>(lanes.size());
  const double trial = fed_rows_.at(count + drafting) + pass_seconds(drafting, plain);
  const int64_t choices = pass_.trusts(drafting) ? kTrial : kFirstTrial;
  if (load.since_trial >= load.interval && account_ > static_cast<double>(choices) * (trial - plain)) {
    load.since_trial = 0;
    load.interval = std::min(2 * load.interval, kLongestInterval);
    trial_left_ = choices;
  } else if (load.idle >= kPatience) {
    load.idle = 0;
    load.interval = std::min(2 * load.interval, kLongestInterval);
    ++load.failures;
    gives_up_ = true;
  }
}

// Times the plain rate, if all of so many lanes could draft and were like those before.
double DraftPolicy::potential(int64_t lanes) const {
  const double plain = plain_seconds(lanes);
  if (plain <= 0) return 0;
  double best = 0, tokens = 1, product = 1;
  for (int64_t d = 1; d <= most_; ++d) {
    product *= probability({}, static_cast<size_t>(d - 1));
    tokens += product;
    const double step = std::max(fed_rows_.at(lanes * (1 + d)), fed_rows_.at(lanes)) +
                        static_cast<double>(d) * pass_seconds(lanes, plain);
    best = std::max(best, tokens * plain / step);
  }
  return best;
}

double DraftPolicy::best(std::span<Choice> lanes, int64_t others, int32_t depth) {
  drafts_.clear();
  for (size_t i = 0; i < lanes.size(); ++i) {
    double product = 1;
    for (int32_t d = 0; d < std::min(lanes[i].most, depth); ++d) {
      product *= probability(*lanes[i].acceptance, static_cast<size_t>(d));
      drafts_.push_back({product, static_cast<int32_t>(i), d});
    }
  }
  std::sort(drafts_.begin(), drafts_.end(), [](const Draft& a, const Draft& b) {
    return a.probability != b.probability ? a.probability > b.probability
                                          : std::pair(a.position, a.lane) < std::pair(b.position, b.lane);
  });
  const int64_t count = static_cast<int64_t>(lanes.size()) + others;
  const double plain = plain_seconds(count);
  const double plain_rate = static_cast<double>(count) / plain;
  double tokens = static_cast<double>(count), passes = 0, best_rate = 0;
  std::array<int64_t, ops::kMaxDrafts> drafting{};
  size_t taken = 0;
  for (size_t i = 0; i < drafts_.size(); ++i) {
    int64_t& in_pass = drafting[static_cast<size_t>(drafts_[i].position)];
    passes += pass_seconds(in_pass + 1, plain) - pass_seconds(in_pass, plain);
    ++in_pass;
    tokens += drafts_[i].probability;
    const int64_t rows = count + static_cast<int64_t>(i) + 1;
    const double rate = tokens / (std::max(fed_rows_.at(rows), fed_rows_.at(count)) + passes);
    if (rate > best_rate) {
      best_rate = rate;
      taken = i + 1;
    }
  }
  for (size_t i = 0; i < taken; ++i) ++lanes[static_cast<size_t>(drafts_[i].lane)].drafts;
  return best_rate / plain_rate;
}

// ---- what was measured

void DraftPolicy::record(Acceptance& lane, int64_t verified, int64_t accepted) {
  if (verified == 0) return;
  lane.add(verified, accepted, kLaneDecay);
  all_.add(verified, accepted, kAllDecay);
}

double DraftPolicy::pass_seconds(int64_t lanes, double plain) const {
  if (lanes == 0) return 0;
  const double seconds = pass_.at(lanes);
  return seconds > 0 ? seconds : kUnknownPass * plain;
}

// Seconds of a step without anything that drafting needs.
double DraftPolicy::plain_seconds(int64_t lanes) const {
  const double fed = fed_rows_.at(lanes);
  if (fed == 0) return rows_.at(lanes);
  const double ratio = feeding_.at(lanes);
  if (ratio > 0) return fed / ratio;
  return std::max(fed - kFeedOfPass * pass_seconds(lanes, fed), kLeastPlain * fed);
}

void DraftPolicy::measure(const Step& step, double seconds) {
  if (setting_ >= 0 || most_ == 0 || step.prompts || step.lanes == 0) return;
  if (!step.feeds) {
    rows_.learn(step.rows, seconds);
    if (fed_rows_.knows(step.rows))
      feeding_.learn(step.rows, std::max(fed_rows_.at(step.rows) / rows_.at(step.rows), 1.0));
    account_ += kAllowance * seconds;
  } else {
    const double estimated = learn_fed(step, seconds);
    const double plain = plain_seconds(step.lanes);
    if (!opened_ && fed_rows_.knows(step.lanes)) {
      opened_ = true;
      account_ = kOpening * plain;
    }
    // What other work on the machine takes from a step is not the drafts' to pay.
    const double charged = std::min(seconds, 2 * estimated);
    account_ += plain * static_cast<double>(step.tokens) / static_cast<double>(step.lanes) - charged;
    account_ += kAllowance * charged;
  }
  account_ = std::min(account_, kCeiling * plain_seconds(step.lanes));
}

// What a step took beyond the estimate is shared by the parts of the estimate: most to those that are known least.
// Returns the estimate afterwards.
double DraftPolicy::learn_fed(const Step& step, double seconds) {
  const double known = fed_rows_.at(step.rows);
  double off = seconds - known, doubts = 0;
  for (const int64_t n : step.passes) {
    if (n == 0) continue;
    off -= pass_.at(n);
    doubts += pass_.doubt(n);
  }
  double share = off * fed_rows_.doubt(step.rows) / (doubts + fed_rows_.doubt(step.rows));
  // Steps of so many rows are seldom seen without passes. More rows take longer, but no longer than each by itself (or
  // twice as long, where rows are padded).
  if (step.rows > step.lanes && fed_rows_.knows(step.lanes)) {
    const double least = fed_rows_.at(step.lanes);
    const double most = least * std::max(2.0, static_cast<double>(step.rows) / static_cast<double>(step.lanes));
    share = std::clamp(known + share, least, most) - known;
  }
  fed_rows_.learn(step.rows, std::max(known + share, 0.0));
  double estimated = fed_rows_.at(step.rows);
  for (const int64_t n : step.passes) {
    if (n == 0) continue;
    pass_.learn(n, std::max(pass_.at(n) + (off - share) * pass_.doubt(n) / doubts, 0.0));
    estimated += pass_.at(n);
  }
  return estimated;
}

}  // namespace fourfold::engine
