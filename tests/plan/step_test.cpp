// The cost models of whole steps against kernels and layers measured on one H200 (docs/kernels: products.md,
// attention.md, delta.md; graphs of dependent nodes, cold weights).
#include "plan/step/step.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "base/check.h"

namespace fourfold::plan::step {
namespace {

Model model_35b() {
  return {.name = "35B-A3B",
          .hidden = 2048,
          .vocabulary = 248320,
          .attention_layers = 10,
          .delta_layers = 30,
          .heads = 16,
          .kv_heads = 2,
          .head_dim = 256,
          .key_heads = 16,
          .value_heads = 32,
          .key_dim = 128,
          .value_dim = 128,
          .conv_taps = 4,
          .experts = 256,
          .top_k = 8,
          .expert_width = 512,
          .shared_width = 512};
}
const Gpu& h200() { return find_gpu("h200"); }

// Within 15 % and 0.6 us.
void expect_measured(const Op& op, double us, const std::string& what) {
  EXPECT_NEAR(op.us, us, 0.15 * us + 0.6) << what;
  EXPECT_LE(op.floor_us, 1.03 * us) << what;  // plain reads differ by that between runs
}

TEST(StepCost, ProductsAreThoseMeasured) {
  struct Case {
    Format format;
    int64_t rows, n, k;
    double us;
  };
  for (const Case& c : {Case{Format::kFp8, 1, 12288, 2048, 6.96},
                        {Format::kFp8, 1, 2048, 4096, 3.88},
                        {Format::kFp8, 1, 9216, 2048, 5.92},
                        {Format::kNvfp4, 1, 12288, 2048, 6.37},
                        {Format::kNvfp4, 1, 248320, 2048, 77.1},
                        {Format::kBf16, 1, 12288, 2048, 12.17},
                        {Format::kBf16, 1, 2048, 4096, 5.57},
                        {Format::kBf16, 1, 248320, 2048, 221.2},
                        {Format::kBf16, 1, 256, 2048, 2.13},
                        {Format::kFp8, 4, 12288, 2048, 8.4},
                        {Format::kFp8, 16, 12288, 2048, 13.5},
                        {Format::kNvfp4, 8, 248320, 2048, 89},
                        {Format::kNvfp4, 16, 248320, 2048, 161},
                        {Format::kBf16, 16, 12288, 2048, 22.0},
                        {Format::kFp8, 64, 12288, 2048, 16.9},
                        {Format::kFp8, 512, 12288, 2048, 66.2},
                        {Format::kBf16, 2048, 12288, 2048, 182},
                        {Format::kFp8, 8192, 12288, 2048, 790},
                        {Format::kFp8, 8192, 2048, 4096, 230}}) {
    expect_measured(product_cost(h200(), "product", c.format, c.rows, c.n, c.k), c.us,
                    fmt::format("{} {} x {} x {}", to_string(c.format), c.rows, c.n, c.k));
  }
  expect_measured(product_cost(h200(), "product", Format::kFp8, 1, 12288, 2048, true), 8.35, "with the norm");
  expect_measured(norm_cost(h200(), 1, 2048), 1.38, "norm");
  expect_measured(router_cost(h200(), model_35b(), 1), 6.72, "router");
}

TEST(StepCost, AttentionIsThatMeasured) {
  struct Case {
    int64_t sequences, context;
    bool fp8;
    double us;
  };
  for (const Case& c : {Case{1, 1024, false, 7.8},
                        {1, 8192, false, 11.7},
                        {1, 32768, false, 23.9},
                        {1, 131072, false, 68.9},
                        {1, 8192, true, 11.3},
                        {1, 32768, true, 22.1},
                        {1, 131072, true, 51.8},
                        {64, 2048, false, 92.1}}) {
    const Shape shape = {.tokens = c.sequences, .context = c.context, .fp8_cache = c.fp8};
    expect_measured(attention_cost(h200(), model_35b(), shape, c.sequences), c.us,
                    fmt::format("{} x {}{}", c.sequences, c.context, c.fp8 ? " fp8" : ""));
  }
  const Shape prompt = {.tokens = 8192, .context = 0, .prefill = true},
              late = {.tokens = 2048, .context = 30720, .prefill = true};
  expect_measured(attention_cost(h200(), model_35b(), prompt, 8192), 955 + 59, "prefill of 8192");
  expect_measured(attention_cost(h200(), model_35b(), late, 2048), 1587 + 16, "prefill of 2048 after 30720");
}

TEST(StepCost, DeltaRuleIsThatMeasured) {
  struct Case {
    int64_t heads, sequences, rows;
    double us;
  };
  for (const Case& c : {Case{32, 1, 1, 4.4},
                        {64, 1, 1, 4.6},
                        {32, 8, 1, 12.3},
                        {32, 64, 1, 77.5},
                        {64, 64, 1, 147},
                        {32, 256, 1, 285},
                        {32, 1, 4, 10.5},
                        {32, 1, 8, 18.7},
                        {32, 16, 4, 52.2}}) {
    Model model = model_35b();
    model.value_heads = c.heads;
    expect_measured(delta_cost(h200(), model, {.tokens = c.sequences}, c.sequences * c.rows), c.us,
                    fmt::format("{} heads, {} x {}", c.heads, c.sequences, c.rows));
  }
  const Shape prompt = {.tokens = 8192, .context = 0, .prefill = true};
  expect_measured(delta_cost(h200(), model_35b(), prompt, 8192), 777, "8192 tokens");
}

TEST(StepPlan, AddsUpAndKnowsItsFloors) {
  for (const auto& [mix, floor] : {std::pair{"A", 523.0}, {"B", 876.0}, {"C", 1002.0}}) {
    const StepPlan plan = plan_step(model_35b(), find_mix(mix), {.tokens = 1, .context = 128}, h200());
    double us = 0;
    int64_t nodes = 0;
    for (const Op& op : plan.ops) {
      EXPECT_LE(op.floor_us, op.us) << op.name;
      EXPECT_GT(op.count, 0) << op.name;
      us += op.us * static_cast<double>(op.count);
      nodes += op.count * op.nodes;
    }
    EXPECT_DOUBLE_EQ(us, plan.predicted_us);
    EXPECT_EQ(nodes, plan.nodes);
    // The bytes of a decoded token over the bandwidth, added up elsewhere (state and routed experts included).
    EXPECT_NEAR(plan.floor_us, floor, 0.06 * floor) << mix;
    const auto json = nlohmann::json::parse(to_json(plan));
    EXPECT_EQ(json.at("ops").size(), plan.ops.size());
    EXPECT_GT(json.at("predicted_us").get<double>(), floor);
    EXPECT_NE(to_text(plan).find("predicted"), std::string::npos);
  }
}

TEST(StepPlan, MoreWorkTakesLonger) {
  const auto us = [](const Shape& shape, const char* gpu = "h200") {
    return plan_step(model_35b(), find_mix("A"), shape, find_gpu(gpu)).predicted_us;
  };
  double before = 0;
  for (const int64_t tokens : {1, 2, 4, 8, 16, 32, 64, 128, 256}) {
    const double now = us({.tokens = tokens, .context = 2048});
    EXPECT_GT(now, before) << tokens;
    before = now;
  }
  EXPECT_GT(us({.tokens = 1, .context = 131072}), us({.tokens = 1, .context = 8192}));
  EXPECT_GT(us({.tokens = 1, .context = 131072}), us({.tokens = 1, .context = 131072, .fp8_cache = true}));
  EXPECT_GT(us({.tokens = 1, .drafts = 3}), us({.tokens = 1}));
  EXPECT_LT(us({.tokens = 1, .drafts = 3}), 4 * us({.tokens = 1}));
  EXPECT_GT(us({.tokens = 1}, "dgx-spark"), us({.tokens = 1}, "rtx-pro-6000"));
  EXPECT_GT(us({.tokens = 8192, .context = 0, .prefill = true}), 50e3);
}

TEST(StepPlan, RanksShareTheBytesAndPayForSums) {
  const Shape one = {.tokens = 1}, two = {.tokens = 1, .ranks = 2},
              pcie = {.tokens = 1, .ranks = 2, .link = Link::kPeer};
  const auto plan = [](const Shape& shape) { return plan_step(model_35b(), find_mix("C"), shape, h200()); };
  EXPECT_LT(plan(two).floor_us, 0.6 * plan(one).floor_us);
  EXPECT_LT(plan(two).predicted_us, plan(one).predicted_us);
  EXPECT_GT(plan(pcie).predicted_us, plan(two).predicted_us);
  EXPECT_NEAR(all_reduce_cost(h200(), 2, Link::kNvlink, 1, 4096).us, 2.6, 0.5);
  EXPECT_NEAR(all_reduce_cost(h200(), 2, Link::kNvlink, 128, 4096).us, 9, 4);
  EXPECT_NEAR(all_reduce_cost(h200(), 8, Link::kPeer, 1, 4096).us, 28, 4);
  EXPECT_THROW(plan({.tokens = 1, .ranks = 3}), Error);
  EXPECT_THROW(plan({.tokens = 0}), Error);
  EXPECT_THROW(find_mix("D"), Error);
}

// Whole experts wait for the rank with most picks: a matter of few tokens, and hardly one of many.
TEST(StepPlan, ExpertsAreCutOrSharedOut) {
  const auto plan = [](const Shape& shape) { return plan_step(model_35b(), find_mix("C"), shape, h200()); };
  const auto experts_us = [](const StepPlan& p) {
    for (const Op& op : p.ops) {
      if (op.name == "experts") return op.us;
    }
    return 0.0;
  };
  const StepPlan cut = plan({.tokens = 1, .ranks = 2}), whole = plan({.tokens = 1, .ranks = 2, .by_expert = true});
  EXPECT_EQ(experts_us(cut), cut.experts.columns_us);
  EXPECT_EQ(experts_us(whole), cut.experts.whole_us);
  EXPECT_GT(cut.experts.whole_us, cut.experts.columns_us);
  EXPECT_GT(cut.experts.busiest, 1.2);
  const StepPlan many = plan({.tokens = 8192, .prefill = true, .ranks = 2});
  EXPECT_LT(many.experts.busiest, 1.02);
  EXPECT_EQ(plan({.tokens = 1}).experts.columns_us, 0);
  EXPECT_NE(to_text(cut).find("whole experts"), std::string::npos);
}

}  // namespace
}  // namespace fourfold::plan::step
