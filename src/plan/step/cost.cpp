// What operations cost. Constants are fitted to kernels measured on an H200, by themselves (docs/kernels) and in whole
// steps (docs/cuda.md); docs/plan.md has each with its source. On another card times that bytes decide follow its
// bandwidth, times that instructions decide its SMs x clock, starts its nodes and latency.
#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "base/math.h"
#include "plan/moe/plan.h"
#include "plan/step/step.h"

namespace fourfold::plan::step {
namespace {

struct Rates {
  double bytes;       // per us, streaming reads
  double h200_bytes;  // of the card that was measured
  double matrix;      // flops per us, bf16, long loads
  double slower;      // instructions: this card's time over an H200's
  double node;        // a node that waits for nothing, us
  double start;       // a node with a grid that waits for the one before it and for its first reads
  double sms;
  bool wgmma;
};

Rates rates_of(const Gpu& gpu) {
  const Gpu& h200 = find_gpu("h200");
  const Arch& arch = arch_of(gpu);
  return {.bytes = reachable_reads(gpu) * 1e6,
          .h200_bytes = reachable_reads(h200) * 1e6,
          .matrix = reachable_bf16(gpu, arch.wgmma, true) * 1e6,
          .slower = h200.sms * h200.clock_ghz / (gpu.sms * gpu.clock_ghz),
          .node = gpu.graph_node_us,
          .start = gpu.graph_node_us + 1.3 * gpu.latency_us / h200.latency_us,
          .sms = static_cast<double>(gpu.sms),
          .wgmma = arch.wgmma};
}

double number(int64_t value) { return static_cast<double>(value); }

bool runs(const Work& work, std::string_view kernel) {
  return !work.launches.empty() && work.launches.front().kernel.find(kernel) != std::string::npos;
}

// Of 1 to 16 rows a launch: weights stream, each further row costs a part of that and its own way to every SM; beyond
// eight rows there is a second column tile, for which NVFP4's instructions are twice as many.
double rows_us(const Work& work, const Rates& r) {
  const Extent& e = work.extent;
  const double launches = number(std::max<int64_t>(1, static_cast<int64_t>(work.launches.size())));
  const double rows = std::ceil(number(e.rows) / launches);
  const double weights = number(e.outputs) * number(e.inputs), each = work.bytes / weights;
  // Beside a kernel in a chain of its own kind (1.85 us): its matrix, its tables and its code are others' every time.
  constexpr double kOther = 0.5;
  constexpr double kFurtherRow = 0.05, kFurtherBf16 = 0.015, kSecondTile = 1.06, kFurtherNvfp4 = 0.01;
  constexpr double kNvfp4Rate = 4.13e6;  // bytes per us of an H200's instructions
  constexpr double kRowBytes = 55e3;     // of x to an SM, per us
  const bool codes = each < 1.8, nvfp4 = each < 0.8;
  const bool second = rows > 8;
  const double more =
      (1 + (codes ? kFurtherRow : kFurtherBf16) * (rows - 1)) * (second && codes && !nvfp4 ? kSecondTile : 1) - 1;
  double us = work.bytes / r.bytes + more * work.bytes / r.h200_bytes * r.slower;
  const double instructions = second ? 2 * (1 + kFurtherNvfp4 * (rows - 8)) : 1;
  if (nvfp4) us = std::max(us, instructions * work.bytes / kNvfp4Rate * r.slower);
  us += r.start + 2 * rows * number(e.inputs) / kRowBytes * r.slower * r.sms / 132;
  // A small matrix has all of its weights, and its norm's, on a few SMs before the kernel in front of it has ended.
  const bool small = number(ceil_div(e.outputs, int64_t{16})) * 4 < r.sms;
  us += small ? 0 : kOther;
  if (e.norm_in_front) us += (small ? 0.5 : 1.4) * rows;
  return us * launches;
}

// Of wgmma, up to a few hundred rows a launch: units of 64 columns for each CTA. gemm_middle: 128 rows of weights, two
// CTAs to an SM; where an item's columns are no multiple of what a CTA has, CTAs have pieces of two items.
// gemm_cluster: eight CTAs an item.
double shared_units_us(const Work& work, const Rates& r, bool clusters) {
  const Extent& e = work.extent;
  const bool bf16 = work.bytes > 1.8 * number(e.outputs) * number(e.inputs);
  const double units = std::ceil(number(e.inputs) / 64);
  const double items = number(ceil_div(e.outputs, int64_t{128}) * ceil_div(e.rows, int64_t{64}));
  const double given = number(work.launches.front().ctas);
  const double ctas = clusters ? 8 * items : given > 0 ? given : 2 * r.sms;
  const double each = std::ceil(units * (clusters ? 0.125 : items / ctas));
  constexpr double kOnce = 2.15, kUnit = 0.5, kCta = 0.02, kTwoPieces = 4;
  constexpr double kClusterUnit = 0.55, kClusterUnitBf16 = 0.75, kClusterCta = 0.025;
  if (clusters) return (each * (bf16 ? kClusterUnitBf16 : kClusterUnit) + kClusterCta * ctas) * r.slower;
  const bool even = std::fmod(units, each) == 0;
  return (kOnce + each * kUnit + kCta * ctas + (even ? 0 : kTwoPieces)) * r.slower;
}

// gemm_wide: items of 256 rows and all columns, with 32, 64 or 128 rows of x; what is left behind whole rounds of all
// SMs, or does not fill one, is shared out by columns, at best.
double wide_us(const Work& work, const Rates& r) {
  const Extent& e = work.extent;
  const std::string kernel = work.launches.empty() ? "" : work.launches.front().kernel;
  const size_t tile = kernel.find("WideTileOf<");
  const size_t comma = tile == std::string::npos ? tile : kernel.find(',', tile);
  const auto tile_of = [&](const char* rows, bool otherwise) {
    return comma == std::string::npos ? otherwise : kernel.compare(comma + 2, 3, rows) == 0;
  };
  const bool many = tile_of("128", e.rows > 64), least = tile_of("32,", e.rows <= 32);
  const int64_t tokens = many ? 128 : least ? 32 : 64, blocks = many ? 2 : 1;
  const double units = std::ceil(number(e.inputs) / 64);
  const int64_t items = ceil_div(e.outputs, int64_t{256}) * ceil_div(e.rows, tokens);
  const auto sms = static_cast<int64_t>(r.sms);
  // Cool a unit takes as long as its copies or what a card multiplies at its highest clock; prompts of many rows are
  // at the power limit, where bf16 weights are twice the bytes to every SM. An item's end is its own.
  constexpr double kLeastUnit = 0.4, kFewUnit = 0.5, kManyUnit = 0.67, kTicket = 2, kStored = 1.5, kRead = 0.5;
  constexpr double kFewItem = 1.5, kManyItem = 1;
  constexpr double kCool = 512, kHot = 2048;
  const double reached = work.bytes < 1.8 * number(e.outputs) * number(e.inputs) ? 1.0 : 0.96;
  const double sustained = 2.0 * 256 * 128 * 64 * r.sms / (r.matrix * reached), cool = kManyUnit * r.slower;
  const double hot = std::clamp((number(e.rows) - kCool) / (kHot - kCool), 0.0, 1.0);
  const double unit = many ? cool + hot * std::max(0.0, sustained - cool) : (least ? kLeastUnit : kFewUnit) * r.slower;
  const int64_t left = items % sms;
  double rest = left > 0 ? units * unit : 0;
  const int64_t turns = items < sms ? 2 : 1;  // of CTAs that share columns
  for (int64_t s = 2; left > 0 && s <= 16 && 4 * number(s) <= units && left * s <= turns * sms; ++s) {
    const double sums = (kTicket + number(blocks) * (kStored + kRead * number(s))) * r.slower;
    rest = std::min(rest, (left * s > sms ? 2 : 1) * (std::ceil(units / number(s)) * unit + sums));
  }
  return number(items / sms) * (units * unit + (many ? kManyItem : kFewItem) * r.slower) + rest;
}

double product_us(const Work& work, const Rates& r) {
  const Extent& e = work.extent;
  if (runs(work, "gemm_rows")) return rows_us(work, r);
  const double memory = work.bytes / r.bytes;
  if (const bool clusters = runs(work, "gemm_cluster"); clusters || runs(work, "gemm_middle")) {
    return r.start + std::max(memory, shared_units_us(work, r, clusters));
  }
  if (r.wgmma) {
    // Rings that fill and drain; and what of plain reads it reaches.
    constexpr double kFixed = 4, kFewReads = 0.9, kManyReads = 0.83;
    return r.start + kFixed * r.slower + std::max(memory / (e.rows <= 64 ? kFewReads : kManyReads), wide_us(work, r));
  }
  // Items of 128 x 128, dealt out to the SMs; where they come out uneven the last round is half hidden.
  constexpr double kFixed = 10, kReached = 0.42;
  const double items = number(ceil_div(e.outputs, int64_t{128}) * ceil_div(e.rows, int64_t{128}));
  const double item = 2.0 * 128 * 128 * number(e.inputs) * r.sms / (r.matrix * kReached);
  const double turns = items < r.sms ? items / r.sms : (items / r.sms + std::ceil(items / r.sms)) / 2;
  return r.start + kFixed * r.slower + std::max(memory, item * turns);
}

double attention_us(const Work& work, const Rates& r, double nodes) {
  const Extent& e = work.extent;
  const double d = number(e.head_dim);
  if (e.whole) {
    const double tokens = number(e.rows), context = number(e.context) - tokens;
    // Long contexts reach 0.94 of the sustained rate, 8k from its beginning 0.86 behind the first blocks' start.
    const bool wgmma = r.wgmma && !e.fp8_cache;
    const double reached = wgmma ? 0.86 + 0.08 * context / (context + 2 * tokens) : 0.39 * (r.wgmma ? 0.62 : 1);
    const double prepare = 4 + (wgmma ? 14 : 0) + tokens * number(e.heads + 2 * e.kv_heads) * d * 1.36e-6 * r.slower;
    return prepare + work.flops / (r.matrix * reached) + nodes * r.start;
  }
  // One node, whose splits have at least 64 positions; in steps 6 us where chains take 4.6.
  if (runs(work, "attention_narrow")) {
    const double splits = std::clamp(std::ceil(number(e.context) / 64), 1.0, 64.0);
    constexpr double kSplit = 0.02, kOnce = 2.6, kFp8Once = 2.5;
    return nodes * r.start + ((e.fp8_cache ? kFp8Once : kOnce) + kSplit * splits) * r.slower +
           work.bytes / (r.bytes * (e.fp8_cache ? 0.94 : 0.97));
  }
  const double sequences = number(std::max<int64_t>(e.sequences, 1)), rows = number(e.rows) / sequences;
  const double splits = std::clamp(std::ceil(number(e.context) / 128), 1.0, 64.0);
  const double parts = splits * sequences * number(e.kv_heads);
  const double memory = work.bytes / (r.bytes * (e.fp8_cache ? 0.72 : 0.97));
  const double group = number(e.heads) / number(std::max<int64_t>(e.kv_heads, 1));
  if (rows <= 1 && sequences > 1 && parts > 0.9 * r.sms) {
    // Two CTAs to an SM, up to eight splits of a sequence each (attention_span): a split's end costs by its rows, and
    // so does a CTA's beginning where others have begun and ended before it. What does not stay in L2 is written and
    // read.
    constexpr double kOnce = 4.9, kSplitRow = 0.19, kTurnRow = 0.65, kInL2 = 40e6;
    const double slots = 2 * r.sms;
    double span = 1, ctas = parts;
    while (span < 8 && 2 * span <= splits) {
      const double fewer = sequences * number(e.kv_heads) * std::floor(splits / (2 * span));
      if (fewer < 1.875 * slots && (fewer > slots || fewer < 0.9 * slots)) break;
      span *= 2;
      ctas = fewer;
    }
    const double turns = std::max(0.0, ctas / slots - 1) * std::min(1.0, 2 / span);
    const double partial = parts * group * d * 4;
    return nodes * r.start + memory + (partial > kInL2 ? partial / r.bytes : 0) +
           (kOnce + group * (kSplitRow * parts / slots + kTurnRow * turns)) * r.slower;
  }
  // A CTA has a split of at least 128 positions of one sequence; what it begins and ends with takes as long as copying
  // that many.
  constexpr double kTurn = 5, kSplit = 0.04, kOnce = 2.9, kFp8Once = 3.9;
  // Blocks of 16 rows of a token and its drafts have an SM each, where there are as many.
  const double blocks = std::ceil(rows * group / 16);
  const double row = parts * blocks <= r.sms ? 0.4 : 2;
  return nodes * r.start + (e.fp8_cache ? kFp8Once : kOnce) * r.slower + memory + kSplit * splits * r.slower +
         std::max(0.0, parts / r.sms - 1) * kTurn * r.slower + row * (rows - 1) * r.slower;
}

double delta_us(const Work& work, const Rates& r, double nodes) {
  const Extent& e = work.extent;
  const double tokens = number(e.rows), heads = number(e.heads);
  if (e.whole) {
    if (!r.wgmma) return 8 + tokens * (0.0215 + 0.0016 * heads) * r.slower;
    const double apart = 18.7 + tokens * (0.0300 + 0.000565 * heads) * r.slower;
    // Two CTAs of the scan a head; where they leave half of the SMs, what comes before and behind it runs beside it.
    const bool beside = 4 * heads * number(std::max<int64_t>(e.sequences, 1)) <= r.sms;
    return beside ? std::min(apart, 12 + 0.0394 * tokens * r.slower) : apart;
  }
  // States are read and written in place: from 16 sequences on at 0.81 of plain reads, otherwise a CTA reads all of its
  // state and then writes it. Rows of a sequence follow each other, and write a state each; or put it off, which is a
  // twentieth of it and keeps an SM from the next one for as long as the row takes.
  const double sequences = number(std::max<int64_t>(e.sequences, 1)), each = tokens / sequences;
  const double rate = r.bytes * (sequences >= 16 ? 0.81 : 0.72);
  const double written = 1 + (e.put_off ? 0.05 : 1) * (each - 1);
  double memory = work.bytes * (1 + written) / 2 / rate;
  if (e.put_off) memory += 0.7 * (tokens - sequences) * heads / r.sms * r.slower;
  const double serial = work.bytes / sequences / rate + 0.95 * (each - 1) * r.slower;
  return nodes * r.start + (sequences >= 16 ? 1.5 : 0) * r.slower + std::max(memory, serial);
}

// One shot, every rank sends its part to each other one; or two, to the owners of rows, who send what comes of them.
double reduce_us(const Work& work, const Machine& machine) {
  const double n = number(machine.ranks), bytes = 2 * number(work.extent.rows) * number(work.extent.outputs);
  // NVLink, measured by words on two and four: 2.9 and 3.9 us for 8 KB and 0.26 TB/s of the link's 0.39, in two shots
  // 0.32. PCIe: 5, 15, 28 us published for 8 KB on 2, 4, 8 ranks; a link of 5.0 x16 copies 50 GB/s, through the host
  // half.
  double once = 0, rate = 0;
  switch (machine.link) {
    case Link::kNvlink:
      once = 2.85 + 0.52 * (n - 2), rate = 0.26e6;
      break;
    case Link::kPeer:
      once = 3.6 * n, rate = 0.65 * 0.05e6;
      break;
    case Link::kHost:
      once = 12 + 6 * n, rate = 0.65 * 0.025e6;
      break;
  }
  const double one_shot = once + bytes * (n - 1) / rate;
  if (machine.link == Link::kHost) return one_shot;
  return std::min(one_shot, 1.5 * once + bytes * 2 * (n - 1) / n / (1.23 * rate));
}

double choice_us(const Work& work, const Rates& r, const Machine& machine) {
  const double choice = (0.1 + 0.0015 * number(work.extent.rows)) * r.slower;
  if (work.extent.norm_in_front && machine.ranks > 1) {  // behind a sum over ranks, whose words logits go with
    Work sum = work;
    sum.extent.outputs = work.extent.inputs + 2 * work.extent.outputs;
    return reduce_us(sum, machine) + 1.1 * r.slower + choice;
  }
  return r.start + (work.extent.norm_in_front ? 1.05 : 0) * r.slower + choice;
}

double experts_us(const Work& work, const Machine& machine, double* floor) {
  moe::Problem p = *work.experts;
  // Whole experts: the rank with most picks. Few rows choose fewer experts here; many are as if fewer had come.
  if (work.extent.all_experts > p.experts) {
    const double all = number(p.tokens * p.top_k);
    const double picks = all / number(machine.ranks) * busiest_share(all, machine.ranks);
    if (p.tokens < 8) {
      p.top_k = std::lround(picks / number(p.tokens));
    } else {
      p.tokens = std::lround(picks / number(p.top_k));
    }
    p.top_k = std::clamp<int64_t>(p.top_k, 1, p.experts);
    p.tokens = std::max<int64_t>(p.tokens, 1);
  }
  // The planner's clock falls within a layer; behind others of a long step it has fallen.
  constexpr int64_t kLong = 1024;
  Gpu gpu = machine.gpu;
  if (work.extent.rows >= kLong) {
    gpu.clock_ghz = gpu.sustained_ghz;
    gpu.bf16_tflops = gpu.bf16_sustained_tflops;
  }
  const moe::LayerPlan layer = moe::plan_layer(p, gpu, {.only_implemented = true, .explain = false});
  *floor = layer.floor_us;
  return layer.predicted_us;
}

}  // namespace

Op price(const Work& work, const Machine& machine) {
  const Rates r = rates_of(machine.gpu);
  Op op = {.name = work.name,
           .count = 1,
           .nodes = static_cast<int64_t>(work.launches.size()),
           .bytes = work.bytes,
           .flops = work.flops};
  const double nodes = number(op.nodes), memory = op.bytes / r.bytes, matrix = op.flops / r.matrix;
  op.floor_us = std::max(memory, matrix);
  switch (work.extent.kind) {
    case Kind::kProduct:
      op.us = product_us(work, r);
      if (work.extent.choice_beside) op.us = std::max(op.us, choice_us(work, r, machine));
      if (work.extent.routed > 0) op.us += (0.5 + 0.25 * number(work.extent.rows - 1)) * r.slower;
      break;
    case Kind::kAttention:
      op.us = attention_us(work, r, nodes);
      break;
    case Kind::kDelta:
      op.us = delta_us(work, r, nodes);
      break;
    case Kind::kExperts:
      op.us = experts_us(work, machine, &op.floor_us);
      break;
    case Kind::kNorm:
      op.us = (work.extent.sum_of > 0 ? 0 : r.node + 0.85 * r.slower) + memory / 0.83;
      break;
    case Kind::kChoice:
      op.us = choice_us(work, r, machine);
      break;
    case Kind::kSample:
      op.us = nodes * (r.start + 3.4 * r.slower) + 2 * memory;
      break;
    case Kind::kReduce:
      op.us = reduce_us(work, machine);
      op.bound = "link";
      break;
    case Kind::kGather: {
      Work part = work;
      part.extent.outputs = 2 * work.extent.inputs;  // fp32
      op.us = reduce_us(part, machine) + 2;          // with flags
      op.bound = "link";
      break;
    }
    case Kind::kOther:
      op.us = nodes * (r.node + 0.85 * r.slower) + memory / 0.83;
      break;
  }
  op.us = std::max(op.us, op.floor_us);
  if (op.bound.empty()) op.bound = op.us > 2 * op.floor_us ? "start" : memory > matrix ? "memory" : "matrix";
  return op;
}

}  // namespace fourfold::plan::step
