#include "cmd/bench_card.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string>

namespace fourfold::cmd {
namespace {

// Of all operations of a step, one after the other.
struct Sums {
  double us = 0, floor_us = 0;
};

Sums sums_of(const CardStep& step, const measure::Ceilings& ceilings) {
  Sums sums;
  for (const ops::OperationTime& op : step.times.operations) {
    sums.us += op.microseconds * static_cast<double>(op.count);
    sums.floor_us += floor_us(op, ceilings) * static_cast<double>(op.count);
  }
  return sums;
}

// Of an operation, each, as `plan --step` has it: the mean where sizes differ.
std::optional<double> predicted_us(const CardStep& step, const std::string& name) {
  double us = 0;
  int64_t count = 0;
  if (!step.predicted) return std::nullopt;
  for (const plan::step::Op& op : step.predicted->ops) {
    if (op.name != name) continue;
    us += op.us * static_cast<double>(op.count);
    count += op.count;
  }
  return count > 0 ? std::optional(us / static_cast<double>(count)) : std::nullopt;
}

// A step on the card without what measuring leaves out: the choice of tokens and the tables of the host.
std::optional<double> predicted_us(const CardStep& step) {
  if (!step.predicted) return std::nullopt;
  double us = step.predicted->card_us;
  for (const plan::step::Op& op : step.predicted->ops) {
    if (op.name == "choice of tokens" || op.name == "tables") us -= op.us * static_cast<double>(op.count);
  }
  return us;
}

}  // namespace

double floor_us(const ops::OperationTime& op, const measure::Ceilings& ceilings) {
  return std::max(op.bytes / ceilings.read_tbs, op.flops / ceilings.matrix_tflops) * 1e-6;
}

void print_card(const CardFigures& figures) {
  fmt::print("{}\n{}, loaded in {:.2f} s\n", figures.model, figures.backend, figures.load_seconds);
  fmt::print("measured in this run: reads {:.2f} TB/s, {} {:.0f} TFLOP/s\n", figures.ceilings.read_tbs,
             figures.ceilings.matrix_instruction, figures.ceilings.matrix_tflops);
  for (const CardStep& step : figures.steps) {
    const Sums sums = sums_of(step, figures.ceilings);
    fmt::print("\n{}\n  {:<28} {:>5} {:>9} {:>9} {:>9} {:>9} {:>10} {:>6}\n", step.title, "", "count", "us",
               "predicted", "floor", "reached", "total", "share");
    for (const ops::OperationTime& op : step.times.operations) {
      const double floor = floor_us(op, figures.ceilings), total = op.microseconds * static_cast<double>(op.count);
      const std::optional<double> predicted = predicted_us(step, op.name);
      fmt::print("  {:<28} {:>5} {:>9.2f} {:>9} {:>9.2f} {:>7.0f} % {:>10.1f} {:>4.0f} %\n", op.name, op.count,
                 op.microseconds, predicted ? fmt::format("{:.2f}", *predicted) : "-", floor,
                 100 * floor / op.microseconds, total, 100 * total / sums.us);
    }
    const double whole = step.times.microseconds;
    fmt::print(
        "  on the card, steps back to back: {:.1f} us, {:.1f} tokens/s{}; the operations by themselves {:.1f}, floor "
        "{:.1f} ({:.0f} %)\n",
        whole, static_cast<double>(step.tokens) * 1e6 / whole,
        step.predicted ? fmt::format(", predicted {:.1f} us", predicted_us(step).value_or(0)) : "", sums.us,
        sums.floor_us, 100 * sums.floor_us / whole);
  }
}

Json card_json(const CardFigures& figures) {
  Json out;
  out["model"] = figures.model;
  out["backend"] = figures.backend;
  out["load_seconds"] = figures.load_seconds;
  out["read_tb_per_s"] = figures.ceilings.read_tbs;
  out["matrix_tflops"] = figures.ceilings.matrix_tflops;
  out["steps"] = Json::array();
  for (const CardStep& step : figures.steps) {
    const Sums sums = sums_of(step, figures.ceilings);
    Json operations = Json::array();
    for (const ops::OperationTime& op : step.times.operations) {
      const double floor = floor_us(op, figures.ceilings);
      operations.push_back({{"name", op.name},
                            {"count", op.count},
                            {"us", op.microseconds},
                            {"floor_us", floor},
                            {"fraction", floor / op.microseconds},
                            {"bytes", op.bytes},
                            {"flops", op.flops}});
      if (const auto predicted = predicted_us(step, op.name)) operations.back()["predicted_us"] = *predicted;
    }
    out["steps"].push_back({{"title", step.title},
                            {"tokens", step.tokens},
                            {"us", step.times.microseconds},
                            {"parts_us", sums.us},
                            {"floor_us", sums.floor_us},
                            {"tokens_per_s", static_cast<double>(step.tokens) * 1e6 / step.times.microseconds},
                            {"operations", std::move(operations)}});
    if (const auto predicted = predicted_us(step)) out["steps"].back()["predicted_us"] = *predicted;
  }
  return out;
}

}  // namespace fourfold::cmd
