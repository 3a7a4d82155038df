// Checks and times the kernels of dense products on whatever card is there.
//   products [--check] [--repeats N] [--time] [--quick] [--small] [--many] [--shape S]...
// --shape: only times of a product of many rows, as n248320x2048,16,64: b, e (FP8) or n (NVFP4), outputs, inputs, rows.
// --many: of both only products of 17 rows and more. --repeats: runs of each of them that must have the same bits.
// Built and run by tools/device/products.sh. Times: graphs of dependent nodes, every node with weights of its own so
// that they come from memory, launched programmatically; microseconds per node, the best of the replays and their
// median.
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "cuda/gemm/packed_matrix.h"
#include "kernels/gemm/dense.cuh"
#include "kernels/gemm/middle_sm90.cuh"
#include "kernels/gemm/route.cuh"
#include "kernels/gemm/rows.cuh"
#include "kernels/norm/norm.cuh"
#include "tests/kernels/random_weights.h"

namespace ff = fourfold;
using namespace ff::gemm;

namespace {

#define CHECK(call)                                                                          \
  do {                                                                                       \
    const cudaError_t error_ = (call);                                                       \
    if (error_ != cudaSuccess) {                                                             \
      std::printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(error_)); \
      std::exit(1);                                                                          \
    }                                                                                        \
  } while (0)

int sms = 0;
int failures = 0;
double read_rate = 0;  // TB/s

struct Kernel {
  std::string name;
  RowsTile tile;
  void (*function)(RowsArgs);
};
template <auto... Values>
Kernel kernel_of() {
  using Tile = RowsTileOf<Values...>;
  constexpr RowsTile T = Tile::value;
  return {std::to_string(T.formats) + "," + std::to_string(T.row_tiles) + " w" + std::to_string(T.strip_warps) + "x" +
              std::to_string(T.teams) + " s" + std::to_string(T.slots) + " c" + std::to_string(T.ctas) +
              (T.norm_pieces ? " norm" : ""),
          T, gemm_rows<Tile>};
}
template <int Format>
std::vector<Kernel> kernels_of(int row_tiles) {
  if (row_tiles == 2) return {kernel_of<Format, 2, 8, 1, 4, 1, 0>(), kernel_of<Format, 2, 4, 2, 4, 1, 0>()};
  return {kernel_of<Format, 1, 8, 1, 4, 1, 0>(), kernel_of<Format, 1, 8, 1, 3, 2, 0>(),
          kernel_of<Format, 1, 4, 2, 4, 1, 0>(), kernel_of<Format, 1, 4, 2, 3, 2, 0>(),
          kernel_of<Format, 1, 8, 2, 2, 1, 0>()};
}
std::vector<Kernel> kernels_for(Weights format, int tokens) {
  const int row_tiles = tokens > 8 ? 2 : 1;
  return format == Weights::kBf16  ? kernels_of<1>(row_tiles)
         : format == Weights::kFp8 ? kernels_of<2>(row_tiles)
                                   : kernels_of<4>(row_tiles);
}

template <typename... Args>
void launch(void (*function)(Args...), int grid, int threads, unsigned shared, cudaStream_t stream,
            const Args&... args) {
  CHECK(cudaFuncSetAttribute(reinterpret_cast<const void*>(function), cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(shared)));
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(grid));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  CHECK(cudaLaunchKernelEx(&config, function, args...));
}
constexpr unsigned kShared = 227 * 1024;

void launch_rows(const Kernel& k, RowsArgs args, cudaStream_t stream) {
  const unsigned limit = kShared / static_cast<unsigned>(k.tile.ctas) - 1024u;
  args.panel_units = panel_units(k.tile, args.matrix.units, args.tokens, limit);
  if (args.panel_units == 0) {
    std::printf("%s: %d rows of x do not fit\n", k.name.c_str(), args.tokens);
    std::exit(1);
  }
  launch(k.function, rows_grid(k.tile, args.matrix.tiles, sms), k.tile.threads(),
         rows_map(k.tile, args.tokens, args.panel_units).total, stream, args);
}

template <typename T>
T* upload(const std::vector<T>& v) {
  T* p = nullptr;
  CHECK(cudaMalloc(&p, std::max<size_t>(v.size(), 1) * sizeof(T)));
  CHECK(cudaMemcpy(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice));
  return p;
}

// ---- right? ---------------------------------------------------------------------------------------------------------

