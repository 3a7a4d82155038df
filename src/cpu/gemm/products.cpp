#include "cpu/gemm/products.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/math.h"
#include "nvfp4/quantize.h"

namespace fourfold::cpu::gemm {
namespace {

// Matrices below this run on the calling thread.
constexpr int64_t kSerialBytes = 24 << 10;

constexpr int64_t kSumsBytes = int64_t{kGemmTokens} * kPairRows * 4;

// To NVFP4 and back, as the reference does it. `codes` holds columns bytes.
void fake_quantize(const float* x, int64_t columns, float input_scale, uint8_t* codes, float* out) {
  const auto n = static_cast<size_t>(columns);
  const std::span<uint8_t> elements(codes, n / 2);
  const std::span<uint8_t> scales(codes + n / 2, n / nvfp4::kBlock);
  nvfp4::quantize_activations({x, n}, 1.0f / input_scale, elements, scales);
  nvfp4::dequantize_row(elements, scales, input_scale, {out, n});
}

void clear_rows(const ops::Tensor& out, Rows rows) {
  for (const int32_t row : rows) std::fill_n(out.f32(row), out.cols, 0.0f);
}

}  // namespace

Products::Products(const Tables& tables, ThreadPool& pool, const CpuOptions& options)
    : kernels_(*tables.kernels),
      beside_(tables.beside),
      wide_(*tables.wide),
      twin_(tables.twin),
      pool_(pool),
      nvfp4_activations_(options.nvfp4_activations),
      ranks_(options.member == nullptr ? 1 : options.member->ranks()),
      pass_entries_(options.moe_pass_entries) {}

int64_t Products::packed_bytes(int64_t tokens, int64_t columns) const {
  int64_t most = std::max(kernels_.packed_bytes(tokens, columns), wide_.packed_bytes(tokens, columns));
  for (const KernelTable* table : {beside_, twin_}) {
    if (table != nullptr) most = std::max(most, table->packed_bytes(tokens, columns));
  }
  return round_up(most, 64);
}

const KernelTable& Products::table_of(const PackedPart& part, const KernelTable& preferred) const {
  if (part.fits(preferred)) return preferred;
  return beside_ != nullptr && part.fits(*beside_) ? *beside_ : wide_;
}

int64_t Products::ThreadScratch::stride() const { return round_up(sums + kernel + packed + quantized, 4096) + 128; }

Products::ThreadScratch Products::thread_scratch(int64_t columns) const {
  int64_t kernel = std::max(kernels_.gemm_scratch, wide_.gemm_scratch);
  for (const KernelTable* table : {beside_, twin_}) {
    if (table != nullptr) kernel = std::max(kernel, table->gemm_scratch);
  }
  ThreadScratch scratch{kSumsBytes, round_up(kernel, 64), 0, 0};
  if (columns > 0) {
    scratch.packed = packed_bytes(kGemmTokens, columns);
    scratch.quantized = nvfp4_activations_ ? round_up((kGemmTokens * 4 + 1) * columns, 64) : 0;
  }
  return scratch;
}

float Products::common_scale(const PackedMatrix& matrix) const {
  const float scale = scale_of(matrix.parts()[0]);
  for (const PackedPart& part : matrix.parts()) {
    if (scale_of(part) != scale) return -1.0f;
  }
  return scale;
}

Products::Input Products::whole(const ops::Tensor& tensor) {
  for (auto i = static_cast<int64_t>(all_rows_.size()); i < tensor.rows; ++i) {
    all_rows_.push_back(static_cast<int32_t>(i));
  }
  return {tensor, Rows(all_rows_).first(static_cast<size_t>(tensor.rows))};
}

void Products::prepare(const Input& x, float input_scale, bool blocks, Prepared& prepared) {
  const int64_t tokens = x.size();
  const int64_t columns = x.tensor.cols;
  const auto n = static_cast<size_t>(tokens);
  prepared.rows.resize(n);
  if (input_scale > 0 || columns % 4 != 0) {
    const int64_t stride = round_up(columns, kColumnAlign);
    float* rows = prepared.row_memory.get<float>(tokens * stride);
    uint8_t* codes = quantized_.get<uint8_t>(columns);
    for (int64_t t = 0; t < tokens; ++t) {
      float* row = rows + t * stride;
      if (input_scale > 0) {
        fake_quantize(x.row(t), columns, input_scale, codes, row);
      } else {
        std::memcpy(row, x.row(t), static_cast<size_t>(columns) * 4);
      }
      std::fill(row + columns, row + stride, 0.0f);
      prepared.rows[static_cast<size_t>(t)] = row;
    }
  } else {
    for (int64_t t = 0; t < tokens; ++t) prepared.rows[static_cast<size_t>(t)] = x.row(t);
  }
  prepared.blocks.clear();
  if (!blocks) return;
  prepared.blocks.resize(n);
  const int64_t count = columns / kBlockColumns;
  auto* memory = prepared.block_memory.get<ActivationBlock>(tokens * count);
  const auto quantize = [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      kernels_.quantize(prepared.rows[static_cast<size_t>(t)], columns, memory + t * count);
      prepared.blocks[static_cast<size_t>(t)] = memory + t * count;
    }
  };
  // One region costs as much as quantising a row.
  if (tokens <= 4) {
    quantize(0, tokens);
  } else {
    pool_.parallel_for(tokens, 2, quantize);
  }
}

