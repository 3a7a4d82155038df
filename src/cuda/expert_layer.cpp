#include "cuda/expert_layer.h"

#include <algorithm>

#include "base/check.h"
#include "base/math.h"
#include "cuda/expert_kernels.h"
#include "kernels/moe/fp4_layout.h"
#include "kernels/moe/tables.h"

namespace fourfold::cuda {
namespace {

constexpr int kSmallestBlock = 8;  // tokens
constexpr int kQuantiseThreads = 128;

template <typename T>
T* pointer(DeviceAddress address) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}

// Wide streaming tiles: for down beside gate-up, for the sum beside down.
bool raises_flags(const plan::TileConfig& t) {
  return t.family == plan::Family::kStreaming && t.warps == plan::kWideStreamingWarps;
}

}  // namespace

ExpertWorkspace::ExpertWorkspace(const LayerContext& context, int64_t max_tokens) : max_tokens_(max_tokens) {
  const plan::MoeProblem& p = context.problem;
  if (max_tokens < 1 || max_tokens > 1 << 20) fail("workspace for {} tokens: wanted 1 to {}", max_tokens, 1 << 20);
  const Device& device = *context.device;
  const auto picks = static_cast<uint64_t>(max_tokens * p.picks_per_token());
  const auto slots =
      static_cast<uint64_t>(moe::max_slots(static_cast<long long>(picks), static_cast<int>(p.all_experts())));
  const auto padded = static_cast<uint64_t>(p.padded_depth(plan::Pass::kDown));
  const auto hidden = static_cast<uint64_t>(p.hidden);
  const auto experts = static_cast<int>(p.all_experts());
  const bool bf16 = p.allows(plan::ActivationFormat::kBf16), fp4 = p.allows(plan::ActivationFormat::kNvfp4);
  if (bf16) hidden_ = Buffer(device, slots * padded * 2, "activations between the two GEMMs");
  // As swizzled units the last columns are others: the rows' zeros would not last.
  if (bf16 && static_cast<int64_t>(padded) != p.intermediate) {
    swizzled_ = Buffer(device, slots * padded * 2, "activations between the two GEMMs");
  }
  if (bf16) {
    exchange_ = Buffer(device, 2 * moe::kExchangeRows * padded * 2, "activations between the two GEMMs of few tokens");
    turn_ = Buffer(device, sizeof(moe::OneTurn), "activations between the two GEMMs of few tokens");
  }
  if (fp4) {
    const auto make = [&](uint64_t count, int64_t columns, const char* what) {
      const auto units = static_cast<uint64_t>(columns / moe::kUnitK);
      return Fp4Rows{Buffer(device, count * units * moe::kFp4UnitBytes, what),
                     Buffer(device, count * units * moe::kFp4UnitScales, what), static_cast<int64_t>(units)};
    };
    fp4_x_ = make(static_cast<uint64_t>(max_tokens), p.padded_depth(plan::Pass::kGateUp), "quantised hidden states");
    fp4_hidden_ = make(slots, p.padded_depth(plan::Pass::kDown), "activations between the two GEMMs");
  }
  const auto packed = static_cast<uint64_t>(moe::packed_row_values(static_cast<int>(hidden)));
  partial_ = Buffer(device, std::max(bf16 ? slots * hidden * 4 : 0, slots * packed * 2), "rows to be summed");
  if (bf16 && p.padded_depth(plan::Pass::kGateUp) != p.hidden) {
    const auto wide = static_cast<uint64_t>(p.padded_depth(plan::Pass::kGateUp));
    padded_x_ = Buffer(device, static_cast<uint64_t>(max_tokens) * wide * 2, "padded hidden states");
  }
  const auto blocks = static_cast<uint64_t>(moe::max_blocks(static_cast<long long>(picks), experts, kSmallestBlock));
  counts_ = Buffer(device, 2 * sizeof(int), "routing tables");
  blocks_ = Buffer(device, blocks * sizeof(moe::Block), "routing tables");
  slot_token_ = Buffer(device, (slots + moe::kSlotsBeyond) * sizeof(int), "routing tables");
  pick_slot_ = Buffer(device, picks * sizeof(int), "routing tables");
  totals_ = Buffer(device, (moe::kMaxExperts + 1) * sizeof(int), "routing tables");
  stored_ = Buffer(device, blocks * sizeof(int), "routing tables");
  finished_ = Buffer(device, moe::kMostSums * sizeof(int), "routing tables");
  Stream stream(device);
  totals_.fill(stream, 0);
  if (bf16) {
    hidden_.fill(stream, 0);
    exchange_.fill(stream, 0xff);
    turn_.fill(stream, 0);
  }
  if (fp4) {
    fp4_hidden_.codes.fill(stream, 0);
    fp4_hidden_.scales.fill(stream, 0);
  }
  stream.synchronize();
}

