// fp32 vectors with operators over a vocabulary V (simd/avx2.h, simd/avx512.h, simd/neon.h); a vector of one lane for
// sources without special flags. What is written over either names its operations alike.
#pragma once

#include <bit>
#include <cstdint>

namespace fourfold::cpu {
namespace {

template <class V>
struct Vector {
  static constexpr int64_t kLanes = V::kLanes;
  typename V::F v;

  static Vector zero() { return {V::zero()}; }
  static Vector all(float x) { return {V::set(x)}; }
  static Vector load(const float* p) { return {V::load(p)}; }
  void store(float* p) const { V::store(p, v); }
  static Vector load_f16(const uint16_t* p) { return {V::load_f16(p)}; }
  void store_f16(uint16_t* p) const { V::store_f16(p, v); }
  // The sums of the lanes of four vectors, in a fixed order.
  static void store_sums(float* out, Vector a, Vector b, Vector c, Vector d) { V::store_sums(out, a.v, b.v, c.v, d.v); }
  float sum() const { return V::sum(v); }
  float largest() const { return V::largest(v); }

  friend Vector operator+(Vector a, Vector b) { return {V::add(a.v, b.v)}; }
  friend Vector operator-(Vector a, Vector b) { return {V::sub(a.v, b.v)}; }
  friend Vector operator*(Vector a, Vector b) { return {V::mul(a.v, b.v)}; }
  friend Vector operator/(Vector a, Vector b) { return {V::div(a.v, b.v)}; }
  friend Vector fma(Vector a, Vector b, Vector c) { return {V::fma(a.v, b.v, c.v)}; }    // a b + c
  friend Vector fnma(Vector a, Vector b, Vector c) { return {V::fnma(a.v, b.v, c.v)}; }  // c - a b
  // The second operand when either is NaN.
  friend Vector max(Vector a, Vector b) { return {V::max(a.v, b.v)}; }
  friend Vector min(Vector a, Vector b) { return {V::min(a.v, b.v)}; }
  friend Vector round(Vector a) { return {V::round(a.v)}; }
  friend Vector power_of_two(Vector n) { return {V::power_of_two(n.v)}; }
};

// One lane, without branches, so that compilers vectorise loops over it. Products and sums are rounded one by one.
struct Scalar {
  float v;
  static Scalar all(float x) { return {x}; }
  friend Scalar operator*(Scalar a, Scalar b) { return {a.v * b.v}; }
  friend Scalar fma(Scalar a, Scalar b, Scalar c) { return {a.v * b.v + c.v}; }
  friend Scalar fnma(Scalar a, Scalar b, Scalar c) { return {c.v - a.v * b.v}; }
  // Adding 1.5 x 2^23 rounds to a whole number, for |a| below 2^22.
  friend Scalar round(Scalar a) { return {(a.v + 12582912.0f) - 12582912.0f}; }
  // The same addition leaves the whole number in the low bits.
  friend Scalar power_of_two(Scalar n) {
    return {std::bit_cast<float>((std::bit_cast<int32_t>(n.v + 12582912.0f) - 0x4B400000 + 127) << 23)};
  }
};

}  // namespace
}  // namespace fourfold::cpu
