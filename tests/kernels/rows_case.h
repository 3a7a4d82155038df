// A product of few rows on the host executor, as tests of products and of norms launch it.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda/gemm/packed_matrix.h"
#include "executor/executor.h"
#include "kernels/product_kernels.h"

namespace fourfold::gemm {

using cuda::PackedMatrix;
using executor::Device;
using executor::Options;

inline RowsKernel kernel_named(const std::string& name) {
  for (const RowsKernel& k : rows_kernels()) {
    if (k.name == name) return k;
  }
  throw std::logic_error("no kernel " + name);
}
inline RowsKernel kernel_for(int tokens) {
  return kernel_named(tokens > 8 ? "rows {15, 2, 8, 1, 3, 1, 0}" : "rows {15, 1, 8, 1, 3, 1, 0}");
}

// A device with a matrix and rows of x on it.
struct Case {
  Device device;
  RowsArgs args = {};

  Case(const Options& options, const PackedMatrix& matrix) : device(options) {
    std::vector<uint8_t> bytes = matrix.bytes;
    args.matrix = matrix.at(device.constant(bytes, "weights"));
    args.panel_units = args.matrix.units;
  }
  void rows(const std::vector<uint16_t>& x, int tokens) {
    args.tokens = tokens;
    args.x = device.constant(x, "x");
    args.x_stride = args.matrix.columns;
    device.produced(args.x);
  }
  void run(const RowsKernel& k, unsigned grid) {
    executor::LaunchConfig config{k.name, {grid}, k.tile.threads()};
    config.shared_bytes = rows_map(k.tile, args.tokens, args.panel_units).total;
    device.launch(config, [&] { k.run(args); });
  }
};

inline std::vector<float> run_floats(const RowsKernel& kernel, const Options& options, const PackedMatrix& matrix,
                                     const std::vector<uint16_t>& x, int tokens, unsigned grid, int panel = 0) {
  Case c(options, matrix);
  c.rows(x, tokens);
  c.args.end = RowsEnd::kFloat;
  if (panel > 0) c.args.panel_units = panel;
  const int gap = 3;  // rows of the output lie apart
  c.args.out_stride = matrix.rows + gap;
  auto* out = c.device.alloc<float>(static_cast<size_t>(tokens * c.args.out_stride), "out");
  c.args.out = out;
  c.run(kernel, grid);
  std::vector<float> y;
  for (int t = 0; t < tokens; ++t) {
    y.insert(y.end(), out + t * c.args.out_stride, out + t * c.args.out_stride + matrix.rows);
    for (int i = 0; i < gap; ++i) EXPECT_TRUE(std::isnan(out[t * c.args.out_stride + matrix.rows + i]));
  }
  return y;
}

}  // namespace fourfold::gemm
