// Checks and times the NVFP4 expert layer on Hopper.
//
//   moe_bench [--shape 397B|122B|35B|...] [--tokens 1,8,64] [--check] [--sweep] [--all-pairs] [--crowded] [--json FILE]
//
// Whole layer: routing, gate-up, SwiGLU, down, weighted sum. Timing: CUDA graph of several layers, each with its own
// uniform routing and the next of C weight copies (C so that 200 MB pass between two uses of one), median of replays.

#include <cuda.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "bench/gpu/moe_candidates.cuh"
#include "bench/gpu/moe_support.cuh"

using namespace fourfold::moe;
using bench::u16;
using bench::u32;
using bench::u8;

namespace {

struct Shape {
  const char* name;
  int experts, top_k, hidden, intermediate;
  bool relu2 = false;
};
constexpr Shape kShapes[] = {
    {"397B", 512, 10, 4096, 1024},
    {"122B", 256, 8, 3072, 1024},
    {"35B", 256, 8, 2048, 512},
    {"e512h2560i640", 512, 10, 2560, 640},
    {"e512h2560i320", 512, 10, 2560, 320},
    {"e288h4096i2048", 288, 8, 4096, 2048},
    {"e128h2688i1856", 128, 6, 2688, 1856},
    {"e128h2688i1856relu2", 128, 6, 2688, 1856, true},
    {"i704", 64, 8, 2048, 704},
    {"k16", 40, 16, 1024, 128},
    {"k1", 8, 1, 512, 64},
    {"k1relu2", 8, 1, 576, 192, true},
};

template <typename Type>
Type* device_alloc(size_t n) {
  void* p = nullptr;
  CUDA_CHECK(cudaMalloc(&p, std::max<size_t>(n, 1) * sizeof(Type)));
  return static_cast<Type*>(p);
}

size_t gate_up_packed(const Shape& s) { return packed_bytes((s.relu2 ? 1 : 2) * s.intermediate, s.hidden); }

struct Layer {
  Shape shape;
  int copies;
  u8 *codes[3], *scales[3];  // gate, up, down as in a checkpoint
  u8 *gate_up, *down;        // packed, copies of them
  size_t gate_up_bytes, down_bytes;
  float *gate_up_scales, *down_scales;
};

Layer make_layer(const Shape& s, int copies, bool adversarial) {
  Layer layer{};
  layer.shape = s;
  layer.copies = copies;
  const size_t n = static_cast<size_t>(s.experts) * s.hidden * s.intermediate;
  for (int m = 0; m < 3; ++m) {
    layer.codes[m] = device_alloc<u8>(n / 2);
    layer.scales[m] = device_alloc<u8>(n / 16);
    bench::fill_codes<<<2048, 256>>>(reinterpret_cast<u32*>(layer.codes[m]), n / 8, 1000 + m * (1ULL << 40));
    bench::fill_scales<<<2048, 256>>>(layer.scales[m], n / 16, 77 + m * (1ULL << 41), adversarial);
  }
  layer.gate_up_bytes = s.experts * gate_up_packed(s);
  layer.down_bytes = s.experts * packed_bytes(s.hidden, s.intermediate);
  layer.gate_up = device_alloc<u8>(layer.gate_up_bytes * copies);
  layer.down = device_alloc<u8>(layer.down_bytes * copies);
  int* bad = device_alloc<int>(1);
  CUDA_CHECK(cudaMemset(bad, 0, 4));
  const int second = s.relu2 ? 0 : 1;
  bench::repack<<<4096, 128>>>(layer.codes[0], layer.scales[0], layer.codes[second], layer.scales[second],
                               s.intermediate, s.hidden, !s.relu2, s.intermediate / (s.relu2 ? 16 : 8),
                               layer.gate_up_bytes / kUnitBytes, layer.gate_up, bad);
  bench::repack<<<4096, 128>>>(layer.codes[2], layer.scales[2], layer.codes[2], layer.scales[2], s.hidden,
                               s.intermediate, false, s.hidden / 16, layer.down_bytes / kUnitBytes, layer.down, bad);
  for (int c = 1; c < copies; ++c) {
    CUDA_CHECK(cudaMemcpyAsync(layer.gate_up + c * layer.gate_up_bytes, layer.gate_up, layer.gate_up_bytes,
                               cudaMemcpyDeviceToDevice));
    CUDA_CHECK(
        cudaMemcpyAsync(layer.down + c * layer.down_bytes, layer.down, layer.down_bytes, cudaMemcpyDeviceToDevice));
  }
  int host_bad = 0;
  CUDA_CHECK(cudaMemcpy(&host_bad, bad, 4, cudaMemcpyDeviceToHost));
  if (host_bad) std::printf("repack met a NaN scale\n");
  std::vector<float> gu(s.experts * 2), d(s.experts);
  const float rms = adversarial ? 2.9f * 140.0f : 2.9f * 1.1f;
  for (int e = 0; e < s.experts; ++e) {
    gu[s.relu2 ? e : e * 2] = (0.8f + 0.4f * bench::uniform(e)) / (rms * std::sqrt(static_cast<float>(s.hidden)));
    if (!s.relu2)
      gu[e * 2 + 1] = 2.0f * (0.8f + 0.4f * bench::uniform(e + 5000)) / (rms * std::sqrt(static_cast<float>(s.hidden)));
    d[e] = (0.8f + 0.4f * bench::uniform(e + 9000)) / (rms * std::sqrt(static_cast<float>(s.intermediate)));
  }
  layer.gate_up_scales = device_alloc<float>(gu.size());
  layer.down_scales = device_alloc<float>(d.size());
  CUDA_CHECK(cudaMemcpy(layer.gate_up_scales, gu.data(), gu.size() * 4, cudaMemcpyHostToDevice));
  CUDA_CHECK(cudaMemcpy(layer.down_scales, d.data(), d.size() * 4, cudaMemcpyHostToDevice));
  CUDA_CHECK(cudaFree(bad));
  return layer;
}

void free_layer(Layer& layer) {
  for (int m = 0; m < 3; ++m) {
    CUDA_CHECK(cudaFree(layer.codes[m]));
    CUDA_CHECK(cudaFree(layer.scales[m]));
  }
  for (void* p : {static_cast<void*>(layer.gate_up), static_cast<void*>(layer.down),
                  static_cast<void*>(layer.gate_up_scales), static_cast<void*>(layer.down_scales)}) {
    CUDA_CHECK(cudaFree(p));
  }
}

enum class Pattern { kUniform, kOneExpert, kHoles, kDuplicates };

// Distinct experts per token unless the pattern says otherwise.
void make_routing(const Shape& s, int tokens, unsigned seed, Pattern pattern, std::vector<int>& ids,
                  std::vector<float>& weights) {
  std::mt19937 rng(seed);
  ids.resize(static_cast<size_t>(tokens) * s.top_k);
  weights.resize(ids.size());
  std::vector<int> all(s.experts);
  for (int e = 0; e < s.experts; ++e) all[e] = e;
  for (int t = 0; t < tokens; ++t) {
    for (int k = 0; k < s.top_k; ++k) {
      std::swap(all[k], all[k + rng() % (s.experts - k)]);
      int id = all[k];
      if (pattern == Pattern::kOneExpert) id = k == 0 ? 3 % s.experts : -1;
      if (pattern == Pattern::kHoles && rng() % 3 == 0) id = rng() % 2 ? -1 : s.experts + static_cast<int>(rng() % 100);
      if (pattern == Pattern::kDuplicates && rng() % 2) id = all[0];
      ids[t * s.top_k + k] = id;
      weights[t * s.top_k + k] = 0.02f + (rng() % 1000) / 1000.0f / s.top_k;
    }
  }
}

struct Buffers {
  int tokens = 0;
  int layers = 0;
  u16* x;
  fourfold::ptx::TensorMap rows;  // of x
  int* ids;
  float* router;
  u16* h;
  u16* one;  // one token: the rows between the kernels
  OneTurn* turn;
  u8* partial;  // down's rows
  size_t partial_bytes;
  long long slots;
  u16* out;
  RouteTable route;
};

// x as a matrix that the copy engine takes in pieces of one row and 64 columns.
fourfold::ptx::TensorMap row_pieces(const u16* x, int tokens, int columns) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found;
  CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found));
  const auto encode = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry);
  fourfold::ptx::TensorMap map;
  static_assert(sizeof(map) == sizeof(CUtensorMap));
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(tokens)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(columns) * 2};
  const cuuint32_t box[2] = {kUnitK, 1}, steps[2] = {1, 1};
  const CUresult result =
      encode(reinterpret_cast<CUtensorMap*>(&map), CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<u16*>(x), sizes,
             strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) std::printf("cuTensorMapEncodeTiled: %d\n", static_cast<int>(result)), std::exit(1);
  return map;
}

