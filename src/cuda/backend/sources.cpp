#include "cuda/backend/sources.h"

#include <algorithm>
#include <optional>
#include <span>
#include <vector>

#include "base/check.h"
#include "base/checksum.h"
#include "cuda/backend/tensors.h"
#include "kernels/comm/reduce_args.h"
#include "kernels/gemm/repack_args.h"
#include "kernels/gemm/unpack_args.h"
#include "kernels/norm/norm_args.h"
#include "kernels/step/lanes_args.h"
#include "kernels/step/rows_args.h"
#include "kernels/step/sample_ranks_args.h"

namespace fourfold::cuda {

namespace {

// Shared memory of one CTA with the large tiles, those of Hopper, and with the middle ones.
constexpr int64_t kLargeShared = 224 * 1024, kMiddleShared = 160 * 1024;
constexpr int kMostPasses = 4;  // over a matrix's weights, where x does not fit

bool right(const Target& arch, const std::string& expression) { return !arch.wrong.contains(expression); }

bool all_right(const Target& arch, const plan::KernelSource& source) {
  return std::all_of(source.entries.begin(), source.entries.end(),
                     [&](const plan::KernelEntry& entry) { return right(arch, entry.expression); });
}

// The first of an operation's tiles that fits and whose kernels, as `expressions` names them, are not wrong.
template <typename Tile, typename Fits, typename Expressions>
std::optional<Tile> first_fit(const Target& arch, const std::vector<Tile>& tiles, const Fits& fits,
                              const Expressions& expressions) {
  for (const Tile& tile : tiles) {
    if (!tile.legal() || !fits(tile)) continue;
    if (arch.wrong.empty()) return tile;
    const std::vector<std::string> all = expressions(tile);
    if (std::all_of(all.begin(), all.end(), [&](const std::string& each) { return right(arch, each); })) return tile;
  }
  return std::nullopt;
}

// A source whose kernels are not the first ones of their lists has a name of its own.
void name_apart(const Target& arch, plan::KernelSource& source) {
  if (arch.wrong.empty()) return;
  std::string all;
  for (const plan::KernelEntry& entry : source.entries) all += entry.expression + "\n";
  source.name += fmt::format("_{:016x}", checksum(std::as_bytes(std::span(all))));
}

}  // namespace

unsigned shared_of(const plan::Arch& arch, int ctas) {
  return static_cast<unsigned>(std::min(arch.smem_per_block, arch.smem_per_sm / ctas - arch.smem_reserved));
}

namespace {

// Warps of a strip where the same product has kernels of gemm_rows for more than 8 rows of x, too.
constexpr int kLeastStripWarps = 4;
// So large that gemm_wide takes more than 8 rows of x.
bool is_head(const Target& arch, int formats, int64_t rows, int64_t columns) {
  return arch.wgmma && rows >= 32768 && columns >= 2048 && (formats & gemm::kCells) == 0;
}

RowsWay first_way(const Target& arch, int formats, int64_t rows, int64_t columns) {
  constexpr int kBf16 = 1 << static_cast<int>(gemm::Weights::kBf16), kFp8 = 1 << static_cast<int>(gemm::Weights::kFp8);
  const int pieces = norm::norm_pieces(static_cast<int>(columns));
  const int norm = pieces == 1 || pieces == 2 ? pieces : 0;
  if (arch.smem_per_block < kLargeShared) {
    // Two steps of eight warps are 36 KB under way: these cards read 6 to 19 bytes a nanosecond for each SM.
    const bool split = formats == kBf16 || (columns >= 4096 && rows <= 4096);
    return {formats, split ? 8 : 4, split ? 1 : 2, 2, 1, norm, arch.smem_per_block < kMiddleShared ? 1 : 2};
  }
  // Small ones: one CTA to an SM has all of its weights under way, and leaves room for the kernels around it.
  constexpr int64_t kUnderWay = int64_t{3} << 20;       // weights
  constexpr int64_t kTileEach = 132 * gemm::kTileRows;  // with more teams some would have none
  if (formats == kBf16 && (rows <= 1024 || rows * columns <= kUnderWay)) return {formats, 8, 1, 4, 1, norm, 4};
  if (formats == kBf16) {
    // On nearly every SM: with fewer CTAs, a router's, the larger ring keeps experts from beginning beside it.
    if (rows > kTileEach * 9 / 10 && rows <= kTileEach) return {formats, 8, 1, 5, 1, norm, 4};
    const bool even = columns < 4096 ? rows > 4096 : columns < 8192 && rows > 4096 && rows <= 8192;
    if (even) return {formats, 4, 2, 4, 2, norm, 4};
    return {formats, 8, 1, 3, 2, norm, 4};  // shorter at the end, where some SMs have a row tile more
  }
  if ((columns >= 4096 && rows <= 4096) || (columns >= 2048 && rows <= kTileEach)) {
    return {formats, 8, 1, 4, 1, norm, 4};
  }
  const bool fp8 = (formats & kFp8) != 0;
  if (fp8 && columns >= 4096 && rows <= 8192) return {formats, 8, 1, 5, 1, norm, 6};
  if (fp8) return {formats, 4, 2, 6, 1, norm, 6};
  if (rows * columns <= 2 * kUnderWay) return {formats, 4, 2, 4, 1, norm, 4};  // a weight is half a byte
  // What a warp does for each row tile besides is an eighth of its instructions where it has two steps of one.
  if (is_head(arch, formats, rows, columns) && columns <= 3072) return {formats, 2, 4, 3, 2, norm, 4};
  return {formats, 4, 2, 3, 2, norm, 4};
}

}  // namespace

RowsWay rows_way(const Target& arch, int formats, int64_t rows, int64_t columns) {
  if (arch.way) return *arch.way;
  std::vector<RowsWay> ways;
  if (arch.measured != nullptr) {
    const auto found = arch.measured->find({formats, rows, columns});
    if (found != arch.measured->end()) ways.push_back(found->second);
  }
  const RowsWay first = first_way(arch, formats, rows, columns);
  ways.push_back(first);
  if (arch.wrong.empty()) return ways.front();
  ways.push_back(first);
  ways.back().norm_pieces = 0;
  for (const int strip_warps : {8, 4}) ways.push_back({formats, strip_warps, 8 / strip_warps, 2, 1, 0, 1});
  for (const RowsWay& way : ways) {
    if (all_right(arch, rows_source(arch, way))) return way;
  }
  fail("products of few rows: every kernel is wrong, the last one {}",
       rows_source(arch, ways.back()).entries[kRows8].expression);
}

bool way_fits(const plan::Arch& arch, const RowsWay& way, int64_t columns) {
  const int units = gemm::units_of(static_cast<int>(columns));
  for (const RowsEntry entry : {kRows8, kRows16, kRowsNorm}) {
    if (entry == kRowsNorm && way.norm_pieces == 0) continue;
    const gemm::RowsTile tile = rows_tile(way, entry);
    // All of x is there where a norm makes it; elsewhere a panel of it will do.
    const int rows = entry == kRowsNorm ? static_cast<int>(kMostNormedRows) : tile.rows(),
              least = entry == kRowsNorm ? units : 1;
    if (tile.slots < 1 || gemm::rows_batch(tile, tile.rows()) < tile.teams ||
        gemm::panel_units(tile, units, rows, shared_of(arch, tile.ctas)) < least) {
      return false;
    }
  }
  return true;
}

std::vector<RowsWay> way_candidates(const Target& arch, const MatrixShape& matrix) {
  const RowsWay first = first_way(arch, matrix.formats, matrix.rows, matrix.columns);
  std::vector<RowsWay> all = {first};
  for (const int strip_warps : {8, 4, 2}) {
    if (strip_warps < kLeastStripWarps && !is_head(arch, matrix.formats, matrix.rows, matrix.columns)) continue;
    for (const int slots : {2, 3, 4, 5, 6, 8}) {
      for (const int ctas : {1, 2}) {
        const RowsWay way = {matrix.formats, strip_warps,       8 / strip_warps,  slots,
                             ctas,           first.norm_pieces, first.slots_of_16};
        if (way != first && way_fits(arch, way, matrix.columns)) all.push_back(way);
      }
    }
  }
  return all;
}

gemm::RowsTile rows_tile(const RowsWay& way, RowsEntry entry) {
  // A CTA's threads finish two row tiles of 16 rows at most.
  const int strip_warps = entry == kRows16 ? std::max(way.strip_warps, kLeastStripWarps) : way.strip_warps;
  return {way.formats,
          entry == kRows16 ? 2 : 1,
          strip_warps,
          way.strip_warps * way.teams / strip_warps,
          entry == kRows16 ? way.slots_of_16 : way.slots,
          entry == kRows16 ? 1 : way.ctas,  // two of an SM do not have room for 16 rows
          entry == kRowsNorm || entry == kRowsShare ? way.norm_pieces : 0,
          false,
          entry == kRowsShare};
}

namespace {

bool all_of_x_fits(const plan::Arch& arch, const gemm::RowsTile& tile, int units, int tokens, int ctas) {
  return gemm::panel_units(tile, units, tokens, shared_of(arch, ctas)) == units;
}

}  // namespace

int rows_ctas(const plan::Arch& arch, const gemm::RowsTile& tile, int units, int tokens) {
  for (int ctas = tile.ctas; ctas > 0; --ctas) {
    if (all_of_x_fits(arch, tile, units, tokens, ctas)) return ctas;
  }
  return tile.ctas;
}

int rows_at_once(const Target& arch, const RowsWay& way, int units, int tokens) {
  const auto whole = [&](int rows) {
    return all_of_x_fits(arch, rows_tile(way, rows > 8 ? kRows16 : kRows8), units, rows, 1);
  };
  if (arch.smem_per_block >= kLargeShared) return tokens;
  for (int passes = 1; passes <= kMostPasses; ++passes) {
    const int rows = (tokens + passes - 1) / passes;
    if (whole(rows)) return rows;
  }
  return tokens;
}

bool all_at_once(const Target& arch, const RowsWay& way, int units, int64_t rows) {
  return rows <= kMostRows &&
         all_of_x_fits(arch, rows_tile(way, rows > 8 ? kRows16 : kRows8), units, static_cast<int>(rows), 1);
}

RowsWay choosing_way(const Target& arch, int formats, int64_t rows, int64_t columns) {
  RowsWay way = rows_way(arch, formats, rows, columns);
  way.norm_pieces = 0;
  return way;
}

gemm::RowsTile choosing_tile(const RowsWay& way, RowsEntry entry) {
  gemm::RowsTile tile = rows_tile(way, entry);
  tile.choice = true;
  return tile;
}

plan::KernelSource choosing_source(const Target& arch, const RowsWay& way) {
  plan::KernelSource source;
  source.name = fmt::format("rows_{}_w{}x{}_s{}_c{}_t{}_choice", way.formats, way.strip_warps, way.teams, way.slots,
                            way.ctas, way.slots_of_16);
  source.text = "#include \"kernels/gemm/rows.cuh\"\n";
  for (const RowsEntry entry : {kRows8, kRows16}) {
    const gemm::RowsTile t = choosing_tile(way, entry);
    source.entries.push_back(
        {fmt::format("fourfold::gemm::gemm_rows<fourfold::gemm::RowsTileOf<{}, {}, {}, {}, {}, {}, 0, true>>",
                     t.formats, t.row_tiles, t.strip_warps, t.teams, t.slots, t.ctas),
         static_cast<unsigned>(t.threads()), arch.smem_per_block});
  }
  return source;
}

bool choosing_right(const Target& arch, const RowsWay& way) {
  return arch.wrong.empty() || all_right(arch, choosing_source(arch, way));
}

int routing_columns(const RowsWay& way, int columns) {
  const int threads = rows_tile(way, kRows8).threads();
  const int each = (columns + threads - 1) / threads;
  return each <= gemm::kMostRoutedColumns ? each : 0;
}

gemm::RowsTile routing_tile(const RowsWay& way, int route) {
  gemm::RowsTile tile = rows_tile(way, kRows8);
  tile.route = route;
  return tile;
}

bool routes_at_once(const plan::Arch& arch, const gemm::RowsTile& tile, int units, int64_t rows, int tiles, int sms) {
  const auto tokens = static_cast<int>(rows);
  const int ctas = rows_ctas(arch, tile, units, tokens);
  return all_of_x_fits(arch, tile, units, tokens, ctas) && tiles <= sms * ctas;
}

plan::KernelSource routing_source(const Target& arch, const RowsWay& way, int route) {
  const gemm::RowsTile t = routing_tile(way, route);
  return {fmt::format("rows_{}_w{}x{}_s{}_c{}_route{}", way.formats, way.strip_warps, way.teams, way.slots, way.ctas,
                      route),
          "#include \"kernels/gemm/rows.cuh\"\n",
          {{fmt::format("fourfold::gemm::gemm_rows<fourfold::gemm::RowsTileOf<{}, {}, {}, {}, {}, {}, 0, false, false, "
                        "{}>>",
                        t.formats, t.row_tiles, t.strip_warps, t.teams, t.slots, t.ctas, t.route),
            static_cast<unsigned>(t.threads()), arch.smem_per_block}}};
}

plan::KernelSource routed_source() {
  return {"routed_rows",
          "#include \"kernels/gemm/route.cuh\"\n",
          {{"fourfold::gemm::gemm_routed<1>", norm::kRowThreads},
           {"fourfold::gemm::gemm_routed<2>", norm::kRowThreads},
           {"fourfold::gemm::gemm_routed<4>", norm::kRowThreads}}};
}

bool routing_right(const Target& arch, const RowsWay& way, int route) {
  return arch.wrong.empty() || (all_right(arch, routing_source(arch, way, route)) && all_right(arch, routed_source()));
}

plan::KernelSource rows_source(const Target& arch, const RowsWay& way) {
  plan::KernelSource source;
  source.name = fmt::format("rows_{}_w{}x{}_s{}_c{}_n{}_t{}", way.formats, way.strip_warps, way.teams, way.slots,
                            way.ctas, way.norm_pieces, way.slots_of_16);
  source.text = "#include \"kernels/gemm/rows.cuh\"\n";
  for (const RowsEntry entry : {kRows8, kRows16, kRowsNorm, kRowsShare}) {
    if (entry == kRowsNorm && way.norm_pieces == 0) break;
    const gemm::RowsTile t = rows_tile(way, entry);
    source.entries.push_back(
        {fmt::format("fourfold::gemm::gemm_rows<fourfold::gemm::RowsTileOf<{}, {}, {}, {}, {}, {}, {}{}>>", t.formats,
                     t.row_tiles, t.strip_warps, t.teams, t.slots, t.ctas, t.norm_pieces,
                     t.share ? ", false, true" : ""),
         static_cast<unsigned>(t.threads()), arch.smem_per_block});
  }
  return source;
}

// As many stages as there is room for, up to 200 kB.
gemm::WideTile wide_tile(const Target& arch, int formats, WideEntry entry) {
  gemm::WideTile t = {formats, entry == kWideLeast ? gemm::kLeastRows : entry == kWideFew ? 64 : 128, 2};
  while (gemm::wide_map({t.formats, t.tokens, t.stages + 1}).total <= shared_of(arch)) ++t.stages;
  return t;
}

// About 100 kB: two have room on an SM.
gemm::MiddleTile middle_tile(const Target& arch, int formats, int64_t rows) {
  constexpr int kMostStages = 4;
  gemm::MiddleTile t = {formats, 3, 2, rows <= gemm::kLeastRows ? gemm::kLeastRows : gemm::kMiddleRows};
  while (t.stages < kMostStages && gemm::middle_map({formats, t.stages + 1, 2, t.rows}).total <= shared_of(arch, 2)) {
    ++t.stages;
  }
  return t;
}

// 128 tokens where there are many: a warp's accumulators are then 64 registers, with cells twice as many.
gemm::DenseTile dense_tile(const Target& arch, int formats, WideEntry entry) {
  gemm::DenseTile t = {formats, entry == kMiddle ? 32 : entry == kWideFew ? 64 : 128, entry == kMiddle ? 8 : 4, 4, 1};
  t.ctas = t.tokens <= 64 && !t.cells() ? 2 : 1;
  while (t.stages > 2 && gemm::dense_map(t).total > shared_of(arch, t.ctas)) --t.stages;
  return t;
}

bool by_few(const Target& arch, const RowsWay& way, const gemm::Matrix& matrix, int64_t rows, int sms) {
  constexpr int64_t kOne = kMostRows, kMost = 64;  // of one launch, and of four
  const int formats = way.formats;
  if (rows <= kFewRows || !has_wide(arch, formats)) return true;
  if (wide_by_wgmma(arch, formats)) {
    // A further row costs its way to every SM's shared memory. As measured (docs/kernels/products.md, "9 to 16 rows"),
    // gemm_cluster is faster from 12 rows on unless they are short, gemm_middle with many outputs never, and gemm_wide
    // where it has items for most SMs.
    constexpr int64_t kClustersFrom = 12;
    constexpr int kShort = 1024;
    if (!all_at_once(arch, way, matrix.units, rows)) return false;
    const WideEntry entry = wide_entry(arch, formats, rows, matrix, sms);
    if (entry == kMiddle) {
      return rows < kClustersFrom || matrix.columns <= kShort || matrix.tiles > arch.most_middle_tiles;
    }
    const gemm::WideTile wide = wide_tile(arch, formats, entry);
    const int tokens = static_cast<int>(rows);
    return 4 * gemm::wide_grid(wide, matrix, tokens, gemm::wide_cut(wide, matrix, tokens, sms), sms) < 3 * sms;
  }
  if (rows > kMost) return false;
  if (rows <= kOne) return true;
  const gemm::DenseTile tile = dense_tile(arch, formats, wide_entry(arch, formats, rows, matrix, sms));
  return 2 * gemm::dense_grid(tile, matrix, static_cast<int>(rows)) < sms;
}

namespace {

plan::KernelSource wgmma_source(const Target& arch, int formats) {
  plan::KernelSource source;
  source.name = fmt::format("wide_{}", formats);
  source.text = "#include \"kernels/gemm/cluster_sm90.cuh\"\n";
  const auto middle = [&](const char* kernel, int rows) {
    const gemm::MiddleTile t = middle_tile(arch, formats, rows);
    source.entries.push_back(
        {fmt::format("fourfold::gemm::{}<fourfold::gemm::MiddleTileOf<{}, {}, {}{}>>", kernel, t.formats, t.stages,
                     t.ctas, t.rows < gemm::kMiddleRows ? fmt::format(", {}", t.rows) : ""),
         gemm::kMiddleThreads, static_cast<int64_t>(gemm::middle_map(t).total), true});
  };
  middle("gemm_middle", gemm::kMiddleRows);
  for (const WideEntry entry : {kWideFew, kWideMany, kWideLeast}) {
    if (entry == kWideMany && (formats & gemm::kCells) != 0) continue;
    const gemm::WideTile t = wide_tile(arch, formats, entry);
    source.entries.push_back({fmt::format("fourfold::gemm::gemm_wide<fourfold::gemm::WideTileOf<{}, {}, {}>>",
                                          t.formats, t.tokens, t.stages),
                              gemm::kWideThreads, static_cast<int64_t>(gemm::wide_map(t).total)});
  }
  middle("gemm_middle", 1);
  middle("gemm_cluster", gemm::kMiddleRows);
  return source;
}

plan::KernelSource mma_source(const Target& arch, int formats) {
  plan::KernelSource source;
  source.name = fmt::format("dense_{}", formats);
  source.text = "#include \"kernels/gemm/dense.cuh\"\n";
  for (const WideEntry entry : {kMiddle, kWideFew, kWideMany}) {
    if (entry == kWideMany && (formats & gemm::kCells) != 0) continue;
    const gemm::DenseTile t = dense_tile(arch, formats, entry);
    source.entries.push_back({fmt::format("fourfold::gemm::gemm_dense<fourfold::gemm::DenseTileOf<{}, {}, {}, {}, {}>>",
                                          t.formats, t.tokens, t.row_warps, t.stages, t.ctas),
                              gemm::kDenseThreads, static_cast<int64_t>(gemm::dense_map(t).total), t.ctas > 1});
  }
  return source;
}

}  // namespace

size_t wide_place(const Target& arch, int formats, WideEntry entry, int64_t rows) {
  size_t place = entry;
  if (entry == kMiddle && middle_tile(arch, formats, rows).rows < gemm::kMiddleRows) place = kWideLeast + 1;
  return place > kWideMany && (formats & gemm::kCells) != 0 ? place - 1 : place;
}

bool wide_by_wgmma(const Target& arch, int formats) {
  return arch.wgmma && (arch.wrong.empty() || all_right(arch, wgmma_source(arch, formats)));
}

bool has_wide(const Target& arch, int formats) {
  return arch.wrong.empty() || wide_by_wgmma(arch, formats) || all_right(arch, mma_source(arch, formats));
}

plan::KernelSource wide_source(const Target& arch, int formats) {
  return wide_by_wgmma(arch, formats) ? wgmma_source(arch, formats) : mma_source(arch, formats);
}

plan::KernelSource norm_source() {
  return {"norm",
          "#include \"kernels/norm/norm.cuh\"\n#include \"kernels/moe/sum_norm.cuh\"\n",
          {{"fourfold::norm::norm_rows<1>", norm::kRowThreads},
           {"fourfold::norm::norm_rows<2>", norm::kRowThreads},
           {"fourfold::norm::norm_rows<4>", norm::kRowThreads},
           {"fourfold::norm::embed_rows", norm::kEmbedThreads},
           {"fourfold::norm::gather_rows", norm::kEmbedThreads},
           {"fourfold::moe::moe_sum_norm<1>", norm::kRowThreads},
           {"fourfold::moe::moe_sum_norm<2>", norm::kRowThreads},
           {"fourfold::moe::moe_sum_norm_packed<1>", norm::kRowThreads},
           {"fourfold::moe::moe_sum_norm_packed<2>", norm::kRowThreads},
           {"fourfold::moe::moe_sum_norm_packed<4>", norm::kRowThreads}}};
}

NormEntry sum_norm_entry(int64_t columns, bool groups) {
  const int pieces = norm::norm_pieces(static_cast<int>(columns));
  if (!groups) return pieces == 1 ? kSumNorm1 : kSumNorm2;
  return pieces == 1 ? kSumNormGroups1 : pieces == 2 ? kSumNormGroups2 : kSumNormGroups4;
}

bool sums_with_norm(const Target& arch, int64_t columns, bool groups) {
  const int pieces = norm::norm_pieces(static_cast<int>(columns));
  if (pieces == 0 || (pieces == 4 && !groups) || columns % 16 != 0) return false;
  return arch.wrong.empty() || right(arch, norm_source().entries[sum_norm_entry(columns, groups)].expression);
}

plan::KernelSource reduce_source() {
  return {"reduce",
          "#include \"kernels/comm/reduce.cuh\"\n#include \"kernels/comm/words.cuh\"\n"
          "#include \"kernels/comm/gather.cuh\"\n#include \"kernels/comm/each.cuh\"\n"
          "#include \"kernels/comm/routed.cuh\"\n",
          {{"fourfold::comm::reduce_norm_rows<1>", norm::kRowThreads},
           {"fourfold::comm::reduce_norm_rows<2>", norm::kRowThreads},
           {"fourfold::comm::reduce_norm_rows<4>", norm::kRowThreads},
           {"fourfold::comm::reduce_norm_words<1>", norm::kRowThreads},
           {"fourfold::comm::reduce_norm_words<2>", norm::kRowThreads},
           {"fourfold::comm::reduce_norm_words<4>", norm::kRowThreads},
           {"fourfold::comm::gather_parts", comm::kGatherThreads},
           {"fourfold::comm::peer_copy", comm::kGatherThreads},
           {"fourfold::comm::reduce_norm_words<1, true>", norm::kRowThreads},
           {"fourfold::comm::reduce_norm_words<2, true>", norm::kRowThreads},
           {"fourfold::comm::reduce_norm_words<4, true>", norm::kRowThreads},
           {"fourfold::comm::reduce_norm_each<1>", norm::kRowThreads},
           {"fourfold::comm::reduce_norm_each<2>", norm::kRowThreads},
           {"fourfold::comm::reduce_norm_each<1, true>", norm::kRowThreads},
           {"fourfold::comm::reduce_norm_each<2, true>", norm::kRowThreads},
           {"fourfold::comm::reduce_norm_each<1, false, true>", norm::kRowThreads},
           {"fourfold::comm::reduce_norm_each<2, false, true>", norm::kRowThreads},
           {"fourfold::comm::reduce_norm_routed<1>", norm::kRowThreads},
           {"fourfold::comm::reduce_norm_routed<2>", norm::kRowThreads}}};
}

plan::KernelSource two_shot_source() {
  plan::KernelSource source{"two_shot", "#include \"kernels/comm/two_shot.cuh\"\n", {}};
  for (const bool whole : {false, true}) {
    for (const bool share : {false, true}) {
      for (const int pieces : {1, 2, 4}) {
        source.entries.push_back(
            {fmt::format("fourfold::comm::reduce_norm_two_shot<{}, {}, {}>", pieces, whole, share), norm::kRowThreads});
      }
    }
  }
  for (const bool share : {false, true}) {
    for (const int pieces : {1, 2, 4}) {
      source.entries.push_back(
          {fmt::format("fourfold::comm::reduce_norm_two_shot<{}, false, {}, true>", pieces, share), norm::kRowThreads});
    }
  }
  return source;
}

plan::KernelSource checksum_source() {
  return {"checksum",
          "#include \"kernels/comm/checksum.cuh\"\n",
          {{"fourfold::comm::checksum_rows", comm::kGatherThreads}}};
}

plan::KernelSource gathered_source() {
  return {"gathered",
          "#include \"kernels/comm/gathered.cuh\"\n",
          {{"fourfold::comm::add_gathered_parts<1>", norm::kRowThreads},
           {"fourfold::comm::add_gathered_parts<2>", norm::kRowThreads},
           {"fourfold::comm::add_gathered_parts<4>", norm::kRowThreads},
           {"fourfold::comm::copy_columns", comm::kGatherThreads}}};
}

plan::KernelSource step_source() {
  return {"step_rows",
          "#include \"kernels/step/rows.cuh\"\n#include \"kernels/gemm/repack.cuh\"\n"
          "#include \"kernels/gemm/route.cuh\"\n",
          {{"fourfold::step::round_rows", step::kRowsThreads},
           {"fourfold::step::add_rows", step::kRowsThreads},
           {"fourfold::step::gate_rows", step::kRowsThreads},
           {"fourfold::step::add_shared", step::kRowsThreads},
           {"fourfold::gemm::gemm_repack", gemm::kRepackThreads},
           {"fourfold::gemm::gemm_route", gemm::kRouteThreads},
           {"fourfold::step::copy_tables", step::kTablesThreads},
           {"fourfold::gemm::gemm_pack_routing", gemm::kRoutingPackThreads}}};
}

plan::KernelSource unpack_source() {
  return {"unpack", "#include \"kernels/gemm/unpack.cuh\"\n", {{"fourfold::gemm::gemm_unpack", gemm::kUnpackThreads}}};
}

plan::KernelSource stamp_source() {
  return {"stamp", "#include \"kernels/step/stamp.cuh\"\n", {{"fourfold::step::stamp", 32}}};
}

plan::KernelSource sample_source() {
  return {"sample",
          "#include \"kernels/step/sample.cuh\"\n",
          {{"fourfold::step::sample_tokens", step::kSampleThreads, step::kSampleSmem},
           {"fourfold::step::sample_count", step::kCountThreads}}};
}

plan::KernelSource lanes_source() {
  return {"lanes", "#include \"kernels/step/lanes.cuh\"\n", {{"fourfold::step::step_lanes", step::kTablesThreads}}};
}

plan::KernelSource rank_sample_source() {
  return {"sample_ranks",
          "#include \"kernels/step/sample_ranks.cuh\"\n",
          {{"fourfold::step::sample_own_columns", step::kSampleThreads},
           {"fourfold::step::sample_join", step::kRankJoinThreads},
           {"fourfold::step::sample_bins", step::kSampleThreads},
           {"fourfold::step::sample_settle", step::kRankBins},
           {"fourfold::step::sample_shares", step::kSampleThreads},
           {"fourfold::step::sample_take", step::kSampleThreads},
           {"fourfold::step::sample_end", step::kRankJoinThreads},
           {"fourfold::step::sample_report", step::kSampleThreads, step::kReportSmem},
           {"fourfold::step::sample_tell", step::kSampleThreads}}};
}

namespace {

std::string decode_expression(const attn::DecodeTile& t) {
  return fmt::format(
      "fourfold::attn::attention_decode<fourfold::attn::DecodeTileOf<{}, {}, {}, {}, {}, {}, {}, {}, {}, {}>>",
      t.head_dim, t.rotary_dim, t.row_tiles, t.key_groups, t.parts, t.blocks, t.stages, t.fp8, t.bulk, t.ctas);
}

std::string narrow_expression(const attn::NarrowTile& t) {
  return fmt::format("fourfold::attn::attention_narrow<fourfold::attn::NarrowTileOf<{}, {}, {}, {}, {}, {}>>",
                     t.head_dim, t.rotary_dim, t.warps, t.blocks, t.units, t.fp8);
}

std::string prefill_expression(const attn::PrefillTile& t) {
  return fmt::format("fourfold::attn::attention_prefill_{}<fourfold::attn::PrefillTileOf<{}, {}, {}, {}, {}, {}, {}>>",
                     t.wgmma ? "wgmma" : "mma", t.head_dim, t.rotary_dim, t.warps, t.keys, t.stages, t.fp8, t.wgmma);
}

std::string recurrent_expression(const gdn::RecurrentTile& t) {
  const bool split = t.split > 1;
  return fmt::format("fourfold::gdn::delta_recurrent{}<fourfold::gdn::RecurrentTileOf<{}, {}, {}, {}, {}, {}{}{}>>",
                     split ? "_split" : "", t.key_dim, t.value_dim, t.rows, t.warps, t.ctas, t.float32,
                     split || t.updates ? fmt::format(", {}", t.split) : "", t.updates ? ", true" : "");
}

// Of preparing, scanning and scaling; and of preparing beside the scan.
std::vector<std::string> chunk_expressions(const gdn::ChunkTile& t) {
  const std::string name = fmt::format("fourfold::gdn::ChunkTileOf<{}, {}, {}, {}, {}, {}, {}, {}>", t.key_dim,
                                       t.value_dim, t.chunk, t.columns, t.helpers, t.bulk, t.float32, t.wgmma);
  std::vector<std::string> all = {fmt::format("fourfold::gdn::delta_prepare<{}>", name),
                                  fmt::format("fourfold::gdn::delta_scan{}<{}>", t.wgmma ? "_wgmma" : "", name),
                                  fmt::format("fourfold::gdn::{}<{}>", t.wgmma ? "delta_gate" : "delta_scale", name)};
  if (t.wgmma) all.push_back(fmt::format("fourfold::gdn::delta_prepare<{}, true>", name));
  return all;
}

}  // namespace

attn::DecodeTile attention_tile(const Target& arch, int head_dim, int rotary_dim, bool fp8, AttentionEntry entry) {
  struct Shape {
    int row_tiles, key_groups, parts, blocks, stages, ctas;
  };
  using Shapes = std::vector<Shape>;
  // The first ones as they measured best on an H200; the others have room on smaller cards. With cp.async NVRTC 13.0
  // spills the largest ones of bf16.
  const bool small = !arch.bulk_copy && !fp8;
  Shapes shapes;
  if (entry == kAttendMany) {
    shapes = fp8     ? Shapes{{4, 1, 2, 2, 4, 1}, {2, 2, 2, 1, 4, 1}, {2, 2, 2, 1, 2, 1}}
             : small ? Shapes{{2, 2, 2, 1, 2, 1}}
                     : Shapes{{4, 1, 2, 2, 2, 1}, {2, 2, 2, 1, 2, 1}};
    shapes.push_back({2, 1, 2, 1, 2, 1});  // heads of 256 that rotate as a whole, in 99 KB
  } else {
    shapes = fp8     ? Shapes{{1, 4, 2, 1, 6, 1}, {1, 4, 2, 1, 4, 1}, {1, 4, 2, 1, 2, 1}}
             : small ? Shapes{{1, 2, 2, 1, 3, 1}, {1, 2, 2, 1, 2, 1}}
                     : Shapes{{1, 4, 2, 1, 3, 1}, {1, 2, 2, 1, 3, 1}, {1, 2, 2, 1, 2, 1}};
    // Two CTAs on an SM: one begins while the other is in the middle.
    if (entry == kAttendBatch && arch.bulk_copy) shapes.insert(shapes.begin(), {1, 2, 2, 1, fp8 ? 6 : 3, 2});
  }
  std::vector<attn::DecodeTile> tiles;
  for (const Shape& s : shapes) {
    tiles.push_back(
        {head_dim, rotary_dim, s.row_tiles, s.key_groups, s.parts, s.blocks, s.stages, fp8, arch.bulk_copy, s.ctas});
  }
  const auto tile = first_fit(
      arch, tiles, [&](const attn::DecodeTile& t) { return attn::decode_map(t).total <= shared_of(arch, t.ctas); },
      [](const attn::DecodeTile& t) { return std::vector{decode_expression(t)}; });
  if (!tile && !arch.wrong.empty()) {
    fail("attention of few rows: every kernel is wrong, the last one {}", decode_expression(tiles.back()));
  }
  if (!tile) {
    if (!tiles.back().legal()) {
      fail("attention: heads of {}, {} of them rotate; wanted 64, 128 or 256 and a multiple of 16", head_dim,
           rotary_dim);
    }
    fail("attention: heads of {}, {} of them rotate, take {} bytes of shared memory; this card has {}", head_dim,
         rotary_dim, attn::decode_map(tiles.back()).total, shared_of(arch));
  }
  return *tile;
}

std::optional<attn::NarrowTile> narrow_tile(const Target& arch, int head_dim, int rotary_dim, bool fp8) {
  if (!arch.bulk_copy) return std::nullopt;
  std::vector<attn::NarrowTile> tiles;
  for (const int units : fp8 ? std::vector{6, 4} : std::vector{3, 2}) {
    tiles.push_back({head_dim, rotary_dim, 4, 1, units, fp8});
  }
  return first_fit(
      arch, tiles, [&](const attn::NarrowTile& t) { return attn::narrow_map(t).total <= shared_of(arch, 1); },
      [](const attn::NarrowTile& t) { return std::vector{narrow_expression(t)}; });
}

plan::KernelSource attention_source(const Target& arch, int head_dim, int rotary_dim, bool fp8) {
  plan::KernelSource source;
  source.name = fmt::format("attention_{}_{}{}", head_dim, rotary_dim, fp8 ? "_fp8" : "");
  const std::optional<attn::NarrowTile> narrow = narrow_tile(arch, head_dim, rotary_dim, fp8);
  source.text =
      "#include \"kernels/attn/combine.cuh\"\n#include \"kernels/attn/decode.cuh\"\n"
      "#include \"kernels/attn/prefill_prepare.cuh\"\n";
  if (narrow) source.text += "#include \"kernels/attn/narrow.cuh\"\n";
  for (const AttentionEntry entry : {kAttendFew, kAttendMany, kAttendBatch}) {
    const attn::DecodeTile t = attention_tile(arch, head_dim, rotary_dim, fp8, entry);
    source.entries.push_back({decode_expression(t), static_cast<unsigned>(t.threads()),
                              static_cast<int64_t>(attn::decode_map(t).total), t.ctas > 1});
  }
  source.entries.push_back({fmt::format("fourfold::attn::attention_combine<{}>", head_dim), attn::kCombineThreads});
  source.entries.push_back(
      {fmt::format("fourfold::attn::attention_combine_many<{}>", head_dim), attn::kCombineWarps * 32});
  source.entries.push_back(
      {fmt::format("fourfold::attn::attention_prepare<{}, {}, {}>", head_dim, rotary_dim, fp8), attn::kPrepareThreads});
  if (narrow) {
    source.entries.push_back({narrow_expression(*narrow), static_cast<unsigned>(narrow->threads()),
                              static_cast<int64_t>(attn::narrow_map(*narrow).total), true});
  }
  name_apart(arch, source);
  return source;
}

std::optional<attn::PrefillTile> prefill_tile(const Target& arch, int head_dim, int rotary_dim, bool fp8) {
  struct Shape {
    int warps, keys, stages;
    bool wgmma;
  };
  std::vector<attn::PrefillTile> tiles;
  for (const Shape& s :
       {Shape{8, 64, 2, true}, Shape{8, 32, 3, false}, Shape{8, 32, 2, false}, Shape{8, 16, 2, false}}) {
    if (s.wgmma && (fp8 || !arch.wgmma)) continue;
    if (arch.name == "sm_80" && !fp8 && s.keys > 16) continue;  // NVRTC 13.0 spills there
    tiles.push_back({head_dim, rotary_dim, s.warps, s.keys, s.stages, fp8, s.wgmma});
  }
  return first_fit(
      arch, tiles, [&](const attn::PrefillTile& t) { return attn::prefill_map(t).total <= shared_of(arch); },
      [](const attn::PrefillTile& t) { return std::vector{prefill_expression(t)}; });
}

plan::KernelSource prefill_source(const Target& arch, int head_dim, int rotary_dim, bool fp8) {
  const attn::PrefillTile t = prefill_tile(arch, head_dim, rotary_dim, fp8).value();
  plan::KernelSource source = {
      fmt::format("prefill_{}_{}{}", head_dim, rotary_dim, fp8 ? "_fp8" : ""),
      fmt::format("#include \"kernels/attn/prefill_{}.cuh\"\n", t.wgmma ? "sm90" : "mma"),
      {{prefill_expression(t), static_cast<unsigned>(t.threads()), static_cast<int64_t>(attn::prefill_map(t).total)}}};
  name_apart(arch, source);
  return source;
}

namespace {

constexpr DeltaEntry kRecurrentEntries[] = {kDeltaOne, kDeltaFew, kDeltaSplit2, kDeltaSplit4, kDeltaBatch};
constexpr DeltaEntry kUpdatesEntries[] = {kDeltaOne, kDeltaFew, kDeltaSplit2, kDeltaSplit4, kDeltaBatch, kDeltaVerify};

// The first that is right; none, if all are wrong.
std::optional<gdn::RecurrentTile> right_recurrent_tile(const Target& arch, int key_dim, int value_dim, DeltaEntry entry,
                                                       bool updates) {
  const auto tile = [&](int rows, int warps, int ctas, int split = 1) {
    return gdn::RecurrentTile{key_dim, value_dim, rows, warps, ctas, false, split, updates};
  };
  std::vector<gdn::RecurrentTile> tiles;
  if (entry == kDeltaOne) {
    // Two CTAs of an SM, or one beside one of the projection, have 64 registers for a thread.
    tiles = {tile(1, 16, arch.wgmma ? 2 : 1), tile(1, 8, 2)};
  } else if (entry == kDeltaBatch) {
    // Two panels a warp, one after the other: reads and writes of a CTA overlap, and those of four on an SM.
    if (arch.wgmma) tiles.push_back(tile(1, 8, 4));
    tiles.push_back(tile(1, 8, 2));
    tiles.push_back(tile(1, 16, arch.wgmma ? 2 : 1));
  } else if (entry == kDeltaVerify) {
    tiles = {tile(1 + gdn::kMostUpdates, 8, arch.wgmma ? 3 : 2), tile(gdn::kRecurrentRows, 16, 1)};
  } else {
    tiles = {tile(gdn::kRecurrentRows, 16, 1)};
    // Small CTAs begin beside the projection; heads of a sequence alone leave most SMs idle, and one takes long to
    // write a head's states.
    const gdn::RecurrentTile split =
        tile(updates ? 1 + gdn::kMostUpdates : gdn::kRecurrentRows, 8, 3, entry == kDeltaSplit4 ? 4 : 2);
    if (entry != kDeltaFew && arch.wgmma && split.legal()) tiles.insert(tiles.begin(), split);
  }
  const auto all = [](const gdn::RecurrentTile&) { return true; };
  const auto expressions = [](const gdn::RecurrentTile& t) { return std::vector{recurrent_expression(t)}; };
  const auto found = first_fit(arch, tiles, all, expressions);
  if (found || !arch.wrong.empty()) return found;
  return tiles.front();  // that it is legal is for whoever makes a source of it
}

plan::KernelEntry recurrent_entry(const gdn::RecurrentTile& t) {
  return {recurrent_expression(t), static_cast<unsigned>(t.threads()),
          static_cast<int64_t>(gdn::recurrent_map(t).total)};
}

}  // namespace

gdn::RecurrentTile recurrent_tile(const Target& arch, int key_dim, int value_dim, DeltaEntry entry, bool updates) {
  const auto found = right_recurrent_tile(arch, key_dim, value_dim, entry, updates);
  if (!found) fail("delta rule: every kernel for heads of {} keys and {} values is wrong", key_dim, value_dim);
  return *found;
}

std::optional<plan::KernelSource> updates_source(const Target& arch, int key_dim, int value_dim) {
  plan::KernelSource source;
  source.name = fmt::format("delta_updates_{}_{}", key_dim, value_dim);
  source.text = "#include \"kernels/gdn/make_states.cuh\"\n#include \"kernels/gdn/recurrent.cuh\"\n";
  for (const DeltaEntry entry : kUpdatesEntries) {
    const auto t = right_recurrent_tile(arch, key_dim, value_dim, entry, true);
    if (!t || !t->legal() || gdn::recurrent_map(*t).total > shared_of(arch)) return std::nullopt;
    source.entries.push_back(recurrent_entry(*t));
  }
  const std::string make_states = fmt::format("fourfold::gdn::delta_make_states<{}, {}>", key_dim, value_dim);
  if (!right(arch, make_states)) return std::nullopt;
  source.entries.push_back({make_states, 32U * static_cast<unsigned>(gdn::update_group(value_dim))});
  name_apart(arch, source);
  return source;
}

std::optional<gdn::ChunkTile> chunk_tile(const Target& arch, int key_dim, int value_dim) {
  struct Shape {
    int chunk, columns;
  };
  std::vector<gdn::ChunkTile> tiles;
  if (arch.wgmma) tiles.push_back({key_dim, value_dim, 64, 64, false, true, false, true});
  for (const Shape& s : {Shape{64, 32}, Shape{32, 32}, Shape{32, 16}}) {
    tiles.push_back({key_dim, value_dim, s.chunk, s.columns, true, arch.bulk_copy, false});
  }
  return first_fit(
      arch, tiles,
      [&](const gdn::ChunkTile& t) {
        return std::max(gdn::scan_bytes(t), t.wgmma ? gdn::beside_bytes(t) : gdn::prepare_map(t).total) <=
               shared_of(arch);
      },
      chunk_expressions);
}

plan::KernelSource delta_source(const Target& arch, int key_dim, int value_dim) {
  plan::KernelSource source;
  source.name = fmt::format("delta_{}_{}", key_dim, value_dim);
  source.text = "#include \"kernels/gdn/recurrent.cuh\"\n";
  for (const DeltaEntry entry : kRecurrentEntries) {
    const gdn::RecurrentTile t = recurrent_tile(arch, key_dim, value_dim, entry);
    if (!t.legal()) {
      fail("delta rule: heads of {} keys and {} values; wanted multiples of 16 up to {}", key_dim, value_dim,
           gdn::kMostDim);
    }
    source.entries.push_back(recurrent_entry(t));
  }
  if (const std::optional<gdn::ChunkTile> t = chunk_tile(arch, key_dim, value_dim)) {
    source.text += fmt::format("#include \"kernels/gdn/chunk_scan{}.cuh\"\n", t->wgmma ? "_sm90" : "");
    const std::vector<std::string> expressions = chunk_expressions(*t);
    source.entries.push_back({expressions[0], gdn::kPrepareThreads, static_cast<int64_t>(gdn::prepare_map(*t).total)});
    source.entries.push_back(
        {expressions[1], static_cast<unsigned>(t->scan_threads()), static_cast<int64_t>(gdn::scan_bytes(*t))});
    source.entries.push_back({expressions[2], gdn::kScaleThreads});
    if (t->wgmma) {
      source.entries.push_back(
          {expressions[3], gdn::kBesideTeams * gdn::kPrepareThreads, static_cast<int64_t>(gdn::beside_bytes(*t))});
    }
  }
  name_apart(arch, source);
  return source;
}

}  // namespace fourfold::cuda
