// fourfold doctor on this machine and on recorded ones.
#include "program.h"

namespace fourfold {
namespace {

using Doctor = Cmd;

TEST_F(Doctor, LooksAtThisMachineAndTheDemoModel) {
  const std::string bundle = path("bundle.json");
  ::setenv("FOURFOLD_API_KEY", "a-key-of-somebody", 1);
  const Outcome outcome = run("doctor '" + demo_ + "' --json --bundle '" + bundle + "'");
  const Json out = Json::parse(outcome.out);
  EXPECT_EQ(outcome.status, out["status"].get<int>()) << outcome.err;
  ::unsetenv("FOURFOLD_API_KEY");
  EXPECT_EQ(Json::parse(read(bundle)), out);
  EXPECT_EQ(read(bundle).find("a-key-of-somebody"), std::string::npos);
  for (const char* part : {"cpu", "memory", "system", "environment", "gpu", "model", "probes"}) {
    EXPECT_TRUE(out["facts"].contains(part)) << part;
  }
  // A busy machine may be too slow for a probe, which is then a finding.
  const Json& probes = out["facts"]["probes"];
  EXPECT_NE(probes["cpu"].contains("read_gb_per_s"), probes["cpu"].contains("failure"));
  EXPECT_NE(probes["self_test"].contains("backend"), probes["self_test"].contains("failure"));
  // The same facts are judged the same anywhere.
  const Outcome again = run("doctor --json --facts '" + bundle + "'");
  EXPECT_EQ(again.status, outcome.status);
  EXPECT_EQ(Json::parse(again.out)["findings"], out["findings"]);
}

TEST_F(Doctor, StatusIsTheWorstFinding) {
  EXPECT_EQ(run("doctor --facts '" + write("none.json", "{}") + "'").status, 0);
  const Outcome warning =
      run("doctor --facts '" + write("w.json", R"({"cpu": {"allowed": 8, "quota_cpus": 2}})") + "'");
  EXPECT_EQ(warning.status, 1);
  for (const char* part : {"warning", "cpu.quota", "so: ", "fix: --threads 2"}) {
    EXPECT_NE(warning.out.find(part), std::string::npos) << warning.out;
  }
  EXPECT_EQ(run("doctor --facts '" + write("e.json", R"({"model": {"problems": ["x"]}})") + "'").status, 2);
  expect_refused("doctor --facts /nothing", {"/nothing"});
  expect_refused("doctor --facts '" + write("bad.json", "[]") + "'", {"array", "wanted an object"});
  expect_refused("doctor /nothing", {"/nothing", "no directory"});
}

}  // namespace
}  // namespace fourfold
