// The sum over ranks (comm/reduce.cuh, words.cuh, each.cuh, two_shot.cuh) on the host executor: ranks are CTAs of one
// launch that run in turns, each with memory of its own that the others reach; what separates two sums on cards, the
// end of a kernel, is a barrier here.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "executor/cuda.h"
#include "executor/executor.h"
#include "kernels/comm_kernels.h"
#include "nvfp4/number.h"

namespace fourfold::comm {
namespace {

using executor::Device;
using executor::Mutation;
using executor::Op;
using executor::Options;
using executor::schedules;

struct Shape {
  int ranks, rows, columns, sums;
  int ctas = rows;
  Way way = Way::kFlags;
  bool mixed = false;  // the way and words in turns
  bool share = false;  // of a shared expert, in each rank's part
  int experts = 0;     // of a router behind the sum; behind them is the gate of a slice of a shared expert
  int choices = 0;     // not 0: the rest of a part are so many experts' rows of groups for each token
  bool words() const { return way != Way::kFlags; }
  Way way_of(int sum) const { return mixed && sum % 3 == 1 ? Way::kWords : way; }
};
constexpr Way kAllWays[] = {Way::kFlags, Way::kWords, Way::kTwoShot, Way::kTwoShotOwned, Way::kEach};
constexpr const char* kNames[] = {"with flags", "by words", "in two shots", "in two shots, residuals with owners",
                                  "by words of a CTA each"};
constexpr int kTopK = 3;

struct Rank {
  std::vector<std::vector<uint16_t>> deltas;  // by sum
  std::vector<uint16_t> share;
  float* residual = nullptr;
  uint16_t* out = nullptr;
  std::vector<std::vector<int64_t>> logits;  // by sum: those of each row, in gemm::kRoutingCopies parts
  unsigned long long* sums = nullptr;        // of the last one
  int* ids = nullptr;
  float* weights = nullptr;
  unsigned *uses = nullptr, *absent = nullptr, *report = nullptr;
};

// One problem on all ranks; `absent`: a rank that never comes.
class Sums {
 public:
  Sums(const Options& options, const Shape& shape, int absent = -1, unsigned long long patience = 100000)
      : shape_(shape), absent_(absent), device_(options) {
    std::mt19937 rng(7);
    std::normal_distribution<float> normal;
    const auto size = static_cast<size_t>(shape.rows * shape.columns);
    residual_.resize(size);
    weight_.resize(static_cast<size_t>(shape.columns));
    for (float& v : residual_) v = normal(rng) * 5.0f;
    for (float& v : weight_) v = 1.0f + 0.2f * normal(rng);
    // Room for more rows than there are, and for longer ones.
    const Exchange exchange{shape.ranks, 2 * shape.rows + 1, shape.columns + 8, shape.rows + 1};
    ReduceArgs args = {};
    Peers& peers = args.peers;
    peers.exchange = exchange;
    peers.patience = patience;
    peers.early = 1;
    for (int r = 0; r < shape.ranks; ++r) {
      const auto bytes = static_cast<size_t>(exchange.bytes());
      peers.memory[r] = device_.alloc<unsigned char>(bytes, "memory of rank " + std::to_string(r));
      const auto parts = static_cast<size_t>(exchange.flag_parts_bytes());
      const auto words = static_cast<size_t>(exchange.words_at());
      std::memset(peers.memory[r] + parts, 0, words - parts);
      std::memset(peers.memory[r] + words, 0xff, bytes - words);
    }
    const float* weight = device_.constant(weight_, "weight");
    for (int row = 0; row < shape.rows; ++row) logits_.push_back(normal(rng));
    const float* logits = device_.constant(logits_, "logits of the gate");
    device_.produced(logits);
    ranks_.resize(static_cast<size_t>(shape.ranks));
    for (int r = 0; r < shape.ranks; ++r) {
      Rank& rank = ranks_[static_cast<size_t>(r)];
      const auto zeros = [&](size_t count, const std::string& name) {
        auto* p = device_.alloc<unsigned>(count, name);
        std::fill_n(p, count, 0u);
        return p;
      };
      rank.residual = device_.alloc<float>(size, "residual");
      std::copy(residual_.begin(), residual_.end(), rank.residual);
      device_.produced(rank.residual);
      rank.out = device_.alloc<uint16_t>(size, "out");
      rank.uses = zeros(2 * (2 * static_cast<size_t>(shape.rows) + 1), "uses");
      rank.absent = zeros(static_cast<size_t>(shape.ranks), "absent");
      rank.report = zeros(1, "report");
      norm::Share share = {};
      if (shape.share) {
        for (size_t i = 0; i < size; ++i) rank.share.push_back(nvfp4::float_to_bf16(normal(rng)));
        share = {device_.constant(rank.share, "share"), shape.columns, logits, 1};
        device_.produced(share.x);
      }
      for (int s = 0; s < shape.sums; ++s) {
        std::vector<uint16_t> delta(size);
        ReduceArgs one = args;
        if (shape.choices > 0) {
          one.sum = experts(rng);
          std::copy_n(one.sum.out, size, delta.begin());
        } else {
          for (uint16_t& v : delta) v = nvfp4::float_to_bf16(normal(rng));
          one.norm.delta = device_.constant(delta, "delta");
          device_.produced(one.norm.delta);
        }
        one.rows = shape.rows;
        one.peers.rank = r;
        one.peers.uses = rank.uses;
        one.peers.absent = rank.absent;
        one.peers.report = rank.report;
        one.norm.residual = one.norm.residual_out = rank.residual;
        one.norm.residual_stride = one.norm.delta_stride = one.norm.out_stride = one.norm.columns = shape.columns;
        one.norm.weight = weight;
        one.norm.eps = 1e-6f;
        one.norm.out = rank.out;
        one.norm.share = share;
        args_.push_back(one);
        routed_.push_back(shape.way_of(s) == Way::kEachRouted ? router(rng, one, rank) : ReduceRoutedArgs{});
        rank.deltas.push_back(std::move(delta));
      }
    }
  }

