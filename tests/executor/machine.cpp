// Scheduling, launching, reports.
#include "executor/machine.h"

#include <elf.h>
#include <fmt/format.h>
#include <link.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <span>

#include "executor/cuda.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

uint3 threadIdx;
uint3 blockIdx;
dim3 blockDim;
dim3 gridDim;

namespace fourfold::executor {
namespace {

constexpr std::size_t kStackBytes = 64 * 1024;
constexpr std::size_t kGranule = 64 * 1024;
constexpr std::size_t kGlobalBytes = std::size_t{1} << 36;  // of addresses, not of memory
constexpr std::size_t kMostPieces = std::size_t{1} << 20;   // of a buffer that are told apart

// The program's own thread-local block.
void find_tls(u8** begin, u8** end) {
  struct Found {
    u8* begin = nullptr;
    std::size_t bytes = 0;
  } found;
  dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* data) {
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          if (info->dlpi_phdr[i].p_type != PT_TLS) continue;
          auto* f = static_cast<Found*>(data);
          f->begin = static_cast<u8*>(info->dlpi_tls_data);
          f->bytes = info->dlpi_phdr[i].p_memsz;
        }
        return 1;  // the program comes first
      },
      &found);
  *begin = found.begin;
  *end = found.begin == nullptr ? nullptr : found.begin + found.bytes;
}

std::string base_name(const char* file) {
  const char* slash = std::strrchr(file, '/');
  return slash == nullptr ? file : slash + 1;
}

}  // namespace

u8* map_bytes(std::size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw std::runtime_error("executor: cannot map memory");
  return static_cast<u8*>(p);
}

// Stacks are kept; a fiber that did not end is forgotten, not unwound (nothing on its stack owns anything that matters,
// and the compiler assumes that plain accesses, where violations are found, do not throw).
class FiberSlot {
 public:
  FiberSlot() {
    static_assert(std::is_trivially_destructible_v<decltype(storage_)>);
    if (pool().empty()) {
      stack_ = map_bytes(kStackBytes);
    } else {
      stack_ = pool().back();
      pool().pop_back();
    }
  }
  ~FiberSlot() {
    if (stack_ != nullptr) pool().push_back(stack_);
  }
  FiberSlot(FiberSlot&& other) noexcept : stack_(other.stack_) { other.stack_ = nullptr; }
  FiberSlot(const FiberSlot&) = delete;

  void start(Machine* m) {
    namespace ctx = boost::context;
#ifdef __SANITIZE_ADDRESS__
    __asan_unpoison_memory_region(stack_, kStackBytes);  // what a forgotten fiber left
#endif
    ctx::stack_context sctx;
    sctx.size = kStackBytes;
    sctx.sp = stack_ + kStackBytes;
    new (&storage_)
        ctx::fiber(std::allocator_arg, ctx::preallocated(sctx.sp, sctx.size, sctx), Keep{}, [m](ctx::fiber&& main) {
          m->main_ = std::move(main);
          (*m->body_)();
          m->end_thread();
          return std::move(m->main_);
        });
  }
  void resume() {
    auto& f = *reinterpret_cast<boost::context::fiber*>(&storage_);
    f = std::move(f).resume();
  }

 private:
  struct Keep {
    boost::context::stack_context allocate() { return {}; }
    void deallocate(boost::context::stack_context&) {}
  };
  // Never destroyed: a machine that a static object owns gives its stacks back when the program ends.
  static std::vector<u8*>& pool() {
    static auto* const stacks = new std::vector<u8*>;
    return *stacks;
  }
  u8* stack_ = nullptr;
  alignas(boost::context::fiber) unsigned char storage_[sizeof(boost::context::fiber)] = {};
};

Machine* launching = nullptr;

bool Device::checks_plain_accesses() {
#ifdef FOURFOLD_EXECUTOR_HOOKS
  return true;
#else
  return false;
#endif
}

