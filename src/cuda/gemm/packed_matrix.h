// Weight matrices of dense products in the form the GPU reads (kernels/gemm/layout.h), packed on the host.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/gemm/layout.h"
#include "ops/tensor.h"

namespace fourfold::cuda {

// Where the parts of a stack lie in one buffer; what of it does not depend on its contents.
struct PackedMatrix {
  struct Part {
    gemm::Weights format = gemm::Weights::kBf16;
    int tiles = 0;
    int rows = 0;  // paired: of each of the two
    int first_row = 0;
    int cell_units = 0;    // 0: no cells
    uint64_t weights = 0;  // offsets in the buffer, multiples of 128
    uint64_t factors = 0;
    uint64_t cells = 0;
  };
  std::vector<Part> parts;
  uint64_t size = 0;           // bytes of the buffer
  std::vector<uint8_t> bytes;  // all of them; empty where only the places are known
  int64_t rows = 0;            // outputs
  int64_t columns = 0;
  int tiles = 0;
  bool paired = false;

  // For kernels, with the bytes at `buffer` (a multiple of 128).
  gemm::Matrix at(const uint8_t* buffer) const;
  int formats() const;  // bit 1 << gemm::Weights, and gemm::kCells
};

// A stack: the parts' rows one after the other. Columns are a multiple of 16, the same in all parts. An Error names a
// part that cannot be packed: a shape that does not fit, NaN among its codes or block scales, FP8 scales in blocks that
// are no multiple of 16 rows and 64 columns (where a row has several).
PackedMatrix pack_stack(std::span<const ops::MatrixSource> parts);

// Where the parts of a stack lie, from their shapes and formats alone: no weight or scale is read. What goes there is
// made on the device (kernels/gemm/repack.cuh), which finds NaN weights, and by stack_factors().
PackedMatrix place_stack(std::span<const ops::MatrixSource> parts);
// Factors and cells of a part of place_stack(), which go to `part.factors`.
std::vector<uint8_t> stack_factors(const PackedMatrix& stack, const PackedMatrix::Part& part,
                                   const ops::MatrixSource& source);

// Gate and up rows in turns, for the SwiGLU end of the kernels: [2 x intermediate, columns], gate rows first, as one
// matrix or two of one format.
PackedMatrix pack_pair(std::span<const ops::MatrixSource> parts);
// Whether gate and up can be packed like that: of one format and size, with as many FP8 scales along a row.
bool makes_pair(const ops::MatrixSource& gate, const ops::MatrixSource& up);
// The same of a pair of matrices without their bytes, and its factors and cells.
PackedMatrix place_pair(const ops::MatrixSource& gate, const ops::MatrixSource& up);
std::vector<uint8_t> pair_factors(const PackedMatrix& pair, const ops::MatrixSource& gate, const ops::MatrixSource& up);

}  // namespace fourfold::cuda
