// Quantises a checkpoint to NVFP4, weights only: streaming, with bounded memory, and resumable.
//
// Matrices that share an input and that engines fuse (gate and up; q, k and v; the delta net's qkv and z) share their
// tensor scale. A tensor that holds all experts is split into one module for each expert. Modules that are NVFP4
// already keep their codes and change only their names. Everything else is copied byte for byte.
//
// Each shard appears under its name only when it is complete, and config.json is written last, so that an unfinished
// directory is no checkpoint. A journal of the finished shards, with their sizes and checksums, makes a second run with
// the same input and options continue; a shard that is not what the journal says is made again.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "model/inventory.h"
#include "nvfp4/quantize.h"

namespace fourfold::model {

enum class ExportForm : uint8_t { kModelopt, kCompressedTensors };

struct QuantizeOptions {
  ExportForm form = ExportForm::kModelopt;
  // "experts", "shared", "mlp", "attention", "deltanet", "head", "mtp", or "all" for all but the last two; several with
  // commas.
  std::string what = "all";
  std::vector<std::string> exclude;  // ECMAScript regular expressions searched in internal module names
  nvfp4::ScaleSearch search = nvfp4::ScaleSearch::kMax;
  uint64_t shard_bytes = 5'000'000'000;
  int threads = 0;
  bool progress = true;
};

struct TensorError {
  std::string module;
  int64_t elements = 0;
  double squared_error = 0, energy = 0;  // sums over the elements
  double relative_rms() const;           // sqrt(squared_error / energy); 0 for an all-zero matrix
};

struct QuantizeResult {
  std::vector<TensorError> errors;  // of each quantised matrix, in the order of the files
  int64_t quantized = 0, converted = 0, copied = 0;
  uint64_t input_bytes = 0, output_bytes = 0;
  int64_t shards = 0, resumed_shards = 0;
  std::vector<std::string> notes;
};

QuantizeResult quantize_checkpoint(const std::filesystem::path& input, const std::filesystem::path& output,
                                   const QuantizeOptions& options);

}  // namespace fourfold::model
