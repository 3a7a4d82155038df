// The chunked delta rule on Hopper, second and third node; formulas, and why everything is transposed: chunk_scan.cuh.
//
// A CTA has 64 columns of a head: the rows of wgmma. Its first warpgroup carries the state, fp32 accumulators of 64
// columns and all keys: D and S of chunk after chunk, products of values split into two bf16 each. The second one has
// the outputs, from fragments of the state and of D rounded to bf16, which is what outputs are in the end. The third
// one has the convolution of V, a chunk ahead; of the fourth one warp brings operands. Nobody waits for all others:
//
//   what                      who fills it          who gives it back
//   updates: keys, T, gates   copy engine           first warpgroup, when S is there
//   outputs: queries, P       copy engine           second, when O is there
//   values                    third                 first, when X is there
//   states, changes           first                 second, as soon as they are in registers
//   outputs in memory         second                a warp of the fourth, which tells delta_gate
//
// The first warpgroup always has multiplications under way: those of 32 tokens while the other 32 are converted, those
// of 64 keys while the other 64 are.
#pragma once

#include "kernels/gdn/chunk_scan.cuh"
#include "kernels/ptx/wgmma_sm90.cuh"

namespace fourfold::gdn {

inline constexpr int kStateRegisters = 240;  // per thread of the first warpgroup
inline constexpr int kOtherRegisters = 112;  // of the second and the third
inline constexpr int kBringRegisters = 40;

namespace chunk_detail {

// Fragments of 16 columns of the left operand from eight accumulators of a lane, split; and rounded.
__device__ __forceinline__ void fragment_of(const float* x, u32 (&high)[4], u32 (&low)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const Split s = split(x[2 * i], x[2 * i + 1]);
    high[i] = s.high;
    low[i] = s.low;
  }
}
__device__ __forceinline__ void put_rounded(u8* to, int index, const u32 (&x)[4], int lane) {
  reinterpret_cast<uint4*>(to)[index * 32 + lane] = make_uint4(x[0], x[1], x[2], x[3]);
}
__device__ __forceinline__ void get_rounded(const u8* from, int index, u32 (&x)[4], int lane) {
  const uint4 words = reinterpret_cast<const uint4*>(from)[index * 32 + lane];
  x[0] = words.x;
  x[1] = words.y;
  x[2] = words.z;
  x[3] = words.w;
}

// Barriers of delta_scan_wgmma. Those of states and changes are used once a chunk: use n has parity n % 2.
struct ScanBarriers {
  u32 base;
  __device__ __forceinline__ u32 updates_there(int stage) const { return base + 8u * static_cast<u32>(stage); }
  __device__ __forceinline__ u32 updates_free(int stage) const { return updates_there(kUpdateStages + stage); }
  __device__ __forceinline__ u32 outputs_there(int stage) const { return updates_there(2 * kUpdateStages + stage); }
  __device__ __forceinline__ u32 outputs_free(int stage) const { return outputs_there(kOutputStages + stage); }
  __device__ __forceinline__ u32 values_there(int stage) const { return outputs_there(2 * kOutputStages + stage); }
  __device__ __forceinline__ u32 values_free(int stage) const { return values_there(2 + stage); }
  __device__ __forceinline__ u32 states_there() const { return values_there(4); }
  __device__ __forceinline__ u32 states_free() const { return values_there(5); }
  __device__ __forceinline__ u32 changes_there() const { return values_there(6); }
  __device__ __forceinline__ u32 changes_free() const { return values_there(7); }
  __device__ __forceinline__ u32 stored() const { return values_there(8); }
  __device__ __forceinline__ u32 announced() const { return values_there(9); }
};

// d += a b of 16 columns of a, which is the sum of two bf16; the first of them only writes d.
__device__ __forceinline__ void multiply_sum(float (&d)[16], const u32 (&high)[4], const u32 (&low)[4], u64 b,
                                             bool first) {
  if (first) {
    ptx::Wgmma<32>::set(d, high, b);
  } else {
    ptx::Wgmma<32>::add(d, high, b);
  }
  ptx::Wgmma<32>::add(d, low, b);
}

}  // namespace chunk_detail