  void run() {
    const auto ctas = static_cast<unsigned>(shape_.ctas), ranks = static_cast<unsigned>(shape_.ranks);
    executor::LaunchConfig config{"sum over ranks", {ctas, ranks}, norm::kRowThreads};
    config.resident = static_cast<int>(ctas * ranks);
    device_.launch(config, [&] {
      if (static_cast<int>(blockIdx.y) == absent_) return;
      for (int s = 0; s < shape_.sums; ++s) {
        if (s > 0) __syncthreads();
        const size_t at = blockIdx.y * static_cast<size_t>(shape_.sums) + static_cast<size_t>(s);
        if (shape_.way_of(s) == Way::kEachRouted) {
          reduce_routed_kernel(routed_[at]);
        } else {
          reduce_kernel(args_[at], shape_.way_of(s));
        }
      }
    });
  }

  // What is wrong with the results; empty: nothing.
  std::string check() const {
    std::vector<float> want = residual_, alone;
    for (int s = 0; s < shape_.sums; ++s) {
      if (shape_.way_of(s) == Way::kEachAlone) {
        alone.assign(want.size(), 0.0f);
        for (size_t i = 0; i < alone.size(); ++i) {
          for (const Rank& rank : ranks_) alone[i] += nvfp4::bf16_to_float(rank.deltas[static_cast<size_t>(s)][i]);
        }
        continue;
      }
      alone.clear();
      for (size_t i = 0; i < want.size(); ++i) {
        for (const Rank& rank : ranks_) {
          float part = nvfp4::bf16_to_float(rank.deltas[static_cast<size_t>(s)][i]);
          if (shape_.share) {
            const float logit = logits_[i / static_cast<size_t>(shape_.columns)];
            const float gated = std::fmaf(1.0f / (1.0f + std::exp(-logit)), nvfp4::bf16_to_float(rank.share[i]), part);
            part = nvfp4::bf16_to_float(nvfp4::float_to_bf16(gated));
          }
          want[i] += part;
        }
      }
    }
    for (const Rank& rank : ranks_) {
      if (*rank.report != 0) return "a rank was given up";
      for (int row = 0; row < shape_.rows; ++row) {
        if (shape_.way == Way::kTwoShotOwned && &ranks_[static_cast<size_t>(row % shape_.ranks)] != &rank) continue;
        const auto at = static_cast<size_t>(row * shape_.columns);
        if (std::memcmp(rank.residual + at, &want[at], static_cast<size_t>(shape_.columns) * sizeof(float)) != 0) {
          return "another residual";
        }
      }
      const unsigned* uses = uses_of(rank);
      for (int row = 0; row < shape_.rows; ++row) {
        const auto at = static_cast<size_t>(row * shape_.columns);
        if (uses[row] != static_cast<unsigned>(shape_.sums)) return "another count of sums";
        if (!alone.empty()) {
          for (size_t i = at; i < at + static_cast<size_t>(shape_.columns); ++i) {
            if (rank.out[i] != nvfp4::float_to_bf16(alone[i])) return "another sum";
          }
          continue;
        }
        const float* x = want.data() + row * shape_.columns;
        double squares = 0;
        for (int i = 0; i < shape_.columns; ++i) squares += static_cast<double>(x[i]) * x[i];
        const double inverse = 1.0 / std::sqrt(squares / shape_.columns + 1e-6);
        for (int i = 0; i < shape_.columns; ++i) {
          const double value = x[i] * inverse * weight_[static_cast<size_t>(i)];
          const double found = nvfp4::bf16_to_float(rank.out[row * shape_.columns + i]);
          if (!(std::fabs(found - value) <= std::fabs(value) / 255 + 1e-9)) return "another norm";
        }
      }
      for (int row = shape_.rows; row <= 2 * shape_.rows; ++row) {  // logits go in as many rows behind them
        if (uses[row] != (row < 2 * shape_.rows ? rank.logits.size() : 0)) return "another count beyond the rows";
      }
      if (shape_.way == Way::kEachRouted) {
        if (const std::string wrong = check_choice(rank, want); !wrong.empty()) return wrong;
      }
    }
    return "";
  }
  // How often each row was exchanged, in the way of this problem.
  const unsigned* uses_of(const Rank& rank) const { return rank.uses + (shape_.words() ? 2 * shape_.rows + 1 : 0); }

