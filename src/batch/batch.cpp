#include "batch/batch.h"

#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <span>
#include <stop_token>
#include <thread>
#include <unordered_set>
#include <utility>

#include "base/check.h"
#include "base/checksum.h"
#include "base/interrupt.h"
#include "batch/exchange.h"
#include "batch/output_file.h"
#include "batch/request_file.h"

namespace fourfold::batch {
namespace {

using Clock = std::chrono::steady_clock;

struct Answer {
  int64_t line = 0;
  std::string custom_id;
  serve::HttpResponse response;
};

// Answers on their way from the work line's thread to the one that writes.
class Inbox {
 public:
  void add(Answer answer) {
    {
      const std::lock_guard lock(mutex_);
      answers_.push_back(std::move(answer));
    }
    filled_.notify_one();
  }
  std::deque<Answer> take() {
    std::unique_lock lock(mutex_);
    filled_.wait_for(lock, std::chrono::milliseconds(100), [&] { return !answers_.empty(); });
    return std::exchange(answers_, {});
  }

 private:
  std::mutex mutex_;
  std::condition_variable filled_;
  std::deque<Answer> answers_;
};

std::string request_id(const serve::HttpResponse& response) {
  for (const auto& [name, value] : response.headers) {
    if (name == "x-request-id") return value;
  }
  return "";
}

// The usage of an answer, in the names of either API.
void count_tokens(const std::string& body, BatchResult& result) {
  const Json json = Json::parse(body, nullptr, false);
  const auto usage = json.is_object() ? json.find("usage") : json.end();
  if (!json.is_object() || usage == json.end() || !usage->is_object()) return;
  for (const auto& [name, value] : usage->items()) {
    if (!value.is_number_integer()) continue;
    if (name == "prompt_tokens" || name == "input_tokens") result.prompt_tokens += value.get<int64_t>();
    if (name == "completion_tokens" || name == "output_tokens") result.output_tokens += value.get<int64_t>();
  }
}

class Batch {
 public:
  Batch(const BatchOptions& options, const std::function<void(int64_t, int64_t)>& progress)
      : progress_(progress),
        input_(options.input),
        output_(options.output),
        service_(options.service),
        // As many as run, and as many that are ready when one of them ends: all of them are counted in by the service.
        window_(2 * options.service.engine.max_sequences) {}
  // First the work of the exchanges, then the engine; and what is left of them before the service itself.
  ~Batch() {
    line_.stop();
    service_.stop();
  }
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;

  BatchResult run() {
    result_.lines = input_.lines();
    result_.before = output_.answers();
    // Before the model is loaded: files that do not belong together, and a batch that is done.
    if (result_.before >= result_.lines) check_rest();
    if (result_.before < result_.lines) answer_all();
    output_.sync();
    result_.failures = output_.failures();
    return result_;
  }

 private:
  // All lines have answers; whether they are these lines'.
  void check_rest() {
    while (const auto line = input_.next()) {
      std::optional<std::string> custom_id;
      try {
        parse_request(line->text, custom_id);
      } catch (const Error&) {
      }
      if (!output_.has(line->number, custom_id))
        fail("line {} has no answer, but there are as many as lines", line->number);
    }
  }

  void answer_all() {
    tell();
    {
      const std::jthread watch([this](const std::stop_token& loaded) {
        while (!loaded.stop_requested()) {
          if (interrupted()) service_.stop_loading();
          std::this_thread::sleep_for(std::chrono::milliseconds(20));
        }
      });
      service_.load();
    }
    const auto begin = Clock::now();
    bool more = true;
    while (more || running_ > 0) {
      throw_if_interrupted();
      while (more && running_ < window_) more = submit();
      for (Answer& answer : inbox_.take()) {
        --running_;
        write(answer);
        tell();
      }
    }
    result_.seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  }

  void tell() const {
    if (progress_) progress_(output_.answers(), result_.lines);
  }

  // Takes the next line; false at the end.
  bool submit() {
    std::optional<RequestFile::Line> line = input_.next();
    if (!line) return false;
    std::optional<std::string> custom_id;
    BatchRequest request;
    std::string wrong;
    try {
      if (line->too_long) fail("it has more than {} bytes", kMaxLine);
      request = parse_request(line->text, custom_id);
      if (!ids_.insert(checksum(std::as_bytes(std::span(request.custom_id)))).second) {
        fail("`custom_id` {} was another line's before", printable(request.custom_id, 100));
      }
    } catch (const Error& error) {
      wrong = error.what();
    }
    if (output_.has(line->number, custom_id)) return true;
    if (!wrong.empty()) {
      output_.add_error(line->number, custom_id, wrong);
      ++result_.answered;
      tell();
      return true;
    }
    serve::HttpRequest http;
    http.method = "POST";
    http.path = request.url;
    http.headers = {{"content-type", "application/json"}};
    http.body = std::move(request.body);
    ++running_;
    service_.handle(std::make_shared<MemoryExchange>(
        line_, std::move(http),
        [this, number = line->number, id = std::move(request.custom_id)](serve::HttpResponse response) {
          inbox_.add({number, id, std::move(response)});
        }));
    return true;
  }

  void write(const Answer& answer) {
    // Nobody else asks, so that this is no answer but the end of the engine: another run tries again.
    if (answer.response.status == 503) {
      fail("line {}: the engine takes no requests: {}", answer.line, printable(answer.response.body, 300));
    }
    const std::string& body = answer.response.body;
    output_.add_response(answer.line, answer.custom_id, answer.response.status, request_id(answer.response),
                         body.empty() ? "null" : body);
    if (answer.response.status == 200) count_tokens(body, result_);
    ++result_.answered;
  }

  const std::function<void(int64_t, int64_t)>& progress_;
  RequestFile input_;
  OutputFile output_;
  Inbox inbox_;
  serve::Service service_;
  WorkLine line_;
  const int64_t window_;
  int64_t running_ = 0;
  std::unordered_set<uint64_t> ids_;  // checksums of every custom_id so far
  BatchResult result_;
};

}  // namespace

BatchResult run_batch(const BatchOptions& options, const std::function<void(int64_t done, int64_t lines)>& progress) {
  return Batch(options, progress).run();
}

}  // namespace fourfold::batch
