// wgmma. Each warp of the group multiplies its 16 rows on its own, between the issue and the wait:
// until then its accumulators hold NaN and its fragments must stay as they were.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "executor/cuda.h"
#include "executor/machine.h"
#include "kernels/ptx/wgmma_sm90.cuh"

namespace fourfold::executor {
namespace {
constexpr u32 kUntouched = 0xffffffffu;  // what accumulators under way hold
}

void Machine::execute(Thread& t, WgmmaOp& op) {
  // 128-byte swizzle: rows of 128 bytes, 1024-byte atoms of eight rows, 16-byte chunk c at c ^ (row % 8).
  const auto read_row = [&](u64 descriptor, u32 row_block, u32 row, u32 chunk, float* to, size_t step) {
    if ((descriptor >> 62) != 1) violate("wgmma: the descriptor does not say 128-byte swizzle");
    const u32 start = static_cast<u32>(descriptor & 0x3fffu) << 4;
    const u32 linear = start + row_block + row * 128u + chunk * 16u;
    const u32 address = linear ^ ((linear >> 7 & 7u) << 4);
    check_bounds(address, 16, 16, "wgmma");
    proxy_read(t, address - kSharedBias, 16, "wgmma");
    u16 values[8];
    std::memcpy(values, shared(address), 16);
    for (u32 i = 0; i < 8; ++i) to[i * step] = nvfp4::bf16_to_float(values[i]);
  };
  const auto atom_stride = [](u64 descriptor) { return static_cast<u32>(descriptor >> 32 & 0x3fffu) << 4; };
  const auto columns = static_cast<size_t>(op.n);
  std::vector<float> b(16 * columns);  // [k][column]
  if (op.transposed) {                 // 16 rows of K, columns of N in blocks of 64
    const u32 block_stride = static_cast<u32>(op.descriptor >> 16 & 0x3fffu) << 4;
    for (u32 k = 0; k < 16; ++k) {
      for (u32 chunk = 0; chunk < static_cast<u32>(op.n) / 8; ++chunk) {
        read_row(op.descriptor, chunk / 8 * block_stride + k / 8 * atom_stride(op.descriptor), k % 8, chunk % 8,
                 b.data() + k * columns + chunk * 8, 1);
      }
    }
  } else {
    for (int n = 0; n < op.n; ++n) {
      for (u32 chunk = 0; chunk < 2; ++chunk) {
        read_row(op.descriptor, static_cast<u32>(n / 8) * atom_stride(op.descriptor), static_cast<u32>(n % 8), chunk,
                 b.data() + chunk * 8 * columns + static_cast<size_t>(n), columns);
      }
    }
  }
  float a[16][16];
  if (op.a_descriptor != 0) {  // the warp's 16 of 64 rows
    for (u32 row = 0; row < 16; ++row) {
      const u32 own = static_cast<u32>(t.warp % 4) * 16 + row;
      for (u32 chunk = 0; chunk < 2; ++chunk) {
        read_row(op.a_descriptor, own / 8 * atom_stride(op.a_descriptor), own % 8, chunk, a[row] + chunk * 8, 1);
      }
    }
  }
  for (int lane = 0; lane < 32 && op.a_descriptor == 0; ++lane) {
    if (std::memcmp(op.a[lane], op.a_issued[lane], 16) != 0) {
      violate(fmt::format("a fragment of the wgmma at {} was overwritten while it was under way", op.site.text()));
    }
    for (int i = 0; i < 4; ++i) {
      const u32 pair = op.a[lane][i];
      const int row = lane / 4 + 8 * (i % 2);
      const int k = lane % 4 * 2 + 8 * (i / 2);
      a[row][k] = nvfp4::bf16_to_float(static_cast<u16>(pair));
      a[row][k + 1] = nvfp4::bf16_to_float(static_cast<u16>(pair >> 16));
    }
  }
  Accumulator& acc = *op.accumulator;
  std::vector<float> sums(16 * columns);
  multiply_matrices(a[0], b.data(), 16, op.n, sums.data());
  for (int lane = 0; lane < 32; ++lane) {
    float* d = acc.values.data() + static_cast<size_t>(lane * acc.count);
    for (int i = 0; i < acc.count; ++i) {
      const auto row = static_cast<size_t>(lane / 4 + 8 * (i % 4 / 2));
      const float sum = sums[row * columns + static_cast<size_t>(8 * (i / 4) + lane % 4 * 2 + i % 2)];
      d[i] = op.accumulate ? d[i] + sum : sum;
    }
  }
  if (--acc.users > 0) return;
  // The last one: the registers get the sums.
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < acc.count; ++i) {
      u32 bits;
      std::memcpy(&bits, &acc.registers[lane][i], 4);
      if (bits != kUntouched) {
        violate(fmt::format("an accumulator of the wgmma at {} was written while it was under way", op.site.text()));
      }
      acc.registers[lane][i] = acc.values[static_cast<size_t>(lane * acc.count + i)];
    }
  }
  warp_of(t).accumulators.erase(acc.registers[0]);
}

