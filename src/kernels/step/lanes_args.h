// Lanes that the device moves on itself: where each stands between steps, and what the tables of the next one take from
// that. Arguments of lanes.cuh. Host and device, freestanding.
#pragma once

#include "kernels/sequences.h"
#include "kernels/step/rows_args.h"
#include "kernels/step/sample_args.h"

namespace fourfold::step {

inline constexpr int kMostPasses = 5;                // of drafting in a step
inline constexpr int kMostChosen = 1 + kMostPasses;  // tokens for a lane in a step

// Since its last move.
struct LaneState {
  int position;          // of its last token: what comes before it is in the caches
  int state;             // the slot of the recurrent state there
  int token;             // its last
  int row;               // the last accepted one, of the rows that it had
  int start;             // the position of the first of them
  int kept;              // tokens that were accepted of those chosen
  int ended;             // 1: with a stop token, for want of a token, or before
  int gone;              // 1: before those rows: they were computed for nobody
  StateUpdates updates;  // of the state, without put_off
};

// A lane whose tokens were chosen: `count` of them from `choice` on, for its rows from `first` on, which stood at
// `place` of the sequences. place -1: a prompt, which is at `position` then, its state in slot `state`.
struct MoveLane {
  int lane;
  int place;
  int first, count;
  int choice;
  int position, state;
  int stop_first, stop_count;  // of MoveArgs::stops
  int counted;                 // 1: MoveArgs::counts has its tokens
  int put_off;                 // 1: its rows' states were put off
};
struct MoveArgs {
  const MoveLane* lanes;
  int count;
  const int* stops;
  const int* chosen;              // SampleArgs::tokens
  const int* row_tokens;          // what stood on the rows
  const SequenceRows* sequences;  // of the step
  const int* slots;               // [place][slot_stride]: where the state after each row of a place is
  int slot_stride;
  LaneState* states;
  int* counts;  // [lane][counts_stride], as SampleArgs has them
  long long counts_stride;
};

// What a table takes from a lane.
enum class Carry : int {
  kGoesOn,  // the sequence at `place`: token, position, state, updates; drafts of `drafter` on the rows behind it
  kFed,     // rows: chosen tokens from `choice` on; the sequence at `place`, if there is one, stands where it did
  kDrafts,  // the sequence at `place`, one row: the lane's token, or the draft of the pass before
  kEnd,     // CarryLanesArgs::ends[row]: the lane's last accepted row
  kSample,  // CarryLanesArgs::samples[row]: as many output tokens more before it as the lane kept drafts
};
struct CarryLane {
  Carry as;
  int lane;
  int place;
  int row, count;  // of the step
  int choice;
  int drafter;  // its row in the drafting passes
  int pass;
};
struct CarryLanesArgs {
  const CarryLane* lanes;
  int count;
  const LaneState* states;
  const int* chosen;               // of the last move
  const int* drafts[kMostPasses];  // chosen in each pass since then
  int* tokens;
  SequenceRows* sequences;
  StateUpdates* updates;  // of each place
  int* ends;
  SampleRow* samples;
};

// One after the other, by one CTA of kTablesThreads: lanes move on, tables are copied (without tokens to be carried),
// and take what they take from lanes. Counts may be 0.
struct LanesArgs {
  MoveArgs move;
  TablesArgs tables;
  CarryLanesArgs carry;
};

}  // namespace fourfold::step
