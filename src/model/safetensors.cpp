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
#include "model/safetensors_header.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22  // Linux 5.14; older kernels answer EINVAL, which is harmless
#endif

namespace fourfold::model {
namespace {

const StoredTypeInfo& info(StoredType type) {
  for (const StoredTypeInfo& entry : stored_types()) {
    if (entry.type == type) return entry;
  }
  FF_ASSERT(false);
  return stored_types()[0];
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
  const std::string_view all(reinterpret_cast<const char*>(head.data()), head.size());
  const HeaderPlace place = header_place(all.substr(0, 8), file_bytes, head.size(), name);
  HeaderText text(std::string(all.substr(8, place.length)), place, std::string(name));
  for (size_t i = 0; i < text.pieces(); ++i) text.parse(i);
  return text.finish();
}

// ---- SafetensorsFile

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path) : file_(path) {
  HeaderText text = header_of(file_);
  for (size_t i = 0; i < text.pieces(); ++i) text.parse(i);
  header_ = text.finish();
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
