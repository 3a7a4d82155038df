#include "cpu/gemm/dispatch.h"

#include <algorithm>

#include "base/check.h"

namespace fourfold::cpu::gemm {
namespace {

bool has_vnni_and_vbmi() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512vnni") != 0 && __builtin_cpu_supports("avx512vbmi") != 0;
#else
  return false;
#endif
}

// The AMX file brings its own matrix products; the integer dot products come from the VNNI or the plain AVX-512 file.
KernelTable with_dot_products(const KernelTable& base) {
  KernelTable kernels = base;
  const KernelTable* dot = has_vnni_and_vbmi() ? avx512vnni_kernels() : avx512_kernels();
  kernels.quantize = dot->quantize;
  kernels.gemv_nvfp4 = dot->gemv_nvfp4;
  kernels.gemv_float = dot->gemv_float;
  kernels.swiglu = dot->swiglu;
  kernels.axpy = dot->axpy;
  return kernels;
}

// No wider registers than AVX2's, so what the operating system saves for AVX2 is enough.
bool has_avx_vnni() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avxvnni") != 0;
#else
  return false;
#endif
}

const KernelTable& avx512_table() { return has_vnni_and_vbmi() ? *avx512vnni_kernels() : *avx512_kernels(); }

}  // namespace

const KernelTable& kernels_for(Isa isa) {
  switch (isa) {
    case Isa::kReference:
      break;
    case Isa::kAvx2:
      if (avxvnni_kernels() != nullptr && has_avx_vnni()) return *avxvnni_kernels();
      if (avx2_kernels() != nullptr) return *avx2_kernels();
      break;
    case Isa::kAvx512:
      if (avx512_kernels() != nullptr) return avx512_table();
      break;
    case Isa::kAmx:
      if (amx_kernels() != nullptr) {
        static const KernelTable kernels = with_dot_products(*amx_kernels());
        return kernels;
      }
      break;
    case Isa::kNeon:
      if (neon_kernels() != nullptr) return *neon_kernels();
      break;
    case Isa::kDotprod:
      if (dotprod_kernels() != nullptr) return *dotprod_kernels();
      break;
    case Isa::kMmla:
      if (i8mm_kernels() != nullptr) return *i8mm_kernels();
      break;
  }
  fail("this build has no matrix kernels for instruction set {}", isa_name(isa));
}

const KernelTable* beside_kernels_for(Isa isa) { return isa == Isa::kMmla ? bfmmla_kernels() : nullptr; }

const KernelTable& wide_kernels_for(Isa isa) {
  const KernelTable& kernels = kernels_for(isa);
  if (kernels.gemm_kinds == kAllKinds) return kernels;
  return isa == Isa::kMmla ? *dotprod_kernels() : *avx512_kernels();
}

const KernelTable* twin_kernels_for(Isa isa) {
  if (isa == Isa::kMmla) return i8mm_kernels();
  const bool wide = isa == Isa::kAvx512 || isa == Isa::kAmx;
  return wide && has_vnni_and_vbmi() ? avx512vnni_kernels() : nullptr;
}

std::vector<const KernelTable*> runnable_kernels() {
  std::vector<const KernelTable*> all;
  for (const Isa isa : supported_isas()) {
    if (isa == Isa::kReference) continue;
    if (isa == Isa::kAvx2) all.push_back(avx2_kernels());
    if (isa == Isa::kAvx512) all.push_back(avx512_kernels());
    for (const KernelTable* kernels : {&kernels_for(isa), beside_kernels_for(isa)}) {
      if (kernels != nullptr && std::find(all.begin(), all.end(), kernels) == all.end()) all.push_back(kernels);
    }
  }
  return all;
}

}  // namespace fourfold::cpu::gemm
