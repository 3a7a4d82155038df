#include "plan/step/step.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "base/check.h"
#include "base/math.h"
#include "plan/moe/plan.h"

namespace fourfold::plan::step {
namespace {
using Json = nlohmann::ordered_json;

constexpr Format kFp4 = Format::kNvfp4, kFp8 = Format::kFp8, kBf16 = Format::kBf16;
constexpr std::array<Mix, 3> kMixes = {{
    {"A", "experts, shared expert and head NVFP4, attention and delta net FP8", kFp4, kFp4, kFp8, kFp8, kFp4},
    {"B", "experts, shared expert and attention NVFP4, delta net and head bf16", kFp4, kFp4, kFp4, kBf16, kBf16},
    {"C", "experts NVFP4, the rest bf16", kFp4, kBf16, kBf16, kBf16, kBf16},
}};

void check(const Model& m, const Shape& s) {
  if (s.tokens < 1 || s.tokens > moe::kLimits.tokens) {
    fail("tokens: found {}, wanted 1 to {}", s.tokens, moe::kLimits.tokens);
  }
  if (s.context < 0 || s.context > (int64_t{1} << 28)) fail("context: found {}, wanted 0 to 268435456", s.context);
  if (s.drafts < 0 || s.drafts > 15) fail("drafts: found {}, wanted 0 to 15", s.drafts);
  if (s.drafts > 0 && s.prefill) fail("drafts: found {} with prefill, wanted 0", s.drafts);
  const int64_t n = s.ranks;
  if (n < 1 || n > moe::kLimits.ranks) fail("tensor-parallel ranks: found {}, wanted 1 to {}", n, moe::kLimits.ranks);
  const auto divides = [&](std::string_view what, int64_t heads) {
    if (heads % n != 0) fail("tensor-parallel ranks: {} do not divide the {} {} of {}", n, heads, what, m.name);
  };
  divides("attention heads", m.heads);
  divides("value heads", m.value_heads);
  // Key and value heads fewer than the ranks are held by several.
  if (m.kv_heads % n != 0 && n % m.kv_heads != 0) divides("key and value heads", m.kv_heads);
  if (m.key_heads % n != 0 && n % m.key_heads != 0) divides("key heads", m.key_heads);
  if (s.by_expert && m.experts < n)
    fail("whole experts: found {} for {} ranks, wanted one each at least", m.experts, n);
}

// Of a width on each of n ranks: whole blocks of 16, padded with zeros.
int64_t part_of(int64_t width, int64_t n) { return n == 1 ? width : round_up(ceil_div(width, n), int64_t{16}); }

// The operations of a pass of `rows` rows through layers, in order.
class Steps {
 public:
  Steps(StepPlan* plan) : plan_(*plan), m_(plan->model), s_(plan->shape), gpu_(plan->gpu) {}

  void pass(int64_t attention_layers, int64_t delta_layers, int64_t rows, bool draft) {
    const int64_t layers = attention_layers + delta_layers, n = s_.ranks;
    const std::string prefix = draft ? "draft: " : "";
    const auto add = [&](Op op, int64_t count) {
      op.name = prefix + op.name;
      op.count = count;
      this->add(std::move(op));
    };
    Shape shape = s_;
    add(norm_cost(gpu_, rows, m_.hidden), 1);  // the embedding's rows
    // The norm goes in front of a product of one or two rows, and is a node otherwise; between ranks it is the sum's
    // end.
    const bool fused = rows <= 2 && n == 1;
    if (!fused && n == 1) add(norm_cost(gpu_, rows, m_.hidden), 2 * layers + 1);
    if (n > 1) add(all_reduce_cost(gpu_, n, s_.link, rows, m_.hidden), 2 * layers);
    if (attention_layers > 0) {
      const int64_t heads = m_.heads / n, kv = std::max<int64_t>(1, m_.kv_heads / n);
      add(product("attention: q, k, v and gate", plan_.mix.attention, rows, (2 * heads + 2 * kv) * m_.head_dim,
                  m_.hidden, fused),
          attention_layers);
      add(attention_cost(gpu_, m_, shape, rows), attention_layers);
      add(product("attention: output", plan_.mix.attention, rows, m_.hidden, heads * m_.head_dim), attention_layers);
    }
    if (delta_layers > 0) {
      const int64_t values = m_.value_heads / n, keys = std::max<int64_t>(1, m_.key_heads / n);
      add(product("delta net: inputs", plan_.mix.delta, rows,
                  2 * keys * m_.key_dim + 2 * values * m_.value_dim + 2 * values, m_.hidden, fused),
          delta_layers);
      add(delta_cost(gpu_, m_, shape, rows), delta_layers);
      add(product("delta net: output", plan_.mix.delta, rows, m_.hidden, values * m_.value_dim), delta_layers);
    }
    mixer(prefix, rows, layers);
    // Prompts need the logits of their last token only.
    const int64_t scored = s_.prefill ? 1 : rows;
    add(product("head and choice", plan_.mix.head, scored, ceil_div(m_.vocabulary, n), m_.hidden, true), 1);
  }

