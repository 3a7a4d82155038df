// How the expert layer's NVFP4 weights are stored for the dequantising tensor-core kernels (bf16 activations).
//
// A checkpoint's matrix [N, K] (e2m1 codes row-major two to a byte, e4m3 scales [N, K/16], one fp32 scale) is repacked
// once at load. One stored copy serves the streaming kernels (mma.sync m16n8k16) and the wgmma kernels (m64nNk16): in
// both the weights are the A operand, and their register fragments agree.
//
//   matrix   row tiles one after the other; a row tile's units lie along K, so that a strip of a row tile is one
//            contiguous copy of any multiple of 64 in K
//   unit     16 rows x 64 K: 512 bytes of codes, then 64 bytes of scales = 576 bytes = 4.5 bits per weight
//   codes    lane L of a warp owns bytes 16L .. 16L+15: word j is its A fragment of K block j (16 K)
//   word     8 codes; with g = L/4, l = L%4 and k = 16 j + 2 l the four registers of the fragment are
//            a0 (g, k..k+1)   a1 (g+8, k..k+1)   a2 (g, k+8..k+9)   a3 (g+8, k+8..k+9), the even k in the low half
//   scales   8 bytes per g: word p holds K blocks 2p and 2p+1 of row g (low half) and row g+8 (high half)
//
// Gate and up are one matrix of 2 I rows: row tile t has gate rows 8t .. 8t+7 as rows 0..7 and up rows 8t .. 8t+7 as
// rows 8..15, so that one lane ends with gate and up of the same output. The down matrix keeps its order.
//
// A code word. bf16 with only bits {15, 8, 7, 6} set is exactly the e2m1 value times 2^-126 (exponent 0 is a subnormal
// in both formats). With the bits placed as below a lane reads its four registers with four shifts and four LOP3:
//   r0 = w & M            r1 = (w << 6) & M            M = 0x81c081c0
//   r2 = rotr(w, 4) & M   r3 = ((w << 2) ^ (w >> 6)) & M
// (No placement does it with three shifts: four windows of the pattern {6, 7, 8, 15} cannot tile 16 bits.)
//
// A scale. e4m3 values are normalised to 5 exponent bits (e + 9 for 1.m x 2^e, e in -9..8) and 3 mantissa bits; set at
// bits 11..4 of a bf16 under the constant 0x7000 the factor is the scale times 2^106. Code times factor is then the
// weight times 2^-20, exact in bf16 (6 significant bits, range 2^-30 .. 2^-8); the epilogue multiplies with the fp32
// tensor scale times 2^20. Blocks with scale 0 get codes 0. Negative scales flip their codes' signs.
//
// No include: the header compiles under NVRTC, nvcc and the host compiler. Sizes in bytes unless said otherwise.
#pragma once

#ifdef __CUDACC__
#define FOURFOLD_MOE_HD __host__ __device__
#else
#define FOURFOLD_MOE_HD
#endif

