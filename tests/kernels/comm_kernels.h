// The kernels between ranks as tests launch them on the host executor.
#pragma once

#include "kernels/comm/reduce_args.h"

namespace fourfold::comm {

enum class Way { kFlags, kWords, kTwoShot, kEach, kInFront };

// With as many pieces as the columns want. kEach: a CTA for each row, up to two pieces. kInFront: every CTA makes all
// rows, CTA c from args.norm.out + c x rows x columns on, as products do it for themselves; for up to two pieces.
void reduce_kernel(const ReduceArgs& args, Way way);
// A thread of each CTA, one after the other: counts it, and waits for so many in all.
void await_ctas(int* counted, int count);

}  // namespace fourfold::comm
