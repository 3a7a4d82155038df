// Choosing tokens on the device (kernels/step/sample.cuh), run by the host driver, against the literal definition in
// ops/sampling.h in double precision: ties, masks, penalties, every limit, draws, log-probabilities, drafts.
#include <gtest/gtest.h>

#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstring>
#include <numeric>
#include <thread>

#include "base/random.h"
#include "cuda/backend/memory.h"
#include "cuda/backend/rank_choice.h"
#include "cuda/backend/sources.h"
#include "hostcuda/testing.h"
#include "kernels/step/sample_args.h"
#include "ops/sampling.h"

namespace fourfold::hostcuda {
namespace {

using cuda::Buffer;
using step::SampleRow;

struct Problem {
  int vocabulary = 0;
  std::vector<float> logits;
  std::vector<SampleRow> rows;
  std::vector<step::Bias> biases;
  std::vector<int> banned, counts, drafts;
  std::vector<unsigned> masks;

  int words() const { return (vocabulary + 31) / 32; }
  SampleRow plain() const {
    SampleRow s = {};
    s.temperature = 1;
    s.top_p = 1;
    s.repetition_penalty = 1;
    s.defined = vocabulary;
    s.mask = s.counts = s.logprobs = -1;
    s.given = step::kToBeChosen;
    return s;
  }
};

struct Chosen {
  std::vector<int> tokens, logprob_tokens;
  std::vector<float> logprobs;
};

// At least one element, so that it has an address.
template <typename T>
Buffer upload(const cuda::Device& device, const cuda::Stream& stream, std::vector<T> values, const char* what) {
  values.resize(std::max<size_t>(values.size(), 1));
  Buffer buffer(device, values.size() * sizeof(T), what);
  buffer.upload(stream, values);
  return buffer;
}

struct DeviceSampler {
  cuda::Device device;
  cuda::Stream stream{device};
  jit::KernelStore store{kernel_store()};
  cuda::KernelLoader loader{device, store, {}};
  std::vector<cuda::Kernel> kernels = loader.load(cuda::sample_source());
  std::vector<cuda::Kernel> rank_kernels = loader.load(cuda::rank_sample_source());

