#include "jit/build.h"

#include <chrono>
#include <cstdlib>
#include <exception>
#include <map>
#include <mutex>
#include <thread>

#include "base/progress.h"
#include "base/threads.h"

namespace fourfold::jit {

int64_t spill_bytes_in(std::string_view log) {
  int64_t total = 0;
  for (const std::string_view unit : {" bytes spill stores", " bytes spill loads"}) {
    for (size_t at = log.find(unit); at != std::string_view::npos; at = log.find(unit, at + 1)) {
      size_t begin = at;
      while (begin > 0 && log[begin - 1] >= '0' && log[begin - 1] <= '9') --begin;
      if (at - begin <= 12) total += std::atoll(std::string(log.substr(begin, at - begin)).c_str());
    }
  }
  return total;
}

std::vector<BuiltKernel> build(KernelStore& store, const std::vector<KernelRequest>& requests,
                               const BuildOptions& options) {
  const Nvrtc& nvrtc = Nvrtc::get();
  std::vector<BuiltKernel> built(requests.size());
  std::map<Key, size_t> first;
  std::vector<size_t> work;
  for (size_t i = 0; i < requests.size(); ++i) {
    built[i].name = requests[i].name;
    built[i].key = key_of(requests[i].compile, nvrtc.version());
    if (first.emplace(built[i].key, i).second) work.push_back(i);
  }

  Progress progress("compiling kernels", work.size(), "kernels", options.progress);
  std::mutex mutex;
  size_t next = 0;
  std::exception_ptr error;
  const auto worker = [&] {
    for (;;) {
      size_t i;
      {
        const std::lock_guard lock(mutex);
        if (next == work.size() || error) return;
        i = work[next++];
      }
      try {
        BuiltKernel& kernel = built[i];
        if (auto entry = store.load(kernel.key)) {
          kernel.entry = std::move(*entry);
        } else {
          const auto start = std::chrono::steady_clock::now();
          const CompileRequest& request = requests[i].compile;
          CompileResult result = nvrtc.compile(request);
          kernel.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
          kernel.compiled = true;
          kernel.entry = {.name = requests[i].name,
                          .arch = request.arch,
                          .compiler = nvrtc.version(),
                          .lowered = std::move(result.lowered),
                          .spill_bytes = spill_bytes_in(result.log),
                          .cubin = std::move(result.cubin),
                          .kernels = {}};
          kernel.entry.kernels = read_cubin(kernel.entry.cubin, requests[i].name);
          store.save(kernel.key, kernel.entry);
        }
        const std::lock_guard lock(mutex);
        progress.advance(1);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!error) error = std::current_exception();
      }
    }
  };
  const int wanted = options.threads > 0 ? options.threads : ThreadPool::default_threads();
  const size_t threads = std::min<size_t>(static_cast<size_t>(wanted), work.size());
  std::vector<std::thread> pool;
  for (size_t t = 1; t < threads; ++t) pool.emplace_back(worker);
  worker();
  for (std::thread& thread : pool) thread.join();
  progress.finish();
  if (error) std::rethrow_exception(error);

  for (size_t i = 0; i < built.size(); ++i) {
    const size_t source = first.at(built[i].key);
    if (source != i) built[i].entry = built[source].entry;
  }
  return built;
}

}  // namespace fourfold::jit
