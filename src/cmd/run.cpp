// fourfold run: chat with a model in the terminal, ask it one question, or run a shape with random weights for speed.
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/console.h"
#include "base/env.h"
#include "base/file.h"
#include "base/interrupt.h"
#include "base/json.h"
#include "base/random.h"
#include "chat/answer.h"
#include "chat/chat_text.h"
#include "chat/conversation.h"
#include "chat/sampling.h"
#include "chat/stop_strings.h"
#include "cmd/arguments.h"
#include "cmd/card_memory.h"
#include "cmd/commands.h"
#include "cmd/engine_load.h"
#include "cmd/line_editor.h"
#include "cmd/model_options.h"
#include "cmd/options.h"
#include "cpu/ceilings.h"
#include "engine/engine.h"

namespace fourfold::cmd {
namespace {

constexpr size_t kMaxInput = 16u << 20;  // bytes of a prompt

struct Options {
  std::vector<std::string> positional;
  std::optional<std::string> prompt, system;
  std::string file, messages, tools;  // empty: none
  std::string draft = "0", draft_tokens = "auto";
  std::vector<std::string> stop;
  DummyArgs dummy;
  BackendArgs backend;
  MemoryArgs memory;
  bool think = false, no_think = false, raw = false, json = false, quiet = false, hide_thinking = false;
  chat::SamplingChoice sampling;
  int64_t max_tokens = 0;  // 0: what the context leaves
  int64_t context = 0;     // 0: 8192, or what the model has
};

// What was generated, for the line of figures at the end.
struct Totals {
  int64_t prompt_tokens = 0, decode_tokens = 0;
  double prefill_seconds = 0, decode_seconds = 0;
  double decode_bytes = 0;  // floor: weights and caches that the decode steps had to read

