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
  // gemm_wide: the columns of the items behind the first `whole` are shared out among so many CTAs, `split_units` units
  // each; up to 1: they are not.
  int splits;
  int split_units;
  int whole;
  int band;        // of blocks of tokens that all rows are multiplied with before the next ones (wide_band); 0: all
  float* partial;  // wide_partial_bytes()
  int* arrived;    // [items that are shared][kWideWarps], 0 before and after
  // gemm_middle: `split_units` units for each CTA, whatever items they are of; `partial`: middle_partial_bytes();
  // `arrived`: [CTAs], 0 before and after.
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

// Row tiles of matrices beside each other in the stack that are stored alike are multiplied together.
FOURFOLD_HD constexpr bool stored_alike(const Part& a, const Part& b) {
  return a.format == b.format && (a.cells == nullptr) == (b.cells == nullptr) && a.cell_units == b.cell_units;
}
// The first part behind those that are stored as `part` is.
FOURFOLD_HD constexpr int run_end(const Matrix& m, int part) {
  int end = part + 1;
  while (end < m.count && stored_alike(m.parts[part], m.parts[end])) ++end;
  return end;
}
FOURFOLD_HD constexpr int run_tiles(const Matrix& m, int part, int end) {
  return (end < m.count ? m.parts[end].first_tile : m.tiles) - m.parts[part].first_tile;
}
FOURFOLD_HD constexpr int run_groups(const Matrix& m, int group_tiles) {
  int groups = 0;
  for (int p = 0, end = 0; p < m.count; p = end) {
    end = run_end(m, p);
    groups += (run_tiles(m, p, end) + group_tiles - 1) / group_tiles;
  }
  return groups;
}

// Units that a stage of the wgmma kernels has of each row tile: copies of about two kilobytes.
FOURFOLD_HD constexpr int stage_units(Weights format) { return format == Weights::kBf16 ? 1 : 2; }
FOURFOLD_HD constexpr int most_stage_units(int formats) {
  return formats & 1 << static_cast<int>(Weights::kFp8) || formats & 1 << static_cast<int>(Weights::kNvfp4) ? 2 : 1;
}
FOURFOLD_HD constexpr int most_stage_bytes(int formats) {
  int most = 0;
  for (int f = 0; f < kWeightFormats; ++f) {
    const Weights format = static_cast<Weights>(f);
    const int bytes = stage_units(format) * unit_bytes(format);
    if ((formats >> f & 1) != 0 && bytes > most) most = bytes;
  }
  return most;
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
  int stages;   // of units()

  FOURFOLD_HD constexpr bool has(Weights format) const { return (formats >> static_cast<int>(format) & 1) != 0; }
  FOURFOLD_HD constexpr bool cells() const { return (formats & kCells) != 0; }
  // With many rows of x weights come from L2, and more stages are worth more than longer copies.
  FOURFOLD_HD constexpr bool many() const { return tokens > 64; }
  FOURFOLD_HD constexpr int units(Weights format) const { return many() ? 1 : stage_units(format); }
  FOURFOLD_HD constexpr int most_units() const { return many() ? 1 : most_stage_units(formats); }
  FOURFOLD_HD constexpr int most_bytes() const {
    return !many()               ? most_stage_bytes(formats)
           : has(Weights::kBf16) ? unit_bytes(Weights::kBf16)
           : has(Weights::kFp8)  ? unit_bytes(Weights::kFp8)
                                 : unit_bytes(Weights::kNvfp4);
  }
};

template <int Formats, int Tokens, int Stages>
struct WideTileOf {
  static constexpr WideTile value{Formats, Tokens, Stages};
};

inline constexpr unsigned kWideItem = 32, kWideSources = 32;  // bytes
inline constexpr unsigned kWideStaging = 2048;  // bytes for each warp that multiplies: 32 tokens of 32 rows, bf16

