// Which states of a prompt are worth making, and which are worth keeping. (Pages need no policy beyond "least recently
// used": there are many of them. A state of recurrent layers may weigh as much as thousands of tokens' keys and
// values.)
//
// Making. A state can be had where a step ends, so every boundary costs a cut in the prompt. boundaries_for() cuts
// where the caller's hints say (the end of system prompt and tools; before the last turn's opening), where the prompt
// parts from others that are cached, and rarely in a long prompt; the end of an answer costs nothing.
//
// Keeping. When there is a state too many, one of the lowest class goes:
//
//   kDead  An answer's end that was never hit, although a later request hit the state before it: the conversation went
//          on without it (its history is rendered differently: thinking removed, no empty think block). Likewise the
//          end of any answer in a conversation that is known to go on in this way. Oldest first.
//   kPast  A state that the conversation has left behind: a later request hit a state below it, or made one below it
//          after having hit it. It pays only for a request that goes back. Branching is evidence of use: a state where
//          requests parted, or that was hit more than once, must be left behind once more for each such time (at most
//          twice). States of the stride that were never hit are here too, and the state before an answer in a
//          conversation that goes on from its answers' ends. The one whose loss costs least goes first: the distance to
//          the state before it. So a long chain (an agent's loop) thins out evenly instead of pushing out others.
//   kSpare An answer's end that was never hit, in a conversation whose habit is not known yet: the state before the
//          answer does as well, but for the answer. Least recently used first.
//   kLive  All others: the last states of each conversation, where several requests part, and the ends of system
//          prompts. Least recently used first, where use is a hit of this very state; for the end of a system prompt
//          use is any hit on or below it, since the next new conversation needs it, however long the present ones are.
//
// Whether a conversation goes on from its answers' ends or not (its habit) shows when a request comes back to it: its
// prompt runs through the end of the last answer, whose place is known even if its state is gone, or it parts before.
//
// What that gives: a title request between two turns adds two or three states and takes the place of past ones; fifty
// tool calls of one conversation never cost another conversation its last state; as many conversations as there are
// states can be kept, one state each.
#pragma once

#include <cstdint>
#include <span>
#include <tuple>
#include <vector>

namespace fourfold::engine {

// What a boundary is, which says how long its state is worth keeping. The earlier here, the longer.
enum class BoundaryKind : uint8_t {
  kSystem,   // the end of system prompt and tools: the first of several hints
  kTurn,     // another hint: before the last turn's opening
  kParting,  // where two requests parted; where several answers of one prompt begin
  kPaused,   // how far a preempted request had come
  kEnd,      // the end of an answer
  kStride,   // every so many tokens of a long prompt, for requests that part from it where nobody foresaw it
};

struct Boundary {
  int64_t position = 0;
  BoundaryKind kind = BoundaryKind::kStride;
  bool operator==(const Boundary&) const = default;
};

struct BoundaryInputs {
  int64_t prompt = 0;                   // tokens
  std::span<const int64_t> hints = {};  // CacheHints::boundaries: ascending; those outside (hit, prompt) are ignored
  int64_t hit = 0;                      // PrefixHit::tokens
  int64_t parting = 0;                  // PrefixHit::parting
  int64_t answers = 1;                  // of this prompt; more than one: all but the first begin from the cache
  int64_t stride = 4096;
};

// A state this much nearer to the end than another one is not worth a cut and a slot.
inline constexpr int64_t kLeastGain = 32;
// After how many tokens the prompt's state is to be kept, ascending, each in (hit, prompt): chunks of the prompt end
// there. Of the hints the first and the last count: more cuts would cost more than they bring. Replaces what `out`
// held. Models without recurrent layers need no boundaries.
void boundaries_for(const BoundaryInputs& inputs, std::vector<Boundary>& out);

// ---- what is known of a kept state; times are counts of the cache's operations

// Whether a conversation goes on from its answers' ends, as far as its turns so far tell.
enum class Habit : uint8_t { kUnknown, kFromEnds, kPastEnds };

struct StateRecord {
  BoundaryKind kind = BoundaryKind::kStride;
  Habit habit = Habit::kUnknown;
  int64_t made = 0;
  int64_t used = 0;     // made, or hit: the longest state of a request
  int64_t touched = 0;  // the same, or one below it was
  int64_t hits = 0;
  int64_t passes = 0;  // times it was left behind since it was made or hit
};

enum class StateClass : uint8_t { kDead, kPast, kSpare, kLive };

// What a prompt of `length` tokens shows whose longest state this is, when `matched` tokens of it are cached.
// `goes_on`: what is cached goes on from there; `through_end`: an answer ends among the tokens between the state and
// there.
Habit habit_shown(const StateRecord& state, int64_t length, int64_t matched, bool goes_on, bool through_end);

// What surrounds a state in the tree.
struct StatePlace {
  const StateRecord* before = nullptr;  // of the nearest state before it on its path
  int64_t distance = 0;                 // tokens from there, or from the beginning
  int64_t position = 0;                 // tokens from the beginning
  bool has_below = false;               // there are states below it
};

StateClass classify(const StateRecord& state, const StatePlace& place);
// The lowest goes first. No two states of a cache have the same.
using StateRank = std::tuple<StateClass, int64_t, int64_t, int64_t>;
StateRank rank(const StateRecord& state, const StatePlace& place);

// The record of a new state; `before` is the nearest state before it, which it may leave behind.
StateRecord make_record(BoundaryKind kind, int64_t now, StateRecord* before);
// A request's longest state was this one; `shown` is the habit that the request's prompt shows.
void record_hit(StateRecord& state, int64_t now, Habit shown);
// A request's longest state was one below this one.
void record_pass(StateRecord& state, int64_t now);

}  // namespace fourfold::engine
