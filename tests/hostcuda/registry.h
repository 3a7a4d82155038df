// Kernels that a host compiler has compiled, by the source text that NVRTC would have been given. Written for the files
// that generate.cpp makes; included by device code (executor/cuda.h).
#pragma once

#include <cstddef>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace fourfold::hostcuda {

struct HostKernel {
  std::string expression;          // as C++ names it
  std::vector<std::size_t> sizes;  // of its arguments
  void (*run)(void** arguments);   // one thread of it
};

// Kernels of one source text, which may be several times in the list with other kernels. Objects of this type are
// static: they register themselves.
struct HostModule {
  HostModule(const std::string& text, std::vector<HostKernel> kernels);
};

// Null where there is no such kernel.
const HostKernel* find_kernel(const std::string& text, const std::string& expression);
bool knows_source(const std::string& text);

template <auto Function>
struct Invoke;
template <typename... Args, void (*Function)(Args...)>
struct Invoke<Function> {
  static std::vector<std::size_t> sizes() { return {sizeof(std::remove_cvref_t<Args>)...}; }
  static void run(void** arguments) {
    [&]<std::size_t... I>(std::index_sequence<I...>) {
      Function(*static_cast<const std::remove_cvref_t<Args>*>(arguments[I])...);
    }
    (std::index_sequence_for<Args...>());
  }
};

template <auto Function>
HostKernel host_kernel(const char* expression) {
  return {expression, Invoke<Function>::sizes(), &Invoke<Function>::run};
}

}  // namespace fourfold::hostcuda
