// fourfold run: chat with a model in the terminal, ask it one question, or run a shape with random weights for speed.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
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
#include "cmd/arguments.h"
#include "cmd/chat_model.h"
#include "cmd/chat_text.h"
#include "cmd/commands.h"
#include "cmd/options.h"
#include "cpu/ceilings.h"
#include "engine/engine.h"

namespace fourfold::cmd {
namespace {

constexpr size_t kMaxInput = 16u << 20;  // bytes of a prompt

struct Options {
  std::vector<std::string> positional;
  std::optional<std::string> prompt;
  std::string system;
  DummyArgs dummy;
  BackendArgs backend;
  bool think = false, no_think = false, json = false, quiet = false, hide_thinking = false;
  std::optional<double> temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty;
  std::optional<int> top_k;
  std::optional<uint64_t> seed;
  int64_t max_tokens = 0;  // 0: what the context leaves
  int64_t context = 0;     // 0: 8192, or what the model has
};

engine::SamplingParams sampling_of(const Options& options, engine::SamplingParams sampling) {
  const bool asked = options.temperature || options.top_k || options.top_p || options.min_p;
  if (asked && sampling.temperature == 0) sampling.temperature = 1;
  const auto set = [](float& field, const std::optional<double>& value) {
    if (value) field = static_cast<float>(*value);
  };
  set(sampling.temperature, options.temperature);
  set(sampling.top_p, options.top_p);
  set(sampling.min_p, options.min_p);
  set(sampling.repetition_penalty, options.repetition_penalty);
  set(sampling.presence_penalty, options.presence_penalty);
  set(sampling.frequency_penalty, options.frequency_penalty);
  if (options.top_k) sampling.top_k = *options.top_k;
  return sampling;
}

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

void print_totals(const Totals& totals, int threads) {
  if (totals.prompt_tokens == 0) return;
  std::string line = fmt::format("prefill {} tokens, {:.1f} tokens/s", totals.prompt_tokens,
                                 static_cast<double>(totals.prompt_tokens) / totals.prefill_seconds);
  if (totals.decode_tokens > 0 && totals.decode_seconds > 0) {
    const double rate = totals.decode_bytes / totals.decode_seconds;
    const double bandwidth = quick_read_bandwidth(threads);
    const double bytes = totals.decode_bytes / static_cast<double>(totals.decode_tokens);
    line += fmt::format("; decode {} tokens, {:.1f} tokens/s, {:.2f} GB/s = {:.0f} % of the measured {:.1f} GB/s",
                        totals.decode_tokens, static_cast<double>(totals.decode_tokens) / totals.decode_seconds,
                        rate / 1e9, 100 * rate / bandwidth, bandwidth / 1e9);
    // A small model stays in the cache from token to token; a large one does not, even if what one token reads would
    // fit: the next token takes other experts.
    if (bytes < std::min(static_cast<double>(cpu::last_level_cache_bytes()), 32e6)) {
      line += fmt::format(" (but the {:.1f} MB of a token can stay in the processor's cache)", bytes / 1e6);
    }
  }
  eprint("{}\n", line);
}

// ---- input

enum class Input { kLine, kEnd, kInterrupted };

// One line from the terminal, without its newline; a line that ends in a backslash goes on in the next one. Read with
// read(2): the streams of the library retry when a signal arrives.
Input read_line(std::string& pending, std::string& line) {
  line.clear();
  for (;;) {
    const size_t newline = pending.find('\n');
    if (newline != std::string::npos) {
      line += pending.substr(0, newline);
      pending.erase(0, newline + 1);
      if (line.empty() || line.back() != '\\') return Input::kLine;
      line.back() = '\n';
      continue;
    }
    char buffer[4096];
    const ssize_t count = ::read(STDIN_FILENO, buffer, sizeof buffer);
    if (count > 0) {
      pending.append(buffer, static_cast<size_t>(count));
      if (pending.size() + line.size() > kMaxInput) fail("standard input: a line of more than {} bytes", kMaxInput);
    } else if (count < 0 && errno == EINTR) {
      if (interrupted()) return Input::kInterrupted;
    } else {
      if (pending.empty() && line.empty()) return Input::kEnd;
      line += pending;
      pending.clear();
      return Input::kLine;
    }
  }
}

std::string trimmed(std::string_view text) {
  const size_t begin = text.find_first_not_of(" \t\r\n");
  if (begin == std::string_view::npos) return "";
  return std::string(text.substr(begin, text.find_last_not_of(" \t\r\n") - begin + 1));
}

// ---- the conversation

// One that has not begun.
Json conversation(const std::string& system) {
  Json messages = Json::array();
  if (!system.empty()) messages.push_back({{"role", "system"}, {"content", system}});
  return messages;
}

std::optional<bool> asked_thinking(const Options& options) {
  if (options.think) return true;
  if (options.no_think) return false;
  return std::nullopt;
}

class Chat {
 public:
  Chat(const Options& options, const ChatText& text, engine::Engine& engine, CostOfDecode cost)
      : options_(options), text_(text), engine_(engine), cost_(cost), seed_(options.seed) {
    dim_ = ::isatty(STDERR_FILENO) != 0 && !env("NO_COLOR");
    thinking_ = asked_thinking(options);
    reset();
  }

