// Ranks candidates and puts a layer together.
#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <set>

#include "base/check.h"
#include "base/math.h"
#include "plan/moe/plan.h"

namespace fourfold::plan::moe {
namespace {

constexpr double kRoutedPerUs = 4096;   // (token, expert) pairs that one CTA sorts in a microsecond
constexpr double kRoutedAtOnce = 8192;  // more are sorted by many CTAs
constexpr double kL2Speedup = 2.5;      // L2 bandwidth over memory bandwidth

// Predictions closer than this are equal: the model cannot tell them apart, and the choice must not depend on the last
// bits of a floating-point library. Then: less work outside the main loop, less shared memory, the name.
constexpr double kSameUs = 0.01;

// W4A4 rounds more than W4A16 and must be this much faster to be chosen over it: less is within the model's error.
constexpr double kNvfp4Margin = 1.05;
// One token: what it costs when down has no room beside gate-up (measured between the best pairs of tiles: 1.4
// and 2.6).
constexpr double kApartUs = 2.0;
constexpr int kMostInline = 64;  // gate-up candidates for one token that are tried beside down's

bool faster(const Ranked& a, const Ranked& b) {
  const TileConfig &ta = a.candidate.tile, &tb = b.candidate.tile;
  const auto key = [](const Ranked& r) { return std::llround(r.prediction.total_us / kSameUs); };
  if (key(a) != key(b)) return key(a) < key(b);
  const int slices_a = ta.k_warps * a.candidate.split_k, slices_b = tb.k_warps * b.candidate.split_k;
  if (slices_a != slices_b) return slices_a < slices_b;
  const unsigned bytes_a = make_smem_map(ta).total, bytes_b = make_smem_map(tb).total;
  if (bytes_a != bytes_b) return bytes_a < bytes_b;
  return to_string(a.candidate) < to_string(b.candidate);
}

// Why a family is out as a whole; empty when it has candidates.
std::string family_refuses(const FamilyRow& row, const Problem& problem, const Arch& arch) {
  if (!row.runs_on(arch)) return fmt::format("{} has no {}", arch.name, row.needs);
  if (!problem.allows(row.activations())) {
    return row.activations() == ActivationFormat::kNvfp4
               ? "multiplies FP4 by FP4; the problem has bf16 activations (W4A16)"
               : "multiplies by bf16 activations; the problem has NVFP4 activations (W4A4)";
  }
  return row.absent(problem, arch);
}

// Every candidate of one GEMM, ranked or rejected; the choice is the layer's.
GemmPlan rank_gemm(const Problem& problem, Pass pass, const Gpu& gpu, const PlanOptions& options) {
  const Arch& arch = arch_of(gpu);
  GemmPlan plan;
  plan.pass = pass;
  for (const FamilyRow& row : families()) {
    std::string reason = family_refuses(row, problem, arch);
    if (!reason.empty()) plan.rejected.push_back({std::string(row.name) + " (all tiles)", "family", std::move(reason)});
  }
  for (const Candidate& candidate : candidates(problem, pass, arch)) {
    if (auto refusal = first_refusal(problem, pass, gpu, candidate)) {
      if (!options.explain && !plan.ranked.empty()) continue;
      plan.rejected.push_back({to_string(candidate), refusal->rule, std::move(refusal->reason)});
      continue;
    }
    if (options.usable && !options.usable(pass, candidate)) {
      plan.rejected.push_back({to_string(candidate), "disabled", "failed its self-test on this device"});
      continue;
    }
    Ranked ranked;
    ranked.candidate = candidate;
    ranked.missing = kernel_refuses(problem, pass, candidate);
    ranked.implemented = ranked.missing.empty();
    if (options.only_implemented && !ranked.implemented) {
      plan.rejected.push_back({to_string(candidate), "kernel", ranked.missing});
      continue;
    }
    ranked.prediction = predict(problem, pass, gpu, candidate);
    plan.ranked.push_back(std::move(ranked));
  }
  if (plan.ranked.empty()) {
    // Rules are asked in order: the one that came nearest to a legal candidate says what is missing.
    const Rejected* nearest = nullptr;
    int most = -1;
    for (const Rejected& r : plan.rejected) {
      const int rules = rules_before(r.rule);
      if (r.rule != "family" && rules > most) {
        most = rules;
        nearest = &r;
      }
    }
    if (nearest == nullptr) {
      const bool nvfp4 = problem.activations == ActivationFormat::kNvfp4;
      fail("{}: no kernel family of {} computes with {} activations; wanted {}", to_string(pass), arch.name,
           nvfp4 ? "nvfp4" : "bf16",
           nvfp4 ? "--activations bf16 or auto, or an sm_120a or sm_121a card" : "another card");
    }
    fail("{}: none of {} candidates is legal on {}; the nearest one fails for '{}': {}", to_string(pass),
         plan.rejected.size(), gpu.title, nearest->rule, nearest->reason);
  }
  std::sort(plan.ranked.begin(), plan.ranked.end(), faster);
  return plan;
}

// Persistent grid: never more CTAs than slots, nor than tiles that the fullest routing could make.
int64_t grid_of(const Problem& problem, Pass pass, const Gpu& gpu, const Candidate& c) {
  const int64_t pairs = problem.tokens * problem.picks_per_token();
  const FamilyRow& row = row_of(c.tile);
  const bool all_experts = !row.sorted() && pass == Pass::kDown;  // a tile visits every expert
  const int64_t row_tiles =
      all_experts ? 1 : std::min(pairs, pairs / c.tile.tokens + std::min(pairs, problem.all_experts()));
  const int64_t n = all_experts && row.instructions(c.tile).dealt ? kUnitRows : c.tile.n;
  const int64_t tiles = row_tiles * ceil_div(problem.rows(pass), n) * c.split_k;
  return std::min<int64_t>(tiles, static_cast<int64_t>(gpu.sms) * c.ctas_per_sm);
}

// The fastest candidate that can stand beside this one; null when there is none.
const Ranked* fastest(const GemmPlan& gemm, const TileConfig& beside, bool implemented) {
  for (const Ranked& r : gemm.ranked) {
    if (compatible(r.candidate.tile, beside) && (r.implemented || !implemented)) return &r;
  }
  return nullptr;
}

// Histogram, then scatter: a chain of reads and dependent writes in one CTA.
double route_time(const Problem& p, const Gpu& gpu, const TileConfig& tile) {
  if (!row_of(tile).sorted()) return 0;
  const double pairs = static_cast<double>(p.tokens * p.picks_per_token()), read = reachable_reads(gpu) * 1e6;
  return gpu.graph_node_us + 4 * gpu.latency_us + pairs * 16 / read + std::min(pairs, kRoutedAtOnce) / kRoutedPerUs;
}

// Reads a row for each pair (fp32, or groups of two bytes a value), writes a bf16 row for each token.
double combine_time(const Problem& p, const Gpu& gpu, const TileConfig& tile) {
  if (!row_of(tile).sorted()) return 0;
  const double read = reachable_reads(gpu) * 1e6;
  const double rows =
      static_cast<double>(p.tokens * p.picks_per_token() * p.hidden) * (row_form(tile) == RowForm::kRows ? 4 : 2);
  return gpu.graph_node_us + gpu.latency_us +
         (rows + static_cast<double>(p.tokens * p.hidden) * 2) / (rows < gpu.l2_mb * 0.5e6 ? read * kL2Speedup : read);
}

// Reads the input's bf16 rows, writes codes and scales.
double quantise_time(const Problem& p, const Gpu& gpu, const TileConfig& tile) {
  if (row_form(tile) != RowForm::kFp4) return 0;
  const double read = reachable_reads(gpu) * 1e6;
  return gpu.graph_node_us + gpu.latency_us +
         static_cast<double>(p.tokens * p.hidden) * (2 + 0.5 + 1.0 / p.scale_vector()) / read;
}

// What runs beside the two GEMMs.
void time_the_rest(const Problem& p, const Gpu& gpu, const TileConfig& tile, LayerPlan* plan) {
  plan->quantise_us = quantise_time(p, gpu, tile);
  plan->route_us = route_time(p, gpu, tile);
  plan->combine_us = combine_time(p, gpu, tile);
}

double apart_time(const Candidate& gate_up, const Candidate& down, const Gpu& gpu) {
  return !row_of(gate_up.tile).sorted() && !launch_smem(gate_up, down, arch_of(gpu)).side_by_side ? kApartUs : 0;
}

// The layer's figures once both GEMMs are chosen.
void add_up(LayerPlan* plan) {
  Problem p = plan->problem;
  p.tokens = std::max<int64_t>(1, p.tokens);
  const Gpu& gpu = plan->gpu;
  time_the_rest(p, gpu, plan->gate_up.chosen.candidate.tile, plan);
  plan->apart_us = apart_time(plan->gate_up.chosen.candidate, plan->down.chosen.candidate, gpu);
  for (GemmPlan* gemm : {&plan->gate_up, &plan->down}) {
    gemm->grid = grid_of(p, gemm->pass, gpu, gemm->chosen.candidate);
  }
  const LaunchSmem smem = launch_smem(plan->gate_up.chosen.candidate, plan->down.chosen.candidate, arch_of(gpu));
  plan->gate_up.launch_smem = smem.gate_up;
  plan->down.launch_smem = smem.down;
  const double read = reachable_reads(gpu) * 1e6;  // bytes per us
  const double hidden = static_cast<double>(p.hidden);
  double shared_bytes = 0, shared_flops = 0;
  if (p.shared != SharedExpert::kNone && p.shared_slices() == 0) {
    const double weights = static_cast<double>(p.hidden * p.shared_intermediate) * (p.gated() ? 3 : 2);
    shared_bytes = weights * (p.shared == SharedExpert::kBf16 ? 2 : p.bytes_per_weight());
    shared_flops = 2 * weights * static_cast<double>(p.tokens);
    plan->shared_us =
        std::max(shared_bytes / read, shared_flops / (reachable_bf16(gpu, gpu.wgmma_bf16 > 0, true) * 1e6));
  }
  const Prediction &a = plan->gate_up.chosen.prediction, &b = plan->down.chosen.prediction;
  plan->predicted_us = plan->quantise_us + plan->route_us + a.total_us + b.total_us + plan->apart_us +
                       plan->combine_us + plan->shared_us;

  const double must_move =
      touched_experts(p) * static_cast<double>(p.hidden * p.intermediate) * (p.gated() ? 3 : 2) * p.bytes_per_weight() +
      static_cast<double>(p.tokens) * hidden * 4 + shared_bytes;
  const double rate = plan->activations() == ActivationFormat::kNvfp4 ? reachable_fp4(gpu, true)
                                                                      : reachable_bf16(gpu, gpu.wgmma_bf16 > 0, true);
  plan->floor_us = std::max(must_move / read, (a.flops + b.flops + shared_flops) / (rate * 1e6));
  plan->bound = a.total_us >= b.total_us ? a.bound : b.bound;
}

void note_format(LayerPlan* plan, ActivationFormat format, double total) {
  for (FormatPlan& known : plan->formats) {
    if (known.activations != format) continue;
    known.predicted_us = std::min(known.predicted_us, total);
    return;
  }
  plan->formats.push_back({format, total});
}

// The fastest candidate that can stand beside this one. One token: the fastest that also has room beside it, if any
// has.
const Ranked* partner(const GemmPlan& down, const Candidate& gate_up, bool implemented, const Arch& arch) {
  if (!row_of(gate_up.tile).sorted()) {
    for (const Ranked& r : down.ranked) {
      if (compatible(gate_up.tile, r.candidate.tile) && (r.implemented || !implemented) &&
          launch_smem(gate_up, r.candidate, arch).side_by_side) {
        return &r;
      }
    }
  }
  return fastest(down, gate_up.tile, implemented);
}

// Both GEMMs as a unit: they take rows in one form, and where these are sorted the blocks of tokens that the routing
// kernel cuts once. The form also separates the formats of the activations, so that the fastest unit (with a margin for
// W4A4) is the choice between W4A16 and W4A4.
void choose(const Problem& p, const Gpu& gpu, LayerPlan* plan) {
  double best = std::numeric_limits<double>::infinity();
  for (const bool implemented : {true, false}) {
    std::map<std::pair<RowForm, int>, int> seen;
    for (const Ranked& a : plan->gate_up.ranked) {
      const TileConfig& t = a.candidate.tile;
      if (implemented && !a.implemented) continue;
      // The first of each kind is the fastest; for one token what has room beside it matters too.
      if (++seen[{row_form(t), t.tokens}] > (row_of(t).sorted() ? 1 : kMostInline)) continue;
      const Ranked* b = partner(plan->down, a.candidate, implemented, arch_of(gpu));
      if (b == nullptr) continue;
      // Few tokens: one after the other they are a fifth slower than sorted.
      if (row_form(t) == RowForm::kFewTokens && !launch_smem(a.candidate, b->candidate, arch_of(gpu)).side_by_side)
        continue;
      time_the_rest(p, gpu, t, plan);
      const double total = plan->quantise_us + plan->route_us + a.prediction.total_us + b->prediction.total_us +
                           plan->combine_us + apart_time(a.candidate, b->candidate, gpu);
      note_format(plan, activations_of(t), total);
      const bool margin = p.activations == ActivationFormat::kAuto && activations_of(t) == ActivationFormat::kNvfp4;
      const double cost = margin ? total * kNvfp4Margin : total;
      if (cost >= best) continue;
      best = cost;
      plan->gate_up.chosen = a;
      plan->down.chosen = *b;
    }
    if (best < std::numeric_limits<double>::infinity()) break;
  }
  if (best == std::numeric_limits<double>::infinity()) {
    fail("no legal candidates of gate-up and down on {} cut the tokens alike", gpu.title);
  }
}

}  // namespace

std::vector<Candidate> candidates(const Problem& problem, Pass pass, const Arch& arch) {
  std::vector<Candidate> list;
  for (const FamilyRow& row : families()) {
    if (family_refuses(row, problem, arch).empty()) row.tiles(problem, pass, &list);
  }
  return list;
}

bool compatible(const TileConfig& gate_up, const TileConfig& down) {
  return gate_up.tokens == down.tokens && row_form(gate_up) == row_form(down);
}

LaunchSmem launch_smem(const Candidate& gate_up, const Candidate& down, const Arch& arch) {
  constexpr int64_t kGrain = 128;
  const auto needed = [](const Candidate& c) { return int64_t{make_smem_map(c.tile).total}; };
  LaunchSmem least = {needed(gate_up), needed(down), false};
  if (row_of(gate_up.tile).sorted()) return least;
  int64_t registers = 0, warps = 0;
  for (const Candidate* c : {&gate_up, &down}) {
    const int64_t of_cta = c->tile.warps + c->tile.producer_warps;
    registers += c->ctas_per_sm * of_cta * 32 * round_up(estimated_registers(*c), 8);
    warps += c->ctas_per_sm * of_cta;
  }
  if (registers > arch.registers_per_sm || warps > arch.warps_per_sm) return least;
  // What leaves no room for one CTA more in `room`.
  const auto exclusive = [&](const Candidate& c, int64_t room) {
    const int64_t share = room / (c.ctas_per_sm + 1) / kGrain * kGrain + kGrain - arch.smem_reserved;
    return std::max(round_up(needed(c), kGrain), share);
  };
  LaunchSmem smem = {exclusive(gate_up, arch.smem_per_sm), 0, true};
  const int64_t room = arch.smem_per_sm - gate_up.ctas_per_sm * (smem.gate_up + arch.smem_reserved);
  smem.down = exclusive(down, room);
  const bool fits = down.ctas_per_sm * (smem.down + arch.smem_reserved) <= room;
  return fits && std::max(smem.gate_up, smem.down) <= arch.smem_per_block ? smem : least;
}

bool needs_input_scales(const LayerPlan& plan) {
  return plan.activations() == ActivationFormat::kNvfp4 && plan.problem.allows(ActivationFormat::kBf16);
}

LayerPlan plan_without_input_scales(const LayerPlan& plan, const PlanOptions& options) {
  Problem p = plan.problem;
  p.activations = ActivationFormat::kBf16;
  return plan_layer(p, plan.gpu, options);
}

KernelSource kernel_of(const Problem& problem, Pass pass, const Candidate& candidate) {
  const TileConfig& tile = candidate.tile;
  const FamilyRow& row = row_of(tile);
  KernelSource kernel;
  kernel.name =
      fmt::format("{}_{}_{}x{}", to_string(pass), to_string(candidate), problem.rows(pass), problem.padded_depth(pass));
  std::replace(kernel.name.begin(), kernel.name.end(), ' ', '_');
  std::replace(kernel.name.begin(), kernel.name.end(), '+', 'p');
  const int64_t bytes = make_smem_map(tile).total;
  // The kernel derives its own map from the tile; that it is the planned one is asserted.
  kernel.text = fmt::format(
      "#include \"{}\"\n"
      "struct PlannedTile {{\n"
      "  static constexpr fourfold::plan::moe::TileConfig value = {};\n"
      "  static constexpr int ctas = {};\n"
      "}};\n"
      "static_assert(fourfold::plan::moe::make_smem_map(PlannedTile::value).total == {},\n"
      "              \"the kernel's shared memory is not what was planned\");\n",
      row.source, to_source(tile), candidate.ctas_per_sm, bytes);
  kernel.entries = {{fmt::format("fourfold::moe::{}<PlannedTile>", pass == Pass::kGateUp ? row.gate_up : row.down),
                     static_cast<unsigned>(tile.warps + tile.producer_warps) * 32, bytes, !row.sorted()}};
  return kernel;
}

int64_t launch_grid(const Problem& problem, Pass pass, const Gpu& gpu, const Candidate& candidate) {
  return grid_of(problem, pass, gpu, candidate);
}

LayerPlan plan_layer(const Problem& problem, const Gpu& gpu, const PlanOptions& options) {
  validate(problem);
  LayerPlan plan;
  plan.problem = problem;
  plan.gpu = gpu;
  Problem p = problem;
  p.tokens = std::max<int64_t>(1, problem.tokens);  // no tokens: the plan of one, never launched
  plan.gate_up = rank_gemm(p, Pass::kGateUp, gpu, options);
  plan.down = rank_gemm(p, Pass::kDown, gpu, options);
  choose(p, gpu, &plan);
  add_up(&plan);
  std::sort(plan.formats.begin(), plan.formats.end(),
            [](const FormatPlan& a, const FormatPlan& b) { return a.activations < b.activations; });
  for (FormatPlan& format : plan.formats) format.predicted_us += plan.shared_us;
  if (problem.tokens == 0) {
    plan.gate_up.grid = plan.down.grid = 0;
    plan.formats.clear();
    for (GemmPlan* gemm : {&plan.gate_up, &plan.down}) gemm->chosen.prediction = {};
    plan.quantise_us = plan.route_us = plan.apart_us = plan.combine_us = plan.shared_us = plan.predicted_us =
        plan.floor_us = 0;
    plan.bound = "nothing to do";
  }
  return plan;
}

bool choose_by_name(LayerPlan* plan, std::string_view gate_up, std::string_view down) {
  const auto find = [](const GemmPlan& gemm, std::string_view name) -> const Ranked* {
    for (const Ranked& r : gemm.ranked) {
      if (r.implemented && to_string(r.candidate) == name) return &r;
    }
    return nullptr;
  };
  const Ranked *a = find(plan->gate_up, gate_up), *b = find(plan->down, down);
  if (a == nullptr || b == nullptr || !compatible(a->candidate.tile, b->candidate.tile)) return false;
  plan->gate_up.chosen = *a;
  plan->down.chosen = *b;
  add_up(plan);
  return true;
}

std::vector<KernelSource> kernels_of(const Problem& problem, const Gpu& gpu, const PlanOptions& options,
                                     int64_t most_tokens) {
  std::vector<KernelSource> list;
  std::set<std::string> seen;
  PlanOptions quick = options;
  quick.explain = false;
  for (const int64_t tokens : token_buckets()) {
    if (tokens > bucket_of(most_tokens)) break;
    Problem p = problem;
    p.tokens = tokens;
    std::vector<LayerPlan> plans = {plan_layer(p, gpu, quick)};
    if (needs_input_scales(plans[0])) plans.push_back(plan_without_input_scales(plans[0], quick));
    for (const LayerPlan& plan : plans) {
      for (const GemmPlan* gemm : {&plan.gate_up, &plan.down}) {
        KernelSource kernel = kernel_of(p, gemm->pass, gemm->chosen.candidate);
        if (seen.insert(kernel.name).second) list.push_back(std::move(kernel));
      }
    }
  }
  return list;
}

}  // namespace fourfold::plan::moe
