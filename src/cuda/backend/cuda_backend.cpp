#include "cuda/backend/cuda_backend.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/math.h"
#include "cuda/backend/measured_ways.h"
#include "cuda/backend/tensors.h"
#include "cuda/moe/sources.h"
#include "kernels/norm/norm_args.h"
#include "kernels/step/rows_args.h"

namespace fourfold::cuda {
namespace {

constexpr size_t kMostGraphs = 96;
constexpr int64_t kLeastExchanged = 2048;  // columns, where no sum has said how many there are

// Of tables of a kind that are under way: those of two steps, each with a trunk, a feed and drafting passes, must not
// wait for each other where nothing else does.
size_t table_blocks(const CudaOptions& options) { return options.rounds_ahead ? 2 * (2 + ops::kMaxDrafts) : 8; }

}  // namespace

CudaBackend::CudaBackend(const CudaOptions& options)
    : CudaBackend(options, std::make_shared<Card>(
                               options.device, options.store.empty() ? jit::default_store_directory() : options.store,
                               options.emulate.empty() ? nullptr : &plan::find_gpu(options.emulate))) {}

CudaBackend::CudaBackend(const CudaOptions& options, std::shared_ptr<Card> card)
    : CudaBackend(options, card, plan::arch_of(card->loader.card()), card->device.info().sms) {}

CudaBackend::CudaBackend(const CudaOptions& options, std::shared_ptr<Card> card, Target target, int sms)
    : options_(options),
      card_(std::move(card)),
      arch_(std::move(target)),
      sms_(sms),
      pool_(options.threads),
      overlap_(options.overlap ? Overlap::kProgrammatic : Overlap::kNone),
      by_parts_(options.choose_by_parts && options.member != nullptr && options.member->ranks() > 1),
      step_uploads_(*card_, table_blocks(options)),
      row_uploads_(*card_, table_blocks(options)),
      block_uploads_(*card_),
      sample_uploads_(*card_, table_blocks(options)),
      carry_uploads_(*card_, table_blocks(options)),
      lanes_(*card_),
      copies_(*card_),
      graphs_(card_->stream, kMostGraphs) {
  card_->loading_threads = options.threads;
  if (options.measured_ways && options.emulate.empty() && card_->load.emulate == nullptr) {
    arch_.measured = ways_on(card_->device, card_->store.directory(), arch_);
  }
  const int counters = std::max(sms_ * gemm::kWideWarps, card_->device.info().sms);
  arrived_ = cuda::Buffer(card_->device, static_cast<uint64_t>(counters) * sizeof(int), "counters");
  arrived_.fill(card_->stream, 0);
  narrow_words_ =
      cuda::Buffer(card_->device,
                   4ull * kMostNarrowCtas * static_cast<uint64_t>(card_->device.info().sms) * attn::kNarrowRows *
                       static_cast<uint64_t>(attn::narrow_row_words(attn::kMostHeadDim)),
                   "parts of attention's rows");
  narrow_words_.fill(card_->stream, 0xff);
  const std::vector<float> scales(2, 1.0f);
  ones_ = cuda::Buffer(card_->device, 128, "scales of the cache");
  ones_.upload(card_->stream, scales);
  loaded(step_source());
  if (options_.library_rows > 0 && !card_->device.only_counts()) {
    library_ = std::make_unique<LibraryProducts>(card_->device);
  }
  if (options_.member != nullptr && options_.member->ranks() > 1) {
    ranks_ = std::make_unique<CardRanks>(card_, options_);
    if (options_.check_sums > 0) checks_ = std::make_unique<ranks::SumChecks>(options_.member, options_.check_sums);
  }
}

CudaBackend::~CudaBackend() {
  if (card_->device.lost()) {
    library_.release();  // NOLINT: closing it would wait for the card
    return;
  }
  try {
    card_->device.make_current();
    card_->stream.synchronize();
    graphs_.clear();  // NCCL's communicators wait for those that they are recorded in
    ranks_.reset();
    library_.reset();
    card_->device.make_current();
  } catch (const Error&) {  // whoever waited for a result has heard of it
  }
}

std::string CudaBackend::description() const {
  const jit::DeviceInfo& info = card_->device.info();
  return fmt::format("cuda {} ({}, {}{}){}", info.name, info.arch(), jit::host_memory_name(info.host_memory),
                     options_.emulate.empty() ? "" : fmt::format(", with the kernels of {}", options_.emulate),
                     ranks_ == nullptr ? "" : ", " + ranks_->description());
}

// ---- kernels and memory

const std::vector<Kernel>& CudaBackend::loaded(const plan::KernelSource& source) {
  const std::vector<Kernel>*& found = by_name_[source.name];
  if (found == nullptr && asked_for_ != nullptr) {
    static const std::vector<Kernel> kNone;
    asked_for_->push_back(source);
    return kNone;
  }
  if (found == nullptr) {
    owned_.push_back(std::make_unique<std::vector<Kernel>>(card_->loader.load(source)));
    found = owned_.back().get();
    for (size_t i = 0; i < found->size(); ++i) expressions_[(*found)[i].name] = source.entries[i].expression;
  }
  return *found;
}

void CudaBackend::load_asked_for(const std::function<void()>& rehearse) {
  std::vector<plan::KernelSource> sources;
  asked_for_ = &sources;
  try {
    rehearse();
  } catch (...) {
    asked_for_ = nullptr;
    throw;
  }
  asked_for_ = nullptr;
  // What these remember is not loaded yet.
  products_.clear();
  choosing_.clear();
  routing_.clear();
  gated_.clear();
  attention_.clear();
  prefill_.clear();
  delta_.clear();
  updates_.clear();
  unpack_ = routed_kernels_ = nullptr;
  card_->loader.load(sources);  // in parallel
}

void CudaBackend::load_known() {
  if (known_loaded_) return;
  std::vector<plan::KernelSource> sources = {norm_source(), step_source()};
  if (options_.wide) sources.push_back(sample_source());
  for (const RowsWay& way : ways_) {
    sources.push_back(rows_source(arch_, way));
    const auto same = [&](const plan::KernelSource& s) { return s.name == wide_source(arch_, way.formats).name; };
    if (options_.wide && has_wide(arch_, way.formats) && std::none_of(sources.begin(), sources.end(), same)) {
      sources.push_back(wide_source(arch_, way.formats));
    }
  }
  if (state_shape_.layers > 0) {
    sources.push_back(
        delta_source(arch_, static_cast<int>(state_shape_.key_dim), static_cast<int>(state_shape_.value_dim)));
  }
  card_->loader.load(sources);  // in parallel
  for (const plan::KernelSource& source : sources) loaded(source);
  norm_ = &loaded(norm_source());
  step_ = &loaded(step_source());
  if (options_.wide) sample_ = &loaded(sample_source());
  known_loaded_ = true;
}

DeviceAddress CudaBackend::scratch(cuda::Buffer& buffer, int64_t bytes, const char* what) {
  if (buffer.bytes() < static_cast<uint64_t>(bytes)) {
    FF_ASSERT(!graphs_.recording());
    card_->stream.synchronize();
    graphs_.clear();
    buffer = {};
    buffer = cuda::Buffer(card_->device, static_cast<uint64_t>(bytes), what);
    buffer.fill(card_->stream, 0);
  }
  return buffer.address();
}

std::unique_ptr<ops::Buffer> CudaBackend::allocate(int64_t bytes) {
  card_->settle_weights();
  const MemoryScope scope(card_->device, MemoryKind::kActivations);
  return std::make_unique<DeviceBuffer>(card_, bytes, "activations");
}

ops::Vector CudaBackend::load_vector(std::span<const float> values) {
  ops::Vector vector;
  vector.count = static_cast<int64_t>(values.size());
  const MemoryScope scope(card_->device, MemoryKind::kWeightsF32);
  auto buffer = std::make_unique<DeviceBuffer>(card_, static_cast<int64_t>(values.size_bytes()), "parameters");
  buffer->buffer().upload(card_->stream, values.data(), values.size_bytes());
  vector.buffer = std::move(buffer);
  return vector;
}

std::unique_ptr<ops::Matrix> CudaBackend::load_matrix(std::span<const ops::MatrixSource> parts) {
  return noted(std::make_unique<Stack>(card_, parts));
}

std::unique_ptr<ops::Matrix> CudaBackend::first_rows(const ops::Matrix& matrix, int64_t rows) {
  return noted(std::make_unique<Stack>(static_cast<const Stack&>(matrix), rows));
}

std::unique_ptr<ops::Matrix> CudaBackend::load_gate_up(const ops::MatrixSource& gate, const ops::MatrixSource& up) {
  if (!makes_pair(gate, up)) return Backend::load_gate_up(gate, up);
  return noted(std::make_unique<Stack>(card_, gate, up));
}

std::unique_ptr<Stack> CudaBackend::noted(std::unique_ptr<Stack> stack) {
  if (ways_.insert(rows_way(arch_, stack->formats(), stack->rows(), stack->columns())).second) known_loaded_ = false;
  return stack;
}

std::unique_ptr<ops::Matrix> CudaBackend::load_table(const ops::MatrixSource& source) {
  return std::make_unique<Table>(card_, source);
}

std::unique_ptr<ops::Experts> CudaBackend::load_experts(int64_t count,
                                                        const std::function<ops::ExpertSource(int64_t)>& source,
                                                        const std::function<void(int64_t)>& done) {
  const ops::ExpertSource first = source(0);
  const auto each = [&](int64_t i) { return i == 0 ? first : source(i); };
  if (!all_nvfp4(first)) return std::make_unique<PlainExperts>(card_, count, each, done);
  return std::make_unique<CardExperts>(card_, count, each, done, nullptr);
}

std::unique_ptr<ops::Experts> CudaBackend::load_experts_with_shared(
    int64_t count, const std::function<ops::ExpertSource(int64_t)>& source, const std::function<void(int64_t)>& done,
    const ops::ExpertSource& shared) {
  if (!holds_shared(source(0), shared)) return nullptr;
  return std::make_unique<CardExperts>(card_, count, source, done, &shared);
}

std::unique_ptr<ops::KvCache> CudaBackend::make_kv_cache(const ops::KvCacheShape& shape) {
  card_->settle_weights();
  kv_shape_ = shape;
  return std::make_unique<CardKvCache>(card_, shape, kv_element_bytes());
}

std::unique_ptr<ops::StateCache> CudaBackend::make_state_cache(const ops::StateCacheShape& shape) {
  card_->settle_weights();
  state_shape_ = shape;
  known_loaded_ = false;
  put_off_rows_ = -1;
  return std::make_unique<CardStateCache>(card_, shape);
}

void CudaBackend::reserve(const ops::ReserveLimits& limits) {
  FF_ASSERT(limits.rows > 0);
  card_->settle_weights();
  limits_ = limits;
  load_known();
  row_uploads_.prepare(static_cast<uint64_t>(limits.rows) * sizeof(int));
  const int64_t places = limits.sequences + 2 * ceil_div(limits.rows, kMostRows) + 1;
  const int64_t stride = limits.page_size > 0 ? ceil_div(limits.context, limits.page_size) + 1 : 1;
  step_uploads_.prepare(static_cast<uint64_t>(limits.rows * 4 + places * (16 + 16 + 64 + 4 + 16) +
                                              limits.sequences * stride * 4 + 17 * 128));
}

// ---- rows

void CudaBackend::begin_step(const ops::Batch& batch) {
  stepping_ = false;
  build_tables(batch);
  send_tables();
  if (timer_ != nullptr) {
    card_->stream.synchronize();
    settle();
    row_uploads_.prepare(0);
    timer_->begin_recording();
  }
}

void CudaBackend::build_tables(const ops::Batch& batch) {
  card_->settle_weights();
  load_known();
  const int key_dim = static_cast<int>(state_shape_.key_dim), value_dim = static_cast<int>(state_shape_.value_dim);
  const auto chunks = state_shape_.layers > 0 ? chunk_tile(arch_, key_dim, value_dim) : std::nullopt;
  copies_.add(tables_.build(batch, kv_shape_.layers > 0 ? kv_shape_.page_size : 0,
                            std::max<int64_t>(limits_.context, 1), chunks ? chunks->chunk : 0, put_off_rows(),
                            step_uploads_));
  block_group_ = 0;
}

int CudaBackend::put_off_rows() {
  if (put_off_rows_ >= 0) return put_off_rows_;
  const int key_dim = static_cast<int>(state_shape_.key_dim), value_dim = static_cast<int>(state_shape_.value_dim);
  const bool can = state_shape_.layers > 0 && updates_source(arch_, key_dim, value_dim).has_value();
  return put_off_rows_ = can ? 1 + gdn::most_updates(key_dim) : 0;
}

void CudaBackend::send_tables() {
  if (!graphs_.recording() && !graphs_.replaying()) flush_tables();
}

void CudaBackend::embed(const ops::Matrix& matrix, const ops::Tensor& out) {
  if (replaying()) return;
  settle_waiting();
  const auto& table = static_cast<const Table&>(matrix);
  FF_ASSERT(out.cols == table.columns());
  float* to =
      is_float(out) ? out.f32() : device_pointer<float>(scratch(floats_, rows_of(out) * out.cols * 4, "embedded rows"));
  if (planning_ || out.rows == 0) return;
  if (left_out("embedding", [&] { return ops::Cost{out.rows * out.cols * 2.0, 0}; }, {.rows = out.rows})) return;
  norm::EmbedArgs args = {};
  args.table = table.source();
  args.tensor_scale = table.tensor_scale;
  args.grid_scales = table.grid_scales();
  args.scale_rows = table.scale_rows;
  args.scale_columns = table.scale_columns;
  args.tokens = device_pointer<const int>(tables_.tokens);
  args.out = to;
  args.out_stride = is_float(out) ? out.stride : out.cols;
  launch(card_->stream, (*norm_)[kEmbed], {static_cast<unsigned>(out.rows)}, overlap_, args);
  if (is_float(out)) return;
  const step::RoundArgs round = {to, out.cols, bf16_out(out), out.stride, static_cast<int>(out.cols)};
  launch(card_->stream, (*step_)[kRound], {static_cast<unsigned>(out.rows)}, overlap_, round);
}

// `sum`: of rows of experts, in front; it makes args.delta.
void CudaBackend::launch_norm(const norm::NormArgs& args, int64_t rows, const moe::RowSum* sum) {
  // A sum of groups goes to the residual without being stored.
  const bool stored = args.delta != nullptr && (sum == nullptr || sum->groups == nullptr);
  const double each = (args.delta == nullptr ? 6.0 : stored ? 12.0 : 10.0) + (args.share.x != nullptr ? 2.0 : 0.0);
  const auto cost = [&] { return ops::Cost{static_cast<double>(rows * args.columns) * each, 0}; };
  if (left_out("norm", cost,
               {.kind = plan::step::Kind::kNorm,
                .rows = rows,
                .outputs = args.columns,
                .sum_of = sum != nullptr ? sum->top_k : 0})) {
    if (sum != nullptr) launch_sum(card_->stream, *waiting_sum_.kernels, *sum, rows);
    return;
  }
  const int pieces = norm::norm_pieces(args.columns);
  if (sum != nullptr) {
    launch(card_->stream, (*norm_)[sum_norm_entry(args.columns, sum->groups != nullptr)], {static_cast<unsigned>(rows)},
           overlap_, *sum, args);
    return;
  }
  launch(card_->stream,
         (*norm_)[pieces == 1   ? kNorm1
                  : pieces == 2 ? kNorm2
                                : kNorm4],
         {static_cast<unsigned>(rows)}, overlap_, args);
}

void CudaBackend::settle_waiting() {
  if (waiting_sum_.rows.there()) {
    launch_sum(card_->stream, *waiting_sum_.kernels, waiting_sum_.rows, waiting_sum_.tokens);
    waiting_sum_.rows = {};
  }
  if (waiting_share_.args.x != nullptr) launch_share(std::exchange(waiting_share_, {}));
  if (waiting_.out == nullptr) return;
  waiting_.out = nullptr;
  if (waiting_.over_ranks) {
    meet_ranks(waiting_.args.columns);  // something may have been prepared since the sum was asked for
    return launch_reduce(waiting_.args, {}, waiting_.rows, ops::Residual::kForSums);
  }
  launch_norm(waiting_.args, waiting_.rows);
  if (waiting_.args.residual_out != nullptr) shadowed_ = nullptr;
}

// A product can take along few rows, all of x.
bool CudaBackend::can_wait(const norm::NormArgs& args, const ops::Tensor& out) const {
  return options_.wide && out.rows <= kMostNormedRows && out.stride == out.cols &&
         norm::norm_pieces(args.columns) <= 2 && args.residual_stride == args.columns;
}

// The sum that waits, for a norm that makes `out` of it as its delta; none where it is another one's.
moe::RowSum CudaBackend::take_sum(const ops::Tensor& delta, const ops::Tensor& out) {
  const moe::RowSum& sum = waiting_sum_.rows;
  if (!sum.there() || delta.data != sum.out || waiting_sum_.tokens != out.rows || sum.columns != out.cols ||
      delta.stride != sum.out_stride || out.data == sum.out) {
    return {};
  }
  return std::exchange(waiting_sum_.rows, {});
}

// The share that waits, for a norm that makes `out` of the sum with `delta`; empty where it is another sum's.
norm::Share CudaBackend::take_share(const ops::Tensor& delta, const ops::Tensor& out) {
  const step::SharedArgs share = waiting_share_.args;
  if (share.x == nullptr || delta.data != share.out || waiting_share_.rows != out.rows || share.columns != out.cols ||
      delta.stride != share.out_stride || share.pieces == 0) {
    return {};
  }
  waiting_share_ = {};
  return {share.x, share.x_stride, share.logits, share.logits_stride};
}

void CudaBackend::norm(const float* residual, int64_t residual_stride, const ops::Tensor* delta,
                       const ops::Vector& weight, float eps, float* residual_out, const ops::Tensor& out) {
  if (replaying()) return;
  const moe::RowSum sum = delta != nullptr && out.rows > kMostNormedRows &&
                                  sums_with_norm(arch_, out.cols, waiting_sum_.rows.groups != nullptr)
                              ? take_sum(*delta, out)
                              : moe::RowSum{};
  const norm::Share share = delta != nullptr ? take_share(*delta, out) : norm::Share{};
  settle_waiting();
  FF_ASSERT(weight.count == out.cols && out.cols % 8 == 0 && aligned(out));
  if (norm::norm_pieces(static_cast<int>(out.cols)) == 0) {
    fail("norm: rows of {} columns, wanted at most {}", out.cols, norm::kMostColumns);
  }
  scratch(shadow_, kMostNormedRows * out.cols * 4, "residual");
  if (planning_ || out.rows == 0) return;
  norm::NormArgs args = {};
  args.residual = residual == shadowed_ ? shadow_.as<float>() : residual;
  args.residual_stride = residual_stride;
  args.delta = delta != nullptr ? bf16(*delta) : nullptr;
  args.delta_stride = delta != nullptr ? delta->stride : 0;
  args.weight = weight.data();
  args.eps = eps;
  args.columns = static_cast<int>(out.cols);
  args.residual_out = residual_out;
  args.out = bf16_out(out);
  args.out_stride = out.stride;
  args.share = share;
  normed_ = {residual, residual_stride, out.rows};
  if (can_wait(args, out) || waits_for_router(args, out)) {
    waiting_ = {args, out.rows, out.data};
    return;
  }
  FF_ASSERT(shadowed_ == nullptr || shadowed_ == residual);
  launch_norm(args, out.rows, sum.there() ? &sum : nullptr);
  if (residual_out != nullptr) shadowed_ = nullptr;
}

void CudaBackend::rms_norm(const ops::Tensor& x, const ops::Vector& weight, float eps, const ops::Tensor& out) {
  FF_ASSERT(x.rows == out.rows && x.cols == out.cols);
  if (is_float(x)) return norm(x.f32(), x.stride, nullptr, weight, eps, nullptr, out);
  // 0 + x is x.
  if (replaying()) return;
  const DeviceAddress zeros = scratch(zeros_, x.cols * 4, "zeros");
  norm(device_pointer<float>(zeros), 0, &x, weight, eps, nullptr, out);
}

void CudaBackend::add_rms_norm(const ops::Tensor& residual, const ops::Tensor& delta, const ops::Vector& weight,
                               float eps, const ops::Tensor& out) {
  FF_ASSERT(residual.rows == out.rows && residual.cols == out.cols && residual.rows == delta.rows &&
            residual.cols == delta.cols && is_float(residual));
  norm(residual.f32(), residual.stride, &delta, weight, eps, residual.f32(), out);
}

void CudaBackend::add(const ops::Tensor& residual, const ops::Tensor& delta) {
  if (replaying()) return;
  settle_waiting();
  FF_ASSERT(residual.rows == delta.rows && residual.cols == delta.cols && is_float(residual));
  if (planning_ || residual.rows == 0) return;
  FF_ASSERT(shadowed_ == nullptr);
  const auto cost = [&] { return ops::Cost{residual.rows * residual.cols * 10.0, 0}; };
  if (left_out("sum", cost, {.rows = residual.rows})) return;
  const auto columns = static_cast<int>(residual.cols);
  const step::AddArgs args = {residual.f32(), residual.stride, bf16(delta),
                              delta.stride,   columns,         in_pieces(residual) && in_pieces(delta) ? 1 : 0};
  launch(card_->stream, (*step_)[kAdd], columns_grid(residual.rows, columns), overlap_, args);
}

void CudaBackend::gather_rows(const ops::Tensor& x, std::span<const int32_t> rows, const ops::Tensor& out) {
  FF_ASSERT(out.rows == static_cast<int64_t>(rows.size()) && out.cols == x.cols && x.dtype == out.dtype);
  FF_ASSERT(aligned(x) && aligned(out) && x.cols * x.element_bytes() % 16 == 0);
  if (planning_ || rows.empty()) return;
  settle_waiting();
  for (const int32_t row : rows) FF_ASSERT(row >= 0 && row < x.rows);
  std::memcpy(row_uploads_.prepare(rows.size_bytes()), rows.data(), rows.size_bytes());
  norm::GatherArgs args = {};
  args.x = x.data;
  args.x_stride = x.stride * x.element_bytes();
  if (timer_ != nullptr) return;  // its table would be copied within the recording
  copies_.add(row_uploads_.take(rows.size_bytes()));
  send_tables();
  args.rows = device_pointer<const int>(row_uploads_.place());
  if (replaying()) return;
  args.out = out.data;
  args.out_stride = out.stride * out.element_bytes();
  args.pieces = static_cast<int>(x.cols * x.element_bytes() / 16);
  note_work("rows picked out", 4.0 * static_cast<double>(out.rows * out.cols * out.element_bytes()) / 2);
  launch(card_->stream, (*norm_)[kGather], {static_cast<unsigned>(out.rows)}, overlap_, args);
}

void CudaBackend::meet_ranks(int64_t columns) {
  if (ranks_->prepare(columns)) graphs_.clear();
  if (!planning_ && !stepping_ && timer_ == nullptr) ranks_->meet();
}

void CudaBackend::reduce_add_rms_norm(const ops::Tensor& residual, const ops::Tensor& delta, const ops::Vector& weight,
                                      float eps, const ops::Tensor& out, ops::Residual left) {
  if (ranks_ == nullptr) return Backend::reduce_add_rms_norm(residual, delta, weight, eps, out, left);
  last_sum_ = residual;
  if (replaying()) return;
  FF_ASSERT(residual.rows == out.rows && residual.cols == out.cols && residual.rows == delta.rows &&
            residual.cols == delta.cols && is_float(residual));
  FF_ASSERT(weight.count == out.cols && out.cols % 8 == 0 && aligned(out) && aligned(delta));
  if (norm::norm_pieces(static_cast<int>(out.cols)) == 0) {
    fail("norm: rows of {} columns, wanted at most {}", out.cols, norm::kMostColumns);
  }
  meet_ranks(out.cols);
  if (checks_ != nullptr) left = ops::Residual::kWhole;  // what is compared are residuals
  const moe::RowSum sum = waiting_sum_.rows.groups != nullptr && ranks_->takes_groups(out.rows, out.cols, left)
                              ? take_sum(delta, out)
                              : moe::RowSum{};
  const norm::Share share = ranks_->takes_share(out.rows, out.cols) ? take_share(delta, out) : norm::Share{};
  settle_waiting();
  if (planning_ || out.rows == 0) return;
  FF_ASSERT(shadowed_ == nullptr);
  norm::NormArgs args = {};
  args.residual = args.residual_out = residual.f32();
  args.residual_stride = residual.stride;
  args.delta = bf16(delta);
  args.delta_stride = delta.stride;
  args.weight = weight.data();
  args.eps = eps;
  args.columns = static_cast<int>(out.cols);
  args.out = bf16_out(out);
  args.out_stride = out.stride;
  args.share = share;
  normed_ = {args.residual, args.residual_stride, out.rows};
  if (waits_for_router(args, out) && !sum.there() && share.x == nullptr) {
    waiting_ = {args, out.rows, out.data, true};
    return;
  }
  launch_reduce(args, sum, out.rows, left);
}

void CudaBackend::launch_reduce(const norm::NormArgs& args, const moe::RowSum& sum, int64_t rows, ops::Residual left) {
  const double each = ranks_->column_bytes(rows, args.columns) + (args.share.x != nullptr ? 2.0 : 0.0);
  const auto cost = [&] { return ops::Cost{static_cast<double>(rows * args.columns) * each, 0}; };
  if (left_out("sum over ranks", cost,
               {.kind = plan::step::Kind::kReduce, .rows = rows, .outputs = args.columns, .sum_of = sum.top_k})) {
    if (sum.there()) launch_sum(card_->stream, *waiting_sum_.kernels, sum, rows);
    return;
  }
  ranks_->reduce(args, sum, rows, left, overlap_);
}

bool CudaBackend::all_reduce(const ops::Tensor& delta, const ops::Tensor& out) {
  if (ranks_ == nullptr) return Backend::all_reduce(delta, out);
  if (replaying()) return true;
  FF_ASSERT(delta.rows == out.rows && delta.cols == out.cols && out.cols % 8 == 0 && aligned(out) && aligned(delta));
  meet_ranks(out.cols);
  if (!ranks_->reduces_alone(out.rows, out.cols)) return false;
  settle_waiting();
  if (planning_ || out.rows == 0) return true;
  const auto cost = [&] { return ops::Cost{static_cast<double>(out.rows * out.cols) * 4.0, 0}; };
  if (left_out("sum over ranks alone", cost, {.rows = out.rows, .outputs = out.cols})) return true;
  norm::NormArgs args = {};
  args.delta = bf16(delta);
  args.delta_stride = delta.stride;
  args.columns = static_cast<int>(out.cols);
  args.out = bf16_out(out);
  args.out_stride = out.stride;
  ranks_->reduce_alone(args, out.rows, overlap_);
  return true;
}

void CudaBackend::check_sums() {
  if (checks_ == nullptr || !checks_->due() || last_sum_.data == nullptr) return;
  checks_->compare(ranks_->checksum(last_sum_, std::min(last_sum_.rows, tables_.rows)));
}

void CudaBackend::gather_columns(const ops::Tensor& part, const ops::Tensor& out) {
  if (ranks_ == nullptr) return Backend::gather_columns(part, out);
  // Of one row or two it is recorded with what is in front of it.
  if (by_parts_ && stepping_ && !planning_ && out.rows > std::min<int64_t>(2, options_.gathered_rows)) {
    open_gather_ = {part, out};
    return;
  }
  if (replaying()) return;
  settle_waiting();
  meet_ranks(kLeastExchanged);
  ranks_->columns_of(part.cols, out.cols);
  if (planning_ || out.rows == 0) return;
  const auto cost = [&] { return ops::Cost{out.rows * (out.cols - part.cols) * 8.0, 0}; };
  if (left_out("gathering of logits", cost,
               {.kind = plan::step::Kind::kGather, .rows = out.rows, .outputs = out.cols, .inputs = part.cols})) {
    return;
  }
  ranks_->gather(part, out, overlap_);
}

void CudaBackend::clear_padding(const ops::Tensor& out) {
  if (tables_.rows >= out.rows) return;
  FF_ASSERT(out.stride == out.cols);
  const int64_t row = out.stride * out.element_bytes();
  card_->device.check(card_->device.driver().call().fill_bytes(
                          address_of(out.data) + static_cast<uint64_t>(tables_.rows * row), 0,
                          static_cast<size_t>((out.rows - tables_.rows) * row), card_->stream.handle()),
                      "filling device memory");
}

// ---- products

const CudaBackend::ProductKernels& CudaBackend::product_kernels(const RowsWay& way) {
  ProductKernels& found = products_[way];
  if (found.few == nullptr) {
    found.few = &loaded(rows_source(arch_, way));
    if (options_.wide && has_wide(arch_, way.formats)) found.many = &loaded(wide_source(arch_, way.formats));
  }
  return found;
}

void CudaBackend::product(std::string_view name, const ops::Tensor& x, const gemm::Matrix& matrix, int formats,
                          int64_t rows, int64_t weight_bytes, const ops::Tensor& out, const Gated& gated) {
  const RowsWay way = rows_way(arch_, formats, rows, x.cols);
  if (timer_ != nullptr) matrices_.insert({formats, rows, x.cols});
  if (planning_ && gated.tiles > 0) gated_.insert(way);
  const ProductKernels& kernels = product_kernels(way);
  wide_room(formats, x.rows);
  if (planning_) return;
  const bool normed = waiting_.out == x.data && waiting_.out != nullptr && !waiting_.over_ranks &&
                      waiting_.rows == x.rows && x.rows <= kMostNormedRows && waiting_.args.columns == x.cols &&
                      way.norm_pieces > 0;
  if (!normed) settle_waiting();
  const plan::step::Extent extent = {
      .kind = plan::step::Kind::kProduct, .rows = x.rows, .outputs = rows, .inputs = x.cols, .norm_in_front = normed};
  if (left_out(
          name, [&] { return ops::linear_cost(x.rows, rows, x.cols, weight_bytes); }, extent)) {
    gemm::RowsArgs none = {};
    if (normed) take_along(none);
    return;
  }
  const bool some_gated = gated.tiles > 0 && gated.tiles < matrix.tiles;
  if (options_.wide && !some_gated && !by_few(arch_, way, matrix, x.rows, sms_)) {
    return wide_product(x, matrix, formats, *kernels.many, out, gated.tiles > 0);
  }
  for (int64_t first = 0; first < x.rows;) {
    const auto left = static_cast<int>(std::min<int64_t>(kMostRows, x.rows - first));
    const int tokens = rows_at_once(arch_, way, matrix.units, left);
    const RowsEntry of_norm = waiting_.args.share.x != nullptr ? kRowsShare : kRowsNorm;
    const RowsEntry entry = normed ? of_norm : tokens > 8 ? kRows16 : kRows8;
    const gemm::RowsTile tile = rows_tile(way, entry);
    gemm::RowsArgs args = {};
    args.matrix = matrix;
    args.tokens = tokens;
    const int ctas = rows_ctas(arch_, tile, matrix.units, tokens);
    args.panel_units = gemm::panel_units(tile, matrix.units, tokens, shared_of(arch_, ctas));
    FF_ASSERT(args.panel_units > 0 && (!normed || (tokens == x.rows && args.panel_units == matrix.units)));
    args.end = is_float(out) ? gemm::RowsEnd::kFloat : gemm::RowsEnd::kBf16;
    args.x = bf16(x) + first * x.stride;
    args.x_stride = x.stride;
    args.out = static_cast<uint8_t*>(out.data) + first * out.stride * out.element_bytes();
    args.out_stride = out.stride;
    if (gated.tiles > 0) {
      args.gated_tiles = gated.tiles;
      args.gated_out = bf16_out(gated.out) + first * gated.out.stride;
      args.gated_stride = gated.out.stride;
    }
    if (normed) take_along(args);
    Kernel kernel = (*kernels.few)[entry];
    kernel.smem_bytes = gemm::rows_map(tile, tokens, args.panel_units).total;
    const int grid = gemm::rows_grid(tile, matrix.tiles, sms_, ctas);
    launch(card_->stream, kernel, {static_cast<unsigned>(grid)}, overlap_, args);
    first += tokens;
  }
}

// The norm that waits, in front of a product.
void CudaBackend::take_along(gemm::RowsArgs& args) {
  const norm::NormArgs& n = waiting_.args;
  args.residual = n.residual;
  args.residual_stride = n.residual_stride;
  args.delta = n.delta;
  args.delta_stride = n.delta_stride;
  args.share = n.share;
  args.norm_weight = n.weight;
  args.norm_eps = n.eps;
  args.norm_out = n.out;
  if (n.residual_out != nullptr) {
    const bool back = n.residual == shadow_.as<float>();
    args.residual_out = back ? n.residual_out : shadow_.as<float>();
    shadowed_ = back ? nullptr : n.residual_out;
  }
  waiting_.out = nullptr;
}

void CudaBackend::wide_product(const ops::Tensor& x, const gemm::Matrix& matrix, int formats,
                               const std::vector<Kernel>& kernels, const ops::Tensor& out, bool paired) {
  const WideEntry entry = wide_entry(arch_, formats, x.rows, matrix, sms_);
  gemm::DenseArgs args = {};
  args.matrix = matrix;
  args.tokens = static_cast<int>(x.rows);
  args.end = paired ? gemm::DenseEnd::kSwiGlu : is_float(out) ? gemm::DenseEnd::kFloat : gemm::DenseEnd::kBf16;
  args.x = bf16(x);
  args.x_stride = x.stride;
  args.out = out.data;
  args.out_stride = out.stride;
  if (!wide_by_wgmma(arch_, formats)) {
    const int grid = gemm::dense_grid(dense_tile(arch_, formats, entry), matrix, args.tokens);
    launch(card_->stream, kernels[entry], {static_cast<unsigned>(grid)}, overlap_, args);
    return;
  }
  const bool clusters = by_clusters(arch_, formats, x.rows, matrix, sms_);
  const gemm::MiddleTile middle = middle_tile(arch_, formats, clusters ? gemm::kMiddleRows : x.rows);
  const int copied = entry == kMiddle ? middle.rows : wide_tile(arch_, formats, entry).tokens;
  const ptx::TensorMap rows =
      row_pieces(card_->device, address_of(x.data), static_cast<uint64_t>(x.rows), static_cast<uint64_t>(x.cols),
                 static_cast<uint64_t>(x.stride * x.element_bytes()), static_cast<unsigned>(copied));
  const int sms = sms_;
  args.partial = wide_partial_.as<float>();
  args.arrived = arrived_.as<int>();
  if (clusters) {
    args.split_units = gemm::cluster_share(middle, matrix);
    const int grid = gemm::cluster_grid(matrix, args.tokens);
    launch(card_->stream, kernels.back(), {static_cast<unsigned>(grid)}, overlap_, rows, args);
    return;
  }
  if (entry == kMiddle) {
    args.split_units = middle_share(arch_, formats, x.rows, matrix, sms);
    const int grid = gemm::middle_grid(matrix, args.tokens, args.split_units, middle.rows);
    launch(card_->stream, kernels[wide_place(arch_, formats, entry, x.rows)], {static_cast<unsigned>(grid)}, overlap_,
           rows, args);
    return;
  }
  const gemm::WideTile tile = wide_tile(arch_, formats, entry);
  const gemm::WideCut cut = gemm::wide_cut(tile, matrix, args.tokens, sms);
  args.whole = cut.whole;
  args.splits = cut.splits;
  args.split_units = cut.split_units;
  args.band = gemm::wide_band(tile, matrix);
  const int grid = gemm::wide_grid(tile, matrix, args.tokens, cut, sms);
  launch(card_->stream, kernels[wide_place(arch_, formats, entry, x.rows)], {static_cast<unsigned>(grid)}, overlap_,
         rows, args);
}

}  // namespace fourfold::cuda
