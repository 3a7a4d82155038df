#include "cuda/backend/kernel_tests.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <mutex>
#include <utility>

#include "base/check.h"
#include "base/random.h"
#include "cpu/backend.h"
#include "cuda/backend/kernel_test_data.h"
#include "cuda/backend/tensors.h"
#include "cuda/gemm/packed_matrix.h"
#include "cuda/moe/reference.h"
#include "kernels/gdn/tables.h"
#include "kernels/step/rows_args.h"
#include "nvfp4/number.h"

namespace fourfold::cuda {
namespace {

using ops::Format;

}  // namespace

std::map<std::string, std::string> blamed(std::vector<KernelCase> cases) {
  std::map<std::string, int64_t> right;  // cases
  for (const KernelCase& c : cases) {
    if (!c.wrong.empty()) continue;
    for (const std::string& kernel : std::set<std::string>(c.kernels.begin(), c.kernels.end())) ++right[kernel];
  }
  std::erase_if(cases, [](const KernelCase& c) { return c.wrong.empty(); });
  std::map<std::string, std::string> all;
  while (!cases.empty()) {
    std::string most;
    int64_t most_cases = 0;
    for (const KernelCase& c : cases) {
      for (const std::string& kernel : c.kernels) {
        if (right.contains(kernel)) continue;
        const int64_t count = std::count_if(cases.begin(), cases.end(), [&](const KernelCase& other) {
          return std::find(other.kernels.begin(), other.kernels.end(), kernel) != other.kernels.end();
        });
        if (count > most_cases) most = kernel, most_cases = count;
      }
    }
    if (most_cases == 0) {  // what is right elsewhere as well: the one that has shown it least
      int64_t least = INT64_MAX;
      for (const std::string& kernel : cases.front().kernels) {
        if (right[kernel] < least) most = kernel, least = right[kernel];
      }
    }
    all[most] = cases.front().wrong;
    for (const KernelCase& c : cases) {
      if (std::find(c.kernels.begin(), c.kernels.end(), most) == c.kernels.end()) continue;
      all[most] = c.wrong;
      break;
    }
    std::erase_if(cases, [&](const KernelCase& c) {
      return c.kernels.empty() || std::find(c.kernels.begin(), c.kernels.end(), most) != c.kernels.end();
    });
  }
  return all;
}

KernelTests::KernelTests(const CudaBackend& backend) : of_(backend) {
  cpu::CpuOptions options;
  options.isa = cpu::Isa::kReference;
  reference_ = cpu::make_backend(options);
  of_.card_->device.set_launch_note(
      [this](const Kernel& kernel, const Grid&, bool) { launched_.push_back(kernel.name); });
}
KernelTests::~KernelTests() { of_.card_->device.set_launch_note({}); }

CudaBackend& KernelTests::on(const RowsWay* way, int most_middle_tiles, bool all_by_clusters) {
  CudaOptions options = of_.options_;
  options.self_test = options.test_kernels = options.graphs = false;
  options.measured_ways = false;
  options.member = nullptr;
  options.threads = 1;
  if (options.library_rows > 0) options.library_rows = 100;  // of the rows that are tested, the most
  Target target = of_.arch_;
  if (way != nullptr) target.way = *way;
  target.most_middle_tiles = most_middle_tiles;
  target.all_by_clusters = all_by_clusters;
  tested_.reset();
  tested_ = std::make_unique<CudaBackend>(options, of_.card_, std::move(target), kSms);
  tested_->reserve({256, 32, 256, kPage});
  launched_.clear();
  return *tested_;
}

void KernelTests::note(const std::string& wrong) { cases_.push_back({std::exchange(launched_, {}), wrong}); }

namespace {

// Cases that were right, by what they are cases of. Whoever tests holds the lock: others wait for what it finds.
struct RightCases {
  std::mutex mutex;
  std::map<std::string, std::vector<KernelCase>> of;
};
RightCases& right_cases() {
  static RightCases all;
  return all;
}

}  // namespace

std::vector<KernelCase> KernelTests::run() {
  const CudaOptions& o = of_.options_;
  std::vector<Unit> units = {{"norms", [this] { norms(); }},
                             {"sums of experts", [this] { sums(); }},
                             {"embeddings", [this] { embeddings(); }},
                             {"gates", [this] { gates(); }},
                             {"repacking", [this] { repacking(); }}};
  std::set<RowsWay> ways;
  for (const auto& entry : of_.products_) ways.insert(entry.first);
  for (const RowsWay& way : ways) {
    units.push_back({"products " + rows_source(of_.arch_, way).name, [this, way] { products(way); }});
  }
  for (const RowsWay& way : of_.gated_) {
    units.push_back({"gated products " + rows_source(of_.arch_, way).name, [this, way] { gated_products(way); }});
  }
  for (const auto& entry : of_.choosing_) {
    const RowsWay way = entry.first;
    units.push_back({choosing_source(of_.arch_, way).name, [this, way] { choosing_product(way); }});
  }
  for (const auto& entry : of_.routing_) {
    const auto [way, route] = entry.first;
    units.push_back({routing_source(of_.arch_, way, route).name,
                     [this, routing_way = way, columns = route] { routing_product(routing_way, columns); }});
  }
  for (const auto& [gate_up, down] : of_.plain_) {
    units.push_back({fmt::format("experts {} {}", gate_up, down),
                     [this, formats = std::pair(gate_up, down)] { plain_experts(formats.first, formats.second); }});
  }
  for (const auto& entry : of_.attention_) {
    units.push_back({fmt::format("attention {} {}{}", entry.first.first, entry.first.second, o.fp8_cache ? " fp8" : ""),
                     [this, dims = entry.first] { attention(dims.first, dims.second); }});
  }
  for (const auto& entry : of_.delta_) {
    units.push_back({fmt::format("delta rule {} {}", entry.first.first, entry.first.second),
                     [this, dims = entry.first] { delta_rule(dims.first, dims.second); }});
  }
  for (const auto& entry : of_.updates_) {
    units.push_back({fmt::format("delta rule with updates {} {}", entry.first.first, entry.first.second),
                     [this, dims = entry.first] { delta_rule(dims.first, dims.second, true); }});
  }
  units.push_back({"routes", [this] { routes(); }});
  if (o.wide) units.push_back({"choices", [this] { choices(); }});

  // Kernels follow from these and from the unit; not where a test changes their sources.
  std::string target = fmt::format("{}, {}{}{}", of_.card_->device.info().name, of_.card_->loader.card().name,
                                   o.overlap ? "" : ", one by one", o.wide ? "" : ", 16 rows");
  for (const std::string& wrong : of_.arch_.wrong) target += ", without " + wrong;
  const bool known = of_.card_->load.rewrite == nullptr;
  RightCases& right = right_cases();
  const std::lock_guard lock(right.mutex);
  for (const Unit& unit : units) {
    const std::string name = target + ": " + unit.name;
    const size_t before = cases_.size();
    if (const auto found = right.of.find(name); known && found != right.of.end()) {
      cases_.insert(cases_.end(), found->second.begin(), found->second.end());
      continue;
    }
    unit.run();
    const std::vector<KernelCase> mine(cases_.begin() + static_cast<std::ptrdiff_t>(before), cases_.end());
    const bool all_right = std::all_of(mine.begin(), mine.end(), [](const KernelCase& c) { return c.wrong.empty(); });
    if (known && all_right) right.of[name] = mine;
  }
  tested_.reset();
  return std::move(cases_);
}

std::vector<KernelCase> KernelTests::run(const RowsWay& way) {
  products(way);
  if (of_.chooses(way.formats)) {
    RowsWay choosing = way;
    choosing.norm_pieces = 0;
    choosing_product(choosing);
  }
  for (const auto& entry : of_.routing_) {
    if (entry.first.first.formats != way.formats) continue;
    RowsWay routing = way;
    routing.norm_pieces = 0;
    if (const int route = routing_columns(routing, of_.most_routed()); route > 0) routing_product(routing, route);
  }
  tested_.reset();
  return std::move(cases_);
}

// ---- products

struct KernelTests::Product {
  int formats;
  int64_t rows = 0, columns;
  std::vector<std::unique_ptr<TestWeight>> weights;
  std::vector<float> dense;  // all rows, dequantised
  std::vector<float> x;      // most rows of it