Buffers make_buffers(const Shape& s, int tokens, int layers) {
  Buffers b{};
  b.tokens = tokens;
  b.layers = layers;
  const size_t picks = static_cast<size_t>(tokens) * s.top_k;
  b.x = device_alloc<u16>(static_cast<size_t>(tokens) * s.hidden);
  bench::fill_rows<<<1024, 256>>>(b.x, static_cast<size_t>(tokens) * s.hidden, 4242);
  b.rows = row_pieces(b.x, tokens, s.hidden);
  b.ids = device_alloc<int>(picks * layers);
  b.router = device_alloc<float>(picks * layers);
  b.slots = max_slots(static_cast<long long>(picks), s.experts);
  b.h = device_alloc<u16>(static_cast<size_t>(b.slots) * s.intermediate);
  b.one = device_alloc<u16>(static_cast<size_t>(2 * kExchangeRows) * s.intermediate);
  CUDA_CHECK(cudaMemset(b.one, 0xff, static_cast<size_t>(2 * kExchangeRows) * s.intermediate * 2));
  b.turn = device_alloc<OneTurn>(1);
  CUDA_CHECK(cudaMemset(b.turn, 0, sizeof(OneTurn)));
  b.partial_bytes = static_cast<size_t>(b.slots) * packed_row_values(s.hidden) * (tokens > 2500 ? 2 : 4);
  b.partial = device_alloc<u8>(b.partial_bytes);
  b.out = device_alloc<u16>(static_cast<size_t>(tokens) * s.hidden);
  b.route.counts = device_alloc<int>(2);
  b.route.blocks = device_alloc<Block>(max_blocks(static_cast<long long>(picks), s.experts, 8));
  b.route.stored = device_alloc<int>(max_blocks(static_cast<long long>(picks), s.experts, 8));
  b.route.finished = device_alloc<int>(kMostSums);
  b.route.totals = device_alloc<int>(kMaxExperts + 1);
  CUDA_CHECK(cudaMemset(b.route.totals, 0, (kMaxExperts + 1) * 4));
  b.route.slot_token = device_alloc<int>(static_cast<size_t>(b.slots) + kSlotsBeyond);
  b.route.pick_slot = device_alloc<int>(picks);
  return b;
}

