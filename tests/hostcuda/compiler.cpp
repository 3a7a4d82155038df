// The compiler: what NVRTC would be asked for is looked up among what the build has compiled. A "cubin" is an ELF file
// with a name table and nothing in it but the source text.
#include <fmt/format.h>

#include <cstring>
#include <map>

#include "hostcuda/compiler.h"
#include "hostcuda/registry.h"

namespace fourfold::hostcuda {
namespace {

constexpr size_t kHeader = 64;  // of the file, and of a section
constexpr uint16_t kMachineCuda = 190;
constexpr int kCompilationFailed = 6;  // NVRTC_ERROR_COMPILATION

std::map<std::string, std::map<std::string, HostKernel>>& sources() {
  static std::map<std::string, std::map<std::string, HostKernel>> all;
  return all;
}

struct Program {
  std::string text, log, cubin;
  std::vector<std::string> expressions;
};
Program* of(void* program) { return static_cast<Program*>(program); }

std::string cubin_of(const std::string& text) {
  std::string bytes(2 * kHeader, '\0');
  const auto put = [&](size_t at, auto value) { std::memcpy(bytes.data() + at, &value, sizeof(value)); };
  std::memcpy(bytes.data(),
              "\x7f"
              "ELF\x02\x01",
              6);
  put(18, kMachineCuda);
  put(40, uint64_t{kHeader});  // section headers: one, whose name is empty
  put(58, static_cast<uint16_t>(kHeader));
  put(60, uint16_t{1});
  put(kHeader + 4, uint32_t{3});  // a string table, behind its header
  put(kHeader + 24, uint64_t{2 * kHeader});
  put(kHeader + 32, static_cast<uint64_t>(text.size() + 2));
  return bytes + '\0' + text + '\0';
}

std::string sound(const std::string& text) { return text.substr(0, text.find("// broken: ")); }

}  // namespace

HostModule::HostModule(const std::string& text, std::vector<HostKernel> kernels) {
  for (HostKernel& kernel : kernels) {
    std::string name = kernel.expression;
    sources()[text].emplace(std::move(name), std::move(kernel));
  }
}

bool knows_source(const std::string& text) { return sources().contains(sound(text)); }

// What a source has besides its broken kernel is sound.
const HostKernel* find_kernel(const std::string& text, const std::string& expression) {
  for (const std::string& each : {text, sound(text)}) {
    const auto source = sources().find(each);
    if (source == sources().end()) continue;
    const auto kernel = source->second.find(expression);
    if (kernel != source->second.end()) return &kernel->second;
  }
  return nullptr;
}

const char* text_of_cubin(const void* image) { return static_cast<const char*>(image) + 2 * kHeader + 1; }

jit::Nvrtc::Functions compiler_functions() {
  jit::Nvrtc::Functions call = {};
  call.error_string = [](int) { return "the host has no such kernels"; };
  call.version = [](int* major, int* minor) {
    *major = 1;
    *minor = 0;
    return 0;
  };
  static constexpr int kArchs[] = {80, 89, 90, 100, 120, 121};
  call.count_archs = [](int* count) {
    *count = static_cast<int>(std::size(kArchs));
    return 0;
  };
  call.archs = [](int* archs) {
    std::memcpy(archs, kArchs, sizeof(kArchs));
    return 0;
  };
  call.create = [](void** program, const char* source, const char*, int, const char* const*, const char* const*) {
    *program = new Program{source, {}, {}, {}};
    return 0;
  };
  call.destroy = [](void** program) {
    delete of(*program);
    *program = nullptr;
    return 0;
  };
  call.add_name = [](void* program, const char* expression) {
    of(program)->expressions.emplace_back(expression);
    return 0;
  };
  call.compile = [](void* program, int, const char* const*) {
    Program& p = *of(program);
    for (const std::string& expression : p.expressions) {
      if (find_kernel(p.text, expression) != nullptr) continue;
      p.log = fmt::format("tests/hostcuda/generate.cpp does not list {} of this source:\n{}", expression, p.text);
      return kCompilationFailed;
    }
    p.cubin = cubin_of(p.text);
    return 0;
  };
  call.cubin_size = [](void* program, size_t* size) {
    *size = of(program)->cubin.size();
    return 0;
  };
  call.cubin = [](void* program, char* out) {
    std::memcpy(out, of(program)->cubin.data(), of(program)->cubin.size());
    return 0;
  };
  call.log_size = [](void* program, size_t* size) {
    *size = of(program)->log.size() + 1;
    return 0;
  };
  call.log = [](void* program, char* out) {
    std::memcpy(out, of(program)->log.c_str(), of(program)->log.size() + 1);
    return 0;
  };
  call.lowered_name = [](void* program, const char* expression, const char** name) {
    for (const std::string& e : of(program)->expressions) {
      if (e == expression) *name = e.c_str();
    }
    return 0;
  };
  return call;
}

}  // namespace fourfold::hostcuda
