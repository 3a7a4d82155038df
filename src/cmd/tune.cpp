// fourfold tune: measures the planner's best candidates on the present GPU and stores the winners, which expert layers
// then use instead of the plans.
#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <set>
#include <tuple>

#include "base/check.h"
#include "base/json.h"
#include "base/progress.h"
#include "cmd/arguments.h"
#include "cmd/bench_kernels.h"
#include "cmd/commands.h"
#include "cmd/options.h"
#include "cmd/shape_options.h"
#include "cuda/measure.h"
#include "cuda/tuned.h"

namespace fourfold::cmd {
namespace {

constexpr double kClose = 1.10;  // the planner's pick is good when it is within this of the best

struct Options {
  ShapeOptions shape;
  GpuOptions gpu{.replays = 7};
  std::string tokens, routing = "uniform", emulate;
  int top = 6;
  bool json = false, all = false, dry = false;
};

struct Measured {
  plan::Candidate gate_up, down;
  double predicted_us = 0, us = 0;
};

struct Case {
  int64_t tokens = 0;
  std::vector<Measured> measured;  // the planner's own pick first
  const Measured& planned() const { return measured.front(); }
  const Measured& best() const {
    return *std::min_element(measured.begin(), measured.end(), [](auto& a, auto& b) { return a.us < b.us; });
  }
};

// The ways to cut the tokens: inline, or sorted into blocks of so many, in a form of rows. Tiles of one cut are
// compatible().
using Cut = std::tuple<int, plan::RowForm, int>;
Cut cut_of(const plan::Candidate& c) { return {c.tile.inline_routes, plan::row_form(c.tile), c.tile.tokens}; }

// The fastest predicted candidates of one cut, but not many of a kind: the ranking is full of near twins.
std::vector<const plan::Ranked*> best_of(const plan::GemmPlan& gemm, Cut cut, int count) {
  std::vector<const plan::Ranked*> list;
  std::map<std::tuple<plan::Family, int, int, int>, int> kinds;
  for (const plan::Ranked& r : gemm.ranked) {
    const plan::TileConfig& t = r.candidate.tile;
    if (!r.implemented || cut_of(r.candidate) != cut) continue;
    if (++kinds[{t.family, t.n, t.warps, r.candidate.ctas_per_sm}] > 1 && static_cast<int>(list.size()) * 2 > count) {
      continue;
    }
    list.push_back(&r);
    if (static_cast<int>(list.size()) == count) break;
  }
  return list;
}

// Cuts by the time of their best pair, fastest first.
std::vector<Cut> cuts_of(const plan::LayerPlan& layer) {
  std::map<Cut, double> up, total;
  for (const plan::Ranked& r : layer.gate_up.ranked) {
    if (r.implemented) up.emplace(cut_of(r.candidate), r.prediction.total_us);
  }
  for (const plan::Ranked& r : layer.down.ranked) {
    const auto it = up.find(cut_of(r.candidate));
    if (r.implemented && it != up.end()) total.emplace(it->first, it->second + r.prediction.total_us);
  }
  std::vector<std::pair<double, Cut>> order;
  for (const auto& [cut, us] : total) order.emplace_back(us, cut);
  std::sort(order.begin(), order.end());
  std::vector<Cut> cuts;
  for (const auto& [us, cut] : order) cuts.push_back(cut);
  return cuts;
}

class Tuner {
 public:
  Tuner(const Options& options, cuda::ExpertKernels& kernels, cuda::LayerBench& bench)
      : options_(options), kernels_(kernels), bench_(bench) {}

