// fourfold eval: exact match on task files, for one checkpoint or two side by side.
//
// A task file has one JSON object per line:
//   {"task": NAME, "messages": [...], "tools": [...]?, "enable_thinking": bool?, "expect": {"kind": KIND, ...}}
// What is compared is the answer without its thinking, trimmed; an answer that the model did not end is wrong.
//   text       equal to `value`, trimmed
//   number     the last integer of the answer (a minus sign counts at the start and after white space) equals `value`
//   json       the answer parses as JSON equal to `value` (the order of keys does not matter)
//   tool_call  the parsed calls equal `calls`: [{"name", "arguments"}], in order, with typed arguments
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <deque>
#include <exception>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/file.h"
#include "base/interrupt.h"
#include "base/json.h"
#include "base/math.h"
#include "base/progress.h"
#include "chat/answer.h"
#include "chat/chat_text.h"
#include "cmd/arguments.h"
#include "cmd/card_memory.h"
#include "cmd/commands.h"
#include "cmd/engine_load.h"
#include "cmd/model_options.h"
#include "cmd/options.h"
#include "engine/engine.h"
#include "model/model.h"

namespace fourfold::cmd {
namespace {

namespace fs = std::filesystem;

struct Options {
  std::vector<std::string> positional;
  BackendArgs backend;
  MemoryArgs memory;
  int64_t parallel = 8, limit = 0, max_tokens = 1024, context = 0;
  bool json = false, think = false, no_think = false, mtp = false;
  std::string failures, draft = "0";
};

struct Item {
  std::string task, where;
  Json messages, tools, expect;
  std::optional<bool> thinking;
};

// ---- task files

const Json& field(const Json& object, const char* name, const std::string& where) {
  const auto found = object.find(name);
  if (found == object.end()) fail("{}: '{}' is missing", where, name);
  return *found;
}

void check_expect(const Json& expect, const std::string& where) {
  if (!expect.is_object()) fail("{}: 'expect' is {}, wanted an object", where, json_kind(expect));
  const Json& kind = field(expect, "kind", where);
  if (!kind.is_string()) fail("{}: 'expect.kind' is {}, wanted a string", where, json_kind(kind));
  const std::string name = kind.get<std::string>();
  if (name == "text") {
    if (!field(expect, "value", where).is_string()) fail("{}: 'expect.value' must be a string", where);
  } else if (name == "number") {
    if (!field(expect, "value", where).is_number_integer()) fail("{}: 'expect.value' must be an integer", where);
  } else if (name == "json") {
    field(expect, "value", where);
  } else if (name == "tool_call") {
    const Json& calls = field(expect, "calls", where);
    if (!calls.is_array()) fail("{}: 'expect.calls' is {}, wanted an array", where, json_kind(calls));
    for (const Json& call : calls) {
      if (!call.is_object() || !call.contains("name") || !call["name"].is_string() || !call.contains("arguments") ||
          !call["arguments"].is_object()) {
        fail("{}: an entry of 'expect.calls' is not {{\"name\": string, \"arguments\": object}}", where);
      }
    }
  } else {
    fail("{}: 'expect.kind' is '{}', wanted text, number, json or tool_call", where, printable(name));
  }
}

void read_tasks(const fs::path& path, int64_t limit, std::vector<Item>& items) {
  const std::string content = read_input(path.string(), 256u << 20);
  int64_t line_number = 0, taken = 0;
  for (size_t begin = 0; begin < content.size();) {
    size_t end = content.find('\n', begin);
    if (end == std::string::npos) end = content.size();
    const std::string_view line = std::string_view(content).substr(begin, end - begin);
    begin = end + 1;
    ++line_number;
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    if (limit > 0 && taken == limit) return;
    Item item;
    item.where = fmt::format("{}:{}", path.string(), line_number);
    const Json json = parse_json(line, item.where);
    if (!json.is_object()) fail("{}: {}, wanted an object", item.where, json_kind(json));
    item.task = path.stem().string();
    if (json.contains("task")) {
      if (!json["task"].is_string()) fail("{}: 'task' is {}, wanted a string", item.where, json_kind(json["task"]));
      item.task = json["task"].get<std::string>();
    }
    item.messages = field(json, "messages", item.where);
    if (json.contains("tools")) item.tools = json["tools"];
    if (json.contains("enable_thinking")) {
      if (!json["enable_thinking"].is_boolean()) fail("{}: 'enable_thinking' must be true or false", item.where);
      item.thinking = json["enable_thinking"].get<bool>();
    }
    item.expect = field(json, "expect", item.where);
    check_expect(item.expect, item.where);
    items.push_back(std::move(item));
    ++taken;
  }
  if (taken == 0) fail("{}: no task in it", path.string());
}

bool is_checkpoint(const fs::path& path) { return directory_exists(path) && file_exists(path / "config.json"); }

std::vector<fs::path> task_files(const fs::path& directory) {
  std::vector<fs::path> files;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(directory, error)) {
    if (entry.path().extension() == ".jsonl") files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  return files;
}

bool holds_tasks(const fs::path& directory) { return !task_files(directory).empty(); }

std::vector<fs::path> files_in(const fs::path& directory) {
  std::vector<fs::path> files = task_files(directory);
  if (files.empty()) fail("{}: no task files (*.jsonl) in it", directory.string());
  return files;
}

struct Plan {
  std::vector<fs::path> checkpoints;
  std::vector<Item> items;
};

// Leading arguments that are checkpoints (at most two); the others are task files, directories of them, or names of
// tasks in the first checkpoint's eval/ directory.
Plan make_plan(const Options& options) {
  Plan plan;
  size_t next = 0;
  while (next < options.positional.size() && plan.checkpoints.size() < 2 && is_checkpoint(options.positional[next])) {
    plan.checkpoints.push_back(options.positional[next++]);
  }
  if (plan.checkpoints.empty()) {
    if (!options.positional.empty() && directory_exists(options.positional[0]) && !holds_tasks(options.positional[0])) {
      fail("eval: {} has neither a config.json nor task files (*.jsonl), wanted a checkpoint or a directory of tasks",
           printable(options.positional[0]));
    }
    plan.checkpoints.push_back(chat::default_model_directory());
  }
  fs::path home;  // of the tasks that come with a checkpoint
  for (const fs::path& checkpoint : plan.checkpoints) {
    if (home.empty() && directory_exists(checkpoint / "eval")) home = checkpoint / "eval";
  }
  std::vector<fs::path> files;
  for (; next < options.positional.size(); ++next) {
    const fs::path argument = options.positional[next];
    if (file_exists(argument) || is_stream(argument)) {
      files.push_back(argument);
    } else if (directory_exists(argument)) {
      for (const fs::path& file : files_in(argument)) files.push_back(file);
    } else if (!home.empty() && file_exists(home / (argument.string() + ".jsonl"))) {
      files.push_back(home / (argument.string() + ".jsonl"));
    } else {
      fail("eval: {} is neither a checkpoint directory, a task file, nor a task in {}", printable(argument.string()),
           home.empty() ? "eval/ of the checkpoint (which has none)" : home.string());
    }
  }
  if (files.empty()) {
    if (home.empty()) {
      fail("eval: {} has no eval/ directory; name task files (*.jsonl)", plan.checkpoints[0].string());
    }
    files = files_in(home);
  }
  for (const fs::path& file : files) read_tasks(file, options.limit, plan.items);
  return plan;
}

// ---- scoring

bool same_json(const Json& a, const Json& b) {
  if (a.is_object() && b.is_object()) {
    if (a.size() != b.size()) return false;
    for (const auto& [key, value] : a.items()) {
      const auto other = b.find(key);
      if (other == b.end() || !same_json(value, *other)) return false;
    }
    return true;
  }
  if (a.is_array() && b.is_array()) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                      [](const Json& x, const Json& y) { return same_json(x, y); });
  }
  return a == b;
}

