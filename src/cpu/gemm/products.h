// The operations that multiply with weights: linear, dense gated MLP, mixture of experts.
//
// Few tokens (KernelTable::gemv_limit): each weight is read once and multiplied with all tokens as it streams by.
// Many tokens: activations are packed, weights are dequantised piece by piece into L1.
// A token's result depends on which of the two ways ran (the gemv way holds activations as 16-bit integers in blocks of
// 16, the bf16 and AMX ways as bf16), but within a way not on the other tokens, nor on the number of threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <vector>

#include "base/threads.h"
#include "cpu/cpu_backend.h"
#include "cpu/gemm/layout.h"
#include "cpu/gemm/packed.h"
#include "ops/ops.h"

namespace fourfold::cpu::gemm {

// Weight bytes of one piece of work: long enough to stream, short enough to balance.
inline constexpr int64_t kUnitBytes = 128 << 10;

class Products {
 public:
  // `wide` multiplies with the kinds of weights that `kernels` does not take (KernelTable::gemm_kinds), and with
  // routers. `nvfp4_activations`: inputs of matrices with an input scale are quantised to NVFP4 and back first.
  Products(const KernelTable& kernels, const KernelTable& wide, ThreadPool& pool, bool nvfp4_activations);

  void linear(const ops::Tensor& x, const PackedMatrix& weight, const ops::Tensor& out);
  void mlp(const ops::MlpParams& params, const ops::Tensor& x, const ops::Tensor& out);
  void moe(const ops::MoeParams& params, const ops::Tensor& x, const ops::Tensor& out);

 private:
  // Activations of some tokens, ready for gemv: fp32 rows padded to whole words, and integer blocks where asked for.
  struct Input {
    std::vector<const float*> rows;
    std::vector<const ActivationBlock*> blocks;
    Workspace row_memory, block_memory;
  };
  struct GemvJob {
    const PackedMatrix* matrix;
    const Input* input;
    ops::Tensor out;
  };

  float scale_of(const PackedPart& part) const {
    return nvfp4_activations_ && part.kind == Kind::kNvfp4 ? part.input_scale : 0.0f;
  }
  // The one input scale of all parts, or -1 when they differ.
  float common_scale(const PackedMatrix& matrix) const;

  void prepare(const ops::Tensor& x, float input_scale, bool blocks, Input& input);
  void run_gemv(std::span<const GemvJob> jobs);
  // One or two panels times tokens [first, first + tokens) of the input; out as in KernelTable.
  void gemv_panels(const Panel* panels, int count, const Input& input, int64_t first, int tokens, float* out);
  // One part of a matrix, or all (part -1), for many tokens.
  void run_gemm(const ops::Tensor& x, const PackedMatrix& weight, int part, float input_scale, bool wide,
                const ops::Tensor& out);
  // out = silu(x's first half) x its second half; rows of both are padded to 16.
  void activate(const ops::Tensor& gate_up, const ops::Tensor& out);

  void moe_few(const ops::MoeParams& params, const ops::Tensor& x, const ops::Tensor& out);
  void moe_many(const ops::MoeParams& params, const ops::Tensor& x, const ops::Tensor& out);
  // Tokens by expert, ascending: entries of one expert are adjacent, in token order.
  struct Routing {
    std::vector<int32_t> experts;  // those with tokens
    std::vector<int64_t> begin;    // of each one's entries, and the end
    std::vector<int32_t> token;
    std::vector<float> weight;
    std::vector<int32_t> slots;  // [tokens, top_k]: the entries of a token, by ascending expert
  };
  // What the experts make of a batch, before it is added up.
  struct ExpertOutputs {
    const float* routed;  // [tokens x top_k, stride], by entry
    const float* shared;  // [tokens, stride], or null
    int64_t stride;
    ops::Tensor shared_gates;  // [tokens, 1], or no data: 1
  };
  void add_experts(const ExpertOutputs& outputs, int64_t top_k, int64_t token, int64_t first, int64_t columns,
                   float* to) const;
  void route(const ops::MoeParams& params, const float* logits, int64_t stride, int64_t tokens, int64_t experts);

  // fn(thread, unit) over [0, n).
  template <typename F>
  void for_units(int64_t n, F&& fn) {
    if (n == 1 || pool_.size() == 1) {
      for (int64_t i = 0; i < n; ++i) fn(0, i);
      return;
    }
    std::atomic<int64_t> next{0};
    pool_.share([&](int thread) {
      for (int64_t i = next.fetch_add(1); i < n; i = next.fetch_add(1)) fn(thread, i);
    });
  }
  // Scratch of each thread: `bytes` at the returned pointer + thread x stride.
  uint8_t* thread_scratch(int64_t bytes, int64_t& stride);

  const KernelTable& kernels_;
  const KernelTable& wide_;
  ThreadPool& pool_;
  bool nvfp4_activations_;
  Input input_, hidden_input_, shared_input_;
  Routing routing_;
  std::vector<int32_t> chosen_;
  std::vector<float> chosen_weights_;
  std::vector<int64_t> cursor_;
  Workspace packed_, threads_, logits_, gate_up_, hidden_, outputs_, shared_, shared_gates_, hidden_blocks_, quantized_;
};

}  // namespace fourfold::cpu::gemm
