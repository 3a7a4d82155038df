// Timelines in Chrome's trace format (chrome://tracing, Perfetto).
#pragma once

#include <string>
#include <vector>

#include "base/json.h"
#include "cuda/backend/timeline.h"

namespace fourfold::measure {

// A row of its own: the operations of a step on the card, or the parts of steps on the host.
struct Track {
  std::string title;
  std::vector<cuda::TimelineSpan> spans;
  Json notes = Json::object();  // said of the track: what was measured with it
};

// {traceEvents[], displayTimeUnit, otherData{title: notes}}: a complete event ("X") for each span, in microseconds from
// the first one of its track, with its bytes and flops where it has any; tracks are processes, named by metadata
// events.
Json chrome_trace(const std::vector<Track>& tracks);
// Of a step on the card, with what the timeline says of itself as notes.
Track track_of(std::string title, cuda::CardTimeline timeline);

}  // namespace fourfold::measure
