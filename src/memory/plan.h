// How much of a card's memory a model, its caches and its steps take: known before anything is allocated, from the
// shapes and formats of the weights. The model is built as it will be, on a backend that counts instead of allocating
// (cuda::make_counting_backend), so the plan has no formulas of its own.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/json.h"
#include "cuda/backend/backend.h"
#include "engine/engine.h"
#include "model/model.h"
#include "model/weight_source.h"

namespace fourfold::memory {

// Of the card that may be taken where nobody says otherwise; what others have of it counts.
inline constexpr double kUtilization = 0.92;

struct Demand {
  // Shapes and formats (model/shape_source.h).
  std::function<std::unique_ptr<model::WeightSource>()> shapes;
  cuda::CudaOptions cuda;
  // Rows of a step and of its logits follow from the engine's options where they are 0.
  model::ModelOptions model = {.max_step_tokens = 0, .max_logit_rows = 0, .mtp = false, .progress = {}, .shard = {}};
  engine::EngineOptions engine;
  // The engine's cache is the smallest that is sensible for its context and sequences, whatever it says of it.
  bool least_cache = false;
  // Other caches beside the engine's, as `bench model` has them.
  int64_t more_pages = 0, more_slots = 0;
};

struct Plan {
  std::string card;
  int device = 0;                  // its number
  uint64_t total = 0, in_use = 0;  // of the card, bytes; in use before anything of the plan
  double utilization = kUtilization;
  struct Item {
    std::string name;
    uint64_t bytes = 0;
    std::string note;  // what it is made of
  };
  std::vector<Item> items;       // those that have any bytes
  uint64_t planned = 0;          // all items
  engine::EngineOptions engine;  // with everything that follows from other options (engine::resolve)
  uint64_t token_bytes = 0, state_bytes = 0;

  uint64_t budget() const;  // that the plan may take
  bool fits() const { return planned <= budget(); }
  uint64_t left() const { return fits() ? budget() - planned : 0; }
};

// An Error where the options contradict each other or the model.
Plan plan(const Demand& demand, const cuda::CardMemory& card, double utilization = kUtilization);

std::string text(const Plan& plan);
// {card, total, in_use, utilization, budget, planned, left, items[{name, bytes, note}]}
Json json(const Plan& plan);

// What does not fit, and what would.
class NotEnough : public Error {
 public:
  NotEnough(const std::string& message, std::string table) : Error(message), table_(std::move(table)) {}
  const std::string& table() const { return table_; }  // text()

 private:
  std::string table_;
};
// The plan, or NotEnough with the table and the largest values of context and sequences that fit.
Plan require(const Demand& demand, const cuda::CardMemory& card, double utilization = kUtilization);

// A card of the planner's table as its maker describes it, with nothing in use but a context.
cuda::CardMemory published_card(const plan::Gpu& gpu);

// What was asked for; 0: the largest that is sensible and fits.
struct Wishes {
  int64_t context = 0, sequences = 0, cache_tokens = 0;
};
// The largest sensible sizes: as many sequences as `most_sequences` (halved until they fit), a context of all positions
// of the model (halved until it fits), and a cache that fills the rest, at most a full context for each sequence. What
// was asked for is kept or refused as by require().
Plan largest(Demand demand, const Wishes& wishes, int64_t most_sequences, int64_t positions,
             const cuda::CardMemory& card, double utilization = kUtilization);

}  // namespace fourfold::memory
