#include "model/checkpoint.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <optional>
#include <system_error>
#include <unordered_map>
#include <utility>

#include "base/check.h"
#include "base/file.h"
#include "base/json.h"
#include "base/threads.h"
#include "model/inventory.h"
#include "model/safetensors_header.h"
#include "nvfp4/number.h"

namespace fourfold::model {
namespace {

namespace fs = std::filesystem;

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
  if (leader_ != NameTable::kNone) prefix_ = stored(items_[leader_]).name.substr(0, items_[leader_].prefix);
  mtp_declared_ = config_.mtp_layers > 0;
  // The tensors decide: published files declare the head and leave it out, or keep it in a shard of its own.
  const bool present = std::any_of(items_.begin(), items_.end(), [](const Item& item) {
    return item.mtp && item.named && item.kind == NameKind::kWeight;
  });
  if (mtp_declared_ && !present) notes_.push_back("config.json declares an MTP head, but no mtp.* tensor exists");
  config_.mtp_layers = present ? 1 : 0;
}

void Checkpoint::problem(std::string text) {
  if (problems_ == nullptr) throw Error(text);
  problems_->push_back(std::move(text));
}

// Oddities of an index.
void Checkpoint::note_index(const std::string& chosen, const ShardIndex& index,
                            const std::vector<std::string>& present) {
  for (const std::string& name : present) {
    if (std::binary_search(index.files.begin(), index.files.end(), name)) continue;
    notes_.push_back(fmt::format("{} is not listed in {} and is not read", name, chosen));
  }
  if (!index.total_size) return;
  uint64_t bytes = 0;
  for (const std::string& name : index.files) {
    std::error_code error;
    const uintmax_t size = fs::file_size(directory_ / name, error);
    if (!error) bytes += size;
  }
  // The files hold headers too.
  if (*index.total_size > static_cast<double>(bytes) || *index.total_size < 0.9 * static_cast<double>(bytes) - 1e7) {
    notes_.push_back(fmt::format("{}: total_size is {}, the files have {} bytes", chosen, *index.total_size, bytes));
  }
}

void Checkpoint::read_shards() {
  const std::vector<std::string> present = files_ending(directory_, ".safetensors");
  const std::vector<std::string> indexes = files_ending(directory_, ".safetensors.index.json");
  if (indexes.empty() && present.empty()) fail("{}: no *.safetensors file", directory_.string());
  // The headers of a large checkpoint are tens of megabytes of JSON, as is its index: all threads share their pieces,
  // those of files that the index turns out not to list for nothing.
  struct Opened {
    MappedFile mapped;
    std::optional<HeaderText> text;
    std::optional<SafetensorsFile> file;
    std::string error;
  };
  // What is wrong with a file is told where it is that file's turn.
  const auto caught = [](std::string& error, const auto& work) {
    try {
      work();
    } catch (const Error& failure) {
      error = failure.what();
    }
  };
  std::map<std::string, Opened, std::less<>> opened;
  for (const std::string& name : present) {
    if (file_exists(directory_ / name)) opened[name];
  }
  std::vector<std::pair<const std::string, Opened>*> waiting;
  for (auto& entry : opened) waiting.push_back(&entry);
  const auto usual = std::find(indexes.begin(), indexes.end(), "model.safetensors.index.json");
  const std::string chosen = indexes.empty() ? "" : usual != indexes.end() ? *usual : indexes.front();
  std::optional<IndexText> index_text;
  std::optional<ShardIndex> index;
  std::string index_error;
  const auto count = static_cast<int64_t>(waiting.size());
  const int64_t most_threads = ThreadPool::default_threads();
  auto pool = std::make_unique<ThreadPool>(static_cast<int>(std::min(count + 1, most_threads)));
  pool->parallel_for(count + 1, 1, [&](int64_t i, int64_t) {
    if (i > 0) {
      auto& [name, one] = *waiting[static_cast<size_t>(i - 1)];
      caught(one.error, [&, &name = name, &one = one] {
        one.mapped = MappedFile(directory_ / name);
        one.text = header_of(one.mapped);
      });
    } else if (!chosen.empty()) {
      const fs::path path = directory_ / chosen;
      caught(index_error, [&] { index_text.emplace(read_file(path, JsonLimits().max_bytes), path.string()); });
    }
  });
  std::vector<std::pair<HeaderText*, size_t>> pieces;  // of the index: without a header
  for (size_t i = 0; index_text && i < index_text->pieces(); ++i) pieces.emplace_back(nullptr, i);
  for (auto* entry : waiting) {
    std::optional<HeaderText>& text = entry->second.text;
    for (size_t i = 0; text && i < text->pieces(); ++i) pieces.emplace_back(&*text, i);
  }
  // As many threads as there is work for: small checkpoints have one piece.
  const int64_t wanted = std::min(static_cast<int64_t>(pieces.size()), most_threads);
  if (wanted > pool->size()) pool = std::make_unique<ThreadPool>(static_cast<int>(wanted));
  pool->parallel_for(static_cast<int64_t>(pieces.size()), 1, [&](int64_t i, int64_t) {
    const auto [header, piece] = pieces[static_cast<size_t>(i)];
    header != nullptr ? header->parse(piece) : index_text->parse(piece);
  });
  pool->parallel_for(count + 1, 1, [&](int64_t i, int64_t) {
    if (i > 0) {
      Opened& one = waiting[static_cast<size_t>(i - 1)]->second;
      if (one.text) {
        caught(one.error, [&] { one.file.emplace(std::move(one.mapped), one.text->finish()); });
      }
      one.text.reset();
    } else if (index_text) {
      caught(index_error, [&] { index = index_text->finish(); });
    }
  });
  if (!index_error.empty()) throw Error(index_error);
  if (index) note_index(chosen, *index, present);
  const std::vector<std::string>& names = index ? index->files : present;
  for (const std::string& name : names) {
    Opened& one = opened[name];
    if (one.file || !one.error.empty()) continue;
    caught(one.error, [&] { one.file.emplace(directory_ / name); });  // which says what is wrong with it
  }
  std::vector<std::optional<uint32_t>> shard_of(names.size());
  bool whole = true;
  for (size_t i = 0; i < names.size(); ++i) {
    Opened& one = opened[names[i]];
    if (!one.file) {
      whole = false;
      continue;
    }
    shard_of[i] = static_cast<uint32_t>(shards_.size());
    shards_.push_back(std::move(*one.file));
  }
  take_names(*pool);
  // Most often nothing is wrong; if something is, everything is gone through again, to say what comes first.
  if (whole && add_tensors() && (!index || agrees(*index, *pool))) return;
  forget_tensors();
  std::unordered_map<std::string_view, uint32_t> file_of;
  if (index && index->plain) index = index_text->by_json();
  if (index) {
    for (const ShardIndex::Entry& entry : index->entries.front()) file_of.emplace(entry.tensor, entry.file);
  }
  size_t matched = 0;
  for (uint32_t at = 0; at < names.size(); ++at) {
    if (!shard_of[at]) {
      problem(std::move(opened[names[at]].error));
      continue;
    }
    const SafetensorsFile& shard = shards_[*shard_of[at]];
    for (uint32_t i = 0; i < shard.tensors().size(); ++i) {
      const std::string_view tensor = shard.tensors()[i].name;
      if (index) {
        const auto listed = file_of.find(tensor);
        if (listed == file_of.end()) {
          problem(fmt::format("{}: tensor '{}' is not in the index", shard.path().string(), printable(tensor, 200)));
        } else if (listed->second == at) {
          ++matched;
        }  // otherwise the file that the index names lacks it or has it too; both are found below
      }
      const uint32_t number = first_[*shard_of[at]] + i;
      const uint32_t other = add_tensor(number);
      if (other == NameTable::kNone) continue;
      const Item& first = items_[other];
      problem(fmt::format("{}: tensor '{}' is the same weight as '{}' in {}", shard.path().string(),
                          printable(tensor, 200), printable(stored(first).name, 200),
                          shards_[first.shard].path().filename().string()));
    }
  }
  if (matched == file_of.size() || shards_.size() != names.size()) return;
  std::vector<std::string> missing;
  for (const auto& [tensor, file] : file_of) {
    const auto& tensors = shards_[file].tensors();
    const bool there = std::any_of(tensors.begin(), tensors.end(),
                                   [&tensor = tensor](const StoredTensor& entry) { return entry.name == tensor; });
    if (there) continue;
    missing.push_back(fmt::format("{}: tensor '{}' is missing, the index lists it there",
                                  (directory_ / names[file]).string(), printable(tensor, 200)));
    if (missing.size() == 8) break;  // a broken index has no end of them, and each search is linear
  }
  std::sort(missing.begin(), missing.end());
  for (std::string& text : missing) problem(std::move(text));
}

// What the names of all tensors mean; nothing else is looked at, so that threads share it.
void Checkpoint::take_names(ThreadPool& pool) {
  uint64_t count = 0;
  for (const SafetensorsFile& shard : shards_) {
    first_.push_back(static_cast<uint32_t>(count));
    count += shard.tensors().size();
  }
  if (count >= NameTable::kNone) fail("{}: {} tensors are too many", directory_.string(), count);
  items_.resize(count);
  constexpr size_t kGrain = 4096;
  std::vector<std::pair<uint32_t, uint32_t>> parts;  // shard, first tensor
  for (uint32_t shard = 0; shard < shards_.size(); ++shard) {
    for (size_t at = 0; at < shards_[shard].tensors().size(); at += kGrain) {
      parts.emplace_back(shard, static_cast<uint32_t>(at));
    }
  }
  pool.parallel_for(static_cast<int64_t>(parts.size()), 1, [&](int64_t part, int64_t) {
    const auto [shard, begin] = parts[static_cast<size_t>(part)];
    const std::vector<StoredTensor>& tensors = shards_[shard].tensors();
    const size_t end = std::min(tensors.size(), begin + kGrain);
    for (size_t i = begin; i < end; ++i) {
      const InternalName name = internal_name(tensors[i].name);
      const SplitName split = split_name(name.name);
      Item& item = items_[first_[shard] + i];
      item.shard = shard;
      item.tensor = static_cast<uint32_t>(i);
      item.hash = NameTable::hash_of(split.module);
      item.prefix = static_cast<uint8_t>(name.prefix.size());
      item.kind = name.kind;
      item.parameter = split.parameter;
      item.mtp = name.name.starts_with("mtp.");
      item.leads = name.name.starts_with("layers.") || name.name.starts_with("embed_tokens.");
    }
  });
}

// All of them; false where two have one name.
bool Checkpoint::add_tensors() {
  names_.reserve(items_.size() / 3);
  for (uint32_t i = 0; i < items_.size(); ++i) {
    if (add_tensor(i) != NameTable::kNone) return false;
  }
  return true;
}

void Checkpoint::forget_tensors() {
  names_ = {};
  visual_ = {};
  kv_scales_.clear();
  ignored_.clear();
  leader_ = NameTable::kNone;
  for (Item& item : items_) item.named = false;
}

// kNone, or the tensor that is the same weight already.
uint32_t Checkpoint::add_tensor(uint32_t number) {
  Item& item = items_[number];
  const StoredTensor& entry = stored(item);
  const std::string_view name = entry.name.substr(item.prefix);
  const size_t behind = item.parameter == Parameter::kItself ? 0 : 1 + parameter_name(item.parameter).size();
  // Those that are skipped are here, too, for agrees(); two of them may have one name.
  const uint32_t other = names_.add({name.substr(0, name.size() - behind), item.parameter}, item.hash, number);
  item.named = other == NameTable::kNone;
  switch (item.kind) {
    case NameKind::kVisual:
      ++visual_.tensors;
      visual_.bytes += entry.bytes;
      return NameTable::kNone;
    case NameKind::kKvScale:
      kv_scales_.emplace_back(entry.name);
      return NameTable::kNone;
    case NameKind::kIgnored:
      ignored_.emplace_back(entry.name);
      return NameTable::kNone;
    case NameKind::kWeight:
      break;
  }
  if (item.named && item.leads) leader_ = number;
  return other;
}

// Whether the index lists every tensor that there is, once and where it is, and no other one.
bool Checkpoint::agrees(const ShardIndex& index, ThreadPool& pool) {
  size_t listed = 0;
  for (const auto& part : index.entries) listed += part.size();
  if (listed != items_.size()) return false;
  std::vector<uint8_t> seen(items_.size());
  std::atomic<bool> agree{true};
  // The entries of a part stand one behind the other in memory and tensors of a module in the text.
  pool.parallel_for(static_cast<int64_t>(index.entries.size()), 1, [&](int64_t part, int64_t) {
    for (const ShardIndex::Entry& entry : index.entries[static_cast<size_t>(part)]) {
      const InternalName name = internal_name(entry.tensor);
      const SplitName split = split_name(name.name);
      const NameTable::Module* const module = names_.find(split.module);
      const uint32_t number = module == nullptr ? NameTable::kNone : module->at(split.parameter);
      if (number == NameTable::kNone || items_[number].shard != entry.file ||
          stored(items_[number]).name != entry.tensor ||
          std::atomic_ref(seen[number]).exchange(1, std::memory_order_relaxed) != 0) {
        agree.store(false, std::memory_order_relaxed);
        return;
      }
    }
  });
  return agree;
}

Checkpoint::Item* Checkpoint::find(std::string_view name) {
  const SplitName split = split_name(name);
  return item(names_.find(split.module), split.parameter);
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
  const NameTable::Module* const module = names_.find(name);
  Item* item = this->item(module, Parameter::kWeight);
  if (item == nullptr) item = find(name);
  if (item == nullptr) {
    const bool bare = plain.ends_with(".A_log") || plain.ends_with(".dt_bias");
    fail("{}: {} is missing, wanted {} elements", directory_.string(), describe(bare ? plain : plain + ".weight"),
         count);
  }
  const StoredTensor& entry = stored(*item);
  item->used = true;  // it has its place, whatever may be wrong with it

  // [count], or for the taps of the depthwise convolution [channels, 1, taps].
  std::vector<int64_t> shape = entry.shape.list();
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
  const bool used = std::any_of(items_.begin(), items_.end(), [](const Item& item) { return item.used && item.mtp; });
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
  for (const Item& item : items_) {
    if (item.used || !item.named || item.kind != NameKind::kWeight) continue;
    const std::string_view name = stored(item).name;
    if (config_.tied_head && name.substr(item.prefix).starts_with("lm_head.")) continue;
    extra.emplace_back(name);
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
