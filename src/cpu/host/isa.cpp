// What the processor and the operating system support. On x86 a CPUID bit alone is not enough: the system must also
// save the wider registers (XCR0), and on Linux a process asks for the AMX tile registers before it uses them. On Arm
// the system says what both support (AT_HWCAP).
#include <cstdint>
#include <span>
#include <string>

#include "base/check.h"
#include "cpu/host/isa.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace fourfold::cpu {
namespace {

#if defined(__x86_64__)
constexpr Isa kFamily[] = {Isa::kReference, Isa::kAvx2, Isa::kAvx512, Isa::kAmx};
#elif defined(__aarch64__)
constexpr Isa kFamily[] = {Isa::kReference, Isa::kNeon, Isa::kDotprod, Isa::kMmla};
#else
constexpr Isa kFamily[] = {Isa::kReference};
#endif

struct Features {
  bool avx2 = false;        // with FMA and F16C
  bool avx512 = false;      // F, BW, DQ, VL
  bool avx512bf16 = false;  // with avx512
  bool amx = false;         // tiles and bf16 products, with avx512bf16 and FP16 vectors, and permission to use them
  bool neon = false;
  bool dotprod = false;  // products of signed bytes, summed in fours
  bool mmla = false;     // matrices of 2 x 2 from bytes and from bf16, with dotprod
};

#if defined(__x86_64__)

uint64_t read_xcr0() {
  uint32_t low = 0;
  uint32_t high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<uint64_t>(high) << 32) | low;
}

// Asks for the tile data registers (Linux 5.16 and later; older kernels refuse, and would not save them either).
bool request_amx() {
  constexpr long kArchReqXcompPerm = 0x1023;
  constexpr unsigned long kXfeatureTileData = 18;
  return ::syscall(SYS_arch_prctl, kArchReqXcompPerm, kXfeatureTileData) == 0;
}

Features detect() {
  Features features;
  uint32_t a = 0;
  uint32_t b = 0;
  uint32_t c = 0;
  uint32_t d = 0;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0) return features;
  const bool fma = (c >> 12 & 1) != 0;
  const bool osxsave = (c >> 27 & 1) != 0;
  const bool f16c = (c >> 29 & 1) != 0;
  if (!osxsave) return features;
  const uint64_t xcr0 = read_xcr0();
  constexpr uint64_t kYmm = 0x6;
  constexpr uint64_t kZmm = 0xe6;
  constexpr uint64_t kTiles = 0x60000;

  uint32_t d7 = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d7) == 0) return features;
  const uint32_t max_subleaf = a;
  const auto ebx = [&](int bit) { return (b >> bit & 1) != 0; };
  features.avx2 = ebx(5) && fma && f16c && (xcr0 & kYmm) == kYmm;
  features.avx512 = features.avx2 && ebx(16) && ebx(17) && ebx(30) && ebx(31) && (xcr0 & kZmm) == kZmm;
  bool bf16 = false;
  if (max_subleaf >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0) bf16 = (a >> 5 & 1) != 0;
  features.avx512bf16 = features.avx512 && bf16;
  const bool amx = (d7 >> 22 & 1) != 0 && (d7 >> 23 & 1) != 0 && (d7 >> 24 & 1) != 0;  // bf16, AVX512-FP16, tiles
  features.amx = features.avx512bf16 && amx && (xcr0 & kTiles) == kTiles && request_amx();
  return features;
}

#elif defined(__aarch64__)

Features detect() {
  const unsigned long first = ::getauxval(AT_HWCAP);
  const unsigned long second = ::getauxval(AT_HWCAP2);
  Features features;
  features.neon = (first & HWCAP_ASIMD) != 0;
  features.dotprod = features.neon && (first & HWCAP_ASIMDDP) != 0;
  features.mmla = features.dotprod && (second & HWCAP2_I8MM) != 0 && (second & HWCAP2_BF16) != 0;
  return features;
}

#else

Features detect() { return {}; }

#endif

const Features& features() {
  static const Features found = detect();
  return found;
}

}  // namespace

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::kReference:
      return "reference";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAmx:
      return "amx";
    case Isa::kNeon:
      return "neon";
    case Isa::kDotprod:
      return "dotprod";
    case Isa::kMmla:
      return "mmla";
  }
  return "unknown";
}

std::span<const Isa> family_isas() { return kFamily; }

std::string family_isa_names() {
  std::string names;
  for (const Isa isa : kFamily) {
    names += names.empty() ? "" : ", ";
    names += isa_name(isa);
  }
  return names;
}

Isa parse_isa(std::string_view name) {
  for (const Isa isa : kFamily) {
    if (name == isa_name(isa)) return isa;
  }
  fail("unknown instruction set '{}', wanted one of {}", printable(name), family_isa_names());
}

std::vector<Isa> supported_isas() {
  std::vector<Isa> isas = {Isa::kReference};
  if (features().avx2) isas.push_back(Isa::kAvx2);
  if (features().avx512) isas.push_back(Isa::kAvx512);
  if (features().amx) isas.push_back(Isa::kAmx);
  if (features().neon) isas.push_back(Isa::kNeon);
  if (features().dotprod) isas.push_back(Isa::kDotprod);
  if (features().mmla) isas.push_back(Isa::kMmla);
  return isas;
}

Isa best_isa() { return supported_isas().back(); }

bool has_avx512bf16() { return features().avx512bf16; }

}  // namespace fourfold::cpu
