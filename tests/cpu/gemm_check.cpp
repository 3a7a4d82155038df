// Checks every matrix kernel that this processor can run against double-precision sums over dequantised weights, and
// prints its speed beside what the machine can do at most, one thread. No framework, so that the binary can be carried
// to another machine:  gemm_check [--quick [--layers]]
// Exit status 1 when a result is wrong.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "base/random.h"
#include "cpu/backend.h"
#include "cpu/ceilings.h"
#include "cpu/gemm/dispatch.h"
#include "cpu/gemm/packed.h"
#include "gemm_cases.h"

namespace {

using namespace fourfold;
using namespace fourfold::cpu;
using namespace fourfold::cpu::gemm;

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// The best of several runs of at least `least` seconds: seconds per call.
template <typename F>
double time_call(double least, F&& fn) {
  fn();
  double best = 1e30;
  for (int run = 0; run < 3; ++run) {
    const double begin = now();
    int calls = 0;
    double end = begin;
    do {
      fn();
      ++calls;
      end = now();
    } while (end - begin < least);
    best = std::min(best, (end - begin) / calls);
  }
  return best;
}

void measure(const KernelTable& kernels, double least, double read_rate, double peak) {
  ThreadPool pool(1);
  // Streaming: 192 MB of panels, well beyond any cache; in cache: one 2048 x 2048 matrix (2.25 MiB).
  const struct {
    const char* name;
    int64_t rows;
    int64_t columns;
    bool streaming;
  } shapes[] = {{"memory", 131072, 2048, true}, {"cache", 256, 2048, false}};
  const struct {
    const char* name;
    ops::Format format;
  } formats[] = {{"nvfp4", ops::Format::kNvfp4},
                 {"bf16", ops::Format::kBf16},
                 {"fp8", ops::Format::kFp8},
                 {"f32", ops::Format::kF32}};
  for (const auto& format : formats) {
    for (const auto& shape : shapes) {
      const int64_t rows = shape.streaming && format.format != ops::Format::kNvfp4 ? shape.rows / 4 : shape.rows;
      const test::Weights weights = test::make_weights(format.format, rows, shape.columns, 1);
      WeightMemory memory;
      const PackedMatrix matrix(std::span(&weights.source, 1), memory, pool);
      const test::Tokens tokens = test::make_tokens(kGemvTokens, shape.columns, 2);
      std::vector<ActivationBlock> blocks(static_cast<size_t>(kGemvTokens * shape.columns / 16));
      const ActivationBlock* block_rows[kGemvTokens];
      for (int t = 0; t < kGemvTokens; ++t) {
        ActivationBlock* to = blocks.data() + t * shape.columns / 16;
        kernels.quantize(tokens.rows[static_cast<size_t>(t)], shape.columns, to);
        block_rows[t] = to;
      }
      alignas(64) float out[kGemvPanels * kGemvTokens * kPanelRows];
      const PackedPart& part = matrix.parts()[0];
      for (const int m : {1, 2, 4}) {
        const double seconds = time_call(least, [&] {
          for (int64_t i = 0; i < part.panels; i += kGemvPanels) {
            Panel pair[kGemvPanels];
            const int count = part.pair(i, part.panels, pair);
            if (format.format == ops::Format::kNvfp4) {
              kernels.gemv_nvfp4(pair, count, block_rows, m, out);
            } else {
              kernels.gemv_float(pair, count, tokens.rows.data(), m, out);
            }
          }
        });
        const double rate = static_cast<double>(matrix.bytes()) / seconds;
        fmt::print("  gemv {:5} {:6} {:6}x{} m={}: {:6.2f} GB/s  {:6.2f} Gweights/s{}\n", format.name, shape.name, rows,
                   shape.columns, m, rate * 1e-9, static_cast<double>(rows * shape.columns) / seconds * 1e-9,
                   shape.streaming ? fmt::format("  {:.0f} % of read", 100 * rate / read_rate) : std::string());
        if (shape.streaming && m == 1) std::fflush(stdout);
      }
    }
  }
  for (const auto& format : formats) {
    for (const int64_t columns : {2048, 512}) {
      const int64_t rows = columns == 2048 ? 512 : 1024;
      const test::Weights weights = test::make_weights(format.format, rows, columns, 1);
      WeightMemory memory;
      const PackedMatrix matrix(std::span(&weights.source, 1), memory, pool);
      for (const int m : {1, 8, 16, 24, 96, 128}) {
        if (format.format != ops::Format::kNvfp4 && m != 16) continue;
        const test::Tokens tokens = test::make_tokens(m, columns, 2);
        HostBuffer packed(kernels.packed_bytes(m, columns));
        HostBuffer scratch(kernels.gemm_scratch);
        HostBuffer out(m * kPairRows * 4);
        const double seconds = time_call(least, [&] {
          kernels.pack(tokens.rows.data(), m, columns, packed.data());
          for (int64_t p = 0; p < matrix.panels(); p += 2) {
            const Panel panels[2] = {matrix.parts()[0].panel(p), matrix.parts()[0].panel(p + 1)};
            kernels.gemm(panels, 2, packed.data(), m, scratch.data(), static_cast<float*>(out.data()));
          }
        });
        const double rate = 2.0 * static_cast<double>(m * rows * columns) / seconds;
        fmt::print("  gemm {:5} {}x{} m={:2}: {:7.1f} GFLOP/s  {:3.0f} % of peak\n", format.name, rows, columns, m,
                   rate * 1e-9, 100 * rate / peak);
      }
    }
  }
}

// One mixture-of-experts layer of the 35B-A3B shape: 256 experts of 512, top 8, hidden 2048, shared expert of 512; its
// weights are larger than any cache.
void measure_layer(Isa isa, int threads, const Ceilings& limits, double least) {
  CpuOptions options;
  options.isa = isa;
  options.threads = threads;
  const auto on = make_backend(options);
  const int64_t hidden = 2048, width = 512, count = 256, top_k = 8;
  const test::Weights gate = test::make_weights(ops::Format::kNvfp4, width, hidden, 1);
  const test::Weights up = test::make_weights(ops::Format::kNvfp4, width, hidden, 2);
  const test::Weights down = test::make_weights(ops::Format::kNvfp4, hidden, width, 3);
  const test::Weights router = test::make_weights(ops::Format::kF32, count, hidden, 4);
  const test::Weights one = test::make_weights(ops::Format::kF32, 1, hidden, 5);
  const double load_begin = now();
  const auto experts = on->load_experts(count,
                                        [&](int64_t) {
                                          return ops::ExpertSource{gate.source, up.source, down.source};
                                        },
                                        {});
  const double load_seconds = now() - load_begin;
  const std::vector<ops::MatrixSource> both = {gate.source, up.source};
  const auto shared_gate_up = on->load_matrix(both);
  const auto shared_down = on->load_matrix({&down.source, 1});
  const auto router_matrix = on->load_matrix({&router.source, 1});
  const auto shared_gate = on->load_matrix({&one.source, 1});
  ops::MoeParams params;
  params.router = router_matrix.get();
  params.experts = experts.get();
  params.top_k = top_k;
  params.shared_gate_up = shared_gate_up.get();
  params.shared_down = shared_down.get();
  params.shared_gate = shared_gate.get();
  const int64_t most = 512;
  const test::Tokens tokens = test::make_tokens(most, hidden, 6);
  const auto in = on->allocate(most * hidden * 4);
  const auto out = on->allocate(most * hidden * 4);
  std::memcpy(in->data(), tokens.values.data(), static_cast<size_t>(most * hidden) * 4);
  const ops::Tensor x{in->data(), ops::DType::kF32, most, hidden, hidden};
  const ops::Tensor y{out->data(), ops::DType::kF32, most, hidden, hidden};
  const double fixed_bytes =
      static_cast<double>(shared_gate_up->bytes() + shared_down->bytes() + router_matrix->bytes());
  fmt::print("  layer, {} threads: load {:.1f} GB/s\n", threads,
             static_cast<double>(count * experts->bytes_per_expert()) / load_seconds * 1e-9);
  // Another token each time, so that experts come from memory.
  int64_t next = 0;
  const double decode = time_call(least, [&] {
    const int64_t t = next++ % most;
    on->moe(params, x.slice_rows(t, t + 1), y.slice_rows(t, t + 1));
  });
  const double bytes = fixed_bytes + static_cast<double>(top_k * experts->bytes_per_expert());
  fmt::print("  layer, {} threads: decode {:.0f} us, {:.2f} GB/s = {:.0f} % of read, {:.2f} GB/s per core\n", threads,
             decode * 1e6, bytes / decode * 1e-9, 100 * bytes / decode / limits.read_bytes_per_second,
             bytes / decode / threads * 1e-9);
  const double prefill = time_call(least, [&] { on->moe(params, x, y); });
  const double flops = 2.0 * most * hidden * (3.0 * width * (top_k + 1) + count + 1);
  fmt::print("  layer, {} threads: prefill 512 tokens {:.1f} ms, {:.1f} GFLOP/s per core = {:.0f} % of peak\n", threads,
             prefill * 1e3, flops / prefill / threads * 1e-9, 100 * flops / prefill / limits.peak(isa));
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  const bool quick = argc > 1 && std::strcmp(argv[1], "--quick") == 0;
  const bool layers_only = argc > 2 && std::strcmp(argv[2], "--layers") == 0;
  int wrong = 0;
  for (const KernelTable* kernels : gemm::runnable_kernels()) {
    std::string problem;
    const int cases = test::check_kernels(*kernels, problem);
    fmt::print("{}: {} cases, {}\n", kernels->name, cases, problem.empty() ? "all right" : problem);
    if (!problem.empty()) wrong = 1;
  }
  std::fflush(stdout);
  const Ceilings limits = CeilingMeter(1, best_isa()).measure();
  fmt::print(
      "read {:.1f} GB/s, fp32 FMA {:.0f} (AVX2) {:.0f} (AVX-512) {:.0f} (NEON), bf16 {:.0f} (AVX-512) {:.0f} (AMX) "
      "{:.0f} (bfmmla) GFLOP/s, one thread\n",
      limits.read_bytes_per_second * 1e-9, limits.fma_avx2 * 1e-9, limits.fma_avx512 * 1e-9, limits.fma_neon * 1e-9,
      limits.bf16_avx512 * 1e-9, limits.bf16_amx * 1e-9, limits.bf16_mmla * 1e-9);
  for (const int threads : {1, 2}) {
    for (const Isa isa : supported_isas()) {
      if (isa == Isa::kReference) continue;
      const Ceilings of = CeilingMeter(threads, isa).measure();
      fmt::print("{}: read {:.1f} GB/s, peak {:.0f} GFLOP/s, {} threads\n", isa_name(isa),
                 of.read_bytes_per_second * 1e-9, of.peak(isa) * 1e-9, threads);
      measure_layer(isa, threads, of, quick ? 0.15 : 0.5);
    }
  }
  if (layers_only) return wrong;
  for (const KernelTable* kernels : gemm::runnable_kernels()) {
    const std::string name = kernels->name;
    const double peak = name == "amx"    ? limits.bf16_amx
                        : name == "avx2" ? limits.fma_avx2
                                         : std::max(limits.fma_avx512, limits.fma_neon);
    fmt::print("{}\n", kernels->name);
    measure(*kernels, quick ? 0.02 : 0.1, limits.read_bytes_per_second, peak);
  }
  return wrong;
}
