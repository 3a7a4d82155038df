#include "nvfp4/input_scales.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace fourfold::nvfp4 {
namespace {

TEST(InputScales, GateAndUpShareTheLargest) {
  const auto scales =
      layer_input_scales(std::vector<float>{0.01f, 0.03f, 0.02f, 0.0f}, std::vector<float>{0.5f, 0.25f});
  ASSERT_TRUE(scales.has_value());
  EXPECT_EQ(scales->gate_up, 0.03f);
  EXPECT_EQ(scales->down, (std::vector<float>{0.5f, 0.25f}));
  EXPECT_EQ(scales->replaced, 0);
}

TEST(InputScales, WhatCalibrationDidNotReachTakesTheLargest) {
  const float nan = std::numeric_limits<float>::quiet_NaN(), infinity = std::numeric_limits<float>::infinity();
  const std::vector<float> down{0.0f, 0.25f, nan, infinity, -1.0f, 1e-40f, 0.5f, 3e38f};
  const auto scales = layer_input_scales(std::vector<float>{0.01f}, down);
  ASSERT_TRUE(scales.has_value());
  EXPECT_EQ(scales->down, (std::vector<float>{0.5f, 0.25f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f}));
  EXPECT_EQ(scales->replaced, 6);
  for (const float scale : scales->down) EXPECT_TRUE(std::isnormal(1.0f / scale));
}

TEST(InputScales, WithoutAnyThereIsNoFp4Layer) {
  EXPECT_FALSE(layer_input_scales({}, {}).has_value());
  EXPECT_FALSE(layer_input_scales(std::vector<float>{0.0f}, std::vector<float>{0.5f}).has_value());
  EXPECT_FALSE(layer_input_scales(std::vector<float>{0.5f}, std::vector<float>{0.0f, 1e-42f}).has_value());
}

TEST(InputScales, TheSmallestAndTheLargestUsable) {
  EXPECT_TRUE(usable_input_scale(std::numeric_limits<float>::min()));
  EXPECT_FALSE(usable_input_scale(std::nextafter(std::numeric_limits<float>::min(), 0.0f)));
  EXPECT_TRUE(usable_input_scale(8e37f));
  EXPECT_TRUE(std::isnormal(1.0f / 8e37f));
}

}  // namespace
}  // namespace fourfold::nvfp4
