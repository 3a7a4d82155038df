#include "model/output_directory.h"

#include <system_error>
#include <utility>
#include <vector>

#include "base/check.h"

namespace fourfold::model {
namespace {

// "config.json" of "config.json.tmp.123", the name that a file has while it is written; empty for other names.
std::string written_name(const std::string& name) {
  const size_t at = name.rfind(".tmp.");
  if (at == std::string::npos || name.find_first_not_of("0123456789", at + 5) != std::string::npos) return "";
  return name.substr(0, at);
}

}  // namespace

OutputDirectory::OutputDirectory(std::filesystem::path path, const char* journal, std::string_view work)
    : path_(std::move(path)),
      journal_(journal),
      created_(path_),
      lock_(path_),
      unfinished_(file_exists(path_ / journal_)) {
  namespace fs = std::filesystem;
  std::error_code error;
  std::vector<fs::path> leftovers;
  bool empty = true;
  for (fs::directory_iterator it(path_, error), end; !error && it != end; it.increment(error)) {
    const std::string written = written_name(it->path().filename().string());
    if (written == journal_ || (unfinished_ && !written.empty())) {
      leftovers.push_back(it->path());
    } else {
      empty = false;
    }
  }
  if (error) fail("cannot list {}: {}", path_.string(), error.message());
  if (!empty && !unfinished_) {
    fail("{} is not empty and holds no unfinished {}; wanted a new or an empty directory", path_.string(), work);
  }
  for (const fs::path& leftover : leftovers) fs::remove(leftover, error);
}

}  // namespace fourfold::model