std::string trimmed(std::string_view text) {
  const size_t begin = text.find_first_not_of(" \t\r\n");
  if (begin == std::string_view::npos) return "";
  return std::string(text.substr(begin, text.find_last_not_of(" \t\r\n") - begin + 1));
}

std::optional<int64_t> last_integer(std::string_view text) {
  const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
  size_t end = text.size();
  while (end > 0 && !is_digit(text[end - 1])) --end;
  if (end == 0) return std::nullopt;
  size_t begin = end;
  while (begin > 0 && is_digit(text[begin - 1])) --begin;
  if (begin > 0 && text[begin - 1] == '-' &&
      (begin == 1 || std::string_view(" \t\r\n").find(text[begin - 2]) != std::string_view::npos)) {
    --begin;
  }
  int64_t value = 0;
  const auto [stop, error] = std::from_chars(text.data() + begin, text.data() + end, value);
  if (error != std::errc() || stop != text.data() + end) return std::nullopt;
  return value;
}

bool is_correct(const chat::Answer& answer, bool ended, const Json& expect) {
  if (!ended || !answer.closed) return false;
  const std::string kind = expect["kind"].get<std::string>();
  const std::string content = trimmed(answer.content);
  if (kind == "text") return answer.calls.empty() && content == trimmed(expect["value"].get<std::string>());
  if (kind == "number") {
    const auto found = last_integer(content);
    return found && *found == expect["value"].get<int64_t>();
  }
  if (kind == "json") {
    try {
      return same_json(parse_json(content, "the answer"), expect["value"]);
    } catch (const Error&) {
      return false;
    }
  }
  const Json& calls = expect["calls"];
  if (answer.calls.size() != calls.size()) return false;
  for (size_t i = 0; i < calls.size(); ++i) {
    if (answer.calls[i].name != calls[i]["name"].get<std::string>()) return false;
    if (!same_json(answer.calls[i].parsed_arguments(), calls[i]["arguments"])) return false;
  }
  return true;
}

