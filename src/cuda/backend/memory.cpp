#include "cuda/backend/memory.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "base/math.h"
#include "cuda/backend/sources.h"
#include "cuda/moe/sources.h"
#include "kernels/attn/tables.h"
#include "kernels/gemm/repack_args.h"

namespace fourfold::cuda {
namespace {

uint64_t positive(int64_t bytes) { return static_cast<uint64_t>(std::max<int64_t>(bytes, 1)); }

void copy_bytes(const Card& card, DeviceAddress to, DeviceAddress from, int64_t bytes) {
  card.device.make_current();
  card.device.check(
      card.device.driver().call().copy_on_device(to, from, static_cast<size_t>(bytes), card.stream.handle()),
      "copy on the device");
}

void check_expert(const ops::MatrixSource& m, int64_t rows, int64_t columns) {
  if (m.format != ops::Format::kNvfp4) {
    fail("{}: {} weights; the GPU's expert kernels want nvfp4", m.name, ops::format_name(m.format));
  }
  if (m.rows != rows || m.columns != columns) {
    fail("{}: {} x {}, wanted {} x {} as the first expert has", m.name, m.rows, m.columns, rows, columns);
  }
}

Nvfp4Matrix nvfp4_of(const ops::MatrixSource& m) {
  Nvfp4Matrix matrix = contiguous(static_cast<const uint8_t*>(m.data), m.block_scales, m.tensor_scale, m.row_pitch());
  matrix.first_column = m.first_column;
  return matrix;
}

}  // namespace

void load_routing(Card& card) {
  if (card.experts.route.function != nullptr) return;
  const std::vector<Kernel> route = card.loader.load(route_source());
  card.experts.route = route[0];
  card.experts.route_count = route[1];
  card.experts.route_scatter = route[2];
  card.experts.combine = route[3];
}

int64_t element_bytes(const ops::MatrixSource& m) {
  const int64_t all = m.rows * m.columns;
  switch (m.format) {
    case ops::Format::kF32:
      return all * 4;
    case ops::Format::kBf16:
    case ops::Format::kF16:
      return all * 2;
    case ops::Format::kFp8:
      return all;
    case ops::Format::kNvfp4:
      return all / 2;
  }
  return 0;
}

gemm::Stored stored_of(ops::Format format) {
  switch (format) {
    case ops::Format::kF32:
      return gemm::Stored::kF32;
    case ops::Format::kBf16:
      return gemm::Stored::kBf16;
    case ops::Format::kF16:
      return gemm::Stored::kF16;
    case ops::Format::kFp8:
      return gemm::Stored::kFp8;
    case ops::Format::kNvfp4:
      return gemm::Stored::kNvfp4;
  }
  return gemm::Stored::kBf16;
}

namespace {

// Of the format that most of a stack has.
MemoryKind kind_of(std::span<const ops::MatrixSource> parts) {
  const auto largest =
      std::max_element(parts.begin(), parts.end(), [](const auto& a, const auto& b) { return a.bytes() < b.bytes(); });
  switch (largest->format) {
    case ops::Format::kNvfp4:
      return MemoryKind::kWeightsNvfp4;
    case ops::Format::kFp8:
      return MemoryKind::kWeightsFp8;
    case ops::Format::kF32:
      return MemoryKind::kWeightsF32;
    case ops::Format::kBf16:
    case ops::Format::kF16:
      return MemoryKind::kWeightsBf16;
  }
  return MemoryKind::kWeightsBf16;
}

}  // namespace

DeviceBuffer::DeviceBuffer(std::shared_ptr<Card> card, int64_t bytes, std::string_view what)
    : card_(std::move(card)), buffer_(card_->device, positive(bytes), what) {
  buffer_.fill(card_->stream, 0);
}

uint8_t* Uploads::prepare(uint64_t bytes) {
  if (bytes > block_bytes_) {
    const MemoryScope scope(card_.device, MemoryKind::kTables);
    card_.stream.synchronize();
    block_bytes_ = (std::max<uint64_t>(bytes, 2 * block_bytes_) + 4095) / 4096 * 4096;
    blocks_ = PinnedBuffer(card_.device, block_bytes_ * block_count_, "tables of a step");
    device_ = cuda::Buffer(card_.device, block_bytes_, "tables of a step");
    under_way_ = 0;
  } else if (under_way_ == block_count_) {
    card_.stream.synchronize();
    under_way_ = 0;
  }
  return blocks_.data() + next_ * block_bytes_;
}

step::TableCopy Uploads::take(uint64_t bytes) {
  const step::TableCopy table = {blocks_.data() + next_ * block_bytes_, device_.as<void>(),
                                 static_cast<long long>((bytes + 15) / 16 * 16)};
  next_ = (next_ + 1) % block_count_;
  ++under_way_;
  ++taken_;
  return table;
}

void TableCopies::add(const step::TableCopy& table) {
  if (table.bytes == 0) return;
  if (table.bytes > kMostBytes) return large_.push_back(table);
  FF_ASSERT(args_.count < step::kMostTables);
  for (int i = 0; i < args_.count; ++i) FF_ASSERT(args_.tables[i].to != table.to);
  args_.tables[args_.count++] = table;
}

void TableCopies::carry(const step::CarryArgs& carried) {
  FF_ASSERT(args_.carry.count == 0);
  args_.carry = carried;
}

void TableCopies::copy_large() {
  const Device& device = card_.device;
  for (const step::TableCopy& table : large_) {
    device.check(
        device.driver().call().copy_to_device(static_cast<DeviceAddress>(reinterpret_cast<uintptr_t>(table.to)),
                                              table.from, static_cast<size_t>(table.bytes), card_.stream.handle()),
        "copy to the device");
    card_.stream.end_overlap();
  }
  large_.clear();
}

void TableCopies::flush(const Kernel& kernel, Overlap overlap) {
  copy_large();
  if (args_.count == 0 && args_.carry.count == 0) return;
  launch(card_.stream, kernel, {1}, overlap, args_);
  card_.stream.end_overlap();
  args_ = {};
}

step::TablesArgs TableCopies::take(const Kernel& kernel, Overlap overlap) {
  copy_large();
  if (args_.carry.count > 0) flush(kernel, overlap);
  return std::exchange(args_, {});
}

WeightFeed& Card::weights() {
  const MemoryScope scope(device, MemoryKind::kLoading);
  if (feed_ == nullptr) feed_ = std::make_unique<WeightFeed>(device, loading_threads, loading_block);
  return *feed_;
}

void Card::settle_weights() {
  if (feed_ == nullptr) return;
  std::unique_ptr<WeightFeed> feed = std::move(feed_);
  feed->finish();
  const LoadWatch watch(device.load_times().ending);
  feed.reset();
}

void feed_bytes(Card& card, const void* from, uint64_t bytes, const std::shared_ptr<const void>& owner,
                DeviceAddress to, const std::string* scales_of) {
  WeightFeed& feed = card.weights();
  const auto* at = static_cast<const uint8_t*>(from);
  for (uint64_t done = 0; done < bytes;) {
    const uint64_t count = std::min(bytes - done, feed.fill_bytes());
    feed.add(count, {{.from = at + done, .bytes = count, .owner = owner, .scales_of = scales_of}},
             WeightFeed::copy_to(to + done, count));
    done += count;
  }
}

// What all rows of a part are multiplied with, if that is one number: `factors` are its [tiles][16] and then its cells.
static std::optional<float> one_factor(const std::vector<uint8_t>& factors, const gemm::Part& part) {
  if (part.cells != nullptr) return {};
  std::vector<float> values(static_cast<size_t>(part.rows));
  std::memcpy(values.data(), factors.data(), values.size() * sizeof(float));
  const bool one = std::all_of(values.begin(), values.end(), [&](float value) { return value == values[0]; });
  return one ? std::optional(values[0]) : std::nullopt;
}

Stack::Stack(std::shared_ptr<Card> card, std::span<const ops::MatrixSource> parts)
    : Stack(std::move(card), parts, place_stack(parts)) {}

Stack::Stack(std::shared_ptr<Card> card, const ops::MatrixSource& gate, const ops::MatrixSource& up)
    : Stack(std::move(card), std::vector{gate, up}, place_pair(gate, up)) {}

Stack::Stack(std::shared_ptr<Card> card, std::span<const ops::MatrixSource> sources, PackedMatrix packed)
    : card_(std::move(card)), packed_(std::move(packed)), name_(sources[0].name) {
  formats_ = packed_.formats();
  const MemoryScope scope(card_->device, kind_of(sources));
  buffer_ = cuda::Buffer(card_->device, packed_.size, name_);
  matrix_ = packed_.at(buffer_.as<uint8_t>());
  for (const ops::MatrixSource& m : sources) bytes_ += m.bytes();
  const size_t each = paired() ? 2 : 1;
  for (size_t i = 0; i < packed_.parts.size(); ++i) {
    const PackedMatrix::Part& part = packed_.parts[i];
    factors_.emplace_back();
    if (card_->device.only_counts()) continue;
    const std::vector<uint8_t> factors =
        paired() ? pair_factors(packed_, sources[0], sources[1]) : stack_factors(packed_, part, sources[i]);
    if (!paired()) factors_.back() = one_factor(factors, matrix_.parts[i]);
    {
      const LoadWatch watch(card_->device.load_times().small_copies);
      buffer_.upload(card_->stream, factors.data(), factors.size(), part.factors);
    }
    feed_part(*card_, sources.subspan(i, each), part, matrix_.units, buffer_.as<uint8_t>() + part.weights);
  }
}

Stack::Stack(const Stack& of, int64_t rows)
    : card_(of.card_),
      packed_(of.packed_),
      matrix_(of.matrix_),
      formats_(of.formats_),
      name_(of.name_),
      factors_(of.factors_) {
  FF_ASSERT(packed_.parts.size() == 1 && !paired() && rows > 0 && rows <= of.rows() && rows % gemm::kTileRows == 0);
  PackedMatrix::Part& part = packed_.parts[0];
  packed_.rows = rows;
  part.rows = matrix_.parts[0].rows = static_cast<int>(rows);
  part.tiles = packed_.tiles = matrix_.tiles = static_cast<int>(rows / gemm::kTileRows);
  bytes_ = of.bytes_ / of.packed_.tiles * packed_.tiles;
}

void feed_part(Card& card, std::span<const ops::MatrixSource> sources, const PackedMatrix::Part& part, int units,
               uint8_t* out) {
  const ops::MatrixSource& m = sources[0];
  const bool paired = sources.size() == 2;
  const Kernel repack = card.loader.load(step_source()).at(kRepackUnits);
  WeightFeed& feed = card.weights();
  const auto row_bytes = static_cast<uint64_t>(element_bytes(m) / m.rows);
  const uint64_t scale_bytes = m.format == ops::Format::kNvfp4 ? static_cast<uint64_t>(m.columns / 16) : 0;
  const uint64_t tile_bytes = gemm::kTileRows * (row_bytes + scale_bytes);
  const uint64_t tile_rows = gemm::kTileRows / sources.size();  // of each of them
  // Before each further piece up to 255 bytes are left: they begin at multiples of 256.
  const uint64_t left = 256 * (2 * sources.size() - 1);
  if (tile_bytes + left > feed.block_bytes()) fail("{}: rows of {} columns are too long", m.name, m.columns);
  const auto most =
      static_cast<int>(std::max<uint64_t>((feed.fill_bytes() - std::min(left, feed.fill_bytes())) / tile_bytes, 1));
  int* const bad = feed.status([name = sources.size() == 1 ? m.name : m.name + " or " + sources[1].name, rows = m.rows,
                                each = static_cast<int64_t>(tile_rows)](int tile) {
    return fmt::format("{}: a weight in row {} to {} is NaN", name, tile * each,
                       std::min<int64_t>(rows, (tile + 1) * each) - 1);
  });
  for (int first = 0, tiles = 0; first < part.tiles; first += tiles) {
    tiles = std::min(most, part.tiles - first);
    const uint64_t row = static_cast<uint64_t>(first) * tile_rows;
    const uint64_t left_rows = static_cast<uint64_t>(m.rows) - row;
    const uint64_t rows = std::min<uint64_t>(left_rows, static_cast<uint64_t>(tiles) * tile_rows);
    if (rows == left_rows) tiles = part.tiles - first;  // padding has no bytes
    std::vector<WeightFeed::Piece> pieces;
    std::array<uint64_t, 2> weights_at = {}, scales_at = {};
    uint64_t bytes = 0;
    const auto place = [&](WeightFeed::Piece piece) {
      piece.to = (bytes + 255) / 256 * 256;
      bytes = piece.to + piece.bytes * static_cast<uint64_t>(piece.rows);
      pieces.push_back(std::move(piece));
      return pieces.back().to;
    };
    for (size_t i = 0; i < sources.size(); ++i) {
      const ops::MatrixSource& each = sources[i];
      const auto pitch = static_cast<uint64_t>(each.row_pitch()), columns = static_cast<uint64_t>(each.columns);
      const auto first_column = static_cast<uint64_t>(each.first_column);
      const uint64_t stride = row_bytes * pitch / columns, scale_stride = pitch / 16;
      weights_at[i] = place({.from = static_cast<const uint8_t*>(each.data) + row * stride,
                             .bytes = row_bytes,
                             .rows = static_cast<int64_t>(rows),
                             .stride = stride,
                             .lead = row_bytes * first_column / columns,
                             .owner = each.owner,
                             .reads = each.reads});
      if (scale_bytes == 0) continue;
      scales_at[i] = place({.from = each.block_scales + row * scale_stride,
                            .bytes = scale_bytes,
                            .rows = static_cast<int64_t>(rows),
                            .stride = scale_stride,
                            .lead = first_column / 16,
                            .owner = each.owner,
                            .reads = each.reads,
                            .scales_of = &each.name});
    }
    gemm::RepackArgs args = {};
    args.first.stored = stored_of(m.format);
    args.first.rows = static_cast<int>(m.rows);
    args.first.columns = static_cast<int>(m.columns);
    args.second = args.first;
    args.paired = paired ? 1 : 0;
    args.first_tile = first;
    args.tiles = tiles;
    args.units = units;
    args.out = out + static_cast<uint64_t>(first) * static_cast<uint64_t>(units) *
                         static_cast<uint64_t>(gemm::unit_bytes(part.format));
    args.bad = bad;
    const int64_t all = int64_t{tiles} * units;
    const Grid grid = {static_cast<unsigned>(std::min<int64_t>(ceil_div(all, gemm::kRepackThreads), 1 << 20))};
    feed.add(bytes, pieces, [=](const Stream& stream, DeviceAddress parcel) mutable {
      // Where the matrix would begin, of which these are the rows from `row` on.
      const auto point = [&](gemm::Source& source, size_t i) {
        source.data = device_pointer<const void>(parcel + weights_at[i] - row * row_bytes);
        if (scale_bytes == 0) return;
        source.block_scales = device_pointer<const uint8_t>(parcel + scales_at[i] - row * scale_bytes);
      };
      point(args.first, 0);
      point(args.second, paired ? 1 : 0);
      launch(stream, repack, grid, Overlap::kNone, args);
    });
  }
}

Table::Table(std::shared_ptr<Card> card, const ops::MatrixSource& m)
    : scale_rows(static_cast<int>(std::max<int64_t>(m.scale_rows, 1))),
      scale_columns(static_cast<int>(std::max<int64_t>(m.scale_columns, 1))),
      tensor_scale(m.tensor_scale),
      card_(std::move(card)) {
  if (m.rows < 1 || m.rows > (int64_t{1} << 30) || m.columns < 1 || m.columns > (int64_t{1} << 24)) {
    fail("{}: {} x {} is no table of embeddings", m.name, m.rows, m.columns);
  }
  FF_ASSERT(m.pitch == 0);
  const MemoryScope scope(card_->device, kind_of(std::span(&m, 1)));
  const auto fed = [&](const void* from, int64_t bytes, const std::string* scales_of = nullptr) {
    cuda::Buffer buffer(card_->device, positive(bytes), m.name);
    if (card_->device.only_counts()) return buffer;
    feed_bytes(*card_, from, static_cast<uint64_t>(bytes), m.owner, buffer.address(), scales_of);
    return buffer;
  };
  data_ = fed(m.data, element_bytes(m));
  source_ = {stored_of(m.format), data_.as<const void>(), nullptr, static_cast<int>(m.rows),
             static_cast<int>(m.columns)};
  if (m.format == ops::Format::kNvfp4) {
    scales_ = fed(m.block_scales, m.rows * m.columns / 16, &m.name);
    source_.block_scales = scales_.as<const uint8_t>();
  }
  if (m.format == ops::Format::kFp8) {
    grid_ = fed(m.grid_scales, ceil_div(m.rows, m.scale_rows) * ceil_div(m.columns, m.scale_columns) *
                                   static_cast<int64_t>(sizeof(float)));
  }
  bytes_ = m.bytes();
}

namespace {

// A layer's experts, one after the other, as many at a time as a block of the feed has room for.
class ExpertFeed {
 public:
  ExpertFeed(Card& card, const plan::moe::Problem& problem, ExpertWeights& weights)
      : card_(card), problem_(problem), weights_(weights) {
    const auto elements = static_cast<uint64_t>(problem.hidden * problem.intermediate);
    codes_ = elements / 2;
    scales_ = elements / 16;
    const uint64_t each = 3 * (codes_ + scales_);
    most_ = std::max(card.weights().fill_bytes() / each, std::min<uint64_t>(card.weights().block_bytes() / each, 1));
    bad_ = card.weights().status(
        [](int expert) { return fmt::format("expert {}: a block scale is NaN, wanted finite e4m3 numbers", expert); });
  }

