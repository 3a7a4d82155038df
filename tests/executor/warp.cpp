// What the lanes of a warp do together: votes and shuffles.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "executor/cuda.h"
#include "executor/machine.h"
#include "kernels/ptx/sm90.cuh"

namespace fourfold::executor {

Rendezvous* Machine::join_rendezvous(Thread& t, Op op, u32 mask, Site site, void* payload, bool aligned) {
  Warp& w = warp_of(t);
  if ((mask >> t.lane & 1u) == 0)
    violate(fmt::format("{}: the mask {:#x} leaves out lane {}", to_string(op), mask, t.lane));
  if ((mask & ~w.alive) != 0) {
    violate(fmt::format("{}: the mask {:#x} names lanes that have ended (alive: {:#x})", to_string(op), mask, w.alive));
  }
  Rendezvous* r = nullptr;
  for (Rendezvous& open : w.open) {
    if ((open.mask & mask) == 0) continue;
    if (open.mask != mask || open.op != op ||
        (aligned && (open.site.line != site.line || open.site.file != site.file))) {
      violate(
          fmt::format("lanes of a warp meet at different operations: {} at {} with mask {:#x}, and {} at {} with {:#x}",
                      to_string(open.op), open.site.text(), open.mask, to_string(op), site.text(), mask));
    }
    r = &open;
  }
  if (r == nullptr) {
    r = &w.open.emplace_back();
    r->op = op;
    r->site = site;
    r->mask = mask;
  }
  r->arrived |= 1u << t.lane;
  r->payload[t.lane] = payload;
  return r;
}

void Machine::close_rendezvous(Thread& t, u32 mask) {
  Warp& w = warp_of(t);
  for (size_t i = 0; i < w.open.size(); ++i) {
    if (w.open[i].mask == mask) {
      w.open.erase(w.open.begin() + static_cast<std::ptrdiff_t>(i));
      return;
    }
  }
}

void Machine::release_lanes(Thread& t, const Rendezvous& r) {
  for (int i = 0; i < 32; ++i) {
    if ((r.mask >> i & 1u) && i != t.lane) wake(threads_[static_cast<size_t>(t.warp) * 32 + static_cast<size_t>(i)]);
  }
  maybe_yield();
}

unsigned shuffle(unsigned mask, unsigned value, Shuffle kind, int lane, int width, Site site) {
  Machine& m = machine();
  Thread& t = m.enter(Op::kShuffle, site);
  struct Payload {
    unsigned value;
    int source;
    unsigned result;
  };
  // The lane to read from; lanes past the segment keep their own value.
  const int first = t.lane / width * width;
  int source = t.lane;
  switch (kind) {
    case Shuffle::kIndex:
      source = first + (lane % width + width) % width;
      break;
    case Shuffle::kUp:
      source = t.lane - lane >= first ? t.lane - lane : t.lane;
      break;
    case Shuffle::kDown:
      source = t.lane + lane < first + width ? t.lane + lane : t.lane;
      break;
    case Shuffle::kXor:
      source = (t.lane ^ lane) < first + width ? (t.lane ^ lane) : t.lane;
      break;
  }
  Payload p{value, source, 0};
  m.meet(t, Op::kShuffle, mask, site, &p, false, [&](const Rendezvous& r) {
    for (int i = 0; i < 32; ++i) {
      if ((r.mask >> i & 1u) == 0) continue;
      auto* own = static_cast<Payload*>(r.payload[i]);
      if ((r.mask >> own->source & 1u) == 0)
        m.violate(fmt::format("a shuffle reads lane {}, which the mask leaves out", own->source));
      own->result = static_cast<Payload*>(r.payload[own->source])->value;
    }
  });
  return p.result;
}

}  // namespace fourfold::executor

using namespace fourfold::executor;

unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const unsigned long long both = a | static_cast<unsigned long long>(b) << 32;
  unsigned result = 0;
  for (unsigned i = 0; i < 4; ++i) {
    const unsigned s = selector >> (4 * i) & 15u;
    unsigned byte = static_cast<unsigned>(both >> (8 * (s & 7u))) & 255u;
    if (s & 8u) byte = byte & 128u ? 255u : 0u;
    result |= byte << (8 * i);
  }
  return result;
}

unsigned __ballot_sync(unsigned mask, bool vote, Site site) {
  Machine& m = machine();
  Thread& t = m.enter(Op::kShuffle, site);
  unsigned value = vote ? 1u : 0u;
  m.meet(t, Op::kShuffle, mask, site, &value, false, [&](const Rendezvous& r) {
    unsigned all = 0;
    for (int i = 0; i < 32; ++i) {
      if ((r.mask >> i & 1u) && *static_cast<unsigned*>(r.payload[i])) all |= 1u << i;
    }
    for (int i = 0; i < 32; ++i) {
      if (r.mask >> i & 1u) *static_cast<unsigned*>(r.payload[i]) = all;
    }
  });
  return value;
}

unsigned __match_any_sync(unsigned mask, int value, Site site) {
  Machine& m = machine();
  Thread& t = m.enter(Op::kShuffle, site);
  struct Payload {
    int value;
    unsigned same;
  } p{value, 0};
  m.meet(t, Op::kShuffle, mask, site, &p, false, [&](const Rendezvous& r) {
    for (int i = 0; i < 32; ++i) {
      if ((r.mask >> i & 1u) == 0) continue;
      auto* own = static_cast<Payload*>(r.payload[i]);
      for (int j = 0; j < 32; ++j) {
        if ((r.mask >> j & 1u) && static_cast<Payload*>(r.payload[j])->value == own->value) own->same |= 1u << j;
      }
    }
  });
  return p.same;
}

namespace fourfold::ptx {

float exp2_approx(float x) {
  const float y = std::exp2(x);
  return std::fpclassify(y) == FP_SUBNORMAL ? 0.0f : y;
}
float reciprocal_approx(float x) {
  if (std::fpclassify(x) == FP_SUBNORMAL) x = std::copysign(0.0f, x);
  const float y = 1.0f / x;
  return std::fpclassify(y) == FP_SUBNORMAL ? std::copysign(0.0f, y) : y;
}

float max_magnitude(float x, float y) {
  if (std::isnan(x) || std::isnan(y)) return std::nanf("");
  return std::max(std::fabs(x), std::fabs(y));
}

}  // namespace fourfold::ptx
