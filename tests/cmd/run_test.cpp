// Models that answer: `run`, at a terminal and without, `eval`, and the speed of `bench`.
#include <gtest/gtest.h>
#include <poll.h>
#include <pty.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "base/json.h"
#include "program.h"

namespace fourfold {
namespace {

// ---- run ------------------------------------------------------------------------------------------------------------

TEST_F(Cmd, RunAnswersOnStdoutAndNothingElse) {
  const Outcome outcome = run("run " + demo_ + " --temperature 0 'What is 12 + 30?'");
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_NE(outcome.out.find("42"), std::string::npos) << outcome.out;
  EXPECT_EQ(outcome.out.find("<think>"), std::string::npos) << outcome.out;
  EXPECT_NE(outcome.err.find("tokens/s"), std::string::npos) << outcome.err;  // prefill and decode speed
  EXPECT_NE(outcome.err.find("GB/s"), std::string::npos) << outcome.err;
}

TEST_F(Cmd, RunJoinsPromptFileAndPipe) {
  const std::string flags = "run " + demo_ + " -q --no-think --temperature 0 --max-tokens 12 ";
  const std::string whole = run(flags + "-p 'What is\n\n8 times\n\n7?'").out;
  EXPECT_NE(whole, "");
  EXPECT_EQ(run(flags + "'What is' -f " + write("file.txt", "8 times\n"), "7?\n").out, whole);
  EXPECT_EQ(run(flags + "'What is\n\n8 times'", "7?").out, whole);
  EXPECT_EQ(run(flags + "-f " + write("all.txt", "\nWhat is\n\n8 times\n\n7?\n")).out, whole);
  EXPECT_EQ(run(flags + "'What is' -f -", "8 times\n\n7?").out, whole);
  EXPECT_EQ(run(flags + "'What is\n\n8 times\n\n7?'", "", "</dev/zero").out, whole);  // a device is not read
  expect_refused(flags + "-f " + write("empty.txt", " \n"), {"empty.txt", "empty"});
  expect_refused(flags + "-f - --messages -", {"--file", "--messages"}, "[]");
}

// A pipe that nobody writes to and nobody closes must not be waited for.
TEST_F(Cmd, RunGoesOnWithoutAPipeThatSaysNothing) {
  const std::string fifo = path("fifo").string();
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  const Outcome outcome =
      run("run " + demo_ + " --no-think --temperature 0 'What is 8 times 7?'", "", "<>'" + fifo + "'");
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_NE(outcome.out.find("56"), std::string::npos) << outcome.out;
  EXPECT_NE(outcome.err.find("said nothing"), std::string::npos) << outcome.err;
}

TEST_F(Cmd, RunStopsAtAString) {
  const std::string flags = "run " + demo_ + " -q --no-think --temperature 0 ";
  EXPECT_EQ(run(flags + "'What is 12 + 30?'").out, "12 + 30 = 42\n");
  EXPECT_EQ(run(flags + "--stop 42 --stop 43 'What is 12 + 30?'").out,
            "12 + 30 =\n");  // white space at the end is left out
  const Json answer = run_json("run " + demo_ + " --json --no-think --temperature 0 --stop ' =' 'What is 12 + 30?'");
  EXPECT_EQ(answer.at("content"), "12 + 30");
  EXPECT_EQ(answer.at("finish_reason"), "stop");
  EXPECT_EQ(answer.at("stop"), " =");
  expect_refused(flags + "--stop '' hello", {"--stop", "empty"});
}

TEST_F(Cmd, RunCompletesARawText) {
  const std::string text =
      "<|im_start|>user\nWhat is 12 + 30?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n";
  const std::string flags = " -q --temperature 0 ";
  EXPECT_EQ(run("run " + demo_ + flags + "--raw -f " + write("raw.txt", text)).out, "12 + 30 = 42\n");
  // Nothing but the text: no turn is opened, and white space stays.
  const Json counted = run_json("run " + demo_ + " --raw --json --max-tokens 3 --temperature 0 ' 12 +'");
  EXPECT_EQ(counted.at("usage").at("prompt_tokens"), Json::parse(run("tokenize " + demo_, " 12 +").out).size());
  EXPECT_EQ(counted.at("finish_reason"), "length");
  expect_refused("run " + demo_ + " --raw --system x hello", {"--raw", "--system"});
}

TEST_F(Cmd, RunTakesAConversationWithTools) {
  const std::string tools =
      R"([{"type": "function", "function": {"name": "get_weather", "description": "Get the weather in a city.",
      "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}])";
  const std::string user =
      R"([{"role": "user", "content": [{"type": "text", "text": "What is the weather in Paris?"}]}])";
  const std::string flags = "run " + demo_ + " -q --no-think --temperature 0 ";
  const Json call =
      Json::parse(run(flags + "--messages " + write("user.json", user) + " --tools " + write("tools.json", tools)).out);
  EXPECT_EQ(call, Json::parse(R"({"name": "get_weather", "arguments": {"city": "Paris"}})"));
  const std::string both = write("both.json", R"({"messages": )" + user + R"(, "tools": )" + tools + "}");
  const Json answer = run_json("run " + demo_ + " --json --no-think --temperature 0 --messages -", read(both));
  EXPECT_EQ(answer.at("tool_calls").at(0).at("name"), "get_weather");
  // A prompt is one more message.
  const std::string history = write("history.json", R"([{"role": "user", "content": "My name is Tim."},
      {"role": "assistant", "content": "Nice to meet you, Tim."}])");
  const Outcome recalled = run(flags + "--messages " + history + " 'What is my name?'");
  EXPECT_NE(recalled.out.find("Tim"), std::string::npos) << recalled.out << recalled.err;
  expect_refused(flags + "--messages " + both + " --tools " + path("tools.json").string(), {"tools"});
  expect_refused(flags + "--messages " + write("bad.json", R"([{"role": 7}])"), {"messages[0].role"});
  expect_refused(flags + "--tools " + write("object.json", "{}") + " hello", {"object.json", "array"});
}

TEST_F(Cmd, RunReadsAPromptFromAPipe) {
  const Outcome outcome = run("run " + demo_ + " --temperature 0 --no-think -q", "What is 8 times 7?\n");
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_NE(outcome.out.find("56"), std::string::npos) << outcome.out;
  EXPECT_EQ(outcome.err, "");
}

TEST_F(Cmd, RunWithASeedIsReproducible) {
  const std::string command = "run " + demo_ + " -q --temperature 1.5 --seed 7 --max-tokens 24 'Tell me something.'";
  const Outcome first = run(command);
  EXPECT_EQ(first.status, 0) << first.err;
  EXPECT_EQ(first.out, run(command).out);
}

TEST_F(Cmd, RunTakesPromptsThatAreTooLongForAFileName) {
  for (const size_t words : {80, 1200}) {
    std::string prompt;
    for (size_t i = 0; i < words; ++i) prompt += "word ";
    const Outcome outcome = run("run " + demo_ + " -q --no-think --max-tokens 2 '" + prompt + "'");
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    const Outcome alone = run("run -q --no-think --max-tokens 2 '" + prompt + "'");
    EXPECT_EQ(alone.out, outcome.out) << alone.err;
  }
  expect_refused("eval " + demo_ + " " + std::string(5000, 'x'), {"xxxx"});
  expect_refused("render " + std::string(5000, 'x') + " -", {"xxxx"}, "[]");
}

TEST_F(Cmd, BehindTwoDashesNothingIsAnOption) {
  const std::string flags = "run " + demo_ + " -q --no-think --temperature 0 --max-tokens 8 ";
  for (const std::string prompt : {"-x", "--help", "--", "--json=1"}) {
    const Outcome outcome = run(flags + "-- " + prompt);
    EXPECT_EQ(outcome.status, 0) << prompt << "\n" << outcome.err;
    EXPECT_EQ(outcome.out, run(flags + "--prompt=" + prompt).out) << prompt;
    EXPECT_EQ(outcome.out, run(flags + "--prompt " + prompt).out) << prompt;
  }
  const Outcome whole = run("run -q --no-think --temperature 0 --max-tokens 8 -- " + demo_ + " -x");
  EXPECT_EQ(whole.out, run(flags + "-p -x").out) << whole.err;
  EXPECT_EQ(run("tokenize -- " + demo_ + " -", "hello").out, run("tokenize " + demo_, "hello").out);
  expect_refused("inspect -- --deep", {"--deep"});
  expect_refused("run " + demo_ + " -- -x -y -z", {"4 arguments", "a directory and a prompt", "-x"});
  expect_refused("run hi there you", {"3 arguments", "hi", "quote"});
}

TEST_F(Cmd, RunPrintsOneJsonObject) {
  const Json answer = run_json("run " + demo_ + " --json --temperature 0 --think 'What is 20 - 3?'");
  EXPECT_TRUE(answer.is_object());
  EXPECT_NE(answer.dump().find("17"), std::string::npos) << answer.dump(1);
}

TEST_F(Cmd, RunOfARandomShapeNeedsNoFiles) {
  const Outcome outcome = run("run --dummy 35B-A3B --layers 1 --vocab 512 --max-tokens 2 --threads 2");
  EXPECT_EQ(outcome.status, 0) << outcome.err;
}

TEST_F(Cmd, RunRefusesWhatItCannotDo) {
  expect_refused("run " + path("nothing").string() + "/ hello", {"nothing"});
  expect_refused("run " + demo_ + " --temperature 11 hello", {"--temperature"});
  expect_refused("run " + demo_ + " --isa mmx hello", {"mmx", "reference, "});
  expect_refused("run " + demo_ + " --max-tokens 0 hello", {"--max-tokens"});
  expect_refused("run " + demo_ + " --temperature nan hello", {"--temperature", "nan"});
  expect_refused("run " + demo_ + " ' '", {"prompt"});
  expect_refused("run --dummy 35B-A3B --layers 1 --vocab 512 hello", {"--dummy", "prompt"});
  expect_refused("run --dummy 36B", {"36B", "35B-A3B"});
  expect_refused("run " + demo_ + " --no-such-flag", {"--no-such-flag"});
  fs::create_directories(path("empty"));
  expect_refused("run " + path("empty").string() + " hello", {"config.json"});
}

TEST_F(Cmd, NumbersAreDecimalAndInRange) {
  for (const char* seed : {"-1", "18446744073709551616", "''", "' 5'", "+5", "010", "0x10", "5x", "1e3"}) {
    expect_refused("run " + demo_ + " --seed " + seed + " hello", {"--seed"});
    expect_refused("generate " + path("out").string() + " --seed " + seed, {"--seed"});
  }
  for (const char* count : {"010", "0x10", "+5", "5.0", "''", "99999999999999999999"}) {
    expect_refused("run " + demo_ + " --top-k " + count + " hello", {"--top-k"});
    expect_refused("generate " + path("out").string() + " --layers " + count, {"--layers"});
  }
  for (const char* number : {"0x1p1", "' 1'", "+1", "1e-400", "inf", "1,5"}) {
    expect_refused("run " + demo_ + " --temperature " + number + " hello", {"--temperature"});
  }
  EXPECT_FALSE(fs::exists(path("out")));
  EXPECT_EQ(run("run " + demo_ + " -q --max-tokens 1 --seed 18446744073709551615 --temperature .5 hello").status, 0);
}

TEST_F(Cmd, RunSaysWhatIsWrongBeforeTheWeightsAreRead) {
  const std::string dir = path("model").string();
  ASSERT_EQ(run("generate " + dir + " --layers 1 --vocab 64").status, 0);
  fs::resize_file(path("model") / "model.safetensors", 100);
  expect_refused("run " + dir + " hello", {"tokenizer.json"});
  expect_refused("eval " + dir + " " + demo_ + "/eval/json.jsonl", {"tokenizer.json"});
  expect_refused("run " + dir + " hello --context 9999", {"--context", "4096"});
  expect_refused("eval " + dir + " " + demo_ + "/eval/json.jsonl --context 9999", {"--context", "4096"});
  expect_refused("inspect " + dir + " --context 9999", {"--context", "4096"});
  expect_refused("run " + demo_ + " --prompt ''", {"prompt", "empty"});
  expect_refused("run " + demo_ + " --prompt '' hello", {"--prompt"});
  expect_refused("run --dummy 35B-A3B --layers 1 --vocab 64 --json", {"--json"});
}

TEST_F(Cmd, AnAnswerThatFailsBeforeItsFirstWordPrintsNothing) {
  const fs::path dir = path("nan");
  fs::copy(demo_, dir, fs::copy_options::recursive);
  std::string bytes = read(dir / "model.safetensors");
  uint64_t header = 0;
  std::memcpy(&header, bytes.data(), 8);
  const Json tensors = Json::parse(bytes.substr(8, header));
  const std::string name = "model.language_model.layers.0.linear_attn.in_proj_a.weight";
  const Json& tensor = tensors.at(name);
  ASSERT_EQ(tensor.at("dtype"), "BF16");
  for (size_t at = tensor.at("data_offsets")[0]; at < tensor.at("data_offsets")[1]; at += 2) {
    bytes.replace(8 + header + at, 2, "\xc0\x7f");
  }
  fs::permissions(dir / "model.safetensors", fs::perms::owner_write, fs::perm_options::add);
  write("nan/model.safetensors", bytes);
  expect_refused("run " + dir.string() + " -q hello", {"logit", "nan"});
}

// ---- eval and bench -------------------------------------------------------------------------------------------------

TEST_F(Cmd, EvalReportsExactMatch) {
  const Json result = run_json("eval " + demo_ + " arithmetic --limit 8 --json");
  const Json& match = result.contains("exact_match") ? result["exact_match"] : result.at("models").at(0);
  ASSERT_TRUE(match.is_number()) << result.dump(1);
  EXPECT_GT(match.get<double>(), 0.7);
}

TEST_F(Cmd, EvalRefusesWrongTasks) {
  expect_refused("eval " + demo_ + " no_such_task", {"no_such_task"});
  expect_refused("eval " + demo_ + " " + write("bad.jsonl", "{\"task\": \"x\", \"messages\": 3}\n"), {"bad.jsonl"});
}

TEST_F(Cmd, EvalTakesADirectoryOfTasksAlone) {
  fs::create_directories(path("tasks"));
  const std::string line =
      R"({"messages": [{"role": "user", "content": "What is 2 + 2?"}], "expect": {"kind": "number", "value": 4}})";
  write("tasks/sums.jsonl", line + "\n" + line.substr(0, line.size() - 1) + R"(, "enable_thinking": false})" + "\n");
  const Json result = run_json("eval " + path("tasks").string() + " --json");
  EXPECT_EQ(result.at("count"), 2);
  EXPECT_EQ(result.at("tasks").at("sums").at("correct"), 2);
  // With thinking and without are counted apart.
  EXPECT_EQ(result.at("tasks").at("sums").at("thinking").at("count"), 1);
  EXPECT_EQ(result.at("direct").at("count"), 1);
  EXPECT_GT(result.at("tokens_per_s").get<double>(), 0);
  const std::string table = run("eval " + path("tasks").string()).out;
  EXPECT_NE(table.find("sums, direct"), std::string::npos) << table;
  EXPECT_NE(table.find("sums, thinking"), std::string::npos) << table;
  fs::create_directories(path("none"));
  expect_refused("eval " + path("none").string(), {"none", "config.json", "jsonl"});
}

TEST_F(Cmd, EvalFindsAnItemThatIsTooLongBeforeItsWork) {
  std::string words;
  for (int i = 0; i < 3000; ++i) words += "word ";
  const std::string good =
      R"({"messages": [{"role": "user", "content": "What is 2 + 2?"}], "expect": {"kind": "number", "value": 4}})";
  const std::string tasks =
      write("tasks.jsonl", good + "\n" + R"({"messages": [{"role": "user", "content": ")" + words +
                               R"("}], "expect": {"kind": "text", "value": "x"}})" + "\n");
  expect_refused("eval " + demo_ + " " + tasks + " --context 2000", {"tasks.jsonl:2", "2000", "1999"});
  expect_refused("eval " + demo_ + " " + tasks + " --failures /nowhere/at/all", {"/nowhere/at/all"});
}

