#include "cpu/simd/avx2.h"
#include "cpu/ceilings/vector_loops.h"

namespace fourfold::cpu::ceilings {

float fma_avx2(int64_t rounds) { return fma_loop<Avx2, 12>(rounds); }
float read_avx2(const void* data, int64_t bytes) { return read_loop<Avx2>(data, bytes); }
float read_ahead_avx2(const void* data, int64_t bytes) { return read_ahead_loop<Avx2>(data, bytes); }

}  // namespace fourfold::cpu::ceilings
