// Choosing tokens of rows whose logits are split among ranks, without bringing them together. The tokens are those of
// sample_tokens: a token is found by comparing, counting and sums in fixed point, of which ranks tell each other what
// their columns come to.
//
//   sample_own_columns, join   the largest of all, with which greedy rows are done
//   sample_bins, settle        top_k, then top_p: four rounds each, eight bits of a key a round
//   sample_shares, take, end   what a draw can take of every CTA's columns; the CTA that it falls to finds the token
//   sample_report, tell        log-probabilities, behind the choice: sums and the most probable tokens of every CTA
//
// Between the two of each line ranks exchange what the first has written.
#pragma once

#include "kernels/step/sample_ranks_args.h"
#include "kernels/step/sample_search.cuh"

namespace fourfold::step {

namespace rank_detail {

using sample_detail::Cut;
using sample_detail::kAll;
using sample_detail::Row;
using sample_detail::sum_through;
using sample_detail::u32;
using sample_detail::u64;

struct Columns {
  int begin, end;  // empty: end <= begin
};
__device__ __forceinline__ Columns columns_of(const RankSampleArgs& args, const SampleRow& s) {
  const int last = args.last < s.defined ? args.last : s.defined;
  const int length = (args.last - args.first + args.splits - 1) / args.splits;
  const int begin = args.first + static_cast<int>(blockIdx.x) * length;
  return {begin, begin + length < last ? begin + length : last};
}

// From column `first` on.
__device__ __forceinline__ Row row_of(const RankSampleArgs& args, const SampleRow& s, const RankDraw& draw, int first,
                                      int count) {
  return {args.logits + s.row * args.stride + first, count, draw.largest, 1.0f / fmaxf(s.temperature, 1e-30f)};
}

__device__ __forceinline__ bool searched(const RankSampleArgs& args, const SampleRow& s, const RankDraw& draw) {
  return draw.drawn != 0 && (args.by_mass != 0 ? s.top_p < 1.0f : s.top_k > 0 && s.top_k < s.defined);
}
__device__ __forceinline__ bool has_prefix(const RankSampleArgs& args, u32 key, u32 prefix) {
  return args.shift == 24 || key >> (args.shift + 8) == prefix >> (args.shift + 8);
}

// The better of two (value, token): the larger value, ties to the lower token.
__device__ __forceinline__ void take_better(float& value, int& token, float other, int other_token) {
  const bool better = other > value || (other == value && other_token < token);
  value = better ? other : value;
  token = better ? other_token : token;
}

__device__ __forceinline__ void join(SamplePart& part, const SamplePart& other) {
  take_better(part.largest, part.token, other.largest, other.token);
  part.bad |= other.bad;
}
__device__ __forceinline__ void join_lanes(SamplePart& part) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) {
    join(part, {__shfl_xor_sync(kAll, part.largest, d), __shfl_xor_sync(kAll, part.token, d),
                __shfl_xor_sync(kAll, part.bad, d), 0});
  }
}

}  // namespace rank_detail

// Grid: splits x rows.
__global__ void __launch_bounds__(kSampleThreads) sample_own_columns(const __grid_constant__ RankSampleArgs args) {
  using namespace sample_detail;
  __shared__ SamplePart parts[kSampleWarps];
  ptx::grid_launch_dependents();
  ptx::grid_dependency_wait();
  const int thread = static_cast<int>(threadIdx.x);
  const long long t = blockIdx.y;
  const SampleRow& s = args.samples[t];
  const rank_detail::Columns own = rank_detail::columns_of(args, s);
  float* logits = args.logits + s.row * args.stride;
  const bool adjust = adjusts(s) && s.temperature != 0.0f;  // for those that look at them again
  SamplePart part = {masked_logit(), 0x7fffffff, 0, 0};
  for (int token = own.begin + thread; token < own.end; token += kSampleThreads) {
    float x = __ldcg(logits + token);
    part.bad |= is_finite(x) ? 0 : 1;
    x = adjusted(args, s, token, x, count_of(args, s, token));
    if (adjust) logits[token] = x;
    rank_detail::take_better(part.largest, part.token, x, token);
  }
  rank_detail::join_lanes(part);
  if (thread % 32 == 0) parts[thread / 32] = part;
  __syncthreads();
  if (thread != 0) return;
#pragma unroll 3  // all at once would be 60 registers
  for (int w = 1; w < kSampleWarps; ++w) rank_detail::join(part, parts[w]);
  args.parts[(t * args.ranks + args.rank) * args.splits + blockIdx.x] = part;
}

