// The kernel families of the expert layer, one section each: which tiles, what the kernel takes of them, how many
// registers and instructions it needs. The rows are at the end. legality.cpp says which tiles a card and a problem
// allow, cost.cpp which are fast.
#include "plan/moe/family.h"

#include <algorithm>
#include <array>

#include "base/check.h"
#include "base/math.h"

namespace fourfold::plan::moe {
namespace {

using List = std::vector<Candidate>;

constexpr int kTokenTileStep = 8, kLargestTokenTile = 192;
constexpr int kDepthTiles[] = {64, 128, 256};
// Measured on an H200 over 450 layers: tiles that differ in the length of their copies only.
constexpr double kCopyClocks = 42;    // of the SM's copy engine for each bulk copy
constexpr double kIssueClocks = 100;  // of a producer warp to issue one
constexpr double kTail = 0.12;        // of a tile's time, sorted kernels with mma.sync

TileConfig base_tile(const Problem& problem, Pass pass, Family family) {
  TileConfig t = {};
  t.family = family;
  t.pass = pass;
  t.operands = problem.operands(pass);
  t.scale_vector = problem.scale_vector();
  t.activation_bits = row_of(family).activations() == ActivationFormat::kNvfp4 ? 4 : 16;
  t.swap_ab = 1;
  t.k_warps = t.stage_warps = 1;
  t.epilogue = Epilogue::kDirect;
  return t;
}

// `rows` are weight rows of all operands together.
void set_sizes(TileConfig* t, int tokens, int rows, int k, int stages, int warps) {
  t->tokens = t->token_rows = tokens;
  t->n = rows / t->operands;
  t->k = k;
  t->stages = stages;
  t->warps = warps;
}

// Warps of a tile that shares K between warps: all, those that share an output along K, and the groups of these that
// take whole stages in turn (long work per wait) rather than share the units of each (short latency).
struct SharedWarps {
  int warps, k_warps, stage_warps;
};

// fp32 accumulators of a thread, spread evenly over the compute threads of one K slice.
int accumulators(const Candidate& c) {
  const TileConfig& t = c.tile;
  return static_cast<int>(ceil_div(int64_t{t.tokens} * t.operands * t.n, t.warps / t.k_warps * 32));
}

bool down(const TileConfig& t) { return t.pass == Pass::kDown; }

// Registers are allotted per warp in units of 256, so a thread's count is a multiple of 8.
int even_limit(const Arch& arch, const Candidate& c) {
  const int threads = (c.tile.warps + c.tile.producer_warps) * 32;
  return std::min(arch.max_registers, arch.registers_per_sm / c.ctas_per_sm / threads / 8 * 8);
}

int any_rows(const TileConfig& t) { return row_warps(t); }
int every_warp(const TileConfig& t) { return t.warps / t.k_warps; }

std::string any_problem(const Problem&, const Arch&) { return ""; }
std::string takes_all(const Problem&, Pass, const Candidate&) { return ""; }

// ---- streaming ------------------------------------------------------------------------------------------------------

namespace streaming {

constexpr SharedWarps kWarps[] = {{4, 1, 1}, {4, 2, 1}, {4, 2, 2}, {4, 4, 1}, {4, 4, 2}, {4, 4, 4}, {8, 1, 1},
                                  {8, 2, 1}, {8, 2, 2}, {8, 4, 1}, {8, 4, 2}, {8, 4, 4}, {8, 8, 1}, {8, 8, 2}};

void tiles(const Problem& problem, Pass pass, List* out) {
  TileConfig t = base_tile(problem, pass, Family::kStreaming);
  for (const int tokens : {8, 16, 24, 32}) {
    for (const int rows : {16, 32, 64, 128, 256}) {
      for (const int k : {64, 128, 256, 512}) {
        for (const int stages : {2, 3, 4, 6, 8}) {
          for (const auto& [warps, k_warps, stage_warps] : kWarps) {
            for (const int ctas : {1, 2, 3, 4}) {
              set_sizes(&t, tokens, rows, k, stages, warps);
              // Bulk copies of one warp are issued one after the other; more rows need more warps.
              t.producer_warps = tokens > 8 ? 4 : 2;
              t.k_warps = k_warps;
              t.stage_warps = stage_warps;
              out->push_back({t, ctas, 1});
            }
          }
        }
      }
    }
  }
  // Where experts have tens of rows, multiplying takes about as long as reading: 16 warps hide each other's latencies,
  // two row tiles each.
  t.k_warps = t.stage_warps = 1;
  t.producer_warps = 4;
  for (const int tokens : {16, 24, 32}) {
    for (const int k : {64, 128, 192, 256}) {
      for (const int stages : {2, 3, 4, 5}) {
        set_sizes(&t, tokens, 512, k, stages, kWideStreamingWarps);
        out->push_back({t, 1, 1});
      }
    }
  }
}

int registers(const Candidate& c) {
  // Gate-up holds two scales and the clamp through its epilogue.
  return (down(c.tile) ? 62 : 68) + accumulators(c) * (down(c.tile) ? 14 : 15) / 10;
}

int limit(const Arch& arch, const Candidate& c) {
  const TileConfig& t = c.tile;
  int per_thread = arch.registers_per_sm / c.ctas_per_sm / ((t.warps + t.producer_warps) * 32) / 8 * 8;
  if (raises_flags(t)) {
    // setmaxnreg: the producers keep 32 of what each thread got at the launch.
    per_thread = (per_thread * (t.warps + t.producer_warps) - t.producer_warps * 32) / t.warps / 8 * 8;
  }
  return std::min(arch.max_registers, per_thread);
}

Instructions instructions(const TileConfig& t) {
  // Down passes ask for their weights before the gate-up pass has ended.
  Instructions i = {2.1, 0.5, 16, 8, down(t) ? 1 : 2, kCopyClocks, kIssueClocks, 8, true};
  // Fitted to 496 pairs of tiles with 8 to 512 tokens of three models on an H200: the pairs that it puts first are
  // within 1.2 % of the fastest on average, 4.4 % at most. CTAs that have an SM each end together: where one of them
  // ends early nobody goes on.
  i.tail = t.warps >= 16 ? kTail / 2 : kTail;
  i.apart = 1.12;
  i.l2_share = t.tokens <= 8 ? 0.75 : t.tokens <= 16 ? 0.9 : 1;
  return i;
}

}  // namespace streaming

// ---- one token, and few: nothing is sorted --------------------------------------------------------------------------

namespace unsorted {

constexpr double kEpilogueUs = 0.25;  // as Instructions::epilogue_us: another warp finishes
constexpr double kTurnUs = 0.05;
constexpr double kIssuePerClock = 0.41;  // where short items follow each other

std::string refuses(const Problem& problem, Pass, const Candidate&) {
  return problem.picks_per_token() > 16 ? "unsorted kernels take at most 16 choices of a token" : "";
}

// Room is left for the next kernel's CTA, or its early launch buys nothing.
int limit(const Arch& arch, const Candidate& c) {
  const TileConfig& t = c.tile;
  // The warps of an odd number do not spread evenly over an SM's quarters, and each has registers of its own.
  const int64_t warps = ceil_div(int64_t{c.ctas_per_sm + 1} * (t.warps + t.producer_warps), int64_t{4});
  return std::min(arch.max_registers, static_cast<int>(arch.registers_per_sm / 4 / (warps * 32) / 8 * 8));
}

}  // namespace unsorted

namespace one_token {

// All warps share all outputs.
constexpr SharedWarps kWarps[] = {{4, 4, 1}, {4, 4, 2}, {8, 8, 1}, {8, 8, 2}, {8, 8, 4}, {8, 8, 8}};

std::string absent(const Problem& problem, const Arch&) {
  return problem.tokens > 1 ? fmt::format("for one token, the batch has {}", problem.tokens) : "";
}

// What was near the best of some 900 pairs of tiles on an H200. All warps share K and have one or two row tiles, and at
// most two pairs of units of a stage between them, or the compiler runs out of registers. Copies of 512 or 1024, unless
// K is shorter.
bool suits(int64_t depth, int rows, int k, const SharedWarps& w) {
  if (k < 512 && 2 * k <= depth) return false;
  const int units = k / kDepthGrain / (w.k_warps / w.stage_warps);
  return (units + 1) / 2 * (rows / 16) <= 2;
}

void tiles(const Problem& problem, Pass pass, List* out) {
  TileConfig t = base_tile(problem, pass, Family::kOneToken);
  for (const int rows : {16, 32}) {
    for (const int k : {64, 128, 256, 512, 1024}) {
      for (const int stages : {2, 3, 4, 6, 8, 12}) {
        for (const SharedWarps& kind : kWarps) {
          if (!suits(problem.padded_depth(pass), rows, k, kind)) continue;
          set_sizes(&t, kTokenTileStep, rows, k, stages, kind.warps);
          t.token_rows = 1;
          t.producer_warps = pass == Pass::kGateUp ? 2 : 1;  // one brings weights; gate-up: another finishes
          t.k_warps = kind.k_warps;
          t.stage_warps = kind.stage_warps;
          out->push_back({t, 1, 1});  // the other half of an SM is the other kernel's
        }
      }
    }
  }
}

int registers(const Candidate& c) {
  // Few accumulators, but all units of a stage in one piece.
  return 76 + (down(c.tile) ? accumulators(c) * 7 / 4 : accumulators(c) / 2);
}

Instructions instructions(const TileConfig& t) {
  // Codes need no scaling; a warp's row tiles share what the token's row costs. Reads answer late: every CTA asks for a
  // whole ring at once. Fitted to 43 pairs of tiles on an H200, whose sums (down overlaps gate-up) are within 10 %.
  const double row_tiles = static_cast<double>(t.operands * t.n) / 16 / static_cast<double>(t.warps / t.k_warps);
  Instructions i = {1.15 + 0.3 / row_tiles, 0.25, 60, 8, down(t) ? 1 : 2, kCopyClocks, kIssueClocks, 8, true};
  i.per_clock = unsorted::kIssuePerClock;
  i.latency = 1.4;
  i.epilogue_us = unsorted::kEpilogueUs;
  i.turn_us = unsorted::kTurnUs;
  return i;
}

}  // namespace one_token

namespace few_tokens {

constexpr int kMostTokens = 8;
constexpr int64_t kSmem = 160 << 10;                      // of an SM: token rows, two rings and two sets of tables
constexpr SharedWarps kWarps[] = {{8, 8, 2}, {8, 8, 4}};  // gate-up: the first only
constexpr int kStageRows[] = {2, 4};                      // of down

std::string absent(const Problem& problem, const Arch& arch) {
  if (problem.tokens < 2 || problem.tokens > kMostTokens) {
    return fmt::format("for 2 to {} tokens, the batch has {}", kMostTokens, problem.tokens);
  }
  if (arch.smem_per_sm < kSmem) {
    return fmt::format("wants {} B of shared memory per SM, {} has {}", kSmem, arch.name, arch.smem_per_sm);
  }
  return "";
}

// Down's stages have warps of their own that bring rows, as many as divide the stages.
void tiles(const Problem& problem, Pass pass, List* out) {
  TileConfig t = base_tile(problem, pass, Family::kFewTokens);
  const bool gate_up = pass == Pass::kGateUp;
  for (const int rows : {16, 32}) {
    for (const int k : {256, 512, 1024}) {
      if (k < 512 && 2 * k <= problem.padded_depth(pass)) continue;  // short copies only where K is short
      if (k > 512 && !gate_up) continue;
      for (const int stages : {3, 4, 6, 8, 12}) {
        for (const auto& [warps, k_warps, stage_warps] : kWarps) {
          if (gate_up && stage_warps > 2) continue;
          set_sizes(&t, kTokenTileStep, rows, k, stages, warps);
          t.k_warps = k_warps;
          t.stage_warps = stage_warps;
          if (gate_up) {
            t.producer_warps = 3;
            t.resident_k = static_cast<int>(problem.padded_depth(pass));
            out->push_back({t, 1, 1});
            continue;
          }
          t.producer_warps = 1 + (stages % 4 == 0 ? 4 : 3);
          for (const int token_rows : kStageRows) {
            t.token_rows = token_rows;
            out->push_back({t, 1, 1});
          }
        }
      }
    }
  }
}

int registers(const Candidate& c) {
  // With code of its own for single tokens 80 are enough for two row tiles of two units; more spills.
  const TileConfig& t = c.tile;
  const int units = t.k / kDepthGrain / (t.k_warps / t.stage_warps);
  return !multiplies_alone(t) ? 72 : units * (t.operands * t.n / 16) > 4 ? 96 : 80;
}

Instructions instructions(const TileConfig& t) {
  // Long rows: most experts have one token, whose codes need no scaling. One warp alone issues copies, with all that
  // goes with it. Two rings are full at a time.
  constexpr double kFewIssueClocks = 300;
  Instructions i = {multiplies_alone(t) ? 1.7 : 2.1, 0.5, 60, 8, down(t) ? 1 : 2, kCopyClocks, kFewIssueClocks, 8};
  i.per_clock = unsorted::kIssuePerClock;
  i.epilogue_us = unsorted::kEpilogueUs;
  i.turn_us = unsorted::kTurnUs;
  i.dealt = true;
  return i;
}

}  // namespace few_tokens

// ---- mma-sync -------------------------------------------------------------------------------------------------------

namespace mma_sync {

void tiles(const Problem& problem, Pass pass, List* out) {
  TileConfig t = base_tile(problem, pass, Family::kMmaSync);
  for (int tokens = kTokenTileStep; tokens <= kLargestTokenTile; tokens += kTokenTileStep) {
    for (const int swap : {1, 0}) {
      if (swap == 0 && tokens % 64 != 0) continue;
      for (const int rows : {64, 128, 256}) {
        for (const int k : kDepthTiles) {
          for (const int stages : {2, 3, 4, 6}) {
            for (const int warps : {4, 8}) {
              for (const int ctas : {1, 2, 3, 4}) {
                for (const int split : {1, 2, 4}) {
                  if (split > 1 && tokens > 16) continue;  // more rows mean more tiles: nothing is left to split
                  set_sizes(&t, tokens, rows, k, stages, warps);
                  t.swap_ab = swap;
                  out->push_back({t, ctas, split});
                }
              }
            }
          }
        }
      }
    }
  }
}

int registers(const Candidate& c) {
  return (!down(c.tile) && c.tile.operands == 2 ? 88 : 76) + accumulators(c) * 15 / 8;
}

Instructions instructions(const TileConfig& t) {
  // Three reads more than a streaming tile: nobody runs ahead. Measured 3 us behind it at 2 and 4 tokens.
  Instructions i = {2.1, 1.1, 60, 8, down(t) ? 4 : 5};
  i.tail = kTail;
  return i;
}

}  // namespace mma_sync

// ---- wgmma ----------------------------------------------------------------------------------------------------------

namespace wgmma {

void tiles(const Problem& problem, Pass pass, List* out) {
  TileConfig t = base_tile(problem, pass, Family::kWgmma);
  t.producer_warps = 4;  // a whole warpgroup: setmaxnreg moves registers between warpgroups
  if (pass == Pass::kGateUp) t.epilogue = Epilogue::kDedicated;
  for (int tokens = kTokenTileStep; tokens <= kLargestTokenTile; tokens += kTokenTileStep) {
    // 8 measured up to 10 % slower than 7, and down with 160 tokens or more 0.1 to 1.3 % slower with 7 than with 6.
    const int most_stages = down(t) && tokens >= 160 ? 6 : 7;
    for (const int rows : {64, 128, 256, 512}) {
      for (const int k : kDepthTiles) {
        for (const int stages : {2, 3, 4, 5, 6, 7}) {
          if (stages > most_stages) continue;
          for (const int warps : {4, 8}) {
            for (const int ctas : {1, 2}) {
              set_sizes(&t, tokens, rows, k, stages, warps);
              out->push_back({t, ctas, 1});
            }
          }
        }
      }
    }
  }
}

// Tiles of 256 weight rows whose multiplications NVRTC 13.0 serialises, whatever the sizes of the layer are (found on
// the way to the plans of three models; jit::refusal_of finds any others when they are compiled).
constexpr struct {
  Pass pass;
  int tokens, stages;
} kSerialised[] = {{Pass::kGateUp, 112, 7},
                   {Pass::kGateUp, 160, 6},
                   {Pass::kDown, 80, 7},
                   {Pass::kDown, 96, 7},
                   {Pass::kDown, 112, 7}};

// kernels/moe/prefill_sm90.cuh: two compute warpgroups of 128 rows, stages of 64.
std::string refuses(const Problem&, Pass, const Candidate& c) {
  const TileConfig& t = c.tile;
  if (t.operands * t.n != 256 || t.warps != 8 || t.k != 64 || c.ctas_per_sm != 1) {
    return "the kernel takes tiles of 256 weight rows x 64, 8 + 4 warps and one CTA per SM";
  }
  if (t.tokens % 16 != 0 || t.tokens > 176) return "the kernel takes tiles of 16 to 176 tokens in steps of 16";
  if (t.pass == Pass::kGateUp && t.operands == 1 && t.tokens > 160) {
    return "without a gate, ptxas serialises the multiplications of more than 160 tokens";
  }
  for (const auto& s : kSerialised) {
    if (s.pass != t.pass || s.tokens != t.tokens || s.stages != t.stages) continue;
    if (t.pass == Pass::kDown || t.operands == 2) return "NVRTC 13.0 serialises the multiplications";
  }
  return "";
}

int registers(const Candidate& c) { return 56 + accumulators(c); }

// setmaxnreg: the producer warpgroup keeps 40, the compute warpgroups share the rest.
int limit(const Arch& arch, const Candidate& c) {
  const TileConfig& t = c.tile;
  const int budget = arch.registers_per_sm / c.ctas_per_sm;
  return std::min(arch.max_registers, (budget - t.producer_warps * 32 * 40) / (t.warps * 32) / 8 * 8);
}

// Down does not ask for its weights early.
Instructions instructions(const TileConfig&) { return {2.1, 0.5, 20, 8, 2, kCopyClocks, kIssueClocks}; }

}  // namespace wgmma

// ---- FP4 ------------------------------------------------------------------------------------------------------------

namespace fp4 {

void tiles(const Problem& problem, Pass pass, List* out) {
  TileConfig t = base_tile(problem, pass, Family::kFp4);
  for (int tokens = kTokenTileStep; tokens <= kLargestTokenTile; tokens += kTokenTileStep) {
    for (const int swap : {1, 0}) {
      if (swap == 0 && (tokens < 64 || tokens % 16 != 0)) continue;  // m16: fewer rows would be mostly padding
      for (const int rows : {64, 128, 256}) {
        // Four warps cannot share 64 rows of 8 tokens, and more rows are mostly padding where there are 64 or 192.
        const bool small = rows == 64 && tokens == kTokenTileStep && problem.rows(pass) % 128 != 0;
        for (const int k : kDepthTiles) {
          for (const int stages : {2, 3, 4, 6}) {
            for (const int warps : {2, 4, 8}) {
              if (warps == 2 && !small) continue;
              for (const int ctas : {1, 2, 3}) {
                set_sizes(&t, tokens, rows, k, stages, warps);
                t.swap_ab = swap;
                out->push_back({t, ctas, 1});
              }
            }
          }
        }
      }
    }
  }
}

int registers(const Candidate& c) { return std::max(98, 16 + accumulators(c) * 158 / 100); }

Instructions instructions(const TileConfig& t) { return {1.6, 1.5, 60, down(t) ? 8.0 : 30.0, down(t) ? 1 : 2}; }

}  // namespace fp4

bool has_bulk_copies(const Arch& arch) { return arch.bulk_copy; }

constexpr std::array kFamilies = {
    FamilyRow{.family = Family::kStreaming,
              .name = "streaming",
              .needs = "bulk copies",
              .runs_on = has_bulk_copies,
              .unit = MatrixUnit::kMmaSync,
              .rows = RowForm::kRows,
              .source = "kernels/moe/stream_sm90.cuh",
              .gate_up = "moe_stream",
              .down = "moe_stream",
              .absent = any_problem,
              .tiles = streaming::tiles,
              .refuses = takes_all,
              .registers = streaming::registers,
              .register_limit = streaming::limit,
              .warps_along_rows = every_warp,
              .instructions = streaming::instructions},
    FamilyRow{.family = Family::kOneToken,
              .name = "one-token",
              .needs = "bulk copies",
              .runs_on = has_bulk_copies,
              .unit = MatrixUnit::kMmaSync,
              .rows = RowForm::kOneToken,
              .source = "kernels/moe/one_sm90.cuh",
              .gate_up = "moe_one",
              .down = "moe_one",
              .absent = one_token::absent,
              .tiles = one_token::tiles,
              .refuses = unsorted::refuses,
              .registers = one_token::registers,
              .register_limit = unsorted::limit,
              .warps_along_rows = every_warp,
              .instructions = one_token::instructions},
    FamilyRow{.family = Family::kFewTokens,
              .name = "few-tokens",
              .needs = "bulk copies",
              .runs_on = has_bulk_copies,
              .unit = MatrixUnit::kMmaSync,
              .rows = RowForm::kFewTokens,
              .source = "kernels/moe/few_sm90.cuh",
              .gate_up = "moe_few",
              .down = "moe_few",
              .absent = few_tokens::absent,
              .tiles = few_tokens::tiles,
              .refuses = unsorted::refuses,
              .registers = few_tokens::registers,
              .register_limit = unsorted::limit,
              .warps_along_rows = every_warp,
              .instructions = few_tokens::instructions},
    FamilyRow{.family = Family::kMmaSync,
              .name = "mma-sync",
              .needs = "asynchronous copies",
              .runs_on = [](const Arch& arch) { return arch.cp_async; },
              .unit = MatrixUnit::kMmaSync,
              .rows = RowForm::kRows,
              .source = "kernels/moe/mma_sync.cuh",
              .gate_up = "moe_mma_sync",
              .down = "moe_mma_sync",
              .absent = any_problem,
              .tiles = mma_sync::tiles,
              .refuses = takes_all,
              .registers = mma_sync::registers,
              .register_limit = even_limit,
              .warps_along_rows = any_rows,
              .instructions = mma_sync::instructions},
    FamilyRow{.family = Family::kWgmma,
              .name = "wgmma",
              .needs = "wgmma",
              .runs_on = [](const Arch& arch) { return arch.wgmma; },
              .unit = MatrixUnit::kWgmma,
              .rows = RowForm::kSwizzled,
              .source = "kernels/moe/prefill_sm90.cuh",
              .gate_up = "moe_prefill_gather",
              .down = "moe_prefill",
              .absent = any_problem,
              .tiles = wgmma::tiles,
              .refuses = wgmma::refuses,
              .registers = wgmma::registers,
              .register_limit = wgmma::limit,
              .warps_along_rows = every_warp,
              .instructions = wgmma::instructions},
    FamilyRow{.family = Family::kFp4,
              .name = "fp4",
              .needs = "warp-level FP4 mma",
              .runs_on = [](const Arch& arch) { return arch.fp4_mma; },
              .unit = MatrixUnit::kFp4Mma,
              .rows = RowForm::kFp4,
              .source = "kernels/moe/fp4_sm120.cuh",
              .gate_up = "moe_fp4",
              .down = "moe_fp4",
              .absent = any_problem,
              .tiles = fp4::tiles,
              .refuses = takes_all,
              .registers = fp4::registers,
              .register_limit = even_limit,
              .warps_along_rows = any_rows,
              .instructions = fp4::instructions},
};

}  // namespace

std::span<const FamilyRow> families() { return kFamilies; }

const FamilyRow& row_of(Family family) {
  for (const FamilyRow& row : kFamilies) {
    if (row.family == family) return row;
  }
  assertion_failed("the tile is of a family", __FILE__, __LINE__);
}

std::string kernel_refuses(const Problem& problem, Pass pass, const Candidate& candidate) {
  if (problem.scale_vector() != 16) return "the kernels take NVFP4 scales (16 elements) only";
  if (problem.all_experts() > 1024) return "the kernels sort over at most 1024 experts";
  if (candidate.split_k > 1) return "the kernels do not split K over CTAs";
  return row_of(candidate.tile).refuses(problem, pass, candidate);
}

std::string_view to_string(Family family) { return row_of(family).name; }

std::string_view to_string(Pass pass) { return pass == Pass::kGateUp ? "gate-up" : "down"; }

std::string_view to_string(Epilogue epilogue) {
  switch (epilogue) {
    case Epilogue::kDirect:
      return "direct";
    case Epilogue::kOverlay:
      return "overlay";
    case Epilogue::kDedicated:
      return "dedicated";
  }
  return "?";
}

std::string_view region_name(RegionId id, const TileConfig& tile) {
  const bool two = tile.operands == 2;
  switch (id) {
    case RegionId::kWeights:
      return down(tile) ? "down: codes and scales" : two ? "gate, up: codes and scales" : "up: codes and scales";
    case RegionId::kActivations:
      return "activations";
    case RegionId::kActivationScales:
      return "activations: scales";
    case RegionId::kPartials:
      return "partial sums";
    case RegionId::kRoutes:
      return "routing tables";
    case RegionId::kOutput:
      return "output staging";
    case RegionId::kRows:
      return "row table";
    case RegionId::kBarriers:
      return "mbarriers";
    case RegionId::kCount:
      break;
  }
  return "?";
}

}  // namespace fourfold::plan::moe
