#include "cuda/moe/layer.h"

#include <algorithm>

#include "base/check.h"
#include "base/math.h"
#include "cuda/moe/form.h"
#include "cuda/moe/kernels.h"
#include "kernels/moe/fp4_layout.h"
#include "kernels/moe/tables.h"

namespace fourfold::cuda {
namespace {

constexpr int kSmallestBlock = 8;  // tokens
}  // namespace

ExpertWorkspace::ExpertWorkspace(const LayerContext& context, int64_t max_tokens) : max_tokens_(max_tokens) {
  const plan::moe::Problem& p = context.problem;
  if (max_tokens < 1 || max_tokens > 1 << 20) fail("workspace for {} tokens: wanted 1 to {}", max_tokens, 1 << 20);
  const Device& device = *context.device;
  const auto picks = static_cast<uint64_t>(max_tokens * p.picks_per_token());
  const auto slots =
      static_cast<uint64_t>(moe::max_slots(static_cast<long long>(picks), static_cast<int>(p.all_experts())));
  const auto padded = static_cast<uint64_t>(p.padded_depth(plan::moe::Pass::kDown));
  const auto hidden = static_cast<uint64_t>(p.hidden);
  const auto experts = static_cast<int>(p.all_experts());
  const bool bf16 = p.allows(plan::moe::ActivationFormat::kBf16), fp4 = p.allows(plan::moe::ActivationFormat::kNvfp4);
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
    fp4_x_ =
        make(static_cast<uint64_t>(max_tokens), p.padded_depth(plan::moe::Pass::kGateUp), "quantised hidden states");
    fp4_hidden_ = make(slots, p.padded_depth(plan::moe::Pass::kDown), "activations between the two GEMMs");
  }
  const auto packed = static_cast<uint64_t>(moe::packed_row_values(static_cast<int>(hidden)));
  partial_ = Buffer(device, std::max(bf16 ? slots * hidden * 4 : 0, slots * packed * 2), "rows to be summed");
  if (bf16 && p.padded_depth(plan::moe::Pass::kGateUp) != p.hidden) {
    const auto wide = static_cast<uint64_t>(p.padded_depth(plan::moe::Pass::kGateUp));
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
  form_of(plan::moe::row_form(pair.gate_up.tile)).launch({stream, context, pair, workspace, weights, inputs});
}

void launch_sum(const Stream& stream, const FixedKernels& kernels, const moe::RowSum& sum, int64_t tokens) {
  const Grid grid = {static_cast<unsigned>(ceil_div(int64_t{sum.columns}, moe::kCombineColumns)),
                     static_cast<unsigned>(tokens)};
  if (sum.groups != nullptr) {
    const moe::Routing routing = {sum.ids, sum.weights, static_cast<int>(tokens), sum.top_k, 0};
    launch(stream, kernels.combine_packed, grid, Overlap::kProgrammatic, sum.groups, sum.stride, sum.pick_slot, routing,
           sum.scales, sum.columns, sum.out, sum.out_stride);
    return;
  }
  launch(stream, kernels.combine, grid, Overlap::kProgrammatic, sum.partial, sum.stride, sum.pick_slot, sum.weights,
         sum.top_k, sum.columns, sum.out, sum.out_stride, sum.keep);
}

void append_shared(const Stream& stream, const LayerContext& context, DeviceAddress ids, DeviceAddress weights,
                   DeviceAddress gates, int64_t tokens, DeviceAddress all_ids, DeviceAddress all_weights) {
  const plan::moe::Problem& p = context.problem;
  if (tokens == 0) return;
  launch(stream, context.kernels->append_shared,
         {static_cast<unsigned>(ceil_div(tokens * p.picks_per_token(), moe::kPrepareThreads)), 1}, Overlap::kNone, ids,
         weights, gates, static_cast<int>(tokens), static_cast<int>(p.top_k), static_cast<int>(p.experts),
         static_cast<int>(p.shared_slices()), all_ids, all_weights);
}

void ExpertLayer::run(const Stream& stream, const LayerInputs& inputs) const {
  if (inputs.tokens < 0 || inputs.tokens > workspace_.max_tokens() || inputs.tokens > kernels_.max_tokens()) {
    fail("expert layer: {} tokens, wanted 0 to {}", inputs.tokens,
         std::min(workspace_.max_tokens(), kernels_.max_tokens()));
  }
  if (inputs.left != nullptr) *inputs.left = {};
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
