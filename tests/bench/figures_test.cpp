#include "bench/figures.h"

#include <gtest/gtest.h>

#include "base/check.h"

namespace fourfold::bench {
namespace {

// `tokens` tokens, the first after `first` seconds, the others 0.1 s apart.
RequestRecord request(double first, int64_t tokens) {
  RequestRecord record;
  record.start = 1;
  for (int64_t i = 0; i < tokens; ++i) record.pieces.push_back(1 + first + 0.1 * static_cast<double>(i));
  record.first = record.pieces.front();
  record.first_content = record.pieces.back();
  record.end = record.pieces.back();
  record.output_tokens = tokens;
  record.prompt_tokens = 10;
  record.finish = "stop";
  return record;
}

TEST(Figures, PercentilesAreValuesThatOccurred) {
  std::vector<double> values;
  for (int i = 100; i >= 1; --i) values.push_back(i);
  const Distribution d = distribution(values);
  EXPECT_EQ(d.p50, 50);
  EXPECT_EQ(d.p90, 90);
  EXPECT_EQ(d.p99, 99);
  EXPECT_DOUBLE_EQ(d.mean, 50.5);
  EXPECT_NEAR(d.deviation, 28.866, 1e-3);
  EXPECT_EQ(distribution({3}).p99, 3);
  EXPECT_EQ(distribution({}).count, 0);
  EXPECT_EQ(median({4, 1, 3, 2}), 2.5);
}

TEST(Figures, FailedRequestsDeliverNothing) {
  LoadResult one, two;
  one.requests = {request(0.5, 11), request(1.0, 21)};
  one.seconds = 4;
  two = one;
  two.requests[1].error = "cut";
  two.seconds = 2;
  const Figures f = figures({one, two}, Goodput::parse({"ttft:600", "tpot:200"}));
  EXPECT_EQ(f.completed, 3);
  EXPECT_EQ(f.failed, 1);
  EXPECT_EQ(f.errors.at("cut"), 1);
  EXPECT_EQ(f.output_tokens, 43);
  EXPECT_EQ(f.output_rates, (std::vector<double>{8, 5.5}));
  EXPECT_DOUBLE_EQ(f.first.p50, 0.5);
  EXPECT_NEAR(f.per_token.p99, 0.1, 1e-9);
  EXPECT_EQ(f.between.count, 10 + 20 + 10);
  EXPECT_NEAR(f.whole.p99, 3.0, 1e-9);
  EXPECT_DOUBLE_EQ(f.good_rate, (1.0 / 4 + 1.0 / 2) / 2);  // the slow first token is beyond its limit
  EXPECT_TRUE(f.server_counts);
}

TEST(Figures, GoodputHasEachLimit) {
  const RequestRecord r = request(0.5, 11);  // 0.5 s, 0.1 s a token, 1.5 s
  EXPECT_TRUE(Goodput::parse({"ttft:501", "tpot:101", "e2el:1501"}).met(r));
  for (const char* limit : {"ttft:499", "tpot:99", "e2el:1499"}) EXPECT_FALSE(Goodput::parse({limit}).met(r)) << limit;
  for (const char* bad : {"ttft", "ttft:", "ttft:x", "ttft:-1", "other:1", "ttft:1s"}) {
    EXPECT_THROW(Goodput::parse({bad}), Error) << bad;
  }
}

}  // namespace
}  // namespace fourfold::bench
