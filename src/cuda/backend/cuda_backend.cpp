#include "cuda/backend/cuda_backend.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/math.h"
#include "cuda/backend/tensors.h"
#include "kernels/norm/norm_args.h"
#include "kernels/step/rows_args.h"

namespace fourfold::cuda {
namespace {

constexpr unsigned kProductShared = kMostShared - 1024;
constexpr size_t kMostGraphs = 96;

}  // namespace

CudaBackend::CudaBackend(const CudaOptions& options)
    : options_(options),
      card_(std::make_shared<Card>(options.device,
                                   options.store.empty() ? jit::default_store_directory() : options.store)),
      pool_(options.threads),
      overlap_(options.overlap ? Overlap::kProgrammatic : Overlap::kNone),
      step_uploads_(*card_),
      row_uploads_(*card_),
      block_uploads_(*card_),
      sample_uploads_(*card_),
      graphs_(*card_, kMostGraphs) {
  const jit::DeviceInfo& info = card_->device.info();
  if (info.major != 9) {
    fail("{}: {}; models run on Hopper cards (sm_90a) and on the CPU", info.name, info.arch());
  }
  arrived_ = cuda::Buffer(card_->device, 128, "counters");
  arrived_.fill(card_->stream, 0);
  const std::vector<float> scales(2, 1.0f);
  ones_ = cuda::Buffer(card_->device, 128, "scales of the cache");
  ones_.upload(card_->stream, scales);
  loaded(step_source());
}

CudaBackend::~CudaBackend() {
  if (card_->device.lost()) return;
  try {
    card_->stream.synchronize();
  } catch (const Error&) {  // whoever waited for a result has heard of it
  }
}

std::string CudaBackend::description() const {
  const jit::DeviceInfo& info = card_->device.info();
  return fmt::format("cuda {} ({}, {})", info.name, info.arch(), jit::host_memory_name(info.host_memory));
}

// ---- kernels and memory

const std::vector<Kernel>& CudaBackend::loaded(const plan::KernelSource& source) {
  const std::vector<Kernel>*& found = by_name_[source.name];
  if (found == nullptr) {
    owned_.push_back(std::make_unique<std::vector<Kernel>>(card_->loader.load(source)));
    found = owned_.back().get();
  }
  return *found;
}

void CudaBackend::load_known() {
  if (known_loaded_) return;
  std::vector<plan::KernelSource> sources = {norm_source(), step_source(), rows_source(15, gemm::RowsLast::kRoute)};
  if (options_.wide) sources.push_back(sample_source());
  for (const int formats : formats_) {
    sources.push_back(rows_source(formats));
    if (options_.wide) sources.push_back(wide_source(formats));
  }
  if (state_shape_.layers > 0) {
    sources.push_back(delta_source(static_cast<int>(state_shape_.key_dim), static_cast<int>(state_shape_.value_dim)));
  }
  card_->loader.load(sources);  // in parallel
  for (const plan::KernelSource& source : sources) loaded(source);
  norm_ = &loaded(norm_source());
  step_ = &loaded(step_source());
  if (options_.wide) sample_ = &loaded(sample_source());
  route_ = &loaded(rows_source(15, gemm::RowsLast::kRoute));
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
  return std::make_unique<DeviceBuffer>(card_, bytes, "activations");
}

ops::Vector CudaBackend::load_vector(std::span<const float> values) {
  ops::Vector vector;
  vector.count = static_cast<int64_t>(values.size());
  auto buffer = std::make_unique<DeviceBuffer>(card_, static_cast<int64_t>(values.size_bytes()), "parameters");
  buffer->buffer().upload(card_->stream, values.data(), values.size_bytes());
  card_->stream.synchronize();
  vector.buffer = std::move(buffer);
  return vector;
}

std::unique_ptr<ops::Matrix> CudaBackend::load_matrix(std::span<const ops::MatrixSource> parts) {
  auto stack = std::make_unique<Stack>(card_, parts);
  if (std::find(formats_.begin(), formats_.end(), stack->formats()) == formats_.end()) {
    formats_.push_back(stack->formats());
    known_loaded_ = false;
  }
  return stack;
}

std::unique_ptr<ops::Matrix> CudaBackend::load_table(const ops::MatrixSource& source) {
  return std::make_unique<Table>(card_, source);
}

std::unique_ptr<ops::Experts> CudaBackend::load_experts(int64_t count,
                                                        const std::function<ops::ExpertSource(int64_t)>& source,
                                                        const std::function<void(int64_t)>& done) {
  return std::make_unique<CardExperts>(card_, count, source, done);
}

std::unique_ptr<ops::KvCache> CudaBackend::make_kv_cache(const ops::KvCacheShape& shape) {
  kv_shape_ = shape;
  return std::make_unique<CardKvCache>(card_, shape, kv_element_bytes());
}

std::unique_ptr<ops::StateCache> CudaBackend::make_state_cache(const ops::StateCacheShape& shape) {
  state_shape_ = shape;
  known_loaded_ = false;
  return std::make_unique<CardStateCache>(card_, shape);
}

void CudaBackend::reserve(const ops::ReserveLimits& limits) {
  FF_ASSERT(limits.rows > 0);
  limits_ = limits;
  load_known();
  row_uploads_.prepare(static_cast<uint64_t>(limits.rows) * sizeof(int));
  const int64_t places = limits.sequences + 2 * ceil_div(limits.rows, kMostRows) + 1;
  const int64_t stride = limits.page_size > 0 ? ceil_div(limits.context, limits.page_size) + 1 : 1;
  step_uploads_.prepare(
      static_cast<uint64_t>(limits.rows * 4 + places * (16 + 64 + 4 + 16) + limits.sequences * stride * 4 + 16 * 128));
}

// ---- rows

void CudaBackend::begin_part(const ops::Batch& batch, cpu::StepPart part) {
  graphs_.end();
  begin_step(batch);
  if (!options_.graphs) return;
  PartGraphs::Key key = tables_.shape();
  if (key.empty()) return;
  key.push_back(static_cast<int64_t>(part));
  key.push_back(static_cast<int64_t>(batch.logit_rows.size()));
  // What is recorded may not wait for room in these.
  row_uploads_.prepare(static_cast<uint64_t>(limits_.rows) * sizeof(int));
  graphs_.begin(key);
}

void CudaBackend::begin_step(const ops::Batch& batch) {
  load_known();
  const int key_dim = static_cast<int>(state_shape_.key_dim), value_dim = static_cast<int>(state_shape_.value_dim);
  const bool chunks = state_shape_.layers > 0 && has_chunks(key_dim, value_dim);
  tables_.build(batch, kv_shape_.layers > 0 ? kv_shape_.page_size : 0, std::max<int64_t>(limits_.context, 1),
                chunks ? chunk_tile(key_dim, value_dim).chunk : 0, step_uploads_);
  block_group_ = 0;
}

void CudaBackend::embed(const ops::Matrix& matrix, const ops::Tensor& out) {
  if (replaying()) return;
  const auto& table = static_cast<const Table&>(matrix);
  FF_ASSERT(out.cols == table.columns());
  float* to =
      is_float(out) ? out.f32() : device_pointer<float>(scratch(floats_, rows_of(out) * out.cols * 4, "embedded rows"));
  if (planning_ || out.rows == 0) return;
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

void CudaBackend::norm(const float* residual, int64_t residual_stride, const ops::Tensor* delta,
                       const ops::Vector& weight, float eps, float* residual_out, const ops::Tensor& out) {
  if (replaying()) return;
  FF_ASSERT(weight.count == out.cols && out.cols % 8 == 0 && aligned(out));
  const int pieces = norm::norm_pieces(static_cast<int>(out.cols));
  if (pieces == 0) fail("norm: rows of {} columns, wanted at most {}", out.cols, norm::kMostColumns);
  if (planning_ || out.rows == 0) return;
  norm::NormArgs args = {};
  args.residual = residual;
  args.residual_stride = residual_stride;
  args.delta = delta != nullptr ? bf16(*delta) : nullptr;
  args.delta_stride = delta != nullptr ? delta->stride : 0;
  args.weight = weight.data();
  args.eps = eps;
  args.columns = static_cast<int>(out.cols);
  args.residual_out = residual_out;
  args.out = bf16_out(out);
  args.out_stride = out.stride;
  launch(card_->stream,
         (*norm_)[pieces == 1   ? kNorm1
                  : pieces == 2 ? kNorm2
                                : kNorm4],
         {static_cast<unsigned>(out.rows)}, overlap_, args);
}

void CudaBackend::rms_norm(const ops::Tensor& x, const ops::Vector& weight, float eps, const ops::Tensor& out) {
  FF_ASSERT(x.rows == out.rows && x.cols == out.cols);
  if (is_float(x)) return norm(x.f32(), x.stride, nullptr, weight, eps, nullptr, out);
  // 0 + x is x.
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
  FF_ASSERT(residual.rows == delta.rows && residual.cols == delta.cols && is_float(residual));
  if (planning_ || residual.rows == 0) return;
  const step::AddArgs args = {residual.f32(), residual.stride, bf16(delta), delta.stride,
                              static_cast<int>(residual.cols)};
  launch(card_->stream, (*step_)[kAdd], {static_cast<unsigned>(residual.rows)}, overlap_, args);
}

void CudaBackend::gather_rows(const ops::Tensor& x, std::span<const int32_t> rows, const ops::Tensor& out) {
  FF_ASSERT(out.rows == static_cast<int64_t>(rows.size()) && out.cols == x.cols && x.dtype == out.dtype);
  FF_ASSERT(aligned(x) && aligned(out) && x.cols * x.element_bytes() % 16 == 0);
  if (planning_ || rows.empty()) return;
  for (const int32_t row : rows) FF_ASSERT(row >= 0 && row < x.rows);
  std::memcpy(row_uploads_.prepare(rows.size_bytes()), rows.data(), rows.size_bytes());
  norm::GatherArgs args = {};
  args.x = x.data;
  args.x_stride = x.stride * x.element_bytes();
  args.rows = device_pointer<const int>(graphs_.send(row_uploads_, rows.size_bytes()));
  if (replaying()) return;
  args.out = out.data;
  args.out_stride = out.stride * out.element_bytes();
  args.pieces = static_cast<int>(x.cols * x.element_bytes() / 16);
  launch(card_->stream, (*norm_)[kGather], {static_cast<unsigned>(out.rows)}, overlap_, args);
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

void CudaBackend::product(const gemm::Matrix& matrix, const Kernel& kernel, const gemm::RowsTile& tile,
                          gemm::RowsArgs args) {
  args.matrix = matrix;
  args.panel_units = gemm::panel_units(tile, matrix.units, args.tokens, kProductShared);
  FF_ASSERT(args.panel_units > 0);
  Kernel sized = kernel;
  sized.smem_bytes = gemm::rows_map(tile, args.tokens, args.panel_units).total;
  const int grid = gemm::rows_grid(tile, matrix.tiles, card_->device.info().sms);
  launch(card_->stream, sized, {static_cast<unsigned>(grid)}, overlap_, args);
}

const std::vector<Kernel>& CudaBackend::wide_kernels(int formats) {
  const std::vector<Kernel>*& found = wide_kernels_[formats];
  if (found == nullptr) found = &loaded(wide_source(formats));
  return *found;
}

void CudaBackend::wide_product(const ops::Tensor& x, const gemm::Matrix& matrix, int formats,
                               const std::vector<Kernel>& kernels, bool to_float, void* out, int64_t out_stride) {
  const WideEntry entry = wide_entry(formats, x.rows);
  const ptx::TensorMap rows =
      row_pieces(card_->device, address_of(x.data), static_cast<uint64_t>(x.rows), static_cast<uint64_t>(x.cols),
                 static_cast<uint64_t>(x.stride * x.element_bytes()));
  gemm::DenseArgs args = {};
  args.matrix = matrix;
  args.tokens = static_cast<int>(x.rows);
  args.end = to_float ? gemm::DenseEnd::kFloat : gemm::DenseEnd::kBf16;
  args.x = bf16(x);
  args.x_stride = x.stride;
  args.out = out;
  args.out_stride = out_stride;
  const int grid = gemm::wide_grid(wide_tile(formats, entry), matrix, args.tokens, card_->device.info().sms);
  launch(card_->stream, kernels[entry], {static_cast<unsigned>(grid)}, overlap_, rows, args);
}

void CudaBackend::multiply(const ops::Tensor& x, const Stack& weight, const ops::Tensor& out) {
  if (replaying()) return;
  FF_ASSERT(x.rows == out.rows && x.cols == weight.columns() && out.cols == weight.rows() && aligned(x));
  if (weight.kernels == nullptr) weight.kernels = &loaded(rows_source(weight.formats()));
  if (options_.wide && weight.wide == nullptr) weight.wide = &wide_kernels(weight.formats());
  if (planning_) return;
  if (options_.wide && x.rows > kMostRows) {
    return wide_product(x, weight.matrix(), weight.formats(), *weight.wide, is_float(out), out.data, out.stride);
  }
  for (int64_t first = 0; first < x.rows; first += kMostRows) {
    const int tokens = static_cast<int>(std::min<int64_t>(kMostRows, x.rows - first));
    const int row_tiles = tokens > 8 ? 2 : 1;
    gemm::RowsArgs args = {};
    args.tokens = tokens;
    args.end = is_float(out) ? gemm::RowsEnd::kFloat : gemm::RowsEnd::kBf16;
    args.x = bf16(x) + first * x.stride;
    args.x_stride = x.stride;
    args.out = static_cast<uint8_t*>(out.data) + first * out.stride * out.element_bytes();
    args.out_stride = out.stride;
    product(weight.matrix(), (*weight.kernels)[static_cast<size_t>(row_tiles - 1)],
            rows_tile(weight.formats(), row_tiles, gemm::RowsLast::kNothing), args);
  }
}

void CudaBackend::linear(const ops::Tensor& x, const ops::Matrix& weight, const ops::Tensor& out) {
  multiply(x, static_cast<const Stack&>(weight), out);
}

void CudaBackend::gated(const ops::Tensor& x, const ops::Matrix& gate_up, const ops::Matrix& down,
                        const ops::Tensor& out) {
  if (replaying()) return;
  const int64_t width = down.columns();
  FF_ASSERT(gate_up.rows() == 2 * width);
  const auto tensor = [&](cuda::Buffer& buffer, int64_t cols, const char* what) {
    const DeviceAddress at = scratch(buffer, rows_of(x) * cols * 2, what);
    return ops::Tensor{device_pointer<void>(at), ops::DType::kBf16, x.rows, cols, cols};
  };
  const ops::Tensor wide = tensor(wide_, 2 * width, "gate and up");
  const ops::Tensor narrow = tensor(narrow_, width, "activations of an MLP");
  linear(x, gate_up, wide);
  if (!planning_ && x.rows > 0) {
    const step::GateArgs args = {bf16(wide), wide.stride, bf16_out(narrow), narrow.stride, static_cast<int>(width)};
    launch(card_->stream, (*step_)[kGate], {static_cast<unsigned>(x.rows)}, overlap_, args);
  }
  linear(narrow, down, out);
}

void CudaBackend::mlp(const ops::MlpParams& params, const ops::Tensor& x, const ops::Tensor& out) {
  gated(x, *params.gate_up, *params.down, out);
}

CudaBackend::ExpertSet& CudaBackend::experts_of(const ops::MoeParams& params) {
  const int64_t rows = std::max<int64_t>({limits_.rows, tables_.rows, 1});
  const ops::Experts& e = *params.experts;
  ExpertSet& set = experts_[{e.count(), params.top_k, e.hidden(), e.intermediate()}];
  if (set.workspace == nullptr || set.workspace->max_tokens() < rows) {
    card_->stream.synchronize();
    plan::moe::Problem problem;
    problem.name = "experts";
    problem.experts = e.count();
    problem.top_k = params.top_k;
    problem.hidden = e.hidden();
    problem.intermediate = e.intermediate();
    KernelOptions options;
    options.max_tokens = std::min<int64_t>(rows, 16384);
    options.self_test = options_.self_test;
    set.workspace.reset();
    set.kernels = std::make_unique<ExpertKernels>(card_->device, card_->store, problem, options);
    set.workspace = std::make_unique<ExpertWorkspace>(set.kernels->context(), options.max_tokens);
  }
  return set;
}

void CudaBackend::moe(const ops::MoeParams& params, const ops::Tensor& x, const ops::Tensor& out) {
  if (replaying()) return;
  const auto& experts = static_cast<const CardExperts&>(*params.experts);
  const auto& router = static_cast<const Stack&>(*params.router);
  const auto* gate = static_cast<const Stack*>(params.shared_gate);
  FF_ASSERT(x.rows == out.rows && x.cols == experts.hidden() && out.cols == x.cols && out.stride == out.cols);
  FF_ASSERT(x.stride == x.cols && aligned(x) && aligned(out) && router.rows() == experts.count());
  if (params.top_k > 32 || router.rows() > gemm::kMostRouted) {
    fail("experts: {} of {}, wanted at most 32 of {}", params.top_k, router.rows(), gemm::kMostRouted);
  }
  ExpertSet& set = experts_of(params);
  // The shared expert's gate is one more row of the router.
  gemm::Matrix matrix = router.matrix();
  if (gate != nullptr) {
    FF_ASSERT(gate->rows() == 1 && gate->columns() == router.columns());
    FF_ASSERT(matrix.count + gate->matrix().count <= gemm::kMostParts);
    for (int i = 0; i < gate->matrix().count; ++i) {
      gemm::Part part = gate->matrix().parts[i];
      part.first_tile += matrix.tiles;
      part.first_row += static_cast<int>(router.rows());
      matrix.parts[matrix.count++] = part;
    }
    matrix.tiles += gate->matrix().tiles;
  }
  const int formats = router.formats() | (gate != nullptr ? gate->formats() : 0);
  const std::vector<Kernel>* wide = options_.wide ? &wide_kernels(formats) : nullptr;
  const int64_t stride = router.rows() + (gate != nullptr ? 1 : 0);
  const int64_t rows = rows_of(x);
  auto* logits = device_pointer<float>(scratch(logits_, rows * stride * 4, "router logits"));
  auto* ids = device_pointer<int>(scratch(ids_, rows * params.top_k * 4, "chosen experts"));
  auto* weights = device_pointer<float>(scratch(weights_, rows * params.top_k * 4, "weights of experts"));
  ops::Tensor share{nullptr, ops::DType::kBf16, x.rows, x.cols, x.cols};
  if (params.shared_gate_up != nullptr) {
    share.data = device_pointer<void>(scratch(share_, rows * x.cols * 2, "output of the shared expert"));
  }
  if (!planning_) {
    gemm::RouteArgs route = {};
    route.logits = logits;
    route.logits_stride = stride;
    route.tokens = static_cast<int>(x.rows);
    route.experts = static_cast<int>(router.rows());
    route.top_k = static_cast<int>(params.top_k);
    route.renormalize = params.renormalize ? 1 : 0;
    route.gate = -1;
    route.width = static_cast<int>(params.top_k);
    route.ids = ids;
    route.weights = weights;
    if (wide != nullptr && x.rows > kMostRows) {
      wide_product(x, matrix, formats, *wide, true, logits, stride);
      launch(card_->stream, (*step_)[kRouteRows], {static_cast<unsigned>(gemm::route_grid(route.tokens))}, overlap_,
             route);
    } else {
      for (int64_t first = 0; first < x.rows; first += kMostRows) {
        const int tokens = static_cast<int>(std::min<int64_t>(kMostRows, x.rows - first));
        const int row_tiles = tokens > 8 ? 2 : 1;
        gemm::RowsArgs args = {};
        args.tokens = tokens;
        args.end = gemm::RowsEnd::kFloat;
        args.x = bf16(x) + first * x.stride;
        args.x_stride = x.stride;
        args.out = logits + first * stride;
        args.out_stride = stride;
        args.arrived = arrived_.as<int>();
        args.route = route;
        args.route.logits = logits + first * stride;
        args.route.tokens = tokens;
        args.route.ids = ids + first * params.top_k;
        args.route.weights = weights + first * params.top_k;
        product(matrix, (*route_)[static_cast<size_t>(row_tiles - 1)], rows_tile(15, row_tiles, gemm::RowsLast::kRoute),
                args);
      }
    }
    const ExpertLayer layer(*set.kernels, *set.workspace, experts.weights());
    for (int64_t first = 0; first < x.rows; first += set.workspace->max_tokens()) {
      const int64_t count = std::min(set.workspace->max_tokens(), x.rows - first);
      layer.run(card_->stream,
                {address_of(bf16(x) + first * x.stride), address_of(ids + first * params.top_k),
                 address_of(weights + first * params.top_k), address_of(bf16(out) + first * out.stride), count});
    }
  }
  if (params.shared_gate_up == nullptr) return;
  gated(x, *params.shared_gate_up, *params.shared_down, share);
  if (planning_ || x.rows == 0) return;
  const step::SharedArgs args = {bf16(share),
                                 share.stride,
                                 gate != nullptr ? logits + router.rows() : nullptr,
                                 stride,
                                 bf16_out(out),
                                 out.stride,
                                 static_cast<int>(out.cols)};
  launch(card_->stream, (*step_)[kShared], {static_cast<unsigned>(x.rows)}, overlap_, args);
}

}  // namespace fourfold::cuda
