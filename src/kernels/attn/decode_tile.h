// Shapes and shared memory of the attention kernels for few rows (decode.cuh). Read by host and device, includes
// nothing of CUDA.
#pragma once

#include "kernels/attn/tables.h"

namespace fourfold::attn {

struct DecodeTile {
  int head_dim;
  int rotary_dim;  // 0: none
  int row_tiles;   // of 16 query rows (rows x heads of one kv head); as many warps share the keys
  int key_groups;  // of warps beside each other, each with its own keys
  int parts;       // warps with the same rows and keys, each with a part of the values' dimensions
  int blocks;      // of 16 keys a warp has in a stage
  int stages;
  bool fp8;   // e4m3 cache
  bool bulk;  // the copy engine brings the stages (sm_90 and later); otherwise cp.async
  int ctas;   // per SM

  FOURFOLD_MIXER_FN int warps() const { return row_tiles * key_groups * parts; }
  FOURFOLD_MIXER_FN int threads() const { return warps() * 32; }
  FOURFOLD_MIXER_FN int rows() const { return row_tiles * 16; }
  FOURFOLD_MIXER_FN int keys() const { return key_groups * blocks * 16; }  // of a stage
  FOURFOLD_MIXER_FN int row_bytes() const { return head_dim * (fp8 ? 1 : 2); }
  FOURFOLD_MIXER_FN int chunks() const { return row_bytes() / 16; }
  FOURFOLD_MIXER_FN int stage_bytes() const { return 2 * keys() * row_bytes(); }
  // Rows whose outputs meet at once at a split's end: all of them once the last stage is read; with splits to follow,
  // as many as the stage that has just been read has room for.
  FOURFOLD_MIXER_FN int rows_at_once() const {
    const int most = spans() ? stage_bytes() / (key_groups * head_dim * 4) / 8 * 8 : rows();
    return most < rows() ? most : rows();
  }
  // Whether a CTA can have several splits one after the other: with tiles for many sequences.
  FOURFOLD_MIXER_FN bool spans() const {
    return bulk && row_tiles == 1 && ctas > 1 && stage_bytes() >= key_groups * 8 * head_dim * 4;
  }
  FOURFOLD_MIXER_FN bool legal() const {
    return (parts == 1 || parts == 2) && (head_dim == 64 || head_dim == 128 || head_dim == 256) &&
           rotary_dim % 16 == 0 && rotary_dim <= head_dim && kSplitStep % keys() == 0 && stages >= 2 && warps() <= 16;
  }
};

struct DecodeMap {
  unsigned stages;   // keys, then values of each; later the outputs [key group][rows][head_dim] fp32, columns exchanged
                     // by turn_of(row)
  unsigned queries;  // [rows][head_dim], 16 bits
  unsigned rotation;  // [kMostRows][rotary_dim / 2] {cos, sin}
  unsigned sums;      // [key group][rows] {largest, sum}
  unsigned pages;     // of the split
  unsigned barriers;  // of each stage: it is there
  unsigned total;
};

inline constexpr int kSplitPages =
    (4096 + kSplitStep) / kLeastPage + 8;  // 262,144 positions and a few more in 64 splits

FOURFOLD_MIXER_FN DecodeMap decode_map(const DecodeTile& t) {
  DecodeMap m{};
  unsigned at = 0;
  const auto take = [&at](int bytes) {
    const unsigned here = at;
    at += (static_cast<unsigned>(bytes) + 127u) / 128u * 128u;
    return here;
  };
  const int stages = t.stages * t.stage_bytes();
  const int outputs = t.key_groups * t.rows_at_once() * t.head_dim * 4;
  m.stages = take(stages > outputs ? stages : outputs);
  m.queries = take(t.rows() * t.head_dim * 2);
  m.rotation = take(kMostRows * t.rotary_dim / 2 * 8);
  m.sums = take(t.key_groups * t.rows() * 8);
  m.pages = take(kSplitPages * 4);
  m.barriers = take(t.stages * 8);
  m.total = at;
  return m;
}

template <int HeadDim, int RotaryDim, int RowTiles, int KeyGroups, int Parts, int Blocks, int Stages, bool Fp8,
          bool Bulk, int Ctas>
struct DecodeTileOf {
  static constexpr DecodeTile value{HeadDim, RotaryDim, RowTiles, KeyGroups, Parts, Blocks, Stages, Fp8, Bulk, Ctas};
  static_assert(value.legal());
};

struct DecodeLaunch {
  unsigned grid_x, grid_y, grid_z;
  unsigned threads;
  unsigned shared_bytes;
};
// Splits that a CTA can have one after the other (at least one), with contexts of up to `longest` positions: there is
// room for the pages.
FOURFOLD_MIXER_FN int most_span(const DecodeTile& t, int longest) {
  if (!t.spans()) return 1;
  const int span = (kSplitPages - 8) * kLeastPage / split_length(longest);
  return span > 1 ? span : 1;
}
// CTAs that share the splits of a sequence, at least `span` each where there are so many; one split each without a
// span.
FOURFOLD_MIXER_FN int span_ctas(int splits, int span) {
  if (span <= 1) return splits;
  return splits > span ? splits / span : 1;
}
// `splits`: most_splits() of the longest context of the bucket; `rows`: of a sequence at most.
FOURFOLD_MIXER_FN DecodeLaunch decode_launch(const DecodeTile& t, const AttentionShape& shape, int splits, int rows,
                                             int sequences, int span = 1) {
  const int blocks = (rows * shape.group() + t.rows() - 1) / t.rows();
  return {static_cast<unsigned>(span_ctas(splits, span)), static_cast<unsigned>(shape.kv_heads * blocks),
          static_cast<unsigned>(sequences), static_cast<unsigned>(t.threads()), decode_map(t).total};
}
inline constexpr int kCombineThreads = 256, kCombineWarps = 4;
FOURFOLD_MIXER_FN DecodeLaunch combine_launch(const AttentionShape& shape, int rows, int sequences) {
  return {static_cast<unsigned>(shape.heads), static_cast<unsigned>(rows), static_cast<unsigned>(sequences),
          kCombineThreads, 0};
}
FOURFOLD_MIXER_FN DecodeLaunch combine_many_launch(const AttentionShape& shape, int rows, int sequences) {
  return {static_cast<unsigned>((shape.heads * rows + kCombineWarps - 1) / kCombineWarps),
          static_cast<unsigned>(sequences), 1, kCombineWarps * 32, 0};
}
FOURFOLD_MIXER_FN long long partial_floats(const AttentionShape& shape, int splits, int rows, int sequences) {
  return static_cast<long long>(sequences) * splits * rows * shape.heads * shape.head_dim;
}

}  // namespace fourfold::attn
