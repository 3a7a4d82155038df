#include "model/quantizer.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <set>
#include <unordered_map>
#include <unordered_set>

#include "base/check.h"
#include "base/checksum.h"
#include "base/file.h"
#include "base/interrupt.h"
#include "base/json.h"
#include "base/progress.h"
#include "base/random.h"
#include "base/threads.h"
#include "model/checkpoint.h"
#include "model/output_directory.h"
#include "model/quant_config.h"
#include "model/random_weights.h"
#include "model/safetensors.h"

namespace fourfold::model {
namespace {

namespace fs = std::filesystem;

constexpr const char* kJournal = ".fourfold-quantize.json";
constexpr int64_t kRowsAtOnce = 32;

// A tensor of the output.
struct Output {
  enum class Kind : uint8_t { kCopy, kCodes, kScales, kGlobal, kInput };
  Kind kind = Kind::kCopy;
  TensorPlan plan;
  const SafetensorsFile* file = nullptr;  // kCopy
  const StoredTensor* stored = nullptr;
};

// What is written together: one copied tensor, or the modules that share a tensor scale.
struct Unit {
  std::vector<const WeightSpec*> modules;  // empty: a copy
  bool already = false;                    // NVFP4 in the input
  std::vector<Output> outputs;             // codes, scales, global[, input] for each module
  uint64_t bytes = 0;                      // of the output
  uint64_t input_bytes = 0;
};

// Dtypes that TensorPlan can name; a tensor of another type is copied as bytes would be, which is not possible.
bool copyable(const StoredTensor& tensor) { return tensor.type != StoredType::kOther; }

std::string group_key(const WeightSpec& spec) {
  const std::string& name = spec.name;
  const size_t dot = name.rfind('.');
  const std::string parent = dot == std::string::npos ? "" : name.substr(0, dot + 1);
  const std::string leaf = dot == std::string::npos ? name : name.substr(dot + 1);
  if (leaf == "gate_proj" || leaf == "up_proj") return parent + "gate_up";
  if (leaf == "q_proj" || leaf == "k_proj" || leaf == "v_proj") return parent + "qkv";
  if (leaf == "in_proj_qkv" || leaf == "in_proj_z") return parent + "qkvz";
  return name;
}

// A regular expression of --exclude, looked for anywhere in a name.
class NamePattern {
 public:
  explicit NamePattern(const std::string& pattern) : pattern_(pattern) {
    int error = 0;
    size_t at = 0;
    code_.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(), 0, &error, &at, nullptr));
    if (code_ == nullptr) {
      fail("--exclude '{}' is not a regular expression: {} at byte {}", printable(pattern), message(error), at);
    }
  }

  const std::string& text() const { return pattern_; }

  bool matches(const std::string& name) const {
    const std::unique_ptr<pcre2_match_data, Free> match(pcre2_match_data_create_from_pattern(code_.get(), nullptr));
    if (match == nullptr) fail("--exclude: out of memory for a pattern");
    const int found =
        pcre2_match(code_.get(), reinterpret_cast<PCRE2_SPTR>(name.data()), name.size(), 0, 0, match.get(), nullptr);
    if (found < 0 && found != PCRE2_ERROR_NOMATCH) {
      fail("--exclude '{}' cannot be matched with '{}': {}", printable(pattern_), printable(name), message(found));
    }
    return found >= 0;
  }

 private:
  static std::string message(int error) {
    unsigned char text[256] = "unknown error";
    pcre2_get_error_message(error, text, sizeof text);
    return reinterpret_cast<const char*>(text);
  }

  struct Free {
    void operator()(pcre2_code* code) const { pcre2_code_free(code); }
    void operator()(pcre2_match_data* match) const { pcre2_match_data_free(match); }
  };
  std::string pattern_;
  std::unique_ptr<pcre2_code, Free> code_;
};

class Selection {
 public:
  explicit Selection(const QuantizeOptions& options) {
    std::string list = options.what;
    for (size_t begin = 0; begin <= list.size();) {
      const size_t end = std::min(list.find(',', begin), list.size());
      add(list.substr(begin, end - begin));
      begin = end + 1;
    }
    for (const std::string& pattern : options.exclude) {
      exclude_.push_back({NamePattern(pattern)});
    }
  }

