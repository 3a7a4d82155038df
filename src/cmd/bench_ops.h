// `fourfold bench ops`: each operation of the CPU backend by itself, beside what this machine can do at most.
#pragma once

namespace CLI {
class App;
}

namespace fourfold::cmd {

// Adds the subcommand `ops` to `fourfold bench`.
void add_bench_ops(CLI::App& bench_app);

}  // namespace fourfold::cmd
