// One source of weights for all ranks of a model. Each takes every matrix, in the same order, and keeps its part; the
// source is asked once, and told to release what all are done with.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "model/weight_source.h"

namespace fourfold::model {

class SharedSource {
 public:
  // A rank may be ahead of the others by so many bytes of matrices that it has released and they have not.
  static constexpr int64_t kMostAhead = int64_t{1} << 30;

  SharedSource(WeightSource& source, int64_t ranks, int64_t most_ahead = kMostAhead);

  // The end of one rank, for its thread; as long as this lives.
  std::unique_ptr<WeightSource> reader(int64_t rank);
  // Readers that wait for others, or ask from here on, get an Error: a rank has failed.
  void stop();

 private:
  class Reader;
  // What at least one rank has asked for and not all have released. Vectors are released by being taken.
  struct Entry {
    ops::MatrixSource matrix;
    std::vector<float> vector;
    std::vector<bool> released;  // by rank
    int64_t readers_left = 0;
    int64_t bytes = 0;
  };

  using Fill = void(WeightSource& source, const std::string& name, int64_t rows, int64_t columns, Entry& entry);

  // Both under the mutex.
  Entry& take(const std::string& name, int64_t rank, std::unique_lock<std::mutex>& lock, Fill* fill, int64_t rows,
              int64_t columns);
  void release(const std::string& name, int64_t rank);

  WeightSource& source_;
  const int64_t most_ahead_;
  const std::shared_ptr<SharedReads> reads_;  // of rows of which every rank takes columns; null: each for itself
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, Entry, std::less<>> entries_;
  std::vector<int64_t> ahead_;  // by rank: bytes that it has released and others have not
  int64_t finished_ = 0;        // ranks
  bool stopped_ = false;
};

}  // namespace fourfold::model
