// The wrappers of src/kernels/ptx/sm90.cuh for the executor: the same signatures, plus the place they are called from.
#pragma once

#include "executor/cuda.h"
#include "kernels/ptx/tensor_map.h"
#include "nvfp4/number.h"

#define FOURFOLD_DYNAMIC_SHARED(name) unsigned char* const name = ::fourfold::executor::dynamic_shared()

namespace fourfold::executor {
unsigned char* dynamic_shared();
}

namespace fourfold::ptx {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

u32 shared_address(const void* p);

void mbarrier_init(u32 bar, u32 arrivals, Site site = Site::here());
void fence_barrier_init(Site site = Site::here());
void fence_async_shared(Site site = Site::here());
void mbarrier_arrive(u32 bar, Site site = Site::here());
void mbarrier_arrive_expect(u32 bar, u32 bytes, Site site = Site::here());
bool mbarrier_try_wait(u32 bar, u32 parity, Site site = Site::here());
inline bool mbarrier_test_wait(u32 bar, u32 parity, Site site = Site::here()) {
  return mbarrier_try_wait(bar, parity, site);
}
void mbarrier_wait(u32 bar, u32 parity, Site site = Site::here());

void cluster_arrive(Site site = Site::here());
void cluster_wait(Site site = Site::here());
void cluster_store(u32 at, u32 to, float value, Site site = Site::here());
inline void cluster_store4(u32 at, u32 to, float4 v, Site site = Site::here()) {
  const float each[4] = {v.x, v.y, v.z, v.w};
  for (u32 i = 0; i < 4; ++i) cluster_store(at + 4 * i, to, each[i], site);
}

inline u64 policy_evict_first() { return 1; }
inline u64 policy_evict_last() { return 2; }
void bulk_copy(u32 destination, const void* source, u32 bytes, u32 bar, u64 policy, Site site = Site::here());

void prefetch_tensor_map(const TensorMap& map, Site site = Site::here());
void tensor_copy_row(u32 destination, const TensorMap& map, int column, int row, u32 bar, Site site = Site::here());
void tensor_copy_rows(u32 destination, const TensorMap& map, int column, int row, int rows, u32 bar,
                      Site site = Site::here());
bool one_lane(Site site = Site::here());

void bulk_store(void* destination, u32 source, u32 bytes, Site site = Site::here());
void bulk_store_commit(Site site = Site::here());
void bulk_store_wait_read(Site site = Site::here());
void bulk_store_wait(Site site = Site::here());

void async_copy16(u32 destination, const void* source, Site site = Site::here());
void async_copy8(u32 destination, const void* source, Site site = Site::here());
void async_copy4(u32 destination, const void* source, Site site = Site::here());
void async_copy_commit(Site site = Site::here());
void async_copy_wait_groups(int pending, Site site);
template <int Pending>
void async_copy_wait(Site site = Site::here()) {
  async_copy_wait_groups(Pending, site);
}

template <int Count>
void registers_decrease() {
  static_assert(Count >= 24 && Count <= 256 && Count % 8 == 0);
}
template <int Count>
void registers_increase() {
  static_assert(Count >= 24 && Count <= 256 && Count % 8 == 0);
}
inline void hold_fragment(const u32 (&)[4], int) {}
template <int Count>
void keep_registers(float (&)[Count]) {}

inline u32 keep_register(u32 x) { return x; }
inline int keep_register(int x) { return x; }
inline void finish_before(float) {}

void grid_dependency_wait(Site site = Site::here());
void grid_launch_dependents(Site site = Site::here());

void raise_flag(int* flag, int count, int lane, Site site = Site::here());
int wait_flags(const int* flag, int count, int value, int lane, Site site = Site::here());
void wait_count(const int* count, int value, Site site = Site::here());
// The patience is counted in turns of the CTA, in each of which there is a look at the flag.
void raise_peer_flag(u32* flag, u32 value, Site site = Site::here());
bool wait_peer_flag(const u32* flag, u32 value, u64 patience, Site site = Site::here());
inline void prefetch_l2(const void*) {}
void discard_l2(void* p, Site site = Site::here());

struct Vec4 {
  u32 x, y, z, w;
};
struct Vec2 {
  u32 x, y;
};
// Words between CTAs that run at the same time, of one kernel or of two. Whoever looks at a word that is not there
// waits for it.
void store_exchanged(u32* p, u32 word, Site site = Site::here());
void store_exchanged2(u32* p, u32 x, u32 y, Site site = Site::here());
void store_exchanged4(u32* p, const Vec4& v, Site site = Site::here());
Vec2 load_exchanged2(const u32* p, Site site = Site::here());
Vec4 load_exchanged4(const u32* p, Site site = Site::here());
void clear_exchanged2(u32* p, Site site = Site::here());
void clear_exchanged4(u32* p, Site site = Site::here());
// The patience is counted as that of wait_peer_flag.
void store_peer4(u32* p, const Vec4& v, Site site = Site::here());
bool take_peer_words(Vec4* v, u32* const* places, int count, u64 patience, Site site);  // null: none is wanted there
template <int Count, typename Wanted, typename Place>
bool take_peer_words_at(Vec4 (&v)[Count], const Wanted& wanted, const Place& place, u64 patience, u32,
                        Site site = Site::here()) {
  u32* places[Count];
  for (int i = 0; i < Count; ++i) places[i] = wanted(i) ? place(i) : nullptr;
  return take_peer_words(&v[0], places, Count, patience, site);
}
template <int Count>
bool take_peer_words(Vec4 (&v)[Count], u32* p, int stride, int count, u64 patience, u32 pause,
                     Site site = Site::here()) {
  return take_peer_words_at(
      v, [&](int i) { return i < count; }, [&](int i) { return p + static_cast<std::ptrdiff_t>(i) * stride; }, patience,
      pause, site);
}

Vec4 load_shared4(u32 address, Site site = Site::here());
Vec2 load_shared2(u32 address, Site site = Site::here());
u32 load_shared1(u32 address, Site site = Site::here());
void load_matrix4(u32 (&r)[4], u32 address, Site site = Site::here());
void store_matrix4_transposed(u32 address, const u32 (&r)[4], Site site = Site::here());
void barrier_sync(int id, int threads, Site site = Site::here());

template <u32 Mask>
u32 and_or(u32 x, u32 base) {
  return (x & Mask) | base;
}
inline u32 mul_bf16x2(u32 a, u32 b) {
  const auto product = [](u32 x, u32 y) {
    return static_cast<u32>(
        nvfp4::float_to_bf16(nvfp4::bf16_to_float(static_cast<u16>(x)) * nvfp4::bf16_to_float(static_cast<u16>(y))));
  };
  return product(a & 0xffffu, b & 0xffffu) | product(a >> 16, b >> 16) << 16;
}
inline u32 mul_bf16x2_pinned(u32 a, u32 b) { return mul_bf16x2(a, b); }
inline u32 or_pinned(u32 a, u32 b) { return a | b; }
inline u32 both_low(u32 a) { return (a & 0xffffu) | a << 16; }
inline u32 both_high(u32 a) { return (a >> 16) | (a & 0xffff0000u); }
float exp2_approx(float x);        // ftz, like the instruction
float reciprocal_approx(float x);  //
float max_magnitude(float x, float y);
inline u16 to_bf16(float x) { return x == x ? nvfp4::float_to_bf16(x) : u16{0x7fff}; }  // the card has one NaN
inline u32 to_bf16x2(float low, float high) { return to_bf16(low) | static_cast<u32>(to_bf16(high)) << 16; }

void mma_m16n8k16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, Site site = Site::here());

}  // namespace fourfold::ptx
