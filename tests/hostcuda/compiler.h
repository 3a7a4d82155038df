#pragma once

#include "hostcuda/registry.h"
#include "jit/nvrtc.h"

namespace fourfold::hostcuda {

jit::Nvrtc::Functions compiler_functions();
// The source of what the compiler made.
const char* text_of_cubin(const void* image);

}  // namespace fourfold::hostcuda
