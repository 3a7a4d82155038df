// Which kernel has a product of 17 rows and more, and how its work is cut: by times that were measured on an H200
// (docs/kernels/products.md), in tenths of a microsecond.
#include "cuda/backend/sources.h"

namespace fourfold::cuda {
namespace {

constexpr int kStart = 40;      // of any of them
constexpr int kLeastShare = 4;  // units of 64 columns and 128 rows that a CTA of gemm_middle starts for

struct MiddleCut {
  int share;  // units of a CTA
  int time;
};
// Shares that an item's columns are a multiple of leave a CTA with one piece of an item, where otherwise it has the end
// of one and the beginning of the next: that costs as much as eight units.
MiddleCut middle_cut(const gemm::MiddleTile& tile, const gemm::Matrix& matrix, int tokens, int sms) {
  constexpr int kUnit = 5, kTwoPieces = 40;
  constexpr int kCtasOfATenth = 5;
  const auto time = [&](int share) {
    return kStart + share * kUnit + gemm::middle_grid(matrix, tokens, share, tile.rows) / kCtasOfATenth;
  };
  const int share = gemm::middle_split_units(tile, matrix, tokens, sms, kLeastShare);
  MiddleCut best = {share, time(share) + (matrix.units % share == 0 ? 0 : kTwoPieces)};
  for (int pieces = 1; pieces <= gemm::kMiddlePieces; ++pieces) {
    const int even = gemm::middle_even_units(tile, matrix, tokens, sms, pieces);
    if (even >= kLeastShare && time(even) < best.time) best = {even, time(even)};
  }
  return best;
}

int wide_time(const Target& arch, int formats, WideEntry entry, const gemm::Matrix& matrix, int tokens, int sms) {
  return kStart + gemm::wide_cut(wide_tile(arch, formats, entry), matrix, tokens, sms).time;
}

}  // namespace

int middle_share(const Target& arch, int formats, int64_t rows, const gemm::Matrix& matrix, int sms) {
  return middle_cut(middle_tile(arch, formats, rows), matrix, static_cast<int>(rows), sms).share;
}

WideEntry wide_entry(const Target& arch, int formats, int64_t rows, const gemm::Matrix& matrix, int sms) {
  const bool wgmma = wide_by_wgmma(arch, formats);
  if (!wgmma && rows <= 32) return kMiddle;
  const int tokens = static_cast<int>(rows);
  const WideEntry of_few = rows <= gemm::kLeastRows ? kWideLeast : kWideFew;
  const auto few = [&] { return wide_time(arch, formats, of_few, matrix, tokens, sms); };
  if (wgmma && arch.most_middle_tiles > 0) {
    // Few items are dealt out evenly.
    constexpr int64_t kMostMiddleRows = 256;
    constexpr int kMostShare = 16;
    const gemm::MiddleTile middle = middle_tile(arch, formats, rows);
    if (rows <= gemm::kMiddleRows && matrix.tiles <= arch.most_middle_tiles) return kMiddle;
    if (rows <= kMostMiddleRows && gemm::middle_split_units(middle, matrix, tokens, sms, 1) <= kMostShare) {
      // Up to 64 rows its weights come early, which its time by itself does not tell.
      if (rows <= gemm::kMiddleRows || middle_cut(middle, matrix, tokens, sms).time <= few()) return kMiddle;
    }
  }
  if (!wgmma) return rows <= 64 || (formats & gemm::kCells) != 0 ? kWideFew : kWideMany;
  if (rows <= 64 || (formats & gemm::kCells) != 0) return of_few;
  // Where many CTAs share an item's columns, half of the sums each at twice as many CTAs; where there are many items, x
  // is brought to twice as many weights at once.
  return few() < wide_time(arch, formats, kWideMany, matrix, tokens, sms) ? kWideFew : kWideMany;
}

bool by_clusters(const Target& arch, int formats, int64_t rows, const gemm::Matrix& matrix, int sms) {
  if (!wide_by_wgmma(arch, formats) || wide_entry(arch, formats, rows, matrix, sms) != kMiddle) return false;
  if (arch.all_by_clusters) return true;
  // Clusters of eight CTAs do not fill every part of a card that a cluster must lie in: 32 of them on an H200, with two
  // CTAs to an SM, took two turns, 24 took one.
  const int ctas = gemm::cluster_grid(matrix, static_cast<int>(rows));
  return rows <= gemm::kMiddleRows ? 2 * ctas <= 3 * sms : ctas <= sms;
}

}  // namespace fourfold::cuda
