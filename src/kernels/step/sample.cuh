// Choosing tokens from logits (sample_args.h). The order of steps is that of ops/sampling.h.
#pragma once

#include "kernels/step/sample_search.cuh"

namespace fourfold::step {

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

namespace sample_detail {

// All that a CTA shares.
struct Shared {
  SearchScratch scratch;
  u64 own_mass;    // of a row that reports and has one CTA: SampleState::mass
  u64 drawn_mass;  // what a draw's top_p is of; 0: of what top_k leaves
  u32 listed;
  int token;
  u32 keys[kSampleCandidates];  // in any order
  int tokens[kSampleCandidates];
  u32 sorted_keys[kSampleCandidates];  // the largest first, ties to the lower token
  int sorted_tokens[kSampleCandidates];
  u64 masses[kSampleCandidates];
};
static_assert(sizeof(Shared) <= kSampleSmem);

// The tokens whose distance is at most `furthest`, to the row's list. There is room for them.
__device__ __forceinline__ void list(const Team& team, const Row& row, int begin, int end, u32 largest, u32 furthest,
                                     Shared& shared) {
  for_keys(row, begin, end, [&](int token, u32 key) {
    if (key <= kMaskedKey || largest - key > furthest) return;
    const u32 at = atomicAdd(team.alone() ? &shared.listed : &team.state->listed, 1u);
    if (team.alone()) {
      shared.keys[at] = key;
      shared.tokens[at] = token;
    } else {
      team.state->list[at] = {key, token};
    }
  });
}

// Of which mass top_p is reached.
__device__ __forceinline__ u64 share_of(const SampleRow& s, u64 total) {
  return static_cast<u64>(ceil(static_cast<double>(s.top_p) * static_cast<double>(total)));
}

// Where more tokens are left than can be sorted: the cut of both limits, the first of which is reached in `reached`;
// and how often the CTAs have met then. Not inlined, as it is seldom called and would cost registers.
struct FoundCut {
  Cut cut;
  int met;
};
__device__ inline __attribute__((noinline)) FoundCut find_cut(Team team, Row row, int begin, int end, u32 largest,
                                                              Reached reached, const SampleRow& s, bool by_count,
                                                              Shared& shared) {
  const Cut all = {0, ~0u};
  const u64 first = by_count ? static_cast<u64>(s.top_k) : share_of(s, shared.drawn_mass);
  Cut cut = refine(team, row, begin, end, largest, reached, all, !by_count, first, shared.scratch);
  if (by_count && s.top_p < 1.0f) {
    const Scan left = scan(team, row, begin, end, largest, Range{}, cut, true, shared.scratch);
    const u64 share = share_of(s, left.masses);
    cut = refine(team, row, begin, end, largest, left.reach(true, share, shared.scratch), cut, true, share,
                 shared.scratch);
  }
  return {cut, team.met};
}

// The first `count` tokens of all, the largest first, to the list of a CTA by itself.
__device__ __forceinline__ void list_first(const Row& row, u32 largest, int count, Shared& shared) {
  Team self = {nullptr, 1, 0, 0};
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const Cut all = {0, ~0u};
  const u64 target = static_cast<u64>(count);
  const Reached reached =
      scan(self, row, 0, row.count, largest, Range{}, all, false, shared.scratch).reach(false, target, shared.scratch);
  const Cut cut = refine(self, row, 0, row.count, largest, reached, all, false, target, shared.scratch);
  if (threadIdx.x == 0) shared.listed = 0;
  const Segment segment = segment_of(warp, row.count);
  const u32 before = ties_before_warp(row, cut, segment, shared.scratch);
  for_cut(row, cut, segment, before, [&](int token, u32 key, bool in) {
    if (!in) return;
    const u32 at = atomicAdd(&shared.listed, 1u);
    shared.keys[at] = key;
    shared.tokens[at] = token;
  });
  __syncthreads();
}

// Sorts what is listed: each finds the places of its own. How many there are.
__device__ __forceinline__ int sort(const Team& team, Shared& shared) {
  const int thread = static_cast<int>(threadIdx.x);
  const int count = static_cast<int>(team.alone() ? shared.listed : __ldcg(&team.state->listed));
  if (!team.alone()) {
    for (int i = thread; i < count; i += kSampleThreads) {
      shared.keys[i] = __ldcg(&team.state->list[i].key);
      shared.tokens[i] = __ldcg(&team.state->list[i].token);
    }
    __syncthreads();
  }
  for (int i = thread; i < count; i += kSampleThreads) {
    const u32 key = shared.keys[i];
    const int token = shared.tokens[i];
    int place = 0;
    for (int k = 0; k < count; ++k) {
      const u32 other = shared.keys[k];
      place += other > key || (other == key && shared.tokens[k] < token) ? 1 : 0;
    }
    shared.sorted_keys[place] = key;
    shared.sorted_tokens[place] = token;
  }
  __syncthreads();
  return count;
}

// A draw among the sorted: the first top_k of them (0: all), then top_p of these, or of shared.drawn_mass, then min_p.
// All threads; the token is in shared.token.
__device__ __forceinline__ void draw_sorted(const Row& row, const SampleRow& s, int count, int top_k, Shared& shared) {
  const int thread = static_cast<int>(threadIdx.x);
  if (top_k > 0 && top_k < count) count = top_k;
  u64 own[2] = {0, 0}, total;
  const int first = 2 * thread;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (first + i < count) own[i] = row.mass(shared.sorted_keys[first + i]);
  }
  const u64 before = sum_through(own[0] + own[1], shared.scratch.sums, total) - own[0] - own[1];
  u64 target = ~u64{0};
  if (s.top_p < 1.0f) {
    target = share_of(s, shared.drawn_mass > 0 ? shared.drawn_mass : total);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (first + i >= count) break;
    const bool in = before + (i > 0 ? own[0] : 0) < target;  // those before it do not suffice
    own[i] = in ? row.mass_from(shared.sorted_keys[first + i], s.min_p) : 0;
    shared.masses[first + i] = own[i];
  }
  sum_through(own[0] + own[1], shared.scratch.sums, total);  // and a barrier behind what was stored
  const u64 left = drawn_mass(s, total);
  for (int i = thread; i < count; i += kSampleThreads) {
    const u64 mine = shared.masses[i];
    if (mine == 0) continue;
    const int token = shared.sorted_tokens[i];
    u64 below = 0;  // of tokens before it
    for (int k = 0; k < count; ++k) below += shared.sorted_tokens[k] < token ? shared.masses[k] : u64{0};
    if (left >= below && left < below + mine) shared.token = token;
  }
  __syncthreads();
}

// A draw from all tokens of the cut. Whoever comes last makes it (true; the token is in shared.token).
__device__ inline __attribute__((noinline)) bool draw_cut(Team team, Row row, const SampleRow& s, int begin, int end,
                                                          int length, Cut cut, Shared& shared) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  Scratch& scratch = shared.scratch;
  u64 mass = 0;
  u32 ties = 0;
  for_keys(row, begin, end, [&](int, u32 key) {
    if (key > cut.key) mass += row.mass_from(key, s.min_p);
    ties += key == cut.key ? 1u : 0u;
  });
  mass = warp_sum(mass);
  ties = warp_sum(ties);
  if (lane == 0) {
    scratch.sums[thread / 32] = mass;
    scratch.ties[thread / 32] = ties;
  }
  __syncthreads();
  if (thread == 0) {
    for (int w = 1; w < kSampleWarps; ++w) {
      mass += scratch.sums[w];
      ties += scratch.ties[w];
    }
    scratch.values[0] = mass;
    scratch.words[1] = ties;
    if (!team.alone()) team.state->shares[team.cta] = {mass, ties, 0};
  }
  if (!team.last(scratch)) return false;
  // A thread for each CTA, in the order of their columns.
  SampleShare share = {};
  if (team.alone()) {
    if (thread == 0) share = {scratch.values[0], scratch.words[1], 0};
  } else if (thread < team.ctas) {
    share = {__ldcg(&team.state->shares[thread].mass), __ldcg(&team.state->shares[thread].ties), 0};
  }
  u64 total;
  const u64 tied = sum_through(share.ties, scratch.sums, total) - share.ties;
  const u64 left_ties = tied < cut.ties ? cut.ties - tied : 0;
  const u64 own_ties = left_ties < share.ties ? left_ties : share.ties;
  const u64 own = share.mass + (own_ties > 0 ? own_ties * row.mass_from(cut.key, s.min_p) : 0);
  const u64 before = sum_through(own, scratch.sums, total) - own;
  const u64 left = drawn_mass(s, total);
  if (left >= before && left < before + own) {
    scratch.words[0] = static_cast<u32>(thread);
    scratch.words[1] = static_cast<u32>(own_ties);
    scratch.values[0] = left - before;
  }
  __syncthreads();
  // In whose columns it is.
  const int from = static_cast<int>(scratch.words[0]) * length;
  const int to = from + length < s.defined ? from + length : s.defined;
  const Row part = {row.logits + from, to - from, row.largest, row.inverse_temperature};
  const Cut part_cut = {cut.key, scratch.words[1]};
  const u64 part_left = scratch.values[0];
  __syncthreads();
  take_from(part, part_cut, s.min_p, part_left, scratch, [&](int token) { shared.token = from + token; });
  __syncthreads();
  return true;
}

