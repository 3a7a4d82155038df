// Products of 1 to 16 rows (gemm/rows.cuh) on the host executor against double: odd shapes, stacks of every format,
// every end of the kernel, the norm in front of it; and the same bits for a row in every batch.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

#include "base/check.h"
#include "cuda/gemm/packed_matrix.h"
#include "kernels/random_weights.h"
#include "kernels/rows_case.h"

namespace fourfold::gemm {
namespace {

using cuda::pack_pair;
using cuda::pack_stack;
using executor::schedules;
using ops::MatrixSource;

void expect_near(const std::vector<float>& y, const Products& want, double relative) {
  for (size_t i = 0; i < y.size(); ++i) {
    ASSERT_NEAR(y[i], want.y[i], relative * want.size[i] + 1e-30)
        << "row of x " << i / static_cast<size_t>(want.rows) << ", output " << i % static_cast<size_t>(want.rows);
  }
}

std::vector<uint16_t> first_rows(const std::vector<uint16_t>& x, int64_t columns, int tokens, int from = 0) {
  return {x.begin() + from * columns, x.begin() + (from + tokens) * columns};
}

TEST(Products, EveryFormatAndOddShapes) {
  unsigned seed = 1;
  for (const Kind kind : kKinds) {
    for (const auto& [rows, columns, tokens, grid] : {std::tuple{16, 64, 1, 1u},
                                                      {33, 16, 3, 2u},
                                                      {50, 1104, 5, 2u},
                                                      {15, 208, 8, 1u},
                                                      {64, 2080, 2, 3u},
                                                      {20, 336, 16, 1u},
                                                      {40, 1168, 11, 2u}}) {
      const std::vector<MatrixSource> parts = {random_matrix(kind, rows, columns, ++seed)};
      const auto x = random_rows(tokens, columns, ++seed);
      SCOPED_TRACE(parts[0].name + ", " + std::to_string(tokens) + " rows");
      const Products want = reference(parts, x, tokens);
      for (const Options& o : schedules(1, seed)) {
        expect_near(run_floats(kernel_for(tokens), o, pack_stack(parts), x, tokens, grid), want, 2e-6);
      }
    }
  }
}

std::vector<MatrixSource> mixed_stack(int64_t columns, unsigned seed) {
  return {random_matrix(Kind::kFp8Block, 150, columns, seed), random_matrix(Kind::kNvfp4, 33, columns, seed + 1),
          random_matrix(Kind::kBf16, 1, columns, seed + 2),   random_matrix(Kind::kFp8Row, 20, columns, seed + 3),
          random_matrix(Kind::kNvfp4, 16, columns, seed + 4), random_matrix(Kind::kFp8Tensor, 5, columns, seed + 5)};
}

TEST(Products, StacksOfMixedFormatsAndARowsBitsInEveryBatch) {
  for (const int columns : {272, 1040}) {
    const auto parts = mixed_stack(columns, static_cast<unsigned>(columns));
    const PackedMatrix packed = pack_stack(parts);
    const auto x = random_rows(16, columns, 5);
    const Products want = reference(parts, x, 16);
    const std::vector<float> all = run_floats(kernel_for(16), schedules(1)[0], packed, x, 16, 4);
    expect_near(all, want, 2e-6);
    unsigned seed = 0;
    for (int tokens = 1; tokens < 16; ++tokens) {
      const int from = 16 - tokens;
      const std::vector<float> y = run_floats(kernel_for(tokens), schedules(1, ++seed)[0], packed,
                                              first_rows(x, columns, tokens, from), tokens, 3);
      EXPECT_TRUE(std::equal(y.begin(), y.end(), all.begin() + from * want.rows)) << tokens << " rows";
    }
  }
}

TEST(Products, ScheduleDoesNotMatter) {
  const auto parts = mixed_stack(656, 77);
  const PackedMatrix packed = pack_stack(parts);
  const auto x = random_rows(9, 656, 6);
  const std::vector<float> want = run_floats(kernel_for(9), Options{}, packed, x, 9, 2);
  expect_near(want, reference(parts, x, 9), 2e-6);
  for (const Options& o : schedules(9, 3)) EXPECT_EQ(run_floats(kernel_for(9), o, packed, x, 9, 2), want);
  // x in panels of some units: other copies, the same sums.
  for (const int panel : {4, 8}) EXPECT_EQ(run_floats(kernel_for(9), Options{}, packed, x, 9, 2, panel), want);
  // As many CTAs as row tiles, and one for all.
  for (const unsigned grid : {1u, static_cast<unsigned>(packed.tiles)}) {
    EXPECT_EQ(run_floats(kernel_for(9), Options{}, packed, x, 9, grid), want);
  }
}

TEST(Products, TeamsShareTheRowTiles) {
  const auto parts = mixed_stack(656, 78);
  const PackedMatrix packed = pack_stack(parts);
  for (const int tokens : {1, 3, 7}) {
    const auto x = random_rows(tokens, 656, 6);
    const std::vector<float> want = run_floats(kernel_for(tokens), Options{}, packed, x, tokens, 2);
    const RowsKernel teams = kernel_named("rows {15, 1, 8, 2, 3, 1, 0}");
    for (const unsigned grid : {1u, 3u, static_cast<unsigned>(packed.tiles)}) {
      EXPECT_EQ(run_floats(teams, schedules(1, grid)[0], packed, x, tokens, grid), want);
      EXPECT_EQ(run_floats(teams, schedules(1, grid)[0], packed, x, tokens, grid, 4), want);
    }
  }
}

TEST(Products, OneFormatAlone) {
  const std::vector<MatrixSource> parts = {random_matrix(Kind::kFp8Block, 130, 848, 1),
                                           random_matrix(Kind::kFp8Tensor, 24, 848, 2)};
  const auto x = random_rows(4, 848, 3);
  EXPECT_EQ(run_floats(kernel_named("rows {10, 1, 8, 1, 4, 2, 0}"), Options{}, pack_stack(parts), x, 4, 3),
            run_floats(kernel_for(4), Options{}, pack_stack(parts), x, 4, 3));
}

// Of one row of x 32 at a time, of more at most 8. A row has the same bits in every batch.
TEST(Products, ManyRowTilesOfACta) {
  const std::vector<MatrixSource> parts = {random_matrix(Kind::kNvfp4, 1190, 720, 11)};
  const PackedMatrix packed = pack_stack(parts);
  for (const char* name : {"rows {4, 1, 4, 2, 2, 2, 0}", "rows {4, 1, 2, 4, 3, 2, 0}"}) {
    const RowsKernel kernel = kernel_named(name);
    ASSERT_EQ(rows_batch(kernel.tile, 1), 32);
    std::vector<float> first;
    for (const int tokens : {1, 2, 8}) {
      const auto x = random_rows(tokens, 720, 12);
      const Products want = reference(parts, x, tokens);
      const std::vector<float> y = run_floats(kernel, Options{}, packed, x, tokens, 1);
      expect_near(y, want, 2e-6);
      if (first.empty()) first = y;
      EXPECT_TRUE(std::equal(first.begin(), first.end(), y.begin())) << name << ", " << tokens;
      for (const Options& o : schedules(2, 13)) EXPECT_EQ(run_floats(kernel, o, packed, x, tokens, 2), y);
    }
  }
}

// The end of a kernel, from the fp32 sums of another run.
TEST(Products, EndsRoundAndAdd) {
  const int columns = 400, tokens = 11;
  auto parts = mixed_stack(columns, 9);
  const PackedMatrix packed = pack_stack(parts);
  const auto x = random_rows(tokens, columns, 10);
  const std::vector<float> sums = run_floats(kernel_for(tokens), Options{}, packed, x, tokens, 2);
  const auto rows = static_cast<size_t>(packed.rows);
  const auto stride = static_cast<long long>(rows + 5);
  for (const Options& o : schedules(3, 4)) {
    {
      Case c(o, packed);
      c.rows(x, tokens);
      c.args.end = RowsEnd::kBf16;
      c.args.out_stride = stride;
      auto* out = c.device.alloc<uint16_t>(tokens * (rows + 5), "out");
      c.args.out = out;
      c.run(kernel_for(tokens), 3);
      for (size_t i = 0; i < sums.size(); ++i) {
        ASSERT_EQ(out[i / rows * (rows + 5) + i % rows], nvfp4::float_to_bf16(sums[i])) << i;
      }
    }
    for (const bool scaled : {false, true}) {
      Case c(o, packed);
      c.rows(x, tokens);
      c.args.end = RowsEnd::kAdd;
      c.args.out_stride = stride;
      auto* out = c.device.alloc<float>(tokens * (rows + 5), "out");
      for (size_t i = 0; i < tokens * (rows + 5); ++i) out[i] = static_cast<float>(i % 97) - 40.0f;
      c.args.out = out;
      std::vector<float> scales;
      for (int t = 0; t < tokens; ++t) scales.push_back(0.1f * static_cast<float>(t + 1));
      if (scaled) {
        c.args.row_scales = c.device.constant(scales, "scales");
        c.device.produced(c.args.row_scales);
      }
      c.run(kernel_for(tokens), 3);
      for (size_t i = 0; i < sums.size(); ++i) {
        const size_t at = i / rows * (rows + 5) + i % rows;
        const float scale = scaled ? scales[i / rows] : 1.0f;
        ASSERT_EQ(out[at], std::fma(sums[i], scale, static_cast<float>(at % 97) - 40.0f)) << i;
      }
    }
  }
}

TEST(Products, GateAndUp) {
  unsigned seed = 30;
  for (const Kind kind : {Kind::kNvfp4, Kind::kFp8Block, Kind::kFp8Row, Kind::kBf16}) {
    for (const bool fused : {false, true}) {
      const int inner = kind == Kind::kFp8Block ? 128 : 44, columns = 272, tokens = 3;
      std::vector<MatrixSource> parts = {random_matrix(kind, fused ? 2 * inner : inner, columns, ++seed)};
      if (!fused) parts.push_back(random_matrix(kind, inner, columns, ++seed));
      const PackedMatrix packed = pack_pair(parts);
      EXPECT_EQ(packed.rows, inner);
      const auto x = random_rows(tokens, columns, ++seed);
      const Products want = reference(parts, x, tokens);
      Case c(schedules(1, seed)[0], packed);
      c.rows(x, tokens);
      c.args.end = RowsEnd::kSwiGlu;
      c.args.out_stride = inner;
      auto* out = c.device.alloc<uint16_t>(static_cast<size_t>(tokens * inner), "out");
      c.args.out = out;
      c.run(kernel_for(tokens), 2);
      for (int t = 0; t < tokens; ++t) {
        for (int i = 0; i < inner; ++i) {
          const double gate = want.at(t, i), up = want.at(t, inner + i);
          const double h = gate / (1.0 + std::exp(-gate)) * up;
          ASSERT_NEAR(nvfp4::bf16_to_float(out[t * inner + i]), h,
                      std::fabs(h) / 256 + 1e-5 * (want.size_at(t, i) + want.size_at(t, inner + i)))
              << name_of(kind) << " " << t << " " << i;
        }
      }
    }
  }
}

// Gate and up of an MLP behind a router: logits with the bits of the router alone, activations those of the pair alone.
TEST(Products, GatedRowTilesBehindOthers) {
  const int columns = 656, tokens = 5, inner = 44;
  const std::vector<MatrixSource> router = {random_matrix(Kind::kBf16, 21, columns, 50),
                                            random_matrix(Kind::kBf16, 1, columns, 51)},
                                  pair = {random_matrix(Kind::kFp8Row, inner, columns, 52),
                                          random_matrix(Kind::kFp8Row, inner, columns, 53)};
  const PackedMatrix first = pack_stack(router), second = pack_pair(pair);
  const auto x = random_rows(tokens, columns, 54);
  const std::vector<float> logits = run_floats(kernel_for(tokens), Options{}, first, x, tokens, 3);
  Case alone(Options{}, second);
  alone.rows(x, tokens);
  alone.args.end = RowsEnd::kSwiGlu;
  alone.args.out_stride = inner;
  auto* want = alone.device.alloc<uint16_t>(static_cast<size_t>(tokens * inner), "want");
  alone.args.out = want;
  alone.run(kernel_for(tokens), 2);
  for (const Options& o : schedules(3, 2)) {
    for (const unsigned grid : {2u, 7u}) {
      Case c(o, first);
      c.rows(x, tokens);
      Matrix& matrix = c.args.matrix;
      const std::vector<uint8_t> bytes = second.bytes;
      Part part = second.at(c.device.constant(bytes, "gate and up")).parts[0];
      part.first_tile += matrix.tiles;
      matrix.parts[matrix.count++] = part;
      matrix.tiles += second.tiles;
      c.args.end = RowsEnd::kFloat;
      c.args.out_stride = first.rows;
      auto* out = c.device.alloc<float>(logits.size(), "logits");
      c.args.out = out;
      c.args.gated_tiles = second.tiles;
      c.args.gated_stride = inner + 3;
      c.args.gated_out = c.device.alloc<uint16_t>(static_cast<size_t>(tokens * (inner + 3)), "activations");
      c.run(kernel_for(tokens), grid);
      EXPECT_TRUE(std::equal(logits.begin(), logits.end(), out));
      for (int t = 0; t < tokens; ++t) {
        EXPECT_TRUE(std::equal(want + t * inner, want + (t + 1) * inner, c.args.gated_out + t * c.args.gated_stride));
      }
    }
  }
}

TEST(Products, TheNormInFrontOfAProduct) {
  const RowsKernel kernel = kernel_named("rows {15, 1, 8, 1, 2, 1, 1}");
  const int tokens = 3;
  for (const int columns : {2048, 400}) {
    const std::vector<MatrixSource> parts = {random_matrix(Kind::kFp8Tensor, 40, columns, 1)};
    const PackedMatrix packed = pack_stack(parts);
    std::mt19937 rng(3);
    std::normal_distribution<float> normal;
    std::vector<float> residual(static_cast<size_t>(tokens * columns)), weight(static_cast<size_t>(columns));
    for (float& v : residual) v = normal(rng) * 5.0f;
    for (float& v : weight) v = 1.0f + 0.2f * normal(rng);
    const auto delta = random_rows(tokens, columns, 4);
    for (const bool with_delta : {true, false}) {
      Case c(schedules(1, 5)[0], packed);
      c.args.tokens = tokens;
      c.args.residual = c.device.constant(residual, "residual");
      c.device.produced(c.args.residual);
      c.args.residual_stride = columns;
      if (with_delta) {
        c.args.delta = c.device.constant(delta, "delta");
        c.device.produced(c.args.delta);
        c.args.delta_stride = columns;
      }
      c.args.norm_weight = c.device.constant(weight, "norm weight");
      c.args.norm_eps = 1e-6f;
      c.args.residual_out = c.device.alloc<float>(residual.size(), "residual out");
      c.args.norm_out = c.device.alloc<uint16_t>(residual.size(), "norm out");
      c.args.end = RowsEnd::kFloat;
      c.args.out_stride = packed.rows;
      auto* out = c.device.alloc<float>(static_cast<size_t>(tokens * packed.rows), "out");
      c.args.out = out;
      c.run(kernel, 2);
      for (int t = 0; t < tokens; ++t) {
        double squares = 0;
        std::vector<double> sum(static_cast<size_t>(columns));
        for (int i = 0; i < columns; ++i) {
          const auto at = static_cast<size_t>(t * columns + i);
          const float v = with_delta ? residual[at] + nvfp4::bf16_to_float(delta[at]) : residual[at];
          ASSERT_EQ(c.args.residual_out[at], v);
          squares += static_cast<double>(v) * v;
          sum[static_cast<size_t>(i)] = v;
        }
        const double inverse = 1.0 / std::sqrt(squares / columns + 1e-6);
        for (int i = 0; i < columns; ++i) {
          const double want = sum[static_cast<size_t>(i)] * inverse * weight[static_cast<size_t>(i)];
          ASSERT_NEAR(nvfp4::bf16_to_float(c.args.norm_out[t * columns + i]), want, std::fabs(want) / 255 + 1e-9);
        }
      }
      // The product of the rows that it says it multiplied.
      const std::vector<uint16_t> x(c.args.norm_out, c.args.norm_out + residual.size());
      const std::vector<float> want = run_floats(kernel_for(tokens), Options{}, packed, x, tokens, 3);
      EXPECT_TRUE(std::equal(want.begin(), want.end(), out));
    }
  }
}

// ---- the router ---------------------------------------------------------------------------------------------------

struct Choice {
  std::vector<int> ids;
  std::vector<double> weights;
};
Choice choose(const float* logits, const RouteArgs& args) {
  std::vector<int> order;
  for (int i = 0; i < args.experts; ++i) {
    if (!std::isnan(logits[i])) order.push_back(i);
  }
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return logits[a] > logits[b]; });
  double all = 0;
  for (const int i : order) all += std::exp(static_cast<double>(logits[i]) - logits[order[0]]);
  Choice c;
  double chosen = 0;
  for (int k = 0; k < args.top_k; ++k) {
    const bool there = k < static_cast<int>(order.size());
    const int id = there ? order[static_cast<size_t>(k)] : -1;
    const bool here = args.here == 0 || (id >= args.first_here && id < args.first_here + args.here);
    c.ids.push_back(there && here ? id - args.first_here : -1);
    c.weights.push_back(there ? std::exp(static_cast<double>(logits[id]) - logits[order[0]]) : 0.0);
    chosen += c.weights.back();
  }
  for (double& w : c.weights) w = chosen == 0 ? 0 : w / (args.renormalize != 0 ? chosen : all);
  for (int s = 0; s < args.slices; ++s) {
    c.ids.push_back(args.first_slice + s);
    c.weights.push_back(args.gate >= 0 ? 1.0 / (1.0 + std::exp(-static_cast<double>(logits[args.gate]))) : 1.0);
  }
  return c;
}

