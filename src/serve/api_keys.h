// Who may ask, how much at once and how often, and who comes first.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace fourfold::serve {

// What a key may do. 0: without limit.
struct KeyLimits {
  int64_t running = 0;     // requests that generate, waiting ones included
  int64_t per_minute = 0;  // requests that generate; as many may come at once
  int32_t priority = 0;    // lower values first, whatever the priorities of requests are
};

// The priority of the engine: that of the key, and among requests of equal keys that of the request.
inline constexpr int32_t kMaxKeyPriority = 1000, kMaxRequestPriority = 1'000'000;
int32_t engine_priority(int32_t of_key, int64_t of_request);

// One key and what is going on under it. May be used from many threads.
class ApiKey {
 public:
  using Time = std::chrono::steady_clock::time_point;

  ApiKey(std::string key, std::string name, const KeyLimits& limits);

  const std::string& name() const { return name_; }  // for the log; never the key
  const KeyLimits& limits() const { return limits_; }
  bool is(std::string_view given) const;  // in a time that tells nothing of the key

  // Counts a request in until the result is dropped: an ApiError 429 that says when to ask again.
  static std::shared_ptr<void> admit(const std::shared_ptr<ApiKey>& key, Time now);

 private:
  const std::string key_, name_;
  const KeyLimits limits_;
  std::mutex mutex_;
  int64_t running_ = 0;
  double tokens_;  // requests that may come now
  Time refilled_{};
};

class ApiKeys {
 public:
  // `where` is what an Error calls the place that the key comes from.
  void add(std::string key, std::string name, const KeyLimits& limits, const std::string& where);
  // A key in each line, and behind it as wanted: name=NAME max-requests=N requests-per-minute=N priority=N. What stands
  // behind a # is a comment. An Error names the line.
  void read(const std::filesystem::path& path);

  bool empty() const { return keys_.empty(); }
  std::shared_ptr<ApiKey> find(std::string_view given) const;  // null: nobody's

 private:
  std::vector<std::shared_ptr<ApiKey>> keys_;
};

}  // namespace fourfold::serve
