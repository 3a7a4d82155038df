// What a warp does with matrices: ldmatrix, stmatrix, mma.
#include <cstring>

#include "executor/cuda.h"
#include "executor/machine.h"
#include "kernels/ptx/fragments.cuh"
#include "kernels/ptx/sm120.cuh"
#include "kernels/ptx/sm90.cuh"

namespace fourfold::executor {

FOURFOLD_CLONES void multiply_matrices(const float* left, const float* right, int depth, int columns, float* sums) {
  for (int row = 0; row < 16; ++row) {
    for (int first = 0; first < columns; first += 8) {
      float sum[8] = {};
      for (int k = 0; k < depth; ++k) {
        const float x = left[row * depth + k];
        const float* y = right + static_cast<std::ptrdiff_t>(k) * columns + first;
        for (int i = 0; i < 8; ++i) sum[i] += x * y[i];
      }
      std::memcpy(sums + static_cast<std::ptrdiff_t>(row) * columns + first, sum, sizeof(sum));
    }
  }
}

}  // namespace fourfold::executor

using namespace fourfold::executor;

namespace fourfold::ptx {

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

namespace {

// Rows g and g + 8 of the sums [16][8], columns 2 l and 2 l + 1, are a lane's.
void add_sums(const float* sums, int lane, float* d) {
  for (int i = 0; i < 4; ++i) d[i] += sums[(lane / 4 + 8 * (i / 2)) * 8 + lane % 4 * 2 + i % 2];
}

// m16n8k16 on 16-bit values, g = lane / 4, l = lane % 4:
//   A register i, half j  row g + 8 (i & 1), k = 2 l + 8 (i >> 1) + j
//   B register i, half j  column g, k = 2 l + 8 i + j
void multiply_m16n8k16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, float (*value)(u16), Site site) {
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
    const auto lane_of = [&](int lane) { return static_cast<const Payload*>(all.payload[lane]); };
    float left[16][16];
    float right[16][8];
    for (int lane = 0; lane < 32; ++lane) {
      for (int j = 0; j < 2; ++j) {
        for (int i = 0; i < 4; ++i) {
          left[lane / 4 + 8 * (i & 1)][lane % 4 * 2 + 8 * (i >> 1) + j] =
              value(static_cast<u16>(lane_of(lane)->a[i] >> (16 * j)));
        }
        for (int i = 0; i < 2; ++i) {
          right[lane % 4 * 2 + 8 * i + j][lane / 4] = value(static_cast<u16>(lane_of(lane)->b[i] >> (16 * j)));
        }
      }
    }
    float sums[16 * 8];
    multiply_matrices(left[0], right[0], 16, 8, sums);
    for (int lane = 0; lane < 32; ++lane) add_sums(sums, lane, lane_of(lane)->d);
  });
}

}  // namespace

void mma_m16n8k16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, Site site) {
  multiply_m16n8k16(d, a, b0, b1, nvfp4::bf16_to_float, site);
}
void mma_m16n8k16_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, Site site) {
  multiply_m16n8k16(d, a, b0, b1, nvfp4::f16_to_float, site);
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
    float right[64][8];
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
          right[k][g] = nvfp4::e2m1_to_float(static_cast<u8>(lane_of(lane)->b[i] >> (4 * j) & 15u)) *
                        scale(lane_of(4 * g)->scales_b, k / 16);
        }
      }
    }
    float sums[16 * 8];
    multiply_matrices(left[0], right[0], 64, 8, sums);
    for (int lane = 0; lane < 32; ++lane) add_sums(sums, lane, lane_of(lane)->d);
  });
}

}  // namespace fourfold::ptx
