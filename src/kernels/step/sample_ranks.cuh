// Choosing the most probable tokens of rows whose logits are split among ranks, without bringing them together: each
// rank finds the best of its own columns, ranks tell each other these, and sample_choose takes the best of all.
#pragma once

#include "kernels/step/sample.cuh"

namespace fourfold::step {

// Grid: splits x rows.
__global__ void __launch_bounds__(kSampleThreads) sample_own_columns(const __grid_constant__ RankSampleArgs args) {
  using namespace sample_detail;
  __shared__ SamplePart parts[kSampleWarps];
  ptx::grid_launch_dependents();
  ptx::grid_dependency_wait();
  const int thread = static_cast<int>(threadIdx.x);
  const long long t = blockIdx.y;
  const SampleRow& s = args.samples[t];
  const int last = args.last < s.defined ? args.last : s.defined;
  const int length = (args.last - args.first + args.splits - 1) / args.splits;
  const int begin = args.first + static_cast<int>(blockIdx.x) * length;
  const int end = begin + length < last ? begin + length : last;
  const float* logits = args.logits + s.row * args.stride;
  SamplePart part = {masked_logit(), 0x7fffffff, masked_logit(), 0};
  for (int token = begin + thread; token < end; token += kSampleThreads) {
    float x = __ldcg(logits + token);
    part.bad |= is_finite(x) ? 0 : 1;
    part.raw = fmaxf(part.raw, x);
    for (int i = 0; i < s.bias_count; ++i) {
      const Bias& b = args.biases[s.bias_first + i];
      if (b.token == token) x = clamp_finite(x + b.value);
    }
    for (int i = 0; i < s.banned_count; ++i) {
      if (args.banned[s.banned_first + i] == token) x = masked_logit();
    }
    if (s.mask >= 0 && (args.masks[s.mask * args.mask_words + token / 32] >> (token % 32) & 1u) == 0) {
      x = masked_logit();
    }
    take_better(part.largest, part.token, x, token);
  }
  const auto join = [&](const SamplePart& other) {
    take_better(part.largest, part.token, other.largest, other.token);
    part.raw = fmaxf(part.raw, other.raw);
    part.bad |= other.bad;
  };
#pragma unroll
  for (int d = 16; d > 0; d /= 2) {
    join({__shfl_xor_sync(kAll, part.largest, d), __shfl_xor_sync(kAll, part.token, d),
          __shfl_xor_sync(kAll, part.raw, d), __shfl_xor_sync(kAll, part.bad, d)});
  }
  if (thread % 32 == 0) parts[thread / 32] = part;
  __syncthreads();
  if (thread != 0) return;
#pragma unroll 3  // as sample_prepare has it
  for (int w = 1; w < kSampleWarps; ++w) join(parts[w]);
  args.parts[t * args.parts_stride + blockIdx.x] = part;
}

}  // namespace fourfold::step