std::vector<float> run_floats(const Kernel& k, const ff::cuda::PackedMatrix& packed, const std::uint8_t* weights,
                              const unsigned short* x, int tokens) {
  float* out = nullptr;
  const size_t count = static_cast<size_t>(tokens * packed.rows);
  CHECK(cudaMalloc(&out, count * 4));
  CHECK(cudaMemset(out, 0xff, count * 4));
  RowsArgs args = {};
  args.matrix = packed.at(weights);
  args.tokens = tokens;
  args.x = x;
  args.x_stride = packed.columns;
  args.end = RowsEnd::kFloat;
  args.out = out;
  args.out_stride = packed.rows;
  launch_rows(k, args, nullptr);
  CHECK(cudaDeviceSynchronize());
  std::vector<float> y(count);
  CHECK(cudaMemcpy(y.data(), out, count * 4, cudaMemcpyDeviceToHost));
  cudaFree(out);
  return y;
}

double worst_of(const std::vector<float>& y, const Products& want) {
  double worst = 0;
  for (size_t i = 0; i < y.size(); ++i) {
    const double error = std::fabs(y[i] - want.y[i]) / (want.size[i] + 1e-30);
    if (!(error <= worst)) worst = error;  // NaN too
  }
  return worst;
}

void verdict(const std::string& what, bool ok, double worst) {
  failures += !ok;
  std::printf("%s %s: largest error %.2e of the terms' magnitudes\n", ok ? "ok  " : "FAIL", what.c_str(), worst);
}

void check_rows(bool small) {
  unsigned seed = 100;
  const Kernel any1 = kernel_of<15, 1, 8, 1, 4, 1, 0>(), any2 = kernel_of<15, 2, 8, 1, 4, 1, 0>();
  struct Shape {
    int rows, columns;
  };
  for (const Shape s : {Shape{50, 1104}, {7, 208}, {4112, 2048}, {300, 6160}}) {
    if (small && s.rows > 500) continue;
    for (const Kind kind : kKinds) {
      const std::vector<ff::ops::MatrixSource> parts = {random_matrix(kind, s.rows, s.columns, ++seed)};
      const auto packed = ff::cuda::pack_stack(parts);
      std::uint8_t* weights = upload(packed.bytes);
      const auto x = random_rows(16, s.columns, ++seed);
      unsigned short* dx = upload(x);
      const Products want = reference(parts, x, 16);
      const std::vector<float> all = run_floats(any2, packed, weights, dx, 16);
      double worst = worst_of(all, want);
      bool ok = worst < 1e-5;
      const Weights format = packed.parts[0].format;
      for (int tokens = 1; tokens <= 16; ++tokens) {
        std::vector<Kernel> list;
        if (kind != Kind::kFp8Block) list = kernels_for(format, tokens);
        list.push_back(tokens > 8 ? any2 : any1);
        for (const Kernel& k : list) {
          const std::vector<float> y = run_floats(k, packed, weights, dx, tokens);
          bool same = k.tile.strip_warps != 8 || std::memcmp(y.data(), all.data(), y.size() * 4) == 0;
          Products part = want;
          part.y.resize(y.size());
          part.size.resize(y.size());
          if (!same || !(worst_of(y, part) < 1e-5)) {
            std::printf("FAIL %s, %d rows of x, %s: %s\n", parts[0].name.c_str(), tokens, k.name.c_str(),
                        same ? "wrong" : "other bits than with 16");
            ++failures;
          }
        }
      }
      verdict(parts[0].name + ", 1 to 16 rows", ok, worst);
      cudaFree(weights);
      cudaFree(dx);
    }
  }
}

