// Predicted steps against steps that were measured on H200s.
#include "predict/step.h"

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/check.h"
#include "model/random_weights.h"
#include "model/shape_source.h"

namespace fourfold::predict {
namespace {

using plan::step::Op;
using plan::step::Shape;
using plan::step::StepPlan;
using plan::step::Work;

Request request_of(const std::string& model, std::string_view mix_name, const Shape& shape, const char* gpu = "h200") {
  const plan::step::Mix& mix = plan::step::find_mix(mix_name);
  model::ModelConfig config = model::shape_config(model);
  config.mtp_layers = shape.drafts > 0 ? 1 : 0;
  const model::FormatOf formats = formats_of(mix);
  return {.shapes = [=] { return model::shapes_of(config, formats); }, .shape = shape, .gpu = plan::find_gpu(gpu)};
}

// Rows of a file by the names of its columns; lines that begin with # are for people.
std::vector<std::map<std::string, std::string>> table(const char* file) {
  const std::string path = std::string(FOURFOLD_SOURCE_DIR) + "/tests/predict/" + file;
  std::ifstream in(path);
  EXPECT_TRUE(in.good()) << path;
  std::vector<std::string> names;
  std::vector<std::map<std::string, std::string>> rows;
  for (std::string line; std::getline(in, line);) {
    if (line.empty() || line[0] == '#') continue;
    std::vector<std::string> cells;
    std::istringstream each(line + ",");
    for (std::string cell; std::getline(each, cell, ',');) cells.push_back(cell);
    if (names.empty()) {
      names = cells;
      continue;
    }
    EXPECT_EQ(cells.size(), names.size()) << line;
    for (size_t i = 0; i < names.size() && i < cells.size(); ++i) {
      if (i == 0) rows.emplace_back();
      rows.back()[names[i]] = cells[i];
    }
  }
  return rows;
}

Shape shape_of(const std::map<std::string, std::string>& row) {
  const auto value = [&](const char* name) { return row.contains(name) ? std::stoll(row.at(name)) : 0; };
  return {.tokens = value("tokens"),
          .context = value("context"),
          .prefill = value("prefill") != 0,
          .drafts = value("drafts"),
          .ranks = std::max<int64_t>(value("ranks"), 1)};
}

// A step back to back on the card: without the choice of tokens and the tables that the host sends.
double card_us(const StepPlan& plan) {
  double us = plan.card_us;
  for (const Op& op : plan.ops) {
    if (op.name == "choice of tokens" || op.name == "tables") us -= op.us * static_cast<double>(op.count);
  }
  return us;
}

TEST(PredictedSteps, AreWithinATenthOfThoseMeasured) {
  double squares = 0;
  int held = 0;
  for (const auto& row : table("measured_steps.csv")) {
    const StepPlan plan = predict(request_of(row.at("model"), row.at("mix"), shape_of(row)));
    const double wanted = std::stod(row.at("measured_us")) + std::stod(row.at("since_us"));
    const double found = row.at("clock") == "card" ? card_us(plan) : plan.predicted_us;
    std::printf("  %-34s %-5s %9.0f us measured %9.0f predicted %+6.1f %%\n", row.at("name").c_str(),
                row.at("use").c_str(), wanted, found, 100 * (found / wanted - 1));
    if (row.at("use") == "no") continue;
    EXPECT_NEAR(found, wanted, 0.1 * wanted) << row.at("name");
    EXPECT_LT(plan.floor_us, wanted) << row.at("name");
    if (row.at("use") != "held") continue;
    squares += std::pow(found / wanted - 1, 2);
    ++held;
  }
  ASSERT_GE(held, 12);
  EXPECT_LT(std::sqrt(squares / held), 0.05) << "of those that nothing was fitted to";
}

TEST(PredictedSteps, OperationsAreThoseMeasured) {
  std::map<std::string, StepPlan> plans;
  for (const auto& row : table("measured_operations.csv")) {
    StepPlan& plan = plans[row.at("tokens")];
    if (plan.ops.empty()) plan = predict(request_of("35B-A3B", "A", shape_of(row)));
    // The one that most of the layers have.
    const Op* found = nullptr;
    for (const Op& op : plan.ops) {
      if (op.name == row.at("name") && (found == nullptr || op.count > found->count)) found = &op;
    }
    ASSERT_NE(found, nullptr) << row.at("name");
    const double us = std::stod(row.at("us"));
    EXPECT_NEAR(found->us, us, 0.12 * us + 0.5) << row.at("name") << ", rows " << row.at("tokens");
  }
}

// The bytes of a decoded token over the bandwidth, added up elsewhere (state and routed experts included).
TEST(PredictedSteps, AddUpAndKnowTheirFloors) {
  for (const auto& [mix, floor] : {std::pair{"A", 523.0}, {"B", 876.0}, {"C", 1002.0}}) {
    const StepPlan plan = predict(request_of("35B-A3B", mix, {.tokens = 1, .context = 128}));
    double us = 0;
    int64_t nodes = 0;
    for (const Op& op : plan.ops) {
      EXPECT_LE(op.floor_us, op.us) << op.name;
      EXPECT_GT(op.count, 0) << op.name;
      us += op.us * static_cast<double>(op.count);
      nodes += op.count * op.nodes;
    }
    EXPECT_NEAR(us, plan.card_us, 1e-6 * us);
    EXPECT_DOUBLE_EQ(plan.predicted_us, plan.card_us + plan.host_us);
    EXPECT_EQ(nodes, plan.nodes);
    EXPECT_NEAR(plan.floor_us, floor, 0.02 * floor) << mix;
    const auto json = nlohmann::json::parse(to_json(plan));
    EXPECT_EQ(json.at("ops").size(), plan.ops.size());
    EXPECT_GT(json.at("predicted_us").get<double>(), floor);
    EXPECT_NE(to_text(plan).find("predicted"), std::string::npos);
  }
}

// The operations are the backend's: 30 delta rules and 10 attentions of 40 layers, ten launches a layer at most.
TEST(PredictedSteps, HaveTheOperationsOfTheBackend) {
  const Launched launched = launched_by(request_of("35B-A3B", "A", {.tokens = 1, .context = 2048}));
  std::map<std::string, int64_t> counts, launches;
  for (const Work& work : launched.works) {
    ++counts[work.name];
    for (const plan::step::Launch& launch : work.launches) {
      launches[work.name] += 1;
      EXPECT_GT(launch.ctas, 0) << launch.kernel;
      EXPECT_GT(launch.threads, 0) << launch.kernel;
      EXPECT_NE(launch.kernel, "");
    }
  }
  EXPECT_EQ(counts["delta rule"], 30);
  EXPECT_EQ(counts["attention"], 10);
  EXPECT_EQ(launches["attention"], 10);
  EXPECT_EQ(counts["router"], 0);  // part of the products in front
  EXPECT_EQ(counts["choice of experts"], 40);
  EXPECT_EQ(launches["experts"], 80);
  EXPECT_EQ(counts["choice of tokens"], 1);
  EXPECT_EQ(counts["norm"], 1);  // behind the last layer; the others are part of products
  EXPECT_NEAR(static_cast<double>(launched.weight_bytes), 20.8e9, 0.2e9);
  // With drafts the trunk verifies, the head is fed and drafts.
  std::map<std::string, int64_t> round;
  for (const Work& work : launched_by(request_of("35B-A3B", "A", {.tokens = 1, .context = 2048, .drafts = 3})).works) {
    ++round[work.name];
  }
  EXPECT_EQ(round["delta rule"], 30);
  EXPECT_EQ(round["attention"], 13);
  EXPECT_EQ(round["choice of tokens"], 4);
  EXPECT_EQ(round["product 248320 x 2048"], 4);
}

TEST(PredictedSteps, MoreWorkTakesLonger) {
  const auto us = [](const Shape& shape, const char* gpu = "h200") {
    return predict(request_of("35B-A3B", "A", shape, gpu)).predicted_us;
  };
  double before = 0;
  for (const int64_t tokens : {1, 2, 8, 64, 256}) {
    const double now = us({.tokens = tokens, .context = 2048});
    EXPECT_GT(now, before) << tokens;
    before = now;
  }
  EXPECT_GT(us({.tokens = 1, .context = 131072}), us({.tokens = 1, .context = 131072, .fp8_cache = true}));
  EXPECT_GT(us({.tokens = 1}, "dgx-spark"), us({.tokens = 1}, "rtx-pro-6000"));
  EXPECT_GT(us({.tokens = 1}, "rtx-pro-6000"), us({.tokens = 1}));
}

TEST(PredictedSteps, RanksShareTheBytesAndPayForSums) {
  const auto plan = [](const Shape& shape) { return predict(request_of("35B-A3B", "C", shape)); };
  const StepPlan one = plan({.tokens = 1}), two = plan({.tokens = 1, .ranks = 2}),
                 pcie = plan({.tokens = 1, .ranks = 2, .link = plan::step::Link::kPeer});
  EXPECT_LT(two.floor_us, 0.6 * one.floor_us);
  EXPECT_LT(two.predicted_us, one.predicted_us);
  EXPECT_GT(pcie.predicted_us, two.predicted_us);
  EXPECT_LT(two.weight_bytes, 0.6 * one.weight_bytes);
  EXPECT_EQ(one.experts.columns_us, 0);
  EXPECT_THROW(plan({.tokens = 1, .ranks = 3}), Error);
  EXPECT_THROW(plan({.tokens = 0}), Error);
  EXPECT_THROW(plan({.tokens = 1, .context = int64_t{1} << 27}), Error);
  // Whole experts wait for the rank with most picks: a matter of few tokens.
  const StepPlan whole = plan({.tokens = 1, .ranks = 2, .by_expert = true});
  const auto experts_us = [](const StepPlan& p) {
    for (const Op& op : p.ops) {
      if (op.name == "experts") return op.us;
    }
    return 0.0;
  };
  EXPECT_EQ(experts_us(two), two.experts.columns_us);
  EXPECT_EQ(experts_us(whole), two.experts.whole_us);
  EXPECT_GT(two.experts.whole_us, two.experts.columns_us);
  EXPECT_GT(two.experts.busiest, 1.2);
  EXPECT_LT(plan::step::busiest_share(65536, 2), 1.02);
  EXPECT_NE(to_text(two).find("whole experts"), std::string::npos);
}

}  // namespace
}  // namespace fourfold::predict
