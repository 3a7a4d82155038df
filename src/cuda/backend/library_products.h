// Products of many rows by cuBLASLt: matrices of bf16 rows, on the backend's stream.
#pragma once

#include <cstdint>
#include <map>
#include <tuple>

#include "cuda/device/device.h"
#include "jit/cublaslt.h"

namespace fourfold::cuda {

class LibraryProducts {
 public:
  static constexpr int64_t kWorkspaceBytes = 32 << 20;
  // Matrices with fewer outputs are left to the backend's own kernels.
  static constexpr int64_t kLeastOutputs = 256;

  struct Product {
    DeviceAddress weights;  // [outputs][inputs] bf16
    int64_t outputs, inputs;
    DeviceAddress x;  // [rows][inputs] bf16
    int64_t x_stride, rows;
    float factor;       // of all sums
    DeviceAddress out;  // [rows][outputs] bf16 or fp32
    int64_t out_stride;
    bool floats;
  };

  // An Error when the machine has no cuBLASLt, or none that works.
  explicit LibraryProducts(const Device& device);
  ~LibraryProducts();
  LibraryProducts(const LibraryProducts&) = delete;
  LibraryProducts& operator=(const LibraryProducts&) = delete;

  // How products of some sizes are taken.
  struct Way {
    void *weights = nullptr, *x = nullptr, *out = nullptr;  // layouts; null: the library has no way
    jit::CublasLt::Functions::Algorithm algorithm = {};
  };
  // By the product's sizes alone; valid until the next call. Null: the library has no way, which is remembered like
  // one and of which the first time is warned.
  const Way* way_of(const Product& product);

  // out = factor x W^T, summed in fp32. `workspace`: kWorkspaceBytes, of this stream alone. The library chooses how by
  // the sizes, so other numbers of rows may give other bits.
  void multiply(const Stream& stream, const Way& way, const Product& product, DeviceAddress workspace);

 private:
  // Outputs, inputs, rows, strides of x and out, fp32.
  using Key = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, bool>;
  Way ask(const Product& product);
  void forget(Way& way);
  void close();

  const jit::CublasLt& library_;
  void *handle_ = nullptr, *desc_ = nullptr, *preference_ = nullptr;
  std::map<Key, Way> ways_;
  bool warned_ = false;
};

}  // namespace fourfold::cuda
