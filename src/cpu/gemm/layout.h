// The packed form of a weight matrix and the table of kernels that read it. Included by files compiled for one
// instruction set each, so it holds plain data and constants only: an inline function here would be compiled several
// times with different flags, and the linker would keep any one of them.
//
// Rows are grouped in panels of 16. A panel is a [words, 16] matrix of 32-bit words: word w of row r holds the
// consecutive columns that fit in 32 bits (2 bf16 or f16, 1 f32), first column in the lowest bits, exactly as the
// checkpoint has them in a row. So packing is a transposition of words, and one vector of words has one row in each
// 32-bit lane: no kernel needs a horizontal sum. For bf16 this is also the operand layout of vdpbf16ps and of an AMX B
// tile.
//
// FP8: words of 16 bits with 2 e4m3 codes, [words, 16], a multiple of two of them (64 bytes, 4 columns). Shifted into
// place, the even or odd bytes of a vector are then f16 numbers of one column after the other, rows in order, as the
// conversion to fp32 reads them.
//
// NVFP4: a panel is a sequence of groups of 64 columns, 576 bytes each and one after the other, so that a panel is one
// stream: first the block scales [4 blocks, 16 rows], 64 bytes, then the words [8, 16], 512 bytes. The last group has
// room for all four rows of scales but only for the words there are.
//   A word holds 8 e2m1 codes: columns 0 2 4 6 in its low half, 1 3 5 7 in its high half (lowest bits first), so that
//   one shift puts a pair of columns where a bf16 pair belongs.
//   A block scale is one byte with 5 bits of exponent and 3 of mantissa: 2^(exponent - 22) x (1 + mantissa / 8), and 0
//   is zero. Every e4m3 magnitude has such a code (subnormals become normal numbers), and code << 20 is an fp32 that is
//   the scale x 2^-105, without denormals. Negative scales flip the signs of their codes instead; NaN is refused.
//
// Missing rows of the last panel and missing columns of the last word are zero.
#pragma once

#include <cstdint>

namespace fourfold::cpu::gemm {

enum class Kind : uint8_t { kF32, kBf16, kF16, kFp8, kNvfp4 };

inline constexpr int kPanelRows = 16;
inline constexpr int kGemvTokens = 4;     // most tokens that a gemv kernel takes at once
inline constexpr int kGemvPanels = 2;     // most panels
inline constexpr int kBlockColumns = 16;  // columns that share an NVFP4 scale
inline constexpr int kGroupColumns = 64;  // NVFP4: columns of a group
inline constexpr int kGroupScales = 64;   // bytes of its scales
inline constexpr int kGroupBytes = 576;
inline constexpr int kStepColumns = 4;   // FP8: row scales change at multiples of this
inline constexpr int kPanelAlign = 64;   // bytes; panels start on cache lines
inline constexpr int kColumnAlign = 32;  // packed activations are padded with zeros to a multiple of this
inline constexpr int kTileTokens = 16;   // most tokens of one packed activation tile, of any kernel
inline constexpr int kGemmTokens = 128;  // most tokens that one gemm call takes
inline constexpr int kPairRows = 2 * kPanelRows;

constexpr uint32_t kind_bit(Kind kind) { return 1u << static_cast<int>(kind); }
inline constexpr uint32_t kAllKinds = 31;
// Exact in bf16.
inline constexpr uint32_t kBf16Kinds = kind_bit(Kind::kBf16) | kind_bit(Kind::kFp8) | kind_bit(Kind::kNvfp4);

// One panel as a kernel sees it. The true weight is element x row_scale; fp8 elements are read as their value x 2^-8,
// and their row scales are 2^8 larger than the checkpoint's.
struct Panel {
  const uint8_t* words = nullptr;
  const uint8_t* ahead = nullptr;     // what the same stream reads after this panel, fetched while its end is worked on
  const float* row_scales = nullptr;  // [segments, 16] at a distance of row_scale_stride floats
  int64_t row_scale_stride = 0;
  int64_t segment = 0;  // columns that share row scales; at least `columns` when there is one segment
  int64_t columns = 0;
  Kind kind = Kind::kF32;
};

// 16 activations as integers for the dot product with e2m1 codes: x = step x (256 hi + lo), a 16-bit integer in two
// signed bytes. Byte order follows the words: columns 0 4 1 5 (low nibbles of the bytes of a word), 2 6 3 7 (high
// nibbles), 8 12 9 13, 10 14 11 15.
struct ActivationBlock {
  int8_t hi[16];
  int8_t lo[16];
  int32_t correction;  // -12 x the sum of the 16 integers: codes are looked up as 2 w + 12, which is never negative
  float scale;         // step x 2^40: half of 2^41, since codes are doubled; what is missing to 2^105 comes at the end
};
inline constexpr float kActivationScale = 0x1p40f;
// The largest activation of a block as an integer: its high byte, rounded, still fits, and it is a multiple of 24, so
// that activations that are e2m1 codes times one scale (--activations nvfp4) become integers without rounding,
// whichever code is the largest.
inline constexpr float kActivationSteps = 32496.0f;
inline constexpr float kDotScale = 0x1p64f;     // of a finished sum of block products
inline constexpr float kBlockScale = 0x1p105f;  // of a block scale read as fp32
// Bytes ahead of the ones being read that are fetched into L1, and into L2, of all streams together.
inline constexpr int kPrefetch = 4608;
inline constexpr int kPrefetchFar = 9216;

// The kernels of one instruction set. All sums are fp32 (int32 within an NVFP4 block), each output has its own
// accumulators, and their order depends on the columns only: a token's result does not depend on its neighbours or on
// threads.
struct KernelTable {
  const char* name;
  // Up to this many tokens gemv is the faster way, where there is a choice.
  int gemv_limit;

