// fourfold bench: how fast, and how far from what the machine can do.
#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/check.h"
#include "base/console.h"
#include "base/file.h"
#include "base/interrupt.h"
#include "base/json.h"
#include "base/math.h"
#include "base/progress.h"
#include "base/random.h"
#include "cmd/arguments.h"
#include "cmd/bench_card.h"
#include "cmd/bench_comm.h"
#include "cmd/bench_engine.h"
#include "cmd/bench_kernels.h"
#include "cmd/bench_load.h"
#include "cmd/bench_ops.h"
#include "cmd/bench_serve.h"
#include "cmd/card_memory.h"
#include "cmd/commands.h"
#include "cmd/engine_load.h"
#include "cmd/model_options.h"
#include "cpu/ceilings.h"
#include "cuda/backend/timeline.h"
#include "cuda/device/loader.h"
#include "engine/engine.h"
#include "measure/trace.h"
#include "model/checkpoint.h"
#include "model/model.h"
#include "model/shape_source.h"
#include "predict/step.h"

namespace fourfold::cmd {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int64_t kPageSize = 64;
constexpr int64_t kTurnTokens = 16;
constexpr std::chrono::milliseconds kTurnPause{2};  // longer than the threads of a pool spin

struct Options {
  std::string directory;
  DummyArgs dummy;
  BackendArgs backend;
  MemoryArgs memory;
  int64_t prompt = 512, generate = 64, chunk = 0, users = 0;
  int repeats = 5;
  std::string draft = "0", draft_tokens = "auto", timeline;
  bool json = false;
};

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

struct Spread {
  double median = 0, low = 0, high = 0;
};

Spread spread_of(std::vector<double> values) {
  FF_ASSERT(!values.empty());
  std::sort(values.begin(), values.end());
  return {values[values.size() / 2], values.front(), values.back()};
}

// One sequence on the model, without the engine.
class Driver {
 public:
  // Room for so many sequences of so many positions, and as many states at least; the first one is computed, the others
  // only take their time.
  Driver(model::Model& model, int64_t positions, int64_t sequences, int64_t states)
      : model_(model), pages_each_(static_cast<size_t>(ceil_div(positions, kPageSize))) {
    const int64_t pages = ceil_div(positions, kPageSize) * sequences;
    pages_.resize(static_cast<size_t>(pages));
    std::iota(pages_.begin(), pages_.end(), 0);
    caches_ = model.make_caches(pages, kPageSize, std::max(sequences, states));
    row_.resize(static_cast<size_t>(model.config().vocabulary));
    for (int64_t i = 0; i < positions; ++i) {
      tokens_.push_back(static_cast<int32_t>(random_.below(static_cast<uint64_t>(model.config().vocabulary))));
    }
  }

  // Feeds tokens [position, position + count); the logits of the last one are read when asked for.
  void step(int64_t position, int64_t count, bool logits) {
    throw_if_interrupted();
    with_batch(position, count, logits, [&](const ops::Batch& batch) { model_.forward(batch, caches_); });
    if (logits) model_.backend().read(model_.logits(), row_);
  }

  // What the operations of a step take; none where the backend does not say.
  std::optional<ops::OperationTimes> time(int64_t position, int64_t count) {
    std::optional<ops::OperationTimes> times;
    with_batch(position, count, true, [&](const ops::Batch& batch) { times = model_.time_forward(batch, caches_); });
    return times;
  }
  std::optional<cuda::CardTimeline> timeline(int64_t position, int64_t count) {
    std::optional<cuda::CardTimeline> timeline;
    with_batch(position, count, true, [&](const ops::Batch& batch) {
      timeline = cuda::timeline_of(model_.backend(), [&] { model_.forward(batch, caches_); });
    });
    return timeline;
  }
  // Of a token for each of so many sequences.
  std::optional<ops::OperationTimes> time_users(int64_t position, int64_t count) {
    std::vector<ops::Sequence> sequences;
    std::vector<int32_t> rows;
    for (int64_t i = 0; i < count; ++i) {
      ops::Sequence s;
      s.first = static_cast<int32_t>(i);
      s.count = 1;
      s.position = static_cast<int32_t>(position);
      s.state_in = static_cast<int32_t>(i);
      s.pages = std::span(pages_).subspan(static_cast<size_t>(i) * pages_each_, pages_each_);
      sequences.push_back(s);
      rows.push_back(static_cast<int32_t>(i));
    }
    return model_.time_forward({std::span(tokens_).first(static_cast<size_t>(count)), sequences, rows}, caches_);
  }

