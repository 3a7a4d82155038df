// Choosing tokens from logits (sample_args.h). The order of steps is that of ops/sampling.h.
#pragma once

#include "kernels/moe/choice.cuh"
#include "kernels/step/sample_args.h"

namespace fourfold::step {

namespace sample_detail {

using u32 = unsigned;
using u64 = unsigned long long;

constexpr u32 kAll = 0xffffffffu;
constexpr int kBins = 256;
constexpr float kLargest = 3.402823466e38f;
constexpr float kLowestExponent = -88.0f;
constexpr float kUnit = 1099511627776.0f;  // 2^40: of a weight of 1

__device__ __forceinline__ float masked_logit() { return __uint_as_float(0xff800000u); }
__device__ __forceinline__ bool is_finite(float x) { return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u; }
__device__ __forceinline__ float clamp_finite(float x) { return fminf(fmaxf(x, -kLargest), kLargest); }

// SplitMix64, as base/random.h has it, and the number that draws an output token (ops::draw_at).
__device__ __forceinline__ u64 mixed(u64 state) {
  u64 z = state + 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}
__device__ __forceinline__ double draw_at(u64 seed, u64 index) {
  const u64 start = mixed(seed ^ 0x6a09e667f3bcc909ull);
  return static_cast<double>(mixed(start ^ mixed(index)) >> 11) * 0x1p-53;
}

__device__ __forceinline__ u64 warp_sum(u64 x) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(kAll, x, d);
  return x;
}
__device__ __forceinline__ u32 warp_sum(u32 x) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(kAll, x, d);
  return x;
}

// The better of two (value, token): the larger value, ties to the lower token.
__device__ __forceinline__ void take_better(float& value, int& token, float other, int other_token) {
  const bool better = other > value || (other == value && other_token < token);
  value = better ? other : value;
  token = better ? other_token : token;
}

// Tokens of a row that a choice is made from: those with a key above `key`, and of those that have it the first `ties`.
struct Cut {
  u32 key;
  u32 ties;
};

struct Shared {
  u64 mass[kBins];
  u32 count[kBins];
  u64 warp_mass[kSampleWarps];
  u32 warp_ties[kSampleWarps];
  u64 above;  // of what the search has left behind
  u32 above_count;
  u32 prefix;
  float values[kMostLogprobs];
  int tokens[kMostLogprobs];
  u32 found;
};

// The part of a row that a warp looks at, so that ties are counted in the order of tokens.
struct Segment {
  int begin, end;
};
__device__ __forceinline__ Segment segment_of(int warp, int count) {
  const int length = (count + kSampleWarps * 32 - 1) / (kSampleWarps * 32) * 32;
  const int begin = warp * length;
  return {begin < count ? begin : count, begin + length < count ? begin + length : count};
}

struct Row {
  const float* logits;
  int count;
  float largest;
  float inverse_temperature;

  __device__ __forceinline__ u32 key(int token) const { return moe::order_key(__ldcg(logits + token)); }
  __device__ __forceinline__ float weight(u32 key) const {
    const float x = moe::key_value(key);
    if (!is_finite(x)) return 0.0f;  // masked
    return expf(fmaxf((x - largest) * inverse_temperature, kLowestExponent));
  }
  __device__ __forceinline__ u64 mass(u32 key) const { return static_cast<u64>(weight(key) * kUnit); }
};

