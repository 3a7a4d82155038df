#include "model/generator.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <mutex>
#include <unordered_map>

#include "base/check.h"
#include "base/file.h"
#include "base/interrupt.h"
#include "base/math.h"
#include "base/progress.h"
#include "base/threads.h"
#include "model/inventory.h"
#include "model/quant_config.h"
#include "model/random_weights.h"
#include "model/safetensors.h"

namespace fourfold::model {
namespace {

using Kind = RandomStream::Kind;

constexpr FormatName kFormats[] = {
    {GeneratedFormat::kBf16, "bf16", "all weights bf16, as published unquantised models"},
    {GeneratedFormat::kF16, "f16", "all weights f16"},
    {GeneratedFormat::kF32, "f32", "all weights f32"},
    {GeneratedFormat::kModeloptNvfp4, "modelopt-nvfp4", "modelopt NVFP4 with activation scales"},
    {GeneratedFormat::kModeloptW4A16, "modelopt-w4a16", "modelopt NVFP4, weights only"},
    {GeneratedFormat::kModeloptMixed, "modelopt-mixed", "modelopt: NVFP4 experts and head, FP8 (per tensor) mixers"},
    {GeneratedFormat::kModeloptFp8, "modelopt-fp8", "modelopt FP8, per tensor"},
    {GeneratedFormat::kFp8Block, "fp8-block", "FP8 with scales for 128 x 128 blocks"},
    {GeneratedFormat::kFp8Channel, "fp8-channel", "compressed-tensors FP8, per output channel"},
    {GeneratedFormat::kCtNvfp4, "ct-nvfp4", "compressed-tensors nvfp4-pack-quantized with activation scales"},
    {GeneratedFormat::kCtNvfp4A16, "ct-nvfp4a16", "compressed-tensors nvfp4-pack-quantized, weights only"},
    {GeneratedFormat::kCtMixed, "ct-mixed", "compressed-tensors: NVFP4 experts, FP8 per channel mixers and head"}};

enum class Stored : uint8_t { kPlain, kModelopt, kCompressed, kFp8Tensor, kFp8Channel, kFp8Block };

struct Segment {
  RandomStream stream;
  std::vector<uint8_t> literal;  // instead of the stream when not empty
  uint64_t bytes = 0;
};

struct Planned {
  TensorPlan plan;
  std::vector<Segment> segments;
};

// One tensor of a weight; for fused experts the segments of all experts are joined.
struct Part {
  std::string suffix;
  StoredType type = StoredType::kBf16;
  std::vector<int64_t> shape;
  Segment segment;
  bool scalar = false;  // shared by all experts when fused
};

class Planner {
 public:
  explicit Planner(const GeneratorOptions& options) : options_(options), config_(options.config) {
    parse_config(write_config(config_, nullptr), "generated config");  // whatever the loader would refuse
    if (options_.dead_experts < 0 || options_.dead_experts > config_.experts) {
      fail("{} dead experts, the model has {} experts", options_.dead_experts, config_.experts);
    }
  }

  void plan() {
    for (const WeightSpec& spec : weight_specs(config_)) add(spec);
    if (options_.visual) {
      const std::string prefix = options_.prefix == PrefixStyle::kModelLanguageModel ? "model.visual." : "visual.";
      for (const char* name : {"blocks.0.attn.qkv.weight", "patch_embed.proj.weight", "pos_embed.weight"}) {
        const RandomStream stream{Kind::kBf16, weight_seed(options_.seed, name), 0.1f, 0, 0};
        add_tensor(prefix + name, StoredType::kBf16, {48, 16}, {stream, {}, 48 * 16 * 2});
      }
    }
  }

  std::vector<Planned>& tensors() { return tensors_; }

