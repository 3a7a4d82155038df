// fourfold warm: compiles every kernel that a model needs on a card, without one, and packs them for other machines.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <map>
#include <memory>
#include <optional>
#include <set>

#include "base/check.h"
#include "base/json.h"
#include "cmd/arguments.h"
#include "cmd/commands.h"
#include "cmd/kernel_list.h"
#include "cmd/options.h"
#include "cmd/shape_options.h"
#include "cuda/device/build.h"
#include "cuda/device/device.h"
#include "cuda/moe/sources.h"
#include "plan/step/step.h"

namespace fourfold::cmd {
namespace {

struct Options {
  ShapeOptions shape;
  std::string store, pack, import, mix;
  uint64_t limit_mb = jit::kDefaultStoreLimit >> 20;
  int threads = 0;
  bool by_expert = false;
  bool json = false;
};

// What is compiled, and for what: a whole model where one is named, with the expert layer that the other options
// describe (as `plan` and `bench kernels` take it), or that layer alone.
class Wanted {
 public:
  explicit Wanted(const Options& options) : card_(options.shape.card()) {
    const std::string& model = options.shape.model;
    const bool whole = is_whole_model(model);
    if (!options.mix.empty() && !whole) fail("--mix {}: wanted --model with a whole model", options.mix);
    if (options.by_expert && !whole) fail("--enable-expert-parallel: wanted --model with a whole model");
    if (whole) {
      model_ = std::make_unique<ModelKernels>(
          cuda::info_of(card_), model, options.mix,
          model::RankOptions{.ranks = options.shape.ranks, .by_expert = options.by_expert});
    }
    if (!whole || options.shape.any_detail()) problem_ = options.shape.problem();
  }

  const plan::Gpu& card() const { return card_; }
  std::vector<plan::KernelSource> sources(const std::set<std::string>& refused) {
    std::vector<plan::KernelSource> all;
    const auto add = [&](plan::KernelSource source, const std::string& operation) {
      if (operations_.emplace(source.name, operation).second || !contains(all, source.name)) {
        all.push_back(std::move(source));
      }
    };
    if (model_ != nullptr) {
      for (cuda::ListedKernel& kernel : model_->list(refused)) add(std::move(kernel.source), kernel.operation);
    }
    if (problem_) {
      for (plan::KernelSource& source : cuda::layer_sources(*problem_, card_, refused))
        add(std::move(source), "experts");
    }
    return all;
  }
  const std::string& operation(const std::string& name) const { return operations_.at(name); }

