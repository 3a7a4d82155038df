#include "cuda/backend/op_timer.h"

#include <algorithm>

namespace fourfold::cuda {
namespace {

constexpr int kWarmUps = 3, kReplays = 20, kRounds = 3;

}  // namespace

bool OpTimer::takes(std::string_view name, const ops::Cost& cost) {
  if (listing_) {
    auto found = std::find_if(seen_.begin(), seen_.end(), [&](const auto& op) { return op.name == name; });
    if (found == seen_.end()) {
      seen_.push_back({std::string(name), 0, 0, cost.bytes, cost.flops});
      found = seen_.end() - 1;
    }
    ++found->count;
  }
  return only_.empty() || only_ == name;
}

// Microseconds of a replay: the median of a few rounds of several, back to back.
double OpTimer::time_of(const std::function<void()>& run) {
  recording_.reset();
  run();
  const Graph graph(*recording_);
  recording_.reset();
  const Event start(card_.device), stop(card_.device);
  for (int i = 0; i < kWarmUps; ++i) graph.launch(card_.stream);
  std::vector<double> rounds;
  for (int round = 0; round < kRounds; ++round) {
    start.record(card_.stream);
    for (int i = 0; i < kReplays; ++i) graph.launch(card_.stream);
    stop.record(card_.stream);
    rounds.push_back(Event::microseconds(start, stop) / kReplays);
  }
  std::nth_element(rounds.begin(), rounds.begin() + kRounds / 2, rounds.end());
  return rounds[kRounds / 2];
}

ops::OperationTimes OpTimer::measure(const std::function<void()>& run) {
  ops::OperationTimes times;
  listing_ = true;
  times.microseconds = time_of(run);
  listing_ = false;
  times.operations = std::move(seen_);
  for (ops::OperationTime& op : times.operations) {
    only_ = op.name;
    op.microseconds = time_of(run) / static_cast<double>(op.count);
  }
  return times;
}

}  // namespace fourfold::cuda
