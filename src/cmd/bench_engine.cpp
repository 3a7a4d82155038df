#include "cmd/bench_engine.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <iterator>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/console.h"
#include "base/interrupt.h"
#include "base/json.h"
#include "base/math.h"
#include "base/progress.h"
#include "base/random.h"
#include "chat/chat_text.h"
#include "chat/sampling.h"
#include "cmd/arguments.h"
#include "cmd/card_memory.h"
#include "cmd/engine_load.h"
#include "cmd/model_options.h"
#include "cmd/options.h"
#include "engine/engine.h"
#include "model/model.h"

namespace fourfold::cmd {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int64_t kPageSize = 64;
constexpr int kTurns = 3;               // of the bare model and the engine, for the overhead
constexpr int64_t kOverheadSteps = 64;  // of one turn, at most

struct Options {
  std::string directory, draft = "0", draft_tokens = "auto", prompts;
  DummyArgs dummy;
  BackendArgs backend;
  MemoryArgs memory;
  int64_t requests = 32, concurrency = 8, prompt = 512, generate = 64, shared_prefix = 0, chunk = 0, context = 0;
  double arrival = 0;
  chat::SamplingChoice sampling;
  int logprobs = -1, prompt_logprobs = -1;
  uint64_t seed = 1;
  bool json = false, thinking = false, pairs = false;
};

// Greedy, unless drawn tokens are asked for: then `recommended` holds for what is not asked for.
engine::SamplingParams sampling_of(const Options& options, engine::SamplingParams recommended) {
  const chat::SamplingChoice& choice = options.sampling;
  if (!choice.temperature && !choice.top_k && !choice.top_p && !choice.min_p) recommended.temperature = 0;
  recommended.logprobs = options.logprobs;
  return choice.over(std::move(recommended));
}

std::string describe(const engine::SamplingParams& sampling) {
  std::string text = "greedy";
  if (sampling.temperature > 0) {
    text = fmt::format("drawn at temperature {:g}", sampling.temperature);
    if (sampling.top_k > 0) text += fmt::format(", top-k {}", sampling.top_k);
    if (sampling.top_p < 1) text += fmt::format(", top-p {:g}", sampling.top_p);
    if (sampling.min_p > 0) text += fmt::format(", min-p {:g}", sampling.min_p);
  }
  const auto add_penalty = [&](const char* name, float value, float none) {
    if (value != none) text += fmt::format(", {} penalty {:g}", name, value);
  };
  add_penalty("repetition", sampling.repetition_penalty, 1);
  add_penalty("presence", sampling.presence_penalty, 0);
  add_penalty("frequency", sampling.frequency_penalty, 0);
  if (sampling.logprobs >= 0) text += fmt::format(", log-probabilities with {} others", sampling.logprobs);
  return text;
}

// Each request draws numbers of its own, which are the same whatever runs beside it.
void finish(const Options& options, std::vector<engine::Request>& requests) {
  for (size_t i = 0; i < requests.size(); ++i) {
    requests[i].sampling.seed = options.seed + i;
    requests[i].prompt_logprobs = options.prompt_logprobs;
  }
}

// Random prompts with a shared beginning; every answer has its full length.
std::vector<engine::Request> random_requests(const Options& options, int64_t vocabulary) {
  Random random(options.seed);
  const auto draw = [&] { return static_cast<int32_t>(random.below(static_cast<uint64_t>(vocabulary))); };
  std::vector<int32_t> shared(static_cast<size_t>(options.shared_prefix));
  std::generate(shared.begin(), shared.end(), draw);
  std::vector<engine::Request> all;
  for (int64_t i = 0; i < options.requests; ++i) {
    std::vector<int32_t> prompt = shared;
    while (static_cast<int64_t>(prompt.size()) < options.prompt) prompt.push_back(draw());
    engine::Request request;
    request.prompt = std::move(prompt);
    request.max_tokens = options.generate;
    request.sampling = sampling_of(options, {});
    if (options.shared_prefix > 0) request.cache.boundaries = {options.shared_prefix};
    all.push_back(std::move(request));
  }
  finish(options, all);
  return all;
}

// The conversations of a file, over and over; answers end where the model ends them.
std::vector<engine::Request> real_requests(const Options& options, const model::ModelConfig& config) {
  const chat::ChatText text(options.directory, config);
  const std::string content = read_input(options.prompts, 256u << 20);
  std::vector<engine::Request> conversations;
  int64_t number = 0;
  for (size_t begin = 0; begin < content.size() && static_cast<int64_t>(conversations.size()) < options.requests;) {
    const size_t end = std::min(content.find('\n', begin), content.size());
    const std::string line = content.substr(begin, end - begin);
    begin = end + 1;
    ++number;
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    const std::string where = fmt::format("{}:{}", options.prompts, number);
    Json json = parse_json(line, where);
    if (json.is_object()) json.erase("expect"), json.erase("task");
    chat::Conversation conversation = chat::Conversation::from_json(json, where);
    if (!conversation.variables.contains("enable_thinking")) {
      conversation.variables["enable_thinking"] = options.thinking;
    }
    engine::Request request = text.request(text.prompt(conversation));
    request.sampling = sampling_of(options, std::move(request.sampling));
    request.max_tokens = options.generate;
    conversations.push_back(std::move(request));
  }
  if (conversations.empty()) fail("{}: no conversation in it", options.prompts);
  const size_t distinct = conversations.size();
  while (static_cast<int64_t>(conversations.size()) < options.requests) {
    conversations.push_back(conversations[conversations.size() % distinct]);
  }
  finish(options, conversations);
  return conversations;
}

// Seconds of a decode step of `lanes` sequences on the bare model, logits computed and not looked at.
class BareModel {
 public:
  BareModel(model::Model& model, int64_t lanes, int64_t first, int64_t steps) : model_(model), first_(first) {
    const int64_t pages = ceil_div(first + steps, kPageSize);
    caches_ = model.make_caches(lanes * pages, kPageSize, lanes);
    pages_.resize(static_cast<size_t>(lanes * pages));
    std::iota(pages_.begin(), pages_.end(), 0);
    Random random(3);
    for (int64_t i = 0; i < lanes; ++i) {
      ops::Sequence sequence;
      sequence.first = static_cast<int32_t>(i);
      sequence.count = 1;
      sequence.state_in = static_cast<int32_t>(i);
      sequence.pages = std::span(pages_).subspan(static_cast<size_t>(i * pages), static_cast<size_t>(pages));
      sequences_.push_back(sequence);
      rows_.push_back(static_cast<int32_t>(i));
      tokens_.push_back(static_cast<int32_t>(random.below(static_cast<uint64_t>(model.config().vocabulary))));
    }
  }