void expect_choice(const Choice& want, const RouteArgs& args, int t) {
  for (size_t i = 0; i < want.ids.size(); ++i) {
    const auto at = static_cast<size_t>(t * args.width) + i;
    EXPECT_EQ(args.ids[at], want.ids[i]) << "row " << t << ", choice " << i;
    EXPECT_NEAR(args.weights[at], want.weights[i], 1e-6 * want.weights[i] + 1e-7) << "row " << t << ", choice " << i;
  }
}

TEST(Route, ChoosesTheLargestTiesToTheLower) {
  std::mt19937 rng(1);
  for (const auto& [experts, top_k, slices, tokens, here] : {std::tuple{4, 1, 0, 1, 0},
                                                             {256, 8, 1, 3, 0},
                                                             {256, 8, 1, 3, 128},
                                                             {70, 10, 3, 9, 0},
                                                             {70, 10, 3, 9, 20},
                                                             {512, 10, 0, 2, 0},
                                                             {1024, 16, 2, 4, 0},
                                                             {3, 5, 0, 2, 0}}) {
    for (const int renormalize : {0, 1}) {
      const int stride = experts + 3;
      std::vector<float> logits(static_cast<size_t>(tokens * stride), std::numeric_limits<float>::quiet_NaN());
      for (int t = 0; t < tokens; ++t) {
        // Coarse, so that there are equals; some rows with infinities, one of NaN.
        for (int i = 0; i <= experts; ++i) {
          float v = static_cast<float>(static_cast<int>(rng() % 61) - 30) / 4.0f;
          if (t == 1 && i % 5 == 0) v = -std::numeric_limits<float>::infinity();
          if (t == 2 && i < experts) v = std::numeric_limits<float>::quiet_NaN();
          logits[static_cast<size_t>(t * stride + i)] = v;
        }
      }
      Device device(schedules(1, rng())[0]);
      RouteArgs args = {};
      args.logits = device.constant(logits, "logits");
      device.produced(args.logits);
      args.logits_stride = stride;
      args.tokens = tokens;
      args.experts = experts;
      args.top_k = top_k;
      args.renormalize = renormalize;
      args.slices = slices;
      args.first_slice = here > 0 ? here : experts;
      args.first_here = here > 0 ? experts / 3 : 0;
      args.here = here;
      args.gate = slices > 1 ? -1 : experts;
      args.width = top_k + slices;
      args.ids = device.alloc<int>(static_cast<size_t>(tokens * args.width), "ids");
      args.weights = device.alloc<float>(static_cast<size_t>(tokens * args.width), "weights");
      device.launch({"route", {static_cast<unsigned>((tokens + 7) / 8)}, kRouteThreads}, [&] { route_kernel(args); });
      for (int t = 0; t < tokens; ++t) expect_choice(choose(logits.data() + t * stride, args), args, t);
    }
  }
}

