// What a server says of itself, and what this machine says of it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "bench/url.h"

namespace fourfold::bench {

// The first model of /v1/models: an Error where there is none.
std::string first_model(const Url& url, const std::string& api_key);

// Drafts since the server began, from /metrics under vLLM's names; nothing where it tells none.
struct DraftCounters {
  double rounds = 0, drafted = 0, accepted = 0;
  std::vector<double> by_position;  // accepted

  static std::optional<DraftCounters> parse(std::string_view metrics);
};
std::optional<DraftCounters> draft_counters(const Url& url, const std::string& api_key);

// Bytes of memory that the process behind a port of this machine holds, and held at most.
struct ServerMemory {
  int64_t resident = 0, peak = 0;
};
// Nothing for other machines, and for processes that may not be looked at.
std::optional<ServerMemory> server_memory(const Url& url);

}  // namespace fourfold::bench
