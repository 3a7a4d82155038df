// The shared-memory ledger: one function from a tile to its map of shared memory.
//
// The planner (host) sizes candidates with it, the launcher passes its total to the launch, and the kernel (device)
// takes every offset from it and asserts the total it was planned with:
//
//   constexpr fourfold::plan::TileConfig kTile = {...};                       // written by the planner, to_source()
//   static_assert(fourfold::plan::smem_total<kTile> == PLANNED_SMEM_BYTES);
//   extern __shared__ __align__(1024) unsigned char smem[];                   // no other shared variables in the
//   kernel auto* weights = smem + fourfold::plan::smem_offset<kTile, RegionId::kWeights0>
//                        + stage * fourfold::plan::smem_stride<kTile, RegionId::kWeights0>;
//
// Nobody else computes bytes. The header is freestanding (no include at all) so that NVRTC compiles it as it is.
#pragma once

#ifdef __CUDACC__
#define FOURFOLD_PLAN_FN __host__ __device__ constexpr
#else
#define FOURFOLD_PLAN_FN constexpr
#endif

namespace fourfold::plan {

// How the arithmetic of a tile is done. docs/plan.md describes each.
enum class Family : int {
  kStreaming,  // few tokens: weights go from memory to registers, activation rows stay in shared memory
  kMmaSync,    // dequantise to bf16 in registers, mma.sync m16n8k16
  kWgmma,      // dequantise to bf16 in registers, wgmma m64nNk16
  kFp4,        // block-scaled mma m16n8k64 on FP4 operands; with 16-bit activations it is not this family
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
  int tokens;           // token rows of the tile
  int n;                // weight rows of the tile, of each operand
  int k;                // elements of the contraction per stage
  int stages;           // pipeline depth; the streaming family counts the loads that each warp keeps in flight, in
                        // registers, so its stages take no shared memory
  int warps;            // compute warps
  int producer_warps;   // warps that only load: 0 means everyone loads (cp.async, no mbarriers)
  int operands;         // weight matrices that share the activations: 2 for gate and up, otherwise 1
  int scale_vector;     // elements per scale factor: 16 (NVFP4) or 32 (MXFP4)
  int activation_bits;  // 16 or 4
  int swap_ab;          // 1: weights on the M side of the mma, tokens on the N side
  int k_warps;          // warps that share one output along K and add fp32 partial sums through shared memory; 1 = none
  int resident_k;       // streaming: activation elements of each token row kept in shared memory; otherwise 0
  Epilogue epilogue;
};

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
  kActivations,       // [stage][tokens][k], or [tokens][resident_k] for the streaming family
  kWeights0,          // [stage][n][k] e2m1: gate, or down, or the only operand
  kWeights1,          // [stage][n][k] e2m1: up
  kDequantised,       // [2][operands * n][k] bf16: wgmma with the tokens on the M side needs its weights in memory
  kScales0,           // [stage][block][n][scales of a block] bytes
  kScales1,           //
  kActivationScales,  // [stage][block][tokens][scales of a block] bytes, 4-bit activations only
  kPartials,          // [k_warps - 1][tokens][operands * n] fp32
  kOutput,            // [tokens][n] bf16 (or e2m1 plus scales, which is smaller): the epilogue's staging
  kBarriers,          // [2][stages] mbarriers (full, empty), then [2] for the epilogue
  kRowSource,         // [2][tokens] int: row of the activations, double-buffered across tiles
  kRowTarget,         // [2][tokens] int: row of the output
  kRowWeight,         // [2][tokens] fp32: routing weight
  kTile,              // 64 bytes: expert, row range and fp32 tensor scales of the tile in work and of the next
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

namespace detail {
// Bytes of one copy of a region, before rounding to its alignment; 0 when the tile has no such region.
FOURFOLD_PLAN_FN unsigned region_bytes(const TileConfig& t, RegionId id) {
  const bool staged = t.family != Family::kStreaming;
  const unsigned rows = static_cast<unsigned>(t.tokens);
  const unsigned n = static_cast<unsigned>(t.n);
  const unsigned k = static_cast<unsigned>(t.k);
  const ScaleBlocks s = scale_blocks(t.k, t.scale_vector, t.family);
  const unsigned scale_bytes = static_cast<unsigned>(s.blocks * s.block);
  switch (id) {
    case RegionId::kActivations:
      return staged ? rows * k * static_cast<unsigned>(t.activation_bits) / 8
                    : rows * static_cast<unsigned>(t.resident_k) * static_cast<unsigned>(t.activation_bits) / 8;
    case RegionId::kWeights0:
      return staged ? n * k / 2 : 0;
    case RegionId::kWeights1:
      return staged && t.operands == 2 ? n * k / 2 : 0;
    case RegionId::kDequantised:
      return t.family == Family::kWgmma && !t.swap_ab ? static_cast<unsigned>(t.operands) * n * k * 2 : 0;
    case RegionId::kScales0:
      return staged ? n * scale_bytes : 0;
    case RegionId::kScales1:
      return staged && t.operands == 2 ? n * scale_bytes : 0;
    case RegionId::kActivationScales:
      return t.activation_bits == 4 && staged ? rows * scale_bytes : 0;
    case RegionId::kPartials:
      return t.k_warps > 1 ? static_cast<unsigned>((t.k_warps - 1) * t.operands) * rows * n * 4 : 0;
    case RegionId::kOutput:
      return t.epilogue == Epilogue::kDirect ? 0 : rows * n * 2;
    case RegionId::kBarriers:
      return t.producer_warps > 0 ? static_cast<unsigned>(2 * t.stages + 2) * 8 : 0;
    case RegionId::kRowSource:
      return 2 * rows * 4;
    case RegionId::kRowTarget:
      return 2 * rows * 4;
    case RegionId::kRowWeight:
      return 2 * rows * 4;
    case RegionId::kTile:
      return 64;
    case RegionId::kCount:
      break;
  }
  return 0;
}

FOURFOLD_PLAN_FN unsigned region_align(const TileConfig& t, RegionId id) {
  switch (id) {
    case RegionId::kActivations:
      return t.family == Family::kWgmma ? kSwizzleAlign : t.family == Family::kStreaming ? kVectorAlign : kTileAlign;
    case RegionId::kDequantised:
      return kSwizzleAlign;
    case RegionId::kWeights0:
    case RegionId::kWeights1:
    case RegionId::kOutput:
      return kTileAlign;
    default:
      return kVectorAlign;
  }
}

FOURFOLD_PLAN_FN unsigned region_copies(const TileConfig& t, RegionId id) {
  switch (id) {
    case RegionId::kActivations:
      return t.family == Family::kStreaming ? 1 : static_cast<unsigned>(t.stages);
    case RegionId::kWeights0:
    case RegionId::kWeights1:
    case RegionId::kScales0:
    case RegionId::kScales1:
    case RegionId::kActivationScales:
      return static_cast<unsigned>(t.stages);
    case RegionId::kDequantised:
      return 2;
    default:
      return 1;
  }
}
}  // namespace detail

// The whole map. Regions follow each other in the order of RegionId, each at its alignment; an overlay starts at the
// activations' offset and costs only what it needs beyond the pipeline's buffers.
FOURFOLD_PLAN_FN SmemMap make_smem_map(const TileConfig& t) {
  SmemMap map = {};
  unsigned at = 0;
  unsigned overlay_end = 0;
  for (int i = 0; i < kRegionCount; ++i) {
    const RegionId id = static_cast<RegionId>(i);
    Region& r = map.regions[i];
    const unsigned bytes = detail::region_bytes(t, id);
    r.align = detail::region_align(t, id);
    if (bytes == 0) {
      r.offset = at;
      continue;
    }
    r.copies = detail::region_copies(t, id);
    r.stride = align_up(bytes, r.align);
    r.size = r.copies == 1 ? bytes : r.stride * r.copies;
    if (id == RegionId::kOutput && t.epilogue == Epilogue::kOverlay) {
      r.offset = 0;
      r.overlay = true;
      overlay_end = r.size;
      // Barriers and tables stay live during the epilogue, so the overlay must end before they begin.
      if (overlay_end > at) {
        map.padding += overlay_end - at;
        at = overlay_end;
      }
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

// Bytes that one stage brings in: what an mbarrier expects.
FOURFOLD_PLAN_FN unsigned stage_bytes(const TileConfig& t) {
  unsigned sum = 0;
  if (t.family == Family::kStreaming) return 0;
  for (int i = 0; i < kRegionCount; ++i) {
    const RegionId id = static_cast<RegionId>(i);
    if (id == RegionId::kActivations || id == RegionId::kWeights0 || id == RegionId::kWeights1 ||
        id == RegionId::kScales0 || id == RegionId::kScales1 || id == RegionId::kActivationScales) {
      sum += detail::region_bytes(t, id);
    }
  }
  return sum;
}

}  // namespace fourfold::plan

#undef FOURFOLD_PLAN_FN
