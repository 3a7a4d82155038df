#include "cuda/backend/sources.h"

#include "base/check.h"
#include "kernels/gemm/repack_args.h"
#include "kernels/norm/norm_args.h"
#include "kernels/step/rows_args.h"

namespace fourfold::cuda {

gemm::RowsTile rows_tile(int formats, int row_tiles, gemm::RowsLast last) {
  return {formats, row_tiles, 8, 1, 4, 1, 0, last};
}

plan::KernelSource rows_source(int formats, gemm::RowsLast last) {
  plan::KernelSource source;
  source.name = fmt::format("rows_{}{}", formats, last == gemm::RowsLast::kRoute ? "_route" : "");
  source.text = "#include \"kernels/gemm/rows.cuh\"\n";
  for (const int row_tiles : {1, 2}) {
    const gemm::RowsTile t = rows_tile(formats, row_tiles, last);
    source.entries.push_back(
        {fmt::format("fourfold::gemm::gemm_rows<fourfold::gemm::RowsTileOf<{}, {}, {}, {}, {}, {}, {}, "
                     "static_cast<fourfold::gemm::RowsLast>({})>>",
                     t.formats, t.row_tiles, t.strip_warps, t.teams, t.slots, t.ctas, t.norm_pieces,
                     static_cast<int>(t.last)),
         static_cast<unsigned>(t.threads()), kMostShared});
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

plan::KernelSource step_source() {
  return {"step_rows",
          "#include \"kernels/step/rows.cuh\"\n#include \"kernels/gemm/repack.cuh\"\n",
          {{"fourfold::step::round_rows", step::kRowsThreads},
           {"fourfold::step::add_rows", step::kRowsThreads},
           {"fourfold::step::gate_rows", step::kRowsThreads},
           {"fourfold::step::add_shared", step::kRowsThreads},
           {"fourfold::gemm::gemm_repack", gemm::kRepackThreads}}};
}

attn::DecodeTile attention_tile(int head_dim, int rotary_dim, AttentionEntry entry) {
  if (entry == kAttendFew) return {head_dim, rotary_dim, 1, 4, 2, 1, 3, false, true, 1};
  return {head_dim, rotary_dim, 4, 1, 2, 2, 2, false, true, 1};
}

plan::KernelSource attention_source(int head_dim, int rotary_dim) {
  plan::KernelSource source;
  source.name = fmt::format("attention_{}_{}", head_dim, rotary_dim);
  source.text = "#include \"kernels/attn/decode.cuh\"\n";
  for (const AttentionEntry entry : {kAttendFew, kAttendMany}) {
    const attn::DecodeTile t = attention_tile(head_dim, rotary_dim, entry);
    if (!t.legal())
      fail("attention: heads of {}, {} of them rotate; wanted 64, 128 or 256 and a multiple of 16", head_dim,
           rotary_dim);
    source.entries.push_back(
        {fmt::format(
             "fourfold::attn::attention_decode<fourfold::attn::DecodeTileOf<{}, {}, {}, {}, {}, {}, {}, {}, {}, {}>>",
             t.head_dim, t.rotary_dim, t.row_tiles, t.key_groups, t.parts, t.blocks, t.stages, t.fp8, t.bulk, t.ctas),
         static_cast<unsigned>(t.threads()), static_cast<int64_t>(attn::decode_map(t).total)});
  }
  source.entries.push_back({fmt::format("fourfold::attn::attention_combine<{}>", head_dim), attn::kCombineThreads});
  return source;
}

gdn::RecurrentTile recurrent_tile(int key_dim, int value_dim, DeltaEntry entry) {
  if (entry == kDeltaOne) return {key_dim, value_dim, 1, 16, 2, false};
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
  for (const DeltaEntry entry : {kDeltaOne, kDeltaFew}) {
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
