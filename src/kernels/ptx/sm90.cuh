// PTX wrappers: mbarriers, bulk copies, programmatic launch (sm_90 and later), cp.async, ldmatrix, mma.sync (sm_80 and
// later). Code that only calls the latter compiles for every architecture.
// Freestanding: compiles under NVRTC and nvcc without any include of theirs. All inline assembly of the kernels is in
// this folder, behind plain C++ signatures: tests/executor implements the same wrappers on the host.
#pragma once

#include "kernels/ptx/tensor_map.h"

namespace fourfold::ptx {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

// The kernel's dynamic shared memory, under a name of its own.
#define FOURFOLD_DYNAMIC_SHARED(name) extern __shared__ __align__(1024) unsigned char name[]

__device__ __forceinline__ u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

// ---- mbarriers ------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void mbarrier_init(u32 bar, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}
// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void mbarrier_arrive(u32 bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive_expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ bool mbarrier_try_wait(u32 bar, u32 parity) {
  u32 done;
  asm volatile(
      "{.reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;}"
      : "=r"(done)
      : "r"(bar), "r"(parity)
      : "memory");
  return done != 0;
}
// Looks once; the other may sleep until a time limit of the hardware.
__device__ __forceinline__ bool mbarrier_test_wait(u32 bar, u32 parity) {
  u32 done;
  asm volatile(
      "{.reg .pred p;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;}"
      : "=r"(done)
      : "r"(bar), "r"(parity)
      : "memory");
  return done != 0;
}
__device__ __forceinline__ void mbarrier_wait(u32 bar, u32 parity) {
  while (!mbarrier_try_wait(bar, parity)) {
  }
}

// ---- clusters -------------------------------------------------------------------------------------------------------

// All threads of all CTAs of the cluster arrive, and wait, in turns: what they did before they arrived is seen behind
// the wait. A CTA's shared memory is there for others from its first arrival on, until it has arrived last.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// At this thread's address `at` in the shared memory of the cluster's CTA number `cta`.
__device__ __forceinline__ void cluster_store(u32 at, u32 cta, float value) {
  asm volatile(
      "{.reg .u32 to;\n"
      "mapa.shared::cluster.u32 to, %0, %1;\n"
      "st.shared::cluster.f32 [to], %2;}" ::"r"(at),
      "r"(cta), "f"(value)
      : "memory");
}

// The same, of 16 bytes at a multiple of 16.
__device__ __forceinline__ void cluster_store4(u32 at, u32 cta, float4 v) {
  asm volatile(
      "{.reg .u32 to;\n"
      "mapa.shared::cluster.u32 to, %0, %1;\n"
      "st.shared::cluster.v4.f32 [to], {%2, %3, %4, %5};}" ::"r"(at),
      "r"(cta), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
      : "memory");
}

// ---- bulk copies ----------------------------------------------------------------------------------------------------

__device__ __forceinline__ u64 policy_evict_first() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ u64 policy_evict_last() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
// `bytes`, both addresses: multiples of 16.
__device__ __forceinline__ void bulk_copy(u32 destination, const void* source, u32 bytes, u32 bar, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(destination),
      "l"(source), "r"(bytes), "r"(bar), "l"(policy)
      : "memory");
}

// A TensorMap (of 16-bit values, in pieces of a row's 64 columns) is used soon.
__device__ __forceinline__ void prefetch_tensor_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
// Columns [column, column + 64) of row `row` to 128 bytes of shared memory at a multiple of 128, their 16-byte pieces
// exchanged as its 128-byte swizzle wants it there: piece c at place c ^ (destination / 128 % 8). What lies outside the
// matrix is zero. To be called by one lane (one_lane()).
__device__ __forceinline__ void tensor_copy_row(u32 destination, const TensorMap& map, int column, int row, u32 bar) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::
          "r"(destination),
      "l"(&map), "r"(column), "r"(row), "r"(bar)
      : "memory");
}
// The same for `rows` rows from `row` on, one after the other in shared memory: as many as the map says.
__device__ __forceinline__ void tensor_copy_rows(u32 destination, const TensorMap& map, int column, int row, int,
                                                 u32 bar) {
  tensor_copy_row(destination, map, column, row, bar);
}
// A whole warp: true for one lane of it. The compiler knows that it is one, and then issues the copies in its branch
// from uniform registers, without a loop over lanes.
__device__ __forceinline__ bool one_lane() {
  u32 chosen;
  asm volatile(
      "{.reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;}"
      : "=r"(chosen)::"memory");
  return chosen != 0;
}