  struct Result {
    Answer answer;
    engine::Event end;
    bool stopped = false;  // by Ctrl-C
  };

  // Asks, prints the answer as it comes, and remembers both. When it fails the question is forgotten again.
  Result ask(const std::string& question, bool print) {
    messages_.push_back({{"role", "user"}, {"content", question}});
    try {
      Result result = generate(print);
      Json message = {{"role", "assistant"}, {"content", result.answer.content}};
      if (!result.answer.thinking.empty()) message["reasoning_content"] = result.answer.thinking;
      if (!result.answer.calls.empty()) {
        for (const ToolCall& call : result.answer.calls) {
          message["tool_calls"].push_back(
              {{"type", "function"}, {"function", {{"name", call.name}, {"arguments", call.arguments}}}});
        }
      }
      messages_.push_back(std::move(message));
      totals_.add(result.end, cost_);
      return result;
    } catch (...) {
      messages_.erase(messages_.size() - 1);
      throw;
    }
  }

  void reset() { messages_ = conversation(system_); }
  void set_system(std::string system) {
    system_ = std::move(system);
    reset();
  }
  void set_thinking(bool thinking) { thinking_ = thinking; }
  const Totals& totals() const { return totals_; }

 private:
  Result generate(bool print) {
    ChatText::Prompt prompt = text_.render(messages_, nullptr, thinking_);
    const bool starts_thinking = prompt.thinking;
    engine::Request request = text_.request(std::move(prompt));
    request.sampling = sampling_of(options_, request.sampling);
    request.max_tokens = options_.max_tokens > 0 ? options_.max_tokens : int64_t{1} << 40;
    if (seed_) request.sampling.seed = (*seed_)++;
    const auto stream = engine_.submit(std::move(request));

    Result result;
    ChatText::Stream pieces(text_, starts_thinking);
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
      if (result.stopped || text_.is_stop(event->token)) continue;
      show(pieces.push(event->token), print);
    }
    show(pieces.finish(), print);
    end_thinking();
    const bool failed = result.end.reason == engine::FinishReason::kError;
    if (print && (begun_ || !failed)) {
      std::fputs("\n", stdout);
      std::fflush(stdout);
    }
    begun_ = false;
    if (failed) fail("{}", result.end.error);
    if (result.stopped) eprint("[stopped]\n");
    if (result.end.reason == engine::FinishReason::kLength) {
      eprint("[cut after {} token{}]\n", result.end.output_tokens, result.end.output_tokens == 1 ? "" : "s");
    }
    result.answer = text_.parse(pieces.all(), starts_thinking, nullptr);
    return result;
  }

  void show(const ChatText::Stream::Piece& piece, bool print) {
    if (!print) return;
    if (!piece.thinking.empty() && !options_.hide_thinking && !options_.quiet) {
      write_stderr((dim_ && !dimmed_ ? "\x1b[2m" : "") + piece.thinking);
      dimmed_ = true;
    }
    if (!piece.content.empty()) {
      end_thinking();
      begun_ = true;
      std::fwrite(piece.content.data(), 1, piece.content.size(), stdout);
      std::fflush(stdout);
    }
  }

  void end_thinking() {
    if (dimmed_) write_stderr(dim_ ? "\x1b[0m\n\n" : "\n\n");
    dimmed_ = false;
  }

