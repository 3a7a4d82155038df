#include "kernels/expert_layer.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "cuda/moe/reference.h"
#include "kernels/moe/layout.h"

namespace fourfold::moe {
namespace {

using executor::Device;
using nvfp4::bf16_to_float;

struct Matrix {
  int rows, k;
  std::vector<unsigned char> codes, scales;
  Matrix(int rows_, int k_)
      : rows(rows_),
        k(k_),
        codes(static_cast<size_t>(rows_) * static_cast<size_t>(k_ / 2)),
        scales(static_cast<size_t>(rows_) * static_cast<size_t>(k_ / 16)) {}
  SourceMatrix source() const { return {codes.data(), scales.data(), k / 2, k / 16}; }
  float at(int row, int i) const {
    const unsigned char pair =
        codes[static_cast<size_t>(row) * static_cast<size_t>(k / 2) + static_cast<size_t>(i / 2)];
    return nvfp4::nvfp4_product(
        static_cast<unsigned char>(i % 2 != 0 ? pair >> 4 : pair & 15),
        scales[static_cast<size_t>(row) * static_cast<size_t>(k / 16) + static_cast<size_t>(i / 16)]);
  }
};

int up_to(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

// `rows` x `k`; beyond k, up to `stored_k`, codes and scales that must not be looked at.
Matrix random_matrix(int rows, int k, int stored_k, std::mt19937& rng, bool adversarial) {
  Matrix m(rows, stored_k);
  std::fill(m.codes.begin(), m.codes.end(), 0xff);
  std::fill(m.scales.begin(), m.scales.end(), 0x7f);
  for (int r = 0; r < rows; ++r) {
    for (int i = 0; i < k / 2; ++i) m.codes[static_cast<size_t>(r * (m.k / 2) + i)] = static_cast<unsigned char>(rng());
    for (int i = 0; i < k / 16; ++i) {
      m.scales[static_cast<size_t>(r * (m.k / 16) + i)] =
          static_cast<unsigned char>(adversarial ? rng() % 127 | (rng() % 16 == 0 ? 128 : 0) : 0x30 + rng() % 16);
    }
  }
  return m;
}

}  // namespace

LayerWeights make_weights(const LayerShape& shape, unsigned seed, bool adversarial) {
  std::mt19937 rng(seed);
  LayerWeights w;
  w.shape = shape;
  const int h = shape.hidden;
  const int n = shape.intermediate;
  const auto unpack = [](const Matrix& m, int rows, int k, std::vector<float>* out) {
    for (int r = 0; r < rows; ++r)
      for (int i = 0; i < k; ++i) out->push_back(m.at(r, i));
  };
  std::vector<unsigned char> unit(kUnitBytes);
  for (int e = 0; e < shape.experts; ++e) {
    const Matrix gate = random_matrix(n, h, up_to(h, kUnitK), rng, adversarial);
    const Matrix up = random_matrix(n, h, up_to(h, kUnitK), rng, adversarial);
    const Matrix down = random_matrix(h, n, up_to(n, kUnitK), rng, adversarial);
    unpack(gate, n, h, &w.gate);
    unpack(up, n, h, &w.up);
    unpack(down, h, n, &w.down);
    const auto repack = [&](const Matrix& first, const Matrix& second, int k, bool paired, auto* out) {
      for (int tile = 0; tile < first.rows / (paired ? 8 : 16); ++tile) {
        for (int u = 0; u < first.k / kUnitK; ++u) {
          const int row = tile * (paired ? 8 : 16);
          if (!repack_unit(first.source(), row, second.source(), paired ? row : row + 8, u, unit.data(),
                           (k - u * kUnitK) / kBlockK)) {
            throw std::logic_error("repack_unit looked at the padding");
          }
          out->insert(out->end(), unit.begin(), unit.end());
        }
      }
    };
    repack(shape.gated ? gate : up, up, h, shape.gated, &w.gate_up_packed);
    repack(down, down, n, false, &w.down_packed);
    const float rms = adversarial ? 2.9f * 140.0f : 2.9f * 1.1f;
    const auto vary = [&] { return 0.8f + 0.4f * static_cast<float>(rng() % 1000) / 1000.0f; };
    if (shape.gated) w.gate_up_scales.push_back(vary() / (rms * std::sqrt(static_cast<float>(h))));
    w.gate_up_scales.push_back(2.0f * vary() / (rms * std::sqrt(static_cast<float>(h))));
    w.down_scales.push_back(vary() / (rms * std::sqrt(static_cast<float>(n))));
  }
  return w;
}

LayerInput make_input(const LayerShape& shape, int tokens, Pattern pattern, unsigned seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal;
  LayerInput in;
  in.tokens = tokens;
  in.rows.resize(static_cast<size_t>(tokens) * static_cast<size_t>(shape.hidden));
  for (auto& v : in.rows) v = nvfp4::float_to_bf16(normal(rng));
  std::vector<int> all(static_cast<size_t>(shape.experts));
  for (int e = 0; e < shape.experts; ++e) all[static_cast<size_t>(e)] = e;
  for (int t = 0; t < tokens; ++t) {
    std::shuffle(all.begin(), all.end(), rng);
    const bool padding = pattern == Pattern::kHoles && tokens > 1 && t == tokens / 2;
    for (int k = 0; k < shape.top_k; ++k) {
      int id = all[static_cast<size_t>(k % shape.experts)];
      if (pattern == Pattern::kOneExpert && k == 0) id = shape.experts - 1;
      if (pattern == Pattern::kOneExpert && k > 0 && id == shape.experts - 1) id = -1;
      if (pattern == Pattern::kHoles && rng() % 3 == 0) {
        id = rng() % 2 == 0 ? -1 : shape.experts + static_cast<int>(rng() % 100);
      }
      if (pattern == Pattern::kDuplicates && rng() % 2 == 0) id = all[0];
      if (pattern == Pattern::kNobody) id = k % 2 == 0 ? -1 : 0x7fffffff;
      in.ids.push_back(padding ? -1 : id);
      in.weights.push_back(0.1f + static_cast<float>(rng() % 1000) / 1000.0f / static_cast<float>(shape.top_k));
    }
    if (padding) {
      for (int i = 0; i < shape.hidden; ++i) in.rows[static_cast<size_t>(t * shape.hidden + i)] = 0x7fc0;
    }
  }
  return in;
}

std::vector<ExpertKernel> all_kernels() {
  std::vector<ExpertKernel> all = stream_kernels();
  for (const auto& more : {prefill_kernels(), async_kernels()}) all.insert(all.end(), more.begin(), more.end());
  return all;
}

bool fit(const ExpertKernel& up, const ExpertKernel& down) {
  return up.gate_up() && !down.gate_up() && up.one() == down.one() && up.tokens() == down.tokens() &&
         up.row().rows == down.row().rows;
}

namespace {

plan::moe::Problem problem_of(const LayerShape& s) {
  plan::moe::Problem p;
  p.experts = s.experts;
  p.top_k = s.top_k;
  p.hidden = s.hidden;
  p.intermediate = s.intermediate;
  p.activation = s.gated ? plan::moe::Activation::kSwiGlu : plan::moe::Activation::kRelu2;
  return p;
}

cuda::PlainExpert expert_of(const LayerWeights& w, int expert) {
  const auto e = static_cast<size_t>(expert);
  const auto of = [&](const std::vector<float>& all) {
    const size_t each = all.size() / static_cast<size_t>(w.shape.experts);
    const auto first = all.begin() + static_cast<std::ptrdiff_t>(e * each);
    return std::vector<float>(first, first + static_cast<std::ptrdiff_t>(each));
  };
  cuda::PlainExpert plain;
  if (w.shape.gated) {
    plain.gate = of(w.gate);
    plain.gate_scale = w.gate_up_scales[2 * e];
  }
  plain.up = of(w.up);
  plain.up_scale = w.gate_up_scales[w.shape.gated ? 2 * e + 1 : e];
  plain.down = of(w.down);
  plain.down_scale = w.down_scales[e];
  return plain;
}

}  // namespace

std::vector<float> input_scales(const LayerWeights& w, const LayerInput& in) {
  const LayerShape& s = w.shape;
  std::vector<float> largest(static_cast<size_t>(s.experts) + 1, 0.0f);
  const auto raise = [&](size_t at, float value) { largest[at] = std::max(largest[at], std::fabs(value)); };
  for (size_t pick = 0; pick < in.ids.size(); ++pick) {
    const int id = in.ids[pick];
    if (id < 0 || id >= s.experts) continue;
    const cuda::PlainExpert e = expert_of(w, id);
    std::vector<float> x;
    for (int i = 0; i < s.hidden; ++i) {
      x.push_back(bf16_to_float(
          in.rows[pick / static_cast<size_t>(s.top_k) * static_cast<size_t>(s.hidden) + static_cast<size_t>(i)]));
      raise(0, x.back());
    }
    for (int r = 0; r < s.intermediate; ++r) {
      const auto row = static_cast<size_t>(r) * x.size();
      const float g = s.gated ? cuda::dot(&e.gate[row], x.data(), s.hidden).value * e.gate_scale : 0.0f;
      const float u = cuda::dot(&e.up[row], x.data(), s.hidden).value * e.up_scale;
      raise(static_cast<size_t>(id) + 1, cuda::activate(problem_of(s).activation, in.limit, g, 0, u, 0).value);
    }
  }
  for (float& v : largest) v = v == 0.0f ? 1.0f : v / (nvfp4::kE2m1Max * nvfp4::kE4m3Max);
  return largest;
}

std::vector<float> reference(const LayerWeights& w, const LayerInput& in, bool fp4) {
  std::vector<int64_t> tokens(static_cast<size_t>(in.tokens));
  std::iota(tokens.begin(), tokens.end(), 0);
  std::optional<nvfp4::LayerInputScales> scales;
  if (fp4) {
    const std::vector<float> all = input_scales(w, in);
    scales.emplace();
    scales->gate_up = all[0];
    scales->down.assign(all.begin() + 1, all.end());
  }
  return cuda::reference_layer(
      problem_of(w.shape), [&](int expert) { return expert_of(w, expert); }, in.rows, in.ids, in.weights, tokens,
      in.limit, scales);
}

namespace {

// `count` pieces, far apart.
template <typename T>
const T* spread(Device& device, const std::vector<T>& values, int count, size_t stride, const char* name) {
  T* p = static_cast<T*>(device.reserve(static_cast<size_t>(std::max(count, 1)) * stride * sizeof(T), name));
  const size_t each = count == 0 ? 0 : values.size() / static_cast<size_t>(count);
  for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
    std::copy_n(values.begin() + static_cast<std::ptrdiff_t>(i * each), each, p + i * stride);
  }
  device.make_constant(p);
  return p;
}

RouteTable make_table(Device& device, size_t picks, const LayerShape& s, int tile) {
  const int experts = route_kernels().max_experts;
  RouteTable table;
  table.counts = device.alloc<int>(2, "route.counts");
  const auto blocks = static_cast<size_t>(max_blocks(static_cast<long long>(picks), s.experts, tile));
  table.blocks = device.alloc<Block>(blocks, "route.blocks");
  table.slot_token = device.alloc<int>(
      static_cast<size_t>(max_slots(static_cast<long long>(picks), s.experts) + kSlotsBeyond), "route.slot_token");
  table.pick_slot = device.alloc<int>(picks, "route.pick_slot");
  table.totals = device.alloc<int>(static_cast<size_t>(experts) + 1, "route.totals");
  std::fill_n(table.totals, experts + 1, 0);
  table.stored = device.alloc<int>(blocks, "route.stored");
  table.finished = device.alloc<int>(kMostSums, "route.finished");
  return table;
}

using Launch = std::function<void(const std::string& name, executor::Index3 grid, int threads, unsigned shared,
                                  const std::function<void()>& body)>;

void launch_route(const Launch& launch, const Routing& routing, const RouteTable& table, int tile) {
  const RouteKernels route = route_kernels();
  const int picks = routing.tokens * routing.top_k;
  if (picks <= route.one_pass_picks) {
    launch("route", {}, route.one_pass_threads, 0, [&] { route.one_pass(routing, table, tile); });
    return;
  }
  const unsigned ctas = static_cast<unsigned>((picks + route.many_picks - 1) / route.many_picks);
  launch("route count", {ctas}, route.count_threads, 0, [&] { route.count(routing, table, tile); });
  launch("route scatter", {ctas}, route.scatter_threads, 0, [&] { route.scatter(routing, table); });
}

void check_scratch(const RouteTable& table) {
  for (int e = 0; e <= route_kernels().max_experts; ++e) {
    if (table.totals[e] != 0) throw executor::Violation("the routing left its scratch dirty");
  }
}

std::string check_table(const Routing& r, const int* ids, const RouteTable& table, int tile) {
  const int picks = r.tokens * r.top_k;
  std::vector<std::vector<int>> of_expert(static_cast<size_t>(r.experts));  // tokens
  int slots = 0;
  for (int p = 0; p < picks; ++p) {
    if (ids[p] < 0 || ids[p] >= r.experts) continue;
    of_expert[static_cast<size_t>(ids[p])].push_back(p / r.top_k);
  }
  for (const std::vector<int>& tokens : of_expert) slots += up_to(static_cast<int>(tokens.size()), 8);
  if (slots > max_slots(picks, r.experts)) return "more slots than max_slots()";
  if (table.counts[1] != slots) return fmt::format("{} slots, wanted {}", table.counts[1], slots);
  const int blocks = table.counts[0];
  if (blocks < 0 || blocks > max_blocks(picks, r.experts, tile)) return fmt::format("{} blocks", blocks);
  std::vector<int> expert_of_slot(static_cast<size_t>(slots), -1);
  for (int b = 0; b < blocks; ++b) {
    const Block& block = table.blocks[b];
    if (block.expert < 0 || block.expert >= r.experts || block.count < 0 || block.count > tile || block.first < 0 ||
        block.first % 8 != 0 || block.first + block.count > slots) {
      return fmt::format("block {}: expert {}, slots {} + {}", b, block.expert, block.first, block.count);
    }
    for (int i = 0; i < block.count; ++i) {
      int& e = expert_of_slot[static_cast<size_t>(block.first + i)];
      if (e != -1) return fmt::format("slot {} is in two blocks", block.first + i);
      e = block.expert;
    }
  }
  std::vector<int> uses(static_cast<size_t>(slots), 0);
  for (int p = 0; p < picks; ++p) {
    const int slot = table.pick_slot[p];
    const bool valid = ids[p] >= 0 && ids[p] < r.experts;
    if (!valid) {
      if (slot != -1) return fmt::format("pick {} has no expert and slot {}", p, slot);
      continue;
    }
    if (slot < 0 || slot >= slots) return fmt::format("pick {}: slot {} of {}", p, slot, slots);
    if (uses[static_cast<size_t>(slot)]++ != 0) return fmt::format("slot {} belongs to two picks", slot);
    if (table.slot_token[slot] != p / r.top_k) return fmt::format("slot {}: token {}", slot, table.slot_token[slot]);
    if (expert_of_slot[static_cast<size_t>(slot)] != ids[p]) return fmt::format("slot {}: another expert's", slot);
  }
  return "";
}

}  // namespace

std::string check_route(const LayerShape& shape, const LayerInput& in, int tile, const executor::Options& options,
                        std::set<executor::SeenSite>* seen) {
  try {
    Device device(options);
    const RouteTable table = make_table(device, in.ids.size(), shape, tile);
    const Routing routing{device.constant(in.ids, "ids"), device.constant(in.weights, "router weights"), in.tokens,
                          shape.top_k, shape.experts};
    device.produced(routing.ids);
    launch_route(
        [&](const std::string& name, executor::Index3 grid, int threads, unsigned shared,
            const std::function<void()>& body) {
          device.launch({name, grid, threads, shared, true, static_cast<int>(grid.x)}, body);
        },
        routing, table, tile);
    if (seen != nullptr) seen->insert(device.seen().begin(), device.seen().end());
    check_scratch(table);
    return check_table(routing, in.ids.data(), table, tile);
  } catch (const executor::Violation& v) {
    return v.what();
  }
}

// What one-token layers leave to the next: its half of the rows, all ones where it may write.
static void check_turn(const OneTurn& turn, int layers, const unsigned short* h, size_t rows, size_t stride) {
  if (turn.half != layers % 2 || turn.arrived != 0) {
    throw executor::Violation(fmt::format("turn {}, {} arrived after {} layers", turn.half, turn.arrived, layers));
  }
  const unsigned short* half = h + static_cast<size_t>(turn.half) * kExchangeRows * stride;
  if (!std::all_of(half, half + rows * stride, [](unsigned short v) { return v == 0xffff; })) {
    throw executor::Violation("the next layer's half is not all ones");
  }
}

LayerRun run_layer(const LayerWeights& w, const LayerInput& in, const ExpertKernel& up, const ExpertKernel& down,
                   const executor::Options& options, int sms) {
  const LayerShape& s = w.shape;
  const int wide = up_to(s.hidden, kUnitK);
  const int deep = up_to(s.intermediate, kUnitK);
  const RouteKernels route = route_kernels();
  Device device(options);
  LayerRun run;
  const size_t picks = static_cast<size_t>(in.tokens) * static_cast<size_t>(s.top_k);
  const size_t slots = static_cast<size_t>(max_slots(static_cast<long long>(picks), s.experts));
  // Unsorted: two halves of rows, all ones until they are written.
  const size_t h_rows = up.one() ? 2 * size_t{kExchangeRows} : slots;
  auto* h = device.alloc<unsigned short>(h_rows * static_cast<size_t>(deep), "activations");
  auto* turn = device.alloc<OneTurn>(1, "turn");
  *turn = {};
  if (!up.slots() && !up.one()) {  // columns past the intermediate size are zero, and stay it
    for (size_t row = 0; row < h_rows; ++row) {
      for (int i = s.intermediate; i < deep; ++i) h[row * static_cast<size_t>(deep) + static_cast<size_t>(i)] = 0;
    }
  }
  // fp32 rows of down, or packed ones.
  const bool groups_of_four = up.slots() || up.fp4();
  const size_t group_bytes = static_cast<size_t>(packed_row_values(s.hidden)) * 2;
  auto* partial = device.alloc<unsigned char>(up.one()         ? 1
                                              : groups_of_four ? slots * group_bytes
                                                               : slots * static_cast<size_t>(s.hidden) * 4,
                                              "down's rows");
  auto* out = device.alloc<unsigned short>(static_cast<size_t>(in.tokens) * static_cast<size_t>(s.hidden), "out");
  const RouteTable table = make_table(device, picks, s, up.tokens());
  std::vector<unsigned short> rows;  // padded
  for (int t = 0; t < in.tokens; ++t) {
    rows.insert(rows.end(), in.rows.begin() + t * s.hidden, in.rows.begin() + (t + 1) * s.hidden);
    rows.resize(rows.size() + static_cast<size_t>(wide - s.hidden), 0);
  }
  const auto* x = w.row_stride == 0
                      ? device.constant(rows, "hidden states")
                      : spread(device, rows, in.tokens, static_cast<size_t>(w.row_stride), "hidden states");
  const long long row_stride = w.row_stride == 0 ? wide : w.row_stride;
  const auto weights = [&](const std::vector<unsigned char>& packed, const char* name) {
    return w.expert_stride == 0 ? device.constant(packed, name)
                                : spread(device, packed, s.experts, w.expert_stride, name);
  };
  GemmArgs a{};
  a.weights = weights(w.gate_up_packed, "gate and up");
  a.expert_bytes = w.expert_stride != 0 ? w.expert_stride : packed_bytes((s.gated ? 2 : 1) * s.intermediate, wide);
  a.row_tiles = s.intermediate / (s.gated ? 8 : 16);
  a.units = wide / kUnitK;
  a.source = x;
  a.source_stride = row_stride;
  a.scales = device.constant(w.gate_up_scales, "gate and up scales");
  a.down_scales = device.constant(w.down_scales, "down scales");
  a.out = h;
  a.out_stride = up.slots() ? static_cast<long long>(slots) * kUnitK : deep;
  a.limit = in.limit;
  a.routing = {device.constant(in.ids, "ids"), device.constant(in.weights, "router weights"), in.tokens, s.top_k,
               s.experts};
  a.route = table;
  for (const void* p : {static_cast<const void*>(x), static_cast<const void*>(a.routing.ids),
                        static_cast<const void*>(a.routing.weights)}) {
    device.produced(p);
  }
  GemmArgs d = a;
  d.weights = weights(w.down_packed, "down");
  d.expert_bytes = w.expert_stride != 0 ? w.expert_stride : packed_bytes(s.hidden, deep);
  d.row_tiles = s.hidden / 16;
  d.units = deep / kUnitK;
  d.source = h;
  d.source_stride = a.out_stride;
  d.scales = a.down_scales;
  d.out = up.one() ? static_cast<void*>(out) : static_cast<void*>(partial);
  d.out_stride = groups_of_four ? packed_row_values(s.hidden) / 4 : s.hidden;
  d.ready = up.wide() ? (a.row_tiles + up.row_tiles() - 1) / up.row_tiles() : 0;
  a.turn = d.turn = turn;
  d.inner_blocks = s.intermediate / kBlockK;

  // W4A4: codes and scales of the input and of h; what lies beyond their columns is zero.
  Fp4Args fp4_up{};
  Fp4Args fp4_down{};
  const auto zeroed = [&](size_t bytes, const char* name) {
    auto* p = device.alloc<unsigned char>(bytes, name);
    std::fill_n(p, bytes, static_cast<unsigned char>(0));
    return p;
  };
  unsigned char* x_codes = nullptr;
  unsigned char* x_scales = nullptr;
  const float* scales = nullptr;
  if (up.fp4()) {
    const size_t x_units = static_cast<size_t>(a.units);
    const size_t h_units = static_cast<size_t>(d.units);
    scales = device.constant(input_scales(w, in), "input scales");
    x_codes = device.alloc<unsigned char>(static_cast<size_t>(in.tokens) * x_units * 32, "codes of the input");
    x_scales = device.alloc<unsigned char>(static_cast<size_t>(in.tokens) * x_units * 4, "scales of the input");
    auto* h_codes = zeroed(slots * h_units * 32, "codes of the activations");
    auto* h_scales = zeroed(slots * h_units * 4, "scales of the activations");
    a.source = reinterpret_cast<const unsigned short*>(x_codes);
    a.source_stride = static_cast<long long>(x_units) * 32;
    a.out = h_codes;
    a.out_stride = static_cast<long long>(h_units) * 32;
    d.source = reinterpret_cast<const unsigned short*>(h_codes);
    d.source_stride = a.out_stride;
    fp4_up = {a,          x_scales, static_cast<long long>(x_units) * 4, scales,
              scales + 1, h_scales, static_cast<long long>(h_units) * 4};
    fp4_down = {d, h_scales, static_cast<long long>(h_units) * 4, scales + 1, nullptr, nullptr, 0};
  }
  const Launch launch = [&](const std::string& name, executor::Index3 grid, int threads, unsigned shared,
                            const std::function<void()>& body) {
    const executor::LaunchStats stats = device.launch({name, grid, threads, shared}, body);
    run.switches += stats.switches;
    if (stats.shared_high_water > shared) throw executor::Violation(name + ": shared memory beyond the plan");
  };
  const auto groups = [](int tiles, const ExpertKernel& k) { return (tiles + k.row_tiles() - 1) / k.row_tiles(); };
  unsigned up_grid = static_cast<unsigned>(sms * up.ctas());
  unsigned down_grid = static_cast<unsigned>(sms * down.ctas());
  if (up.fp4() && in.tokens > 0) {
    launch("quantize", {static_cast<unsigned>((4 * a.units + 127) / 128), static_cast<unsigned>(in.tokens)}, 128, 0,
           [&] {
             quantize_kernel(x, row_stride, s.hidden, a.units, scales, x_codes, a.source_stride, x_scales,
                             fp4_up.source_scale_stride);
           });
  }
  if (up.one()) {
    up_grid = std::min(up_grid, static_cast<unsigned>(groups(a.row_tiles, up)) * static_cast<unsigned>(picks));
    down_grid = std::min(down_grid, static_cast<unsigned>(down.tokens() > 1 ? d.row_tiles : groups(d.row_tiles, down)));
  } else {
    launch_route(launch, a.routing, table, up.tokens());
  }
  const ptx::TensorMap map =
      executor::make_tensor_map(x, static_cast<std::uint64_t>(in.tokens), static_cast<std::uint64_t>(s.hidden),
                                static_cast<std::uint64_t>(row_stride) * 2);
  const auto gemms = [&] {
    launch("gate-up " + up.name, {up_grid}, up.threads(), up.shared_bytes, [&] {
      up.fp4() ? up.run_fp4(fp4_up) : up.slots() ? up.run_gather(map, a) : up.run(a);
    });
    launch("down " + down.name, {down_grid}, down.threads(), down.shared_bytes,
           [&] { up.fp4() ? down.run_fp4(fp4_down) : down.run(d); });
  };
  gemms();
  if (up.one()) {  // layers take turns with the halves, of however many tokens they are
    a.routing.tokens = d.routing.tokens = (in.tokens + 1) / 2;
    gemms();
    a.routing.tokens = d.routing.tokens = in.tokens;
    gemms();
    check_turn(*turn, 3, h, static_cast<size_t>(kExchangeRows), static_cast<size_t>(deep));
  }
  if (!up.one() && in.tokens > 0) {
    const executor::Index3 grid{static_cast<unsigned>((s.hidden + 1023) / 1024), static_cast<unsigned>(in.tokens)};
    if (groups_of_four) {
      launch("combine packed", grid, 128, 0, [&] {
        route.combine_packed(reinterpret_cast<const PackedGroup*>(partial), d.out_stride, table.pick_slot, a.routing,
                             up.fp4() ? nullptr : d.scales, s.hidden, out, s.hidden);
      });
    } else if (down.wide()) {
      const auto columns = static_cast<unsigned>(route.beside_columns);
      const executor::Index3 beside{static_cast<unsigned>(in.tokens),
                                    (static_cast<unsigned>(s.hidden) + columns - 1) / columns};
      launch("combine beside", beside, route.beside_threads, 0, [&] {
        route.combine_beside(reinterpret_cast<const float*>(partial), s.hidden, table, a.routing.weights, s.top_k,
                             s.hidden, out, s.hidden);
      });
    } else {
      launch("combine", grid, 256, 0, [&] {
        route.combine(reinterpret_cast<const float*>(partial), s.hidden, table.pick_slot, a.routing.weights, s.top_k,
                      s.hidden, out, s.hidden);
      });
    }
  }
  run.out.assign(out, out + static_cast<size_t>(in.tokens) * static_cast<size_t>(s.hidden));
  run.seen = device.seen();
  check_scratch(table);
  return run;
}

std::string compare(const LayerInput& in, const std::vector<float>& want, const std::vector<unsigned short>& got,
                    double tolerance) {
  const size_t hidden = in.tokens == 0 ? 0 : want.size() / static_cast<size_t>(in.tokens);
  if (want.size() != got.size()) return fmt::format("{} outputs, wanted {}", got.size(), want.size());
  for (int t = 0; t < in.tokens; ++t) {
    double error = 0.0;
    double norm = 0.0;
    for (size_t i = 0; i < hidden; ++i) {
      const size_t at = static_cast<size_t>(t) * hidden + i;
      const double v = bf16_to_float(got[at]);
      if (std::isnan(v)) return fmt::format("token {} column {} is NaN", t, i);
      error += (v - want[at]) * (v - want[at]);
      norm += static_cast<double>(want[at]) * want[at];
    }
    if (norm == 0.0 ? error != 0.0 : !(std::sqrt(error / norm) <= tolerance)) {
      return fmt::format("token {}: relative error {:.4f}", t, norm == 0.0 ? INFINITY : std::sqrt(error / norm));
    }
  }
  return "";
}

std::string check_layer(const LayerWeights& weights, const LayerInput& input, const ExpertKernel& up,
                        const ExpertKernel& down, const executor::Options& options, int sms) {
  try {
    const LayerRun run = run_layer(weights, input, up, down, options, sms);
    return compare(input, reference(weights, input, up.fp4()), run.out, tolerance_of(up));
  } catch (const executor::Violation& v) {
    return v.what();
  }
}

}  // namespace fourfold::moe