  Product(Random& random, int formats_, std::vector<int64_t> part_rows, int64_t columns_, int64_t tokens)
      : formats(formats_), columns(columns_) {
    size_t next = 0;
    for (const gemm::Weights format : {gemm::Weights::kNvfp4, gemm::Weights::kFp8, gemm::Weights::kBf16}) {
      if ((formats >> static_cast<int>(format) & 1) == 0) continue;
      weights.push_back(
          test_weight(random, format, (formats & gemm::kCells) != 0, part_rows[next++ % part_rows.size()], columns));
      rows += weights.back()->source.rows;
    }
    dense.resize(static_cast<size_t>(rows * columns));
    int64_t at = 0;
    for (const auto& w : weights) {
      for (int64_t r = 0; r < w->source.rows; ++r)
        ops::dequantize(w->source, r, &dense[static_cast<size_t>(at++ * columns)]);
    }
    x = bf16_normals(random, tokens * columns);
  }
};

namespace {

// What a norm makes of rows, and how far from that its bf16 may be.
struct Normed {
  std::vector<float> rows, bound;
};
Normed normed(const std::vector<float>& x, const std::vector<float>& weight, float least_bound) {
  Normed out;
  const size_t columns = weight.size();
  for (size_t at = 0; at < x.size(); at += columns) {
    double squares = 0;
    for (size_t c = 0; c < columns; ++c) squares += std::pow(static_cast<double>(x[at + c]), 2);
    const double scale = 1 / std::sqrt(squares / static_cast<double>(columns) + 1e-6);
    for (size_t c = 0; c < columns; ++c) {
      const double value = static_cast<double>(x[at + c]) * scale * static_cast<double>(weight[c]);
      out.rows.push_back(static_cast<float>(value));
      out.bound.push_back(static_cast<float>(std::fabs(value)) * kRoundError + least_bound);
    }
  }
  return out;
}

}  // namespace

void KernelTests::products_of(const Product& p, CudaBackend& backend, const std::vector<int64_t>& token_counts,
                              Front front) {
  const Stream& stream = of_.card_->stream;
  std::vector<ops::MatrixSource> sources;
  for (const auto& w : p.weights) sources.push_back(w->source);
  const PackedMatrix packed = pack_stack(sources);
  cuda::Buffer buffer(of_.card_->device, packed.size, "self-test");
  buffer.upload(stream, packed.bytes);
  const gemm::Matrix matrix = packed.at(buffer.as<uint8_t>());
  const std::vector<float> norm_weight(static_cast<size_t>(p.columns), 1.5f);
  const ops::Vector ones = backend.load_vector(norm_weight);
  for (const int64_t tokens : token_counts) {
    const bool floats = tokens % 2 == 0;
    std::vector<float> x(p.x.begin(), p.x.begin() + tokens * p.columns);
    backend.begin_step({});
    backend.shadowed_ = nullptr;  // the residual of the rows before, in whose place the next one may be
    launched_.clear();
    TestRows in, residual, added;
    std::optional<TestShare> share;
    if (front !=
        Front::kNothing) {  // of nothing, or a share of the expert that all have, and what the others make of it
      residual = rows_of(backend, stream, std::vector<float>(x.size()), p.columns, true);
      added = rows_of(backend, stream, x, p.columns);
      in = empty_rows(backend, stream, tokens, p.columns);
      if (front == Front::kSharedNorm) {
        Random shares(20273);
        share.emplace(*this, backend, shares, tokens, p.columns);
        share->wait(backend, added.tensor);
      }
      backend.add_rms_norm(residual.tensor, added.tensor, ones, 1e-6f, in.tensor);
      for (size_t i = 0; share && i < x.size(); ++i) x[i] += share->of(i);
    } else {
      in = rows_of(backend, stream, x, p.columns);
    }
    const TestRows out = empty_rows(backend, stream, tokens, p.rows, floats);
    backend.product("", in.tensor, matrix, p.formats, p.rows, 0, out.tensor);
    const std::vector<float> got = read(backend, out.tensor);
    if (front != Front::kNothing) {
      const Normed want = normed(x, norm_weight, 1e-5f);
      x = read(backend, in.tensor);  // as it was rounded
      if (const std::string wrong = compare_each(x, want.rows, want.bound, p.columns); !wrong.empty()) {
        note("the norm in front, " + wrong);
        continue;
      }
    }
    std::vector<float> want, bound;
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t r = 0; r < p.rows; ++r) {
        const Dot d =
            dot(&p.dense[static_cast<size_t>(r * p.columns)], &x[static_cast<size_t>(t * p.columns)], p.columns);
        want.push_back(d.value);
        bound.push_back(2 * kDotError * d.magnitude + (floats ? 0.0f : kRoundError * std::fabs(d.value)) + 1e-30f);
      }
    }
    note(compare_each(got, want, bound, p.rows));
  }
}

