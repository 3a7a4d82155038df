// Mixture of experts: routing, grouping of tokens by expert, and the weighted sum. A token's experts are always added
// in ascending order, the shared expert last, whatever thread computed them.
#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "base/math.h"
#include "cpu/gemm/products.h"
#include "cpu/host/routing.h"

namespace fourfold::cpu::gemm {
namespace {

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

}  // namespace

void Products::route(const ops::MoeParams& params, const float* logits, int64_t stride, int64_t tokens) {
  const int64_t k = params.top_k;
  const int64_t all = params.router->rows(), experts = params.experts->count();
  const auto entries = static_cast<size_t>(tokens * k);
  chosen_.resize(entries);
  chosen_weights_.resize(entries);
  const auto select = [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      select_experts(logits + t * stride, all, k, params.renormalize, chosen_.data() + t * k,
                     chosen_weights_.data() + t * k);
    }
  };
  if (tokens * all < 4096) {
    select(0, tokens);
  } else {
    pool_.parallel_for(tokens, 8, select);
  }

  // Counting sort by expert, stable in tokens; -1: an expert that is not here.
  cursor_.assign(static_cast<size_t>(experts), 0);
  const auto first = static_cast<int32_t>(params.first_expert);
  for (int32_t& e : chosen_) {
    e = e >= first && e < first + experts ? e - first : -1;
    if (e >= 0) ++cursor_[static_cast<size_t>(e)];
  }
  Routing& r = routing_;
  r.experts.clear();
  r.begin.clear();
  r.token.resize(entries);
  r.weight.resize(entries);
  r.slots.resize(entries);
  int64_t at = 0;
  for (int64_t e = 0; e < experts; ++e) {
    int64_t& count = cursor_[static_cast<size_t>(e)];
    if (count == 0) continue;
    r.experts.push_back(static_cast<int32_t>(e));
    r.begin.push_back(at);
    at += count;
    count = r.begin.back();
  }
  r.begin.push_back(at);
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t i = 0; i < k; ++i) {
      const auto from = static_cast<size_t>(t * k + i);
      if (chosen_[from] < 0) {
        r.slots[from] = -1;
        continue;
      }
      const int64_t slot = cursor_[static_cast<size_t>(chosen_[from])]++;
      r.token[static_cast<size_t>(slot)] = static_cast<int32_t>(t);
      r.weight[static_cast<size_t>(slot)] = chosen_weights_[from];
      r.slots[from] = static_cast<int32_t>(slot);
    }
    // Slots grow with the expert.
    std::sort(r.slots.begin() + t * k, r.slots.begin() + (t + 1) * k);
  }
}

// Columns [first, first + columns) of a token's weighted sum.
void Products::add_experts(const ExpertOutputs& outputs, int64_t top_k, int64_t token, int64_t first, int64_t columns,
                           float* to) const {
  const int64_t whole = columns / kPanelRows * kPanelRows;
  std::fill(to, to + columns, 0.0f);
  const auto add = [&](float weight, const float* from) {
    kernels_.axpy(weight, from, to, whole);
    for (int64_t i = whole; i < columns; ++i) to[i] += weight * from[i];
  };
  for (int64_t i = 0; i < top_k; ++i) {
    const int64_t slot = routing_.slots[static_cast<size_t>(token * top_k + i)];
    if (slot < 0) continue;
    add(routing_.weight[static_cast<size_t>(slot)], outputs.routed + slot * outputs.stride + first);
  }
  if (outputs.shared != nullptr) {
    const ops::Tensor& gates = outputs.shared_gates;
    add(gates.data != nullptr ? sigmoid(*gates.f32(token)) : 1.0f, outputs.shared + token * outputs.stride + first);
  }
}

void Products::moe(const ops::MoeParams& params, const ops::Tensor& x, const ops::Tensor& out) {
  const auto& experts = static_cast<const PackedExperts&>(*params.experts);
  FF_ASSERT(x.cols == experts.hidden() && out.cols == experts.hidden() && x.rows == out.rows);
  FF_ASSERT(params.first_expert >= 0 && params.first_expert + experts.count() <= params.router->rows());
  FF_ASSERT(params.router->columns() == x.cols && params.top_k >= 1 && params.top_k <= params.router->rows());
  const RowWays& ways = step_rows_.of(x.rows);
  const auto pass_tokens = static_cast<size_t>(std::max<int64_t>(1, pass_entries_ / params.top_k));
  const auto run = [&](Rows rows, bool few) {
    for (size_t begin = 0; begin < rows.size(); begin += pass_tokens) {
      const Rows pass = rows.subspan(begin, std::min(pass_tokens, rows.size() - begin));
      moe_pass(params, {x, pass}, few, {out, pass});
    }
  };
  // Experts with input scales of their own need one quantised copy of a token for each: only one way has it.
  run(ways.few, !nvfp4_activations_);
  run(ways.many, false);
  for (const int32_t row : ways.none) std::fill_n(out.f32(row), out.cols, 0.0f);
}

void Products::moe_pass(const ops::MoeParams& params, const Input& x, bool few, const Input& out) {
  if (!few) return moe_grouped(params, x, false, out);
  // Streaming is the faster way as long as an expert meets one or two tokens. The other one has its bits where weights
  // are NVFP4 and there is a twin.
  const auto& experts = static_cast<const PackedExperts&>(*params.experts);
  const bool light = x.size() <= kernels_.gemv_limit || x.size() * params.top_k <= params.router->rows();
  if (light || twin_ == nullptr || !experts.all_nvfp4()) return moe_streaming(params, x, out);
  moe_grouped(params, x, true, out);
}

}  // namespace fourfold::cpu::gemm
