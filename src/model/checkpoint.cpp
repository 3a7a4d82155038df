#include "model/checkpoint.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <optional>
#include <system_error>
#include <utility>

#include "base/check.h"
#include "base/file.h"
#include "base/json.h"
#include "base/threads.h"
#include "model/inventory.h"
#include "nvfp4/number.h"

namespace fourfold::model {
namespace {

namespace fs = std::filesystem;

bool plain_shard_name(std::string_view name) {
  return !name.empty() && name.find_first_of("/\\") == std::string_view::npos && name.front() != '.' &&
         name.find('\0') == std::string_view::npos && name.ends_with(".safetensors");
}

std::vector<std::string> files_ending(const fs::path& directory, std::string_view ending) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator it(directory, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (name.ends_with(ending) && name.front() != '.') names.push_back(name);
  }
  if (error) fail("cannot list {}: {}", directory.string(), error.message());
  std::sort(names.begin(), names.end());
  return names;
}

// The number after "layers." or "experts." at `position`, or -1.
int64_t number_after(std::string_view name, std::string_view key) {
  const size_t at = name.find(key);
  if (at == std::string_view::npos) return -1;
  int64_t number = -1;
  for (size_t i = at + key.size(); i < name.size() && name[i] >= '0' && name[i] <= '9' && number < 1'000'000; ++i) {
    number = (number < 0 ? 0 : number) * 10 + (name[i] - '0');
  }
  return number;
}

}  // namespace

InternalName internal_name(std::string_view stored) {
  InternalName result;
  result.name = stored;
  for (std::string_view prefix : {"model.language_model.", "language_model.model.", "language_model.", "model."}) {
    if (stored.starts_with(prefix)) {
      result.prefix = stored.substr(0, prefix.size());
      result.name = stored.substr(prefix.size());
      break;
    }
  }
  const std::string_view name = result.name;
  if (name.starts_with("visual.") || name.starts_with("vision_tower.")) {
    result.kind = NameKind::kVisual;
  } else if (name.ends_with("rotary_emb.inv_freq")) {
    result.kind = NameKind::kIgnored;
  } else if (name.find("self_attn.") != std::string_view::npos &&
             (name.ends_with(".k_scale") || name.ends_with(".v_scale") || name.ends_with(".q_scale"))) {
    result.kind = NameKind::kKvScale;
  }
  return result;
}

Checkpoint::Checkpoint(fs::path directory, std::vector<std::string>* problems)
    : directory_(std::move(directory)), problems_(problems) {
  config_ = read_config(directory_);
  read_shards();
  mtp_declared_ = config_.mtp_layers > 0;
  // The tensors decide: published files declare the head and leave it out, or keep it in a shard of its own.
  const bool present =
      std::any_of(items_.begin(), items_.end(), [](const auto& entry) { return entry.first.starts_with("mtp."); });
  if (mtp_declared_ && !present) notes_.push_back("config.json declares an MTP head, but no mtp.* tensor exists");
  config_.mtp_layers = present ? 1 : 0;
}

void Checkpoint::problem(std::string text) {
  if (problems_ == nullptr) throw Error(text);
  problems_->push_back(std::move(text));
}

// What an index says: which files there are, and in which of them each tensor is.
struct Checkpoint::Index {
  std::vector<std::string> files;  // sorted
  std::unordered_map<std::string, size_t> file_of;
};

