#include "cuda/backend/op_timer.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "cuda/backend/sources.h"

namespace fourfold::cuda {
namespace {

constexpr int kWarmUps = 3, kReplays = 20, kRounds = 3;
constexpr int kMostStamps = 8192;

}  // namespace

bool OpTimer::takes(std::string_view name, const ops::Cost& cost) {
  if (listing_) {
    auto found = std::find_if(seen_.begin(), seen_.end(), [&](const auto& op) { return op.name == name; });
    if (found == seen_.end()) {
      seen_.push_back({std::string(name)});
      found = seen_.end() - 1;
    }
    ++found->count;
    found->bytes += cost.bytes;
    found->flops += cost.flops;
  }
  if (stamp_ != nullptr) {
    stamp();
    spans_.push_back({std::string(name), 0, 0, cost.bytes, cost.flops});
  }
  return only_.empty() || only_ == name;
}

void OpTimer::stamp() {
  if (stamps_ == kMostStamps) fail("timeline: more than {} operations in a step", kMostStamps);
  launch(card_.stream, *stamp_, {1}, Overlap::kNone, times_.as<unsigned long long>(), stamps_++);
}

// Microseconds of a replay: the median of a few rounds of several, back to back.
double OpTimer::time_of(const std::function<void()>& run, int rounds_wanted, int replays) {
  recording_.reset();
  run();
  const Graph graph(*recording_);
  recording_.reset();
  const Event start(card_.device), stop(card_.device);
  for (int i = 0; i < kWarmUps; ++i) graph.launch(card_.stream);
  std::vector<double> rounds;
  for (int round = 0; round < rounds_wanted; ++round) {
    start.record(card_.stream);
    for (int i = 0; i < replays; ++i) graph.launch(card_.stream);
    stop.record(card_.stream);
    rounds.push_back(Event::microseconds(start, stop) / replays);
  }
  std::nth_element(rounds.begin(), rounds.begin() + rounds_wanted / 2, rounds.end());
  return rounds[static_cast<size_t>(rounds_wanted / 2)];
}

ops::OperationTimes OpTimer::measure(const std::function<void()>& run) {
  ops::OperationTimes times;
  listing_ = true;
  times.microseconds = time_of(run, kRounds, kReplays);
  listing_ = false;
  times.operations = std::move(seen_);
  for (ops::OperationTime& op : times.operations) {
    only_ = op.name;
    const auto count = static_cast<double>(op.count);
    op.microseconds = time_of(run, kRounds, kReplays) / count;
    op.bytes /= count;
    op.flops /= count;
  }
  return times;
}

CardTimeline OpTimer::timeline(const std::function<void()>& run) {
  CardTimeline timeline;
  timeline.plain_us = time_of(run, 1, kWarmUps);
  const Kernel kernel = card_.loader.load(stamp_source()).front();
  stamp_ = &kernel;
  stamps_ = 0;
  times_ = Buffer(card_.device, kMostStamps * sizeof(unsigned long long), "times of operations");
  recording_.reset();
  run();
  // The first ends the last operation, and the second says what such a node takes.
  stamp();
  stamp();
  const Graph graph(*recording_);
  recording_.reset();
  for (int i = 0; i <= kWarmUps; ++i) graph.launch(card_.stream);
  const std::vector<unsigned long long> at =
      times_.download<unsigned long long>(card_.stream, static_cast<size_t>(stamps_));
  stamp_ = nullptr;
  timeline.spans = std::exchange(spans_, {});
  const auto between = [&](size_t i, size_t j) { return static_cast<double>(at[j] - at[i]) * 1e-3; };
  const size_t count = timeline.spans.size();
  timeline.stamp_us = between(count, count + 1);
  timeline.us = between(0, count);
  for (size_t i = 0; i < count; ++i) {
    timeline.spans[i].start_us = between(0, i);
    timeline.spans[i].us = std::max(0.0, between(i, i + 1) - timeline.stamp_us);
  }
  return timeline;
}

}  // namespace fourfold::cuda
