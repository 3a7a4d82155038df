// Expert GEMMs for two to eight tokens, as two kernels that are a whole layer and overlap:
//   gate-up  writes h x router weight x down's tensor scale of every (token, expert), bf16
//   down     adds up all experts in its accumulators and writes the final bf16 rows
//
// The columns of a multiplication are the tokens, in both kernels and for every expert: column t is token t. What comes
// of a token that did not choose the expert is not stored in gate-up, and is multiplied with zeros in down. So nothing
// is sorted. Every CTA works out for itself which experts the batch chose (a bit for each, `chosen`), and takes them in
// an order that depends on their ids only: an expert that several tokens chose is read once. A token's choices of the
// same expert are one row with the sum of their router weights.
//
// How the two kernels run side by side is as for one token: one_sm90.cuh. Gate-up's token rows stay in shared memory,
// so that its ring carries weights only. An item of gate-up is MT row tiles of one expert. A CTA of down has its MT row
// tiles for all experts, `items` apart, so that no SM has two where another has none. Warps of their own poll the words
// of h, all ones until they are there (tables.h), and bring them to the stages of down's ring: a poll takes longer than
// the multiplications of a stage, so that several must be under way.
#pragma once

#include "kernels/moe/stream_math.cuh"
#include "kernels/moe/tables.h"
#include "kernels/moe/unsorted.cuh"
#include "kernels/ptx/sm90.cuh"

namespace fourfold::moe {

namespace stream_detail {

inline constexpr int kFewWords = kMaxExperts / 32;
inline constexpr u32 kNoRow = 0xffff;
// A warp that has looked for words in vain so often (some seconds) takes them for what they are, NaN, and waits no
// more: a gate-up kernel that leaves something out makes wrong results, which the self-test sees, rather than a hang.
inline constexpr int kMostPolls = 1 << 22;

struct FewTables {
  u32 chosen[kFewWords];                  // bit i of word w: expert 32 i + w, so that the words fill up alike
  u32 tokens[kExchangeRows];              // of each chosen expert, a bit for each
  int ids[kExchangeRows];                 // as the router gave them
  int expert[kExchangeRows];              // of the chosen ones: by words, then by bits; down: of each block
  u16 choice[kExchangeRows][kFewTokens];  // of a token that chose an expert: its first choice that is this expert
  float factors[3][kExchangeRows];  // gate-up, by choices: what gate's, up's and the activation's sums are multiplied
                                    // with
  // Down. A block is an expert and as many of its tokens as a stage has room for; the first ones of all experts come
  // first, in their order.
  u16 row[kExchangeRows][kFewTokens];  // of a block's stage, a token's, or kNoRow
  int extra[kExchangeRows];            // the further blocks: expert's place + 256 x number
  int extras;
  int half;  // gate-up: OneTurn::half
};
static_assert(plan::align_up(sizeof(FewTables), plan::kVectorAlign) == plan::moe::kFewTableBytes && kFewWords == 32);

// acc += weights x token rows over units first, first + 1, ... of a stage, KU / WU of them but none from `left` on.
// `weights`: shared address of the first row tile; `row`: of this lane's row for ldmatrix, at the first of these units.
template <typename Tile, int Sets, bool Whole>
__device__ __forceinline__ void multiply_few(float (&acc)[Sets][StreamShape<Tile>::mt][4], u32 weights, u32 row,
                                             int first, int left, int lane, u32 scale_base) {
  using T = StreamShape<Tile>;
#pragma unroll
  for (int uu = 0; uu < T::ku / T::wu; ++uu) {
    const int u = first + uu;
    if (!Whole && u >= left) break;
    u32 x[2][4];
    load_matrix4(x[0], row + static_cast<u32>(uu) * (kUnitK * 2));
    load_matrix4(x[1], row + static_cast<u32>(uu) * (kUnitK * 2) + 64u);
#pragma unroll
    for (int m = 0; m < T::mt; ++m) {
      const u32 unit = weights + static_cast<u32>(m) * (T::ku * kUnitBytes) + static_cast<u32>(u) * kUnitBytes;
      const Vec4 codes = load_shared4(unit + static_cast<u32>(lane) * 16u);
      const Vec2 scale = load_shared2(unit + kUnitCodeBytes + static_cast<u32>(lane / 4) * 8u);
      const u32 words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        u32 a[4];
        dequantise(words[i], scale_pair(i < 2 ? scale.x : scale.y, i % 2 != 0, scale_base), a);
        mma_m16n8k16(acc[i % Sets][m], a, x[i / 2][i % 2 * 2], x[i / 2][i % 2 * 2 + 1]);
      }
    }
  }
}

}  // namespace stream_detail