struct Many {
  std::string name;
  bool wide;
  int formats, tokens, group, threads;
  unsigned shared;
  void (*dense)(DenseArgs);
  void (*with_map)(ff::ptx::TensorMap, DenseArgs);
  WideTile wide_tile = {};
  MiddleTile middle_tile = {};
  bool middle() const { return middle_tile.ctas > 0; }
};
template <int... Values>
Many dense_of(const char* name) {
  using Tile = DenseTileOf<Values...>;
  return {name,        false,         Tile::value.formats,          Tile::value.tokens,
          kDenseTiles, kDenseThreads, dense_map(Tile::value).total, gemm_dense<Tile>,
          nullptr};
}
template <int... Values>
Many wide_of(const char* name) {
  using Tile = WideTileOf<Values...>;
  return {name,
          true,
          Tile::value.formats,
          Tile::value.tokens,
          kWideTiles,
          kWideThreads,
          wide_map(Tile::value).total,
          nullptr,
          gemm_wide<Tile>,
          Tile::value};
}
template <int... Values>
Many middle_of(const char* name) {
  using Tile = MiddleTileOf<Values...>;
  return {name,
          true,
          Tile::value.formats,
          kMiddleRows,
          kMiddleTiles,
          kMiddleThreads,
          middle_map(Tile::value).total,
          nullptr,
          gemm_middle<Tile>,
          {},
          Tile::value};
}
#define DENSE(...) dense_of<__VA_ARGS__>("mma {" #__VA_ARGS__ "}")
#define MIDDLE(...) middle_of<__VA_ARGS__>("middle {" #__VA_ARGS__ "}")
#define WIDE(...) wide_of<__VA_ARGS__>("wgmma {" #__VA_ARGS__ "}")
std::vector<Many> many_kernels() {
  return {DENSE(1, 32, 8, 4, 2),  DENSE(2, 32, 8, 4, 2),  DENSE(4, 32, 8, 4, 2),  DENSE(1, 64, 4, 4, 2),
          DENSE(2, 64, 4, 4, 2),  DENSE(4, 64, 4, 4, 2),  DENSE(1, 128, 4, 3, 1), DENSE(2, 128, 4, 4, 1),
          DENSE(4, 128, 4, 4, 1), DENSE(15, 64, 4, 4, 1), WIDE(1, 32, 5),         WIDE(2, 32, 8),
          WIDE(4, 32, 10),        WIDE(1, 64, 5),         WIDE(2, 64, 8),         WIDE(4, 64, 10),
          WIDE(1, 128, 4),        WIDE(2, 128, 6),        WIDE(4, 128, 7),        WIDE(10, 64, 8),
          MIDDLE(1, 4, 2),        MIDDLE(2, 3, 2),        MIDDLE(4, 4, 2),        MIDDLE(10, 3, 2)};
}
bool takes(const Many& k, Weights format, bool cells) {
  return (k.formats >> static_cast<int>(format) & 1) != 0 && (!cells || (k.formats & kCells) != 0);
}

ff::ptx::TensorMap map_of(const DenseArgs& args, int tokens) {
  static const auto encode = [] {
    void* f = nullptr;
    cudaDriverEntryPointQueryResult found;
    CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &found));
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(f);
  }();
  CUtensorMap map;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(args.matrix.columns), static_cast<cuuint64_t>(args.tokens)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(args.x_stride) * 2};
  const cuuint32_t box[2] = {64, static_cast<cuuint32_t>(tokens)}, steps[2] = {1, 1};
  if (encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<unsigned short*>(args.x), sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS) {
    std::printf("cuTensorMapEncodeTiled failed\n");
    std::exit(1);
  }
  ff::ptx::TensorMap out;
  static_assert(sizeof(out) == sizeof(map));
  std::memcpy(&out, &map, sizeof(map));
  return out;
}
// For parts of sums; made before anything is recorded.
float* partial = nullptr;
int* arrived = nullptr;
void make_room() {
  CHECK(cudaMalloc(&partial,
                   static_cast<size_t>(std::max(wide_partial_bytes({0, 128, 0}, sms), middle_partial_bytes(2 * sms)))));
  arrived = upload(std::vector<int>(static_cast<size_t>(sms * kWideWarps), 0));
}
// As the backend launches them, but with equal shares of gemm_middle.
void launch_many(const Many& k, DenseArgs args, cudaStream_t stream) {
  args.partial = partial;
  args.arrived = arrived;
  if (k.middle()) {
    args.split_units = middle_split_units(k.middle_tile, args.matrix, args.tokens, sms, 4);
    launch(k.with_map, middle_grid(args.matrix, args.tokens, args.split_units), k.threads, k.shared, stream,
           map_of(args, kMiddleRows), args);
  } else if (k.wide) {
    const WideCut cut = wide_cut(k.wide_tile, args.matrix, args.tokens, sms);
    args.whole = cut.whole;
    args.splits = cut.splits;
    args.split_units = cut.split_units;
    args.band = wide_band(k.wide_tile, args.matrix);
    launch(k.with_map, wide_grid(k.wide_tile, args.matrix, args.tokens, cut, sms), k.threads, k.shared, stream,
           map_of(args, k.tokens), args);
  } else {
    launch(k.dense, dense_groups(args.matrix, k.group) * ((args.tokens + k.tokens - 1) / k.tokens), k.threads, k.shared,
           stream, args);
  }
}