std::string Site::text() const { return fmt::format("{}:{}", base_name(file), line); }

std::string_view to_string(Op op) {
  switch (op) {
    case Op::kSyncThreads:
      return "__syncthreads";
    case Op::kSyncWarp:
      return "__syncwarp";
    case Op::kNamedBarrier:
      return "barrier_sync";
    case Op::kBarrierWait:
      return "mbarrier_wait";
    case Op::kBarrierArrive:
      return "mbarrier_arrive";
    case Op::kBarrierFence:
      return "fence_barrier_init";
    case Op::kBulkCopy:
      return "bulk_copy";
    case Op::kBulkStore:
      return "bulk_store";
    case Op::kBulkStoreCommit:
      return "bulk_store_commit";
    case Op::kBulkStoreWait:
      return "bulk_store_wait";
    case Op::kAsyncCopyCommit:
      return "async_copy_commit";
    case Op::kAsyncCopyWait:
      return "async_copy_wait";
    case Op::kAsyncFence:
      return "fence_async_shared";
    case Op::kWgmmaFence:
      return "wgmma_fence";
    case Op::kWgmmaCommit:
      return "wgmma_commit";
    case Op::kWgmmaWait:
      return "wgmma_wait";
    case Op::kGridWait:
      return "grid_dependency_wait";
    case Op::kFence:
      return "__threadfence";
    case Op::kFlagRaise:
      return "raise_flag";
    case Op::kFlagWait:
      return "wait_flags";
    case Op::kClusterArrive:
      return "cluster_arrive";
    case Op::kClusterWait:
      return "cluster_wait";
    case Op::kShuffle:
      return "a shuffle or vote";
    case Op::kMatrixLoad:
      return "load_matrix";
    case Op::kMatrixStore:
      return "store_matrix";
    case Op::kMma:
      return "mma";
    case Op::kWgmma:
      return "wgmma";
  }
  return "?";
}

std::string Mutation::text() const {
  if (kind == Kind::kNone) return "none";
  const char* name = kind == Kind::kDrop     ? "drop"
                     : kind == Kind::kWeaken ? "weaken"
                     : kind == Kind::kEarly  ? "too early"
                                             : "stale";
  return fmt::format("{} {} at {}:{}", name, to_string(op), file, line == 0 ? early_line : line);
}

std::vector<Options> schedules(int n, std::uint64_t seed) {
  std::vector<Options> all;
  for (int i = 0; i < n; ++i) {
    Options o;
    o.seed = seed + static_cast<std::uint64_t>(i);
    constexpr Delivery kDeliveries[] = {Delivery::kLate, Delivery::kAtOnce, Delivery::kRandom};
    constexpr Order kOrders[] = {Order::kUniform, Order::kPriority, Order::kSticky};
    o.delivery = kDeliveries[i % 3];
    o.order = kOrders[(i + i / 3) % 3];
    all.push_back(o);
  }
  return all;
}

// ---- threads --------------------------------------------------------------------------------------------------------

Machine::Machine(const Options& options) : options_(options), random_(static_cast<u32>(options.seed * 2654435761u)) {
  arena_ = map_bytes(kMaxShared + kGranule);
  arena_ = reinterpret_cast<u8*>((reinterpret_cast<std::uintptr_t>(arena_) + 1023) / 1024 * 1024);
  find_tls(&tls_begin_, &tls_end_);
  if (tls_end_ - tls_begin_ > static_cast<std::ptrdiff_t>(kMaxStaticShared)) {
    throw std::runtime_error("executor: too much static shared memory");
  }
  global_begin_ = map_bytes(kGlobalBytes);
  global_end_ = global_begin_ + kGlobalBytes;
  granules_.make(kGlobalBytes / kGranule);
}

Machine::~Machine() {
  munmap(global_begin_, kGlobalBytes);
  munmap(reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(arena_) / 4096 * 4096), kMaxShared + kGranule);
}

