// fourfold bench serve, with the demo model on both sides of the socket.
#include "program.h"

namespace fourfold {
namespace {

using BenchServe = Cmd;

TEST_F(BenchServe, MeasuresTheTwinFirst) {
  const std::string page = path("page.html"), report = path("report.json");
  const Json out =
      run_json("bench serve '" + demo_ +
               "' --drafts 1 --prompts trivial --thinking off --concurrency 2 --requests 3 --repeat 2 --warm-up "
               "1 --max-tokens 16 --json --html '" +
               page + "' --out '" + report + "'");
  ASSERT_EQ(out["cells"].size(), 2u);
  const Json &twin = out["cells"][0], &drafted = out["cells"][1];
  EXPECT_EQ(twin["drafts"], "0");
  EXPECT_EQ(drafted["drafts"], "1");
  EXPECT_EQ(twin["prompts_checksum"], drafted["prompts_checksum"]);
  EXPECT_EQ(twin["total_output_tokens"], drafted["total_output_tokens"]);  // the same answers
  for (const Json& cell : out["cells"]) {
    EXPECT_EQ(cell["completed"], 6);
    EXPECT_EQ(cell["failed"], 0);
    EXPECT_EQ(cell["tokens_counted_by"], "server");
    EXPECT_GT(cell["server_rss_bytes"].get<int64_t>(), 1 << 20);
  }
  EXPECT_GT(drafted["speculation"]["accepted"].get<double>(), 0);
  EXPECT_EQ(twin["speculation"]["drafted"], 0);
  EXPECT_TRUE(drafted.contains("speed_up"));
  EXPECT_EQ(Json::parse(read(report)), out);
  EXPECT_NE(read(page).find("<svg"), std::string::npos);
  const Outcome compared = run("bench serve --compare '" + report + "' '" + report + "'");
  EXPECT_EQ(compared.status, 0) << compared.err;
  EXPECT_NE(compared.out.find("1.00"), std::string::npos);
}

TEST_F(BenchServe, RefusesWhatWouldFlatter) {
  const std::string one = write("one.jsonl", "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}]}\n");
  expect_refused("bench serve '" + demo_ + "' --prompts '" + one + "' --requests 2", {"1 different prompts", "wanted"});
  expect_refused("bench serve", {"wanted a URL"});
  expect_refused("bench serve ftp://localhost", {"no http://"});
  expect_refused("bench serve http://127.0.0.1:1", {"cannot connect"});
  expect_refused("bench serve http://127.0.0.1:1 --drafts 1", {"--drafts"});
  expect_refused("bench serve '" + demo_ + "' --concurrency 0", {"--concurrency", "1"});
  expect_refused("bench serve '" + demo_ + "' --thinking maybe", {"--thinking maybe"});
  expect_refused("bench serve --compare '" + one + "' '" + one + "'", {"no report"});
}

}  // namespace
}  // namespace fourfold
