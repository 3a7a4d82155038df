// The tiles that the bench checks and times. What is listed is compiled, checked and timed.
#pragma once

#include <vector>

#include "bench/gpu/moe_candidate.h"
#include "kernels/moe/few_sm90.cuh"
#include "kernels/moe/one_sm90.cuh"
#include "kernels/moe/route_sm90.cuh"
#include "kernels/moe/stream_sm90.cuh"

template <typename Tile>
Candidate stream_candidate(const char* name) {
  using namespace fourfold::moe;
  constexpr StreamTile T = Tile::value;
  constexpr StreamMap map = stream_map(T);
  static_assert(map.total <= 232448);
  static_assert(T.ctas * (map.total + 1024) <= 233472);
  void (*kernel)(const GemmArgs);
  if constexpr (T.few()) {
    kernel = moe_few<Tile>;
  } else if constexpr (T.one) {
    kernel = moe_one<Tile>;
  } else {
    kernel = moe_stream<Tile>;
  }
  return Candidate{name,        T.one,       false,  T.wide(),    T.relu2,   T.one && !T.few() ? 1 : T.nt * 8,
                   T.row_units, T.mt * T.wm, T.ctas, T.threads(), map.total, kernel};
}

#define STREAM(...) stream_candidate<fourfold::moe::StreamTileOf<__VA_ARGS__>>("{" #__VA_ARGS__ "}")

//     gate_up, one, mt, wm, ws, wu, nt, rows, ku, stages, ctas, relu2, row_units
inline std::vector<Candidate> gate_up_candidates() {
  std::vector<Candidate> all = {
      STREAM(true, true, 2, 1, 2, 4, 1, 1, 8, 12, 1),
      STREAM(true, true, 2, 1, 2, 4, 1, 1, 8, 8, 1),
      STREAM(true, true, 2, 1, 1, 8, 1, 1, 16, 4, 1),
      STREAM(true, true, 2, 1, 1, 8, 1, 1, 16, 6, 1),
      STREAM(true, true, 1, 1, 2, 4, 1, 1, 16, 6, 1),
      STREAM(true, true, 1, 1, 2, 4, 1, 1, 16, 8, 1),
      STREAM(true, true, 1, 1, 2, 4, 1, 8, 16, 6, 1, false, 32),
      STREAM(true, true, 2, 1, 2, 4, 1, 8, 8, 6, 1, false, 32),
      STREAM(true, true, 2, 1, 1, 8, 1, 8, 16, 3, 1, false, 32),
      STREAM(true, true, 2, 1, 2, 4, 1, 8, 8, 6, 1, false, 48),
      STREAM(true, true, 1, 1, 2, 4, 1, 8, 16, 6, 1, false, 48),
      STREAM(true, true, 1, 1, 2, 4, 1, 8, 16, 6, 1, false, 64),
      STREAM(true, true, 1, 1, 2, 4, 1, 8, 16, 4, 1, false, 64),
      STREAM(true, true, 2, 1, 2, 4, 1, 8, 8, 6, 1, false, 64),
      STREAM(true, true, 2, 1, 2, 4, 1, 8, 8, 6, 1, true, 64),
      STREAM(true, false, 4, 2, 1, 2, 1, 8, 4, 4, 2),
      STREAM(true, false, 2, 4, 1, 2, 1, 8, 4, 4, 2),
      STREAM(true, false, 4, 2, 2, 1, 1, 8, 4, 4, 2),
      STREAM(true, false, 2, 4, 2, 1, 1, 8, 4, 4, 2),
      STREAM(true, false, 4, 4, 1, 2, 1, 8, 4, 4, 1),
      STREAM(true, false, 2, 4, 1, 2, 1, 8, 8, 2, 2),
      STREAM(true, false, 4, 2, 1, 2, 2, 16, 4, 3, 2),
      STREAM(true, false, 2, 8, 1, 1, 2, 16, 4, 5, 1),
      STREAM(true, false, 2, 8, 1, 1, 2, 16, 8, 2, 1),
      STREAM(true, false, 2, 8, 1, 1, 3, 24, 4, 3, 1),
      STREAM(true, false, 2, 8, 1, 1, 3, 24, 4, 4, 1),
      STREAM(true, false, 2, 8, 1, 1, 3, 24, 8, 2, 1),
      STREAM(true, false, 1, 16, 1, 1, 3, 24, 4, 4, 1),
      STREAM(true, false, 2, 8, 1, 1, 4, 32, 4, 3, 1),
      STREAM(true, false, 2, 16, 1, 1, 3, 24, 4, 2, 1),
      STREAM(true, false, 2, 16, 1, 1, 2, 16, 4, 2, 1),
      STREAM(true, true, 2, 1, 2, 4, 1, 1, 8, 8, 1, true),
      STREAM(true, false, 2, 4, 1, 2, 1, 8, 4, 4, 2, true),
      STREAM(true, false, 4, 2, 1, 2, 2, 16, 4, 3, 2, true),
      STREAM(true, false, 2, 8, 1, 1, 3, 24, 4, 3, 1, true),
      STREAM(true, false, 2, 8, 1, 1, 4, 32, 4, 3, 1, true),
  };
  for (const Candidate& c : prefill_candidates(true)) all.push_back(c);
  return all;
}