// Shared to global memory; `bytes`, both addresses: multiples of 16. What the CTA's threads wrote must have been fenced
// (fence_async_shared) by each of them before.
__device__ __forceinline__ void bulk_store(void* destination, u32 source, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(destination), "r"(source), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void bulk_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until this thread's bulk stores have read their sources.
__device__ __forceinline__ void bulk_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
// Until this thread's bulk stores have been written.
__device__ __forceinline__ void bulk_store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// ---- asynchronous copies of one thread, in groups -------------------------------------------------------------------

// 16 bytes, both addresses multiples of 16; past L1.
__device__ __forceinline__ void async_copy16(u32 destination, const void* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(destination), "l"(source) : "memory");
}
// 8 bytes, both addresses multiples of 8; 4 bytes, of 4.
__device__ __forceinline__ void async_copy8(u32 destination, const void* source) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(destination), "l"(source) : "memory");
}
__device__ __forceinline__ void async_copy4(u32 destination, const void* source) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(destination), "l"(source) : "memory");
}
__device__ __forceinline__ void async_copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most `Pending` of this thread's groups are under way.
template <int Pending>
__device__ __forceinline__ void async_copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// ---- registers ------------------------------------------------------------------------------------------------------

// All warps of a warpgroup give registers back, or ask for more: `Count` per thread from here on.
template <int Count>
__device__ __forceinline__ void registers_decrease() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
}
template <int Count>
__device__ __forceinline__ void registers_increase() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
}
// The compiler must take the values for changed here: accumulators that an asynchronous instruction wrote.
template <int Count>
__device__ __forceinline__ void keep_registers(float (&d)[Count]) {
#pragma unroll
  for (int i = 0; i < Count; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Fragments that a wgmma reads: the compiler must keep them until here, behind the wait for that wgmma. It takes them
// for done with once the wgmma is issued, and would load others into the same registers while the hardware still reads
// them. `never` is 0, which only the host knows.
__device__ __forceinline__ void hold_fragment(const u32 (&a)[4], int never) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %4, 0;\n@p st.shared.v4.b32 [%5], {%0, %1, %2, %3};\n}" ::"r"(a[0]),
               "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(never), "r"(0)
               : "memory");
}

// Keeps what `x`, which is never negative, depends on in front of what follows: the assembler moves waits for wgmma up,
// across work that could hide the multiplication. Nobody ever sleeps.
__device__ __forceinline__ void finish_before(float x) {
  asm volatile(
      "{.reg .pred p;\n"
      "setp.lt.f32 p, %0, 0f00000000;\n"
      "@p nanosleep.u32 20;}" ::"f"(x)
      : "memory");
}

// The compiler must take the value for unknown from here on: a constant is then a register, computed once.
__device__ __forceinline__ u32 keep_register(u32 x) {
  asm volatile("" : "+r"(x));
  return x;
}
__device__ __forceinline__ int keep_register(int x) { return static_cast<int>(keep_register(static_cast<u32>(x))); }

// ---- programmatic dependent launch ----------------------------------------------------------------------------------

// Below sm_90 kernels follow each other without overlap, and there is nothing to wait for.
__device__ __forceinline__ void grid_dependency_wait() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void grid_launch_dependents() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- flags between kernels that run at the same time ----------------------------------------------------------------

// A whole warp: adds `count` to the flag once everything that its lanes have seen stored can be seen on the device.
__device__ __forceinline__ void raise_flag(int* flag, int count, int lane) {
  __syncwarp();
  if (lane == 0) asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(flag), "r"(count) : "memory");
}
// A whole warp: waits until lane 0's flag is at least `value` and returns how many lanes' flags are so in a row; lanes
// from `count` on have none. What was stored before these were raised can be loaded and copied in bulk, by every lane.
__device__ __forceinline__ int wait_flags(const int* flag, int count, int value, int lane) {
  u32 waiting;
  do {
    int seen = 0;
    if (lane < count) asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
    waiting = __ballot_sync(0xffffffffu, seen < value);
  } while ((waiting & 1u) != 0);
  __syncwarp();
  asm volatile("fence.proxy.async.global;" ::: "memory");
  return waiting == 0 ? 32 : __ffs(static_cast<int>(waiting)) - 1;
}