  bool wants(const WeightSpec& spec) {
    if (spec.is_vector || kinds_.count(spec.kind) == 0 || (spec.mtp && !mtp_)) return false;
    bool wanted = true;
    for (Exclusion& exclusion : exclude_) {
      if (!exclusion.pattern.matches(spec.name)) continue;
      exclusion.matched = true;
      wanted = false;
    }
    return wanted;
  }

  // Patterns of --exclude that have left no module out.
  std::vector<std::string> unmatched() const {
    std::vector<std::string> patterns;
    for (const Exclusion& exclusion : exclude_) {
      if (!exclusion.matched) patterns.push_back(exclusion.pattern.text());
    }
    return patterns;
  }

 private:
  void add(const std::string& word) {
    if (word == "all") {
      kinds_.insert({WeightKind::kRoutedExpert, WeightKind::kSharedExpert, WeightKind::kMlp, WeightKind::kAttention,
                     WeightKind::kDeltaNet});
    } else if (word == "experts") {
      kinds_.insert({WeightKind::kRoutedExpert, WeightKind::kMlp});
    } else if (word == "shared") {
      kinds_.insert(WeightKind::kSharedExpert);
    } else if (word == "mlp") {
      kinds_.insert(WeightKind::kMlp);
    } else if (word == "attention") {
      kinds_.insert(WeightKind::kAttention);
    } else if (word == "deltanet") {
      kinds_.insert(WeightKind::kDeltaNet);
    } else if (word == "head") {
      kinds_.insert(WeightKind::kHead);
    } else if (word == "mtp") {
      mtp_ = true;
    } else {
      fail("--what holds '{}', known are all, experts, shared, mlp, attention, deltanet, head and mtp",
           printable(word));
    }
  }

  std::set<WeightKind> kinds_;
  bool mtp_ = false;
  struct Exclusion {
    NamePattern pattern;
    bool matched = false;
  };
  std::vector<Exclusion> exclude_;
};

class Quantizer {
 public:
  Quantizer(const fs::path& input, const fs::path& output, const QuantizeOptions& options)
      : options_(options), selection_(options), threads_(options.threads) {
    checkpoint_ = std::make_unique<Checkpoint>(input);
    std::error_code error;
    if (fs::equivalent(input, output, error)) {
      fail("{} is both the input and the output; wanted another directory", output.string());
    }
    directory_.emplace(output, kJournal, "quantisation");
    specs_ = weight_specs(checkpoint_->config());
    prefix_ = checkpoint_->prefix();
  }