void free_buffers(Buffers& b) {
  for (void* p :
       {static_cast<void*>(b.x), static_cast<void*>(b.ids), static_cast<void*>(b.router), static_cast<void*>(b.h),
        static_cast<void*>(b.one), static_cast<void*>(b.turn), static_cast<void*>(b.partial), static_cast<void*>(b.out),
        static_cast<void*>(b.route.counts), static_cast<void*>(b.route.totals), static_cast<void*>(b.route.stored),
        static_cast<void*>(b.route.finished), static_cast<void*>(b.route.blocks),
        static_cast<void*>(b.route.slot_token), static_cast<void*>(b.route.pick_slot)}) {
    CUDA_CHECK(cudaFree(p));
  }
}

int g_sms = 132;
bool g_pdl = true;
int g_idle_ms = 10;
bool g_exclusive = true;
bool g_beside = true;

template <typename... Args>
void launch(void (*kernel)(Args...), dim3 grid, int threads, unsigned smem, cudaStream_t stream, Args... args) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = smem;
  config.stream = stream;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = g_pdl ? 1 : 0;
  config.attrs = &attribute;
  config.numAttrs = 1;
  CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, args...));
}

// One token: shared memory to ask for, so that in `room` bytes of an SM no more than `ctas` of these CTAs fit, as
// plan::launch_smem has it.
constexpr unsigned kSmemPerSm = 233472;
constexpr int kSmemPerBlock = 232448;
constexpr unsigned kSmemReserved = 1024;
unsigned exclusive_smem(const Candidate& c, unsigned room) {
  const unsigned least = room / static_cast<unsigned>(c.ctas + 1) / 128 * 128 + 128 - kSmemReserved;
  return g_exclusive ? std::max(c.smem, least) : c.smem;
}

