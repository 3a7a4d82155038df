// The program as its users meet it: arguments and standard input in; standard output, standard error and the exit
// status out. What the commands compute is tested elsewhere; here it is that they can be reached, that answers and
// everything else go to the right stream, and that bad input is one line and exit status 2.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "program.h"

namespace fourfold {
namespace {

// ---- checkpoints ----------------------------------------------------------------------------------------------------

TEST_F(Cmd, GeneratedCheckpointsAreInspectedQuantisedAndRun) {
  const std::string in = path("in").string();
  const std::string out = path("out").string();
  ASSERT_EQ(run("generate " + in + " --format bf16 --layers 4").status, 0);
  expect_refused("quantize " + in + " " + out + " --shard-size nan", {"--shard-size"});
  expect_refused("quantize " + path("nothing").string() + " " + out, {"nothing"});
  EXPECT_FALSE(fs::exists(out));
  const Json before = run_json("inspect " + in + " --json");
  const Json result = run_json("quantize " + in + " " + out + " --json");
  EXPECT_TRUE(result.is_object());
  const Json after = run_json("inspect " + out + " --json");
  EXPECT_EQ(before.at("problems").size(), 0u);
  EXPECT_EQ(after.at("problems").size(), 0u);
  EXPECT_LT(fs::file_size(path("out") / "model.safetensors"), fs::file_size(path("in") / "model.safetensors"));
  const std::string tokens = write("tokens.json", "[1, 2, 3, 5, 8]");
  EXPECT_EQ(run("logits " + out + " " + tokens + " " + path("logits.safetensors").string()).status, 0);
  EXPECT_GT(fs::file_size(path("logits.safetensors")), 5u * 4);
}

TEST_F(Cmd, GeneratedShapesAreThoseThatLoad) {
  const std::string tokens = write("tokens.json", "[1, 2, 3, 5, 8]");
  // No shared expert; one expert; one layer; widths that no block of 16 divides.
  for (const char* sizes : {"--shared-intermediate 0", "--experts 1 --top-k 1", "--layers 1",
                            "--hidden 100 --moe-intermediate 36 --shared-intermediate 20", "--intermediate 52"}) {
    const std::string dir = path("model").string(), out = path("logits.safetensors").string();
    fs::remove_all(dir);
    ASSERT_EQ(run("generate " + dir + " --vocab 64 " + sizes).status, 0) << sizes;
    EXPECT_EQ(run("inspect " + dir).status, 0) << sizes;
    EXPECT_EQ(run("logits " + dir + " " + tokens + " " + out).status, 0) << sizes;
  }
  const std::string dir = path("refused").string();
  expect_refused("generate " + dir + " --kv-heads 3", {"num_attention_heads", "3"});
  expect_refused("generate " + dir + " --conv-taps 1", {"--conv-taps"});
  expect_refused("generate " + dir + " --intermediate 64 --shared-intermediate 64", {"--shared-intermediate"});
  EXPECT_FALSE(fs::exists(dir));
}

TEST_F(Cmd, DamagedCheckpointsAreRefusedByName) {
  const fs::path dir = path("damaged");
  fs::copy(demo_, dir, fs::copy_options::recursive);
  const fs::path weights = dir / "model.safetensors";
  fs::permissions(weights, fs::perms::owner_write, fs::perm_options::add);
  fs::resize_file(weights, fs::file_size(weights) / 2);
  expect_refused("run " + dir.string() + " hello", {"model.safetensors"});
  const Outcome inspected = run("inspect " + dir.string());
  EXPECT_EQ(inspected.status, 2) << inspected.out << inspected.err;

  fs::copy_file(fs::path(demo_) / "model.safetensors", weights, fs::copy_options::overwrite_existing);
  const std::string config = read(dir / "config.json");
  fs::permissions(dir / "config.json", fs::perms::owner_write, fs::perm_options::add);
  std::ofstream(dir / "config.json") << config.substr(0, config.size() / 2);
  expect_refused("run " + dir.string() + " hello", {"config.json"});
  std::ofstream(dir / "config.json") << config;
  fs::permissions(dir / "tokenizer.json", fs::perms::owner_write, fs::perm_options::add);
  std::ofstream(dir / "tokenizer.json") << "{\"model\": {\"type\": \"BPE\", \"vocab\": 7}}";
  expect_refused("run " + dir.string() + " hello", {"tokenizer.json"});
}

TEST_F(Cmd, InspectReportsWhatRunRefuses) {
  const fs::path dir = path("model");
  const auto expect_both = [&](const std::vector<std::string>& parts) {
    expect_refused("run " + dir.string() + " -q --max-tokens 1 hello", parts);
    const Outcome outcome = run("inspect --json " + dir.string());
    EXPECT_EQ(outcome.status, 2) << outcome.out;
    const std::string problems = Json::parse(outcome.out).at("problems").dump();
    for (const std::string& part : parts) EXPECT_NE(problems.find(part), std::string::npos) << problems;
  };
  const auto fresh = [&] {
    fs::remove_all(dir);
    fs::copy(demo_, dir, fs::copy_options::recursive);
    for (const auto& entry : fs::directory_iterator(dir)) {
      fs::permissions(entry.path(), fs::perms::owner_write, fs::perm_options::add);
    }
  };
  fresh();
  write("model/tokenizer.json", "{}");
  expect_both({"tokenizer.json"});
  fresh();
  write("model/chat_template.jinja", "{% for x in %}");
  expect_both({"chat_template.jinja", "line 1"});
  // Good Jinja that makes nothing of a question, or refuses it.
  fresh();
  write("model/chat_template.jinja", "");
  expect_both({"empty prompt"});
  fresh();
  write("model/chat_template.jinja", "{{ raise_exception('no questions') }}");
  expect_both({"chat_template.jinja", "no questions"});
  fresh();
  write("model/tokenizer_config.json", "");
  expect_both({"tokenizer_config.json", "JSON"});
  fresh();
  write("model/generation_config.json", R"({"top_p": 0})");
  expect_both({"generation_config.json", "top_p"});
  // A link that leads nowhere or to itself is a file that cannot be read, not one that is absent.
  for (const char* name :
       {"tokenizer.json", "chat_template.jinja", "tokenizer_config.json", "generation_config.json"}) {
    for (const char* target : {"nowhere", name}) {
      fresh();
      fs::remove(dir / name);
      fs::create_symlink(target, dir / name);
      expect_both({name});
    }
  }
}

TEST_F(Cmd, TextOfACheckpointReachesTheTerminalWithoutControlCharacters) {
  const std::string dir = path("model").string();
  ASSERT_EQ(run("generate " + dir + " --layers 1 --vocab 64").status, 0);
  write("model/hf_quant_config.json", R"({"quantization": {"kv_cache_quant_algo": "\u001b[31mFP8"}})");
  const Outcome outcome = run("inspect " + dir);
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_NE(outcome.out.find("\\x1b[31mFP8"), std::string::npos) << outcome.out;
  EXPECT_EQ(outcome.out.find('\x1b'), std::string::npos);
}

TEST_F(Cmd, CommandsThatFailLeaveNoDirectoryBehind) {
  const std::string in = path("in").string();
  ASSERT_EQ(run("generate " + in + " --layers 1 --vocab 64").status, 0);
  const std::string out = path("new").string() + "/below/";
  expect_refused("quantize " + in + " " + out + " --exclude .", {"--what"});
  expect_refused("generate " + out + " --shape 397B-A17B --format f32", {"free", "wanted"});
  EXPECT_FALSE(fs::exists(path("new")));
  fs::create_directory(path("new"));
  expect_refused("quantize " + in + " " + path("new").string() + " --exclude .", {"--what"});
  EXPECT_TRUE(fs::exists(path("new")));  // it was there before
  expect_refused("quantize " + in + " ''", {"directory ''"});
}

TEST_F(Cmd, LogitsDoesNotTakeThePlaceOfItsInput) {
  const std::string dir = path("in").string();
  ASSERT_EQ(run("generate " + dir + " --layers 1 --vocab 64").status, 0);
  const std::string tokens = write("tokens.json", "[1, 2]");
  expect_refused("logits " + dir + " " + tokens + " " + tokens, {"tokens.json", "input"});
  expect_refused("logits " + dir + " " + tokens + " " + dir + "/model.safetensors", {"model.safetensors", "input"});
  EXPECT_EQ(read(tokens), "[1, 2]");
}

TEST_F(Cmd, AFileThatMayNotGrowIsAnError) {
  const std::string in = path("in").string();
  ASSERT_EQ(run("generate " + in).status, 0);
  const std::string command = "ulimit -f 64; '" FOURFOLD_BINARY "' quantize " + in + " " + path("out").string() +
                              " >/dev/null 2>'" + path("err").string() + "'";
  const int status = std::system(command.c_str());
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 2);
  EXPECT_NE(read(path("err")).find("File too large"), std::string::npos) << read(path("err"));
  EXPECT_EQ(run("quantize " + in + " " + path("out").string()).status, 0);  // goes on where there is room
}

TEST_F(Cmd, AQuantisationThatTheDiskHasNoRoomForLeavesNothing) {
  const std::string in = path("in").string(), out = path("out").string();
  ASSERT_EQ(run("generate " + in + " --format bf16 --layers 1 --vocab 64").status, 0);
  // One more tensor, which would be copied, of twice what is free; a hole in the input's file.
  const std::string weights = in + "/model.safetensors";
  std::string bytes = read(weights);
  uint64_t header = 0;
  std::memcpy(&header, bytes.data(), sizeof header);
  Json tensors = Json::parse(bytes.substr(8, header));
  const uint64_t end = bytes.size() - 8 - header, more = 2 * fs::space(in).available + (1 << 30);
  tensors["model.visual.hole"] = {{"dtype", "U8"}, {"shape", {more}}, {"data_offsets", {end, end + more}}};
  std::string text = tensors.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  header = text.size();
  write("in/model.safetensors",
        std::string(reinterpret_cast<const char*>(&header), 8) + text + bytes.substr(bytes.size() - end));
  std::error_code error;
  fs::resize_file(weights, 8 + header + end + more, error);
  if (error) GTEST_SKIP() << "no file with a hole of " << more << " bytes here: " << error.message();
  for (const char* options : {"", " --exclude lm_head"}) {
    expect_refused("quantize " + in + " " + out + options, {"free", "wanted"});
    EXPECT_FALSE(fs::exists(out));
  }
}

TEST_F(Cmd, WeightsThatAreNotFiniteAreNamedByTheirResult) {
  const fs::path dir = path("nan");
  ASSERT_EQ(run("generate " + dir.string() + " --format bf16 --layers 1 --vocab 64").status, 0);
  // The head's last elements, in bf16: NaN.
  const fs::path weights = dir / "model.safetensors";
  std::string bytes = read(weights);
  const size_t header = 8 + static_cast<unsigned char>(bytes[0]) + 256u * static_cast<unsigned char>(bytes[1]);
  const Json tensors = Json::parse(bytes.substr(8, header - 8));
  const size_t end = header + tensors.at("lm_head.weight").at("data_offsets")[1].get<size_t>();
  bytes.replace(end - 8, 8, "\xff\x7f\xff\x7f\xff\x7f\xff\x7f");
  write("nan/model.safetensors", bytes);
  const std::string out = path("logits.safetensors").string();
  const std::string tokens = write("tokens.json", "[1, 2, 3]");
  expect_refused("logits " + dir.string() + " " + tokens + " " + out, {"logits", "63", "--deep"});
  EXPECT_TRUE(fs::exists(out));  // to look for the first hidden state that has one
  const Outcome deep = run("inspect --deep " + dir.string());
  EXPECT_EQ(deep.status, 2);
  EXPECT_NE(deep.err.find("lm_head"), std::string::npos) << deep.err;
}

TEST_F(Cmd, ActivationsApplyToWhatHasScalesOrAreRefused) {
  const std::string tokens = write("tokens.json", "[1, 2, 3]"), out = path("out.safetensors").string();
  for (const char* format : {"bf16", "modelopt-w4a16"}) {
    const std::string dir = path(format).string();
    ASSERT_EQ(run("generate " + dir + " --layers 1 --vocab 64 --format " + format).status, 0);
    expect_refused("logits " + dir + " " + tokens + " " + out + " --activations nvfp4",
                   {"--activations nvfp4", "none"});
  }
  const std::string dir = path("w4a4").string();
  ASSERT_EQ(run("generate " + dir + " --layers 1 --vocab 64 --no-mtp --format modelopt-nvfp4").status, 0);
  const Outcome outcome = run("logits " + dir + " " + tokens + " " + out + " --activations nvfp4");
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  // 3 x 8 experts, 3 of the shared one, 3 of the delta net; router, gates, shared gate and head are bf16.
  EXPECT_NE(outcome.err.find("applies to 30 of 35 matrices"), std::string::npos) << outcome.err;
  expect_refused("run --dummy 35B-A3B --layers 1 --vocab 64 --activations nvfp4", {"--activations nvfp4", "random"});
}

TEST_F(Cmd, OptionsThatExcludeEachOtherAreRefused) {
  const std::string out = path("out").string();
  expect_refused("generate " + out + " --fused-experts --per-expert", {"--fused-experts", "--per-expert"});
  expect_refused("tokenize " + demo_ + " --decode --offsets", {"--decode", "--offsets"}, "[1]");
  expect_refused("tokenize " + demo_ + " --skip-special", {"--skip-special", "--decode"}, "x");
  expect_refused("run " + demo_ + " --think --no-think hello", {"--think", "--no-think"});
  expect_refused("eval " + demo_ + " --think --no-think", {"--think", "--no-think"});
  expect_refused("run " + demo_ + " --layers 3 hello", {"--layers", "--dummy"});
  expect_refused("bench model " + demo_ + " --vocab 64", {"--vocab", "--dummy"});
  expect_refused("render " + demo_ + " - --parse-arguments", {"--parse-arguments", "--verbatim"}, "[]");
  expect_refused("generate " + out + " --shape foo", {"foo", "tiny", "397B-A17B"});
  EXPECT_FALSE(fs::exists(out));
}

TEST_F(Cmd, LogitsTakesWhatTokenizePrints) {
  const std::string ids = run("tokenize " + demo_ + " --offsets", "What is 2 + 2?").out;
  const std::string list = run("tokenize " + demo_, "What is 2 + 2?").out;
  const std::string a = path("a.safetensors").string(), b = path("b.safetensors").string();
  ASSERT_EQ(run("logits " + demo_ + " - " + a, ids).status, 0);
  ASSERT_EQ(run("logits " + demo_ + " - " + b, list).status, 0);
  EXPECT_EQ(read(a), read(b));
  expect_refused("logits " + demo_ + " - " + a, {"standard input", "no token ids"}, "[]");
  expect_refused("logits " + demo_ + " - " + a, {"standard input", "array"}, "{\"tokens\": [1]}");
}

TEST_F(Cmd, LogitsRefusesWrongTokens) {
  const std::string out = path("logits.safetensors").string();
  // A file that is renamed into place must not take the place of a device: here of a pipe.
  const std::string pipe = path("pipe").string();
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  expect_refused("logits " + demo_ + " " + write("good.json", "[1]") + " " + pipe, {"pipe", "regular"});
  EXPECT_TRUE(fs::is_fifo(pipe));
  expect_refused("logits " + demo_ + " " + write("a.json", "[1, 2, 99999999]") + " " + out, {"99999999"});
  expect_refused("logits " + demo_ + " " + write("b.json", "[1, \"two\"]") + " " + out, {"b.json"});
  expect_refused("logits " + demo_ + " " + write("c.json", "[]") + " " + out, {"c.json"});
  EXPECT_FALSE(fs::exists(out));
}

// ---- text -----------------------------------------------------------------------------------------------------------

TEST_F(Cmd, TokenizeAndBack) {
  const std::string text = "Grüße, 世界! 12 + 30 = 42 \xF0\x9F\x91\x8D\n";
  const Outcome ids = run("tokenize " + demo_, text);
  EXPECT_EQ(ids.status, 0) << ids.err;
  EXPECT_GT(Json::parse(ids.out).size(), 5u);
  EXPECT_EQ(run("tokenize " + demo_ + " --decode", ids.out).out, text);
  expect_refused("tokenize " + demo_ + " --decode", {"99999999"}, "[99999999]");
  expect_refused("tokenize " + path("missing.json").string(), {"missing.json"}, "x");
}

TEST_F(Cmd, RenderPrintsThePrompt) {
  const std::string conversation = write(
      "conversation.json", R"({"messages": [{"role": "user", "content": "Hello"}], "add_generation_prompt": true})");
  const Outcome outcome = run("render " + demo_ + " " + conversation);
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_NE(outcome.out.find("<|im_start|>user\nHello<|im_end|>"), std::string::npos) << outcome.out;
  EXPECT_GT(run_json("render " + demo_ + " " + conversation + " --tokens").size(), 3u);
  expect_refused("render " + write("bad.jinja", "{% for x in %}") + " " + conversation, {"bad.jinja"});
  expect_refused(
      "render " +
          write("loop.jinja", "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}") +
          " " + conversation,
      {"loop.jinja"});
  expect_refused("render " + demo_ + " " + write("wrong.json", "{\"messages\": 7}"), {"messages"});
}

// Templates of the Qwen3 generation fail on an assistant's message that has no content.
TEST_F(Cmd, RenderNormalisesTheMessages) {
  const std::string strict =
      write("strict.jinja", "{% for m in messages %}{{ m.role + ':' + m.content + ';' }}{% endfor %}");
  const std::string calls = R"({"role": "assistant", "content": null, "tool_calls":
      [{"type": "function", "function": {"name": "f", "arguments": "{\"x\": 1}"}}]})";
  const std::string messages =
      write("calls.json", R"([{"role": "user", "content": [{"type": "text", "text": "a"}]}, )" + calls +
                              R"(, {"role": "developer", "content": "b"}])");
  EXPECT_EQ(run("render " + strict + " " + messages).out, "system:b;user:a;assistant:;");
  expect_refused("render --verbatim " + strict + " " + messages, {"strict.jinja"});
  const Outcome rendered = run("render " + demo_ + " " + messages);
  EXPECT_NE(rendered.out.find("<function=f>\n<parameter=x>\n1\n"), std::string::npos) << rendered.out << rendered.err;
  expect_refused("render " + demo_ + " -", {"messages[0].content[0]", "image"},
                 R"([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])");
}