  Json quantization(Json* hf_quant) const {
    QuantDescription description;
    description.ignored = ignored_;
    description.fp8_kv_cache = options_.kv_scales;
    switch (options_.format) {
      case GeneratedFormat::kBf16:
      case GeneratedFormat::kF16:
      case GeneratedFormat::kF32:
        return nullptr;
      case GeneratedFormat::kModeloptNvfp4:
        description.algorithm = "NVFP4";
        description.quantized_activations = true;
        break;
      case GeneratedFormat::kModeloptW4A16:
        description.algorithm = "W4A16_NVFP4";
        break;
      case GeneratedFormat::kModeloptMixed:
        description.algorithm = "MIXED_PRECISION";
        description.layers = layers_;
        break;
      case GeneratedFormat::kModeloptFp8:
        description.algorithm = "FP8";
        break;
      case GeneratedFormat::kFp8Block:
        return fp8_block_config(description);
      case GeneratedFormat::kFp8Channel:
        return compressed_tensors_config(description, {}, {"Linear"});
      case GeneratedFormat::kCtNvfp4:
        description.quantized_activations = true;
        return compressed_tensors_config(description, {"Linear"}, {});
      case GeneratedFormat::kCtNvfp4A16:
        return compressed_tensors_config(description, {"Linear"}, {});
      case GeneratedFormat::kCtMixed:
        description.quantized_activations = true;
        return compressed_tensors_config(description, {"re:.*mlp.*_proj$"},
                                         {"re:.*self_attn.*_proj$", "re:.*linear_attn.*", "lm_head"});
    }
    *hf_quant = modelopt_hf_quant_config(description);
    return modelopt_quantization_config(description);
  }

 private:
  Stored stored_as(const WeightSpec& spec) const {
    const bool expert = spec.kind == WeightKind::kRoutedExpert || spec.kind == WeightKind::kMlp;
    const bool mlp = expert || spec.kind == WeightKind::kSharedExpert;
    const bool mixer = spec.kind == WeightKind::kAttention || spec.kind == WeightKind::kDeltaNet;
    const bool head = spec.kind == WeightKind::kHead;
    const bool chosen = options_.only_experts ? expert : quantized_by_default(spec.kind);
    // Published NVFP4 checkpoints leave the MTP head alone; FP8-block ones quantise it too.
    if (spec.mtp && options_.format != GeneratedFormat::kFp8Block) return Stored::kPlain;
    switch (options_.format) {
      case GeneratedFormat::kBf16:
      case GeneratedFormat::kF16:
      case GeneratedFormat::kF32:
        return Stored::kPlain;
      case GeneratedFormat::kModeloptNvfp4:
      case GeneratedFormat::kModeloptW4A16:
        return chosen ? Stored::kModelopt : Stored::kPlain;
      case GeneratedFormat::kModeloptMixed:
        return mlp || head ? Stored::kModelopt : mixer ? Stored::kFp8Tensor : Stored::kPlain;
      case GeneratedFormat::kModeloptFp8:
        return chosen ? Stored::kFp8Tensor : Stored::kPlain;
      case GeneratedFormat::kFp8Block:
        return chosen ? Stored::kFp8Block : Stored::kPlain;
      case GeneratedFormat::kFp8Channel:
        return chosen ? Stored::kFp8Channel : Stored::kPlain;
      case GeneratedFormat::kCtNvfp4:
      case GeneratedFormat::kCtNvfp4A16:
        return chosen ? Stored::kCompressed : Stored::kPlain;
      case GeneratedFormat::kCtMixed:
        return mlp ? Stored::kCompressed : mixer || head ? Stored::kFp8Channel : Stored::kPlain;
    }
    return Stored::kPlain;
  }

  bool input_scales() const {
    return options_.format == GeneratedFormat::kModeloptNvfp4 || options_.format == GeneratedFormat::kModeloptMixed ||
           options_.format == GeneratedFormat::kCtNvfp4 || options_.format == GeneratedFormat::kCtMixed;
  }

  std::string stored_name(const std::string& internal) const {
    const bool trunk = !internal.starts_with("mtp.") && !internal.starts_with("lm_head");
    switch (options_.prefix) {
      case PrefixStyle::kModelLanguageModel:
        return (trunk ? "model.language_model." : "") + internal;
      case PrefixStyle::kLanguageModelModel:
        return (trunk ? "language_model.model." : internal.starts_with("mtp.") ? "" : "language_model.") + internal;
      case PrefixStyle::kModel:
        return (internal.starts_with("lm_head") ? "" : "model.") + internal;
      case PrefixStyle::kNone:
        return internal;
    }
    return internal;
  }

