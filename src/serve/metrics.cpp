#include "serve/metrics.h"

#include <prometheus/text_serializer.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <initializer_list>
#include <iterator>
#include <span>
#include <vector>

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

int64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  int64_t size = 0, resident = 0;
  file >> size >> resident;
  return file ? resident * ::sysconf(_SC_PAGESIZE) : 0;
}

// Families of the figures that are asked for when they are wanted: what the engine and the network count themselves.
class Families {
 public:
  using Labels = std::initializer_list<prometheus::ClientMetric::Label>;
  void head(std::string name, prometheus::MetricType type, std::string help) {
    all.push_back({.name = std::move(name), .help = std::move(help), .type = type, .metric = {}});
  }
  template <typename T>
  void value(T value, Labels labels = {}) {
    prometheus::ClientMetric metric;
    metric.label = labels;
    // The serialiser takes the one of the family's type.
    metric.gauge.value = metric.counter.value = static_cast<double>(value);
    all.back().metric.push_back(std::move(metric));
  }
  template <typename T>
  void gauge(std::string name, std::string help, T value) {
    head(std::move(name), prometheus::MetricType::Gauge, std::move(help));
    this->value(value);
  }
  template <typename T>
  void counter(std::string name, std::string help, T value) {
    head(std::move(name), prometheus::MetricType::Counter, std::move(help));
    this->value(value);
  }
  void by_position(std::string name, std::string help, std::span<const int64_t> counts) {
    head(std::move(name), prometheus::MetricType::Counter, std::move(help));
    for (size_t i = 0; i < counts.size(); ++i) value(counts[i], {{"position", std::to_string(i)}});
  }
  std::vector<prometheus::MetricFamily> all;
};

prometheus::Family<prometheus::Counter>& counters(prometheus::Registry& registry, const char* name, const char* help) {
  return prometheus::BuildCounter().Name(name).Help(help).Register(registry);
}

prometheus::Histogram& histogram(prometheus::Registry& registry, std::span<const double> bounds, const char* name,
                                 const char* help) {
  return prometheus::BuildHistogram().Name(name).Help(help).Register(registry).Add(
      {}, std::vector(bounds.begin(), bounds.end()));
}

}  // namespace

Metrics::Metrics()
    : requests_(counters(registry_, "fourfold_http_requests_total",
                         "Requests by path and status; unknown paths are \"other\".")),
      finished_(counters(registry_, "vllm:request_success_total", "Answers that have ended, by the reason.")),
      prompt_tokens_(
          counters(registry_, "vllm:prompt_tokens_total", "Tokens of the prompts of answers that have ended.").Add({})),
      output_tokens_(counters(registry_, "vllm:generation_tokens_total", "Tokens of answers that have ended.").Add({})),
      first_token_(
          histogram(registry_, kFirst, "vllm:time_to_first_token_seconds", "From the request to the first token.")),
      gap_(histogram(registry_, kGap, "vllm:inter_token_latency_seconds", "Between two tokens of an answer.")),
      per_token_(histogram(registry_, kGap, "vllm:request_time_per_output_token_seconds",
                           "Mean time of a token, of each answer.")),
      whole_(histogram(registry_, kLatency, "vllm:e2e_request_latency_seconds",
                       "From the request to the end of the answer.")),
      queue_(histogram(registry_, kLatency, "vllm:request_queue_time_seconds", "Waiting for the first step.")),
      prefill_(histogram(registry_, kLatency, "vllm:request_prefill_time_seconds",
                         "From the first step to the first token.")),
      decode_(histogram(registry_, kLatency, "vllm:request_decode_time_seconds", "From the first token to the last.")),
      prompt_(histogram(registry_, kTokens, "vllm:request_prompt_tokens", "Tokens of a prompt.")),
      output_(histogram(registry_, kTokens, "vllm:request_generation_tokens", "Tokens of an answer.")) {
  for (const char* reason : {"stop", "length", "tool_calls", "abort", "error"})
    finished_.Add({{"finished_reason", reason}});
}

void Metrics::request(std::string_view path, int status) {
  requests_.Add({{"path", std::string(path)}, {"status", std::to_string(status)}}).Increment();
}

