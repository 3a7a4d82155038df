#include "model/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <numeric>

#include "base/check.h"
#include "base/file.h"
#include "base/json.h"
#include "base/math.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22  // Linux 5.14; older kernels answer EINVAL, which is harmless
#endif

namespace fourfold::model {
namespace {

struct TypeInfo {
  const char* name;
  StoredType type;
  int bits;
};

constexpr TypeInfo kTypes[] = {{"F64", StoredType::kF64, 64},
                               {"F32", StoredType::kF32, 32},
                               {"BF16", StoredType::kBf16, 16},
                               {"F16", StoredType::kF16, 16},
                               {"F8_E4M3", StoredType::kF8E4M3, 8},
                               {"U8", StoredType::kU8, 8},
                               {"I8", StoredType::kI8, 8},
                               {"I16", StoredType::kI16, 16},
                               {"I32", StoredType::kI32, 32},
                               {"I64", StoredType::kI64, 64},
                               {"BOOL", StoredType::kBool, 8},
                               {"U16", StoredType::kOther, 16},
                               {"U32", StoredType::kOther, 32},
                               {"U64", StoredType::kOther, 64},
                               {"C64", StoredType::kOther, 64},
                               {"F8_E5M2", StoredType::kOther, 8},
                               {"F8_E8M0", StoredType::kOther, 8},
                               {"F4", StoredType::kOther, 4},
                               {"F6_E2M3", StoredType::kOther, 6},
                               {"F6_E3M2", StoredType::kOther, 6},
                               {"F8_E4M3FNUZ", StoredType::kOther, 8},
                               {"F8_E5M2FNUZ", StoredType::kOther, 8}};

const TypeInfo& info(StoredType type) {
  for (const TypeInfo& entry : kTypes) {
    if (entry.type == type) return entry;
  }
  FF_ASSERT(false);
  return kTypes[0];
}

constexpr size_t kMaxRank = 16;

// What an Error calls a tensor; there are too many of them to say it beforehand.
struct Where {
  std::string_view file, name;
  std::string text() const { return fmt::format("{}: tensor '{}'", file, printable(name, 200)); }
};

// The entries of "shape" or "data_offsets".
std::vector<uint64_t> unsigned_list(const Json& value, const Where& where, const char* what, size_t limit) {
  if (!value.is_array()) fail("{}: {} is {}, wanted a list of integers", where.text(), what, json_kind(value));
  if (value.size() > limit)
    fail("{}: {} has {} entries, at most {} are accepted", where.text(), what, value.size(), limit);
  std::vector<uint64_t> numbers;
  for (const Json& entry : value) {
    if (entry.is_number_unsigned()) {
      numbers.push_back(entry.get<uint64_t>());
    } else {
      fail("{}: {} holds {}, wanted integers from 0", where.text(), what, printable(entry.dump(), 40));
    }
    if (numbers.back() > static_cast<uint64_t>(INT64_MAX)) {
      fail("{}: {} holds {}, which is beyond any file", where.text(), what, numbers.back());
    }
  }
  return numbers;
}

StoredTensor parse_entry(std::string name, const Json& entry, uint64_t data_begin, uint64_t data_bytes,
                         std::string_view file) {
  const Where where = {file, name};
  if (name.empty()) fail("{}: a tensor has an empty name", file);
  if (!entry.is_object()) fail("{}: entry is {}, wanted an object", where.text(), json_kind(entry));
  const Json *dtype = nullptr, *shape = nullptr, *offsets = nullptr;
  for (const auto& [key, value] : entry.items()) {
    if (key == "dtype") {
      dtype = &value;
    } else if (key == "shape") {
      shape = &value;
    } else if (key == "data_offsets") {
      offsets = &value;
    } else {
      fail("{}: unknown key '{}', wanted dtype, shape and data_offsets", where.text(), printable(key));
    }
  }
  if (dtype == nullptr) fail("{}: dtype is missing", where.text());
  if (shape == nullptr) fail("{}: shape is missing", where.text());
  if (offsets == nullptr) fail("{}: data_offsets is missing", where.text());

  StoredTensor tensor;
  if (!dtype->is_string()) fail("{}: dtype is {}, wanted a string", where.text(), json_kind(*dtype));
  tensor.type_name = dtype->get<std::string>();
  int bits = 0;
  for (const TypeInfo& type : kTypes) {
    if (tensor.type_name == type.name) {
      tensor.type = type.type;
      bits = type.bits;
    }
  }
  if (bits == 0) fail("{}: unknown dtype '{}'", where.text(), printable(tensor.type_name));

  uint64_t size_bits = static_cast<uint64_t>(bits);
  bool empty = false;
  const std::vector<uint64_t> dimensions = unsigned_list(*shape, where, "shape", kMaxRank);
  for (uint64_t dimension : dimensions) empty = empty || dimension == 0;
  for (uint64_t dimension : dimensions) {
    tensor.shape.push_back(static_cast<int64_t>(dimension));
    if (__builtin_mul_overflow(size_bits, dimension, &size_bits)) {
      if (!empty) fail("{}: shape {} does not fit in 64 bits", where.text(), tensor.shape_text());
      size_bits = 0;
    }
  }
  if (size_bits % 8 != 0)
    fail("{}: shape {} of {} is not a whole number of bytes", where.text(), tensor.shape_text(), tensor.type_name);

  const std::vector<uint64_t> range = unsigned_list(*offsets, where, "data_offsets", 2);
  if (range.size() != 2) fail("{}: data_offsets has {} entries, wanted 2", where.text(), range.size());
  if (range[0] > range[1]) fail("{}: data_offsets [{}, {}] end before they begin", where.text(), range[0], range[1]);
  if (range[1] > data_bytes) {
    fail("{}: data_offsets [{}, {}] reach beyond the data ({} bytes): the file is truncated or the header wrong",
         where.text(), range[0], range[1], data_bytes);
  }
  tensor.bytes = range[1] - range[0];
  tensor.offset = data_begin + range[0];
  if (tensor.bytes != size_bits / 8) {
    fail("{}: data_offsets hold {} bytes, but shape {} of {} needs {}", where.text(), tensor.bytes, tensor.shape_text(),
         tensor.type_name, size_bits / 8);
  }
  tensor.name = std::move(name);
  return tensor;
}

}  // namespace

const char* stored_type_name(StoredType type) { return type == StoredType::kOther ? "other" : info(type).name; }

std::string StoredTensor::shape_text() const { return fmt::format("[{}]", fmt::join(shape, ", ")); }

int64_t StoredTensor::elements() const {
  int64_t count = 1;
  for (int64_t dimension : shape) {
    if (dimension == 0) return 0;  // the others may be anything
  }
  for (int64_t dimension : shape) count *= dimension;
  return count;
}

SafetensorsHeader parse_safetensors_header(std::span<const std::byte> head, uint64_t file_bytes,
                                           std::string_view name) {
  if (file_bytes < 8 || head.size() < 8) {
    fail("{}: {} bytes, wanted a safetensors file (8 bytes of header length first)", name, file_bytes);
  }
  uint64_t length = 0;
  for (int i = 7; i >= 0; --i) length = length << 8 | static_cast<uint64_t>(head[static_cast<size_t>(i)]);
  if (length > kMaxSafetensorsHeader) {
    fail("{}: header length {} (first 8 bytes), at most {} is accepted; is this a safetensors file?", name, length,
         kMaxSafetensorsHeader);
  }
  if (length > file_bytes - 8 || length > head.size() - 8) {
    fail("{}: header length {}, but the file has only {} bytes: it is truncated", name, length, file_bytes);
  }
  const std::string_view text(reinterpret_cast<const char*>(head.data()) + 8, length);
  if (text.empty() || text.front() != '{') fail("{}: the header does not begin with '{{'", name);

  JsonLimits limits;
  limits.max_bytes = kMaxSafetensorsHeader;
  limits.max_depth = 8;
  SafetensorsHeader header;
  header.data_begin = 8 + length;
  const uint64_t data_bytes = file_bytes - header.data_begin;
  parse_json_members(text, fmt::format("{}: header", name), {}, limits, [&](std::string&& key, Json&& value) {
    if (key != "__metadata__") {
      header.tensors.push_back(parse_entry(std::move(key), value, header.data_begin, data_bytes, name));
      return;
    }
    if (!value.is_object()) fail("{}: __metadata__ is {}, wanted an object", name, json_kind(value));
    for (const auto& [entry, content] : value.items()) {
      if (!content.is_string()) {
        fail("{}: __metadata__ '{}' is {}, wanted a string", name, printable(entry), json_kind(content));
      }
      header.metadata.emplace_back(entry, content.get<std::string>());
    }
  });
  // The data must be tiled exactly. Empty tensors sort before the tensor that starts at the same byte.
  std::sort(header.tensors.begin(), header.tensors.end(), [](const StoredTensor& a, const StoredTensor& b) {
    return a.offset != b.offset ? a.offset < b.offset : a.bytes != b.bytes ? a.bytes < b.bytes : a.name < b.name;
  });
  uint64_t position = header.data_begin;
  const StoredTensor* previous = nullptr;
  for (const StoredTensor& tensor : header.tensors) {
    if (tensor.offset < position) {
      fail("{}: tensor '{}' overlaps tensor '{}'", name, printable(tensor.name, 200), printable(previous->name, 200));
    }
    if (tensor.offset > position) {
      fail("{}: {} bytes before tensor '{}' belong to no tensor", name, tensor.offset - position,
           printable(tensor.name, 200));
    }
    position = tensor.offset + tensor.bytes;
    previous = &tensor;
  }
  if (position != file_bytes) {
    fail("{}: {} bytes at the end of the file belong to no tensor", name, file_bytes - position);
  }
  return header;
}

// ---- SafetensorsFile

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path) : file_(path) {
  header_ = parse_safetensors_header(file_.bytes(), file_.bytes().size(), path.string());
  release(file_.bytes().first(header_.data_begin));
}

