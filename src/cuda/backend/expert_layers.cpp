// Gated MLPs and layers of experts. Of up to kMostRows rows a shared expert that is not among the routed ones has no
// nodes of its own: gate and up go with the router's product, down goes with the choice of experts, and the
// norm behind the layer adds what comes out of it.
#include <algorithm>

#include "base/check.h"
#include "cuda/backend/cuda_backend.h"
#include "cuda/backend/tensors.h"
#include "cuda/moe/sources.h"
#include "kernels/step/rows_args.h"

namespace fourfold::cuda {

ops::Tensor CudaBackend::activated_rows(const ops::Tensor& x, const Stack& gate_up) {
  const int64_t width = gate_up.rows() / 2;
  const DeviceAddress at = scratch(narrow_, rows_of(x) * width * 2, "activations of an MLP");
  return {device_pointer<void>(at), ops::DType::kBf16, x.rows, width, width};
}

ops::Tensor CudaBackend::activated(const ops::Tensor& x, const Stack& gate_up) {
  const ops::Tensor narrow = activated_rows(x, gate_up);
  if (gate_up.paired()) {
    const std::string name = timer_ == nullptr && works_ == nullptr
                                 ? ""
                                 : fmt::format("gate and up {} x {}", gate_up.rows(), gate_up.columns());
    const gemm::Matrix& matrix = gate_up.matrix();
    product(name, x, matrix, gate_up.formats(), gate_up.rows(), gate_up.bytes(), narrow, {matrix.tiles, narrow});
    return narrow;
  }
  const int64_t both = gate_up.rows();
  const DeviceAddress at = scratch(wide_, rows_of(x) * both * 2, "gate and up");
  const ops::Tensor wide = {device_pointer<void>(at), ops::DType::kBf16, x.rows, both, both};
  linear(x, gate_up, wide);
  if (planning_ || x.rows == 0 ||
      left_out("gate of an MLP",
               [&] {
                 return ops::Cost{x.rows * narrow.cols * 6.0, 0};
               },
               {.rows = x.rows})) {
    return narrow;
  }
  const auto columns = static_cast<int>(narrow.cols);
  const step::GateArgs args = {bf16(wide),    wide.stride, bf16_out(narrow),
                               narrow.stride, columns,     in_pieces(wide) && in_pieces(narrow) ? 1 : 0};
  launch(card_->stream, (*step_)[kGate], columns_grid(x.rows, columns), overlap_, args);
  return narrow;
}

void CudaBackend::mlp(const ops::MlpParams& params, const ops::Tensor& x, const ops::Tensor& out) {
  if (replaying()) return;
  FF_ASSERT(params.gate_up->rows() == 2 * params.down->columns());
  linear(activated(x, static_cast<const Stack&>(*params.gate_up)), *params.down, out);
}

const std::vector<Kernel>& CudaBackend::choosing_kernels(const RowsWay& way) {
  const std::vector<Kernel>*& found = choosing_[way];
  if (found == nullptr) found = &loaded(choosing_source(arch_, way));
  return *found;
}

bool CudaBackend::chooses_beside(const Stack& stack, int64_t rows) const {
  const RowsWay way = choosing_way(arch_, stack.formats(), stack.rows(), stack.columns());
  const int units = stack.matrix().units;
  const bool one_launch = rows <= kFewRows ? rows_at_once(arch_, way, units, static_cast<int>(rows)) == rows
                                           : all_at_once(arch_, way, units, rows);
  return one_launch && choosing_right(arch_, way);
}

void CudaBackend::choosing_product(std::string_view name, const gemm::RouteArgs& choice, const ops::Tensor& x,
                                   const Stack& stack, const ops::Tensor& out) {
  const RowsWay way = choosing_way(arch_, stack.formats(), stack.rows(), stack.columns());
  if (timer_ != nullptr) matrices_.insert({stack.formats(), stack.rows(), stack.columns()});
  const std::vector<Kernel>& kernels = choosing_kernels(way);
  if (planning_) return;
  settle_waiting();
  const plan::step::Extent extent = {.kind = plan::step::Kind::kProduct,
                                     .rows = x.rows,
                                     .outputs = stack.rows(),
                                     .inputs = x.cols,
                                     .choice_beside = true};
  if (left_out(
          name, [&] { return ops::linear_cost(x.rows, stack.rows(), x.cols, stack.bytes()); }, extent)) {
    return;
  }
  const gemm::Matrix& matrix = stack.matrix();
  const RowsEntry entry = x.rows > kFewRows ? kRows16 : kRows8;
  const gemm::RowsTile tile = choosing_tile(way, entry);
  Kernel kernel = kernels[entry];
  gemm::RowsArgs args = {};
  args.matrix = matrix;
  args.tokens = static_cast<int>(x.rows);
  const int ctas = rows_ctas(arch_, tile, matrix.units, args.tokens);
  args.panel_units = gemm::panel_units(tile, matrix.units, args.tokens, shared_of(arch_, ctas));
  FF_ASSERT(args.panel_units > 0 && x.rows <= kMostRows);
  args.end = is_float(out) ? gemm::RowsEnd::kFloat : gemm::RowsEnd::kBf16;
  args.x = bf16(x);
  args.x_stride = x.stride;
  args.out = out.data;
  args.out_stride = out.stride;
  args.choice = choice;
  kernel.smem_bytes = gemm::rows_map(tile, args.tokens, args.panel_units).total;
  const int grid = gemm::rows_grid(tile, matrix.tiles, sms_, ctas);
  launch(card_->stream, kernel, {static_cast<unsigned>(grid)}, overlap_, args);
}

CudaBackend::ExpertSet& CudaBackend::experts_of(const CardExperts& e, int64_t top_k) {
  const int64_t rows = std::max<int64_t>({limits_.rows, tables_.rows, 1});
  ExpertSet& set = experts_[{e.count(), top_k, e.hidden(), e.intermediate(), e.shared_slices()}];
  if (asked_for_ != nullptr) {
    if (set.kernels != nullptr || std::exchange(set.asked_for, true)) return set;
    for (plan::KernelSource& source : layer_sources(e.problem(top_k), card_->loader.card(), {}, rows)) {
      asked_for_->push_back(std::move(source));
    }
    return set;
  }
  if (set.workspace == nullptr || set.workspace->max_tokens() < std::min<int64_t>(rows, kMostLayerRows)) {
    card_->stream.synchronize();
    graphs_.clear();
    KernelOptions options;
    options.max_tokens = std::min<int64_t>(rows, kMostLayerRows);
    options.self_test = options_.self_test;
    options.load = card_->load;
    set.workspace.reset();
    set.kernels = std::make_unique<ExpertKernels>(card_->device, card_->store, e.problem(top_k), options);
    set.workspace = std::make_unique<ExpertWorkspace>(set.kernels->context(), options.max_tokens);
  }
  return set;
}

void CudaBackend::plain_experts(const PlainExperts& experts, const ops::Tensor& x, const int* ids, const float* weights,
                                int64_t top_k, const ops::Tensor& out, const std::function<ops::Cost()>& cost) {
  const std::vector<Kernel>& kernels = loaded(plain_source(arch_, experts.gate_up().formats, experts.down().formats));
  plain_.insert({experts.gate_up().formats, experts.down().formats});
  const int64_t most = std::min(rows_of(x), kMostPlainTokens);
  const PlainTables tables = plain_tables(most, top_k, experts.count());
  scratch(plain_tables_, static_cast<int64_t>(tables.bytes), "routing tables");
  scratch(plain_hidden_, tables.slots * experts.intermediate() * 2, "activations of experts");
  scratch(plain_partial_, tables.slots * experts.hidden() * 4, "rows of experts to be summed");
  if (planning_ || left_out("experts", cost, {.rows = x.rows})) return;
  const PlainCall call = {card_->stream,
                          arch_,
                          card_->experts,
                          kernels,
                          experts,
                          sms_,
                          overlap_,
                          plain_tables_.address(),
                          plain_hidden_.address(),
                          plain_partial_.address()};
  for (int64_t first = 0; first < x.rows; first += kMostPlainTokens) {
    run_plain(call, bf16(x) + first * x.stride, x.stride, ids + first * top_k, weights + first * top_k,
              std::min(kMostPlainTokens, x.rows - first), top_k, bf16_out(out) + first * out.stride);
  }
}

namespace {

// Matrices of one product, and what timing wants to know of them.
struct Together {
  gemm::Matrix matrix;
  int formats;
  int64_t outputs, bytes;

