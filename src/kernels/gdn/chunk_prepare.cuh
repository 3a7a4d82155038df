// The chunked delta rule, first node: everything of a chunk that does not depend on the state, for all chunks and key
// heads at once. With c_i the sum of the chunk's log decays up to token i, k and q normalised,
//   A_ij = beta_i (k_i . k_j) e^(c_i - c_j), j < i      T = (I + A)^-1 diag(beta)
//   P_ij = (q_i . k_j) key_dim^-0.5 e^(c_i - c_j), j <= i
// k and q are rounded to bf16 here, once; T and P are stored as sums of two bf16 (for wgmma P as one). T: blocks of 16
// on the diagonal by substitution in fp32, the others of R = (I + A)^-1: R_IJ = -R_II (sum over J <= K < I of A_IK
// R_KJ), products of two bf16 each.
//
// For wgmma the scan may run beside this kernel, on SMs of its own (beside_sms): a flag tells each of its CTAs that a
// chunk of its head is there.
#pragma once

#include "kernels/gdn/chunk_tile.h"
#include "kernels/gdn/math.cuh"
#include "kernels/ptx/fragments.cuh"
#include "kernels/ptx/sm90.cuh"

namespace fourfold::gdn {

namespace chunk_detail {

// x as the sum of two bf16, of two values at once.
struct Split {
  u32 high, low;
};
__device__ __forceinline__ Split split(float x, float y) {
  Split s;
  s.high = ptx::to_bf16x2(x, y);
  s.low = ptx::to_bf16x2(x - __uint_as_float(s.high << 16), y - __uint_as_float(s.high & 0xffff0000u));
  return s;
}
// d += a b of such sums, but for the product of the rests.
__device__ __forceinline__ void mma_split(float (&d)[4], const u32 (&a_high)[4], const u32 (&a_low)[4],
                                          const u32 (&b_high)[2], const u32 (&b_low)[2]) {
  ptx::mma_m16n8k16(d, a_high, b_high[0], b_high[1]);
  ptx::mma_m16n8k16(d, a_low, b_high[0], b_high[1]);
  ptx::mma_m16n8k16(d, a_high, b_low[0], b_low[1]);
}

// acc += a b of 16 x 16 blocks in shared memory, fp32 with rows of `stride`. Transposed: a is there as its transpose.
template <bool Transposed>
__device__ __forceinline__ void multiply_block(float (&acc)[2][4], const float* a, const float* b, int stride,
                                               int lane) {
  const int g = lane / 4;
  const int l = lane % 4;
  u32 a_high[4], a_low[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = g + 8 * (i % 2);
    const int column = 2 * l + 8 * (i / 2);
    float2 x;
    if constexpr (Transposed) {
      x = make_float2(a[column * stride + row], a[(column + 1) * stride + row]);
    } else {
      x = *reinterpret_cast<const float2*>(a + row * stride + column);
    }
    const Split s = split(x.x, x.y);
    a_high[i] = s.high;
    a_low[i] = s.low;
  }
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    u32 b_high[2], b_low[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float* from = b + (2 * l + 8 * i) * stride + 8 * n + g;
      const Split s = split(from[0], from[stride]);
      b_high[i] = s.high;
      b_low[i] = s.low;
    }
    mma_split(acc[n], a_high, a_low, b_high, b_low);
  }
}

}  // namespace chunk_detail

