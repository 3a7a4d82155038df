#include "base/interrupt.h"

#include <unistd.h>

#include <atomic>
#include <csignal>

namespace fourfold {
namespace {

std::atomic<bool> flag{false};
static_assert(std::atomic<bool>::is_always_lock_free);

void on_interrupt(int) {
  if (flag.exchange(true)) ::_exit(130);
}

}  // namespace

void install_interrupt_handler() {
  struct sigaction action {};
  action.sa_handler = on_interrupt;
  ::sigemptyset(&action.sa_mask);
  action.sa_flags = 0;  // no SA_RESTART: a blocked read of the terminal returns with EINTR
  ::sigaction(SIGINT, &action, nullptr);
}

bool interrupted() { return flag.load(std::memory_order_relaxed); }
void clear_interrupt() { flag.store(false); }

void throw_if_interrupted() {
  if (interrupted()) throw Interrupted();
}

}  // namespace fourfold