// ---- counts between CTAs of a kernel that all have room at the same time --------------------------------------------

// Waits until `*count`, to which other CTAs add behind a __threadfence(), is at least `value`: what they stored before
// can be loaded, past L1.
__device__ __forceinline__ void wait_count(const int* count, int value) {
  int seen;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(count) : "memory");
  } while (seen < value);
}

// ---- flags between cards --------------------------------------------------------------------------------------------

// Sets a flag in the memory of any card, once everything that this thread has stored or seen stored, by a barrier too,
// can be seen there.
__device__ __forceinline__ void raise_peer_flag(u32* flag, u32 value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}
// Waits until a flag that another card raises is at least `value`, counted around; what was stored before it was raised
// can then be loaded, past L1. False after `patience` nanoseconds.
__device__ __forceinline__ bool wait_peer_flag(const u32* flag, u32 value, u64 patience) {
  u64 begin = 0;
  for (;;) {
    u32 seen;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
    if (static_cast<int>(seen - value) >= 0) return true;
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    if (begin == 0) begin = now;
    if (now - begin > patience) return false;
  }
}

// Brings the line of p to L2 if it is not there. Allowed at any time: nothing is read.
__device__ __forceinline__ void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// Nobody will read the 128 bytes at p, a multiple of 128, before they are written again: if they are in L2 only, they
// need not be written to memory. They hold anything afterwards.
__device__ __forceinline__ void discard_l2(void* p) {
  asm volatile("discard.global.L2 [%0], 128;" ::"l"(p) : "memory");
}

struct Vec4 {
  u32 x, y, z, w;
};
struct Vec2 {
  u32 x, y;
};

// ---- words between kernels that run at the same time ----------------------------------------------------------------
// A word that is its own flag: all ones until a kernel stores something else, and nothing else is ordered by it.

__device__ __forceinline__ void store_exchanged(u32* p, u32 word) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(word) : "memory");
}
// Two at a multiple of 8 bytes, four at a multiple of 16.
__device__ __forceinline__ void store_exchanged2(u32* p, u32 x, u32 y) {
  asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1,%2};" ::"l"(p), "r"(x), "r"(y) : "memory");
}
__device__ __forceinline__ void store_exchanged4(u32* p, const Vec4& v) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
// Two such words as they are at present; p a multiple of 8 bytes.
__device__ __forceinline__ Vec2 load_exchanged2(const u32* p) {
  Vec2 v;
  asm volatile("ld.relaxed.gpu.global.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory");
  return v;
}
// Four; p a multiple of 16 bytes.
__device__ __forceinline__ Vec4 load_exchanged4(const u32* p) {
  Vec4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
// Makes two of them all ones, p a multiple of 8 bytes; four, p a multiple of 16 bytes.
__device__ __forceinline__ void clear_exchanged2(u32* p) {
  asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1,%1};" ::"l"(p), "r"(0xffffffffu) : "memory");
}
__device__ __forceinline__ void clear_exchanged4(u32* p) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1,%1,%1,%1};" ::"l"(p), "r"(0xffffffffu) : "memory");
}

