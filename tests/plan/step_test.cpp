// The cost models of whole steps against kernels measured by themselves on one H200 (docs/kernels: products.md,
// attention.md, delta.md, comm.md; graphs of dependent nodes, cold weights).
#include "plan/step/step.h"

#include <gtest/gtest.h>

#include "base/check.h"

namespace fourfold::plan::step {
namespace {

const Machine& h200() {
  static const Machine machine = {find_gpu("h200")};
  return machine;
}

Work work_of(const Extent& extent, double bytes, double flops, std::initializer_list<const char*> kernels) {
  Work work;
  work.name = "operation";
  work.bytes = bytes;
  work.flops = flops;
  work.extent = extent;
  for (const char* kernel : kernels) work.launches.push_back({kernel, 132, 256, 0, true});
  return work;
}

double number(int64_t value) { return static_cast<double>(value); }

// Within 15 % and 0.7 us: what a product has beside others in a model is in the model, and not in these figures.
void expect_measured(const Op& op, double us, const std::string& what) {
  EXPECT_NEAR(op.us, us, 0.15 * us + 0.7) << what;
  EXPECT_LE(op.floor_us, 1.03 * us) << what;  // plain reads differ by that between runs
}

Op product(const char* kernel, double weight_bytes, int64_t rows, int64_t n, int64_t k, bool norm = false) {
  const Extent extent = {.kind = Kind::kProduct, .rows = rows, .outputs = n, .inputs = k, .norm_in_front = norm};
  return price(work_of(extent, weight_bytes * number(n * k), 2 * number(rows * n * k), {kernel}), h200());
}

TEST(StepCost, ProductsAreThoseMeasured) {
  constexpr double kNvfp4 = 0.5625, kFp8 = 1, kBf16 = 2;
  struct Case {
    const char* kernel;
    double bytes;
    int64_t rows, n, k;
    double us;
  };
  for (const Case& c : {Case{"gemm_rows", kFp8, 1, 12288, 2048, 6.96},
                        {"gemm_rows", kFp8, 1, 2048, 4096, 3.88},
                        {"gemm_rows", kFp8, 1, 9216, 2048, 5.92},
                        {"gemm_rows", kNvfp4, 1, 12288, 2048, 6.37},
                        {"gemm_rows", kNvfp4, 1, 248320, 2048, 77.1},
                        {"gemm_rows", kBf16, 1, 12288, 2048, 12.17},
                        {"gemm_rows", kBf16, 1, 2048, 4096, 5.57},
                        {"gemm_rows", kBf16, 1, 248320, 2048, 221.2},
                        {"gemm_rows", kBf16, 1, 256, 2048, 2.13},
                        {"gemm_rows", kFp8, 4, 12288, 2048, 8.4},
                        {"gemm_rows", kFp8, 8, 12288, 2048, 9.7},
                        {"gemm_rows", kNvfp4, 8, 248320, 2048, 89},
                        {"gemm_rows", kNvfp4, 16, 248320, 2048, 161},
                        {"gemm_rows", kBf16, 16, 12352, 2048, 17.0},
                        {"gemm_rows", kBf16, 9, 12352, 2048, 15.4},
                        {"gemm_rows", kBf16, 16, 248320, 2048, 259},
                        {"gemm_rows", kFp8, 16, 12352, 2048, 13.3},
                        {"gemm_rows", kFp8, 9, 2048, 4096, 6.7},
                        {"gemm_rows", kBf16, 12, 20608, 3072, 35.3},
                        {"gemm_rows", kNvfp4, 12, 9216, 2048, 9.9},
                        {"gemm_wide", kFp8, 64, 12288, 2048, 16.9},
                        {"gemm_wide", kFp8, 128, 12288, 2048, 22.7},
                        {"gemm_wide", kBf16, 2048, 20608, 3072, 374},
                        {"gemm_wide", kFp8, 512, 12352, 2048, 47.2},
                        {"gemm_wide", kFp8, 8192, 12352, 2048, 650},
                        {"gemm_wide", kFp8, 8192, 2048, 4096, 212},
                        {"gemm_wide", kBf16, 8192, 20608, 3072, 1610},
                        {"gemm_wide", kBf16, 8192, 10304, 4096, 1060},
                        {"gemm_wide", kNvfp4, 8192, 12352, 2048, 604},
                        {"gemm_wide", kNvfp4, 64, 34816, 5120, 57.1},
                        {"gemm_wide", kNvfp4, 128, 34816, 5120, 77.7},
                        {"gemm_wide", kFp8, 256, 12352, 2048, 26.2},
                        {"gemm_wide", kNvfp4, 512, 34816, 5120, 267},
                        {"gemm_wide", kBf16, 96, 248320, 3072, 411},
                        {"gemm_wide<WideTileOf<1, 64, 5>>", kBf16, 192, 20608, 3072, 55},
                        {"gemm_cluster", kFp8, 64, 2048, 4096, 9.3},
                        {"gemm_cluster", kBf16, 64, 257, 2048, 4.7},
                        {"gemm_cluster", kBf16, 64, 3072, 8192, 18.6},
                        {"gemm_cluster", kBf16, 64, 3072, 1024, 7.7}}) {
    expect_measured(product(c.kernel, c.bytes, c.rows, c.n, c.k), c.us,
                    fmt::format("{} of {} bytes, {} x {} x {}", c.kernel, c.bytes, c.rows, c.n, c.k));
  }
  struct Shares {
    double bytes;
    int64_t rows, n, k, ctas;
    double us;
  };
  for (const Shares& c : {Shares{kFp8, 64, 12352, 2048, 194, 16.3},
                          {kBf16, 192, 2048, 3072, 192, 13.6},
                          {kBf16, 256, 3072, 1024, 192, 12.1},
                          {kNvfp4, 64, 5120, 6144, 240, 16.9}}) {
    Work work = work_of({.kind = Kind::kProduct, .rows = c.rows, .outputs = c.n, .inputs = c.k},
                        c.bytes * number(c.n * c.k), 0, {"gemm_middle"});
    work.launches[0].ctas = c.ctas;
    expect_measured(price(work, h200()), c.us, fmt::format("gemm_middle, {} x {}", c.n, c.k));
  }
  expect_measured(product("gemm_rows", kFp8, 1, 12288, 2048, true), 8.35, "with the norm");
  expect_measured(product("gemm_rows", kBf16, 1, 2305, 3072, true), 5.94,
                  "a router and gate and up of a shared expert");
  // Beside the router's choice, which may take longer.
  Extent choosing = {.kind = Kind::kProduct, .rows = 1, .outputs = 3072, .inputs = 1024, .choice_beside = true};
  expect_measured(price(work_of(choosing, 2.0 * 3072 * 1024, 0, {"gemm_rows"}), h200()), 3.45, "with the choice");
  choosing.outputs = choosing.inputs = 16;
  const Extent choice = {.kind = Kind::kChoice, .rows = 1, .outputs = 257};
  EXPECT_GE(price(work_of(choosing, 512, 0, {"gemm_rows"}), h200()).us,
            price(work_of(choice, 1028, 0, {"gemm_route"}), h200()).us);
  // Two launches of eight rows read the weights twice.
  Work twice = work_of({.kind = Kind::kProduct, .rows = 16, .outputs = 12288, .inputs = 2048}, 12288.0 * 2048, 0,
                       {"gemm_rows", "gemm_rows"});
  EXPECT_NEAR(price(twice, h200()).us, 2 * product("gemm_rows", kFp8, 8, 12288, 2048).us, 1e-9);
  const Extent norm = {.kind = Kind::kNorm, .rows = 1, .outputs = 2048};
  expect_measured(price(work_of(norm, 12.0 * 2048, 0, {"norm_rows"}), h200()), 1.38, "norm");
}

TEST(StepCost, AttentionIsThatMeasured) {
  struct Case {
    int64_t sequences, rows, context;
    bool fp8;
    double us;
  };
  const auto attention = [](const Case& c, bool whole, bool narrow = false) {
    const double pairs = number(c.rows) * (number(c.context) + (whole ? number(c.rows + 1) / 2 : 1));
    const double bytes = 2 * 2 * 256 * (c.fp8 ? 1.0 : 2.0) * number(c.context) * number(c.sequences);
    const Extent extent = {.kind = Kind::kAttention,
                           .rows = c.rows,
                           .sequences = c.sequences,
                           .context = c.context + (whole ? c.rows : 1),
                           .heads = 16,
                           .kv_heads = 2,
                           .head_dim = 256,
                           .whole = whole,
                           .fp8_cache = c.fp8};
    const double flops = 4.0 * 16 * 256 * pairs;
    if (narrow) return price(work_of(extent, bytes, flops, {"attention_narrow"}), h200());
    return price(work_of(extent, bytes, flops, {"attention", "attention_combine"}), h200());
  };
  for (const Case& c : {Case{1, 1, 1024, false, 5.0},
                        {1, 1, 2048, false, 5.2},
                        {1, 1, 8192, false, 9.2},
                        {1, 1, 32768, false, 20.6},
                        {1, 1, 131072, false, 66.9},
                        {1, 1, 2048, true, 5.4},
                        {1, 1, 8192, true, 6.6},
                        {1, 1, 32768, true, 13.0},
                        {1, 1, 131072, true, 37.3}}) {
    expect_measured(attention(c, false, true), c.us, fmt::format("narrow, {}{}", c.context, c.fp8 ? " fp8" : ""));
  }
  for (const Case& c : {Case{1, 1, 1024, false, 7.8},
                        {1, 1, 8192, false, 11.7},
                        {1, 1, 32768, false, 23.9},
                        {1, 1, 131072, false, 68.9},
                        {1, 4, 32768, false, 30.0},
                        {1, 1, 8192, true, 11.3},
                        {1, 1, 32768, true, 22.1},
                        {1, 1, 131072, true, 51.8},
                        {16, 16, 2048, false, 24.7},
                        {64, 64, 2048, false, 80.1},
                        {256, 256, 2048, false, 324},
                        {12, 12, 8192, false, 63.4},
                        {256, 256, 128, false, 41.4}}) {
    expect_measured(attention(c, false), c.us, fmt::format("{} x {}{}", c.sequences, c.context, c.fp8 ? " fp8" : ""));
  }
  expect_measured(attention({1, 8192, 0, false, 0}, true), 955 + 59, "prefill of 8192");
  expect_measured(attention({1, 2048, 30720, false, 0}, true), 1587 + 16, "prefill of 2048 after 30720");
}

TEST(StepCost, DeltaRuleIsThatMeasured) {
  struct Case {
    int64_t heads, sequences, rows;
    double us;
  };
  for (const Case& c : {Case{32, 1, 1, 2.9},
                        {64, 1, 1, 3.8},
                        {32, 8, 1, 10.9},
                        {32, 64, 1, 76},
                        {64, 64, 1, 145},
                        {32, 256, 1, 285},
                        {32, 1, 4, 6.1},
                        {32, 1, 8, 10.2}}) {
    const Extent extent = {
        .kind = Kind::kDelta, .rows = c.sequences * c.rows, .sequences = c.sequences, .heads = c.heads};
    const double bytes = 8.0 * number(c.sequences * c.heads) * 128 * 128;
    expect_measured(price(work_of(extent, bytes, 0, {"delta_recurrent"}), h200()), c.us,
                    fmt::format("{} heads, {} x {}", c.heads, c.sequences, c.rows));
  }
}

// Over NVLink by words, and in two shots where they are chosen; over PCIe as published.
TEST(StepCost, SumsOverRanksAreThoseMeasured) {
  const auto sum = [](int64_t ranks, Link link, int64_t rows) {
    const Work work = work_of({.kind = Kind::kReduce, .rows = rows, .outputs = 4096}, 0, 0, {"reduce_norm_words"});
    return price(work, {find_gpu("h200"), ranks, link}).us;
  };
  using Measured = std::vector<std::pair<int64_t, double>>;  // rows and us
  for (const auto& [ranks, measured] :
       {std::pair<int64_t, Measured>{
            2, {{1, 2.9}, {8, 3.05}, {64, 5.1}, {128, 6.76}, {256, 10.5}, {512, 15.2}, {2048, 54}, {8192, 216}}},
        {4, {{1, 3.9}, {8, 4.2}, {64, 9.5}, {128, 11.4}, {256, 15}, {512, 23.1}, {2048, 79.4}, {8192, 318}}}}) {
    for (const auto& [rows, us] : measured) {
      EXPECT_NEAR(sum(ranks, Link::kNvlink, rows), us, 0.15 * us) << ranks << " ranks, " << rows;
    }
  }
  for (const auto& [ranks, us] : {std::pair<int64_t, double>{4, 15}, {8, 28}}) {
    EXPECT_NEAR(sum(ranks, Link::kPeer, 1), us, 0.15 * us) << ranks;
  }
  EXPECT_GT(sum(2, Link::kHost, 1), sum(2, Link::kPeer, 1));
  EXPECT_THROW(find_link("carrier pigeon"), Error);
  EXPECT_THROW(find_mix("D"), Error);
}

// Times that bytes decide follow the bandwidth, starts the card's nodes.
TEST(StepCost, OtherCardsAreScaled) {
  const Extent large = {.kind = Kind::kProduct, .rows = 1, .outputs = 248320, .inputs = 2048};
  const Work head = work_of(large, 2.0 * 248320 * 2048, 0, {"gemm_rows"});
  const Gpu &here = find_gpu("h200"), &there = find_gpu("rtx-pro-6000");
  const double ratio = price(head, {there}).us / price(head, {here}).us;
  EXPECT_NEAR(ratio, reachable_reads(here) / reachable_reads(there), 0.03);
  // A launch that may not start early costs a node more.
  Work late = head;
  late.launches.push_back(late.launches.front());
  Work early = late;
  late.launches.back().programmatic = false;
  const std::vector<Work> first = {early}, second = {late};
  EXPECT_NEAR(add_up(second, {}, here).card_us - add_up(first, {}, here).card_us, here.graph_node_us, 1e-9);
}

}  // namespace
}  // namespace fourfold::plan::step