// Grid: rows.
__global__ void __launch_bounds__(kRankJoinThreads) sample_join(const __grid_constant__ RankSampleArgs args) {
  using namespace sample_detail;
  ptx::grid_launch_dependents();
  ptx::grid_dependency_wait();
  const int lane = static_cast<int>(threadIdx.x), count = args.ranks * args.splits;
  const long long t = blockIdx.x;
  SamplePart all = {masked_logit(), 0x7fffffff, 0, 0};
  for (int i = lane; i < count; i += kRankJoinThreads) rank_detail::join(all, args.parts[t * count + i]);
  rank_detail::join_lanes(all);
  if (lane != 0) return;
  const bool none = all.bad != 0 || !is_finite(all.largest);
  args.tokens[t] = args.told[t] = all.bad != 0 ? kNotFinite : none ? kAllMasked : all.token;
  RankDraw draw = {};
  draw.largest = all.largest;
  draw.drawn = !none && args.samples[t].temperature != 0.0f ? 1 : 0;
  draw.ties = ~0u;
  args.draws[t] = draw;
}

// Grid: splits x drawn rows.
__global__ void __launch_bounds__(kSampleThreads) sample_bins(const __grid_constant__ RankSampleArgs args) {
  using namespace rank_detail;
  __shared__ RankBins own;
  ptx::grid_launch_dependents();
  ptx::grid_dependency_wait();
  const int thread = static_cast<int>(threadIdx.x), t = args.drawn[blockIdx.y];
  const SampleRow& s = args.samples[t];
  const RankDraw draw = args.draws[t];
  if (!searched(args, s, draw)) return;
  if (thread < kRankBins) {
    own.mass[thread] = 0;
    own.count[thread] = 0;
  }
  __syncthreads();
  const Columns columns = columns_of(args, s);
  const Row row = row_of(args, s, draw, 0, s.defined);
  for (int token = columns.begin + thread; token < columns.end; token += kSampleThreads) {
    const u32 key = row.key(token);
    // Tokens that have the cut's own key are counted where the ranks' bins are put together.
    if (key <= draw.key || !has_prefix(args, key, draw.prefix)) continue;
    const u32 bin = key >> args.shift & 255u;
    atomicAdd(&own.count[bin], 1u);
    if (args.by_mass == 0) continue;
    const u64 mass = row.mass(key);
    if (mass > 0) atomicAdd(&own.mass[bin], mass);
  }
  __syncthreads();
  if (thread >= kRankBins || own.count[thread] == 0) return;
  RankBins& bins = args.bins[static_cast<long long>(blockIdx.y) * args.ranks + args.rank];
  atomicAdd(&bins.count[thread], own.count[thread]);
  if (own.mass[thread] > 0) atomicAdd(&bins.mass[thread], own.mass[thread]);
}

