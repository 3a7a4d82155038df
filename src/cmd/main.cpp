#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>

#include "base/check.h"
#include "base/env.h"
#include "cmd/commands.h"

namespace {

std::string footer() {
  std::string text = "Environment:\n";
  for (const fourfold::EnvVariable& variable : fourfold::env_variables()) {
    text += fmt::format("  {:<20} {}\n", variable.name, variable.meaning);
  }
  return text;
}

// CLI11 says of an unknown command only that one is required.
void check_command(const CLI::App& app, int argc, char** argv) {
  if (argc < 2 || argv[1][0] == '-') return;
  std::string names;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    if (command->get_name() == argv[1]) return;
    names += (names.empty() ? "" : ", ") + command->get_name();
  }
  fourfold::fail("no command {}, wanted one of {}", fourfold::printable(argv[1]), names);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("fourfold: inference for NVFP4 mixture-of-experts models", "fourfold");
  app.set_version_flag("--version", FOURFOLD_VERSION);
  app.require_subcommand(1);
  app.footer(footer);
  try {
    namespace cmd = fourfold::cmd;
    cmd::add_run(app);
    cmd::add_eval(app);
    cmd::add_bench(app);
    cmd::add_inspect(app);
    cmd::add_quantize(app);
    cmd::add_generate(app);
    cmd::add_logits(app);
    cmd::add_render(app);
    cmd::add_tokenize(app);
    cmd::add_plan(app);
    cmd::add_warm(app);
    cmd::add_tune(app);
    check_command(app, argc, argv);
    app.parse(argc, argv);
    std::fflush(stdout);
    return std::ferror(stdout) != 0 ? 1 : 0;
  } catch (const CLI::RuntimeError& error) {
    return error.get_exit_code();
  } catch (const CLI::Success& success) {  // --help, --version
    return app.exit(success);
  } catch (const CLI::ParseError& error) {
    fmt::print(stderr, "fourfold: error: {} (fourfold --help, fourfold COMMAND --help)\n", error.what());
    return 2;
  } catch (const fourfold::Error& error) {
    fmt::print(stderr, "fourfold: error: {}\n", error.what());
    return 2;
  } catch (const std::bad_alloc&) {
    fmt::print(stderr, "fourfold: error: out of memory\n");
    return 2;
  } catch (const std::exception& error) {
    fmt::print(stderr, "fourfold: internal error: {}\n", error.what());
    return 3;
  }
}
