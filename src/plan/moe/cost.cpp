// The cost model. Formulas, constants and their sources: docs/plan.md, "Predicted time".
#include <algorithm>
#include <array>
#include <cmath>

#include "base/math.h"
#include "plan/moe/plan.h"

namespace fourfold::plan::moe {
namespace {

constexpr double kIssueEfficiency = 0.80;  // of the issue slots; fitted to tuned kernels seen at 0.79 to 0.82 busy
constexpr double kIssuePerWarp = 0.55;     // as Instructions::per_clock, of the warps that share a tile's last stage
constexpr double kPowerUs = 300;           // time scale on which a card falls from boost to its sustained clock
constexpr double kTileRows = 16;
constexpr double kOverlap = 4;      // exponent of the norm that joins overlapping terms
constexpr double kL2Speedup = 2.5;  // L2 bandwidth over memory bandwidth

// Joins terms that overlap: the largest, plus a little when others are close.
double overlap(std::initializer_list<double> terms) {
  double largest = 0;
  for (const double t : terms) largest = std::max(largest, t);
  if (largest == 0) return 0;
  double sum = 0;
  for (const double t : terms) sum += std::pow(t / largest, kOverlap);
  return largest * std::pow(sum, 1 / kOverlap);
}

// Fraction of a bandwidth reached with `have` bytes in flight where `need` saturate it (Little's law, rounded corner).
double saturation(double have, double need) {
  const double x = have / need;
  return x / std::pow(1 + std::pow(x, 4), 0.25);
}

// wgmma m64nNk16 takes N / 2 clocks of a multiprocessor that does nothing else, but not fewer than about 14 + N / 4
// (published latencies: N = 8 takes 18, 64 takes 32, 128 takes 64). Beside dequantisation, and against the rate that a
// card sustains, 289 measured layers take in proportion to N + 16 columns; 0.45 clocks for each is what they take in
// prompts (docs/plan.md).
double matrix_efficiency(const TileConfig& t, double n) {
  constexpr double kClocks = 0.45, kBeside = 16;
  if (row_of(t).unit != MatrixUnit::kWgmma) return 1;
  return n / 2 / std::max(kClocks * (n + kBeside), 14 + n / 4);
}

struct Work {  // of one tile of one CTA
  double weights, stage_count, mma, instructions, smem_bytes, l2_bytes, flops, copies;
  void repeat(double times) {
    for (double* value : {&weights, &stage_count, &mma, &instructions, &smem_bytes, &l2_bytes, &flops, &copies}) {
      *value *= times;
    }
  }
};

// `tokens` is the width that is computed, which may be narrower than the tile.
Work work_of(const Problem& problem, Pass pass, const Candidate& c, const Instructions& per, double tokens) {
  const TileConfig& t = c.tile;
  Work w = {};
  const double all = static_cast<double>(problem.padded_depth(pass));
  const double depth = std::ceil(all / c.split_k / kDepthGrain) * kDepthGrain;
  const double k_tiles = std::ceil(depth / t.k), rows = t.operands * t.n;
  w.weights = rows * depth;
  w.stage_count = k_tiles;
  w.flops = 2 * w.weights * tokens;
  const double activation_bytes = std::min<double>(t.token_rows, tokens) * depth * t.activation_bits / 8;
  double activation_reads = 0;  // how often the activations of a stage are read from shared memory
  switch (row_of(t).unit) {
    case MatrixUnit::kWgmma:
      w.mma = rows / 64 * depth / 16 * 4;  // each of a warpgroup's 4 warps issues it
      activation_reads = rows / 64;
      break;
    case MatrixUnit::kMmaSync:
      w.mma = rows * tokens / 128 * depth / 16;
      activation_reads = std::min(static_cast<double>(t.warps / t.k_warps), std::max(1.0, rows / 16));
      break;
    case MatrixUnit::kFp4Mma:
      w.mma = rows * tokens / 128 * depth / 64;
      activation_reads = t.swap_ab ? std::min<double>(t.warps, std::max(1.0, rows / 16)) : 1;
      break;
  }
  const double weight_bytes = w.weights * problem.bytes_per_weight();
  w.instructions = w.weights / 32 * per.dequantise + w.mma * (1 + per.per_mma) +
                   k_tiles * t.warps / t.stage_warps * per.per_stage + tokens * t.n * per.per_output / 32;
  w.smem_bytes = activation_bytes * (1 + activation_reads) + 2 * weight_bytes;
  if (t.k_warps > 1) w.smem_bytes += (t.k_warps - 1) * rows * tokens * 4 * 2;
  w.l2_bytes = (t.resident_k > 0 ? 0 : activation_bytes) + weight_bytes;
  // A strip of each row tile, and where rows are copied too a piece of each.
  w.copies = k_tiles * (rows / 16 + (per.row_copies ? std::min<double>(t.token_rows, tokens) : 0));
  return w;
}

}  // namespace

Prediction predict(const Problem& problem, Pass pass, const Gpu& gpu, const Candidate& candidate) {
  return predict(problem, pass, gpu, candidate, row_of(candidate.tile).instructions(candidate.tile));
}

Prediction predict(const Problem& problem, Pass pass, const Gpu& gpu, const Candidate& c, const Instructions& per) {
  const TileConfig& t = c.tile;
  const FamilyRow& row = row_of(t);
  const Arch& arch = arch_of(gpu);
  Prediction p;
  p.launch_us = gpu.graph_node_us;
  if (problem.tokens == 0) {
    p.bound = "launch";
    p.total_us = p.launch_us;
    return p;
  }
  const double read = reachable_reads(gpu) * 1e6;  // bytes per us
  // Without sorting a down tile visits every expert in turn and adds up in registers.
  const bool accumulate = !row.sorted() && pass == Pass::kDown;
  const double row_tiles = accumulate ? 1 : token_tiles(problem, t.tokens);
  const double n_tiles = static_cast<double>(ceil_div(problem.rows(pass), t.n));
  const double touched = touched_experts(problem);
  const double pairs = static_cast<double>(problem.tokens * problem.picks_per_token());
  double width = t.tokens;
  if (per.token_step > 0 && !accumulate) {
    width = std::min<double>(width, token_tiles(problem, per.token_step) * per.token_step / row_tiles);
  }
  if (row.unit == MatrixUnit::kWgmma) width = wgmma_columns(problem, t.tokens) / row_tiles;
  Work w = work_of(problem, pass, c, per, width);
  if (accumulate) w.repeat(touched);

  // Bytes. Weights of touched experts once (further token tiles of an expert find them in L2); the activations once;
  // what the other GEMM wrote is in L2 when it fits in half of it.
  p.weight_bytes = touched * t.operands * n_tiles * t.n * static_cast<double>(problem.padded_depth(pass)) *
                   problem.bytes_per_weight();
  const double element = t.activation_bits == 16 ? 2 : 0.5 + 1.0 / t.scale_vector;
  const double inner = pairs * static_cast<double>(problem.intermediate) * element;
  const bool inner_in_l2 = inner < gpu.l2_mb * 0.5e6;
  p.activation_bytes = pass == Pass::kGateUp
                           ? static_cast<double>(problem.tokens) * static_cast<double>(problem.hidden) * element
                           : (inner_in_l2 ? 0 : inner);
  p.output_bytes = pass == Pass::kGateUp
                       ? (inner_in_l2 ? 0 : inner)
                       : pairs * static_cast<double>(problem.hidden) * (row.rows == RowForm::kFp4 ? 2 : 4);
  if (pass == Pass::kDown && p.output_bytes < gpu.l2_mb * 0.5e6) p.output_bytes = 0;
  p.flops = 2 * pairs * t.operands * static_cast<double>(problem.rows(pass) * problem.depth(pass));
  p.tiles = row_tiles * n_tiles * c.split_k;
  // Dealt out one by one: a CTA takes as long with one row tile as with all that it can have.
  if (accumulate && per.dealt) {
    p.tiles = std::max(n_tiles, std::min(std::ceil(static_cast<double>(problem.rows(pass)) / kTileRows),
                                         static_cast<double>(gpu.sms)));
  }
  p.padded_flops = p.tiles * w.flops;
  p.instructions_per_weight = w.instructions * 32 / w.weights;

  // Waves. The busiest SM has `mine` tiles, one after the other in each of its CTA slots.
  const double slots = static_cast<double>(gpu.sms) * c.ctas_per_sm;
  p.waves = p.tiles / slots;
  const double full = std::floor(p.waves);
  const double rest = p.tiles - full * slots;
  const double mine = full * c.ctas_per_sm + (rest > 1e-9 ? std::ceil(rest / gpu.sms) : 0);

  // Loads in flight: all but the stage in use; a producer keeps that one moving too.
  const double per_stage = static_cast<double>(t.operands * t.n) * t.k * problem.bytes_per_weight();
  const double busy = per.dealt ? t.stage_warps : 1;
  const double ahead = t.stages - (t.producer_warps > 0 ? 0.5 * busy : 1.0);
  const double of_tile = w.weights * problem.bytes_per_weight();
  const double in_flight =
      t.producer_warps > 0 && p.waves > 1 ? per_stage * ahead : std::min(per_stage * ahead, of_tile);
  p.in_flight_bytes = in_flight * c.ctas_per_sm;
  const double need = read * gpu.latency_us * per.latency;
  const double bytes = p.weight_bytes + p.activation_bytes + p.output_bytes;
  const double bytes_per_tile = bytes / p.tiles;
  p.memory_us = full * slots * bytes_per_tile / (read * saturation(slots * in_flight, need));
  if (rest > 0) p.memory_us += rest * bytes_per_tile / (read * saturation(rest * in_flight, need));

  // Compute terms at a clock that falls as the kernel gets long; two rounds suffice.
  const double resident = std::min<double>(c.ctas_per_sm, std::ceil(p.tiles / gpu.sms));
  const double warps = t.warps * resident;
  const double per_clock = std::min<double>(arch.issue_per_clock * kIssueEfficiency, warps * per.per_clock);
  const bool wgmma = row.unit == MatrixUnit::kWgmma;
  for (int round = 0; round < 2; ++round) {
    const double hot = p.memory_us / (p.memory_us + kPowerUs);
    const double long_run = std::max({p.memory_us, p.matrix_us, p.issue_us});
    const double heat = std::max(hot, long_run / (long_run + kPowerUs));
    p.ghz = gpu.clock_ghz + (gpu.sustained_ghz - gpu.clock_ghz) * heat;
    const double clocks = p.ghz * 1e3;  // per us
    const double matrix_rate =
        row.unit == MatrixUnit::kFp4Mma
            ? reachable_fp4(gpu, false) * (1 - heat) + reachable_fp4(gpu, true) * heat
            : reachable_bf16(gpu, wgmma, false) * (1 - heat) + reachable_bf16(gpu, wgmma, true) * heat;
    p.issue_us = mine * w.instructions / (per_clock * clocks);
    p.matrix_us = mine * w.flops / (matrix_rate * matrix_efficiency(t, width) * 1e6 / gpu.sms);
    p.smem_us = mine * w.smem_bytes / (arch.smem_bytes_per_clk * clocks);
    p.l2_us = mine * w.l2_bytes * per.l2_share / (arch.l2_bytes_per_clk * clocks);
    const double issuers = std::max(1, t.producer_warps) * resident;
    p.copy_us = mine * w.copies * std::max(per.copy_clocks, per.issue_clocks / issuers) / clocks;
  }

  // The last stage of the last tile: nothing overlaps it, and only the warps that share it work on it.
  const double sharing = static_cast<double>(t.warps) / t.stage_warps;
  const double last_stage = w.instructions / std::max(1.0, w.stage_count) /
                            (std::min(arch.issue_per_clock * kIssueEfficiency, sharing * kIssuePerWarp) * p.ghz * 1e3);
  p.latency_us = per.chain * gpu.latency_us + per.epilogue_us + last_stage;
  p.drain_us = per.tail * std::max(p.memory_us, p.issue_us) / p.waves;
  const double turns = std::ceil(p.waves) - 1;
  if (turns > 0) {
    // Between tiles: the pipeline refills (a producer is ahead already) and the output leaves; CTAs hide each other's.
    const double output = t.tokens * t.n * 2.0 / (arch.l2_bytes_per_clk * p.ghz * 1e3);
    const double refill = gpu.latency_us * (t.producer_warps > 0 ? 0.1 : 1.0);
    p.drain_us += turns * (refill + output + per.turn_us) / c.ctas_per_sm;
    if (per.dealt) p.drain_us = 0;  // the ring runs on, others finish, and down runs beside gate-up
  }
  if (c.split_k > 1) {
    const double partial = row_tiles * n_tiles * t.tokens * t.n * t.operands * 4.0 * c.split_k * 2;
    p.split_us = partial / (read * kL2Speedup) + gpu.latency_us;
  }
  double together = overlap({p.memory_us, p.issue_us, p.matrix_us, p.smem_us, p.l2_us, p.copy_us});
  if (t.stage_warps > 1) together *= per.apart;
  p.total_us = p.launch_us + p.latency_us + together + p.drain_us + p.split_us;

  const std::pair<double, const char*> terms[] = {{p.memory_us, "memory"},
                                                  {p.issue_us, "issue"},
                                                  {p.matrix_us, "matrix"},
                                                  {p.smem_us, "shared memory"},
                                                  {p.l2_us, "L2"},
                                                  {p.copy_us, "copies"},
                                                  {p.launch_us + p.latency_us + p.drain_us + p.split_us, "latency"}};
  p.bound =
      std::max_element(std::begin(terms), std::end(terms), [](auto& a, auto& b) { return a.first < b.first; })->second;
  return p;
}

}  // namespace fourfold::plan::moe
