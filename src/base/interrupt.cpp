#include "base/interrupt.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstring>

#include "base/check.h"

namespace fourfold {
namespace {

std::atomic<bool> flag{false};
static_assert(std::atomic<bool>::is_always_lock_free);

// Readable after an interrupt, so that poll() sees one that came just before it, or that another thread took.
std::atomic<int> counter{-1};
static_assert(std::atomic<int>::is_always_lock_free);

void on_interrupt(int) {
  if (flag.exchange(true)) ::_exit(130);
  const int error = errno;
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(counter.load(std::memory_order_relaxed), &one, sizeof one);
  errno = error;
}

}  // namespace

void install_interrupt_handler() {
  if (counter.load() < 0) {
    const int fd = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (fd < 0) fail("cannot make a counter of interrupts: {}", std::strerror(errno));
    int none = -1;
    if (!counter.compare_exchange_strong(none, fd)) ::close(fd);
  }
  struct sigaction action {};
  action.sa_handler = on_interrupt;
  ::sigemptyset(&action.sa_mask);
  action.sa_flags = 0;  // no SA_RESTART: blocking calls return with EINTR
  ::sigaction(SIGINT, &action, nullptr);
}

bool interrupted() { return flag.load(std::memory_order_relaxed); }
void clear_interrupt() { flag.store(false); }

void throw_if_interrupted() {
  if (interrupted()) throw Interrupted();
}

bool wait_for_input(int fd) {
  for (;;) {
    if (interrupted()) return false;
    pollfd ready[2] = {{fd, POLLIN, 0}, {counter.load(), POLLIN, 0}};  // a descriptor below 0 is passed over
    if (::poll(ready, 2, -1) < 0) {
      if (errno == EINTR) continue;
      return true;  // what is wrong with it reading will say
    }
    if (ready[1].revents != 0) {
      // Taken back before the flag is looked at again: one of an interrupt that was seen by others ends no later wait.
      uint64_t count = 0;
      [[maybe_unused]] const ssize_t taken = ::read(ready[1].fd, &count, sizeof count);
    } else if (ready[0].revents != 0) {
      return true;
    }
  }
}

}  // namespace fourfold
