// Parts of files of which several threads want something each, such as the ranks of a model columns of the same rows:
// who comes first reads, the others find what was read.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "base/file.h"

namespace fourfold {

class SharedReads {
 public:
  static constexpr uint64_t kMostBytes = uint64_t{256} << 20;
  static constexpr std::chrono::milliseconds kPatience{50};

  // Keeps `most_bytes` of what was read and others have yet to ask for. Where more would be kept, the first waits so
  // long for the others to come, and then reads for itself alone, as they will.
  explicit SharedReads(uint64_t most_bytes = kMostBytes, std::chrono::milliseconds patience = kPatience);

  using Bytes = std::shared_ptr<const std::vector<uint8_t>>;
  // `bytes` of the file from `offset` on, at the beginning of what is returned. Of each offset of a file `takers` ask,
  // with the same numbers, once each. An Error where it cannot be read.
  Bytes take(const std::shared_ptr<const OpenFile>& file, uint64_t offset, uint64_t bytes, int64_t takers);

  // Who asks from here on reads for itself, and nobody waits for others to come: one of them has failed.
  void stop();
  // How often something was read.
  int64_t reads() const { return reads_.load(std::memory_order_relaxed); }

 private:
  struct Buffers;  // that are used again
  struct Entry {
    Entry(std::shared_ptr<const OpenFile> of, int64_t takers, bool for_itself)
        : file(std::move(of)), left(takers), alone(for_itself) {}
    const std::shared_ptr<const OpenFile> file;  // so that no other one has its address
    int64_t left;                                // takers that have yet to come; under the mutex
    const bool alone;                            // each reads for itself
    std::atomic<int> settled{0};                 // 1: the two below are what they stay
    Bytes bytes;
    std::exception_ptr error;
  };
  using Key = std::pair<const OpenFile*, uint64_t>;

  void leave(const Key& key, Entry& entry, uint64_t bytes);
  Bytes read(const OpenFile& file, uint64_t offset, uint64_t bytes);

  const uint64_t most_bytes_;
  const std::chrono::milliseconds patience_;
  const std::shared_ptr<Buffers> buffers_;
  std::mutex mutex_;
  std::condition_variable room_;
  int waiting_for_room_ = 0;
  bool stopped_ = false;
  std::map<Key, std::shared_ptr<Entry>> entries_;
  uint64_t kept_ = 0;  // bytes of entries that are not `alone`
  std::atomic<int64_t> reads_{0};
};

}  // namespace fourfold
