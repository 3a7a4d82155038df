// Shared memory: bounds, the record of accesses, asynchronous copies. Plain loads and stores of kernels arrive here
// through hooks.cpp.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "executor/cuda.h"
#include "executor/machine.h"
#include "kernels/ptx/sm90.cuh"

namespace fourfold::executor {

unsigned char* dynamic_shared() { return machine().arena(); }

std::string Machine::region_of(u32 offset) const {
  return offset < kMaxShared ? fmt::format("byte {} of dynamic shared memory", offset)
                             : fmt::format("byte {} of static shared memory", offset - kMaxShared);
}

std::string Machine::name_of(u32 component) const {
  if (component < kMaxThreads) return fmt::format("thread {}", component);
  for (const auto& [address, b] : barriers_) {
    if (b.component == component) return fmt::format("a bulk copy that completes on mbarrier {}", address);
  }
  return "?";
}

void Machine::check_bounds(u32 address, u32 bytes, u32 align, const char* what) {
  if (address % align != 0) violate(fmt::format("{}: shared address {} is no multiple of {}", what, address, align));
  if (address < kSharedBias || address - kSharedBias + bytes > shared_bytes_) {
    violate(fmt::format("{}: {} bytes at offset {} of shared memory, of which {} were planned", what, bytes,
                        static_cast<i64>(address) - kSharedBias, shared_bytes_));
  }
  stats_.shared_high_water = std::max(stats_.shared_high_water, address - kSharedBias + bytes);
}

// ---- the record of accesses -----------------------------------------------------------------------------------------

void Machine::note_reader(Cell& c, u32 component, u32 epoch, Thread& t) {
  const u16 me = static_cast<u16>(component + 1);
  if (c.reader == 0 || c.reader == me) {
    c.reader = me;
    c.read_epoch = epoch;
    return;
  }
  if (c.reader != Cell::kMany) {
    if (ordered(c.reader - 1u, c.read_epoch, t)) {
      c.reader = me;
      c.read_epoch = epoch;
      return;
    }
    const Reader first{static_cast<u16>(c.reader - 1u), c.read_epoch};
    c.reader = Cell::kMany;
    c.read_epoch = readers_.take();
    readers_[c.read_epoch].readers.push_back(first);
    readers_[c.read_epoch].there.set(first.component);
  }
  ReaderLists::List& list = readers_[c.read_epoch];
  if (!list.there[component]) {
    t.reader = static_cast<u32>(list.readers.size());
    list.readers.push_back({static_cast<u16>(component), epoch});
    list.there.set(component);
    return;
  }
  // Where it was in the list of the cell before, it mostly is in this one.
  if (t.reader >= list.readers.size() || list.readers[t.reader].component != component) {
    t.reader = 0;
    while (list.readers[t.reader].component != component) ++t.reader;
  }
  list.readers[t.reader].epoch = epoch;
}

void Machine::forget_readers(Cell& c) {
  if (c.reader == Cell::kMany) readers_.give_back(c.read_epoch);
  c.reader = 0;
}

void Machine::check_write(Thread& t, Cell& c, u32 offset, Access access, const char* what) {
  const auto unordered_read = [&](u32 component, u32 epoch) {
    if (ordered(component, epoch, t)) return;
    violate(fmt::format("{} writes {} while nothing orders the last {} of {} before it", what, region_of(offset),
                        (c.flags & Cell::kAtomic) ? "atomic operation" : "read", name_of(component)));
  };
  if (c.flags & Cell::kInFlight) {
    violate(fmt::format("{} writes {}, which an asynchronous copy of thread {} is still writing", what,
                        region_of(offset), c.writer - 1));
  }
  const bool both_atomic = access == Access::kAtomic && (c.flags & Cell::kAtomic) != 0;
  if (both_atomic) return;
  if (c.writer != 0 && !ordered(c.writer - 1u, c.write_epoch, t)) {
    // Lanes of one warp may store the same value side by side.
    if (access == Access::kWrite && c.writer <= kMaxThreads && (c.writer - 1) / 32 == t.warp && !t.done) {
      u16 value;
      std::memcpy(&value, byte_at(offset / 2 * 2), 2);
      t.tentative.push_back({offset / 2 * 2, value});
    } else {
      violate(fmt::format("{} writes {} while nothing orders the last write of {} before it", what, region_of(offset),
                          name_of(c.writer - 1u)));
    }
  }
  if (c.reader == Cell::kMany) {
    for (const Reader& r : readers_[c.read_epoch].readers) unordered_read(r.component, r.epoch);
  } else if (c.reader != 0) {
    unordered_read(c.reader - 1u, c.read_epoch);
  }
}

void Machine::settle_tentative(Thread& t) {
  for (const Thread::Tentative& w : t.tentative) {
    u16 value;
    std::memcpy(&value, byte_at(w.offset), 2);
    if (value != w.value) {
      violate(fmt::format("two lanes of the warp write different values to {}", region_of(w.offset)));
    }
  }
  t.tentative.clear();
}

void Machine::shared_access(Thread& t, u32 offset, u32 bytes, Access access, const char* what) {
  if (offset >= kMaxShared) marked_static_ = std::max(marked_static_, offset + bytes - kMaxShared);
  for (u32 at = offset / 2 * 2; at < offset + bytes; at += 2) {
    Cell& c = cell(at);
    if (access == Access::kRead) {
      if (c.flags & Cell::kInFlight) {
        violate(fmt::format("{} reads {}, which an asynchronous copy of thread {} has not been waited for", what,
                            region_of(at), c.writer - 1));
      }
      if (c.writer != 0 && !ordered(c.writer - 1u, c.write_epoch, t)) {
        violate(fmt::format("{} reads {} while nothing orders the last write of {} before it", what, region_of(at),
                            name_of(c.writer - 1u)));
      }
      note_reader(c, component_of(t), t.own, t);
      continue;
    }
    check_write(t, c, at, access, what);
    c.writer = static_cast<u16>(t.index + 1);
    c.write_epoch = t.own;
    c.flags = static_cast<u8>(Cell::kUnfenced | (access == Access::kAtomic ? Cell::kAtomic : 0));
    if (access == Access::kAtomic) {
      note_reader(c, component_of(t), t.own, t);
    } else {
      forget_readers(c);
    }
  }
  if (access != Access::kRead && offset < kMaxShared) t.unfenced.push_back({offset, nullptr, bytes});
}

// A read through the asynchronous proxy: what ordinary stores wrote must have been fenced by their threads.
void Machine::proxy_read(Thread& t, u32 offset, u32 bytes, const char* what) {
  for (u32 at = offset; at < offset + bytes; at += 2) {
    if (cell(at).flags & Cell::kUnfenced) {
      violate(fmt::format("{} reads byte {} of shared memory, which thread {} wrote without fence_async_shared", what,
                          at, cell(at).writer - 1));
    }
  }
  shared_access(t, offset, bytes, Access::kRead, what);
}

void Machine::set_read_epoch(Cell& c, u32 component, u32 epoch) {
  if (c.reader == component + 1) c.read_epoch = epoch;
  if (c.reader != Cell::kMany) return;
  for (Reader& r : readers_[c.read_epoch].readers) {
    if (r.component == component) r.epoch = epoch;
  }
}

void Machine::engine_write(Thread& issuer, u32 offset, u32 bytes, u32 component, u32 epoch, u8 flags,
                           const char* what) {
  for (u32 at = offset; at < offset + bytes; at += 2) {
    Cell& c = cell(at);
    check_write(issuer, c, at, Access::kEngine, what);
    c.writer = static_cast<u16>(component + 1);
    c.write_epoch = epoch;
    forget_readers(c);
    c.flags = flags;
  }
  std::memset(arena_ + offset, 0xff, bytes);  // what may be seen until the copy has landed
}

void Machine::plain_access(const void* p, std::size_t bytes, Access access) {
  if (!running()) return;
  if (in_global(p)) {
    if (access == Access::kAtomic) ++atomics_;
    return global_access(p, bytes, access);
  }
  const i64 offset = shared_offset(p);
  if (offset < 0) return;
  Thread& t = current();
  if (!t.tentative.empty()) settle_tentative(t);
  if (offset < kMaxShared) {
    const u32 end = static_cast<u32>(offset) + static_cast<u32>(bytes);
    if (end > shared_bytes_) {
      violate(
          fmt::format("a plain access to byte {} of shared memory, of which {} were planned", end - 1, shared_bytes_));
    }
    stats_.shared_high_water = std::max(stats_.shared_high_water, end);
  }
  shared_access(t, static_cast<u32>(offset), static_cast<u32>(bytes), access,
                access == Access::kAtomic ? "an atomic operation" : "a plain access");
}

void check_read(const void* address, std::size_t bytes) { machine().plain_access(address, bytes, Access::kRead); }

// ---- bulk copies ----------------------------------------------------------------------------------------------------

void Machine::deliver(size_t index) {
  const BulkCopy copy = copies_[index];
  copies_[index] = copies_.back();
  copies_.pop_back();
  if (copy.swizzled) {
    u8 row[128] = {};
    std::memcpy(row, copy.source, copy.there);
    for (u32 piece = 0; piece < 8; ++piece) {
      std::memcpy(shared(copy.destination + (piece ^ (copy.destination / 128 % 8)) * 16), row + piece * 16, 16);
    }
  } else {
    std::memcpy(shared(copy.destination), copy.source, copy.bytes);
  }
  Barrier& b = barriers_.at(copy.barrier);
  b.bytes -= copy.bytes;
  if (b.pending == 0) complete_if_done(b);
}

bool Machine::deliver_for_idle() {
  // A thread that waits for an asynchronous operation of its own runs before copies land.
  bool any = false;
  for (Thread& t : threads_) {
    if (!t.done && t.waiting == kIdleWait) {
      wake(t);
      any = true;
    }
  }
  if (any) return true;
  if (copies_.empty()) return false;
  // The last allowed moment: prefer what somebody waits for.
  std::vector<u32> awaited;
  for (const Thread& t : threads_) {
    if (!t.done && t.waiting != nullptr && (awaited.empty() || awaited.back() != t.waiting_on)) {
      awaited.push_back(t.waiting_on);
    }
  }
  std::vector<size_t> wanted;
  for (size_t i = 0; i < copies_.size(); ++i) {
    if (std::find(awaited.begin(), awaited.end(), copies_[i].barrier) != awaited.end()) wanted.push_back(i);
  }
  deliver(wanted.empty() ? random_() % copies_.size() : wanted[random_() % wanted.size()]);
  return true;
}

// ---- tensor maps ----------------------------------------------------------------------------------------------------

namespace {
struct HostMap {  // what a TensorMap holds here
  u64 mark, first, rows, columns, stride, copied;
};
constexpr u64 kMapMark = 0x70616d20776f7220;
}  // namespace

ptx::TensorMap make_tensor_map(const void* first, std::uint64_t rows, std::uint64_t columns, std::uint64_t stride,
                               std::uint64_t copied) {
  ptx::TensorMap map = {};
  const HostMap host = {kMapMark, reinterpret_cast<u64>(first), rows, columns, stride, copied};
  std::memcpy(&map, &host, sizeof(host));
  return map;
}

}  // namespace fourfold::executor

