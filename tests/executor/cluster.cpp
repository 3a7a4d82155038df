// Clusters: barriers of several CTAs, and stores to each other's shared memory.
#include <fmt/format.h>

#include <cstring>
#include <utility>

#include "executor/machine.h"
#include "kernels/ptx/sm90.cuh"

namespace fourfold::executor {

u8* Machine::shared_of(size_t cta, u32 address) {
  if (cta == present_) return shared(address);
  ParkedCta& parked = together_[cta];
  parked.dynamic_bytes.resize(shared_bytes_, 0xff);
  return parked.dynamic_bytes.data() + (address - kSharedBias);
}

Machine::ClusterCta& Machine::cluster_cta() {
  if (config_.cluster <= 1) violate("the launch has no clusters");
  return cluster_.ctas[present_];
}

// The stores to this CTA's shared memory that its cluster's barrier completes are those of `t`, which passes first.
void Machine::land_stores(Thread& t, ClusterCta& cta) {
  for (const ClusterStore& store : cta.landing) {
    const u32 offset = store.address - kSharedBias;
    shared_access(t, offset, sizeof(store.bits), Access::kWrite, "cluster_store");
    std::memcpy(shared(store.address), &store.bits, sizeof(store.bits));
  }
  cta.landing.clear();
}

}  // namespace fourfold::executor

namespace fourfold::ptx {

using namespace executor;

void cluster_arrive(Site site) {
  Machine& m = machine();
  Thread& t = m.enter(Op::kClusterArrive, site);
  if (m.mutated(Mutation::Kind::kDrop, Op::kClusterArrive, site)) return m.maybe_yield();
  Machine::ClusterCta& cta = m.cluster_cta();
  if (t.cluster_arrived != t.cluster_waited) m.violate("cluster_arrive: twice without a wait");
  ++t.cluster_arrived;
  cta.arriving = join(m.publish(t), cta.arriving);
  Machine::Cluster& cluster = m.cluster_;
  if (++cluster.arrived == cluster.threads) {
    cluster.arrived = 0;
    ++cluster.phase;
    for (Machine::ClusterCta& each : cluster.ctas) {
      each.completed = std::exchange(each.arriving, nullptr);
      each.landing = std::exchange(each.stores, {});
    }
  }
  m.maybe_yield();
}

void cluster_wait(Site site) {
  Machine& m = machine();
  Thread& t = m.enter(Op::kClusterWait, site);
  if (m.mutated(Mutation::Kind::kDrop, Op::kClusterWait, site)) return m.maybe_yield();
  Machine::ClusterCta& cta = m.cluster_cta();
  if (t.cluster_arrived == t.cluster_waited) m.violate("cluster_wait: without an arrival");
  constexpr int kPatience = 1 << 12;  // turns
  for (int look = 0; m.cluster_.phase < t.cluster_arrived; ++look) {
    if (look == kPatience) {
      m.violate(fmt::format("cluster_wait: {} of {} threads have arrived", m.cluster_.arrived, m.cluster_.threads));
    }
    m.block(kPeerWait, 0);
  }
  t.cluster_waited = t.cluster_arrived;
  m.acquire(t, cta.completed);
  if (!cta.landing.empty()) {
    m.land_stores(t, cta);
    cta.completed = join(m.publish(t), cta.completed);
  }
}

void cluster_store(u32 at, u32 to, float value, Site site) {
  Machine& m = machine();
  Thread& t = m.enter(site);
  m.cluster_cta();
  m.check_bounds(at, sizeof(float), sizeof(float), "cluster_store");
  if (to >= m.cluster_.ctas.size()) m.violate(fmt::format("cluster_store: to CTA {} of the cluster", to));
  if (m.cluster_.phase == 0 || t.cluster_waited == 0) {
    m.violate("cluster_store: to a CTA that may not have begun: no barrier of the cluster was waited for");
  }
  Machine::ClusterCta& target = m.cluster_.ctas[to];
  if (target.over) m.violate(fmt::format("cluster_store: CTA {} of the cluster has ended", to));
  Machine::ClusterStore store = {at, 0};
  std::memcpy(&store.bits, &value, sizeof(value));
  target.stores.push_back(store);
  // It lands at any time until then.
  const Delivery delivery = m.options().delivery;
  if (delivery == Delivery::kAtOnce || (delivery == Delivery::kRandom && m.coin())) {
    std::memcpy(m.shared_of(to, at), &value, sizeof(value));
  }
  m.maybe_yield();
}

}  // namespace fourfold::ptx
