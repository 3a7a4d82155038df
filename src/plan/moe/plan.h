// Plans. A problem and a card give candidates; every candidate is either ranked by its predicted time or rejected with
// a reason; the plan of a layer is the best candidate of each of its two GEMMs and what runs around them.
//
//   problem -> families() -> candidates() -> first_refusal() -> predict() -> plan_layer() -> kernel_of()
//
// A Plan is data: it is printed, pinned by golden tests, compiled, launched, timed and reported.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "plan/arch.h"
#include "plan/buckets.h"
#include "plan/kernel.h"
#include "plan/moe/family.h"
#include "plan/moe/problem.h"

namespace fourfold::plan::moe {

// "mma-sync 8x128x128 s4 w8+4 x2 swap": tokens x n x k, stages, compute + producer warps, CTAs per SM.
std::string to_string(const Candidate& candidate);
// The aggregate initialiser that device code uses: "{.family = ..., .pass = ..., .tokens = 8, ...}".
std::string to_source(const TileConfig& tile);

// ---- legality
// ---------------------------------------------------------------------------------------------------------

struct Refusal {
  std::string_view rule;  // "shared memory per block"; stable, rejections are grouped by it
  std::string reason;     // with numbers
};

// Every filter in order; the first that refuses. Each is a function of its own in legality.cpp.
std::optional<Refusal> first_refusal(const Problem& problem, Pass pass, const Gpu& gpu, const Candidate& candidate);
// How many rules are asked before the one of this name.
int rules_before(std::string_view name);

// Registers per thread that the kernel is expected to need (accumulators, fragments, loads in flight, addressing), and
// the most it may have with the wanted CTAs per SM.
int estimated_registers(const Candidate& candidate);
int register_limit(const Arch& arch, const Candidate& candidate);

// ---- cost
// -------------------------------------------------------------------------------------------------------------

// Predicted time of one GEMM. The throughput terms overlap; the largest is the bound.
struct Prediction {
  double total_us = 0;
  // Overlapping terms, each what the kernel would take if only that unit counted (wave quantisation included).
  double memory_us = 0;  // bytes from memory at the rate that the loads in flight can sustain
  double issue_us = 0;   // instructions
  double matrix_us = 0;  // padded flops
  double smem_us = 0;    // shared-memory bytes
  double l2_us = 0;      // bytes from L2 into the SMs
  double copy_us = 0;    // bulk copies, each of which has a fixed cost
  // Terms that add.
  double launch_us = 0;   // graph node
  double latency_us = 0;  // the chain before the first weight, and the last tile's way out
  double drain_us = 0;    // pipeline refills between tiles that nothing hides
  double split_us = 0;    // reduction of split K
  std::string bound;      // name of the largest term
  // What it was computed from.
  double weight_bytes = 0, activation_bytes = 0, output_bytes = 0;
  double flops = 0, padded_flops = 0;
  double tiles = 0, waves = 0;
  double instructions_per_weight = 0;
  double in_flight_bytes = 0;  // per SM
  double ghz = 0;
};
Prediction predict(const Problem& problem, Pass pass, const Gpu& gpu, const Candidate& candidate);
Prediction predict(const Problem& problem, Pass pass, const Gpu& gpu, const Candidate& candidate,
                   const Instructions& instructions);

// ---- plans
// ------------------------------------------------------------------------------------------------------------

struct Ranked {
  Candidate candidate;
  Prediction prediction;
  bool implemented = false;
  std::string missing;  // why it cannot run today; empty when it can
};

struct Rejected {
  std::string tile;  // the candidate, or the family when all of it is out
  std::string_view rule;
  std::string reason;
};

// kBf16 or kNvfp4.
inline ActivationFormat activations_of(const TileConfig& tile) { return row_of(tile).activations(); }

struct GemmPlan {
  Pass pass = Pass::kGateUp;
  Ranked chosen;
  int64_t grid = 0;            // CTAs launched
  int64_t launch_smem = 0;     // bytes of shared memory asked for, at least smem().total: launch_smem() of the pair
  std::vector<Ranked> ranked;  // every legal candidate, fastest first; ranked[0] may be faster than chosen when it has
                               // no kernel yet
  std::vector<Rejected> rejected;
  SmemMap smem() const { return make_smem_map(chosen.candidate.tile); }
};

// The fastest plan with one format of activations.
struct FormatPlan {
  ActivationFormat activations = ActivationFormat::kBf16;
  double predicted_us = 0;
};

struct LayerPlan {
  Problem problem;
  Gpu gpu;
  GemmPlan gate_up, down;
  // Of each format that the problem allows and the card can run; which one runs is activations().
  std::vector<FormatPlan> formats;
  double quantise_us = 0;  // of the layer's input, with NVFP4 activations
  double route_us = 0;     // sort of the (token, expert) pairs; 0 where the kernels read the routes themselves
  double apart_us = 0;     // without sorting: what it costs that down has no room beside gate-up on an SM
  double combine_us = 0;   // weighted sum over the experts of a token
  double shared_us = 0;    // the shared expert's bytes, moved beside the routed ones
  double predicted_us = 0;
  double floor_us = 0;  // bytes that must move at the reachable bandwidth, or flops at the reachable rate
  std::string bound;

