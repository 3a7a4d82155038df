#include "cmd/arguments.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <optional>

#include "base/check.h"

namespace fourfold::cmd {

Option& Option::required() {
  option_->required();
  return *this;
}

Option& Option::show_default() {
  option_->capture_default_str();
  return *this;
}

Option& Option::range(int64_t low, int64_t high) {
  option_->check(CLI::Range(low, high));
  return *this;
}

// Not CLI::Range, whose comparisons let NaN through.
Option& Option::real_range(double low, double high) {
  const std::string range = fmt::format("{:g} to {:g}", low, high);
  option_->check(CLI::Validator(
      [=](std::string& text) {
        double value = 0;
        if (CLI::detail::lexical_cast(text, value) && value >= low && value <= high) return std::string();
        return fmt::format("Value {} not in range {}", text, range);
      },
      "FLOAT in [" + range + "]"));
  return *this;
}

Option& Option::one_of(const std::vector<std::string>& words) {
  option_->check(CLI::IsMember(words));
  return *this;
}

Option& Option::at_most(int values) {
  option_->expected(0, values);
  return *this;
}

Option& Option::untyped() {
  option_->type_name("");
  return *this;
}

Option& Option::group(const std::string& heading) {
  option_->group(heading);
  return *this;
}

Command Command::add_command(const std::string& name, const std::string& help) {
  return Command(app_->add_subcommand(name, help));
}

void Command::require_command() { app_->require_subcommand(1); }

template <typename T>
Option Command::add_option(const std::string& names, T& field, const std::string& help) {
  return Option(app_->add_option(names, field, help));
}
template Option Command::add_option(const std::string&, int&, const std::string&);
template Option Command::add_option(const std::string&, int64_t&, const std::string&);
template Option Command::add_option(const std::string&, uint64_t&, const std::string&);
template Option Command::add_option(const std::string&, double&, const std::string&);
template Option Command::add_option(const std::string&, std::string&, const std::string&);
template Option Command::add_option(const std::string&, std::optional<int>&, const std::string&);
template Option Command::add_option(const std::string&, std::optional<int64_t>&, const std::string&);
template Option Command::add_option(const std::string&, std::optional<uint64_t>&, const std::string&);
template Option Command::add_option(const std::string&, std::optional<double>&, const std::string&);
template Option Command::add_option(const std::string&, std::optional<std::string>&, const std::string&);
template Option Command::add_option(const std::string&, std::vector<std::string>&, const std::string&);

template <typename T>
void Command::add_flag(const std::string& names, T& field, const std::string& help) {
  app_->add_flag(names, field, help);
}
template void Command::add_flag(const std::string&, bool&, const std::string&);
template void Command::add_flag(const std::string&, std::optional<bool>&, const std::string&);

void Command::add_flag_callback(const std::string& names, std::function<void()> given, const std::string& help) {
  app_->add_flag_callback(names, std::move(given), help);
}

void Command::callback(std::function<void()> run) { app_->callback(std::move(run)); }

Program::Program(const std::string& help, const std::string& name, const std::string& version,
                 std::function<std::string()> footer)
    : app_(std::make_unique<CLI::App>(help, name)) {
  app_->set_version_flag("--version", version);
  app_->require_subcommand(1);
  app_->footer(std::move(footer));
}

Program::~Program() = default;

Command Program::root() { return Command(app_.get()); }

int Program::run(int argc, char** argv) {
  // CLI11 says of an unknown command only that one is required.
  if (argc >= 2 && argv[1][0] != '-') {
    bool known = false;
    std::string names;
    for (const CLI::App* command : app_->get_subcommands([](const CLI::App*) { return true; })) {
      known |= command->get_name() == argv[1];
      names += (names.empty() ? "" : ", ") + command->get_name();
    }
    if (!known) fail("no command {}, wanted one of {}", printable(argv[1]), names);
  }
  try {
    app_->parse(argc, argv);
    return 0;
  } catch (const ExitStatus& exit) {
    return exit.status;
  } catch (const CLI::Success& success) {  // --help, --version
    return app_->exit(success);
  } catch (const CLI::ParseError& error) {
    fail("{} (fourfold --help, fourfold COMMAND --help)", error.what());
  }
}

}  // namespace fourfold::cmd