  // `splits`: CTAs of a row, of which as many rows are chosen at once as there is room for.
  Chosen choose(const Problem& p, int splits = 3) {
    const auto rows = static_cast<int>(p.rows.size());
    std::vector<SampleRow> numbered = p.rows;
    for (int i = 0; i < rows; ++i) {
      SampleRow& s = numbered[static_cast<size_t>(i)];
      s.row = s.adjusted = s.place = i;
    }
    const auto n = static_cast<size_t>(rows);
    Buffer logits = upload(device, stream, p.logits, "logits");
    const Buffer samples = upload(device, stream, numbered, "rows"),
                 biases = upload(device, stream, p.biases, "biases"),
                 banned = upload(device, stream, p.banned, "banned"), masks = upload(device, stream, p.masks, "masks"),
                 counts = upload(device, stream, p.counts, "counts"),
                 drafts = upload(device, stream, p.drafts, "drafts"), tokens(device, n * 4, "tokens"),
                 told(device, n * 4, "tokens for the host"), logprobs(device, n * 21 * 4, "logprobs"),
                 ids(device, n * 21 * 4, "ids");
    const int at_once = std::min(splits > 1 ? device.info().sms / splits : rows, rows);
    Buffer states(device, static_cast<size_t>(at_once) * sizeof(step::SampleState), "states");
    states.fill(stream, 0);
    step::SampleArgs args = {};
    args.logits = logits.as<float>();
    args.stride = p.vocabulary;
    args.splits = splits;
    args.biases = biases.as<step::Bias>();
    args.banned = banned.as<int>();
    args.masks = masks.as<unsigned>();
    args.mask_words = p.words();
    args.counts = counts.as<int>();
    args.counts_stride = p.vocabulary;
    args.drafts = drafts.as<int>();
    args.states = states.as<step::SampleState>();
    args.tokens = tokens.as<int>();
    args.told = told.as<int>();
    args.logprob_tokens = ids.as<int>();
    args.logprobs = logprobs.as<float>();
    for (int first = 0; first < rows; first += at_once) {
      args.rows = std::min(at_once, rows - first);
      args.samples = samples.as<SampleRow>() + first;
      cuda::launch(stream, kernels[cuda::kSampleTokens],
                   {static_cast<unsigned>(splits), static_cast<unsigned>(args.rows)}, cuda::Overlap::kProgrammatic,
                   args);
    }
    EXPECT_EQ(told.download<int>(stream, n), tokens.download<int>(stream, n));
    return {tokens.download<int>(stream, n), ids.download<int>(stream, n * 21),
            logprobs.download<float>(stream, n * 21)};
  }
};

// Ranks that choose together, each on a thread and a stream of its own, with its columns between two of the edges and
// nothing that could be used in the others. What each of them found.
std::vector<Chosen> choose_by_ranks(DeviceSampler& sampler, const Problem& p, const std::vector<int>& edges) {
  const auto ranks = static_cast<std::ptrdiff_t>(edges.size()) - 1;
  std::vector<Chosen> found(static_cast<size_t>(ranks));
  std::vector<ops::Tensor> shown(static_cast<size_t>(ranks));
  std::barrier here(ranks);
  const auto choose = [&](size_t rank) {
    const cuda::Stream stream(sampler.device);
    const auto n = p.rows.size();
    std::vector<float> own(p.logits.size(), NAN);
    std::vector<SampleRow> rows = p.rows;
    std::vector<int> drawn, reported;
    for (size_t row = 0; row < n; ++row) {
      rows[row].row = rows[row].adjusted = rows[row].place = static_cast<int>(row);
      if (rows[row].temperature != 0) drawn.push_back(static_cast<int>(row));
      if (rows[row].logprobs >= 0) reported.push_back(static_cast<int>(row));
      const auto at = static_cast<std::ptrdiff_t>(row) * p.vocabulary;
      std::copy(p.logits.begin() + at + edges[rank], p.logits.begin() + at + edges[rank + 1],
                own.begin() + at + edges[rank]);
    }
    const cuda::RankChoice choice(sampler.device, stream, sampler.rank_kernels, static_cast<int64_t>(rank), ranks,
                                  static_cast<int64_t>(n), p.vocabulary);
    const Buffer logits = upload(sampler.device, stream, own, "logits"),
                 samples = upload(sampler.device, stream, rows, "rows"),
                 biases = upload(sampler.device, stream, p.biases, "biases"),
                 banned = upload(sampler.device, stream, p.banned, "banned"),
                 masks = upload(sampler.device, stream, p.masks, "masks"),
                 counts = upload(sampler.device, stream, p.counts, "counts"),
                 drafts = upload(sampler.device, stream, p.drafts, "drafts"),
                 numbers = upload(sampler.device, stream, drawn, "drawn"),
                 asked = upload(sampler.device, stream, reported, "reported"), tokens(sampler.device, n * 4, "tokens"),
                 told(sampler.device, n * 4, "tokens for the host"), logprobs(sampler.device, n * 21 * 4, "logprobs"),
                 ids(sampler.device, n * 21 * 4, "ids");
    step::SampleArgs args = {};
    args.logits = logits.as<float>();
    args.stride = p.vocabulary;
    args.rows = static_cast<int>(n);
    args.samples = samples.as<SampleRow>();
    args.biases = biases.as<step::Bias>();
    args.banned = banned.as<int>();
    args.masks = masks.as<unsigned>();
    args.mask_words = p.words();
    args.counts = counts.as<int>();
    args.counts_stride = p.vocabulary;
    args.drafts = drafts.as<int>();
    args.tokens = tokens.as<int>();
    args.told = told.as<int>();
    args.logprob_tokens = ids.as<int>();
    args.logprobs = logprobs.as<float>();
    const auto exchange = [&](const ops::Tensor& part, const ops::Tensor& all) {
      EXPECT_EQ(part.f32(), all.f32() + static_cast<int64_t>(rank) * part.cols);
      stream.synchronize();
      shown[rank] = part;
      here.arrive_and_wait();
      for (size_t other = 0; other < shown.size(); ++other) {
        EXPECT_EQ(shown[other].cols, part.cols);
        for (int64_t row = 0; row < all.rows && other != rank; ++row) {
          float* to = const_cast<float*>(all.f32(row)) + static_cast<int64_t>(other) * part.cols;
          std::memcpy(to, shown[other].f32(row), static_cast<size_t>(part.cols) * 4);
        }
      }
      here.arrive_and_wait();
    };
    choice.choose(args, edges[rank], edges[rank + 1] - edges[rank],
                  {rows, drawn, numbers.as<int>(), reported, asked.as<int>()}, exchange, cuda::Overlap::kProgrammatic);
    EXPECT_EQ(told.download<int>(stream, n), tokens.download<int>(stream, n));
    found[rank] = {tokens.download<int>(stream, n), ids.download<int>(stream, n * 21),
                   logprobs.download<float>(stream, n * 21)};
  };
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < found.size(); ++rank) {
    threads.emplace_back([&, rank] {
      try {
        choose(rank);
      } catch (const std::exception& e) {
        ADD_FAILURE() << "rank " << rank << ": " << e.what();
        here.arrive_and_drop();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return found;
}

// The definition, word by word. Also how far the draw was from where another token would have been drawn.
int literal_choice(const Problem& p, size_t row, double* margin) {
  const SampleRow& s = p.rows[row];
  *margin = 1;
  std::vector<float> x(p.logits.begin() + static_cast<std::ptrdiff_t>(row) * p.vocabulary,
                       p.logits.begin() + static_cast<std::ptrdiff_t>(row) * p.vocabulary + s.defined);
  constexpr float kMasked = -INFINITY;
  for (int i = 0; i < s.bias_count; ++i) {
    const step::Bias& b = p.biases[static_cast<size_t>(s.bias_first + i)];
    if (b.token < s.defined) x[static_cast<size_t>(b.token)] += b.value;
  }
  for (int i = 0; i < s.banned_count; ++i) {
    const int token = p.banned[static_cast<size_t>(s.banned_first + i)];
    if (token < s.defined) x[static_cast<size_t>(token)] = kMasked;
  }
  for (size_t t = 0; t < x.size(); ++t) {
    if (s.mask >= 0 && (p.masks[static_cast<size_t>(s.mask * p.words()) + t / 32] >> (t % 32) & 1) == 0) x[t] = kMasked;
    if (s.counts < 0 || x[t] == kMasked) continue;
    const int count = p.counts[static_cast<size_t>(s.counts) * static_cast<size_t>(p.vocabulary) + t];
    int outputs = std::max(count - 1, 0);
    for (int i = 0; i < s.draft_count; ++i) outputs += p.drafts[static_cast<size_t>(s.draft_first + i)] == int(t);
    if (count == 0 && outputs == 0) continue;
    x[t] = x[t] > 0 ? x[t] / s.repetition_penalty : x[t] * s.repetition_penalty;
    if (outputs > 0) x[t] -= s.presence_penalty + s.frequency_penalty * static_cast<float>(outputs);
  }
  std::vector<int> order(x.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int a, int b) { return x[static_cast<size_t>(a)] > x[static_cast<size_t>(b)]; });
  if (x[static_cast<size_t>(order[0])] == kMasked) return step::kAllMasked;
  if (s.temperature == 0) return order[0];
  if (s.top_k > 0 && s.top_k < s.defined) order.resize(static_cast<size_t>(s.top_k));
  const double largest = x[static_cast<size_t>(order[0])];
  const auto weight = [&](int t) { return std::exp((x[static_cast<size_t>(t)] - largest) / s.temperature); };
  double total = 0;
  for (const int t : order) total += weight(t);
  if (s.top_p < 1) {
    double sum = 0;
    size_t end = 0;
    while (end < order.size() && sum < static_cast<double>(s.top_p) * total) {
      sum += weight(order[end++]);
      *margin = std::min(*margin, std::fabs(sum / total - static_cast<double>(s.top_p)));
    }
    order.resize(end);
  }
  std::erase_if(order, [&](int t) {
    *margin = std::min(*margin, std::fabs(weight(t) - static_cast<double>(s.min_p)) + (s.min_p == 0 ? 1 : 0));
    return weight(t) < static_cast<double>(s.min_p);
  });
  std::sort(order.begin(), order.end());
  total = 0;
  for (const int t : order) total += weight(t);
  const double uniform = ops::draw_at(s.seed, s.index);
  double sum = 0;
  int chosen = -9;
  for (const int t : order) {
    sum += weight(t) / total;
    *margin = std::min(*margin, std::fabs(sum - uniform));
    if (chosen < 0 && uniform < sum) chosen = t;
  }
  return chosen;
}

// Every combination of limits, on logits with many ties or none.
Problem mixed_problem(uint64_t seed, int vocabulary, int rows, bool ties) {
  Random random(seed);
  Problem p;
  p.vocabulary = vocabulary;
  for (int i = 0; i < vocabulary * rows; ++i) {
    const double x = random.normal() * 3;
    p.logits.push_back(static_cast<float>(ties ? std::round(x) : x));
  }
  for (int i = 0; i < 2 * p.words(); ++i) p.masks.push_back(static_cast<unsigned>(random.next()));
  for (int i = 0; i < 2 * vocabulary; ++i) {
    p.counts.push_back(random.below(3) == 0 ? static_cast<int>(random.below(4)) : 0);
  }
  for (int i = 0; i < rows; ++i) {
    SampleRow s = p.plain();
    const auto one_of = [&](uint64_t n) { return random.below(n) == 0; };
    s.temperature = one_of(5) ? 0.0f : static_cast<float>(random.uniform(0.2, 1.5));
    if (one_of(2)) s.top_k = static_cast<int>(1 + random.below(static_cast<uint64_t>(one_of(2) ? 8 : vocabulary + 2)));
    if (one_of(2)) s.top_p = static_cast<float>(random.uniform(0.05, 0.99));
    if (one_of(3)) s.min_p = static_cast<float>(random.uniform(0.01, 0.4));
    s.seed = random.next();
    s.index = static_cast<long long>(random.below(1000));
    if (one_of(3)) s.defined = vocabulary - static_cast<int>(random.below(30));
    if (one_of(3)) s.mask = static_cast<int>(random.below(2));
    if (one_of(3)) {
      s.counts = static_cast<int>(random.below(2));
      s.repetition_penalty = static_cast<float>(random.uniform(0.6, 1.8));
      s.presence_penalty = static_cast<float>(random.uniform(-1, 1));
      s.frequency_penalty = static_cast<float>(random.uniform(-1, 1));
      s.draft_first = static_cast<int>(p.drafts.size());
      s.draft_count = static_cast<int>(random.below(4));
      for (int d = 0; d < s.draft_count; ++d) p.drafts.push_back(static_cast<int>(random.below(uint64_t(vocabulary))));
    }
    if (one_of(3)) {
      s.bias_first = static_cast<int>(p.biases.size());
      s.bias_count = 2;
      for (int b = 0; b < 2; ++b) {
        p.biases.push_back({static_cast<int>(random.below(uint64_t(vocabulary))), float(random.uniform(-8, 8))});
      }
    }
    if (one_of(3)) {
      s.banned_first = static_cast<int>(p.banned.size());
      s.banned_count = 3;
      for (int b = 0; b < 3; ++b) p.banned.push_back(static_cast<int>(random.below(uint64_t(vocabulary))));
    }
    p.rows.push_back(s);
  }
  return p;
}

class HostSampling : public testing::Test {
 protected:
  HostSampling() { install({}); }
};

TEST_F(HostSampling, IsTheDefinition) {
  DeviceSampler sampler;
  int close = 0, all = 0;
  for (const auto& [vocabulary, ties] : {std::pair{700, false}, {700, true}, {33, true}, {5000, false}}) {
    const Problem p = mixed_problem(static_cast<uint64_t>(vocabulary) + ties, vocabulary, 40, ties);
    const Chosen got = sampler.choose(p);
    for (size_t row = 0; row < p.rows.size(); ++row, ++all) {
      double margin = 0;
      const int want = literal_choice(p, row, &margin);
      if (margin < 1e-6) {
        ++close;  // rounding may decide
        continue;
      }
      EXPECT_EQ(got.tokens[row], want) << "vocabulary " << vocabulary << ", row " << row << ", margin " << margin;
    }
  }
  EXPECT_LT(close, all / 10);
}

// More lanes than a CTA has threads; tokens that the host knows, and one that it does not.
TEST_F(HostSampling, TokensAreCounted) {
  constexpr int kLanes = 70, kVocabulary = 11;
  Random random(8);
  DeviceSampler sampler;
  std::vector<int> counts(kLanes * kVocabulary), tokens, chosen;
  for (int& count : counts) count = static_cast<int>(random.below(4));
  for (int i = 0; i < kLanes; ++i) chosen.push_back(static_cast<int>(random.below(kVocabulary + 1)) - 1);
  std::vector<int> want = counts;
  std::vector<step::CountedLane> lanes;
  for (int lane = kLanes - 1; lane >= 0; --lane) {
    if (lane % 9 == 4) continue;
    const auto count = static_cast<int>(random.below(5));
    const int choice = random.below(2) == 0 ? -1 : static_cast<int>(random.below(kLanes));
    lanes.push_back({lane, static_cast<int>(tokens.size()), count, choice});
    const auto add = [&](int token) {
      int& c = want[static_cast<size_t>(lane * kVocabulary + token)];
      c = std::max(c, 1) + 1;
    };
    for (int i = 0; i < count; ++i) {
      tokens.push_back(static_cast<int>(random.below(kVocabulary)));
      add(tokens.back());
    }
    if (choice >= 0 && chosen[static_cast<size_t>(choice)] >= 0) add(chosen[static_cast<size_t>(choice)]);
  }
  const Buffer there = upload(sampler.device, sampler.stream, counts, "counts"),
               works = upload(sampler.device, sampler.stream, lanes, "lanes"),
               more = upload(sampler.device, sampler.stream, tokens, "tokens"),
               last = upload(sampler.device, sampler.stream, chosen, "chosen");
  const step::CountArgs args = {
      there.as<int>(), kVocabulary,   works.as<step::CountedLane>(), static_cast<int>(lanes.size()),
      more.as<int>(),  last.as<int>()};
  ASSERT_GT(lanes.size(), size_t{step::kCountThreads - 5});
  cuda::launch(sampler.stream, sampler.kernels[cuda::kSampleCount], {2}, cuda::Overlap::kProgrammatic, args);
  EXPECT_EQ(there.download<int>(sampler.stream, want.size()), want);
}

TEST_F(HostSampling, DoesNotDependOnSplitsOrOtherRows) {
  DeviceSampler sampler;
  const Problem p = mixed_problem(3, 6000, 6, true);
  const std::vector<int> tokens = sampler.choose(p, 1).tokens;
  EXPECT_EQ(sampler.choose(p, 2).tokens, tokens);
  EXPECT_EQ(sampler.choose(p, 16).tokens, tokens);
  for (size_t row = 0; row < p.rows.size(); ++row) {
    Problem alone = p;
    alone.rows = {p.rows[row]};
    const auto begin = p.logits.begin() + static_cast<std::ptrdiff_t>(row) * p.vocabulary;
    alone.logits.assign(begin, begin + p.vocabulary);
    EXPECT_EQ(sampler.choose(alone).tokens[0], tokens[row]);
  }
}

// Limits that leave more tokens than are sorted at once, among logits of all sizes, and among few that many tokens
// have: the search goes on to single keys, and ties over the edges of CTAs' columns count in the order of tokens.
TEST_F(HostSampling, ManyTokensAreLeft) {
  DeviceSampler sampler;
  constexpr int kVocabulary = 4100;
  Random random(31);
  Problem p;
  p.vocabulary = kVocabulary;
  const auto add = [&](float top_p, int top_k, float min_p, const auto& logit) {
    for (int i = 0; i < kVocabulary; ++i) p.logits.push_back(static_cast<float>(logit()));
    p.rows.push_back(p.plain());
    SampleRow& s = p.rows.back();
    s.top_p = top_p;
    s.top_k = top_k;
    s.min_p = min_p;
    s.seed = random.next();
    s.temperature = 2;
  };
  const auto flat = [&] { return random.uniform(1.0, 1.5); };
  const auto wide = [&] { return random.normal() * std::exp(random.uniform(-20, 3)); };  // zeros nearly, both signs
  const auto few = [&] { return static_cast<double>(random.below(3)) - 1; };
  const auto same = [] { return -0.25; };
  for (int i = 0; i < 2; ++i) {
    add(0.9f, 0, 0, flat);
    add(0.7f, 3000, 0, flat);
    add(1, 0, 0.9f, flat);
    add(1, 0, 0, wide);
    add(0.8f, 0, 0, wide);
    add(0.95f, 2500, 0, wide);
    add(0.9f, 0, 0.1f, few);
    add(0.5f, 3001, 0, few);
    add(1, 1500, 0, same);
    add(0.3f, 0, 0, same);
  }
  for (size_t row = 10; row < 20; ++row) p.rows[row].logprobs = row % 3 == 0 ? 20 : 3;
  const Chosen got = sampler.choose(p), alone = sampler.choose(p, 1);
  EXPECT_EQ(got.tokens, alone.tokens);
  EXPECT_EQ(sampler.choose(p, 5).tokens, alone.tokens);
  int close = 0;
  for (size_t row = 0; row < p.rows.size(); ++row) {
    double margin = 0;
    const int want = literal_choice(p, row, &margin);
    if (margin < 1e-6) {
      ++close;
    } else {
      EXPECT_EQ(got.tokens[row], want) << row << ", margin " << margin;
    }
    const float* x = &p.logits[row * kVocabulary];
    std::vector<int> order(kVocabulary);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return x[a] > x[b]; });
    for (size_t i = 0; i < static_cast<size_t>(std::max(p.rows[row].logprobs, 0)); ++i) {
      EXPECT_EQ(got.logprob_tokens[row * 21 + 1 + i], order[i]) << row << ", " << i;
      EXPECT_EQ(alone.logprob_tokens[row * 21 + 1 + i], order[i]) << row << ", " << i;
    }
  }
  EXPECT_LT(close, 4);
}

// Ranks with columns of their own: most probable tokens, ties over an edge, masks and biases, a rank without any token
// that exists, and what cannot be chosen.
TEST_F(HostSampling, RanksChooseFromTheirOwnColumns) {
  DeviceSampler sampler;
  for (const std::vector<int>& edges : {std::vector{0, 352, 700}, {0, 16, 32, 256, 688, 700}}) {
    Problem p = mixed_problem(edges.size(), 700, 12, true);
    for (size_t row = 0; row < p.rows.size(); ++row) {
      SampleRow& s = p.rows[row];
      s.temperature = 0;
      if (row % 4 == 0) s.defined = static_cast<int>(1 + row * 60);
    }
    p.rows[1].mask = 2;
    p.masks.insert(p.masks.end(), static_cast<size_t>(p.words()), 0u);
    p.rows[2].defined = 700;
    p.logits[2 * 700 + 699] = NAN;
    p.rows[3].defined = 690;
    p.logits[3 * 700 + 690] = NAN;
    const std::vector<int> tokens = sampler.choose(p).tokens;
    for (const Chosen& found : choose_by_ranks(sampler, p, edges)) EXPECT_EQ(found.tokens, tokens);
    EXPECT_EQ(tokens[1], step::kAllMasked);
    EXPECT_EQ(tokens[2], step::kNotFinite);
    for (size_t row = 3; row < p.rows.size(); ++row) {
      double margin = 0;
      EXPECT_EQ(tokens[row], literal_choice(p, row, &margin)) << row;
    }
  }
}

// Rows with every limit, masks and biases, greedy ones between them: what ranks draw is what is drawn from all logits.
TEST_F(HostSampling, RanksDrawFromTheirOwnColumns) {
  DeviceSampler sampler;
  struct Case {
    std::vector<int> edges;
    int rows;
    bool ties;
  };
  const std::vector<Case> cases = {{{0, 2320, 4301}, 3, false},
                                   {{0, 700}, 8, true},
                                   {{0, 352, 700}, 8, false},
                                   {{0, 176, 352, 528, 700}, 8, true},
                                   {{0, 16, 16, 32, 256, 256, 688, 700, 700}, 6, true},
                                   {{0, 16, 33}, 70, true}};
  uint64_t seed = 20;
  for (const Case& c : cases) {
    Problem p = mixed_problem(++seed, c.edges.back(), c.rows, c.ties);
    if (c.ties) {
      for (float& x : p.logits) x = std::round(x / 4);
    }
    int drawn = 0;
    for (int row = 0; row < c.rows; ++row) {
      SampleRow& s = p.rows[static_cast<size_t>(row)];
      if (c.ties && row > 2) {  // limits that end among tokens of one logit, which several ranks have
        s.temperature = 1;
        s.top_k = 85 + 5 * row;
        s.top_p = row % 2 == 0 ? 0.9f : 1.0f;
        s.min_p = 0;
        s.mask = s.counts = -1;
      }
      if (c.rows > 64) {  // more than are drawn at once
        s.top_k = 0;
        s.top_p = 1;
        s.temperature = 1;
      }
      drawn += s.temperature != 0 ? 1 : 0;
    }
    EXPECT_GE(drawn, c.rows / 2);
    EXPECT_TRUE(c.rows < 64 || drawn > 64);
    p.rows[1].mask = 2;
    p.masks.insert(p.masks.end(), static_cast<size_t>(p.words()), 0u);
    p.rows[2].defined = p.vocabulary;
    p.rows[2].temperature = 1;
    p.logits[3 * static_cast<size_t>(p.vocabulary) - 1] = NAN;
    const std::vector<int> tokens = sampler.choose(p).tokens;
    EXPECT_EQ(tokens[1], step::kAllMasked);
    EXPECT_EQ(tokens[2], step::kNotFinite);
    for (const Chosen& found : choose_by_ranks(sampler, p, c.edges)) EXPECT_EQ(found.tokens, tokens);
  }
}

TEST_F(HostSampling, LogProbabilitiesAreOfTheModelsOwnDistribution) {
  DeviceSampler sampler;
  Problem p = mixed_problem(9, 900, 12, true);
  for (size_t i = 0; i < p.rows.size(); ++i) {
    p.rows[i].logprobs = i == 0 ? 0 : static_cast<int>(i * 20 / 11);
    p.rows[i].bias_count = p.rows[i].banned_count = 0;
    p.rows[i].mask = p.rows[i].counts = -1;
  }
  const Chosen got = sampler.choose(p);
  for (size_t row = 0; row < p.rows.size(); ++row) {
    const SampleRow& s = p.rows[row];
    const float* x = &p.logits[row * static_cast<size_t>(p.vocabulary)];
    double sum = 0;
    for (int t = 0; t < s.defined; ++t) sum += std::exp(static_cast<double>(x[t]));
    std::vector<int> order(static_cast<size_t>(s.defined));
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return x[a] > x[b]; });
    order.insert(order.begin(), got.tokens[row]);
    for (size_t i = 0; i < static_cast<size_t>(s.logprobs) + 1; ++i) {
      EXPECT_EQ(got.logprob_tokens[row * 21 + i], order[i]) << row << ", " << i;
      EXPECT_NEAR(got.logprobs[row * 21 + i], x[order[i]] - std::log(sum), 1e-5);
    }
  }
}

