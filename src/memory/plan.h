// How much of a card's memory a model, its caches and its steps take: known before anything is allocated, from the
// shapes and formats of the weights. The model is built as it will be, on a backend that counts instead of allocating
// (cuda::make_counting_backend), so the plan has no formulas of its own. A model of several ranks is built as one, each
// rank on a backend of its own, and every rank must fit on its card.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/json_forward.h"
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
  int64_t ranks = 1;       // that the model is split over
  bool by_expert = false;  // ranks have whole experts
  // Other caches beside the engine's, as `bench model` has them.
  int64_t more_pages = 0, more_slots = 0;
};

// The card of each rank, in order; ranks may share one: the same number then. Or one entry for cards that are alike,
// one for each rank.
using Cards = std::vector<cuda::CardMemory>;

struct Plan {
  struct Item {
    std::string name;
    uint64_t bytes = 0;
    std::string note;  // what it is made of
  };
  // What a rank takes of its card.
  struct Share {
    std::string card;
    int device = 0;                  // its number
    uint64_t total = 0, in_use = 0;  // of the card, bytes; in use before anything of the plan
    uint64_t others = 0;             // that other ranks of the plan take of the same card
    double utilization = kUtilization;
    std::vector<Item> items;  // those that have any bytes
    uint64_t planned = 0;     // all items

    uint64_t budget() const;  // that the share may take
    bool fits() const { return planned <= budget(); }
    uint64_t left() const { return fits() ? budget() - planned : 0; }
  };
  std::vector<Share> ranks;      // in order
  engine::EngineOptions engine;  // with everything that follows from other options (engine::resolve)
  // Of a position and of a state, on the card that has most of them.
  uint64_t token_bytes = 0, state_bytes = 0;
  // What the longest step may take, behind a context that is full when it ends, at a third of the matrix rate that the
  // slowest card keeps up, with wgmma at half of it: attention reaches 0.39 and 0.86 (docs/plan.md, "Prices").
  double longest_step_seconds = 0;

  // The one that has least left.
  const Share& tightest() const;
  uint64_t planned() const { return tightest().planned; }
  uint64_t budget() const { return tightest().budget(); }
  bool fits() const { return tightest().fits(); }
  uint64_t left() const { return tightest().left(); }
};

// An Error where the options contradict each other or the model.
Plan plan(const Demand& demand, const Cards& cards, double utilization = kUtilization);

// The table of the rank that has least left, and a line for each other one.
std::string text(const Plan& plan);
// {card, total, in_use, utilization, budget, planned, left, items[{name, bytes, note}]} of that rank, and with several
// ranks[{rank, device, card, total, in_use, budget, planned, left, items}].
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
Plan require(const Demand& demand, const Cards& cards, double utilization = kUtilization);

// A card of the planner's table as its maker describes it, with nothing in use but a context.
cuda::CardMemory published_card(const plan::Gpu& gpu);

// Tokens of a step at most, on a card that has room for it: 35B-A3B's prompts are a fifth faster than in steps of
// 2,048.
inline constexpr int64_t kCardStepTokens = 8192;
// Sequences on a card, as a rule and where there is room for them: 256 of 35B-A3B make 1.8 times as many tokens as 64.
inline constexpr int64_t kUsualCardSequences = 64, kCardSequences = 256;

// What was asked for; 0: the largest that is sensible and fits.
struct Wishes {
  int64_t context = 0, sequences = 0, cache_tokens = 0, step_tokens = 0;
  int64_t most_step_tokens = kCardStepTokens;  // that are sensible
};
// The largest sensible sizes: as many sequences as `usual_sequences` (halved until they fit), a context of all
// positions of the model (halved until it fits), steps of `most_step_tokens` (halved until they take an eighth at most
// of what those of the demand's engine leave, and the longest half of the time after which a step is given up), up to
// kCardSequences (doubled while they and the least cache for them take a third at most of what is left), as many rows
// for prompts that report as the demand's engine has, where they take an eighth at most of what is left (otherwise 32),
// and a cache that fills the rest, at most a full context for each sequence. What was asked for is kept or refused as
// by require().
Plan largest(Demand demand, const Wishes& wishes, int64_t usual_sequences, int64_t positions, const Cards& cards,
             double utilization = kUtilization);

}  // namespace fourfold::memory
