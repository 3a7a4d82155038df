#include "cmd/arguments.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <optional>
#include <type_traits>

#include "base/check.h"
#include "cmd/config_file.h"

namespace fourfold::cmd {
namespace {

template <typename T>
struct Element {
  using Type = T;
};
template <typename T>
struct Element<std::optional<T>> {
  using Type = T;
};

// What CLI11 takes for a number is what strtoull() and its kin take: -1 for an unsigned one, 010 for eight, white
// space, nothing at all, and the largest one for what is too large.
template <typename T>
std::string check_number(const std::string& text) {
  const char *begin = text.data(), *end = begin + text.size();
  T value{};
  const auto [stop, error] = std::from_chars(begin, end, value);
  bool good = error == std::errc() && stop == end && !text.empty();
  if constexpr (std::is_integral_v<T>) {
    const size_t first = text.starts_with('-') ? 1 : 0;
    good = good && (text.size() == first + 1 || text[first] != '0');
    if (good) return "";
    const bool outside = stop == end && (error == std::errc::result_out_of_range);
    if (!outside && !(std::is_unsigned_v<T> && first == 1)) {
      return fmt::format("Value '{}' is not a decimal integer", printable(text, 60));
    }
    return fmt::format("Value '{}' is not an integer from {} to {}", printable(text, 60), std::numeric_limits<T>::min(),
                       std::numeric_limits<T>::max());
  } else {
    if (good && std::isfinite(value)) return "";
    return fmt::format("Value '{}' is not a number", printable(text, 60));
  }
}

// The command that the arguments name, null if they ask for help instead. CLI11 says of an unknown command, or option
// before one, only that a command is required.
CLI::App* require_known_command(CLI::App* app, int argc, char** argv) {
  for (int i = 1;; ++i) {
    const auto commands = app->get_subcommands([](CLI::App*) { return true; });
    if (commands.empty()) return app;
    const std::string argument = i < argc ? argv[i] : "";
    for (const char* name : {"-h", "--help", "--version"}) {
      if (argument == name) return nullptr;
    }
    std::string names;
    CLI::App* chosen = nullptr;
    for (CLI::App* command : commands) {
      if (i < argc && command->get_name() == argument) chosen = command;
      names += (names.empty() ? "" : ", ") + command->get_name();
    }
    if (chosen == nullptr) {
      std::string path = "fourfold";
      for (int j = 1; j < i; ++j) path += fmt::format(" {}", argv[j]);
      if (i >= argc) fail("{}: no command, wanted one of {} (or --help)", path, names);
      fail("{}: no command '{}', wanted one of {}", path, printable(argument, 200), names);
    }
    app = chosen;
  }
}

// The place of the "--" behind which nothing is an option, or the end. One that an option takes as its value is none.
size_t end_of_options(const CLI::App* command, const std::vector<std::string>& arguments) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i] == "--") return i;
    if (!arguments[i].starts_with('-')) continue;
    const CLI::Option* option = command->get_option_no_throw(arguments[i]);
    if (option != nullptr && option->get_items_expected_min() > 0) ++i;
  }
  return arguments.size();
}

constexpr const char* kConfig = "--config";