// ---- running

struct Count {
  int64_t count = 0, correct = 0, output_tokens = 0;
  double exact_match() const { return count == 0 ? 0 : static_cast<double>(correct) / static_cast<double>(count); }
  void add(bool right, size_t tokens) {
    count += 1;
    correct += right ? 1 : 0;
    output_tokens += static_cast<int64_t>(tokens);
  }
};

// Answers with thinking and direct ones are different tasks to a model, and are also counted apart.
struct TaskScore {
  Count all, direct, thinking;
  void add(bool right, bool thought, size_t tokens) {
    all.add(right, tokens);
    (thought ? thinking : direct).add(right, tokens);
  }
  bool both() const { return direct.count > 0 && thinking.count > 0; }
};

struct Score {
  std::string name;
  std::map<std::string, TaskScore> tasks;
  TaskScore all;
  double seconds = 0;
  int64_t items = 0;   // that there were to be answered
  int64_t errors = 0;  // answers that the engine could not finish; wrong ones
  std::string first_error;
  std::exception_ptr ended_by;       // what ended the evaluation before its end: a Ctrl-C, a model that failed
  int64_t drafts = 0, accepted = 0;  // of the MTP head
};

// A checkpoint with its prompts: whatever is wrong with any of them comes to light before the weights are read.
struct Work {
  fs::path directory;
  std::string name;
  std::unique_ptr<chat::ChatText> text;
  int64_t context = 0;
  std::vector<chat::Prompt> prompts;  // of the items
};

Work prepare(const fs::path& directory, std::string name, const Options& options, const std::vector<Item>& items) {
  Work work;
  work.directory = directory;
  work.name = std::move(name);
  const model::ModelConfig config = model::read_config(directory);
  work.context = chat::choose_context(options.context, config.max_positions);
  work.text = std::make_unique<chat::ChatText>(directory, config);
  int64_t too_long = 0;
  std::string first;
  for (const Item& item : items) {
    try {
      std::optional<bool> thinking = item.thinking;
      if (options.think) thinking = true;
      if (options.no_think) thinking = false;
      chat::Conversation conversation;
      conversation.messages = item.messages;
      conversation.tools = item.tools;
      if (thinking) conversation.variables["enable_thinking"] = *thinking;
      work.prompts.push_back(work.text->prompt(conversation));
    } catch (const Error& error) {
      fail("{}: {}", item.where, error.what());
    }
    const auto tokens = static_cast<int64_t>(work.prompts.back().tokens.size());
    if (tokens < work.context) continue;
    if (too_long++ == 0) first = fmt::format("{}: the prompt has {} tokens", item.where, tokens);
  }
  if (too_long > 0) {
    fail("{}{}, wanted at most {} (--context {} and at least one token of the answer)", first,
         too_long == 1 ? "" : fmt::format(", {} more are too long", too_long - 1), work.context - 1, work.context);
  }
  return work;
}

