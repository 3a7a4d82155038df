// Mixture of experts: routing, grouping of tokens by expert, the two products of every expert with SwiGLU between them,
// and the weighted sum. A token's experts are always added in ascending order, the shared expert last, whatever thread
// computed them.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/check.h"
#include "base/math.h"
#include "cpu/gemm/products.h"
#include "cpu/routing.h"
#include "nvfp4/quantize.h"

namespace fourfold::cpu::gemm {
namespace {

// Tokens that one pass routes: bounds the memory for the experts' outputs (top_k rows of fp32 for each token).
constexpr int64_t kPassTokens = 1024;

const PackedMatrix* packed(const ops::Matrix* matrix) { return static_cast<const PackedMatrix*>(matrix); }

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// Panels that one kernel call can take as a pair.
bool pairable(const PackedPart& a, const PackedPart& b) { return a.kind == b.kind && a.segment == b.segment; }

}  // namespace

void Products::route(const ops::MoeParams& params, const float* logits, int64_t stride, int64_t tokens,
                     int64_t experts) {
  const int64_t k = params.top_k;
  const auto entries = static_cast<size_t>(tokens * k);
  chosen_.resize(entries);
  chosen_weights_.resize(entries);
  const auto select = [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      select_experts(logits + t * stride, experts, k, params.renormalize, chosen_.data() + t * k,
                     chosen_weights_.data() + t * k);
    }
  };
  if (tokens * experts < 4096) {
    select(0, tokens);
  } else {
    pool_.parallel_for(tokens, 8, select);
  }

  // Counting sort by expert, stable in tokens.
  cursor_.assign(static_cast<size_t>(experts), 0);
  for (const int32_t e : chosen_) ++cursor_[static_cast<size_t>(e)];
  Routing& r = routing_;
  r.experts.clear();
  r.begin.clear();
  r.token.resize(entries);
  r.weight.resize(entries);
  r.slots.resize(entries);
  int64_t at = 0;
  for (int64_t e = 0; e < experts; ++e) {
    int64_t& count = cursor_[static_cast<size_t>(e)];
    if (count == 0) continue;
    r.experts.push_back(static_cast<int32_t>(e));
    r.begin.push_back(at);
    at += count;
    count = r.begin.back();
  }
  r.begin.push_back(at);
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t i = 0; i < k; ++i) {
      const auto from = static_cast<size_t>(t * k + i);
      const int64_t slot = cursor_[static_cast<size_t>(chosen_[from])]++;
      r.token[static_cast<size_t>(slot)] = static_cast<int32_t>(t);
      r.weight[static_cast<size_t>(slot)] = chosen_weights_[from];
      r.slots[from] = static_cast<int32_t>(slot);
    }
    // Slots grow with the expert.
    std::sort(r.slots.begin() + t * k, r.slots.begin() + (t + 1) * k);
  }
}

// Columns [first, first + columns) of a token's weighted sum.
void Products::add_experts(const ExpertOutputs& outputs, int64_t top_k, int64_t token, int64_t first, int64_t columns,
                           float* to) const {
  const int64_t whole = columns / kPanelRows * kPanelRows;
  std::fill(to, to + columns, 0.0f);
  const auto add = [&](float weight, const float* from) {
    kernels_.axpy(weight, from, to, whole);
    for (int64_t i = whole; i < columns; ++i) to[i] += weight * from[i];
  };
  for (int64_t i = 0; i < top_k; ++i) {
    const auto slot = static_cast<size_t>(routing_.slots[static_cast<size_t>(token * top_k + i)]);
    add(routing_.weight[slot], outputs.routed + static_cast<int64_t>(slot) * outputs.stride + first);
  }
  if (outputs.shared != nullptr) {
    const ops::Tensor& gates = outputs.shared_gates;
    add(gates.data != nullptr ? sigmoid(*gates.f32(token)) : 1.0f, outputs.shared + token * outputs.stride + first);
  }
}

