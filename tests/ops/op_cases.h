// The table of operations: each row runs on the reference and on every column, a backend that is compared with it.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "column.h"

namespace fourfold::test {

// What the CUDA backend makes of a row: it runs, where there is a card and where there is none; it runs where there is
// a card, its kernels not being compiled for the host; it is refused by an Error that names what is wanted; or it is
// not there to be asked for.
enum class OnCuda { kRuns, kOnCard, kRefused, kNever };

struct OpCase {
  std::string name;
  std::function<std::vector<Result>(Column&)> run;
  bool nvfp4_activations = false;
  OnCuda cuda = OnCuda::kRuns;
  bool has_cache = false;  // of keys and values, which may be e4m3
};

const std::vector<OpCase>& op_cases();

}  // namespace fourfold::test
