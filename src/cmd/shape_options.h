// The options by which commands name a card and an expert layer's shape.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "cmd/arguments.h"
#include "plan/arch.h"
#include "plan/moe/problem.h"

namespace fourfold::cmd {

struct ShapeOptions {
  std::string gpu, arch, model;
  std::optional<int64_t> experts, top_k, hidden, intermediate;
  int64_t ranks = 1;
  std::string activations = "bf16", weights = "nvfp4", activation, shared = "none";

  // Both of these. `directories`: --model may be a checkpoint's.
  void add_to(Command& command, bool directories = false);
  void add_card_to(Command& command);
  void add_shape_to(Command& command, bool directories = false);
  // The card named by --gpu, or the fastest of --arch, or an H200 when neither is given; Error when both contradict.
  const plan::Gpu& card() const;
  // Whether a model or sizes were given at all.
  bool any_shape() const { return !model.empty() || experts || top_k || hidden || intermediate; }
  // Whether anything about the expert layer was said beside the model.
  bool any_detail() const {
    return experts || top_k || hidden || intermediate || !activation.empty() || activations != "bf16" ||
           weights != "nvfp4" || shared != "none";
  }
  // The shape; its tokens are left 0. Error when neither a model nor a whole shape is given.
  plan::moe::Problem problem() const;
};

}  // namespace fourfold::cmd