  QuantizeResult run() {
    plan();
    cut();
    read_journal();
    uint64_t missing = 0;
    for (size_t shard = 0; shard < shards_.size(); ++shard) {
      if (shards_[shard]) continue;
      for (const Unit& unit : units_of(shard)) missing += unit.bytes;
    }
    require_space(output(), missing);
    write_journal();
    try {
      write_shards();
    } catch (const Error&) {
      // Without a finished file there is nothing to go on with.
      if (std::none_of(shards_.begin(), shards_.end(), [](const auto& shard) { return shard.has_value(); })) {
        std::error_code error;
        fs::remove(directory_->journal(), error);
      }
      throw;
    }
    finish();
    std::stable_sort(errors_.begin(), errors_.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    for (auto& [shard, error] : errors_) result_.errors.push_back(std::move(error));
    return std::move(result_);
  }

 private:
  // What the journal has of a file that is whole.
  struct Finished {
    uint64_t bytes = 0, checksum = 0;
    bool operator==(const Finished&) const = default;
  };

  const fs::path& output() const { return directory_->path(); }

  std::span<const Unit> units_of(size_t shard) const {
    const size_t begin = shard == 0 ? 0 : ends_[shard - 1];
    return std::span(units_).subspan(begin, ends_[shard] - begin);
  }

  void write_shards() {
    Progress progress("quantising", result_.input_bytes, "B", options_.progress);
    for (size_t shard = 0; shard < shards_.size(); ++shard) {
      if (shards_[shard]) {
        for (const Unit& unit : units_of(shard)) progress.advance(unit.input_bytes);
        continue;
      }
      write_shard(shard, units_of(shard), progress);
      shards_[shard] = measure(output() / shard_name(shard, ends_.size()));
      write_journal();
    }
    progress.finish();
  }

  std::string stored_name(const WeightSpec& spec) const {
    return (spec.mtp || spec.name == "lm_head"
                ? (prefix_.starts_with("language_model.") && !spec.mtp ? std::string("language_model.") : std::string())
                : prefix_) +
           spec.name;
  }

  void plan() {
    std::unordered_map<std::string, size_t> groups;  // group key to its place in `chosen`
    std::vector<Unit> chosen;
    std::unordered_map<const StoredTensor*, std::vector<size_t>> groups_of;
    std::unordered_map<const StoredTensor*, int> kept;  // tensors that modules which are not chosen need
    for (const WeightSpec& spec : specs_) {
      if (spec.is_vector) {
        checkpoint_->vector(spec.name, spec.rows);
        continue;
      }
      const Checkpoint::Stored stored = checkpoint_->stored_matrix(spec.name, spec.rows, spec.columns);
      const bool already = stored.format == ops::Format::kNvfp4;
      bool wanted = already || selection_.wants(spec);
      if (wanted && spec.columns % nvfp4::kBlock != 0) {
        ragged_[{spec.kind, spec.columns}].push_back(spec.name);
        wanted = false;
      }
      if (!wanted) {
        for (const StoredTensor* tensor : stored.tensors) ++kept[tensor];
        note_unquantized(spec, stored.format);
        continue;
      }
      const auto [place, added] = groups.try_emplace(already ? spec.name : group_key(spec), chosen.size());
      if (added) chosen.emplace_back();
      Unit& unit = chosen[place->second];
      if (!unit.modules.empty() && unit.already != already)
        fail("{} and {} are stored in different formats", spec.name, unit.modules.front()->name);
      unit.already = already;
      unit.modules.push_back(&spec);
      for (const StoredTensor* tensor : stored.tensors) {
        std::vector<size_t>& list = groups_of[tensor];
        if (list.empty() || list.back() != place->second) list.push_back(place->second);
        if (!stored.shared) unit.input_bytes += tensor->bytes;
      }
      if (stored.shared) unit.input_bytes += static_cast<uint64_t>(spec.elements()) * 2;
      add_outputs(unit, spec, already && stored.input_scale);
      note_quantized(spec);
    }

    checkpoint_->finish();  // a tensor that no loader would take is no better in the output
    for (const auto& [kind, names] : ragged_) {
      result_.notes.push_back(fmt::format(
          "{} of the kind '{}' stay{} as {}: {} columns are not a multiple of 16 ({}{})",
          names.size() == 1 ? "1 matrix" : fmt::format("{} matrices", names.size()), weight_kind_name(kind.first),
          names.size() == 1 ? "s" : "", names.size() == 1 ? "it is" : "they are", kind.second, names.front(),
          names.size() == 1 ? "" : ", ..."));
    }
    for (const std::string& pattern : selection_.unmatched()) {
      result_.notes.push_back(fmt::format("--exclude '{}' matches none of the modules that --what {} chooses",
                                          printable(pattern), options_.what));
    }

    // In the order of the input files, so that reading is sequential.
    std::vector<bool> placed(chosen.size(), false);
    for (const SafetensorsFile& file : checkpoint_->shards()) {
      for (const StoredTensor& tensor : file.tensors()) {
        const auto found = groups_of.find(&tensor);
        if (found == groups_of.end()) {
          add_copy(file, tensor);
          continue;
        }
        if (kept.count(&tensor) != 0) {
          fail(
              "{} holds modules that are to be quantised and others that are not (--exclude): all experts of a layer "
              "or none",
              printable(tensor.name, 200));
        }
        for (size_t group : found->second) {
          if (placed[group]) continue;
          placed[group] = true;
          units_.push_back(std::move(chosen[group]));
        }
      }
    }
    for (const Unit& unit : units_) {
      result_.input_bytes += unit.input_bytes;
      result_.output_bytes += unit.bytes;
      (unit.modules.empty() ? result_.copied
       : unit.already       ? result_.converted
                      : result_.quantized) += unit.modules.empty() ? 1 : static_cast<int64_t>(unit.modules.size());
    }
    if (result_.quantized == 0 && result_.converted == 0) {
      fail("--what {} chooses no matrix of this checkpoint", options_.what);
    }
  }

  void add_copy(const SafetensorsFile& file, const StoredTensor& tensor) {
    if (!copyable(tensor)) {
      fail("{}: tensor {} has dtype {}, which cannot be copied", file.path().string(), printable(tensor.name, 200),
           tensor.type_name);
    }
    Unit unit;
    unit.outputs.push_back(
        {Output::Kind::kCopy, {std::string(tensor.name), tensor.type, tensor.shape.list()}, &file, &tensor});
    unit.bytes = unit.input_bytes = tensor.bytes;
    units_.push_back(std::move(unit));
  }

  void add_outputs(Unit& unit, const WeightSpec& spec, bool input_scale) {
    const bool modelopt = options_.form == ExportForm::kModelopt;
    const std::string name = stored_name(spec);
    const std::vector<int64_t> scalar = modelopt ? std::vector<int64_t>{} : std::vector<int64_t>{1};
    const auto add = [&](Output::Kind kind, const char* suffix, StoredType type, std::vector<int64_t> shape) {
      unit.outputs.push_back({kind, {name + suffix, type, std::move(shape)}, nullptr, nullptr});
      unit.bytes += unit.outputs.back().plan.bytes();
    };
    add(Output::Kind::kCodes, modelopt ? ".weight" : ".weight_packed", StoredType::kU8, {spec.rows, spec.columns / 2});
    add(Output::Kind::kScales, ".weight_scale", StoredType::kF8E4M3, {spec.rows, spec.columns / nvfp4::kBlock});
    add(Output::Kind::kGlobal, modelopt ? ".weight_scale_2" : ".weight_global_scale", StoredType::kF32, scalar);
    if (input_scale) {
      add(Output::Kind::kInput, modelopt ? ".input_scale" : ".input_global_scale", StoredType::kF32, scalar);
      activations_ = true;
    }
  }

  // The lists of the configuration files name the expert container once.
  std::string listed_name(const WeightSpec& spec) const {
    std::string name = stored_name(spec);
    if (spec.kind == WeightKind::kRoutedExpert) name.resize(name.find(".experts.") + 8);
    return name;
  }
  void note_unquantized(const WeightSpec& spec, ops::Format format) {
    std::string name = listed_name(spec);
    if (format == ops::Format::kFp8) {
      if (layers_seen_.insert(name).second) layers_.emplace_back(std::move(name), "FP8");
      fp8_ = true;
    } else if (spec.kind != WeightKind::kEmbedding && ignored_seen_.insert(name).second) {
      ignored_.push_back(std::move(name));
    }
  }
  void note_quantized(const WeightSpec& spec) {
    std::string name = listed_name(spec);
    if (layers_seen_.insert(name).second) layers_.emplace_back(std::move(name), "");
  }

  void cut() {
    uint64_t bytes = 0;
    for (size_t i = 0; i < units_.size(); ++i) {
      if (bytes > 0 && bytes + units_[i].bytes > options_.shard_bytes) {
        ends_.push_back(i);
        bytes = 0;
      }
      bytes += units_[i].bytes;
    }
    ends_.push_back(units_.size());
    result_.shards = static_cast<int64_t>(ends_.size());
  }

  // ---- the journal of an unfinished run

  std::string fingerprint() const {
    std::string text = fmt::format("form {} what {} search {} shard {}", static_cast<int>(options_.form), options_.what,
                                   static_cast<int>(options_.search), options_.shard_bytes);
    for (const std::string& pattern : options_.exclude) text += " exclude " + pattern;
    for (const SafetensorsFile& file : checkpoint_->shards()) {
      std::error_code error;
      const auto time = fs::last_write_time(file.path(), error).time_since_epoch().count();
      text += fmt::format(" {} {} {}", file.path().filename().string(), file.bytes(), time);
    }
    for (const Unit& unit : units_) {
      for (const Output& output : unit.outputs) text += output.plan.name;
    }
    return fmt::format("{:016x}", weight_seed(0, text));
  }

  // A shard of an earlier run is believed when its size and checksum are those that the journal has of it.
  void read_journal() {
    shards_.resize(ends_.size());
    if (!directory_->unfinished()) return;
    const fs::path path = directory_->journal();
    try {
      const Json journal = parse_json_file(path);
      if (!journal.is_object() || !journal.contains("fingerprint")) {
        fail("{} is no journal of this program; remove it or choose another directory", path.string());
      }
      continue_from(journal);
    } catch (const Json::exception&) {
      fail("{} is no journal of this program; remove it or choose another directory", path.string());
    }
  }

  void continue_from(const Json& journal) {
    const Json files = journal.value("files", Json::array());
    if (journal.at("fingerprint").get<std::string>() != fingerprint()) {
      // Without a finished file there is nothing to lose, and the run begins anew.
      const auto finished = std::count_if(files.begin(), files.end(), [](const Json& file) { return !file.is_null(); });
      if (finished == 0) return;
      fail(
          "{} holds {} finished file{} of an unfinished quantisation of another input or with other options; remove it "
          "or choose another directory",
          output().string(), finished, finished == 1 ? "" : "s");
    }
    for (size_t shard = 0; shard < std::min(files.size(), shards_.size()); ++shard) {
      if (files[shard].is_null()) continue;
      const Finished finished{files[shard].at("bytes").get<uint64_t>(), files[shard].at("checksum").get<uint64_t>()};
      const fs::path path = output() / shard_name(shard, ends_.size());
      std::string found = "it is missing";
      if (file_exists(path)) {
        const Finished there = measure(path);
        found = there.bytes != finished.bytes
                    ? fmt::format("it has {} bytes, {} were written", there.bytes, finished.bytes)
                    : "its checksum is not that of what was written";
        if (there == finished) found.clear();
      }
      if (found.empty()) {
        shards_[shard] = finished;
        ++result_.resumed_shards;
      } else {
        result_.notes.push_back(fmt::format("{}: {}; it was made again", path.string(), found));
      }
    }
    for (const Json& entry : journal.value("errors", Json::array())) {
      const auto shard = entry.at(0).get<size_t>();
      if (shard >= shards_.size() || !shards_[shard]) continue;
      record({entry.at(1).get<std::string>(), entry.at(2).get<int64_t>(), entry.at(3).get<double>(),
              entry.at(4).get<double>()},
             shard);
    }
  }

  static Finished measure(const fs::path& path) {
    const MappedFile file(path);
    Finished finished{file.bytes().size(), checksum(file.bytes())};
    file.release(file.bytes());
    return finished;
  }

  void write_journal() {
    Json journal;
    journal["fingerprint"] = fingerprint();
    Json files = Json::array();
    for (const std::optional<Finished>& shard : shards_) {
      files.push_back(shard ? Json{{"bytes", shard->bytes}, {"checksum", shard->checksum}} : Json());
    }
    journal["files"] = files;
    Json errors = Json::array();
    for (const auto& [shard, error] : errors_) {
      errors.push_back({shard, error.module, error.elements, error.squared_error, error.energy});
    }
    journal["errors"] = errors;
    write_file_atomically(directory_->journal(), journal.dump());
  }

  void record(TensorError error, size_t shard) { errors_.emplace_back(shard, std::move(error)); }

  // ---- writing

  void write_shard(size_t shard, std::span<const Unit> units, Progress& progress) {
    std::vector<TensorPlan> plans;
    for (const Unit& unit : units) {
      for (const Output& output : unit.outputs) plans.push_back(output.plan);
    }
    SafetensorsWriter writer(output() / shard_name(shard, ends_.size()), std::move(plans), {{"format", "pt"}});
    size_t first = 0;
    for (const Unit& unit : units) {
      stop_if_interrupted();
      if (unit.modules.empty()) {
        copy(writer, first, unit.outputs.front());
      } else {
        quantize(writer, first, unit, shard);
      }
      first += unit.outputs.size();
      progress.advance(unit.input_bytes);
    }
    writer.finish();
  }

  static void stop_if_interrupted() {
    if (interrupted()) throw Interrupted("interrupted; the same command continues where it stopped");
  }

  void copy(SafetensorsWriter& writer, size_t index, const Output& output) {
    constexpr size_t kPiece = 16 << 20;
    const std::span<const std::byte> data = output.file->data(*output.stored);
    for (size_t begin = 0; begin < data.size(); begin += kPiece) {
      stop_if_interrupted();
      const auto piece = data.subspan(begin, std::min(kPiece, data.size() - begin));
      writer.write(index, piece, begin);
      output.file->release(piece);
    }
  }

  static void write_float(SafetensorsWriter& writer, size_t index, float value) {
    writer.write(index, std::as_bytes(std::span(&value, 1)));
  }

  void quantize(SafetensorsWriter& writer, size_t first, const Unit& unit, size_t shard) {
    const bool modelopt = options_.form == ExportForm::kModelopt;
    std::vector<ops::MatrixSource> sources;
    for (const WeightSpec* spec : unit.modules) {
      sources.push_back(checkpoint_->matrix(spec->name, spec->rows, spec->columns));
    }
    float largest = 0.0f;
    if (!unit.already) {
      for (const ops::MatrixSource& source : sources) largest = std::max(largest, largest_of(source));
    }
    size_t index = first, position = 0;
    for (size_t i = 0; i < sources.size(); ++i) {
      const ops::MatrixSource& source = sources[i];
      const float scale = unit.already ? source.tensor_scale : nvfp4::tensor_scale_for(largest);
      if (unit.already) {
        writer.write(index, std::as_bytes(std::span(static_cast<const uint8_t*>(source.data),
                                                    static_cast<size_t>(source.rows * source.columns / 2))));
        writer.write(index + 1, std::as_bytes(std::span(source.block_scales,
                                                        static_cast<size_t>(source.rows * source.columns / 16))));
      } else {
        record(encode(writer, index, source, scale, unit.modules[i]->name), shard);
      }
      write_float(writer, index + 2, modelopt ? scale : inverse_scale(scale, source));
      index += 3;
      position += 3;
      if (position < unit.outputs.size() && unit.outputs[position].kind == Output::Kind::kInput) {
        const float input = source.input_scale;
        write_float(writer, index, modelopt || input == 0.0f ? input : 1.0f / input);
        ++index;
        ++position;
      }
      checkpoint_->release(source);
    }
  }

  static float inverse_scale(float scale, const ops::MatrixSource& source) {
    const float inverse = 1.0f / scale;
    if (!nvfp4::is_finite(inverse)) {
      fail("{}: the tensor scale {} has no finite inverse, which compressed-tensors stores", source.name, scale);
    }
    return inverse;
  }

  float largest_of(const ops::MatrixSource& source) {
    std::mutex mutex;
    uint32_t largest = 0;  // fp32 bits of magnitudes are ordered like integers
    threads_.parallel_for(source.rows, kRowsAtOnce, [&](int64_t begin, int64_t end) {
      thread_local std::vector<float> row;
      row.resize(static_cast<size_t>(source.columns));
      uint32_t mine = 0;
      for (int64_t r = begin; r < end; ++r) {
        ops::dequantize(source, r, row.data());
        uint32_t bits = 0;
        for (float value : row) bits = std::max(bits, nvfp4::bits_of(value) & 0x7fffffffu);
        if (bits >= 0x7f800000u) {
          fail("{}: row {} holds NaN or infinity, wanted finite numbers", source.name, r);
        }
        mine = std::max(mine, bits);
      }
      const std::lock_guard lock(mutex);
      largest = std::max(largest, mine);
    });
    return nvfp4::float_of(largest);
  }

  TensorError encode(SafetensorsWriter& writer, size_t index, const ops::MatrixSource& source, float scale,
                     const std::string& module) {
    const auto columns = static_cast<size_t>(source.columns);
    struct Sums {
      double error = 0, energy = 0;
    };
    // Summed in the order of the rows, so that the figures do not depend on the threads.
    std::vector<Sums> sums(static_cast<size_t>((source.rows + kRowsAtOnce - 1) / kRowsAtOnce));
    threads_.parallel_for(source.rows, kRowsAtOnce, [&](int64_t begin, int64_t end) {
      if (interrupted()) return;
      thread_local std::vector<float> row;
      thread_local std::vector<uint8_t> codes, scales;
      row.resize(columns);
      const auto rows = static_cast<size_t>(end - begin);
      codes.resize(rows * columns / 2);
      scales.resize(rows * columns / nvfp4::kBlock);
      Sums& sum = sums[static_cast<size_t>(begin / kRowsAtOnce)];
      for (size_t r = 0; r < rows; ++r) {
        ops::dequantize(source, begin + static_cast<int64_t>(r), row.data());
        sum.error +=
            nvfp4::quantize_row(row, scale, options_.search, std::span(codes).subspan(r * columns / 2, columns / 2),
                                std::span(scales).subspan(r * columns / nvfp4::kBlock, columns / nvfp4::kBlock));
        double lanes[4] = {0, 0, 0, 0};
        for (size_t i = 0; i + 4 <= columns; i += 4) {
          for (size_t lane = 0; lane < 4; ++lane) {
            lanes[lane] += static_cast<double>(row[i + lane]) * static_cast<double>(row[i + lane]);
          }
        }
        sum.energy += (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
      }
      const auto first = static_cast<uint64_t>(begin) * columns;
      writer.write(index, std::as_bytes(std::span(codes)), first / 2);
      writer.write(index + 1, std::as_bytes(std::span(scales)), first / nvfp4::kBlock);
    });
    stop_if_interrupted();
    TensorError error{module, source.rows * source.columns, 0, 0};
    for (const Sums& sum : sums) {
      error.squared_error += sum.error;
      error.energy += sum.energy;
    }
    return error;
  }

  // ---- the small files

  void finish() {
    std::vector<TensorPlan> plans;
    std::vector<size_t> ends;
    size_t shard = 0;
    for (size_t i = 0; i < units_.size(); ++i) {
      for (const Output& output : units_[i].outputs) plans.push_back(output.plan);
      if (i + 1 == ends_[shard]) {
        ends.push_back(plans.size());
        ++shard;
      }
    }
    if (ends.size() > 1) write_shard_index(output(), plans, ends);
    copy_small_files();

    const bool modelopt = options_.form == ExportForm::kModelopt;
    QuantDescription description;
    description.quantized_activations = activations_;
    description.ignored = ignored_;
    description.ignored.push_back(modelopt ? "model.visual*" : "re:.*visual.*");
    const std::string algorithm = activations_ ? "NVFP4" : "W4A16_NVFP4";
    description.algorithm = algorithm;
    Json quantization;
    if (modelopt) {
      if (fp8_) {
        description.algorithm = "MIXED_PRECISION";
        for (auto& [module, name] : layers_) {
          if (name.empty()) name = algorithm;
        }
        description.layers = layers_;
      }
      quantization = modelopt_quantization_config(description);
      write_file_atomically(output() / "hf_quant_config.json", modelopt_hf_quant_config(description).dump(2) + "\n");
    } else {
      std::vector<std::string> fp8, nvfp4;
      for (const auto& [module, name] : layers_) (name.empty() ? nvfp4 : fp8).push_back("re:.*" + module + ".*");
      if (fp8.empty()) nvfp4 = {"Linear"};
      quantization = compressed_tensors_config(description, nvfp4, fp8);
    }
    Json config = parse_json_file(checkpoint_->directory() / "config.json");
    if (config.contains("text_config") && config["text_config"].is_object()) {
      config["text_config"].erase("quantization_config");
    }
    config["quantization_config"] = quantization;
    write_file_atomically(output() / "config.json", config.dump(2) + "\n");
    std::error_code error;
    fs::remove(directory_->journal(), error);
  }

  void copy_small_files() {
    for (const fs::directory_entry& entry : fs::directory_iterator(checkpoint_->directory())) {
      const std::string name = entry.path().filename().string();
      const std::string extension = entry.path().extension().string();
      const bool known = extension == ".json" || extension == ".jinja" || extension == ".txt" ||
                         extension == ".model" || name.starts_with("LICENSE") || name.starts_with("NOTICE");
      if (!known || !entry.is_regular_file() || name.front() == '.') continue;
      if (name == "config.json" || name == "hf_quant_config.json" || name.ends_with(".index.json")) continue;
      write_file_atomically(output() / name, read_file(entry.path()));
    }
  }

  const QuantizeOptions& options_;
  std::optional<OutputDirectory> directory_;
  Selection selection_;
  ThreadPool threads_;
  std::unique_ptr<Checkpoint> checkpoint_;
  std::vector<WeightSpec> specs_;
  std::string prefix_;
  std::vector<Unit> units_;
  std::vector<size_t> ends_;  // shards: one past their last unit
  std::vector<std::optional<Finished>> shards_;
  std::vector<std::string> ignored_;
  std::vector<std::pair<std::string, std::string>> layers_;
  std::unordered_set<std::string> ignored_seen_, layers_seen_;
  bool fp8_ = false, activations_ = false;
  QuantizeResult result_;
  std::vector<std::pair<size_t, TensorError>> errors_;                         // with their shard
  std::map<std::pair<WeightKind, int64_t>, std::vector<std::string>> ragged_;  // kind and columns: what has no blocks
};

}  // namespace

double TensorError::relative_rms() const { return energy > 0 ? std::sqrt(squared_error / energy) : 0.0; }

QuantizeResult quantize_checkpoint(const fs::path& input, const fs::path& output, const QuantizeOptions& options) {
  return Quantizer(input, output, options).run();
}

}  // namespace fourfold::model
