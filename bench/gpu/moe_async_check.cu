// Checks the expert-layer kernels without a producer warp (mma_sync.cuh, fp4_sm120.cuh) on whatever card is there.
//
//   nvcc -std=c++20 -O2 -I. -Isrc --expt-relaxed-constexpr -gencode=arch=compute_90a,code=sm_90a
//        -DFOURFOLD_EMULATE_FP4_MMA -o moe_async_check bench/gpu/moe_async_check.cu
//        build/release/src/nvfp4/libfourfold_nvfp4.a build/release/src/base/libfourfold_base.a -lfmt
//   ./moe_async_check [--quick] [--small] [--time]
//
// Without the macro it wants an sm_120a or sm_121a card. Every kernel gets at most 101,376 bytes of shared memory, what
// a block of those cards may have. The reference is fp32 on dequantised weights; activations are quantised on the host
// by nvfp4::quantize_activations. Output and intermediate buffers are poisoned (NaN) before each run.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "bench/gpu/moe_support.cuh"
#include "kernels/moe/fp4_sm120.cuh"
#include "kernels/moe/mma_sync.cuh"
#include "kernels/moe/route_sm90.cuh"
#include "nvfp4/quantize.h"

namespace {

namespace ff = fourfold;
using namespace fourfold::moe;
using bench::u16;
using bench::u32;
using bench::u8;

constexpr unsigned kSmemLimit = 101376;
int failures = 0;

template <typename T>
struct Buffer {
  T* data = nullptr;
  size_t size = 0;
  Buffer() = default;
  explicit Buffer(size_t n) : size(n) { CUDA_CHECK(cudaMalloc(&data, std::max<size_t>(n, 4) * sizeof(T))); }
  explicit Buffer(const std::vector<T>& v) : Buffer(v.size()) { set(v); }
  Buffer(Buffer&& b) noexcept : data(b.data), size(b.size) { b.data = nullptr; }
  Buffer& operator=(Buffer&& b) noexcept {
    std::swap(data, b.data);
    std::swap(size, b.size);
    return *this;
  }
  ~Buffer() { cudaFree(data); }
  void set(const std::vector<T>& v) {
    CUDA_CHECK(cudaMemcpy(data, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  void fill(int byte) { CUDA_CHECK(cudaMemset(data, byte, size * sizeof(T))); }
  std::vector<T> get() const {
    std::vector<T> v(size);
    CUDA_CHECK(cudaMemcpy(v.data(), data, size * sizeof(T), cudaMemcpyDeviceToHost));
    return v;
  }
};

// ---- the multiplication by itself -----------------------------------------------------------------------------------

__global__ void multiply_fragments(const u32* a, const u32* b, const u32* scales_a, const u32* scales_b, float* d) {
  const u32 lane = threadIdx.x;
  const size_t at = blockIdx.x * 32u + lane;
  const u32 fragment[4] = {a[at * 4], a[at * 4 + 1], a[at * 4 + 2], a[at * 4 + 3]};
  float sum[4] = {0, 0, 0, 0};
  ff::ptx::mma_m16n8k64_nvfp4(sum, fragment, b[at * 2], b[at * 2 + 1], scales_a[at], scales_b[at]);
  for (int i = 0; i < 4; ++i) d[at * 4 + i] = sum[i];
}

void check_multiplication() {
  constexpr int kRounds = 4096;
  std::mt19937 random(11);
  std::vector<u32> a(kRounds * 128), b(kRounds * 64), sa(kRounds * 32), sb(kRounds * 32);
  for (u32& w : a) w = random();
  for (u32& w : b) w = random();
  const auto scale_word = [&](bool any) {
    u32 w = 0;
    for (int i = 0; i < 4; ++i) w |= (any ? random() % 127 : 0x30 + random() % 16) << (8 * i);
    return w;
  };
  for (size_t i = 0; i < sa.size(); ++i) {
    sa[i] = scale_word(i / 32 % 2 != 0);
    sb[i] = scale_word(i / 32 % 2 != 0);
  }
  const Buffer<u32> da(a), db(b), dsa(sa), dsb(sb);
  Buffer<float> dd(kRounds * 128);
  multiply_fragments<<<kRounds, 32>>>(da.data, db.data, dsa.data, dsb.data, dd.data);
  CUDA_CHECK(cudaDeviceSynchronize());
  const std::vector<float> d = dd.get();
  double worst = 0;
  for (int round = 0; round < kRounds; ++round) {
    const auto nibble = [](u32 w, int j) { return static_cast<u8>(w >> (4 * j) & 15u); };
    double wa[16][64], wb[64][8];
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, l = lane % 4;
      for (int i = 0; i < 4; ++i) {
        for (int j = 0; j < 8; ++j) {
          const int row = g + 8 * (i & 1), k = 8 * l + 32 * (i >> 1) + j;
          const u32 scales = sa[round * 32 + 4 * (row & 7) + (row >> 3)];
          wa[row][k] = static_cast<double>(ff::nvfp4::e2m1_to_float(nibble(a[(round * 32 + lane) * 4 + i], j))) *
                       ff::nvfp4::e4m3_to_float(static_cast<u8>(scales >> (8 * (k / 16))));
        }
      }
      for (int i = 0; i < 2; ++i) {
        for (int j = 0; j < 8; ++j) {
          const int k = 8 * l + 32 * i + j;
          const u32 scales = sb[round * 32 + 4 * g];
          wb[k][g] = static_cast<double>(ff::nvfp4::e2m1_to_float(nibble(b[(round * 32 + lane) * 2 + i], j))) *
                     ff::nvfp4::e4m3_to_float(static_cast<u8>(scales >> (8 * (k / 16))));
        }
      }
    }
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
        double sum = 0, size = 0;
        for (int k = 0; k < 64; ++k) {
          sum += wa[row][k] * wb[k][column];
          size += std::fabs(wa[row][k] * wb[k][column]);
        }
        if (size > 0) worst = std::max(worst, std::fabs(sum - d[(round * 32 + lane) * 4 + i]) / size);
      }
    }
  }
  const bool ok = worst < 1e-6;
  failures += !ok;
  std::printf("%s multiplication m16n8k64: largest error %.2e of the sum of magnitudes, %d tiles\n",
              ok ? "ok  " : "FAIL", worst, kRounds);
}

// ---- kernels --------------------------------------------------------------------------------------------------------

struct Kernel {
  void (*bf16)(GemmArgs);
  void (*fp4)(Fp4Args);
  unsigned smem;
  int threads, ctas, rows;  // of all operands
  int tokens;
  std::string name;