  // Of one rank's part of a sum, before run().
  void set_delta(int rank, int sum, int column, uint16_t value) {
    const ReduceArgs& args = args_[static_cast<size_t>(rank * shape_.sums + sum)];
    const_cast<uint16_t*>(args.norm.delta)[column] = value;
  }
  const std::vector<Rank>& ranks() const { return ranks_; }
  const std::set<executor::SeenSite>& seen() const { return device_.seen(); }

 private:
  // A router behind a rank's sum, with what its product has added up of the logits.
  ReduceRoutedArgs router(std::mt19937& rng, const ReduceArgs& sum, Rank& rank) {
    const int columns = shape_.experts + 1, stride = gemm::routing_stride(columns);
    const auto count = static_cast<size_t>(shape_.rows * gemm::routing_sums(columns));
    std::normal_distribution<float> normal;
    std::vector<int64_t> logits(count);
    for (size_t i = 0; i < count; ++i) {
      if (static_cast<int>(i) % stride < columns) logits[i] = std::llrint(std::ldexp(normal(rng), gemm::kRoutingBits));
    }
    ReduceRoutedArgs args = {};
    args.peers = sum.peers;
    args.rows = shape_.rows;
    args.routed.norm = sum.norm;
    args.routed.columns = columns;
    args.routed.sums = rank.sums = device_.alloc<unsigned long long>(count, "sums of a router");
    std::copy(logits.begin(), logits.end(), rank.sums);
    device_.produced(rank.sums);
    rank.logits.push_back(std::move(logits));
    moe::ChoiceArgs& choice = args.routed.choice;
    choice.tokens = shape_.rows;
    choice.experts = choice.gate = choice.first_slice = shape_.experts;
    choice.top_k = kTopK;
    choice.slices = choice.renormalize = 1;
    choice.width = kTopK + 1;
    if (rank.ids == nullptr) {
      rank.ids = device_.alloc<int>(static_cast<size_t>(shape_.rows * choice.width), "ids");
      rank.weights = device_.alloc<float>(static_cast<size_t>(shape_.rows * choice.width), "weights");
    }
    choice.ids = rank.ids;
    choice.weights = rank.weights;
    return args;
  }

