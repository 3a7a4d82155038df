// Ranks compare what they have added up, when they are asked to: after every so many steps each shows a checksum of its
// last sums, which have the same bits everywhere. What went wrong in one rank's memory, or on its way there, is found
// before anybody's tokens differ.
#pragma once

#include <cstdint>
#include <memory>

#include "ops/tensor.h"
#include "ranks/group.h"

namespace fourfold::ranks {

class SumChecks {
 public:
  // `every`: steps from one check to the next, at least 1.
  SumChecks(std::shared_ptr<Member> member, int64_t every);

  // A step has ended; true: with a check. The same on all ranks.
  bool due();
  // A meeting. Error, on all ranks, where they do not have the same.
  void compare(uint64_t checksum);

 private:
  std::shared_ptr<Member> member_;
  int64_t every_;
  int64_t steps_ = 0;
};

// Of the bits of rows of fp32 in host memory.
uint64_t checksum_of(const ops::Tensor& rows);

}  // namespace fourfold::ranks
