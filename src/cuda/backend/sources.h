// The kernels of the CUDA backend besides those of the experts, as sources to compile.
#pragma once

#include <compare>
#include <cstdint>

#include "cuda/moe/sources.h"
#include "kernels/attn/decode_tile.h"
#include "kernels/attn/prefill_tile.h"
#include "kernels/gdn/chunk_tile.h"
#include "kernels/gdn/recurrent_tile.h"
#include "kernels/gemm/dense_tile.h"
#include "kernels/gemm/rows_tile.h"
#include "plan/kernel.h"

namespace fourfold::cuda {

inline constexpr unsigned kMostShared = 227 * 1024;  // of a CTA, on Hopper
inline constexpr unsigned kReservedShared = 1024;    // of each CTA, by the system

// How the products of a matrix with few rows are taken: measured on an H200 (docs/kernels/products.md).
struct RowsWay {
  int formats;  // gemm::RowsTile::formats
  int strip_warps, teams, slots, ctas;
  int norm_pieces;  // of a norm in front
  auto operator<=>(const RowsWay&) const = default;
};
RowsWay rows_way(int formats, int64_t rows, int64_t columns);
// Entries: one for up to 8 rows, one for up to 16, and up to 8 with a norm in front.
enum RowsEntry { kRows8, kRows16, kRowsNorm };
gemm::RowsTile rows_tile(const RowsWay& way, RowsEntry entry);
plan::KernelSource rows_source(const RowsWay& way);

// Products of more rows, by wgmma. Entries: up to 64 rows of a matrix that is no head, up to 64 rows, and many; with
// cells one for the latter two.
enum WideEntry { kMiddle, kWideFew, kWideMany };
WideEntry wide_entry(int formats, int64_t rows, const gemm::Matrix& matrix);
gemm::WideTile wide_tile(int formats, WideEntry entry);
gemm::MiddleTile middle_tile(int formats);
plan::KernelSource wide_source(int formats);

// Norms of rows of up to 2048, 4096 and 8192 columns, embeddings, rows picked out.
enum NormEntry { kNorm1, kNorm2, kNorm4, kEmbed, kGather };
plan::KernelSource norm_source();

// Between ranks: sums with the norm behind them, with flags and by words, of rows as norm_source() has them, columns
// side by side, copies (docs/kernels/comm.md).
enum ReduceEntry { kReduce1, kReduce2, kReduce4, kWords1, kWords2, kWords4, kGatherColumns, kPeerCopy };
plan::KernelSource reduce_source();

enum StepEntry { kRound, kAdd, kGate, kShared, kRepackUnits, kRouteRows, kCopyTables };
plan::KernelSource step_source();

plan::KernelSource stamp_source();  // of timelines

// Choosing tokens, and verifying drafts.
enum SampleEntry { kSamplePrepare, kSampleChoose, kVerifyDrafts };
plan::KernelSource sample_source();

// Sequences of one row at a time from which on mixers take the tiles for many of them.
inline constexpr int kManySequences = 17;

// Entries: few query rows of a kv head, many, few of many sequences, and the sum over splits; norm, rotation and cache
// alone.
enum AttentionEntry { kAttendFew, kAttendMany, kAttendBatch, kAttendCombine, kAttendPrepare };
// `fp8`: the cache's keys and values are e4m3, otherwise bf16.
attn::DecodeTile attention_tile(int head_dim, int rotary_dim, bool fp8, AttentionEntry entry);
plan::KernelSource attention_source(int head_dim, int rotary_dim, bool fp8);

// Many rows of a sequence, behind kAttendPrepare.
enum PrefillEntry { kPrefill };
attn::PrefillTile prefill_tile(int head_dim, int rotary_dim, bool fp8);
bool has_prefill(int head_dim, int rotary_dim, bool fp8);
plan::KernelSource prefill_source(int head_dim, int rotary_dim, bool fp8);

enum DeltaEntry { kDeltaOne, kDeltaFew, kDeltaBatch, kDeltaPrepare, kDeltaScan, kDeltaScale };
gdn::RecurrentTile recurrent_tile(int key_dim, int value_dim, DeltaEntry entry);
gdn::ChunkTile chunk_tile(int key_dim, int value_dim);
bool has_chunks(int key_dim, int value_dim);
plan::KernelSource delta_source(int key_dim, int value_dim);

}  // namespace fourfold::cuda
