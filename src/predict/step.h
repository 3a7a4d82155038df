// A step of a model on a card that is not here, predicted: the model is built as it will be on a backend that counts
// (cuda::make_counting_backend), one step goes through its stepper, and what would have been launched is priced
// (plan/step). So the operations, their sizes and their kernels are those of the backend, and nothing lists them twice.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "model/random_weights.h"
#include "model/weight_source.h"
#include "plan/step/step.h"

namespace fourfold::predict {

// How a model of that mix stores its weights.
model::FormatOf formats_of(const plan::step::Mix& mix);

struct Request {
  // Shapes and formats (model/shape_source.h), with the MTP head where the shape has drafts.
  std::function<std::unique_ptr<model::WeightSource>()> shapes;
  plan::step::Shape shape;
  plan::Gpu gpu;
};

// All that rank 0 launches in one step, in order. Error where the model has no such step: drafts without an MTP head,
// more positions than it has, ranks that do not divide it.
struct Launched {
  std::vector<plan::step::Work> works;
  uint64_t weight_bytes = 0;  // on the rank that has most
};
Launched launched_by(const Request& request);

// `model`, `mix`, `formats` of the plan are the caller's.
plan::step::StepPlan predict(const Request& request);

}  // namespace fourfold::predict
