// Results of a benchmark as one JSON object, which is all that tables, pages and comparisons are made of.
//
// A cell is one load: prompts, thinking, length, concurrency and the like. Its figures have the names that `vllm bench
// serve` gives them; latencies are milliseconds.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "base/json_forward.h"
#include "bench/figures.h"
#include "bench/server.h"

namespace fourfold::bench {

// What a cell's load was. Cells are compared only where all of it but `drafts` is the same.
struct CellSettings {
  std::string endpoint = "chat", prompts, thinking = "default";
  int64_t concurrency = 1, max_tokens = 128, context = 0, requests = 0;
  double rate = 0;  // requests a second; 0: concurrency counts
  double temperature = 0;
  bool ignore_eos = false;
  uint64_t prompts_checksum = 0;  // of all bodies' prompts in their order
  std::string drafts;             // of the server, as far as it is known: "0", "2", "auto", "off", "on"; or empty
};

Json cell_json(const CellSettings& settings, const Figures& figures, const Goodput& goodput,
               const std::optional<DraftCounters>& before, const std::optional<DraftCounters>& after,
               const std::optional<ServerMemory>& memory);

// A report from a file: an Error where it is none.
Json read_report(const std::string& path);

// The cells as a table for a terminal.
std::string text_table(const Json& report);

// One page with tables and plots that needs no other file and runs no program.
std::string html_report(const Json& report);

// How many times the output rate of `cell` is that of `base`, or why that must not be said.
struct SpeedUp {
  std::optional<double> ratio;
  std::string refused;         // empty where there is a ratio
  bool within_spread = false;  // the repetitions of both overlap
};
SpeedUp speed_up(const Json& base, const Json& cell);

// Puts "speed_up" (or "speed_up_refused") into each cell that has a twin: one without drafts under the same load.
void add_speed_ups(Json& report);

// The cells of two reports side by side: an Error where no load is in both, or where one that is cannot be compared
// because requests failed.
Json compare_reports(const Json& a, const Json& b);
std::string comparison_table(const Json& comparison);

}  // namespace fourfold::bench
