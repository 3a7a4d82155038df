// fourfold bench model on a GPU: what each operation of a step takes, beside what the card can do.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/json_forward.h"
#include "measure/ceilings.h"
#include "ops/ops.h"
#include "plan/step/step.h"

namespace fourfold::cmd {

// Of one step: a decoded token, or a prompt's chunk.
struct CardStep {
  std::string title;  // "decode, 1 row after 128 positions"
  int64_t tokens = 0;
  ops::OperationTimes times;
  std::optional<plan::step::StepPlan> predicted = {};
};

struct CardFigures {
  std::string model, backend;
  double load_seconds = 0;
  measure::Ceilings ceilings;
  std::vector<CardStep> steps;
};

// Bytes over reads and flops over matrix products, whichever is longer, in microseconds.
double floor_us(const ops::OperationTime& op, const measure::Ceilings& ceilings);

void print_card(const CardFigures& figures);
// {model, backend, load_seconds, read_tb_per_s, matrix_tflops, steps[{title, tokens, us, predicted_us, parts_us,
// floor_us, tokens_per_s, operations[{name, count, us, predicted_us, floor_us, fraction, bytes, flops}]}]}; what was
// not predicted is missing.
Json card_json(const CardFigures& figures);

}  // namespace fourfold::cmd