inline std::vector<Candidate> down_candidates() {
  std::vector<Candidate> all = {
      STREAM(false, true, 2, 1, 2, 4, 1, 1, 8, 8, 1),    STREAM(false, true, 2, 1, 1, 8, 1, 1, 16, 3, 1),
      STREAM(false, true, 1, 1, 2, 4, 1, 1, 8, 12, 1),   STREAM(false, true, 1, 1, 4, 2, 1, 1, 8, 8, 1),
      STREAM(false, true, 2, 1, 1, 8, 1, 1, 16, 4, 1),   STREAM(false, true, 1, 1, 2, 4, 1, 1, 16, 8, 1),
      STREAM(false, false, 4, 2, 1, 2, 1, 8, 4, 4, 2),   STREAM(false, true, 1, 1, 2, 4, 1, 2, 8, 8, 1),
      STREAM(false, true, 1, 1, 2, 4, 1, 2, 8, 12, 1),   STREAM(false, true, 1, 1, 4, 2, 1, 2, 8, 8, 1),
      STREAM(false, true, 1, 1, 2, 4, 1, 4, 8, 8, 1),    STREAM(false, true, 2, 1, 2, 4, 1, 2, 8, 6, 1),
      STREAM(false, true, 2, 1, 2, 4, 1, 2, 8, 8, 1),    STREAM(false, true, 2, 1, 4, 2, 1, 2, 8, 8, 1),
      STREAM(false, true, 2, 1, 2, 4, 1, 4, 8, 6, 1),    STREAM(false, false, 2, 4, 1, 2, 1, 8, 4, 4, 2),
      STREAM(false, false, 4, 2, 2, 1, 1, 8, 4, 4, 2),   STREAM(false, false, 2, 4, 2, 1, 1, 8, 4, 4, 2),
      STREAM(false, false, 4, 4, 1, 2, 1, 8, 4, 4, 1),   STREAM(false, false, 2, 4, 1, 2, 1, 8, 8, 2, 2),
      STREAM(false, false, 4, 2, 1, 2, 2, 16, 4, 3, 2),  STREAM(false, false, 2, 8, 1, 1, 2, 16, 4, 5, 1),
      STREAM(false, false, 2, 8, 1, 1, 2, 16, 8, 2, 1),  STREAM(false, false, 2, 8, 1, 1, 3, 24, 4, 3, 1),
      STREAM(false, false, 2, 8, 1, 1, 3, 24, 4, 4, 1),  STREAM(false, false, 2, 8, 1, 1, 3, 24, 8, 2, 1),
      STREAM(false, false, 1, 16, 1, 1, 3, 24, 4, 4, 1), STREAM(false, false, 2, 8, 1, 1, 4, 32, 4, 3, 1),
      STREAM(false, false, 2, 16, 1, 1, 3, 24, 2, 5, 1), STREAM(false, false, 2, 16, 1, 1, 3, 24, 4, 2, 1),
      STREAM(false, false, 4, 8, 1, 1, 3, 24, 4, 2, 1),  STREAM(false, false, 2, 16, 1, 1, 2, 16, 4, 2, 1),
  };
  for (const Candidate& c : prefill_candidates(false)) all.push_back(c);
  return all;
}
