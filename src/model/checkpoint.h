// A checkpoint directory in the Hugging Face layout as a source of weights.
//
// The format of each matrix is decided by the tensors that exist, never by the lists in the configuration files:
//   M.weight_packed + weight_scale + weight_global_scale   compressed-tensors NVFP4 (the global scale divides)
//   M.weight U8 + weight_scale + weight_scale_2            modelopt NVFP4 (weight_scale_2 multiplies)
//   M.weight F8_E4M3 + weight_scale_inv or weight_scale    FP8: 128 x 128 blocks, per channel, or per tensor
//   M.weight BF16, F16 or F32                              as it is
// Routed experts may also be one tensor for all experts: experts.gate_up_proj and experts.down_proj, [E, rows, columns]
// or [E x rows, columns], with or without ".weight", in any of these formats.
//
// Names lose their prefix: model.language_model.X, language_model.model.X, model.X and X are the same tensor.
// A tensor that nobody takes is an error in finish(), except the vision tower, rotary frequencies and KV-cache scales.
// finish() also asks for the MTP head's tensors when nobody has: one that is broken is an error for everybody.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/threads.h"
#include "model/config.h"
#include "model/name_table.h"
#include "model/safetensors.h"
#include "model/shard_index.h"
#include "model/weight_source.h"

namespace fourfold::model {

// The internal form of a stored name: without prefix. `what` says whether it is a weight or something to skip.
enum class NameKind : uint8_t { kWeight, kVisual, kKvScale, kIgnored };
struct InternalName {
  NameKind kind = NameKind::kWeight;
  std::string_view prefix;  // what was taken off
  std::string_view name;
};
InternalName internal_name(std::string_view stored);

class Checkpoint final : public WeightSource {
 public:
  // Reads the configuration, maps all shards and checks their headers against each other. The first problem is an
  // Error; with `problems` the problems of the shards are collected there and opening goes on.
  explicit Checkpoint(std::filesystem::path directory, std::vector<std::string>* problems = nullptr);

  const std::filesystem::path& directory() const { return directory_; }
  const ModelConfig& config() const override { return config_; }
  ops::MatrixSource matrix(std::string_view module, int64_t rows, int64_t columns) override;
  std::vector<float> vector(std::string_view name, int64_t count) override;
  void release(const ops::MatrixSource& matrix) override;
  void read_in_place(bool in_place) override { in_place_ = in_place; }
  void finish() override;

  // The stored form of a matrix without reading its data (shapes and scales are not checked): the tensors it is made
  // of, and whether they hold other experts too. Counts as taking the matrix.
  struct Stored {
    ops::Format format = ops::Format::kBf16;
    bool shared = false;       // one tensor for all experts
    bool input_scale = false;  // an activation scale is stored
    std::vector<const StoredTensor*> tensors;
  };
  Stored stored_matrix(std::string_view module, int64_t rows, int64_t columns);

  // What the loader saw, for people.
  struct Skipped {
    int64_t tensors = 0;
    uint64_t bytes = 0;
  };
  const std::vector<SafetensorsFile>& shards() const { return shards_; }
  const Skipped& visual() const { return visual_; }
  bool mtp_declared() const { return mtp_declared_; }
  const std::vector<std::string>& kv_scales() const { return kv_scales_; }
  const std::vector<std::string>& ignored() const { return ignored_; }  // rotary frequencies
  const std::string& prefix() const { return prefix_; }                 // of the trunk, e.g. "model.language_model."
  // Oddities that are no errors: files the index does not list, dead experts, unusable activation scales, ...
  std::vector<std::string> notes() const;

 private:
  // A tensor, by its number: those of the first shard come first.
  struct Item {
    size_t hash = 0;  // of its module's name
    uint32_t shard = 0;
    uint32_t tensor = 0;
    uint8_t prefix = 0;  // characters of the stored name that are no part of the internal one
    NameKind kind = NameKind::kWeight;
    Parameter parameter = Parameter::kItself;
    bool mtp = false;
    bool leads = false;  // its prefix is the trunk's
    bool named = false;  // its name leads to it, and not to another tensor of that name
    bool used = false;
  };
  // Which rows of which tensor a module is: for a routed expert they may be part of a tensor of all experts.
  struct Place {
    std::string base;         // internal name without ".weight"
    bool stacked = false;     // one tensor for all experts
    int64_t experts = 1;      // in the tensor
    int64_t expert = 0;       // which one
    int64_t expert_rows = 0;  // rows of an expert in the tensor
    int64_t first_row = 0;    // of the module inside its expert
  };
  class Reader;  // reads one matrix; checkpoint_matrix.cpp

  void problem(std::string text);
  void read_shards();
  void note_index(const std::string& chosen, const ShardIndex& index, const std::vector<std::string>& present);
  void take_names(ThreadPool& pool);
  bool add_tensors();
  uint32_t add_tensor(uint32_t number);
  void forget_tensors();
  bool agrees(const ShardIndex& index, ThreadPool& pool);
  // Null where there is none.
  Item* item(const NameTable::Module* module, Parameter parameter) {
    const uint32_t number = module == nullptr ? NameTable::kNone : module->at(parameter);
    return number == NameTable::kNone || items_[number].kind != NameKind::kWeight ? nullptr : &items_[number];
  }
  Item* find(std::string_view name);
  const StoredTensor& stored(const Item& item) const { return shards_[item.shard].tensors()[item.tensor]; }
  std::span<const std::byte> bytes(const Item& item) const { return shards_[item.shard].data(stored(item)); }
  std::string describe(std::string_view internal) const;  // "layer 3, expert 7: tensor ..."
  std::string describe(const Item& item) const;
  void check_unused_mtp();

  std::filesystem::path directory_;
  std::vector<std::string>* problems_ = nullptr;
  ModelConfig config_;
  std::vector<SafetensorsFile> shards_;
  std::vector<Item> items_;
  std::vector<uint32_t> first_;         // tensor's number of each shard
  NameTable names_;                     // internal ones, which the shards hold
  uint32_t leader_ = NameTable::kNone;  // the last tensor that leads
  std::string prefix_;
  Skipped visual_;
  std::vector<std::string> kv_scales_, ignored_, notes_;
  bool mtp_declared_ = false;
  int64_t dead_ = 0, bad_input_scales_ = 0;
  bool in_place_ = true;  // read_in_place()
  bool populate_ = true;  // matrix() reads the pages of the data ahead; not where only the form of a matrix matters
};

// Asks for every weight of the configuration and releases it again. Returns what is wrong, one line each; nothing when
// the checkpoint can be loaded. `visit` sees each matrix (empty for vectors: `matrix` is null).
struct WeightSpec;
std::vector<std::string> check_weights(
    WeightSource& source, const std::function<void(const WeightSpec&, const ops::MatrixSource* matrix)>& visit = {});

}  // namespace fourfold::model