// Goes down the bits of the keys, eight at a time from above, to where the tokens from the largest on reach `target`:
// in number, or in mass. `within`: only tokens of this cut count. All threads; the result is theirs all.
template <bool ByMass>
__device__ __forceinline__ Cut search(const Row& row, const Cut& within, u64 target, Shared& shared) {
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = thread / 32, lane = thread % 32;
  const Segment segment = segment_of(warp, row.count);
  if (thread == 0) {
    shared.above = 0;
    shared.prefix = 0;
  }
  // Ties of the cut that belong to warps before this one.
  u32 ties_before = 0;
  if (within.ties != ~0u) {
    u32 mine = 0;
    for (int at = segment.begin; at < segment.end; at += 32) {
      mine += at + lane < segment.end && row.key(at + lane) == within.key ? 1u : 0u;
    }
    mine = warp_sum(mine);
    if (lane == 0) shared.warp_ties[warp] = mine;
    __syncthreads();
    for (int w = 0; w < warp; ++w) ties_before += shared.warp_ties[w];
  }
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int i = thread; i < kBins; i += kSampleThreads) {
      shared.mass[i] = 0;
      shared.count[i] = 0;
    }
    __syncthreads();
    const u32 prefix = shared.prefix;
    u32 rank = ties_before;
    for (int at = segment.begin; at < segment.end; at += 32) {
      const bool there = at + lane < segment.end;
      const u32 key = there ? row.key(at + lane) : 0u;
      const bool tie = there && key == within.key;
      const u32 votes = __ballot_sync(kAll, tie);
      const bool in = there && (key > within.key ||
                                (tie && rank + static_cast<u32>(__popc(votes & ((1u << lane) - 1u))) < within.ties));
      rank += static_cast<u32>(__popc(votes));
      if (!in || (shift < 24 && key >> (shift + 8) != prefix >> (shift + 8))) continue;
      const u32 bin = key >> shift & 255u;
      atomicAdd(&shared.count[bin], 1u);
      if constexpr (ByMass) atomicAdd(&shared.mass[bin], row.mass(key));
    }
    __syncthreads();
    if (thread == 0) {
      u64 above = shared.above;
      int bin = kBins - 1;
      // The lowest bin that holds anything ends the search in any case: rounding may leave the target out of reach.
      int last = kBins - 1;
      for (; bin >= 0; --bin) {
        if (shared.count[bin] == 0) continue;
        last = bin;
        const u64 size = ByMass ? shared.mass[bin] : shared.count[bin];
        if (above + size >= target) break;
        above += size;
      }
      if (bin < 0) {
        bin = last;
        above -= ByMass ? shared.mass[bin] : shared.count[bin];
      }
      shared.above = above;
      shared.prefix = prefix | static_cast<u32>(bin) << shift;
      shared.found = shared.count[bin];
    }
    __syncthreads();
  }
  // All that are left have one key: how many of them are needed.
  const u32 key = shared.prefix;
  const u64 each = ByMass ? row.mass(key) : 1;
  const u64 missing = target > shared.above ? target - shared.above : 0;
  u64 ties = each == 0 ? shared.found : (missing + each - 1) / each;
  ties = ties < 1 ? 1 : ties;
  const Cut cut = {key, ties < shared.found ? static_cast<u32>(ties) : shared.found};
  __syncthreads();
  return cut;
}

// Calls body(token, key) for every token of the cut that this lane has, in the order of tokens, all lanes together
// (`in` false: none). ties_before: of the warps before.
template <typename Body>
__device__ __forceinline__ void for_cut(const Row& row, const Cut& cut, const Segment& segment, u32 ties_before,
                                        const Body& body) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  u32 rank = ties_before;
  for (int at = segment.begin; at < segment.end; at += 32) {
    const bool there = at + lane < segment.end;
    const u32 key = there ? row.key(at + lane) : 0u;
    const bool tie = there && key == cut.key;
    const u32 votes = __ballot_sync(kAll, tie);
    const bool in =
        there && (key > cut.key || (tie && rank + static_cast<u32>(__popc(votes & ((1u << lane) - 1u))) < cut.ties));
    rank += static_cast<u32>(__popc(votes));
    body(at + lane, key, in);
  }
}

// Ties of the cut that belong to the warps before. All threads.
__device__ __forceinline__ u32 ties_before_warp(const Row& row, const Cut& cut, const Segment& segment,
                                                Shared& shared) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  u32 mine = 0;
  for (int at = segment.begin; at < segment.end; at += 32) {
    mine += at + lane < segment.end && row.key(at + lane) == cut.key ? 1u : 0u;
  }
  mine = warp_sum(mine);
  if (lane == 0) shared.warp_ties[warp] = mine;
  __syncthreads();
  u32 before = 0;
  for (int w = 0; w < warp; ++w) before += shared.warp_ties[w];
  __syncthreads();
  return before;
}

