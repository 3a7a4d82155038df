// The instruction sets that CPU backends are made for.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace fourfold::cpu {

// kReference is plain C++ on fp32 and is the truth for all others. Then x86: AVX2 with FMA and F16C; AVX-512 F, BW, DQ,
// VL; AMX. Then Arm: NEON as every arm64 processor has it; FEAT_DotProd; FEAT_I8MM and FEAT_BF16 beside it. In
// ascending order of speed within a family of processors.
enum class Isa : uint8_t { kReference, kAvx2, kAvx512, kAmx, kNeon, kDotprod, kMmla };

const char* isa_name(Isa isa);         // "reference", "avx2", "avx512", "amx", "neon", "dotprod", "mmla"
std::span<const Isa> family_isas();    // what this build has for its family of processors, ascending
std::string family_isa_names();        // their names, comma-separated
Isa parse_isa(std::string_view name);  // of family_isas(); an Error lists the names
std::vector<Isa> supported_isas();     // on this processor, ascending; always has kReference
Isa best_isa();
bool has_avx512bf16();  // vdpbf16ps; a ceiling is measured with it, no kernel needs it

}  // namespace fourfold::cpu