// ---- plans ----------------------------------------------------------------------------------------------------------

TEST_F(Cmd, BenchEngineRunsAsManyRequestsAtATimeAsThereAre) {
  const Json out = run_json("bench engine '" + demo_ + "' --device cpu --requests 3 --prompt 8 --generate 4 --json");
  EXPECT_EQ(out["concurrency"], 3);
  EXPECT_EQ(out["output_tokens"], 12);
  EXPECT_GT(out["decode_tokens_per_s"].get<double>(), 0);
}

// Answers of conversations end where the model ends them, so their lengths tell which tokens were chosen.
TEST_F(Cmd, BenchEngineDrawsTokens) {
  const std::string prompts =
      write("prompts.jsonl", R"({"messages": [{"role": "user", "content": "What is 8 times 7?"}]})"
                             "\n"
                             R"({"messages": [{"role": "user", "content": "What is 12 + 30?"}]})"
                             "\n");
  const auto tokens = [&](const std::string& flags) {
    const Json out = run_json("bench engine '" + demo_ + "' --device cpu --prompts " + prompts +
                              " --requests 4 --generate 60 --json " + flags);
    return std::pair(out.at("output_tokens").get<int64_t>(), out.at("sampling"));
  };
  const auto [greedy, params] = tokens("");
  EXPECT_EQ(params.at("temperature"), 0);
  EXPECT_EQ(tokens("--temperature 8 --top-k 1").first, greedy);
  const auto [drawn, asked] = tokens("--temperature 8 --top-p 0.999 --seed 5");
  EXPECT_NE(drawn, greedy);
  EXPECT_EQ(asked.at("temperature"), 8);
  EXPECT_EQ(asked.at("seed"), 5);
  EXPECT_EQ(tokens("--temperature 8 --top-p 0.999 --seed 5 --concurrency 2").first, drawn);
  EXPECT_GT(tokens("--top-p 1").second.at("temperature"), 0);
  const auto [penalized, penalties] = tokens("--frequency-penalty -10 --logprobs 3 --prompt-logprobs 0");
  EXPECT_NE(penalized, greedy);
  EXPECT_EQ(penalties.at("temperature"), 0);
  EXPECT_EQ(penalties.at("frequency_penalty"), -10);
  EXPECT_EQ(penalties.at("logprobs"), 3);
  expect_refused("bench engine " + demo_ + " --device cpu --temperature 11", {"--temperature", "11"});
  expect_refused("bench engine " + demo_ + " --device cpu --logprobs 21", {"--logprobs", "21"});
}

