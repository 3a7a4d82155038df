// The time between the operations of a step, for timelines.
#pragma once

#include "kernels/ptx/timer.cuh"

namespace fourfold::step {

// One warp. Launched so that everything before it has ended.
__global__ void __launch_bounds__(32) stamp(unsigned long long* times, int index) {
  if (threadIdx.x == 0) times[index] = ptx::timer_ns();
}

}  // namespace fourfold::step
