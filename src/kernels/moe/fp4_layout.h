// From the stored weight units (layout.h) to the operands of the block-scaled mma, and the order in which activations
// are stored to match.
//
// mma.m16n8k64 on e2m1 with one ue4m3 scale per 16 (PTX ISA, "mma with block scaling"), lane = 4 g + l:
//   A  register i, nibble j   row g + 8 (i & 1), k = 8 l + 32 (i >> 1) + j
//   B  register i, nibble j   column g,          k = 8 l + 32 i + j
//   scale words               4 bytes, one per 16 k: A's row g from lane 4 g, row g + 8 from lane 4 g + 1; B's column g
//                             from lane 4 g
// so register 2 p of lanes l = 2 q and 2 q + 1 holds one group of 16, number q + 2 p. A stored word has four codes of
// row g and four of row g + 8 of one group. Two words, of stored lanes 2 h and 2 h + 1 (h = l & 1), make the registers
// of both rows. Each lane therefore reads two pairs of words: stored lane 4 g + 2 h and the one after it, words 2 q and
// 2 q + 1. What the instruction calls group q + 2 p is stored group 2 q + p, and inside a group k comes in another
// order. Both are harmless when the activations are stored in the same order, and that costs nothing: whoever quantises
// them, does.
//
//   activations  row: units of 64 K, 32 bytes of codes each; scale row: units of 64 K, 4 bytes each
//   place of group j of a unit: 8 bytes (scales: 1 byte) at kGroupPlace[j]; 4-byte word h of it: codes k = 4 h +
//   kNibbleK[n] in nibble n
#pragma once

#include "kernels/moe/layout.h"

namespace fourfold::moe {

inline constexpr int kFp4UnitBytes = kUnitK / 2;         // of an activation row
inline constexpr int kFp4UnitScales = kUnitK / kBlockK;  // bytes

// Groups 0, 2, 1, 3: its own inverse.
FOURFOLD_MOE_HD constexpr int group_place(int j) { return (j & 1) * 2 + (j >> 1); }

// k (0 .. 15) of nibble n of word h.
FOURFOLD_MOE_HD constexpr int nibble_k(int h, int n) { return 4 * h + static_cast<int>(0x391a280bu >> (4 * n) & 15u); }
// Nibble of k inside its word, k & 4 being the word.
FOURFOLD_MOE_HD constexpr int k_nibble(int k) {
  return static_cast<int>((k & 8) == 0 ? 0x7351u >> (4 * (k & 3)) & 15u : 0x0462u >> (4 * (k & 3)) & 15u);
}

FOURFOLD_MOE_HD constexpr unsigned rotate_left(unsigned w, int n) { return (w << n) | (w >> (32 - n)); }
// Bit by bit: `a` where the mask is set, else `b`. One LOP3.
FOURFOLD_MOE_HD constexpr unsigned select_bits(unsigned mask, unsigned a, unsigned b) {
  return (a & mask) | (b & ~mask);
}

// Registers of row g (`low`) and row g + 8 (`high`) from stored words `first` (stored lane 2 h) and `second` (2 h + 1)
// of one group. A word has row g's magnitudes at bits 8..6, 12..10 and 16 higher, with their signs at 15, 19 and 16
// higher, all modulo 32: four nibbles but for the signs. Rotated against each other by 8 bits, the two words
// interleave. Row g + 8 is what layout.h hides by exclusive-or.
FOURFOLD_MOE_HD constexpr void fp4_registers(unsigned first, unsigned second, unsigned* low, unsigned* high) {
  constexpr unsigned kFirst = 0x0ff00ff0u;  // nibbles that come from the first word
  constexpr unsigned kSigns = 0x88888888u;
  const unsigned a = rotate_left(first, 24);
  const unsigned b = second;
  const unsigned t = select_bits(kFirst, rotate_left(a, 6), rotate_left(b, 6));
  *low = select_bits(kSigns, select_bits(kFirst, a, b), t);
  const unsigned p = select_bits(kFirst, rotate_left(a, 12), rotate_left(b, 12));
  unsigned x = select_bits(kSigns, t, p);
  x ^= rotate_left(a, 4) & 0x07000700u;
  x ^= rotate_left(b, 4) & 0x00070007u;
  x ^= (a >> 2) & 0x00000800u;
  x ^= (b >> 2) & 0x00080000u;
  *high = x;
}

// Stored scale words (K blocks 0, 1 and 2, 3) to the four stored bytes of row g, or of row g + 8, in the order of
// group_place.
FOURFOLD_MOE_HD constexpr unsigned fp4_stored_scales(unsigned word0, unsigned word1, bool upper) {
  // Rotated, a word's bytes are: row g even block, row g + 8 odd, row g + 8 even, row g odd.
  const unsigned a = rotate_left(word0, 28);
  const unsigned b = rotate_left(word1, 28);
  const auto byte = [](unsigned w, int i) { return w >> (8 * i) & 255u; };
  const int even = upper ? 2 : 0;
  const int odd = upper ? 1 : 3;
  return byte(a, even) | byte(b, even) << 8 | byte(a, odd) << 16 | byte(b, odd) << 24;
}

// Every byte's scale, from 5 exponent bits (layout.h) to ue4m3. Almost all are at least 24, which is 2^-6: there the
// exponent moves by 2. Below, the format's subnormals: exact, because what was stored came from e4m3.
FOURFOLD_MOE_HD constexpr bool fp4_scales_normal(unsigned stored) {
  return ((stored + 0x68686868u) & 0x80808080u) == 0x80808080u;  // stored bytes are at most 142: nothing carries over
}
FOURFOLD_MOE_HD constexpr unsigned fp4_scales(unsigned stored) {
  if (fp4_scales_normal(stored)) return stored - 0x10101010u;
  unsigned out = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned s = stored >> (8 * i) & 255u;
    const unsigned e = s >> 3;
    const unsigned value = e >= 3 ? s - 16 : ((s & 7u) | 8u) >> (3 - e);
    out |= value << (8 * i);
  }
  return out;
}

}  // namespace fourfold::moe
