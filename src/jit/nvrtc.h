// NVRTC, NVIDIA's run-time compiler, opened at run time: the binary builds and runs without a CUDA toolkit, and
// compiles kernels where one is (no GPU or driver needed).
#pragma once

#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "jit/library.h"

namespace fourfold::jit {

// A source and everything it includes. Include names are as written in #include "...".
struct SourceSet {
  std::string name;  // of the main source, for messages
  std::string text;
  std::vector<std::pair<std::string, std::string>> headers;
};

struct CompileRequest {
  SourceSet sources;
  std::string arch;                      // "sm_90a"
  std::vector<std::string> flags;        // besides the architecture and the language standard
  std::vector<std::string> expressions;  // names of kernels as C++ writes them: "fourfold::moe::moe_stream<...>"
};

struct CompileResult {
  std::string cubin;
  std::string log;
  std::map<std::string, std::string> lowered;  // expression -> mangled name
};

class Nvrtc {
 public:
  // The library, or null; *why then says what was tried. Looks at FOURFOLD_NVRTC (a file), the system's libraries,
  // CUDA_HOME and /usr/local/cuda, and the PyPI package (nvidia-cuda-nvrtc) in the active virtual environment, in the
  // user's site-packages and in the kernel cache's own folder. Opened once.
  static const Nvrtc* find(std::string* why);
  // The library, or an Error that says how to get one.
  static const Nvrtc& get();

  // The few functions of nvrtc.h that are used; names and types are the library's ABI.
  struct Functions {
    const char* (*error_string)(int result);
    int (*version)(int* major, int* minor);
    int (*count_archs)(int* count);
    int (*archs)(int* archs);
    int (*create)(void** program, const char* source, const char* name, int headers, const char* const* texts,
                  const char* const* names);
    int (*destroy)(void** program);
    int (*compile)(void* program, int options, const char* const* values);
    int (*cubin_size)(void* program, size_t*);
    int (*cubin)(void* program, char*);
    int (*log_size)(void* program, size_t*);
    int (*log)(void* program, char*);
    int (*add_name)(void* program, const char* expression);
    int (*lowered_name)(void* program, const char* expression, const char** name);
  };
  // For tests: what find() gives from then on is a compiler of these functions, whatever the machine has.
  static void substitute(const Functions& functions);

  int major() const { return major_; }
  int minor() const { return minor_; }
  std::string version() const;  // "nvrtc 13.0"
  const std::filesystem::path& path() const { return path_; }
  bool supports(std::string_view arch) const;

  // Thread-safe. Error with the compiler's log when the source does not compile, or when the architecture is unknown to
  // this NVRTC.
  CompileResult compile(const CompileRequest& request) const;

 private:
  Nvrtc(const Functions& functions, std::filesystem::path path);
  std::filesystem::path path_;
  // They stay open as long as their functions are used; builtins_ where the system would not find them by itself.
  std::optional<SharedLibrary> library_, builtins_;
  Functions call_;
  int major_ = 0, minor_ = 0;
  std::vector<int> archs_;
};

// Where Nvrtc::find() looks, in order.
std::vector<std::filesystem::path> nvrtc_candidates();

}  // namespace fourfold::jit
