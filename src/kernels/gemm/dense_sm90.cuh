// Products of many rows by wgmma: dequantised weights are the register operand (64 rows), the tokens lie in swizzled
// shared memory. A CTA multiplies 256 weight rows with a block of tokens: two consumer warpgroups of 128 rows, two
// accumulators each, and four producer warps that bring units by bulk copies and pieces of x by tensor copies. It is
// persistent, so that the next item's data comes while sums are stored. While one block of 16 columns is multiplied the
// next is dequantised. A lane has two tokens of a row of weights, outputs lie along these rows: bf16 sums are exchanged
// in shared memory and stored 16 bytes at a time.
//
// Where there are fewer such items than SMs, several CTAs share an item's columns, and so they do with the items that
// are left behind the last round of all SMs. Each warp stores its sums; the warp that comes last of those with the same
// rows adds them up in the order of the columns. Which one that is differs from
// run to run, so that the adding is spread over the SMs; the sum does not.
#pragma once

#include "kernels/gemm/dense_parts.cuh"
#include "kernels/ptx/wgmma_sm90.cuh"

namespace fourfold::gemm {

namespace wide_detail {

using namespace ptx;
using dense_detail::Group;
using dense_detail::run_group_of;

struct Ring {
  int stage;
  u32 phase;
};

template <typename Tile>
struct Barriers {
  u32 at;
  __device__ __forceinline__ u32 full(int stage) const { return at + 8u * static_cast<u32>(stage); }
  __device__ __forceinline__ u32 empty(int stage) const { return full(Tile::value.stages + stage); }
};

// What a CTA multiplies at a time. Producers leave it in shared memory, in a place of its first stage: whoever
// multiplies need not work it out.
struct alignas(16) Item {
  Group group;
  int index;  // of rows and tokens, without the split
  int first_token;
  int split;
  int first_unit, end_unit;
};
static_assert(sizeof(Item) == kWideItem);
template <typename Tile>
__device__ __forceinline__ int item_count(const DenseArgs& args) {
  static constexpr WideTile T = Tile::value;
  const int items = wide_items(T, args.matrix, args.tokens);
  return args.splits > 1 ? args.whole + (items - args.whole) * args.splits : items;
}
template <typename Tile>
__device__ __forceinline__ Item item_of(const DenseArgs& args, int number) {
  static constexpr WideTile T = Tile::value;
  const int blocks = (args.tokens + T.tokens - 1) / T.tokens;
  const bool split = args.splits > 1 && number >= args.whole;
  Item item;
  item.index = split ? args.whole + (number - args.whole) / args.splits : number;
  item.split = split ? (number - args.whole) % args.splits : 0;
  const WidePlace place = wide_place(run_groups(args.matrix, kWideTiles), blocks, args.band, item.index);
  item.group = run_group_of(args.matrix, place.group, kWideTiles);
  item.first_token = place.block * T.tokens;
  item.first_unit = split ? item.split * args.split_units : 0;
  const int end = item.first_unit + args.split_units;
  item.end_unit = split && end < args.matrix.units ? end : args.matrix.units;
  return item;
}

// Where a producer warp's row tiles of an item begin in memory.
inline constexpr int kSources = kWideTiles / kWideProducers;
struct Sources {
  const u8* weights[kSources];
};
static_assert(sizeof(Sources) == kWideSources);
__device__ __forceinline__ int tiles_of(const Group& group, int warp) {  // that are there
  const int left = group.tiles - warp * kSources;
  return left < 0 ? 0 : left < kSources ? left : kSources;
}
__device__ __forceinline__ Sources sources_of(const Matrix& m, const Group& group, int warp) {
  Sources s;
  const int tiles = tiles_of(group, warp);
  const u64 stride = static_cast<u64>(m.units) * static_cast<u32>(unit_bytes(m.parts[group.part].format));
  int p = group.part;
#pragma unroll
  for (int i = 0; i < kSources; ++i) {
    const int tile = group.first + warp * kSources + (i < tiles ? i : 0);
    while (p + 1 < m.count && tile >= m.parts[p + 1].first_tile) ++p;
    const Part& part = m.parts[p];
    s.weights[i] = part.weights + static_cast<u64>(tile - part.first_tile) * stride;
  }
  return s;
}

// One lane of each producer warp: of a stage the units of a quarter of the row tiles, and one unit's columns of x. What
// the next item is and where its weights are is worked out, a piece at a time, while this one's stages are full: behind
// the last unit they would run empty meanwhile.
template <typename Tile>
__device__ __forceinline__ void produce(const TensorMap& x, const DenseArgs& args, u8* smem, u32 base) {
  static constexpr WideTile T = Tile::value;
  static constexpr WideMap kMap = wide_map(T);
  constexpr u32 kRowBytes = T.tokens * 128u;  // of a unit
  const Barriers<Tile> bars{base + kMap.barriers};
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int items = item_count<Tile>(args);
  // Whether the next block of tokens wants the same weights.
  const u64 policy = args.tokens > T.tokens ? policy_evict_last() : policy_evict_first();
  // Of this warp: what it knows of the next item.
  u8* const ahead = smem + kMap.ahead + static_cast<u32>(warp) * (kWideItem + kWideSources);
  const auto look_ahead = [&](int number, bool known) {
    if (!known) {
      *reinterpret_cast<Item*>(ahead) = item_of<Tile>(args, number);
    } else {
      *reinterpret_cast<Sources*>(ahead + kWideItem) =
          sources_of(args.matrix, reinterpret_cast<const Item*>(ahead)->group, warp);
    }
  };
  Ring ring{0, 1};
  int known = 0;  // of the next item: nothing, what it is, where its weights are, too
  for (int number = static_cast<int>(blockIdx.x); number < items; number += static_cast<int>(gridDim.x)) {
    for (; known < 2; ++known) look_ahead(number, known > 0);
    const Item item = *reinterpret_cast<const Item*>(ahead);
    const Sources from = *reinterpret_cast<const Sources*>(ahead + kWideItem);
    const int next = number + static_cast<int>(gridDim.x);
    known = 0;
    const Weights format = args.matrix.parts[item.group.part].format;
    const u32 bytes = static_cast<u32>(unit_bytes(format));
    const int at_once = T.units(format);
    const int tiles = tiles_of(item.group, warp);
    for (int unit = item.first_unit; unit < item.end_unit; unit += at_once) {
      const int count = item.end_unit - unit < at_once ? item.end_unit - unit : at_once;
      mbarrier_wait(bars.empty(ring.stage), ring.phase);
      if (warp == 0 && unit == item.first_unit) {
        *reinterpret_cast<Item*>(smem + kMap.items + static_cast<u32>(ring.stage) * kWideItem) = item;
      }
      const u32 bar = bars.full(ring.stage);
      const u32 tile_bytes = static_cast<u32>(count) * bytes;
      mbarrier_arrive_expect(bar, static_cast<u32>(tiles) * tile_bytes + (warp < count ? kRowBytes : 0u));
      const u32 to = base + kMap.weights + static_cast<u32>(ring.stage) * kMap.weight_stride +
                     static_cast<u32>(warp * kSources * at_once) * bytes;
#pragma unroll
      for (int i = 0; i < kSources; ++i) {
        if (i < tiles) {
          bulk_copy(to + static_cast<u32>(i * at_once) * bytes, from.weights[i] + static_cast<u64>(unit) * bytes,
                    tile_bytes, bar, policy);
        }
      }
      if (warp < count) {
        tensor_copy_rows(
            base + kMap.rows + static_cast<u32>(ring.stage) * kMap.row_stride + static_cast<u32>(warp) * kRowBytes, x,
            (unit + warp) * kUnitK, item.first_token, T.tokens, bar);
      }
      if (++ring.stage == T.stages) ring = {0, ring.phase ^ 1u};
      if (known < 2 && next < items) {
        look_ahead(next, known > 0);
        ++known;
      }
    }
  }
}

// The words of a unit's fragments, of one row tile; `InPlace`: bf16, fragments are loaded as they are, each when it is
// wanted.
template <Weights F, bool InPlace = false>
struct UnitWords {
  Vec4 w[F == Weights::kBf16 ? 4 : F == Weights::kFp8 ? 2 : 1];
  Vec2 scale;

