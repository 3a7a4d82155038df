#include "model/config.h"

#include <algorithm>
#include <cmath>
#include <iterator>

#include "base/check.h"
#include "base/file.h"
#include "base/json.h"

namespace fourfold::model {
namespace {

constexpr int64_t kMaxTaps = 64;

std::string shown(const Json& value) {
  return printable(value.dump(-1, ' ', false, Json::error_handler_t::replace), 60);
}

const Json* member(const Json& object, std::string_view key) {
  const auto found = object.find(key);
  return found == object.end() || found->is_null() ? nullptr : &*found;
}

// Reads the fields of one JSON object. A field that is absent or null takes the fallback, or is an error without one.
class Fields {
 public:
  Fields(const Json& object, std::string_view file, std::string prefix)
      : object_(object), file_(file), prefix_(std::move(prefix)) {
    if (!object.is_object()) fail("{}: {} is {}, wanted an object", file_, prefix_, json_kind(object));
  }

  const Json* find(std::string_view key) const { return member(object_, key); }
  std::string where(std::string_view key) const { return fmt::format("{}: {}{}", file_, prefix_, key); }

  int64_t integer(std::string_view key, int64_t low, int64_t high, std::optional<int64_t> fallback = {}) const {
    const Json* value = find(key);
    if (value == nullptr) {
      if (!fallback) fail("{} is missing, wanted an integer from {} to {}", where(key), low, high);
      return *fallback;
    }
    return integer_in(*value, where(key), low, high);
  }

  static int64_t integer_in(const Json& value, const std::string& where, int64_t low, int64_t high) {
    int64_t number = 0;
    if (value.is_number_unsigned()) {
      const uint64_t raw = value.get<uint64_t>();
      number = raw > static_cast<uint64_t>(INT64_MAX) ? INT64_MAX : static_cast<int64_t>(raw);
    } else if (value.is_number_integer()) {
      number = value.get<int64_t>();
    } else {
      fail("{} is {}, wanted an integer from {} to {}", where, shown(value), low, high);
    }
    if (number < low || number > high) {
      fail("{} is {}, wanted an integer from {} to {}", where, shown(value), low, high);
    }
    return number;
  }

  double number(std::string_view key, double low, double high, std::optional<double> fallback = {}) const {
    const Json* value = find(key);
    if (value == nullptr) {
      if (!fallback) fail("{} is missing, wanted a number from {} to {}", where(key), low, high);
      return *fallback;
    }
    const double found = value->is_number() ? value->get<double>() : NAN;
    if (!(found >= low && found <= high)) {
      fail("{} is {}, wanted a number from {} to {}", where(key), shown(*value), low, high);
    }
    return found;
  }

  bool boolean(std::string_view key, bool fallback) const {
    const Json* value = find(key);
    if (value == nullptr) return fallback;
    if (!value->is_boolean()) fail("{} is {}, wanted true or false", where(key), shown(*value));
    return value->get<bool>();
  }

  std::string text(std::string_view key, std::string fallback) const {
    const Json* value = find(key);
    if (value == nullptr) return fallback;
    if (!value->is_string()) fail("{} is {}, wanted a string", where(key), shown(*value));
    return value->get<std::string>();
  }

  // A token id, a list of them, or nothing.
  std::vector<int32_t> tokens(std::string_view key) const {
    std::vector<int32_t> ids;
    const Json* value = find(key);
    if (value == nullptr) return ids;
    if (value->is_array()) {
      if (value->size() > 1024) fail("{} has {} entries, at most 1024 are accepted", where(key), value->size());
      for (const Json& entry : *value) {
        ids.push_back(static_cast<int32_t>(integer_in(entry, where(key), 0, kMaxVocabulary - 1)));
      }
    } else {
      ids.push_back(static_cast<int32_t>(integer_in(*value, where(key), 0, kMaxVocabulary - 1)));
    }
    return ids;
  }

