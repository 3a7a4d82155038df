// The kernels of the CUDA backend besides those of the experts: which one computes an operation on an architecture,
// with which tile, and its source to compile. Where an architecture lacks what a kernel is made of (wgmma, bulk copies,
// shared memory) another kernel or tile of the list takes its place here, and nowhere else.
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "cuda/moe/sources.h"
#include "kernels/attn/decode_tile.h"
#include "kernels/attn/narrow_tile.h"
#include "kernels/attn/prefill_tile.h"
#include "kernels/gdn/chunk_tile.h"
#include "kernels/gdn/recurrent_tile.h"
#include "kernels/gemm/dense_tile.h"
#include "kernels/gemm/rows_tile.h"
#include "plan/arch.h"
#include "plan/kernel.h"

namespace fourfold::cuda {

// Bytes of shared memory that a CTA may have where `ctas` of them share an SM.
unsigned shared_of(const plan::Arch& arch, int ctas = 1);

// How the products of a matrix with few rows are taken: measured on an H200, elsewhere by what fits
// (docs/kernels/products.md).
struct RowsWay {
  int formats;  // gemm::RowsTile::formats
  int strip_warps, teams, slots, ctas;
  int norm_pieces;  // of a norm in front
  int slots_of_16;  // of the tile for more than 8 rows
  auto operator<=>(const RowsWay&) const = default;
};

// A matrix, or a stack of them, as products know it: gemm::RowsTile::formats, outputs, inputs.
struct MatrixShape {
  int formats;
  int64_t rows, columns;
  auto operator<=>(const MatrixShape&) const = default;
};
// Ways that were measured to be faster than those of the list.
using MeasuredWays = std::map<MatrixShape, RowsWay>;

// What kernels are chosen for: an architecture, without those that were found to be wrong there.
struct Target : plan::Arch {
  Target(const plan::Arch& arch) : plan::Arch(arch) {}  // NOLINT: an architecture is one
  std::set<std::string> wrong;                          // as plan::KernelEntry::expression has them
  std::shared_ptr<const MeasuredWays> measured;         // null: nothing was measured
  // For self-tests: how every matrix is taken, and the row tiles up to which gemm_middle is for up to 64 rows; 0: it is
  // not taken at all.
  std::optional<RowsWay> way;
  int most_middle_tiles = 256;
  bool all_by_clusters = false;  // for them, too: gemm_cluster wherever gemm_middle would be
};

// What was measured to be fastest, or what the list has; whose kernels are not wrong. An Error when all are.
RowsWay rows_way(const Target& arch, int formats, int64_t rows, int64_t columns);
// A norm in front of a product is computed by each of its CTAs: of so few rows.
inline constexpr int64_t kMostNormedRows = 2;
// Whether the architecture has room for it, with x of so many columns.
bool way_fits(const plan::Arch& arch, const RowsWay& way, int64_t columns);
// What can be measured for a matrix, the list's own way first.
std::vector<RowsWay> way_candidates(const Target& arch, const MatrixShape& matrix);
// Entries: one for up to 8 rows, one for up to 16, and up to 8 with a norm in front.
enum RowsEntry { kRows8, kRows16, kRowsNorm, kRowsShare };
gemm::RowsTile rows_tile(const RowsWay& way, RowsEntry entry);
plan::KernelSource rows_source(const Target& arch, const RowsWay& way);
// CTAs of an SM that a launch has with so many rows of x: the tile's, or fewer where all of x is in shared memory only
// then.
int rows_ctas(const plan::Arch& arch, const gemm::RowsTile& tile, int units, int tokens);
// Rows of x that a launch takes of `tokens`: fewer where all would lie in shared memory one panel of columns after the
// other, for every row tile again, and four launches can do without.
int rows_at_once(const Target& arch, const RowsWay& way, int units, int tokens);
// Whether a launch takes so many, with all of x in shared memory.
bool all_at_once(const Target& arch, const RowsWay& way, int units, int64_t rows);

// Beside the router's choice. Entries: one for up to 8 rows, one for up to 16.
RowsWay choosing_way(const Target& arch, int formats, int64_t rows, int64_t columns);
gemm::RowsTile choosing_tile(const RowsWay& way, RowsEntry entry);
plan::KernelSource choosing_source(const Target& arch, const RowsWay& way);
bool choosing_right(const Target& arch, const RowsWay& way);

// With a router behind them (kernels/gemm/routing.h), up to 8 rows. How many of its columns a thread has, 0: too many.
int routing_columns(const RowsWay& way, int columns);
gemm::RowsTile routing_tile(const RowsWay& way, int route);
// Whether a launch takes so many rows: all of x is in shared memory, and each row tile has a CTA.
bool routes_at_once(const plan::Arch& arch, const gemm::RowsTile& tile, int units, int64_t rows, int tiles, int sms);
plan::KernelSource routing_source(const Target& arch, const RowsWay& way, int route);
// The norm and the choice behind it, by pieces of a thread.
enum RoutedEntry { kRouted1, kRouted2, kRouted4 };
plan::KernelSource routed_source();
bool routing_right(const Target& arch, const RowsWay& way, int route);  // of both

// Products of more rows, by wgmma or mma.sync. Tiles: up to 256 rows with little for each CTA; for up to 64 rows, also
// where more have so few items that the columns are shared out among many CTAs; for many; of wgmma for up to 32. With
// cells one for few and for many. Of wgmma, kMiddle has a tile for up to 32 rows besides. `sms`: that items are for.
enum WideEntry { kMiddle, kWideFew, kWideMany, kWideLeast };
// Which of the source's entries that is, for so many rows.
size_t wide_place(const Target& arch, int formats, WideEntry entry, int64_t rows);
// Whether those of wgmma are taken; and whether there are any.
bool wide_by_wgmma(const Target& arch, int formats);
bool has_wide(const Target& arch, int formats);
WideEntry wide_entry(const Target& arch, int formats, int64_t rows, const gemm::Matrix& matrix, int sms);
// Units of columns that a CTA of gemm_middle has.
int middle_share(const Target& arch, int formats, int64_t rows, const gemm::Matrix& matrix, int sms);
// Whether gemm_cluster, the source's last entry, takes the place of gemm_middle: so few items that clusters of all of
// them have room at once.
bool by_clusters(const Target& arch, int formats, int64_t rows, const gemm::Matrix& matrix, int sms);
// Where the architecture has wgmma:
gemm::WideTile wide_tile(const Target& arch, int formats, WideEntry entry);
gemm::MiddleTile middle_tile(const Target& arch, int formats, int64_t rows);
// Elsewhere; kMiddle is up to 32 rows there.
gemm::DenseTile dense_tile(const Target& arch, int formats, WideEntry entry);
plan::KernelSource wide_source(const Target& arch, int formats);
// Weights as rows of bf16, for a library.
plan::KernelSource unpack_source();
// Whether so few rows go through the kernel for few, 16 a launch: up to 8 do, more where that is the faster one.
bool by_few(const Target& arch, const RowsWay& way, const gemm::Matrix& matrix, int64_t rows, int sms);

// Norms of rows of up to 2048, 4096 and 8192 columns, embeddings, rows picked out; norms with the sum over experts in
// front, of fp32 rows of up to 2048 and 4096 columns and of rows of groups.
enum NormEntry {
  kNorm1,
  kNorm2,
  kNorm4,
  kEmbed,
  kGather,
  kSumNorm1,
  kSumNorm2,
  kSumNormGroups1,
  kSumNormGroups2,
  kSumNormGroups4
};
plan::KernelSource norm_source();
// Whether experts may leave their sum to such a norm, and to which.
bool sums_with_norm(const Target& arch, int64_t columns, bool groups);
NormEntry sum_norm_entry(int64_t columns, bool groups);

// Between ranks: sums with the norm behind them, with flags and by words, of rows as norm_source() has them, columns
// side by side, copies; sums by words of parts with a shared expert's share; of rows of up to 4096 columns with a CTA
// each, also without residual and norm, and with the router's choice behind it (docs/kernels/comm.md).
enum ReduceEntry {
  kReduce1,
  kReduce2,
  kReduce4,
  kWords1,
  kWords2,
  kWords4,
  kGatherColumns,
  kPeerCopy,
  kWordsShare1,
  kWordsShare2,
  kWordsShare4,
  kEach1,
  kEach2,
  kEachShare1,
  kEachShare2,
  kEachAlone1,
  kEachAlone2,
  kEachRouted1,
  kEachRouted2
};
plan::KernelSource reduce_source();
// Sums in two shots, by rows' columns as above: the residual left with owners or whole, parts with a share or without.
enum TwoShotEntry {
  kTwoShot1,
  kTwoShot2,
  kTwoShot4,
  kTwoShotShare1,
  kTwoShotShare2,
  kTwoShotShare4,
  kTwoShotWhole1,
  kTwoShotWhole2,
  kTwoShotWhole4,
  kTwoShotWholeShare1,
  kTwoShotWholeShare2,
  kTwoShotWholeShare4,
  kTwoShotGroups1,
  kTwoShotGroups2,
  kTwoShotGroups4,
  kTwoShotGroupsShare1,
  kTwoShotGroupsShare2,
  kTwoShotGroupsShare4
};
plan::KernelSource two_shot_source();
plan::KernelSource checksum_source();  // of a sum's bits
// Of parts that NCCL or the host has brought: sums by columns as above, and columns of rows put elsewhere.
enum GatheredEntry { kGathered1, kGathered2, kGathered4, kCopyColumns };
plan::KernelSource gathered_source();

enum StepEntry { kRound, kAdd, kGate, kShared, kRepackUnits, kRouteRows, kCopyTables, kPackRouting };
plan::KernelSource step_source();

plan::KernelSource stamp_source();  // of timelines

// Choosing tokens.
enum SampleEntry { kSampleTokens, kSampleCount };
plan::KernelSource sample_source();
// Lanes that the device moves on itself.
plan::KernelSource lanes_source();
// Of ranks with columns of their own.
enum RankSampleEntry {
  kSampleOwnColumns,
  kSampleJoin,
  kSampleBins,
  kSampleSettle,
  kSampleShares,
  kSampleTake,
  kSampleEnd,
  kSampleReport,
  kSampleTell
};
plan::KernelSource rank_sample_source();

// Sequences of one row at a time from which on the delta rule takes the tile for many of them.
inline constexpr int kManySequences = 16;
// CTAs of the sum over attention's splits that an SM has room for: where one for each head and row needs more, warps
// have them.
inline constexpr int kCombineCtas = 4;

// Entries: few query rows of a kv head, many, few of many sequences, and the sum over splits, by CTAs or, of many heads
// and rows, by warps; norm, rotation and cache alone; up to kNarrowRows query rows and the sum as one, last and only
// where narrow_tile() has a tile.
enum AttentionEntry {
  kAttendFew,
  kAttendMany,
  kAttendBatch,
  kAttendCombine,
  kAttendCombineMany,
  kAttendPrepare,
  kAttendNarrow
};
// `fp8`: the cache's keys and values are e4m3, otherwise bf16.
attn::DecodeTile attention_tile(const Target& arch, int head_dim, int rotary_dim, bool fp8, AttentionEntry entry);
std::optional<attn::NarrowTile> narrow_tile(const Target& arch, int head_dim, int rotary_dim, bool fp8);
plan::KernelSource attention_source(const Target& arch, int head_dim, int rotary_dim, bool fp8);

// Many rows of a sequence, behind kAttendPrepare; none: heads for which no tile has room.
enum PrefillEntry { kPrefill };
std::optional<attn::PrefillTile> prefill_tile(const Target& arch, int head_dim, int rotary_dim, bool fp8);
plan::KernelSource prefill_source(const Target& arch, int head_dim, int rotary_dim, bool fp8);

// Of one row of a sequence; of several rows; of these with 2 or 4 CTAs for a head, where that is possible, otherwise
// the same; of one row of many sequences.
enum DeltaEntry {
  kDeltaOne,
  kDeltaFew,
  kDeltaSplit2,
  kDeltaSplit4,
  kDeltaBatch,
  kDeltaVerify,  // of up to 1 + kMostUpdates rows of many sequences; with updates only
  kDeltaPrepare = kDeltaVerify,
  kDeltaScan,
  kDeltaScale,
  kDeltaBeside  // prepare with the scan beside it; where there is wgmma
};
// `updates`: of those that know updates of states (kernels/gdn/updates.h).
gdn::RecurrentTile recurrent_tile(const Target& arch, int key_dim, int value_dim, DeltaEntry entry,
                                  bool updates = false);
std::optional<gdn::ChunkTile> chunk_tile(const Target& arch, int key_dim, int value_dim);
plan::KernelSource delta_source(const Target& arch, int key_dim, int value_dim);
// The recurrent ones with updates, in place of delta_source()'s first entries, and behind them delta_make_states. None:
// there are none for such heads, or one of them is wrong.
inline constexpr int kDeltaMakeStates = kDeltaVerify + 1;
std::optional<plan::KernelSource> updates_source(const Target& arch, int key_dim, int value_dim);

}  // namespace fourfold::cuda
