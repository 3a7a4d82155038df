// fourfold help: what --help prints, by the name of a command. fourfold completion: the same knowledge for bash.
#include <fmt/format.h>

#include <memory>
#include <string>
#include <vector>

#include "cmd/arguments.h"
#include "cmd/commands.h"

namespace fourfold::cmd {

void add_help(Command& app, const Program& program) {
  auto words = std::make_shared<std::vector<std::string>>();
  auto manual = std::make_shared<bool>(false);
  Command help = app.add_command("help", "Print the help of a command: fourfold help bench model");
  help.add_option("args", *words, "[COMMAND...]").untyped();
  help.add_flag("--man", *manual, "All of it as a page for man, in roff");
  help.exclude("--man", "args");
  help.callback([words, manual, &program] { fmt::print("{}", *manual ? program.manual() : program.help(*words)); });

  Command completion = app.add_command(
      "completion",
      "Print a script that completes commands and options in bash\n\n"
      "  source <(fourfold completion)    in ~/.bashrc, or once; an installation has it where bash looks for it");
  completion.callback([&program] { fmt::print("{}", program.bash_completion()); });
}

}  // namespace fourfold::cmd
