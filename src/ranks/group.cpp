#include "ranks/group.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "base/check.h"
#include "base/threads.h"

namespace fourfold::ranks {
namespace {

// A few ten microseconds: what ranks of equal shares differ by. Then others may have the processor, and perhaps the
// rank that is waited for is among them.
constexpr int kSpins = 2000;
constexpr int kYields = 200;
// Time is counted in these while a rank waits: where all threads stood still (a stopped process, a machine asleep)
// nobody's patience has run out.
constexpr std::chrono::milliseconds kSlice{50};

}  // namespace

Group::Group(int64_t ranks, std::chrono::milliseconds patience)
    : patience_(patience), places_(static_cast<size_t>(ranks)) {
  FF_ASSERT(ranks >= 1 && ranks <= kMostRanks);
}

void Group::fail(int64_t rank, const std::string& cause) {
  {
    const std::lock_guard lock(mutex_);
    if (failed_.load(std::memory_order_relaxed)) return;
    cause_ = fmt::format("rank {}: {}", rank, cause.empty() ? "unknown error" : cause);
    failed_.store(true, std::memory_order_release);
  }
  wake_.notify_all();
}

std::string Group::cause() const {
  const std::lock_guard lock(mutex_);
  return cause_;
}

void Group::throw_cause() const { throw Error(cause()); }

void Group::arrive(int64_t rank, std::chrono::milliseconds patience) {
  if (failed()) throw_cause();
  Place& place = places_[static_cast<size_t>(rank)];
  const uint64_t round = place.rounds.load(std::memory_order_relaxed) + 1;
  place.rounds.store(round, std::memory_order_release);
  const uint64_t all = round * places_.size();
  if (arrived_.fetch_add(1, std::memory_order_seq_cst) + 1 == all) {
    if (sleeping_.load(std::memory_order_seq_cst) == 0) return;
    // Whoever sleeps has looked before, under the mutex.
    { const std::lock_guard lock(mutex_); }
    wake_.notify_all();
    return;
  }
  wait(rank, round, patience.count() > 0 ? patience : patience_);
}

void Group::wait(int64_t rank, uint64_t round, std::chrono::milliseconds patience) {
  const uint64_t all = round * places_.size();
  const auto done = [&] { return arrived_.load(std::memory_order_seq_cst) >= all; };
  for (int spin = 0; spin < kSpins + kYields; ++spin) {
    if (arrived_.load(std::memory_order_acquire) >= all) return;
    if (failed()) throw_cause();
    if (spin < kSpins) {
      relax();
    } else {
      std::this_thread::yield();
    }
  }
  auto left = patience;
  {
    std::unique_lock lock(mutex_);
    sleeping_.fetch_add(1, std::memory_order_seq_cst);
    while (!done() && !failed() && left.count() > 0) {
      if (wake_.wait_for(lock, std::min(kSlice, left)) == std::cv_status::timeout) left -= std::min(kSlice, left);
    }
    sleeping_.fetch_sub(1, std::memory_order_seq_cst);
  }
  if (done()) return;
  if (!failed()) {
    fail(rank, fmt::format("waited {:.1f} s for a part of a sum from {}",
                           std::chrono::duration<double>(patience).count(), missing(round)));
  }
  throw_cause();
}

std::string Group::missing(uint64_t round) const {
  std::string names;
  for (size_t i = 0; i < places_.size(); ++i) {
    if (places_[i].rounds.load(std::memory_order_acquire) >= round) continue;
    names += fmt::format("{}rank {}", names.empty() ? "" : ", ", i);
  }
  return names;
}

Member::Member(std::shared_ptr<Group> group, int64_t rank)
    : group_(std::move(group)), rank_(rank), seen_(static_cast<size_t>(group_->ranks())) {
  FF_ASSERT(rank >= 0 && rank < group_->ranks());
}

std::span<const ops::Tensor> Member::meet(const ops::Tensor& shown, std::chrono::milliseconds patience) {
  group_->places_[static_cast<size_t>(rank_)].shown = shown;
  group_->arrive(rank_, patience);
  for (size_t i = 0; i < seen_.size(); ++i) seen_[i] = group_->places_[i].shown;
  return seen_;
}

void Member::part() { group_->arrive(rank_, {}); }

}  // namespace fourfold::ranks
