// Attention and the delta rule.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/check.h"
#include "base/math.h"
#include "cuda/backend/cuda_backend.h"
#include "cuda/backend/tensors.h"

namespace fourfold::cuda {
namespace {

constexpr int64_t kPartialBytes = 64 << 20;
constexpr int kMostSpan = 8;  // splits of a CTA, about

}  // namespace

const float* CudaBackend::frequencies(float theta, int64_t rotary_dim) {
  cuda::Buffer& buffer = frequencies_[{theta, rotary_dim}];
  if (buffer.bytes() == 0) {
    std::vector<float> values;
    for (int64_t i = 0; i < std::max<int64_t>(rotary_dim / 2, 1); ++i) {
      const float exponent = static_cast<float>(2 * i) / static_cast<float>(std::max<int64_t>(rotary_dim, 1));
      values.push_back(1.0f / static_cast<float>(std::pow(static_cast<double>(theta), static_cast<double>(exponent))));
    }
    buffer = cuda::Buffer(card_->device, values.size() * sizeof(float), "rotation");
    buffer.upload(card_->stream, values);
  }
  return buffer.as<const float>();
}

const std::vector<Kernel>& CudaBackend::attention_kernels(const ops::AttentionParams& params) {
  const std::vector<Kernel>*& found = attention_[{params.head_dim, params.rotary_dim}];
  if (found == nullptr) {
    found = &loaded(attention_source(arch_, static_cast<int>(params.head_dim), static_cast<int>(params.rotary_dim),
                                     options_.fp8_cache));
  }
  return *found;
}

// What is the same for all rows. `first`: of the columns that the shape begins with.
attn::AttentionArgs CudaBackend::attention_args(const ops::AttentionParams& params, const attn::AttentionShape& shape,
                                                const uint16_t* first, int64_t row_stride, const CardKvCache& cache,
                                                int64_t layer) {
  const ops::KvCacheShape& pages = cache.shape();
  FF_ASSERT(layer >= 0 && layer < pages.layers && pages.kv_heads == params.kv_heads &&
            pages.head_dim == params.head_dim);
  attn::AttentionArgs args = {};
  args.shape = shape;
  args.rows = first;
  args.row_stride = row_stride;
  if (reinterpret_cast<uintptr_t>(args.rows) % 16 != 0 || row_stride % 8 != 0) {
    fail("attention: rows of {} elements, wanted a multiple of 8", row_stride);
  }
  args.q_norm = params.q_norm != nullptr ? params.q_norm->data() : nullptr;
  args.k_norm = params.k_norm != nullptr ? params.k_norm->data() : nullptr;
  args.frequencies = frequencies(params.rope_theta, params.rotary_dim);
  args.cache = cache.layer(layer);
  args.cache_scales = ones_.as<const float>();
  args.page_bytes = cache.page_bytes();
  while (int64_t{1} << args.page_shift < pages.page_size) ++args.page_shift;
  args.page_table_stride = tables_.page_stride;
  args.scale = params.scale;
  args.norm_eps = params.norm_eps;
  return args;
}

void CudaBackend::take_places(attn::AttentionArgs& args, int first, int live, int page_row) const {
  args.sequences = device_pointer<const SequenceRows>(tables_.sequences) + first;
  args.live = device_pointer<const int>(tables_.lives) + live;
  args.pages = device_pointer<const int>(tables_.pages) + static_cast<int64_t>(page_row) * tables_.page_stride;
}

// A CTA of the tile for one row has few of a sequence's rows, and more key groups for them: the faster one for a token
// and its drafts as well, where all blocks of their rows have an SM each. Otherwise keys are read once for all rows.
AttentionEntry CudaBackend::attention_entry(const attn::AttentionShape& shape, const StepTables::Round& round,
                                            int splits) const {
  constexpr int kRowsOfBlock = 16, kMostFew = 1 + ops::kMaxDrafts;
  if (round.part || shape.group() > kRowsOfBlock || round.most_rows > kMostFew) return kAttendMany;
  // Of one row each: two smaller CTAs on an SM where one each would hardly have room at once.
  if (round.most_rows == 1) {
    const int64_t ctas = int64_t{splits} * shape.kv_heads * round.places;
    return round.places > 1 && 10 * ctas > 9 * sms_ ? kAttendBatch : kAttendFew;
  }
  const int blocks = ceil_div(round.most_rows * shape.group(), kRowsOfBlock);
  return int64_t{splits} * shape.kv_heads * blocks * round.places <= sms_ ? kAttendFew : kAttendMany;
}

// Few rows of few sequences as one kernel, whose CTAs wait for each other: all of them must have room at once, whatever
// else runs on the card. With several ranks on a card a part of each other one's could. How many parts each group is
// taken in; 0: not so.
int CudaBackend::narrow_parts(const attn::NarrowTile& tile, const attn::AttentionShape& shape,
                              const StepTables::Round& round) const {
  if (ranks_ != nullptr && ranks_->shares_card()) return 0;
  const int parts = attn::narrow_parts(shape, round.most_rows);
  const int ctas = attn::narrow_most_splits(round.longest) * shape.kv_heads * parts * round.places;
  const int each = parts > 1 && attn::narrow_map(tile).total <= shared_of(arch_, 2) ? kMostNarrowCtas : 1;
  return ctas <= each * card_->device.info().sms ? parts : 0;
}

// Splits that a CTA has one after the other, without a beginning and an end for each: the fewest with which all CTAs
// have room at once; where not even the most are enough for that, as long as there are about two CTAs for every place
// on the card, because with fewer a late one is waited for. Results do not depend on it.
int CudaBackend::attention_span(const attn::DecodeTile& tile, const attn::AttentionShape& shape,
                                const attn::AttentionArgs& args, int longest, int places) const {
  const int most = attn::most_span(tile, longest);
  const int slots = card_->device.info().sms * tile.ctas;
  const auto has = [&](int span) {
    return span <= kMostSpan && ceil_div(args.splits, attn::span_ctas(args.splits, span)) <= most;
  };
  const auto ctas = [&](int span) {
    const attn::DecodeLaunch l = attn::decode_launch(tile, shape, args.splits, args.most_rows, places, span);
    return static_cast<int>(l.grid_x * l.grid_y * l.grid_z);
  };
  for (int span = 1; has(span); span *= 2) {
    if (ctas(span) <= slots) return span;
  }
  int span = 1;
  while (has(2 * span) && ctas(2 * span) >= 2 * slots - slots / 8) span *= 2;
  return span;
}

void CudaBackend::attention(const ops::AttentionParams& params, const ops::Tensor& q, const ops::Tensor& k,
                            const ops::Tensor& v, ops::KvCache& kv_cache, int64_t layer, const ops::Tensor& out) {
  if (replaying()) return;
  FF_ASSERT(follows(q, k) && follows(k, v) && out.rows == q.rows && out.cols == params.heads * params.head_dim);
  FF_ASSERT(q.cols == params.heads * params.head_dim * (params.gated ? 2 : 1));
  const int head_dim = static_cast<int>(params.head_dim), rotary_dim = static_cast<int>(params.rotary_dim);
  const std::vector<Kernel>& kernels = attention_kernels(params);
  const attn::AttentionShape shape = {static_cast<int>(params.heads), static_cast<int>(params.kv_heads), head_dim,
                                      params.gated};
  const auto whole_tile = prefill_tile(arch_, head_dim, rotary_dim, options_.fp8_cache);
  const bool whole = options_.wide && whole_tile;
  const std::vector<Kernel>*& many = prefill_[{params.head_dim, params.rotary_dim}];
  if (whole && many == nullptr) many = &loaded(prefill_source(arch_, head_dim, rotary_dim, options_.fp8_cache));
  frequencies(params.rope_theta, params.rotary_dim);
  const auto partial_bytes = [&](int splits, int rows) { return 4 * attn::partial_floats(shape, splits, rows, 1); };
  const auto reserve_partial = [&](int64_t bytes) {
    scratch(partial_, bytes, "parts of attention");
    scratch(partial_sums_, bytes / head_dim * 2, "parts of attention");
  };
  if (planning_) {
    const int splits = attn::most_splits(static_cast<int>(limits_.context));
    reserve_partial(std::max(kPartialBytes, static_cast<int64_t>(partial_bytes(splits, attn::kMostRows))));
    if (whole) {
      scratch(queries_, attn::query_bytes(shape, static_cast<int>(rows_of(k)), static_cast<int>(limits_.sequences)),
              "queries");
      const int64_t block_rows = whole_tile->rows();
      const int64_t blocks = limits_.rows * shape.group() / block_rows + limits_.sequences + 1;
      block_uploads_.prepare(static_cast<uint64_t>(blocks) * sizeof(attn::RowBlock));
    }
    return;
  }
  if (left_out("attention",
               [&] {
                 ops::Cost cost;
                 const auto add = [&](int64_t rows, int64_t before, int64_t times) {
                   const ops::Cost one = ops::attention_cost(rows, before, params.heads, params.kv_heads,
                                                             params.head_dim, kv_element_bytes());
                   cost += {one.bytes * static_cast<double>(times), one.flops * static_cast<double>(times)};
                 };
                 for (const StepTables::Round& round : tables_.rounds) {
                   if (!round.part) add(round.most_rows, round.reached - round.most_rows, round.places);
                 }
                 for (const SequenceRows& s : tables_.long_sequences()) add(s.count, s.position, 1);
                 return cost;
               },
               {.kind = plan::step::Kind::kAttention,
                .rows = tables_.rows,
                .sequences = tables_.sequence_count,
                .context = tables_.reached(),
                .heads = params.heads,
                .kv_heads = params.kv_heads,
                .head_dim = params.head_dim,
                .whole = whole && tables_.whole.places > 0,
                .fp8_cache = options_.fp8_cache})) {
    return;
  }
  attn::AttentionArgs args = attention_args(params, shape, static_cast<const uint16_t*>(q.data), q.stride,
                                            static_cast<const CardKvCache&>(kv_cache), layer);
  args.out = bf16_out(out);
  args.out_stride = out.stride;
  const auto narrow = narrow_tile(arch_, head_dim, rotary_dim, options_.fp8_cache);
  for (const StepTables::Round& round : tables_.rounds) {
    if (round.part && whole) continue;
    args.most_rows = round.most_rows;
    if (const int parts = narrow ? narrow_parts(*narrow, shape, round) : 0; parts > 0) {
      args.parts = parts;
      args.splits = attn::narrow_most_splits(round.longest);
      args.settled = overlap_ == Overlap::kProgrammatic && !round.follows ? 1 : 0;
      FF_ASSERT(static_cast<uint64_t>(attn::narrow_words(shape, args.splits, args.most_rows, round.places)) * 4 <=
                narrow_words_.bytes());
      args.words = narrow_words_.as<unsigned>();
      take_places(args, round.first, round.live, round.page_row);
      const attn::DecodeLaunch l =
          attn::narrow_launch(*narrow, shape, parts, args.splits, round.most_rows, round.places);
      Kernel kernel = kernels[kAttendNarrow];
      kernel.smem_bytes = l.shared_bytes;
      launch(card_->stream, kernel, {l.grid_x, l.grid_y, l.grid_z}, overlap_, args);
      continue;
    }
    args.splits = attn::most_splits(round.longest);
    args.settled = overlap_ == Overlap::kProgrammatic && !round.follows ? 1 : 0;
    const int64_t each = partial_bytes(args.splits, args.most_rows);
    const int64_t budget = std::max({kPartialBytes, each});
    reserve_partial(std::min<int64_t>(each * round.places, budget));
    args.partial = partial_.as<float>();
    args.partial_sums = partial_sums_.as<float>();
    const AttentionEntry entry = attention_entry(shape, round, args.splits);
    const attn::DecodeTile tile = attention_tile(arch_, head_dim, rotary_dim, options_.fp8_cache, entry);
    const int at_once = static_cast<int>(std::clamp<int64_t>(budget / each, 1, 65535));
    for (int begin = 0; begin < round.places; begin += at_once) {
      const int places = std::min(at_once, round.places - begin);
      take_places(args, round.first + begin, round.live, round.page_row + begin);
      args.span = entry == kAttendBatch ? attention_span(tile, shape, args, round.longest, places) : 1;
      const attn::DecodeLaunch decode =
          attn::decode_launch(tile, shape, args.splits, args.most_rows, places, args.span);
      launch(card_->stream, kernels[entry], {decode.grid_x, decode.grid_y, decode.grid_z}, overlap_, args);
      const bool by_warps = shape.heads * args.most_rows * places >= kCombineCtas * card_->device.info().sms;
      const attn::DecodeLaunch combine = by_warps ? attn::combine_many_launch(shape, args.most_rows, places)
                                                  : attn::combine_launch(shape, args.most_rows, places);
      launch(card_->stream, kernels[by_warps ? kAttendCombineMany : kAttendCombine],
             {combine.grid_x, combine.grid_y, combine.grid_z}, overlap_, args);
    }
  }
  if (whole && tables_.whole.places > 0) attend_whole(args, params);
  clear_padding(out);
}

void CudaBackend::append_keys(const ops::AttentionParams& params, const ops::Tensor& k, const ops::Tensor& v,
                              ops::KvCache& cache, int64_t layer) {
  if (replaying()) return;
  FF_ASSERT(follows(k, v));
  const Kernel& kernel = attention_kernels(params)[kAttendPrepare];
  frequencies(params.rope_theta, params.rotary_dim);
  if (planning_) return;
  // A row without queries.
  const attn::AttentionShape shape = {0, static_cast<int>(params.kv_heads), static_cast<int>(params.head_dim), false};
  note_work("keys and values appended", 8.0 * static_cast<double>(k.rows * k.cols));
  attn::PrefillArgs args = {};
  args.attention = attention_args(params, shape, static_cast<const uint16_t*>(k.data), k.stride,
                                  static_cast<const CardKvCache&>(cache), layer);
  args.attention.settled = overlap_ == Overlap::kProgrammatic ? 1 : 0;
  const auto append = [&](int first, int live, int page_row, int most_rows, int places) {
    take_places(args.attention, first, live, page_row);
    const attn::PrefillLaunch l = attn::prefill_prepare_launch(most_rows, places);
    launch(card_->stream, kernel, {l.grid_x, l.grid_y}, overlap_, args);
  };
  for (const StepTables::Round& round : tables_.rounds) {
    if (!round.part) append(round.first, round.live, round.page_row, round.most_rows, round.places);
  }
  const StepTables::Whole& whole = tables_.whole;
  if (whole.places > 0) append(whole.first, whole.live, whole.page_row, whole.most_rows, whole.places);
}

void CudaBackend::attend_whole(const attn::AttentionArgs& shared, const ops::AttentionParams& params) {
  const int head_dim = static_cast<int>(params.head_dim), rotary_dim = static_cast<int>(params.rotary_dim);
  const std::vector<Kernel>& kernels = *prefill_.at({params.head_dim, params.rotary_dim});
  const attn::PrefillTile tile = prefill_tile(arch_, head_dim, rotary_dim, options_.fp8_cache).value();
  const StepTables::Whole& whole = tables_.whole;
  const int group = shared.shape.group();
  if (block_group_ != group) {
    const std::vector<attn::RowBlock> blocks = tables_.blocks(tile.rows(), group);
    const uint64_t bytes = blocks.size() * sizeof(blocks[0]);
    std::memcpy(block_uploads_.prepare(bytes), blocks.data(), bytes);
    copies_.add(block_uploads_.take(bytes));
    send_tables();
    blocks_ = block_uploads_.place();
    block_count_ = static_cast<int>(blocks.size());
    block_group_ = group;
  }
  attn::PrefillArgs args = {};
  args.attention = shared;
  take_places(args.attention, whole.first, whole.live, whole.page_row);
  args.attention.settled = overlap_ == Overlap::kProgrammatic ? 1 : 0;
  args.blocks = device_pointer<const attn::RowBlock>(blocks_);
  args.block_count = block_count_;
  const auto rows = static_cast<int>(tables_.rows);
  args.queries =
      device_pointer<uint16_t>(scratch(queries_, attn::query_bytes(shared.shape, rows, whole.places), "queries"));
  args.query_rows = attn::query_rows(rows, whole.places, group);
  const attn::PrefillLaunch prepare = attn::prefill_prepare_launch(whole.most_rows, whole.places);
  launch(card_->stream, attention_kernels(params)[kAttendPrepare], {prepare.grid_x, prepare.grid_y}, overlap_, args);
  const attn::PrefillLaunch attend = attn::prefill_launch(tile, shared.shape, block_count_, card_->device.info().sms);
  launch(card_->stream, kernels[kPrefill], {attend.grid_x, attend.grid_y}, overlap_, args);
}

const std::vector<Kernel>& CudaBackend::updates_kernels(int64_t key_dim, int64_t value_dim) {
  const std::vector<Kernel>*& found = updates_[{key_dim, value_dim}];
  if (found == nullptr) {
    found = &loaded(updates_source(arch_, static_cast<int>(key_dim), static_cast<int>(value_dim)).value());
  }
  return *found;
}

// Ahead of all that is launched from here on, and behind all that was.
void CudaBackend::make_states(const CardStateCache& states, std::span<const cpu::PutOffState> made) {
  const ops::StateCacheShape& shape = states.shape();
  const gdn::DeltaShape delta = delta_shape(shape);
  const Kernel& kernel = updates_kernels(shape.key_dim, shape.value_dim)[kDeltaMakeStates];
  for (size_t first = 0; first < made.size(); first += gdn::kMostMadeStates) {
    const auto some = made.subspan(first, std::min<size_t>(made.size() - first, gdn::kMostMadeStates));
    gdn::MakeStatesArgs args = {};
    args.states = states.states(0);
    args.state_stride = states.state_stride();
    args.layer_stride = delta.state_floats();
    for (size_t i = 0; i < some.size(); ++i) {
      args.made[i] = {some[i].slot, some[i].updates.base, some[i].updates.from, some[i].updates.count};
    }
    const gdn::MakeStatesLaunch l =
        gdn::make_states_launch(delta, static_cast<int>(shape.layers), static_cast<int>(some.size()));
    launch(card_->stream, kernel, {l.grid_x, l.grid_y, l.grid_z}, Overlap::kNone, args);
  }
  card_->stream.end_overlap();
}

void CudaBackend::delta_net(const ops::DeltaNetParams& params, const ops::Tensor& qkv, const ops::Tensor& z,
                            const ops::Tensor& b, const ops::Tensor& a, ops::StateCache& states, int64_t layer,
                            const ops::Tensor& out) {
  if (replaying()) return;
  FF_ASSERT(follows(qkv, z) && follows(z, b) && follows(b, a) && out.rows == qkv.rows);
  const int key_dim = static_cast<int>(params.key_dim), value_dim = static_cast<int>(params.value_dim);
  const std::vector<Kernel>*& found = delta_[{params.key_dim, params.value_dim}];
  if (found == nullptr) found = &loaded(delta_source(arch_, key_dim, value_dim));
  const bool updates = (planning_ ? drafts_ : tables_.put_off) && put_off_rows() > 0;
  const std::vector<Kernel>& recurrent = updates ? updates_kernels(params.key_dim, params.value_dim) : *found;
  auto& cache = static_cast<CardStateCache&>(states);
  const gdn::DeltaShape shape = delta_shape(cache.shape());
  FF_ASSERT(layer >= 0 && layer < cache.shape().layers && shape.key_dim == key_dim && shape.value_dim == value_dim &&
            shape.key_heads == params.key_heads && shape.value_heads == params.value_heads &&
            params.conv_taps == gdn::kTaps && qkv.cols == shape.channels() && z.cols == out.cols);
  const std::optional<gdn::ChunkTile> tile = chunk_tile(arch_, key_dim, value_dim);
  const auto reserve_chunks = [&](int64_t chunks, int64_t rows) {
    const gdn::ChunkSpace space = gdn::chunk_space(*tile, shape, static_cast<int>(chunks), static_cast<int>(rows));
    scratch(chunk_space_, space.total, "chunks of the delta rule");
    scratch(chunk_flags_, gdn::chunk_flags(*tile, shape, static_cast<int>(chunks)) * 4, "flags of the delta rule");
    return space;
  };
  if (planning_) {
    if (tile) {
      reserve_chunks(limits_.rows / tile->chunk + std::max<int64_t>(limits_.rows / kMostRows, 1), limits_.rows);
    }
    return;
  }
  if (left_out("delta rule",
               [&] {
                 const ops::Cost one = ops::delta_net_cost(1, params.value_heads, params.key_dim, params.value_dim);
                 const auto sequences = static_cast<double>(tables_.sequence_count);
                 return ops::Cost{one.bytes * sequences, one.flops * static_cast<double>(out.rows)};
               },
               {.kind = plan::step::Kind::kDelta,
                .rows = tables_.rows,
                .sequences = tables_.sequence_count,
                .heads = params.value_heads,
                .whole = tables_.whole.chunks > 0,
                .put_off = tables_.put_off})) {
    return;
  }
  gdn::DeltaArgs args = {};
  args.shape = shape;
  args.rows = qkv.data;
  args.states = cache.states(layer);
  args.history = cache.history(layer);
  args.conv = params.conv->data();
  args.a_log = params.a_log->data();
  args.dt_bias = params.dt_bias->data();
  args.norm = params.norm->data();
  args.out = bf16_out(out);
  args.row_stride = qkv.stride;
  args.out_stride = out.stride;
  args.state_stride = cache.state_stride();
  args.history_stride = cache.history_stride();
  args.norm_eps = params.norm_eps;
  if (!aligned(qkv)) fail("delta rule: rows of {} elements, wanted a multiple of 8", qkv.stride);
  const auto* sequences = device_pointer<const SequenceRows>(tables_.sequences);
  const auto* lives = device_pointer<const int>(tables_.lives);
  const int early = overlap_ == Overlap::kProgrammatic ? 1 : 0;
  // As many CTAs for a head as all have an SM each.
  const auto few_rows = [&](int places, int most_rows) {
    const int sms = card_->device.info().sms;
    for (const DeltaEntry entry : {kDeltaSplit4, kDeltaSplit2}) {
      const gdn::RecurrentTile few = recurrent_tile(arch_, key_dim, value_dim, entry, updates);
      if (few.split > 1 && most_rows <= few.rows && params.value_heads * few.split * places <= sms) return entry;
    }
    // Smaller CTAs, where there are more than SMs: their reads and writes overlap.
    const bool many = updates && most_rows <= 1 + gdn::kMostUpdates && params.value_heads * places > sms;
    return many ? kDeltaVerify : kDeltaFew;
  };
  for (const StepTables::Round& round : tables_.rounds) {
    if (round.part && tables_.whole.chunks > 0) continue;
    const DeltaEntry entry = round.most_rows > 1 || round.part ? few_rows(round.places, round.most_rows)
                             : round.places >= kManySequences  ? kDeltaBatch
                                                               : kDeltaOne;
    args.sequences = sequences + round.first;
    args.live = lives + round.live;
    args.updates = device_pointer<const StateUpdates>(tables_.updates) + round.first;
    args.state_out = device_pointer<const int>(tables_.state_out) + int64_t{round.first} * kMostRows;
    args.state_out_stride = kMostRows;
    args.settled = round.follows ? 0 : early;
    const gdn::RecurrentLaunch l =
        gdn::recurrent_launch(recurrent_tile(arch_, key_dim, value_dim, entry, updates), shape, round.places);
    launch(card_->stream, recurrent[entry], {l.grid_x, l.grid_y}, overlap_, args);
  }
  if (const StepTables::Whole& c = tables_.whole; c.chunks > 0) {
    gdn::ChunkArgs chunks = {};
    chunks.delta = args;
    chunks.delta.sequences = sequences + c.first;
    chunks.delta.live = lives + c.live;
    chunks.delta.state_out = device_pointer<const int>(tables_.chunk_state_out);
    chunks.delta.state_out_stride = 1;
    chunks.delta.settled = early;
    chunks.chunks = device_pointer<const gdn::ChunkPlace>(tables_.chunk_places);
    chunks.first_chunk = device_pointer<const int>(tables_.first_chunk);
    chunks.at = reserve_chunks(c.chunks, tables_.rows);
    chunks.space = chunk_space_.as<uint8_t>();
    chunks.count = c.chunks;
    const int sms = early == 1 ? card_->device.info().sms : 0;
    chunks.kept = gdn::beside_sms(*tile, shape, c.chunks, c.places, c.most_rows, sms);
    chunks.flags = chunks.kept > 0 ? chunk_flags_.as<int>() : nullptr;
    const auto run = [&](DeltaEntry entry, const gdn::ChunkLaunch& l) {
      launch(card_->stream, (*found)[entry], {l.grid_x, l.grid_y}, overlap_, chunks);
    };
    if (chunks.kept > 0) {
      run(kDeltaBeside, gdn::beside_launch(*tile, sms));
    } else {
      run(kDeltaPrepare, gdn::prepare_launch(*tile, shape, c.chunks));
    }
    run(kDeltaScan, gdn::scan_launch(*tile, shape, c.places));
    run(kDeltaScale, gdn::scale_launch(*tile, shape, c.chunks));
  }
  clear_padding(out);
}

}  // namespace fourfold::cuda
