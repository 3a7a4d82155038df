// Integer arithmetic that cannot overflow silently. Every size that comes from a file or a request goes through it.
#pragma once

#include <cstdint>
#include <limits>

#include "base/check.h"

namespace fourfold {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// The product or sum, or an Error that names `what` when it does not fit in 64 bits.
inline uint64_t checked_mul(uint64_t a, uint64_t b, const char* what) {
  uint64_t result = 0;
  if (__builtin_mul_overflow(a, b, &result)) fail("{}: {} x {} does not fit in 64 bits", what, a, b);
  return result;
}
inline uint64_t checked_add(uint64_t a, uint64_t b, const char* what) {
  uint64_t result = 0;
  if (__builtin_add_overflow(a, b, &result)) fail("{}: {} + {} does not fit in 64 bits", what, a, b);
  return result;
}

}  // namespace fourfold
