// What tests run on the host driver: formats of stacks, expert layers, cards. The kernels for it are compiled when the
// tests are built (generate.cpp).
#pragma once

#include <vector>

#include "hostcuda/host_cuda.h"
#include "kernels/gemm/layout.h"
#include "plan/moe/plan.h"

namespace fourfold::hostcuda {

// As gemm::RowsTile::formats has them.
inline constexpr int kStackFormats[] = {1, 4, 5};
// Besides, in the table of operations: fp8, all three, and fp8 with cells.
inline constexpr int kTableFormats[] = {2, 7, 2 | gemm::kCells};

// Whole models run with the kernels of these, with such caches of keys and values.
struct ModelArch {
  const char* name;
  bool fp8_cache;
};
inline constexpr ModelArch kModelArchs[] = {
    {"sm_80", false}, {"sm_90a", false}, {"sm_90a", true}, {"sm_120a", false}, {"sm_120a", true}};

struct ExpertCase {
  HostCard card;
  plan::moe::Problem problem;
  int64_t most_tokens;
  std::string emulate = "";  // a card whose plans run on this one
};

inline plan::moe::Problem expert_problem(int64_t experts, int64_t top_k, int64_t hidden, int64_t intermediate) {
  plan::moe::Problem p;
  p.name = "experts";
  p.experts = experts;
  p.top_k = top_k;
  p.hidden = hidden;
  p.intermediate = intermediate;
  return p;
}

inline plan::moe::Problem with_fp4(plan::moe::Problem p) {
  p.activations = plan::moe::ActivationFormat::kNvfp4;
  return p;
}

inline plan::moe::Problem with_shared(plan::moe::Problem p, int64_t intermediate) {
  p.shared = plan::moe::SharedExpert::kNvfp4;
  p.shared_intermediate = intermediate;
  return p;
}

inline std::vector<ExpertCase> expert_cases() {
  const plan::moe::Problem demo = with_shared(expert_problem(24, 4, 256, 64), 128);
  return {
      {HostCard{}, demo, 128},
      // A rank of two of it: with half of every expert, or half of the experts.
      {two_cards(), with_shared(expert_problem(24, 4, 256, 32), 64), 64},
      {two_cards(), with_shared(expert_problem(12, 4, 256, 64), 64), 64},
      {HostCard{}, with_shared(expert_problem(24, 4, 256, 32), 64), 8},
      {blackwell_card(), with_fp4(expert_problem(9, 3, 256, 256)), 8},
      {ampere_card(), demo, 32},
      {HostCard{}, demo, 32, "rtx-pro-6000"},
      {HostCard{}, expert_problem(6, 2, 80, 48), 128},                    // of the table of operations
      {two_cards(), with_shared(expert_problem(24, 4, 256, 16), 32), 8},  // of the demo model's four ranks
  };
}

}  // namespace fourfold::hostcuda
