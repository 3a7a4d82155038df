#include "cmd/tune_products.h"

#include <fmt/format.h>

#include "base/check.h"
#include "base/json.h"
#include "base/progress.h"
#include "cmd/card_steps.h"
#include "cuda/backend/measured_ways.h"
#include "cuda/device/device.h"
#include "measure/way_tuner.h"

namespace fourfold::cmd {
namespace {

std::string name_of(const cuda::RowsWay& way) {
  return fmt::format("{} x {} warps, {} slots, {} to an SM{}", way.teams, way.strip_warps, way.slots, way.ctas,
                     way.norm_pieces > 0 ? ", norm in front" : "");
}

Json row_of(const measure::MeasuredWay& m) { return {{"way", name_of(m.way)}, {"us", m.us}, {"share", m.share}}; }

}  // namespace

void tune_products(const TuneProducts& o) {
  for (const int64_t rows : o.rows) {
    if (rows > 16) fail("--tokens {}: with --products wanted 1 to 16", rows);
  }
  const CardModel wanted = {o.model, o.mix, o.layers, o.gpu.device, o.gpu.threads};
  const chat::LoadedModel loaded = wanted.load(o.rows.back());
  model::Model& model = *loaded.model;
  std::vector<measure::TunedMatrix> tuned;
  {
    CardSteps steps(model, o.rows, o.context);
    std::vector<std::function<void()>> forwards;
    for (const int64_t rows : o.rows) forwards.emplace_back([&steps, rows] { steps.take(rows); });
    measure::WayTunerOptions options;
    options.replays = o.gpu.replays;
    std::unique_ptr<Progress> progress;
    options.progress = [&](size_t done, size_t all) {
      if (progress == nullptr) progress = std::make_unique<Progress>("measuring", all, "ways");
      progress->advance(1);
      if (done == all) progress->finish();
    };
    tuned = measure::tune_products(model.backend(), forwards, options);
  }
  const cuda::Device& device = cuda::device_of(model.backend());
  std::string path;
  if (!o.dry) {
    const std::filesystem::path store = o.gpu.store_directory();
    const std::string identity = cuda::ways_identity(device.info().name, device.driver().version());
    cuda::MeasuredWays ways = cuda::load_ways(store, identity, plan::arch_of(device.gpu()));
    for (const measure::TunedMatrix& matrix : tuned) {
      ways.erase(matrix.shape);
      if (matrix.best > 0) ways[matrix.shape] = matrix.measured[matrix.best].way;
    }
    path = cuda::save_ways(store, identity, ways).string();
  }
  if (o.json) {
    Json list = Json::array();
    for (const measure::TunedMatrix& matrix : tuned) {
      Json measured = Json::array();
      for (const measure::MeasuredWay& m : matrix.measured) measured.push_back(row_of(m));
      list.push_back({{"formats", matrix.shape.formats},
                      {"rows", matrix.shape.rows},
                      {"columns", matrix.shape.columns},
                      {"planned", row_of(matrix.measured[0])},
                      {"best", row_of(matrix.measured[matrix.best])},
                      {"measured", std::move(measured)}});
    }
    fmt::print("{}\n", Json{{"device", device.info().name},
                            {"model", loaded.name},
                            {"tokens", o.rows},
                            {"matrices", std::move(list)},
                            {"stored", path}}
                           .dump(1, ' ', false, Json::error_handler_t::replace));
    return;
  }
  fmt::print("{}: {}\nsteps of {} sequences after {} positions, us each; a share of 0.99 is 1 % of the whole step\n",
             device.info().name, loaded.name, fmt::join(o.rows, ", "), o.context);
  for (const measure::TunedMatrix& matrix : tuned) {
    const auto line = [&](const char* what, const measure::MeasuredWay& m) {
      fmt::print("  {:<8} {:<40} {:.4f}  {:.1f}\n", what, name_of(m.way), m.share, fmt::join(m.us, " "));
    };
    fmt::print("{} x {}, formats {}, {} ways measured\n", matrix.shape.rows, matrix.shape.columns, matrix.shape.formats,
               matrix.measured.size());
    line("planned", matrix.measured[0]);
    if (matrix.best > 0) line("best", matrix.measured[matrix.best]);
    if (!o.all) continue;
    for (size_t i = 1; i < matrix.measured.size(); ++i) line("", matrix.measured[i]);
  }
  if (!path.empty()) fmt::print("stored in {}\n", path);
}

}  // namespace fourfold::cmd