  // `source` is what the matrices are of, or are slices of; `done` when their bytes may go.
  void add(const ExpertMatrices& expert, const ops::ExpertSource& source, std::function<void()> done) {
    for (const Nvfp4Matrix* m : {&expert.gate, &expert.up, &expert.down}) {
      if (!std::isfinite(m->tensor_scale)) {
        fail("expert {}: tensor scale is {}, wanted a finite number", tensor_scales_[1].size(), m->tensor_scale);
      }
    }
    tensor_scales_[0].insert(tensor_scales_[0].end(), {expert.gate.tensor_scale, expert.up.tensor_scale});
    tensor_scales_[1].push_back(expert.down.tensor_scale);
    if (most_ == 0) {  // larger than a block
      weights_.upload(card_.stream, first_++, std::span(&expert, 1));
      return done();
    }
    waiting_.push_back({expert,
                        {source.gate.owner, source.up.owner, source.down.owner},
                        {source.gate.reads, source.up.reads, source.down.reads},
                        {source.gate.name, source.up.name, source.down.name},
                        std::move(done)});
    if (waiting_.size() == most_) send();
  }

  void finish() {
    send();
    const LoadWatch watch(card_.device.load_times().small_copies);
    weights_.set_scales(card_.stream, tensor_scales_[0], tensor_scales_[1]);
  }