void Machine::switch_to(Thread& t) {
  current_ = &t;
  threadIdx = {t.tid, 0, 0};
  ++stats_.switches;
  slots_[static_cast<size_t>(t.index)].resume();
  current_ = nullptr;
}

void Machine::to_main() { main_ = std::move(main_).resume(); }

void Machine::yield() { to_main(); }

void Machine::maybe_yield() {
  if ((random_() & 31u) == 0) yield();
}

void Machine::block(const char* what, u32 on, u32 parity) {
  Thread& t = current();
  t.waiting = what;
  t.waiting_on = on;
  t.waiting_parity = parity;
  set_ready(t, false);
  to_main();
}

void Machine::wake(Thread& t) {
  t.waiting = nullptr;
  set_ready(t, true);
}

void Machine::set_ready(Thread& t, bool ready) {
  t.ready = ready;
  Warp& w = warp_of(t);
  w.ready = ready ? w.ready | 1u << t.lane : w.ready & ~(1u << t.lane);
  const u32 warp = 1u << t.warp;
  ready_warps_ = w.ready != 0 ? ready_warps_ | warp : ready_warps_ & ~warp;
}

void Machine::wait_for_idle() {
  if (options_.delivery == Delivery::kLate) block(kIdleWait, 0);
}

void Machine::violate(const std::string& what) {
  failed_ = true;
  error_ = fmt::format("{}{}: {}", config_.name, where(), what);
  if (current_ == nullptr) throw Violation(error_);
  to_main();
  std::abort();  // nobody resumes a thread after a violation
}

void machine_fails(Site site) {
  machine().enter(site);
  machine().violate("the kernel's own check fails");
}

std::string Machine::where() const {
  std::string text = fmt::format(", CTA {}", cta_.x);
  if (cta_.y != 0) text += fmt::format(",{}", cta_.y);
  if (current_ != nullptr) {
    text += fmt::format(", thread {} (warp {} lane {}), at or after {}", current_->index, current_->warp,
                        current_->lane, current_->site.text());
  }
  return text;
}

bool Machine::mutated(Mutation::Kind kind, Op op, Site site) const {
  const Mutation& m = options_.mutation;
  // without a line: everywhere in the file
  return m.kind == kind && m.op == op && (m.line == site.line || m.line == 0) && m.file == base_name(site.file);
}

bool Machine::in_mutated_file(Site site) const { return options_.mutation.file == base_name(site.file); }

Thread& Machine::enter(Site site) {
  Thread& t = current();
  if (!t.tentative.empty()) settle_tentative(t);
  t.site = site;
  return t;
}

Thread& Machine::enter(Op op, Site site) {
  Thread& t = enter(site);
  if (t.lane == 0) seen_.emplace(op, base_name(site.file), site.line);
  return t;
}

Thread* Machine::pick() {
  const u32 warps = static_cast<u32>(warps_.size());
  int chosen = -1;
  switch (options_.order) {
    case Order::kSticky:
      if ((ready_warps_ >> sticky_warp_ & 1u) != 0) {
        chosen = sticky_warp_;
        break;
      }
      [[fallthrough]];
    case Order::kUniform: {
      // The first from a random one on, around.
      const u32 start = random_() % warps;
      const u32 behind = ready_warps_ >> start;
      if (ready_warps_ != 0) {
        chosen = behind != 0 ? static_cast<int>(start) + __builtin_ctz(behind) : __builtin_ctz(ready_warps_);
      }
      break;
    }
    case Order::kPriority:
      if (random_() % 4096 == 0) {
        Warp& w = warps_[random_() % warps];
        w.priority = random_();
        w.first_lane = random_() & 31u;
      }
      for (u32 left = ready_warps_; left != 0; left &= left - 1) {
        const int w = __builtin_ctz(left);
        if (chosen < 0 || warps_[static_cast<size_t>(w)].priority > warps_[static_cast<size_t>(chosen)].priority) {
          chosen = w;
        }
      }
      break;
  }
  if (chosen < 0) return nullptr;
  sticky_warp_ = chosen;
  const u32 ready = warps_[static_cast<size_t>(chosen)].ready;
  const u32 turn = options_.order == Order::kSticky     ? 0
                   : options_.order == Order::kPriority ? warps_[static_cast<size_t>(chosen)].first_lane
                                                        : random_() & 31u;
  const u32 turned = turn == 0 ? ready : (ready >> turn) | (ready << (32 - turn));
  const u32 lane = (static_cast<u32>(__builtin_ctz(turned)) + turn) & 31u;
  return &threads_[static_cast<size_t>(chosen) * 32 + lane];
}

