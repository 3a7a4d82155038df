// The ranks of one model: threads of one process that compute the same steps, each with a backend of its own and its
// part of the weights, and meet where their results are added up.
//
// A meeting is all there is between them: each shows a tensor, sees those of all, and the meeting is over when all have
// read what they wanted. Sums are made of that by the backends, with their own kernels: a CPU reads the other ranks'
// memory, a GPU reads that of its peers, or has their addresses from a meeting and goes on without the host.
//
// A group that has failed stays so: whoever comes to a meeting, or waits in one, gets the cause as an Error. It fails
// when a rank says so (fail()), and when a rank does not come to a meeting that another one waits in.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "ops/tensor.h"

namespace fourfold::ranks {

// How long a rank waits for another one in a meeting. What lies between two meetings is a part of one layer: even a
// slow processor is through with its share not much later than the others.
inline constexpr std::chrono::milliseconds kPatience{6000};
inline constexpr int64_t kMostRanks = 64;

class Group {
 public:
  // 1 to kMostRanks.
  explicit Group(int64_t ranks, std::chrono::milliseconds patience = kPatience);

  int64_t ranks() const { return static_cast<int64_t>(places_.size()); }
  std::chrono::milliseconds patience() const { return patience_; }

  // Ends the group, the first cause is kept. Ranks that wait in a meeting go on with an Error.
  void fail(int64_t rank, const std::string& cause);
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  // "rank 1: out of memory"; empty as long as nothing failed.
  std::string cause() const;

 private:
  friend class Member;

  struct alignas(128) Place {
    std::atomic<uint64_t> rounds{0};  // meetings that this rank has come to
    ops::Tensor shown;
  };

  // Waits until every rank has come as often as this one.
  void arrive(int64_t rank, std::chrono::milliseconds patience);
  void wait(int64_t rank, uint64_t round, std::chrono::milliseconds patience);
  std::string missing(uint64_t round) const;
  [[noreturn]] void throw_cause() const;

  const std::chrono::milliseconds patience_;
  std::vector<Place> places_;
  std::atomic<uint64_t> arrived_{0};  // of all ranks together
  std::atomic<int> sleeping_{0};
  std::atomic<bool> failed_{false};
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::string cause_;
};

// One rank's end of a group. Used by one thread at a time.
class Member {
 public:
  Member(std::shared_ptr<Group> group, int64_t rank);

  int64_t rank() const { return rank_; }
  int64_t ranks() const { return group_->ranks(); }
  Group& group() { return *group_; }

  // Begins a meeting: what all ranks show, in their order. The views, and the memory behind them, may be read until
  // this rank calls part(), and are not written by anyone before all have. `patience`: where what lies before the
  // meeting may take longer on one rank than on another; 0: the group's.
  std::span<const ops::Tensor> meet(const ops::Tensor& shown, std::chrono::milliseconds patience = {});
  // Ends it.
  void part();

  // A meeting of values: each rank shows one and has a copy of all.
  template <typename T>
  std::vector<T> meet_with(T value, std::chrono::milliseconds patience = {}) {
    // Where the group fails, others may still be reading when this rank has left.
    const auto kept = std::make_shared<T>(std::move(value));
    kept_ = kept;
    ops::Tensor shown;
    shown.data = kept.get();
    std::vector<T> all;
    for (const ops::Tensor& each : meet(shown, patience)) all.push_back(*static_cast<const T*>(each.data));
    part();
    kept_.reset();
    return all;
  }

 private:
  std::shared_ptr<Group> group_;
  int64_t rank_;
  std::vector<ops::Tensor> seen_;
  std::shared_ptr<void> kept_;  // what is shown in a meeting of values
};

}  // namespace fourfold::ranks
