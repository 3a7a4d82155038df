#include "cmd/bench_kernels.h"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <memory>
#include <optional>

#include "base/check.h"
#include "base/json.h"
#include "base/progress.h"
#include "cmd/arguments.h"
#include "cmd/bench_kernels_ops.h"
#include "cmd/commands.h"
#include "cmd/kernel_list.h"
#include "cmd/options.h"
#include "cmd/shape_options.h"
#include "cuda/backend/backend.h"
#include "measure/layer_bench.h"
#include "model/config.h"
#include "plan/step/step.h"

namespace fourfold::cmd {
namespace {

struct Options {
  ShapeOptions shape;
  GpuOptions gpu{.replays = 15};
  std::string tokens = "1,8,64,512,8192", routing = "uniform", compare, emulate;
  std::string mix;  // empty: A
  int64_t layers = 12, context = 2048;
  bool json = false, planned = false, check = false, ops = false;
};

struct Result {
  int64_t tokens = 0;
  double us = 0, predicted_us = 0, floor_us = 0;
  measure::LayerBench::Work work;
  bool cold = true, tuned = false;
  std::string gate_up, down;
  std::string_view formats;      // W4A16 or W4A4
  std::optional<double> before;  // us of the compared file
};

// What an earlier run printed with --json.
class Earlier {
 public:
  // An Error when the file holds anything else.
  explicit Earlier(const std::string& path) : json_(parse_json_file(path)) {
    const auto field = [&](const char* name) { return json_.is_object() ? json_.value(name, Json()) : Json(); };
    if (!field("problem").is_object() || !field("results").is_array()) {
      fail("{}: no result of `fourfold bench kernels --json`; wanted an object with problem and results", path);
    }
  }

  // Microseconds of the same layer and batch; nothing when it was not measured.
  std::optional<double> find(const plan::moe::Problem& p, const std::string& routing, int64_t tokens) const {
    const Json& q = json_["problem"];
    const bool same = is(q, "experts", p.experts) && is(q, "top_k", p.top_k) && is(q, "hidden", p.hidden) &&
                      is(q, "intermediate", p.intermediate) && is(q, "routing", routing) &&
                      q.value("activations", Json("bf16")) == plan::moe::to_string(p.activations);
    if (!same) return std::nullopt;
    for (const Json& row : json_["results"]) {
      if (!row.is_object() || !is(row, "tokens", tokens)) continue;
      const auto us = row.find("us");
      if (us != row.end() && us->is_number()) return us->get<double>();
    }
    return std::nullopt;
  }

 private:
  static bool is(const Json& object, const char* field, const Json& value) {
    const auto it = object.find(field);
    return it != object.end() && *it == value;
  }