// `Tile` is a ChunkTileOf<...>. Grid: (value heads x splits) x sequences.
template <typename Tile>
__global__ void __launch_bounds__(Tile::value.scan_threads(), 1)
    delta_scan_wgmma(const __grid_constant__ ChunkArgs args) {
  using namespace chunk_detail;
  static constexpr ChunkTile T = Tile::value;
  static constexpr ScanWgmmaMap kMap = scan_wgmma_map(T);
  static_assert(T.wgmma);
  constexpr int C = T.chunk;
  constexpr int kSteps = T.key_dim / 16;
  constexpr int kParts = T.key_dim / 64;  // of the state: 64 keys each
  constexpr int kTokenSteps = C / 16;
  // In descriptors: from a piece of 64 columns to the next and from T to its rest, and from 32 tokens to the next.
  constexpr u64 kPiece = C * 128 / 16;
  constexpr u64 kLater = 32 * 128 / 16;
  FOURFOLD_DYNAMIC_SHARED(smem);
  const u32 base = ptx::keep_register(ptx::shared_address(smem));
  const int tid = static_cast<int>(threadIdx.x);
  const int warp = tid / 32 % 4;  // of the warpgroup
  const int lane = tid % 32;
  const int g = lane / 4;
  const int l = lane % 4;
  const DeltaShape& shape = args.delta.shape;
  const int head = static_cast<int>(blockIdx.x) / T.splits();
  const int first_column = static_cast<int>(blockIdx.x) % T.splits() * T.columns;
  const int key_head = head / shape.ratio();
  const int place = static_cast<int>(blockIdx.y);

  if (args.delta.settled == 0) ptx::grid_dependency_wait();
  SequenceRows sequence = args.delta.sequences[place];
  if (place >= *args.delta.live) sequence.count = 0;
  if (sequence.first < 0 || sequence.count <= 0) {
    ptx::grid_dependency_wait();  // who waits for this kernel's end relies on the one before it
    return;
  }
  const long long first_chunk = args.first_chunk[place];
  const int chunks = (sequence.count + C - 1) / C;
  const bool fresh = sequence.position == 0;
  const int slot_out = args.delta.state_out[static_cast<long long>(place) * args.delta.state_out_stride];
  const ScanBarriers barriers{base + kMap.barriers};
  if (tid == 0) {
    for (int i = 0; i < kUpdateStages; ++i) {
      ptx::mbarrier_init(barriers.updates_there(i), 1);
      ptx::mbarrier_init(barriers.updates_free(i), 4);
    }
    for (int i = 0; i < kOutputStages; ++i) {
      ptx::mbarrier_init(barriers.outputs_there(i), 1);
      ptx::mbarrier_init(barriers.outputs_free(i), 4);
    }
    for (int i = 0; i < 9; ++i) ptx::mbarrier_init(barriers.values_there(i), 4);
    ptx::mbarrier_init(barriers.announced(), 1);
    ptx::fence_barrier_init();
  }
  __syncthreads();

  if (tid < 128) {
    // ---- D and S
    ptx::registers_increase<kStateRegisters>();
    // S^T: rows g and g + 8 of the warp's 16 columns, keys 8 n + 2 l, + 1.
    const long long state_at = static_cast<long long>(head) * (T.key_dim * T.value_dim) +
                               static_cast<long long>((first_column + warp * 16) / kPanel) * (T.key_dim * kPanel) +
                               2 * l * kPanel + g;
    const auto state_place = [&](int part, int i) {
      return state_at + i / 2 % 2 * (T.key_dim * kPanel) + (64 * part + 8 * (i / 4) + i % 2) * kPanel;
    };
    float state[kParts][32];
    const float* from = args.delta.states + sequence.state_in * args.delta.state_stride;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int i = 0; i < 32; ++i) state[part][i] = fresh ? 0.0f : from[state_place(part, i)];
      ptx::keep_registers(state[part]);  // so that no select is left for the loop
    }

    u8* states = smem + kMap.states + warp * (kSteps * 512);
    u8* changes = smem + kMap.changes + warp * (kTokenSteps * 512);
    const int own_value = value_place(warp, lane);
    u32 high[kSteps][4], low[kSteps][4];                          // of S^T
    u32 x_high[kTokenSteps][4], x_low[kTokenSteps][4];            // of X^T
    u32 change_high[kTokenSteps][4], change_low[kTokenSteps][4];  // of D^T
    // 64 keys of S^T as fragments. Multiplications that add to the state are never under way from one turn of the loop
    // to the next: ptxas then has each of them waited for.
    const auto convert = [&](int part) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int k = 4 * part + i;
        fragment_of(state[part] + 8 * i, high[k], low[k]);
      }
    };
    const auto hand_over = [&](int part) {
#pragma unroll
      for (int i = 0; i < 4; ++i) put_rounded(states, 4 * part + i, high[4 * part + i], lane);
    };
    convert(0);
    hand_over(0);
    int stage = 0;
    u32 phase = 0;
