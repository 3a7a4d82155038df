// A model of several ranks against the same model of one: logits within what the order of fp32 sums makes, the memory
// of each rank, and what becomes of everybody when a rank fails.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <filesystem>
#include <memory>
#include <mutex>
#include <numeric>
#include <thread>
#include <vector>

#include "base/check.h"
#include "base/random.h"
#include "cpu/backend.h"
#include "cpu/reference/reference.h"
#include "model/model.h"
#include "model/random_weights.h"
#include "model/ranked.h"
#include "model/ranked_stepper.h"
#include "ranks/checks.h"
#include "small_config.h"

namespace fourfold::model {
namespace {

constexpr int64_t kPageSize = 8;
constexpr int64_t kTokens = 40;

struct Case {
  const char* name;
  bool dense;
  int64_t ranks;
  bool by_expert;
  bool fp8 = false;  // with scales for blocks that the edges of parts lie in
};

// One with enough heads for the ranks, several of which share key heads where there are many. Widths and the vocabulary
// of 97 do not divide; some ranks of many have nothing of an expert but padding.
ModelConfig config_for(const Case& of) {
  ModelConfig config = small_config(of.dense);
  if (of.ranks == 3) {
    config.heads = 6;
    config.kv_heads = 3;
    config.linear_key_heads = 3;
  } else if (of.ranks == 4) {
    config.heads = 8;
    config.linear_value_heads = 8;
  } else if (of.ranks == 6) {
    config.heads = 12;
  } else if (of.ranks == 8) {
    config.heads = 8;
    config.kv_heads = 1;
    config.linear_key_heads = 4;
    config.linear_value_heads = 8;
  }
  return config;
}

// FP8 weights whose one scale is one for each block of 32 x 32, of different powers of two.
class BlockScales final : public WeightSource {
 public:
  explicit BlockScales(std::unique_ptr<WeightSource> inner) : inner_(std::move(inner)) {}
  const ModelConfig& config() const override { return inner_->config(); }
  ops::MatrixSource matrix(std::string_view module, int64_t rows, int64_t columns) override {
    ops::MatrixSource source = inner_->matrix(module, rows, columns);
    if (source.format != ops::Format::kFp8) return source;
    struct Grid {
      std::shared_ptr<const void> inner;
      std::vector<float> scales;
    };
    const auto grid = std::make_shared<Grid>();
    grid->inner = source.owner;
    source.scale_rows = source.scale_columns = 32;
    const int64_t cells = (rows + 31) / 32 * ((columns + 31) / 32);
    for (int64_t i = 0; i < cells; ++i) {
      grid->scales.push_back(source.grid_scales[0] * (i % 3 == 0 ? 2.0f : i % 3 == 1 ? 1.0f : 0.5f));
    }
    source.grid_scales = grid->scales.data();
    source.owner = grid;
    return source;
  }
  std::vector<float> vector(std::string_view name, int64_t count) override { return inner_->vector(name, count); }
  void release(const ops::MatrixSource& matrix) override {
    ops::MatrixSource own = matrix;
    inner_->release(own);
  }
  void finish() override { inner_->finish(); }

