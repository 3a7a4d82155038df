// Steps of all ranks as the steps of one.
#pragma once

#include <memory>
#include <vector>

#include "ops/step.h"
#include "ranks/group.h"

namespace fourfold::model {

// Every plan goes to each of the steppers, which choose the same tokens: rank 0's outcome is the outcome. Whatever ends
// the group ends the step with its cause, within Group::patience() and a second; later steps end with it at once.
std::unique_ptr<ops::Stepper> make_ranked_stepper(std::shared_ptr<ranks::Group> group,
                                                  std::vector<std::unique_ptr<ops::Stepper>> steppers);

}  // namespace fourfold::model
