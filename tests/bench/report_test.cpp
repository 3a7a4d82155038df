// A speed-up is said of the same load alone, and only where every request was answered.
#include "bench/report.h"

#include <gtest/gtest.h>

#include "base/check.h"

namespace fourfold::bench {
namespace {

Json cell(const std::string& drafts, double rate, const std::function<void(CellSettings&, Figures&)>& change = {}) {
  CellSettings settings;
  settings.prompts = "real";
  settings.prompts_checksum = 5;
  settings.drafts = drafts;
  Figures figures;
  figures.repetitions = 3;
  figures.completed = 12;
  figures.output_rates = {rate * 0.99, rate, rate * 1.01};
  figures.first = distribution({0.1, 0.2});
  if (change) change(settings, figures);
  return cell_json(settings, figures, {}, std::nullopt, std::nullopt, std::nullopt);
}

Json report(std::vector<Json> cells) { return {{"model", "m"}, {"cells", cells}}; }

TEST(Report, SpeedUpsAreOfTheSameLoad) {
  Json good = report({cell("0", 100), cell("2", 150)});
  add_speed_ups(good);
  EXPECT_DOUBLE_EQ(good["cells"][1]["speed_up"], 1.5);
  EXPECT_FALSE(good["cells"][1]["speed_up_within_spread"]);
  EXPECT_FALSE(good["cells"][0].contains("speed_up"));
  Json near = report({cell("0", 100), cell("2", 101)});
  add_speed_ups(near);
  EXPECT_TRUE(near["cells"][1]["speed_up_within_spread"]);

  const std::function<void(CellSettings&, Figures&)> kOthers[] = {
      [](CellSettings& s, Figures&) { s.prompts = "trivial"; },
      [](CellSettings& s, Figures&) { s.prompts_checksum = 6; },
      [](CellSettings& s, Figures&) { s.thinking = "off"; },
      [](CellSettings& s, Figures&) { s.concurrency = 2; },
      [](CellSettings& s, Figures&) { s.max_tokens = 5; },
      [](CellSettings& s, Figures&) { s.context = 5; },
      [](CellSettings& s, Figures&) { s.temperature = 1; },
      [](CellSettings& s, Figures&) { s.ignore_eos = true; },
      [](CellSettings& s, Figures&) { s.endpoint = "completions"; },
      [](CellSettings& s, Figures&) { s.rate = 3; }};
  for (const auto& change : kOthers) {
    EXPECT_FALSE(speed_up(cell("0", 100), cell("2", 150, change)).ratio);
    Json other = report({cell("0", 100), cell("2", 150, change)});
    add_speed_ups(other);
    EXPECT_FALSE(other["cells"][1].contains("speed_up"));
  }
  const auto fails = [](CellSettings&, Figures& f) { f.failed = 1, f.errors["cut"] = 1; };
  for (Json one : {report({cell("0", 100, fails), cell("2", 150)}), report({cell("0", 100), cell("2", 150, fails)})}) {
    add_speed_ups(one);
    EXPECT_FALSE(one["cells"][1].contains("speed_up"));
    EXPECT_NE(one["cells"][1]["speed_up_refused"].get<std::string>().find("failed"), std::string::npos);
    EXPECT_NE(text_table(one).find("refused"), std::string::npos);
  }
}

TEST(Report, HasVllmsNames) {
  const Json one = cell("0", 100);
  for (const char* name : {"num_prompts",
                           "request_rate",
                           "max_concurrency",
                           "duration",
                           "completed",
                           "failed",
                           "total_input_tokens",
                           "total_output_tokens",
                           "request_throughput",
                           "request_goodput",
                           "output_throughput",
                           "total_token_throughput",
                           "max_concurrent_requests",
                           "mean_ttft_ms",
                           "median_ttft_ms",
                           "std_ttft_ms",
                           "p99_ttft_ms",
                           "mean_tpot_ms",
                           "median_tpot_ms",
                           "p99_tpot_ms",
                           "median_itl_ms",
                           "p99_itl_ms",
                           "median_e2el_ms",
                           "p99_e2el_ms"}) {
    EXPECT_TRUE(one.contains(name)) << name;
  }
  EXPECT_DOUBLE_EQ(one["p99_ttft_ms"], 200);
  EXPECT_TRUE(one["p99_tpot_ms"].is_null());
}

TEST(Report, ReportsAreCompared) {
  const Json a = report({cell("0", 100), cell("2", 150)}), b = report({cell("0", 120), cell("2", 120)});
  const Json rows = compare_reports(a, b)["rows"];
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_DOUBLE_EQ(rows[0]["speed_up"], 1.2);
  EXPECT_DOUBLE_EQ(rows[1]["speed_up"], 0.8);
  EXPECT_NE(comparison_table(compare_reports(a, b)).find("1.20"), std::string::npos);
  EXPECT_THROW(compare_reports(a, report({cell("0", 1, [](CellSettings& s, Figures&) { s.prompts = "trivial"; })})),
               Error);
  EXPECT_THROW(compare_reports(a, report({cell("0", 1, [](CellSettings&, Figures& f) { f.failed = 1; })})), Error);
}

TEST(Report, PagesStandAlone) {
  Json one = report({cell("0", 100), cell("0", 180, [](CellSettings& s, Figures&) { s.concurrency = 4; })});
  one["model"] = "<script>alert(1)</script>";
  const std::string page = html_report(one);
  EXPECT_EQ(page.find("<script"), std::string::npos);
  EXPECT_EQ(page.find("http://"), std::string::npos);
  EXPECT_EQ(page.find("https://"), std::string::npos);
  EXPECT_NE(page.find("<svg viewBox"), std::string::npos);
  EXPECT_NE(page.find("&lt;script&gt;"), std::string::npos);
}

}  // namespace
}  // namespace fourfold::bench
