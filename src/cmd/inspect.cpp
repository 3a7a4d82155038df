// fourfold inspect: what a checkpoint holds, what it needs, and what is wrong with it.
#include <cstdio>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/file.h"
#include "chat/chat_text.h"
#include "chat/model_directory.h"
#include "cmd/arguments.h"
#include "cmd/commands.h"
#include "cmd/options.h"
#include "model/report.h"
#include "text/chat_template.h"
#include "text/tokenizer.h"

namespace fourfold::cmd {
namespace {

using model::Amount;
using model::CheckpointReport;

std::string count_text(double value) {
  if (value >= 1e9) return fmt::format("{:.2f} B", value * 1e-9);
  if (value >= 1e6) return fmt::format("{:.2f} M", value * 1e-6);
  if (value >= 1e4) return fmt::format("{:.1f} k", value * 1e-3);
  return fmt::format("{:.0f}", value);
}
std::string count_text(int64_t value) { return count_text(static_cast<double>(value)); }

std::string bytes_text(double bytes) {
  if (bytes >= 1e9) return fmt::format("{:.2f} GB", bytes * 1e-9);
  if (bytes >= 1e6) return fmt::format("{:.2f} MB", bytes * 1e-6);
  if (bytes >= 1e3) return fmt::format("{:.1f} kB", bytes * 1e-3);
  return fmt::format("{:.0f} B", bytes);
}
std::string bytes_text(uint64_t bytes) { return bytes_text(static_cast<double>(bytes)); }

void heading(const char* text) { fmt::print("\n{}\n", text); }

void amounts(const std::map<std::string, Amount>& rows, const Amount* total, bool active) {
  fmt::print("  {:<30} {:>12} {:>12} {:>12} {:>14}\n", "", "parameters", active ? "active" : "", "bytes",
             "read per token");
  const auto row = [&](const std::string& name, const Amount& amount) {
    fmt::print("  {:<30} {:>12} {:>12} {:>12} {:>14}\n", name, count_text(amount.parameters),
               active ? count_text(amount.active_parameters) : "", bytes_text(amount.bytes),
               bytes_text(amount.bytes_per_token));
  };
  for (const auto& [name, amount] : rows) row(name, amount);
  if (total != nullptr) row("total", *total);
}

void print_architecture(const model::ModelConfig& config, const CheckpointReport& report) {
  heading("Architecture");
  fmt::print("  {} ({})\n", report.architecture.empty() ? "unnamed" : printable(report.architecture),
             config.model_type);
  fmt::print("  {} layers: {} attention, {} delta net; hidden {}, vocabulary {}, up to {} positions\n", config.layers,
             config.attention_layers(), config.delta_net_layers(), config.hidden, config.vocabulary,
             config.max_positions);
  fmt::print("  attention: {} query and {} key/value heads of {}, rotary {} dimensions, theta {:g}{}\n", config.heads,
             config.kv_heads, config.head_dim, config.rotary_dim, config.rope_theta,
             config.attention_gate ? ", gated" : "");
  fmt::print("  delta net: {} key heads of {}, {} value heads of {}, convolution {}\n", config.linear_key_heads,
             config.linear_key_dim, config.linear_value_heads, config.linear_value_dim, config.conv_taps);
  if (config.experts > 0) {
    fmt::print("  experts: {} of width {}, top {}; shared expert {}\n", config.experts, config.moe_intermediate,
               config.top_k,
               config.shared_intermediate > 0 ? fmt::format("of width {}", config.shared_intermediate) : "none");
  } else {
    fmt::print("  dense MLP of width {}\n", config.intermediate);
  }
  fmt::print("  head: {}; MTP head: {}\n", config.tied_head ? "tied to the embedding" : "own matrix",
             config.mtp_layers > 0 ? "yes" : "no");
}

void print_modules(const CheckpointReport& report) {
  heading("Formats of the matrices");
  for (const auto& [module, formats] : report.modules) {
    std::string text;
    for (const auto& [format, count] : formats) {
      text += fmt::format("{}{}{}", text.empty() ? "" : ", ", format, count > 1 ? fmt::format(" x {}", count) : "");
    }
    fmt::print("  {:<46} {}\n", module, text);
  }
}

void print_generation(const CheckpointReport& report) {
  heading("Files");
  fmt::print("  {} tensors in {} file{}, {}; names begin with '{}'\n", report.tensors, report.shards,
             report.shards == 1 ? "" : "s", bytes_text(report.file_bytes), printable(report.prefix));
  if (!report.quantization.method.empty()) {
    fmt::print("  quantised by {} ({}), {} matrices with activation scales\n", printable(report.quantization.method),
               printable(report.quantization.algorithm), report.activation_scales);
  }
  if (report.visual_tensors > 0) {
    fmt::print("  vision tower: {} tensors, {}, not loaded\n", report.visual_tensors, bytes_text(report.visual_bytes));
  }
  fmt::print("  tokenizer: {}; chat template: {}\n", report.has_tokenizer ? "tokenizer.json" : "none",
             report.has_chat_template ? report.chat_template_place : "none");
  const model::GenerationConfig& generation = report.generation;
  if (!report.has_generation_config) {
    fmt::print("  generation_config.json: none\n");
    return;
  }
  std::string text;
  const auto add = [&](const char* name, const auto& value) {
    if (value) text += fmt::format("{}{} {}", text.empty() ? "" : ", ", name, *value);
  };
  add("temperature", generation.temperature);
  add("top_k", generation.top_k);
  add("top_p", generation.top_p);
  add("min_p", generation.min_p);
  add("repetition_penalty", generation.repetition_penalty);
  add("presence_penalty", generation.presence_penalty);
  add("frequency_penalty", generation.frequency_penalty);
  fmt::print("  sampling: {}{}; stop tokens: {}\n", text.empty() ? "nothing recommended" : text,
             generation.do_sample && !*generation.do_sample ? ", greedy" : "", fmt::join(generation.eos_tokens, ", "));
}

void print_report(const CheckpointReport& report, const model::ReportOptions& options) {
  fmt::print("{}\n", printable(report.directory));
  if (report.config) print_architecture(*report.config, report);
  if (report.total.parameters > 0) {
    heading("Parameters");
    amounts(report.kinds, &report.total, true);
    heading("Bytes by format");
    amounts(report.formats, &report.total, false);
    if (report.mtp.parameters > 0) {
      heading("MTP head, beside these");
      amounts(report.mtp_formats, &report.mtp, false);
    }
    print_modules(report);
  }
  if (report.config) {
    heading("Memory");
    fmt::print("  {} token{} of context x {} sequence{}\n", options.context, options.context == 1 ? "" : "s",
               options.batch, options.batch == 1 ? "" : "s");
    const auto row = [](const char* name, uint64_t bytes) { fmt::print("  {:<30} {:>12}\n", name, bytes_text(bytes)); };
    row("weights", report.weight_bytes());
    row("KV cache, f16", report.kv_bytes);
    row("delta-net states, fp32", report.state_bytes);
    row("total", report.memory_bytes());
  }
  print_generation(report);
  if (!report.notes.empty()) heading("Notes");
  for (const std::string& note : report.notes) fmt::print("  {}\n", printable(note, 2000));
  if (report.problems.empty()) {
    fmt::print("\nNo problems found.\n");
    return;
  }
  fmt::print("\n{} problem{}: this checkpoint cannot be loaded\n", report.problems.size(),
             report.problems.size() == 1 ? "" : "s");
  constexpr size_t kShown = 50;
  for (size_t i = 0; i < std::min(kShown, report.problems.size()); ++i)
    fmt::print("  {}\n", printable(report.problems[i], 2000));
  if (report.problems.size() > kShown)
    fmt::print("  ... and {} more (--json lists all)\n", report.problems.size() - kShown);
}

struct Options {
  std::string directory;
  model::ReportOptions report;
  bool json = false;
};

// The text side, which model/ knows nothing of. A checkpoint without a tokenizer is one that can only be measured.
void check_text(const std::filesystem::path& directory, CheckpointReport& report) {
  const auto check = [&](const std::function<void()>& read) {
    try {
      read();
    } catch (const Error& error) {
      report.problems.emplace_back(error.what());
    }
  };
  if (name_taken(directory / "tokenizer.json")) {
    check([&] {
      const auto tokenizer = text::Tokenizer::from_directory(directory);
      if (report.config) chat::require_tokenizer_fits(directory, tokenizer.size(), *report.config);
    });
  }
  if (report.has_chat_template) {
    // A template may be good Jinja and of no use: it must make something of a plain question.
    check([&] {
      const auto chat_template = text::ChatTemplate::from_directory(directory);
      text::ChatRequest request;
      request.messages = Json::array({{{"role", "user"}, {"content", "Hello"}}});
      request.add_generation_prompt = true;
      if (chat_template.render(request).empty()) {
        fail("{}: the chat template makes an empty prompt of a question",
             (directory / report.chat_template_place).string());
      }
    });
  } else if (report.has_tokenizer) {
    report.notes.push_back("no chat template: text can be tokenised, but there is no chat");
  }
}

// That of a model whose configuration cannot be read is what was asked for.
int64_t context_of(const Options& options) {
  int64_t positions = 0;
  try {
    positions = model::read_config(options.directory).max_positions;
  } catch (const Error&) {
    return options.report.context > 0 ? options.report.context : chat::kDefaultContext;
  }
  return chat::choose_context(options.report.context, positions);
}

void run(const Options& options) {
  model::ReportOptions report_options = options.report;
  report_options.context = context_of(options);
  CheckpointReport report = model::inspect_checkpoint(options.directory, report_options);
  check_text(options.directory, report);
  if (options.json) {
    const Json json = model::report_json(report, report_options);
    fmt::print("{}\n", json.dump(2, ' ', false, Json::error_handler_t::replace));
  } else {
    print_report(report, report_options);
  }
  std::fflush(stdout);
  if (!report.problems.empty()) {
    fail("{} cannot be loaded ({} problem{}): {}", options.directory, report.problems.size(),
         report.problems.size() == 1 ? "" : "s", report.problems.front());
  }
}

}  // namespace

void add_inspect(Command& app) {
  auto options = std::make_shared<Options>();
  Command command = app.add_command(
      "inspect", "Show what a checkpoint holds, the memory it needs, and every problem (exit status 2 if it has any)");
  command.add_option("DIR", options->directory, "Checkpoint directory").required();
  command.add_flag("--json", options->json, "Print JSON (docs/checkpoints.md describes it)");
  add_context_option(command, options->report.context, "Tokens of each sequence, for the memory table");
  command.add_option("--batch", options->report.batch, "Sequences at once, for the memory table")
      .range(1, 1 << 20)
      .show_default();
  command.add_flag("--deep", options->report.deep, "Read every element and report those that are not finite");
  command.callback([options] { run(*options); });
}

}  // namespace fourfold::cmd
