// Generated checkpoints in every format, loaded and dequantised: the values must be those of the raw tensors, read here
// by a second, plain reading of the format definitions.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <map>
#include <set>
#include <unordered_map>

#include "base/check.h"
#include "base/math.h"
#include "checkpoint_util.h"
#include "model/inventory.h"
#include "nvfp4/number.h"

namespace fourfold::model {
namespace {

// The raw tensors of all shards by name.
class Raw {
 public:
  explicit Raw(const Checkpoint& checkpoint) {
    for (const SafetensorsFile& shard : checkpoint.shards()) {
      for (const StoredTensor& tensor : shard.tensors()) tensors_[std::string(tensor.name)] = {&shard, &tensor};
    }
  }
  const StoredTensor* find(const std::string& name, const SafetensorsFile** file = nullptr) const {
    const auto found = tensors_.find(name);
    if (found == tensors_.end()) return nullptr;
    if (file != nullptr) *file = found->second.first;
    return found->second.second;
  }
  // Element `index` of a tensor as a number; packed e2m1 codes are addressed one by one.
  double at(const std::string& name, int64_t index) const {
    const SafetensorsFile* file = nullptr;
    const StoredTensor* tensor = find(name, &file);
    if (tensor == nullptr) fail("no tensor {}", name);
    const auto* data = reinterpret_cast<const uint8_t*>(file->data(*tensor).data());
    if (tensor->type == StoredType::kU8) {
      return nvfp4::e2m1_to_float(static_cast<uint8_t>(data[index / 2] >> (index % 2 * 4) & 15));
    }
    if (tensor->type == StoredType::kF8E4M3) return nvfp4::e4m3_to_float(data[index]);
    uint16_t half = 0;
    float value = 0;
    if (tensor->type == StoredType::kF32) {
      std::memcpy(&value, data + 4 * index, 4);
      return value;
    }
    std::memcpy(&half, data + 2 * index, 2);
    return tensor->type == StoredType::kBf16 ? nvfp4::bf16_to_float(half) : nvfp4::f16_to_float(half);
  }

