// One expert layer on a device: routing, gate-up, activation, down and the weighted sum, as the planner planned them.
//
//   ExpertKernels kernels(device, store, problem, options);   // plans, compiles, loads, tests; shared by all layers
//   ExpertWorkspace workspace(kernels.context(), max_tokens); // shared by layers that run one after the other
//   ExpertWeights weights(kernels.context());                 // of one layer
//   ExpertLayer layer(kernels, workspace, weights);
//   layer.run(stream, {x, ids, router_weights, out, tokens});
//
// run() puts at most eight launches on the stream and nothing else: no allocation, no wait, so that it can be captured.
#pragma once

#include <cstdint>

#include "cuda/moe/context.h"
#include "cuda/moe/weights.h"
#include "kernels/moe/sum_args.h"
#include "plan/moe/plan.h"

namespace fourfold::cuda {

// A tile of each GEMM with its kernel, and how many CTAs of it a batch takes.
struct PlannedPair {
  plan::moe::Candidate gate_up, down;
  Kernel gate_up_kernel, down_kernel;
  unsigned gate_up_grid = 0, down_grid = 0;
  // Nothing is sorted: the two GEMMs are the whole layer.
  bool unsorted() const { return !plan::moe::row_of(gate_up.tile).sorted(); }
  // NVFP4 activations (W4A4); otherwise bf16.
  bool fp4() const { return plan::moe::row_form(gate_up.tile) == plan::moe::RowForm::kFp4; }
};

// Device memory that a run needs besides weights, inputs and output, for any plan of up to max_tokens tokens.
class ExpertWorkspace {
 public:
  ExpertWorkspace(const LayerContext& context, int64_t max_tokens);

  int64_t max_tokens() const { return max_tokens_; }
  uint64_t bytes() const;
  // What only kernels with bf16 activations need is empty where the problem has NVFP4 activations only, and the other
  // way round.
  // bf16 [rows][padded intermediate]: the activation's output, a row for each slot; columns past the intermediate size
  // stay zero.
  Buffer& hidden() { return hidden_; }
  const Buffer& hidden() const { return hidden_; }
  // The same for the wgmma kernels: [padded intermediate / 64][slots][64], swizzled; shares hidden() where it can.
  Buffer& swizzled() { return swizzled_.bytes() != 0 ? swizzled_ : hidden_; }
  const Buffer& swizzled() const { return swizzled_.bytes() != 0 ? swizzled_ : hidden_; }
  // One token and few: bf16 [2][moe::kExchangeRows][padded intermediate] between its kernels, and whose turn it is
  // (OneTurn); see kernels/moe/tables.h. Nobody but these kernels may write there.
  Buffer& exchange() { return exchange_; }
  const Buffer& exchange() const { return exchange_; }
  const Buffer& turn() const { return turn_; }
  // fp32 [slots][hidden], rows of a tile paired as in partial_place() (kernels/moe/tables.h); groups with a common
  // exponent from the FP4 and wgmma kernels.
  Buffer& partial() { return partial_; }
  const Buffer& partial() const { return partial_; }
  const Buffer& padded_x() const { return padded_x_; }  // bf16 [tokens][padded hidden]; empty where none is needed
  // NVFP4 activations in the order of kernels/moe/fp4_layout.h: of each token's input, and of each slot's h, whose
  // blocks past the intermediate size stay zero. Rows are 32 bytes of codes and 4 of scales per 64 columns.
  struct Fp4Rows {
    Buffer codes, scales;
    int64_t units = 0;  // of 64 columns
    int64_t code_stride() const { return units * 32; }
    int64_t scale_stride() const { return units * 4; }
  };
  Fp4Rows& fp4_x() { return fp4_x_; }
  const Fp4Rows& fp4_x() const { return fp4_x_; }
  Fp4Rows& fp4_hidden() { return fp4_hidden_; }
  const Fp4Rows& fp4_hidden() const { return fp4_hidden_; }
  // The routing tables (RouteTable).
  const Buffer& counts() const { return counts_; }
  const Buffer& blocks() const { return blocks_; }
  const Buffer& slot_token() const { return slot_token_; }
  const Buffer& pick_slot() const { return pick_slot_; }
  const Buffer& totals() const { return totals_; }
  const Buffer& stored() const { return stored_; }
  const Buffer& finished() const { return finished_; }

 private:
  int64_t max_tokens_;
  Fp4Rows fp4_x_, fp4_hidden_;
  Buffer hidden_, swizzled_, exchange_, turn_, partial_, padded_x_, counts_, blocks_, slot_token_, pick_slot_, totals_,
      stored_, finished_;
};

// Device addresses, rows contiguous. x and out must be multiples of 16.
struct LayerInputs {
  DeviceAddress x = 0;        // bf16 [tokens, hidden]
  DeviceAddress ids = 0;      // int32 [tokens, picks_per_token]; one outside [0, all_experts) contributes nothing
  DeviceAddress weights = 0;  // fp32, likewise
  DeviceAddress out = 0;      // bf16 [tokens, hidden]; must not overlap x
  int64_t tokens = 0;
  float swiglu_limit = 0;  // clamp: gate at most this, |up| at most this; 0: none
  bool keep_rows = false;  // leaves the workspace's summed rows readable; otherwise they hold anything
  // Not null: where the last launch would be the sum over a token's experts and nothing else, it is left to the caller
  // (launch_sum(), or a kernel that takes it along) and described here. There is none where the layer is complete.
  moe::RowSum* left = nullptr;
};

// The launches of one layer. Everything must have been checked: ExpertLayer::run() does.
void launch_layer(const Stream& stream, const LayerContext& context, const PlannedPair& pair,
                  const ExpertWorkspace& workspace, const ExpertWeights& weights, const LayerInputs& inputs);

// A sum that a layer has left.
void launch_sum(const Stream& stream, const FixedKernels& kernels, const moe::RowSum& sum, int64_t tokens);

// The router's answer for the routed experts ([tokens, top_k]) and the shared expert's gate of each token (fp32, after
// the sigmoid) to the answer that the layer takes ([tokens, picks_per_token]).
void append_shared(const Stream& stream, const LayerContext& context, DeviceAddress ids, DeviceAddress weights,
                   DeviceAddress gates, int64_t tokens, DeviceAddress all_ids, DeviceAddress all_weights);

class ExpertKernels;

class ExpertLayer {
 public:
  // The three must outlive the layer.
  ExpertLayer(const ExpertKernels& kernels, const ExpertWorkspace& workspace, const ExpertWeights& weights)
      : kernels_(kernels), workspace_(workspace), weights_(weights) {}
  // Error when tokens are more than the workspace or the plans take, an address is not aligned, or the problem has
  // NVFP4 activations only and the weights no input scales.
  void run(const Stream& stream, const LayerInputs& inputs) const;

 private:
  const ExpertKernels& kernels_;
  const ExpertWorkspace& workspace_;
  const ExpertWeights& weights_;
};

}  // namespace fourfold::cuda
