// The card's clock. tests/executor/include has the same for the host.
#pragma once

namespace fourfold::ptx {

// Nanoseconds since some point in time, the same for all SMs; it moves on in steps of some tens of them.
__device__ __forceinline__ unsigned long long timer_ns() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

}  // namespace fourfold::ptx
