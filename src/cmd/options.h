// What several commands have in common: a file or standard input, and the options of commands
// that run kernels on a GPU.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "cmd/arguments.h"

namespace fourfold::cmd {

// The file named `path`, or standard input for "-"; at most `limit` bytes.
std::string read_input(const std::string& path, uint64_t limit);

// --device, --store, --replays, --threads
struct GpuOptions {
  std::string store = {};  // empty: the default directory
  int device = 0, replays = 15, threads = 0;

  void add_to(Command& command);
  std::filesystem::path store_directory() const;
};

// --store
void add_store_option(Command& command, std::string& store);
std::filesystem::path store_directory(const std::string& store);

}  // namespace fourfold::cmd
