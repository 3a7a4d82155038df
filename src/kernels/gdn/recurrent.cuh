// The delta rule for 1 to 16 rows of each sequence (decode, verification of drafts), as one node between the input
// projection and the output projection: convolution, SiLU, L2 norm of q and k, gates, recurrence, gated RMS norm.
//
// A CTA has one value head of one sequence. Each warp keeps a panel of the state (key_dim x 8 columns, fp32) in
// registers: read once, written once for each row that is kept. Columns do not depend on each other, so warps meet only
// before (convolution) and after (norm of the head). Lane 2 r + h holds columns 4 h .. 4 h + 3 of the keys r, r + 16,
// r + 32, ...
//
// State, history and parameters are asked for before the wait for the projection. The state is multiplied with k and q
// at once: with S' = g S + k d, d = beta (v - g S^T k), the output S'^T q is g S^T q + (k . q) d.
#pragma once

#include "kernels/gdn/math.cuh"
#include "kernels/gdn/recurrent_tile.h"
#include "kernels/ptx/sm90.cuh"

namespace fourfold::gdn {

namespace recurrent_detail {

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

}  // namespace recurrent_detail

// `Tile` is a RecurrentTileOf<...>. Grid: value heads x sequences of the bucket.
template <typename Tile>
__global__ void __launch_bounds__(Tile::value.threads(), Tile::value.ctas)
    delta_recurrent(const __grid_constant__ DeltaArgs args) {
  using namespace recurrent_detail;
  static constexpr RecurrentTile T = Tile::value;
  static constexpr RecurrentMap kMap = recurrent_map(T);
  constexpr bool kF = T.float32;
  constexpr int kVector = 16 / T.element();  // elements of 16 bytes
  constexpr int kKeys = T.key_dim / 16;      // of a lane
  constexpr int kVectors = T.channels() / kVector;
  constexpr int kValueVectors = T.value_dim / kVector;
  constexpr u32 kAll = 0xffffffffu;
  FOURFOLD_DYNAMIC_SHARED(smem);
  const int tid = static_cast<int>(threadIdx.x);
  const int warp = tid / 32;
  const int lane = tid % 32;
  const int head = static_cast<int>(blockIdx.x);
  const int place = static_cast<int>(blockIdx.y);
  const DeltaShape& shape = args.shape;

  if (args.settled == 0) ptx::grid_dependency_wait();
  SequenceRows sequence = args.sequences[place];  // of the bucket, live or not: both are asked for at once
  if (place >= *args.live) sequence.count = 0;
  const int count = sequence.count < T.rows ? sequence.count : T.rows;
  if (sequence.first < 0 || count <= 0) {
    ptx::grid_dependency_wait();  // who waits for this kernel's end relies on the one before it
    return;
  }
  const bool fresh = sequence.position == 0;
  const int* slots = args.state_out + static_cast<long long>(place) * args.state_out_stride;

  float4 state[kKeys];
  const long long state_at = static_cast<long long>(head) * (T.key_dim * T.value_dim) + lane * 4;
  const auto load_state = [&](int panel) {
    const float4* from = reinterpret_cast<const float4*>(args.states + sequence.state_in * args.state_stride +
                                                         state_at + panel * (T.key_dim * kPanel));
#pragma unroll
    for (int j = 0; j < kKeys; ++j) {
      state[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (!fresh && panel < T.panels()) state[j] = from[j * 32];
    }
  };
  load_state(warp);

  uint4* inputs = reinterpret_cast<uint4*>(smem + kMap.inputs);  // [3 + rows][kVectors]
  const uint4* history = reinterpret_cast<const uint4*>(element_at<kF>(
      args.history, sequence.state_in * args.history_stride + static_cast<long long>(head) * shape.history_head()));
  for (int i = tid; i < kHistory * kVectors; i += T.threads()) {
    inputs[i] = fresh ? make_uint4(0, 0, 0, 0) : history[i];
  }
  // Channel c of this head in a row.
  const auto column_of = [&](int c) {
    return c < T.key_dim       ? shape.q_column(head) + c
           : c < 2 * T.key_dim ? shape.k_column(head) + c - T.key_dim
                               : shape.v_column(head) + c - 2 * T.key_dim;
  };
  // A block is 32 channels of q, of k, or of v.
  constexpr int kBlocks = 2 * T.key_blocks() + T.value_blocks();
  const auto channel_of = [&](int block) {
    return block < T.key_blocks()       ? block * 32 + lane
           : block < 2 * T.key_blocks() ? T.key_dim + (block - T.key_blocks()) * 32 + lane
                                        : 2 * T.key_dim + (block - 2 * T.key_blocks()) * 32 + lane;
  };
  const auto end_of = [&](int block) {
    return block < T.key_blocks() ? T.key_dim : block < 2 * T.key_blocks() ? 2 * T.key_dim : T.channels();
  };
  const auto weights_of = [&](int block) {
    const int c = channel_of(block);
    return c < end_of(block) ? reinterpret_cast<const float4*>(args.conv)[column_of(c)]
                             : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  };
  float4 first_weights = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  if (warp < kBlocks) first_weights = weights_of(warp);
  const float a_log = args.a_log[head];
  const float dt_bias = args.dt_bias[head];

  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();

  // ---- rows into shared memory
  const long long first_at = static_cast<long long>(sequence.first) * args.row_stride;
  uint4* gates_z = reinterpret_cast<uint4*>(smem + kMap.z);
  for (int i = tid; i < count * (kVectors + kValueVectors); i += T.threads()) {
    const int row = i / (kVectors + kValueVectors);
    const int v = i % (kVectors + kValueVectors);
    const int column = v < kVectors ? column_of(v * kVector) : shape.z_column(head) + (v - kVectors) * kVector;
    const uint4 x =
        *reinterpret_cast<const uint4*>(element_at<kF>(args.rows, first_at + row * args.row_stride + column));
    if (v < kVectors) {
      inputs[(kHistory + row) * kVectors + v] = x;
    } else {
      gates_z[row * kValueVectors + v - kVectors] = x;
    }
  }
  float2* gates = reinterpret_cast<float2*>(smem + kMap.gates);
  if (warp == T.warps - 1 && lane < count) {
    const long long row = first_at + lane * args.row_stride;
    const float b = element<kF>(args.rows, row + shape.b_column(head));
    const float a = element<kF>(args.rows, row + shape.a_column(head));
    gates[lane] = make_float2(expf(log_decay(a, a_log, dt_bias)), sigmoid(b));
  }
  __syncthreads();

  // ---- convolution
  float2* keys = reinterpret_cast<float2*>(smem + kMap.keys);
  float* values = reinterpret_cast<float*>(smem + kMap.values);
  float* squares = reinterpret_cast<float*>(smem + kMap.squares);
  for (int item = warp; item < count * kBlocks; item += T.warps) {
    const int row = item / kBlocks;
    const int block = item % kBlocks;
    const int c = channel_of(block);
    const bool there = c < end_of(block);
    float y = 0.0f;
    if (there) {
      const float4 w = item == warp && item < kBlocks ? first_weights : weights_of(block);
      const void* x = smem + kMap.inputs;
      const int at = row * T.channels() + c;
      y = w.x * element<kF>(x, at) + w.y * element<kF>(x, at + T.channels()) +
          w.z * element<kF>(x, at + 2 * T.channels()) + w.w * element<kF>(x, at + 3 * T.channels());
      y = silu(y);
    }
    if (block < 2 * T.key_blocks()) {
      const bool is_key = block >= T.key_blocks();
      if (there) {
        float* to = reinterpret_cast<float*>(keys + row * T.key_dim + (is_key ? c - T.key_dim : c));
        to[is_key ? 0 : 1] = y;
      }
      const float sum = warp_sum(y * y);
      if (lane == 0) {
        squares[(row * 2 + (is_key ? 1 : 0)) * T.key_blocks() + (is_key ? block - T.key_blocks() : block)] = sum;
      }
    } else if (there) {
      values[row * T.value_dim + c - 2 * T.key_dim] = y;
    }
  }
  // The convolution's last inputs after each row that is kept.
  for (int row = 0; row < count; ++row) {
    const int slot = slots[row];
    if (slot < 0) continue;
    uint4* to = reinterpret_cast<uint4*>(const_cast<void*>(element_at<kF>(
        args.history, slot * args.history_stride + static_cast<long long>(head) * shape.history_head())));
    for (int i = tid; i < kHistory * kVectors; i += T.threads()) to[i] = inputs[(row + 1) * kVectors + i];
  }
  __syncthreads();

  // ---- recurrence, each warp its panels
  const int r = lane / 2;
  const int column = lane_column(lane);
  const float q_scale = rsqrtf(static_cast<float>(T.key_dim));
  float* outputs = reinterpret_cast<float*>(smem + kMap.outputs);
#pragma unroll 1
  for (int pass = 0; pass < T.passes(); ++pass) {
    const int panel = pass * T.warps + warp;
    if (panel >= T.panels()) break;
    if (pass > 0) load_state(panel);
#pragma unroll 1
    for (int row = 0; row < count; ++row) {
      float square_q = 1e-6f;
      float square_k = 1e-6f;
#pragma unroll
      for (int i = 0; i < T.key_blocks(); ++i) {
        square_q += squares[row * 2 * T.key_blocks() + i];
        square_k += squares[(row * 2 + 1) * T.key_blocks() + i];
      }
      const float norm_k = rsqrtf(square_k);
      const float norm_q = rsqrtf(square_q) * q_scale;
      const float2 gate = gates[row];  // decay, beta
      const float value = values[row * T.value_dim + panel * kPanel + column];
      const float2* kq = keys + row * T.key_dim + r;
      float m[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      float p[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      float dot = 0.0f;
#pragma unroll
      for (int j = 0; j < kKeys; ++j) {
        const float2 y = kq[j * 16];
        m[0] += y.x * state[j].x;
        m[1] += y.x * state[j].y;
        m[2] += y.x * state[j].z;
        m[3] += y.x * state[j].w;
        p[0] += y.y * state[j].x;
        p[1] += y.y * state[j].y;
        p[2] += y.y * state[j].z;
        p[3] += y.y * state[j].w;
        dot += y.x * y.y;
      }
      float sum_m, sum_p;
      sum_columns(m, p, lane, &sum_m, &sum_p);
#pragma unroll
      for (int d = 16; d >= 2; d /= 2) dot += __shfl_xor_sync(kAll, dot, d);
      const float change = gate.y * (value - gate.x * norm_k * sum_m);
      const float step = norm_k * change;
      if ((lane & 6) == 0) {
        outputs[row * T.value_dim + panel * kPanel + column] = norm_q * (gate.x * sum_p + dot * step);
      }
      const int from = lane & 7;  // this lane's own parity and low bits: all that differ in them hold the same
      const float d0 = __shfl_sync(kAll, step, from);
      const float d1 = __shfl_sync(kAll, step, from | 8);
      const float d2 = __shfl_sync(kAll, step, from | 16);
      const float d3 = __shfl_sync(kAll, step, from | 24);
      const int slot = slots[row];
      float4* to =
          reinterpret_cast<float4*>(args.states + slot * args.state_stride + state_at + panel * (T.key_dim * kPanel));
#pragma unroll
      for (int j = 0; j < kKeys; ++j) {
        const float k = kq[j * 16].x;
        state[j].x = gate.x * state[j].x + k * d0;
        state[j].y = gate.x * state[j].y + k * d1;
        state[j].z = gate.x * state[j].z + k * d2;
        state[j].w = gate.x * state[j].w + k * d3;
        if (slot >= 0) to[j * 32] = state[j];
      }
    }
  }
  __syncthreads();

  // ---- norm of the head, gate
  for (int row = warp; row < count; row += T.warps) {
    const float* o = outputs + row * T.value_dim;
    float square = 0.0f;
    for (int c = lane * 2; c < T.value_dim; c += 64) square += o[c] * o[c] + o[c + 1] * o[c + 1];
    square = warp_sum(square);
    const float factor = rsqrtf(square / static_cast<float>(T.value_dim) + args.norm_eps);
    u16* to = args.out + (sequence.first + row) * args.out_stride + head * T.value_dim;
    for (int c = lane * 2; c < T.value_dim; c += 64) {
      const float z0 = element<kF>(smem + kMap.z, row * T.value_dim + c);
      const float z1 = element<kF>(smem + kMap.z, row * T.value_dim + c + 1);
      *reinterpret_cast<u32*>(to + c) =
          ptx::to_bf16x2(o[c] * factor * args.norm[c] * silu(z0), o[c + 1] * factor * args.norm[c + 1] * silu(z1));
    }
  }
}

}  // namespace fourfold::gdn
