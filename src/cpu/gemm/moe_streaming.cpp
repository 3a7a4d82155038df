// Experts that meet few tokens each: their weights stream by once, every thread from a range of its own.
#include <algorithm>
#include <cstring>

#include "base/math.h"
#include "cpu/gemm/products.h"

namespace fourfold::cpu::gemm {
namespace {

const PackedMatrix* packed(const ops::Matrix* matrix) { return static_cast<const PackedMatrix*>(matrix); }

}  // namespace

// Four parallel regions: router, shared gate and the shared expert's first product; gate, up and SwiGLU of the routed
// experts; all second products; their weighted sum.
void Products::moe_streaming(const ops::MoeParams& params, const Input& x, const Input& out) {
  const auto& experts = static_cast<const PackedExperts&>(*params.experts);
  const int64_t tokens = x.size();
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
  const ops::Tensor logits = tensor(logits_, params.router->rows());
  ops::Tensor shared_both, shared_hidden, gates;
  GemvJob jobs[3];
  jobs[0] = {packed(params.router), &input_, whole(logits)};
  size_t job_count = 1;
  if (shared) {
    shared_both = tensor(gate_up_, 2 * shared_width);
    jobs[job_count++] = {packed(params.shared_gate_up), &input_, whole(shared_both)};
    if (params.shared_gate != nullptr) {
      gates = tensor(shared_gates_, 1);
      jobs[job_count++] = {packed(params.shared_gate), &input_, whole(gates)};
    }
  }
  run_gemv({jobs, job_count});
  route(params, logits.f32(), logits.stride, tokens);
  if (shared) {
    shared_hidden = tensor(shared_, shared_width);
    activate(shared_both, shared_hidden);
    prepare(whole(shared_hidden), 0.0f, shared_width % kBlockColumns == 0, shared_input_);
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
    const ops::Tensor to{products + entries * stride, ops::DType::kF32, tokens, hidden, stride};
    const GemvJob job{shared_down, &shared_input_, whole(to)};
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
      const Prepared& input = routed ? hidden_input_ : shared_input_;
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
    for (int64_t t = 0; t < tokens; ++t) add_experts(computed, k, t, first, columns, out.row(t) + first);
  });
}

}  // namespace fourfold::cpu::gemm
