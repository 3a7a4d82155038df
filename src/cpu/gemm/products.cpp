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

// To NVFP4 and back, as the reference does it. `codes` holds columns bytes.
void fake_quantize(const float* x, int64_t columns, float input_scale, uint8_t* codes, float* out) {
  const auto n = static_cast<size_t>(columns);
  const std::span<uint8_t> elements(codes, n / 2);
  const std::span<uint8_t> scales(codes + n / 2, n / nvfp4::kBlock);
  nvfp4::quantize_activations({x, n}, 1.0f / input_scale, elements, scales);
  nvfp4::dequantize_row(elements, scales, input_scale, {out, n});
}

}  // namespace

Products::Products(const KernelTable& kernels, const KernelTable& wide, ThreadPool& pool, bool nvfp4_activations)
    : kernels_(kernels), wide_(wide), pool_(pool), nvfp4_activations_(nvfp4_activations) {}

uint8_t* Products::thread_scratch(int64_t bytes, int64_t& stride) {
  stride = round_up(bytes, 4096) + 128;
  return threads_.get<uint8_t>(stride * pool_.size());
}

float Products::common_scale(const PackedMatrix& matrix) const {
  const float scale = scale_of(matrix.parts()[0]);
  for (const PackedPart& part : matrix.parts()) {
    if (scale_of(part) != scale) return -1.0f;
  }
  return scale;
}

void Products::prepare(const ops::Tensor& x, float input_scale, bool blocks, Input& input) {
  const int64_t tokens = x.rows;
  const int64_t columns = x.cols;
  const auto n = static_cast<size_t>(tokens);
  input.rows.resize(n);
  if (input_scale > 0 || columns % 4 != 0) {
    const int64_t stride = round_up(columns, kColumnAlign);
    float* rows = input.row_memory.get<float>(tokens * stride);
    uint8_t* codes = quantized_.get<uint8_t>(columns);
    for (int64_t t = 0; t < tokens; ++t) {
      float* row = rows + t * stride;
      if (input_scale > 0) {
        fake_quantize(x.f32(t), columns, input_scale, codes, row);
      } else {
        std::memcpy(row, x.f32(t), static_cast<size_t>(columns) * 4);
      }
      std::fill(row + columns, row + stride, 0.0f);
      input.rows[static_cast<size_t>(t)] = row;
    }
  } else {
    for (int64_t t = 0; t < tokens; ++t) input.rows[static_cast<size_t>(t)] = x.f32(t);
  }
  input.blocks.clear();
  if (!blocks) return;
  input.blocks.resize(n);
  const int64_t count = columns / kBlockColumns;
  auto* memory = input.block_memory.get<ActivationBlock>(tokens * count);
  for (int64_t t = 0; t < tokens; ++t) {
    kernels_.quantize(input.rows[static_cast<size_t>(t)], columns, memory + t * count);
    input.blocks[static_cast<size_t>(t)] = memory + t * count;
  }
}

void Products::gemv_panels(const Panel* panels, int count, const Input& input, int64_t first, int tokens, float* out) {
  if (panels[0].kind == Kind::kNvfp4) {
    kernels_.gemv_nvfp4(panels, count, input.blocks.data() + first, tokens, out);
  } else {
    kernels_.gemv_float(panels, count, input.rows.data() + first, tokens, out);
  }
}

