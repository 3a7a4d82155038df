// A shared library opened at run time.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "base/check.h"

namespace fourfold::jit {

class SharedLibrary {
 public:
  // Opens the first of the candidates that loads (a bare name is searched by the system); nothing when none does, with
  // what was tried and why in *tried.
  static std::optional<SharedLibrary> open(const std::vector<std::filesystem::path>& candidates, std::string* tried);

  SharedLibrary(SharedLibrary&& other) noexcept;
  SharedLibrary& operator=(SharedLibrary&& other) noexcept;
  SharedLibrary(const SharedLibrary&) = delete;
  SharedLibrary& operator=(const SharedLibrary&) = delete;
  ~SharedLibrary();

  const std::filesystem::path& path() const { return path_; }

  // Loads a function into *pointer; Error, naming the library, when it has none of that name.
  template <typename F>
  void load(const char* name, F** pointer) const {
    *pointer = reinterpret_cast<F*>(symbol(name));
    if (*pointer == nullptr) fail("{} has no function {}: wanted a CUDA 12 or 13 library", path_.string(), name);
  }

 private:
  SharedLibrary(void* handle, std::filesystem::path path) : handle_(handle), path_(std::move(path)) {}
  void* symbol(const char* name) const;
  void* handle_ = nullptr;
  std::filesystem::path path_;
};

// Where a CUDA toolkit keeps its libraries.
std::vector<std::filesystem::path> toolkit_folders(const std::filesystem::path& toolkit);

// Folders in which pip has installed packages: of the active virtual environment, then of the user.
std::vector<std::filesystem::path> site_packages();

}  // namespace fourfold::jit
