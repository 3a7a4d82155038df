// Arguments of the attention kernels, and the layout of the key/value cache. Formulas: ops.h, AttentionParams.
// Read by host and device, includes nothing of CUDA.
//
// A page holds the keys and values of `page_size` positions of one sequence, bf16 or e4m3 (value = code x scale), keys
// after norm and rotation. For each kv head first all keys, then all values: [kv head][keys, values][piece][position]
// [piece_bytes], a piece being 128 bytes of a position's vector (64 where it has no more). The 16-byte chunks of a
// piece are exchanged as wgmma's 128-byte swizzle wants them in shared memory (cache_chunk): positions beside each
// other are one copy for each piece, and what arrives is the operand.
#pragma once

#include "kernels/sequences.h"

namespace fourfold::attn {

inline constexpr int kMostRows = 16;     // of a sequence in the decode kernel
inline constexpr int kMostSplits = 64;   // of a sequence's context
inline constexpr int kLeastSplit = 128;  // positions
inline constexpr int kSplitStep = 128;   // a split's positions are a multiple of
inline constexpr int kLeastPage = 16;    // positions; a page has a power of two of them

// Positions of a split: it depends on the sequence's own length only, so that neither other sequences nor the bucket
// change a sum's order.
FOURFOLD_MIXER_FN int split_length(int keys) {
  const int share = (keys + kMostSplits - 1) / kMostSplits;
  const int length = (share + kSplitStep - 1) / kSplitStep * kSplitStep;
  return length > kLeastSplit ? length : kLeastSplit;
}
FOURFOLD_MIXER_FN int split_count(int keys) { return (keys + split_length(keys) - 1) / split_length(keys); }
// No sequence of at most `keys` positions has more splits: what a graph's grid must have.
FOURFOLD_MIXER_FN int most_splits(int keys) {
  const int all = (keys + kLeastSplit - 1) / kLeastSplit;
  return all < kMostSplits ? all : kMostSplits;
}

inline constexpr int kPiece = 128;
FOURFOLD_MIXER_FN int piece_bytes(int row_bytes) { return row_bytes < kPiece ? row_bytes : kPiece; }
// Where chunk `chunk` of a piece is in it.
FOURFOLD_MIXER_FN int cache_chunk(int piece_bytes, int position, int chunk) {
  return piece_bytes < kPiece ? chunk ^ (position >> 1 & 3) : chunk ^ (position & 7);
}
// Bytes from the first piece of a run of `positions` to chunk `chunk` of the vector of position `position`.
FOURFOLD_MIXER_FN int cache_place(int row_bytes, int positions, int position, int chunk) {
  const int bytes = piece_bytes(row_bytes);
  const int chunks = bytes / 16;
  return (chunk / chunks * positions + position) * bytes + cache_chunk(bytes, position, chunk % chunks) * 16;
}

struct AttentionShape {
  int heads;
  int kv_heads;
  int head_dim;
  bool gated;  // a row's query head is [head_dim query | head_dim gate]

  FOURFOLD_MIXER_FN int group() const { return heads / kv_heads; }
  FOURFOLD_MIXER_FN int query_stride() const { return gated ? 2 * head_dim : head_dim; }
  // Columns of a row [q and gates | k | v].
  FOURFOLD_MIXER_FN int q_column(int head) const { return head * query_stride(); }
  FOURFOLD_MIXER_FN int gate_column(int head) const { return head * query_stride() + head_dim; }
  FOURFOLD_MIXER_FN int k_column(int kv_head) const { return heads * query_stride() + kv_head * head_dim; }
  FOURFOLD_MIXER_FN int v_column(int kv_head) const { return k_column(kv_heads) + kv_head * head_dim; }
  FOURFOLD_MIXER_FN int columns() const { return v_column(kv_heads); }
};

// Of one layer.
struct AttentionArgs {
  AttentionShape shape;
  const SequenceRows* sequences;
  const int* live;             // how many of them are there
  const int* pages;            // [sequence][page_table_stride]
  const unsigned short* rows;  // bf16 [rows][row_stride]; 16-byte aligned as is the stride
  const float* q_norm;         // [head_dim] or null
  const float* k_norm;         //
  const float* frequencies;    // [rotary_dim / 2]: theta^(-2 i / rotary_dim)
  unsigned char* cache;        // of page 0 in this layer
  const float* cache_scales;   // e4m3: of keys, of values
  float* partial;              // [sequence][kv head][split][rows x group][head_dim]
  float* partial_sums;         // [sequence][kv head][split][rows x group] {largest score x log2 e, sum}
  unsigned* words;             // attention_narrow: [sequence][kv head, part][split][rows x heads of the part]
                               // [narrow_row_words], all ones before and after
  unsigned short* out;         // bf16 [rows][out_stride]: [head][head_dim]; a multiple of 4
  long long row_stride;        // elements
  long long out_stride;        //
  long long page_bytes;        // from one page to the next
  int page_shift;              // log2 of the positions in a page
  int page_table_stride;
  int splits;     // of `partial`
  int parts;      // attention_narrow: of a kv head's group, with CTAs and a place in `partial` each (narrow_parts)
  int span;       // more than 1: CTAs have several splits, one after the other (span_ctas, most_span)
  int most_rows;  // of a sequence, of `partial`
  float scale;    // of the scores
  float norm_eps;
  int settled;  // tables and pages were written at least two launches ago: read before the wait for the one before

  // Bytes from a page's start.
  FOURFOLD_MIXER_FN long long key_offset(int kv_head, int row_bytes) const {
    return (static_cast<long long>(kv_head) * 2 << page_shift) * row_bytes;
  }
  FOURFOLD_MIXER_FN long long value_offset(int kv_head, int row_bytes) const {
    return (static_cast<long long>(kv_head * 2 + 1) << page_shift) * row_bytes;
  }
};

}  // namespace fourfold::attn