  void add(const engine::Event& end, const CostOfDecode& cost) {
    if (end.output_tokens == 0) return;
    prompt_tokens += end.prompt_tokens;
    prefill_seconds += end.prefill_seconds;
    const int64_t steps = end.output_tokens - 1;  // the first token comes out of the prefill
    decode_tokens += steps;
    decode_seconds += end.decode_seconds;
    decode_bytes += static_cast<double>(steps) *
                    cost.bytes(static_cast<double>(end.prompt_tokens) + static_cast<double>(steps) / 2);
  }
};

// Where decoding reads weights from. The bandwidth of the processor's memory, by so many threads, is a measure of
// `kMemory` alone.
struct WeightsIn {
  enum class Place : uint8_t { kMemory, kCache, kGpu } place = Place::kMemory;
  int threads = 0;
};

WeightsIn weights_of(const chat::LoadedModel& loaded, const BackendArgs& backend) {
  using Place = WeightsIn::Place;
  const Place place = loaded.model->backend().gpu() ? Place::kGpu
                      : fits_in_cache(loaded)       ? Place::kCache
                                                    : Place::kMemory;
  return {place, chosen_threads(backend)};
}

void print_totals(const Totals& totals, const WeightsIn& weights) {
  if (totals.prompt_tokens == 0) return;
  std::string line = fmt::format("prefill {} tokens, {:.1f} tokens/s", totals.prompt_tokens,
                                 static_cast<double>(totals.prompt_tokens) / totals.prefill_seconds);
  if (totals.decode_tokens > 0 && totals.decode_seconds > 0) {
    const double rate = totals.decode_bytes / totals.decode_seconds;
    line += fmt::format("; decode {} tokens, {:.1f} tokens/s, {:.2f} GB/s", totals.decode_tokens,
                        static_cast<double>(totals.decode_tokens) / totals.decode_seconds, rate / 1e9);
    if (weights.place == WeightsIn::Place::kGpu) {
      line += " (on the GPU)";
    } else if (weights.place == WeightsIn::Place::kCache) {
      line += " (from the processor's cache, which holds the model)";
    } else if (const auto bandwidth = cpu::quick_read_bandwidth(weights.threads)) {
      line += fmt::format(" = {:.0f} % of the measured {:.1f} GB/s", 100 * rate / *bandwidth, *bandwidth / 1e9);
    }
  }
  eprint("{}\n", line);
}

// ---- input

std::string trimmed(std::string_view text) {
  const size_t begin = text.find_first_not_of(" \t\r\n");
  if (begin == std::string_view::npos) return "";
  return std::string(text.substr(begin, text.find_last_not_of(" \t\r\n") - begin + 1));
}

// What is piped in beside a prompt. A pipe that somebody forgot to close must not be waited for without end, so that it
// has kPatience to say something; regular files and pipes only, since what a socket or a device is there for nobody
// knows.
std::string piped_input() {
  constexpr int kPatience = 2000;  // ms
  struct stat info {};
  if (::fstat(STDIN_FILENO, &info) != 0) return "";
  if (S_ISREG(info.st_mode)) return read_standard_input(kMaxInput);
  if (!S_ISFIFO(info.st_mode)) return "";
  pollfd wait{STDIN_FILENO, POLLIN, 0};
  const int ready = ::poll(&wait, 1, kPatience);
  throw_if_interrupted();
  if (ready > 0) return read_standard_input(kMaxInput);
  warn(fmt::format("standard input is a pipe that said nothing for {} s, going on without it (--file - waits for it)",
                   kPatience / 1000));
  return "";
}

// ---- the conversation

// One that has not begun.
chat::Conversation opening(const Options& options) {
  chat::Conversation out;
  if (!options.messages.empty()) {
    const std::string name = options.messages == "-" ? "standard input" : options.messages;
    JsonLimits limits;
    limits.reject_duplicate_keys = false;
    out = chat::Conversation::from_json(parse_json(read_input(options.messages, limits.max_bytes), name, limits), name);
  }
  if (!options.tools.empty()) {
    if (out.tools.is_array() && !out.tools.empty()) {
      fail("run: {} has tools, and so has --tools, wanted one of them", options.messages);
    }
    out.tools =
        parse_json(read_input(options.tools, kMaxInput), options.tools == "-" ? "standard input" : options.tools);
    if (!out.tools.is_array()) fail("{}: {}, wanted an array of tools", options.tools, json_kind(out.tools));
  }
  if (options.system) out.messages.insert(out.messages.begin(), Json{{"role", "system"}, {"content", *options.system}});
  if (options.think) out.variables["enable_thinking"] = true;
  if (options.no_think) out.variables["enable_thinking"] = false;
  return out;
}

class Chat {
 public:
  Chat(const Options& options, const chat::ChatText& text, engine::Engine& engine, CostOfDecode cost,
       chat::Conversation conversation)
      : options_(options),
        text_(text),
        engine_(engine),
        cost_(cost),
        seed_(options.sampling.seed),
        conversation_(std::move(conversation)) {
    dim_ = ::isatty(STDERR_FILENO) != 0 && !env("NO_COLOR");
  }

  struct Result {
    chat::Answer answer;
    engine::Event end;
    bool stopped = false;              // by Ctrl-C
    std::optional<std::string> found;  // the stop string that ended it

    const char* finish_reason() const {
      if (stopped) return "cancelled";
      return !found && end.reason == engine::FinishReason::kLength ? "length" : "stop";
    }
  };

  // Asks, prints the answer as it comes, and remembers both. When it fails the question is forgotten again.
  Result ask(const std::string& question) {
    conversation_.messages.push_back({{"role", "user"}, {"content", question}});
    try {
      Result result = generate(text_.prompt(conversation_), true);
      conversation_.messages.push_back(result.answer.message());
      return result;
    } catch (...) {
      conversation_.messages.erase(conversation_.messages.size() - 1);
      throw;
    }
  }

