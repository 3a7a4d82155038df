// The executor's inside: threads, warps, barriers, clocks and the record of accesses.
#pragma once

#include <sys/mman.h>

#include <bitset>
#include <boost/context/fiber.hpp>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

#include "executor/executor.h"

namespace fourfold::executor {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

// For loops that most of the time is spent in: a second version of the function for processors with wider vectors. The
// same bits, since no multiplication is fused.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FOURFOLD_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define FOURFOLD_CLONES
#endif

inline constexpr u32 kSharedBias = 1024;  // address of the first byte of dynamic shared memory: 0 stays invalid
inline constexpr u32 kMaxShared = 232448;
inline constexpr u32 kMaxStaticShared = 128 * 1024;
inline constexpr u32 kMaxThreads = 1024;
inline constexpr u32 kMaxBarriers = 128;
// Components of a clock: threads, mbarriers (their completed phases), and "the kernel before this one has ended".
inline constexpr u32 kBarrierComponent = kMaxThreads;
inline constexpr u32 kGridComponent = kBarrierComponent + kMaxBarriers;

// What a thread waits for that looks again whenever its CTA's turn comes.
inline constexpr char kPeerWait[] = "a peer's flag";
// And that goes on when nobody else can.
inline constexpr char kIdleWait[] = "an asynchronous operation";

// A vector clock. Warps mostly share one object, so that joining is comparing pointers. Components are numbered as
// above, but threads that do not exist take no room (see Machine::place).
using Clock = std::shared_ptr<const std::vector<u32>>;
Clock join(const Clock& a, const Clock& b);

// Sums over k of a row of `left` [16][depth] times a column of `right` [depth][columns], in the order of k from zero;
// columns: a multiple of 8.
void multiply_matrices(const float* left, const float* right, int depth, int columns, float* sums);

// What happened last to two bytes of shared memory.
struct Cell {
  u32 write_epoch = 0;
  u32 read_epoch = 0;  // or the index of the list of readers
  u16 writer = 0;      // component + 1, 0: nobody
  u16 reader = 0;      // component + 1, 0: nobody, kMany: a list
  u8 flags = 0;
  static constexpr u16 kMany = 0xffff;
  static constexpr u32 kStillReading = 0xffffffffu;  // epoch of a bulk store's read that was not waited for
  static constexpr u8 kAtomic = 1;                   // the last write was an atomic operation
  static constexpr u8 kInFlight = 2;  // an asynchronous copy of thread `writer` that it has not waited for
  static constexpr u8 kUnfenced = 4;  // written by an ordinary store or cp.async, no proxy fence by its thread since
};
u8* map_bytes(std::size_t bytes);

// Zeros of which only what is touched takes memory.
template <typename T>
class Zeros {
 public:
  void make(size_t count) {
    if (data_ != nullptr) return;
    data_ = {reinterpret_cast<T*>(map_bytes(count * sizeof(T))), Unmap{count * sizeof(T)}};
  }
  T& operator[](size_t i) { return data_.get()[i]; }

 private:
  struct Unmap {
    size_t bytes = 0;
    void operator()(T* data) const { munmap(data, bytes); }
  };
  std::unique_ptr<T, Unmap> data_;
};
struct Reader {
  u16 component;
  u32 epoch;
};

// Lists of readers, whose memory is used again.
class ReaderLists {
 public:
  struct List {
    std::vector<Reader> readers;
    std::bitset<kGridComponent + 1> there;  // components
  };
  List& operator[](u32 i) { return lists_[i]; }
  u32 take() {
    if (!free_.empty()) {
      const u32 i = free_.back();
      free_.pop_back();
      empty(lists_[i]);
      return i;
    }
    if (used_ == lists_.size()) lists_.emplace_back().readers.reserve(16);
    empty(lists_[used_]);
    return used_++;
  }
  void give_back(u32 i) { free_.push_back(i); }
  void clear() {
    used_ = 0;
    free_.clear();
  }

