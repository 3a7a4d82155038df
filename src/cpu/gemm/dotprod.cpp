// KernelTable for arm64 with dot products of bytes.
#include "cpu/gemm/layout.h"

#if defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)

#include "cpu/gemm/neon_dot.h"

namespace fourfold::cpu::gemm {

const KernelTable* dotprod_kernels() {
  static constexpr KernelTable kernels = neon_table<DotProducts>("dotprod");
  return &kernels;
}

}  // namespace fourfold::cpu::gemm

#else

namespace fourfold::cpu::gemm {
const KernelTable* dotprod_kernels() { return nullptr; }
}  // namespace fourfold::cpu::gemm

#endif
