// A model whose layers are split over several ranks of this process (docs/ranks.md): as a Model it is like any other,
// and nobody above it knows.
#pragma once

#include <functional>
#include <memory>

#include "model/model.h"
#include "ranks/group.h"

namespace fourfold::model {

// Makes the backend of a rank, on the rank's thread; null: of a model that is not split.
using BackendFactory = std::function<std::shared_ptr<ops::Backend>(const std::shared_ptr<ranks::Member>& member)>;

struct RankOptions {
  int64_t ranks = 1;
  bool by_expert = false;  // experts are shared out whole
  std::chrono::milliseconds patience = ranks::kPatience;
};

// Like load_model() of model.h, on backends of its own; with one rank it is that. `options.shard` is set here.
//
// Steps run on all ranks, each on its stepper's thread; a step's outcome is rank 0's, and an Error where another rank
// came to something else. When a rank fails, or does not come to a meeting (Group), the step fails with the cause, and
// so does every later one; a rank that never comes back is waited for when the stepper is destroyed.
std::unique_ptr<Model> load_model(WeightSource& source, const BackendFactory& make_backend, const RankOptions& ranks,
                                  ModelOptions options);

}  // namespace fourfold::model
