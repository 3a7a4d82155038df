#include "chat/sampling.h"

#include <algorithm>

namespace fourfold::chat {
namespace {

void set(float& field, const std::optional<double>& value) {
  if (value) field = static_cast<float>(*value);
}

}  // namespace

engine::SamplingParams recommended_sampling(const model::GenerationConfig& config) {
  engine::SamplingParams sampling;
  const bool recommended = config.temperature || config.top_k || config.top_p || config.min_p;
  if (!config.do_sample.value_or(recommended)) sampling.temperature = 0;
  if (sampling.temperature != 0) set(sampling.temperature, config.temperature);
  set(sampling.top_p, config.top_p);
  set(sampling.min_p, config.min_p);
  set(sampling.repetition_penalty, config.repetition_penalty);
  set(sampling.presence_penalty, config.presence_penalty);
  set(sampling.frequency_penalty, config.frequency_penalty);
  // -1 turns it off, as 0 does.
  if (config.top_k) sampling.top_k = static_cast<int32_t>(std::clamp<int64_t>(*config.top_k, 0, 1 << 24));
  return sampling;
}

engine::SamplingParams SamplingChoice::over(engine::SamplingParams sampling) const {
  const bool asked = temperature || top_k || top_p || min_p;
  if (asked && sampling.temperature == 0) sampling.temperature = 1;
  set(sampling.temperature, temperature);
  set(sampling.top_p, top_p);
  set(sampling.min_p, min_p);
  set(sampling.repetition_penalty, repetition_penalty);
  set(sampling.presence_penalty, presence_penalty);
  set(sampling.frequency_penalty, frequency_penalty);
  if (top_k) sampling.top_k = *top_k;
  if (seed) sampling.seed = *seed;
  return sampling;
}

}  // namespace fourfold::chat