// A CTA more than the product has: the same bits of both as by themselves.
TEST(Route, BesideAProduct) {
  const RowsKernel kernel = kernel_named("rows {3, 1, 8, 1, 2, 1, 0, true}");
  const int columns = 656, experts = 70;
  const PackedMatrix packed = pack_stack(std::vector<MatrixSource>{random_matrix(Kind::kFp8Row, 37, columns, 60),
                                                                   random_matrix(Kind::kBf16, 19, columns, 61)});
  std::mt19937 rng(62);
  for (const int tokens : {1, 8}) {
    const auto x = random_rows(tokens, columns, 63);
    const std::vector<float> want = run_floats(kernel_for(tokens), Options{}, packed, x, tokens, 3);
    std::vector<float> logits(static_cast<size_t>(tokens * experts));
    for (float& v : logits) v = static_cast<float>(static_cast<int>(rng() % 61) - 30) / 4.0f;
    for (const Options& o : schedules(3, 4)) {
      for (const unsigned grid : {2u, 5u}) {
        Case c(o, packed);
        c.rows(x, tokens);
        c.args.end = RowsEnd::kFloat;
        c.args.out_stride = packed.rows;
        auto* out = c.device.alloc<float>(want.size(), "out");
        c.args.out = out;
        RouteArgs& route = c.args.choice;
        route.logits = c.device.constant(logits, "logits");
        c.device.produced(route.logits);
        route.logits_stride = route.experts = experts;
        route.tokens = tokens;
        route.top_k = route.width = 10;
        route.renormalize = 1;
        route.gate = -1;
        route.ids = c.device.alloc<int>(static_cast<size_t>(tokens * route.width), "ids");
        route.weights = c.device.alloc<float>(static_cast<size_t>(tokens * route.width), "weights");
        c.run(kernel, grid);
        EXPECT_TRUE(std::equal(want.begin(), want.end(), out));
        for (int t = 0; t < tokens; ++t) expect_choice(choose(logits.data() + t * experts, route), route, t);
      }
    }
  }
}