// `repeats`: so many runs of each kernel beyond the first, four launched behind each other, have the same bits.
void check_many(bool small, int repeats) {
  unsigned seed = 900;
  struct Shape {
    int rows, columns, tokens;
  };
  for (const Shape s :
       {Shape{300, 1104, 70}, {2064, 2048, 300}, {257, 2048, 256}, {2048, 4096, 64}, {1100, 2048, 40}}) {
    if (small && s.rows > 500) continue;
    for (const Kind kind : kKinds) {
      if (kind == Kind::kF32 || kind == Kind::kF16) continue;
      const std::vector<ff::ops::MatrixSource> parts = {random_matrix(kind, s.rows, s.columns, ++seed)};
      const auto packed = ff::cuda::pack_stack(parts);
      std::uint8_t* weights = upload(packed.bytes);
      const auto x = random_rows(s.tokens, s.columns, ++seed);
      unsigned short* dx = upload(x);
      const Products want = reference(parts, x, s.tokens);
      double worst = 0;
      const size_t count = want.y.size();
      float* out = nullptr;
      CHECK(cudaMalloc(&out, count * 4 * 4));
      for (const Many& k : many_kernels()) {
        if (!takes(k, packed.parts[0].format, packed.parts[0].cell_units != 0)) continue;
        CHECK(cudaMemset(out, 0xff, count * 4));
        DenseArgs args = {};
        args.matrix = packed.at(weights);
        args.tokens = s.tokens;
        args.x = dx;
        args.x_stride = s.columns;
        args.end = DenseEnd::kFloat;
        args.out = out;
        args.out_stride = s.rows;
        launch_many(k, args, nullptr);
        CHECK(cudaDeviceSynchronize());
        std::vector<float> y(count);
        CHECK(cudaMemcpy(y.data(), out, count * 4, cudaMemcpyDeviceToHost));
        const double error = worst_of(y, want);
        if (!(error < 1e-5)) {
          std::printf("FAIL %s, %s: %.2e\n", parts[0].name.c_str(), k.name.c_str(), error);
          ++failures;
        }
        if (!(error <= worst)) worst = error;
        for (int r = 0; r < repeats; r += 4) {
          CHECK(cudaMemset(out, 0xff, count * 4 * 4));
          for (int i = 0; i < 4; ++i) {
            args.out = out + static_cast<size_t>(i) * count;
            launch_many(k, args, nullptr);
          }
          std::vector<float> again(4 * count);
          CHECK(cudaMemcpy(again.data(), out, count * 4 * 4, cudaMemcpyDeviceToHost));
          bool same = true;
          for (size_t i = 0; i < 4; ++i) same &= std::memcmp(&again[i * count], y.data(), count * 4) == 0;
          if (same) continue;
          std::printf("FAIL %s, %d rows, %s: other bits in another run\n", parts[0].name.c_str(), s.tokens,
                      k.name.c_str());
          ++failures;
          break;
        }
      }
      verdict(parts[0].name + ", " + std::to_string(s.tokens) + " rows", worst < 1e-5, worst);
      cudaFree(weights);
      cudaFree(dx);
      cudaFree(out);
    }
  }
}

