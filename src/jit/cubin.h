// What a compiled kernel uses, read from the cubin itself. A cubin is an ELF64 file (machine 190); each kernel is a
// global function symbol with a section .text.NAME; registers and stack are in .nv.info, keyed by symbol; static shared
// memory is the size of .nv.shared.NAME.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace fourfold::jit {

struct KernelUse {
  std::string name;  // mangled
  int registers = 0;
  int64_t stack_bytes = 0;   // local memory per thread: arrays the compiler could not keep in registers, and spills
  int64_t shared_bytes = 0;  // static; 1 KB that the system reserves is not counted
  int64_t code_bytes = 0;
};

// All kernels of a cubin, by name. The bytes are untrusted: Error, naming `what`, on anything that is not a well-formed
// cubin. Limits: 64 MB, 4096 sections, 65536 symbols.
std::vector<KernelUse> read_cubin(std::string_view bytes, std::string_view what);

}  // namespace fourfold::jit
