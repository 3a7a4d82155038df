// Times the operations at the sizes of one layer of Qwen3.5-35B-A3B with random weights. Every call works on memory
// that the calls before it pushed out of the caches, as in a model with many layers: weights, caches and states are
// rotated.
#include "cmd/bench_ops.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/interrupt.h"
#include "base/json.h"
#include "base/math.h"
#include "base/random.h"
#include "cmd/arguments.h"
#include "cmd/options.h"
#include "cpu/backend.h"
#include "cpu/ceilings.h"
#include "cpu/host/cpu_backend.h"
#include "nvfp4/layout.h"
#include "ops/cost.h"
#include "ops/ops.h"

namespace fourfold::cmd {
namespace {

using ops::Cost;
using ops::Format;
using ops::Tensor;

// ---- sizes of Qwen3.5-35B-A3B

constexpr int64_t kHidden = 2048;
constexpr int64_t kExperts = 256;
constexpr int64_t kTopK = 8;
constexpr int64_t kWidth = 512;  // of an expert, and of the shared one
constexpr int64_t kHeads = 16;
constexpr int64_t kKvHeads = 2;
constexpr int64_t kHeadDim = 256;
constexpr int64_t kKeyHeads = 16;
constexpr int64_t kValueHeads = 32;
constexpr int64_t kStateDim = 128;
constexpr int64_t kChannels = 2 * kKeyHeads * kStateDim + kValueHeads * kStateDim;
constexpr int64_t kVocabulary = 248320;
constexpr int64_t kPage = 64;

// ---- random weights: any bytes are a weight, so they are drawn without quantising anything

struct RawMatrix {
  std::vector<uint64_t> elements, scales;
  float grid = 0.001f;
  ops::MatrixSource source;
};

void fill(Random& random, std::vector<uint64_t>& words, int64_t bytes) {
  words.resize(static_cast<size_t>(ceil_div(bytes, 8)));
  for (uint64_t& word : words) word = random.next();
}

void make_raw(Random& random, Format format, int64_t rows, int64_t columns, RawMatrix& raw) {
  ops::MatrixSource& source = raw.source;
  source.name = "random weight";
  source.format = format;
  source.rows = rows;
  source.columns = columns;
  switch (format) {
    case Format::kNvfp4: {
      fill(random, raw.elements, rows * columns / 2);
      fill(random, raw.scales, rows * columns / nvfp4::kBlock);
      // e4m3 codes 0x30 to 0x37: 0.5 to 0.94
      for (uint64_t& word : raw.scales) word = (word & 0x0707070707070707u) | 0x3030303030303030u;
      source.block_scales = reinterpret_cast<const uint8_t*>(raw.scales.data());
      source.tensor_scale = 0.01f;
      break;
    }
    case Format::kFp8: {
      fill(random, raw.elements, rows * columns);
      // exponents up to 11, so no NaN
      for (uint64_t& word : raw.elements) word &= 0xdfdfdfdfdfdfdfdfu;
      source.grid_scales = &raw.grid;
      source.scale_rows = rows;
      source.scale_columns = columns;
      break;
    }
    default: {
      FF_ASSERT(format == Format::kBf16);
      fill(random, raw.elements, rows * columns * 2);
      // sign and mantissa random, exponent 2^-6
      for (uint64_t& word : raw.elements) word = (word & 0x807f807f807f807fu) | 0x3c803c803c803c80u;
    }
  }
  source.data = raw.elements.data();
}

// ---- one measured row

struct Calls {
  template <typename F>
  Calls(F&& function) : run(std::forward<F>(function)) {}  // NOLINT: most operations are their calls
  template <typename F, typename G>
  Calls(F&& function, G&& restore) : run(std::forward<F>(function)), before(std::forward<G>(restore)) {}
  std::function<void(int64_t)> run;  // call i
  std::function<void()> before;      // untimed, before each call; may be empty
};

struct Bench {
  std::string name;
  Cost cost;                    // of one call
  std::function<Calls()> make;  // builds the operands
};

struct MoeWeights {
  std::unique_ptr<ops::Matrix> router, shared_gate_up, shared_down, shared_gate;
  std::unique_ptr<ops::Experts> experts;
  ops::MoeParams params;
};

class Setting {
 public:
  Setting(cpu::CpuBackend& backend, int64_t cold_bytes) : backend_(backend), cold_bytes_(cold_bytes) {}
  cpu::CpuBackend& backend() { return backend_; }
  // How many operands of `bytes` a call must rotate through to find none of them in a cache.
  int64_t copies(int64_t bytes) const { return std::clamp<int64_t>(ceil_div(cold_bytes_, bytes), 1, 64); }

