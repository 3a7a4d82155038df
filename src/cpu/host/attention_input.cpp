#include "cpu/host/attention_input.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "cpu/host/parallel.h"

namespace fourfold::cpu {

void AttentionInput::compute_rope(const ops::Batch& batch, const ops::AttentionParams& params) {
  const bool same = rope_theta_ == params.rope_theta && rope_dim_ == params.rotary_dim;
  if (rope_valid_ && same) return;
  const int64_t half = params.rotary_dim / 2;
  float* table = rope_memory_.get<float>(std::max<int64_t>(1, batch.rows() * 2 * half));
  // The frequencies and the angle are rounded to fp32, as where the model was trained; cosine and sine of that angle
  // are then exact.
  if (!same) {
    rope_frequencies_.clear();
    rope_rows_.resize(static_cast<size_t>(kRopeRows * 2 * half));
  }
  for (auto i = static_cast<int64_t>(rope_frequencies_.size()); i < half; ++i) {
    const float exponent = static_cast<float>(2 * i) / static_cast<float>(params.rotary_dim);
    rope_frequencies_.push_back(
        1.0f / static_cast<float>(std::pow(static_cast<double>(params.rope_theta), static_cast<double>(exponent))));
  }
  const auto compute = [&](int64_t position, float* row) {
    for (int64_t i = 0; i < half; ++i) {
      const auto angle = static_cast<double>(static_cast<float>(position) * rope_frequencies_[static_cast<size_t>(i)]);
      row[i] = static_cast<float>(std::cos(angle));
      row[half + i] = static_cast<float>(std::sin(angle));
    }
  };
  if (!same) std::fill(std::begin(rope_positions_), std::end(rope_positions_), -1);
  for (const ops::Sequence& sequence : batch.sequences) {
    float* first = table + sequence.first * 2 * half;
    if (batch.rows() <= kRopeRows) {
      for (int64_t t = 0; t < sequence.count; ++t) {
        const int64_t position = sequence.position + t;
        const auto at = static_cast<size_t>(position % kRopeRows);
        float* kept = rope_rows_.data() + static_cast<int64_t>(at) * 2 * half;
        if (rope_positions_[at] != position) compute(position, kept);
        rope_positions_[at] = position;
        std::copy_n(kept, 2 * half, first + t * 2 * half);
      }
      continue;
    }
    for_each(pool_, sequence.count, 40.0 * static_cast<double>(half), [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) compute(sequence.position + t, first + t * 2 * half);
    });
  }
  rope_ = table;
  rope_valid_ = true;
  rope_theta_ = params.rope_theta;
  rope_dim_ = params.rotary_dim;
}

void AttentionInput::reserve(int64_t rows, int64_t head_dim) {
  rope_valid_ = false;
  rope_memory_.reserve<float>(rows * head_dim);
  rope_frequencies_.reserve(static_cast<size_t>(head_dim / 2));
  rope_rows_.reserve(static_cast<size_t>(kRopeRows * head_dim));
}

void AttentionInput::prepare(const ops::Batch& batch, const ops::AttentionParams& params, const ops::Tensor& q,
                             const ops::Tensor& k, const ops::Tensor& v, HostKvCache& cache, int64_t layer) {
  const ops::KvCacheShape& shape = cache.shape();
  const int64_t dim = params.head_dim;
  const int64_t q_stride = params.gated ? 2 * dim : dim;
  // Heads of queries: none where only keys and values are kept.
  const int64_t queries = q.data == nullptr ? 0 : params.heads;
  FF_ASSERT(queries == 0 || (q.rows == batch.size() && q.cols == queries * q_stride));
  FF_ASSERT(k.rows == batch.size() && v.rows == k.rows && k.cols == params.kv_heads * dim && v.cols == k.cols);
  FF_ASSERT(shape.kv_heads == params.kv_heads && shape.head_dim == dim && layer >= 0 && layer < shape.layers);
  FF_ASSERT(params.kv_heads > 0 && params.heads % params.kv_heads == 0);
  FF_ASSERT(params.rotary_dim % 2 == 0 && params.rotary_dim <= dim);
  FF_ASSERT(params.q_norm == nullptr || params.q_norm->count == dim);
  FF_ASSERT(params.k_norm == nullptr || params.k_norm->count == dim);
  compute_rope(batch, params);
  const int64_t half = params.rotary_dim / 2;
  const float* rope = rope_;
  const auto prepare_head = [&](float* x, const ops::Vector* weight, const float* factors) {
    if (weight != nullptr) rows_.rms_norm(x, weight->data(), params.norm_eps, dim, x);
    for (int64_t i = 0; i < half; ++i) {
      const float low = x[i];
      const float high = x[i + half];
      x[i] = low * factors[i] - high * factors[half + i];
      x[i + half] = high * factors[i] + low * factors[half + i];
    }
  };
  for (const ops::Sequence& sequence : batch.sequences) {
    const int64_t last_page = (sequence.position + sequence.count - 1) / shape.page_size;
    FF_ASSERT(last_page < static_cast<int64_t>(sequence.pages.size()));
    // Heads on their own, so that one token occupies all threads, too.
    const int64_t heads = queries + params.kv_heads;
    for_each(pool_, sequence.count * heads, static_cast<double>(dim), [&](int64_t from, int64_t to) {
      for (int64_t item = from; item < to; ++item) {
        const int64_t t = item / heads;
        const int64_t row = sequence.first + t;
        const float* factors = rope + row * 2 * half;
        if (item % heads < queries) {
          prepare_head(q.f32(row) + item % heads * q_stride, params.q_norm, factors);
          continue;
        }
        const int64_t h = item % heads - queries;
        const int64_t position = sequence.position + t;
        const int64_t page = sequence.pages[static_cast<size_t>(position / shape.page_size)];
        FF_ASSERT(page >= 0 && page < shape.pages);
        float* key = k.f32(row) + h * dim;
        prepare_head(key, params.k_norm, factors);
        rows_.keep(key, dim, cache.at(layer, page, h, 0, position % shape.page_size));
        rows_.keep(v.f32(row) + h * dim, dim, cache.at(layer, page, h, 1, position % shape.page_size));
      }
    });
  }
}

}  // namespace fourfold::cpu