  // x[columns] -> columns / 16 blocks. A block with a value that is not finite gets scale NaN.
  void (*quantize)(const float* x, int64_t columns, ActivationBlock* out);
  // out[p x kGemvTokens + t][16] = panels[p] x token t, row scales applied; tokens 1..kGemvTokens, count 1 or 2, both
  // panels with the same kind, columns and segment. Two panels are two streams: the processor fetches further ahead.
  void (*gemv_nvfp4)(const Panel* panels, int count, const ActivationBlock* const* x, int tokens, float* out);
  // The same for the other kinds; x[t] has columns padded with zeros to a whole word.
  void (*gemv_float)(const Panel* panels, int count, const float* const* x, int tokens, float* out);

  // Packed activations of up to kGemmTokens tokens.
  int64_t (*packed_bytes)(int64_t tokens, int64_t columns);
  void (*pack)(const float* const* x, int64_t tokens, int64_t columns, void* packed);
  // out[t][32] = (panels[0], panels[1]) x token t; count is 1 or 2, both with the same columns; with one panel the
  // upper 16 floats are left alone. `scratch` has gemm_scratch bytes, aligned to 64.
  void (*gemm)(const Panel* panels, int count, const void* packed, int64_t tokens, void* scratch, float* out);
  int64_t gemm_scratch;
  // Tokens of a call at which gemm is fastest, a multiple of kTileTokens: more reuse of weights against activations
  // that leave L2.
  int gemm_tokens;

  // Kinds that pack and gemm take, as bits 1 << kind; the others go to a table that takes all, as do panels whose row
  // scales change elsewhere than at multiples of kColumnAlign columns.
  uint32_t gemm_kinds;

  // out[i] = silu(gate[i]) x up[i], n a multiple of 16.
  void (*swiglu)(const float* gate, const float* up, float* out, int64_t n);
  // out[i] += weight x x[i], n a multiple of 16.
  void (*axpy)(float weight, const float* x, float* out, int64_t n);
};

// Null where this build has none (other processors).
const KernelTable* avx2_kernels();
const KernelTable* avxvnni_kernels();     // AVX2 and AVX-VNNI
const KernelTable* avx512_kernels();      // F, BW, DQ, VL
const KernelTable* avx512vnni_kernels();  // and VNNI, VBMI
const KernelTable* amx_kernels();         // and AMX-TILE, AMX-BF16
const KernelTable* neon_kernels();        // every arm64
const KernelTable* dotprod_kernels();     // and FEAT_DotProd
const KernelTable* i8mm_kernels();        // and FEAT_I8MM: gemm of NVFP4
const KernelTable* bfmmla_kernels();      // and FEAT_BF16: gemm of bf16 and FP8

}  // namespace fourfold::cpu::gemm
