// Which kernels run on this processor.
#pragma once

#include <vector>

#include "cpu/gemm/layout.h"
#include "cpu/host/isa.h"

namespace fourfold::cpu::gemm {

// The kernels of `isa`, with the best variants this processor has (e.g. VNNI within kAvx512). The processor must
// support `isa`; kReference has none.
const KernelTable& kernels_for(Isa isa);

// For matrices that kernels_for(isa).gemm does not take (gemm_kinds), where this takes them; null: none.
const KernelTable* beside_kernels_for(Isa isa);

// For matrices that neither takes: fp32 throughout.
const KernelTable& wide_kernels_for(Isa isa);

// The table whose gemm gives the bits of kernels_for(isa).gemv_nvfp4, for NVFP4 only; null: this processor has none.
const KernelTable* twin_kernels_for(Isa isa);

// Every kernel table that this processor can run, ascending: more than one may belong to one Isa. For tests and
// measurements.
std::vector<const KernelTable*> runnable_kernels();

}  // namespace fourfold::cpu::gemm
