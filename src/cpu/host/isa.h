// The instruction sets that CPU backends are made for.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace fourfold::cpu {

// In ascending order of speed. kReference is plain C++ on fp32 and is the truth for all others.
enum class Isa : uint8_t { kReference, kAvx2, kAvx512, kAmx };

const char* isa_name(Isa isa);         // "reference", "avx2", "avx512", "amx"
Isa parse_isa(std::string_view name);  // an Error lists the names
std::vector<Isa> supported_isas();     // on this processor, ascending; always has kReference
Isa best_isa();
bool has_avx512bf16();  // vdpbf16ps; a ceiling is measured with it, no kernel needs it

}  // namespace fourfold::cpu
