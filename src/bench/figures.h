// What requests amount to: latencies, throughput of delivered tokens, goodput.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "bench/load.h"

namespace fourfold::bench {

// Seconds.
struct Distribution {
  int64_t count = 0;
  double mean = 0, deviation = 0, p50 = 0, p90 = 0, p99 = 0;
};
// Percentiles are values that occurred: the smallest that so many percent do not exceed.
Distribution distribution(std::vector<double> values);

// Limits of a request's latencies in seconds; one that is beyond any of them is no good output.
struct Goodput {
  std::optional<double> first, per_token, whole;
  // "ttft:500", "tpot:50", "e2el:5000" in milliseconds, any of them: an Error for anything else.
  static Goodput parse(const std::vector<std::string>& limits);
  bool any() const { return first || per_token || whole; }
  bool met(const RequestRecord& request) const;
};

// Seconds for each token behind the first; nothing for an answer of one.
std::optional<double> per_token_seconds(const RequestRecord& request);

// Several repetitions of one load. Latencies are of all requests that are whole; rates are medians of the repetitions.
struct Figures {
  int64_t repetitions = 0, completed = 0, failed = 0, peak = 0;
  std::map<std::string, int64_t> errors;
  int64_t prompt_tokens = 0, output_tokens = 0, cached_tokens = 0, reasoning_tokens = 0;
  bool server_counts = true;         // false: at least one answer had no usage, and its pieces were counted
  double seconds = 0;                // of all repetitions
  std::vector<double> output_rates;  // tokens a second that were delivered, of each repetition
  double request_rate = 0, total_rate = 0, good_rate = 0;
  Distribution first, first_content, per_token, between, whole;
};

Figures figures(const std::vector<LoadResult>& repetitions, const Goodput& goodput);

double median(std::vector<double> values);

}  // namespace fourfold::bench