  __device__ __forceinline__ void load(u32 unit, int lane) {
#pragma unroll
    for (u32 i = 0; i < sizeof(w) / sizeof(Vec4); ++i)
      w[i] = load_shared4(unit + i * 512u + static_cast<u32>(lane) * 16u);
    if constexpr (F == Weights::kNvfp4) {
      scale = load_shared2(unit + moe::kUnitCodeBytes + static_cast<u32>(lane / 4) * 8u);
    }
  }
  // Into registers of its own: of bf16 the words would do, but those of the next unit are loaded into them while the
  // multiplication still reads.
  template <int J>
  __device__ __forceinline__ void fragment(u32 scale_base, u32 zero, u32 (&a)[4]) const {
    if constexpr (F == Weights::kBf16) {
      a[0] = or_pinned(w[J].x, zero);
      a[1] = or_pinned(w[J].y, zero);
      a[2] = or_pinned(w[J].z, zero);
      a[3] = or_pinned(w[J].w, zero);
    } else if constexpr (F == Weights::kFp8) {
      if constexpr (J % 2 == 0) {
        fp8_fragment(w[J / 2].x, w[J / 2].y, a);
      } else {
        fp8_fragment(w[J / 2].z, w[J / 2].w, a);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = mul_bf16x2_pinned(a[i], kFp8Pair);
    } else {
      const u32 word = J == 0 ? w[0].x : J == 1 ? w[0].y : J == 2 ? w[0].z : w[0].w;
      moe::dequantise<true>(word, moe::scale_pair(J < 2 ? scale.x : scale.y, J % 2 != 0, scale_base), a);
    }
  }
};

template <>
struct UnitWords<Weights::kBf16, true> {
  u32 at;