  // Of a sequence's last token and its drafts, each with logits and a state of its own, or what takes its place.
  std::optional<ops::OperationTimes> time_verification(int64_t position, int64_t count) {
    std::vector<int32_t> each(static_cast<size_t>(count));
    std::iota(each.begin(), each.end(), 0);
    ops::Sequence sequence;
    sequence.count = static_cast<int32_t>(count);
    sequence.position = static_cast<int32_t>(position);
    sequence.state_out = each;
    sequence.puts_off = true;
    sequence.pages = std::span(pages_).first(pages_each_);
    return model_.time_forward({std::span(tokens_).first(static_cast<size_t>(count)), std::span(&sequence, 1), each},
                               caches_);
  }

  // Of a drafting pass: a row through the MTP head, with logits.
  std::optional<ops::OperationTimes> time_drafting(int64_t position) {
    std::optional<ops::OperationTimes> times;
    const ops::Tensor hidden = model_.hidden().slice_rows(0, 1);
    with_batch(position, 1, true, [&](const ops::Batch& batch) {
      times = model_.backend().time_operations([&] { model_.forward_mtp(batch, hidden, caches_); });
    });
    return times;
  }

  // Chunks of at most `chunk` tokens; the logits of the last token only, as a prompt needs.
  void prefill(int64_t tokens, int64_t chunk) {
    for (int64_t begin = 0; begin < tokens; begin += chunk) {
      const int64_t count = std::min(chunk, tokens - begin);
      step(begin, count, begin + count == tokens);
    }
  }

  const std::vector<int32_t>& tokens() const { return tokens_; }

 private:
  void with_batch(int64_t position, int64_t count, bool logits, const std::function<void(const ops::Batch&)>& run) {
    ops::Sequence sequence;
    sequence.count = static_cast<int32_t>(count);
    sequence.position = static_cast<int32_t>(position);
    sequence.pages = std::span(pages_).first(pages_each_);
    const int32_t last = static_cast<int32_t>(count) - 1;
    run({std::span(tokens_).subspan(static_cast<size_t>(position), static_cast<size_t>(count)), std::span(&sequence, 1),
         std::span(&last, logits ? 1 : 0)});
  }

