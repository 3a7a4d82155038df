// Block scales as a checkpoint has them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace fourfold::nvfp4 {

// Whether one of them is what no block scale may be: NaN (0x7f, 0xff) or negative.
inline bool has_bad_scale(const uint8_t* scales, size_t count) {
  uint8_t largest = 0;
  for (size_t i = 0; i < count; ++i) largest = std::max(largest, scales[i]);
  return largest >= 0x7f;
}

}  // namespace fourfold::nvfp4