  __device__ __forceinline__ void load(u32 unit, int lane) { at = unit + static_cast<u32>(lane) * 16u; }
  template <int J>
  __device__ __forceinline__ void fragment(u32, u32, u32 (&a)[4]) const {
    const Vec4 w = load_shared4(at + static_cast<u32>(J) * 512u);
    a[0] = w.x;
    a[1] = w.y;
    a[2] = w.z;
    a[3] = w.w;
  }
};

// This warp's sums over its part of the columns become those over all of them, if it is the last of the warps with the
// same rows; the others are done.
template <int N>
__device__ __forceinline__ bool add_up(const DenseArgs& args, const Item& item, float (&acc)[2][N / 2], int lane) {
  constexpr int kThreads = kWideWarps * 32;
  constexpr int kPieces = N / 4;  // of four sums of a thread
  const int thread = static_cast<int>(threadIdx.x) - 128;
  const auto place = [&](int split, int piece) {
    return reinterpret_cast<float4*>(args.partial) +
           (static_cast<long long>((item.index - args.whole) * args.splits + split) * kPieces + piece) * kThreads +
           thread;
  };
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const float* v = &acc[i / (N / 8)][i % (N / 8) * 4];
    *place(item.split, i) = make_float4(v[0], v[1], v[2], v[3]);
  }
  __threadfence();
  __syncwarp();
  int* arrived = args.arrived + (item.index - args.whole) * kWideWarps + thread / 32;
  int before = 0;
  if (lane == 0) before = atomicAdd(arrived, 1);
  if (__shfl_sync(0xffffffffu, before, 0) != args.splits - 1) return false;
  if (lane == 0) *arrived = 0;
  __syncwarp();  // what lane 0 has seen, all have
  __threadfence();
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    float* v = &acc[i / (N / 8)][i % (N / 8) * 4];
    v[0] = v[1] = v[2] = v[3] = 0.0f;
  }
  // So many at a time as there are registers for beside the sums.
  constexpr int kAtOnce = kPieces < 16 ? kPieces : 16;
#pragma unroll
  for (int first = 0; first < kPieces; first += kAtOnce) {
#pragma unroll 1
    for (int split = 0; split < args.splits; ++split) {
#pragma unroll
      for (int i = first; i < first + kAtOnce; ++i) {
        const float4 part = __ldcg(place(split, i));
        float* v = &acc[i / (N / 8)][i % (N / 8) * 4];
        v[0] += part.x;
        v[1] += part.y;
        v[2] += part.z;
        v[3] += part.w;
      }
    }
  }
  return true;
}

// Sums of 32 rows of `part` from `row` on, times their factors, to bf16 rows of the output. `staging`: of this warp.
template <int N>
__device__ __forceinline__ void store_rows(const DenseArgs& args, const Part& part, int row, int first_token,
                                           const float (&acc)[2][N / 2], const float (&low)[2], const float (&high)[2],
                                           u32 staging, int lane) {
  constexpr int kAtOnce = N % 32 == 0 ? 4 : 2;  // of eight tokens
  // [token][32 rows], pieces of 16 bytes exchanged for the banks' sake
  const u32 put = staging + static_cast<u32>(lane % 8 * 64 + (lane / 8 ^ (lane % 8 / 2)) * 16);
  const u32 get = staging + static_cast<u32>(lane / 4 * 64 + (lane % 4 ^ (lane / 8)) * 16);
  u16* out =
      static_cast<u16*>(args.out) + (first_token + lane / 4) * args.out_stride + part.first_row + row + lane % 4 * 8;
#pragma unroll
  for (int first = 0; first < N / 8; first += kAtOnce) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      u32 words[4];
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const float* v = &acc[m][(first + i) * 4];
        words[2 * m] = to_bf16x2(v[0] * low[m], v[1] * low[m]);
        words[2 * m + 1] = to_bf16x2(v[2] * high[m], v[3] * high[m]);
      }
      store_matrix4_transposed(put + static_cast<u32>(i) * 512u, words);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const Vec4 v = load_shared4(get + static_cast<u32>(i) * 512u);
      const int t = (first + i) * 8;
      if (first_token + t + lane / 4 < args.tokens) {
        *reinterpret_cast<uint4*>(out + t * args.out_stride) = make_uint4(v.x, v.y, v.z, v.w);
      }
    }
    __syncwarp();
  }
}