  // The answer to a prompt on its own.
  Result generate(chat::Prompt prompt, bool print) {
    chat::AnswerOptions answer_options;
    answer_options.reasoning = prompt.reasoning;
    answer_options.tools = conversation_.tools;
    answer_options.stop = options_.stop;
    answer_options.plain = options_.raw;
    engine::Request request = text_.request(std::move(prompt));
    request.sampling = options_.sampling.over(request.sampling);
    request.max_tokens = options_.max_tokens > 0 ? options_.max_tokens : int64_t{1} << 40;
    if (seed_) request.sampling.seed = (*seed_)++;
    const auto stream = engine_.submit(std::move(request));

    Result result;
    chat::AnswerStream answer(text_, std::move(answer_options));
    for (;;) {
      const auto event = stream->next(std::chrono::milliseconds(50));
      if (interrupted() && !result.stopped) {
        clear_interrupt();
        result.stopped = true;
        stream->cancel();
      }
      if (!event) continue;
      if (event->kind == engine::Event::Kind::kFinished) {
        result.end = *event;
        break;
      }
      if (result.stopped || answer.stop()) continue;
      show(answer.push(event->token), print);
      if (answer.stop()) stream->cancel();  // nobody wants the rest
    }
    show(answer.finish(), print);
    result.answer = answer.answer();
    result.found = answer.stop();
    end_thinking();
    const bool failed = result.end.reason == engine::FinishReason::kError;
    if (print) print_calls(result.answer);
    if (print && (begun_ || !failed)) {
      std::fputs("\n", stdout);
      std::fflush(stdout);
    }
    begun_ = false;
    if (failed) fail("{}", result.end.error);
    if (result.stopped) eprint("[stopped]\n");
    if (std::string_view(result.finish_reason()) == "length") {
      eprint("[cut after {} token{}]\n", result.end.output_tokens, result.end.output_tokens == 1 ? "" : "s");
    }
    totals_.add(result.end, cost_);
    return result;
  }

  void reset() { conversation_.messages = opening(options_).messages; }
  void set_system(const std::string& system) {
    conversation_.messages = Json::array();
    if (!system.empty()) conversation_.messages.push_back({{"role", "system"}, {"content", system}});
  }
  void set_thinking(bool thinking) { conversation_.variables["enable_thinking"] = thinking; }
  const Totals& totals() const { return totals_; }

 private:
  // Calls of tools are for programs: a line of JSON each.
  void print_calls(const chat::Answer& answer) {
    for (const chat::ToolCall& call : answer.calls) {
      const Json line = {{"name", call.name}, {"arguments", call.parsed_arguments()}};
      if (begun_) std::fputs("\n", stdout);
      begun_ = true;
      const std::string text = line.dump(-1, ' ', false, Json::error_handler_t::replace);
      std::fwrite(text.data(), 1, text.size(), stdout);
    }
  }

  void show(const std::vector<text::OutputEvent>& events, bool print) {
    if (!print) return;
    for (const text::OutputEvent& event : events) {
      if (event.kind == text::OutputEvent::Kind::kReasoning && !options_.hide_thinking && !options_.quiet) {
        write_stderr((dim_ && !dimmed_ ? "\x1b[2m" : "") + event.text);
        dimmed_ = true;
      }
      if (event.kind == text::OutputEvent::Kind::kContent) {
        end_thinking();
        begun_ = true;
        std::fwrite(event.text.data(), 1, event.text.size(), stdout);
        std::fflush(stdout);
      }
    }
  }

  void end_thinking() {
    if (dimmed_) write_stderr(dim_ ? "\x1b[0m\n\n" : "\n\n");
    dimmed_ = false;
  }

