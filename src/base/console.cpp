#include "base/console.h"

#include <csignal>
#include <cstdio>
#include <ctime>

#include "base/check.h"

namespace fourfold {

void write_stderr(std::string_view text) {
  // Who has read it may be gone: that ends a filter, which is what SIGPIPE is for, and no server.
  sigset_t pipe, before;
  sigemptyset(&pipe);
  sigaddset(&pipe, SIGPIPE);
  ::pthread_sigmask(SIG_BLOCK, &pipe, &before);
  std::fwrite(text.data(), 1, text.size(), stderr);
  std::fflush(stderr);
  const timespec none{};
  while (::sigtimedwait(&pipe, nullptr, &none) == SIGPIPE) {  // the one that this has raised
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void warn(std::string_view text) { eprint("fourfold: warning: {}\n", printable(text, 2000)); }

}  // namespace fourfold
