// The search for the fastest kernels of an expert layer on the present card: the planner's best candidates, measured.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "cuda/moe/kernels.h"
#include "measure/layer_bench.h"

namespace fourfold::measure {

struct Measured {
  plan::moe::Candidate gate_up, down;
  double predicted_us = 0, us = 0;
};

// What was measured for a batch of that size.
struct TunedCase {
  int64_t tokens = 0;
  std::vector<Measured> measured;  // the planner's own pick first
  const Measured& planned() const { return measured.front(); }
  const Measured& best() const;
};

class Tuner {
 public:
  // `top`: candidates of each GEMM to measure for the best way to cut the tokens.
  Tuner(cuda::ExpertKernels& kernels, LayerBench& bench, RoutingPattern routing, int top, int replays)
      : kernels_(kernels), bench_(bench), routing_(routing), top_(top), replays_(replays) {}

  // What will be measured for a batch; loads (compiles) nothing yet.
  struct Work {
    int64_t tokens = 0;
    plan::moe::LayerPlan layer;
    struct Group {
      std::vector<const plan::moe::Ranked*> ups, downs;
    };
    std::vector<Group> groups;
    std::vector<std::pair<plan::moe::Pass, plan::moe::Candidate>> candidates() const;
  };
  std::unique_ptr<Work> collect(int64_t tokens) const;
  // Error when every kernel is wrong.
  TunedCase measure(const Work& work);

 private:
  cuda::ExpertKernels& kernels_;
  LayerBench& bench_;
  RoutingPattern routing_;
  int top_, replays_;
};

}  // namespace fourfold::measure