uint64_t ExpertWorkspace::bytes() const {
  uint64_t sum = 0;
  for (const Buffer* b : {&hidden_, &swizzled_, &exchange_, &turn_, &partial_, &padded_x_, &fp4_x_.codes,
                          &fp4_x_.scales, &fp4_hidden_.codes, &fp4_hidden_.scales, &counts_, &blocks_, &slot_token_,
                          &pick_slot_, &totals_, &stored_, &finished_}) {
    sum += b->bytes();
  }
  return sum;
}

void launch_layer(const Stream& stream, const LayerContext& context, const PlannedPair& pair,
                  const ExpertWorkspace& workspace, const ExpertWeights& weights, const LayerInputs& inputs) {
  const plan::MoeProblem& p = context.problem;
  const FixedKernels& fixed = *context.kernels;
  const int tokens = static_cast<int>(inputs.tokens);
  const int picks_per_token = static_cast<int>(p.picks_per_token());
  const int64_t picks = inputs.tokens * picks_per_token;
  const int hidden = static_cast<int>(p.hidden);
  const auto wide = p.padded_depth(plan::Pass::kGateUp), deep = p.padded_depth(plan::Pass::kDown);

  const bool fp4 = pair.fp4();
  const bool swizzled = plan::row_form(pair.gate_up.tile) == plan::RowForm::kSwizzled;
  DeviceAddress x = inputs.x;
  if (wide != p.hidden && !fp4 && !swizzled) {  // tensor copies have zeros past the last column
    const auto across = static_cast<unsigned>(ceil_div(wide / 8, 128));
    launch(stream, fixed.pad_rows, {across, static_cast<unsigned>(tokens)}, Overlap::kNone, inputs.x,
           workspace.padded_x().address(), hidden, static_cast<int>(wide));
    x = workspace.padded_x().address();
  }
  const moe::Routing routing{pointer<int>(inputs.ids), pointer<float>(inputs.weights), tokens, picks_per_token,
                             static_cast<int>(p.all_experts())};
  const moe::RouteTable table{workspace.counts().as<int>(),     workspace.blocks().as<moe::Block>(),
                              workspace.slot_token().as<int>(), workspace.pick_slot().as<int>(),
                              workspace.totals().as<int>(),     workspace.stored().as<int>(),
                              workspace.finished().as<int>()};
  moe::GemmArgs up = {};
  up.weights = weights.gate_up().as<unsigned char>();
  up.expert_bytes = ExpertWeights::gate_up_bytes(p);
  up.row_tiles = static_cast<int>(p.intermediate * p.operands(plan::Pass::kGateUp) / moe::kTileRows);
  up.units = static_cast<int>(wide / moe::kUnitK);
  up.source = pointer<unsigned short>(x);
  up.source_stride = wide;
  up.scales = weights.gate_up_scales().as<float>();
  up.down_scales = weights.down_scales().as<float>();
  up.out = workspace.hidden().as<void>();
  up.out_stride = deep;
  up.limit = inputs.swiglu_limit;
  up.routing = routing;
  up.route = table;
  moe::GemmArgs down = up;
  down.weights = weights.down().as<unsigned char>();
  down.expert_bytes = ExpertWeights::down_bytes(p);
  down.row_tiles = hidden / moe::kTileRows;
  down.units = static_cast<int>(deep / moe::kUnitK);
  down.source = workspace.hidden().as<unsigned short>();
  down.source_stride = deep;
  down.scales = weights.down_scales().as<float>();
  down.out = pair.inline_routes() ? pointer<void>(inputs.out) : workspace.partial().as<void>();
  down.out_stride = hidden;
  const plan::TileConfig& tile = pair.gate_up.tile;
  if (pair.inline_routes()) {
    up.out = workspace.exchange().as<void>();
    down.source = workspace.exchange().as<unsigned short>();
    up.turn = down.turn = workspace.turn().as<moe::OneTurn>();
    down.inner_blocks = static_cast<int>(p.intermediate / moe::kBlockK);
  } else if (raises_flags(tile)) {
    down.ready = ceil_div(up.row_tiles, tile.operands * tile.n / moe::kTileRows);
  }

  // The wgmma kernels' forms of rows: see kernels/moe/tables.h.
  const long long slots = moe::max_slots(picks, routing.experts);
  const long long groups = moe::packed_row_values(hidden) / 4;
  if (swizzled) {
    down.source_stride = up.out_stride = slots * moe::kUnitK;
    up.out = workspace.swizzled().as<void>();
    down.source = workspace.swizzled().as<unsigned short>();
    down.out_stride = groups;
  }

  // NVFP4 activations: codes and scales instead of bf16 rows, strides in bytes.
  moe::Fp4Args fp4_up = {}, fp4_down = {};
  if (fp4) {
    const ExpertWorkspace::Fp4Rows &rows = workspace.fp4_x(), &between = workspace.fp4_hidden();
    const auto* scales = weights.input_scale_values().as<float>();
    up.source = rows.codes.as<unsigned short>();
    up.source_stride = rows.code_stride();
    up.out = between.codes.as<void>();
    up.out_stride = down.source_stride = between.code_stride();
    down.source = between.codes.as<unsigned short>();
    down.out_stride = groups;
    fp4_up = {up,         rows.scales.as<unsigned char>(),    rows.scale_stride(),   scales,
              scales + 1, between.scales.as<unsigned char>(), between.scale_stride()};
    fp4_down = {down, between.scales.as<unsigned char>(), between.scale_stride(), scales + 1, nullptr, nullptr, 0};
    launch(stream, fixed.quantise,
           {static_cast<unsigned>(ceil_div(int64_t{4} * up.units, kQuantiseThreads)), static_cast<unsigned>(tokens)},
           Overlap::kProgrammatic, inputs.x, static_cast<long long>(p.hidden), hidden, up.units, scales,
           rows.codes.address(), static_cast<long long>(rows.code_stride()), rows.scales.address(),
           static_cast<long long>(rows.scale_stride()));
  }

  if (!pair.inline_routes()) {
    const int block = pair.gate_up.tile.tokens;
    if (picks <= moe::kRouteOnePass) {
      launch(stream, fixed.route, {1, 1}, Overlap::kProgrammatic, routing, table, block);
    } else {
      const auto ctas = static_cast<unsigned>(ceil_div(picks, moe::kRouteManyPicks));
      launch(stream, fixed.route_count, {ctas, 1}, Overlap::kProgrammatic, routing, table, block);
      launch(stream, fixed.route_scatter, {ctas, 1}, Overlap::kProgrammatic, routing, table);
    }
  }
  if (fp4) {
    launch(stream, pair.gate_up_kernel, {pair.gate_up_grid, 1}, Overlap::kProgrammatic, fp4_up);
    launch(stream, pair.down_kernel, {pair.down_grid, 1}, Overlap::kProgrammatic, fp4_down);
  } else {
    const Grid grid = {pair.gate_up_grid, 1};
    if (swizzled) {
      const ptx::TensorMap rows = row_pieces(stream.device(), inputs.x, static_cast<uint64_t>(tokens),
                                             static_cast<uint64_t>(hidden), static_cast<uint64_t>(hidden) * 2);
      launch(stream, pair.gate_up_kernel, grid, Overlap::kProgrammatic, rows, up);
    } else {
      launch(stream, pair.gate_up_kernel, grid, Overlap::kProgrammatic, up);
    }
    launch(stream, pair.down_kernel, {pair.down_grid, 1}, Overlap::kProgrammatic, down);
  }
  const Grid sums = {static_cast<unsigned>(ceil_div(p.hidden, moe::kCombineColumns)), static_cast<unsigned>(tokens)};
  if (swizzled || fp4) {
    // The FP4 kernels multiply with both scales of the expert themselves.
    const DeviceAddress scales = fp4 ? 0 : weights.down_scales().address();
    launch(stream, fixed.combine_packed, sums, Overlap::kProgrammatic, workspace.partial().address(), groups,
           workspace.pick_slot().address(), routing, scales, hidden, inputs.out, static_cast<long long>(p.hidden));
  } else if (raises_flags(pair.down.tile)) {
    const Grid pieces = {static_cast<unsigned>(tokens), static_cast<unsigned>(ceil_div(p.hidden, moe::kSumColumns))};
    launch(stream, fixed.combine_beside, pieces, Overlap::kProgrammatic, workspace.partial().address(),
           static_cast<long long>(p.hidden), table, inputs.weights, picks_per_token, hidden, inputs.out,
           static_cast<long long>(p.hidden), static_cast<int>(inputs.keep_rows));
  } else if (!pair.inline_routes()) {
    launch(stream, fixed.combine, sums, Overlap::kProgrammatic, workspace.partial().address(),
           static_cast<long long>(p.hidden), workspace.pick_slot().address(), inputs.weights, picks_per_token, hidden,
           inputs.out, static_cast<long long>(p.hidden), static_cast<int>(inputs.keep_rows));
  }
}

