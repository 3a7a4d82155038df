// The small floating-point formats, as constexpr functions on their bit patterns. Host code, device code (NVRTC) and
// tests share this header: it includes nothing.
//
//   format  bits  sign exponent mantissa  bias  largest  smallest     special values
//   e2m1    4     1    2        1         1     6        0.5 (sub)    none
//   e4m3    8     1    4        3         7     448      2^-9 (sub)   0x7f, 0xff are NaN; no infinity ("e4m3fn")
//   bf16    16    1    8        7         127   3.4e38   9e-41 (sub)  as IEEE
//   f16     16    1    5        10        15    65504    6e-8 (sub)   as IEEE
//
// Sources: OCP Microscaling Formats (MX) v1.0 for e2m1 and e4m3; IEEE 754-2019 for f16.
#pragma once

#if defined(__CUDACC__)
#define FOURFOLD_HD __host__ __device__
#else
#define FOURFOLD_HD
#endif

namespace fourfold::nvfp4 {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;

FOURFOLD_HD constexpr u32 bits_of(float value) { return __builtin_bit_cast(u32, value); }
FOURFOLD_HD constexpr float float_of(u32 bits) { return __builtin_bit_cast(float, bits); }
FOURFOLD_HD constexpr bool is_nan(float value) { return (bits_of(value) & 0x7fffffffu) > 0x7f800000u; }
FOURFOLD_HD constexpr bool is_finite(float value) { return (bits_of(value) & 0x7f800000u) != 0x7f800000u; }

// ---- bf16
// ------------------------------------------------------------------------------------------------------------

FOURFOLD_HD constexpr float bf16_to_float(u16 bits) { return float_of(static_cast<u32>(bits) << 16); }

// Round to nearest, ties to even; NaN stays a (quiet) NaN.
FOURFOLD_HD constexpr u16 float_to_bf16(float value) {
  const u32 bits = bits_of(value);
  if (is_nan(value)) return static_cast<u16>((bits >> 16) | 0x40u);
  return static_cast<u16>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// ---- f16
// -------------------------------------------------------------------------------------------------------------

FOURFOLD_HD constexpr float f16_to_float(u16 half) {
  const u32 sign = static_cast<u32>(half & 0x8000u) << 16;
  const u32 exponent = (half >> 10) & 0x1fu;
  const u32 mantissa = half & 0x3ffu;
  if (exponent == 0x1f) return float_of(sign | 0x7f800000u | (mantissa << 13));
  if (exponent == 0) {
    // mantissa * 2^-24, exact in fp32
    const float magnitude = static_cast<float>(mantissa) * 5.9604644775390625e-8f;
    return sign != 0 ? -magnitude : magnitude;
  }
  return float_of(sign | ((exponent + 112u) << 23) | (mantissa << 13));
}

// Round to nearest, ties to even; overflow gives infinity.
FOURFOLD_HD constexpr u16 float_to_f16(float value) {
  const u32 bits = bits_of(value);
  const u16 sign = static_cast<u16>((bits >> 16) & 0x8000u);
  const u32 magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<u16>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<u16>(sign | 0x7c00u);  // 65520 and above
  if (magnitude < 0x38800000u) {                                          // below 2^-14: a multiple of 2^-24
    const int shift = 126 - static_cast<int>(magnitude >> 23);
    if (shift > 24) return sign;
    const u32 mantissa = (magnitude & 0x7fffffu) | 0x800000u;
    const u32 kept = mantissa >> shift;
    const u32 rest = mantissa & ((1u << shift) - 1u);
    const u32 half = 1u << (shift - 1);
    return static_cast<u16>(sign | (kept + ((rest > half || (rest == half && (kept & 1u) != 0)) ? 1u : 0u)));
  }
  const u32 rebased = magnitude - (112u << 23);
  return static_cast<u16>(sign | ((rebased + 0xfffu + ((rebased >> 13) & 1u)) >> 13));
}

// ---- e4m3
// ------------------------------------------------------------------------------------------------------------

inline constexpr float kE4m3Max = 448.0f;
inline constexpr float kE4m3MinSubnormal = 0.001953125f;  // 2^-9

FOURFOLD_HD constexpr bool e4m3_is_nan(u8 code) { return (code & 0x7fu) == 0x7fu; }

FOURFOLD_HD constexpr float e4m3_to_float(u8 code) {
  const u32 sign = static_cast<u32>(code & 0x80u) << 24;
  const u32 exponent = (code >> 3) & 0xfu;
  const u32 mantissa = code & 7u;
  if ((code & 0x7fu) == 0x7fu) return float_of(sign | 0x7fc00000u);
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * kE4m3MinSubnormal;
    return sign != 0 ? -magnitude : magnitude;
  }
  return float_of(sign | ((exponent + 120u) << 23) | (mantissa << 20));
}

// Round to nearest, ties to even, saturating at 448 (infinity too); NaN gives NaN.
FOURFOLD_HD constexpr u8 float_to_e4m3(float value) {
  const u32 bits = bits_of(value);
  const u8 sign = static_cast<u8>((bits >> 24) & 0x80u);
  const u32 magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<u8>(sign | 0x7fu);
  if (magnitude >= 0x43e00000u) return static_cast<u8>(sign | 0x7eu);  // 448 and above
  if (magnitude < 0x3c800000u) {                                       // below 2^-6: a multiple of 2^-9
    const int shift = 141 - static_cast<int>(magnitude >> 23);
    if (shift > 24) return sign;
    const u32 mantissa = (magnitude & 0x7fffffu) | 0x800000u;
    const u32 kept = mantissa >> shift;
    const u32 rest = mantissa & ((1u << shift) - 1u);
    const u32 half = 1u << (shift - 1);
    return static_cast<u8>(sign | (kept + ((rest > half || (rest == half && (kept & 1u) != 0)) ? 1u : 0u)));
  }
  const u32 rebased = magnitude - (120u << 23);
  const u32 rounded = (rebased + 0x7ffffu + ((rebased >> 20) & 1u)) >> 20;
  return static_cast<u8>(sign | (rounded > 0x7eu ? 0x7eu : rounded));
}

// ---- e2m1
// ------------------------------------------------------------------------------------------------------------

inline constexpr float kE2m1Max = 6.0f;

// The eight magnitudes are 0, 0.5, 1, 1.5, 2, 3, 4, 6; bit 3 is the sign; code 8 is -0.
FOURFOLD_HD constexpr float e2m1_to_float(u8 code) {
  const u32 exponent = (code >> 1) & 3u;
  const u32 mantissa = code & 1u;
  const float magnitude =
      exponent == 0 ? 0.5f * static_cast<float>(mantissa) : float_of(((exponent + 126u) << 23) | (mantissa << 22));
  return (code & 8u) != 0 ? -magnitude : magnitude;
}

// Twice the value, an integer from -12 to 12: what integer kernels multiply with.
FOURFOLD_HD constexpr int e2m1_doubled(u8 code) {
  const int exponent = (code >> 1) & 3;
  const int mantissa = code & 1;
  const int magnitude = exponent == 0 ? mantissa : (2 + mantissa) << (exponent - 1);
  return (code & 8) != 0 ? -magnitude : magnitude;
}

// Round to nearest on the grid, ties to the code with an even mantissa bit: 0.25 -> 0, 0.75 -> 1, 1.25 -> 1, 1.75 -> 2,
// 2.5 -> 2, 3.5 -> 4, 5 -> 4. Above 5 saturates to 6. NaN gives 0: a format without NaN has no better answer, and
// quantisers reject NaN before they come here. The sign is kept, so a small negative value gives -0 (code 8).
FOURFOLD_HD constexpr u8 float_to_e2m1(float value) {
  const u8 sign = (bits_of(value) >> 31) != 0 ? 8 : 0;
  const float x = float_of(bits_of(value) & 0x7fffffffu);
  u8 code = 0;
  if (x > 5.0f) {
    code = 7;
  } else if (x >= 3.5f) {
    code = 6;
  } else if (x > 2.5f) {
    code = 5;
  } else if (x >= 1.75f) {
    code = 4;
  } else if (x > 1.25f) {
    code = 3;
  } else if (x >= 0.75f) {
    code = 2;
  } else if (x > 0.25f) {
    code = 1;
  }
  return static_cast<u8>(is_nan(value) ? 0 : sign | code);
}

// Two codes in a byte: the low nibble is the even element, the high nibble the odd one.
FOURFOLD_HD constexpr u8 pack_e2m1(u8 even, u8 odd) { return static_cast<u8>((even & 15u) | (odd << 4)); }

// The weight e2m1 x e4m3, without the tensor scale. It has at most 6 significant bits (2 x 4), so it is exact in bf16,
// f16 and fp32.
FOURFOLD_HD constexpr float nvfp4_product(u8 e2m1_code, u8 e4m3_code) {
  return e2m1_to_float(e2m1_code) * e4m3_to_float(e4m3_code);
}

}  // namespace fourfold::nvfp4
