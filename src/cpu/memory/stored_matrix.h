// A weight matrix that keeps the form it has in the checkpoint.
#pragma once

#include <cstdint>

#include "cpu/memory/host_buffer.h"
#include "ops/ops.h"

namespace fourfold::cpu {

// An Error that names the matrix when its sizes, scales or pointers do not fit its format.
void check_source(const ops::MatrixSource& source);

// A private copy of a source: elements and scales.
class StoredMatrix {
 public:
  explicit StoredMatrix(const ops::MatrixSource& source);
  const ops::MatrixSource& view() const { return view_; }
  int64_t bytes() const { return view_.bytes(); }

 private:
  HostBuffer data_;
  HostBuffer scales_;
  ops::MatrixSource view_;
};

}  // namespace fourfold::cpu