Checkpoint::Index Checkpoint::read_index(const std::string& chosen, const std::vector<std::string>& present) {
  const fs::path path = directory_ / chosen;
  Index index;
  std::map<std::string, size_t, std::less<>> numbers;  // in the order of their first tensor
  const JsonLimits limits;
  const Json json = parse_json_members(
      read_file(path, limits.max_bytes), path.string(), "weight_map", limits, [&](std::string&& tensor, Json&& file) {
        if (!file.is_string() || !plain_shard_name(file.get_ref<const std::string&>())) {
          fail("{}: tensor '{}' is in {}, wanted the name of a .safetensors file in the same directory", path.string(),
               printable(tensor, 200), printable(file.dump(-1, ' ', false, Json::error_handler_t::replace), 100));
        }
        const auto& name = file.get_ref<const std::string&>();
        index.file_of.emplace(std::move(tensor), numbers.try_emplace(name, numbers.size()).first->second);
      });
  const auto map = json.is_object() ? json.find("weight_map") : json.end();
  if (!json.is_object() || map == json.end() || !map->is_object()) {
    fail("{}: weight_map is missing, wanted an object from tensor to file name", path.string());
  }
  if (numbers.empty()) fail("{}: weight_map is empty", path.string());
  std::vector<size_t> sorted(numbers.size());
  for (const auto& [name, number] : numbers) {
    sorted[number] = index.files.size();
    index.files.push_back(name);
  }
  for (auto& entry : index.file_of) entry.second = sorted[entry.second];
  for (const std::string& name : present) {
    if (numbers.count(name) == 0) notes_.push_back(fmt::format("{} is not listed in {} and is not read", name, chosen));
  }
  if (const auto metadata = json.find("metadata"); metadata != json.end() && metadata->is_object()) {
    const auto total = metadata->find("total_size");
    if (total != metadata->end() && total->is_number()) {
      uint64_t bytes = 0;
      for (const std::string& name : index.files) {
        std::error_code error;
        const uintmax_t size = fs::file_size(directory_ / name, error);
        if (!error) bytes += size;
      }
      const double declared = total->get<double>();
      // The files hold headers too.
      if (declared > static_cast<double>(bytes) || declared < 0.9 * static_cast<double>(bytes) - 1e7) {
        notes_.push_back(fmt::format("{}: total_size is {}, the files have {} bytes", chosen, declared, bytes));
      }
    }
  }
  return index;
}

void Checkpoint::read_shards() {
  const std::vector<std::string> present = files_ending(directory_, ".safetensors");
  const std::vector<std::string> indexes = files_ending(directory_, ".safetensors.index.json");
  if (indexes.empty() && present.empty()) fail("{}: no *.safetensors file", directory_.string());
  // The headers of a large checkpoint are tens of megabytes of JSON, as is its index: each is read by a thread of its
  // own, those of files that the index turns out not to list for nothing.
  struct Opened {
    std::optional<SafetensorsFile> file;
    std::string error;
  };
  const auto open = [&](const std::string& name) {
    Opened one;
    try {
      one.file.emplace(directory_ / name);
    } catch (const Error& error) {
      one.error = error.what();
    }
    return one;
  };
  Index index;
  index.files = present;
  std::string index_error;
  std::map<std::string, Opened, std::less<>> opened;
  for (const std::string& name : present) {
    if (file_exists(directory_ / name)) opened[name];
  }
  std::vector<std::pair<const std::string, Opened>*> waiting;
  for (auto& entry : opened) waiting.push_back(&entry);
  const auto count = static_cast<int64_t>(waiting.size());
  ThreadPool(static_cast<int>(std::min<int64_t>(count + 1, ThreadPool::default_threads())))
      .parallel_for(count + 1, 1, [&](int64_t begin, int64_t) {
        if (begin > 0) {
          auto& [name, one] = *waiting[static_cast<size_t>(begin - 1)];
          one = open(name);
        } else if (!indexes.empty()) {
          const auto usual = std::find(indexes.begin(), indexes.end(), "model.safetensors.index.json");
          try {
            index = read_index(usual != indexes.end() ? *usual : indexes.front(), present);
          } catch (const Error& error) {
            index_error = error.what();
          }
        }
      });
  if (!index_error.empty()) throw Error(index_error);
  for (const std::string& name : index.files) {
    if (opened.count(name) == 0) opened[name] = open(name);  // which says what is wrong with it
  }
  size_t matched = 0, tensors_in_all = 0;
  for (const std::string& name : index.files) {
    const std::optional<SafetensorsFile>& file = opened[name].file;
    tensors_in_all += file ? file->tensors().size() : 0;
  }
  items_.reserve(tensors_in_all);
  for (size_t at = 0; at < index.files.size(); ++at) {
    Opened& one = opened[index.files[at]];
    if (!one.file) {
      problem(std::move(one.error));
      continue;
    }
    shards_.push_back(std::move(*one.file));
    const auto shard = static_cast<uint32_t>(shards_.size() - 1);
    const std::vector<StoredTensor>& tensors = shards_.back().tensors();
    for (uint32_t i = 0; i < tensors.size(); ++i) {
      if (!index.file_of.empty()) {
        const auto listed = index.file_of.find(tensors[i].name);
        if (listed == index.file_of.end()) {
          problem(fmt::format("{}: tensor '{}' is not in the index", shards_.back().path().string(),
                              printable(tensors[i].name, 200)));
        } else if (listed->second == at) {
          ++matched;
        }  // otherwise the file that the index names lacks it or has it too; both are found below
      }
      add_tensor(shard, i);
    }
  }
  if (matched == index.file_of.size() || shards_.size() != index.files.size()) return;
  std::vector<std::string> missing;
  for (const auto& [tensor, file] : index.file_of) {
    const auto& tensors = shards_[file].tensors();
    const bool there = std::any_of(tensors.begin(), tensors.end(),
                                   [&tensor = tensor](const StoredTensor& entry) { return entry.name == tensor; });
    if (there) continue;
    missing.push_back(fmt::format("{}: tensor '{}' is missing, the index lists it there",
                                  (directory_ / index.files[file]).string(), printable(tensor, 200)));
    if (missing.size() == 8) break;  // a broken index has no end of them, and each search is linear
  }
  std::sort(missing.begin(), missing.end());
  for (std::string& text : missing) problem(std::move(text));
}

