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
  unsigned short* queries;  // bf16 [kv head][piece of 128 bytes][query_rows][128 bytes]: normalised, rotated
  long long query_rows;     // query_rows() of the step
  int block_count;
};

// Rows of queries, (token, head of the group), lie as wgmma's operands with 128-byte swizzle: the 16-byte chunks of
// row r's piece are exchanged by r % 8. A sequence begins with a multiple of 8, so that some blocks of 8 rows have a
// part that is nobody's.
FOURFOLD_MIXER_FN long long first_query_row(int first, int place, int group) {
  return (static_cast<long long>(first) * group + 8LL * place + 7) / 8 * 8;
}
FOURFOLD_MIXER_FN long long query_rows(int rows, int sequences, int group) {
  return first_query_row(rows, sequences, group);
}
FOURFOLD_MIXER_FN long long query_bytes(const AttentionShape& shape, int rows, int sequences) {
  return query_rows(rows, sequences, shape.group()) * shape.kv_heads * shape.head_dim * 2;
}
// Elements from the first one to chunk `chunk` of a row of a kv head.
FOURFOLD_MIXER_FN long long query_place(const PrefillArgs& args, int kv_head, long long row, int chunk) {
  const int pieces = args.attention.shape.head_dim / 64;
  return ((kv_head * pieces + chunk / 8) * args.query_rows + row) * 64 + (chunk % 8 ^ static_cast<int>(row & 7)) * 8;
}

inline constexpr int kPrepareThreads = 256;
inline constexpr int kPrepareTokens = 4;  // of a CTA

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
  unsigned works;  // wgmma: the blocks that the CTA has at the time
  unsigned total;
};
inline constexpr int kPrefillWorks = 4;
FOURFOLD_MIXER_FN PrefillMap prefill_map(const PrefillTile& t) {
  PrefillMap m{};
  m.keys = 0;
  m.values = static_cast<unsigned>(t.stages * t.half_bytes());
  m.queries = 2 * m.values;
  m.barriers = m.queries + static_cast<unsigned>(t.rows() * t.head_dim * 2);
  m.works = m.barriers + static_cast<unsigned>((4 * t.stages + 4) * 8);
  m.total = m.works + (t.wgmma ? kPrefillWorks * 32u : 0u);
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
// `rows`: of the longest sequence; `sequences`: of the bucket.
FOURFOLD_MIXER_FN PrefillLaunch prefill_prepare_launch(int rows, int sequences) {
  return {static_cast<unsigned>((rows + kPrepareTokens - 1) / kPrepareTokens), static_cast<unsigned>(sequences),
          kPrepareThreads, 0};
}
// With wgmma a CTA has several blocks, one after the other; `sms`: of the card.
FOURFOLD_MIXER_FN PrefillLaunch prefill_launch(const PrefillTile& t, const AttentionShape& shape, int blocks, int sms) {
  const unsigned total = prefill_map(t).total;
  const auto threads = static_cast<unsigned>(t.threads());
  if (!t.wgmma) return {static_cast<unsigned>(shape.kv_heads), static_cast<unsigned>(blocks), threads, total};
  const int items = shape.kv_heads * blocks;
  return {static_cast<unsigned>(items < sms ? items : sms), 1, threads, total};
}

}  // namespace fourfold::attn