struct WideMap {
  unsigned rows;  // [stages][units][tokens][64] bf16, 128-byte swizzle
  unsigned row_stride;
  unsigned weights;  // [stages][kWideTiles][units] units
  unsigned weight_stride;
  unsigned staging;   // [kWideWarps]
  unsigned items;     // [stages], of items that begin there
  unsigned ahead;     // [kWideProducers], the next item and its sources
  unsigned barriers;  // [2][stages] mbarriers
  unsigned total;
};
FOURFOLD_HD constexpr WideMap wide_map(const WideTile& t) {
  WideMap m = {};
  // A multiple of 2048: atoms stay aligned to 1024.
  m.row_stride = static_cast<unsigned>(t.most_units() * t.tokens) * 128u;
  m.weights = m.row_stride * static_cast<unsigned>(t.stages);
  m.weight_stride = static_cast<unsigned>(kWideTiles * t.most_bytes());
  m.staging = m.weights + m.weight_stride * static_cast<unsigned>(t.stages);
  m.items = m.staging + kWideWarps * kWideStaging;
  m.ahead = m.items + static_cast<unsigned>(t.stages) * kWideItem;
  m.barriers = m.ahead + kWideProducers * (kWideItem + kWideSources);
  m.total = m.barriers + static_cast<unsigned>(t.stages) * 16u;
  return m;
}
FOURFOLD_HD constexpr int wide_items(const WideTile& t, const Matrix& m, int tokens) {
  return run_groups(m, kWideTiles) * ((tokens + t.tokens - 1) / t.tokens);
}
// Blocks of tokens whose rows of x have about eight megabytes: they stay in L2 while all weights pass.
FOURFOLD_HD constexpr int wide_band(const WideTile& t, const Matrix& m) {
  const int band = static_cast<int>((8LL << 20) / (static_cast<long long>(t.tokens) * m.columns * 2));
  return band > 1 ? band : 1;
}
// The order of `groups` x `blocks` items: all groups of rows with a band of blocks of tokens, then with the next one;
// in a band the blocks of a group stand beside each other. `band` 0: all blocks are one band.
struct WidePlace {
  int group, block;
};
FOURFOLD_HD constexpr WidePlace wide_place(int groups, int blocks, int band, int index) {
  if (band <= 0 || band > blocks) band = blocks;
  const int first = index / (groups * band) * band;  // of the band's blocks
  const int width = blocks - first < band ? blocks - first : band;
  const int in_band = index - groups * first;
  return {in_band / width, first + in_band % width};
}
// How long an item's end takes where so many CTAs share its columns, in tenths of a microsecond, as measured on an H200
// (docs/kernels/products.md): a ticket, and for each 64 rows of x sums that are stored, and read one CTA's after the
// other.
FOURFOLD_HD constexpr int wide_sums(const WideTile& t, int splits) {
  return splits > 1 ? 20 + (t.tokens + 63) / 64 * (15 + 5 * splits) : 0;
}
// Which items are shared out by columns, and how: all of them where they do not give every SM work, otherwise those
// that are left behind the last round of all SMs. A CTA has at least four units of a shared item.
struct WideCut {
  int whole;  // items that are not shared
  int splits;
  int split_units;
  int time;  // in tenths of a microsecond, between the kernel's beginning and its end
};
FOURFOLD_HD constexpr WideCut wide_cut(const WideTile& t, const Matrix& m, int tokens, int sms) {
  const int unit = t.many() ? 7 : t.tokens > 32 ? 5 : 4;  // copies or multiplication
  const int items = wide_items(t, m, tokens);
  const int rounds = items / sms, left = items % sms;
  const int most = m.units / 4 < 16 ? m.units / 4 : 16;
  WideCut best = {items, 1, m.units, (rounds + (left > 0 ? 1 : 0)) * m.units * unit};
  for (int s = 2; left > 0 && s <= most; ++s) {
    const int units = (m.units + s - 1) / s;
    const int splits = (m.units + units - 1) / units;
    if (left * splits > (rounds == 0 ? 2 * sms : sms)) break;
    const int turns = left * splits > sms ? 2 : 1;
    const int time = rounds * m.units * unit + turns * (units * unit + wide_sums(t, splits));
    if (time < best.time) best = {items - left, splits, units, time};
  }
  return best;
}
// Of all CTAs that share out columns, in two turns: 256 rows x tokens fp32 each.
FOURFOLD_HD constexpr long long wide_partial_bytes(const WideTile& t, int sms) { return 2048LL * t.tokens * sms; }
// Persistent CTAs, one to an SM.
FOURFOLD_HD constexpr int wide_grid(const WideTile& t, const Matrix& m, int tokens, const WideCut& cut, int sms) {
  const int items = cut.whole + (wide_items(t, m, tokens) - cut.whole) * cut.splits;
  return items < sms ? items : sms;
}

// ---- wgmma, few rows (middle_sm90.cuh): sm_90a ----------------------------------------------------------------------

inline constexpr int kLeastRows = 32;       // of x: up to so many have tiles of their own
inline constexpr int kMiddleRows = 64;      // of x, of an item; of a tile for fewer, as many as that has
inline constexpr int kMiddleTiles = 8;      // row tiles of an item: one for each warp that multiplies
inline constexpr int kMiddleThreads = 288;  // and one that copies
inline constexpr int kMiddlePieces = 24;    // of an item's columns, at most

