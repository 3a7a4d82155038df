// KernelTable for every arm64 processor (Armv8.0): products of signed bytes are summed in 16 bits, then in 32.
#include "cpu/gemm/layout.h"

#if defined(__aarch64__)

#include "cpu/gemm/neon_integers.h"

namespace fourfold::cpu::gemm {
namespace {

struct Multiply {
  // Four columns of two rows a product: four of them are below 4 x 12 x 128, far from the end of 16 bits.
  template <int kPart>
  static inline void add(int16x8_t* sums, int8x16_t w, int8x16_t x) {
    const int8x16_t four = vreinterpretq_s8_s32(vdupq_laneq_s32(vreinterpretq_s32_s8(x), kPart));
    const int8x8_t rows = vget_low_s8(w), columns = vget_low_s8(four);
    sums[0] = kPart == 0 ? vmull_s8(rows, columns) : vmlal_s8(sums[0], rows, columns);
    sums[1] = kPart == 0 ? vmull_high_s8(w, four) : vmlal_high_s8(sums[1], w, four);
  }
  static inline void plane(int16x8_t* sums, const int8x16_t* w, int8x16_t x) {
    add<0>(sums, w[0], x);
    add<1>(sums, w[1], x);
    add<2>(sums, w[2], x);
    add<3>(sums, w[3], x);
  }
  static inline int32x4_t sum(const int8x16_t* w, int8x16_t hi, int8x16_t lo) {
    int16x8_t upper[2], lower[2];
    plane(upper, w, hi);
    plane(lower, w, lo);
    const int32x4_t rows01 = vpadalq_s16(vshlq_n_s32(vpaddlq_s16(upper[0]), 8), lower[0]);
    const int32x4_t rows23 = vpadalq_s16(vshlq_n_s32(vpaddlq_s16(upper[1]), 8), lower[1]);
    return vpaddq_s32(rows01, rows23);
  }
};

}  // namespace

const KernelTable* neon_kernels() {
  static constexpr KernelTable kernels = neon_table<Multiply>("neon");
  return &kernels;
}

}  // namespace fourfold::cpu::gemm

#else

namespace fourfold::cpu::gemm {
const KernelTable* neon_kernels() { return nullptr; }
}  // namespace fourfold::cpu::gemm

#endif
