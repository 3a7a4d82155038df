// Random weight matrices in every format, and the check of a kernel table against double-precision sums: shared by the
// tests and by gemm_check.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cpu/gemm/layout.h"
#include "ops/tensor.h"

namespace fourfold::cpu::test {

// A matrix source and the memory it points to.
struct Weights {
  std::vector<uint8_t> data, block_scales;
  std::vector<float> grid_scales;
  ops::MatrixSource source;
};

// `grid`: fp8 scales per tensor (0), per row (1), for 128 x 128 blocks (2) or 128 x 20 (3).
Weights make_weights(ops::Format format, int64_t rows, int64_t columns, uint64_t seed, int grid = 0);

struct Tokens {
  std::vector<float> values;
  std::vector<const float*> rows;
};
// Normal values with a few large ones, as activations have them.
Tokens make_tokens(int64_t tokens, int64_t columns, uint64_t seed);

// What a sum of `columns` products may be off by: `relative` x sum of |w x|.
struct Expected {
  double value = 0;
  double magnitude = 0;
  double square = 0;  // sum of squared products
};
Expected dot(const ops::MatrixSource& source, int64_t row, const float* x);

// Runs every kernel of the table on shapes with all kinds of tails. Returns the number of outputs compared; `problem`
// describes the first wrong one.
int check_kernels(const gemm::KernelTable& kernels, std::string& problem);

}  // namespace fourfold::cpu::test
