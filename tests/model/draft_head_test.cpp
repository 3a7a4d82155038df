// The matrix that drafts are chosen with: what it holds, and when there is none.
#include "model/draft_head.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <limits>
#include <vector>

#include "base/check.h"
#include "base/random.h"
#include "nvfp4/quantize.h"

namespace fourfold::model {
namespace {

std::vector<float> random_values(int64_t rows, int64_t columns) {
  Random random(5);
  std::vector<float> values(static_cast<size_t>(rows * columns));
  for (float& x : values) x = static_cast<float>(static_cast<double>(random.below(2001)) - 1000.0) / 500.0f;
  return values;
}

ops::MatrixSource matrix_of(const std::vector<float>& values, int64_t rows, int64_t columns) {
  ops::MatrixSource m;
  m.name = "lm_head";
  m.format = ops::Format::kF32;
  m.rows = rows;
  m.columns = columns;
  m.data = values.data();
  return m;
}

TEST(DraftHead, HoldsWhatNvfp4CanOfEveryRow) {
  constexpr int64_t kRows = 333, kColumns = 48;  // rows that no thread's share divides
  const std::vector<float> values = random_values(kRows, kColumns);
  const auto copy = draft_head_of(matrix_of(values, kRows, kColumns));
  ASSERT_TRUE(copy.has_value());
  EXPECT_EQ(copy->format, ops::Format::kNvfp4);
  EXPECT_EQ(copy->rows, kRows);
  EXPECT_EQ(copy->columns, kColumns);
  EXPECT_NE(copy->owner, nullptr);
  std::vector<float> row(kColumns);
  for (int64_t r = 0; r < kRows; ++r) {
    ops::dequantize(*copy, r, row.data());
    for (int64_t b = 0; b < kColumns; b += nvfp4::kBlock) {
      const float* block = values.data() + r * kColumns + b;
      float largest = 0;
      for (int i = 0; i < nvfp4::kBlock; ++i) largest = std::max(largest, std::fabs(block[i]));
      // Half of the widest step of e2m1, 4 to 6 of 6, and what rounding the scale to e4m3 adds.
      for (int i = 0; i < nvfp4::kBlock; ++i) {
        ASSERT_NEAR(row[static_cast<size_t>(b + i)], block[i], largest * (1.0f / 6 + 1.0f / 16)) << r << ' ' << b + i;
      }
    }
  }
}

TEST(DraftHead, IsThereOnlyWhereItSavesBytesAndCanBeMade) {
  std::vector<float> values = random_values(32, 48);
  ops::MatrixSource narrow = matrix_of(values, 32, 40);
  EXPECT_FALSE(draft_head_of(narrow).has_value()) << "no multiple of a block";
  ops::MatrixSource eight = matrix_of(values, 32, 48);
  eight.format = ops::Format::kFp8;
  EXPECT_FALSE(draft_head_of(eight).has_value());
  eight.format = ops::Format::kNvfp4;
  EXPECT_FALSE(draft_head_of(eight).has_value());
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    values[777] = bad;
    EXPECT_FALSE(draft_head_of(matrix_of(values, 32, 48)).has_value()) << bad;
  }
  // Of shapes alone there is the copy's shape.
  ops::MatrixSource shapes = matrix_of(values, 32, 48);
  shapes.data = nullptr;
  const auto shape = draft_head_of(shapes);
  ASSERT_TRUE(shape.has_value());
  EXPECT_EQ(shape->format, ops::Format::kNvfp4);
  EXPECT_EQ(shape->data, nullptr);
}

TEST(DraftHead, CanBeLeftOut) {
  const std::vector<float> values = random_values(32, 48);
  ::setenv("FOURFOLD_DRAFT_HEAD", "stored", 1);
  EXPECT_FALSE(draft_head_of(matrix_of(values, 32, 48)).has_value());
  for (const char* bad : {"fp8", "nvfp4:128"}) {
    ::setenv("FOURFOLD_DRAFT_HEAD", bad, 1);
    EXPECT_THROW(draft_head_of(matrix_of(values, 32, 48)), Error) << bad;
  }
  ::unsetenv("FOURFOLD_DRAFT_HEAD");
}

}  // namespace
}  // namespace fourfold::model