void Machine::end_thread() {
  Thread& t = current();
  if (!t.tentative.empty()) settle_tentative(t);
  for (const CopyGroup& g : t.groups) {
    if (!g.pieces.empty() && !g.done) violate("the thread ends with asynchronous copies under way");
  }
  if (!t.open_group.pieces.empty()) violate("the thread ends with asynchronous copies it has not committed");
  if (!t.open_stores.empty()) violate("the thread ends with bulk stores it has not committed");
  for (BulkStore& b : t.stores) {
    if (!b.waited) violate("the thread ends before its bulk stores have read shared memory");
    std::memcpy(b.destination, b.data.data(), b.data.size());
  }
  Warp& w = warp_of(t);
  if (!w.groups.empty() || !w.open_ops.empty()) violate("the thread ends with wgmma under way");
  if (t.cluster_arrived != t.cluster_waited) violate("the thread ends between an arrival and a wait of its cluster");
  t.done = true;
  set_ready(t, false);
  w.alive &= ~(1u << t.lane);
  --live_;
  release_cta_barrier();
}

void Machine::start_cta(Index3 cta) {
  cta_ = cta;
  const int n = config_.threads;
  std::memset(arena_, 0xff, touched_);  // what lies behind is checked when a CTA ends
  touched_ = 0;
  if (tls_begin_ != nullptr) std::memset(tls_begin_, 0xff, static_cast<size_t>(tls_end_ - tls_begin_));
  cells_.make((kMaxShared + kMaxStaticShared) / 2);
  std::fill_n(&cells_[0], (marked_ + 1) / 2, Cell{});
  std::fill_n(&cells_[kMaxShared / 2], (marked_static_ + 1) / 2, Cell{});
  marked_static_ = 0;
  readers_.clear();
  barriers_.clear();
  named_.clear();
  cta_barrier_ = {};
  copies_.clear();
  threads_.assign(static_cast<size_t>(n), {});
  ready_warps_ = 0;
  warps_.clear();
  warps_.resize(static_cast<size_t>(n + 31) / 32);
  const Clock zero = zero_clock();
  while (static_cast<int>(slots_.size()) < n) slots_.emplace_back();
  for (int i = 0; i < n; ++i) {
    Thread& t = threads_[static_cast<size_t>(i)];
    t.index = i;
    t.tid = static_cast<u32>(i);
    t.warp = i / 32;
    t.lane = i % 32;
    t.clock = zero;
    slots_[static_cast<size_t>(i)].start(this);
    warps_[static_cast<size_t>(t.warp)].alive |= 1u << t.lane;
    wake(t);
  }
  for (Warp& w : warps_) {
    w.priority = random_();
    w.first_lane = random_() & 31u;
  }
  live_ = n;
  sticky_warp_ = 0;
}

// One thread of the present CTA goes on, or a copy lands.
Machine::Step Machine::step() {
  if (live_ == 0) return Step::kDone;
  if (options_.delivery == Delivery::kRandom && !copies_.empty() && random_() % 16 == 0) {
    deliver(random_() % copies_.size());
  }
  Thread* t = pick();
  if (t == nullptr) return deliver_for_idle() ? Step::kRan : Step::kIdle;
  blockIdx = {cta_.x, cta_.y, cta_.z};
  switch_to(*t);
  if (failed_) throw Violation(error_);
  return Step::kRan;
}

