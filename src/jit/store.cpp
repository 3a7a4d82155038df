#include "jit/store.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "base/console.h"
#include "base/env.h"
#include "base/file.h"
#include "base/json.h"
#include "jit/sha256.h"

namespace fourfold::jit {
namespace fs = std::filesystem;
namespace {

constexpr std::string_view kEntryMagic = "FFKERNEL", kPackMagic = "FFKPACK\x01";
constexpr uint32_t kEntryVersion = 2;
constexpr std::string_view kSuffix = ".kernel", kTemporary = ".tmp-";
constexpr size_t kEntryHeader = 8 + 4 + 32 + 8 + 8 + 32;
constexpr uint64_t kMaxMeta = 1 << 20, kMaxPack = 4ull << 30, kMaxPackEntries = 1 << 16;
constexpr auto kStaleTemporary = std::chrono::hours(1);

template <typename T>
void put(std::string* out, T value) {
  for (size_t i = 0; i < sizeof(T); ++i) *out += static_cast<char>(static_cast<uint64_t>(value) >> (8 * i));
}
template <typename T>
T take(std::string_view bytes, size_t at) {
  uint64_t value = 0;
  for (size_t i = 0; i < sizeof(T); ++i) value |= static_cast<uint64_t>(static_cast<uint8_t>(bytes[at + i])) << (8 * i);
  return static_cast<T>(value);
}
std::string_view view(const Digest& digest) { return {reinterpret_cast<const char*>(digest.data()), digest.size()}; }

bool is_key(std::string_view text) {
  return text.size() == 64 && text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

std::string key_bytes(const Key& key) {
  FF_ASSERT(is_key(key));
  std::string bytes;
  for (size_t i = 0; i < 64; i += 2) bytes += static_cast<char>(std::stoi(key.substr(i, 2), nullptr, 16));
  return bytes;
}

std::string error_text(int error) { return std::strerror(error); }

}  // namespace

fs::path cache_directory() {
  if (const auto cache = env("XDG_CACHE_HOME")) return fs::path(*cache) / "fourfold";
  if (const auto home = env("HOME")) return fs::path(*home) / ".cache" / "fourfold";
  return {};
}

fs::path default_store_directory() {
  if (const auto store = env("FOURFOLD_KERNELS")) return *store;
  const fs::path cache = cache_directory();
  if (cache.empty()) fail("no place for compiled kernels: wanted --store DIR, FOURFOLD_KERNELS or HOME");
  return cache / "kernels";
}

std::vector<std::string> reachable_headers(const SourceSet& sources) {
  std::map<std::string_view, std::string_view> known;
  for (const auto& [name, text] : sources.headers) known.emplace(name, text);
  std::set<std::string> reached;
  std::vector<std::string_view> work = {sources.text};
  while (!work.empty()) {
    const std::string_view text = work.back();
    work.pop_back();
    // Every quoted name after an #include counts, in comments and inactive branches too: a superset is safe.
    for (size_t at = text.find("#"); at != std::string_view::npos; at = text.find("#", at + 1)) {
      size_t word = text.find_first_not_of(" \t", at + 1);
      if (word == std::string_view::npos || !text.substr(word).starts_with("include")) continue;
      const size_t open = text.find_first_not_of(" \t", word + 7);
      if (open == std::string_view::npos || text[open] != '"') continue;
      const size_t close = text.find('"', open + 1);
      if (close == std::string_view::npos) continue;
      const auto header = known.find(text.substr(open + 1, close - open - 1));
      if (header != known.end() && reached.insert(std::string(header->first)).second) work.push_back(header->second);
    }
  }
  return {reached.begin(), reached.end()};
}

Key key_of(const CompileRequest& request, std::string_view compiler) {
  Sha256 hash;
  hash.update_field("fourfold kernel 2");
  hash.update_field(request.sources.text);
  std::map<std::string_view, std::string_view> texts;
  for (const auto& [name, text] : request.sources.headers) texts.emplace(name, text);
  for (const std::string& name : reachable_headers(request.sources)) {
    hash.update_field(name);
    hash.update_field(texts.at(name));
  }
  hash.update_field("arch");
  hash.update_field(request.arch);
  hash.update_field(compiler);
  for (const std::string& flag : request.flags) hash.update_field(flag);
  hash.update_field("expressions");
  for (const std::string& expression : request.expressions) hash.update_field(expression);
  return to_hex(hash.finish());
}

// ---- one entry
// -------------------------------------------------------------------------------------------------------------

std::string encode(const Key& key, const Entry& entry) {
  Json meta = {{"name", entry.name},
               {"arch", entry.arch},
               {"compiler", entry.compiler},
               {"spill_bytes", entry.spill_bytes},
               {"serialized", entry.serialized},
               {"lowered", Json::object()}};
  for (const auto& [expression, name] : entry.lowered) meta["lowered"][expression] = name;
  const std::string description = meta.dump();
  std::string out(kEntryMagic);
  put<uint32_t>(&out, kEntryVersion);
  out += key_bytes(key);
  put<uint64_t>(&out, description.size());
  put<uint64_t>(&out, entry.cubin.size());
  out += view(sha256(description + entry.cubin));
  out += description;
  out += entry.cubin;
  return out;
}

Entry decode(const Key& key, std::string_view content, std::string_view what) {
  if (content.size() < kEntryHeader) fail("{}: {} bytes, an entry has at least {}", what, content.size(), kEntryHeader);
  if (!content.starts_with(kEntryMagic)) fail("{}: not a kernel entry", what);
  if (const auto version = take<uint32_t>(content, 8); version != kEntryVersion) {
    fail("{}: entry version {}, wanted {}", what, version, kEntryVersion);
  }
  if (content.substr(12, 32) != key_bytes(key)) fail("{}: holds another kernel than its name says", what);
  const auto meta_size = take<uint64_t>(content, 44), cubin_size = take<uint64_t>(content, 52);
  const uint64_t rest = content.size() - kEntryHeader;
  if (meta_size > kMaxMeta || meta_size > rest || cubin_size != rest - meta_size) {
    fail("{}: {} bytes of description and {} of code in {} bytes", what, meta_size, cubin_size, rest);
  }
  const std::string_view body = content.substr(kEntryHeader);
  if (content.substr(60, 32) != view(sha256(body))) fail("{}: content does not match its SHA-256", what);

  const Json meta = parse_json(body.substr(0, meta_size), what, {.max_bytes = kMaxMeta, .max_depth = 8});
  Entry entry;
  const auto text = [&](const Json& object, const char* field) -> std::string {
    if (!object.is_object() || !object.contains(field) || !object[field].is_string()) {
      fail("{}: no text field '{}' in the description", what, field);
    }
    return object[field].get<std::string>();
  };
  entry.name = text(meta, "name");
  entry.arch = text(meta, "arch");
  entry.compiler = text(meta, "compiler");
  if (!meta.contains("spill_bytes") || !meta["spill_bytes"].is_number_integer() || !meta.contains("serialized") ||
      !meta["serialized"].is_boolean() || !meta.contains("lowered") || !meta["lowered"].is_object()) {
    fail("{}: incomplete description", what);
  }
  entry.spill_bytes = meta["spill_bytes"].get<int64_t>();
  entry.serialized = meta["serialized"].get<bool>();
  for (const auto& [expression, name] : meta["lowered"].items()) {
    if (!name.is_string()) fail("{}: a kernel name that is not text", what);
    entry.lowered[expression] = name.get<std::string>();
  }
  entry.cubin = std::string(body.substr(meta_size));
  entry.kernels = read_cubin(entry.cubin, what);
  return entry;
}

// ---- the directory
// -----------------------------------------------------------------------------------------------------------

KernelStore::KernelStore(fs::path directory, uint64_t limit_bytes)
    : directory_(std::move(directory)), limit_(limit_bytes) {
  std::error_code error;
  if (fs::is_directory(directory_, error)) return;
  fs::create_directories(directory_, error);
  if (error) fail("kernel store {}: {}", directory_.string(), error.message());
  fs::permissions(directory_, fs::perms::owner_all, error);
}

fs::path KernelStore::path_of(const Key& key) const {
  FF_ASSERT(is_key(key));
  return directory_ / (key + std::string(kSuffix));
}

std::optional<Entry> KernelStore::load(const Key& key) {
  const fs::path path = path_of(key);
  try {
    const std::optional<std::string> content = read_file_if_any(path, kMaxEntryBytes);
    if (!content) {
      ++counters_.misses;
      return std::nullopt;
    }
    Entry entry = decode(key, *content, path.string());
    // The time of the last use, by which entries are evicted.
    ::utimensat(AT_FDCWD, path.c_str(), nullptr, 0);
    ++counters_.hits;
    use(key);
    return entry;
  } catch (const Error& damage) {
    ++counters_.misses;
    ++counters_.damaged;
    warn(fmt::format("{}; it is compiled again", damage.what()));
    std::error_code error;
    fs::remove(path, error);
    return std::nullopt;
  }
}

void KernelStore::save(const Key& key, const Entry& entry) {
  const std::string content = encode(key, entry);
  if (content.size() > kMaxEntryBytes) {
    fail("kernel {}: {} bytes, the store takes at most {}", entry.name, content.size(), kMaxEntryBytes);
  }
  publish(key, content);
  use(key);
  evict();
}

void KernelStore::use(const Key& key) {
  const std::lock_guard lock(mutex_);
  used_.insert(key);
}

void KernelStore::publish(const Key& key, std::string_view content) {
  static std::atomic<uint64_t> serial{0};
  const fs::path path = path_of(key);
  const fs::path temporary = directory_ / fmt::format("{}{}{}-{}", key, kTemporary, ::getpid(), ++serial);
  const int fd = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  if (fd < 0) fail("kernel store: cannot create {}: {}", temporary.string(), error_text(errno));
  int error = 0;
  for (size_t done = 0; done < content.size() && error == 0;) {
    const ssize_t count = ::write(fd, content.data() + done, content.size() - done);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0)
      error = errno;
    else
      done += static_cast<size_t>(count);
  }
  if (error == 0 && ::fsync(fd) != 0) error = errno;
  if (::close(fd) != 0 && error == 0) error = errno;
  if (error == 0 && ::rename(temporary.c_str(), path.c_str()) != 0) error = errno;
  if (error != 0) {
    ::unlink(temporary.c_str());
    fail("kernel store: cannot write {}: {}", path.string(), error_text(error));
  }
  // The rename itself reaches the disk with the directory.
  if (const int dir = ::open(directory_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); dir >= 0) {
    ::fsync(dir);
    ::close(dir);
  }
}

void KernelStore::evict() {
  struct File {
    fs::path path;
    uint64_t size;
    fs::file_time_type used;
  };
  std::vector<File> files;
  uint64_t total = 0;
  std::error_code error;
  const auto now = fs::file_time_type::clock::now();
  for (fs::directory_iterator it(directory_, error), end; !error && it != end; it.increment(error)) {
    std::error_code gone;
    const std::string name = it->path().filename().string();
    const auto used = it->last_write_time(gone);
    const uint64_t size = gone ? 0 : it->file_size(gone);
    if (gone) continue;
    if (name.find(kTemporary) != std::string::npos) {
      if (now - used > kStaleTemporary) fs::remove(it->path(), gone);  // left by a process that died
    } else if (name.ends_with(kSuffix)) {
      total += size;
      const std::lock_guard lock(mutex_);
      if (!used_.contains(name.substr(0, name.size() - kSuffix.size()))) files.push_back({it->path(), size, used});
    }
  }
  if (total <= limit_) return;
  std::sort(files.begin(), files.end(), [](const File& a, const File& b) { return a.used < b.used; });
  for (const File& file : files) {
    if (total <= limit_) return;
    std::error_code gone;
    if (fs::remove(file.path, gone)) ++counters_.evicted;
    total -= file.size;
  }
}

std::vector<Key> KernelStore::keys() const {
  std::vector<Key> list;
  std::error_code error;
  for (fs::directory_iterator it(directory_, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (name.ends_with(kSuffix) && is_key(name.substr(0, name.size() - kSuffix.size()))) {
      list.push_back(name.substr(0, name.size() - kSuffix.size()));
    }
  }
  std::sort(list.begin(), list.end());
  return list;
}

template <typename Keys>
uint64_t KernelStore::bytes_of(const Keys& keys) const {
  uint64_t total = 0;
  for (const Key& key : keys) {
    std::error_code gone;
    const uint64_t size = fs::file_size(path_of(key), gone);
    if (!gone) total += size;
  }
  return total;
}

uint64_t KernelStore::bytes() const { return bytes_of(keys()); }

uint64_t KernelStore::used_bytes() const {
  const std::lock_guard lock(mutex_);
  return bytes_of(used_);
}

// ---- packs: magic, number of entries, then for each its key, its size and its file; SHA-256 of all that at the end
// ---------------

void KernelStore::write_pack(const fs::path& file, const std::vector<Key>& keys) {
  const std::set<Key> unique(keys.begin(), keys.end());
  std::string out(kPackMagic);
  put<uint64_t>(&out, unique.size());
  for (const Key& key : unique) {
    const std::string content = read_file(path_of(key), kMaxEntryBytes);
    decode(key, content, path_of(key).string());
    out += key_bytes(key);
    put<uint64_t>(&out, content.size());
    out += content;
  }
  out += view(sha256(out));
  write_file_atomically(file, out);
}

size_t KernelStore::import_pack(const fs::path& file) {
  const MappedFile mapping(file);
  const std::string_view bytes(reinterpret_cast<const char*>(mapping.bytes().data()), mapping.bytes().size());
  const std::string what = file.string();
  if (bytes.size() > kMaxPack) fail("{}: {} bytes, a pack has at most {}", what, bytes.size(), kMaxPack);
  if (bytes.size() < 16 + 32 || !bytes.starts_with(kPackMagic)) fail("{}: not a pack of kernels", what);
  const std::string_view body = bytes.substr(0, bytes.size() - 32);
  if (bytes.substr(body.size()) != view(sha256(body))) fail("{}: content does not match its SHA-256", what);
  const auto count = take<uint64_t>(body, 8);
  if (count > kMaxPackEntries) fail("{}: {} entries, a pack has at most {}", what, count, kMaxPackEntries);

  std::vector<std::pair<Key, std::string_view>> entries;
  size_t at = 16;
  for (uint64_t i = 0; i < count; ++i) {
    if (body.size() - at < 40) fail("{}: ends inside entry {} of {}", what, i, count);
    Digest digest;
    std::memcpy(digest.data(), body.data() + at, 32);
    const auto size = take<uint64_t>(body, at + 32);
    at += 40;
    if (size > body.size() - at) fail("{}: ends inside entry {} of {}", what, i, count);
    entries.emplace_back(to_hex(digest), body.substr(at, size));
    decode(entries.back().first, entries.back().second, fmt::format("{} entry {}", what, i));
    at += size;
  }
  if (at != body.size()) fail("{}: {} bytes after the last entry", what, body.size() - at);
  uint64_t total = 0;
  for (const auto& [key, content] : entries) total += content.size();
  if (total > limit_) {
    fail("{}: its {} kernels need {} bytes, the store's limit is {}; nothing was imported", what, entries.size(), total,
         limit_);
  }
  for (const auto& [key, content] : entries) {
    publish(key, content);
    use(key);
  }
  evict();
  return entries.size();
}

}  // namespace fourfold::jit
