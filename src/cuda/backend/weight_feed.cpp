#include "cuda/backend/weight_feed.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "base/threads.h"
#include "nvfp4/block_scales.h"

namespace fourfold::cuda {
namespace {

constexpr uint64_t kAlignment = 256;
constexpr uint64_t kMostRead = uint64_t{1} << 20;  // by one thread at a time
constexpr int kFewThreads = 8, kMostReaders = 16;

}  // namespace

WeightFeed::Slot::Slot(const Device& device, uint64_t bytes, bool in_place) : copied(device), used(device) {
  if (!in_place) staging = Buffer(device, bytes, "weights on their way");
}

// Page-locked memory has the same address for the device (unified addressing, on all architectures that are listed).
DeviceAddress WeightFeed::Slot::address() const {
  return staging.bytes() > 0 ? staging.address() : reinterpret_cast<DeviceAddress>(pinned.data());
}

WeightFeed::WeightFeed(const Device& device, int threads, uint64_t block_bytes)
    : device_(device),
      block_bytes_(block_bytes),
      in_place_(device.info().host_memory == jit::HostMemory::kOnePool),
      copies_(device),
      kernels_(device),
      status_(device, kStatusBytes, "status of the weights") {
  status_.fill(kernels_, 0xff);
  for (size_t i = 0; i < kBlocks; ++i) slots_.push_back(std::make_unique<Slot>(device, block_bytes_, in_place_));
  locker_ = std::thread([this] { lock_pages(); });
  feeder_ = std::thread([this] { feed(); });
  const int all = threads > 0 ? threads : ThreadPool::default_threads();
  const int readers = all <= kFewThreads ? all : std::clamp(all * 3 / 4, kFewThreads, kMostReaders);
  for (int i = 0; i < readers; ++i) threads_.emplace_back([this] { read_pieces(); });
}

WeightFeed::~WeightFeed() {
  {
    std::unique_lock lock(mutex_);
    try {
      hand_over(lock);
    } catch (...) {  // finish() says it, to whoever asks
    }
    stop_ = true;
  }
  fed_.notify_all();
  feeder_.join();
  {
    const std::lock_guard lock(mutex_);
    readers_stop_ = true;
  }
  readable_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  locker_.join();
  try {
    copies_.synchronize();
    kernels_.synchronize();
  } catch (const Error&) {  // likewise
  }
}

// ---- the caller's side

void WeightFeed::add(uint64_t bytes, const std::vector<Piece>& pieces, Use use) {
  FF_ASSERT(bytes > 0 && bytes <= block_bytes_);
  uint64_t at = (open_.bytes + kAlignment - 1) / kAlignment * kAlignment;
  if (at > 0 && at + bytes > fill_bytes()) {
    std::unique_lock lock(mutex_);
    hand_over(lock);
    at = 0;
  }
  bool borrowed = false;
  for (const Piece& piece : pieces) {
    const bool whole = piece.rows == 1 || piece.stride == piece.bytes;
    const uint64_t each = whole ? piece.bytes * static_cast<uint64_t>(piece.rows) : piece.bytes;
    const uint64_t rows = whole ? 1 : static_cast<uint64_t>(piece.rows);
    // Rows that lie close to each other are read with what is between them.
    const uint64_t together = each > kMostRead ? 1 : std::max<uint64_t>(1, kMostRead / std::max(piece.stride, each));
    FF_ASSERT(piece.to + piece.bytes * static_cast<uint64_t>(piece.rows) <= bytes);
    const FilePlace place = file_place(piece.from);
    if (place.file != nullptr && (open_.files.empty() || open_.files.back() != place.file)) {
      open_.files.push_back(place.file);
    }
    if (piece.scales_of != nullptr && place.file != nullptr) open_.names.push_back(*piece.scales_of);
    const int name =
        piece.scales_of != nullptr && place.file != nullptr ? static_cast<int>(open_.names.size()) - 1 : -1;
    // Rows that are all of such pieces.
    const bool shared = piece.reads != nullptr && place.file != nullptr && !whole && each <= kMostRead &&
                        piece.stride % each == 0 && piece.lead % each == 0;
    if (shared && (open_.shared.empty() || open_.shared.back() != piece.reads)) open_.shared.push_back(piece.reads);
    borrowed = borrowed || (place.file == nullptr && piece.owner == nullptr);
    open_.owning = open_.owning || place.file == nullptr;
    for (uint64_t row = 0; row < rows; row += together) {
      for (uint64_t done = 0; done < each; done += kMostRead) {
        const uint64_t skipped = row * piece.stride + done;
        // Takers of the same rows begin with different ones, so that each finds what the others have read meanwhile.
        const bool others =
            shared && (place.offset + skipped - piece.lead) / (together * piece.stride) % (piece.stride / each) !=
                          piece.lead / each;
        open_.reads.push_back({place.file.get(), place.offset + skipped,
                               static_cast<const uint8_t*>(piece.from) + skipped, std::min(each - done, kMostRead),
                               std::min(together, rows - row), piece.stride, at + piece.to + row * each + done, name,
                               shared ? piece.reads.get() : nullptr, piece.lead, others});
      }
    }
  }
  open_.bytes = at + bytes;
  for (const Piece& piece : pieces) {
    if (piece.owner != nullptr) open_.owners.push_back(piece.owner);
  }
  open_.uses.emplace_back(at, std::move(use));
  if (!borrowed) return;
  std::unique_lock lock(mutex_);
  hand_over(lock);
  wait_idle(lock);
}

WeightFeed::Use WeightFeed::copy_to(DeviceAddress to, uint64_t bytes) {
  return [to, bytes](const Stream& stream, DeviceAddress parcel) {
    const Device& device = stream.device();
    const jit::Driver::Functions& call = device.driver().call();
    device.check(device.info().host_memory == jit::HostMemory::kOnePool
                     ? call.copy_to_device(to, reinterpret_cast<const void*>(parcel), bytes, stream.handle())
                     : call.copy_on_device(to, parcel, bytes, stream.handle()),
                 "copy of weights to their place");
  };
}

void WeightFeed::hand_over(std::unique_lock<std::mutex>& lock) {
  const auto room = [this] {
    return error_ != nullptr || (queue_.size() < kMostQueued && (!open_.owning || owning_ < kMostOwning));
  };
  if (!room()) {
    const LoadWatch watch(device_.load_times().caller_waits);
    settled_.wait(lock, room);
  }
  if (error_ != nullptr) std::rethrow_exception(error_);
  if (open_.uses.empty()) return;
  std::stable_partition(open_.reads.begin(), open_.reads.end(), [](const Read& read) { return !read.others; });
  if (open_.owning) ++owning_;
  queue_.push_back(std::exchange(open_, {}));
  fed_.notify_one();
}

void WeightFeed::wait_idle(std::unique_lock<std::mutex>& lock, bool everything) {
  const LoadWatch watch(device_.load_times().caller_waits);
  settled_.wait(lock, [this] { return (queue_.empty() && reading_.empty() && !working_) || error_ != nullptr; });
  // Also with memory that nothing came to need: whether there is any does not depend on who was faster.
  if (everything) settled_.wait(lock, [this] { return locked_ == kBlocks || error_ != nullptr; });
  if (error_ == nullptr) return;
  settled_.wait(lock, [this] { return readers_ == 0; });  // of memory that its owner may take away
  std::rethrow_exception(error_);
}

int* WeightFeed::status(std::function<std::string(int)> error) {
  if ((errors_.size() + 1) * sizeof(int) > kStatusBytes) fail("{} matrices of weights are too many", errors_.size());
  errors_.push_back(std::move(error));
  return status_.as<int>() + (errors_.size() - 1);
}

void WeightFeed::finish() {
  {
    std::unique_lock lock(mutex_);
    hand_over(lock);
    wait_idle(lock, true);
  }
  const LoadWatch watch(device_.load_times().caller_waits);
  drain();
  copies_.synchronize();
  if (errors_.empty()) return;
  const std::vector<int> found = status_.download<int>(kernels_, errors_.size());
  for (size_t i = 0; i < found.size(); ++i) {
    if (found[i] >= 0) fail("{}", errors_[i](found[i]));
  }
}

// ---- the readers'

void WeightFeed::fail_with(std::exception_ptr error) {
  const std::lock_guard lock(mutex_);
  if (error_ == nullptr) error_ = std::move(error);
  fed_.notify_all();
  settled_.notify_all();
}

// Page-locks memory for one slot after the other; with the first one reading begins.
void WeightFeed::lock_pages() {
  try {
    device_.make_current();
    for (const auto& slot : slots_) {
      PinnedBuffer memory(device_, block_bytes_, "weights on their way");
      const std::lock_guard lock(mutex_);
      slot->pinned = std::move(memory);
      fresh_.push_back(slot.get());
      ++locked_;
      fed_.notify_all();
      settled_.notify_all();
    }
  } catch (...) {
    fail_with(std::current_exception());
  }
}

// The oldest one of which something is not read by anybody yet.
WeightFeed::Slot* WeightFeed::slot_to_read() {
  if (error_ != nullptr) return nullptr;
  for (Slot* slot : reading_) {
    if (slot->next < slot->block.reads.size()) return slot;
  }
  return nullptr;
}

void WeightFeed::read_pieces() {
  std::unique_lock lock(mutex_);
  for (;;) {
    Slot* slot = nullptr;
    readable_.wait(lock, [&] { return readers_stop_ || (slot = slot_to_read()) != nullptr; });
    if (slot == nullptr) return;
    // Small pieces together.
    const size_t begin = slot->next, count = slot->block.reads.size();
    for (uint64_t bytes = 0; slot->next < count && bytes < kMostRead; ++slot->next) {
      const Read& read = slot->block.reads[slot->next];
      bytes += std::max(read.bytes, read.stride) * read.rows;
      if (bytes > kMostRead && slot->next > begin) break;
    }
    const size_t end = slot->next;
    ++readers_;
    lock.unlock();
    std::exception_ptr error;
    try {
      read(*slot, begin, end);
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    --readers_;
    slot->left -= end - begin;
    if (error != nullptr && error_ == nullptr) error_ = error;
    if (slot->left == 0 || error_ != nullptr) fed_.notify_all();
    if (error_ != nullptr) settled_.notify_all();
  }
}

void WeightFeed::read(Slot& slot, size_t begin, size_t end) {
  uint8_t* const to = slot.pinned.data();
  for (size_t i = begin; i < end; ++i) {
    const Read& part = slot.block.reads[i];
    const uint8_t* from = part.from;
    SharedReads::Bytes shared;
    if (part.shared != nullptr) {
      const auto& files = slot.block.files;
      const auto file = std::find_if(files.begin(), files.end(), [&](const auto& f) { return f.get() == part.file; });
      shared = part.shared->take(*file, part.offset - part.lead, part.rows * part.stride,
                                 static_cast<int64_t>(part.stride / part.bytes));
      from = shared->data() + part.lead;
    } else if (part.file != nullptr && part.rows == 1) {
      part.file->read(part.offset, to + part.to, part.bytes);
      from = nullptr;
    } else if (part.file != nullptr) {
      thread_local std::vector<uint8_t> rows;
      const uint64_t span = (part.rows - 1) * part.stride + part.bytes;
      if (rows.size() < span) rows.resize(span);
      part.file->read(part.offset, rows.data(), span);
      from = rows.data();
    }
    for (uint64_t row = 0; from != nullptr && row < part.rows; ++row) {
      std::memcpy(to + part.to + row * part.bytes, from + row * part.stride, part.bytes);
    }
    if (part.scales_of >= 0 && nvfp4::has_bad_scale(to + part.to, part.bytes * part.rows)) {
      fail("{}: a block scale is NaN or negative, wanted numbers from 0 to 448",
           slot.block.names[static_cast<size_t>(part.scales_of)]);
    }
  }
}

// ---- the feeder's

void WeightFeed::feed() {
  std::unique_lock lock(mutex_, std::defer_lock);
  try {
    device_.make_current();
    lock.lock();
    feed_blocks(lock);
  } catch (...) {
    if (!lock.owns_lock()) lock.lock();
    if (error_ == nullptr) error_ = std::current_exception();
  }
  working_ = false;
  settled_.notify_all();
  // Nobody writes into a block any more that goes with this.
  fed_.wait(lock, [this] { return readers_ == 0; });
}

void WeightFeed::feed_blocks(std::unique_lock<std::mutex>& lock) {
  LoadTimes& times = device_.load_times();
  const auto wait = [&](LoadTimes::Sum& sum, const auto& until) {
    if (until()) return;
    const LoadWatch watch(sum);
    fed_.wait(lock, until);
  };
  for (;;) {
    if (error_ != nullptr) return;
    const auto may_begin = [this] {
      return !queue_.empty() && reading_.size() < kReadAtOnce && !(fresh_.empty() && sent_.empty());
    };
    if (may_begin()) {
      begin_reading(lock);
    } else if (!reading_.empty()) {
      Slot& oldest = *reading_.front();
      wait(times.feed_reads, [&] { return oldest.left == 0 || error_ != nullptr || may_begin(); });
      if (oldest.left > 0 || error_ != nullptr) continue;
      working_ = true;
      reading_.pop_front();
      lock.unlock();
      send(oldest);
      use_arrived();
      lock.lock();
      working_ = false;
      settled_.notify_all();
    } else if (!queue_.empty()) {
      wait(times.feed_memory, [&] { return may_begin() || error_ != nullptr; });
    } else if (stop_) {
      return;
    } else {
      wait(times.feed_idle, [&] { return stop_ || !queue_.empty() || error_ != nullptr; });
    }
  }
}

// The next block of the queue gets a slot that is fresh, or the one that was sent first as soon as what is in that has
// been used.
void WeightFeed::begin_reading(std::unique_lock<std::mutex>& lock) {
  Block block = std::move(queue_.front());
  queue_.pop_front();
  if (block.owning) --owning_;
  Slot& slot = fresh_.empty() ? *sent_.front() : *fresh_.back();
  fresh_.empty() ? sent_.pop_front() : fresh_.pop_back();
  working_ = true;
  lock.unlock();
  settled_.notify_all();
  {
    const LoadWatch watch(device_.load_times().feed_copies);
    use(slot);
    if (slot.in_use) slot.used.wait();
    slot.in_use = false;
  }
  ++device_.load_times().blocks;
  lock.lock();
  slot.block = std::move(block);
  slot.next = 0;
  slot.left = slot.block.reads.size();
  reading_.push_back(&slot);
  working_ = false;
  readable_.notify_all();
}

// What has been read goes to the device.
void WeightFeed::send(Slot& slot) {
  Block block = std::move(slot.block);
  block.reads.clear();
  block.files.clear();
  block.shared.clear();
  block.owners.clear();
  if (!in_place_) slot.staging.upload(copies_, slot.pinned.data(), block.bytes);
  slot.copied.record(copies_);
  slot.under_way = std::move(block);
  sent_.push_back(&slot);
}

// As far as copies have arrived, in their order: who adds may count on that.
void WeightFeed::use_arrived() {
  for (Slot* slot : sent_) {
    if (!slot->under_way) continue;
    if (!slot->copied.reached()) return;
    use(*slot);
  }
}

// What is on its way to the slot, when it has arrived.
void WeightFeed::use(Slot& slot) {
  if (!slot.under_way) return;
  slot.copied.wait();
  const Block block = std::move(*slot.under_way);
  slot.under_way.reset();
  for (const auto& [at, then] : block.uses) then(kernels_, slot.address() + at);
  slot.used.record(kernels_);
  slot.in_use = true;
}

void WeightFeed::drain() {
  for (Slot* slot : sent_) use(*slot);
}

}  // namespace fourfold::cuda
