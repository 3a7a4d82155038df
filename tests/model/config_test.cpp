// config.json in both nestings, its limits, and the files beside it.
#include "model/config.h"
#include "base/json.h"

#include <gtest/gtest.h>

#include <fstream>

#include "base/random.h"
#include "checkpoint_util.h"
#include "model/inventory.h"

namespace fourfold::model {
namespace {

// The text fields of a published mixture-of-experts model (35B-A3B).
Json text_fields() {
  return parse_json(R"({
    "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "num_hidden_layers": 40, "full_attention_interval": 4,
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "attn_output_gate": true,
    "attention_bias": false, "attention_dropout": 0.0, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    "mamba_ssm_dtype": "float32", "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "mlp_only_layers": [], "vocab_size": 248320,
    "tie_word_embeddings": false, "rms_norm_eps": 1e-06, "hidden_act": "silu", "max_position_embeddings": 262144,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25,
                        "mrope_interleaved": true, "mrope_section": [11, 11, 10]},
    "partial_rotary_factor": 0.25, "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": false,
    "bos_token_id": null, "eos_token_id": 248044, "pad_token_id": null, "dtype": "bfloat16"})",
                    "test");
}

Json nested(const Json& text) {
  return {{"architectures", {"Qwen3_5MoeForConditionalGeneration"}},
          {"model_type", "qwen3_5_moe"},
          {"text_config", text},
          {"vision_config", {{"depth", 27}}},
          {"tie_word_embeddings", false}};
}

void expect_published(const ModelConfig& config) {
  EXPECT_EQ(config.hidden, 2048);
  EXPECT_EQ(config.layers, 40);
  EXPECT_EQ(config.attention_layers(), 10);
  EXPECT_EQ(config.delta_net_layers(), 30);
  EXPECT_EQ(config.layer_kinds[3], LayerKind::kAttention);
  EXPECT_EQ(config.layer_kinds[4], LayerKind::kDeltaNet);
  EXPECT_EQ(config.conv_channels(), 8192);
  EXPECT_EQ(config.rotary_dim, 64);
  EXPECT_EQ(config.rope_theta, 1e7);
  EXPECT_EQ(config.experts, 256);
  EXPECT_EQ(config.top_k, 8);
  EXPECT_TRUE(config.renormalize) << "absent means yes";
  EXPECT_TRUE(config.attention_gate);
  EXPECT_EQ(config.mtp_layers, 1);
  EXPECT_EQ(config.eos_tokens, std::vector<int32_t>{248044});
  EXPECT_EQ(config.vocabulary, 248320);
}

TEST(Config, BothNestings) {
  expect_published(parse_config(nested(text_fields()), "config.json"));
  expect_published(parse_config(text_fields(), "config.json"));
  Json untyped = text_fields();
  untyped.erase("model_type");
  expect_published(parse_config(nested(untyped), "config.json"));
}

TEST(Config, LayerTypesOrInterval) {
  Json text = text_fields();
  text["num_hidden_layers"] = 3;
  text["layer_types"] = {"full_attention", "linear_attention", "linear_attention"};
  const ModelConfig config = parse_config(text, "c");
  EXPECT_EQ(config.layer_kinds[0], LayerKind::kAttention);
  EXPECT_EQ(config.attention_layers(), 1);
  text["layer_types"] = {"full_attention", "linear_attention", "sliding_attention"};
  expect_error([&] { parse_config(text, "c"); }, {"c: layer_types[2]", "sliding_attention", "\"linear_attention\""});
  text["layer_types"] = {"full_attention"};
  expect_error([&] { parse_config(text, "c"); }, {"layer_types is a list of 1", "num_hidden_layers = 3"});
}

TEST(Config, RotaryWhereverItStands) {
  Json text = text_fields();
  text.erase("rope_parameters");
  text["rope_theta"] = 5e6;
  EXPECT_EQ(parse_config(text, "c").rope_theta, 5e6);
  EXPECT_EQ(parse_config(text, "c").rotary_dim, 64);
  text["rope_scaling"] = {{"type", "yarn"}, {"factor", 4}};
  expect_error([&] { parse_config(text, "c"); }, {"rope_scaling.type", "'yarn'", "supported is 'default'"});
  text["rope_scaling"] = {{"type", "default"}, {"rope_theta", 1e6}};
  expect_error([&] { parse_config(text, "c"); }, {"rope_theta is 5000000", "also given as 1000000"});
  text.erase("rope_scaling");
  text["partial_rotary_factor"] = 0.3;
  expect_error([&] { parse_config(text, "c"); }, {"partial_rotary_factor", "even number of rotary dimensions"});
}

TEST(Config, DenseFamily) {
  Json text = text_fields();
  text["model_type"] = "qwen3_5_text";
  text["output_gate_type"] = "swish";
  expect_error([&] { parse_config(text, "c"); }, {"intermediate_size is missing"});
  text["intermediate_size"] = 17408;
  const ModelConfig config = parse_config(text, "c");
  EXPECT_EQ(config.experts, 0);
  EXPECT_EQ(config.intermediate, 17408);
}

