// Timing of expert layers the way they run: whole layers in a graph, every weight from memory (copies in turn, so that
// L2 is cold).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cuda/moe/kernels.h"
#include "measure/ceilings.h"

namespace fourfold::measure {

enum class RoutingPattern { kUniform, kPowerLaw };
std::string_view to_string(RoutingPattern pattern);
RoutingPattern parse_routing(std::string_view name);  // Error that lists the names otherwise

// The experts of each token, distinct: uniform, or expert e with a weight of 1 / (e + 1) (then the busiest of 256
// experts has about 16 % of all first choices).
std::vector<int> make_routing(const plan::moe::Problem& problem, int64_t tokens, RoutingPattern pattern, uint64_t seed);

class LayerBench {
 public:
  // Weights on the device, in as many copies as it takes for 200 MB (and three times L2) to be read between two uses of
  // one, or as fit into memory. Error when not even one copy does.
  LayerBench(cuda::ExpertKernels& kernels, int64_t max_tokens);
  ~LayerBench();

  // Whether that many bytes do pass between two uses of a weight, with batches of this size.
  bool cold(int64_t tokens) const;
  // What the layer must read and do for such batches, averaged over those that are timed.
  struct Work {
    double weight_bytes = 0, bytes = 0, flops = 0;
    double touched = 0;  // experts
  };
  // The batches that time() runs: as many layers in a graph as make it long enough to time.
  Work prepare(int64_t tokens, RoutingPattern pattern);
  // Microseconds per layer: the median of the replays.
  double time(const cuda::PlannedPair& pair, int replays = 9);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace fourfold::measure
