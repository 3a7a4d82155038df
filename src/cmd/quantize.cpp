// fourfold quantize: a checkpoint to NVFP4.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/console.h"
#include "base/interrupt.h"
#include "base/json.h"
#include "cmd/arguments.h"
#include "cmd/commands.h"
#include "cmd/options.h"
#include "model/quantizer.h"

namespace fourfold::cmd {
namespace {

using model::QuantizeResult;
using model::TensorError;

struct Options {
  std::string input, output, form = "modelopt", search = "max";
  model::QuantizeOptions quantize;
  double shard_gb = 5.0;
  bool json = false;
};

// "layers.3.mlp.experts.7.up_proj" -> "layers.*.mlp.experts.*.up_proj"
std::string pattern_of(const std::string& module) {
  std::string pattern;
  bool digits = false;
  for (char character : module) {
    const bool digit = character >= '0' && character <= '9' && (digits || (!pattern.empty() && pattern.back() == '.'));
    if (digit && !digits) pattern += '*';
    if (!digit) pattern += character;
    digits = digit;
  }
  return pattern;
}

struct Group {
  int64_t modules = 0;
  TensorError sum;
  double worst = 0;
};

std::map<std::string, Group> grouped(const QuantizeResult& result) {
  std::map<std::string, Group> groups;
  for (const TensorError& error : result.errors) {
    Group& group = groups[pattern_of(error.module)];
    ++group.modules;
    group.sum.elements += error.elements;
    group.sum.squared_error += error.squared_error;
    group.sum.energy += error.energy;
    group.worst = std::max(group.worst, error.relative_rms());
  }
  return groups;
}

void print_json(const QuantizeResult& result, double seconds) {
  Json json;
  json["quantized"] = result.quantized;
  json["converted"] = result.converted;
  json["copied"] = result.copied;
  json["input_bytes"] = result.input_bytes;
  json["output_bytes"] = result.output_bytes;
  json["shards"] = result.shards;
  json["resumed_shards"] = result.resumed_shards;
  json["seconds"] = seconds;
  json["notes"] = result.notes;
  TensorError all;
  json["groups"] = Json::object();
  for (const auto& [pattern, group] : grouped(result)) {
    json["groups"][pattern] = {
        {"modules", group.modules}, {"relative_rms", group.sum.relative_rms()}, {"worst_relative_rms", group.worst}};
    all.squared_error += group.sum.squared_error;
    all.energy += group.sum.energy;
  }
  json["relative_rms"] = all.relative_rms();
  json["tensors"] = Json::array();
  for (const TensorError& error : result.errors) {
    json["tensors"].push_back(
        {{"module", error.module}, {"elements", error.elements}, {"relative_rms", error.relative_rms()}});
  }
  fmt::print("{}\n", json.dump(2));
}

void print_text(const QuantizeResult& result, const Options& options, double seconds) {
  for (const std::string& note : result.notes) eprint("note: {}\n", note);
  fmt::print("{:<44} {:>8} {:>10} {:>10}\n", "relative RMS error", "modules", "mean", "worst");
  TensorError all;
  for (const auto& [pattern, group] : grouped(result)) {
    fmt::print("{:<44} {:>8} {:>9.2f}% {:>9.2f}%\n", pattern, group.modules, 100 * group.sum.relative_rms(),
               100 * group.worst);
    all.squared_error += group.sum.squared_error;
    all.energy += group.sum.energy;
  }
  std::vector<const TensorError*> worst;
  for (const TensorError& error : result.errors) worst.push_back(&error);
  const auto count = std::min<size_t>(5, worst.size());
  std::partial_sort(worst.begin(), worst.begin() + static_cast<std::ptrdiff_t>(count), worst.end(),
                    [](const auto* a, const auto* b) { return a->relative_rms() > b->relative_rms(); });
  if (result.errors.size() > 5) {
    fmt::print("worst:\n");
    for (size_t i = 0; i < count; ++i) {
      fmt::print("  {:<51} {:>20.2f}%\n", worst[i]->module, 100 * worst[i]->relative_rms());
    }
  }
  fmt::print(
      "{}: {} matrices quantised ({:.2f} % relative RMS error), {} converted, {} tensors copied; "
      "{:.3f} GB -> {:.3f} GB in {} file{}, {:.1f} s\n",
      options.output, result.quantized, 100 * all.relative_rms(), result.converted, result.copied,
      static_cast<double>(result.input_bytes) * 1e-9, static_cast<double>(result.output_bytes) * 1e-9, result.shards,
      result.shards == 1 ? "" : "s", seconds);
}

void run(Options& options) {
  install_interrupt_handler();
  options.quantize.form =
      options.form == "modelopt" ? model::ExportForm::kModelopt : model::ExportForm::kCompressedTensors;
  options.quantize.search = options.search == "max" ? nvfp4::ScaleSearch::kMax : nvfp4::ScaleSearch::kSquaredError;
  options.quantize.shard_bytes = static_cast<uint64_t>(options.shard_gb * 1e9);
  const auto start = std::chrono::steady_clock::now();
  const QuantizeResult result = model::quantize_checkpoint(options.input, options.output, options.quantize);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (result.resumed_shards > 0) {
    eprint("continued after {} of {} files\n", result.resumed_shards, result.shards);
  }
  if (options.json) {
    print_json(result, seconds);
  } else {
    print_text(result, options, seconds);
  }
}

}  // namespace

void add_quantize(Command& app) {
  auto options = std::make_shared<Options>();
  Command command = app.add_command("quantize", "Quantise a checkpoint to NVFP4 (weights only)");
  command.add_option("IN", options->input, "Checkpoint directory: bf16, f16, f32, FP8 or NVFP4").required();
  command.add_option("OUT", options->output, "New directory, or one of an interrupted run, which is continued")
      .required();
  command.add_option("--form", options->form, "Names and scales of the output: modelopt or compressed-tensors")
      .one_of({"modelopt", "compressed-tensors"})
      .show_default();
  command
      .add_option("--what", options->quantize.what,
                  "all (experts, shared, mlp, attention, deltanet), or a list of these and head, mtp with commas")
      .show_default();
  command
      .add_option("--exclude", options->quantize.exclude,
                  "Leave modules alone whose name (layers.3.self_attn.q_proj) matches this regular expression")
      .one_each();
  command.add_option("--scale-search", options->search, "Block scales: max (block maximum / 6) or mse (least squares)")
      .one_of({"max", "mse"})
      .show_default();
  command.add_option("--shard-size", options->shard_gb, "Largest file, in GB").real_range(0.001, 1000.0).show_default();
  command.add_option("--threads", options->quantize.threads, "Threads (default: all)").range(1, 1024);
  command.add_flag("--json", options->json, "Print the result, with the error of each matrix, as JSON");
  command.callback([options] { run(*options); });
}

}  // namespace fourfold::cmd
