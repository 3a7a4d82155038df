#include "kernels/moe/stream_sm90.cuh"

#include "kernels/moe/few_sm90.cuh"
#include "kernels/moe/one_sm90.cuh"

#include "kernels/expert_kernels.h"

namespace fourfold::moe {
namespace {
template <bool GateUp, bool One, int Mt, int Wm, int Ws, int Wu, int Nt, int Rows, int Ku, int Stages, int Ctas,
          bool Relu2 = false, int RowUnits = 0>
ExpertKernel stream(const char* name) {
  using Tile = StreamTileOf<GateUp, One, Mt, Wm, Ws, Wu, Nt, Rows, Ku, Stages, Ctas, Relu2, RowUnits>;
  constexpr StreamTile T = Tile::value;
  ExpertKernel k = {};
  k.name = name;
  k.family = plan::Family::kStreaming;
  k.gate_up = GateUp;
  k.one = One;
  k.wide = T.wide();
  k.gated = !Relu2;
  k.tokens = T.few() ? 8 : T.rows;
  k.row_units = T.row_units;
  k.row_tiles = T.mt * T.wm;
  k.ctas = T.ctas;
  k.threads = T.threads();
  k.shared_bytes = stream_map(T).total;
  k.run = [](const GemmArgs& args) {
    if constexpr (Tile::value.few()) {
      moe_few<Tile>(args);
    } else if constexpr (One) {
      moe_one<Tile>(args);
    } else {
      moe_stream<Tile>(args);
    }
  };
  return k;
}
}  // namespace

#define STREAM(...) stream<__VA_ARGS__>("stream {" #__VA_ARGS__ "}")

std::vector<ExpertKernel> stream_kernels() {
  // gate_up, one, mt, wm, ws, wu, nt, rows, ku, stages, ctas
  return {
      STREAM(true, true, 2, 1, 1, 4, 1, 1, 8, 4, 1),   // one token, K split inside a stage
      STREAM(true, true, 2, 1, 1, 8, 1, 1, 8, 3, 1),   // one unit of a stage for each warp
      STREAM(true, true, 1, 1, 2, 4, 1, 1, 16, 4, 1),  // one row tile
      STREAM(true, true, 2, 1, 2, 2, 1, 1, 8, 4, 1),   // and by stages
      STREAM(true, true, 1, 1, 4, 2, 1, 1, 8, 4, 1),   //
      STREAM(false, true, 1, 1, 2, 2, 1, 1, 8, 4, 1),  //
      STREAM(false, true, 1, 1, 2, 4, 1, 1, 8, 4, 1),  //
      STREAM(false, true, 2, 1, 2, 4, 1, 1, 8, 4, 1),  //
      STREAM(false, true, 1, 1, 8, 1, 1, 1, 8, 8, 1),  // every warp stages of its own
      STREAM(false, true, 2, 1, 1, 8, 1, 1, 16, 3, 1),
      STREAM(true, true, 1, 1, 2, 4, 1, 8, 8, 4, 1, false, 17),  // few tokens, one row tile
      STREAM(true, true, 2, 1, 2, 4, 1, 8, 8, 4, 1, false, 17),
      STREAM(true, true, 2, 1, 2, 4, 1, 8, 8, 4, 1, false, 48),  // experts with one token apart
      STREAM(false, true, 1, 1, 2, 4, 1, 4, 8, 4, 1),
      STREAM(false, true, 2, 1, 2, 4, 1, 2, 8, 6, 1),
      STREAM(false, true, 2, 1, 4, 2, 1, 2, 4, 4, 1),
      STREAM(true, false, 2, 2, 1, 2, 1, 8, 4, 3, 2),  // sorted, 8 tokens to a block
      STREAM(true, false, 2, 2, 2, 1, 3, 24, 2, 2, 1),
      STREAM(true, false, 2, 4, 1, 1, 4, 32, 1, 3, 1),
      STREAM(false, false, 2, 2, 1, 2, 1, 8, 4, 3, 2),
      STREAM(false, false, 2, 2, 2, 1, 3, 24, 2, 2, 1),
      STREAM(false, false, 2, 4, 1, 1, 4, 32, 1, 3, 1),
      STREAM(true, false, 2, 16, 1, 1, 3, 24, 2, 3, 1),  // registers move from the producers
      STREAM(false, false, 2, 16, 1, 1, 3, 24, 4, 2, 1),
      STREAM(true, true, 2, 1, 1, 4, 1, 1, 8, 4, 1, true),  // squared ReLU
      STREAM(true, true, 2, 1, 2, 4, 1, 8, 8, 4, 1, true, 17),
      STREAM(true, false, 2, 2, 1, 2, 1, 8, 4, 3, 2, true),
  };
}

}  // namespace fourfold::moe
