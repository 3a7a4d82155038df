// Experts in the formats of dense products (FP8, bf16), or whose matrices have different ones: weights on the device,
// and the launches of a layer (kernels/gemm/experts.cuh). Right for every checkpoint, and not planned as NVFP4 experts
// are.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "cuda/backend/memory.h"
#include "kernels/gemm/experts_args.h"
#include "plan/arch.h"
#include "plan/kernel.h"

namespace fourfold::cuda {

// Whether the expert kernels of cuda/moe take such experts.
bool all_nvfp4(const ops::ExpertSource& expert);

class PlainExperts : public ops::Experts {
 public:
  // All experts have the first one's shapes and formats; an Error names the matrix that has not.
  PlainExperts(std::shared_ptr<Card> card, int64_t count, const std::function<ops::ExpertSource(int64_t)>& source,
               const std::function<void(int64_t)>& done);
  ~PlainExperts() override { card_->let_go(); }
  int64_t count() const override { return count_; }
  int64_t hidden() const override { return down_.layout.rows; }
  // A multiple of 16: widths that are not are padded with zeros.
  int64_t intermediate() const override { return down_.layout.columns; }
  int64_t bytes_per_expert() const override { return bytes_per_expert_; }

  struct Side {
    PackedMatrix layout;  // of an expert
    int formats = 0;
    uint64_t expert_bytes = 0;
    cuda::Buffer weights;
    // For a kernel, but for rows and tables.
    gemm::ExpertsArgs args() const;
  };
  const Side& gate_up() const { return gate_up_; }
  const Side& down() const { return down_; }

 private:
  std::shared_ptr<Card> card_;
  int64_t count_, bytes_per_expert_ = 0;
  Side gate_up_, down_;
};

// Blocks of 16 tokens, and of many.
enum PlainEntry { kPlainGateUpFew, kPlainGateUpMany, kPlainDownFew, kPlainDownMany };
gemm::DenseTile plain_tile(const plan::Arch& arch, int formats, bool few);
plan::KernelSource plain_source(const plan::Arch& arch, int gate_up_formats, int down_formats);

// Tokens of one pass over the layer: more follow in further ones, so that the workspace stays small.
inline constexpr int64_t kMostPlainTokens = 2048;

// Where the tables of a pass lie in their buffer, which begins as zeros.
struct PlainTables {
  uint64_t counts, blocks, slot_token, pick_slot, totals, stored, finished, bytes;
  long long slots;  // rows that are indexed by slot
};
PlainTables plain_tables(int64_t tokens, int64_t top_k, int64_t experts);

struct PlainCall {
  const Stream& stream;
  const plan::Arch& arch;
  const FixedKernels& routing;
  const std::vector<Kernel>& kernels;  // of plain_source()
  const PlainExperts& experts;
  int sms;
  Overlap overlap;
  DeviceAddress tables;   // plain_tables() of these tokens at least
  DeviceAddress hidden;   // bf16 [slots][intermediate]
  DeviceAddress partial;  // fp32 [slots][hidden]
};
// out = sum over each token's choices; at most kMostPlainTokens tokens.
void run_plain(const PlainCall& call, const uint16_t* x, int64_t x_stride, const int* ids, const float* weights,
               int64_t tokens, int64_t top_k, uint16_t* out);

}  // namespace fourfold::cuda
