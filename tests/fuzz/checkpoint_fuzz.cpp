// The loader over damaged checkpoints of every format. The input is a script: a byte that chooses the format, then
// edits of six bytes each {what, tensor (2), argument (2), value}, applied to a small correct checkpoint. Whatever the
// edits do, loading is a list of problems, and every matrix that loads can be decoded.
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "base/check.h"
#include "model/checkpoint.h"
#include "model/generator.h"
#include "model/inventory.h"
#include "model/random_weights.h"

namespace {

using namespace fourfold;
using namespace fourfold::model;
namespace fs = std::filesystem;

struct Loose {
  std::string name, type;
  std::vector<int64_t> shape;
  std::string bytes;
};

ModelConfig tiny() {
  ModelConfig config;
  config.model_type = "qwen3_5_moe_text";
  config.hidden = 32;
  config.vocabulary = 8;
  config.max_positions = 16;
  config.heads = config.kv_heads = 1;
  config.head_dim = 16;
  config.rotary_dim = 4;
  config.rope_theta = 1e7;
  config.linear_key_heads = config.linear_value_heads = 1;
  config.linear_key_dim = config.linear_value_dim = 16;
  config.conv_taps = 2;
  config.mtp_layers = 1;
  config.experts = 2;
  config.top_k = 1;
  config.moe_intermediate = config.shared_intermediate = 16;
  config.eos_tokens = {1};
  config.layers = 2;
  config.layer_kinds = {LayerKind::kDeltaNet, LayerKind::kAttention};
  return config;
}

class Bench {
 public:
  Bench() {
    const fs::path shared = fs::exists("/dev/shm") ? fs::path("/dev/shm") : fs::temp_directory_path();
    path_ = shared / fmt::format("fourfold-fuzz.{}", ::getpid());
    for (const FormatName& format : generated_formats()) {
      for (bool fused : {false, true}) {
        if (fused && format.format == GeneratedFormat::kFp8Block) continue;  // needs 128 rows
        GeneratorOptions options;
        options.config = tiny();
        options.format = format.format;
        options.fused_experts = fused;
        options.threads = 1;
        fs::remove_all(path_);
        generate_checkpoint(path_, options);
        const SafetensorsFile file(path_ / "model.safetensors");
        std::vector<Loose> tensors;
        for (const StoredTensor& tensor : file.tensors()) {
          const auto data = file.data(tensor);
          tensors.push_back({std::string(tensor.name), tensor.type_name, tensor.shape.list(),
                             std::string(reinterpret_cast<const char*>(data.data()), data.size())});
        }
        bases_.push_back(std::move(tensors));
      }
    }
  }
  ~Bench() { fs::remove_all(path_); }

  void run(const uint8_t* data, size_t size) {
    if (size == 0) return;
    std::vector<Loose> tensors = bases_[data[0] % bases_.size()];
    for (size_t at = 1; at + 6 <= size && at < 1 + 6 * 16; at += 6) {
      edit(tensors, data[at], static_cast<size_t>(data[at + 1] | data[at + 2] << 8),
           static_cast<size_t>(data[at + 3] | data[at + 4] << 8), data[at + 5]);
      if (tensors.empty()) return;
    }
    write(tensors);
    std::vector<std::string> problems;
    try {
      Checkpoint checkpoint(path_, &problems);
      check_weights(checkpoint, [](const WeightSpec& spec, const ops::MatrixSource* matrix) {
        if (matrix == nullptr) return;
        std::vector<float> row(static_cast<size_t>(spec.columns));
        for (int64_t r : {int64_t{0}, spec.rows - 1}) ops::dequantize(*matrix, r, row.data());
      });
    } catch (const Error&) {
    }
  }

 private:
  static void edit(std::vector<Loose>& tensors, uint8_t what, size_t which, size_t argument, uint8_t value) {
    static const char* const kTypes[] = {"F32", "BF16", "F16", "F8_E4M3", "U8", "I8", "I64", "F8_E5M2"};
    static const char* const kSuffixes[] = {".weight",           ".weight_packed",
                                            ".weight_scale",     ".weight_scale_2",
                                            ".weight_scale_inv", ".weight_global_scale",
                                            ".input_scale",      ".input_global_scale",
                                            ".weight_shape",     ""};
    Loose& tensor = tensors[which % tensors.size()];
    switch (what % 8) {
      case 0:  // a byte of the data
        if (!tensor.bytes.empty()) tensor.bytes[argument % tensor.bytes.size()] = static_cast<char>(value);
        break;
      case 1:
        tensor.type = kTypes[value % 8];
        break;
      case 2:
        if (!tensor.shape.empty()) tensor.shape[argument % tensor.shape.size()] = value;
        break;
      case 3:
        if (argument % 2 == 0) {
          tensor.shape.insert(tensor.shape.begin(), value);
        } else if (!tensor.shape.empty()) {
          tensor.shape.erase(tensor.shape.begin());
        }
        break;
      case 4:
        tensors.erase(tensors.begin() + static_cast<std::ptrdiff_t>(which % tensors.size()));
        break;
      case 5: {  // another suffix for the same module
        const size_t dot = tensor.name.rfind('.');
        tensor.name = tensor.name.substr(0, dot) + kSuffixes[value % 10];
        break;
      }
      case 6: {  // a copy under another suffix
        Loose copy = tensor;
        copy.name = copy.name.substr(0, copy.name.rfind('.')) + kSuffixes[value % 10];
        tensors.push_back(std::move(copy));
        break;
      }
      case 7:  // the whole tensor
        tensor.bytes.assign(tensor.bytes.size(), static_cast<char>(value));
        break;
    }
  }

  static size_t type_bytes(const std::string& type) {
    return type == "F32" ? 4 : type == "BF16" || type == "F16" ? 2 : type == "I64" ? 8 : 1;
  }

  void write(std::vector<Loose>& tensors) {
    std::string header = "{", data;
    for (Loose& tensor : tensors) {
      size_t bytes = type_bytes(tensor.type);
      for (int64_t dimension : tensor.shape) bytes = std::min<size_t>(bytes * static_cast<size_t>(dimension), 1 << 20);
      if (bytes >= 1 << 20) return;
      tensor.bytes.resize(bytes, '\x30');  // mostly consistent, so that the edits reach the loader
      header += fmt::format("{}\"{}\":{{\"dtype\":\"{}\",\"shape\":[{}],\"data_offsets\":[{},{}]}}",
                            header.size() > 1 ? "," : "", tensor.name, tensor.type, fmt::join(tensor.shape, ","),
                            data.size(), data.size() + bytes);
      data += tensor.bytes;
    }
    header += '}';
    std::string length(8, '\0');
    for (size_t i = 0; i < 8; ++i) length[i] = static_cast<char>(header.size() >> (8 * i) & 0xff);
    std::ofstream(path_ / "model.safetensors", std::ios::binary) << length << header << data;
  }

  fs::path path_;
  std::vector<std::vector<Loose>> bases_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static Bench bench;
  bench.run(data, size);
  return 0;
}
