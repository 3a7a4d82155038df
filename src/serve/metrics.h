// Figures for Prometheus: counters and histograms of requests, beside what the engine says of itself. Names are vLLM's
// where it has one, so that its dashboards and routers work.
#pragma once

#include <prometheus/counter.h>
#include <prometheus/family.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>

#include "engine/engine.h"
#include "serve/http_server.h"

namespace fourfold::serve {

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
  void gap(double seconds) { gap_.Observe(seconds); }  // between two tokens of an answer
  void set_page_size(int64_t positions) { page_size_ = positions; }

  // In Prometheus' text format. `engine` is null while the model loads.
  std::string text(std::string_view model, const engine::EngineStats* engine, const HttpServerStats& http,
                   int64_t kernels_disabled) const;

 private:
  std::atomic<int64_t> page_size_{0};
  prometheus::Registry registry_;
  prometheus::Family<prometheus::Counter>&requests_, &finished_;
  prometheus::Counter &prompt_tokens_, &output_tokens_;
  prometheus::Histogram &first_token_, &gap_, &per_token_, &whole_, &queue_, &prefill_, &decode_, &prompt_, &output_;
};

}  // namespace fourfold::serve
