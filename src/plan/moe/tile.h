// Tiles of the expert GEMMs and their maps of shared memory, for host and device (plan/smem.h). The planner writes a
// tile into the source of its kernel (to_source()); the kernel derives everything it needs from it.
#pragma once

#include "plan/smem.h"

namespace fourfold::plan::moe {

// A way to compute a tile, with a kernel of its own. plan/moe/families.cpp has a row for each. All read the same stored
// copy of the weights: packed units of 16 rows x 64 K, codes and scales together (kernels/moe/layout.h), the weights on
// the M side.
enum class Family : int {
  kStreaming,  // few tokens per expert: producer warps keep bulk copies in flight, mma.sync m16n8k16
  kOneToken,   // one token, nothing is sorted: the batch's only row stays in registers
  kFewTokens,  // two to eight tokens, nothing is sorted: each of them is a column of the tile
  kMmaSync,    // streaming's arithmetic with asynchronous copies issued by every warp; runs on sm_80 and later
  kWgmma,      // dequantise to bf16 in registers, wgmma m64nNk16
  kFp4,        // block-scaled mma m16n8k64, FP4 weights times FP4 activations
};

// Which of the two GEMMs of an expert layer.
enum class Pass : int {
  kGateUp,  // [2 x intermediate, hidden], or [intermediate, hidden] where the activation has no gate
  kDown,    // [hidden, intermediate]
};

// Where the output tile goes on its way to memory.
enum class Epilogue : int {
  kDirect,     // registers to memory
  kOverlay,    // staged over the pipeline's buffers, which are idle by then
  kDedicated,  // staged in a region of its own, so that the next tile's loads run on
};

// Everything the map depends on. Sizes are elements unless they say bytes. An aggregate of ints: it is a template
// argument in device code.
struct TileConfig {
  Family family;
  Pass pass;
  int tokens;           // token columns of the tile, a multiple of 8
  int token_rows;       // activation rows a stage has room for: tokens, or fewer where the batch is known to be smaller
  int n;                // weight rows of the tile, of each operand
  int k;                // elements of the contraction per stage; the last stage of a row may be shorter
  int stages;           // pipeline depth
  int warps;            // compute warps
  int producer_warps;   // warps that only load, with mbarriers: 0 means everyone loads (cp.async)
  int operands;         // weight matrices that share the activations: 2 for gate and up, otherwise 1
  int scale_vector;     // elements per scale factor: 16 (NVFP4) or 32 (MXFP4)
  int activation_bits;  // 16 or 4
  int swap_ab;          // 1: weights on the M side of the mma, tokens on the N side
  int k_warps;          // warps that share one output along K and add fp32 partial sums through shared memory; 1 = none
  int stage_warps;      // of k_warps: groups that take turns at whole stages; the others share the units of a stage
  int resident_k;       // few tokens, gate-up: columns of the token rows, which stay in shared memory; otherwise 0
  Epilogue epilogue;

