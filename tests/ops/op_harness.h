// What the tests of operations share: random weights in every checkpoint format, activation tensors, step scripts, and
// the comparison of two results.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/random.h"
#include "cpu/backend.h"
#include "cpu/host/cpu_backend.h"
#include "ops/ops.h"

namespace fourfold::test {

// ---- backends

// One backend for each combination, made on first use. threads 2 unless told otherwise.
cpu::CpuBackend& backend_of(cpu::Isa isa, bool nvfp4_activations = false, int threads = 2);
std::vector<cpu::Isa> fast_isas();

// Those with loops of their own beside products; the others share theirs.
std::vector<cpu::Isa> isas_with_own_loops();

// Tolerance of a product over `depth` elements, relative to the norm of the result, from
//   - what activations are rounded to: bf16 (2^-9) on instruction sets that multiply bf16; with few tokens and NVFP4
//     weights 16-bit integers in blocks of 16, a step of 2^-15 of the block's largest, itself up to 4 times the root
//     mean square;
//   - fp32 sums, whose error grows like a random walk.
double product_tolerance(cpu::Isa isa, bool nvfp4, int64_t depth);

// ---- values

std::vector<float> random_values(Random& random, int64_t count, double scale = 1.0);

// A weight that owns its memory.
struct OwnedMatrix {
  ops::MatrixSource source;
  std::vector<uint8_t> bytes, block_scales;
  std::vector<float> grid;
};
std::shared_ptr<OwnedMatrix> random_matrix(Random& random, ops::Format format, int64_t rows, int64_t columns,
                                           double scale = 0.05);
// Per tensor, per row, in blocks that do not divide the matrix, or in blocks as a GPU takes them.
enum class Grid { kTensor, kRows, kBlocks, kCells };
std::shared_ptr<OwnedMatrix> random_fp8(Random& random, int64_t rows, int64_t columns, Grid grid);

// An activation tensor of a backend. Rows lie further apart than their length; the gaps and new tensors are NaN.
class Activations {
 public:
  Activations(cpu::CpuBackend& backend, int64_t rows, int64_t cols, int64_t gap = 16);
  Activations(cpu::CpuBackend& backend, const std::vector<float>& values, int64_t rows, int64_t cols);
  const ops::Tensor& tensor() const { return tensor_; }
  std::vector<float> values() const;

 private:
  std::unique_ptr<ops::Buffer> buffer_;
  ops::Tensor tensor_;
  cpu::CpuBackend& backend_;
};

// ---- comparison

struct Result {
  std::string name;
  int64_t rows = 0;
  int64_t cols = 0;
  std::vector<float> values;
  double tolerance = 0;  // of the norm of the difference of each row, relative to the norm of the row
  // The root mean square that elements have by construction: a row that happens to be smaller (a single output near
  // zero) counts as this large.
  double magnitude = 0;
};

// Each row within tolerance in norm, each element within 8 times that of the row's root mean square, or within that of
// itself where it is larger than 8 of them; no NaN. Reports the worst row and column. `worst` collects the largest
// relative error of a row.
void expect_close(const Result& expected, const Result& found, double* worst = nullptr);

// A batch over tokens that are all 0; for operations that do not look at them.
struct StepBatch {
  std::vector<int32_t> tokens;
  std::vector<ops::Sequence> sequences;
  ops::Batch batch() const { return {tokens, sequences, {}}; }
};

}  // namespace fourfold::test
