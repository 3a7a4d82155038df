// Requests to the server's handlers that come from no network: the same bodies, the same answers.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include "serve/http_server.h"

namespace fourfold::batch {

// One thread that does the work of all exchanges in the order in which it was posted, so that the work of each is done
// one at a time, as their handlers expect.
class WorkLine {
 public:
  using Clock = std::chrono::steady_clock;

  WorkLine() : thread_([this] { run(); }) {}
  ~WorkLine() { stop(); }
  WorkLine(const WorkLine&) = delete;
  WorkLine& operator=(const WorkLine&) = delete;

  // Ends what is being done; the rest stays undone until the line goes.
  void stop();
  void post(std::function<void()> work);
  void post_at(Clock::time_point time, std::function<void()> work);

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> queue_;
  std::multimap<Clock::time_point, std::function<void()>> later_;
  bool stopping_ = false;
  std::thread thread_;
};

// A request whose client waits for the whole answer, however it is given, and never goes away.
class MemoryExchange final : public serve::Exchange, public std::enable_shared_from_this<MemoryExchange> {
 public:
  // `done` is called once, on the line's thread or by whoever drops the exchange last: with 500 where it was dropped
  // without an answer.
  MemoryExchange(WorkLine& line, serve::HttpRequest request, std::function<void(serve::HttpResponse)> done)
      : line_(line), request_(std::move(request)), done_(std::move(done)) {}
  ~MemoryExchange() override;

  const serve::HttpRequest& request() const override { return request_; }
  void post(std::function<void()> work) override;
  void dispatch(std::function<void()> work) override { work(); }  // one line for all
  void respond(serve::HttpResponse response) override;
  void begin(int status, serve::Headers headers) override;
  void write(std::string_view piece) override { response_.body += piece; }
  void end() override { respond(std::move(response_)); }
  void abort() override;
  // Nobody goes; but what is given here may be all that holds who answers.
  void on_gone(std::function<void()> call) override { gone_ = std::move(call); }
  bool gone() const override { return false; }
  bool crowded() const override { return false; }
  void on_drained(std::function<void()>) override {}
  void after(std::chrono::milliseconds time, std::function<void()> call) override;

 private:
  WorkLine& line_;
  const serve::HttpRequest request_;
  std::function<void(serve::HttpResponse)> done_;
  std::function<void()> gone_;
  serve::HttpResponse response_;
  int64_t timer_ = 0;  // the last call of after() counts
};

}  // namespace fourfold::batch
