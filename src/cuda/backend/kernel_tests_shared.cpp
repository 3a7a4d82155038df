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

// A product that takes a router along, and the norm and choice behind it.
void KernelTests::routing_product(const RowsWay& way, int route) {
  Random random(20281);
  const Stream& stream = of_.card_->stream;
  constexpr int kTopK = 5;
  constexpr float kEps = 1e-6f;
  const int64_t columns = columns_of(way), hidden = int64_t{kSms * way.ctas} * gemm::kTileRows;
  // So many that a thread has all of its columns, the gate last.
  const int64_t experts =
      std::min<int64_t>(int64_t{routing_tile(way, route).threads()} * (route - 1) + 67, gemm::kMostRouted);
  const auto weight = weight_of(random, way.formats, hidden, columns);
  const auto router = test_weight(random, gemm::Weights::kBf16, false, experts, hidden),
             gate = test_weight(random, gemm::Weights::kBf16, false, 1, hidden);
  const std::vector<float> dense = dequantised(weight->source);
  std::vector<float> rows = dequantised(router->source);
  const std::vector<float> last = dequantised(gate->source);
  rows.insert(rows.end(), last.begin(), last.end());
  std::vector<float> norm_weight = bf16_normals(random, hidden);
  const SmallBlocks small(*of_.card_, kRowBlock);
  int64_t most = gemm::kMostRoutedRows;
  const gemm::RowsTile tile = routing_tile(way, route);
  const auto units = gemm::units_of(static_cast<int>(columns)), tiles = static_cast<int>(hidden) / gemm::kTileRows;
  while (most > 1 && !routes_at_once(of_.arch_, tile, units, most, tiles, kSms)) --most;
  for (const int64_t tokens : {int64_t{1}, most}) {
    CudaBackend& backend = on(&way);
    const Stack stack(of_.card_, std::span(&weight->source, 1)), routes(of_.card_, std::span(&router->source, 1)),
        gates(of_.card_, std::span(&gate->source, 1));
    const ops::Vector norm = backend.load_vector(norm_weight);
    backend.add_router(stack, routes, &gates, norm);
    const std::vector<float> x = bf16_normals(random, tokens * columns), before = bf16_normals(random, tokens * hidden);
    const TestRows in = rows_of(backend, stream, x, columns), residual = rows_of(backend, stream, before, hidden, true),
                   delta = empty_rows(backend, stream, tokens, hidden),
                   normed = empty_rows(backend, stream, tokens, hidden);
    const auto picks = static_cast<uint64_t>(tokens * (kTopK + 1));
    cuda::Buffer ids(of_.card_->device, picks * 4, "self-test"), weights(of_.card_->device, picks * 4, "self-test");
    ids.fill(stream, 0xff);
    weights.fill(stream, 0xff);
    backend.begin_step({});
    backend.normed_ = {residual.tensor.f32(), hidden, tokens};
    launched_.clear();
    const bool taken = backend.routed_product("", in.tensor, stack, delta.tensor);
    FF_ASSERT(taken);
    const auto sums = backend.routing_sums_.download<int64_t>(stream, backend.routing_sums_.bytes() / 8);
    const auto all = static_cast<size_t>(experts + 1), width = static_cast<size_t>(hidden);
    const auto stride = static_cast<size_t>(gemm::routing_stride(static_cast<int>(all)));
    std::vector<float> want, bound, logits, logits_want, logits_bound, residual_want, residual_bound, normed_want,
        normed_bound, weights_want, weights_bound;
    std::vector<int> ids_want;
    const std::vector<float> y = read(backend, delta.tensor);
    for (size_t t = 0; t < static_cast<size_t>(tokens); ++t) {
      double squares = 0;
      std::vector<double> h(width);
      for (size_t r = 0; r < width; ++r) {
        const Dot d = dot(&dense[r * static_cast<size_t>(columns)], &x[t * static_cast<size_t>(columns)], columns);
        want.push_back(d.value);
        bound.push_back(2 * kDotError * d.magnitude + kRoundError * std::fabs(d.value) + 1e-30f);
        const float sum = before[t * width + r] + y[t * width + r];
        residual_want.push_back(sum);
        residual_bound.push_back(1e-6f * std::fabs(sum) + 1e-30f);
        h[r] = static_cast<double>(sum) * static_cast<double>(norm_weight[r]);
        squares += static_cast<double>(sum) * static_cast<double>(sum);
      }
      const double inverse = 1 / std::sqrt(squares / static_cast<double>(hidden) + static_cast<double>(kEps));
      std::vector<float> chosen_of(all);
      for (size_t r = 0; r < all; ++r) {
        int64_t fixed = 0;
        for (size_t c = 0; c < gemm::kRoutingCopies; ++c) fixed += sums[(t * gemm::kRoutingCopies + c) * stride + r];
        double logit = 0, magnitude = 0;
        for (size_t k = 0; k < width; ++k) {
          const double term = static_cast<double>(rows[r * width + k]) * h[k];
          logit += term;
          magnitude += std::fabs(term);
        }
        const auto got = static_cast<float>(std::ldexp(static_cast<double>(fixed), -gemm::kRoutingBits));
        logits.push_back(got);
        logits_want.push_back(static_cast<float>(logit));
        logits_bound.push_back(static_cast<float>(2e-6 * magnitude + 1e-7));
        chosen_of[r] = static_cast<float>(static_cast<double>(got) * inverse);
      }
      for (size_t r = 0; r < width; ++r) {
        normed_want.push_back(static_cast<float>(h[r] * inverse));
        normed_bound.push_back(kRoundError * std::fabs(normed_want.back()) + 1e-30f);
      }
      std::vector<int> best(kTopK);
      std::vector<float> shares(kTopK);
      cpu::select_experts(chosen_of.data(), static_cast<int>(experts), kTopK, true, best.data(), shares.data());
      ids_want.insert(ids_want.end(), best.begin(), best.end());
      ids_want.push_back(static_cast<int>(experts));
      weights_want.insert(weights_want.end(), shares.begin(), shares.end());
      weights_want.push_back(1 / (1 + std::exp(-chosen_of.back())));
    }
    weights_bound.assign(weights_want.size(), 1e-4f);
    std::string wrong = compare_each(y, want, bound, hidden);
    if (wrong.empty()) wrong = compare_each(logits, logits_want, logits_bound, static_cast<int64_t>(all));
    note(wrong);

    backend.add_rms_norm(residual.tensor, delta.tensor, norm, kEps, normed.tensor);
    gemm::RouteArgs choice = {};
    choice.tokens = static_cast<int>(tokens);
    choice.experts = choice.here = choice.first_slice = choice.gate = static_cast<int>(experts);
    choice.top_k = kTopK;
    choice.renormalize = choice.slices = 1;
    choice.width = kTopK + 1;
    choice.ids = ids.as<int>();
    choice.weights = weights.as<float>();
    const bool chosen = backend.routed_choice(choice, normed.tensor, routes, &gates);
    FF_ASSERT(chosen);
    wrong = compare_each(read(backend, residual.tensor), residual_want, residual_bound, hidden);
    if (wrong.empty()) wrong = compare_each(read(backend, normed.tensor), normed_want, normed_bound, hidden);
    // Logits are so far apart that the norm's last bit does not change their order, or they are equal.
    if (wrong.empty() && ids.download<int>(stream, picks) != ids_want) {
      wrong = "other experts than those with the largest logits";
    }
    if (wrong.empty())
      wrong = compare_each(weights.download<float>(stream, picks), weights_want, weights_bound, kTopK + 1);
    const auto after = backend.routing_sums_.download<int64_t>(stream, backend.routing_sums_.bytes() / 8);
    if (wrong.empty() && std::any_of(after.begin(), after.end(), [](int64_t sum) { return sum != 0; })) {
      wrong = "sums that are not 0 afterwards";
    }
    note(wrong);
  }
}

}  // namespace fourfold::cuda