// The names of the checkpoints, told apart by as many directories above them as it takes.
std::vector<std::string> distinct_names(const std::vector<fs::path>& checkpoints) {
  std::vector<fs::path> absolute;
  for (const fs::path& path : checkpoints) {
    std::error_code error;
    fs::path full = fs::weakly_canonical(path, error);
    absolute.push_back(error ? path : full);
  }
  std::vector<std::string> names;
  for (const fs::path& path : checkpoints) names.push_back(chat::model_name(path));
  if (names.size() != 2 || names[0] != names[1] || absolute[0] == absolute[1]) return names;
  fs::path left = absolute[0].parent_path(), right = absolute[1].parent_path();
  while (names[0] == names[1] && left.has_relative_path() && right.has_relative_path()) {
    names[0] = left.filename().string() + "/" + names[0];
    names[1] = right.filename().string() + "/" + names[1];
    left = left.parent_path();
    right = right.parent_path();
  }
  return names;
}

struct Generated {
  std::vector<int32_t> prompt, output;
};

// How often the MTP head's first draft is the token that greedy decoding takes: teacher-forced over the finished
// answers, so that drafting itself is not needed.
void measure_mtp(const fs::path& directory, const Options& options, const std::vector<Generated>& texts, Score& score) {
  model::ModelOptions model_options;
  model_options.max_step_tokens = 256;
  model_options.max_logit_rows = 256;
  model_options.mtp = true;
  chat::LoadedModel loaded = load_checkpoint(directory, options.backend, model_options);
  model::Model& model = *loaded.model;
  if (!model.has_mtp()) fail("eval: {} has no MTP head, --mtp cannot be used", directory.string());
  size_t longest = 0;
  for (const Generated& text : texts) longest = std::max(longest, text.prompt.size() + text.output.size());
  constexpr int64_t kPageSize = 64;
  const int64_t pages = ceil_div(static_cast<int64_t>(longest), kPageSize);
  model::Caches caches = model.make_caches(pages, kPageSize, 1);
  std::vector<int32_t> page_table;
  for (int64_t page = 0; page < pages; ++page) page_table.push_back(static_cast<int32_t>(page));
  const auto vocabulary = static_cast<size_t>(model.config().vocabulary);
  std::vector<float> row(vocabulary);
  Progress progress("drafting", texts.size(), "answers");
  for (const Generated& text : texts) {
    throw_if_interrupted();
    std::vector<int32_t> tokens = text.prompt;
    tokens.insert(tokens.end(), text.output.begin(), text.output.end());
    // Row t of the MTP head reads token t + 1 and predicts token t + 2; rows whose prediction lies in the output count.
    const auto rows = static_cast<int64_t>(tokens.size()) - 1;
    for (int64_t begin = 0; begin < rows; begin += model_options.max_step_tokens) {
      const int64_t count = std::min(model_options.max_step_tokens, rows - begin);
      ops::Sequence sequence;
      sequence.count = static_cast<int32_t>(count);
      sequence.position = static_cast<int32_t>(begin);
      sequence.pages = page_table;
      const std::span all(tokens);
      model.forward({all.subspan(static_cast<size_t>(begin), static_cast<size_t>(count)), std::span(&sequence, 1), {}},
                    caches);
      std::vector<int32_t> wanted;
      for (int64_t t = begin; t < begin + count; ++t) {
        const bool drafts =
            t + 2 > static_cast<int64_t>(text.prompt.size()) && t + 2 < static_cast<int64_t>(tokens.size());
        if (drafts) wanted.push_back(static_cast<int32_t>(t - begin));
      }
      model.forward_mtp(
          {all.subspan(static_cast<size_t>(begin + 1), static_cast<size_t>(count)), std::span(&sequence, 1), wanted},
          model.hidden(), caches);
      const ops::Tensor logits = model.mtp_logits();
      for (size_t i = 0; i < wanted.size(); ++i) {
        model.backend().read(logits.slice_rows(static_cast<int64_t>(i), static_cast<int64_t>(i) + 1), row);
        const auto best = std::max_element(row.begin(), row.end()) - row.begin();
        ++score.drafts;
        score.accepted += best == tokens[static_cast<size_t>(begin + wanted[i] + 2)] ? 1 : 0;
      }
    }
    progress.advance(1);
  }
}