// The options of a configuration file, where the arguments name one, put before whatever follows "--". CLI11's own
// reading of such files knows one form, which is not YAML, and only for the root command.
void add_configured(const CLI::App* command, std::vector<std::string>& arguments) {
  const CLI::Option* config = command->get_option_no_throw(kConfig);
  if (config == nullptr) return;
  const size_t end = end_of_options(command, arguments);
  std::string path;
  std::vector<const CLI::Option*> given;
  size_t place = 0, count = 0;  // of the option that names the file
  bool positional = false;
  for (size_t i = 0; i < end; ++i) {
    const std::string name = arguments[i].substr(0, arguments[i].find('='));
    const CLI::Option* option = name.starts_with("--") ? command->get_option_no_throw(name) : nullptr;
    if (option == nullptr) {
      // The command's own name stands first.
      positional = positional || (i > 0 && !name.starts_with('-'));
      continue;
    }
    given.push_back(option);
    const bool attached = name.size() < arguments[i].size();
    const bool takes = !attached && option->get_items_expected_min() > 0 && i + 1 < end;
    if (option == config) {
      if (!path.empty() || (!attached && !takes)) return;  // CLI11 says what is wrong
      path = attached ? arguments[i].substr(name.size() + 1) : arguments[i + 1];
      place = i;
      count = takes ? 2 : 1;
    }
    if (!takes) continue;
    ++i;
    while (option->get_items_expected_max() > 1 && i + 1 < end && !arguments[i + 1].starts_with('-')) ++i;
  }
  if (path.empty()) return;
  std::vector<std::string> more = config_arguments(path, [&](const std::string& name) {
    ConfigOption out;
    const CLI::Option* option = command->get_option_no_throw("--" + name);
    if (option == nullptr) option = command->get_option_no_throw(name);
    if (option == nullptr || option == config || name == "help") return out;
    out.known = true;
    out.positional = option->get_positional();
    out.given = out.positional ? positional : std::find(given.begin(), given.end(), option) != given.end();
    out.flag = option->get_items_expected_max() == 0;
    out.list = option->get_items_expected_max() > 1;
    return out;
  });
  // Behind the command's name, and before the option that names the file: an option of several values must not take
  // what follows for one of them.
  more.push_back(fmt::format("{}={}", kConfig, path));
  const auto named = arguments.begin() + static_cast<std::ptrdiff_t>(place);
  arguments.erase(named, named + static_cast<std::ptrdiff_t>(count));
  arguments.insert(arguments.begin() + 1, more.begin(), more.end());
}

// For the help: positional arguments that name no type are described by their description, "[DIR] [PROMPT]".
class HelpFormatter : public CLI::Formatter {
 public:
  std::string make_option_usage(const CLI::Option* option) const override {
    return option->get_type_name().empty() ? option->get_description() : CLI::Formatter::make_option_usage(option);
  }
  std::string make_option_name(const CLI::Option* option, bool positional) const override {
    return positional && option->get_type_name().empty() ? option->get_description()
                                                         : CLI::Formatter::make_option_name(option, positional);
  }
  std::string make_option_desc(const CLI::Option* option) const override {
    return option->get_positional() && option->get_type_name().empty() ? "" : CLI::Formatter::make_option_desc(option);
  }
  std::string make_option_opts(const CLI::Option* option) const override {
    return option->get_positional() && option->get_type_name().empty() ? "" : CLI::Formatter::make_option_opts(option);
  }
};

}  // namespace

Option& Option::required() {
  option_->required();
  return *this;
}

Option& Option::show_default() {
  option_->capture_default_str();
  return *this;
}

Option& Option::range(int64_t low, int64_t high) {
  option_->check(CLI::Range(low, high).description(""));
  option_->type_name(fmt::format("{} .. {}", low, high));
  return *this;
}

// Not CLI::Range, whose comparisons let NaN through.
Option& Option::real_range(double low, double high) {
  const std::string range = fmt::format("{:g} to {:g}", low, high);
  option_->check([=](const std::string& text) {
    double value = 0;
    if (CLI::detail::lexical_cast(text, value) && value >= low && value <= high) return std::string();
    return fmt::format("Value {} not in range {}", text, range);
  });
  option_->type_name(fmt::format("{:g} .. {:g}", low, high));
  return *this;
}

Option& Option::one_of(const std::vector<std::string>& words) {
  option_->check(CLI::IsMember(words).description(""));
  option_->type_name(fmt::format("{{{}}}", fmt::join(words, ",")));
  return *this;
}