// `Tile`: see stream_shape.h.
template <typename Tile>
__global__ void __launch_bounds__(StreamShape<Tile>::threads, StreamShape<Tile>::resident)
    moe_few(const __grid_constant__ GemmArgs args) {
  using namespace stream_detail;
  using T = StreamShape<Tile>;
  static_assert(T::few && T::nt == 1 && (T::rows == kFewTokens || !T::gate_up) && T::wm == 1 && T::wk > 1);
  static_assert(T::gate_up == (T::row_units > 0));
  constexpr int kRowTiles = T::mt;
  constexpr int kConsumers = T::wk;
  constexpr int kHelpers = T::producers - 1;  // gate-up: finishers, down: what brings h
  constexpr int kSets = T::mt == 1 ? 2 : 1;
  constexpr int kPairs = T::pairs;
  constexpr bool kAlone = plan::moe::multiplies_alone(T::tile);
  constexpr u32 kRowStride = T::kRowStride;
  static_assert(T::gate_up || (T::stages % kHelpers == 0 && T::ku % 4 == 0 && T::rows % 2 == 0));

  FOURFOLD_DYNAMIC_SHARED(smem);
  const u32 base = shared_address(smem);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  FewTables& tables = *reinterpret_cast<FewTables*>(smem + T::kChoices);
  const UnsortedBarriers<Tile> bars{base + T::kBarriers};
  if (threadIdx.x == 0) bars.init(T::gate_up ? 1 : 2, 1 + kHelpers);
  for (int i = static_cast<int>(threadIdx.x); i < kFewWords + kExchangeRows; i += T::threads) {
    (i < kFewWords ? tables.chosen[i] : tables.tokens[i - kFewWords]) = 0;
  }
  // Down: a row for the tokens that did not choose an expert.
  constexpr u32 kZeros = T::kChoices + plan::moe::kFewTableBytes;
  for (int i = static_cast<int>(threadIdx.x); i < (T::gate_up ? 0 : T::ku * 32); i += T::threads) {
    reinterpret_cast<u32*>(smem + kZeros)[i] = 0;
  }
  __syncthreads();
  // Gate-up waits for its inputs here. Down is launched once gate-up's inputs exist, so that choices may be read at
  // once, and by all of the CTA before the barrier: behind it, the CTA may say that it knows whose turn it is.
  if (T::gate_up) grid_dependency_wait();
  const int tokens = args.routing.tokens;
  const int top_k = args.routing.top_k;
  const int picks = tokens * top_k;
  const int present_half = !T::gate_up || warp == kConsumers ? args.turn->half : 0;
  const int written_rows = T::gate_up ? 0 : args.turn->rows;
  for (int p = static_cast<int>(threadIdx.x); p < picks; p += T::threads) {
    const int id = args.routing.ids[p];
    tables.ids[p] = id;
    if (id >= 0 && id < args.routing.experts) atomicOr(&tables.chosen[id % 32], 1u << id / 32);
  }
  if (T::gate_up && warp == kConsumers) {
    if (lane == 0) {
      tables.half = present_half;
      mbarrier_arrive_expect(bars.rows_full(), static_cast<u32>(tokens * args.units) * (kUnitK * 2));
    }
    if (lane < tokens) {
      bulk_copy(base + T::kRows + static_cast<u32>(lane) * kRowStride, args.source + lane * args.source_stride,
                static_cast<u32>(args.units) * (kUnitK * 2), bars.rows_full(), policy_evict_last());
    }
  }
  __syncthreads();
  if (!T::gate_up) grid_launch_dependents();

  // Chosen experts before those of this lane's word, and all of them.
  const u32 chosen = tables.chosen[lane];
  int before = __popc(chosen);
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, before, d);
    if (lane >= d) before += other;
  }
  const int count = __shfl_sync(0xffffffffu, before, 31);
  before -= __popc(chosen);

  // The tokens of each expert, and the choices that are the first of their token to be it; dealt out to `warps` warps.
  const u32 inverse = 65535u / static_cast<u32>(top_k) + 1u;
  const auto token_of = [&](int p) { return static_cast<int>(static_cast<u32>(p) * inverse >> 16); };
  const auto note_choices = [&](int first_warp, int warps) {
    for (int from = (warp - first_warp) * 32; from < picks; from += warps * 32) {
      const int p = from + lane;
      const int id = p < picks ? tables.ids[p] : -1;
      const u32 word = __shfl_sync(0xffffffffu, chosen, id & 31);
      const int place = __shfl_sync(0xffffffffu, before, id & 31) + __popc(word & ((1u << (id >> 5 & 31)) - 1u));
      const int token = token_of(p);
      bool first = id >= 0 && id < args.routing.experts;
      if (!first) continue;
#pragma unroll 4
      for (int q = token * top_k; q < p; ++q) first &= tables.ids[q] != id;
      if (!first) continue;
      tables.choice[place][token] = static_cast<u16>(p - token * top_k);
      atomicOr(&tables.tokens[place], 1u << token);
    }
  };
  // The list of chosen experts, by one warp.
  const auto list_experts = [&] {
    int place = before;
    for (u32 left = chosen; left != 0; left &= left - 1) {
      tables.expert[place++] = (__ffs(static_cast<int>(left)) - 1) * 32 + lane;
    }
  };
  if constexpr (!T::gate_up) {
    if (warp == kConsumers) list_experts();
    note_choices(0, kConsumers);
    __syncthreads();
    if (warp == 0) {
      int extras = 0;
      for (int from = 0; from < count; from += 32) {
        const int place = from + lane;
        const int more = place < count ? (__popc(tables.tokens[place]) - 1) / T::rows : 0;
        if (!__any_sync(0xffffffffu, more > 0)) continue;
        int upto = more;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
          const int other = __shfl_up_sync(0xffffffffu, upto, d);
          if (lane >= d) upto += other;
        }
        for (int i = 0; i < more; ++i) {
          tables.extra[extras + upto - more + i] = place + 256 * (i + 1);
          tables.expert[count + extras + upto - more + i] = tables.expert[place];
        }
        extras += __shfl_sync(0xffffffffu, upto, 31);
      }
      if (lane == 0) tables.extras = extras;
    }
    __syncthreads();
  }
  const int blocks = T::gate_up ? count : count + tables.extras;
  // Down: block b's expert among the chosen ones, and the rank of its first token among the expert's.
  struct BlockPlace {
    int place, first;
  };
  const auto place_of = [&](int b) -> BlockPlace {
    if (b < count) return {b, 0};
    const int extra = tables.extra[b - count];
    return {extra % 256, extra / 256 * T::rows};
  };

  const int chunks = (args.units + T::ku - 1) / T::ku;
  const int first_item = static_cast<int>(blockIdx.x);
  const int step = static_cast<int>(gridDim.x);
  // Gate-up: a group is MT neighbouring row tiles. Down: items are as many as there are CTAs, or as MT allows.
  const int row_groups = (args.row_tiles + kRowTiles - 1) / kRowTiles;
  const int spread = step < args.row_tiles ? step : args.row_tiles;
  const int down_items = row_groups > spread ? row_groups : spread;
  const int items = T::gate_up ? row_groups * count : down_items;
  const auto tile_of = [&](int group, int m) { return T::gate_up ? group * kRowTiles + m : group + m * down_items; };
  const int length = T::gate_up ? chunks : blocks * chunks;  // stages of an item
  const int rounds = (length + T::ws - 1) / T::ws;

  // [half, of gate-up][warp][row tile][lane]: partial sums of a CTA's item; a lane has rows g and g + 8 (v[2], v[3]) of
  // columns 2l and 2l + 1.
  const auto partials = [&](int half, int w, int m) -> float4& {
    return reinterpret_cast<float4*>(smem + T::kPartials)[((half * kConsumers + w) * kRowTiles + m) * 32 + lane];
  };
  // The sums of row tile m, w = 0 first.
  const auto total = [&](int half, int m) {
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int w = 0; w < kConsumers; ++w) {
      const float4 p = partials(half, w, m);
      sum.x += p.x;
      sum.y += p.y;
      sum.z += p.z;
      sum.w += p.w;
    }
    return sum;
  };

  if (warp == kConsumers) {
    // ---- weights
    if (T::gate_up) {
      list_experts();
      __syncwarp();
    }
    const u64 policy = policy_evict_first();
    const u32 tile_bytes = static_cast<u32>(args.units) * kUnitBytes;
    int brought = 0;
    int stage = 0;
    u32 parity = 1;
    for (int item = first_item; item < items; item += step) {
      int b = T::gate_up ? item / row_groups : 0;
      const int tile = tile_of(item - b * row_groups, lane);
      const bool mine = lane < kRowTiles && tile < args.row_tiles;
      const u32 tiles = static_cast<u32>(__popc(__ballot_sync(0xffffffffu, mine)));
      const u8* base_of_tile = args.weights + static_cast<u64>(static_cast<u32>(tile)) * tile_bytes;
      u32 expert = b < blocks ? static_cast<u32>(tables.expert[b]) : 0u;
      int chunk = 0;
      for (int j = 0; j < rounds * T::ws; ++j) {
        // Before the wait, so that little is left to do behind it.
        const u32 done = static_cast<u32>(chunk * T::ku);
        const u32 units = static_cast<u32>(args.units) - done;
        const u32 bytes = (units < T::ku ? units : T::ku) * kUnitBytes;
        const u8* source = base_of_tile + static_cast<u64>(expert) * args.expert_bytes + done * kUnitBytes;
        const bool last = ++chunk == chunks;
        if (last) {
          chunk = 0;
          ++b;
        }
        if (last && !T::gate_up && b < blocks) expert = static_cast<u32>(tables.expert[b]);
        mbarrier_wait(bars.empty(stage), parity);
        __syncwarp();  // every lane has seen the stage free before this warp's arrival lets the ring turn
        if (j >= length) {
          if (lane == 0) mbarrier_arrive(bars.full(stage));
        } else {
          if (lane == 0) mbarrier_arrive_expect(bars.full(stage), bytes * tiles);
          if (mine) {
            bulk_copy(base + T::kWeights + static_cast<u32>(stage) * T::kWeightStride +
                          static_cast<u32>(lane) * (T::ku * kUnitBytes),
                      source, bytes, bars.full(stage), policy);
          }
        }
        // Down takes its time to start, and then asks for weights of its own: not before this CTA's first ones.
        if (T::gate_up && ++brought == 2) grid_launch_dependents();
        if (++stage == T::stages) {
          stage = 0;
          parity ^= 1u;
        }
      }
    }
    if (T::gate_up) grid_launch_dependents();
    if constexpr (!T::gate_up) end_turn(args.turn, present_half, picks, lane);
  } else if (T::gate_up && warp > kConsumers) {
    // ---- gate-up: h. Finishers take items in turn, each those of one buffer.
    note_choices(kConsumers + 1, kHelpers);
    __syncwarp();
    if (lane == 0) mbarrier_arrive(bars.rows_full());
    for (int p = (warp - kConsumers - 1) * 32 + lane; p < picks; p += kHelpers * 32) {
      const int id = tables.ids[p];
      if (id < 0 || id >= args.routing.experts) continue;
      float weight = 0.0f;  // right for first choices only
      for (int q = p; q < (token_of(p) + 1) * top_k; ++q) {
        if (tables.ids[q] == id) weight += args.routing.weights[q];
      }
      tables.factors[0][p] = args.scales[T::relu2 ? id : id * 2] * kEpilogueScale;
      if (!T::relu2) tables.factors[1][p] = args.scales[id * 2 + 1] * kEpilogueScale;
      tables.factors[2][p] = weight * args.down_scales[id];
    }
    barrier_sync(2, kHelpers * 32);
    const int half = warp - kConsumers - 1;
    const int g = lane / 4;
    const int l = lane % 4;
    const bool odd = g % 2 != 0;  // which of its columns this lane stores: rows g - g % 2 and the next are a word
    u32* out = static_cast<u32*>(args.out) + tables.half * (kExchangeRows * args.out_stride / 2) + g / 2;
    u32 parity = 0;
    for (int item = first_item + half * step; item < items; item += kHelpers * step) {
      mbarrier_wait(bars.summed(half), parity);
      parity ^= 1u;
      float4 sums[kRowTiles];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) sums[m] = total(half, m);
      __syncwarp();
      if (lane == 0) mbarrier_arrive(bars.taken(half));
      const int b = item / row_groups;
      // 0 where the token did not choose this expert: its sums may be anything, and are not stored.
      const u32 chose = tables.tokens[b] >> (2 * l);
      const int pick[2] = {(chose & 1u) != 0 ? 2 * l * top_k + tables.choice[b][2 * l] : 0,
                           (chose & 2u) != 0 ? (2 * l + 1) * top_k + tables.choice[b][2 * l + 1] : 0};
      const bool stores = (chose & (odd ? 2u : 1u)) != 0;
      u32* row = out + (odd ? pick[1] : pick[0]) * (args.out_stride / 2);
      const auto store = [&](u32* at, const float(&h)[2]) {
        const float other = __shfl_xor_sync(0xffffffffu, odd ? h[0] : h[1], 4);
        const u32 word = odd ? to_bf16x2(other, h[1]) : to_bf16x2(h[0], other);
        if (stores) store_exchanged(at, word);
      };
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        const int tile = tile_of(item - b * row_groups, m);
        if (tile >= args.row_tiles) break;
        const float low[2] = {sums[m].x, sums[m].y};
        const float high[2] = {sums[m].z, sums[m].w};
        float h[2];
        if constexpr (T::relu2) {
          u32* at = row + tile * 8;
#pragma unroll
          for (int e = 0; e < 2; ++e) h[e] = relu2(low[e] * tables.factors[0][pick[e]]) * tables.factors[2][pick[e]];
          store(at, h);
#pragma unroll
          for (int e = 0; e < 2; ++e) h[e] = relu2(high[e] * tables.factors[0][pick[e]]) * tables.factors[2][pick[e]];
          store(at + 4, h);
        } else {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            h[e] = swiglu(low[e] * tables.factors[0][pick[e]], high[e] * tables.factors[1][pick[e]], args.limit) *
                   tables.factors[2][pick[e]];
          }
          store(row + tile * 4, h);
        }
      }
    }
  } else if (!T::gate_up && warp > kConsumers) {
    // ---- down: rows of h. Each of these warps has the ring's stages in turn.
    constexpr int kPieces = T::ku / 4;  // of 16 bytes of a row, of one lane
    constexpr int kBatch = 2;           // rows at a time
    const int helper = warp - kConsumers - 1;
    const long long row_words = args.source_stride / 2;
    const u32* source =
        reinterpret_cast<const u32*>(args.source) + present_half * (kExchangeRows * row_words) + lane * 4;
    int polls = kMostPolls;
    int stage = 0;
    u32 parity = 1;
    for (int item = first_item; item < items; item += step) {
      int b = 0;
      int chunk = 0;
      for (int j = 0; j < rounds * T::ws; ++j) {
        if (stage % kHelpers == helper) {
          bool free = false;
          const auto wait_free = [&] {
            if (!free) mbarrier_wait(bars.empty(stage), parity);
            free = true;
          };
          const BlockPlace at = j < length ? place_of(b) : BlockPlace{0, 0};
          u32 tokens_left = j < length ? tables.tokens[at.place] : 0;
          for (int i = 0; i < at.first; ++i) tokens_left &= tokens_left - 1;
          const int pieces = (args.inner_blocks - chunk * (T::ku * 4)) * 2 - lane;  // beyond these h is zero
          for (int first = 0; first < T::rows && tokens_left != 0; first += kBatch) {
            int token[kBatch];
            const u32* row[kBatch];
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
              token[i] = tokens_left != 0 ? __ffs(static_cast<int>(tokens_left)) - 1 : -1;
              tokens_left &= tokens_left - 1;
              const int k = token[i] >= 0 ? tables.choice[at.place][token[i]] : 0;
              row[i] = source + (token[i] * top_k + k) * row_words + chunk * (T::ku * 32);
            }
            Vec4 words[kBatch][kPieces];
            for (;;) {
              bool missing = false;
#pragma unroll
              for (int i = 0; i < kBatch; ++i)
#pragma unroll
                for (int k = 0; k < kPieces; ++k) {
                  Vec4& v = words[i][k];
                  v = token[i] >= 0 && k * 32 < pieces ? load_exchanged4(row[i] + k * 128) : Vec4{0, 0, 0, 0};
                }
#pragma unroll
              for (int i = 0; i < kBatch; ++i)
#pragma unroll
                for (int k = 0; k < kPieces; ++k) {
                  const Vec4& v = words[i][k];
                  missing |= v.x == kUnwritten || v.y == kUnwritten || v.z == kUnwritten || v.w == kUnwritten;
                }
              if (!__any_sync(0xffffffffu, missing) || --polls < 0) break;
            }
            wait_free();
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
              if (token[i] < 0) continue;
              unsigned char* to = smem + T::kRows + static_cast<u32>(stage) * T::kRowStageStride +
                                  static_cast<u32>(first + i) * kRowStride + static_cast<u32>(lane) * 16u;
#pragma unroll
              for (int k = 0; k < kPieces; ++k) {
                const Vec4& v = words[i][k];
                *reinterpret_cast<uint4*>(to + k * 512) = make_uint4(v.x, v.y, v.z, v.w);
              }
            }
          }
          wait_free();
          __syncwarp();
          if (lane == 0) mbarrier_arrive(bars.full(stage));
        }
        if (++stage == T::stages) {
          stage = 0;
          parity ^= 1u;
        }
        if (++chunk == chunks) {
          chunk = 0;
          ++b;
        }
      }
    }
  } else {
    // ---- consumers
    const int ws = warp / T::wu;
    const int first_unit = warp % T::wu * (T::ku / T::wu);
    const int g = lane / 4;
    const int l = lane % 4;
    const u32 scale_base = opaque_scale_base(args.zero);
    // ldmatrix: lanes 0-7 address the rows at K 0..7 of a block, 8-15 at 8..15, 16-31 the same of the next block
    const u32 matrix_row = static_cast<u32>(lane % 8);
    const u32 matrix_k = static_cast<u32>(lane / 8) * 16u + static_cast<u32>(first_unit) * (kUnitK * 2);
    u32 stage = static_cast<u32>(ws);
    u32 parity = 0;
    int half = 0;  // of the partial sums
    u32 taken_parity = 1;
    if constexpr (T::gate_up) {
      mbarrier_wait(bars.rows_full(), 0);
    } else {
      for (int i = static_cast<int>(threadIdx.x); i < blocks * kFewTokens; i += kConsumers * 32) {
        const BlockPlace at = place_of(i / kFewTokens);
        const u32 token = static_cast<u32>(i % kFewTokens), chose = tables.tokens[at.place];
        const u32 rank = static_cast<u32>(__popc(chose & ((1u << token) - 1u)) - at.first);
        tables.row[i / kFewTokens][token] =
            static_cast<u16>((chose >> token & 1u) != 0 && rank < T::rows ? rank : kNoRow);
      }
      barrier_sync(1, kConsumers * 32);
      // The other half becomes unwritten again; what read it has ended.
      const long long row_words = args.source_stride / 2;
      u32* other =
          reinterpret_cast<u32*>(const_cast<u16*>(args.source)) + (present_half ^ 1) * (kExchangeRows * row_words);
      const int words = written_rows * static_cast<int>(row_words);
      for (int i = (first_item * (kConsumers * 32) + static_cast<int>(threadIdx.x)) * 4; i < words;
           i += step * (kConsumers * 32) * 4) {
        clear_exchanged4(other + i);
      }
    }

    // What lane x pair p of units of one token's row is to multiply_one, at K `at` of the row; beyond `left`: nothing.
    const auto pair_words = [&](u32 at, int left, u32(&x)[kPairs][2]) {
#pragma unroll
      for (int p = 0; p < kPairs; ++p) {
        const int unit = first_unit + 2 * p + g / 4;
#pragma unroll
        for (u32 i = 0; i < 2; ++i) {
          x[p][i] = 0;
          if (unit >= left) continue;
          x[p][i] =
              mul_bf16x2(load_shared1(at + static_cast<u32>(unit * 128 + g % 4 * 32 + l * 4) + i * 16u), kOneTokenPair);
        }
      }
    };
    u32 masks[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) masks[q] = g / 2 == q ? 0xffffffffu : 0u;

    for (int item = first_item; item < items; item += step) {
      float acc[kSets][T::mt][4] = {};
      int b = T::gate_up ? item / row_groups : ws / chunks;
      int chunk = T::gate_up ? ws : ws % chunks;
      // A single token of an expert: sums of all columns are its, see multiply_one().
      float sums[T::mt][2] = {};
      const u32 chose = kAlone ? tables.tokens[b] : 0;
      const bool alone = kAlone && (chose & (chose - 1)) == 0;
      u32 row_index = T::gate_up   ? alone ? static_cast<u32>(__ffs(static_cast<int>(chose)) - 1) : matrix_row
                      : b < blocks ? tables.row[b][matrix_row]
                                   : kNoRow;
      for (int r = 0; r < rounds; ++r) {
        u32 row = base + T::kRows + row_index * kRowStride;
        if constexpr (T::gate_up) {
          row += static_cast<u32>(chunk) * (T::ku * kUnitK * 2);
        } else {
          row = row_index != kNoRow ? row + stage * T::kRowStageStride : base + kZeros;
        }
        const int left = !T::gate_up && b >= blocks ? 0 : args.units - chunk * T::ku;
        chunk += T::ws;
        if constexpr (!T::gate_up) {
          while (chunk >= chunks) {
            chunk -= chunks;
            ++b;
          }
          row_index = b < blocks ? tables.row[b][matrix_row] : kNoRow;
        }
        mbarrier_wait(bars.full(stage), parity);
        const u32 weights = base + T::kWeights + stage * T::kWeightStride;
        if (alone) {
          u32 x[kPairs][2];
          pair_words(row, left, x);
          if (left >= T::ku) {
            multiply_one<Tile, true>(sums, weights, x, masks, first_unit, left, lane, scale_base);
          } else {
            multiply_one<Tile, false>(sums, weights, x, masks, first_unit, left, lane, scale_base);
          }
        } else if (left >= T::ku) {
          multiply_few<Tile, kSets, true>(acc, weights, row + matrix_k, first_unit, left, lane, scale_base);
        } else {
          multiply_few<Tile, kSets, false>(acc, weights, row + matrix_k, first_unit, left, lane, scale_base);
        }
        __syncwarp();
        if (lane == 0) mbarrier_arrive(bars.empty(stage));
        stage += T::ws;
        if (stage >= static_cast<u32>(T::stages)) {
          stage -= static_cast<u32>(T::stages);
          parity ^= 1u;
        }
      }
      if (alone) {
#pragma unroll
        for (int m = 0; m < T::mt; ++m) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            float v = sums[m][h];
            v += __shfl_xor_sync(0xffffffffu, v, 1);
            v += __shfl_xor_sync(0xffffffffu, v, 2);
            acc[0][m][2 * h] = acc[0][m][2 * h + 1] = v * (kOneEpilogueScale / kEpilogueScale);
          }
        }
      }

      if (T::gate_up) {
        mbarrier_wait(bars.taken(half), taken_parity);
      } else if (item != first_item) {
        barrier_sync(1, kConsumers * 32);  // the sums of the item before have been added up
      }
