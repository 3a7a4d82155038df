// Tiles of the wgmma kernels and their shared-memory map: one constexpr function for host and device.
#pragma once

#ifdef __CUDACC__
#define FOURFOLD_PREFILL_HD __host__ __device__
#else
#define FOURFOLD_PREFILL_HD
#endif

namespace fourfold::moe {

inline constexpr int kPrefillRowTiles = 16;     // 256 weight rows: 2 consumer warpgroups x 2 x 64
inline constexpr int kPrefillThreads = 384;     // one producer warpgroup and two consumers
inline constexpr int kPrefillProducers = 4;     // warps
inline constexpr int kPrefillTokenStep = 16;    // tiles come in steps of this
inline constexpr int kPrefillMostTokens = 176;  // above that two accumulators do not fit the registers

// The widths that a tile of `tokens` compiles, ascending with i: 32, half, halfway from there to 24 less, 24, 16 and 8
// less, its own. A block runs in the narrowest that holds it. They share accumulators and epilogue, so that a further
// one costs little to compile.
FOURFOLD_PREFILL_HD constexpr int prefill_width(int tokens, int i) {
  const int half = (tokens / 2 + 7) / 8 * 8;
  const int widths[7] = {32, half, (half + tokens - 24) / 16 * 8, tokens - 24, tokens - 16, tokens - 8, tokens};
  // Narrow tiles have fewer: what does not ascend is left out.
  int last = 0, at = 0;
  for (int w : widths) {
    if (w <= last || w < 16 || w > tokens) continue;
    if (at++ == i) return w;
    last = w;
  }
  return tokens;
}

struct PrefillTile {
  bool gate_up;
  int tokens;  // most tokens of a block: a multiple of 16 up to 176
  int stages;  // of 64 K
  bool relu2;  // gate-up without a gate: h = max(x, 0)^2

  // h columns of a CTA: a row of the staging
  FOURFOLD_PREFILL_HD constexpr int columns() const { return kPrefillRowTiles * (relu2 ? 16 : 8); }
};

template <bool GateUp, int Tokens, int Stages, bool Relu2 = false>
struct PrefillTileOf {
  static constexpr PrefillTile value{GateUp, Tokens, Stages, Relu2};
};

struct PrefillMap {
  unsigned rows;  // [stages][tokens][64] bf16, 128-byte swizzle
  unsigned row_stride;
  unsigned weights;  // [stages][16] units
  unsigned weight_stride;
  unsigned output;    // gate-up: [columns / 64][tokens][64] bf16, 128-byte swizzle
  unsigned barriers;  // [2][stages] mbarriers
  unsigned total;
};

FOURFOLD_PREFILL_HD constexpr PrefillMap prefill_map(const PrefillTile& t) {
  PrefillMap m = {};
  unsigned at = 0;
  m.rows = at;
  m.row_stride = static_cast<unsigned>(t.tokens) * 128u;  // a multiple of 2048: atoms stay aligned to 1024
  at += m.row_stride * static_cast<unsigned>(t.stages);
  m.weights = at;
  m.weight_stride = kPrefillRowTiles * 576u;
  at += m.weight_stride * static_cast<unsigned>(t.stages);
  m.output = at = (at + 127u) / 128u * 128u;
  at += t.gate_up ? static_cast<unsigned>(t.tokens * t.columns()) * 2u : 0u;
  m.barriers = at;
  at += static_cast<unsigned>(t.stages) * 16u;
  m.total = at;
  return m;
}

}  // namespace fourfold::moe
