// What the operations around the experts cost. Every constant is fitted to kernels measured on one H200 (docs/kernels:
// products, attention, delta; tests/plan/step_test.cpp has the figures). On another card times that bytes decide follow
// its bandwidth, times that instructions decide its SMs x clock, starts its nodes and latency.
#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "base/math.h"
#include "plan/step/step.h"

namespace fourfold::plan::step {
namespace {

struct Rates {
  double bytes;   // per us, streaming reads
  double matrix;  // flops per us, bf16, long loads
  double slower;  // instructions: this card's time over an H200's
  double start;   // a node with a grid that waits for the one before it, us
  bool wgmma;
};

Rates rates_of(const Gpu& gpu) {
  const Gpu& h200 = find_gpu("h200");
  const Arch& arch = arch_of(gpu);
  return {.bytes = reachable_reads(gpu) * 1e6,
          .matrix = reachable_bf16(gpu, arch.wgmma, true) * 1e6,
          .slower = h200.sms * h200.clock_ghz / (gpu.sms * gpu.clock_ghz),
          .start = gpu.graph_node_us + 1.3 * gpu.latency_us / h200.latency_us,
          .wgmma = arch.wgmma};
}

Op finish(Op op, const Rates& r, double us) {
  const double memory = op.bytes / r.bytes, matrix = op.flops / r.matrix;
  op.floor_us = std::max(memory, matrix);
  op.us = std::max(us, op.floor_us);
  op.bound = op.us > 2 * op.floor_us ? "start" : memory > matrix ? "memory" : "matrix";
  return op;
}

}  // namespace

Op product_cost(const Gpu& gpu, std::string name, Format format, int64_t rows, int64_t n, int64_t k, bool norm) {
  const Rates r = rates_of(gpu);
  const double weights = static_cast<double>(n) * static_cast<double>(k), x = static_cast<double>(rows);
  const double weight_bytes = weights * bytes_per_weight(format);
  Op op{.name = std::move(name), .count = 1, .nodes = 1};
  op.bytes = weight_bytes + x * 2 * static_cast<double>(n + k);
  op.flops = 2 * weights * x;
  double us;
  if (rows <= 16) {
    // NVFP4 is bound by instructions at 3.8 TB/s of an H200's 4.55, twice that with two column tiles; each further row
    // costs its way through shared memory and the tiles.
    const double memory = op.bytes / r.bytes;
    const double issue = format == Format::kNvfp4 ? weight_bytes / 3.8e6 * r.slower * (rows > 8 ? 2 : 1) : 0;
    us = r.start + std::max(memory, issue) + (x - 1) * (0.35 + 2.6e-9 * weights) * r.slower;
    if (norm) us += 1.4 * x;
  } else {
    const double reached = r.wgmma ? 0.82 : 0.42;
    us = 10 * r.slower + r.start + std::max(op.bytes / r.bytes, op.flops / (r.matrix * reached));
  }
  return finish(std::move(op), r, us);
}

Op attention_cost(const Gpu& gpu, const Model& model, const Shape& shape, int64_t rows) {
  const Rates r = rates_of(gpu);
  const double kv = static_cast<double>(std::max<int64_t>(1, model.kv_heads / shape.ranks));
  const double heads = static_cast<double>(model.heads) / static_cast<double>(shape.ranks);
  const double d = static_cast<double>(model.head_dim);
  const double element = shape.fp8_cache ? 1 : 2, context = static_cast<double>(shape.context);
  Op op{.name = "attention", .count = 1, .nodes = 2};
  if (shape.prefill) {
    const double tokens = static_cast<double>(rows), pairs = tokens * (context + (tokens + 1) / 2);
    op.flops = 4 * heads * d * pairs;
    op.bytes = 2 * kv * d * element * (context + tokens) + 6 * tokens * heads * d;
    // Long contexts reach 0.97 of the sustained rate, 8k from its beginning 0.85: the diagonal and the ends of blocks.
    const double reached =
        r.wgmma && !shape.fp8_cache ? 0.85 + 0.12 * context / (context + 2 * tokens) : 0.39 * (r.wgmma ? 0.62 : 1);
    const double prepare = 4 + tokens * (heads + 2 * kv) * d * 3.4e-7 * r.slower * 4;
    return finish(std::move(op), r, prepare + op.flops / (r.matrix * reached) + 2 * r.start);
  }
  const double sequences = static_cast<double>(shape.tokens), each = static_cast<double>(rows) / sequences;
  op.flops = 4 * heads * d * static_cast<double>(rows) * context;
  op.bytes = 2 * kv * d * element * context * sequences + 4 * static_cast<double>(rows) * heads * d;
  const double memory = op.bytes / (r.bytes * (shape.fp8_cache ? 0.72 : 1));
  // Two nodes; splits of many sequences do not end together; further rows of a sequence are another row tile each four.
  const double us = 2 * r.start + (shape.fp8_cache ? 6.2 : 4.2) * r.slower +
                    memory * (1 + 0.25 * std::min(1.0, (sequences - 1) / 32)) + 2 * (each - 1) * r.slower;
  return finish(std::move(op), r, us);
}

Op delta_cost(const Gpu& gpu, const Model& model, const Shape& shape, int64_t rows) {
  const Rates r = rates_of(gpu);
  const double heads = static_cast<double>(model.value_heads) / static_cast<double>(shape.ranks);
  const double key = static_cast<double>(model.key_dim), value = static_cast<double>(model.value_dim);
  const double state = 4 * heads * key * value;
  Op op{.name = shape.prefill ? "delta rule, chunks" : "delta rule", .count = 1};
  const double tokens = static_cast<double>(rows);
  if (shape.prefill) {
    op.nodes = 3;
    // Inputs, what the scan takes of them, outputs; products of chunks of 64 with split operands.
    op.bytes = tokens * heads * (2 * 3 * value + 2 * value) + 2 * state;
    op.flops = tokens * heads * (8 * key * value + 4 * 64 * (key + value));
    return finish(std::move(op), r, 8 + tokens * (0.0277 + 0.00207 * heads) * r.slower);
  }
  op.nodes = 1;
  const double sequences = static_cast<double>(shape.tokens), each = tokens / sequences;
  op.bytes = sequences * state * (1 + each) + 8 * tokens * heads * value;
  op.flops = tokens * heads * 6 * key * value;
  // A pass that reads and writes in place reaches 0.83 of plain reads; rows of a sequence follow each other.
  const double memory = op.bytes / (r.bytes * 0.83);
  const double serial = 2 * state / (r.bytes * 0.83) + 2.05 * (each - 1) * r.slower;
  return finish(std::move(op), r, r.start + 1.5 * r.slower + std::max(memory, serial));
}

Op norm_cost(const Gpu& gpu, int64_t rows, int64_t hidden) {
  const Rates r = rates_of(gpu);
  Op op{.name = "norm", .count = 1, .nodes = 1};
  op.bytes = static_cast<double>(rows) * static_cast<double>(hidden) * (4 + 2 + 4 + 2);
  return finish(std::move(op), r, gpu.graph_node_us + 0.85 * r.slower + op.bytes / r.bytes);
}

Op router_cost(const Gpu& gpu, const Model& model, int64_t rows) {
  const Rates r = rates_of(gpu);
  Op op = product_cost(gpu, "router and choice", Format::kBf16, rows, model.experts + 1, model.hidden);
  const double choice = 4.6 * r.slower + 0.002 * static_cast<double>(rows) * r.slower;
  return finish(op, r, op.us + choice);
}

Op all_reduce_cost(const Gpu& gpu, int64_t ranks, Link link, int64_t rows, int64_t hidden) {
  const Rates r = rates_of(gpu);
  const double bytes = 2 * static_cast<double>(rows) * static_cast<double>(hidden), n = static_cast<double>(ranks);
  // One-shot in a graph, published: NVLink 2.6, 2.9, 3.7 us for 8 KB on 2, 4, 8 ranks and 9, 15, 19 for 1 MB; PCIe 5,
  // 15, 28 for 8 KB. Large sums in two shots at the link's rate (NVLink 389 GB/s measured, PCIe 5.0 x16 about 50,
  // through the host half of that).
  double latency, rate;
  switch (link) {
    case Link::kNvlink:
      latency = 2.2 + 0.19 * n, rate = 0.389e6;
      break;
    case Link::kPeer:
      latency = 1.2 + 3.5 * n, rate = 0.05e6;
      break;
    case Link::kHost:
    default:
      latency = 12 + 6 * n, rate = 0.025e6;
      break;
  }
  Op op{.name = "all-reduce, residual, norm", .count = 1, .nodes = 1};
  op.bytes = 3 * bytes;
  const double one_shot = bytes * std::sqrt(n - 1) / (0.42 * rate), two_shot = 2 * bytes * (n - 1) / n / rate;
  Op done = finish(op, r, latency + std::min(one_shot, latency + two_shot));
  done.floor_us = std::min(done.us, two_shot);
  done.bound = done.us > 2 * done.floor_us ? "start" : "link";
  return done;
}

}  // namespace fourfold::plan::step