TEST_F(Cmd, EvalTellsTwoCheckpointsOfOneNameApart) {
  for (const char* parent : {"left", "right"}) {
    fs::create_directories(path(parent));
    fs::create_directory_symlink(demo_, path(parent) / "model");
  }
  const std::string both = path("left/model").string() + " " + path("right/model").string();
  fs::remove(path("left/model"));
  fs::copy(demo_, path("left/model"), fs::copy_options::recursive);
  fs::remove(path("right/model"));
  fs::copy(demo_, path("right/model"), fs::copy_options::recursive);
  const Json result = run_json("eval " + both + " json --limit 1 --json");
  EXPECT_EQ(result.at("checkpoint"), "left/model");
  EXPECT_EQ(result.at("second").at("checkpoint"), "right/model");
  EXPECT_EQ(result.at("difference"), 0);
}

TEST_F(Cmd, EvalPrintsWhatIsDoneAtCtrlC) {
  const std::string out = path("out").string(), err = path("err").string(), failures = path("failures").string();
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    if (std::freopen(out.c_str(), "w", stdout) != nullptr && std::freopen(err.c_str(), "w", stderr) != nullptr) {
      ::execl(FOURFOLD_BINARY, "fourfold", "eval", demo_.c_str(), "--json", "--isa", "reference", "--parallel", "1",
              "--failures", failures.c_str(), nullptr);
    }
    ::_exit(1);
  }
  ::sleep(4);
  ::kill(child, SIGINT);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status)) << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 130);
  EXPECT_NE(read(err).find("interrupted after "), std::string::npos) << read(err);
  if (read(err).find("interrupted after 0 ") != std::string::npos) return;  // a machine on which one answer takes 4 s
  const Json result = Json::parse(read(out));
  EXPECT_GT(result.at("count").get<int>(), 0);
  EXPECT_LT(result.at("count").get<int>(), result.at("items").get<int>());
  EXPECT_TRUE(fs::exists(failures));
}

