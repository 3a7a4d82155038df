// Shapes and shared memory of the attention kernels for many rows (prefill_prepare.cuh, prefill_mma.cuh,
// prefill_sm90.cuh). Read by host and device, includes nothing of CUDA.
#pragma once

#include "kernels/attn/tables.h"

namespace fourfold::attn {

// A block of query rows: (token, head of the group) of one sequence and kv head, tokens first.
struct RowBlock {
  int sequence;  // -1: nobody
  int first;     // of its rows, a multiple of the tile's
};

struct PrefillArgs {
  AttentionArgs attention;
  const RowBlock* blocks;   // of the step, for any kv head; longest contexts first
  unsigned short* queries;  // bf16 [rows][heads][head_dim]: normalised, rotated
};

inline constexpr int kPrepareThreads = 256;

struct PrefillTile {
  int head_dim;
  int rotary_dim;
  int warps;   // mma.sync: each has 16 rows. wgmma: 8, two warpgroups of 64 rows
  int keys;    // of a stage
  int stages;  //
  bool fp8;    // mma.sync only
  bool wgmma;

  FOURFOLD_MIXER_FN int rows() const { return warps * 16; }
  FOURFOLD_MIXER_FN int threads() const { return warps * 32 + (wgmma ? 128 : 0); }
  FOURFOLD_MIXER_FN int row_bytes() const { return head_dim * (fp8 ? 1 : 2); }
  FOURFOLD_MIXER_FN int chunks() const { return row_bytes() / 16; }
  FOURFOLD_MIXER_FN int half_bytes() const { return keys * row_bytes(); }  // a stage's keys, or its values
  FOURFOLD_MIXER_FN bool legal() const {
    return (head_dim == 64 || head_dim == 128 || head_dim == 256) && rotary_dim % 16 == 0 && rotary_dim <= head_dim &&
           keys % 16 == 0 && keys <= 128 && stages >= 2 && (!wgmma || (warps == 8 && !fp8 && keys == 64));
  }
};

struct PrefillMap {
  unsigned keys;     // [stages], as in the cache's pages
  unsigned values;   //
  unsigned queries;  // [rows][head_dim], 16 bits
  unsigned barriers;
  unsigned total;
};
FOURFOLD_MIXER_FN PrefillMap prefill_map(const PrefillTile& t) {
  PrefillMap m{};
  m.keys = 0;
  m.values = static_cast<unsigned>(t.stages * t.half_bytes());
  m.queries = 2 * m.values;
  m.barriers = m.queries + static_cast<unsigned>(t.rows() * t.head_dim * 2);
  m.total = m.barriers + static_cast<unsigned>(4 * t.stages * 8);
  return m;
}

template <int HeadDim, int RotaryDim, int Warps, int Keys, int Stages, bool Fp8, bool Wgmma>
struct PrefillTileOf {
  static constexpr PrefillTile value{HeadDim, RotaryDim, Warps, Keys, Stages, Fp8, Wgmma};
  static_assert(value.legal());
};

struct PrefillLaunch {
  unsigned grid_x, grid_y;
  unsigned threads;
  unsigned shared_bytes;
};
// `rows`: of the step; `sequences`: of the bucket.
FOURFOLD_MIXER_FN PrefillLaunch prefill_prepare_launch(const AttentionShape& shape, int rows, int sequences) {
  const int vectors = shape.heads + 2 * shape.kv_heads;
  return {static_cast<unsigned>((rows * vectors + kPrepareThreads / 32 - 1) / (kPrepareThreads / 32)),
          static_cast<unsigned>(sequences), kPrepareThreads, 0};
}
FOURFOLD_MIXER_FN PrefillLaunch prefill_launch(const PrefillTile& t, const AttentionShape& shape, int blocks) {
  return {static_cast<unsigned>(shape.kv_heads), static_cast<unsigned>(blocks), static_cast<unsigned>(t.threads()),
          prefill_map(t).total};
}

}  // namespace fourfold::attn