std::unique_ptr<engine::Engine> start_engine(const Work& work, const Options& options) {
  engine::EngineOptions engine_options;
  engine_options.max_context = work.context;
  engine_options.max_sequences = options.parallel;
  engine_options.max_step_tokens = 512;
  engine_options.spare_logit_rows = 0;
  engine_options.drafts = parse_drafts(options.draft);
  model::ModelOptions model_options;
  model_options.max_step_tokens = engine_options.max_step_tokens;
  model_options.max_logit_rows = engine::logit_rows(engine_options);
  model_options.mtp = engine_options.drafts != 0;
  Planned planned;
  planned.directory = work.directory;
  planned.engine = engine_options;
  planned.model = model_options;
  planned.mtp = model_options.mtp;
  if (const auto plan = require_memory(options.backend, options.memory, planned)) engine_options = plan->engine;
  chat::LoadedModel loaded = load_checkpoint(work.directory, options.backend, model_options);
  return engine::make_engine(std::move(loaded.model), engine_options);
}

// Waits for the end of an answer and collects its tokens.
engine::Event collect(engine::EventStream& stream, std::vector<int32_t>& output) {
  for (;;) {
    throw_if_interrupted();
    auto event = stream.next(std::chrono::milliseconds(100));
    if (!event) continue;
    if (event->kind == engine::Event::Kind::kFinished) return std::move(*event);
    output.push_back(event->token);
  }
}

struct Pending {
  size_t item = 0;
  std::unique_ptr<engine::EventStream> stream;
};

// Answers all items and counts them in `score`; one that throws leaves what is done so far.
void answer_items(const Work& work, const Options& options, const std::vector<Item>& items, AtomicFile* failures,
                  std::vector<Generated>& generated, Score& score) {
  const auto engine = start_engine(work, options);
  std::deque<Pending> pending;
  Progress progress(fmt::format("evaluating {}", work.name), items.size(), "tasks");
  size_t next = 0;
  while (next < items.size() || !pending.empty()) {
    // Twice as many as run at once, so that the engine never waits for us.
    while (next < items.size() && static_cast<int64_t>(pending.size()) < 2 * options.parallel) {
      engine::Request request = work.text->request(work.prompts[next]);
      request.sampling = {};
      request.sampling.temperature = 0;
      request.max_tokens = options.max_tokens;
      pending.push_back({next, engine->submit(std::move(request))});
      ++next;
    }
    const Pending entry = std::move(pending.front());
    pending.pop_front();
    const Item& item = items[entry.item];
    std::vector<int32_t> output;
    const engine::Event end = collect(*entry.stream, output);
    if (end.reason == engine::FinishReason::kError && score.errors++ == 0) {
      score.first_error = fmt::format("{}: {}", item.where, end.error);
    }
    const bool ended = end.reason == engine::FinishReason::kStop;
    const chat::Prompt& prompt = work.prompts[entry.item];
    chat::AnswerOptions answer_options;
    answer_options.reasoning = prompt.reasoning;
    answer_options.tools = item.tools;
    chat::AnswerStream answer(*work.text, std::move(answer_options));
    for (const int32_t token : output) answer.push(token);
    answer.finish();
    const bool correct = is_correct(answer.answer(), ended, item.expect);
    const bool thinking = prompt.reasoning == chat::Reasoning::kInside;
    score.tasks[item.task].add(correct, thinking, output.size());
    score.all.add(correct, thinking, output.size());
    if (!correct && failures != nullptr) {
      Json line;
      line["checkpoint"] = score.name;
      line["where"] = item.where;
      line["expect"] = item.expect;
      line["ended"] = ended;
      line["text"] = answer.text();
      failures->write(line.dump(-1, ' ', false, Json::error_handler_t::replace) + '\n');
    }
    if (options.mtp) generated.push_back({prompt.tokens, std::move(output)});
    progress.advance(1);
  }
}

Score evaluate(const Work& work, const Options& options, const std::vector<Item>& items, AtomicFile* failures) {
  Score score;
  score.name = work.name;
  score.items = static_cast<int64_t>(items.size());
  std::vector<Generated> generated;
  const auto start = std::chrono::steady_clock::now();
  try {
    answer_items(work, options, items, failures, generated, score);
    score.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (options.mtp) measure_mtp(work.directory, options, generated, score);
  } catch (...) {
    if (score.all.all.count == 0) throw;  // nothing to show
    score.ended_by = std::current_exception();
  }
  if (score.seconds == 0) {
    score.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }
  return score;
}