// `Tile` is a ChunkTileOf<...>. Grid: key heads x chunks; beside the scan any number, of CTAs with three teams
// that go on from one chunk of a key head to another.
template <typename Tile, bool Beside = false>
__global__ void __launch_bounds__((Beside ? kBesideTeams : 1) * kPrepareThreads, Beside ? 1 : 3)
    delta_prepare(const __grid_constant__ ChunkArgs args) {
  using namespace chunk_detail;
  static constexpr ChunkTile T = Tile::value;
  static constexpr PrepareMap kMap = prepare_map(T);
  constexpr bool kF = T.float32;
  constexpr int C = T.chunk;
  constexpr int kStride = prepare_stride(T);
  constexpr int kWarps = kPrepareThreads / 32;
  constexpr int kVector = 16 / T.element();
  constexpr int kKeyVectors = T.key_dim / kVector;
  constexpr u32 kAll = 0xffffffffu;
  constexpr int kTeams = Beside ? kBesideTeams : 1;
  static_assert(T.wgmma || !Beside);
  constexpr int kNoItem = 0x7fffffff;
  FOURFOLD_DYNAMIC_SHARED(whole);
  const DeltaShape& shape = args.delta.shape;
  if (args.delta.settled == 0) ptx::grid_dependency_wait();
  int item = 0;
  if constexpr (Beside) {
    // First one team of every CTA, so that the scan has its SMs soon, and all teams of those that are kept.
    const int team = static_cast<int>(threadIdx.x / kPrepareThreads), own = static_cast<int>(blockIdx.x);
    const int ctas = static_cast<int>(gridDim.x);
    item = team == 0 ? own : own < args.kept ? ctas + (team - 1) * args.kept + own : kNoItem;
    ptx::grid_dependency_wait();
    ptx::grid_launch_dependents();
  }
#pragma unroll 1
  do {
    // Known in a turn only: what is made of them is not kept from one to the next.
    const int thread = static_cast<int>(ptx::keep_register(threadIdx.x));
    const int team = kTeams == 1 ? 0 : thread / kPrepareThreads;
    const int tid = thread - team * kPrepareThreads;
    const int warp = tid / 32;
    const int lane = tid % 32;
    u8* smem = whole + static_cast<u32>(team) * kMap.total;
    const u32 base = ptx::keep_register(ptx::shared_address(smem));
    // Barriers of a team: of its groups, and of all its threads.
    const int group_barrier = 1 + team * (kPrepareGroups + 1);
    const auto team_sync = [&] {
      if constexpr (kTeams == 1) {
        __syncthreads();
      } else {
        ptx::barrier_sync(group_barrier + kPrepareGroups, kPrepareThreads);
      }
    };
    int key_head = static_cast<int>(blockIdx.x);
    int chunk = static_cast<int>(blockIdx.y);
    if constexpr (Beside) {
      if (item >= args.count * shape.key_heads) break;
      chunk = item / shape.key_heads;
      key_head = item - chunk * shape.key_heads;
      // A CTA that is not kept ends behind its turn, the others take what is left.
      const int own = static_cast<int>(blockIdx.x);
      const int first = static_cast<int>(gridDim.x) + (kTeams - 1) * args.kept;
      if (own >= args.kept) {
        item = kNoItem;
      } else {
        item = item < first ? first + team * args.kept + own : item + args.kept * kTeams;
      }
    }
    const int first_head = key_head * shape.ratio();
    const ChunkPlace place = args.chunks[chunk];
    SequenceRows sequence{-1, 0, 0, 0};
    if (place.sequence >= 0 && place.sequence < *args.delta.live) sequence = args.delta.sequences[place.sequence];
    const int first_token = place.index * C;
    const int left = sequence.count - first_token;
    const int tokens = left < C ? left : C;
    if (sequence.first < 0 || tokens <= 0) {
      if constexpr (!Beside)
        ptx::grid_dependency_wait();  // who waits for this kernel's end relies on the one before it
      continue;
    }
    const int q_first = key_head * T.key_dim;  // columns of a row; a division for each would take longer than the rest
    const int k_first = (shape.key_heads + key_head) * T.key_dim;
    // Weights of this lane's channels: pairs 2 lane, 2 lane + 1 of every 64.
    constexpr int kPairs = (T.key_dim + 63) / 64;
    float4 weights[2][kPairs][2];
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int i = 0; i < kPairs; ++i)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int c = 64 * i + 2 * lane + j;
          weights[m][i][j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
          if (c < T.key_dim) {
            weights[m][i][j] = reinterpret_cast<const float4*>(args.delta.conv)[(m == 0 ? q_first : k_first) + c];
          }
        }

    if constexpr (!Beside) {
      ptx::grid_dependency_wait();
      ptx::grid_launch_dependents();
    }

    // ---- inputs: three before the chunk, then the chunk's
    const long long first_row = sequence.first + first_token;
    const long long own_history =
        sequence.state_in * args.delta.history_stride + static_cast<long long>(first_head) * shape.history_head();
    for (int i = tid; i < (kHistory + tokens) * 2 * kKeyVectors; i += kPrepareThreads) {
      const int row = i / (2 * kKeyVectors) - kHistory;
      const int v = i % (2 * kKeyVectors);
      const u32 to = base + kMap.inputs + static_cast<u32>(i) * 16u;
      if (first_token + row >= 0) {
        const int column = v * kVector + (v < kKeyVectors ? q_first : k_first - T.key_dim);
        ptx::async_copy16(to, element_at<kF>(args.delta.rows, (first_row + row) * args.delta.row_stride + column));
      } else if (sequence.position == 0) {
        reinterpret_cast<uint4*>(smem + kMap.inputs)[i] = make_uint4(0, 0, 0, 0);
      } else {
        ptx::async_copy16(to,
                          element_at<kF>(args.delta.history,
                                         own_history + (kHistory + row) * (2 * T.key_dim + T.value_dim) + v * kVector));
      }
    }
    ptx::async_copy_commit();

    // ---- gates of all value heads, while the inputs come: log decays and beta, then sums
    float* gates_of = reinterpret_cast<float*>(smem + kMap.gates);
    for (int i = tid; i < shape.ratio() * C; i += kPrepareThreads) {
      const int head = first_head + i / C;
      const int token = i % C;
      float g = 0.0f;
      float beta = 0.0f;
      if (token < tokens) {
        const long long row = (first_row + token) * args.delta.row_stride;
        g = log_decay(element<kF>(args.delta.rows, row + shape.a_column(head)), args.delta.a_log[head],
                      args.delta.dt_bias[head]);
        beta = sigmoid(element<kF>(args.delta.rows, row + shape.b_column(head)));
      }
      gates_of[i / C * 2 * C + token] = g;
      gates_of[(i / C * 2 + 1) * C + token] = beta;
    }
    ptx::async_copy_wait<0>();
    team_sync();

    // ---- convolution and norm: a warp has tokens one after the other, a lane the last three inputs of its channels
    constexpr int kTokens = C / kWarps;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const auto input = [&](int row, int i, float(&x)[2]) {
        const int at = row * 2 * T.key_dim + m * T.key_dim + 64 * i + 2 * lane;
        if constexpr (kF) {
          x[0] = element<kF>(smem + kMap.inputs, at);
          x[1] = element<kF>(smem + kMap.inputs, at + 1);
        } else {
          const u32 both = *reinterpret_cast<const u32*>(smem + kMap.inputs + at * 2);
          x[0] = __uint_as_float(both << 16);
          x[1] = __uint_as_float(both & 0xffff0000u);
        }
      };
      const auto there = [&](int i) { return T.key_dim % 64 == 0 || 64 * i + 2 * lane < T.key_dim; };
      float window[kPairs][kTaps][2];
#pragma unroll
      for (int i = 0; i < kPairs; ++i)
#pragma unroll
        for (int tap = 0; tap < kHistory; ++tap) {
          window[i][tap][0] = window[i][tap][1] = 0.0f;
          if (there(i)) input(warp * kTokens + tap, i, window[i][tap]);
        }
#pragma unroll
      for (int t = 0; t < kTokens; t += 2) {
        float y[2][kPairs][2];
        float square[2] = {0.0f, 0.0f};
#pragma unroll
        for (int u = 0; u < 2; ++u) {
          const int token = warp * kTokens + t + u;
          constexpr int kSlots = kTaps;  // of the window: the input of tap j of token t is in (t + j) % kTaps
#pragma unroll
          for (int i = 0; i < kPairs; ++i) {
            y[u][i][0] = y[u][i][1] = 0.0f;
            if (!there(i)) continue;
            input(token + kHistory, i, window[i][(t + u + kHistory) % kSlots]);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
              const float4 w = weights[m][i][j];
              const auto x = [&](int tap) { return window[i][(t + u + tap) % kSlots][j]; };
              const float sum = w.x * x(0) + w.y * x(1) + w.z * x(2) + w.w * x(3);
              y[u][i][j] = token < tokens ? silu(sum) : 0.0f;  // beyond the sequence there may be anything
              square[u] += y[u][i][j] * y[u][i][j];
            }
          }
        }
#pragma unroll
        for (int d = 16; d > 0; d /= 2)
#pragma unroll
          for (int u = 0; u < 2; ++u) square[u] += __shfl_xor_sync(kAll, square[u], d);
#pragma unroll
        for (int u = 0; u < 2; ++u) {
          const float norm = rsqrtf(square[u] + 1e-6f);
          u32* to = reinterpret_cast<u32*>(smem + (m == 0 ? kMap.queries : kMap.keys) +
                                           (warp * kTokens + t + u) * T.key_stride());
#pragma unroll
          for (int i = 0; i < kPairs; ++i) {
            if (there(i)) to[32 * i + lane] = ptx::to_bf16x2(y[u][i][0] * norm, y[u][i][1] * norm);
          }
        }
      }
    }
    // What pads a row is never multiplied, but copied.
    if (!T.wgmma && tid < 2 * C) {
      *reinterpret_cast<uint4*>(smem + (tid < C ? kMap.queries : kMap.keys) + tid % C * T.key_stride() +
                                T.key_dim * 2) = make_uint4(0, 0, 0, 0);
    }
    team_sync();
    const long long key_place = static_cast<long long>(chunk * shape.key_heads + key_head) * T.key_bytes();
    if constexpr (T.wgmma) {
      constexpr int kPieces = T.key_dim / 8;
      for (int i = tid; i < C * kPieces; i += kPrepareThreads) {
        const int row = i / kPieces;
        const int piece = i % kPieces;
        const int from = row * T.key_stride() + piece * 16;
        u8* to = args.space + key_place + T.key_place(row, piece);
        *reinterpret_cast<uint4*>(to + args.at.keys) = *reinterpret_cast<const uint4*>(smem + kMap.keys + from);
        *reinterpret_cast<uint4*>(to + args.at.queries) = *reinterpret_cast<const uint4*>(smem + kMap.queries + from);
      }
    } else {
      for (int i = tid; i < T.key_bytes() / 16; i += kPrepareThreads) {
        reinterpret_cast<uint4*>(args.space + args.at.keys + key_place)[i] =
            reinterpret_cast<const uint4*>(smem + kMap.keys)[i];
        reinterpret_cast<uint4*>(args.space + args.at.queries + key_place)[i] =
            reinterpret_cast<const uint4*>(smem + kMap.queries)[i];
      }
    }

    // ---- products with the keys before a token and its own: 16 rows of one matrix a warp
    for (int item = warp; item < 2 * (C / 16); item += kWarps) {
      const int block = item % (C / 16);
      const u32 rows =
          base + (item < C / 16 ? kMap.keys : kMap.queries) + static_cast<u32>(block * 16 * T.key_stride());
      // All blocks of columns at once: their multiplications do not wait for each other.
      const u32 columns =
          base + kMap.keys + static_cast<u32>((lane % 8 + lane / 16 * 8) * T.key_stride() + lane / 8 % 2 * 16);
      float acc[C / 16][2][4] = {};
#pragma unroll 2
      for (int k = 0; k < T.key_dim / 16; ++k) {
        u32 a[4];
        ptx::load_matrix4(a, rows + static_cast<u32>(lane % 16 * T.key_stride() + (2 * k + lane / 16) * 16));
#pragma unroll
        for (int other = 0; other < C / 16; ++other) {
          if (other > block) continue;
          u32 b[4];
          ptx::load_matrix4(b, columns + static_cast<u32>(other * 16 * T.key_stride() + k * 32));
          ptx::mma_m16n8k16(acc[other][0], a, b[0], b[1]);
          ptx::mma_m16n8k16(acc[other][1], a, b[2], b[3]);
        }
      }
      // Of the keys transposed: A is wanted that way.
      float* products = reinterpret_cast<float*>(smem + (item < C / 16 ? kMap.keys_keys : kMap.queries_keys));
#pragma unroll
      for (int other = 0; other < C / 16; ++other) {
        if (other > block) continue;
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const int row = block * 16 + 8 * h + lane / 4;
            const int column = other * 16 + 8 * n + lane % 4 * 2;
            const float x = acc[other][n][2 * h];
            const float y = acc[other][n][2 * h + 1];
            if (item < C / 16) {
              products[column * kStride + row] = x;
              products[(column + 1) * kStride + row] = y;
            } else {
              *reinterpret_cast<float2*>(products + row * kStride + column) = make_float2(x, y);
            }
          }
      }
    }
    if (warp < shape.ratio()) {
      // c: sums over C / 32 tokens of a lane, then over lanes.
      float* own = gates_of + warp * 2 * C + lane * (C / 32);
      float g[C / 32];
      float total = 0.0f;
#pragma unroll
      for (int i = 0; i < C / 32; ++i) g[i] = total += own[i];
      float before = total;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const float other = __shfl_up_sync(kAll, before, d);
        if (lane >= d) before += other;
      }
      before -= total;
