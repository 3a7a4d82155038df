#include "model/shared_source.h"

#include <utility>

#include "base/check.h"
#include "base/shared_reads.h"

namespace fourfold::model {
namespace {

// On four cards it is faster to read such rows once for all, on two it is slower (docs/cuda.md, "Loading").
constexpr int64_t kRanksThatReadAlone = 2;

}  // namespace

class SharedSource::Reader final : public WeightSource {
 public:
  Reader(SharedSource& shared, int64_t rank) : shared_(shared), rank_(rank) {}

  const ModelConfig& config() const override { return shared_.source_.config(); }

  ops::MatrixSource matrix(std::string_view module, int64_t rows, int64_t columns) override {
    std::string name(module);
    const auto fill = [](WeightSource& source, const std::string& of, int64_t r, int64_t c, Entry& entry) {
      entry.matrix = source.matrix(of, r, c);
      entry.bytes = entry.matrix.bytes();
    };
    std::unique_lock lock(shared_.mutex_);
    ops::MatrixSource matrix = shared_.take(name, rank_, lock, fill, rows, columns).matrix;
    matrix.reads = shared_.reads_;
    held_[{matrix.data, matrix.name}] = std::move(name);
    return matrix;
  }

  std::vector<float> vector(std::string_view module, int64_t count) override {
    const std::string name(module);
    const auto fill = [](WeightSource& source, const std::string& of, int64_t r, int64_t, Entry& entry) {
      entry.vector = source.vector(of, r);
    };
    std::unique_lock lock(shared_.mutex_);
    std::vector<float> values = shared_.take(name, rank_, lock, fill, count, 1).vector;
    shared_.release(name, rank_);
    return values;
  }

  void release(const ops::MatrixSource& matrix) override {
    const auto found = held_.find({matrix.data, matrix.name});
    FF_ASSERT(found != held_.end());
    const std::lock_guard lock(shared_.mutex_);
    shared_.release(found->second, rank_);
    held_.erase(found);
  }

  void read_in_place(bool in_place) override {
    const std::lock_guard lock(shared_.mutex_);
    shared_.source_.read_in_place(in_place);
  }

  void finish() override {
    const std::lock_guard lock(shared_.mutex_);
    if (++shared_.finished_ == static_cast<int64_t>(shared_.ahead_.size())) shared_.source_.finish();
  }

 private:
  SharedSource& shared_;
  int64_t rank_;
  // Random weights are places of a common block, and tensors of a checkpoint may be cut into several matrices.
  std::map<std::pair<const void*, std::string>, std::string> held_;
};

SharedSource::SharedSource(WeightSource& source, int64_t ranks, int64_t most_ahead)
    : source_(source),
      most_ahead_(most_ahead),
      reads_(ranks > kRanksThatReadAlone ? std::make_shared<SharedReads>() : nullptr),
      ahead_(static_cast<size_t>(ranks)) {}

std::unique_ptr<WeightSource> SharedSource::reader(int64_t rank) { return std::make_unique<Reader>(*this, rank); }

void SharedSource::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  changed_.notify_all();
  if (reads_ != nullptr) reads_->stop();
}

SharedSource::Entry& SharedSource::take(const std::string& name, int64_t rank, std::unique_lock<std::mutex>& lock,
                                        Fill* fill, int64_t rows, int64_t columns) {
  auto found = entries_.find(name);
  if (found == entries_.end()) {
    // The first to come here. What it waits for the others release without it.
    changed_.wait(lock, [&] { return stopped_ || ahead_[static_cast<size_t>(rank)] <= most_ahead_; });
    if (stopped_) fail("loading stopped: another rank has failed");
    found = entries_.find(name);
  }
  if (found == entries_.end()) {
    Entry entry;
    fill(source_, name, rows, columns, entry);
    entry.released.resize(ahead_.size());
    entry.readers_left = static_cast<int64_t>(ahead_.size());
    found = entries_.emplace(name, std::move(entry)).first;
  }
  return found->second;
}

void SharedSource::release(const std::string& name, int64_t rank) {
  const auto found = entries_.find(name);
  FF_ASSERT(found != entries_.end());
  Entry& entry = found->second;
  FF_ASSERT(!entry.released[static_cast<size_t>(rank)]);
  entry.released[static_cast<size_t>(rank)] = true;
  if (--entry.readers_left > 0) {
    ahead_[static_cast<size_t>(rank)] += entry.bytes;
    return;
  }
  for (size_t other = 0; other < ahead_.size(); ++other) {
    if (other != static_cast<size_t>(rank)) ahead_[other] -= entry.bytes;
  }
  if (entry.matrix.data != nullptr) source_.release(entry.matrix);
  entries_.erase(found);
  changed_.notify_all();
}

}  // namespace fourfold::model
