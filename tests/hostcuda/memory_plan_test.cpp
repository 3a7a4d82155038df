// The memory plan against what the backend allocates on the host driver.
#include <gtest/gtest.h>

#include "base/check.h"
#include "base/json.h"
#include "hostcuda/testing.h"
#include "memory/plan.h"
#include "model/checkpoint.h"
#include "model/shape_source.h"

namespace fourfold::hostcuda {
namespace {

std::filesystem::path demo() { return std::filesystem::path(FOURFOLD_SOURCE_DIR) / "models" / "demo"; }

cuda::CudaOptions cuda_options(bool fp8, int64_t library_rows = 0) {
  cuda::CudaOptions options;
  options.store = kernel_store();
  options.self_test = options.test_kernels = false;
  options.fp8_cache = fp8;
  options.library_rows = library_rows;
  options.threads = 2;
  return options;
}

engine::EngineOptions engine_options(int64_t context, int64_t sequences, int32_t drafts) {
  engine::EngineOptions options;
  options.max_context = context;
  options.max_sequences = sequences;
  options.max_step_tokens = 64;
  options.page_size = 16;
  options.drafts = drafts;
  return options;
}

memory::Demand demand_of(model::Checkpoint& checkpoint, const engine::EngineOptions& engine, bool fp8 = false) {
  memory::Demand demand;
  demand.shapes = [&checkpoint] { return model::shapes_of(checkpoint); };
  demand.cuda = cuda_options(fp8);
  demand.engine = engine;
  demand.model.mtp = engine.drafts != 0;
  return demand;
}

struct PlanCase {
  const char* name;
  int64_t context, sequences;
  int32_t drafts;
  bool fp8;
  int64_t library_rows = 0;
};
void PrintTo(const PlanCase& c, std::ostream* out) { *out << c.name; }

class HostMemoryPlan : public testing::TestWithParam<PlanCase> {
 protected:
  void SetUp() override {
    if (!executor::Device::checks_plain_accesses()) GTEST_SKIP() << "sanitizers see the kernels' accesses here";
    install({.cublaslt = true});
  }
};

// Byte for byte and kind by kind, before a request and after some; and no more of the driver's memory than planned.
TEST_P(HostMemoryPlan, IsWhatIsAllocated) {
  const PlanCase& c = GetParam();
  {
    model::Checkpoint checkpoint(demo());
    const engine::EngineOptions options = engine_options(c.context, c.sequences, c.drafts);
    memory::Demand demand = demand_of(checkpoint, options);
    demand.cuda = cuda_options(c.fp8, c.library_rows);
    demand.model.max_step_tokens = options.max_step_tokens;
    const memory::Plan plan = memory::plan(demand, {cuda::card_memory(0)});
    EXPECT_EQ(live(), Live{}) << "planning takes no memory";
    EXPECT_EQ(calls(Call::kAllocate), 0);
    const std::shared_ptr<ops::Backend> backend = cuda::make_backend(cuda_options(c.fp8, c.library_rows));
    model::ModelOptions model;
    model.max_step_tokens = options.max_step_tokens;
    model.max_logit_rows = engine::logit_rows(options);
    model.mtp = options.drafts != 0;
    const auto engine = engine::make_engine(model::load_model(checkpoint, backend, model), options);
    const auto compare = [&](const char* when) {
      const cuda::MemoryCounts counts = cuda::memory_of(*backend);
      uint64_t buffers = 0;
      for (size_t i = 0; i < cuda::kMemoryKinds; ++i) {
        const std::string name = cuda::memory_kind_name(static_cast<cuda::MemoryKind>(i));
        uint64_t planned = 0;
        for (const memory::Plan::Item& item : plan.ranks[0].items) planned += item.name == name ? item.bytes : 0;
        EXPECT_EQ(counts.of[i].bytes, planned) << name << ' ' << when;
        buffers += counts.of[i].bytes;
      }
      EXPECT_EQ(live().bytes, buffers) << "the ledger is not what the driver has";
      EXPECT_LE(peak_bytes(), plan.planned());
    };
    compare("before");
    const bool plain = c.drafts == 0 && !c.fp8;  // the others allocate as it does, but for drafts and caches
    for (const int32_t length : plain ? std::vector<int32_t>{20, 50} : std::vector<int32_t>{20}) {
      engine::Request request;
      for (int32_t t = 0; t < length; ++t) request.prompt.push_back(10 + t);
      request.max_tokens = 3;
      request.sampling.temperature = 0;
      const auto stream = engine->submit(std::move(request));
      while (const auto event = stream->next(std::chrono::minutes(4))) {
        if (event->kind == engine::Event::Kind::kFinished) {
          EXPECT_EQ(event->error, "");
          break;
        }
      }
    }
    compare("after requests");
    EXPECT_EQ(library_products() > 0, c.library_rows > 0);
  }
  EXPECT_EQ(live(), Live{});
}

INSTANTIATE_TEST_SUITE_P(Sizes, HostMemoryPlan,
                         testing::Values(PlanCase{"Small", 128, 2, 0, false}, PlanCase{"Drafts", 256, 2, 2, false},
                                         PlanCase{"StepsBeyondTheContext", 32, 1, 0, true},
                                         PlanCase{"Fp8ManyLibrary", 2048, 8, 0, true, 18}),
                         [](const auto& parameter) { return parameter.param.name; });

// Of a model that is split: byte for byte what each rank allocates, on cards of their own and on one for both.
TEST(HostMemoryRanks, EachRankIsWhatItAllocates) {
  for (const bool one_card : {false, true}) {
    SCOPED_TRACE(one_card ? "one card" : "two cards");
    HostCard installed = two_cards();
    if (one_card) installed.devices = 1;
    install(installed);
    {
      model::Checkpoint checkpoint(demo());
      engine::EngineOptions options = engine_options(128, 2, 0);
      memory::Demand demand = demand_of(checkpoint, options);
      demand.ranks = 2;
      demand.cuda.exchange_bytes = 1 << 18;
      memory::Cards cards;
      for (int rank = 0; rank < 2; ++rank) cards.push_back(cuda::card_memory(one_card ? 0 : rank));
      const memory::Plan plan = memory::plan(demand, cards);
      EXPECT_EQ(calls(Call::kAllocate), 0);
      ASSERT_EQ(plan.ranks.size(), 2u);
      std::vector<std::shared_ptr<ops::Backend>> backends(2);
      const model::BackendFactory factory = rank_backends(one_card);
      const auto keep = [&](const std::shared_ptr<ranks::Member>& member) {
        return backends[static_cast<size_t>(member->rank())] = factory(member);
      };
      model::ModelOptions model;
      model.max_step_tokens = options.max_step_tokens;
      model.max_logit_rows = engine::logit_rows(options);
      {
        const auto engine =
            engine::make_engine(model::load_model(checkpoint, keep, {.ranks = 2}, std::move(model)), options);
        uint64_t all = 0;
        for (size_t rank = 0; rank < 2; ++rank) {
          const memory::Plan::Share& share = plan.ranks[rank];
          const cuda::MemoryCounts counts = cuda::memory_of(*backends[rank]);
          for (size_t i = 0; i < cuda::kMemoryKinds; ++i) {
            const std::string name = cuda::memory_kind_name(static_cast<cuda::MemoryKind>(i));
            uint64_t planned = 0;
            for (const memory::Plan::Item& item : share.items) planned += item.name == name ? item.bytes : 0;
            EXPECT_EQ(counts.of[i].bytes, planned) << name << " of rank " << rank;
            all += counts.of[i].bytes;
          }
          EXPECT_EQ(share.device, one_card ? 0 : static_cast<int>(rank));
          EXPECT_EQ(share.others, one_card ? plan.ranks[1 - rank].planned : 0);
        }
        EXPECT_EQ(live().bytes, all) << "the ledgers are not what the driver has";
      }
      backends.clear();
    }
    EXPECT_EQ(live(), Live{});
  }
}

class HostMemoryLimits : public testing::Test {
 protected:
  void SetUp() override { install({}); }
  // A card with so many bytes free of 8 GB.
  static cuda::CardMemory card(uint64_t free) {
    HostCard host;
    cuda::CardMemory card = {device_info(host), {free, uint64_t{8} << 30}};
    return card;
  }
};

TEST_F(HostMemoryLimits, WhatDoesNotFitIsRefusedWithWhatDoes) {
  model::Checkpoint checkpoint(demo());
  memory::Demand demand = demand_of(checkpoint, engine_options(2048, 64, 0));
  const memory::Plan all = memory::plan(demand, {card(uint64_t{8} << 30)}, 1.0);
  EXPECT_TRUE(all.fits());
  const cuda::CardMemory little = card(all.planned() - (all.planned() - cuda::kBesideBuffers) / 3);
  try {
    memory::require(demand, {little}, 1.0);
    FAIL() << "it fits";
  } catch (const memory::NotEnough& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("a context of 2048 with 64 at once takes"), std::string::npos) << text;
    EXPECT_NE(error.table().find("recurrent states"), std::string::npos) << error.table();
    // What it offers fits, and a little more does not.
    const size_t at = text.find("fits: a context of ");
    const size_t fewer = text.find(" at once with a context of 2048");
    ASSERT_TRUE(at != std::string::npos && fewer != std::string::npos) << text;
    const int64_t count = std::stoll(text.substr(text.rfind(' ', fewer - 1) + 1));
    demand.engine.max_sequences = count;
    EXPECT_TRUE(memory::plan(demand, {little}, 1.0).fits()) << count;
    demand.engine.max_sequences = count + 1;
    EXPECT_FALSE(memory::plan(demand, {little}, 1.0).fits()) << count;
    demand.engine.max_sequences = 64;
    demand.engine.max_context = std::stoll(text.substr(at + 19));
    EXPECT_TRUE(memory::plan(demand, {little}, 1.0).fits()) << demand.engine.max_context;
  }
  // A card that the weights alone fill.
  EXPECT_THROW(memory::require(demand, {card(uint64_t{600} << 20)}, 1.0), memory::NotEnough);
}

TEST_F(HostMemoryLimits, TheLargestSizesFillTheCardAndAreKeptWhereTheyWereAskedFor) {
  model::Checkpoint checkpoint(demo());
  const memory::Demand demand = demand_of(checkpoint, engine_options(128, 1, 0));
  const int64_t positions = checkpoint.config().max_positions;
  for (const double gigabytes : {1.5, 2.0, 4.0, 8.0}) {
    const cuda::CardMemory memory = card(static_cast<uint64_t>(gigabytes * 1073741824.0));
    SCOPED_TRACE(gigabytes);
    const memory::Plan plan = memory::largest(demand, {}, 64, positions, {memory}, 0.95);
    EXPECT_TRUE(plan.fits());
    EXPECT_GE(plan.engine.cache_tokens, plan.engine.max_context);
    EXPECT_LE(plan.engine.cache_tokens,
              std::max(plan.engine.max_sequences * plan.engine.max_context, plan.engine.max_context));
    // Steps are longer where they leave most of the card to the caches, and never shorter than they were.
    const int64_t usual = demand.engine.max_step_tokens;
    EXPECT_GE(plan.engine.max_step_tokens, usual);
    const memory::Plan steps =
        memory::largest(demand, {.sequences = 64, .step_tokens = usual}, 64, positions, {memory}, 0.95);
    EXPECT_EQ(steps.engine.max_step_tokens, usual);
    EXPECT_LT(steps.longest_step_seconds, plan.longest_step_seconds + 1e-12);
    // More sequences, too, but not where others than the engine say how many, or how long steps are.
    EXPECT_LE(plan.engine.max_sequences, memory::kCardSequences);
    EXPECT_LE(memory::largest(demand, {.step_tokens = 100}, 64, positions, {memory}, 0.95).engine.max_sequences, 64);
    if (gigabytes == 8.0) {
      EXPECT_EQ(plan.engine.max_step_tokens, memory::kCardStepTokens);
      EXPECT_EQ(plan.engine.max_sequences, memory::kCardSequences);
    }
    const memory::Plan kept = memory::largest(demand, {.context = 512, .sequences = 3}, 64, positions, {memory}, 0.95);
    EXPECT_EQ(kept.engine.max_context, 512);
    EXPECT_EQ(kept.engine.max_sequences, 3);
    EXPECT_TRUE(kept.fits());
    const memory::Plan cache =
        memory::largest(demand, {.context = 512, .sequences = 3, .cache_tokens = 1024}, 64, positions, {memory}, 0.95);
    EXPECT_EQ(cache.engine.cache_tokens, 1024);
  }
  EXPECT_THROW(
      memory::largest(demand, {.context = 512, .sequences = 1000}, 64, positions, {card(uint64_t{1500} << 20)}, 0.95),
      memory::NotEnough);
}

// Spare rows of logits where there is room for them, fewer where they would keep a model from running.
TEST_F(HostMemoryLimits, SpareRowsOfLogitsAreGivenUpFirst) {
  model::Checkpoint checkpoint(demo());
  memory::Demand demand = demand_of(checkpoint, engine_options(512, 1, 0));
  demand.engine.prefix_cache = false;
  demand.engine.max_step_tokens = 512;
  const memory::Wishes wishes = {.context = 512, .sequences = 1, .step_tokens = 512};
  const auto rows_with = [&](uint64_t bytes) {
    const memory::Plan plan = memory::largest(demand, wishes, 1, 512, {card(bytes)}, 1.0);
    EXPECT_TRUE(plan.fits());
    return plan.engine.spare_logit_rows;
  };
  EXPECT_EQ(rows_with(uint64_t{8} << 30), 128);
  demand.engine.spare_logit_rows = 32;
  const uint64_t least = memory::plan(demand, {card(uint64_t{8} << 30)}, 1.0).planned();
  demand.engine.spare_logit_rows = 128;
  EXPECT_FALSE(memory::plan(demand, {card(least)}, 1.0).fits());
  EXPECT_EQ(rows_with(least), 32);
}

// On a slow card steps are shorter, so that none is given up for its length.
TEST_F(HostMemoryLimits, TheLongestStepOfASlowCardEndsInTime) {
  model::Checkpoint checkpoint(demo());
  const memory::Demand demand = demand_of(checkpoint, engine_options(128, 1, 0));
  const int64_t positions = checkpoint.config().max_positions;
  cuda::CardMemory slow = card(uint64_t{8} << 30);
  ++slow.info.sms;  // not a card of the table, whose rate is known
  slow.info.clock_ghz = 1;
  const memory::Plan fast = memory::largest(demand, {}, 64, positions, {slow}, 0.95);
  EXPECT_EQ(fast.engine.max_step_tokens, memory::kCardStepTokens);
  const double limit = std::chrono::duration<double>(cuda::kStepDeadline).count() / 2;
  slow.info.clock_ghz = fast.longest_step_seconds / limit / 1.5;
  const memory::Plan plan = memory::largest(demand, {}, 64, positions, {slow}, 0.95);
  EXPECT_EQ(plan.engine.max_step_tokens, fast.engine.max_step_tokens / 2);
  EXPECT_LE(plan.longest_step_seconds, limit);
  EXPECT_GT(plan.longest_step_seconds, limit / 2);
  // Unless somebody asks for it.
  EXPECT_EQ(memory::largest(demand, {.step_tokens = positions}, 64, positions, {slow}, 0.95).engine.max_step_tokens,
            positions);
}

// Ranks that share a card share its memory, and a rank alone on a small one is who decides.
TEST_F(HostMemoryLimits, EveryRankMustFit) {
  model::Checkpoint checkpoint(demo());
  memory::Demand demand = demand_of(checkpoint, engine_options(512, 4, 0));
  demand.ranks = 2;
  demand.cuda.exchange_bytes = 1 << 18;
  const auto with = [&](uint64_t first, uint64_t second, bool shared) {
    memory::Cards cards = {card(first), card(second)};
    cards[1].device = shared ? 0 : 1;
    return memory::plan(demand, cards, 1.0);
  };
  const uint64_t enough = uint64_t{8} << 30;
  const memory::Plan apart = with(enough, enough, false);
  EXPECT_TRUE(apart.fits());
  const uint64_t one = apart.planned();
  EXPECT_TRUE(with(one, one, false).fits());
  const memory::Plan small = with(enough, one - 1, false);
  EXPECT_FALSE(small.fits());
  EXPECT_EQ(small.tightest().device, 1);
  EXPECT_NE(memory::text(small).find("rank 1 of 2"), std::string::npos) << memory::text(small);
  EXPECT_EQ(memory::json(small).at("ranks").size(), 2u);
  // Both on one: together they take twice as much.
  EXPECT_FALSE(with(one, one, true).fits());
  EXPECT_TRUE(with(2 * one, 2 * one, true).fits());
  // Cards that are alike; what was asked for is kept, and caches take the rest of each.
  const memory::Plan largest = memory::largest(demand, {.context = 512, .sequences = 2}, 2,
                                               checkpoint.config().max_positions, {card(enough)}, 1.0);
  EXPECT_TRUE(largest.fits());
  EXPECT_EQ(largest.engine.max_context, 512);
  EXPECT_EQ(largest.ranks[1].device, 1);
}

TEST_F(HostMemoryLimits, FormatsAreToldApart) {
  const auto random = [](ops::Format format) {
    memory::Demand demand;
    model::ModelConfig config = model::shape_config("35B-A3B");
    config.mtp_layers = 0;
    config.vocabulary = 4096;
    model::set_layers(config, 4);
    demand.shapes = [=] {
      return model::shapes_of(config, [=](model::WeightKind kind) {
        return kind == model::WeightKind::kDeltaNet || kind == model::WeightKind::kAttention
                   ? format
                   : model::default_format(kind);
      });
    };
    demand.engine = engine_options(1024, 2, 0);
    HostCard host;
    return memory::plan(demand, {{device_info(host), {uint64_t{100} << 30, uint64_t{100} << 30}}});
  };
  const auto bytes = [](const memory::Plan& plan, const std::string& name) {
    uint64_t sum = 0;
    for (const memory::Plan::Item& item : plan.ranks[0].items) sum += item.name == name ? item.bytes : 0;
    return sum;
  };
  const memory::Plan fp8 = random(ops::Format::kFp8), bf16 = random(ops::Format::kBf16);
  // Projections of three delta-net layers and one of attention.
  const uint64_t weights = 3 * (uint64_t{12288} + 4096) * 2048 + (uint64_t{9216} + 4096) * 2048;
  EXPECT_NEAR(static_cast<double>(bytes(fp8, "weights, fp8")), static_cast<double>(weights), 0.01 * weights);
  EXPECT_EQ(bytes(bf16, "weights, fp8"), 0);
  EXPECT_NEAR(static_cast<double>(bytes(bf16, "weights, bf16") - bytes(fp8, "weights, bf16")),
              2.0 * static_cast<double>(weights), 0.01 * weights);
  EXPECT_EQ(bytes(bf16, "weights, nvfp4"), bytes(fp8, "weights, nvfp4"));
}

// What a backend that counts says is launched (works_of(), which `plan --step` prices) is what one with a card
// launches.
TEST(HostWorks, AreWhatIsLaunched) {
  if (!executor::Device::checks_plain_accesses()) GTEST_SKIP() << "sanitizers see the kernels' accesses here";
  install({});
  {
    model::Checkpoint checkpoint(demo());
    constexpr int64_t kMany = 17;
    const std::vector<int32_t> tokens(kMany, 5), pages = {0, 1};
    // Launches of a pass over so many rows.
    const auto launches = [&](model::Model& model, int64_t rows, const auto& count) {
      model::Caches caches = model.make_caches(2, 16, 1);
      ops::Sequence sequence;
      sequence.count = static_cast<int32_t>(rows);
      sequence.pages = pages;
      const int32_t last = sequence.count - 1;
      const ops::Batch batch = {std::span(tokens).first(static_cast<size_t>(rows)), std::span(&sequence, 1),
                                std::span(&last, 1)};
      return count([&] { model.forward(batch, caches); });
    };
    const auto load = [&](const std::shared_ptr<ops::Backend>& backend) {
      model::ModelOptions options;
      options.max_step_tokens = kMany;
      options.max_logit_rows = 1;
      return model::load_model(checkpoint, backend, options);
    };
    const auto here = load(cuda::make_backend(cuda_options(false)));
    HostCard card;
    const auto counted = load(cuda::make_counting_backend(cuda_options(false), device_info(card), card.memory));
    for (const int64_t rows : {int64_t{1}, kMany}) {
      const int64_t wanted = launches(*here, rows, [](const auto& forward) {
        const int64_t before = calls(Call::kLaunch);
        forward();
        return calls(Call::kLaunch) - before;
      });
      std::vector<plan::step::Work> works;
      const int64_t found = launches(*counted, rows, [&](const auto& forward) {
        works = cuda::works_of(counted->backend(), forward);
        int64_t sum = 0;
        for (const plan::step::Work& work : works) sum += static_cast<int64_t>(work.launches.size());
        return sum;
      });
      EXPECT_EQ(found, wanted) << rows << " rows";
      EXPECT_GT(works.size(), 20u);
    }
  }
  EXPECT_EQ(live(), Live{});
}

}  // namespace
}  // namespace fourfold::hostcuda
