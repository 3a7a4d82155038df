#include "measure/trace.h"

#include <algorithm>
#include <utility>

namespace fourfold::measure {

Json chrome_trace(const std::vector<Track>& tracks) {
  Json events = Json::array(), other = Json::object();
  for (size_t i = 0; i < tracks.size(); ++i) {
    const Track& track = tracks[i];
    const size_t process = i + 1;
    events.push_back({{"name", "process_name"}, {"ph", "M"}, {"pid", process}, {"args", {{"name", track.title}}}});
    events.push_back(
        {{"name", "process_sort_index"}, {"ph", "M"}, {"pid", process}, {"args", {{"sort_index", process}}}});
    double first = 0;
    for (size_t k = 0; k < track.spans.size(); ++k) {
      first = k == 0 ? track.spans[k].start_us : std::min(first, track.spans[k].start_us);
    }
    for (const cuda::TimelineSpan& span : track.spans) {
      Json event = {{"name", span.name},           {"ph", "X"},     {"pid", process}, {"tid", 1},
                    {"ts", span.start_us - first}, {"dur", span.us}};
      if (span.bytes > 0 || span.flops > 0) event["args"] = {{"bytes", span.bytes}, {"flops", span.flops}};
      events.push_back(std::move(event));
    }
    other[track.title] = track.notes;
  }
  return {{"traceEvents", std::move(events)}, {"displayTimeUnit", "ns"}, {"otherData", std::move(other)}};
}

Track track_of(std::string title, cuda::CardTimeline timeline) {
  Track track;
  track.title = std::move(title);
  track.spans = std::move(timeline.spans);
  track.notes = {
      {"step_us", timeline.plain_us},
      {"step_with_times_us", timeline.us},
      {"noting_a_time_us", timeline.stamp_us},
      {"note",
       "a node between two operations notes the time: none starts before the one before it has ended, as they "
       "do in service, and such nodes are left out of the durations"}};
  return track;
}

}  // namespace fourfold::measure
