// The operations that multiply with weights: linear, dense gated MLP, mixture of experts.
//
// Rows of sequences that contribute few rows (StepRows): each weight is read once and multiplied with up to four of
// them at a time as it streams by. Rows of long sequences: activations are packed, weights are dequantised piece by
// piece into L1. Both ways may run in one call. A row's result depends on which way ran (the first holds activations of
// NVFP4 products as 16-bit integers in blocks of 16, AMX two bf16 parts, the rest fp32), but within a way neither on
// the other rows nor on the number of threads. Where a table for packed activations gives the same bits as gemv
// (`twin`), many few rows take it.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <vector>

#include "base/threads.h"
#include "cpu/gemm/layout.h"
#include "cpu/gemm/packed.h"
#include "cpu/host/options.h"
#include "cpu/host/step_rows.h"
#include "cpu/memory/workspace.h"
#include "ops/ops.h"

namespace fourfold::cpu::gemm {

// Weight bytes of one piece of work: long enough to stream, short enough to balance.
inline constexpr int64_t kUnitBytes = 128 << 10;

// The kernels of one instruction set (dispatch.h).
struct Tables {
  const KernelTable* kernels = nullptr;
  // For kinds of weights that `kernels` does not take (KernelTable::gemm_kinds), where it takes them; null: none.
  const KernelTable* beside = nullptr;
  // For kinds that neither takes, and for routers: fp32 throughout.
  const KernelTable* wide = nullptr;
  // Whose gemm gives the bits of kernels->gemv_nvfp4 for NVFP4; null: none.
  const KernelTable* twin = nullptr;
};

class Products {
 public:
  Products(const Tables& tables, ThreadPool& pool, const CpuOptions& options);

  void begin_step(const ops::Batch& batch) { step_rows_.begin_step(batch); }
  void begin_logits(std::span<const ops::LogitRows> sequences) { step_rows_.begin_logits(sequences); }
  // What the weights that come through here need in a step of so many rows.
  void add(const PackedMatrix& weight);
  void add(const PackedExperts& experts);
  void reserve(int64_t rows);

  void linear(const ops::Tensor& x, const PackedMatrix& weight, const ops::Tensor& out);
  void mlp(const ops::MlpParams& params, const ops::Tensor& x, const ops::Tensor& out);
  void moe(const ops::MoeParams& params, const ops::Tensor& x, const ops::Tensor& out);

 private:
  // Rows of a tensor.
  struct Input {
    ops::Tensor tensor;
    Rows rows;
    int64_t size() const { return static_cast<int64_t>(rows.size()); }
    float* row(int64_t i) const { return tensor.f32(rows[static_cast<size_t>(i)]); }
  };
  // Parts of a matrix.
  struct Parts {
    int only = -1;  // this one; -1: any
    uint32_t kinds = kAllKinds;
    bool has(size_t i, const PackedPart& part) const {
      return (only < 0 || only == static_cast<int>(i)) && (kinds & kind_bit(part.kind)) != 0;
    }
  };
  // Activations of some tokens, ready for gemv: fp32 rows padded to whole words, and integer blocks where asked for.
  struct Prepared {
    std::vector<const float*> rows;
    std::vector<const ActivationBlock*> blocks;
    Workspace row_memory, block_memory;
  };
  struct GemvJob {
    const PackedMatrix* matrix = nullptr;
    const Prepared* input = nullptr;
    Input out;
    Parts parts = {};
  };

  float scale_of(const PackedPart& part) const {
    return nvfp4_activations_ && part.kind == Kind::kNvfp4 ? part.input_scale : 0.0f;
  }
  // The one input scale of all parts, or -1 when they differ.
  float common_scale(const PackedMatrix& matrix) const;
  // All rows of a tensor.
  Input whole(const ops::Tensor& tensor);

