// The delta rule for 1 to 16 rows of each sequence (decode, verification of drafts), as one node between the input
// projection and the output projection: convolution, SiLU, L2 norm of q and k, gates, recurrence, gated RMS norm.
//
// A CTA has one value head of one sequence. Each warp keeps a panel of the state in registers: read once, written once
// for each row that is kept. Columns do not depend on each other, so warps meet only before (convolution) and after
// (norm of the head). What the rows before left, parameters and slots are asked for before the wait for the projection,
// the former two to shared memory: a thread then has few enough registers to begin beside a CTA of the projection.
#pragma once

#include "kernels/gdn/panel.cuh"

namespace fourfold::gdn {

// A CTA's work. Of a split tile: a CTA of a cluster that shares a head, see delta_recurrent_split.
template <typename Tile>
__device__ __forceinline__ void recurrent_head(const DeltaArgs& args) {
  static constexpr RecurrentTile T = Tile::value;
  static constexpr RecurrentMap kMap = recurrent_map(T);
  constexpr bool kF = T.float32;
  constexpr bool kAlone = T.rows == 1;
  constexpr int kVector = 16 / T.element();  // elements of 16 bytes
  constexpr int kKeys = T.key_dim / 16;      // of a lane
  constexpr int kVectors = T.channels() / kVector;
  constexpr int kBlocks = T.key_blocks() + T.value_blocks();
  constexpr int kMine = (kBlocks + T.warps - 1) / T.warps;  // of a warp in one row
  FOURFOLD_DYNAMIC_SHARED(smem);
  const int tid = static_cast<int>(threadIdx.x);
  const int warp = tid / 32;
  const int lane = tid % 32;
  const int head = static_cast<int>(blockIdx.x) / T.split;
  const int part = static_cast<int>(blockIdx.x) % T.split;
  const int place = static_cast<int>(blockIdx.y);
  const DeltaShape& shape = args.shape;

  if (args.settled == 0) ptx::grid_dependency_wait();
  SequenceRows sequence = args.sequences[place];  // of the bucket, live or not: all of it is asked for at once
  // Lane i has the slot of row i; of one row every lane.
  const int* slots = args.state_out + static_cast<long long>(place) * args.state_out_stride;
  const int kept = kAlone ? slots[0] : lane < T.rows && lane < args.state_out_stride ? slots[lane] : -1;
  const auto slot_of = [&](int row) { return __shfl_sync(0xffffffffu, kept, row); };
  StateUpdates updates = {};
  if constexpr (T.updates) updates = args.updates[place];
  if (place >= *args.live) sequence.count = 0;
  const int count = kAlone || sequence.count > T.rows ? T.rows : sequence.count;
  if (sequence.first < 0 || sequence.count <= 0) {
    ptx::grid_dependency_wait();  // who waits for this kernel's end relies on the one before it
    return;
  }
  const bool fresh = sequence.position == 0;
  if constexpr (T.split > 1) ptx::cluster_arrive();  // the others of the cluster are there

  float4 state[kKeys];
  const int state_at = head * (T.key_dim * T.value_dim) + part * (T.panels() * T.key_dim * kPanel) + lane * 4;
  const int base = T.updates && updates.count > 0 ? updates.base : sequence.state_in;
  const auto load_state = [&](int panel) {
    const float4* from = reinterpret_cast<const float4*>(args.states + base * args.state_stride + state_at +
                                                         panel * (T.key_dim * kPanel));
#pragma unroll
    for (int j = 0; j < kKeys; ++j) {
      state[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (!fresh && panel < T.panels()) state[j] = from[j * 32];
    }
  };
  load_state(warp);

  // Column of channel c of this head in a row.
  const int key_head = head / shape.ratio();
  const auto column_of = [&](int c) {
    return c < 2 * T.key_dim ? key_head * T.key_dim + (c < T.key_dim ? c : c + (shape.key_heads - 1) * T.key_dim)
                             : shape.v_column(head) + c - 2 * T.key_dim;
  };
  uint4* inputs = reinterpret_cast<uint4*>(smem + kMap.inputs);  // [3 + rows][kVectors]
  const float4* weights = reinterpret_cast<const float4*>(smem + kMap.weights);
  const int history_at = head * shape.history_head();
  const uint4* history =
      static_cast<const uint4*>(element_at<kF>(args.history, sequence.state_in * args.history_stride + history_at));
  const auto copy16 = [](const void* to, const void* from) { ptx::async_copy16(ptx::shared_address(to), from); };
  each<T.threads(), kHistory * kVectors>(tid, [&](int i) {
    if (fresh) {
      inputs[i] = make_uint4(0, 0, 0, 0);
    } else {
      copy16(inputs + i, history + i);
    }
  });
  each<T.threads(), T.channels()>(tid, [&](int c) { copy16(weights + c, args.conv + column_of(c) * kTaps); });
  each<T.threads(), T.value_dim>(
      tid, [&](int c) { ptx::async_copy4(ptx::shared_address(smem + kMap.norm + c * 4), args.norm + c); });
  // All that is read of the slot of updates, before anything is written to it.
  float* update_keys = reinterpret_cast<float*>(smem + kMap.update_keys);
  float* update_steps = reinterpret_cast<float*>(smem + kMap.update_steps);
  if constexpr (T.updates) {
    constexpr int kKeyPieces = T.key_dim / 4, kStepPieces = kUpdateSteps / 4;
    const float* from = args.states + updates.from * args.state_stride + state_at - lane * 4;
#pragma unroll 1
    for (int i = tid; i < updates.count * kKeyPieces; i += T.threads()) {
      copy16(update_keys + i * 4, from + i / kKeyPieces * update_floats(T.key_dim) + i % kKeyPieces * 4);
    }
#pragma unroll 1
    for (int i = tid; i < updates.count * (T.panels() * kStepPieces); i += T.threads()) {
      const int panel = i / kStepPieces % T.panels();
      copy16(update_steps + i * 4, from + panel * (T.key_dim * kPanel) +
                                       i / (T.panels() * kStepPieces) * update_floats(T.key_dim) + T.key_dim +
                                       i % kStepPieces * 4);
    }
  }
  const float a_log = args.a_log[head];
  const float dt_bias = args.dt_bias[head];

  // Of the CTA's blocks of channels: all of q and k, its own of v.
  const auto block_of = [&](int block) { return block < T.key_blocks() ? block : block + part * T.value_blocks(); };
  // Where this thread's part of a row begins: worked out before the wait, behind which it would be on the way.
  const void* first_row = element_at<kF>(args.rows, static_cast<long long>(sequence.first) * args.row_stride);
  u32 alone_at[kMine];
  if constexpr (kAlone) {
#pragma unroll
    for (int m = 0; m < kMine; ++m) {
      alone_at[m] = ptx::keep_register(
          static_cast<u32>(BlockChannels<Tile>(shape, head, key_head, block_of(warp + m * T.warps), lane).in[0]));
    }
  }
  const u32 z_at = ptx::keep_register(static_cast<u32>(shape.z_column(head)));
  const u32 b_at = ptx::keep_register(static_cast<u32>(shape.b_column(head)));

  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();

  // ---- rows: one alone goes to the lanes that convolve it, of several each is needed by four
  u32 row_alone[kMine][2];
  if constexpr (kAlone) {
#pragma unroll
    for (int m = 0; m < kMine; ++m) {
      const BlockChannels<Tile> channels(shape, head, key_head, block_of(warp + m * T.warps), lane);
      const u32 at = alone_at[m];
      row_alone[m][0] = channels.has(0) ? element_bits<kF>(first_row, at) : 0;
      row_alone[m][1] = channels.has(1) ? element_bits<kF>(first_row, at + shape.key_heads * T.key_dim) : 0;
    }
  } else {
#pragma unroll 1
    for (int i = tid; i < count * kVectors; i += T.threads()) {
      const int row = i / kVectors;
      const int column = column_of(i % kVectors * kVector);
      copy16(inputs + kHistory * kVectors + i, element_at<kF>(first_row, row * args.row_stride + column));
    }
  }
  // Warps that have nothing to convolve, if there are any, have the first rows' norms. CTAs of a cluster have a row in
  // turns, with the outputs of all of them.
  const int own_row = (T.warps - 1 - warp) * T.split + part;
  typename HeadNorm<Tile>::Gates z = {};
  if (own_row < count) z.load(first_row, (kAlone ? 0 : own_row * args.row_stride) + z_at, lane);
  const bool has_gates = warp == (T.warps > 1 ? T.warps - 2 : 0) && lane < count;
  float a = 0.0f;
  float b = 0.0f;
  if (has_gates) {
    const long long at = (kAlone ? 0 : lane * args.row_stride) + b_at;
    b = element<kF>(first_row, at);
    a = element<kF>(first_row, at + shape.value_heads);
  }
  ptx::async_copy_commit();
  ptx::async_copy_wait<0>();
  __syncthreads();

  // ---- convolution
  float2* keys = reinterpret_cast<float2*>(smem + kMap.keys);
  float* values = reinterpret_cast<float*>(smem + kMap.values);
  float4* sums = reinterpret_cast<float4*>(smem + kMap.sums);
  float2* gates = reinterpret_cast<float2*>(smem + kMap.gates);
  // Inputs and weights of a block in a row; `present`: the last of the inputs, or null.
  const auto convolve_row = [&](int row, int block, const u32* present) {
    const BlockChannels<Tile> channels(shape, head, key_head, block, lane);
    Taps taps;
    BlockWeights w;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool has = channels.has(i);
      w.w[i] = has ? weights[channels.of[i]] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
      for (int t = 0; t < kTaps; ++t) {
        taps.x[i][t] = present != nullptr && t == kHistory ? present[i]
                       : has ? element_bits<kF>(inputs, (row + t) * T.channels() + channels.of[i])
                             : 0;
      }
    }
    convolve_block(channels, w, taps, block, lane,
                   {keys + row * T.key_dim, values + row * T.value_dim, sums + row * T.key_blocks()});
    if (present == nullptr) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (channels.has(i)) store_bits<kF>(inputs, kHistory * T.channels() + channels.of[i], present[i]);
    }
  };
  if constexpr (kAlone) {
#pragma unroll
    for (int m = 0; m < kMine; ++m) {
      const int block = warp + m * T.warps;
      if (block < kBlocks) convolve_row(0, block_of(block), row_alone[m]);
    }
  } else {
#pragma unroll 1
    for (int item = warp; item < count * kBlocks; item += T.warps) {
      convolve_row(item / kBlocks, block_of(item % kBlocks), nullptr);
    }
  }
  // f(row) for the rows whose norm this warp has; the lanes that store a row's factors load them.
  const auto own_rows = [&](const auto& f) {
#pragma unroll
    for (int begin = 0; begin < T.rows; begin += T.warps * T.split) {
      if (begin + own_row < count) f(begin + own_row);
    }
  };
  float* factors = reinterpret_cast<float*>(smem + kMap.factors);
  own_rows([&](int row) {
    if (row != own_row) z.load(first_row, row * args.row_stride + z_at, lane);
    HeadNorm<Tile>::store_factors(z, reinterpret_cast<const float*>(smem + kMap.norm), factors + row * T.value_dim,
                                  lane);
  });
  if (has_gates) gates[lane] = gates_of(a, b, a_log, dt_bias);
  __syncthreads();