void Products::gemv_panels(const Panel* panels, int count, const Prepared& input, int64_t first, int tokens,
                           float* out) {
  if (panels[0].kind == Kind::kNvfp4) {
    kernels_.gemv_nvfp4(panels, count, input.blocks.data() + first, tokens, out);
  } else {
    kernels_.gemv_float(panels, count, input.rows.data() + first, tokens, out);
  }
}

void Products::run_gemv(std::span<const GemvJob> jobs) {
  // fn(job, part) for every part that is asked for, in order.
  const auto for_parts = [&](auto&& fn) {
    for (const GemvJob& job : jobs) {
      const std::vector<PackedPart>& parts = job.matrix->parts();
      for (size_t i = 0; i < parts.size(); ++i) {
        if (job.parts.has(i, parts[i])) fn(job, parts[i]);
      }
    }
  };
  int64_t panels = 0;
  int64_t bytes = 0;
  for_parts([&](const GemvJob&, const PackedPart& part) {
    panels += part.panels;
    bytes += part.panels * part.stride;
  });
  if (panels == 0) return;
  const auto work = [&](int, int64_t begin, int64_t end) {
    alignas(64) float sums[kGemvPanels * kGemvTokens * kPanelRows];
    int64_t base = 0;
    for_parts([&](const GemvJob& job, const PackedPart& part) {
      const int64_t from = std::max(begin - base, int64_t{0});
      const int64_t to = std::min(end - base, part.panels);
      const int64_t rows = job.out.size();
      for (int64_t first = from; first < to; first += kGemvPanels) {
        Panel pair[kGemvPanels];
        const int count = part.pair(first, to, pair);
        for (int64_t t = 0; t < rows; t += kGemvTokens) {
          const int tokens = static_cast<int>(std::min<int64_t>(kGemvTokens, rows - t));
          gemv_panels(pair, count, *job.input, t, tokens, sums);
          for (int p = 0; p < count; ++p) {
            const int64_t panel = first + p;
            const auto n = static_cast<size_t>(part.rows_of(panel)) * sizeof(float);
            for (int i = 0; i < tokens; ++i) {
              std::memcpy(job.out.row(t + i) + part.first_row + panel * kPanelRows,
                          sums + (p * kGemvTokens + i) * kPanelRows, n);
            }
          }
        }
      }
      base += part.panels;
    });
  };
  if (bytes * jobs[0].out.size() <= kSerialBytes) return work(0, 0, panels);
  // As many bytes for each thread: the first panel that begins at or behind its share.
  const auto split = [&](int thread) {
    if (thread == pool_.size()) return panels;
    const int64_t wanted = bytes / pool_.size() * thread;
    int64_t found = -1;
    int64_t first = 0;
    int64_t at = 0;
    for_parts([&](const GemvJob&, const PackedPart& part) {
      const int64_t size = part.panels * part.stride;
      if (found < 0 && at + size > wanted) found = first + ceil_div(wanted - at, part.stride);
      at += size;
      first += part.panels;
    });
    return found < 0 ? panels : found;
  };
  // Whole pairs: a panel on its own is one stream of memory, and slower.
  const int64_t grain = round_up(std::max<int64_t>(1, panels * kUnitBytes / bytes), int64_t{kGemvPanels});
  pool_.parallel_ranges(panels, grain, split, work);
}

