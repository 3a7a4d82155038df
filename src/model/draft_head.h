// The matrix that drafts are chosen with.
//
// A draft reads the whole head for one row: of the 35B shape 1 GB in bf16, four fifths of a drafting pass. Which token
// is drafted need not be exact, because every draft is verified with the head as it is stored. So drafts are chosen
// with a copy of it in NVFP4, 9/32 of the bytes.
#pragma once

#include <optional>

#include "ops/tensor.h"

namespace fourfold::model {

// A copy of a head's rows in NVFP4, which owns its memory; without data where the head has none (a source of shapes).
// Nothing where there is nothing to gain or no such copy: the head has a byte or less for each weight, its width is no
// multiple of NVFP4's block, or one of its weights is not finite. FOURFOLD_DRAFT_HEAD=stored: nothing. `threads`
// make it; 0: the default of base/threads.h.
std::optional<ops::MatrixSource> draft_head_of(const ops::MatrixSource& head, int threads = 0);

}  // namespace fourfold::model