  void add_tensor(std::string name, StoredType type, std::vector<int64_t> shape, Segment segment) {
    Planned planned{{std::move(name), type, std::move(shape)}, {}};
    FF_ASSERT(planned.plan.bytes() == segment.bytes);
    planned.segments.push_back(std::move(segment));
    tensors_.push_back(std::move(planned));
  }

  static Segment literal(float value) {
    Segment segment;
    segment.literal.resize(4);
    std::memcpy(segment.literal.data(), &value, 4);
    segment.bytes = 4;
    return segment;
  }

  // Weights that nothing was ever routed to: of every two such experts one is exactly zero, with the scales that an
  // exporter leaves for it, and one is so small that its scales are denormal in half precision.
  enum class Dead : uint8_t { kAlive, kZero, kTiny };
  Dead dead(const WeightSpec& spec) const {
    if (spec.kind != WeightKind::kRoutedExpert || spec.expert < config_.experts - options_.dead_experts) {
      return Dead::kAlive;
    }
    return spec.expert % 2 == 0 ? Dead::kZero : Dead::kTiny;
  }

  std::vector<Part> parts(const WeightSpec& spec, Stored stored, bool fused) {
    const uint64_t seed = weight_seed(options_.seed, spec.name);
    const int64_t rows = spec.rows, columns = spec.columns;
    const auto bytes = [](int64_t count) { return static_cast<uint64_t>(count); };
    const Dead state = dead(spec);
    float rms = weight_rms(spec);
    if (state == Dead::kTiny) rms = 1e-23f;
    std::vector<Part> result;
    if (stored == Stored::kPlain) {
      Kind kind = Kind::kBf16;
      StoredType type = StoredType::kBf16;
      int64_t size = 2;
      if (options_.format == GeneratedFormat::kF16) {
        kind = Kind::kF16;
        type = StoredType::kF16;
      } else if (options_.format == GeneratedFormat::kF32) {
        kind = Kind::kF32;
        type = StoredType::kF32;
        size = 4;
      }
      RandomStream stream{kind, seed, rms, 0, 0};
      if (state == Dead::kZero) stream.kind = Kind::kByte;
      result.push_back({fused ? "" : ".weight", type, {rows, columns}, {stream, {}, bytes(rows * columns * size)}});
      return result;
    }
    // Modules differ in their scale by a factor of up to four, gate and up of one expert too; stacked tensors share
    // one.
    const float vary = fused ? 1.0f : 0.5f + 1.5f * static_cast<float>(weight_seed(seed, "vary") >> 40) * 0x1p-24f;
    const float input_scale = state == Dead::kAlive ? 4.0f / (6.0f * 448.0f) * vary : 0.0f;
    if (stored == Stored::kModelopt || stored == Stored::kCompressed) {
      if (columns % 16 != 0) fail("{} has {} columns, NVFP4 needs a multiple of 16", spec.name, columns);
      const bool inverse = stored == Stored::kCompressed;
      float scale = rms * vary / random_nvfp4_rms();
      RandomStream codes{Kind::kCodes, seed, 0, 0, 0}, scales{Kind::kBlockScales, weight_seed(seed, "scales"), 0, 0, 0};
      if (state == Dead::kZero) {
        codes.kind = Kind::kByte;
        scales.kind = Kind::kByte;
        scales.byte = 0x38;  // 1
        if (!fused) scale = 0.0f;
      } else if (state == Dead::kTiny && fused) {
        scale = weight_rms(spec) / random_nvfp4_rms();
      }
      result.push_back({inverse ? ".weight_packed" : ".weight",
                        StoredType::kU8,
                        {rows, columns / 2},
                        {codes, {}, bytes(rows * columns / 2)}});
      result.push_back(
          {".weight_scale", StoredType::kF8E4M3, {rows, columns / 16}, {scales, {}, bytes(rows * columns / 16)}});
      // compressed-tensors replaces an unusable global scale by one when it exports.
      const float global = !inverse ? scale : scale > 0.0f && std::isfinite(1.0f / scale) ? 1.0f / scale : 1.0f;
      result.push_back({inverse ? ".weight_global_scale" : ".weight_scale_2", StoredType::kF32,
                        inverse ? std::vector<int64_t>{1} : std::vector<int64_t>{}, literal(global), true});
      if (input_scales()) {
        result.push_back({inverse ? ".input_global_scale" : ".input_scale", StoredType::kF32,
                          inverse ? std::vector<int64_t>{1} : std::vector<int64_t>{},
                          literal(inverse ? 1.0f / input_scale : input_scale), true});
      }
      return result;
    }
    RandomStream codes{Kind::kFp8, seed, 0, 0, 0};
    if (state == Dead::kZero) codes.kind = Kind::kByte;
    result.push_back({".weight", StoredType::kF8E4M3, {rows, columns}, {codes, {}, bytes(rows * columns)}});
    const float scale = rms * vary / random_fp8_rms();
    if (stored == Stored::kFp8Tensor) {
      result.push_back({".weight_scale", StoredType::kF32, {}, literal(scale), true});
      if (input_scales()) result.push_back({".input_scale", StoredType::kF32, {}, literal(input_scale), true});
    } else if (stored == Stored::kFp8Channel) {
      const RandomStream stream{Kind::kUniformBf16, weight_seed(seed, "scales"), 0.5f * scale, 0.75f * scale, 0};
      result.push_back({".weight_scale", StoredType::kBf16, {rows, 1}, {stream, {}, bytes(rows * 2)}});
    } else {
      const int64_t grid_rows = ceil_div(rows, 128), grid_columns = ceil_div(columns, 128);
      const RandomStream stream{Kind::kUniformF32, weight_seed(seed, "scales"), 0.5f * scale, 0.75f * scale, 0};
      result.push_back({".weight_scale_inv",
                        StoredType::kF32,
                        {grid_rows, grid_columns},
                        {stream, {}, bytes(grid_rows * grid_columns * 4)}});
    }
    return result;
  }