 private:
  const Json& object_;
  std::string_view file_;
  std::string prefix_;
};

struct Family {
  const char* model_type;
  bool moe;
};
constexpr Family kFamilies[] = {
    {"qwen3_5_moe", true}, {"qwen3_5_moe_text", true}, {"qwen3_5", false}, {"qwen3_5_text", false}};

const Family& family_of(const std::string& model_type, const std::string& where) {
  for (const Family& family : kFamilies) {
    if (model_type == family.model_type) return family;
  }
  std::vector<std::string> names;
  for (const Family& family : kFamilies) names.emplace_back(family.model_type);
  fail("{} is '{}', supported are {}", where, printable(model_type), fmt::join(names, ", "));
}

std::vector<LayerKind> layer_kinds(const Fields& fields, int64_t layers) {
  std::vector<LayerKind> kinds;
  if (const Json* types = fields.find("layer_types")) {
    if (!types->is_array() || types->size() != static_cast<size_t>(layers)) {
      fail("{} is {}, wanted a list of num_hidden_layers = {} names", fields.where("layer_types"),
           types->is_array() ? fmt::format("a list of {}", types->size()) : shown(*types), layers);
    }
    for (const Json& type : *types) {
      const std::string name = type.is_string() ? type.get<std::string>() : std::string();
      if (name == "full_attention") {
        kinds.push_back(LayerKind::kAttention);
      } else if (name == "linear_attention") {
        kinds.push_back(LayerKind::kDeltaNet);
      } else {
        fail("{}[{}] is {}, wanted \"full_attention\" or \"linear_attention\"", fields.where("layer_types"),
             kinds.size(), shown(type));
      }
    }
    return kinds;
  }
  const int64_t interval = fields.integer("full_attention_interval", 1, kMaxLayers, 4);
  for (int64_t i = 0; i < layers; ++i) {
    kinds.push_back((i + 1) % interval == 0 ? LayerKind::kAttention : LayerKind::kDeltaNet);
  }
  return kinds;
}

// rope_theta and partial_rotary_factor, from rope_parameters, the older rope_scaling, or the level above. Where a value
// is given twice the two must agree.
void rotary(const Fields& fields, std::string_view file, ModelConfig& config) {
  std::optional<double> theta, fraction;
  const auto take = [&](const Fields& from) {
    if (from.find("rope_theta") != nullptr) {
      const double value = from.number("rope_theta", 1.0, 1e15);
      if (theta && *theta != value)
        fail("{} is {}, but it is also given as {}", from.where("rope_theta"), value, *theta);
      theta = value;
    }
    if (from.find("partial_rotary_factor") != nullptr) {
      const double value = from.number("partial_rotary_factor", 0.0, 1.0);
      if (fraction && *fraction != value) {
        fail("{} is {}, but it is also given as {}", from.where("partial_rotary_factor"), value, *fraction);
      }
      fraction = value;
    }
  };
  for (const char* key : {"rope_parameters", "rope_scaling"}) {
    const Json* value = fields.find(key);
    if (value == nullptr) continue;
    const Fields rope(*value, file, fields.where(key).substr(file.size() + 2) + ".");
    for (const char* type : {"rope_type", "type"}) {
      const std::string name = rope.text(type, "default");
      if (name != "default" && name != "mrope") {
        fail("{} is '{}', supported is 'default'", rope.where(type), printable(name));
      }
    }
    take(rope);
  }
  take(fields);
  config.rope_theta = theta.value_or(1e7);
  const double dimensions = fraction.value_or(0.25) * static_cast<double>(config.head_dim);
  config.rotary_dim = static_cast<int64_t>(dimensions);
  if (static_cast<double>(config.rotary_dim) != dimensions || config.rotary_dim % 2 != 0) {
    fail("{} x head_dim {} is {}, wanted an even number of rotary dimensions", fields.where("partial_rotary_factor"),
         config.head_dim, dimensions);
  }
}

std::optional<Json> read_optional(const std::filesystem::path& path) {
  if (!name_taken(path)) return std::nullopt;
  JsonLimits limits;
  limits.max_bytes = 64 << 20;
  return parse_json_file(path, limits);
}

}  // namespace

ModelConfig parse_config(const Json& root, std::string_view file) {
  const Fields top(root, file, "");
  const Json* nested = top.find("text_config");
  const Fields fields = nested != nullptr ? Fields(*nested, file, "text_config.") : top;

  ModelConfig config;
  // The nested model_type may be absent; then the outer one names the family.
  const bool inner_type = fields.find("model_type") != nullptr;
  const Fields& typed = inner_type ? fields : top;
  config.model_type = typed.text("model_type", "");
  if (config.model_type.empty()) fail("{} is missing, wanted for example \"qwen3_5_moe\"", fields.where("model_type"));
  const Family& family = family_of(config.model_type, typed.where("model_type"));

  config.hidden = fields.integer("hidden_size", 1, kMaxDimension);
  config.layers = fields.integer("num_hidden_layers", 1, kMaxLayers);
  config.vocabulary = fields.integer("vocab_size", 1, kMaxVocabulary);
  // One for a prompt, one for what comes after it.
  config.max_positions = fields.integer("max_position_embeddings", 2, kMaxPositions, 262144);
  config.norm_eps = static_cast<float>(fields.number("rms_norm_eps", 1e-12, 1.0, 1e-6));
  // Both levels carry the flag in published files; the inner one counts for the text model when it is there.
  config.tied_head = fields.boolean("tie_word_embeddings", top.boolean("tie_word_embeddings", false));
  config.layer_kinds = layer_kinds(fields, config.layers);

  const std::string activation = fields.text("hidden_act", "silu");
  if (activation != "silu" && activation != "swish") {
    fail("{} is '{}', supported is 'silu'", fields.where("hidden_act"), printable(activation));
  }
  const std::string gate = fields.text("output_gate_type", "swish");
  if (gate != "silu" && gate != "swish") {
    fail("{} is '{}', supported is 'swish'", fields.where("output_gate_type"), printable(gate));
  }
  if (fields.boolean("attention_bias", false)) fail("{} is true, supported is false", fields.where("attention_bias"));

  config.heads = fields.integer("num_attention_heads", 1, kMaxDimension);
  config.kv_heads = fields.integer("num_key_value_heads", 1, kMaxDimension, config.heads);
  config.head_dim = fields.integer("head_dim", 1, 4096, 256);
  config.attention_gate = fields.boolean("attn_output_gate", true);
  rotary(fields, file, config);

  config.linear_key_heads = fields.integer("linear_num_key_heads", 1, kMaxDimension, 16);
  config.linear_value_heads = fields.integer("linear_num_value_heads", 1, kMaxDimension, 32);
  config.linear_key_dim = fields.integer("linear_key_head_dim", 1, 4096, 128);
  config.linear_value_dim = fields.integer("linear_value_head_dim", 1, 4096, 128);
  config.conv_taps = fields.integer("linear_conv_kernel_dim", 2, kMaxTaps, 4);

  if (family.moe) {
    config.experts = fields.integer("num_experts", 1, kMaxExperts);
    config.top_k = fields.integer("num_experts_per_tok", 1, config.experts);
    config.moe_intermediate = fields.integer("moe_intermediate_size", 1, kMaxDimension);
    config.shared_intermediate = fields.integer("shared_expert_intermediate_size", 0, kMaxDimension, 0);
    config.renormalize = fields.boolean("norm_topk_prob", true);
    if (const Json* dense = fields.find("mlp_only_layers");
        dense != nullptr && !(dense->is_array() && dense->empty())) {
      fail("{} is {}, supported is []", fields.where("mlp_only_layers"), shown(*dense));
    }
    if (fields.integer("decoder_sparse_step", 1, kMaxLayers, 1) != 1) {
      fail("{} is {}, supported is 1", fields.where("decoder_sparse_step"), shown(*fields.find("decoder_sparse_step")));
    }
  } else {
    config.intermediate = fields.integer("intermediate_size", 1, kMaxDimension);
  }

  config.mtp_layers = fields.integer("mtp_num_hidden_layers", 0, 1, 0);
  if (fields.boolean("mtp_use_dedicated_embeddings", false)) {
    fail("{} is true, supported is false", fields.where("mtp_use_dedicated_embeddings"));
  }
  config.eos_tokens = fields.tokens("eos_token_id");
  if (config.eos_tokens.empty()) config.eos_tokens = top.tokens("eos_token_id");
  validate_config(config, file);
  return config;
}

void validate_config(const ModelConfig& config, std::string_view file) {
  const auto bound = [&](const char* what, int64_t a, int64_t b, int64_t limit) {
    if (a * b > limit) fail("{}: {} is {} x {} = {}, at most {} is supported", file, what, a, b, a * b, limit);
  };
  const auto divides = [&](const char* what, int64_t whole, const char* of, int64_t part) {
    if (whole % part != 0) fail("{}: {} {} is not a multiple of {} {}", file, what, whole, of, part);
  };
  bound("num_attention_heads x head_dim", config.heads, config.head_dim, kMaxDimension);
  bound("num_key_value_heads x head_dim", config.kv_heads, config.head_dim, kMaxDimension);
  bound("linear_num_key_heads x linear_key_head_dim", config.linear_key_heads, config.linear_key_dim, kMaxDimension);
  bound("linear_num_value_heads x linear_value_head_dim", config.linear_value_heads, config.linear_value_dim,
        kMaxDimension);
  bound("num_hidden_layers x num_experts", config.layers, config.experts, kMaxLayerExperts);
  divides("num_attention_heads", config.heads, "num_key_value_heads", config.kv_heads);
  divides("linear_num_value_heads", config.linear_value_heads, "linear_num_key_heads", config.linear_key_heads);
  FF_ASSERT(config.layer_kinds.size() == static_cast<size_t>(config.layers));
  for (int32_t token : config.eos_tokens) {
    if (token >= config.vocabulary) {
      fail("{}: eos_token_id {} is outside the vocabulary of {}", file, token, config.vocabulary);
    }
  }
}

QuantizationInfo parse_quantization(const Json& config, const Json* quant, std::string_view file) {
  QuantizationInfo info;
  const auto take = [](std::string& out, const Fields& fields, std::string_view key) {
    if (out.empty()) out = fields.text(key, "");
  };
  const auto take_list = [&](const Fields& fields, std::string_view key) {
    const Json* value = fields.find(key);
    if (value == nullptr) return;
    if (!value->is_array()) fail("{} is {}, wanted a list of module patterns", fields.where(key), shown(*value));
    for (const Json& entry : *value) {
      if (!entry.is_string()) fail("{} holds {}, wanted strings", fields.where(key), shown(entry));
      info.ignored.push_back(entry.get<std::string>());
    }
  };
  const Json* section = config.is_object() ? member(config, "quantization_config") : nullptr;
  std::string prefix = "quantization_config.";
  if (section == nullptr && config.is_object()) {
    const Json* text = member(config, "text_config");
    if (text != nullptr && text->is_object()) section = member(*text, "quantization_config");
    prefix = "text_config." + prefix;
  }
  if (section != nullptr) {
    const Fields fields(*section, file, prefix);
    take(info.method, fields, "quant_method");
    take(info.algorithm, fields, "quant_algo");
    take(info.algorithm, fields, "format");
    if (fields.find("kv_cache_scheme") != nullptr) info.kv_cache = "FP8";
    take_list(fields, "ignore");
    if (info.ignored.empty()) take_list(fields, "modules_to_not_convert");
  }
  if (quant != nullptr) {
    const Fields outer(*quant, file, "hf_quant_config.");
    if (const Json* inner = outer.find("quantization")) {
      const Fields fields(*inner, file, "hf_quant_config.quantization.");
      if (info.method.empty()) info.method = "modelopt";
      take(info.algorithm, fields, "quant_algo");
      const std::string kv = fields.text("kv_cache_quant_algo", "");
      if (!kv.empty() && kv != "none" && kv != "None") info.kv_cache = kv;
      if (info.ignored.empty()) take_list(fields, "exclude_modules");
    }
  }
  return info;
}

GenerationConfig parse_generation_config(const Json& root, std::string_view file) {
  const Fields fields(root, file, "");
  GenerationConfig config;
  config.eos_tokens = fields.tokens("eos_token_id");
  const auto one = [&](std::string_view key) -> std::optional<int32_t> {
    const std::vector<int32_t> ids = fields.tokens(key);
    return ids.empty() ? std::nullopt : std::optional<int32_t>(ids.front());
  };
  config.bos_token = one("bos_token_id");
  config.pad_token = one("pad_token_id");
  if (fields.find("do_sample") != nullptr) config.do_sample = fields.boolean("do_sample", true);
  const auto real = [&](std::string_view key, double low, double high) -> std::optional<double> {
    if (fields.find(key) == nullptr) return std::nullopt;
    return fields.number(key, low, high);
  };
  config.temperature = real("temperature", 0.0, 10.0);
  config.top_p = real("top_p", 0.0, 1.0);
  config.min_p = real("min_p", 0.0, 1.0);
  // As fp32, which the sampler computes in.
  if (config.top_p && static_cast<float>(*config.top_p) == 0.0f) {
    fail("{} is {}, wanted more than 0 and at most 1", fields.where("top_p"), *config.top_p);
  }
  if (config.min_p && static_cast<float>(*config.min_p) == 1.0f) {
    fail("{} is {}, wanted at least 0 and less than 1", fields.where("min_p"), *config.min_p);
  }
  config.repetition_penalty = real("repetition_penalty", 1e-3, 10.0);
  config.presence_penalty = real("presence_penalty", -10.0, 10.0);
  config.frequency_penalty = real("frequency_penalty", -10.0, 10.0);
  if (fields.find("top_k") != nullptr) config.top_k = fields.integer("top_k", -1, kMaxVocabulary);
  return config;
}

ModelConfig read_config(const std::filesystem::path& directory) {
  if (!directory_exists(directory)) {
    fail("{} is not a directory; wanted one with config.json and *.safetensors", directory.string());
  }
  const std::filesystem::path path = directory / "config.json";
  JsonLimits limits;
  limits.max_bytes = 64 << 20;
  return parse_config(parse_json_file(path, limits), path.string());
}

QuantizationInfo read_quantization(const std::filesystem::path& directory) {
  const std::optional<Json> config = read_optional(directory / "config.json");
  const std::optional<Json> quant = read_optional(directory / "hf_quant_config.json");
  return parse_quantization(config.value_or(Json::object()), quant ? &*quant : nullptr,
                            (directory / "config.json").string());
}

GenerationConfig read_generation_config(const std::filesystem::path& directory) {
  const std::filesystem::path path = directory / "generation_config.json";
  const std::optional<Json> json = read_optional(path);
  return json ? parse_generation_config(*json, path.string()) : GenerationConfig{};
}

Json write_config(const ModelConfig& config, const Json& quantization) {
  const bool moe = config.experts > 0;
  Json text;
  text["model_type"] = moe ? "qwen3_5_moe_text" : "qwen3_5_text";
  text["hidden_size"] = config.hidden;
  text["num_hidden_layers"] = config.layers;
  Json types = Json::array();
  for (LayerKind kind : config.layer_kinds) {
    types.push_back(kind == LayerKind::kAttention ? "full_attention" : "linear_attention");
  }
  text["layer_types"] = types;
  text["num_attention_heads"] = config.heads;
  text["num_key_value_heads"] = config.kv_heads;
  text["head_dim"] = config.head_dim;
  text["attn_output_gate"] = config.attention_gate;
  text["attention_bias"] = false;
  text["linear_num_key_heads"] = config.linear_key_heads;
  text["linear_num_value_heads"] = config.linear_value_heads;
  text["linear_key_head_dim"] = config.linear_key_dim;
  text["linear_value_head_dim"] = config.linear_value_dim;
  text["linear_conv_kernel_dim"] = config.conv_taps;
  text["mamba_ssm_dtype"] = "float32";
  if (moe) {
    text["num_experts"] = config.experts;
    text["num_experts_per_tok"] = config.top_k;
    text["moe_intermediate_size"] = config.moe_intermediate;
    text["shared_expert_intermediate_size"] = config.shared_intermediate;
    if (!config.renormalize) text["norm_topk_prob"] = false;
  } else {
    text["intermediate_size"] = config.intermediate;
  }
  text["vocab_size"] = config.vocabulary;
  text["tie_word_embeddings"] = config.tied_head;
  text["rms_norm_eps"] = static_cast<double>(config.norm_eps) == static_cast<double>(1e-6f) ? 1e-6 : config.norm_eps;
  text["hidden_act"] = "silu";
  text["max_position_embeddings"] = config.max_positions;
  text["rope_parameters"] = {
      {"rope_type", "default"},
      {"rope_theta", config.rope_theta},
      {"partial_rotary_factor", static_cast<double>(config.rotary_dim) / static_cast<double>(config.head_dim)}};
  text["mtp_num_hidden_layers"] = config.mtp_layers;
  text["mtp_use_dedicated_embeddings"] = false;
  if (config.eos_tokens.size() == 1) {
    text["eos_token_id"] = config.eos_tokens.front();
  } else if (!config.eos_tokens.empty()) {
    text["eos_token_id"] = config.eos_tokens;
  }
  text["dtype"] = "bfloat16";

  Json root;
  root["architectures"] = {moe ? "Qwen3_5MoeForConditionalGeneration" : "Qwen3_5ForConditionalGeneration"};
  root["model_type"] = moe ? "qwen3_5_moe" : "qwen3_5";
  root["text_config"] = text;
  root["tie_word_embeddings"] = config.tied_head;
  if (!quantization.is_null()) root["quantization_config"] = quantization;
  return root;
}

}  // namespace fourfold::model
