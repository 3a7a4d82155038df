// Moving lanes on, and carrying them into the tables of what follows (lanes_args.h), with the copies of these tables:
// all that lies between two graphs of a round, as one kernel. Nothing starts before it has ended, because mixers read
// their tables without a wait.
#pragma once

#include "kernels/step/lanes_args.h"
#include "kernels/step/tables.cuh"

namespace fourfold::step {

// A lane to be moved on, and its stop tokens.
struct Moving {
  MoveLane lane;
  Stops stops;
};
__device__ __forceinline__ Moving moving_of(const MoveArgs& args, int at) {
  const MoveLane lane = args.lanes[at];
  return {lane, stops_of(args.stops + lane.stop_first, lane.stop_count)};
}

__device__ __forceinline__ void move_lane(const MoveArgs& args, const Moving& moving) {
  const MoveLane& lane = moving.lane;
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
#pragma unroll
  for (int i = 0; i < kMostChosen; ++i) {
    tokens[i] = i < lane.count ? args.chosen[lane.choice + i] : -1;
    drafted[i] = i + 1 < lane.count ? args.row_tokens[lane.first + i + 1] : -1;
  }
  int kept = 0, last = 0;
  bool ended = false, more = true;
#pragma unroll
  for (int i = 0; i < kMostChosen; ++i) {
    if (!more) continue;
    ended = tokens[i] < 0 || moving.stops.have(tokens[i]);
    if (tokens[i] >= 0) {
      last = tokens[i];
      ++kept;
    }
    // The row after it counts if its token was this one.
    more = !ended && i + 1 < lane.count && drafted[i] == tokens[i];
  }
  if (lane.counted != 0) {
    int* counts = args.counts + lane.lane * args.counts_stride;
#pragma unroll
    for (int i = 0; i < kMostChosen; ++i) {
      if (i < kept) counts[tokens[i]] = counted_once_more(counts[tokens[i]]);
    }
  }
  const int end = kept > 0 ? kept - 1 : 0;  // the row of the last one
  state.position = prompt ? lane.position : start + kept;
  const int* slots = args.slots + (prompt ? 0 : lane.place * args.slot_stride);
  state.state = prompt ? lane.state : slots[end];
  state.updates = {};
  if (!prompt && lane.put_off != 0 && end > 0) state.updates = {slots[0], slots[1], end, 0};
  state.token = last;
  state.row = lane.first + end;
  state.start = start;
  state.kept = kept;
  state.ended = ended ? 1 : 0;
  state.gone = 0;
}

__device__ __forceinline__ int token_of(int token) { return token < 0 ? 0 : token; }  // where there is none any will do

// What an entry takes that no move and no copy changes.
struct Carried {
  CarryLane lane;
  int from[kMostChosen];  // kGoesOn: drafts behind the first row; kFed: chosen tokens; kDrafts: [0] a draft
};
__device__ __forceinline__ Carried carried_of(const CarryLanesArgs& args, const CarryLane& carry) {
  Carried carried;
  carried.lane = carry;
#pragma unroll
  for (int i = 0; i < kMostChosen; ++i) {
    carried.from[i] = 0;
    if (carry.as == Carry::kGoesOn && i > 0 && i < carry.count) carried.from[i] = args.drafts[i - 1][carry.drafter];
    if (carry.as == Carry::kFed && i < carry.count) carried.from[i] = args.chosen[carry.choice + i];
  }
  if (carry.as == Carry::kDrafts && carry.pass > 0) carried.from[0] = args.drafts[carry.pass - 1][carry.drafter];
  return carried;
}

__device__ __forceinline__ void carry_lane(const CarryLanesArgs& args, const Carried& carried) {
  const CarryLane& carry = carried.lane;
  const LaneState lane = args.states[carry.lane];
  switch (carry.as) {
    case Carry::kGoesOn: {
      SequenceRows& sequence = args.sequences[carry.place];
      if (lane.ended != 0) {
        sequence.count = 0;
        return;
      }
      sequence.position = lane.position;
      sequence.state_in = lane.state;
      StateUpdates& updates = args.updates[carry.place];
      updates.base = lane.updates.base;
      updates.from = lane.updates.from;
      updates.count = lane.updates.count;
      args.tokens[carry.row] = lane.token;
#pragma unroll
      for (int i = 1; i < kMostChosen; ++i) {
        if (i < carry.count) args.tokens[carry.row + i] = token_of(carried.from[i]);
      }
      return;
    }
    case Carry::kFed:
#pragma unroll
      for (int i = 0; i < kMostChosen; ++i) {
        if (i < carry.count) args.tokens[carry.row + i] = token_of(carried.from[i]);
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
      args.tokens[carry.row] = carry.pass == 0 ? lane.token : token_of(carried.from[0]);
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

__global__ void __launch_bounds__(kTablesThreads) step_lanes(const __grid_constant__ LanesArgs args) {
  const int thread = static_cast<int>(threadIdx.x);
  const FirstPieces pieces = first_pieces(args.tables, thread);
  Moving moving = {};
  if (thread < args.move.count) moving = moving_of(args.move, thread);
  CarryLane carry = {};
  if (thread < args.carry.count) carry = args.carry.lanes[thread];
  ptx::grid_dependency_wait();
  Carried first = {};
  if (thread < args.carry.count) first = carried_of(args.carry, carry);
  for (int i = thread; i < args.move.count; i += kTablesThreads) {
    move_lane(args.move, i == thread ? moving : moving_of(args.move, i));
  }
  __syncthreads();  // lanes are where they are, and what they were moved on by may be written over
  copy_pieces(args.tables, pieces, thread);
  __syncthreads();
  for (int i = thread; i < args.carry.count; i += kTablesThreads) {
    carry_lane(args.carry, i == thread ? first : carried_of(args.carry, args.carry.lanes[i]));
  }
}

}  // namespace fourfold::step
