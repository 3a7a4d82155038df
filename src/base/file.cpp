#include "base/file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include "base/check.h"
#include "base/interrupt.h"

namespace fourfold {
namespace {

class Descriptor {
 public:
  Descriptor(const std::filesystem::path& path, int flags, int mode = 0)
      : fd_(::open(path.c_str(), flags | O_CLOEXEC, mode)) {
    if (fd_ < 0) fail("cannot open {}: {}", path.string(), std::strerror(errno));
  }
  explicit Descriptor(int fd) : fd_(fd) {}  // which may be none: below 0
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

uint64_t regular_file_size(int fd, const std::filesystem::path& path) {
  struct stat info {};
  if (::fstat(fd, &info) != 0) fail("cannot stat {}: {}", path.string(), std::strerror(errno));
  if (!S_ISREG(info.st_mode)) fail("{} is not a regular file", path.string());
  return static_cast<uint64_t>(info.st_size);
}

std::string read_to_end(int fd, const std::string& name, uint64_t limit) {
  std::string content;
  std::array<char, 65536> buffer{};
  for (;;) {
    if (!wait_for_input(fd)) throw Interrupted();
    const ssize_t count = ::read(fd, buffer.data(), buffer.size());
    if (count == 0) return content;
    if (count < 0) {
      if (errno != EINTR) fail("cannot read {}: {}", name, std::strerror(errno));
      continue;
    }
    content.append(buffer.data(), static_cast<size_t>(count));
    if (content.size() > limit) fail("{} has more than {} bytes, which is all that is accepted", name, limit);
  }
}

// Mappings of MappedFile by their first byte.
struct Mappings {
  struct Mapping {
    size_t bytes;
    std::shared_ptr<const OpenFile> file;
  };
  std::mutex mutex;
  std::map<uintptr_t, Mapping> all;
};
Mappings& mappings() {
  static Mappings instance;
  return instance;
}

}  // namespace

// Non-blocking, so that a FIFO in the place of a file is an error and not a hang.
OpenFile::OpenFile(const std::filesystem::path& path)
    : path_(path), fd_(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC)) {
  if (fd_ < 0) fail("cannot open {}: {}", path.string(), std::strerror(errno));
  try {
    bytes_ = regular_file_size(fd_, path);
  } catch (...) {
    ::close(fd_);
    throw;
  }
}

OpenFile::~OpenFile() { ::close(fd_); }

void OpenFile::read(uint64_t offset, void* to, uint64_t bytes, bool last) const {
  uint64_t done = 0;
  while (done < bytes) {
    const ssize_t count = ::pread(fd_, static_cast<char*>(to) + done, bytes - done, static_cast<off_t>(offset + done));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail("cannot read {}: {}", path_.string(), std::strerror(errno));
    if (count == 0) {  // what was asked for may begin behind the end
      fail("{}: it ends at byte {}, wanted {} bytes from {} on", path_.string(),
           std::min(regular_file_size(fd_, path_), offset + done), bytes, offset);
    }
    done += static_cast<uint64_t>(count);
  }
  if (last) ::posix_fadvise(fd_, static_cast<off_t>(offset), static_cast<off_t>(bytes), POSIX_FADV_DONTNEED);
}

FilePlace file_place(const void* memory) {
  const auto address = reinterpret_cast<uintptr_t>(memory);
  const std::lock_guard lock(mappings().mutex);
  auto it = mappings().all.upper_bound(address);
  if (it == mappings().all.begin()) return {};
  --it;
  const uint64_t offset = address - it->first;
  if (offset >= it->second.bytes) return {};
  return {it->second.file, offset};
}

MappedFile::MappedFile(const std::filesystem::path& path) : path_(path) {
  auto file = std::make_shared<const OpenFile>(path);
  size_ = file->bytes();
  if (size_ == 0) return;
  void* address = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file->descriptor(), 0);
  if (address == MAP_FAILED) fail("cannot map {} ({} bytes): {}", path.string(), size_, std::strerror(errno));
  data_ = static_cast<const std::byte*>(address);
  const std::lock_guard lock(mappings().mutex);
  mappings().all[reinterpret_cast<uintptr_t>(address)] = {size_, std::move(file)};
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)), path_(std::move(other.path_)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(path_, other.path_);
  return *this;
}

MappedFile::~MappedFile() {
  if (data_ == nullptr) return;
  {
    const std::lock_guard lock(mappings().mutex);
    mappings().all.erase(reinterpret_cast<uintptr_t>(data_));
  }
  ::munmap(const_cast<std::byte*>(data_), size_);
}

void MappedFile::release(std::span<const std::byte> range) const {
  if (data_ == nullptr || range.empty()) return;
  const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  // Only pages that lie wholly inside the range: its neighbours may still be needed.
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(range.data()) + page - 1) / page * page;
  const uintptr_t end = reinterpret_cast<uintptr_t>(range.data() + range.size()) / page * page;
  if (begin < end) ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
}

