#include "model/shape_source.h"

#include <algorithm>
#include <map>
#include <unordered_map>
#include <utility>

#include "base/math.h"

namespace fourfold::model {
namespace {

// What the formats of weights come from.
struct Stored {
  ops::Format format = ops::Format::kBf16;
  int64_t scale_rows = 0, scale_columns = 0;
};

class ShapeSource final : public WeightSource {
 public:
  using Find = std::function<Stored(const std::string& module, int64_t rows, int64_t columns)>;
  ShapeSource(const ModelConfig& config, Find find) : config_(config), find_(std::move(find)) {}

  const ModelConfig& config() const override { return config_; }

  ops::MatrixSource matrix(std::string_view module, int64_t rows, int64_t columns) override {
    const std::string name = first_expert(module);
    auto found = known_.find(name);
    if (found == known_.end()) found = known_.emplace(name, find_(name, rows, columns)).first;
    ops::MatrixSource source;
    source.name = std::string(module);
    source.format = found->second.format;
    source.rows = rows;
    source.columns = columns;
    source.scale_rows = found->second.scale_rows;
    source.scale_columns = found->second.scale_columns;
    return source;
  }
  std::vector<float> vector(std::string_view, int64_t count) override {
    return std::vector<float>(static_cast<size_t>(count));
  }
  void release(const ops::MatrixSource&) override {}
  void finish() override {}

 private:
  // "layers.3.mlp.experts.17.up_proj" -> "layers.3.mlp.experts.0.up_proj"
  static std::string first_expert(std::string_view module) {
    constexpr std::string_view kKey = ".experts.";
    const size_t at = module.find(kKey);
    if (at == std::string_view::npos) return std::string(module);
    const size_t number = at + kKey.size(), end = module.find('.', number);
    if (end == std::string_view::npos) return std::string(module);
    return std::string(module.substr(0, number)) + "0" + std::string(module.substr(end));
  }

  const ModelConfig config_;
  const Find find_;
  std::unordered_map<std::string, Stored> known_;
};

// What the scales of an FP8 matrix are of, from their tensor's shape (docs/checkpoints.md).
void read_grid(const StoredTensor& scales, int64_t rows, int64_t columns, Stored& stored) {
  constexpr int64_t kBlock = 128;
  const int64_t blocks = ceil_div(rows, kBlock) * ceil_div(columns, kBlock);
  const bool by_block = scales.name.ends_with("weight_scale_inv") ||
                        (scales.elements() == blocks && scales.elements() != 1 && scales.elements() != rows);
  stored.scale_rows = by_block ? kBlock : scales.elements() == rows ? 1 : rows;
  stored.scale_columns = by_block ? kBlock : columns;
}

}  // namespace

std::unique_ptr<WeightSource> shapes_of(Checkpoint& checkpoint) {
  return std::make_unique<ShapeSource>(
      checkpoint.config(), [&checkpoint](const std::string& module, int64_t rows, int64_t columns) {
        const bool tied = module == "lm_head" && checkpoint.config().tied_head;
        const Checkpoint::Stored found = checkpoint.stored_matrix(tied ? "embed_tokens" : module, rows, columns);
        Stored stored;
        stored.format = found.format;
        if (found.format != ops::Format::kFp8) return stored;
        stored.scale_rows = rows;
        stored.scale_columns = columns;
        for (const StoredTensor* tensor : found.tensors) {
          if (tensor->name.ends_with("weight_scale") || tensor->name.ends_with("weight_scale_inv")) {
            read_grid(*tensor, rows, columns, stored);
          }
        }
        return stored;
      });
}

std::unique_ptr<WeightSource> shapes_of(const ModelConfig& config, FormatOf formats, bool fp8_blocks) {
  std::map<std::string, WeightSpec> specs;
  for (WeightSpec& spec : weight_specs(config)) {
    if (spec.expert <= 0) specs.emplace(spec.name, spec);
  }
  return std::make_unique<ShapeSource>(config, [specs = std::move(specs), formats = std::move(formats), fp8_blocks](
                                                   const std::string& module, int64_t rows, int64_t columns) {
    Stored stored;
    const auto spec = specs.find(module);
    if (spec != specs.end()) stored.format = random_format(formats, spec->second);
    if (stored.format == ops::Format::kFp8) {
      stored.scale_rows = fp8_blocks ? 128 : rows;
      stored.scale_columns = fp8_blocks ? 128 : columns;
    }
    return stored;
  });
}

}  // namespace fourfold::model
