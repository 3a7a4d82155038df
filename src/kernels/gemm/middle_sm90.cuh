// Products of few rows, but more than 16, by wgmma: such a product is a stream of weights, and short. Every SM has an
// equal share of it: items of 128 rows and up to 64 rows of x (32 where a tile is for so few), one after the other, are
// cut into shares of units of columns wherever a share ends. The sums of an item's pieces meet in memory, and each of
// its CTAs adds up a part of them, in the order of the columns; so all CTAs must have room at the same time.
//
// Eight warps multiply, a row tile each, two warpgroups beside each other; a warp copies, a row tile by each lane: one
// lane would take longer to ask for eight tiles than the SM to multiply them. Weights are asked for before
// the wait for the kernel before, and two CTAs have room on an SM: while one waits, the other one multiplies, or the
// next product's weights come.
#pragma once

#include "kernels/gemm/dense_sm90.cuh"

namespace fourfold::gemm {

namespace middle_detail {

using namespace ptx;
using dense_detail::Group;
using dense_detail::run_group_of;
using wide_detail::Ring;
using wide_detail::UnitWords;

inline constexpr int kFragments = kMiddleRows / 8;    // of a warp's sums, at most: 16 rows x 8 rows of x
inline constexpr int kConsumers = kMiddleTiles * 32;  // threads
inline constexpr int kPieceFloats4 = kFragments * kMiddleTiles * 32;  // of a CTA's part of an item, at most

template <typename Tile>
struct Barriers {
  u32 at;
  __device__ __forceinline__ u32 full(int stage) const { return at + 8u * static_cast<u32>(stage); }
  __device__ __forceinline__ u32 empty(int stage) const { return full(Tile::value.stages + stage); }
};
// By one thread, in front of a barrier of all.
template <typename Tile>
__device__ __forceinline__ void begin_ring(const Barriers<Tile>& bars, const ptx::TensorMap& x) {
  for (int s = 0; s < Tile::value.stages; ++s) {
    mbarrier_init(bars.full(s), 1);
    mbarrier_init(bars.empty(s), kMiddleTiles);
  }
  fence_barrier_init();
  prefetch_tensor_map(x);
}

// A CTA's part of an item.
struct Segment {
  int item;
  int first_unit, end_unit;
  bool whole;
};
// Items with the same weights stand beside each other.
struct Place {
  Group group;
  int first_token;
};
__device__ __forceinline__ Place place_of(const DenseArgs& args, int item, int rows) {
  const int blocks = middle_blocks(args.tokens, rows);
  return {run_group_of(args.matrix, item / blocks, kMiddleTiles), item % blocks * rows};
}
__device__ __forceinline__ Segment segment_at(const DenseArgs& args, int at, int end) {
  const int units = args.matrix.units;
  Segment s;
  s.item = at / units;
  s.first_unit = at - s.item * units;
  const int left = end - at;
  s.end_unit = s.first_unit + left < units ? s.first_unit + left : units;
  s.whole = s.first_unit == 0 && s.end_unit == units;
  return s;
}
// The CTAs that have pieces of an item, and where a CTA has put its one: the first one may have had the end of another
// item before.
struct Pieces {
  int first_cta, count;
  bool second;  // of what the first CTA has stored
};
__device__ __forceinline__ Pieces pieces_of(const DenseArgs& args, int item) {
  const int begin = item * args.matrix.units;
  const int last = begin + args.matrix.units - 1;
  Pieces p;
  p.first_cta = begin / args.split_units;
  p.count = last / args.split_units - p.first_cta + 1;
  p.second = begin != p.first_cta * args.split_units;
  return p;
}
__device__ __forceinline__ float4* piece_at(const DenseArgs& args, int cta, bool second) {
  return reinterpret_cast<float4*>(args.partial) + static_cast<long long>(2 * cta + (second ? 1 : 0)) * kPieceFloats4;
}

// The warp that copies: first the weights of as many stages as there are, then x, which the kernel before makes.
template <typename Tile>
__device__ __forceinline__ void produce(const TensorMap& x, const DenseArgs& args, u32 base, int begin, int end) {
  static constexpr MiddleTile T = Tile::value;
  static constexpr MiddleMap kMap = middle_map(T);
  constexpr u32 kRowBytes = static_cast<u32>(T.rows) * 128u;  // of a unit
  const Barriers<Tile> bars{base + kMap.barriers};
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const u64 policy = policy_evict_first();
  struct Step {
    int tiles;          // of the item
    const u8* weights;  // of this lane's tile, from the stage's first unit on
    u32 bytes;          // of a unit
    int at_once, count;
    int unit, first_token;
  };
  // body(step): for each stage of the share, until it says no.
  const auto walk = [&](auto&& body) {
    for (int at = begin; at < end;) {
      const Segment s = segment_at(args, at, end);
      const Place place = place_of(args, s.item, T.rows);
      const Group& group = place.group;
      const Weights format = args.matrix.parts[group.part].format;
      const int tile = group.first + (lane < group.tiles ? lane : 0);
      const Part& part = args.matrix.parts[part_of(args.matrix, tile)];
      Step step = {};
      step.tiles = group.tiles;
      step.bytes = static_cast<u32>(unit_bytes(format));
      step.weights = part.weights + (static_cast<u64>(tile - part.first_tile) * static_cast<u64>(args.matrix.units) +
                                     static_cast<u64>(s.first_unit)) *
                                        step.bytes;
      step.at_once = stage_units(format);
      step.first_token = place.first_token;
      for (step.unit = s.first_unit; step.unit < s.end_unit; step.unit += step.at_once) {
        const int left = s.end_unit - step.unit;
        step.count = left < step.at_once ? left : step.at_once;
        if (!body(step)) return;
        step.weights += static_cast<u32>(step.at_once) * step.bytes;
      }
      at += s.end_unit - s.first_unit;
    }
  };
  const auto ask_weights = [&](const Step& step, int stage) {
    const u32 bytes = static_cast<u32>(step.count) * step.bytes;
    if (lane == 0) {
      mbarrier_arrive_expect(bars.full(stage),
                             static_cast<u32>(step.tiles) * bytes + static_cast<u32>(step.count) * kRowBytes);
    }
    __syncwarp();
    if (lane < step.tiles) {
      bulk_copy(base + kMap.weights + static_cast<u32>(stage) * kMap.weight_stride +
                    static_cast<u32>(lane * step.at_once) * step.bytes,
                step.weights, bytes, bars.full(stage), policy);
    }
  };
  const auto ask_rows = [&](const Step& step, int stage) {
    if (lane < step.count) {
      tensor_copy_rows(
          base + kMap.rows + static_cast<u32>(stage) * kMap.row_stride + static_cast<u32>(lane) * kRowBytes, x,
          (step.unit + lane) * kUnitK, step.first_token, T.rows, bars.full(stage));
    }
  };
  int stage = 0;
  walk([&](const Step& step) {
    if (stage == T.stages) return false;
    ask_weights(step, stage++);
    return true;
  });
  grid_dependency_wait();
  stage = 0;
  u32 turn = 0;
  walk([&](const Step& step) {
    if (turn > 0) {
      mbarrier_wait(bars.empty(stage), (turn & 1u) ^ 1u);
      ask_weights(step, stage);
    }
    ask_rows(step, stage);
    if (++stage == T.stages) {
      stage = 0;
      ++turn;
    }
    return true;
  });
}

template <typename Tile, Weights F>
__device__ __forceinline__ void multiply_segment(const DenseArgs& args, u32 base, Ring& ring, const Segment& segment,
                                                 const Part& part, int tile, bool there, u32 scale_base,
                                                 float (&acc)[Tile::value.rows / 2]) {
  static constexpr MiddleTile T = Tile::value;
  static constexpr MiddleMap kMap = middle_map(T);
  constexpr int N = T.rows;
  constexpr int kUnits = stage_units(F);
  const Barriers<Tile> bars{base + kMap.barriers};
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int first_unit = segment.first_unit, end_unit = segment.end_unit;
  const bool cells = F == Weights::kFp8 && T.cells() && part.cells != nullptr;

  float total[T.cells() ? N / 2 : 1];
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    if constexpr (T.cells()) total[i] = 0.0f;
  }
  const u32 zero = static_cast<u32>(args.zero);
  UnitWords<F> words;
  u32 a[2][2][4];
  u64 rows = 0;
  int in_stage = 0;
  int left = end_unit - first_unit;  // units that have not been taken
  int ended = -1, previous = -1;     // stage that ends with the unit taken last, and with the one before
  const auto take = [&] {
    if (in_stage == 0) mbarrier_wait(bars.full(ring.stage), ring.phase);
    const u32 at = base + kMap.weights + static_cast<u32>(ring.stage) * kMap.weight_stride +
                   static_cast<u32>((warp * kUnits + in_stage) * unit_bytes(F));
    words.load(at, lane);
    rows = swizzled_descriptor(base + kMap.rows + static_cast<u32>(ring.stage) * kMap.row_stride +
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
  const auto give_back = [&](int stage) {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(bars.empty(stage));
  };
  const auto prepare = [&]<int Pair>() {
    words.template fragment<2 * Pair>(scale_base, zero, a[Pair][0]);
    words.template fragment<2 * Pair + 1>(scale_base, zero, a[Pair][1]);
  };
  const auto multiply = [&]<int Pair, bool First>() {
    wgmma_fence();
    if constexpr (First) {
      Wgmma<N>::set(acc, a[Pair][0], rows + static_cast<u64>(4 * Pair));
    } else {
      Wgmma<N>::add(acc, a[Pair][0], rows + static_cast<u64>(4 * Pair));
    }
    Wgmma<N>::add(acc, a[Pair][1], rows + static_cast<u64>(4 * Pair + 2));
    wgmma_commit();
    wgmma_wait<1>();  // the pair before this one is done: its fragments may be overwritten
    if constexpr (!First) {
      hold_fragment(a[1 - Pair][0], args.zero);
      hold_fragment(a[1 - Pair][1], args.zero);
    }
  };
  const auto drain = [&] {
    wgmma_wait<0>();
    keep_registers(acc);
    hold_fragment(a[1][0], args.zero);
    hold_fragment(a[1][1], args.zero);
  };
  // A unit; where it is the first of a sum, accumulators are only written.
  const auto step = [&]<bool First>() {
    multiply.template operator()<0, First>();
    if (previous >= 0) give_back(previous);
    prepare.template operator()<1>();
    multiply.template operator()<1, false>();
    if (left > 0) {
      take();
      prepare.template operator()<0>();
    }
  };
  take();
  prepare.template operator()<0>();
  if constexpr (T.cells()) {
    const int in_cell = cells ? part.cell_units : args.matrix.units;
    for (int first = first_unit, end = 0; first < end_unit; first = end) {
      const int cell = first / in_cell;
      end = (cell + 1) * in_cell < end_unit ? (cell + 1) * in_cell : end_unit;
      step.template operator()<true>();
      for (int unit = first + 1; unit < end; ++unit) step.template operator()<false>();
      drain();
      float2 scale = make_float2(1.0f, 1.0f);
      if (cells && there) {
        scale = *(reinterpret_cast<const float2*>(part.cells) +
                  static_cast<long long>(tile - part.first_tile) * part.cell_count + cell);
      }
#pragma unroll
      for (int i = 0; i < N / 2; ++i) total[i] = fmaf(acc[i], i % 4 < 2 ? scale.x : scale.y, total[i]);
    }
  } else {
    step.template operator()<true>();
    for (int unit = first_unit + 1; unit < end_unit; ++unit) step.template operator()<false>();
  }
  drain();
  give_back(ended);
  if constexpr (T.cells()) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) acc[i] = total[i];
  }
}

// The row tile whose sums a warp ends.
struct Ending {
  const Part* part;
  int index;  // in the part
  float low, high;
};
__device__ __forceinline__ Ending ending_of(const DenseArgs& args, int tile, int g) {
  Ending e;
  e.part = &args.matrix.parts[part_of(args.matrix, tile)];
  e.index = tile - e.part->first_tile;
  const float* factors = e.part->factors + static_cast<long long>(e.index) * 16 + g;
  e.low = factors[0] * dense_detail::dense_scale(e.part->format);
  e.high = factors[8] * dense_detail::dense_scale(e.part->format);
  return e;
}
// Rows g and g + 8 of the tile, rows t and t + 1 of x.
template <DenseEnd End>
__device__ __forceinline__ void finish_sums(const DenseArgs& args, const Ending& e, int g, int t, const float4& sums) {
  dense_detail::finish<End>(args, *e.part, e.index, g, t, sums.x * e.low, sums.z * e.high);
  dense_detail::finish<End>(args, *e.part, e.index, g, t + 1, sums.y * e.low, sums.w * e.high);
}

// What this CTA adds up of an item of so many rows of x, when its pieces are all there, and its end. `staging`: of this
// warp, shared.
__device__ __forceinline__ void add_pieces(const DenseArgs& args, int item, int rows, const Pieces& pieces,
                                           float4* staging) {
  constexpr int kAtOnce = 8;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const Place place = place_of(args, item, rows);
  const int tokens = args.tokens - place.first_token < rows ? args.tokens - place.first_token : rows;
  const int jobs = (tokens + 7) / 8 * kMiddleTiles;
  const int own = static_cast<int>(blockIdx.x) - pieces.first_cta;
  // This CTA's jobs are dealt out to its warps.
  const int begin = own * jobs / pieces.count + warp;
  const int end = (own + 1) * jobs / pieces.count;
  const int in_group = begin % kMiddleTiles;  // row tile of all of them
  int mine = begin < end ? (end - begin + kMiddleTiles - 1) / kMiddleTiles : 0;
  if (in_group >= place.group.tiles) mine = 0;
  const Ending ending = ending_of(args, place.group.first + (mine > 0 ? in_group : 0), lane / 4);
  if (lane == 0) wait_count(args.arrived + pieces.first_cta, pieces.count);
  __syncwarp();
  // All pieces of one job, then of the next: so many loads at once, whatever they belong to.
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  int done = 0;
  int job = begin, piece = 0;  // of the next load
  int adding = 0;              // piece of the next addition
#pragma unroll 1
  for (int left = mine * pieces.count; left > 0; left -= kAtOnce) {
    float4 part[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      part[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (i >= left) continue;
      part[i] = __ldcg(piece_at(args, pieces.first_cta + piece, piece == 0 && pieces.second) + job * 32 + lane);
      if (++piece == pieces.count) {
        piece = 0;
        job += kMiddleTiles;
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (i >= left) continue;
      sum.x += part[i].x;
      sum.y += part[i].y;
      sum.z += part[i].z;
      sum.w += part[i].w;
      if (++adding == pieces.count) {
        adding = 0;
        staging[done++ * 32 + lane] = sum;
        sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      }
    }
  }
  dense_detail::with_end(args.end, [&]<DenseEnd End>() {
#pragma unroll 1
    for (int i = 0; i < mine; ++i) {
      const int block = (begin + i * kMiddleTiles) / kMiddleTiles;  // of eight rows of x
      finish_sums<End>(args, ending, lane / 4, place.first_token + block * 8 + lane % 4 * 2, staging[i * 32 + lane]);
    }
  });
}

}  // namespace middle_detail

// Grid: middle_grid. `x`: the rows, [tokens][columns], in copies of 64 columns of the tile's rows. `Tile` is a
// MiddleTileOf.
template <typename Tile>
__global__ void __launch_bounds__(kMiddleThreads, Tile::value.ctas)
    gemm_middle(const __grid_constant__ ptx::TensorMap x, const __grid_constant__ DenseArgs args) {
  using namespace middle_detail;
  static constexpr MiddleTile T = Tile::value;
  static constexpr MiddleMap kMap = middle_map(T);
  constexpr int kOfTile = T.rows / 8;  // fragments
  static_assert(kMap.row_stride * T.stages >= kOfTile * kMiddleTiles * 512u, "room for sums where x was");
  FOURFOLD_DYNAMIC_SHARED(smem);
  const u32 base = keep_register(shared_address(smem));
  const Barriers<Tile> bars{base + kMap.barriers};
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (threadIdx.x == 0) begin_ring(bars, x);
  grid_launch_dependents();
  __syncthreads();
  const int all = static_cast<int>(middle_units(args.matrix, args.tokens, T.rows));
  const int begin = static_cast<int>(blockIdx.x) * args.split_units;
  const int end = begin + args.split_units < all ? begin + args.split_units : all;
  if (warp == kMiddleTiles) {
    produce<Tile>(x, args, base, begin, end);
    return;
  }
  grid_dependency_wait();
  const u32 scale_base = moe::opaque_scale_base(args.zero);
  Ring ring{0, 0};
  int cut[2];  // items of which this CTA has a piece
  int cuts = 0;
  for (int at = begin; at < end;) {
    const Segment segment = segment_at(args, at, end);
    const Place place = place_of(args, segment.item, T.rows);
    const int tokens = args.tokens - place.first_token < T.rows ? args.tokens - place.first_token : T.rows;
    const Group& group = place.group;
    const bool there = warp < group.tiles;
    const int tile = group.first + (there ? warp : 0);
    const Part& part = args.matrix.parts[part_of(args.matrix, tile)];
    float acc[T.rows / 2];
    with_format<Tile>(part.format, [&]<Weights F>() {
      multiply_segment<Tile, F>(args, base, ring, segment, part, tile, there, scale_base, acc);
    });
    at += segment.end_unit - segment.first_unit;
    if (segment.whole) {
      if (!there) continue;
      const Ending ending = ending_of(args, tile, lane / 4);
      dense_detail::with_end(args.end, [&]<DenseEnd End>() {
#pragma unroll
        for (int i = 0; i < kOfTile; ++i) {
          finish_sums<End>(args, ending, lane / 4, place.first_token + i * 8 + lane % 4 * 2,
                           make_float4(acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]));
        }
      });
      continue;
    }
    const Pieces pieces = pieces_of(args, segment.item);
    float4* to =
        piece_at(args, static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.x) == pieces.first_cta && pieces.second);
#pragma unroll
    for (int i = 0; i < kOfTile; ++i) {
      if (i * 8 >= tokens) break;
      to[(i * kMiddleTiles + warp) * 32 + lane] =
          make_float4(acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]);
    }
    barrier_sync(1, kConsumers);
    if (threadIdx.x == 0) {
      __threadfence();  // of what all of them have stored
      atomicAdd(args.arrived + pieces.first_cta, 1);
    }
    if (cuts == 0) {
      cut[0] = segment.item;
    } else {
      cut[1] = segment.item;
    }
    ++cuts;
  }
  if (cuts == 0) return;
  barrier_sync(1, kConsumers);  // nobody reads stages any more
  float4* staging = reinterpret_cast<float4*>(smem + kMap.rows) + warp * (kOfTile * 32);
  for (int i = 0; i < cuts; ++i) {
    const int item = i == 0 ? cut[0] : cut[1];
    const Pieces pieces = pieces_of(args, item);
    int* arrived = args.arrived + pieces.first_cta;
    add_pieces(args, item, T.rows, pieces, staging);
    barrier_sync(1, kConsumers);  // all of it is read
    if (threadIdx.x == 0 && atomicAdd(arrived, 1) == 2 * pieces.count - 1) *arrived = 0;
  }
}

}  // namespace fourfold::gemm
