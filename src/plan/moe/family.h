// The kernel families of the expert layer: one row each (families.cpp). Whoever needs to know what a family can do, how
// it is compiled, launched or tested reads its row, and no code elsewhere asks for a family by its name. A tile and its
// map of shared memory are in tile.h, because the kernel reads them too.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "plan/arch.h"
#include "plan/moe/problem.h"

namespace fourfold::plan::moe {

struct Candidate {
  TileConfig tile;
  int ctas_per_sm = 1;
  int split_k = 1;  // CTAs that share one output tile along K; their fp32 partial sums are added in a fixed order
};

// The form in which a kernel takes token rows, and in which gate-up leaves its output for down. It decides what runs
// around the two GEMMs and which arguments they take; the launcher has one object for each (cuda/moe/form.h).
enum class RowForm {
  kRows,      // bf16 rows, sorted by expert; down leaves fp32 rows
  kSwizzled,  // sorted bf16, gate-up's output as [K / 64][slots][64] (kernels/moe/tables.h); down leaves groups
  kFp4,       // sorted e2m1 rows and their scales; down leaves groups
  kOneToken,  // as the choices are, nothing is sorted: a row of gate-up's output for each choice; down adds them up
  kFewTokens  // the same for several tokens
};

// What multiplies.
enum class MatrixUnit {
  kMmaSync,  // m16n8k16 on bf16, weights dequantised in registers
  kWgmma,    // m64nNk16 likewise
  kFp4Mma,   // block-scaled m16n8k64
};

// What a tile costs beside its bytes. Warp instructions, in units per weight and lane unless noted; see docs/plan.md
// for where each figure comes from.
struct Instructions {
  double dequantise;  // decode, scale, fragment loads and addressing
  double per_mma;     // issued per mma besides the mma itself (fragment loads of the other operand)
  double per_stage;   // per warp and stage: barriers, copy issue
  double per_output;  // per output element and lane: epilogue
  int chain;          // dependent memory reads before the first weight arrives
  // Bulk copies: clocks of the SM's copy engine for each, and of a producer warp to issue one; 0: the kernel has none.
  double copy_clocks = 0;
  double issue_clocks = 0;
  int token_step = 0;       // a narrower block is computed at its own width, in these steps; 0: always the whole tile
  bool row_copies = false;  // a bulk copy for each token row of a stage too
  // Of one warp's own parallelism, instructions per clock.
  double per_clock = 0.55;
  double latency = 1;        // how much later than one alone its reads answer
  double epilogue_us = 0.4;  // from the last mma to the last byte
  double turn_us = 0.3;      // between two tiles of one CTA: header, barriers, first fragments
  double tail = 0;           // of a tile's time: CTAs do not end together
  double apart = 1;          // how much longer it takes where groups of warps take turns at stages
  double l2_share = 1;       // of the bytes that pass L2, what is not hidden behind their arrival from memory
  // Row tiles are dealt out one by one, the ring runs on from one to the next, others finish them, and every group of
  // warps has a stage in use.
  bool dealt = false;
};

struct FamilyRow {
  Family family;
  std::string_view name;   // in plans, tuned tables and JSON
  std::string_view needs;  // what an architecture must have, for the message where it has not
  bool (*runs_on)(const Arch& arch);
  MatrixUnit unit;
  RowForm rows;

  // For the compiler: the device header and the kernels, templates over the tile, in fourfold::moe.
  std::string_view source;
  std::string_view gate_up, down;

  // Why none of its tiles is for this problem (format of the activations and architecture apart); empty where some are.
  std::string (*absent)(const Problem& problem, const Arch& arch);
  // Adds every tile of the family for a pass: the one list that planner, compiler, launcher, tuner and tests share.
  void (*tiles)(const Problem& problem, Pass pass, std::vector<Candidate>* out);
  // Why the kernel does not take this candidate, although the rules allow it; empty where it does.
  std::string (*refuses)(const Problem& problem, Pass pass, const Candidate& candidate);
  // Registers per thread that the kernel is expected to need (fitted to compiled kernels, docs/plan.md), and the most
  // that it may have with the wanted CTAs per SM.
  int (*registers)(const Candidate& candidate);
  int (*register_limit)(const Arch& arch, const Candidate& candidate);
  // Warps along the weight rows; the others of a K slice share the tokens.
  int (*warps_along_rows)(const TileConfig& tile);
  Instructions (*instructions)(const TileConfig& tile);

  // Tokens are sorted by expert and cut into blocks before; otherwise the kernels read the choices themselves, and
  // down adds up the experts of a token.
  bool sorted() const { return rows != RowForm::kOneToken && rows != RowForm::kFewTokens; }
  // kBf16 or kNvfp4.
  ActivationFormat activations() const {
    return unit == MatrixUnit::kFp4Mma ? ActivationFormat::kNvfp4 : ActivationFormat::kBf16;
  }
};

std::span<const FamilyRow> families();
const FamilyRow& row_of(Family family);
inline const FamilyRow& row_of(const TileConfig& tile) { return row_of(tile.family); }

// Why the existing kernels do not take this candidate; empty when they do.
std::string kernel_refuses(const Problem& problem, Pass pass, const Candidate& candidate);

std::string_view to_string(Family family);
std::string_view to_string(Pass pass);
std::string_view to_string(Epilogue epilogue);
std::string_view region_name(RegionId id, const TileConfig& tile);

}  // namespace fourfold::plan::moe
