#include "chat/model_directory.h"

#include <algorithm>
#include <chrono>
#include <system_error>

#include "base/check.h"
#include "base/env.h"
#include "model/checkpoint.h"

namespace fourfold::chat {

namespace fs = std::filesystem;

fs::path default_model_directory() {
  if (const auto directory = env("FOURFOLD_MODEL")) return *directory;
  std::error_code error;
  const fs::path executable = fs::read_symlink("/proc/self/exe", error);
  if (!error) {
    // PREFIX/bin/fourfold, or build/PRESET/bin/fourfold in the source tree.
    fs::path root = executable.parent_path();
    for (int level = 0; level < 4 && root.has_relative_path(); ++level) {
      root = root.parent_path();
      for (const char* place : {"share/fourfold/models/demo", "models/demo"}) {
        if (fs::is_regular_file(root / place / "config.json", error)) return root / place;
      }
    }
  }
  fail(
      "the demo model is neither in ../share/fourfold/models/demo beside {} nor in models/demo of the source tree; "
      "name a checkpoint directory or set FOURFOLD_MODEL",
      executable.empty() ? "the executable" : executable.string());
}

std::string model_name(const fs::path& directory) {
  std::error_code error;
  const fs::path absolute = fs::absolute(directory, error).lexically_normal();
  if (error) return directory.string();
  return (absolute.has_filename() ? absolute : absolute.parent_path()).filename().string();
}

LoadedModel load_model(const fs::path& directory, const BackendFactory& make_backend, model::ModelOptions options,
                       const model::RankOptions& ranks) {
  const auto begin = std::chrono::steady_clock::now();
  model::Checkpoint checkpoint(directory);
  LoadedModel loaded;
  loaded.name = model_name(directory);
  for (const model::SafetensorsFile& shard : checkpoint.shards()) loaded.weight_bytes += shard.bytes();
  BackendRequest request;
  request.weight_bytes = loaded.weight_bytes;
  const auto backend = [&](const std::shared_ptr<ranks::Member>& member) {
    BackendRequest of_rank = request;
    of_rank.member = member;
    return make_backend(of_rank);
  };
  try {
    loaded.model = model::load_model(checkpoint, backend, ranks, options);
  } catch (const Error& error) {
    if (ranks.ranks > 1) throw;
    request.refused = &error;
    const std::shared_ptr<ops::Backend> other = make_backend(request);
    if (other == nullptr) throw;
    model::Checkpoint again(directory);  // the first one has given weights back
    loaded.model = model::load_model(again, other, std::move(options));
  }
  loaded.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return loaded;
}

int64_t choose_context(int64_t asked, int64_t max_positions, std::string_view option) {
  if (asked > max_positions) fail("{} is {}, the model has {} positions", option, asked, max_positions);
  return asked > 0 ? asked : std::min(kDefaultContext, max_positions);
}

}  // namespace fourfold::chat
