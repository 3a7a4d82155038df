#include "jit/nvrtc.h"

#include <algorithm>
#include <cstdlib>
#include <mutex>

#include "base/env.h"
#include "jit/store.h"

namespace fourfold::jit {
namespace fs = std::filesystem;

// The few declarations of nvrtc.h that are used, written out: names and types are the library's ABI.
using Program = void*;
struct Nvrtc::Functions {
  const char* (*error_string)(int result);
  int (*version)(int* major, int* minor);
  int (*count_archs)(int* count);
  int (*archs)(int* archs);
  int (*create)(Program*, const char* source, const char* name, int headers, const char* const* texts,
                const char* const* names);
  int (*destroy)(Program*);
  int (*compile)(Program, int options, const char* const* values);
  int (*cubin_size)(Program, size_t*);
  int (*cubin)(Program, char*);
  int (*log_size)(Program, size_t*);
  int (*log)(Program, char*);
  int (*add_name)(Program, const char* expression);
  int (*lowered_name)(Program, const char* expression, const char** name);
};

namespace {

// Where a toolkit keeps its libraries: `lib64` is missing where it was made to cross-compile, or for several systems.
#if defined(__aarch64__)
constexpr const char* kToolkitFolders[] = {"lib64", "lib", "targets/sbsa-linux/lib", "targets/aarch64-linux/lib"};
#else
constexpr const char* kToolkitFolders[] = {"lib64", "lib", "targets/x86_64-linux/lib"};
#endif

// The PyPI packages keep the library in nvidia/cuda_nvrtc/lib (CUDA 12) or nvidia/cu13/lib.
void add_site_packages(const fs::path& site, std::vector<fs::path>* out) {
  for (const char* folder : {"nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"}) {
    for (const char* name : {"libnvrtc.so.13", "libnvrtc.so.12"}) {
      std::error_code ignored;
      if (fs::exists(site / folder / name, ignored)) out->push_back(site / folder / name);
    }
  }
}

// PREFIX/lib/python3.X/site-packages for every X that exists.
void add_prefix(const fs::path& prefix, std::vector<fs::path>* out) {
  std::error_code ignored;
  for (fs::directory_iterator it(prefix / "lib", ignored), end; !ignored && it != end; it.increment(ignored)) {
    if (it->path().filename().string().starts_with("python3")) add_site_packages(it->path() / "site-packages", out);
  }
}

}  // namespace

std::vector<fs::path> nvrtc_candidates() {
  if (const auto file = env("FOURFOLD_NVRTC")) return {*file};  // asked for by name: nothing else will do
  std::vector<fs::path> list;
  const auto add_toolkit = [&](const fs::path& root) {
    std::error_code ignored;
    for (const char* folder : kToolkitFolders) {
      for (const char* name : {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"}) {
        if (fs::exists(root / folder / name, ignored)) list.push_back(root / folder / name);
      }
    }
  };
  if (const auto home = env("CUDA_HOME")) add_toolkit(*home);
  list.insert(list.end(), {"libnvrtc.so.13", "libnvrtc.so.12"});
  add_toolkit("/usr/local/cuda");
  if (const auto venv = env("VIRTUAL_ENV")) add_prefix(*venv, &list);
  if (const auto home = env("HOME")) add_prefix(fs::path(*home) / ".local", &list);
  add_site_packages(cache_directory() / "nvrtc", &list);
  return list;
}

namespace {

// NVRTC opens its companion libnvrtc-builtins by bare name, which the system finds for an installed toolkit but not
// beside a PyPI package. One that is loaded already is found by its name, so it is loaded from NVRTC's own directory
// first.
std::optional<SharedLibrary> open_builtins(const fs::path& nvrtc) {
  std::error_code ignored;
  const fs::path directory = fs::canonical(nvrtc, ignored).parent_path();
  std::vector<fs::path> found;
  for (fs::directory_iterator it(directory, ignored), end; !ignored && it != end; it.increment(ignored)) {
    if (it->path().filename().string().starts_with("libnvrtc-builtins.so.")) found.push_back(it->path());
  }
  std::string tried;
  return nvrtc.has_parent_path() ? SharedLibrary::open(found, &tried) : std::nullopt;
}

}  // namespace

Nvrtc::Nvrtc(SharedLibrary library) : library_(std::move(library)), builtins_(open_builtins(library_.path())) {
  auto call = std::make_shared<Functions>();
  library_.load("nvrtcGetErrorString", &call->error_string);
  library_.load("nvrtcVersion", &call->version);
  library_.load("nvrtcGetNumSupportedArchs", &call->count_archs);
  library_.load("nvrtcGetSupportedArchs", &call->archs);
  library_.load("nvrtcCreateProgram", &call->create);
  library_.load("nvrtcDestroyProgram", &call->destroy);
  library_.load("nvrtcCompileProgram", &call->compile);
  library_.load("nvrtcGetCUBINSize", &call->cubin_size);
  library_.load("nvrtcGetCUBIN", &call->cubin);
  library_.load("nvrtcGetProgramLogSize", &call->log_size);
  library_.load("nvrtcGetProgramLog", &call->log);
  library_.load("nvrtcAddNameExpression", &call->add_name);
  library_.load("nvrtcGetLoweredName", &call->lowered_name);
  int count = 0;
  if (call->version(&major_, &minor_) != 0 || call->count_archs(&count) != 0 || count < 0 || count > 1000) {
    fail("{}: does not tell its version", library_.path().string());
  }
  archs_.resize(static_cast<size_t>(count));
  if (count > 0 && call->archs(archs_.data()) != 0)
    fail("{}: does not list its architectures", library_.path().string());
  call_ = std::move(call);
}

const Nvrtc* Nvrtc::find(std::string* why) {
  struct Found {
    std::unique_ptr<Nvrtc> nvrtc;
    std::string tried;
  };
  static const Found found = [] {
    Found f;
    if (auto library = SharedLibrary::open(nvrtc_candidates(), &f.tried)) {
      f.nvrtc.reset(new Nvrtc(std::move(*library)));
    }
    return f;
  }();
  if (found.nvrtc == nullptr && why != nullptr) *why = found.tried;
  return found.nvrtc.get();
}

const Nvrtc& Nvrtc::get() {
  std::string why;
  const Nvrtc* nvrtc = find(&why);
  if (nvrtc == nullptr) {
    fail(
        "no NVRTC (libnvrtc.so, CUDA's run-time compiler) found; wanted a CUDA 12 or 13 toolkit, FOURFOLD_NVRTC=FILE, "
        "or its PyPI package (./fourfold get-nvrtc, or pip install --target {} nvidia-cuda-nvrtc). Tried:{}",
        (cache_directory() / "nvrtc").string(), why);
  }
  return *nvrtc;
}

std::string Nvrtc::version() const { return fmt::format("nvrtc {}.{}", major_, minor_); }

bool Nvrtc::supports(std::string_view arch) const {
  if (!arch.starts_with("sm_")) return false;
  return std::find(archs_.begin(), archs_.end(), std::atoi(std::string(arch.substr(3)).c_str())) != archs_.end();
}

CompileResult Nvrtc::compile(const CompileRequest& request) const {
  if (!supports(request.arch)) {
    fail("{} ({}) cannot compile for {}; wanted a newer CUDA toolkit", version(), path().string(),
         printable(request.arch));
  }
  const SourceSet& sources = request.sources;
  std::vector<const char*> texts, names, options;
  for (const auto& [name, text] : sources.headers) {
    names.push_back(name.c_str());
    texts.push_back(text.c_str());
  }
  const std::string arch = "--gpu-architecture=" + request.arch;
  options = {arch.c_str(), "--std=c++20", "--ptxas-options=-v"};
  for (const std::string& flag : request.flags) options.push_back(flag.c_str());

  const auto check = [&](int result, const char* step) {
    if (result != 0) fail("{}: {} failed: {}", sources.name, step, call_->error_string(result));
  };
  Program program = nullptr;
  check(call_->create(&program, sources.text.c_str(), sources.name.c_str(), static_cast<int>(names.size()),
                      texts.data(), names.data()),
        "nvrtcCreateProgram");
  struct Guard {
    const Functions* call;
    Program program;
    ~Guard() { call->destroy(&program); }
  } guard{call_.get(), program};
  for (const std::string& expression : request.expressions) {
    check(call_->add_name(program, expression.c_str()), "nvrtcAddNameExpression");
  }
  const int status = call_->compile(program, static_cast<int>(options.size()), options.data());
  CompileResult result;
  size_t size = 0;
  check(call_->log_size(program, &size), "nvrtcGetProgramLogSize");
  if (size > 1) {
    result.log.resize(size);
    check(call_->log(program, result.log.data()), "nvrtcGetProgramLog");
    while (!result.log.empty() && result.log.back() == '\0') result.log.pop_back();
  }
  if (status != 0) {
    fail("{} does not compile for {} with {}: {}\n{}", sources.name, request.arch, version(),
         call_->error_string(status), result.log);
  }
  check(call_->cubin_size(program, &size), "nvrtcGetCUBINSize");
  result.cubin.resize(size);
  check(call_->cubin(program, result.cubin.data()), "nvrtcGetCUBIN");
  for (const std::string& expression : request.expressions) {
    const char* name = nullptr;
    check(call_->lowered_name(program, expression.c_str(), &name), "nvrtcGetLoweredName");
    result.lowered[expression] = name;
  }
  return result;
}

}  // namespace fourfold::jit