  void launch(const Fp4Args& args, int sms) const {
    const void* function = bf16 ? reinterpret_cast<const void*>(bf16) : reinterpret_cast<const void*>(fp4);
    CUDA_CHECK(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(smem)));
    const int grid = sms * ctas;
    if (bf16) {
      bf16<<<grid, threads, smem>>>(args.gemm);
    } else {
      fp4<<<grid, threads, smem>>>(args);
    }
    CUDA_CHECK(cudaGetLastError());
  }
};

template <ff::plan::Family F, bool GateUp, int Operands, int Tokens, int Rows, int K, int Stages, int Warps, int Ctas>
Kernel kernel() {
  using Tile = AsyncTileOf<F, GateUp, Operands, Tokens, Rows / Operands, K, Stages, Warps, Ctas>;
  constexpr unsigned kTotal = make_smem_map(Tile::value).total;
  static_assert(kTotal <= kSmemLimit);
  Kernel k{};
  if constexpr (F == ff::plan::Family::kFp4) {
    k.fp4 = moe_fp4<Tile>;
  } else {
    k.bf16 = moe_mma_sync<Tile>;
  }
  k.smem = kTotal;
  k.threads = Warps * 32;
  k.ctas = Ctas;
  k.rows = Rows;
  k.tokens = Tokens;
  k.name = std::to_string(Tokens) + "x" + std::to_string(Rows) + "x" + std::to_string(K) + " s" +
           std::to_string(Stages) + " w" + std::to_string(Warps) + " x" + std::to_string(Ctas);
  return k;
}