// Grid: drawn rows. The bin in which tokens from the largest on reach the target, as sample_detail::refine finds it;
// behind the last round the cut. Leaves this rank's bins at zero.
__global__ void __launch_bounds__(kRankBins) sample_settle(const __grid_constant__ RankSampleArgs args) {
  using namespace rank_detail;
  constexpr int kWarps = kRankBins / 32;
  __shared__ u64 sums[kWarps];
  __shared__ int firsts[kWarps], lasts[kWarps];
  ptx::grid_launch_dependents();
  ptx::grid_dependency_wait();
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, t = args.drawn[blockIdx.x];
  const SampleRow& s = args.samples[t];
  const RankDraw draw = args.draws[t];
  if (!searched(args, s, draw)) return;
  const Row row = row_of(args, s, draw, 0, s.defined);
  const bool begins = args.shift == 24;
  const u32 prefix = begins ? 0u : draw.prefix;
  const int bin = kRankBins - 1 - thread;  // the largest keys first
  u64 mass = 0;
  u32 count = 0;
  RankBins* bins = args.bins + static_cast<long long>(blockIdx.x) * args.ranks;
  for (int rank = 0; rank < args.ranks; ++rank) {
    mass += __ldcg(&bins[rank].mass[bin]);
    count += __ldcg(&bins[rank].count[bin]);
  }
  bins[args.rank].mass[bin] = 0;
  bins[args.rank].count[bin] = 0;
  if (draw.ties != ~0u && has_prefix(args, draw.key, prefix) &&
      static_cast<int>(draw.key >> args.shift & 255u) == bin) {
    count += draw.ties;
    mass += draw.ties * row.mass(draw.key);
  }
  const u64 size = args.by_mass != 0 ? mass : count;
  u64 total;
  const u64 through = (begins ? 0 : draw.above) + sum_through<kWarps>(size, sums, total);
  u64 target = draw.target;
  if (args.by_mass == 0) {
    target = static_cast<u64>(s.top_k);
  } else if (begins) {
    target = static_cast<u64>(ceil(static_cast<double>(s.top_p) * static_cast<double>(total)));
  }
  // The lowest bin that holds anything ends the search in any case: rounding may leave the target out of reach.
  const u32 there = __ballot_sync(kAll, count > 0), reached = __ballot_sync(kAll, count > 0 && through >= target);
  if (thread % 32 == 0) {
    firsts[warp] = reached != 0 ? thread + __ffs(static_cast<int>(reached)) - 1 : kRankBins;
    lasts[warp] = there != 0 ? thread + 31 - __clz(static_cast<int>(there)) : -1;
  }
  __syncthreads();
  int first = kRankBins, last = -1;
  for (int w = 0; w < kWarps; ++w) {
    first = firsts[w] < first ? firsts[w] : first;
    last = lasts[w] > last ? lasts[w] : last;
  }
  if (thread != (first < kRankBins ? first : last)) return;
  RankDraw next = draw;
  next.above = through - size;
  next.target = target;
  next.prefix = prefix | static_cast<u32>(bin) << args.shift;
  if (args.shift == 0) {
    // All that are left have one key: how many of them are needed.
    const u64 each = args.by_mass != 0 ? row.mass(next.prefix) : 1;
    const u64 missing = target > next.above ? target - next.above : 0;
    u64 ties = each == 0 ? count : (missing + each - 1) / each;
    ties = ties < 1 ? 1 : ties;
    next.key = next.prefix;
    next.ties = ties < count ? static_cast<u32>(ties) : count;
  }
  args.draws[t] = next;
}

// Grid: splits x drawn rows.
__global__ void __launch_bounds__(kSampleThreads) sample_shares(const __grid_constant__ RankSampleArgs args) {
  using namespace rank_detail;
  __shared__ u64 masses[kSampleWarps];
  __shared__ u32 ties[kSampleWarps];
  ptx::grid_launch_dependents();
  ptx::grid_dependency_wait();
  const int thread = static_cast<int>(threadIdx.x), t = args.drawn[blockIdx.y];
  const long long place = static_cast<long long>(blockIdx.y) * args.ranks + args.rank;
  if (thread == 0 && blockIdx.x == 0) args.taken[place] = {-1, {}};
  const SampleRow& s = args.samples[t];
  const RankDraw draw = args.draws[t];
  if (draw.drawn == 0) return;
  const Columns columns = columns_of(args, s);
  const Row row = row_of(args, s, draw, 0, s.defined);
  u64 mass = 0;
  u32 tied = 0;
  for (int token = columns.begin + thread; token < columns.end; token += kSampleThreads) {
    const u32 key = row.key(token);
    if (key > draw.key) mass += row.mass_from(key, s.min_p);
    tied += key == draw.key ? 1u : 0u;
  }
  mass = sample_detail::warp_sum(mass);
  tied = sample_detail::warp_sum(tied);
  if (thread % 32 == 0) {
    masses[thread / 32] = mass;
    ties[thread / 32] = tied;
  }
  __syncthreads();
  if (thread != 0) return;
  for (int w = 1; w < kSampleWarps; ++w) {
    mass += masses[w];
    tied += ties[w];
  }
  args.shares[place * args.splits + blockIdx.x] = {mass, tied, 0};
}

