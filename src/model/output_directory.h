// The directory that a long run writes a checkpoint into: new or empty, or left by a run of the same kind that was
// killed, and for one process at a time.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <string_view>

#include "base/file.h"

namespace fourfold::model {

class OutputDirectory {
 public:
  // `journal` is the file that a run of this kind keeps in the directory until it is done, `work` what an Error calls
  // such a run ("quantisation"). Creates the directory as needed, locks it, and removes the temporary files of a run
  // that was killed. An Error where the directory holds anything and no journal. Where nothing was written, the
  // directory goes with this object if it came with it.
  OutputDirectory(std::filesystem::path path, const char* journal, std::string_view work);

  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path journal() const { return path_ / journal_; }
  bool unfinished() const { return unfinished_; }  // there was a journal

 private:
  std::filesystem::path path_;
  std::string journal_;
  CreatedDirectory created_;
  DirectoryLock lock_;
  bool unfinished_;
};

}  // namespace fourfold::model
