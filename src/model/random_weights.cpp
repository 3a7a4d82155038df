#include "model/random_weights.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <map>
#include <new>
#include <unordered_map>
#include <utility>

#include "base/check.h"
#include "base/math.h"
#include "base/random.h"
#include "nvfp4/number.h"

namespace fourfold::model {
namespace {

constexpr uint8_t kFirstBlockScale = 0x50;  // 8; 31 codes later is 120

// The sum of four random bytes around its mean: bell-shaped, an integer, the same on every machine. Its variance is
// 4 (256^2 - 1) / 12.
constexpr float kBellRms = 147.80053f;
constexpr int32_t kBellMean = 510;
constexpr float kBellLargest = 510.0f;
// The sums of the four low and of the four high bytes, in the halves of the result.
inline uint64_t byte_sums(uint64_t bits) {
  const uint64_t pairs = (bits & 0x00ff00ff00ff00ffull) + (bits >> 8 & 0x00ff00ff00ff00ffull);
  return (pairs & 0x0000ffff0000ffffull) + (pairs >> 16 & 0x0000ffff0000ffffull);
}

// Of each byte what `mask` leaves of a random one, plus `add`.
void fill_bytes(uint64_t seed, uint64_t mask, uint64_t add, std::span<uint8_t> out) {
  Random random(seed);
  for (size_t done = 0; done < out.size(); done += 8) {
    const uint64_t value = (random.next() & mask) + add;
    std::memcpy(out.data() + done, &value, std::min<size_t>(8, out.size() - done));
  }
}

// The rms of random e2m1 codes under block scales from 8 to 120, before the tensor scale.
float random_nvfp4_rms() {
  const auto square = [](double x) { return x * x; };
  double codes = 0, scales = 0;
  for (int code = 0; code < 16; ++code) codes += square(nvfp4::e2m1_to_float(static_cast<uint8_t>(code))) / 16;
  for (int i = 0; i < 32; ++i) {
    scales += square(nvfp4::e4m3_to_float(static_cast<uint8_t>(kFirstBlockScale + i))) / 32;
  }
  return static_cast<float>(std::sqrt(codes * scales));
}

// Of random e4m3 codes with exponents 2^-1 and 2^0.
constexpr uint8_t kFp8Mask = 0x8f, kFp8Least = 0x30;
float random_fp8_rms() {
  double squares = 0;
  for (int i = 0; i < 16; ++i) {
    const double value = nvfp4::e4m3_to_float(static_cast<uint8_t>(kFp8Least + i));
    squares += value * value / 16;
  }
  return static_cast<float>(std::sqrt(squares));
}

constexpr uint64_t repeat(uint8_t byte) { return 0x0101010101010101ull * byte; }

// Random elements that many matrices are cut out of, each at a place of its own: a model of hundreds of gigabytes would
// otherwise take minutes to make.
class Pool {
 public:
  static constexpr size_t kLeast = size_t{1} << 17;  // bytes of a matrix that is cut out
  // Elements of a model; one with fewer is made sooner than the pools are.
  static constexpr int64_t kModel = int64_t{1} << 28;

  Pool(size_t bytes, const std::function<void(std::span<uint8_t>)>& fill)
      : bytes_(std::make_shared<std::vector<uint8_t>>(bytes + kAlign)), size_(bytes) {
    const size_t rest = reinterpret_cast<uintptr_t>(bytes_->data()) % kAlign;
    first_ = bytes_->data() + (kAlign - rest) % kAlign;
    fill({first_, size_});
  }
  // So many bytes, as `seed` says which; null: it has not twice as many.
  std::shared_ptr<uint8_t> cut(uint64_t seed, size_t bytes) const {
    if (bytes > size_ / 2) return nullptr;
    return {bytes_, first_ + seed % ((size_ - bytes) / kAlign) * kAlign};
  }

 private:
  static constexpr size_t kAlign = 64;
  std::shared_ptr<std::vector<uint8_t>> bytes_;
  size_t size_;
  uint8_t* first_;
};

class RandomWeights final : public WeightSource {
 public:
  RandomWeights(const ModelConfig& config, uint64_t seed, FormatOf formats)
      : config_(config), seed_(seed), formats_(std::move(formats)) {
    validate_config(config_, "model shape");
    for (WeightSpec& spec : weight_specs(config_)) {
      elements_ += spec.elements();
      std::string name = spec.name;
      specs_.emplace(std::move(name), std::move(spec));
    }
  }