bool SafetensorsFile::contains(const void* pointer) const {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  const auto begin = reinterpret_cast<uintptr_t>(file_.bytes().data());
  return address >= begin && address < begin + file_.bytes().size();
}

std::span<const std::byte> SafetensorsFile::whole_pages(std::span<const std::byte> range) const {
  const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<uintptr_t>(range.data()) / page * page;  // a mapping begins on a page
  const auto end = (reinterpret_cast<uintptr_t>(range.data()) + range.size() + page - 1) / page * page;
  return {reinterpret_cast<const std::byte*>(begin), end - begin};
}

void SafetensorsFile::populate(std::span<const std::byte> range) const {
  if (range.size() < 65536) return;
  const std::span<const std::byte> pages = whole_pages(range);
  ::madvise(const_cast<std::byte*>(pages.data()), pages.size(), MADV_POPULATE_READ);
}

void SafetensorsFile::release(std::span<const std::byte> range) const {
  if (!range.empty()) file_.release(whole_pages(range));
}

// ---- SafetensorsWriter

uint64_t TensorPlan::bytes() const {
  uint64_t bits = static_cast<uint64_t>(info(type).bits);
  for (int64_t dimension : shape) bits = checked_mul(bits, static_cast<uint64_t>(dimension), name.c_str());
  return bits / 8;
}

