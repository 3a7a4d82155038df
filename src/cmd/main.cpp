#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <exception>
#include <system_error>

#include "base/check.h"
#include "base/console.h"
#include "base/env.h"
#include "base/interrupt.h"
#include "cmd/arguments.h"
#include "cmd/commands.h"

namespace {

std::string footer() {
  std::string text = "Environment:\n";
  for (const fourfold::EnvVariable& variable : fourfold::env_variables()) {
    text += fmt::format("  {:<20} {}\n", variable.name, variable.meaning);
  }
  return text;
}

// A file that is opened takes the lowest free number. Where the shell closed a standard stream (>&-), that would be the
// stream's, and messages would be written into a checkpoint. /dev/null is opened so that the use of the stream is an
// error.
void fill_standard_streams() {
  for (int fd = 0; fd <= 2; ++fd) {
    if (::fcntl(fd, F_GETFD) < 0 && errno == EBADF) ::open("/dev/null", fd == 0 ? O_WRONLY : O_RDONLY);
  }
}

// One line, whatever the message quotes.
int report(std::string_view kind, std::string_view message, int status) {
  fourfold::eprint("fourfold: {}{}\n", kind, fourfold::printable(message, 2000));
  return status;
}

// What is still in the buffer must reach its reader before the program may say that it is done.
int finish(int status) {
  errno = 0;
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return status;
  const std::string reason = errno == 0 ? "" : fmt::format(": {}", std::strerror(errno));
  return report("error: ", "cannot write to standard output" + reason, status == 0 ? 2 : status);
}

}  // namespace

int main(int argc, char** argv) {
  fill_standard_streams();
  // A file that may not grow further (ulimit -f) is an error of write() and not the end of the program.
  std::signal(SIGXFSZ, SIG_IGN);
  try {
    namespace cmd = fourfold::cmd;
    cmd::Program program("fourfold: inference for NVFP4 mixture-of-experts models", "fourfold", FOURFOLD_VERSION,
                         footer);
    cmd::Command app = program.root();
    cmd::add_run(app);
    cmd::add_serve(app);
    cmd::add_batch(app);
    cmd::add_eval(app);
    cmd::add_bench(app);
    cmd::add_inspect(app);
    cmd::add_doctor(app);
    cmd::add_quantize(app);
    cmd::add_generate(app);
    cmd::add_logits(app);
    cmd::add_render(app);
    cmd::add_tokenize(app);
    cmd::add_plan(app);
    cmd::add_warm(app);
    cmd::add_tune(app);
    cmd::add_help(app, program);
    return finish(program.run(argc, argv));
  } catch (const fourfold::Error& error) {
    return report("error: ", error.what(), 2);
  } catch (const fourfold::Interrupted& interrupt) {
    return report("", interrupt.what(), 130);
  } catch (const std::bad_alloc&) {
    return report("error: ", "out of memory", 2);
  } catch (const std::system_error& error) {  // of the machine: a full disk, no more threads, a closed stream
    // fmt::print() does not say which file it means.
    if (std::ferror(stdout) != 0)
      return report("error: ", "cannot write to standard output: " + error.code().message(), 2);
    return report("error: ", error.what(), 2);
  } catch (const std::exception& error) {
    return report("internal error: ", error.what(), 3);
  }
}
