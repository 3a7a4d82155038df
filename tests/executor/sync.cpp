// Clocks, barriers, programmatic launch.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <span>

#include "executor/cuda.h"
#include "executor/machine.h"
#include "kernels/ptx/sm90.cuh"

namespace fourfold::executor {

// ---- clocks ---------------------------------------------------------------------------------------------------------

std::shared_ptr<std::vector<u32>> Machine::new_clock() {
  struct Pooled {
    explicit Pooled(Machine* machine) : of(machine) {
      if (of->spare_clocks_.empty()) return;
      values = std::move(of->spare_clocks_.back());
      of->spare_clocks_.pop_back();
    }
    Pooled(const Pooled&) = delete;
    ~Pooled() { of->spare_clocks_.push_back(std::move(values)); }
    Machine* of;
    std::vector<u32> values;
  };
  auto owner = std::make_shared<Pooled>(this);
  std::vector<u32>* const clock = &owner->values;
  return {std::move(owner), clock};
}

std::shared_ptr<std::vector<u32>> Machine::copy_of(const Clock& clock) {
  auto copy = new_clock();
  copy->assign(clock->begin(), clock->end());
  return copy;
}

std::shared_ptr<std::vector<u32>> Machine::zero_clock() {
  auto clock = new_clock();
  clock->assign(place(kGridComponent) + 1, 0);
  return clock;
}

// Bit 0: an element of x is less than y's; bit 1: one is more.
FOURFOLD_CLONES static u32 compare_clocks(const u32* x, const u32* y, size_t n) {
  u32 less = 0, more = 0;
  for (size_t i = 0; i < n; ++i) {
    less |= static_cast<u32>(x[i] < y[i]);
    more |= static_cast<u32>(x[i] > y[i]);
  }
  return less | more << 1;
}

FOURFOLD_CLONES static void raise_clock(u32* x, const u32* y, size_t n) {
  for (size_t i = 0; i < n; ++i) x[i] = x[i] < y[i] ? y[i] : x[i];
}

Clock join(const Clock& a, const Clock& b) {
  if (a == b || b == nullptr) return a;
  if (a == nullptr) return b;
  const u32 differ = compare_clocks(a->data(), b->data(), a->size());
  if ((differ & 1u) == 0) return a;
  if (differ == 1) return b;
  auto result = machine().copy_of(a);
  raise_clock(result->data(), b->data(), b->size());
  return result;
}

Clock Machine::publish(Thread& t) {
  auto clock = copy_of(t.clock);
  (*clock)[place(component_of(t))] = t.own++;
  t.clock = clock;
  return clock;
}

void Machine::acquire(Thread& t, const Clock& clock) {
  Warp& w = warp_of(t);
  if (w.memo_a == t.clock && w.memo_b == clock) {
    t.clock = w.memo_result;
    return;
  }
  Clock joined = join(t.clock, clock);
  w.memo_a = t.clock;
  w.memo_b = clock;
  w.memo_result = joined;
  t.clock = std::move(joined);
}

void Machine::synchronise(const std::vector<Thread*>& threads) {
  Clock joined = threads.front()->clock;
  const Clock* last = &threads.front()->clock;  // neighbours mostly share one
  for (const Thread* t : threads) {
    if (t->clock != *last) joined = join(joined, t->clock);
    last = &t->clock;
  }
  auto all = copy_of(joined);
  for (Thread* t : threads) (*all)[place(component_of(*t))] = t->own++;
  for (Thread* t : threads) t->clock = all;
}

// ---- barriers of the CTA --------------------------------------------------------------------------------------------

void Machine::release_cta_barrier() {
  if (cta_barrier_.waiters.empty() || static_cast<int>(cta_barrier_.waiters.size()) < live_) return;
  std::vector<Thread*> all;
  std::swap(all, cta_barrier_.waiters);
  synchronise(all);
  for (Thread* t : all) {
    if (t != current_) wake(*t);
  }
}

Barrier& Machine::barrier_at(u32 address, const char* what) {
  const auto it = barriers_.find(address);
  if (it == barriers_.end()) violate(fmt::format("{}: no mbarrier was initialised at {}", what, address));
  Barrier& b = it->second;
  if (!ordered(b.owner, b.owner_epoch, current())) {
    violate(fmt::format("{}: nothing orders the initialisation of mbarrier {} before this", what, address));
  }
  return b;
}

void Machine::complete_if_done(Barrier& b) {
  if (b.pending > 0 || b.bytes != 0) return;
  if (b.pending < 0)
    violate(fmt::format("mbarrier {} got more arrivals than the {} it expects", b.address, b.expected));
  ++b.phase;
  auto clock = b.arriving == nullptr ? zero_clock() : copy_of(b.arriving);
  (*clock)[place(b.component)] = b.phase;
  b.completed = b.arriving = clock;
  b.pending = static_cast<int>(b.expected);
  for (Thread& t : threads_) {
    if (!t.done && t.waiting != nullptr && t.waiting_on == b.address &&
        std::string_view(t.waiting) == "mbarrier_wait" && (b.phase & 1u) != t.waiting_parity) {
      wake(t);
    }
  }
}

}  // namespace fourfold::executor