void KernelTests::products(const RowsWay& way) {
  Random random(20261);
  // Every warp's ring goes round, and a part of a step is left.
  int64_t units = 0;
  for (const gemm::Weights format : {gemm::Weights::kBf16, gemm::Weights::kFp8, gemm::Weights::kNvfp4}) {
    if ((way.formats >> static_cast<int>(format) & 1) == 0) continue;
    const int64_t round = int64_t{way.strip_warps} * (way.slots + 1) * gemm::step_units(format) + 1;
    units = std::max(units, round);
  }
  const Product few(random, way.formats, {85, 21, 5}, 64 * units + 16, 7);
  products_of(few, on(&way), {1, 4, 7});
  if (way.norm_pieces > 0) {
    const Product behind(random, way.formats, {37, 21, 5}, 2048 * way.norm_pieces - 48, 2);
    products_of(behind, on(&way), {1, 2}, Front::kNorm);
    products_of(behind, on(&way), {1, 2}, Front::kSharedNorm);
  }
  const Product many(random, way.formats, {277, 70, 75}, 64 * 13 + 16, 150);
  products_of(many, on(&way), {16, 30, 40, 150});
  // As a head is taken, and as few items are.
  if (wide_by_wgmma(of_.arch_, way.formats)) {
    products_of(many, on(&way, 0), {20, 50});
    products_of(many, on(&way, 256, true), {33});
  }
}

