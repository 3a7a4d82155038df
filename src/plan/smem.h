// The shared-memory ledger: one function from a tile to its map of shared memory.
//
// The planner (host) sizes candidates with it, the launcher passes its total to the launch, and the kernel (device)
// takes every offset from it and asserts the total it was planned with:
//
//   constexpr fourfold::plan::TileConfig kTile = {...};                       // written by the planner, to_source()
//   static_assert(fourfold::plan::smem_total<kTile> == PLANNED_SMEM_BYTES);
//   extern __shared__ __align__(1024) unsigned char smem[];                   // no other shared variables in the
//   kernel auto* weights = smem + fourfold::plan::smem_offset<kTile, RegionId::kWeights>
//                        + stage * fourfold::plan::smem_stride<kTile, RegionId::kWeights>;
//
// Nobody else computes bytes. The header is freestanding (no include at all) so that NVRTC compiles it as it is.
#pragma once

#ifdef __CUDACC__
#define FOURFOLD_PLAN_FN __host__ __device__ constexpr
#else
#define FOURFOLD_PLAN_FN constexpr
#endif

namespace fourfold::plan {

// How the arithmetic of a tile is done. docs/plan.md describes each. All read the same stored copy of the weights:
// packed units of 16 rows x 64 K, codes and scales together (kernels/moe/layout.h), the weights on the M side.
enum class Family : int {
  kStreaming,  // few tokens per expert: a producer warp keeps bulk copies in flight, mma.sync m16n8k16
  kMmaSync,    // the same arithmetic with asynchronous copies issued by every warp; runs on sm_80 and later
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
  int inline_routes;    // 1: nothing is sorted. token_rows is 1: one token; more: few tokens, see few_tokens()
  int resident_k;       // few tokens, gate-up: columns of the token rows, which stay in shared memory; otherwise 0
  Epilogue epilogue;
};

// Two to eight tokens, each of them a column of the tile (kernels/moe/few_sm90.cuh). Gate-up keeps their rows in shared
// memory; a stage of down has room for the rows of token_rows of an expert's tokens.
FOURFOLD_PLAN_FN bool few_tokens(const TileConfig& t) { return t.inline_routes != 0 && t.token_rows > 1; }

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
  kActivations,       // [stage][token_rows][k]; one token: none; few, gate-up: [token_rows][resident_k] (wgmma: [stage]
                      // [k / 64][tokens][64], rows of 128 bytes swizzled)
  kActivationScales,  // FP4: [stage][tokens][k / vector] bytes
  kPartials,          // [2, or 1 in down of few tokens][k_warps, or none for one][operands * n / 16][tokens / 8][32]
                      // float4; one token: float2
  kRoutes,            // the choices of inline routing; few tokens, down: and a row of zeros
  kOutput,            // [tokens][n] bf16: the epilogue's staging
  kRows,              // [2][tokens] int: rows of the activations, double-buffered across tiles
  kBarriers,          // [2][stages] mbarriers: full, empty; two more if wide streaming; gate-up: four more for one
                      // token, six for few
  kCount,
};
inline constexpr int kRegionCount = static_cast<int>(RegionId::kCount);

struct Region {
  unsigned offset;
  unsigned size;    // bytes: stride * copies
  unsigned stride;  // bytes from one stage (or copy) to the next, a multiple of align
  unsigned copies;  // stages, or 1
  unsigned align;
  unsigned padding;  // bytes lost before this region to its alignment
  bool overlay;      // shares bytes that are idle when it is in use; takes none of its own
};

struct SmemMap {
  Region regions[kRegionCount];
  unsigned total;    // bytes to ask for at the launch
  unsigned payload;  // sum of the sizes of all regions that take bytes
  unsigned padding;  // total - payload
};

// Alignments. A 128-byte swizzle repeats every 8 rows, so its tiles start at 1024; a bulk copy's destination at 128
// keeps a tile's first row on one set of banks; everything else moves in 16-byte pieces.
inline constexpr unsigned kSwizzleAlign = 1024;
inline constexpr unsigned kTileAlign = 128;
inline constexpr unsigned kVectorAlign = 16;

