// The chunked delta rule, second node: the chunks of a sequence one after the other, S0 the state before a chunk,
//   D = T (V - diag(e^c) K S0)
//   O = diag(e^c) Q S0 key_dim^-0.5 + P D
//   S = e^(c_last) S0 + (diag(e^(c_last - c)) K)^T D
// and the third one, the norm of a head. A CTA has one value head of one sequence and `columns` of its values: columns
// do not depend on each other, so splitting them is exact, and no result depends on the batch.
//
// Everything is transposed: a warp's 16 columns of S are 16 rows of S^T, fp32 accumulators for all keys. An accumulator
// of one product is, split into two bf16, the left operand of the next one: S^T, X^T and D^T never leave registers. Two
// warps have the same columns: the first one does D and S, the other one, a chunk behind, O, and the convolution of V a
// chunk ahead. The first leaves fragments of S^T and D^T in shared memory for the second; there is one barrier a chunk.
// With `helpers`, two more warps take the convolution and the end of the output: a warp alone in its quarter of the SM
// stands still most of the time.
//
// The norm of a head needs all its columns. The scan writes o norm silu(z) and the sums of squares of 16 columns each;
// delta_scale multiplies. (Reading the output a second time costs 134 MB for 8,192 tokens of the 35B model; keeping o
// apart would be 268.)
#pragma once

#include "kernels/gdn/chunk_prepare.cuh"

namespace fourfold::gdn {

namespace chunk_detail {

// Fragments of 16 rows of the left operand from accumulators of two n-tiles, split.
__device__ __forceinline__ void fragment(const float (&x)[4], const float (&y)[4], u32 (&high)[4], u32 (&low)[4]) {
  const Split s[4] = {split(x[0], x[1]), split(x[2], x[3]), split(y[0], y[1]), split(y[2], y[3])};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    high[i] = s[i].high;
    low[i] = s[i].low;
  }
}
__device__ __forceinline__ void put_fragment(u8* to, int index, const u32 (&high)[4], const u32 (&low)[4], int lane) {
  uint4* at = reinterpret_cast<uint4*>(to) + index * 64 + lane;
  at[0] = make_uint4(high[0], high[1], high[2], high[3]);
  at[32] = make_uint4(low[0], low[1], low[2], low[3]);
}
__device__ __forceinline__ void get_fragment(const u8* from, int index, u32 (&high)[4], u32 (&low)[4], int lane) {
  const uint4* at = reinterpret_cast<const uint4*>(from) + index * 64 + lane;
  const uint4 x = at[0];
  const uint4 y = at[32];
  high[0] = x.x;
  high[1] = x.y;
  high[2] = x.z;
  high[3] = x.w;
  low[0] = y.x;
  low[1] = y.y;
  low[2] = y.z;
  low[3] = y.w;
}

// Multiplications that add to the same accumulator follow each other at a distance: all tiles with the high halves
// first, then all with the low ones. A warp is alone in its quarter of the SM, and would wait for each.

// d[16 columns][tokens] += x^T m^T for m [tokens][16 of k] as two bf16 (T or P): blocks of 16 tokens from k on; before
// it m is zero.
template <typename Tile>
__device__ __forceinline__ void multiply_square(float (&d)[Tile::value.chunk / 8][4], const u32 (&high)[4],
                                                const u32 (&low)[4], u32 square, int k, int lane) {
  static constexpr ChunkTile T = Tile::value;
  constexpr int kBlocks = T.chunk / 16;
  const u32 at =
      square + static_cast<u32>((lane % 8 + lane / 16 * 8) * T.square_stride() + (2 * k + lane / 8 % 2) * 16);
  u32 b[kBlocks][4], c[kBlocks][4];
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) {
    if (n < k) continue;
    ptx::load_matrix4(b[n], at + static_cast<u32>(n * 16 * T.square_stride()));
    ptx::load_matrix4(c[n], at + static_cast<u32>((T.chunk + n * 16) * T.square_stride()));
  }
#pragma unroll
  for (int i = 0; i < 2 * kBlocks; ++i) {
    if (i >= 2 * k) ptx::mma_m16n8k16(d[i], high, b[i / 2][i % 2 * 2], b[i / 2][i % 2 * 2 + 1]);
  }
#pragma unroll
  for (int i = 0; i < 2 * kBlocks; ++i) {
    if (i >= 2 * k) ptx::mma_m16n8k16(d[i], low, b[i / 2][i % 2 * 2], b[i / 2][i % 2 * 2 + 1]);
  }
#pragma unroll
  for (int i = 0; i < 2 * kBlocks; ++i) {
    if (i >= 2 * k) ptx::mma_m16n8k16(d[i], high, c[i / 2][i % 2 * 2], c[i / 2][i % 2 * 2 + 1]);
  }
}