// Grid: splits x drawn rows. The token at which the sum of masses exceeds the draw's share is in one CTA's columns.
// Two CTAs per SM: for three it would spill.
__global__ void __launch_bounds__(kSampleThreads, 2) sample_take(const __grid_constant__ RankSampleArgs args) {
  using namespace rank_detail;
  __shared__ sample_detail::Scratch scratch;
  __shared__ u64 mine[3];  // of this CTA: the mass before it, its own, and ties that count
  ptx::grid_launch_dependents();
  ptx::grid_dependency_wait();
  const int thread = static_cast<int>(threadIdx.x);
  const int t = args.drawn[blockIdx.y];
  const SampleRow& s = args.samples[t];
  const RankDraw draw = args.draws[t];
  if (draw.drawn == 0) return;
  // All CTAs of all ranks, in the order of their columns: a thread each.
  const long long place = static_cast<long long>(blockIdx.y) * args.ranks;
  const int count = args.ranks * args.splits, own = args.rank * args.splits + static_cast<int>(blockIdx.x);
  SampleShare share = {};
  if (thread < count) {
    const SampleShare& there = args.shares[place * args.splits + thread];
    share = {__ldcg(&there.mass), __ldcg(&there.ties), 0};
  }
  u64 total;
  const u64 tied = sum_through(share.ties, scratch.sums, total) - share.ties;
  const u64 left_ties = tied < draw.ties ? draw.ties - tied : 0;
  const u64 ties = left_ties < share.ties ? left_ties : share.ties;
  const Columns columns = columns_of(args, s);
  const Row row = row_of(args, s, draw, columns.begin, columns.end > columns.begin ? columns.end - columns.begin : 0);
  const u64 mass = share.mass + (ties > 0 ? ties * row.mass_from(draw.key, s.min_p) : 0);
  const u64 before = sum_through(mass, scratch.sums, total) - mass;
  if (thread == own) {
    mine[0] = before;
    mine[1] = mass;
    mine[2] = ties;
  }
  __syncthreads();
  u64 left = sample_detail::drawn_mass(s, total);
  if (left < mine[0] || left >= mine[0] + mine[1]) return;  // another CTA's
  left -= mine[0];

  const Cut cut = {draw.key, static_cast<u32>(mine[2])};
  sample_detail::take_from(row, cut, s.min_p, left, scratch,
                           [&](int token) { args.taken[place + args.rank].token = columns.begin + token; });
}

// Grid: drawn rows.
__global__ void __launch_bounds__(kRankJoinThreads) sample_end(const __grid_constant__ RankSampleArgs args) {
  ptx::grid_launch_dependents();
  ptx::grid_dependency_wait();
  const int lane = static_cast<int>(threadIdx.x), t = args.drawn[blockIdx.x];
  if (lane >= args.ranks || args.draws[t].drawn == 0) return;
  const int token = __ldcg(&args.taken[static_cast<long long>(blockIdx.x) * args.ranks + lane].token);
  if (token >= 0) args.tokens[t] = args.told[t] = token;
}

// Grid: splits x rows that ask for log-probabilities. As many tokens as the row wants, since all may be in one CTA's
// columns.
__global__ void __launch_bounds__(kSampleThreads, 1) sample_report(const __grid_constant__ RankSampleArgs args) {
  using namespace rank_detail;
  FOURFOLD_DYNAMIC_SHARED(smem);
  auto& scratch = *reinterpret_cast<sample_detail::SearchScratch*>(smem);
  u32& listed = scratch.words[3];
  ptx::grid_launch_dependents();
  ptx::grid_dependency_wait();
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int t = args.reported[blockIdx.y], chosen = __ldcg(args.tokens + t);
  if (chosen < 0) return;
  const SampleRow& s = args.samples[t];
  const Columns columns = columns_of(args, s);
  const int count = columns.end > columns.begin ? columns.end - columns.begin : 0;
  Row row = row_of(args, s, args.draws[t], columns.begin, count);
  row.inverse_temperature = 1.0f;
  u64 sum = 0;
  for (int token = thread; token < count; token += kSampleThreads) sum += row.mass(row.key(token));
  sum = sample_detail::warp_sum(sum);
  if (lane == 0) scratch.sums[warp] = sum;
  if (thread == 0) listed = 0;
  __syncthreads();
  const long long place = static_cast<long long>(blockIdx.y) * args.ranks + args.rank;
  RankReport& report = args.reports[place * args.splits + blockIdx.x];
  const int wanted = s.logprobs < count ? s.logprobs : count;
  if (thread == 0) {
    u64 mass = 0;
    for (int w = 0; w < kSampleWarps; ++w) mass += scratch.sums[w];
    report.mass = mass;
    report.chosen = chosen >= columns.begin && chosen < columns.end ? __ldcg(row.logits + chosen - columns.begin)
                                                                    : sample_detail::masked_logit();
    report.count = wanted;
  }
  if (wanted == 0) return;
  sample_detail::Team self = {nullptr, 1, 0, 0};
  const Cut all = {0, ~0u};
  const u32 largest = sample_detail::key_of(row.largest);
  const u64 target = static_cast<u64>(wanted);
  const sample_detail::Reached reached =
      sample_detail::scan(self, row, 0, count, largest, sample_detail::Range{}, all, false, scratch)
          .reach(false, target, scratch);
  const Cut cut = sample_detail::refine(self, row, 0, count, largest, reached, all, false, target, scratch);
  const sample_detail::Segment segment = sample_detail::segment_of(warp, count);
  const u32 before = sample_detail::ties_before_warp(row, cut, segment, scratch);
  sample_detail::for_cut(row, cut, segment, before, [&](int token, u32 key, bool in) {
    if (!in) return;
    const u32 at = atomicAdd(&listed, 1u);
    report.values[at] = moe::key_value(key);
    report.tokens[at] = columns.begin + token;
  });
}

