// The one list of tiles. Whatever is here can be planned, compiled, launched and tested; legality.cpp says what of it a
// card and a problem allow, cost.cpp what is fast.
#include <algorithm>

#include "base/math.h"
#include "plan/plan.h"

namespace fourfold::plan {
namespace {

constexpr int kTokenTileStep = 8, kLargestTokenTile = 192;
constexpr int kDepthTiles[] = {64, 128, 256};

TileConfig base_tile(const MoeProblem& problem, Pass pass, Family family) {
  TileConfig t = {};
  t.family = family;
  t.pass = pass;
  t.operands = problem.operands(pass);
  t.scale_vector = problem.scale_vector();
  t.activation_bits = problem.activation_bits();
  t.swap_ab = 1;
  t.k_warps = 1;
  return t;
}

// Few tokens: weights straight into registers, whole activation rows in shared memory, warps side by side along K.
void add_streaming(const MoeProblem& problem, Pass pass, std::vector<Candidate>* out) {
  TileConfig t = base_tile(problem, pass, Family::kStreaming);
  t.epilogue = Epilogue::kDirect;
  for (const int tokens : {8, 16}) {
    for (const int n : {8, 16, 32, 64}) {
      for (const int k : kDepthTiles) {
        for (const int stages : {2, 4}) {
          for (const int warps : {4, 8}) {
            for (const int k_warps : {1, 2, 4, 8}) {
              if (k_warps > warps) continue;
              for (const int split : {1, 2, 4}) {
                for (const int ctas : {1, 2, 4}) {
                  t.tokens = tokens;
                  t.n = n;
                  t.k = k;
                  t.stages = stages;
                  t.warps = warps;
                  t.k_warps = k_warps;
                  const int64_t k_tiles = ceil_div(problem.padded_depth(pass), k);
                  t.resident_k = static_cast<int>(ceil_div(k_tiles, split) * k);
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

void add_mma_sync(const MoeProblem& problem, Pass pass, std::vector<Candidate>* out) {
  TileConfig t = base_tile(problem, pass, Family::kMmaSync);
  for (int tokens = kTokenTileStep; tokens <= kLargestTokenTile; tokens += kTokenTileStep) {
    for (const int swap : {1, 0}) {
      if (swap == 0 && (tokens < 64 || tokens % 16 != 0)) continue;  // m16: fewer rows would be mostly padding
      for (const int n : {32, 64, 128}) {
        for (const int k : kDepthTiles) {
          for (const int stages : {2, 3, 4, 6}) {
            for (const int producers : {0, 1}) {
              for (const int warps : {4, 8}) {
                for (const int ctas : {1, 2, 3, 4}) {
                  for (const int split : {1, 2, 4}) {
                    if (split > 1 && tokens > 16) continue;  // more rows mean more tiles: nothing is left to split
                    t.tokens = tokens;
                    t.swap_ab = swap;
                    t.n = n;
                    t.k = k;
                    t.stages = stages;
                    t.warps = warps;
                    t.producer_warps = producers;
                    t.epilogue = tokens <= 16 ? Epilogue::kDirect
                                 : producers  ? Epilogue::kDedicated
                                              : Epilogue::kOverlay;
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
}

void add_wgmma(const MoeProblem& problem, Pass pass, std::vector<Candidate>* out) {
  TileConfig t = base_tile(problem, pass, Family::kWgmma);
  t.producer_warps = 4;  // a whole warpgroup: setmaxnreg moves registers between warpgroups
  t.epilogue = Epilogue::kDedicated;
  for (int tokens = kTokenTileStep; tokens <= kLargestTokenTile; tokens += kTokenTileStep) {
    for (const int swap : {1, 0}) {
      if (swap == 0 && tokens % 64 != 0) continue;
      for (const int n : {32, 64, 128, 256}) {
        for (const int k : kDepthTiles) {
          for (const int stages : {2, 3, 4, 6, 8}) {
            for (const int warps : {4, 8}) {
              for (const int ctas : {1, 2}) {
                t.tokens = tokens;
                t.swap_ab = swap;
                t.n = n;
                t.k = k;
                t.stages = stages;
                t.warps = warps;
                out->push_back({t, ctas, 1});
              }
            }
          }
        }
      }
    }
  }
}

void add_fp4(const MoeProblem& problem, Pass pass, std::vector<Candidate>* out) {
  TileConfig t = base_tile(problem, pass, Family::kFp4);
  t.producer_warps = 1;
  for (int tokens = kTokenTileStep; tokens <= kLargestTokenTile; tokens += kTokenTileStep) {
    for (const int swap : {1, 0}) {
      if (swap == 0 && (tokens < 64 || tokens % 16 != 0)) continue;
      for (const int n : {32, 64, 128}) {
        for (const int k : kDepthTiles) {
          for (const int stages : {2, 3, 4, 6}) {
            for (const int warps : {4, 8}) {
              for (const int ctas : {1, 2, 3}) {
                t.tokens = tokens;
                t.swap_ab = swap;
                t.n = n;
                t.k = k;
                t.stages = stages;
                t.warps = warps;
                t.epilogue = tokens <= 16 ? Epilogue::kDirect : Epilogue::kDedicated;
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
  std::vector<Candidate> list;
  // The families that compute with other activations than the problem's are out as a whole; plan_layer() says so.
  if (problem.activation_bits() == 4) {
    if (find_family(Family::kFp4, arch.name)) add_fp4(problem, pass, &list);
    return list;
  }
  if (find_family(Family::kStreaming, arch.name)) add_streaming(problem, pass, &list);
  if (find_family(Family::kMmaSync, arch.name)) add_mma_sync(problem, pass, &list);
  if (find_family(Family::kWgmma, arch.name)) add_wgmma(problem, pass, &list);
  return list;
}

std::string to_string(const Candidate& c) {
  const TileConfig& t = c.tile;
  std::string text = fmt::format("{} {}x{}x{} s{} w{}", to_string(t.family), t.tokens, t.n, t.k, t.stages, t.warps);
  if (t.producer_warps > 0) text += fmt::format("+{}", t.producer_warps);
  if (t.k_warps > 1) text += fmt::format(" kw{}", t.k_warps);
  if (c.split_k > 1) text += fmt::format(" split{}", c.split_k);
  text += fmt::format(" x{}{}", c.ctas_per_sm, t.swap_ab ? " swap" : "");
  return text;
}

std::string to_source(const TileConfig& t) {
  return fmt::format(
      "{{fourfold::plan::Family({}), fourfold::plan::Pass({}), {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, "
      "fourfold::plan::Epilogue({})}}",
      static_cast<int>(t.family), static_cast<int>(t.pass), t.tokens, t.n, t.k, t.stages, t.warps, t.producer_warps,
      t.operands, t.scale_vector, t.activation_bits, t.swap_ab, t.k_warps, t.resident_k, static_cast<int>(t.epilogue));
}

}  // namespace fourfold::plan