  double step_seconds(int64_t steps) {
    Random random(4);
    const auto begin = Clock::now();
    for (int64_t i = 0; i < steps; ++i) {
      throw_if_interrupted();
      for (ops::Sequence& sequence : sequences_) sequence.position = static_cast<int32_t>(first_ + i);
      for (int32_t& token : tokens_) {
        token = static_cast<int32_t>(random.below(static_cast<uint64_t>(model_.config().vocabulary)));
      }
      model_.forward({tokens_, sequences_, rows_}, caches_);
    }
    return std::chrono::duration<double>(Clock::now() - begin).count() / static_cast<double>(steps);
  }

 private:
  model::Model& model_;
  int64_t first_;
  model::Caches caches_;
  std::vector<int32_t> pages_, tokens_, rows_;
  std::vector<ops::Sequence> sequences_;
};

// Seconds of a step while all of the requests decode: between the last first token and the first last one.
double decoding_step_seconds(const LoadFigures& load) {
  double from = 0, to = 1e300;
  for (const RequestTimes& request : load.requests) {
    from = std::max(from, request.tokens.front());
    to = std::min(to, request.tokens.back());
  }
  double steps = 0;
  for (const RequestTimes& request : load.requests) {
    for (const double time : request.tokens) steps += time > from && time <= to ? 1 : 0;
  }
  return steps == 0 ? 0 : (to - from) * static_cast<double>(load.requests.size()) / steps;
}

struct Result {
  LoadFigures load;
  std::optional<double> overhead;    // of decoding over the bare model's
  std::optional<double> ttft_ratio;  // a request whose shared prefix is cached over one that is not
  // With --pairs: what the same requests got without drafts, and the median of what drafts gave, turn by turn.
  std::optional<double> plain_decode_tokens_per_s, median_speedup;
  uint64_t taken = 0;  // of the cards' memory, at most
  engine::SamplingParams sampling;
};

void check(const Options& options, const model::ModelConfig& config) {
  if (options.shared_prefix >= options.prompt) {
    fail("bench engine: --shared-prefix is {}, wanted less than --prompt ({})", options.shared_prefix, options.prompt);
  }
  if (options.prompt + options.generate > config.max_positions) {
    fail("bench engine: --prompt and --generate are {} tokens together, the model has {} positions",
         options.prompt + options.generate, config.max_positions);
  }
  if (!options.prompts.empty() && options.directory.empty()) fail("bench engine: --prompts needs a checkpoint");
  if (!options.pairs) return;
  if (parse_drafts(options.draft) == 0) fail("bench engine: --pairs compares drafts with none, and --draft is 0");
  if (options.arrival > 0) fail("bench engine: --pairs sends requests as others end, not at the times of --arrival");
}

// One after the other with new beginnings, then with the beginning of the one before: the time to the first token.
double measure_ttft_ratio(engine::Engine& engine, const Options& options, int64_t vocabulary) {
  std::vector<double> ratios;
  for (uint64_t i = 0; i < 3; ++i) {
    Options one = options;
    one.requests = 2;
    one.seed = options.seed + 1000 + i;
    std::vector<engine::Request> pair = random_requests(one, vocabulary);
    for (engine::Request& request : pair) request.max_tokens = 1;
    double seconds[2] = {0, 0};
    for (size_t j = 0; j < 2; ++j) {
      std::vector<engine::Request> alone;
      alone.push_back(std::move(pair[j]));
      seconds[j] = run_load(engine, std::move(alone), 1, {}, {}).first_token_seconds().at(0);
    }
    ratios.push_back(seconds[1] / seconds[0]);
  }
  std::sort(ratios.begin(), ratios.end());
  return ratios[1];
}

std::vector<engine::Request> requests_of(const Options& options, const model::ModelConfig& config) {
  return options.prompts.empty() ? random_requests(options, config.vocabulary) : real_requests(options, config);
}

// What is there beside the weights.
struct Room {
  int64_t contexts = 2;  // of each sequence, in the engine's cache, where nothing was asked for
  bool bare = false;     // caches of the bare model, which decoding is compared with
};

engine::EngineOptions engine_options_of(const Options& options, const model::ModelConfig& config,
                                        const std::vector<engine::Request>& requests, int64_t step_tokens,
                                        int32_t drafts, const Room& room) {
  engine::EngineOptions engine_options;
  engine_options.max_context = 2;
  for (const engine::Request& request : requests) {
    engine_options.max_context =
        std::max(engine_options.max_context,
                 static_cast<int64_t>(request.prompt.size()) + std::max<int64_t>(request.max_tokens, kOverheadSteps));
  }
  engine_options.max_context = std::min(engine_options.max_context, config.max_positions);
  engine_options.max_sequences = options.concurrency;
  engine_options.max_step_tokens = step_tokens;
  engine_options.page_size = kPageSize;
  engine_options.max_queued = options.requests + 1;
  engine_options.cache_tokens =
      options.context > 0 ? options.context : room.contexts * options.concurrency * engine_options.max_context;
  engine_options.drafts = drafts;
  engine_options.draft_tokens = parse_draft_tokens(options.draft_tokens);
  return engine_options;
}

void append(LoadFigures& all, LoadFigures turn) {
  if (all.requests.empty()) all.before = turn.before;
  all.after = turn.after;
  all.seconds += turn.seconds;
  std::move(turn.requests.begin(), turn.requests.end(), std::back_inserter(all.requests));
}

// Every `concurrency` requests with drafts and then without, on a second engine: other work on the machine meets both.
void run_pairs(engine::Engine& drafting, engine::Engine& plain, const Options& options,
               const std::vector<engine::Request>& requests, Progress& progress, Result& result) {
  LoadFigures without;
  std::vector<double> speedups;
  const auto together = static_cast<size_t>(options.concurrency);
  for (size_t begin = 0; begin < requests.size(); begin += together) {
    const auto first = requests.begin() + static_cast<std::ptrdiff_t>(begin);
    const std::vector<engine::Request> turn(
        first, first + static_cast<std::ptrdiff_t>(std::min(together, requests.size() - begin)));
    LoadFigures drafted = run_load(drafting, turn, options.concurrency, {}, {});
    LoadFigures undrafted = run_load(plain, turn, options.concurrency, {}, {});
    const double fast = drafted.decode_tokens_per_s(), slow = undrafted.decode_tokens_per_s();
    if (fast > 0 && slow > 0) speedups.push_back(fast / slow);
    append(result.load, std::move(drafted));
    append(without, std::move(undrafted));
    progress.set(static_cast<uint64_t>(begin + turn.size()));
  }
  result.plain_decode_tokens_per_s = without.decode_tokens_per_s();
  if (!speedups.empty()) result.median_speedup = percentiles(speedups).p50;
}

Result measure(const Options& options, std::shared_ptr<model::Model> model, int32_t drafts, const Room& room,
               const std::optional<memory::Plan>& plan) {
  const int64_t vocabulary = model->config().vocabulary;
  std::vector<engine::Request> requests = requests_of(options, model->config());
  const engine::EngineOptions engine_options =
      engine_options_of(options, model->config(), requests, model->options().max_step_tokens, drafts, room);
  const auto engine = engine::make_engine(share_model(model), engine_options);

  Result result;
  result.sampling = requests.front().sampling;
  const auto note_taken = [&] {
    if (plan) result.taken = std::max(result.taken, taken_since(*plan));
  };
  if (room.bare) {
    const int64_t first = std::min(options.prompt, engine_options.max_context - kOverheadSteps - 1);
    const int64_t steps = std::min(kOverheadSteps, engine_options.max_context - first);
    BareModel bare(*model, options.concurrency, first, steps);
    std::vector<double> ratios;
    for (int turn = 0; turn < kTurns; ++turn) {
      const double before = bare.step_seconds(steps);
      Options one = options;
      one.requests = options.concurrency;
      one.prompt = first;
      one.shared_prefix = 0;
      one.generate = steps;
      one.seed = options.seed + 2000 + static_cast<uint64_t>(turn);
      const LoadFigures load = run_load(*engine, random_requests(one, vocabulary), options.concurrency, {}, {});
      const double after = bare.step_seconds(steps);
      const double decoding = decoding_step_seconds(load);
      if (decoding > 0) ratios.push_back(decoding / ((before + after) / 2));
    }
    note_taken();
    std::sort(ratios.begin(), ratios.end());
    if (!ratios.empty()) result.overhead = ratios[ratios.size() / 2] - 1;
  }
  if (options.shared_prefix > 0 && options.prompts.empty()) {
    result.ttft_ratio = measure_ttft_ratio(*engine, options, vocabulary);
  }

  std::vector<double> arrivals;
  if (options.arrival > 0) {
    Random random(options.seed + 5);
    double time = 0;
    for (int64_t i = 0; i < options.requests; ++i) {
      arrivals.push_back(time);
      time -= std::log(1 - random.uniform()) / options.arrival;
    }
  }
  Progress progress("requests", static_cast<uint64_t>(options.requests), "done");
  if (options.pairs) {
    engine::EngineOptions without = engine_options;
    without.drafts = 0;
    run_pairs(*engine, *engine::make_engine(share_model(model), without), options, requests, progress, result);
    progress.finish();
    return result;
  }
  result.load = run_load(*engine, std::move(requests), options.concurrency, arrivals,
                         [&](int64_t done) { progress.set(static_cast<uint64_t>(done)); });
  progress.finish();
  note_taken();
  return result;
}

Json to_json(const Percentiles& p) { return {{"p50", 1e3 * p.p50}, {"p90", 1e3 * p.p90}, {"p99", 1e3 * p.p99}}; }

void print_percentiles(const char* name, const Percentiles& p) {
  fmt::print("{:<24}{:10.2f} {:10.2f} {:10.2f} ms (p50, p90, p99)\n", name, 1e3 * p.p50, 1e3 * p.p90, 1e3 * p.p99);
}

void run(const Options& options) {
  if (options.directory.empty() == options.dummy.shape.empty()) {
    fail("bench engine: wanted either a checkpoint directory or --dummy SHAPE");
  }
  install_interrupt_handler();
  const int32_t drafts = parse_drafts(options.draft);
  model::ModelOptions model_options;
  model_options.max_logit_rows = options.concurrency * (1 + (drafts == 0 ? 0 : ops::kMaxDrafts));
  if (options.prompt_logprobs >= 0 || options.logprobs >= 0) {  // as a server has them
    model_options.max_logit_rows += engine::EngineOptions().spare_logit_rows;
  }
  const auto take_steps_of = [&](int64_t tokens) {
    model_options.max_step_tokens = std::max(tokens, model_options.max_logit_rows);
  };
  take_steps_of(options.chunk > 0 ? options.chunk : memory::kCardStepTokens);
  model_options.mtp = drafts != 0;
  const model::ModelConfig config = options.dummy.shape.empty() ? model::read_config(options.directory)
                                                                : dummy_config(options.dummy, model_options.mtp);
  check(options, config);
  Planned planned;
  planned.directory = options.directory;
  if (options.directory.empty()) planned.dummy = &options.dummy;
  planned.model = model_options;
  planned.mtp = model_options.mtp;
  // With less than is convenient where a GPU's memory does not suffice: no room for what others' prompts left, no bare
  // model beside the engine.
  const bool plain = drafts == 0 && options.arrival == 0 && options.prompts.empty();
  std::vector<Room> rooms = {{2, plain}};
  if (options.context == 0) rooms.push_back({1, plain});
  if (plain) rooms.push_back({1, false});
  const std::vector<engine::Request> requests = requests_of(options, config);
  for (const Room& room : rooms) {
    Planned::Less less;
    less.engine = engine_options_of(options, config, requests, model_options.max_step_tokens, drafts, room);
    if (room.bare) {
      less.more_pages = options.concurrency * (ceil_div(less.engine.max_context, kPageSize) + 1);
      less.more_slots = options.concurrency;
    }
    planned.less.push_back(less);
  }
  planned.engine = planned.less[0].engine;
  planned.more_pages = planned.less[0].more_pages;
  planned.more_slots = planned.less[0].more_slots;
  planned.less.erase(planned.less.begin());
  size_t less = 0;
  const auto plan = require_memory(options.backend, options.memory, planned, &less);
  if (!plan && options.chunk == 0) take_steps_of(engine::EngineOptions().max_step_tokens);
  const Room room = rooms[less];
  if (less > 0) {
    eprint("fourfold: warning: the GPU has no room for {}\n",
           plain && !room.bare ? "the bare model beside the engine: no overhead is measured"
                               : "more than one context of each sequence");
  }
  if (options.pairs && plan) {
    fail("bench engine: --pairs needs two engines, whose memory is planned for one on a GPU; wanted --device cpu");
  }
  chat::LoadedModel loaded = options.dummy.shape.empty()
                                 ? load_checkpoint(options.directory, options.backend, model_options)
                                 : load_dummy(options.dummy, options.backend, model_options);
  const std::shared_ptr<model::Model> model = std::move(loaded.model);
  const std::string backend = model->backend().description();
  const Result result = measure(options, model, drafts, room, plan);

  const LoadFigures& load = result.load;
  const double output_rate = static_cast<double>(load.output_tokens()) / load.seconds;
  const double total_rate = static_cast<double>(load.output_tokens() + load.prompt_tokens()) / load.seconds;
  const Percentiles first = percentiles(load.first_token_seconds());
  const Percentiles between = percentiles(load.between_tokens_seconds());
  const DraftFigures draft = draft_figures(load.before, load.after);
  const int64_t hits = load.after.prefix.hit_tokens - load.before.prefix.hit_tokens;
  const int64_t possible = options.shared_prefix * (options.requests - 1);
  const int64_t preemptions = load.after.preemptions - load.before.preemptions;
  const int64_t steps = load.after.steps - load.before.steps;
  const int64_t prepared = load.after.prepared_steps - load.before.prepared_steps;
  const std::string prompts = !options.prompts.empty()    ? options.prompts
                              : options.shared_prefix > 0 ? fmt::format("random, {} tokens, {} of them shared",
                                                                        options.prompt, options.shared_prefix)
                                                          : fmt::format("random, {} tokens", options.prompt);
  if (options.json) {
    Json out;
    out["model"] = loaded.name;
    out["backend"] = backend;
    if (plan) {
      out["memory"] = memory::json(*plan);
      out["memory"]["taken"] = result.taken;
    }
    out["prompts"] = prompts;
    out["requests"] = options.requests;
    out["concurrency"] = options.concurrency;
    out["generate"] = options.generate;
    out["sampling"] = {{"temperature", result.sampling.temperature},
                       {"top_k", result.sampling.top_k},
                       {"top_p", result.sampling.top_p},
                       {"min_p", result.sampling.min_p},
                       {"repetition_penalty", result.sampling.repetition_penalty},
                       {"presence_penalty", result.sampling.presence_penalty},
                       {"frequency_penalty", result.sampling.frequency_penalty},
                       {"logprobs", result.sampling.logprobs},
                       {"prompt_logprobs", options.prompt_logprobs},
                       {"seed", options.seed}};
    out["arrival_per_s"] = options.arrival;
    out["seconds"] = load.seconds;
    out["output_tokens"] = load.output_tokens();
    out["output_tokens_per_s"] = output_rate;
    out["total_tokens_per_s"] = total_rate;
    out["decode_tokens_per_s"] = load.decode_tokens_per_s();
    out["ttft_ms"] = to_json(first);
    out["itl_ms"] = to_json(between);
    out["overhead"] = result.overhead ? Json(*result.overhead) : Json(nullptr);
    out["prefix"] = {{"hit_tokens", hits},
                     {"possible_tokens", possible},
                     {"missed_no_state", load.after.prefix.missed_no_state - load.before.prefix.missed_no_state},
                     {"missed_evicted", load.after.prefix.missed_evicted - load.before.prefix.missed_evicted},
                     {"ttft_ratio", result.ttft_ratio ? Json(*result.ttft_ratio) : Json(nullptr)}};
    out["draft"] = {
        {"asked", options.draft}, {"accepted_per_step", draft.accepted_per_step}, {"by_position", draft.by_position}};
    if (result.plain_decode_tokens_per_s) {
      out["draft"]["plain_decode_tokens_per_s"] = *result.plain_decode_tokens_per_s;
      out["draft"]["speedup"] = load.decode_tokens_per_s() / *result.plain_decode_tokens_per_s;
      out["draft"]["median_speedup"] = result.median_speedup ? Json(*result.median_speedup) : Json(nullptr);
    }
    out["preemptions"] = preemptions;
    out["steps"] = steps;
    out["prepared_steps"] = prepared;
    fmt::print("{}\n", out.dump(2, ' ', false, Json::error_handler_t::replace));
    return;
  }
  fmt::print("{}\n{}\n\n", loaded.name, backend);
  if (plan) fmt::print("{}{}\n", memory::text(*plan), taken_text(*plan, result.taken));
  fmt::print("{} requests, {}; prompts: {}; {} tokens each at most, {}\n", options.requests,
             options.arrival > 0 ? fmt::format("{} a second (Poisson)", options.arrival)
                                 : fmt::format("{} at a time", options.concurrency),
             prompts, options.generate, describe(result.sampling));
  fmt::print("{:<24}{:10.2f} tokens/s\n", "output", output_rate);
  fmt::print("{:<24}{:10.2f} tokens/s\n", "output and prompts", total_rate);
  fmt::print("{:<24}{:10.2f} tokens/s, of one sequence after its prompt\n", "decode", load.decode_tokens_per_s());
  print_percentiles("time to first token", first);
  print_percentiles("time between tokens", between);
  if (result.overhead) {
    fmt::print("{:<24}{:10.2f} % over the bare model's step of {} sequences\n", "overhead", 100 * *result.overhead,
               options.concurrency);
  }
  if (options.shared_prefix > 0) {
    fmt::print("{:<24}{:10} of {} possible tokens\n", "prefix cache", hits, possible);
    if (result.ttft_ratio) {
      fmt::print("{:<24}{:10.2f} % of the uncached time to the first token\n", "cached prefix",
                 100 * *result.ttft_ratio);
    }
  }
  if (!draft.by_position.empty()) {
    std::string shares;
    for (const double share : draft.by_position) shares += fmt::format(" {:.0f}", 100 * share);
    fmt::print("{:<24}{:10.2f} accepted a step; % by position:{}\n", "drafts", draft.accepted_per_step, shares);
  }
  if (result.plain_decode_tokens_per_s) {
    fmt::print("{:<24}{:10.2f} tokens/s decoded: drafts give {:.2f} times that (median of turns: {:.2f})\n",
               "without drafts", *result.plain_decode_tokens_per_s,
               load.decode_tokens_per_s() / *result.plain_decode_tokens_per_s, result.median_speedup.value_or(0));
  }
  fmt::print("{:<24}{:10}\n", "preemptions", preemptions);
  if (prepared > 0) {
    fmt::print("{:<24}{:10}, {} of which launched kernel by kernel or recorded for the next of their kind\n", "steps",
               steps, prepared);
  }
}

}  // namespace

