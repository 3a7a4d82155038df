#include "cuda/backend/part_graphs.h"

#include <algorithm>

#include "base/check.h"

namespace fourfold::cuda {

void PartGraphs::begin(const Key& key) {
  FF_ASSERT(!recording() && !replaying());
  const auto [found, first_time] = graphs_.try_emplace(key);
  Entry& entry = found->second;
  entry.used = ++now_;
  fresh_ = fresh_ || entry.graph == nullptr;
  if (first_time) {
    if (graphs_.size() > most_) drop_oldest();
  } else if (entry.graph != nullptr) {
    replaying_ = entry.graph.get();
  } else {
    open_ = &entry;
    recording_.emplace(stream_);
  }
}

void PartGraphs::end(const std::function<void()>& tables) {
  if (recording()) {
    auto graph = std::make_unique<Graph>(*recording_);
    recording_.reset();
    open_->graph = std::move(graph);
    replaying_ = open_->graph.get();
    open_ = nullptr;
  }
  if (!replaying()) return;
  const Graph* graph = replaying_;
  replaying_ = nullptr;
  tables();
  graph->launch(stream_);
}

void PartGraphs::abandon() {
  recording_.reset();
  open_ = nullptr;
  replaying_ = nullptr;
}

void PartGraphs::clear() {
  abandon();
  graphs_.clear();
}

void PartGraphs::drop_oldest() {
  const auto oldest = std::min_element(graphs_.begin(), graphs_.end(),
                                       [](const auto& a, const auto& b) { return a.second.used < b.second.used; });
  // One that may still be running ends first.
  if (oldest->second.graph != nullptr && oldest->second.used > ended_) stream_.synchronize();
  graphs_.erase(oldest);
}

}  // namespace fourfold::cuda