 private:
  static void empty(List& list) {
    list.readers.clear();
    list.there.reset();
  }
  std::vector<List> lists_;
  std::vector<u32> free_;
  u32 used_ = 0;
};

enum class Access { kRead, kWrite, kAtomic, kEngine };

// What is known of each CTA's threads (order.cpp).
using Known = std::map<u32, Clock>;

// What a thread of a CTA did, and when: a fence, or an atomic operation that saw what others released.
struct CtaEvent {
  u32 thread;
  u32 epoch;
  Known known;
};
struct CtaOrder {
  std::vector<CtaEvent> fenced;    // what is released by an atomic operation behind the fence
  std::vector<CtaEvent> seen;      // what atomic operations saw, before any fence
  std::vector<CtaEvent> acquired;  // what may be relied on behind the fence
};
// Of a launch, to global memory.
struct Write {
  u32 cta;
  u32 thread;
  u32 epoch;
  bool atomic;
};

struct Thread;

struct Barrier {
  u32 address = 0;
  u32 component = 0;
  u32 expected = 0;
  int pending = 0;
  i64 bytes = 0;  // announced minus arrived
  u32 phase = 0;  // completed ones
  bool fenced = false;
  u32 owner = 0;        // who initialised it, and when
  u32 owner_epoch = 0;  //
  Clock arriving;       // joined from the arrivals of the present phase
  Clock completed;      // what a waiter learns
};

// A bulk copy under way, or a tensor copy: a row of 128 bytes whose pieces are exchanged, zeros from `there` on.
struct BulkCopy {
  u32 destination;
  const u8* source;
  u32 bytes;
  u32 barrier;
  u32 phase;
  bool swizzled = false;
  u32 there = 0;
};

struct Piece {
  u32 offset;
  const u8* source;
  u32 bytes;
};
struct CopyGroup {
  std::vector<Piece> pieces;
  bool done = false;
};

// From shared to global memory.
struct BulkStore {
  u8* destination;
  u32 offset;
  u32 bytes;
  bool read = false;     // has taken place
  bool waited = false;   // and was waited for
  std::vector<u8> data;  // what was read, not yet in global memory
};

struct Thread {
  int index = 0;
  int lane = 0;
  int warp = 0;
  uint32_t tid = 0;
  bool ready = false;
  bool done = false;
  const char* waiting = nullptr;  // what for
  u32 waiting_on = 0;             // address or id
  u32 waiting_parity = 0;
  Site site;  // last wrapper called
  Clock clock;
  u32 own = 1;
  u32 reader = 0;  // its place in the last list of readers
  CopyGroup open_group;
  std::vector<CopyGroup> groups;  // committed, oldest first
  std::vector<BulkStore> open_stores;
  std::vector<BulkStore> stores;  // committed
  std::vector<Piece> unfenced;    // written since the last proxy fence, and landed
  // Writes without order beside another lane's, allowed if they do not change the value.
  struct Tentative {
    u32 offset;
    u16 value;
  };
  std::vector<Tentative> tentative;
  // The last write to global memory (Machine::writes_), 0: none.
  u32 write = 0;
  u32 write_epoch = 0;
  Access write_access = Access::kRead;
  u32 cluster_arrived = 0, cluster_waited = 0;  // phases
  // Mutations.
  u32 last_wait_line = 0;
  std::vector<u32> early_arrivals;
  u32 wait_skipped_bar = 0, wait_skipped_parity = 0;
  bool wait_skipped = false;
};

struct Rendezvous {
  Op op{};
  Site site;
  u32 mask = 0;
  u32 arrived = 0;
  void* payload[32] = {};
};

// A warp's part of a wgmma: 16 rows.
struct Accumulator {
  float* registers[32];
  int count = 0;              // per lane
  std::vector<float> values;  // [32][count]
  int users = 0;              // operations under way
};
struct WgmmaOp {
  Accumulator* accumulator;
  const u32* a[32];
  u32 a_issued[32][4];
  u64 descriptor;
  u64 a_descriptor;  // 0: the fragments
  bool transposed;   // B's rows go along N
  int n;
  bool accumulate;
  Site site;
};

struct Warp {
  u32 ready = 0;  // lanes
  u32 alive = 0;
  u32 priority = 0;    // Order::kPriority
  u32 first_lane = 0;  // the lane that goes first; the one before it goes when no other can
  std::vector<Rendezvous> open;
  bool wgmma_fenced = false;
  std::vector<WgmmaOp> open_ops;
  std::vector<std::vector<WgmmaOp>> groups;  // committed, oldest first
  std::map<float*, std::unique_ptr<Accumulator>> accumulators;
  u64 wgmma_issued = 0;
  u64 mma_seen = 0;  // of a mutated site
  // The last join, which the other lanes will ask for again.
  Clock memo_a, memo_b, memo_result;
};

struct NamedBarrier {
  int arrived = 0;
  Clock clock;
  std::vector<Thread*> waiters;
};

struct Buffer {
  std::string name;
  u8* begin;
  std::size_t bytes;
  bool constant = false;
  bool filled = true;
  bool freed = false;
  // The launches that touched it last.
  static constexpr int kNever = -1000;
  struct Touch {
    int last = kNever;
    int before = kNever;
    int other_than(int launch) const { return last == launch ? before : last; }
    void set(int launch) {
      if (last != launch) before = last;
      last = launch;
    }
  };
  // By pieces of the buffer, so that what kernels do side by side in one allocation is told apart.
  std::size_t piece = 256;
  std::vector<Touch> written{};
  std::vector<Touch> read{};
  // Of each byte the last write in a launch, in pages that come into being when they are written.
  std::vector<std::unique_ptr<u32[]>> marks{};
};

class FiberSlot;

// A resident CTA while another one runs.
struct ParkedCta {
  std::map<u32, Barrier> barriers;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  std::map<int, NamedBarrier> named;
  NamedBarrier cta_barrier;
  std::vector<BulkCopy> copies;
  Zeros<Cell> cells;
  u32 marked = 0, marked_static = 0;
  ReaderLists readers;
  std::vector<FiberSlot> slots;
  std::vector<u8> dynamic_bytes, static_bytes;
  int live = 0;
  u32 ready_warps = 0;
  int sticky_warp = 0;
  Index3 cta;
};

class Machine {
 private:
  // Their memory is used again: a clock is made at every arrival. Here, since all clocks go before it does.
  std::vector<std::vector<u32>> spare_clocks_;