// Fragments of m [tokens][16 keys] (K or Q), and d[16 columns][tokens] += x^T m^T.
template <typename Tile>
__device__ __forceinline__ void load_keys(u32 (&b)[Tile::value.chunk / 16][4], u32 keys, int k, int lane) {
  static constexpr ChunkTile T = Tile::value;
  const u32 at = keys + static_cast<u32>((lane % 8 + lane / 16 * 8) * T.key_stride() + (2 * k + lane / 8 % 2) * 16);
#pragma unroll
  for (int n = 0; n < T.chunk / 16; ++n) ptx::load_matrix4(b[n], at + static_cast<u32>(n * 16 * T.key_stride()));
}
template <typename Tile>
__device__ __forceinline__ void multiply_keys(float (&d)[Tile::value.chunk / 8][4], const u32 (&high)[4],
                                              const u32 (&low)[4], const u32 (&b)[Tile::value.chunk / 16][4]) {
#pragma unroll
  for (int i = 0; i < Tile::value.chunk / 8; ++i) {
    ptx::mma_m16n8k16(d[i], high, b[i / 2][i % 2 * 2], b[i / 2][i % 2 * 2 + 1]);
  }
#pragma unroll
  for (int i = 0; i < Tile::value.chunk / 8; ++i) {
    ptx::mma_m16n8k16(d[i], low, b[i / 2][i % 2 * 2], b[i / 2][i % 2 * 2 + 1]);
  }
}

}  // namespace chunk_detail