// ---- output

Json to_json(const Count& count) {
  return {{"exact_match", count.exact_match()},
          {"count", count.count},
          {"correct", count.correct},
          {"output_tokens", count.output_tokens}};
}

Json to_json(const TaskScore& task) {
  Json out = to_json(task.all);
  if (task.direct.count > 0) out["direct"] = to_json(task.direct);
  if (task.thinking.count > 0) out["thinking"] = to_json(task.thinking);
  return out;
}

Json to_json(const Score& score) {
  Json out;
  out["checkpoint"] = score.name;
  out.update(to_json(score.all));
  out["items"] = score.items;
  out["errors"] = score.errors;
  out["seconds"] = score.seconds;
  out["tokens_per_s"] = score.seconds > 0 ? static_cast<double>(score.all.all.output_tokens) / score.seconds : 0.0;
  if (score.drafts > 0) {
    out["mtp"] = {{"drafts", score.drafts},
                  {"accepted", score.accepted},
                  {"acceptance", static_cast<double>(score.accepted) / static_cast<double>(score.drafts)}};
  }
  for (const auto& [name, task] : score.tasks) out["tasks"][name] = to_json(task);
  return out;
}

constexpr size_t kNameWidth = 24;

// The end of a name, which is where names of checkpoints differ.
std::string column_name(const std::string& name) {
  const std::string text = printable(name, 200);
  return text.size() <= kNameWidth ? text : ".." + text.substr(text.size() - kNameWidth + 2);
}

struct Row {
  std::string name;
  const Count* first = nullptr;
  const Count* second = nullptr;  // null: not answered by the second checkpoint
};

void add_rows(std::vector<Row>& rows, const std::string& name, const TaskScore& first, const TaskScore* second,
              bool total) {
  const auto add = [&](const std::string& label, const Count& count, const Count* other) {
    if (count.count > 0) rows.push_back({label, &count, other});
  };
  if (first.both() || !total) {
    add(name + ", direct", first.direct, second == nullptr ? nullptr : &second->direct);
    add(name + ", thinking", first.thinking, second == nullptr ? nullptr : &second->thinking);
  }
  if (total) add(name, first.all, second == nullptr ? nullptr : &second->all);
}

void print_table(const std::vector<Score>& scores) {
  const bool two = scores.size() == 2;
  std::vector<Row> rows;
  for (const auto& [name, task] : scores[0].tasks) {
    const TaskScore* other = nullptr;
    if (two) {
      if (const auto found = scores[1].tasks.find(name); found != scores[1].tasks.end()) other = &found->second;
    }
    add_rows(rows, name, task, other, false);
  }
  add_rows(rows, "all", scores[0].all, two ? &scores[1].all : nullptr, true);
  size_t width = 12, column = 8;
  for (Row& row : rows) {
    row.name = printable(row.name);
    width = std::max(width, row.name.size());
  }
  for (const Score& score : scores) column = std::max(column, column_name(score.name).size());
  fmt::print("{:<{}}  {:>6}  {:>{}}", "task", width, "items", column_name(scores[0].name), column);
  if (two) fmt::print("  {:>{}}  {:>10}", column_name(scores[1].name), column, "difference");
  fmt::print("  {:>13}\n", "tokens/answer");
  for (const Row& row : rows) {
    fmt::print("{:<{}}  {:>6}  {:>{}.1f} %", row.name, width, row.first->count, 100 * row.first->exact_match(),
               column - 2);
    if (two && row.second != nullptr && row.second->count > 0) {
      fmt::print("  {:>{}.1f} %", 100 * row.second->exact_match(), column - 2);
      // Only where both answered the same items.
      if (row.second->count == row.first->count) {
        fmt::print("  {:>+10.1f}", 100 * (row.second->exact_match() - row.first->exact_match()));
      } else {
        fmt::print("  {:>10}", "");
      }
    } else if (two) {
      fmt::print("  {:>{}}  {:>10}", "", column, "");
    }
    fmt::print("  {:>13.1f}\n", static_cast<double>(row.first->output_tokens) / static_cast<double>(row.first->count));
  }
  for (const Score& score : scores) {
    const Count& all = score.all.all;
    fmt::print("{}: {} answers{}, {} tokens in {:.1f} s, {:.1f} tokens/s", printable(score.name), all.count,
               all.count < score.items ? fmt::format(" of {}", score.items) : "", all.output_tokens, score.seconds,
               score.seconds > 0 ? static_cast<double>(all.output_tokens) / score.seconds : 0.0);
    if (score.errors > 0) fmt::print(", {} failed", score.errors);
    if (score.drafts > 0) {
      fmt::print("; MTP head: {:.1f} % of {} first drafts accepted",
                 100.0 * static_cast<double>(score.accepted) / static_cast<double>(score.drafts), score.drafts);
    }
    fmt::print("\n");
  }
}