// Swaps the present CTA with a parked one.
void Machine::exchange(ParkedCta& parked) {
  std::swap(barriers_, parked.barriers);
  std::swap(threads_, parked.threads);
  std::swap(warps_, parked.warps);
  std::swap(named_, parked.named);
  std::swap(cta_barrier_, parked.cta_barrier);
  std::swap(copies_, parked.copies);
  std::swap(cells_, parked.cells);
  std::swap(marked_, parked.marked);
  std::swap(marked_static_, parked.marked_static);
  std::swap(readers_, parked.readers);
  std::swap(slots_, parked.slots);
  std::swap(live_, parked.live);
  std::swap(ready_warps_, parked.ready_warps);
  std::swap(sticky_warp_, parked.sticky_warp);
  std::swap(cta_, parked.cta);
  std::swap_ranges(arena_, arena_ + shared_bytes_, parked.dynamic_bytes.data());
  if (tls_begin_ != nullptr) std::swap_ranges(tls_begin_, tls_end_, parked.static_bytes.data());
  // Others have run: it is time for another look.
  for (Thread& t : threads_) {
    if (t.waiting == kPeerWait) wake(t);
  }
}

void Machine::run_together(const Index3* ctas, size_t count) {
  if (count == 1) {
    start_cta(ctas[0]);
    Step s;
    while ((s = step()) == Step::kRan) {
    }
    if (s == Step::kIdle) violate(deadlock_report());
    end_of_cta();
    touched_ = marked_ = Device::checks_plain_accesses() ? stats_.shared_high_water : kMaxShared;
    return;
  }
  if (parked_.size() < count) parked_.resize(count);
  const std::span<ParkedCta> parked(parked_.data(), count);
  together_ = parked.data();
  cluster_ = {};
  cluster_.ctas.resize(count);
  cluster_.threads = static_cast<u32>(count) * threads_n_;
  for (size_t i = 0; i < count; ++i) {
    start_cta(ctas[i]);
    marked_ = Device::checks_plain_accesses() ? shared_bytes_ : kMaxShared;
    parked[i].dynamic_bytes.assign(shared_bytes_, 0xff);
    if (tls_begin_ != nullptr) parked[i].static_bytes.assign(static_cast<size_t>(tls_end_ - tls_begin_), 0xff);
    exchange(parked[i]);
  }
  const bool in_order = random_() % 4 != 0;
  if (in_order) {
    // One after the other, each interrupted by the next after some of its atomic operations on global memory; the last
    // one ends first. In this order a CTA may announce something, stand still, and find that all others have ended.
    for (size_t i = 0; i < count; ++i) {
      present_ = i;
      exchange(parked[i]);
      Step s = Step::kRan;
      const u64 stop = i + 1 == count ? ~u64{0} : atomics_ + random_() % (1u << random_() % 11);
      for (int n = 1 << 16; s == Step::kRan && atomics_ < stop && n > 0; --n) s = step();  // it may wait for the others
      exchange(parked[i]);
    }
  }
  std::vector<size_t> left;
  for (size_t i = count; i-- > 0;) left.push_back(i);
  size_t idle = 0;  // CTAs in a row that could not go on
  while (!left.empty()) {
    const size_t at = in_order && idle == 0 && random_() % 4 != 0 ? 0 : random_() % left.size();
    present_ = left[at];
    exchange(parked[present_]);
    Step s = step();
    idle = s == Step::kIdle ? idle + 1 : 0;
    if (s == Step::kIdle && idle > 64 * left.size()) violate(deadlock_report());
    for (u32 turn = 1u << random_() % 18; s == Step::kRan && turn > 0; --turn) s = step();
    if (s == Step::kDone) {
      end_of_cta();
      cluster_.ctas[present_].over = true;
    }
    exchange(parked[present_]);
    if (s == Step::kDone) left.erase(left.begin() + static_cast<std::ptrdiff_t>(at));
  }
  touched_ = Device::checks_plain_accesses() ? shared_bytes_ : kMaxShared;
  if (parked_.size() > kKept) parked_.resize(kKept);
}