// ---- rows

KernelTests::TestShare::TestShare(const KernelTests& tests, CudaBackend& backend, Random& random, int64_t rows,
                                  int64_t columns_)
    : values(bf16_normals(random, rows * columns_)), logits(bf16_normals(random, rows)), columns(columns_) {
  const Stream& stream = tests.of_.card_->stream;
  on_card = rows_of(backend, stream, values, columns);
  logits_on_card = rows_of(backend, stream, logits, 1, true);
}

void KernelTests::TestShare::wait(CudaBackend& backend, const ops::Tensor& added) const {
  backend.waiting_share_ = {{bf16(on_card.tensor), columns, logits_on_card.tensor.f32(), 1, bf16_out(added), columns,
                             static_cast<int>(columns), 1},
                            added.rows};
}

void KernelTests::norms() {
  Random random(20262);
  const Stream& stream = of_.card_->stream;
  CudaBackend& backend = on();
  constexpr int64_t kRows = 5;
  for (const int64_t columns : {1032, 3080, 7176}) {
    const std::vector<float> residual = bf16_normals(random, kRows * columns, 30),
                             delta = bf16_normals(random, kRows * columns), weight = bf16_normals(random, columns);
    const TestShare share(*this, backend, random, kRows, columns);
    backend.begin_step({});
    launched_.clear();
    const TestRows on_card = rows_of(backend, stream, residual, columns, true),
                   added = rows_of(backend, stream, delta, columns), out = empty_rows(backend, stream, kRows, columns);
    const ops::Vector weights = backend.load_vector(weight);
    share.wait(backend, added.tensor);
    backend.add_rms_norm(on_card.tensor, added.tensor, weights, 1e-6f, out.tensor);
    const std::vector<float> sums = read(backend, on_card.tensor), got = read(backend, out.tensor);
    std::vector<float> want_sums, sum_bound;
    for (size_t i = 0; i < residual.size(); ++i) {
      want_sums.push_back(residual[i] + share.of(i) + delta[i]);
      sum_bound.push_back((std::fabs(residual[i]) + std::fabs(share.of(i)) + std::fabs(delta[i])) * 1e-6f);
    }
    const Normed want = normed(want_sums, weight, 1e-30f);
    std::string wrong = compare_each(sums, want_sums, sum_bound, columns);
    if (wrong.empty()) wrong = compare_each(got, want.rows, want.bound, columns);
    note(wrong);
    backend.add(on_card.tensor, added.tensor);
    for (size_t i = 0; i < want_sums.size(); ++i) want_sums[i] = sums[i] + delta[i];
    note(compare_each(read(backend, on_card.tensor), want_sums, sum_bound, columns));
  }
}

