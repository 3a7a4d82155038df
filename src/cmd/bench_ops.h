// `fourfold bench ops`: each operation of the CPU backend by itself, beside what this machine can do at most.
#pragma once

namespace fourfold::cmd {

class Command;

// Adds the subcommand `ops` to `fourfold bench`.
void add_bench_ops(Command& bench_app);

}  // namespace fourfold::cmd
