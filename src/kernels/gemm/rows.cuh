// Products of 1 to 16 rows: y[t][row] = sum over columns of x[t][column] weight[row][column], bf16 x bf16 summed in
// fp32. All of the time goes into reading weights, so everything is about having enough of them under way.
//
// A CTA takes every grid-th row tile (16 weight rows), whatever matrix of the stack it belongs to; its teams of warps
// take turns at them. The warps of a team take turns at the strip, one step (about two kilobytes) each. A warp has a
// ring of steps in shared memory that only it fills (cp.async) and reads, so that nothing but its own lanes' order
// matters; the ring runs on from one row tile to the next, and is filled before the kernel waits for the one before it.
// x lies in shared memory in the order in which lanes read it. The warps' sums of a batch of row tiles meet in shared
// memory: a row tile is as little as one step of a warp, so that a barrier for each would take longer than its weights.
//
// Every column of the multiplication is one row of x and the split of K is fixed, so that a row's result has the same
// bits in every batch of 1 to 16, of 1 to 8 where strips have other warps for more.
#pragma once

#include "kernels/gemm/fragments.cuh"
#include "kernels/gemm/rows_tile.h"
#include "kernels/moe/choice.cuh"
#include "kernels/norm/norm_row.cuh"

namespace fourfold::gemm {

namespace rows_detail {

using namespace ptx;

// Of the product: how many CTAs it has, and this one's number.
template <typename Tile>
__device__ __forceinline__ int product_ctas() {
  return static_cast<int>(gridDim.x) - (Tile::value.choice ? 1 : 0);
}
template <typename Tile>
__device__ __forceinline__ int product_cta() {
  return static_cast<int>(blockIdx.x) - (Tile::value.choice ? 1 : 0);
}

// The row tiles of a team, one after the other, and what they have in common while they are of one matrix of the stack.
template <typename Tile>
struct Walk {
  static constexpr RowsTile T = Tile::value;
  const Matrix& matrix;
  int tile;
  int tiles;  // of the stack
  int end;    // of the matrix's row tiles
  int steps;
  Weights format;

  __device__ __forceinline__ Walk(const Matrix& m, int first)
      : matrix(m), tile(first), tiles(m.tiles), end(0), steps(0), format(Weights::kBf16) {}
  __device__ __forceinline__ static int stride() { return product_ctas<Tile>() * T.teams; }
  // Finds the matrix of `tile`.
  __device__ __forceinline__ const Part& locate() {
    const int p = part_of(matrix, tile);
    end = p + 1 < matrix.count ? matrix.parts[p + 1].first_tile : tiles;
    format = matrix.parts[p].format;
    with_format<Tile>(format, [&]<Weights F>() { steps = steps_of(F, matrix.units); });
    return matrix.parts[p];
  }
};

// Where a warp's requests for weights are: at a step of a row tile.
template <typename Tile>
struct Requests {
  static constexpr RowsTile T = Tile::value;
  Walk<Tile> walk;
  u32 ring;  // of this warp, and this lane's place
  int lane;
  int warp;  // of the team
  int units;
  int step;
  u32 slot;
  const u8* strip;     // of the row tile, this lane's 16 bytes
  u64 strip_stride;    // to the team's next one
  const float* cells;  // of the row tile, of lanes 0 and 1; null: none
  int cells_stride;
  u32 cell_of;

