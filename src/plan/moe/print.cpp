// Plans as text for people and as JSON for programs.
#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <span>

#include "base/check.h"
#include "base/math.h"
#include "plan/moe/plan.h"

namespace fourfold::plan::moe {
namespace {
using Json = nlohmann::ordered_json;

double rounded(double value) { return std::round(value * 1000) / 1000; }

std::string_view name_of(Activation activation) {
  switch (activation) {
    case Activation::kSwiGlu:
      return "SwiGLU";
    case Activation::kSwiGluClamp:
      return "SwiGLU with clamp";
    case Activation::kRelu2:
      return "squared ReLU";
  }
  return "?";
}

std::string_view short_name(ActivationFormat activations) {
  return activations == ActivationFormat::kNvfp4 ? "W4A4" : "W4A16";
}

std::string formats(const LayerPlan& plan) {
  return fmt::format("{} {}", short_name(plan.activations()), plan.problem.scale_vector() == 16 ? "NVFP4" : "MXFP4");
}

// "W4A16 by choice: 13.3 us predicted, W4A4 20.5 us"; nothing where the problem leaves none.
std::string choice(const LayerPlan& plan) {
  if (plan.problem.activations != ActivationFormat::kAuto) return "";
  std::string others;
  for (const FormatPlan& format : plan.formats) {
    if (format.activations != plan.activations()) {
      others += fmt::format(", {} {:.1f} us", short_name(format.activations), format.predicted_us);
      // It may be the faster one by less than what it takes to be chosen.
      if (format.activations == ActivationFormat::kNvfp4) others += " (chosen where it is 5 % faster)";
    }
  }
  if (others.empty()) others = fmt::format("; {} has no FP4 multiplication", plan.gpu.arch);
  return fmt::format("{} by choice: {:.1f} us predicted{}\n", short_name(plan.activations()), plan.predicted_us,
                     others);
}

std::string_view name_of(SharedExpert shared) {
  switch (shared) {
    case SharedExpert::kNone:
      return "not counted";
    case SharedExpert::kBf16:
      return "bf16";
    case SharedExpert::kNvfp4:
      return "nvfp4";
  }
  return "?";
}

// The rejected candidates of one rule.
struct Group {
  std::string_view rule;
  int64_t count = 0;
  const Rejected* example;
};
// Most frequent rules first.
std::vector<Group> by_rule(const std::vector<Rejected>& rejected) {
  std::map<std::string_view, size_t> index;
  std::vector<Group> groups;
  for (const Rejected& r : rejected) {
    const auto [at, fresh] = index.try_emplace(r.rule, groups.size());
    if (fresh) groups.push_back({r.rule, 0, &r});
    ++groups[at->second].count;
  }
  std::stable_sort(groups.begin(), groups.end(), [](const Group& a, const Group& b) { return a.count > b.count; });
  return groups;
}

// Ranked candidates that are shown when not all are.
constexpr size_t kShownText = 3, kShownJson = 20;

void text_terms(const LayerPlan& plan, std::string* out) {
  const Prediction &a = plan.gate_up.chosen.prediction, &b = plan.down.chosen.prediction;
  auto line = [&](std::string_view name, double x, double y, std::string_view note) {
    *out += fmt::format("  {:<16}{:>10.2f}{:>10.2f}   {}\n", name, x, y, note);
  };
  *out += fmt::format("  {:<16}{:>10}{:>10}\n", "us", "gate-up", "down");
  line("memory", a.memory_us, b.memory_us,
       fmt::format("{:.2f} + {:.2f} MB; {:.0f} and {:.0f} KB in flight per SM",
                   (a.weight_bytes + a.activation_bytes + a.output_bytes) / 1e6,
                   (b.weight_bytes + b.activation_bytes + b.output_bytes) / 1e6, a.in_flight_bytes / 1024,
                   b.in_flight_bytes / 1024));
  line("issue", a.issue_us, b.issue_us,
       fmt::format("{:.2f} and {:.2f} instructions per weight and lane, {:.2f} GHz", a.instructions_per_weight,
                   b.instructions_per_weight, a.ghz));
  line("matrix", a.matrix_us, b.matrix_us,
       fmt::format("{:.3f} and {:.3f} of the padded flops are wanted", a.flops / a.padded_flops,
                   b.flops / b.padded_flops));
  line("shared memory", a.smem_us, b.smem_us, "");
  line("L2", a.l2_us, b.l2_us, "");
  line("+ launch", a.launch_us, b.launch_us, "graph node");
  line("+ latency", a.latency_us, b.latency_us, "dependent reads before the first weight, and the way out");
  line("+ drain", a.drain_us, b.drain_us, fmt::format("{:.2f} and {:.2f} waves", a.waves, b.waves));
  if (a.split_us + b.split_us > 0) line("+ split K", a.split_us, b.split_us, "");
  line("total", a.total_us, b.total_us, fmt::format("bound: {} and {}", a.bound, b.bound));
}

void text_map(const GemmPlan& gemm, const Arch& arch, std::string* out) {
  const TileConfig& t = gemm.chosen.candidate.tile;
  const SmemMap map = gemm.smem();
  *out += fmt::format("  shared memory\n  {:>9} {:>9} {:>8} {:>8} {:>7}  {}\n", "offset", "size", "copies", "padding",
                      "align", "region");
  for (int i = 0; i < kRegionCount; ++i) {
    const Region& r = map[static_cast<RegionId>(i)];
    if (r.size == 0) continue;
    *out += fmt::format("  {:>9} {:>9} {:>8} {:>8} {:>7}  {}{}\n", r.offset, r.size,
                        r.copies > 1 ? fmt::format("{}x{}", r.copies, r.stride) : "1", r.padding, r.align,
                        region_name(static_cast<RegionId>(i), t), r.overlay ? " (over the idle stages)" : "");
  }
  const int ctas = gemm.chosen.candidate.ctas_per_sm;
  const int64_t per_sm = ctas * (round_up(map.total, 128) + arch.smem_reserved);
  *out += fmt::format(
      "  total {} B of {} B per block (slack {} B, padding {} B); {} CTA{} per SM: {} of {} B (slack {} B)\n",
      map.total, arch.smem_per_block, arch.smem_per_block - map.total, map.padding, ctas, ctas > 1 ? "s" : "", per_sm,
      arch.smem_per_sm, arch.smem_per_sm - per_sm);
  if (gemm.launch_smem > map.total) {
    *out +=
        fmt::format("  launched with {} B, so that no more CTAs fit on an SM than are meant to\n", gemm.launch_smem);
  }
}

void text_gemm(const LayerPlan& plan, const GemmPlan& gemm, const PrintOptions& options, std::string* out) {
  const Arch& arch = arch_of(plan.gpu);
  const Candidate& c = gemm.chosen.candidate;
  const TileConfig& t = c.tile;
  const ScaleBlocks s = scale_blocks(t.k, t.scale_vector, t.family);
  *out += fmt::format("\n{}: {}{}\n", to_string(gemm.pass), to_string(c),
                      gemm.chosen.implemented ? "" : fmt::format("   [{}]", gemm.chosen.missing));
  *out += fmt::format(
      "  {} family; {} tokens x {}{} weight rows x {} elements, {} stages, {} warps{}; grid {}, {} CTA{} per SM\n",
      to_string(t.family), t.tokens, t.operands == 2 ? "2 x " : "", t.n, t.k, t.stages, t.warps,
      t.producer_warps > 0 ? fmt::format(" + {} loading", t.producer_warps) : "", gemm.grid, c.ctas_per_sm,
      c.ctas_per_sm > 1 ? "s" : "");
  *out += fmt::format(
      "  {} scales per row and stage in {} block{} of {}; an mma takes {} (fold {}); about {} of {} registers\n",
      s.per_row, s.blocks, s.blocks > 1 ? "s" : "", s.block, s.per_mma, s.fold, estimated_registers(c),
      register_limit(arch, c));
  text_map(gemm, arch, out);

  const size_t shown = options.all ? gemm.ranked.size() : std::min(gemm.ranked.size(), kShownText);
  *out += fmt::format("  ranked: {} legal candidates{}\n", gemm.ranked.size(),
                      shown < gemm.ranked.size() ? fmt::format(", the first {}", shown) : "");
  for (size_t i = 0; i < shown; ++i) {
    const Ranked& r = gemm.ranked[i];
    *out +=
        fmt::format("  {:>9.2f} us  {:<34} {:>7} B  {}{}\n", r.prediction.total_us, to_string(r.candidate),
                    make_smem_map(r.candidate.tile).total, r.prediction.bound, r.implemented ? "" : ", no kernel yet");
  }
  if (!options.all) return;
  *out += fmt::format("  rejected: {}\n", gemm.rejected.size());
  for (const Rejected& r : gemm.rejected) *out += fmt::format("    {:<34} {}: {}\n", r.tile, r.rule, r.reason);
}

// Both passes by rule, a line each: a rule that refuses tiles of one refuses them in the other for the same reason.
void text_rejected(const LayerPlan& plan, std::string* out) {
  std::vector<Rejected> both = plan.gate_up.rejected;
  both.insert(both.end(), plan.down.rejected.begin(), plan.down.rejected.end());
  *out += fmt::format("\nrejected: {} and {} candidates (--all names each)\n", plan.gate_up.rejected.size(),
                      plan.down.rejected.size());
  for (const Group& g : by_rule(both)) {
    *out +=
        fmt::format("  {:>6} {:<24} {}: {}\n", fmt::format("{}x", g.count), g.rule, g.example->tile, g.example->reason);
  }
}

Json json_prediction(const Prediction& p) {
  return {{"total_us", rounded(p.total_us)},
          {"bound", p.bound},
          {"memory_us", rounded(p.memory_us)},
          {"issue_us", rounded(p.issue_us)},
          {"matrix_us", rounded(p.matrix_us)},
          {"smem_us", rounded(p.smem_us)},
          {"l2_us", rounded(p.l2_us)},
          {"launch_us", rounded(p.launch_us)},
          {"latency_us", rounded(p.latency_us)},
          {"drain_us", rounded(p.drain_us)},
          {"split_us", rounded(p.split_us)},
          {"bytes", p.weight_bytes + p.activation_bytes + p.output_bytes},
          {"flops", p.flops},
          {"padded_flops", p.padded_flops},
          {"waves", rounded(p.waves)},
          {"instructions_per_weight", rounded(p.instructions_per_weight)}};
}

Json json_gemm(const GemmPlan& gemm, const Arch& arch) {
  const Candidate& c = gemm.chosen.candidate;
  const TileConfig& t = c.tile;
  const SmemMap map = gemm.smem();
  const ScaleBlocks s = scale_blocks(t.k, t.scale_vector, t.family);
  Json regions = Json::array();
  for (int i = 0; i < kRegionCount; ++i) {
    const Region& r = map[static_cast<RegionId>(i)];
    if (r.size == 0) continue;
    regions.push_back({{"name", region_name(static_cast<RegionId>(i), t)},
                       {"offset", r.offset},
                       {"size", r.size},
                       {"stride", r.stride},
                       {"copies", r.copies},
                       {"align", r.align},
                       {"padding", r.padding},
                       {"overlay", r.overlay}});
  }
  return {
      {"name", to_string(c)},
      {"family", to_string(t.family)},
      {"tile", {t.tokens, t.n, t.k}},
      {"operands", t.operands},
      {"stages", t.stages},
      {"warps", t.warps},
      {"producer_warps", t.producer_warps},
      {"k_warps", t.k_warps},
      {"ctas_per_sm", c.ctas_per_sm},
      {"split_k", c.split_k},
      {"swap_ab", t.swap_ab == 1},
      {"epilogue", to_string(t.epilogue)},
      {"grid", gemm.grid},
      {"implemented", gemm.chosen.implemented},
      {"missing", gemm.chosen.missing},
      {"registers", {{"estimated", estimated_registers(c)}, {"limit", register_limit(arch, c)}}},
      {"scales",
       {{"per_row", s.per_row}, {"block", s.block}, {"blocks", s.blocks}, {"per_mma", s.per_mma}, {"fold", s.fold}}},
      {"smem_bytes", map.total},
      {"launch_smem_bytes", gemm.launch_smem},
      {"smem_padding", map.padding},
      {"smem_limit", arch.smem_per_block},
      {"regions", regions},
      {"prediction", json_prediction(gemm.chosen.prediction)}};
}

}  // namespace

std::string to_string(const Candidate& c) {
  const TileConfig& t = c.tile;
  std::string text = fmt::format("{} {}x{}x{} s{} w{}", to_string(t.family), t.tokens, t.n, t.k, t.stages, t.warps);
  if (t.producer_warps > 0) text += fmt::format("+{}", t.producer_warps);
  if (t.k_warps > 1) text += fmt::format(" kw{}x{}", t.stage_warps, t.k_warps / t.stage_warps);
  if (row_form(t) == RowForm::kFewTokens) text += fmt::format(" rows{}", t.token_rows);
  if (c.split_k > 1) text += fmt::format(" split{}", c.split_k);
  text += fmt::format(" x{}{}", c.ctas_per_sm, t.swap_ab ? " swap" : "");
  return text;
}

std::string to_source(const TileConfig& t) {
  const auto value = [](auto name) { return static_cast<int>(name); };
  return fmt::format(
      "{{.family = fourfold::plan::moe::Family({}), .pass = fourfold::plan::moe::Pass({}), .tokens = {}, .token_rows = "
      "{}, .n = {}, .k = {}, .stages = {}, .warps = {}, .producer_warps = {}, .operands = {}, .scale_vector = {}, "
      ".activation_bits = {}, .swap_ab = {}, .k_warps = {}, .stage_warps = {}, .resident_k = {}, .epilogue = "
      "fourfold::plan::moe::Epilogue({})}}",
      value(t.family), value(t.pass), t.tokens, t.token_rows, t.n, t.k, t.stages, t.warps, t.producer_warps, t.operands,
      t.scale_vector, t.activation_bits, t.swap_ab, t.k_warps, t.stage_warps, t.resident_k, value(t.epilogue));
}

std::string to_text(const LayerPlan& plan, const PrintOptions& options) {
  const Problem& p = plan.problem;
  const Gpu& g = plan.gpu;
  std::string out;
  out += fmt::format("{}: {} experts, top-{}, hidden {}, intermediate {}, {}; {} token{}, {}\n",
                     p.name.empty() ? "layer" : p.name, p.experts, p.top_k, p.hidden, p.intermediate,
                     name_of(p.activation), p.tokens, p.tokens == 1 ? "" : "s", formats(plan));
  out += fmt::format(
      "{} ({}): {} SMs, {:.2f} GHz, reads {:.2f} TB/s ({})\n", g.title, g.arch, g.sms, g.clock_ghz, reachable_reads(g),
      g.read_source == Source::kMeasured ? "measured"
                                         : fmt::format("{:.0f} % of the datasheet", kReachableReads * 100));
  if (p.tokens == 0) {
    out += "predicted 0 us: no tokens, nothing is launched\n";
    return out;
  }
  out += fmt::format("touched: {:.1f} experts, {:.1f} rows each, busiest about {}\n", touched_experts(p),
                     static_cast<double>(p.tokens * p.picks_per_token()) / touched_experts(p), busiest_rows(p));
  out += fmt::format("predicted {:.1f} us for the layer, bound: {}; floor {:.1f} us ({:.0f} % of the ceiling)\n",
                     plan.predicted_us, plan.bound, plan.floor_us, 100 * plan.floor_us / plan.predicted_us);
  out += fmt::format("  {}route {:.2f} + gate-up {:.2f} + down {:.2f} + {}combine {:.2f} + shared expert {:.2f} ({})\n",
                     plan.quantise_us > 0 ? fmt::format("quantise {:.2f} + ", plan.quantise_us) : "", plan.route_us,
                     plan.gate_up.chosen.prediction.total_us, plan.down.chosen.prediction.total_us,
                     plan.apart_us > 0 ? fmt::format("down not beside gate-up {:.2f} + ", plan.apart_us) : "",
                     plan.combine_us, plan.shared_us, name_of(p.shared));
  out += choice(plan);
  text_terms(plan, &out);
  text_gemm(plan, plan.gate_up, options, &out);
  text_gemm(plan, plan.down, options, &out);
  if (!options.all) text_rejected(plan, &out);
  return out;
}

std::string to_json(const LayerPlan& plan, const PrintOptions& options) {
  const Problem& p = plan.problem;
  const Arch& arch = arch_of(plan.gpu);
  Json json;
  json["model"] = p.name;
  json["problem"] = {{"experts", p.experts},
                     {"top_k", p.top_k},
                     {"hidden", p.hidden},
                     {"intermediate", p.intermediate},
                     {"tokens", p.tokens},
                     {"formats", formats(plan)},
                     {"activations", to_string(p.activations)},
                     {"activation", name_of(p.activation)},
                     {"shared_expert", name_of(p.shared)}};
  json["gpu"] = plan.gpu.name;
  json["arch"] = arch.name;
  json["predicted_us"] = rounded(plan.predicted_us);
  json["floor_us"] = rounded(plan.floor_us);
  json["bound"] = plan.bound;
  Json each = Json::object();
  for (const FormatPlan& format : plan.formats) {
    each[std::string(to_string(format.activations))] = rounded(format.predicted_us);
  }
  json["activations"] = {
      {"asked", to_string(p.activations)}, {"chosen", to_string(plan.activations())}, {"predicted_us", each}};
  json["terms"] = {{"quantise_us", rounded(plan.quantise_us)},
                   {"route_us", rounded(plan.route_us)},
                   {"gate_up_us", rounded(plan.gate_up.chosen.prediction.total_us)},
                   {"down_us", rounded(plan.down.chosen.prediction.total_us)},
                   {"apart_us", rounded(plan.apart_us)},
                   {"combine_us", rounded(plan.combine_us)},
                   {"shared_us", rounded(plan.shared_us)}};
  // The layer's plan in short (the GEMM that needs more shared memory speaks for the limit), then both in full.
  const Candidate &a = plan.gate_up.chosen.candidate, &b = plan.down.chosen.candidate;
  json["plan"] = {{"tile", {a.tile.tokens, a.tile.n, a.tile.k}},
                  {"name", to_string(a) + " / " + to_string(b)},
                  {"family", to_string(a.tile.family)},
                  {"activations", to_string(plan.activations())},
                  {"smem_bytes", std::max(plan.gate_up.smem().total, plan.down.smem().total)},
                  {"smem_limit", arch.smem_per_block},
                  {"implemented", plan.gate_up.chosen.implemented && plan.down.chosen.implemented},
                  {"gate_up", json_gemm(plan.gate_up, arch)},
                  {"down", json_gemm(plan.down, arch)}};
  Json ranked = Json::array(), rejected = Json::array(), counts = Json::object();
  for (const GemmPlan* gemm : {&plan.gate_up, &plan.down}) {
    const std::string pass(to_string(gemm->pass));
    counts[pass] = {{"legal", gemm->ranked.size()}, {"rejected", gemm->rejected.size()}};
    const size_t shown = options.all ? gemm->ranked.size() : std::min(gemm->ranked.size(), kShownJson);
    for (const Ranked& r : std::span(gemm->ranked).first(shown)) {
      ranked.push_back({{"pass", pass},
                        {"tile", to_string(r.candidate)},
                        {"predicted_us", rounded(r.prediction.total_us)},
                        {"bound", r.prediction.bound},
                        {"smem_bytes", make_smem_map(r.candidate.tile).total},
                        {"implemented", r.implemented}});
    }
    const auto reject = [&](int64_t count, const Rejected& r) {
      rejected.push_back({{"pass", pass}, {"rule", r.rule}, {"count", count}, {"tile", r.tile}, {"reason", r.reason}});
    };
    if (options.all) {
      for (const Rejected& r : gemm->rejected) reject(1, r);
    } else {
      for (const Group& g : by_rule(gemm->rejected)) reject(g.count, *g.example);
    }
  }
  json["candidates"] = std::move(counts);
  json["ranked"] = std::move(ranked);
  json["rejected"] = std::move(rejected);
  return json.dump();
}

}  // namespace fourfold::plan::moe
