// Products of 17 rows and more (gemm/dense.cuh, gemm/dense_sm90.cuh) on the host executor against double.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "cuda/gemm/packed_matrix.h"
#include "executor/executor.h"
#include "kernels/product_kernels.h"
#include "kernels/random_weights.h"

namespace fourfold::gemm {
namespace {

using cuda::pack_pair;
using cuda::pack_stack;
using cuda::PackedMatrix;
using executor::Device;
using executor::Options;
using executor::schedules;
using ops::MatrixSource;

// A device with a matrix, rows of x and room for the sums.
struct Case {
  Device device;
  DenseArgs args = {};
  ptx::TensorMap map = {};

  Case(const Options& options, const PackedMatrix& matrix, const std::vector<uint16_t>& x, int tokens)
      : device(options) {
    args.matrix = matrix.at(device.constant(matrix.bytes, "weights"));
    args.tokens = tokens;
    args.x = device.constant(x, "x");
    args.x_stride = matrix.columns;
    device.produced(args.x);
  }
  // `split_units`: of gemm_wide, of items from args.whole on; 0: all columns.
  void run(const DenseKernel& k, unsigned sms = 3, int split_units = 0) {
    if (k.middle) return run_middle(k, split_units > 0 ? split_units : args.matrix.units);
    if (k.cluster) return run_cluster(k);
    const int blocks = (args.tokens + k.tokens - 1) / k.tokens;
    auto items = static_cast<unsigned>(
        (k.wide ? run_groups(args.matrix, kWideTiles) : dense_groups(args.matrix, kDenseTiles)) * blocks);
    if (k.wide && split_units > 0) {
      args.split_units = split_units;
      args.splits = (args.matrix.units + split_units - 1) / split_units;
      const auto whole = static_cast<unsigned>(args.whole), shared = items - whole;
      args.partial = device.alloc<float>(shared * static_cast<unsigned>(args.splits * k.tokens) * 256, "partial");
      args.arrived = device.alloc<int>(shared * kWideWarps, "arrived");
      std::fill_n(args.arrived, shared * kWideWarps, 0);
      items = whole + shared * static_cast<unsigned>(args.splits);
    }
    const auto columns = static_cast<uint64_t>(args.matrix.columns);
    map = executor::make_tensor_map(args.x, static_cast<uint64_t>(args.tokens), columns, columns * 2,
                                    static_cast<uint64_t>(k.tokens));
    executor::LaunchConfig config{k.name, {k.wide ? std::min(items, sms) : items}, k.threads, k.shared_bytes};
    device.launch(config, [&] { k.run(map, args); });
  }
  void run_cluster(const DenseKernel& k) {
    args.split_units = cluster_share(k.tile, args.matrix);
    const auto columns = static_cast<uint64_t>(args.matrix.columns);
    map = executor::make_tensor_map(args.x, static_cast<uint64_t>(args.tokens), columns, columns * 2, kMiddleRows);
    const auto grid = static_cast<unsigned>(cluster_grid(args.matrix, args.tokens));
    executor::LaunchConfig config{k.name, {grid}, k.threads, k.shared_bytes};
    config.cluster = kClusterCtas;
    device.launch(config, [&] { k.run(map, args); });
  }
  // Shares of `share` units; all CTAs at once.
  void run_middle(const DenseKernel& k, int share) {
    args.split_units = share;
    const int grid = middle_grid(args.matrix, args.tokens, share, k.tokens);
    args.partial = device.alloc<float>(static_cast<size_t>(middle_partial_bytes(grid)) / 4, "partial");
    args.arrived = device.alloc<int>(static_cast<size_t>(grid), "arrived");
    std::fill_n(args.arrived, grid, 0);
    const auto columns = static_cast<uint64_t>(args.matrix.columns);
    map = executor::make_tensor_map(args.x, static_cast<uint64_t>(args.tokens), columns, columns * 2,
                                    static_cast<uint64_t>(k.tokens));
    executor::LaunchConfig config{k.name, {static_cast<unsigned>(grid)}, k.threads, k.shared_bytes};
    config.resident = grid;
    device.launch(config, [&] { k.run(map, args); });
  }
  std::vector<float> floats(const DenseKernel& k, int64_t rows, int split_units = 0) {
    args.end = DenseEnd::kFloat;
    args.out_stride = rows + 3;
    auto* out = device.alloc<float>(static_cast<size_t>(args.tokens * args.out_stride), "out");
    args.out = out;
    run(k, 3, split_units);
    std::vector<float> y;
    for (int t = 0; t < args.tokens; ++t) {
      y.insert(y.end(), out + t * args.out_stride, out + t * args.out_stride + rows);
      for (int i = 0; i < 3; ++i) EXPECT_TRUE(std::isnan(out[t * args.out_stride + rows + i]));
    }
    return y;
  }
};

bool takes(const DenseKernel& k, Kind kind) {
  return kind != Kind::kFp8Block || k.name.find("{15") != std::string::npos;
}

void expect_near(const std::vector<float>& y, const Products& want) {
  for (size_t i = 0; i < y.size(); ++i) {
    ASSERT_NEAR(y[i], want.y[i], 2e-6 * want.size[i] + 1e-30)
        << "row of x " << i / static_cast<size_t>(want.rows) << ", output " << i % static_cast<size_t>(want.rows);
  }
}

TEST(Dense, EveryFormatAndOddShapes) {
  unsigned seed = 1;
  for (const DenseKernel& k : dense_kernels()) {
    for (const Kind kind : kKinds) {
      if (!takes(k, kind)) continue;
      for (const auto& [rows, columns, tokens] : {std::tuple{40, 80, 17}, {150, 208, 33}, {20, 400, 70}}) {
        const std::vector<MatrixSource> parts = {random_matrix(kind, rows, columns, ++seed)};
        const auto x = random_rows(tokens, columns, ++seed);
        SCOPED_TRACE(k.name + ", " + parts[0].name + ", " + std::to_string(tokens) + " rows");
        Case c(schedules(1, seed)[0], pack_stack(parts), x, tokens);
        expect_near(c.floats(k, rows), reference(parts, x, tokens));
      }
    }
  }
}

std::vector<MatrixSource> mixed_stack(bool blocks, int columns) {
  return {random_matrix(blocks ? Kind::kFp8Block : Kind::kFp8Tensor, 150, columns, 1),
          random_matrix(Kind::kNvfp4, 33, columns, 2), random_matrix(Kind::kBf16, 1, columns, 3),
          random_matrix(Kind::kFp8Row, 300, columns, 4), random_matrix(Kind::kNvfp4, 16, columns, 5)};
}

TEST(Dense, StacksOfMixedFormatsUnderEverySchedule) {
  for (const DenseKernel& k : dense_kernels()) {
    const auto parts = mixed_stack(takes(k, Kind::kFp8Block), 336);
    const PackedMatrix packed = pack_stack(parts);
    const auto x = random_rows(37, 336, 6);
    const Products want = reference(parts, x, 37);
    std::vector<float> first;
    for (const Options& o : schedules(3, 3)) {
      SCOPED_TRACE(k.name);
      Case c(o, packed, x, 37);
      const std::vector<float> y = c.floats(k, packed.rows);
      expect_near(y, want);
      if (first.empty()) first = y;
      EXPECT_EQ(y, first);
    }
  }
}

// Several CTAs share the columns: in cells of FP8 blocks or across them, the last one short.
TEST(Dense, SharedOutColumnsUnderEverySchedule) {
  for (const DenseKernel& k : dense_kernels()) {
    if (!k.wide) continue;
    const auto parts = mixed_stack(takes(k, Kind::kFp8Block), 272);
    const PackedMatrix packed = pack_stack(parts);
    const auto x = random_rows(20, 272, 6);
    const Products want = reference(parts, x, 20);
    std::vector<float> first;
    for (const Options& o : schedules(2, 3)) {
      SCOPED_TRACE(k.name);
      Case c(o, packed, x, 20);
      const std::vector<float> y = c.floats(k, packed.rows, takes(k, Kind::kFp8Block) ? 3 : 2);
      expect_near(y, want);
      if (first.empty()) first = y;
      EXPECT_EQ(y, first);
      EXPECT_EQ(std::count(c.args.arrived, c.args.arrived + kWideWarps, 0), kWideWarps);
    }
  }
}

TEST(Dense, EveryItemOfAWideProductHasOnePlace) {
  for (int groups = 1; groups <= 5; ++groups) {
    for (int blocks = 1; blocks <= 9; ++blocks) {
      for (int band = 0; band <= 10; ++band) {
        std::vector<int> times(static_cast<size_t>(groups * blocks));
        int last = 0;
        for (int i = 0; i < groups * blocks; ++i) {
          const WidePlace p = wide_place(groups, blocks, band, i);
          ASSERT_TRUE(p.group >= 0 && p.group < groups && p.block >= 0 && p.block < blocks);
          ++times[static_cast<size_t>(p.group * blocks + p.block)];
          const int in_band = band == 0 ? 0 : p.block / band;
          ASSERT_GE(in_band, last) << "a band is left before it is done";
          last = in_band;
        }
        ASSERT_EQ(std::count(times.begin(), times.end(), 1), groups * blocks) << groups << " " << blocks << " " << band;
      }
    }
  }
}

// Bands change the order of items and nothing else: two groups of rows, the last band short, with the columns whole,
// shared out, and shared out of the last items only.
TEST(Dense, BandsChangeNoBits) {
  const std::vector<MatrixSource> parts = {random_matrix(Kind::kNvfp4, 270, 144, 1)};  // three units
  const PackedMatrix packed = pack_stack(parts);
  for (const DenseKernel& k : dense_kernels()) {
    if (!k.wide) continue;
    const int tokens = 3 * k.tokens - 10;
    const auto x = random_rows(tokens, 144, 6);
    const Products want = reference(parts, x, tokens);
    for (const auto& [split_units, whole] : {std::pair{0, 0}, {2, 0}, {1, 4}}) {
      SCOPED_TRACE(k.name + ", " + std::to_string(split_units) + " units a CTA from item " + std::to_string(whole));
      std::vector<float> first;
      for (const int band : {0, 2}) {
        Case c(schedules(1, 7)[0], packed, x, tokens);
        c.args.band = band;
        c.args.whole = whole;
        const std::vector<float> y = c.floats(k, packed.rows, split_units);
        expect_near(y, want);
        if (first.empty()) first = y;
        if (whole > 0) continue;  // bands change which items are the last ones
        EXPECT_EQ(y, first);
      }
    }
  }
}

// What is left behind the rounds of all SMs is shared out where that is shorter, and every item is somebody's.
TEST(Dense, WideCutsCoverAllItems) {
  int whole = 0, shared = 0, behind = 0;
  for (const int tokens : {9, 64, 65, 128, 300, 8192}) {
    for (const int tiles : {8, 257, 772, 1288, 2176}) {
      for (const int units : {3, 32, 80}) {
        Matrix m = {};
        m.count = 1;
        m.tiles = tiles;
        m.units = units;
        for (const int sms : {78, 132}) {
          const WideTile t = {1, tokens > 64 ? 128 : 64, 2};
          const int items = wide_items(t, m, tokens);
          const WideCut cut = wide_cut(t, m, tokens, sms);
          SCOPED_TRACE(std::to_string(items) + " items of " + std::to_string(units) + " units");
          ASSERT_EQ((cut.whole - items) * (cut.whole % sms), 0);
          ASSERT_LE((items - cut.whole) * cut.splits, cut.whole > 0 ? sms : 2 * sms);
          ASSERT_EQ((units + cut.split_units - 1) / cut.split_units, cut.splits);
          const int grid = wide_grid(t, m, tokens, cut, sms);
          ASSERT_EQ(grid, std::min(sms, cut.whole + (items - cut.whole) * cut.splits));
          ++(cut.whole == items ? whole : cut.whole == 0 ? shared : behind);
        }
      }
    }
  }
  EXPECT_GT(std::min({whole, shared, behind}), 3);
}

// Shares of units that end anywhere: in items and cells, in one item many times, with an item as a whole between two
// pieces; rows of several matrices of the stack in an item, several blocks of rows of x.
TEST(Dense, SharesOfUnitsUnderEverySchedule) {
  for (const DenseKernel& k : dense_kernels()) {
    if (!k.middle) continue;
    const bool blocks = takes(k, Kind::kFp8Block);
    auto parts = mixed_stack(blocks, 272);  // five units
    if (!blocks) parts.insert(parts.begin() + 1, random_matrix(Kind::kFp8Row, 70, 272, 9));
    const PackedMatrix packed = pack_stack(parts);
    for (const auto& [tokens, share] : {std::pair{20, 1}, {64, 2}, {33, 3}, {70, 4}, {41, 7}, {130, 12}}) {
      const auto x = random_rows(tokens, 272, 6);
      const Products want = reference(parts, x, tokens);
      std::vector<float> first;
      for (const Options& o : schedules(2, 3)) {
        SCOPED_TRACE(k.name + ", shares of " + std::to_string(share));
        Case c(o, packed, x, tokens);
        const std::vector<float> y = c.floats(k, packed.rows, share);
        expect_near(y, want);
        if (first.empty()) first = y;
        EXPECT_EQ(y, first);
        const int grid = middle_grid(c.args.matrix, tokens, share, k.tokens);
        EXPECT_EQ(std::count(c.args.arrived, c.args.arrived + grid, 0), grid);
      }
    }
  }
}

// Columns for all CTAs of a cluster, for some of them, and with a last one that has less; several blocks of rows of x.
TEST(Dense, ClustersUnderEverySchedule) {
  for (const DenseKernel& k : dense_kernels()) {
    if (!k.cluster) continue;
    for (const int columns : {272, 656}) {
      const bool blocks = takes(k, Kind::kFp8Block);
      const auto parts = mixed_stack(blocks, columns);
      const PackedMatrix packed = pack_stack(parts);
      for (const int tokens : {9, 70}) {
        const auto x = random_rows(tokens, columns, 6);
        const Products want = reference(parts, x, tokens);
        std::vector<float> first;
        for (const Options& o : schedules(2, 3)) {
          SCOPED_TRACE(k.name + ", " + std::to_string(columns) + " columns, " + std::to_string(tokens) + " rows");
          const std::vector<float> y = Case(o, packed, x, tokens).floats(k, packed.rows);
          expect_near(y, want);
          if (first.empty()) first = y;
          EXPECT_EQ(y, first);
        }
      }
    }
  }
}

TEST(Dense, EndsRoundAddAndGate) {
  const int columns = 144, tokens = 35;
  for (const DenseKernel& k : dense_kernels()) {
    SCOPED_TRACE(k.name);
    const auto parts = mixed_stack(false, columns);
    const PackedMatrix packed = pack_stack(parts);
    const auto x = random_rows(tokens, columns, 6);
    const auto rows = static_cast<size_t>(packed.rows);
    const std::vector<float> sums = Case(Options{}, packed, x, tokens).floats(k, packed.rows);
    // Rows of outputs that begin at multiples of 16 bytes, and others.
    for (const size_t stride : {rows, (rows + 7) / 8 * 8}) {
      Case c(schedules(1, 2)[0], packed, x, tokens);
      c.args.out_stride = static_cast<long long>(stride);
      auto* out = c.device.alloc<uint16_t>(tokens * stride, "out");
      c.args.out = out;
      c.run(k);
      for (size_t i = 0; i < sums.size(); ++i) {
        ASSERT_EQ(out[i / rows * stride + i % rows], nvfp4::float_to_bf16(sums[i])) << i << ", stride " << stride;
      }
    }
    for (const bool scaled : {false, true}) {
      Case c(schedules(1, 3)[0], packed, x, tokens);
      c.args.end = DenseEnd::kAdd;
      c.args.out_stride = packed.rows;
      auto* out = c.device.alloc<float>(tokens * rows, "out");
      for (size_t i = 0; i < tokens * rows; ++i) out[i] = static_cast<float>(i % 97) - 40.0f;
      c.args.out = out;
      std::vector<float> scales;
      for (int t = 0; t < tokens; ++t) scales.push_back(0.1f * static_cast<float>(t + 1));
      if (scaled) {
        c.args.row_scales = c.device.constant(scales, "scales");
        c.device.produced(c.args.row_scales);
      }
      c.run(k);
      for (size_t i = 0; i < sums.size(); ++i) {
        ASSERT_EQ(out[i], std::fma(sums[i], scaled ? scales[i / rows] : 1.0f, static_cast<float>(i % 97) - 40.0f)) << i;
      }
    }
    const std::vector<MatrixSource> pair = {random_matrix(Kind::kNvfp4, 88, columns, 7)};
    const Products want = reference(pair, x, tokens);
    Case c(schedules(1, 4)[0], pack_pair(pair), x, tokens);
    c.args.end = DenseEnd::kSwiGlu;
    c.args.out_stride = 44;
    auto* out = c.device.alloc<uint16_t>(tokens * 44, "out");
    c.args.out = out;
    c.run(k);
    for (int t = 0; t < tokens; ++t) {
      for (int i = 0; i < 44; ++i) {
        const double gate = want.at(t, i), up = want.at(t, 44 + i);
        const double h = gate / (1.0 + std::exp(-gate)) * up;
        ASSERT_NEAR(nvfp4::bf16_to_float(out[t * 44 + i]), h,
                    std::fabs(h) / 256 + 1e-5 * (want.size_at(t, i) + want.size_at(t, 44 + i)));
      }
    }
  }
}

}  // namespace
}  // namespace fourfold::gemm
