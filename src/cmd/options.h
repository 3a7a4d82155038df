// What several commands have in common: a file or standard input, and the options of commands
// that run kernels on a GPU.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "cmd/arguments.h"

namespace fourfold::cmd {

// Whether `path` names a pipe or a character device, as /dev/stdin and a shell's <(command) do.
bool is_stream(const std::filesystem::path& path);

// The file or stream named `path`, or standard input for "-"; at most `limit` bytes. Only for what the user names as an
// input: a stream in a checkpoint would be waited for without end.
std::string read_input(const std::string& path, uint64_t limit);

// --context: 0 where it is not given, which chat::choose_context() reads as its default. `help` says of what.
void add_context_option(Command& command, int64_t& context, const std::string& help);

// The token ids of a JSON text: an array of them, or an object with `ids`, as `tokenize` prints them. Each must be an
// integer below `limit`; `name` is what an Error calls the text.
std::vector<int32_t> parse_token_ids(std::string_view text, const std::string& name, int64_t limit);

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