struct Set {
  Kernel gated, plain, down;
};
template <ff::plan::Family F, int Tokens, int Rows, int K, int Stages, int Warps, int Ctas>
Set set_of() {
  return {kernel<F, true, 2, Tokens, Rows, K, Stages, Warps, Ctas>(),
          kernel<F, true, 1, Tokens, Rows, K, Stages, Warps, Ctas>(),
          kernel<F, false, 1, Tokens, Rows, K, Stages, Warps, Ctas>()};
}

// ---- a layer --------------------------------------------------------------------------------------------------------

struct Shape {
  const char* name;
  int experts, top_k, hidden, intermediate;
  bool relu2;
};

// One warp per (row of x, output): fp32 dot products with dequantised weights of expert `expert[row]`.
__global__ void reference_rows(const u8* codes, const u8* scales, const float* x, const int* expert, long long count,
                               int rows, int k, float* out) {
  const long long warp = (blockIdx.x * 256LL + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32;
  if (warp >= count * rows) return;
  const long long i = warp / rows;
  const int row = static_cast<int>(warp % rows);
  float sum = 0.0f;
  if (expert[i] >= 0) {
    const unsigned long long r = static_cast<unsigned long long>(expert[i]) * rows + row;
    for (int c = lane; c < k; c += 32) sum += bench::weight_at(codes, scales, r, k, c) * x[i * k + c];
    for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
  }
  if (lane == 0) out[i * rows + row] = sum;
}

std::vector<float> reference_product(const Buffer<u8>& codes, const Buffer<u8>& scales, const std::vector<float>& x,
                                     const std::vector<int>& experts, int rows, int k) {
  const Buffer<float> dx(x);
  const Buffer<int> de(experts);
  Buffer<float> out(experts.size() * static_cast<size_t>(rows));
  const long long warps = static_cast<long long>(experts.size()) * rows;
  reference_rows<<<static_cast<unsigned>((warps + 7) / 8), 256>>>(
      codes.data, scales.data, dx.data, de.data, static_cast<long long>(experts.size()), rows, k, out.data);
  CUDA_CHECK(cudaDeviceSynchronize());
  return out.get();
}

// Rows in the device's order of fp4_layout.h to values.
void decode_row(const u8* codes, const u8* scales, int columns, float factor, float* out) {
  for (int c = 0; c < columns; ++c) {
    const int unit = c / 64, group = c / 16 % 4, k = c % 16;
    const int place = unit * 4 + group_place(group);
    const int byte = place * 8 + (k >> 2 & 1) * 4 + k_nibble(k) / 2;
    const u8 code = codes[byte] >> (4 * (k_nibble(k) % 2)) & 15;
    out[c] = ff::nvfp4::e2m1_to_float(code) * ff::nvfp4::e4m3_to_float(scales[place]) * factor;
  }
}

struct Layer {
  Shape shape;
  Buffer<u8> gate, gate_scales, up, up_scales, down, down_scales;
  Buffer<u8> packed_up, packed_down;
  std::vector<float> gate_up_factor, down_factor, down_input;
  Buffer<float> gate_up_factors, down_factors, down_inputs, input;
  float input_scale = 0.02f;

  explicit Layer(const Shape& s, bool adversarial) : shape(s) {
    const size_t e = s.experts, h = s.hidden, i = s.intermediate;
    const auto matrix = [&](Buffer<u8>* codes, Buffer<u8>* scales, unsigned long long seed) {
      *codes = Buffer<u8>(e * h * i / 2);
      *scales = Buffer<u8>(e * h * i / 16);
      bench::fill_codes<<<1024, 256>>>(reinterpret_cast<u32*>(codes->data), e * h * i / 8, seed);
      bench::fill_scales<<<1024, 256>>>(scales->data, e * h * i / 16, seed * 77 + 5, adversarial);
    };
    matrix(&gate, &gate_scales, 1000);
    matrix(&up, &up_scales, 2000000);
    matrix(&down, &down_scales, 4000000);
    const auto pack = [&](const Buffer<u8>& c0, const Buffer<u8>& s0, const Buffer<u8>& c1, const Buffer<u8>& s1,
                          int rows, int k, bool pair) {
      const int row_tiles = (pair ? 2 : 1) * rows / 16;
      const unsigned long long units = e * static_cast<unsigned long long>(row_tiles) * (k / 64);
      Buffer<u8> out(units * kUnitBytes);
      Buffer<int> bad(std::vector<int>{0, 0, 0, 0});
      bench::repack<<<2048, 128>>>(c0.data, s0.data, c1.data, s1.data, rows, k, pair, row_tiles, units, out.data,
                                   bad.data);
      CUDA_CHECK(cudaDeviceSynchronize());
      return out;
    };
    packed_up = s.relu2 ? pack(up, up_scales, up, up_scales, s.intermediate, s.hidden, false)
                        : pack(gate, gate_scales, up, up_scales, s.intermediate, s.hidden, true);
    packed_down = pack(down, down_scales, down, down_scales, s.hidden, s.intermediate, false);
    std::mt19937 random(3);
    const auto around = [&](float x) { return x * (0.5f + static_cast<float>(random() % 1000) / 1000.0f); };
    const float up_factor = (adversarial ? 0.006f : 0.3f) / std::sqrt(static_cast<float>(s.hidden));
    for (int x = 0; x < s.experts; ++x) {
      if (!s.relu2) gate_up_factor.push_back(around(up_factor));
      gate_up_factor.push_back(around(up_factor));
      down_factor.push_back(around((adversarial ? 0.006f : 0.3f) / std::sqrt(static_cast<float>(s.intermediate))));
      down_input.push_back(around(0.005f));
    }
    gate_up_factors = Buffer<float>(gate_up_factor);
    down_factors = Buffer<float>(down_factor);
    down_inputs = Buffer<float>(down_input);
    input = Buffer<float>(std::vector<float>(4, input_scale));
  }
};

enum class Ids { kUniform, kOne, kMissing, kDuplicate };
const char* name_of(Ids mode) {
  return mode == Ids::kUniform   ? "uniform"
         : mode == Ids::kOne     ? "one expert"
         : mode == Ids::kMissing ? "missing"
                                 : "duplicate";
}

double relative(const std::vector<float>& got, const std::vector<float>& want, bool* finite) {
  double error = 0, size = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    if (!std::isfinite(got[i])) *finite = false;
    error += std::pow(static_cast<double>(got[i]) - want[i], 2);
    size += std::pow(static_cast<double>(want[i]), 2);
  }
  return size == 0 ? (error == 0 ? 0 : 1) : std::sqrt(error / size);
}