void Machine::end_of_cta() {
  if (!copies_.empty()) violate("the CTA ends with bulk copies under way");
  for (const auto& [address, b] : barriers_) {
    if (b.bytes != 0) violate(fmt::format("the CTA ends while mbarrier {} still expects {} bytes", address, b.bytes));
  }
  const u8* beyond = arena_ + shared_bytes_;
  if (shared_bytes_ < kMaxShared &&
      (*beyond != 0xff || std::memcmp(beyond, beyond + 1, kMaxShared - shared_bytes_ - 1) != 0)) {
    beyond = std::find_if(beyond, static_cast<const u8*>(arena_ + kMaxShared), [](u8 b) { return b != 0xff; });
    violate(fmt::format("shared memory was written at byte {}, beyond the planned {}", beyond - arena_, shared_bytes_));
  }
  for (size_t w = 0; w + 3 < warps_.size(); w += 4) {
    for (size_t i = 1; i < 4; ++i) {
      if (warps_[w + i].wgmma_issued != warps_[w].wgmma_issued) {
        violate("the warps of a warpgroup issued different numbers of wgmma");
      }
    }
  }
}

std::string Machine::deadlock_report() {
  std::string text = "deadlock:";
  std::map<std::string, std::vector<int>> reasons;
  for (const Thread& t : threads_) {
    if (t.done) continue;
    std::string reason = t.waiting == nullptr ? "nothing" : t.waiting;
    if (reason == "mbarrier_wait") {
      const auto it = barriers_.find(t.waiting_on);
      const Barrier* b = it == barriers_.end() ? nullptr : &it->second;
      reason += fmt::format(" {} parity {} (phase {}, {} arrivals and {} bytes missing)", t.waiting_on,
                            t.waiting_parity, b ? b->phase : 0, b ? b->pending : 0, b ? b->bytes : 0);
    }
    reasons[fmt::format("{} at {}", reason, t.site.text())].push_back(t.index);
  }
  for (const auto& [reason, who] : reasons) {
    text += fmt::format("\n  {} thread{} wait{} for {}: ", who.size(), who.size() == 1 ? "" : "s",
                        who.size() == 1 ? "s" : "", reason);
    for (size_t i = 0; i < std::min<size_t>(who.size(), 8); ++i) text += fmt::format("{}{}", i ? ", " : "", who[i]);
    if (who.size() > 8) text += ", ...";
  }
  return text;
}

// ---- launches -------------------------------------------------------------------------------------------------------

