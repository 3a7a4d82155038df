// Products of 17 rows and more: tiles, shared-memory maps, arguments and launch shape. Host and device, freestanding.
#pragma once

#include "kernels/gemm/layout.h"

namespace fourfold::gemm {

enum class DenseEnd : int {
  kBf16 = 0,    // out, bf16
  kFloat = 1,   // out, fp32
  kAdd = 2,     // out, fp32, += sum x row_scales
  kSwiGlu = 3,  // paired: out, bf16, silu(gate) x up
};

struct DenseArgs {
  Matrix matrix;
  int tokens;
  DenseEnd end;
  const unsigned short* x;  // bf16, rows of 16-byte pieces
  long long x_stride;       // elements
  void* out;
  long long out_stride;     // elements
  const float* row_scales;  // kAdd: [tokens]; null: 1
  int zero;                 // 0
  // gemm_wide: the columns are shared out among so many CTAs, `split_units` units each; up to 1: they are not.
  int splits;
  int split_units;
  float* partial;  // wide_partial_bytes()
  int* arrived;    // [wide_items() / splits][kWideWarps], 0 before and after
};

// A group of row tiles that a CTA multiplies at once is of one matrix of the stack; the last one of each may be short.
FOURFOLD_HD constexpr int part_tiles(const Matrix& m, int part) {
  return (part + 1 < m.count ? m.parts[part + 1].first_tile : m.tiles) - m.parts[part].first_tile;
}
FOURFOLD_HD constexpr int dense_groups(const Matrix& m, int group_tiles) {
  int groups = 0;
  for (int p = 0; p < m.count; ++p) groups += (part_tiles(m, p) + group_tiles - 1) / group_tiles;
  return groups;
}

// ---- mma.sync (dense.cuh): every architecture -----------------------------------------------------------------------

inline constexpr int kDenseTiles = 8;  // row tiles of a CTA
inline constexpr int kDenseThreads = 256;

struct DenseTile {
  int formats;    // as in RowsTile
  int tokens;     // of a CTA: a multiple of 64 / row_warps
  int row_warps;  // of the eight warps; the others share the tokens
  int stages;
  int ctas;  // per SM

  FOURFOLD_HD constexpr bool has(Weights format) const { return (formats >> static_cast<int>(format) & 1) != 0; }
  FOURFOLD_HD constexpr bool cells() const { return (formats & kCells) != 0; }
  FOURFOLD_HD constexpr int mt() const { return kDenseTiles / row_warps; }       // row tiles of a warp
  FOURFOLD_HD constexpr int nt() const { return tokens / 8 / (8 / row_warps); }  // 8 tokens each, of a warp
  FOURFOLD_HD constexpr int unit_bytes_most() const {
    return has(Weights::kBf16) ? 2048 : has(Weights::kFp8) ? 1024 : moe::kUnitBytes;
  }
};

template <int Formats, int Tokens, int RowWarps, int Stages, int Ctas>
struct DenseTileOf {
  static constexpr DenseTile value{Formats, Tokens, RowWarps, Stages, Ctas};
};

struct DenseMap {
  unsigned weights;  // [stages][kDenseTiles] units
  unsigned weight_stride;
  unsigned rows;  // [stages][tokens][64] bf16, 16-byte piece c of row r at place c ^ (r % 8)
  unsigned row_stride;
  unsigned total;
};
FOURFOLD_HD constexpr DenseMap dense_map(const DenseTile& t) {
  DenseMap m = {};
  m.weight_stride = static_cast<unsigned>(kDenseTiles * t.unit_bytes_most());
  m.row_stride = static_cast<unsigned>(t.tokens) * 128u;
  m.rows = m.weight_stride * static_cast<unsigned>(t.stages);
  m.total = m.rows + m.row_stride * static_cast<unsigned>(t.stages);
  return m;
}
FOURFOLD_HD constexpr int dense_grid(const DenseTile& t, const Matrix& m, int tokens) {
  return dense_groups(m, kDenseTiles) * ((tokens + t.tokens - 1) / t.tokens);
}

// ---- wgmma (dense_sm90.cuh): sm_90a ---------------------------------------------------------------------------------

inline constexpr int kWideTiles = 16;     // row tiles of a CTA: two consumer warpgroups of 128 rows
inline constexpr int kWideThreads = 384;  // and one of producers
inline constexpr int kWideProducers = 4;
inline constexpr int kWideWarps = 8;  // that multiply

struct WideTile {
  int formats;  // as in RowsTile
  int tokens;   // of a CTA: a multiple of 16, up to 128; with cells up to 64
  int stages;   // of 64 columns

  FOURFOLD_HD constexpr bool has(Weights format) const { return (formats >> static_cast<int>(format) & 1) != 0; }
  FOURFOLD_HD constexpr bool cells() const { return (formats & kCells) != 0; }
  FOURFOLD_HD constexpr int unit_bytes_most() const {
    return has(Weights::kBf16) ? 2048 : has(Weights::kFp8) ? 1024 : moe::kUnitBytes;
  }
};

template <int Formats, int Tokens, int Stages>
struct WideTileOf {
  static constexpr WideTile value{Formats, Tokens, Stages};
};

// Rows of x that one copy brings.
FOURFOLD_HD constexpr int wide_copied_rows(const WideTile& t) { return t.tokens / kWideProducers; }

struct WideMap {
  unsigned rows;  // [stages][tokens][64] bf16, 128-byte swizzle
  unsigned row_stride;
  unsigned weights;  // [stages][kWideTiles] units
  unsigned weight_stride;
  unsigned barriers;  // [2][stages] mbarriers
  unsigned total;
};
FOURFOLD_HD constexpr WideMap wide_map(const WideTile& t) {
  WideMap m = {};
  m.row_stride = static_cast<unsigned>(t.tokens) * 128u;  // a multiple of 2048: atoms stay aligned to 1024
  m.weights = m.row_stride * static_cast<unsigned>(t.stages);
  m.weight_stride = static_cast<unsigned>(kWideTiles * t.unit_bytes_most());
  m.barriers = m.weights + m.weight_stride * static_cast<unsigned>(t.stages);
  m.total = m.barriers + static_cast<unsigned>(t.stages) * 16u;
  return m;
}
FOURFOLD_HD constexpr int wide_items(const WideTile& t, const Matrix& m, int tokens) {
  return dense_groups(m, kWideTiles) * ((tokens + t.tokens - 1) / t.tokens);
}
// Units of columns for each CTA, where rows and tokens alone do not give every SM work; at least four.
FOURFOLD_HD constexpr int wide_split_units(const WideTile& t, const Matrix& m, int tokens, int sms) {
  const int spare = sms / wide_items(t, m, tokens);
  const int most = m.units / 4 < 16 ? m.units / 4 : 16;
  const int splits = spare < most ? spare : most;
  return splits > 1 ? (m.units + splits - 1) / splits : m.units;
}
FOURFOLD_HD constexpr int wide_splits(const Matrix& m, int split_units) {
  return (m.units + split_units - 1) / split_units;
}
// Of all CTAs that share out columns: 256 rows x tokens fp32 each.
FOURFOLD_HD constexpr long long wide_partial_bytes(const WideTile& t, int sms) { return 1024LL * t.tokens * sms; }
// Persistent CTAs, one to an SM.
FOURFOLD_HD constexpr int wide_grid(const WideTile& t, const Matrix& m, int tokens, int splits, int sms) {
  const int items = wide_items(t, m, tokens) * splits;
  return items < sms ? items : sms;
}

}  // namespace fourfold::gemm