 private:
  std::unique_ptr<WeightSource> inner_;
};

std::unique_ptr<WeightSource> weights_for(const Case& of) {
  const ModelConfig config = config_for(of);
  if (!of.fp8) return make_random_weights(config, 5);
  return std::make_unique<BlockScales>(make_random_weights(config, 5, [](WeightKind kind) {
    const ops::Format format = default_format(kind);
    return format == ops::Format::kNvfp4 || kind == WeightKind::kHead ? ops::Format::kFp8 : format;
  }));
}

ModelOptions model_options() {
  ModelOptions options;
  options.max_step_tokens = options.max_logit_rows = 64;
  options.mtp = true;
  return options;
}

BackendFactory factory(cpu::Isa isa) {
  return [isa](const std::shared_ptr<ranks::Member>& member) {
    cpu::CpuOptions options;
    options.isa = isa;
    options.threads = 1;
    options.member = member;
    return cpu::make_backend(options);
  };
}

// Logits of trunk and MTP head: a chunk, a few tokens, then one after the other, at last some of which the last has no
// successor.
std::vector<float> logits_of(Model& model) {
  Caches caches = model.make_caches(8, kPageSize, 1);
  std::vector<int32_t> pages(8);
  std::iota(pages.begin(), pages.end(), 0);
  Random random(9);
  std::vector<int32_t> tokens(kTokens + 4);
  for (int32_t& token : tokens) token = static_cast<int32_t>(random.below(97));
  std::vector<float> all;
  int64_t at = 0;
  const auto run = [&](int64_t count, int64_t pairs) {
    std::vector<int32_t> rows(static_cast<size_t>(count));
    std::iota(rows.begin(), rows.end(), 0);
    ops::Sequence sequence;
    sequence.count = static_cast<int32_t>(count);
    sequence.position = static_cast<int32_t>(at);
    sequence.pages = pages;
    const std::span<const int32_t> from(tokens);
    ops::Batch batch{from.subspan(static_cast<size_t>(at), static_cast<size_t>(count)), std::span(&sequence, 1), rows};
    std::vector<float> logits(static_cast<size_t>(count) * 97);
    model.forward(batch, caches);
    model.backend().read(model.logits(), logits);
    all.insert(all.end(), logits.begin(), logits.end());
    sequence.count = static_cast<int32_t>(pairs);
    batch.tokens = from.subspan(static_cast<size_t>(at) + 1, static_cast<size_t>(pairs));
    batch.logit_rows = std::span(rows).first(static_cast<size_t>(pairs));
    logits.resize(static_cast<size_t>(pairs) * 97);
    model.forward_mtp(batch, model.hidden().slice_rows(0, pairs), caches);
    model.backend().read(model.mtp_logits(), logits);
    all.insert(all.end(), logits.begin(), logits.end());
    at += count;
  };
  run(20, 20);
  run(8, 8);
  while (at < kTokens) run(1, 1);
  run(4, 3);
  return all;
}

class Ranks : public testing::TestWithParam<Case> {};

TEST_P(Ranks, LogitsAreThoseOfOneRank) {
  std::vector<cpu::Isa> isas = {cpu::Isa::kReference};
  if (cpu::best_isa() != cpu::Isa::kReference) isas.push_back(cpu::best_isa());
  for (const cpu::Isa isa : isas) {
    const auto weights = weights_for(GetParam());
    const auto one = load_model(*weights, factory(isa), {}, model_options());
    const auto several = load_model(*weights, factory(isa),
                                    {.ranks = GetParam().ranks, .by_expert = GetParam().by_expert}, model_options());
    const std::vector<float> wanted = logits_of(*one), found = logits_of(*several);
    ASSERT_EQ(wanted.size(), found.size());
    double energy = 0, worst = 0;
    for (size_t i = 0; i < wanted.size(); ++i) {
      energy += static_cast<double>(wanted[i]) * wanted[i];
      ASSERT_TRUE(std::isfinite(found[i]));
      worst = std::max(worst, std::fabs(static_cast<double>(wanted[i]) - found[i]));
    }
    const double rms = std::sqrt(energy / static_cast<double>(wanted.size()));
    ASSERT_GT(rms, 0.05);
    // The reference adds in fp32 at most; fast backends keep keys and values, and the inputs of products, in 16 bits.
    const double bound = isa == cpu::Isa::kReference ? 2e-5 : 2e-2;
    EXPECT_LT(worst, bound * rms) << cpu::isa_name(isa);
    EXPECT_GT(worst, 0) << "nothing was added up in another order: is anything split?";
  }
}

INSTANTIATE_TEST_SUITE_P(All, Ranks,
                         testing::Values(Case{"MoeOn2", false, 2, false}, Case{"DenseOn2", true, 2, false},
                                         Case{"ExpertsOn2", false, 2, true}, Case{"MoeOn3", false, 3, false},
                                         Case{"MoeOn4", false, 4, false}, Case{"ExpertsOn4", false, 4, true},
                                         Case{"DenseOn4", true, 4, false}, Case{"MoeOn6", false, 6, false},
                                         Case{"ExpertsOn6", false, 6, true}, Case{"MoeOn8", false, 8, false},
                                         Case{"DenseOn8", true, 8, false}, Case{"Fp8MoeOn3", false, 3, false, true},
                                         Case{"Fp8DenseOn4", true, 4, false, true},
                                         Case{"Fp8ExpertsOn3", false, 3, true, true}),
                         [](const auto& parameter) { return std::string(parameter.param.name); });

// Counts the bytes of the weights that it is given.
class CountingBackend final : public cpu::ReferenceBackend {
 public:
  struct Bytes {
    std::atomic<int64_t> table{0}, matrices{0}, experts{0};
    std::atomic<int64_t> stored{0};  // of all weights, without the scale of each NVFP4 matrix
  };
  CountingBackend(const cpu::CpuOptions& options, Bytes& bytes) : ReferenceBackend(options), bytes_(bytes) {}
  std::unique_ptr<ops::Matrix> load_table(const ops::MatrixSource& source) override {
    bytes_.table += source.bytes();
    count(source);
    return ReferenceBackend::load_table(source);
  }
  std::unique_ptr<ops::Matrix> load_matrix(std::span<const ops::MatrixSource> parts) override {
    for (const ops::MatrixSource& part : parts) {
      bytes_.matrices += part.rows * part.columns;
      count(part);
    }
    return ReferenceBackend::load_matrix(parts);
  }
  std::unique_ptr<ops::Experts> load_experts(int64_t count, const std::function<ops::ExpertSource(int64_t)>& source,
                                             const std::function<void(int64_t)>& done) override {
    const auto counted = [&](int64_t i) {
      const ops::ExpertSource expert = source(i);
      for (const ops::MatrixSource* matrix : {&expert.gate, &expert.up, &expert.down}) this->count(*matrix);
      return expert;
    };
    auto experts = ReferenceBackend::load_experts(count, counted, done);
    bytes_.experts += count * experts->bytes_per_expert();
    return experts;
  }