void run(const Options& options) {
  install_interrupt_handler();
  const Plan plan = make_plan(options);
  std::optional<AtomicFile> failures;
  if (!options.failures.empty()) failures.emplace(options.failures);
  const std::vector<std::string> names = distinct_names(plan.checkpoints);
  std::vector<Work> work;
  for (size_t i = 0; i < plan.checkpoints.size(); ++i) {
    work.push_back(prepare(plan.checkpoints[i], names[i], options, plan.items));
  }
  std::vector<Score> scores;
  std::exception_ptr ended_by;
  try {
    for (const Work& one : work) {
      scores.push_back(evaluate(one, options, plan.items, failures ? &*failures : nullptr));
      ended_by = scores.back().ended_by;
      if (ended_by) break;
    }
  } catch (...) {
    if (scores.empty()) throw;
    ended_by = std::current_exception();
  }
  if (options.json) {
    Json out = to_json(scores[0]);
    if (scores.size() == 2) {
      out["second"] = to_json(scores[1]);
      if (scores[0].all.all.count == scores[1].all.all.count) {
        out["difference"] = scores[1].all.all.exact_match() - scores[0].all.all.exact_match();
      }
    }
    fmt::print("{}\n", out.dump(2, ' ', false, Json::error_handler_t::replace));
  } else {
    print_table(scores);
  }
  // The scores are worth more than the file: they are out already when it turns out that it cannot be written.
  std::fflush(stdout);
  if (failures) failures->commit();
  if (interrupted()) {
    int64_t done = 0;
    for (const Score& score : scores) done += score.all.all.count;
    throw Interrupted(fmt::format("interrupted after {} of {} tasks", done, plan.items.size() * work.size()));
  }
  if (ended_by) std::rethrow_exception(ended_by);
  for (const Score& score : scores) {
    if (score.errors > 0)
      fail("{} of {} answers failed, and count as wrong: {}", score.errors, score.items, score.first_error);
  }
}

}  // namespace

void add_eval(Command& app) {
  auto options = std::make_shared<Options>();
  Command command = app.add_command(
      "eval",
      "Exact match on tasks, per kind; two checkpoints side by side show what a quantisation cost\n\n"
      "  fourfold eval                      the demo model on its held-out tasks\n"
      "  fourfold eval [DIR] [TASKS...]     TASKS are files of tasks, directories of them, or names in DIR/eval\n"
      "  fourfold eval DIR DIR2 [TASKS...]  two checkpoints on the same tasks");
  command.add_option("args", options->positional, "[DIR [DIR2]] [TASKS...]").untyped();
  command.add_option("--parallel", options->parallel, "Answers generated at once").range(1, 256);
  command.add_option("--limit", options->limit, "At most this many items of each task file").range(1, 1 << 30);
  command.add_option("--max-tokens", options->max_tokens, "Tokens of an answer, at most").range(1, 1 << 24);
  add_context_option(command, options->context, "Tokens of prompt and answer, at most");
  command.add_flag("--think", options->think, "With thinking, whatever the tasks say");
  command.add_flag("--no-think", options->no_think, "Without thinking, whatever the tasks say");
  command.exclude("--think", "--no-think");
  command.add_flag("--mtp", options->mtp, "Also measure how often the MTP head's first draft is right");
  command.add_option("--failures", options->failures, "Write the wrong answers to this file, one JSON object per line");
  command.add_flag("--json", options->json, "Print one JSON object");
  command.add_option("--draft", options->draft,
                     "Drafts of the MTP head a step: 0 (off) to 5, or auto; answers stay the same");
  add_backend_options(command, options->backend);
  add_memory_options(command, options->memory);
  command.callback([options] { run(*options); });
}

}  // namespace fourfold::cmd