void Products::run_gemm(const Input& x, const PackedMatrix& weight, const Parts& wanted, float input_scale,
                        const KernelTable& table, const Input& out) {
  const int64_t columns = x.tensor.cols;
  const int64_t rows = x.size();
  // Blocks of whole tiles: a tile takes nearly as long with fewer tokens.
  const int64_t tiles = ceil_div(rows, int64_t{kTileTokens});
  const int64_t blocks = ceil_div(tiles, int64_t{table.gemm_tokens / kTileTokens});
  const auto block_begin = [&](int64_t b) { return std::min(rows, tiles * b / blocks * kTileTokens); };

  // Pack for each kernel table that a part needs.
  struct Packed {
    const KernelTable* table;
    uint8_t* data = nullptr;
    int64_t stride = 0;
    bool used = false;
  } packed[3] = {{&table}, {&wide_}, {beside_}};
  const auto packed_for = [&](const PackedPart& part) -> Packed& {
    const KernelTable* of_part = &table_of(part, table);
    return packed[of_part == &table ? 0 : of_part == &wide_ ? 1 : 2];
  };
  part_work_.clear();
  int64_t pairs = 0;
  int64_t bytes = 0;
  for (size_t i = 0; i < weight.parts().size(); ++i) {
    const PackedPart& part = weight.parts()[i];
    if (!wanted.has(i, part)) continue;
    part_work_.push_back({&part, pairs});
    pairs += ceil_div(part.panels, 2);
    bytes += part.panels * part.stride;
    packed_for(part).used = true;
  }
  if (pairs == 0) return;
  int64_t total = 0;
  for (Packed& p : packed) {
    if (!p.used) continue;
    p.stride = round_up(p.table->packed_bytes(ceil_div(tiles, blocks) * kTileTokens, columns), 64);
    total += p.stride * blocks;
  }
  uint8_t* memory = packed_.get<uint8_t>(total);
  for (Packed& p : packed) {
    if (!p.used) continue;
    p.data = memory;
    memory += p.stride * blocks;
  }
  float* quantized = nullptr;
  if (input_scale > 0) {
    quantized = quantized_.get<float>(2 * columns * rows);  // the rows, then room for their codes
    auto* codes = reinterpret_cast<uint8_t*>(quantized + columns * rows);
    pool_.parallel_for(rows, 4, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        fake_quantize(x.row(t), columns, input_scale, codes + t * columns, quantized + t * columns);
      }
    });
  }
  for_units(blocks, [&](int, int64_t b) {
    const float* from[kGemmTokens];
    const int64_t begin = block_begin(b);
    const int64_t n = block_begin(b + 1) - begin;
    for (int64_t t = 0; t < n; ++t) {
      from[t] = quantized != nullptr ? quantized + (begin + t) * columns : x.row(begin + t);
    }
    for (const Packed& p : packed) {
      if (p.used) p.table->pack(from, n, columns, p.data + b * p.stride);
    }
  });

  // Units of a few pairs of panels; all units of one block of tokens come together.
  const int64_t pair_bytes = std::max<int64_t>(1, bytes / pairs);
  const int64_t grain =
      std::clamp<int64_t>(pairs * blocks / (8 * pool_.size()), 1, std::max<int64_t>(1, kUnitBytes / pair_bytes));
  const int64_t units_per_block = ceil_div(pairs, grain);
  const ThreadScratch layout = thread_scratch(0);
  uint8_t* scratch = threads_.get<uint8_t>(layout.stride() * pool_.size());
  for_units(units_per_block * blocks, [&](int thread, int64_t unit) {
    const int64_t b = unit / units_per_block;
    const int64_t first = unit % units_per_block * grain;
    const int64_t begin = block_begin(b);
    const int64_t tokens = block_begin(b + 1) - begin;
    auto* sums = reinterpret_cast<float*>(scratch + thread * layout.stride());
    uint8_t* kernel_scratch = scratch + thread * layout.stride() + layout.sums;
    for (int64_t pair = first; pair < std::min(first + grain, pairs); ++pair) {
      const PartWork* work = part_work_.data() + part_work_.size() - 1;
      while (work->first_pair > pair) --work;
      const PackedPart& part = *work->part;
      const int64_t p = 2 * (pair - work->first_pair);
      const int count = p + 1 < part.panels ? 2 : 1;
      const Panel panels[2] = {part.panel(p), part.panel(p + count - 1)};
      const Packed& from = packed_for(part);
      from.table->gemm(panels, count, from.data + b * from.stride, tokens, kernel_scratch, sums);
      const auto n = static_cast<size_t>(std::min<int64_t>(kPairRows, part.rows - p * kPanelRows)) * sizeof(float);
      for (int64_t t = 0; t < tokens; ++t) {
        std::memcpy(out.row(begin + t) + part.first_row + p * kPanelRows, sums + t * kPairRows, n);
      }
    }
  });
}