// Of experts, with the norm behind them: fp32 rows, and rows of groups.
void KernelTests::sums() {
  Random random(20271);
  const Stream& stream = of_.card_->stream;
  const Device& device = of_.card_->device;
  CudaBackend& backend = on();
  constexpr int64_t kRows = 5, kTopK = 11, kSlots = 60;
  std::vector<int> slots;
  for (int64_t i = 0; i < kRows * kTopK; ++i) slots.push_back(i % 7 == 3 ? -1 : static_cast<int>(kSlots - 1 - i));
  for (const auto& [columns, groups] :
       {std::pair<int64_t, bool>{1040, false}, {3088, false}, {1040, true}, {3088, true}, {5136, true}}) {
    if (!sums_with_norm(backend.arch_, columns, groups)) continue;
    const std::vector<float> residual = bf16_normals(random, kRows * columns, 30),
                             weight = bf16_normals(random, columns);
    std::vector<float> factors;
    for (size_t i = 0; i < slots.size(); ++i) factors.push_back(static_cast<float>(random.uniform(0.1, 0.6)));
    const int64_t stride = groups ? moe::packed_row_values(static_cast<int>(columns)) / 2 : columns;  // words
    std::vector<uint32_t> parts(static_cast<size_t>(kSlots * stride));
    if (groups) {  // fields of any value, exponents about one
      for (size_t i = 0; i < parts.size(); i += 2) {
        const auto exponent = 124 + static_cast<uint32_t>(random.below(6));
        parts[i] = static_cast<uint32_t>(random.below(1u << 28)) | (exponent & 15) << 28;
        parts[i + 1] = static_cast<uint32_t>(random.below(1u << 28)) | exponent >> 4 << 28;
      }
    } else {
      const std::vector<float> values = bf16_normals(random, kSlots * columns);
      std::memcpy(parts.data(), values.data(), parts.size() * sizeof(uint32_t));
    }
    const auto part_of = [&](int slot, int64_t column) -> double {
      const uint32_t* row = &parts[static_cast<size_t>(slot * stride)];
      if (!groups) return nvfp4::float_of(row[column / 16 * 16 + column % 8 * 2 + column % 16 / 8]);
      const uint32_t* group = row + (column / 32 * 8 + column % 8) * 2;
      const auto member = static_cast<unsigned>(column % 32 / 8);
      const auto field = static_cast<int>(group[member / 2] >> (14 * (member % 2)) & 0x3fffu);
      return std::ldexp(field - 8192, static_cast<int>(group[0] >> 28 | group[1] >> 28 << 4) - 139);
    };
    cuda::Buffer rows(device, parts.size() * sizeof(uint32_t), "self-test"),
        picks(device, slots.size() * sizeof(int), "self-test"),
        weights(device, factors.size() * sizeof(float), "self-test");
    rows.upload(stream, parts);
    picks.upload(stream, slots);
    weights.upload(stream, factors);
    backend.begin_step({});
    launched_.clear();
    const TestRows on_card = rows_of(backend, stream, residual, columns, true),
                   added = empty_rows(backend, stream, kRows, columns),
                   out = empty_rows(backend, stream, kRows, columns);
    const ops::Vector norm_weight = backend.load_vector(weight);
    const TestShare share(*this, backend, random, kRows, columns);
    share.wait(backend, added.tensor);
    moe::RowSum sum = {};
    if (groups) {
      sum.groups = rows.as<moe::PackedGroup>();
    } else {
      sum.partial = rows.as<float>();
    }
    sum.stride = groups ? stride / 2 : stride;
    sum.pick_slot = picks.as<int>();
    sum.weights = weights.as<float>();
    sum.top_k = kTopK;
    sum.columns = static_cast<int>(columns);
    sum.out = static_cast<unsigned short*>(added.tensor.data);
    sum.out_stride = columns;
    backend.waiting_sum_ = {sum, nullptr, kRows};
    backend.add_rms_norm(on_card.tensor, added.tensor, norm_weight, 1e-6f, out.tensor);
    const std::vector<float> sums = read(backend, on_card.tensor), got = read(backend, out.tensor);
    // Of groups the sum itself is not kept: what it adds to the residual was rounded.
    const std::vector<float> delta = groups ? std::vector<float>() : read(backend, added.tensor);
    std::vector<float> want_delta, delta_bound, want_sums, sum_bound;
    for (int64_t t = 0; t < kRows; ++t) {
      for (int64_t c = 0; c < columns; ++c) {
        double sum_here = 0, size = 0;
        for (auto pick = static_cast<size_t>(t * kTopK); pick < static_cast<size_t>((t + 1) * kTopK); ++pick) {
          if (slots[pick] < 0) continue;
          const double part = static_cast<double>(factors[pick]) * part_of(slots[pick], c);
          sum_here += part;
          size += std::fabs(part);
        }
        const auto i = static_cast<size_t>(t * columns + c);
        want_delta.push_back(static_cast<float>(sum_here));
        delta_bound.push_back(static_cast<float>(std::fabs(sum_here)) * kRoundError + static_cast<float>(size) * 1e-6f);
        const float more = groups ? want_delta[i] : delta[i];
        want_sums.push_back(residual[i] + share.of(i) + more);
        sum_bound.push_back((std::fabs(residual[i]) + std::fabs(share.of(i)) + std::fabs(more)) * 1e-6f +
                            (groups ? delta_bound[i] : 0.0f));
      }
    }
    const Normed want = normed(groups ? sums : want_sums, weight, 1e-30f);
    std::string wrong = groups ? "" : compare_each(delta, want_delta, delta_bound, columns);
    if (wrong.empty()) wrong = compare_each(sums, want_sums, sum_bound, columns);
    if (wrong.empty()) wrong = compare_each(got, want.rows, want.bound, columns);
    note(wrong);
  }
}