  const ModelConfig& config() const override { return config_; }

  ops::MatrixSource matrix(std::string_view module, int64_t rows, int64_t columns) override {
    const WeightSpec& spec = find(module);
    if (spec.is_vector || spec.rows != rows || spec.columns != columns) {
      fail("random weight {} is [{}, {}], wanted [{}, {}]", spec.name, spec.rows, spec.columns, rows, columns);
    }
    ops::MatrixSource source;
    source.name = spec.name;
    source.rows = rows;
    source.columns = columns;
    source.format = random_format(formats_, spec);
    const bool fp4 = source.format == ops::Format::kNvfp4, fp8 = source.format == ops::Format::kFp8;
    const uint64_t seed = weight_seed(seed_, spec.name);
    const auto elements = static_cast<size_t>(rows * columns);
    const size_t data_bytes = fp4 ? elements / 2 : fp8 ? round_up(elements, alignof(float)) : elements * 2;
    const size_t scale_bytes = fp4 ? elements / 16 : fp8 ? sizeof(float) : 0;
    if (elements_ >= Pool::kModel && data_bytes >= Pool::kLeast && cut(spec, seed, data_bytes, scale_bytes, source))
      return source;
    // Not zeroed first: a large model is many gigabytes of this.
    std::shared_ptr<uint8_t> memory(
        static_cast<uint8_t*>(::operator new(data_bytes + scale_bytes, std::align_val_t(64))),
        [](uint8_t* data) { ::operator delete(data, std::align_val_t(64)); });
    uint8_t* scales = memory.get() + data_bytes;
    source.data = memory.get();
    // Random codes, not quantised values: nobody asks for these weights in another format, and large models are made
    // in seconds.
    if (fp4) {
      fill_bytes(seed, ~0ull, 0, {memory.get(), data_bytes});
      source.block_scales = scales;
      fill_bytes(weight_seed(seed, "scales"), repeat(31), repeat(kFirstBlockScale), {scales, scale_bytes});
      source.tensor_scale = weight_rms(spec) / random_nvfp4_rms();
    } else if (fp8) {
      fill_bytes(seed, repeat(kFp8Mask), repeat(kFp8Least), {memory.get(), data_bytes});
      const float scale = weight_rms(spec) / random_fp8_rms();
      std::memcpy(scales, &scale, sizeof(scale));
      source.grid_scales = reinterpret_cast<const float*>(scales);
      source.scale_rows = rows;
      source.scale_columns = columns;
    } else {
      fill_bf16(matrix_values(spec, seed), {reinterpret_cast<uint16_t*>(memory.get()), elements});
    }
    source.owner = std::move(memory);
    return source;
  }

  std::vector<float> vector(std::string_view name, int64_t count) override {
    const WeightSpec& spec = find(name);
    if (!spec.is_vector || spec.rows != count) {
      fail("random weight {} has {} elements, wanted {}", spec.name, spec.elements(), count);
    }
    std::vector<float> values(static_cast<size_t>(count));
    vector_values(spec, weight_seed(seed_, spec.name)).fill(0, values);
    return values;
  }

  void release(const ops::MatrixSource&) override {}
  void finish() override {}