  __device__ __forceinline__ Requests(const Matrix& m, int units_, int first, u32 ring_, int warp_, int lane_)
      : walk(m, first),
        ring(ring_ + static_cast<u32>(lane_) * 16u),
        lane(lane_),
        warp(warp_),
        units(units_),
        step(warp_),
        slot(0) {
    locate();
    if (walk.tile < walk.tiles && step >= walk.steps) advance();
  }
  __device__ __forceinline__ void locate() {
    if (walk.tile >= walk.tiles) return;
    const Part& part = walk.locate();
    const int index = walk.tile - part.first_tile;
    const u64 bytes = static_cast<u64>(units) * static_cast<u64>(unit_bytes(walk.format));
    strip = part.weights + static_cast<u64>(index) * bytes + lane * 16;
    strip_stride = static_cast<u64>(Walk<Tile>::stride()) * bytes;
    if constexpr (T.cells()) {
      cells = nullptr;
      if (part.cells != nullptr) {
        cells = part.cells + static_cast<long long>(index) * part.cell_count * 2 + lane % 2;
        cells_stride = Walk<Tile>::stride() * part.cell_count * 2;
        cell_of = part.cell_of;
      }
    }
  }
  // On to the next row tile with a step for this warp.
  __device__ __forceinline__ void advance() {
    do {
      walk.tile += Walk<Tile>::stride();
      step = warp;
      if (walk.tile < walk.end) {
        strip += strip_stride;
        if (T.cells() && cells != nullptr) cells += cells_stride;
      } else {
        locate();
      }
    } while (walk.tile < walk.tiles && step >= walk.steps);
  }
  // Asks for the next step, into the ring's next slot; one group, empty when there is no more.
  __device__ __forceinline__ void next() {
    if (walk.tile < walk.tiles) {
      const u32 to = ring + slot;
      with_format<Tile>(walk.format, [&]<Weights F>() {
        constexpr int kPieces = step_bytes(F) / 16, kWhole = kPieces / 32;
        const u8* from = strip + static_cast<u32>(step) * static_cast<u32>(step_bytes(F));
        const int left = units - step * step_units(F);  // units from here to the strip's end
        if (left >= step_units(F)) {
#pragma unroll
          for (int i = 0; i < kWhole; ++i) async_copy16(to + 512u * i, from + 512 * i);
          if constexpr (kPieces % 32 != 0) {
            // The last 256 bytes, 8 a lane, which is less than a branch for half of the lanes.
            static_assert(kPieces % 32 == 16);
            async_copy8(to + 512u * kWhole - 8u * static_cast<u32>(lane), from + (512 * kWhole - 8 * lane));
          }
        } else {
#pragma unroll 1
          for (int i = 0; i * 32 + lane < left * (unit_bytes(F) / 16); ++i) async_copy16(to + 512u * i, from + 512 * i);
        }
        if constexpr (F == Weights::kFp8 && T.cells()) {
          if (cells != nullptr && lane < 4 && lane / 2 < left) {  // of both units: rows 0 to 7 and 8 to 15
            const u32 unit = static_cast<u32>(step * 2 + lane / 2);
            async_copy4(to + 2048u - static_cast<u32>(lane) * 12u, cells + (unit * cell_of >> 16) * 2u);
          }
        }
      });
      step += T.strip_warps;
      if (step >= walk.steps) advance();
    }
    async_copy_commit();
    slot += kSlotBytes;
    if (slot == T.slots * kSlotBytes) slot = 0;
  }
};

// A row tile's sums of one warp: rows g and g + 8, columns 2 l and 2 l + 1 of 8 rows of x each.
template <int RowTiles>
struct Sums {
  float v[RowTiles][4];
};

// x in shared memory: piece (unit, half, row of x, l) has columns 2 l, 2 l + 1, 2 l + 8, 2 l + 9 of the two blocks of
// 16 of that half of a unit, times 2^80. These are 8 columns of a row, from `piece` * 8 of the panel on.
__device__ __forceinline__ void place_piece(u32* rows, int tokens, int t, int piece, const uint4& w) {
  u32* to = rows + (((piece >> 2) * tokens + t) * 16 + (piece & 3));
  to[0] = mul_bf16x2(w.x, kRowPair);
  to[4] = mul_bf16x2(w.y, kRowPair);
  to[8] = mul_bf16x2(w.z, kRowPair);
  to[12] = mul_bf16x2(w.w, kRowPair);
}

// The pieces of a panel of x that a thread brings, row after row: every threads()th.
template <typename Tile>
struct PanelWalk {
  static constexpr int kThreads = Tile::value.threads();
  int first;   // of the panel's pieces, in a row
  int pieces;  // of a row
  int row;
  int piece;
  int rows_on, pieces_on;  // to the next one