LaunchStats Machine::launch(const LaunchConfig& config, const std::function<void()>& body) {
  if (launching != nullptr) throw std::logic_error("executor: one launch at a time");
  if (config.threads < 1 || config.threads > static_cast<int>(kMaxThreads) || config.threads % 32 != 0) {
    throw Violation(
        fmt::format("{}: {} threads, wanted whole warps up to {}", config.name, config.threads, kMaxThreads));
  }
  if (config.shared_bytes > kMaxShared) {
    throw Violation(
        fmt::format("{}: {} bytes of shared memory, more than {}", config.name, config.shared_bytes, kMaxShared));
  }
  launching = this;
  ++launch_index_;
  config_ = config;
  stats_ = {};
  failed_ = false;
  shared_bytes_ = config.shared_bytes;
  programmatic_ = config.programmatic;
  threads_n_ = static_cast<u32>(config.threads);
  // What this kernel may touch before it waits: results of launches that had ended when it could start.
  settled_launch_ = !programmatic_ ? launch_index_ - 1 : released_early_ ? settled_launch_ : launch_index_ - 2;
  released_early_ = false;
  blockDim = {static_cast<unsigned>(config.threads), 1, 1};
  gridDim = {config.grid.x, config.grid.y, config.grid.z};
  std::vector<Index3> order;
  for (unsigned z = 0; z < config.grid.z; ++z)
    for (unsigned y = 0; y < config.grid.y; ++y)
      for (unsigned x = 0; x < config.grid.x; ++x) order.push_back({x, y, z});
  const size_t cluster = static_cast<size_t>(std::max(1, config.cluster));
  if (config.grid.x % cluster != 0 || (cluster > 1 && config.resident > 1)) {
    launching = nullptr;
    throw Violation(fmt::format("{}: {} CTAs in clusters of {}", config.name, config.grid.x, cluster));
  }
  if (cluster == 1) {
    std::shuffle(order.begin(), order.end(), random_);
  } else {  // whole clusters, whose CTAs stay in order
    std::vector<size_t> firsts;
    for (size_t i = 0; i < order.size(); i += cluster) firsts.push_back(i);
    std::shuffle(firsts.begin(), firsts.end(), random_);
    const std::vector<Index3> before = order;
    size_t at = 0;
    for (const size_t first : firsts) {
      for (size_t i = 0; i < cluster; ++i) order[at++] = before[first + i];
    }
  }
  if (tls_begin_ != nullptr) tls_saved_.assign(tls_begin_, tls_end_);
  const auto restore = [&] {
    if (tls_begin_ != nullptr) std::memcpy(tls_begin_, tls_saved_.data(), tls_saved_.size());
    launching = nullptr;
    current_ = nullptr;
  };
  try {
    body_ = &body;
    atomics_ = 0;
    first_write_ += static_cast<u32>(writes_.size());
    writes_.clear();
    released_.clear();
    orders_.assign(order.size(), {});
    const size_t together = std::max(cluster, static_cast<size_t>(std::max(1, config.resident)));
    for (size_t i = 0; i < order.size(); i += together) {
      run_together(order.data() + i, std::min(together, order.size() - i));
    }
    if (!Device::checks_plain_accesses()) check_canaries();
  } catch (...) {
    restore();
    touched_ = marked_ = kMaxShared;
    parked_.clear();
    throw;
  }
  restore();
  return stats_;
}

Device::Device(const Options& options) : machine_(std::make_unique<Machine>(options)) {}
Device::~Device() = default;
void* Device::alloc_bytes(std::size_t bytes, const std::string& name) { return machine_->allocate(bytes, name, true); }
void* Device::reserve(std::size_t bytes, const std::string& name) { return machine_->allocate(bytes, name, false); }
void Device::release(const void* buffer) { machine_->release(buffer); }
void Device::make_constant(const void* buffer) { machine_->buffer_at(buffer)->constant = true; }
void Device::produced(const void* buffer) { machine_->produced(buffer); }
LaunchStats Device::launch(const LaunchConfig& config, const std::function<void()>& body) {
  return machine_->launch(config, body);
}
const std::set<SeenSite>& Device::seen() const { return machine_->seen_; }

// ---- global memory --------------------------------------------------------------------------------------------------

u8* Machine::allocate(std::size_t bytes, const std::string& name, bool fill) {
  bytes = std::max<std::size_t>(bytes, 1);
  global_used_ += kGranule;  // a red zone between any two
  const std::size_t whole = (bytes + kGranule - 1) / kGranule * kGranule;
  if (global_used_ + whole + kGranule > kGlobalBytes) throw std::runtime_error("executor: out of global addresses");
  u8* p = global_begin_ + global_used_;
  if (fill) std::memset(p, 0xff, whole);
  buffers_.push_back(std::make_unique<Buffer>(Buffer{name, p, bytes, false, fill}));
  Buffer& b = *buffers_.back();
  while (bytes / b.piece > kMostPieces) b.piece *= 2;
  b.written.resize(bytes / b.piece + 1);
  b.read.resize(bytes / b.piece + 1);
  for (std::size_t g = global_used_ / kGranule; g < (global_used_ + whole) / kGranule; ++g) {
    granules_[g] = static_cast<u16>(buffers_.size());
  }
  global_used_ += whole;
  return p;
}

