#include "measure/layer_bench.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <thread>

#include "base/check.h"
#include "base/math.h"
#include "base/random.h"

namespace fourfold::measure {

using namespace cuda;

namespace {

constexpr double kColdBytes = 200e6;
constexpr int64_t kMostCopies = 64;
constexpr double kMemoryShare = 0.7;  // of the free memory, for all copies of the weights
constexpr int kWarmups = 2;
constexpr auto kPause = std::chrono::milliseconds(10);  // before a replay of long work: the card is at its power limit
constexpr int64_t kPauseFrom = 64;                      // tokens

// Layers in one graph: a replay must be long against the clock's grain and short against the power limit.
int64_t layers_for(int64_t tokens) {
  return tokens <= 2 ? 64 : tokens <= 16 ? 16 : tokens <= 64 ? 8 : tokens <= 512 ? 4 : 2;
}

}  // namespace

std::string_view to_string(RoutingPattern pattern) {
  return pattern == RoutingPattern::kUniform ? "uniform" : "power-law";
}

RoutingPattern parse_routing(std::string_view name) {
  for (const RoutingPattern pattern : {RoutingPattern::kUniform, RoutingPattern::kPowerLaw}) {
    if (to_string(pattern) == name) return pattern;
  }
  fail("routing '{}': wanted uniform or power-law", printable(name));
}

std::vector<int> make_routing(const plan::moe::Problem& p, int64_t tokens, RoutingPattern pattern, uint64_t seed) {
  Random random(seed);
  const auto experts = static_cast<size_t>(p.experts);
  std::vector<int> all(experts), ids;
  for (size_t e = 0; e < experts; ++e) all[e] = static_cast<int>(e);
  std::vector<double> below(experts);  // cumulated weights
  double sum = 0;
  for (size_t e = 0; e < experts; ++e) below[e] = sum += 1 / static_cast<double>(e + 1);
  ids.reserve(static_cast<size_t>(tokens * p.picks_per_token()));
  for (int64_t t = 0; t < tokens; ++t) {
    const size_t first = ids.size();
    for (int64_t k = 0; k < p.top_k; ++k) {
      if (pattern == RoutingPattern::kUniform) {
        std::swap(all[static_cast<size_t>(k)],
                  all[static_cast<size_t>(k) + random.below(experts - static_cast<size_t>(k))]);
        ids.push_back(all[static_cast<size_t>(k)]);
        continue;
      }
      int id = -1;
      for (int attempt = 0; id < 0; ++attempt) {
        const auto at = std::lower_bound(below.begin(), below.end(), random.uniform() * sum);
        id = static_cast<int>(std::min<std::ptrdiff_t>(at - below.begin(), static_cast<std::ptrdiff_t>(experts) - 1));
        // A choice must be new; the rare expert that is left over is found by counting on.
        for (int step = 0; std::find(ids.begin() + static_cast<std::ptrdiff_t>(first), ids.end(), id) != ids.end();
             ++step) {
          if (attempt < 64) {
            id = -1;
            break;
          }
          id = (id + 1) % static_cast<int>(experts);
        }
      }
      ids.push_back(id);
    }
    for (int64_t s = 0; s < p.shared_slices(); ++s) ids.push_back(static_cast<int>(p.experts + s));
  }
  return ids;
}

struct LayerBench::State {
  ExpertKernels& kernels;
  const Device& device;
  Stream stream;
  Event start, stop;
  ExpertWorkspace workspace;
  std::vector<std::unique_ptr<ExpertWeights>> copies;
  int64_t tokens = 0, layers = 0;
  Buffer x, ids, router, out;

  State(ExpertKernels& k, int64_t max_tokens)
      : kernels(k),
        device(*k.context().device),
        stream(device),
        start(device),
        stop(device),
        workspace(k.context(), max_tokens) {}

  const plan::moe::Problem& problem() const { return kernels.problem(); }

