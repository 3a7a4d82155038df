// Self-tests of what layers with a shared expert are made of, and of the router's choice.
#include <algorithm>
#include <cmath>

#include "base/random.h"
#include "cpu/host/routing.h"
#include "cuda/backend/kernel_test_data.h"
#include "cuda/backend/kernel_tests.h"
#include "cuda/backend/tensors.h"
#include "cuda/moe/reference.h"

namespace fourfold::cuda {

// Logits of some rows on the card, and what is to be chosen of them.
struct KernelTests::TestRoute {
  static constexpr int kExperts = 67, kTopK = 5;
  std::vector<float> logits;
  TestRows in;
  cuda::Buffer ids, weights;
  gemm::RouteArgs args = {};

  TestRoute(const KernelTests& tests, CudaBackend& backend, Random& random, int tokens)
      : logits(bf16_normals(random, int64_t{tokens} * kExperts, 2)),
        in(rows_of(backend, tests.of_.card_->stream, logits, kExperts, true)) {
    const auto bytes = static_cast<uint64_t>(tokens * kTopK) * 4;
    for (cuda::Buffer* buffer : {&ids, &weights}) {
      *buffer = cuda::Buffer(tests.of_.card_->device, bytes, "self-test");
      buffer->fill(tests.of_.card_->stream, 0xff);
    }
    args.logits = in.tensor.f32();
    args.logits_stride = kExperts;
    args.tokens = tokens;
    args.experts = args.here = kExperts;
    args.top_k = args.width = kTopK;
    args.renormalize = 1;
    args.gate = -1;
    args.ids = ids.as<int>();
    args.weights = weights.as<float>();
  }