// `part_begins`: lane p has the first row tile of part p.
template <typename Tile, Weights F>
__device__ __forceinline__ void consume(const DenseArgs& args, u32 base, Ring& ring, const Part& part, const Item& item,
                                        int part_begins, u32 scale_base) {
  static constexpr WideTile T = Tile::value;
  static constexpr WideMap kMap = wide_map(T);
  constexpr int N = T.tokens;
  constexpr int kUnits = T.units(F);
  const Barriers<Tile> bars{base + kMap.barriers};
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int first_tile = (static_cast<int>(threadIdx.x) / 128 - 1) * 8 + static_cast<int>(threadIdx.x) / 32 % 4 * 2;
  const Group& group = item.group;
  const int first_unit = item.first_unit, end_unit = item.end_unit;
  const bool cells = F == Weights::kFp8 && T.cells() && part.cells != nullptr;

  float acc[2][N / 2];
  float total[T.cells() ? 2 : 1][T.cells() ? N / 2 : 1];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if constexpr (T.cells()) total[i % 2][i / 2] = 0.0f;
  }
  const u32 zero = static_cast<u32>(args.zero);
  // A multiplication with many rows of x takes longer than a load.
  constexpr bool kInPlace = F == Weights::kBf16 && T.many();
  UnitWords<F, kInPlace> words[2];
  u32 a[2][2][4];
  u64 rows = 0, next_rows = 0;
  int in_stage = 0;
  int left = end_unit - first_unit;  // units that have not been taken
  int ended = -1, previous = -1;     // stage that ends with the unit taken last, and with the one before
  const auto take = [&] {
    if (in_stage == 0) mbarrier_wait(bars.full(ring.stage), ring.phase);
    const u32 at = base + kMap.weights + static_cast<u32>(ring.stage) * kMap.weight_stride +
                   static_cast<u32>((first_tile * kUnits + in_stage) * unit_bytes(F));
#pragma unroll
    for (int m = 0; m < 2; ++m) words[m].load(at + static_cast<u32>(m * kUnits * unit_bytes(F)), lane);
    next_rows = swizzled_descriptor(base + kMap.rows + static_cast<u32>(ring.stage) * kMap.row_stride +
                                    static_cast<u32>(in_stage * N) * 128u);
    previous = ended;
    ended = -1;
    --left;
    if (++in_stage == kUnits || left == 0) {
      ended = ring.stage;
      in_stage = 0;
      if (++ring.stage == T.stages) ring = {0, ring.phase ^ 1u};
    }
  };
  const auto prepare = [&]<int J>() {
    words[0].template fragment<J>(scale_base, zero, a[J % 2][0]);
    words[1].template fragment<J>(scale_base, zero, a[J % 2][1]);
  };
  const auto multiply = [&]<int J, bool First>() {
    wgmma_fence();
    if constexpr (First) {
      Wgmma<N>::set(acc[0], a[J % 2][0], rows + static_cast<u64>(2 * J));
      Wgmma<N>::set(acc[1], a[J % 2][1], rows + static_cast<u64>(2 * J));
    } else {
      Wgmma<N>::add(acc[0], a[J % 2][0], rows + static_cast<u64>(2 * J));
      Wgmma<N>::add(acc[1], a[J % 2][1], rows + static_cast<u64>(2 * J));
    }
    wgmma_commit();
    wgmma_wait<1>();  // the multiplication before this one is done: its fragments may be overwritten
    if constexpr (!First) {
      hold_fragment(a[1 - J % 2][0], args.zero);
      hold_fragment(a[1 - J % 2][1], args.zero);
    }
  };
  const auto drain = [&] {
    wgmma_wait<0>();
    keep_registers(acc[0]);
    keep_registers(acc[1]);
    hold_fragment(a[1][0], args.zero);
    hold_fragment(a[1][1], args.zero);
  };
  int own[2], index[2];  // part and row tile in it
  float low[2], high[2];
  // Of what the sums are for, asked for long before they are there.
  const auto look_up = [&] {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      // Tiles that are not there are as the last one, and are not stored.
      const int tile = group.first + (first_tile + m < group.tiles ? first_tile + m : group.tiles - 1);
      own[m] = __popc(__ballot_sync(0xffffffffu, part_begins <= tile)) - 1;
      const Part& part_here = args.matrix.parts[own[m]];
      index[m] = tile - part_here.first_tile;
      const float* factors = part_here.factors + static_cast<long long>(index[m]) * 16 + lane / 4;
      low[m] = factors[0] * dense_detail::dense_scale(F);
      high[m] = factors[8] * dense_detail::dense_scale(F);
    }
  };
  // A unit; where it is the first of a sum, accumulators are only written.
  const auto step = [&]<bool First>() {
    multiply.template operator()<0, First>();
    if constexpr (First && !T.cells()) look_up();
    if (previous >= 0) mbarrier_arrive(bars.empty(previous));
    prepare.template operator()<1>();
    multiply.template operator()<1, false>();
    prepare.template operator()<2>();
    multiply.template operator()<2, false>();
    prepare.template operator()<3>();
    const bool more = left > 0;
    if (kInPlace && more) take();
    multiply.template operator()<3, false>();
    if (more) {
      if (!kInPlace) take();
      rows = next_rows;
      prepare.template operator()<0>();
    }
  };
  take();
  rows = next_rows;
  prepare.template operator()<0>();
  if constexpr (T.cells()) {
    look_up();
    const int in_cell = cells ? part.cell_units : args.matrix.units;
    for (int first = first_unit, end = 0; first < end_unit; first = end) {
      const int cell = first / in_cell;
      end = (cell + 1) * in_cell < end_unit ? (cell + 1) * in_cell : end_unit;
      step.template operator()<true>();
      for (int unit = first + 1; unit < end; ++unit) step.template operator()<false>();
      drain();
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        float2 scale = make_float2(1.0f, 1.0f);
        if (cells && first_tile + m < group.tiles) {
          const int tile = group.first + first_tile + m;
          const Part& own = args.matrix.parts[part_of(args.matrix, tile)];
          scale = *(reinterpret_cast<const float2*>(own.cells) +
                    static_cast<long long>(tile - own.first_tile) * own.cell_count + cell);
        }
#pragma unroll
        for (int i = 0; i < N / 2; ++i) total[m][i] = fmaf(acc[m][i], i % 4 < 2 ? scale.x : scale.y, total[m][i]);
      }
    }
  } else {
    step.template operator()<true>();
    for (int unit = first_unit + 1; unit < end_unit; ++unit) step.template operator()<false>();
  }
  drain();
  mbarrier_arrive(bars.empty(ended));
  if constexpr (T.cells()) {
#pragma unroll
    for (int i = 0; i < N; ++i) acc[i % 2][i / 2] = total[i % 2][i / 2];
  }
  if (args.splits > 1 && item.index >= args.whole && !add_up<N>(args, item, acc, lane)) return;

  const Part &first_part = args.matrix.parts[own[0]], &second_part = args.matrix.parts[own[1]];
  const int row = index[0] * 16;
  const bool whole = first_tile + 1 < group.tiles && own[0] == own[1] && row + 32 <= first_part.rows;
  const bool aligned = ((reinterpret_cast<u64>(args.out) / 2 | static_cast<u64>(args.out_stride) |
                         static_cast<u64>(first_part.first_row)) &
                        7u) == 0;
  if (args.end == DenseEnd::kBf16 && whole && aligned) {
    const u32 staging = base + kMap.staging + static_cast<u32>(threadIdx.x / 32 - 4) * kWideStaging;
    store_rows<N>(args, first_part, row, item.first_token, acc, low, high, staging, lane);
    return;
  }
  dense_detail::with_end(args.end, [&]<DenseEnd End>() {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      if (first_tile + m >= group.tiles) continue;
#pragma unroll
      for (int n = 0; n < N / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          dense_detail::finish<End>(args, m == 0 ? first_part : second_part, index[m], lane / 4,
                                    item.first_token + n * 8 + lane % 4 * 2 + e, acc[m][n * 4 + e] * low[m],
                                    acc[m][n * 4 + 2 + e] * high[m]);
        }
      }
    }
  });
}

}  // namespace wide_detail