// Grid: rows that ask for log-probabilities. Each thread has the report of one CTA.
__global__ void __launch_bounds__(kSampleThreads) sample_tell(const __grid_constant__ RankSampleArgs args) {
  using namespace rank_detail;
  __shared__ u64 masses[kSampleWarps], firsts[kSampleWarps];
  __shared__ float values[kMostLogprobs], logit;
  __shared__ int found[kMostLogprobs];
  ptx::grid_launch_dependents();
  ptx::grid_dependency_wait();
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int t = args.reported[blockIdx.x], chosen = __ldcg(args.tokens + t), count = args.ranks * args.splits;
  if (chosen < 0) return;
  const SampleRow& s = args.samples[t];
  const bool there = thread < count;
  const RankReport& report = args.reports[static_cast<long long>(blockIdx.x) * count + (there ? thread : 0)];
  const u64 mass = sample_detail::warp_sum(there ? __ldcg(&report.mass) : u64{0});
  if (lane == 0) masses[warp] = mass;
  if (const float x = __ldcg(&report.chosen); there && sample_detail::is_finite(x)) logit = x;

  // The most probable ones, one after the other. Of two with the same key the first one comes first: a candidate is
  // its key above its token's complement, 0 where there is none.
  const int candidates = there ? __ldcg(&report.count) : 0;
  u32 taken = 0;
  u64 best = 0;
  int best_at = 0;
  const auto look = [&] {
    best = 0;
    for (int i = 0; i < candidates; ++i) {
      const u64 candidate = static_cast<u64>(moe::order_key(__ldcg(&report.values[i]))) << 32 |
                            ~static_cast<u32>(__ldcg(&report.tokens[i]));
      if ((taken >> i & 1u) != 0 || candidate < best) continue;
      best = candidate;
      best_at = i;
    }
  };
  look();
  const int wanted = s.logprobs < s.defined ? s.logprobs : s.defined;
  for (int i = 0; i < wanted; ++i) {
    u64 first = best;
#pragma unroll
    for (int d = 16; d > 0; d /= 2) {
      const u64 other = __shfl_xor_sync(kAll, first, d);
      first = other > first ? other : first;
    }
    if (lane == 0) firsts[warp] = first;
    __syncthreads();
    for (int w = 0; w < kSampleWarps; ++w) first = firsts[w] > first ? firsts[w] : first;
    if (best == first && best != 0) {  // one thread's: no two have a token
      values[i] = moe::key_value(static_cast<u32>(best >> 32));
      found[i] = static_cast<int>(~static_cast<u32>(best));
      taken |= 1u << best_at;
      look();
    }
    __syncthreads();
  }
  __syncthreads();

  u64 total = 0;
  for (int w = 0; w < kSampleWarps; ++w) total += masses[w];
  const float largest = args.draws[t].largest;
  const float log_total =
      static_cast<float>(log(static_cast<double>(total) / static_cast<double>(sample_detail::kUnit)));
  int* tokens = args.logprob_tokens + static_cast<long long>(t) * (1 + kMostLogprobs);
  float* logprobs = args.logprobs + static_cast<long long>(t) * (1 + kMostLogprobs);
  if (thread == 0) {
    tokens[0] = chosen;
    logprobs[0] = logit - largest - log_total;
  }
  if (thread >= wanted) return;
  // Zeros of both signs have keys of their own and are one value.
  int place = 0;
  for (int i = 0; i < wanted; ++i) {
    const bool first = values[i] > values[thread] || (values[i] == values[thread] && found[i] < found[thread]);
    place += first ? 1 : 0;
  }
  tokens[1 + place] = found[thread];
  logprobs[1 + place] = values[thread] - largest - log_total;
}

}  // namespace fourfold::step
