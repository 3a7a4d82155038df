// Norms, alone, behind the sum over experts and in front of a product (norm/, moe/sum_norm.cuh), embeddings and rows
// picked out, on the host executor.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "kernels/random_weights.h"
#include "kernels/rows_case.h"

namespace fourfold::gemm {
namespace {

using cuda::pack_stack;
using executor::schedules;
using ops::MatrixSource;

TEST(Norm, SumThenNormWithTheBitsOfTheFusedOne) {
  std::mt19937 rng(3);
  std::normal_distribution<float> normal;
  for (const auto& [tokens, columns] : {std::pair{3, 400}, {2, 2048}, {2, 3072}, {1, 5120}, {1, 8192}}) {
    std::vector<float> residual(static_cast<size_t>(tokens * columns)), weight(static_cast<size_t>(columns));
    for (float& v : residual) v = normal(rng) * 5.0f;
    for (float& v : weight) v = 1.0f + 0.2f * normal(rng);
    const auto delta = random_rows(tokens, columns, 4);
    Device device(schedules(1, rng())[0]);
    norm::NormArgs args = {};
    auto* in_place = device.alloc<float>(residual.size(), "residual");
    std::copy(residual.begin(), residual.end(), in_place);
    device.produced(in_place);
    args.residual = args.residual_out = in_place;
    args.residual_stride = columns;
    args.delta = device.constant(delta, "delta");
    device.produced(args.delta);
    args.delta_stride = columns;
    args.weight = device.constant(weight, "weight");
    args.eps = 1e-6f;
    args.columns = columns;
    args.out = device.alloc<uint16_t>(residual.size(), "out");
    args.out_stride = columns;
    device.launch({"norm", {static_cast<unsigned>(tokens)}, norm::kRowThreads}, [&] { norm_kernel(args); });
    for (int t = 0; t < tokens; ++t) {
      double squares = 0;
      for (int i = 0; i < columns; ++i) {
        const auto at = static_cast<size_t>(t * columns + i);
        ASSERT_EQ(in_place[at], residual[at] + nvfp4::bf16_to_float(delta[at]));
        squares += static_cast<double>(in_place[at]) * in_place[at];
      }
      const double inverse = 1.0 / std::sqrt(squares / columns + 1e-6);
      for (int i = 0; i < columns; ++i) {
        const auto at = static_cast<size_t>(t * columns + i);
        const double want = in_place[at] * inverse * weight[static_cast<size_t>(i)];
        ASSERT_NEAR(nvfp4::bf16_to_float(args.out[at]), want, std::fabs(want) / 255 + 1e-9);
      }
    }
    if (columns > 2048) continue;
    const PackedMatrix packed = pack_stack(std::vector<MatrixSource>{random_matrix(Kind::kBf16, 16, columns, 1)});
    Case c(Options{}, packed);
    c.args.tokens = tokens;
    c.args.residual = c.device.constant(std::vector<float>(in_place, in_place + residual.size()), "residual");
    c.device.produced(c.args.residual);
    c.args.residual_stride = columns;
    c.args.norm_weight = c.device.constant(weight, "norm weight");
    c.args.norm_eps = 1e-6f;
    c.args.norm_out = c.device.alloc<uint16_t>(residual.size(), "norm out");
    c.args.end = RowsEnd::kFloat;
    c.args.out_stride = 16;
    c.args.out = c.device.alloc<float>(static_cast<size_t>(tokens * 16), "out");
    c.run(kernel_named("rows {15, 1, 8, 1, 2, 1, 1}"), 1);
    EXPECT_TRUE(std::equal(args.out, args.out + residual.size(), c.args.norm_out)) << columns;
  }
}

// What a shared expert leaves to a norm: the residual with it, and the same bits in front of a product.
TEST(Norm, AddsTheShareOfASharedExpert) {
  std::mt19937 rng(70);
  std::normal_distribution<float> normal;
  const int tokens = 2;
  for (const auto& [columns, weighted, with_delta] : {std::tuple{400, true, true},
                                                      {2048, true, true},
                                                      {2048, false, true},
                                                      {3088, true, true},
                                                      {2048, true, false}}) {
    const auto count = static_cast<size_t>(tokens * columns);
    std::vector<float> residual(count), weight(static_cast<size_t>(columns)), logits(static_cast<size_t>(2 * tokens));
    for (float& v : residual) v = normal(rng) * 5.0f;
    for (float& v : weight) v = 1.0f + 0.2f * normal(rng);
    for (float& v : logits) v = normal(rng);
    const auto delta = random_rows(tokens, columns, 71), share = random_rows(tokens, columns, 72);
    Device device(schedules(1, rng())[0]);
    norm::NormArgs args = {};
    const auto produced = [](Device& on, const auto& values, const char* name) {
      const auto* at = on.constant(values, name);
      on.produced(at);
      return at;
    };
    args.residual = produced(device, residual, "residual");
    if (with_delta) args.delta = produced(device, delta, "delta");
    args.residual_stride = args.delta_stride = args.out_stride = args.share.stride = columns;
    args.residual_out = device.alloc<float>(count, "sum");
    args.weight = device.constant(weight, "weight");
    args.eps = 1e-6f;
    args.columns = columns;
    args.out = device.alloc<uint16_t>(count, "out");
    args.share.x = produced(device, share, "share");
    args.share.logits = weighted ? produced(device, logits, "logits") : nullptr;
    args.share.logits_stride = 2;
    device.launch({"norm", {static_cast<unsigned>(tokens)}, norm::kRowThreads}, [&] { norm_kernel(args); });
    for (size_t i = 0; i < count; ++i) {
      const double logit = logits[i / static_cast<size_t>(columns) * 2];
      const double added = nvfp4::bf16_to_float(share[i]) / (weighted ? 1.0 + std::exp(-logit) : 1.0);
      const double other = with_delta ? nvfp4::bf16_to_float(delta[i]) : 0.0;
      ASSERT_NEAR(args.residual_out[i], residual[i] + added + other, 2e-6 * (std::fabs(residual[i]) + 10));
    }
    if (columns > 2048) continue;
    const PackedMatrix packed = pack_stack(std::vector<MatrixSource>{random_matrix(Kind::kBf16, 16, columns, 1)});
    Case c(Options{}, packed);
    c.args.tokens = tokens;
    c.args.residual = produced(c.device, residual, "residual");
    if (with_delta) c.args.delta = produced(c.device, delta, "delta");
    c.args.residual_stride = c.args.delta_stride = columns;
    c.args.share = args.share;
    c.args.share.x = produced(c.device, share, "share");
    c.args.share.logits = weighted ? produced(c.device, logits, "logits") : nullptr;
    c.args.norm_weight = c.device.constant(weight, "norm weight");
    c.args.norm_eps = 1e-6f;
    c.args.residual_out = c.device.alloc<float>(count, "sum");
    c.args.norm_out = c.device.alloc<uint16_t>(count, "norm out");
    c.args.end = RowsEnd::kFloat;
    c.args.out_stride = 16;
    c.args.out = c.device.alloc<float>(static_cast<size_t>(tokens * 16), "out");
    c.run(kernel_named("rows {15, 1, 8, 1, 2, 1, 1, false, true}"), 1);
    EXPECT_TRUE(std::equal(args.residual_out, args.residual_out + count, c.args.residual_out)) << columns;
    EXPECT_TRUE(std::equal(args.out, args.out + count, c.args.norm_out)) << columns;
  }
}

// A norm of the residual and of what `sum` leaves in its `out`.
norm::NormArgs norm_behind(executor::Device& device, const moe::RowSum& sum, const std::vector<float>& residual,
                           const std::vector<float>& weight) {
  norm::NormArgs args = {};
  args.residual_out = device.alloc<float>(residual.size(), "residual");
  std::copy(residual.begin(), residual.end(), args.residual_out);
  args.residual = args.residual_out;
  args.delta = sum.out;
  args.columns = sum.columns;
  args.residual_stride = args.delta_stride = args.out_stride = sum.columns;
  args.weight = device.constant(weight, "weight");
  args.eps = 1e-6f;
  args.out = device.alloc<uint16_t>(residual.size(), "out");
  return args;
}

// Experts' rows to a norm at once, or by two kernels: the same bits, whether or not all warps have columns, and with
// more choices than a thread has under way.
TEST(Norm, WithTheSumOverExpertsInFront) {
  std::mt19937 rng(60);
  std::normal_distribution<float> normal;
  constexpr int kTokens = 3, kSlots = 40;
  for (const int columns : {272, 2048, 2064}) {
    for (const int top_k : {1, 9, 12}) {
      std::vector<float> residual(static_cast<size_t>(kTokens * columns)), weight(static_cast<size_t>(columns)),
          rows(static_cast<size_t>(kSlots * columns)), factors(static_cast<size_t>(kTokens * top_k));
      for (float& v : residual) v = normal(rng) * 5.0f;
      for (float& v : weight) v = 1.0f + 0.2f * normal(rng);
      for (float& v : rows) v = normal(rng);
      for (float& v : factors) v = 0.1f + std::fabs(normal(rng));
      const auto share = random_rows(kTokens, columns, 61);
      const std::vector<float> logits = {0.5f, -1.0f, 3.0f};
      std::vector<int> slots;
      for (int i = 0; i < kTokens * top_k; ++i) slots.push_back(i % 5 == 2 ? -1 : kSlots - 1 - i);
      std::vector<std::vector<uint16_t>> deltas, outs;
      std::vector<std::vector<float>> sums;
      const auto run = [&](bool together, const executor::Options& options) {
        executor::Device device(options);
        auto* partial = device.alloc<float>(rows.size(), "rows");
        std::copy(rows.begin(), rows.end(), partial);
        moe::RowSum sum = {};
        sum.partial = partial;
        sum.stride = sum.out_stride = sum.columns = columns;
        sum.pick_slot = device.constant(slots, "slots");
        sum.weights = device.constant(factors, "factors");
        sum.top_k = top_k;
        sum.out = device.alloc<uint16_t>(residual.size(), "delta");
        norm::NormArgs args = norm_behind(device, sum, residual, weight);
        if (top_k == 9) {
          args.share = {device.constant(share, "share"), columns, device.constant(logits, "logits"), 1};
        }
        device.produced(partial);
        if (together) {
          device.launch({"sum, norm", {kTokens}, norm::kRowThreads}, [&] { sum_norm_kernel(sum, args); });
        } else {
          const auto pieces = static_cast<unsigned>((columns + 1023) / 1024);
          device.launch({"sum", {pieces, kTokens}, norm::kRowThreads}, [&] { sum_kernel(sum); });
          device.launch({"norm", {kTokens}, norm::kRowThreads}, [&] { norm_kernel(args); });
        }
        deltas.emplace_back(sum.out, sum.out + residual.size());
        outs.emplace_back(args.out, args.out + residual.size());
        sums.emplace_back(args.residual_out, args.residual_out + residual.size());
      };
      run(false, {});
      for (const executor::Options& options : executor::schedules(2)) {
        run(true, options);
        EXPECT_EQ(deltas.back(), deltas.front()) << columns << " columns, " << top_k << " choices";
        EXPECT_EQ(sums.back(), sums.front()) << columns << " columns, " << top_k << " choices";
        EXPECT_EQ(outs.back(), outs.front()) << columns << " columns, " << top_k << " choices";
      }
    }
  }
}

// The same of rows of groups, whose sum is not stored by itself, and whose weights have the experts' scales in them.
TEST(Norm, WithTheSumOfGroupsInFront) {
  std::mt19937 rng(62);
  std::normal_distribution<float> normal;
  constexpr int kTokens = 3, kSlots = 60, kExperts = 7;
  for (const auto& [columns, top_k, scaled] :
       {std::tuple{272, 1, true}, {2048, 8, true}, {2064, 10, false}, {4096, 16, true}, {5136, 9, true}}) {
    const auto size = static_cast<size_t>(kTokens * columns), picks = static_cast<size_t>(kTokens * top_k);
    const int groups = moe::packed_row_values(columns) / 4;
    std::vector<float> residual(size), weight(static_cast<size_t>(columns)), factors(picks), scales(kExperts);
    for (float& v : residual) v = normal(rng) * 5.0f;
    for (float& v : weight) v = 1.0f + 0.2f * normal(rng);
    for (float& v : factors) v = 0.1f + std::fabs(normal(rng));
    for (float& v : scales) v = (0.5f + std::fabs(normal(rng))) / moe::kEpilogueScale;
    std::vector<moe::PackedGroup> rows(static_cast<size_t>(kSlots * groups));
    for (moe::PackedGroup& group : rows) {
      const unsigned exponent = 122 + rng() % 8;
      group = {{static_cast<unsigned>(rng() % (1u << 28)) | (exponent & 15) << 28,
                static_cast<unsigned>(rng() % (1u << 28)) | exponent >> 4 << 28}};
    }
    const auto share = random_rows(kTokens, columns, 63);
    const std::vector<float> logits = {0.5f, -1.0f, 3.0f};
    std::vector<int> slots, ids;
    for (size_t i = 0; i < picks; ++i) {
      slots.push_back(i % 5 == 2 ? -1 : kSlots - 1 - static_cast<int>(i));
      ids.push_back(static_cast<int>(rng() % kExperts));
    }
    std::vector<std::vector<uint16_t>> outs;
    std::vector<std::vector<float>> sums;
    const auto run = [&](bool together, const executor::Options& options) {
      executor::Device device(options);
      moe::RowSum sum = {};
      sum.groups = device.constant(rows, "rows");
      device.produced(sum.groups);
      sum.stride = groups;
      sum.pick_slot = device.constant(slots, "slots");
      sum.weights = device.constant(factors, "factors");
      sum.ids = device.constant(ids, "ids");
      sum.scales = scaled ? device.constant(scales, "scales") : nullptr;
      sum.top_k = top_k;
      sum.columns = columns;
      sum.out = device.alloc<uint16_t>(size, "delta");
      sum.out_stride = columns;
      norm::NormArgs args = norm_behind(device, sum, residual, weight);
      if (top_k == 8) args.share = {device.constant(share, "share"), columns, device.constant(logits, "logits"), 1};
      if (together) {
        device.launch({"sum, norm", {kTokens}, norm::kRowThreads}, [&] { sum_norm_kernel(sum, args); });
      } else {
        const auto pieces = static_cast<unsigned>((columns + 1023) / 1024);
        device.launch({"sum", {pieces, kTokens}, moe::kCombinePackedThreads}, [&] { sum_kernel(sum); });
        device.launch({"norm", {kTokens}, norm::kRowThreads}, [&] { norm_kernel(args); });
      }
      outs.emplace_back(args.out, args.out + size);
      sums.emplace_back(args.residual_out, args.residual_out + size);
    };
    run(false, {});
    for (const executor::Options& options : executor::schedules(2)) {
      run(true, options);
      EXPECT_EQ(sums.back(), sums.front()) << columns << " columns, " << top_k << " choices";
      EXPECT_EQ(outs.back(), outs.front()) << columns << " columns, " << top_k << " choices";
    }
    EXPECT_NE(sums.front(), residual);
  }
}

TEST(Embed, RowsOfEveryFormat) {
  for (const Kind kind : kKinds) {
    const int rows = 150, columns = 208;
    const MatrixSource m = random_matrix(kind, rows, columns, 8);
    const std::vector<int> tokens = {149, 0, 77, -1, 128, 150, 0};
    Device device(schedules(1, 9)[0]);
    norm::EmbedArgs args = {};
    const auto* bytes = static_cast<const uint8_t*>(m.data);
    const auto row_bytes = static_cast<size_t>(m.format == ops::Format::kNvfp4 ? columns / 2
                                               : m.format == ops::Format::kFp8 ? columns
                                               : m.format == ops::Format::kF32 ? columns * 4
                                                                               : columns * 2);
    args.table = {static_cast<Stored>(m.format),
                  device.constant(std::vector<uint8_t>(bytes, bytes + rows * row_bytes), "table"), nullptr, rows,
                  columns};
    if (m.format == ops::Format::kNvfp4) {
      args.table.block_scales =
          device.constant(std::vector<uint8_t>(m.block_scales, m.block_scales + rows * columns / 16), "block scales");
    }
    if (m.format == ops::Format::kFp8) {
      const auto cells =
          ((rows + m.scale_rows - 1) / m.scale_rows) * ((columns + m.scale_columns - 1) / m.scale_columns);
      args.grid_scales = device.constant(std::vector<float>(m.grid_scales, m.grid_scales + cells), "scales");
    }
    args.scale_rows = static_cast<int>(m.scale_rows);
    args.scale_columns = static_cast<int>(m.scale_columns);
    args.tensor_scale = m.tensor_scale;
    args.tokens = device.constant(tokens, "tokens");
    device.produced(args.tokens);
    args.out_stride = columns + 4;
    args.out = device.alloc<float>(tokens.size() * static_cast<size_t>(args.out_stride), "out");
    device.launch({"embed", {static_cast<unsigned>(tokens.size())}, norm::kEmbedThreads}, [&] { embed_kernel(args); });
    std::vector<float> want(static_cast<size_t>(columns));
    for (size_t t = 0; t < tokens.size(); ++t) {
      const bool there = tokens[t] >= 0 && tokens[t] < rows;
      if (there) ops::dequantize(m, tokens[t], want.data());
      for (int i = 0; i < columns; ++i) {
        const float got = args.out[static_cast<long long>(t) * args.out_stride + i];
        if (there) {
          ASSERT_EQ(got, want[static_cast<size_t>(i)]) << name_of(kind) << " " << t << " " << i;
        } else {
          ASSERT_TRUE(std::isnan(got));
        }
      }
    }
  }
}

TEST(Gather, PicksRows) {
  std::vector<uint32_t> x(6 * 44);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<uint32_t>(i);
  const std::vector<int> rows = {5, 0, 0, 3};
  Device device(schedules(1, 2)[0]);
  norm::GatherArgs args = {};
  args.x = device.constant(x, "x");
  device.produced(args.x);
  args.x_stride = 44 * 4;
  args.rows = device.constant(rows, "rows");
  args.pieces = 10;
  auto* out = device.alloc<uint32_t>(4 * 48, "out");
  args.out = out;
  args.out_stride = 48 * 4;
  device.launch({"gather", {4}, norm::kEmbedThreads}, [&] { gather_kernel(args); });
  for (size_t i = 0; i < rows.size(); ++i) {
    for (size_t c = 0; c < 40; ++c) EXPECT_EQ(out[i * 48 + c], static_cast<size_t>(rows[i]) * 44 + c);
  }
}

}  // namespace
}  // namespace fourfold::gemm