  __device__ __forceinline__ PanelWalk(const RowsArgs& args, int first_unit) {
    const int left = (args.matrix.units - first_unit + 3) / 4 * 4;
    first = first_unit * 8;
    pieces = (left < args.panel_units ? left : (args.panel_units + 3) / 4 * 4) * 8;
    const auto thread = static_cast<u32>(threadIdx.x), count = static_cast<u32>(pieces);
    row = static_cast<int>(thread / count);
    piece = static_cast<int>(thread % count);
    rows_on = static_cast<int>(kThreads / count);
    pieces_on = static_cast<int>(kThreads % count);
  }
  __device__ __forceinline__ void next() {
    row += rows_on;
    piece += pieces_on;
    if (piece >= pieces) {
      piece -= pieces;
      ++row;
    }
  }
};

template <typename Tile>
__device__ __forceinline__ void place_panel(const RowsArgs& args, u32* rows, PanelWalk<Tile> walk) {
  const int there = (args.matrix.columns + 7) / 8 - walk.first;  // pieces; those beyond are zero
  const uint4* x = reinterpret_cast<const uint4*>(args.x) + walk.first;
  const int stride = static_cast<int>(args.x_stride / 8);
  // Some at a time, of whatever rows: one way to L2 and back for all of them. With cells registers are short.
  constexpr int kAtOnce = Tile::value.cells() ? 2 : 4;
#pragma unroll 1
  while (walk.row < args.tokens) {
    uint4 w[kAtOnce];
    int row[kAtOnce], piece[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      row[i] = walk.row;
      piece[i] = walk.piece;
      w[i] = make_uint4(0u, 0u, 0u, 0u);
      if (row[i] < args.tokens && piece[i] < there) w[i] = __ldcg(x + (row[i] * stride + piece[i]));
      walk.next();
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (row[i] < args.tokens) place_piece(rows, args.tokens, row[i], piece[i], w[i]);
    }
  }
}

// Where x does not fit: every panel of it for every row tile. All threads of the CTA.
template <typename Tile>
__device__ __forceinline__ void next_panel(const RowsArgs& args, u32* rows, int first_unit) {
  __syncthreads();  // nobody reads the last panel any more
  place_panel<Tile>(args, rows, PanelWalk<Tile>(args, first_unit));
  __syncthreads();
}

// x = norm(residual + share, if the tile has one, + delta) x weight. `weights` are this thread's pieces of the norm's
// weight.
template <typename Tile>
__device__ __forceinline__ void place_norm(const RowsArgs& args, u32* rows, float* sums,
                                           const norm::Piece (&weights)[Tile::value.norm_pieces]) {
  constexpr int kPieces = Tile::value.norm_pieces;
  const int thread = static_cast<int>(threadIdx.x);
  const int columns = args.matrix.columns;
  const bool first_cta = blockIdx.x == 0;
  for (int t = 0; t < args.tokens; ++t) {
    norm::Piece x[kPieces];
    float squares = 0.0f;
    if (thread < norm::kRowThreads) {
      const auto keep = [&](int i, int column) {
        squares = norm::add_squares(squares, x[i]);
        if (first_cta && args.residual_out != nullptr) {
          norm::store_floats(args.residual_out + t * args.residual_stride + column, x[i]);
        }
      };
      if constexpr (!Tile::value.share) {
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
          const int column = (thread + i * norm::kRowThreads) * norm::kPieceColumns;
          if (column >= columns) break;
          x[i] = norm::load_floats(args.residual + t * args.residual_stride + column);
          if (args.delta != nullptr) {
            norm::add_piece(x[i], norm::load_bf16(args.delta + t * args.delta_stride + column));
          }
          keep(i, column);
        }
      } else {
        norm::Addends<kPieces> more;
        more.load_logit(args.share, t);
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
          const int column = (thread + i * norm::kRowThreads) * norm::kPieceColumns;
          if (column >= columns) break;
          x[i] = norm::load_floats(args.residual + t * args.residual_stride + column);
          more.load(args.share, args.delta, args.delta_stride, t, i, column);
        }
        const float weight = more.weight(args.share);
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
          const int column = (thread + i * norm::kRowThreads) * norm::kPieceColumns;
          if (column >= columns) break;
          more.add(args.share, args.delta, x[i], i, weight);
          keep(i, column);
        }
      }
      squares = norm::warp_sum(squares);
      if (thread % 32 == 0) sums[t % 2 * 8 + thread / 32] = squares;
    }
    __syncthreads();
    if (thread < norm::kRowThreads) {
      const float inverse = norm::inverse_rms(sums + t % 2 * 8, columns, args.norm_eps);
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const int piece = thread + i * norm::kRowThreads;
        if (piece * norm::kPieceColumns < columns) {
          const uint4 w = norm::to_bf16_piece(norm::scaled(x[i], inverse, weights[i]));
          if (first_cta && args.norm_out != nullptr) {
            reinterpret_cast<uint4*>(args.norm_out + static_cast<long long>(t) * columns)[piece] = w;
          }
          place_piece(rows, args.tokens, t, piece, w);
        } else if (piece < (args.matrix.units + 3) / 4 * 32) {
          place_piece(rows, args.tokens, t, piece, make_uint4(0u, 0u, 0u, 0u));
        }
      }
    }
  }
}