#pragma unroll 1
    for (int n = 0; n < chunks; ++n) {
      const u32 parity = static_cast<u32>(n) & 1u;
      const u32 own = base + kMap.updates + static_cast<u32>(stage) * kMap.update_stride;
      const u64 keys = ptx::swizzled_descriptor(own);
      const u64 keys_transposed = ptx::transposed_descriptor(own, C * 128);
      const u64 inverse = ptx::swizzled_descriptor(own + static_cast<u32>(T.key_bytes()));
      const float* gates =
          reinterpret_cast<const float*>(smem + kMap.update_gates + static_cast<u32>(stage) * T.gate_bytes()) + 2 * l;
      const float4* values = reinterpret_cast<const float4*>(smem + kMap.values + parity * kMap.values_stride) +
                             warp * (C / 8 * 32) + own_value;

      // K S0: the first 32 tokens, 64 keys after the other; then the other tokens.
      float x[2][16];
      ptx::mbarrier_wait(barriers.updates_there(stage), phase);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        if (part > 0) convert(part);
        if (part > 0) hand_over(part);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int k = 4 * part + i;
          const u64 b = keys + static_cast<u64>(part) * kPiece + static_cast<u64>(2 * i);
          multiply_sum(x[0], high[k], low[k], b, k == 0);
        }
        ptx::wgmma_commit();
      }
      ptx::wgmma_fence();
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        const u64 b = keys + kLater + static_cast<u64>(k / 4) * kPiece + static_cast<u64>(2 * (k % 4));
        multiply_sum(x[1], high[k], low[k], b, k == 0);
      }
      ptx::wgmma_commit();
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(barriers.states_there());

      // X = V - diag(e^c) K S0 of 32 tokens, as fragments. What it takes of shared memory is in registers before the
      // multiplications are waited for.
      struct Inputs {
        float2 decay[4];
        float4 v[4];
      };
      const auto inputs_of = [&](int half) {
        Inputs in;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int token = 32 * half + 8 * i;
          in.decay[i] = *reinterpret_cast<const float2*>(gates + token);
          in.v[i] = values[(4 * half + i) * 32];
        }
        return in;
      };
      const auto solve = [&](int half, const Inputs& in) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float* y = x[half] + 4 * i;
          y[0] = in.v[i].x - in.decay[i].x * y[0];
          y[1] = in.v[i].y - in.decay[i].y * y[1];
          y[2] = in.v[i].z - in.decay[i].x * y[2];
          y[3] = in.v[i].w - in.decay[i].y * y[3];
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) fragment_of(x[half] + 8 * i, x_high[2 * half + i], x_low[2 * half + i]);
      };
      // D = T X of 32 tokens: what 32 tokens of X are multiplied with. T is zero above its diagonal.
      float d[2][16];
      const auto multiply = [&](int to, int half) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int k = 2 * half + i;
          const u64 b = inverse + static_cast<u64>(to) * kLater + static_cast<u64>(2 * k);
          multiply_sum(d[to], x_high[k], x_low[k], b, k == 0);
          ptx::Wgmma<32>::add(d[to], x_high[k], b + kPiece);
        }
      };
      ptx::mbarrier_wait(barriers.values_there(static_cast<int>(parity)), static_cast<u32>(n / 2) & 1u);
      const Inputs first = inputs_of(0);
      ptx::wgmma_wait<1>();
      ptx::keep_registers(x[0]);
      solve(0, first);
      ptx::wgmma_fence();
      multiply(0, 0);
      ptx::wgmma_commit();
      ptx::wgmma_fence();
      multiply(1, 0);
      ptx::wgmma_commit();
      const Inputs second = inputs_of(1);
      ptx::wgmma_wait<2>();
      ptx::keep_registers(x[1]);
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(barriers.values_free(static_cast<int>(parity)));
      solve(1, second);
      ptx::wgmma_fence();
      multiply(1, 1);
      ptx::wgmma_commit();

      // S = e^(c_last) S0 + (diag(e^(c_last - c)) K)^T D, 32 tokens after the other; at the end 64 keys after the
      // other.
      const float last = gates[C - 1 - 2 * l];
#pragma unroll
      for (int part = 0; part < kParts; ++part)
