// The engine on the CUDA backend without a card: answers, drafts, and what becomes of requests when the driver fails.
#include <gtest/gtest.h>

#include <chrono>

#include "base/check.h"
#include "chat/chat_text.h"
#include "cpu/backend.h"
#include "engine/engine.h"
#include "hostcuda/testing.h"
#include "model/checkpoint.h"
#include "model/inventory.h"
#include "model/model.h"
#include "model/random_weights.h"

namespace fourfold::hostcuda {
namespace {

using engine::Event;

std::filesystem::path demo() { return std::filesystem::path(FOURFOLD_SOURCE_DIR) / "models" / "demo"; }

engine::EngineOptions engine_options(int32_t drafts = 0, int64_t draft_tokens = 0) {
  engine::EngineOptions options;
  options.max_context = 128;
  options.max_sequences = 2;
  options.max_step_tokens = 64;
  options.spare_logit_rows = 4;  // a prompt's log-probabilities take several turns
  options.page_size = 16;
  options.prefix_cache = false;
  options.drafts = drafts;
  options.draft_tokens = draft_tokens;
  return options;
}

model::ModelOptions model_options(const engine::EngineOptions& options) {
  model::ModelOptions m;
  m.max_step_tokens = options.max_step_tokens;
  m.max_logit_rows = engine::logit_rows(options);
  m.mtp = options.drafts > 0;
  return m;
}

struct Answer {
  std::vector<int32_t> tokens;
  std::vector<std::pair<int32_t, float>> logprobs;  // of all tokens, the prompt's first
  std::string error;
  int64_t accepted = 0;  // drafts
};

Answer read(engine::EventStream& stream) {
  Answer answer;
  while (const auto event = stream.next(std::chrono::minutes(4))) {
    if (event->kind == Event::Kind::kToken) {
      answer.tokens.push_back(event->token);
      for (const auto& of_token : event->prompt_logprobs) {
        for (const auto& [token, logprob] : of_token) answer.logprobs.emplace_back(token, logprob);
      }
      for (const auto& [token, logprob] : event->logprobs) answer.logprobs.emplace_back(token, logprob);
      continue;
    }
    answer.error = event->error;
    answer.accepted = event->accepted;
    return answer;
  }
  answer.error = "no end came";
  return answer;
}

std::vector<Answer> answers(const model::BackendFactory& backends, int64_t ranks, int32_t drafts, int64_t tokens = 4,
                            int64_t draft_tokens = 0) {
  model::Checkpoint checkpoint(demo());
  const chat::ChatText text(demo(), checkpoint.config());
  const engine::EngineOptions options = engine_options(drafts, draft_tokens);
  const auto engine =
      engine::make_engine(model::load_model(checkpoint, backends, {.ranks = ranks}, model_options(options)), options);
  std::vector<std::unique_ptr<engine::EventStream>> streams;
  for (const char* question : {"2 + 3?", "Hi"}) {
    chat::Conversation conversation;
    conversation.messages = Json::array({{{"role", "user"}, {"content", question}}});
    conversation.variables["enable_thinking"] = false;
    engine::Request request = text.request(text.prompt(conversation));
    request.max_tokens = tokens;
    request.sampling.temperature = 0;
    if (!streams.empty()) {  // counted where tokens are chosen
      request.sampling.repetition_penalty = 1.3f;
      request.sampling.presence_penalty = 1.5f;
      request.sampling.frequency_penalty = 0.5f;
      request.sampling.logprobs = 2;
      request.prompt_logprobs = 2;
    }
    streams.push_back(engine->submit(std::move(request)));
  }
  std::vector<Answer> all;
  for (const auto& stream : streams) all.push_back(read(*stream));
  return all;
}

struct EngineCase {
  const char* name;
  bool wide;
  bool graphs;
  int32_t drafts;
  int64_t ranks = 1;
  bool ahead = false;
  int64_t draft_tokens = 0;  // what drafts are chosen from; 0: all
};

void PrintTo(const EngineCase& c, std::ostream* out) { *out << c.name; }

class HostEngine : public testing::TestWithParam<EngineCase> {};

TEST_P(HostEngine, AnswersAsTheCpuDoes) {
  if (!executor::Device::checks_plain_accesses()) GTEST_SKIP() << "sanitizers see the kernels' accesses here";
  const EngineCase& c = GetParam();
  cpu::CpuOptions cpu;
  cpu.isa = cpu::Isa::kReference;
  const int64_t tokens = c.ahead ? 6 : 4;
  const std::vector<Answer> want = answers([&](const auto&) { return cpu::make_backend(cpu); }, 1, 0, tokens);
  install(c.ranks > 1 ? two_cards() : HostCard{});
  cuda::CudaOptions options = cuda_options(true, false, c.wide, c.graphs);
  options.rounds_ahead = c.ahead;
  const std::vector<Answer> got =
      answers(rank_backends(false, 100000, options), c.ranks, c.drafts, tokens, c.draft_tokens);
  int64_t accepted = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    EXPECT_EQ(got[i].error, "");
    EXPECT_FALSE(got[i].tokens.empty());
    EXPECT_EQ(got[i].tokens, want[i].tokens) << "request " << i;
    ASSERT_EQ(got[i].logprobs.size(), want[i].logprobs.size());
    for (size_t k = 0; k < want[i].logprobs.size(); k += 3) {  // the tokens' own, each in front of two others
      EXPECT_EQ(got[i].logprobs[k].first, want[i].logprobs[k].first) << k / 3;
      EXPECT_NEAR(got[i].logprobs[k].second, want[i].logprobs[k].second, 0.1) << k / 3;
    }
    accepted += got[i].accepted;
  }
  if (c.drafts > 0) {
    EXPECT_GT(accepted, 0);
  }
  EXPECT_EQ(live(), Live{});
}

INSTANTIATE_TEST_SUITE_P(Steps, HostEngine,
                         testing::Values(EngineCase{"Wide", true, true, 0},
                                         EngineCase{"DraftsLaunchByLaunch", false, false, 2},
                                         EngineCase{"WideDrafts", true, true, 2},
                                         EngineCase{"DraftsAhead", true, true, 2, 1, true, 1024},
                                         EngineCase{"RanksDraftsAhead", true, true, 2, 2, true}),
                         [](const auto& parameter) { return parameter.param.name; });

// ---- faults

std::unique_ptr<engine::Engine> small_engine(std::chrono::milliseconds deadline = kEmulatedStep) {
  const auto weights = model::make_random_weights(one_layer_of_each_kind(), 1);
  const engine::EngineOptions options = engine_options();
  return engine::make_engine(
      model::load_model(*weights, cuda_backend(true, false, true, true, deadline), model_options(options)), options);
}

engine::Request request_of(int32_t tokens) {
  engine::Request request;
  for (int32_t i = 0; i < tokens; ++i) request.prompt.push_back(10 + i);
  request.max_tokens = 4;
  request.sampling.temperature = 0;
  request.ignore_eos = true;
  return request;
}

class HostFaults : public testing::Test {
 protected:
  void SetUp() override {
    if (!executor::Device::checks_plain_accesses()) GTEST_SKIP() << "sanitizers see the kernels' accesses here";
    install({});
  }
};

TEST_F(HostFaults, OutOfMemoryAtAnyAllocationIsAnErrorAndLeavesNothing) {
  for (const Call call : {Call::kAllocate, Call::kHostAllocate}) {
    const int64_t before = calls(call);
    small_engine().reset();
    ASSERT_EQ(live(), Live{});
    const int64_t all = calls(call) - before;
    ASSERT_GT(all, 0);
    // Every other one of the last, which are caches, workspaces and tables; of the weights before them some.
    const int64_t weights = std::max<int64_t>(all - 20, 0);
    for (int64_t nth = 1; nth <= all; nth += nth < weights ? std::max<int64_t>(weights / 3, 1) : 2) {
      fail_call(call, nth, kOutOfMemory);
      try {
        small_engine();
        FAIL() << "allocation " << nth << " of " << all << " failed and nobody noticed";
      } catch (const Error& error) {
        EXPECT_NE(std::string(error.what()).find(call == Call::kAllocate ? "asked for" : "out of memory"),
                  std::string::npos)
            << error.what();
      }
      ASSERT_EQ(live(), Live{}) << "after allocation " << nth;
    }
  }
}

TEST_F(HostFaults, NothingIsAllocatedWhileServing) {
  const auto engine = small_engine();
  const int64_t before = calls(Call::kAllocate) + calls(Call::kHostAllocate);
  const auto first = engine->submit(request_of(40)), second = engine->submit(request_of(3));
  EXPECT_EQ(read(*first).error, "");
  EXPECT_EQ(read(*second).error, "");
  EXPECT_EQ(calls(Call::kAllocate) + calls(Call::kHostAllocate), before);
}

TEST_F(HostFaults, AFailedCallEndsEveryRequestWithItsCause) {
  struct Fault {
    Call call;
    int64_t nth;
    const char* cause;
    bool counted = false;  // with penalties: counts of the prompt's tokens are copied
  };
  for (const Fault& fault : {Fault{Call::kLaunch, 1, "launch of"},
                             {Call::kLaunch, 70, "launch of"},
                             {Call::kCopy, 1, "copy", true},
                             {Call::kSynchronize, 2, "waiting for the device"}}) {
    install({});
    {
      const auto engine = small_engine();
      std::unique_ptr<engine::EventStream> first, second;
      {
        const auto held = hold();  // nothing fails before both are there: a failed engine takes no more
        fail_call(fault.call, fault.nth, kLaunchFailed);
        engine::Request one = request_of(20), other = request_of(3);
        if (fault.counted) one.sampling.presence_penalty = other.sampling.presence_penalty = 1;
        first = engine->submit(std::move(one));
        second = engine->submit(std::move(other));
      }
      for (engine::EventStream* stream : {first.get(), second.get()}) {
        const std::string error = read(*stream).error;
        EXPECT_NE(error.find(fault.cause), std::string::npos) << error;
        EXPECT_NE(error.find("CUDA error 719"), std::string::npos) << error;
      }
      EXPECT_THROW(engine->submit(request_of(3)), engine::Refused);
    }
    EXPECT_EQ(live(), Live{});
  }
}

// ---- ranks

// Without peer memory: steps are recorded with NCCL where its version allows, and not with an older one or through the
// host. The tokens are those over peer memory, where sums take a shared expert's share along. The last three choose
// them from what each rank finds in its own columns.
TEST(HostRanksFaults, StepsGoOnWithoutPeerMemory) {
  if (!executor::Device::checks_plain_accesses()) GTEST_SKIP() << "sanitizers see the kernels' accesses here";
  const auto weights = model::make_random_weights(one_layer_of_each_kind(), 1, experts_in_bf16);
  const engine::EngineOptions options = engine_options();
  std::vector<int32_t> want;
  std::vector<int64_t> gathers;
  for (const auto& [nccl, parts] : {std::pair{-1, false}, {22703, true}, {20800, true}, {0, true}}) {
    HostCard card = two_cards();
    card.peers = nccl < 0;
    card.nccl = std::max(nccl, 0);
    install(card);
    testing::internal::CaptureStderr();
    {
      cuda::CudaOptions base = cuda_options();
      base.choose_by_parts = parts;
      auto model =
          model::load_model(*weights, rank_backends(false, 100000, base), {.ranks = 2}, model_options(options));
      const auto engine = engine::make_engine(std::move(model), options);
      engine::Request request = request_of(3);
      request.max_tokens = 6;
      const Answer answer = read(*engine->submit(std::move(request)));
      EXPECT_EQ(answer.error, "");
      EXPECT_EQ(answer.tokens.size(), 6u);
      if (want.empty()) want = answer.tokens;
      EXPECT_EQ(answer.tokens, want);
    }
    EXPECT_EQ(testing::internal::GetCapturedStderr().empty(), nccl < 0);
    gathers.push_back(nccl_calls());
    EXPECT_EQ(live(), Live{});
  }
  EXPECT_EQ(gathers[0], 0);
  EXPECT_GT(gathers[1], 0);
  EXPECT_LT(gathers[1], gathers[2]) << "what is replayed is not called again";
  EXPECT_EQ(gathers[3], 0);
}

// From what each rank finds in its own columns: the tokens that come of all logits, whatever else is in the step.
TEST(HostRanksFaults, TokensAreTheSameWithoutGatheringLogits) {
  if (!executor::Device::checks_plain_accesses()) GTEST_SKIP() << "sanitizers see the kernels' accesses here";
  const auto weights = model::make_random_weights(one_layer_of_each_kind(), 1);
  const engine::EngineOptions options = engine_options();
  std::vector<std::vector<int32_t>> want;
  std::vector<std::pair<int32_t, float>> want_logprobs;
  // From all logits, without, and as it is by itself: few rows from all logits.
  for (const auto& [parts, gathered] : {std::pair{false, 0}, {true, 0}, {true, 16}}) {
    install(two_cards());
    cuda::CudaOptions base = cuda_options();
    base.choose_by_parts = parts;
    base.gathered_rows = gathered;
    {
      const auto engine = engine::make_engine(
          model::load_model(*weights, rank_backends(false, 100000, base), {.ranks = 2}, model_options(options)),
          options);
      std::vector<std::vector<int32_t>> got;
      std::vector<std::pair<int32_t, float>> logprobs;
      const auto ask = [&](std::vector<engine::Request> requests) {
        std::vector<std::unique_ptr<engine::EventStream>> streams;
        for (engine::Request& request : requests) {
          request.max_tokens = 2;
          streams.push_back(engine->submit(std::move(request)));
        }
        for (const auto& stream : streams) {
          const Answer answer = read(*stream);
          EXPECT_EQ(answer.error, "");
          EXPECT_EQ(answer.tokens.size(), 2u);
          got.push_back(answer.tokens);
          logprobs.insert(logprobs.end(), answer.logprobs.begin(), answer.logprobs.end());
        }
      };
      engine::Request biased = request_of(2), drawn = request_of(2), asked = request_of(2), counted = request_of(2);
      for (int32_t token = 0; token < 2048; token += 3) biased.banned_tokens.push_back(token);
      biased.sampling.logit_bias = {{1999, 3.0f}};
      drawn.sampling.temperature = 1;
      drawn.sampling.seed = 5;
      asked.sampling = drawn.sampling;
      asked.sampling.logprobs = 2;
      engine::Request narrow = biased;
      narrow.sampling.temperature = 0.8f;
      narrow.sampling.top_k = 50;
      narrow.sampling.top_p = 0.9f;
      narrow.sampling.seed = 6;
      narrow.sampling.logprobs = 1;
      asked.prompt_logprobs = 1;
      counted.sampling.presence_penalty = 1;
      engine::Request greedy = request_of(2);
      greedy.sampling.logprobs = 3;
      // One at a time: two that are submitted together may begin in one step or in two, which round differently.
      ask({drawn});
      ask({narrow});
      ask({asked});
      ask({greedy});
      ask({request_of(3), biased});
      ask({counted});
      EXPECT_EQ(logprobs.size(), 2u * (1 + 1) + (1 + 1) + 2 * (1 + 2) + 2 * (1 + 3));
      if (want.empty()) want = got, want_logprobs = logprobs;
      EXPECT_EQ(got, want);
      EXPECT_EQ(logprobs, want_logprobs);
    }
    EXPECT_EQ(live(), Live{});
  }
}

// A bit of one rank's memory: nobody's tokens differ, but a checksum does, where it is asked for. Afterwards the next
// engine works. It is the last step that goes wrong: behind another one a rank may wait for the one that has stopped,
// which on a card its patience ends and here is a deadlock.
TEST(HostRanksFaults, AWrongSumEndsEveryRequestWhereSumsAreChecked) {
  if (!executor::Device::checks_plain_accesses()) GTEST_SKIP() << "sanitizers see the kernels' accesses here";
  const auto weights = model::make_random_weights(one_layer_of_each_kind(), 1);
  const engine::EngineOptions options = engine_options();
  install(two_cards());
  engine::Request one_step = request_of(3);
  one_step.max_tokens = 1;
  for (const int every : {1, 0}) {
    cuda::CudaOptions base = cuda_options();
    base.check_sums = every;
    const auto start = [&] {
      return engine::make_engine(
          model::load_model(*weights, rank_backends(false, 100000, base), {.ranks = 2}, model_options(options)),
          options);
    };
    {
      const auto engine = start();
      corrupt_sum(2);  // of 4 in a step
      const std::string error = read(*engine->submit(one_step)).error;
      if (every == 0) {
        EXPECT_EQ(error, "");
      } else {
        EXPECT_NE(error.find("after step 1 rank 1 has other bits than rank 0"), std::string::npos) << error;
        EXPECT_THROW(engine->submit(one_step), engine::Refused);
      }
    }
    EXPECT_EQ(live(), Live{});
    if (every == 0) continue;
    const auto engine = start();
    EXPECT_EQ(read(*engine->submit(one_step)).error, "");
  }
  EXPECT_EQ(live(), Live{});
}

// A rank that fails, and one whose kernels never come: everybody hears why, and nothing is left.
TEST(HostRanksFaults, ARankThatFailsOrHangsEndsEveryRequest) {
  if (!executor::Device::checks_plain_accesses()) GTEST_SKIP() << "sanitizers see the kernels' accesses here";
  const auto weights = model::make_random_weights(one_layer_of_each_kind(), 1);
  for (const bool hangs : {false, true}) {
    HostCard card = two_cards();
    card.lone_after = std::chrono::milliseconds(hangs ? 200 : 0);
    install(card);
    {
      const engine::EngineOptions options = engine_options();
      auto model = model::load_model(*weights, rank_backends(false, 1000), {.ranks = 2}, model_options(options));
      const auto engine = engine::make_engine(std::move(model), options);
      if (hangs) {
        hold_meetings_of(1);
      } else {
        fail_call(Call::kLaunch, 30, kOutOfMemory);
      }
      const auto begin = std::chrono::steady_clock::now();
      const auto stream = engine->submit(request_of(3));
      const std::string error = read(*stream).error;
      EXPECT_NE(error.find(hangs ? "rank 1 did not come to a sum" : "out of memory"), std::string::npos) << error;
      EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(30));
      hold_meetings_of(-1);
      EXPECT_THROW(engine->submit(request_of(3)), engine::Refused);
    }
    EXPECT_EQ(live(), Live{});
  }
}