  std::shared_ptr<ops::Buffer> activations(int64_t rows, int64_t cols, uint64_t seed, Tensor& tensor) {
    std::shared_ptr<ops::Buffer> buffer = backend_.allocate(rows * cols * 4);
    tensor = backend_.tensor(*buffer, rows, cols);
    Random random(seed);
    for (int64_t i = 0; i < rows * cols; ++i) tensor.f32()[i] = static_cast<float>(random.uniform(-1.7, 1.7));
    return buffer;
  }
  ops::Vector vector(int64_t count, double low, double high) {
    Random random(7);
    std::vector<float> values(static_cast<size_t>(count));
    for (float& value : values) value = static_cast<float>(random.uniform(low, high));
    return backend_.load_vector(values);
  }
  std::unique_ptr<ops::Matrix> matrix(Random& random, Format format, int64_t rows, int64_t columns) {
    RawMatrix raw;
    make_raw(random, format, rows, columns, raw);
    return backend_.load_matrix(std::span(&raw.source, 1));
  }

  std::shared_ptr<MoeWeights> moe_weights;

 private:
  cpu::CpuBackend& backend_;
  int64_t cold_bytes_;
};

// Sequences of `tokens` each at `position`, all in one batch, pages in order.
struct Step {
  std::vector<int32_t> tokens, pages;
  std::vector<ops::Sequence> sequences;

