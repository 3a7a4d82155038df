#include "jit/library.h"

#include <dlfcn.h>

#include <utility>

#include "base/env.h"

namespace fourfold::jit {

std::optional<SharedLibrary> SharedLibrary::open(const std::vector<std::filesystem::path>& candidates,
                                                 std::string* tried) {
  for (const std::filesystem::path& path : candidates) {
    // These libraries keep threads and global state for the life of the process, so they stay mapped when closed.
    if (void* handle = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE))
      return SharedLibrary(handle, path);
    const char* error = ::dlerror();
    *tried += fmt::format("{}{}", tried->empty() ? " " : "; ", printable(error != nullptr ? error : path.c_str(), 300));
  }
  return std::nullopt;
}

SharedLibrary::SharedLibrary(SharedLibrary&& other) noexcept
    : handle_(std::exchange(other.handle_, nullptr)), path_(std::move(other.path_)) {}

SharedLibrary& SharedLibrary::operator=(SharedLibrary&& other) noexcept {
  std::swap(handle_, other.handle_);
  std::swap(path_, other.path_);
  return *this;
}

SharedLibrary::~SharedLibrary() {
  if (handle_ != nullptr) ::dlclose(handle_);
}

void* SharedLibrary::symbol(const char* name) const { return ::dlsym(handle_, name); }

std::vector<std::filesystem::path> toolkit_folders(const std::filesystem::path& toolkit) {
  // `lib64` is missing where it was made to cross-compile, or for several systems.
#if defined(__aarch64__)
  const char* const folders[] = {"lib64", "lib", "targets/sbsa-linux/lib", "targets/aarch64-linux/lib"};
#else
  const char* const folders[] = {"lib64", "lib", "targets/x86_64-linux/lib"};
#endif
  std::vector<std::filesystem::path> list;
  for (const char* folder : folders) list.push_back(toolkit / folder);
  return list;
}

std::vector<std::filesystem::path> site_packages() {
  std::vector<std::filesystem::path> list;
  // PREFIX/lib/python3.X/site-packages for every X that exists.
  const auto add = [&list](const std::filesystem::path& prefix) {
    std::error_code ignored;
    for (std::filesystem::directory_iterator it(prefix / "lib", ignored), end; !ignored && it != end;
         it.increment(ignored)) {
      if (it->path().filename().string().starts_with("python3")) list.push_back(it->path() / "site-packages");
    }
  };
  if (const auto venv = env("VIRTUAL_ENV")) add(*venv);
  if (const auto home = env("HOME")) add(std::filesystem::path(*home) / ".local");
  return list;
}

}  // namespace fourfold::jit
