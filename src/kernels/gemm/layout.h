// How the weights of dense products y = x W^T are stored on a GPU: one form for every number of rows, one row of a
// table for each checkpoint matrix of a stack. The small-row kernels (mma.sync m16n8k16) and the kernels for many rows
// (wgmma, mma.sync) read the same bytes: in all of them the weights are the A operand, whose register fragments agree.
//
//   matrix   row tiles of 16 rows one after the other; a row tile's units lie along K, so that a row tile is one
//            contiguous strip. Rows and columns beyond the matrix are zero.
//   unit     16 rows x 64 columns, blocks j = 0..3 of 16 columns; with g = lane / 4, l = lane % 4 and k = 16 j + 2 l
//   the
//            registers of a lane's fragment of block j are
//              a0 (g, k..k+1)   a1 (g+8, k..k+1)   a2 (g, k+8..k+9)   a3 (g+8, k+8..k+9), the even k in the low half
//   bf16     2048 bytes: block j at 512 j, lane L's four registers at 16 L of it. f16 and f32 weights are rounded to
//   it. fp8      1024 bytes: blocks 2p and 2p+1 at 512 p, lane L's 16 bytes at 16 L of them: two words for each block,
//   the
//            first a0 and a1, the second a2 and a3 (pack_fp8_word)
//   nvfp4    576 bytes: the expert layer's unit (kernels/moe/layout.h)
//
// Paired (gate and up of a gated MLP): row tile t has rows 8 t .. of the first matrix as rows 0..7 and of the second as
// rows 8..15, so that one lane ends with gate and up of the same output.
//
// Scales. A product's sum is multiplied by its row's factor, fp32, [tiles][16]: the tensor scale of NVFP4, the scale of
// the tensor or row of FP8, 1 for bf16. FP8 with several scales along a row has them in cells, fp32,
// [tiles][cells][2]: for tile rows 0..7 and 8..15 and `cell_units` units of columns; their factors are 1.
//
// Freestanding: compiles under NVRTC, nvcc and the host compiler. Sizes in bytes unless said otherwise.
#pragma once

#include "kernels/moe/layout.h"
#include "nvfp4/number.h"