 private:
  // NVFP4 and bf16 of one rms out of a pool; false: it is too large for that, or of another format.
  bool cut(const WeightSpec& spec, uint64_t seed, size_t data_bytes, size_t scale_bytes, ops::MatrixSource& source) {
    struct Both {
      std::shared_ptr<uint8_t> data, scales;
    };
    Both both;
    if (source.format == ops::Format::kNvfp4) {
      both.data = bytes_of("codes", ~0ull, 0).cut(seed, data_bytes);
      both.scales =
          bytes_of("scales", repeat(31), repeat(kFirstBlockScale)).cut(weight_seed(seed, "scales"), scale_bytes);
      source.tensor_scale = weight_rms(spec) / random_nvfp4_rms();
    } else if (source.format == ops::Format::kFp8) {
      return false;
    } else {
      both.data = values_of(matrix_values(spec, weight_seed(seed_, "values"))).cut(seed, data_bytes);
    }
    if (both.data == nullptr) return false;
    source.data = both.data.get();
    source.block_scales = both.scales.get();
    source.owner = std::make_shared<Both>(std::move(both));
    return true;
  }
  const Pool& bytes_of(std::string_view name, uint64_t mask, uint64_t add) {
    constexpr size_t kBytes = size_t{64} << 20;
    std::unique_ptr<Pool>& pool = pools_[{std::string(name), 0.0f}];
    if (pool == nullptr) {
      pool = std::make_unique<Pool>(
          kBytes, [&](std::span<uint8_t> out) { fill_bytes(weight_seed(seed_, name), mask, add, out); });
    }
    return *pool;
  }
  const Pool& values_of(const RandomValues& values) {
    constexpr size_t kBytes = size_t{288} << 20;
    std::unique_ptr<Pool>& pool = pools_[{"values", values.scale}];
    if (pool == nullptr) {
      pool = std::make_unique<Pool>(kBytes, [&](std::span<uint8_t> out) {
        fill_bf16(values, {reinterpret_cast<uint16_t*>(out.data()), out.size() / sizeof(uint16_t)});
      });
    }
    return *pool;
  }

  static void fill_bf16(const RandomValues& values, std::span<uint16_t> out) {
    std::vector<float> chunk(RandomValues::kChunk);
    for (size_t done = 0; done < out.size(); done += chunk.size()) {
      const size_t count = std::min(chunk.size(), out.size() - done);
      values.fill(done, std::span(chunk).first(count));
      for (size_t i = 0; i < count; ++i) out[done + i] = nvfp4::float_to_bf16(chunk[i]);
    }
  }

  const WeightSpec& find(std::string_view name) const {
    const auto found = specs_.find(std::string(name));
    if (found == specs_.end()) fail("the model shape has no weight {}", name);
    return found->second;
  }

