// An expert layer on the host executor: random weights, routing, the chain of launches, and the fp32 reference.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "executor/executor.h"
#include "kernels/expert_kernels.h"
#include "nvfp4/number.h"

namespace fourfold::moe {

struct LayerShape {
  int experts, top_k, hidden, intermediate;
  bool gated = true;  // SwiGLU; otherwise squared ReLU
};

struct LayerWeights {
  LayerShape shape;
  // Values without tensor scales: [experts][intermediate or hidden][k].
  std::vector<float> gate, up, down;
  std::vector<unsigned char> gate_up_packed, down_packed;
  // Bytes from one expert's packed matrix to the next, elements from one token's row to the next; 0: contiguous.
  unsigned long long expert_stride = 0;
  long long row_stride = 0;
  std::vector<float> gate_up_scales, down_scales;  // [experts][2] ([experts] without a gate), [experts]
};
// `adversarial`: every e4m3 scale, subnormal, zero and negative ones too.
LayerWeights make_weights(const LayerShape& shape, unsigned seed, bool adversarial = false);

enum class Pattern {
  kDistinct,    // distinct experts per token
  kOneExpert,   // every first choice is the same expert, the others are distinct
  kHoles,       // a third of the ids are -1 or beyond the last expert; one token is padding, all -1 and NaN
  kDuplicates,  // the same expert twice and more in one token
  kNobody,      // every id is out of range
};

struct LayerInput {
  int tokens = 0;
  std::vector<unsigned short> rows;  // bf16 [tokens][hidden]
  std::vector<int> ids;
  std::vector<float> weights;
  float limit = 0.0f;
};
LayerInput make_input(const LayerShape& shape, int tokens, Pattern pattern, unsigned seed);

// The reference of the GPU self-test (cuda/moe/reference.h), for all tokens. With `fp4`, activations are quantised to
// NVFP4 on the way into each multiplication.
std::vector<float> reference(const LayerWeights& weights, const LayerInput& input, bool fp4 = false);
// Input scales for NVFP4 activations: x, then h of each expert.
std::vector<float> input_scales(const LayerWeights& weights, const LayerInput& input);

struct LayerRun {
  std::vector<unsigned short> out;  // bf16 [tokens][hidden]
  std::uint64_t switches = 0;
  std::set<executor::SeenSite> seen;
};
// Throws executor::Violation. `sms`: CTAs are sms * kernel.ctas at most.
LayerRun run_layer(const LayerWeights& weights, const LayerInput& input, const ExpertKernel& up,
                   const ExpertKernel& down, const executor::Options& options, int sms = 2);

// Runs the routing kernels alone and checks the table they write: empty, or what is wrong with it.
std::string check_route(const LayerShape& shape, const LayerInput& input, int tile, const executor::Options& options,
                        std::set<executor::SeenSite>* seen = nullptr);

// Empty when every token agrees; otherwise the worst one. Relative L2 error of a token at most `tolerance`. (Bf16
// activations and outputs cost 0.003; with FP4 activations a value at the border of two codes may fall to either side.)
std::string compare(const LayerInput& input, const std::vector<float>& want, const std::vector<unsigned short>& got,
                    double tolerance = 6e-3);
inline double tolerance_of(const ExpertKernel& kernel) { return kernel.fp4() ? 3e-2 : 6e-3; }

// run_layer() and compare(): empty, or what went wrong (also a violation's message).
std::string check_layer(const LayerWeights& weights, const LayerInput& input, const ExpertKernel& up,
                        const ExpertKernel& down, const executor::Options& options, int sms = 2);

}  // namespace fourfold::moe