 public:
  explicit Machine(const Options& options);
  ~Machine();

  // ---- global memory
  u8* allocate(std::size_t bytes, const std::string& name, bool fill);
  void release(const void* buffer);
  Buffer* buffer_at(const void* p);
  bool in_global(const void* p) const {
    return static_cast<const u8*>(p) >= global_begin_ && static_cast<const u8*>(p) < global_end_;
  }
  void produced(const void* p) {
    for (Buffer::Touch& t : buffer_at(p)->written) t.set(launch_index_);
  }
  void global_access(const void* p, std::size_t bytes, Access access);
  // Words that kernels exchange while they run: inside a buffer and aligned, in any order.
  void exchange_access(const void* p, std::size_t bytes);
  // Order between the threads of a launch (order.cpp): __threadfence() and atomic operations make it.
  void fence(Thread& t);
  void order_atomic(Thread& t, const void* p);
  void order_access(Thread& t, Buffer& buffer, std::size_t at, std::size_t bytes, Access access);

  // ---- running
  LaunchStats launch(const LaunchConfig& config, const std::function<void()>& body);
  Thread& current() { return *current_; }
  Warp& warp_of(const Thread& t) { return warps_[static_cast<size_t>(t.warp)]; }
  // Every wrapper calls this first.
  Thread& enter(Op op, Site site);
  Thread& enter(Site site);
  void block(const char* what, u32 on, u32 parity = 0);  // until wake()
  void wake(Thread& t);
  void yield();        // lets others run
  void maybe_yield();  // now and then
  void end_thread();
  void release_cta_barrier();
  void wait_for_idle();  // until nobody else can run (Delivery::kLate)
  [[noreturn]] void violate(const std::string& what);
  bool mutated(Mutation::Kind kind, Op op, Site site) const;
  bool in_mutated_file(Site site) const;
  bool coin() { return (random_() & 1u) != 0; }
  const Options& options() const { return options_; }
  bool running() const { return current_ != nullptr; }
  u32 component_of(const Thread& t) const { return static_cast<u32>(t.index); }
  size_t place(u32 component) const {
    return component < kMaxThreads ? component : component - kMaxThreads + threads_n_;
  }