// Grid: wide_grid. `x`: the rows, [tokens][columns], in copies of 64 columns of a tile's tokens. `Tile` is a
// WideTileOf.
template <typename Tile>
__global__ void __launch_bounds__(kWideThreads, 1)
    gemm_wide(const __grid_constant__ ptx::TensorMap x, const __grid_constant__ DenseArgs args) {
  using namespace wide_detail;
  static constexpr WideTile T = Tile::value;
  static_assert(T.tokens % 16 == 0 && T.tokens <= (T.cells() ? 64 : 128));
  static constexpr WideMap kMap = wide_map(T);
  FOURFOLD_DYNAMIC_SHARED(smem);
  const u32 base = keep_register(shared_address(smem));
  const Barriers<Tile> bars{base + kMap.barriers};
  if (threadIdx.x == 0) {
    for (int s = 0; s < T.stages; ++s) {
      mbarrier_init(bars.full(s), kWideProducers);
      mbarrier_init(bars.empty(s), 256);  // every consumer thread: each reads its own words of the stage
    }
    fence_barrier_init();
    prefetch_tensor_map(x);
  }
  grid_launch_dependents();
  grid_dependency_wait();
  __syncthreads();
  if (threadIdx.x < 128) {
    registers_decrease<40>();
    if (one_lane()) produce<Tile>(x, args, reinterpret_cast<u8*>(smem), base);
  } else {
    registers_increase<232>();
    const u32 scale_base = moe::opaque_scale_base(args.zero);
    const int items = item_count<Tile>(args);
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int part_begins = lane < args.matrix.count ? args.matrix.parts[lane].first_tile : 0x7fffffff;
    Ring ring{0, 0};
    for (int number = static_cast<int>(blockIdx.x); number < items; number += static_cast<int>(gridDim.x)) {
      mbarrier_wait(bars.full(ring.stage), ring.phase);
      const Item item = *reinterpret_cast<const Item*>(reinterpret_cast<u8*>(smem) + kMap.items +
                                                       static_cast<u32>(ring.stage) * kWideItem);
      const Part& part = args.matrix.parts[item.group.part];
      with_format<Tile>(part.format,
                        [&]<Weights F>() { consume<Tile, F>(args, base, ring, part, item, part_begins, scale_base); });
    }
  }
}

}  // namespace fourfold::gemm
