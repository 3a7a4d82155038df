#include "cmd/options.h"

#include "base/check.h"
#include "base/file.h"
#include "cmd/arguments.h"
#include "jit/store.h"

namespace fourfold::cmd {

std::string read_input(const std::string& path, uint64_t limit) {
  return path == "-" ? read_standard_input(limit) : read_file(path, limit);
}

void GpuOptions::add_to(Command& command) {
  command.add_option("--device", device, "Number of the GPU").show_default().range(0, 63);
  add_store_option(command, store);
  command.add_option("--replays", replays, "Timed replays; the median counts").show_default().range(1, 1000);
  command.add_option("--threads", threads, "Compilations at a time (default: the processors)").range(0, 1024);
}

std::filesystem::path GpuOptions::store_directory() const { return cmd::store_directory(store); }

void add_store_option(Command& command, std::string& store) {
  command.add_option("--store", store, "Directory of compiled kernels (default: FOURFOLD_KERNELS or the cache)");
}

std::filesystem::path store_directory(const std::string& store) {
  return store.empty() ? jit::default_store_directory() : std::filesystem::path(store);
}

}  // namespace fourfold::cmd
