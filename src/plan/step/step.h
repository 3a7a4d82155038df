// A whole step of a model on cards that are not here: the operations of the schedule (docs/kernels), each with bytes,
// flops, its floor and a predicted time, added up. Expert layers come from the planner itself (plan/moe); the other
// operations from cost models that were fitted to kernels measured on one H200 (step/cost.cpp) and are carried to other
// cards by bandwidth, clock, SMs and the cost of a node: predictions, not measurements.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "plan/arch.h"
#include "plan/moe/problem.h"

namespace fourfold::plan::step {

enum class Format { kNvfp4, kFp8, kBf16 };
std::string_view to_string(Format format);
double bytes_per_weight(Format format);  // scales included

// What of a model decides the time of a step. Sizes in elements.
struct Model {
  std::string name;
  int64_t hidden = 0, vocabulary = 0;
  int64_t attention_layers = 0, delta_layers = 0;
  int64_t heads = 0, kv_heads = 0, head_dim = 0;
  int64_t key_heads = 0, value_heads = 0, key_dim = 0, value_dim = 0, conv_taps = 0;  // delta rule
  int64_t experts = 0, top_k = 0, expert_width = 0, shared_width = 0;                 // 0 experts: dense
  int64_t dense_width = 0;

  int64_t layers() const { return attention_layers + delta_layers; }
};

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

struct Op {
  std::string name;
  int64_t count = 0;  // in the step
  int64_t nodes = 0;  // of a graph, each time
  double bytes = 0, flops = 0;
  double floor_us = 0, us = 0;  // each time
  std::string_view bound = "";  // "memory", "matrix", "start"
};

// A layer's experts on several ranks, both ways: the width of each cut, or whole experts shared out. Cut, all ranks do
// the same; whole, the step waits for the rank with most of the picks.
struct ExpertSplit {
  double columns_us = 0, whole_us = 0;
  double busiest = 1;  // picks of the busiest rank over an equal share, expected for uniform routing
};

struct StepPlan {
  Model model;
  Mix mix;
  Shape shape;
  Gpu gpu;
  std::vector<Op> ops = {};
  double predicted_us = 0, floor_us = 0;
  double weight_bytes = 0;   // weight_bytes()
  ExpertSplit experts = {};  // of the trunk, with several ranks and experts
  int64_t nodes = 0;
  // Tokens that a step brings at least: one for each sequence, or all of a prefill.
  double tokens_per_s() const { return static_cast<double>(shape.tokens) * 1e6 / predicted_us; }
};

// Error, naming the field, for a shape that no kernel takes or ranks that do not divide the heads.
StepPlan plan_step(const Model& model, const Mix& mix, const Shape& shape, const Gpu& gpu);

// Of the rank that has most, as model/shard.h splits a model: heads (key heads fewer than the ranks are held by
// several), widths padded to 16, the head's rows; embedding, routers and norms are held by all. Without the MTP head
// and vectors.
double weight_bytes(const Model& model, const Mix& mix, const Shape& shape);

std::string to_text(const StepPlan& plan);
// {model, mix, gpu, tokens, context, predicted_us, floor_us, tokens_per_s, weight_bytes, nodes, ops[{name, count,
// nodes, us, floor_us, bytes, flops, bound}]}
std::string to_json(const StepPlan& plan);

// ---- the cost models, one call each; step/cost.cpp has what they were fitted to

// y[rows][n] = x[rows][k] W^T. `norm`: the RMS norm in front runs in the same kernel.
Op product_cost(const Gpu& gpu, std::string name, Format format, int64_t rows, int64_t n, int64_t k, bool norm = false);
Op attention_cost(const Gpu& gpu, const Model& model, const Shape& shape, int64_t rows);
Op delta_cost(const Gpu& gpu, const Model& model, const Shape& shape, int64_t rows);
Op norm_cost(const Gpu& gpu, int64_t rows, int64_t hidden);
// Softmax, top-k and the choice, behind the router's product.
Op router_cost(const Gpu& gpu, const Model& model, int64_t rows);
// Sum over ranks with residual and norm, of rows of `hidden` bf16 values.
Op all_reduce_cost(const Gpu& gpu, int64_t ranks, Link link, int64_t rows, int64_t hidden);

}  // namespace fourfold::plan::step
