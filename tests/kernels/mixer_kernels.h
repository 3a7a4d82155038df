// The device kernels of the mixers as the host executor runs them. What is listed here is instantiated; tiles are named
// as their template arguments.
#pragma once

#include <string>
#include <vector>

#include "kernels/attn/decode_tile.h"
#include "kernels/attn/narrow_tile.h"
#include "kernels/attn/prefill_tile.h"
#include "kernels/gdn/chunk_tile.h"
#include "kernels/gdn/recurrent_tile.h"

namespace fourfold::mixers {

struct RecurrentKernel {
  std::string name;
  gdn::RecurrentTile tile;
  void (*run)(const gdn::DeltaArgs&);
  void (*make_states)(const gdn::MakeStatesArgs&);  // of tiles with updates
};
std::vector<RecurrentKernel> recurrent_kernels();

struct ChunkKernel {
  std::string name;
  gdn::ChunkTile tile;
  void (*prepare)(const gdn::ChunkArgs&);
  void (*scan)(const gdn::ChunkArgs&);
  void (*scale)(const gdn::ChunkArgs&);
  void (*beside)(const gdn::ChunkArgs&);  // prepare for a scan beside it; null where there is none
};
std::vector<ChunkKernel> chunk_kernels();

struct DecodeKernel {
  std::string name;
  attn::DecodeTile tile;
  void (*run)(const attn::AttentionArgs&);
  void (*combine)(const attn::AttentionArgs&);
  void (*combine_many)(const attn::AttentionArgs&);
};
std::vector<DecodeKernel> decode_kernels();

struct NarrowKernel {
  std::string name;
  attn::NarrowTile tile;
  void (*run)(const attn::AttentionArgs&);
};
std::vector<NarrowKernel> narrow_kernels();

struct PrefillKernel {
  std::string name;
  attn::PrefillTile tile;
  void (*prepare)(const attn::PrefillArgs&);
  void (*run)(const attn::PrefillArgs&);
};
std::vector<PrefillKernel> prefill_kernels();

}  // namespace fourfold::mixers
