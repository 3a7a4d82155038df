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
#include "base/json.h"
#include "base/math.h"
#include "base/progress.h"
#include "base/threads.h"
#include "model/inventory.h"
#include "model/output_directory.h"
#include "model/quant_config.h"
#include "model/random_weights.h"
#include "model/safetensors.h"
#include "nvfp4/number.h"
#include "nvfp4/quantize.h"

namespace fourfold::model {
namespace {

using Kind = RandomValues::Kind;

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

// How the values of a module become the bytes of one of its tensors.
enum class Encoding : uint8_t { kF32, kF16, kBf16, kNvfp4Codes, kNvfp4Scales, kFp8 };

// FP8: one scale for `rows` x `columns` elements, as many in a row of the grid as it takes. Without `values` all are
// `scale`. The scales are used as they are stored, rounded to bf16 where the tensor holds bf16.
struct ScaleGrid {
  RandomValues values;
  bool varies = false, bf16 = false;
  int64_t rows = 1, columns = 1, width = 1, count = 1;

  std::vector<float> scales() const {
    std::vector<float> out(static_cast<size_t>(count));
    values.fill(0, out);
    if (bf16) {
      for (float& scale : out) scale = nvfp4::bf16_to_float(nvfp4::float_to_bf16(scale));
    }
    return out;
  }
};

// The bytes of a module in one tensor: elements [0, ...) of its values, encoded; or `literal` when that is not empty.
struct Segment {
  RandomValues values;
  Encoding encoding = Encoding::kBf16;
  int64_t columns = 1;  // of the module
  float scale = 1;      // of the tensor
  ScaleGrid grid;
  std::vector<uint8_t> literal = {};
  uint64_t bytes = 0;

  void fill(uint64_t first_byte, std::span<uint8_t> out) const;
};

uint64_t elements_of(Encoding encoding, uint64_t bytes) {
  switch (encoding) {
    case Encoding::kF32:
      return bytes / 4;
    case Encoding::kF16:
    case Encoding::kBf16:
      return bytes / 2;
    case Encoding::kNvfp4Codes:
      return bytes * 2;
    case Encoding::kNvfp4Scales:
      return bytes * nvfp4::kBlock;
    case Encoding::kFp8:
      return bytes;
  }
  return 0;
}

template <typename T, typename Round>
void store(std::span<const float> values, uint8_t* out, Round round) {
  for (size_t i = 0; i < values.size(); ++i) {
    const T value = round(values[i]);
    std::memcpy(out + i * sizeof(T), &value, sizeof(T));
  }
}

void Segment::fill(uint64_t first_byte, std::span<uint8_t> out) const {
  thread_local std::vector<float> buffer(RandomValues::kChunk);
  thread_local std::vector<uint8_t> scratch(RandomValues::kChunk / nvfp4::kBlock);
  const uint64_t first = elements_of(encoding, first_byte), count = elements_of(encoding, out.size());
  const std::vector<float> scales = grid.varies ? grid.scales() : std::vector<float>{};
  for (uint64_t done = 0; done < count; done += RandomValues::kChunk) {
    const std::span<float> chunk =
        std::span(buffer).first(static_cast<size_t>(std::min(RandomValues::kChunk, count - done)));
    values.fill(first + done, chunk);
    uint8_t* to = out.data() + out.size() * done / count;
    switch (encoding) {
      case Encoding::kF32:
        std::memcpy(to, chunk.data(), chunk.size_bytes());
        break;
      case Encoding::kF16:
        store<uint16_t>(chunk, to, [](float x) { return nvfp4::float_to_f16(x); });
        break;
      case Encoding::kBf16:
        store<uint16_t>(chunk, to, [](float x) { return nvfp4::float_to_bf16(x); });
        break;
      case Encoding::kNvfp4Codes:
        nvfp4::quantize_row(chunk, scale, {to, chunk.size() / 2},
                            std::span(scratch).first(chunk.size() / nvfp4::kBlock));
        break;
      case Encoding::kNvfp4Scales:
        for (size_t block = 0; block < chunk.size() / nvfp4::kBlock; ++block) {
          float largest = 0;
          for (size_t i = 0; i < nvfp4::kBlock; ++i) {
            largest = std::max(largest, std::fabs(chunk[block * nvfp4::kBlock + i]));
          }
          to[block] = nvfp4::block_scale_for(largest, scale);
        }
        break;
      case Encoding::kFp8:
        for (size_t i = 0; i < chunk.size(); ++i) {
          float divisor = scale;
          if (grid.varies) {
            const auto index = static_cast<int64_t>(first + done + i);
            divisor =
                scales[static_cast<size_t>(index / columns / grid.rows * grid.width + index % columns / grid.columns)];
          }
          to[i] = nvfp4::float_to_e4m3(chunk[i] / divisor);
        }
        break;
    }
  }
}

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
        const RandomValues values{Kind::kBell, weight_seed(options_.seed, name), 0.1f, 0};
        add_tensor(prefix + name, StoredType::kBf16, {48, 16}, segment(values, Encoding::kBf16, 16, 48 * 16 * 2));
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
    Segment made;
    made.literal.resize(4);
    std::memcpy(made.literal.data(), &value, 4);
    made.bytes = 4;
    return made;
  }