TEST_F(Cmd, PlanNeedsNoCard) {
  const Json plan = run_json("plan --gpu rtx-pro-6000 --model 397B-A17B --tokens 8 --json");
  EXPECT_GT(plan.at("predicted_us").get<double>(), 0);
  EXPECT_LE(plan.at("plan").at("smem_bytes").get<int64_t>(), 101376);
  EXPECT_FALSE(plan.at("rejected").empty());
  const std::string activations = "plan --gpu rtx-pro-6000 --model 35B-A3B --tokens 8192 --json --activations ";
  for (const char* format : {"bf16", "nvfp4"}) {
    EXPECT_EQ(run_json(activations + format).at("activations").at("chosen"), format);
  }
  EXPECT_EQ(run_json(activations + "auto").at("activations").at("predicted_us").size(), 2u);
  expect_refused(activations + "fp8", {"fp8", "bf16, nvfp4 or auto"});
  expect_refused("plan --gpu gtx-1080 --model 397B-A17B --tokens 8", {"gtx-1080", "h200"});
  expect_refused("plan --gpu h200 --model 398B --tokens 8", {"398B", "397B-A17B"});
  expect_refused("plan --model 35B-A3B --experts 0", {"--experts", "0"});
  expect_refused("plan --model 35B-A3B --gpu h200 --arch sm_120a", {"h200", "sm_90a", "sm_120a"});
  expect_refused("plan --experts 8 --hidden 64 --intermediate 64", {"no shape", "--top-k"});
  const Json step = run_json("plan --step --model 35B-A3B --mix C --gpu rtx-pro-6000 --tokens 4 --context 1000 --json");
  EXPECT_GT(step.at("predicted_us").get<double>(), step.at("floor_us").get<double>());
  EXPECT_FALSE(step.at("ops").empty());
  expect_refused("plan --step --model 35B-A3B --mix D", {"--mix", "D", "bf16"});
  expect_refused("plan --step --model 9B", {"9B", "35B-A3B"});
  expect_refused("plan --step", {"--model"});
  for (const auto& [card, link] : {std::pair{"h200", "NVLink"}, {"rtx-pro-6000", "PCIe with peer copies"}}) {
    const std::string ranks = fmt::format("plan --step --model 35B-A3B --gpu {} --tensor-parallel-size 2 --json", card);
    EXPECT_EQ(run_json(ranks).at("link"), link);
  }
  expect_refused("plan --step --model 35B-A3B --link pcie", {"--link", "--tp"});
  expect_refused("plan --step --model 35B-A3B --enable-expert-parallel", {"--enable-expert-parallel", "--tp"});
  const auto kernels = [&](const std::string& more) {
    const Json list = run_json("plan --kernels --model 35B-A3B --mix A --json" + more);
    std::set<std::string> names;
    for (const Json& kernel : list.at("kernels")) names.insert(kernel.at("name").get<std::string>());
    return names;
  };
  // Of ranks: sums, and experts of a part of the width, or of all of it.
  const auto has = [](const std::set<std::string>& names, std::string_view part) {
    return std::any_of(names.begin(), names.end(),
                       [&](const std::string& name) { return name.find(part) != name.npos; });
  };
  const std::set<std::string> whole = kernels(""), split = kernels(" --tp 2"),
                              shared = kernels(" --tp 2 --enable-expert-parallel");
  EXPECT_TRUE(!whole.contains("reduce") && split.contains("reduce") && shared.contains("reduce"));
  EXPECT_TRUE(has(whole, "_512x2048") && !has(split, "_512x2048") && has(split, "_256x2048"));
  EXPECT_TRUE(has(shared, "_512x2048") && !has(shared, "_256x2048"));
  expect_refused("plan --kernels --model 35B-A3B --enable-expert-parallel", {"--enable-expert-parallel", "--tp"});
  expect_refused("warm --model i704 --tp 2 --enable-expert-parallel", {"--enable-expert-parallel", "whole model"});
  expect_refused("plan --step --model 35B-A3B --top-k 4", {"--step", "--top-k"});
  expect_refused("plan --model 35B-A3B --context 4", {"--context", "--step"});
  expect_refused("plan --model 35B-A3B --hidden ''", {"--hidden"});
  expect_refused("plan --model 35B-A3B --tokens -1", {"--tokens", "-1"});
}

