// What is asked of an expert layer: shapes, formats, and how many tokens come at once.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "plan/moe/tile.h"

namespace fourfold::plan::moe {

enum class WeightFormat { kNvfp4, kMxfp4 };  // e2m1 with e4m3 scales of 16, or with e8m0 scales of 32
// What the multiplications may take: bf16 (W4A16), NVFP4 (W4A4), or whichever of the two is faster for a batch. The
// last two are for checkpoints that were calibrated for NVFP4 activations; bf16 is right for every checkpoint.
enum class ActivationFormat { kBf16, kNvfp4, kAuto };
// The function between the two GEMMs. A clamp comes with the launch.
enum class Activation { kSwiGlu, kSwiGluClamp, kRelu2 };
enum class SharedExpert { kNone, kBf16, kNvfp4 };

struct Problem {
  std::string name;  // of the shape, for people
  int64_t experts = 0;
  int64_t top_k = 0;
  int64_t elsewhere = 0;  // experts of other ranks, of which a token's choices may be
  int64_t hidden = 0;
  int64_t intermediate = 0;  // of one expert on one rank
  int64_t tokens = 0;        // in the batch
  WeightFormat weights = WeightFormat::kNvfp4;
  ActivationFormat activations = ActivationFormat::kBf16;
  Activation activation = Activation::kSwiGlu;
  SharedExpert shared = SharedExpert::kNone;
  int64_t shared_intermediate = 0;

  int scale_vector() const { return weights == WeightFormat::kNvfp4 ? 16 : 32; }
  bool allows(ActivationFormat format) const { return activations == format || activations == ActivationFormat::kAuto; }
  bool gated() const { return activation != Activation::kRelu2; }
  int operands(Pass pass) const { return pass == Pass::kGateUp && gated() ? 2 : 1; }
  // Weight rows (of each operand) and contraction length of a pass.
  int64_t rows(Pass pass) const { return pass == Pass::kGateUp ? intermediate : hidden; }
  int64_t depth(Pass pass) const { return pass == Pass::kGateUp ? hidden : intermediate; }
  // The contraction as the kernels see it: a multiple of kDepthGrain. The packed weights are padded with zeros (codes
  // and scales) and the loaders read zeros for the activations' missing columns.
  int64_t padded_depth(Pass pass) const;
  // A shared expert in the routed experts' format whose width is a multiple of theirs runs as this many more experts,
  // which every token chooses (shared_slices() of cuda/moe/weights.h); 0 where it has kernels of its own.
  int64_t shared_slices() const;
  // Experts that the kernels see, and choices that each token brings.
  int64_t all_experts() const { return experts + shared_slices(); }
  int64_t picks_per_token() const { return top_k + shared_slices(); }
  double bytes_per_weight() const { return 0.5 + 1.0 / scale_vector(); }
  bool operator==(const Problem&) const = default;
};

inline constexpr int kDepthGrain = 64;

// "bf16", "nvfp4", "auto", as --activations takes them; parsing: Error that lists the names otherwise.
std::string_view to_string(ActivationFormat format);
ActivationFormat parse_activations(std::string_view name);

// What the kernels' arithmetic can hold.
struct Limits {
  int64_t experts = 4096, top_k = 64;
  int64_t hidden_min = 16, hidden = 1 << 17;
  int64_t intermediate_min = 16, intermediate = 1 << 18;
  int64_t tokens = 1 << 20;
  int64_t ranks = 64;
};
inline constexpr Limits kLimits;

// Throws Error, naming the field, when a field is outside of kLimits or does not fit the others.
void validate(const Problem& problem);

// The slice of one rank under tensor parallelism: the intermediate dimension is cut, that of the shared expert alike,
// and padded with zeros to whole scale vectors (model/shard.h).
Problem rank_slice(const Problem& problem, int64_t ranks);

struct NamedShape {
  std::string_view name;   // as --model takes it
  std::string_view title;  // the model
  int64_t experts, top_k, hidden, intermediate, shared_intermediate;
  Activation activation;
  int64_t layers;  // 0 = not known
};
std::span<const NamedShape> named_shapes();
// By name, ignoring case; an Error that lists the names otherwise. `tokens` is left 0.
Problem find_shape(std::string_view name);

// ---- routing --------------------------------------------------------------------------------------------------------
// Each token picks top_k distinct experts, all equally likely; the rows of one expert are then Binomial(tokens, top_k /
// experts). Slices of a shared expert have a row for every token.

// Expected number of experts with at least one row.
double touched_experts(const Problem& problem);
// Expected number of token tiles over all experts: experts * E[ceil(rows / tile)].
double token_tiles(const Problem& problem, int tile);
// Expected number of token columns that all tiles compute, where a wgmma tile's block of an expert is computed in the
// narrowest of its widths (wgmma_width()): blocks of one expert are as equal as multiples of 8 rows allow.
double wgmma_columns(const Problem& problem, int tile);
// Rows that the busiest expert is expected to have (the expectation over experts of the maximum, estimated by the
// (1 - 1/experts) quantile).
int64_t busiest_rows(const Problem& problem);

}  // namespace fourfold::plan::moe