void Products::run_gemv(std::span<const GemvJob> jobs) {
  int64_t panels = 0;
  int64_t bytes = 0;
  for (const GemvJob& job : jobs) {
    for (const PackedPart& part : job.matrix->parts()) panels += part.panels;
    bytes += job.matrix->bytes();
  }
  const auto work = [&](int, int64_t begin, int64_t end) {
    alignas(64) float sums[kGemvPanels * kGemvTokens * kPanelRows];
    int64_t base = 0;
    for (const GemvJob& job : jobs) {
      for (const PackedPart& part : job.matrix->parts()) {
        const int64_t from = std::max(begin - base, int64_t{0});
        const int64_t to = std::min(end - base, part.panels);
        for (int64_t first = from; first < to; first += kGemvPanels) {
          Panel pair[kGemvPanels];
          const int count = part.pair(first, to, pair);
          for (int64_t t = 0; t < job.out.rows; t += kGemvTokens) {
            const int tokens = static_cast<int>(std::min<int64_t>(kGemvTokens, job.out.rows - t));
            gemv_panels(pair, count, *job.input, t, tokens, sums);
            for (int p = 0; p < count; ++p) {
              const int64_t panel = first + p;
              const auto n = static_cast<size_t>(part.rows_of(panel)) * sizeof(float);
              for (int i = 0; i < tokens; ++i) {
                std::memcpy(job.out.f32(t + i) + part.first_row + panel * kPanelRows,
                            sums + (p * kGemvTokens + i) * kPanelRows, n);
              }
            }
          }
        }
        base += part.panels;
      }
    }
  };
  if (bytes * jobs[0].out.rows <= kSerialBytes) return work(0, 0, panels);
  // As many bytes for each thread: the first panel that begins at or behind its share.
  const auto split = [&](int thread) {
    const int64_t wanted = bytes / pool_.size() * thread;
    int64_t first = 0;
    int64_t at = 0;
    for (const GemvJob& job : jobs) {
      for (const PackedPart& part : job.matrix->parts()) {
        const int64_t whole = part.panels * part.stride;
        if (thread < pool_.size() && at + whole > wanted) {
          return first + ceil_div(wanted - at, part.stride);
        }
        at += whole;
        first += part.panels;
      }
    }
    return panels;
  };
  // Whole pairs: a panel on its own is one stream of memory, and slower.
  const int64_t grain = round_up(std::max<int64_t>(1, panels * kUnitBytes / bytes), int64_t{kGemvPanels});
  pool_.parallel_ranges(panels, grain, split, work);
}

