#include "plan/step/step.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>
#include <tuple>
#include <utility>

#include "base/check.h"

namespace fourfold::plan::step {
namespace {
using Json = nlohmann::ordered_json;

constexpr Format kFp4 = Format::kNvfp4, kFp8 = Format::kFp8, kBf16 = Format::kBf16;
constexpr std::array<Mix, 3> kMixes = {{
    {"A", "experts, shared expert and head NVFP4, attention and delta net FP8", kFp4, kFp4, kFp8, kFp8, kFp4},
    {"B", "experts, shared expert and attention NVFP4, delta net and head bf16", kFp4, kFp4, kFp4, kBf16, kBf16},
    {"C", "experts NVFP4, the rest bf16", kFp4, kBf16, kBf16, kBf16, kBf16},
}};

// Of the same price.
bool alike(const Work& a, const Work& b) {
  const auto sizes = [](const Extent& e) {
    return std::tuple(e.kind, e.rows, e.outputs, e.inputs, e.sequences, e.context, e.heads, e.norm_in_front, e.routed,
                      e.sum_of);
  };
  return a.name == b.name && a.bytes == b.bytes && a.flops == b.flops && a.launches.size() == b.launches.size() &&
         sizes(a.extent) == sizes(b.extent);
}

double number(int64_t value) { return static_cast<double>(value); }
double rounded(double value) { return std::round(value * 1000) / 1000; }

}  // namespace

const Mix& find_mix(std::string_view name) {
  for (const Mix& mix : kMixes) {
    if (mix.name == name) return mix;
  }
  fail("--mix '{}': wanted {}", printable(name), mix_names());
}

std::span<const Mix> mixes() { return kMixes; }

std::string mix_names() {
  std::string all;
  for (const Mix& mix : kMixes) all += fmt::format("{}{} ({})", all.empty() ? "" : "; ", mix.name, mix.title);
  return all;
}

std::string_view to_string(Link link) {
  return link == Link::kNvlink ? "NVLink" : link == Link::kPeer ? "PCIe with peer copies" : "PCIe through the host";
}

Link find_link(std::string_view name) {
  if (name == "nvlink") return Link::kNvlink;
  if (name == "pcie") return Link::kPeer;
  if (name == "host") return Link::kHost;
  fail("--link '{}': wanted nvlink, pcie or host", printable(name));
}

Link link_of(const Gpu& gpu) {
  constexpr std::string_view kServers[] = {"sm_80", "sm_90a", "sm_100a"};  // of the table's cards
  return std::find(std::begin(kServers), std::end(kServers), gpu.arch) != std::end(kServers) ? Link::kNvlink
                                                                                             : Link::kPeer;
}

void check(const Shape& s) {
  const auto within = [](std::string_view what, int64_t value, int64_t low, int64_t high) {
    if (value < low || value > high) fail("{}: found {}, wanted {} to {}", what, value, low, high);
  };
  within("tokens", s.tokens, 1, s.prefill ? moe::kLimits.tokens : 4096);
  within("context", s.context, s.prefill ? 0 : 1, int64_t{1} << 28);
  within("drafts", s.drafts, 0, s.prefill ? 0 : 5);
  within("tensor-parallel ranks", s.ranks, 1, 8);
}

double busiest_share(double picks, int64_t ranks) {
  // As many deviations above the mean as the largest of so many numbers lies.
  const double n = static_cast<double>(ranks), mean = picks / n;
  return std::min(n, 1 + std::sqrt((1 - 1 / n) * 2 * std::log(n) / mean));
}

StepPlan add_up(std::span<const Work> works, const Shape& shape, const Gpu& gpu) {
  // Between two kernels, beside what they take by themselves. Kernels of few rows ask for their first weights while the
  // one before runs.
  constexpr double kEarly = 0.1, kLate = 0.5;
  constexpr int64_t kFewRows = 16;
  StepPlan plan;
  plan.shape = shape;
  plan.gpu = gpu;
  const Machine machine = {gpu, shape.ranks, shape.link};
  const Arch& arch = arch_of(gpu);
  bool first = true;
  Op between = {.name = "between kernels", .count = 1, .bound = "start"};
  std::vector<const Work*> kinds;  // of plan.ops
  for (const Work& work : works) {
    const auto same = std::find_if(kinds.begin(), kinds.end(), [&](const Work* k) { return alike(*k, work); });
    const auto at = static_cast<size_t>(same - kinds.begin());
    if (same == kinds.end()) {
      kinds.push_back(&work);
      plan.ops.push_back(price(work, machine));
    } else {
      ++plan.ops[at].count;
    }
    const Op& op = plan.ops[at];
    for (const Launch& launch : work.launches) {
      if (std::exchange(first, false)) continue;
      between.us += arch.bulk_copy && work.extent.rows <= kFewRows ? kEarly : kLate;
      if (!launch.programmatic) between.us += gpu.graph_node_us;
    }
    plan.card_us += op.us;
    plan.floor_us += op.floor_us;
    plan.nodes += op.nodes;
  }
  plan.card_us += between.us;
  plan.ops.push_back(between);
  // Parts of a step are graphs: the trunk; the drafter's feed, which is the first draft too, and each further draft.
  const double parts = 1 + number(shape.drafts > 0 ? shape.drafts + 1 : 0);
  plan.host_us = kPartStart * parts + kHostBetween;
  plan.predicted_us = plan.card_us + plan.host_us;
  return plan;
}

std::string to_text(const StepPlan& plan) {
  const Shape& s = plan.shape;
  std::string out = fmt::format("{}, {}\n{} ({}){}, predicted from kernels measured on an H200\n", plan.model,
                                plan.formats, plan.gpu.title, plan.gpu.arch,
                                s.ranks > 1 ? fmt::format(" x {} over {}", s.ranks, to_string(s.link)) : "");
  if (s.prefill) {
    out += fmt::format("prefill of {} tokens after {}\n\n", s.tokens, s.context);
  } else {
    out += fmt::format("{} sequence{} of {} positions{}\n\n", s.tokens, s.tokens == 1 ? "" : "s", s.context,
                       s.drafts > 0 ? fmt::format(", a round of {} drafts", s.drafts) : "");
  }
  out += fmt::format("  {:<32}{:>6}{:>9}{:>9}{:>10}{:>8}  {}\n", "", "count", "us", "floor", "total", "share", "bound");
  for (const Op& op : plan.ops) {
    const double total = op.us * static_cast<double>(op.count);
    out += fmt::format("  {:<32}{:>6}{:>9.2f}{:>9.2f}{:>10.1f}{:>7.1f}%  {}\n", op.name, op.count, op.us, op.floor_us,
                       total, 100 * total / plan.predicted_us, op.bound);
  }
  out += fmt::format(
      "\npredicted {:.0f} us, {:.0f} tokens/s{}: {:.0f} on the card, {:.0f} for the host; floor {:.0f} us ({:.0f} %); "
      "{} nodes; {:.1f} GB of weights{}\n",
      plan.predicted_us, plan.tokens_per_s(), s.drafts > 0 ? " and whatever drafts are accepted" : "", plan.card_us,
      plan.host_us, plan.floor_us, 100 * plan.floor_us / plan.predicted_us, plan.nodes, plan.weight_bytes * 1e-9,
      s.ranks > 1 ? " on each card" : "");
  if (plan.experts.columns_us > 0) {
    const ExpertSplit& e = plan.experts;
    const bool whole_wins = e.whole_us < e.columns_us;
    out += fmt::format(
        "experts of a layer: a part of each on every rank {:.1f} us, whole experts {:.1f} us (the busiest rank has "
        "{:.2f} times its share){}\n",
        e.columns_us, e.whole_us, e.busiest,
        whole_wins == s.by_expert ? ""
        : whole_wins              ? ": --enable-expert-parallel wins"
                                  : ": parts of each win");
  }
  return out;
}

std::string to_json(const StepPlan& plan) {
  const Shape& s = plan.shape;
  Json ops = Json::array();
  for (const Op& op : plan.ops) {
    ops.push_back({{"name", op.name},
                   {"count", op.count},
                   {"nodes", op.nodes},
                   {"us", rounded(op.us)},
                   {"floor_us", rounded(op.floor_us)},
                   {"total_us", rounded(op.us * static_cast<double>(op.count))},
                   {"bytes", op.bytes},
                   {"flops", op.flops},
                   {"bound", op.bound}});
  }
  const Json json = {{"model", plan.model},
                     {"mix", plan.mix},
                     {"gpu", plan.gpu.name},
                     {"arch", plan.gpu.arch},
                     {"ranks", s.ranks},
                     {"link", to_string(s.link)},
                     {"tokens", s.tokens},
                     {"context", s.context},
                     {"prefill", s.prefill},
                     {"drafts", s.drafts},
                     {"kv_cache", s.fp8_cache ? "fp8" : "bf16"},
                     {"predicted_us", rounded(plan.predicted_us)},
                     {"card_us", rounded(plan.card_us)},
                     {"host_us", rounded(plan.host_us)},
                     {"floor_us", rounded(plan.floor_us)},
                     {"tokens_per_s", rounded(plan.tokens_per_s())},
                     {"nodes", plan.nodes},
                     {"weight_bytes", plan.weight_bytes},
                     {"experts_columns_us", rounded(plan.experts.columns_us)},
                     {"experts_whole_us", rounded(plan.experts.whole_us)},
                     {"ops", ops}};
  return json.dump();
}

}  // namespace fourfold::plan::step
