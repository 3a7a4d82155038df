#include "cuda/moe/weights.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/check.h"
#include "base/math.h"
#include "kernels/moe/tables.h"

namespace fourfold::cuda {
namespace {

constexpr uint64_t kStagingBytes = 64ull << 20;  // experts are brought to the device in portions of about this

int64_t stored_rows(const plan::moe::Problem& p, plan::moe::Pass pass) { return p.rows(pass) * p.operands(pass); }

uint64_t stored_bytes(const plan::moe::Problem& p, plan::moe::Pass pass) {
  return moe::packed_bytes(static_cast<int>(stored_rows(p, pass)), static_cast<int>(p.padded_depth(pass)));
}

void finite(float scale, int64_t expert, const char* matrix) {
  if (!std::isfinite(scale)) fail("expert {} {}: tensor scale is {}, wanted a finite number", expert, matrix, scale);
}

}  // namespace

Nvfp4Matrix contiguous(const uint8_t* codes, const uint8_t* scales, float tensor_scale, int64_t k) {
  return {codes, scales, tensor_scale, k / 2, k / 16};
}

std::vector<ExpertMatrices> shared_slices(const ExpertMatrices& shared, int64_t slices,
                                          const plan::moe::Problem& problem) {
  std::vector<ExpertMatrices> out;
  for (int64_t s = 0; s < slices; ++s) {
    ExpertMatrices slice = shared;
    const int64_t first = s * problem.intermediate;
    for (Nvfp4Matrix* rows : {&slice.gate, &slice.up}) {
      if (rows->codes == nullptr) continue;
      rows->codes += first * rows->code_stride;
      rows->scales += first * rows->scale_stride;
    }
    slice.down.codes += first / 2;
    slice.down.scales += first / 16;
    slice.down.first_column += first;
    out.push_back(slice);
  }
  return out;
}

uint64_t ExpertWeights::gate_up_bytes(const plan::moe::Problem& p) { return stored_bytes(p, plan::moe::Pass::kGateUp); }
uint64_t ExpertWeights::down_bytes(const plan::moe::Problem& p) { return stored_bytes(p, plan::moe::Pass::kDown); }

ExpertWeights::ExpertWeights(const LayerContext& context) : context_(context) {
  const plan::moe::Problem& p = context_.problem;
  const auto experts = static_cast<uint64_t>(p.all_experts());
  const Device& device = *context_.device;
  gate_up_ = Buffer(device, checked_mul(experts, gate_up_bytes(p), "gate-up weights"), "gate-up weights");
  down_ = Buffer(device, checked_mul(experts, down_bytes(p), "down weights"), "down weights");
  gate_up_scales_ = Buffer(
      device, experts * static_cast<uint64_t>(p.operands(plan::moe::Pass::kGateUp)) * sizeof(float), "tensor scales");
  down_scales_ = Buffer(device, experts * sizeof(float), "tensor scales");
  if (p.allows(plan::moe::ActivationFormat::kNvfp4)) {
    gate_up_inputs_.resize(experts * static_cast<uint64_t>(p.operands(plan::moe::Pass::kGateUp)));
    down_inputs_.resize(experts);
    input_scale_values_ = Buffer(device, (1 + experts) * sizeof(float), "input scales");
  }
}

void ExpertWeights::repack(const Stream& stream, int64_t first, int64_t count, const DeviceExperts& experts,
                           int* bad) const {
  const plan::moe::Problem& p = context_.problem;
  const auto side = [](const Nvfp4Matrix& m) {
    return moe::SourceMatrix{m.codes, m.scales, m.code_stride, m.scale_stride};
  };
  for (const plan::moe::Pass pass : {plan::moe::Pass::kGateUp, plan::moe::Pass::kDown}) {
    const bool gate_up = pass == plan::moe::Pass::kGateUp;
    const bool paired = gate_up && p.gated();
    const Buffer& out = gate_up ? gate_up_ : down_;
    const uint64_t each = stored_bytes(p, pass);
    moe::RepackArgs args = {};
    args.first = side(!gate_up ? experts.down : paired ? experts.gate : experts.up);
    args.second = side(gate_up ? experts.up : experts.down);
    args.code_expert_stride = experts.code_bytes;
    args.scale_expert_stride = experts.scale_bytes;
    args.experts = static_cast<int>(count);
    args.first_expert = static_cast<int>(first);
    args.paired = paired ? 1 : 0;
    args.row_tiles = static_cast<int>(stored_rows(p, pass) / moe::kTileRows);
    args.k = static_cast<int>(p.depth(pass));
    args.units = static_cast<int>(p.padded_depth(pass) / moe::kUnitK);
    args.out = out.as<unsigned char>() + static_cast<uint64_t>(first) * each;
    args.bad = bad;
    const uint64_t units = static_cast<uint64_t>(count) * (each / moe::kUnitBytes);
    const auto grid = static_cast<unsigned>(std::min<uint64_t>((units + 127) / 128, 65536));
    launch(stream, context_.kernels->repack, {grid, 1}, Overlap::kNone, args);
  }
}

void ExpertWeights::check_bad(const Stream& stream, const Buffer& bad) const {
  const int expert = bad.download<int>(stream, 1)[0];
  if (expert >= 0) fail("expert {}: a block scale is NaN, wanted finite e4m3 numbers", expert);
}

void ExpertWeights::upload(const Stream& stream, int64_t first, std::span<const ExpertMatrices> sources) {
  const plan::moe::Problem& p = context_.problem;
  const auto count = static_cast<int64_t>(sources.size());
  if (first < 0 || count > p.all_experts() - first) {
    fail("experts {} to {}: the layer has {}", first, first + count - 1, p.all_experts());
  }
  if (count == 0) return;
  std::vector<float> gate_up, down;
  for (int64_t i = 0; i < count; ++i) {
    const ExpertMatrices& e = sources[static_cast<size_t>(i)];
    if (p.gated()) {
      finite(e.gate.tensor_scale, first + i, "gate");
      gate_up.push_back(e.gate.tensor_scale);
    }
    finite(e.up.tensor_scale, first + i, "up");
    finite(e.down.tensor_scale, first + i, "down");
    gate_up.push_back(e.up.tensor_scale);
    down.push_back(e.down.tensor_scale);
  }
  // A portion of experts in one host block [matrix][expert][codes], [matrix][expert][scales], copied at once.
  const auto elements = static_cast<uint64_t>(p.hidden * p.intermediate);
  const uint64_t codes = elements / 2, scales = elements / 16;
  const auto portion = static_cast<int64_t>(
      std::clamp<uint64_t>(kStagingBytes / (3 * (codes + scales)), 1, static_cast<uint64_t>(count)));
  const uint64_t block = static_cast<uint64_t>(portion) * (codes + scales);
  const Device& device = *context_.device;
  Buffer staging(device, 3 * block, "staging for weights"), bad(device, sizeof(int), "repack status");
  bad.fill(stream, 0xff);
  std::vector<uint8_t> host(3 * block);
  const auto gather = [](const Nvfp4Matrix& m, int64_t rows, int64_t k, uint8_t* to_codes, uint8_t* to_scales) {
    for (int64_t r = 0; r < rows; ++r) {
      std::memcpy(to_codes + r * (k / 2), m.codes + r * m.code_stride, static_cast<size_t>(k / 2));
      std::memcpy(to_scales + r * (k / 16), m.scales + r * m.scale_stride, static_cast<size_t>(k / 16));
    }
  };
  for (int64_t at = 0; at < count; at += portion) {
    const int64_t now = std::min(portion, count - at);
    DeviceExperts experts = {};
    experts.code_bytes = static_cast<int64_t>(codes);
    experts.scale_bytes = static_cast<int64_t>(scales);
    Nvfp4Matrix* const to[3] = {&experts.gate, &experts.up, &experts.down};
    for (int m = p.gated() ? 0 : 1; m < 3; ++m) {
      const int64_t rows = m == 2 ? p.hidden : p.intermediate, k = m == 2 ? p.intermediate : p.hidden;
      const uint64_t base = static_cast<uint64_t>(m) * block;
      const uint64_t scale_base = base + static_cast<uint64_t>(portion) * codes;
      for (int64_t i = 0; i < now; ++i) {
        const ExpertMatrices& e = sources[static_cast<size_t>(at + i)];
        gather(m == 0   ? e.gate
               : m == 1 ? e.up
                        : e.down,
               rows, k, host.data() + base + static_cast<uint64_t>(i) * codes,
               host.data() + scale_base + static_cast<uint64_t>(i) * scales);
      }
      *to[m] = contiguous(staging.as<uint8_t>() + base, staging.as<uint8_t>() + scale_base, 1, k);
    }
    staging.upload(stream, host.data(), host.size());
    repack(stream, first + at, now, experts, bad.as<int>());
    stream.synchronize();  // the staging blocks are used again
  }
  gate_up_scales_.upload(stream, gate_up.data(), gate_up.size() * sizeof(float),
                         static_cast<uint64_t>(first * p.operands(plan::moe::Pass::kGateUp)) * sizeof(float));
  down_scales_.upload(stream, down.data(), down.size() * sizeof(float), static_cast<uint64_t>(first) * sizeof(float));
  if (!down_inputs_.empty()) {
    auto* gate_up_input = &gate_up_inputs_[static_cast<size_t>(first * p.operands(plan::moe::Pass::kGateUp))];
    for (int64_t i = 0; i < count; ++i) {
      const ExpertMatrices& e = sources[static_cast<size_t>(i)];
      if (p.gated()) *gate_up_input++ = e.gate.input_scale;
      *gate_up_input++ = e.up.input_scale;
      down_inputs_[static_cast<size_t>(first + i)] = e.down.input_scale;
    }
    upload_input_scales(stream);
  }
  check_bad(stream, bad);
}

void ExpertWeights::set_input_scales(const Stream& stream, const std::vector<float>& gate_up,
                                     const std::vector<float>& down) {
  if (down_inputs_.empty()) return;
  FF_ASSERT(gate_up.size() == gate_up_inputs_.size() && down.size() == down_inputs_.size());
  gate_up_inputs_ = gate_up;
  down_inputs_ = down;
  upload_input_scales(stream);
  stream.synchronize();
}

void ExpertWeights::upload_input_scales(const Stream& stream) {
  input_scales_ = nvfp4::layer_input_scales(gate_up_inputs_, down_inputs_);
  if (!input_scales_) return;
  std::vector<float> values = {input_scales_->gate_up};
  values.insert(values.end(), input_scales_->down.begin(), input_scales_->down.end());
  input_scale_values_.upload(stream, values);
}

void ExpertWeights::repack(const Stream& stream, int64_t first, int64_t count, const DeviceExperts& experts) {
  FF_ASSERT(first >= 0 && count >= 0 && count <= context_.problem.all_experts() - first);
  Buffer bad(*context_.device, sizeof(int), "repack status");
  bad.fill(stream, 0xff);
  if (count > 0) repack(stream, first, count, experts, bad.as<int>());
  check_bad(stream, bad);
}

void ExpertWeights::set_scales(const Stream& stream, const std::vector<float>& gate_up,
                               const std::vector<float>& down) {
  const auto experts = static_cast<size_t>(context_.problem.all_experts());
  const auto operands = static_cast<size_t>(context_.problem.operands(plan::moe::Pass::kGateUp));
  FF_ASSERT(gate_up.size() == operands * experts && down.size() == experts);
  for (size_t e = 0; e < experts; ++e) {
    for (size_t i = 0; i < operands; ++i) finite(gate_up[operands * e + i], static_cast<int64_t>(e), "gate-up");
    finite(down[e], static_cast<int64_t>(e), "down");
  }
  gate_up_scales_.upload(stream, gate_up);
  down_scales_.upload(stream, down);
  stream.synchronize();
}

void ExpertWeights::copy_from(const Stream& stream, const ExpertWeights& other) {
  gate_up_.copy(stream, other.gate_up_, other.gate_up_.bytes());
  down_.copy(stream, other.down_, other.down_.bytes());
  gate_up_scales_.copy(stream, other.gate_up_scales_, other.gate_up_scales_.bytes());
  down_scales_.copy(stream, other.down_scales_, other.down_scales_.bytes());
  gate_up_inputs_ = other.gate_up_inputs_;
  down_inputs_ = other.down_inputs_;
  input_scales_ = other.input_scales_;
  if (input_scales_) input_scale_values_.copy(stream, other.input_scale_values_, other.input_scale_values_.bytes());
}

}  // namespace fourfold::cuda