#pragma unroll
      for (int i = 0; i < C / 32; ++i) own[i] = before + g[i];
    }

    const float* keys_keys = reinterpret_cast<const float*>(smem + kMap.keys_keys);
    const float* queries_keys = reinterpret_cast<const float*>(smem + kMap.queries_keys);
    const float scale = rsqrtf(static_cast<float>(T.key_dim));
    const auto decay = [](float from, float to) { return ptx::exp2_approx((to - from) * 1.4426950408889634f); };
    // From here on a group of warps has a value head by itself.
    constexpr int kGroupThreads = kPrepareThreads / kPrepareGroups;
    constexpr int kGroupWarps = kGroupThreads / 32;
    const int group = warp / kGroupWarps;
    const int own_warp = warp % kGroupWarps;
    const int own_tid = tid % kGroupThreads;
    float* matrix = reinterpret_cast<float*>(smem + kMap.matrices + static_cast<u32>(group) * prepare_square(T));
    team_sync();  // the products are there, and nobody reads keys any more
#pragma unroll 1
    for (int index = group; index < shape.ratio(); index += kPrepareGroups) {
      const long long head_place = chunk * shape.value_heads + first_head + index;
      const float* sums = gates_of + index * 2 * C;  // c, beta
      float* gates = reinterpret_cast<float*>(args.space + args.at.gates + head_place * T.gate_bytes());
      if (Beside && own_tid == 0) reinterpret_cast<int*>(args.space + args.at.stored)[head_place] = 0;
      for (int i = own_tid; i < C; i += kGroupThreads) {
        gates[i] = expf(sums[i]);
        gates[C + i] = expf(sums[C - 1] - sums[i]);
      }
      {
        float row_sum[C / 32], row_beta[C / 32];
#pragma unroll
        for (int i = 0; i < C / 32; ++i) {
          row_sum[i] = sums[32 * i + lane];
          row_beta[i] = sums[C + 32 * i + lane];
        }
#pragma unroll 2
        for (int column = own_warp; column < C; column += kGroupWarps) {
          const float from = sums[column];
#pragma unroll
          for (int i = 0; i < C / 32; ++i) {
            const int at = column * kStride + 32 * i + lane;
            if (32 * i + lane > column) matrix[at] = row_beta[i] * keys_keys[at] * decay(from, row_sum[i]);
          }
        }
      }
      // Of P and T a thread has eight columns of every so many rows, 16 bytes each.
      constexpr int kPieces = C / 8;
      constexpr int kRows = kGroupThreads / kPieces;
      const int first_column = own_tid % kPieces * 8;
      const auto eight = [](const float* from, float(&x)[8]) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float4 four = reinterpret_cast<const float4*>(from)[j];
          x[4 * j] = four.x;
          x[4 * j + 1] = four.y;
          x[4 * j + 2] = four.z;
          x[4 * j + 3] = four.w;
        }
      };
      const auto put = [&](u8* to, int row, const float(&x)[8], bool rests) {
        Split s[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) s[j] = split(x[2 * j], x[2 * j + 1]);
        u8* at = to + T.square_place(row, first_column);
        *reinterpret_cast<uint4*>(at) = make_uint4(s[0].high, s[1].high, s[2].high, s[3].high);
        if (rests) {
          *reinterpret_cast<uint4*>(at + T.square_bytes() / 2) = make_uint4(s[0].low, s[1].low, s[2].low, s[3].low);
        }
      };
      u8* scores = args.space + args.at.scores + head_place * T.score_bytes();
      {
        float from[8];
        eight(sums + first_column, from);
#pragma unroll 1
        for (int row = own_tid / kPieces; row < C; row += kRows) {
          float p[8];
          eight(queries_keys + row * kStride + first_column, p);
          const float to = sums[row];
#pragma unroll
          for (int j = 0; j < 8; ++j) {
            // Above the diagonal the exponent is positive, and the products were not formed.
            p[j] = first_column + j <= row ? p[j] * scale * decay(from[j], to) : 0.0f;
          }
          put(scores, row, p, !T.wgmma);
        }
      }
      ptx::barrier_sync(group_barrier + group, kGroupThreads);
      if (own_warp < C / 32) {
        // Half a warp has a block of the diagonal, a lane one column of its inverse: what is known of it is taken off
        // all that follows.
        const int block = own_warp * 2 + lane / 16;
        const int column = lane % 16;
        float* own = matrix + block * 16 * kStride + block * 16;
        float t[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) t[i] = i == column ? 1.0f : 0.0f;
#pragma unroll
        for (int k = 0; k < 15; ++k) {
          float a[16];  // column k of A
#pragma unroll
          for (int i = (k + 1) / 4 * 4; i < 16; i += 4) {
            const float4 x = *reinterpret_cast<const float4*>(own + k * kStride + i);
            a[i] = x.x;
            a[i + 1] = x.y;
            a[i + 2] = x.z;
            a[i + 3] = x.w;
          }
#pragma unroll
          for (int i = k + 1; i < 16; ++i) t[i] -= a[i] * t[k];
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 16; ++i) own[i * kStride + column] = t[i];
      }
      ptx::barrier_sync(group_barrier + group, kGroupThreads);
