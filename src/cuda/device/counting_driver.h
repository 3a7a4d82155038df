// A driver of a card that is not there: memory has addresses and no bytes, nothing is copied and nothing runs. What is
// built on it finds out how much memory it would take (docs/cuda.md, "The memory plan").
#pragma once

#include <memory>

#include "jit/driver.h"

namespace fourfold::cuda {

std::unique_ptr<const jit::Driver> counting_driver();

}  // namespace fourfold::cuda
