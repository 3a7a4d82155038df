#include <immintrin.h>

#include <type_traits>

#include "cpu/kernels.h"

namespace fourfold::cpu {
namespace {
#include "cpu/simd_avx2.inc"

#include "cpu/kernels_common.inc"

#include "cpu/kernels_attention.inc"
#include "cpu/kernels_delta.inc"
constexpr Kernels kTable = make_kernels();
}  // namespace

const Kernels& kernels_avx2() { return kTable; }

}  // namespace fourfold::cpu