  const Options& options_;
  const ChatText& text_;
  engine::Engine& engine_;
  CostOfDecode cost_;
  std::optional<uint64_t> seed_;
  std::optional<bool> thinking_;
  std::string system_ = options_.system;
  Json messages_;
  Totals totals_;
  bool dim_ = false, dimmed_ = false;
  bool begun_ = false;  // something of the answer is on standard output
};

constexpr const char* kHelp =
    "Type a question. A line that ends in \\ goes on in the next one.\n"
    "  /think, /no-think   let the model think before it answers, or not\n"
    "  /system TEXT        start a new conversation with this system message (none: without)\n"
    "  /reset              start a new conversation\n"
    "  /stats              speed so far\n"
    "  /help               this text\n"
    "  /quit               end (also Ctrl-D, or Ctrl-C here; Ctrl-C during an answer stops the answer)\n";

void converse(Chat& chat, int threads) {
  eprint("/help lists commands, Ctrl-D ends.\n");
  std::string pending, line;
  for (;;) {
    eprint("> ");
    clear_interrupt();
    const Input input = read_line(pending, line);
    if (input != Input::kLine) {
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
        print_totals(chat.totals(), threads);
      } else {
        eprint("unknown command {}\n{}", printable(command), kHelp);
      }
      continue;
    }
    try {
      chat.ask(question, true);
    } catch (const Error& error) {
      // A conversation that outgrew the context is the usual one; the next question may be answered all the same.
      eprint("error: {} (/reset starts a new conversation)\n", error.what());
    }
  }
}

// ---- the command

std::unique_ptr<engine::Engine> start_engine(std::unique_ptr<model::Model> model, int64_t context, int64_t step) {
  engine::EngineOptions options;
  options.max_context = context;
  options.max_sequences = 1;
  options.max_step_tokens = step;
  return engine::make_engine(std::move(model), options);
}

int64_t choose_context(const Options& options, int64_t max_positions) {
  if (options.context > max_positions) {
    fail("--context is {}, the model has {} positions", options.context, max_positions);
  }
  return options.context > 0 ? options.context : std::min<int64_t>(8192, max_positions);
}

model::ModelOptions model_options() {
  model::ModelOptions options;
  options.max_step_tokens = 512;
  options.max_logit_rows = 1;
  return options;
}

void run_dummy(const Options& options) {
  Loaded loaded = load_dummy(options.dummy, options.backend, model_options());
  const int64_t context = choose_context(options, loaded.model->config().max_positions);
  const int64_t vocabulary = loaded.model->config().vocabulary;
  eprint("{}, {}, loaded in {:.2f} s\n", loaded.name, loaded.model->backend().description(), loaded.seconds);
  const CostOfDecode cost(*loaded.model, context);
  const auto engine = start_engine(std::move(loaded.model), context, std::min<int64_t>(512, context));
  Random random(options.seed.value_or(1));
  engine::Request request;
  const int64_t prompt = std::min<int64_t>(128, context / 2);
  for (int64_t i = 0; i < prompt; ++i) {
    request.prompt.push_back(static_cast<int32_t>(random.below(static_cast<uint64_t>(vocabulary))));
  }
  request.max_tokens = options.max_tokens > 0 ? options.max_tokens : 64;
  request.sampling.seed = options.seed.value_or(1);
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
      print_totals(totals, chosen_threads(options.backend));
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
  if (directory.empty()) directory = default_model_directory();
}

