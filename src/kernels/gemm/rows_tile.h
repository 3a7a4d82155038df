// Products of 1 to 16 rows (rows.cuh): tiles, the shared-memory map, arguments and launch shape. Host and device,
// freestanding.
#pragma once

#include "kernels/gemm/layout.h"
#include "kernels/gemm/routing.h"
#include "kernels/moe/tables.h"
#include "kernels/norm/norm_args.h"

namespace fourfold::gemm {

// What a warp multiplies at a time: about two kilobytes of a row tile's strip. A strip's steps are dealt out to
// `strip_warps` warps: that, and the order in which these warps' sums are added, fixes a result's bits, so that one
// number of them serves a matrix whatever the number of rows is.
FOURFOLD_HD constexpr int step_units(Weights format) {
  return format == Weights::kBf16 ? 1 : format == Weights::kFp8 ? 2 : 4;
}
FOURFOLD_HD constexpr int step_bytes(Weights format) { return unit_bytes(format) * step_units(format); }
FOURFOLD_HD constexpr int steps_of(Weights format, int units) {
  return (units + step_units(format) - 1) / step_units(format);
}
inline constexpr unsigned kSlotBytes = 2304;  // the largest step; fp8 keeps its cells' scales behind its codes
static_assert(step_bytes(Weights::kNvfp4) == kSlotBytes);

struct RowsTile {
  int formats;          // bit 1 << Weights: what the stack holds; kCells: fp8 with several scales along a row too
  int row_tiles;        // of 8 rows of x: 1 or 2
  int strip_warps;      // that share a strip
  int teams;            // of so many warps, each with row tiles of its own
  int slots;            // steps that a warp has under way
  int ctas;             // per SM; a launch may have fewer
  int norm_pieces;      // x is the norm of a residual of up to 2048 times so many columns; 0: x comes as it is
  bool choice = false;  // one CTA more, the first, makes the router's choice
  bool share = false;   // the norm's residual takes a share before the delta
  int route = 0;        // so many of a router's columns a thread adds up (routing.h); 0: there is no router

  FOURFOLD_HD constexpr bool cells() const { return (formats & kCells) != 0; }
  FOURFOLD_HD constexpr bool has(Weights format) const { return (formats >> static_cast<int>(format) & 1) != 0; }
  FOURFOLD_HD constexpr int warps() const { return teams * strip_warps; }
  FOURFOLD_HD constexpr int threads() const { return warps() * 32; }
  FOURFOLD_HD constexpr int rows() const { return row_tiles * 8; }
  // Room for the next kernel's CTAs beside this one's where the registers suffice (about 112 for a thread), or its
  // early launch buys little.
  FOURFOLD_HD constexpr int resident() const { return (ctas + 1) * threads() * 112 <= 65536 ? ctas + 1 : ctas; }
};

template <int Formats, int RowTiles, int StripWarps, int Teams, int Slots, int Ctas, int NormPieces,
          bool Choice = false, bool Share = false, int Route = 0>
struct RowsTileOf {
  static constexpr RowsTile value{Formats, RowTiles, StripWarps, Teams, Slots, Ctas, NormPieces, Choice, Share, Route};
};

// Row tiles of a CTA whose sums meet at a time, one output pair (rows g and g + 8 of a tile, one row of x) for a thread
// at most. Heads in small formats have so many of so few steps that a barrier every 8 of them costs 3 % of their time.
FOURFOLD_HD constexpr int rows_batch(const RowsTile& t, int tokens) {
  const int fits = t.threads() / 8 / tokens;
  const int most = tokens == 1 && t.ctas > 1 && t.strip_warps <= 4 ? 32 : 8;
  return (fits < most ? fits : most) / t.teams * t.teams;
}

struct RowsMap {
  unsigned ring;      // [warps][slots] steps
  unsigned norm;      // [2][8] float
  unsigned partials;  // [2][batch][strip_warps][rows of x][16] float
  unsigned routed;    // with a router: [rows of x][16] float
  unsigned rows;      // x: [units][2][rows of x][4] pieces of 16 bytes
  unsigned total;
};

// x in shared memory: a panel of `units` units, all of x where it fits; filled up with zeros to whole steps.
FOURFOLD_HD constexpr RowsMap rows_map(const RowsTile& t, int tokens, int panel_units) {
  RowsMap m = {};
  unsigned at = 0;
  m.ring = at;
  at += static_cast<unsigned>(t.warps() * t.slots) * kSlotBytes;
  m.norm = at;
  at += 64u;
  m.partials = at;
  at += static_cast<unsigned>(2 * rows_batch(t, tokens) * t.strip_warps * tokens) * 64u;
  m.routed = at;
  if (t.route > 0) at += static_cast<unsigned>(tokens) * 64u;
  m.rows = at;
  at += static_cast<unsigned>((panel_units + 3) / 4 * 4 * tokens) * 128u;
  m.total = at;
  return m;
}
// The most units, a multiple of 4, of a panel in at most `shared` bytes in all; 0: not even four fit.
FOURFOLD_HD constexpr int panel_units(const RowsTile& t, int units, int tokens, unsigned shared) {
  if (rows_map(t, tokens, units).total <= shared) return units;
  int panel = units / 4 * 4;
  while (panel > 0 && rows_map(t, tokens, panel).total > shared) panel -= 4;
  return panel;
}

// What becomes of the sums.
enum class RowsEnd : int {
  kBf16 = 0,    // out, bf16
  kFloat = 1,   // out, fp32
  kAdd = 2,     // out, fp32, += sum x row_scales
  kSwiGlu = 3,  // paired: out, bf16, silu(gate) x up
};

using RouteArgs = moe::ChoiceArgs;
inline constexpr int kRouteThreads = 256;
// Of the kernel that routes rows whose logits another one computed: a warp a row.
FOURFOLD_HD constexpr int route_grid(int tokens) { return (tokens + kRouteThreads / 32 - 1) / (kRouteThreads / 32); }
inline constexpr int kMostRouted = moe::kMaxExperts;

struct RowsArgs {
  Matrix matrix;
  int tokens;  // rows of x
  int panel_units;
  RowsEnd end;
  // x, bf16, [tokens][stride]; of kernels with a norm: x = bf16(norm(residual + delta) x weight).
  const unsigned short* x;
  long long x_stride;
  const float* residual;
  long long residual_stride;
  const unsigned short* delta;  // bf16; null: none
  long long delta_stride;
  const float* norm_weight;
  float norm_eps;
  float* residual_out;       // residual + delta, same stride, not the same memory; null: nobody wants it
  unsigned short* norm_out;  // the rows as they are multiplied, [tokens][columns]; null: nobody wants them
  void* out;
  long long out_stride;     // elements
  const float* row_scales;  // kAdd: [tokens]; null: 1
  norm::Share share;        // of tiles with one
  // So many row tiles at the stack's end are paired and end as kSwiGlu does, here; for the others `end` is not kAdd.
  int gated_tiles;
  unsigned short* gated_out;
  long long gated_stride;  // elements
  RouteArgs choice;        // of tiles with one
  Routing routing;         // of tiles with a router: a CTA has one row tile at most, ends as kBf16
  int zero;                // 0
};

// Persistent CTAs, `ctas` to an SM, each takes every grid-th row tile; with the one that chooses.
FOURFOLD_HD constexpr int rows_grid(const RowsTile& t, int tiles, int sms, int ctas) {
  const int most = sms * ctas - (t.choice ? 1 : 0);
  return (tiles < most ? tiles : most) + (t.choice ? 1 : 0);
}

}  // namespace fourfold::gemm
