#include "cuda/backend/plain_experts.h"

#include <algorithm>

#include "base/check.h"
#include "base/math.h"
#include "cuda/backend/sources.h"
#include "kernels/gemm/repack_args.h"

namespace fourfold::cuda {
namespace {

constexpr int64_t kFewTokens = 16;  // of a block

void check_same(const ops::MatrixSource& m, const ops::MatrixSource& first) {
  if (m.format == first.format && m.rows == first.rows && m.columns == first.columns &&
      m.scale_rows == first.scale_rows && m.scale_columns == first.scale_columns) {
    return;
  }
  fail("{}: {} x {} of {}, wanted {} x {} of {} as the first expert has", m.name, m.rows, m.columns,
       ops::format_name(m.format), first.rows, first.columns, ops::format_name(first.format));
}

// What kernels take for it: the width of experts, rows of gate and up and columns of down, in whole blocks of 16. What
// is beyond the matrix is repacked as zeros, with factors of zero.
ops::MatrixSource padded(const ops::MatrixSource& m, bool columns) {
  ops::MatrixSource all = m;
  (columns ? all.columns : all.rows) = round_up(columns ? m.columns : m.rows, int64_t{gemm::kBlockK});
  if (m.scale_columns >= m.columns) all.scale_columns = std::max(m.scale_columns, all.columns);
  return all;
}

}  // namespace

bool all_nvfp4(const ops::ExpertSource& expert) {
  return expert.gate.format == ops::Format::kNvfp4 && expert.up.format == ops::Format::kNvfp4 &&
         expert.down.format == ops::Format::kNvfp4;
}

gemm::ExpertsArgs PlainExperts::Side::args() const {
  const gemm::Matrix matrix = layout.at(weights.as<uint8_t>());
  gemm::ExpertsArgs args = {};
  args.part = matrix.parts[0];
  args.expert_bytes = expert_bytes;
  args.tiles = matrix.tiles;
  args.units = matrix.units;
  args.columns = matrix.columns;
  return args;
}

PlainExperts::PlainExperts(std::shared_ptr<Card> card, int64_t count,
                           const std::function<ops::ExpertSource(int64_t)>& source,
                           const std::function<void(int64_t)>& done)
    : card_(std::move(card)), count_(count) {
  FF_ASSERT(count > 0);
  if (count > moe::kMaxExperts) fail("experts: {}, wanted at most {}", count, moe::kMaxExperts);
  ops::ExpertSource first;
  for (int64_t i = 0; i < count; ++i) {
    const ops::ExpertSource expert = source(i);
    if (i == 0) {
      first = expert;
      if (expert.down.rows != expert.gate.columns || expert.down.columns != expert.gate.rows) {
        fail("{}: {} x {}, wanted {} x {}", expert.down.name, expert.down.rows, expert.down.columns,
             expert.gate.columns, expert.gate.rows);
      }
      bytes_per_expert_ = expert.gate.bytes() + expert.up.bytes() + expert.down.bytes();
    }
    check_same(expert.gate, first.gate);
    check_same(expert.up, first.gate);
    check_same(expert.down, first.down);
    const auto put = [&](Side& side, const ops::MatrixSource& a, const ops::MatrixSource& b, bool paired) {
      const ops::MatrixSource all = padded(a, !paired);
      const PackedMatrix packed = paired ? place_pair(all, padded(b, false)) : place_stack(std::span(&all, 1));
      if (i == 0) {
        side.formats = packed.formats();
        side.expert_bytes = packed.size;
        const MemoryScope scope(card_->device, a.format == ops::Format::kFp8     ? MemoryKind::kWeightsFp8
                                               : a.format == ops::Format::kNvfp4 ? MemoryKind::kWeightsNvfp4
                                                                                 : MemoryKind::kWeightsBf16);
        side.weights = cuda::Buffer(card_->device,
                                    checked_mul(side.expert_bytes, static_cast<uint64_t>(count), "weights of experts"),
                                    "weights of experts");
      }
      const PackedMatrix::Part part = packed.parts[0];
      if (i == 0) side.layout = packed;
      if (card_->device.only_counts()) return;
      const uint64_t at = side.expert_bytes * static_cast<uint64_t>(i);
      // Factors and cells, behind the units.
      const auto factors = std::make_shared<const std::vector<uint8_t>>(paired ? pair_factors(packed, a, b)
                                                                               : stack_factors(packed, part, a));
      feed_bytes(*card_, factors->data(), factors->size(), factors, side.weights.address() + at + part.factors);
      const ops::MatrixSource both[] = {a, b};
      feed_part(*card_, std::span(both, paired ? 2 : 1), part, gemm::units_of(static_cast<int>(packed.columns)),
                side.weights.as<uint8_t>() + at + part.weights);
    };
    put(gate_up_, expert.gate, expert.up, true);
    put(down_, expert.down, expert.down, false);
    done(i);
  }
  load_routing(*card_);
}

gemm::DenseTile plain_tile(const plan::Arch& arch, int formats, bool few) {
  if (!few) return dense_tile(arch, formats, kWideFew);
  gemm::DenseTile t = {formats, static_cast<int>(kFewTokens), 8, 4, 2};
  while (t.stages > 2 && gemm::dense_map(t).total > shared_of(arch, t.ctas)) --t.stages;
  return t;
}

plan::KernelSource plain_source(const plan::Arch& arch, int gate_up_formats, int down_formats) {
  plan::KernelSource source;
  source.name = fmt::format("experts_{}_{}", gate_up_formats, down_formats);
  source.text = "#include \"kernels/gemm/experts.cuh\"\n";
  for (const bool gate_up : {true, false}) {
    for (const bool few : {true, false}) {
      const gemm::DenseTile t = plain_tile(arch, gate_up ? gate_up_formats : down_formats, few);
      source.entries.push_back(
          {fmt::format("fourfold::gemm::gemm_experts<fourfold::gemm::DenseTileOf<{}, {}, {}, {}, {}>, {}>", t.formats,
                       t.tokens, t.row_warps, t.stages, t.ctas, gate_up),
           gemm::kDenseThreads, static_cast<int64_t>(gemm::dense_map(t).total)});
    }
  }
  return source;
}

PlainTables plain_tables(int64_t tokens, int64_t top_k, int64_t experts) {
  const int64_t picks = tokens * top_k;
  PlainTables t = {};
  t.slots = moe::max_slots(picks, static_cast<int>(experts));
  const auto blocks =
      static_cast<uint64_t>(moe::max_blocks(picks, static_cast<int>(experts), static_cast<int>(kFewTokens)));
  uint64_t at = 0;
  const auto take = [&at](uint64_t bytes) {
    const uint64_t here = at;
    at += (bytes + 15) / 16 * 16;
    return here;
  };
  t.totals = take((moe::kMaxExperts + 1) * sizeof(int));  // zeros before and after: at the same place for all tokens
  t.counts = take(2 * sizeof(int));
  t.finished = take(moe::kMostSums * sizeof(int));
  t.blocks = take(blocks * sizeof(moe::Block));
  t.stored = take(blocks * sizeof(int));
  t.slot_token = take((static_cast<uint64_t>(t.slots) + moe::kSlotsBeyond) * sizeof(int));
  t.pick_slot = take(static_cast<uint64_t>(picks) * sizeof(int));
  t.bytes = at;
  return t;
}

void run_plain(const PlainCall& call, const uint16_t* x, int64_t x_stride, const int* ids, const float* weights,
               int64_t tokens, int64_t top_k, uint16_t* out) {
  FF_ASSERT(tokens >= 1 && tokens <= kMostPlainTokens);
  const PlainExperts& experts = call.experts;
  const PlainTables at = plain_tables(tokens, top_k, experts.count());
  const auto table = [&]<typename T>(uint64_t offset, T*) { return device_pointer<T>(call.tables + offset); };
  moe::RouteTable route = {};
  route.counts = table(at.counts, static_cast<int*>(nullptr));
  route.blocks = table(at.blocks, static_cast<moe::Block*>(nullptr));
  route.slot_token = table(at.slot_token, static_cast<int*>(nullptr));
  route.pick_slot = table(at.pick_slot, static_cast<int*>(nullptr));
  route.totals = table(at.totals, static_cast<int*>(nullptr));
  route.stored = table(at.stored, static_cast<int*>(nullptr));
  route.finished = table(at.finished, static_cast<int*>(nullptr));
  const int64_t picks = tokens * top_k;
  const bool few = picks <= kFewTokens / 2 * experts.count();
  const moe::Routing routing = {ids, weights, static_cast<int>(tokens), static_cast<int>(top_k),
                                static_cast<int>(experts.count())};
  const int block = plain_tile(call.arch, experts.gate_up().formats, few).tokens;
  FF_ASSERT(block == plain_tile(call.arch, experts.down().formats, few).tokens);
  if (picks <= moe::kRouteOnePass) {
    launch(call.stream, call.routing.route, {1}, call.overlap, routing, route, block);
  } else {
    const auto ctas = static_cast<unsigned>(ceil_div(picks, moe::kRouteManyPicks));
    launch(call.stream, call.routing.route_count, {ctas}, call.overlap, routing, route, block);
    launch(call.stream, call.routing.route_scatter, {ctas}, call.overlap, routing, route);
  }
  const auto product = [&](const PlainExperts::Side& side, PlainEntry entry, const uint16_t* from, int64_t stride,
                           DeviceAddress to, int64_t to_stride) {
    gemm::ExpertsArgs args = side.args();
    args.x = from;
    args.x_stride = stride;
    args.out = device_pointer<void>(to);
    args.out_stride = to_stride;
    args.route = route;
    const int groups = gemm::experts_groups(args.tiles);
    const int most = moe::max_blocks(picks, static_cast<int>(experts.count()), block);
    const int shares = std::clamp(4 * call.sms / groups, 1, most);
    launch(call.stream, call.kernels[entry], {static_cast<unsigned>(groups), static_cast<unsigned>(shares)},
           call.overlap, args);
  };
  const int64_t width = experts.intermediate(), hidden = experts.hidden();
  product(experts.gate_up(), few ? kPlainGateUpFew : kPlainGateUpMany, x, x_stride, call.hidden, width);
  product(experts.down(), few ? kPlainDownFew : kPlainDownMany, device_pointer<const uint16_t>(call.hidden), width,
          call.partial, hidden);
  const Grid sums = {static_cast<unsigned>(ceil_div(hidden, moe::kCombineColumns)), static_cast<unsigned>(tokens)};
  launch(call.stream, call.routing.combine, sums, call.overlap, device_pointer<const float>(call.partial),
         static_cast<long long>(hidden), static_cast<const int*>(route.pick_slot), weights, static_cast<int>(top_k),
         static_cast<int>(hidden), out, static_cast<long long>(hidden), 0);
}

}  // namespace fourfold::cuda
