// Checkpoints that are wrong in one place: each is an error that names the tensor, its layer and its expert. And the
// tensor inventories of published checkpoints, in miniature.
#include "model/checkpoint.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <csignal>
#include <fstream>
#include <limits>

#include "base/interrupt.h"
#include "base/json.h"
#include "base/random.h"
#include "checkpoint_util.h"
#include "model/inventory.h"
#include "model/report.h"

namespace fourfold::model {
namespace {

namespace fs = std::filesystem;

constexpr const char* kTrunk = "model.language_model.";
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

void load(const fs::path& directory) {
  Checkpoint checkpoint(directory);
  const std::vector<std::string> problems = check_weights(checkpoint);
  if (!problems.empty()) throw Error(problems.front());
}

// A directory whose single shard is rewritten after `change`.
class Changed {
 public:
  explicit Changed(GeneratedFormat format, const std::function<void(GeneratorOptions&)>& adjust = {}) {
    GeneratorOptions options = small_options(format);
    if (adjust) adjust(options);
    generate_checkpoint(path(), options);
  }
  fs::path path() const { return directory_.path() / "c"; }
  Changed& apply(const std::function<void(LooseCheckpoint&)>& change) {
    LooseCheckpoint loose(path());
    change(loose);
    loose.write();
    return *this;
  }

