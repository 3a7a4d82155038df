// Legality: one function per rule, each either silent or a reason with numbers.
#include <algorithm>
#include <limits>

#include "base/check.h"
#include "base/math.h"
#include "plan/moe/plan.h"

namespace fourfold::plan::moe {
namespace {

struct Context {
  const Problem& problem;
  Pass pass;
  const Gpu& gpu;
  const Arch& arch;
  const Candidate& c;
  const TileConfig& t;
  const FamilyRow& row;
};

std::string ctas(int count) { return fmt::format("{} CTA{}", count, count == 1 ? "" : "s"); }

// Each returns the reason, or an empty string.

std::string copies(const Context& x) {
  if (!x.arch.cp_async) return fmt::format("{} has no asynchronous copy", x.arch.name);
  if (x.t.producer_warps > 0 && !x.arch.bulk_copy) {
    return fmt::format("producer warps need bulk copies, {} has none", x.arch.name);
  }
  return "";
}

std::string token_tile(const Context& x) {
  const int64_t busiest = std::max<int64_t>(1, busiest_rows(x.problem));
  const int64_t enough = round_up(busiest, 8);
  const int64_t grain = x.t.swap_ab ? 8 : x.row.unit == MatrixUnit::kWgmma ? 64 : 16;
  if (x.t.tokens > round_up(enough, grain)) {
    return fmt::format("tile of {} tokens, but the busiest expert expects {} rows: {} hold them", x.t.tokens, busiest,
                       enough);
  }
  return "";
}

std::string tile_shape(const Context& x) {
  const TileConfig& t = x.t;
  const int weight_rows = t.operands * t.n;
  if (x.row.unit == MatrixUnit::kWgmma) {
    const int groups = t.warps / 4;
    const int m = t.swap_ab ? weight_rows : t.tokens;
    if (m % (64 * groups) != 0) {
      return fmt::format("{} {} over {} warpgroups: wgmma wants 64 rows for each", m,
                         t.swap_ab ? "weight rows" : "tokens", groups);
    }
    const int columns = t.swap_ab ? t.tokens : weight_rows;
    if (columns > 256) return fmt::format("wgmma takes at most 256 columns, the tile has {}", columns);
    return "";
  }
  // Warps tile the m16 x n8 blocks: along M first, the rest along N.
  const int slice = t.warps / t.k_warps;
  const int m_blocks = (t.swap_ab ? weight_rows : t.tokens) / 16;
  const int n_blocks = (t.swap_ab ? t.tokens : weight_rows) / 8;
  if (m_blocks == 0) {
    return fmt::format("{} {} do not fill the 16 rows of an mma", t.swap_ab ? weight_rows : t.tokens,
                       t.swap_ab ? "weight rows" : "tokens");
  }
  if (m_blocks * 16 != (t.swap_ab ? weight_rows : t.tokens)) {
    return fmt::format("{} rows are not a multiple of the 16 of an mma", t.swap_ab ? weight_rows : t.tokens);
  }
  const int along_m = x.row.warps_along_rows(t);
  if (m_blocks % along_m != 0 || slice % along_m != 0 || n_blocks % (slice / along_m) != 0) {
    return fmt::format("{} warps do not divide {} x {} blocks of 16 x 8", slice, m_blocks, n_blocks);
  }
  return "";
}

// A stage holds whole units of 64 and the last one of a row may be short, so any K tile is right for any K; one that is
// deeper than all of K only wastes shared memory.
std::string depth_tile(const Context& x) {
  const int64_t depth = x.problem.depth(x.pass), padded = x.problem.padded_depth(x.pass);
  if (x.t.k > padded && x.t.k > kDepthGrain) {
    return fmt::format("K tile of {}, but K is {}: a tile of {} holds it all", x.t.k, depth, padded);
  }
  const int units = x.t.k / kDepthGrain, sharing = x.t.k_warps / x.t.stage_warps;
  if (units % sharing != 0) {
    return fmt::format("K tile of {} is {} x {}, which does not divide over {} warps", x.t.k, units, kDepthGrain,
                       sharing);
  }
  if (x.c.split_k > 1 && padded / x.t.k / x.c.split_k == 0) {
    return fmt::format("{} K tiles of {} do not divide over {} CTAs", ceil_div(padded, x.t.k), x.t.k, x.c.split_k);
  }
  return "";
}

// There is one stored copy of the weights, in the register order of the mma's A operand.
std::string stored_weights(const Context& x) {
  if (!x.t.swap_ab) {
    return "the stored weights are in the order of the mma's M side; tokens there would need a second copy";
  }
  return "";
}

std::string scale_factors(const Context& x) {
  const ScaleBlocks s = scale_blocks(x.t.k, x.t.scale_vector, x.t.family);
  if (s.per_row == 0 || x.t.k % x.t.scale_vector != 0) {
    return fmt::format("K tile of {} is not a multiple of the scale vector {}", x.t.k, x.t.scale_vector);
  }
  if (s.block % s.per_mma != 0) {
    return fmt::format("a block of {} scales does not hold a whole number of the {} that one mma takes", s.block,
                       s.per_mma);
  }
  return "";
}

// The narrowest tiles that all families have take any number of rows, or the narrowest experts would have none.
std::string row_padding(const Context& x) {
  constexpr int kNarrowest = 64;
  const int64_t rows = x.problem.rows(x.pass), padded = round_up(rows, x.t.n);
  if (x.t.n > kNarrowest && (padded - rows) * 4 > rows) {
    return fmt::format("{} weight rows in tiles of {} are padded to {}: more than 25 % waste", rows, x.t.n, padded);
  }
  return "";
}

std::string pipeline_depth(const Context& x) {
  if (x.t.stages % x.t.stage_warps != 0) {
    return fmt::format("{} stages are no whole number of rounds for {} groups of warps that take turns", x.t.stages,
                       x.t.stage_warps);
  }
  if (x.t.producer_warps > 0) return "";  // the producer runs on into the next tile
  const int64_t k_tiles = ceil_div(ceil_div(x.problem.padded_depth(x.pass), x.t.k), x.c.split_k);
  if (x.t.stages > std::max<int64_t>(2, k_tiles)) {
    return fmt::format("{} stages for {} K tiles of {}: the others would never be filled", x.t.stages, k_tiles, x.t.k);
  }
  return "";
}

std::string smem_per_block(const Context& x) {
  const SmemMap map = make_smem_map(x.t);
  if (map.total > x.arch.smem_per_block) {
    return fmt::format("K={} with {} stages needs {} B, {} has {} B per block", x.t.k, x.t.stages, map.total,
                       x.arch.name, x.arch.smem_per_block);
  }
  return "";
}

std::string smem_per_sm(const Context& x) {
  const SmemMap map = make_smem_map(x.t);
  const int64_t each = round_up(map.total, 128) + x.arch.smem_reserved;
  if (each * x.c.ctas_per_sm > x.arch.smem_per_sm) {
    return fmt::format("{} of {} B (+{} B reserved each) need {} B, {} has {} B per SM", ctas(x.c.ctas_per_sm),
                       map.total, x.arch.smem_reserved, each * x.c.ctas_per_sm, x.arch.name, x.arch.smem_per_sm);
  }
  return "";
}

std::string warps(const Context& x) {
  const int per_cta = x.t.warps + x.t.producer_warps;
  if (per_cta * 32 > 1024) return fmt::format("{} threads, a block has at most 1024", per_cta * 32);
  if (per_cta * x.c.ctas_per_sm > x.arch.warps_per_sm) {
    return fmt::format("{} of {} warps, {} holds {} warps per SM", ctas(x.c.ctas_per_sm), per_cta, x.arch.name,
                       x.arch.warps_per_sm);
  }
  if (x.c.ctas_per_sm > x.arch.blocks_per_sm) {
    return fmt::format("{} CTAs per SM, {} holds {}", x.c.ctas_per_sm, x.arch.name, x.arch.blocks_per_sm);
  }
  return "";
}

std::string registers(const Context& x) {
  const int wanted = estimated_registers(x.c), limit = register_limit(x.arch, x.c);
  if (wanted > limit) {
    return fmt::format("needs about {} registers per thread; with {} of {} warps on an SM each has {}", wanted,
                       ctas(x.c.ctas_per_sm), x.t.warps + x.t.producer_warps, limit);
  }
  return "";
}

std::string split(const Context& x) {
  if (x.c.split_k == 1) return "";
  const double tiles =
      token_tiles(x.problem, x.t.tokens) * static_cast<double>(ceil_div(x.problem.rows(x.pass), x.t.n));
  const double slots = static_cast<double>(x.gpu.sms) * x.c.ctas_per_sm;
  if (tiles > slots) {
    return fmt::format("split K {} with {:.0f} tiles for {:.0f} slots: there is no idle SM to give work to",
                       x.c.split_k, tiles, slots);
  }
  return "";
}

struct Rule {
  std::string_view name;
  std::string (*check)(const Context&);
};
// Cheap and structural rules first: a candidate is reported under the first that refuses it.
constexpr Rule kRules[] = {
    {"instructions", copies},
    {"tile shape", tile_shape},
    {"stored weights", stored_weights},
    {"K tile", depth_tile},
    {"scale factors", scale_factors},
    {"shared memory per block", smem_per_block},
    {"shared memory per SM", smem_per_sm},
    {"warps", warps},
    {"registers", registers},
    {"row padding", row_padding},
    {"token tile", token_tile},
    {"pipeline depth", pipeline_depth},
    {"split K", split},
};

}  // namespace

std::optional<Refusal> first_refusal(const Problem& problem, Pass pass, const Gpu& gpu, const Candidate& candidate) {
  const Context context{problem, pass, gpu, arch_of(gpu), candidate, candidate.tile, row_of(candidate.tile)};
  for (const Rule& rule : kRules) {
    std::string reason = rule.check(context);
    if (!reason.empty()) return Refusal{rule.name, std::move(reason)};
  }
  return std::nullopt;
}

int rules_before(std::string_view name) {
  const auto* rule = std::find_if(std::begin(kRules), std::end(kRules), [&](const Rule& r) { return r.name == name; });
  return static_cast<int>(rule - std::begin(kRules));
}

int estimated_registers(const Candidate& c) { return row_of(c.tile).registers(c); }

int register_limit(const Arch& arch, const Candidate& c) { return row_of(c.tile).register_limit(arch, c); }

}  // namespace fourfold::plan::moe