void add_bench_engine(Command& bench_app) {
  auto options = std::make_shared<Options>();
  Command command =
      bench_app.add_command("engine", "Requests through the engine: throughput, latency, prefix cache, drafts");
  command.add_option("DIR", options->directory, "Checkpoint directory");
  add_dummy_options(command, options->dummy);
  add_backend_options(command, options->backend);
  add_memory_options(command, options->memory);
  command.add_option("--requests", options->requests, "Requests in all").range(1, 1 << 20);
  command.add_option("--concurrency", options->concurrency, "Requests at a time, at most --requests").range(1, 4096);
  command.add_option("--prompt", options->prompt, "Tokens of a prompt (random)").range(1, 1 << 20);
  command.add_option("--generate", options->generate, "Tokens of an answer (with --prompts: at most)")
      .range(1, 1 << 20);
  command.add_option("--shared-prefix", options->shared_prefix, "Tokens that all prompts begin with").range(0, 1 << 20);
  command.add_option("--prompts", options->prompts, "Conversations instead of random prompts: a file as eval reads it");
  command.add_flag("--think", options->thinking, "With --prompts: thinking, where a conversation does not say");
  command.add_option("--draft", options->draft, "Drafts of the MTP head a step: 0 to 5, or auto");
  add_draft_tokens_option(command, options->draft_tokens);
  command.add_flag("--pairs", options->pairs,
                   "With --draft: the same requests without drafts as well, in turns (on a CPU)");
  command.add_option("--arrival", options->arrival, "Requests a second, at random times; 0: as others end")
      .real_range(0, 1e6);
  command
      .add_option("--chunk", options->chunk,
                  fmt::format("Tokens of one step at most (default: {}, on a GPU {})",
                              engine::EngineOptions().max_step_tokens, memory::kCardStepTokens))
      .range(1, 65536);
  command.add_option("--context", options->context, "Positions of the cache in all; 0: twice what the requests need")
      .range(0, int64_t{1} << 30);
  add_sampling_options(command, options->sampling);
  command
      .add_option("--logprobs", options->logprobs,
                  "Log-probabilities of the answer's tokens, and of so many others each (-1: none)")
      .range(-1, ops::kMaxLogprobs);
  command.add_option("--prompt-logprobs", options->prompt_logprobs, "The same of the prompt's tokens")
      .range(-1, ops::kMaxLogprobs);
  command.add_option("--seed", options->seed, "Of prompts, arrivals and drawn tokens");
  command.add_flag("--json", options->json, "Print one JSON object");
  command.callback([options] {
    options->concurrency = std::min(options->concurrency, options->requests);
    run(*options);
  });
}

}  // namespace fourfold::cmd