void append_shared(const Stream& stream, const LayerContext& context, DeviceAddress ids, DeviceAddress weights,
                   DeviceAddress gates, int64_t tokens, DeviceAddress all_ids, DeviceAddress all_weights) {
  const plan::MoeProblem& p = context.problem;
  if (tokens == 0) return;
  launch(stream, context.kernels->append_shared,
         {static_cast<unsigned>(ceil_div(tokens * p.picks_per_token(), 128)), 1}, Overlap::kNone, ids, weights, gates,
         static_cast<int>(tokens), static_cast<int>(p.top_k), static_cast<int>(p.experts),
         static_cast<int>(p.shared_slices()), all_ids, all_weights);
}

void ExpertLayer::run(const Stream& stream, const LayerInputs& inputs) const {
  if (inputs.tokens < 0 || inputs.tokens > workspace_.max_tokens() || inputs.tokens > kernels_.max_tokens()) {
    fail("expert layer: {} tokens, wanted 0 to {}", inputs.tokens,
         std::min(workspace_.max_tokens(), kernels_.max_tokens()));
  }
  if (inputs.tokens == 0) return;
  for (const auto& [name, address, align] :
       {std::tuple("hidden states", inputs.x, 16u), std::tuple("output", inputs.out, 16u),
        std::tuple("expert ids", inputs.ids, 4u), std::tuple("router weights", inputs.weights, 4u)}) {
    if (address == 0 || address % align != 0) {
      fail("expert layer: {} at {:#x}, wanted a device address that is a multiple of {}", name, address, align);
    }
  }
  const PlannedPair& pair = kernels_.bucket(inputs.tokens).pair_for(weights_);
  launch_layer(stream, kernels_.context(), pair, workspace_, weights_, inputs);
}

}  // namespace fourfold::cuda
