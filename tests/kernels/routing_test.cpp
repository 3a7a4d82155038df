// A router that comes with the product in front of it (gemm/routing.h) on the host executor: its weights as the product
// wants them, its sums against double and the same in every order, the norm and the choice behind them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "cuda/gemm/packed_matrix.h"
#include "kernels/random_weights.h"
#include "kernels/rows_case.h"

namespace fourfold::gemm {
namespace {

using cuda::pack_stack;
using executor::schedules;
using ops::MatrixSource;

constexpr int kExperts = 300, kColumns = kExperts + 1, kHidden = 96, kTiles = 6, kTopK = 7;

// The router's rows and the gate behind them, as the packing kernel stores them.
std::vector<uint16_t> packed_routing(const std::vector<MatrixSource>& parts) {
  std::vector<uint16_t> all;
  Device device(schedules(1, 5)[0]);
  auto* out = device.alloc<uint16_t>(size_t{kTiles} * kColumns * 16, "packed");
  int first = 0;
  for (const MatrixSource& part : parts) {
    const PackedMatrix packed = pack_stack(std::vector<MatrixSource>{part});
    std::vector<uint8_t> bytes = packed.bytes;
    const Matrix matrix = packed.at(device.constant(bytes, "router"));
    const RoutingPackArgs args = {
        matrix.parts[0].weights, static_cast<int>(part.rows), matrix.units, first, kColumns, kTiles, out};
    constexpr unsigned kWarps = kRoutingPackThreads / 32;
    device.launch({"pack", {(kTiles + kWarps - 1) / kWarps}, kRoutingPackThreads}, [&] { pack_routing_kernel(args); });
    first += args.rows;
  }
  return {out, out + size_t{kTiles} * kColumns * 16};
}

TEST(Routing, ComesWithTheProductInFront) {
  const RowsKernel kernel = kernel_named("rows {3, 1, 8, 1, 2, 1, 0, false, false, 2}");
  constexpr int kInputs = 656;
  const PackedMatrix packed = pack_stack(std::vector<MatrixSource>{random_matrix(Kind::kFp8Row, 48, kInputs, 70),
                                                                   random_matrix(Kind::kBf16, 48, kInputs, 71)});
  ASSERT_EQ(packed.rows, kHidden);
  const std::vector<MatrixSource> router = {random_matrix(Kind::kBf16, kExperts, kHidden, 72),
                                            random_matrix(Kind::kBf16, 1, kHidden, 73)};
  std::vector<uint16_t> routing = packed_routing(router);
  std::mt19937 rng(74);
  std::normal_distribution<float> normal;
  std::vector<float> norm_weight(kHidden);
  for (float& w : norm_weight) w = normal(rng);
  for (const int tokens : {1, 3, kMostRoutedRows}) {
    const auto x = random_rows(tokens, kInputs, 75);
    std::vector<float> before(static_cast<size_t>(tokens) * kHidden);
    for (float& h : before) h = normal(rng);
    const std::vector<float> y = run_floats(kernel_for(tokens), Options{}, packed, x, tokens, 3);
    std::vector<int64_t> first_sums;
    for (const Options& o : schedules(3, 6)) {
      Case c(o, packed);
      c.rows(x, tokens);
      c.args.end = RowsEnd::kBf16;
      c.args.out_stride = kHidden;
      auto* delta = c.device.alloc<uint16_t>(before.size(), "delta");
      c.args.out = delta;
      const auto count = static_cast<size_t>(tokens * routing_sums(kColumns));
      auto* sums = c.device.alloc<unsigned long long>(count, "sums");
      std::fill_n(sums, count, 0ull);
      float* residual = c.device.alloc<float>(before.size(), "residual");
      std::copy(before.begin(), before.end(), residual);
      c.device.produced(residual);
      c.args.routing = {c.device.constant(routing, "routing"),
                        c.device.constant(norm_weight, "norm"),
                        residual,
                        kHidden,
                        sums,
                        kColumns};
      c.run(kernel, kTiles);

      std::vector<int64_t> all(sums, sums + count);
      if (first_sums.empty()) first_sums = all;
      EXPECT_EQ(all, first_sums) << "another order";
      RoutedArgs args = {};
      args.choice.tokens = tokens;
      args.choice.experts = args.choice.gate = args.choice.first_slice = kExperts;
      args.choice.top_k = kTopK;
      args.choice.slices = args.choice.renormalize = 1;
      args.choice.width = kTopK + 1;
      args.choice.ids = c.device.alloc<int>(static_cast<size_t>(tokens * args.choice.width), "ids");
      args.choice.weights = c.device.alloc<float>(static_cast<size_t>(tokens * args.choice.width), "weights");
      args.norm.residual = residual;
      args.norm.residual_out = residual;
      args.norm.residual_stride = args.norm.delta_stride = args.norm.out_stride = kHidden;
      args.norm.delta = delta;
      args.norm.weight = c.args.routing.norm_weight;
      args.norm.eps = 1e-6f;
      args.norm.columns = kHidden;
      args.norm.out = c.device.alloc<uint16_t>(before.size(), "normed");
      args.sums = sums;
      args.columns = kColumns;
      c.device.launch({"routed", {static_cast<unsigned>(tokens)}, norm::kRowThreads}, [&] { routed_kernel(args); });
      EXPECT_EQ(std::count(sums, sums + count, 0ull), static_cast<std::ptrdiff_t>(count));

      for (int t = 0; t < tokens; ++t) {
        std::vector<double> h(kHidden);
        double squares = 0;
        for (int r = 0; r < kHidden; ++r) {
          const auto at = static_cast<size_t>(t * kHidden + r);
          EXPECT_EQ(delta[at], nvfp4::float_to_bf16(y[at]));
          const float sum = before[at] + nvfp4::bf16_to_float(delta[at]);
          EXPECT_EQ(residual[at], sum);
          h[static_cast<size_t>(r)] = sum;
          squares += static_cast<double>(sum) * sum;
        }
        const double inverse = 1 / std::sqrt(squares / kHidden + 1e-6);
        std::vector<double> logits(kColumns);
        for (int e = 0; e < kColumns; ++e) {
          const MatrixSource& part = router[e < kExperts ? 0 : 1];
          std::vector<float> row(kHidden);
          ops::dequantize(part, e < kExperts ? e : 0, row.data());
          double magnitude = 0;
          for (size_t r = 0; r < kHidden; ++r) {
            const double term = static_cast<double>(row[r]) * h[r] * norm_weight[r] * inverse;
            logits[static_cast<size_t>(e)] += term;
            magnitude += std::fabs(term);
          }
          int64_t sum = 0;
          for (int k = 0; k < kRoutingCopies; ++k) {
            sum += all[static_cast<size_t>((t * kRoutingCopies + k) * routing_stride(kColumns) + e)];
          }
          EXPECT_NEAR(std::ldexp(static_cast<double>(sum), -kRoutingBits) * inverse, logits[static_cast<size_t>(e)],
                      1e-6 * magnitude + 1e-7);
        }
        std::vector<int> order(kExperts);
        std::iota(order.begin(), order.end(), 0);
        std::sort(order.begin(), order.end(),
                  [&](int a, int b) { return logits[static_cast<size_t>(a)] > logits[static_cast<size_t>(b)]; });
        double chosen = 0;
        for (int k = 0; k < kTopK; ++k) chosen += std::exp(logits[static_cast<size_t>(order[static_cast<size_t>(k)])]);
        for (int k = 0; k < kTopK; ++k) {
          const auto at = static_cast<size_t>(t * args.choice.width + k);
          const int expert = order[static_cast<size_t>(k)];
          EXPECT_EQ(args.choice.ids[at], expert);
          EXPECT_NEAR(args.choice.weights[at], std::exp(logits[static_cast<size_t>(expert)]) / chosen, 1e-5);
        }
        const auto last = static_cast<size_t>(t * args.choice.width + kTopK);
        EXPECT_EQ(args.choice.ids[last], kExperts);
        EXPECT_NEAR(args.choice.weights[last], 1 / (1 + std::exp(-logits.back())), 1e-5);
        for (size_t r = 0; r < kHidden; ++r) {
          const double want = h[r] * inverse * norm_weight[r];
          EXPECT_NEAR(nvfp4::bf16_to_float(args.norm.out[static_cast<size_t>(t * kHidden) + r]), want,
                      0.005 * std::fabs(want) + 1e-6);
        }
      }
    }
  }
}

}  // namespace
}  // namespace fourfold::gemm