  double touched_bytes(int64_t batch) const {
    plan::moe::Problem p = problem();
    p.tokens = batch;
    return plan::moe::touched_experts(p) *
           static_cast<double>(ExpertWeights::gate_up_bytes(p) + ExpertWeights::down_bytes(p));
  }
  double cold_bytes() const { return std::max(kColdBytes, 3.0 * static_cast<double>(device.info().l2_bytes)); }

  void make_weights() {
    const plan::moe::Problem& p = problem();
    const BenchKernels fill(kernels.loader());
    copies.push_back(std::make_unique<ExpertWeights>(kernels.context()));
    const auto elements = static_cast<uint64_t>(p.hidden * p.intermediate);
    // Checkpoint form of some experts at a time, on the device.
    const auto portion = static_cast<int64_t>(
        std::clamp<uint64_t>((512ull << 20) / elements, 1, static_cast<uint64_t>(p.all_experts())));
    const uint64_t code_bytes = elements / 2 * static_cast<uint64_t>(portion),
                   scale_bytes = elements / 16 * static_cast<uint64_t>(portion);
    const Buffer codes(device, 3 * code_bytes, "random weights"), scales(device, 3 * scale_bytes, "random weights");
    for (int64_t at = 0; at < p.all_experts(); at += portion) {
      const int64_t count = std::min(portion, p.all_experts() - at);
      const auto seed = static_cast<uint64_t>(at) << 36;
      launch(stream, fill.fill_codes, {4096, 1}, Overlap::kNone, codes.address(), uint64_t{3 * code_bytes / 4}, seed);
      launch(stream, fill.fill_scales, {4096, 1}, Overlap::kNone, scales.address(), uint64_t{3 * scale_bytes}, seed);
      ExpertWeights::DeviceExperts experts = {};
      experts.code_bytes = static_cast<int64_t>(elements / 2);
      experts.scale_bytes = static_cast<int64_t>(elements / 16);
      Nvfp4Matrix* const to[3] = {&experts.gate, &experts.up, &experts.down};
      for (uint64_t m = 0; m < 3; ++m) {
        *to[m] = contiguous(codes.as<uint8_t>() + m * code_bytes, scales.as<uint8_t>() + m * scale_bytes, 1,
                            m == 2 ? p.intermediate : p.hidden);
      }
      copies[0]->repack(stream, at, count, experts);
    }
    Random random(3);
    std::vector<float> gate_up, down;
    const float rms = 2.9f * 1.2f;
    for (int64_t e = 0; e < p.all_experts(); ++e) {
      for (int i = 0; i < p.operands(plan::moe::Pass::kGateUp); ++i) {
        gate_up.push_back(static_cast<float>(random.uniform(0.8, 1.2)) /
                          (rms * std::sqrt(static_cast<float>(p.hidden))));
      }
      down.push_back(static_cast<float>(random.uniform(0.8, 1.2)) /
                     (rms * std::sqrt(static_cast<float>(p.intermediate))));
    }
    copies[0]->set_scales(stream, gate_up, down);
    // x has variance 1 and no value beyond 3.5; h is about as large.
    copies[0]->set_input_scales(stream, std::vector<float>(gate_up.size(), 3.5f / 2688),
                                std::vector<float>(down.size(), 4.0f / 2688));
  }