bool directory_exists(const std::filesystem::path& path) {
  std::error_code error;
  return std::filesystem::is_directory(path, error);
}

bool file_exists(const std::filesystem::path& path) {
  std::error_code error;
  return std::filesystem::is_regular_file(path, error);
}

bool name_taken(const std::filesystem::path& path) {
  std::error_code error;
  return std::filesystem::symlink_status(path, error).type() != std::filesystem::file_type::not_found;
}

CreatedDirectory::CreatedDirectory(const std::filesystem::path& path) {
  // Without the empty name behind a slash at the end.
  std::filesystem::path missing = path.has_filename() ? path : path.parent_path();
  for (; !missing.empty() && !name_taken(missing); missing = missing.parent_path()) created_.push_back(missing);
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error) fail("cannot create the directory '{}': {}", path.string(), error.message());
}

CreatedDirectory::~CreatedDirectory() {
  for (const std::filesystem::path& directory : created_) {
    if (::rmdir(directory.c_str()) != 0) return;
  }
}

DirectoryLock::DirectoryLock(const std::filesystem::path& directory)
    : fd_(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) {
  if (fd_ < 0) fail("cannot open {}: {}", directory.string(), std::strerror(errno));
  if (::flock(fd_, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) return;
  ::close(fd_);
  fail("another process is writing into {}; wanted a directory of its own for each", directory.string());
}

DirectoryLock::~DirectoryLock() { ::close(fd_); }

void require_space(const std::filesystem::path& directory, uint64_t bytes) {
  std::error_code error;
  const std::filesystem::space_info space = std::filesystem::space(directory, error);
  if (!error && space.available < bytes) {
    fail("{}: {:.3f} GB are free there, {:.3f} GB are wanted", directory.string(),
         static_cast<double>(space.available) * 1e-9, static_cast<double>(bytes) * 1e-9);
  }
}

std::string read_standard_input(uint64_t limit) { return read_to_end(STDIN_FILENO, "standard input", limit); }

std::string read_stream(const std::filesystem::path& path, uint64_t limit) {
  const Descriptor fd(path, O_RDONLY);
  return read_to_end(fd.get(), path.string(), limit);
}

namespace {
std::string read_regular_file(int fd, const std::filesystem::path& path, uint64_t limit) {
  const uint64_t size = regular_file_size(fd, path);
  if (size > limit) fail("{} has {} bytes, at most {} are accepted", path.string(), size, limit);
  std::string content(size, '\0');
  uint64_t done = 0;
  while (done < size) {
    const ssize_t count = ::read(fd, content.data() + done, size - done);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail("cannot read {}: {}", path.string(), std::strerror(errno));
    if (count == 0) break;
    done += static_cast<uint64_t>(count);
  }
  content.resize(done);
  return content;
}
}  // namespace

std::string read_file(const std::filesystem::path& path, uint64_t limit) {
  const Descriptor fd(path, O_RDONLY | O_NONBLOCK);
  return read_regular_file(fd.get(), path, limit);
}

std::optional<std::string> read_file_if_any(const std::filesystem::path& path, uint64_t limit) {
  const Descriptor fd(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  if (fd.get() < 0 && errno == ENOENT) return std::nullopt;
  if (fd.get() < 0) fail("cannot open {}: {}", path.string(), std::strerror(errno));
  return read_regular_file(fd.get(), path, limit);
}

void require_replaceable(const std::filesystem::path& path) {
  std::error_code error;
  const std::filesystem::file_status status = std::filesystem::status(path, error);
  if (std::filesystem::exists(status) && !std::filesystem::is_regular_file(status)) {
    fail("cannot write {}: it is no regular file", path.string());
  }
}

AtomicFile::AtomicFile(std::filesystem::path path) : path_(std::move(path)) {
  require_replaceable(path_);
  temporary_ = path_.string() + fmt::format(".tmp.{}", ::getpid());
  fd_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd_ < 0) fail("cannot create {}: {}", path_.string(), std::strerror(errno));
}

AtomicFile::~AtomicFile() {
  if (fd_ < 0) return;
  ::close(fd_);
  ::unlink(temporary_.c_str());
}

void AtomicFile::write(std::string_view content) {
  while (!content.empty()) {
    const ssize_t count = ::write(fd_, content.data(), content.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail("cannot write {}: {}", temporary_.string(), std::strerror(errno));
    content.remove_prefix(static_cast<size_t>(count));
  }
}

void AtomicFile::commit() {
  if (::fsync(fd_) != 0) fail("cannot write {}: {}", temporary_.string(), std::strerror(errno));
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) {
    fail("cannot write {}: {}", path_.string(), std::strerror(errno));
  }
  ::close(std::exchange(fd_, -1));
}

void write_file_atomically(const std::filesystem::path& path, std::string_view content) {
  AtomicFile file(path);
  file.write(content);
  file.commit();
}

}  // namespace fourfold
