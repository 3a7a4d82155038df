#include "serve/metrics.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>

namespace fourfold::serve {
namespace {

// vLLM's bounds, so that its dashboards show the same columns.
constexpr double kFirst[] = {0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
                             1,     2.5,   5,    7.5,  10,   20,   40,   80,  160,  640, 2560};
constexpr double kGap[] = {0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5,
                           0.75, 1,     2.5,  5,     7.5, 10,   20,  40,  80};
constexpr double kLatency[] = {0.3, 0.5, 0.8, 1,  1.5, 2,   2.5, 5,   10,   15,  20,
                               30,  40,  50,  60, 120, 240, 480, 960, 1920, 7680};
constexpr double kTokens[] = {1,    2,    5,    10,    20,    50,    100,    200,    500,
                              1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000, 500000};

std::string escaped(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (c == '\\' || c == '"') out += '\\';
    if (c == '\n') {
      out += "\\n";
      continue;
    }
    out += c;
  }
  return out;
}

int64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  int64_t size = 0, resident = 0;
  file >> size >> resident;
  return file ? resident * ::sysconf(_SC_PAGESIZE) : 0;
}

class Writer {
 public:
  explicit Writer(std::string label) : label_(std::move(label)) {}
  void head(std::string_view name, std::string_view type, std::string_view help) {
    out += fmt::format("# HELP {} {}\n# TYPE {} {}\n", name, help, name, type);
  }
  template <typename T>
  void line(std::string_view name, T value, std::string_view more = "") {
    out += fmt::format("{}{{{}{}}} {}\n", name, label_, more, value);
  }
  template <typename T>
  void gauge(std::string_view name, std::string_view help, T value) {
    head(name, "gauge", help);
    line(name, value);
  }
  template <typename T>
  void counter(std::string_view name, std::string_view help, T value) {
    head(name, "counter", help);
    line(name, value);
  }
  void by_position(std::string_view name, std::span<const int64_t> counts) {
    for (size_t i = 0; i < counts.size(); ++i) line(name, counts[i], fmt::format(",position=\"{}\"", i));
  }
  std::string out;

 private:
  std::string label_;
};

}  // namespace

void Histogram::add(double value) {
  const auto place = std::lower_bound(bounds_.begin(), bounds_.end(), value) - bounds_.begin();
  ++counts_[static_cast<size_t>(place)];
  sum_ += value;
}

void Histogram::write(std::string& out, std::string_view name, std::string_view help, std::string_view label) const {
  out += fmt::format("# HELP {} {}\n# TYPE {} histogram\n", name, help, name);
  int64_t count = 0;
  for (size_t i = 0; i < counts_.size(); ++i) {
    count += counts_[i];
    const std::string bound = i < bounds_.size() ? fmt::format("{}", bounds_[i]) : "+Inf";
    out += fmt::format("{}_bucket{{{},le=\"{}\"}} {}\n", name, label, bound, count);
  }
  out += fmt::format("{}_sum{{{}}} {}\n{}_count{{{}}} {}\n", name, label, sum_, name, label, count);
}

Metrics::Metrics()
    : first_token_(kFirst),
      per_token_(kGap),
      gap_(kGap),
      whole_(kLatency),
      queue_(kLatency),
      prefill_(kLatency),
      decode_(kLatency),
      prompt_(kTokens),
      output_(kTokens) {
  for (const char* reason : {"stop", "length", "tool_calls", "abort", "error"}) finished_[reason] = 0;
}

void Metrics::request(std::string_view path, int status) {
  const std::lock_guard lock(mutex_);
  ++requests_[{std::string(path), status}];
}

void Metrics::gap(double seconds) {
  const std::lock_guard lock(mutex_);
  gap_.add(seconds);
}

void Metrics::answer(const FinishedAnswer& answer) {
  const std::lock_guard lock(mutex_);
  ++finished_[answer.reason];
  prompt_tokens_ += answer.prompt_tokens;
  output_tokens_ += answer.output_tokens;
  whole_.add(answer.whole_seconds);
  queue_.add(answer.queue_seconds);
  prompt_.add(static_cast<double>(answer.prompt_tokens));
  if (answer.output_tokens == 0) return;
  if (answer.first_token_seconds >= 0) first_token_.add(answer.first_token_seconds);
  prefill_.add(answer.prefill_seconds);
  decode_.add(answer.decode_seconds);
  output_.add(static_cast<double>(answer.output_tokens));
  if (answer.output_tokens > 1) per_token_.add(answer.decode_seconds / static_cast<double>(answer.output_tokens - 1));
}