 private:
  void count(const ops::MatrixSource& source) {
    bytes_.stored += source.bytes() - (source.format == ops::Format::kNvfp4 ? 4 : 0);
  }

  Bytes& bytes_;
};

// Elements of matrices, and bytes of experts, by rank.
std::vector<CountingBackend::Bytes> kept(const ModelConfig& config, const RankOptions& options, bool mtp = true) {
  ModelOptions own = model_options();
  own.mtp = mtp;
  std::vector<CountingBackend::Bytes> bytes(static_cast<size_t>(options.ranks));
  const auto weights = make_random_weights(config, 5);
  load_model(
      *weights,
      [&](const std::shared_ptr<ranks::Member>& member) {
        cpu::CpuOptions cpu;
        cpu.threads = 1;
        cpu.member = member;
        return std::make_shared<CountingBackend>(cpu,
                                                 bytes[member == nullptr ? 0 : static_cast<size_t>(member->rank())]);
      },
      options, own);
  return bytes;
}

TEST(RanksMemory, EachKeepsItsPartAndNoMore) {
  ModelConfig config = small_config(false);
  config.moe_intermediate = 64;  // halves of 32, no padding
  config.shared_intermediate = 96;
  config.experts = 6;
  const auto one = kept(config, {});
  // Held by all: the embedding, routers and gates of shared experts, the MTP head's projection.
  const int64_t layers = config.layers + 1, whole = layers * (6 + 1) * 64 + 64 * 128;
  for (const bool by_expert : {false, true}) {
    const auto two = kept(config, {.ranks = 2, .by_expert = by_expert});
    for (const CountingBackend::Bytes& rank : two) EXPECT_EQ(rank.table, one[0].table);
    EXPECT_EQ(two[0].matrices + two[1].matrices, one[0].matrices + whole);
    // Of the vocabulary of 97, one has 48 rows and the other 49, of the head and of the copy that drafts are chosen
    // with.
    EXPECT_EQ(two[1].matrices - two[0].matrices, 2 * 64);
    EXPECT_EQ(two[0].experts, two[1].experts);
    // Each matrix has a scale of its own, four bytes.
    const int64_t scales = by_expert ? 0 : layers * 6 * 3 * 4;
    EXPECT_EQ(two[0].experts + two[1].experts, one[0].experts + scales);
  }
}

// ---- faults

// Throws, or waits, in its n-th expert layer.
struct Fault {
  enum class Kind { kThrow, kHang } kind = Kind::kThrow;
  int64_t rank = 0;
  std::atomic<int64_t> left{1 << 30};
  std::mutex mutex;
  std::condition_variable changed;
  bool released = false;
};

class FaultyBackend final : public cpu::ReferenceBackend {
 public:
  FaultyBackend(const cpu::CpuOptions& options, Fault& fault) : ReferenceBackend(options), fault_(fault) {}
  void moe(const ops::MoeParams& params, const ops::Tensor& x, const ops::Tensor& out) override {
    if (this->options().member->rank() == fault_.rank && fault_.left-- == 0) {
      if (fault_.kind == Fault::Kind::kThrow) throw Error("lost its mind");
      std::unique_lock lock(fault_.mutex);
      fault_.changed.wait(lock, [&] { return fault_.released; });
    }
    ReferenceBackend::moe(params, x, out);
  }

