#include "cpu/simd/avx512.h"
#include "cpu/ceilings/vector_loops.h"

namespace fourfold::cpu::ceilings {

float fma_avx512(int64_t rounds) { return fma_loop<Avx512, 24>(rounds); }
float read_avx512(const void* data, int64_t bytes) { return read_loop<Avx512>(data, bytes); }
float read_ahead_avx512(const void* data, int64_t bytes) { return read_ahead_loop<Avx512>(data, bytes); }

}  // namespace fourfold::cpu::ceilings