void run_layer(const Layer& layer, const Buffers& b, int index, const Candidate& up, const Candidate& down,
               cudaStream_t stream) {
  const Shape& s = layer.shape;
  const size_t picks = static_cast<size_t>(b.tokens) * s.top_k;
  const int copy = index % layer.copies;
  const Routing routing{b.ids + picks * index, b.router + picks * index, b.tokens, s.top_k, s.experts};
  GemmArgs a{};
  a.weights = layer.gate_up + copy * layer.gate_up_bytes;
  a.expert_bytes = gate_up_packed(s);
  a.row_tiles = s.intermediate / (s.relu2 ? 16 : 8);
  a.units = s.hidden / kUnitK;
  a.source = b.x;
  a.source_stride = s.hidden;
  a.scales = layer.gate_up_scales;
  a.down_scales = layer.down_scales;
  a.out = b.h;
  a.out_stride = s.intermediate;
  a.routing = routing;
  a.route = b.route;
  GemmArgs d = a;
  d.weights = layer.down + copy * layer.down_bytes;
  d.expert_bytes = packed_bytes(s.hidden, s.intermediate);
  d.row_tiles = s.hidden / 16;
  d.units = s.intermediate / kUnitK;
  d.source = b.h;
  d.source_stride = s.intermediate;
  d.scales = layer.down_scales;
  d.out = down.one ? static_cast<void*>(b.out) : b.partial;
  d.out_stride = s.hidden;
  d.ready = up.wide ? (a.row_tiles + up.row_tiles - 1) / up.row_tiles : 0;
  if (up.one) {
    a.out = b.one;
    d.source = b.one;
    a.turn = d.turn = b.turn;
    d.inner_blocks = s.intermediate / kBlockK;
  }
  if (up.many) {
    a.out_stride = d.source_stride = b.slots * kUnitK;
    d.out_stride = packed_row_values(s.hidden) / 4;
  }
  const auto groups = [](int tiles, const Candidate& c) { return (tiles + c.row_tiles - 1) / c.row_tiles; };
  if (up.one) {
    const long long most_up = static_cast<long long>(groups(a.row_tiles, up)) * static_cast<long long>(picks);
    const long long most_down = down.tokens > 1 ? d.row_tiles : groups(d.row_tiles, down);
    const unsigned up_smem = exclusive_smem(up, kSmemPerSm);
    const unsigned left = kSmemPerSm - static_cast<unsigned>(up.ctas) * (up_smem + kSmemReserved);
    launch(up.kernel, dim3(static_cast<unsigned>(std::min<long long>(g_sms * up.ctas, most_up))), up.threads, up_smem,
           stream, a);
    launch(down.kernel, dim3(static_cast<unsigned>(std::min<long long>(g_sms * down.ctas, most_down))), down.threads,
           exclusive_smem(down, left), stream, d);
    return;
  }
  if (picks <= kRouteOnePass) {
    launch(moe_route, dim3(1), kRouteThreads, 0, stream, routing, b.route, up.tokens);
  } else {
    const unsigned ctas = static_cast<unsigned>((picks + kRouteManyPicks - 1) / kRouteManyPicks);
    launch(moe_route_count, dim3(ctas), kRouteThreads, 0, stream, routing, b.route, up.tokens);
    launch(moe_route_scatter, dim3(ctas), kRouteManyThreads, 0, stream, routing, b.route);
  }
  const unsigned tokens = static_cast<unsigned>(b.tokens);
  const dim3 up_grid(static_cast<unsigned>(g_sms * up.ctas));
  if (up.many) {
    launch(up.gathers, up_grid, up.threads, up.smem, stream, b.rows, a);
  } else {
    launch(up.kernel, up_grid, up.threads, up.smem, stream, a);
  }
  launch(down.kernel, dim3(static_cast<unsigned>(g_sms * down.ctas)), down.threads, down.smem, stream, d);
  const dim3 grid(static_cast<unsigned>((s.hidden + 1023) / 1024), tokens);
  if (up.many) {
    launch(moe_combine_packed, grid, 128, 0, stream, reinterpret_cast<const PackedGroup*>(b.partial), d.out_stride,
           static_cast<const int*>(b.route.pick_slot), routing, static_cast<const float*>(layer.down_scales), s.hidden,
           b.out, static_cast<long long>(s.hidden));
  } else if (down.wide && g_beside) {
    const dim3 beside(tokens, static_cast<unsigned>((s.hidden + kSumColumns - 1) / kSumColumns));
    launch(moe_combine_beside, beside, kCombineBesideThreads, 0, stream, reinterpret_cast<const float*>(b.partial),
           static_cast<long long>(s.hidden), b.route, routing.weights, s.top_k, s.hidden, b.out,
           static_cast<long long>(s.hidden), 0);
  } else {
    launch(moe_combine, grid, 256, 0, stream, reinterpret_cast<const float*>(b.partial),
           static_cast<long long>(s.hidden), static_cast<const int*>(b.route.pick_slot), routing.weights, s.top_k,
           s.hidden, b.out, static_cast<long long>(s.hidden), 0);
  }
}