// Tokens that are given, one of them no token that may be chosen, or that were chosen in another launch from what the
// first one had adjusted elsewhere.
TEST_F(HostSampling, LogProbabilitiesAreOfTokensThatAreGiven) {
  DeviceSampler sampler;
  Problem p = mixed_problem(10, 900, 12, true);
  for (SampleRow& s : p.rows) {
    s.defined = 880;
    s.logprobs = 3;
    s.bias_count = s.banned_count = 0;
    s.mask = s.counts = -1;
    s.temperature = 0;
  }
  const std::vector<int> chosen = sampler.choose(p).tokens;
  for (size_t i = 0; i < p.rows.size(); ++i) p.rows[i].given = i == 0 ? 899 : static_cast<int>(70 * i);
  for (const int splits : {1, 3}) {
    const Chosen got = sampler.choose(p, splits);
    for (size_t row = 0; row < p.rows.size(); ++row) {
      const float* x = &p.logits[row * 900];
      double sum = 0;
      for (int t = 0; t < 880; ++t) sum += std::exp(static_cast<double>(x[t]));
      const int given = p.rows[row].given;
      EXPECT_EQ(got.tokens[row], given);
      EXPECT_EQ(got.logprob_tokens[row * 21], given);
      EXPECT_NEAR(got.logprobs[row * 21], x[given] - std::log(sum), 1e-5);
      EXPECT_EQ(got.logprob_tokens[row * 21 + 1], chosen[row]);
    }
  }
}

