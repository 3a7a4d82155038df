// The inner loops that every fast instruction set has its own version of, matrix products apart: one source compiled
// once for each instruction set, chosen at run time through tables of function pointers. A source with special compile
// flags must not share inline functions with others: the linker keeps one copy of each, and it must run everywhere.
#pragma once

#include "cpu/attention/kernels.h"
#include "cpu/delta/kernels.h"
#include "cpu/host/isa.h"
#include "cpu/host/row_kernels.h"

namespace fourfold::cpu {

struct Kernels {
  RowKernels rows;
  AttentionKernels attention;
  DeltaKernels delta;
};

// Of an instruction set of this family of processors (isa.h); several may share theirs. kReference has none.
const Kernels& kernels_of(Isa isa);

const Kernels& kernels_avx2();
const Kernels& kernels_avx512();
const Kernels& kernels_neon();

}  // namespace fourfold::cpu
