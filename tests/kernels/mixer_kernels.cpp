#include "kernels/mixer_kernels.h"

#include "kernels/attn/combine.cuh"
#include "kernels/attn/decode.cuh"
#include "kernels/attn/narrow.cuh"
#include "kernels/attn/prefill_prepare.cuh"
#include "kernels/attn/prefill_sm90.cuh"
#include "kernels/gdn/chunk_scan_sm90.cuh"
#include "kernels/gdn/make_states.cuh"
#include "kernels/gdn/recurrent.cuh"

namespace fourfold::mixers {
namespace {

template <int... Values>
RecurrentKernel recurrent(const char* name) {
  using Tile = gdn::RecurrentTileOf<Values...>;
  RecurrentKernel kernel{name, Tile::value,
                         [](const gdn::DeltaArgs& args) {
                           if constexpr (Tile::value.split > 1) {
                             gdn::delta_recurrent_split<Tile>(args);
                           } else {
                             gdn::delta_recurrent<Tile>(args);
                           }
                         },
                         nullptr};
  if constexpr (Tile::value.updates) {
    kernel.make_states = [](const gdn::MakeStatesArgs& args) {
      gdn::delta_make_states<Tile::value.key_dim, Tile::value.value_dim>(args);
    };
  }
  return kernel;
}

template <int... Values>
ChunkKernel chunk(const char* name) {
  using Tile = gdn::ChunkTileOf<Values...>;
  ChunkKernel kernel{name,    Tile::value, [](const gdn::ChunkArgs& args) { gdn::delta_prepare<Tile>(args); },
                     nullptr, nullptr,     nullptr};
  if constexpr (Tile::value.wgmma) {
    kernel.beside = [](const gdn::ChunkArgs& args) { gdn::delta_prepare<Tile, true>(args); };
    kernel.scan = [](const gdn::ChunkArgs& args) { gdn::delta_scan_wgmma<Tile>(args); };
    kernel.scale = [](const gdn::ChunkArgs& args) { gdn::delta_gate<Tile>(args); };
  } else {
    kernel.scan = [](const gdn::ChunkArgs& args) { gdn::delta_scan<Tile>(args); };
    kernel.scale = [](const gdn::ChunkArgs& args) { gdn::delta_scale<Tile>(args); };
  }
  return kernel;
}

template <int... Values>
DecodeKernel decode(const char* name) {
  using Tile = attn::DecodeTileOf<Values...>;
  return {name, Tile::value, [](const attn::AttentionArgs& args) { attn::attention_decode<Tile>(args); },
          [](const attn::AttentionArgs& args) { attn::attention_combine<Tile::value.head_dim>(args); },
          [](const attn::AttentionArgs& args) { attn::attention_combine_many<Tile::value.head_dim>(args); }};
}

template <int... Values>
NarrowKernel narrow(const char* name) {
  using Tile = attn::NarrowTileOf<Values...>;
  return {name, Tile::value, [](const attn::AttentionArgs& args) { attn::attention_narrow<Tile>(args); }};
}

template <int... Values>
PrefillKernel prefill(const char* name) {
  using Tile = attn::PrefillTileOf<Values...>;
  return {name, Tile::value,
          [](const attn::PrefillArgs& args) {
            attn::attention_prepare<Tile::value.head_dim, Tile::value.rotary_dim, Tile::value.fp8>(args);
          },
          [](const attn::PrefillArgs& args) {
            if constexpr (Tile::value.wgmma) {
              attn::attention_prefill_wgmma<Tile>(args);
            } else {
              attn::attention_prefill_mma<Tile>(args);
            }
          }};
}

}  // namespace

#define RECURRENT(...) recurrent<__VA_ARGS__>("recurrent {" #__VA_ARGS__ "}")
#define CHUNK(...) chunk<__VA_ARGS__>("chunk {" #__VA_ARGS__ "}")
#define DECODE(...) decode<__VA_ARGS__>("decode {" #__VA_ARGS__ "}")

std::vector<RecurrentKernel> recurrent_kernels() {
  // key_dim, value_dim, rows, warps, ctas, fp32, split, updates
  return {
      RECURRENT(128, 128, 1, 16, 2, 0),   //
      RECURRENT(128, 128, 16, 16, 1, 0),  //
      RECURRENT(128, 128, 4, 8, 2, 0),    // two panels a warp
      RECURRENT(16, 48, 1, 4, 1, 0),      //
      RECURRENT(16, 48, 4, 4, 1, 0),      // odd sizes: part of a block, a pass with fewer panels
      RECURRENT(80, 16, 3, 8, 1, 1),      // more warps than panels, fp32 rows
      RECURRENT(256, 32, 2, 2, 1, 0),         RECURRENT(128, 128, 16, 8, 2, 0, 2),  // clusters
      RECURRENT(16, 64, 4, 4, 1, 0, 2),                                             // more warps than panels
      RECURRENT(16, 64, 1, 2, 1, 0, 2),                                             // two panels a warp
      RECURRENT(128, 128, 16, 8, 3, 0, 4, 1), RECURRENT(128, 128, 6, 8, 2, 0, 1, 1),
      RECURRENT(32, 48, 6, 4, 1, 0, 1, 1),    RECURRENT(32, 48, 1, 4, 1, 0, 1, 1),  // groups of two panels
      RECURRENT(16, 64, 5, 4, 1, 1, 2, 1),                                          // room for four updates
  };
}

std::vector<ChunkKernel> chunk_kernels() {
  // key_dim, value_dim, chunk, columns, helpers, bulk, fp32, wgmma
  return {
      CHUNK(128, 128, 64, 32, 1, 1, 0),    //
      CHUNK(128, 32, 32, 16, 1, 0, 0),     // 99 KB
      CHUNK(16, 48, 64, 16, 0, 1, 0),      // odd sizes
      CHUNK(48, 64, 32, 32, 1, 1, 1),      // fp32 rows
      CHUNK(128, 64, 64, 64, 0, 1, 0, 1),  // wgmma
      CHUNK(64, 128, 64, 64, 0, 1, 0, 1),  //
  };
}

std::vector<DecodeKernel> decode_kernels() {
  // head_dim, rotary_dim, row tiles, key groups, parts, blocks, stages, fp8, bulk, ctas
  return {
      DECODE(256, 64, 1, 4, 2, 1, 3, 0, 1, 1),                                            //
      DECODE(256, 64, 1, 2, 2, 1, 6, 1, 1, 2),  DECODE(256, 64, 1, 2, 2, 1, 3, 0, 1, 2),  //
      DECODE(256, 64, 2, 2, 1, 1, 2, 0, 0, 1),                                            // 99 KB
      DECODE(256, 64, 4, 1, 2, 2, 4, 1, 1, 1),                                            //
      DECODE(128, 128, 1, 2, 1, 2, 3, 0, 1, 1), DECODE(256, 64, 1, 2, 2, 2, 2, 1, 0, 1),  // 99 KB
      DECODE(64, 32, 1, 2, 2, 1, 2, 1, 0, 1),   DECODE(64, 0, 2, 1, 1, 1, 2, 0, 1, 1),
  };
}

#define NARROW(...) narrow<__VA_ARGS__>("narrow {" #__VA_ARGS__ "}")

std::vector<NarrowKernel> narrow_kernels() {
  // head_dim, rotary_dim, warps, blocks, units, fp8
  return {
      NARROW(256, 64, 4, 1, 3, 0),  NARROW(256, 64, 4, 1, 6, 1),  //
      NARROW(128, 128, 4, 2, 3, 0), NARROW(64, 32, 4, 2, 2, 1),   //
      NARROW(256, 256, 4, 1, 2, 0), NARROW(64, 0, 4, 1, 3, 0),
  };
}

#define PREFILL(...) prefill<__VA_ARGS__>("prefill {" #__VA_ARGS__ "}")

std::vector<PrefillKernel> prefill_kernels() {
  // head_dim, rotary_dim, warps, keys, stages, fp8, wgmma
  return {
      PREFILL(256, 64, 8, 64, 2, 0, 1),  //
      PREFILL(64, 32, 8, 64, 2, 0, 1),   //
      PREFILL(256, 64, 4, 32, 2, 1, 0),  // 99 KB
      PREFILL(64, 0, 4, 32, 2, 0, 0),    //
  };
}

}  // namespace fourfold::mixers