  static Segment segment(const RandomValues& values, Encoding encoding, int64_t columns, int64_t bytes) {
    Segment made;
    made.values = values;
    made.encoding = encoding;
    made.columns = columns;
    made.bytes = static_cast<uint64_t>(bytes);
    return made;
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

  Encoding plain_encoding() const {
    return options_.format == GeneratedFormat::kF16   ? Encoding::kF16
           : options_.format == GeneratedFormat::kF32 ? Encoding::kF32
                                                      : Encoding::kBf16;
  }

  // The tensors of one weight. Its values depend on its name and the seed alone; formats and layouts round them.
  std::vector<Part> parts(const WeightSpec& spec, Stored stored, bool fused) {
    const uint64_t seed = weight_seed(options_.seed, spec.name);
    const int64_t rows = spec.rows, columns = spec.columns;
    const Dead state = dead(spec);
    RandomValues values = matrix_values(spec, seed);
    const float alive = values.largest();
    if (state == Dead::kTiny) values.scale = 1e-23f;
    if (state == Dead::kZero) values.kind = Kind::kZero;
    std::vector<Part> result;
    if (stored == Stored::kPlain) {
      const Encoding encoding = plain_encoding();
      const StoredType type = encoding == Encoding::kF32   ? StoredType::kF32
                              : encoding == Encoding::kF16 ? StoredType::kF16
                                                           : StoredType::kBf16;
      const int64_t size = encoding == Encoding::kF32 ? 4 : 2;
      result.push_back(
          {fused ? "" : ".weight", type, {rows, columns}, segment(values, encoding, columns, rows * columns * size)});
      return result;
    }
    // Modules differ in their scale by a factor of up to four, gate and up of one expert too; stacked tensors share
    // one. It is never less than the largest value needs.
    const float random = static_cast<float>(weight_seed(seed, "vary") >> 40) * 0x1p-24f;
    const float spare = fused ? 1.0f : 1.0f + 3.0f * random;
    const float largest = fused || state == Dead::kZero ? alive : values.largest();
    const float input_scale =
        state == Dead::kAlive ? 4.0f / (6.0f * 448.0f) * (fused ? 1.0f : 0.5f + 1.5f * random) : 0.0f;
    if (stored == Stored::kModelopt || stored == Stored::kCompressed) {
      if (columns % 16 != 0) fail("{} has {} columns, NVFP4 needs a multiple of 16", spec.name, columns);
      const bool inverse = stored == Stored::kCompressed;
      const float scale = nvfp4::tensor_scale_for(largest) * spare;
      Part codes{inverse ? ".weight_packed" : ".weight",
                 StoredType::kU8,
                 {rows, columns / 2},
                 segment(values, Encoding::kNvfp4Codes, columns, rows * columns / 2)};
      Part scales{".weight_scale",
                  StoredType::kF8E4M3,
                  {rows, columns / 16},
                  segment(values, Encoding::kNvfp4Scales, columns, rows * columns / 16)};
      // compressed-tensors replaces an unusable global scale by one when it exports.
      float global = state == Dead::kZero && !fused ? 0.0f : scale;
      if (inverse) global = global > 0.0f && std::isfinite(1.0f / global) ? 1.0f / global : 1.0f;
      codes.segment.scale = scales.segment.scale = scale;
      result.push_back(std::move(codes));
      result.push_back(std::move(scales));
      result.push_back({inverse ? ".weight_global_scale" : ".weight_scale_2", StoredType::kF32,
                        inverse ? std::vector<int64_t>{1} : std::vector<int64_t>{}, literal(global), true});
      if (input_scales()) {
        result.push_back({inverse ? ".input_global_scale" : ".input_scale", StoredType::kF32,
                          inverse ? std::vector<int64_t>{1} : std::vector<int64_t>{},
                          literal(inverse ? 1.0f / input_scale : input_scale), true});
      }
      return result;
    }
    Part codes{
        ".weight", StoredType::kF8E4M3, {rows, columns}, segment(values, Encoding::kFp8, columns, rows * columns)};
    const float scale = largest / nvfp4::kE4m3Max;
    if (stored == Stored::kFp8Tensor) {
      codes.segment.scale = scale * spare;
      result.push_back(std::move(codes));
      result.push_back({".weight_scale", StoredType::kF32, {}, literal(scale * spare), true});
      if (input_scales()) result.push_back({".input_scale", StoredType::kF32, {}, literal(input_scale), true});
      return result;
    }
    const bool blocks = stored == Stored::kFp8Block;
    ScaleGrid& grid = codes.segment.grid;
    grid.varies = true;
    grid.bf16 = !blocks;
    grid.rows = blocks ? 128 : 1;
    grid.columns = blocks ? 128 : columns;
    grid.width = ceil_div(columns, grid.columns);
    grid.count = ceil_div(rows, grid.rows) * grid.width;
    // From 1/64 above what the largest value needs, so that rounding to bf16 never falls below it.
    grid.values = {Kind::kUniform, weight_seed(seed, "scales"), scale, scale * (1 + 1.0f / 64)};
    Part scales{
        blocks ? ".weight_scale_inv" : ".weight_scale",
        blocks ? StoredType::kF32 : StoredType::kBf16,
        {grid.count / grid.width, grid.width},
        segment(grid.values, blocks ? Encoding::kF32 : Encoding::kBf16, grid.width, grid.count * (blocks ? 4 : 2))};
    result.push_back(std::move(codes));
    result.push_back(std::move(scales));
    return result;
  }

  void add_vector(const WeightSpec& spec) {
    // The recurrence keeps its decay and its output norm in fp32 in published bf16 models.
    const bool wide = options_.format == GeneratedFormat::kF32 || spec.name.ends_with(".A_log") ||
                      spec.name.ends_with("linear_attn.norm");
    const bool bare = spec.name.ends_with(".A_log") || spec.name.ends_with(".dt_bias");
    std::vector<int64_t> shape{spec.rows};
    if (spec.name.ends_with(".conv1d")) shape = {config_.conv_channels(), 1, config_.conv_taps};
    const RandomValues values = vector_values(spec, weight_seed(options_.seed, spec.name));
    add_tensor(stored_name(spec.name) + (bare ? "" : ".weight"), wide ? StoredType::kF32 : StoredType::kBf16, shape,
               segment(values, wide ? Encoding::kF32 : Encoding::kBf16, 1, spec.rows * (wide ? 4 : 2)));
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
  uint64_t segment_offset;  // a multiple of kPieceBytes
  uint64_t bytes;
};

constexpr uint64_t kPieceBytes = 1 << 20;
static_assert(kPieceBytes % (4 * RandomValues::kChunk) == 0);

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
        piece.segment->fill(piece.segment_offset, std::span(buffer).first(piece.bytes));
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

// While a directory is being written it holds this: the names of what may be in it, so that what a killed run left
// there can be removed, and nothing else.
constexpr const char* kJournal = ".fourfold-generate.json";

void clear_unfinished(const OutputDirectory& output) {
  namespace fs = std::filesystem;
  std::error_code error;
  const Json journal = parse_json_file(output.journal());
  const Json files = journal.is_object() ? journal.value("files", Json()) : Json();
  if (!files.is_array()) fail("{} is no journal of this program; wanted another directory", output.journal().string());
  for (const Json& file : files) {
    if (file.is_string() && file.get<std::string>().find('/') == std::string::npos) {
      fs::remove(output.path() / file.get<std::string>(), error);
    }
  }
  for (const fs::directory_entry& entry : fs::directory_iterator(output.path(), error)) {
    if (entry.path() == output.journal()) continue;
    fail("{} holds {} beside an unfinished generation; wanted a new or an empty directory", output.path().string(),
         printable(entry.path().filename().string()));
  }
}

}  // namespace

std::span<const FormatName> generated_formats() { return kFormats; }

GeneratedFiles generate_checkpoint(const std::filesystem::path& directory, const GeneratorOptions& options) {
  namespace fs = std::filesystem;
  Planner planner(options);
  planner.plan();
  std::vector<Planned>& tensors = planner.tensors();
  const OutputDirectory output(directory, kJournal, "generation");
  if (output.unfinished()) clear_unfinished(output);

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
  std::vector<std::string> names = {"model.safetensors.index.json", "hf_quant_config.json", "generation_config.json",
                                    "config.json"};
  for (size_t shard = 0; shard < ends.size(); ++shard) names.push_back(shard_name(shard, ends.size()));
  write_file_atomically(unfinished.add(output.journal()), Json{{"files", names}}.dump());
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
  std::error_code error;
  fs::remove(output.journal(), error);
  return files;
}

}  // namespace fourfold::model