// The same between cards, four words at a time, at a multiple of 16 bytes.
__device__ __forceinline__ void store_peer4(u32* p, const Vec4& v) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
// Waits until the places place(i) of those i of Count that wanted(i) names have been stored to; takes the words, and
// makes them all ones again. False after `patience` nanoseconds. `pause`: so many nanoseconds between looks.
template <int Count, typename Wanted, typename Place>
__device__ __forceinline__ bool take_peer_words_at(Vec4 (&v)[Count], const Wanted& wanted, const Place& place,
                                                   u64 patience, u32 pause) {
  constexpr u64 kLooks = 16;  // that do without the clock
  u64 begin = 0;              // first so many looks, then when it was first read
  bool there;
  for (;;) {
#pragma unroll
    for (int i = 0; i < Count; ++i) {
      if (!wanted(i)) continue;
      asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                   : "=r"(v[i].x), "=r"(v[i].y), "=r"(v[i].z), "=r"(v[i].w)
                   : "l"(place(i))
                   : "memory");
    }
    there = true;
#pragma unroll
    for (int i = 0; i < Count; ++i) {
      if (!wanted(i)) continue;
      there = there && v[i].x != 0xffffffffu && v[i].y != 0xffffffffu && v[i].z != 0xffffffffu && v[i].w != 0xffffffffu;
    }
    if (there || patience == 0) break;
    if (begin < kLooks) {
      ++begin;
    } else {
      u64 now;
      asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
      if (begin == kLooks) begin = now;
      if (now - begin >= patience) break;
    }
    if (pause != 0) asm volatile("nanosleep.u32 %0;" ::"r"(pause));
  }
#pragma unroll
  for (int i = 0; i < Count; ++i) {
    if (!wanted(i)) continue;
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1,%1,%1,%1};" ::"l"(place(i)), "r"(0xffffffffu) : "memory");
  }
  return there;
}
// The first `count` of Count places, `stride` words apart from p on.
template <int Count>
__device__ __forceinline__ bool take_peer_words(Vec4 (&v)[Count], u32* p, int stride, int count, u64 patience,
                                                u32 pause) {
  return take_peer_words_at(
      v, [&](int i) { return i < count; }, [&](int i) { return p + i * stride; }, patience, pause);
}

// ---- shared loads ---------------------------------------------------------------------------------------------------

__device__ __forceinline__ Vec4 load_shared4(u32 address) {
  Vec4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
  return v;
}
__device__ __forceinline__ Vec2 load_shared2(u32 address) {
  Vec2 v;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address));
  return v;
}
__device__ __forceinline__ u32 load_shared1(u32 address) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
  return v;
}
__device__ __forceinline__ void load_matrix4(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}
// Four 8 x 8 matrices, transposed: lane 8 q + r addresses row r (16 bytes) of matrix q, and a lane's word q holds rows
// 2 (lane % 4) and 2 (lane % 4) + 1 of column lane / 4 of that matrix.
__device__ __forceinline__ void store_matrix4_transposed(u32 address, const u32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}
__device__ __forceinline__ void barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- arithmetic -----------------------------------------------------------------------------------------------------

// (x & Mask) | base in one LOP3.
template <u32 Mask>
__device__ __forceinline__ u32 and_or(u32 x, u32 base) {
  u32 r;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(x), "n"(Mask), "r"(base));
  return r;
}
__device__ __forceinline__ u32 mul_bf16x2(u32 a, u32 b) {
  u32 r;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
#else  // the same instruction with an explicit addend: -0 changes no product
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(0x80008000u));
#endif
  return r;
}
// The same, but the compiler leaves it where it is: between the multiplications it is meant to overlap with.
__device__ __forceinline__ u32 mul_bf16x2_pinned(u32 a, u32 b) {
  u32 r;
  asm volatile("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
__device__ __forceinline__ u32 or_pinned(u32 a, u32 b) {
  u32 r;
  asm volatile("or.b32 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
// Both halves of the result are one half of the argument; ptxas turns this into an operand selector, not an
// instruction.
__device__ __forceinline__ u32 both_low(u32 a) {
  u32 r;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {l, l};}" : "=r"(r) : "r"(a));
  return r;
}
__device__ __forceinline__ u32 both_high(u32 a) {
  u32 r;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {h, h};}" : "=r"(r) : "r"(a));
  return r;
}
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// The larger magnitude; NaN if either is one.
__device__ __forceinline__ float max_magnitude(float x, float y) {
  float r;
  asm("{.reg .f32 a, b; abs.f32 a, %1; abs.f32 b, %2; max.NaN.f32 %0, a, b;}" : "=f"(r) : "f"(x), "f"(y));
  return r;
}
// bf16 bits of x, round to nearest even.
__device__ __forceinline__ u16 to_bf16(float x) {
  u16 h;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(x));
  return h;
}
__device__ __forceinline__ u32 to_bf16x2(float low, float high) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace fourfold::ptx
