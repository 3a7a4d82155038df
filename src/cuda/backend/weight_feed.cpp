#include "cuda/backend/weight_feed.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "nvfp4/block_scales.h"

namespace fourfold::cuda {
namespace {

constexpr uint64_t kAlignment = 256;
constexpr uint64_t kMostRead = uint64_t{1} << 20;  // by one thread at a time

}  // namespace

WeightFeed::Slot::Slot(const Device& device, uint64_t bytes, bool in_place)
    : pinned(device, bytes, "weights on their way"), copied(device), used(device) {
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
      pool_(threads),
      status_(device, kStatusBytes, "status of the weights") {
  status_.fill(kernels_, 0xff);
  for (size_t i = 0; i < kBlocks; ++i) slots_.push_back(std::make_unique<Slot>(device, block_bytes_, in_place_));
  thread_ = std::thread([this] { loop(); });
}

WeightFeed::~WeightFeed() {
  {
    std::unique_lock lock(mutex_);
    if (error_ == nullptr && !open_.uses.empty()) hand_over(lock);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
  try {
    copies_.synchronize();
    kernels_.synchronize();
  } catch (const Error&) {  // finish() says it, to whoever asks
  }
}

// ---- the caller's side

void WeightFeed::add(uint64_t bytes, const std::vector<Piece>& pieces, Use use) {
  FF_ASSERT(bytes > 0 && bytes <= block_bytes_);
  uint64_t at = (open_.bytes + kAlignment - 1) / kAlignment * kAlignment;
  if (at + bytes > block_bytes_) {
    std::unique_lock lock(mutex_);
    hand_over(lock);
    at = 0;
  }
  bool borrowed = false;
  for (const Piece& piece : pieces) {
    const bool whole = piece.rows == 1 || piece.stride == piece.bytes;
    const uint64_t each = whole ? piece.bytes * static_cast<uint64_t>(piece.rows) : piece.bytes;
    FF_ASSERT(piece.to + piece.bytes * static_cast<uint64_t>(piece.rows) <= bytes);
    const FilePlace place = file_place(piece.from);
    if (piece.scales_of != nullptr && place.file != nullptr) open_.names.push_back(*piece.scales_of);
    const int name =
        piece.scales_of != nullptr && place.file != nullptr ? static_cast<int>(open_.names.size()) - 1 : -1;
    borrowed = borrowed || (place.file == nullptr && piece.owner == nullptr);
    for (int64_t row = 0; row < (whole ? 1 : piece.rows); ++row) {
      const uint64_t skipped = static_cast<uint64_t>(row) * piece.stride;
      for (uint64_t done = 0; done < each;) {
        const uint64_t count = std::min(each - done, kMostRead);
        Read part = {place, static_cast<const uint8_t*>(piece.from) + skipped + done, count,
                     at + piece.to + static_cast<uint64_t>(row) * each + done, name};
        part.place.offset += skipped + done;
        open_.reads.push_back(std::move(part));
        done += count;
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
  changed_.wait(lock, [this] { return queue_.size() < kMostQueued || error_ != nullptr; });
  if (error_ != nullptr) std::rethrow_exception(error_);
  if (open_.uses.empty()) return;
  queue_.push_back(std::exchange(open_, {}));
  changed_.notify_all();
}

void WeightFeed::wait_idle(std::unique_lock<std::mutex>& lock) {
  changed_.wait(lock, [this] { return (queue_.empty() && !working_) || error_ != nullptr; });
  if (error_ != nullptr) std::rethrow_exception(error_);
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
    wait_idle(lock);
  }
  drain();
  copies_.synchronize();
  if (errors_.empty()) return;
  const std::vector<int> found = status_.download<int>(kernels_, errors_.size());
  for (size_t i = 0; i < found.size(); ++i) {
    if (found[i] >= 0) fail("{}", errors_[i](found[i]));
  }
}

// ---- the feeder's

void WeightFeed::loop() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stop_ || !queue_.empty(); });
    if (queue_.empty() || error_ != nullptr) return;
    Block block = std::move(queue_.front());
    queue_.pop_front();
    working_ = true;
    lock.unlock();
    changed_.notify_all();
    std::exception_ptr error;
    try {
      device_.make_current();
      process(std::move(block));
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    working_ = false;
    if (error != nullptr) error_ = error;
    changed_.notify_all();
  }
}

void WeightFeed::read(Block& block, uint8_t* to) {
  const auto count = static_cast<int64_t>(block.reads.size());
  pool_.parallel_for(count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Read& part = block.reads[static_cast<size_t>(i)];
      if (part.place.file != nullptr) {
        part.place.file->read(part.place.offset, to + part.to, part.bytes);
      } else {
        std::memcpy(to + part.to, part.from, part.bytes);
      }
      if (part.scales_of >= 0 && nvfp4::has_bad_scale(to + part.to, part.bytes)) {
        fail("{}: a block scale is NaN or negative, wanted numbers from 0 to 448",
             block.names[static_cast<size_t>(part.scales_of)]);
      }
    }
  });
  block.reads.clear();
  block.owners.clear();
}

void WeightFeed::process(Block block) {
  Slot& slot = *slots_[next_slot_];
  next_slot_ = (next_slot_ + 1) % slots_.size();
  use(slot);
  if (slot.in_use) slot.used.wait();
  slot.in_use = false;
  read(block, slot.pinned.data());
  if (!in_place_) slot.staging.upload(copies_, slot.pinned.data(), block.bytes);
  slot.copied.record(copies_);
  slot.under_way = std::move(block);
  // Those before it, as far as they have arrived; in their order, for who adds may count on that.
  for (size_t i = 0; i < slots_.size(); ++i) {
    Slot& earlier = *slots_[(next_slot_ + i) % slots_.size()];
    if (!earlier.under_way) continue;
    if (!earlier.copied.reached()) break;
    use(earlier);
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
  for (size_t i = 0; i < slots_.size(); ++i) use(*slots_[(next_slot_ + i) % slots_.size()]);
}

}  // namespace fourfold::cuda