void Products::moe(const ops::MoeParams& params, const ops::Tensor& x, const ops::Tensor& out) {
  const auto& experts = static_cast<const PackedExperts&>(*params.experts);
  const PackedMatrix& router = *packed(params.router);
  FF_ASSERT(x.cols == experts.hidden() && out.cols == experts.hidden() && router.rows() == experts.count());
  FF_ASSERT(router.columns() == x.cols && params.top_k >= 1 && params.top_k <= experts.count());
  if (x.rows == 0) return;
  // Few: also a larger batch as long as an expert meets one or two of its tokens. Experts with input scales of their
  // own need one quantised copy of a token for each: the way for many tokens has it.
  const bool few = x.rows <= kernels_.gemv_limit || x.rows * params.top_k <= experts.count();
  if (few && !nvfp4_activations_) return moe_few(params, x, out);
  for (int64_t begin = 0; begin < x.rows; begin += kPassTokens) {
    const int64_t end = std::min(begin + kPassTokens, x.rows);
    moe_many(params, x.slice_rows(begin, end), out.slice_rows(begin, end));
  }
}

// Four parallel regions: router, shared gate and the shared expert's first product; gate, up and SwiGLU of the routed
// experts; all second products; their weighted sum.
void Products::moe_few(const ops::MoeParams& params, const ops::Tensor& x, const ops::Tensor& out) {
  const auto& experts = static_cast<const PackedExperts&>(*params.experts);
  const int64_t tokens = x.rows;
  const int64_t hidden = experts.hidden();
  const int64_t width = experts.intermediate();
  const int64_t k = params.top_k;
  const auto tensor = [&](Workspace& memory, int64_t cols) {
    return ops::Tensor{memory.get<float>(tokens * round_up(cols, 16)), ops::DType::kF32, tokens, cols,
                       round_up(cols, 16)};
  };
  prepare(x, 0.0f, hidden % kBlockColumns == 0, input_);

  const bool shared = params.shared_down != nullptr;
  const int64_t shared_width = shared ? params.shared_down->columns() : 0;
  const ops::Tensor logits = tensor(logits_, experts.count());
  ops::Tensor shared_both, shared_hidden, gates;
  GemvJob jobs[3] = {{packed(params.router), &input_, logits}, {}, {}};
  size_t job_count = 1;
  if (shared) {
    shared_both = tensor(gate_up_, 2 * shared_width);
    jobs[job_count++] = {packed(params.shared_gate_up), &input_, shared_both};
    if (params.shared_gate != nullptr) {
      gates = tensor(shared_gates_, 1);
      jobs[job_count++] = {packed(params.shared_gate), &input_, gates};
    }
  }
  run_gemv({jobs, job_count});
  route(params, logits.f32(), logits.stride, tokens, experts.count());
  if (shared) {
    shared_hidden = tensor(shared_, shared_width);
    activate(shared_both, shared_hidden);
    prepare(shared_hidden, 0.0f, shared_width % kBlockColumns == 0, shared_input_);
  }

  // Gate, up, SwiGLU: a pair of panels gives 16 values of the hidden vector, one block of integers.
  const Routing& r = routing_;
  const auto active = static_cast<int64_t>(r.experts.size());
  const int64_t entries = tokens * k;
  const int64_t padded = round_up(width, kColumnAlign);
  const int64_t blocks = padded / kBlockColumns;
  float* values = hidden_.get<float>(entries * padded);
  auto* integers = hidden_blocks_.get<ActivationBlock>(entries * blocks);
  hidden_input_.rows.resize(static_cast<size_t>(entries));
  hidden_input_.blocks.resize(static_cast<size_t>(entries));
  for (int64_t s = 0; s < entries; ++s) {
    hidden_input_.rows[static_cast<size_t>(s)] = values + s * padded;
    hidden_input_.blocks[static_cast<size_t>(s)] = integers + s * blocks;
    std::fill(values + s * padded + width, values + (s + 1) * padded, 0.0f);
  }
  const int64_t pairs = ceil_div(width, int64_t{kPanelRows});
  const int64_t pair_bytes = std::max<int64_t>(1, experts.bytes_per_expert() * 2 / 3 / pairs);
  const auto gate_up = [&](int, int64_t begin, int64_t end) {
    alignas(64) float sums[kGemvPanels * kGemvTokens * kPanelRows];  // of gate, then of up
    const float* up = sums + kGemvTokens * kPanelRows;
    alignas(64) float both[kPanelRows];
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t a = unit / pairs;
      const int64_t p = unit % pairs;
      const PackedExpert& expert = experts[r.experts[static_cast<size_t>(a)]];
      const bool quantize = expert.down.kind == Kind::kNvfp4;
      const int64_t last = r.begin[static_cast<size_t>(a) + 1];
      for (int64_t s = r.begin[static_cast<size_t>(a)]; s < last; s += kGemvTokens) {
        const int n = static_cast<int>(std::min<int64_t>(kGemvTokens, last - s));
        const float* rows[kGemvTokens];
        const ActivationBlock* block_rows[kGemvTokens];
        for (int i = 0; i < n; ++i) {
          const auto t = static_cast<size_t>(r.token[static_cast<size_t>(s + i)]);
          rows[i] = input_.rows[t];
          block_rows[i] = input_.blocks.empty() ? nullptr : input_.blocks[t];
        }
        Panel panels[kGemvPanels] = {expert.gate.panel(p), expert.up.panel(p)};
        if (p + 1 == pairs && a + 1 < active) {
          const PackedExpert& next = experts[r.experts[static_cast<size_t>(a) + 1]];
          panels[0].ahead = next.gate.data;
          panels[1].ahead = next.up.data;
        }
        const auto product = [&](int first, int count) {
          float* to = sums + first * kGemvTokens * kPanelRows;
          if (panels[first].kind == Kind::kNvfp4) {
            kernels_.gemv_nvfp4(panels + first, count, block_rows, n, to);
          } else {
            kernels_.gemv_float(panels + first, count, rows, n, to);
          }
        };
        if (pairable(expert.gate, expert.up)) {
          product(0, 2);
        } else {
          product(0, 1);
          product(1, 1);
        }
        for (int i = 0; i < n; ++i) {
          kernels_.swiglu(sums + i * kPanelRows, up + i * kPanelRows, both, kPanelRows);
          if (quantize) kernels_.quantize(both, kBlockColumns, integers + (s + i) * blocks + p);
          std::memcpy(values + (s + i) * padded + p * kPanelRows, both,
                      static_cast<size_t>(std::min<int64_t>(kPanelRows, width - p * kPanelRows)) * 4);
        }
      }
    }
  };
  pool_.parallel_ranges(active * pairs, std::max<int64_t>(1, kUnitBytes / pair_bytes), gate_up);

  // Down: each thread streams a range of the experts' matrices from end to end; one row of products for each entry,
  // then for each token of the shared expert.
  const PackedMatrix* shared_down = packed(params.shared_down);
  const int64_t panels = ceil_div(hidden, int64_t{kPanelRows});
  const int64_t down_pairs = ceil_div(panels, int64_t{kGemvPanels});
  const int64_t stride = panels * kPanelRows;
  float* products = outputs_.get<float>((entries + (shared ? tokens : 0)) * stride);
  const bool aligned = shared && shared_down->parts().size() == 1;
  if (shared && !aligned) {
    const GemvJob job{shared_down, &shared_input_,
                      ops::Tensor{products + entries * stride, ops::DType::kF32, tokens, hidden, stride}};
    run_gemv({&job, 1});
  }
  const int64_t sources = active + (aligned ? 1 : 0);
  const auto part_of = [&](int64_t a) -> const PackedPart& {
    return a < active ? experts[r.experts[static_cast<size_t>(a)]].down : shared_down->parts()[0];
  };
  const auto down = [&](int, int64_t begin, int64_t end) {
    alignas(64) float sums[kGemvPanels * kGemvTokens * kPanelRows];
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t a = unit / down_pairs;
      const int64_t u = unit % down_pairs;
      const PackedPart& part = part_of(a);
      Panel pair[kGemvPanels];
      const int count = part.pair(u * kGemvPanels, part.panels, pair);
      if (u + 1 == down_pairs && a + 1 < sources) {  // the next expert follows
        const PackedPart& next = part_of(a + 1);
        for (int p = 0; p < count; ++p) pair[p].ahead = next.data + p * next.stride;
      }
      const bool routed = a < active;
      const Input& input = routed ? hidden_input_ : shared_input_;
      const int64_t first = routed ? r.begin[static_cast<size_t>(a)] : 0;
      const int64_t last = routed ? r.begin[static_cast<size_t>(a) + 1] : tokens;
      float* to = products + (routed ? 0 : entries * stride) + u * kPairRows;
      for (int64_t s = first; s < last; s += kGemvTokens) {
        const int n = static_cast<int>(std::min<int64_t>(kGemvTokens, last - s));
        gemv_panels(pair, count, input, s, n, sums);
        for (int p = 0; p < count; ++p) {
          for (int i = 0; i < n; ++i) {
            std::memcpy(to + (s + i) * stride + p * kPanelRows, sums + (p * kGemvTokens + i) * kPanelRows,
                        sizeof(float) * kPanelRows);
          }
        }
      }
    }
  };
  const int64_t down_bytes = std::max<int64_t>(1, experts.bytes_per_expert() / 3 / down_pairs);
  pool_.parallel_ranges(sources * down_pairs, std::max<int64_t>(1, kUnitBytes / down_bytes), down);

  // Threads own columns of the sum.
  const ExpertOutputs computed{products, shared ? products + entries * stride : nullptr, stride, gates};
  pool_.parallel_for(panels, ceil_div(panels, int64_t{pool_.size()}), [&](int64_t begin, int64_t end) {
    const int64_t first = begin * kPanelRows;
    const int64_t columns = std::min(end * kPanelRows, hidden) - first;
    for (int64_t t = 0; t < tokens; ++t) add_experts(computed, k, t, first, columns, out.f32(t) + first);
  });
}

