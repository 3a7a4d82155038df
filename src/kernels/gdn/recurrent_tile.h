// Shape and shared memory of the recurrent kernel (recurrent.cuh). Read by host and device, includes nothing of CUDA.
#pragma once

#include "kernels/gdn/updates.h"

namespace fourfold::gdn {

struct RecurrentTile {
  int key_dim;
  int value_dim;
  int rows;      // of a sequence at most
  int warps;     // each has a panel of the state in registers
  int ctas;      // per SM
  bool float32;  // the rows' elements; otherwise bf16
  int split;     // CTAs that share a head, a cluster where there are several: each has the state's columns / split
  bool updates;  // reads updates of states, and leaves such where that is asked for

  FOURFOLD_MIXER_FN int threads() const { return warps * 32; }
  FOURFOLD_MIXER_FN int channels() const { return 2 * key_dim + value_dim; }
  FOURFOLD_MIXER_FN int element() const { return float32 ? 4 : 2; }
  FOURFOLD_MIXER_FN int columns() const { return value_dim / split; }  // of a CTA
  FOURFOLD_MIXER_FN int panels() const { return columns() / kPanel; }
  FOURFOLD_MIXER_FN int passes() const { return (panels() + warps - 1) / warps; }
  FOURFOLD_MIXER_FN int key_blocks() const { return (key_dim + 31) / 32; }
  FOURFOLD_MIXER_FN int value_blocks() const { return (columns() + 31) / 32; }
  FOURFOLD_MIXER_FN bool legal() const {
    return key_dim % 16 == 0 && value_dim % 16 == 0 && key_dim >= 16 && value_dim >= 16 && key_dim <= kMostDim &&
           value_dim <= kMostDim && rows >= 1 && rows <= kRecurrentRows && warps >= 1 && warps <= 32 &&
           (split == 1 || (split <= 8 && value_dim % (32 * split) == 0 && key_dim % (8 * split) == 0)) &&
           (!updates || panels() % update_group(value_dim) == 0);
  }
};

struct RecurrentMap {
  unsigned inputs;        // [3 + rows][channels], elements: history, then the rows
  unsigned weights;       // [channels][4], fp32: of the convolution
  unsigned keys;          // [rows][key_dim] {k, q}, fp32, not normalised
  unsigned values;        // [rows][value_dim], fp32
  unsigned outputs;       // [rows][value_dim], fp32
  unsigned sums;          // [rows][key_blocks] {q . q, k . k, q . k, 0}
  unsigned gates;         // [rows] {decay, beta}
  unsigned norm;          // [value_dim], fp32: weights
  unsigned factors;       // [rows][value_dim], fp32: of the normalised outputs
  unsigned update_keys;   // with updates: [kMostUpdates][key_dim], fp32
  unsigned update_steps;  // [kMostUpdates][panels][kUpdateSteps], fp32
  unsigned total;
};

FOURFOLD_MIXER_FN RecurrentMap recurrent_map(const RecurrentTile& t) {
  RecurrentMap m{};
  unsigned at = 0;
  const auto take = [&at](int bytes) {
    const unsigned here = at;
    at += (static_cast<unsigned>(bytes) + 15u) / 16u * 16u;
    return here;
  };
  m.inputs = take((kHistory + t.rows) * t.channels() * t.element());
  m.weights = take(t.channels() * kTaps * 4);
  m.keys = take(t.rows * t.key_dim * 8);
  m.values = take(t.rows * t.value_dim * 4);
  m.outputs = take(t.rows * t.value_dim * 4);
  m.sums = take(t.rows * t.key_blocks() * 16);
  m.gates = take(t.rows * 8);
  m.norm = take(t.value_dim * 4);
  m.factors = take(t.rows * t.value_dim * 4);
  m.update_keys = take(t.updates ? kMostUpdates * t.key_dim * 4 : 0);
  m.update_steps = take(t.updates ? kMostUpdates * t.panels() * kUpdateSteps * 4 : 0);
  m.total = at;
  return m;
}

template <int KeyDim, int ValueDim, int Rows, int Warps, int Ctas, bool Float32, int Split = 1, bool Updates = false>
struct RecurrentTileOf {
  static constexpr RecurrentTile value{KeyDim, ValueDim, Rows, Warps, Ctas, Float32, Split, Updates};
  static_assert(value.legal());
};

struct RecurrentLaunch {
  unsigned grid_x, grid_y;
  unsigned threads;
  unsigned shared_bytes;
};
// `sequences`: of the bucket.
FOURFOLD_MIXER_FN RecurrentLaunch recurrent_launch(const RecurrentTile& t, const DeltaShape& shape, int sequences) {
  return {static_cast<unsigned>(shape.value_heads * t.split), static_cast<unsigned>(sequences),
          static_cast<unsigned>(t.threads()), recurrent_map(t).total};
}

}  // namespace fourfold::gdn
