#include "chat/stop_strings.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace fourfold::chat {

void check_stop_strings(const std::vector<std::string>& stops, std::string_view name) {
  if (stops.size() > kMaxStopStrings)
    fail("{} has {} strings, at most {} are wanted", name, stops.size(), kMaxStopStrings);
  for (const std::string& stop : stops) {
    if (stop.empty()) fail("{} has an empty string", name);
    if (stop.size() > kMaxStopBytes)
      fail("{} has a string of {} bytes, at most {} are wanted", name, stop.size(), kMaxStopBytes);
  }
}

StopFilter::StopFilter(std::vector<std::string> stops) : stops_(std::move(stops)) {
  for (const std::string& stop : stops_) longest_ = std::max(longest_, stop.size());
}

std::string StopFilter::push(std::string_view text) {
  if (found_) return "";
  if (stops_.empty()) return std::string(text);
  held_ += text;
  // Which one ends first does not depend on how much more text there is already.
  size_t begin = 0, end = std::string::npos;
  for (const std::string& stop : stops_) {
    const size_t at = held_.find(stop);
    if (at == std::string::npos) continue;
    if (at + stop.size() < end || (at + stop.size() == end && at < begin)) {
      begin = at;
      end = at + stop.size();
      found_ = stop;
    }
  }
  if (found_) {
    held_.resize(begin);
    return std::exchange(held_, {});
  }
  size_t kept = std::min(held_.size(), longest_ - 1);
  const auto may_grow = [&](std::string_view tail) {
    return std::any_of(stops_.begin(), stops_.end(), [&](const std::string& stop) { return stop.starts_with(tail); });
  };
  while (kept > 0 && !may_grow(std::string_view(held_).substr(held_.size() - kept))) --kept;
  std::string out = held_.substr(0, held_.size() - kept);
  held_.erase(0, held_.size() - kept);
  return out;
}

std::string StopFilter::flush() { return std::exchange(held_, {}); }

}  // namespace fourfold::chat
