#include "cuda/backend/timeline.h"

#include <atomic>
#include <chrono>
#include <mutex>
#include <utility>

#include "cuda/backend/cuda_backend.h"

namespace fourfold::cuda {
namespace {

constexpr size_t kMostSpans = 100'000;

struct Notes {
  std::atomic<bool> on{false};
  std::mutex mutex;
  std::vector<TimelineSpan> spans;
};
Notes& notes() {
  static Notes instance;
  return instance;
}

double now_us() {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

void note_host_spans(bool noted) { notes().on = noted; }

std::vector<TimelineSpan> take_host_spans() {
  const std::lock_guard lock(notes().mutex);
  std::vector<TimelineSpan> spans = std::exchange(notes().spans, {});
  if (spans.empty()) return spans;
  double first = spans.front().start_us;
  for (const TimelineSpan& span : spans) first = std::min(first, span.start_us);
  for (TimelineSpan& span : spans) span.start_us -= first;
  return spans;
}

HostSpan::HostSpan(const char* name) : name_(name) {
  if (notes().on) start_ = now_us();
}
HostSpan::~HostSpan() {
  if (start_ < 0) return;
  const double end = now_us();
  const std::lock_guard lock(notes().mutex);
  if (notes().spans.size() < kMostSpans) notes().spans.push_back({name_, start_, end - start_, 0, 0});
}

std::optional<CardTimeline> timeline_of(ops::Backend& backend, const std::function<void()>& forward) {
  auto* cuda = dynamic_cast<CudaBackend*>(&backend);
  if (cuda == nullptr) return std::nullopt;
  return cuda->timeline(forward);
}

}  // namespace fourfold::cuda
