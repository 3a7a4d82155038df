// The table of operations: each row runs on the reference and on every fast instruction set of this processor.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "op_harness.h"

namespace fourfold::test {

struct OpCase {
  std::string name;
  bool nvfp4_activations = false;
  std::function<std::vector<Result>(cpu::CpuBackend&)> run;
};

const std::vector<OpCase>& op_cases();

}  // namespace fourfold::test
