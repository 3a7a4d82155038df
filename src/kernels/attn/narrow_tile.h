// Shapes and shared memory of the attention kernel for up to 8 rows of scores (narrow.cuh). Read by host and device,
// includes nothing of CUDA.
#pragma once

#include "kernels/attn/decode_tile.h"

namespace fourfold::attn {

inline constexpr int kNarrowRows = 8;   // rows of a sequence x heads of a part of a group, at most
inline constexpr int kMostParts = 4;    // of a group
inline constexpr int kNarrowStep = 64;  // a split's positions are a multiple of
inline constexpr int kMostHeadDim = 256;

// Equal parts of a kv head's group that have kNarrowRows heads at most: each reads the keys and values of that head,
// and what one has read the others find in L2. A sequence's rows beyond one are not taken apart. 0: there are none.
FOURFOLD_MIXER_FN int narrow_parts(const AttentionShape& shape, int most_rows) {
  if (most_rows * shape.group() <= kNarrowRows) return 1;
  if (most_rows > 1) return 0;
  for (int parts = 2; parts <= kMostParts; ++parts) {
    if (shape.group() % parts == 0 && shape.group() / parts <= kNarrowRows) return parts;
  }
  return 0;
}

// Positions of a split, of the sequence's own length only.
FOURFOLD_MIXER_FN int narrow_split_length(int keys) {
  const int share = (keys + kMostSplits - 1) / kMostSplits;
  return (share + kNarrowStep - 1) / kNarrowStep * kNarrowStep;
}
FOURFOLD_MIXER_FN int narrow_split_count(int keys) {
  const int length = narrow_split_length(keys);
  return (keys + length - 1) / length;
}
// No sequence of at most `keys` positions has more splits.
FOURFOLD_MIXER_FN int narrow_most_splits(int keys) {
  const int all = (keys + kNarrowStep - 1) / kNarrowStep;
  return all < kMostSplits ? all : kMostSplits;
}

// What a row's part of a split is, words that are all ones where they are not there: its head's columns, and {largest
// score x log2 e, sum} for each block of columns that is added up, of 32 columns or more.
FOURFOLD_MIXER_FN int narrow_row_words(int head_dim) { return head_dim + head_dim / 16; }
// A warp adds up so many splits at most.
inline constexpr int kTeamSplits = 16;
// log2 of the quads of columns in a block: 32 lanes take four quads each, of all splits of a warp.
FOURFOLD_MIXER_FN int narrow_block_bits(int head_dim, int splits) {
  const int most = head_dim / 4 < 32 ? head_dim / 4 : 32;
  int bits = 3;
  while (2 << bits <= most && splits << bits <= 64) ++bits;
  return bits;
}
// `splits`: of each sequence; `rows`: of a sequence.
FOURFOLD_MIXER_FN long long narrow_words(const AttentionShape& shape, int splits, int rows, int sequences) {
  return static_cast<long long>(sequences) * shape.heads * splits * rows * narrow_row_words(shape.head_dim);
}

struct NarrowTile {
  int head_dim;
  int rotary_dim;  // 0: none
  int warps;       // each with its own keys
  int blocks;      // of 16 keys a warp multiplies at once
  int units;       // keys or values of so many blocks that a warp has room for
  bool fp8;        // e4m3 cache

  FOURFOLD_MIXER_FN int threads() const { return warps * 32; }
  FOURFOLD_MIXER_FN int keys() const { return blocks * 16; }  // of a unit
  FOURFOLD_MIXER_FN int row_bytes() const { return head_dim * (fp8 ? 1 : 2); }
  FOURFOLD_MIXER_FN int chunks() const { return row_bytes() / 16; }
  FOURFOLD_MIXER_FN int unit_bytes() const { return keys() * row_bytes(); }
  // Whether a warp adds values while it multiplies the next block's keys, in one stretch of code: e4m3, whose
  // conversions leave little time otherwise. A place of the ring then waits for the next unit.
  FOURFOLD_MIXER_FN bool together() const { return fp8; }
  FOURFOLD_MIXER_FN int output_stride() const { return head_dim + (fp8 ? 8 : 4); }  // floats, for the banks
  FOURFOLD_MIXER_FN bool legal() const {
    const int apart = rotary_dim / 16;
    return (head_dim == 64 || head_dim == 128 || head_dim == 256) && rotary_dim <= head_dim &&
           rotary_dim == apart * 16 && (apart & (apart - 1)) == 0 && rotary_dim / 2 <= threads() &&
           warps >= kMostSplits / kTeamSplits && warps % (kMostSplits / kTeamSplits) == 0 &&
           warps * (8 * 16 + 8) <= kNarrowRows * head_dim * 2 && (blocks == 1 || blocks == 2) && units >= 2;
  }
};

struct NarrowMap {
  unsigned ring;      // [warp][unit]; later the outputs [warp][8 rows][output_stride] fp32
  unsigned queries;   // [8][head_dim], 16 bits
  unsigned rotation;  // [8][rotary_dim / 2] {cos, sin}
  unsigned sums;      // [warp][8] {largest, sum}
  unsigned barriers;  // [warp][unit]: it is there
  unsigned news;      // {key, value} of each of this step's rows, as the cache holds them
  unsigned total;     // with 8 of them
};

FOURFOLD_MIXER_FN NarrowMap narrow_map(const NarrowTile& t) {
  NarrowMap m{};
  unsigned at = 0;
  const auto take = [&at](int bytes) {
    const unsigned here = at;
    at += (static_cast<unsigned>(bytes) + 127u) / 128u * 128u;
    return here;
  };
  const int ring = t.warps * t.units * t.unit_bytes();
  const int outputs = t.warps * kNarrowRows * t.output_stride() * 4;
  m.ring = take(ring > outputs ? ring : outputs);
  m.queries = take(kNarrowRows * t.head_dim * 2);
  m.rotation = take(kNarrowRows * t.rotary_dim / 2 * 8);
  m.sums = take(t.warps * kNarrowRows * 8);
  m.barriers = take(t.warps * t.units * 8);
  m.news = take(kNarrowRows * 2 * t.row_bytes());
  m.total = at;
  return m;
}
// What a launch for sequences of at most so many rows needs of it: for one row little enough to have room beside a CTA
// of an FP8 product of 2,048 columns.
FOURFOLD_MIXER_FN unsigned narrow_bytes(const NarrowTile& t, int most_rows) {
  return narrow_map(t).news + static_cast<unsigned>(most_rows * 2 * t.row_bytes());
}

template <int HeadDim, int RotaryDim, int Warps, int Blocks, int Units, bool Fp8>
struct NarrowTileOf {
  static constexpr NarrowTile value{HeadDim, RotaryDim, Warps, Blocks, Units, Fp8};
  static_assert(value.legal());
};

// `splits`: narrow_most_splits() of the longest context of the bucket. `parts`: narrow_parts(), not 0.
FOURFOLD_MIXER_FN DecodeLaunch narrow_launch(const NarrowTile& t, const AttentionShape& shape, int parts, int splits,
                                             int most_rows, int sequences) {
  return {static_cast<unsigned>(splits), static_cast<unsigned>(shape.kv_heads * parts),
          static_cast<unsigned>(sequences), static_cast<unsigned>(t.threads()), narrow_bytes(t, most_rows)};
}

}  // namespace fourfold::attn
