// The sequences of a step as the kernels of the mixers see them, in device memory. A step's graph is captured once for
// a bucket of sequences; which of them are there, where their rows are and where they stand is read on the device. A
// table has an entry for every place of the bucket, live or not.
// Read by host and device, includes nothing of CUDA.
#pragma once

// Functions of host and device.
#ifdef __CUDACC__
#define FOURFOLD_MIXER_FN __host__ __device__ constexpr
#else
#define FOURFOLD_MIXER_FN constexpr
#endif

namespace fourfold {

struct SequenceRows {
  int first;     // row of its first token; -1: nobody, a place of the bucket that is not used
  int count;     // tokens on consecutive rows and at consecutive positions
  int position;  // of the first token; at 0 the recurrent state is zero whatever the slot holds
  int state_in;  // slot the recurrent state is read from
};
static_assert(sizeof(SequenceRows) == 16);

// Where the state before a sequence's rows is, and how its own ones are kept (gdn/updates.h).
struct StateUpdates {
  int base;     // the slot of a state, to which the first `count` updates in slot `from` are to be added
  int from;     //
  int count;    // 0: the state is in SequenceRows::state_in
  int put_off;  // 1: only the first row's state is stored, and updates of those behind it in the second row's slot
};
static_assert(sizeof(StateUpdates) == 16);

}  // namespace fourfold
