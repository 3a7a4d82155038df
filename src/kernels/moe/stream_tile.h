// Tiles of the streaming kernels and their shared-memory map: one constexpr function for host and device.
#pragma once

#ifdef __CUDACC__
#define FOURFOLD_STREAM_HD __host__ __device__
#else
#define FOURFOLD_STREAM_HD
#endif

namespace fourfold::moe {

inline constexpr unsigned kOneTableBytes = 272;   // OneTables
inline constexpr unsigned kFewTableBytes = 7824;  // FewTables
inline constexpr int kStreamProducerRegisters = 32;
inline constexpr int kStreamConsumerRegisters = 112;

struct StreamTile {
  bool gate_up;
  bool one;  // nothing is sorted: moe_one for one token (rows 1) or moe_few; otherwise moe_stream
  int mt;    // row tiles (16 weight rows) per warp
  int wm;    // warps along rows
  int ws;    // warps along K by stage: each group takes every ws-th stage of an item (longer work per wait)
  int wu;    // warps along K inside a stage: each takes ku / wu units (shorter latency)
  int nt;    // token tiles of 8
  int rows;  // token rows a stage has room for: 8 nt, or fewer where the token count is known to be smaller
  int ku;    // units (64 K) per stage
  int stages;
  int ctas;       // per SM
  bool relu2;     // gate-up without a gate: h = max(x, 0)^2
  int row_units;  // few tokens, gate-up: of the token rows that stay in shared memory, at least all of K; otherwise 0

  FOURFOLD_STREAM_HD constexpr bool few() const { return one && rows > 1; }
  FOURFOLD_STREAM_HD constexpr int wk() const { return ws * wu; }
  // Unsorted: one brings weights. What follows it finishes gate-up's items, and for few tokens brings down's rows.
  FOURFOLD_STREAM_HD constexpr int producers() const {
    if (few()) return gate_up ? 3 : stages % 4 == 0 ? 5 : stages % 3 == 0 ? 4 : 3;
    return one ? (gate_up ? 2 : 1) : nt > 1 ? 4 : 2;
  }
  // Of them, those that copy: where flags are raised, one does nothing else.
  FOURFOLD_STREAM_HD constexpr int copiers() const { return producers() - (wide() ? 1 : 0); }
  FOURFOLD_STREAM_HD constexpr int threads() const { return (wm * wk() + producers()) * 32; }
  // One token: room for the next kernel's CTAs beside this one's, or its early launch buys nothing.
  FOURFOLD_STREAM_HD constexpr int resident() const { return one ? ctas + 1 : ctas; }
  // So many warps compute that registers are moved from the producers to them. Items are then long enough to
  // raise flags: gate-up's for down, down's for the sum.
  FOURFOLD_STREAM_HD constexpr bool wide() const { return !one && wm * wk() == 16; }
};

template <bool GateUp, bool One, int Mt, int Wm, int Ws, int Wu, int Nt, int Rows, int Ku, int Stages, int Ctas,
          bool Relu2 = false, int RowUnits = 0>
struct StreamTileOf {
  static constexpr StreamTile value{GateUp, One, Mt, Wm, Ws, Wu, Nt, Rows, Ku, Stages, Ctas, Relu2, RowUnits};
};

// One token: pairs of units of a stage that one warp multiplies.
FOURFOLD_STREAM_HD constexpr int one_pairs(const StreamTile& t) { return (t.ku / t.wu + 1) / 2; }

struct StreamMap {
  unsigned weights;  // [stages][mt wm][ku] units
  unsigned weight_stride;
  unsigned rows;  // [stages][rows][row stride] bf16; one token: nothing; gate-up of few: [rows][row stride]
  unsigned row_stage_stride;
  unsigned partials;  // [2, or 1 in down of few tokens][wk][wm][mt nt][32] float4; one token: float2
  unsigned choices;   // one token: OneTables; few: FewTables, and in down a row of zeros
  unsigned barriers;  // [2][stages] mbarriers; two more where it is wide; gate-up: four more for one token, six for few
  unsigned total;
};

// 16 bytes more than the row, so that the eight rows of an ldmatrix fall into different banks.
FOURFOLD_STREAM_HD constexpr unsigned stream_row_stride(const StreamTile& t) {
  return static_cast<unsigned>(t.row_units > 0 ? t.row_units : t.ku) * 128u + 16u;
}

FOURFOLD_STREAM_HD constexpr StreamMap stream_map(const StreamTile& t) {
  StreamMap m = {};
  const auto up = [](unsigned v) { return (v + 127u) / 128u * 128u; };
  unsigned at = 0;
  m.weights = at;
  m.weight_stride = static_cast<unsigned>(t.mt * t.wm * t.ku) * 576u;
  at = up(at + m.weight_stride * static_cast<unsigned>(t.stages));
  m.rows = at;
  const bool resident = t.row_units > 0, registers = t.one && !t.few();
  m.row_stage_stride = registers ? 0u : static_cast<unsigned>(t.rows) * stream_row_stride(t);
  at = up(at + m.row_stage_stride * static_cast<unsigned>(resident ? 1 : t.stages));
  m.partials = at;
  const int buffers = t.few() && !t.gate_up ? 1 : 2;
  at += static_cast<unsigned>(buffers * (t.wk() == 1 ? 0 : t.wk()) * t.wm * t.mt * t.nt) *
        (t.one && !t.few() ? 256u : 512u);
  at = up(at);
  m.choices = at;
  const unsigned zeros = t.gate_up ? 0u : static_cast<unsigned>(t.ku) * 128u;  // a row
  at = up(at + (t.few() ? kFewTableBytes + zeros : t.one ? kOneTableBytes : 0u));
  m.barriers = at;
  m.total = at + static_cast<unsigned>(t.stages) * 16u;
  m.total += t.wide() ? 16u : !t.gate_up ? 0u : t.few() ? 48u : t.one ? 32u : 0u;
  return m;
}

}  // namespace fourfold::moe