  // ---- order between threads
  std::shared_ptr<std::vector<u32>> copy_of(const Clock& clock);
  std::shared_ptr<std::vector<u32>> zero_clock();
  bool ordered(u32 component, u32 epoch, const Thread& t) const {
    return component == static_cast<u32>(t.index) || (*t.clock)[place(component)] >= epoch;
  }
  Clock publish(Thread& t);  // what t has done so far; later accesses belong to a new epoch
  void acquire(Thread& t, const Clock& clock);
  void synchronise(const std::vector<Thread*>& threads);  // all learn what all have done

  // ---- shared memory
  u8* arena() { return arena_; }
  u8* shared(u32 address) { return arena_ + (address - kSharedBias); }
  // Offset into the record of accesses, or -1: dynamic shared memory first, then static.
  i64 shared_offset(const void* p) const {
    const u8* b = static_cast<const u8*>(p);
    if (b >= arena_ && b < arena_ + kMaxShared) return b - arena_;
    if (b >= tls_begin_ && b < tls_end_) return kMaxShared + (b - tls_begin_);
    return -1;
  }
  void check_bounds(u32 address, u32 bytes, u32 align, const char* what);
  void shared_access(Thread& t, u32 offset, u32 bytes, Access access, const char* what);
  void plain_access(const void* p, std::size_t bytes, Access access);
  void settle_tentative(Thread& t);
  u8* byte_at(u32 offset) { return offset < kMaxShared ? arena_ + offset : tls_begin_ + (offset - kMaxShared); }
  void engine_write(Thread& issuer, u32 offset, u32 bytes, u32 component, u32 epoch, u8 flags, const char* what);
  void proxy_read(Thread& t, u32 offset, u32 bytes, const char* what);
  void set_read_epoch(Cell& c, u32 component, u32 epoch);
  Cell& cell(u32 offset) { return cells_[offset / 2]; }

  // ---- barriers
  Barrier& barrier_at(u32 address, const char* what);
  void complete_if_done(Barrier& b);
  void deliver(size_t index);
  bool deliver_for_idle();

  // ---- clusters (cluster.cpp)
  struct ClusterStore {
    u32 address;
    u32 bits;
  };
  struct ClusterCta {
    Clock arriving, completed;          // of its threads, as an mbarrier's
    std::vector<ClusterStore> stores;   // to its shared memory in the present phase
    std::vector<ClusterStore> landing;  // of the phase before, which nobody has seen
    bool over = false;
  };
  struct Cluster {
    u32 threads = 0;  // of all its CTAs
    u32 arrived = 0;
    u32 phase = 0;  // completed ones
    std::vector<ClusterCta> ctas;
  };
  ClusterCta& cluster_cta();
  void land_stores(Thread& t, ClusterCta& cta);
  u8* shared_of(size_t cta, u32 address);
  Cluster cluster_;
  ParkedCta* together_ = nullptr;  // the CTAs that run at the same time
  size_t present_ = 0;             // which of them runs

  // ---- warp
  // Meets the lanes of `mask`; the last one to come runs `compute` on all payloads.
  template <typename F>
  void meet(Thread& t, Op op, u32 mask, Site site, void* payload, bool aligned, F compute) {
    Rendezvous* r = join_rendezvous(t, op, mask, site, payload, aligned);
    if (r->arrived == r->mask) {
      const Rendezvous whole = *r;
      close_rendezvous(t, mask);
      compute(whole);
      release_lanes(t, whole);
    } else {
      block(to_string(op).data(), mask);
    }
  }
  void run_wgmma(Thread& t, size_t groups_left);
  void execute(Thread& t, WgmmaOp& op);

