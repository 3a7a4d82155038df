// The logits of a row: what tokens may be chosen by, keys and weights, cuts, and how the CTAs of a row look together
// for where a limit ends.
#pragma once

#include "kernels/moe/choice.cuh"
#include "kernels/step/sample_args.h"

namespace fourfold::step {

namespace sample_detail {

using u32 = unsigned;
using u64 = unsigned long long;

constexpr u32 kAll = 0xffffffffu;
constexpr u32 kMaskedKey = 0x007fffffu;  // of minus infinity
constexpr float kLargest = 3.402823466e38f;
constexpr float kLowestExponent = -88.0f;
constexpr float kUnit = 1099511627776.0f;  // 2^40: of a weight of 1

__device__ __forceinline__ float masked_logit() { return __uint_as_float(0xff800000u); }
__device__ __forceinline__ bool is_finite(float x) { return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u; }
__device__ __forceinline__ float clamp_finite(float x) { return fminf(fmaxf(x, -kLargest), kLargest); }
__device__ __forceinline__ u32 key_of(float x) { return moe::order_key(x + 0.0f); }  // zeros of both signs are equal

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

// Tokens of a row that a choice is made from: those with a key above `key`, and of those that have it the first `ties`.
struct Cut {
  u32 key;
  u32 ties;
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

  __device__ __forceinline__ u32 key(int token) const { return key_of(__ldcg(logits + token)); }
  __device__ __forceinline__ float weight(u32 key) const {
    const float x = moe::key_value(key);
    if (!is_finite(x)) return 0.0f;  // masked
    return expf(fmaxf((x - largest) * inverse_temperature, kLowestExponent));
  }
  __device__ __forceinline__ u64 mass(u32 key) const { return static_cast<u64>(weight(key) * kUnit); }
  // What a draw can take.
  __device__ __forceinline__ u64 mass_from(u32 key, float min_p) const {
    const float x = weight(key);
    return x >= min_p ? static_cast<u64>(x * kUnit) : u64{0};
  }
};

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

// What the threads of a CTA share.
struct Scratch {
  u64 sums[kSampleWarps];
  u32 ties[kSampleWarps];
  u64 values[4];
  u32 words[4];
};

// Of a search, too.
struct SearchScratch : Scratch {
  SampleBins bins;
};

// The sum of what this thread and those before it have, and of all. All threads of a CTA of kSampleThreads at most;
// sums: a place for each warp.
template <int Warps = kSampleWarps>
__device__ __forceinline__ u64 sum_through(u64 x, u64* sums, u64& total) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const u64 other = __shfl_up_sync(kAll, x, static_cast<u32>(d));
    if (lane >= d) x += other;
  }
  __syncthreads();  // what was there was read
  if (lane == 31) sums[warp] = x;
  __syncthreads();
  total = 0;
  u64 before = 0;
#pragma unroll 4  // all at once would be 32 registers
  for (int w = 0; w < Warps; ++w) {
    if (w == warp) before = total;
    total += sums[w];
  }
  return before + x;
}

// Ties of the cut that belong to the warps before, of `row`. All threads.
__device__ __forceinline__ u32 ties_before_warp(const Row& row, const Cut& cut, const Segment& segment,
                                                Scratch& scratch) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  u32 mine = 0;
  for (int at = segment.begin; at < segment.end; at += 32) {
    mine += at + lane < segment.end && row.key(at + lane) == cut.key ? 1u : 0u;
  }
  mine = warp_sum(mine);
  if (lane == 0) scratch.ties[warp] = mine;
  __syncthreads();
  u32 before = 0;
  for (int w = 0; w < warp; ++w) before += scratch.ties[w];
  __syncthreads();
  return before;
}

