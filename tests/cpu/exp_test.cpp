// The one exponential function, as sources without special flags have it.
#include "cpu/simd/exp.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace fourfold::cpu {
namespace {

float exp_of(float x) { return exp_in_range(Scalar{x}).v; }

TEST(Exp, IsWithinTwoUnitsInTheLastPlace) {
  for (float x = -87.3f; x <= 88.3f; x += 0.00731f) {
    const double wanted = std::exp(static_cast<double>(x));
    ASSERT_NEAR(exp_of(x) / wanted, 1.0, 2.4e-7) << x;
  }
  EXPECT_EQ(exp_of(0.0f), 1.0f);
}

TEST(Exp, WhatWouldBeDenormalIsZeroAndNanStays) {
  EXPECT_EQ(exp_of(-88.0f), 0.0f);
  EXPECT_TRUE(std::isnan(exp_of(std::numeric_limits<float>::quiet_NaN())));
}

}  // namespace
}  // namespace fourfold::cpu