  // What the chosen kernels multiply with: kBf16 or kNvfp4. With problem.activations == kAuto this is the choice of the
  // token bucket.
  ActivationFormat activations() const { return activations_of(gate_up.chosen.candidate.tile); }
};

struct PlanOptions {
  bool only_implemented = false;  // rank what can be launched today and nothing else
  // Candidates that the caller can use; none means all. What fails its self-test on a device is left out in this way.
  std::function<bool(Pass, const Candidate&)> usable = nullptr;
  bool explain = true;  // keep the rejected candidates and their reasons (most of the time planning takes)
};

// All candidates of one pass on an architecture: the one list that planner, compiler, launcher and tests share.
std::vector<Candidate> candidates(const Problem& problem, Pass pass, const Arch& arch);

// Error when no candidate is legal (the message carries the most frequent reason), or when the problem is invalid.
LayerPlan plan_layer(const Problem& problem, const Gpu& gpu, const PlanOptions& options = {});

// Whether a layer without usable input scales (nvfp4/input_scales.h) has to run other kernels than this plan's: the
// plan multiplies NVFP4 activations, and the problem allows bf16 too.
bool needs_input_scales(const LayerPlan& plan);
// The plan of such a layer: the same problem with bf16 activations.
LayerPlan plan_without_input_scales(const LayerPlan& plan, const PlanOptions& options = {});

// Chooses these two of the ranked candidates instead, by name (to_string); false, and nothing changes, when they are
// not there, have no kernel or do not fit together.
bool choose_by_name(LayerPlan* plan, std::string_view gate_up, std::string_view down);

inline RowForm row_form(const TileConfig& tile) { return row_of(tile).rows; }

// Whether two tiles make a layer: the rows have the same form, and the blocks of tokens that one takes are those of the
// other (the routing kernel cuts them once).
bool compatible(const TileConfig& gate_up, const TileConfig& down);

// CTAs to launch for a batch of problem.tokens.
int64_t launch_grid(const Problem& problem, Pass pass, const Gpu& gpu, const Candidate& candidate);

// Bytes of shared memory to ask for at the launch of two tiles that make a layer. Without sorting, where kernels run
// side by side with each other and with the next layer's, more than the map needs: so much that no SM has room for more
// CTAs of a kernel than are meant to be there. Otherwise CTAs crowd on SMs that happen to be free when they are
// launched, and everybody waits for these.
struct LaunchSmem {
  int64_t gate_up = 0, down = 0;
  bool side_by_side = false;  // without sorting: all CTAs of both fit on an SM; if not, nothing is added
};
LaunchSmem launch_smem(const Candidate& gate_up, const Candidate& down, const Arch& arch);

// The kernel of a candidate: what is compiled and launched. It depends on the tile and on the problem's shape.
KernelSource kernel_of(const Problem& problem, Pass pass, const Candidate& candidate);
// Every kernel that the plans of all token buckets name, each once; with activations kAuto also those of layers without
// input scales.
std::vector<KernelSource> kernels_of(const Problem& problem, const Gpu& gpu, const PlanOptions& options = {},
                                     int64_t most_tokens = kLimits.tokens);

// ---- printing (print.cpp)
// ---------------------------------------------------------------------------------------------

struct PrintOptions {
  // Every ranked and every rejected candidate (text: on its own line). Otherwise the fastest few, and the rejected ones
  // by rule: how many, and one of them with its reason.
  bool all = false;
};
std::string to_text(const LayerPlan& plan, const PrintOptions& options = {});
// One object; docs/plan.md lists its fields.
std::string to_json(const LayerPlan& plan, const PrintOptions& options = {});

}  // namespace fourfold::plan::moe
