#include "cpu/simd/avx2.h"
#include "cpu/attention/attend.h"
#include "cpu/delta/rule.h"
#include "cpu/kernels/kernels.h"

namespace fourfold::cpu {

const Kernels& kernels_avx2() {
  static constexpr Kernels kTable = {Elementwise<Avx2>::row_kernels(), AttentionLoops<Avx2>::attention_kernels(),
                                     DeltaLoops<Avx2>::delta_kernels()};
  return kTable;
}

}  // namespace fourfold::cpu