void KernelTests::embeddings() {
  Random random(20266);
  const Stream& stream = of_.card_->stream;
  constexpr int64_t kTable = 37, kColumns = 272;
  const std::vector<int32_t> tokens = {36, 0, 17, 36, 1};
  constexpr int64_t kRows = 5;
  ops::Sequence sequence;
  sequence.count = kRows;
  const SmallBlocks small(*of_.card_);
  for (const gemm::Weights format : {gemm::Weights::kNvfp4, gemm::Weights::kFp8, gemm::Weights::kBf16}) {
    CudaBackend& backend = on();
    const auto weight = test_weight(random, format, true, kTable, kColumns);
    const auto table = backend.load_table(weight->source);
    std::vector<float> want(static_cast<size_t>(kRows * kColumns)), exact, rounded;
    for (size_t t = 0; t < tokens.size(); ++t) {
      ops::dequantize(weight->source, tokens[t], &want[t * static_cast<size_t>(kColumns)]);
    }
    for (const float v : want) {
      exact.push_back(std::fabs(v) * 1e-6f);
      rounded.push_back(std::fabs(v) * kRoundError);
    }
    launched_.clear();
    backend.begin_step({tokens, std::span(&sequence, 1), {}});
    const TestRows out = empty_rows(backend, stream, kRows, kColumns, true),
                   half = empty_rows(backend, stream, kRows, kColumns);
    backend.embed(*table, out.tensor);
    const std::vector<float> got = read(backend, out.tensor);
    note(compare_each(got, want, exact, kColumns));
    backend.embed(*table, half.tensor);
    note(compare_each(read(backend, half.tensor), want, rounded, kColumns));
    // Rows of it, picked out.
    const std::vector<int32_t> picked = {4, 0, 3};
    const TestRows some = empty_rows(backend, stream, 3, kColumns, true);
    backend.gather_rows(out.tensor, picked, some.tensor);
    std::vector<float> of_these;
    for (const int32_t row : picked) {
      of_these.insert(of_these.end(), got.begin() + row * kColumns, got.begin() + (row + 1) * kColumns);
    }
    note(compare_each(read(backend, some.tensor), of_these, std::vector<float>(of_these.size()), kColumns));
  }
}

