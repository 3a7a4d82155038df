// fourfold batch with the demo model: every kind of request, every kind of end.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fcntl.h>
#include <chrono>
#include <map>
#include <thread>

#include "base/random.h"
#include "program.h"

namespace fourfold {
namespace {

class Batch : public Cmd {
 protected:
  static std::string line(const std::string& id, const std::string& body,
                          const std::string& url = "/v1/chat/completions") {
    return R"({"custom_id":")" + id + R"(","method":"POST","url":")" + url + R"(","body":)" + body + "}\n";
  }
  static std::string question(const std::string& text, int tokens = 24) {
    return R"({"model":"demo","messages":[{"role":"user","content":")" + text + R"("}],"temperature":0,"max_tokens":)" +
           std::to_string(tokens) + R"(,"chat_template_kwargs":{"enable_thinking":false}})";
  }
  // The lines of the output by custom_id: none comes twice.
  std::map<std::string, Json> answers(const std::string& file) const {
    std::map<std::string, Json> out;
    std::istringstream lines(read(file));
    for (std::string one; std::getline(lines, one);) {
      const Json json = Json::parse(one);
      const std::string id =
          json["custom_id"].is_null() ? json["id"].get<std::string>() : json["custom_id"].get<std::string>();
      EXPECT_TRUE(out.emplace(id, json).second) << "twice: " << id;
    }
    return out;
  }
  static std::string content(const Json& answer) {
    return answer["response"]["body"]["choices"][0]["message"]["content"].get<std::string>();
  }
};

TEST_F(Batch, AnswersEveryKindOfRequestAndNamesWhatIsWrong) {
  const std::string in =
      write("in.jsonl", line("chat", question("What is 17 + 25?")) + "\n" + "not json\n" +
                            line("text", R"({"prompt":"2 + 2 =","max_tokens":3})", "/v1/completions") +
                            line("response", R"({"input":"What is 4 + 4?","max_output_tokens":40})", "/v1/responses") +
                            line("stream", R"({"messages":[],"stream":true})") +
                            line("field", R"({"messages":[],"temperature":99})") +
                            line("other", R"({"model":"gpt","messages":[{"role":"user","content":"a"}]})") +
                            line("chat", question("Hi")));
  const std::string out = path("out.jsonl");
  const Outcome outcome = run("batch '" + in + "' '" + out + "' '" + demo_ + "' --json");
  EXPECT_EQ(outcome.status, 2) << outcome.err;
  const Json figures = Json::parse(outcome.out);
  EXPECT_EQ(figures["lines"], 8);
  EXPECT_EQ(figures["answered"], 8);
  EXPECT_EQ(figures["failed"], 5);
  EXPECT_GT(figures["output_tokens"].get<int64_t>(), 5);

  std::istringstream lines(read(out));
  std::map<std::string, Json> by_id;
  for (std::string one; std::getline(lines, one);) by_id[Json::parse(one)["id"]] = Json::parse(one);
  ASSERT_EQ(by_id.size(), 8u);
  EXPECT_EQ(content(by_id["batch_req_1"]).find("42") != std::string::npos, true);
  EXPECT_FALSE(by_id["batch_req_1"]["response"]["request_id"].get<std::string>().empty());
  EXPECT_NE(by_id["batch_req_3"]["error"]["message"].get<std::string>().find("line 3"), std::string::npos);
  EXPECT_EQ(by_id["batch_req_4"]["response"]["body"]["object"], "text_completion");
  EXPECT_EQ(by_id["batch_req_5"]["response"]["body"]["status"], "completed");
  EXPECT_NE(by_id["batch_req_6"]["error"]["message"].get<std::string>().find("stream"), std::string::npos);
  EXPECT_EQ(by_id["batch_req_7"]["response"]["status_code"], 400);
  EXPECT_EQ(by_id["batch_req_8"]["response"]["status_code"], 404);
  EXPECT_NE(by_id["batch_req_9"]["error"]["message"].get<std::string>().find("another line"), std::string::npos);

  // Nothing is left to do, and nothing changes.
  const std::string before = read(out);
  const Outcome again = run("batch '" + in + "' '" + out + "' '" + demo_ + "'");
  EXPECT_EQ(again.status, 2);
  EXPECT_EQ(read(out), before);
  // Answers of another file are noticed before anything is written.
  const std::string other = write("other.jsonl", line("x", question("Hi")));
  const Outcome wrong = run("batch '" + other + "' '" + out + "' '" + demo_ + "'");
  EXPECT_EQ(wrong.status, 2);
  EXPECT_NE(wrong.err.find("do not belong together"), std::string::npos) << wrong.err;
  EXPECT_EQ(read(out), before);
}

TEST_F(Batch, RefusesBadArguments) {
  const std::string in = write("in.jsonl", line("a", question("Hi")));
  expect_refused("batch '" + in + "'", {"out"});
  expect_refused("batch /nothing '" + path("out").string() + "'", {"/nothing"});
  expect_refused("batch '" + in + "' '" + in + "' '" + demo_ + "'", {"no answer of a batch"});
  expect_refused("batch '" + in + "' '" + path("out").string() + "' /nothing", {"/nothing", "no directory"});
}

// Each run is killed at a random moment, in the middle of a write as well; the last one is left alone.
TEST_F(Batch, KilledTwentyTimesNothingIsLostOrDoubled) {
  constexpr int kLines = 300;
  std::string text;
  for (int i = 0; i < kLines; ++i) {
    text += line("q" + std::to_string(i), question("What is " + std::to_string(i) + " + 7?"));
  }
  const std::string in = write("in.jsonl", text), out = path("out.jsonl"), alone = path("alone.jsonl");
  const std::string arguments = "batch '" + in + "' '";
  const auto size = [&] { return std::filesystem::exists(out) ? std::filesystem::file_size(out) : 0; };
  Random random(11);
  int killed = 0;
  for (int kill = 0; kill < 20; ++kill) {
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      const int null = ::open("/dev/null", O_WRONLY);
      ::dup2(null, 2);
      ::execl(FOURFOLD_BINARY, "fourfold", "batch", in.c_str(), out.c_str(), demo_.c_str(), "--max-num-seqs", "4",
              nullptr);
      ::_exit(127);
    }
    // After some more answers, however fast this machine is, or while it still loads.
    const auto wanted = size() + random.below(2500);
    int status = 0;
    pid_t ended = 0;
    while ((ended = ::waitpid(child, &status, WNOHANG)) == 0 && size() < wanted) ::usleep(200);
    if (ended == 0) {
      ::usleep(static_cast<useconds_t>(random.below(3000)));
      ::kill(child, SIGKILL);
      ::waitpid(child, &status, 0);
    }
    killed += WIFSIGNALED(status) ? 1 : 0;
  }
  EXPECT_GE(killed, 15);
  const Outcome last = run(arguments + out + "' '" + demo_ + "' --max-num-seqs 4");
  EXPECT_EQ(last.status, 0) << last.err;
  const auto found = answers(out);
  ASSERT_EQ(found.size(), static_cast<size_t>(kLines));
  for (int i = 0; i < kLines; ++i) EXPECT_EQ(found.at("q" + std::to_string(i))["response"]["status_code"], 200);
  // And they are the answers of a run that nothing happened to.
  EXPECT_EQ(run(arguments + alone + "' '" + demo_ + "' --max-num-seqs 4").status, 0);
  for (const auto& [id, answer] : answers(alone)) EXPECT_EQ(content(answer), content(found.at(id))) << id;
}

TEST_F(Batch, GoesOnAfterCtrlC) {
  std::string text;
  for (int i = 0; i < 2000; ++i)
    text += line(std::to_string(i), question("What is " + std::to_string(i) + " + 1?", 64));
  const std::string in = write("in.jsonl", text), out = path("out.jsonl");
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const int err = ::open(path("err").c_str(), O_WRONLY | O_CREAT, 0600);
    ::dup2(err, 2);
    ::execl(FOURFOLD_BINARY, "fourfold", "batch", in.c_str(), out.c_str(), demo_.c_str(), nullptr);
    ::_exit(127);
  }
  while (!std::filesystem::exists(out) || std::filesystem::file_size(out) < 2000) ::usleep(1000);
  ::kill(child, SIGINT);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(WEXITSTATUS(status), 130);
  EXPECT_NE(read(path("err")).find("of 2000 lines have their answers"), std::string::npos) << read(path("err"));
  EXPECT_EQ(read(out).back(), '\n');
  for (const auto& [id, answer] : answers(out)) EXPECT_EQ(answer["response"]["status_code"], 200) << id;
}

}  // namespace
}  // namespace fourfold