// A thread's columns of the router, and what this CTA's rows of the sums make of them (routing.h).
template <typename Tile>
struct RoutingPart {
  static constexpr RowsTile T = Tile::value;
  uint4 weights[T.route > 0 ? T.route : 1][2];

  __device__ __forceinline__ void load(const Routing& routing, int tile, int tiles, int thread) {
#pragma unroll
    for (int i = 0; i < T.route; ++i) {
      const int column = thread + i * T.threads();
      if (tile >= tiles || column >= routing.columns) continue;
      const uint4* from = reinterpret_cast<const uint4*>(routing.weights) + (tile * routing.columns + column) * 2;
      weights[i][0] = from[0];
      weights[i][1] = from[1];
    }
  }
  // `normed`: [rows of x][16], h times the norm's weight.
  __device__ __forceinline__ void add(const Routing& routing, int cta, int tokens, const float* normed, int thread) {
    const int stride = routing_stride(routing.columns);
#pragma unroll
    for (int i = 0; i < T.route; ++i) {
      const int column = thread + i * T.threads();
      if (column >= routing.columns) continue;
      const u32 words[8] = {weights[i][0].x, weights[i][0].y, weights[i][0].z, weights[i][0].w,
                            weights[i][1].x, weights[i][1].y, weights[i][1].z, weights[i][1].w};
#pragma unroll 1
      for (int t = 0; t < tokens; ++t) {
        const float4* x = reinterpret_cast<const float4*>(normed + t * 16);
        float sum[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const float4 v = x[k];
          sum[k] = __uint_as_float(words[2 * k] << 16) * v.x;
          sum[k] = fmaf(__uint_as_float(words[2 * k] & 0xffff0000u), v.y, sum[k]);
          sum[k] = fmaf(__uint_as_float(words[2 * k + 1] << 16), v.z, sum[k]);
          sum[k] = fmaf(__uint_as_float(words[2 * k + 1] & 0xffff0000u), v.w, sum[k]);
        }
        const float all = (sum[0] + sum[1]) + (sum[2] + sum[3]);
        atomicAdd(routing.sums + (t * kRoutingCopies + cta % kRoutingCopies) * stride + column,
                  static_cast<unsigned long long>(__float2ll_rn(all * static_cast<float>(1 << kRoutingBits))));
      }
    }
  }
};

// A piece of x for every 8 rows of it: registers b0, b1 of one block, b0, b1 of the next.
template <typename Tile>
struct RowPieces {
  u32 v[Tile::value.row_tiles][4];
};

