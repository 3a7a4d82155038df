// What a step does when: its operations on the card, and the host's parts of steps as they run in service.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "ops/ops.h"

namespace fourfold::cuda {

struct TimelineSpan {
  std::string name;
  double start_us = 0, us = 0;
  double bytes = 0, flops = 0;  // 0: of the host
};

// One step. Between two operations stands a node that notes the time, so that none starts before the one before it has
// ended, as they do in service: `us` is the last replay with such nodes, `plain_us` one without, and `stamp_us` what a
// node by itself takes, which is left out of the spans.
struct CardTimeline {
  std::vector<TimelineSpan> spans;
  double us = 0, plain_us = 0, stamp_us = 0;
};
// Of the operations that `forward` calls, as ops::Backend::time_operations(). None where the backend is none of CUDA.
std::optional<CardTimeline> timeline_of(ops::Backend& backend, const std::function<void()>& forward);

// From now on, what the host does in steps of CUDA backends is noted, or is not any more. Times begin with the first
// one.
void note_host_spans(bool noted);
// What was noted; nothing is left.
std::vector<TimelineSpan> take_host_spans();

// By the backend: of a part of a step, from its construction to its end.
class HostSpan {
 public:
  explicit HostSpan(const char* name);
  ~HostSpan();
  HostSpan(const HostSpan&) = delete;
  HostSpan& operator=(const HostSpan&) = delete;

 private:
  const char* name_;
  double start_ = -1;  // not noted
};

}  // namespace fourfold::cuda