TEST_F(Cmd, FlagsOfGpuCommandsAreReadBeforeAGpuIsWanted) {
  expect_refused("bench kernels --emulate gtx-1080", {"gtx-1080", "h200"});
  expect_refused("bench kernels --compare " + path("none.json").string(), {"none.json"});
  expect_refused("bench kernels --compare " + write("list.json", "[]"), {"list.json", "results"});
  expect_refused("bench kernels --tokens 1,,2", {"--tokens"});
  expect_refused("tune --routing zipf", {"zipf", "uniform"});
  expect_refused("tune --tokens 3", {"3"});
}

TEST_F(Cmd, APackServesAMachineWithoutACompiler) {
  const std::string shape = " --arch sm_90a --experts 8 --top-k 2 --hidden 128 --intermediate 64";
  const Outcome packed = run("warm" + shape + " --store " + path("a").string() + " --pack " + path("pack").string());
  if (packed.err.find("no NVRTC") != std::string::npos) GTEST_SKIP() << "no NVRTC on this machine";
  ASSERT_EQ(packed.status, 0) << packed.err;
  ::setenv("FOURFOLD_NVRTC", path("no-such-library.so").c_str(), 1);
  const std::string store = " --store " + path("b").string();
  expect_refused("warm" + shape + store, {"NVRTC"});
  expect_refused("warm --limit-mb 0 --import " + path("pack").string() + store, {"--limit-mb"});
  EXPECT_EQ(run("warm --import " + path("pack").string() + store).status, 0);
  const Json found = run_json("warm" + shape + store + " --json");
  ::unsetenv("FOURFOLD_NVRTC");
  EXPECT_GT(found.at("kernels").get<int>(), 0);
  EXPECT_EQ(found.at("compiled").get<int>(), 0);
}