// `Tile` is a ChunkTileOf<...>. Grid: (value heads x splits) x sequences.
template <typename Tile>
__global__ void __launch_bounds__(Tile::value.scan_threads(), 1) delta_scan(const __grid_constant__ ChunkArgs args) {
  using namespace chunk_detail;
  static constexpr ChunkTile T = Tile::value;
  static constexpr ScanMap kMap = scan_map(T);
  constexpr bool kF = T.float32;
  constexpr int C = T.chunk;
  constexpr int kSteps = T.key_dim / 16;
  constexpr int kThreads = T.scan_threads();
  FOURFOLD_DYNAMIC_SHARED(smem);
  const u32 base = ptx::keep_register(ptx::shared_address(smem));
  const int tid = static_cast<int>(threadIdx.x);
  const int warp = tid / 32;
  const int lane = tid % 32;
  const int pair = warp % T.pairs();
  const int role = warp / T.pairs();
  const bool updates = role == 0;
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

  // S^T: rows g and g + 8 of the pair's columns, keys 8 n + 2 l, + 1.
  float state[2 * kSteps][4];
  const long long state_at = static_cast<long long>(head) * (T.key_dim * T.value_dim) +
                             static_cast<long long>((first_column + pair * 16) / kPanel) * (T.key_dim * kPanel) +
                             2 * l * kPanel + g;
  const auto state_place = [&](int n, int e) {
    return state_at + (e / 2) * (T.key_dim * kPanel) + (8 * n + e % 2) * kPanel;
  };
  if (updates) {
    const float* from = args.delta.states + sequence.state_in * args.delta.state_stride;
#pragma unroll
    for (int n = 0; n < 2 * kSteps; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) state[n][e] = fresh ? 0.0f : from[state_place(n, e)];
  }

  if (T.bulk && tid == 0) {
    ptx::mbarrier_init(base + kMap.barriers, 1);
    ptx::mbarrier_init(base + kMap.barriers + 8u, 1);
    ptx::fence_barrier_init();
  }
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();

  // By one thread, or by all.
  const auto barrier = [&](int load) { return base + kMap.barriers + 8u * static_cast<u32>(load & 1); };
  const auto copy = [&](u32 to, const u8* from, int bytes, u32 bar) {
    if constexpr (T.bulk) {
      ptx::bulk_copy(to, from, static_cast<u32>(bytes), bar, ptx::policy_evict_first());
    } else {
      for (int i = tid; i < bytes / 16; i += kThreads) ptx::async_copy16(to + static_cast<u32>(i) * 16u, from + i * 16);
    }
  };
  const auto slot = [&](unsigned first, unsigned stride, int chunk) {
    return first + static_cast<unsigned>(chunk & 1) * stride;
  };
  // Keys or queries, T or P, and the gates of a chunk.
  const auto load_operands = [&](int chunk, unsigned to, long long keys, long long square, u32 bar) {
    const long long key_place = ((first_chunk + chunk) * shape.key_heads + key_head) * T.key_bytes();
    const long long head_place = (first_chunk + chunk) * shape.value_heads + head;
    copy(base + to, args.space + keys + key_place, T.key_bytes(), bar);
    copy(base + to + static_cast<u32>(T.key_bytes()), args.space + square + head_place * T.square_bytes(),
         T.square_bytes(), bar);
    copy(base + to + static_cast<u32>(T.key_bytes() + T.square_bytes()),
         args.space + args.at.gates + head_place * T.gate_bytes(), T.gate_bytes(), bar);
  };
  const int v_column = shape.v_column(head) + first_column;
  const long long history_head = static_cast<long long>(head) * shape.history_head();
  constexpr int kOwn = 2 * T.key_dim + T.value_dim;
  const auto load_inputs = [&](int chunk) {
    constexpr int kVectors = T.input_stride() / 16;
    constexpr int kVector = 16 / T.element();
    const unsigned to = slot(kMap.inputs, kMap.input_stride, chunk);
    for (int i = tid; i < (kHistory + C) * kVectors; i += kThreads) {
      const int token = chunk * C + i / kVectors - kHistory;
      const int column = i % kVectors * kVector;
      if (token >= sequence.count) break;
      if (token >= 0) {
        ptx::async_copy16(
            base + to + static_cast<u32>(i) * 16u,
            element_at<kF>(args.delta.rows,
                           static_cast<long long>(sequence.first + token) * args.delta.row_stride + v_column + column));
      } else if (fresh) {
        reinterpret_cast<uint4*>(smem + to)[i] = make_uint4(0, 0, 0, 0);
      } else {
        ptx::async_copy16(
            base + to + static_cast<u32>(i) * 16u,
            element_at<kF>(args.delta.history, sequence.state_in * args.delta.history_stride + history_head +
                                                   (kHistory + token) * kOwn + 2 * T.key_dim + first_column + column));
      }
    }
  };

  // Iteration n: D and S of chunk n, O of chunk n - 1, the convolution of chunk n + 1, and what they will need next.
#pragma unroll 1
  for (int n = -2; n <= chunks; ++n) {
    ptx::async_copy_wait<0>();
    if constexpr (T.bulk) {
      if (n >= 0) ptx::mbarrier_wait(barrier(n), static_cast<u32>(n / 2) & 1u);
    }
    __syncthreads();
    const bool more_updates = n + 1 >= 0 && n + 1 < chunks;
    const bool more_outputs = n >= 0 && n < chunks;
    if (!T.bulk || tid == kThreads - 1) {
      const u32 bar = barrier(n + 1);
      if (T.bulk && (more_updates || more_outputs)) {
        ptx::mbarrier_arrive_expect(
            bar, (more_updates ? kMap.update_stride : 0u) + (more_outputs ? kMap.output_stride : 0u));
      }
      if (more_updates) {
        load_operands(n + 1, slot(kMap.updates, kMap.update_stride, n + 1), args.at.keys, args.at.inverse, bar);
      }
      if (more_outputs) {
        load_operands(n, slot(kMap.outputs, kMap.output_stride, n), args.at.queries, args.at.scores, bar);
      }
    }
    __syncwarp();  // or the lane that brings goes on by itself, and the others after it
    if (n + 2 < chunks) load_inputs(n + 2);
    ptx::async_copy_commit();

    if (updates) {
      if (n < 0 || n == chunks) continue;
      const u32 keys = base + slot(kMap.updates, kMap.update_stride, n);
      const u32 inverse = keys + static_cast<u32>(T.key_bytes());
      const float* gates = reinterpret_cast<const float*>(smem + slot(kMap.updates, kMap.update_stride, n) +
                                                          T.key_bytes() + T.square_bytes());
      u8* states = smem + slot(kMap.states, kMap.state_stride, n) + pair * (kMap.state_stride / T.pairs());
      u8* changes = smem + slot(kMap.changes, kMap.change_stride, n) + pair * (kMap.change_stride / T.pairs());
      const float* values = reinterpret_cast<const float*>(smem + slot(kMap.values, kMap.values_stride, n)) +
                            pair * 16 * T.value_stride();
      float x[C / 8][4];
#pragma unroll
      for (int i = 0; i < C / 8; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) x[i][e] = 0.0f;
      u32 operand[2][C / 16][4];
      load_keys<Tile>(operand[0], keys, 0, lane);
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        if (k + 1 < kSteps) load_keys<Tile>(operand[(k + 1) % 2], keys, k + 1, lane);
        u32 high[4], low[4];
        fragment(state[2 * k], state[2 * k + 1], high, low);
        put_fragment(states, k, high, low, lane);
        multiply_keys<Tile>(x, high, low, operand[k % 2]);
      }
#pragma unroll
      for (int i = 0; i < C / 8; ++i) {
        const float2 decay = *reinterpret_cast<const float2*>(gates + 8 * i + 2 * l);
        const float2 v0 = *reinterpret_cast<const float2*>(values + g * T.value_stride() + 8 * i + 2 * l);
        const float2 v1 = *reinterpret_cast<const float2*>(values + (g + 8) * T.value_stride() + 8 * i + 2 * l);
        x[i][0] = v0.x - decay.x * x[i][0];
        x[i][1] = v0.y - decay.y * x[i][1];
        x[i][2] = v1.x - decay.x * x[i][2];
        x[i][3] = v1.y - decay.y * x[i][3];
      }
      float d[C / 8][4];
#pragma unroll
      for (int i = 0; i < C / 8; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) d[i][e] = 0.0f;
#pragma unroll
      for (int k = 0; k < C / 16; ++k) {
        u32 high[4], low[4];
        fragment(x[2 * k], x[2 * k + 1], high, low);
        multiply_square<Tile>(d, high, low, inverse, k, lane);
      }
      const float last = gates[C - 1];
#pragma unroll
      for (int i = 0; i < 2 * kSteps; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) state[i][e] *= last;
#pragma unroll
      for (int k = 0; k < C / 16; ++k) {
        u32 high[4], low[4];
        fragment(d[2 * k], d[2 * k + 1], high, low);
        put_fragment(changes, k, high, low, lane);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float2 left = *reinterpret_cast<const float2*>(gates + C + 8 * (2 * k + i) + 2 * l);
          d[2 * k + i][0] *= left.x;
          d[2 * k + i][1] *= left.y;
          d[2 * k + i][2] *= left.x;
          d[2 * k + i][3] *= left.y;
        }
        fragment(d[2 * k], d[2 * k + 1], high, low);
        // Keys of 16 tokens, transposed: rows are what is summed over.
        const u32 at = keys + static_cast<u32>((k * 16 + lane % 16) * T.key_stride() + lane / 16 * 16);
        constexpr int kAtOnce = kSteps % 4 == 0 ? 4 : 1;
#pragma unroll
        for (int first = 0; first < kSteps; first += kAtOnce) {
          u32 b[kAtOnce][4];
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) ptx::load_matrix4_transposed(b[i], at + static_cast<u32>((first + i) * 32));
#pragma unroll
          for (int i = 0; i < 2 * kAtOnce; ++i) {
            ptx::mma_m16n8k16(state[2 * first + i], high, b[i / 2][i % 2 * 2], b[i / 2][i % 2 * 2 + 1]);
          }
#pragma unroll
          for (int i = 0; i < 2 * kAtOnce; ++i) {
            ptx::mma_m16n8k16(state[2 * first + i], low, b[i / 2][i % 2 * 2], b[i / 2][i % 2 * 2 + 1]);
          }
        }
      }
    } else {
      if (role == (T.helpers ? 2 : 1) && n + 1 >= 0 && n + 1 < chunks) {
        // The convolution of chunk n + 1: half a warp has the pair's columns for half of the tokens, one after the
        // other.
        const int column = pair * 16 + lane % 16;
        const float4 w = reinterpret_cast<const float4*>(args.delta.conv)[v_column + column];
        const void* in = smem + slot(kMap.inputs, kMap.input_stride, n + 1);
        float* out =
            reinterpret_cast<float*>(smem + slot(kMap.values, kMap.values_stride, n + 1)) + column * T.value_stride();
        const int tokens = sequence.count - (n + 1) * C;
        const int first = lane / 16 * (C / 2);
        float x[7];
#pragma unroll
        for (int i = 0; i < kHistory; ++i) x[i] = element<kF>(in, (first + i) * T.columns + column);
#pragma unroll 2
        for (int t = first; t < first + C / 2; t += 4) {
          float y[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) x[kHistory + i] = element<kF>(in, (t + kHistory + i) * T.columns + column);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float z = silu(w.x * x[i] + w.y * x[i + 1] + w.z * x[i + 2] + w.w * x[i + 3]);
            y[i] = t + i < tokens ? z : 0.0f;  // beyond the sequence there may be anything
          }
          *reinterpret_cast<float4*>(out + t) = make_float4(y[0], y[1], y[2], y[3]);
#pragma unroll
          for (int i = 0; i < kHistory; ++i) x[i] = x[4 + i];
        }
      }
      if (n < 1 || role == 2) continue;
      const int chunk = n - 1;
      const u32 queries = base + slot(kMap.outputs, kMap.output_stride, chunk);
      const u32 scores = queries + static_cast<u32>(T.key_bytes());
      const float* gates = reinterpret_cast<const float*>(smem + slot(kMap.outputs, kMap.output_stride, chunk) +
                                                          T.key_bytes() + T.square_bytes());
      u8* states = smem + slot(kMap.states, kMap.state_stride, chunk) + pair * (kMap.state_stride / T.pairs());
      const u8* changes =
          smem + slot(kMap.changes, kMap.change_stride, chunk) + pair * (kMap.change_stride / T.pairs());
      float* rows = reinterpret_cast<float*>(states);
      if (role == 1) {
        const float scale = rsqrtf(static_cast<float>(T.key_dim));
        float o[C / 8][4];
#pragma unroll
        for (int i = 0; i < C / 8; ++i)
#pragma unroll
          for (int e = 0; e < 4; ++e) o[i][e] = 0.0f;
        u32 operand[2][C / 16][4];
        load_keys<Tile>(operand[0], queries, 0, lane);
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
          if (k + 1 < kSteps) load_keys<Tile>(operand[(k + 1) % 2], queries, k + 1, lane);
          u32 high[4], low[4];
          get_fragment(states, k, high, low, lane);
          multiply_keys<Tile>(o, high, low, operand[k % 2]);
        }