// Calls found(token) in the thread whose token of the cut has the `left`th unit of mass, counted in the order of
// tokens. All threads.
template <typename Found>
__device__ __forceinline__ void take_from(const Row& row, const Cut& cut, float min_p, u64 left, Scratch& scratch,
                                          const Found& found) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const Segment segment = segment_of(warp, row.count);
  const u32 ties_before = ties_before_warp(row, cut, segment, scratch);
  u64 sum = 0;
  for_cut(row, cut, segment, ties_before,
          [&](int, u32 key, bool in) { sum += in ? row.mass_from(key, min_p) : u64{0}; });
  sum = warp_sum(sum);
  if (lane == 0) scratch.sums[warp] = sum;
  __syncthreads();
  u64 done = 0;
  for (int w = 0; w < warp; ++w) done += scratch.sums[w];
  if (left < done || left >= done + sum) return;  // another warp's
  for_cut(row, cut, segment, ties_before, [&](int token, u32 key, bool in) {
    const u64 each = in ? row.mass_from(key, min_p) : u64{0};
    u64 through = each;  // with the lanes before this one
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const u64 other = __shfl_up_sync(kAll, through, static_cast<u32>(d));
      if (lane >= d) through += other;
    }
    if (each > 0 && left >= done + through - each && left < done + through) found(token);
    done += __shfl_sync(kAll, through, 31);
  });
}

// Calls body(token, logit) for columns [begin, end), four of each thread at a time, of which the next are under way.
template <typename Body>
__device__ __forceinline__ void for_logits(const float* logits, int begin, int end, const Body& body) {
  const int thread = static_cast<int>(threadIdx.x);
  const bool whole = reinterpret_cast<u64>(logits + begin) % 16 == 0 && (end - begin) % 4 == 0;  // 16 bytes at once
  const int apart = whole ? 1 : kSampleThreads;
  const auto load = [&](int first) {
    float4 x = {};
    if (whole) {
      if (first < end) x = __ldcg(reinterpret_cast<const float4*>(logits + first));
      return x;
    }
    if (first < end) x.x = __ldcg(logits + first);
    if (first + kSampleThreads < end) x.y = __ldcg(logits + first + kSampleThreads);
    if (first + 2 * kSampleThreads < end) x.z = __ldcg(logits + first + 2 * kSampleThreads);
    if (first + 3 * kSampleThreads < end) x.w = __ldcg(logits + first + 3 * kSampleThreads);
    return x;
  };
  int first = begin + (whole ? 4 * thread : thread);
  float4 next = load(first);
#pragma unroll 1
  while (first < end) {
    const float x[4] = {next.x, next.y, next.z, next.w};
    next = load(first + 4 * kSampleThreads);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (first + i * apart < end) body(first + i * apart, x[i]);
    }
    first += 4 * kSampleThreads;
  }
}
template <typename Body>
__device__ __forceinline__ void for_keys(const Row& row, int begin, int end, const Body& body) {
  for_logits(row.logits, begin, end, [&](int token, float x) { body(token, key_of(x)); });
}

// The CTAs of a row, one of them or all, each of which has columns [begin, end).
struct Team {
  SampleState* state;  // null: it has one
  int ctas, cta;
  int met;  // how often

  __device__ __forceinline__ bool alone() const { return ctas == 1; }
  // Behind it everybody sees what all have stored before it.
  __device__ __forceinline__ void meet() {
    ++met;
    __syncthreads();
    if (alone()) return;
    if (threadIdx.x == 0) {
      __threadfence();
      atomicAdd(&state->arrived, 1);
      ptx::wait_count(&state->arrived, met * ctas);
    }
    __syncthreads();
  }
  // Nobody waits: the last one to come goes on, and sees what all have stored.
  __device__ __forceinline__ bool last(Scratch& scratch) {
    ++met;
    __syncthreads();
    if (alone()) return true;
    if (threadIdx.x == 0) {
      __threadfence();
      scratch.words[0] = atomicAdd(&state->arrived, 1) + 1 == met * ctas ? 1u : 0u;
      __threadfence();
    }
    __syncthreads();
    return scratch.words[0] != 0;
  }
};

// Which distances of keys from the largest one the bins of a round have: each 2^shift from `low` on; the last one, if
// `open`, all that are further away, too. The first round has bins for four powers of two of logits, most of which fall
// into the last one; two more rounds tell keys apart, or four.
struct Range {
  u32 low = 0;
  int shift = 15;
  bool open = true;

