// How many drafts each sequence makes and verifies: a fixed number, or what pays.
//
// What pays is measured. A sequence's drafts are accepted with a probability by position, learnt from its own past,
// with the past of all sequences as the prior. A step's seconds are a function of its rows, plus what each drafting
// pass takes for so many sequences, plus what it takes to keep the drafter's caches up to date; all three curves are
// learnt from steps without prompts. choose() then takes, over all sequences, the drafts that are most likely to be
// accepted, as many as give the most expected tokens per second for the whole step.
//
// That is never much slower than no drafts, because trying costs only what was saved before: an account holds the time
// that drafting has gained or lost against plain steps, plus two percent of the time that passes. Nothing is tried when
// it is overdrawn. Plain steps are measured again now and then, so that the account stays honest; drafts that did not
// pay are tried again at growing intervals; and when they do not pay for long, the drafter's caches are given up as
// well (for the sequences that run; a later one may begin with them).
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "ops/step.h"

namespace fourfold::engine {

struct Active;

// Drafts tried and accepted at each position, given that those before it were; older ones count less.
struct Acceptance {
  std::array<double, ops::kMaxDrafts> tried{}, accepted{};

  void add(int64_t verified, int64_t accepted_drafts, double decay);
};

// Seconds over a count, at knots that are close for small counts and far apart for large ones.
class CostCurve {
 public:
  CostCurve();
  bool knows(int64_t count) const;    // measured here, twice at least
  bool trusts(int64_t count) const;   // often enough to be believed
  double at(int64_t count) const;     // between and beyond what was measured: an estimate; 0 when nothing was
  double doubt(int64_t count) const;  // how little is known here
  void learn(int64_t count, double seconds);
  void forget();  // some of what was measured: it is tried again now and then

 private:
  static size_t knot(int64_t count);
  struct Knot {
    double seconds = 0;
    int64_t measured = 0;
  };
  std::vector<Knot> knots_;
};

class DraftPolicy {
 public:
  // `setting`: EngineOptions::drafts; `most`: drafts of a sequence, 0 .. kMaxDrafts.
  DraftPolicy(int32_t setting, int32_t most);

  int32_t most() const { return most_; }
  // Whether a sequence that begins as one of `lanes` should keep the drafter's caches up to date.
  bool feeds(int64_t lanes);

  struct Choice {
    Active* request = nullptr;
    const Acceptance* acceptance = nullptr;
    int32_t most = 0;
    int32_t drafts = 0;  // the answer
  };
  // Drafts to make in this step for sequences that can draft, beside `others` that choose a token without. The next
  // step verifies them.
  void choose(std::span<Choice> lanes, int64_t others);
  // After choose(): the running sequences need not keep the drafter's caches up to date any more.
  bool gives_up() const { return gives_up_; }

  // A settled step: `accepted` of `verified` drafts of a sequence.
  void record(Acceptance& lane, int64_t verified, int64_t accepted);
  struct Step {
    int64_t lanes = 0;                              // that chose tokens
    int64_t rows = 0;                               // of these
    int64_t tokens = 0;                             // that they chose
    std::array<int64_t, ops::kMaxDrafts> passes{};  // lanes in each drafting pass
    bool feeds = false;
    bool prompts = false;  // there were others
  };
  void measure(const Step& step, double seconds);

 private:
  // What is known for about so many lanes.
  struct Load {
    int64_t since_plain = 0;  // choices since plain steps were measured
    int64_t since_trial = 0;  // choices since drafts were tried
    int64_t interval = 32;    // until they are tried again
    int64_t idle = 0;         // choices without drafts
    int64_t failures = 0;     // how often the drafter's caches were given up, in a row
    int32_t depth = 1;        // the most that is allowed
    int64_t at_depth = 0;     // choices since it was reached
    double potential = 0;     // what drafts would give if all sequences could make them, times the plain rate
  };
  Load& load_of(int64_t lanes);
  double probability(const Acceptance& lane, size_t position) const;
  // The best drafts, and how many times the plain rate they promise.
  double best(std::span<Choice> lanes, int64_t others, int32_t depth);

  double potential(int64_t lanes) const;
  double plain_seconds(int64_t lanes) const;
  double pass_seconds(int64_t lanes, double plain) const;
  double learn_fed(const Step& step, double seconds);

  const int32_t setting_, most_;
  Acceptance all_;
  // Seconds of so many rows, without and with the drafter's caches kept up to date; of a drafting pass of so many
  // lanes; and how much the second is of the first.
  CostCurve rows_, fed_rows_, pass_, feeding_;
  std::array<Load, 14> loads_;
  double account_ = 0;                       // seconds
  bool opened_ = false;                      // the account
  int64_t plain_left_ = 0, trial_left_ = 0;  // choices that are fixed beforehand
  bool gives_up_ = false;

  struct Draft {
    double probability;  // that it is accepted, with all before it
    int32_t lane, position;
  };
  std::vector<Draft> drafts_;
};

}  // namespace fourfold::engine