  void add_vector(const WeightSpec& spec) {
    // The recurrence keeps its decay and its output norm in fp32 in published bf16 models.
    const bool wide = options_.format == GeneratedFormat::kF32 || spec.name.ends_with(".A_log") ||
                      spec.name.ends_with("linear_attn.norm");
    const bool bare = spec.name.ends_with(".A_log") || spec.name.ends_with(".dt_bias");
    std::vector<int64_t> shape{spec.rows};
    if (spec.name.ends_with(".conv1d")) shape = {config_.conv_channels(), 1, config_.conv_taps};
    const RandomStream stream = vector_stream(spec, weight_seed(options_.seed, spec.name), !wide);
    add_tensor(stored_name(spec.name) + (bare ? "" : ".weight"), wide ? StoredType::kF32 : StoredType::kBf16, shape,
               {stream, {}, static_cast<uint64_t>(spec.rows * (wide ? 4 : 2))});
  }

  void add(const WeightSpec& spec) {
    if (spec.is_vector) {
      add_vector(spec);
      return;
    }
    const Stored stored = stored_as(spec);
    const bool expert = spec.kind == WeightKind::kRoutedExpert;
    note_quantization(spec, stored);
    if (!expert || !fuse(stored)) {
      for (Part& part : parts(spec, stored, false)) {
        add_tensor(stored_name(spec.name) + part.suffix, part.type, part.shape, std::move(part.segment));
      }
      if (options_.kv_scales && !spec.mtp && (spec.name.ends_with(".k_proj") || spec.name.ends_with(".v_proj"))) {
        const std::string name = stored_name(spec.name) + (spec.name.ends_with(".k_proj") ? ".k_scale" : ".v_scale");
        add_tensor(name, StoredType::kF32, {}, literal(1.0f));
      }
      return;
    }
    const bool down = spec.name.ends_with(".down_proj");
    const std::string base =
        spec.name.substr(0, spec.name.find(".experts.") + 9) + (down ? "down_proj" : "gate_up_proj");
    if (stored == Stored::kFp8Block && !down && spec.rows % 128 != 0) {
      fail("{} rows of gate and up: fused FP8 blocks need a multiple of 128", spec.rows);
    }
    for (Part& part : parts(spec, stored, true)) {
      const auto [place, added] = fused_.try_emplace(base + part.suffix, tensors_.size());
      if (added) {
        // 2-D with all rows below each other (compressed-tensors), otherwise 3-D.
        std::vector<int64_t> shape = part.shape;
        if (!part.scalar) {
          shape[0] *= down ? 1 : 2;
          if (stored == Stored::kCompressed) {
            shape[0] *= config_.experts;
          } else {
            shape.insert(shape.begin(), config_.experts);
          }
        }
        tensors_.push_back({{stored_name(base) + part.suffix, part.type, shape}, {}});
      } else if (part.scalar) {
        continue;
      }
      tensors_[place->second].segments.push_back(std::move(part.segment));
    }
  }

