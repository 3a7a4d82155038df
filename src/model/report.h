// What a checkpoint holds, and everything that is wrong with it: the facts behind `fourfold inspect`.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "model/config.h"
#include "model/inventory.h"
#include "ops/tensor.h"

namespace fourfold::model {

struct ReportOptions {
  int64_t context = 0;  // tokens of each sequence, for the caches
  int64_t batch = 1;    // sequences
  bool deep = false;    // read every element and report those that are not finite
};

struct Amount {
  int64_t parameters = 0;
  // That one token multiplies with (of an embedding: one row). Not whole for a part of the experts; the sum over all of
  // them is.
  double active_parameters = 0;
  uint64_t bytes = 0;          // as stored, scales included
  double bytes_per_token = 0;  // read to decode one token of one sequence

  Amount& operator+=(const Amount& other);
};

struct CheckpointReport {
  std::string directory;
  std::optional<ModelConfig> config;  // nothing when config.json could not be read
  std::string architecture;           // from config.json
  QuantizationInfo quantization;
  GenerationConfig generation;
  bool has_generation_config = false, has_tokenizer = false, has_chat_template = false;
  std::string chat_template_place;  // file that holds it

  int64_t shards = 0, tensors = 0;
  uint64_t file_bytes = 0;
  std::string prefix;

  Amount total;  // trunk: without the MTP head
  Amount mtp;
  // By weight_kind_name and by format name ("f32" holds the vectors): each adds up to `total`, and to `mtp`.
  std::map<std::string, Amount> kinds, formats;
  std::map<std::string, Amount> mtp_formats;
  // Matrices by module with the numbers taken out ("layers.N.mlp.experts.E.gate_proj"): how many in which format.
  std::map<std::string, std::map<std::string, int64_t>> modules;
  int64_t activation_scales = 0;  // matrices with a usable static activation scale
  int64_t visual_tensors = 0;
  uint64_t visual_bytes = 0;
  int64_t kv_scales = 0;

  // Memory at options.context and options.batch.
  uint64_t kv_bytes_per_token = 0;  // all attention layers, one sequence, in f16
  uint64_t state_bytes_per_sequence = 0;
  uint64_t kv_bytes = 0, state_bytes = 0;
  uint64_t weight_bytes() const { return total.bytes + mtp.bytes; }
  uint64_t memory_bytes() const { return weight_bytes() + kv_bytes + state_bytes; }

  std::vector<std::string> notes;
  std::vector<std::string> problems;  // with any of these the checkpoint cannot be loaded
};

CheckpointReport inspect_checkpoint(const std::filesystem::path& directory, const ReportOptions& options);

Json report_json(const CheckpointReport& report, const ReportOptions& options);

}  // namespace fourfold::model