  Json json_;
};

void print_text(const Options& o, const cuda::Device& device, const plan::moe::Problem& p,
                const measure::Ceilings& ceilings, const std::vector<Result>& results) {
  fmt::print(
      "{}, {} experts, top-{}, hidden {}, intermediate {}{}, {} routing{}\n", device.info().name, p.experts, p.top_k,
      p.hidden, p.intermediate,
      p.shared_slices() > 0 ? fmt::format(", shared expert as {} more", p.shared_slices()) : "", o.routing,
      o.emulate.empty() ? "" : fmt::format(", EMULATED plans of {}: times say nothing about that card", o.emulate));
  fmt::print("measured in this run: reads {:.3f} TB/s, {} {:.0f} TFLOP/s\n", ceilings.read_tbs,
             ceilings.matrix_instruction, ceilings.matrix_tflops);
  fmt::print("{:>7} {:>10} {:>10} {:>9} {:>8} {:>8} {:>9} {:>6}  {}\n", "tokens", "us", "predicted", "GB/s", "of read",
             "TFLOP/s", "of matrix", "format", o.compare.empty() ? "kernels" : "before, kernels");
  for (const Result& r : results) {
    const double gbs = r.work.bytes / r.us * 1e-3, tflops = r.work.flops / r.us * 1e-6;
    std::string before;
    if (!o.compare.empty()) {
      before = r.before ? fmt::format("{:.2f} us ({:+.1f} %)  ", *r.before, 100 * (r.us / *r.before - 1))
                        : std::string("not measured  ");
    }
    fmt::print("{:>7} {:>10.2f} {:>10.2f} {:>9.0f} {:>8.2f} {:>8.1f} {:>9.2f} {:>6}  {}{} | {}{}{}\n", r.tokens, r.us,
               r.predicted_us, gbs, gbs / ceilings.read_tbs * 1e-3, tflops, tflops / ceilings.matrix_tflops, r.formats,
               before, r.gate_up, r.down, r.tuned ? " (tuned)" : "", r.cold ? "" : " (weights partly from L2)");
  }
  const auto disabled = cuda::fallbacks();
  fmt::print("fallbacks: {} kernels disabled, {} token buckets changed\n", disabled.size(), cuda::fallback_buckets());
}

Json to_json(const Options& o, const cuda::Device& device, const plan::moe::Problem& p,
             const measure::Ceilings& ceilings, const std::vector<Result>& results) {
  Json list = Json::array();
  for (const Result& r : results) {
    const double gbs = r.work.bytes / r.us * 1e-3, tflops = r.work.flops / r.us * 1e-6;
    Json row = {{"tokens", r.tokens},
                {"us", r.us},
                {"predicted_us", r.predicted_us},
                {"gb_per_s", gbs},
                {"fraction_of_read", gbs / ceilings.read_tbs * 1e-3},
                {"tflops", tflops},
                {"fraction_of_matrix", tflops / ceilings.matrix_tflops},
                {"bytes", r.work.bytes},
                {"flops", r.work.flops},
                {"touched_experts", r.work.touched},
                {"floor_us", r.floor_us},
                {"cold", r.cold},
                {"tuned", r.tuned},
                {"formats", r.formats},
                {"gate_up", r.gate_up},
                {"down", r.down}};
    if (r.before) row["before_us"] = *r.before;
    list.push_back(row);
  }
  Json disabled = Json::array();
  for (const cuda::Fallback& f : cuda::fallbacks()) {
    disabled.push_back({{"kernel", f.kernel}, {"device", f.device}, {"reason", f.reason}});
  }
  return {{"device", device.info().name},
          {"driver", device.driver().version()},
          {"emulated", o.emulate},
          {"read_tbs", ceilings.read_tbs},
          {"matrix_tflops", ceilings.matrix_tflops},
          {"matrix_instruction", ceilings.matrix_instruction},
          {"problem",
           {{"model", p.name},
            {"experts", p.experts},
            {"top_k", p.top_k},
            {"hidden", p.hidden},
            {"intermediate", p.intermediate},
            {"activations", plan::moe::to_string(p.activations)},
            {"shared_slices", p.shared_slices()},
            {"routing", o.routing}}},
          {"results", list},
          {"fallbacks", disabled},
          {"fallback_buckets", cuda::fallback_buckets()}};
}

std::string mix_of(const Options& o) { return o.mix.empty() ? "A" : o.mix; }

// Every kernel of a whole model, not only those of its experts.
void check(const Options& o) {
  const std::string model = o.shape.model.empty() ? "35B-A3B" : o.shape.model;
  if (!is_whole_model(model)) fail("--check: wanted --model with a checkpoint directory or a whole model");
  std::error_code error;
  const std::string mix = std::filesystem::is_directory(model, error) ? "" : mix_of(o);
  const Json report =
      ModelKernels(cuda::card_memory(o.gpu.device).info, model, mix).test(o.gpu.device, o.gpu.store_directory());
  if (o.json) {
    fmt::print("{}\n", report.dump(1));
  } else {
    fmt::print("{}: {} kernels of {} tested, {} wrong\n", report["device"].get<std::string>(),
               report["kernels"].get<int64_t>(), model, report["wrong"].size());
    for (const Json& wrong : report["wrong"]) {
      fmt::print("{}: {}\n", wrong["kernel"].get<std::string>(), wrong["reason"].get<std::string>());
    }
  }
  if (!report["wrong"].empty()) throw ExitStatus{1};
}

void run(Options o) {
  if (!o.mix.empty() && !o.check && !o.ops) fail("--mix {}: wanted --check or --ops with it", o.mix);
  if (o.check) return check(o);
  if (o.ops) {
    const std::string model = o.shape.model.empty() ? "35B-A3B" : o.shape.model;
    if (!is_whole_model(model)) fail("--ops: wanted --model with a checkpoint directory or a whole model");
    return bench_operations({model, mix_of(o), o.layers, o.gpu.device, o.gpu.threads}, parse_tokens(o.tokens),
                            o.context, o.json);
  }
  const std::vector<int64_t> counts = parse_tokens(o.tokens);
  const measure::RoutingPattern routing = measure::parse_routing(o.routing);
  if (!o.shape.any_shape()) o.shape.model = "35B-A3B";
  const plan::moe::Problem problem = o.shape.problem();
  std::optional<Earlier> before;
  if (!o.compare.empty()) before.emplace(o.compare);
  cuda::KernelOptions options;
  options.max_tokens = counts.back();
  options.load.threads = o.gpu.threads;
  options.tuned = !o.planned;
  if (!o.emulate.empty()) options.load.emulate = &plan::find_gpu(o.emulate);
  const cuda::Device device(o.gpu.device);
  jit::KernelStore store(o.gpu.store_directory());
  cuda::ExpertKernels kernels(device, store, problem, options);
  measure::LayerBench bench(kernels, counts.back());

  std::vector<Result> results;
  Progress progress("measuring", counts.size(), "batches");
  for (const int64_t tokens : counts) {
    const cuda::PlannedBucket& bucket = kernels.bucket(tokens);
    Result r;
    r.tokens = tokens;
    r.work = bench.prepare(tokens, routing);
    r.cold = bench.cold(tokens);
    r.us = bench.time(bucket.pair, o.gpu.replays);
    r.predicted_us = bucket.plan.predicted_us;
    r.tuned = bucket.tuned;
    r.gate_up = plan::moe::to_string(bucket.pair.gate_up);
    r.down = plan::moe::to_string(bucket.pair.down);
    r.formats = bucket.pair.fp4() ? "W4A4" : "W4A16";
    if (before) r.before = before->find(problem, o.routing, tokens);
    results.push_back(std::move(r));
    progress.advance(1);
  }
  progress.finish();
  // Behind the layers: the card is at its power limit in the matrix loop, and small layers would start at a lower
  // clock.
  const measure::Ceilings ceilings = measure::measure_ceilings(kernels.loader());
  for (Result& r : results) {
    r.floor_us = std::max(r.work.bytes / ceilings.read_tbs, r.work.flops / ceilings.matrix_tflops) * 1e-6;
  }
  if (o.json) {
    fmt::print("{}\n", to_json(o, device, problem, ceilings, results).dump(1));
  } else {
    print_text(o, device, problem, ceilings, results);
  }
}

}  // namespace

std::vector<int64_t> parse_tokens(const std::string& text) {
  const int64_t most = plan::token_buckets().back();
  std::vector<int64_t> counts;
  for (size_t at = 0; at <= text.size();) {
    const size_t end = std::min(text.find(',', at), text.size());
    int64_t value = 0;
    const auto [stop, error] = std::from_chars(text.data() + at, text.data() + end, value);
    if (error != std::errc() || stop != text.data() + end || value < 1 || value > most) {
      fail("--tokens '{}': '{}' is no token count, wanted numbers from 1 to {} separated by commas", printable(text),
           printable(text.substr(at, end - at)), most);
    }
    counts.push_back(value);
    at = end + 1;
  }
  std::sort(counts.begin(), counts.end());
  counts.erase(std::unique(counts.begin(), counts.end()), counts.end());
  return counts;
}

void add_bench_kernels(Command& bench_app) {
  auto options = std::make_shared<Options>();
  Command command = bench_app.add_command(
      "kernels", "Expert layers on a GPU: time, bytes and flops, as fractions of measured bandwidth and matrix rate");
  options->shape.add_shape_to(command, true);
  command.add_option("--tokens", options->tokens, "Token counts, separated by commas").show_default();
  command.add_option("--routing", options->routing, "uniform or power-law (a few experts have most tokens)")
      .show_default();
  options->gpu.add_to(command);
  command.add_option("--emulate", options->emulate,
                     "Run the plans of this card, within its shared memory, with emulated FP4 multiplications");
  command.add_flag("--planned", options->planned, "Ignore what `fourfold tune` stored");
  command.add_flag(
      "--check", options->check,
      "Instead: the self-tests of every kernel that the whole model runs; exit status 1 when one is wrong");
  command.add_flag("--ops", options->ops,
                   "Instead: every operation of the whole model by itself, and its kernels; up to 256 tokens are "
                   "sequences, more are a prompt");
  command.add_option(
      "--mix", options->mix,
      "With --check or --ops, of a shape: formats of the weights (default: A), " + plan::step::mix_names());
  command.add_option("--layers", options->layers, "With --ops, of a shape: so many of its layers")
      .show_default()
      .range(1, model::kMaxLayers);
  command.add_option("--context", options->context, "With --ops: positions of the sequences before the step")
      .show_default()
      .range(0, 1 << 20);
  command.add_option("--compare", options->compare, "An earlier --json output: print the differences");
  command.add_flag("--json", options->json, "Print JSON");
  for (const char* only : {"--layers", "--context"}) command.need(only, "--ops");
  for (const char* other : {"--routing", "--emulate", "--planned", "--compare", "--store", "--check"}) {
    command.exclude("--ops", other);
  }
  for (const char* other : {"--tokens", "--routing", "--emulate", "--planned", "--compare"}) {
    command.exclude("--check", other);
  }
  command.callback([options] { run(*options); });
}

}  // namespace fourfold::cmd