#pragma unroll
        for (int i = 0; i < 32; ++i) state[part][i] *= last;
      struct Left {
        float2 at[2][2];
      };
      const auto left_of = [&](int half) {
        Left left;
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            left.at[i][j] = *reinterpret_cast<const float2*>(gates + C + 32 * half + 16 * i + 8 * j);
          }
        return left;
      };
      const auto change = [&](int half, const Left& left) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int k = 2 * half + i;
          float* y = d[half] + 8 * i;
          const u32 rounded[4] = {ptx::to_bf16x2(y[0], y[1]), ptx::to_bf16x2(y[2], y[3]), ptx::to_bf16x2(y[4], y[5]),
                                  ptx::to_bf16x2(y[6], y[7])};
          put_rounded(changes, k, rounded, lane);
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            y[4 * j] *= left.at[i][j].x;
            y[4 * j + 1] *= left.at[i][j].y;
            y[4 * j + 2] *= left.at[i][j].x;
            y[4 * j + 3] *= left.at[i][j].y;
          }
          fragment_of(y, change_high[k], change_low[k]);
        }
      };
      const auto update = [&](int part, int half) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int k = 2 * half + i;
          const u64 b = keys_transposed + static_cast<u64>(part) * kPiece + static_cast<u64>(k * (16 * 128 / 16));
          ptx::WgmmaTransposed<64>::add(state[part], change_high[k], b);
          ptx::WgmmaTransposed<64>::add(state[part], change_low[k], b);
        }
      };
      ptx::mbarrier_wait(barriers.changes_free(), parity ^ 1u);
      const Left left_first = left_of(0), left_second = left_of(1);
      ptx::wgmma_wait<2>();
      ptx::keep_registers(d[0]);
      change(0, left_first);
      ptx::wgmma_fence();
#pragma unroll
      for (int part = 0; part < kParts; ++part) update(part, 0);
      ptx::wgmma_commit();
      ptx::wgmma_wait<1>();
      ptx::keep_registers(d[1]);
      change(1, left_second);
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(barriers.changes_there());
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        ptx::wgmma_fence();
        update(part, 1);
        ptx::wgmma_commit();
      }
      ptx::wgmma_wait<kParts - 1>();
      ptx::keep_registers(state[0]);
      convert(0);
      ptx::mbarrier_wait(barriers.states_free(), parity);  // of this chunk; and no conversion sinks below the next wait
      hand_over(0);
      ptx::wgmma_wait<0>();
#pragma unroll
      for (int part = 1; part < kParts; ++part) ptx::keep_registers(state[part]);
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(barriers.updates_free(stage));
      if (++stage == kUpdateStages) {
        stage = 0;
        phase ^= 1u;
      }
    }
    if (slot_out < 0) return;
    float* to = args.delta.states + slot_out * args.delta.state_stride;
#pragma unroll
    for (int part = 0; part < kParts; ++part)
