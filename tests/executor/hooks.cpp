// Plain loads and stores of kernels. Their translation units are compiled with -fsanitize=thread, which puts a call in
// front of every load and store, and linked with these functions in place of the sanitizer's own.
#include <cstring>

#include "executor/machine.h"

namespace fourfold::executor {
namespace {

void seen(const void* p, std::size_t bytes, Access access) {
  if (!machine_runs()) return;
  Machine& m = machine();
  if (m.in_global(p) || m.shared_offset(p) >= 0) m.plain_access(p, bytes, access);
}

}  // namespace
}  // namespace fourfold::executor

using fourfold::executor::Access;
using fourfold::executor::seen;

#define FOURFOLD_HOOK(N)                                                  \
  void __tsan_read##N(void* p) { seen(p, N, Access::kRead); }             \
  void __tsan_write##N(void* p) { seen(p, N, Access::kWrite); }           \
  void __tsan_unaligned_read##N(void* p) { seen(p, N, Access::kRead); }   \
  void __tsan_unaligned_write##N(void* p) { seen(p, N, Access::kWrite); } \
  void __tsan_volatile_read##N(void* p) { seen(p, N, Access::kRead); }    \
  void __tsan_volatile_write##N(void* p) { seen(p, N, Access::kWrite); }

extern "C" {
FOURFOLD_HOOK(1)
FOURFOLD_HOOK(2)
FOURFOLD_HOOK(4)
FOURFOLD_HOOK(8)
FOURFOLD_HOOK(16)
void __tsan_read_range(void* p, std::size_t n) { seen(p, n, Access::kRead); }
void __tsan_write_range(void* p, std::size_t n) { seen(p, n, Access::kWrite); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void* __tsan_memcpy(void* to, const void* from, std::size_t n) {
  seen(from, n, Access::kRead);
  seen(to, n, Access::kWrite);
  return std::memcpy(to, from, n);
}
void* __tsan_memmove(void* to, const void* from, std::size_t n) {
  seen(from, n, Access::kRead);
  seen(to, n, Access::kWrite);
  return std::memmove(to, from, n);
}
void* __tsan_memset(void* to, int value, std::size_t n) {
  seen(to, n, Access::kWrite);
  return std::memset(to, value, n);
}
}
