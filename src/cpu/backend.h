// The CPU backends: one plain reference in fp32, and fast ones chosen by what the processor has.
#pragma once

#include <memory>

#include "cpu/host/options.h"
#include "ops/ops.h"

namespace fourfold::cpu {

// The backend that was asked for, or the fastest one; an Error when its self-test fails. `self_test` gives the error of
// a backend's products (self_test.h); tests have others.
std::shared_ptr<ops::Backend> make_backend(const CpuOptions& options);
std::shared_ptr<ops::Backend> make_backend(const CpuOptions& options, double (*self_test)(ops::Backend&));

}  // namespace fourfold::cpu