#pragma unroll
      for (int i = 0; i < 32; ++i) to[state_place(part, i)] = state[part][i];
    return;
  }

  if (tid >= 384) {
    // ---- operands, by one lane of a warp that has nothing else to do: a lane that waits for room goes on apart from
    // the others of its warp. (A fourth warpgroup whole: registers are taken from what the CTA has at its start.)
    ptx::registers_decrease<kBringRegisters>();
    if (tid >= 416) {
      // ---- flags for gate, by a warp of its own: a fence takes half a microsecond
      if (warp != 3 || args.flags == nullptr) return;
      int* flag = reinterpret_cast<int*>(args.space + args.at.stored) + first_chunk * shape.value_heads + head;
#pragma unroll 1
      for (int n = 0; n < chunks; ++n) {
        if (lane == 0) ptx::mbarrier_wait(barriers.stored(), static_cast<u32>(n) & 1u);
        ptx::raise_flag(flag + static_cast<long long>(n) * shape.value_heads, 1, lane);
        if (lane == 0) ptx::mbarrier_arrive(barriers.announced());
      }
      return;
    }
    if (args.flags == nullptr) ptx::grid_dependency_wait();
    const u64 policy = ptx::policy_evict_first();
    const auto bring_updates = [&](int n) {
      const int stage = n % kUpdateStages;
      const u32 there = barriers.updates_there(stage);
      const u32 to = base + kMap.updates + static_cast<u32>(stage) * kMap.update_stride;
      const long long head_place = (first_chunk + n) * shape.value_heads + head;
      ptx::mbarrier_wait(barriers.updates_free(stage), (static_cast<u32>(n / kUpdateStages) & 1u) ^ 1u);
      ptx::mbarrier_arrive_expect(there, static_cast<u32>(T.key_bytes() + T.square_bytes() + T.gate_bytes()));
      ptx::bulk_copy(to, args.space + args.at.keys + ((first_chunk + n) * shape.key_heads + key_head) * T.key_bytes(),
                     static_cast<u32>(T.key_bytes()), there, policy);
      ptx::bulk_copy(to + static_cast<u32>(T.key_bytes()), args.space + args.at.inverse + head_place * T.square_bytes(),
                     static_cast<u32>(T.square_bytes()), there, policy);
      ptx::bulk_copy(base + kMap.update_gates + static_cast<u32>(stage * T.gate_bytes()),
                     args.space + args.at.gates + head_place * T.gate_bytes(), static_cast<u32>(T.gate_bytes()), there,
                     policy);
    };
    const auto bring_outputs = [&](int n) {
      const int stage = n % kOutputStages;
      const u32 there = barriers.outputs_there(stage);
      const u32 to = base + kMap.outputs + static_cast<u32>(stage) * kMap.output_stride;
      const long long head_place = (first_chunk + n) * shape.value_heads + head;
      ptx::mbarrier_wait(barriers.outputs_free(stage), (static_cast<u32>(n / kOutputStages) & 1u) ^ 1u);
      ptx::mbarrier_arrive_expect(there, static_cast<u32>(T.key_bytes() + T.score_bytes() + T.gate_bytes() / 2));
      ptx::bulk_copy(to,
                     args.space + args.at.queries + ((first_chunk + n) * shape.key_heads + key_head) * T.key_bytes(),
                     static_cast<u32>(T.key_bytes()), there, policy);
      ptx::bulk_copy(to + static_cast<u32>(T.key_bytes()), args.space + args.at.scores + head_place * T.score_bytes(),
                     static_cast<u32>(T.score_bytes()), there, policy);
      ptx::bulk_copy(base + kMap.output_gates + static_cast<u32>(stage * (T.gate_bytes() / 2)),
                     args.space + args.at.gates + head_place * T.gate_bytes(), static_cast<u32>(T.gate_bytes() / 2),
                     there, policy);
    };
    int ready = 0;
#pragma unroll 1
    for (int n = 0; n < chunks; n = ready) {
      if (args.flags == nullptr) {
        ready = chunks;
      } else {
        // What there is of up to 32 chunks. Nobody else looks at these flags, so they go down here.
        const int most = chunks - n < 32 ? chunks - n : 32;
        int* flag =
            args.flags + (first_chunk + n + (lane < most ? lane : 0)) * (shape.value_heads * T.splits()) + blockIdx.x;
        const int up = ptx::wait_flags(flag, most, 1, lane);
        if (lane < up) *flag = 0;
        ready = n + up;
      }
      if (lane == 0) {
#pragma unroll 1
        for (int i = n; i < ready; ++i) {
          bring_updates(i);
          bring_outputs(i);
        }
      }
    }
    ptx::grid_dependency_wait();  // who waits for this kernel's end relies on the one before it
    return;
  }

  ptx::registers_decrease<kOtherRegisters>();
  if (tid < 256) {
    // ---- O = diag(e^c) Q S0 key_dim^-0.5 + P D
    const u8* states = smem + kMap.states + warp * (kSteps * 512);
    const u8* changes = smem + kMap.changes + warp * (kTokenSteps * 512);
    const u32 rows = kMap.rows + static_cast<u32>(warp) * (C * 32);
    const float scale = rsqrtf(static_cast<float>(T.key_dim));
#pragma unroll 1
    for (int n = 0; n < chunks; ++n) {
      const int stage = n % kOutputStages;
      const u32 own = base + kMap.outputs + static_cast<u32>(stage) * kMap.output_stride;
      const u64 queries = ptx::swizzled_descriptor(own);
      const u64 scores = ptx::swizzled_descriptor(own + static_cast<u32>(T.key_bytes()));
      const float* gates =
          reinterpret_cast<const float*>(smem + kMap.output_gates + static_cast<u32>(stage) * (C * 4)) + 2 * l;
      const u32 parity = static_cast<u32>(n) & 1u;
      u32 state[kSteps][4], change[kTokenSteps][4];
      float o[32];
      ptx::mbarrier_wait(barriers.states_there(), parity);
#pragma unroll
      for (int k = 0; k < kSteps; ++k) get_rounded(states, k, state[k], lane);
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(barriers.states_free());
      ptx::mbarrier_wait(barriers.outputs_there(stage), static_cast<u32>(n / kOutputStages) & 1u);
      ptx::wgmma_fence();
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        const u64 b = queries + static_cast<u64>(k / 4) * kPiece + static_cast<u64>(2 * (k % 4));
        if (k == 0) {
          ptx::Wgmma<64>::set(o, state[k], b);
        } else {
          ptx::Wgmma<64>::add(o, state[k], b);
        }
      }
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      ptx::keep_registers(o);
#pragma unroll
      for (int i = 0; i < C / 8; ++i) {
        const float2 decay = *reinterpret_cast<const float2*>(gates + 8 * i);
        o[4 * i] *= decay.x * scale;
        o[4 * i + 1] *= decay.y * scale;
        o[4 * i + 2] *= decay.x * scale;
        o[4 * i + 3] *= decay.y * scale;
      }
      ptx::mbarrier_wait(barriers.changes_there(), parity);
#pragma unroll
      for (int k = 0; k < kTokenSteps; ++k) get_rounded(changes, k, change[k], lane);
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(barriers.changes_free());
      ptx::wgmma_fence();
#pragma unroll
      for (int k = 0; k < kTokenSteps; ++k) ptx::Wgmma<64>::add(o, change[k], scores + static_cast<u64>(2 * k));
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      ptx::keep_registers(o);
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(barriers.outputs_free(stage));
        // 16 columns of every token, 32 bytes: their halves are exchanged in every second four tokens, so that eight
        // rows lie in different banks.
#pragma unroll
      for (int i = 0; i < C / 16; ++i) {
        const u32 words[4] = {ptx::to_bf16x2(o[8 * i], o[8 * i + 1]), ptx::to_bf16x2(o[8 * i + 2], o[8 * i + 3]),
                              ptx::to_bf16x2(o[8 * i + 4], o[8 * i + 5]), ptx::to_bf16x2(o[8 * i + 6], o[8 * i + 7])};
        const int token = 16 * i + lane / 16 * 8 + lane % 8;
        ptx::store_matrix4_transposed(base + rows + static_cast<u32>(token * 32 + (lane / 8 % 2 ^ token / 4 % 2) * 16),
                                      words);
      }
      __syncwarp();
      const int column = head * T.value_dim + first_column + warp * 16;
#pragma unroll
      for (int i = 0; i < C / 16; ++i) {
        const int token = 16 * i + lane / 2;
        const uint4 words = *reinterpret_cast<const uint4*>(smem + rows + token * 32 + (lane % 2 ^ token / 4 % 2) * 16);
        if (n * C + token < sequence.count) {
          u16* out = args.delta.out + (sequence.first + n * C + token) * args.delta.out_stride + column;
          reinterpret_cast<uint4*>(out)[lane % 2] = words;
        }
      }
      if (args.flags != nullptr) {
        ptx::mbarrier_wait(barriers.announced(), parity ^ 1u);  // the chunk before
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(barriers.stored());
      }
    }
    return;
  }

  // ---- the convolution of V: a lane has two columns for 16 tokens. And lanes that bring operands.
  const int v_column = shape.v_column(head) + first_column;
  const long long history_head = static_cast<long long>(head) * shape.history_head();
  constexpr int kOwn = 2 * T.key_dim + T.value_dim;
  const u16* rows = static_cast<const u16*>(args.delta.rows) + sequence.first * args.delta.row_stride;
  const u16* history =
      static_cast<const u16*>(args.delta.history) + sequence.state_in * args.delta.history_stride + history_head;
  float4 weights[2];