std::string Metrics::text(std::string_view model, const engine::EngineStats* engine,
                          const HttpServerStats& http) const {
  const std::string label = fmt::format("model_name=\"{}\"", escaped(model));
  Writer w(label);
  const std::lock_guard lock(mutex_);
  if (engine != nullptr) {
    const engine::EngineStats& e = *engine;
    const auto used = [](int64_t total, int64_t free) {
      return total == 0 ? 0.0 : static_cast<double>(total - free) / static_cast<double>(total);
    };
    w.gauge("vllm:num_requests_running", "Requests that the engine computes.", e.running);
    w.gauge("vllm:num_requests_waiting", "Requests that wait for the engine.", e.waiting);
    w.gauge("vllm:kv_cache_usage_perc", "Share of the pages of keys and values that running requests hold; 1 is all.",
            used(e.pages_total, e.pages_free));
    w.counter("vllm:num_preemptions_total", "Requests that gave their pages back and were computed again.",
              e.preemptions);
    w.counter("vllm:prefix_cache_queries_total", "Tokens of prompts that looked for a cached prefix.",
              e.prefix.prompt_tokens);
    w.counter("vllm:prefix_cache_hits_total", "Tokens of prompts that were taken from the prefix cache.",
              e.prefix.hit_tokens);
    w.head("fourfold_prefix_cache_missed_tokens_total", "counter",
           "Tokens that had been computed before and were computed again, by the reason.");
    w.line("fourfold_prefix_cache_missed_tokens_total", e.prefix.missed_no_state, ",reason=\"no_state\"");
    w.line("fourfold_prefix_cache_missed_tokens_total", e.prefix.missed_evicted, ",reason=\"evicted\"");
    w.gauge("fourfold_prefix_cache_pages", "Pages that the prefix cache holds.", e.prefix.pages);
    w.gauge("fourfold_prefix_cache_states", "Recurrent states that the prefix cache holds.", e.prefix.states);
    w.gauge("fourfold_prefix_cache_bytes", "Bytes that the prefix cache holds.", e.prefix.bytes);
    w.counter("vllm:spec_decode_num_drafts_total", "Steps of a sequence that verified drafts.", e.drafts.rounds);
    int64_t drafted = 0, accepted = 0;
    for (const int64_t count : e.drafts.drafted) drafted += count;
    for (const int64_t count : e.drafts.accepted) accepted += count;
    w.counter("vllm:spec_decode_num_draft_tokens_total", "Drafts that were verified.", drafted);
    w.counter("vllm:spec_decode_num_accepted_tokens_total", "Drafts that were accepted.", accepted);
    w.head("vllm:spec_decode_num_accepted_tokens_per_pos_total", "counter", "Accepted drafts by their position.");
    w.by_position("vllm:spec_decode_num_accepted_tokens_per_pos_total", e.drafts.accepted);
    w.head("fourfold_drafts_verified_per_position_total", "counter", "Drafts that were verified, by their position.");
    w.by_position("fourfold_drafts_verified_per_position_total", e.drafts.drafted);
    w.head("vllm:cache_config_info", "gauge", "Pages of keys and values: how many, and positions in each.");
    w.line("vllm:cache_config_info", 1,
           fmt::format(",block_size=\"{}\",num_gpu_blocks=\"{}\"", page_size_.load(), e.pages_total));
    w.gauge("fourfold_waiting_tokens", "Tokens of the prompts of waiting requests.", e.waiting_tokens);
    w.gauge("fourfold_recurrent_states", "Recurrent states that there is room for.", e.slots_total);
    w.gauge("fourfold_recurrent_states_free", "Recurrent states that no running request holds.", e.slots_free);
    w.counter("fourfold_engine_steps_total", "Steps of the engine.", e.steps);
    w.counter("fourfold_engine_step_seconds_total", "Seconds spent in steps.", e.step_seconds);
    w.gauge("fourfold_engine_heartbeat_seconds", "Since the engine came round; 0 when it has nothing to do.",
            e.idle ? 0.0 : e.heartbeat_seconds);
  }
  w.counter("vllm:prompt_tokens_total", "Tokens of the prompts of answers that have ended.", prompt_tokens_);
  w.counter("vllm:generation_tokens_total", "Tokens of answers that have ended.", output_tokens_);
  w.head("vllm:request_success_total", "counter", "Answers that have ended, by the reason.");
  for (const auto& [reason, count] : finished_) {
    w.line("vllm:request_success_total", count, fmt::format(",finished_reason=\"{}\"", reason));
  }
  first_token_.write(w.out, "vllm:time_to_first_token_seconds", "From the request to the first token.", label);
  gap_.write(w.out, "vllm:inter_token_latency_seconds", "Between two tokens of an answer.", label);
  per_token_.write(w.out, "vllm:request_time_per_output_token_seconds", "Mean time of a token, of each answer.", label);
  whole_.write(w.out, "vllm:e2e_request_latency_seconds", "From the request to the end of the answer.", label);
  queue_.write(w.out, "vllm:request_queue_time_seconds", "Waiting for the first step.", label);
  prefill_.write(w.out, "vllm:request_prefill_time_seconds", "From the first step to the first token.", label);
  decode_.write(w.out, "vllm:request_decode_time_seconds", "From the first token to the last.", label);
  prompt_.write(w.out, "vllm:request_prompt_tokens", "Tokens of a prompt.", label);
  output_.write(w.out, "vllm:request_generation_tokens", "Tokens of an answer.", label);
  w.head("fourfold_http_requests_total", "counter", "Requests by path and status; unknown paths are \"other\".");
  for (const auto& [key, count] : requests_) {
    w.line("fourfold_http_requests_total", count,
           fmt::format(",path=\"{}\",status=\"{}\"", escaped(key.first), key.second));
  }
  w.counter("fourfold_http_refused_total", "Requests that were not HTTP as it is taken.", http.refused);
  w.gauge("fourfold_http_connections", "Open connections.", http.connections);
  w.counter("fourfold_http_accepted_total", "Connections that were opened.", http.accepted);
  w.gauge("process_resident_memory_bytes", "Resident memory of the process in bytes.", resident_bytes());
  return w.out;
}

}  // namespace fourfold::serve
