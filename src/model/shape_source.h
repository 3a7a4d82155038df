// The shapes and formats of a model's weights as a source without weights: matrices have no data (null), vectors are
// zeros. For backends that only count what a model takes.
#pragma once

#include <memory>

#include "model/checkpoint.h"
#include "model/random_weights.h"
#include "model/weight_source.h"

namespace fourfold::model {

// Of a checkpoint, of which nothing but headers is read; it must outlive the source. The experts of a layer count as
// the first one of it.
std::unique_ptr<WeightSource> shapes_of(Checkpoint& checkpoint);
// Of make_random_weights(); with `fp8_blocks` FP8 matrices have a scale for each block of 128 x 128 instead of one.
std::unique_ptr<WeightSource> shapes_of(const ModelConfig& config, FormatOf formats, bool fp8_blocks = false);

}  // namespace fourfold::model