void Products::run_few(const Input& x, const PackedMatrix& weight, const Parts& parts, float input_scale,
                       const Input& out) {
  Parts streamed = parts;
  if (twin_ != nullptr && x.size() > twin_->gemv_limit) {
    run_gemm(x, weight, {parts.only, kind_bit(Kind::kNvfp4)}, input_scale, *twin_, out);
    streamed.kinds &= ~kind_bit(Kind::kNvfp4);
  }
  bool any = false;
  bool blocks = false;
  for (size_t i = 0; i < weight.parts().size(); ++i) {
    const PackedPart& part = weight.parts()[i];
    any = any || streamed.has(i, part);
    blocks = blocks || (streamed.has(i, part) && part.kind == Kind::kNvfp4);
  }
  if (!any) return;
  prepare(x, input_scale, blocks, input_);
  const GemvJob job{&weight, &input_, out, streamed};
  run_gemv({&job, 1});
}

void Products::multiply(const Input& x, const PackedMatrix& weight, bool few, const Input& out) {
  if (x.size() == 0) return;
  const float scale = common_scale(weight);
  // Parts that quantise their inputs differently go one by one.
  const int turns = scale < 0 ? static_cast<int>(weight.parts().size()) : 1;
  for (int i = 0; i < turns; ++i) {
    const Parts parts{scale < 0 ? i : -1, kAllKinds};
    const float input_scale = scale < 0 ? scale_of(weight.parts()[static_cast<size_t>(i)]) : scale;
    if (few) {
      run_few(x, weight, parts, input_scale, out);
    } else {
      run_gemm(x, weight, parts, input_scale, kernels_, out);
    }
  }
}

void Products::linear(const ops::Tensor& x, const PackedMatrix& weight, const ops::Tensor& out) {
  FF_ASSERT(x.cols == weight.columns() && out.cols == weight.rows() && x.rows == out.rows);
  const RowWays& ways = step_rows_.of(x.rows);
  multiply({x, ways.few}, weight, true, {out, ways.few});
  multiply({x, ways.many}, weight, false, {out, ways.many});
  clear_rows(out, ways.none);
}

void Products::activate(const ops::Tensor& gate_up, const ops::Tensor& out) {
  const int64_t n = out.cols;
  const auto row = [&](int64_t t) {
    const float* gate = gate_up.f32(t);
    const float* up = gate + n;
    const int64_t whole_columns = n / 16 * 16;
    kernels_.swiglu(gate, up, out.f32(t), whole_columns);
    if (whole_columns == n) return;
    float tail[3][16] = {};
    std::memcpy(tail[0], gate + whole_columns, static_cast<size_t>(n - whole_columns) * 4);
    std::memcpy(tail[1], up + whole_columns, static_cast<size_t>(n - whole_columns) * 4);
    kernels_.swiglu(tail[0], tail[1], tail[2], 16);
    std::memcpy(out.f32(t) + whole_columns, tail[2], static_cast<size_t>(n - whole_columns) * 4);
  };
  if (out.rows * n < 8192) {
    for (int64_t t = 0; t < out.rows; ++t) row(t);
  } else {
    pool_.parallel_for(out.rows, 1, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) row(t);
    });
  }
}