using namespace fourfold::executor;

namespace fourfold::ptx {

u32 shared_address(const void* p) {
  Machine& m = machine();
  const i64 offset = m.shared_offset(p);
  if (offset < 0 || offset >= kMaxShared) m.violate("shared_address of something outside dynamic shared memory");
  return kSharedBias + static_cast<u32>(offset);
}

namespace {
void start_copy(Machine& m, Thread& t, BulkCopy copy, const char* what) {
  Barrier& b = m.barrier_at(copy.barrier, what);
  if (!b.fenced) m.violate(fmt::format("{}: fence_barrier_init is missing after the mbarrier's initialisation", what));
  m.engine_write(t, copy.destination - kSharedBias, copy.bytes, b.component, b.phase + 1, 0, what);
  copy.phase = b.phase;
  m.copies_.push_back(copy);
  ++m.stats_.bulk_copies;
  if (m.options().delivery == Delivery::kAtOnce) m.deliver(m.copies_.size() - 1);
  m.maybe_yield();
}
}  // namespace

void bulk_copy(u32 destination, const void* source, u32 bytes, u32 bar, u64, Site site) {
  Machine& m = machine();
  Thread& t = m.enter(Op::kBulkCopy, site);
  if (m.mutated(Mutation::Kind::kDrop, Op::kBulkCopy, site)) return;
  if (bytes == 0 || bytes % 16 != 0) m.violate(fmt::format("bulk_copy of {} bytes, no multiple of 16", bytes));
  if (reinterpret_cast<std::uintptr_t>(source) % 16 != 0) m.violate("bulk_copy: the source is not aligned to 16");
  m.check_bounds(destination, bytes, 16, "bulk_copy");
  m.global_access(source, bytes, Access::kRead);
  start_copy(m, t, {destination, static_cast<const u8*>(source), bytes, bar, 0, false, 0}, "bulk_copy");
}

// ---- tensor copies --------------------------------------------------------------------------------------------------

void prefetch_tensor_map(const TensorMap&, Site site) { machine().enter(site); }

namespace {

void copy_rows(Machine& m, Thread& t, u32 destination, const TensorMap& map, int column, int row, int rows, u32 bar,
               const char* what) {
  HostMap host;
  std::memcpy(&host, &map, sizeof(host));
  if (host.mark != kMapMark) m.violate(fmt::format("{}: this is no tensor map", what));
  if (host.first % 16 != 0 || host.stride % 16 != 0) m.violate(fmt::format("{}: rows are not aligned to 16", what));
  if (host.copied != static_cast<u64>(rows)) {
    m.violate(fmt::format("{}: {} rows of a map that copies {}", what, rows, host.copied));
  }
  m.check_bounds(destination, static_cast<u32>(rows) * 128, 128, what);
  if (column < 0) m.violate(fmt::format("{}: columns that begin outside the matrix", what));
  for (int i = 0; i < rows; ++i) {
    const i64 at = i64{row} + i;
    u32 there = 0;  // bytes; what lies outside is zero
    if (at >= 0 && static_cast<u64>(at) < host.rows && static_cast<u64>(column) < host.columns) {
      there = static_cast<u32>(std::min<u64>(host.columns - static_cast<u64>(column), 64)) * 2;
    }
    const u8* source = reinterpret_cast<const u8*>(host.first);
    if (there != 0) {
      source += static_cast<u64>(at) * host.stride + static_cast<u64>(column) * 2;
      m.global_access(source, there, Access::kRead);
    }
    start_copy(m, t, {destination + static_cast<u32>(i) * 128, source, 128, bar, 0, true, there}, what);
  }
}

}  // namespace

void tensor_copy_row(u32 destination, const TensorMap& map, int column, int row, u32 bar, Site site) {
  Machine& m = machine();
  Thread& t = m.enter(Op::kBulkCopy, site);
  if (m.mutated(Mutation::Kind::kDrop, Op::kBulkCopy, site)) return;
  copy_rows(m, t, destination, map, column, row, 1, bar, "tensor_copy_row");
}

void tensor_copy_rows(u32 destination, const TensorMap& map, int column, int row, int rows, u32 bar, Site site) {
  Machine& m = machine();
  Thread& t = m.enter(Op::kBulkCopy, site);
  if (m.mutated(Mutation::Kind::kDrop, Op::kBulkCopy, site)) return;
  copy_rows(m, t, destination, map, column, row, rows, bar, "tensor_copy_rows");
}

bool one_lane(Site site) { return machine().enter(site).lane == 0; }

// ---- bulk stores ----------------------------------------------------------------------------------------------------

namespace {
void read_now(Machine& m, BulkStore& b) {
  if (b.read) return;
  b.read = true;
  b.data.assign(m.arena() + b.offset, m.arena() + b.offset + b.bytes);
}
}  // namespace

void bulk_store(void* destination, u32 source, u32 bytes, Site site) {
  Machine& m = machine();
  Thread& t = m.enter(Op::kBulkStore, site);
  if (m.mutated(Mutation::Kind::kDrop, Op::kBulkStore, site)) return;
  if (bytes == 0 || bytes % 16 != 0) m.violate(fmt::format("bulk_store of {} bytes, no multiple of 16", bytes));
  if (reinterpret_cast<std::uintptr_t>(destination) % 16 != 0) {
    m.violate("bulk_store: the destination is not aligned to 16");
  }
  m.check_bounds(source, bytes, 16, "bulk_store");
  m.global_access(destination, bytes, Access::kWrite);
  const u32 offset = source - kSharedBias;
  m.proxy_read(t, offset, bytes, "bulk_store");
  for (u32 at = offset; at < offset + bytes; at += 2)
    m.set_read_epoch(m.cell(at), m.component_of(t), Cell::kStillReading);
  t.open_stores.push_back({static_cast<u8*>(destination), offset, bytes, false, false, {}});
  if (m.options().delivery == Delivery::kAtOnce) read_now(m, t.open_stores.back());
}

void bulk_store_commit(Site site) {
  Machine& m = machine();
  Thread& t = m.enter(Op::kBulkStoreCommit, site);
  if (m.mutated(Mutation::Kind::kDrop, Op::kBulkStoreCommit, site)) return;
  for (BulkStore& b : t.open_stores) {
    if (m.options().delivery == Delivery::kRandom && m.coin()) read_now(m, b);
    t.stores.push_back(std::move(b));
  }
  t.open_stores.clear();
  m.maybe_yield();
}

namespace {
void wait_for_stores(Machine& m, Thread& t, bool written) {
  if (!t.stores.empty()) m.wait_for_idle();
  for (BulkStore& b : t.stores) {
    read_now(m, b);
    if (!b.waited) {
      for (u32 at = b.offset; at < b.offset + b.bytes; at += 2) m.set_read_epoch(m.cell(at), m.component_of(t), t.own);
    }
    b.waited = true;
    if (written) std::memcpy(b.destination, b.data.data(), b.data.size());
  }
  if (written) t.stores.clear();
}
}  // namespace

void bulk_store_wait_read(Site site) {
  Machine& m = machine();
  Thread& t = m.enter(Op::kBulkStoreWait, site);
  if (m.mutated(Mutation::Kind::kDrop, Op::kBulkStoreWait, site)) return;
  wait_for_stores(m, t, false);
}

void bulk_store_wait(Site site) {
  Machine& m = machine();
  Thread& t = m.enter(Op::kBulkStoreWait, site);
  if (m.mutated(Mutation::Kind::kDrop, Op::kBulkStoreWait, site)) return;
  wait_for_stores(m, t, true);
}

// ---- cp.async -------------------------------------------------------------------------------------------------------

namespace {
void land(Machine& m, CopyGroup& g) {
  if (g.done) return;
  g.done = true;
  for (const Piece& p : g.pieces) {
    std::memcpy(m.arena() + p.offset, p.source, p.bytes);
  }
}
// From here on the thread itself sees the bytes, and whoever it lets know.
void settle(Machine& m, Thread& t, CopyGroup& g) {
  land(m, g);
  for (const Piece& p : g.pieces) {
    for (u32 at = p.offset; at < p.offset + p.bytes; at += 2) {
      Cell& c = m.cell(at);
      if (c.writer != t.index + 1 || (c.flags & Cell::kInFlight) == 0) continue;
      c.write_epoch = t.own;
      c.flags = Cell::kUnfenced;
    }
    t.unfenced.push_back({p.offset, nullptr, p.bytes});
  }
}
}  // namespace

namespace {
void async_copy(u32 destination, const void* source, u32 bytes, Site site, const char* what) {
  Machine& m = machine();
  Thread& t = m.enter(site);
  if (reinterpret_cast<std::uintptr_t>(source) % bytes != 0) {
    m.violate(fmt::format("{}: the source is not aligned to {}", what, bytes));
  }
  m.check_bounds(destination, bytes, bytes, what);
  m.global_access(source, bytes, Access::kRead);
  m.engine_write(t, destination - kSharedBias, bytes, m.component_of(t), t.own, Cell::kInFlight, what);
  t.open_group.pieces.push_back({destination - kSharedBias, static_cast<const u8*>(source), bytes});
}
}  // namespace

void async_copy16(u32 destination, const void* source, Site site) {
  async_copy(destination, source, 16, site, "async_copy16");
}
void async_copy8(u32 destination, const void* source, Site site) {
  async_copy(destination, source, 8, site, "async_copy8");
}
void async_copy4(u32 destination, const void* source, Site site) {
  async_copy(destination, source, 4, site, "async_copy4");
}

void async_copy_commit(Site site) {
  Machine& m = machine();
  Thread& t = m.enter(Op::kAsyncCopyCommit, site);
  if (m.mutated(Mutation::Kind::kDrop, Op::kAsyncCopyCommit, site)) return;
  t.groups.push_back(std::move(t.open_group));
  t.open_group = {};
  if (m.options().delivery == Delivery::kAtOnce) land(m, t.groups.back());
  if (m.options().delivery == Delivery::kRandom && m.coin()) {
    for (CopyGroup& g : t.groups) land(m, g);
  }
  m.maybe_yield();
}

void async_copy_wait_groups(int pending, Site site) {
  Machine& m = machine();
  Thread& t = m.enter(Op::kAsyncCopyWait, site);
  if (m.mutated(Mutation::Kind::kDrop, Op::kAsyncCopyWait, site)) return;
  if (m.mutated(Mutation::Kind::kWeaken, Op::kAsyncCopyWait, site)) ++pending;
  const size_t keep = static_cast<size_t>(pending);
  if (t.groups.size() > keep) {
    m.wait_for_idle();
    const size_t n = t.groups.size() - keep;
    for (size_t i = 0; i < n; ++i) settle(m, t, t.groups[i]);
    t.groups.erase(t.groups.begin(), t.groups.begin() + static_cast<std::ptrdiff_t>(n));
  }
}

void fence_async_shared(Site site) {
  Machine& m = machine();
  Thread& t = m.enter(Op::kAsyncFence, site);
  if (m.mutated(Mutation::Kind::kDrop, Op::kAsyncFence, site)) return;
  for (const Piece& p : t.unfenced) {
    for (u32 at = p.offset / 2 * 2; at < p.offset + p.bytes; at += 2) {
      Cell& c = m.cell(at);
      if (c.writer == t.index + 1) c.flags = static_cast<u8>(c.flags & ~Cell::kUnfenced);
    }
  }
  t.unfenced.clear();
}

// ---- shared loads ---------------------------------------------------------------------------------------------------

namespace {
template <typename T>
T load_shared(u32 address, Site site, const char* what) {
  Machine& m = machine();
  Thread& t = m.enter(site);
  m.check_bounds(address, sizeof(T), sizeof(T), what);
  m.shared_access(t, address - kSharedBias, sizeof(T), Access::kRead, what);
  T v;
  std::memcpy(&v, m.shared(address), sizeof(T));
  return v;
}
}  // namespace

Vec4 load_shared4(u32 address, Site site) { return load_shared<Vec4>(address, site, "load_shared4"); }
Vec2 load_shared2(u32 address, Site site) { return load_shared<Vec2>(address, site, "load_shared2"); }
u32 load_shared1(u32 address, Site site) { return load_shared<u32>(address, site, "load_shared1"); }

}  // namespace fourfold::ptx