namespace fourfold::moe {

inline constexpr int kTileRows = 16;
inline constexpr int kUnitK = 64;
inline constexpr int kBlockK = 16;
inline constexpr int kUnitCodeBytes = 512;
inline constexpr int kUnitScaleBytes = 64;
inline constexpr int kUnitBytes = kUnitCodeBytes + kUnitScaleBytes;

inline constexpr unsigned kCodeMask = 0x81c081c0u;
inline constexpr unsigned kScaleMask = 0x0ff00ff0u;
inline constexpr unsigned kScaleBase = 0x70007000u;
inline constexpr float kEpilogueScale = 1048576.0f;  // 2^20
// One token: codes are multiplied without their scales, 2^-126, where float32 ends; so the rows are 2^80 times as
// large, and with the scales' 2^106 the sums 2^60.
inline constexpr unsigned kOneTokenPair = 0x67806780u;                     // 2^80, twice, in bf16
inline constexpr float kOneTokenScale = 1208925819614629174706176.0f;      // 2^80
inline constexpr float kOneEpilogueScale = 1.0f / 1152921504606846976.0f;  // 2^-60

// Bytes of a repacked matrix of `rows` x `k`; rows a multiple of 16, k of 64.
FOURFOLD_MOE_HD constexpr unsigned long long packed_bytes(int rows, int k) {
  return static_cast<unsigned long long>(rows / kTileRows) * static_cast<unsigned long long>(k / kUnitK) * kUnitBytes;
}

FOURFOLD_MOE_HD constexpr unsigned rotate_right(unsigned w, int n) { return (w >> n) | (w << (32 - n)); }

// The fragment registers before scaling; `i` is 0..3.
FOURFOLD_MOE_HD constexpr unsigned unpack_codes(unsigned w, int i) {
  return (i == 0 ? w : i == 1 ? w << 6 : i == 2 ? rotate_right(w, 4) : (w << 2) ^ (w >> 6)) & kCodeMask;
}

// An e2m1 code (s e e m) at bits {15, 8, 7, 6}.
FOURFOLD_MOE_HD constexpr unsigned spread_code(unsigned code) { return ((code & 8u) << 12) | ((code & 7u) << 6); }

// The inverse of unpack_codes: codes[i] low half, codes[4 + i] high half of register i.
FOURFOLD_MOE_HD constexpr unsigned pack_codes(const unsigned char (&codes)[8]) {
  unsigned r[4] = {};
  for (int i = 0; i < 4; ++i) r[i] = spread_code(codes[i]) | (spread_code(codes[4 + i]) << 16);
  unsigned w = r[0];            // bits 15, 8..6 of each half
  w |= r[1] >> 6;               // bits 9, 2..0
  w |= rotate_right(r[2], 28);  // bits 12..10 of each half; signs at 19 (low half) and 3 (high half)
  auto bit = [](unsigned x, int n) { return (x >> n) & 1u; };
  // r3 mixes in bits that are already set; the six free ones (4, 5, 13, 14 of each half) are solved high half first.
  const unsigned b29 = bit(r[3], 31);
  const unsigned b21 = bit(r[3], 23) ^ b29;
  const unsigned b20 = bit(r[3], 22) ^ bit(w, 28);
  const unsigned b30 = bit(r[3], 24) ^ bit(w, 22);
  const unsigned b13 = bit(r[3], 15) ^ b21;
  const unsigned b5 = bit(r[3], 7) ^ b13;
  const unsigned b4 = bit(r[3], 6) ^ bit(w, 12);
  const unsigned b14 = bit(r[3], 8) ^ bit(w, 6);
  return w | (b29 << 29) | (b21 << 21) | (b20 << 20) | (b30 << 30) | (b13 << 13) | (b5 << 5) | (b4 << 4) | (b14 << 14);
}

// The stored byte of a positive, finite e4m3 scale (sign bit ignored; 0 and NaN must not come here).
FOURFOLD_MOE_HD constexpr unsigned pack_scale(unsigned e4m3) {
  const unsigned exponent = (e4m3 >> 3) & 15u;
  const unsigned mantissa = e4m3 & 7u;
  if (exponent != 0) return ((exponent + 2u) << 3) | mantissa;  // 2^(exponent - 7), and -7 + 9 = 2
  const int top = mantissa >= 4 ? 2 : mantissa >= 2 ? 1 : 0;    // mantissa x 2^-9
  return (static_cast<unsigned>(top) << 3) | ((mantissa << (3 - top)) & 7u);
}

// Scale word of K blocks (2p, 2p+1): arguments are stored bytes of row g (lo) and g + 8 (hi).
FOURFOLD_MOE_HD constexpr unsigned pack_scale_word(unsigned lo0, unsigned hi0, unsigned lo1, unsigned hi1) {
  return (lo0 << 4) | (hi0 << 20) | rotate_right((lo1 << 4) | (hi1 << 20), 8);
}

// bf16 factors of block 2p (odd = 0) or 2p+1 (odd = 1): row g in the low half, row g + 8 in the high half.
FOURFOLD_MOE_HD constexpr unsigned unpack_scales(unsigned word, int odd) {
  return ((odd != 0 ? rotate_right(word, 24) : word) & kScaleMask) | kScaleBase;
}

// Where a matrix row of the checkpoint goes. `up` rows exist for the gate-up matrix only.
FOURFOLD_MOE_HD constexpr int gate_row(int i) { return (i / 8) * 16 + i % 8; }
FOURFOLD_MOE_HD constexpr int up_row(int i) { return (i / 8) * 16 + 8 + i % 8; }

// One side of a repack: a matrix as it is in a checkpoint.
struct SourceMatrix {
  const unsigned char* codes;   // [rows, k/2], even k in the low nibble
  const unsigned char* scales;  // [rows, k/16] e4m3
  long long code_stride;        // bytes between rows
  long long scale_stride;
};

// Repacks one unit. `first` supplies tile rows 0..7 from its row `row_first`, `second` rows 8..15 from `row_second`
// (gate and up, or twice the down matrix). `blocks` K blocks of 16 are there; the others are filled with zero codes.
// Returns false if a scale is NaN. `unit` is 576 bytes, 4-byte aligned.
FOURFOLD_MOE_HD inline bool repack_unit(const SourceMatrix& first, int row_first, const SourceMatrix& second,
                                        int row_second, int unit_index, unsigned char* unit, int blocks = 4) {
  bool ok = true;
  unsigned* words = reinterpret_cast<unsigned*>(unit);
  for (int g = 0; g < 8; ++g) {
    const unsigned char* codes[2] = {first.codes + (row_first + g) * first.code_stride + unit_index * (kUnitK / 2),
                                     second.codes + (row_second + g) * second.code_stride + unit_index * (kUnitK / 2)};
    const unsigned char* scales[2] = {
        first.scales + (row_first + g) * first.scale_stride + unit_index * (kUnitK / kBlockK),
        second.scales + (row_second + g) * second.scale_stride + unit_index * (kUnitK / kBlockK)};
    unsigned stored[2][4];
    for (int j = 0; j < 4; ++j) {
      bool zero[2];
      unsigned flip[2];
      for (int h = 0; h < 2; ++h) {
        const unsigned s = j < blocks ? scales[h][j] : 0u;
        ok = ok && (s & 0x7fu) != 0x7fu;
        zero[h] = (s & 0x7fu) == 0;
        flip[h] = (s >> 7) << 3;
        stored[h][j] = zero[h] ? 0 : pack_scale(s & 0x7fu);
      }
      for (int l = 0; l < 4; ++l) {
        unsigned char fragment[8];
        for (int i = 0; i < 4; ++i) {  // register i: row half i % 2, k half i / 2
          const int h = i % 2;
          const unsigned pair = zero[h] ? 0u : codes[h][(j * kBlockK + 2 * l + 8 * (i / 2)) / 2];
          fragment[i] = static_cast<unsigned char>(zero[h] ? 0 : (pair & 15u) ^ flip[h]);
          fragment[4 + i] = static_cast<unsigned char>(zero[h] ? 0 : (pair >> 4) ^ flip[h]);
        }
        words[(g * 4 + l) * 4 + j] = pack_codes(fragment);
      }
    }
    for (int p = 0; p < 2; ++p) {
      words[kUnitCodeBytes / 4 + g * 2 + p] =
          pack_scale_word(stored[0][2 * p], stored[1][2 * p], stored[0][2 * p + 1], stored[1][2 * p + 1]);
    }
  }
  return ok;
}

}  // namespace fourfold::moe
