#include "serve/server.h"

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <exception>
#include <thread>

#include "base/console.h"
#include "base/interrupt.h"

namespace fourfold::serve {
namespace {

// Blocked in this thread and all that it starts, so that wait() can take them.
class Signals {
 public:
  Signals() {
    ::sigemptyset(&set_);
    ::sigaddset(&set_, SIGTERM);
    ::sigaddset(&set_, SIGINT);
    ::pthread_sigmask(SIG_BLOCK, &set_, &before_);
  }
  ~Signals() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;

  // Whether one came within the time.
  bool wait(std::chrono::milliseconds time) const {
    const timespec limit{time.count() / 1000, (time.count() % 1000) * 1'000'000};
    return ::sigtimedwait(&set_, nullptr, &limit) > 0;
  }

 private:
  sigset_t set_{}, before_{};
};

// Loads beside the network's threads.
class Loader {
 public:
  explicit Loader(Service& service) : service_(service), thread_([this] { run(); }) {}
  ~Loader() {
    service_.stop_loading();
    thread_.join();
  }
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  bool done() const { return done_; }
  void rethrow() const {
    if (done_ && error_) std::rethrow_exception(error_);
  }

 private:
  void run() {
    try {
      service_.load();
    } catch (...) {
      error_ = std::current_exception();
    }
    done_ = true;
  }

  Service& service_;
  std::exception_ptr error_;
  std::atomic<bool> done_{false};
  std::thread thread_;
};

// However it ends: first the connections, then the work for them, then the engine; and the network's own memory last.
class Ending {
 public:
  Ending(Service& service, HttpServer& http) : service_(service), http_(http) {}
  ~Ending() {
    http_.close();
    service_.stop();
  }
  Ending(const Ending&) = delete;
  Ending& operator=(const Ending&) = delete;

 private:
  Service& service_;
  HttpServer& http_;
};

constexpr auto kFarewell = std::chrono::seconds(5);

// What is written is still sent.
void finish(HttpServer& http) {
  http.finish_connections();
  for (int i = 0; i < 100 && http.stats().connections > 0; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

}  // namespace

void serve(const ServerOptions& options, const std::function<void(uint16_t port)>& opened) {
  using std::chrono::milliseconds;
  const Signals signals;
  Service service(options.service);
  HttpServer http(
      options.http, [&](std::shared_ptr<Exchange> exchange) { service.handle(exchange); },
      [](const HttpFailure& failure) { return ApiError(failure.status, failure.reason).response(ErrorForm::kOpenAi); });
  const Ending ending(service, http);
  service.set_network(&http);
  opened(http.port());
  {
    Loader loader(service);
    bool announced = false;
    while (!signals.wait(milliseconds(100))) {
      if (loader.done()) loader.rethrow();
      if (loader.done() && !announced) {
        announced = true;
        const ServedModel& model = service.require_model();
        eprint("fourfold: {} is ready: {}, {} tokens of context, {} requests at once\n", model.name(), model.backend,
               model.context, model.max_sequences);
        if (options.ready) options.ready();
      }
      if (const std::string fault = service.fault(); !fault.empty()) {
        // A thread that is stuck cannot be ended, so that the process cannot either but like this.
        eprint("fourfold: error: {}\n", fault);
        service.drain();
        const auto end = Clock::now() + kFarewell;  // for the requests to be told
        while (service.in_flight() > 0 && Clock::now() < end) std::this_thread::sleep_for(milliseconds(20));
        finish(http);
        ::_exit(kStuckStatus);
      }
    }
    service.drain();
    service.stop_loading();
    if (service.in_flight() > 0) {
      eprint("fourfold: {} requests are being answered, the server ends behind them\n", service.in_flight());
    }
    const auto end = Clock::now() + options.drain;
    while (service.in_flight() > 0 && Clock::now() < end && !signals.wait(milliseconds(20))) {
    }
  }
  finish(http);
}

}  // namespace fourfold::serve