void Products::moe_many(const ops::MoeParams& params, const ops::Tensor& x, const ops::Tensor& out) {
  const auto& experts = static_cast<const PackedExperts&>(*params.experts);
  const int64_t tokens = x.rows;
  const int64_t hidden = experts.hidden();
  const int64_t width = experts.intermediate();
  const int64_t k = params.top_k;
  const auto tensor = [&](Workspace& memory, int64_t cols) {
    return ops::Tensor{memory.get<float>(tokens * cols), ops::DType::kF32, tokens, cols, cols};
  };

  // The router decides which experts run: fp32 on every instruction set.
  const PackedMatrix& router = *packed(params.router);
  const ops::Tensor logits = tensor(logits_, experts.count());
  run_gemm(x, router, -1, 0.0f, true, logits);
  route(params, logits.f32(), logits.stride, tokens, experts.count());

  ops::Tensor shared_out, gates;
  if (params.shared_down != nullptr) {
    const auto& gate_up = *packed(params.shared_gate_up);
    const int64_t n = params.shared_down->columns();
    const ops::Tensor both = tensor(gate_up_, 2 * n);
    const ops::Tensor middle = tensor(hidden_, n);
    shared_out = tensor(shared_, hidden);
    linear(x, gate_up, both);
    activate(both, middle);
    linear(middle, *packed(params.shared_down), shared_out);
    if (params.shared_gate != nullptr) {
      gates = tensor(shared_gates_, 1);
      run_gemm(x, *packed(params.shared_gate), -1, 0.0f, true, gates);
    }
  }

  // Units: an expert with at most gemm_tokens of its tokens, in as many slices of its rows as keep all threads busy.
  struct Unit {
    int32_t expert;
    int64_t begin, end;  // entries
  };
  const Routing& r = routing_;
  std::vector<Unit> units;
  for (size_t a = 0; a < r.experts.size(); ++a) {
    const int64_t n = r.begin[a + 1] - r.begin[a];
    const int64_t blocks = ceil_div(n, int64_t{kernels_.gemm_tokens});
    for (int64_t b = 0; b < blocks; ++b) {
      units.push_back({r.experts[a], r.begin[a] + n * b / blocks, r.begin[a] + n * (b + 1) / blocks});
    }
  }
  // The largest first: what is left at the end is small.
  std::stable_sort(units.begin(), units.end(),
                   [](const Unit& a, const Unit& b) { return a.end - a.begin > b.end - b.begin; });
  const auto unit_count = static_cast<int64_t>(units.size());
  const int64_t wanted = ceil_div(int64_t{8} * pool_.size(), unit_count);

  const int64_t padded = round_up(width, kColumnAlign);
  const int64_t entries = tokens * k;
  float* values = hidden_.get<float>(entries * padded);
  float* outputs = outputs_.get<float>(entries * hidden);

  const int64_t sums_bytes = int64_t{kGemmTokens} * kPairRows * 4;
  const int64_t kernel_bytes = round_up(std::max(kernels_.gemm_scratch, wide_.gemm_scratch), 64);
  const int64_t most_columns = std::max(hidden, width);
  const int64_t pack_bytes = round_up(
      std::max(kernels_.packed_bytes(kGemmTokens, most_columns), wide_.packed_bytes(kGemmTokens, most_columns)), 64);
  const int64_t quantized_bytes = nvfp4_activations_ ? round_up((kGemmTokens * 4 + 1) * most_columns, 64) : 0;
  int64_t stride = 0;
  uint8_t* scratch = thread_scratch(sums_bytes + kernel_bytes + pack_bytes + quantized_bytes, stride);

  // Packs `rows` for products with a part, again only when the part needs it differently from the one before.
  struct Packer {
    Products& self;
    uint8_t* memory;
    uint8_t* quantized;
    const KernelTable* table = nullptr;
    float scale = 0.0f;
    void pack(const float* const* rows, int64_t n, const PackedPart& part) {
      const KernelTable* wanted_table = part.fits(self.kernels_) ? &self.kernels_ : &self.wide_;
      const float wanted_scale = self.scale_of(part);
      if (table == wanted_table && scale == wanted_scale) return;
      table = wanted_table;
      scale = wanted_scale;
      const int64_t columns = part.columns;
      if (!(scale > 0)) return table->pack(rows, n, columns, memory);
      const float* copies[kGemmTokens];
      auto* copy = reinterpret_cast<float*>(quantized);
      const std::span<uint8_t> codes(quantized + kGemmTokens * columns * 4, static_cast<size_t>(columns / 2));
      const std::span<uint8_t> scales(codes.data() + columns / 2, static_cast<size_t>(columns / nvfp4::kBlock));
      for (int64_t i = 0; i < n; ++i) {
        copies[i] = copy + i * columns;
        const std::span<float> to(copy + i * columns, static_cast<size_t>(columns));
        nvfp4::quantize_activations({rows[i], static_cast<size_t>(columns)}, 1.0f / scale, codes, scales);
        nvfp4::dequantize_row(codes, scales, scale, to);
      }
      table->pack(copies, n, columns, memory);
    }
  };
  const auto make_packer = [&](int thread) {
    uint8_t* memory = scratch + thread * stride + sums_bytes + kernel_bytes;
    return Packer{*this, memory, memory + pack_bytes};
  };

  const int64_t pairs = ceil_div(width, int64_t{kPanelRows});
  const int64_t gate_slices = std::min(wanted, pairs);
  for_units(unit_count * gate_slices, [&](int thread, int64_t index) {
    const Unit& unit = units[static_cast<size_t>(index / gate_slices)];
    const int64_t slice = index % gate_slices;
    const PackedExpert& expert = experts[unit.expert];
    const int64_t n = unit.end - unit.begin;
    const float* rows[kGemmTokens];
    for (int64_t i = 0; i < n; ++i) rows[i] = x.f32(r.token[static_cast<size_t>(unit.begin + i)]);
    auto* sums = reinterpret_cast<float*>(scratch + thread * stride);
    uint8_t* kernel_scratch = scratch + thread * stride + sums_bytes;
    Packer packer = make_packer(thread);
    const int64_t first = pairs * slice / gate_slices;
    const int64_t last = pairs * (slice + 1) / gate_slices;
    const auto finish = [&](int64_t p) {
      for (int64_t i = 0; i < n; ++i) {
        float* row = sums + i * kPairRows;
        float* to = values + (unit.begin + i) * padded + p * kPanelRows;
        kernels_.swiglu(row, row + kPanelRows, to, kPanelRows);  // `padded` has room for a whole panel
      }
    };
    if (pairable(expert.gate, expert.up) && scale_of(expert.gate) == scale_of(expert.up)) {
      packer.pack(rows, n, expert.gate);
      for (int64_t p = first; p < last; ++p) {
        const Panel panels[2] = {expert.gate.panel(p), expert.up.panel(p)};
        packer.table->gemm(panels, 2, packer.memory, n, kernel_scratch, sums);
        finish(p);
      }
    } else {
      for (int64_t p = first; p < last; ++p) {
        const Panel gate = expert.gate.panel(p);
        const Panel up = expert.up.panel(p);
        packer.pack(rows, n, expert.up);
        packer.table->gemm(&up, 1, packer.memory, n, kernel_scratch, sums);
        for (int64_t i = 0; i < n; ++i) {
          std::memcpy(sums + i * kPairRows + kPanelRows, sums + i * kPairRows, kPanelRows * 4);
        }
        packer.pack(rows, n, expert.gate);
        packer.table->gemm(&gate, 1, packer.memory, n, kernel_scratch, sums);
        finish(p);
      }
    }
  });

  const int64_t panels = ceil_div(hidden, int64_t{kPanelRows});
  const int64_t down_pairs = ceil_div(panels, int64_t{2});
  const int64_t down_slices = std::min(wanted, down_pairs);
  for_units(unit_count * down_slices, [&](int thread, int64_t index) {
    const Unit& unit = units[static_cast<size_t>(index / down_slices)];
    const int64_t slice = index % down_slices;
    const PackedPart& part = experts[unit.expert].down;
    const int64_t n = unit.end - unit.begin;
    const float* rows[kGemmTokens];
    for (int64_t i = 0; i < n; ++i) rows[i] = values + (unit.begin + i) * padded;
    auto* sums = reinterpret_cast<float*>(scratch + thread * stride);
    Packer packer = make_packer(thread);
    packer.pack(rows, n, part);
    for (int64_t pair = down_pairs * slice / down_slices; pair < down_pairs * (slice + 1) / down_slices; ++pair) {
      const int64_t p = 2 * pair;
      const int count = p + 1 < panels ? 2 : 1;
      const Panel both[2] = {part.panel(p), part.panel(p + count - 1)};
      packer.table->gemm(both, count, packer.memory, n, scratch + thread * stride + sums_bytes, sums);
      const auto bytes = static_cast<size_t>(std::min<int64_t>(kPairRows, hidden - p * kPanelRows)) * 4;
      for (int64_t i = 0; i < n; ++i) {
        std::memcpy(outputs + (unit.begin + i) * hidden + p * kPanelRows, sums + i * kPairRows, bytes);
      }
    }
  });

  const ExpertOutputs computed{outputs, shared_out.data != nullptr ? shared_out.f32() : nullptr, hidden, gates};
  pool_.parallel_for(tokens, 8, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) add_experts(computed, k, t, 0, hidden, out.f32(t));
  });
}

}  // namespace fourfold::cpu::gemm
