// ldmatrix with transposition, and mma of fp16.
#include "kernels/ptx/fragments.cuh"

#include <cstring>

#include "executor/cuda.h"
#include "executor/machine.h"

using namespace fourfold::executor;

namespace fourfold::ptx {

// Matrix i: eight rows of 16 bytes at the addresses of lanes 8 i .. 8 i + 7; lane 4 c + p gets rows 2 p and 2 p + 1 of
// column c.
void load_matrix4_transposed(u32 (&r)[4], u32 address, Site site) {
  Machine& m = machine();
  Thread& t = m.enter(Op::kMatrixLoad, site);
  m.check_bounds(address, 16, 16, "load_matrix4_transposed");
  m.shared_access(t, address - kSharedBias, 16, Access::kRead, "load_matrix4_transposed");
  struct Payload {
    u32 address;
    u32* registers;
  } p{address, r};
  m.meet(t, Op::kMatrixLoad, 0xffffffffu, site, &p, true, [&](const Rendezvous& all) {
    for (int lane = 0; lane < 32; ++lane) {
      u32* registers = static_cast<Payload*>(all.payload[lane])->registers;
      for (int i = 0; i < 4; ++i) {
        u16 pair[2];
        for (int j = 0; j < 2; ++j) {
          const u32 row = static_cast<Payload*>(all.payload[8 * i + lane % 4 * 2 + j])->address;
          std::memcpy(&pair[j], m.shared(row) + lane / 4 * 2, 2);
        }
        registers[i] = pair[0] | static_cast<u32>(pair[1]) << 16;
      }
    }
  });
}

// The fragments of m16n8k16, g = lane / 4, l = lane % 4:
//   A register i, half j  row g + 8 (i & 1), k = 2 l + 8 (i >> 1) + j
//   B register i, half j  column g, k = 2 l + 8 i + j
void mma_m16n8k16_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, Site site) {
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
      for (int j = 0; j < 2; ++j) {
        for (int i = 0; i < 4; ++i) {
          left[lane / 4 + 8 * (i & 1)][lane % 4 * 2 + 8 * (i >> 1) + j] =
              nvfp4::f16_to_float(static_cast<u16>(own->a[i] >> (16 * j)));
        }
        for (int i = 0; i < 2; ++i) {
          right[lane / 4][lane % 4 * 2 + 8 * i + j] = nvfp4::f16_to_float(static_cast<u16>(own->b[i] >> (16 * j)));
        }
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

}  // namespace fourfold::ptx