  __device__ __forceinline__ bool has(u32 distance, u32& bin) const {
    bin = (distance - low) >> shift;
    if (open && bin >= kSampleBins) bin = kSampleBins - 1;
    return distance >= low && bin < kSampleBins;
  }
  __device__ __forceinline__ bool exact() const { return shift == 0; }
  __device__ __forceinline__ Range of(u32 bin) const {
    if (open && bin == kSampleBins - 1) return {low + (bin << shift), 22, false};
    return {low + (bin << shift), shift > 10 ? shift - 10 : 0, false};
  }
};

// Where a limit is reached, from the largest logit on: a bin, and what is in it and before it.
struct Reached {
  u32 bin, count, count_before;
  u64 mass, mass_before;
};

// Two bins of each thread, with what is before them.
struct Scan {
  u32 count[2];
  u64 mass[2];
  u64 count_before, mass_before;
  u64 counts, masses;  // in all

  // The bin in which as many tokens, or as much mass, as `target` is reached, or the last one that adds to it. All
  // threads.
  __device__ __forceinline__ Reached reach(bool by_mass, u64 target, Scratch& scratch) const {
    const u64 total = by_mass ? masses : counts;
    target = target < total ? target : total;
    u64 before = by_mass ? mass_before : count_before, tokens = count_before, weight = mass_before;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const u64 size = by_mass ? mass[i] : count[i];
      if (before < target && before + size >= target) {
        scratch.words[0] = 2 * threadIdx.x + static_cast<u32>(i);
        scratch.words[1] = count[i];
        scratch.words[2] = static_cast<u32>(tokens);
        scratch.values[0] = mass[i];
        scratch.values[1] = weight;
      }
      before += size;
      tokens += count[i];
      weight += mass[i];
    }
    __syncthreads();
    const Reached reached = {scratch.words[0], scratch.words[1], scratch.words[2], scratch.values[0],
                             scratch.values[1]};
    __syncthreads();
    return reached;
  }
};

// A round: the tokens of all CTAs' columns by bins; they meet once. `within`: only tokens of this cut. Masked ones do
// not count. Not inlined: its code is needed in several places, and would not be in the instruction cache in any of
// them.
__device__ inline __attribute__((noinline)) Scan scan_columns(Team team, Row row, int begin, int end, u32 largest,
                                                              const Range& range, const Cut& within, bool by_mass,
                                                              SearchScratch& scratch) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  SampleBins& own = scratch.bins;
  for (int i = thread; i < kSampleBins; i += kSampleThreads) {
    own.count[i] = 0;
    own.mass[i] = 0;
  }
  __syncthreads();
  const u32 above = within.key > kMaskedKey ? within.key : kMaskedKey;
  u32 far = 0;  // in the last bin: most of them, at first
  u64 far_mass = 0;
  for_keys(row, begin, end, [&](int, u32 key) {
    u32 bin = 0;
    // Those that have the cut's own key are added behind the sum over CTAs.
    if (key <= above || !range.has(largest - key, bin)) return;
    const u64 mass = by_mass ? row.mass(key) : u64{0};
    if (bin == kSampleBins - 1) {
      ++far;
      far_mass += mass;
      return;
    }
    atomicAdd(&own.count[bin], 1u);
    if (mass > 0) atomicAdd(&own.mass[bin], mass);
  });
  far = warp_sum(far);
  far_mass = warp_sum(far_mass);
  if (lane == 0 && far > 0) {
    atomicAdd(&own.count[kSampleBins - 1], far);
    atomicAdd(&own.mass[kSampleBins - 1], far_mass);
  }
  __syncthreads();
  const SampleBins* bins = &own;
  if (!team.alone()) {
    SampleBins& all = team.state->bins[team.met % 3];
    for (int i = thread; i < kSampleBins; i += kSampleThreads) {
      if (own.count[i] == 0) continue;
      atomicAdd(&all.count[i], own.count[i]);
      if (own.mass[i] > 0) atomicAdd(&all.mass[i], own.mass[i]);
    }
    // The next round's: who looked at what is there has met the others since.
    SampleBins& next = team.state->bins[(team.met + 1) % 3];
    for (int i = team.cta * kSampleThreads + thread; i < kSampleBins; i += team.ctas * kSampleThreads) {
      next.count[i] = 0;
      next.mass[i] = 0;
    }
    bins = &all;
    team.meet();
  }
  Scan scan;
  u64 count = 0, mass = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const u32 bin = 2 * threadIdx.x + static_cast<u32>(i);
    scan.count[i] = team.alone() ? bins->count[bin] : __ldcg(&bins->count[bin]);
    scan.mass[i] = team.alone() ? bins->mass[bin] : __ldcg(&bins->mass[bin]);
    if (u32 at = 0; within.ties != ~0u && range.has(largest - within.key, at) && at == bin) {
      scan.count[i] += within.ties;
      scan.mass[i] += within.ties * row.mass(within.key);
    }
    count += scan.count[i];
    mass += scan.mass[i];
  }
  scan.count_before = sum_through(count, scratch.sums, scan.counts) - count;
  scan.mass_before = sum_through(mass, scratch.sums, scan.masses) - mass;
  return scan;
}