// What other tests on a card do not see: the router's choice behind its product, and the norm in front.
void check_ends() {
  const int experts = 256, columns = 2048, tokens = 5;
  const std::vector<ff::ops::MatrixSource> parts = {random_matrix(Kind::kBf16, experts, columns, 1),
                                                    random_matrix(Kind::kBf16, 1, columns, 2)};
  const auto packed = ff::cuda::pack_stack(parts);
  std::uint8_t* weights = upload(packed.bytes);
  unsigned short* x = upload(random_rows(tokens, columns, 3));
  const std::vector<float> logits = run_floats(kernel_of<15, 1, 8, 1, 4, 1, 0>(), packed, weights, x, tokens);
  RowsArgs args = {};
  args.matrix = packed.at(weights);
  args.tokens = tokens;
  args.x = x;
  args.x_stride = columns;
  args.end = RowsEnd::kFloat;
  args.out = upload(std::vector<float>(logits.size()));
  args.out_stride = packed.rows;
  const RouteArgs route = {static_cast<float*>(args.out),
                           packed.rows,
                           tokens,
                           experts,
                           8,
                           1,
                           1,
                           experts,
                           experts,
                           9,
                           upload(std::vector<int>(tokens * 9)),
                           upload(std::vector<float>(tokens * 9))};
  bool ok = true;
  for (int round = 0; round < 20; ++round) {
    launch_rows(kernel_of<15, 1, 8, 1, 4, 1, 0>(), args, nullptr);
    launch(ff::gemm::gemm_route, ff::gemm::route_grid(tokens), ff::gemm::kRouteThreads, 0, nullptr, route);
  }
  CHECK(cudaDeviceSynchronize());
  std::vector<int> ids(tokens * 9);
  CHECK(cudaMemcpy(ids.data(), route.ids, ids.size() * 4, cudaMemcpyDeviceToHost));
  for (int t = 0; t < tokens; ++t) {
    const float* row = logits.data() + t * packed.rows;
    std::vector<int> order(experts);
    for (int i = 0; i < experts; ++i) order[static_cast<size_t>(i)] = i;
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return row[a] > row[b]; });
    for (int i = 0; i < 8; ++i) ok &= ids[static_cast<size_t>(t * 9 + i)] == order[static_cast<size_t>(i)];
    ok &= ids[static_cast<size_t>(t * 9 + 8)] == experts;
  }
  failures += !ok;
  std::printf("%s the router's choice\n", ok ? "ok  " : "FAIL");

  // The norm in front of a product and the norm alone: the same rows, bit by bit.
  std::vector<float> residual(static_cast<size_t>(tokens * columns));
  for (size_t i = 0; i < residual.size(); ++i)
    residual[i] = static_cast<float>(i * 2654435761u >> 8 & 0xffff) / 9000.0f - 3.0f;
  args.residual = upload(residual);
  args.residual_stride = columns;
  args.delta = x;
  args.delta_stride = columns;
  args.norm_weight = upload(std::vector<float>(static_cast<size_t>(columns), 1.25f));
  args.norm_eps = 1e-6f;
  args.residual_out = upload(residual);
  args.norm_out = upload(std::vector<unsigned short>(residual.size()));
  launch_rows(kernel_of<15, 1, 8, 1, 4, 1, 1>(), args, nullptr);
  unsigned short* alone = upload(std::vector<unsigned short>(residual.size()));
  const ff::norm::NormArgs norm = {args.residual, columns, x,       columns, args.norm_weight,
                                   1e-6f,         columns, nullptr, alone,   columns};
  launch(ff::norm::norm_rows<1>, tokens, ff::norm::kRowThreads, 0, nullptr, norm);
  CHECK(cudaDeviceSynchronize());
  std::vector<unsigned short> rows[2] = {std::vector<unsigned short>(residual.size()),
                                         std::vector<unsigned short>(residual.size())};
  CHECK(cudaMemcpy(rows[0].data(), args.norm_out, residual.size() * 2, cudaMemcpyDeviceToHost));
  CHECK(cudaMemcpy(rows[1].data(), alone, residual.size() * 2, cudaMemcpyDeviceToHost));
  ok = rows[0] == rows[1];
  for (int t = 0; t < tokens; ++t) {
    double squares = 0;
    std::vector<double> v(static_cast<size_t>(columns));
    const auto xs = random_rows(tokens, columns, 3);
    for (int i = 0; i < columns; ++i) {
      const auto at = static_cast<size_t>(t * columns + i);
      v[static_cast<size_t>(i)] = residual[at] + ff::nvfp4::bf16_to_float(xs[at]);
      squares += v[static_cast<size_t>(i)] * v[static_cast<size_t>(i)];
    }
    for (int i = 0; i < columns; ++i) {
      const double want = v[static_cast<size_t>(i)] / std::sqrt(squares / columns + 1e-6) * 1.25;
      ok &= std::fabs(ff::nvfp4::bf16_to_float(rows[0][static_cast<size_t>(t * columns + i)]) - want) <=
            std::fabs(want) / 255 + 1e-9;
    }
  }
  failures += !ok;
  std::printf("%s the norm in front of a product and alone\n", ok ? "ok  " : "FAIL");
}

// ---- how fast? ------------------------------------------------------------------------------------------------------

__global__ void fill_random(unsigned* p, size_t words) {
  for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < words;
       i += static_cast<size_t>(gridDim.x) * blockDim.x) {
    unsigned long long z = (i + 1) * 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    p[i] = static_cast<unsigned>(z >> 32);
  }
}
__global__ void __launch_bounds__(512) read_all(const uint4* p, size_t n, unsigned* out) {
  unsigned x = 0;
  const size_t step = static_cast<size_t>(gridDim.x) * 512;
  size_t i = blockIdx.x * 512ull + threadIdx.x;
  for (; i + 7 * step < n; i += 8 * step) {
    uint4 v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = __ldcs(p + i + j * step);
#pragma unroll
    for (int j = 0; j < 8; ++j) x ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  if (x == 0x12345u) *out = x;
}
__global__ void nothing(int) {
  ff::ptx::grid_launch_dependents();
  ff::ptx::grid_dependency_wait();
}

struct Time {
  double best = 0, median = 0;
};
// Microseconds of one node of `nodes` that `add` puts on a stream.
Time time_graph(int nodes, const std::function<void(cudaStream_t, int)>& add, int replays = 12) {
  cudaStream_t stream;
  CHECK(cudaStreamCreate(&stream));
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < nodes; ++i) add(stream, i);
  CHECK(cudaStreamEndCapture(stream, &graph));
  CHECK(cudaGraphInstantiate(&exec, graph, 0));
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  std::vector<double> times;
  for (int r = 0; r < replays + 2; ++r) {
    CHECK(cudaEventRecord(begin, stream));
    CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaEventRecord(end, stream));
    CHECK(cudaStreamSynchronize(stream));
    float ms = 0;
    CHECK(cudaEventElapsedTime(&ms, begin, end));
    if (r >= 2) times.push_back(ms * 1e3 / nodes);
  }
  std::sort(times.begin(), times.end());
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
  return {times.front(), times[times.size() / 2]};
}