 private:
  TemporaryDirectory directory_;
};

struct Damage {
  const char* label;
  GeneratedFormat format;
  std::function<void(LooseCheckpoint&)> change;
  std::vector<std::string> message;
};

std::string expert(int layer, int number, const char* rest) {
  return fmt::format("{}layers.{}.mlp.experts.{}.{}", kTrunk, layer, number, rest);
}

std::vector<Damage> damages() {
  using G = GeneratedFormat;
  const auto erase = [](std::string name) {
    return [name](LooseCheckpoint& c) {
      c.at(name);
      c.tensors.erase(name);
    };
  };
  return {
      {"missing_weight",
       G::kModeloptNvfp4,
       erase(expert(2, 3, "up_proj.weight")),
       {"layer 2, expert 3", "experts.3.up_proj.weight is missing, wanted [128, 160]"}},
      {"missing_block_scale",
       G::kModeloptNvfp4,
       erase(expert(1, 4, "down_proj.weight_scale")),
       {"layer 1, expert 4", "down_proj.weight_scale is missing", "modelopt NVFP4"}},
      {"missing_tensor_scale",
       G::kModeloptNvfp4,
       erase(expert(1, 0, "gate_proj.weight_scale_2")),
       {"layer 1, expert 0", "gate_proj.weight_scale_2 is missing"}},
      {"missing_global_scale",
       G::kCtNvfp4,
       erase(expert(0, 2, "gate_proj.weight_global_scale")),
       {"layer 0, expert 2", "weight_global_scale is missing", "compressed-tensors"}},
      {"missing_fp8_scale",
       G::kModeloptFp8,
       erase("model.language_model.layers.3.self_attn.q_proj.weight_scale"),
       {"layer 3", "self_attn.q_proj.weight_scale is missing", "F8_E4M3"}},
      {"missing_vector",
       G::kBf16,
       erase("model.language_model.layers.0.linear_attn.A_log"),
       {"layer 0", "linear_attn.A_log is missing"}},
      {"missing_head", G::kBf16, erase("lm_head.weight"), {"tensor lm_head.weight is missing, wanted [64, 160]"}},
      {"missing_mtp", G::kBf16, erase("mtp.fc.weight"), {"MTP head", "mtp.fc.weight is missing"}},
      {"extra_tensor",
       G::kBf16,
       [](LooseCheckpoint& c) {
         c.add_floats("model.language_model.layers.1.mlp.bias", {2}, {0, 0});
       },
       {"1 tensor that the model has no place for", "layers.1.mlp.bias"}},
      {"extra_layer",
       G::kBf16,
       [](LooseCheckpoint& c) {
         c.tensors["model.language_model.layers.4.input_layernorm.weight"] =
             c.at("model.language_model.layers.3.input_layernorm.weight");
       },
       {"layers.4.input_layernorm.weight"}},
      {"huge_tensor_scale",
       G::kModeloptNvfp4,
       [](LooseCheckpoint& c) { c.set_float(expert(1, 2, "up_proj.weight_scale_2"), 2e35f); },
       {"layer 1, expert 2", "up_proj.weight_scale_2: the scale is 2e+35", "finite"}},
      {"huge_grid_scale",
       G::kFp8Block,
       [](LooseCheckpoint& c) {
         c.set_float("model.language_model.layers.3.self_attn.k_proj.weight_scale_inv", 1e37f);
       },
       {"layer 3", "k_proj.weight_scale_inv: scale 0 is 1e+37", "finite"}},
      {"unknown_sibling",
       G::kModeloptNvfp4,
       [](LooseCheckpoint& c) { c.add_floats(expert(0, 0, "gate_proj.weight_zero_point"), {}, {0}); },
       {"no place for", "weight_zero_point"}},
      {"wrong_shape",
       G::kBf16,
       [](LooseCheckpoint& c) {
         c.at("model.language_model.layers.2.linear_attn.out_proj.weight").shape = {128, 160};
       },
       {"layer 2", "out_proj.weight: shape is [128, 160], wanted [160, 128]"}},
      {"fused_wrong_shape",
       G::kBf16,
       [](LooseCheckpoint& c) {
         c.at("model.language_model.layers.2.mlp.experts.gate_up_proj").shape = {5, 160, 256};
       },
       {"layer 2", "gate_up_proj: shape is [5, 160, 256], wanted [5, 256, 160]"}},
      {"block_scale_shape",
       G::kModeloptNvfp4,
       [](LooseCheckpoint& c) {
         c.at(expert(2, 1, "gate_proj.weight_scale")).shape = {10, 128};
       },
       {"layer 2, expert 1", "weight_scale: shape is [10, 128], wanted [128, 10]"}},
      {"tensor_scale_shape",
       G::kModeloptNvfp4,
       [](LooseCheckpoint& c) {
         c.add_floats(expert(2, 1, "gate_proj.weight_scale_2"), {2}, {1, 1});
       },
       {"layer 2, expert 1", "shape is [2], wanted a scalar"}},
      {"fp8_scale_shape",
       G::kFp8Block,
       [](LooseCheckpoint& c) {
         c.add_floats(expert(2, 1, "gate_proj.weight_scale_inv"), {2, 2}, {1, 1, 1, 1});
       },
       {"layer 2, expert 1", "shape is [2, 2]", "[128, 160], wanted [1, 2] (blocks of 128 x 128)"}},
      {"conv_shape",
       G::kBf16,
       [](LooseCheckpoint& c) {
         c.at("model.language_model.layers.1.linear_attn.conv1d.weight").shape = {4, 1, 256};
       },
       {"conv1d.weight: shape is [4, 1, 256], wanted [256, 1, 4]"}},
      {"vector_shape",
       G::kBf16,
       [](LooseCheckpoint& c) {
         c.at("model.language_model.norm.weight").shape = {16, 10};
       },
       {"norm.weight: shape is [16, 10], wanted [160]"}},
      {"nan_block_scale",
       G::kModeloptNvfp4,
       [](LooseCheckpoint& c) { c.at(expert(3, 2, "up_proj.weight_scale")).bytes[23] = 0x7f; },
       {"layer 3, expert 2", "up_proj.weight_scale", "row 2, block 3 is NaN (0x7f)"}},
      {"nan_block_scale_negative",
       G::kCtNvfp4,
       [](LooseCheckpoint& c) { c.at(expert(3, 2, "up_proj.weight_scale")).bytes[1279] = 0xff; },
       {"layer 3, expert 2", "row 127, block 9 is NaN (0xff)"}},
      {"negative_block_scale",
       G::kModeloptNvfp4,
       [](LooseCheckpoint& c) { c.at(expert(3, 2, "up_proj.weight_scale")).bytes[0] = 0xc0; },
       {"row 0, block 0 is negative (0xc0)"}},
      {"nan_tensor_scale",
       G::kModeloptNvfp4,
       [](LooseCheckpoint& c) { c.set_float(expert(1, 1, "up_proj.weight_scale_2"), kNan); },
       {"layer 1, expert 1", "weight_scale_2: the scale is nan", "positive finite"}},
      {"infinite_tensor_scale",
       G::kModeloptNvfp4,
       [](LooseCheckpoint& c) { c.set_float(expert(1, 1, "up_proj.weight_scale_2"), kInfinity); },
       {"the scale is inf"}},
      {"negative_tensor_scale",
       G::kModeloptNvfp4,
       [](LooseCheckpoint& c) { c.set_float(expert(1, 1, "up_proj.weight_scale_2"), -1.0f); },
       {"the scale is -1"}},
      {"zero_tensor_scale",
       G::kModeloptNvfp4,
       [](LooseCheckpoint& c) { c.set_float(expert(1, 1, "up_proj.weight_scale_2"), 0.0f); },
       {"the scale is 0"}},
      {"zero_global_scale",
       G::kCtNvfp4,
       [](LooseCheckpoint& c) { c.set_float(expert(1, 1, "up_proj.weight_global_scale"), 0.0f); },
       {"weight_global_scale: the scale is 0"}},
      {"denormal_global_scale",
       G::kCtNvfp4,
       [](LooseCheckpoint& c) { c.set_float(expert(1, 1, "up_proj.weight_global_scale"), 1e-42f); },
       {"weight_global_scale: the scale is"}},
      {"nan_fp8_scale",
       G::kFp8Block,
       [](LooseCheckpoint& c) { c.set_float(expert(0, 4, "down_proj.weight_scale_inv"), kNan); },
       {"layer 0, expert 4", "weight_scale_inv: scale 0 is nan"}},
      {"zero_fp8_scale",
       G::kModeloptFp8,
       [](LooseCheckpoint& c) { c.set_float("model.language_model.layers.3.self_attn.v_proj.weight_scale", 0.0f); },
       {"v_proj.weight_scale: scale 0 is 0", "not all zero"}},
      {"nan_vector",
       G::kF32,
       [](LooseCheckpoint& c) { c.set_float("model.language_model.layers.0.linear_attn.A_log", kNan); },
       {"A_log: element 0 is nan"}},
      {"block_scale_dtype",
       G::kModeloptNvfp4,
       [](LooseCheckpoint& c) { c.at(expert(0, 0, "up_proj.weight_scale")).type = StoredType::kU8; },
       {"weight_scale: dtype is U8, wanted F8_E4M3"}},
      {"weight_dtype",
       G::kBf16,
       [](LooseCheckpoint& c) {
         c.at("model.language_model.layers.3.self_attn.k_proj.weight").type = StoredType::kI16;
       },
       {"k_proj.weight: dtype is I16, wanted BF16"}},
      {"vector_dtype",
       G::kBf16,
       [](LooseCheckpoint& c) { c.at("model.language_model.norm.weight").type = StoredType::kI16; },
       {"norm.weight: dtype is I16"}},
      {"scale_dtype",
       G::kFp8Channel,
       [](LooseCheckpoint& c) {
         c.at("model.language_model.layers.3.self_attn.k_proj.weight_scale").type = StoredType::kI16;
       },
       {"k_proj.weight_scale: dtype is I16"}},
      {"scale_beside_plain",
       G::kBf16,
       [](LooseCheckpoint& c) { c.add_floats("model.language_model.layers.3.self_attn.k_proj.weight_scale", {}, {1}); },
       {"k_proj.weight_scale: it does not belong to", "of dtype BF16"}},
      {"inverse_beside_factor",
       G::kModeloptNvfp4,
       [](LooseCheckpoint& c) { c.add_floats(expert(0, 0, "up_proj.weight_global_scale"), {1}, {1}); },
       {"weight_global_scale: it does not belong to"}},
      {"both_fp8_scales",
       G::kFp8Block,
       [](LooseCheckpoint& c) { c.add_floats(expert(0, 0, "up_proj.weight_scale"), {}, {1}); },
       {"exists beside it"}},
      {"packed_and_plain",
       G::kCtNvfp4,
       [](LooseCheckpoint& c) {
         c.add_floats(expert(0, 0, "up_proj.weight"), {128, 160}, std::vector<float>(128 * 160));
       },
       {"exists beside it"}},
      {"stored_shape",
       G::kCtNvfp4,
       [](LooseCheckpoint& c) {
         LooseTensor shape{StoredType::kI64, {2}, std::vector<uint8_t>(16)};
         shape.bytes[0] = 128;
         shape.bytes[8] = 128;
         c.tensors[expert(0, 0, "up_proj.weight_shape")] = shape;
       },
       {"weight_shape: it says [128, 128], wanted [128, 160]"}},
      {"two_prefixes",
       G::kBf16,
       [](LooseCheckpoint& c) { c.tensors["model.norm.weight"] = c.at("model.language_model.norm.weight"); },
       {"is the same weight as"}},
  };
}

TEST(Damaged, EveryDamageIsAnErrorThatNamesThePlace) {
  std::map<GeneratedFormat, std::unique_ptr<Changed>> originals;
  for (const Damage& damage : damages()) {
    SCOPED_TRACE(damage.label);
    auto& original = originals[damage.format];
    if (!original) {
      original = std::make_unique<Changed>(damage.format);
      EXPECT_NO_THROW(load(original->path()));
    }
    const std::string untouched = read_file(original->path() / "model.safetensors");
    original->apply(damage.change);
    std::vector<std::string> message = damage.message;
    message.push_back(original->path().string());
    expect_error([&] { load(original->path()); }, message);
    // inspect lists it and goes on.
    const CheckpointReport report = inspect_checkpoint(original->path(), {});
    EXPECT_FALSE(report.problems.empty());
    EXPECT_GT(report.total.parameters, 0);
    write_file_atomically(original->path() / "model.safetensors", untouched);
  }
}

TEST(Checkpoint, DeadExpertsAreZerosAndNeverAnError) {
  for (const auto& [format, name] : {std::pair{GeneratedFormat::kModeloptNvfp4, ".weight_scale_2"},
                                     std::pair{GeneratedFormat::kCtNvfp4, ".weight_global_scale"}}) {
    Changed checkpoint(format, [](GeneratorOptions& options) { options.dead_experts = 1; });
    for (float scale : {0.0f, kNan, kInfinity, -1.0f}) {
      checkpoint.apply([&](LooseCheckpoint& c) { c.set_float(expert(1, 4, "gate_proj") + name, scale); });
      Checkpoint loaded(checkpoint.path());
      const ops::MatrixSource matrix = loaded.matrix("layers.1.mlp.experts.4.gate_proj", 128, 160);
      std::vector<float> row(160, 1.0f);
      ops::dequantize(matrix, 7, row.data());
      for (float value : row) EXPECT_EQ(value, 0.0f);
      EXPECT_FALSE(loaded.notes().empty());
    }
  }
}

TEST(Checkpoint, UnusableActivationScalesAreLeftOut) {
  Changed checkpoint(GeneratedFormat::kModeloptNvfp4);
  const auto input_scale = [&](float stored) {
    checkpoint.apply([&](LooseCheckpoint& c) { c.set_float(expert(0, 0, "up_proj.input_scale"), stored); });
    Checkpoint loaded(checkpoint.path());
    return loaded.matrix("layers.0.mlp.experts.0.up_proj", 128, 160).input_scale;
  };
  EXPECT_EQ(input_scale(0.25f), 0.25f);
  for (float bad : {0.0f, -1.0f, 1e-42f, kNan, kInfinity}) EXPECT_EQ(input_scale(bad), 0.0f) << bad;
  Changed inverse(GeneratedFormat::kCtNvfp4);
  inverse.apply([&](LooseCheckpoint& c) { c.set_float(expert(0, 0, "up_proj.input_global_scale"), 8.0f); });
  Checkpoint loaded(inverse.path());
  EXPECT_EQ(loaded.matrix("layers.0.mlp.experts.0.up_proj", 128, 160).input_scale, 0.125f);
}

TEST(Checkpoint, GateAndUpKeepTheirOwnTensorScale) {
  Changed checkpoint(GeneratedFormat::kModeloptNvfp4);
  checkpoint.apply([&](LooseCheckpoint& c) {
    c.set_float(expert(0, 0, "gate_proj.weight_scale_2"), 0.5f);
    c.set_float(expert(0, 0, "up_proj.weight_scale_2"), 0.25f);
  });
  Checkpoint loaded(checkpoint.path());
  EXPECT_EQ(loaded.matrix("layers.0.mlp.experts.0.gate_proj", 128, 160).tensor_scale, 0.5f);
  EXPECT_EQ(loaded.matrix("layers.0.mlp.experts.0.up_proj", 128, 160).tensor_scale, 0.25f);
}

TEST(Checkpoint, MtpPresentAbsentAndOnlyDeclared) {
  Changed with(GeneratedFormat::kBf16);
  EXPECT_EQ(Checkpoint(with.path()).config().mtp_layers, 1);
  with.apply([](LooseCheckpoint& c) {
    std::erase_if(c.tensors, [](const auto& entry) { return entry.first.starts_with("mtp."); });
  });
  Checkpoint declared(with.path());
  EXPECT_TRUE(declared.mtp_declared());
  EXPECT_EQ(declared.config().mtp_layers, 0);
  EXPECT_EQ(check_weights(declared), std::vector<std::string>{});
  EXPECT_EQ(declared.notes().size(), 1u);
}

TEST(Checkpoint, ABrokenMtpHeadIsAnErrorForThoseWhoDoNotUseIt) {
  const auto load_trunk = [](const std::filesystem::path& directory) {
    Checkpoint checkpoint(directory);
    for (const WeightSpec& spec : weight_specs(checkpoint.config())) {
      if (spec.mtp) continue;
      if (spec.is_vector) {
        checkpoint.vector(spec.name, spec.rows);
      } else {
        checkpoint.matrix(spec.name, spec.rows, spec.columns);
      }
    }
    checkpoint.finish();
  };
  struct Break {
    std::function<void(LooseCheckpoint&)> change;
    std::vector<std::string> message;
  };
  const std::vector<Break> breaks = {
      {[](LooseCheckpoint& c) { c.tensors.erase("mtp.fc.weight"); }, {"MTP head", "mtp.fc.weight is missing"}},
      {[](LooseCheckpoint& c) { c.tensors["mtp.extra.weight"] = c.at("mtp.norm.weight"); },
       {"no place for", "mtp.extra.weight"}},
      {[](LooseCheckpoint& c) {
         c.at("mtp.fc.weight").shape = {320, 160};
       },
       {"mtp.fc.weight: shape is [320, 160]"}},
      {[](LooseCheckpoint& c) { c.at("mtp.norm.weight").bytes.assign(320, 0xff); }, {"mtp.norm.weight", "nan"}},
  };
  for (const Break& damage : breaks) {
    Changed changed(GeneratedFormat::kBf16);
    EXPECT_NO_THROW(load_trunk(changed.path()));
    changed.apply(damage.change);
    expect_error([&] { load_trunk(changed.path()); }, damage.message);
  }
}

TEST(Checkpoint, TiedHeadIsTheEmbedding) {
  Changed tied(GeneratedFormat::kBf16, [](GeneratorOptions& options) { options.config.tied_head = true; });
  Checkpoint checkpoint(tied.path());
  EXPECT_EQ(checkpoint.matrix("lm_head", 64, 160).data, checkpoint.matrix("embed_tokens", 64, 160).data);
  EXPECT_EQ(check_weights(checkpoint), std::vector<std::string>{});
  // A copy of the head in the file is not in the way.
  tied.apply(
      [](LooseCheckpoint& c) { c.tensors["lm_head.weight"] = c.at("model.language_model.embed_tokens.weight"); });
  Checkpoint copied(tied.path());
  EXPECT_EQ(check_weights(copied), std::vector<std::string>{});
}

TEST(Checkpoint, MisalignedTensorsAreCopied) {
  Changed checkpoint(GeneratedFormat::kBf16);
  // A tensor of one byte before the others moves them to odd addresses.
  LooseCheckpoint loose(checkpoint.path());
  std::string header = "{\"model.visual.x\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}";
  std::string data = "x";
  for (const auto& [name, tensor] : loose.tensors) {
    header += fmt::format(",\"{}\":{{\"dtype\":\"{}\",\"shape\":[{}],\"data_offsets\":[{},{}]}}", name,
                          stored_type_name(tensor.type), fmt::join(tensor.shape, ","), data.size(),
                          data.size() + tensor.bytes.size());
    data.append(tensor.bytes.begin(), tensor.bytes.end());
  }
  header += "}";
  header.append((8 - header.size() % 8) % 8, ' ');
  std::string length(8, '\0');
  for (size_t i = 0; i < 8; ++i) length[i] = static_cast<char>(header.size() >> (8 * i) & 0xff);
  write_file_atomically(checkpoint.path() / "model.safetensors", length + header + data);
  Checkpoint loaded(checkpoint.path());
  int copies = 0;
  const auto problems = check_weights(loaded, [&](const WeightSpec& spec, const ops::MatrixSource* matrix) {
    if (matrix == nullptr) return;
    EXPECT_EQ(reinterpret_cast<uintptr_t>(matrix->data) % 2, 0u) << spec.name;
    copies += matrix->owner != nullptr;
    std::vector<float> row(static_cast<size_t>(spec.columns));
    ops::dequantize(*matrix, 0, row.data());
    uint16_t first = 0;
    const std::string name = spec.kind == WeightKind::kRoutedExpert
                                 ? ""
                                 : (spec.mtp || spec.name == "lm_head" ? "" : kTrunk) + spec.name + ".weight";
    if (name.empty()) return;
    std::memcpy(&first, loose.at(name).bytes.data(), 2);
    EXPECT_EQ(row[0], std::bit_cast<float>(static_cast<uint32_t>(first) << 16)) << spec.name;
  });
  EXPECT_EQ(problems, std::vector<std::string>{});
  EXPECT_GT(copies, 10);
}

TEST(Index, DisagreementsBetweenIndexAndShards) {
  const TemporaryDirectory directory;
  const fs::path path = directory / "c";
  GeneratorOptions options = small_options(GeneratedFormat::kBf16);
  options.shards = 3;
  ASSERT_EQ(generate_checkpoint(path, options).shards, 3);
  EXPECT_NO_THROW(load(path));
  const fs::path index = path / "model.safetensors.index.json";
  const Json good = parse_json_file(index);
  const std::string first = good["weight_map"].begin().key();
  const auto with = [&](const std::function<void(Json&)>& change) {
    Json json = good;
    change(json);
    write_file_atomically(index, json.dump());
    return [&path] { load(path); };
  };
  expect_error(with([&](Json& j) { j["weight_map"]["model.none"] = "model-00001-of-00003.safetensors"; }),
               {"model-00001-of-00003.safetensors", "'model.none' is missing", "index lists it"});
  expect_error(with([&](Json& j) { j["weight_map"].erase(first); }), {first, "is not in the index"});
  expect_error(with([&](Json& j) { j["weight_map"][first] = "model-00003-of-00003.safetensors"; }),
               {"model-00003-of-00003.safetensors", "is missing, the index lists it there"});
  expect_error(with([&](Json& j) { j["weight_map"][first] = "model-00004-of-00003.safetensors"; }),
               {"model-00004-of-00003.safetensors", "No such file"});
  for (const char* evil : {"../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", ".hidden.safetensors",
                           "weights.bin", "a\\b.safetensors"}) {
    expect_error(with([&](Json& j) { j["weight_map"][first] = evil; }),
                 {"index.json", first, "wanted the name of a .safetensors file in the same directory"});
  }
  expect_error(with([&](Json& j) { j["weight_map"][first] = 3; }), {"wanted the name of a .safetensors file"});
  expect_error(with([&](Json& j) { j["weight_map"] = Json::array(); }), {"weight_map is missing, wanted an object"});
  expect_error(with([&](Json& j) { j["weight_map"] = Json::object(); }), {"weight_map is empty"});
  expect_error(with([&](Json& j) { j = Json::array(); }), {"weight_map is missing"});
  with([](Json& j) { j["metadata"]["total_size"] = 5e12; });
  EXPECT_EQ(Checkpoint(path).notes().size(), 1u) << "a note, not an error";
  EXPECT_NO_THROW(load(path));

  // Without an index every file counts, and a tensor in two of them is an error.
  fs::remove(index);
  EXPECT_NO_THROW(load(path));
  fs::copy_file(path / "model-00002-of-00003.safetensors", path / "zz.safetensors");
  expect_error([&] { load(path); }, {"zz.safetensors", "is the same weight as", "model-00002-of-00003.safetensors"});
  // With one, a file that is not listed is only noted.
  write_file_atomically(index, good.dump());
  EXPECT_NO_THROW(load(path));
  EXPECT_EQ(Checkpoint(path).notes().size(), 1u);
}

TEST(Index, MissingPieces) {
  const TemporaryDirectory directory;
  expect_error([&] { load(directory / "none"); }, {"none is not a directory"});
  expect_error([&] { load(directory.path()); }, {"config.json", "No such file"});
  write_file_atomically(directory / "config.json", write_config(small_checkpoint_config(), nullptr).dump());
  expect_error([&] { load(directory.path()); }, {"no *.safetensors file"});
  write_file_atomically(directory / "model.safetensors", "");
  expect_error([&] { load(directory.path()); }, {"model.safetensors: 0 bytes"});
}

TEST(Damaged, TruncationsAndBitFlipsNeverCrash) {
  for (GeneratedFormat format :
       {GeneratedFormat::kModeloptMixed, GeneratedFormat::kCtNvfp4, GeneratedFormat::kFp8Block}) {
    Changed checkpoint(format);
    const std::string bytes = read_file(checkpoint.path() / "model.safetensors");
    uint64_t length = 0;
    for (size_t i = 8; i-- > 0;) length = length << 8 | static_cast<unsigned char>(bytes[i]);
    Random random(static_cast<uint64_t>(format));
    int loaded = 0, failed = 0;
    for (int trial = 0; trial < 60; ++trial) {
      std::string changed = bytes;
      if (trial % 4 == 0) changed.resize(random.below(bytes.size()));
      for (uint64_t flips = random.below(20) + 1; flips > 0 && !changed.empty(); --flips) {
        // Half of them in the header, half in the data.
        const uint64_t limit = flips % 2 == 0 ? std::min<uint64_t>(length + 8, changed.size()) : changed.size();
        changed[random.below(limit)] ^= static_cast<char>(1u << random.below(8));
      }
      write_file_atomically(checkpoint.path() / "model.safetensors", changed);
      const CheckpointReport report = inspect_checkpoint(checkpoint.path(), {});
      (report.problems.empty() ? loaded : failed) += 1;
    }
    EXPECT_GT(failed, 30);
  }
}

// The tensor lists of published checkpoints (names and counts as documented; shapes scaled down).
ModelConfig scaled(const char* shape) {
  ModelConfig config = shape_config(shape);
  config.hidden = 16;
  config.vocabulary = 16;
  config.heads = 1;
  config.kv_heads = 1;
  config.head_dim = 16;
  config.rotary_dim = 4;
  config.linear_key_heads = config.linear_value_heads = 1;
  config.linear_key_dim = config.linear_value_dim = 16;
  config.moe_intermediate = config.shared_intermediate = 16;
  config.eos_tokens = {0};
  config.mtp_layers = 1;
  return config;
}

TEST(Inventory, MixedPrecision35BHas124468Tensors) {
  const TemporaryDirectory directory;
  GeneratorOptions options;
  options.config = scaled("35B-A3B");
  options.format = GeneratedFormat::kModeloptMixed;
  options.fused_experts = false;
  options.visual = true;
  options.shards = 3;
  const GeneratedFiles files = generate_checkpoint(directory / "c", options);
  EXPECT_EQ(files.tensors - 3 + 333, 124468) << "with the 333 tensors of the real vision tower instead of three";
  const CheckpointReport report = inspect_checkpoint(directory / "c", {});
  EXPECT_EQ(report.problems, std::vector<std::string>{});
  EXPECT_EQ(report.modules.at("layers.N.mlp.experts.E.gate_proj").at("nvfp4"), 40 * 256);
  EXPECT_EQ(report.modules.at("lm_head").at("nvfp4"), 1);
  EXPECT_EQ(report.modules.at("layers.N.linear_attn.in_proj_qkv").at("fp8"), 30);
  EXPECT_EQ(report.modules.at("layers.N.linear_attn.in_proj_a").at("bf16"), 30);
  EXPECT_EQ(report.modules.at("mtp.layers.0.mlp.experts.E.down_proj").at("bf16"), 256);
}

TEST(Inventory, ExpertsOnly397B) {
  const TemporaryDirectory directory;
  GeneratorOptions options;
  options.config = scaled("397B-A17B");
  set_layers(options.config, 8);  // of 60
  options.format = GeneratedFormat::kModeloptNvfp4;
  options.only_experts = true;
  options.fused_experts = false;
  const GeneratedFiles files = generate_checkpoint(directory / "c", options);
  EXPECT_EQ(files.tensors, 8 * 512 * 3 * 4 + 8 * 4  // experts; router, shared gate, two layer norms
                               + 8 * 3              // shared expert
                               + 6 * 9 + 2 * 6 + 3  // delta net, attention; embedding, norm, head
                               + 19);               // MTP, fused
  const CheckpointReport report = inspect_checkpoint(directory / "c", {});
  EXPECT_EQ(report.problems, std::vector<std::string>{});
  EXPECT_EQ(report.modules.at("layers.N.mlp.shared_expert.up_proj").at("bf16"), 8);
}

TEST(Report, CountsAreThoseOfTheShape) {
  Changed checkpoint(GeneratedFormat::kModeloptNvfp4);
  ReportOptions options;
  options.context = 1000;
  options.batch = 3;
  const CheckpointReport report = inspect_checkpoint(checkpoint.path(), options);
  const ModelConfig& config = *report.config;
  int64_t total = 0, experts = 0;
  for (const WeightSpec& spec : weight_specs(config)) {
    if (!spec.mtp) total += spec.elements();
    if (!spec.mtp && spec.kind == WeightKind::kRoutedExpert) experts += spec.elements();
  }
  EXPECT_EQ(report.total.parameters, total);
  EXPECT_EQ(report.total.active_parameters, total - experts * 3 / 5 - 64 * 160 + 160);
  // NVFP4: half a byte and a sixteenth for each weight, and four bytes for the matrix.
  EXPECT_EQ(report.kinds.at("routed experts").bytes, static_cast<uint64_t>(experts / 2 + experts / 16 + 4 * 5 * 3 * 4));
  EXPECT_EQ(report.kv_bytes, 2ull * 2 * 2 * 32 * 2 * 3000) << "one attention layer and the MTP head, in f16";
  EXPECT_EQ(report.state_bytes, 3ull * 3 * 4 * (4 * 32 * 32 + 3 * config.conv_channels()));
  const Json json = report_json(report, options);
  EXPECT_EQ(json["loadable"], true);
  EXPECT_EQ(json["parameters"]["total"], total);
  EXPECT_EQ(json["architecture"]["experts"], 5);
  EXPECT_EQ(json["memory"]["kv_f16"], report.kv_bytes);
  // Kinds and formats count the same weights.
  for (const char* key : {"parameters", "active_parameters", "bytes"}) {
    const auto sum = [&](const char* table) {
      int64_t all = 0;
      for (const auto& [name, amount] : json[table].items()) all += amount[key].get<int64_t>();
      return all;
    };
    EXPECT_EQ(sum("kinds"), sum("formats")) << key;
    EXPECT_GT(sum("mtp_formats"), 0) << key;
  }
  EXPECT_EQ(json["bytes"]["mtp"],
            json["mtp_formats"]["bf16"]["bytes"].get<int64_t>() + json["mtp_formats"]["f32"]["bytes"].get<int64_t>());
}

// A share of an expert's matrix need not be whole: 3 of 5 experts of 64 x 33.
TEST(Report, ActiveParametersAreRoundedOnce) {
  Changed checkpoint(GeneratedFormat::kBf16, [](GeneratorOptions& options) {
    options.config.moe_intermediate = 33;
    options.config.top_k = 3;
  });
  const CheckpointReport report = inspect_checkpoint(checkpoint.path(), {});
  const Amount& experts = report.kinds.at("routed experts");
  EXPECT_EQ(std::llround(experts.active_parameters) * 5, experts.parameters * 3);
}

// One bad scale is one problem, and not one more for each tensor beside it.
TEST(Report, TensorsBesideABadOneHaveTheirPlace) {
  Changed checkpoint(GeneratedFormat::kModeloptNvfp4);
  checkpoint.apply([](LooseCheckpoint& c) {
    c.set_float("model.language_model.layers.1.mlp.experts.2.up_proj.weight_scale_2", kNan);
  });
  const std::vector<std::string> problems = inspect_checkpoint(checkpoint.path(), {}).problems;
  ASSERT_EQ(problems.size(), 1u) << problems.back();
  EXPECT_NE(problems[0].find("experts.2.up_proj.weight_scale_2"), std::string::npos) << problems[0];
}

TEST(Report, DeepFindsElementsThatAreNotFinite) {
  Changed checkpoint(GeneratedFormat::kF32);
  checkpoint.apply(
      [](LooseCheckpoint& c) { c.set_float("model.language_model.layers.3.self_attn.k_proj.weight", kNan); });
  ReportOptions options;
  EXPECT_EQ(inspect_checkpoint(checkpoint.path(), options).problems, std::vector<std::string>{});
  options.deep = true;
  const auto problems = inspect_checkpoint(checkpoint.path(), options).problems;
  ASSERT_EQ(problems.size(), 1u);
  EXPECT_NE(problems[0].find("layers.3.self_attn.k_proj: 1 of"), std::string::npos);
}

TEST(Generator, SameSeedSameBytesOnAnyNumberOfThreads) {
  const TemporaryDirectory directory;
  GeneratorOptions options = small_options(GeneratedFormat::kModeloptMixed);
  generate_checkpoint(directory / "a", options);
  options.threads = 3;
  generate_checkpoint(directory / "b", options);
  options.seed = 4;
  generate_checkpoint(directory / "c", options);
  const std::string a = read_file(directory / "a/model.safetensors");
  EXPECT_EQ(a, read_file(directory / "b/model.safetensors"));
  EXPECT_NE(a, read_file(directory / "c/model.safetensors"));
  // Pinned: the goldens of the model depend on these bytes.
  EXPECT_EQ(fmt::format("{:016x}", weight_seed(0, a)), "f35644524accad9b");
  expect_error([&] { generate_checkpoint(directory / "a", options); }, {"is not empty"});
}

// As a killed run leaves it: its journal, some files, one that was being written.
TEST(Generator, TakesADirectoryThatAKilledRunLeft) {
  const TemporaryDirectory directory;
  GeneratorOptions options = small_options(GeneratedFormat::kBf16);
  generate_checkpoint(directory / "whole", options);
  fs::create_directory(directory / "a");
  const char* journal = R"({"files":["model-00001-of-00002.safetensors","model-00002-of-00002.safetensors"]})";
  write_file_atomically(directory / "a/.fourfold-generate.json", journal);
  write_file_atomically(directory / "a/model-00001-of-00002.safetensors", "half");
  write_file_atomically(directory / "a/model-00002-of-00002.safetensors.tmp.123", "half");
  generate_checkpoint(directory / "a", options);
  for (const char* name : {"model.safetensors", "config.json"}) {
    EXPECT_EQ(read_file(directory / (std::string("a/") + name)), read_file(directory / (std::string("whole/") + name)));
  }
  EXPECT_EQ(std::distance(fs::directory_iterator(directory / "a"), {}),
            std::distance(fs::directory_iterator(directory / "whole"), {}));
  // What the journal does not name is not ours.
  write_file_atomically(directory / "a/.fourfold-generate.json", journal);
  expect_error([&] { generate_checkpoint(directory / "a", options); }, {"beside an unfinished generation"});
  EXPECT_TRUE(fs::exists(directory / "a/config.json"));
}

TEST(Generator, ARunThatIsInterruptedLeavesNothing) {
  const TemporaryDirectory directory;
  GeneratorOptions options = small_options(GeneratedFormat::kBf16);
  options.shards = 3;
  install_interrupt_handler();
  std::raise(SIGINT);
  EXPECT_THROW(generate_checkpoint(directory / "a", options), Interrupted);
  clear_interrupt();
  std::signal(SIGINT, SIG_DFL);
  EXPECT_FALSE(fs::exists(directory / "a"));
  generate_checkpoint(directory / "a", options);  // the same directory will do
  EXPECT_NO_THROW(Checkpoint checkpoint(directory / "a"));
}

TEST(Generator, RefusesWhatTheDiskCannotHold) {
  const TemporaryDirectory directory;
  GeneratorOptions options = small_options(GeneratedFormat::kF32);
  options.config.vocabulary = kMaxVocabulary;  // an embedding and a head of many terabytes
  options.config.hidden = kMaxDimension;
  expect_error([&] { generate_checkpoint(directory / "a", options); }, {"GB are free", "GB are wanted"});
  EXPECT_FALSE(fs::exists(directory / "a"));
}

TEST(RandomWeights, AreTheSameWheneverTheyAreAskedFor) {
  const auto source = make_random_weights(small_checkpoint_config(), 7);
  EXPECT_EQ(check_weights(*source), std::vector<std::string>{});
  const auto again = make_random_weights(small_checkpoint_config(), 7);
  const ops::MatrixSource a = source->matrix("layers.2.mlp.experts.1.up_proj", 128, 160);
  const ops::MatrixSource b = again->matrix("layers.2.mlp.experts.1.up_proj", 128, 160);
  EXPECT_EQ(a.format, ops::Format::kNvfp4);
  EXPECT_EQ(std::memcmp(a.data, b.data, 128 * 80), 0);
  double energy = 0;
  std::vector<float> row(160);
  for (int64_t r = 0; r < 128; ++r) {
    ops::dequantize(a, r, row.data());
    for (float value : row) energy += value * value;
  }
  EXPECT_NEAR(std::sqrt(energy / (128 * 160)) * std::sqrt(160.0), 1.0, 0.1);
  expect_error([&] { source->matrix("layers.2.mlp.experts.1.up_proj", 160, 128); }, {"[128, 160], wanted [160, 128]"});
  expect_error([&] { source->matrix("layers.9.mlp.gate", 5, 160); }, {"no weight layers.9.mlp.gate"});
}

}  // namespace
}  // namespace fourfold::model