 private:
  Fault& fault_;
};

int64_t threads_of_process() {
  int64_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) count += entry.exists() ? 1 : 0;
  return count;
}

// Threads that were joined may be listed a moment longer.
void expect_no_more_threads_than(int64_t before) {
  for (int i = 0; i < 1000 && threads_of_process() > before; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_LE(threads_of_process(), before);
}

// A prompt in one step, then two single tokens; the error of the last one.
std::string last_error(Fault& fault, std::chrono::milliseconds patience, double& seconds_to_it) {
  const auto weights = make_random_weights(small_config(false), 5);
  const auto backend = [&](const std::shared_ptr<ranks::Member>& member) {
    cpu::CpuOptions options;
    options.threads = 1;
    options.member = member;
    return std::make_shared<FaultyBackend>(options, fault);
  };
  const auto model = load_model(*weights, backend, {.ranks = 2, .patience = patience}, model_options());
  Caches caches = model->make_caches(8, kPageSize, 2);
  ops::StepLimits limits;
  limits.lanes = 1;
  limits.rows = limits.logit_rows = 16;
  limits.context = 64;
  limits.page_size = kPageSize;
  limits.vocabulary = 97;
  const auto stepper = model->make_stepper(limits, caches);
  const std::vector<int32_t> prompt = {3, 1, 4, 1, 5}, pages = {0, 1, 2, 3, 4, 5, 6, 7};
  const int32_t slot = 0;
  ops::LaneStart start;
  start.sampling.temperature = 0;
  start.max_output = 8;
  ops::LaneWork work;
  work.lane = 0;
  work.start = &start;
  work.tokens = prompt;
  work.pages = pages;
  work.state_out = std::span(&slot, 1);
  EXPECT_EQ(stepper->wait(stepper->launch({{}, std::span(&work, 1)})).error, "");
  fault.left = 2;
  work.start = nullptr;
  work.tokens = work.pages = {};
  // Both under way when it happens.
  const auto begin = std::chrono::steady_clock::now();
  const ops::Ticket first = stepper->launch({{}, std::span(&work, 1)});
  const ops::Ticket second = stepper->launch({{}, std::span(&work, 1)});
  const std::string error = stepper->wait(first).error;
  seconds_to_it = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  EXPECT_EQ(stepper->wait(second).error, error);
  EXPECT_EQ(stepper->wait(stepper->launch({{}, std::span(&work, 1)})).error, error);
  {
    const std::lock_guard lock(fault.mutex);
    fault.released = true;
  }
  fault.changed.notify_all();
  return error;
}

TEST(RanksFaults, ARankThatThrowsEndsTheStepsOfAll) {
  const int64_t before = threads_of_process();
  for (const int64_t rank : {0, 1}) {
    Fault fault;
    fault.rank = rank;
    double seconds = 0;
    EXPECT_EQ(last_error(fault, ranks::kPatience, seconds), fmt::format("rank {}: lost its mind", rank));
    EXPECT_LT(seconds, 10);
  }
  expect_no_more_threads_than(before);
}

TEST(RanksFaults, ARankThatHangsEndsTheStepsOfAll) {
  const int64_t before = threads_of_process();
  Fault fault;
  fault.kind = Fault::Kind::kHang;
  double seconds = 0;
  // With the patience of service, six seconds, it is the same and takes four more.
  EXPECT_EQ(last_error(fault, std::chrono::milliseconds(2000), seconds),
            "rank 1: waited 2.0 s for a part of a sum from rank 0");
  EXPECT_LT(seconds, 10);
  expect_no_more_threads_than(before);
}

TEST(RanksFaults, LoadingEndsWithTheCauseOfTheRankThatFailed) {
  const int64_t before = threads_of_process();
  const auto weights = make_random_weights(small_config(false), 5);
  const auto message = [&](const BackendFactory& backend, const RankOptions& options) {
    try {
      load_model(*weights, backend, options, model_options());
    } catch (const std::exception& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_EQ(message(
                [](const std::shared_ptr<ranks::Member>& member) {
                  if (member->rank() == 1) fail("no such device");
                  return factory(cpu::Isa::kReference)(member);
                },
                {.ranks = 2}),
            "no such device");
  EXPECT_EQ(message(factory(cpu::Isa::kReference), {.ranks = 3}),
            "--tensor-parallel-size 3: it does not divide the 4 attention heads");
  expect_no_more_threads_than(before);
}

// ---- outcomes of several steppers

class FakeStepper final : public ops::Stepper {
 public:
  const ops::StepLimits& limits() const override { return limits_; }
  ops::Ticket launch(const ops::StepPlan&) override { return ++launched; }
  void supply_masks(ops::Ticket, int32_t, std::span<const uint32_t>) override { ++masks; }
  const ops::StepOutcome& wait(ops::Ticket) override {
    outcome.lanes = std::span(&lane, 1);
    return outcome;
  }
  bool ended(ops::Ticket, std::chrono::milliseconds) override { return ends; }

  ops::LaneOutcome lane;
  ops::StepOutcome outcome;
  ops::Ticket launched = 0;
  int masks = 0;
  bool ends = true;

 private:
  ops::StepLimits limits_;
};

struct FakeRanks {
  explicit FakeRanks(std::chrono::milliseconds patience = ranks::kPatience)
      : group(std::make_shared<ranks::Group>(2, patience)) {
    std::vector<std::unique_ptr<ops::Stepper>> steppers;
    for (FakeStepper*& one : fakes) {
      steppers.push_back(std::make_unique<FakeStepper>());
      one = static_cast<FakeStepper*>(steppers.back().get());
      one->lane.tokens = {7};
    }
    stepper = make_ranked_stepper(group, std::move(steppers));
  }
  std::string step() { return stepper->wait(stepper->launch({})).error; }

  std::shared_ptr<ranks::Group> group;
  FakeStepper* fakes[2] = {};
  std::unique_ptr<ops::Stepper> stepper;
};

TEST(RankedStepper, EveryPlanAndMaskGoesToAllRanks) {
  FakeRanks ranks;
  const ops::Ticket ticket = ranks.stepper->launch({});
  ranks.stepper->supply_masks(ticket, 0, {});
  const ops::StepOutcome& outcome = ranks.stepper->wait(ticket);
  EXPECT_EQ(outcome.error, "");
  EXPECT_EQ(outcome.lanes[0].tokens, std::vector<int32_t>{7});
  for (const FakeStepper* one : ranks.fakes) {
    EXPECT_EQ(one->launched, 1u);
    EXPECT_EQ(one->masks, 1);
  }
}

TEST(RankedStepper, RanksThatChooseOtherTokensAreAnError) {
  FakeRanks ranks;
  ranks.fakes[1]->lane.tokens = {8};
  EXPECT_EQ(ranks.step(), "rank 1: it chose other tokens than rank 0");
  EXPECT_TRUE(ranks.group->failed());
}

// An error outside of the model's operations: the other ranks hear of it all the same.
TEST(RankedStepper, TheErrorOfOneRankIsTheError) {
  FakeRanks ranks;
  ranks.fakes[1]->outcome.error = "copy of a page failed";
  EXPECT_EQ(ranks.step(), "rank 1: copy of a page failed");
  EXPECT_EQ(ranks.step(), "rank 1: copy of a page failed");
  EXPECT_EQ(ranks.fakes[0]->launched, 1u) << "steps are launched after a failure";
}

// Stuck where no other rank waits for it: between its last sum and the end of the step.
TEST(RankedStepper, ARankThatDoesNotEndItsStepIsFound) {
  FakeRanks ranks(std::chrono::milliseconds(40));
  ranks.fakes[1]->ends = false;
  EXPECT_EQ(ranks.step(), "rank 1: has not ended its step 0.0 s after another rank");
  ranks.fakes[1]->ends = true;  // late, and in time for the end
}

TEST(RankedStepper, ARankThatNeverComesBackEndsTheProcess) {
  const auto life = [] {
    FakeRanks ranks(std::chrono::milliseconds(40));
    ranks.fakes[1]->ends = false;
    ranks.step();
  };
  EXPECT_EXIT(life(), testing::ExitedWithCode(4), "rank 1 does not come back, the process ends");
}

// ---- the meeting itself

TEST(RanksGroup, EveryoneSeesWhatEveryoneShows) {
  constexpr int64_t kRanks = 4, kRounds = 300;
  const auto group = std::make_shared<ranks::Group>(kRanks);
  std::vector<float> shown(static_cast<size_t>(kRanks));
  std::atomic<int64_t> wrong{0};
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      ranks::Member member(group, rank);
      float& mine = shown[static_cast<size_t>(rank)];
      for (int64_t round = 0; round < kRounds; ++round) {
        mine = static_cast<float>(round * kRanks + rank);
        const auto all = member.meet({&mine, ops::DType::kF32, 1, 1, 1});
        for (int64_t other = 0; other < kRanks; ++other) {
          if (*all[static_cast<size_t>(other)].f32() != static_cast<float>(round * kRanks + other)) ++wrong;
        }
        member.part();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

// A check is due after every so many steps; where ranks differ all of them hear it.
TEST(RanksGroup, SumsThatDifferAreAnErrorOnEveryRank) {
  const auto group = std::make_shared<ranks::Group>(3);
  std::vector<std::string> errors(3);
  std::atomic<int> checked{0};
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      ranks::SumChecks checks(std::make_shared<ranks::Member>(group, rank), 2);
      std::vector<float> values = {1, 2, 3, 4, 5, 6};
      for (int step = 1; step <= 4; ++step) {
        if (step == 4 && rank == 1) values[4] = std::nextafter(5.0f, 6.0f);
        if (!checks.due()) continue;
        ++checked;
        try {
          checks.compare(ranks::checksum_of({values.data(), ops::DType::kF32, 2, 3, 3}));
        } catch (const Error& error) {
          errors[static_cast<size_t>(rank)] = error.what();
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(checked, 6);
  for (const std::string& error : errors) {
    EXPECT_NE(error.find("after step 4 rank 1 has other bits than rank 0"), std::string::npos) << error;
  }
}

TEST(RanksGroup, TheFirstCauseStays) {
  ranks::Group group(2);
  EXPECT_EQ(group.cause(), "");
  group.fail(1, "out of memory");
  group.fail(0, "something else");
  EXPECT_TRUE(group.failed());
  EXPECT_EQ(group.cause(), "rank 1: out of memory");
}

}  // namespace
}  // namespace fourfold::model