// The token that a number in [0, 1) draws from the cut: the first one at which the sum of masses exceeds its share.
// Only weights of at least min_p count. All threads; -1 in those that do not have it.
__device__ __forceinline__ int draw(const Row& row, const Cut& cut, float min_p, double uniform, Shared& shared) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const Segment segment = segment_of(warp, row.count);
  const u32 before = ties_before_warp(row, cut, segment, shared);
  const auto mass_of = [&](u32 key, bool in) {
    if (!in) return u64{0};
    const float weight = row.weight(key);
    return weight >= min_p ? static_cast<u64>(weight * kUnit) : u64{0};
  };
  u64 sum = 0;
  for_cut(row, cut, segment, before, [&](int, u32 key, bool in) { sum += mass_of(key, in); });
  sum = warp_sum(sum);
  if (lane == 0) shared.warp_mass[warp] = sum;
  __syncthreads();
  u64 total = 0, mine = 0;
  for (int w = 0; w < kSampleWarps; ++w) {
    if (w == warp) mine = total;
    total += shared.warp_mass[w];
  }
  u64 left = static_cast<u64>(uniform * static_cast<double>(total));
  if (left >= total) left = total - 1;
  if (left < mine || left >= mine + sum) return -1;  // another warp's
  int found = -1;
  u64 done = mine;
  for_cut(row, cut, segment, before, [&](int token, u32 key, bool in) {
    const u64 own = mass_of(key, in);
    u64 through = own;  // with the lanes before this one
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const u64 other = __shfl_up_sync(kAll, through, static_cast<u32>(d));
      if (lane >= d) through += other;
    }
    if (own > 0 && left >= done + through - own && left < done + through) found = token;
    done += __shfl_sync(kAll, through, 31);
  });
  return found;
}

// What a token may be chosen by: its logit with bias and penalties, minus infinity where it may not be. `args`: of
// SampleArgs or RankSampleArgs.
template <typename Args>
__device__ __forceinline__ float adjusted(const Args& args, const SampleRow& s, int token, float x) {
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
  if (s.counts < 0 || !is_finite(x)) return x;
  const int count = args.counts[s.counts * args.counts_stride + token];
  int outputs = count > 1 ? count - 1 : 0;
  for (int i = 0; i < s.draft_count; ++i) outputs += args.drafts[s.draft_first + i] == token ? 1 : 0;
  if (count == 0 && outputs == 0) return x;
  x = x > 0.0f ? x / s.repetition_penalty : x * s.repetition_penalty;
  if (outputs > 0) x -= s.presence_penalty + s.frequency_penalty * static_cast<float>(outputs);
  return clamp_finite(x);
}

}  // namespace sample_detail

// A thread a lane: few tokens come to it in a step.
__global__ void __launch_bounds__(kCountThreads) sample_count(const __grid_constant__ CountArgs args) {
  ptx::grid_launch_dependents();
  ptx::grid_dependency_wait();
  const int at = static_cast<int>(blockIdx.x * kCountThreads + threadIdx.x);
  if (at >= args.count) return;
  const CountedLane lane = args.lanes[at];
  int* counts = args.counts + lane.lane * args.counts_stride;
  for (int i = 0; i < lane.count; ++i) {
    int& count = counts[args.tokens[lane.first + i]];
    count = counted_once_more(count);
  }
  const int token = lane.choice >= 0 ? args.chosen[lane.choice] : -1;
  if (token >= 0) counts[token] = counted_once_more(counts[token]);
}

