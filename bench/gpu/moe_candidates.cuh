// The tiles that the bench checks and times. What is listed is compiled, checked and timed.
#pragma once

#include <vector>

#include "kernels/moe/route_sm90.cuh"
#include "kernels/moe/stream_sm90.cuh"

struct Candidate {
  const char* name;
  bool few;
  bool many;      // suited to more than 512 tokens
  int tokens;     // tokens per block
  int max_tokens; // few: room for this many
  int row_tiles;
  int ctas;
  int threads;
  unsigned smem;
  void (*kernel)(const fourfold::moe::GemmArgs);

  bool fits(int k, int m, int top_k) const {
    if (k % 64 != 0) return false;
    if (few) return m <= max_tokens && m * top_k <= fourfold::moe::kFewPicks;
    return true;
  }
};

template <typename Tile>
Candidate stream_candidate(const char* name) {
  using namespace fourfold::moe;
  constexpr StreamTile T = Tile::value;
  constexpr StreamMap map = stream_map(T);
  static_assert(map.total <= 232448);
  static_assert(T.ctas * (map.total + 1024) <= 233472);
  return Candidate{name, T.few, false, T.few ? T.rows : T.nt * 8, T.rows, T.mt * T.wm, T.ctas, T.threads(), map.total, moe_stream<Tile>};
}

#define STREAM(...) stream_candidate<fourfold::moe::StreamTileOf<__VA_ARGS__>>("{" #__VA_ARGS__ "}")

//                 gate_up, few, mt, wm, wk, nt, rows, ku, stages, ctas
inline std::vector<Candidate> gate_up_candidates() {
  return {
      STREAM(true, true, 4, 1, 8, 1, 1, 8, 4, 1),
      STREAM(true, true, 2, 1, 8, 1, 1, 8, 8, 1),
      STREAM(true, true, 2, 1, 8, 1, 1, 8, 4, 2),
      STREAM(true, true, 1, 1, 8, 1, 1, 8, 7, 2),
      STREAM(true, true, 1, 1, 4, 1, 1, 8, 5, 4),
      STREAM(true, true, 2, 1, 4, 1, 1, 8, 5, 2),
      STREAM(true, true, 4, 1, 8, 1, 8, 8, 4, 1),
      STREAM(true, true, 2, 1, 8, 1, 8, 8, 4, 2),
      STREAM(true, true, 4, 2, 4, 1, 8, 4, 4, 1),
      STREAM(true, true, 4, 2, 4, 1, 8, 4, 3, 2),
      STREAM(true, true, 2, 4, 2, 1, 8, 4, 4, 2),
      STREAM(true, false, 4, 1, 8, 1, 8, 8, 7, 1),
      STREAM(true, false, 4, 2, 4, 1, 8, 4, 4, 2),
      STREAM(true, false, 2, 4, 2, 1, 8, 4, 4, 2),
      STREAM(true, false, 4, 4, 2, 1, 8, 4, 5, 1),
      STREAM(true, false, 4, 2, 2, 1, 8, 4, 4, 2),
      STREAM(true, false, 2, 8, 1, 1, 8, 2, 5, 2),
      STREAM(true, false, 4, 2, 2, 2, 16, 4, 3, 2),
      STREAM(true, false, 2, 4, 2, 2, 16, 4, 3, 2),
      STREAM(true, false, 4, 4, 2, 2, 16, 4, 4, 1),
      STREAM(true, false, 2, 8, 1, 2, 16, 2, 5, 2),
  };
}

inline std::vector<Candidate> down_candidates() {
  return {
      STREAM(false, true, 1, 1, 8, 1, 1, 8, 8, 1),
      STREAM(false, true, 1, 1, 8, 1, 1, 16, 5, 1),
      STREAM(false, true, 1, 1, 16, 1, 1, 16, 5, 1),
      STREAM(false, true, 1, 1, 8, 1, 1, 8, 8, 2),
      STREAM(false, true, 1, 1, 8, 1, 8, 8, 7, 1),
      STREAM(false, true, 1, 1, 8, 1, 8, 16, 4, 1),
      STREAM(false, true, 1, 1, 16, 1, 8, 16, 4, 1),
      STREAM(false, true, 1, 1, 8, 1, 8, 8, 4, 2),
      STREAM(false, true, 2, 1, 8, 1, 8, 8, 5, 1),
      STREAM(false, false, 4, 2, 4, 1, 8, 4, 4, 2),
      STREAM(false, false, 2, 4, 2, 1, 8, 4, 4, 2),
      STREAM(false, false, 2, 8, 1, 1, 8, 2, 5, 2),
      STREAM(false, false, 4, 4, 2, 1, 8, 4, 5, 1),
      STREAM(false, false, 4, 2, 2, 1, 8, 4, 4, 2),
      STREAM(false, false, 4, 4, 1, 1, 8, 2, 5, 2),
      STREAM(false, false, 4, 2, 2, 2, 16, 4, 3, 2),
      STREAM(false, false, 2, 4, 2, 2, 16, 4, 3, 2),
      STREAM(false, false, 2, 8, 1, 2, 16, 2, 5, 2),
      STREAM(false, false, 4, 4, 2, 2, 16, 4, 4, 1),
  };
}
