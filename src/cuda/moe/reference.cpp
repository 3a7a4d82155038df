#include "cuda/moe/reference.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "base/check.h"
#include "base/threads.h"
#include "kernels/moe/fp4_layout.h"
#include "nvfp4/number.h"
#include "nvfp4/quantize.h"

namespace fourfold::cuda {
namespace {

// What is left of a row after quantisation.
void through_nvfp4(std::vector<float>* row, float input_scale) {
  *row = quantised(*row, input_scale).values();
  for (float& v : *row) v *= input_scale;
}

}  // namespace

std::vector<float> dequantised(const Nvfp4Matrix& m, int64_t rows, int64_t k) {
  std::vector<float> out(static_cast<size_t>(rows * k));
  for (int64_t r = 0; r < rows; ++r) {
    const uint8_t* codes = m.codes + r * m.code_stride;
    const uint8_t* scales = m.scales + r * m.scale_stride;
    float* to = out.data() + r * k;
    for (int64_t i = 0; i < k; ++i) {
      const uint8_t pair = codes[i / 2];
      to[i] = nvfp4::nvfp4_product(i % 2 != 0 ? pair >> 4 : pair & 15, scales[i / 16]);
    }
  }
  return out;
}

// `count` is a multiple of 16: sixteen partial sums, so that the compiler can use vectors.
Dot dot(const float* a, const float* b, int64_t count) {
  float sums[16] = {}, magnitudes[16] = {};
  for (int64_t i = 0; i < count; i += 16) {
    for (int j = 0; j < 16; ++j) {
      const float term = a[i + j] * b[i + j];
      sums[j] += term;
      magnitudes[j] += std::fabs(term);
    }
  }
  Dot d;
  for (int j = 0; j < 16; ++j) {
    d.value += sums[j];
    d.magnitude += magnitudes[j];
  }
  return d;
}

Activated activate(plan::moe::Activation activation, float limit, float gate, float gate_error, float up,
                   float up_error) {
  if (activation == plan::moe::Activation::kRelu2) {
    const float positive = std::max(up, 0.0f);
    return {positive * positive, (2 * positive + up_error) * up_error};
  }
  if (limit > 0) {  // a clamp brings values closer together, never further apart
    gate = std::min(gate, limit);
    up = std::clamp(up, -limit, limit);
  }
  const float silu = gate / (1 + std::exp(-gate));
  // |silu'| is at most 1.1.
  const float silu_error = 1.1f * gate_error;
  return {silu * up, silu_error * (std::fabs(up) + up_error) + std::fabs(silu) * up_error};
}

std::vector<float> Nvfp4Row::values() const {
  std::vector<float> out(codes.size());
  for (size_t i = 0; i < out.size(); ++i) out[i] = nvfp4::nvfp4_product(codes[i], scales[i / 16]);
  return out;
}

Nvfp4Row quantised(std::vector<float> row, float input_scale) {
  for (float& v : row) v = std::isnan(v) ? 0.0f : v;
  std::vector<uint8_t> pairs(row.size() / 2);
  Nvfp4Row out;
  out.scales.resize(row.size() / 16);
  nvfp4::quantize_activations(row, 1.0f / input_scale, pairs, out.scales);
  for (const uint8_t pair : pairs) {
    out.codes.push_back(pair & 15);
    out.codes.push_back(pair >> 4);
  }
  return out;
}

Nvfp4Row read_nvfp4_row(const uint8_t* codes, const uint8_t* scales, int64_t columns) {
  Nvfp4Row row;
  for (int64_t i = 0; i < columns; ++i) {
    const auto block = i / 16;
    const int k = static_cast<int>(i % 16);
    const int64_t place = block / 4 * 4 + moe::group_place(static_cast<int>(block % 4));
    const int nibble = moe::k_nibble(k);
    row.codes.push_back(codes[place * 8 + (k & 4) + nibble / 2] >> (4 * (nibble % 2)) & 15);
    if (k == 0) row.scales.push_back(scales[place]);
  }
  return row;
}

std::string check_quantised(const Nvfp4Row& row, const std::vector<float>& values, const std::vector<float>& errors,
                            float input_scale) {
  // The kernel divides by the scale first, or multiplies with 1 / 6 instead of dividing: a unit or two in the last
  // place.
  constexpr float kUlps = 1e-6f;
  const float global = 1.0f / input_scale;
  for (size_t b = 0; b < row.scales.size(); ++b) {
    float low = 0, high = 0;  // of the block's largest magnitude
    for (size_t i = 16 * b; i < 16 * b + 16; ++i) {
      const float magnitude = std::fabs(values[i]), error = errors[i] + kUlps * magnitude;
      low = std::max(low, magnitude - error);
      high = std::max(high, magnitude + error);
    }
    const auto scale_of = [&](float largest) {
      return nvfp4::float_to_e4m3(std::min(global * largest / nvfp4::kE2m1Max, nvfp4::kE4m3Max));
    };
    const uint8_t code = row.scales[b];
    if (code < scale_of(low) || code > scale_of(high)) {
      return fmt::format("block {}: scale {:#x}, wanted {:#x} to {:#x}", b, code, scale_of(low), scale_of(high));
    }
    const float scale = nvfp4::e4m3_to_float(code);
    for (size_t i = 16 * b; i < 16 * b + 16; ++i) {
      const float error = errors[i] + kUlps * std::fabs(values[i]);
      const auto rounded = [&](float v) {
        return code == 0 ? 0.0f : nvfp4::e2m1_to_float(nvfp4::float_to_e2m1(v * global / scale));
      };
      const float got = nvfp4::e2m1_to_float(row.codes[i]);
      const float least = rounded(values[i] - error), most = rounded(values[i] + error);
      if (!(got >= least && got <= most)) {
        return fmt::format("column {}: {} under scale {}, wanted {} to {}", i, got, scale, least, most);
      }
    }
  }
  return "";
}

std::vector<float> reference_layer(const plan::moe::Problem& p, const std::function<PlainExpert(int)>& expert,
                                   const std::vector<uint16_t>& x, const std::vector<int>& ids,
                                   const std::vector<float>& weights, const std::vector<int64_t>& samples, float limit,
                                   const std::optional<nvfp4::LayerInputScales>& input_scales) {
  const auto picks = p.picks_per_token(), hidden = p.hidden, inner = p.intermediate;
  struct Use {
    size_t sample;
    float weight;
    std::vector<float> row;  // what it adds to the sample's output
  };
  // Each expert is made once, for all samples that use it.
  std::map<int, std::vector<Use>> uses;
  for (size_t s = 0; s < samples.size(); ++s) {
    for (int64_t k = 0; k < picks; ++k) {
      const auto at = static_cast<size_t>(samples[s] * picks + k);
      if (ids[at] >= 0 && ids[at] < p.all_experts()) uses[ids[at]].push_back({s, weights[at], {}});
    }
  }
  std::vector<std::pair<int, std::vector<Use>*>> work;
  for (auto& [id, list] : uses) work.emplace_back(id, &list);
  ThreadPool pool;
  pool.parallel_for(static_cast<int64_t>(work.size()), 1, [&](int64_t begin, int64_t) {
    const auto& [id, list] = work[static_cast<size_t>(begin)];
    const PlainExpert e = expert(id);
    std::vector<float> row(static_cast<size_t>(hidden)), h(static_cast<size_t>(inner));
    for (Use& use : *list) {
      for (int64_t i = 0; i < hidden; ++i) {
        row[static_cast<size_t>(i)] = nvfp4::bf16_to_float(x[static_cast<size_t>(samples[use.sample] * hidden + i)]);
      }
      if (input_scales) through_nvfp4(&row, input_scales->gate_up);
      for (int64_t i = 0; i < inner; ++i) {
        const float g = p.gated() ? dot(&e.gate[static_cast<size_t>(i * hidden)], row.data(), hidden).value : 0;
        const float u = dot(&e.up[static_cast<size_t>(i * hidden)], row.data(), hidden).value;
        const float v = activate(p.activation, limit, g * e.gate_scale, 0, u * e.up_scale, 0).value;
        h[static_cast<size_t>(i)] = input_scales ? v : nvfp4::bf16_to_float(nvfp4::float_to_bf16(v));
      }
      if (input_scales) through_nvfp4(&h, input_scales->down[static_cast<size_t>(id)]);
      for (int64_t i = 0; i < hidden; ++i) {
        use.row.push_back(use.weight * e.down_scale *
                          dot(&e.down[static_cast<size_t>(i * inner)], h.data(), inner).value);
      }
    }
  });
  std::vector<float> out(samples.size() * static_cast<size_t>(hidden), 0);
  for (const auto& [id, list] : uses) {
    for (const Use& use : list) {
      for (size_t i = 0; i < use.row.size(); ++i) out[use.sample * static_cast<size_t>(hidden) + i] += use.row[i];
    }
  }
  return out;
}

std::vector<float> reference_layer(const plan::moe::Problem& p, const std::vector<ExpertMatrices>& experts,
                                   const std::vector<uint16_t>& x, const std::vector<int>& ids,
                                   const std::vector<float>& weights, const std::vector<int64_t>& samples, float limit,
                                   const std::optional<nvfp4::LayerInputScales>& input_scales) {
  const auto expert = [&](int id) {
    const ExpertMatrices& e = experts[static_cast<size_t>(id)];
    PlainExpert plain;
    if (p.gated()) plain.gate = dequantised(e.gate, p.intermediate, p.hidden);
    plain.up = dequantised(e.up, p.intermediate, p.hidden);
    plain.down = dequantised(e.down, p.hidden, p.intermediate);
    plain.gate_scale = e.gate.tensor_scale;
    plain.up_scale = e.up.tensor_scale;
    plain.down_scale = e.down.tensor_scale;
    return plain;
  };
  return reference_layer(p, expert, x, ids, weights, samples, limit, input_scales);
}

}  // namespace fourfold::cuda