SafetensorsWriter::SafetensorsWriter(std::filesystem::path path, std::vector<TensorPlan> tensors,
                                     const std::vector<std::pair<std::string, std::string>>& metadata)
    : path_(std::move(path)), tensors_(std::move(tensors)), offsets_(tensors_.size()) {
  written_ = std::make_unique<std::atomic<uint64_t>[]>(tensors_.size());
  std::vector<size_t> order(tensors_.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return info(tensors_[a].type).bits > info(tensors_[b].type).bits; });

  // Written by hand: a tree of a few hundred thousand objects would cost more than the text.
  std::string header = "{";
  if (!metadata.empty()) {
    header += "\"__metadata__\":{";
    for (const auto& [key, value] : metadata) {
      if (header.back() != '{') header += ',';
      header += Json(key).dump() + ":" + Json(value).dump();
    }
    header += "},";
  }
  for (size_t index : order) {
    const TensorPlan& tensor = tensors_[index];
    const uint64_t bytes = tensor.bytes();
    offsets_[index] = data_bytes_;
    header += fmt::format("{}:{{\"dtype\":\"{}\",\"shape\":[{}],\"data_offsets\":[{},{}]}},", Json(tensor.name).dump(),
                          info(tensor.type).name, fmt::join(tensor.shape, ","), data_bytes_, data_bytes_ + bytes);
    data_bytes_ = checked_add(data_bytes_, bytes, "size of a safetensors file");
  }
  if (header.back() == ',') header.pop_back();
  header += '}';
  header.append((8 - header.size() % 8) % 8, ' ');  // the data begins aligned to 8 bytes
  if (header.size() > kMaxSafetensorsHeader) {
    fail("{}: a header of {} bytes for {} tensors, at most {} is readable; use more shards", path_.string(),
         header.size(), tensors_.size(), kMaxSafetensorsHeader);
  }
  std::string start(8, '\0');
  for (size_t i = 0; i < 8; ++i) start[i] = static_cast<char>(header.size() >> (8 * i) & 0xff);
  start += header;
  for (uint64_t& offset : offsets_) offset += start.size();

  require_replaceable(path_);
  temporary_ = path_.string() + fmt::format(".tmp.{}", ::getpid());
  fd_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd_ < 0) fail("cannot create {}: {}", temporary_.string(), std::strerror(errno));
  size_t done = 0;
  while (done < start.size()) {
    const ssize_t count = ::pwrite(fd_, start.data() + done, start.size() - done, static_cast<off_t>(done));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) {
      const int error = errno;
      ::close(fd_);
      ::unlink(temporary_.c_str());
      fail("cannot write {}: {}", temporary_.string(), std::strerror(error));
    }
    done += static_cast<size_t>(count);
  }
}

