#include "cuda/moe/form.h"

#include <cmath>

#include "base/check.h"
#include "base/math.h"
#include "cuda/moe/reference.h"
#include "nvfp4/number.h"

namespace fourfold::cuda {

const LayerForm& form_of(plan::moe::RowForm form) {
  switch (form) {
    case plan::moe::RowForm::kRows:
      return rows_form();
    case plan::moe::RowForm::kSwizzled:
      return swizzled_form();
    case plan::moe::RowForm::kFp4:
      return fp4_form();
    case plan::moe::RowForm::kOneToken:
      return one_token_form();
    case plan::moe::RowForm::kFewTokens:
      return few_tokens_form();
  }
  assertion_failed("a form of rows", __FILE__, __LINE__);
}

GemmPair arguments_of(const LayerCall& call, DeviceAddress x) {
  const plan::moe::Problem& p = call.problem();
  const ExpertWorkspace& workspace = call.workspace;
  const auto wide = p.padded_depth(plan::moe::Pass::kGateUp), deep = p.padded_depth(plan::moe::Pass::kDown);
  moe::GemmArgs up = {};
  up.weights = call.weights.gate_up().as<unsigned char>();
  up.expert_bytes = ExpertWeights::gate_up_bytes(p);
  up.row_tiles = static_cast<int>(p.intermediate * p.operands(plan::moe::Pass::kGateUp) / moe::kTileRows);
  up.units = static_cast<int>(wide / moe::kUnitK);
  up.source = device_pointer<unsigned short>(x);
  up.source_stride = wide;
  up.scales = call.weights.gate_up_scales().as<float>();
  up.down_scales = call.weights.down_scales().as<float>();
  up.out = workspace.hidden().as<void>();
  up.out_stride = deep;
  up.limit = call.inputs.swiglu_limit;
  up.routing = {device_pointer<int>(call.inputs.ids), device_pointer<float>(call.inputs.weights),
                static_cast<int>(call.inputs.tokens), static_cast<int>(p.picks_per_token()),
                static_cast<int>(p.all_experts())};
  up.route = {workspace.counts().as<int>(),    workspace.blocks().as<moe::Block>(), workspace.slot_token().as<int>(),
              workspace.pick_slot().as<int>(), workspace.totals().as<int>(),        workspace.stored().as<int>(),
              workspace.finished().as<int>()};
  moe::GemmArgs down = up;
  down.weights = call.weights.down().as<unsigned char>();
  down.expert_bytes = ExpertWeights::down_bytes(p);
  down.row_tiles = static_cast<int>(p.hidden / moe::kTileRows);
  down.units = static_cast<int>(deep / moe::kUnitK);
  down.source = workspace.hidden().as<unsigned short>();
  down.source_stride = deep;
  down.scales = call.weights.down_scales().as<float>();
  down.out = workspace.partial().as<void>();
  down.out_stride = p.hidden;
  return {up, down};
}

DeviceAddress padded_input(const LayerCall& call) {
  const plan::moe::Problem& p = call.problem();
  const auto wide = p.padded_depth(plan::moe::Pass::kGateUp);
  if (wide == p.hidden) return call.inputs.x;
  const auto across = static_cast<unsigned>(ceil_div(wide / 8, moe::kPrepareThreads));
  launch(call.stream, call.context.kernels->pad_rows, {across, static_cast<unsigned>(call.inputs.tokens)},
         Overlap::kNone, call.inputs.x, call.workspace.padded_x().address(), static_cast<int>(p.hidden),
         static_cast<int>(wide));
  return call.workspace.padded_x().address();
}

void launch_first_gemm(const LayerCall& call, const GemmPair& args) {
  launch(call.stream, call.pair.gate_up_kernel, {call.pair.gate_up_grid, 1}, Overlap::kProgrammatic, args.up);
}

void launch_gemms(const LayerCall& call, const GemmPair& args) {
  launch_first_gemm(call, args);
  launch(call.stream, call.pair.down_kernel, {call.pair.down_grid, 1}, Overlap::kProgrammatic, args.down);
}

std::string compare(float got, float want, float bound) {
  if (std::fabs(got - want) <= bound) return "";  // false for NaN
  return fmt::format("{}, wanted {} within {:.1e}", got, want, bound);
}

std::vector<float> LayerReader::input(int64_t token) const {
  const int64_t hidden = call_.problem().hidden;
  std::vector<float> row;
  for (int64_t i = 0; i < hidden; ++i) {
    row.push_back(nvfp4::bf16_to_float(data_.x[static_cast<size_t>(token * hidden + i)]));
  }
  return row;
}

std::string LayerReader::check_inner(const Row& row, const std::vector<float>& values,
                                     const std::vector<float>& errors) const {
  const std::vector<float> got = inner(row.at);
  for (size_t i = 0; i < values.size(); ++i) {
    const std::string wrong = compare(got[i], values[i], errors[i] + kRoundError * std::fabs(values[i]));
    if (!wrong.empty()) return fmt::format("column {} is {}", i, wrong);
  }
  return "";
}

}  // namespace fourfold::cuda