  Step(int64_t count, int64_t tokens_each, int64_t position) {
    const int64_t pages_each = ceil_div(position + tokens_each, kPage);
    tokens.assign(static_cast<size_t>(count * tokens_each), 0);
    for (int64_t page = 0; page < count * pages_each; ++page) pages.push_back(static_cast<int32_t>(page));
    for (int64_t s = 0; s < count; ++s) {
      ops::Sequence sequence;
      sequence.first = static_cast<int32_t>(s * tokens_each);
      sequence.count = static_cast<int32_t>(tokens_each);
      sequence.position = static_cast<int32_t>(position);
      sequence.state_in = static_cast<int32_t>(s);
      sequence.pages = std::span(pages).subspan(static_cast<size_t>(s * pages_each), static_cast<size_t>(pages_each));
      sequences.push_back(sequence);
    }
  }
  ops::Batch batch() const { return {tokens, sequences, {}}; }
};

Bench linear(Setting& setting, const char* what, Format format, int64_t rows, int64_t columns, int64_t tokens) {
  ops::MatrixSource shape;
  shape.format = format;
  shape.rows = rows;
  shape.columns = columns;
  shape.scale_rows = rows;
  shape.scale_columns = columns;
  const int64_t bytes = shape.bytes();
  return {fmt::format("linear {} {} T={}", what, ops::format_name(format), tokens),
          ops::linear_cost(tokens, rows, columns, bytes), [=, &setting] {
            Random random(1);
            auto copies = std::make_shared<std::vector<std::unique_ptr<ops::Matrix>>>();
            for (int64_t i = 0; i < setting.copies(bytes); ++i) {
              copies->push_back(setting.matrix(random, format, rows, columns));
            }
            Tensor x, out;
            auto x_memory = setting.activations(tokens, columns, 2, x);
            auto out_memory = setting.activations(tokens, rows, 3, out);
            auto step = std::make_shared<Step>(1, tokens, 0);
            return [=, &setting](int64_t call) {
              (void)x_memory, (void)out_memory;
              setting.backend().begin_step(step->batch());
              setting.backend().linear(x, *(*copies)[static_cast<size_t>(call) % copies->size()], out);
            };
          }};
}

Bench moe(Setting& setting, int64_t tokens) {
  const int64_t expert_bytes = 3 * kHidden * kWidth * 9 / 16;
  Cost cost = ops::experts_cost(tokens, kTopK, ops::expected_touched_experts(tokens, kTopK, kExperts), kHidden, kWidth,
                                expert_bytes);
  cost += ops::linear_cost(tokens, kExperts, kHidden, kExperts * kHidden * 2);
  cost += ops::linear_cost(tokens, 3 * kWidth, kHidden, expert_bytes);
  return {fmt::format("moe 256 experts nvfp4 T={}", tokens), cost, [=, &setting] {
            std::shared_ptr<MoeWeights>& weights = setting.moe_weights;  // 450 MB: built once for all token counts
            if (!weights) {
              weights = std::make_shared<MoeWeights>();
              Random random(4);
              RawMatrix gate, up, down;
              weights->experts =
                  setting.backend().load_experts(kExperts,
                                                 [&](int64_t) {
                                                   make_raw(random, Format::kNvfp4, kWidth, kHidden, gate);
                                                   make_raw(random, Format::kNvfp4, kWidth, kHidden, up);
                                                   make_raw(random, Format::kNvfp4, kHidden, kWidth, down);
                                                   return ops::ExpertSource{gate.source, up.source, down.source};
                                                 },
                                                 {});
              weights->router = setting.matrix(random, Format::kBf16, kExperts, kHidden);
              weights->shared_gate_up = setting.matrix(random, Format::kNvfp4, 2 * kWidth, kHidden);
              weights->shared_down = setting.matrix(random, Format::kNvfp4, kHidden, kWidth);
              weights->shared_gate = setting.matrix(random, Format::kBf16, 1, kHidden);
              weights->params.router = weights->router.get();
              weights->params.experts = weights->experts.get();
              weights->params.top_k = kTopK;
              weights->params.shared_gate_up = weights->shared_gate_up.get();
              weights->params.shared_down = weights->shared_down.get();
              weights->params.shared_gate = weights->shared_gate.get();
            }
            // Other tokens each time, so that other experts are read.
            const int64_t variants = std::clamp<int64_t>(256 / tokens, 1, 64);
            Tensor x, out;
            auto x_memory = setting.activations(tokens * variants, kHidden, 5, x);
            auto out_memory = setting.activations(tokens, kHidden, 6, out);
            auto step = std::make_shared<Step>(1, tokens, 0);
            return [=, &setting, params = weights->params](int64_t call) {
              (void)x_memory, (void)out_memory;
              const int64_t first = call % variants * tokens;
              setting.backend().begin_step(step->batch());
              setting.backend().moe(params, x.slice_rows(first, first + tokens), out);
            };
          }};
}

Bench mlp(Setting& setting, int64_t tokens) {
  const int64_t hidden = 5120;  // of the dense 27B model
  const int64_t width = 17408;
  const int64_t bytes = 3 * hidden * width * 9 / 16;
  return {fmt::format("mlp 5120 x 17408 nvfp4 T={}", tokens), ops::linear_cost(tokens, 3 * width, hidden, bytes),
          [=, &setting] {
            Random random(7);
            auto gate_up = std::make_shared<std::unique_ptr<ops::Matrix>>(
                setting.matrix(random, Format::kNvfp4, 2 * width, hidden));
            auto down =
                std::make_shared<std::unique_ptr<ops::Matrix>>(setting.matrix(random, Format::kNvfp4, hidden, width));
            Tensor x, out;
            auto x_memory = setting.activations(tokens, hidden, 8, x);
            auto out_memory = setting.activations(tokens, hidden, 9, out);
            auto step = std::make_shared<Step>(1, tokens, 0);
            return [=, &setting](int64_t) {
              (void)x_memory, (void)out_memory;
              setting.backend().begin_step(step->batch());
              setting.backend().mlp({gate_up->get(), down->get()}, x, out);
            };
          }};
}

Bench attention(Setting& setting, int64_t sequences, int64_t tokens, int64_t cached) {
  const bool half = setting.backend().isa() != cpu::Isa::kReference;
  Cost cost;
  for (int64_t s = 0; s < sequences; ++s) {
    cost += ops::attention_cost(tokens, cached, kHeads, kKvHeads, kHeadDim, half ? 2 : 4);
  }
  return {fmt::format("attention {} x T={} after {}", sequences, tokens, cached), cost, [=, &setting] {
            auto step = std::make_shared<Step>(sequences, tokens, cached);
            ops::KvCacheShape shape;
            shape.kv_heads = kKvHeads;
            shape.head_dim = kHeadDim;
            shape.pages = static_cast<int64_t>(step->pages.size());
            shape.page_size = kPage;
            shape.layers = setting.copies(shape.pages * kPage * kKvHeads * kHeadDim * 2 * (half ? 2 : 4));
            std::shared_ptr<ops::KvCache> cache = setting.backend().make_kv_cache(shape);
            auto& host = static_cast<cpu::HostKvCache&>(*cache);
            Random random(10);
            for (int64_t layer = 0; layer < shape.layers; ++layer) {
              for (int64_t page = 0; page < shape.pages; ++page) {
                for (int64_t i = 0; i < kKvHeads * 2 * host.values_offset(); ++i) {
                  const uint64_t word = random.next();
                  if (half) {
                    host.keys<uint16_t>(layer, page, 0)[i] = static_cast<uint16_t>((word & 0x83ff) | 0x3800);
                  } else {
                    host.keys<float>(layer, page, 0)[i] = static_cast<float>(word >> 40) * 0x1p-24f - 0.5f;
                  }
                }
              }
            }
            const int64_t rows = sequences * tokens;
            Tensor q, k, v, out;
            auto memory = std::make_shared<std::vector<std::shared_ptr<ops::Buffer>>>();
            memory->push_back(setting.activations(rows, kHeads * kHeadDim * 2, 11, q));
            memory->push_back(setting.activations(rows, kKvHeads * kHeadDim, 12, k));
            memory->push_back(setting.activations(rows, kKvHeads * kHeadDim, 13, v));
            memory->push_back(setting.activations(rows, kHeads * kHeadDim, 14, out));
            auto norm = std::make_shared<ops::Vector>(setting.vector(kHeadDim, 0.5, 1.5));
            // The operation overwrites queries and keys: normalised again and again, most of them become denormals.
            struct Given {
              std::vector<float> q, k;
            };
            auto given = std::make_shared<Given>();
            given->q.assign(q.f32(0), q.f32(0) + rows * q.stride);
            given->k.assign(k.f32(0), k.f32(0) + rows * k.stride);
            const auto restore = [=] {
              std::copy(given->q.begin(), given->q.end(), q.f32(0));
              std::copy(given->k.begin(), given->k.end(), k.f32(0));
            };
            const auto run = [=, &setting](int64_t call) {
              (void)memory;
              ops::AttentionParams params;
              params.heads = kHeads;
              params.kv_heads = kKvHeads;
              params.head_dim = kHeadDim;
              params.rotary_dim = 64;
              params.rope_theta = 1e7f;
              params.scale = 0.0625f;
              params.norm_eps = 1e-6f;
              params.gated = true;
              params.q_norm = norm.get();
              params.k_norm = norm.get();
              setting.backend().begin_step(step->batch());
              setting.backend().attention(params, q, k, v, *cache, call % shape.layers, out);
            };
            return Calls(run, restore);
          }};
}

Bench delta_net(Setting& setting, int64_t sequences, int64_t tokens) {
  Cost cost;
  for (int64_t s = 0; s < sequences; ++s) cost += ops::delta_net_cost(tokens, kValueHeads, kStateDim, kStateDim);
  return {fmt::format("delta_net {} x T={}", sequences, tokens), cost, [=, &setting] {
            ops::StateCacheShape shape;
            shape.slots = sequences;
            shape.key_heads = kKeyHeads;
            shape.value_heads = kValueHeads;
            shape.key_dim = kStateDim;
            shape.value_dim = kStateDim;
            shape.conv_taps = 4;
            shape.layers = setting.copies(sequences * kValueHeads * kStateDim * kStateDim * 4);
            std::shared_ptr<ops::StateCache> states = setting.backend().make_state_cache(shape);
            const int64_t rows = sequences * tokens;
            Tensor qkv, z, a, b, out;
            auto memory = std::make_shared<std::vector<std::shared_ptr<ops::Buffer>>>();
            memory->push_back(setting.activations(rows, kChannels, 15, qkv));
            memory->push_back(setting.activations(rows, kValueHeads * kStateDim, 16, z));
            memory->push_back(setting.activations(rows, kValueHeads, 17, a));
            memory->push_back(setting.activations(rows, kValueHeads, 18, b));
            memory->push_back(setting.activations(rows, kValueHeads * kStateDim, 19, out));
            struct Parameters {
              ops::Vector conv, a_log, dt_bias, norm;
            };
            auto vectors = std::make_shared<Parameters>();
            vectors->conv = setting.vector(kChannels * 4, -0.5, 0.5);
            vectors->a_log = setting.vector(kValueHeads, -3.0, 1.0);
            vectors->dt_bias = setting.vector(kValueHeads, -1.0, 1.0);
            vectors->norm = setting.vector(kStateDim, 0.5, 1.5);
            auto step = std::make_shared<Step>(sequences, tokens, 100);
            // The operation overwrites its input: applied to its own results, it would soon work on denormals.
            auto given = std::make_shared<std::vector<float>>(qkv.f32(0), qkv.f32(0) + rows * qkv.stride);
            const auto restore = [=] { std::copy(given->begin(), given->end(), qkv.f32(0)); };
            const auto run = [=, &setting](int64_t call) {
              (void)memory;
              ops::DeltaNetParams params;
              params.key_heads = kKeyHeads;
              params.value_heads = kValueHeads;
              params.key_dim = kStateDim;
              params.value_dim = kStateDim;
              params.conv_taps = 4;
              params.norm_eps = 1e-6f;
              params.conv = &vectors->conv;
              params.a_log = &vectors->a_log;
              params.dt_bias = &vectors->dt_bias;
              params.norm = &vectors->norm;
              setting.backend().begin_step(step->batch());
              setting.backend().delta_net(params, qkv, z, b, a, *states, call % shape.layers, out);
            };
            return Calls(run, restore);
          }};
}

Bench norm(Setting& setting, int64_t tokens) {
  return {fmt::format("add_rms_norm T={}", tokens), Cost{0.0, 6.0 * static_cast<double>(tokens * kHidden)},
          [=, &setting] {
            Tensor x, delta, out;
            auto memory = std::make_shared<std::vector<std::shared_ptr<ops::Buffer>>>();
            memory->push_back(setting.activations(tokens, kHidden, 20, x));
            memory->push_back(setting.activations(tokens, kHidden, 21, delta));
            memory->push_back(setting.activations(tokens, kHidden, 22, out));
            auto weight = std::make_shared<ops::Vector>(setting.vector(kHidden, 0.5, 1.5));
            auto step = std::make_shared<Step>(1, tokens, 0);
            return [=, &setting](int64_t) {
              (void)memory;
              setting.backend().begin_step(step->batch());
              setting.backend().add_rms_norm(x, delta, *weight, 1e-6f, out);
            };
          }};
}

std::vector<Bench> all_benches(Setting& setting) {
  std::vector<Bench> benches;
  for (const int64_t tokens : {1, 8, 64, 512}) {
    benches.push_back(linear(setting, "delta_net input 12352 x 2048", Format::kBf16, 12352, kHidden, tokens));
  }
  for (const int64_t tokens : {1, 512}) {
    benches.push_back(linear(setting, "attention input 9216 x 2048", Format::kFp8, 9216, kHidden, tokens));
    benches.push_back(linear(setting, "attention input 9216 x 2048", Format::kNvfp4, 9216, kHidden, tokens));
    benches.push_back(linear(setting, "output 2048 x 4096", Format::kBf16, kHidden, 4096, tokens));
  }
  benches.push_back(linear(setting, "head 248320 x 2048", Format::kNvfp4, kVocabulary, kHidden, 1));
  for (const int64_t tokens : {1, 4, 16, 64, 512}) benches.push_back(moe(setting, tokens));
  for (const int64_t tokens : {1, 64}) benches.push_back(mlp(setting, tokens));
  benches.push_back(attention(setting, 1, 1, 4096));
  benches.push_back(attention(setting, 1, 1, 32768));
  benches.push_back(attention(setting, 8, 1, 4096));
  benches.push_back(attention(setting, 1, 4, 4096));
  benches.push_back(attention(setting, 1, 512, 0));
  benches.push_back(attention(setting, 1, 512, 8192));
  benches.push_back(delta_net(setting, 1, 1));
  benches.push_back(delta_net(setting, 8, 1));
  benches.push_back(delta_net(setting, 1, 4));
  benches.push_back(delta_net(setting, 1, 64));
  benches.push_back(delta_net(setting, 1, 512));
  for (const int64_t tokens : {1, 512}) benches.push_back(norm(setting, tokens));
  return benches;
}

struct Timing {
  double median = 0, best = 0;
  int64_t calls = 0;
};

// After one call to warm up, calls until `seconds` have passed, at least five.
Timing time_calls(const Calls& calls, double seconds) {
  using Clock = std::chrono::steady_clock;
  if (calls.before) calls.before();
  calls.run(0);
  std::vector<double> times;
  double total = 0;
  while (times.size() < 5 || total < seconds) {
    throw_if_interrupted();
    if (calls.before) calls.before();
    const auto start = Clock::now();
    calls.run(static_cast<int64_t>(times.size()) + 1);
    times.push_back(std::chrono::duration<double>(Clock::now() - start).count());
    total += times.back();
    if (times.size() >= 100000) break;
  }
  std::sort(times.begin(), times.end());
  return {times[times.size() / 2], times.front(), static_cast<int64_t>(times.size())};
}

std::string time_text(double seconds) {
  if (seconds < 1e-3) return fmt::format("{:.1f} us", seconds * 1e6);
  if (seconds < 1.0) return fmt::format("{:.2f} ms", seconds * 1e3);
  return fmt::format("{:.3f} s", seconds);
}

struct Options {
  std::string isa, filter;
  int threads = 0;
  double seconds = 0.3;
  bool json = false;
};

void run(const Options& options) {
  install_interrupt_handler();
  cpu::CpuOptions cpu_options;
  if (!options.isa.empty()) cpu_options.isa = cpu::parse_isa(options.isa);
  cpu_options.threads = options.threads;
  const std::shared_ptr<ops::Backend> shared = cpu::make_backend(cpu_options);
  auto& backend = static_cast<cpu::CpuBackend&>(*shared);
  // Three times the last-level cache: what a call reads is gone when its turn comes again.
  const int64_t cold = std::clamp<int64_t>(3 * cpu::last_level_cache_bytes(), int64_t{96} << 20, int64_t{1} << 30);
  Setting setting(backend, cold);
  std::vector<Bench> benches = all_benches(setting);
  std::erase_if(benches, [&](const Bench& bench) { return bench.name.find(options.filter) == std::string::npos; });
  if (benches.empty()) fail("no operation has '{}' in its name", printable(options.filter));

  const cpu::Ceilings ceilings = cpu::CeilingMeter(options.threads, backend.isa()).measure();
  const double peak = ceilings.peak(backend.isa());
  const double read = ceilings.read_bytes_per_second;
  Json report;
  report["backend"] = backend.description();
  report["ceilings"] = {{"threads", ceilings.threads},
                        {"read_gb_per_s", read / 1e9},
                        {"fma_avx2_gflop_per_s", ceilings.fma_avx2 / 1e9},
                        {"fma_avx512_gflop_per_s", ceilings.fma_avx512 / 1e9},
                        {"bf16_avx512_gflop_per_s", ceilings.bf16_avx512 / 1e9},
                        {"bf16_amx_gflop_per_s", ceilings.bf16_amx / 1e9},
                        {"fma_neon_gflop_per_s", ceilings.fma_neon / 1e9},
                        {"bf16_mmla_gflop_per_s", ceilings.bf16_mmla / 1e9}};
  report["operations"] = Json::array();
  if (!options.json) {
    fmt::print("{}\nmeasured ceilings: read {:.1f} GB/s; GFLOP/s:", backend.description(), read / 1e9);
    const std::pair<const char*, double> rates[] = {
        {"fp32 AVX2", ceilings.fma_avx2}, {"fp32 AVX-512", ceilings.fma_avx512}, {"bf16 AVX-512", ceilings.bf16_avx512},
        {"bf16 AMX", ceilings.bf16_amx},  {"fp32 NEON", ceilings.fma_neon},      {"bf16 bfmmla", ceilings.bf16_mmla}};
    for (const auto& [name, rate] : rates) {
      if (rate > 0) fmt::print(" {:.0f} ({})", rate / 1e9, name);
    }
    fmt::print("\n\n{:<48} {:>11} {:>11} {:>7} {:>9} {:>6}  {}\n", "operation", "median", "best", "GB/s", "GFLOP/s",
               "floor", "bound by");
  }
  for (const Bench& bench : benches) {
    const Timing timing = time_calls(bench.make(), options.seconds);
    const double memory_floor = bench.cost.bytes / read;
    const double arithmetic_floor = peak > 0 ? bench.cost.flops / peak : 0;
    const double floor = std::max(memory_floor, arithmetic_floor);
    const char* bound = memory_floor > arithmetic_floor ? "memory" : "arithmetic";
    report["operations"].push_back({{"name", bench.name},
                                    {"calls", timing.calls},
                                    {"median_s", timing.median},
                                    {"best_s", timing.best},
                                    {"bytes", bench.cost.bytes},
                                    {"flops", bench.cost.flops},
                                    {"gb_per_s", bench.cost.bytes / timing.median / 1e9},
                                    {"gflop_per_s", bench.cost.flops / timing.median / 1e9},
                                    {"floor_s", floor},
                                    {"fraction_of_floor", floor / timing.median},
                                    {"bound", bound}});
    if (!options.json) {
      fmt::print("{:<48} {:>11} {:>11} {:>7.2f} {:>9.1f} {:>5.0f}%  {}\n", bench.name, time_text(timing.median),
                 time_text(timing.best), bench.cost.bytes / timing.median / 1e9, bench.cost.flops / timing.median / 1e9,
                 100.0 * floor / timing.median, bound);
      std::fflush(stdout);
    }
  }
  if (options.json) {
    fmt::print("{}\n", report.dump(2));
  } else {
    fmt::print(
        "\nfloor: the time that the measured ceilings allow, as a share of the median. Bytes are weights, caches "
        "and states once; experts as uniform routing touches them.\n");
  }
}

}  // namespace

void add_bench_ops(Command& bench_app) {
  auto options = std::make_shared<Options>();
  Command app = bench_app.add_command(
      "ops", "Time each operation of the CPU backend at the sizes of Qwen3.5-35B-A3B, beside measured ceilings");
  app.add_option("--isa", options->isa, cpu::family_isa_names() + " (default: the best one)");
  app.add_option("--threads", options->threads, "compute threads (default: FOURFOLD_THREADS, or all processors)")
      .range(1, 1024);
  app.add_option("--filter", options->filter, "only operations whose name contains this");
  app.add_option("--seconds", options->seconds, "least measuring time of an operation").real_range(0.0, 60.0);
  app.add_flag("--json", options->json, "print JSON");
  app.callback([options] { run(*options); });
}

}  // namespace fourfold::cmd