void check(const Layer& layer, const Set& set, bool fp4, int tokens, Ids mode, float limit, bool timed) {
  const Shape& s = layer.shape;
  const int top_k = s.top_k, picks = tokens * top_k;
  const int hidden_units = s.hidden / 64, inner_units = s.intermediate / 64;
  const Kernel& gate_up = s.relu2 ? set.plain : set.gated;
  int sms = 0;
  CUDA_CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));

  std::mt19937 random(static_cast<unsigned>(tokens * 31 + static_cast<int>(mode)));
  std::vector<int> ids(picks);
  std::vector<float> weights(picks);
  std::vector<u16> x(static_cast<size_t>(tokens) * s.hidden);
  for (u16& v : x) v = ff::nvfp4::float_to_bf16(bench::normal(random()));
  std::vector<int> order(s.experts);
  for (int i = 0; i < s.experts; ++i) order[i] = i;
  for (int t = 0; t < tokens; ++t) {
    std::shuffle(order.begin(), order.end(), random);
    for (int c = 0; c < top_k; ++c) {
      int id = order[c % s.experts];
      if (mode == Ids::kOne) id = s.experts - 1;
      if (mode == Ids::kDuplicate) id = order[c / 2 % s.experts];
      if (mode == Ids::kMissing && (t % 3 == 2 || c % 2 == 1)) id = c % 4 < 2 ? -1 : s.experts + c;
      ids[t * top_k + c] = id;
      weights[t * top_k + c] = static_cast<float>(random() % 1000) / 1000.0f;
    }
    // A token without any expert may be anything.
    if (mode == Ids::kMissing && t % 3 == 2) std::fill_n(x.begin() + static_cast<long>(t) * s.hidden, s.hidden, 0x7fc0);
  }
  const Buffer<u16> dx(x);
  const Buffer<int> dids(ids);
  const Buffer<float> dweights(weights);
  const int blocks = max_blocks(picks, s.experts, set.down.tokens);
  const size_t slots = static_cast<size_t>(picks) + 8 * static_cast<size_t>(s.experts) + 8;
  Buffer<int> counts(4), slot_token(slots), pick_slot(picks), totals(1025), stored(blocks), finished(kMostSums);
  Buffer<Block> block_table(blocks);
  Buffer<u8> x_codes(static_cast<size_t>(tokens) * hidden_units * 32),
      x_scales(static_cast<size_t>(tokens) * hidden_units * 4);
  Buffer<u8> h_codes(slots * inner_units * 32), h_scales(slots * inner_units * 4);
  Buffer<u16> h(slots * s.intermediate), y(static_cast<size_t>(tokens) * s.hidden);
  Buffer<float> partial(slots * s.hidden);
  counts.fill(0xff);
  block_table.fill(0xff);
  pick_slot.fill(0x7f);
  slot_token.fill(0x7f);
  totals.fill(0);
  h.fill(0xff);
  y.fill(0xff);
  partial.fill(0xff);
  x_codes.fill(0xff);
  x_scales.fill(0xff);
  h_codes.fill(0xff);
  h_scales.fill(0xff);

  const Routing routing{dids.data, dweights.data, tokens, top_k, s.experts};
  const RouteTable route{counts.data, block_table.data, slot_token.data, pick_slot.data,
                         totals.data, stored.data,      finished.data};
  Fp4Args a{}, b{};
  a.gemm.weights = layer.packed_up.data;
  a.gemm.row_tiles = (s.relu2 ? 1 : 2) * s.intermediate / 16;
  a.gemm.units = hidden_units;
  a.gemm.expert_bytes = packed_bytes(a.gemm.row_tiles * 16, s.hidden);
  a.gemm.scales = layer.gate_up_factors.data;
  a.gemm.limit = limit;
  a.gemm.routing = routing;
  a.gemm.route = route;
  b.gemm = a.gemm;
  b.gemm.weights = layer.packed_down.data;
  b.gemm.row_tiles = s.hidden / 16;
  b.gemm.units = inner_units;
  b.gemm.expert_bytes = packed_bytes(s.hidden, s.intermediate);
  b.gemm.scales = layer.down_factors.data;
  b.gemm.out = partial.data;
  b.gemm.out_stride = s.hidden;
  const long long groups = packed_row_values(s.hidden) / 4;  // no more bytes than fp32 rows
  if (fp4) {
    b.gemm.out_stride = groups;
    a.gemm.source = reinterpret_cast<const u16*>(x_codes.data);
    a.gemm.source_stride = hidden_units * 32;
    a.source_scales = x_scales.data;
    a.source_scale_stride = hidden_units * 4;
    a.input_scales = layer.input.data;
    a.output_scales = layer.down_inputs.data;
    a.gemm.out = h_codes.data;
    a.gemm.out_stride = inner_units * 32;
    a.out_scales = h_scales.data;
    a.out_scale_stride = inner_units * 4;
    b.gemm.source = reinterpret_cast<const u16*>(h_codes.data);
    b.gemm.source_stride = inner_units * 32;
    b.source_scales = h_scales.data;
    b.source_scale_stride = inner_units * 4;
    b.input_scales = layer.down_inputs.data;
  } else {
    a.gemm.source = dx.data;
    a.gemm.source_stride = s.hidden;
    a.gemm.out = h.data;
    a.gemm.out_stride = s.intermediate;
    b.gemm.source = h.data;
    b.gemm.source_stride = s.intermediate;
  }
  const auto run = [&] {
    if (fp4) {
      moe_quantize<<<dim3((hidden_units * 4 + 127) / 128, tokens), 128>>>(
          dx.data, s.hidden, s.hidden, hidden_units, layer.input.data, x_codes.data, hidden_units * 32, x_scales.data,
          hidden_units * 4);
    }
    if (picks <= kRouteOnePass) {
      moe_route<<<1, kRouteThreads>>>(routing, route, set.down.tokens);
    } else {
      const int grid = (picks + kRouteManyPicks - 1) / kRouteManyPicks;
      moe_route_count<<<grid, kRouteThreads>>>(routing, route, set.down.tokens);
      moe_route_scatter<<<grid, kRouteManyThreads>>>(routing, route);
    }
    gate_up.launch(a, sms);
    set.down.launch(b, sms);
    const dim3 sums((s.hidden + 1023) / 1024, tokens);
    if (fp4) {
      moe_combine_packed<<<sums, kCombinePackedThreads>>>(reinterpret_cast<const PackedGroup*>(partial.data), groups,
                                                          pick_slot.data, routing, nullptr, s.hidden, y.data, s.hidden);
    } else {
      moe_combine<<<sums, kCombineThreads>>>(partial.data, s.hidden, pick_slot.data, dweights.data, top_k, s.hidden,
                                             y.data, s.hidden, 0);
    }
    CUDA_CHECK(cudaGetLastError());
  };
  run();
  CUDA_CHECK(cudaDeviceSynchronize());

  // ---- the reference, on some of the tokens
  std::vector<int> sample;
  for (int t = 0; t < tokens; t += std::max(1, tokens / 16)) sample.push_back(t);
  const std::vector<int> slot_of = pick_slot.get();
  std::vector<int> pick_expert;
  std::vector<float> rows;
  bool exact = true;
  const std::vector<u8> xc = x_codes.get(), xs = x_scales.get();
  for (const int t : sample) {
    std::vector<float> row(s.hidden);
    for (int c = 0; c < s.hidden; ++c) row[c] = ff::nvfp4::bf16_to_float(x[static_cast<size_t>(t) * s.hidden + c]);
    if (fp4) {
      std::vector<u8> codes(s.hidden / 2), scales(s.hidden / 16);
      for (float& v : row) v = std::isnan(v) ? 0.0f : v;
      ff::nvfp4::quantize_activations(row, 1.0f / layer.input_scale, codes, scales);
      ff::nvfp4::dequantize_row(codes, scales, layer.input_scale, row);
      std::vector<float> device(s.hidden);
      decode_row(&xc[static_cast<size_t>(t) * hidden_units * 32], &xs[static_cast<size_t>(t) * hidden_units * 4],
                 s.hidden, layer.input_scale, device.data());
      for (int c = 0; c < s.hidden; ++c) exact = exact && device[c] == row[c];
    }
    for (int c = 0; c < top_k; ++c) {
      const int id = ids[t * top_k + c];
      pick_expert.push_back(id >= 0 && id < s.experts ? id : -1);
      rows.insert(rows.end(), row.begin(), row.end());
    }
  }
  const int inner = s.intermediate;
  const std::vector<float> ups = reference_product(layer.up, layer.up_scales, rows, pick_expert, inner, s.hidden);
  std::vector<float> gates;
  if (!s.relu2) gates = reference_product(layer.gate, layer.gate_scales, rows, pick_expert, inner, s.hidden);
  std::vector<float> want_h(pick_expert.size() * inner, 0.0f), got_h(pick_expert.size() * inner, 0.0f);
  std::vector<float> want_input = want_h;  // of down, quantised
  const std::vector<u8> hc = h_codes.get(), hs = h_scales.get();
  const std::vector<u16> hb = h.get();
  size_t differ = 0, of = 0;
  for (size_t p = 0; p < pick_expert.size(); ++p) {
    const int e = pick_expert[p];
    const int slot = slot_of[static_cast<size_t>(sample[p / top_k]) * top_k + p % top_k];
    if ((e < 0) != (slot < 0)) {
      ++failures;
      std::printf("FAIL slot of a pick\n");
      return;
    }
    if (e < 0) continue;
    std::vector<float> row(inner);
    for (int c = 0; c < inner; ++c) {
      if (s.relu2) {
        const float v = std::max(0.0f, ups[p * inner + c] * layer.gate_up_factor[e]);
        row[c] = v * v;
      } else {
        float g = gates[p * inner + c] * layer.gate_up_factor[2 * e];
        float u = ups[p * inner + c] * layer.gate_up_factor[2 * e + 1];
        if (limit > 0) {
          g = std::min(g, limit);
          u = std::clamp(u, -limit, limit);
        }
        row[c] = g / (1 + std::exp(-g)) * u;
      }
    }
    std::copy(row.begin(), row.end(), want_h.begin() + static_cast<long>(p) * inner);
    if (fp4) {
      std::vector<u8> codes(inner / 2), scales(inner / 16);
      ff::nvfp4::quantize_activations(row, 1.0f / layer.down_input[e], codes, scales);
      ff::nvfp4::dequantize_row(codes, scales, layer.down_input[e],
                                {&want_input[p * inner], static_cast<size_t>(inner)});
      decode_row(&hc[static_cast<size_t>(slot) * inner_units * 32], &hs[static_cast<size_t>(slot) * inner_units * 4],
                 inner, layer.down_input[e], &got_h[p * inner]);
      for (int c = 0; c < inner; ++c) differ += want_input[p * inner + c] != got_h[p * inner + c];
      of += inner;
    } else {
      for (int c = 0; c < inner; ++c)
        got_h[p * inner + c] = ff::nvfp4::bf16_to_float(hb[static_cast<size_t>(slot) * inner + c]);
    }
  }
  bool finite = true;
  const double h_error = relative(got_h, fp4 ? want_input : want_h, &finite);
  // Down from the device's own h: nothing but this product, the weights and the sum.
  const std::vector<float> products =
      reference_product(layer.down, layer.down_scales, got_h, pick_expert, s.hidden, inner);
  const std::vector<u16> out = y.get();
  std::vector<float> want_y(sample.size() * s.hidden, 0.0f), got_y(sample.size() * s.hidden);
  for (size_t p = 0; p < pick_expert.size(); ++p) {
    if (pick_expert[p] < 0) continue;
    const float w =
        weights[static_cast<size_t>(sample[p / top_k]) * top_k + p % top_k] * layer.down_factor[pick_expert[p]];
    for (int c = 0; c < s.hidden; ++c) want_y[p / top_k * s.hidden + c] += products[p * s.hidden + c] * w;
  }
  for (size_t i = 0; i < sample.size(); ++i) {
    for (int c = 0; c < s.hidden; ++c) {
      got_y[i * s.hidden + c] = ff::nvfp4::bf16_to_float(out[static_cast<size_t>(sample[i]) * s.hidden + c]);
    }
  }
  const double y_error = relative(got_y, want_y, &finite);
  const double differing = of == 0 ? 0 : static_cast<double>(differ) / static_cast<double>(of);
  const bool ok = finite && exact && y_error < 4e-3 && (fp4 ? differing < 2e-3 && h_error < 1e-2 : h_error < 4e-3);
  failures += !ok;
  float us = 0;
  if (timed) {
    cudaEvent_t begin, end;
    CUDA_CHECK(cudaEventCreate(&begin));
    CUDA_CHECK(cudaEventCreate(&end));
    CUDA_CHECK(cudaEventRecord(begin));
    for (int i = 0; i < 10; ++i) run();
    CUDA_CHECK(cudaEventRecord(end));
    CUDA_CHECK(cudaEventSynchronize(end));
    CUDA_CHECK(cudaEventElapsedTime(&us, begin, end));
    us *= 100;
  }
  std::printf("%s %s %-22s %4d tokens %-10s %-24s h %.1e y %.1e%s", ok ? "ok  " : "FAIL", fp4 ? "fp4 " : "bf16", s.name,
              tokens, name_of(mode), set.down.name.c_str(), h_error, y_error, finite ? "" : " NOT FINITE");
  if (fp4) std::printf(" codes of h that differ %.1e%s", differing, exact ? "" : " x NOT EXACT");
  if (timed) std::printf(" %.1f us", us);
  std::printf("\n");
}

}  // namespace

