// Arguments of the kernels that fill what is left between products and mixers (rows.cuh). Host and device,
// freestanding.
#pragma once

namespace fourfold::step {

inline constexpr int kRowsThreads = 256;

// One CTA of kRowsThreads a row; strides in elements.

// out = x, rounded.
struct RoundArgs {
  const float* x;
  long long x_stride;
  unsigned short* out;
  long long out_stride;
  int columns;
};

// x += delta.
struct AddArgs {
  float* x;
  long long x_stride;
  const unsigned short* delta;
  long long delta_stride;
  int columns;
};

// out = silu(gate) x up, x: [gate | up].
struct GateArgs {
  const unsigned short* x;
  long long x_stride;
  unsigned short* out;
  long long out_stride;
  int columns;  // of out
};

// out += sigmoid(logit) x x; logits null: out += x.
struct SharedArgs {
  const unsigned short* x;
  long long x_stride;
  const float* logits;  // one a row
  long long logits_stride;
  unsigned short* out;
  long long out_stride;
  int columns;
};

}  // namespace fourfold::step
