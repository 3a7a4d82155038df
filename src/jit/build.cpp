#include "jit/build.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "base/progress.h"
#include "base/threads.h"
#include "jit/sources.h"

namespace fourfold::jit {

KernelRequest make_request(std::string name, std::string text, std::string_view arch,
                           std::vector<std::string> expressions, const std::vector<std::string>& definitions) {
  CompileRequest request;
  request.sources = with_embedded(name, std::move(text));
  request.arch = arch;
  request.flags = {"--device-as-default-execution-space"};
  for (const std::string& definition : definitions) request.flags.push_back("-D" + definition);
  request.expressions = std::move(expressions);
  return {std::move(name), std::move(request)};
}

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

bool serialized_in(std::string_view log) {
  return log.find("wgmma.mma_async instructions are serialized") != std::string_view::npos;
}

std::string refusal_of(const Entry& entry) {
  return entry.serialized ? "the compiler serialises its multiplications" : "";
}

namespace {

// The compiler whose kernels are wanted. Keys hold its version, so on a machine without one (the store was imported
// from a pack) it is the version that made the entries of the store; of several, one that has everything that is asked
// for.
std::string compiler_version(KernelStore& store, const std::vector<KernelRequest>& requests) {
  if (const Nvrtc* nvrtc = Nvrtc::find(nullptr)) return nvrtc->version();
  std::set<std::string> versions;
  const std::vector<Key> keys = store.keys();
  for (const Key& key : keys) {
    if (const auto entry = store.load(key)) versions.insert(entry->compiler);
  }
  for (const std::string& version : versions) {
    if (std::all_of(requests.begin(), requests.end(), [&](const KernelRequest& request) {
          return std::find(keys.begin(), keys.end(), key_of(request.compile, version)) != keys.end();
        })) {
      return version;
    }
  }
  return Nvrtc::get().version();  // which says what was looked for
}

}  // namespace

std::vector<BuiltKernel> build(KernelStore& store, const std::vector<KernelRequest>& requests,
                               const BuildOptions& options) {
  if (requests.empty()) return {};
  const std::string compiler = compiler_version(store, requests);
  std::vector<BuiltKernel> built(requests.size());
  std::map<Key, size_t> first;
  std::vector<size_t> work;
  for (size_t i = 0; i < requests.size(); ++i) {
    built[i].name = requests[i].name;
    built[i].key = key_of(requests[i].compile, compiler);
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
          CompileResult result = Nvrtc::get().compile(request);
          kernel.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
          kernel.compiled = true;
          kernel.entry = {.name = requests[i].name,
                          .arch = request.arch,
                          .compiler = compiler,
                          .lowered = std::move(result.lowered),
                          .spill_bytes = spill_bytes_in(result.log),
                          .serialized = serialized_in(result.log),
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
