#include "measure/way_tuner.h"

#include <algorithm>

#include "base/check.h"
#include "cuda/backend/cuda_backend.h"

namespace fourfold::measure {

std::vector<TunedMatrix> tune_products(ops::Backend& backend, const std::vector<std::function<void()>>& steps,
                                       const WayTunerOptions& options) {
  auto& card = dynamic_cast<cuda::CudaBackend&>(backend);
  const auto time = [&] {
    std::vector<double> us;
    for (const auto& step : steps) us.push_back(card.time_step(step, options.rounds, options.replays));
    return us;
  };
  cuda::MeasuredWays ways;
  card.take_ways(ways);
  time();  // which matrices there are
  std::vector<TunedMatrix> tuned;
  std::vector<cuda::RowsWay> all;
  size_t count = 0, done = 0;
  std::vector<std::vector<cuda::RowsWay>> candidates;
  for (const cuda::MatrixShape& shape : card.matrices()) {
    candidates.push_back(options.candidates ? options.candidates(shape) : way_candidates(card.target(), shape));
    FF_ASSERT(!candidates.back().empty());
    all.insert(all.end(), candidates.back().begin(), candidates.back().end());
    tuned.push_back({shape, {}, 0});
    count += candidates.back().size();
  }
  card.load_kernels(all);
  for (size_t i = 0; i < tuned.size(); ++i) {
    TunedMatrix& matrix = tuned[i];
    for (const cuda::RowsWay& way : candidates[i]) {
      ways[matrix.shape] = way;
      card.take_ways(ways);
      MeasuredWay measured = {way, time(), 0};
      const std::vector<double>& planned = matrix.measured.empty() ? measured.us : matrix.measured[0].us;
      for (size_t s = 0; s < steps.size(); ++s) {
        measured.share += measured.us[s] / planned[s] / static_cast<double>(steps.size());
      }
      matrix.measured.push_back(std::move(measured));
      if (options.progress) options.progress(++done, count);
    }
    std::vector<size_t> order;
    for (size_t k = 1; k < matrix.measured.size(); ++k) {
      if (matrix.measured[k].share <= 1 - options.least_gain) order.push_back(k);
    }
    std::sort(order.begin(), order.end(),
              [&](size_t a, size_t b) { return matrix.measured[a].share < matrix.measured[b].share; });
    for (const size_t k : order) {
      if (!card.test_way(matrix.measured[k].way).empty()) continue;
      matrix.best = k;
      break;
    }
    ways[matrix.shape] = matrix.measured[matrix.best].way;
  }
  // Only what differs from the list.
  for (const TunedMatrix& matrix : tuned) {
    if (matrix.best == 0) ways.erase(matrix.shape);
  }
  card.take_ways(ways);
  return tuned;
}

}  // namespace fourfold::measure
