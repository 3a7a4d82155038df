#include "cuda/backend/sources.h"

#include "base/check.h"
#include "kernels/comm/reduce_args.h"
#include "kernels/gemm/repack_args.h"
#include "kernels/norm/norm_args.h"
#include "kernels/step/rows_args.h"
#include "kernels/step/sample_args.h"

namespace fourfold::cuda {

RowsWay rows_way(int formats, int64_t rows, int64_t columns) {
  constexpr int kBf16 = 1 << static_cast<int>(gemm::Weights::kBf16), kFp8 = 1 << static_cast<int>(gemm::Weights::kFp8);
  const int pieces = norm::norm_pieces(static_cast<int>(columns));
  const int norm = pieces == 1 || pieces == 2 ? pieces : 0;
  // Small ones: one CTA to an SM has all of its weights under way, and leaves room for the kernels around it.
  if (formats == kBf16 && rows <= 1024) return {formats, 8, 1, 4, 1, norm};
  if (formats == kBf16) return {formats, 8, 1, 3, 2, norm};
  if ((formats & kFp8) == 0 && rows >= 32768) return {formats, 4, 2, 3, 2, norm};  // a head
  if (columns >= 4096 && rows <= 4096) return {formats, 8, 1, 4, 1, norm};
  return {formats, 4, 2, (formats & kFp8) != 0 ? 6 : 4, 1, norm};
}

gemm::RowsTile rows_tile(const RowsWay& way, RowsEntry entry) {
  // Two CTAs of an SM do not have room for 16 rows.
  const bool room = entry != kRows16 || way.ctas == 1;
  return {way.formats,
          entry == kRows16 ? 2 : 1,
          way.strip_warps,
          way.teams,
          room ? way.slots : 4,
          room ? way.ctas : 1,
          entry == kRowsNorm ? way.norm_pieces : 0,
          gemm::RowsLast::kNothing};
}

plan::KernelSource rows_source(const RowsWay& way) {
  plan::KernelSource source;
  source.name = fmt::format("rows_{}_w{}x{}_s{}_c{}_n{}", way.formats, way.strip_warps, way.teams, way.slots, way.ctas,
                            way.norm_pieces);
  source.text = "#include \"kernels/gemm/rows.cuh\"\n";
  for (const RowsEntry entry : {kRows8, kRows16, kRowsNorm}) {
    if (entry == kRowsNorm && way.norm_pieces == 0) break;
    const gemm::RowsTile t = rows_tile(way, entry);
    source.entries.push_back(
        {fmt::format("fourfold::gemm::gemm_rows<fourfold::gemm::RowsTileOf<{}, {}, {}, {}, {}, {}, {}, "
                     "static_cast<fourfold::gemm::RowsLast>({})>>",
                     t.formats, t.row_tiles, t.strip_warps, t.teams, t.slots, t.ctas, t.norm_pieces,
                     static_cast<int>(t.last)),
         static_cast<unsigned>(t.threads()), kMostShared});
  }
  return source;
}

WideEntry wide_entry(int formats, int64_t rows, const gemm::Matrix& matrix) {
  // Few items are dealt out evenly; where there are many, x is brought to twice as many weights at once.
  constexpr int kMiddleMost = 256;
  if (rows <= gemm::kMiddleRows && matrix.tiles <= kMiddleMost) return kMiddle;
  return rows > 64 && (formats & gemm::kCells) == 0 ? kWideMany : kWideFew;
}

// As many stages as there is room for, up to 200 kB.
gemm::WideTile wide_tile(int formats, WideEntry entry) {
  gemm::WideTile t = {formats, entry == kWideFew ? 64 : 128, 2};
  while (gemm::wide_map({t.formats, t.tokens, t.stages + 1}).total <= kMostShared) ++t.stages;
  return t;
}

// About 100 kB: two have room on an SM.
gemm::MiddleTile middle_tile(int formats) {
  gemm::MiddleTile t = {formats, 3, 2};
  if (gemm::middle_map({formats, 4, 2}).total <= kMostShared / 2 - kReservedShared) t.stages = 4;
  return t;
}

plan::KernelSource wide_source(int formats) {
  plan::KernelSource source;
  source.name = fmt::format("wide_{}", formats);
  source.text = "#include \"kernels/gemm/middle_sm90.cuh\"\n";
  const gemm::MiddleTile middle = middle_tile(formats);
  source.entries.push_back({fmt::format("fourfold::gemm::gemm_middle<fourfold::gemm::MiddleTileOf<{}, {}, {}>>",
                                        middle.formats, middle.stages, middle.ctas),
                            gemm::kMiddleThreads, static_cast<int64_t>(gemm::middle_map(middle).total), true});
  for (const WideEntry entry : {kWideFew, kWideMany}) {
    if (entry == kWideMany && (formats & gemm::kCells) != 0) continue;
    const gemm::WideTile t = wide_tile(formats, entry);
    source.entries.push_back({fmt::format("fourfold::gemm::gemm_wide<fourfold::gemm::WideTileOf<{}, {}, {}>>",
                                          t.formats, t.tokens, t.stages),
                              gemm::kWideThreads, static_cast<int64_t>(gemm::wide_map(t).total)});
  }
  return source;
}

plan::KernelSource norm_source() {
  return {"norm",
          "#include \"kernels/norm/norm.cuh\"\n",
          {{"fourfold::norm::norm_rows<1>", norm::kRowThreads},
           {"fourfold::norm::norm_rows<2>", norm::kRowThreads},
           {"fourfold::norm::norm_rows<4>", norm::kRowThreads},
           {"fourfold::norm::embed_rows", norm::kEmbedThreads},
           {"fourfold::norm::gather_rows", norm::kEmbedThreads}}};
}

plan::KernelSource reduce_source() {
  return {"reduce",
          "#include \"kernels/comm/reduce.cuh\"\n#include \"kernels/comm/words.cuh\"\n"
          "#include \"kernels/comm/gather.cuh\"\n",
          {{"fourfold::comm::reduce_norm_rows<1>", norm::kRowThreads},
           {"fourfold::comm::reduce_norm_rows<2>", norm::kRowThreads},
           {"fourfold::comm::reduce_norm_rows<4>", norm::kRowThreads},
           {"fourfold::comm::reduce_norm_words<1>", norm::kRowThreads},
           {"fourfold::comm::reduce_norm_words<2>", norm::kRowThreads},
           {"fourfold::comm::reduce_norm_words<4>", norm::kRowThreads},
           {"fourfold::comm::gather_parts", comm::kGatherThreads},
           {"fourfold::comm::peer_copy", comm::kGatherThreads}}};
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
           {"fourfold::step::copy_tables", step::kTablesThreads}}};
}

