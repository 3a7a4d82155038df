// The wgmma tiles, in a file of their own because they take a minute to compile.
#include "bench/gpu/moe_candidate.h"
#include "kernels/moe/prefill_sm90.cuh"

namespace {

template <typename Tile>
Candidate prefill_candidate(const char* name) {
  using namespace fourfold::moe;
  constexpr PrefillTile T = Tile::value;
  constexpr PrefillMap map = prefill_map(T);
  static_assert(map.total <= 232448);
  Candidate c{name, false, true, false, T.relu2, T.tokens, 0, kPrefillRowTiles, 1, kPrefillThreads, map.total, nullptr};
  if constexpr (T.gate_up) {
    c.gathers = moe_prefill_gather<Tile>;
  } else {
    c.kernel = moe_prefill<Tile>;
  }
  return c;
}

}  // namespace

#define PREFILL(...) prefill_candidate<fourfold::moe::PrefillTileOf<__VA_ARGS__>>("prefill {" #__VA_ARGS__ "}")

std::vector<Candidate> prefill_candidates(bool gate_up) {
  if (gate_up) {
    return {PREFILL(true, 176, 5), PREFILL(true, 160, 6), PREFILL(true, 144, 7),
            PREFILL(true, 96, 8),  PREFILL(true, 48, 2),  PREFILL(true, 144, 5, true)};
  }
  return {PREFILL(false, 176, 7), PREFILL(false, 160, 7), PREFILL(false, 144, 7), PREFILL(false, 96, 8),
          PREFILL(false, 48, 2)};
}
