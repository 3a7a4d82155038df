// What the options of an engine come to: checked against the model and each other, defaults filled in, everything
// sized.
#pragma once

#include <cstdint>

#include "engine/engine.h"
#include "engine/prefix_cache.h"
#include "model/model.h"
#include "ops/step.h"

namespace fourfold::engine {

struct Sizes {
  ops::StepLimits step;
  int64_t pages = 0;
  int64_t slots = 0;  // of running sequences and of the prefix cache
  PrefixCacheOptions prefixes;
};

EngineOptions resolve(EngineOptions options, const model::Model& model);
Sizes sizes_of(const EngineOptions& resolved, const model::Model& model);
model::Caches make_caches(model::Model& model, const Sizes& sizes);

}  // namespace fourfold::engine