  // What is wrong with a rank's choice behind the last sum, of residuals `x`.
  std::string check_choice(const Rank& rank, const std::vector<float>& x) const {
    const int columns = shape_.experts + 1, stride = gemm::routing_stride(columns);
    const int count = shape_.rows * gemm::routing_sums(columns);
    if (std::count(rank.sums, rank.sums + count, 0ull) != count) return "sums of a router that are not taken";
    for (int row = 0; row < shape_.rows; ++row) {
      double squares = 0;
      for (int i = 0; i < shape_.columns; ++i)
        squares += std::pow(x[static_cast<size_t>(row * shape_.columns + i)], 2.0);
      const double inverse = 1.0 / std::sqrt(squares / shape_.columns + 1e-6);
      std::vector<double> logits(static_cast<size_t>(columns));
      for (int e = 0; e < columns; ++e) {
        for (const Rank& each : ranks_) {
          for (int c = 0; c < gemm::kRoutingCopies; ++c) {
            const auto at = static_cast<size_t>((row * gemm::kRoutingCopies + c) * stride + e);
            logits[static_cast<size_t>(e)] += inverse * std::ldexp(each.logits.back()[at], -gemm::kRoutingBits);
          }
        }
      }
      std::vector<int> order(static_cast<size_t>(shape_.experts));
      std::iota(order.begin(), order.end(), 0);
      const auto logit = [&](int e) { return logits[static_cast<size_t>(e)]; };
      std::ranges::sort(order, [&](int a, int b) { return logit(a) > logit(b); });
      double all = 0;
      for (int k = 0; k < kTopK; ++k) all += std::exp(logit(order[static_cast<size_t>(k)]));
      for (int k = 0; k <= kTopK; ++k) {
        const int at = row * (kTopK + 1) + k, id = k < kTopK ? order[static_cast<size_t>(k)] : shape_.experts;
        const double weight = k < kTopK ? std::exp(logit(id)) / all : 1 / (1 + std::exp(-logit(id)));
        if (rank.ids[at] != id) return "another choice";
        if (!(std::fabs(rank.weights[at] - weight) < 1e-5)) return "another weight";
      }
    }
    return "";
  }

  // What a rank's experts leave of each row, with its sum in `out`.
  moe::RowSum experts(std::mt19937& rng) {
    constexpr int kExperts = 5;
    const int picks = shape_.rows * shape_.choices, groups = moe::packed_row_values(shape_.columns) / 4;
    std::vector<moe::PackedGroup> rows(static_cast<size_t>(picks * groups));
    for (moe::PackedGroup& group : rows) {
      const unsigned exponent = 122 + rng() % 8;
      group = {{static_cast<unsigned>(rng() % (1u << 28)) | (exponent & 15) << 28,
                static_cast<unsigned>(rng() % (1u << 28)) | exponent >> 4 << 28}};
    }
    std::vector<int> slots, ids;
    std::vector<float> weights, scales;
    for (int i = 0; i < picks; ++i) {
      slots.push_back(i % 5 == 2 ? -1 : picks - 1 - i);
      ids.push_back(static_cast<int>(rng() % kExperts));
      weights.push_back(0.1f + 0.01f * static_cast<float>(rng() % 50));
    }
    for (int i = 0; i < kExperts; ++i) scales.push_back((1.0f + 0.1f * static_cast<float>(i)) / moe::kEpilogueScale);
    moe::RowSum sum = {};
    sum.groups = device_.constant(rows, "rows of experts");
    sum.stride = groups;
    sum.pick_slot = device_.constant(slots, "slots");
    sum.weights = device_.constant(weights, "router's weights");
    sum.ids = device_.constant(ids, "ids");
    sum.scales = device_.constant(scales, "scales");
    sum.top_k = shape_.choices;
    sum.columns = shape_.columns;
    sum.out = device_.alloc<uint16_t>(static_cast<size_t>(shape_.rows * shape_.columns), "sum over experts");
    sum.out_stride = shape_.columns;
    const unsigned pieces = (static_cast<unsigned>(shape_.columns) + 1023) / 1024;
    device_.launch({"sum over experts", {pieces, static_cast<unsigned>(shape_.rows)}, moe::kCombinePackedThreads},
                   [&] { sum_of_groups(sum); });
    device_.produced(sum.groups);
    return sum;
  }

