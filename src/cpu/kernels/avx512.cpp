#include "cpu/simd/avx512.h"
#include "cpu/attention/attend.h"
#include "cpu/delta/rule.h"
#include "cpu/kernels/kernels.h"

namespace fourfold::cpu {

const Kernels& kernels_avx512() {
  static constexpr Kernels kTable = {Elementwise<Avx512>::row_kernels(), AttentionLoops<Avx512>::attention_kernels(),
                                     DeltaLoops<Avx512>::delta_kernels()};
  return kTable;
}

}  // namespace fourfold::cpu