 private:
  std::unordered_map<std::string, std::pair<const SafetensorsFile*, const StoredTensor*>> tensors_;
};

struct Case {
  GeneratedFormat format;
  PrefixStyle prefix = PrefixStyle::kModelLanguageModel;
  bool fused = false;
  bool dense = false;
  int64_t shards = 1;
  int64_t dead = 0;
  const char* label = "";
};

void PrintTo(const Case& c, std::ostream* out) { *out << c.label; }

class Formats : public testing::TestWithParam<Case> {};

std::string prefixed(PrefixStyle style, const std::string& internal) {
  const bool head = internal.starts_with("lm_head"), mtp = internal.starts_with("mtp.");
  switch (style) {
    case PrefixStyle::kModelLanguageModel:
      return head || mtp ? internal : "model.language_model." + internal;
    case PrefixStyle::kLanguageModelModel:
      return mtp ? internal : head ? "language_model." + internal : "language_model.model." + internal;
    case PrefixStyle::kModel:
      return head ? internal : "model." + internal;
    case PrefixStyle::kNone:
      return internal;
  }
  return internal;
}

// What the weight (row, column) of a module must be, from the raw tensors.
double expected(const Raw& raw, const Case& c, const ModelConfig& config, const WeightSpec& spec, int64_t row,
                int64_t column) {
  std::string base = prefixed(c.prefix, spec.name);
  int64_t rows = spec.rows, tensor_row = row;
  const bool fused = raw.find(base + ".weight") == nullptr && raw.find(base + ".weight_packed") == nullptr;
  if (fused) {
    const bool down = spec.name.ends_with("down_proj");
    base = base.substr(0, base.find(".experts.") + 9) + (down ? "down_proj" : "gate_up_proj");
    rows = down ? spec.rows : 2 * spec.rows;
    tensor_row = spec.expert * rows + row + (spec.name.ends_with("up_proj") ? spec.rows : 0);
    if (raw.find(base) != nullptr) return raw.at(base, tensor_row * spec.columns + column);
  }
  if (raw.find(base + ".weight_packed") != nullptr) {
    return raw.at(base + ".weight_packed", tensor_row * spec.columns + column) *
           raw.at(base + ".weight_scale", tensor_row * (spec.columns / 16) + column / 16) /
           raw.at(base + ".weight_global_scale", 0);
  }
  const double element = raw.at(base + ".weight", tensor_row * spec.columns + column);
  if (raw.find(base + ".weight_scale_2") != nullptr) {
    return element * raw.at(base + ".weight_scale", tensor_row * (spec.columns / 16) + column / 16) *
           raw.at(base + ".weight_scale_2", 0);
  }
  if (raw.find(base + ".weight_scale_inv") != nullptr) {
    const int64_t expert = fused ? spec.expert : 0, inner = tensor_row - expert * rows;
    const int64_t grid_columns = ceil_div(spec.columns, 128);
    return element * raw.at(base + ".weight_scale_inv",
                            (expert * ceil_div(rows, 128) + inner / 128) * grid_columns + column / 128);
  }
  if (const StoredTensor* scale = raw.find(base + ".weight_scale")) {
    return element * raw.at(base + ".weight_scale", scale->elements() == 1 ? 0 : tensor_row);
  }
  (void)config;
  return element;
}

TEST_P(Formats, LoadsAndDequantisesToWhatTheTensorsSay) {
  const Case& c = GetParam();
  const TemporaryDirectory directory;
  GeneratorOptions options;
  options.config = small_checkpoint_config(c.dense);
  options.format = c.format;
  options.prefix = c.prefix;
  options.fused_experts = c.fused;
  options.shards = c.shards;
  options.dead_experts = c.dead;
  options.visual = true;
  options.kv_scales = true;
  options.seed = 11;
  options.threads = 1;
  const GeneratedFiles files = generate_checkpoint(directory.path(), options);
  EXPECT_GE(files.shards, c.shards > 1 ? 2 : 1);

  Checkpoint checkpoint(directory.path());
  const Raw raw(checkpoint);
  EXPECT_EQ(checkpoint.visual().tensors, 3);
  EXPECT_FALSE(checkpoint.kv_scales().empty());
  EXPECT_EQ(checkpoint.config().mtp_layers, 1);
  std::set<ops::Format> seen;
  int64_t matrices = 0;
  const auto problems = check_weights(checkpoint, [&](const WeightSpec& spec, const ops::MatrixSource* matrix) {
    if (matrix == nullptr) return;
    ++matrices;
    seen.insert(matrix->format);
    std::vector<float> row(static_cast<size_t>(spec.columns));
    double energy = 0;
    for (int64_t r = 0; r < spec.rows; ++r) {
      ops::dequantize(*matrix, r, row.data());
      for (int64_t i = 0; i < spec.columns; ++i) energy += std::pow(row[static_cast<size_t>(i)], 2);
      if (r % 7 != 0 && r != spec.rows - 1) continue;
      for (int64_t i = 0; i < spec.columns; i += i % 3 + 1) {
        const double wanted = expected(raw, c, options.config, spec, r, i);
        ASSERT_NEAR(row[static_cast<size_t>(i)], wanted, 1e-6 * std::fabs(wanted)) << spec.name << " " << r << " " << i;
      }
    }
    const double rms = std::sqrt(energy / static_cast<double>(spec.elements()));
    const bool dead = spec.expert >= options.config.experts - c.dead && spec.kind == WeightKind::kRoutedExpert;
    if (dead) {
      EXPECT_LT(rms, c.fused && c.format != GeneratedFormat::kBf16 ? 1.0 : 1e-20) << spec.name;
      EXPECT_FALSE(std::isnan(rms));
    } else {
      EXPECT_GT(rms, 0.3 * weight_rms(spec)) << spec.name;
      EXPECT_LT(rms, 3.0 * weight_rms(spec)) << spec.name;
    }
  });
  EXPECT_EQ(problems, std::vector<std::string>{});
  EXPECT_GT(matrices, 20);
  const bool plain = c.format <= GeneratedFormat::kF32;
  EXPECT_EQ(seen.count(ops::Format::kNvfp4) + seen.count(ops::Format::kFp8) > 0, !plain);

  // Without the MTP head its tensors are looked at all the same, and are in order.
  Checkpoint trunk(directory.path());
  ModelConfig without = trunk.config();
  for (const WeightSpec& spec : weight_specs(without)) {
    if (spec.mtp) continue;
    if (spec.is_vector) {
      trunk.vector(spec.name, spec.rows);
    } else {
      trunk.matrix(spec.name, spec.rows, spec.columns);
    }
  }
  EXPECT_NO_THROW(trunk.finish());
}

// The weights of a checkpoint as they decode.
std::map<std::string, std::vector<float>> decoded(const GeneratorOptions& options) {
  const TemporaryDirectory directory;
  generate_checkpoint(directory.path(), options);
  Checkpoint checkpoint(directory.path());
  std::map<std::string, std::vector<float>> all;
  for (const WeightSpec& spec : weight_specs(checkpoint.config())) {
    std::vector<float>& values = all[spec.name];
    if (spec.is_vector) {
      values = checkpoint.vector(spec.name, spec.rows);
      continue;
    }
    const ops::MatrixSource matrix = checkpoint.matrix(spec.name, spec.rows, spec.columns);
    values.resize(static_cast<size_t>(spec.elements()));
    for (int64_t r = 0; r < spec.rows; ++r) ops::dequantize(matrix, r, values.data() + r * spec.columns);
  }
  return all;
}

// How far rounding may move the weights of a format, relative to their rms.
double rounding(GeneratedFormat format) {
  switch (format) {
    case GeneratedFormat::kF32:
      return 0;
    case GeneratedFormat::kBf16:
    case GeneratedFormat::kF16:  // its vectors are bf16
      return 4e-3;
    case GeneratedFormat::kModeloptFp8:
    case GeneratedFormat::kFp8Block:
    case GeneratedFormat::kFp8Channel:
      return 0.03;
    default:
      return 0.12;
  }
}

// A seed is a model: formats and layouts store the same values, each as precisely as it can.
TEST(GeneratedValues, AreTheSameInEveryFormatAndLayout) {
  GeneratorOptions options = small_options(GeneratedFormat::kF32);
  options.config.vocabulary = 300;  // more than one chunk of random numbers
  const auto exact = decoded(options);
  for (const FormatName& entry : generated_formats()) {
    for (const bool fused : {true, false}) {
      SCOPED_TRACE(fmt::format("{} {}", entry.name, fused ? "fused" : "per expert"));
      options.format = entry.format;
      options.fused_experts = fused;
      options.shards = fused ? 1 : 3;
      for (const auto& [name, values] : decoded(options)) {
        const std::vector<float>& wanted = exact.at(name);
        ASSERT_EQ(values.size(), wanted.size()) << name;
        double error = 0, energy = 0;
        for (size_t i = 0; i < values.size(); ++i) {
          error += std::pow(static_cast<double>(values[i]) - wanted[i], 2);
          energy += std::pow(static_cast<double>(wanted[i]), 2);
        }
        const double relative = std::sqrt(error / energy);
        EXPECT_LE(relative, rounding(entry.format)) << name;
      }
    }
  }
}

std::vector<Case> cases() {
  using G = GeneratedFormat;
  using P = PrefixStyle;
  return {{G::kBf16, P::kModelLanguageModel, true, false, 1, 0, "bf16_fused"},
          {G::kBf16, P::kLanguageModelModel, false, false, 3, 2, "bf16_per_expert_sharded"},
          {G::kBf16, P::kModel, true, true, 1, 0, "bf16_dense"},
          {G::kF16, P::kNone, true, false, 2, 0, "f16"},
          {G::kF32, P::kModel, false, false, 1, 0, "f32"},
          {G::kModeloptNvfp4, P::kModelLanguageModel, false, false, 4, 2, "modelopt_nvfp4_dead"},
          {G::kModeloptNvfp4, P::kModel, true, false, 1, 0, "modelopt_nvfp4_fused"},
          {G::kModeloptNvfp4, P::kModelLanguageModel, false, true, 1, 0, "modelopt_nvfp4_dense"},
          {G::kModeloptW4A16, P::kModelLanguageModel, false, false, 1, 0, "modelopt_w4a16"},
          {G::kModeloptMixed, P::kModelLanguageModel, false, false, 2, 0, "modelopt_mixed"},
          {G::kModeloptFp8, P::kModelLanguageModel, false, false, 1, 0, "modelopt_fp8"},
          {G::kModeloptFp8, P::kModelLanguageModel, true, false, 1, 0, "modelopt_fp8_fused"},
          {G::kFp8Block, P::kModelLanguageModel, false, false, 1, 2, "fp8_block"},
          {G::kFp8Block, P::kModelLanguageModel, true, false, 1, 0, "fp8_block_fused"},
          {G::kFp8Channel, P::kModelLanguageModel, false, false, 1, 0, "fp8_channel"},
          {G::kFp8Channel, P::kModelLanguageModel, true, false, 1, 0, "fp8_channel_fused"},
          {G::kCtNvfp4, P::kLanguageModelModel, false, false, 2, 2, "ct_nvfp4_dead"},
          {G::kCtNvfp4, P::kModel, true, false, 1, 0, "ct_nvfp4_stacked"},
          {G::kCtNvfp4A16, P::kModel, false, false, 1, 0, "ct_nvfp4a16"},
          {G::kCtMixed, P::kModelLanguageModel, false, false, 1, 0, "ct_mixed"}};
}

INSTANTIATE_TEST_SUITE_P(Every, Formats, testing::ValuesIn(cases()),
                         [](const auto& entry) { return std::string(entry.param.label); });

}  // namespace
}  // namespace fourfold::model
