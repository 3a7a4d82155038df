// Two reports side by side.
#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <utility>

#include "base/check.h"
#include "bench/report.h"

namespace fourfold::bench {
namespace {

std::string load_of(const Json& cell) {
  return fmt::format(
      "{}, thinking {}, drafts {}, load {}, {} tokens, context {}", cell["prompts"].dump(), cell["thinking"].dump(),
      cell.contains("drafts") ? cell["drafts"].dump() : "null",
      cell["request_rate"].is_number() ? cell["request_rate"].dump() + "/s" : cell["max_concurrency"].dump(),
      cell["max_tokens"].dump(), cell["context"].dump());
}

Json ratio(const Json& a, const Json& b, const char* name) {
  if (!a.contains(name) || !b.contains(name) || !a[name].is_number() || !b[name].is_number()) return nullptr;
  const auto base = a[name].get<double>();
  return base > 0 ? Json(b[name].get<double>() / base) : Json(nullptr);
}

std::string number(const Json& value) {
  return value.is_number() ? fmt::format("{:10.2f}", value.get<double>()) : fmt::format("{:>10}", "-");
}

}  // namespace

Json compare_reports(const Json& a, const Json& b) {
  Json rows = Json::array();
  std::string refused;
  const auto drafts = [](const Json& cell) { return cell.contains("drafts") ? cell["drafts"] : Json(nullptr); };
  for (const Json& base : a["cells"]) {
    for (const Json& cell : b["cells"]) {
      if (drafts(base) != drafts(cell)) continue;
      const SpeedUp found = speed_up(base, cell);
      if (!found.ratio) {
        // Why the pair that comes nearest cannot be compared: a failed request rather than another load.
        if (refused.empty() || found.refused.find("failed") != std::string::npos) refused = found.refused;
        if (found.refused.find("differs") == std::string::npos)
          fail("{}: not compared, {}", load_of(cell), found.refused);
        continue;
      }
      rows.push_back({{"load", load_of(cell)},
                      {"output_throughput", {base["output_throughput"], cell["output_throughput"]}},
                      {"speed_up", *found.ratio},
                      {"within_spread", found.within_spread},
                      {"p50_ttft_ratio", ratio(base, cell, "p50_ttft_ms")},
                      {"p50_tpot_ratio", ratio(base, cell, "p50_tpot_ms")},
                      {"p99_e2el_ratio", ratio(base, cell, "p99_e2el_ms")}});
    }
  }
  if (rows.empty()) {
    fail("the reports have no load in common, so nothing is compared{}{}", refused.empty() ? "" : ": ", refused);
  }
  return {{"rows", std::move(rows)}};
}

std::string comparison_table(const Json& comparison) {
  std::string out = fmt::format("{:>10} {:>10} {:>10} {:>10} {:>10} {:>10}  load\n", "A tok/s", "B tok/s", "B/A",
                                "TTFT B/A", "TPOT B/A", "E2E99 B/A");
  for (const Json& row : comparison["rows"]) {
    out += fmt::format("{} {} {} {} {} {}  {}{}\n", number(row["output_throughput"][0]),
                       number(row["output_throughput"][1]), number(row["speed_up"]), number(row["p50_ttft_ratio"]),
                       number(row["p50_tpot_ratio"]), number(row["p99_e2el_ratio"]),
                       printable(row["load"].get<std::string>(), 160),
                       row["within_spread"].get<bool>() ? " (repetitions overlap: no difference)" : "");
  }
  return out;
}

}  // namespace fourfold::bench