#pragma unroll
        for (int i = 0; i < C / 8; ++i) {
          const float2 decay = *reinterpret_cast<const float2*>(gates + 8 * i + 2 * l);
          o[i][0] *= decay.x * scale;
          o[i][1] *= decay.y * scale;
          o[i][2] *= decay.x * scale;
          o[i][3] *= decay.y * scale;
        }
#pragma unroll
        for (int k = 0; k < C / 16; ++k) {
          u32 high[4], low[4];
          get_fragment(changes, k, high, low, lane);
          multiply_square<Tile>(o, high, low, scores, k, lane);
        }
        // Rows of outputs, where the state's fragments were: a lane has 16 columns of a token.
        __syncwarp();
#pragma unroll
        for (int i = 0; i < C / 8; ++i)
#pragma unroll
          for (int e = 0; e < 4; ++e) rows[(8 * i + 2 * l + e % 2) * 17 + g + 8 * (e / 2)] = o[i][e];
      }
      // The end of the output, with rows of another warp.
      const int own_column = head * T.value_dim + first_column + pair * 16;
      uint4 z_words[C / 32][T.element()];
#pragma unroll
      for (int i = 0; i < C / 32; ++i) {
        const int token = chunk * C + lane + 32 * i;
        const long long row = sequence.first + (token < sequence.count ? token : 0);
        const void* z = element_at<kF>(args.delta.rows,
                                       row * args.delta.row_stride + shape.z_column(head) + first_column + pair * 16);
#pragma unroll
        for (int j = 0; j < T.element(); ++j) {
          if (!T.helpers || role == 3) z_words[i][j] = static_cast<const uint4*>(z)[j];
        }
      }
      if constexpr (T.helpers) {
        ptx::barrier_sync(1 + pair, 64);
        if (role == 1) continue;
      } else {
        __syncwarp();
      }
