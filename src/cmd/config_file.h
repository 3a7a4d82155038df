// A command's options from a YAML file, under their names: `max-model-len: 8192`.
#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace fourfold::cmd {

// What an option takes, for who writes it as an argument.
struct ConfigOption {
  bool known = false;
  bool given = false;  // on the command line, which wins
  bool flag = false;   // takes no value
  bool list = false;   // may be given several times
  bool positional = false;
};

// The arguments that a file stands for: "--name=value" for each option that is not `given`. `find` tells of an option
// by its name without dashes. Underscores in names are dashes; a mapping as a value becomes JSON. An Error names the
// file, the line and what was wanted.
std::vector<std::string> config_arguments(const std::filesystem::path& path,
                                          const std::function<ConfigOption(const std::string& name)>& find);

}  // namespace fourfold::cmd
