// What copies between two cards reach.
#pragma once

#include <cstdint>

namespace fourfold::measure {

// Bytes a second of the best of a few copies of 256 MB from one card's memory into the other's: alone, and while as
// much goes the other way.
struct LinkRate {
  double one_way = 0, each_of_both = 0;
};
// Of devices `a` and `b`, not the same. Error where the driver has no access between them.
LinkRate measure_link(int a, int b);

}  // namespace fourfold::measure
