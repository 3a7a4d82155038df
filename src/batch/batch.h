// A file of requests, answered by the server's handlers at the pace of the engine.
//
// Memory holds the requests under way and some bytes for each line that is done.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "serve/service.h"

namespace fourfold::batch {

struct BatchOptions {
  std::string input, output;
  serve::ServiceOptions service;
};

struct BatchResult {
  int64_t lines = 0;
  int64_t answered = 0;                          // now
  int64_t before = 0;                            // by earlier runs
  int64_t failures = 0;                          // of all of them
  int64_t prompt_tokens = 0, output_tokens = 0;  // now
  double seconds = 0;                            // from the first request to the last answer
};

// Answers what has no answer yet. `progress` is called with how many lines have one. Interrupted after a Ctrl-C: what
// is written is whole, and another run goes on behind it.
BatchResult run_batch(const BatchOptions& options, const std::function<void(int64_t done, int64_t lines)>& progress);

}  // namespace fourfold::batch
