// fourfold bench kernels --ops: every operation of a model's steps on a GPU by itself.
#pragma once

#include <vector>

#include "cmd/card_steps.h"

namespace fourfold::cmd {

// For steps of so many rows: the table of `bench model --device cuda`, and which kernels each operation launches.
void bench_operations(const CardModel& model, const std::vector<int64_t>& rows, int64_t context, bool json);

}  // namespace fourfold::cmd