namespace fourfold::gemm {

using moe::kBlockK;
using moe::kTileRows;
using moe::kUnitK;

enum class Weights : int { kBf16 = 0, kFp8 = 1, kNvfp4 = 2 };
inline constexpr int kWeightFormats = 3;
inline constexpr int kCells = 1 << kWeightFormats;  // beside their bits: fp8 with cells

FOURFOLD_HD constexpr int unit_bytes(Weights format) {
  return format == Weights::kBf16 ? 2048 : format == Weights::kFp8 ? 1024 : moe::kUnitBytes;
}
FOURFOLD_HD constexpr int units_of(int columns) { return (columns + kUnitK - 1) / kUnitK; }
FOURFOLD_HD constexpr int tiles_of(int rows, bool paired) {
  return paired ? (rows + 7) / 8 : (rows + kTileRows - 1) / kTileRows;
}
FOURFOLD_HD constexpr unsigned long long packed_bytes(Weights format, int tiles, int columns) {
  return static_cast<unsigned long long>(tiles) * static_cast<unsigned long long>(units_of(columns)) *
         static_cast<unsigned long long>(unit_bytes(format));
}

// ---- fp8 ------------------------------------------------------------------------------------------------------------
// An e4m3 code's sign at bit 15 of a bf16 and its other seven bits at 10..4 are its value times 2^-120, subnormals
// included. A word holds four codes so that two registers come out of it with two shifts and two LOP3:
//   r0 = w & M            r1 = ((w << 4) ^ (w >> 4)) & M            M = 0x87f087f0

inline constexpr unsigned kFp8Mask = 0x87f087f0u;

FOURFOLD_HD constexpr unsigned spread_fp8(unsigned code) { return (code & 0x80u) << 8 | (code & 0x7fu) << 4; }
FOURFOLD_HD constexpr unsigned unpack_fp8(unsigned w, int i) { return (i == 0 ? w : (w << 4) ^ (w >> 4)) & kFp8Mask; }
// codes: the low and the high half of register 0, then of register 1.
FOURFOLD_HD constexpr unsigned pack_fp8_word(unsigned c0, unsigned c1, unsigned c2, unsigned c3) {
  unsigned w = spread_fp8(c0) | spread_fp8(c1) << 16;
  const unsigned r = spread_fp8(c2) | spread_fp8(c3) << 16;
  const auto bit = [](unsigned x, int n) { return (x >> n) & 1u; };
  // Register 1 mixes in bits that are already set; the free ones (0..3 and 11..14 of each half) are solved high half
  // first, because bit 3 of the high half falls on bit 15 of the low one.
  for (int half = 16; half >= 0; half -= 16) {
    for (int i = 0; i < 3; ++i) {
      w |= (bit(r, half + 8 + i) ^ bit(w, half + 4 + i)) << (half + 12 + i);  // 8..10 = 12..14 ^ 4..6
      w |= (bit(r, half + 4 + i) ^ bit(w, half + 8 + i)) << (half + i);       // 4..6 = 0..2 ^ 8..10
    }
    const unsigned sign = bit(r, half + 15) ^ (half == 0 ? bit(w, 19) : 0u);  // 15 = 11 ^ 19
    w |= sign << (half + 11);
    w |= (bit(r, half + 7) ^ sign) << (half + 3);  // 7 = 3 ^ 11
  }
  return w;
}

// ---- repacking ------------------------------------------------------------------------------------------------------

// How a checkpoint's matrix is stored (ops::Format).
enum class Stored : int { kF32 = 0, kBf16 = 1, kF16 = 2, kFp8 = 3, kNvfp4 = 4 };

FOURFOLD_HD constexpr Weights packed_format(Stored stored) {
  return stored == Stored::kFp8 ? Weights::kFp8 : stored == Stored::kNvfp4 ? Weights::kNvfp4 : Weights::kBf16;
}

// A checkpoint's matrix, row-major, without gaps.
struct Source {
  Stored stored;
  const void* data;                   // nvfp4: [rows, columns / 2], even column in the low nibble
  const unsigned char* block_scales;  // nvfp4: [rows, columns / 16] e4m3
  int rows;
  int columns;
};

// Weight (row, column) as bf16 bits; zero outside the matrix. Not for fp8 and nvfp4.
FOURFOLD_HD inline unsigned bf16_weight(const Source& s, int row, int column) {
  if (row >= s.rows || column >= s.columns) return 0;
  const long long at = static_cast<long long>(row) * s.columns + column;
  if (s.stored == Stored::kBf16) return static_cast<const unsigned short*>(s.data)[at];
  const float value = s.stored == Stored::kF16 ? nvfp4::f16_to_float(static_cast<const unsigned short*>(s.data)[at])
                                               : static_cast<const float*>(s.data)[at];
  return nvfp4::float_to_bf16(value);
}

// Repacks one unit of row tile `tile`. `second` is the pair of `first`, or `first` again where there is none. Returns
// false where an fp8 code or an nvfp4 scale is NaN: such weights must not be used. `out` is 4-byte aligned.
FOURFOLD_HD inline bool repack_unit(const Source& first, const Source& second, bool paired, int tile, int unit,
                                    unsigned char* out) {
  bool ok = true;
  unsigned* words = reinterpret_cast<unsigned*>(out);
  const int rows[2] = {paired ? tile * 8 : tile * 16, paired ? tile * 8 : tile * 16 + 8};
  const auto source = [&](int half) -> const Source& { return half == 0 ? first : second; };
  if (first.stored == Stored::kNvfp4) {
    // Only whole rows can be handed on: rows outside the matrix are zero ones.
    unsigned char codes[kTileRows][kUnitK / 2] = {};
    unsigned char scales[kTileRows][kUnitK / kBlockK] = {};
    for (int r = 0; r < kTileRows; ++r) {
      const Source& s = source(r / 8);
      const int row = rows[r / 8] + r % 8;
      for (int j = 0; j < 4 && row < s.rows; ++j) {
        if (unit * kUnitK + j * kBlockK >= s.columns) break;
        const long long block = static_cast<long long>(row) * (s.columns / kBlockK) + unit * 4 + j;
        scales[r][j] = s.block_scales[block];
        for (int i = 0; i < 8; ++i) codes[r][j * 8 + i] = static_cast<const unsigned char*>(s.data)[block * 8 + i];
      }
    }
    const moe::SourceMatrix low = {codes[0], scales[0], kUnitK / 2, kUnitK / kBlockK};
    const moe::SourceMatrix high = {codes[8], scales[8], kUnitK / 2, kUnitK / kBlockK};
    return moe::repack_unit(low, 0, high, 0, 0, out);
  }
  const auto fp8_weight = [&](int half, int g, int column) -> unsigned {
    const Source& s = source(half);
    const int row = rows[half] + g;
    if (row >= s.rows || column >= s.columns) return 0u;
    const unsigned code = static_cast<const unsigned char*>(s.data)[static_cast<long long>(row) * s.columns + column];
    ok = ok && (code & 0x7fu) != 0x7fu;
    return code;
  };
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4;
    for (int j = 0; j < 4; ++j) {
      for (int h = 0; h < 2; ++h) {  // of the block's 16 columns
        const int k = unit * kUnitK + j * kBlockK + h * 8 + lane % 4 * 2;
        if (first.stored == Stored::kFp8) {
          words[j / 2 * 128 + lane * 4 + j % 2 * 2 + h] =
              pack_fp8_word(fp8_weight(0, g, k), fp8_weight(0, g, k + 1), fp8_weight(1, g, k), fp8_weight(1, g, k + 1));
        } else {
          for (int half = 0; half < 2; ++half) {
            words[j * 128 + lane * 4 + h * 2 + half] =
                bf16_weight(source(half), rows[half] + g, k) | bf16_weight(source(half), rows[half] + g, k + 1) << 16;
          }
        }
      }
    }
  }
  return ok;
}

// ---- what kernels get -----------------------------------------------------------------------------------------------

inline constexpr int kMostParts = 8;

// A matrix of a stack, or a pair of them.
struct Part {
  const unsigned char* weights;
  const float* factors;  // [tiles][16]
  const float* cells;    // [tiles][cell_count][2], null: the factors are all
  int cell_count;
  int cell_units;
  unsigned cell_of;  // unit u is in cell u x cell_of / 65536
  Weights format;
  int first_tile;  // of the stack
  int rows;        // outputs; paired: of each of the two
  int first_row;   // output column of its first row
};

FOURFOLD_HD constexpr unsigned cell_of(int cell_units) {
  return (65535u + static_cast<unsigned>(cell_units)) / static_cast<unsigned>(cell_units);
}
inline constexpr int kMostCellProduct = 65536;  // units x cell_units: above it the division would not be exact

struct Matrix {
  Part parts[kMostParts];
  int count;  // of parts
  int tiles;
  int units;    // of 64 columns
  int columns;  // a multiple of 16
};

FOURFOLD_HD constexpr int part_of(const Matrix& m, int tile) {
  int p = 0;
  while (p + 1 < m.count && tile >= m.parts[p + 1].first_tile) ++p;
  return p;
}

}  // namespace fourfold::gemm
