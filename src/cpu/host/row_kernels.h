// The loops over one row that the reference and every instruction set have their own version of. Included by sources
// with special compile flags: plain pointers and sizes only.
#pragma once

#include <cstdint>

namespace fourfold::cpu {

struct RowKernels {
  // out = x / rms(x) * weight; out may be x.
  void (*rms_norm)(const float* x, const float* weight, float eps, int64_t n, float* out);
  void (*add)(float* x, const float* delta, int64_t n);
  // A key or value as the cache keeps it: fp32 for the reference; otherwise f16, rounded to nearest even, beyond its
  // range the largest finite number.
  void (*keep)(const float* x, int64_t n, void* out);
};

}  // namespace fourfold::cpu