  model::Model& model_;
  size_t pages_each_;  // of a sequence
  model::Caches caches_;
  Random random_{20251121};
  std::vector<int32_t> pages_, tokens_;
  std::vector<float> row_;
};

struct EngineFigures {
  double decode_tokens_per_s = 0, prefill_tokens_per_s = 0;
  DraftFigures drafts;
};

engine::EngineOptions engine_options_of(const Options& options, int64_t step_tokens, int32_t drafts) {
  engine::EngineOptions engine;
  engine.max_context = options.prompt + options.generate;
  engine.max_sequences = 1;
  engine.max_step_tokens = step_tokens;
  engine.page_size = kPageSize;
  engine.drafts = drafts;
  engine.draft_tokens = parse_draft_tokens(options.draft_tokens);
  engine.prefix_cache = false;  // each run computes the prompt
  return engine;
}

// The same prompt through the engine, greedily: what scheduling, sampling and delivery cost on top, and what drafts
// save.
EngineFigures measure_engine(std::shared_ptr<model::Model> model, const Options& options,
                             const std::vector<int32_t>& tokens, int32_t drafts) {
  const engine::EngineOptions engine_options = engine_options_of(options, model->options().max_step_tokens, drafts);
  const auto engine = engine::make_engine(share_model(std::move(model)), engine_options);
  std::vector<double> decode, prefill;
  const engine::EngineStats before = engine->stats();
  for (int repeat = 0; repeat < std::min(options.repeats, 3); ++repeat) {
    std::vector<engine::Request> requests(1);
    requests[0].prompt.assign(tokens.begin(), tokens.begin() + options.prompt);
    requests[0].max_tokens = options.generate;
    requests[0].sampling.temperature = 0;
    const LoadFigures load = run_load(*engine, std::move(requests), 1, {}, {});
    const engine::Event& end = load.requests[0].end;
    if (end.output_tokens > 1) decode.push_back(static_cast<double>(end.output_tokens - 1) / end.decode_seconds);
    prefill.push_back(static_cast<double>(options.prompt) / end.prefill_seconds);
  }
  return {decode.empty() ? 0 : spread_of(decode).median, spread_of(prefill).median,
          draft_figures(before, engine->stats())};
}

Json engine_json(const Options& options, const EngineFigures& engine, const std::optional<EngineFigures>& drafted) {
  Json out;
  out["engine"] = {{"decode_tokens_per_s", engine.decode_tokens_per_s},
                   {"prefill_tokens_per_s", engine.prefill_tokens_per_s}};
  if (drafted) {
    out["speculation"] = {{"draft", options.draft},
                          {"tokens_per_s", drafted->decode_tokens_per_s},
                          {"plain_tokens_per_s", engine.decode_tokens_per_s},
                          {"accepted_per_step", drafted->drafts.accepted_per_step},
                          {"by_position", drafted->drafts.by_position}};
  }
  return out;
}

void print_engine(const Options& options, const EngineFigures& engine, const std::optional<EngineFigures>& drafted) {
  fmt::print("through the engine: decode {:.2f} tokens/s, prefill {:.2f} tokens/s\n", engine.decode_tokens_per_s,
             engine.prefill_tokens_per_s);
  if (drafted) {
    fmt::print("with drafts ({}): decode {:.2f} tokens/s, {:.2f} drafts accepted a step (random prompts)\n",
               options.draft, drafted->decode_tokens_per_s, drafted->drafts.accepted_per_step);
  }
}

// What `plan --step` says of such a step on this card; nothing, with the reason on stderr, where it cannot.
std::optional<plan::step::StepPlan> predict_step(const Options& options, const plan::Gpu& card,
                                                 const plan::step::Shape& shape) {
  if (!options.backend.emulate.empty()) return std::nullopt;  // another card's kernels, slower than on either
  predict::Request request = {.shapes = {}, .shape = shape, .gpu = card};
  request.shape.fp8_cache = options.backend.kv_cache == "fp8";
  request.shape.ranks = options.backend.ranks;
  request.shape.by_expert = options.backend.by_expert;
  // Cards of data centres are taken to have NVLink.
  const bool nvlink = card.arch == "sm_80" || card.arch == "sm_90a" || card.arch == "sm_100a";
  request.shape.link = nvlink ? plan::step::Link::kNvlink : plan::step::Link::kPeer;
  try {
    std::shared_ptr<model::Checkpoint> checkpoint;
    if (!options.directory.empty()) checkpoint = std::make_shared<model::Checkpoint>(options.directory);
    request.shapes = [&]() -> std::unique_ptr<model::WeightSource> {
      if (checkpoint != nullptr) return model::shapes_of(*checkpoint);
      return model::shapes_of(dummy_config(options.dummy), dummy_formats(options.dummy));
    };
    return predict::predict(request);
  } catch (const Error& error) {
    warn(fmt::format("no prediction: {}", error.what()));
    return std::nullopt;
  }
}

// On a GPU: operation by operation, then through the engine, which replays what the first part launched one by one.
void run_on_card(const Options& options, int device, Driver& driver, chat::LoadedModel& loaded, int32_t drafts,
                 const std::optional<memory::Plan>& plan) {
  const int64_t chunk = std::min<int64_t>(options.prompt, loaded.model->options().max_step_tokens);
  CardFigures figures;
  figures.model = loaded.name;
  figures.backend = loaded.model->backend().description();
  figures.load_seconds = loaded.seconds;
  const plan::Gpu gpu = cuda::device_of(loaded.model->backend()).gpu();
  const auto add = [&](std::string title, int64_t position, int64_t count, bool prefill) {
    if (std::optional<ops::OperationTimes> times = driver.time(position, count)) {
      figures.steps.push_back({std::move(title), count, *std::move(times)});
      figures.steps.back().predicted =
          predict_step(options, gpu, {.tokens = count, .context = position, .prefill = prefill});
    }
  };
  std::vector<measure::Track> tracks;
  const auto trace = [&](const char* title, int64_t position, int64_t count) {
    if (options.timeline.empty()) return;
    if (auto timeline = driver.timeline(position, count)) {
      tracks.push_back(measure::track_of(title, *std::move(timeline)));
    }
  };
  trace("card, a decoded token", options.prompt, 1);
  trace("card, a prompt's chunk", options.prompt - chunk, chunk);
  add(fmt::format("decode, 1 token after {}", options.prompt), options.prompt, 1, false);
  if (drafts > 0 && drafts < options.generate) {
    if (std::optional<ops::OperationTimes> times = driver.time_verification(options.prompt, 1 + drafts)) {
      figures.steps.push_back({fmt::format("verification, a token and {} drafts after {}", drafts, options.prompt),
                               1 + drafts, *std::move(times), std::nullopt});
    }
    if (std::optional<ops::OperationTimes> times = driver.time_drafting(options.prompt)) {
      figures.steps.push_back({"a drafting pass", 1, *std::move(times), std::nullopt});
    }
  }
  add(fmt::format("prefill, {} tokens after {}", chunk, options.prompt - chunk), options.prompt - chunk, chunk, true);
  if (options.users > 0) {
    const auto title = fmt::format("decode, a token for each of {} sequences after {}", options.users, options.prompt);
    if (std::optional<ops::OperationTimes> times = driver.time_users(options.prompt, options.users)) {
      figures.steps.push_back({title, options.users, *std::move(times)});
      figures.steps.back().predicted = predict_step(options, gpu, {.tokens = options.users, .context = options.prompt});
    }
  }
  {
    const cuda::Device card(device);
    jit::KernelStore store(jit::default_store_directory());
    cuda::KernelLoader loader(card, store, {});
    figures.ceilings = measure::measure_ceilings(loader);
  }
  const std::shared_ptr<model::Model> shared = std::move(loaded.model);
  const EngineFigures engine = measure_engine(shared, options, driver.tokens(), 0);
  std::optional<EngineFigures> drafted;
  if (drafts != 0) drafted = measure_engine(shared, options, driver.tokens(), drafts);
  if (!options.timeline.empty()) {
    // Few tokens are enough, and easier to find one's way in.
    Options few = options;
    few.repeats = 1;
    few.generate = std::min<int64_t>(options.generate, 16);
    cuda::note_host_spans(true);
    measure_engine(shared, few, driver.tokens(), drafts);
    cuda::note_host_spans(false);
    tracks.push_back({"host, steps of the engine", cuda::take_host_spans(), Json::object()});
    write_file_atomically(options.timeline, measure::chrome_trace(tracks).dump(1) + "\n");
  }
  const uint64_t taken = plan ? taken_since(*plan) : 0;
  if (options.json) {
    Json out = card_json(figures);
    if (plan) {
      out["memory"] = memory::json(*plan);
      out["memory"]["taken"] = taken;
    }
    out.update(engine_json(options, engine, drafted));
    fmt::print("{}\n", out.dump(2, ' ', false, Json::error_handler_t::replace));
    return;
  }
  print_card(figures);
  if (plan) fmt::print("\n{}{}", memory::text(*plan), taken_text(*plan, taken));
  fmt::print("\n");
  print_engine(options, engine, drafted);
}

// The engine's caches are there beside those of the first part.
std::optional<memory::Plan> plan_memory(const Options& options, const model::ModelOptions& model, int32_t drafts) {
  Planned planned;
  planned.directory = options.directory;
  if (options.directory.empty()) planned.dummy = &options.dummy;
  planned.model = model;
  planned.mtp = model.mtp;
  planned.engine = engine_options_of(options, model.max_step_tokens, drafts);
  const int64_t users = std::max<int64_t>(options.users, 1);
  planned.more_pages = ceil_div(std::max(options.prompt + options.generate, options.users), kPageSize) * users;
  planned.more_slots = std::max<int64_t>(users, 1 + drafts);
  return require_memory(options.backend, options.memory, planned);
}

void run(const Options& options) {
  if (options.directory.empty() == options.dummy.shape.empty()) {
    fail("bench model: wanted either a checkpoint directory or --dummy SHAPE");
  }
  install_interrupt_handler();
  model::ModelOptions model_options;
  const int32_t drafts = parse_drafts(options.draft);
  model_options.max_logit_rows = drafts == 0 ? 1 : 1 + ops::kMaxDrafts;
  model_options.max_logit_rows = std::max(model_options.max_logit_rows, options.users);
  const auto take_steps_of = [&](int64_t tokens) {
    model_options.max_step_tokens = std::max(std::min(tokens, options.prompt), model_options.max_logit_rows);
  };
  take_steps_of(options.chunk > 0 ? options.chunk : memory::kCardStepTokens);
  model_options.mtp = drafts != 0;
  const auto plan = plan_memory(options, model_options, drafts);
  if (!plan && options.chunk == 0) take_steps_of(engine::EngineOptions().max_step_tokens);
  chat::LoadedModel loaded = options.dummy.shape.empty()
                                 ? load_checkpoint(options.directory, options.backend, model_options)
                                 : load_dummy(options.dummy, options.backend, model_options);
  model::Model& model = *loaded.model;
  const int64_t positions = options.prompt + options.generate;
  if (positions > model.config().max_positions) {
    fail("bench model: --prompt and --generate are {} tokens together, the model has {} positions", positions,
         model.config().max_positions);
  }
  const bool in_cache = fits_in_cache(loaded);
  const cpu::Isa isa = chosen_isa(options.backend);
  const int threads = chosen_threads(options.backend);

  if (!options.timeline.empty() && (!model.backend().gpu() || options.backend.ranks > 1)) {
    fail("bench model: --timeline is for one GPU");
  }
  if (options.users > 0 && !model.backend().gpu())
    fail("bench model: --users is for a GPU; bench engine --concurrency");
  Driver driver(model, std::max(positions, options.users), std::max<int64_t>(options.users, 1), 1 + drafts);
  driver.prefill(options.prompt, model_options.max_step_tokens);  // warm-up: every buffer and (nearly) every weight
  if (const std::optional<int> device = model.backend().gpu()) {
    run_on_card(options, *device, driver, loaded, drafts, plan);
    return;
  }

  // The ceilings of the machine, before and after: other work, and a virtual machine's placement, change them.
  cpu::CeilingMeter meter(threads, isa);
  const cpu::Ceilings before = meter.measure();

  Progress progress("measuring", static_cast<uint64_t>(2 * options.repeats), "runs");
  std::vector<double> prefill_seconds;
  for (int repeat = 0; repeat < options.repeats; ++repeat) {
    const auto begin = Clock::now();
    driver.prefill(options.prompt, model_options.max_step_tokens);
    prefill_seconds.push_back(seconds_since(begin));
    progress.advance(1);
  }
  // A few tokens, then as many bytes read, in turns: the fraction compares what met the same conditions. A short sleep
  // lets the threads of one go to sleep before those of the other begin.
  std::vector<double> decode_seconds;  // per token
  std::vector<double> read_rates;      // bytes/s
  for (int repeat = 0; repeat < options.repeats; ++repeat) {
    if (repeat > 0) driver.prefill(options.prompt, model_options.max_step_tokens);
    double stepping = 0, reading = 0, bytes = 0;
    for (int64_t first = 0; first < options.generate; first += kTurnTokens) {
      const int64_t end = std::min(first + kTurnTokens, options.generate);
      double turn_bytes = 0;
      for (int64_t i = first; i < end; ++i) turn_bytes += model.cost(1, options.prompt + i, 1).bytes;
      const auto begin = Clock::now();
      for (int64_t i = first; i < end; ++i) driver.step(options.prompt + i, 1, true);
      stepping += seconds_since(begin);
      std::this_thread::sleep_for(kTurnPause);
      reading += meter.read(static_cast<int64_t>(turn_bytes));
      std::this_thread::sleep_for(kTurnPause);
      bytes += turn_bytes;
    }
    decode_seconds.push_back(stepping / static_cast<double>(options.generate));
    read_rates.push_back(bytes / reading);
    progress.advance(1);
  }
  progress.finish();
  const cpu::Ceilings after = meter.measure();

  // Costs: decode over the contexts it ran at, prefill over its chunks.
  ops::Cost decode_cost, prefill_cost;
  for (int64_t i = 0; i < options.generate; ++i) decode_cost += model.cost(1, options.prompt + i, 1);
  for (int64_t begin = 0; begin < options.prompt; begin += model_options.max_step_tokens) {
    const int64_t count = std::min(model_options.max_step_tokens, options.prompt - begin);
    prefill_cost += model.cost(count, begin, begin + count == options.prompt ? 1 : 0);
  }
  const Spread decode = spread_of(decode_seconds), prefill = spread_of(prefill_seconds);
  const double bytes = decode_cost.bytes / static_cast<double>(options.generate);
  const double flops = prefill_cost.flops / static_cast<double>(options.prompt);
  const double bandwidth = spread_of(read_rates).median;
  // The higher of the two measurements: a fraction is never flattered by a disturbed ceiling.
  const double best_bandwidth = std::max(before.read_bytes_per_second, after.read_bytes_per_second);
  const double peak = std::max(before.peak(isa), after.peak(isa));
  const double bf16_peak = std::max(before.peak_bf16(isa), after.peak_bf16(isa));
  const double decode_rate = bytes / decode.median;
  const double prefill_tokens_per_s = static_cast<double>(options.prompt) / prefill.median;
  const double prefill_rate = flops * prefill_tokens_per_s;

  const std::string description = model.backend().description();
  const std::shared_ptr<model::Model> shared = std::move(loaded.model);
  const EngineFigures engine = measure_engine(shared, options, driver.tokens(), 0);
  std::optional<EngineFigures> drafted;
  if (drafts != 0) drafted = measure_engine(shared, options, driver.tokens(), drafts);

  if (options.json) {
    Json out;
    out["model"] = loaded.name;
    out["backend"] = description;
    out["threads"] = threads;
    out["load_seconds"] = loaded.seconds;
    out["repeats"] = options.repeats;
    out["decode"] = {{"tokens_per_s", 1 / decode.median},
                     {"tokens_per_s_low", 1 / decode.high},
                     {"tokens_per_s_high", 1 / decode.low},
                     {"context_first", options.prompt},
                     {"context_last", positions - 1},
                     {"bytes_per_token", bytes},
                     {"gb_per_s", decode_rate / 1e9},
                     {"gb_per_s_per_core", decode_rate / 1e9 / threads},
                     {"read_bandwidth_gb_per_s", bandwidth / 1e9},
                     {"read_bandwidth_before_gb_per_s", before.read_bytes_per_second / 1e9},
                     {"read_bandwidth_after_gb_per_s", after.read_bytes_per_second / 1e9},
                     {"fraction", decode_rate / bandwidth},
                     {"fraction_of_best_read", decode_rate / best_bandwidth},
                     {"in_cache", in_cache},
                     {"seconds_per_token", decode.median},
                     {"floor_seconds_per_token", bytes / bandwidth}};
    out["prefill"] = {{"tokens_per_s", prefill_tokens_per_s},
                      {"tokens_per_s_low", static_cast<double>(options.prompt) / prefill.high},
                      {"tokens_per_s_high", static_cast<double>(options.prompt) / prefill.low},
                      {"tokens", options.prompt},
                      {"chunk", model_options.max_step_tokens},
                      {"flops_per_token", flops},
                      {"gflops_per_core", prefill_rate / 1e9 / threads},
                      {"peak_gflops_per_core", peak / 1e9 / threads},
                      {"peak_bf16_gflops_per_core", bf16_peak / 1e9 / threads},
                      {"fraction", peak > 0 ? prefill_rate / peak : 0.0},
                      {"seconds", prefill.median},
                      {"floor_seconds", peak > 0 ? prefill_cost.flops / peak : 0.0}};
    out.update(engine_json(options, engine, drafted));
    fmt::print("{}\n", out.dump(2, ' ', false, Json::error_handler_t::replace));
    return;
  }
  fmt::print("{}\n{}, loaded in {:.2f} s\n\n", loaded.name, description, loaded.seconds);
  fmt::print("decode, {} tokens after {} ({} runs, weights in {})\n", options.generate, options.prompt, options.repeats,
             in_cache ? "the processor's cache" : "memory, caches of the processor cold");
  fmt::print("  {:9.2f} tokens/s [{:.2f} .. {:.2f}]\n", 1 / decode.median, 1 / decode.high, 1 / decode.low);
  fmt::print("  {:9.2f} MB per token\n", bytes / 1e6);
  if (in_cache) {
    fmt::print("  {:9.2f} GB/s (the bandwidth of memory is no measure of it)\n", decode_rate / 1e9);
    fmt::print("  {:9.3f} ms per token\n\n", 1e3 * decode.median);
  } else {
    fmt::print("  {:9.2f} GB/s, {:.1f} % of the read bandwidth of {:.2f} GB/s measured in turns with it\n",
               decode_rate / 1e9, 100 * decode_rate / bandwidth, bandwidth / 1e9);
    fmt::print("            {:.1f} % of the best short reads (before {:.2f}, after {:.2f} GB/s)\n",
               100 * decode_rate / best_bandwidth, before.read_bytes_per_second / 1e9,
               after.read_bytes_per_second / 1e9);
    fmt::print("  {:9.3f} ms per token, floor {:.3f} ms\n\n", 1e3 * decode.median, 1e3 * bytes / bandwidth);
  }
  fmt::print("prefill, {} tokens in chunks of {}\n", options.prompt, model_options.max_step_tokens);
  fmt::print("  {:9.2f} tokens/s [{:.2f} .. {:.2f}]\n", prefill_tokens_per_s,
             static_cast<double>(options.prompt) / prefill.high, static_cast<double>(options.prompt) / prefill.low);
  fmt::print("  {:9.2f} MFLOP per token\n", flops / 1e6);
  if (peak > 0) {
    fmt::print("  {:9.2f} GFLOP/s per core, {:.1f} % of the measured peak of {:.2f} ({})\n",
               prefill_rate / 1e9 / threads, 100 * prefill_rate / peak, peak / 1e9 / threads, cpu::isa_name(isa));
    if (bf16_peak > 0) {
      fmt::print("  {:9.1f} % of the measured peak of bf16 products, {:.2f}\n", 100 * prefill_rate / bf16_peak,
                 bf16_peak / 1e9 / threads);
    }
    fmt::print("  {:9.3f} s, floor {:.3f} s\n\n", prefill.median, prefill_cost.flops / peak);
  } else {
    fmt::print("  {:9.2f} GFLOP/s per core (no peak measured for {})\n\n", prefill_rate / 1e9 / threads,
               cpu::isa_name(isa));
  }
  print_engine(options, engine, drafted);
}

}  // namespace