void KernelTests::gates() {
  Random random(20267);
  const Stream& stream = of_.card_->stream;
  constexpr int64_t kRows = 3;
  const auto sigmoid = [](float x) { return 1 / (1 + std::exp(-x)); };
  for (const int64_t columns : {101, 2056}) {  // single elements; whole pieces, of more than one CTA
    const int pieces = columns % 8 == 0 ? 1 : 0, count = static_cast<int>(columns);
    CudaBackend& backend = on();
    const Grid grid = {static_cast<unsigned>(kRows), static_cast<unsigned>(step::rows_ctas(count))};
    const std::vector<float> both = bf16_normals(random, kRows * 2 * columns, 8),
                             before = bf16_normals(random, kRows * columns), logits = bf16_normals(random, kRows, 3);
    const TestRows in = rows_of(backend, stream, both, 2 * columns), out = empty_rows(backend, stream, kRows, columns);
    launched_.clear();
    const step::GateArgs gate = {bf16(in.tensor), 2 * columns, bf16_out(out.tensor), columns, count, pieces};
    launch(stream, (*backend.step_)[kGate], grid, backend.overlap_, gate);
    std::vector<float> want, bound, sums, sum_bound;
    for (int64_t t = 0; t < kRows; ++t) {
      for (int64_t c = 0; c < columns; ++c) {
        const float g = both[static_cast<size_t>(t * 2 * columns + c)],
                    up = both[static_cast<size_t>(t * 2 * columns + columns + c)],
                    old = before[static_cast<size_t>(t * columns + c)];
        want.push_back(g * sigmoid(g) * up);
        bound.push_back(std::fabs(want.back()) * kRoundError + 1e-6f);
        sums.push_back(old + sigmoid(logits[static_cast<size_t>(t)]) * g);
        sum_bound.push_back((std::fabs(old) + std::fabs(g)) * kRoundError);
      }
    }
    note(compare_each(read(backend, out.tensor), want, bound, columns));
    const TestRows sum = rows_of(backend, stream, before, columns), weights = rows_of(backend, stream, logits, 1, true);
    const step::SharedArgs shared = {
        bf16(in.tensor), 2 * columns, weights.tensor.f32(), 1, bf16_out(sum.tensor), columns, count, pieces};
    launch(stream, (*backend.step_)[kShared], grid, backend.overlap_, shared);
    note(compare_each(read(backend, sum.tensor), sums, sum_bound, columns));
  }
}