// ---- the program itself ---------------------------------------------------------------------------------------------

TEST_F(Cmd, OutputThatCannotBeWrittenIsAnError) {
  // What fits the buffer fails at the end, what does not fails on the way.
  for (const std::string& command :
       {std::string("plan --model 35B-A3B"), "tokenize " + demo_ + " " + demo_ + "/tokenizer.json"}) {
    for (const char* to : {">/dev/full", ">&-"}) {
      const Outcome outcome = run(command, "", to);
      EXPECT_EQ(outcome.status, 2) << command << to;
      EXPECT_EQ(outcome.err.substr(0, 17), "fourfold: error: ") << command << to << "\n" << outcome.err;
      EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1) << outcome.err;
    }
  }
}

TEST_F(Cmd, WorkGoesOnWhereMessagesCannotBeWritten) {
  const std::string ask = "run " + demo_ + " --temperature 0 --think 'What is 12 + 30?'";
  for (const char* to : {"2>/dev/full", "2>&-"}) {
    const Outcome outcome = run(ask, "", to);
    EXPECT_EQ(outcome.status, 0) << to;
    EXPECT_NE(outcome.out.find("42"), std::string::npos) << outcome.out;
    EXPECT_EQ(run("run /nonexistent/ hello", "", to).status, 2) << to;
  }
  // With a closed stream its number must not become that of the file that is written.
  const std::string out = path("logits.safetensors").string();
  const std::string tokens = write("tokens.json", "[1, 2, 3]");
  ASSERT_EQ(run("logits " + demo_ + " " + tokens + " " + out).status, 0);
  const std::string whole = read(out);
  EXPECT_EQ(run("logits " + demo_ + " " + tokens + " " + out, "", "<&- >&- 2>&-").status, 0);
  EXPECT_EQ(read(out), whole);
}