  // What will be measured for this batch; loads (compiles) nothing yet.
  struct Work {
    int64_t tokens = 0;
    plan::LayerPlan layer;
    struct Group {
      std::vector<const plan::Ranked*> ups, downs;
    };
    std::vector<Group> groups;
  };
  std::unique_ptr<Work> collect(int64_t tokens) const {
    auto work = std::make_unique<Work>();
    work->tokens = tokens;
    plan::MoeProblem p = kernels_.problem();
    p.tokens = tokens;
    work->layer = plan::plan_layer(p, kernels_.loader().card(), {.only_implemented = true, .explain = false});
    // Half of the effort in the best cut, the rest in the next three, and in the best one of W4A16 or W4A4 if all four
    // are of the other.
    int count = options_.top;
    std::set<plan::ActivationFormat> formats;
    for (const Cut& cut : cuts_of(work->layer)) {
      std::vector<const plan::Ranked*> ups = best_of(work->layer.gate_up, cut, count);
      const bool fresh = formats.insert(plan::activations_of(ups.front()->candidate.tile)).second;
      if (work->groups.size() >= 4 && !fresh) continue;
      work->groups.push_back({std::move(ups), best_of(work->layer.down, cut, count)});
      count = std::max(2, options_.top / 2);
    }
    return work;
  }

  Case measure(const Work& work) {
    Case c;
    c.tokens = work.tokens;
    bench_.prepare(work.tokens, cuda::parse_routing(options_.routing));
    const auto try_pair = [&](const plan::Candidate& up, const plan::Candidate& down) {
      const std::string name = plan::to_string(up) + " | " + plan::to_string(down);
      const auto known = std::find_if(c.measured.begin(), c.measured.end(), [&](const Measured& m) {
        return plan::to_string(m.gate_up) + " | " + plan::to_string(m.down) == name;
      });
      if (known != c.measured.end()) return known->us;
      const auto pair = kernels_.pair(up, down, work.tokens);
      if (!pair) return 1e30;
      Measured m{up, down, 0, bench_.time(*pair, options_.gpu.replays)};
      plan::LayerPlan layer = work.layer;
      if (plan::choose_by_name(&layer, plan::to_string(up), plan::to_string(down))) m.predicted_us = layer.predicted_us;
      c.measured.push_back(m);
      return m.us;
    };
    try_pair(work.layer.gate_up.chosen.candidate, work.layer.down.chosen.candidate);
    for (const Work::Group& group : work.groups) {
      if (group.ups.empty() || group.downs.empty()) continue;
      // Each gate-up beside the first down, then each down beside the best gate-up.
      const plan::Ranked* best = group.ups.front();
      double best_us = 1e30;
      for (const plan::Ranked* up : group.ups) {
        const double us = try_pair(up->candidate, group.downs.front()->candidate);
        if (us < best_us) best_us = us, best = up;
      }
      for (const plan::Ranked* down : group.downs) try_pair(best->candidate, down->candidate);
    }
    if (c.measured.empty()) fail("{} tokens: every kernel failed its self-test", work.tokens);
    return c;
  }

