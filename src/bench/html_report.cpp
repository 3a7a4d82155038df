// The report as a page: tables and plots in one file, nothing to load, nothing to run.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "bench/report.h"

namespace fourfold::bench {
namespace {

constexpr double kWidth = 560, kHeight = 300, kLeft = 64, kRight = 16, kTop = 16, kBottom = 40;
constexpr const char* kColours[] = {"#1f77b4", "#d62728", "#2ca02c", "#9467bd",
                                    "#ff7f0e", "#17becf", "#8c564b", "#e377c2"};

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '&':
        out += "&amp;";
        break;
      case '"':
        out += "&quot;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

std::string shown(const Json& value, int digits = 1) {
  if (value.is_null()) return "–";
  if (value.is_number_float()) return fmt::format("{:.{}f}", value.get<double>(), digits);
  return escaped(value.is_string() ? value.get<std::string>() : value.dump());
}

Json get(const Json& object, const char* name) {
  const auto found = object.is_object() ? object.find(name) : object.end();
  return !object.is_object() || found == object.end() ? Json(nullptr) : *found;
}

using Lines = std::map<std::string, std::vector<std::pair<double, double>>>;

// 1, 2 or 5 times a power of ten: at most five of them up to `top`.
double tick(double top) {
  const double power = std::pow(10, std::floor(std::log10(top / 5)));
  for (const double step : {1.0, 2.0, 5.0, 10.0}) {
    if (top / (step * power) <= 5) return step * power;
  }
  return top;
}

std::string plot(const std::string& title, const std::string& x_name, const std::string& y_name, const Lines& lines) {
  double right = 0, top = 0;
  size_t points = 0;
  for (const auto& [name, line] : lines) {
    for (const auto& [x, y] : line) right = std::max(right, x), top = std::max(top, y), ++points;
  }
  if (points < 2 || right <= 0 || top <= 0) return "";
  const auto px = [&](double x) { return kLeft + x / right * (kWidth - kLeft - kRight); };
  const auto py = [&](double y) { return kHeight - kBottom - y / (1.05 * top) * (kHeight - kTop - kBottom); };
  std::string out =
      fmt::format("<figure><figcaption>{}</figcaption><svg viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"{}\">",
                  escaped(title), kWidth, kHeight, escaped(title));
  for (double y = 0; y <= 1.05 * top; y += tick(top)) {
    out += fmt::format(
        "<line class=\"grid\" x1=\"{}\" x2=\"{}\" y1=\"{:.1f}\" y2=\"{:.1f}\"/><text x=\"{}\" y=\"{:.1f}\" "
        "text-anchor=\"end\">{:g}</text>",
        kLeft, kWidth - kRight, py(y), py(y), kLeft - 6, py(y) + 4, y);
  }
  for (double x = 0; x <= right; x += tick(right)) {
    out +=
        fmt::format("<text x=\"{:.1f}\" y=\"{}\" text-anchor=\"middle\">{:g}</text>", px(x), kHeight - kBottom + 16, x);
  }
  out += fmt::format("<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">{}</text><text x=\"4\" y=\"12\">{}</text>",
                     (kWidth + kLeft) / 2, kHeight - 6, escaped(x_name), escaped(y_name));
  std::string legend;
  size_t number = 0;
  for (const auto& [name, unsorted] : lines) {
    auto line = unsorted;
    std::sort(line.begin(), line.end());
    const char* colour = kColours[number++ % std::size(kColours)];
    std::string path;
    for (const auto& [x, y] : line) {
      path += fmt::format("{}{:.1f},{:.1f} ", path.empty() ? "M" : "L", px(x), py(y));
      out += fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3\" fill=\"{}\"/>", px(x), py(y), colour);
    }
    out += fmt::format("<path d=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"2\"/>", path, colour);
    legend +=
        fmt::format("<li><svg width=\"12\" height=\"12\"><rect width=\"12\" height=\"12\" fill=\"{}\"/></svg> {}</li>",
                    colour, escaped(name));
  }
  return out + "</svg><ul>" + legend + "</ul></figure>\n";
}

// Lines over one setting of the cells; what else they differ in names the line.
std::string plot_over(const Json& report, const std::string& title, const char* over, const std::string& over_name,
                      const char* figure, const std::string& figure_name) {
  Lines lines;
  for (const Json& cell : report["cells"]) {
    const Json x = get(cell, over), y = get(cell, figure);
    if (!x.is_number() || !y.is_number()) continue;
    std::string name = fmt::format("{}, thinking {}", shown(get(cell, "prompts")), shown(get(cell, "thinking")));
    if (!get(cell, "drafts").is_null()) name += ", drafts " + shown(get(cell, "drafts"));
    for (const char* other : {"max_concurrency", "max_tokens", "context"}) {
      if (std::string(other) != over && !get(cell, other).is_null())
        name += fmt::format(", {} {}", other, shown(get(cell, other)));
    }
    lines[name].emplace_back(x.get<double>(), y.get<double>());
  }
  const bool several = std::any_of(lines.begin(), lines.end(), [](const auto& line) { return line.second.size() > 1; });
  return several ? plot(title, over_name, figure_name, lines) : "";
}

// A bar for each cell, so that settings which are words are compared as well.
std::string bars(const Json& report) {
  double top = 0;
  for (const Json& cell : report["cells"]) top = std::max(top, cell["output_throughput"].get<double>());
  if (top <= 0) return "";
  std::string out = "<h2>Delivered tokens a second</h2><table class=\"bars\">";
  for (const Json& cell : report["cells"]) {
    const auto rate = cell["output_throughput"].get<double>();
    out += fmt::format(
        "<tr><td>{}, thinking {}, drafts {}, load {}, {} tokens, context {}</td><td><svg width=\"320\" "
        "height=\"14\"><rect "
        "width=\"{:.1f}\" height=\"14\" fill=\"{}\"/></svg> {:.1f}</td></tr>",
        shown(get(cell, "prompts")), shown(get(cell, "thinking")), shown(get(cell, "drafts")),
        get(cell, "request_rate").is_number() ? shown(get(cell, "request_rate")) + "/s"
                                              : shown(get(cell, "max_concurrency")),
        shown(get(cell, "max_tokens")), shown(get(cell, "context")), 320 * rate / top,
        get(cell, "failed") == 0 ? kColours[0] : kColours[1], rate);
  }
  return out + "</table>\n";
}

}  // namespace

