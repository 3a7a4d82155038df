// Experts that meet many tokens: the tokens of each are packed, its weights dequantised piece by piece.
#include <algorithm>
#include <cstring>

#include "base/math.h"
#include "cpu/gemm/products.h"
#include "nvfp4/quantize.h"

namespace fourfold::cpu::gemm {
namespace {

const PackedMatrix* packed(const ops::Matrix* matrix) { return static_cast<const PackedMatrix*>(matrix); }

}  // namespace

void Products::Packer::pack(const float* const* rows, int64_t n, const PackedPart& part) {
  const KernelTable* wanted_table = &self.table_of(part, preferred);
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

void Products::moe_grouped(const ops::MoeParams& params, const Input& x, bool few, const Input& out) {
  const auto& experts = static_cast<const PackedExperts&>(*params.experts);
  const int64_t tokens = x.size();
  const int64_t hidden = experts.hidden();
  const int64_t width = experts.intermediate();
  const int64_t k = params.top_k;
  const auto tensor = [&](Workspace& memory, int64_t cols) {
    return ops::Tensor{memory.get<float>(tokens * cols), ops::DType::kF32, tokens, cols, cols};
  };

  // The router decides which experts run: 16-bit activations at least, or fp32.
  const auto route_by = [&](const PackedMatrix& weight, const ops::Tensor& to) {
    if (few) return multiply(x, weight, true, whole(to));
    run_gemm(x, weight, {}, 0.0f, wide_, whole(to));
  };
  const ops::Tensor logits = tensor(logits_, params.router->rows());
  route_by(*packed(params.router), logits);
  route(params, logits.f32(), logits.stride, tokens);

  ops::Tensor shared_out, gates;
  if (params.shared_down != nullptr) {
    const auto& gate_up = *packed(params.shared_gate_up);
    const int64_t n = params.shared_down->columns();
    const ops::Tensor both = tensor(gate_up_, 2 * n);
    const ops::Tensor middle = tensor(hidden_, n);
    shared_out = tensor(shared_, hidden);
    multiply(x, gate_up, few, whole(both));
    activate(both, middle);
    multiply(whole(middle), *packed(params.shared_down), few, whole(shared_out));
    if (params.shared_gate != nullptr) {
      gates = tensor(shared_gates_, 1);
      route_by(*packed(params.shared_gate), gates);
    }
  }

  // In as many slices of an expert's rows as keep all threads busy.
  const KernelTable& table = few ? *twin_ : kernels_;
  const Routing& r = routing_;
  units_.clear();
  for (size_t a = 0; a < r.experts.size(); ++a) {
    const int64_t n = r.begin[a + 1] - r.begin[a];
    const int64_t blocks = ceil_div(n, int64_t{table.gemm_tokens});
    for (int64_t b = 0; b < blocks; ++b) {
      units_.push_back({r.experts[a], r.begin[a] + n * b / blocks, r.begin[a] + n * (b + 1) / blocks});
    }
  }
  // The largest first: what is left at the end is small.
  std::sort(units_.begin(), units_.end(), [](const ExpertUnit& a, const ExpertUnit& b) {
    const int64_t more = (a.end - a.begin) - (b.end - b.begin);
    return more != 0 ? more > 0 : a.begin < b.begin;
  });
  const auto unit_count = static_cast<int64_t>(units_.size());
  const int64_t wanted = ceil_div(int64_t{8} * pool_.size(), std::max<int64_t>(unit_count, 1));

  const int64_t padded = round_up(width, kColumnAlign);
  const int64_t entries = tokens * k;
  float* values = hidden_.get<float>(entries * padded);
  float* outputs = outputs_.get<float>(entries * hidden);

  const ThreadScratch layout = thread_scratch(std::max(hidden, width));
  uint8_t* scratch = threads_.get<uint8_t>(layout.stride() * pool_.size());
  const auto sums_of = [&](int thread) { return reinterpret_cast<float*>(scratch + thread * layout.stride()); };
  const auto kernel_scratch_of = [&](int thread) { return scratch + thread * layout.stride() + layout.sums; };
  const auto make_packer = [&](int thread) {
    uint8_t* memory = kernel_scratch_of(thread) + layout.kernel;
    return Packer{*this, table, memory, memory + layout.packed};
  };

  const int64_t pairs = ceil_div(width, int64_t{kPanelRows});
  const int64_t gate_slices = std::min(wanted, pairs);
  for_units(unit_count * gate_slices, [&](int thread, int64_t index) {
    const ExpertUnit& unit = units_[static_cast<size_t>(index / gate_slices)];
    const int64_t slice = index % gate_slices;
    const PackedExpert& expert = experts[unit.expert];
    const int64_t n = unit.end - unit.begin;
    const float* rows[kGemmTokens];
    for (int64_t i = 0; i < n; ++i) rows[i] = x.row(r.token[static_cast<size_t>(unit.begin + i)]);
    float* sums = sums_of(thread);
    uint8_t* kernel_scratch = kernel_scratch_of(thread);
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
    const ExpertUnit& unit = units_[static_cast<size_t>(index / down_slices)];
    const int64_t slice = index % down_slices;
    const PackedPart& part = experts[unit.expert].down;
    const int64_t n = unit.end - unit.begin;
    const float* rows[kGemmTokens];
    for (int64_t i = 0; i < n; ++i) rows[i] = values + (unit.begin + i) * padded;
    float* sums = sums_of(thread);
    Packer packer = make_packer(thread);
    packer.pack(rows, n, part);
    for (int64_t pair = down_pairs * slice / down_slices; pair < down_pairs * (slice + 1) / down_slices; ++pair) {
      const int64_t p = 2 * pair;
      const int count = p + 1 < panels ? 2 : 1;
      const Panel both[2] = {part.panel(p), part.panel(p + count - 1)};
      packer.table->gemm(both, count, packer.memory, n, kernel_scratch_of(thread), sums);
      const auto bytes = static_cast<size_t>(std::min<int64_t>(kPairRows, hidden - p * kPanelRows)) * 4;
      for (int64_t i = 0; i < n; ++i) {
        std::memcpy(outputs + (unit.begin + i) * hidden + p * kPanelRows, sums + i * kPairRows, bytes);
      }
    }
  });

  const ExpertOutputs computed{outputs, shared_out.data != nullptr ? shared_out.f32() : nullptr, hidden, gates};
  pool_.parallel_for(tokens, 8, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) add_experts(computed, k, t, 0, hidden, out.row(t));
  });
}

}  // namespace fourfold::cpu::gemm