using namespace fourfold::executor;

void __syncthreads(Site site) {
  Machine& m = machine();
  Thread& t = m.enter(Op::kSyncThreads, site);
  if (m.mutated(Mutation::Kind::kDrop, Op::kSyncThreads, site)) return;
  m.cta_barrier_.waiters.push_back(&t);
  if (static_cast<int>(m.cta_barrier_.waiters.size()) == m.live_) {
    m.release_cta_barrier();
    m.maybe_yield();
  } else {
    m.block("__syncthreads", 0);
  }
}

void __syncwarp(unsigned mask, Site site) {
  Machine& m = machine();
  Thread& t = m.enter(Op::kSyncWarp, site);
  if (m.mutated(Mutation::Kind::kDrop, Op::kSyncWarp, site)) return m.maybe_yield();
  m.meet(t, Op::kSyncWarp, mask, site, &t, false, [&](const Rendezvous& r) {
    std::vector<Thread*> lanes;
    for (int i = 0; i < 32; ++i) {
      if (r.mask >> i & 1u) lanes.push_back(static_cast<Thread*>(r.payload[i]));
    }
    m.synchronise(lanes);
  });
}

namespace fourfold::ptx {

void barrier_sync(int id, int threads, Site site) {
  Machine& m = machine();
  Thread& t = m.enter(Op::kNamedBarrier, site);
  if (m.mutated(Mutation::Kind::kDrop, Op::kNamedBarrier, site)) return m.maybe_yield();
  if (id < 0 || id > 15 || threads % 32 != 0) m.violate(fmt::format("barrier_sync({}, {})", id, threads));
  NamedBarrier& b = m.named_[id];
  b.waiters.push_back(&t);
  if (static_cast<int>(b.waiters.size()) < threads) return m.block("barrier_sync", static_cast<u32>(id));
  std::vector<Thread*> all;
  std::swap(all, b.waiters);
  m.synchronise(all);
  for (Thread* other : all) {
    if (other != &t) m.wake(*other);
  }
  m.maybe_yield();
}

// ---- mbarriers ------------------------------------------------------------------------------------------------------

void mbarrier_init(u32 bar, u32 arrivals, Site site) {
  Machine& m = machine();
  Thread& t = m.enter(site);
  m.check_bounds(bar, 8, 8, "mbarrier_init");
  if (m.barriers_.count(bar) != 0) m.violate(fmt::format("mbarrier {} is initialised twice", bar));
  if (arrivals == 0 || arrivals >= (1u << 20)) m.violate(fmt::format("mbarrier {} with {} arrivals", bar, arrivals));
  if (m.barriers_.size() == kMaxBarriers) m.violate("too many mbarriers for the executor");
  m.shared_access(t, bar - kSharedBias, 8, Access::kWrite, "mbarrier_init");
  Barrier b;
  b.address = bar;
  b.component = kBarrierComponent + static_cast<u32>(m.barriers_.size());
  b.expected = arrivals;
  b.pending = static_cast<int>(arrivals);
  b.owner = m.component_of(t);
  b.owner_epoch = t.own;
  m.barriers_.emplace(bar, std::move(b));
}

void fence_barrier_init(Site site) {
  Machine& m = machine();
  Thread& t = m.enter(Op::kBarrierFence, site);
  if (m.mutated(Mutation::Kind::kDrop, Op::kBarrierFence, site)) return;
  for (auto& [address, b] : m.barriers_) {
    if (b.owner == m.component_of(t)) b.fenced = true;
  }
}

namespace {

constexpr int kPatience = 1 << 20;  // turns that a thread waits for what another one does
constexpr u32 kNotThere = 0xffffffffu;
void arrive(Machine& m, Thread& t, u32 bar) {
  Barrier& b = m.barrier_at(bar, "mbarrier_arrive");
  b.arriving = join(b.arriving, m.publish(t));
  --b.pending;
  if (b.pending < 0) m.violate(fmt::format("mbarrier {} got more arrivals than the {} it expects", bar, b.expected));
  m.complete_if_done(b);
}
}  // namespace

void mbarrier_arrive(u32 bar, Site site) {
  Machine& m = machine();
  Thread& t = m.enter(Op::kBarrierArrive, site);
  if (m.mutated(Mutation::Kind::kDrop, Op::kBarrierArrive, site)) return;
  if (const auto early = std::find(t.early_arrivals.begin(), t.early_arrivals.end(), bar);
      early != t.early_arrivals.end() && m.mutated(Mutation::Kind::kEarly, Op::kBarrierArrive, site)) {
    t.early_arrivals.erase(early);  // has arrived already
    return;
  }
  arrive(m, t, bar);
  m.maybe_yield();
}

void mbarrier_arrive_expect(u32 bar, u32 bytes, Site site) {
  Machine& m = machine();
  Thread& t = m.enter(Op::kBarrierArrive, site);
  if (m.mutated(Mutation::Kind::kDrop, Op::kBarrierArrive, site)) return;
  m.barrier_at(bar, "mbarrier_arrive_expect").bytes += bytes;
  arrive(m, t, bar);
  m.maybe_yield();
}

bool mbarrier_try_wait(u32 bar, u32 parity, Site site) {
  Machine& m = machine();
  Thread& t = m.enter(Op::kBarrierWait, site);
  Barrier& b = m.barrier_at(bar, "mbarrier_try_wait");
  if ((b.phase & 1u) == (parity & 1u)) {
    m.yield();
    return false;
  }
  if (b.completed != nullptr) m.acquire(t, b.completed);
  return true;
}

void mbarrier_wait(u32 bar, u32 parity, Site site) {
  Machine& m = machine();
  Thread& t = m.enter(Op::kBarrierWait, site);
  if (parity > 1) m.violate(fmt::format("mbarrier_wait with parity {}", parity));
  Barrier& b = m.barrier_at(bar, "mbarrier_wait");
  if (m.mutated(Mutation::Kind::kDrop, Op::kBarrierWait, site)) return m.maybe_yield();
  if ((b.phase & 1u) == parity) m.block("mbarrier_wait", bar, parity);
  if (b.completed != nullptr) m.acquire(t, b.completed);
  // "Early": the arrival that belongs after the reads comes right after the wait. Rings keep the barrier that is
  // arrived on behind the one that is waited for, as far as there are stages.
  const Mutation& mutation = m.options().mutation;
  if (mutation.kind == Mutation::Kind::kEarly && mutation.early_line == site.line && t.lane == 0 &&
      m.in_mutated_file(site)) {
    const u32 other = bar + 8u * static_cast<u32>(m.barriers_.size() / 2);
    t.early_arrivals.push_back(other);
    arrive(m, t, other);
  }
  m.maybe_yield();
}

// ---- programmatic dependent launch ----------------------------------------------------------------------------------

void grid_dependency_wait(Site site) {
  Machine& m = machine();
  Thread& t = m.enter(Op::kGridWait, site);
  if (m.mutated(Mutation::Kind::kDrop, Op::kGridWait, site)) return;
  auto clock = m.copy_of(t.clock);
  (*clock)[m.place(kGridComponent)] = 1;
  t.clock = clock;
  m.maybe_yield();
}

// Neither stores nor looks order anything, and neither needs to be ordered.
static void exchange(u32* p, std::span<const u32> words, Site site) {
  Machine& m = machine();
  m.enter(site);
  m.exchange_access(p, words.size_bytes());
  for (const u32 word : words) {
    if (word == kNotThere) m.violate("store_exchanged: all ones would never be seen");
  }
  std::copy(words.begin(), words.end(), p);
  m.maybe_yield();
}

void store_exchanged(u32* p, u32 word, Site site) { exchange(p, {&word, 1}, site); }

void store_exchanged2(u32* p, u32 x, u32 y, Site site) { exchange(p, std::array{x, y}, site); }

void store_exchanged4(u32* p, const Vec4& v, Site site) { exchange(p, std::array{v.x, v.y, v.z, v.w}, site); }

// Nor is a flag raised that is not up when it is waited for.
void raise_flag(int* flag, int count, int lane, Site site) {
  Machine& m = machine();
  m.enter(Op::kFlagRaise, site);
  if (m.mutated(Mutation::Kind::kDrop, Op::kFlagRaise, site) || lane != 0) return;
  m.plain_access(flag, sizeof(int), Access::kAtomic);
  *flag += count;
}

int wait_flags(const int* flag, int count, int value, int lane, Site site) {
  Machine& m = machine();
  Thread& t = m.enter(Op::kFlagWait, site);
  const bool down = lane >= count || *flag < value;
  const unsigned waiting = __ballot_sync(0xffffffffu, down, site);
  if (m.mutated(Mutation::Kind::kDrop, Op::kFlagWait, site)) return 1;
  if ((waiting & 1u) != 0) m.violate("wait_flags: the flag is down, and nobody is left to raise it");
  // What was stored before is there, as after grid_dependency_wait().
  auto clock = m.copy_of(t.clock);
  (*clock)[m.place(kGridComponent)] = 1;
  t.clock = clock;
  m.maybe_yield();
  return waiting == 0 ? 32 : __builtin_ctz(waiting);
}

// Between CTAs of one launch, which stand for cards here: a fence and an atomic operation, and the same the other way.
void raise_peer_flag(u32* flag, u32 value, Site site) {
  Machine& m = machine();
  Thread& t = m.enter(Op::kFlagRaise, site);
  m.maybe_yield();
  if (m.mutated(Mutation::Kind::kDrop, Op::kFlagRaise, site)) return;
  m.fence(t);
  m.plain_access(flag, sizeof(u32), Access::kAtomic);
  *flag = value;
}

bool wait_peer_flag(const u32* flag, u32 value, u64 patience, Site site) {
  Machine& m = machine();
  Thread& t = m.enter(Op::kFlagWait, site);
  if (m.mutated(Mutation::Kind::kDrop, Op::kFlagWait, site)) return true;
  for (u64 look = 0; look <= patience; ++look) {
    m.plain_access(flag, sizeof(u32), Access::kAtomic);
    if (static_cast<int>(*flag - value) >= 0) {
      m.fence(t);
      return true;
    }
    m.block(kPeerWait, 0);
  }
  return false;
}

void wait_count(const int* count, int value, Site site) {
  Machine& m = machine();
  Thread& t = m.enter(Op::kFlagWait, site);
  if (m.mutated(Mutation::Kind::kDrop, Op::kFlagWait, site)) return;
  for (int look = 0; look < kPatience; ++look) {
    m.plain_access(count, sizeof(int), Access::kAtomic);
    if (*count >= value) {
      m.fence(t);
      return;
    }
    m.block(kPeerWait, 0);
  }
  m.violate(fmt::format("wait_count: {} of {}, and nobody adds to it", *count, value));
}

// Whoever reads these bytes before they are written again shall notice.
void discard_l2(void* p, Site site) {
  Machine& m = machine();
  m.enter(site);
  if (reinterpret_cast<uintptr_t>(p) % 128 != 0) m.violate("discard_l2: no multiple of 128");
  m.plain_access(p, 128, Access::kWrite);
  std::memset(p, 0xff, 128);
  m.maybe_yield();
}

static void look_at_exchanged(const u32* p, int count, Site site) {
  Machine& m = machine();
  m.enter(site);
  m.exchange_access(p, static_cast<std::size_t>(count) * sizeof(u32));
  for (int look = 0; std::find(p, p + count, kNotThere) != p + count; ++look) {
    if (look == kPatience) m.violate("load_exchanged: a word is not there, and nobody stores it");
    m.block(kPeerWait, 0);
  }
  m.maybe_yield();
}

Vec2 load_exchanged2(const u32* p, Site site) {
  look_at_exchanged(p, 2, site);
  return {p[0], p[1]};
}

Vec4 load_exchanged4(const u32* p, Site site) {
  look_at_exchanged(p, 4, site);
  return {p[0], p[1], p[2], p[3]};
}

static void clear_exchanged(u32* p, std::size_t count, Site site) {
  Machine& m = machine();
  m.enter(site);
  m.exchange_access(p, count * sizeof(u32));
  std::fill_n(p, count, kNotThere);
}

void clear_exchanged2(u32* p, Site site) { clear_exchanged(p, 2, site); }

void clear_exchanged4(u32* p, Site site) { clear_exchanged(p, 4, site); }

void store_peer4(u32* p, const Vec4& v, Site site) {
  Machine& m = machine();
  m.enter(Op::kFlagRaise, site);
  m.maybe_yield();
  if (m.mutated(Mutation::Kind::kDrop, Op::kFlagRaise, site)) return;
  m.exchange_access(p, sizeof(v));
  if (std::count(p, p + 4, kNotThere) != 4) m.violate("store_peer4: what was stored before has not been taken");
  const u32 words[4] = {v.x, v.y, v.z, v.w};
  for (const u32 word : words) {
    if (word == kNotThere) m.violate("store_peer4: a word that says that it is not there");
  }
  std::copy_n(words, 4, p);
}

bool take_peer_words(Vec4* v, u32* const* places, int count, u64 patience, Site site) {
  Machine& m = machine();
  m.enter(Op::kFlagWait, site);
  const bool waits = !m.mutated(Mutation::Kind::kDrop, Op::kFlagWait, site);
  const std::span<u32* const> wanted(places, static_cast<std::size_t>(count));
  bool there = std::ranges::all_of(wanted, [](const u32* at) { return at == nullptr; });
  for (u64 look = 0; !there && look <= patience; ++look) {
    there = true;
    for (int i = 0; i < count; ++i) {
      const u32* at = places[i];
      if (at == nullptr) continue;
      m.exchange_access(at, sizeof(Vec4));
      v[i] = {at[0], at[1], at[2], at[3]};
      there = there && std::find(at, at + 4, kNotThere) == at + 4;
    }
    if (!waits) there = true;
    if (!there) m.block(kPeerWait, 0);
  }
  for (u32* at : wanted) {
    if (at != nullptr) std::fill_n(at, 4, kNotThere);
  }
  return there;
}

void grid_launch_dependents(Site site) {
  Machine& m = machine();
  Thread& t = m.enter(site);
  if (!m.ordered(kGridComponent, 1, t)) m.released_early_ = true;
}

}  // namespace fourfold::ptx