TEST_F(Cmd, ErrorsAreOneLineWhateverTheyQuote) {
  expect_refused("inspect \"$(printf 'a\\nb\\033[31m\\377')\"", {"a\\x0ab\\x1b[31m\\xff"});
}

TEST_F(Cmd, BenchLoadTakesModelsOfSeveralRanks) {
  for (const int ranks : {1, 2}) {
    const Outcome outcome =
        run("bench load " + demo_ + " --device cpu --repeats 2 --json --tensor-parallel-size " + std::to_string(ranks));
    ASSERT_EQ(outcome.status, 0) << outcome.err;
    const Json said = Json::parse(outcome.out);
    EXPECT_EQ(said.at("ranks"), ranks);
    EXPECT_EQ(said.at("loads").size(), 2U);
    EXPECT_GT(said.at("loads")[0].at("lookups"), 20);
    EXPECT_GT(said.at("gb_per_s"), 0.0);
    EXPECT_FALSE(said.contains("copy_gb_per_s")) << "nothing is copied to a card";
  }
  expect_refused("bench load " + demo_ + " --device cpu --tensor-parallel-size 3", {"--tensor-parallel-size 3"});
}

TEST_F(Cmd, CtrlCEndsTheProgramAsShellsExpect) {
  const std::string out = path("stdout").string(), err = path("stderr").string();
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    if (std::freopen(out.c_str(), "w", stdout) != nullptr && std::freopen(err.c_str(), "w", stderr) != nullptr) {
      ::execl(FOURFOLD_BINARY, "fourfold", "bench", "ops", "--filter", "add_rms_norm", "--seconds", "60", nullptr);
    }
    ::_exit(1);
  }
  ::sleep(1);
  ::kill(child, SIGINT);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status)) << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 130);
  EXPECT_EQ(read(err), "fourfold: interrupted\n");
}

