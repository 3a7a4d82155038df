#include "batch/exchange.h"

#include <gtest/gtest.h>

#include <future>
#include <vector>

namespace fourfold::batch {
namespace {

using std::chrono::milliseconds;

TEST(WorkLine, WorksInOrder) {
  std::vector<int> order;
  std::promise<void> done;
  WorkLine line;
  line.post_at(WorkLine::Clock::now() + milliseconds(30), [&] { order.push_back(100); });
  line.post_at(WorkLine::Clock::now() + milliseconds(20), [&] { order.push_back(99); });
  for (int i = 0; i < 50; ++i) line.post([&, i] { order.push_back(i); });
  line.post_at(WorkLine::Clock::now() + milliseconds(40), [&] { done.set_value(); });
  done.get_future().wait();
  ASSERT_EQ(order.size(), 52u);
  for (int i = 0; i < 50; ++i) EXPECT_EQ(order[static_cast<size_t>(i)], i);
  EXPECT_EQ(order[50], 99);
  EXPECT_EQ(order[51], 100);
}

TEST(MemoryExchange, IsAnsweredOnce) {
  WorkLine line;
  std::vector<serve::HttpResponse> answers;
  const auto make = [&] {
    return std::make_shared<MemoryExchange>(line, serve::HttpRequest(),
                                            [&](serve::HttpResponse answer) { answers.push_back(std::move(answer)); });
  };
  {
    const auto exchange = make();
    serve::HttpResponse response;
    response.body = "a";
    exchange->respond(response);
    exchange->respond(response);
  }
  ASSERT_EQ(answers.size(), 1u);
  EXPECT_EQ(answers[0].body, "a");
  {
    const auto exchange = make();
    exchange->begin(200, {{"x", "y"}});
    exchange->write("b");
    exchange->write("c");
    exchange->end();
    exchange->abort();
  }
  ASSERT_EQ(answers.size(), 2u);
  EXPECT_EQ(answers[1].body, "bc");
  EXPECT_EQ(answers[1].headers.size(), 1u);
  make();
  ASSERT_EQ(answers.size(), 3u);
  EXPECT_EQ(answers[2].status, 500);  // dropped
}

// The server's jobs are held by nothing else while the engine works for them.
TEST(MemoryExchange, HoldsWhoWaitsForItsEnd) {
  WorkLine line;
  int answers = 0;
  const auto job = std::make_shared<int>(0);
  {
    auto exchange =
        std::make_shared<MemoryExchange>(line, serve::HttpRequest(), [&](serve::HttpResponse) { ++answers; });
    serve::Exchange* raw = exchange.get();
    exchange->on_gone([job, exchange] {});
    exchange.reset();
    EXPECT_EQ(job.use_count(), 2);
    EXPECT_EQ(answers, 0);
    raw->respond({});
  }
  EXPECT_EQ(answers, 1);
  EXPECT_EQ(job.use_count(), 1);
}

TEST(MemoryExchange, TheLastTimerCounts) {
  WorkLine line;
  std::promise<void> done;
  std::vector<int> called;
  const auto exchange = std::make_shared<MemoryExchange>(line, serve::HttpRequest(), [](serve::HttpResponse) {});
  exchange->post([&] {  // on the line, so that none of them comes before all are set
    exchange->after(milliseconds(0), [&] { called.push_back(1); });
    exchange->after(milliseconds(5), [&] { called.push_back(2), done.set_value(); });
  });
  done.get_future().wait();
  EXPECT_EQ(called, std::vector<int>{2});
}

}  // namespace
}  // namespace fourfold::batch
