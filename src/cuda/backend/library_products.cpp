#include "cuda/backend/library_products.h"

#include <utility>

#include "base/check.h"
#include "base/console.h"
#include "cuda/backend/cuda_backend.h"
#include "cuda/backend/tensors.h"
#include "kernels/gemm/unpack_args.h"

namespace fourfold::cuda {
namespace {

using Functions = jit::CublasLt::Functions;

// Lengths of prompts differ; beyond so many all are asked for anew.
constexpr size_t kMostWays = 4096;
constexpr int kUnpackCtas = 8;  // per SM

const jit::CublasLt& found() {
  std::string why;
  const jit::CublasLt* library = jit::CublasLt::find(&why);
  if (library == nullptr) {
    fail(
        "products by cuBLASLt: there is none ({}); wanted libcublasLt of CUDA 12 or 13, in the toolkit or from PyPI "
        "(nvidia-cublas)",
        why);
  }
  return *library;
}

}  // namespace

LibraryProducts::LibraryProducts(const Device& device) : library_(found()) {
  const Functions& call = library_.call();
  device.make_current();
  try {
    library_.check(call.create(&handle_), "cublasLtCreate");
    library_.check(call.desc_create(&desc_, Functions::kComputeFloat, Functions::kFloat), "cublasLtMatmulDescCreate");
    const int transpose = Functions::kTranspose;
    library_.check(call.desc_set(desc_, Functions::kTransposeA, &transpose, sizeof(transpose)),
                   "cublasLtMatmulDescSetAttribute");
    library_.check(call.preference_create(&preference_), "cublasLtMatmulPreferenceCreate");
    const auto bytes = static_cast<uint64_t>(kWorkspaceBytes);
    library_.check(call.preference_set(preference_, Functions::kMostWorkspace, &bytes, sizeof(bytes)),
                   "cublasLtMatmulPreferenceSetAttribute");
  } catch (...) {
    close();
    throw;
  }
}

LibraryProducts::~LibraryProducts() { close(); }

void LibraryProducts::close() {
  const Functions& call = library_.call();
  for (auto& [key, way] : ways_) forget(way);
  if (preference_ != nullptr) call.preference_destroy(std::exchange(preference_, nullptr));
  if (desc_ != nullptr) call.desc_destroy(std::exchange(desc_, nullptr));
  if (handle_ != nullptr) call.destroy(std::exchange(handle_, nullptr));
}

void LibraryProducts::forget(Way& way) {
  for (void* layout : {way.weights, way.x, way.out}) {
    if (layout != nullptr) library_.call().layout_destroy(layout);
  }
  way = {};
}

const LibraryProducts::Way* LibraryProducts::way_of(const Product& p) {
  const Key key = {p.outputs, p.inputs, p.rows, p.x_stride, p.out_stride, p.floats};
  auto it = ways_.find(key);
  if (it == ways_.end()) {
    if (ways_.size() == kMostWays) {
      for (auto& [old, way] : ways_) forget(way);
      ways_.clear();
    }
    it = ways_.emplace(key, ask(p)).first;
  }
  return it->second.weights == nullptr ? nullptr : &it->second;
}

// Column-major, as the library has it: out [outputs x rows] = W^T [inputs x outputs]^T times x [inputs x rows].
LibraryProducts::Way LibraryProducts::ask(const Product& p) {
  const Functions& call = library_.call();
  const auto layout = [&](void** to, int type, int64_t rows, int64_t columns, int64_t stride) {
    library_.check(call.layout_create(to, type, static_cast<uint64_t>(rows), static_cast<uint64_t>(columns), stride),
                   "cublasLtMatrixLayoutCreate");
  };
  Way way;
  try {
    layout(&way.weights, Functions::kBf16, p.inputs, p.outputs, p.inputs);
    layout(&way.x, Functions::kBf16, p.inputs, p.rows, p.x_stride);
    layout(&way.out, p.floats ? Functions::kFloat : Functions::kBf16, p.outputs, p.rows, p.out_stride);
    Functions::Heuristic best = {};
    int count = 0;
    const int status =
        call.heuristic(handle_, desc_, way.weights, way.x, way.out, way.out, preference_, 1, &best, &count);
    if (status != Functions::kNotSupported) library_.check(status, "cublasLtMatmulAlgoGetHeuristic");
    if (status == 0 && count > 0 && best.status == 0) {
      way.algorithm = best.algorithm;
      return way;
    }
  } catch (...) {
    forget(way);
    throw;
  }
  forget(way);
  if (!std::exchange(warned_, true)) {
    warn(fmt::format("cuBLASLt has nothing for {} x {} with {} rows; fourfold's own kernels take such products",
                     p.outputs, p.inputs, p.rows));
  }
  return way;
}

void LibraryProducts::multiply(const Stream& stream, const Way& way, const Product& p, DeviceAddress workspace) {
  const float none = 0.0f;
  const auto at = [](DeviceAddress address) { return reinterpret_cast<void*>(static_cast<uintptr_t>(address)); };
  library_.check(library_.call().matmul(handle_, desc_, &p.factor, at(p.weights), way.weights, at(p.x), way.x, &none,
                                        at(p.out), way.out, at(p.out), way.out, &way.algorithm, at(workspace),
                                        static_cast<size_t>(kWorkspaceBytes), stream.handle()),
                 "cublasLtMatmul");
}

// ---- the backend's side

bool CudaBackend::takes_library(const Stack& stack, int64_t rows) const {
  return options_.library_rows > 0 && rows >= options_.library_rows && options_.wide &&
         has_wide(arch_, stack.formats());
}

// Parts that the library can multiply, one after the other through one matrix of bf16; the others as they are
// otherwise.
void CudaBackend::library_product(std::string_view name, const ops::Tensor& x, const Stack& stack,
                                  const ops::Tensor& out) {
  const gemm::Matrix& matrix = stack.matrix();
  if (unpack_ == nullptr) unpack_ = &loaded(unpack_source());
  int64_t most = 0;
  for (int p = 0; p < matrix.count; ++p) most = std::max<int64_t>(most, matrix.parts[p].rows);
  const DeviceAddress weights = scratch(unpacked_, most * matrix.columns * 2, "weights for cuBLASLt"),
                      workspace = scratch(library_space_, LibraryProducts::kWorkspaceBytes, "workspace of cuBLASLt");
  wide_room(stack.formats(), x.rows);
  if (planning_) return;
  settle_waiting();
  const plan::step::Extent extent = {
      .kind = plan::step::Kind::kProduct, .rows = x.rows, .outputs = stack.rows(), .inputs = x.cols};
  if (left_out(
          name, [&] { return ops::linear_cost(x.rows, stack.rows(), x.cols, stack.bytes()); }, extent)) {
    return;
  }
  gemm::Matrix rest = matrix;
  rest.count = rest.tiles = 0;
  for (int p = 0; p < matrix.count; ++p) {
    gemm::Part part = matrix.parts[p];
    const int tiles = gemm::part_tiles(matrix, p);
    const std::optional<float> factor = stack.factor(p);
    bool taken = part.rows >= LibraryProducts::kLeastOutputs && factor.has_value();
    const LibraryProducts::Way* way = nullptr;
    const LibraryProducts::Product product = {
        .weights = weights,
        .outputs = part.rows,
        .inputs = matrix.columns,
        .x = address_of(x.data),
        .x_stride = x.stride,
        .rows = x.rows,
        .factor = factor.value_or(1.0f),
        .out = address_of(out.data) + static_cast<uint64_t>(part.first_row * out.element_bytes()),
        .out_stride = out.stride,
        .floats = is_float(out)};
    if (taken && library_ != nullptr) {  // it is null on a card that only counts
      way = library_->way_of(product);
      taken = way != nullptr;
    }
    if (!taken) {
      part.first_tile = rest.tiles;
      rest.parts[rest.count++] = part;
      rest.tiles += tiles;
      continue;
    }
    const gemm::UnpackArgs args = {part, tiles, matrix.units, matrix.columns, device_pointer<unsigned short>(weights)};
    launch(card_->stream, unpack_->front(), {static_cast<unsigned>(kUnpackCtas * sms_)}, Overlap::kNone, args);
    if (way != nullptr) library_->multiply(card_->stream, *way, product, workspace);
  }
  if (rest.count > 0) {
    const RowsWay way = rows_way(arch_, stack.formats(), stack.rows(), x.cols);
    wide_product(x, rest, stack.formats(), *product_kernels(way).many, out);
  }
}

void CudaBackend::wide_room(int formats, int64_t rows) {
  if (!options_.wide || !wide_by_wgmma(arch_, formats) || (!planning_ && rows <= kFewRows)) return;
  const gemm::WideTile most = {formats, 128, 0};
  const int sms = sms_;
  scratch(wide_partial_,
          std::max<int64_t>(gemm::wide_partial_bytes(most, sms),
                            gemm::middle_partial_bytes(sms * middle_tile(arch_, formats, gemm::kMiddleRows).ctas)),
          "parts of products");
}

void CudaBackend::linear(const ops::Tensor& x, const ops::Matrix& weight, const ops::Tensor& out) {
  if (replaying()) return;
  const auto& stack = static_cast<const Stack&>(weight);
  FF_ASSERT(x.rows == out.rows && x.cols == stack.columns() && out.cols == stack.rows() && aligned(x));
  const std::string name =
      timer_ == nullptr && works_ == nullptr ? "" : fmt::format("product {} x {}", stack.rows(), stack.columns());
  if (takes_library(stack, rows_of(x))) {
    library_product(name, x, stack, out);
    if (!planning_) return;
  }
  if (routed_product(name, x, stack, out)) return;
  product(name, x, stack.matrix(), stack.formats(), stack.rows(), stack.bytes(), out);
}

}  // namespace fourfold::cuda
