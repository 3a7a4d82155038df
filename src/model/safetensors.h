// The safetensors file format: reading by memory mapping, and writing as a stream.
//
// A file is   u64 little-endian header length N | N bytes of JSON | data.   The JSON maps tensor names to
// {"dtype", "shape", "data_offsets": [begin, end)} with offsets from the start of the data, and may hold one
// "__metadata__" object of strings. Source: the format description of the safetensors project.
//
// Every file is untrusted. A header is accepted only when the tensors tile the data exactly (no overlap, no hole, no
// rest), each size is its shape times its type without overflow, and no name appears twice. Errors name the file and
// the tensor.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/file.h"

namespace fourfold::model {

// Element types of the format. Types that the loader has no use for are kept apart so that a tensor that is skipped may
// still have them.
enum class StoredType : uint8_t { kF64, kF32, kBf16, kF16, kF8E4M3, kU8, kI8, kI16, kI32, kI64, kBool, kOther };

const char* stored_type_name(StoredType type);

// The sizes of a tensor, a view of those that a header has.
class Dimensions {
 public:
  Dimensions() = default;
  explicit Dimensions(std::span<const int64_t> sizes) : sizes_(sizes) {}

  size_t size() const { return sizes_.size(); }
  bool empty() const { return sizes_.empty(); }
  int64_t operator[](size_t i) const { return sizes_[i]; }
  auto begin() const { return sizes_.begin(); }
  auto end() const { return sizes_.end(); }
  std::vector<int64_t> list() const { return {begin(), end()}; }
  friend bool operator==(const Dimensions& a, std::span<const int64_t> b) { return std::ranges::equal(a.sizes_, b); }

 private:
  std::span<const int64_t> sizes_;
};

// Views are of its header and valid while that lives.
struct StoredTensor {
  std::string_view name;
  StoredType type = StoredType::kOther;
  const char* type_name = "";  // as in the file
  Dimensions shape;
  uint64_t offset = 0;  // of the first byte, from the start of the file
  uint64_t bytes = 0;

  std::string shape_text() const;  // "[2, 3]"
  int64_t elements() const;
};

struct HeaderStorage;  // what tensors' names and sizes are views of

struct SafetensorsHeader {
  std::vector<StoredTensor> tensors;  // in the order of their data
  std::vector<std::pair<std::string, std::string>> metadata;
  uint64_t data_begin = 0;  // offset of the data in the file
  std::shared_ptr<const HeaderStorage> storage;
};

inline constexpr uint64_t kMaxSafetensorsHeader = 100'000'000;  // the limit of the reference implementation

// Parses and checks the header of a file of `file_bytes` bytes that begins with `head` (at least the header).
SafetensorsHeader parse_safetensors_header(std::span<const std::byte> head, uint64_t file_bytes, std::string_view name);

// A mapped file. data() is valid while the object lives.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::filesystem::path& path);
  // The same in steps, so that threads share the headers of several files (model/safetensors_header.h).
  SafetensorsFile(MappedFile file, SafetensorsHeader header) : file_(std::move(file)), header_(std::move(header)) {}

  const std::filesystem::path& path() const { return file_.path(); }
  const std::vector<StoredTensor>& tensors() const { return header_.tensors; }
  const std::vector<std::pair<std::string, std::string>>& metadata() const { return header_.metadata; }
  uint64_t bytes() const { return file_.bytes().size(); }
  std::span<const std::byte> data(const StoredTensor& tensor) const {
    return file_.bytes().subspan(tensor.offset, tensor.bytes);
  }
  bool contains(const void* pointer) const;
  // Reads the pages of a range ahead; drops them (they come back from the file if they are read again). Both round
  // outwards to whole pages.
  void populate(std::span<const std::byte> range) const;
  void release(std::span<const std::byte> range) const;

 private:
  std::span<const std::byte> whole_pages(std::span<const std::byte> range) const;
  MappedFile file_;
  SafetensorsHeader header_;
};

// ---- writing

struct TensorPlan {
  std::string name;
  StoredType type = StoredType::kBf16;
  std::vector<int64_t> shape;

  uint64_t bytes() const;
};

// Writes one file under a temporary name and renames it in finish(); without finish() the temporary file is removed.
// The tensors are known beforehand, their bytes may come in any order and from several threads (each byte once).
class SafetensorsWriter {
 public:
  // Tensors of wide types are laid out first, so that each is aligned to its elements.
  SafetensorsWriter(std::filesystem::path path, std::vector<TensorPlan> tensors,
                    const std::vector<std::pair<std::string, std::string>>& metadata);
  ~SafetensorsWriter();
  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;

  const std::vector<TensorPlan>& tensors() const { return tensors_; }
  uint64_t data_bytes() const { return data_bytes_; }

  // `tensor` is the index in the order that the constructor was given.
  void write(size_t tensor, std::span<const std::byte> data, uint64_t offset = 0);
  // Syncs and renames. An Error when bytes of a tensor are missing.
  void finish();

 private:
  std::filesystem::path path_, temporary_;
  int fd_ = -1;
  std::vector<TensorPlan> tensors_;
  std::vector<uint64_t> offsets_;
  std::unique_ptr<std::atomic<uint64_t>[]> written_;
  uint64_t data_bytes_ = 0;
};

// A small file of fp32 tensors in one call.
struct NamedTensor {
  std::string name;
  std::vector<int64_t> shape;
  std::span<const float> values;
};
void write_safetensors_f32(const std::filesystem::path& path, std::span<const NamedTensor> tensors);

// Cuts a list of tensors into consecutive shards: at most `shard_bytes` each (a larger tensor gets its own), and no
// more than needed. Returns the index one past the end of each shard.
std::vector<size_t> cut_shards(std::span<const TensorPlan> tensors, uint64_t shard_bytes);

// Cuts into `count` shards of about the same size, fewer when there are not enough tensors.
std::vector<size_t> cut_evenly(std::span<const TensorPlan> tensors, int64_t count);

// "model.safetensors" for a single shard, otherwise "model-00001-of-00003.safetensors" (index from 0).
std::string shard_name(size_t index, size_t count);

// Writes model.safetensors.index.json.
void write_shard_index(const std::filesystem::path& directory, std::span<const TensorPlan> tensors,
                       std::span<const size_t> ends);

}  // namespace fourfold::model