#pragma unroll 1
      for (int distance = 1; distance < C / 16; ++distance) {
        if (own_warp < C / 16 - distance) {
          const int i = own_warp + distance;
          const int j = own_warp;
          float acc[2][4] = {};
#pragma unroll 1
          for (int k = j; k < i; ++k) {
            multiply_block<true>(acc, matrix + k * 16 * kStride + i * 16, matrix + k * 16 * kStride + j * 16, kStride,
                                 lane);
          }
          float* own = matrix + i * 16 * kStride + j * 16;
          float* to = own + lane / 4 * kStride + lane % 4 * 2;
          const auto put = [&](float sign) {
#pragma unroll
            for (int n = 0; n < 2; ++n)
#pragma unroll
              for (int h = 0; h < 2; ++h) {
                *reinterpret_cast<float2*>(to + 8 * h * kStride + 8 * n) =
                    make_float2(sign * acc[n][2 * h], sign * acc[n][2 * h + 1]);
              }
          };
          put(1.0f);
          __syncwarp();
#pragma unroll
          for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) acc[n][e] = 0.0f;
          multiply_block<false>(acc, matrix + i * 16 * kStride + i * 16, own, kStride, lane);
          __syncwarp();
          put(-1.0f);
        }
        ptx::barrier_sync(group_barrier + group, kGroupThreads);
      }
      u8* out = args.space + args.at.inverse + head_place * T.square_bytes();
      float beta[8];
      eight(sums + C + first_column, beta);
#pragma unroll 1
      for (int row = own_tid / kPieces; row < C; row += kRows) {
        float x[8] = {};
        if (first_column / 16 <= row / 16) {
          eight(matrix + row * kStride + first_column, x);
#pragma unroll
          for (int j = 0; j < 8; ++j) x[j] *= beta[j];
        }
        put(out, row, x, true);
      }
      ptx::barrier_sync(group_barrier + group, kGroupThreads);
      if constexpr (Beside) {
        // A warp for each, so that their fences run at the same time.
        if (own_warp < T.splits()) {
          ptx::raise_flag(args.flags + head_place * T.splits() + own_warp, 1, lane);
        }
      }
    }
    if constexpr (Beside) team_sync();  // inputs lie where the other group may still read its products
  } while (Beside);
}

}  // namespace fourfold::gdn
