// Figures for Prometheus: counters and histograms of requests, beside what the engine says of itself. Names are vLLM's
// where it has one, so that its dashboards and routers work.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/engine.h"
#include "serve/http_server.h"

namespace fourfold::serve {

class Histogram {
 public:
  explicit Histogram(std::span<const double> bounds) : bounds_(bounds), counts_(bounds.size() + 1) {}
  void add(double value);
  void write(std::string& out, std::string_view name, std::string_view help, std::string_view label) const;

 private:
  std::span<const double> bounds_;
  std::vector<int64_t> counts_;
  double sum_ = 0;
};

// One answer that has ended.
struct FinishedAnswer {
  std::string reason;  // stop, length, tool_calls, abort, error
  int64_t prompt_tokens = 0, output_tokens = 0, cached_tokens = 0;
  double first_token_seconds = -1;  // since the request came; below 0: there was none
  double whole_seconds = 0;
  double queue_seconds = 0, prefill_seconds = 0, decode_seconds = 0;
};

// May be called from any thread.
class Metrics {
 public:
  Metrics();
  void request(std::string_view path, int status);
  void answer(const FinishedAnswer& answer);
  void gap(double seconds);  // between two tokens of an answer
  void set_page_size(int64_t positions) { page_size_ = positions; }

  // In Prometheus' text format. `engine` is null while the model loads.
  std::string text(std::string_view model, const engine::EngineStats* engine, const HttpServerStats& http) const;

 private:
  std::atomic<int64_t> page_size_{0};
  mutable std::mutex mutex_;
  std::map<std::pair<std::string, int>, int64_t> requests_;
  std::map<std::string, int64_t> finished_;
  int64_t prompt_tokens_ = 0, output_tokens_ = 0;
  Histogram first_token_, per_token_, gap_, whole_, queue_, prefill_, decode_, prompt_, output_;
};

}  // namespace fourfold::serve