 private:
  static bool contains(const std::vector<plan::KernelSource>& all, const std::string& name) {
    return std::any_of(all.begin(), all.end(), [&](const plan::KernelSource& s) { return s.name == name; });
  }
  const plan::Gpu& card_;
  std::unique_ptr<ModelKernels> model_;
  std::optional<plan::moe::Problem> problem_;
  std::map<std::string, std::string> operations_;  // by name of the source
};

void print_text(const std::vector<jit::BuiltKernel>& kernels, const Wanted& wanted, const jit::KernelStore& store,
                int64_t spills, double seconds) {
  size_t compiled = 0;
  fmt::print("{:>5} {:>6} {:>6} {:>7} {:>9} {:>8}  {}\n", "regs", "spills", "stack", "static", "code", "seconds",
             "kernel: operation");
  for (const jit::BuiltKernel& kernel : kernels) {
    compiled += kernel.compiled;
    for (const jit::KernelUse& use : kernel.entry.kernels) {
      fmt::print("{:>5} {:>6} {:>6} {:>7} {:>9} {:>8}  {}: {}\n", use.registers, kernel.entry.spill_bytes,
                 use.stack_bytes, use.shared_bytes, use.code_bytes,
                 kernel.compiled ? fmt::format("{:.1f}", kernel.seconds) : std::string("stored"), kernel.name,
                 wanted.operation(kernel.name));
    }
  }
  fmt::print("{} kernels, {} compiled, {} spill bytes, {:.1f} s; store {} ({:.1f} MB)\n", kernels.size(), compiled,
             spills, seconds, store.directory().string(), static_cast<double>(store.bytes()) / 1e6);
}

void run(const Options& options) {
  const bool compile = options.shape.any_shape();
  if (!compile && options.import.empty()) fail("nothing to do: wanted --model (or a shape), or --import FILE");
  jit::KernelStore store(store_directory(options.store), options.limit_mb << 20);
  size_t imported = 0;
  if (!options.import.empty()) imported = store.import_pack(options.import);

  const auto start = std::chrono::steady_clock::now();
  std::vector<jit::BuiltKernel> kernels;
  std::string arch;
  std::unique_ptr<Wanted> wanted;
  if (compile) {
    wanted = std::make_unique<Wanted>(options);
    arch = wanted->card().arch;
    kernels =
        cuda::build_all(store, arch, [&](const std::set<std::string>& refused) { return wanted->sources(refused); },
                        {.threads = options.threads});
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  // What was compiled stays, so that a second call with more room finds it.
  if (const uint64_t needed = store.used_bytes(); needed > store.limit()) {
    fail("--limit-mb {}: these {} kernels need {} MB", options.limit_mb, kernels.size(),
         (needed + (1 << 20) - 1) >> 20);
  }
  int64_t spills = 0, stack = 0;
  std::vector<jit::Key> keys;
  for (const jit::BuiltKernel& kernel : kernels) {
    spills += kernel.entry.spill_bytes;
    for (const jit::KernelUse& use : kernel.entry.kernels) stack += use.stack_bytes;
    keys.push_back(kernel.key);
  }
  if (!options.pack.empty()) {
    if (keys.empty()) keys = store.keys();
    store.write_pack(options.pack, keys);
  }

  if (!options.json) {
    if (!options.import.empty()) fmt::print("imported {} kernels from {}\n", imported, options.import);
    if (compile) print_text(kernels, *wanted, store, spills, seconds);
    if (!options.pack.empty()) fmt::print("packed {} kernels into {}\n", keys.size(), options.pack);
    return;
  }
  size_t compiled = 0;
  Json list = Json::array();
  for (const jit::BuiltKernel& kernel : kernels) {
    compiled += kernel.compiled;
    Json uses = Json::array();
    for (const jit::KernelUse& use : kernel.entry.kernels) {
      uses.push_back({{"symbol", use.name},
                      {"registers", use.registers},
                      {"stack_bytes", use.stack_bytes},
                      {"shared_bytes", use.shared_bytes},
                      {"code_bytes", use.code_bytes}});
    }
    list.push_back({{"name", kernel.name},
                    {"operation", wanted->operation(kernel.name)},
                    {"key", kernel.key},
                    {"compiled", kernel.compiled},
                    {"seconds", kernel.seconds},
                    {"spill_bytes", kernel.entry.spill_bytes},
                    {"symbols", uses}});
  }
  const Json out = {{"arch", arch},
                    {"kernels", kernels.size()},
                    {"compiled", compiled},
                    {"imported", imported},
                    {"spill_bytes", spills},
                    {"local_bytes", stack},
                    {"seconds", seconds},
                    {"compiler", kernels.empty() ? "" : kernels.front().entry.compiler},
                    {"store", store.directory().string()},
                    {"store_bytes", store.bytes()},
                    {"damaged", store.counters().damaged.load()},
                    {"list", list}};
  fmt::print("{}\n", out.dump(-1, ' ', false, Json::error_handler_t::replace));
}

}  // namespace

void add_warm(Command& app) {
  auto options = std::make_shared<Options>();
  Command command = app.add_command(
      "warm", "Compile every kernel that a model needs on a card (no GPU needed), pack them, or import a pack");
  options->shape.add_to(command, true);
  command.add_option("--mix", options->mix,
                     "Of a model's shape, formats of the weights (default: all): " + plan::step::mix_names());
  command.add_flag("--enable-expert-parallel", options->by_expert,
                   "Ranks have whole experts instead of a part of each");
  command.need("--enable-expert-parallel", "--tp");
  add_store_option(command, options->store);
  command.add_option("--limit-mb", options->limit_mb, "Size that the store may have").show_default().range(1, 1 << 20);
  command.add_option("--pack", options->pack, "Write the kernels into one file for another machine");
  command.add_option("--import", options->import, "Take over the kernels of a pack");
  command.add_option("--threads", options->threads, "Compilations at a time (default: the processors)").range(0, 1024);
  command.add_flag("--json", options->json, "Print JSON");
  command.callback([options] { run(*options); });
}

}  // namespace fourfold::cmd