void Machine::release(const void* buffer) {
  Buffer* b = buffer_at(buffer);
  if (b == nullptr || b->freed) throw std::logic_error("executor: releases what is no buffer");
  const std::size_t whole = (b->bytes + kGranule - 1) / kGranule * kGranule;
  madvise(b->begin, whole, MADV_DONTNEED);
  b->marks.clear();
  b->freed = true;
}

Buffer* Machine::buffer_at(const void* p) {
  if (!in_global(p)) return nullptr;
  const u16 b = granules_[static_cast<std::size_t>(static_cast<const u8*>(p) - global_begin_) / kGranule];
  return b == 0 ? nullptr : buffers_[b - 1u].get();
}

void Machine::global_access(const void* p, std::size_t bytes, Access access) {
  Thread& t = current();
  Buffer* b = buffer_at(p);
  if (b == nullptr) violate("an access to global memory outside every buffer");
  if (b->freed) violate(fmt::format("an access to `{}`, which was freed", b->name));
  const i64 at = static_cast<const u8*>(p) - b->begin;
  const bool write = access != Access::kRead;
  if (at < 0 || static_cast<std::size_t>(at) + bytes > b->bytes) {
    violate(fmt::format("a {} of {} bytes at byte {} of `{}`, which has {}", write ? "write" : "read", bytes, at,
                        b->name, b->bytes));
  }
  if (write && b->constant) violate(fmt::format("a write to `{}`, which is constant", b->name));
  const std::size_t last = (static_cast<std::size_t>(at) + std::max<std::size_t>(bytes, 1) - 1) / b->piece;
  for (std::size_t i = static_cast<std::size_t>(at) / b->piece; i <= last; ++i) {
    const int writer = b->written[i].other_than(launch_index_);
    const int newest = write ? std::max(writer, b->read[i].other_than(launch_index_)) : writer;
    if (newest > settled_launch_ && !ordered(kGridComponent, 1, t)) {
      violate(fmt::format(
          "a {} of `{}`, which the kernel before {} and may still be running: grid_dependency_wait is missing",
          write ? "write" : "read", b->name, newest == writer ? "writes" : "reads"));
    }
    (write ? b->written[i] : b->read[i]).set(launch_index_);
  }
  order_access(t, *b, static_cast<std::size_t>(at), bytes, access);
  if (access == Access::kAtomic) order_atomic(t, p);
}

void Machine::exchange_access(const void* p, std::size_t bytes) {
  const Buffer* b = buffer_at(p);
  if (b == nullptr) violate("an access to global memory outside every buffer");
  const i64 at = static_cast<const u8*>(p) - b->begin;
  if (at < 0 || static_cast<std::size_t>(at) + bytes > b->bytes || at % static_cast<i64>(bytes) != 0) {
    violate(fmt::format("exchanged words, {} bytes at byte {} of `{}`, which has {}", bytes, at, b->name, b->bytes));
  }
}

void Machine::check_canaries() {
  for (const auto& b : buffers_) {
    if (!b->filled || b->freed) continue;
    const std::size_t whole = (b->bytes + kGranule - 1) / kGranule * kGranule;
    for (std::size_t i = b->bytes; i < whole; ++i) {
      if (b->begin[i] != 0xff) violate(fmt::format("`{}` was written at byte {}, beyond its {}", b->name, i, b->bytes));
    }
  }
}

}  // namespace fourfold::executor