  bool fuse(Stored stored) const {
    // NVFP4 and FP8 releases keep the experts of an unquantised MTP head fused.
    return options_.fused_experts || (stored == Stored::kPlain && options_.format > GeneratedFormat::kF32);
  }

  void note_quantization(const WeightSpec& spec, Stored stored) {
    if (spec.mtp) {
      if (stored == Stored::kPlain && !mtp_noted_) ignored_.push_back(compressed() ? "re:^mtp.*" : "mtp*");
      mtp_noted_ = true;
      return;
    }
    std::string module = stored_name(spec.name);
    if (spec.kind == WeightKind::kRoutedExpert) {
      if (spec.expert > 0 || !spec.name.ends_with(".gate_proj")) return;
      module.resize(module.find(".experts.") + 8);
    }
    if (stored == Stored::kPlain) {
      ignored_.push_back(module);
    } else {
      layers_.emplace_back(module, stored == Stored::kModelopt ? "W4A16_NVFP4" : "FP8");
    }
  }

  bool compressed() const {
    return options_.format == GeneratedFormat::kFp8Channel || options_.format >= GeneratedFormat::kCtNvfp4;
  }

  const GeneratorOptions& options_;
  const ModelConfig& config_;
  std::vector<Planned> tensors_;
  std::unordered_map<std::string, size_t> fused_;  // fused tensors by internal name
  std::vector<std::string> ignored_;
  std::vector<std::pair<std::string, std::string>> layers_;
  bool mtp_noted_ = false;
};

// A run of bytes of one tensor that one thread makes and writes.
struct Piece {
  size_t tensor;
  uint64_t tensor_offset;  // where the piece goes
  const Segment* segment;
  uint64_t segment_offset;  // a multiple of RandomStream::kChunk
  uint64_t bytes;
};

constexpr uint64_t kPieceBytes = 4 << 20;

void write_shard(const std::filesystem::path& path, std::span<const Planned> tensors, ThreadPool& threads,
                 Progress& progress) {
  std::vector<TensorPlan> plans;
  std::vector<Piece> pieces;
  for (size_t i = 0; i < tensors.size(); ++i) {
    plans.push_back(tensors[i].plan);
    uint64_t offset = 0;
    for (const Segment& segment : tensors[i].segments) {
      for (uint64_t begin = 0; begin < segment.bytes; begin += kPieceBytes) {
        const uint64_t bytes = std::min(kPieceBytes, segment.bytes - begin);
        pieces.push_back({i, offset + begin, &segment, begin, bytes});
      }
      offset += segment.bytes;
    }
    FF_ASSERT(offset == plans.back().bytes());
  }
  SafetensorsWriter writer(path, std::move(plans), {{"format", "pt"}});
  std::mutex mutex;
  threads.parallel_for(static_cast<int64_t>(pieces.size()), 1, [&](int64_t begin, int64_t end) {
    thread_local std::vector<uint8_t> buffer;
    for (int64_t i = begin; i < end; ++i) {
      throw_if_interrupted();
      const Piece& piece = pieces[static_cast<size_t>(i)];
      std::span<const uint8_t> bytes = piece.segment->literal;
      if (bytes.empty()) {
        if (buffer.size() < piece.bytes) buffer.resize(piece.bytes);
        piece.segment->stream.fill(piece.segment_offset, std::span(buffer).first(piece.bytes));
        bytes = std::span(buffer).first(piece.bytes);
      }
      writer.write(piece.tensor, std::as_bytes(bytes), piece.tensor_offset);
      const std::lock_guard lock(mutex);
      progress.advance(piece.bytes);
    }
  });
  writer.finish();
}

// The files of a run that has not ended yet. They could not be loaded, and would keep the next run from the directory:
// so they go when the run fails.
class UnfinishedFiles {
 public:
  UnfinishedFiles() = default;
  UnfinishedFiles(const UnfinishedFiles&) = delete;
  UnfinishedFiles& operator=(const UnfinishedFiles&) = delete;
  ~UnfinishedFiles() {
    std::error_code error;
    for (const std::filesystem::path& path : paths_) std::filesystem::remove(path, error);
  }
  const std::filesystem::path& add(std::filesystem::path path) { return paths_.emplace_back(std::move(path)); }
  void keep() { paths_.clear(); }

