#include "cpu/kernels/kernels.h"

#include "base/check.h"

namespace fourfold::cpu {

const Kernels& kernels_of(Isa isa) {
  switch (isa) {
#if defined(__x86_64__)
    case Isa::kAvx2:
      return kernels_avx2();
    case Isa::kAvx512:
    case Isa::kAmx:
      return kernels_avx512();
#elif defined(__aarch64__)
    case Isa::kNeon:
    case Isa::kDotprod:
    case Isa::kMmla:
      return kernels_neon();
#endif
    default:
      fail("no kernels for instruction set {}", isa_name(isa));
  }
}

}  // namespace fourfold::cpu