#pragma unroll
  for (int j = 0; j < 2; ++j) weights[j] = reinterpret_cast<const float4*>(args.delta.conv)[v_column + 2 * lane + j];
  ptx::grid_launch_dependents();
  constexpr int kTokens = C / 4;   // of a warp
  u32 inputs[kHistory + kTokens];  // of two columns
  // What lies before or behind the sequence has no effect, behind it because T has zeros there: other rows instead.
  const auto load_inputs = [&](int n) {
    const int token = n * C + warp * kTokens;
    const u16* column = rows + v_column + 2 * lane;
    // Each of those before the sequence is its first row: addresses that do not depend on one another, or each load
    // would wait for the one before it.
    const long long step = token > 0 ? args.delta.row_stride : 0;
    const u16* before = column + (token > 0 ? token - kHistory : 0) * args.delta.row_stride;
    if (token + kTokens <= sequence.count) {
#pragma unroll
      for (int i = 0; i < kHistory; ++i) inputs[i] = *reinterpret_cast<const u32*>(before + i * step);
      const u16* from = column + token * args.delta.row_stride;
#pragma unroll
      for (int i = 0; i < kTokens; ++i) {
        inputs[kHistory + i] = *reinterpret_cast<const u32*>(from);
        from += args.delta.row_stride;
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kHistory + kTokens; ++i) {
      const int at = token - kHistory + i;
      const int row = at < 0 ? 0 : at < sequence.count ? at : sequence.count - 1;
      inputs[i] = *reinterpret_cast<const u32*>(column + row * args.delta.row_stride);
    }
  };
  load_inputs(0);
  if (warp == 0) {
    const u16* own = history + 2 * T.key_dim + first_column + 2 * lane;
#pragma unroll
    for (int i = 0; i < kHistory; ++i) inputs[i] = fresh ? 0 : *reinterpret_cast<const u32*>(own + i * kOwn);
  }
#pragma unroll 1
  for (int n = 0; n < chunks; ++n) {
    const int slot = n & 1;
    ptx::mbarrier_wait(barriers.values_free(slot), (static_cast<u32>(n / 2) & 1u) ^ 1u);
    u8* out = smem + kMap.values + static_cast<u32>(slot) * kMap.values_stride;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float4 w = weights[j];
      const auto input = [&](int i) { return __uint_as_float(j == 0 ? inputs[i] << 16 : inputs[i] & 0xffff0000u); };
#pragma unroll
      for (int t = 0; t < kTokens; t += 4) {
        float y[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          y[i] = silu(w.x * input(t + i) + w.y * input(t + i + 1) + w.z * input(t + i + 2) + w.w * input(t + i + 3));
        }
        const int column = 2 * lane + j;
#pragma unroll
        for (int i = 0; i < 4; i += 2) {  // two tokens
          const int token = warp * kTokens + t + i;
          const int at =
              (column / 16 * (C / 8) + token / 8) * 32 + value_place(column / 16, column % 8 * 4 + token % 8 / 2);
          *reinterpret_cast<float2*>(out + at * 16 + column % 16 / 8 * 8) = make_float2(y[i], y[i + 1]);
        }
      }
    }
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(barriers.values_there(slot));
    if (n + 1 < chunks) load_inputs(n + 1);
  }

  // ---- the last inputs of the convolution: of this CTA's columns; the first CTA of a head has q and k, too. The slot
  // may be the one that was read: of v by this very warp, of q and k by the kernel before, which has prepared a chunk
  // that is used.
  if (slot_out < 0) return;
  ptx::mbarrier_wait(barriers.values_free((chunks - 1) & 1), static_cast<u32>((chunks - 1) / 2) & 1u);
  u16* kept = static_cast<u16*>(args.delta.history) + slot_out * args.delta.history_stride + history_head;
  const int thread = tid - 256;  // v: in the first warp
  constexpr int kValuePieces = T.columns / 8;
  if (thread >= kValuePieces + (first_column == 0 ? 2 * T.key_dim / 8 : 0)) return;
  const int c = 8 * (thread - kValuePieces);  // of q and k
  const int column = c < 0           ? v_column + 8 * thread
                     : c < T.key_dim ? shape.q_column(head) + c
                                     : shape.k_column(head) + c - T.key_dim;
  const int in_history = c < 0 ? 2 * T.key_dim + first_column + 8 * thread : c;
  uint4 words[kHistory];  // all read before any is written: the slot may be the same