void Checkpoint::add_tensor(uint32_t shard, uint32_t tensor) {
  const StoredTensor& entry = shards_[shard].tensors()[tensor];
  const InternalName name = internal_name(entry.name);
  switch (name.kind) {
    case NameKind::kVisual:
      ++visual_.tensors;
      visual_.bytes += entry.bytes;
      return;
    case NameKind::kKvScale:
      kv_scales_.push_back(entry.name);
      return;
    case NameKind::kIgnored:
      ignored_.push_back(entry.name);
      return;
    case NameKind::kWeight:
      break;
  }
  const auto [existing, added] = items_.try_emplace(name.name, Item{shard, tensor, false});
  if (!added) {
    const Item& first = existing->second;
    problem(fmt::format("{}: tensor '{}' is the same weight as '{}' in {}", shards_[shard].path().string(),
                        printable(entry.name, 200), printable(stored(first).name, 200),
                        shards_[first.shard].path().filename().string()));
    return;
  }
  if (name.name.starts_with("layers.") || name.name.starts_with("embed_tokens.")) prefix_ = std::string(name.prefix);
}

Checkpoint::Item* Checkpoint::find(std::string_view name) {
  const auto found = items_.find(name);
  return found == items_.end() ? nullptr : &found->second;
}

std::string Checkpoint::describe(std::string_view internal) const {
  std::string where;
  const bool mtp = internal.starts_with("mtp.");
  if (mtp) {
    where = "MTP head";
  } else if (const int64_t layer = number_after(internal, "layers."); layer >= 0) {
    where = fmt::format("layer {}", layer);
  }
  if (const int64_t expert = number_after(internal, "experts."); expert >= 0) {
    where += fmt::format("{}expert {}", where.empty() ? "" : ", ", expert);
  }
  const bool bare = mtp || internal.starts_with("lm_head");
  return fmt::format("{}{}tensor {}{}", where, where.empty() ? "" : ": ", bare ? "" : prefix_,
                     printable(internal, 200));
}

std::string Checkpoint::describe(const Item& item) const {
  const StoredTensor& entry = stored(item);
  std::string where = describe(internal_name(entry.name).name);
  if (const size_t at = where.rfind("tensor "); at != std::string::npos) where.erase(at);
  return fmt::format("{}: {}tensor {}", shards_[item.shard].path().string(), where, printable(entry.name, 200));
}

std::vector<float> Checkpoint::vector(std::string_view name, int64_t count) {
  const std::string plain(name);
  Item* item = find(plain + ".weight");
  if (item == nullptr) item = find(plain);
  if (item == nullptr) {
    const bool bare = plain.ends_with(".A_log") || plain.ends_with(".dt_bias");
    fail("{}: {} is missing, wanted {} elements", directory_.string(), describe(bare ? plain : plain + ".weight"),
         count);
  }
  const StoredTensor& entry = stored(*item);
  item->used = true;  // it has its place, whatever may be wrong with it

  // [count], or for the taps of the depthwise convolution [channels, 1, taps].
  std::vector<int64_t> shape = entry.shape;
  std::string wanted = fmt::format("[{}]", count);
  if (name.ends_with(".conv1d")) {
    wanted = fmt::format("[{}, 1, {}]", config_.conv_channels(), config_.conv_taps);
    if (shape.size() == 3 && shape[1] == 1) shape.erase(shape.begin() + 1);
    if (shape.size() == 2 && shape[0] == config_.conv_channels() && shape[1] == config_.conv_taps) shape = {count};
  }
  if (shape != std::vector<int64_t>{count}) {
    fail("{}: shape is {}, wanted {}", describe(*item), entry.shape_text(), wanted);
  }
  std::vector<float> values(static_cast<size_t>(count));
  const std::byte* data = bytes(*item).data();
  for (size_t i = 0; i < values.size(); ++i) {
    uint16_t half = 0;
    switch (entry.type) {
      case StoredType::kF32:
        std::memcpy(&values[i], data + 4 * i, 4);
        break;
      case StoredType::kBf16:
        std::memcpy(&half, data + 2 * i, 2);
        values[i] = nvfp4::bf16_to_float(half);
        break;
      case StoredType::kF16:
        std::memcpy(&half, data + 2 * i, 2);
        values[i] = nvfp4::f16_to_float(half);
        break;
      default:
        fail("{}: dtype is {}, wanted BF16, F16 or F32", describe(*item), entry.type_name);
    }
    if (!nvfp4::is_finite(values[i])) {
      fail("{}: element {} is {}, wanted finite numbers", describe(*item), i, values[i]);
    }
  }
  return values;
}