 private:
  struct Waiting {
    ExpertMatrices matrices;
    std::array<std::shared_ptr<const void>, 3> owners;
    std::array<std::shared_ptr<SharedReads>, 3> reads;
    std::array<std::string, 3> names;
    std::function<void()> done;
  };

  // [matrix][expert] codes, then [matrix][expert] scales.
  void send() {
    if (waiting_.empty()) return;
    const uint64_t count = waiting_.size();
    std::vector<WeightFeed::Piece> pieces;
    for (uint64_t m = 0; m < 3; ++m) {
      for (uint64_t i = 0; i < count; ++i) {
        const Waiting& w = waiting_[i];
        const Nvfp4Matrix& from = m == 0 ? w.matrices.gate : m == 1 ? w.matrices.up : w.matrices.down;
        const int64_t rows = m == 2 ? problem_.hidden : problem_.intermediate;
        const auto k = static_cast<uint64_t>(m == 2 ? problem_.intermediate : problem_.hidden);
        const uint64_t place = m * count + i;
        const auto first_column = static_cast<uint64_t>(from.first_column);
        pieces.push_back({.from = from.codes,
                          .bytes = k / 2,
                          .rows = rows,
                          .stride = static_cast<uint64_t>(from.code_stride),
                          .lead = first_column / 2,
                          .to = place * codes_,
                          .owner = w.owners[m],
                          .reads = w.reads[m]});
        pieces.push_back({.from = from.scales,
                          .bytes = k / 16,
                          .rows = rows,
                          .stride = static_cast<uint64_t>(from.scale_stride),
                          .lead = first_column / 16,
                          .to = 3 * count * codes_ + place * scales_,
                          .owner = w.owners[m],
                          .reads = w.reads[m],
                          .scales_of = &w.names[m]});
      }
    }
    card_.weights().add(
        3 * count * (codes_ + scales_), pieces,
        [weights = &weights_, first = first_, count, codes = codes_, scales = scales_, k = problem_.hidden,
         width = problem_.intermediate, bad = bad_](const Stream& stream, DeviceAddress parcel) {
          const auto matrix = [&](uint64_t m, int64_t columns) {
            return contiguous(device_pointer<const uint8_t>(parcel + m * count * codes),
                              device_pointer<const uint8_t>(parcel + 3 * count * codes + m * count * scales), 1,
                              columns);
          };
          weights->repack(
              stream, first, static_cast<int64_t>(count),
              {matrix(0, k), matrix(1, k), matrix(2, width), static_cast<int64_t>(codes), static_cast<int64_t>(scales)},
              bad);
        });
    first_ += static_cast<int64_t>(count);
    for (const Waiting& w : waiting_) w.done();
    waiting_.clear();
  }