void Machine::run_wgmma(Thread& t, size_t groups_left) {
  Warp& w = warp_of(t);
  while (w.groups.size() > groups_left) {
    std::vector<WgmmaOp> group = std::move(w.groups.front());
    w.groups.erase(w.groups.begin());
    for (WgmmaOp& op : group) execute(t, op);
  }
}

}  // namespace fourfold::executor

using namespace fourfold::executor;

namespace fourfold::ptx {

void wgmma_fence(Site site) {
  Machine& m = machine();
  Thread& t = m.enter(Op::kWgmmaFence, site);
  if (m.mutated(Mutation::Kind::kDrop, Op::kWgmmaFence, site)) return;
  m.meet(t, Op::kWgmmaFence, 0xffffffffu, site, nullptr, true,
         [&](const Rendezvous&) { m.warp_of(t).wgmma_fenced = true; });
}

void wgmma_issue(float* d, const u32* a, u64 a_descriptor, u64 b, bool transposed, int n, bool accumulate, Site site) {
  Machine& m = machine();
  Thread& t = m.enter(Op::kWgmma, site);
  struct Payload {
    float* d;
    const u32* a;
    u64 b;
  } p{d, a, b};
  m.meet(t, Op::kWgmma, 0xffffffffu, site, &p, true, [&](const Rendezvous& r) {
    Warp& w = m.warp_of(t);
    if (!w.wgmma_fenced) m.violate("wgmma without wgmma_fence since the last commit");
    WgmmaOp op;
    op.descriptor = b;
    op.a_descriptor = a_descriptor;
    op.transposed = transposed;
    op.n = n;
    op.accumulate = accumulate;
    op.site = site;
    const int count = n / 2;
    auto* first = static_cast<Payload*>(r.payload[0]);
    std::unique_ptr<Accumulator>& acc = w.accumulators[first->d];
    const bool fresh = acc == nullptr;
    if (fresh) {
      acc = std::make_unique<Accumulator>();
      acc->count = count;
      acc->values.resize(static_cast<size_t>(count) * 32);
    } else if (acc->count != count) {
      m.violate("wgmma: accumulators under way are used with another width");
    }
    for (int lane = 0; lane < 32; ++lane) {
      auto* own = static_cast<Payload*>(r.payload[lane]);
      if (own->b != b) m.violate("wgmma: the lanes give different descriptors");
      op.a[lane] = own->a;
      if (own->a != nullptr) std::memcpy(op.a_issued[lane], own->a, 16);
      acc->registers[lane] = own->d;
      if (!fresh) continue;
      if (accumulate) std::memcpy(acc->values.data() + lane * count, own->d, static_cast<size_t>(count) * 4);
      std::memset(own->d, 0xff, static_cast<size_t>(count) * 4);
    }
    op.accumulator = acc.get();
    ++acc->users;
    ++w.wgmma_issued;
    ++m.stats_.mma;
    w.open_ops.push_back(op);
  });
}

void wgmma_commit(Site site) {
  Machine& m = machine();
  Thread& t = m.enter(Op::kWgmmaCommit, site);
  if (m.mutated(Mutation::Kind::kDrop, Op::kWgmmaCommit, site)) return;
  m.meet(t, Op::kWgmmaCommit, 0xffffffffu, site, nullptr, true, [&](const Rendezvous&) {
    Warp& w = m.warp_of(t);
    w.groups.push_back(std::move(w.open_ops));
    w.open_ops.clear();
    w.wgmma_fenced = false;
    const Delivery delivery = m.options().delivery;
    if (delivery == Delivery::kAtOnce || (delivery == Delivery::kRandom && m.coin())) {
      for (auto& group : w.groups) {
        for (WgmmaOp& op : group) m.execute(t, op);
        group.clear();
      }
    }
  });
}

void wgmma_wait_groups(int pending, Site site) {
  Machine& m = machine();
  Thread& t = m.enter(Op::kWgmmaWait, site);
  if (m.mutated(Mutation::Kind::kDrop, Op::kWgmmaWait, site)) return;
  if (m.mutated(Mutation::Kind::kWeaken, Op::kWgmmaWait, site)) ++pending;
  const size_t left = static_cast<size_t>(pending);
  if (m.warp_of(t).groups.size() > left) m.wait_for_idle();
  m.meet(t, Op::kWgmmaWait, 0xffffffffu, site, nullptr, true, [&](const Rendezvous&) { m.run_wgmma(t, left); });
}

}  // namespace fourfold::ptx
