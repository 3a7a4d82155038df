// The one list of tiles. Whatever is here can be planned, compiled, launched and tested; legality.cpp says what of it a
// card and a problem allow, cost.cpp what is fast.
#include <algorithm>
#include <span>

#include "base/math.h"
#include "plan/plan.h"

namespace fourfold::plan {
namespace {

constexpr int kTokenTileStep = 8, kLargestTokenTile = 192;
constexpr int kDepthTiles[] = {64, 128, 256};

// Warps of a streaming tile: all, those that share an output along K, and the groups of these that take whole stages in
// turn (long work per wait) rather than share the units of each (short latency).
struct StreamingWarps {
  int warps, k_warps, stage_warps;
};
constexpr StreamingWarps kStreamingWarps[] = {{4, 1, 1}, {4, 2, 1}, {4, 2, 2}, {4, 4, 1}, {4, 4, 2},
                                              {4, 4, 4}, {8, 1, 1}, {8, 2, 1}, {8, 2, 2}, {8, 4, 1},
                                              {8, 4, 2}, {8, 4, 4}, {8, 8, 1}, {8, 8, 2}};
// One token: all warps share all outputs.
constexpr StreamingWarps kOneTokenWarps[] = {{4, 4, 1}, {4, 4, 2}, {8, 8, 1}, {8, 8, 2}, {8, 8, 4}, {8, 8, 8}};
// Few tokens: the same.
constexpr StreamingWarps kFewTokenWarps[] = {{8, 8, 2}, {8, 8, 4}};  // gate-up: the first only
constexpr int64_t kFewTokensSmem = 160 << 10;  // of an SM: token rows, two rings and two sets of tables
constexpr int kFewTokenRows[] = {2, 4};        // of a stage of down

TileConfig base_tile(const MoeProblem& problem, Pass pass, Family family) {
  TileConfig t = {};
  t.family = family;
  t.pass = pass;
  t.operands = problem.operands(pass);
  t.scale_vector = problem.scale_vector();
  t.activation_bits = family == Family::kFp4 ? 4 : 16;
  t.swap_ab = 1;
  t.k_warps = t.stage_warps = 1;
  t.epilogue = Epilogue::kDirect;
  return t;
}

using List = std::vector<Candidate>;

// One token: what was near the best of some 900 pairs of tiles on an H200. All warps share K and have one or two row
// tiles, and at most two pairs of units of a stage between them, or the compiler runs out of registers. Copies of 512
// or 1024, unless K is shorter.
bool suits_one_token(int64_t depth, int rows, int k, const StreamingWarps& w) {
  if (rows > 32 || k > 1024 || (k < 512 && 2 * k <= depth)) return false;
  const int units = k / kDepthGrain / (w.k_warps / w.stage_warps);
  return (units + 1) / 2 * (rows / 16) <= 2;
}

// `rows` are weight rows of all operands together.
void set_sizes(TileConfig* t, int tokens, int rows, int k, int stages, int warps) {
  t->tokens = t->token_rows = tokens;
  t->n = rows / t->operands;
  t->k = k;
  t->stages = stages;
  t->warps = warps;
}

// Few tokens per expert: a producer warp, K shared between warps.
void add_streaming(const MoeProblem& problem, Pass pass, bool inline_routes, List* out) {
  TileConfig t = base_tile(problem, pass, Family::kStreaming);
  t.inline_routes = inline_routes ? 1 : 0;
  for (int tokens = kTokenTileStep; tokens <= (inline_routes ? kTokenTileStep : 32); tokens += kTokenTileStep) {
    for (const int rows : {16, 32, 64, 128, 256}) {
      for (const int k : {64, 128, 256, 512, 1024, 2048}) {
        if (k > 512 && !inline_routes) continue;  // so few rows that a long copy is what hides the latency
        for (const int stages : {2, 3, 4, 6, 8, 12}) {
          if (stages > 8 && !inline_routes) continue;
          const std::span<const StreamingWarps> kinds =
              inline_routes ? std::span<const StreamingWarps>(kOneTokenWarps) : kStreamingWarps;
          for (const StreamingWarps& kind : kinds) {
            const auto& [warps, k_warps, stage_warps] = kind;
            if (inline_routes && !suits_one_token(problem.padded_depth(pass), rows, k, kind)) continue;
            for (const int ctas : {1, 2, 3, 4}) {
              if (inline_routes && ctas > 1) continue;  // the other half of an SM is the other kernel's
              set_sizes(&t, tokens, rows, k, stages, warps);
              // Bulk copies of one warp are issued one after the other; more rows need more warps. One token: one warp
              // brings weights, and in gate-up another finishes.
              t.producer_warps = inline_routes ? (pass == Pass::kGateUp ? 2 : 1) : tokens > 8 ? 4 : 2;
              t.k_warps = k_warps;
              t.stage_warps = stage_warps;
              if (t.inline_routes) t.token_rows = 1;
              out->push_back({t, ctas, 1});
            }
          }
        }
      }
    }
  }
}

// Two to eight tokens without sorting. Down's stages have warps of their own that bring rows, as many as divide the
// stages.
void add_few_tokens(const MoeProblem& problem, Pass pass, List* out) {
  TileConfig t = base_tile(problem, pass, Family::kStreaming);
  t.inline_routes = 1;
  const bool gate_up = pass == Pass::kGateUp;
  for (const int rows : {16, 32}) {
    for (const int k : {256, 512, 1024}) {
      if (k < 512 && 2 * k <= problem.padded_depth(pass)) continue;  // short copies only where K is short
      if (k > 512 && !gate_up) continue;
      for (const int stages : {3, 4, 6, 8, 12}) {
        for (const auto& [warps, k_warps, stage_warps] : kFewTokenWarps) {
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
          for (const int token_rows : kFewTokenRows) {
            t.token_rows = token_rows;
            out->push_back({t, 1, 1});
          }
        }
      }
    }
  }
}

// Where experts have tens of rows, multiplying takes about as long as reading: 16 warps hide each other's latencies,
// two row tiles each.
void add_wide_streaming(const MoeProblem& problem, Pass pass, List* out) {
  TileConfig t = base_tile(problem, pass, Family::kStreaming);
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

void add_mma_sync(const MoeProblem& problem, Pass pass, List* out) {
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

void add_wgmma(const MoeProblem& problem, Pass pass, List* out) {
  TileConfig t = base_tile(problem, pass, Family::kWgmma);
  t.producer_warps = 4;  // a whole warpgroup: setmaxnreg moves registers between warpgroups
  if (pass == Pass::kGateUp) t.epilogue = Epilogue::kDedicated;
  for (int tokens = kTokenTileStep; tokens <= kLargestTokenTile; tokens += kTokenTileStep) {
    for (const int rows : {64, 128, 256, 512}) {
      for (const int k : kDepthTiles) {
        // 8 stages measured up to 10 % slower than 7.
        for (const int stages : {2, 3, 4, 5, 6, 7}) {
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

void add_fp4(const MoeProblem& problem, Pass pass, List* out) {
  TileConfig t = base_tile(problem, pass, Family::kFp4);
  for (int tokens = kTokenTileStep; tokens <= kLargestTokenTile; tokens += kTokenTileStep) {
    for (const int swap : {1, 0}) {
      if (swap == 0 && (tokens < 64 || tokens % 16 != 0)) continue;  // m16: fewer rows would be mostly padding
      for (const int rows : {64, 128, 256}) {
        for (const int k : kDepthTiles) {
          for (const int stages : {2, 3, 4, 6}) {
            for (const int warps : {4, 8}) {
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

}  // namespace

std::vector<Candidate> candidates(const MoeProblem& problem, Pass pass, const Arch& arch) {
  List list;
  // The families that compute with other activations than the problem's are out as a whole; plan_layer() says so.
  if (problem.allows(ActivationFormat::kNvfp4) && find_family(Family::kFp4, arch.name)) add_fp4(problem, pass, &list);
  if (!problem.allows(ActivationFormat::kBf16)) return list;
  if (find_family(Family::kStreaming, arch.name)) {
    if (problem.tokens <= 1) {
      add_streaming(problem, pass, true, &list);
    } else if (problem.tokens <= kInlineRouteTokens && arch.smem_per_sm >= kFewTokensSmem) {
      add_few_tokens(problem, pass, &list);
    }
    add_streaming(problem, pass, false, &list);
    add_wide_streaming(problem, pass, &list);
  }
  if (find_family(Family::kMmaSync, arch.name)) add_mma_sync(problem, pass, &list);
  if (find_family(Family::kWgmma, arch.name)) add_wgmma(problem, pass, &list);
  return list;
}

std::string to_string(const Candidate& c) {
  const TileConfig& t = c.tile;
  std::string text = fmt::format("{} {}x{}x{} s{} w{}", to_string(t.family), t.tokens, t.n, t.k, t.stages, t.warps);
  if (t.producer_warps > 0) text += fmt::format("+{}", t.producer_warps);
  if (t.k_warps > 1) text += fmt::format(" kw{}x{}", t.stage_warps, t.k_warps / t.stage_warps);
  if (t.inline_routes) text += fmt::format(" inline{}", t.token_rows);
  if (c.split_k > 1) text += fmt::format(" split{}", c.split_k);
  text += fmt::format(" x{}{}", c.ctas_per_sm, t.swap_ab ? " swap" : "");
  return text;
}

std::string to_source(const TileConfig& t) {
  return fmt::format(
      "{{fourfold::plan::Family({}), fourfold::plan::Pass({}), {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, "
      "{}, "
      "fourfold::plan::Epilogue({})}}",
      static_cast<int>(t.family), static_cast<int>(t.pass), t.tokens, t.token_rows, t.n, t.k, t.stages, t.warps,
      t.producer_warps, t.operands, t.scale_vector, t.activation_bits, t.swap_ab, t.k_warps, t.stage_warps,
      t.inline_routes, t.resident_k, static_cast<int>(t.epilogue));
}

}  // namespace fourfold::plan