#pragma unroll
      for (int m = 0; m < T::mt; ++m) {
        float(&v)[4] = acc[0][m];
#pragma unroll
        for (int i = 0; i < 4 && kSets == 2; ++i) v[i] += acc[kSets - 1][m][i];
        partials(half, warp, m) = make_float4(v[0], v[1], v[2], v[3]);
      }
      if constexpr (T::gate_up) {
        __syncwarp();
        if (lane == 0) mbarrier_arrive(bars.summed(half));
      } else {
        // Row tile m is added up and finished by warp m.
        barrier_sync(1, kConsumers * 32);
        const int tile = tile_of(item, warp);
        if (warp < T::mt && tile < args.row_tiles) {
          const float4 sum = total(half, warp);
          u16* out = static_cast<u16*>(args.out) + 2 * l * args.out_stride + tile * 16 + g;
          if (2 * l < tokens) {
            out[0] = to_bf16(sum.x * kEpilogueScale);
            out[8] = to_bf16(sum.z * kEpilogueScale);
          }
          if (2 * l + 1 < tokens) {
            out[args.out_stride] = to_bf16(sum.y * kEpilogueScale);
            out[args.out_stride + 8] = to_bf16(sum.w * kEpilogueScale);
          }
        }
      }
      if (T::gate_up) half ^= 1;
      if (half == 0) taken_parity ^= 1u;
    }
  }
}

}  // namespace fourfold::moe
