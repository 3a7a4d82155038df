#include "cmd/options.h"

#include <system_error>

#include "base/check.h"
#include "base/file.h"
#include "cmd/arguments.h"
#include "jit/store.h"

namespace fourfold::cmd {

bool is_stream(const std::filesystem::path& path) {
  std::error_code error;
  const std::filesystem::file_status status = std::filesystem::status(path, error);
  return std::filesystem::is_fifo(status) || std::filesystem::is_character_file(status);
}

std::string read_input(const std::string& path, uint64_t limit) {
  if (path == "-") return read_standard_input(limit);
  return is_stream(path) ? read_stream(path, limit) : read_file(path, limit);
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