void Metrics::answer(const FinishedAnswer& answer) {
  finished_.Add({{"finished_reason", answer.reason}}).Increment();
  prompt_tokens_.Increment(static_cast<double>(answer.prompt_tokens));
  output_tokens_.Increment(static_cast<double>(answer.output_tokens));
  whole_.Observe(answer.whole_seconds);
  queue_.Observe(answer.queue_seconds);
  prompt_.Observe(static_cast<double>(answer.prompt_tokens));
  if (answer.output_tokens == 0) return;
  if (answer.first_token_seconds >= 0) first_token_.Observe(answer.first_token_seconds);
  prefill_.Observe(answer.prefill_seconds);
  decode_.Observe(answer.decode_seconds);
  output_.Observe(static_cast<double>(answer.output_tokens));
  if (answer.output_tokens > 1)
    per_token_.Observe(answer.decode_seconds / static_cast<double>(answer.output_tokens - 1));
}

std::string Metrics::text(std::string_view model, const engine::EngineStats* engine, const HttpServerStats& http,
                          int64_t kernels_disabled) const {
  using prometheus::MetricType;
  Families w;
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
    w.head("fourfold_prefix_cache_missed_tokens_total", MetricType::Counter,
           "Tokens that had been computed before and were computed again, by the reason.");
    w.value(e.prefix.missed_no_state, {{"reason", "no_state"}});
    w.value(e.prefix.missed_evicted, {{"reason", "evicted"}});
    w.gauge("fourfold_prefix_cache_pages", "Pages that the prefix cache holds.", e.prefix.pages);
    w.gauge("fourfold_prefix_cache_states", "Recurrent states that the prefix cache holds.", e.prefix.states);
    w.gauge("fourfold_prefix_cache_bytes", "Bytes that the prefix cache holds.", e.prefix.bytes);
    w.counter("vllm:spec_decode_num_drafts_total", "Steps of a sequence that verified drafts.", e.drafts.rounds);
    int64_t drafted = 0, accepted = 0;
    for (const int64_t count : e.drafts.drafted) drafted += count;
    for (const int64_t count : e.drafts.accepted) accepted += count;
    w.counter("vllm:spec_decode_num_draft_tokens_total", "Drafts that were verified.", drafted);
    w.counter("vllm:spec_decode_num_accepted_tokens_total", "Drafts that were accepted.", accepted);
    w.by_position("vllm:spec_decode_num_accepted_tokens_per_pos_total", "Accepted drafts by their position.",
                  e.drafts.accepted);
    w.by_position("fourfold_drafts_verified_per_position_total", "Drafts that were verified, by their position.",
                  e.drafts.drafted);
    w.head("vllm:cache_config_info", MetricType::Gauge, "Pages of keys and values: how many, and positions in each.");
    w.value(1, {{"block_size", std::to_string(page_size_)}, {"num_gpu_blocks", std::to_string(e.pages_total)}});
    w.gauge("fourfold_waiting_tokens", "Tokens of the prompts of waiting requests.", e.waiting_tokens);
    w.gauge("fourfold_recurrent_states", "Recurrent states that there is room for.", e.slots_total);
    w.gauge("fourfold_recurrent_states_free", "Recurrent states that no running request holds.", e.slots_free);
    w.counter("fourfold_engine_steps_total", "Steps of the engine.", e.steps);
    w.counter("fourfold_engine_step_seconds_total", "Seconds spent in steps.", e.step_seconds);
    w.gauge("fourfold_engine_heartbeat_seconds", "Since the engine came round; 0 when it has nothing to do.",
            e.idle ? 0.0 : e.heartbeat_seconds);
  }
  w.counter("fourfold_http_refused_total", "Requests that were not HTTP as it is taken.", http.refused);
  w.gauge("fourfold_http_connections", "Open connections.", http.connections);
  w.counter("fourfold_http_accepted_total", "Connections that were opened.", http.accepted);
  w.gauge("fourfold_kernels_disabled", "GPU kernels that failed their self-test, or that the compiler spoilt.",
          kernels_disabled);
  w.gauge("process_resident_memory_bytes", "Resident memory of the process in bytes.", resident_bytes());
  std::vector<prometheus::MetricFamily> families = registry_.Collect();
  std::move(w.all.begin(), w.all.end(), std::back_inserter(families));
  // The name is known only when the model is loaded.
  for (prometheus::MetricFamily& family : families) {
    for (prometheus::ClientMetric& metric : family.metric) {
      metric.label.insert(metric.label.begin(), {"model_name", std::string(model)});
    }
  }
  return prometheus::TextSerializer().Serialize(families);
}

}  // namespace fourfold::serve