// ---- the executor bites ---------------------------------------------------------------------------------------------

// Every synchronising call is left out in turn, by its wrapper; the products must then fail under schedules under which
// they pass.
TEST(Products, NoSynchronisationIsSuperfluous) {
  if (!executor::Device::checks_plain_accesses()) GTEST_SKIP() << "half of the order is not seen in sanitizer builds";
  using executor::Mutation;
  using executor::Op;
  const int columns = 656, tokens = 9;
  const auto parts = mixed_stack(columns, 9);
  const PackedMatrix packed = pack_stack(parts);
  const auto x = random_rows(tokens, columns, 10);
  const std::vector<float> want = run_floats(kernel_for(tokens), Options{}, packed, x, tokens, 2);
  const auto run = [&](const Options& o, std::set<executor::SeenSite>* seen) {
    Case c(o, packed);
    c.rows(x, tokens);
    c.args.end = RowsEnd::kFloat;
    c.args.panel_units = 8;
    c.args.out_stride = packed.rows;
    auto* out = c.device.alloc<float>(want.size(), "out");
    c.args.out = out;
    c.run(kernel_for(tokens), 2);
    if (seen != nullptr) *seen = c.device.seen();
    return std::equal(want.begin(), want.end(), out);
  };
  std::set<executor::SeenSite> seen;
  ASSERT_TRUE(run(Options{}, &seen));
  const auto found = [&](const Mutation& m) {
    for (Options o : schedules(9, 5)) {
      o.mutation = m;
      try {
        if (!run(o, nullptr)) return true;
      } catch (const executor::Violation&) {
        return true;
      }
    }
    return false;
  };
  int mutations = 0;
  for (const auto& [op, file, line] : seen) {
    if (op == Op::kShuffle || op == Op::kMma || op == Op::kMatrixLoad) continue;
    if (op == Op::kAsyncCopyWait) {
      EXPECT_TRUE(found({Mutation::Kind::kWeaken, op, file, line, 0})) << file << ":" << line;
    }
    EXPECT_TRUE(found({Mutation::Kind::kDrop, op, file, line, 0})) << to_string(op) << " " << file << ":" << line;
    ++mutations;
  }
  EXPECT_GE(mutations, 8);
}