double check(const Layer& layer, Buffers& b, const Candidate& up, const Candidate& down, Pattern pattern,
             unsigned seed) {
  const Shape& s = layer.shape;
  std::vector<int> ids;
  std::vector<float> weights;
  make_routing(s, b.tokens, seed, pattern, ids, weights);
  // A padding row: its ids are all -1 and its hidden state is NaN.
  std::vector<u16> nan_row(s.hidden, 0x7fc0);
  const int padding = pattern == Pattern::kHoles && b.tokens > 1 ? b.tokens / 2 : -1;
  bench::fill_rows<<<1024, 256>>>(b.x, static_cast<size_t>(b.tokens) * s.hidden, seed);
  if (padding >= 0) {
    for (int k = 0; k < s.top_k; ++k) ids[padding * s.top_k + k] = -1;
    CUDA_CHECK(cudaMemcpy(b.x + static_cast<size_t>(padding) * s.hidden, nan_row.data(), s.hidden * 2,
                          cudaMemcpyHostToDevice));
  }
  CUDA_CHECK(cudaMemcpy(b.ids, ids.data(), ids.size() * 4, cudaMemcpyHostToDevice));
  CUDA_CHECK(cudaMemcpy(b.router, weights.data(), weights.size() * 4, cudaMemcpyHostToDevice));
  const size_t h_rows = static_cast<size_t>(b.slots);
  CUDA_CHECK(cudaMemset(b.h, 0xff, h_rows * s.intermediate * 2));
  CUDA_CHECK(cudaMemset(b.partial, 0xff, b.partial_bytes));
  CUDA_CHECK(cudaMemset(b.out, 0xff, static_cast<size_t>(b.tokens) * s.hidden * 2));
  run_layer(layer, b, 0, up, down, nullptr);
  CUDA_CHECK(cudaGetLastError());
  CUDA_CHECK(cudaDeviceSynchronize());
  const int samples = std::min(b.tokens, 48);
  std::vector<int> sample(samples);
  for (int i = 0; i < samples; ++i) sample[i] = static_cast<int>(static_cast<long long>(i) * b.tokens / samples);
  int* d_sample = device_alloc<int>(samples);
  CUDA_CHECK(cudaMemcpy(d_sample, sample.data(), samples * 4, cudaMemcpyHostToDevice));
  float* h = device_alloc<float>(static_cast<size_t>(samples) * s.top_k * s.intermediate);
  float* y = device_alloc<float>(static_cast<size_t>(samples) * s.hidden);
  const auto grid = [](size_t warps) { return static_cast<unsigned>((warps + 7) / 8); };
  bench::reference_gate_up<<<grid(static_cast<size_t>(samples) * s.top_k * s.intermediate), 256>>>(
      layer.codes[0], layer.scales[0], layer.codes[1], layer.scales[1], layer.gate_up_scales, b.x, b.ids, d_sample,
      samples, s.top_k, s.experts, s.hidden, s.intermediate, s.relu2, h);
  bench::reference_down<<<grid(static_cast<size_t>(samples) * s.hidden), 256>>>(
      layer.codes[2], layer.scales[2], layer.down_scales, h, b.ids, b.router, d_sample, samples, s.top_k, s.experts,
      s.hidden, s.intermediate, y);
  CUDA_CHECK(cudaDeviceSynchronize());
  std::vector<float> want(static_cast<size_t>(samples) * s.hidden);
  std::vector<u16> got(static_cast<size_t>(b.tokens) * s.hidden);
  CUDA_CHECK(cudaMemcpy(want.data(), y, want.size() * 4, cudaMemcpyDeviceToHost));
  CUDA_CHECK(cudaMemcpy(got.data(), b.out, got.size() * 2, cudaMemcpyDeviceToHost));
  double worst = 0.0;
  for (int i = 0; i < samples; ++i) {
    double error = 0.0, norm = 0.0;
    for (int c = 0; c < s.hidden; ++c) {
      const double w = want[static_cast<size_t>(i) * s.hidden + c];
      const double v = fourfold::nvfp4::bf16_to_float(got[static_cast<size_t>(sample[i]) * s.hidden + c]);
      error += (v - w) * (v - w);
      norm += w * w;
    }
    const double relative = norm > 0 ? std::sqrt(error / norm) : (error == 0 ? 0.0 : INFINITY);
    if (!(relative <= worst)) worst = relative;  // keeps NaN
    if (std::isnan(relative)) break;
  }
  for (u16 v : got) {
    if ((v & 0x7fff) > 0x7f80) worst = NAN;  // every element is written, and no NaN leaks
  }
  CUDA_CHECK(cudaFree(d_sample));
  CUDA_CHECK(cudaFree(h));
  CUDA_CHECK(cudaFree(y));
  return worst;
}

