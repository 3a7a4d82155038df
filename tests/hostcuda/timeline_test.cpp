// Timelines of steps on the host driver, where the clock is the host's.
#include <gtest/gtest.h>

#include <numeric>

#include "cuda/backend/timeline.h"
#include "engine/engine.h"
#include "hostcuda/testing.h"
#include "measure/trace.h"
#include "model/model.h"
#include "model/random_weights.h"

namespace fourfold::hostcuda {
namespace {

class HostTimeline : public testing::Test {
 protected:
  void SetUp() override {
    if (!executor::Device::checks_plain_accesses()) GTEST_SKIP() << "sanitizers see the kernels' accesses here";
    install({});
  }
  static std::unique_ptr<model::Model> small_model() {
    model::ModelOptions options;
    options.max_step_tokens = options.max_logit_rows = 32;
    return model::load_model(*model::make_random_weights(one_layer_of_each_kind(), 1), cuda_backend(), options);
  }
};

TEST_F(HostTimeline, EveryOperationOfAStepIsThereInOrder) {
  {
    const auto model = small_model();
    model::Caches caches = model->make_caches(4, 16, 1);
    const std::vector<int32_t> tokens = {7}, pages = {0, 1, 2, 3};
    const auto forward = [&] {
      ops::Sequence sequence;
      sequence.count = 1;
      sequence.pages = pages;
      const int32_t last = 0;
      model->forward({std::span(tokens), std::span(&sequence, 1), std::span(&last, 1)}, caches);
    };
    const auto timeline = cuda::timeline_of(model->backend(), forward);
    ASSERT_TRUE(timeline);
    const auto times = [&](const char* name) {
      return std::count_if(timeline->spans.begin(), timeline->spans.end(),
                           [&](const auto& span) { return span.name == name; });
    };
    EXPECT_EQ(times("embedding"), 1);
    EXPECT_EQ(times("delta rule"), 1);
    EXPECT_EQ(times("attention"), 1);
    EXPECT_EQ(times("experts"), 2);
    EXPECT_EQ(times("router"), 0) << "it is part of the product in front";
    EXPECT_EQ(times("choice of experts"), 2);
    EXPECT_EQ(timeline->spans.front().name, "embedding");
    EXPECT_GT(timeline->us, 0);
    double sum = 0;
    for (size_t i = 0; i < timeline->spans.size(); ++i) {
      const cuda::TimelineSpan& span = timeline->spans[i];
      EXPECT_GE(span.us, 0);
      EXPECT_GT(span.bytes, 0) << span.name;
      if (i > 0) {
        EXPECT_GE(span.start_us + 1e-6, timeline->spans[i - 1].start_us + timeline->spans[i - 1].us);
      }
      sum += span.us;
    }
    EXPECT_LE(sum, timeline->us + 1e-3);
  }
  EXPECT_EQ(live(), Live{});
}

TEST_F(HostTimeline, TheHostsPartsOfStepsAreNotedWhenAsked) {
  engine::EngineOptions options;
  options.max_context = 64;
  options.max_sequences = 1;
  options.max_step_tokens = 32;
  options.page_size = 16;
  options.prefix_cache = false;
  const auto engine = engine::make_engine(small_model(), options);
  const auto answer = [&] {
    engine::Request request;
    request.prompt = {1, 2, 3};
    request.max_tokens = 3;
    request.sampling.temperature = 0;
    request.ignore_eos = true;
    const auto stream = engine->submit(std::move(request));
    while (const auto event = stream->next(std::chrono::minutes(4))) {
      if (event->kind == engine::Event::Kind::kFinished) break;
    }
  };
  answer();
  EXPECT_TRUE(cuda::take_host_spans().empty());
  cuda::note_host_spans(true);
  answer();
  cuda::note_host_spans(false);
  const std::vector<cuda::TimelineSpan> spans = cuda::take_host_spans();
  for (const char* name : {"body of a step", "tables of a part", "wait for tokens"}) {
    const auto there = std::count_if(spans.begin(), spans.end(), [&](const auto& span) { return span.name == name; });
    EXPECT_GE(there, 3) << name;
  }
  EXPECT_TRUE(cuda::take_host_spans().empty());
}

TEST(Trace, IsWhatViewersRead) {
  cuda::CardTimeline timeline;
  timeline.spans = {{"product \"a\"", 10, 2.5, 100, 7}, {"norm", 13, 1, 50, 0}};
  timeline.us = 4;
  timeline.stamp_us = 0.5;
  const Json trace = Json::parse(
      measure::chrome_trace({measure::track_of("decode", timeline), {"host", {{"body", 5, 1, 0, 0}}, Json::object()}})
          .dump());
  ASSERT_EQ(trace.at("traceEvents").size(), 7);
  int complete = 0;
  for (const Json& event : trace.at("traceEvents")) {
    ASSERT_TRUE(event.at("name").is_string() && event.at("ph").is_string() && event.at("pid").is_number_unsigned());
    if (event.at("ph") == "M") {
      EXPECT_TRUE(event.at("args").is_object());
      continue;
    }
    EXPECT_EQ(event.at("ph"), "X");
    EXPECT_GE(event.at("ts").get<double>(), 0);
    EXPECT_GE(event.at("dur").get<double>(), 0);
    EXPECT_TRUE(event.contains("tid"));
    ++complete;
  }
  EXPECT_EQ(complete, 3);
  EXPECT_EQ(trace["traceEvents"][2], Json({{"name", "product \"a\""},
                                           {"ph", "X"},
                                           {"pid", 1},
                                           {"tid", 1},
                                           {"ts", 0.0},
                                           {"dur", 2.5},
                                           {"args", {{"bytes", 100.0}, {"flops", 7.0}}}}));
  EXPECT_EQ(trace["otherData"]["decode"]["step_with_times_us"], 4);
}

}  // namespace
}  // namespace fourfold::hostcuda