SafetensorsWriter::~SafetensorsWriter() {
  if (fd_ < 0) return;
  ::close(fd_);
  ::unlink(temporary_.c_str());
}

void SafetensorsWriter::write(size_t tensor, std::span<const std::byte> data, uint64_t offset) {
  FF_ASSERT(tensor < tensors_.size());
  FF_ASSERT(offset + data.size() <= tensors_[tensor].bytes());
  size_t done = 0;
  while (done < data.size()) {
    const ssize_t count =
        ::pwrite(fd_, data.data() + done, data.size() - done, static_cast<off_t>(offsets_[tensor] + offset + done));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail("cannot write {}: {}", temporary_.string(), std::strerror(errno));
    done += static_cast<size_t>(count);
  }
  written_[tensor].fetch_add(data.size(), std::memory_order_relaxed);
}

void SafetensorsWriter::finish() {
  for (size_t i = 0; i < tensors_.size(); ++i) FF_ASSERT(written_[i].load() == tensors_[i].bytes());
  if (::fsync(fd_) != 0) fail("cannot write {}: {}", temporary_.string(), std::strerror(errno));
  ::close(fd_);
  fd_ = -1;
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) {
    const int error = errno;
    ::unlink(temporary_.c_str());
    fail("cannot write {}: {}", path_.string(), std::strerror(error));
  }
}

void write_safetensors_f32(const std::filesystem::path& path, std::span<const NamedTensor> tensors) {
  std::vector<TensorPlan> plans;
  for (const NamedTensor& tensor : tensors) {
    plans.push_back({tensor.name, StoredType::kF32, tensor.shape});
    FF_ASSERT(plans.back().bytes() == tensor.values.size_bytes());
  }
  SafetensorsWriter writer(path, std::move(plans), {});
  for (size_t i = 0; i < tensors.size(); ++i) writer.write(i, std::as_bytes(tensors[i].values));
  writer.finish();
}

std::vector<size_t> cut_shards(std::span<const TensorPlan> tensors, uint64_t shard_bytes) {
  std::vector<size_t> ends;
  uint64_t bytes = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const uint64_t size = tensors[i].bytes();
    if (bytes > 0 && bytes + size > shard_bytes) {
      ends.push_back(i);
      bytes = 0;
    }
    bytes += size;
  }
  ends.push_back(tensors.size());
  return ends;
}

std::vector<size_t> cut_evenly(std::span<const TensorPlan> tensors, int64_t count) {
  double total = 0, sum = 0;
  for (const TensorPlan& tensor : tensors) total += static_cast<double>(tensor.bytes());
  std::vector<size_t> ends;
  for (size_t i = 0; i < tensors.size(); ++i) {
    sum += static_cast<double>(tensors[i].bytes());
    const bool last = static_cast<int64_t>(ends.size()) + 1 >= count;
    if (!last && sum >= total * static_cast<double>(ends.size() + 1) / static_cast<double>(count))
      ends.push_back(i + 1);
  }
  if (ends.empty() || ends.back() != tensors.size()) ends.push_back(tensors.size());
  return ends;
}

std::string shard_name(size_t index, size_t count) {
  if (count == 1) return "model.safetensors";
  return fmt::format("model-{:05}-of-{:05}.safetensors", index + 1, count);
}

void write_shard_index(const std::filesystem::path& directory, std::span<const TensorPlan> tensors,
                       std::span<const size_t> ends) {
  uint64_t total = 0;
  for (const TensorPlan& tensor : tensors) total += tensor.bytes();
  std::string text = fmt::format("{{\n  \"metadata\": {{\"total_size\": {}}},\n  \"weight_map\": {{", total);
  size_t index = 0;
  for (size_t shard = 0; shard < ends.size(); ++shard) {
    const std::string file = shard_name(shard, ends.size());
    for (; index < ends[shard]; ++index) {
      text += fmt::format("{}\n    {}: \"{}\"", index == 0 ? "" : ",", Json(tensors[index].name).dump(), file);
    }
  }
  text += "\n  }\n}\n";
  write_file_atomically(directory / "model.safetensors.index.json", text);
}

}  // namespace fourfold::model
