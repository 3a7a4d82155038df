// fourfold bench load: how fast a checkpoint comes into the memory that the model runs from.
#pragma once

#include "cmd/arguments.h"

namespace fourfold::cmd {

void add_bench_load(Command& bench_app);

}  // namespace fourfold::cmd
