// What self-tests of the backend's kernels share: tensors on the card, weights with codes and scales of every value,
// comparisons.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/random.h"
#include "cuda/backend/cuda_backend.h"

namespace fourfold::cuda {

std::vector<float> bf16_normals(Random& random, int64_t count, double scale = 1);

// A tensor in memory of its own.
struct TestRows {
  std::unique_ptr<ops::Buffer> buffer;
  ops::Tensor tensor;
};
// On the card, poisoned; filled; in the processor's memory.
TestRows empty_rows(CudaBackend& backend, const Stream& stream, int64_t rows, int64_t cols, bool floats = false);
TestRows rows_of(CudaBackend& backend, const Stream& stream, const std::vector<float>& values, int64_t cols,
                 bool floats = false);
TestRows host_rows(ops::Backend& reference, const std::vector<float>& values, int64_t cols);
std::vector<float> read(ops::Backend& backend, const ops::Tensor& x);

// Empty, or the first piece of `width` values whose difference is too large for its norm.
std::string compare_pieces(const std::vector<float>& got, const std::vector<float>& want, int64_t cols, int64_t width,
                           double allowed);
// Empty, or the first value that is further off than its bound.
std::string compare_each(const std::vector<float>& got, const std::vector<float>& want, const std::vector<float>& bound,
                         int64_t cols);

// A weight with codes and scales of every value, without NaN.
struct TestWeight {
  ops::MatrixSource source;
  std::vector<uint8_t> bytes, block_scales;
  std::vector<float> grid;
};
std::unique_ptr<TestWeight> test_weight(Random& random, gemm::Weights format, bool cells, int64_t rows,
                                        int64_t columns);
// All of it, as fp32.
std::vector<float> dequantised(const ops::MatrixSource& source);

// Small matrices are loaded through little memory: the card may be full.
class SmallBlocks {
 public:
  explicit SmallBlocks(Card& card, uint64_t bytes = uint64_t{64} << 10) : card_(card), before_(card.loading_block) {
    card.loading_block = bytes;
  }
  ~SmallBlocks() { card_.loading_block = before_; }
  SmallBlocks(const SmallBlocks&) = delete;
  SmallBlocks& operator=(const SmallBlocks&) = delete;

 private:
  Card& card_;
  uint64_t before_;
};

}  // namespace fourfold::cuda
