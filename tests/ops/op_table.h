// A cell of the table: an operation on a column, against the reference.
#pragma once

#include <cstdio>

#include "op_cases.h"

namespace fourfold::test {

inline void expect_agrees(const OpCase& op, const std::vector<Result>& expected, Column& column) {
  const std::vector<Result> found = op.run(column);
  ASSERT_EQ(expected.size(), found.size());
  double worst = 0;
  double tolerance = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    expect_close(expected[i], found[i], &worst);
    tolerance = std::max(tolerance, found[i].tolerance);
  }
  std::printf("worst row error %.2e, tolerance %.2e\n", worst, tolerance);
}

}  // namespace fourfold::test