  void prepare(const Input& x, float input_scale, bool blocks, Prepared& prepared);
  void run_gemv(std::span<const GemvJob> jobs);
  // One or two panels times tokens [first, first + tokens) of the input; out as in KernelTable.
  void gemv_panels(const Panel* panels, int count, const Prepared& input, int64_t first, int tokens, float* out);
  // The table whose gemm a part takes: `preferred`, or else beside_, or else wide_.
  const KernelTable& table_of(const PackedPart& part, const KernelTable& preferred) const;
  void run_gemm(const Input& x, const PackedMatrix& weight, const Parts& parts, float input_scale,
                const KernelTable& table, const Input& out);
  void run_few(const Input& x, const PackedMatrix& weight, const Parts& parts, float input_scale, const Input& out);
  // Both tensors' rows go the same way, all of them.
  void multiply(const Input& x, const PackedMatrix& weight, bool few, const Input& out);
  // out = silu(x's first half) x its second half; rows of both are padded to 16.
  void activate(const ops::Tensor& gate_up, const ops::Tensor& out);

  void moe_pass(const ops::MoeParams& params, const Input& x, bool few, const Input& out);
  void moe_streaming(const ops::MoeParams& params, const Input& x, const Input& out);
  void moe_grouped(const ops::MoeParams& params, const Input& x, bool few, const Input& out);
  // Tokens by expert, ascending: entries of one expert are adjacent, in token order.
  struct Routing {
    std::vector<int32_t> experts;  // those with tokens
    std::vector<int64_t> begin;    // of each one's entries, and the end
    std::vector<int32_t> token;
    std::vector<float> weight;
    std::vector<int32_t> slots;  // [tokens, top_k]: the entries of a token, by ascending expert; -1: none
  };
  // An expert with at most gemm_tokens of its tokens.
  struct ExpertUnit {
    int32_t expert;
    int64_t begin, end;  // entries
  };
  // Packs rows for products with a part, again only when the part needs it differently from the one before.
  struct Packer {
    Products& self;
    const KernelTable& preferred;
    uint8_t* memory;
    uint8_t* quantized;
    const KernelTable* table = nullptr;
    float scale = 0.0f;
    void pack(const float* const* rows, int64_t n, const PackedPart& part);
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
  void route(const ops::MoeParams& params, const float* logits, int64_t stride, int64_t tokens);

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
  // Scratch of a thread in run_gemm() and moe_grouped(): sums, the kernels' own, and, with `columns` > 0, packed
  // activations and room for quantised copies.
  struct ThreadScratch {
    int64_t sums = 0, kernel = 0, packed = 0, quantized = 0;
    int64_t stride() const;
  };
  ThreadScratch thread_scratch(int64_t columns) const;
  int64_t packed_bytes(int64_t tokens, int64_t columns) const;  // of the table that needs most

  const KernelTable& kernels_;
  const KernelTable* beside_;
  const KernelTable& wide_;
  const KernelTable* twin_;
  ThreadPool& pool_;
  bool nvfp4_activations_;
  int64_t ranks_;
  StepRows step_rows_;
  std::vector<int32_t> all_rows_;  // 0, 1, 2, ...
  Prepared input_, hidden_input_, shared_input_;
  Routing routing_;
  std::vector<int32_t> chosen_;
  std::vector<float> chosen_weights_;
  std::vector<int64_t> cursor_;
  std::vector<ExpertUnit> units_;
  struct PartWork {
    const PackedPart* part;
    int64_t first_pair;
  };
  std::vector<PartWork> part_work_;
  int64_t pass_entries_;
  Workspace packed_, threads_, logits_, gate_up_, hidden_, outputs_, shared_, shared_gates_, hidden_blocks_, quantized_;
  // The largest of what was added.
  int64_t most_columns_ = 0, most_parts_ = 0;
  int64_t experts_ = 0, expert_hidden_ = 0, expert_width_ = 0;
};

}  // namespace fourfold::cpu::gemm
