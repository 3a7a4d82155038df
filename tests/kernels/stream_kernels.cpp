#include "kernels/moe/stream_sm90.cuh"

#include "kernels/expert_kernels.h"

namespace fourfold::moe {
namespace {
template <bool GateUp, bool Few, int Mt, int Wm, int Ws, int Wu, int Nt, int Rows, int Ku, int Stages, int Ctas>
ExpertKernel stream(const char* name) {
  using Tile = StreamTileOf<GateUp, Few, Mt, Wm, Ws, Wu, Nt, Rows, Ku, Stages, Ctas>;
  constexpr StreamTile T = Tile::value;
  return {
      name,        GateUp, Few,         Few ? T.rows : T.nt * 8, T.rows,
      T.mt * T.wm, T.ctas, T.threads(), stream_map(T).total,     [](const GemmArgs& args) { moe_stream<Tile>(args); }};
}
}  // namespace

#define STREAM(...) stream<__VA_ARGS__>("stream {" #__VA_ARGS__ "}")

std::vector<ExpertKernel> stream_kernels() {
  // gate_up, few, mt, wm, ws, wu, nt, rows, ku, stages, ctas
  return {
      STREAM(true, true, 2, 1, 1, 4, 1, 1, 8, 4, 2),   // one token
      STREAM(true, true, 1, 2, 1, 2, 1, 8, 4, 3, 2),   // K split inside a stage
      STREAM(true, true, 2, 1, 2, 2, 1, 8, 4, 4, 1),   // and by stages
      STREAM(false, true, 1, 1, 2, 2, 1, 1, 8, 4, 2),  //
      STREAM(false, true, 1, 1, 2, 4, 1, 8, 4, 4, 2),  //
      STREAM(false, true, 1, 2, 4, 1, 1, 8, 1, 8, 2),  //
      STREAM(true, false, 2, 2, 1, 2, 1, 8, 4, 3, 2),  // sorted, 8 tokens to a block
      STREAM(true, false, 2, 2, 2, 1, 3, 24, 2, 2, 1),  STREAM(true, false, 4, 1, 1, 1, 4, 32, 1, 3, 1),
      STREAM(false, false, 2, 2, 1, 2, 1, 8, 4, 3, 2),  STREAM(false, false, 2, 2, 2, 1, 3, 24, 2, 2, 1),
      STREAM(false, false, 4, 1, 1, 1, 4, 32, 1, 3, 1),
  };
}

}  // namespace fourfold::moe