  LaunchStats stats_;
  std::map<u32, Barrier> barriers_;
  std::vector<Thread> threads_;
  std::map<int, NamedBarrier> named_;
  NamedBarrier cta_barrier_;
  std::vector<BulkCopy> copies_;
  u32 shared_bytes_ = 0;
  int launch_index_ = -1;
  bool programmatic_ = true;
  bool released_early_ = false;  // this launch let its successor start before its own wait
  int settled_launch_ = -1;      // launches up to here have certainly ended
  LaunchConfig config_;
  std::set<SeenSite> seen_;
  int live_ = 0;

 private:
  std::shared_ptr<std::vector<u32>> new_clock();
  Rendezvous* join_rendezvous(Thread& t, Op op, u32 mask, Site site, void* payload, bool aligned);
  void close_rendezvous(Thread& t, u32 mask);
  void release_lanes(Thread& t, const Rendezvous& r);
  void start_cta(Index3 cta);
  enum class Step { kRan, kIdle, kDone };
  Step step();
  void run_together(const Index3* ctas, size_t count);
  void exchange(ParkedCta& parked);
  Thread* pick();
  void set_ready(Thread& t, bool ready);
  void switch_to(Thread& t);
  void to_main();
  void end_of_cta();
  static constexpr size_t kKept = 16;
  std::vector<ParkedCta> parked_;  // their memory is used again
  u32 touched_ = kMaxShared;       // bytes of dynamic shared memory that the CTAs before may have used
  u32 marked_ = 0;                 // and of its record
  u32 marked_static_ = 0;          // and of static shared memory's
  void check_canaries();
  std::string deadlock_report();
  std::string where() const;
  void note_reader(Cell& c, u32 component, u32 epoch, Thread& t);
  void forget_readers(Cell& c);
  void check_write(Thread& t, Cell& c, u32 offset, Access access, const char* what);
  std::string name_of(u32 component) const;
  std::string region_of(u32 offset) const;
  u32 cta_index() const;
  bool happened(const CtaEvent& event, const Thread& t) const;
  bool knows(const Thread& t, const Write& write) const;

  Options options_;
  std::mt19937 random_;
  // fibers
  std::vector<FiberSlot> slots_;
  boost::context::fiber main_;
  const std::function<void()>* body_ = nullptr;
  Thread* current_ = nullptr;
  std::vector<Warp> warps_;
  u32 ready_warps_ = 0;  // that have a lane which can go on
  int sticky_warp_ = 0;
  Index3 cta_;
  u64 atomics_ = 0;  // on global memory, in this launch
  bool failed_ = false;
  std::string error_;
  u32 threads_n_ = 0;
  // shared memory
  u8* arena_ = nullptr;
  u8* tls_begin_ = nullptr;
  u8* tls_end_ = nullptr;
  std::vector<u8> tls_saved_;
  Zeros<Cell> cells_;
  ReaderLists readers_;
  // global memory
  u8* global_begin_ = nullptr;
  u8* global_end_ = nullptr;
  std::size_t global_used_ = 0;
  std::vector<std::unique_ptr<Buffer>> buffers_;
  Zeros<u16> granules_;
  // order in global memory, of the present launch
  std::vector<CtaOrder> orders_;  // of each CTA
  std::map<const void*, Known> released_;
  std::vector<Write> writes_;
  u32 first_write_ = 1;  // number of writes_[0]; what has a smaller one belongs to an earlier launch
  friend class FiberSlot;
};

extern Machine* launching;  // null where none is
inline Machine& machine() { return *launching; }
inline bool machine_runs() {
  const Machine* const m = launching;
  return m != nullptr && m->running();
}

}  // namespace fourfold::executor