struct MiddleTile {
  int formats;  // as in RowsTile
  int stages;   // of stage_units()
  int ctas;     // per SM
  int rows = kMiddleRows;

  FOURFOLD_HD constexpr bool has(Weights format) const { return (formats >> static_cast<int>(format) & 1) != 0; }
  FOURFOLD_HD constexpr bool cells() const { return (formats & kCells) != 0; }
  FOURFOLD_HD constexpr int most_units() const { return most_stage_units(formats); }
};

template <int Formats, int Stages, int Ctas, int Rows = kMiddleRows>
struct MiddleTileOf {
  static constexpr MiddleTile value{Formats, Stages, Ctas, Rows};
};

struct MiddleMap {
  unsigned rows;  // [stages][stage_units][rows][64] bf16, 128-byte swizzle; at the end sums: [rows / 8][8][32] float4
  unsigned row_stride;
  unsigned weights;  // [stages][kMiddleTiles][stage_units] units
  unsigned weight_stride;
  unsigned barriers;  // [2][stages] mbarriers
  unsigned total;
};
FOURFOLD_HD constexpr MiddleMap middle_map(const MiddleTile& t) {
  MiddleMap m = {};
  m.row_stride = static_cast<unsigned>(t.most_units() * t.rows) * 128u;
  m.weights = m.row_stride * static_cast<unsigned>(t.stages);
  m.weight_stride = static_cast<unsigned>(kMiddleTiles * most_stage_bytes(t.formats));
  m.barriers = m.weights + m.weight_stride * static_cast<unsigned>(t.stages);
  m.total = m.barriers + static_cast<unsigned>(t.stages) * 16u;
  return m;
}
// Items are 128 rows, kMiddleRows rows of x and all columns; their units, one item after the other, are dealt out in
// equal shares, so that a CTA may have the end of one item and the beginning of the next.
FOURFOLD_HD constexpr int middle_blocks(int tokens, int rows = kMiddleRows) { return (tokens + rows - 1) / rows; }
FOURFOLD_HD constexpr long long middle_units(const Matrix& m, int tokens, int rows = kMiddleRows) {
  return static_cast<long long>(run_groups(m, kMiddleTiles)) * middle_blocks(tokens, rows) * m.units;
}
// Units for each CTA: no item comes in more than kMiddlePieces pieces, and nobody starts for less than `least`.
FOURFOLD_HD constexpr int middle_split_units(const MiddleTile& t, const Matrix& m, int tokens, int sms, int least) {
  const long long slots = static_cast<long long>(sms) * t.ctas;
  long long share = (middle_units(m, tokens, t.rows) + slots - 1) / slots;
  const int most_cut = (m.units + kMiddlePieces - 2) / (kMiddlePieces - 1);
  share = share > most_cut ? share : most_cut;
  share = share > least ? share : least;
  return static_cast<int>((share + t.most_units() - 1) / t.most_units() * t.most_units());
}
// Units for each CTA so that an item's columns are `pieces` shares: a CTA then has a piece of one item, not the end of
// one and the beginning of another; 0: not all CTAs would have room.
FOURFOLD_HD constexpr int middle_even_units(const MiddleTile& t, const Matrix& m, int tokens, int sms, int pieces) {
  const int each = (m.units + pieces - 1) / pieces;
  const int share = (each + t.most_units() - 1) / t.most_units() * t.most_units();
  if (m.units % share != 0) return 0;
  return middle_units(m, tokens, t.rows) / share <= static_cast<long long>(sms) * t.ctas ? share : 0;
}
FOURFOLD_HD constexpr int middle_grid(const Matrix& m, int tokens, int split_units, int rows = kMiddleRows) {
  return static_cast<int>((middle_units(m, tokens, rows) + split_units - 1) / split_units);
}
// gemm_cluster: so many CTAs share the columns of an item; units of each.
inline constexpr int kClusterCtas = 8;
FOURFOLD_HD constexpr int cluster_share(const MiddleTile& t, const Matrix& m) {
  const int share = (m.units + kClusterCtas - 1) / kClusterCtas;
  return (share + t.most_units() - 1) / t.most_units() * t.most_units();
}
FOURFOLD_HD constexpr int cluster_grid(const Matrix& m, int tokens) {
  return run_groups(m, kMiddleTiles) * middle_blocks(tokens) * kClusterCtas;
}
// Of each CTA the pieces of two items: 128 rows x 64 fp32.
FOURFOLD_HD constexpr long long middle_partial_bytes(int grid) {
  return 2LL * grid * kMiddleTiles * 16 * kMiddleRows * 4;
}

}  // namespace fourfold::gemm