plan::KernelSource stamp_source() {
  return {"stamp", "#include \"kernels/step/stamp.cuh\"\n", {{"fourfold::step::stamp", 32}}};
}

plan::KernelSource sample_source() {
  return {"sample",
          "#include \"kernels/step/sample.cuh\"\n",
          {{"fourfold::step::sample_prepare", step::kSampleThreads},
           {"fourfold::step::sample_choose", step::kSampleThreads},
           {"fourfold::step::verify_drafts", step::kVerifyThreads}}};
}

attn::DecodeTile attention_tile(int head_dim, int rotary_dim, bool fp8, AttentionEntry entry) {
  // Two CTAs on an SM: one begins while the other is in the middle.
  if (entry == kAttendBatch) return {head_dim, rotary_dim, 1, 2, 2, 1, fp8 ? 6 : 3, fp8, true, 2};
  if (fp8 && entry == kAttendFew) return {head_dim, rotary_dim, 1, 4, 2, 1, 6, true, true, 1};
  if (fp8) return {head_dim, rotary_dim, 4, 1, 2, 2, 4, true, true, 1};
  if (entry == kAttendFew) return {head_dim, rotary_dim, 1, 4, 2, 1, 3, false, true, 1};
  return {head_dim, rotary_dim, 4, 1, 2, 2, 2, false, true, 1};
}

plan::KernelSource attention_source(int head_dim, int rotary_dim, bool fp8) {
  plan::KernelSource source;
  source.name = fmt::format("attention_{}_{}{}", head_dim, rotary_dim, fp8 ? "_fp8" : "");
  source.text = "#include \"kernels/attn/decode.cuh\"\n#include \"kernels/attn/prefill_prepare.cuh\"\n";
  for (const AttentionEntry entry : {kAttendFew, kAttendMany, kAttendBatch}) {
    const attn::DecodeTile t = attention_tile(head_dim, rotary_dim, fp8, entry);
    if (!t.legal())
      fail("attention: heads of {}, {} of them rotate; wanted 64, 128 or 256 and a multiple of 16", head_dim,
           rotary_dim);
    source.entries.push_back(
        {fmt::format(
             "fourfold::attn::attention_decode<fourfold::attn::DecodeTileOf<{}, {}, {}, {}, {}, {}, {}, {}, {}, {}>>",
             t.head_dim, t.rotary_dim, t.row_tiles, t.key_groups, t.parts, t.blocks, t.stages, t.fp8, t.bulk, t.ctas),
         static_cast<unsigned>(t.threads()), static_cast<int64_t>(attn::decode_map(t).total), t.ctas > 1});
  }
  source.entries.push_back({fmt::format("fourfold::attn::attention_combine<{}>", head_dim), attn::kCombineThreads});
  source.entries.push_back(
      {fmt::format("fourfold::attn::attention_prepare<{}, {}, {}>", head_dim, rotary_dim, fp8), attn::kPrepareThreads});
  return source;
}

