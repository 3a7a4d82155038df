// A whole step of a model on cards that are not here: each operation that a backend would launch (work.h) with its
// floor and a predicted time, added up. Expert layers come from the planner itself (plan/moe); the other operations
// from cost models that were fitted to kernels measured on an H200 (cost.cpp) and are carried to other cards by
// bandwidth, clock, SMs and the cost of a node: predictions, not measurements.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "plan/arch.h"
#include "plan/moe/problem.h"
#include "plan/step/work.h"

namespace fourfold::plan::step {

enum class Format { kNvfp4, kFp8, kBf16 };

// Formats by part of the model, as published checkpoints mix them.
struct Mix {
  std::string_view name, title;
  Format experts, shared, attention, delta, head;
};
// "A", "B", "C"; an Error that lists them otherwise.
const Mix& find_mix(std::string_view name);
std::string mix_names();
std::span<const Mix> mixes();

// How the ranks of a tensor-parallel model reach each other.
enum class Link { kNvlink, kPeer, kHost };
std::string_view to_string(Link link);
Link find_link(std::string_view name);  // "nvlink", "pcie", "host"
Link link_of(const Gpu& gpu);           // several such cards of one host: NVLink where they have it, else PCIe

struct Shape {
  int64_t tokens = 1;     // sequences of a decode step; with `prefill` the tokens of one sequence
  int64_t context = 128;  // positions before these
  bool prefill = false;
  int64_t drafts = 0;  // of the MTP head for each sequence: the trunk verifies drafts + 1 rows
  bool fp8_cache = false;
  int64_t ranks = 1;
  Link link = Link::kNvlink;
  bool by_expert = false;  // ranks have whole experts instead of a part of each
};
// Error, naming the field, for a shape that no step has. Whether ranks divide a model: model/shard.h.
void check(const Shape& shape);

// What a step runs on.
struct Machine {
  Gpu gpu;
  int64_t ranks = 1;
  Link link = Link::kNvlink;
};

struct Op {
  std::string name;
  int64_t count = 0;  // in the step
  int64_t nodes = 0;  // of a graph, each time
  double bytes = 0, flops = 0;
  double floor_us = 0, us = 0;  // each time
  std::string_view bound = "";  // "memory", "matrix", "start", "link"
};
// Of one operation, with count 1.
Op price(const Work& work, const Machine& machine);

// Microseconds that the card waits: for a graph to start, and between steps, which begin before the tokens of the one
// before are known.
inline constexpr double kPartStart = 7, kHostBetween = 3;

// A layer's experts on several ranks, both ways: the width of each cut, or whole experts shared out. Cut, all ranks do
// the same; whole, the step waits for the rank with most of the picks.
struct ExpertSplit {
  double columns_us = 0, whole_us = 0;
  double busiest = 1;  // picks of the busiest rank over an equal share, expected for uniform routing
};
// Picks of the rank that has most over an equal share, when so many of all fall on `ranks`.
double busiest_share(double picks, int64_t ranks);

struct StepPlan {
  std::string model, mix, formats;  // for people
  Shape shape;
  Gpu gpu;
  std::vector<Op> ops;       // each as often as the step has it, in the order of their first
  double card_us = 0;        // of all of them, what lies between kernels included
  double host_us = 0;        // that the card waits for the host
  double predicted_us = 0;   // both
  double floor_us = 0;       // bytes over bandwidth, or flops over the sustained rate
  int64_t nodes = 0;         // launches
  double weight_bytes = 0;   // on the rank that has most
  ExpertSplit experts = {};  // of the trunk, with several ranks and experts
  // Tokens that a step brings at least: one for each sequence, or all of a prefill.
  double tokens_per_s() const { return static_cast<double>(shape.tokens) * 1e6 / predicted_us; }
};

// Prices of all that a step launches. What is about model, weights and experts is the caller's.
StepPlan add_up(std::span<const Work> works, const Shape& shape, const Gpu& gpu);

std::string to_text(const StepPlan& plan);
// {model, mix, gpu, arch, ranks, link, tokens, context, prefill, drafts, kv_cache, predicted_us, card_us, host_us,
// floor_us, tokens_per_s, nodes, weight_bytes, experts_columns_us, experts_whole_us, ops[{name, count, nodes, us,
// total_us, floor_us, bytes, flops, bound}]}
std::string to_json(const StepPlan& plan);

}  // namespace fourfold::plan::step
