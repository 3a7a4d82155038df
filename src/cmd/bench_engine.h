// `fourfold bench engine`: a set of requests through engine.h, beside the bare model in the same run.
#pragma once

namespace fourfold::cmd {

class Command;

// Adds the subcommand `engine` to `fourfold bench`.
void add_bench_engine(Command& bench_app);

}  // namespace fourfold::cmd
