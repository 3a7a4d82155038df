// `fourfold bench comm`: what the sums between ranks take.
#pragma once

namespace fourfold::cmd {

class Command;

// Adds the subcommand `comm` to `fourfold bench`.
void add_bench_comm(Command& bench_app);

}  // namespace fourfold::cmd