template <typename Tile>
struct Multiplier {
  static constexpr RowsTile T = Tile::value;
  static constexpr int kChains = 4;
  u32 row_stride;        // bytes of a piece of all rows of x
  u32 row[T.row_tiles];  // this lane's place in a piece; beyond the rows of x the last one's: nobody looks at the sums
  int lane;
  u32 scale_base;
  float acc[kChains][T.row_tiles][4];  // in turns, so that multiplications need not wait for each other

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int s = 0; s < kChains; ++s) {
#pragma unroll
      for (int n = 0; n < T.row_tiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[s][n][i] = 0.0f;
      }
    }
  }
  __device__ __forceinline__ float sum(int n, int i) const {
    return (acc[0][n][i] + acc[1][n][i]) + (acc[2][n][i] + acc[3][n][i]);
  }
  __device__ __forceinline__ void add_to(Sums<T.row_tiles>& sums, float low, float high) {
#pragma unroll
    for (int n = 0; n < T.row_tiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums.v[n][i] = fmaf(sum(n, i), i < 2 ? low : high, sums.v[n][i]);
    }
    clear();
  }
  __device__ __forceinline__ RowPieces<Tile> load(u32 at) const {
    RowPieces<Tile> x;
#pragma unroll
    for (int n = 0; n < T.row_tiles; ++n) {
      const Vec4 w = load_shared4(at + row[n]);
      x.v[n][0] = w.x;
      x.v[n][1] = w.y;
      x.v[n][2] = w.z;
      x.v[n][3] = w.w;
    }
    return x;
  }
  // Block `s` of a piece.
  template <int Chain>
  __device__ __forceinline__ void multiply(const u32 (&a)[4], const RowPieces<Tile>& x, int s) {
#pragma unroll
    for (int n = 0; n < T.row_tiles; ++n) mma_m16n8k16(acc[Chain][n], a, x.v[n][2 * s], x.v[n][2 * s + 1]);
  }

  // The step in `slot`; `taken` is called once its words are in registers. `x` is the place of the step's first
  // piece of x. Beyond the strip's end (`left` units) x is zero and the slot holds anything, whose codes make no
  // infinity and no NaN; scales could, and are left out.
  template <Weights F, typename Taken>
  __device__ __forceinline__ void step(u32 slot, int left, u32 x, bool cells, Sums<T.row_tiles>& sums,
                                       const Taken& taken) {
    constexpr int kUnits = step_units(F);
    const u32 at = slot + static_cast<u32>(lane) * 16u;
    if constexpr (F == Weights::kBf16) {
      Vec4 w[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) w[j] = load_shared4(at + 512u * j);
      const RowPieces<Tile> pieces[2] = {load(x), load(x + row_stride)};
      taken();
      u32 a[4][4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        a[j][0] = w[j].x;
        a[j][1] = w[j].y;
        a[j][2] = w[j].z;
        a[j][3] = w[j].w;
      }
      multiply<0>(a[0], pieces[0], 0);
      multiply<1>(a[1], pieces[0], 1);
      multiply<2>(a[2], pieces[1], 0);
      multiply<3>(a[3], pieces[1], 1);
    } else if constexpr (F == Weights::kFp8) {
      Vec4 w[kUnits][2];
      Vec2 scales[kUnits] = {};
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        w[u][0] = load_shared4(at + 1024u * u);
        w[u][1] = load_shared4(at + 1024u * u + 512u);
        if (T.cells() && cells && u < left) scales[u] = load_shared2(slot + 2048u + 8u * u);
      }
      taken();
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        const RowPieces<Tile> pieces[2] = {load(x + 2u * u * row_stride), load(x + (2u * u + 1u) * row_stride)};
        u32 a[4];
        fp8_fragment(w[u][0].x, w[u][0].y, a);
        multiply<0>(a, pieces[0], 0);
        fp8_fragment(w[u][0].z, w[u][0].w, a);
        multiply<1>(a, pieces[0], 1);
        fp8_fragment(w[u][1].x, w[u][1].y, a);
        multiply<2>(a, pieces[1], 0);
        fp8_fragment(w[u][1].z, w[u][1].w, a);
        multiply<3>(a, pieces[1], 1);
        if (T.cells() && cells) add_to(sums, __uint_as_float(scales[u].x), __uint_as_float(scales[u].y));
      }
    } else {
      Vec4 codes[kUnits];
      Vec2 scales[kUnits];
      const u32 scales_at = slot + moe::kUnitCodeBytes + static_cast<u32>(lane / 4) * 8u;
#pragma unroll
      for (int u = 0; u < kUnits; ++u) codes[u] = load_shared4(at + static_cast<u32>(u) * moe::kUnitBytes);
      if (left >= kUnits) {
#pragma unroll
        for (int u = 0; u < kUnits; ++u) scales[u] = load_shared2(scales_at + static_cast<u32>(u) * moe::kUnitBytes);
      } else {
#pragma unroll
        for (int u = 0; u < kUnits; ++u) {
          scales[u] = {0u, 0u};
          if (u < left) scales[u] = load_shared2(scales_at + static_cast<u32>(u) * moe::kUnitBytes);
        }
      }
      taken();
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        const RowPieces<Tile> pieces[2] = {load(x + 2u * u * row_stride), load(x + (2u * u + 1u) * row_stride)};
        u32 a[4];
        moe::dequantise(codes[u].x, moe::scale_pair(scales[u].x, false, scale_base), a);
        multiply<0>(a, pieces[0], 0);
        moe::dequantise(codes[u].y, moe::scale_pair(scales[u].x, true, scale_base), a);
        multiply<1>(a, pieces[0], 1);
        moe::dequantise(codes[u].z, moe::scale_pair(scales[u].y, false, scale_base), a);
        multiply<2>(a, pieces[1], 0);
        moe::dequantise(codes[u].w, moe::scale_pair(scales[u].y, true, scale_base), a);
        multiply<3>(a, pieces[1], 1);
      }
    }
  }
};

}  // namespace rows_detail

