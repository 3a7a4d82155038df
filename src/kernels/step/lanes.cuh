// Moving lanes on, and carrying them into the tables of what follows (lanes_args.h). Both run alone: nothing starts
// before they have ended, because mixers read their tables without a wait. What they read lies in the host's memory for
// the most part, a microsecond away: all of it is asked for before anything depends on it.
#pragma once

#include "kernels/step/lanes_args.h"

namespace fourfold::step {

__global__ void __launch_bounds__(kLanesThreads) move_lanes(const __grid_constant__ MoveArgs args) {
  const int at = static_cast<int>(blockIdx.x) * kLanesThreads + static_cast<int>(threadIdx.x);
  if (at >= args.count) return;
  const MoveLane lane = args.lanes[at];
  LaneState& state = args.states[lane.lane];
  const bool prompt = lane.place < 0;
  int start = lane.position;
  if (!prompt) {
    const SequenceRows sequence = args.sequences[lane.place];
    start = sequence.position;
    if (sequence.count == 0) {
      state.row = lane.first;
      state.kept = 0;
      state.ended = state.gone = 1;
      return;
    }
  }
  int tokens[kMostChosen], drafted[kMostChosen];
  unsigned stops = 0;  // a bit for each token
#pragma unroll
  for (int i = 0; i < kMostChosen; ++i) {
    tokens[i] = i < lane.count ? args.chosen[lane.choice + i] : -1;
    drafted[i] = i + 1 < lane.count ? args.row_tokens[lane.first + i + 1] : -1;
  }
#pragma unroll 4
  for (int i = 0; i < lane.stop_count; ++i) {
    const int stop = args.stops[lane.stop_first + i];
#pragma unroll
    for (int k = 0; k < kMostChosen; ++k) stops |= (tokens[k] == stop ? 1u : 0u) << k;
  }
  int kept = 0, last = 0;
  bool ended = false, more = true;
#pragma unroll
  for (int i = 0; i < kMostChosen; ++i) {
    if (!more) continue;
    ended = tokens[i] < 0 || (stops >> i & 1u) != 0;
    if (tokens[i] >= 0) {
      last = tokens[i];
      ++kept;
    }
    // The row after it counts if its token was this one.
    more = !ended && i + 1 < lane.count && drafted[i] == tokens[i];
  }
  const int end = kept > 0 ? kept - 1 : 0;  // the row of the last one
  state.position = prompt ? lane.position : start + kept;
  state.state = prompt ? lane.state : args.slots[lane.place * args.slot_stride + end];
  state.token = last;
  state.row = lane.first + end;
  state.start = start;
  state.kept = kept;
  state.ended = ended ? 1 : 0;
  state.gone = 0;
}

__global__ void __launch_bounds__(kLanesThreads) carry_lanes(const __grid_constant__ CarryLanesArgs args) {
  const int at = static_cast<int>(blockIdx.x) * kLanesThreads + static_cast<int>(threadIdx.x);
  if (at >= args.count) return;
  const CarryLane carry = args.lanes[at];
  const LaneState lane = args.states[carry.lane];
  const auto token_of = [](int token) { return token < 0 ? 0 : token; };  // where there is none any will do
  int from[kMostChosen];  // kGoesOn: drafts behind the first row; kFed: chosen tokens
#pragma unroll
  for (int i = 0; i < kMostChosen; ++i) {
    from[i] = 0;
    if (carry.as == Carry::kGoesOn && i > 0 && i < carry.count) from[i] = args.drafts[i - 1][carry.drafter];
    if (carry.as == Carry::kFed && i < carry.count) from[i] = args.chosen[carry.choice + i];
  }
  switch (carry.as) {
    case Carry::kGoesOn: {
      SequenceRows& sequence = args.sequences[carry.place];
      if (lane.ended != 0) {
        sequence.count = 0;
        return;
      }
      sequence.position = lane.position;
      sequence.state_in = lane.state;
      args.tokens[carry.row] = lane.token;
#pragma unroll
      for (int i = 1; i < kMostChosen; ++i) {
        if (i < carry.count) args.tokens[carry.row + i] = token_of(from[i]);
      }
      return;
    }
    case Carry::kFed:
#pragma unroll
      for (int i = 0; i < kMostChosen; ++i) {
        if (i < carry.count) args.tokens[carry.row + i] = token_of(from[i]);
      }
      if (carry.place < 0) return;
      if (lane.gone != 0) {
        args.sequences[carry.place].count = 0;
      } else {
        args.sequences[carry.place].position = lane.start;
      }
      return;
    case Carry::kDrafts: {
      SequenceRows& sequence = args.sequences[carry.place];
      if (lane.ended != 0) {
        sequence.count = 0;
        return;
      }
      sequence.position = lane.position - 1 + carry.pass;
      args.tokens[carry.row] = carry.pass == 0 ? lane.token : token_of(args.drafts[carry.pass - 1][carry.drafter]);
      return;
    }
    case Carry::kEnd:
      args.ends[carry.row] = lane.row;
      return;
    case Carry::kSample:
      args.samples[carry.row].index += lane.kept - 1;
      return;
  }
}

}  // namespace fourfold::step