#pragma unroll
      for (int turn = 0; turn < C / 32; ++turn) {
        const int t = lane + 32 * turn;
        const int token = chunk * C + t;
        if (token >= sequence.count) continue;
        const long long row = sequence.first + token;
        float square = 0.0f;
        u32 packed[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float y0 = rows[t * 17 + 2 * i];
          const float y1 = rows[t * 17 + 2 * i + 1];
          square += y0 * y0 + y1 * y1;
          const float2 norm = *reinterpret_cast<const float2*>(args.delta.norm + first_column + pair * 16 + 2 * i);
          float z0, z1;
          if constexpr (kF) {
            const uint4 word = z_words[turn][i / 2];
            z0 = __uint_as_float(i % 2 == 0 ? word.x : word.z);
            z1 = __uint_as_float(i % 2 == 0 ? word.y : word.w);
          } else {
            const uint4 word = z_words[turn][i / 4];
            const u32 both = i % 4 == 0 ? word.x : i % 4 == 1 ? word.y : i % 4 == 2 ? word.z : word.w;
            z0 = __uint_as_float(both << 16);
            z1 = __uint_as_float(both & 0xffff0000u);
          }
          packed[i] = ptx::to_bf16x2(y0 * norm.x * silu(z0), y1 * norm.y * silu(z1));
        }
        uint4* out = reinterpret_cast<uint4*>(args.delta.out + row * args.delta.out_stride + own_column);
        out[0] = make_uint4(packed[0], packed[1], packed[2], packed[3]);
        out[1] = make_uint4(packed[4], packed[5], packed[6], packed[7]);
        reinterpret_cast<float*>(args.space +
                                 args.at.squares)[(row * shape.value_heads * T.value_dim + own_column) / 16] = square;
      }
    }
  }

  // ---- what is kept
  if (slot_out < 0) return;
  if (updates) {
    float* to = args.delta.states + slot_out * args.delta.state_stride;
#pragma unroll
    for (int n = 0; n < 2 * kSteps; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) to[state_place(n, e)] = state[n][e];
  }
  // The last inputs of the convolution: this CTA's columns from shared memory; the first CTA of a head has q and k,
  // too.
  const u8* inputs = smem + slot(kMap.inputs, kMap.input_stride, chunks - 1);
  const int in_last = sequence.count - (chunks - 1) * C;
  u8* history =
      static_cast<u8*>(args.delta.history) + (slot_out * args.delta.history_stride + history_head) * T.element();
  constexpr int kVectors = T.input_stride() / 16;
  for (int i = tid; i < kHistory * kVectors; i += kThreads) {
    reinterpret_cast<uint4*>(history +
                             (i / kVectors * kOwn + 2 * T.key_dim + first_column) * T.element())[i % kVectors] =
        reinterpret_cast<const uint4*>(inputs + (in_last + i / kVectors) * T.input_stride())[i % kVectors];
  }
  if (first_column != 0) return;
  constexpr int kVector = 16 / T.element();
  constexpr int kKeyVectors = 2 * T.key_dim / kVector;
  for (int i = tid; i < kKeyVectors; i += kThreads) {
    const int c = i * kVector;
    const int column = c < T.key_dim ? shape.q_column(head) + c : shape.k_column(head) + c - T.key_dim;
    uint4 words[kHistory];  // all read before any is written: the slot may be the same
#pragma unroll
    for (int t = 0; t < kHistory; ++t) {
      const int token = sequence.count - kHistory + t;
      if (token >= 0) {
        words[t] = *static_cast<const uint4*>(element_at<kF>(
            args.delta.rows, static_cast<long long>(sequence.first + token) * args.delta.row_stride + column));
      } else if (fresh) {
        words[t] = make_uint4(0, 0, 0, 0);
      } else {
        words[t] = *static_cast<const uint4*>(element_at<kF>(
            args.delta.history,
            sequence.state_in * args.delta.history_stride + history_head + (kHistory + token) * kOwn + c));
      }
    }
#pragma unroll
    for (int t = 0; t < kHistory; ++t) *reinterpret_cast<uint4*>(history + (t * kOwn + c) * T.element()) = words[t];
  }
}

