#include "bench/load.h"

#include <fmt/format.h>

#include <algorithm>
#include <boost/asio/io_context.hpp>
#include <boost/asio/steady_timer.hpp>
#include <cmath>
#include <utility>

#include "base/check.h"
#include "base/interrupt.h"
#include "base/random.h"
#include "bench/client.h"

namespace fourfold::bench {
namespace {

namespace asio = boost::asio;
using Clock = std::chrono::steady_clock;
constexpr size_t kKeptOfRefusal = 2000;  // bytes of a body that is no stream

class Runner {
 public:
  Runner(const Load& load, const std::function<void(int64_t)>& progress)
      : load_(load), progress_(progress), timer_(io_), poll_(io_) {
    result_.requests.resize(load.bodies.size());
    if (load.rate > 0) times_ = poisson_times(static_cast<int64_t>(load.bodies.size()), load.rate, load.seed);
  }

  LoadResult run() {
    begin_ = Clock::now();
    watch_for_interrupt();
    send_due();
    io_.run();
    throw_if_interrupted();
    for (const RequestRecord& request : result_.requests) result_.seconds = std::max(result_.seconds, request.end);
    return std::move(result_);
  }

 private:
  double now() const { return std::chrono::duration<double>(Clock::now() - begin_).count(); }

  void watch_for_interrupt() {
    poll_.expires_after(std::chrono::milliseconds(50));
    poll_.async_wait([this](const boost::system::error_code& error) {
      if (error) return;
      if (interrupted()) return io_.stop();
      watch_for_interrupt();
    });
  }

  void send_due() {
    while (sent_ < load_.bodies.size()) {
      if (load_.rate > 0 ? times_[sent_] > now() : running_ >= load_.concurrency) break;
      send(sent_++);
    }
    if (load_.rate > 0 && sent_ < load_.bodies.size()) {
      timer_.expires_at(begin_ +
                        std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(times_[sent_])));
      timer_.async_wait([this](const boost::system::error_code& error) {
        if (!error) send_due();
      });
    }
  }

  // One request under way: what it has delivered, and the text of a refusal.
  struct Running {
    explicit Running(RequestRecord& record) : reader(record) {}
    AnswerReader reader;
    std::string beginning;
  };

  void send(size_t index) {
    RequestRecord& record = result_.requests[index];
    const auto running = std::make_shared<Running>(record);
    HttpCall call{load_.url, "POST", load_.path, load_.bodies[index], load_.api_key, load_.silence};
    const auto transfer =
        HttpTransfer::make(io_, std::move(call),
                           {[this, running](std::string_view piece) {
                              running->reader.feed(piece, now());
                              if (running->beginning.size() < kKeptOfRefusal) running->beginning += piece;
                            },
                            [this, index, running](const ResponseReader& response, const std::string& error) {
                              ended(result_.requests[index], *running, response, error);
                            }});
    ++running_;
    result_.peak = std::max(result_.peak, running_);
    record.start = now();
    transfer->start();
  }

  void ended(RequestRecord& record, Running& running, const ResponseReader& response, const std::string& error) {
    record.end = now();
    if (!error.empty()) {
      record.error = error;
    } else if (response.status() != 200) {
      record.error = fmt::format("status {}: {}", response.status(), printable(running.beginning, 200));
    } else {
      running.reader.finish();
    }
    --running_;
    ++ended_;
    if (progress_) progress_(ended_);
    if (load_.rate == 0) send_due();
    if (ended_ == static_cast<int64_t>(load_.bodies.size())) poll_.cancel();
  }

  const Load& load_;
  const std::function<void(int64_t)>& progress_;
  asio::io_context io_;
  asio::steady_timer timer_, poll_;
  Clock::time_point begin_;
  std::vector<double> times_;
  LoadResult result_;
  size_t sent_ = 0;
  int64_t running_ = 0, ended_ = 0;
};

}  // namespace

std::vector<double> poisson_times(int64_t count, double rate, uint64_t seed) {
  Random random(seed);
  std::vector<double> times;
  double time = 0;
  for (int64_t i = 0; i < count; ++i) {
    times.push_back(time);
    time -= std::log(1 - random.uniform()) / rate;
  }
  return times;
}

LoadResult run_load(const Load& load, const std::function<void(int64_t)>& progress) {
  FF_ASSERT(!load.bodies.empty());
  return Runner(load, progress).run();
}

}  // namespace fourfold::bench