  ModelConfig config_;
  uint64_t seed_;
  FormatOf formats_;
  int64_t elements_ = 0;
  std::unordered_map<std::string, WeightSpec> specs_;
  std::map<std::pair<std::string, float>, std::unique_ptr<Pool>> pools_;
};

struct Shape {
  const char* name;
  int64_t hidden, layers, heads, kv_heads, value_heads, experts, top_k, width, intermediate;
};
// Sizes from the config.json of the published models.
constexpr Shape kShapes[] = {{"35B-A3B", 2048, 40, 16, 2, 32, 256, 8, 512, 0},
                             {"122B-A10B", 3072, 48, 32, 2, 64, 256, 8, 1024, 0},
                             {"397B-A17B", 4096, 60, 32, 2, 64, 512, 10, 1024, 0},
                             {"27B", 5120, 64, 24, 4, 48, 0, 0, 0, 17408}};

}  // namespace

void set_layers(ModelConfig& config, int64_t layers) {
  config.layers = layers;
  config.layer_kinds.clear();
  for (int64_t i = 0; i < layers; ++i) {
    config.layer_kinds.push_back((i + 1) % 4 == 0 ? LayerKind::kAttention : LayerKind::kDeltaNet);
  }
}

ModelConfig shape_config(std::string_view name) {
  for (const Shape& shape : kShapes) {
    if (name != shape.name) continue;
    ModelConfig config;
    config.model_type = shape.experts > 0 ? "qwen3_5_moe_text" : "qwen3_5_text";
    config.hidden = shape.hidden;
    set_layers(config, shape.layers);
    config.vocabulary = 248320;
    config.max_positions = 262144;
    config.heads = shape.heads;
    config.kv_heads = shape.kv_heads;
    config.head_dim = 256;
    config.rotary_dim = 64;
    config.rope_theta = 1e7;
    config.linear_key_heads = 16;
    config.linear_value_heads = shape.value_heads;
    config.linear_key_dim = config.linear_value_dim = 128;
    config.conv_taps = 4;
    config.experts = shape.experts;
    config.top_k = shape.top_k;
    config.moe_intermediate = config.shared_intermediate = shape.width;
    config.intermediate = shape.intermediate;
    config.eos_tokens = {248044};
    return config;
  }
  fail("unknown model shape '{}', known are {}", printable(name), fmt::join(shape_names(), ", "));
}

std::vector<std::string> shape_names() {
  std::vector<std::string> names;
  for (const Shape& shape : kShapes) names.emplace_back(shape.name);
  return names;
}

std::unique_ptr<WeightSource> make_random_weights(const ModelConfig& config, uint64_t seed) {
  return make_random_weights(config, seed, default_format);
}

std::unique_ptr<WeightSource> make_random_weights(const ModelConfig& config, uint64_t seed, FormatOf formats) {
  return std::make_unique<RandomWeights>(config, seed, std::move(formats));
}

ops::Format default_format(WeightKind kind) {
  return quantized_by_default(kind) ? ops::Format::kNvfp4 : ops::Format::kBf16;
}

ops::Format random_format(const FormatOf& formats, const WeightSpec& spec) {
  const ops::Format format = formats(spec.kind);
  return format == ops::Format::kNvfp4 && spec.columns % 16 != 0 ? ops::Format::kBf16 : format;
}

void RandomValues::fill(uint64_t first, std::span<float> out) const {
  FF_ASSERT(first % kChunk == 0);
  for (size_t done = 0; done < out.size(); done += kChunk) {
    const std::span<float> to = out.subspan(done, std::min<size_t>(kChunk, out.size() - done));
    Random random(seed ^ ((first + done) / kChunk + 1) * 0xd6e8feb86659fd93ull);
    switch (kind) {
      case Kind::kBell: {
        const float step = scale / kBellRms;
        thread_local std::vector<uint64_t> sums(kChunk / 2);
        for (size_t i = 0; i < (to.size() + 1) / 2; ++i) sums[i] = byte_sums(random.next());
        std::memcpy(to.data(), sums.data(), to.size_bytes());
        for (float& value : to) {
          value = static_cast<float>(std::bit_cast<int32_t>(value) - kBellMean) * step + offset;
        }
        break;
      }
      case Kind::kUniform:
        for (float& value : to) value = offset + scale * static_cast<float>(random.next() >> 40) * 0x1p-24f;
        break;
      case Kind::kZero:
        std::fill(to.begin(), to.end(), 0.0f);
        break;
    }
  }
}

float RandomValues::largest() const {
  switch (kind) {
    case Kind::kBell:
      return kBellLargest * (scale / kBellRms) + std::fabs(offset);
    case Kind::kUniform:
      return std::max(std::fabs(offset), std::fabs(offset + scale));
    case Kind::kZero:
      break;
  }
  return 0;
}

uint64_t weight_seed(uint64_t seed, std::string_view name) {
  uint64_t hash = 0xcbf29ce484222325ull;  // FNV-1a
  for (char character : name) hash = (hash ^ static_cast<unsigned char>(character)) * 0x100000001b3ull;
  Random random(seed ^ hash);
  random.next();
  return random.next();
}

float weight_rms(const WeightSpec& spec) {
  if (spec.kind == WeightKind::kEmbedding) return 1.0f;
  const float rms = 1.0f / std::sqrt(static_cast<float>(spec.columns));
  return spec.kind == WeightKind::kHead ? 2.0f * rms : rms;  // logits of rms 2: neither flat nor certain
}

RandomValues matrix_values(const WeightSpec& spec, uint64_t seed) {
  return {RandomValues::Kind::kBell, seed, weight_rms(spec), 0};
}

RandomValues vector_values(const WeightSpec& spec, uint64_t seed) {
  RandomValues values{RandomValues::Kind::kBell, seed, 0.1f, 0.0f};  // zero-centred norms: offsets around 0
  const std::string_view name = spec.name;
  const auto uniform = [&](float low, float high) {
    values.kind = RandomValues::Kind::kUniform;
    values.offset = low;
    values.scale = high - low;
  };
  if (name.ends_with(".conv1d")) {
    values.scale = 0.5f;
  } else if (name.ends_with(".A_log")) {
    uniform(0.0f, 2.77f);  // A from 1 to 16
  } else if (name.ends_with(".dt_bias")) {
    uniform(-6.9f, -2.25f);  // softplus: time steps from 0.001 to 0.1
  } else if (name.ends_with("linear_attn.norm")) {
    values.offset = 1.0f;  // the factor itself
  }
  return values;
}

bool quantized_by_default(WeightKind kind) {
  switch (kind) {
    case WeightKind::kAttention:
    case WeightKind::kDeltaNet:
    case WeightKind::kRoutedExpert:
    case WeightKind::kSharedExpert:
    case WeightKind::kMlp:
      return true;
    default:
      return false;
  }
}

}  // namespace fourfold::model