TEST_F(Cmd, EvalWritesItsFailuresWholeOrNotAtAll) {
  const std::string kept = write("failures.jsonl", "kept");
  const std::string dir = path("model").string();
  fs::copy(demo_, dir, fs::copy_options::recursive);
  fs::permissions(path("model") / "model.safetensors", fs::perms::owner_write, fs::perm_options::add);
  fs::resize_file(path("model") / "model.safetensors", 1000);
  expect_refused("eval " + dir + " json --limit 1 --failures " + kept, {"model.safetensors"});
  EXPECT_EQ(read(kept), "kept");
  expect_refused("eval " + demo_ + " json --limit 1 --failures " + path("").string(), {"regular"});
  EXPECT_EQ(run("eval " + demo_ + " json --limit 3 --max-tokens 1 --failures " + kept).status, 0);
  const std::string lines = read(kept);
  EXPECT_EQ(std::count(lines.begin(), lines.end(), '\n'), 3) << lines;
}

TEST_F(Cmd, BenchModelPrintsBothCeilings) {
  const Json result = run_json("bench model " + demo_ + " --threads 2 --prompt 64 --generate 8 --repeats 1 --json");
  for (const char* key : {"tokens_per_s", "bytes_per_token", "gb_per_s", "read_bandwidth_gb_per_s", "fraction"}) {
    EXPECT_GT(result.at("decode").at(key).get<double>(), 0) << key;
  }
  for (const char* key : {"tokens_per_s", "flops_per_token", "gflops_per_core", "peak_gflops_per_core", "fraction"}) {
    EXPECT_GT(result.at("prefill").at(key).get<double>(), 0) << key;
  }
}

