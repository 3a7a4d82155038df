// What says where tensors are: the index of several files, and the names of tensors.
#include "model/shard_index.h"

#include <gtest/gtest.h>

#include <functional>
#include <optional>

#include "checkpoint_util.h"
#include "model/checkpoint.h"
#include "model/name_table.h"

namespace fourfold::model {
namespace {

namespace fs = std::filesystem;

void load(const fs::path& directory) {
  Checkpoint checkpoint(directory);
  const std::vector<std::string> problems = check_weights(checkpoint);
  if (!problems.empty()) throw Error(problems.front());
}

// Reads an index in both ways (IndexText) and compares what comes of it. Whether it is plain.
bool compare_ways(const std::string& text) {
  IndexText index(text, "index");
  for (size_t i = index.pieces(); i-- > 0;) index.parse(i);
  std::optional<ShardIndex> plain = index.plain(), whole;
  if (!plain) return false;
  EXPECT_NO_THROW(whole = index.by_json());
  if (!whole) return true;
  EXPECT_EQ(plain->files, whole->files);
  EXPECT_EQ(plain->total_size, whole->total_size);
  size_t at = 0;
  for (const auto& part : plain->entries) {
    for (const ShardIndex::Entry& entry : part) {
      const ShardIndex::Entry& other = whole->entries[0].at(at++);
      EXPECT_TRUE(entry.tensor == other.tensor && entry.file == other.file) << entry.tensor;
    }
  }
  EXPECT_EQ(at, whole->entries[0].size());
  return true;
}

TEST(ShardIndex, IsReadInPieces) {
  // Several of them; files in another order than that of their names.
  const auto text = [](const std::string& space, const std::string& before, const std::string& behind,
                       const std::function<std::string(int)>& name) {
    std::string entries;
    for (int i = 0; i < 20000; ++i) {
      entries += fmt::format("{}{}\"{}\":{}\"model-{:05}.safetensors\"", i == 0 ? "" : ",", space, name(i), space,
                             (i * 7 / 20000 + 3) % 7);
    }
    return fmt::format("{{{}\"weight_map\":{}{{{}}}{}}}", before, space, entries + space, behind);
  };
  const auto usual = [](int i) {
    return fmt::format("model.layers.{}.mlp.experts.{}.up_proj.weight", i / 256, i % 256);
  };
  const std::string size = R"("metadata":{"total_size":1234567})";
  EXPECT_TRUE(compare_ways(text("", size + ",", "", usual)));
  EXPECT_TRUE(compare_ways(text("\n    ", "", "," + size, usual)));
  EXPECT_TRUE(compare_ways(text("", "", "", usual)));
  EXPECT_TRUE(compare_ways(text("", R"("a":"{[","b":[{}],)", "", usual)));
  // As a value, and in another object than the outermost.
  EXPECT_FALSE(compare_ways(text("", R"("c":"weight_map",)", "", usual)));
  EXPECT_FALSE(compare_ways(text("", R"("metadata":{"weight_map":{"x":"y.safetensors"}},)", "", usual)));
  EXPECT_FALSE(compare_ways(text("", R"("a":"\"",)", "", usual)));
  // Two of them, and what is no JSON.
  EXPECT_FALSE(compare_ways(text("", "", R"(,"weight_map":{})", usual)));
  EXPECT_FALSE(compare_ways(text("", "", ",", usual)));
  EXPECT_FALSE(compare_ways(text("", "", "} ", usual)));
  EXPECT_FALSE(compare_ways("[" + text("", "", "", usual)));
  // A piece may begin within a name.
  EXPECT_FALSE(compare_ways(text("", "", "", [&](int i) { return i == 9000 ? "\\\"," : usual(i); })));
}

TEST(ShardIndex, TensorsOfAllKindsAreLookedFor) {
  const TemporaryDirectory directory;
  const fs::path path = directory / "c";
  GeneratorOptions options = small_options(GeneratedFormat::kModeloptNvfp4);
  options.shards = 3;
  options.visual = options.kv_scales = true;
  generate_checkpoint(path, options);
  const Checkpoint whole(path);
  EXPECT_GT(whole.visual().tensors, 0);
  EXPECT_FALSE(whole.kv_scales().empty());
  EXPECT_EQ(whole.prefix(), "model.language_model.");
  const fs::path index = path / "model.safetensors.index.json";
  const std::string good = read_file(index);
  const auto with = [&](const std::string& old, const std::string& now) {
    std::string text = good;
    const size_t at = text.find(old);
    EXPECT_NE(at, std::string::npos) << old;
    write_file_atomically(index, text.replace(at, old.size(), now));
    return [&path] { load(path); };
  };
  // Two tensors of one file.
  std::string visual, weight;
  for (const SafetensorsFile& shard : whole.shards()) {
    for (const StoredTensor& tensor : shard.tensors()) {
      if (internal_name(tensor.name).kind == NameKind::kVisual) visual = tensor.name;
    }
    for (const StoredTensor& tensor : shard.tensors()) {
      if (!visual.empty() && weight.empty() && tensor.name.ends_with(".weight")) weight = tensor.name;
    }
    if (!visual.empty()) break;
  }
  ASSERT_NE(weight, "");
  expect_error(with("\"" + visual + "\"", "\"model.visual.other\""), {visual, "is not in the index"});
  expect_error(with("\"" + weight + "\"", "\"" + visual + "\""), {"holds the key", visual, "twice"});
  // Collected, the problems of every shard are told, and of each tensor once.
  std::vector<std::string> problems;
  with("\"" + weight + "\"", "\"" + weight + "x\"");
  const Checkpoint damaged(path, &problems);
  ASSERT_EQ(problems.size(), 2u);
  EXPECT_NE(problems[0].find("is not in the index"), std::string::npos) << problems[0];
  EXPECT_NE(problems[1].find("x' is missing, the index lists it there"), std::string::npos) << problems[1];
  EXPECT_EQ(damaged.visual().tensors, whole.visual().tensors);
  EXPECT_EQ(damaged.kv_scales(), whole.kv_scales());
}

TEST(Names, AreSplitAndFound) {
  EXPECT_EQ(split_name("a.b.weight").module, "a.b");
  EXPECT_EQ(split_name("a.b.weight").parameter, Parameter::kWeight);
  EXPECT_EQ(split_name("a.b.weight_scale_inv").parameter, Parameter::kWeightScaleInv);
  EXPECT_EQ(split_name("a.b.input_scale").parameter, Parameter::kInputScale);
  for (const char* whole : {"a.b.norm", "weight", "a.weights", "a.weight_", "a.input_", "a.b_weight_scale", ""}) {
    EXPECT_EQ(split_name(whole).module, whole);
    EXPECT_EQ(split_name(whole).parameter, Parameter::kItself) << whole;
  }
  NameTable table;
  std::vector<std::string> names;
  for (int i = 0; i < 1000; ++i) names.push_back(fmt::format("layers.{}", i));
  for (uint32_t i = 0; i < 1000; ++i) {
    // All of them at one place, so that each search goes past others.
    EXPECT_EQ(table.add({names[i], Parameter::kWeight}, 7, i), NameTable::kNone);
    EXPECT_EQ(table.add({names[i], Parameter::kWeight}, 7, 5000), i) << "taken";
    if (i % 2 != 0) continue;
    EXPECT_EQ(table.add({names[i], Parameter::kItself}, 7, 2000 + i), NameTable::kNone);
  }
  for (uint32_t i = 0; i < 1000; ++i) {
    const NameTable::Module* const module = table.find(names[i], 7);
    ASSERT_NE(module, nullptr);
    EXPECT_EQ(module->at(Parameter::kWeight), i);
    EXPECT_EQ(module->at(Parameter::kItself), i % 2 == 0 ? 2000 + i : NameTable::kNone);
    EXPECT_EQ(module->at(Parameter::kWeightScale), NameTable::kNone);
  }
  EXPECT_EQ(table.find("layers.1000", 7), nullptr);
  EXPECT_EQ(NameTable().find("layers.1"), nullptr);
}

}  // namespace
}  // namespace fourfold::model