std::string html_report(const Json& report) {
  std::string out =
      "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" "
      "content=\"width=device-width\"><meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; "
      "style-src "
      "'unsafe-inline'\"><title>fourfold bench serve</title><style>"
      "body{font:15px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:76rem;padding:0 "
      "1rem;color:#1c1c1e;background:#fff}"
      "table{border-collapse:collapse;font-variant-numeric:tabular-nums;display:block;overflow-x:auto}"
      "td,th{padding:.25rem .6rem;border-bottom:1px solid #8884;text-align:right;white-space:nowrap}"
      "td:first-child,th:first-child{text-align:left}.bars td{text-align:left}"
      "figure{display:inline-block;margin:.5rem 1rem 1rem 0;max-width:35rem;width:100%}figcaption{font-weight:600}"
      "figure ul{list-style:none;padding:0;margin:0;font-size:13px}svg text{font-size:12px;fill:currentColor}"
      ".grid{stroke:#8884}code{overflow-wrap:anywhere}"
      "@media(prefers-color-scheme:dark){body{color:#e8e8ea;background:#17171a}}</style></head><body>\n";
  out += "<h1>fourfold bench serve</h1><p>";
  for (const char* name : {"model", "url", "date", "fourfold"}) {
    out += fmt::format("{}: <b>{}</b>&ensp;", name, shown(get(report, name)));
  }
  out += fmt::format("<br><code>{}</code></p>\n", shown(get(report, "command")));
  out += bars(report);
  out += plot_over(report, "Throughput", "max_concurrency", "requests at a time", "output_throughput", "tokens/s");
  out += plot_over(report, "Time to first token, p99", "max_concurrency", "requests at a time", "p99_ttft_ms", "ms");
  out += plot_over(report, "Time per token, p50", "max_concurrency", "requests at a time", "p50_tpot_ms", "ms");
  out += plot_over(report, "Throughput", "max_tokens", "tokens of an answer at most", "output_throughput", "tokens/s");
  out += plot_over(report, "Time to first token, p50", "context", "tokens of context", "p50_ttft_ms", "ms");
  out += plot_over(report, "Throughput", "request_rate", "requests a second", "output_throughput", "tokens/s");
  out += plot_over(report, "Time to first token, p99", "request_rate", "requests a second", "p99_ttft_ms", "ms");
  static constexpr std::pair<const char*, const char*> kColumns[] = {{"prompts", "prompts"},
                                                                     {"thinking", "thinking"},
                                                                     {"drafts", "drafts"},
                                                                     {"max_concurrency", "at once"},
                                                                     {"request_rate", "per s"},
                                                                     {"max_tokens", "max tokens"},
                                                                     {"context", "context"},
                                                                     {"output_throughput", "tok/s"},
                                                                     {"output_throughput_low", "low"},
                                                                     {"output_throughput_high", "high"},
                                                                     {"p50_ttft_ms", "TTFT p50"},
                                                                     {"p90_ttft_ms", "p90"},
                                                                     {"p99_ttft_ms", "p99"},
                                                                     {"p50_ttfc_ms", "content p50"},
                                                                     {"p50_tpot_ms", "TPOT p50"},
                                                                     {"p90_tpot_ms", "p90"},
                                                                     {"p99_tpot_ms", "p99"},
                                                                     {"p50_itl_ms", "ITL p50"},
                                                                     {"p99_itl_ms", "p99"},
                                                                     {"p50_e2el_ms", "E2E p50"},
                                                                     {"p90_e2el_ms", "p90"},
                                                                     {"p99_e2el_ms", "p99"},
                                                                     {"request_goodput", "good/s"},
                                                                     {"speed_up", "speed-up"},
                                                                     {"completed", "completed"},
                                                                     {"failed", "failed"}};
  out += "<h2>Figures</h2><table><tr>";
  for (const auto& [name, heading] : kColumns) out += fmt::format("<th>{}</th>", heading);
  out += "<th>accepted</th></tr>\n";
  for (const Json& cell : report["cells"]) {
    out += "<tr>";
    for (const auto& [name, heading] : kColumns) out += fmt::format("<td>{}</td>", shown(get(cell, name), 2));
    out += fmt::format("<td>{}</td></tr>\n", shown(get(get(cell, "speculation"), "accepted_per_step"), 2));
  }
  return out +
         "</table><p>Latencies in milliseconds. Delivered tokens only. TTFT counts reasoning; content is the first "
         "token "
         "behind it. A speed-up is over the same prompts without drafts, and only where no request failed; bars in red "
         "had failures.</p></body></html>\n";
}

}  // namespace fourfold::bench