#pragma unroll
  for (int t = 0; t < kHistory; ++t) {
    const int token = sequence.count - kHistory + t;
    words[t] = make_uint4(0, 0, 0, 0);
    if (token >= 0) {
      words[t] = *reinterpret_cast<const uint4*>(rows + token * args.delta.row_stride + column);
    } else if (!fresh) {
      words[t] = *reinterpret_cast<const uint4*>(history + (kHistory + token) * kOwn + in_history);
    }
  }
#pragma unroll
  for (int t = 0; t < kHistory; ++t) *reinterpret_cast<uint4*>(kept + t * kOwn + in_history) = words[t];
}

// Third node: out = o silu(z) norm / sqrt(mean of the head's o^2 + eps). Grid: as scale_launch says; a thread has
// pieces of 8 values, value_dim / 8 lanes a head.
template <typename Tile>
__global__ void __launch_bounds__(kScaleThreads) delta_gate(const __grid_constant__ ChunkArgs args) {
  static constexpr ChunkTile T = Tile::value;
  static_assert(T.wgmma);
  constexpr u32 kAll = 0xffffffffu;
  constexpr int kLanes = T.value_dim / 8;
  const DeltaShape& shape = args.delta.shape;
  if (args.delta.settled == 0) ptx::grid_dependency_wait();
  // The last chunks first: the scan wrote them last, so they are in L2 for the most part. Beside the scan the first
  // ones first.
  const bool beside = args.flags != nullptr;
  const int chunk = static_cast<int>(beside ? blockIdx.y : gridDim.y - 1 - blockIdx.y);
  const ChunkPlace place = args.chunks[chunk];
  SequenceRows sequence{-1, 0, 0, 0};
  if (place.sequence >= 0 && place.sequence < *args.delta.live) sequence = args.delta.sequences[place.sequence];
  const int left = sequence.count - place.index * T.chunk;
  const int tokens = left < T.chunk ? left : T.chunk;
  if (!beside) {
    ptx::grid_dependency_wait();
  } else if (sequence.first >= 0 && tokens > 0) {
    if (threadIdx.x < 32) {
      const int lane = static_cast<int>(threadIdx.x);
      const int* flags =
          reinterpret_cast<const int*>(args.space + args.at.stored) + static_cast<long long>(chunk) * shape.value_heads;
      for (int head = 0; head < shape.value_heads;) {
        const int most = shape.value_heads - head < 32 ? shape.value_heads - head : 32;
        head += ptx::wait_flags(flags + head + (lane < most ? lane : 0), most, T.splits(), lane);
      }
    }
    __syncthreads();
  }
  // The last CTAs only: the first ones would keep their SMs.
  if (beside && blockIdx.y + 1 == gridDim.y) {
    ptx::grid_dependency_wait();  // who waits for this kernel's end relies on the one before it
  }
  ptx::grid_launch_dependents();
  if (sequence.first < 0) return;
  const int width = shape.value_heads * kLanes;
  const long long first_row = sequence.first + static_cast<long long>(place.index) * T.chunk;
  const int first = static_cast<int>(blockIdx.x) * (kScaleThreads * kScalePieces) + static_cast<int>(threadIdx.x);
  const int in_head = static_cast<int>(threadIdx.x) % kLanes * 8;
  float norm[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) norm[i] = args.delta.norm[in_head + i];
  uint4 words[kScalePieces], gates[kScalePieces];
  const chunk_detail::PieceWalk begin(first, width);
  const u16* z = static_cast<const u16*>(args.delta.rows) + shape.z_column(0);
  chunk_detail::PieceWalk at = begin;
#pragma unroll
  for (int i = 0; i < kScalePieces; ++i, at.next()) {
    words[i] = gates[i] = make_uint4(0, 0, 0, 0);
    if (at.row >= tokens) continue;
    const long long row = first_row + at.row;
    words[i] = reinterpret_cast<const uint4*>(args.delta.out + row * args.delta.out_stride)[at.piece];
    gates[i] = reinterpret_cast<const uint4*>(z + row * args.delta.row_stride)[at.piece];
  }
  at = begin;
#pragma unroll
  for (int i = 0; i < kScalePieces; ++i, at.next()) {
    const u32 both[4] = {words[i].x, words[i].y, words[i].z, words[i].w};
    const u32 gate[4] = {gates[i].x, gates[i].y, gates[i].z, gates[i].w};
    float square = 0.0f;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float x = __uint_as_float(both[j] << 16);
      const float y = __uint_as_float(both[j] & 0xffff0000u);
      square += x * x + y * y;
    }
#pragma unroll
    for (int d = 1; d < kLanes; d *= 2) square += __shfl_xor_sync(kAll, square, d);
    const float factor = rsqrtf(square / static_cast<float>(T.value_dim) + args.delta.norm_eps);
    u32 y[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      y[j] =
          ptx::to_bf16x2(__uint_as_float(both[j] << 16) * factor * norm[2 * j] * silu(__uint_as_float(gate[j] << 16)),
                         __uint_as_float(both[j] & 0xffff0000u) * factor * norm[2 * j + 1] *
                             silu(__uint_as_float(gate[j] & 0xffff0000u)));
    }
    if (at.row >= tokens) continue;
    reinterpret_cast<uint4*>(args.delta.out + (first_row + at.row) * args.delta.out_stride)[at.piece] =
        make_uint4(y[0], y[1], y[2], y[3]);
  }
}

}  // namespace fourfold::gdn
