// Requests sent to a server, so many at a time or at random times, and what came back when.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "bench/answer_reader.h"
#include "bench/url.h"

namespace fourfold::bench {

struct Load {
  Url url;
  std::string path, api_key;
  std::vector<std::string> bodies;  // each a request of its own
  int64_t concurrency = 1;          // requests at a time, where `rate` is 0
  double rate = 0;                  // requests a second, at times of a Poisson process drawn from `seed`
  uint64_t seed = 1;
  std::chrono::seconds silence{600};
};

struct LoadResult {
  std::vector<RequestRecord> requests;
  double seconds = 0;  // from the first request to the last end
  int64_t peak = 0;    // requests that ran at once, at most
};

// Sends all of it; `progress` is called with the number of requests that have ended. Interrupted after a Ctrl-C.
LoadResult run_load(const Load& load, const std::function<void(int64_t)>& progress = {});

// Seconds at which the requests of a Poisson process come, the first at 0.
std::vector<double> poisson_times(int64_t count, double rate, uint64_t seed);

}  // namespace fourfold::bench