  explicit Together(const Stack& first)
      : matrix(first.matrix()), formats(first.formats()), outputs(first.rows()), bytes(first.bytes()) {}
  // One more behind them; its rows are columns of the result from `column` on.
  void add(const Stack& more, int64_t column) {
    FF_ASSERT(matrix.count + more.matrix().count <= gemm::kMostParts && matrix.columns == more.matrix().columns);
    for (int i = 0; i < more.matrix().count; ++i) {
      gemm::Part part = more.matrix().parts[i];
      part.first_tile += matrix.tiles;
      part.first_row += static_cast<int>(column);
      matrix.parts[matrix.count++] = part;
    }
    matrix.tiles += more.matrix().tiles;
    formats |= more.formats();
    outputs += more.rows();
    bytes += more.bytes();
  }
};

}  // namespace

void CudaBackend::moe(const ops::MoeParams& params, const ops::Tensor& x, const ops::Tensor& out) {
  if (replaying()) return;
  const ops::Experts& experts = *params.experts;
  const auto& router = static_cast<const Stack&>(*params.router);
  const auto* gate = static_cast<const Stack*>(params.shared_gate);
  const auto* gate_up = static_cast<const Stack*>(params.shared_gate_up);
  const auto* down = static_cast<const Stack*>(params.shared_down);
  const int64_t slices = experts.shared_slices(), picks = params.top_k + slices;
  FF_ASSERT(x.rows == out.rows && x.cols == experts.hidden() && out.cols == x.cols && out.stride == out.cols);
  FF_ASSERT(x.stride == x.cols && aligned(x) && aligned(out));
  FF_ASSERT(params.first_expert >= 0 && params.first_expert + experts.count() <= router.rows());
  FF_ASSERT(gate_up == nullptr || gate_up->rows() == 2 * down->columns());
  if (router.rows() > gemm::kMostRouted) {
    fail("experts: {}, wanted at most {}", router.rows(), gemm::kMostRouted);
  }
  if (picks > 32) {
    fail("experts: {} for each token and {} slices of the shared expert, wanted at most 32 together", params.top_k,
         slices);
  }
  // The shared expert's gate is one more row of the router; its gate and up may be more of them.
  Together routes(router);
  if (gate != nullptr) {
    FF_ASSERT(gate->rows() == 1);
    routes.add(*gate, router.rows());
  }
  const bool joins = gate_up != nullptr && gate_up->paired() && gate_up->formats() == routes.formats;
  const bool joined =
      joins && (x.rows <= kFewRows ||
                all_at_once(arch_, rows_way(arch_, routes.formats, routes.outputs + gate_up->rows(), x.cols),
                            routes.matrix.units, x.rows));
  const int64_t stride = routes.outputs, rows = rows_of(x);
  ops::Tensor logits{nullptr, ops::DType::kF32, x.rows, stride, stride};
  logits.data = device_pointer<void>(scratch(logits_, rows * stride * 4, "router logits"));
  auto* ids = device_pointer<int>(scratch(ids_, rows * picks * 4, "chosen experts"));
  auto* weights = device_pointer<float>(scratch(weights_, rows * picks * 4, "weights of experts"));
  ops::Tensor share{nullptr, ops::DType::kBf16, x.rows, x.cols, x.cols}, inner;
  if (gate_up != nullptr) {
    share.data = device_pointer<void>(scratch(share_, rows * x.cols * 2, "output of the shared expert"));
  }
  gemm::RouteArgs route = {};
  route.logits = logits.f32();
  route.logits_stride = stride;
  route.tokens = static_cast<int>(x.rows);
  route.experts = static_cast<int>(router.rows());
  route.top_k = static_cast<int>(params.top_k);
  route.renormalize = params.renormalize ? 1 : 0;
  route.slices = static_cast<int>(slices);
  route.first_slice = static_cast<int>(experts.count());
  route.first_here = static_cast<int>(params.first_expert);
  route.here = static_cast<int>(experts.count());
  route.gate = gate != nullptr ? static_cast<int>(router.rows()) : -1;
  route.width = static_cast<int>(picks);
  route.ids = ids;
  route.weights = weights;
  const bool routed = !planning_ && routed_choice(route, x, router, gate);
  if (joined || (joins && planning_)) {
    inner = activated_rows(x, *gate_up);
    Together all = routes;
    all.add(*gate_up, 0);
    product("router, shared expert", x, all.matrix, all.formats, all.outputs, all.bytes, logits,
            {gate_up->matrix().tiles, inner});
  }
  if ((!joined && !routed) || planning_) {
    product("router", x, routes.matrix, routes.formats, routes.outputs, routes.bytes, logits);
    if (gate_up != nullptr) inner = activated(x, *gate_up);
  }
  const bool beside = down != nullptr && chooses_beside(*down, planning_ ? 1 : x.rows);
  if (beside) choosing_product("choice, shared expert", route, inner, *down, share);
  if (!beside || planning_) {
    if (!planning_ && !routed &&
        !left_out("choice of experts",
                  [&] {
                    return ops::Cost{x.rows * stride * 4.0, 0};
                  },
                  {.kind = plan::step::Kind::kChoice, .rows = x.rows, .outputs = stride})) {
      launch(card_->stream, (*step_)[kRouteRows], {static_cast<unsigned>(gemm::route_grid(route.tokens))}, overlap_,
             route);
    }
    if (down != nullptr) linear(inner, *down, share);
  }
  routed_experts(params, x, ids, weights, out);
  if (down == nullptr || planning_ || x.rows == 0) return;
  waiting_share_ = {{bf16(share), share.stride, gate != nullptr ? logits.f32() + router.rows() : nullptr, stride,
                     bf16_out(out), out.stride, static_cast<int>(out.cols), in_pieces(share) && in_pieces(out) ? 1 : 0},
                    x.rows};
}

void CudaBackend::routed_experts(const ops::MoeParams& params, const ops::Tensor& x, const int* ids,
                                 const float* weights, const ops::Tensor& out) {
  const ops::Experts& experts = *params.experts;
  const auto* plain = dynamic_cast<const PlainExperts*>(&experts);
  const int64_t slices = experts.shared_slices(), picks = params.top_k + slices, all_experts = params.router->rows();
  ExpertSet* set = plain != nullptr ? nullptr : &experts_of(static_cast<const CardExperts&>(experts), params.top_k);
  const auto cost = [&] {
    const double here = static_cast<double>(experts.count()) / static_cast<double>(all_experts);
    const double touched = ops::expected_touched_experts(x.rows, params.top_k, all_experts) * here;
    ops::Cost all = ops::experts_cost(x.rows, picks, touched + static_cast<double>(slices), experts.hidden(),
                                      experts.intermediate(), experts.bytes_per_expert());
    all.flops *= (static_cast<double>(params.top_k) * here + static_cast<double>(slices)) / static_cast<double>(picks);
    return all;
  };
  if (plain != nullptr) {
    if (planning_) return plain_experts(*plain, x, ids, weights, picks, out, {});
    return plain_experts(*plain, x, ids, weights, picks, out, cost);
  }
  if (planning_ || left_out("experts", cost,
                            {.kind = plan::step::Kind::kExperts,
                             .rows = x.rows,
                             .all_experts = all_experts,
                             .experts = &set->kernels->problem()})) {
    return;
  }
  const ExpertLayer layer(*set->kernels, *set->workspace, static_cast<const CardExperts&>(experts).weights());
  for (int64_t first = 0; first < x.rows; first += set->workspace->max_tokens()) {
    const int64_t count = std::min(set->workspace->max_tokens(), x.rows - first);
    LayerInputs inputs = {address_of(bf16(x) + first * x.stride), address_of(ids + first * picks),
                          address_of(weights + first * picks), address_of(bf16(out) + first * out.stride), count};
    if (count == x.rows) inputs.left = &waiting_sum_.rows;
    if (card_->device.only_counts()) set->kernels->plan_for(count);
    layer.run(card_->stream, inputs);
    waiting_sum_.kernels = set->kernels->context().kernels;
    waiting_sum_.tokens = count;
  }
}

void CudaBackend::launch_share(const WaitingShare& share) {
  const step::SharedArgs& args = share.args;
  if (left_out("shared expert's share",
               [&] {
                 return ops::Cost{share.rows * args.columns * 6.0, 0};
               },
               {.rows = share.rows})) {
    return;
  }
  launch(card_->stream, (*step_)[kShared], columns_grid(share.rows, args.columns), overlap_, args);
}

}  // namespace fourfold::cuda