  Card& card_;
  const plan::moe::Problem& problem_;
  ExpertWeights& weights_;
  uint64_t codes_ = 0, scales_ = 0, most_ = 0;  // bytes of a matrix; experts of a block
  int64_t first_ = 0;                           // of those that wait
  std::vector<Waiting> waiting_;
  std::array<std::vector<float>, 2> tensor_scales_;  // gate and up; down
  int* bad_ = nullptr;
};

}  // namespace

CardExperts::CardExperts(std::shared_ptr<Card> card, int64_t count,
                         const std::function<ops::ExpertSource(int64_t)>& source,
                         const std::function<void(int64_t)>& done, const ops::ExpertSource* shared)
    : card_(std::move(card)) {
  FF_ASSERT(count > 0);
  const ops::ExpertSource first = source(0);
  problem_.name = "experts";
  problem_.experts = count;
  problem_.top_k = 1;  // does not matter to the weights
  problem_.hidden = first.gate.columns;
  problem_.intermediate = first.gate.rows;
  const auto check = [&](const ops::ExpertSource& e, int64_t width) {
    check_expert(e.gate, width, problem_.hidden);
    check_expert(e.up, width, problem_.hidden);
    check_expert(e.down, problem_.hidden, width);
  };
  check(first, problem_.intermediate);
  if (shared != nullptr) {
    problem_.shared = plan::moe::SharedExpert::kNvfp4;
    problem_.shared_intermediate = shared->gate.rows;
    check(*shared, problem_.shared_intermediate);
  }
  plan::moe::validate(problem_);
  const MemoryScope scope(card_->device, MemoryKind::kWeightsNvfp4);
  if (card_->experts.repack.function == nullptr) card_->experts.repack = card_->loader.load(prepare_source()).front();
  weights_ = std::make_unique<ExpertWeights>(LayerContext{&card_->device, problem_, &card_->experts});
  bytes_per_expert_ = first.gate.bytes() + first.up.bytes() + first.down.bytes();
  if (card_->device.only_counts()) {
    done(0);
    return;
  }
  ExpertFeed feed(*card_, problem_, *weights_);
  for (int64_t i = 0; i < count; ++i) {
    const ops::ExpertSource e = i == 0 ? first : source(i);
    check(e, problem_.intermediate);
    feed.add({nvfp4_of(e.gate), nvfp4_of(e.up), nvfp4_of(e.down)}, e, [&done, i] { done(i); });
  }
  if (shared != nullptr) {
    for (const ExpertMatrices& slice :
         fourfold::cuda::shared_slices({nvfp4_of(shared->gate), nvfp4_of(shared->up), nvfp4_of(shared->down)},
                                       problem_.shared_slices(), problem_)) {
      feed.add(slice, *shared, [] {});
    }
  }
  feed.finish();
}

bool holds_shared(const ops::ExpertSource& expert, const ops::ExpertSource& shared) {
  for (const ops::MatrixSource* m : {&expert.gate, &expert.up, &expert.down, &shared.gate, &shared.up, &shared.down}) {
    if (m->format != ops::Format::kNvfp4) return false;
  }
  // Each slice is one more choice of every token, of which there are at most 32.
  constexpr int64_t kMostSlices = 8;
  return shared.gate.rows % expert.gate.rows == 0 && shared.gate.rows / expert.gate.rows <= kMostSlices;
}

plan::moe::Problem CardExperts::problem(int64_t top_k) const {
  plan::moe::Problem problem = problem_;
  problem.top_k = top_k;
  problem.elsewhere = std::max<int64_t>(0, top_k - problem.experts);
  return problem;
}

CardKvCache::CardKvCache(std::shared_ptr<Card> card, const ops::KvCacheShape& shape, int64_t element_bytes)
    : card_(std::move(card)),
      shape_(shape),
      layer_bytes_(shape.kv_heads * 2 * shape.page_size * shape.head_dim * element_bytes) {
  if (shape.page_size < attn::kLeastPage || (shape.page_size & (shape.page_size - 1)) != 0) {
    fail("key/value cache: pages of {} positions; wanted a power of two, at least {}", shape.page_size,
         attn::kLeastPage);
  }
  const MemoryScope scope(card_->device, MemoryKind::kKeysAndValues);
  buffer_ = cuda::Buffer(card_->device, positive(page_bytes() * shape.pages), "key/value cache");
  buffer_.fill(card_->stream, 0);
}

void CardKvCache::copy_page(int64_t from, int64_t to) {
  FF_ASSERT(from >= 0 && from < shape_.pages && to >= 0 && to < shape_.pages);
  copy_bytes(*card_, buffer_.address() + static_cast<uint64_t>(to * page_bytes()),
             buffer_.address() + static_cast<uint64_t>(from * page_bytes()), page_bytes());
}

gdn::DeltaShape delta_shape(const ops::StateCacheShape& shape) {
  return {static_cast<int>(shape.key_heads), static_cast<int>(shape.value_heads), static_cast<int>(shape.key_dim),
          static_cast<int>(shape.value_dim)};
}

CardStateCache::CardStateCache(std::shared_ptr<Card> card, const ops::StateCacheShape& shape)
    : card_(std::move(card)), shape_(shape), delta_(delta_shape(shape)) {
  if (shape.conv_taps != gdn::kTaps)
    fail("state cache: a convolution of {} taps, wanted {}", shape.conv_taps, gdn::kTaps);
  const MemoryScope scope(card_->device, MemoryKind::kStates);
  states_ = cuda::Buffer(card_->device, positive(shape.slots * state_stride() * 4), "recurrent states");
  history_ = cuda::Buffer(card_->device, positive(shape.slots * history_stride() * 2), "inputs of the convolution");
  states_.fill(card_->stream, 0);
  history_.fill(card_->stream, 0);
}

void CardStateCache::copy(int64_t from, int64_t to) {
  FF_ASSERT(from >= 0 && from < shape_.slots && to >= 0 && to < shape_.slots);
  if (from == to) return;
  const auto at = [](const cuda::Buffer& b, int64_t bytes) { return b.address() + static_cast<uint64_t>(bytes); };
  copy_bytes(*card_, at(states_, to * state_stride() * 4), at(states_, from * state_stride() * 4), state_stride() * 4);
  copy_bytes(*card_, at(history_, to * history_stride() * 2), at(history_, from * history_stride() * 2),
             history_stride() * 2);
}

}  // namespace fourfold::cuda