void Checkpoint::release(const ops::MatrixSource& matrix) {
  if (!in_place_) return;  // nothing was mapped
  const auto drop = [&](const void* data, int64_t size) {
    if (data == nullptr || size <= 0) return;
    for (const SafetensorsFile& shard : shards_) {
      if (shard.contains(data)) {
        shard.release({static_cast<const std::byte*>(data), static_cast<size_t>(size)});
        return;
      }
    }
  };
  const int64_t elements = matrix.rows * matrix.columns;
  switch (matrix.format) {
    case ops::Format::kF32:
      drop(matrix.data, elements * 4);
      return;
    case ops::Format::kBf16:
    case ops::Format::kF16:
      drop(matrix.data, elements * 2);
      return;
    case ops::Format::kFp8:
      drop(matrix.data, elements);
      return;
    case ops::Format::kNvfp4:
      drop(matrix.data, elements / 2);
      drop(matrix.block_scales, elements / 16);
      return;
  }
}

// The MTP head of a model that is loaded without it: nothing of it is read but small vectors and scales.
void Checkpoint::check_unused_mtp() {
  const bool used = std::any_of(items_.begin(), items_.end(),
                                [](const auto& entry) { return entry.second.used && entry.first.starts_with("mtp."); });
  if (used || config_.mtp_layers == 0) return;
  const bool populate = std::exchange(populate_, false);
  for (const WeightSpec& spec : weight_specs(config_)) {
    if (!spec.mtp) continue;
    if (spec.is_vector) {
      vector(spec.name, spec.rows);
    } else {
      release(matrix(spec.name, spec.rows, spec.columns));
    }
  }
  populate_ = populate;
}

void Checkpoint::finish() {
  check_unused_mtp();
  std::vector<std::string> extra;
  for (const auto& [name, item] : items_) {
    if (item.used) continue;
    if (config_.tied_head && name.starts_with("lm_head.")) continue;
    extra.push_back(stored(item).name);
  }
  if (extra.empty()) return;
  std::sort(extra.begin(), extra.end());
  const size_t shown = std::min<size_t>(extra.size(), 5);
  std::string list;
  for (size_t i = 0; i < shown; ++i) list += fmt::format("{}{}", i == 0 ? "" : ", ", printable(extra[i], 200));
  fail("{}: {} tensor{} that the model has no place for: {}{}", directory_.string(), extra.size(),
       extra.size() == 1 ? "" : "s", list, extra.size() > shown ? ", ..." : "");
}

std::vector<std::string> Checkpoint::notes() const {
  std::vector<std::string> notes = notes_;
  if (dead_ > 0) notes.push_back(fmt::format("{} matrices are all zero and have an unusable tensor scale", dead_));
  if (bad_input_scales_ > 0) {
    notes.push_back(
        fmt::format("{} activation scales are zero, denormal or not finite and are not used", bad_input_scales_));
  }
  return notes;
}

std::vector<std::string> check_weights(
    WeightSource& source, const std::function<void(const WeightSpec&, const ops::MatrixSource* matrix)>& visit) {
  std::vector<std::string> problems;
  for (const WeightSpec& spec : weight_specs(source.config())) {
    try {
      if (spec.is_vector) {
        source.vector(spec.name, spec.rows);
        if (visit) visit(spec, nullptr);
      } else {
        const ops::MatrixSource matrix = source.matrix(spec.name, spec.rows, spec.columns);
        if (visit) visit(spec, &matrix);
        source.release(matrix);
      }
    } catch (const Error& error) {
      problems.emplace_back(error.what());
    }
  }
  try {
    source.finish();
  } catch (const Error& error) {
    problems.emplace_back(error.what());
  }
  return problems;
}

}  // namespace fourfold::model