FOURFOLD_PLAN_FN unsigned align_up(unsigned value, unsigned align) { return (value + align - 1) / align * align; }

inline constexpr unsigned kUnitRows = 16;           // of a packed unit
inline constexpr unsigned kUnitDepth = 64;          //
inline constexpr unsigned kRowSkew = 16;            // bytes after an activation row, so that the eight rows of an
                                                    // ldmatrix fall into different banks
inline constexpr unsigned kInlineRouteBytes = 272;  // kOneTableBytes of kernels/moe/stream_tile.h
inline constexpr unsigned kFewRouteBytes = 7824;    // the same for few tokens

// A streaming tile of so many compute warps takes registers from its producers for them, and raises flags for the next
// kernel (StreamTile::wide() in kernels/moe/stream_tile.h).
inline constexpr int kWideStreamingWarps = 16;

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
// Bytes of one copy of a region, before rounding to its stride; 0 when the tile has no such region.
FOURFOLD_PLAN_FN unsigned region_bytes(const TileConfig& t, RegionId id) {
  const unsigned rows = static_cast<unsigned>(t.tokens);
  const unsigned n = static_cast<unsigned>(t.n);
  const unsigned k = static_cast<unsigned>(t.k);
  const unsigned weight_rows = static_cast<unsigned>(t.operands) * n;
  const ScaleBlocks s = scale_blocks(t.k, t.scale_vector, t.family);
  const bool swizzled = t.family == Family::kWgmma;
  switch (id) {
    case RegionId::kWeights:
      return weight_rows / kUnitRows * (k / kUnitDepth) * unit_bytes(t);
    case RegionId::kActivations:
      if (t.inline_routes && !few_tokens(t)) return 0;  // its row stays in registers
      return (swizzled ? rows : static_cast<unsigned>(t.token_rows)) * activation_stride(t);
    case RegionId::kActivationScales:
      return t.family == Family::kFp4 ? rows * static_cast<unsigned>(s.blocks * s.block) : 0;
    case RegionId::kPartials:
      return static_cast<unsigned>((few_tokens(t) && t.pass == Pass::kDown ? 1 : 2) *
                                   (t.k_warps == 1 ? 0 : t.k_warps)) *
             (weight_rows / kUnitRows) * (rows / 8) * (t.inline_routes && !few_tokens(t) ? 256 : 512);
    case RegionId::kRoutes:
      if (few_tokens(t)) return kFewRouteBytes + (t.pass == Pass::kDown ? 2 * k : 0);
      return t.inline_routes ? kInlineRouteBytes : 0;
    case RegionId::kOutput:
      return t.epilogue == Epilogue::kDirect ? 0 : rows * n * 2;
    case RegionId::kRows:
      return t.family == Family::kMmaSync || t.family == Family::kFp4 ? 2 * rows * 4 : 0;
    case RegionId::kBarriers: {
      const bool streaming = t.family == Family::kStreaming;
      const bool inline_up = streaming && t.inline_routes && t.pass == Pass::kGateUp;
      const int more = inline_up ? (few_tokens(t) ? 3 : 2) : streaming && t.warps == kWideStreamingWarps ? 1 : 0;
      return t.producer_warps > 0 ? static_cast<unsigned>(t.stages + more) * 16 : 0;
    }
    case RegionId::kCount:
      break;
  }
  return 0;
}

FOURFOLD_PLAN_FN unsigned region_align(const TileConfig& t, RegionId id) {
  switch (id) {
    case RegionId::kActivations:
      return t.family == Family::kWgmma ? kSwizzleAlign : kTileAlign;
    case RegionId::kWeights:
    case RegionId::kPartials:
    case RegionId::kRoutes:
    case RegionId::kOutput:
      return kTileAlign;
    case RegionId::kBarriers:  // apart from what the epilogue writes
      return t.family == Family::kStreaming ? kTileAlign : kVectorAlign;
    default:
      return kVectorAlign;
  }
}