// A kernel that does not end: every request is told within the limit of a step, with what was launched last, and nobody
// waits for the card again.
TEST_F(HostFaults, AKernelThatNeverEndsEndsEveryRequest) {
  static_assert(cuda::kStepDeadline <= std::chrono::seconds(9));
  for (const int64_t nth : {1, 4}) {
    install({});
    {
      const auto engine = small_engine(std::chrono::milliseconds(300));
      std::unique_ptr<engine::EventStream> first, second;
      {
        const auto held = hold();
        hang_launch(nth);
        first = engine->submit(request_of(20));
        second = engine->submit(request_of(3));
      }
      const auto begin = std::chrono::steady_clock::now();
      for (engine::EventStream* stream : {first.get(), second.get()}) {
        const std::string error = read(*stream).error;
        EXPECT_NE(error.find("no end within 0.3 s"), std::string::npos) << error;
      }
      EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(8));
      EXPECT_THROW(engine->submit(request_of(3)), engine::Refused);
    }
    EXPECT_EQ(endless_waits(), 0);
  }
  install({});
}

// The card does not come back while a model is loaded.
TEST_F(HostFaults, AKernelThatNeverEndsWhileLoadingIsAnError) {
  const auto backend = cuda_backend();
  hang_launch(3);
  model::Checkpoint checkpoint(demo());
  try {
    cuda::device_of(*backend).set_deadline(std::chrono::milliseconds(300));
    model::load_model(checkpoint, backend, model_options(engine_options()));
    FAIL() << "it was loaded";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("no end within 0.3 s"), std::string::npos) << error.what();
  }
  EXPECT_EQ(endless_waits(), 0);
}

}  // namespace
}  // namespace fourfold::hostcuda