  std::string wrong(const Stream& stream) const {
    const auto count = static_cast<size_t>(args.tokens * kTopK);
    const std::vector<int> got = ids.download<int>(stream, count);
    const std::vector<float> got_weights = weights.download<float>(stream, count);
    std::vector<int> want(count);
    std::vector<float> want_weights(count), bound(count, 1e-5f);
    for (size_t t = 0; t < static_cast<size_t>(args.tokens); ++t) {
      cpu::select_experts(&logits[t * kExperts], kExperts, kTopK, true, &want[t * kTopK], &want_weights[t * kTopK]);
    }
    // Equal logits have equal weights, and the lower expert comes first.
    if (got != want) return "other experts than those with the largest logits";
    return compare_each(got_weights, want_weights, bound, kTopK);
  }
};

void KernelTests::routes() {
  Random random(20263);
  const Stream& stream = of_.card_->stream;
  CudaBackend& backend = on();
  const TestRoute route(*this, backend, random, 9);
  launched_.clear();
  launch(stream, (*backend.step_)[kRouteRows], {static_cast<unsigned>(gemm::route_grid(route.args.tokens))},
         backend.overlap_, route.args);
  note(route.wrong(stream));
}

namespace {

constexpr uint64_t kRowBlock = uint64_t{512} << 10;  // 16 rows of the most columns in bf16

// Of a way's formats, the first.
std::unique_ptr<TestWeight> weight_of(Random& random, int formats, int64_t rows, int64_t columns) {
  for (const gemm::Weights format : {gemm::Weights::kNvfp4, gemm::Weights::kFp8}) {
    if ((formats >> static_cast<int>(format) & 1) != 0) {
      return test_weight(random, format, (formats & gemm::kCells) != 0, rows, columns);
    }
  }
  return test_weight(random, gemm::Weights::kBf16, false, rows, columns);
}

// Columns so many that every warp's ring goes round once, and a part of a step is left.
int64_t columns_of(const RowsWay& way) {
  int64_t units = 0;
  for (const gemm::Weights format : {gemm::Weights::kBf16, gemm::Weights::kFp8, gemm::Weights::kNvfp4}) {
    if ((way.formats >> static_cast<int>(format) & 1) == 0) continue;
    units = std::max(units, int64_t{way.strip_warps} * (way.slots + 1) * gemm::step_units(format) + 1);
  }
  return 64 * units + 16;
}

}  // namespace

// Gate and up of an MLP behind another matrix, as a router is, and alone.
void KernelTests::gated_products(const RowsWay& way) {
  Random random(20274);
  const Stream& stream = of_.card_->stream;
  constexpr int64_t kRows = 21, kWidth = 37, kMost = 70;
  const int64_t columns = columns_of(way);
  const auto first = weight_of(random, way.formats, kRows, columns);
  // About 1, so that the activation is neither 0 nor its argument.
  const auto gate = weight_of(random, way.formats, kWidth, columns),
             up = weight_of(random, way.formats, kWidth, columns);
  std::vector<float> gates = dequantised(gate->source);
  double squares = 0;
  for (const float g : gates) squares += static_cast<double>(g) * static_cast<double>(g);
  const auto scale = static_cast<float>(std::sqrt(static_cast<double>(kWidth) / (squares + 1e-30)));
  gate->source.tensor_scale *= scale;
  for (float& g : gate->grid) g *= scale;
  gates = dequantised(gate->source);
  const std::vector<float> dense = dequantised(first->source), ups = dequantised(up->source);
  const std::vector<float> all = bf16_normals(random, kMost * columns);
  const SmallBlocks small(*of_.card_, kRowBlock);
  // As many rows as every kernel is for, those of few items by clusters last.
  for (const auto& [tokens, by_clusters] :
       {std::pair{int64_t{1}, false}, {5, false}, {12, false}, {20, false}, {kMost, false}, {33, true}}) {
    if (by_clusters && !wide_by_wgmma(of_.arch_, way.formats)) continue;
    CudaBackend& backend = on(&way, 256, by_clusters);
    const bool behind = tokens <= kMostRows;
    const Stack head(of_.card_, std::span(&first->source, 1)), pair(of_.card_, gate->source, up->source);
    gemm::Matrix matrix = pair.matrix();
    const int tiles = matrix.tiles;
    if (behind) {
      matrix = head.matrix();
      gemm::Part part = pair.matrix().parts[0];
      part.first_tile += matrix.tiles;
      matrix.parts[matrix.count++] = part;
      matrix.tiles += tiles;
    }
    const std::vector<float> x(all.begin(), all.begin() + tokens * columns);
    const TestRows in = rows_of(backend, stream, x, columns), out = empty_rows(backend, stream, tokens, kRows, true),
                   inner = empty_rows(backend, stream, tokens, kWidth);
    backend.begin_step({});
    launched_.clear();
    backend.product("", in.tensor, matrix, way.formats, kRows + 2 * kWidth, 0, behind ? out.tensor : inner.tensor,
                    {tiles, inner.tensor});
    std::vector<float> want, bound, inner_want, inner_bound;
    for (int64_t t = 0; t < tokens; ++t) {
      const float* row = &x[static_cast<size_t>(t * columns)];
      for (int64_t r = 0; r < kRows; ++r) {
        const Dot d = dot(&dense[static_cast<size_t>(r * columns)], row, columns);
        want.push_back(d.value);
        bound.push_back(2 * kDotError * d.magnitude + 1e-30f);
      }
      for (int64_t r = 0; r < kWidth; ++r) {
        const Dot g = dot(&gates[static_cast<size_t>(r * columns)], row, columns),
                  u = dot(&ups[static_cast<size_t>(r * columns)], row, columns);
        const Activated a = activate(plan::moe::Activation::kSwiGlu, 0, g.value, 2 * kDotError * g.magnitude, u.value,
                                     2 * kDotError * u.magnitude);
        inner_want.push_back(a.value);
        inner_bound.push_back(a.error + kRoundError * std::fabs(a.value) + 1e-30f);
      }
    }
    std::string wrong = compare_each(read(backend, inner.tensor), inner_want, inner_bound, kWidth);
    if (wrong.empty() && behind) wrong = compare_each(read(backend, out.tensor), want, bound, kRows);
    note(wrong);
  }
}

// A product beside the router's choice.
void KernelTests::choosing_product(const RowsWay& way) {
  Random random(20272);
  const Stream& stream = of_.card_->stream;
  constexpr int64_t kRows = 85;
  const int64_t columns = columns_of(way);
  const auto weight = weight_of(random, way.formats, kRows, columns);
  const std::vector<float> dense = dequantised(weight->source);
  const SmallBlocks small(*of_.card_, kRowBlock);
  for (const int64_t tokens : {1, kFewRows, kMostRows}) {
    CudaBackend& backend = on(&way);
    const Stack stack(of_.card_, std::span(&weight->source, 1));
    const std::vector<float> x = bf16_normals(random, tokens * columns);
    const TestRows in = rows_of(backend, stream, x, columns), out = empty_rows(backend, stream, tokens, kRows);
    const TestRoute route(*this, backend, random, static_cast<int>(tokens));
    backend.begin_step({});
    launched_.clear();
    backend.choosing_product("", route.args, in.tensor, stack, out.tensor);
    std::vector<float> want, bound;
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t r = 0; r < kRows; ++r) {
        const Dot d = dot(&dense[static_cast<size_t>(r * columns)], &x[static_cast<size_t>(t * columns)], columns);
        want.push_back(d.value);
        bound.push_back(2 * kDotError * d.magnitude + kRoundError * std::fabs(d.value) + 1e-30f);
      }
    }
    std::string wrong = compare_each(read(backend, out.tensor), want, bound, kRows);
    if (wrong.empty()) wrong = route.wrong(stream);
    note(wrong);
  }
}

}  // namespace fourfold::cuda