Option& Option::one_each() {
  option_->expected(1)->allow_extra_args(false)->take_all();
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
  CLI::Option* option = app_->add_option(names, field, help);
  using Value = typename Element<T>::Type;
  if constexpr (std::is_arithmetic_v<Value>)
    option->check([](const std::string& text) { return check_number<Value>(text); });
  return Option(option);
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

void Command::add_config_file() {
  app_->add_option(kConfig, "File of options in YAML form, by their names; the command line wins")->type_name("FILE");
}

void Command::exclude(const std::string& name, const std::string& other) {
  app_->get_option(name)->excludes(app_->get_option(other));
}

void Command::need(const std::string& name, const std::string& other) {
  app_->get_option(name)->needs(app_->get_option(other));
}

void Command::callback(std::function<void()> run) { app_->callback(std::move(run)); }

Program::Program(const std::string& help, const std::string& name, const std::string& version,
                 std::function<std::string()> footer)
    : app_(std::make_unique<CLI::App>(help, name)) {
  app_->formatter(std::make_shared<HelpFormatter>());
  app_->set_version_flag("--version", version);
  app_->require_subcommand(1);
  app_->footer(std::move(footer));
}

Program::~Program() = default;

std::string Program::help(const std::vector<std::string>& command) const {
  const CLI::App* app = app_.get();
  std::string path;
  for (const std::string& word : command) {
    const auto commands = app->get_subcommands([](const CLI::App*) { return true; });
    const auto found =
        std::find_if(commands.begin(), commands.end(), [&](const CLI::App* one) { return one->get_name() == word; });
    if (found == commands.end()) {
      std::string names;
      for (const CLI::App* one : commands) names += (names.empty() ? "" : ", ") + one->get_name();
      fail("help: {} has no command '{}'{}", path.empty() ? "fourfold" : path, printable(word),
           names.empty() ? "" : ", wanted one of " + names);
    }
    path += (path.empty() ? "" : " ") + app->get_name();
    app = *found;
  }
  // Not App::help(), which is that of the command that is running: this one.
  return app->get_formatter()->make_help(app, path.empty() ? app->get_name() : path + ' ' + app->get_name(),
                                         CLI::AppFormatMode::Normal);
}

namespace {

// What may stand at a place of the command line: the name of a command, an option, or a word that an option takes.
struct Completion {
  std::string commands;  // patterns of "PATH COMMAND" by which a path grows
  std::string values;    // cases of "PATH --OPTION"
  std::string options;   // cases of "PATH"
};

void collect(const CLI::App* app, const std::string& path, Completion& out) {
  const auto commands = app->get_subcommands([](const CLI::App*) { return true; });
  std::string words;
  for (const CLI::App* command : commands) {
    words += command->get_name() + ' ';
    out.commands += fmt::format("{}\"{} {}\"", out.commands.empty() ? "" : " | ", path, command->get_name());
  }
  for (const CLI::Option* option : app->get_options()) {
    const std::string type = option->get_type_name();
    const bool choice = type.starts_with('{') && type.ends_with('}');
    for (const std::string& name : option->get_lnames()) {
      words += "--" + name + ' ';
      if (!choice) continue;
      std::string choices = type.substr(1, type.size() - 2);
      std::replace(choices.begin(), choices.end(), ',', ' ');
      out.values += fmt::format("    \"{} --{}\") words=\"{}\" ;;\n", path, name, choices);
    }
  }
  if (!words.empty()) words.pop_back();
  out.options += fmt::format("      \"{}\") words=\"{}\" ;;\n", path, words);
  for (const CLI::App* command : commands) {
    collect(command, path.empty() ? command->get_name() : path + ' ' + command->get_name(), out);
  }
}

}  // namespace

std::string Program::bash_completion() const {
  Completion found;
  collect(app_.get(), "", found);
  std::string command_names;
  for (const CLI::App* command : app_->get_subcommands([](const CLI::App*) { return true; })) {
    command_names += (command_names.empty() ? "" : " ") + command->get_name();
  }
  return fmt::format(R"(# Completion of fourfold for bash: source <(fourfold completion)
_fourfold() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} path= words= i
  for ((i = 1; i < COMP_CWORD; i++)); do
    case "$path ${{COMP_WORDS[i]}}" in
      {}) path="${{path:+$path }}${{COMP_WORDS[i]}}" ;;
    esac
  done
  case "$path ${{COMP_WORDS[COMP_CWORD - 1]}}" in
{}  esac
  if [ -z "$words" ] && {{ [ -z "$path" ] || [ "$path" = help ] || [ "$path" = bench ] || [[ $current == -* ]]; }}; then
    case "$path" in
      help) words="{}" ;;
{}    esac
  fi
  # An option's word, a command or an option; otherwise the names of files, which bash completes itself.
  [ -z "$words" ] || COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _fourfold fourfold
)",
                     found.commands, found.values, command_names, found.options);
}

namespace {

// Text for roff: a backslash, a hyphen and a dot or quote that begins a line mean something there.
std::string roff(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if ((c == '.' || c == '\'') && (i == 0 || text[i - 1] == '\n')) out += "\\&";
    if (c == '\\') {
      out += "\\e";
    } else if (c == '-') {
      out += "\\-";
    } else {
      out += c;
    }
  }
  return out;
}

