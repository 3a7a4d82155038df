// The commands of the binary. Each adds a CLI11 subcommand with its help, its options and a callback; a callback throws
// fourfold::Error on bad input (main prints it and exits with 2) or CLI::RuntimeError(status) to end with another
// status.
#pragma once

namespace CLI {
class App;
}

namespace fourfold::cmd {

void add_run(CLI::App& app);
void add_eval(CLI::App& app);
void add_bench(CLI::App& app);
void add_inspect(CLI::App& app);
void add_quantize(CLI::App& app);
void add_generate(CLI::App& app);
void add_logits(CLI::App& app);
void add_render(CLI::App& app);
void add_tokenize(CLI::App& app);
void add_plan(CLI::App& app);
void add_warm(CLI::App& app);
void add_tune(CLI::App& app);

}  // namespace fourfold::cmd
