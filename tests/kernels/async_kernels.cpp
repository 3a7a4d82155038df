#include "kernels/expert_kernels.h"
#include "kernels/moe/fp4_sm120.cuh"
#include "kernels/moe/mma_sync.cuh"

namespace fourfold::moe {
namespace {
template <plan::Family Family, bool GateUp, int Operands, int Tokens, int Rows, int Depth, int Stages, int Warps,
          int Ctas>
ExpertKernel async(const char* name) {
  using Tile = AsyncTileOf<Family, GateUp, Operands, Tokens, Rows, Depth, Stages, Warps, Ctas>;
  ExpertKernel k = {};
  k.name = name;
  k.family = Family;
  k.gate_up = GateUp;
  k.gated = !GateUp || Operands == 2;
  k.tokens = Tokens;
  k.row_tiles = Operands * Rows / kTileRows;
  k.ctas = Ctas;
  k.threads = Warps * 32;
  k.shared_bytes = plan::make_smem_map(Tile::value).total;
  if constexpr (Family == plan::Family::kFp4) {
    k.run_fp4 = [](const Fp4Args& args) { moe_fp4<Tile>(args); };
  } else {
    k.run = [](const GemmArgs& args) { moe_mma_sync<Tile>(args); };
  }
  return k;
}
}  // namespace

#define MMA(...) async<plan::Family::kMmaSync, __VA_ARGS__>("mma-sync {" #__VA_ARGS__ "}")
#define FP4(...) async<plan::Family::kFp4, __VA_ARGS__>("fp4 {" #__VA_ARGS__ "}")

std::vector<ExpertKernel> async_kernels() {
  // gate_up, operands, tokens, rows of an operand, k, stages, warps, ctas
  return {
      MMA(true, 2, 16, 64, 64, 2, 4, 2),    MMA(false, 1, 16, 64, 64, 3, 4, 2), MMA(true, 2, 64, 32, 128, 3, 8, 1),
      MMA(false, 1, 64, 64, 256, 2, 8, 1),  MMA(true, 1, 16, 64, 128, 2, 4, 2),  // squared ReLU
      FP4(true, 2, 16, 64, 64, 2, 4, 2),    FP4(false, 1, 16, 64, 64, 2, 4, 2), FP4(true, 2, 64, 64, 128, 3, 8, 1),
      FP4(false, 1, 64, 128, 256, 2, 8, 1), FP4(true, 1, 16, 64, 64, 3, 4, 2),
  };
}

void quantize_kernel(const unsigned short* rows, long long stride, int columns, int units, const float* input_scale,
                     unsigned char* codes, long long code_stride, unsigned char* scales, long long scale_stride) {
  moe_quantize(rows, stride, columns, units, input_scale, codes, code_stride, scales, scale_stride);
}

}  // namespace fourfold::moe