// Log-probabilities of the row's token and of the first `count` of all, of a distribution of that mass.
__device__ inline __attribute__((noinline)) void report(const SampleArgs& args, long long t, int token, int count,
                                                        u64 mass, u32 largest, bool sorted, Shared& shared) {
  const int thread = static_cast<int>(threadIdx.x);
  const SampleRow& s = args.samples[t];
  // The model's own: nothing is adjusted in such rows.
  const Row row = {args.logits + s.row * args.stride, s.defined, moe::key_value(largest), 1.0f};
  const float log_total = static_cast<float>(log(static_cast<double>(mass) / static_cast<double>(kUnit)));
  const auto logprob = [&](float logit) { return logit - row.largest - log_total; };
  float* values = args.logprobs + s.place * (1 + kMostLogprobs);
  int* tokens = args.logprob_tokens + s.place * (1 + kMostLogprobs);
  if (thread == 0) {
    tokens[0] = token;
    values[0] = logprob(__ldcg(row.logits + token));
  }
  if (count > 0 && !sorted) {  // too many that are alike: this CTA looks for them by itself
    list_first(row, largest, count, shared);
    sort(Team{nullptr, 1, 0, 0}, shared);
  }
  if (thread < count) {
    tokens[1 + thread] = shared.sorted_tokens[thread];
    values[1 + thread] = logprob(moe::key_value(shared.sorted_keys[thread]));
  }
}

}  // namespace sample_detail