void run(const Options& options) {
  if (options.think && options.no_think) fail("run: --think and --no-think, wanted one of them");
  install_interrupt_handler();
  if (!options.dummy.shape.empty()) {
    if (!options.positional.empty() || options.prompt || options.json) {
      fail("run: --dummy has no tokenizer, so it takes neither a directory nor a prompt, and prints no --json");
    }
    run_dummy(options);
    return;
  }
  if (options.dummy.layers > 0 || options.dummy.vocabulary > 0) fail("run: --layers and --vocab go with --dummy");

  std::filesystem::path directory;
  std::optional<std::string> prompt;
  split_positional(options, directory, prompt);
  if (!prompt && ::isatty(STDIN_FILENO) == 0) {
    prompt = trimmed(read_standard_input(kMaxInput));
    if (prompt->empty()) fail("run: standard input is empty, wanted a prompt");
  }

  if (options.json && !prompt) fail("run: --json needs a prompt");

  // What can be wrong with the text comes to light before gigabytes are read.
  const model::ModelConfig config = model::read_config(directory);
  const int64_t context = choose_context(options, config.max_positions);
  const ChatText text(directory, config);
  if (prompt) {
    Json messages = conversation(options.system);
    messages.push_back({{"role", "user"}, {"content", *prompt}});
    const size_t tokens = text.render(messages, nullptr, asked_thinking(options)).tokens.size();
    if (tokens >= static_cast<size_t>(context)) {
      fail("run: the prompt has {} tokens, wanted at most {} (a context of {} and at least one token of the answer)",
           tokens, context - 1, context);
    }
  }
  Loaded loaded = load_checkpoint(directory, options.backend, model_options());
  const CostOfDecode cost(*loaded.model, context);
  const std::string description = loaded.model->backend().description();
  if (!options.quiet && !prompt) {
    eprint("{}, {}, loaded in {:.2f} s\n", loaded.name, description, loaded.seconds);
  }
  const auto engine = start_engine(std::move(loaded.model), context, std::min<int64_t>(512, context));
  Chat chat(options, text, *engine, cost);
  const int threads = chosen_threads(options.backend);
  if (!prompt) {
    converse(chat, threads);
    if (!options.quiet) print_totals(chat.totals(), threads);
    return;
  }
  const Chat::Result result = chat.ask(*prompt, !options.json);
  if (options.json) {
    Json out;
    out["content"] = result.answer.content;
    out["reasoning_content"] = result.answer.thinking;
    out["tool_calls"] = Json::array();
    for (const ToolCall& call : result.answer.calls) {
      out["tool_calls"].push_back({{"name", call.name}, {"arguments", call.arguments}});
    }
    out["finish_reason"] = result.stopped                                       ? "cancelled"
                           : result.end.reason == engine::FinishReason::kLength ? "length"
                                                                                : "stop";
    out["usage"] = {{"prompt_tokens", result.end.prompt_tokens}, {"completion_tokens", result.end.output_tokens}};
    out["timings"] = {{"load_seconds", loaded.seconds},
                      {"prefill_seconds", result.end.prefill_seconds},
                      {"decode_seconds", result.end.decode_seconds}};
    fmt::print("{}\n", out.dump(2, ' ', false, Json::error_handler_t::replace));
    std::fflush(stdout);
  }
  if (!options.quiet) print_totals(chat.totals(), threads);
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
      "  echo PROMPT | fourfold run [DIR]    the same\n"
      "  fourfold run --dummy 35B-A3B --layers 8 --vocab 8192    random weights, for speed\n\n"
      "The first argument is the checkpoint if there is a directory of that name, otherwise it is the prompt.\n"
      "Behind -- a prompt may begin with a dash.");
  command.add_option("args", options->positional, "[DIR] [PROMPT]").at_most(2).untyped();
  command.add_option("-p,--prompt", options->prompt, "The prompt, whatever it looks like");
  command.add_option("--system", options->system, "System message");
  command.add_flag("--think", options->think, "Let the model think first (default: as its template does)");
  command.add_flag("--no-think", options->no_think, "Answer without thinking");
  command.add_flag("--hide-thinking", options->hide_thinking, "Do not show the thinking");
  command.add_option("--temperature", options->temperature, "0 is greedy").real_range(0.0, 10.0);
  command.add_option("--top-k", options->top_k, "Keep the k most probable tokens (0: all)").range(0, 1 << 24);
  command.add_option("--top-p", options->top_p, "Keep the most probable tokens up to this probability, (0, 1]")
      .real_range(0.0, 1.0);
  command.add_option("--min-p", options->min_p, "Drop tokens below this share of the most probable one, [0, 1)")
      .real_range(0.0, 1.0);
  command
      .add_option("--repetition-penalty", options->repetition_penalty, "Of tokens that came before, above 0; 1: none")
      .real_range(0.0, 10.0);
  command.add_option("--presence-penalty", options->presence_penalty, "Of tokens that the answer has")
      .real_range(-10.0, 10.0);
  command.add_option("--frequency-penalty", options->frequency_penalty, "The same, for each time")
      .real_range(-10.0, 10.0);
  command.add_option("--seed", options->seed, "Same seed, same answer (default: a fresh one)");
  command.add_option("--max-tokens", options->max_tokens, "Tokens of an answer (default: what the context leaves)")
      .range(1, int64_t{1} << 40);
  command.add_option("--context", options->context, "Tokens of a conversation (default: 8192, or what the model has)")
      .range(2, 1 << 28);
  command.add_flag("--json", options->json, "With a prompt: print one JSON object");
  command.add_flag("-q,--quiet", options->quiet, "Only the answer: no thinking, no figures");
  add_backend_options(command, options->backend);
  add_dummy_options(command, options->dummy);
  command.callback([options] { run(*options); });
}

}  // namespace fourfold::cmd