void add_bench(Command& app) {
  Command bench = app.add_command("bench", "Measure speed against what this machine can do at most");
  bench.require_command();
  auto options = std::make_shared<Options>();
  Command command = bench.add_command(
      "model", "Decode and prefill speed of a model, as fractions of measured memory bandwidth and arithmetic peak");
  command.add_option("DIR", options->directory, "Checkpoint directory");
  add_dummy_options(command, options->dummy);
  add_backend_options(command, options->backend);
  add_memory_options(command, options->memory);
  command.add_option("--prompt", options->prompt, "Tokens of the prompt (random)").range(1, 1 << 20);
  command.add_option("--generate", options->generate, "Tokens decoded after it").range(1, 1 << 20);
  command
      .add_option("--chunk", options->chunk,
                  fmt::format("Tokens of one prefill step at most (default: {}, on a GPU {})",
                              engine::EngineOptions().max_step_tokens, memory::kCardStepTokens))
      .range(1, 65536);
  command.add_option("--draft", options->draft, "Also with drafts of the MTP head: 0 (off) to 5 a step, or auto");
  add_draft_tokens_option(command, options->draft_tokens);
  command.add_option("--users", options->users, "On a GPU: also a decode step of so many sequences").range(1, 4096);
  command.add_option("--timeline", options->timeline,
                     "On a GPU: a file for the timeline of a decoded token, a prompt's chunk and the host's parts of "
                     "steps, in Chrome's trace format");
  command.add_option("--repeats", options->repeats, "Runs; the median counts").range(1, 1000);
  command.add_flag("--json", options->json, "Print one JSON object");
  command.callback([options] { run(*options); });
  add_bench_engine(bench);
  add_bench_ops(bench);
  add_bench_serve(bench);
  add_bench_kernels(bench);
  add_bench_comm(bench);
  add_bench_load(bench);
}

}  // namespace fourfold::cmd