// To the bit, greedy and drawn, beside rows that do not ask: ties over edges, zeros of both signs, ranks that have
// nothing or fewer tokens than are asked for, a row without a token, and more rows than are reported at once.
TEST_F(HostSampling, RanksTellLogProbabilitiesOfAllLogits) {
  DeviceSampler sampler;
  struct Case {
    std::vector<int> edges;
    int rows;
    bool ties;
  };
  const std::vector<Case> cases = {
      {{0, 2320, 4301}, 3, false}, {{0, 16, 16, 256, 688, 700, 700}, 6, true}, {{0, 16, 33}, 70, true}};
  uint64_t seed = 40;
  for (const Case& c : cases) {
    Problem p = mixed_problem(++seed, c.edges.back(), c.rows, c.ties);
    if (c.ties) {
      for (float& x : p.logits) x = std::round(x / 4);  // many zeros of both signs
    }
    Random random(seed);
    for (int row = 0; row < c.rows; ++row) {
      SampleRow& s = p.rows[static_cast<size_t>(row)];
      s.counts = -1;
      if (c.rows < 64 && row == 1) continue;
      s.logprobs = row == 0 ? 20 : row == 3 || (row > 4 && row < 62) ? 0 : static_cast<int>(random.below(21));
      s.bias_count = s.banned_count = 0;
      s.mask = -1;
      if (row % 3 == 2 || c.rows > 64) s.temperature = 0;
      if (row == 4) s.defined = 7;  // fewer than are asked for
      if (row == 4) s.logprobs = 20;
    }
    p.rows[2].defined = p.vocabulary;
    p.logits[3 * static_cast<size_t>(p.vocabulary) - 1] = NAN;
    const Chosen want = sampler.choose(p);
    EXPECT_EQ(want.tokens[2], step::kNotFinite);
    for (const Chosen& found : choose_by_ranks(sampler, p, c.edges)) {
      EXPECT_EQ(found.tokens, want.tokens);
      for (size_t row = 0; row < p.rows.size(); ++row) {
        const SampleRow& s = p.rows[row];
        if (s.logprobs < 0 || want.tokens[row] < 0) continue;
        for (size_t i = 21 * row; i < 21 * row + 1 + static_cast<size_t>(std::min(s.logprobs, s.defined)); ++i) {
          EXPECT_EQ(found.logprob_tokens[i], want.logprob_tokens[i]) << row << ", " << i - 21 * row;
          EXPECT_EQ(found.logprobs[i], want.logprobs[i]) << row << ", " << i - 21 * row;
        }
      }
    }
  }
}

TEST_F(HostSampling, SaysWhenNothingCanBeChosen) {
  DeviceSampler sampler;
  Problem p;
  p.vocabulary = 70;
  p.logits.assign(70 * 4, 1.0f);
  p.logits[70 + 69] = NAN;
  p.logits[140 + 3] = INFINITY;
  p.masks.assign(3, 0u);
  p.rows.assign(4, p.plain());
  p.rows[0].mask = 0;
  p.rows[3].defined = 69;
  const std::vector<int> tokens = sampler.choose(p).tokens;
  EXPECT_EQ(tokens[0], step::kAllMasked);
  EXPECT_EQ(tokens[1], step::kNotFinite);
  EXPECT_EQ(tokens[2], step::kNotFinite);
  EXPECT_GE(tokens[3], 0);
}

}  // namespace
}  // namespace fourfold::hostcuda
