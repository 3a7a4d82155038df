#include "base/check.h"
#include "ops/ops.h"

namespace fourfold::ops {

bool Backend::all_reduce(const Tensor&, const Tensor&) { return false; }

void Backend::reduce_add_rms_norm(const Tensor&, const Tensor&, const Vector&, float, const Tensor&, Residual) {
  fail("{}: made for one rank, asked for a sum over ranks", description());
}

void Backend::gather_columns(const Tensor&, const Tensor&) {
  fail("{}: made for one rank, asked for the columns of others", description());
}

}  // namespace fourfold::ops
