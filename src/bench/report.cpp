#include "bench/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/file.h"

namespace fourfold::bench {
namespace {

void add_distribution(Json& out, const std::string& name, const Distribution& d) {
  const auto value = [&](double seconds) { return d.count == 0 ? Json(nullptr) : Json(1e3 * seconds); };
  out["mean_" + name + "_ms"] = value(d.mean);
  out["median_" + name + "_ms"] = value(d.p50);
  out["std_" + name + "_ms"] = value(d.deviation);
  out["p50_" + name + "_ms"] = value(d.p50);
  out["p90_" + name + "_ms"] = value(d.p90);
  out["p99_" + name + "_ms"] = value(d.p99);
}

Json speculation(const DraftCounters& before, const DraftCounters& after) {
  const double rounds = after.rounds - before.rounds, drafted = after.drafted - before.drafted;
  const double accepted = after.accepted - before.accepted;
  Json out = {{"rounds", rounds}, {"drafted", drafted}, {"accepted", accepted}};
  out["acceptance"] = drafted > 0 ? Json(accepted / drafted) : Json(nullptr);
  out["accepted_per_step"] = rounds > 0 ? Json(accepted / rounds) : Json(nullptr);
  Json positions = Json::array();
  for (size_t i = 0; i < after.by_position.size(); ++i) {
    const double count = after.by_position[i] - (i < before.by_position.size() ? before.by_position[i] : 0);
    positions.push_back(rounds > 0 ? Json(count / rounds) : Json(nullptr));
  }
  while (!positions.empty() && positions.back() == Json(0.0)) positions.erase(positions.size() - 1);
  out["accepted_by_position"] = std::move(positions);
  return out;
}

// A figure of a cell for a table; "-" where there is none.
std::string figure(const Json& cell, const char* name, const char* format = "{:.1f}") {
  const auto found = cell.find(name);
  return found == cell.end() || !found->is_number() ? "-" : fmt::format(fmt::runtime(format), found->get<double>());
}

std::string word(const Json& cell, const char* name) {
  const auto found = cell.find(name);
  return found == cell.end() || !found->is_string() ? "-" : printable(found->get<std::string>(), 40);
}

std::string load_name(const Json& cell) {
  return cell["request_rate"].is_number() ? fmt::format("{:g}/s", cell["request_rate"].get<double>())
                                          : figure(cell, "max_concurrency", "{:.0f}");
}

std::string table(const std::vector<std::vector<std::string>>& rows) {
  std::vector<size_t> widths(rows.front().size());
  for (const auto& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string out;
  for (const auto& row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      line += i == 0 ? fmt::format("{:<{}}", row[i], widths[i]) : fmt::format("  {:>{}}", row[i], widths[i]);
    }
    while (line.ends_with(' ')) line.pop_back();
    out += line + "\n";
  }
  return out;
}

constexpr const char* kSettings[] = {"endpoint",     "prompts",    "prompts_checksum", "thinking",    "max_concurrency",
                                     "request_rate", "max_tokens", "context",          "temperature", "ignore_eos"};

bool same_load(const Json& a, const Json& b) {
  return std::all_of(std::begin(kSettings), std::end(kSettings), [&](const char* name) { return a[name] == b[name]; });
}

}  // namespace

Json cell_json(const CellSettings& settings, const Figures& figures, const Goodput& goodput,
               const std::optional<DraftCounters>& before, const std::optional<DraftCounters>& after,
               const std::optional<ServerMemory>& memory) {
  Json out;
  out["endpoint"] = settings.endpoint;
  out["prompts"] = settings.prompts;
  out["prompts_checksum"] = fmt::format("{:016x}", settings.prompts_checksum);
  out["thinking"] = settings.thinking;
  out["drafts"] = settings.drafts.empty() ? Json(nullptr) : Json(settings.drafts);
  out["max_concurrency"] = settings.rate > 0 ? Json(nullptr) : Json(settings.concurrency);
  out["request_rate"] = settings.rate > 0 ? Json(settings.rate) : Json("inf");
  out["max_tokens"] = settings.max_tokens;
  out["context"] = settings.context;
  out["temperature"] = settings.temperature;
  out["ignore_eos"] = settings.ignore_eos;
  out["num_prompts"] = settings.requests;
  out["repetitions"] = figures.repetitions;
  out["duration"] = figures.seconds;
  out["completed"] = figures.completed;
  out["failed"] = figures.failed;
  Json errors = Json::object();
  for (const auto& [message, count] : figures.errors) errors[printable(message, 300)] = count;
  out["errors"] = std::move(errors);
  out["total_input_tokens"] = figures.prompt_tokens;
  out["total_output_tokens"] = figures.output_tokens;
  out["cached_input_tokens"] = figures.cached_tokens;
  out["reasoning_tokens"] = figures.reasoning_tokens;
  out["tokens_counted_by"] = figures.server_counts ? "server" : "pieces of the stream";
  out["request_throughput"] = figures.request_rate;
  out["request_goodput"] = goodput.any() ? Json(figures.good_rate) : Json(nullptr);
  out["output_throughput"] = median(figures.output_rates);
  const auto [low, high] = std::minmax_element(figures.output_rates.begin(), figures.output_rates.end());
  out["output_throughput_low"] = low == figures.output_rates.end() ? 0 : *low;
  out["output_throughput_high"] = high == figures.output_rates.end() ? 0 : *high;
  out["total_token_throughput"] = figures.total_rate;
  out["max_concurrent_requests"] = figures.peak;
  add_distribution(out, "ttft", figures.first);
  add_distribution(out, "ttfc", figures.first_content);
  add_distribution(out, "tpot", figures.per_token);
  add_distribution(out, "itl", figures.between);
  add_distribution(out, "e2el", figures.whole);
  out["speculation"] = before && after ? speculation(*before, *after) : Json(nullptr);
  out["server_rss_bytes"] = memory ? Json(memory->resident) : Json(nullptr);
  out["server_peak_rss_bytes"] = memory ? Json(memory->peak) : Json(nullptr);
  return out;
}

Json read_report(const std::string& path) {
  Json report = parse_json(read_file(path), path);
  const bool good = report.is_object() && report.contains("cells") && report["cells"].is_array();
  if (!good) fail("{}: no report of `fourfold bench serve --json` (no array `cells`)", printable(path, 200));
  for (const Json& cell : report["cells"]) {
    for (const char* name : kSettings) {
      if (!cell.is_object() || !cell.contains(name)) fail("{}: a cell without `{}`", printable(path, 200), name);
    }
    for (const char* name :
         {"failed", "completed", "output_throughput", "output_throughput_low", "output_throughput_high"}) {
      if (!cell.contains(name) || !cell[name].is_number())
        fail("{}: a cell without a number `{}`", printable(path, 200), name);
    }
  }
  return report;
}

SpeedUp speed_up(const Json& base, const Json& cell) {
  SpeedUp out;
  for (const char* name : kSettings) {
    if (base[name] != cell[name]) {
      out.refused = fmt::format("{} differs: {} and {}", name, base[name].dump(), cell[name].dump());
      return out;
    }
  }
  for (const Json* one : {&base, &cell}) {
    const auto failed = (*one)["failed"].get<int64_t>();
    if (failed > 0) {
      out.refused = fmt::format("{} of {} requests failed", failed, failed + (*one)["completed"].get<int64_t>());
      return out;
    }
  }
  const auto rate = [](const Json& one, const char* name) { return one[name].get<double>(); };
  if (rate(base, "output_throughput") <= 0) {
    out.refused = "nothing was delivered";
    return out;
  }
  out.ratio = rate(cell, "output_throughput") / rate(base, "output_throughput");
  out.within_spread = rate(cell, "output_throughput_low") <= rate(base, "output_throughput_high") &&
                      rate(base, "output_throughput_low") <= rate(cell, "output_throughput_high");
  return out;
}

void add_speed_ups(Json& report) {
  const auto plain = [](const Json& cell) { return cell["drafts"] == "0" || cell["drafts"] == "off"; };
  for (Json& cell : report["cells"]) {
    if (plain(cell)) continue;
    for (const Json& base : report["cells"]) {
      if (!plain(base) || !same_load(base, cell)) continue;
      const SpeedUp found = speed_up(base, cell);
      if (found.ratio) {
        cell["speed_up"] = *found.ratio;
        cell["speed_up_within_spread"] = found.within_spread;
      } else {
        cell["speed_up_refused"] = found.refused;
      }
    }
  }
}

std::string text_table(const Json& report) {
  std::vector<std::vector<std::string>> rows = {{"prompts", "think", "drafts", "load", "max", "ctx", "tokens/s",
                                                 "low..high", "TTFT p50", "p99", "content", "TPOT", "ITL p99",
                                                 "E2E p50", "p99", "good/s", "accepted", "speed-up", "failed"}};
  for (const Json& cell : report["cells"]) {
    const auto spread = fmt::format("{}..{}", figure(cell, "output_throughput_low", "{:.0f}"),
                                    figure(cell, "output_throughput_high", "{:.0f}"));
    const Json& drafts = cell["speculation"];
    const std::string accepted = drafts.is_object() ? figure(drafts, "accepted_per_step", "{:.2f}") : "-";
    std::string gain = figure(cell, "speed_up", "{:.2f}");
    if (cell.value("speed_up_within_spread", false)) gain += "~";
    if (cell.contains("speed_up_refused")) gain = "refused";
    rows.push_back({word(cell, "prompts"), word(cell, "thinking"), word(cell, "drafts"), load_name(cell),
                    figure(cell, "max_tokens", "{:.0f}"), figure(cell, "context", "{:.0f}"),
                    figure(cell, "output_throughput"), spread, figure(cell, "p50_ttft_ms"), figure(cell, "p99_ttft_ms"),
                    figure(cell, "p50_ttfc_ms"), figure(cell, "p50_tpot_ms", "{:.2f}"), figure(cell, "p99_itl_ms"),
                    figure(cell, "p50_e2el_ms"), figure(cell, "p99_e2el_ms"), figure(cell, "request_goodput"), accepted,
                    gain, figure(cell, "failed", "{:.0f}")});
  }
  std::string out = table(rows);
  out +=
      "\nms; delivered tokens only; TTFT counts reasoning, content is the first token behind it; accepted: drafts a "
      "step;\n"
      "~: the repetitions of twin and drafted overlap. tokens/s: median of the repetitions\n";
  for (const Json& cell : report["cells"]) {
    for (const auto& [message, count] : cell["errors"].items()) {
      out += fmt::format("{} of {} at {}: {}\n", count.dump(), word(cell, "prompts"), load_name(cell), message);
    }
    if (cell.contains("speed_up_refused")) {
      out += fmt::format("no speed-up for {} with drafts {}: {}\n", word(cell, "prompts"), word(cell, "drafts"),
                         cell["speed_up_refused"].get<std::string>());
    }
  }
  return out;
}

}  // namespace fourfold::bench