// Grid: splits x rows.
//
// The CTAs of a row have its columns. They meet where they have told each other the largest logit, and again behind
// every round of the search for a limit (Range). The first round mostly suffices: where no more tokens are left than
// can be sorted, all of them are listed, and the CTA that comes last does the rest.
__global__ void __launch_bounds__(kSampleThreads, 1) sample_tokens(const __grid_constant__ SampleArgs args) {
  using namespace sample_detail;
  FOURFOLD_DYNAMIC_SHARED(smem);
  Shared& shared = *reinterpret_cast<Shared*>(smem);
  ptx::grid_launch_dependents();
  ptx::grid_dependency_wait();
  SearchScratch& scratch = shared.scratch;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const long long t = blockIdx.y;
  const SampleRow& s = args.samples[t];
  Team team = {args.splits > 1 ? args.states + t : nullptr, args.splits, static_cast<int>(blockIdx.x), 0};
  const int length = ((s.defined + args.splits - 1) / args.splits + 3) / 4 * 4;
  const int begin = team.cta * length < s.defined ? team.cta * length : s.defined;
  const int end = begin + length < s.defined ? begin + length : s.defined;
  const bool drawn = s.temperature != 0.0f, reported = s.logprobs >= 0 && args.logprobs != nullptr;

  // ---- the largest, and what is wrong
  const bool adjust = adjusts(s);
  float* logits = args.logits + s.row * args.stride;
  float* left = adjust ? args.logits + s.adjusted * args.stride : logits;  // what is drawn from
  u64 best = 0;
  u32 bad = 0;
  const auto look = [&](int token, float x) {
    const u64 candidate = static_cast<u64>(key_of(x)) << 32 | ~static_cast<u32>(token);
    best = candidate > best ? candidate : best;
  };
  if (adjust) {
    // The next one's logit and count are under way.
    const int first = begin + thread;
    float next = first < end ? __ldcg(logits + first) : 0.0f;
    int next_count = first < end ? count_of(args, s, first) : 0;
#pragma unroll 1
    for (int token = first; token < end; token += kSampleThreads) {
      const float x = next;
      const int count = next_count;
      if (const int after = token + kSampleThreads; after < end) {
        next = __ldcg(logits + after);
        next_count = count_of(args, s, after);
      }
      bad |= is_finite(x) ? 0u : 1u;
      const float other = adjusted(args, s, token, x, count);
      if (drawn) left[token] = other;
      look(token, other);
    }
  } else {
    for_logits(logits, begin, end, [&](int token, float x) {
      bad |= is_finite(x) ? 0u : 1u;
      look(token, x);
    });
  }
#pragma unroll
  for (int d = 16; d > 0; d /= 2) {
    const u64 other = __shfl_xor_sync(kAll, best, d);
    best = other > best ? other : best;
    bad |= __shfl_xor_sync(kAll, bad, d);
  }
  if (lane == 0) {
    scratch.sums[thread / 32] = best;
    scratch.ties[thread / 32] = bad;
  }
  __syncthreads();
#pragma unroll 4
  for (int w = 0; w < kSampleWarps; ++w) {
    best = scratch.sums[w] > best ? scratch.sums[w] : best;
    bad |= scratch.ties[w];
  }
  if (!team.alone()) {
    if (thread == 0) {
      atomicMax(&team.state->best, best);
      if (bad != 0) atomicOr(&team.state->bad, bad);
    }
    for (int i = team.cta * kSampleThreads + thread; i < kSampleBins; i += team.ctas * kSampleThreads) {
      team.state->bins[1].count[i] = 0;
      team.state->bins[1].mass[i] = 0;
    }
  }
  if (thread == 0) {
    shared.listed = 0;
    shared.own_mass = shared.drawn_mass = 0;
  }
  if (drawn || reported) {
    team.meet();
  } else if (!team.last(scratch)) {
    return;
  }
  if (!team.alone()) {
    best = __ldcg(&team.state->best);
    bad = __ldcg(&team.state->bad);
  }
  const u32 largest = static_cast<u32>(best >> 32);
  int token = static_cast<int>(~static_cast<u32>(best));
  if (s.given >= 0) token = s.given;
  if (s.given == kChosenBefore) token = args.tokens[s.place];
  if (bad != 0 || largest <= kMaskedKey) token = bad != 0 ? kNotFinite : kAllMasked;
  const Row row = {left, s.defined, moe::key_value(largest), 1.0f / fmaxf(s.temperature, 1e-30f)};
  const Row raw = {logits, s.defined, row.largest, 1.0f};  // the model's own

  // ---- a draw
  const int reports = reported ? (s.logprobs < s.defined ? s.logprobs : s.defined) : 0;
  bool reports_sorted = false;
  if (token >= 0 && (drawn || reported)) {
    if (reported) {
      u64 mass = 0;
      for_keys(raw, begin, end, [&](int, u32 key) { mass += raw.mass(key); });
      mass = warp_sum(mass);
      if (lane == 0) atomicAdd(team.alone() ? &shared.own_mass : &team.state->mass, mass);
    }
    const bool by_count = drawn && s.top_k > 0 && s.top_k < s.defined, by_mass = drawn && s.top_p < 1.0f;
    const Cut all = {0, ~0u};
    Cut cut = all;
    bool draws_sorted = false;
    if (by_count || by_mass || reports > 0) {
      const Scan first = scan(team, row, begin, end, largest, Range{}, all, by_mass && !by_count, scratch);
      u32 furthest = 0;  // 1 + the last bin whose tokens are listed
      const auto wants = [&](const Reached& reached) {
        if (reached.count_before + reached.count > kSampleCandidates) return false;
        furthest = reached.bin + 1 > furthest ? reached.bin + 1 : furthest;
        return true;
      };
      if (reports > 0) reports_sorted = wants(first.reach(false, static_cast<u64>(reports), scratch));
      if (by_count || by_mass) {
        const u64 target = by_count ? static_cast<u64>(s.top_k) : share_of(s, first.masses);
        if (!by_count && thread == 0) shared.drawn_mass = first.masses;
        const Reached reached = first.reach(!by_count, target, scratch);  // behind barriers
        draws_sorted = wants(reached);
        if (!draws_sorted) {
          const FoundCut found = find_cut(team, row, begin, end, largest, reached, s, by_count, shared);
          cut = found.cut;
          team.met = found.met;
        }
      }
      if (furthest > 0) {
        const Range range;
        const u32 distance = furthest == kSampleBins ? ~0u : (furthest << range.shift) - 1;
        list(team, row, begin, end, largest, distance, shared);
      }
    }
    const bool from_cut = drawn && !draws_sorted;
    if (!(from_cut ? draw_cut(team, row, s, begin, end, length, cut, shared) : team.last(scratch))) return;
    const int sorted = draws_sorted || reports_sorted ? sort(team, shared) : 0;
    if (draws_sorted) draw_sorted(row, s, sorted, by_count ? s.top_k : 0, shared);
    if (drawn) token = shared.token;
  } else if (drawn || reported) {
    if (!team.last(scratch)) return;
  }

  // ---- this CTA is the last one
  if (thread == 0 && s.given != kChosenBefore) args.tokens[s.place] = args.told[s.place] = token;
  if (reported && token >= 0) {
    report(args, t, token, reports, team.alone() ? shared.own_mass : __ldcg(&team.state->mass), largest, reports_sorted,
           shared);
  }
  if (team.alone()) return;
  __syncthreads();  // all of it is read
  if (thread != 0) return;
  team.state->best = team.state->mass = 0;
  team.state->bad = team.state->listed = 0;
  team.state->arrived = 0;
}

}  // namespace fourfold::step