  Shape shape_;
  int absent_;
  Device device_;
  std::vector<float> residual_, weight_, logits_;
  std::vector<Rank> ranks_;
  std::vector<ReduceArgs> args_;  // by rank, then sum
  std::vector<ReduceRoutedArgs> routed_;
};

// The first complaint, of the executor or about the results.
std::string complaint(const Options& options, const Shape& shape, std::set<executor::SeenSite>* seen = nullptr,
                      unsigned long long patience = 100000) {
  try {
    Sums sums(options, shape, -1, patience);
    sums.run();
    if (seen != nullptr) *seen = sums.seen();
    return sums.check();
  } catch (const executor::Violation& violation) {
    return violation.what();
  }
}

TEST(RankSum, MayBeWithoutResidualAndNorm) {
  unsigned seed = 40;
  for (Shape shape : {Shape{2, 1, 2048, 3}, Shape{2, 3, 400, 4}, Shape{3, 2, 4096, 3}, Shape{8, 1, 64, 3}}) {
    shape.way = Way::kEachAlone;
    for (const bool mixed : {false, true}) {
      shape.mixed = mixed;
      for (const Options& options : schedules(3, ++seed)) {
        EXPECT_EQ(complaint(options, shape), "") << shape.ranks << " ranks, " << shape.rows << " rows";
      }
    }
  }
}

TEST(RankSum, EveryRankHasTheSumInTheOrderOfRanks) {
  unsigned seed = 1;
  for (const Shape& shape : {Shape{2, 1, 2048, 3}, Shape{2, 3, 400, 4}, Shape{2, 5, 400, 3, 2}, Shape{2, 4, 2048, 3, 1},
                             Shape{2, 9, 400, 3, 2}, Shape{3, 2, 4096, 2}, Shape{4, 2, 512, 5}, Shape{4, 3, 64, 4, 2},
                             Shape{2, 1, 5120, 2}, Shape{8, 1, 64, 3}}) {
    for (const Way way : kAllWays) {
      Shape each = shape;
      each.way = way;
      if (way == Way::kEach && (shape.ctas < shape.rows || shape.columns > 4096)) continue;
      for (const Options& options : schedules(3, ++seed)) {
        EXPECT_EQ(complaint(options, each), "") << shape.ranks << " ranks, " << shape.rows << " rows, " << shape.columns
                                                << " columns, " << kNames[static_cast<int>(way)];
      }
    }
  }
}

// A rank's part is what its mixer left and its share of the shared expert's output, rounded before it is sent.
TEST(RankSum, PartsMayHaveAShare) {
  unsigned seed = 50;
  for (Shape shape : {Shape{2, 3, 400, 3, 2}, Shape{2, 3, 400, 3}, Shape{2, 1, 4096, 2, 2}, Shape{3, 1, 2048, 2},
                      Shape{2, 1, 4096, 2}, Shape{2, 1, 5120, 2}}) {
    shape.share = true;
    for (const Way way : {shape.ctas == shape.rows && shape.columns <= 4096 ? Way::kEach : Way::kWords, Way::kTwoShot,
                          Way::kTwoShotOwned}) {
      shape.way = way;
      for (const Options& options : schedules(3, ++seed)) {
        EXPECT_EQ(complaint(options, shape), "") << shape.ranks << " ranks, " << shape.rows << " rows";
      }
    }
  }
}

// The router's logits go with the parts, and its choice is behind the sum; also in turns with sums that have none.
TEST(RankSum, MayHaveTheRoutersChoiceBehindIt) {
  unsigned seed = 200;
  for (Shape shape : {Shape{2, 1, 2048, 3}, Shape{2, 3, 400, 4}, Shape{3, 2, 4096, 3}, Shape{4, 8, 544, 4}}) {
    shape.way = Way::kEachRouted;
    for (const int experts : {4, 40, 135}) {
      shape.experts = experts;
      if (!routes_with_sum(experts + 1, shape.columns)) continue;
      for (const bool mixed : {false, true}) {
        shape.mixed = mixed;
        for (const Options& options : schedules(2, ++seed)) {
          EXPECT_EQ(complaint(options, shape), "") << shape.ranks << " ranks, " << shape.rows << " rows, " << experts;
        }
      }
    }
  }
}

// The rest of a part may be what experts left, added up where it is sent: the bits of their sum's own kernel.
TEST(RankSum, PartsMayBeRowsOfExperts) {
  unsigned seed = 70;
  for (Shape shape : {Shape{2, 5, 400, 3, 2}, Shape{2, 3, 2048, 2, 1}, Shape{3, 4, 272, 2}, Shape{4, 9, 64, 3, 3},
                      Shape{2, 2, 4096, 2}, Shape{2, 1, 5136, 2}}) {
    shape.way = Way::kTwoShotOwned;
    for (const int choices : {1, 8, 12}) {
      shape.choices = choices;
      shape.share = choices == 8;
      for (const Options& options : schedules(2, ++seed)) {
        EXPECT_EQ(complaint(options, shape), "") << shape.ranks << " ranks, " << shape.rows << " rows, "
                                                 << shape.columns << " columns, " << choices << " choices";
      }
    }
  }
}

// A rank that does not come is noticed after the patience, once: later sums wait for nobody.
TEST(RankSum, ARankThatDoesNotComeIsGivenUp) {
  for (const Way way : kAllWays) {
    Shape shape{3, 2, 256, 1};
    shape.way = way;
    Sums sums(Options{}, shape, 1, 200);
    for (int step = 0; step < 3; ++step) sums.run();
    for (const size_t r : {0, 2}) {
      const Rank& rank = sums.ranks()[r];
      EXPECT_EQ(*rank.report, 2u);
      for (int other = 0; other < 3; ++other) EXPECT_EQ(rank.absent[other], other == 1 ? 1u : 0u);
      for (int row = 0; row < 2; ++row) EXPECT_EQ(sums.uses_of(rank)[row], 3u) << "the sums ended";
    }
    EXPECT_EQ(*sums.ranks()[1].report, 0u);
  }
}

// What a word that is not there looks like may be what a rank has to send: a number that is none arrives as one.
TEST(RankSum, WordsOfAllOnesArrive) {
  for (const Way way : {Way::kWords, Way::kTwoShot, Way::kEach}) {
    Shape shape{2, 1, 256, 3};
    shape.way = way;
    Sums sums(Options{}, shape);
    sums.set_delta(1, 0, 6, 0xffff);
    sums.set_delta(1, 0, 7, 0xffff);
    sums.run();
    for (const Rank& rank : sums.ranks()) {
      EXPECT_EQ(*rank.report, 0u);
      for (int i = 0; i < 16; ++i) EXPECT_EQ(std::isnan(rank.residual[i]), i == 6 || i == 7);
    }
  }
}

// One after the other in the same memory.
TEST(RankSum, WaysTakeTurnsWithWords) {
  unsigned seed = 100;
  for (Shape shape : {Shape{2, 3, 400, 7}, Shape{4, 5, 64, 7, 2}, Shape{3, 1, 2048, 5}}) {
    shape.mixed = true;
    for (const Way way : {Way::kTwoShot, Way::kEach}) {
      if (way == Way::kEach && shape.ctas < shape.rows) continue;
      shape.way = way;
      for (const Options& options : schedules(4, ++seed)) {
        EXPECT_EQ(complaint(options, shape), "") << shape.ranks << " ranks, " << shape.rows << " rows";
      }
    }
  }
}

// Nothing that orders is there for nothing.
TEST(RankSum, EveryLostWaitIsCaught) {
  if (!Device::checks_plain_accesses()) GTEST_SKIP() << "half of the order is not seen in sanitizer builds";
  const std::set<std::string> files = {"reduce.cuh",   "meeting.cuh",  "words.cuh", "each.cuh",
                                       "two_shot.cuh", "norm_row.cuh", "routed.cuh"};
  for (const Way way : {Way::kFlags, Way::kWords, Way::kTwoShot, Way::kTwoShotOwned, Way::kEach, Way::kEachRouted}) {
    Shape shape{2, 2, 512, 4};
    shape.way = way;
    shape.experts = 40;
    if (shape.words() && way != Way::kEach && way != Way::kEachRouted)
      shape.ctas = 1;  // sums of squares of two rows, too
    std::set<executor::SeenSite> seen;
    ASSERT_EQ(complaint(Options{}, shape, &seen), "");
    int tried = 0;
    for (const auto& [op, file, line] : seen) {
      if (op == Op::kShuffle || !files.contains(file)) continue;
      const Mutation mutation{Mutation::Kind::kDrop, op, file, line, 0};
      std::string found;
      for (Options options : schedules(9)) {
        options.mutation = mutation;
        if (!(found = complaint(options, shape, nullptr, 1000)).empty()) break;
      }
      EXPECT_NE(found, "") << mutation.text();
      ++tried;
    }
    // The kernel before, three barriers, flag and wait; the kernel before, a barrier, what is sent and what is taken.
    EXPECT_GE(tried, shape.words() ? 4 : 5);
  }
}

}  // namespace
}  // namespace fourfold::comm
