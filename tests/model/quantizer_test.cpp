// Quantising checkpoints: the output loads, holds what the quantiser says, and an interrupted run continues.
#include "model/quantizer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <csignal>
#include <set>

#include "base/checksum.h"
#include "base/file.h"
#include "base/interrupt.h"
#include "base/json.h"
#include "checkpoint_util.h"
#include "model/inventory.h"
#include "nvfp4/quantize.h"

namespace fourfold::model {
namespace {

namespace fs = std::filesystem;

using Rows = std::vector<std::vector<float>>;

// Every matrix of a checkpoint in fp32, with its format.
std::map<std::string, std::pair<ops::Format, Rows>> dequantized(const fs::path& path) {
  Checkpoint checkpoint(path);
  std::map<std::string, std::pair<ops::Format, Rows>> all;
  const auto problems = check_weights(checkpoint, [&](const WeightSpec& spec, const ops::MatrixSource* matrix) {
    if (matrix == nullptr) return;
    Rows rows(static_cast<size_t>(spec.rows), std::vector<float>(static_cast<size_t>(spec.columns)));
    for (int64_t r = 0; r < spec.rows; ++r) ops::dequantize(*matrix, r, rows[static_cast<size_t>(r)].data());
    all[spec.name] = {matrix->format, std::move(rows)};
  });
  EXPECT_EQ(problems, std::vector<std::string>{}) << path;
  return all;
}

QuantizeOptions quiet() {
  QuantizeOptions options;
  options.threads = 2;
  options.progress = false;
  return options;
}

struct Case {
  const char* label;
  GeneratedFormat input;
  ExportForm form;
  nvfp4::ScaleSearch search = nvfp4::ScaleSearch::kMax;
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.label; }

class QuantizeForms : public testing::TestWithParam<Case> {};

TEST_P(QuantizeForms, OutputLoadsAndIsTheQuantisedInput) {
  const Case& c = GetParam();
  const TemporaryDirectory directory;
  GeneratorOptions generator = small_options(c.input);
  generator.visual = true;
  generator.kv_scales = true;
  generator.dead_experts = 2;
  generator.shards = 2;
  generate_checkpoint(directory / "in", generator);
  write_file_atomically(directory / "in/chat_template.jinja", "template");
  write_file_atomically(directory / "in/weights.bin", "not ours to copy");
  QuantizeOptions options = quiet();
  options.form = c.form;
  options.search = c.search;
  options.what = "all,head";
  options.shard_bytes = 300000;
  const QuantizeResult result = quantize_checkpoint(directory / "in", directory / "out", options);
  EXPECT_GT(result.shards, 1);
  for (int64_t shard = 0; shard < result.shards; ++shard) {
    const SafetensorsFile file(directory /
                               ("out/" + shard_name(static_cast<size_t>(shard), static_cast<size_t>(result.shards))));
    uint64_t bytes = 0, largest = 0;
    for (const StoredTensor& tensor : file.tensors()) {
      bytes += tensor.bytes;
      largest = std::max(largest, tensor.bytes);
    }
    EXPECT_TRUE(bytes <= options.shard_bytes || largest * 2 > options.shard_bytes)
        << "shard " << shard << ": " << bytes;
  }
  EXPECT_EQ(read_file(directory / "out/chat_template.jinja"), "template");
  EXPECT_FALSE(fs::exists(directory / "out/weights.bin"));
  EXPECT_FALSE(fs::exists(directory / "out/.fourfold-quantize.json"));

  const auto before = dequantized(directory / "in"), after = dequantized(directory / "out");
  std::map<std::string, TensorError> errors;
  for (const TensorError& error : result.errors) errors[error.module] = error;
  int64_t quantized = 0, converted = 0;
  for (const WeightSpec& spec : weight_specs(generator.config)) {
    if (spec.is_vector) continue;
    SCOPED_TRACE(spec.name);
    const auto& [old_format, old_rows] = before.at(spec.name);
    const auto& [new_format, new_rows] = after.at(spec.name);
    const bool selected = !spec.mtp && (quantized_by_default(spec.kind) || spec.kind == WeightKind::kHead);
    if (!selected && old_format != ops::Format::kNvfp4) {
      EXPECT_EQ(new_format, old_format);
      EXPECT_EQ(new_rows, old_rows);
      continue;
    }
    ASSERT_EQ(new_format, ops::Format::kNvfp4);
    double error = 0, energy = 0;
    for (size_t r = 0; r < old_rows.size(); ++r) {
      for (size_t i = 0; i < old_rows[r].size(); ++i) {
        const double difference = static_cast<double>(old_rows[r][i]) - static_cast<double>(new_rows[r][i]);
        error += difference * difference;
        energy += static_cast<double>(old_rows[r][i]) * static_cast<double>(old_rows[r][i]);
        ASSERT_TRUE(std::isfinite(new_rows[r][i]));
      }
    }
    if (old_format == ops::Format::kNvfp4) {
      ++converted;
      EXPECT_LE(error, 1e-12 * energy) << "only the names change";
    } else {
      ++quantized;
      EXPECT_NEAR(std::sqrt(error), std::sqrt(errors.at(spec.name).squared_error), 1e-4 * std::sqrt(energy));
      EXPECT_NEAR(energy, errors.at(spec.name).energy, 1e-6 * energy);
      EXPECT_LT(errors.at(spec.name).relative_rms(), 0.13);
    }
  }
  EXPECT_EQ(result.quantized, quantized);
  EXPECT_EQ(result.converted, converted);
  EXPECT_EQ(errors.size(), static_cast<size_t>(quantized));
  const QuantizationInfo info = read_quantization(directory / "out");
  EXPECT_EQ(info.method, c.form == ExportForm::kModelopt ? "modelopt" : "compressed-tensors");
  EXPECT_EQ(fs::exists(directory / "out/hf_quant_config.json"), c.form == ExportForm::kModelopt);
}

INSTANTIATE_TEST_SUITE_P(
    Every, QuantizeForms,
    testing::Values(Case{"bf16_to_modelopt", GeneratedFormat::kBf16, ExportForm::kModelopt},
                    Case{"bf16_to_modelopt_mse", GeneratedFormat::kBf16, ExportForm::kModelopt,
                         nvfp4::ScaleSearch::kSquaredError},
                    Case{"f32_to_ct", GeneratedFormat::kF32, ExportForm::kCompressedTensors},
                    Case{"fp8_block_to_modelopt", GeneratedFormat::kFp8Block, ExportForm::kModelopt},
                    Case{"fp8_channel_to_ct", GeneratedFormat::kFp8Channel, ExportForm::kCompressedTensors},
                    Case{"modelopt_to_ct", GeneratedFormat::kModeloptNvfp4, ExportForm::kCompressedTensors},
                    Case{"mixed_to_modelopt", GeneratedFormat::kCtMixed, ExportForm::kModelopt}),
    [](const auto& entry) { return std::string(entry.param.label); });

TEST(Quantize, ModulesThatEnginesFuseShareTheirTensorScale) {
  const TemporaryDirectory directory;
  generate_checkpoint(directory / "in", small_options(GeneratedFormat::kBf16));
  quantize_checkpoint(directory / "in", directory / "out", quiet());
  Checkpoint checkpoint(directory / "out");
  const auto scale = [&](const char* module, int64_t rows, int64_t columns) {
    return checkpoint.matrix(module, rows, columns).tensor_scale;
  };
  const float gate = scale("layers.1.mlp.experts.3.gate_proj", 128, 160);
  EXPECT_EQ(gate, scale("layers.1.mlp.experts.3.up_proj", 128, 160));
  EXPECT_NE(gate, scale("layers.1.mlp.experts.2.gate_proj", 128, 160));
  EXPECT_EQ(scale("layers.3.self_attn.q_proj", 256, 160), scale("layers.3.self_attn.v_proj", 64, 160));
  EXPECT_EQ(scale("layers.0.linear_attn.in_proj_qkv", 256, 160), scale("layers.0.linear_attn.in_proj_z", 128, 160));
}

TEST(Quantize, ExcludesAndChooses) {
  const TemporaryDirectory directory;
  GeneratorOptions generator = small_options(GeneratedFormat::kBf16);
  generate_checkpoint(directory / "in", generator);
  QuantizeOptions options = quiet();
  options.what = "experts,attention";
  options.exclude = {"layers\\.2\\.mlp", "q_proj$"};
  const QuantizeResult result = quantize_checkpoint(directory / "in", directory / "out", options);
  EXPECT_EQ(result.quantized, 3 * 5 * 3 + 3);
  const auto after = dequantized(directory / "out");
  EXPECT_EQ(after.at("layers.3.self_attn.q_proj").first, ops::Format::kBf16);
  EXPECT_EQ(after.at("layers.3.self_attn.k_proj").first, ops::Format::kNvfp4);
  EXPECT_EQ(after.at("layers.2.mlp.experts.0.up_proj").first, ops::Format::kBf16);
  EXPECT_EQ(after.at("layers.0.linear_attn.out_proj").first, ops::Format::kBf16);
  options.exclude = {"experts\\.2\\."};
  expect_error([&] { quantize_checkpoint(directory / "in", directory / "out2", options); },
               {"gate_up_proj", "all experts of a layer or none"});
  options.exclude = {"("};
  expect_error([&] { quantize_checkpoint(directory / "in", directory / "out3", options); },
               {"--exclude '('", "not a regular expression"});
  options.exclude = {};
  options.what = "experts,everything";
  expect_error([&] { quantize_checkpoint(directory / "in", directory / "out3", options); }, {"'everything'"});
  options.what = "mlp";
  expect_error([&] { quantize_checkpoint(directory / "in", directory / "out3", options); }, {"chooses no matrix"});
}

TEST(Quantize, RefusesDirectoriesThatAreNotItsOwn) {
  const TemporaryDirectory directory;
  generate_checkpoint(directory / "in", small_options(GeneratedFormat::kBf16));
  expect_error([&] { quantize_checkpoint(directory / "in", directory / "in", quiet()); },
               {"both the input and the output"});
  fs::create_directory(directory / "other");
  write_file_atomically(directory / "other/file", "x");
  expect_error([&] { quantize_checkpoint(directory / "in", directory / "other", quiet()); }, {"is not empty"});
  expect_error([&] { quantize_checkpoint(directory / "none", directory / "out", quiet()); },
               {"none is not a directory"});
  EXPECT_FALSE(fs::exists(directory / "out"));
  // All that a run leaves which was killed before its first file was there.
  fs::create_directory(directory / "killed");
  write_file_atomically(directory / "killed/.fourfold-quantize.json.tmp.123", "half");
  EXPECT_NO_THROW(quantize_checkpoint(directory / "in", directory / "killed", quiet()));
  EXPECT_FALSE(fs::exists(directory / "killed/.fourfold-quantize.json.tmp.123"));
  for (const char* journal : {"[1]", "{}", R"({"fingerprint":7})", R"({"fingerprint":"","files":[7]})"}) {
    write_file_atomically(directory / "other/.fourfold-quantize.json", journal);
    expect_error([&] { quantize_checkpoint(directory / "in", directory / "other", quiet()); }, {"other"});
  }
}

TEST(Quantize, NotFiniteInputIsNamed) {
  const TemporaryDirectory directory;
  generate_checkpoint(directory / "in", small_options(GeneratedFormat::kF32));
  LooseCheckpoint loose(directory / "in");
  loose.set_float("model.language_model.layers.3.self_attn.k_proj.weight", std::nanf(""));
  loose.write();
  expect_error([&] { quantize_checkpoint(directory / "in", directory / "out", quiet()); },
               {"layers.3.self_attn.k_proj", "row 0 holds NaN"});
  expect_error([&] { Checkpoint checkpoint(directory / "out"); }, {"config.json"});
}

// Makes of an interrupted run in OUT one that has the first `count` files of the whole run, as its journal would say.
void finish_shards(const TemporaryDirectory& directory, const QuantizeResult& whole, size_t count) {
  const auto shards = static_cast<size_t>(whole.shards);
  const fs::path path = directory / "out/.fourfold-quantize.json";
  Json journal = parse_json_file(path);
  ASSERT_EQ(journal.at("files").size(), shards);
  std::vector<std::set<std::string>> names;
  for (size_t shard = 0; shard < count; ++shard) {
    ASSERT_TRUE(journal["files"][shard].is_null());
    const std::string name = shard_name(shard, shards);
    fs::copy_file(directory / ("whole/" + name), directory / ("out/" + name));
    const SafetensorsFile file(directory / ("out/" + name));
    const std::string bytes = read_file(directory / ("out/" + name));
    journal["files"][shard] = {{"bytes", bytes.size()}, {"checksum", checksum(std::as_bytes(std::span(bytes)))}};
    names.emplace_back();
    for (const StoredTensor& tensor : file.tensors()) names.back().insert(std::string(internal_name(tensor.name).name));
  }
  for (const TensorError& error : whole.errors) {
    for (size_t shard = 0; shard < count; ++shard) {
      if (names[shard].count(error.module + ".weight_scale_2") == 0) continue;
      journal["errors"].push_back({shard, error.module, error.elements, error.squared_error, error.energy});
    }
  }
  ASSERT_FALSE(journal["errors"].empty());
  write_file_atomically(path, journal.dump());
}

TEST(Quantize, AnInterruptedRunContinues) {
  const TemporaryDirectory directory;
  generate_checkpoint(directory / "in", small_options(GeneratedFormat::kBf16));
  QuantizeOptions options = quiet();
  options.shard_bytes = 100000;
  const QuantizeResult whole = quantize_checkpoint(directory / "in", directory / "whole", options);
  ASSERT_GE(whole.shards, 4);

  install_interrupt_handler();
  std::raise(SIGINT);
  EXPECT_THROW(quantize_checkpoint(directory / "in", directory / "out", options), Interrupted);
  clear_interrupt();
  std::signal(SIGINT, SIG_DFL);
  expect_error([&] { Checkpoint checkpoint(directory / "out"); }, {"config.json"});

  // Without a finished file there is nothing to lose: other options begin anew.
  QuantizeOptions other = options;
  other.search = nvfp4::ScaleSearch::kSquaredError;
  install_interrupt_handler();
  std::raise(SIGINT);
  EXPECT_THROW(quantize_checkpoint(directory / "in", directory / "out", other), Interrupted);
  clear_interrupt();
  std::signal(SIGINT, SIG_DFL);
  install_interrupt_handler();
  std::raise(SIGINT);
  EXPECT_THROW(quantize_checkpoint(directory / "in", directory / "out", options), Interrupted);
  clear_interrupt();
  std::signal(SIGINT, SIG_DFL);

  // As if two shards had been finished and the third was being written when the machine stopped.
  const auto shards = static_cast<size_t>(whole.shards);
  finish_shards(directory, whole, 2);
  for (const std::string& name : {shard_name(2, shards), std::string("config.json")}) {
    write_file_atomically(directory / ("out/" + name + ".tmp.123"), "half");
  }
  const auto time = fs::last_write_time(directory / ("out/" + shard_name(1, shards)));

  // Other options, or another input, are not the same run.
  expect_error([&] { quantize_checkpoint(directory / "in", directory / "out", other); }, {"with other options"});

  const QuantizeResult second = quantize_checkpoint(directory / "in", directory / "out", options);
  EXPECT_EQ(second.resumed_shards, 2);
  EXPECT_EQ(fs::last_write_time(directory / ("out/" + shard_name(1, shards))), time) << "finished shards stay";
  ASSERT_EQ(second.errors.size(), whole.errors.size());
  for (size_t i = 0; i < whole.errors.size(); ++i) {
    EXPECT_EQ(second.errors[i].module, whole.errors[i].module);
    EXPECT_EQ(second.errors[i].squared_error, whole.errors[i].squared_error);
  }
  for (const fs::directory_entry& entry : fs::directory_iterator(directory / "whole")) {
    const std::string name = entry.path().filename().string();
    EXPECT_EQ(read_file(entry.path()), read_file(directory / ("out/" + name))) << name;
  }
  EXPECT_EQ(std::distance(fs::directory_iterator(directory / "out"), {}),
            std::distance(fs::directory_iterator(directory / "whole"), {}));
}

// A machine that stops may leave a file that is shorter than it was, or holds other bytes than were written.
TEST(Quantize, AFinishedShardIsBelievedOnlyByItsChecksum) {
  const TemporaryDirectory directory;
  generate_checkpoint(directory / "in", small_options(GeneratedFormat::kBf16));
  QuantizeOptions options = quiet();
  options.shard_bytes = 100000;
  const QuantizeResult whole = quantize_checkpoint(directory / "in", directory / "whole", options);
  const std::string damaged = shard_name(0, static_cast<size_t>(whole.shards));
  const std::string good = read_file(directory / ("whole/" + damaged));
  std::string flipped = good;
  flipped[flipped.size() / 2] = static_cast<char>(flipped[flipped.size() / 2] ^ 1);
  const std::vector<std::pair<std::string, std::string>> cases = {
      {good.substr(0, 1000), "1000 bytes"}, {"", "0 bytes"}, {flipped, "checksum"}, {good + "x", "bytes"}};
  for (const auto& [content, note] : cases) {
    fs::remove_all(directory / "out");
    install_interrupt_handler();
    std::raise(SIGINT);
    EXPECT_THROW(quantize_checkpoint(directory / "in", directory / "out", options), Interrupted);
    clear_interrupt();
    std::signal(SIGINT, SIG_DFL);
    finish_shards(directory, whole, 2);
    write_file_atomically(directory / ("out/" + damaged), content);
    const QuantizeResult result = quantize_checkpoint(directory / "in", directory / "out", options);
    EXPECT_EQ(result.resumed_shards, 1) << note;  // the other one
    ASSERT_EQ(result.notes.size(), 1u) << note;
    EXPECT_NE(result.notes[0].find(note), std::string::npos) << result.notes[0];
    EXPECT_EQ(read_file(directory / ("out/" + damaged)), good) << note;
    ASSERT_EQ(result.errors.size(), whole.errors.size());
    for (size_t i = 0; i < whole.errors.size(); ++i) EXPECT_EQ(result.errors[i].module, whole.errors[i].module);
  }
  fs::remove_all(directory / "out");
}

TEST(Quantize, ADirectoryIsWrittenByOneAtATime) {
  const TemporaryDirectory directory;
  generate_checkpoint(directory / "in", small_options(GeneratedFormat::kBf16));
  fs::create_directory(directory / "out");
  {
    const DirectoryLock other(directory / "out");
    expect_error([&] { quantize_checkpoint(directory / "in", directory / "out", quiet()); },
                 {"out", "another process"});
    expect_error([&] { generate_checkpoint(directory / "out", small_options(GeneratedFormat::kBf16)); },
                 {"out", "another process"});
  }
  EXPECT_NO_THROW(quantize_checkpoint(directory / "in", directory / "out", quiet()));
}

TEST(Quantize, WhatCannotBeginLeavesNothing) {
  const TemporaryDirectory directory;
  generate_checkpoint(directory / "in", small_options(GeneratedFormat::kF32));
  LooseCheckpoint loose(directory / "in");
  loose.set_float("model.language_model.layers.3.self_attn.k_proj.weight", std::nanf(""));
  loose.write();
  expect_error([&] { quantize_checkpoint(directory / "in", directory / "out", quiet()); }, {"k_proj"});
  EXPECT_FALSE(fs::exists(directory / "out"));
}

TEST(Quantize, SaysWhatStaysAsItIsOnceForEachKind) {
  const TemporaryDirectory directory;
  GeneratorOptions generator = small_options(GeneratedFormat::kBf16);
  generator.config.moe_intermediate = 72;
  generator.fused_experts = false;
  generate_checkpoint(directory / "in", generator);
  QuantizeOptions options = quiet();
  options.what = "experts";
  options.exclude = {"q_prj$", "gate_proj$"};
  const std::vector<std::string> notes = quantize_checkpoint(directory / "in", directory / "out", options).notes;
  ASSERT_EQ(notes.size(), 2u);
  EXPECT_EQ(notes[0],
            "20 matrices of the kind 'routed experts' stay as they are: 72 columns are not a multiple of 16 "
            "(layers.0.mlp.experts.0.down_proj, ...)");
  EXPECT_EQ(notes[1], "--exclude 'q_prj$' matches none of the modules that --what experts chooses");
}

}  // namespace
}  // namespace fourfold::model
