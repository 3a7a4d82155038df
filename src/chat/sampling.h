// How tokens are chosen: what the checkpoint recommends, and what the caller asks for instead.
#pragma once

#include <cstdint>
#include <optional>

#include "engine/engine.h"
#include "model/config.h"

namespace fourfold::chat {

// Sampling as generation_config.json recommends it: greedy when do_sample is false, or when nothing is recommended.
engine::SamplingParams recommended_sampling(const model::GenerationConfig& config);

// What a caller may ask for; unset fields stay as recommended. The engine knows their limits.
struct SamplingChoice {
  std::optional<double> temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty;
  std::optional<int> top_k;
  std::optional<uint64_t> seed;

  // Who asks for top_k, top_p or min_p wants sampling, at temperature 1 where a greedy model recommends none.
  engine::SamplingParams over(engine::SamplingParams recommended) const;
};

}  // namespace fourfold::chat