  const Options& options_;
  const chat::ChatText& text_;
  engine::Engine& engine_;
  CostOfDecode cost_;
  std::optional<uint64_t> seed_;
  chat::Conversation conversation_;
  Totals totals_;
  bool dim_ = false, dimmed_ = false;
  bool begun_ = false;  // something of the answer is on standard output
};

constexpr const char* kHelp =
    "Type a question. A line that ends in \\ goes on in the next one; the arrows edit it and go back to earlier ones.\n"
    "  /think, /no-think   let the model think before it answers, or not\n"
    "  /system TEXT        start a new conversation with this system message (none: without)\n"
    "  /reset              start a new conversation\n"
    "  /stats              speed so far\n"
    "  /help               this text\n"
    "  /quit               end (also Ctrl-D, or Ctrl-C on an empty line; Ctrl-C during an answer stops the answer)\n";

void converse(Chat& chat, const WeightsIn& weights) {
  eprint("/help lists commands, Ctrl-D ends.\n");
  LineEditor editor(history_file());
  std::string line;
  for (;;) {
    clear_interrupt();
    if (editor.read(line) != LineEditor::Input::kLine) {
      eprint("\n");
      return;
    }
    const std::string question = trimmed(line);
    if (question.empty()) continue;
    if (question[0] == '/') {
      const size_t space = question.find_first_of(" \n");
      const std::string command = question.substr(0, space);
      const std::string rest = space == std::string::npos ? "" : trimmed(question.substr(space));
      if (command == "/quit" || command == "/exit") return;
      if (command == "/help") {
        write_stderr(kHelp);
      } else if (command == "/reset") {
        chat.reset();
      } else if (command == "/think" || command == "/no-think") {
        chat.set_thinking(command == "/think");
      } else if (command == "/system") {
        chat.set_system(rest);
      } else if (command == "/stats") {
        print_totals(chat.totals(), weights);
      } else {
        eprint("unknown command {}\n{}", printable(command), kHelp);
      }
      continue;
    }
    try {
      chat.ask(question);
    } catch (const Error& error) {
      // A conversation that outgrew the context is the usual one; the next question may be answered all the same.
      eprint("error: {} (/reset starts a new conversation)\n", error.what());
    }
  }
}

// ---- the command

engine::EngineOptions engine_options(const Options& options) {
  engine::EngineOptions engine;
  engine.max_sequences = 1;
  engine.spare_logit_rows = 0;
  engine.drafts = parse_drafts(options.draft);
  engine.draft_tokens = parse_draft_tokens(options.draft_tokens);
  return engine;
}

model::ModelOptions model_options(const engine::EngineOptions& engine) {
  model::ModelOptions model;
  model.max_step_tokens = engine.max_step_tokens;
  model.max_logit_rows = engine::logit_rows(engine);
  model.mtp = engine.drafts != 0;
  return model;
}

// On a GPU: a context that fits, which is not the usual one where that was not asked for, and steps as long as there is
// room for; elsewhere nothing changes.
void plan_memory(const Options& options, const std::filesystem::path& directory, int64_t& context,
                 engine::EngineOptions& engine) {
  Planned planned;
  planned.directory = directory;
  if (directory.empty()) planned.dummy = &options.dummy;
  planned.engine = engine;
  planned.mtp = engine.drafts != 0;
  // Longer steps are faster, but every kernel of theirs is loaded and tested before the first answer.
  const memory::Wishes wishes = {.context = options.context, .sequences = 1, .most_step_tokens = 2048};
  const auto plan = largest_memory(options.backend, options.memory, planned, wishes, 1, context);
  if (!plan) return;
  context = plan->engine.max_context;
  engine.max_step_tokens = plan->engine.max_step_tokens;
  engine.cached_states = plan->engine.cached_states;
}

std::unique_ptr<engine::Engine> start_engine(std::unique_ptr<model::Model> model, engine::EngineOptions engine,
                                             int64_t context) {
  engine.max_context = context;
  engine.max_step_tokens = std::min(engine.max_step_tokens, context);
  return engine::make_engine(std::move(model), engine);
}

void run_dummy(const Options& options) {
  int64_t context = chat::choose_context(options.context, dummy_config(options.dummy).max_positions);
  engine::EngineOptions engine_sizes = engine_options(options);
  plan_memory(options, {}, context, engine_sizes);
  chat::LoadedModel loaded = load_dummy(options.dummy, options.backend, model_options(engine_sizes));
  const int64_t vocabulary = loaded.model->config().vocabulary;
  eprint("{}, {}, loaded in {:.2f} s\n", loaded.name, loaded.model->backend().description(), loaded.seconds);
  const CostOfDecode cost(*loaded.model, context);
  const WeightsIn weights = weights_of(loaded, options.backend);
  const auto engine = start_engine(std::move(loaded.model), engine_sizes, context);
  Random random(options.sampling.seed.value_or(1));
  engine::Request request;
  const int64_t prompt = std::min<int64_t>(128, context / 2);
  for (int64_t i = 0; i < prompt; ++i) {
    request.prompt.push_back(static_cast<int32_t>(random.below(static_cast<uint64_t>(vocabulary))));
  }
  request.max_tokens = options.max_tokens > 0 ? options.max_tokens : 64;
  request.sampling.seed = options.sampling.seed.value_or(1);
  const auto stream = engine->submit(std::move(request));
  int64_t tokens = 0;
  bool stopped = false;
  for (;;) {
    const auto event = stream->next(std::chrono::milliseconds(50));
    if (interrupted()) {
      clear_interrupt();
      stopped = true;
      stream->cancel();
    }
    if (!event) continue;
    if (event->kind == engine::Event::Kind::kFinished) {
      if (event->reason == engine::FinishReason::kError) fail("{}", event->error);
      Totals totals;
      totals.add(*event, cost);
      print_totals(totals, weights);
      if (stopped) throw ExitStatus{130};
      return;
    }
    if (::isatty(STDERR_FILENO) != 0) eprint("\r{} tokens\r", ++tokens);
  }
}

// The checkpoint directory and the prompt, from up to two positional arguments: the first is the directory if there is
// one of that name.
void split_positional(const Options& options, std::filesystem::path& directory, std::optional<std::string>& prompt) {
  std::vector<std::string> rest = options.positional;
  if (rest.size() > 2) {
    fail("run: {} arguments, wanted at most a directory and a prompt (quote a prompt of several words: \"{} ...\")",
         rest.size(), printable(rest[directory_exists(rest[0]) ? 1 : 0], 40));
  }
  if (!rest.empty() && directory_exists(rest[0])) {
    directory = rest[0];
    rest.erase(rest.begin());
  } else if (rest.size() == 2) {
    fail("run: {} is no directory (wanted: run [DIR] [PROMPT])", printable(rest[0]));
  } else if (rest.size() == 1 && rest[0].find('/') != std::string::npos &&
             rest[0].find_first_of(" \t\n") == std::string::npos) {
    fail("run: {} is no directory (to ask the model just that, use --prompt)", printable(rest[0]));
  }
  if (!rest.empty()) {
    prompt = rest[0];
  }
  if (options.prompt) {
    if (prompt) fail("run: a prompt as an argument and with --prompt, wanted one");
    prompt = options.prompt;
  }
  if (prompt && trimmed(*prompt).empty()) fail("run: the prompt is empty");
  if (directory.empty()) directory = chat::default_model_directory();
}

// The whole question: the prompt, the file of --file and what is piped in, in this order, an empty line between them.
// Nothing when there is to be a conversation at the terminal, or when the messages are all there is.
std::optional<std::string> whole_prompt(const Options& options, const std::optional<std::string>& prompt) {
  std::vector<std::string> parts;
  if (prompt) parts.push_back(*prompt);
  if (!options.file.empty()) parts.push_back(read_input(options.file, kMaxInput));
  const bool given = !parts.empty() || !options.messages.empty();
  const bool taken = options.file == "-" || options.messages == "-" || options.tools == "-";
  if (!taken && ::isatty(STDIN_FILENO) == 0) {
    parts.push_back(given ? piped_input() : read_standard_input(kMaxInput));
    if (given && trimmed(parts.back()).empty()) parts.pop_back();
  }
  if (parts.empty()) return std::nullopt;
  std::string whole;
  for (std::string& part : parts) {
    // A text to be completed is completed as it is.
    if (!options.raw) part = trimmed(part);
    whole += (whole.empty() ? "" : "\n\n") + part;
  }
  if (trimmed(whole).empty())
    fail("run: {} is empty, wanted a prompt", options.file.empty() ? "standard input" : options.file);
  return whole;
}

void check_sources(const Options& options) {
  const auto standard = [](const std::string& file) { return file == "-" ? 1 : 0; };
  if (standard(options.file) + standard(options.messages) + standard(options.tools) > 1) {
    fail("run: standard input ('-') for more than one of --file, --messages and --tools, wanted it once");
  }
  chat::check_stop_strings(options.stop, "--stop");
}

void print_json(const Chat::Result& result, double load_seconds) {
  Json out;
  out["content"] = result.answer.content;
  out["reasoning_content"] = result.answer.reasoning;
  out["tool_calls"] = Json::array();
  for (const chat::ToolCall& call : result.answer.calls) {
    out["tool_calls"].push_back({{"name", call.name}, {"arguments", call.parsed_arguments()}});
  }
  out["finish_reason"] = result.finish_reason();
  if (result.found) out["stop"] = *result.found;
  out["usage"] = {{"prompt_tokens", result.end.prompt_tokens}, {"completion_tokens", result.end.output_tokens}};
  out["timings"] = {{"load_seconds", load_seconds},
                    {"prefill_seconds", result.end.prefill_seconds},
                    {"decode_seconds", result.end.decode_seconds}};
  fmt::print("{}\n", out.dump(2, ' ', false, Json::error_handler_t::replace));
  std::fflush(stdout);
}

void run(const Options& options) {
  install_interrupt_handler();
  if (!options.dummy.shape.empty()) {
    if (!options.positional.empty() || options.prompt || !options.file.empty() || !options.messages.empty() ||
        !options.tools.empty() || options.raw || options.json) {
      fail("run: --dummy has no tokenizer, so it takes neither a directory nor a prompt, and prints no --json");
    }
    run_dummy(options);
    return;
  }
  check_sources(options);
  std::filesystem::path directory;
  std::optional<std::string> prompt;
  split_positional(options, directory, prompt);
  prompt = whole_prompt(options, prompt);
  const bool once = prompt || !options.messages.empty();
  if (!once) {
    for (const auto& [given, name] :
         {std::pair{options.json, "--json"}, {options.raw, "--raw"}, {!options.tools.empty(), "--tools"}}) {
      if (given) fail("run: {} needs a prompt{}", name, options.raw ? "" : " or --messages");
    }
  }

  // What can be wrong with the text comes to light before gigabytes are read.
  const model::ModelConfig config = model::read_config(directory);
  int64_t context = chat::choose_context(options.context, config.max_positions);
  engine::EngineOptions engine_sizes = engine_options(options);
  plan_memory(options, directory, context, engine_sizes);
  const chat::ChatText text(directory, config);
  if (!options.raw) text.require_template();
  chat::Conversation conversation = opening(options);
  chat::Prompt asked;
  if (once) {
    if (options.raw) {
      asked = text.plain_prompt(*prompt);
    } else {
      if (prompt) conversation.messages.push_back({{"role", "user"}, {"content", *prompt}});
      asked = text.prompt(conversation);
    }
    if (asked.tokens.size() >= static_cast<size_t>(context)) {
      fail("run: the prompt has {} tokens, wanted at most {} (a context of {} and at least one token of the answer)",
           asked.tokens.size(), context - 1, context);
    }
  }
  chat::LoadedModel loaded = load_checkpoint(directory, options.backend, model_options(engine_sizes));
  const CostOfDecode cost(*loaded.model, context);
  const WeightsIn weights = weights_of(loaded, options.backend);
  if (!options.quiet && !once) {
    eprint("{}, {}, loaded in {:.2f} s\n", loaded.name, loaded.model->backend().description(), loaded.seconds);
  }
  const auto engine = start_engine(std::move(loaded.model), engine_sizes, context);
  Chat chat(options, text, *engine, cost, std::move(conversation));
  if (!once) {
    converse(chat, weights);
    if (!options.quiet) print_totals(chat.totals(), weights);
    return;
  }
  const Chat::Result result = chat.generate(std::move(asked), !options.json);
  if (options.json) print_json(result, loaded.seconds);
  if (!options.quiet) print_totals(chat.totals(), weights);
  if (result.stopped) throw ExitStatus{130};
}

}  // namespace

void add_run(Command& app) {
  auto options = std::make_shared<Options>();
  Command command = app.add_command(
      "run",
      "Chat with a model, or ask it one question\n\n"
      "  fourfold run                        chat with the demo model\n"
      "  fourfold run DIR                    chat with a checkpoint\n"
      "  fourfold run [DIR] \"PROMPT\"         one answer on stdout; the rest is on stderr\n"
      "  echo PROMPT | fourfold run [DIR]    the same; with a prompt too, it comes before what is piped in\n"
      "  fourfold run --dummy 35B-A3B --layers 8 --vocab 8192    random weights, for speed\n\n"
      "The first argument is the checkpoint if there is a directory of that name, otherwise it is the prompt.\n"
      "Behind -- a prompt may begin with a dash.");
  command.add_option("args", options->positional, "[DIR] [PROMPT]").untyped();
  command.add_option("-p,--prompt", options->prompt, "The prompt, whatever it looks like");
  command.add_option("-f,--file", options->file, "A file that goes on the prompt, or is it; - is standard input");
  command.add_option("--messages", options->messages,
                     "A conversation as JSON: an array of messages, or an object with messages and tools; a prompt is\n"
                     "one more message; - is standard input");
  command.add_option("--tools", options->tools,
                     "Tools that may be called, a JSON array; calls are printed as lines of JSON");
  command.add_option("--system", options->system, "System message");
  command.add_flag("--raw", options->raw, "Complete the prompt as it is, without the chat template");
  command.add_option("--stop", options->stop, "End the answer before this text; may be given several times").one_each();
  command.add_flag("--think", options->think, "Let the model think first (default: as its template does)");
  command.add_flag("--no-think", options->no_think, "Answer without thinking");
  command.exclude("--think", "--no-think");
  for (const char* other : {"--messages", "--tools", "--system", "--think", "--no-think"}) {
    command.exclude("--raw", other);
  }
  command.add_flag("--hide-thinking", options->hide_thinking, "Do not show the thinking");
  add_sampling_options(command, options->sampling);
  command.add_option("--seed", options->sampling.seed, "Same seed, same answer (default: a fresh one)");
  command.add_option("--max-tokens", options->max_tokens, "Tokens of an answer (default: what the context leaves)")
      .range(1, int64_t{1} << 40);
  add_context_option(command, options->context, "Tokens of a conversation");
  command.add_flag("--json", options->json, "With a prompt: print one JSON object");
  command.add_flag("-q,--quiet", options->quiet, "Only the answer: no thinking, no figures");
  command.add_option("--draft", options->draft, "Drafts of the model's MTP head a step: 0 (off) to 5, or auto");
  add_draft_tokens_option(command, options->draft_tokens);
  add_backend_options(command, options->backend);
  add_memory_options(command, options->memory);
  add_dummy_options(command, options->dummy);
  command.callback([options] { run(*options); });
}

}  // namespace fourfold::cmd