std::string error_of(const std::vector<MatrixSource>& parts, bool pair = false) {
  try {
    pair ? pack_pair(parts) : pack_stack(parts);
  } catch (const Error& e) {
    return e.what();
  }
  return "packed";
}

TEST(PackedMatrix, NamesWhatCannotBePacked) {
  MatrixSource nan = random_matrix(Kind::kFp8Row, 40, 64, 1);
  const_cast<uint8_t*>(static_cast<const uint8_t*>(nan.data))[20 * 64 + 63] = 0xff;
  EXPECT_EQ(error_of({nan}), "fp8-row 40x64: a weight in row 16 to 31 is NaN");
  MatrixSource scale = random_matrix(Kind::kNvfp4, 40, 64, 1);
  const_cast<uint8_t*>(scale.block_scales)[39 * 4 + 3] = 0x7f;
  EXPECT_EQ(error_of({scale}), "nvfp4 40x64: a weight in row 32 to 39 is NaN");
  EXPECT_EQ(error_of({random_matrix(Kind::kBf16, 4, 64, 1), random_matrix(Kind::kBf16, 4, 80, 1)}),
            "bf16 4x80: 80 columns, wanted 64 as in the rest of the stack");
  EXPECT_EQ(error_of({random_matrix(Kind::kBf16, 4, 24, 1)}),
            "bf16 4x24: 4 x 24; wanted at least one row and a multiple of 16 columns");
  MatrixSource blocks = random_matrix(Kind::kFp8Block, 128, 256, 1);
  blocks.scale_columns = 32;
  EXPECT_EQ(error_of({blocks}),
            "fp8-block 128x256: FP8 scales of 128 x 32 blocks; wanted multiples of 16 x 64, or one "
            "scale along a row");
  EXPECT_EQ(error_of({random_matrix(Kind::kBf16, 4, 64, 1), random_matrix(Kind::kNvfp4, 4, 64, 1)}, true),
            "bf16 4x64 (4 rows, bf16) and nvfp4 4x64 (4 rows, nvfp4): gate and up differ");
  EXPECT_EQ(error_of({random_matrix(Kind::kFp8Block, 160, 256, 1)}, true),
            "fp8-block 160x256: FP8 scales of 128 rows lie across gate and up, 80 rows each");
}

