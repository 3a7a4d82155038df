#include "jit/nvrtc.h"

#include <algorithm>
#include <cstdlib>
#include <mutex>

#include "base/env.h"
#include "jit/store.h"

namespace fourfold::jit {
namespace fs = std::filesystem;

using Program = void*;

namespace {

// The PyPI packages keep the library in nvidia/cuda_nvrtc/lib (CUDA 12) or nvidia/cu13/lib.
void add_site_packages(const fs::path& site, std::vector<fs::path>* out) {
  for (const char* folder : {"nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"}) {
    for (const char* name : {"libnvrtc.so.13", "libnvrtc.so.12"}) {
      std::error_code ignored;
      if (fs::exists(site / folder / name, ignored)) out->push_back(site / folder / name);
    }
  }
}

}  // namespace

std::vector<fs::path> nvrtc_candidates() {
  if (const auto file = env("FOURFOLD_NVRTC")) return {*file};  // asked for by name: nothing else will do
  std::vector<fs::path> list;
  const auto add_toolkit = [&](const fs::path& root) {
    std::error_code ignored;
    for (const fs::path& folder : toolkit_folders(root)) {
      for (const char* name : {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"}) {
        if (fs::exists(folder / name, ignored)) list.push_back(folder / name);
      }
    }
  };
  if (const auto home = env("CUDA_HOME")) add_toolkit(*home);
  list.insert(list.end(), {"libnvrtc.so.13", "libnvrtc.so.12"});
  add_toolkit("/usr/local/cuda");
  for (const fs::path& site : site_packages()) add_site_packages(site, &list);
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

namespace {

Nvrtc::Functions functions_of(const SharedLibrary& library) {
  Nvrtc::Functions call = {};
  library.load("nvrtcGetErrorString", &call.error_string);
  library.load("nvrtcVersion", &call.version);
  library.load("nvrtcGetNumSupportedArchs", &call.count_archs);
  library.load("nvrtcGetSupportedArchs", &call.archs);
  library.load("nvrtcCreateProgram", &call.create);
  library.load("nvrtcDestroyProgram", &call.destroy);
  library.load("nvrtcCompileProgram", &call.compile);
  library.load("nvrtcGetCUBINSize", &call.cubin_size);
  library.load("nvrtcGetCUBIN", &call.cubin);
  library.load("nvrtcGetProgramLogSize", &call.log_size);
  library.load("nvrtcGetProgramLog", &call.log);
  library.load("nvrtcAddNameExpression", &call.add_name);
  library.load("nvrtcGetLoweredName", &call.lowered_name);
  return call;
}

// In place of the machine's own.
std::unique_ptr<Nvrtc>& substituted() {
  static std::unique_ptr<Nvrtc> nvrtc;
  return nvrtc;
}

}  // namespace

Nvrtc::Nvrtc(const Functions& functions, fs::path path) : path_(std::move(path)), call_(functions) {
  int count = 0;
  if (call_.version(&major_, &minor_) != 0 || call_.count_archs(&count) != 0 || count < 0 || count > 1000) {
    fail("{}: does not tell its version", path_.string());
  }
  archs_.resize(static_cast<size_t>(count));
  if (count > 0 && call_.archs(archs_.data()) != 0) fail("{}: does not list its architectures", path_.string());
}

void Nvrtc::substitute(const Functions& functions) { substituted().reset(new Nvrtc(functions, "of a test")); }

const Nvrtc* Nvrtc::find(std::string* why) {
  if (substituted() != nullptr) return substituted().get();
  struct Found {
    std::unique_ptr<Nvrtc> nvrtc;
    std::string tried;
  };
  static const Found found = [] {
    Found f;
    if (auto library = SharedLibrary::open(nvrtc_candidates(), &f.tried)) {
      f.nvrtc.reset(new Nvrtc(functions_of(*library), library->path()));
      f.nvrtc->builtins_ = open_builtins(library->path());
      f.nvrtc->library_ = std::move(*library);
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
    if (result != 0) fail("{}: {} failed: {}", sources.name, step, call_.error_string(result));
  };
  Program program = nullptr;
  check(call_.create(&program, sources.text.c_str(), sources.name.c_str(), static_cast<int>(names.size()), texts.data(),
                     names.data()),
        "nvrtcCreateProgram");
  struct Guard {
    const Functions* call;
    Program program;
    ~Guard() { call->destroy(&program); }
  } guard{&call_, program};
  for (const std::string& expression : request.expressions) {
    check(call_.add_name(program, expression.c_str()), "nvrtcAddNameExpression");
  }
  const int status = call_.compile(program, static_cast<int>(options.size()), options.data());
  CompileResult result;
  size_t size = 0;
  check(call_.log_size(program, &size), "nvrtcGetProgramLogSize");
  if (size > 1) {
    result.log.resize(size);
    check(call_.log(program, result.log.data()), "nvrtcGetProgramLog");
    while (!result.log.empty() && result.log.back() == '\0') result.log.pop_back();
  }
  if (status != 0) {
    fail("{} does not compile for {} with {}: {}\n{}", sources.name, request.arch, version(),
         call_.error_string(status), result.log);
  }
  check(call_.cubin_size(program, &size), "nvrtcGetCUBINSize");
  result.cubin.resize(size);
  check(call_.cubin(program, result.cubin.data()), "nvrtcGetCUBIN");
  for (const std::string& expression : request.expressions) {
    const char* name = nullptr;
    check(call_.lowered_name(program, expression.c_str(), &name), "nvrtcGetLoweredName");
    result.lowered[expression] = name;
  }
  return result;
}

}  // namespace fourfold::jit
