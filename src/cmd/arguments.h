// Commands and their options: what the commands need of CLI11, so that one file compiles that library and not twenty.
//
// Command and Option are handles; what they refer to lives as long as the program's root command. A field given to
// add_option() or add_flag() must too: keep it in a shared structure that the callback captures.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace fourfold::cmd {

// Thrown by a callback to end the program with a status other than 0 and no message.
struct ExitStatus {
  int status;
};

class Option {
 public:
  explicit Option(CLI::Option* option) : option_(option) {}

  Option& required();
  Option& show_default();                       // in the help; after the field has its default
  Option& range(int64_t low, int64_t high);     // of integers, ends included
  Option& real_range(double low, double high);  // ends included; NaN is refused
  Option& one_of(const std::vector<std::string>& words);
  Option& one_each();  // of a list that is no positional: each time that the option is given it takes one value
  Option& untyped();   // of a positional: the help shows its description alone
  Option& group(const std::string& heading);

 private:
  CLI::Option* option_;
};

class Command {
 public:
  explicit Command(CLI::App* app) : app_(app) {}

  Command add_command(const std::string& name, const std::string& help);
  void require_command();  // running it without one of its commands is an error

  // "--name", "-n,--name", or a positional "NAME". T: int, int64_t, uint64_t, double, std::string, std::optional of one
  // of them, std::vector<std::string>.
  template <typename T>
  Option add_option(const std::string& names, T& field, const std::string& help);

  // T: bool or std::optional<bool>. "--name,!--no-name" also has a name that makes it false.
  template <typename T>
  void add_flag(const std::string& names, T& field, const std::string& help);
  void add_flag_callback(const std::string& names, std::function<void()> given, const std::string& help);

  // "--config FILE": options of this command from a YAML file; those of the command line win (cmd/config_file.h).
  void add_config_file();

  // Options of this command, by one of their names, of which only one may be given; and one that only goes with
  // another.
  void exclude(const std::string& name, const std::string& other);
  void need(const std::string& name, const std::string& other);

  void callback(std::function<void()> run);

 private:
  CLI::App* app_;
};

// The root of the commands.
class Program {
 public:
  Program(const std::string& help, const std::string& name, const std::string& version,
          std::function<std::string()> footer);
  ~Program();

  Command root();
  // Parses and runs the command, or prints the help or version; the exit status. Behind "--" no argument is an option.
  // An Error on bad arguments; whatever the command throws passes through, but ExitStatus.
  int run(int argc, char** argv);

  // What `help COMMAND...` prints: the help of that command.
  std::string help(const std::vector<std::string>& command) const;
  // A script of bash that completes the commands, their options, the words that options take, and file names.
  std::string bash_completion() const;
  // The same as a page for man, section 1, in roff.
  std::string manual() const;

 private:
  std::unique_ptr<CLI::App> app_;
};

}  // namespace fourfold::cmd
