#include "model/report.h"

#include <algorithm>
#include <cmath>
#include <system_error>

#include "base/check.h"
#include "base/file.h"
#include "base/json.h"
#include "base/math.h"
#include "model/checkpoint.h"

namespace fourfold::model {
namespace {

namespace fs = std::filesystem;

// "layers.3.mlp.experts.17.gate_proj" -> "layers.N.mlp.experts.E.gate_proj"
std::string without_numbers(const WeightSpec& spec) {
  std::string name = spec.name;
  const auto replace = [&](const std::string& key, char letter) {
    const size_t at = name.find(key);
    if (at == std::string::npos) return;
    const size_t begin = at + key.size();
    size_t end = begin;
    while (end < name.size() && name[end] >= '0' && name[end] <= '9') ++end;
    name.replace(begin, end - begin, 1, letter);
  };
  if (!spec.mtp) replace("layers.", 'N');
  replace("experts.", 'E');
  return name;
}

void describe_files(const fs::path& directory, CheckpointReport& report) {
  report.has_tokenizer = name_taken(directory / "tokenizer.json");
  if (!report.has_tokenizer) report.notes.push_back("no tokenizer.json: the model can be measured but not talked to");
  for (const char* name : {"chat_template.jinja", "chat_template.json"}) {
    if (report.chat_template_place.empty() && name_taken(directory / name)) report.chat_template_place = name;
  }
  const fs::path tokenizer = directory / "tokenizer_config.json";
  if (report.chat_template_place.empty() && name_taken(tokenizer)) {
    try {
      JsonLimits limits;
      limits.reject_duplicate_keys = false;  // as where it is used
      const Json json = parse_json_file(tokenizer, limits);
      if (json.is_object() && json.contains("chat_template")) report.chat_template_place = "tokenizer_config.json";
    } catch (const Error& error) {
      report.problems.emplace_back(error.what());
    }
  }
  report.has_chat_template = !report.chat_template_place.empty();
  report.has_generation_config = name_taken(directory / "generation_config.json");
  try {
    report.generation = read_generation_config(directory);
  } catch (const Error& error) {
    report.problems.emplace_back(error.what());
  }
  try {
    report.quantization = read_quantization(directory);
    const Json root = parse_json_file(directory / "config.json");
    const auto found = root.is_object() ? root.find("architectures") : root.end();
    if (root.is_object() && found != root.end() && found->is_array() && !found->empty() && found->front().is_string()) {
      report.architecture = found->front().get<std::string>();
    }
  } catch (const Error&) {
    // config.json itself is reported where the model configuration is read.
  }
}

Amount amount_of(const WeightSpec& spec, uint64_t bytes, const ModelConfig& config) {
  Amount amount;
  amount.parameters = spec.elements();
  amount.bytes = bytes;
  double share = 1.0;
  if (spec.kind == WeightKind::kEmbedding) share = 1.0 / static_cast<double>(config.vocabulary);
  if (spec.kind == WeightKind::kRoutedExpert) {
    share = static_cast<double>(config.top_k) / static_cast<double>(config.experts);
  }
  amount.active_parameters = static_cast<double>(amount.parameters) * share;
  amount.bytes_per_token = static_cast<double>(bytes) * share;
  if (spec.kind == WeightKind::kEmbedding && config.tied_head) {
    // The head is the same matrix and is read as a whole.
    amount.active_parameters = static_cast<double>(amount.parameters);
    amount.bytes_per_token = static_cast<double>(bytes);
  }
  return amount;
}

int64_t count_not_finite(const ops::MatrixSource& matrix) {
  std::vector<float> row(static_cast<size_t>(matrix.columns));
  int64_t count = 0;
  for (int64_t r = 0; r < matrix.rows; ++r) {
    ops::dequantize(matrix, r, row.data());
    for (float value : row) count += std::isfinite(value) ? 0 : 1;
  }
  return count;
}

void memory(const ModelConfig& config, const ReportOptions& options, CheckpointReport& report) {
  const int64_t attention = config.attention_layers() + config.mtp_layers;
  const int64_t delta_net = config.delta_net_layers();
  const auto u = [](int64_t value) { return static_cast<uint64_t>(value); };
  report.kv_bytes_per_token = u(attention * 2 * config.kv_heads * config.head_dim * 2);
  report.state_bytes_per_sequence =
      u(delta_net * 4) * (u(config.linear_value_heads * config.linear_key_dim * config.linear_value_dim) +
                          u((config.conv_taps - 1) * config.conv_channels()));
  const uint64_t positions = checked_mul(u(options.context), u(options.batch), "context x batch");
  report.kv_bytes = checked_mul(positions, report.kv_bytes_per_token, "size of the KV cache");
  report.state_bytes = checked_mul(report.state_bytes_per_sequence, u(options.batch), "size of the states");
}

}  // namespace

Amount& Amount::operator+=(const Amount& other) {
  parameters += other.parameters;
  active_parameters += other.active_parameters;
  bytes += other.bytes;
  bytes_per_token += other.bytes_per_token;
  return *this;
}

CheckpointReport inspect_checkpoint(const fs::path& directory, const ReportOptions& options) {
  CheckpointReport report;
  report.directory = directory.string();
  std::error_code error;
  if (!fs::is_directory(directory, error)) fail("{} is not a directory", directory.string());
  std::unique_ptr<Checkpoint> checkpoint;
  try {
    checkpoint = std::make_unique<Checkpoint>(directory, &report.problems);
  } catch (const Error& opening) {
    report.problems.emplace_back(opening.what());
  }
  describe_files(directory, report);
  if (!checkpoint) {
    try {
      report.config = read_config(directory);
    } catch (const Error&) {
      // already among the problems
    }
    if (report.config) memory(*report.config, options, report);
    return report;
  }
  const ModelConfig& config = checkpoint->config();
  report.config = config;
  memory(config, options, report);
  report.prefix = checkpoint->prefix();
  for (const SafetensorsFile& shard : checkpoint->shards()) {
    ++report.shards;
    report.tensors += static_cast<int64_t>(shard.tensors().size());
    report.file_bytes += shard.bytes();
  }

  const auto visit = [&](const WeightSpec& spec, const ops::MatrixSource* matrix) {
    const char* format = matrix == nullptr ? "f32" : ops::format_name(matrix->format);
    const auto bytes = static_cast<uint64_t>(matrix == nullptr ? spec.elements() * 4 : matrix->bytes());
    const Amount amount = amount_of(spec, bytes, config);
    (spec.mtp ? report.mtp : report.total) += amount;
    if (!spec.mtp) report.kinds[weight_kind_name(spec.kind)] += amount;
    (spec.mtp ? report.mtp_formats : report.formats)[format] += amount;
    if (matrix == nullptr) return;
    ++report.modules[without_numbers(spec)][format];
    if (matrix->input_scale > 0.0f) ++report.activation_scales;
    if (options.deep) {
      if (const int64_t count = count_not_finite(*matrix); count > 0) {
        report.problems.push_back(
            fmt::format("{}: {} of {} elements are not finite", spec.name, count, spec.elements()));
      }
    }
  };
  const bool incomplete = !report.problems.empty();
  int64_t missing = 0;
  for (std::string& problem : check_weights(*checkpoint, visit)) {
    // When a file could not be read, everything in it is missing: one line says so.
    if (incomplete && problem.find(" is missing, wanted ") != std::string::npos && ++missing > 3) continue;
    report.problems.push_back(std::move(problem));
  }
  if (missing > 3) report.problems.push_back(fmt::format("{} more weights are missing", missing - 3));
  report.visual_tensors = checkpoint->visual().tensors;
  report.visual_bytes = checkpoint->visual().bytes;
  report.kv_scales = static_cast<int64_t>(checkpoint->kv_scales().size());
  for (std::string& note : checkpoint->notes()) report.notes.push_back(std::move(note));
  if (!report.quantization.kv_cache.empty()) {
    report.notes.push_back(fmt::format("the files declare a {} KV cache ({} scales); fourfold keeps the cache as it is",
                                       report.quantization.kv_cache, report.kv_scales));
  }
  return report;
}

Json report_json(const CheckpointReport& report, const ReportOptions& options) {
  const auto amount = [](const Amount& value) {
    return Json{{"parameters", value.parameters},
                {"active_parameters", std::llround(value.active_parameters)},
                {"bytes", value.bytes},
                {"bytes_per_token", value.bytes_per_token}};
  };
  const auto amounts = [&](const std::map<std::string, Amount>& map) {
    Json object = Json::object();
    for (const auto& [name, value] : map) object[name] = amount(value);
    return object;
  };
  Json json;
  json["directory"] = report.directory;
  json["loadable"] = report.problems.empty();
  json["problems"] = report.problems;
  json["notes"] = report.notes;
  if (report.config) {
    const ModelConfig& config = *report.config;
    json["architecture"] = {{"name", report.architecture},
                            {"model_type", config.model_type},
                            {"hidden", config.hidden},
                            {"layers", config.layers},
                            {"attention_layers", config.attention_layers()},
                            {"delta_net_layers", config.delta_net_layers()},
                            {"vocabulary", config.vocabulary},
                            {"max_positions", config.max_positions},
                            {"heads", config.heads},
                            {"kv_heads", config.kv_heads},
                            {"head_dim", config.head_dim},
                            {"linear_key_heads", config.linear_key_heads},
                            {"linear_value_heads", config.linear_value_heads},
                            {"linear_key_dim", config.linear_key_dim},
                            {"linear_value_dim", config.linear_value_dim},
                            {"experts", config.experts},
                            {"top_k", config.top_k},
                            {"moe_intermediate", config.moe_intermediate},
                            {"shared_intermediate", config.shared_intermediate},
                            {"intermediate", config.intermediate},
                            {"mtp_layers", config.mtp_layers},
                            {"tied_head", config.tied_head}};
  }
  json["parameters"] = {{"total", report.total.parameters},
                        {"active", std::llround(report.total.active_parameters)},
                        {"mtp", report.mtp.parameters}};
  json["bytes"] = {{"weights", report.total.bytes},
                   {"mtp", report.mtp.bytes},
                   {"files", report.file_bytes},
                   {"per_token", report.total.bytes_per_token}};
  json["kinds"] = amounts(report.kinds);
  json["formats"] = amounts(report.formats);
  json["mtp_formats"] = amounts(report.mtp_formats);
  json["modules"] = report.modules;
  json["quantization"] = {{"method", report.quantization.method},
                          {"algorithm", report.quantization.algorithm},
                          {"kv_cache", report.quantization.kv_cache},
                          {"activation_scales", report.activation_scales},
                          {"kv_scales", report.kv_scales}};
  json["memory"] = {{"context", options.context},
                    {"batch", options.batch},
                    {"weights", report.weight_bytes()},
                    {"kv_bytes_per_token", report.kv_bytes_per_token},
                    {"kv_f16", report.kv_bytes},
                    {"kv_bf16", report.kv_bytes},
                    {"kv_f32", 2 * report.kv_bytes},
                    {"states", report.state_bytes},
                    {"total_f16", report.memory_bytes()},
                    {"total_bf16", report.memory_bytes()},
                    {"total_f32", report.memory_bytes() + report.kv_bytes}};
  json["files"] = {{"shards", report.shards},
                   {"tensors", report.tensors},
                   {"prefix", report.prefix},
                   {"visual_tensors", report.visual_tensors},
                   {"visual_bytes", report.visual_bytes},
                   {"tokenizer", report.has_tokenizer},
                   {"chat_template", report.chat_template_place}};
  Json generation = Json::object();
  const auto set = [&](const char* key, const auto& value) {
    if (value) generation[key] = *value;
  };
  if (!report.generation.eos_tokens.empty()) generation["eos_tokens"] = report.generation.eos_tokens;
  set("do_sample", report.generation.do_sample);
  set("temperature", report.generation.temperature);
  set("top_k", report.generation.top_k);
  set("top_p", report.generation.top_p);
  set("min_p", report.generation.min_p);
  set("repetition_penalty", report.generation.repetition_penalty);
  set("presence_penalty", report.generation.presence_penalty);
  set("frequency_penalty", report.generation.frequency_penalty);
  json["generation"] = generation;
  return json;
}

}  // namespace fourfold::model
