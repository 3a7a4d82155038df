#include "cuda/backend/cuda_backend.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/check.h"
#include "base/math.h"
#include "cpu/step/host_stepper.h"
#include "kernels/norm/norm_args.h"
#include "kernels/step/rows_args.h"

namespace fourfold::cuda {
namespace {

constexpr int kMostRows = 16;  // of a product
constexpr int64_t kPartialBytes = 64 << 20;
constexpr unsigned kProductShared = kMostShared - 1024;

bool is_float(const ops::Tensor& x) { return x.dtype == ops::DType::kF32; }
const uint16_t* bf16(const ops::Tensor& x) {
  FF_ASSERT(x.dtype == ops::DType::kBf16);
  return static_cast<const uint16_t*>(x.data);
}
uint16_t* bf16_out(const ops::Tensor& x) { return const_cast<uint16_t*>(bf16(x)); }
bool aligned(const ops::Tensor& x) {
  return reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && x.stride * x.element_bytes() % 16 == 0;
}
DeviceAddress address_of(const void* p) { return static_cast<DeviceAddress>(reinterpret_cast<uintptr_t>(p)); }
// Columns [0, b.cols) of b follow those of a in the same rows.
bool follows(const ops::Tensor& a, const ops::Tensor& b) {
  return static_cast<const uint16_t*>(a.data) + a.cols == b.data && a.stride == b.stride && a.rows == b.rows;
}

}  // namespace

// A body that is planned: its operations say what they need.
struct CudaBackend::Rehearsal : ops::StepScope {
  explicit Rehearsal(int64_t lanes_) : lanes(lanes_) {}
  int64_t lanes;
  void begin_trunk() override {}
  void gather_logit_rows(const ops::Tensor&, const ops::Tensor&) override {}
  void choose(const ops::Tensor&) override {}
  void begin_feed() override {}
  int64_t begin_draft(int64_t) override { return lanes; }
  void gather_ends(const ops::Tensor&, const ops::Tensor&) override {}
  void draft(int64_t, const ops::Tensor&) override {}
};

CudaBackend::CudaBackend(const CudaOptions& options)
    : options_(options),
      card_(std::make_shared<Card>(options.device,
                                   options.store.empty() ? jit::default_store_directory() : options.store)),
      pool_(options.threads),
      overlap_(options.overlap ? Overlap::kProgrammatic : Overlap::kNone),
      step_uploads_(*card_),
      row_uploads_(*card_) {
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
  for (const int formats : formats_) sources.push_back(rows_source(formats));
  if (state_shape_.layers > 0) {
    sources.push_back(delta_source(static_cast<int>(state_shape_.key_dim), static_cast<int>(state_shape_.value_dim)));
  }
  card_->loader.load(sources);  // in parallel
  for (const plan::KernelSource& source : sources) loaded(source);
  norm_ = &loaded(norm_source());
  step_ = &loaded(step_source());
  route_ = &loaded(rows_source(15, gemm::RowsLast::kRoute));
  known_loaded_ = true;
}

DeviceAddress CudaBackend::scratch(cuda::Buffer& buffer, int64_t bytes, const char* what) {
  if (buffer.bytes() < static_cast<uint64_t>(bytes)) {
    card_->stream.synchronize();
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
  return std::make_unique<CardKvCache>(card_, shape);
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

void CudaBackend::begin_step(const ops::Batch& batch) {
  load_known();
  const int key_dim = static_cast<int>(state_shape_.key_dim), value_dim = static_cast<int>(state_shape_.value_dim);
  const bool chunks = state_shape_.layers > 0 && has_chunks(key_dim, value_dim);
  tables_.build(batch, kv_shape_.layers > 0 ? kv_shape_.page_size : 0,
                chunks ? chunk_tile(key_dim, value_dim).chunk : 0, step_uploads_);
}

void CudaBackend::embed(const ops::Matrix& matrix, const ops::Tensor& out) {
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
  args.rows = device_pointer<const int>(row_uploads_.send(rows.size_bytes()));
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

void CudaBackend::multiply(const ops::Tensor& x, const Stack& weight, const ops::Tensor& out) {
  FF_ASSERT(x.rows == out.rows && x.cols == weight.columns() && out.cols == weight.rows() && aligned(x));
  if (weight.kernels == nullptr) weight.kernels = &loaded(rows_source(weight.formats()));
  if (planning_) return;
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
      gemm::RouteArgs& route = args.route;
      route.logits = logits + first * stride;
      route.logits_stride = stride;
      route.tokens = tokens;
      route.experts = static_cast<int>(router.rows());
      route.top_k = static_cast<int>(params.top_k);
      route.renormalize = params.renormalize ? 1 : 0;
      route.gate = -1;
      route.width = static_cast<int>(params.top_k);
      route.ids = ids + first * params.top_k;
      route.weights = weights + first * params.top_k;
      product(matrix, (*route_)[static_cast<size_t>(row_tiles - 1)], rows_tile(15, row_tiles, gemm::RowsLast::kRoute),
              args);
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

// ---- mixers

const float* CudaBackend::frequencies(float theta, int64_t rotary_dim) {
  cuda::Buffer& buffer = frequencies_[{theta, rotary_dim}];
  if (buffer.bytes() == 0) {
    std::vector<float> values;
    for (int64_t i = 0; i < std::max<int64_t>(rotary_dim / 2, 1); ++i) {
      const float exponent = static_cast<float>(2 * i) / static_cast<float>(std::max<int64_t>(rotary_dim, 1));
      values.push_back(1.0f / static_cast<float>(std::pow(static_cast<double>(theta), static_cast<double>(exponent))));
    }
    buffer = cuda::Buffer(card_->device, values.size() * sizeof(float), "rotation");
    buffer.upload(card_->stream, values);
  }
  return buffer.as<const float>();
}

void CudaBackend::attend(const ops::AttentionParams& params, const ops::Tensor& k, CardKvCache& cache, int64_t layer,
                         const ops::Tensor* out) {
  const int head_dim = static_cast<int>(params.head_dim), rotary_dim = static_cast<int>(params.rotary_dim);
  const std::vector<Kernel>*& found = attention_[{params.head_dim, params.rotary_dim}];
  if (found == nullptr) found = &loaded(attention_source(head_dim, rotary_dim));
  const attn::AttentionShape shape = {static_cast<int>(params.heads), static_cast<int>(params.kv_heads), head_dim,
                                      params.gated};
  const ops::KvCacheShape& pages = cache.shape();
  FF_ASSERT(layer >= 0 && layer < pages.layers && pages.kv_heads == params.kv_heads &&
            pages.head_dim == params.head_dim);
  const float* turns = frequencies(params.rope_theta, params.rotary_dim);
  const auto partial_bytes = [&](int splits, int rows) { return 4 * attn::partial_floats(shape, splits, rows, 1); };
  const auto reserve_partial = [&](int64_t bytes) {
    scratch(partial_, bytes, "parts of attention");
    scratch(partial_sums_, bytes / head_dim * 2, "parts of attention");
  };
  if (planning_) {
    const int splits = attn::most_splits(static_cast<int>(limits_.context));
    reserve_partial(std::max(kPartialBytes, static_cast<int64_t>(partial_bytes(splits, attn::kMostRows))));
    return;
  }
  attn::AttentionArgs args = {};
  args.shape = shape;
  args.rows = static_cast<const uint16_t*>(k.data) - shape.k_column(0);
  args.row_stride = k.stride;
  if (reinterpret_cast<uintptr_t>(args.rows) % 16 != 0 || k.stride % 8 != 0) {
    fail("attention: rows of {} elements, wanted a multiple of 8", k.stride);
  }
  args.q_norm = params.q_norm != nullptr ? params.q_norm->data() : nullptr;
  args.k_norm = params.k_norm != nullptr ? params.k_norm->data() : nullptr;
  args.frequencies = turns;
  args.cache = cache.layer(layer);
  args.cache_scales = ones_.as<const float>();
  args.out = out != nullptr ? bf16_out(*out) : nullptr;
  args.out_stride = out != nullptr ? out->stride : 0;
  args.page_bytes = cache.page_bytes();
  while (int64_t{1} << args.page_shift < pages.page_size) ++args.page_shift;
  args.page_table_stride = tables_.page_stride;
  args.scale = params.scale;
  args.norm_eps = params.norm_eps;
  for (const StepTables::Round& round : tables_.rounds) {
    args.most_rows = round.most_rows;
    args.splits = attn::most_splits(round.longest);
    args.settled = overlap_ == Overlap::kProgrammatic && !round.follows ? 1 : 0;
    const int64_t each = partial_bytes(args.splits, args.most_rows);
    const int64_t budget = std::max({kPartialBytes, each});
    reserve_partial(std::min<int64_t>(each * round.places, budget));
    args.partial = partial_.as<float>();
    args.partial_sums = partial_sums_.as<float>();
    const AttentionEntry entry =
        round.most_rows * shape.group() <= 16 && !round.part && round.most_rows == 1 ? kAttendFew : kAttendMany;
    const attn::DecodeTile tile = attention_tile(head_dim, rotary_dim, entry);
    const int at_once = static_cast<int>(std::clamp<int64_t>(budget / each, 1, 65535));
    for (int begin = 0; begin < round.places; begin += at_once) {
      const int places = std::min(at_once, round.places - begin);
      args.sequences = device_pointer<const SequenceRows>(tables_.sequences) + round.first + begin;
      args.live = device_pointer<const int>(tables_.lives) + round.live;
      args.pages =
          device_pointer<const int>(tables_.pages) + static_cast<int64_t>(round.page_row + begin) * tables_.page_stride;
      const attn::DecodeLaunch decode = attn::decode_launch(tile, shape, args.splits, args.most_rows, places);
      launch(card_->stream, (*found)[entry], {decode.grid_x, decode.grid_y, decode.grid_z}, overlap_, args);
      if (out == nullptr) continue;
      const attn::DecodeLaunch combine = attn::combine_launch(shape, args.most_rows, places);
      launch(card_->stream, (*found)[kAttendCombine], {combine.grid_x, combine.grid_y, combine.grid_z}, overlap_, args);
    }
  }
  if (out != nullptr) clear_padding(*out);
}

void CudaBackend::attention(const ops::AttentionParams& params, const ops::Tensor& q, const ops::Tensor& k,
                            const ops::Tensor& v, ops::KvCache& cache, int64_t layer, const ops::Tensor& out) {
  FF_ASSERT(follows(q, k) && follows(k, v) && out.rows == q.rows && out.cols == params.heads * params.head_dim);
  FF_ASSERT(q.cols == params.heads * params.head_dim * (params.gated ? 2 : 1));
  attend(params, k, static_cast<CardKvCache&>(cache), layer, &out);
}

void CudaBackend::append_keys(const ops::AttentionParams& params, const ops::Tensor& k, const ops::Tensor& v,
                              ops::KvCache& cache, int64_t layer) {
  // The queries are the columns before the keys; what becomes of them is dropped.
  FF_ASSERT(follows(k, v) &&
            k.stride >= (params.heads * (params.gated ? 2 : 1) + 2 * params.kv_heads) * params.head_dim);
  attend(params, k, static_cast<CardKvCache&>(cache), layer, nullptr);
}

void CudaBackend::delta_net(const ops::DeltaNetParams& params, const ops::Tensor& qkv, const ops::Tensor& z,
                            const ops::Tensor& b, const ops::Tensor& a, ops::StateCache& states, int64_t layer,
                            const ops::Tensor& out) {
  FF_ASSERT(follows(qkv, z) && follows(z, b) && follows(b, a) && out.rows == qkv.rows);
  const int key_dim = static_cast<int>(params.key_dim), value_dim = static_cast<int>(params.value_dim);
  const std::vector<Kernel>*& found = delta_[{params.key_dim, params.value_dim}];
  if (found == nullptr) found = &loaded(delta_source(key_dim, value_dim));
  auto& cache = static_cast<CardStateCache&>(states);
  const gdn::DeltaShape shape = delta_shape(cache.shape());
  FF_ASSERT(layer >= 0 && layer < cache.shape().layers && shape.key_dim == key_dim && shape.value_dim == value_dim &&
            shape.key_heads == params.key_heads && shape.value_heads == params.value_heads &&
            params.conv_taps == gdn::kTaps && qkv.cols == shape.channels() && z.cols == out.cols);
  const gdn::ChunkTile tile = chunk_tile(key_dim, value_dim);
  const auto reserve_chunks = [&](int64_t chunks, int64_t rows) {
    const gdn::ChunkSpace space = gdn::chunk_space(tile, shape, static_cast<int>(chunks), static_cast<int>(rows));
    scratch(chunk_space_, space.total, "chunks of the delta rule");
    return space;
  };
  if (planning_) {
    if (has_chunks(key_dim, value_dim)) {
      reserve_chunks(limits_.rows / tile.chunk + std::max<int64_t>(limits_.rows / kMostRows, 1), limits_.rows);
    }
    return;
  }
  gdn::DeltaArgs args = {};
  args.shape = shape;
  args.rows = qkv.data;
  args.states = cache.states(layer);
  args.history = cache.history(layer);
  args.conv = params.conv->data();
  args.a_log = params.a_log->data();
  args.dt_bias = params.dt_bias->data();
  args.norm = params.norm->data();
  args.out = bf16_out(out);
  args.row_stride = qkv.stride;
  args.out_stride = out.stride;
  args.state_stride = cache.state_stride();
  args.history_stride = cache.history_stride();
  args.norm_eps = params.norm_eps;
  if (!aligned(qkv)) fail("delta rule: rows of {} elements, wanted a multiple of 8", qkv.stride);
  const auto* sequences = device_pointer<const SequenceRows>(tables_.sequences);
  const auto* lives = device_pointer<const int>(tables_.lives);
  const int early = overlap_ == Overlap::kProgrammatic ? 1 : 0;
  for (const StepTables::Round& round : tables_.rounds) {
    if (round.part && tables_.chunked.places > 0) continue;
    const DeltaEntry entry = round.most_rows == 1 && !round.part ? kDeltaOne : kDeltaFew;
    args.sequences = sequences + round.first;
    args.live = lives + round.live;
    args.state_out = device_pointer<const int>(tables_.state_out) + int64_t{round.first} * kMostRows;
    args.state_out_stride = kMostRows;
    args.settled = round.follows ? 0 : early;
    const gdn::RecurrentLaunch l =
        gdn::recurrent_launch(recurrent_tile(key_dim, value_dim, entry), shape, round.places);
    launch(card_->stream, (*found)[entry], {l.grid_x, l.grid_y}, overlap_, args);
  }
  if (const StepTables::Chunked& c = tables_.chunked; c.places > 0) {
    gdn::ChunkArgs chunks = {};
    chunks.delta = args;
    chunks.delta.sequences = sequences + c.first;
    chunks.delta.live = lives + c.live;
    chunks.delta.state_out = device_pointer<const int>(tables_.chunk_state_out);
    chunks.delta.state_out_stride = 1;
    chunks.delta.settled = early;
    chunks.chunks = device_pointer<const gdn::ChunkPlace>(tables_.chunk_places);
    chunks.first_chunk = device_pointer<const int>(tables_.first_chunk);
    chunks.at = reserve_chunks(c.chunks, tables_.rows);
    chunks.space = chunk_space_.as<uint8_t>();
    const auto run = [&](DeltaEntry entry, const gdn::ChunkLaunch& l) {
      launch(card_->stream, (*found)[entry], {l.grid_x, l.grid_y}, overlap_, chunks);
    };
    run(kDeltaPrepare, gdn::prepare_launch(tile, shape, c.chunks));
    run(kDeltaScan, gdn::scan_launch(tile, shape, c.places));
    run(kDeltaScale, gdn::scale_launch(tile, shape, c.chunks));
  }
  clear_padding(out);
}

// ---- steps

std::unique_ptr<ops::Stepper> CudaBackend::make_stepper(const ops::StepLimits& limits, ops::KvCache* kv,
                                                        ops::StepBody body) {
  reserve({limits.rows, limits.lanes, limits.context, limits.page_size});
  planning_ = true;
  try {
    Rehearsal rehearsal(limits.lanes);
    body({limits.rows, limits.logit_rows, limits.lanes, limits.drafts, limits.drafts > 0}, rehearsal);
  } catch (...) {
    planning_ = false;
    throw;
  }
  planning_ = false;
  const auto logit_bytes = static_cast<uint64_t>(limits.logit_rows * limits.vocabulary * 4);
  if (fetched_.bytes() < logit_bytes) fetched_ = PinnedBuffer(card_->device, logit_bytes, "logits");
  card_->stream.synchronize();

  cpu::HostStepParts parts;
  parts.bind = [this](const ops::Batch& batch) { begin_step(batch); };
  parts.copy_page = [kv](int32_t from, int32_t to) {
    if (kv != nullptr) kv->copy_page(from, to);
  };
  parts.gather = [this](const ops::Tensor& x, std::span<const int32_t> rows, const ops::Tensor& out) {
    gather_rows(x, rows, out);
  };
  parts.fetch = [this](const ops::Tensor& logits) {
    const auto bytes = static_cast<uint64_t>(logits.rows * logits.cols * 4);
    FF_ASSERT(is_float(logits) && logits.stride == logits.cols && bytes <= fetched_.bytes());
    card_->device.check(card_->device.driver().call().copy_to_host(fetched_.data(), address_of(logits.data), bytes,
                                                                   card_->stream.handle()),
                        "copy from the device");
    card_->stream.synchronize();
    step_uploads_.settled();
    row_uploads_.settled();
    ops::Tensor host = logits;
    host.data = fetched_.data();
    return host;
  };
  parts.body = std::move(body);
  parts.begin_thread = [this] { card_->device.make_current(); };
  parts.pool = &pool_;
  return cpu::make_host_stepper(limits, std::move(parts));
}

void CudaBackend::read(const ops::Tensor& x, std::span<float> out) {
  FF_ASSERT(static_cast<int64_t>(out.size()) == x.rows * x.cols);
  if (x.rows == 0) return;
  const auto row = static_cast<size_t>(x.stride * x.element_bytes());
  const size_t bytes = static_cast<size_t>(x.rows - 1) * row + static_cast<size_t>(x.cols * x.element_bytes());
  std::vector<uint8_t> host(bytes);
  card_->device.check(
      card_->device.driver().call().copy_to_host(host.data(), address_of(x.data), bytes, card_->stream.handle()),
      "copy from the device");
  card_->stream.synchronize();
  step_uploads_.settled();
  row_uploads_.settled();
  for (int64_t t = 0; t < x.rows; ++t) {
    const uint8_t* from = host.data() + static_cast<size_t>(t) * row;
    float* to = out.data() + t * x.cols;
    if (is_float(x)) {
      std::memcpy(to, from, static_cast<size_t>(x.cols) * sizeof(float));
      continue;
    }
    for (int64_t i = 0; i < x.cols; ++i) {
      uint16_t bits = 0;
      std::memcpy(&bits, from + i * 2, sizeof(bits));
      to[i] = nvfp4::bf16_to_float(bits);
    }
  }
}

std::shared_ptr<ops::Backend> make_backend(const CudaOptions& options) {
  return std::make_shared<CudaBackend>(options);
}

std::string refusal_of(int device, uint64_t weight_bytes) {
  std::string why;
  const jit::Driver* driver = jit::Driver::find(&why);
  if (driver == nullptr) return "no CUDA device" + why;
  if (jit::Nvrtc::find(&why) == nullptr) return "no NVRTC" + why;
  if (device >= driver->device_count()) return fmt::format("no CUDA device {}", device);
  const jit::DeviceInfo info = driver->device(device);
  if (info.major != 9) return fmt::format("{} is not a Hopper card", info.name);
  const Device opened(device);
  const DeviceMemory memory = opened.memory();
  constexpr uint64_t kBeside = uint64_t{3} << 30;  // caches, activations, kernels
  if (weight_bytes + weight_bytes / 16 + kBeside > memory.free) {
    return fmt::format("{:.1f} GB of weights, {:.1f} GB free on {}", static_cast<double>(weight_bytes) / 1e9,
                       static_cast<double>(memory.free) / 1e9, info.name);
  }
  return "";
}

}  // namespace fourfold::cuda
