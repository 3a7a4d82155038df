#include "doctor/child.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <exception>
#include <string_view>

#include "base/check.h"
#include "base/interrupt.h"

namespace fourfold::doctor {
namespace {

using Clock = std::chrono::steady_clock;
constexpr size_t kMaxOutput = 16 << 20;

ChildResult run(const std::function<void(int out)>& body, std::chrono::milliseconds limit) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) fail("cannot make a pipe: {}", std::strerror(errno));
  const pid_t child = ::fork();
  if (child < 0) fail("cannot start a process: {}", std::strerror(errno));
  if (child == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    ::setpgid(0, 0);  // what it starts ends with it
    body(ends[1]);
    ::_exit(1);
  }
  ::setpgid(child, child);
  ::close(ends[1]);
  ChildResult result;
  const auto end = Clock::now() + limit;
  bool late = false;
  for (;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now()).count();
    late = left <= 0 || result.output.size() > kMaxOutput;
    if (late || interrupted()) break;
    pollfd ready{ends[0], POLLIN, 0};
    if (::poll(&ready, 1, static_cast<int>(std::min<int64_t>(left, 50))) <= 0) continue;
    char buffer[65536];
    const ssize_t count = ::read(ends[0], buffer, sizeof buffer);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) break;
    result.output.append(buffer, static_cast<size_t>(count));
  }
  ::close(ends[0]);
  // It may have closed its output and go on; nobody waits for that.
  int status = 0;
  while (!late && ::waitpid(child, &status, WNOHANG) == 0) {
    late = Clock::now() > end || interrupted();
    ::usleep(1000);
  }
  if (late) {
    ::kill(-child, SIGKILL);
    ::kill(child, SIGKILL);
    while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
    }
  }
  throw_if_interrupted();
  if (late) {
    result.failure = result.output.size() > kMaxOutput
                         ? "said more than 16 MiB"
                         : fmt::format("took longer than {} ms and was killed", limit.count());
  } else if (WIFSIGNALED(status)) {
    result.failure = fmt::format("ended by signal {}", WTERMSIG(status));
  } else if (WEXITSTATUS(status) != 0) {
    result.failure =
        WEXITSTATUS(status) == 127 ? "there is no such program" : fmt::format("status {}", WEXITSTATUS(status));
  }
  result.ok = result.failure.empty();
  return result;
}

void write_all(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t count = ::write(fd, text.data(), text.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return;
    text.remove_prefix(static_cast<size_t>(count));
  }
}

}  // namespace

ChildResult run_child(const std::function<std::string()>& work, std::chrono::milliseconds limit) {
  return run(
      [&](int out) {
        write_all(out, work());
        ::_exit(0);
      },
      limit);
}

ChildResult run_program(const std::vector<std::string>& arguments, std::chrono::milliseconds limit) {
  std::vector<char*> argv;
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  return run(
      [&](int out) {
        const int null = ::open("/dev/null", O_RDWR);
        ::dup2(null, 0);
        ::dup2(out, 1);
        ::dup2(null, 2);
        ::execvp(argv[0], argv.data());
        ::_exit(127);
      },
      limit);
}

Json child_facts(const std::function<Json()>& work, std::chrono::milliseconds limit) {
  const ChildResult result = run_child(
      [&]() -> std::string {
        Json facts;
        try {
          facts = work();
        } catch (const std::exception& error) {
          facts = {{"failure", error.what()}};
        }
        return facts.dump(-1, ' ', false, Json::error_handler_t::replace);
      },
      limit);
  if (!result.ok) return {{"failure", result.failure}};
  return parse_json(result.output, "the probe's result");
}

}  // namespace fourfold::doctor
