// In place of src/kernels/ptx/timer.cuh on the host.
#pragma once

#include <chrono>

namespace fourfold::ptx {

inline unsigned long long timer_ns() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<unsigned long long>(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
}

}  // namespace fourfold::ptx