// From one copy to the next. Swizzled tiles keep their alignment in every stage; packed units and skewed rows need 16
// bytes only.
FOURFOLD_PLAN_FN unsigned stride_align(const TileConfig& t, RegionId id) {
  if (id == RegionId::kActivations && t.family == Family::kWgmma) return kSwizzleAlign;
  return kVectorAlign;
}

FOURFOLD_PLAN_FN bool staged(RegionId id) {
  return id == RegionId::kWeights || id == RegionId::kActivations || id == RegionId::kActivationScales;
}

// The region that lies at position i. Swizzled activations go first, where their alignment costs nothing.
FOURFOLD_PLAN_FN RegionId at_position(const TileConfig& t, int i) {
  const int activations = static_cast<int>(RegionId::kActivations);
  if (t.family != Family::kWgmma || i > activations) return static_cast<RegionId>(i);
  return i == 0 ? RegionId::kActivations : static_cast<RegionId>(i - 1);
}
}  // namespace detail

// The whole map: regions one after the other, each at its alignment. An overlay starts at 0 and costs only what it
// needs beyond the pipeline's buffers.
FOURFOLD_PLAN_FN SmemMap make_smem_map(const TileConfig& t) {
  SmemMap map = {};
  unsigned at = 0;
  for (int i = 0; i < kRegionCount; ++i) {
    const RegionId id = detail::at_position(t, i);
    Region& r = map.regions[static_cast<int>(id)];
    const unsigned bytes = detail::region_bytes(t, id);
    r.align = detail::region_align(t, id);
    r.offset = at;
    if (bytes == 0) continue;
    const bool resident = id == RegionId::kActivations && t.resident_k > 0;
    r.copies = detail::staged(id) && !resident ? static_cast<unsigned>(t.stages) : 1;
    r.stride = align_up(bytes, detail::stride_align(t, id));
    r.size = r.stride * r.copies;
    if (id == RegionId::kOutput && t.epilogue == Epilogue::kOverlay) {
      r.offset = 0;
      r.overlay = true;
      // What follows stays live during the epilogue, so the overlay must end before it begins.
      if (r.size > at) at = r.size;
      continue;
    }
    const unsigned start = align_up(at, r.align);
    r.padding = start - at;
    r.offset = start;
    at = start + r.size;
    map.payload += r.size;
  }
  map.total = align_up(at, kVectorAlign);
  map.padding = map.total - map.payload;
  return map;
}

FOURFOLD_PLAN_FN const Region& region(const SmemMap& map, RegionId id) { return map.regions[static_cast<int>(id)]; }

// Constants for device code: each is a scalar, so that it needs no storage on the device.
template <TileConfig T>
inline constexpr unsigned smem_total = make_smem_map(T).total;
template <TileConfig T, RegionId R>
inline constexpr unsigned smem_offset = make_smem_map(T).regions[static_cast<int>(R)].offset;
template <TileConfig T, RegionId R>
inline constexpr unsigned smem_stride = make_smem_map(T).regions[static_cast<int>(R)].stride;
template <TileConfig T, RegionId R>
inline constexpr unsigned smem_size = make_smem_map(T).regions[static_cast<int>(R)].size;

// Bytes that a full stage brings in: what an mbarrier expects.
FOURFOLD_PLAN_FN unsigned stage_bytes(const TileConfig& t) {
  unsigned sum = 0;
  for (int i = 0; i < kRegionCount; ++i) {
    const RegionId id = static_cast<RegionId>(i);
    if (id == RegionId::kActivations) {
      if (t.inline_routes) continue;
      sum += static_cast<unsigned>(t.token_rows * t.k * t.activation_bits) / 8;  // without the skew
    } else if (detail::staged(id)) {
      sum += detail::region_bytes(t, id);
    }
  }
  return sum;
}

}  // namespace fourfold::plan

#undef FOURFOLD_PLAN_FN