void Products::mlp(const ops::MlpParams& params, const ops::Tensor& x, const ops::Tensor& out) {
  if (x.rows == 0) return;
  const auto& gate_up = static_cast<const PackedMatrix&>(*params.gate_up);
  const auto& down = static_cast<const PackedMatrix&>(*params.down);
  const int64_t n = down.columns();
  FF_ASSERT(gate_up.rows() == 2 * n);
  const ops::Tensor both{gate_up_.get<float>(x.rows * 2 * n), ops::DType::kF32, x.rows, 2 * n, 2 * n};
  const ops::Tensor hidden{hidden_.get<float>(x.rows * n), ops::DType::kF32, x.rows, n, n};
  linear(x, gate_up, both);
  activate(both, hidden);
  linear(hidden, down, out);
}

// ---- what a step needs

void Products::add(const PackedMatrix& weight) {
  most_columns_ = std::max(most_columns_, weight.columns());
  most_parts_ = std::max(most_parts_, static_cast<int64_t>(weight.parts().size()));
}

void Products::add(const PackedExperts& experts) {
  // Those that a router chooses among; ranks may have a share of them each.
  experts_ = std::max(experts_, ranks_ == 1 ? experts.count() : (experts.count() + 1) * ranks_);
  expert_hidden_ = std::max(expert_hidden_, experts.hidden());
  expert_width_ = std::max(expert_width_, experts.intermediate());
  most_columns_ = std::max({most_columns_, experts.hidden(), experts.intermediate()});
}

void Products::reserve(int64_t rows) {
  const auto n = static_cast<size_t>(rows);
  const int64_t columns = round_up(most_columns_, kColumnAlign);
  step_rows_.reserve(rows);
  all_rows_.reserve(n);
  whole({nullptr, ops::DType::kF32, rows, 0, 0});
  part_work_.reserve(static_cast<size_t>(most_parts_));
  for (Prepared* prepared : {&input_, &shared_input_}) {
    prepared->rows.reserve(n);
    prepared->blocks.reserve(n);
    prepared->row_memory.reserve<float>(rows * columns);
    prepared->block_memory.reserve<ActivationBlock>(rows * columns / kBlockColumns);
  }
  // Up to three tables; blocks of run_gemm() have at least one tile, and at most one that is not full.
  const int64_t tiles = ceil_div(rows, int64_t{kTileTokens});
  packed_.reserve<uint8_t>((beside_ != nullptr ? 3 : 2) * 2 * tiles * packed_bytes(kTileTokens, columns));
  quantized_.reserve<float>(nvfp4_activations_ ? 2 * columns * rows : columns);
  threads_.reserve<uint8_t>(thread_scratch(columns).stride() * pool_.size());
  gate_up_.reserve<float>(rows * 2 * columns);

  // A pass of the experts has at most pass_entries_ entries, or one token.
  const int64_t entries = experts_ == 0 ? 0 : std::max(experts_, std::min(rows * experts_, pass_entries_));
  const int64_t hidden = round_up(expert_hidden_, kPairRows);
  const int64_t width = round_up(expert_width_, kColumnAlign);
  hidden_.reserve<float>(std::max(rows * columns, entries * width));
  hidden_blocks_.reserve<ActivationBlock>(entries * width / kBlockColumns);
  outputs_.reserve<float>((entries + rows) * hidden);
  logits_.reserve<float>(rows * round_up(experts_, 16));
  shared_.reserve<float>(rows * columns);
  shared_gates_.reserve<float>(rows * 16);
  const auto count = static_cast<size_t>(entries);
  hidden_input_.rows.reserve(count);
  hidden_input_.blocks.reserve(count);
  chosen_.reserve(count);
  chosen_weights_.reserve(count);
  cursor_.reserve(static_cast<size_t>(experts_));
  routing_.experts.reserve(static_cast<size_t>(experts_));
  routing_.begin.reserve(static_cast<size_t>(experts_) + 1);
  routing_.token.reserve(count);
  routing_.weight.reserve(count);
  routing_.slots.reserve(count);
  units_.reserve(count);
}

}  // namespace fourfold::cpu::gemm
