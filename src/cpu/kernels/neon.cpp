#include "cpu/simd/neon.h"
#include "cpu/attention/attend.h"
#include "cpu/delta/rule.h"
#include "cpu/kernels/kernels.h"

namespace fourfold::cpu {

const Kernels& kernels_neon() {
  static constexpr Kernels kTable = {Elementwise<Neon>::row_kernels(), AttentionLoops<Neon>::attention_kernels(),
                                     DeltaLoops<Neon>::delta_kernels()};
  return kTable;
}

}  // namespace fourfold::cpu