// Grid: splits x rows.
__global__ void __launch_bounds__(kSampleThreads) sample_prepare(const __grid_constant__ SampleArgs args) {
  using namespace sample_detail;
  __shared__ SamplePart parts[kSampleWarps];
  ptx::grid_launch_dependents();
  ptx::grid_dependency_wait();
  const int thread = static_cast<int>(threadIdx.x);
  const long long t = blockIdx.y;
  const SampleRow& s = args.samples[t];
  const int length = ((s.defined + args.splits - 1) / args.splits + 31) / 32 * 32;
  const int begin = static_cast<int>(blockIdx.x) * length;
  const int end = begin + length < s.defined ? begin + length : s.defined;
  const float* logits = args.logits + s.row * args.stride;
  float* to = args.adjusted + s.row * args.stride;
  const bool adjust = adjusts(s);
  SamplePart part = {masked_logit(), 0x7fffffff, masked_logit(), 0};
  for (int token = begin + thread; token < end; token += kSampleThreads) {
    float x = __ldcg(logits + token);
    part.bad |= is_finite(x) ? 0 : 1;
    part.raw = fmaxf(part.raw, x);
    if (adjust) to[token] = x = sample_detail::adjusted(args, s, token, x);
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
#pragma unroll 3  // all at once would be 60 registers
  for (int w = 1; w < kSampleWarps; ++w) join(parts[w]);
  args.parts[t * args.splits + blockIdx.x] = part;
}

// Grid: rows. Two CTAs per SM: for more, NVRTC would spill.
__global__ void __launch_bounds__(kSampleThreads, 2) sample_choose(const __grid_constant__ SampleArgs args) {
  using namespace sample_detail;
  __shared__ Shared shared;
  __shared__ int chosen;
  ptx::grid_launch_dependents();
  ptx::grid_dependency_wait();
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = thread / 32, lane = thread % 32;
  const long long t = blockIdx.x;
  const SampleRow& s = args.samples[t];
  SamplePart all = {masked_logit(), 0x7fffffff, masked_logit(), 0};
  for (int i = 0; i < args.splits; ++i) {
    const SamplePart& part = args.parts[t * args.splits + i];
    take_better(all.largest, all.token, part.largest, part.token);
    all.raw = fmaxf(all.raw, part.raw);
    all.bad |= part.bad;
  }
  if (all.bad != 0 || !is_finite(all.largest)) {
    if (thread == 0) args.tokens[t] = all.bad != 0 ? kNotFinite : kAllMasked;
    return;
  }
  Row row = {(adjusts(s) ? args.adjusted : args.logits) + s.row * args.stride, s.defined, all.largest,
             1.0f / fmaxf(s.temperature, 1e-30f)};
  if (thread == 0) chosen = all.token;
  __syncthreads();
  if (s.temperature != 0.0f) {
    Cut cut = {0, ~0u};  // all
    if (s.top_k > 0 && s.top_k < s.defined) cut = search<false>(row, cut, static_cast<u64>(s.top_k), shared);
    if (s.top_p < 1.0f) {
      const Segment segment = segment_of(warp, row.count);
      const u32 before = ties_before_warp(row, cut, segment, shared);
      u64 sum = 0;
      for_cut(row, cut, segment, before, [&](int, u32 key, bool in) { sum += in ? row.mass(key) : u64{0}; });
      sum = warp_sum(sum);
      if (lane == 0) shared.warp_mass[warp] = sum;
      __syncthreads();
      u64 total = 0;
      for (int w = 0; w < kSampleWarps; ++w) total += shared.warp_mass[w];
      const double target = ceil(static_cast<double>(s.top_p) * static_cast<double>(total));
      __syncthreads();
      cut = search<true>(row, cut, static_cast<u64>(target), shared);
    }
    const int token = draw(row, cut, s.min_p, draw_at(s.seed, static_cast<u64>(s.index)), shared);
    if (token >= 0) chosen = token;
    __syncthreads();
  }
  if (thread == 0) args.tokens[t] = chosen;
  if (s.logprobs < 0 || args.logprobs == nullptr) return;

  // Of the model's own distribution.
  Row raw = {args.logits + s.row * args.stride, s.defined, all.raw, 1.0f};
  const Segment segment = segment_of(warp, raw.count);
  u64 sum = 0;
  for (int at = segment.begin + lane; at < segment.end; at += 32) sum += raw.mass(raw.key(at));
  sum = warp_sum(sum);
  if (lane == 0) shared.warp_mass[warp] = sum;
  __syncthreads();
  u64 total = 0;
  for (int w = 0; w < kSampleWarps; ++w) total += shared.warp_mass[w];
  const float log_total = static_cast<float>(log(static_cast<double>(total) / static_cast<double>(kUnit)));
  const auto logprob = [&](float logit) { return logit - all.raw - log_total; };
  float* values = args.logprobs + t * (1 + kMostLogprobs);
  int* tokens = args.logprob_tokens + t * (1 + kMostLogprobs);
  if (thread == 0) {
    tokens[0] = chosen;
    values[0] = logprob(__ldcg(raw.logits + chosen));
    shared.above_count = 0;
  }
  const int wanted = s.logprobs < s.defined ? s.logprobs : s.defined;
  if (wanted == 0) return;
  const Cut cut = search<false>(raw, {0, ~0u}, static_cast<u64>(wanted), shared);
  const u32 before = ties_before_warp(raw, cut, segment, shared);
  for_cut(raw, cut, segment, before, [&](int token, u32 key, bool in) {
    if (!in) return;
    const u32 place = atomicAdd(&shared.above_count, 1u);
    shared.values[place] = moe::key_value(key);
    shared.tokens[place] = token;
  });
  __syncthreads();
  if (thread >= wanted) return;
  // Each finds the place of one of them.
  int place = 0;
  for (int i = 0; i < wanted; ++i) {
    const bool first = shared.values[i] > shared.values[thread] ||
                       (shared.values[i] == shared.values[thread] && shared.tokens[i] < shared.tokens[thread]);
    place += first ? 1 : 0;
  }
  tokens[1 + place] = shared.tokens[thread];
  values[1 + place] = logprob(shared.values[thread]);
}

}  // namespace fourfold::step