TEST_F(Cmd, HelpNamesEveryCommandAndBashCompletesThem) {
  for (const char* command : {"run", "bench model", "quantize", "help"}) {
    EXPECT_EQ(run(std::string("help ") + command).out, run(std::string(command) + " --help").out) << command;
  }
  EXPECT_EQ(run("help").out, run("--help").out);
  expect_refused("help bench nothing", {"nothing", "ops"});
  expect_refused("help nothing", {"nothing", "quantize"});
  const std::string script = write("completion.bash", run("completion").out);
  const auto completed = [&](const std::string& words) {
    const std::string command = "bash -c '. \"$0\"; COMP_WORDS=(fourfold " + words +
                                "); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _fourfold; echo \"${COMPREPLY[@]}\"' '" +
                                script + "' >'" + path("completed").string() + "' 2>&1";
    EXPECT_EQ(std::system(command.c_str()), 0);
    return read(path("completed"));
  };
  EXPECT_EQ(completed("quan"), "quantize\n");
  EXPECT_EQ(completed("bench mo"), "model\n");
  EXPECT_EQ(completed("bench model --rep"), "--repeats\n");
  EXPECT_EQ(completed("generate x --form"), "--format\n");
  EXPECT_EQ(completed("generate x --format ct-"), "ct-nvfp4 ct-nvfp4a16 ct-mixed\n");
  EXPECT_EQ(completed("help plan"), "plan\n");
  EXPECT_EQ(completed("run mod"), "\n");  // a file: bash's own
}

TEST_F(Cmd, HelpAndVersion) {
  for (const char* command :
       {"", "run", "eval", "bench", "bench model", "bench ops", "inspect", "quantize", "generate", "logits", "render",
        "tokenize", "plan", "warm", "tune", "bench kernels", "help", "completion"}) {
    const Outcome outcome = run(std::string(command) + " --help");
    EXPECT_EQ(outcome.status, 0) << command;
    EXPECT_NE(outcome.out.find("Usage: fourfold"), std::string::npos) << command << "\n" << outcome.out;
  }
  EXPECT_NE(run("run --help").out.find("Usage: fourfold run [OPTIONS] [DIR] [PROMPT]\n"), std::string::npos);
  EXPECT_NE(run("run --help").out.find("--threads 1 .. 1024"), std::string::npos);
  EXPECT_EQ(run("--version").status, 0);
  expect_refused("no-such-command", {"no-such-command", "quantize"});
  expect_refused("--no-such-option", {"--no-such-option", "quantize"});
  expect_refused("bench no-such-thing", {"no-such-thing", "ops"});
  expect_refused("bench", {"no command", "ops"});
  expect_refused("", {"no command", "quantize"});
}

}  // namespace
}  // namespace fourfold
