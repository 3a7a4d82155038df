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
  return Candidate{name, false, true, T.tokens, 0, kPrefillRowTiles, 1, kPrefillThreads, map.total, moe_prefill<Tile>};
}

}  // namespace

std::vector<Candidate> prefill_candidates(bool gate_up) {
  using fourfold::moe::PrefillTileOf;
  if (gate_up) return {prefill_candidate<PrefillTileOf<true, 160, 7>>("prefill {160, 7}")};
  return {prefill_candidate<PrefillTileOf<false, 160, 7>>("prefill {160, 7}")};
}
