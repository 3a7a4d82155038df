// The stored copy of an expert layer's weights on a device: repacked once from the checkpoint's form into the units of
// kernels/moe/layout.h (one copy serves every kernel family), with the fp32 tensor scales beside it.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "cuda/moe/context.h"
#include "nvfp4/input_scales.h"

namespace fourfold::cuda {

// A matrix as in a checkpoint: e2m1 codes [rows, k / 2] (even k in the low nibble), e4m3 scales [rows, k / 16], and the
// fp32 tensor scale to multiply with. Strides are bytes from one row to the next. Host or device memory, as the
// function says that takes it. input_scale: what calibration found for the activations that the matrix multiplies
// (largest magnitude / 2688), for plans with NVFP4 activations; 0 or NaN where the checkpoint has none.
struct Nvfp4Matrix {
  const uint8_t* codes = nullptr;
  const uint8_t* scales = nullptr;
  float tensor_scale = 1;
  int64_t code_stride = 0;
  int64_t scale_stride = 0;
  float input_scale = 0;
  int64_t first_column = 0;  // of rows that are a part of longer ones
};

// gate and up: [intermediate, hidden]; down: [hidden, intermediate]. Without a gate (squared ReLU) `gate` is unused.
struct ExpertMatrices {
  Nvfp4Matrix gate, up, down;
};

// Contiguous rows: strides k / 2 and k / 16.
Nvfp4Matrix contiguous(const uint8_t* codes, const uint8_t* scales, float tensor_scale, int64_t k);

// A shared expert of width slices x intermediate, as that many experts of width intermediate: rows of gate and up and
// columns of down are cut alike. SwiGLU is elementwise and down is a sum over columns, so the slices' outputs add up to
// the shared expert's. Every token chooses all of them with the sigmoid of its shared gate as weight
// (append_shared() of expert_layer.h). Where the widths do not divide, or the shared expert has another format, it is a
// dense MLP outside this layer.
std::vector<ExpertMatrices> shared_slices(const ExpertMatrices& shared, int64_t slices,
                                          const plan::moe::Problem& problem);

class ExpertWeights {
 public:
  // Memory for problem.all_experts() experts, not yet filled. The context's kernels must outlive the weights.
  explicit ExpertWeights(const LayerContext& context);

  // From host memory, experts first .. first + sources.size() - 1, with their tensor scales and input scales. Waits for
  // the device. Error, naming the expert, when a block scale is NaN or a tensor scale is not finite.
  void upload(const Stream& stream, int64_t first, std::span<const ExpertMatrices> sources);

  // From device memory: every expert's matrices one after the other at the strides given (bytes between consecutive
  // experts). Tensor scales are set with set_scales(). NaN scales are errors. Waits for the device.
  struct DeviceExperts {
    Nvfp4Matrix gate, up, down;
    int64_t code_bytes, scale_bytes;  // of one matrix: all three have as many elements
  };
  void repack(const Stream& stream, int64_t first, int64_t count, const DeviceExperts& experts);
  // The same without waiting: *bad, -1 before, will be an expert that has NaN scales.
  void repack(const Stream& stream, int64_t first, int64_t count, const DeviceExperts& experts, int* bad) const;
  // gate_up: [experts][2] gate, up, or [experts] without a gate; down: [experts].
  void set_scales(const Stream& stream, const std::vector<float>& gate_up, const std::vector<float>& down);

  // The input scales of all experts, as the checkpoint has them: gate_up like set_scales(), down [experts]. Those that
  // cannot be used are replaced as nvfp4/input_scales.h says. Nothing happens where the layer's problem has bf16
  // activations only.
  void set_input_scales(const Stream& stream, const std::vector<float>& gate_up, const std::vector<float>& down);
  // Empty while no usable scale is known, neither of gate and up nor of down: then no kernel with NVFP4 activations can
  // run, and ExpertLayer takes the bf16 plan where the problem allows it.
  const std::optional<nvfp4::LayerInputScales>& input_scales() const { return input_scales_; }
  // fp32 [1 + experts]: of the layer's input, then of each expert's h.
  const Buffer& input_scale_values() const { return input_scale_values_; }

  // All of another layer's weights (same shape).
  void copy_from(const Stream& stream, const ExpertWeights& other);

  const Buffer& gate_up() const { return gate_up_; }
  const Buffer& down() const { return down_; }
  const Buffer& gate_up_scales() const { return gate_up_scales_; }
  const Buffer& down_scales() const { return down_scales_; }
  uint64_t bytes() const { return gate_up_.bytes() + down_.bytes(); }
  // Bytes of one expert's stored matrices.
  static uint64_t gate_up_bytes(const plan::moe::Problem& problem);
  static uint64_t down_bytes(const plan::moe::Problem& problem);

 private:
  void check_bad(const Stream& stream, const Buffer& bad) const;
  void upload_input_scales(const Stream& stream);

  LayerContext context_;
  std::vector<float> gate_up_inputs_, down_inputs_;  // as the checkpoint has them; empty with bf16 activations
  std::optional<nvfp4::LayerInputScales> input_scales_;
  Buffer input_scale_values_;
  Buffer gate_up_, down_, gate_up_scales_, down_scales_;
};

}  // namespace fourfold::cuda
