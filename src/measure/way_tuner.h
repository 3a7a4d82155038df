// The search for the fastest ways of products of few rows (cuda/backend/sources.h) on the present card. Whole steps are
// measured: a kernel's first weights come while the one before it runs, so that what is fastest by itself need not be
// what makes the step shortest.
#pragma once

#include <functional>
#include <vector>

#include "cuda/backend/sources.h"
#include "ops/ops.h"

namespace fourfold::measure {

struct MeasuredWay {
  cuda::RowsWay way;
  std::vector<double> us;  // of each step
  double share = 1;        // of the planned way's times, the mean
};

struct TunedMatrix {
  cuda::MatrixShape shape;
  std::vector<MeasuredWay> measured;  // the list's own first
  size_t best = 0;
};

struct WayTunerOptions {
  int rounds = 3, replays = 20;
  double least_gain = 0.01;  // of the steps, for another way than the list's
  // What to measure for a matrix, the list's own way first; empty: cuda::way_candidates().
  std::function<std::vector<cuda::RowsWay>(const cuda::MatrixShape&)> candidates = {};
  std::function<void(size_t done, size_t all)> progress = {};
};

// `steps` take a step each, of at most 16 rows, on this backend of a card. One matrix after the other, the winners of
// those before in place; what fails its self-test does not win. The backend keeps the winners.
std::vector<TunedMatrix> tune_products(ops::Backend& backend, const std::vector<std::function<void()>>& steps,
                                       const WayTunerOptions& options);

}  // namespace fourfold::measure
