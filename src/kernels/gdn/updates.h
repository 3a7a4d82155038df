// Updates of the recurrent state. A row turns the state S of a head into decay S + k d^T, with its key k and a step d
// for each column (panel.cuh). Where a sequence's drafts are verified, one of its rows' states will be gone on from,
// and nobody knows which: with updates only the first row's is stored, and of each row behind it what the state changes
// by, a sixtieth of it. Who goes on from there adds them, with the same operations, and so has the same bits.
//
// They lie in the state's place in the slot of the sequence's second row. Update i of a panel begins at float
// i (key_dim + 12) of its place: the key's key_dim values, not normalised, in the first panel of a group only; the
// steps of the panel's eight columns; the decay, and three that are not used. A panel is one warp's, which reads what
// was there before it writes; a group is never split over CTAs. Read by host and device, includes nothing of CUDA.
#pragma once

#include "kernels/gdn/tables.h"

namespace fourfold::gdn {

inline constexpr int kMostUpdates = 5;   // of a sequence
inline constexpr int kUpdateSteps = 12;  // steps of the columns of a panel, decay, three that are not used

FOURFOLD_MIXER_FN int update_floats(int key_dim) { return key_dim + kUpdateSteps; }
// That a panel has room for.
FOURFOLD_MIXER_FN int most_updates(int key_dim) {
  const int room = kPanel * key_dim / update_floats(key_dim);
  return room < kMostUpdates ? room : kMostUpdates;
}
// Panels that share a key: all tiles' CTAs have multiples of that many.
FOURFOLD_MIXER_FN int update_group(int value_dim) { return value_dim % (4 * kPanel) == 0 ? 4 : 2; }

// The states of slots that hold updates are written to them, of all layers.
inline constexpr int kMostMadeStates = 32;  // in a launch
struct MadeState {
  int slot;
  int base, from, count;  // as StateUpdates has them; `slot` may be `from`
};
struct MakeStatesArgs {
  float* states;  // of slot 0 in the first layer
  long long state_stride;
  long long layer_stride;
  MadeState made[kMostMadeStates];
};
struct MakeStatesLaunch {
  unsigned grid_x, grid_y, grid_z;
  unsigned threads;
};
FOURFOLD_MIXER_FN MakeStatesLaunch make_states_launch(const DeltaShape& shape, int layers, int slots) {
  const int group = update_group(shape.value_dim);
  return {static_cast<unsigned>(shape.value_heads * (shape.value_dim / kPanel / group)), static_cast<unsigned>(layers),
          static_cast<unsigned>(slots), static_cast<unsigned>(32 * group)};
}

}  // namespace fourfold::gdn
