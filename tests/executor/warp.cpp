// What the lanes of a warp do together: votes, shuffles, ldmatrix, mma.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "executor/cuda.h"
#include "executor/machine.h"
#include "kernels/ptx/sm120.cuh"

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

// Matrix i: eight rows of 16 bytes at the addresses of lanes 8 i .. 8 i + 7; lane 4 r + c gets elements 2 c, 2 c + 1 of
// row r.
void load_matrix4(u32 (&r)[4], u32 address, Site site) {
  Machine& m = machine();
  Thread& t = m.enter(Op::kMatrixLoad, site);
  m.check_bounds(address, 16, 16, "load_matrix4");
  m.shared_access(t, address - kSharedBias, 16, Access::kRead, "load_matrix4");
  struct Payload {
    u32 address;
    u32* registers;
  } p{address, r};
  m.meet(t, Op::kMatrixLoad, 0xffffffffu, site, &p, true, [&](const Rendezvous& all) {
    for (int lane = 0; lane < 32; ++lane) {
      u32* registers = static_cast<Payload*>(all.payload[lane])->registers;
      for (int i = 0; i < 4; ++i) {
        const u32 row = static_cast<Payload*>(all.payload[8 * i + lane / 4])->address;
        std::memcpy(&registers[i], m.shared(row) + lane % 4 * 4, 4);
      }
    }
  });
}

// The other way round, each matrix transposed: lane 4 c + p holds rows 2 p and 2 p + 1 of column c.
void store_matrix4_transposed(u32 address, const u32 (&r)[4], Site site) {
  Machine& m = machine();
  Thread& t = m.enter(Op::kMatrixStore, site);
  m.check_bounds(address, 16, 16, "store_matrix4_transposed");
  m.shared_access(t, address - kSharedBias, 16, Access::kWrite, "store_matrix4_transposed");
  struct Payload {
    u32 address;
    const u32* registers;
  } p{address, r};
  m.meet(t, Op::kMatrixStore, 0xffffffffu, site, &p, true, [&](const Rendezvous& all) {
    for (int lane = 0; lane < 32; ++lane) {
      u8* row = m.shared(static_cast<Payload*>(all.payload[lane])->address);
      for (int c = 0; c < 8; ++c) {
        const u32 pair = static_cast<Payload*>(all.payload[4 * c + lane % 8 / 2])->registers[lane / 8];
        const u16 value = static_cast<u16>(pair >> (16 * (lane % 2)));
        std::memcpy(row + 2 * c, &value, 2);
      }
    }
  });
}

namespace {
float low(u32 pair) { return nvfp4::bf16_to_float(static_cast<u16>(pair)); }
float high(u32 pair) { return nvfp4::bf16_to_float(static_cast<u16>(pair >> 16)); }
}  // namespace

void mma_m16n8k16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, Site site) {
  Machine& m = machine();
  Thread& t = m.enter(Op::kMma, site);
  struct Payload {
    float* d;
    const u32* a;
    u32 b[2];
  } p{d, a, {b0, b1}};
  m.meet(t, Op::kMma, 0xffffffffu, site, &p, true, [&](const Rendezvous& all) {
    ++m.stats_.mma;
    if (m.mutated(Mutation::Kind::kStale, Op::kMma, site) && m.warp_of(t).mma_seen++ == 0) return;
    float left[16][16];
    float right[8][16];
    for (int lane = 0; lane < 32; ++lane) {
      const auto* own = static_cast<const Payload*>(all.payload[lane]);
      const int g = lane / 4;
      const int l = lane % 4;
      for (int i = 0; i < 4; ++i) {
        left[g + 8 * (i % 2)][2 * l + 8 * (i / 2)] = low(own->a[i]);
        left[g + 8 * (i % 2)][2 * l + 8 * (i / 2) + 1] = high(own->a[i]);
      }
      for (int i = 0; i < 2; ++i) {
        right[g][2 * l + 8 * i] = low(own->b[i]);
        right[g][2 * l + 8 * i + 1] = high(own->b[i]);
      }
    }
    for (int lane = 0; lane < 32; ++lane) {
      const auto* own = static_cast<const Payload*>(all.payload[lane]);
      for (int i = 0; i < 4; ++i) {
        const float* x = left[lane / 4 + 8 * (i / 2)];
        const float* y = right[lane % 4 * 2 + i % 2];
        float sum = 0.0f;
        for (int k = 0; k < 16; ++k) sum += x[k] * y[k];
        own->d[i] += sum;
      }
    }
  });
}

// mma.m16n8k64 on e2m1 with one ue4m3 scale per 16 k (PTX ISA, "mma with block scaling"), g = lane / 4, l = lane % 4:
//   A register i, nibble j  row g + 8 (i & 1), k = 8 l + 32 (i >> 1) + j
//   B register i, nibble j  column g, k = 8 l + 32 i + j
//   scales                  byte k / 16 of a word; A's row g from lane 4 g, row g + 8 from lane 4 g + 1, B's column g
//                           from lane 4 g (selectors 0); the sign is ignored, 0x7f is NaN
void mma_m16n8k64_nvfp4(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, u32 scales_a, u32 scales_b, Site site) {
  Machine& m = machine();
  Thread& t = m.enter(Op::kMma, site);
  struct Payload {
    float* d;
    const u32* a;
    u32 b[2];
    u32 scales_a, scales_b;
  } p{d, a, {b0, b1}, scales_a, scales_b};
  m.meet(t, Op::kMma, 0xffffffffu, site, &p, true, [&](const Rendezvous& all) {
    ++m.stats_.mma;
    if (m.mutated(Mutation::Kind::kStale, Op::kMma, site) && m.warp_of(t).mma_seen++ == 0) return;
    const auto lane_of = [&](int lane) { return static_cast<const Payload*>(all.payload[lane]); };
    const auto scale = [](u32 word, int group) {
      return nvfp4::e4m3_to_float(static_cast<u8>(word >> (8 * group) & 127u));
    };
    float left[16][64];
    float right[8][64];
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4;
      const int l = lane % 4;
      for (int i = 0; i < 4; ++i) {
        for (int j = 0; j < 8; ++j) {
          const int row = g + 8 * (i & 1);
          const int k = 8 * l + 32 * (i >> 1) + j;
          left[row][k] = nvfp4::e2m1_to_float(static_cast<u8>(lane_of(lane)->a[i] >> (4 * j) & 15u)) *
                         scale(lane_of(4 * g + row / 8)->scales_a, k / 16);
        }
      }
      for (int i = 0; i < 2; ++i) {
        for (int j = 0; j < 8; ++j) {
          const int k = 8 * l + 32 * i + j;
          right[g][k] = nvfp4::e2m1_to_float(static_cast<u8>(lane_of(lane)->b[i] >> (4 * j) & 15u)) *
                        scale(lane_of(4 * g)->scales_b, k / 16);
        }
      }
    }
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 4; ++i) {
        const float* x = left[lane / 4 + 8 * (i / 2)];
        const float* y = right[lane % 4 * 2 + i % 2];
        float sum = 0.0f;
        for (int k = 0; k < 64; ++k) sum += x[k] * y[k];
        lane_of(lane)->d[i] += sum;
      }
    }
  });
}

}  // namespace fourfold::ptx