__device__ __forceinline__ Scan scan(Team& team, const Row& row, int begin, int end, u32 largest, const Range& range,
                                     const Cut& within, bool by_mass, SearchScratch& scratch) {
  const Scan scan = scan_columns(team, row, begin, end, largest, range, within, by_mass, scratch);
  ++team.met;
  return scan;
}

// Goes on from where a limit of `target` was reached in the first round to the last token: the cut with which it is.
__device__ __forceinline__ Cut refine(Team& team, const Row& row, int begin, int end, u32 largest, Reached reached,
                                      const Cut& within, bool by_mass, u64 target, SearchScratch& scratch) {
  Range range;
  for (;;) {
    const u64 before = by_mass ? reached.mass_before : reached.count_before;
    target = target > before ? target - before : 1;
    if (range.exact()) break;
    range = range.of(reached.bin);
    reached = scan(team, row, begin, end, largest, range, within, by_mass, scratch).reach(by_mass, target, scratch);
  }
  // All that are left have one key: how many of them are needed.
  const u32 key = largest - (range.low + reached.bin);
  const u64 each = by_mass ? row.mass(key) : 1;
  const u64 ties = each == 0 ? reached.count : (target + each - 1) / each;
  return {key, ties < reached.count ? static_cast<u32>(ties) : reached.count};
}

// Where a row's draw falls in a mass of `total`.
__device__ __forceinline__ u64 drawn_mass(const SampleRow& s, u64 total) {
  const u64 at = static_cast<u64>(draw_at(s.seed, static_cast<u64>(s.index)) * static_cast<double>(total));
  return at < total ? at : total - 1;
}

template <typename Args>
__device__ __forceinline__ int count_of(const Args& args, const SampleRow& s, int token) {
  return s.counts < 0 ? 0 : args.counts[s.counts * args.counts_stride + token];
}

// What a token may be chosen by: its logit with bias and penalties, minus infinity where it may not be. `count`: as
// SampleArgs::counts has it. `args`: of SampleArgs or RankSampleArgs.
template <typename Args>
__device__ __forceinline__ float adjusted(const Args& args, const SampleRow& s, int token, float x, int count) {
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
  int outputs = count > 1 ? count - 1 : 0;
  for (int i = 0; i < s.draft_count; ++i) outputs += args.drafts[s.draft_first + i] == token ? 1 : 0;
  if (count == 0 && outputs == 0) return x;
  x = x > 0.0f ? x / s.repetition_penalty : x * s.repetition_penalty;
  if (outputs > 0) x -= s.presence_penalty + s.frequency_penalty * static_cast<float>(outputs);
  return clamp_finite(x);
}

}  // namespace sample_detail

}  // namespace fourfold::step