namespace chunk_detail {

// Pieces of 8 values of a chunk's outputs that a thread has one after the other, kScaleThreads apart: two divisions in
// all.
struct PieceWalk {
  int row, piece;  // of the chunk, of the row
  int rows, pieces, width;
  __device__ __forceinline__ PieceWalk(int first, int row_pieces)
      : row(first / row_pieces),
        piece(first - row * row_pieces),
        rows(kScaleThreads / row_pieces),
        pieces(kScaleThreads - rows * row_pieces),
        width(row_pieces) {}
  __device__ __forceinline__ void next() {
    row += rows;
    piece += pieces;
    if (piece >= width) {
      piece -= width;
      ++row;
    }
  }
};

}  // namespace chunk_detail

// Third node. Grid: as scale_launch says; a thread has pieces of 8 values.
template <typename Tile>
__global__ void __launch_bounds__(kScaleThreads) delta_scale(const __grid_constant__ ChunkArgs args) {
  static constexpr ChunkTile T = Tile::value;
  const DeltaShape& shape = args.delta.shape;
  if (args.delta.settled == 0) ptx::grid_dependency_wait();
  // The last chunks first: the scan wrote them last, so they are in L2 for the most part.
  const ChunkPlace place = args.chunks[gridDim.y - 1 - blockIdx.y];
  SequenceRows sequence{-1, 0, 0, 0};
  if (place.sequence >= 0 && place.sequence < *args.delta.live) sequence = args.delta.sequences[place.sequence];
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  if (sequence.first < 0) return;
  const int width = shape.value_heads * T.value_dim / 8;
  const int left = sequence.count - place.index * T.chunk;
  const long long first_row = sequence.first + static_cast<long long>(place.index) * T.chunk;
  const float* squares = reinterpret_cast<const float*>(args.space + args.at.squares);
  const int first = static_cast<int>(blockIdx.x) * (kScaleThreads * kScalePieces) + static_cast<int>(threadIdx.x);
  const chunk_detail::PieceWalk begin(first, width);
  const int tokens = left < T.chunk ? left : T.chunk;
  uint4 words[kScalePieces];
  float sums[kScalePieces];
  chunk_detail::PieceWalk at = begin;
#pragma unroll
  for (int i = 0; i < kScalePieces; ++i, at.next()) {
    sums[i] = 0.0f;
    words[i] = make_uint4(0, 0, 0, 0);
    if (at.row >= tokens) continue;
    const long long row = first_row + at.row;
    words[i] = reinterpret_cast<const uint4*>(args.delta.out + row * args.delta.out_stride)[at.piece];
    const float* own = squares + (row * shape.value_heads + at.piece / (T.value_dim / 8)) * (T.value_dim / 16);
#pragma unroll
    for (int j = 0; j < T.value_dim / 16; ++j) sums[i] += own[j];
  }
  at = begin;
#pragma unroll
  for (int i = 0; i < kScalePieces; ++i, at.next()) {
    if (at.row >= tokens) continue;
    const float factor = rsqrtf(sums[i] / static_cast<float>(T.value_dim) + args.delta.norm_eps);
    const auto scaled = [&](u32 x) {
      return ptx::to_bf16x2(__uint_as_float(x << 16) * factor, __uint_as_float(x & 0xffff0000u) * factor);
    };
    const uint4 y = make_uint4(scaled(words[i].x), scaled(words[i].y), scaled(words[i].z), scaled(words[i].w));
    reinterpret_cast<uint4*>(args.delta.out + (first_row + at.row) * args.delta.out_stride)[at.piece] = y;
  }
}

}  // namespace fourfold::gdn