// Help as it is written: paragraphs, and examples, whose lines begin with blanks and are kept as they are.
void describe(std::string_view text, std::string* out) {
  bool example = false;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    const std::string_view line = text.substr(begin, end - begin);
    begin = end + 1;
    const bool indented = line.starts_with("  ");
    if (indented != example) *out += indented ? ".nf\n" : ".fi\n";
    example = indented;
    *out += line.empty() ? ".PP\n" : roff(line) + '\n';
  }
  if (example) *out += ".fi\n";
}

void describe(const CLI::App* app, const std::string& path, std::string* out) {
  if (!path.empty()) {
    *out += fmt::format(".SS \"fourfold {}\"\n", roff(path));
    describe(app->get_description(), out);
  }
  for (const CLI::Option* option : app->get_options()) {
    if (option->get_group().empty() || (!path.empty() && option == app->get_help_ptr())) continue;
    std::string names = option->get_positional() ? option->get_name(true, false) : option->get_name(false, true);
    for (size_t at = 0; (at = names.find(",-", at)) != std::string::npos; at += 2) names.replace(at, 2, ", -");
    const std::string type = option->get_type_size() == 0 ? "" : option->get_type_name();
    const std::string value = option->get_default_str();
    *out += fmt::format(".TP\n\\fB{}\\fR{}{}\n", roff(names), type.empty() ? "" : " " + roff(type),
                        value.empty() ? "" : roff(" (default: " + value + ")"));
    describe(option->get_description(), out);
  }
  for (const CLI::App* command : app->get_subcommands([](const CLI::App*) { return true; })) {
    describe(command, path.empty() ? command->get_name() : path + ' ' + command->get_name(), out);
  }
}

}  // namespace

std::string Program::manual() const {
  std::string out = ".TH FOURFOLD 1 \"\" \"fourfold " FOURFOLD_VERSION "\" \"User Commands\"\n.SH NAME\n";
  std::string about = app_->get_description();
  about.erase(0, about.find(": ") + 2);  // "fourfold: inference for ..."
  out += "fourfold \\- " + roff(about) + "\n.SH SYNOPSIS\n.B fourfold\nCOMMAND [OPTIONS]\n";
  out += ".SH \"COMMANDS AND OPTIONS\"\n";
  describe(app_.get(), "", &out);
  out +=
      ".SH \"EXIT STATUS\"\n0: done. 2: bad input; one line on standard error says what was found and what was "
      "wanted.\n"
      "3: a mistake of the program. 130: work ended by Ctrl\\-C.\n.SH ENVIRONMENT\n.nf\n";
  std::string variables = app_->get_footer();
  variables.erase(0, variables.find('\n') + 1);  // the heading
  out += roff(variables) + ".fi\n";
  return out;
}

Command Program::root() { return Command(app_.get()); }

int Program::run(int argc, char** argv) {
  CLI::App* command = require_known_command(app_.get(), argc, argv);
  std::vector<std::string> arguments(argv + 1, argv + argc);
  // CLI11 (2.1) hands what follows a "--" to the root command. Here it stays where it is, marked as no option; the mark
  // is one with which no argument begins.
  std::string mark;
  if (command != nullptr) {
    add_configured(command, arguments);
    const size_t end = end_of_options(command, arguments);
    if (end < arguments.size()) {
      arguments.erase(arguments.begin() + static_cast<std::ptrdiff_t>(end));
      do mark += '\x01';
      while (std::any_of(arguments.begin(), arguments.end(), [&](const auto& text) { return text.starts_with(mark); }));
      for (size_t i = end; i < arguments.size(); ++i) arguments[i].insert(0, mark);
      for (CLI::Option* option : command->get_options()) {
        if (!option->get_positional()) continue;
        option->transform(
            [mark](const std::string& text) { return text.starts_with(mark) ? text.substr(mark.size()) : text; });
      }
    }
  }
  try {
    std::reverse(arguments.begin(), arguments.end());  // CLI11 takes them from the back
    app_->parse(std::move(arguments));
    return 0;
  } catch (const ExitStatus& exit) {
    return exit.status;
  } catch (const CLI::Success& success) {  // --help, --version
    return app_->exit(success);
  } catch (const CLI::ParseError& error) {
    std::string message = error.what();
    for (size_t at; !mark.empty() && (at = message.find(mark)) != std::string::npos;) message.erase(at, mark.size());
    fail("{} (fourfold --help, fourfold COMMAND --help)", message);
  }
}

}  // namespace fourfold::cmd