TEST_F(Cmd, AModelRunsOnSeveralRanks) {
  const std::string ask = "run " + demo_ + " --json --temperature 0 --no-think 'What is 17 + 25?' --threads 2";
  const Json one = run_json(ask);
  for (const char* ranks :
       {" --tensor-parallel-size 2 --check-sums 1", " --tensor-parallel-size 2 --enable-expert-parallel"}) {
    EXPECT_EQ(run_json(ask + ranks).at("content"), one.at("content")) << ranks;
  }
  const std::string logits = "logits " + demo_ + " - " + path("logits.safetensors").string();
  const Outcome outcome = run(logits + " --threads 2 --tensor-parallel-size 2", "[1, 2, 3]");
  EXPECT_EQ(outcome.status, 0);
  EXPECT_NE(outcome.err.find("1 thread x 2 ranks"), std::string::npos) << outcome.err;
  const Json comm =
      run_json("bench comm --tensor-parallel-size 2 --threads 2 --hidden 64 --tokens 1,4 --seconds 0.004 --json");
  ASSERT_EQ(comm.at("results").size(), 2u);
  for (const Json& row : comm.at("results")) EXPECT_GT(row.at("us").get<double>(), 0);
  expect_refused("bench comm --tensor-parallel-size 1", {"--tensor-parallel-size 1", "2 or more"});
  expect_refused("run " + demo_ + " --tensor-parallel-size 3 hello", {"--tensor-parallel-size 3", "4 attention heads"});
  expect_refused("run " + demo_ + " --tensor-parallel-size 2 --device cuda:99 hello", {"--device cuda:99"});
  expect_refused("run " + demo_ + " --enable-expert-parallel hello", {"--tensor-parallel-size"});
}

