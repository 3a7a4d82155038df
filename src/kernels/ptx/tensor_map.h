// What the copy engine has to know of a matrix to bring pieces of its rows: host and device, freestanding.
#pragma once

namespace fourfold::ptx {

// The driver's CUtensorMap, of which only the driver knows what is inside (Device::row_pieces makes one). A kernel
// takes it as part of a __grid_constant__ parameter.
struct alignas(64) TensorMap {
  unsigned long long words[16];
};

}  // namespace fourfold::ptx