// ---- mixers

// ---- the backend's side

void CudaBackend::test_kernels(const std::function<void()>& rehearse) {
  constexpr int kMostRounds = 8;
  const std::string device = card_->device.info().name;
  for (int round = 0;; ++round) {
    card_->stream.synchronize();
    const auto wrong = blamed(KernelTests(*this).run());
    if (wrong.empty()) return;
    for (const auto& [kernel, reason] : wrong) {
      const auto expression = expressions_.find(kernel);
      const std::string name = expression == expressions_.end() ? kernel : expression->second;
      const bool first_time = arch_.wrong.insert(name).second;
      put_off_rows_ = -1;
      // A kernel without tiles has no other one beside it, and those of plain experts have one tile. A sum with its
      // norm is two kernels otherwise, and so are a router's choice and the norm in front of it. Without the one that
      // makes states none are put off.
      const bool replaced =
          (name.find("Tile") != std::string::npos && name.find("gemm_experts") == std::string::npos) ||
          name.find("moe_sum_norm") != std::string::npos || name.find("gemm_routed") != std::string::npos ||
          name.find("delta_make_states") != std::string::npos;
      if (!first_time || !replaced || round == kMostRounds) {
        fail(
            "kernel {} failed its self-test on {}: {}; nothing takes its place (--no-self-test would run it all the "
            "same)",
            name, device, reason);
      }
      report_fallback(name, "failed its self-test on", device, reason);
    }
    load_asked_for(rehearse);
    rehearse();
  }
}

std::string CudaBackend::test_way(const RowsWay& way) {
  for (const KernelCase& each : KernelTests(*this).run(way)) {
    if (!each.wrong.empty()) return each.wrong;
  }
  return "";
}

KernelReport CudaBackend::test_kernels_of(const CudaBackend& counting, int64_t most_rows) {
  FF_ASSERT(counting.card_->device.only_counts() && counting.options_.fp8_cache == options_.fp8_cache);
  KernelReport report;
  report.device = card_->device.info().name;
  std::vector<plan::KernelSource> sources;
  for (ListedKernel& kernel : counting.kernels({}, most_rows)) sources.push_back(std::move(kernel.source));
  card_->loader.load(sources);  // in parallel
  for (const plan::KernelSource& source : sources) report.kernels += static_cast<int64_t>(source.entries.size());
  // What tests look at is for which sizes and formats there are kernels.
  for (const auto& entry : counting.products_) products_[entry.first];
  for (const auto& entry : counting.choosing_) choosing_[entry.first];
  for (const auto& entry : counting.routing_) routing_[entry.first];
  gated_ = counting.gated_;
  for (const auto& entry : counting.attention_) attention_[entry.first];
  for (const auto& entry : counting.delta_) delta_[entry.first];
  for (const auto& entry : counting.updates_) updates_[entry.first];
  plain_ = counting.plain_;
  report.wrong = blamed(KernelTests(*this).run());
  for (const auto& entry : counting.experts_) {
    const size_t before = fallbacks().size();
    KernelOptions options;
    options.max_tokens = most_rows;
    options.load = card_->load;
    try {
      const ExpertKernels experts(card_->device, card_->store, entry.second.kernels->problem(), options);
    } catch (const Error& error) {
      report.wrong["experts"] = error.what();
    }
    const std::vector<Fallback> all = fallbacks();
    for (size_t i = before; i < all.size(); ++i) report.wrong[all[i].kernel] = all[i].reason;
  }
  return report;
}

KernelReport test_kernels_of(const ops::Backend& counting, const CudaOptions& options, int64_t most_rows) {
  return CudaBackend(options).test_kernels_of(dynamic_cast<const CudaBackend&>(counting), most_rows);
}

}  // namespace fourfold::cuda
