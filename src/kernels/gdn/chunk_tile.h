// Shapes, workspace and shared memory of the chunked delta rule (chunk_prepare.cuh, chunk_scan.cuh,
// chunk_scan_sm90.cuh). Read by host and device, includes nothing of CUDA.
#pragma once

#include "kernels/gdn/tables.h"

namespace fourfold::gdn {

inline constexpr int kPrepareThreads = 256;  // that prepare a chunk of a key head together: a team
inline constexpr int kBesideTeams = 3;       // of a CTA beside the scan: they fill an SM, and the scan has others
inline constexpr int kScaleThreads = 256;
inline constexpr int kMostRatio = 8;  // value heads of a key head

struct ChunkTile {
  int key_dim;
  int value_dim;
  int chunk;     // tokens
  int columns;   // of a head's values in a CTA of the scan: 16 for each pair, or four, of warps
  bool helpers;  // four warps for 16 columns instead of two: convolution and output have warps of their own
  bool bulk;     // the copy engine brings what the scan takes (sm_90 and later); otherwise cp.async
  bool float32;  // the rows' elements; otherwise bf16
  // delta_scan_wgmma and delta_gate (sm_90a) instead of delta_scan and delta_scale: 64 tokens, 64 columns, bulk copies.
  bool wgmma = false;