std::uint8_t* pool = nullptr;
constexpr size_t kPool = size_t{6} << 30;
float* ones = nullptr;
unsigned short* rows_of_x = nullptr;
void* scratch = nullptr;

struct Shape {
  Weights format;
  int rows, columns;
  bool paired = false;
  size_t bytes() const { return packed_bytes(format, tiles_of(rows, paired), columns); }
};

RowsArgs args_of(const Shape& s, int tokens, size_t* at) {
  if (*at + s.bytes() > kPool) *at = 0;
  RowsArgs args = {};
  Matrix& m = args.matrix;
  m.count = 1;
  m.tiles = tiles_of(s.rows, s.paired);
  m.columns = s.columns;
  m.units = units_of(s.columns);
  m.parts[0] = {pool + *at, ones, nullptr, 0, 0, 0, s.format, 0, s.rows, 0};
  *at += (s.bytes() + 127) / 128 * 128;
  args.tokens = tokens;
  args.x = rows_of_x;
  args.x_stride = s.columns;
  args.end = s.paired ? RowsEnd::kSwiGlu : RowsEnd::kBf16;
  args.out = scratch;
  args.out_stride = s.rows;
  return args;
}

void time_shapes(const char* title, const std::vector<Shape>& shapes, int tokens, bool all) {
  double bytes = 0;
  for (const Shape& s : shapes) bytes += static_cast<double>(s.bytes());
  const double floor = bytes / read_rate * 1e-6;
  const int nodes = static_cast<int>(std::clamp(2e3 / floor, 4.0, 60.0)) / 1 * static_cast<int>(shapes.size());
  const std::vector<Kernel> first = kernels_for(shapes[0].format, tokens);
  for (size_t v = 0; v < (all ? first.size() : 1); ++v) {
    size_t at = 0;
    const Time t = time_graph(nodes, [&](cudaStream_t stream, int i) {
      const Shape& s = shapes[static_cast<size_t>(i) % shapes.size()];
      RowsArgs args = args_of(s, tokens, &at);
      launch_rows(kernels_for(s.format, tokens)[v], args, stream);
    });
    const double per = t.median * static_cast<double>(shapes.size());
    std::printf("%-28s T=%-2d %-16s %8.2f us (best %8.2f)  floor %7.2f  %5.1f %%\n", title, tokens,
                first[v].name.c_str(), per, t.best * static_cast<double>(shapes.size()), floor, 100 * floor / per);
  }
}

void time_many(const Shape& s, int tokens, bool only_wgmma = false) {
  const double flops = 2.0 * s.rows * s.columns * tokens;
  const double floor = std::max(static_cast<double>(s.bytes()) / read_rate * 1e-6, flops / 690e12 * 1e6);
  const int nodes = static_cast<int>(std::clamp(2e3 / floor, 3.0, 40.0));
  for (const Many& k : many_kernels()) {
    if (!takes(k, s.format, false) || (k.formats & (k.formats - 1)) != 0) continue;
    if (only_wgmma && !k.wide) continue;
    if (tokens > 64 && k.tokens < 64) continue;
    if (tokens > 1024 && (k.tokens < 128 || k.middle())) continue;
    if (tokens <= 32 && k.tokens > 64) continue;
    if (tokens > 256 && k.middle()) continue;
    size_t at = 0;
    const Time t = time_graph(
        nodes,
        [&](cudaStream_t stream, int) {
          const RowsArgs rows = args_of(s, tokens, &at);
          DenseArgs args = {};
          args.matrix = rows.matrix;
          args.tokens = tokens;
          args.end = s.rows > 100000 ? DenseEnd::kFloat : DenseEnd::kBf16;  // a head
          args.x = rows_of_x;
          args.x_stride = s.columns;
          args.out = scratch;
          args.out_stride = s.rows;
          launch_many(k, args, stream);
        },
        6);
    const char* names[] = {"bf16", "fp8", "nvfp4"};
    std::printf("%-5s %dx%d T=%-5d %-24s %9.2f us  floor %8.2f  %5.1f %%  %6.1f TFLOP/s\n",
                names[static_cast<int>(s.format)], s.rows, s.columns, tokens, k.name.c_str(), t.median, floor,
                100 * floor / t.median, flops / t.median * 1e-6);
  }
}