void Products::run_gemm(const ops::Tensor& x, const PackedMatrix& weight, int only_part, float input_scale, bool wide,
                        const ops::Tensor& out) {
  const int64_t columns = x.cols;
  // Blocks of whole tiles: a tile takes nearly as long with fewer tokens.
  const int64_t tiles = ceil_div(x.rows, int64_t{kTileTokens});
  const int64_t blocks = ceil_div(tiles, int64_t{kernels_.gemm_tokens / kTileTokens});
  const auto block_begin = [&](int64_t b) { return std::min(x.rows, tiles * b / blocks * kTileTokens); };

  // Pack for each kernel table that a part needs.
  struct Packed {
    const KernelTable* table;
    uint8_t* data = nullptr;
    int64_t stride = 0;
    bool used = false;
  } packed[2] = {{&kernels_}, {&wide_}};
  const auto table_of = [&](const PackedPart& part) -> Packed& { return packed[part.fits(kernels_) && !wide ? 0 : 1]; };
  struct PartWork {
    const PackedPart* part;
    int64_t first_pair;
  };
  std::vector<PartWork> parts;
  int64_t pairs = 0;
  int64_t bytes = 0;
  for (size_t i = 0; i < weight.parts().size(); ++i) {
    if (only_part >= 0 && only_part != static_cast<int>(i)) continue;
    const PackedPart& part = weight.parts()[i];
    parts.push_back({&part, pairs});
    pairs += ceil_div(part.panels, 2);
    bytes += part.panels * part.stride;
    table_of(part).used = true;
  }
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
    quantized = quantized_.get<float>(2 * columns * x.rows);  // the rows, then room for their codes
    auto* codes = reinterpret_cast<uint8_t*>(quantized + columns * x.rows);
    pool_.parallel_for(x.rows, 4, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        fake_quantize(x.f32(t), columns, input_scale, codes + t * columns, quantized + t * columns);
      }
    });
  }
  for_units(blocks, [&](int, int64_t b) {
    const float* rows[kGemmTokens];
    const int64_t begin = block_begin(b);
    const int64_t n = block_begin(b + 1) - begin;
    for (int64_t t = 0; t < n; ++t) {
      rows[t] = quantized != nullptr ? quantized + (begin + t) * columns : x.f32(begin + t);
    }
    for (const Packed& p : packed) {
      if (p.used) p.table->pack(rows, n, columns, p.data + b * p.stride);
    }
  });

  // Units of a few pairs of panels; all units of one block of tokens come together.
  const int64_t pair_bytes = std::max<int64_t>(1, bytes / pairs);
  const int64_t grain =
      std::clamp<int64_t>(pairs * blocks / (8 * pool_.size()), 1, std::max<int64_t>(1, kUnitBytes / pair_bytes));
  const int64_t units_per_block = ceil_div(pairs, grain);
  const int64_t sums_bytes = int64_t{kGemmTokens} * kPairRows * 4;
  int64_t stride = 0;
  uint8_t* scratch = thread_scratch(sums_bytes + std::max(kernels_.gemm_scratch, wide_.gemm_scratch), stride);
  for_units(units_per_block * blocks, [&](int thread, int64_t unit) {
    const int64_t b = unit / units_per_block;
    const int64_t first = unit % units_per_block * grain;
    const int64_t begin = block_begin(b);
    const int64_t tokens = block_begin(b + 1) - begin;
    auto* sums = reinterpret_cast<float*>(scratch + thread * stride);
    uint8_t* kernel_scratch = scratch + thread * stride + sums_bytes;
    for (int64_t pair = first; pair < std::min(first + grain, pairs); ++pair) {
      const auto* work = parts.data() + parts.size() - 1;
      while (work->first_pair > pair) --work;
      const PackedPart& part = *work->part;
      const int64_t p = 2 * (pair - work->first_pair);
      const int count = p + 1 < part.panels ? 2 : 1;
      const Panel panels[2] = {part.panel(p), part.panel(p + count - 1)};
      const Packed& from = table_of(part);
      from.table->gemm(panels, count, from.data + b * from.stride, tokens, kernel_scratch, sums);
      const auto n = static_cast<size_t>(std::min<int64_t>(kPairRows, part.rows - p * kPanelRows)) * sizeof(float);
      for (int64_t t = 0; t < tokens; ++t) {
        std::memcpy(out.f32(begin + t) + part.first_row + p * kPanelRows, sums + t * kPairRows, n);
      }
    }
  });
}

void Products::linear(const ops::Tensor& x, const PackedMatrix& weight, const ops::Tensor& out) {
  FF_ASSERT(x.cols == weight.columns() && out.cols == weight.rows() && x.rows == out.rows);
  if (x.rows == 0) return;
  const float scale = common_scale(weight);
  if (scale < 0) {  // parts quantise their inputs differently
    for (size_t i = 0; i < weight.parts().size(); ++i) {
      run_gemm(x, weight, static_cast<int>(i), scale_of(weight.parts()[i]), false, out);
    }
    return;
  }
  if (x.rows > kernels_.gemv_limit) return run_gemm(x, weight, -1, scale, false, out);
  bool blocks = false;
  for (const PackedPart& part : weight.parts()) blocks |= part.kind == Kind::kNvfp4;
  prepare(x, scale, blocks, input_);
  const GemvJob job{&weight, &input_, out};
  run_gemv({&job, 1});
}

void Products::activate(const ops::Tensor& gate_up, const ops::Tensor& out) {
  const int64_t n = out.cols;
  const auto row = [&](int64_t t) {
    const float* gate = gate_up.f32(t);
    const float* up = gate + n;
    const int64_t whole = n / 16 * 16;
    kernels_.swiglu(gate, up, out.f32(t), whole);
    if (whole == n) return;
    float tail[3][16] = {};
    std::memcpy(tail[0], gate + whole, static_cast<size_t>(n - whole) * 4);
    std::memcpy(tail[1], up + whole, static_cast<size_t>(n - whole) * 4);
    kernels_.swiglu(tail[0], tail[1], tail[2], 16);
    std::memcpy(out.f32(t) + whole, tail[2], static_cast<size_t>(n - whole) * 4);
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

}  // namespace fourfold::cpu::gemm
