// Order in global memory within one launch: who may read what another thread wrote. Between CTAs a write can be relied
// on after
//
//   __threadfence() behind it, an atomic operation behind that, an atomic operation of the other CTA on the same word
//   that sees it, and __threadfence() in front of the read,
//
// where "behind" goes through barriers too. Whoever reads without this chain is reported under any schedule, whatever
// it finds in memory: on the device it may find what was there before. Within a CTA its barriers are enough.
#include <fmt/format.h>

#include <algorithm>

#include "executor/cuda.h"
#include "executor/machine.h"

namespace fourfold::executor {
namespace {

void merge(Known& into, const Known& from) {
  for (const auto& [cta, clock] : from) into[cta] = join(into[cta], clock);
}

}  // namespace

u32 Machine::cta_index() const { return (cta_.z * config_.grid.y + cta_.y) * config_.grid.x + cta_.x; }

bool Machine::happened(const CtaEvent& event, const Thread& t) const {
  return event.thread == static_cast<u32>(t.index) || ordered(event.thread, event.epoch, t);
}

bool Machine::knows(const Thread& t, const Write& write) const {
  if (write.cta == cta_index()) {
    return write.thread == static_cast<u32>(t.index) || ordered(write.thread, write.epoch, t);
  }
  const std::vector<CtaEvent>& acquired = orders_[cta_index()].acquired;
  return std::any_of(acquired.rbegin(), acquired.rend(), [&](const CtaEvent& event) {
    const auto clock = event.known.find(write.cta);
    return clock != event.known.end() && (*clock->second)[place(write.thread)] >= write.epoch && happened(event, t);
  });
}

void Machine::fence(Thread& t) {
  CtaOrder& order = orders_[cta_index()];
  CtaEvent fence{static_cast<u32>(t.index), t.own, {}};
  const Clock clock = publish(t);
  for (const std::vector<CtaEvent>* events : {&order.seen, &order.acquired}) {
    for (const CtaEvent& event : *events) {
      if (happened(event, t)) merge(fence.known, event.known);
    }
  }
  if (!fence.known.empty()) order.acquired.push_back(fence);
  Clock& own = fence.known[cta_index()];
  own = join(own, clock);
  order.fenced.push_back(std::move(fence));
}

void Machine::order_atomic(Thread& t, const void* p) {
  CtaOrder& order = orders_[cta_index()];
  const auto found = released_.find(p);
  if (found != released_.end() && !found->second.empty()) {
    order.seen.push_back({static_cast<u32>(t.index), t.own, found->second});
    publish(t);
  }
  for (const CtaEvent& fence : order.fenced) {
    if (happened(fence, t)) merge(released_[p], fence.known);
  }
}

void Machine::order_access(Thread& t, Buffer& buffer, std::size_t at, std::size_t bytes, Access access) {
  constexpr std::size_t kPage = 4096;
  const bool write = access != Access::kRead;
  if (buffer.marks.empty()) {
    if (!write) return;
    buffer.marks.resize((buffer.bytes + kPage - 1) / kPage);
  }
  if (write && (t.write == 0 || t.write_epoch != t.own || t.write_access != access)) {
    writes_.push_back({cta_index(), static_cast<u32>(t.index), t.own, access == Access::kAtomic});
    t.write = first_write_ + static_cast<u32>(writes_.size()) - 1;
    t.write_epoch = t.own;
    t.write_access = access;
  }
  u32 checked = 0;
  for (std::size_t i = at; i < at + bytes; ++i) {
    auto& page = buffer.marks[i / kPage];
    if (page == nullptr) {
      if (!write) continue;
      page = std::make_unique<u32[]>(kPage);
    }
    u32& mark = page[i % kPage];
    if (mark >= first_write_ && mark != checked) {
      checked = mark;
      const Write& last = writes_[mark - first_write_];
      // What others change atomically may be overwritten by whom the last result of an atomic operation tells to.
      if (!(write && last.atomic) && !knows(t, last)) {
        violate(fmt::format(
            "a {} of `{}` at byte {}, which thread {} of CTA {} wrote in this launch: nothing orders the two{}",
            write ? "write" : "read", buffer.name, i, last.thread, last.cta,
            last.cta == cta_index()
                ? ""
                : " (wanted: __threadfence, an atomic operation, one that sees it, __threadfence)"));
      }
    }
    if (write) mark = t.write;
  }
}

}  // namespace fourfold::executor

void __threadfence(Site site) {
  using namespace fourfold::executor;
  Machine& m = machine();
  Thread& t = m.enter(Op::kFence, site);
  if (!m.mutated(Mutation::Kind::kDrop, Op::kFence, site)) m.fence(t);
}
