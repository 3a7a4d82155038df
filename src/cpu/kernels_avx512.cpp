#include <immintrin.h>

#include "cpu/kernels.h"

namespace fourfold::cpu {
namespace {
#include "cpu/simd_avx512.h"

#include "cpu/kernels_common.h"

#include "cpu/kernels_attention.h"
#include "cpu/kernels_delta.h"
constexpr Kernels kTable = make_kernels();
}  // namespace

const Kernels& kernels_avx512() { return kTable; }

}  // namespace fourfold::cpu