int main(int argc, char** argv) {
  bool quick = false, small = false, timed = false;
  for (int i = 1; i < argc; ++i) {
    quick |= std::strcmp(argv[i], "--quick") == 0;
    small |= std::strcmp(argv[i], "--small") == 0;  // the smallest shapes, for tools that slow everything down
    timed |= std::strcmp(argv[i], "--time") == 0;
  }
  check_multiplication();
  constexpr auto kF = ff::plan::Family::kFp4;
  constexpr auto kM = ff::plan::Family::kMmaSync;
  std::vector<Set> fp4, bf16;
  fp4.push_back(set_of<kF, 8, 128, 64, 6, 4, 2>());
  fp4.push_back(set_of<kF, 64, 128, 64, 3, 8, 2>());
  bf16.push_back(set_of<kM, 8, 64, 64, 4, 4, 4>());
  bf16.push_back(set_of<kM, 64, 128, 64, 3, 8, 1>());
#ifndef QUICK_BUILD
  fp4.push_back(set_of<kF, 8, 256, 256, 2, 8, 1>());
  fp4.push_back(set_of<kF, 16, 128, 128, 3, 4, 2>());
  fp4.push_back(set_of<kF, 32, 64, 64, 4, 4, 2>());
  fp4.push_back(set_of<kF, 96, 128, 64, 3, 4, 2>());
  fp4.push_back(set_of<kF, 128, 128, 128, 2, 8, 1>());
  bf16.push_back(set_of<kM, 8, 128, 256, 2, 8, 1>());
  bf16.push_back(set_of<kM, 16, 64, 128, 3, 4, 2>());
  bf16.push_back(set_of<kM, 24, 256, 64, 2, 4, 1>());
  bf16.push_back(set_of<kM, 64, 64, 128, 2, 8, 1>());
  bf16.push_back(set_of<kM, 128, 128, 64, 3, 8, 1>());
#endif
  const Shape shapes[] = {{"K 64, I 64", 4, 1, 64, 64, false},
                          {"K 128, I 320", 8, 2, 128, 320, false},
                          {"H 2560, I 640 top-10", 16, 10, 2560, 640, false},
                          {"H 2560, I 320 top-10", 16, 10, 2560, 320, false},
                          {"H 2048, I 704 top-16", 24, 16, 2048, 704, false},
                          {"H 2688, I 1856 relu2", 12, 6, 2688, 1856, true},
                          {"H 2048, I 512 top-8", 32, 8, 2048, 512, false},
                          {"H 4096, I 1024 top-8", 12, 8, 4096, 1024, false}};
  int number = 0;
  for (const Shape& shape : shapes) {
    for (const bool adversarial : {false, true}) {
      if (small && shape.hidden > 128) continue;
      const Layer layer(shape, adversarial);
      const float limit = adversarial && !shape.relu2 ? 1.0f : 0.0f;
      for (const int tokens : {1, 7, 63, 300}) {
        if (small && tokens > 63) continue;
        for (const Ids mode : {Ids::kUniform, Ids::kOne, Ids::kMissing, Ids::kDuplicate}) {
          // Every tile meets every shape; with --quick one tile per case.
          for (size_t i = 0; i < std::max(fp4.size(), bf16.size()); ++i) {
            if (mode != Ids::kUniform && (number + i) % 3 != 0) continue;
            if (quick && i != static_cast<size_t>(number) % std::max(fp4.size(), bf16.size())) continue;
            if (i < fp4.size()) check(layer, fp4[i], true, tokens, mode, limit, timed);
            if (i < bf16.size()) check(layer, bf16[i], false, tokens, mode, limit, timed);
          }
          ++number;
        }
        std::fflush(stdout);
      }
    }
  }
  std::printf("%d failures\n", failures);
  return failures != 0;
}