  void add(Op op) {
    plan_.predicted_us += op.us * static_cast<double>(op.count);
    plan_.floor_us += op.floor_us * static_cast<double>(op.count);
    plan_.nodes += op.nodes * op.count;
    plan_.ops.push_back(std::move(op));
  }

 private:
  Op product(std::string name, Format format, int64_t rows, int64_t n, int64_t k, bool norm = false) const {
    return product_cost(gpu_, std::move(name), format, rows, n, k, norm);
  }

  void mixer(const std::string& prefix, int64_t rows, int64_t layers) {
    const int64_t n = s_.ranks;
    const auto dense = [&](const char* name, Format format, int64_t width) {
      Op up = product(prefix + name + ": gate and up", format, rows, 2 * part_of(width, n), m_.hidden);
      Op down = product(prefix + name + ": down", format, rows, m_.hidden, part_of(width, n));
      up.count = down.count = layers;
      add(std::move(up));
      add(std::move(down));
    };
    if (m_.experts == 0) return dense("MLP", plan_.mix.experts, m_.dense_width);
    Op router = router_cost(gpu_, m_, rows);
    router.name = prefix + router.name;
    router.count = layers;
    add(std::move(router));

    const int64_t shared_part = part_of(m_.shared_width, n), width_part = part_of(m_.expert_width, n);
    const bool sliced =
        !s_.by_expert && m_.shared_width > 0 && plan_.mix.shared == Format::kNvfp4 && shared_part % width_part == 0;
    const moe::LayerPlan cut = layer(rows, sliced, false);
    const moe::LayerPlan whole = n > 1 ? layer(rows, false, true) : cut;
    if (n > 1 && prefix.empty()) {
      plan_.experts = {cut.predicted_us, whole.predicted_us, busiest_picks(rows) / equal_picks(rows)};
    }
    const moe::LayerPlan& experts = s_.by_expert ? whole : cut;
    Op op{.name = prefix + (sliced ? "experts and shared expert" : "experts"),
          .count = layers,
          .nodes = rows <= 8 ? 2 : 4};
    for (const moe::GemmPlan* gemm : {&experts.gate_up, &experts.down}) {
      const moe::Prediction& q = gemm->chosen.prediction;
      op.bytes += q.weight_bytes + q.activation_bytes + q.output_bytes;
      op.flops += q.flops;
    }
    op.floor_us = experts.floor_us;
    op.us = experts.predicted_us;
    op.bound = experts.bound == "latency"  ? "start"
               : op.us > 2 * op.floor_us   ? "start"
               : op.flops / op.bytes > 150 ? "matrix"
                                           : "memory";
    add(std::move(op));
    if (!sliced && m_.shared_width > 0) dense("shared expert", plan_.mix.shared, m_.shared_width);
  }

  // The picks that a rank has of a pass, on average, and those of the rank that has most: as many deviations above it
  // as the largest of so many numbers lies.
  double equal_picks(int64_t rows) const {
    return static_cast<double>(rows * m_.top_k) / static_cast<double>(s_.ranks);
  }
  double busiest_picks(int64_t rows) const {
    const double n = static_cast<double>(s_.ranks), mean = equal_picks(rows);
    return std::min(mean * n, mean + std::sqrt(mean * (1 - 1 / n) * 2 * std::log(n)));
  }