  // ---- recurrence, each warp its panels
  float* outputs = reinterpret_cast<float*>(smem + kMap.outputs);
  if constexpr (T.split > 1) ptx::cluster_wait();
#pragma unroll 1
  for (int pass = 0; pass < T.passes(); ++pass) {
    const int panel = pass * T.warps + warp;
    if (panel >= T.panels()) break;
    if (pass > 0) load_state(panel);
    if constexpr (T.updates) {
#pragma unroll 1
      for (int i = 0; i < updates.count; ++i) {
        add_update(state, update_keys + i * T.key_dim, update_steps + (i * T.panels() + panel) * kUpdateSteps, lane);
      }
    }
#pragma unroll 1
    for (int row = 0; row < count; ++row) {
      const bool put_off = T.updates && row > 0 && updates.put_off != 0;
      const int slot = slot_of(put_off ? 1 : row);
      float4* to =
          reinterpret_cast<float4*>(args.states + slot * args.state_stride + state_at + panel * (T.key_dim * kPanel));
      float* update =
          reinterpret_cast<float*>(to) - lane * 4 + (put_off ? row - 1 : 0) * update_floats(T.key_dim) + T.key_dim;
      const int at = row * T.value_dim + part * T.columns() + panel * kPanel;
      const auto put = [&](int column, float output, float step) {
        if constexpr (T.split > 1) {
          ptx::cluster_store(ptx::shared_address(outputs + at + column), static_cast<u32>(row % T.split), output);
        } else {
          outputs[at + column] = output;
        }
        if constexpr (T.updates) {
          if (put_off) update[column] = step;
        }
      };
      advance_panel<Tile>(state, keys + row * T.key_dim, values + at, sums + row * T.key_blocks(), gates[row], lane,
                          put, slot >= 0 && !put_off, to);
      if constexpr (T.updates) {
        if (put_off && lane == 0) update[kPanel] = gates[row].x;
        if (put_off && panel % update_group(T.value_dim) == 0) {
#pragma unroll 1
          for (int i = lane; i < T.key_dim; i += 32) update[i - T.key_dim] = keys[row * T.key_dim + i].x;
        }
      }
    }
  }
  if constexpr (T.split > 1) {
    // Outputs are where they belong, and what the convolution left has been read by all before it changes.
    ptx::cluster_arrive();
    ptx::cluster_wait();
  }
  // The convolution's last inputs after each row that is kept: of q and k a share, of v what this CTA convolved.
  constexpr int kPairVectors = 2 * T.key_dim / kVector;
  const auto writer_of = [](int vector) {
    return vector < kPairVectors ? vector / (kPairVectors / T.split)
                                 : (vector - kPairVectors) / (T.columns() / kVector);
  };
#pragma unroll 1
  for (int row = 0; row < count; ++row) {
    const int slot = slot_of(row);
    if (slot < 0) continue;
    uint4* to =
        static_cast<uint4*>(const_cast<void*>(element_at<kF>(args.history, slot * args.history_stride + history_at)));
    each<T.threads(), kHistory * kVectors>(tid, [&](int i) {
      if (T.split == 1 || writer_of(i % kVectors) == part) to[i] = inputs[(row + 1) * kVectors + i];
    });
  }
  if constexpr (T.split == 1) __syncthreads();

  // ---- norm of the head, gate
  own_rows([&](int row) {
    HeadNorm<Tile>::store(outputs + row * T.value_dim, factors + row * T.value_dim, args.norm_eps,
                          args.out + (sequence.first + row) * args.out_stride + head * T.value_dim, lane);
  });
}

// `Tile` is a RecurrentTileOf<...>. Grid: value heads x sequences of the bucket.
template <typename Tile>
__global__ void __launch_bounds__(Tile::value.threads(), Tile::value.ctas)
    delta_recurrent(const __grid_constant__ DeltaArgs args) {
  static_assert(Tile::value.split == 1);
  recurrent_head<Tile>(args);
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// The same with the columns of a head's state over the CTAs of a cluster, where there are fewer heads than SMs: an SM
// takes long to write 64 KB. Grid: value heads x split, x sequences.
template <typename Tile>
__global__ void __cluster_dims__(Tile::value.split, 1, 1) __launch_bounds__(Tile::value.threads(), Tile::value.ctas)
    delta_recurrent_split(const __grid_constant__ DeltaArgs args) {
  recurrent_head<Tile>(args);
}
#endif

}  // namespace fourfold::gdn
