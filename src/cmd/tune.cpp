// fourfold tune: measures the planner's best candidates on the present GPU and stores the winners, which expert layers
// then use instead of the plans.
#include <algorithm>
#include <cstdio>
#include <memory>

#include "base/check.h"
#include "base/json.h"
#include "base/progress.h"
#include "cmd/arguments.h"
#include "cmd/bench_kernels.h"
#include "cmd/commands.h"
#include "cmd/kernel_list.h"
#include "cmd/options.h"
#include "cmd/shape_options.h"
#include "cmd/tune_products.h"
#include "cuda/moe/tuned.h"
#include "measure/tuner.h"
#include "model/config.h"
#include "plan/step/step.h"

namespace fourfold::cmd {
namespace {

constexpr double kClose = 1.10;  // the planner's pick is good when it is within this of the best

struct Options {
  ShapeOptions shape;
  GpuOptions gpu{.replays = 7};
  std::string tokens, routing = "uniform", emulate;
  int top = 6;
  std::string mix = "A";
  int64_t layers = 12, context = 128;
  bool json = false, all = false, dry = false, products = false;
};

int64_t close_cases(const std::vector<measure::TunedCase>& cases) {
  return std::count_if(cases.begin(), cases.end(),
                       [](const measure::TunedCase& c) { return c.planned().us <= kClose * c.best().us; });
}

std::string_view format_of(const measure::Measured& m) {
  return plan::moe::activations_of(m.gate_up.tile) == plan::moe::ActivationFormat::kNvfp4 ? "W4A4" : "W4A16";
}

void print_text(const Options& o, const std::vector<measure::TunedCase>& cases, const std::string& path) {
  if (!o.emulate.empty()) fmt::print("EMULATED plans of {}: times say nothing about that card\n", o.emulate);
  fmt::print("{:>7} {:>10} {:>10} {:>10} {:>7} {:>6} {:>6}  {}\n", "tokens", "predicted", "planned", "best", "ratio",
             "tried", "format", "the best: gate-up | down");
  for (const measure::TunedCase& c : cases) {
    fmt::print("{:>7} {:>10.2f} {:>10.2f} {:>10.2f} {:>7.3f} {:>6} {:>6}  {} | {}\n", c.tokens,
               c.planned().predicted_us, c.planned().us, c.best().us, c.planned().us / c.best().us, c.measured.size(),
               format_of(c.best()), plan::moe::to_string(c.best().gate_up), plan::moe::to_string(c.best().down));
    if (!o.all) continue;
    auto sorted = c.measured;
    std::sort(sorted.begin(), sorted.end(), [](auto& a, auto& b) { return a.us < b.us; });
    for (const measure::Measured& m : sorted) {
      fmt::print("{:>7} {:>10.2f} {:>10.2f}   {} | {}\n", "", m.predicted_us, m.us, plan::moe::to_string(m.gate_up),
                 plan::moe::to_string(m.down));
    }
  }
  fmt::print("the planner's own pick is within {:.0f} % of the best in {} of {} cases\n", 100 * (kClose - 1),
             close_cases(cases), cases.size());
  fmt::print("fallbacks: {} kernels disabled\n", cuda::fallbacks().size());
  if (!path.empty()) fmt::print("stored in {}\n", path);
}

Json to_json(const std::vector<measure::TunedCase>& cases, const cuda::Device& device, const plan::moe::Problem& p,
             const std::string& emulated, const std::string& path) {
  const auto row = [](const measure::Measured& m) {
    return Json{{"activations", plan::moe::to_string(plan::moe::activations_of(m.gate_up.tile))},
                {"gate_up", plan::moe::to_string(m.gate_up)},
                {"down", plan::moe::to_string(m.down)},
                {"predicted_us", m.predicted_us},
                {"us", m.us}};
  };
  Json list = Json::array();
  for (const measure::TunedCase& c : cases) {
    Json measured = Json::array();
    for (const measure::Measured& m : c.measured) measured.push_back(row(m));
    list.push_back({{"tokens", c.tokens},
                    {"planned", row(c.planned())},
                    {"best", row(c.best())},
                    {"ratio", c.planned().us / c.best().us},
                    {"measured", measured}});
  }
  return {{"device", device.info().name},
          {"model", p.name},
          {"activations", plan::moe::to_string(p.activations)},
          {"emulated", emulated},
          {"cases", list},
          {"close", close_cases(cases)},
          {"count", cases.size()},
          {"fallbacks", cuda::fallbacks().size()},
          {"stored", path}};
}

void run_products(const Options& o) {
  TuneProducts products;
  products.model = o.shape.model.empty() ? "35B-A3B" : o.shape.model;
  if (!is_whole_model(products.model)) fail("--products: wanted --model with a checkpoint directory or a whole model");
  products.mix = o.mix;
  products.layers = o.layers;
  products.context = o.context;
  products.rows = parse_tokens(o.tokens.empty() ? "1,2,4,8" : o.tokens);
  products.gpu = o.gpu;
  products.json = o.json;
  products.all = o.all;
  products.dry = o.dry;
  tune_products(products);
}

void run(Options o) {
  if (o.products) return run_products(o);
  if (o.tokens.empty()) {
    for (const int64_t bucket : plan::token_buckets())
      o.tokens += fmt::format("{}{}", o.tokens.empty() ? "" : ",", bucket);
  }
  const std::vector<int64_t> counts = parse_tokens(o.tokens);
  for (const int64_t tokens : counts) {
    if (plan::bucket_of(tokens) != tokens) {
      fail("--tokens {}: wanted token buckets (powers of two up to {})", tokens, plan::token_buckets().back());
    }
  }
  const measure::RoutingPattern routing = measure::parse_routing(o.routing);
  if (!o.shape.any_shape()) o.shape.model = "35B-A3B";
  const plan::moe::Problem problem = o.shape.problem();
  const cuda::Device device(o.gpu.device);
  jit::KernelStore store(o.gpu.store_directory());
  cuda::KernelOptions options;
  options.max_tokens = counts.back();
  options.load.threads = o.gpu.threads;
  options.tuned = false;
  if (!o.emulate.empty()) options.load.emulate = &plan::find_gpu(o.emulate);
  cuda::ExpertKernels kernels(device, store, problem, options);
  measure::LayerBench bench(kernels, counts.back());
  measure::Tuner tuner(kernels, bench, routing, o.top, o.gpu.replays);

  std::vector<std::unique_ptr<measure::Tuner::Work>> work;
  std::vector<std::pair<plan::moe::Pass, plan::moe::Candidate>> candidates;
  for (const int64_t tokens : counts) {
    work.push_back(tuner.collect(tokens));
    for (auto& candidate : work.back()->candidates()) candidates.push_back(candidate);
  }
  kernels.load_all(candidates);
  std::vector<measure::TunedCase> cases;
  Progress progress("measuring", work.size(), "token counts");
  for (const auto& w : work) {
    cases.push_back(tuner.measure(*w));
    progress.advance(1);
  }
  progress.finish();

  std::string path;
  if (!o.dry && o.emulate.empty()) {
    const std::string identity = cuda::tuned_identity(device, problem);
    cuda::TunedTable table = cuda::TunedTable::load(store.directory(), identity).value_or(cuda::TunedTable(identity));
    for (const measure::TunedCase& c : cases) {
      table.set(c.tokens, {plan::moe::to_string(c.best().gate_up), plan::moe::to_string(c.best().down), c.best().us,
                           std::string(plan::moe::to_string(plan::moe::activations_of(c.best().gate_up.tile)))});
    }
    table.save(store.directory());
    path = table.path().string();
  }
  if (o.json) {
    fmt::print("{}\n", to_json(cases, device, problem, o.emulate, path).dump(1));
  } else {
    print_text(o, cases, path);
  }
}

}  // namespace

void add_tune(Command& app) {
  auto options = std::make_shared<Options>();
  Command command = app.add_command(
      "tune", "Measure the planner's best expert kernels on this GPU and store the winners for later runs");
  options->shape.add_shape_to(command, true);
  command.add_option("--tokens", options->tokens,
                     "Token buckets, separated by commas (default: all; with --products 1,2,4,8, rows of a step)");
  command.add_option("--top", options->top, "Candidates of each GEMM to measure for the best cut of the tokens")
      .show_default()
      .range(1, 200);
  command.add_option("--routing", options->routing, "uniform or power-law").show_default();
  options->gpu.add_to(command);
  command.add_option(
      "--emulate", options->emulate,
      "Tune another card's candidates as `bench kernels --emulate` runs them: a check that stores nothing");
  command.add_flag("--products", options->products,
                   "Instead: the tiles of products of few rows, each measured in whole steps of the model");
  command.add_option("--mix", options->mix, "With --products, of a shape: formats, " + plan::step::mix_names())
      .show_default();
  command.add_option("--layers", options->layers, "With --products, of a shape: so many of its layers")
      .show_default()
      .range(1, model::kMaxLayers);
  command.add_option("--context", options->context, "With --products: positions before the steps")
      .show_default()
      .range(0, 1 << 20);
  command.add_flag("--dry-run", options->dry, "Measure and print, store nothing");
  command.add_flag("--all", options->all, "Print every measurement");
  command.add_flag("--json", options->json, "Print JSON");
  for (const char* only : {"--mix", "--layers", "--context"}) command.need(only, "--products");
  for (const char* other : {"--top", "--routing", "--emulate", "--store"}) command.exclude("--products", other);
  command.callback([options] { run(*options); });
}

}  // namespace fourfold::cmd
