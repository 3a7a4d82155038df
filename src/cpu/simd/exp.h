// The one exponential function of the fast kernels and of the sampler.
#pragma once

#include "cpu/simd/vector.h"

namespace fourfold::cpu {
namespace {

// e^x to about 1e-7 relative for x in [-88, 88.3], T a Vector or Scalar; 0 where the result would be denormal (below
// about -87.7). NaN stays NaN. x = n ln 2 + r with |r| <= ln 2 / 2 and the Taylor polynomial of degree 7, whose
// remainder there is below 6e-9.
template <class T>
inline T exp_in_range(T x) {
  const T n = round(x * T::all(1.44269504f));
  T r = fnma(n, T::all(0.693359375f), x);  // ln 2 in two parts, the first exact times n
  r = fnma(n, T::all(-2.12194440e-4f), r);
  T p = T::all(1.0f / 5040);
  p = fma(p, r, T::all(1.0f / 720));
  p = fma(p, r, T::all(1.0f / 120));
  p = fma(p, r, T::all(1.0f / 24));
  p = fma(p, r, T::all(1.0f / 6));
  p = fma(p, r, T::all(0.5f));
  p = fma(p, r, T::all(1.0f));
  p = fma(p, r, T::all(1.0f));
  return p * power_of_two(n);
}

// Of vectors, clamped to [-87.3, 88.3].
template <class V>
inline Vector<V> exp(Vector<V> x) {
  using T = Vector<V>;
  return exp_in_range(min(T::all(88.3f), max(T::all(-87.3f), x)));
}

// x / (1 + e^-x); NaN for NaN x.
template <class V>
inline Vector<V> silu(Vector<V> x) {
  return x / (Vector<V>::all(1.0f) + exp(Vector<V>::zero() - x));
}

}  // namespace
}  // namespace fourfold::cpu
