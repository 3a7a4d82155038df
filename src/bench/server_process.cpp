#include "bench/server_process.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <thread>

#include "base/check.h"
#include "base/interrupt.h"
#include "bench/client.h"

namespace fourfold::bench {
namespace {

constexpr auto kPoll = std::chrono::milliseconds(20);

bool ready(const Url& url) {
  try {
    return fetch({url, "GET", "/ready", "", "", std::chrono::seconds(20)}).status == 200;
  } catch (const Error&) {
    return false;
  }
}

}  // namespace

ServerProcess::ServerProcess(const std::string& program, const std::vector<std::string>& arguments) {
  // What it says goes to memory: nobody must read it so that it can go on.
  log_ = ::memfd_create("server", MFD_CLOEXEC);
  if (log_ < 0) fail("cannot make a file in memory");
  std::vector<std::string> words = {program, "serve"};
  words.insert(words.end(), arguments.begin(), arguments.end());
  for (const char* word : {"--host", "127.0.0.1", "--port", "0", "--disable-log-requests"}) words.emplace_back(word);
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  const pid_t parent = ::getpid();
  pid_ = ::fork();
  if (pid_ < 0) fail("cannot start a process");
  if (pid_ == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (::getppid() != parent) ::_exit(1);
    ::setpgid(0, 0);  // a Ctrl-C is the benchmark's
    ::dup2(log_, STDERR_FILENO);
    ::execv(program.c_str(), argv.data());
    ::_exit(127);
  }
  try {
    for (;;) {
      throw_if_interrupted();
      const std::string text = said();
      if (url_.host.empty()) {
        constexpr std::string_view kPort = "listening on ";
        const size_t at = text.find(kPort), end = text.find(',', at);
        if (at != std::string::npos && end != std::string::npos) {
          url_ = Url::parse(text.substr(at + kPort.size(), end - at - kPort.size()));
        }
      } else if (ready(url_)) {
        return;
      }
      int status = 0;
      if (::waitpid(pid_, &status, WNOHANG) == pid_) {
        pid_ = -1;
        fail("the server has ended: {}", printable(said(), 500));
      }
      std::this_thread::sleep_for(kPoll);
    }
  } catch (...) {
    stop();
    throw;
  }
}

ServerProcess::~ServerProcess() { stop(); }

void ServerProcess::stop() {
  if (pid_ > 0) {
    ::kill(pid_, SIGTERM);
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (::waitpid(pid_, nullptr, WNOHANG) == 0) {
      if (std::chrono::steady_clock::now() > end) ::kill(pid_, SIGKILL);
      std::this_thread::sleep_for(kPoll);
    }
    pid_ = -1;
  }
  if (log_ >= 0) ::close(log_);
  log_ = -1;
}

std::string ServerProcess::said() const {
  std::string text(64 << 10, '\0');
  const ssize_t count = ::pread(log_, text.data(), text.size(), 0);
  text.resize(count > 0 ? static_cast<size_t>(count) : 0);
  return text;
}

}  // namespace fourfold::bench