  // A layer's experts on one rank, cut or whole; of the busiest rank.
  moe::LayerPlan layer(int64_t rows, bool with_shared, bool whole) const {
    moe::Problem p;
    p.name = m_.name;
    p.experts = m_.experts;
    p.top_k = m_.top_k;
    p.hidden = m_.hidden;
    p.intermediate = m_.expert_width;
    p.shared_intermediate = m_.shared_width;
    p.tokens = rows;
    if (with_shared) p.shared = moe::SharedExpert::kNvfp4;
    if (whole) {
      // Few rows choose fewer experts here; many are as if fewer had come.
      p.experts = ceil_div(m_.experts, s_.ranks);
      const double picks = busiest_picks(rows);
      if (rows < 8) {
        p.top_k = std::lround(picks / static_cast<double>(rows));
      } else {
        p.tokens = std::lround(picks / static_cast<double>(m_.top_k));
      }
      p.top_k = std::clamp<int64_t>(p.top_k, 1, p.experts);
      p.tokens = std::max<int64_t>(p.tokens, 1);
    } else if (s_.ranks > 1) {
      p = moe::rank_slice(p, s_.ranks);
    }
    return moe::plan_layer(p, gpu_, {.only_implemented = true, .explain = false});
  }

  StepPlan& plan_;
  const Model& m_;
  const Shape& s_;
  const Gpu& gpu_;
};

double rounded(double value) { return std::round(value * 1000) / 1000; }

}  // namespace

std::string_view to_string(Format format) {
  return format == Format::kNvfp4 ? "NVFP4" : format == Format::kFp8 ? "FP8" : "bf16";
}

double bytes_per_weight(Format format) {
  return format == Format::kNvfp4 ? 0.5625 : format == Format::kFp8 ? 1.0 : 2.0;
}

const Mix& find_mix(std::string_view name) {
  for (const Mix& mix : kMixes) {
    if (mix.name == name) return mix;
  }
  fail("--mix '{}': wanted {}", printable(name), mix_names());
}

std::span<const Mix> mixes() { return kMixes; }

std::string mix_names() {
  std::string all;
  for (const Mix& mix : kMixes) all += fmt::format("{}{} ({})", all.empty() ? "" : "; ", mix.name, mix.title);
  return all;
}

std::string_view to_string(Link link) {
  return link == Link::kNvlink ? "NVLink" : link == Link::kPeer ? "PCIe with peer copies" : "PCIe through the host";
}

Link find_link(std::string_view name) {
  if (name == "nvlink") return Link::kNvlink;
  if (name == "pcie") return Link::kPeer;
  if (name == "host") return Link::kHost;
  fail("--link '{}': wanted nvlink, pcie or host", printable(name));
}

StepPlan plan_step(const Model& model, const Mix& mix, const Shape& shape, const Gpu& gpu) {
  check(model, shape);
  StepPlan plan{.model = model, .mix = mix, .shape = shape, .gpu = gpu};
  Steps steps(&plan);
  steps.pass(model.attention_layers, model.delta_layers, shape.tokens * (shape.drafts + 1), false);
  // The MTP head is an attention layer with its experts and the model's head, once for each draft.
  for (int64_t i = 0; i < shape.drafts; ++i) {
    Op join = product_cost(gpu, "draft: input", Format::kBf16, shape.tokens, model.hidden, 2 * model.hidden);
    steps.add(std::move(join));
    steps.pass(1, 0, shape.tokens, true);
  }
  plan.weight_bytes = weight_bytes(model, mix, shape);
  return plan;
}

double weight_bytes(const Model& m, const Mix& x, const Shape& shape) {
  const int64_t n = shape.ranks;
  const auto of = [](int64_t a, int64_t b) { return static_cast<double>(a) * static_cast<double>(b); };
  const auto held = [n](int64_t heads) { return std::max<int64_t>(1, heads / n); };
  const int64_t keys = held(m.key_heads), values = m.value_heads / n;
  const double attention =
      of(m.hidden, (3 * (m.heads / n) + 2 * held(m.kv_heads)) * m.head_dim) * bytes_per_weight(x.attention);
  const double delta =
      of(m.hidden, 2 * keys * m.key_dim + 3 * values * m.value_dim + 2 * values) * bytes_per_weight(x.delta);
  const int64_t experts =
      shape.by_expert ? ceil_div(m.experts, n) * m.expert_width : m.experts * part_of(m.expert_width, n);
  const double mixer = 3 * of(m.hidden, experts + part_of(m.dense_width, n)) * bytes_per_weight(x.experts) +
                       3 * of(m.hidden, part_of(m.shared_width, n)) * bytes_per_weight(x.shared) +
                       2 * of(m.hidden, m.experts + (m.shared_width > 0 ? 1 : 0));
  const int64_t scored = n == 1 ? m.vocabulary : round_up(ceil_div(m.vocabulary, n), int64_t{16});
  return attention * static_cast<double>(m.attention_layers) + delta * static_cast<double>(m.delta_layers) +
         mixer * static_cast<double>(m.layers()) + of(scored, m.hidden) * bytes_per_weight(x.head) +
         2 * of(m.vocabulary, m.hidden);
}

std::string to_text(const StepPlan& plan) {
  const Shape& s = plan.shape;
  std::string out = fmt::format("{}, {}\n{} ({}){}, predicted from kernels measured on an H200\n", plan.model.name,
                                plan.mix.title, plan.gpu.title, plan.gpu.arch,
                                s.ranks > 1 ? fmt::format(" x {} over {}", s.ranks, to_string(s.link)) : "");
  if (s.prefill) {
    out += fmt::format("prefill of {} tokens after {}\n\n", s.tokens, s.context);
  } else {
    out += fmt::format("{} sequence{} of {} positions{}\n\n", s.tokens, s.tokens == 1 ? "" : "s", s.context,
                       s.drafts > 0 ? fmt::format(", a round of {} drafts", s.drafts) : "");
  }
  out += fmt::format("  {:<32}{:>6}{:>9}{:>9}{:>10}{:>8}  {}\n", "", "count", "us", "floor", "total", "share", "bound");
  // The rounds of a step with drafts look alike: one line for each operation.
  std::vector<Op> lines;
  for (const Op& op : plan.ops) {
    const auto same =
        std::find_if(lines.begin(), lines.end(), [&](const Op& l) { return l.name == op.name && l.us == op.us; });
    if (same == lines.end()) {
      lines.push_back(op);
    } else {
      same->count += op.count;
    }
  }
  for (const Op& op : lines) {
    const double total = op.us * static_cast<double>(op.count);
    out += fmt::format("  {:<32}{:>6}{:>9.2f}{:>9.2f}{:>10.1f}{:>7.1f}%  {}\n", op.name, op.count, op.us, op.floor_us,
                       total, 100 * total / plan.predicted_us, op.bound);
  }
  out += fmt::format(
      "\npredicted {:.0f} us, {:.0f} tokens/s{}; floor {:.0f} us ({:.0f} %); {} nodes; {:.1f} GB of weights{}\n",
      plan.predicted_us, plan.tokens_per_s(), s.drafts > 0 ? " and whatever drafts are accepted" : "", plan.floor_us,
      100 * plan.floor_us / plan.predicted_us, plan.nodes, plan.weight_bytes * 1e-9,
      s.ranks > 1 ? " on each card" : "");
  if (plan.experts.columns_us > 0) {
    const ExpertSplit& e = plan.experts;
    const bool whole_wins = e.whole_us < e.columns_us;
    out += fmt::format(
        "experts of a layer: a part of each on every rank {:.1f} us, whole experts {:.1f} us (the busiest rank has "
        "{:.2f} "
        "times its share){}\n",
        e.columns_us, e.whole_us, e.busiest,
        whole_wins == s.by_expert ? ""
        : whole_wins              ? ": --enable-expert-parallel wins"
                                  : ": parts of each win");
  }
  return out;
}

std::string to_json(const StepPlan& plan) {
  const Shape& s = plan.shape;
  Json ops = Json::array();
  for (const Op& op : plan.ops) {
    ops.push_back({{"name", op.name},
                   {"count", op.count},
                   {"nodes", op.nodes},
                   {"us", rounded(op.us)},
                   {"floor_us", rounded(op.floor_us)},
                   {"total_us", rounded(op.us * static_cast<double>(op.count))},
                   {"bytes", op.bytes},
                   {"flops", op.flops},
                   {"bound", op.bound}});
  }
  const Json json = {{"model", plan.model.name},
                     {"mix", plan.mix.name},
                     {"gpu", plan.gpu.name},
                     {"arch", plan.gpu.arch},
                     {"ranks", s.ranks},
                     {"link", to_string(s.link)},
                     {"tokens", s.tokens},
                     {"context", s.context},
                     {"prefill", s.prefill},
                     {"drafts", s.drafts},
                     {"kv_cache", s.fp8_cache ? "fp8" : "bf16"},
                     {"predicted_us", rounded(plan.predicted_us)},
                     {"floor_us", rounded(plan.floor_us)},
                     {"tokens_per_s", rounded(plan.tokens_per_s())},
                     {"nodes", plan.nodes},
                     {"weight_bytes", plan.weight_bytes},
                     {"experts_columns_us", rounded(plan.experts.columns_us)},
                     {"experts_whole_us", rounded(plan.experts.whole_us)},
                     {"ops", ops}};
  return json.dump();
}

}  // namespace fourfold::plan::step
