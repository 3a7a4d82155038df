#include "cuda/backend/memory.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "base/math.h"
#include "cuda/backend/sources.h"
#include "kernels/attn/tables.h"
#include "kernels/gemm/repack_args.h"

namespace fourfold::cuda {
namespace {

uint64_t positive(int64_t bytes) { return static_cast<uint64_t>(std::max<int64_t>(bytes, 1)); }

cuda::Buffer uploaded(const Card& card, const void* from, uint64_t bytes, std::string_view what) {
  cuda::Buffer buffer(card.device, bytes, what);
  buffer.upload(card.stream, from, bytes);
  return buffer;
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
  return contiguous(static_cast<const uint8_t*>(m.data), m.block_scales, m.tensor_scale, m.columns);
}

}  // namespace

DeviceBuffer::DeviceBuffer(std::shared_ptr<Card> card, int64_t bytes, std::string_view what)
    : card_(std::move(card)), buffer_(card_->device, positive(bytes), what) {
  buffer_.fill(card_->stream, 0);
}

PinnedBuffer::PinnedBuffer(const Device& device, uint64_t bytes, std::string_view what, unsigned flags)
    : device_(&device), bytes_(bytes) {
  const int result = device.driver().call().host_allocate(&data_, std::max<uint64_t>(bytes, 1), flags);
  if (result != 0) device_ = nullptr;
  device.check(result, fmt::format("{}: {} bytes of page-locked memory", what, bytes));
}

PinnedBuffer::~PinnedBuffer() {
  if (device_ != nullptr) device_->driver().call().host_free(data_);
}

PinnedBuffer& PinnedBuffer::operator=(PinnedBuffer&& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

uint8_t* Uploads::prepare(uint64_t bytes) {
  if (bytes > block_bytes_) {
    card_.stream.synchronize();
    block_bytes_ = (std::max<uint64_t>(bytes, 2 * block_bytes_) + 4095) / 4096 * 4096;
    blocks_ = PinnedBuffer(card_.device, block_bytes_ * kBlocks, "tables of a step");
    device_ = cuda::Buffer(card_.device, block_bytes_, "tables of a step");
    under_way_ = 0;
  } else if (under_way_ == kBlocks) {
    card_.stream.synchronize();
    under_way_ = 0;
  }
  return blocks_.data() + next_ * block_bytes_;
}

DeviceAddress Uploads::send(uint64_t bytes) {
  device_.upload(card_.stream, blocks_.data() + next_ * block_bytes_, bytes);
  next_ = (next_ + 1) % kBlocks;
  ++under_way_;
  ++sent_;
  return device_.address();
}

Stack::Stack(std::shared_ptr<Card> card, std::span<const ops::MatrixSource> parts)
    : card_(std::move(card)), packed_(pack_stack(parts, false)), name_(parts[0].name) {
  formats_ = packed_.formats();
  buffer_ = cuda::Buffer(card_->device, packed_.bytes.size(), name_);
  matrix_ = packed_.at(buffer_.as<uint8_t>());
  const Kernel repack = card_->loader.load(step_source()).at(kRepackUnits);
  cuda::Buffer bad(card_->device, sizeof(int), "repack status");
  for (size_t i = 0; i < parts.size(); ++i) {
    const ops::MatrixSource& m = parts[i];
    const PackedMatrix::Part& part = packed_.parts[i];
    bytes_ += m.bytes();
    // Factors and cells, behind the units.
    const uint64_t end = i + 1 < parts.size() ? packed_.parts[i + 1].weights : packed_.bytes.size();
    buffer_.upload(card_->stream, packed_.bytes.data() + part.factors, end - part.factors, part.factors);
    const cuda::Buffer data = uploaded(*card_, m.data, static_cast<uint64_t>(element_bytes(m)), "staging for weights");
    cuda::Buffer scales;
    if (m.format == ops::Format::kNvfp4) {
      scales = uploaded(*card_, m.block_scales, static_cast<uint64_t>(m.rows * m.columns / 16), "staging for weights");
    }
    bad.fill(card_->stream, 0xff);
    const gemm::Source source = {stored_of(m.format), data.as<const void>(),
                                 scales.bytes() != 0 ? scales.as<const uint8_t>() : nullptr, static_cast<int>(m.rows),
                                 static_cast<int>(m.columns)};
    const gemm::RepackArgs args = {
        source, source, 0, 0, part.tiles, matrix_.units, buffer_.as<uint8_t>() + part.weights, bad.as<int>()};
    const int64_t units = int64_t{args.tiles} * args.units;
    launch(card_->stream, repack,
           {static_cast<unsigned>(std::min<int64_t>(ceil_div(units, gemm::kRepackThreads), 1 << 20))}, Overlap::kNone,
           args);
    if (const int tile = bad.download<int>(card_->stream, 1)[0]; tile >= 0) {
      fail("{}: a weight in row {} to {} is NaN", m.name, tile * 16, std::min<int64_t>(m.rows, (tile + 1) * 16) - 1);
    }
  }
  packed_.bytes.clear();
  packed_.bytes.shrink_to_fit();
}

Table::Table(std::shared_ptr<Card> card, const ops::MatrixSource& m)
    : scale_rows(static_cast<int>(std::max<int64_t>(m.scale_rows, 1))),
      scale_columns(static_cast<int>(std::max<int64_t>(m.scale_columns, 1))),
      tensor_scale(m.tensor_scale),
      card_(std::move(card)) {
  if (m.rows < 1 || m.rows > (int64_t{1} << 30) || m.columns < 1 || m.columns > (int64_t{1} << 24)) {
    fail("{}: {} x {} is no table of embeddings", m.name, m.rows, m.columns);
  }
  data_ = uploaded(*card_, m.data, static_cast<uint64_t>(element_bytes(m)), m.name);
  source_ = {stored_of(m.format), data_.as<const void>(), nullptr, static_cast<int>(m.rows),
             static_cast<int>(m.columns)};
  if (m.format == ops::Format::kNvfp4) {
    scales_ = uploaded(*card_, m.block_scales, static_cast<uint64_t>(m.rows * m.columns / 16), m.name);
    source_.block_scales = scales_.as<const uint8_t>();
  }
  if (m.format == ops::Format::kFp8) {
    const int64_t cells = ceil_div(m.rows, m.scale_rows) * ceil_div(m.columns, m.scale_columns);
    grid_ = uploaded(*card_, m.grid_scales, static_cast<uint64_t>(cells) * sizeof(float), m.name);
  }
  card_->stream.synchronize();  // the source may go
  bytes_ = m.bytes();
}

CardExperts::CardExperts(std::shared_ptr<Card> card, int64_t count,
                         const std::function<ops::ExpertSource(int64_t)>& source,
                         const std::function<void(int64_t)>& done, const ops::ExpertSource* shared)
    : card_(std::move(card)) {
  FF_ASSERT(count > 0);
  std::vector<ops::ExpertSource> sources;
  std::vector<ExpertMatrices> matrices;
  for (int64_t i = 0; i < count; ++i) {
    sources.push_back(source(i));
    const ops::ExpertSource& e = sources.back();
    const int64_t width = sources[0].gate.rows, hidden = sources[0].gate.columns;
    check_expert(e.gate, width, hidden);
    check_expert(e.up, width, hidden);
    check_expert(e.down, hidden, width);
    matrices.push_back({nvfp4_of(e.gate), nvfp4_of(e.up), nvfp4_of(e.down)});
  }
  problem_.name = "experts";
  problem_.experts = count;
  problem_.top_k = 1;  // does not matter to the weights
  problem_.hidden = sources[0].gate.columns;
  problem_.intermediate = sources[0].gate.rows;
  if (shared != nullptr) {
    problem_.shared = plan::moe::SharedExpert::kNvfp4;
    problem_.shared_intermediate = shared->gate.rows;
    check_expert(shared->gate, problem_.shared_intermediate, problem_.hidden);
    check_expert(shared->up, problem_.shared_intermediate, problem_.hidden);
    check_expert(shared->down, problem_.hidden, problem_.shared_intermediate);
    const std::vector<ExpertMatrices> slices = fourfold::cuda::shared_slices(
        {nvfp4_of(shared->gate), nvfp4_of(shared->up), nvfp4_of(shared->down)}, problem_.shared_slices(), problem_);
    matrices.insert(matrices.end(), slices.begin(), slices.end());
  }
  plan::moe::validate(problem_);
  if (card_->experts.repack.function == nullptr) card_->experts.repack = card_->loader.load(prepare_source()).front();
  weights_ = std::make_unique<ExpertWeights>(LayerContext{&card_->device, problem_, &card_->experts});
  weights_->upload(card_->stream, 0, matrices);
  bytes_per_expert_ = sources[0].gate.bytes() + sources[0].up.bytes() + sources[0].down.bytes();
  for (int64_t i = 0; i < count; ++i) done(i);
}

plan::moe::Problem CardExperts::problem(int64_t top_k) const {
  plan::moe::Problem problem = problem_;
  problem.top_k = top_k;
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