  constexpr bool operator==(const TileConfig&) const = default;
};

// A streaming tile of so many compute warps takes registers from its producers for them. Its items are long enough to
// raise flags for the next kernel: gate-up's for down, down's for the sum.
// The widths that a wgmma tile of `tokens` compiles, ascending with i: 32, half, halfway from there to 24 less, 24, 16
// and 8 less, its own. A block is computed in the narrowest that holds it. They share accumulators and epilogue, so
// that a further one costs little to compile.
FOURFOLD_PLAN_FN int wgmma_width(int tokens, int i) {
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

inline constexpr int kWideStreamingWarps = 16;
FOURFOLD_PLAN_FN bool raises_flags(const TileConfig& t) {
  return t.family == Family::kStreaming && t.warps == kWideStreamingWarps;
}

// Few tokens: with so many columns for each of gate-up's warps an expert's only token is multiplied in a way of its
// own. That is shorter, but the sums of an item take longer.
FOURFOLD_PLAN_FN bool multiplies_alone(const TileConfig& t) {
  return t.pass == Pass::kGateUp && t.resident_k >= 6 * 64 * t.warps;
}

// ---- scale factors --------------------------------------------------------------------------------------------------

// The scale factors of one tile row and one stage, in blocks that a flat copy moves.
// A block holds min(tile_k / vector, 4) scales. One mma consumes `per_mma` of them; where that is fewer than the block
// holds, the other mma steps' scales are folded into the same block (fold = block / per_mma) and the copy stays flat.
//   NVFP4, K=64:  4 scales, block 4.  mma m16n8k64 takes 4 (fold 1); mma m16n8k16 takes 1 (fold 4).
//   MXFP4, K=64:  2 scales, block 2.  mma m16n8k64 takes 2 (fold 1).   K=128: block 4, fold 2.
struct ScaleBlocks {
  int per_row;  // scales of a row in one stage
  int block;    // scales of a row in one block
  int blocks;   // blocks per stage
  int per_mma;  // scales of a row that one mma (or one K step) consumes
  int fold;     // mma steps that share a block
};

FOURFOLD_PLAN_FN int mma_k(Family family) { return family == Family::kFp4 ? 64 : 16; }

FOURFOLD_PLAN_FN ScaleBlocks scale_blocks(int tile_k, int vector, Family family) {
  ScaleBlocks s = {};
  s.per_row = tile_k / vector;
  s.block = s.per_row < 4 ? s.per_row : 4;
  s.blocks = s.block == 0 ? 0 : (s.per_row + s.block - 1) / s.block;
  const int k_step = mma_k(family) < tile_k ? mma_k(family) : tile_k;
  s.per_mma = k_step < vector ? 1 : k_step / vector;  // a vector of 32 spans two k16 steps: both use the same scale
  s.fold = s.per_mma == 0 ? 0 : s.block / s.per_mma;
  return s;
}

// ---- the map --------------------------------------------------------------------------------------------------------

enum class RegionId : int {
  kWeights,           // [stage][operands * n / 16][k / 64] packed units
  kActivations,       // [stage][token_rows][k]; one token: none; few, gate-up: [token_rows][resident_k]; wgmma: [stage]
                      // [k / 64][tokens][64], rows of 128 bytes swizzled
  kActivationScales,  // FP4: [stage][tokens][k / vector] bytes
  kPartials,          // [2, or 1 in down of few tokens][k_warps, or none for one][operands * n / 16][tokens / 8][32]
                      // float4; one token: float2
  kRoutes,            // unsorted: the choices; few tokens, down: and a row of zeros
  kOutput,            // [tokens][n] bf16: the epilogue's staging
  kRows,              // [2][tokens] int: rows of the activations, double-buffered across tiles
  kBarriers,          // [2][stages] mbarriers: full, empty; and what a family adds
  kCount,
};
inline constexpr int kRegionCount = static_cast<int>(RegionId::kCount);
using SmemMap = Ledger<RegionId>;

inline constexpr unsigned kUnitRows = 16;   // of a packed unit
inline constexpr unsigned kUnitDepth = 64;  //
inline constexpr unsigned kRowSkew = 16;    // bytes after an activation row, so that the eight rows of an ldmatrix fall
                                            // into different banks
inline constexpr unsigned kOneTableBytes = 272;   // OneTables of kernels/moe/one_sm90.cuh
inline constexpr unsigned kFewTableBytes = 7824;  // FewTables of kernels/moe/few_sm90.cuh
inline constexpr unsigned kFragmentBytes = 512;   // 16 x 8 fp32 sums of a warp

// Warps that divide the weight rows of a tile; the others of a K slice divide its tokens. An FP4 warp keeps two row
// tiles where it can: they share the fragments of the activations, and together make a whole block of 16 of the next
// product's.
FOURFOLD_PLAN_FN int row_warps(const TileConfig& t) {
  const int slice = t.warps / t.k_warps;
  const int most = t.operands * t.n / 16 / (t.family == Family::kFp4 ? 2 : 1);
  return slice < most ? slice : most > 0 ? most : 1;
}

// Bytes of a packed unit: codes, then scales (576 for NVFP4, 544 for MXFP4).
FOURFOLD_PLAN_FN unsigned unit_bytes(const TileConfig& t) {
  return kUnitRows * kUnitDepth / 2 + kUnitRows * kUnitDepth / static_cast<unsigned>(t.scale_vector);
}

// Bytes from one activation row of a stage to the next.
FOURFOLD_PLAN_FN unsigned activation_stride(const TileConfig& t) {
  const int columns = t.resident_k > 0 ? t.resident_k : t.k;
  const unsigned bytes = static_cast<unsigned>(columns * t.activation_bits) / 8;
  return t.family == Family::kWgmma ? bytes : bytes + kRowSkew;
}

namespace detail {

// What families have in common.
struct MapMaker {
  const TileConfig& t;
  SmemMap map = {};

  FOURFOLD_PLAN_FN unsigned row_tiles() const { return static_cast<unsigned>(t.operands * t.n) / kUnitRows; }
  FOURFOLD_PLAN_FN unsigned stages() const { return static_cast<unsigned>(t.stages); }

  FOURFOLD_PLAN_FN void weights() {
    map.add(RegionId::kWeights, row_tiles() * (static_cast<unsigned>(t.k) / kUnitDepth) * unit_bytes(t), stages(),
            kTileAlign);
  }
  FOURFOLD_PLAN_FN void rows(unsigned copies) {
    map.add(RegionId::kActivations, static_cast<unsigned>(t.token_rows) * activation_stride(t), copies, kTileAlign);
  }
  // `buffers`: what one item leaves may be added up while the next one is multiplied.
  FOURFOLD_PLAN_FN void partials(unsigned buffers, unsigned fragment_bytes) {
    if (t.k_warps == 1) return;
    map.add(RegionId::kPartials,
            buffers * static_cast<unsigned>(t.k_warps) * row_tiles() * (static_cast<unsigned>(t.tokens) / 8) *
                fragment_bytes,
            1, kTileAlign);
  }
  FOURFOLD_PLAN_FN void output() {
    const unsigned bytes = static_cast<unsigned>(t.tokens * t.n) * 2;
    if (t.epilogue == Epilogue::kOverlay) map.overlay(RegionId::kOutput, bytes, kTileAlign);
    if (t.epilogue == Epilogue::kDedicated) map.add(RegionId::kOutput, bytes, 1, kTileAlign);
  }
  FOURFOLD_PLAN_FN void row_table() {
    map.add(RegionId::kRows, 2 * static_cast<unsigned>(t.tokens) * 4, 1, kVectorAlign);
  }
  // A pair for each stage, and `more` pairs.
  FOURFOLD_PLAN_FN void barriers(unsigned more, unsigned align) {
    if (t.producer_warps > 0) map.add(RegionId::kBarriers, (stages() + more) * 16, 1, align);
  }
};

FOURFOLD_PLAN_FN SmemMap streaming_map(const TileConfig& t) {
  MapMaker m{t};
  m.weights();
  m.rows(m.stages());
  m.partials(2, kFragmentBytes);
  m.output();
  m.barriers(raises_flags(t) ? 1 : 0, kTileAlign);  // an item's rows are stored; who raises flags knows
  return m.map;
}

FOURFOLD_PLAN_FN SmemMap one_token_map(const TileConfig& t) {
  MapMaker m{t};
  m.weights();
  m.partials(2, kFragmentBytes / 2);  // of a fragment's columns one is a token's
  m.map.add(RegionId::kRoutes, kOneTableBytes, 1, kTileAlign);
  m.barriers(t.pass == Pass::kGateUp ? 2 : 0, kTileAlign);  // sums there and taken, of both buffers
  return m.map;
}

FOURFOLD_PLAN_FN SmemMap few_tokens_map(const TileConfig& t) {
  const bool gate_up = t.pass == Pass::kGateUp;
  MapMaker m{t};
  m.weights();
  m.rows(t.resident_k > 0 ? 1 : m.stages());
  m.partials(gate_up ? 2 : 1, kFragmentBytes);
  m.map.add(RegionId::kRoutes, kFewTableBytes + (gate_up ? 0 : 2 * static_cast<unsigned>(t.k)), 1, kTileAlign);
  m.barriers(gate_up ? 3 : 0, kTileAlign);  // as for one token, and one for the token rows
  return m.map;
}

FOURFOLD_PLAN_FN SmemMap mma_sync_map(const TileConfig& t) {
  MapMaker m{t};
  m.weights();
  m.rows(m.stages());
  m.partials(2, kFragmentBytes);
  m.output();
  m.row_table();
  m.barriers(0, kVectorAlign);
  return m.map;
}

// Swizzled activations go first, where their alignment costs nothing.
FOURFOLD_PLAN_FN SmemMap wgmma_map(const TileConfig& t) {
  MapMaker m{t};
  m.map.add(RegionId::kActivations, static_cast<unsigned>(t.tokens) * activation_stride(t), m.stages(), kSwizzleAlign,
            kSwizzleAlign);
  m.weights();
  m.output();
  m.barriers(0, kVectorAlign);
  return m.map;
}

FOURFOLD_PLAN_FN SmemMap fp4_map(const TileConfig& t) {
  const ScaleBlocks s = scale_blocks(t.k, t.scale_vector, t.family);
  MapMaker m{t};
  m.weights();
  m.rows(m.stages());
  m.map.add(RegionId::kActivationScales, static_cast<unsigned>(t.tokens * s.blocks * s.block), m.stages(),
            kVectorAlign);
  m.output();
  m.row_table();
  m.barriers(0, kVectorAlign);
  return m.map;
}

}  // namespace detail

// The whole map of a tile.
FOURFOLD_PLAN_FN SmemMap make_smem_map(const TileConfig& t) {
  switch (t.family) {
    case Family::kStreaming:
      return detail::streaming_map(t);
    case Family::kOneToken:
      return detail::one_token_map(t);
    case Family::kFewTokens:
      return detail::few_tokens_map(t);
    case Family::kMmaSync:
      return detail::mma_sync_map(t);
    case Family::kWgmma:
      return detail::wgmma_map(t);
    case Family::kFp4:
      return detail::fp4_map(t);
  }
  return {};
}

// Constants for device code: each is a scalar, so that it needs no storage on the device.
template <typename Tile, RegionId R>
inline constexpr unsigned smem_offset = make_smem_map(Tile::value)[R].offset;
template <typename Tile, RegionId R>
inline constexpr unsigned smem_stride = make_smem_map(Tile::value)[R].stride;

}  // namespace fourfold::plan::moe
