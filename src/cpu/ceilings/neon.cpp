#include "cpu/simd/neon.h"
#include "cpu/ceilings/vector_loops.h"

namespace fourfold::cpu::ceilings {

float fma_neon(int64_t rounds) { return fma_loop<Neon, 12>(rounds); }
float read_neon(const void* data, int64_t bytes) { return read_loop<Neon>(data, bytes); }
float read_ahead_neon(const void* data, int64_t bytes) { return read_ahead_loop<Neon>(data, bytes); }

}  // namespace fourfold::cpu::ceilings
