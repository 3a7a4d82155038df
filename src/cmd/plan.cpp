// fourfold plan: what would run for an expert layer, or for a whole step, on a card, and why. Pure arithmetic, needs no
// GPU.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>

#include "base/check.h"
#include "base/console.h"
#include "base/json.h"
#include "base/math.h"
#include "cmd/arguments.h"
#include "cmd/card_memory.h"
#include "cmd/commands.h"
#include "cmd/kernel_list.h"
#include "cmd/model_options.h"
#include "cmd/options.h"
#include "cmd/shape_options.h"
#include "cuda/device/build.h"
#include "cuda/device/device.h"
#include "jit/store.h"
#include "memory/plan.h"
#include "model/checkpoint.h"
#include "model/random_weights.h"
#include "model/shape_source.h"
#include "plan/moe/plan.h"
#include "plan/step/step.h"
#include "predict/step.h"

namespace fourfold::cmd {
namespace {

struct Options {
  ShapeOptions shape;
  int64_t tokens = 1, context = 128, drafts = 0;
  bool json = false, all = false, reachable = false, step = false, prefill = false, by_expert = false, memory = false;
  bool kernels = false;
  std::string store;
  std::string mix, cache = "bf16", link;
  std::string directory;  // of the memory plan
  int64_t max_context = 0, sequences = 0, cache_tokens = 0, step_tokens = 0;
  MemoryArgs memory_args;
};

// Shapes and formats of what --model or a directory names.
struct Shapes {
  std::string name, mix, formats;  // for people
  int64_t positions = 0;
  std::function<std::unique_ptr<model::WeightSource>()> make;
};
Shapes shapes_of(const Options& o, const char* wanted_by) {
  if (o.directory.empty() == o.shape.model.empty()) {
    fail("{}: wanted either a checkpoint directory or --model with a whole model's shape", wanted_by);
  }
  Shapes shapes;
  const bool mtp = o.drafts > 0;
  if (!o.directory.empty()) {
    if (!o.mix.empty()) fail("--mix {}: {} is a checkpoint, whose formats are its own", o.mix, o.directory);
    const auto checkpoint = std::make_shared<model::Checkpoint>(o.directory);
    shapes.name = o.directory;
    shapes.formats = "formats of the checkpoint";
    shapes.positions = checkpoint->config().max_positions;
    shapes.make = [checkpoint] { return model::shapes_of(*checkpoint); };
    return shapes;
  }
  const plan::step::Mix& mix = plan::step::find_mix(o.mix.empty() ? "A" : o.mix);
  DummyArgs dummy;
  dummy.shape = o.shape.model;
  dummy.mix = mix.name;
  shapes.name = o.shape.model;
  shapes.mix = mix.name;
  shapes.formats = mix.title;
  shapes.positions = dummy_config(dummy).max_positions;
  shapes.make = [dummy, mtp] { return model::shapes_of(dummy_config(dummy, mtp), dummy_formats(dummy)); };
  return shapes;
}

double gb(uint64_t bytes) { return static_cast<double>(bytes) * 1e-9; }

// What of each card's memory a model takes that does such steps and no larger ones.
memory::Plan memory_of_step(const Options& o, const Shapes& shapes) {
  const int64_t rows = o.prefill ? o.tokens : o.tokens * (o.drafts + 1);
  memory::Demand demand;
  demand.shapes = shapes.make;
  demand.model.mtp = o.drafts > 0;
  demand.cuda.fp8_cache = o.cache == "fp8";
  demand.ranks = o.shape.ranks;
  demand.by_expert = o.by_expert;
  engine::EngineOptions& engine = demand.engine;
  engine.drafts = static_cast<int32_t>(o.drafts);
  engine.max_sequences = o.prefill ? 1 : o.tokens;
  engine.max_context = std::max<int64_t>(2, o.context + (o.prefill ? o.tokens : o.drafts > 0 ? 2 * o.drafts + 2 : 1));
  engine.max_step_tokens = rows;
  engine.cache_tokens = engine.max_sequences * round_up(engine.max_context, engine.page_size);
  engine.prefix_cache = false;
  engine.spare_logit_rows = 0;
  return memory::plan(demand, {memory::published_card(o.shape.card())},
                      o.memory_args.utilization.value_or(memory::kUtilization));
}

plan::step::Link link_of(const Options& o) {
  return o.link.empty() ? plan::step::link_of(o.shape.card()) : plan::step::find_link(o.link);
}

std::string step_text(const Options& o) {
  if (o.cache != "bf16" && o.cache != "fp8") fail("--kv-cache-dtype '{}': wanted bf16 or fp8", printable(o.cache));
  const Shapes shapes = shapes_of(o, "--step");
  const predict::Request request = {.shapes = shapes.make,
                                    .shape = {.tokens = o.tokens,
                                              .context = o.context,
                                              .prefill = o.prefill,
                                              .drafts = o.drafts,
                                              .fp8_cache = o.cache == "fp8",
                                              .ranks = o.shape.ranks,
                                              .link = link_of(o),
                                              .by_expert = o.by_expert},
                                    .gpu = o.shape.card()};
  plan::step::StepPlan plan = predict::predict(request);
  plan.model = shapes.name;
  plan.mix = shapes.mix;
  plan.formats = shapes.formats;
  const memory::Plan memory = memory_of_step(o, shapes);
  // Without peer copies NCCL or the host take their place (docs/ranks.md).
  const std::string sums = o.shape.ranks < 2 ? "" : o.link == "host" ? "nccl or host" : sum_table().text(o.shape.ranks);
  if (!o.json) {
    return to_text(plan) + (sums.empty() ? "" : fmt::format("sums over ranks: {}\n", sums)) +
           fmt::format("memory: {:.2f} GB planned{}, {:.2f} may be taken: {}\n", gb(memory.planned()),
                       o.shape.ranks > 1 ? " on each card" : "", gb(memory.budget()),
                       memory.fits() ? "it fits" : "it does not fit");
  }
  Json out = Json::parse(to_json(plan));
  if (!sums.empty()) out["sums"] = sums;
  out["memory"] = {{"planned", memory.planned()}, {"budget", memory.budget()}, {"fits", memory.fits()}};
  return out.dump() + "\n";
}

std::string memory_text(const Options& o) {
  const Shapes shapes = shapes_of(o, "--memory");
  memory::Demand demand;
  demand.model.mtp = o.drafts > 0;
  demand.cuda.fp8_cache = o.cache == "fp8";
  demand.shapes = shapes.make;
  demand.engine.drafts = static_cast<int32_t>(o.drafts);
  demand.ranks = o.shape.ranks;
  demand.by_expert = o.by_expert;
  const int64_t positions = shapes.positions;
  if (o.max_context > positions) fail("--max-model-len is {}, the model has {} positions", o.max_context, positions);
  const memory::Plan plan = memory::largest(
      demand, {o.max_context, o.sequences, o.cache_tokens, o.step_tokens}, memory::kUsualCardSequences, positions,
      {memory::published_card(o.shape.card())}, o.memory_args.utilization.value_or(memory::kUtilization));
  if (o.json) return memory::json(plan).dump(2) + "\n";
  return fmt::format("{}{} sequences at once, {} positions each at most, {} in all\n", memory::text(plan),
                     plan.engine.max_sequences, plan.engine.max_context, plan.engine.cache_tokens);
}

// Every kernel that a whole model needs, and what the store knows of those that it has.
std::string kernels_text(const Options& o) {
  if (!is_whole_model(o.shape.model)) fail("--kernels: wanted --model with a checkpoint directory or a whole model");
  const plan::Gpu& card = o.shape.card();
  const ModelKernels model(cuda::info_of(card), o.shape.model, o.mix,
                           {.ranks = o.shape.ranks, .by_expert = o.by_expert});
  std::unique_ptr<jit::KernelStore> store;
  const jit::Nvrtc* nvrtc = jit::Nvrtc::find(nullptr);  // its version is part of what the store has
  const std::filesystem::path directory = store_directory(o.store);
  if (std::error_code error; nvrtc != nullptr && std::filesystem::is_directory(directory, error)) {
    store = std::make_unique<jit::KernelStore>(directory);
  }
  Json list = Json::array();
  std::string text = fmt::format("{} ({}): {:>8} {:>7} {:>6}  {}\n", card.title, card.arch, "shared", "threads", "regs",
                                 "kernel: operation");
  for (const cuda::ListedKernel& kernel : model.list()) {
    std::optional<jit::Entry> entry;
    if (store) {
      const jit::KernelRequest request = cuda::request_of(kernel.source, {std::string(card.arch), {}});
      entry = store->load(jit::key_of(request.compile, nvrtc->version()));
    }
    Json entries = Json::array();
    for (const plan::KernelEntry& e : kernel.source.entries) {
      int64_t registers = 0;
      if (entry) {
        const std::string& symbol = entry->lowered.at(e.expression);
        for (const jit::KernelUse& use : entry->kernels) registers = use.name == symbol ? use.registers : registers;
      }
      text +=
          fmt::format("{:>{}} {:>7} {:>6}  {}: {}\n", e.smem_bytes, card.title.size() + card.arch.size() + 13,
                      e.threads, registers > 0 ? std::to_string(registers) : "-", kernel.source.name, kernel.operation);
      Json row = {{"expression", e.expression}, {"threads", e.threads}, {"smem_bytes", e.smem_bytes}};
      if (registers > 0) row["registers"] = registers;
      entries.push_back(std::move(row));
    }
    list.push_back({{"name", kernel.source.name},
                    {"operation", kernel.operation},
                    {"stored", entry.has_value()},
                    {"entries", std::move(entries)}});
  }
  if (!o.json) return text;
  return Json{{"gpu", card.name}, {"arch", card.arch}, {"model", o.shape.model}, {"kernels", std::move(list)}}.dump(
             -1, ' ', false, Json::error_handler_t::replace) +
         "\n";
}

std::string layer_text(const Options& o) {
  plan::moe::Problem problem = o.shape.problem();
  problem.tokens = o.tokens;
  const plan::moe::LayerPlan plan = plan::moe::plan_layer(problem, o.shape.card(), {.only_implemented = o.reachable});
  const plan::moe::PrintOptions print = {.all = o.all};
  return o.json ? plan::moe::to_json(plan, print) + "\n" : plan::moe::to_text(plan, print);
}

}  // namespace

void add_plan(Command& app) {
  auto options = std::make_shared<Options>();
  Options& o = *options;
  Command command = app.add_command(
      "plan",
      "Show the kernel plan of an expert layer: tile, shared memory to the byte, predicted time, rejections;\n"
      "with --step, predict a whole step of a model, operation by operation;\n"
      "with --memory, what a model takes of a card's memory; with --kernels, every kernel that it runs\n\n"
      "  fourfold plan --gpu rtx-pro-6000 --model 397B-A17B --tokens 8\n"
      "  fourfold plan --step --gpu h200 --model 35B-A3B --mix A --tokens 64 --context 2048\n"
      "  fourfold plan --step --gpu h200 --model 35B-A3B --tokens 8192 --context 0 --prefill\n"
      "  fourfold plan --memory --gpu h200 --model 122B-A10B --mix C --max-num-seqs 16");
  o.shape.add_to(command, true);
  command.add_option("dir", o.directory, "With --step or --memory: a checkpoint directory, instead of --model");
  command.add_option("--tokens", o.tokens, "Tokens in the batch; of a step, its sequences, or the tokens of a prefill")
      .show_default()
      .range(0, plan::moe::kLimits.tokens);
  command.add_flag("--reachable", o.reachable, "Consider only kernels that are built");
  command.add_flag("--all", o.all, "Name every ranked and every rejected candidate (megabytes)");
  command.add_flag("--json", o.json, "Print JSON");
  const char* group = "Of a whole step";
  const char* memory = "Of the memory";
  command.add_flag("--step", o.step, "Predict a step of the model instead of one expert layer");
  command.add_option("--mix", o.mix, "Formats of the weights (default: A; --kernels: all): " + plan::step::mix_names())
      .group(group);
  command.add_option("--context", o.context, "Positions before these tokens")
      .show_default()
      .range(0, int64_t{1} << 28)
      .group(group);
  command.add_flag("--prefill", o.prefill, "The tokens are a prompt's");
  command.add_option("--draft", o.drafts, "Drafts of the MTP head in a round, verified together")
      .show_default()
      .range(0, 15)
      .group(group);
  command.add_option("--kv-cache-dtype", o.cache, "Keys and values: bf16 or fp8").show_default().group(group);
  command
      .add_option("--link", o.link,
                  "Between ranks: nvlink, pcie (peer copies), host (default: nvlink where the card has it, else pcie)")
      .group(group);
  command.add_flag("--enable-expert-parallel", o.by_expert, "Ranks have whole experts instead of a part of each");
  command.add_flag("--kernels", o.kernels,
                   "List every kernel that the model needs: operation, shared memory, registers");
  add_store_option(command, o.store);
  command.need("--store", "--kernels");
  for (const char* name : {"--context", "--prefill", "--link"}) {
    command.need(name, "--step");
  }
  command.need("--link", "--tp");
  command.need("--enable-expert-parallel", "--tp");
  command.add_flag("--memory", o.memory, "What weights, caches and work spaces take of the card's memory");
  command.add_option("--max-model-len", o.max_context, "Positions of a sequence (default: all that fit)")
      .range(2, 1 << 28)
      .group(memory);
  command.add_option("--max-num-seqs", o.sequences, "Sequences at once (default: 64 to 256, or what fits)")
      .range(1, 1024)
      .group(memory);
  command.add_option("--max-num-batched-tokens", o.step_tokens, "Tokens of a step (default: 8192, or what fits)")
      .range(1, 65536)
      .group(memory);
  command.add_option("--kv-cache-tokens", o.cache_tokens, "Positions of the cache in all (default: what is left)")
      .range(1, int64_t{1} << 30)
      .group(memory);
  add_memory_options(command, o.memory_args);
  for (const char* name : {"--max-model-len", "--max-num-seqs", "--max-num-batched-tokens", "--kv-cache-tokens"}) {
    command.need(name, "--memory");
  }
  command.exclude("--step", "--memory");
  for (const char* name : {"--experts", "--top-k", "--hidden", "--intermediate", "--activations", "--weights",
                           "--activation", "--shared", "--reachable", "--all"}) {
    command.exclude("--step", name);
    command.exclude("--kernels", name);
  }
  command.callback([options] {
    if (!options->mix.empty() && !options->step && !options->kernels && !options->memory) {
      fail("--mix: wanted --step, --kernels or --memory with it");
    }
    if (!options->step && !options->memory) {
      const char* needs = "wanted --step or --memory with it";
      if (!options->directory.empty()) fail("{}: {}", printable(options->directory), needs);
      if (options->by_expert && !options->kernels) fail("--enable-expert-parallel: {}, or --kernels", needs);
      if (options->memory_args.utilization) fail("--gpu-memory-utilization: {}", needs);
    }
    std::string text;
    try {
      text = options->memory    ? memory_text(*options)
             : options->kernels ? kernels_text(*options)
             : options->step    ? step_text(*options)
                                : layer_text(*options);
    } catch (const memory::NotEnough& error) {
      eprint("{}", error.table());
      throw;
    }
    std::fputs(text.c_str(), stdout);
  });
}

}  // namespace fourfold::cmd
