// Graphs of a step's parts. A part (cpu/step/host_stepper.h) is the launches between two things that the host does: a
// few hundred, each of which costs the host more than a decode step's kernel costs the card. The second part with the
// same key is recorded, and all later ones are one launch.
//
// What changes from step to step (tokens, positions, pages, slots, lengths, rows to gather) is in tables on the device
// that are copied there before the launch; the key holds everything else that launches depend on.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "cuda/device/device.h"

namespace fourfold::cuda {

class PartGraphs {
 public:
  using Key = std::vector<int64_t>;

  // Keeps the `most` graphs used last.
  PartGraphs(const Stream& stream, size_t most) : stream_(stream), most_(most) {}

  // A part begins. Its launches are recorded, or replayed (then they must not be made again), or neither.
  void begin(const Key& key);
  bool recording() const { return recording_.has_value(); }
  bool replaying() const { return replaying_ != nullptr; }
  // All of the part is on its way; `tables` is called before its graph is launched. Nothing happens where no graph is
  // recorded or replayed.
  void end(const std::function<void()>& tables);
  // After an error: what was recorded is dropped.
  void abandon();
  // How many parts have begun; and that those up to this one, counted so, have ended on the device.
  uint64_t begun() const { return now_; }
  void ended(uint64_t part) { ended_ = std::max(ended_, part); }
  // Whether a part since the last call was the first or the second with its key: launched one by one, or recorded.
  bool take_fresh() { return std::exchange(fresh_, false); }
  // Nothing recorded so far is valid any more.
  void clear();

 private:
  struct Entry {
    std::unique_ptr<Graph> graph;  // null: seen once
    uint64_t used = 0;
  };
  void drop_oldest();

  const Stream& stream_;
  const size_t most_;
  std::map<Key, Entry> graphs_;
  uint64_t now_ = 0, ended_ = 0;
  bool fresh_ = false;
  Entry* open_ = nullptr;  // of the part that is recorded
  std::optional<Recording> recording_;
  const Graph* replaying_ = nullptr;
};

}  // namespace fourfold::cuda