struct BadField {
  const char* field;
  const char* value;
  std::vector<std::string> message;
};

TEST(Config, EveryBadFieldIsNamedWithWhatWasFoundAndWanted) {
  const std::vector<BadField> fields = {
      {"model_type", R"("llama")", {"model_type is 'llama'", "supported are qwen3_5_moe, qwen3_5_moe_text, qwen3_5"}},
      {"model_type", "7", {"model_type is 7", "a string"}},
      {"hidden_size", "null", {"hidden_size is missing", "integer from 1"}},
      {"hidden_size", "\"2048\"", {"hidden_size is \"2048\"", "integer from 1"}},
      {"hidden_size", "2048.0", {"hidden_size is 2048.0"}},
      {"hidden_size", "-1", {"hidden_size is -1"}},
      {"hidden_size", "0", {"hidden_size is 0"}},
      {"hidden_size", "1e30", {"hidden_size is"}},
      {"hidden_size", "18446744073709551615", {"hidden_size is 18446744073709551615", "integer from 1 to 1048576"}},
      {"hidden_size", "[2048]", {"hidden_size is [2048]"}},
      {"num_hidden_layers", "100000", {"num_hidden_layers is 100000"}},
      {"vocab_size", "true", {"vocab_size is true"}},
      {"rms_norm_eps", "\"x\"", {"rms_norm_eps is \"x\"", "number from"}},
      {"rms_norm_eps", "-1e-6", {"rms_norm_eps is -1e-06"}},
      {"rms_norm_eps", "1e999", {"not valid JSON", "1e999"}},
      {"tie_word_embeddings", "\"no\"", {"tie_word_embeddings is \"no\"", "true or false"}},
      {"attention_bias", "true", {"attention_bias is true, supported is false"}},
      {"hidden_act", "\"gelu\"", {"hidden_act is 'gelu'", "'silu'"}},
      {"output_gate_type", "\"tanh\"", {"output_gate_type is 'tanh'"}},
      {"max_position_embeddings", "1", {"max_position_embeddings is 1", "from 2 to"}},
      {"num_experts_per_tok", "257", {"num_experts_per_tok is 257", "from 1 to 256"}},
      {"num_experts", "0", {"num_experts is 0"}},
      {"num_key_value_heads", "3", {"num_attention_heads 16 is not a multiple of num_key_value_heads 3"}},
      {"linear_num_value_heads", "17", {"linear_num_value_heads 17 is not a multiple of linear_num_key_heads 16"}},
      {"num_attention_heads", "1048576", {"num_attention_heads x head_dim", "at most"}},
      {"mlp_only_layers", "[1]", {"mlp_only_layers is [1], supported is []"}},
      {"mtp_num_hidden_layers", "2", {"mtp_num_hidden_layers is 2", "from 0 to 1"}},
      {"mtp_use_dedicated_embeddings", "true", {"mtp_use_dedicated_embeddings is true"}},
      {"eos_token_id", "-1", {"eos_token_id is -1"}},
      {"eos_token_id", "[248046, \"x\"]", {"eos_token_id is \"x\""}},
      {"eos_token_id", "248320", {"eos_token_id 248320 is outside the vocabulary of 248320"}},
      {"rope_parameters", "3", {"rope_parameters. is integer, wanted an object"}},
      {"layer_types", "{}", {"layer_types is {}"}},
  };
  for (const BadField& bad : fields) {
    SCOPED_TRACE(std::string(bad.field) + " " + bad.value);
    Json text = text_fields();
    std::vector<std::string> message = bad.message;
    message.push_back("dir/config.json");
    expect_error(
        [&] {
          text[bad.field] = parse_json(bad.value, "dir/config.json");
          parse_config(nested(text), "dir/config.json");
        },
        message);
  }
  expect_error([] { parse_config(Json::array(), "c"); }, {"c: ", "is array, wanted an object"});
  Json root = nested(text_fields());
  root["text_config"] = 4;
  expect_error([&] { parse_config(root, "c"); }, {"text_config", "integer"});
  root["text_config"] = Json::object();
  root.erase("model_type");
  expect_error([&] { parse_config(root, "c"); }, {"text_config.model_type is missing"});
}

TEST(Config, LayersTimesExpertsAreBounded) {
  Json text = text_fields();
  text["num_hidden_layers"] = 1024;
  text["num_experts"] = 8192;
  expect_error([&] { parse_config(text, "c"); }, {"num_hidden_layers x num_experts", "1024 x 8192"});
}