// A layer's nodes around the products.
void time_between() {
  float* residual = static_cast<float*>(scratch);
  unsigned short* normed = reinterpret_cast<unsigned short*>(residual + (1 << 20));
  for (const int tokens : {1, 4, 16}) {
    const ff::norm::NormArgs norm = {residual, 2048, rows_of_x, 2048, ones, 1e-6f, 2048, residual, normed, 2048};
    const Time t = time_graph(
        100, [&](cudaStream_t s, int) { launch(ff::norm::norm_rows<1>, tokens, ff::norm::kRowThreads, 0, s, norm); });
    std::printf("norm of %d rows of 2048, with the sum before it: %.2f us\n", tokens, t.median);
  }
  const Shape s = {Weights::kFp8, 12288, 2048};
  for (const int tokens : {1, 2, 4}) {
    for (const bool fused : {false, true}) {
      size_t at = 0;
      const Time t = time_graph(60, [&](cudaStream_t stream, int) {
        RowsArgs args = args_of(s, tokens, &at);
        args.residual = residual;
        args.residual_stride = 2048;
        args.delta = rows_of_x;
        args.delta_stride = 2048;
        args.norm_weight = ones;
        args.norm_eps = 1e-6f;
        args.residual_out = residual + (1 << 18);
        args.out = reinterpret_cast<unsigned short*>(residual + (1 << 21));
        if (!fused) {
          const ff::norm::NormArgs norm = {residual, 2048, rows_of_x, 2048, ones, 1e-6f, 2048, residual + (1 << 18),
                                           normed,   2048};
          launch(ff::norm::norm_rows<1>, tokens, ff::norm::kRowThreads, 0, stream, norm);
          args.x = normed;
        }
        launch_rows(fused ? kernel_of<2, 1, 8, 1, 4, 1, 1>() : kernel_of<2, 1, 8, 1, 4, 1, 0>(), args, stream);
      });
      std::printf("norm, then fp8 12288x2048, %d rows: %s %.2f us\n", tokens, fused ? "one node, " : "two nodes,",
                  t.median);
    }
  }
  for (const int tokens : {1, 4, 8}) {
    const Shape r = {Weights::kBf16, 257, 2048};
    size_t at = 0;
    const Time t = time_graph(60, [&](cudaStream_t stream, int) {
      RowsArgs args = args_of(r, tokens, &at);
      args.end = RowsEnd::kFloat;
      launch_rows(kernel_of<1, 1, 8, 1, 4, 1, 0>(), args, stream);
      const RouteArgs route = {residual,
                               257,
                               tokens,
                               256,
                               8,
                               1,
                               1,
                               256,
                               256,
                               9,
                               reinterpret_cast<int*>(normed),
                               reinterpret_cast<float*>(normed) + 4096};
      launch(ff::gemm::gemm_route, ff::gemm::route_grid(tokens), ff::gemm::kRouteThreads, 0, stream, route);
    });
    std::printf("router 257x2048 bf16, then top 8 of 256, %d rows: two nodes, %.2f us\n", tokens, t.median);
  }
}

