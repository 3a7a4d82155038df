// Scratch memory of an operation.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>

#include "base/check.h"
#include "cpu/memory/host_buffer.h"

namespace fourfold::cpu {

// get() leaves the contents undefined and invalidates what it returned before. reserve() makes it large enough before
// the first step; where it was not, it grows, and that is counted: nothing is allocated while serving.
class Workspace {
 public:
  template <typename T>
  void reserve(int64_t count) {
    const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
    reserved_ = true;
    if (bytes > buffer_.bytes()) grow(bytes);
  }

  template <typename T>
  T* get(int64_t count) {
    const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
    if (bytes > buffer_.bytes()) {
      if (reserved_) late_growths_.fetch_add(1, std::memory_order_relaxed);
      grow(bytes + bytes / 4);
    }
    if (poisoned_ && bytes > 0) std::memset(buffer_.data(), 0xff, static_cast<size_t>(bytes));
    return static_cast<T*>(buffer_.data());
  }

  // For tests: from now on get() fills what it returns with NaN, so that what is read before it is written shows.
  static void poison() { poisoned_ = true; }

  // How often a workspace of this process that was reserved had to grow nevertheless: a mistake of ours.
  static int64_t late_growths() { return late_growths_.load(std::memory_order_relaxed); }

 private:
  void grow(int64_t bytes) {
    buffer_ = HostBuffer();  // frees first
    buffer_ = HostBuffer(bytes);
  }

  HostBuffer buffer_;
  bool reserved_ = false;
  static inline std::atomic<int64_t> late_growths_{0};
  static inline bool poisoned_ = false;
};

// Says that somebody works with what belongs to one at a time: a second one is our own mistake.
class Occupancy {
 public:
  class Guard {
   public:
    explicit Guard(Occupancy& place) : place_(place) { FF_ASSERT(!place.taken_.exchange(true)); }
    ~Guard() { place_.taken_.store(false); }
    Guard(const Guard&) = delete;
    Guard& operator=(const Guard&) = delete;

   private:
    Occupancy& place_;
  };

 private:
  std::atomic<bool> taken_{false};
};

}  // namespace fourfold::cpu