double time_layers(const Layer& layer, const Buffers& b, const Candidate& up, const Candidate& down, int replays) {
  cudaStream_t stream;
  CUDA_CHECK(cudaStreamCreate(&stream));
  cudaGraph_t graph;
  CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  for (int i = 0; i < b.layers; ++i) run_layer(layer, b, i, up, down, stream);
  CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
  cudaGraphExec_t exec;
  CUDA_CHECK(cudaGraphInstantiate(&exec, graph, 0));
  cudaEvent_t start, stop;
  CUDA_CHECK(cudaEventCreate(&start));
  CUDA_CHECK(cudaEventCreate(&stop));
  std::vector<double> times;
  for (int i = 0; i < replays + 2; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(b.tokens >= 64 ? g_idle_ms : 0));
    CUDA_CHECK(cudaEventRecord(start, stream));
    CUDA_CHECK(cudaGraphLaunch(exec, stream));
    CUDA_CHECK(cudaEventRecord(stop, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    float ms = 0;
    CUDA_CHECK(cudaEventElapsedTime(&ms, start, stop));
    if (i >= 2) times.push_back(ms * 1e3 / b.layers);
  }
  std::sort(times.begin(), times.end());
  CUDA_CHECK(cudaGraphExecDestroy(exec));
  CUDA_CHECK(cudaGraphDestroy(graph));
  CUDA_CHECK(cudaEventDestroy(start));
  CUDA_CHECK(cudaEventDestroy(stop));
  CUDA_CHECK(cudaStreamDestroy(stream));
  return times[times.size() / 2];
}

double read_ceiling() {  // TB/s
  const size_t bytes = 4ULL << 30;
  uint4* data = device_alloc<uint4>(bytes / 16);
  u32* sink = device_alloc<u32>(1);
  bench::fill_codes<<<2048, 256>>>(reinterpret_cast<u32*>(data), bytes / 4, 5);
  cudaEvent_t start, stop;
  CUDA_CHECK(cudaEventCreate(&start));
  CUDA_CHECK(cudaEventCreate(&stop));
  std::vector<double> rates;
  for (int i = 0; i < 9; ++i) {
    CUDA_CHECK(cudaEventRecord(start));
    bench::read_all<<<g_sms * 4, 512>>>(data, bytes / 16, sink);
    CUDA_CHECK(cudaEventRecord(stop));
    CUDA_CHECK(cudaDeviceSynchronize());
    float ms = 0;
    CUDA_CHECK(cudaEventElapsedTime(&ms, start, stop));
    rates.push_back(bytes / (ms * 1e-3) / 1e12);
  }
  std::sort(rates.begin(), rates.end());
  CUDA_CHECK(cudaFree(data));
  CUDA_CHECK(cudaFree(sink));
  return rates[rates.size() / 2];
}

// Bytes of the experts that layer `index` touches: the floor's numerator.
double touched_bytes(const Shape& s, const std::vector<int>& ids) {
  std::vector<char> used(s.experts);
  for (int id : ids)
    if (id >= 0 && id < s.experts) used[id] = 1;
  return static_cast<double>(std::count(used.begin(), used.end(), 1)) *
         static_cast<double>(gate_up_packed(s) + packed_bytes(s.hidden, s.intermediate));
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::string> shapes;
  std::vector<int> token_counts;
  bool do_check = false, sweep = false, all_pairs = false;
  std::string json_path;
  int only_up = -1, only_down = -1, replays = 0;
  for (int i = 1; i < argc; ++i) {
    const std::string a = argv[i];
    const auto list = [&](const std::function<void(std::string)>& f) {
      std::string v = argv[++i];
      for (size_t at = 0; at != std::string::npos;) {
        const size_t comma = v.find(',', at);
        f(v.substr(at, comma == std::string::npos ? comma : comma - at));
        at = comma == std::string::npos ? comma : comma + 1;
      }
    };
    if (a == "--shape")
      list([&](std::string v) { shapes.push_back(v); });
    else if (a == "--tokens")
      list([&](std::string v) { token_counts.push_back(std::stoi(v)); });
    else if (a == "--check")
      do_check = true;
    else if (a == "--sweep")
      sweep = true;
    else if (a == "--no-pdl")
      g_pdl = false;
    else if (a == "--apart")
      g_beside = false;
    else if (a == "--crowded")
      g_exclusive = false;
    else if (a == "--all-pairs")
      all_pairs = sweep = true;
    else if (a == "--idle")
      g_idle_ms = std::stoi(argv[++i]);
    else if (a == "--json")
      json_path = argv[++i];
    else if (a == "--up")
      only_up = std::stoi(argv[++i]);
    else if (a == "--down")
      only_down = std::stoi(argv[++i]);
    else if (a == "--replays")
      replays = std::stoi(argv[++i]);
    else {
      std::fprintf(stderr, "unknown argument %s\n", a.c_str());
      return 2;
    }
  }
  CUDA_CHECK(cudaDeviceGetAttribute(&g_sms, cudaDevAttrMultiProcessorCount, 0));
  const std::vector<Candidate> ups = gate_up_candidates(), downs = down_candidates();
  for (const auto* set : {&ups, &downs}) {
    for (const Candidate& c : *set) {
      CUDA_CHECK(cudaFuncSetAttribute(c.entry(), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      c.one ? kSmemPerBlock : static_cast<int>(c.smem)));
      if (!c.one) continue;
      CUDA_CHECK(cudaFuncSetAttribute(c.entry(), cudaFuncAttributePreferredSharedMemoryCarveout,
                                      cudaSharedmemCarveoutMaxShared));
    }
  }
  int failures = 0;
  if (do_check) {
    for (const std::string& name : shapes) {
      for (const Shape& s : kShapes) {
        if (name != s.name) continue;
        Layer layer = make_layer(s, 1, true);
        for (int tokens : token_counts) {
          Buffers b = make_buffers(s, tokens, 1);
          for (size_t u = 0; u < ups.size(); ++u) {
            for (size_t d = 0; d < downs.size(); ++d) {
              // each up with the first fitting down and each down with the first fitting up
              const Candidate &up = ups[u], &down = downs[d];
              if (!up.fits(s.hidden, tokens, s.top_k) || !down.fits(s.intermediate, tokens, s.top_k)) continue;
              if (up.relu2 != s.relu2) continue;
              if (up.one != down.one || up.tokens != down.tokens || up.many != down.many) continue;
              bool first_up = true, first_down = true;
              for (size_t i = 0; i < u; ++i)
                first_up &= !(ups[i].one == up.one && ups[i].tokens == up.tokens && ups[i].relu2 == up.relu2 &&
                              ups[i].many == up.many && ups[i].fits(s.hidden, tokens, s.top_k));
              for (size_t i = 0; i < d; ++i)
                first_down &= !(downs[i].one == down.one && downs[i].tokens == down.tokens &&
                                downs[i].many == down.many && downs[i].fits(s.intermediate, tokens, s.top_k));
              if (!first_up && !first_down) continue;
              const bool all = first_up && first_down;
              for (Pattern p : {Pattern::kUniform, Pattern::kHoles, Pattern::kDuplicates, Pattern::kOneExpert}) {
                if (!all && p != Pattern::kHoles) continue;
                const double e = check(layer, b, up, down, p, 17 * tokens + static_cast<int>(p));
                const bool ok = e < 5e-3;
                failures += !ok;
                if (!ok || all) {
                  std::printf("%s %s M=%d pattern %d up %zu %s down %zu %s error %.2e\n", ok ? "ok" : "FAIL", s.name,
                              tokens, static_cast<int>(p), u, up.name, d, down.name, e);
                  std::fflush(stdout);
                }
              }
            }
          }
          free_buffers(b);
        }
        free_layer(layer);
      }
    }
    std::printf("check: %d failures\n", failures);
  } else {
    std::FILE* json = json_path.empty() ? nullptr : std::fopen(json_path.c_str(), "w");
    const double ceiling = read_ceiling();
    std::printf("read ceiling %.3f TB/s\n", ceiling);
    if (json) std::fprintf(json, "{\"read_tbs\": %.3f, \"results\": [", ceiling);
    bool comma = false;
    for (const std::string& name : shapes) {
      for (const Shape& s : kShapes) {
        if (name != s.name) continue;
        const int copies = s.experts * s.hidden < 256 * 3000 ? 16 : s.experts == 256 ? 8 : 4;
        Layer layer = make_layer(s, copies, false);
        for (int tokens : token_counts) {
          const int layers = tokens <= 2 ? 64 : tokens <= 16 ? 16 : tokens <= 64 ? 8 : tokens <= 512 ? 4 : 2;
          Buffers b = make_buffers(s, tokens, layers);
          double bytes = 0;
          for (int i = 0; i < layers; ++i) {
            std::vector<int> ids;
            std::vector<float> w;
            make_routing(s, tokens, 1000 + i, Pattern::kUniform, ids, w);
            bytes += touched_bytes(s, ids) / layers;
            CUDA_CHECK(cudaMemcpy(b.ids + ids.size() * i, ids.data(), ids.size() * 4, cudaMemcpyHostToDevice));
            CUDA_CHECK(cudaMemcpy(b.router + w.size() * i, w.data(), w.size() * 4, cudaMemcpyHostToDevice));
          }
          const double flops =
              (s.relu2 ? 4.0 : 6.0) * tokens * s.top_k * static_cast<double>(s.hidden) * s.intermediate;
          const double floor_us = bytes / ceiling * 1e-6;
          const int count = replays ? replays : tokens <= 64 ? 20 : 12;
          double best = 1e30;
          size_t best_up = 0, best_down = 0;
          const auto measure = [&](size_t u, size_t d) {
            const Candidate &up = ups[u], &down = downs[d];
            if (!up.fits(s.hidden, tokens, s.top_k) || !down.fits(s.intermediate, tokens, s.top_k)) return 1e30;
            if (up.relu2 != s.relu2) return 1e30;
            if (up.one != down.one || up.tokens != down.tokens) return 1e30;
            if (tokens > 512 && !up.many) return 1e30;
            if (up.many != down.many || (up.many && tokens < 256)) return 1e30;
            if (!up.one && !up.many && (tokens <= 8 ? up.tokens > 8 : tokens <= 64 ? up.tokens > 16 : up.tokens < 16))
              return 1e30;
            if (!up.one && tokens == 1) return 1e30;
            const double us = time_layers(layer, b, up, down, count);
            if (sweep)
              std::printf("  %s M=%d up %zu %s down %zu %s: %.2f us\n", s.name, tokens, u, up.name, d, down.name, us);
            std::fflush(stdout);
            if (us < best) {
              best = us;
              best_up = u;
              best_down = d;
            }
            return us;
          };
          if (all_pairs) {
            for (size_t u = 0; u < ups.size(); ++u)
              for (size_t d = 0; d < downs.size(); ++d) measure(u, d);
          } else if (only_up >= 0 && only_down >= 0) {
            measure(static_cast<size_t>(only_up), static_cast<size_t>(only_down));
          } else {
            // For each kind (one token or not, tile): all ups with the first fitting down, then all downs with the best
            // up.
            std::vector<std::pair<bool, int>> kinds;
            for (const Candidate& c : ups) {
              const std::pair<bool, int> kind{c.one, c.tokens};
              if (std::find(kinds.begin(), kinds.end(), kind) == kinds.end()) kinds.push_back(kind);
            }
            for (const auto& kind : kinds) {
              double kind_best = 1e30;
              size_t kind_up = ups.size(), first_down = downs.size();
              for (size_t d = downs.size(); d-- > 0;)
                if (downs[d].one == kind.first && downs[d].tokens == kind.second &&
                    downs[d].fits(s.intermediate, tokens, s.top_k))
                  first_down = d;
              if (first_down == downs.size()) continue;
              for (size_t u = 0; u < ups.size(); ++u) {
                if (ups[u].one != kind.first || ups[u].tokens != kind.second) continue;
                const double us = measure(u, first_down);
                if (us < kind_best) kind_best = us, kind_up = u;
              }
              if (kind_up == ups.size()) continue;
              for (size_t d = first_down + 1; d < downs.size(); ++d) measure(kind_up, d);
            }
          }
          std::printf(
              "%-5s M=%-5d %9.2f us  floor %8.2f  %.2f of read  %.3f TB/s  %6.1f TFLOP/s  up %zu %s  down %zu %s\n",
              s.name, tokens, best, floor_us, floor_us / best, bytes / best * 1e-6, flops / best * 1e-6, best_up,
              ups[best_up].name, best_down, downs[best_down].name);
          std::fflush(stdout);
          if (json) {
            std::fprintf(json,
                         "%s{\"shape\": \"%s\", \"tokens\": %d, \"us\": %.3f, \"bytes\": %.0f, \"floor_us\": %.3f, "
                         "\"tflops\": %.2f, \"gate_up\": \"%s\", \"down\": \"%s\"}",
                         comma ? ", " : "", s.name, tokens, best, bytes, floor_us, flops / best * 1e-6,
                         ups[best_up].name, downs[best_down].name);
            comma = true;
          }
          free_buffers(b);
        }
        free_layer(layer);
      }
    }
    if (json) {
      std::fprintf(json, "]}\n");
      std::fclose(json);
    }
  }
  return failures ? 1 : 0;
}