 private:
  const Options& options_;
  cuda::ExpertKernels& kernels_;
  cuda::LayerBench& bench_;
};

int64_t close_cases(const std::vector<Case>& cases) {
  return std::count_if(cases.begin(), cases.end(),
                       [](const Case& c) { return c.planned().us <= kClose * c.best().us; });
}

std::string_view format_of(const Measured& m) {
  return plan::activations_of(m.gate_up.tile) == plan::ActivationFormat::kNvfp4 ? "W4A4" : "W4A16";
}

void print_text(const Options& o, const std::vector<Case>& cases, const std::string& path) {
  if (!o.emulate.empty()) fmt::print("EMULATED plans of {}: times say nothing about that card\n", o.emulate);
  fmt::print("{:>7} {:>10} {:>10} {:>10} {:>7} {:>6} {:>6}  {}\n", "tokens", "predicted", "planned", "best", "ratio",
             "tried", "format", "the best: gate-up | down");
  for (const Case& c : cases) {
    fmt::print("{:>7} {:>10.2f} {:>10.2f} {:>10.2f} {:>7.3f} {:>6} {:>6}  {} | {}\n", c.tokens,
               c.planned().predicted_us, c.planned().us, c.best().us, c.planned().us / c.best().us, c.measured.size(),
               format_of(c.best()), plan::to_string(c.best().gate_up), plan::to_string(c.best().down));
    if (!o.all) continue;
    auto sorted = c.measured;
    std::sort(sorted.begin(), sorted.end(), [](auto& a, auto& b) { return a.us < b.us; });
    for (const Measured& m : sorted) {
      fmt::print("{:>7} {:>10.2f} {:>10.2f}   {} | {}\n", "", m.predicted_us, m.us, plan::to_string(m.gate_up),
                 plan::to_string(m.down));
    }
  }
  fmt::print("the planner's own pick is within {:.0f} % of the best in {} of {} cases\n", 100 * (kClose - 1),
             close_cases(cases), cases.size());
  fmt::print("fallbacks: {} kernels disabled\n", cuda::fallbacks().size());
  if (!path.empty()) fmt::print("stored in {}\n", path);
}

Json to_json(const std::vector<Case>& cases, const cuda::Device& device, const plan::MoeProblem& p,
             const std::string& emulated, const std::string& path) {
  const auto row = [](const Measured& m) {
    return Json{{"activations", plan::to_string(plan::activations_of(m.gate_up.tile))},
                {"gate_up", plan::to_string(m.gate_up)},
                {"down", plan::to_string(m.down)},
                {"predicted_us", m.predicted_us},
                {"us", m.us}};
  };
  Json list = Json::array();
  for (const Case& c : cases) {
    Json measured = Json::array();
    for (const Measured& m : c.measured) measured.push_back(row(m));
    list.push_back({{"tokens", c.tokens},
                    {"planned", row(c.planned())},
                    {"best", row(c.best())},
                    {"ratio", c.planned().us / c.best().us},
                    {"measured", measured}});
  }
  return {{"device", device.info().name},
          {"model", p.name},
          {"activations", plan::to_string(p.activations)},
          {"emulated", emulated},
          {"cases", list},
          {"close", close_cases(cases)},
          {"count", cases.size()},
          {"fallbacks", cuda::fallbacks().size()},
          {"stored", path}};
}

void run(Options o) {
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
  cuda::parse_routing(o.routing);
  if (!o.shape.any_shape()) o.shape.model = "35B-A3B";
  const plan::MoeProblem problem = o.shape.problem();
  const cuda::Device device(o.gpu.device);
  jit::KernelStore store(o.gpu.store_directory());
  cuda::KernelOptions options;
  options.max_tokens = counts.back();
  options.threads = o.gpu.threads;
  options.tuned = false;
  if (!o.emulate.empty()) options.emulate = &plan::find_gpu(o.emulate);
  cuda::ExpertKernels kernels(device, store, problem, options);
  cuda::LayerBench bench(kernels, counts.back());
  Tuner tuner(o, kernels, bench);

  std::vector<std::unique_ptr<Tuner::Work>> work;
  std::vector<std::pair<plan::Pass, plan::Candidate>> candidates;
  for (const int64_t tokens : counts) {
    work.push_back(tuner.collect(tokens));
    for (const auto& group : work.back()->groups) {
      for (const plan::Ranked* r : group.ups) candidates.emplace_back(plan::Pass::kGateUp, r->candidate);
      for (const plan::Ranked* r : group.downs) candidates.emplace_back(plan::Pass::kDown, r->candidate);
    }
  }
  kernels.load_all(candidates);
  std::vector<Case> cases;
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
    for (const Case& c : cases) {
      table.set(c.tokens, {plan::to_string(c.best().gate_up), plan::to_string(c.best().down), c.best().us,
                           std::string(plan::to_string(plan::activations_of(c.best().gate_up.tile)))});
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
  options->shape.add_shape_to(command);
  command.add_option("--tokens", options->tokens, "Token buckets, separated by commas (default: all)");
  command.add_option("--top", options->top, "Candidates of each GEMM to measure for the best cut of the tokens")
      .show_default()
      .range(1, 200);
  command.add_option("--routing", options->routing, "uniform or power-law").show_default();
  options->gpu.add_to(command);
  command.add_option(
      "--emulate", options->emulate,
      "Tune another card's candidates as `bench kernels --emulate` runs them: a check that stores nothing");
  command.add_flag("--dry-run", options->dry, "Measure and print, store nothing");
  command.add_flag("--all", options->all, "Print every measurement");
  command.add_flag("--json", options->json, "Print JSON");
  command.callback([options] { run(*options); });
}

}  // namespace fourfold::cmd