// What is packed on the device, in pieces, is what the host packs.
TEST(PackedMatrix, OnTheDevice) {
  unsigned seed = 50;
  for (const Kind kind : kKinds) {
    for (const bool paired : {false, true}) {
      const int rows = 150, columns = 208, units = units_of(columns);
      MatrixSource m[2] = {random_matrix(kind, rows, columns, ++seed), random_matrix(kind, rows, columns, ++seed)};
      const PackedMatrix want = paired ? pack_pair(m) : pack_stack({m, 1});
      Device device(schedules(1, seed)[0]);
      Source sources[2];
      for (int i = 0; i < 2; ++i) {
        const auto size = static_cast<size_t>(m[i].format == ops::Format::kNvfp4 ? rows * columns / 2
                                              : m[i].format == ops::Format::kFp8 ? rows * columns
                                              : m[i].format == ops::Format::kF32 ? rows * columns * 4
                                                                                 : rows * columns * 2);
        const auto* bytes = static_cast<const uint8_t*>(m[i].data);
        sources[i] = {static_cast<Stored>(m[i].format),
                      device.constant(std::vector<uint8_t>(bytes, bytes + size), "data"), nullptr, rows, columns};
        if (m[i].format == ops::Format::kNvfp4) {
          const auto* scales = m[i].block_scales;
          sources[i].block_scales =
              device.constant(std::vector<uint8_t>(scales, scales + rows * columns / 16), "block scales");
        }
      }
      const PackedMatrix::Part& part = want.parts[0];
      const auto strip = static_cast<size_t>(units * unit_bytes(part.format));
      auto* out = device.alloc<uint8_t>(strip * static_cast<size_t>(part.tiles), "packed");
      int* bad = device.alloc<int>(1, "bad");
      *bad = -1;
      const int half = part.tiles / 2;
      for (const auto& [first, tiles] : {std::pair{0, half}, {half, part.tiles - half}}) {
        device.launch({"repack", {2}, 64, 0, false}, [&] {
          repack_kernel(sources[0], sources[paired ? 1 : 0], paired, first, tiles, units,
                        out + strip * static_cast<size_t>(first), bad);
        });
      }
      EXPECT_EQ(*bad, -1);
      EXPECT_TRUE(std::equal(out, out + strip * static_cast<size_t>(part.tiles),
                             want.bytes.begin() + static_cast<long>(part.weights)))
          << name_of(kind) << (paired ? ", paired" : "");
    }
  }
}

TEST(PackedMatrix, Fp8WordsHoldFourCodes) {
  for (unsigned a = 0; a < 256; ++a) {
    for (unsigned b = 0; b < 256; ++b) {
      const unsigned c = (a * 37 + b * 11) & 255u, d = (a * 5 + b * 91 + 7) & 255u;
      const unsigned w = pack_fp8_word(a, b, c, d), v = pack_fp8_word(c, d, a, b);
      ASSERT_EQ(unpack_fp8(w, 0), spread_fp8(a) | spread_fp8(b) << 16);
      ASSERT_EQ(unpack_fp8(w, 1), spread_fp8(c) | spread_fp8(d) << 16);
      ASSERT_EQ(unpack_fp8(v, 1), spread_fp8(a) | spread_fp8(b) << 16);
    }
    if (!nvfp4::e4m3_is_nan(static_cast<uint8_t>(a))) {
      EXPECT_EQ(std::ldexp(nvfp4::bf16_to_float(static_cast<uint16_t>(spread_fp8(a))), 120),
                nvfp4::e4m3_to_float(static_cast<uint8_t>(a)));
    }
  }
}

}  // namespace
}  // namespace fourfold::gemm
