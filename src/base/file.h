// Files: read-only mappings and whole-file reads with a size limit, and writing so that a reader never sees half a
// file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace fourfold {

// A file that is open for reading, for positions of its own in several threads.
class OpenFile {
 public:
  explicit OpenFile(const std::filesystem::path& path);
  ~OpenFile();
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;

  uint64_t bytes() const { return bytes_; }
  int descriptor() const { return fd_; }
  // An Error where the file ends before, or cannot be read. `last`: its pages may leave the memory that the system
  // keeps files in, because nobody reads them soon.
  void read(uint64_t offset, void* to, uint64_t bytes, bool last = false) const;

 private:
  std::filesystem::path path_;
  int fd_ = -1;
  uint64_t bytes_ = 0;
};

// A read-only memory mapping of a whole regular file. Movable. An empty file maps to an empty span.
// NOTE: a file that is truncated by somebody else while it is mapped raises SIGBUS on access; nothing can prevent that.
class MappedFile {
 public:
  MappedFile() = default;
  explicit MappedFile(const std::filesystem::path& path);
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile();

  std::span<const std::byte> bytes() const { return {data_, size_}; }
  const std::filesystem::path& path() const { return path_; }

  // Tells the system that a range was read for the last time, so that its pages no longer count as resident.
  void release(std::span<const std::byte> range) const;

 private:
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
  std::filesystem::path path_;
};

// Where mapped memory comes from. Reading it from there maps no pages, which for gigabytes is most of the work, and
// goes on when the mapping is gone.
struct FilePlace {
  std::shared_ptr<const OpenFile> file;  // null: the memory is none that a MappedFile has mapped
  uint64_t offset = 0;
};
FilePlace file_place(const void* memory);

// Whether there is a directory, or a regular file, of that name. False also where that cannot be told: a name that is
// too long for the system, a directory that may not be searched.
bool directory_exists(const std::filesystem::path& path);
bool file_exists(const std::filesystem::path& path);

// Whether the name is taken, be it by a link that leads nowhere: for files that may be absent, so that only absence
// counts as such and everything else is an error when the file is opened.
bool name_taken(const std::filesystem::path& path);

// Creates a directory and those above it as needed, or fails. When it goes, so do those that it created and that are
// still empty: a command that fails leaves nothing behind.
class CreatedDirectory {
 public:
  explicit CreatedDirectory(const std::filesystem::path& path);
  ~CreatedDirectory();
  CreatedDirectory(const CreatedDirectory&) = delete;
  CreatedDirectory& operator=(const CreatedDirectory&) = delete;

 private:
  std::vector<std::filesystem::path> created_;  // the deepest first
};

// Held by the one process that writes into a directory; the system gives it back when the process ends, however it
// ends. An Error when somebody else holds it. On file systems that have no locks nobody does.
class DirectoryLock {
 public:
  explicit DirectoryLock(const std::filesystem::path& directory);
  ~DirectoryLock();
  DirectoryLock(const DirectoryLock&) = delete;
  DirectoryLock& operator=(const DirectoryLock&) = delete;

 private:
  int fd_ = -1;
};

// An Error when the file system that holds `directory` has less than `bytes` left, as far as it can be told.
void require_space(const std::filesystem::path& directory, uint64_t bytes);

// All of standard input; an Error when it cannot be read or has more than `limit` bytes, Interrupted after a Ctrl-C.
std::string read_standard_input(uint64_t limit);

// The same of a pipe, terminal or other device that can be opened by name (/dev/stdin, <(command) of a shell).
std::string read_stream(const std::filesystem::path& path, uint64_t limit);

// The whole file as a string; an Error when it is missing, not a regular file, or larger than `limit` bytes.
std::string read_file(const std::filesystem::path& path, uint64_t limit = 256ull << 20);

// The same of a file that may be absent: nothing if there was none when it was opened. One look at the name, so that a
// file which others remove and replace in between is never taken for a damaged one.
std::optional<std::string> read_file_if_any(const std::filesystem::path& path, uint64_t limit = 256ull << 20);

// An Error when there is something at `path` that a file must not take the place of: a device, a pipe, a directory.
void require_replaceable(const std::filesystem::path& path);

// A file that appears under its name when it is whole: it is written under a temporary name in the same directory, and
// removed again where commit() is not reached. An Error at once where it cannot be created.
class AtomicFile {
 public:
  explicit AtomicFile(std::filesystem::path path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(std::string_view content);
  void commit();  // syncs and renames

 private:
  std::filesystem::path path_, temporary_;
  int fd_ = -1;
};

void write_file_atomically(const std::filesystem::path& path, std::string_view content);

}  // namespace fourfold