  void make_copies() {
    const double wanted = std::ceil(cold_bytes() / touched_bytes(1)) + 1;
    const double fit = kMemoryShare * static_cast<double>(device.memory().free) /
                       static_cast<double>(std::max<uint64_t>(1, copies[0]->bytes()));
    const auto count = static_cast<int64_t>(std::clamp(std::min(wanted, fit + 1), 1.0, double{kMostCopies}));
    while (static_cast<int64_t>(copies.size()) < count) {
      copies.push_back(std::make_unique<ExpertWeights>(kernels.context()));
      copies.back()->copy_from(stream, *copies[0]);
    }
    stream.synchronize();
  }
};

LayerBench::LayerBench(ExpertKernels& kernels, int64_t max_tokens)
    : state_(std::make_unique<State>(kernels, max_tokens)) {
  state_->make_weights();
  state_->make_copies();
}
LayerBench::~LayerBench() = default;

bool LayerBench::cold(int64_t tokens) const {
  const auto used = static_cast<int64_t>(state_->copies.size());
  return static_cast<double>(used - 1) * state_->touched_bytes(tokens) >= state_->cold_bytes();
}

LayerBench::Work LayerBench::prepare(int64_t tokens, RoutingPattern pattern) {
  State& s = *state_;
  const plan::moe::Problem& p = s.problem();
  FF_ASSERT(tokens >= 1 && tokens <= s.workspace.max_tokens());
  s.tokens = tokens;
  // No copy is left out, so that the distance between two uses of one is what cold() says.
  s.layers = round_up(layers_for(tokens), tokens <= 64 ? static_cast<int64_t>(s.copies.size()) : 1);
  const auto picks = static_cast<size_t>(tokens * p.picks_per_token());
  const auto elements = static_cast<uint64_t>(tokens * p.hidden);
  s.x = Buffer(s.device, elements * 2, "hidden states");
  s.out = Buffer(s.device, elements * 2, "output");
  s.ids = Buffer(s.device, picks * 4 * static_cast<size_t>(s.layers), "expert ids");
  s.router = Buffer(s.device, picks * 4 * static_cast<size_t>(s.layers), "router weights");
  const BenchKernels fill(s.kernels.loader());
  launch(s.stream, fill.fill_rows, {1024, 1}, Overlap::kNone, s.x.address(), uint64_t{elements}, uint64_t{42});
  Work work;
  const double each = static_cast<double>(ExpertWeights::gate_up_bytes(p) + ExpertWeights::down_bytes(p));
  const std::vector<float> weights(picks, 1.0f / static_cast<float>(p.picks_per_token()));
  for (int64_t layer = 0; layer < s.layers; ++layer) {
    const auto ids = make_routing(p, tokens, pattern, 1000 + static_cast<uint64_t>(layer));
    std::vector<char> used(static_cast<size_t>(p.all_experts()));
    for (const int id : ids) used[static_cast<size_t>(id)] = 1;
    work.touched += static_cast<double>(std::count(used.begin(), used.end(), 1)) / static_cast<double>(s.layers);
    s.ids.upload(s.stream, ids.data(), picks * 4, picks * 4 * static_cast<size_t>(layer));
    s.router.upload(s.stream, weights.data(), picks * 4, picks * 4 * static_cast<size_t>(layer));
  }
  work.weight_bytes = work.touched * each;
  work.bytes = work.weight_bytes + 2.0 * static_cast<double>(elements) * 2;
  work.flops = 2.0 * static_cast<double>(picks) * static_cast<double>(p.hidden * p.intermediate) * (p.gated() ? 3 : 2);
  s.stream.synchronize();
  return work;
}

double LayerBench::time(const PlannedPair& pair, int replays) {
  State& s = *state_;
  const auto picks = static_cast<uint64_t>(s.tokens * s.problem().picks_per_token());
  const Graph graph(s.stream, [&] {
    for (int64_t layer = 0; layer < s.layers; ++layer) {
      const auto at = static_cast<uint64_t>(layer) * picks * 4;
      launch_layer(s.stream, s.kernels.context(), pair, s.workspace,
                   *s.copies[static_cast<size_t>(layer) % s.copies.size()],
                   {s.x.address(), s.ids.address() + at, s.router.address() + at, s.out.address(), s.tokens});
    }
  });
  std::vector<double> times;
  for (int i = 0; i < replays + kWarmups; ++i) {
    if (s.tokens >= kPauseFrom) std::this_thread::sleep_for(kPause);
    const double us = timed(s.stream, s.start, s.stop, [&] { graph.launch(s.stream); });
    if (i >= kWarmups) times.push_back(us / static_cast<double>(s.layers));
  }
  return median(times);
}

}  // namespace fourfold::measure