TEST(Config, WhatIsWrittenIsReadBack) {
  for (const char* name : {"35B-A3B", "122B-A10B", "397B-A17B", "27B"}) {
    ModelConfig config = shape_config(name);
    config.mtp_layers = 1;
    const ModelConfig back = parse_config(write_config(config, nullptr), name);
    EXPECT_EQ(back.model_type, config.model_type);
    EXPECT_EQ(back.layer_kinds, config.layer_kinds);
    EXPECT_EQ(back.hidden, config.hidden);
    EXPECT_EQ(back.experts, config.experts);
    EXPECT_EQ(back.intermediate, config.intermediate);
    EXPECT_EQ(back.rotary_dim, config.rotary_dim);
    EXPECT_EQ(back.norm_eps, config.norm_eps);
    EXPECT_EQ(back.eos_tokens, config.eos_tokens);
    EXPECT_EQ(back.mtp_layers, 1);
    EXPECT_EQ(back.renormalize, config.renormalize);
  }
}

TEST(Config, PublishedShapesHaveThePublishedSizes) {
  const auto parameters = [](const char* name) {
    double total = 0;
    for (const WeightSpec& spec : weight_specs(shape_config(name))) total += static_cast<double>(spec.elements());
    return total * 1e-9;
  };
  EXPECT_NEAR(parameters("35B-A3B"), 34.66, 0.01);
  EXPECT_NEAR(parameters("122B-A10B"), 122.1, 0.1);
  EXPECT_NEAR(parameters("397B-A17B"), 396.4, 0.1);
  expect_error([] { shape_config("35B"); }, {"unknown model shape '35B'", "35B-A3B, 122B-A10B, 397B-A17B, 27B"});
}

TEST(GenerationConfig, ScalarsListsAndErrors) {
  const GenerationConfig config = parse_generation_config(
      parse_json(R"({"bos_token_id":248044,"pad_token_id":null,"eos_token_id":[248046,248044],"do_sample":true,
                     "top_k":20,"top_p":0.95,"temperature":0.6,"transformers_version":"5"})",
                 "t"),
      "g");
  EXPECT_EQ(config.eos_tokens, (std::vector<int32_t>{248046, 248044}));
  EXPECT_EQ(config.bos_token, 248044);
  EXPECT_FALSE(config.pad_token);
  EXPECT_EQ(config.top_k, 20);
  EXPECT_EQ(config.top_p, 0.95);
  EXPECT_FALSE(config.min_p);
  EXPECT_EQ(parse_generation_config(parse_json(R"({"eos_token_id":3})", "t"), "g").eos_tokens, std::vector<int32_t>{3});
  for (const char* bad : {R"({"temperature":-1})", R"({"temperature":"hot"})", R"({"top_p":1.5})", R"({"top_k":2.5})",
                          R"({"top_p":0})", R"({"top_p":1e-60})", R"({"min_p":1})", R"({"top_k":-2})",
                          R"({"do_sample":1})", R"({"eos_token_id":{}})", "[]"}) {
    expect_error([&] { parse_generation_config(parse_json(bad, "t"), "g"); }, {"g: "});
  }
}

TEST(Quantization, ReadsBothFilesAndBothFormats) {
  const Json config = parse_json(
      R"({"quantization_config":{"quant_method":"modelopt","quant_algo":"NVFP4","ignore":["lm_head"]}})", "t");
  const Json quant = parse_json(
      R"({"producer":{},"quantization":{"quant_algo":"NVFP4","kv_cache_quant_algo":"FP8","exclude_modules":["lm_head"]}})",
      "t");
  const QuantizationInfo info = parse_quantization(config, &quant, "c");
  EXPECT_EQ(info.method, "modelopt");
  EXPECT_EQ(info.algorithm, "NVFP4");
  EXPECT_EQ(info.kv_cache, "FP8") << "only hf_quant_config.json says so";
  EXPECT_EQ(info.ignored, std::vector<std::string>{"lm_head"});
  const Json ct =
      parse_json(R"({"quantization_config":{"quant_method":"compressed-tensors","format":"mixed-precision"}})", "t");
  EXPECT_EQ(parse_quantization(ct, nullptr, "c").algorithm, "mixed-precision");
  EXPECT_EQ(parse_quantization(Json::object(), nullptr, "c").method, "");
  const Json bad = parse_json(R"({"quantization_config":{"quant_method":7}})", "t");
  expect_error([&] { parse_quantization(bad, nullptr, "c"); }, {"quantization_config.quant_method is 7"});
}

TEST(Config, BitFlipsNeverCrash) {
  const std::string text = nested(text_fields()).dump();
  Random random(9);
  for (int trial = 0; trial < 3000; ++trial) {
    std::string changed = text;
    for (uint64_t flips = random.below(3) + 1; flips > 0; --flips) {
      changed[random.below(changed.size())] = static_cast<char>(random.below(128));
    }
    try {
      const ModelConfig config = parse_config(parse_json(changed, "t"), "c");
      EXPECT_LE(config.hidden, kMaxDimension);
      EXPECT_LE(config.layers * config.experts, kMaxLayerExperts);
    } catch (const Error&) {
    }
  }
}

}  // namespace
}  // namespace fourfold::model
