// What is done to a row of a head where a sequence has few: convolution, sums, the recurrence in a panel, the norm.
// Sums and products are spelt out (fmaf), so that every tile gives the same bits.
//
// A block is 32 channels: of q and of k, which one lane takes together, or of v. A panel is 8 columns of the state, in
// one warp's registers: lane 2 r + h holds columns 4 h .. 4 h + 3 of the keys r, r + 16, r + 32, ...
#pragma once

#include "kernels/gdn/math.cuh"
#include "kernels/gdn/recurrent_tile.h"
#include "kernels/ptx/sm90.cuh"

namespace fourfold::gdn {

// f(i) for every i < Count that is the thread's.
template <int Threads, int Count, typename F>
__device__ __forceinline__ void each(int tid, const F& f) {
#pragma unroll
  for (int begin = 0; begin < Count; begin += Threads) {
    if (begin + Threads <= Count || begin + tid < Count) f(begin + tid);
  }
}

// The inputs of the convolution in a lane's channels as bits, oldest first: of q and k, or of v and nothing. Numbers
// are made of them where they are convolved: what is on its way is not waited for before.
struct Taps {
  u32 x[2][kTaps];
};
struct BlockWeights {
  float4 w[2];
};

// A lane's channels in a block of a head: `of` in the history's order (q | k | v), `in` a row's.
template <typename Tile>
struct BlockChannels {
  static constexpr RecurrentTile T = Tile::value;
  bool pair;   // q and k
  bool there;  // the last block of a head may have fewer than 32
  int of[2];
  int in[2];
  // `key_head`: of value head `head`.
  __device__ __forceinline__ BlockChannels(const DeltaShape& shape, int head, int key_head, int block, int lane) {
    pair = block < T.key_blocks();
    const int c = (pair ? block : block - T.key_blocks()) * 32 + lane;
    there = c < (pair ? T.key_dim : T.value_dim);
    of[0] = pair ? c : 2 * T.key_dim + c;
    of[1] = T.key_dim + c;
    in[0] = (pair ? key_head * T.key_dim : shape.v_column(head)) + c;
    in[1] = in[0] + shape.key_heads * T.key_dim;
  }
  // Whether there is a channel i: of q or v, of k.
  __device__ __forceinline__ bool has(int i) const { return there && (i == 0 || pair); }
};

template <bool Float32>
__device__ __forceinline__ float convolve(const float4& w, const u32 (&x)[kTaps]) {
  const float before =
      fmaf(w.z, number_of<Float32>(x[2]), fmaf(w.y, number_of<Float32>(x[1]), w.x * number_of<Float32>(x[0])));
  return silu(fmaf(w.w, number_of<Float32>(x[3]), before));
}

// A row of a head in shared memory: what the recurrence takes.
struct RowPlace {
  float2* keys;   // [key_dim] {k, q}, not normalised
  float* values;  // [value_dim]
  float4* sums;   // [key_blocks] {q . q, k . k, q . k} of a block's channels
};

template <typename Tile>
__device__ __forceinline__ void convolve_block(const BlockChannels<Tile>& channels, const BlockWeights& weights,
                                               const Taps& taps, int block, int lane, const RowPlace& to) {
  constexpr RecurrentTile T = Tile::value;
  // Both in one go, where there is a second one or not: without it weights and inputs are zero.
  const float y = convolve<T.float32>(weights.w[0], taps.x[0]);
  const float k = convolve<T.float32>(weights.w[1], taps.x[1]);
  if (!channels.pair) {
    if (channels.there) to.values[channels.of[0] - 2 * T.key_dim] = y;
    return;
  }
  if (channels.there) to.keys[channels.of[0]] = make_float2(k, y);
  float4 sums = make_float4(y * y, k * k, y * k, 0.0f);
#pragma unroll
  for (int d = 16; d > 0; d /= 2) {
    sums.x += __shfl_xor_sync(0xffffffffu, sums.x, d);
    sums.y += __shfl_xor_sync(0xffffffffu, sums.y, d);
    sums.z += __shfl_xor_sync(0xffffffffu, sums.z, d);
  }
  if (lane == 0) to.sums[block] = sums;
}

// The factors of a row, which all columns of the head share.
struct RowFactors {
  float decay, beta;
  float norm_q, norm_k;
  float dot;  // q . k, not normalised
};
template <typename Tile>
__device__ __forceinline__ RowFactors row_factors(const float4* sums, const float2& gate) {
  constexpr RecurrentTile T = Tile::value;
  float square_q = 1e-6f;
  float square_k = 1e-6f;
  float dot = 0.0f;
#pragma unroll
  for (int i = 0; i < T.key_blocks(); ++i) {
    const float4 s = sums[i];
    square_q += s.x;
    square_k += s.y;
    dot += s.z;
  }
  return {gate.x, gate.y, rsqrtf(square_q) * rsqrtf(static_cast<float>(T.key_dim)), rsqrtf(square_k), dot};
}

// The sums over the 16 lanes of equal parity, of four columns' m and p: each lane gets those of one column,
// lane_column.
__device__ __forceinline__ int lane_column(int lane) {
  return lane % 2 * 4 + ((lane & 16) != 0 ? 2 : 0) + ((lane & 8) != 0 ? 1 : 0);
}
__device__ __forceinline__ void sum_columns(const float (&m)[4], const float (&p)[4], int lane, float* sum_m,
                                            float* sum_p) {
  constexpr u32 kAll = 0xffffffffu;
  const bool high = (lane & 16) != 0;
  float m0 = high ? m[2] : m[0];
  float m1 = high ? m[3] : m[1];
  float p0 = high ? p[2] : p[0];
  float p1 = high ? p[3] : p[1];
  m0 += __shfl_xor_sync(kAll, high ? m[0] : m[2], 16);
  m1 += __shfl_xor_sync(kAll, high ? m[1] : m[3], 16);
  p0 += __shfl_xor_sync(kAll, high ? p[0] : p[2], 16);
  p1 += __shfl_xor_sync(kAll, high ? p[1] : p[3], 16);
  const bool odd = (lane & 8) != 0;
  float x = (odd ? m1 : m0) + __shfl_xor_sync(kAll, odd ? m0 : m1, 8);
  float y = (odd ? p1 : p0) + __shfl_xor_sync(kAll, odd ? p0 : p1, 8);
#pragma unroll
  for (int d = 4; d >= 2; d /= 2) {
    x += __shfl_xor_sync(kAll, x, d);
    y += __shfl_xor_sync(kAll, y, d);
  }
  *sum_m = x;
  *sum_p = y;
}

// A warp's panel of the state moves on by a row, and is stored at `to` if it is kept. The state is multiplied
// with k and q at once: with S' = g S + k d, d = beta (v - g S^T k), the output S'^T q is g S^T q + (k . q) d.
// `keys`, `sums`, `gate`: of the row; `values`: of the panel's columns, whose outputs put(column, output, step) takes.
template <typename Tile, int Keys, typename Put>
__device__ __forceinline__ void advance_panel(float4 (&state)[Keys], const float2* keys, const float* values,
                                              const float4* sums, const float2& gate, int lane, const Put& put,
                                              bool kept, float4* to) {
  constexpr u32 kAll = 0xffffffffu;
  const int column = lane_column(lane);
  const float value = values[column];
  const float2* kq = keys + lane / 2;
  float m[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  float p[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
  for (int j = 0; j < Keys; ++j) {
    const float2 y = kq[j * 16];
    m[0] = fmaf(y.x, state[j].x, m[0]);
    m[1] = fmaf(y.x, state[j].y, m[1]);
    m[2] = fmaf(y.x, state[j].z, m[2]);
    m[3] = fmaf(y.x, state[j].w, m[3]);
    p[0] = fmaf(y.y, state[j].x, p[0]);
    p[1] = fmaf(y.y, state[j].y, p[1]);
    p[2] = fmaf(y.y, state[j].z, p[2]);
    p[3] = fmaf(y.y, state[j].w, p[3]);
  }
  const RowFactors f = row_factors<Tile>(sums, gate);
  float sum_m, sum_p;
  sum_columns(m, p, lane, &sum_m, &sum_p);
  const float step = f.norm_k * (f.beta * fmaf(-f.decay * f.norm_k, sum_m, value));
  const int from = lane & 7;  // this lane's own parity and low bits: all that differ in them hold the same
  const float d0 = __shfl_sync(kAll, step, from);
  const float d1 = __shfl_sync(kAll, step, from | 8);
  const float d2 = __shfl_sync(kAll, step, from | 16);
  const float d3 = __shfl_sync(kAll, step, from | 24);
  if ((lane & 6) == 0) put(column, f.norm_q * fmaf(f.decay, sum_p, f.dot * step), step);
  const auto update = [&](int j) {
    const float k = kq[j * 16].x;
    state[j].x = fmaf(f.decay, state[j].x, k * d0);
    state[j].y = fmaf(f.decay, state[j].y, k * d1);
    state[j].z = fmaf(f.decay, state[j].z, k * d2);
    state[j].w = fmaf(f.decay, state[j].w, k * d3);
  };
  if (kept) {  // one branch: where no row follows, a state that is not kept is not worked out
#pragma unroll
    for (int j = 0; j < Keys; ++j) {
      update(j);
      to[j * 32] = state[j];
    }
  } else {
#pragma unroll
    for (int j = 0; j < Keys; ++j) update(j);
  }
}

// An update (updates.h) is added to a warp's panel of the state, as advance_panel does. `keys`: [key_dim]; `steps`: of
// the panel's columns, and the decay behind them.
template <int Keys>
__device__ __forceinline__ void add_update(float4 (&state)[Keys], const float* keys, const float* steps, int lane) {
  const float4 d = *reinterpret_cast<const float4*>(steps + lane % 2 * 4);
  const float decay = steps[kPanel];
#pragma unroll
  for (int j = 0; j < Keys; ++j) {
    const float k = keys[lane / 2 + j * 16];
    state[j].x = fmaf(decay, state[j].x, k * d.x);
    state[j].y = fmaf(decay, state[j].y, k * d.y);
    state[j].z = fmaf(decay, state[j].z, k * d.z);
    state[j].w = fmaf(decay, state[j].w, k * d.w);
  }
}

// Of a row's head in one warp: norm over its columns, weights, gate. A lane takes columns 2 lane, 2 lane + 1 and those
// 64 behind them, and so on.
template <typename Tile>
struct HeadNorm {
  static constexpr RecurrentTile T = Tile::value;
  static constexpr int kPairs = (T.value_dim + 63) / 64;
  static constexpr int kWords = T.float32 ? 2 : 1;  // of a pair of elements

  static __device__ __forceinline__ int column(int i, int lane) { return i * 64 + lane * 2; }
  // The gates of a row as they are there; `at`: of the head's first z among the rows' elements.
  struct Gates {
    u32 words[kPairs][kWords];
    __device__ __forceinline__ void load(const void* rows, long long at, int lane) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        if (column(i, lane) >= T.value_dim) continue;
        const u32* from = static_cast<const u32*>(element_at<T.float32>(rows, at + column(i, lane)));
#pragma unroll
        for (int w = 0; w < kWords; ++w) words[i][w] = from[w];
      }
    }
    __device__ __forceinline__ float2 pair(int i) const {
      if constexpr (T.float32) {
        return make_float2(__uint_as_float(words[i][0]), __uint_as_float(words[i][1]));
      } else {
        return make_float2(__uint_as_float(words[i][0] << 16), __uint_as_float(words[i][0] & 0xffff0000u));
      }
    }
  };
  // What the normalised outputs are multiplied with, to `factors`; the lanes that store them load them.
  static __device__ __forceinline__ void store_factors(const Gates& gates, const float* weights, float* factors,
                                                       int lane) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int c = column(i, lane);
      if (c >= T.value_dim) continue;
      const float2 z = gates.pair(i);
      factors[c] = weights[c] * silu(z.x);
      factors[c + 1] = weights[c + 1] * silu(z.y);
    }
  }
  static __device__ __forceinline__ void store(const float* outputs, const float* factors, float eps, u16* to,
                                               int lane) {
    float2 o[kPairs];
    float square = 0.0f;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int c = column(i, lane);
      o[i] = make_float2(0.0f, 0.0f);
      if (c < T.value_dim) o[i] = make_float2(outputs[c], outputs[c + 1]);
      square += fmaf(o[i].x, o[i].x, o[i].y * o[i].y);
    }
    square = warp_sum(square);
    const float factor = rsqrtf(fmaf(square, 1.0f / static_cast<float>(T.value_dim), eps));
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int c = column(i, lane);
      if (c >= T.value_dim) continue;
      *reinterpret_cast<u32*>(to + c) = ptx::to_bf16x2(o[i].x * factor * factors[c], o[i].y * factor * factors[c + 1]);
    }
  }
};

// Decay and beta of a head in a row.
__device__ __forceinline__ float2 gates_of(float a, float b, float a_log, float dt_bias) {
  return make_float2(expf(log_decay(a, a_log, dt_bias)), sigmoid(b));
}

}  // namespace fourfold::gdn
