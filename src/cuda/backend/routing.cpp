// A router's logits that come with the product in front of it (kernels/gemm/routing.h).
#include "base/check.h"
#include "base/math.h"
#include "cuda/backend/cuda_backend.h"
#include "cuda/backend/op_timer.h"
#include "cuda/backend/tensors.h"

namespace fourfold::cuda {
namespace {

constexpr int kBf16Alone = 1 << static_cast<int>(gemm::Weights::kBf16);

}  // namespace

void CudaBackend::expect_routing(const ops::Matrix& output, const ops::Vector& norm, const ops::MoeParams& params) {
  if (!options_.wide || params.shared_gate_up != nullptr) return;
  add_router(static_cast<const Stack&>(output), static_cast<const Stack&>(*params.router),
             static_cast<const Stack*>(params.shared_gate), norm);
}

void CudaBackend::add_router(const Stack& output, const Stack& router, const Stack* gate, const ops::Vector& norm) {
  const int64_t hidden = output.rows();
  if (router.formats() != kBf16Alone || (gate != nullptr && gate->formats() != kBf16Alone)) return;
  if (output.paired() || router.columns() != hidden || norm.count != hidden || router.matrix().count != 1) return;
  for (int i = 0; i < output.matrix().count; ++i) {  // a row tile has 16 columns of h
    const gemm::Part& part = output.matrix().parts[i];
    if (part.first_row != part.first_tile * gemm::kTileRows) return;
  }
  if (gate != nullptr && (gate->rows() != 1 || gate->matrix().count != 1)) return;
  RouterAhead ahead = {.router = &router, .gate = gate, .norm_weight = norm.data()};
  ahead.columns = static_cast<int>(router.rows()) + (gate != nullptr ? 1 : 0);
  if (router.rows() > gemm::kMostRouted || !goes_ahead(output, ahead, 1)) return;
  if (ranks_ != nullptr && !ranks_->may_route(hidden, ahead.columns)) return;
  {
    const MemoryScope scope(card_->device, MemoryKind::kWeightsBf16);
    ahead.weights = cuda::Buffer(card_->device,
                                 static_cast<uint64_t>(output.matrix().tiles) * static_cast<uint64_t>(ahead.columns) *
                                     gemm::kTileRows * sizeof(uint16_t),
                                 "router, beside the product in front of it");
  }
  const auto sums = static_cast<uint64_t>(gemm::kMostRoutedRows * gemm::routing_sums(ahead.columns)) * 8;
  if (routing_sums_.bytes() < sums) {
    routing_sums_ = {};
    routing_sums_ = cuda::Buffer(card_->device, sums, "sums of routers");
    routing_sums_.fill(card_->stream, 0);
  }
  card_->settle_weights();
  pack(ahead, output.matrix().tiles);
  ahead_.insert_or_assign(&output, std::move(ahead));
}

// Whether a launch of the product of so many rows takes the router along: each CTA has a row tile at most.
bool CudaBackend::goes_ahead(const Stack& output, const RouterAhead& ahead, int64_t rows) const {
  const RowsWay way = choosing_way(arch_, output.formats(), output.rows(), output.columns());
  const int route = routing_columns(way, ahead.columns);
  return rows <= gemm::kMostRoutedRows && route > 0 &&
         routes_at_once(arch_, routing_tile(way, route), output.matrix().units, rows, output.matrix().tiles, sms_) &&
         routing_right(arch_, way, route);
}

const std::vector<Kernel>& CudaBackend::routing_kernels(const RowsWay& way, int route) {
  const std::vector<Kernel>*& found = routing_[{way, route}];
  if (found == nullptr) found = &loaded(routing_source(arch_, way, route));
  return *found;
}

const std::vector<Kernel>& CudaBackend::routed_kernels() {
  if (routed_kernels_ == nullptr) routed_kernels_ = &loaded(routed_source());
  return *routed_kernels_;
}

void CudaBackend::pack(const RouterAhead& ahead, int tiles) {
  if (card_->device.only_counts()) return;
  const Kernel& kernel = loaded(step_source()).at(kPackRouting);
  int first = 0;
  for (const Stack* stack : {ahead.router, ahead.gate}) {
    if (stack == nullptr) continue;
    const gemm::RoutingPackArgs args = {stack->matrix().parts[0].weights,
                                        static_cast<int>(stack->rows()),
                                        stack->matrix().units,
                                        first,
                                        ahead.columns,
                                        tiles,
                                        ahead.weights.as<uint16_t>()};
    first += args.rows;
    constexpr int kWarps = gemm::kRoutingPackThreads / 32;
    launch(card_->stream, kernel, {static_cast<unsigned>(ceil_div(tiles, kWarps))}, Overlap::kNone, args);
  }
  card_->stream.synchronize();  // products read it before they wait for anything
}

bool CudaBackend::routed_product(std::string_view name, const ops::Tensor& x, const Stack& output,
                                 const ops::Tensor& out) {
  const auto found = ahead_.find(&output);
  if (found == ahead_.end()) return false;
  const RouterAhead& ahead = found->second;
  const RowsWay way = choosing_way(arch_, output.formats(), output.rows(), output.columns());
  const gemm::Matrix& matrix = output.matrix();
  if (planning_) {
    if (goes_ahead(output, ahead, 1)) {
      routing_kernels(way, routing_columns(way, ahead.columns));
      routed_kernels();
    }
    if (ranks_ != nullptr) scratch(zeros_, output.rows() * 4, "zeros");
    return false;  // there may be more rows, too
  }
  if (is_float(out) || normed_.rows != x.rows || !goes_ahead(output, ahead, x.rows)) return false;
  if (ranks_ != nullptr && !ranks_->routes(x.rows, output.rows(), ahead.columns)) return false;
  settle_waiting();
  drop_routed();
  const int route = routing_columns(way, ahead.columns);
  Kernel kernel = routing_kernels(way, route).front();
  if (timer_ != nullptr) matrices_.insert({output.formats(), output.rows(), output.columns()});
  routed_ = {&ahead, x.rows, normed_.residual, out.data};
  if (left_out(name,
               [&] {
                 ops::Cost cost = ops::linear_cost(x.rows, output.rows(), x.cols, output.bytes());
                 cost += ops::linear_cost(x.rows, ahead.columns, output.rows(), 2 * ahead.columns * output.rows());
                 return cost;
               },
               {.kind = plan::step::Kind::kProduct,
                .rows = x.rows,
                .outputs = output.rows(),
                .inputs = x.cols,
                .routed = ahead.columns})) {
    return true;
  }
  const gemm::RowsTile tile = routing_tile(way, route);
  gemm::RowsArgs args = {};
  args.matrix = matrix;
  args.tokens = static_cast<int>(x.rows);
  args.panel_units = matrix.units;
  args.end = gemm::RowsEnd::kBf16;
  args.x = bf16(x);
  args.x_stride = x.stride;
  args.out = out.data;
  args.out_stride = out.stride;
  args.routing = {ahead.weights.as<uint16_t>(),
                  ahead.norm_weight,
                  normed_.residual == shadowed_ ? shadow_.as<float>() : normed_.residual,
                  normed_.stride,
                  routing_sums_.as<unsigned long long>(),
                  ahead.columns};
  if (ranks_ != nullptr && ranks_->rank() != 0) {  // the residual is in rank 0's logits
    args.routing.residual = device_pointer<float>(scratch(zeros_, output.rows() * 4, "zeros"));
    args.routing.residual_stride = 0;
  }
  kernel.smem_bytes = gemm::rows_map(tile, args.tokens, args.panel_units).total;
  const int grid = gemm::rows_grid(tile, matrix.tiles, sms_, rows_ctas(arch_, tile, matrix.units, args.tokens));
  FF_ASSERT(grid == matrix.tiles);
  launch(card_->stream, kernel, {static_cast<unsigned>(grid)}, overlap_, args);
  return true;
}

bool CudaBackend::waits_for_router(const norm::NormArgs& args, const ops::Tensor& out) const {
  return routed_.of != nullptr && args.delta == routed_.out && args.delta_stride == args.columns &&
         out.rows == routed_.rows && out.stride == out.cols && args.residual_out == routed_.residual &&
         norm::norm_pieces(args.columns) > 0 && args.weight == routed_.of->norm_weight;
}

bool CudaBackend::routed_choice(const gemm::RouteArgs& choice, const ops::Tensor& x, const Stack& router,
                                const Stack* gate) {
  if (routed_.of == nullptr || waiting_.out != x.data || !waits_for_router(waiting_.args, x) ||
      routed_.of->router != &router || routed_.of->gate != gate) {
    drop_routed();
    return false;
  }
  const RouterAhead& ahead = *std::exchange(routed_, {}).of;
  gemm::RoutedArgs args = {choice, waiting_.args, routing_sums_.as<unsigned long long>(), ahead.columns,
                           timer_ != nullptr && timer_->one_operation() ? 1 : 0};
  const bool over_ranks = waiting_.over_ranks;
  waiting_.out = nullptr;
  // The same norms in each step have the residual back in its own place at the end (take_along()).
  if (!over_ranks && x.rows <= kMostNormedRows && args.norm.residual != shadow_.as<float>()) {
    shadowed_ = std::exchange(args.norm.residual_out, shadow_.as<float>());
  } else {
    shadowed_ = nullptr;
  }
  const auto rows = static_cast<double>(x.rows);
  if (!left_out("choice of experts",
                [&] {
                  const double column = over_ranks ? ranks_->column_bytes(x.rows, x.cols) : 12.0;
                  return ops::Cost{
                      rows * (8.0 * gemm::routing_sums(ahead.columns) + column * static_cast<double>(x.cols)), 0};
                },
                {.kind = plan::step::Kind::kChoice,
                 .rows = x.rows,
                 .outputs = ahead.columns,
                 .inputs = x.cols,
                 .norm_in_front = true})) {
    if (over_ranks) {
      meet_ranks(x.cols);  // something may have been prepared since the sum was asked for
      ranks_->reduce_routed(args, x.rows, overlap_);
      return true;
    }
    const int pieces = norm::norm_pieces(args.norm.columns);
    launch(card_->stream,
           routed_kernels()[pieces == 1   ? kRouted1
                            : pieces == 2 ? kRouted2
                                          : kRouted4],
           {static_cast<unsigned>(x.rows)}, overlap_, args);
  }
  return true;
}

// Sums that nobody has chosen by would be part of the next ones.
void CudaBackend::drop_routed() {
  if (std::exchange(routed_, {}).of != nullptr) routing_sums_.fill(card_->stream, 0);
}

}  // namespace fourfold::cuda
