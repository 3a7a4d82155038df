// The executor's own rules, on kernels of a few lines: what is right passes under every schedule, what breaks a rule is
// reported with the rule's name.
#include "executor/executor.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "kernels/ptx/sm120.cuh"
#include "kernels/ptx/wgmma_sm90.cuh"

namespace fourfold::executor {
namespace {

using namespace ptx;

// Runs under nine schedules; the first violation's message, or empty.
std::string run(const LaunchConfig& config, const std::function<void()>& body) {
  for (const Options& o : schedules(9)) {
    Device device(o);
    try {
      device.launch(config, body);
    } catch (const Violation& v) {
      return v.what();
    }
  }
  return "";
}
std::string run(const std::function<void()>& body, int threads = 64, unsigned shared = 4096) {
  return run(LaunchConfig{"toy", {}, threads, shared}, body);
}

#define EXPECT_CONTAINS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)
#define NEEDS_HOOKS() \
  if (!Device::checks_plain_accesses()) GTEST_SKIP() << "plain accesses are not seen in sanitizer builds"

TEST(Executor, ABarrierOrdersPlainAccesses) {
  const auto body = [](bool wait) {
    FOURFOLD_DYNAMIC_SHARED(smem);
    int* values = reinterpret_cast<int*>(smem);
    values[threadIdx.x] = static_cast<int>(threadIdx.x);
    if (wait) __syncthreads();
    if (values[63 - threadIdx.x] != static_cast<int>(63 - threadIdx.x)) machine_fails();
  };
  EXPECT_EQ(run([&] { body(true); }), "");
  NEEDS_HOOKS();
  EXPECT_NE(run([&] { body(false); }), "");
}

TEST(Executor, WriteAfterReadNeedsOrderToo) {
  NEEDS_HOOKS();
  const auto body = [](bool wait) {
    FOURFOLD_DYNAMIC_SHARED(smem);
    int* values = reinterpret_cast<int*>(smem);
    values[threadIdx.x] = 1;
    __syncthreads();
    const int sum = values[0] + values[33];
    if (wait) __syncthreads();
    values[threadIdx.x] = sum;
  };
  EXPECT_EQ(run([&] { body(true); }), "");
  EXPECT_CONTAINS(run([&] { body(false); }), "nothing orders the last read");
}

TEST(Executor, LanesMayStoreTheSameValueSideBySide) {
  NEEDS_HOOKS();
  EXPECT_EQ(run(
                [] {
                  FOURFOLD_DYNAMIC_SHARED(smem);
                  *reinterpret_cast<int*>(smem) = 5;
                },
                32),
            "");
  EXPECT_CONTAINS(run(
                      [] {
                        FOURFOLD_DYNAMIC_SHARED(smem);
                        *reinterpret_cast<int*>(smem) = static_cast<int>(threadIdx.x);
                        __syncwarp();
                      },
                      32),
                  "different values");
}

TEST(Executor, StaticSharedVariablesAreSeen) {
  NEEDS_HOOKS();
  const auto body = [](bool wait) {
    __shared__ int count[2];
    if (threadIdx.x == 0) count[0] = 0;
    if (wait) __syncthreads();
    atomicAdd(&count[0], 1);
    __syncthreads();
    if (count[0] != 64) machine_fails();
  };
  EXPECT_EQ(run([&] { body(true); }), "");
  EXPECT_CONTAINS(run([&] { body(false); }), "static shared memory");
}

TEST(Executor, PlannedSharedMemoryIsTheLimit) {
  EXPECT_EQ(run([] {
              FOURFOLD_DYNAMIC_SHARED(smem);
              load_shared4(shared_address(smem) + 4096u - 16u);
            }),
            "");
  EXPECT_CONTAINS(run([] {
                    FOURFOLD_DYNAMIC_SHARED(smem);
                    load_shared4(shared_address(smem) + 4096u);
                  }),
                  "of which 4096 were planned");
  EXPECT_CONTAINS(run([] {
                    FOURFOLD_DYNAMIC_SHARED(smem);
                    load_shared4(shared_address(smem) + 8u);
                  }),
                  "no multiple of 16");
  // A plain store beyond it: seen when it happens, or by what is left there.
  EXPECT_CONTAINS(run([] {
                    FOURFOLD_DYNAMIC_SHARED(smem);
                    if (threadIdx.x == 0) smem[4096] = 1;
                  }),
                  "planned");
  EXPECT_CONTAINS(run(LaunchConfig{"toy", {}, 32, 300000}, [] {}), "300000 bytes of shared memory");
}

TEST(Executor, GlobalAccessesStayInTheirBuffer) {
  for (const bool outside : {false, true}) {
    Device device(Options{});
    int* buffer = device.alloc<int>(10, "ten");
    const auto body = [&] {
      if (threadIdx.x < (outside ? 11u : 10u)) buffer[threadIdx.x] = 1;
    };
    if (outside) {
      EXPECT_THROW(device.launch({"toy", {}, 32, 0}, body), Violation);
    } else {
      device.launch({"toy", {}, 32, 0}, body);
      EXPECT_EQ(buffer[9], 1);
    }
  }
  Device device(Options{});
  const int* constant = device.constant(std::vector<int>{1, 2, 3}, "three");
  const auto message = [&](const std::function<void()>& body) -> std::string {
    try {
      device.launch({"toy", {}, 32, 0}, body);
    } catch (const Violation& v) {
      return v.what();
    }
    return "";
  };
  EXPECT_CONTAINS(message([&] { check_read(constant + 3, 4); }),
                  "a read of 4 bytes at byte 12 of `three`, which has 12");
  EXPECT_CONTAINS(message([&] { atomicAdd(const_cast<int*>(constant), 1); }), "a write to `three`, which is constant");
}

TEST(Executor, ADeadlockNamesWhatEachThreadWaitsFor) {
  const std::string text = run([] {
    FOURFOLD_DYNAMIC_SHARED(smem);
    const u32 bar = shared_address(smem);
    if (threadIdx.x == 0) mbarrier_init(bar, 2);
    __syncthreads();
    if (threadIdx.x < 32) {
      if (threadIdx.x == 0) mbarrier_arrive(bar);
      mbarrier_wait(bar, 0);
    } else {
      barrier_sync(3, 64);
    }
  });
  EXPECT_CONTAINS(text, "deadlock");
  EXPECT_CONTAINS(text, "32 threads wait for barrier_sync at executor_test.cpp");
  EXPECT_CONTAINS(text, "32 threads wait for mbarrier_wait 1024 parity 0 (phase 0, 1 arrivals and 0 bytes missing)");
}

// One producer thread, a ring of two stages, 32 readers.
struct RingFaults {
  bool full_wait = true, empty_wait = true, syncwarp = true, fence = true, expect = true;
};
std::string ring(const RingFaults& f, Delivery only = Delivery::kLate) {
  std::string first;
  for (const Options& o : schedules(9)) {
    if (o.delivery != only) continue;
    Device device(o);
    std::vector<int> values(64 * 8);
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<int>(i);
    const int* source = device.constant(values, "source");
    const auto body = [&] {
      FOURFOLD_DYNAMIC_SHARED(smem);
      const u32 base = shared_address(smem);
      const auto full = [&](u32 s) { return base + 1024u + 8u * s; };
      const auto empty = [&](u32 s) { return base + 1040u + 8u * s; };
      if (threadIdx.x == 0) {
        for (u32 s = 0; s < 2; ++s) {
          mbarrier_init(full(s), 1);
          mbarrier_init(empty(s), 1);
        }
        if (f.fence) fence_barrier_init();
      }
      __syncthreads();
      for (u32 i = 0; i < 8; ++i) {
        const u32 s = i % 2;
        if (threadIdx.x < 32) {
          if (f.full_wait) mbarrier_wait(full(s), i / 2 & 1u);
          const Vec2 v = load_shared2(base + s * 256u + threadIdx.x * 8u);
          if (v.x != i * 64u + threadIdx.x * 2u) machine_fails();
          if (f.syncwarp) __syncwarp();
          if (threadIdx.x == 0) mbarrier_arrive(empty(s));
        } else if (threadIdx.x == 32) {
          if (f.empty_wait) mbarrier_wait(empty(s), (i / 2 & 1u) ^ 1u);
          mbarrier_arrive_expect(full(s), f.expect ? 256 : 240);
          bulk_copy(base + s * 256u, source + i * 64, 256, full(s), 0);
        }
      }
    };
    try {
      device.launch({"ring", {}, 64, 2048}, body);
    } catch (const Violation& v) {
      if (first.empty()) first = v.what();
    }
  }
  return first;
}

TEST(Executor, RingsOfBulkCopies) {
  for (const Delivery d : {Delivery::kLate, Delivery::kAtOnce, Delivery::kRandom}) {
    EXPECT_EQ(ring({}, d), "");
    EXPECT_NE(ring({.full_wait = false}, d), "");
    EXPECT_NE(ring({.empty_wait = false}, d), "");
    EXPECT_NE(ring({.syncwarp = false}, d), "");
    EXPECT_CONTAINS(ring({.fence = false}, d), "fence_barrier_init is missing");
    EXPECT_NE(ring({.expect = false}, d), "");
  }
}

// Row 2 of 3, and what lies outside the matrix, to rows 5 .. 7 of an atom. The matrix has 80 columns.
std::string copy_rows(const Options& o, bool wait, u32 misplaced = 0, bool fence = true) {
  Device device(o);
  std::vector<u16> values(3 * 88);  // rows of 176 bytes
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<u16>(i);
  const TensorMap map = make_tensor_map(device.constant(values, "rows"), 3, 80, 176);
  try {
    device.launch({"toy", {}, 32, 2048}, [&] {
      FOURFOLD_DYNAMIC_SHARED(smem);
      const u32 base = shared_address(smem), bar = base + 1024;
      if (threadIdx.x == 0) {
        mbarrier_init(bar, 1);
        if (fence) fence_barrier_init();
      }
      __syncwarp();
      if (one_lane()) {
        mbarrier_arrive_expect(bar, 3 * 128);
        tensor_copy_row(base + 5 * 128 + misplaced, map, 0, 2, bar);
        tensor_copy_row(base + 6 * 128, map, 64, 1, bar);
        tensor_copy_row(base + 7 * 128, map, 0, 65535, bar);
      }
      if (wait) mbarrier_wait(bar, 0);
      const u32 column = threadIdx.x * 2;
      for (u32 row = 5; row < 8; ++row) {
        const u32 place = base + row * 128 + (column / 8 ^ row) * 16 + column % 8 * 2;
        const u32 first = row == 5 ? 2 * 88 + column : 88 + 64 + column;
        const bool there = row == 5 || (row == 6 && column < 16);
        if (load_shared1(place) != (there ? first | (first + 1) << 16 : 0)) machine_fails();
      }
    });
  } catch (const Violation& v) {
    return v.what();
  }
  return "";
}

TEST(Executor, TensorCopiesSwizzleAndFillWithZeros) {
  for (const Options& o : schedules(9)) {
    EXPECT_EQ(copy_rows(o, true), "");
    EXPECT_NE(copy_rows(o, false), "");
    EXPECT_CONTAINS(copy_rows(o, true, 64), "is no multiple of 128");
    EXPECT_CONTAINS(copy_rows(o, true, 0, false), "fence_barrier_init is missing");
  }
}

TEST(Executor, CopyGroupsLandWhenTheyAreWaitedFor) {
  const auto body = [](Device& device, bool wait, bool sync) {
    const int* source = device.constant(std::vector<int>(256, 7), "source");
    device.launch({"toy", {}, 64, 4096}, [&] {
      FOURFOLD_DYNAMIC_SHARED(smem);
      const u32 base = shared_address(smem);
      async_copy16(base + threadIdx.x * 16u, source + threadIdx.x * 4);
      async_copy_commit();
      async_copy_commit();  // an empty group
      if (wait) {
        async_copy_wait<1>();
      } else {
        async_copy_wait<2>();
      }
      if (sync) __syncthreads();
      if (load_shared1(base + (63u - threadIdx.x) * 16u) != 7u) machine_fails();
      async_copy_wait<0>();
    });
  };
  for (const Options& o : schedules(9)) {
    Device right(o), early(o), alone(o);
    EXPECT_NO_THROW(body(right, true, true));
    EXPECT_THROW(body(early, false, true), Violation);
    EXPECT_THROW(body(alone, true, false), Violation);
  }
}

TEST(Executor, AKernelWaitsForTheOneBeforeIt) {
  NEEDS_HOOKS();
  for (const bool waits : {true, false}) {
    Device device(Options{});
    int* data = device.alloc<int>(32, "data");
    device.launch({"first", {}, 32, 0}, [&] {
      grid_dependency_wait();
      grid_launch_dependents();
      data[threadIdx.x] = 1;
    });
    const auto second = [&] {
      if (waits) grid_dependency_wait();
      data[threadIdx.x] += 1;
    };
    if (waits) {
      EXPECT_NO_THROW(device.launch({"second", {}, 32, 0}, second));
      EXPECT_EQ(data[31], 2);
    } else {
      EXPECT_THROW(device.launch({"second", {}, 32, 0}, second), Violation);
      EXPECT_NO_THROW(device.launch({"third", {}, 32, 0, false}, second));  // launched without overlap
    }
  }
}

TEST(Executor, NeighboursInALargeBufferAreToldApart) {
  NEEDS_HOOKS();
  Device device(Options{});
  auto* data = static_cast<int*>(device.reserve(std::size_t{200} << 20, "data"));
  device.launch({"first", {}, 32, 0}, [&] {
    grid_dependency_wait();
    data[threadIdx.x] = 1;
  });
  const auto second = [&](int at) {
    data[threadIdx.x + static_cast<unsigned>(at)] = 2;
    grid_dependency_wait();
  };
  EXPECT_NO_THROW(device.launch({"second", {}, 32, 0}, [&] { second(64); }));
  EXPECT_THROW(device.launch({"third", {}, 32, 0}, [&] { second(32 + 16); }), Violation);
}

TEST(Executor, WarpOperations) {
  EXPECT_EQ(run([] {
              const int lane = static_cast<int>(threadIdx.x) % 32;
              if (__shfl_sync(0xffffffffu, lane, 5) != 5) machine_fails();
              if (__shfl_up_sync(0xffffffffu, lane, 3) != (lane < 3 ? lane : lane - 3)) machine_fails();
              if (__shfl_down_sync(0xffffffffu, lane, 3) != (lane > 28 ? lane : lane + 3)) machine_fails();
              if (__shfl_xor_sync(0xffffffffu, lane, 9) != (lane ^ 9)) machine_fails();
              if (__shfl_xor_sync(0xffffffffu, 2.5f, 1) != 2.5f) machine_fails();
              if (__ballot_sync(0xffffffffu, lane % 3 == 0) != 0x49249249u) machine_fails();
              if (__match_any_sync(0xffffffffu, lane / 8) != 0xffu << (lane / 8 * 8)) machine_fails();
              if (lane < 16 && __ballot_sync(0xffffu, true) != 0xffffu) machine_fails();
            }),
            "");
  EXPECT_EQ(__byte_perm(0x33221100u, 0x77665544u, 0x7340u), 0x77334400u);
  EXPECT_EQ(__funnelshift_l(0x80000001u, 0x00000001u, 1), 3u);
  EXPECT_EQ(__funnelshift_r(0x80000002u, 0x00000001u, 1), 0xc0000001u);
  // Half the warp at one place, half at another.
  EXPECT_CONTAINS(run([] {
                    float d[4] = {};
                    const u32 a[4] = {};
                    if (threadIdx.x % 32 < 16) {
                      mma_m16n8k16(d, a, 0, 0);
                    } else {
                      __syncwarp();
                    }
                  }),
                  "meet at different operations");
}

// A (16 x 16), B (16 x 8) as bf16 fragments, by the definition of the instruction.
TEST(Executor, MultiplicationsOfAWarp) {
  std::mt19937 rng(3);
  std::vector<float> a(16 * 64), b(64 * 8), want(16 * 8);
  for (auto& v : a) v = nvfp4::e2m1_to_float(static_cast<u8>(rng() % 16));
  for (auto& v : b) v = nvfp4::e2m1_to_float(static_cast<u8>(rng() % 16));
  // scales: one per 16 k, of each row and column
  std::vector<u8> row_scales(16 * 4), column_scales(8 * 4);
  for (auto& s : row_scales) s = static_cast<u8>(0x30 + rng() % 16);
  for (auto& s : column_scales) s = static_cast<u8>(0x30 + rng() % 16);
  for (const bool fp4 : {false, true}) {
    for (int i = 0; i < 16; ++i) {
      for (int j = 0; j < 8; ++j) {
        double sum = 0;
        for (int k = 0; k < (fp4 ? 64 : 16); ++k) {
          const double s = fp4 ? nvfp4::e4m3_to_float(row_scales[i * 4 + k / 16]) *
                                     nvfp4::e4m3_to_float(column_scales[j * 4 + k / 16])
                               : 1.0f;
          sum += a[i * 64 + k] * b[k * 8 + j] * s;
        }
        want[i * 8 + j] = static_cast<float>(sum);
      }
    }
    const auto pair = [](float low, float high) { return to_bf16x2(low, high); };
    const auto body = [&] {
      const int lane = static_cast<int>(threadIdx.x);
      const int g = lane / 4, l = lane % 4;
      float d[4] = {};
      u32 x[4] = {}, y[2] = {};
      if (fp4) {
        for (int i = 0; i < 4; ++i) {
          for (int j = 0; j < 8; ++j) {
            const u32 code = nvfp4::float_to_e2m1(a[(g + 8 * (i & 1)) * 64 + 8 * l + 32 * (i >> 1) + j]);
            x[i] |= code << (4 * j);
            if (i < 2) y[i] |= static_cast<u32>(nvfp4::float_to_e2m1(b[(8 * l + 32 * i + j) * 8 + g])) << (4 * j);
          }
        }
        // Lanes that the instruction does not read scales from hold NaN.
        u32 sa = 0x7f7f7f7fu, sb = 0x7f7f7f7fu;
        if (l < 2) {
          sa = 0;
          for (int i = 0; i < 4; ++i) sa |= static_cast<u32>(row_scales[(g + 8 * l) * 4 + i]) << (8 * i);
        }
        if (l == 0) {
          sb = 0;
          for (int i = 0; i < 4; ++i) sb |= static_cast<u32>(column_scales[g * 4 + i]) << (8 * i);
        }
        mma_m16n8k64_nvfp4(d, x, y[0], y[1], sa, sb);
      } else {
        for (int i = 0; i < 4; ++i) {
          const float* row = &a[(g + 8 * (i % 2)) * 64 + 2 * l + 8 * (i / 2)];
          x[i] = pair(row[0], row[1]);
        }
        for (int i = 0; i < 2; ++i) y[i] = pair(b[(2 * l + 8 * i) * 8 + g], b[(2 * l + 8 * i + 1) * 8 + g]);
        mma_m16n8k16(d, x, y[0], y[1]);
      }
      for (int i = 0; i < 4; ++i) {
        if (std::fabs(d[i] - want[(g + 8 * (i / 2)) * 8 + 2 * l + i % 2]) > 1e-3f) machine_fails();
      }
    };
    EXPECT_EQ(run(body, 32), "") << fp4;
  }
}

struct WgmmaFaults {
  bool fence = true, proxy_fence = true, wait = true, overwrite = false, early_read = false;
};
std::string wgmma(const WgmmaFaults& f) {
  constexpr int kN = 16;
  std::mt19937 rng(4);
  std::vector<float> a(64 * 16);
  std::vector<u16> rows(kN * 64);  // [n][k]
  for (auto& v : a) v = static_cast<float>(static_cast<int>(rng() % 9) - 4);
  for (auto& v : rows) v = nvfp4::float_to_bf16(static_cast<float>(static_cast<int>(rng() % 9) - 4));
  for (const Options& o : schedules(9)) {
    if (o.delivery == Delivery::kAtOnce && (!f.wait || f.overwrite || f.early_read)) continue;
    Device device(o);
    const u16* source = device.constant(rows, "rows");
    const auto body = [&] {
      FOURFOLD_DYNAMIC_SHARED(smem);
      const u32 base = shared_address(smem);
      const u32 t = threadIdx.x;
      // row n, 16-byte chunk c at the swizzled place
      async_copy16(base + t / 8 * 128u + ((t % 8) ^ (t / 8 & 7u)) * 16u, source + t / 8 * 64 + t % 8 * 8);
      async_copy_commit();
      async_copy_wait<0>();
      if (f.proxy_fence) fence_async_shared();
      __syncthreads();
      const int g = static_cast<int>(t) % 32 / 4, l = static_cast<int>(t) % 4, warp = static_cast<int>(t) / 32;
      u32 x[4];
      for (int i = 0; i < 4; ++i) {
        const float* row = &a[(warp * 16 + g + 8 * (i % 2)) * 16 + 2 * l + 8 * (i / 2)];
        x[i] = to_bf16x2(row[0], row[1]);
      }
      float d[kN / 2];
      if (f.fence) wgmma_fence();
      Wgmma<kN>::set(d, x, swizzled_descriptor(base) + 2);  // k 16 .. 31 of the rows
      Wgmma<kN>::add(d, x, swizzled_descriptor(base) + 2);
      wgmma_commit();
      if (f.overwrite) x[0] = 0;
      const float early = d[0];
      if (f.wait) {
        wgmma_wait<0>();
      } else {
        wgmma_wait<1>();
      }
      for (int i = 0; i < kN / 2; ++i) {
        double want = 0;
        for (int k = 0; k < 16; ++k) {
          want += 2.0 * a[(warp * 16 + g + 8 * (i % 4 / 2)) * 16 + k] *
                  nvfp4::bf16_to_float(rows[(i / 4 * 8 + 2 * l + i % 2) * 64 + 16 + k]);
        }
        const float got = f.early_read && i == 0 ? early : d[i];
        if (!(std::fabs(got - want) < 1e-3)) machine_fails();
      }
    };
    try {
      device.launch({"wgmma", {}, 128, 4096}, body);
    } catch (const Violation& v) {
      return v.what();
    }
  }
  return "";
}

TEST(Executor, AsynchronousMultiplications) {
  EXPECT_EQ(wgmma({}), "");
  EXPECT_CONTAINS(wgmma({.fence = false}), "without wgmma_fence");
  EXPECT_CONTAINS(wgmma({.proxy_fence = false}), "without fence_async_shared");
  EXPECT_NE(wgmma({.wait = false}), "");
  EXPECT_CONTAINS(wgmma({.overwrite = true}), "overwritten while it was under way");
  EXPECT_CONTAINS(wgmma({.early_read = true}), "fails");
}

TEST(Executor, CtasInTurnsCanWaitForEachOther) {
  for (const Options& o : schedules(9)) {
    Device device(o);
    int* arrived = device.alloc<int>(1, "arrived");
    *arrived = 0;
    const auto body = [&] {
      if (threadIdx.x == 0) {
        atomicAdd(arrived, 1);
        while (atomicAdd(arrived, 0) < 4) {
        }
      }
      __syncthreads();
    };
    EXPECT_NO_THROW(device.launch({"grid barrier", {4}, 64, 0, true, 4}, body));
  }
}

struct OrderFaults {
  bool release = true, acquire = true, barrier = true, wait = true;
};
// Each CTA stores its part with all threads; the one that comes last adds all parts up.
std::string last_cta(const OrderFaults& f, int resident) {
  constexpr int kCtas = 3, kThreads = 64;
  for (const Options& o : schedules(9)) {
    Device device(o);
    int* parts = device.alloc<int>(kCtas * kThreads, "parts");
    int* arrived = device.alloc<int>(1, "arrived");
    int* sum = device.alloc<int>(1, "sum");
    *arrived = 0;
    const auto body = [&] {
      FOURFOLD_DYNAMIC_SHARED(smem);
      int* last = reinterpret_cast<int*>(smem);
      parts[blockIdx.x * kThreads + threadIdx.x] = 1;
      if (f.barrier) __syncthreads();
      if (threadIdx.x == 0) {
        if (f.release) __threadfence();  // of what the barrier ordered before it, too
        *last = atomicAdd(arrived, 1) == kCtas - 1 ? 1 : 0;
        if (f.acquire) __threadfence();
      }
      __syncthreads();
      if (f.wait && *last == 0) return;
      if (threadIdx.x != 0) return;
      int all = 0;
      for (int i = 0; i < kCtas * kThreads; ++i) all += parts[i];
      *sum = all;
    };
    try {
      device.launch({"last CTA", {kCtas}, kThreads, 16, true, resident}, body);
      if (*sum != kCtas * kThreads) return "wrong sum";
    } catch (const Violation& v) {
      return v.what();
    }
  }
  return "";
}

TEST(Executor, WhatOtherCtasStoreNeedsFencesAndAnAtomicOperation) {
  if (!Device::checks_plain_accesses()) GTEST_SKIP() << "plain accesses are not seen in sanitizer builds";
  for (const int resident : {1, 3}) {
    EXPECT_EQ(last_cta({}, resident), "");
    EXPECT_CONTAINS(last_cta({.release = false}, resident), "wrote in this launch: nothing orders the two");
    EXPECT_CONTAINS(last_cta({.acquire = false}, resident), "wanted: __threadfence");
    EXPECT_CONTAINS(last_cta({.barrier = false}, resident), "wrote in this launch: nothing orders the two");
    EXPECT_CONTAINS(last_cta({.wait = false}, resident), "wrote in this launch: nothing orders the two");
  }
}

TEST(Executor, ThreadsOfACtaNeedTheirBarrierInGlobalMemoryToo) {
  if (!Device::checks_plain_accesses()) GTEST_SKIP() << "plain accesses are not seen in sanitizer builds";
  for (const bool barrier : {true, false}) {
    Device device(Options{});
    int* values = device.alloc<int>(64, "values");
    int* out = device.alloc<int>(64, "out");
    const auto body = [&] {
      values[threadIdx.x] = static_cast<int>(threadIdx.x);
      if (barrier) __syncthreads();
      out[threadIdx.x] = values[63 - threadIdx.x];
    };
    if (barrier) {
      EXPECT_NO_THROW(device.launch({"exchange", {}, 64, 0}, body));
    } else {
      EXPECT_THROW(device.launch({"exchange", {}, 64, 0}, body), Violation);
    }
  }
}

struct ClusterFaults {
  bool begin = true, order = true, stays = true;
  unsigned to = 1;  // further
};
// Each CTA of two stores its number to the other's shared memory, where all threads read it.
std::string cluster(const ClusterFaults& f) {
  LaunchConfig config = {"cluster", {4, 2}, 64, 256};
  config.cluster = 2;
  return run(config, [&] {
    FOURFOLD_DYNAMIC_SHARED(smem);
    float* values = reinterpret_cast<float*>(smem);
    const u32 cta = blockIdx.x % 2;
    if (f.begin) {
      cluster_arrive();
      cluster_wait();
    }
    cluster_store(shared_address(values + threadIdx.x), f.to == 1 ? 1 - cta : f.to, static_cast<float>(cta));
    if (!f.stays && cta == 0) return;
    if (f.order) {
      cluster_arrive();
      cluster_wait();
    } else {
      __syncthreads();
    }
    if (values[63 - threadIdx.x] != static_cast<float>(1 - cta)) machine_fails();
  });
}

TEST(Executor, AClusterStoresToItsOwnSharedMemoryBetweenBarriers) {
  EXPECT_CONTAINS(cluster({.begin = false}), "may not have begun");
  EXPECT_CONTAINS(cluster({.to = 2}), "to CTA ");
  EXPECT_CONTAINS(cluster({.stays = false}), "threads have arrived");
  EXPECT_CONTAINS(run({"alone", {}, 32, 256}, [] { cluster_arrive(); }), "no clusters");
  EXPECT_NE(cluster({.order = false}), "");
  LaunchConfig odd = {"odd", {3}, 32, 256};
  odd.cluster = 2;
  EXPECT_CONTAINS(run(odd, [] {}), "3 CTAs in clusters of 2");
  EXPECT_EQ(cluster({}), "");
}

}  // namespace
}  // namespace fourfold::executor