TEST_F(Cmd, BenchOpsTimesAnOperation) {
  const Json result = run_json("bench ops --filter add_rms_norm --seconds 0.01 --json");
  EXPECT_FALSE(result.empty());
  expect_refused("bench ops --filter no_such_operation --seconds 0.01", {"no_such_operation"});
}

// ---- at a terminal --------------------------------------------------------------------------------------------------

// What a person types at a terminal, with the keys that edit it.
TEST_F(Cmd, AChatHasEditingAndAHistory) {
  int terminal = -1;
  const pid_t child = ::forkpty(&terminal, nullptr, nullptr, nullptr);
  ASSERT_GE(child, 0);
  if (child == 0) {
    ::setenv("TERM", "xterm", 1);
    ::setenv("NO_COLOR", "1", 1);
    ::execl(FOURFOLD_BINARY, "fourfold", "run", demo_.c_str(), "--no-think", "--temperature", "0", "-q", nullptr);
    ::_exit(1);
  }
  std::string seen;
  const auto wait_for = [&](const std::string& text, size_t from) {
    for (int i = 0; i < 600; ++i) {
      if (seen.find(text, from) != std::string::npos) return true;
      pollfd ready{terminal, POLLIN, 0};
      if (::poll(&ready, 1, 100) <= 0) continue;
      char buffer[4096];
      const ssize_t count = ::read(terminal, buffer, sizeof buffer);
      if (count <= 0) return false;
      seen.append(buffer, static_cast<size_t>(count));
    }
    return false;
  };
  // The keys that edit are read one by one: the terminal no longer waits for whole lines.
  const auto wait_for_prompt = [&](size_t from) {
    if (!wait_for("> ", from)) return false;
    for (int i = 0; i < 600; ++i) {
      termios settings{};
      if (::tcgetattr(terminal, &settings) == 0 && (settings.c_lflag & ICANON) == 0) return true;
      ::usleep(20000);
    }
    return false;
  };
  const auto type = [&](const std::string& keys) {
    ASSERT_EQ(::write(terminal, keys.data(), keys.size()), static_cast<ssize_t>(keys.size()));
  };
  ASSERT_TRUE(wait_for_prompt(0)) << seen;
  type(
      "What is 8 times 9?\x1b[D\x7f"
      "7\r");  // one to the left, rub out the 9, a 7
  ASSERT_TRUE(wait_for("= 56", 0)) << seen;
  ASSERT_TRUE(wait_for_prompt(seen.find("= 56"))) << seen;
  size_t at = seen.size();
  type("\x1b[A\r");  // the line before
  ASSERT_TRUE(wait_for("= 56", at)) << seen.substr(at);
  ASSERT_TRUE(wait_for_prompt(seen.find("= 56", at))) << seen.substr(at);
  at = seen.size();
  type("thrown away");
  ASSERT_TRUE(wait_for("away", at)) << seen.substr(at);
  at = seen.size();
  type("\x03");  // Ctrl-C throws away what was typed: a line ends, then there is a prompt; until then it may be drawn
                 // again
  ASSERT_TRUE(wait_for("\n", at)) << seen.substr(at);
  ASSERT_TRUE(wait_for_prompt(seen.find('\n', at))) << seen.substr(at);
  at = seen.size();
  type("/reset\r");
  ASSERT_TRUE(wait_for("\n", at)) << seen.substr(at);
  ASSERT_TRUE(wait_for_prompt(seen.find('\n', at))) << seen.substr(at);
  at = seen.size();
  type("What is 8 times 7?\r");
  ASSERT_TRUE(wait_for("= 56", at)) << seen.substr(at);
  ASSERT_TRUE(wait_for_prompt(seen.find("= 56", at))) << seen.substr(at);
  type("\x04");
  int status = 0;
  for (int i = 0; i < 100 && ::waitpid(child, &status, WNOHANG) == 0; ++i) {
    wait_for("\x01", seen.size());
    ::usleep(20000);
  }
  EXPECT_TRUE(WIFEXITED(status)) << seen;
  EXPECT_EQ(WEXITSTATUS(status), 0) << seen;
  EXPECT_EQ(read(path("history")), "What is 8 times 7?\nWhat is 8 times 7?\n/reset\nWhat is 8 times 7?\n");
  ::close(terminal);
}

}  // namespace
}  // namespace fourfold