void time_all(bool quick, bool many, const std::string& shape) {
  if (pool != nullptr) cudaFree(pool), cudaFree(ones), cudaFree(rows_of_x), cudaFree(scratch);
  CHECK(cudaMalloc(&pool, kPool));
  fill_random<<<1024, 256>>>(reinterpret_cast<unsigned*>(pool), kPool / 4);
  std::vector<float> f(1 << 19, 1.0f);
  ones = upload(f);
  rows_of_x = upload(random_rows(8192, 4096, 1));
  CHECK(cudaMalloc(&scratch, size_t{8192} * 12288 * 4));
  CHECK(cudaDeviceSynchronize());
  {
    const size_t n = kPool / 16;
    double best = 1e9;
    for (int ctas : {2, 3, 4}) {
      const Time t = time_graph(
          1,
          [&](cudaStream_t s, int) {
            read_all<<<sms * ctas, 512, 0, s>>>(reinterpret_cast<const uint4*>(pool), n,
                                                static_cast<unsigned*>(scratch));
          },
          6);
      best = std::min(best, t.median);
    }
    read_rate = static_cast<double>(kPool) / best * 1e-6;
    std::printf("reads %.3f TB/s\n", read_rate);
  }
  for (int ctas : {1, 132}) {
    const Time t = time_graph(100, [&](cudaStream_t s, int) { launch(nothing, ctas, 256, 0, s, 0); });
    std::printf("empty node of %d CTAs, launched at the start of the one before: %.2f us\n", ctas, t.median);
  }
  const Weights b = Weights::kBf16, e = Weights::kFp8, n = Weights::kNvfp4;
  if (!shape.empty()) {
    int rows = 0, columns = 0, used = 0;
    char format = 0;
    if (std::sscanf(shape.c_str(), "%c%dx%d%n", &format, &rows, &columns, &used) != 3) std::exit(2);
    for (const char* p = shape.c_str() + used; *p == ',';) {
      char* end = nullptr;
      const int tokens = static_cast<int>(std::strtol(p + 1, &end, 10));
      time_many({format == 'b' ? b : format == 'e' ? e : n, rows, columns}, tokens, true);
      p = end;
    }
    return;
  }
  if (!many) {
    time_shapes("fp8 12288x2048", {{e, 12288, 2048}}, 1, true);
    time_shapes("fp8 2048x4096", {{e, 2048, 4096}}, 1, true);
    time_shapes("fp8 12288x2048, 2048x4096", {{e, 12288, 2048}, {e, 2048, 4096}}, 1, true);
    time_shapes("fp8 9216x2048", {{e, 9216, 2048}}, 1, true);
    time_shapes("nvfp4 head 248320x2048", {{n, 248320, 2048}}, 1, true);
    time_shapes("nvfp4 12288x2048", {{n, 12288, 2048}}, 1, true);
    time_shapes("nvfp4 shared 2x512x2048", {{n, 512, 2048, true}}, 1, true);
    time_shapes("nvfp4 shared 2048x512", {{n, 2048, 512}}, 1, true);
    time_shapes("bf16 12288x2048", {{b, 12288, 2048}}, 1, true);
    time_shapes("bf16 2048x4096", {{b, 2048, 4096}}, 1, true);
    time_shapes("bf16 router 256x2048", {{b, 256, 2048}}, 1, true);
    time_shapes("bf16 head 248320x2048", {{b, 248320, 2048}}, 1, true);
    time_between();
  }
  for (const int tokens : {17, 32, 64, 128, 256, 512, 2048, 8192}) {
    for (const Weights f : {b, e, n}) time_many({f, 12288, 2048}, tokens);
  }
  for (const int tokens : {64, 128, 256, 512, 8192}) time_many({e, 2048, 4096}, tokens);
  for (const int tokens : {64, 128, 256, 512, 1024, 2048, 8192}) time_many({b, 257, 2048}, tokens);
  if (quick || many) return;
  for (const int tokens : {2, 4, 8, 16}) {
    time_shapes("fp8 12288x2048", {{e, 12288, 2048}}, tokens, true);
    time_shapes("fp8 2048x4096", {{e, 2048, 4096}}, tokens, tokens == 4);
    time_shapes("nvfp4 head 248320x2048", {{n, 248320, 2048}}, tokens, true);
    time_shapes("bf16 12288x2048", {{b, 12288, 2048}}, tokens, tokens == 4);
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  bool check = false, time = false, many = false, quick = false, small = false;
  int repeats = 4;
  std::vector<std::string> shapes;
  for (int i = 1; i < argc; ++i) {
    const std::string a = argv[i];
    check |= a == "--check";
    time |= a == "--time";
    quick |= a == "--quick";
    small |= a == "--small";
    many |= a == "--many";
    if (a == "--repeats" && i + 1 < argc) repeats = std::atoi(argv[++i]);
    if (a == "--shape" && i + 1 < argc) shapes.push_back(argv[++i]);
  }
  if (!check && !time && shapes.empty()) check = time = true;
  cudaDeviceProp properties;
  CHECK(cudaGetDeviceProperties(&properties, 0));
  sms = properties.multiProcessorCount;
  std::printf("%s, %d SMs\n", properties.name, sms);
  make_room();
  if (check) {
    if (!many) check_ends();
    check_many(small, repeats);
    if (!many) check_rows(small);
    std::printf(failures == 0 ? "all right\n" : "%d failures\n", failures);
  }
  if (time && shapes.empty()) shapes.push_back("");
  for (const std::string& shape : shapes) time_all(quick, many, shape);
  return failures != 0;
}
