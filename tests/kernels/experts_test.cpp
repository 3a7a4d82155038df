// Products of experts in the formats of dense products (gemm/experts.cuh) on the host executor against double.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "cuda/gemm/packed_matrix.h"
#include "executor/executor.h"
#include "kernels/product_kernels.h"
#include "kernels/random_weights.h"

namespace fourfold::gemm {
namespace {

using cuda::PackedMatrix;
using executor::Device;
using executor::Options;
using executor::schedules;
using ops::MatrixSource;

constexpr int kExperts = 4, kHidden = 208, kWidth = 144;
// Tokens of each expert: one with more than a block, one with none, one with a few, one with one.
constexpr int kTokensOf[kExperts] = {70, 0, 5, 1};
constexpr int kTokens = 40;

// The routing of a layer, as moe_route leaves it: blocks of one expert each, slots from multiples of 8 on.
struct Blocks {
  std::vector<moe::Block> blocks;
  std::vector<int> token_of_slot, expert_of_slot;
  explicit Blocks(int tile) {
    for (int e = 0; e < kExperts; ++e) {
      const auto first = static_cast<int>(token_of_slot.size());
      for (int i = 0; i < kTokensOf[e]; i += tile) {
        blocks.push_back({e, first + i, std::min(tile, kTokensOf[e] - i), 0});
      }
      for (int i = 0; i < (kTokensOf[e] + 7) / 8 * 8; ++i) {
        const bool there = i < kTokensOf[e];
        token_of_slot.push_back(there ? (i * 7 + e) % kTokens : -1);
        expert_of_slot.push_back(there ? e : -1);
      }
    }
  }
};

struct Launched {
  const ExpertsKernel& kernel;
  const std::vector<std::vector<MatrixSource>>& experts;  // gate and up, or down
  const std::vector<uint16_t>& x;
  const Blocks& blocks;

  // Rows of slots; NaN where nobody is.
  std::vector<float> operator()(const Options& options) const {
    Device device(options);
    const bool gate_up = kernel.gate_up;
    PackedMatrix first;
    std::vector<uint8_t> bytes;
    for (const auto& parts : experts) {
      const PackedMatrix packed = gate_up ? cuda::pack_pair(parts) : cuda::pack_stack(parts);
      bytes.insert(bytes.end(), packed.bytes.begin(), packed.bytes.end());
      if (first.parts.empty()) first = packed;
    }
    const Matrix matrix = first.at(device.constant(bytes, "weights"));
    const auto slots = static_cast<int>(blocks.token_of_slot.size());
    ExpertsArgs args = {};
    args.part = matrix.parts[0];
    args.expert_bytes = bytes.size() / experts.size();
    args.tiles = matrix.tiles;
    args.units = matrix.units;
    args.columns = matrix.columns;
    args.x = device.constant(x, "x");
    args.x_stride = matrix.columns;
    device.produced(args.x);
    args.out_stride = gate_up ? kWidth : kHidden;
    const auto count = static_cast<size_t>(slots) * static_cast<size_t>(args.out_stride);
    auto* bf16 = gate_up ? device.alloc<uint16_t>(count, "out") : nullptr;
    auto* floats = gate_up ? nullptr : device.alloc<float>(count, "out");
    args.out = gate_up ? static_cast<void*>(bf16) : floats;
    std::vector<int> counts = {static_cast<int>(blocks.blocks.size()), slots};
    args.route.counts = const_cast<int*>(device.constant(counts, "counts"));
    args.route.blocks = const_cast<moe::Block*>(device.constant(blocks.blocks, "blocks"));
    args.route.slot_token = const_cast<int*>(device.constant(blocks.token_of_slot, "tokens of slots"));
    device.produced(args.route.counts);
    device.produced(args.route.blocks);
    device.produced(args.route.slot_token);
    const executor::LaunchConfig config{kernel.name,
                                        {static_cast<unsigned>(experts_groups(args.tiles)), 2},
                                        kDenseThreads,
                                        dense_map(kernel.tile).total};
    device.launch(config, [&] { kernel.run(args); });
    std::vector<float> y(count);
    for (size_t i = 0; i < count; ++i) {
      const auto row = static_cast<int>(i % static_cast<size_t>(args.out_stride));
      const int place =
          row % 16 < 8 ? moe::partial_place(row / 16, row % 16) : moe::partial_place(row / 16, row % 16 - 8) + 1;
      y[i] =
          gate_up ? nvfp4::bf16_to_float(bf16[i]) : floats[i - static_cast<size_t>(row) + static_cast<size_t>(place)];
    }
    return y;
  }
};

TEST(Experts, EveryFormatAndBlock) {
  unsigned seed = 40;
  for (const ExpertsKernel& kernel : experts_kernels()) {
    const Blocks blocks(kernel.tile.tokens);
    const int columns = kernel.gate_up ? kHidden : kWidth, rows = kernel.gate_up ? kWidth : kHidden;
    for (const Kind kind : {Kind::kBf16, Kind::kFp8Row, Kind::kFp8Block, Kind::kNvfp4}) {
      SCOPED_TRACE(kernel.name + " " + name_of(kind));
      std::vector<std::vector<MatrixSource>> experts;
      for (int e = 0; e < kExperts; ++e) {
        experts.push_back({random_matrix(kind, rows, columns, ++seed)});
        if (kernel.gate_up) experts.back().push_back(random_matrix(kind, rows, columns, ++seed));
      }
      const int x_rows = kernel.gate_up ? kTokens : static_cast<int>(blocks.token_of_slot.size());
      const auto x = random_rows(x_rows, columns, ++seed);
      std::vector<Products> want;
      for (const auto& parts : experts) want.push_back(reference(parts, x, x_rows));
      std::vector<float> before;
      for (const Options& options : schedules(kind == Kind::kFp8Block ? 3 : 1, seed)) {
        const std::vector<float> y = Launched{kernel, experts, x, blocks}(options);
        if (!before.empty()) {
          EXPECT_EQ(std::memcmp(y.data(), before.data(), y.size() * sizeof(float)), 0) << "other bits";
        }
        before = y;
        for (int slot = 0; slot < static_cast<int>(blocks.token_of_slot.size()); ++slot) {
          const int expert = blocks.expert_of_slot[static_cast<size_t>(slot)];
          const int from = kernel.gate_up ? blocks.token_of_slot[static_cast<size_t>(slot)] : slot;
          for (int row = 0; row < rows; ++row) {
            const float got = y[static_cast<size_t>(slot * rows + row)];
            if (expert < 0) {
              ASSERT_TRUE(std::isnan(got)) << "slot " << slot << ", which is nobody's";
              continue;
            }
            const Products& p = want[static_cast<size_t>(expert)];
            if (!kernel.gate_up) {
              ASSERT_NEAR(got, p.at(from, row), 2e-6 * p.size_at(from, row) + 1e-30) << slot << ", row " << row;
              continue;
            }
            const double gate = p.at(from, row), up = p.at(from, rows + row), h = gate / (1 + std::exp(-gate)) * up;
            ASSERT_NEAR(got, h, std::fabs(h) / 200 + 1e-5 * (p.size_at(from, row) + p.size_at(from, rows + row)))
                << slot << ", row " << row;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace fourfold::gemm
