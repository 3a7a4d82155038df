#include "base/shared_reads.h"

#include "base/check.h"

namespace fourfold {

// Memory that comes fresh from the system costs more than what is read into it.
struct SharedReads::Buffers {
  std::mutex mutex;
  std::vector<std::unique_ptr<std::vector<uint8_t>>> free;

  static std::shared_ptr<std::vector<uint8_t>> get(const std::shared_ptr<Buffers>& all, uint64_t bytes) {
    std::unique_ptr<std::vector<uint8_t>> buffer;
    {
      const std::lock_guard lock(all->mutex);
      if (!all->free.empty()) {
        buffer = std::move(all->free.back());
        all->free.pop_back();
      }
    }
    if (buffer == nullptr) buffer = std::make_unique<std::vector<uint8_t>>();
    if (buffer->size() < bytes) buffer->resize(bytes);
    return {buffer.release(), [all](std::vector<uint8_t>* used) {
              std::unique_ptr<std::vector<uint8_t>> back(used);
              const std::lock_guard lock(all->mutex);
              all->free.push_back(std::move(back));
            }};
  }
};

SharedReads::SharedReads(uint64_t most_bytes, std::chrono::milliseconds patience)
    : most_bytes_(most_bytes), patience_(patience), buffers_(std::make_shared<Buffers>()) {}

void SharedReads::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  room_.notify_all();
}

SharedReads::Bytes SharedReads::read(const OpenFile& file, uint64_t offset, uint64_t bytes) {
  reads_.fetch_add(1, std::memory_order_relaxed);
  const std::shared_ptr<std::vector<uint8_t>> buffer = Buffers::get(buffers_, bytes);
  file.read(offset, buffer->data(), bytes);
  return buffer;
}

// One taker fewer has yet to come. Under the mutex.
void SharedReads::leave(const Key& key, Entry& entry, uint64_t bytes) {
  if (--entry.left > 0) return;
  if (!entry.alone) kept_ -= bytes;
  if (waiting_for_room_ > 0) room_.notify_all();
  entries_.erase(key);
}

SharedReads::Bytes SharedReads::take(const std::shared_ptr<const OpenFile>& file, uint64_t offset, uint64_t bytes,
                                     int64_t takers) {
  FF_ASSERT(takers > 0);
  const Key key{file.get(), offset};
  std::shared_ptr<Entry> entry;
  bool reads = false;
  {
    std::unique_lock lock(mutex_);
    auto found = entries_.find(key);
    if (found == entries_.end() && kept_ + bytes > most_bytes_) {
      ++waiting_for_room_;
      room_.wait_for(lock, patience_, [&] {
        found = entries_.find(key);
        return stopped_ || found != entries_.end() || kept_ + bytes <= most_bytes_;
      });
      --waiting_for_room_;
    }
    if (found == entries_.end() && stopped_) {
      lock.unlock();
      return read(*file, offset, bytes);
    }
    if (found == entries_.end()) {
      const bool alone = kept_ + bytes > most_bytes_;
      if (!alone) kept_ += bytes;
      reads = true;
      found = entries_.emplace(key, std::make_shared<Entry>(file, takers, alone)).first;
      if (waiting_for_room_ > 0) room_.notify_all();
    }
    entry = found->second;
    reads = reads || entry->alone;
    leave(key, *entry, bytes);
  }
  if (entry->alone) return read(*file, offset, bytes);
  if (reads) {
    try {
      entry->bytes = read(*file, offset, bytes);
    } catch (...) {
      entry->error = std::current_exception();
    }
    entry->settled.store(1, std::memory_order_release);
    entry->settled.notify_all();
  } else {
    entry->settled.wait(0, std::memory_order_acquire);
  }
  if (entry->error != nullptr) std::rethrow_exception(entry->error);
  return entry->bytes;
}

}  // namespace fourfold