attn::PrefillTile prefill_tile(int head_dim, int rotary_dim, bool fp8) {
  if (fp8) return {head_dim, rotary_dim, 8, 32, 3, true, false};
  return {head_dim, rotary_dim, 8, 64, 2, false, true};
}

bool has_prefill(int head_dim, int rotary_dim, bool fp8) {
  const attn::PrefillTile t = prefill_tile(head_dim, rotary_dim, fp8);
  return t.legal() && attn::prefill_map(t).total <= kMostShared;
}

plan::KernelSource prefill_source(int head_dim, int rotary_dim, bool fp8) {
  const attn::PrefillTile t = prefill_tile(head_dim, rotary_dim, fp8);
  return {
      fmt::format("prefill_{}_{}{}", head_dim, rotary_dim, fp8 ? "_fp8" : ""),
      fmt::format("#include \"kernels/attn/prefill_{}.cuh\"\n", t.wgmma ? "sm90" : "mma"),
      {{fmt::format("fourfold::attn::attention_prefill_{}<fourfold::attn::PrefillTileOf<{}, {}, {}, {}, {}, {}, {}>>",
                    t.wgmma ? "wgmma" : "mma", t.head_dim, t.rotary_dim, t.warps, t.keys, t.stages, t.fp8, t.wgmma),
        static_cast<unsigned>(t.threads()), static_cast<int64_t>(attn::prefill_map(t).total)}}};
}

gdn::RecurrentTile recurrent_tile(int key_dim, int value_dim, DeltaEntry entry) {
  if (entry == kDeltaOne) return {key_dim, value_dim, 1, 16, 2, false};
  // Two panels a warp, one after the other: reads and writes of a CTA overlap.
  if (entry == kDeltaBatch) return {key_dim, value_dim, 1, 8, 2, false};
  return {key_dim, value_dim, gdn::kRecurrentRows, 16, 1, false};
}

gdn::ChunkTile chunk_tile(int key_dim, int value_dim) { return {key_dim, value_dim, 64, 32, true, true, false}; }

bool has_chunks(int key_dim, int value_dim) {
  const gdn::ChunkTile t = chunk_tile(key_dim, value_dim);
  return t.legal() && gdn::scan_map(t).total <= kMostShared && gdn::prepare_map(t).total <= kMostShared;
}

plan::KernelSource delta_source(int key_dim, int value_dim) {
  plan::KernelSource source;
  source.name = fmt::format("delta_{}_{}", key_dim, value_dim);
  source.text = "#include \"kernels/gdn/recurrent.cuh\"\n";
  for (const DeltaEntry entry : {kDeltaOne, kDeltaFew, kDeltaBatch}) {
    const gdn::RecurrentTile t = recurrent_tile(key_dim, value_dim, entry);
    if (!t.legal()) {
      fail("delta rule: heads of {} keys and {} values; wanted multiples of 16 up to {}", key_dim, value_dim,
           gdn::kMostDim);
    }
    source.entries.push_back(
        {fmt::format("fourfold::gdn::delta_recurrent<fourfold::gdn::RecurrentTileOf<{}, {}, {}, {}, {}, {}>>",
                     t.key_dim, t.value_dim, t.rows, t.warps, t.ctas, t.float32),
         static_cast<unsigned>(t.threads()), static_cast<int64_t>(gdn::recurrent_map(t).total)});
  }
  if (!has_chunks(key_dim, value_dim)) return source;
  source.text += "#include \"kernels/gdn/chunk_scan.cuh\"\n";
  const gdn::ChunkTile t = chunk_tile(key_dim, value_dim);
  const std::string name = fmt::format("fourfold::gdn::ChunkTileOf<{}, {}, {}, {}, {}, {}, {}>", t.key_dim, t.value_dim,
                                       t.chunk, t.columns, t.helpers, t.bulk, t.float32);
  source.entries.push_back({fmt::format("fourfold::gdn::delta_prepare<{}>", name), gdn::kPrepareThreads,
                            static_cast<int64_t>(gdn::prepare_map(t).total)});
  source.entries.push_back({fmt::format("fourfold::gdn::delta_scan<{}>", name), static_cast<unsigned>(t.scan_threads()),
                            static_cast<int64_t>(gdn::scan_map(t).total)});
  source.entries.push_back({fmt::format("fourfold::gdn::delta_scale<{}>", name), gdn::kScaleThreads});
  return source;
}

}  // namespace fourfold::cuda
