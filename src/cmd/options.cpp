#include "cmd/options.h"

#include <system_error>

#include "base/check.h"
#include "base/file.h"
#include "base/json.h"
#include "chat/model_directory.h"
#include "cmd/arguments.h"
#include "jit/store.h"
#include "model/config.h"

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

void add_context_option(Command& command, int64_t& context, const std::string& help) {
  command
      .add_option("--context", context,
                  fmt::format("{} (default: {}, or what the model has)", help, chat::kDefaultContext))
      .range(2, model::kMaxPositions);
}

std::vector<int32_t> parse_token_ids(std::string_view text, const std::string& name, int64_t limit) {
  const Json json = parse_json(text, name);
  const bool object = json.is_object() && json.contains("ids");
  const Json& list = object ? json["ids"] : json;
  if (!list.is_array()) {
    fail("{}: {}{}, wanted a JSON array of token ids, or an object with 'ids'", name, object ? "'ids' is " : "",
         json_kind(list));
  }
  if (list.empty()) fail("{}: no token ids in it, wanted at least one", name);
  std::vector<int32_t> ids;
  ids.reserve(list.size());
  for (const Json& item : list) {
    if (!item.is_number_unsigned() || item.get<uint64_t>() >= static_cast<uint64_t>(limit)) {
      fail("{}: token {} is {}, wanted an integer from 0 to {}", name, ids.size(), printable(item.dump()), limit - 1);
    }
    ids.push_back(item.get<int32_t>());
  }
  return ids;
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
