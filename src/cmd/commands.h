// The commands of the binary. Each adds its subcommand with help, its options and a callback; a callback throws
// fourfold::Error on bad input (main prints it and exits with 2) or ExitStatus(status) to end with another
// status.
#pragma once

namespace fourfold::cmd {

class Command;
class Program;

void add_run(Command& app);
void add_serve(Command& app);
void add_batch(Command& app);
void add_doctor(Command& app);
void add_eval(Command& app);
void add_bench(Command& app);
void add_inspect(Command& app);
void add_quantize(Command& app);
void add_generate(Command& app);
void add_logits(Command& app);
void add_render(Command& app);
void add_tokenize(Command& app);
void add_plan(Command& app);
void add_warm(Command& app);
void add_tune(Command& app);
// help and completion
void add_help(Command& app, const Program& program);

}  // namespace fourfold::cmd
