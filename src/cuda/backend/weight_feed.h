// Weights on their way to the device while a model is loaded: threads of the host read them from their files into
// page-locked blocks, the blocks are copied to the device one after the other, and kernels bring what has arrived into
// the form that it is kept in. All three go on at the same time, behind the back of whoever asks for the next matrix.
//
//   caller           add(), add() ...   describes blocks, as far ahead as it comes
//   readers          read               the oldest blocks that have a place, a piece each, without waiting for each
//   other feeder thread    copy -> repack     gives blocks their places, and what was read to the device
//
// Where processor and device have one pool of memory (DGX Spark) nothing is copied: page-locked blocks are mapped into
// the device's addresses as everywhere, and there kernels read them as fast as any other memory.
//
// One thread at a time adds. Nothing else may use the device's memory that is being filled before finish().
#pragma once

#include <algorithm>
#include <array>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/file.h"
#include "base/shared_reads.h"
#include "cuda/device/device.h"
#include "cuda/device/pinned.h"

namespace fourfold::cuda {

class WeightFeed {
 public:
  // Of page-locked memory, and of the device's where it has its own: so many blocks of so many bytes. A few of them are
  // being read, so that a thread that is done with one finds work in the next; the others are copied and repacked.
  static constexpr uint64_t kBlockBytes = uint64_t{16} << 20;
  // What is put into one where parcels are smaller: faster than full ones (docs/cuda.md, "Loading").
  static constexpr uint64_t kFillBytes = kBlockBytes / 2;
  static constexpr size_t kBlocks = 8;
  static constexpr size_t kReadAtOnce = 3;
  static constexpr uint64_t kStatusBytes = uint64_t{1} << 20;

  // `threads` that there are, 0: the default of base/threads.h. So many read that the copies keep their share of the
  // memory's bandwidth: with 16 one card takes the most (docs/cuda.md, "Loading").
  WeightFeed(const Device& device, int threads, uint64_t block_bytes = kBlockBytes);
  // What has been added is done first; what went wrong with it is lost.
  ~WeightFeed();
  WeightFeed(const WeightFeed&) = delete;
  WeightFeed& operator=(const WeightFeed&) = delete;

  // `rows` pieces of `bytes` each, `stride` bytes from one to the next, one behind the other at offset `to`. `lead`:
  // bytes from where such a row of `stride` begins to its piece.
  struct Piece {
    const void* from = nullptr;
    uint64_t bytes = 0;
    int64_t rows = 1;
    uint64_t stride = 0;
    uint64_t lead = 0;
    uint64_t to = 0;
    std::shared_ptr<const void> owner = nullptr;
    // Of pieces like this one that make up the rows, here and in other feeds: what reads the rows for all of them
    // (MatrixSource::reads). Null: nothing does.
    std::shared_ptr<SharedReads> reads = nullptr;
    // Of NVFP4 block scales: what the Error calls them if one is NaN or negative. Looked at where they come from a
    // file, whose reader has not (WeightSource::read_in_place()).
    const std::string* scales_of = nullptr;
  };
  // Puts on the stream what reads a parcel, which lies at an address of the device (a multiple of 256) until the stream
  // has passed.
  using Use = std::function<void(const Stream& stream, DeviceAddress parcel)>;
  // A use: the parcel's first bytes go to a place on the device as they are.
  static Use copy_to(DeviceAddress to, uint64_t bytes);
  uint64_t block_bytes() const { return block_bytes_; }
  uint64_t fill_bytes() const { return std::min(block_bytes_, kFillBytes); }
  // A parcel of at most block_bytes(); best of fill_bytes() at most. When add() returns the pieces' memory has been
  // read, but for what a file is behind (file_place()) and what has an owner, which is held until then. An Error may be
  // that of a parcel before.
  void add(uint64_t bytes, const std::vector<Piece>& pieces, Use use);

  // An int on the device, -1 at first, for a kernel that notes what is wrong with a weight: where it is not -1 in the
  // end, finish() fails with what `error` says of it.
  int* status(std::function<std::string(int)> error);

  // Waits until everything is in its place, or throws what went wrong.
  void finish();

 private:
  // Blocks that wait for a place: of files they are a list of what to read, and the caller may be far ahead; of memory
  // that has an owner they keep it from going.
  static constexpr size_t kMostQueued = 4096, kMostOwning = 12;

  // A part of a piece, as one thread reads it.
  struct Read {
    const OpenFile* file = nullptr;  // one of the block's; null: `from`
    uint64_t offset = 0;
    const uint8_t* from = nullptr;
    uint64_t bytes = 0, rows = 1, stride = 0, to = 0;
    int scales_of = -1;  // index of the block's names
    SharedReads* shared = nullptr;
    uint64_t lead = 0;    // where it is shared
    bool others = false;  // shared, and another's turn to read it
  };
  struct Block {
    uint64_t bytes = 0;
    std::vector<Read> reads;
    std::vector<std::shared_ptr<const OpenFile>> files;  // a few: counting who holds one costs all threads
    std::vector<std::shared_ptr<const void>> owners;
    std::vector<std::shared_ptr<SharedReads>> shared;
    std::vector<std::string> names;
    std::vector<std::pair<uint64_t, Use>> uses;  // with the parcel's offset
    bool owning = false;                         // something of it is read from memory
  };
  // A place in page-locked and, unless that is read in place, one in device memory.
  struct Slot {
    Slot(const Device& device, uint64_t bytes, bool in_place);
    DeviceAddress address() const;
    PinnedBuffer pinned;
    Buffer staging;
    Event copied, used;
    // While it is read: the first piece that no thread has taken, and how many are not there yet.
    Block block;
    size_t next = 0, left = 0;
    std::optional<Block> under_way;  // copied, or on its way; not used yet
    bool in_use = false;             // `used` was recorded
  };

  void feed();
  void feed_blocks(std::unique_lock<std::mutex>& lock);
  void begin_reading(std::unique_lock<std::mutex>& lock);
  void read_pieces();
  void read(Slot& slot, size_t begin, size_t end);
  Slot* slot_to_read();
  void lock_pages();
  void send(Slot& slot);
  void use(Slot& slot);
  void use_arrived();
  void hand_over(std::unique_lock<std::mutex>& lock);
  void wait_idle(std::unique_lock<std::mutex>& lock, bool everything = false);
  void fail_with(std::exception_ptr error);
  void drain();

  const Device& device_;
  const uint64_t block_bytes_;
  const bool in_place_;
  Stream copies_, kernels_;
  std::vector<std::unique_ptr<Slot>> slots_;
  Buffer status_;
  std::vector<std::function<std::string(int)>> errors_;

  Block open_;        // the caller's
  std::mutex mutex_;  // of all that follows, and of slots' `next` and `left`
  // What the feeder waits for; what the caller waits for; what readers wait for.
  std::condition_variable fed_, settled_, readable_;
  std::deque<Block> queue_;
  size_t owning_ = 0;         // of the queue
  size_t locked_ = 0;         // slots whose memory is there
  std::vector<Slot*> fresh_;  // of those: never used yet
  // In the order of their blocks: being read; on their way, there, or used.
  std::deque<Slot*> reading_, sent_;
  int readers_ = 0;  // that read now
  bool working_ = false, stop_ = false, readers_stop_ = false;
  std::exception_ptr error_;
  std::vector<std::thread> threads_;
  std::thread locker_, feeder_;
};

}  // namespace fourfold::cuda
