#include "cmd/bench_kernels_ops.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "base/check.h"
#include "base/console.h"
#include "cmd/bench_card.h"
#include "cuda/device/loader.h"
#include "measure/ceilings.h"
#include "model/checkpoint.h"
#include "model/shape_source.h"
#include "predict/step.h"

namespace fourfold::cmd {
namespace {

using Kernels = std::map<std::string, std::vector<std::string>>;  // by operation

// What `plan --step` launches in such a step, and what it says that takes.
std::optional<plan::step::StepPlan> predict(const CardModel& model, const plan::Gpu& card,
                                            const plan::step::Shape& shape, Kernels& kernels) {
  predict::Request request = {.shapes = {}, .shape = shape, .gpu = card};
  try {
    std::shared_ptr<model::Checkpoint> checkpoint;
    if (model.is_directory()) checkpoint = std::make_shared<model::Checkpoint>(model.model);
    request.shapes = [&]() -> std::unique_ptr<model::WeightSource> {
      if (checkpoint != nullptr) return model::shapes_of(*checkpoint);
      return model::shapes_of(dummy_config(model.dummy()), dummy_formats(model.dummy()));
    };
    const predict::Launched launched = predict::launched_by(request);
    for (const plan::step::Work& work : launched.works) {
      std::vector<std::string>& all = kernels[work.name];
      for (const plan::step::Launch& launch : work.launches) {
        if (std::find(all.begin(), all.end(), launch.kernel) == all.end()) all.push_back(launch.kernel);
      }
    }
    return add_up(launched.works, shape, card);
  } catch (const Error& error) {
    warn(fmt::format("no prediction: {}", error.what()));
    return std::nullopt;
  }
}

}  // namespace

void bench_operations(const CardModel& model, const std::vector<int64_t>& rows, int64_t context, bool json) {
  const chat::LoadedModel loaded = model.load(rows.back());
  CardFigures figures;
  figures.model = loaded.name;
  figures.backend = loaded.model->backend().description();
  figures.load_seconds = loaded.seconds;
  const cuda::Device& device = cuda::device_of(loaded.model->backend());
  CardSteps steps(*loaded.model, rows, context);
  std::vector<Kernels> kernels;
  for (const int64_t count : rows) {
    const bool prompt = CardSteps::is_prompt(count);
    std::optional<ops::OperationTimes> times = steps.time(count);
    if (!times) fail("{} does not time its operations", figures.backend);
    figures.steps.push_back({prompt ? fmt::format("a prompt of {} tokens", count)
                                    : fmt::format("a token for each of {} sequences after {}", count, context),
                             count, *std::move(times)});
    figures.steps.back().predicted =
        predict(model, device.gpu(), {.tokens = count, .context = prompt ? 0 : context, .prefill = prompt},
                kernels.emplace_back());
  }
  {
    const cuda::Device card(model.device);
    jit::KernelStore store(jit::default_store_directory());
    cuda::KernelLoader loader(card, store, {});
    figures.ceilings = measure::measure_ceilings(loader);
  }
  if (json) {
    Json out = card_json(figures);
    for (size_t i = 0; i < kernels.size(); ++i) {
      for (Json& operation : out["steps"][i]["operations"]) {
        operation["kernels"] = kernels[i][operation["name"].get<std::string>()];
      }
    }
    fmt::print("{}\n", out.dump(1, ' ', false, Json::error_handler_t::replace));
    return;
  }
  print_card(figures);
  for (size_t i = 0; i < kernels.size(); ++i) {
    fmt::print("\nkernels of {}\n", figures.steps[i].title);
    for (const ops::OperationTime& op : figures.steps[i].times.operations) {
      for (const std::string& kernel : kernels[i][op.name]) fmt::print("  {:<28} {}\n", op.name, kernel);
    }
  }
}

}  // namespace fourfold::cmd