// Grid: rows_grid. `Tile` is a RowsTileOf.
template <typename Tile>
__global__ void __launch_bounds__(Tile::value.threads(), Tile::value.resident())
    gemm_rows(const __grid_constant__ RowsArgs args) {
  using namespace rows_detail;
  static constexpr RowsTile T = Tile::value;
  static_assert(T.row_tiles <= 2 && T.norm_pieces <= 4);
  static_assert(!T.choice || T.norm_pieces == 0);
  static_assert(T.route == 0 || (T.row_tiles == 1 && T.norm_pieces == 0 && !T.choice));
  static_assert(!T.share || T.norm_pieces > 0);  // a tile of its own: instructions behind the wait are time
  FOURFOLD_DYNAMIC_SHARED(smem);
  const u32 base = shared_address(smem);
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int warp = __shfl_sync(0xffffffffu, thread / 32, 0);  // the same for all lanes, and the compiler knows
  const int strip_warp = warp % T.strip_warps;
  const int team = warp / T.strip_warps;
  // Arguments that loops need: a register each, or they would be fetched again and again.
  const int tokens = args.tokens | args.zero;
  const int units = args.matrix.units | args.zero;
  const int cta = product_cta<Tile>();
  const int stride = product_ctas<Tile>();
  const Matrix& matrix = args.matrix;
  const RowsMap map = rows_map(T, tokens, args.panel_units);
  if constexpr (T.choice) {
    // Experts have nothing to ask for before they know which they are (route.cuh).
    if (cta < 0) {
      grid_dependency_wait();
      grid_launch_dependents();
      for (int t = warp; t < args.choice.tokens; t += T.warps()) moe::store_choice(args.choice, t, lane);
      return;
    }
  } else {
    grid_launch_dependents();
  }

  const u32 ring = base + map.ring + static_cast<u32>(warp * T.slots) * kSlotBytes;
  const int first_tile = cta + team * stride;
  Requests<Tile> requests(matrix, units, first_tile, ring, strip_warp, lane);
#pragma unroll 1
  for (int i = 0; i < T.slots; ++i) requests.next();
  RoutingPart<Tile> routing;
  if constexpr (T.route > 0) routing.load(args.routing, cta, matrix.tiles, thread);
  u32* rows = reinterpret_cast<u32*>(smem + map.rows);
  const bool one_panel = units <= args.panel_units;
  const PanelWalk<Tile> panel(args, 0);
  norm::Piece norm_weights[T.norm_pieces > 0 ? T.norm_pieces : 1];
  if constexpr (T.norm_pieces > 0) {
#pragma unroll
    for (int i = 0; i < T.norm_pieces; ++i) {
      const int column = (thread + i * norm::kRowThreads) * norm::kPieceColumns;
      if (thread < norm::kRowThreads && column < matrix.columns) {
        norm_weights[i] = norm::load_floats(args.norm_weight + column);
      }
    }
  }
  const int g = lane / 4;
  const int l = lane % 4;
  Multiplier<Tile> multiplier;
#pragma unroll
  for (int n = 0; n < T.row_tiles; ++n) {
    const int t = n * 8 + g < tokens ? n * 8 + g : tokens - 1;
    multiplier.row[n] = static_cast<u32>(t * 64 + l * 16);
  }
  multiplier.row_stride = static_cast<u32>(tokens) * 64u;
  multiplier.lane = lane;
  multiplier.scale_base = moe::opaque_scale_base(args.zero);
  const u32 rows_at = base + map.rows;
  const int batch = rows_batch(T, tokens);
  float* partials = reinterpret_cast<float*>(smem + map.partials);
  const int partials_half = batch * T.strip_warps * tokens * 16;

  // What this thread finishes of a batch: rows g and g + 8 of row tile `own_tile`, row `own_row` of x.
  const int own_g = thread % 8;
  const int own_row = thread / 8 % tokens;
  const int own_tile = thread / 8 / tokens;

  Walk<Tile> walk(matrix, first_tile);
  bool cells = false;
  const auto locate = [&] {
    const Part& part = walk.locate();
    cells = T.cells() && part.cells != nullptr;
  };
  if (walk.tile < matrix.tiles) locate();
  u32 slot = 0;
  int half = 0;
  for (int first = cta; first < matrix.tiles; first += batch * stride) {
    // ---- asked for early: they come while the batch is multiplied
    const int my_tile = first + own_tile * stride;
    const bool mine = own_tile < batch && my_tile < matrix.tiles;
    // Multiplied where they are needed: a product here would wait for memory, before every batch.
    float factors[2] = {0.0f, 0.0f};
    float power = 0.0f;  // of two
    float before[2] = {0.0f, 0.0f};
    float norm_weight[2] = {0.0f, 0.0f};  // with a router
    int row = 0;
    bool low_there = false, high_there = false;
    const bool gated = my_tile >= matrix.tiles - args.gated_tiles;
    if (mine) {
      const Part& part = matrix.parts[part_of(matrix, my_tile)];
      const int index = my_tile - part.first_tile;
      const bool paired = gated || args.end == RowsEnd::kSwiGlu;
      const int in_part = index * (paired ? 8 : 16) + own_g;
      low_there = in_part < part.rows;
      high_there = !paired && in_part + 8 < part.rows;
      row = part.first_row + in_part;
      power = part.format == Weights::kBf16  ? rows_scale(Weights::kBf16)
              : part.format == Weights::kFp8 ? rows_scale(Weights::kFp8)
                                             : rows_scale(Weights::kNvfp4);
      factors[0] = part.factors[index * 16 + own_g];
      factors[1] = part.factors[index * 16 + 8 + own_g];
      if constexpr (T.route > 0) {
        if (low_there) norm_weight[0] = args.routing.norm_weight[row];
        if (high_there) norm_weight[1] = args.routing.norm_weight[row + 8];
      }
    }
    if (first == cta) {  // what does not depend on the kernel before this one is under way
      grid_dependency_wait();
      if constexpr (T.choice) grid_launch_dependents();
      if constexpr (T.norm_pieces > 0) {
        place_norm<Tile>(args, rows, reinterpret_cast<float*>(smem + map.norm), norm_weights);
        __syncthreads();
      } else if (one_panel) {
        place_panel<Tile>(args, rows, panel);
        __syncthreads();
      }
    }
    if constexpr (T.route > 0) {
      const float* residual = args.routing.residual + own_row * args.routing.residual_stride + row;
      if (low_there) before[0] = __ldcg(residual);
      if (high_there) before[1] = __ldcg(residual + 8);
    } else if (args.end == RowsEnd::kAdd) {
      const float* out = static_cast<const float*>(args.out) + own_row * args.out_stride + row;
      if (low_there) before[0] = __ldcg(out);
      if (high_there) before[1] = __ldcg(out + 8);
    }

    // ---- this team's row tiles of the batch
    for (int round = 0; round < batch; round += T.teams) {
      if (first + round * stride >= matrix.tiles) break;
      if (walk.tile >= matrix.tiles) {
        // Nothing for this team, but the others' panels.
        for (int panel = 0; !one_panel && panel < matrix.units; panel += args.panel_units) {
          next_panel<Tile>(args, rows, panel);
        }
        continue;
      }
      if (walk.tile >= walk.end) locate();
      Sums<T.row_tiles> sums = {};
      multiplier.clear();
      with_format<Tile>(walk.format, [&]<Weights F>() {
        constexpr int kUnits = step_units(F);
        const u32 x_stride = 2u * kUnits * multiplier.row_stride;
        int step = strip_warp;
        for (int panel = 0; panel < units; panel += args.panel_units) {
          if (!one_panel) next_panel<Tile>(args, rows, panel);
          const int next = panel + args.panel_units;
          const int end = next >= units ? walk.steps : steps_of(F, next);
          u32 x = rows_at + static_cast<u32>(step - steps_of(F, panel)) * x_stride;
          for (; step < end; step += T.strip_warps) {
            async_copy_wait<T.slots - 1>();
            __syncwarp();
            multiplier.template step<F>(ring + slot, units - step * kUnits, x, cells, sums, [&] {
              __syncwarp();
              requests.next();
            });
            slot += kSlotBytes;
            if (slot == T.slots * kSlotBytes) slot = 0;
            x += T.strip_warps * x_stride;
          }
        }
        multiplier.add_to(sums, 1.0f, 1.0f);
      });
      walk.tile += Walk<Tile>::stride();
      float* to = partials + half * partials_half + ((round + team) * T.strip_warps + strip_warp) * tokens * 16 + g;
#pragma unroll
      for (int n = 0; n < T.row_tiles; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int t = n * 8 + 2 * l + e;
          if (t >= tokens) continue;
          to[t * 16] = sums.v[n][e];
          to[t * 16 + 8] = sums.v[n][2 + e];
        }
      }
    }

    // What is read of this half is read before the next barrier, and it is written again after that.
    __syncthreads();
    if (mine) {
      const float* from = partials + half * partials_half + (own_tile * T.strip_warps * tokens + own_row) * 16 + own_g;
      float y[2] = {from[0], from[8]};
#pragma unroll
      for (int w = 1; w < T.strip_warps; ++w) {
        y[0] += from[w * tokens * 16];
        y[1] += from[w * tokens * 16 + 8];
      }
      y[0] *= factors[0] * power;
      y[1] *= factors[1] * power;
      const long long at = own_row * (gated ? args.gated_stride : args.out_stride) + row;
      if constexpr (T.route > 0) {  // y as the norm will add it
        float* normed = reinterpret_cast<float*>(smem + map.routed) + own_row * 16 + own_g;
        normed[0] = (before[0] + nvfp4::bf16_to_float(to_bf16(y[0]))) * norm_weight[0];
        normed[8] = (before[1] + nvfp4::bf16_to_float(to_bf16(y[1]))) * norm_weight[1];
      }
      switch (gated ? RowsEnd::kSwiGlu : args.end) {
        case RowsEnd::kSwiGlu: {
          u16* out = gated ? args.gated_out : static_cast<u16*>(args.out);
          if (low_there) out[at] = to_bf16(silu(y[0]) * y[1]);
          break;
        }
        case RowsEnd::kBf16:
          if (low_there) static_cast<u16*>(args.out)[at] = to_bf16(y[0]);
          if (high_there) static_cast<u16*>(args.out)[at + 8] = to_bf16(y[1]);
          break;
        case RowsEnd::kAdd: {
          const float scale = args.row_scales != nullptr ? __ldcg(args.row_scales + own_row) : 1.0f;
          if (low_there) static_cast<float*>(args.out)[at] = fmaf(y[0], scale, before[0]);
          if (high_there) static_cast<float*>(args.out)[at + 8] = fmaf(y[1], scale, before[1]);
          break;
        }
        case RowsEnd::kFloat:
          if (low_there) static_cast<float*>(args.out)[at] = y[0];
          if (high_there) static_cast<float*>(args.out)[at + 8] = y[1];
          break;
      }
    }
    if constexpr (T.route > 0) {
      __syncthreads();
      routing.add(args.routing, cta, tokens, reinterpret_cast<const float*>(smem + map.routed), thread);
    }
    half ^= 1;
  }
}

}  // namespace fourfold::gemm