  FOURFOLD_MIXER_FN int element() const { return float32 ? 4 : 2; }
  FOURFOLD_MIXER_FN int pairs() const { return columns / 16; }
  FOURFOLD_MIXER_FN int splits() const { return value_dim / columns; }
  FOURFOLD_MIXER_FN int scan_threads() const { return wgmma ? 512 : pairs() * (helpers ? 128 : 64); }
  // Bytes of a row of keys and queries, and of a row of a chunk x chunk matrix: odd multiples of 16, so that eight rows
  // lie in different banks. For wgmma what the scan takes are operands with 128-byte swizzle instead: pieces of 64
  // columns, [64 rows][128 bytes] each.
  FOURFOLD_MIXER_FN int key_stride() const { return key_dim * 2 + 16; }
  FOURFOLD_MIXER_FN int square_stride() const { return wgmma ? 128 : chunk * 2 + 16; }
  FOURFOLD_MIXER_FN int key_bytes() const { return wgmma ? chunk * key_dim * 2 : chunk * key_stride(); }
  FOURFOLD_MIXER_FN int square_bytes() const { return 2 * chunk * square_stride(); }  // two bf16: value and rest
  FOURFOLD_MIXER_FN int score_bytes() const { return wgmma ? square_bytes() / 2 : square_bytes(); }  // wgmma: no rest
  // Where 16 bytes from column 8 `piece` on of a row of keys or queries are, and two bytes of a chunk x chunk matrix.
  FOURFOLD_MIXER_FN int key_place(int row, int piece) const {
    return wgmma ? piece / 8 * (chunk * 128) + row * 128 + (piece % 8 ^ row % 8) * 16 : row * key_stride() + piece * 16;
  }
  FOURFOLD_MIXER_FN int square_place(int row, int column) const {
    return row * square_stride() + (wgmma ? (column / 8 ^ row % 8) * 16 + column % 8 * 2 : column * 2);
  }
  // [chunk] each: e^c, e^(c_last - c), with c the sum of the chunk's log decays up to a token.
  FOURFOLD_MIXER_FN int gate_bytes() const { return 2 * chunk * 4; }
  FOURFOLD_MIXER_FN int input_stride() const { return columns * element(); }
  FOURFOLD_MIXER_FN int value_stride() const { return chunk + 4; }  // floats
  FOURFOLD_MIXER_FN bool legal() const {
    return key_dim % 16 == 0 && value_dim % 16 == 0 && key_dim <= kMostDim && value_dim <= kMostDim &&
           (chunk == 32 || chunk == 64) && columns % 16 == 0 && value_dim % columns == 0 &&
           (wgmma ? chunk == 64 && columns == 64 && (key_dim == 64 || key_dim == 128) &&
                        (value_dim == 64 || value_dim == 128) && bulk && !float32
                  : pairs() * (helpers ? 2 : 1) <= 4);
  }
};

// What the scan takes of a chunk. Of a key head: keys, queries (normalised, bf16). Of a value head: (I + A)^-1, the
// masked products of queries and keys, gates.
struct ChunkSpace {
  long long keys;     // [chunk][key head] key_bytes
  long long queries;  //
  long long inverse;  // [chunk][value head] square_bytes
  long long scores;   // [chunk][value head] score_bytes
  long long gates;    // [chunk][value head] gate_bytes
  long long stored;   // int [chunk][value head]: CTAs of the scan that have stored outputs; for wgmma
  long long squares;  // fp32 [row][value head][value_dim / 16]: sums of squares of the outputs; not for wgmma
  long long total;
};
FOURFOLD_MIXER_FN ChunkSpace chunk_space(const ChunkTile& t, const DeltaShape& shape, int chunks, int rows) {
  ChunkSpace s{};
  s.keys = 0;
  s.queries = s.keys + static_cast<long long>(chunks) * shape.key_heads * t.key_bytes();
  s.inverse = s.queries + static_cast<long long>(chunks) * shape.key_heads * t.key_bytes();
  s.scores = s.inverse + static_cast<long long>(chunks) * shape.value_heads * t.square_bytes();
  s.gates = s.scores + static_cast<long long>(chunks) * shape.value_heads * t.score_bytes();
  s.stored = s.gates + static_cast<long long>(chunks) * shape.value_heads * t.gate_bytes();
  s.squares = s.stored + (t.wgmma ? static_cast<long long>(chunks) * shape.value_heads * 4 : 0);
  s.total = s.squares + (t.wgmma ? 0 : static_cast<long long>(rows) * shape.value_heads * (t.value_dim / 16) * 4);
  return s;
}

struct ChunkPlace {
  int sequence;  // -1: nobody
  int index;     // of the chunk in the sequence
};

// SMs that prepare goes on with while the scan runs on the others; 0: the scan follows. What takes a round of all teams
// a chunk of a key head is the unit of time: the scan has 11 chunks in it, and begins when one team of every SM has had
// a turn. It waits for the chunks of sequences that come before its own.
FOURFOLD_MIXER_FN int beside_sms(const ChunkTile& t, const DeltaShape& shape, int chunks, int sequences, int most_rows,
                                 int sms) {
  constexpr float kScanned = 11.0f, kOneTeam = 0.55f;
  const int left = sms - shape.value_heads * t.splits() * sequences;
  if (!t.wgmma || left <= 0) return 0;
  const float items = static_cast<float>(chunks * shape.key_heads) / kBesideTeams;  // of an SM
  const float scan = static_cast<float>((most_rows + t.chunk - 1) / t.chunk) / kScanned;
  const float first = static_cast<float>(sms + (kBesideTeams - 1) * left) / kBesideTeams;
  const float later = items - first;  // than the first turns
  const float prepare = later > 0 ? later / static_cast<float>(left) : 0;
  const float before = prepare * static_cast<float>(sequences - 1) / static_cast<float>(sequences);
  const float ends = kOneTeam + before + scan;
  const float beside = ends > 1.0f + prepare ? ends : 1.0f + prepare;
  return beside <= items / static_cast<float>(sms) + scan ? left : 0;
}

struct ChunkArgs {
  DeltaArgs delta;
  const ChunkPlace* chunks;  // of the step
  const int* first_chunk;    // [sequence]: its first one in `chunks`
  unsigned char* space;      // 16-byte aligned
  ChunkSpace at;
  // Where the scan runs beside prepare: how many `chunks` are, and beside_sms().
  int count;
  int kept;
  // Of prepare for the scan beside it: [chunk][value head][split], zero. Raised when a chunk is prepared, lowered by
  // the CTA of the scan that waits for it. Null: each kernel waits for the end of the one before.
  int* flags;
};
FOURFOLD_MIXER_FN long long chunk_flags(const ChunkTile& t, const DeltaShape& shape, int chunks) {
  return t.wgmma ? static_cast<long long>(chunks) * shape.value_heads * t.splits() : 0;
}

// What is needed one after the other lies at the same place: three CTAs have room on an SM.
inline constexpr int kPrepareGroups = 2;  // of warps, each with a value head of its own
struct PrepareMap {
  unsigned inputs;  // [3 + chunk][2 key_dim] elements; later the two products, fp32 [chunk][chunk + 4]
  unsigned keys_keys, queries_keys;
  unsigned keys;  // [chunk][key_stride] bytes; later the matrices of the groups
  unsigned queries;
  unsigned matrices;  // [group] fp32 [chunk][chunk + 4]: (I + A)^-1, and above its blocks of the diagonal A, transposed
  unsigned gates;     // [value head of the key head][2][chunk] fp32: c (first the log decay), beta
  unsigned total;     // of a team
};
FOURFOLD_MIXER_FN int prepare_stride(const ChunkTile& t) { return t.chunk + 4; }  // floats
FOURFOLD_MIXER_FN unsigned prepare_square(const ChunkTile& t) {
  return static_cast<unsigned>(t.chunk * prepare_stride(t) * 4);
}
FOURFOLD_MIXER_FN PrepareMap prepare_map(const ChunkTile& t) {
  PrepareMap m{};
  const unsigned inputs = static_cast<unsigned>((kHistory + t.chunk) * 2 * t.key_dim * t.element());
  const unsigned products = 2 * prepare_square(t);
  const unsigned keys = static_cast<unsigned>(t.chunk * t.key_stride());
  const unsigned matrices = kPrepareGroups * prepare_square(t);
  m.inputs = 0;
  m.keys_keys = 0;
  m.queries_keys = prepare_square(t);
  m.keys = ((inputs > products ? inputs : products) + 15u) / 16u * 16u;
  m.queries = m.keys + keys;
  m.matrices = m.keys;
  m.gates = m.keys + (2 * keys > matrices ? 2 * keys : matrices);
  m.total = m.gates + static_cast<unsigned>(kMostRatio * 2 * t.chunk * 4);
  return m;
}
FOURFOLD_MIXER_FN unsigned beside_bytes(const ChunkTile& t) { return kBesideTeams * prepare_map(t).total; }

// Two of each: one is loaded, or written, while the other one is used.
struct ScanMap {
  unsigned updates;  // keys, inverse, gates of a chunk
  unsigned update_stride;
  unsigned outputs;  // queries, scores, gates
  unsigned output_stride;
  unsigned states;  // [pair] fragments of the state before a chunk: [key_dim / 16][2][32] 16 bytes
  unsigned state_stride;
  unsigned changes;  // [pair] fragments of the changes: [chunk / 16][2][32] 16 bytes
  unsigned change_stride;
  unsigned inputs;  // [3 + chunk][columns] elements
  unsigned input_stride;
  unsigned values;  // fp32 [columns][value_stride]
  unsigned values_stride;
  unsigned barriers;  // two
  unsigned total;
};
FOURFOLD_MIXER_FN ScanMap scan_map(const ChunkTile& t) {
  ScanMap m{};
  m.update_stride = static_cast<unsigned>(t.key_bytes() + t.square_bytes() + t.gate_bytes());
  m.output_stride = m.update_stride;
  // The rows of the outputs lie there, too: [chunk][17] fp32 of each pair.
  const int fragments = t.key_dim / 16 * 2 * 512;
  const int rows = (t.chunk * 17 * 4 + 15) / 16 * 16;
  m.state_stride = static_cast<unsigned>(t.pairs() * (fragments > rows ? fragments : rows));
  m.change_stride = static_cast<unsigned>(t.pairs() * (t.chunk / 16) * 2 * 512);
  m.input_stride = static_cast<unsigned>((kHistory + t.chunk) * t.input_stride());
  m.values_stride = static_cast<unsigned>(t.columns * t.value_stride() * 4);
  m.updates = 0;
  m.outputs = m.updates + 2 * m.update_stride;
  m.states = m.outputs + 2 * m.output_stride;
  m.changes = m.states + 2 * m.state_stride;
  m.inputs = m.changes + 2 * m.change_stride;
  m.values = m.inputs + 2 * m.input_stride;
  m.barriers = m.values + 2 * m.values_stride;
  m.total = m.barriers + 16;
  return m;
}

// Of delta_scan_wgmma. Updates: keys, (I + A)^-1 of a chunk, for K S0 and D; outputs: queries and scores.
inline constexpr int kUpdateStages = 3;
inline constexpr int kOutputStages = 2;
// Where a lane's four of V are, in 16 bytes from its warp's eight tokens on: columns g and g + 8 for two tokens. In
// another order for every second g and every second warp, so that a warp that writes two tokens of 32 columns, two
// apart, has all banks.
FOURFOLD_MIXER_FN int value_place(int warp, int lane) { return lane ^ lane / 8 * 2 ^ warp % 2; }
struct ScanWgmmaMap {
  unsigned updates;  // [stage] keys, inverse
  unsigned update_stride;
  unsigned outputs;  // [stage] queries, scores
  unsigned output_stride;
  unsigned states;   // [warp][key_dim / 16][lane] 16 bytes: fragments of the state before a chunk, rounded
  unsigned changes;  // [warp][chunk / 16][lane] 16 bytes: fragments of the changes, rounded
  unsigned rows;     // [warp][chunk][16] bf16: outputs on their way
  unsigned values;   // two of fp32 [warp][chunk / 8][lane][4]: as accumulators have them, value_place
  unsigned values_stride;
  unsigned update_gates;  // [stage] gate_bytes
  unsigned output_gates;  // [stage] the first half of them
  unsigned barriers;
  unsigned total;
};
FOURFOLD_MIXER_FN ScanWgmmaMap scan_wgmma_map(const ChunkTile& t) {
  ScanWgmmaMap m{};
  m.update_stride = static_cast<unsigned>(t.key_bytes() + t.square_bytes());
  m.output_stride = static_cast<unsigned>(t.key_bytes() + t.score_bytes());
  m.values_stride = static_cast<unsigned>(t.columns * t.chunk * 4);
  m.updates = 0;
  m.outputs = m.updates + kUpdateStages * m.update_stride;
  m.states = m.outputs + kOutputStages * m.output_stride;
  m.changes = m.states + static_cast<unsigned>(t.columns * t.key_dim * 2);
  m.rows = m.changes + static_cast<unsigned>(t.columns * t.chunk * 2);
  m.values = m.rows + static_cast<unsigned>(t.columns * t.chunk * 2);
  m.update_gates = m.values + 2 * m.values_stride;
  m.output_gates = m.update_gates + kUpdateStages * static_cast<unsigned>(t.gate_bytes());
  m.barriers = m.output_gates + kOutputStages * static_cast<unsigned>(t.gate_bytes() / 2);
  m.total = m.barriers + 8 * (2 * kUpdateStages + 2 * kOutputStages + 10);
  return m;
}
FOURFOLD_MIXER_FN unsigned scan_bytes(const ChunkTile& t) {
  return t.wgmma ? scan_wgmma_map(t).total : scan_map(t).total;
}

template <int KeyDim, int ValueDim, int Chunk, int Columns, bool Helpers, bool Bulk, bool Float32, bool Wgmma = false>
struct ChunkTileOf {
  static constexpr ChunkTile value{KeyDim, ValueDim, Chunk, Columns, Helpers, Bulk, Float32, Wgmma};
  static_assert(value.legal());
};

struct ChunkLaunch {
  unsigned grid_x, grid_y;
  unsigned threads;
  unsigned shared_bytes;
};
FOURFOLD_MIXER_FN ChunkLaunch prepare_launch(const ChunkTile& t, const DeltaShape& shape, int chunks) {
  return {static_cast<unsigned>(shape.key_heads), static_cast<unsigned>(chunks), kPrepareThreads, prepare_map(t).total};
}
FOURFOLD_MIXER_FN ChunkLaunch beside_launch(const ChunkTile& t, int sms) {
  return {static_cast<unsigned>(sms), 1, kBesideTeams * kPrepareThreads, beside_bytes(t)};
}
FOURFOLD_MIXER_FN ChunkLaunch scan_launch(const ChunkTile& t, const DeltaShape& shape, int sequences) {
  return {static_cast<unsigned>(shape.value_heads * t.splits()), static_cast<unsigned>(sequences),
          static_cast<unsigned>(t.scan_threads()), scan_bytes(t)};
}
inline constexpr int kScalePieces = 4;  // of 8 values, of a thread
FOURFOLD_MIXER_FN ChunkLaunch scale_launch(const ChunkTile& t, const DeltaShape& shape, int chunks) {
  const int pieces = shape.value_heads * t.value_dim / 8 * t.chunk;
  return {static_cast<unsigned>((pieces + kScaleThreads * kScalePieces - 1) / (kScaleThreads * kScalePieces)),
          static_cast<unsigned>(chunks), kScaleThreads, 0};
}

}  // namespace fourfold::gdn