// ---- atomics --------------------------------------------------------------------------------------------------------

namespace {
template <typename T, typename F>
T atomic(T* address, Site site, F change) {
  Machine& m = machine();
  m.enter(site);
  m.maybe_yield();
  m.plain_access(address, sizeof(T), Access::kAtomic);
  const T old = *address;
  *address = change(old);
  return old;
}
}  // namespace

int atomicAdd(int* p, int v, Site site) {
  return atomic(p, site, [&](int old) { return old + v; });
}
unsigned atomicAdd(unsigned* p, unsigned v, Site site) {
  return atomic(p, site, [&](unsigned old) { return old + v; });
}
unsigned long long atomicAdd(unsigned long long* p, unsigned long long v, Site site) {
  return atomic(p, site, [&](unsigned long long old) { return old + v; });
}
float atomicAdd(float* p, float v, Site site) {
  return atomic(p, site, [&](float old) { return old + v; });
}
unsigned atomicOr(unsigned* p, unsigned v, Site site) {
  return atomic(p, site, [&](unsigned old) { return old | v; });
}
int atomicMax(int* p, int v, Site site) {
  return atomic(p, site, [&](int old) { return std::max(old, v); });
}
unsigned atomicMax(unsigned* p, unsigned v, Site site) {
  return atomic(p, site, [&](unsigned old) { return std::max(old, v); });
}
unsigned long long atomicMax(unsigned long long* p, unsigned long long v, Site site) {
  return atomic(p, site, [&](unsigned long long old) { return std::max(old, v); });
}
int atomicExch(int* p, int v, Site site) {
  return atomic(p, site, [&](int) { return v; });
}
int atomicCAS(int* p, int expected, int v, Site site) {
  return atomic(p, site, [&](int old) { return old == expected ? v : old; });
}
