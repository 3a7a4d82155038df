// The kernel store: compiled kernels by content. A key is the SHA-256 of everything that decides the machine code
// (sources, architecture, compiler version, flags, kernel names) and of nothing else: no path, no date.
//
//   <directory>/<key>.kernel   one entry; written to a temporary name, synced and renamed, so that readers and other
//                              processes see whole files only, and the last of several equal writers wins harmlessly
//
// An entry is a header (magic, version, key, sizes, SHA-256 of the rest), a JSON description and the cubin; all of it
// is checked at every load. A damaged entry is removed, counted and reported as absent, so that it is compiled anew.
// The directory is bounded: entries that were not used for longest go first. What a KernelStore itself has written or
// read is never removed by it: a limit that is too small for the work at hand loses none of it.
#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "jit/cubin.h"
#include "jit/nvrtc.h"

namespace fourfold::jit {

// $XDG_CACHE_HOME/fourfold or $HOME/.cache/fourfold; empty when neither variable is set.
std::filesystem::path cache_directory();
// FOURFOLD_KERNELS, or cache_directory()/kernels; Error when there is no home either.
std::filesystem::path default_store_directory();

// 64 hexadecimal digits.
using Key = std::string;

// Header names that the main source reaches through #include "...", in order of name.
std::vector<std::string> reachable_headers(const SourceSet& sources);
Key key_of(const CompileRequest& request, std::string_view compiler);

struct Entry {
  std::string name;  // for people
  std::string arch;
  std::string compiler;                        // "nvrtc 13.0"
  std::map<std::string, std::string> lowered;  // C++ name -> mangled name
  int64_t spill_bytes = 0;                     // spill stores and loads, from the compiler's log
  bool serialized = false;                     // ptxas waits for every wgmma before the next (a warning)
  std::string cubin;
  std::vector<KernelUse> kernels;  // read from the cubin, not stored
};

struct StoreCounters {
  std::atomic<int64_t> hits{0}, misses{0}, damaged{0}, evicted{0};
};

inline constexpr uint64_t kDefaultStoreLimit = 2ull << 30;
inline constexpr uint64_t kMaxEntryBytes = 64ull << 20;

class KernelStore {
 public:
  // Creates the directory (only its owner may enter); Error when that is impossible.
  explicit KernelStore(std::filesystem::path directory, uint64_t limit_bytes = kDefaultStoreLimit);

  // Thread-safe, also against other processes.
  std::optional<Entry> load(const Key& key);
  void save(const Key& key, const Entry& entry);

  // One file with the given entries, for another machine. Error when one is missing.
  void write_pack(const std::filesystem::path& file, const std::vector<Key>& keys);
  // Takes over every entry of a pack; the number of entries. Error, before anything is stored, when the pack is
  // damaged or larger than the limit.
  size_t import_pack(const std::filesystem::path& file);

  const std::filesystem::path& directory() const { return directory_; }
  const StoreCounters& counters() const { return counters_; }
  std::vector<Key> keys() const;
  uint64_t bytes() const;
  // Bytes on disk of what this object has written or read.
  uint64_t used_bytes() const;
  uint64_t limit() const { return limit_; }

 private:
  std::filesystem::path path_of(const Key& key) const;
  template <typename Keys>
  uint64_t bytes_of(const Keys& keys) const;
  void publish(const Key& key, std::string_view content);
  void evict();
  void use(const Key& key);

  std::filesystem::path directory_;
  uint64_t limit_;
  mutable std::mutex mutex_;
  std::set<Key> used_;
  StoreCounters counters_;
};

// The file format of an entry. decode() verifies everything; `what` names the file in errors.
std::string encode(const Key& key, const Entry& entry);
Entry decode(const Key& key, std::string_view content, std::string_view what);

}  // namespace fourfold::jit