 private:
  std::vector<std::filesystem::path> paths_;
};

}  // namespace

std::span<const FormatName> generated_formats() { return kFormats; }

GeneratedFiles generate_checkpoint(const std::filesystem::path& directory, const GeneratorOptions& options) {
  namespace fs = std::filesystem;
  Planner planner(options);
  planner.plan();
  std::vector<Planned>& tensors = planner.tensors();
  const CreatedDirectory created(directory);
  std::error_code error;
  if (!fs::is_empty(directory, error) || error) {
    fail("{} is not empty; wanted a new or an empty directory", directory.string());
  }

  std::vector<TensorPlan> plans;
  GeneratedFiles files;
  for (const Planned& tensor : tensors) {
    plans.push_back(tensor.plan);
    files.bytes += tensor.plan.bytes();
  }
  const std::vector<size_t> ends = cut_evenly(plans, options.shards);
  files.tensors = static_cast<int64_t>(tensors.size());
  files.shards = static_cast<int64_t>(ends.size());

  require_space(directory, files.bytes);

  UnfinishedFiles unfinished;
  ThreadPool threads(options.threads);
  Progress progress("writing", files.bytes, "B");
  size_t begin = 0;
  for (size_t shard = 0; shard < ends.size(); ++shard) {
    write_shard(unfinished.add(directory / shard_name(shard, ends.size())),
                std::span(tensors).subspan(begin, ends[shard] - begin), threads, progress);
    begin = ends[shard];
  }
  progress.finish();
  if (ends.size() > 1) {
    unfinished.add(directory / "model.safetensors.index.json");
    write_shard_index(directory, plans, ends);
  }

  ModelConfig config = options.config;
  for (int32_t& token : config.eos_tokens) token = std::min(token, static_cast<int32_t>(config.vocabulary - 1));
  Json hf_quant;
  const Json quantization = planner.quantization(&hf_quant);
  if (!hf_quant.is_null())
    write_file_atomically(unfinished.add(directory / "hf_quant_config.json"), hf_quant.dump(2) + "\n");
  const int64_t last = config.vocabulary - 1;
  const Json generation = {{"do_sample", true},
                           {"eos_token_id", {std::min<int64_t>(248046, last), std::min<int64_t>(248044, last)}},
                           {"temperature", 1.0},
                           {"top_k", 20},
                           {"top_p", 0.95}};
  write_file_atomically(unfinished.add(directory / "generation_config.json"), generation.dump(2) + "\n");
  // Last: without it the directory is no checkpoint.
  write_file_atomically(directory / "config.json", write_config(config, quantization).dump(2) + "\n");
  unfinished.keep();
  return files;
}

}  // namespace fourfold::model
