#include "cmd/options.h"

#include "base/check.h"
#include "base/file.h"
#include "jit/store.h"

namespace fourfold::cmd {

std::string read_input(const std::string& path, uint64_t limit) {
  return path == "-" ? read_standard_input(limit) : read_file(path, limit);
}

CLI::Validator real_range(double low, double high) {
  const std::string range = fmt::format("{:g} to {:g}", low, high);
  return CLI::Validator(
      [=](std::string& text) {
        double value = 0;
        if (CLI::detail::lexical_cast(text, value) && value >= low && value <= high) return std::string();
        return fmt::format("Value {} not in range {}", text, range);
      },
      "FLOAT in [" + range + "]");
}

void GpuOptions::add_to(CLI::App& command) {
  command.add_option("--device", device, "Number of the GPU")->capture_default_str()->check(CLI::Range(0, 63));
  add_store_option(command, store);
  command.add_option("--replays", replays, "Timed replays; the median counts")
      ->capture_default_str()
      ->check(CLI::Range(1, 1000));
  command.add_option("--threads", threads, "Compilations at a time (default: the processors)")
      ->check(CLI::Range(0, 1024));
}

std::filesystem::path GpuOptions::store_directory() const { return cmd::store_directory(store); }

void add_store_option(CLI::App& command, std::string& store) {
  command.add_option("--store", store, "Directory of compiled kernels (default: FOURFOLD_KERNELS or the cache)");
}

std::filesystem::path store_directory(const std::string& store) {
  return store.empty() ? jit::default_store_directory() : std::filesystem::path(store);
}

}  // namespace fourfold::cmd
